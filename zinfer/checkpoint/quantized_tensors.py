"""Quantised tensors: which stored tensors make a weight, from headers alone.

A quantised weight is stored as codes of 4 or 8 bits and scales, under names of their own. `quantized_weights` finds
them by these names, in the formats of a checkpoint's `quantization_config`; every tensor with codes must have all that
belongs to it, in the shapes that follow from each other. `zinfer.engine.quantization.dequantize` does the arithmetic.
"""

from collections.abc import Collection, Iterator, Mapping
from math import ceil, prod
from typing import Any, Literal, NamedTuple

from zinfer.checkpoint.headers import CheckpointError, TensorInfo
from zinfer.checkpoint.quantization import FP8, STORED_DTYPES, groups_of, settings_of

Format = Literal[
    "fp8", "int", "fp8 or int8", "nvfp4", "mxfp4", "mxfp4 experts", "gptq", "awq", "modelopt fp8", "modelopt nvfp4"
]
# Ends of names whose tensors belong to quantised activations and KV caches; here these are of the model's type.
ACTIVATIONS = (".input_scale", ".activation_scale", ".input_global_scale", ".input_zero_point", ".k_scale", ".v_scale")
EIGHT_BITS = {FP8, "F8_E5M2", "I8"}
FLOATS = {"F32", "F16", "BF16"}
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
        shape = _integers(stored) if self.shape is None else self.shape
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


def _integers(info: TensorInfo) -> tuple[int, ...]:
    """Return the few whole numbers that a tensor holds."""
    size = 8 if info.dtype == "I64" else 4
    with info.file.open("rb") as stream:
        stream.seek(info.start)
        content = stream.read(min(64, info.end - info.start))
    numbers = (content[at : at + size] for at in range(0, len(content), size))
    return tuple(int.from_bytes(number, "little", signed=True) for number in numbers)
