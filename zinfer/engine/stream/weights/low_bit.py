# mypy: disable-error-code="import-not-found"
"""Products with quantised matrices from their codes, by the kernels of humming-kernels.

`prepare` brings codes as they are stored into the form that the kernels read: 4 to 8 bits a weight, packed along the
inputs, with a scale for each group of inputs. Scales and minimums of K-quants are rounded to the type of the states
then, and a minimum is divided by its scale: in bf16 a matrix differs by 0.4% from one whose weights are rounded. The
kernels serve any number of tokens, also of routed experts, and a CUDA graph can hold them. They are compiled at first
use, for the model's shapes, and kept in `~/.humming`.

All that zinfer knows of humming-kernels is in this file.
"""

import json
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache, partial
from math import gcd, lcm
from typing import Any

import torch
from torch import Tensor

from zinfer.core.errors import error_line
from zinfer.core.progress import Progress
from zinfer.engine.quantization.dequantize import Codes, numbers_of, scale_values, zero_values

TYPES = torch.float16, torch.bfloat16  # of states and products
UNIT_ROWS, UNIT_COLUMNS = 128, 64  # rows are padded to the former; columns have to be multiples of the latter
UNPACKED_ROWS = 256  # of the identity matrix, in one product that unpacks a matrix
MIN_TILES = 128  # of a product, where its columns can be split: about as many as an H100 has multiprocessors
MAX_SPLITS = 8
BANDS = tuple(4**power for power in range(9))  # rows of a product's result up to which one way is taken
# Way of a Hopper GPU through long rows of 4-bit integers, where few blocks of them leave it idle: more bytes on their
# way. Mixtral's second matrix takes 20 us for a token on an H200 so, and 36 in humming-kernels' own way.
LONG: dict[str, Any] = {
    "block_shape": (8, UNIT_ROWS, 256),
    "warp_shape": (8, 64, 64),
    "num_stages": 4,
    "num_ctas_per_sm": 1,
}
LONG_COLUMNS, LONG_BLOCKS = 4096, 264  # at least, and at most
_MIDDLES = {"middle4": 8, "middle6": 32, "middle8": 128, "whole4": 0, "whole5": 0, "whole8": 0}
NO_SCALE = 2.0**14  # zero of a group whose scale is zero: numbers less it are rounded to it, and times it a minimum


@cache
def cannot_run(device: torch.device) -> str | None:
    """Return why there are no such products on a device; None if there are."""
    if device.type != "cuda":
        return "no GPU"
    if torch.cuda.get_device_capability(device) < (7, 5):
        return "they need a GPU of compute capability 7.5"
    os.environ.setdefault("HUMMING_DISABLE_PARALLEL_BUILD", "1")  # or its import starts a process
    try:
        from humming.utils.nvrtc import get_nvrtc_library_path

        # The compiler is a process of its own, and finds the rest of NVRTC by this alone.
        places = os.path.dirname(get_nvrtc_library_path()), os.environ.get("LD_LIBRARY_PATH")
        os.environ["LD_LIBRARY_PATH"] = ":".join(filter(None, places))
    except Exception as error:
        return f"no humming-kernels (pip install 'zinfer[kernels]'): {error_line(error)[:120]}"
    return None


Aligned = tuple[Tensor, Tensor, Tensor]  # what `align` returns


@dataclass(frozen=True)
class Form:
    """Quantised matrix, or stack of them, in the form of humming-kernels. It is ``[N, K]``, or ``[E, N, K]``. `weight`
    is int32 ``[.., N, K * bits / 32]``, lowest bits first; `scales` are ``[.., N, K / group]``; `zeros`, of integers
    alone, are int32 ``[.., N * bits / 32, K / group]``, or numbers like `scales`. `kind` is a type of humming-kernels;
    integers without zeros count from the middle of their range. Each matrix is multiplied by one of `factors`."""

    kind: str
    group: int  # columns that share a scale
    weight: Tensor
    scales: Tensor
    zeros: Tensor | None
    factors: tuple[float, ...]
    columns: int

    @property
    def rows(self) -> int:
        return self.weight.shape[-2]

    @property
    def experts(self) -> int:
        return self.weight.shape[0] if self.weight.dim() == 3 else 0


def form_of(parts: Sequence[Codes], shape: Sequence[int], dtype: torch.dtype) -> Form | None:
    """Return the form of a matrix whose rows are those of `parts`. It has the shape `shape`, ``[.., N, K]``. None if
    the kernels cannot read it: columns in an order of their own, odd sizes, or a type that they do not know."""
    first = parts[0]
    others = {"numbers": None, "scales": None, "zeros": None, "supers": None, "divisor": 1.0, "factor": 1.0}
    alike = {(repr(replace(part, **others)), part.zeros is None) for part in parts}  # type: ignore[arg-type]
    if len(alike) > 1 or dtype not in TYPES or any(part.order is not None for part in parts):
        return None
    numbers, scales, zeros = map(_joined, zip(*map(_numbers, parts), strict=True))
    rows, (height, width) = sum(part.rows for part in parts), first.block
    (*lead, n, k) = shape
    if height != 1 or len(scales) != rows or scales.shape[1] * width != k:
        return None
    numbers, scales = numbers.view(*lead, n, -1), scales.view(*lead, n, -1)
    zeros = None if zeros is None else zeros.view(*lead, n, -1)
    if k % UNIT_COLUMNS or k % width or n % 8:
        return None
    kind, factors = _kind_of(first), _factors(parts, rows, lead[0] if lead else 1)
    if kind is None or factors is None or (set(factors) != {1.0} and first.scale_table != "e4m3"):
        return None
    middle, packed_zeros = _MIDDLES.get(first.table), None
    if first.minimums and zeros is not None:
        scales = torch.where((scales == 0) & (zeros != 0), zeros / NO_SCALE, scales.float())
        packed_zeros = (zeros / scales).nan_to_num(0.0).to(dtype).contiguous()
    scales = _scales(scales, "" if scales.is_floating_point() else first.scale_table, dtype)
    if packed_zeros is None and middle is not None and (zeros is not None or middle == 0):
        zeros = torch.zeros_like(scales, dtype=torch.int16) if zeros is None else zeros
        zeros = zeros.int() + middle
        if bool(((zeros < 0) | (zeros >= 1 << first.bits)).any()):
            return None
        packed_zeros = _packed(zeros.transpose(-1, -2), first.bits).transpose(-1, -2).contiguous()
    weight = numbers.contiguous().view(torch.int32)
    return Form(kind, width, weight, scales.contiguous(), packed_zeros, factors, k)


def _factors(parts: Sequence[Codes], rows: int, count: int) -> tuple[float, ...] | None:
    """Return the factor of each of `count` matrices of a stack; None if one of them has several."""
    factors, first = [set[float]() for _ in range(count)], 0
    for part in parts:
        last = first + part.rows
        for number in range(first * count // rows, (last * count - 1) // rows + 1):
            factors[number].add(part.factor / part.divisor)
        first = last
    return tuple(factor for several in factors for factor in several) if all(len(f) == 1 for f in factors) else None


def _numbers(codes: Codes) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return codes of ``[rows, bytes]``, lowest bits first, scales, and zeros. Blocks have no factors any more."""
    numbers = codes.numbers if codes.bits in (4, 8) else _packed(numbers_of(codes), codes.bits).view(torch.uint8)
    scales = scale_values(codes) if codes.supers is not None else codes.scales
    return numbers, scales, zero_values(codes) if codes.minimums else codes.zeros


def _joined(parts: Sequence[Tensor | None]) -> Any:
    some = [part for part in parts if part is not None]
    return torch.cat(some) if some else None


def _kind_of(codes: Codes) -> str | None:
    if codes.table in _MIDDLES and (codes.supers is not None or not codes.scale_table):
        return f"uint{codes.bits}"
    if codes.table == "e2m1" and codes.scale_table in ("e8m0", "e4m3"):
        return "float4e2m1"
    if codes.table == "e4m3" and not codes.scale_table:
        return "float8e4m3"
    return None


def _scales(scales: Tensor, table: str, dtype: torch.dtype) -> Tensor:
    types = {"e8m0": torch.float8_e8m0fnu, "e4m3": torch.float8_e4m3fn}
    return scales.contiguous().view(types[table]) if table else scales.to(dtype)


def _packed(values: Tensor, bits: int) -> Tensor:
    """Pack values of `bits` along the last dimension, lowest first. The result is int32."""
    groups = values.unflatten(-1, (-1, lcm(32, bits) // bits))
    words = groups.new_zeros(*groups.shape[:-1], groups.shape[-1] * bits // 32, dtype=torch.int64)
    for number in range(groups.shape[-1]):
        word, shift = divmod(number * bits, 32)
        value = groups[..., number].long() << shift
        words[..., word] |= value & 0xFFFFFFFF
        if shift + bits > 32:
            words[..., word + 1] |= value >> 32
    packed: Tensor = words.flatten(-2).to(torch.int32)
    return packed


class _Kernels:
    """Kernels of humming-kernels for one shape: each for products of up to so many rows."""

    def __init__(self, config: Any, tensors: dict[str, Tensor], experts: int, kind: str) -> None:
        self.tensors, self.experts, self._config, self._kind = tensors, experts, config, kind
        self.name = str(config.to_str())
        self._compute = json.dumps({"gemm_type": "indexed" if experts else "dense"})
        self._device = tensors["weight"].device
        self._locks = torch.zeros(2048, dtype=torch.int32, device=self._device)  # which no kernel takes
        self._tunings: dict[int, tuple[int, str]] = {}

    def tuning(self, count: int) -> tuple[int, str]:
        """Return rows of a block, and a product's division among programs. It is that of products with `count` rows of
        results. No programs add to the same results: they would do so in any order, in 16 bits."""
        band = next((band for band in BANDS if count <= band), BANDS[-1])
        if band not in self._tunings:
            from humming.tune import get_heuristics_config

            gemm = "indexed" if self.experts else "dense"
            tuning = get_heuristics_config(self._config, shape_m=band, gemm_type=gemm, device=self._device)
            tuning = {**tuning, "use_stream_k": False, **(LONG if self._is_long(tuning, band) else {})}
            if self._config.is_fp_zero_point:
                tuning["use_tma_bzp"] = False  # whose copies may have more rows than the hardware (TMA) takes
            self._tunings[band] = tuning["block_shape"][0], json.dumps(tuning)
        return self._tunings[band]

    def _is_long(self, tuning: dict[str, Any], count: int) -> bool:
        """Tell whether products of up to `count` rows go the way `LONG`."""
        rows, columns = self._config.shape_n, self._config.shape_k
        blocks = -(-rows // UNIT_ROWS) * (min(count, self.experts) if self.experts else 1)
        hopper = torch.cuda.get_device_capability(self._device) == (9, 0)
        integers = self._kind == "uint4" and tuning["block_shape"][0] == LONG["block_shape"][0]
        integers = integers and tuning.get("mma_type") == "mma"  # WGMMA takes other shapes
        fits = columns >= LONG_COLUMNS and columns % LONG["block_shape"][2] == 0
        return hopper and integers and fits and blocks <= LONG_BLOCKS

    def compile(self) -> None:
        """Begin to compile all kernels, on all cores; `finish` waits for them. Compiled ones are read."""
        from humming.kernel.humming import HummingKernel

        for way in dict.fromkeys(self.tuning(band)[1] for band in BANDS):
            made = partial(HummingKernel.prepare_kernels, self.name, self._compute, way, self._device)
            _compiling.append(_cores().submit(made))

    def __call__(self, states: Tensor, count: int, aligned: Aligned | None = None) -> Tensor:
        """Return the products ``[count, N]``; each of `states` has as many in a row."""
        from humming.ops import humming_gemm

        experts: dict[str, Any] = {}
        if aligned is not None:
            experts = dict(zip(("sorted_ids", "expert_ids", "num_tokens_padded"), aligned, strict=True))
            experts["top_k"] = count // len(states)
        product: Tensor = humming_gemm(
            layer_config=self.name,
            compute_config=self._compute,
            tuning_config=self.tuning(count)[1],
            inputs=states.contiguous(),
            locks=self._locks,
            **self.tensors,
            **experts,
        )
        return product


@dataclass(frozen=True)
class Matrix:
    """Matrix ``[N, K]``, or stack ``[E, N, K]``, that kernels multiply with. See `prepare`."""

    rows: int
    columns: int
    experts: int
    dtype: torch.dtype  # of states and products
    whole: _Kernels = field(repr=False)
    parts: _Kernels | None = field(repr=False)  # same bytes as a stack of parts of the columns: `splits` of a matrix
    splits: int
    _aligned: dict[int, Aligned] = field(default_factory=dict, repr=False)  # of `parts`, by the number of tokens

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.whole.tensors.values())

    def takes(self, states: Tensor) -> bool:
        """Tell whether it multiplies `states` ``[.., K]``."""
        return states.dtype == self.dtype and states.shape[-1] == self.columns and states.numel() > 0

    def multiply(self, states: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return products ``[tokens, N]`` of ``[tokens, K]``. A bias ``[N]`` is added."""
        from zinfer.engine.stream.weights.align_kernel import summed

        tokens = len(states)
        if self.parts is None or not self._few(-(-tokens // 16)):
            product = self.whole(states, tokens)
            return product if bias is None else product.add_(bias)
        count = tokens * self.splits
        partial = self.parts(states.reshape(count, -1), count, self._aligned_parts(tokens))
        return summed(partial.view(tokens, self.splits, self.rows), bias)

    def multiply_pairs(self, states: Tensor, experts: Tensor, aligned: dict[int, Aligned]) -> Tensor:
        """Return partial products of each pair of token and expert. They are ``[pairs, splits, N]``, to be added along
        `splits`. `states` are ``[tokens, K]``, or ``[pairs, K]``, `experts` int64 ``[tokens, k]``; `aligned` keeps what
        `align` returned for them, by rows of a block. Rows of pairs whose expert is not below `E` have no meaning."""
        pairs = experts.numel()
        if self.parts is None or len(states) != pairs or not self._few(pairs):
            block = self.whole.tuning(pairs)[0]
            if block not in aligned:
                aligned[block] = _align(experts, self.experts, block)
            return self.whole(states, pairs, aligned[block])[:, None]
        count = pairs * self.splits
        split = _align(experts, self.experts, self.parts.tuning(count)[0], self.splits)
        return self.parts(states.reshape(count, -1), count, split).view(pairs, self.splits, self.rows)

    def _few(self, blocks: int) -> bool:
        """Tell whether so few blocks of rows leave the GPU idle."""
        return blocks * -(-self.rows // UNIT_ROWS) < MIN_TILES

    def _aligned_parts(self, tokens: int) -> Aligned:
        """Return what `align` does where each token has all parts."""
        assert self.parts is not None
        if (made := self._aligned.get(tokens)) is not None:
            return made
        device, part = self.whole.tensors["weight"].device, torch.arange(self.splits)
        block = self.parts.tuning(tokens * self.splits)[0]
        made = _align(part.to(device).expand(tokens, -1).contiguous(), self.splits, block)
        if not torch.cuda.is_current_stream_capturing():  # memory of a graph goes with it
            self._aligned[tokens] = made
        return made

    def unpack(self, out: Tensor) -> None:
        """Unpack the matrix into `out` ``[.., N, K]``, exactly as it multiplies."""
        identity = torch.eye(self.columns, dtype=out.dtype, device=out.device)
        for expert in range(max(1, self.experts)):
            target = (out[expert] if self.experts else out).t()
            for first in range(0, self.columns, UNPACKED_ROWS):
                states = identity[first : first + UNPACKED_ROWS]
                aligned = None
                if self.experts:
                    alone = torch.full((len(states), 1), expert, device=out.device)
                    aligned = _align(alone, self.experts, self.whole.tuning(len(states))[0])
                target[first : first + len(states)] = self.whole(states, len(states), aligned)


def _align(experts: Tensor, count: int, block: int, splits: int = 1) -> Aligned:
    from zinfer.engine.stream.weights.align_kernel import align  # some machines have no Triton

    return align(experts, count, block, splits)


_compiled = set[str]()  # names of kernels that are compiled
_compiling: list[Future[Any]] = []


@cache
def _cores() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(len(os.sched_getaffinity(0)), "compile")


def finish(progress: Progress) -> None:
    """Wait for the kernels of all matrices prepared so far. Raises what the compiler raises."""
    count = len(_compiling)
    try:
        for number, compiling in enumerate(_compiling):
            compiling.result()
            progress("compiling kernels", (number + 1) / count)
    finally:
        _compiling.clear()


def prepare(form: Form, dtype: torch.dtype) -> Matrix:
    """Return the matrix of a form, for states of `dtype`. Raises what humming-kernels raises."""
    from humming import dtypes
    from humming.schema import HummingWeightSchema
    from humming.transform import prepare_fp16_e8m0_scale, prepare_layer_config, transform_humming_tensors

    types = {torch.float8_e8m0fnu: dtypes.float8e8m0, torch.float8_e4m3fn: dtypes.float8e4m3}
    scaled, device = set(form.factors) != {1.0}, form.weight.device
    schema = HummingWeightSchema(
        b_dtype=dtypes.DataType.from_str(form.kind),
        bs_dtype=types.get(form.scales.dtype) or dtypes.DataType.from_torch_dtype(form.scales.dtype),
        weight_scale_group_size=form.group if form.group < form.columns else 0,
        weight_scale_2_type="tensor" if scaled else None,
        has_zero_point=form.zeros is not None,
        is_fp_zero_point=form.zeros is not None and form.zeros.is_floating_point(),
    )
    tensors = {"weight": form.weight, "weight_scale": form.scales}
    if form.zeros is not None:
        tensors["zero_point"] = form.zeros
    if scaled:
        tensors["weight_scale_2"] = torch.tensor(form.factors, device=device)

    def config_of(columns: int, experts: int) -> Any:
        return prepare_layer_config(
            shape_n=form.rows,
            shape_k=columns,
            weight_schema=schema,
            num_experts=experts or None,
            pad_n_to_multiple=UNIT_ROWS,
            torch_dtype=dtype,
            device=device,
            tensors=tensors,
        )

    config, tensors = prepare_fp16_e8m0_scale(config_of(form.columns, form.experts), tensors)
    whole = _Kernels(config, transform_humming_tensors(config, tensors), form.experts, form.kind)
    splits, parts = _splits(form), None
    if splits > 1 and config.weight_scale_2_type == schema.weight_scale_2_type:
        count = max(1, form.experts) * splits
        views = {
            name: tensor.view(count, -1, tensor.shape[-1]) for name, tensor in whole.tensors.items() if tensor.dim() > 1
        }
        if scaled:
            views["weight_scale_2"] = whole.tensors["weight_scale_2"].repeat_interleave(splits)
        parts = _Kernels(config_of(form.columns // splits, count), views, count, form.kind)
    for kernels in (whole, parts):
        if kernels is not None and kernels.name not in _compiled:
            kernels.compile()
            _compiled.add(kernels.name)
    return Matrix(form.rows, form.columns, form.experts, dtype, whole, parts, splits if parts else 1)


def _splits(form: Form) -> int:
    """Return the parts of columns with which a token fills the GPU. It is 1 if they cannot be split."""
    tiles = -(-form.rows // UNIT_ROWS) * (2 if form.experts else 1)
    unit = UNIT_COLUMNS * form.group // gcd(UNIT_COLUMNS, form.group)
    if tiles >= MIN_TILES or form.group == form.columns or form.columns % unit:
        return 1
    able = [splits for splits in range(1, MAX_SPLITS + 1) if form.columns // unit % splits == 0]
    return next((splits for splits in able if splits * tiles >= MIN_TILES), able[-1])
