"""Products of few tokens with weights that stay quantised: the kernel's results are those of unpacked weights, and what
it does not serve finds the weight in its place.

The kernel runs in a process of its own (`tests.interpreter`). The other tests compute from the same codes by torch
(`by_codes`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests import quantized, test_continuous, test_drafts, test_quantized
from tests.grid import covering
from tests.interpreter import interpreted
from tests.running import error
from tests.test_codec import compile_for_h100
from tests.test_experts import queued as queued  # the fixture
from tests.test_graphs import Rerun, status
from tests.test_graphs import recorder as recorder  # the fixture
from tests.test_parity import MACHINE, OUTPUT_LEN, greedy, load
from zinfer.checkpoint.resolve import resolve
from zinfer.core.case import Case, Workload
from zinfer.core.model import Weights
from zinfer.engine import base, kind
from zinfer.engine.base import Engine
from zinfer.engine.pinned import PinnedArena
from zinfer.engine.quantization.dequantize import Codes, expand
from zinfer.engine.stream.experts import few_experts
from zinfer.engine.stream.layer_graphs import BY_LAYER
from zinfer.engine.stream.weights import chunk as chunk_module
from zinfer.engine.stream.weights import products as products_module
from zinfer.engine.stream.weights.formats import TRANSPOSED_ROWS, CodesLayout, Run, encode_chunks, unpack
from zinfer.engine.stream.weights.products import LazyWeight, Parts
from zinfer.plan.planner import make_plan

Patch = pytest.MonkeyPatch
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LENGTHS = (5, 9, 3)
FEW = (5, 3), 3  # lengths and tokens, where the interpreter takes a second for each product
# Rows and columns, of which no tile is a divisor; bits, table, scales' grid and block, their type and table, the type
# within and that of the result, other fields of `Codes`; bytes of a chunk, number of tokens.
CASES: dict[str, tuple[Any, ...]] = {
    "int4": (37, 256, 4, "middle4", (37, 2), (1, 128), BF16, "", BF16, BF16, {}, 1 << 20, 1),
    "int4 in chunks": (37, 256, 4, "middle4", (37, 2), (1, 128), BF16, "", BF16, FP32, {}, 10_240, 16),
    "groups of 48": (37, 96, 4, "middle4", (37, 2), (1, 48), BF16, "", BF16, FP32, {}, 4000, 17),
    "gptq": (37, 96, 4, "whole4", (37, 6), (1, 16), FP16, "", FP16, BF16, {"zeros": True}, 2000, 40),
    "mxfp4": (37, 96, 4, "e2m1", (37, 3), (1, 32), torch.uint8, "e8m0", BF16, BF16, {}, 1 << 20, 3),
    "nvfp4": (37, 96, 4, "e2m1", (37, 6), (1, 16), torch.uint8, "e4m3", BF16, BF16, {"divisor": 3.7}, 1 << 20, 3),
    "modelopt": (37, 96, 4, "e2m1", (37, 6), (1, 16), torch.uint8, "e4m3", FP32, FP32, {"factor": 0.37}, 1 << 20, 3),
    "int8": (37, 100, 8, "int8", (37, 1), (1, 100), BF16, "", BF16, BF16, {"zeros": True}, 1 << 20, 3),
    "fp8 of blocks": (40, 100, 8, "e4m3", (3, 3), (16, 40), FP32, "", BF16, BF16, {}, 3200, 64),
    "e5m2 of a tensor": (40, 100, 8, "e5m2", (1, 1), (40, 100), FP32, "", BF16, FP16, {}, 2200, 2),
    "gptq of 8 bits": (40, 64, 8, "whole8", (40, 4), (1, 16), FP16, "", FP16, FP32, {"zeros": True}, 1 << 20, 3),
    "columns that are split": (40, 640, 8, "middle8", (40, 5), (1, 128), FP16, "", FP16, FP32, {}, 1 << 20, 33),
}

# Stacked experts: their number, whether they are transposed, and what they have in common with the cases above.
STACKS: dict[str, tuple[int, bool, tuple[Any, ...]]] = {
    "experts in mxfp4": (3, False, (111, 96, 4, "e2m1", (111, 3), (1, 32), torch.uint8, "e8m0", BF16, BF16, {}, 5000)),
    "experts in fp8": (3, False, (96, 72, 8, "e4m3", (6, 3), (16, 32), FP32, "", BF16, BF16, {}, 1 << 20)),
    "experts in int4": (3, False, (96, 1280, 4, "middle4", (96, 10), (1, 128), BF16, "", BF16, FP32, {}, 1 << 20)),
    "turned in mxfp4": (3, True, (192, 72, 4, "e2m1", (6, 72), (32, 1), torch.uint8, "e8m0", BF16, BF16, {}, 2500)),
    "turned in fp8": (3, True, (96, 72, 8, "e4m3", (3, 3), (32, 32), FP32, "", BF16, BF16, {}, 1 << 20)),
    "turned in int4": (3, True, (192, 72, 4, "whole4", (6, 18), (32, 4), FP16, "", FP16, FP32, {"zeros": True}, 2500)),
    "turned of one scale": (3, True, (120, 72, 8, "int8", (1, 1), (120, 72), FP32, "", FP32, FP32, {}, 1 << 20)),
}


def codes_of(name: str) -> Codes:
    """Return random codes of one of `CASES`."""
    given_case = STACKS[name][2] if name in STACKS else CASES[name]
    rows, columns, bits, table, grid, block, kind, coded, inner, _, more, *_ = given_case
    dice = torch.Generator().manual_seed(len(name))
    numbers = torch.randint(0, 256, (rows, columns * bits // 8), dtype=torch.uint8, generator=dice)
    if table in ("e4m3", "e5m2"):
        numbers &= 0xF7 if table == "e4m3" else 0xFB  # no NaN
    if coded:
        scales = torch.randint(*((100, 128) if coded == "e8m0" else (1, 120)), grid, dtype=torch.uint8, generator=dice)
    else:
        scales = (torch.rand(grid, generator=dice) / 10 + 0.01).to(kind)
    given = dict(more)
    if given.pop("zeros", False):
        given["zeros"] = torch.randint(-8, 8, grid, generator=dice).to(torch.int16)
    return Codes(numbers, columns, bits, table, scales, block, inner, coded, **given)


def chunks_of(codes: Codes, dtype: torch.dtype, max_bytes: int) -> tuple[Run, Tensor]:
    """Return a matrix in chunks, like a packed layer's, and their bytes."""
    chunks = encode_chunks(codes, dtype, max_bytes)
    stride = -(-chunks[0][0].size // 256) * 256
    data, run = torch.zeros(stride * len(chunks), dtype=torch.uint8), None
    for number, (layout, content) in enumerate(chunks):
        data[number * stride :][: content.numel()] = content
        run = Run(layout, layout) if run is None else run.continued(layout, number * stride)
        assert run is not None
    assert run is not None
    assert run.count == len(chunks)
    return run, data


@pytest.fixture(scope="module")
def by_kernel(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what `main` saved."""
    path = tmp_path_factory.mktemp("packed") / "results"
    interpreted(__name__, path)
    results: dict[str, Any] = torch.load(path)
    return results


@pytest.mark.parametrize("name", CASES)
def test_products_are_those_of_unpacked_weights(name: str, by_kernel: dict[str, Any]) -> None:
    weight, products, columns, states, bias, chosen = by_kernel[name]
    expected = functional.linear(states.double(), weight.double(), bias.double())
    assert products.dtype == weight.dtype
    assert error(products, expected) < (1e-6 if weight.dtype == FP32 else 0.004)
    assert torch.equal(columns, weight.t()[chosen]), "unit vectors read the weights to the bit"


@pytest.mark.parametrize("name", STACKS)
def test_products_with_stacked_experts_are_those_of_unpacked_weights(name: str, by_kernel: dict[str, Any]) -> None:
    weights, of_tokens, of_pairs, states, experts, columns, chosen = by_kernel[name]
    for inputs, pairs in ((states.repeat_interleave(2, 0), of_tokens), (columns, of_pairs)):
        expected = torch.einsum("pi,poi->po", inputs.double(), weights.double()[experts.flatten()])
        assert error(pairs, expected) < (1e-6 if weights.dtype == FP32 else 0.004)
    assert torch.equal(of_pairs, weights.float()[experts.flatten(), :, chosen]), "unit vectors read weights to the bit"


def test_cases_have_chunks_and_columns_that_are_split(by_kernel: dict[str, Any]) -> None:
    assert by_kernel["chunks"] >= {1, 3, 4}
    assert by_kernel["splits"] >= {1, 10, -1}


def test_an_engine_computes_by_the_kernel(by_kernel: dict[str, Any]) -> None:
    ran, statuses, tokens, expected = by_kernel["engine"]
    assert ran > 0
    assert statuses == ["on", "no packed weights"]
    assert torch.equal(tokens, expected)


def test_an_engine_computes_experts_by_the_kernel(by_kernel: dict[str, Any]) -> None:
    """Steps of two tokens with two experts each; the prompts have too many for so few experts."""
    pairs, statuses, tokens, expected = by_kernel["engine of experts"]
    assert pairs == 2 * 2 * 2 * 2 * (FEW[1] - 1), "matrices, layers, tokens, experts, steps"
    assert statuses == [["on", "on"], ["no packed weights", "on"]]
    assert torch.equal(tokens, expected)
    assert torch.equal(*by_kernel["engine of unpacked experts"])


def by_codes(parts: Parts, data: Tensor, states: Tensor, bias: Tensor | None) -> Tensor:
    """Compute a product as the kernel does, from codes alone."""
    rows = []
    for start, run in parts:
        for number in range(run.count):
            layout = run.layout if number < run.count - 1 else run.last
            rows.append(torch.empty(layout.rows, layout.columns, dtype=layout.dtype))
            unpack(data[start + number * run.stride :][: layout.size], layout, rows[-1])
    return functional.linear(states, torch.cat(rows), bias)


class Kernel:
    """Takes the place of the kernel, and counts its `calls`; `fault` is raised, and `factor` makes it wrong."""

    def __init__(self) -> None:
        self.calls, self.factor = 0, 1.0
        self.fault: Exception | None = None

    def __call__(self, *args: Any) -> Tensor:
        self.calls += 1
        if self.fault is not None:
            raise self.fault
        return self.factor * by_codes(*args)


@pytest.fixture
def kernel(monkeypatch: Patch) -> Kernel:
    double = Kernel()
    monkeypatch.setattr(products_module, "cannot_run", lambda _device: None)
    monkeypatch.setattr(products_module, "_compute", double)
    return double


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Make a checkpoint in one of the formats of `test_quantized`, once."""
    folder = tmp_path_factory.mktemp("formats")

    @cache
    def make(name: str) -> Path:
        if name in quantized.COMPRESSED:
            pytest.importorskip("compressed_tensors")
        return test_quantized.FORMATS[name](folder / name)

    return make


@contextmanager
def unread() -> Iterator[None]:
    """Make engines loaded within unpack every layer. No kernel reads their codes."""
    with Patch.context() as patch:
        patch.setattr("zinfer.engine.stream.engine.PackedProducts", lambda _device: None)
        yield


def start(directory: Path, scratch: Path, share: str = "100%", **options: Any) -> Any:
    """Load an engine with `share` of its weights quantised on the device. It reads their codes if `kernel`.

    Its layer buffer holds NaN before a layer is unpacked.
    """
    device_rows, reads = options.pop("here", None), options.pop("kernel", True)
    options = {"dtype": "float32", "weight_codec": "lossless"} | options
    with nullcontext() if reads else unread():
        engine: Any = load("stream", directory, "cpu", scratch, here=device_rows, **options)
    plan = engine.plan
    case = plan.case.model_copy(update={"gpu_weights": share})
    engine.plan = make_plan(case, plan.model, plan.machine) if device_rows is None else plan
    put = engine._ring._unpack

    def unpacked(index: int) -> None:
        engine._ring.layer_buffer.fill_(255)
        put(index)

    engine._ring._unpack = unpacked
    return engine


def status_of(engine: Engine) -> object:
    return engine.effective().settings.get("packed_kernel")


def run(engine: Any) -> Tensor:
    """Return the tokens of a batch, twice, and close the engine."""
    tokens = [greedy(engine, LENGTHS) for _ in range(2)]
    assert torch.equal(*tokens)
    engine.close()
    return tokens[0]


@pytest.mark.parametrize(
    ("name", "share"),
    covering(["int4 groups", "nvfp4", "fp8 of experts", "gptq in order", "mxfp4 of experts"], ["60%", "100%"]),
)
def test_layers_that_stay_give_the_same_tokens(
    name: str, share: str, made: Callable[[str], Path], tmp_path: Path, kernel: Kernel, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(chunk_module, "CHUNK_BYTES", 4000)  # a matrix is several chunks
    expected = run(start(made(name), tmp_path, share, kernel=False))
    assert kernel.calls == 0
    engine = start(made(name), tmp_path, share)
    first = greedy(engine, LENGTHS)
    served = name not in ("gptq in order", "mxfp4 of experts")  # columns in an order of their own; no matrix alone
    assert status_of(engine) == ("no weights that it reads" if name == "gptq in order" else "on")
    assert bool(engine._ring.streamed) == (share == "60%")
    assert torch.equal(first, expected)
    assert torch.equal(run(engine), expected)
    assert (kernel.calls > 0) == served


def test_a_mostly_quantised_layer_holds_the_rest_as_it_is(
    made: Callable[[str], Path], tmp_path: Path, kernel: Kernel, monkeypatch: Patch
) -> None:
    for name in ("MIN_NUMEL", "BLOCK"):
        monkeypatch.setattr(f"zinfer.engine.stream.weights.codec.{name}", 1 << 6)
    expected = run(start(made("mxfp4 of experts"), tmp_path, kernel=False, dtype="bfloat16"))
    engine = start(made("mxfp4 of experts"), tmp_path, dtype="bfloat16")
    assert torch.equal(greedy(engine, LENGTHS), expected)
    layer, held = engine._ring.layers[0], engine._ring._resident[0]
    assert {type(chunk.layout) for chunk in layer.chunks} == {CodesLayout, type(None)}
    parameters = dict(engine._layers[0].named_parameters())
    places = {name: weight.data_ptr() - held.data_ptr() for name, weight in parameters.items()}
    inside = {name for name, place in places.items() if 0 <= place < held.nbytes}
    assert "self_attn.q_proj.weight" in inside
    assert inside == set(layer.in_place) == {name for name in parameters if not name.endswith("_proj")}
    engine.close()


@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_every_matrix_of_bloom_is_read_from_its_codes(
    weights: Weights, checkpoint: Callable[..., Path], kernel: Kernel
) -> None:
    """Weights that are rounded while they load, with biases; prompts and steps are few tokens."""
    spec, tokens = resolve(str(checkpoint("bloom")), "float32", weights=weights), list[Tensor]()
    for option in ("off", "auto"):
        case = Case(
            model=spec.name, engine="stream", offload="cpu", dtype=spec.dtype, load_format="safetensors",
            workload=Workload(batch_size=3, input_len=9, output_len=OUTPUT_LEN), weights=weights, gpu_weights="100%",
            options=(("weight_codec", "lossless"),),
        )  # fmt: skip
        with nullcontext() if option == "auto" else unread():
            engine = base.load(kind("stream").target).start(make_plan(case, spec, MACHINE))
        tokens.append(greedy(engine, LENGTHS))
        engine.close()
    assert torch.equal(*tokens)
    assert kernel.calls == OUTPUT_LEN * 4 * spec.num_layers


def test_many_tokens_are_multiplied_unpacked(
    made: Callable[[str], Path], tmp_path: Path, kernel: Kernel, monkeypatch: Patch
) -> None:
    expected, calls = run(start(made("int4 groups"), tmp_path, kernel=False)), []
    for max_tokens in (2, 3, 27):  # three rows decode together, and their prompts have 27 tokens
        monkeypatch.setattr(products_module, "CODED_TOKENS", max_tokens)
        kernel.calls = 0
        assert torch.equal(run(start(made("int4 groups"), tmp_path)), expected)
        calls.append(kernel.calls)
    assert calls[0] == 0 < calls[1] < calls[2]


def test_weights_that_are_read_without_a_product_are_unpacked(
    made: Callable[[str], Path], tmp_path: Path, kernel: Kernel
) -> None:
    """Modules with another forward pass, later reads of the weight, or hooks."""
    expected = run(start(made("int4 groups"), tmp_path, kernel=False))
    engine = start(made("int4 groups"), tmp_path)
    for layer in engine._layers:
        assert isinstance(layer.mlp.up_proj.weight, LazyWeight)
        query, out, up = layer.self_attn.q_proj, layer.self_attn.o_proj, layer.mlp.up_proj
        query.forward = lambda states, module=query: states @ module.weight.view(module.out_features, -1).t()
        out.forward = lambda states, module=out: (
            (functional.linear(states, module.weight) + functional.linear(input=states, weight=module.weight[:]) * 0.5)
            / 1.5
        )
        up.register_forward_hook(lambda _module, _args, output: output * 1)
    assert torch.equal(run(engine), expected)
    assert kernel.calls > 0


@pytest.mark.parametrize(
    ("fault", "factor", "reason"),
    [
        (RuntimeError("no code for\nthis GPU"), 1.0, "the kernel failed: RuntimeError: no code for this GPU"),
        (None, 1.2, "the kernel's results differ from those of unpacked weights"),
    ],
)
def test_a_kernel_that_fails_is_given_up(
    fault: Exception | None, factor: float, reason: str, made: Callable[[str], Path], tmp_path: Path, kernel: Kernel
) -> None:
    kernel.fault, kernel.factor = fault, factor
    expected = run(start(made("int4 groups"), tmp_path, kernel=False))
    engine = start(made("int4 groups"), tmp_path)
    assert torch.equal(greedy(engine, LENGTHS), expected)
    assert status_of(engine) == reason
    assert torch.equal(run(engine), expected)
    assert kernel.calls == 1


def test_a_lack_of_memory_is_the_callers(made: Callable[[str], Path], tmp_path: Path, kernel: Kernel) -> None:
    engine = start(made("int4 groups"), tmp_path)
    kernel.fault = torch.OutOfMemoryError("no room")
    with pytest.raises(torch.OutOfMemoryError):
        greedy(engine, LENGTHS)
    kernel.fault = None
    engine.clear()
    assert run(engine).shape
    assert status_of(start(made("int4 groups"), tmp_path, "0%")) is None


def test_recorded_steps_compute_from_codes(
    made: Callable[[str], Path], tmp_path: Path, kernel: Kernel, recorder: Rerun
) -> None:
    expected = run(start(made("int4 groups"), tmp_path, kernel=False, cuda_graphs="off"))
    engine = start(made("int4 groups"), tmp_path)
    tokens = greedy(engine, LENGTHS)
    assert status(engine) == "on"
    assert recorder.replayed > 0
    assert torch.equal(tokens, expected)
    engine.close()


def test_a_recorded_layer_unpacks_what_its_call_unpacks(
    made: Callable[[str], Path], tmp_path: Path, kernel: Kernel, recorder: Rerun, monkeypatch: Patch
) -> None:
    """Products of many tokens read unpacked weights. These are in the layer buffer already when the graph is made."""
    monkeypatch.setattr(products_module, "CODED_TOKENS", 2)
    expected = run(start(made("int4 groups"), tmp_path, "60%", kernel=False, cuda_graphs="off"))
    engine = start(made("int4 groups"), tmp_path, "60%")
    unpack, record, unpacked, recorded = engine._ring.unpack_chunks, recorder.record, [], list[bool]()

    def noted(*args: Any) -> None:
        unpacked.append(args)
        unpack(*args)

    def recording(call: Any) -> Any:
        before = len(unpacked)
        replay = record(call)
        recorded.append(len(unpacked) > before)
        return replay

    monkeypatch.setattr(engine._ring, "unpack_chunks", noted)
    monkeypatch.setattr(recorder, "record", recording)
    assert torch.equal(greedy(engine, LENGTHS), expected)
    assert status(engine) == BY_LAYER
    streamed = set(engine._ring.streamed)
    assert recorded == [index not in streamed for index in range(len(engine._layers))] * (
        len(recorded) // len(engine._layers)
    )
    engine.close()


@pytest.mark.parametrize("max_tokens", [1, 2, 64])
def test_rows_with_their_cache_in_host_memory(
    max_tokens: int, made: Callable[[str], Path], tmp_path: Path, kernel: Kernel, monkeypatch: Patch, queued: None
) -> None:
    """Two calls of a layer in a pass, in two queues: both, the first, or neither of them by the kernel."""
    monkeypatch.setattr(products_module, "CODED_TOKENS", max_tokens)
    options: dict[str, Any] = {"kv_offload": "auto", "kv_attention": "cpu", "here": 1}
    tokens = list[Tensor]()
    for option in ("off", "auto"):
        engine = start(made("int4 groups"), tmp_path, kernel=option == "auto", **options)
        every = {"resident_layers": tuple(range(len(engine._layers)))}
        engine.given = engine.plan.placement.model_copy(update=every)
        tokens.append(greedy(engine, LENGTHS))
        assert not engine._ring.streamed
        assert engine._kv.rows == 2
        engine.close()
    assert torch.equal(*tokens)
    assert kernel.calls > 0


def test_drafts_leave_the_tokens_as_they_are(
    made: Callable[[str], Path], tmp_path: Path, kernel: Kernel, monkeypatch: Patch
) -> None:
    """Passes of several tokens a row, of rows that come and go: some are few enough for the kernel, some are not."""
    monkeypatch.setattr(products_module, "CODED_TOKENS", 12)
    test_continuous.small(monkeypatch)
    engine = start(made("int4 groups"), tmp_path)
    rows = test_continuous.sequences(9, 3)
    answers = test_drafts.answers(engine, rows)
    alone, running = kernel.calls, test_drafts.drafting(engine, monkeypatch, answers, 0.4)
    tokens = test_continuous.run(running, [rows[:5], rows[5:]])
    assert running.drafts.accepted > 0
    assert 0 < alone < kernel.calls
    assert status_of(engine) == "on"
    running.end()
    engine.close()
    test_drafts.check(tokens, answers)


def test_without_a_gpu_weights_are_ordinary(made: Callable[[str], Path], tmp_path: Path) -> None:
    engine = start(made("int4 groups"), tmp_path)
    assert not any(isinstance(parameter, LazyWeight) for parameter in engine.model.parameters())
    greedy(engine, LENGTHS)
    assert status_of(engine) == "no GPU"
    engine.close()


def test_the_rows_of_a_weight_are_runs_of_alike_chunks() -> None:
    """Two matrices with scales of their own are two runs; what the kernel does not read has none."""
    several = [codes_of("nvfp4"), replace(codes_of("nvfp4"), divisor=2.5)]
    arena = PinnedArena(1 << 20, pin=False, grow=True)
    shape = torch.empty(74, 96, dtype=BF16, device="meta")
    packed = chunk_module.pack({"norm": torch.ones(96)}, arena, {"weight": (shape, several)})
    block = packed.blocks["weight"]
    chunks = [chunk for chunk in packed.chunks if chunk.layout is not None]
    assert [len(parts) for parts in (chunks, products_module.parts_of(chunks, block, packed.start) or ())] == [2, 2]
    parts = products_module.parts_of(chunks, block, packed.start)
    assert parts is not None
    states = torch.randn(3, 96, generator=torch.Generator().manual_seed(1)).to(BF16)
    expected = functional.linear(states, torch.cat([expand(codes, BF16) for codes in several]))
    assert torch.equal(by_codes(parts, arena.memory[packed.start :], states, None), expected)

    def served(chunks: list[chunk_module.Chunk], other: Any = block) -> bool:
        return products_module.parts_of(chunks, other, packed.start) is not None

    layout: Any = chunks[1].layout
    assert served(chunks)
    assert not served(chunks[:1]), "rows are missing"
    assert not served(chunks[::-1]), "rows are in another order"
    assert not served([*chunks[:1], replace(chunks[1], layout=None)])
    assert not served([*chunks[:1], replace(chunks[1], layout=replace(layout, order=True))])
    assert not served([*chunks[:1], replace(chunks[1], layout=replace(layout, block=(1, 3)))]), "a byte has two scales"
    assert served(chunks, replace(block, shape=torch.Size((2, 37, 96)))), "a stack of matrices"
    assert not served(chunks, replace(block, shape=torch.Size((2, 37, 2, 48))))
    assert not served(chunks, replace(block, dtype=FP16))
    arena.close()


def test_only_values_fill_a_lazy_weight() -> None:
    filled, offered = [], []

    def product(states: Tensor, bias: Tensor | None) -> Tensor | None:
        offered.append(bias)
        return states if len(states) == 1 else None

    weight = LazyWeight(torch.zeros(3, 3), lambda: filled.append(1), product)
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
        lambda: torch.addmm(few, few, weight), lambda: functional.linear(weight, weight), lambda: weight.data_ptr(),
        lambda: torch.stack(tensors=(weight,)), lambda: weight.detach(), lambda: weight.to(BF16),
    ]  # fmt: skip
    for number, read in enumerate(reads, start=2):
        read()
        assert len(filled) >= number
        del filled[number:]


def test_tensors_of_another_kind_decide_what_is_done_with_a_lazy_weight() -> None:
    """The weight is filled before the other kind's function gets it. Either kind may come first."""
    filled = list[int]()

    class Other(Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            with torch._C.DisableTorchFunctionSubclass():
                plain = [arg.as_subclass(Tensor) if isinstance(arg, Other) else arg for arg in args]
            return "other", len(filled), function(*plain, **kwargs or {})

    weight = LazyWeight(torch.ones(3, 3), lambda: filled.append(1), lambda states, _bias: states)
    other = torch.ones(3, 3).as_subclass(Other)
    kind, before, output = torch.matmul(weight, other)
    assert (kind, before, float(output.sum())) == ("other", 1, 27)
    kind, _, output = functional.linear(other, weight)
    assert kind == "other"
    assert float(output.sum()) == 9, "its product is offered to the weight"


def test_the_kernel_compiles_for_an_h100() -> None:
    from zinfer.engine.stream.weights import product_kernel as kernel

    def layout(rows: int, bits: int, table: str, group: int) -> CodesLayout:
        return CodesLayout(
            rows, 4096, bits, table, (1, group), (rows, 4096 // group), BF16, "", False, False, 1.0, 1.0, BF16, BF16
        )

    pointers = dict.fromkeys(("states", "scales", "bias"), "*bf16") | {
        "data": "*u8", "zeros": "*i16", "scale_table": "*fp32", "out": "*fp32", "divisor": "fp32", "factor": "fp32",
        "experts": "*i64",
    }  # fmt: skip
    for bits, table, group in ((4, "middle4", 128), (8, "int8", 4096)):
        first = layout(500, bits, table, group)
        run = Run(first, layout(100, bits, table, group), 3, -(-first.size // 256) * 256)
        tiles = kernel.Tiles.of(run)
        constants = kernel.constants(run) | {
            "EXPERTS": 0, "EACH_TOKEN": 1, "TOKENS": 16, "BIASED": True, "WHOLE": False, "BLOCK_ROWS": tiles.rows,
            "BLOCK": tiles.bytes, "FAST": bits == 4, "INTERPRETED": False,
        }  # fmt: skip
        warps = tiles.rows // kernel.WARP_ROWS
        compile_for_h100(kernel._multiply, constants, pointers, num_warps=warps, num_stages=kernel.STAGES)
    # Experts of gpt-oss-120b, whose rows of codes are inputs.
    rows = (128 * 2880, 11648)
    first, last = (
        CodesLayout(
            size, 5760, 4, "e2m1", (32, 1), (size // 32, 5760), torch.uint8, "e8m0", False, False, 1.0, 1.0, BF16, BF16
        )
        for size in (rows[1], rows[0] % rows[1])
    )
    run = Run(first, last, -(-rows[0] // rows[1]), -(-first.size // 256) * 256)
    assert run.rows == rows[0]
    constants = kernel.constants(run) | {
        "EXPERTS": 128, "EACH_TOKEN": 4, "GROUP_ROWS": TRANSPOSED_ROWS, "BLOCK_ROWS": kernel.TILE_ROWS,
        "BLOCK": kernel.TRANSPOSED_BYTES, "INTERPRETED": False,
    }  # fmt: skip
    types = pointers | {"scales": "*u8"}
    compile_for_h100(kernel._multiply_transposed, constants, types, num_warps=4, num_stages=kernel.STAGES)


def main(path: Path) -> None:
    """Save the kernel's products, and tokens with and without it."""
    from zinfer.engine.stream.weights import product_kernel

    torch.set_grad_enabled(False)
    results: dict[str, Any] = {"chunks": set(), "splits": set()}
    for name, (rows, columns, *_, dtype, _, max_bytes, count) in CASES.items():
        product_kernel.MIN_STEPS = 1 if name == "columns that are split" else 8
        codes = codes_of(name)
        run, data = chunks_of(codes, dtype, max_bytes)
        results["chunks"].add(run.count)
        results["splits"].add(product_kernel.Tiles.of(run).splits)
        dice = torch.Generator().manual_seed(rows)
        states = torch.randn((count, columns), generator=dice).to(dtype)
        bias = torch.randn(rows, generator=dice).to(dtype)
        chosen = torch.randint(0, columns, (8,), generator=dice)
        unit = torch.zeros(8, columns, dtype=dtype)
        unit[range(8), chosen] = 1
        products = products_module._compute(((0, run),), data, states[None], bias)[0]
        single = products_module._compute(((0, run),), data, unit, None)
        results[name] = expand(codes, dtype), products, single, states, bias, chosen

    for name, (count, transposed, (rows, columns, *_, dtype, _, max_bytes)) in STACKS.items():
        product_kernel.TRANSPOSED_BYTES = 16
        run, data = chunks_of(codes_of(name), dtype, max_bytes)
        matrices = expand(codes_of(name), dtype).view(count, rows // count, columns)
        weights = matrices.transpose(1, 2) if transposed else matrices
        dice = torch.Generator().manual_seed(rows)
        states = torch.randn((2, weights.shape[2]), generator=dice).to(dtype)
        experts, chosen = torch.tensor([[2, 0], [0, 1]]), torch.randint(0, weights.shape[2], (4,), generator=dice)
        unit = torch.zeros(4, weights.shape[2], dtype=dtype)
        unit[range(4), chosen] = 1
        of_tokens, of_pairs = (
            product_kernel.multiply_experts(inputs, data, run, experts, count, transposed) for inputs in (states, unit)
        )
        results["splits"].add(-of_tokens.shape[1] if transposed else of_tokens.shape[1])
        results[name] = weights, of_tokens.sum(1), of_pairs.sum(1), states, experts, unit, chosen

    compute, ran, tokens, status = products_module._compute, 0, [], []

    def counted(*args: Any) -> Tensor:
        nonlocal ran
        ran += 1
        return compute(*args)

    products_module._compute = counted  # type: ignore[assignment]
    directory = test_quantized.FORMATS["gptq"](path.parent / "m")
    for option in ("auto", "off"):
        engine = start(directory, path.parent, kernel=option == "auto")
        tokens.append(greedy(engine, *FEW))
        status.append(status_of(engine))
        engine.close()
    results["engine"] = ran, status, *tokens

    multiply, pairs, tokens, status = product_kernel.multiply_experts, 0, [], []

    def multiplied(*args: Any) -> Tensor:
        nonlocal pairs
        pairs += args[3].numel()
        return multiply(*args)

    product_kernel.multiply_experts = multiplied  # type: ignore[assignment]
    directory = test_quantized.FORMATS["mxfp4 of experts"](path.parent / "experts")
    for option in ("auto", "off"):
        engine = start(directory, path.parent, kernel=option == "auto", experts="all")
        tokens.append(greedy(engine, *FEW))
        settings = engine.effective().settings
        status.append([settings[name] for name in ("packed_kernel", "experts_kernel")])
        engine.close()
    results["engine of experts"] = pairs, status, *tokens
    # The kernel of plain experts reads the layer buffer, which has to be filled first.
    products_module.StackedCodes.ready = lambda *_: False  # type: ignore[method-assign]
    few_experts.pays = lambda *_: True
    engine = start(directory, path.parent, experts="all")
    results["engine of unpacked experts"] = greedy(engine, *FEW), tokens[0]
    engine.close()
    torch.save(results, path)
