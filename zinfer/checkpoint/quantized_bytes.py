"""Quantised bytes: which matrices of a model are stored quantised, and in which tensors, from its configuration."""

import re
from collections.abc import Callable, Mapping
from math import ceil, prod
from pathlib import Path
from typing import Any, NamedTuple

from zinfer.checkpoint.headers import TensorInfo
from zinfer.checkpoint.quantization import FP8, STORED_DTYPES, group_size, groups_of, settings_of
from zinfer.checkpoint.quantized_tensors import QuantizedWeight, TensorFinder
from zinfer.core.model import DTYPE_BYTES, LayerSpec, Matrix, ModelError, text_config

MAX_PATTERN = 300  # characters of a pattern of modules


class Header(NamedTuple):
    """Type, as safetensors spells it, and shape of a stored tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        bits = int(self.dtype.partition("_")[0].lstrip("BFIU"))
        return prod(self.shape) * bits // 8


class Quantization:
    """Quantisation of a model's matrices by its `config`.

    Raises ModelError, without the model's name, as `settings_of` does, and for fields that cannot be understood.
    """

    def __init__(self, config: Mapping[str, Any], dtype: str) -> None:
        self._settings: Mapping[str, Any] = settings_of(config) or {}
        self._method = method = str(self._settings.get("quant_method", ""))
        self._model_dtype, self._dtype = dtype, STORED_DTYPES[dtype]
        # DeepSeek V4 names the format of its routed experts beside quantization_config, V4.1 in it.
        self._fp4_experts = "fp4" in (self._settings.get("expert_dtype"), text_config(config).get("expert_dtype"))
        keys = {"compressed-tensors": ("ignore",), "modelopt": ("exclude_modules", "ignore")}
        kept = [name for key in keys.get(method, ("modules_to_not_convert",)) for name in _names(self._settings, key)]
        if method == "modelopt":  # names of modules that may have *, and hold others
            kept = ["re:" + re.escape(name).replace(r"\*", ".*") + r"(?:\.|$)" for name in kept]
        self._kept = _modules(kept, method)
        groups = groups_of(self._settings)
        self._groups = [(_modules(_names(group, "targets"), method), group) for group in groups]
        if self._settings.get("dynamic") or self._settings.get("modules_in_block_to_quantize"):
            raise ModelError(
                "its quantization_config names single modules (dynamic, or modules_in_block_to_quantize), whose bytes "
                "only the weights tell: give the folder of a download"
            )

    def headers(self, matrix: Matrix, module: str) -> dict[str, Header] | None:
        """Return the tensors that `matrix` is stored in, if it is quantised.

        `module` is its whole name. The tensors are those of one expert if each has its own.
        """
        rows, columns, name = matrix.rows, matrix.columns, f"{module}.weight"
        together = bool(matrix.experts) and "*" not in matrix.name
        if not self._method or 0 in (rows, columns) or together != (self._method == "mxfp4") or self._kept(module):
            return None
        if self._method == "mxfp4":
            grid = (matrix.experts, rows, columns // 32)
            blocks = {f"{module}_blocks": Header("U8", (*grid, 16)), f"{module}_scales": Header("U8", grid)}
            return None if columns % 32 else blocks
        if self._method == "modelopt":
            return self._modelopt(module, rows, columns)
        if self._method == "fp8":
            if self._fp4_experts and matrix.experts:
                return _four_bits(rows, columns, name, f"{name}_scale_inv", kinds=("I8", "F8_E8M0"))
            return self._fp8(name, rows, columns)
        if self._method == "compressed-tensors":
            group = next((group for targets, group in self._groups if targets(module)), None)
            return None if group is None else self._compressed(name, rows, columns, group)
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
        if strategy == "group":
            if not (size := group_size(columns, _whole(given.get("group_size"), "group_size"))):
                return None
            grid = (rows, columns // size)
        elif strategy == "block":
            grid = _blocks(rows, columns, given.get("block_structure"), "block_structure")
        scale = Header(self._dtype, (1,) if strategy == "tensor" else grid)
        zeros = not given.get("symmetric", True)
        if layout == "pack-quantized":
            if bits not in (4, 8):
                raise ModelError(f"its weights have {bits} bits by compressed-tensors: zinfer reads 4 and 8")
            packed = {
                f"{name}_packed": Header("I32", (rows, ceil(columns * bits / 32))),
                f"{name}_scale": scale,
                f"{name}_shape": Header("I64", (2,)),
            }
            if zeros:
                packed[f"{name}_zero_point"] = Header("I32", (ceil(rows * bits / 32), grid[1]))
            if given.get("actorder") == "group":
                packed[f"{name}_g_idx"] = Header("I32", (columns,))
            return packed
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
        size, gptq, per_word = (
            self._settings.get("group_size", 128),
            self._method == "gptq",
            32 // self._settings["bits"],
        )
        groups = 1 if size == -1 else ceil(columns / _whole(size, "group_size"))
        if (columns if gptq else rows) % per_word:
            return None
        headers = {
            f"{module}.qweight": Header("I32", (columns // per_word, rows) if gptq else (columns, rows // per_word)),
            f"{module}.qzeros": Header("I32", (groups, ceil(rows / per_word))),
            f"{module}.scales": Header("F16", (groups, rows)),
        }
        return headers | ({f"{module}.g_idx": Header("I32", (columns,))} if gptq else {})


def stored_ratios(
    layers: tuple[LayerSpec, ...], stack: str, config: Mapping[str, Any], dtype: str
) -> tuple[float, float]:
    """Return (stored bytes / dense bytes, FP8 share) of decoder layers.

    Stored as a checkpoint of `config` stores them, dense in `dtype`: 1 and 0 if they are not quantised, and 1 at most.
    Raises ModelError as `Quantization` does.
    """
    if settings_of(config) is None:
        return 1.0, 0.0
    rules, size, fp8 = Quantization(config, dtype), DTYPE_BYTES[dtype], 0
    stored = whole = sum(layer.parameters for layer in layers) * size
    for index, layer in enumerate(layers):
        for matrix in layer.matrices:
            headers = rules.headers(matrix, f"{stack}.{index}.{matrix.name.replace('*', '0')}")
            if headers is not None:
                times, codes = matrix.experts if "*" in matrix.name else 1, Header(FP8, (matrix.rows, matrix.columns))
                stored += times * sum(header.nbytes for header in headers.values()) - matrix.numel * size
                fp8 += times * sum(header.nbytes for header in headers.values() if header == codes)
    return min(1.0, stored / whole), fp8 / whole


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
    """Return the number of blocks along rows and columns. Raises ModelError."""
    if not isinstance(block, list) or len(block) != 2:
        raise ModelError(f"quantization_config.{field} is no pair of numbers")
    return ceil(rows / _whole(block[0], field)), ceil(columns / _whole(block[1], field))


def _whole(value: Any, field: str) -> int:
    if type(value) is not int or not 0 < value <= 1 << 31:
        raise ModelError(f"quantization_config.{field}: {str(value)[:40]!r} is no whole number from 1 on")
    return value


def _modules(names: list[str], method: str) -> Callable[[str], bool]:
    """Return a test of linear modules by `names`, as `method` means them."""
    if method == "awq":
        return lambda module: any(name in module for name in names)
    if method in ("compressed-tensors", "modelopt"):
        whole = frozenset(names)
        patterns = [_pattern(name[3:]) for name in names if name.startswith("re:")]
        return lambda module: module in whole or "Linear" in whole or any(text.match(module) for text in patterns)
    # transformers: a name from the start up to the end of a module's, or the end of a name
    patterns = [_pattern(rf"(?:{name})(?:(?<=\.)|(?=\.|$))") for name in names if not re.fullmatch(r"[\w.]+", name)]
    return lambda module: (
        any(module.endswith(name) or module.startswith(f"{name}.") for name in names)
        or any(text.match(module) for text in patterns)
    )


def _pattern(text: str) -> re.Pattern[str]:
    """Compile a pattern of modules. Raises ModelError for one that is none, or that might take long to match."""
    try:
        if len(text) > MAX_PATTERN or re.search(r"\)[*+{]", text):
            raise re.error("too complex")
        return re.compile(text)
    except (re.error, OverflowError) as error:
        raise ModelError(f"quantization_config: {text[:60]!r} is no pattern of modules: {error}") from None
