"""Quantised checkpoints: which stored tensors make a weight, found and checked from headers alone.

A quantised weight is stored as codes of 4 or 8 bits and scales, under names of their own. `weights` finds them by these
names, in the formats of a checkpoint's `quantization_config`; every tensor with codes must have all that belongs to it,
in the shapes that follow from each other. `zinfer.engine.quantization.dequantize` does the arithmetic.

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
LONGEST_PATTERN, MOST_PATTERNS = 300, 20_000  # characters of a name or pattern of modules, and their number


class QuantizedWeight(NamedTuple):
    """A weight that is stored quantised: `name`, `shape` and type (as safetensors spells it) of what it stands for, and
    the stored tensors by their role.

    `block` are the values, along each of the last two dimensions, that share a scale. `bits` are those of a code.
    """

    name: str
    format: Format
    shape: tuple[int, ...]
    dtype: str
    parts: Mapping[str, str]
    block: tuple[int, int] = (1, 1)
    bits: int = 8
    offset: int = 0  # number that is added to stored zero points: 1 in GPTQ's first format


def method(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the quantisation that `config` describes; None if its weights are not quantised.

    Raises ModelError, without the model's name, for one that cannot be read.
    """
    found = None
    for part in (config, text_config(config)):
        for key in KEYS:
            found = found or part.get(key)
    if not found:
        return None
    if not isinstance(found, Mapping):
        raise ModelError("its quantization_config is no object")
    name = found.get("quant_method")
    if name not in METHODS:
        raise ModelError(
            f"its weights are quantised by {str(name)[:60]!r}; zinfer reads {', '.join(METHODS)}, and unquantised "
            "checkpoints: take such a version of the model"
        )
    for key, value in found.items():
        given = value.get("config_groups", value) if isinstance(value, Mapping) else value
        if given and re.search("transform|rotat|hadamard|spin_?quant|quip", key, re.IGNORECASE):
            raise ModelError(
                f"its weights are rotated or otherwise transformed ({key[:60]} in quantization_config, as of QuIP and "
                "SpinQuant), which zinfer does not undo: take another version of the model"
            )
    if name == "compressed-tensors":
        groups = found.get("config_groups")
        inner = [group.get("format") for group in groups.values() if isinstance(group, Mapping)] if isinstance(
            groups, Mapping) else []  # fmt: skip
        for form in [found.get("format"), *inner]:
            if form is not None and form not in COMPRESSED:
                raise ModelError(
                    f"its weights are in the format {str(form)[:60]!r}; zinfer reads {', '.join(COMPRESSED)}"
                )
        sparse = found.get("sparsity_config")
        if isinstance(sparse, Mapping) and sparse.get("format", "dense") != "dense":
            raise ModelError(f"its weights are sparse ({str(sparse['format'])[:60]!r}), which zinfer does not read")
    if name == "modelopt" and str(found.get("quant_algo")).upper() not in MODELOPT:
        algorithm = str(found.get("quant_algo"))[:60]
        raise ModelError(f"its weights are quantised by {algorithm!r} of ModelOpt; zinfer reads {', '.join(MODELOPT)}")
    if name in ("gptq", "awq") and found.get("bits") not in (4, 8):
        raise ModelError(f"its weights have {str(found.get('bits'))[:20]!r} bits by {name}: zinfer reads 4 and 8")
    if name == "awq" and found.get("version", "gemm") != "gemm":
        raise ModelError(f"its weights are in AWQ's order {str(found.get('version'))[:20]!r}: zinfer reads 'gemm'")
    return found


class _Finder:
    """Search of the quantised weights among `tensors`, by the names of one method."""

    def __init__(
        self,
        tensors: Mapping[str, TensorInfo],
        found: Mapping[str, Any],
        dtype: str,
        shape: tuple[int, ...] | None = None,
    ) -> None:
        self.tensors, self.found, self.dtype = tensors, found, _DTYPES.get(dtype, "BF16")
        self.shape = shape  # of the only weight, where the tensors have no data
        self.used: dict[str, str] = {}  # stored name -> weight that it belongs to

    def fault(self, name: str, reason: str) -> CheckpointError:
        info = self.tensors[name]
        return CheckpointError(f"{info.file}: {name[:200]} ({info.dtype} {list(info.shape)[:6]}) {reason}")

    def take(self, weight: str, role: str, name: str, kinds: set[str], like: str) -> TensorInfo:
        """Return the tensor `name`, which belongs to `weight`. Raises CheckpointError if it is missing, or of a type
        that is none of `kinds`; `like` is a tensor that needs it."""
        if name not in self.tensors:
            raise self.fault(like, f"is quantised, and its {role} {name[-80:]} is missing")
        if self.tensors[name].dtype not in kinds:
            wanted = " or ".join(sorted(kinds))
            raise self.fault(name, f"holds no {role} of a quantised weight: its type should be {wanted}")
        self.used[name] = weight
        return self.tensors[name]

    def grid(self, scale: str, shape: tuple[int, ...], block: Any = None) -> tuple[int, int]:
        """Return the values along the last two dimensions of a weight of `shape` that share a value of `scale`. Raises
        CheckpointError where they do not fit each other; the last blocks may be cut if `block` gives their size."""
        size = self.tensors[scale].shape
        if len(size) == 4 and len(shape) == 2 and size[1] == size[3] == 1:  # blocks of ModelOpt
            size = (size[0], size[2])
        rows, columns = shape[-2:]
        if prod(size) == 1:
            return rows, columns
        grid = size[-2:] if len(size) > 1 else (size[0], 1)
        if len(size) > 1 and len(size) == len(shape) and size[:-2] != shape[:-2]:
            raise self.fault(scale, f"has scales of other parts than {list(shape)[:6]}")
        named = isinstance(block, list) and len(block) == 2 and all(isinstance(one, int) and one > 0 for one in block)
        if named and grid == (ceil(rows / block[0]), ceil(columns / block[1])):
            return block[0], block[1]
        if 0 in grid or rows % grid[0] or columns % grid[1]:
            raise self.fault(scale, f"does not divide a weight of {rows} x {columns}")
        return rows // grid[0], columns // grid[1]

    # Formats

    def every(self) -> Iterator[QuantizedWeight]:
        ways = {"fp8": self.fp8, "mxfp4": self.mxfp4, "compressed-tensors": self.compressed,
                "modelopt": self.modelopt}  # fmt: skip
        return ways.get(self.found["quant_method"], self.columns)()

    def fp8(self) -> Iterator[QuantizedWeight]:
        for name in [one for one in self.tensors if one.endswith("_scale_inv")]:
            codes = name.removesuffix("_scale_inv")
            info = self.take(codes, "codes", codes, EIGHT_BITS - {"I8"}, name)
            self.take(codes, "scales", name, {*FLOATS, "F8_E8M0", "U8"}, codes)
            if len(info.shape) < 2:
                raise self.fault(codes, "is no matrix")
            block = self.grid(name, info.shape, self.found.get("weight_block_size"))
            yield QuantizedWeight(codes, "fp8", info.shape, self.dtype, {"codes": codes, "scales": name}, block)

    def compressed(self) -> Iterator[QuantizedWeight]:
        for name in list(self.tensors):
            base, leaf = name.rpartition(".")[::2]
            if leaf == "weight_packed":
                yield self._packed(name, f"{base}.weight")
            elif leaf == "weight" and f"{name}_scale" in self.tensors:
                yield self._plain(name)

    def _packed(self, name: str, weight: str) -> QuantizedWeight:
        info, scale = self.tensors[name], f"{weight}_scale"
        self.used[name] = weight
        if len(info.shape) != 2:
            raise self.fault(name, "is no matrix of codes")
        if info.dtype == "U8":  # two 4-bit floats a byte
            shape = (info.shape[0], 2 * info.shape[1])
            parts = {"codes": name, "scales": scale}
            form: Format = "mxfp4"
            if f"{weight}_global_scale" in self.tensors:
                form, parts["global"] = "nvfp4", f"{weight}_global_scale"
                whole = self.take(weight, "global scale", parts["global"], {"F32"}, name)
                if prod(whole.shape) != 1:
                    raise self.fault(parts["global"], "is not one number")
            kinds = {"F8_E4M3"} if form == "nvfp4" else {"U8", "F8_E8M0"}
            size = self.take(weight, "scales", scale, kinds, name).shape
            block = self.grid(scale, shape)
            if len(size) != 2 or block != (1, 16 if form == "nvfp4" else 32):
                raise self.fault(scale, f"is not a scale for every {16 if form == 'nvfp4' else 32} values")
            return QuantizedWeight(weight, form, shape, "BF16", parts, block, 4)
        if info.dtype != "I32":
            raise self.fault(name, "holds no packed codes: its type should be I32 or U8")
        return self._words(name, weight, scale)

    def _words(self, name: str, weight: str, scale: str) -> QuantizedWeight:
        """Return a weight whose codes are packed into words of 32 bits along its rows."""
        info, kind = self.tensors[name], self.take(weight, "scales", scale, FLOATS, name)
        stored = self.take(weight, "shape", f"{weight}_shape", {"I64", "I32"}, name)
        shape = _numbers(stored) if self.shape is None else self.shape
        rows, words = info.shape
        fits = len(shape) == 2 and shape[0] == rows and 0 < shape[1] <= 32 * words
        bits = next((bits for bits in (4, 8) if fits and ceil(shape[1] * bits / 32) == words), 0)
        if not bits:
            raise self.fault(name, f"does not hold codes of 4 or 8 bits for a weight of {shape[:4]}")
        parts = {"codes": name, "scales": scale}
        block = self.grid(scale, shape)
        groups = 1 if prod(kind.shape) == 1 else kind.shape[-1]
        if f"{weight}_zero_point" in self.tensors:
            parts["zeros"] = f"{weight}_zero_point"
            zeros = self.take(weight, "zero points", parts["zeros"], {"I32"}, name)
            if zeros.shape != (ceil(rows * bits / 32), groups):
                raise self.fault(parts["zeros"], f"does not fit scales of {list(kind.shape)[:4]}")
        if f"{weight}_g_idx" in self.tensors:
            parts["order"] = f"{weight}_g_idx"
            if self.take(weight, "groups", parts["order"], {"I32"}, name).shape != (shape[1],):
                raise self.fault(parts["order"], f"does not name a group for each of {shape[1]} columns")
        return QuantizedWeight(weight, "int", shape, kind.dtype, parts, block, bits)

    def _plain(self, name: str) -> QuantizedWeight:
        info, scale = self.take(name, "codes", name, EIGHT_BITS, f"{name}_scale"), f"{name}_scale"
        kind = self.take(name, "scales", scale, FLOATS, name)
        if len(info.shape) < 2:
            raise self.fault(name, "is no matrix")
        parts = {"codes": name, "scales": scale}
        blocks = [
            size for group in _groups(self.found) if isinstance(size := group.get("block_structure"), list)
        ]  # fmt: skip
        block = self.grid(scale, info.shape, blocks[0] if blocks else None)
        if f"{name}_zero_point" in self.tensors:
            parts["zeros"] = f"{name}_zero_point"
            if self.take(name, "zero points", parts["zeros"], EIGHT_BITS, name).shape != kind.shape:
                raise self.fault(parts["zeros"], f"does not fit scales of {list(kind.shape)[:4]}")
        return QuantizedWeight(name, "fp8 or int8", info.shape, kind.dtype, parts, block)

    def modelopt(self) -> Iterator[QuantizedWeight]:
        for scale in [one for one in self.tensors if one.endswith(".weight_scale")]:
            name = scale.removesuffix("_scale")
            info = self.take(name, "codes", name, {"F8_E4M3", "U8"}, scale)
            if len(info.shape) != 2:
                raise self.fault(name, "is no matrix")
            parts = {"codes": name, "scales": scale}
            if info.dtype == "F8_E4M3":
                kind = self.take(name, "scales", scale, {*FLOATS, "U8", "F8_E8M0"}, name).dtype
                block = self.grid(scale, info.shape, [128, 128])
                form: Format = "modelopt fp8" if kind in FLOATS else "fp8"
                yield QuantizedWeight(name, form, info.shape, self.dtype, parts, block)
                continue
            shape, parts["global"] = (info.shape[0], 2 * info.shape[1]), f"{scale}_2"
            size = self.take(name, "scales", scale, {"F8_E4M3"}, name).shape
            if prod(self.take(name, "global scale", parts["global"], {"F32"}, name).shape) != 1:
                raise self.fault(parts["global"], "is not one number")
            if len(size) != 2 or (block := self.grid(scale, shape)) != (1, 16):
                raise self.fault(scale, "is not a scale for every 16 values")
            yield QuantizedWeight(name, "modelopt nvfp4", shape, self.dtype, parts, block, 4)

    def mxfp4(self) -> Iterator[QuantizedWeight]:
        for name in [one for one in self.tensors if one.endswith("_blocks")]:
            weight, info = name.removesuffix("_blocks"), self.take(name, "codes", name, {"U8"}, name)
            scale = self.take(weight, "scales", f"{weight}_scales", {"U8", "F8_E8M0"}, name)
            if len(info.shape) != 4 or info.shape[3] != 16 or scale.shape != info.shape[:3]:
                raise self.fault(name, f"does not fit scales of {list(scale.shape)[:6]}: a scale is for 16 bytes")
            self.used[name] = weight
            experts, rows, groups, _ = info.shape
            parts = {"codes": name, "scales": f"{weight}_scales"}
            yield QuantizedWeight(weight, "mxfp4 experts", (experts, 32 * groups, rows), self.dtype, parts, (32, 1), 4)

    def columns(self) -> Iterator[QuantizedWeight]:
        """Yield the weights of GPTQ and AWQ, stored as ``[in, out]``, several codes of a column (GPTQ) or of a row
        (AWQ) in a word."""
        gptq, bits = self.found["quant_method"] == "gptq", int(self.found["bits"])
        each = 32 // bits
        for name in [one for one in self.tensors if one.endswith(".qweight")]:
            base = name.removesuffix(".qweight")
            weight = f"{base}.weight"
            info = self.take(weight, "codes", name, {"I32"}, name)
            scales = self.take(weight, "scales", f"{base}.scales", FLOATS, name)
            zeros = self.take(weight, "zero points", f"{base}.qzeros", {"I32"}, name)
            if len(info.shape) != 2 or len(scales.shape) != 2 or 0 in info.shape or 0 in scales.shape:
                raise self.fault(name, "is no matrix of codes with a matrix of scales")
            inside, out = (info.shape[0] * each, info.shape[1]) if gptq else (info.shape[0], info.shape[1] * each)
            groups = scales.shape[0]
            if scales.shape != (groups, out) or zeros.shape != (groups, ceil(out / each)):
                raise self.fault(name, f"does not fit scales of {list(scales.shape)[:4]}")
            parts = {"codes": name, "scales": f"{base}.scales", "zeros": f"{base}.qzeros"}
            if gptq and f"{base}.g_idx" in self.tensors:
                parts["order"] = f"{base}.g_idx"
                if self.take(weight, "groups", parts["order"], {"I32"}, name).shape != (inside,):
                    raise self.fault(parts["order"], f"does not name a group for each of {inside} columns")
            elif inside % groups:
                raise self.fault(name, f"cannot be divided into {groups} groups")
            old = gptq and self.found.get("checkpoint_format", "gptq") == "gptq"
            yield QuantizedWeight(weight, "gptq" if gptq else "awq", (out, inside), scales.dtype, parts,
                                  (1, max(1, inside // groups)), bits, 1 if old else 0)  # fmt: skip


def weights(
    tensors: Mapping[str, TensorInfo], config: Mapping[str, Any], dtype: str = "bfloat16"
) -> tuple[dict[str, QuantizedWeight], set[str]]:
    """Return the quantised weights among stored `tensors`, by the names of what they stand for, and the names of the
    stored tensors that are not needed beside them (scales of activations).

    `dtype` is the type of the model. Raises ModelError as `method` does, CheckpointError for codes without scales, and
    for tensors that do not fit each other.
    """
    found = method(config)
    if found is None:
        return {}, set()
    finder = _Finder(tensors, found, dtype)
    result: dict[str, QuantizedWeight] = {}
    for weight in finder.every():
        if weight.name in result or (weight.name in tensors and weight.parts["codes"] != weight.name):
            raise finder.fault(weight.parts["codes"], f"is stored beside another {weight.name[-80:]}")
        result[weight.name] = weight
    activations = {name for name in tensors if name.endswith(ACTIVATIONS) and name not in finder.used}
    for name, info in tensors.items():
        if info.dtype in EIGHT_BITS and name not in finder.used and name not in activations:
            raise finder.fault(name, f"holds codes of {found['quant_method']} without their scales")
    return result, activations


def plain(
    tensors: Mapping[str, TensorInfo], config: Mapping[str, Any], dtype: str = "bfloat16"
) -> dict[str, TensorInfo]:
    """Return the tensors of a checkpoint as if it were not quantised: by the names, shapes and types of the weights.
    The bytes are those of the codes. Raises the errors of `weights`."""
    found, left_out = weights(tensors, config, dtype)
    gone = left_out | {name for weight in found.values() for name in weight.parts.values()} | {
        f"{name}_shape" for name in found
    }  # fmt: skip
    result = {name: info for name, info in tensors.items() if name not in gone}
    for name, weight in found.items():
        result[name] = tensors[weight.parts["codes"]]._replace(dtype=weight.dtype, shape=weight.shape)
    return result


def _groups(found: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield how each group of compressed-tensors stores its weights."""
    groups = found.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        inner = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(inner, Mapping):
            yield inner


def _numbers(info: TensorInfo) -> tuple[int, ...]:
    """Return the few whole numbers that a tensor holds; none if they are not few."""
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


def scheme(weights: Scheme) -> dict[str, Any]:
    """Return the quantization_config of a format that zinfer makes: int4 in groups of 128 values, or of the largest of
    `GROUP_SIZES` that divides a row; int8 and fp8 (e4m3) with a scale a row; all symmetric."""
    bits, kind, form, strategy = {
        "int4": (4, "int", "pack-quantized", "group"),
        "int8": (8, "int", "int-quantized", "channel"),
        "fp8": (8, "float", "float-quantized", "channel"),
    }[weights]
    arguments: dict[str, Any] = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True}
    if strategy == "group":
        arguments["group_size"] = GROUP_SIZES[0]
    group = {"targets": ["Linear"], "format": form, "weights": arguments, "input_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*router"], "config_groups": {"group_0": group},
    }  # fmt: skip


class Quantization:
    """Quantisation of a model's matrices by its `config`, for weights outside them in `dtype`.

    Raises ModelError, without the model's name, as `method` does, and for fields that cannot be understood.
    """

    def __init__(self, config: Mapping[str, Any], dtype: str) -> None:
        self._found: Mapping[str, Any] = method(config) or {}
        self._name = self._found.get("quant_method")
        self._model_dtype, self._dtype = dtype, _DTYPES[dtype]
        keys = {"compressed-tensors": ("ignore",), "modelopt": ("exclude_modules", "ignore")}
        kept = [
            name
            for key in keys.get(str(self._name), ("modules_to_not_convert",))
            for name in self._list(self._found, key)
        ]
        if self._name == "modelopt":  # names of modules that may have *, and hold others
            kept = ["re:" + re.escape(name).replace(r"\*", ".*") + r"(?:\.|$)" for name in kept]
        self._kept = _Modules(kept, self._name)
        self._groups = [
            (_Modules(self._list(group, "targets"), self._name), group)
            for group in (self._found.get("config_groups") or {}).values()
            if isinstance(group, Mapping) and isinstance(group.get("weights"), Mapping)
        ]
        inside = self._found.get("modules_in_block_to_quantize") or ()
        names = [name for one in inside for name in (one if isinstance(one, list) else [one])]
        self._only = tuple(name for name in names if isinstance(name, str))
        dynamic = self._found.get("dynamic") if self._name == "gptq" else None
        self._dynamic: list[tuple[_Modules, Any]] = []  # modules, and fields of their own; None: they stay in 16 bits
        for pattern, other in dynamic.items() if isinstance(dynamic, Mapping) else ():
            modules = _Modules([f"re:{pattern.removeprefix('-:').removeprefix('+:')}"], "gptq")
            self._dynamic.append((modules, None if pattern.startswith("-:") else other))

    @staticmethod
    def _list(found: Mapping[str, Any], key: str) -> list[str]:
        value = found.get(key) or []
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise ModelError(f"quantization_config.{key} is no list of names")
        return value

    def headers(self, matrix: Matrix, module: str) -> dict[str, Header] | None:
        """Return the tensors that `matrix`, whose whole name is `module`, is stored in, by name: those of one expert if
        each has its own. None if it is not quantised."""
        rows, columns = matrix.rows, matrix.columns
        if not self._name or 0 in (rows, columns) or self._kept.match(module):
            return None
        together = bool(matrix.experts) and "*" not in matrix.name
        if self._name == "mxfp4":
            if not together or columns % 32:
                return None
            grid = (matrix.experts, rows, columns // 32)
            return {f"{module}_blocks": Header("U8", (*grid, 16)), f"{module}_scales": Header("U8", grid)}
        if together:
            return None
        if self._name == "modelopt":
            return self._modelopt(module, rows, columns)
        if self._name == "fp8":
            return self._fp8(f"{module}.weight", rows, columns)
        if self._name == "compressed-tensors":
            group = next((group for targets, group in self._groups if targets.match(module, "Linear")), None)
            return None if group is None else self._compressed(f"{module}.weight", rows, columns, group)
        return self._columns(module, rows, columns)

    def weight(self, matrix: Matrix, module: str) -> tuple[QuantizedWeight, dict[str, Header]] | None:
        """Return how `matrix` is stored, as `weights` finds it in a checkpoint, and the tensors by their role; None if
        it is not quantised."""
        found = self.headers(matrix, module)
        if found is None:
            return None
        infos = {name: TensorInfo(Path("config.json"), *header, 0, header.nbytes) for name, header in found.items()}
        finder = _Finder(infos, self._found, self._model_dtype, (matrix.rows, matrix.columns))
        (weight,) = finder.every()
        return weight, {role: found[name] for role, name in weight.parts.items()}

    def layer_bytes(self, layer: LayerSpec, prefix: str, hidden_size: int) -> tuple[int, int]:
        """Return the bytes of a decoder layer as it is stored, and those of its FP8 codes (e4m3) among them; `prefix`
        is its name in the model, with a dot behind. Without `LayerSpec.matrices` all of its weights count as one
        matrix."""
        size = DTYPE_BYTES[self._model_dtype]
        total, fp8 = layer.parameters * size, 0
        for matrix in layer.matrices or (Matrix("", layer.parameters // hidden_size, hidden_size),):
            found = self.headers(matrix, prefix + matrix.name.replace("*", "0"))
            if found is not None:
                times = matrix.experts if "*" in matrix.name else 1
                total += times * sum(header.nbytes for header in found.values()) - matrix.numel * size
                codes = Header(FP8, (matrix.rows, matrix.columns))
                fp8 += times * sum(header.nbytes for header in found.values() if header == codes)
        return total, fp8

    def _fp8(self, name: str, rows: int, columns: int) -> dict[str, Header]:
        block = self._found.get("weight_block_size", [128, 128])
        shape = (1,) if block is None else _blocks(rows, columns, block, "weight_block_size")
        found = {name: Header("F8_E4M3", (rows, columns)), f"{name}_scale_inv": Header("F32", shape)}
        if self._found.get("activation_scheme") == "static":
            found[f"{name.removesuffix('weight')}activation_scale"] = Header("F32", (1,))
        return found

    def _compressed(self, name: str, rows: int, columns: int, group: Mapping[str, Any]) -> dict[str, Header] | None:
        given, form = group["weights"], str(group.get("format") or self._found.get("format"))
        if form == "dense":
            return None
        bits = _whole(given.get("num_bits", 8), "num_bits")
        if form == "nvfp4-pack-quantized":
            if columns % 16:
                return None
            return {f"{name}_packed": Header("U8", (rows, columns // 2)),
                    f"{name}_scale": Header("F8_E4M3", (rows, columns // 16)),
                    f"{name}_global_scale": Header("F32", (1,))}  # fmt: skip
        if form == "mxfp4-pack-quantized":
            if columns % 32:
                return None
            return {
                f"{name}_packed": Header("U8", (rows, columns // 2)),
                f"{name}_scale": Header("U8", (rows, columns // 32)),
            }
        strategy, grid = given.get("strategy"), (rows, 1)
        if strategy == "tensor":
            grid = (1, 1)
        elif strategy == "group":
            size = _group_size(columns, _whole(given.get("group_size"), "group_size"))
            if not size:
                return None
            grid = (rows, columns // size)
        elif strategy == "block":
            grid = _blocks(rows, columns, given.get("block_structure"), "block_structure")
        scale = Header(self._dtype, (1,) if strategy == "tensor" else grid)
        zeros = not given.get("symmetric", True)
        if form == "pack-quantized":
            if bits not in (4, 8):
                raise ModelError(f"its weights have {bits} bits by compressed-tensors: zinfer reads 4 and 8")
            found = {f"{name}_packed": Header("I32", (rows, ceil(columns * bits / 32))), f"{name}_scale": scale,
                     f"{name}_shape": Header("I64", (2,))}  # fmt: skip
            if zeros:
                found[f"{name}_zero_point"] = Header("I32", (ceil(rows * bits / 32), grid[1]))
            if given.get("actorder") == "group":
                found[f"{name}_g_idx"] = Header("I32", (columns,))
            return found
        kind = "F8_E4M3" if form == "float-quantized" or given.get("type") == "float" else "I8"
        found = {name: Header(kind, (rows, columns)), f"{name}_scale": scale}
        if zeros:
            found[f"{name}_zero_point"] = Header(kind, scale.shape)
        return found

    def _modelopt(self, module: str, rows: int, columns: int) -> dict[str, Header] | None:
        algorithm, layers = self._found.get("quant_algo"), self._found.get("quantized_layers")
        if str(algorithm).upper() == "MIXED_PRECISION":
            own = layers.get(module) if isinstance(layers, Mapping) else None
            if not isinstance(own, Mapping):
                return None
            algorithm = own.get("quant_algo")
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
        found = dict(self._found)
        if self._only and not module.endswith(self._only):
            return None
        for modules, other in self._dynamic:
            if modules.match(module):
                if not isinstance(other, Mapping):
                    return None
                found |= other
        bits, size = _whole(found.get("bits"), "bits"), found.get("group_size", 128)
        if bits not in (4, 8):
            raise ModelError(f"its weights have {bits} bits by {self._name}: zinfer reads 4 and 8")
        each, groups = 32 // bits, 1 if size == -1 else ceil(columns / _whole(size, "group_size"))
        gptq = self._name == "gptq"
        if (columns if gptq else rows) % each:
            return None
        codes = (columns // each, rows) if gptq else (columns, rows // each)
        result = {
            f"{module}.qweight": Header("I32", codes),
            f"{module}.qzeros": Header("I32", (groups, ceil(rows / each))),
            f"{module}.scales": Header("F16", (groups, rows)),
        }
        return result | ({f"{module}.g_idx": Header("I32", (columns,))} if gptq else {})


def ratios(
    layers: tuple[LayerSpec, ...], stack: str, hidden_size: int, config: Mapping[str, Any], dtype: str
) -> tuple[float, float]:
    """Return the bytes of decoder layers as a checkpoint of `config` stores them, and those of FP8 codes (e4m3) among
    them, over those of all in `dtype`: 1 and 0 if they are not quantised, and 1 at most. Raises ModelError as
    `Quantization` does."""
    if method(config) is None:
        return 1.0, 0.0
    rules = Quantization(config, dtype)
    prefix = f"{stack}." if stack else ""
    sizes = [rules.layer_bytes(layer, f"{prefix}{index}.", hidden_size) for index, layer in enumerate(layers)]
    whole = sum(layer.parameters for layer in layers) * DTYPE_BYTES[dtype]
    stored, fp8 = (sum(size) / whole for size in zip(*sizes, strict=True))
    return min(1.0, stored), fp8


def _group_size(columns: int, wanted: int) -> int:
    """Return how many values of a row share a scale: `wanted`, or the largest of `GROUP_SIZES` that divides the row; 0
    if none does."""
    return next((size for size in (wanted, *GROUP_SIZES) if size <= wanted and columns % size == 0), 0)


def _blocks(rows: int, columns: int, block: Any, field: str) -> tuple[int, int]:
    """Return the number of blocks along rows and columns, the last ones cut. Raises ModelError."""
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
        if len(names) > MOST_PATTERNS:
            raise ModelError(f"quantization_config names more than {MOST_PATTERNS:,} modules")
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
    if len(text) > LONGEST_PATTERN or repeated > 6 or re.search(r"\)[*+{]", text):
        raise ModelError(f"quantization_config: the pattern {text[:60]!r} of modules is too complex")
    try:
        return re.compile(text)
    except (re.error, OverflowError):
        raise ModelError(f"quantization_config: {text[:60]!r} is no pattern of modules") from None
