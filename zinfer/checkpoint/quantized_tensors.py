"""Quantised tensors: which stored tensors make a weight, from headers alone.

A quantised weight is stored as codes of 4 or 8 bits and scales, under names of their own. `quantized_weights` finds
them by these names, in the formats of a checkpoint's `quantization_config`; every tensor with codes must have all that
belongs to it, in the shapes that follow from each other. `zinfer.engine.quantization.dequantize` does the arithmetic.
"""

import os
import struct
from collections.abc import Iterator, Mapping
from math import ceil, prod
from typing import Any, Literal, NamedTuple

from zinfer.checkpoint.headers import CheckpointError, TensorInfo
from zinfer.checkpoint.quantization import FP8, STORED_DTYPES, settings_of

Format = Literal[
    "fp8", "int", "fp8 or int8", "nvfp4", "mxfp4", "mxfp4 experts", "gptq", "awq", "modelopt fp8", "modelopt nvfp4"
]
# Ends of names whose tensors belong to quantised activations and KV caches; here these are of the model's type.
ACTIVATIONS = (".input_scale", ".activation_scale", ".input_global_scale", ".input_zero_point", ".k_scale", ".v_scale")
EIGHT_BITS = {FP8, "F8_E5M2", "I8"}
FLOATS = {"F32", "F16", "BF16"}


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


class TensorFinder:
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
        self.tensors, self.settings, self.dtype = tensors, settings, STORED_DTYPES.get(dtype, "BF16")
        self.shape = shape
        self.used = set[str]()  # stored names

    def fault(self, name: str, reason: str) -> CheckpointError:
        info = self.tensors[name]
        return CheckpointError(f"{info.file}: {name[:200]} ({info.dtype} {list(info.shape)[:6]}) {reason}")

    def part(self, role: str, name: str, dtypes: set[str], like: str) -> TensorInfo:
        """Return the tensor `name`, which `like` needs. Raises CheckpointError if it is none of `dtypes`."""
        if name not in self.tensors:
            raise self.fault(like, f"is quantised, and its {role} {name[-80:]} is missing")
        if self.tensors[name].dtype not in dtypes:
            wanted = " or ".join(sorted(dtypes))
            raise self.fault(name, f"holds no {role} of a quantised weight: its type should be {wanted}")
        self.used.add(name)
        return self.tensors[name]

    def zeros(self, name: str, scales: TensorInfo, dtypes: set[str], shape: tuple[int, ...]) -> dict[str, str]:
        """Return the tensor of zero points, if any, by its role. Raises CheckpointError."""
        if name not in self.tensors:
            return {}
        if self.part("zero points", name, dtypes, name).shape != shape:
            raise self.fault(name, f"does not fit scales of {list(scales.shape)[:4]}")
        return {"zeros": name}

    def order(self, name: str, columns: int) -> dict[str, str]:
        """Return the tensor that names the groups of the columns, if any. Raises CheckpointError."""
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
        finders = {
            "fp8": self.fp8,
            "mxfp4": self.mxfp4,
            "compressed-tensors": self.compressed,
            "modelopt": self.modelopt,
        }
        return finders.get(self.settings["quant_method"], self.columns)()

    def fp8(self) -> Iterator[QuantizedWeight]:
        scales = {name: name.removesuffix("_scale_inv") for name in self.tensors if name.endswith("_scale_inv")}
        for scale in [name for name in self.tensors if name.endswith(".scale")]:  # DeepSeek V4's names
            name = f"{scale.removesuffix('scale')}weight"
            if name in self.tensors and self.tensors[name].dtype in EIGHT_BITS:
                scales[scale] = name
        for scale, name in scales.items():
            info = self.part("codes", name, EIGHT_BITS, scale)
            self.part("scales", scale, {*FLOATS, "F8_E8M0", "U8"}, name)
            if len(info.shape) < 2 or (info.dtype == "I8" and len(info.shape) > 2):
                raise self.fault(name, "is no matrix")
            if info.dtype == "I8":  # routed experts of DeepSeek V4
                yield self._pairs("mxfp4", name, name, self.dtype, scale=scale)
                continue
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

    def _pairs(
        self, kind: Format, weight: str, name: str, dtype: str, whole: str = "", scale: str = ""
    ) -> QuantizedWeight:
        """Return a weight of 4-bit floats, two in a byte."""
        rows, width = self.tensors[name].shape
        parts = {"codes": name, "scales": scale or f"{weight}_scale"}
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
        """Yield the weights of GPTQ and AWQ, stored as ``[in, out]``."""
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
