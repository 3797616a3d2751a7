"""Quantised bytes: which matrices of a model are stored quantised, and in which tensors, from its configuration."""

import re
from collections.abc import Mapping
from math import ceil, prod
from pathlib import Path
from typing import Any, NamedTuple

from zinfer.checkpoint.headers import BITS, TensorInfo
from zinfer.checkpoint.quantization import FP8, STORED_DTYPES, group_size, settings_of
from zinfer.checkpoint.quantized_tensors import QuantizedWeight, TensorFinder
from zinfer.core.model import DTYPE_BYTES, LayerSpec, Matrix, ModelError, text_config

MAX_PATTERN, MAX_PATTERNS = 300, 20_000  # characters of a name or pattern of modules, and their number


class Header(NamedTuple):
    """Type, as safetensors spells it, and shape of a stored tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * BITS[self.dtype] // 8


class Quantization:
    """Quantisation of a model's matrices by its `config`.

    Raises ModelError, without the model's name, as `settings_of` does, and for fields that cannot be understood.
    """

    def __init__(self, config: Mapping[str, Any], dtype: str) -> None:
        self._settings: Mapping[str, Any] = settings_of(config) or {}
        self._method = self._settings.get("quant_method")
        self._model_dtype, self._dtype = dtype, STORED_DTYPES[dtype]
        # DeepSeek V4 names the format of its routed experts beside quantization_config, V4.1 in it.
        self._fp4_experts = "fp4" in (self._settings.get("expert_dtype"), text_config(config).get("expert_dtype"))
        keys = {"compressed-tensors": ("ignore",), "modelopt": ("exclude_modules", "ignore")}
        kept = [
            name
            for key in keys.get(str(self._method), ("modules_to_not_convert",))
            for name in _names(self._settings, key)
        ]
        if self._method == "modelopt":  # names of modules that may have *, and hold others
            kept = ["re:" + re.escape(name).replace(r"\*", ".*") + r"(?:\.|$)" for name in kept]
        self._kept = _Modules(kept, self._method)
        self._groups = [
            (_Modules(_names(group, "targets"), self._method), group)
            for group in (self._settings.get("config_groups") or {}).values()
            if isinstance(group, Mapping) and isinstance(group.get("weights"), Mapping)
        ]
        blocks = self._settings.get("modules_in_block_to_quantize") or ()
        names = [name for block in blocks for name in (block if isinstance(block, list) else [block])]
        self._only = tuple(name for name in names if isinstance(name, str))
        dynamic = self._settings.get("dynamic") if self._method == "gptq" else None
        self._dynamic: list[tuple[_Modules, Any]] = []  # modules, and their fields; None: they stay in 16 bits
        for pattern, fields in dynamic.items() if isinstance(dynamic, Mapping) else ():
            modules = _Modules([f"re:{pattern.removeprefix('-:').removeprefix('+:')}"], "gptq")
            self._dynamic.append((modules, None if pattern.startswith("-:") else fields))

    def headers(self, matrix: Matrix, module: str) -> dict[str, Header] | None:
        """Return the tensors that `matrix` is stored in, if it is quantised.

        `module` is its whole name. The tensors are those of one expert if each has its own.
        """
        rows, columns = matrix.rows, matrix.columns
        if not self._method or 0 in (rows, columns) or self._kept.match(module):
            return None
        together = bool(matrix.experts) and "*" not in matrix.name
        if self._method == "mxfp4":
            if not together or columns % 32:
                return None
            grid = (matrix.experts, rows, columns // 32)
            return {f"{module}_blocks": Header("U8", (*grid, 16)), f"{module}_scales": Header("U8", grid)}
        if together:
            return None
        if self._method == "modelopt":
            return self._modelopt(module, rows, columns)
        if self._method == "fp8":
            name = f"{module}.weight"
            if self._fp4_experts and matrix.experts:
                return _four_bits(rows, columns, name, f"{name}_scale_inv", kinds=("I8", "F8_E8M0"))
            return self._fp8(name, rows, columns)
        if self._method == "compressed-tensors":
            group = next((group for targets, group in self._groups if targets.match(module, "Linear")), None)
            return None if group is None else self._compressed(f"{module}.weight", rows, columns, group)
        return self._columns(module, rows, columns)

    def weight(self, matrix: Matrix, module: str) -> tuple[QuantizedWeight, dict[str, Header]] | None:
        """Return how `matrix` is stored quantised, and its tensors by role."""
        headers = self.headers(matrix, module)
        if headers is None:
            return None
        infos = {name: TensorInfo(Path("config.json"), *header, 0, header.nbytes) for name, header in headers.items()}
        finder = TensorFinder(infos, self._settings, self._model_dtype, (matrix.rows, matrix.columns))
        (weight,) = finder.weights()
        return weight, {role: headers[name] for role, name in weight.parts.items()}

    def layer_bytes(self, layer: LayerSpec, prefix: str, hidden_size: int) -> tuple[int, int]:
        """Return the stored bytes of a decoder layer, and its FP8 codes.

        `prefix` is its name in the model, with a dot behind. Without `LayerSpec.matrices` all of its weights count as
        one matrix.
        """
        size = DTYPE_BYTES[self._model_dtype]
        total, fp8 = layer.parameters * size, 0
        for matrix in layer.matrices or (Matrix("", layer.parameters // hidden_size, hidden_size),):
            headers = self.headers(matrix, prefix + matrix.name.replace("*", "0"))
            if headers is not None:
                times = matrix.experts if "*" in matrix.name else 1
                total += times * sum(header.nbytes for header in headers.values()) - matrix.numel * size
                codes = Header(FP8, (matrix.rows, matrix.columns))
                fp8 += times * sum(header.nbytes for header in headers.values() if header == codes)
        return total, fp8

    def _fp8(self, name: str, rows: int, columns: int) -> dict[str, Header]:
        block = self._settings.get("weight_block_size", [128, 128])
        shape = (1,) if block is None else _blocks(rows, columns, block, "weight_block_size")
        headers = {name: Header("F8_E4M3", (rows, columns)), f"{name}_scale_inv": Header("F32", shape)}
        if self._settings.get("activation_scheme") == "static":
            headers[f"{name.removesuffix('weight')}activation_scale"] = Header("F32", (1,))
        return headers

    def _compressed(self, name: str, rows: int, columns: int, group: Mapping[str, Any]) -> dict[str, Header] | None:
        given, layout = group["weights"], str(group.get("format") or self._settings.get("format"))
        if layout == "dense":
            return None
        if layout in ("nvfp4-pack-quantized", "mxfp4-pack-quantized"):
            whole = f"{name}_global_scale" if layout.startswith("nv") else ""
            return _four_bits(rows, columns, f"{name}_packed", f"{name}_scale", whole)
        bits = _whole(given.get("num_bits", 8), "num_bits")
        strategy, grid = given.get("strategy"), (rows, 1)
        if strategy == "tensor":
            grid = (1, 1)
        elif strategy == "group":
            size = group_size(columns, _whole(given.get("group_size"), "group_size"))
            if not size:
                return None
            grid = (rows, columns // size)
        elif strategy == "block":
            grid = _blocks(rows, columns, given.get("block_structure"), "block_structure")
        scale = Header(self._dtype, (1,) if strategy == "tensor" else grid)
        zeros = not given.get("symmetric", True)
        if layout == "pack-quantized":
            if bits not in (4, 8):
                raise ModelError(f"its weights have {bits} bits by compressed-tensors: zinfer reads 4 and 8")
            headers = {
                f"{name}_packed": Header("I32", (rows, ceil(columns * bits / 32))),
                f"{name}_scale": scale,
                f"{name}_shape": Header("I64", (2,)),
            }
            if zeros:
                headers[f"{name}_zero_point"] = Header("I32", (ceil(rows * bits / 32), grid[1]))
            if given.get("actorder") == "group":
                headers[f"{name}_g_idx"] = Header("I32", (columns,))
            return headers
        kind = "F8_E4M3" if layout == "float-quantized" or given.get("type") == "float" else "I8"
        headers = {name: Header(kind, (rows, columns)), f"{name}_scale": scale}
        return headers | ({f"{name}_zero_point": Header(kind, scale.shape)} if zeros else {})

    def _modelopt(self, module: str, rows: int, columns: int) -> dict[str, Header] | None:
        algorithm, layers = self._settings.get("quant_algo"), self._settings.get("quantized_layers")
        if str(algorithm).upper() == "MIXED_PRECISION":
            layer = layers.get(module) if isinstance(layers, Mapping) else None
            if not isinstance(layer, Mapping):
                return None
            algorithm = layer.get("quant_algo")
        name, kind = f"{module}.weight", str(algorithm).upper()
        if kind in ("NVFP4", "W4A16_NVFP4"):
            return _four_bits(rows, columns, name, f"{name}_scale", f"{name}_scale_2")
        grids = {
            "FP8": (),
            "FP8_PER_CHANNEL_PER_TOKEN": (rows,),
            "MXFP8": (rows, columns // 32),
            "FP8_PB_WO": (ceil(rows / 128), 1, ceil(columns / 128), 1),
        }
        if kind not in grids or (kind == "MXFP8" and columns % 32):
            return None
        scale = Header("U8" if kind == "MXFP8" else "F32", grids[kind])
        return {name: Header("F8_E4M3", (rows, columns)), f"{name}_scale": scale}

    def _columns(self, module: str, rows: int, columns: int) -> dict[str, Header] | None:
        settings = dict(self._settings)
        if self._only and not module.endswith(self._only):
            return None
        for modules, fields in self._dynamic:
            if modules.match(module):
                if not isinstance(fields, Mapping):
                    return None
                settings |= fields
        bits, size = _whole(settings.get("bits"), "bits"), settings.get("group_size", 128)
        if bits not in (4, 8):
            raise ModelError(f"its weights have {bits} bits by {self._method}: zinfer reads 4 and 8")
        per_word, groups = 32 // bits, 1 if size == -1 else ceil(columns / _whole(size, "group_size"))
        gptq = self._method == "gptq"
        if (columns if gptq else rows) % per_word:
            return None
        headers = {
            f"{module}.qweight": Header("I32", (columns // per_word, rows) if gptq else (columns, rows // per_word)),
            f"{module}.qzeros": Header("I32", (groups, ceil(rows / per_word))),
            f"{module}.scales": Header("F16", (groups, rows)),
        }
        return headers | ({f"{module}.g_idx": Header("I32", (columns,))} if gptq else {})


def stored_ratios(
    layers: tuple[LayerSpec, ...], stack: str, hidden_size: int, config: Mapping[str, Any], dtype: str
) -> tuple[float, float]:
    """Return (stored bytes / dense bytes, FP8 share) of decoder layers.

    Stored as a checkpoint of `config` stores them, dense in `dtype`: 1 and 0 if they are not quantised, and 1 at most.
    Raises ModelError as `Quantization` does.
    """
    if settings_of(config) is None:
        return 1.0, 0.0
    rules = Quantization(config, dtype)
    prefix = f"{stack}." if stack else ""
    sizes = [rules.layer_bytes(layer, f"{prefix}{index}.", hidden_size) for index, layer in enumerate(layers)]
    whole = sum(layer.parameters for layer in layers) * DTYPE_BYTES[dtype]
    stored, fp8 = (sum(size) / whole for size in zip(*sizes, strict=True))
    return min(1.0, stored), fp8


def _names(settings: Mapping[str, Any], key: str) -> list[str]:
    names = settings.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelError(f"quantization_config.{key} is no list of names")
    return names


def _four_bits(
    rows: int, columns: int, codes: str, scale: str, whole: str = "", kinds: tuple[str, str] = ("U8", "U8")
) -> dict[str, Header] | None:
    """Return the tensors of 4-bit floats. With `whole`, the scales have one scale."""
    size = 16 if whole else 32
    if columns % size:
        return None
    headers = {codes: Header(kinds[0], (rows, columns // 2))}
    headers[scale] = Header("F8_E4M3" if whole else kinds[1], (rows, columns // size))
    return headers | ({whole: Header("F32", ())} if whole else {})


def _blocks(rows: int, columns: int, block: Any, field: str) -> tuple[int, int]:
    """Return the number of blocks along rows and columns. Raises ModelError. Raises ModelError."""
    if not isinstance(block, list) or len(block) != 2:
        raise ModelError(f"quantization_config.{field} is no pair of numbers")
    return ceil(rows / _whole(block[0], field)), ceil(columns / _whole(block[1], field))


def _whole(value: Any, field: str) -> int:
    if type(value) is not int or not 0 < value <= 1 << 31:
        raise ModelError(f"quantization_config.{field}: {str(value)[:40]!r} is no whole number from 1 on")
    return value


class _Modules:
    """Names and patterns of modules, as the library of `quant_method` matches them."""

    def __init__(self, names: list[str], quant_method: object) -> None:
        if len(names) > MAX_PATTERNS:
            raise ModelError(f"quantization_config names more than {MAX_PATTERNS:,} modules")
        self._regular = quant_method in ("compressed-tensors", "gptq", "modelopt")
        self._parts = quant_method == "awq"
        self._names = frozenset(name for name in names if not (self._regular and name.startswith("re:")))
        self._patterns: list[re.Pattern[str]] = []
        for name in names:
            if self._regular and name.startswith("re:"):
                self._patterns.append(_pattern(name[3:]))
            elif not self._regular and not self._parts and not re.fullmatch(r"[\w.]+", name):
                self._patterns.append(_pattern(rf"(?:{name})(?:(?<=\.)|(?=\.|$))"))
        # transformers: a name from the start up to the end of a module's, or the end of a name
        self._plain = () if self._regular else tuple(self._names)

    def match(self, module: str, kind: str = "") -> bool:
        """Tell whether `module`, of class `kind`, is among them."""
        if module in self._names or kind in self._names:
            return True
        if any(pattern.match(module) for pattern in self._patterns):
            return True
        if self._parts:
            return any(name in module for name in self._plain)
        return any(module.endswith(name) or module.startswith(f"{name}.") for name in self._plain)


def _pattern(text: str) -> re.Pattern[str]:
    """Compile a pattern of modules. Raises ModelError for one that is none, or that might take long to match."""
    repeated = len(re.findall(r"[*+{]", text))
    if len(text) > MAX_PATTERN or repeated > 6 or re.search(r"\)[*+{]", text):
        raise ModelError(f"quantization_config: the pattern {text[:60]!r} of modules is too complex")
    try:
        return re.compile(text)
    except (re.error, OverflowError):
        raise ModelError(f"quantization_config: {text[:60]!r} is no pattern of modules") from None
