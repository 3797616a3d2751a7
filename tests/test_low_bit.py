"""Products from codes: their form for the kernels, and the ways through the engine to them and around them.

Here torch takes the place of humming-kernels, from the same form (`Double`): it needs a GPU. `tests/test_gpu.py` has
the kernels themselves.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests import test_continuous, test_drafts, test_quantized
from tests.grid import covering
from tests.running import error
from tests.test_codec import compile_for_h100
from tests.test_experts import queued as queued  # the fixture
from tests.test_graphs import Rerun, status
from tests.test_graphs import recorder as recorder  # the fixture
from tests.test_parity import OUTPUT_LEN, greedy, load
from tests.test_quantized import made as made  # the fixture
from zinfer.checkpoint.resolve import resolve
from zinfer.engine.base import Engine
from zinfer.engine.quantization.dequantize import FP4, Codes, block_codes, expand
from zinfer.engine.stream.layer_graphs import BY_LAYER
from zinfer.engine.stream.weights import chunk as chunk_module
from zinfer.engine.stream.weights import low_bit
from zinfer.engine.stream.weights.align_kernel import align
from zinfer.engine.stream.weights.formats import CodesLayout
from zinfer.engine.stream.weights.low_bit import Form, form_of
from zinfer.engine.stream.weights.products import LazyWeight
from zinfer.plan.planner import make_plan

Patch = pytest.MonkeyPatch
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LENGTHS = (5, 9, 3)
# Shape; bits, table, scales' grid and block, their type and table, the type of the result, other fields of `Codes`.
CASES: dict[str, tuple[Any, ...]] = {
    "int4": ((1000, 4096), 4, "middle4", (1000, 32), (1, 128), BF16, "", BF16, {}),
    "int4 in fp16": ((1000, 256), 4, "middle4", (1000, 4), (1, 64), FP16, "", FP16, {}),
    "int4 of a row": ((72, 64), 4, "middle4", (72, 1), (1, 64), BF16, "", BF16, {}),
    "gptq": ((1024, 512), 4, "whole4", (1024, 4), (1, 128), FP16, "", FP16, {"zeros": (0, 16)}),
    "int4 with zeros": ((128, 256), 4, "middle4", (128, 2), (1, 128), BF16, "", BF16, {"zeros": (-8, 8)}),
    "int8": ((128, 256), 8, "middle8", (128, 1), (1, 256), BF16, "", BF16, {}),
    "gptq of 8 bits": ((128, 256), 8, "whole8", (128, 2), (1, 128), FP16, "", FP16, {"zeros": (100, 150)}),
    "gptq of 8 bits in bf16": ((128, 256), 8, "whole8", (128, 8), (1, 32), FP16, "", BF16, {"zeros": (1, 256)}),
    "mxfp4": ((128, 2880), 4, "e2m1", (128, 90), (1, 32), torch.uint8, "e8m0", BF16, {}),
    "nvfp4": ((128, 256), 4, "e2m1", (128, 16), (1, 16), torch.uint8, "e4m3", BF16, {"divisor": 3.7}),
    "fp8 of rows": ((128, 256), 8, "e4m3", (128, 1), (1, 256), BF16, "", BF16, {}),
    "experts in int4": ((3, 96, 256), 4, "middle4", (288, 2), (1, 128), BF16, "", BF16, {}),
    "experts in mxfp4": ((3, 96, 64), 4, "e2m1", (288, 2), (1, 32), torch.uint8, "e8m0", BF16, {}),
    "experts in nvfp4": ((3, 96, 64), 4, "e2m1", (288, 4), (1, 16), torch.uint8, "e4m3", BF16, {"factor": 0.37}),
    "Q4_1": ((128, 512), "Q4_1"),
    "Q4_K": ((128, 512), "Q4_K"),
    "Q5_K": ((128, 512), "Q5_K"),
    "Q6_K": ((128, 512), "Q6_K"),
    "experts in Q4_K": ((3, 96, 256), "Q4_K"),
    "experts in Q5_K": ((3, 96, 256), "Q5_K"),
    "experts in Q6_K": ((3, 96, 256), "Q6_K"),
}


# Sizes of models, for GPUs: kernels divide long rows, and many of them, in other ways.
LARGE: dict[str, tuple[Any, ...]] = {
    "many long rows": ((2, 8192, 4096), 4, "middle4", (16384, 32), (1, 128), BF16, "", BF16, {}),
    "few longer rows": ((2, 1024, 14336), 4, "middle4", (2048, 112), (1, 128), BF16, "", BF16, {}),
    "first matrices in Q4_K": ((4, 1536, 2048), "Q4_K"),
    "second matrices in Q4_K": ((4, 2048, 768), "Q4_K"),
    "few longer rows in Q4_K": ((2, 1024, 14336), "Q4_K"),
    "few longer rows in Q6_K": ((2, 1024, 14336), "Q6_K"),
    "a matrix of long rows": ((16384, 4096), 4, "middle4", (16384, 32), (1, 128), BF16, "", BF16, {}),
}


def type_of(name: str) -> torch.dtype:
    """Return the type of the result of a case."""
    case = (CASES | LARGE)[name]
    return BF16 if isinstance(case[1], str) else case[-2]


def codes_of(name: str) -> Codes:
    """Return random codes of one of `CASES` or `LARGE`."""
    if isinstance(kind_name := (CASES | LARGE)[name][1], str):
        return k_codes((CASES | LARGE)[name][0], kind_name)
    (*lead, rows, columns), bits, table, grid, block, kind, coded, dtype, more = (CASES | LARGE)[name]
    dice = torch.Generator().manual_seed(len(name))
    rows *= lead[0] if lead else 1
    numbers = torch.randint(0, 256, (rows, columns * bits // 8), dtype=torch.uint8, generator=dice)
    if table == "e4m3":
        numbers &= 0xF7  # no NaN
    if coded:
        low, high = (110, 124) if coded == "e8m0" else (1, 120)
        scales = torch.randint(low, high, tuple(grid), dtype=torch.uint8, generator=dice)
    else:
        scales = (torch.rand(grid, generator=dice) / 10 + 0.01).to(kind)
    given = dict(more)
    if zeros := given.pop("zeros", None):
        given["zeros"] = torch.randint(zeros[0], zeros[1], tuple(grid), generator=dice).to(torch.int16)
    return Codes(numbers, columns, bits, table, scales, block, dtype, coded, **given)


def k_codes(shape: tuple[int, ...], name: str) -> Codes:
    """Return random blocks of a GGUF as codes. The scale of the first group is zero."""
    from tests import ggufs

    dice = np.random.default_rng(len(name) + shape[-1])
    values = dice.standard_normal((math.prod(shape[:-1]), shape[-1]), np.float32)
    codes = block_codes(name, torch.from_numpy(ggufs.stored(values, ggufs.Kind[name], dice)))
    codes.scales[0, 0] = 0
    return codes


def parts_of(codes: Codes, count: int) -> list[Codes]:
    """Return codes in `count` parts of whole blocks."""
    size = codes.rows // codes.block[0] // count * codes.block[0]
    bounds = [*(size * number for number in range(count)), codes.rows]
    return [codes.part(first, last - first) for first, last in pairwise(bounds)]


def values_of(form: Form) -> Tensor:
    """Return the values that a form stands for, by its description alone: float64, ``[.., N, K]``."""
    bits = 8 if form.kind == "float8e4m3" else 4 if form.kind == "float4e2m1" else int(form.kind[-1])
    every = (form.weight[..., None] >> torch.arange(32) & 1).flatten(-2).unflatten(-1, (-1, bits))
    numbers = (every.long() << torch.arange(bits)).sum(-1)
    if form.kind == "float4e2m1":
        values = torch.tensor(FP4, dtype=torch.float64)[numbers]
    elif form.kind == "float8e4m3":
        values = numbers.to(torch.uint8).view(torch.float8_e4m3fn).double()
    else:
        values = numbers.double() - (1 << bits - 1 if form.zeros is None else 0)
    if form.zeros is not None and form.zeros.is_floating_point():
        values -= form.zeros.double().repeat_interleave(form.group, -1)
    elif form.zeros is not None:
        zeros = form.zeros.long()[..., None, :] >> torch.arange(0, 32, bits)[:, None] & (1 << bits) - 1
        values -= zeros.flatten(-3, -2).double().repeat_interleave(form.group, -1)
    values *= form.scales.double().repeat_interleave(form.group, -1)
    factors = torch.tensor(form.factors, dtype=torch.float64)
    return values * (factors[:, None, None] if form.experts else factors)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_a_form_stands_for_the_values_of_its_codes(name: str, count: int) -> None:
    codes, shape, dtype = codes_of(name), CASES[name][0], type_of(name)
    form = form_of(parts_of(codes, count), shape, dtype)
    assert form is not None
    expected = expand(codes, dtype).view(shape)
    assert (form.experts, form.rows, form.columns) == (shape[0] if len(shape) == 3 else 0, *expected.shape[-2:])
    values = values_of(form)
    equal = torch.equal(values.to(FP32).to(dtype), expected)
    assert equal or error(values, expected) < (5e-3 if codes.minimums else 3e-3)
    if codes.minimums:  # the first group has no scale
        assert error(values.flatten(0, -2)[0, :32], expected.flatten(0, -2)[0, :32]) < 2**-8


def test_each_expert_has_a_factor_of_its_own() -> None:
    several = parts_of(codes_of("experts in nvfp4"), 3)
    parts = [replace(part, factor=factor) for part, factor in zip(several, (1, 2, 5), strict=True)]
    form = form_of(parts, (3, 96, 64), BF16)
    assert form is not None
    assert form.factors == (1, 2, 5)
    assert error(values_of(form), torch.cat([expand(part, BF16) for part in parts]).view(3, 96, 64)) < 2e-3
    assert form_of(parts, (2, 144, 64), BF16) is None, "an expert with two factors"


@pytest.mark.parametrize(
    ("name", "changes", "shape", "dtype"),
    [
        ("int4", {}, (1000, 4096), FP32),
        ("int4", {"order": torch.zeros(4096, dtype=torch.int32)}, (1000, 4096), BF16),
        ("int4", {"factor": 2.0}, (1000, 4096), BF16),
        ("int4", {"table": "int4 of another kind"}, (1000, 4096), BF16),
        ("int4", {"block": (8, 128), "scales": torch.ones(125, 32)}, (1000, 4096), BF16),
        ("gptq", {"zeros": torch.full((1024, 4), 16, dtype=torch.int16)}, (1024, 512), FP16),
        ("int4 of a row", {"columns": 32, "numbers": torch.zeros(72, 16).byte(), "block": (1, 32)}, (72, 32), BF16),
    ],
)  # fmt: skip
def test_codes_that_the_kernels_cannot_read_have_no_form(
    name: str, changes: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    assert form_of([replace(codes_of(name), **changes)], shape, dtype) is None


@dataclass
class Double:
    """A matrix that multiplies by torch, as `low_bit.Matrix` does by its kernels."""

    form: Form
    dtype: torch.dtype
    kernel: "Kernel"
    nbytes = 1

    def __post_init__(self) -> None:
        self.rows, self.columns, self.experts = self.form.rows, self.form.columns, self.form.experts
        self.values = values_of(self.form).to(BF16).to(self.dtype)

    def takes(self, states: Tensor) -> bool:
        return states.dtype == self.dtype

    def multiply(self, states: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.kernel(lambda: functional.linear(states, self.values, bias))

    def multiply_pairs(self, states: Tensor, experts: Tensor, _aligned: object) -> Tensor:
        numbers, owners, total = align(experts, self.experts, 4)
        pairs = experts.numel()
        out = torch.full((pairs, 1, self.rows), float("nan"), dtype=self.dtype)
        for index in range(int(total)):
            pair = int(numbers[index])
            if pair < pairs:
                state = states[pair * len(states) // pairs]
                out[pair, 0] = functional.linear(state, self.values[int(owners[index // 4])])
        return self.kernel(lambda: out)

    def unpack(self, out: Tensor) -> None:
        self.kernel.unpacked += 1
        out.copy_(self.values)


class Kernel:
    """Counts the products of all matrices, in `calls`; `fault` is raised, and `factor` makes them wrong."""

    def __init__(self) -> None:
        self.calls, self.unpacked, self.factor = 0, 0, 1.0
        self.fault: Exception | None = None

    def __call__(self, product: Callable[[], Tensor]) -> Tensor:
        self.calls += 1
        if self.fault is not None:
            raise self.fault
        return self.factor * product()


def replaced(patch: Patch) -> Kernel:
    """Have torch multiply in place of humming-kernels, also odd sizes and float32."""
    double = Kernel()
    patch.setattr(low_bit, "cannot_run", lambda _device: None)
    patch.setattr(low_bit, "prepare", lambda form, dtype: Double(form, dtype, double))
    patch.setattr(low_bit, "UNIT_COLUMNS", 16)
    patch.setattr(low_bit, "TYPES", (*low_bit.TYPES, FP32))
    return double


@pytest.fixture
def kernel(monkeypatch: Patch) -> Kernel:
    return replaced(monkeypatch)


def load_or_unpack(reads: bool, *place: Any, **options: Any) -> Any:
    """Load an engine. Without `reads` no kernel reads its codes: it unpacks every layer."""
    with Patch.context() as patch:
        if not reads:
            patch.setattr("zinfer.engine.stream.engine.PackedProducts", lambda *_: None)
        return load("stream", *place, weight_codec="lossless", **options)


def start(directory: Path, share: str = "100%", kernel: bool = True, **options: Any) -> Any:
    """Load an engine with `share` of its weights quantised on the device. It reads their codes if `kernel`.

    Its layer buffer holds NaN before a layer is unpacked.
    """
    engine = load_or_unpack(kernel, directory, **options)
    plan = engine.plan
    case = plan.case.model_copy(update={"gpu_weights": share})
    engine.plan = plan if "device_rows" in options else make_plan(case, plan.model, plan.machine)
    put = engine._ring._unpack

    def unpacked(index: int) -> None:
        engine._ring.layer_buffer.fill_(255)
        put(index)

    engine._ring._unpack = unpacked
    return engine


def status_of(engine: Engine) -> object:
    return engine.effective().settings.get("packed_kernel")


def run(engine: Any) -> Tensor:
    """Return the tokens of a batch, twice the same."""
    tokens = [greedy(engine, LENGTHS) for _ in range(2)]
    assert torch.equal(*tokens)
    return tokens[0]


@pytest.fixture
def int4(made: Callable[[str], Path], kernel: Kernel) -> tuple[Any, Tensor]:
    """Load an engine that reads codes; return it and tokens of unpacked weights."""
    expected = run(start(made("int4 groups"), kernel=False))
    return start(made("int4 groups")), expected


@pytest.mark.parametrize(
    ("name", "share"), covering(["int4 groups", "fp8 of experts", "gptq in order", "int8 channels"], ["60%", "100%"])
)
def test_layers_that_stay_give_the_same_tokens(
    name: str, share: str, made: Callable[[str], Path], kernel: Kernel, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(chunk_module, "CHUNK_BYTES", 4000)  # a matrix is several chunks
    expected = run(start(made(name), share, kernel=False))
    assert kernel.calls == 0
    engine = start(made(name), share)
    first, served = greedy(engine, LENGTHS), name.startswith("int")  # not scales of blocks, nor columns in an order
    assert status_of(engine) == ("on" if served else "no weights that it reads")
    assert bool(engine._ring.streamed) == (share == "60%")
    assert torch.equal(first, expected)
    assert torch.equal(run(engine), expected)
    assert (kernel.calls > 0) == served


def test_layers_that_come_and_go_give_the_same_tokens(int4: tuple[Any, Tensor]) -> None:
    """Layers that stream again have their codes back; those that stay are prepared anew. No plan keeps layers unpacked
    that are read from their codes: the bytes that the kernels have in their form would be missing."""
    engine, expected = int4
    plan = engine.plan
    for share, kept in (("100%", 3), ("60%", 2), ("100%", 3), ("0%", 0)):
        engine.plan = make_plan(plan.case.model_copy(update={"gpu_weights": share}), plan.model, plan.machine)
        assert torch.equal(greedy(engine, LENGTHS), expected)
        made_of = engine._products._matrices
        assert len(engine._ring._resident) == len(made_of) == kept
        assert engine._products.nbytes == sum(len(matrices) for matrices in made_of.values())
        held = [engine._ring._resident[index].nbytes for index in made_of]
        assert all(size < engine._ring.layers[0].size / 2 for size in held), "codes are held once"
    engine.plan = plan
    assert torch.equal(greedy(engine, LENGTHS), expected)
    engine.apply_placement(plan.placement.model_copy(update={"unpacked_layers": (0, 1)}))
    assert torch.equal(greedy(engine, LENGTHS), expected)
    assert not engine._ring.unpacked


def test_a_mostly_quantised_layer_holds_the_rest_as_it_is(
    made: Callable[[str], Path], kernel: Kernel, monkeypatch: Patch
) -> None:
    for name in ("MIN_NUMEL", "BLOCK"):
        monkeypatch.setattr(f"zinfer.engine.stream.weights.codec.{name}", 1 << 6)
    expected = run(start(made("mxfp4 of experts"), kernel=False, dtype="bfloat16"))
    engine = start(made("mxfp4 of experts"), dtype="bfloat16")
    assert torch.equal(greedy(engine, LENGTHS), expected)
    layer, held = engine._ring.layers[0], engine._ring._resident[0]
    assert {type(chunk.layout) for chunk in layer.chunks} == {CodesLayout, type(None)}
    parameters = dict(engine._layers[0].named_parameters())
    places = {name: weight.data_ptr() - held.data_ptr() for name, weight in parameters.items()}
    inside = {name for name, offset in places.items() if 0 <= offset < held.nbytes}
    assert "self_attn.q_proj.weight" in inside
    assert inside == set(layer.in_place) == {name for name in parameters if not name.endswith("_proj")}


def test_every_matrix_of_bloom_is_read_from_its_codes(checkpoint: Callable[..., Path], kernel: Kernel) -> None:
    """Weights that are rounded while they load, with biases; prompts and steps."""
    spec = resolve(str(checkpoint("bloom")), "bfloat16", weights="int4")
    engines = [load_or_unpack(reads, spec, gpu_weights="100%") for reads in (False, True)]
    assert torch.equal(*(greedy(engine, LENGTHS) for engine in engines))
    assert kernel.calls == (OUTPUT_LEN + 1) * 4 * spec.num_layers, "each prepared once, then in each pass"


def test_weights_that_are_read_without_a_product_are_unpacked(int4: tuple[Any, Tensor], kernel: Kernel) -> None:
    """Modules with another forward pass, later reads of the weight, or hooks."""
    engine, expected = int4
    for layer in engine._layers:
        assert isinstance(layer.mlp.up_proj.weight, LazyWeight)
        query, out, up = layer.self_attn.q_proj, layer.self_attn.o_proj, layer.mlp.up_proj
        query.forward = lambda states, module=query: states @ module.weight.view(module.out_features, -1).t()
        out.forward = lambda states, module=out: functional.linear(input=states, weight=module.weight[:])
        up.register_forward_hook(lambda _module, _args, output: output * 1)
    assert torch.equal(run(engine), expected)
    assert kernel.unpacked > 0
    assert kernel.calls > 0


@pytest.mark.parametrize(
    ("fault", "factor", "reason"),
    [
        (RuntimeError("no code for\nthis GPU"), 1.0, "the kernel failed: RuntimeError: no code for this GPU"),
        (None, 1.2, "the kernel's results differ from those of unpacked weights"),
    ],
)
def test_a_kernel_that_fails_is_given_up(
    fault: Exception | None, factor: float, reason: str, int4: tuple[Any, Tensor], kernel: Kernel
) -> None:
    kernel.fault, kernel.factor = fault, factor
    engine, expected = int4
    assert torch.equal(greedy(engine, LENGTHS), expected)
    assert status_of(engine) == reason
    assert torch.equal(run(engine), expected)
    assert kernel.calls == 1


def test_a_lack_of_memory_is_the_callers(made: Callable[[str], Path], kernel: Kernel) -> None:
    engine = start(made("int4 groups"))
    kernel.fault = torch.OutOfMemoryError("no room")
    with pytest.raises(torch.OutOfMemoryError):
        greedy(engine, LENGTHS)
    kernel.fault = None
    engine.clear()
    assert run(engine).shape
    assert status_of(start(made("int4 groups"), "0%")) is None


def test_recorded_steps_compute_from_codes(made: Callable[[str], Path], kernel: Kernel, recorder: Rerun) -> None:
    expected = run(start(made("int4 groups"), kernel=False, cuda_graphs="off"))
    engine = start(made("int4 groups"))
    assert torch.equal(greedy(engine, LENGTHS), expected)
    assert status(engine) == "on"
    assert recorder.replayed > 0


def test_a_recorded_layer_unpacks_what_its_call_unpacks(
    made: Callable[[str], Path], kernel: Kernel, recorder: Rerun, monkeypatch: Patch
) -> None:
    expected = run(start(made("int4 groups"), "60%", kernel=False, cuda_graphs="off"))
    engine = start(made("int4 groups"), "60%")
    for layer in engine._layers:
        out = layer.self_attn.o_proj
        out.forward = lambda states, module=out: functional.linear(states, module.weight[:])
    unpack, record, unpacked, recorded = engine._ring.unpack_now, recorder.record, [], list[bool]()

    def noted(*args: Any) -> None:
        unpacked.append(args)
        unpack(*args)

    def recording(call: Any) -> Any:
        before = len(unpacked)
        replay = record(call)
        recorded.append(len(unpacked) > before)
        return replay

    monkeypatch.setattr(engine._ring, "unpack_now", noted)
    monkeypatch.setattr(recorder, "record", recording)
    assert torch.equal(greedy(engine, LENGTHS), expected)
    assert status(engine) == BY_LAYER
    count = len(engine._layers)
    assert recorded == [index not in engine._ring.streamed for index in range(count)] * (len(recorded) // count)


def test_rows_with_their_cache_in_host_memory(made: Callable[[str], Path], kernel: Kernel, queued: None) -> None:
    tokens = list[Tensor]()
    for reads in (False, True):
        engine = start(made("int4 groups"), kernel=reads, kv_offload="auto", kv_attention="cpu", device_rows=1)
        every = {"resident_layers": tuple(range(len(engine._layers)))}
        engine.given = engine.plan.placement.model_copy(update=every)
        tokens.append(greedy(engine, LENGTHS))
        assert not engine._ring.streamed
        assert engine._kv.rows == 2
    assert torch.equal(*tokens)
    assert kernel.calls > 0


def test_drafts_leave_the_tokens_as_they_are(made: Callable[[str], Path], kernel: Kernel, monkeypatch: Patch) -> None:
    """Passes of several tokens a row, of rows that come and go."""
    test_continuous.small(monkeypatch)
    engine = start(made("int4 groups"))
    rows = test_continuous.sequences(9, 3)
    answers = test_drafts.answers(engine, rows)
    alone, running = kernel.calls, test_drafts.drafting(engine, monkeypatch, answers, 0.4)
    tokens = test_continuous.run(running, [rows[:5], rows[5:]])
    assert running.drafts is not None
    assert running.drafts.accepted > 0
    assert 0 < alone < kernel.calls
    assert status_of(engine) == "on"
    running.end()
    test_drafts.check(tokens, answers)


def test_without_a_gpu_weights_are_ordinary(made: Callable[[str], Path]) -> None:
    engine = start(made("int4 groups"))
    assert not any(isinstance(parameter, LazyWeight) for parameter in engine.model.parameters())
    greedy(engine, LENGTHS)
    assert status_of(engine) == "no GPU"


def test_an_engine_computes_experts_from_their_codes(by_kernel: Any) -> None:
    _, calls, statuses, tokens, expected, beside = by_kernel
    assert calls > 0
    assert statuses == [["on", "on", None], ["no packed weights", "on", None], ["on", "on", 1]]
    assert torch.equal(tokens, expected)
    assert torch.equal(beside, expected), "some layers' experts are computed so, others by the CPU"


def test_only_values_fill_a_lazy_weight() -> None:
    filled, offered = [], []

    def product(states: Tensor, bias: Tensor | None) -> Tensor | None:
        offered.append(bias)
        return states if len(states) == 1 else None

    weight = LazyWeight(torch.zeros(3, 3), lambda: filled.append(1), product, lambda: None)
    assert isinstance(weight, torch.nn.Parameter)
    assert (weight.shape, weight.dtype, weight.dim(), weight.size(0)) == ((3, 3), FP32, 2, 3)
    weight.data = torch.ones(3, 3)
    few, many = torch.ones(1, 3), torch.ones(2, 3)
    assert functional.linear(few, weight) is few
    assert filled == []
    assert float(functional.linear(many, weight).sum()) == 18
    assert offered == [None, None]
    assert len(filled) == 1
    reads: list[Callable[[], object]] = [
        lambda: weight.t(), lambda: weight[0], lambda: weight.data, lambda: torch.cat([weight, weight]),
        lambda: torch.addmm(few, few, weight), lambda: weight.sum(), lambda: weight.data_ptr(),
        lambda: torch.stack(tensors=(weight,)), lambda: weight.detach(), lambda: weight.to(BF16),
    ]  # fmt: skip
    for number, read in enumerate(reads, start=2):
        read()
        assert len(filled) >= number
        del filled[number:]


# Tokens, experts of each and all, rows of a block, parts of an expert.
ALIGNED = (
    (1, 4, 128, 8, 1), (64, 4, 128, 16, 1), (7, 3, 5, 8, 1), (700, 3, 5, 48, 1), (2, 4, 32, 8, 5), (700, 3, 5, 8, 2),
)  # fmt: skip


@pytest.mark.parametrize(("tokens", "each", "count", "block", "splits"), ALIGNED)
def test_pairs_are_aligned_in_blocks_of_an_expert(
    tokens: int, each: int, count: int, block: int, splits: int, by_kernel: Any
) -> None:
    experts, numbers, owners, total = by_kernel[0][tokens, each, count, block, splits]
    experts, count = experts[..., None] * splits + torch.arange(splits), count * splits
    expected, expected_owners = list[int](), list[int]()
    for expert in range(count):
        pairs = (experts.flatten() == expert).nonzero()[:, 0].tolist()
        blocks = -(-len(pairs) // block)
        expected += [*pairs, *[experts.numel()] * (blocks * block - len(pairs))]
        expected_owners += [expert] * blocks
    assert int(total) == len(expected)
    assert numbers.tolist() == expected + [experts.numel()] * (len(numbers) - len(expected))
    assert owners[: len(expected_owners)].tolist() == expected_owners
    assert len(numbers) == len(owners) * block
    assert 0 <= int(owners.min()) <= int(owners.max()) < count


def test_the_kernel_that_aligns_pairs_compiles_for_an_h100() -> None:
    from zinfer.engine.stream.weights.align_kernel import _align

    types = {"experts": "*i64"} | dict.fromkeys(("numbers", "owners", "total"), "*i32")
    compile_for_h100(_align, {"COUNT": 128, "SPLITS": 1, "BLOCK": 8, "WIDTH": 128, "STEP": 16}, types, num_warps=8)


def main(path: Path) -> None:
    """Save pairs in blocks, and tokens of experts from codes and unpacked."""
    torch.set_grad_enabled(False)
    blocks = {}
    for tokens, each, count, block, splits in ALIGNED:
        experts = torch.rand(tokens, count).topk(each, 1).indices
        experts[-1, 0] = experts[-1, 0] if tokens % 7 else count + 4  # no expert
        blocks[tokens, each, count, block, splits] = experts, *align(experts, count, block, splits)
    directory, chosen, statuses = test_quantized.FORMATS["mxfp4 of experts"](path.parent / "experts"), [], []
    with Patch.context() as patch:
        double = replaced(patch)
        for option, share, way in (("auto", "100%", "all"), ("off", "100%", "all"), ("auto", "70%", "cpu")):
            engine = start(directory, share, kernel=option == "auto", experts=way)
            chosen.append(greedy(engine, (5, 3), 3))
            settings = engine.effective().settings
            names = "packed_kernel", "experts_kernel", "gpu_expert_layers"
            statuses.append([settings.get(name) for name in names])
    torch.save((blocks, double.calls, statuses, *chosen), path)
