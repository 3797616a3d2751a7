"""Quantised checkpoints: which stored tensors make a weight, from headers alone.

A quantised weight is stored as codes of 4 or 8 bits and scales, under names of their own. `quantized_weights` finds
them by these names, in the formats of a checkpoint's `quantization_config`; every tensor with codes must have all that
belongs to it, in the shapes that follow from each other. `zinfer.engine.quantization.dequantize` does the arithmetic.

Without a checkpoint, `Quantization` tells from the same `quantization_config` which matrices of a model are stored
quantised, and in which tensors. `scheme` describes the formats that zinfer itself makes.

Sources: the quantisers of transformers (fp8, mxfp4, gptq, awq), the formats of the library compressed-tensors, and the
checkpoints that NVIDIA's ModelOpt exports.
"""

import os
import re
import struct
from collections.abc import Iterator, Mapping
from math import ceil, prod
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from zinfer.checkpoint.headers import BITS, QUANTIZATION, CheckpointError, TensorInfo
from zinfer.core.model import DTYPE_BYTES, LayerSpec, Matrix, ModelError, text_config

Format = Literal[
    "fp8", "int", "fp8 or int8", "nvfp4", "mxfp4", "mxfp4 experts", "gptq", "awq", "modelopt fp8", "modelopt nvfp4"
]  # fmt: skip

Scheme = Literal["int4", "int8", "fp8"]  # ways in which zinfer itself quantises
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)

KEYS = QUANTIZATION
METHODS = ("fp8", "mxfp4", "compressed-tensors", "gptq", "awq", "modelopt")
# Algorithms of ModelOpt whose weights are found by their tensors.
MODELOPT = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "MXFP8", "NVFP4", "W4A16_NVFP4", "MIXED_PRECISION")
# Formats of compressed-tensors whose weights are found by their tensors.
COMPRESSED = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "dense", "mixed-precision",
)  # fmt: skip
# Ends of names whose tensors belong to quantised activations and KV caches; here these are of the model's type.
ACTIVATIONS = (
    ".input_scale", ".activation_scale", ".input_global_scale", ".input_zero_point", ".k_scale", ".v_scale",
)  # fmt: skip
FP8 = "F8_E4M3"  # codes that `stream` codes losslessly
EIGHT_BITS = {FP8, "F8_E5M2", "I8"}
FLOATS = {"F32", "F16", "BF16"}
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
GROUP_SIZES = (128, 64, 32, 16)  # values that may share a scale where the wanted number of them does not divide a row
MAX_PATTERN, MAX_PATTERNS = 300, 20_000  # characters of a name or pattern of modules, and their number


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

    @property
    def in_whole_bytes(self) -> bool:
        """True where rows end with a byte, as the wire format asks."""
        return self.shape[-1] * self.bits % 8 == 0


def settings_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the quantisation settings in `config`, if it has some.

    Raises ModelError, without the model's name, for settings that zinfer does not read.
    """
    settings = next((part[key] for part in (config, text_config(config)) for key in KEYS if part.get(key)), None)
    if settings is None:
        return None
    if not isinstance(settings, Mapping):
        raise ModelError("its quantization_config is no object")
    method = settings.get("quant_method")
    if method not in METHODS:
        raise ModelError(
            f"its weights are quantised by {str(method)[:60]!r}; zinfer reads {', '.join(METHODS)}, and unquantised "
            "checkpoints: take such a version of the model"
        )
    for key, value in settings.items():
        given = value.get("config_groups", value) if isinstance(value, Mapping) else value
        if given and re.search("transform|rotat|hadamard|spin_?quant|quip", key, re.IGNORECASE):
            raise ModelError(
                f"its weights are rotated or otherwise transformed ({key[:60]} in quantization_config, as of QuIP and "
                "SpinQuant), which zinfer does not undo: take another version of the model"
            )
    if method == "compressed-tensors":
        groups = settings.get("config_groups")
        members = groups.values() if isinstance(groups, Mapping) else ()
        formats = [settings.get("format"), *(group.get("format") for group in members if isinstance(group, Mapping))]
        for name in formats:
            if name is not None and name not in COMPRESSED:
                raise ModelError(
                    f"its weights are in the format {str(name)[:60]!r}; zinfer reads {', '.join(COMPRESSED)}"
                )
        sparse = settings.get("sparsity_config")
        if isinstance(sparse, Mapping) and sparse.get("format", "dense") != "dense":
            raise ModelError(f"its weights are sparse ({str(sparse['format'])[:60]!r}), which zinfer does not read")
    algorithm, bits, version = (str(settings.get(key))[:60] for key in ("quant_algo", "bits", "version"))
    if method == "modelopt" and algorithm.upper() not in MODELOPT:
        raise ModelError(f"its weights are quantised by {algorithm!r} of ModelOpt; zinfer reads {', '.join(MODELOPT)}")
    if method in ("gptq", "awq") and settings.get("bits") not in (4, 8):
        raise ModelError(f"its weights have {bits!r} bits by {method}: zinfer reads 4 and 8")
    if method == "awq" and settings.get("version", "gemm") != "gemm":
        raise ModelError(f"its weights are in AWQ's order {version!r}: zinfer reads 'gemm'")
    return settings


class _Finder:
    """Search of quantised weights among `tensors` by one method's names.

    `shape` is that of the only weight, where the tensors have no data.
    """

    def __init__(
        self,
        tensors: Mapping[str, TensorInfo],
        settings: Mapping[str, Any],
        dtype: str,
        shape: tuple[int, ...] | None = None,
    ) -> None:
        self.tensors, self.settings, self.dtype = tensors, settings, _DTYPES.get(dtype, "BF16")
        self.shape = shape
        self.used = set[str]()  # stored names

    def fault(self, name: str, reason: str) -> CheckpointError:
        info = self.tensors[name]
        return CheckpointError(f"{info.file}: {name[:200]} ({info.dtype} {list(info.shape)[:6]}) {reason}")

    def part(self, role: str, name: str, dtypes: set[str], like: str) -> TensorInfo:
        """Return the tensor `name`, which the tensor `like` needs.

        Raises CheckpointError if it is missing, or of a type that is none of `dtypes`.
        """
        if name not in self.tensors:
            raise self.fault(like, f"is quantised, and its {role} {name[-80:]} is missing")
        if self.tensors[name].dtype not in dtypes:
            wanted = " or ".join(sorted(dtypes))
            raise self.fault(name, f"holds no {role} of a quantised weight: its type should be {wanted}")
        self.used.add(name)
        return self.tensors[name]

    def zeros(self, name: str, scales: TensorInfo, dtypes: set[str], shape: tuple[int, ...]) -> dict[str, str]:
        """Return the tensor of zero points, if any, by its role. Raises CheckpointError for another shape."""
        if name not in self.tensors:
            return {}
        if self.part("zero points", name, dtypes, name).shape != shape:
            raise self.fault(name, f"does not fit scales of {list(scales.shape)[:4]}")
        return {"zeros": name}

    def order(self, name: str, columns: int) -> dict[str, str]:
        """Return the tensor that names the groups of the columns, if any. Raises CheckpointError for another shape."""
        if name not in self.tensors:
            return {}
        if self.part("groups", name, {"I32"}, name).shape != (columns,):
            raise self.fault(name, f"does not name a group for each of {columns} columns")
        return {"order": name}

    def grid(self, scale: str, shape: tuple[int, ...], block: Any = None) -> tuple[int, int]:
        """Return the rows and columns of a weight that share a scale.

        The last blocks may be cut if `block` gives their size. Raises CheckpointError where the shapes do not fit.
        """
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

    def weights(self) -> Iterator[QuantizedWeight]:
        finders = {"fp8": self.fp8, "mxfp4": self.mxfp4, "compressed-tensors": self.compressed,
                   "modelopt": self.modelopt}  # fmt: skip
        return finders.get(self.settings["quant_method"], self.columns)()

    def fp8(self) -> Iterator[QuantizedWeight]:
        for scale in [name for name in self.tensors if name.endswith("_scale_inv")]:
            name = scale.removesuffix("_scale_inv")
            info = self.part("codes", name, EIGHT_BITS - {"I8"}, scale)
            self.part("scales", scale, {*FLOATS, "F8_E8M0", "U8"}, name)
            if len(info.shape) < 2:
                raise self.fault(name, "is no matrix")
            block = self.grid(scale, info.shape, self.settings.get("weight_block_size"))
            yield QuantizedWeight(name, "fp8", info.shape, self.dtype, {"codes": name, "scales": scale}, block)

    def compressed(self) -> Iterator[QuantizedWeight]:
        for name in list(self.tensors):
            base, leaf = name.rpartition(".")[::2]
            if leaf == "weight" and f"{name}_scale" in self.tensors:
                yield self._plain(name)
            elif leaf == "weight_packed":
                info, weight = self.part("codes", name, {"U8", "I32"}, name), f"{base}.weight"
                if len(info.shape) != 2:
                    raise self.fault(name, "is no matrix of codes")
                if info.dtype == "I32":
                    yield self._words(info, name, weight)
                elif f"{weight}_global_scale" in self.tensors:
                    yield self._pairs("nvfp4", weight, name, "BF16", f"{weight}_global_scale")
                else:
                    yield self._pairs("mxfp4", weight, name, "BF16")

    def _pairs(self, kind: Format, weight: str, name: str, dtype: str, whole: str = "") -> QuantizedWeight:
        """Return a weight of 4-bit floats, two in a byte."""
        rows, width = self.tensors[name].shape
        parts = {"codes": name, "scales": f"{weight}_scale"}
        if whole:
            parts["global"] = whole
            if prod(self.part("global scale", whole, {"F32"}, name).shape) != 1:
                raise self.fault(whole, "is not one number")
        scales = self.part("scales", parts["scales"], {"F8_E4M3"} if whole else {"U8", "F8_E8M0"}, name)
        block, size = self.grid(parts["scales"], (rows, 2 * width)), 16 if whole else 32
        if len(scales.shape) != 2 or block != (1, size):
            raise self.fault(parts["scales"], f"is not a scale for every {size} values")
        return QuantizedWeight(weight, kind, (rows, 2 * width), dtype, parts, block, 4)

    def _words(self, info: TensorInfo, name: str, weight: str) -> QuantizedWeight:
        """Return a weight whose rows are packed into words of 32 bits."""
        scale = f"{weight}_scale"
        scales = self.part("scales", scale, FLOATS, name)
        stored = self.part("shape", f"{weight}_shape", {"I64", "I32"}, name)
        shape = _integers(stored) if self.shape is None else self.shape
        rows, words = info.shape
        fits = len(shape) == 2 and shape[0] == rows and 0 < shape[1] <= 32 * words
        bits = next((bits for bits in (4, 8) if fits and ceil(shape[1] * bits / 32) == words), 0)
        if not bits:
            raise self.fault(name, f"does not hold codes of 4 or 8 bits for a weight of {shape[:4]}")
        block, groups = self.grid(scale, shape), 1 if prod(scales.shape) == 1 else scales.shape[-1]
        zeros = self.zeros(f"{weight}_zero_point", scales, {"I32"}, (ceil(rows * bits / 32), groups))
        parts = {"codes": name, "scales": scale} | zeros | self.order(f"{weight}_g_idx", shape[1])
        return QuantizedWeight(weight, "int", shape, scales.dtype, parts, block, bits)

    def _plain(self, name: str) -> QuantizedWeight:
        info, scale = self.part("codes", name, EIGHT_BITS, f"{name}_scale"), f"{name}_scale"
        scales = self.part("scales", scale, FLOATS, name)
        if len(info.shape) < 2:
            raise self.fault(name, "is no matrix")
        blocks = (group.get("block_structure") for group in _groups(self.settings))
        block = self.grid(scale, info.shape, next((size for size in blocks if isinstance(size, list)), None))
        parts = {"codes": name, "scales": scale}
        parts |= self.zeros(f"{name}_zero_point", scales, EIGHT_BITS, scales.shape)
        return QuantizedWeight(name, "fp8 or int8", info.shape, scales.dtype, parts, block)

    def modelopt(self) -> Iterator[QuantizedWeight]:
        for scale in [name for name in self.tensors if name.endswith(".weight_scale")]:
            name = scale.removesuffix("_scale")
            info = self.part("codes", name, {"F8_E4M3", "U8"}, scale)
            if len(info.shape) != 2:
                raise self.fault(name, "is no matrix")
            if info.dtype == "U8":
                yield self._pairs("modelopt nvfp4", name, name, self.dtype, f"{scale}_2")
                continue
            kind = self.part("scales", scale, {*FLOATS, "U8", "F8_E8M0"}, name).dtype
            block, parts = self.grid(scale, info.shape, [128, 128]), {"codes": name, "scales": scale}
            yield QuantizedWeight(
                name, "modelopt fp8" if kind in FLOATS else "fp8", info.shape, self.dtype, parts, block
            )

    def mxfp4(self) -> Iterator[QuantizedWeight]:
        for name in [name for name in self.tensors if name.endswith("_blocks")]:
            weight, info = name.removesuffix("_blocks"), self.part("codes", name, {"U8"}, name)
            scales = self.part("scales", f"{weight}_scales", {"U8", "F8_E8M0"}, name)
            if len(info.shape) != 4 or info.shape[3] != 16 or scales.shape != info.shape[:3]:
                raise self.fault(name, f"does not fit scales of {list(scales.shape)[:6]}: a scale is for 16 bytes")
            experts, rows, groups, _ = info.shape
            parts = {"codes": name, "scales": f"{weight}_scales"}
            yield QuantizedWeight(weight, "mxfp4 experts", (experts, 32 * groups, rows), self.dtype, parts, (32, 1), 4)

    def columns(self) -> Iterator[QuantizedWeight]:
        """Yield the weights of GPTQ and AWQ, stored as ``[in, out]``.

        A word holds several codes of a column (GPTQ) or of a row (AWQ).
        """
        gptq, bits = self.settings["quant_method"] == "gptq", int(self.settings["bits"])
        per_word = 32 // bits
        first = gptq and self.settings.get("checkpoint_format", "gptq") == "gptq"
        for name in [name for name in self.tensors if name.endswith(".qweight")]:
            base = name.removesuffix(".qweight")
            info = self.part("codes", name, {"I32"}, name)
            scales = self.part("scales", f"{base}.scales", FLOATS, name)
            zeros = self.part("zero points", f"{base}.qzeros", {"I32"}, name)
            if len(info.shape) != 2 or len(scales.shape) != 2 or 0 in info.shape or 0 in scales.shape:
                raise self.fault(name, "is no matrix of codes with a matrix of scales")
            inside, out = info.shape[0] * (per_word if gptq else 1), info.shape[1] * (1 if gptq else per_word)
            groups = scales.shape[0]
            if scales.shape != (groups, out) or zeros.shape != (groups, ceil(out / per_word)):
                raise self.fault(name, f"does not fit scales of {list(scales.shape)[:4]}")
            order = self.order(f"{base}.g_idx", inside) if gptq else {}
            if not order and inside % groups:
                raise self.fault(name, f"cannot be divided into {groups} groups")
            parts = {"codes": name, "scales": f"{base}.scales", "zeros": f"{base}.qzeros"} | order
            yield QuantizedWeight(f"{base}.weight", "gptq" if gptq else "awq", (out, inside), scales.dtype, parts,
                                  (1, max(1, inside // groups)), bits, int(first))  # fmt: skip


def quantized_weights(
    tensors: Mapping[str, TensorInfo], config: Mapping[str, Any], dtype: str = "bfloat16"
) -> tuple[dict[str, QuantizedWeight], set[str]]:
    """Return the quantised weights among `tensors`, and the names not needed.

    Weights are by the names of what they stand for; not needed are scales of activations. `dtype` is the type of the
    model. Raises ModelError as `settings_of` does, CheckpointError for codes without scales, and for tensors that do
    not fit each other.
    """
    settings = settings_of(config)
    if settings is None:
        return {}, set()
    finder = _Finder(tensors, settings, dtype)
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


def unquantized(
    tensors: Mapping[str, TensorInfo], config: Mapping[str, Any], dtype: str = "bfloat16"
) -> dict[str, TensorInfo]:
    """Return the tensors of a checkpoint as if it was not quantised.

    Names, shapes and types are those of the weights, bytes those of the codes. Raises the errors of
    `quantized_weights`.
    """
    weights, left_out = quantized_weights(tensors, config, dtype)
    parts = {name for weight in weights.values() for name in weight.parts.values()}
    gone = left_out | parts | {f"{name}_shape" for name in weights}
    result = {name: info for name, info in tensors.items() if name not in gone}
    for name, weight in weights.items():
        result[name] = tensors[weight.parts["codes"]]._replace(dtype=weight.dtype, shape=weight.shape)
    return result


def _groups(settings: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield how each group of compressed-tensors stores its weights."""
    groups = settings.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        inner = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(inner, Mapping):
            yield inner


def _integers(info: TensorInfo) -> tuple[int, ...]:
    """Return the few whole numbers that a tensor holds."""
    size = info.end - info.start
    if size > 64:
        return ()
    with info.file.open("rb") as stream:
        content = os.pread(stream.fileno(), size, info.start)
    each = 8 if info.dtype == "I64" else 4
    count = len(content) // each
    return struct.unpack(f"<{count}{'q' if each == 8 else 'i'}", content[: count * each])


# Formats without a checkpoint


class Header(NamedTuple):
    """Type, as safetensors spells it, and shape of a stored tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * BITS[self.dtype] // 8


def scheme(weights: Scheme, group_size: int | None = None) -> dict[str, Any]:
    """Return the quantization_config of a format that zinfer makes; all are symmetric.

    int4 has groups of `group_size` values, by default 128, or of the largest of `GROUP_SIZES` that divides a row; int8
    and fp8 (e4m3) have a scale a row.
    """
    bits, kind, layout, strategy = {
        "int4": (4, "int", "pack-quantized", "group"),
        "int8": (8, "int", "int-quantized", "channel"),
        "fp8": (8, "float", "float-quantized", "channel"),
    }[weights]
    arguments: dict[str, Any] = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True}
    if strategy == "group":
        arguments["group_size"] = group_size or GROUP_SIZES[0]
    group = {"targets": ["Linear"], "format": layout, "weights": arguments, "input_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": layout, "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*router"], "config_groups": {"group_0": group},
    }  # fmt: skip


class Quantization:
    """Quantisation of a model's matrices by its `config`.

    Raises ModelError, without the model's name, as `settings_of` does, and for fields that cannot be understood.
    """

    def __init__(self, config: Mapping[str, Any], dtype: str) -> None:
        self._settings: Mapping[str, Any] = settings_of(config) or {}
        self._method = self._settings.get("quant_method")
        self._model_dtype, self._dtype = dtype, _DTYPES[dtype]
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
            return self._fp8(f"{module}.weight", rows, columns)
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
        finder = _Finder(infos, self._settings, self._model_dtype, (matrix.rows, matrix.columns))
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
        four_bits = {"nvfp4-pack-quantized": 16, "mxfp4-pack-quantized": 32}.get(layout)  # values that share a scale
        if layout == "dense" or (four_bits and columns % four_bits):
            return None
        bits = _whole(given.get("num_bits", 8), "num_bits")
        if four_bits:
            codes = {f"{name}_packed": Header("U8", (rows, columns // 2))}
            scale = Header("F8_E4M3" if four_bits == 16 else "U8", (rows, columns // four_bits))
            whole = {f"{name}_global_scale": Header("F32", (1,))} if four_bits == 16 else {}
            return codes | {f"{name}_scale": scale} | whole
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
            headers = {f"{name}_packed": Header("I32", (rows, ceil(columns * bits / 32))), f"{name}_scale": scale,
                       f"{name}_shape": Header("I64", (2,))}  # fmt: skip
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
            if columns % 16:
                return None
            return {name: Header("U8", (rows, columns // 2)), f"{name}_scale": Header("F8_E4M3", (rows, columns // 16)),
                    f"{name}_scale_2": Header("F32", ())}  # fmt: skip
        grids = {"FP8": (), "FP8_PER_CHANNEL_PER_TOKEN": (rows,), "MXFP8": (rows, columns // 32),
                 "FP8_PB_WO": (ceil(rows / 128), 1, ceil(columns / 128), 1)}  # fmt: skip
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


def group_size(columns: int, wanted: int = GROUP_SIZES[0]) -> int:
    """Return how many values of a row share a scale; 0: none.

    It is `wanted`, or the largest of `GROUP_SIZES` that divides the row.
    """
    return next((size for size in (wanted, *GROUP_SIZES) if size <= wanted and columns % size == 0), 0)


def _names(settings: Mapping[str, Any], key: str) -> list[str]:
    names = settings.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelError(f"quantization_config.{key} is no list of names")
    return names


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
