"""Quantised tensors: which stored tensors make a weight, from headers or from a configuration alone.

`quantized_weights` finds codes and scales by their names, in the formats of a checkpoint's `quantization_config`; all
that belongs to a weight must be there, in fitting shapes. `Quantization` tells them from the configuration alone.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from math import ceil, prod
from pathlib import Path
from typing import Any, Literal, NamedTuple

from zinfer.checkpoint.gguf import BLOCKS
from zinfer.checkpoint.headers import CheckpointError, TensorInfo
from zinfer.checkpoint.quantization import FP8, STORED_DTYPES, group_size, groups_of, settings_of
from zinfer.core.model import DTYPE_BYTES, LayerSpec, Matrix, ModelError, text_config

Format = Literal[
    "fp8", "int", "fp8 or int8", "nvfp4", "mxfp4", "mxfp4 experts", "gptq", "awq", "modelopt fp8", "modelopt nvfp4",
    "gguf",
]  # fmt: skip
# Ends of names whose tensors belong to quantised activations and KV caches; here these are of the model's type.
ACTIVATIONS = (".input_scale", ".activation_scale", ".input_global_scale", ".input_zero_point", ".k_scale", ".v_scale")
EIGHT_BITS = {FP8, "F8_E5M2", "I8"}
FLOATS = {"F32", "F16", "BF16"}
MAX_PATTERN = 300  # characters of a pattern of modules
POWERS = {"U8", "F8_E8M0"}  # exponents of two
ROLES = {"zeros": "zero points", "order": "groups of columns", "global": "global scale"}  # in messages


class QuantizedWeight(NamedTuple):
    """A weight that is stored quantised.

    `name`, `shape` and `dtype` (as safetensors spells it) are those of what it stands for, `parts` the stored tensors
    by their role; `block` are the values, along each of the last two dimensions, that share a scale; `bits` those of a
    code.
    """

    name: str
    format: Format
    shape: tuple[int, ...]
    dtype: str
    parts: Mapping[str, str]
    block: tuple[int, int] = (1, 1)
    bits: int = 8
    offset: int = 0  # number that is added to stored zero points: 1 in GPTQ's first format
    kind: str = ""  # type of a GGUF; of its weights whose values change as they are read, `bits` is 0
    convert: Callable[..., Any] | None = None  # makes a GGUF's weight of its parts

    @property
    def in_whole_bytes(self) -> bool:
        """True where rows end with a byte, as the wire format asks."""
        return self.bits > 0 and self.shape[-1] * self.bits % 8 == 0


class TensorFinder:
    """Search of quantised weights by names. `shape` is that of the only weight, of tensors without data."""

    def __init__(
        self,
        tensors: Mapping[str, TensorInfo],
        settings: Mapping[str, Any],
        dtype: str,
        shape: tuple[int, ...] | None = None,
    ) -> None:
        self.tensors, self.settings, self.dtype = tensors, settings, STORED_DTYPES.get(dtype, "BF16")
        self.shape = shape
        self.used = set[str]()  # stored names

    def weights(self) -> Iterator[QuantizedWeight]:
        finders = {
            "fp8": self._fp8,
            "mxfp4": self._mxfp4,
            "compressed-tensors": self._compressed,
            "modelopt": self._modelopt,
        }
        return finders.get(self.settings["quant_method"], self._columns)()

    def fault(self, name: str, reason: str) -> CheckpointError:
        info = self.tensors[name]
        return CheckpointError(f"{info.file}: {name[:200]} ({info.dtype} {list(info.shape)[:6]}) {reason}")

    def _part(
        self, role: str, name: str, dtypes: Collection[str], like: str, shape: tuple[int, ...] | None = None
    ) -> TensorInfo:
        """Return the tensor `name`, which `like` needs. Raises CheckpointError for another type or shape."""
        what = ROLES.get(role, role)
        if name not in self.tensors:
            raise self.fault(like, f"is quantised, and its {what} {name[-80:]} is missing")
        info = self.tensors[name]
        if info.dtype not in dtypes:
            wanted = " or ".join(sorted(dtypes))
            raise self.fault(name, f"holds no {what} of a quantised weight: its type should be {wanted}")
        if shape is not None and info.shape != shape:
            raise self.fault(name, f"holds no {what} of {like[-80:]}: its shape should be {list(shape)}")
        self.used.add(name)
        return info

    def _matrix(self, name: str, dtypes: Collection[str], like: str) -> TensorInfo:
        info = self._part("codes", name, dtypes, like)
        if len(info.shape) != 2 or 0 in info.shape:
            raise self.fault(name, "is no matrix of codes")
        return info

    def _optional(
        self, role: str, name: str, dtypes: Collection[str], like: str, shape: tuple[int, ...]
    ) -> dict[str, str]:
        """Return a tensor by its role, if there is one. Raises CheckpointError as `_part` does."""
        if name not in self.tensors:
            return {}
        self._part(role, name, dtypes, like, shape)
        return {role: name}

    def _grid(self, scale: str, shape: tuple[int, ...], block: Any = None) -> tuple[int, int]:
        """Return the rows and columns that share a scale. The last blocks may be cut if `block` gives their size."""
        size = self.tensors[scale].shape
        if len(size) == 4 and len(shape) == 2 and size[1] == size[3] == 1:  # blocks of ModelOpt
            size = (size[0], size[2])
        rows, columns = shape[-2:]
        if prod(size) == 1:
            return rows, columns
        grid = size[-2:] if len(size) > 1 else (size[0], 1)
        if len(size) > 1 and len(size) == len(shape) and size[:-2] != shape[:-2]:
            raise self.fault(scale, f"has scales of other parts than {list(shape)[:6]}")
        given = isinstance(block, list) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)
        if given and grid == (ceil(rows / block[0]), ceil(columns / block[1])):
            return block[0], block[1]
        if 0 in grid or rows % grid[0] or columns % grid[1]:
            raise self.fault(scale, f"does not divide a weight of {rows} x {columns}")
        return rows // grid[0], columns // grid[1]

    # Formats

    def _fp8(self) -> Iterator[QuantizedWeight]:
        scales = {name: name.removesuffix("_scale_inv") for name in self.tensors if name.endswith("_scale_inv")}
        for scale in [name for name in self.tensors if name.endswith(".scale")]:  # DeepSeek V4's names
            name = f"{scale.removesuffix('scale')}weight"
            if name in self.tensors and self.tensors[name].dtype in EIGHT_BITS:
                scales[scale] = name
        for scale, name in scales.items():
            if self._part("codes", name, EIGHT_BITS, scale).dtype == "I8":  # routed experts of DeepSeek V4
                yield self._pairs("mxfp4", name, name, self.dtype, scale=scale)
            else:
                yield self._bytes("fp8", name, scale, self.dtype, self.settings.get("weight_block_size"))

    def _compressed(self) -> Iterator[QuantizedWeight]:
        blocks = (group["weights"].get("block_structure") for group in groups_of(self.settings))
        block = next((size for size in blocks if isinstance(size, list)), None)
        for name in list(self.tensors):
            base, leaf = name.rpartition(".")[::2]
            if leaf == "weight" and f"{name}_scale" in self.tensors:
                yield self._bytes("fp8 or int8", name, f"{name}_scale", "", block)
            elif leaf == "weight_packed":
                info, weight = self._matrix(name, {"U8", "I32"}, name), f"{base}.weight"
                if info.dtype == "I32":
                    yield self._words(info, name, weight)
                elif f"{weight}_global_scale" in self.tensors:
                    yield self._pairs("nvfp4", weight, name, "BF16", f"{weight}_global_scale")
                else:
                    yield self._pairs("mxfp4", weight, name, "BF16")

    def _modelopt(self) -> Iterator[QuantizedWeight]:
        for scale in [name for name in self.tensors if name.endswith(".weight_scale")]:
            name = scale.removesuffix("_scale")
            if self._matrix(name, {FP8, "U8"}, scale).dtype == "U8":
                yield self._pairs("modelopt nvfp4", name, name, self.dtype, f"{scale}_2")
            else:
                kind: Format = "fp8" if self.tensors[scale].dtype in POWERS else "modelopt fp8"
                yield self._bytes(kind, name, scale, self.dtype, [128, 128])

    def _bytes(self, kind: Format, name: str, scale: str, dtype: str, block: Any) -> QuantizedWeight:
        """Return a weight with a code in each byte; without a `dtype` it has that of its scales."""
        info = self._part("codes", name, EIGHT_BITS, scale)
        scales = self._part("scales", scale, FLOATS | POWERS if dtype else FLOATS, name)
        if len(info.shape) < 2:
            raise self.fault(name, "is no matrix")
        parts = {"codes": name, "scales": scale}
        parts |= self._optional("zeros", f"{name}_zero_point", EIGHT_BITS, name, scales.shape)
        grid = self._grid(scale, info.shape, block)
        return QuantizedWeight(name, kind, info.shape, dtype or scales.dtype, parts, grid)

    def _pairs(
        self, kind: Format, weight: str, name: str, dtype: str, whole: str = "", scale: str = ""
    ) -> QuantizedWeight:
        """Return a weight of 4-bit floats, two in a byte."""
        rows, width = self._matrix(name, {"U8", "I8"}, weight).shape
        scale, size = scale or f"{weight}_scale", 16 if whole else 32
        parts = {"codes": name, "scales": scale}
        if whole:
            parts["global"] = whole
            if prod(self._part("global", whole, {"F32"}, name).shape) != 1:
                raise self.fault(whole, "is not one number")
        self._part("scales", scale, {FP8} if whole else POWERS, name, (rows, 2 * width // size))
        if 2 * width % size:
            raise self.fault(name, f"has no scale for every {size} values")
        return QuantizedWeight(weight, kind, (rows, 2 * width), dtype, parts, (1, size), 4)

    def _words(self, info: TensorInfo, name: str, weight: str) -> QuantizedWeight:
        """Return a weight whose rows are packed into words of 32 bits."""
        scale = f"{weight}_scale"
        scales = self._part("scales", scale, FLOATS, name)
        stored = self._part("shape", f"{weight}_shape", {"I64", "I32"}, name)
        shape = self.shape
        if shape is None:
            with stored.file.open("rb") as stream:
                stream.seek(stored.start)
                content = stream.read(min(64, stored.nbytes))
            shape = tuple(memoryview(content).cast("q" if stored.dtype == "I64" else "i"))
        rows, words = info.shape
        fits = len(shape) == 2 and shape[0] == rows and 0 < shape[1] <= 32 * words
        bits = next((bits for bits in (4, 8) if fits and ceil(shape[1] * bits / 32) == words), 0)
        if not bits:
            raise self.fault(name, f"does not hold codes of 4 or 8 bits for a weight of {shape[:4]}")
        block, groups = self._grid(scale, shape), 1 if prod(scales.shape) == 1 else scales.shape[-1]
        parts = {"codes": name, "scales": scale}
        parts |= self._optional("zeros", f"{weight}_zero_point", {"I32"}, name, (ceil(rows * bits / 32), groups))
        parts |= self._optional("order", f"{weight}_g_idx", {"I32"}, name, (shape[1],))
        return QuantizedWeight(weight, "int", shape, scales.dtype, parts, block, bits)

    def _mxfp4(self) -> Iterator[QuantizedWeight]:
        for name in [name for name in self.tensors if name.endswith("_blocks")]:
            weight, info = name.removesuffix("_blocks"), self._part("codes", name, {"U8"}, name)
            if len(info.shape) != 4 or info.shape[3] != 16:
                raise self.fault(name, "does not hold 16 bytes for each scale")
            experts, rows, groups, _ = info.shape
            self._part("scales", f"{weight}_scales", POWERS, name, (experts, rows, groups))
            parts = {"codes": name, "scales": f"{weight}_scales"}
            yield QuantizedWeight(weight, "mxfp4 experts", (experts, 32 * groups, rows), self.dtype, parts, (32, 1), 4)

    def _columns(self) -> Iterator[QuantizedWeight]:
        """Yield the weights of GPTQ and AWQ, stored as ``[in, out]``."""
        gptq, bits = self.settings["quant_method"] == "gptq", int(self.settings["bits"])
        offset, per_word = int(gptq and self.settings.get("checkpoint_format", "gptq") == "gptq"), 32 // bits
        for name in [name for name in self.tensors if name.endswith(".qweight")]:
            base = name.removesuffix(".qweight")
            info, scales = self._matrix(name, {"I32"}, name), self._part("scales", f"{base}.scales", FLOATS, name)
            inside, out = info.shape[0] * (per_word if gptq else 1), info.shape[1] * (1 if gptq else per_word)
            groups = max(1, scales.shape[0] if scales.shape else 0)
            self._part("scales", f"{base}.scales", FLOATS, name, (groups, out))
            self._part("zeros", f"{base}.qzeros", {"I32"}, name, (groups, ceil(out / per_word)))
            parts = {"codes": name, "scales": f"{base}.scales", "zeros": f"{base}.qzeros"}
            if gptq:
                parts |= self._optional("order", f"{base}.g_idx", {"I32"}, name, (inside,))
            if "order" not in parts and inside % groups:
                raise self.fault(name, f"cannot be divided into {groups} groups")
            block = (1, max(1, inside // groups))
            kind: Format = "gptq" if gptq else "awq"
            yield QuantizedWeight(f"{base}.weight", kind, (out, inside), scales.dtype, parts, block, bits, offset)


def quantized_weights(
    tensors: Mapping[str, TensorInfo], config: Mapping[str, Any], dtype: str = "bfloat16"
) -> tuple[dict[str, QuantizedWeight], set[str]]:
    """Return the quantised weights by name, and stored names not needed. Raises ModelError, CheckpointError."""
    blocks = {name: info for name, info in tensors.items() if info.dtype in BLOCKS}
    if blocks:  # of a GGUF
        stored = STORED_DTYPES.get(dtype, "BF16")
        return {n: QuantizedWeight(n, "gguf", i.shape, stored, {"codes": n}) for n, i in blocks.items()}, set()
    settings = settings_of(config)
    if settings is None:
        return {}, set()
    finder = TensorFinder(tensors, settings, dtype)
    weights: dict[str, QuantizedWeight] = {}
    for weight in finder.weights():
        if weight.name in weights or (weight.name in tensors and weight.parts["codes"] != weight.name):
            raise finder.fault(weight.parts["codes"], f"is stored beside another {weight.name[-80:]}")
        weights[weight.name] = weight
    activations = {name for name in tensors if name.endswith(ACTIVATIONS) and name not in finder.used}
    for name, info in tensors.items():
        if info.dtype in EIGHT_BITS and name not in finder.used and name not in activations:
            raise finder.fault(name, f"holds codes of {settings['quant_method']} without their scales")
    return weights, activations


def without_codes(
    tensors: Mapping[str, TensorInfo], weights: Mapping[str, QuantizedWeight], left_out: Collection[str] = ()
) -> dict[str, TensorInfo]:
    """Return tensors, with `weights` in place of their parts; bytes are those of the codes."""
    parts = {name for weight in weights.values() for name in weight.parts.values()}
    gone = {*left_out} | parts | {f"{name}_shape" for name in weights}
    result = {name: info for name, info in tensors.items() if name not in gone}
    for name, weight in weights.items():
        result[name] = tensors[weight.parts["codes"]]._replace(dtype=weight.dtype, shape=weight.shape)
    return result


class Quantization:
    """Quantisation of a model's matrices by its `config`. Raises ModelError, without the model's name."""

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

    def headers(self, matrix: Matrix, module: str) -> dict[str, TensorInfo] | None:
        """Return the stored tensors of a quantised `matrix`; `module` is its whole name. Of experts, those of one."""
        rows, columns, name = matrix.rows, matrix.columns, f"{module}.weight"
        stacked = bool(matrix.experts) and "*" not in matrix.name
        if not self._method or 0 in (rows, columns) or stacked != (self._method == "mxfp4") or self._kept(module):
            return None
        if self._method == "mxfp4":
            grid = (matrix.experts, rows, columns // 32)
            blocks = {f"{module}_blocks": _stored("U8", (*grid, 16)), f"{module}_scales": _stored("U8", grid)}
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

    def weight(self, matrix: Matrix, module: str) -> tuple[QuantizedWeight, dict[str, TensorInfo]] | None:
        """Return how `matrix` is stored quantised, and its tensors by role."""
        headers = self.headers(matrix, module)
        if headers is None:
            return None
        finder = TensorFinder(headers, self._settings, self._model_dtype, (matrix.rows, matrix.columns))
        (weight,) = finder.weights()
        return weight, {role: headers[name] for role, name in weight.parts.items()}

    def _fp8(self, name: str, rows: int, columns: int) -> dict[str, TensorInfo]:
        block = self._settings.get("weight_block_size", [128, 128])
        shape = (1,) if block is None else _blocks(rows, columns, block, "weight_block_size")
        headers = {name: _stored("F8_E4M3", (rows, columns)), f"{name}_scale_inv": _stored("F32", shape)}
        if self._settings.get("activation_scheme") == "static":
            headers[f"{name.removesuffix('weight')}activation_scale"] = _stored("F32", (1,))
        return headers

    def _compressed(self, name: str, rows: int, columns: int, group: Mapping[str, Any]) -> dict[str, TensorInfo] | None:
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
        scale = _stored(self._dtype, (1,) if strategy == "tensor" else grid)
        zeros = not given.get("symmetric", True)
        if layout == "pack-quantized":
            if bits not in (4, 8):
                raise ModelError(f"its weights have {bits} bits by compressed-tensors: zinfer reads 4 and 8")
            packed = {
                f"{name}_packed": _stored("I32", (rows, ceil(columns * bits / 32))),
                f"{name}_scale": scale,
                f"{name}_shape": _stored("I64", (2,)),
            }
            if zeros:
                packed[f"{name}_zero_point"] = _stored("I32", (ceil(rows * bits / 32), grid[1]))
            if given.get("actorder") == "group":
                packed[f"{name}_g_idx"] = _stored("I32", (columns,))
            return packed
        kind = "F8_E4M3" if layout == "float-quantized" or given.get("type") == "float" else "I8"
        headers = {name: _stored(kind, (rows, columns)), f"{name}_scale": scale}
        return headers | ({f"{name}_zero_point": _stored(kind, scale.shape)} if zeros else {})

    def _modelopt(self, module: str, rows: int, columns: int) -> dict[str, TensorInfo] | None:
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
        scale = _stored("U8" if kind == "MXFP8" else "F32", grids[kind])
        return {name: _stored("F8_E4M3", (rows, columns)), f"{name}_scale": scale}

    def _columns(self, module: str, rows: int, columns: int) -> dict[str, TensorInfo] | None:
        size, gptq = self._settings.get("group_size", 128), self._method == "gptq"
        per_word = 32 // self._settings["bits"]
        groups = 1 if size == -1 else ceil(columns / _whole(size, "group_size"))
        if (columns if gptq else rows) % per_word:
            return None
        headers = {
            f"{module}.qweight": _stored("I32", (columns // per_word, rows) if gptq else (columns, rows // per_word)),
            f"{module}.qzeros": _stored("I32", (groups, ceil(rows / per_word))),
            f"{module}.scales": _stored("F16", (groups, rows)),
        }
        return headers | ({f"{module}.g_idx": _stored("I32", (columns,))} if gptq else {})


def stored_ratios(
    layers: tuple[LayerSpec, ...], stack: str, config: Mapping[str, Any], dtype: str
) -> tuple[float, float, float | None]:
    """Return bytes stored, and bytes of FP8 codes, over dense bytes. The third value is the first one of routed experts
    alone; None without any, and for models as released in 16 bits. Raises ModelError."""
    if settings_of(config) is None:
        return 1.0, 0.0, None
    rules, size, fp8 = Quantization(config, dtype), DTYPE_BYTES[dtype], 0
    stored = whole = sum(layer.parameters for layer in layers) * size
    experts = routed = sum(layer.expert_parameters for layer in layers) * size
    for index, layer in enumerate(layers):
        for matrix in layer.matrices:
            headers = rules.headers(matrix, f"{stack}.{index}.{matrix.name.replace('*', '0')}")
            if headers is not None:
                times, codes = matrix.experts if "*" in matrix.name else 1, _stored(FP8, (matrix.rows, matrix.columns))
                saved = matrix.numel * size - times * sum(header.nbytes for header in headers.values())
                stored, experts = stored - saved, experts - (saved if matrix.experts else 0)
                fp8 += times * sum(header.nbytes for header in headers.values() if header == codes)
    return min(1.0, stored / whole), fp8 / whole, min(1.0, experts / routed) if routed else None


def _stored(dtype: str, shape: tuple[int, ...]) -> TensorInfo:
    """Return a stored tensor that a configuration tells of."""
    bits = int(dtype.partition("_")[0].lstrip("BFIU"))
    return TensorInfo(Path("config.json"), dtype, shape, 0, prod(shape) * bits // 8)


def _names(settings: Mapping[str, Any], key: str) -> list[str]:
    names = settings.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelError(f"quantization_config.{key} is no list of names")
    return names


def _four_bits(
    rows: int, columns: int, codes: str, scale: str, whole: str = "", kinds: tuple[str, str] = ("U8", "U8")
) -> dict[str, TensorInfo] | None:
    """Return the tensors of 4-bit floats. With `whole`, the scales have one scale."""
    size = 16 if whole else 32
    if columns % size:
        return None
    headers = {codes: _stored(kinds[0], (rows, columns // 2))}
    headers[scale] = _stored("F8_E4M3" if whole else kinds[1], (rows, columns // size))
    return headers | ({whole: _stored("F32", ())} if whole else {})


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
