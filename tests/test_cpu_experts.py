"""Experts on the CPU: the compiled code against exact arithmetic, in every format, and engines that use it."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from tests import quantized
from tests.checkpoints import save_config
from tests.grid import covering
from tests.running import equal, error
from tests.test_attend import LESSER, compiler, fresh, lesser, no_compiler
from tests.test_codec import compile_for_h100
from tests.test_experts import MIXTURES, load, poisoned, steps
from tests.test_graphs import Rerun, recorder
from tests.test_low_bit import Double, Kernel, replaced
from tests.test_parity import BATCHES, greedy
from zinfer.checkpoint import resolve
from zinfer.engine.pinned import PinnedArena
from zinfer.engine.quantization.dequantize import Codes, block_codes, expand
from zinfer.engine.state import Entry
from zinfer.engine.stream.engine import Stream
from zinfer.engine.stream.experts.cpu import CpuExperts, Server
from zinfer.engine.stream.layer_graphs import BY_LAYER
from zinfer.engine.stream.weights.packed_experts import Experts, pack_experts
from zinfer.worker.session import not_as_asked

CPU = torch.device("cpu")
FIXTURES = compiler, fresh, lesser, no_compiler, recorder
FLAGS = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
PROCESSORS = (*(["cascadelake", "x86-64-v4"] if "avx512_vnni" in FLAGS else []), *LESSER)  # without AVX512-BF16, VNNI
Made = tuple[Tensor, list[Codes]]  # values ``[E, rows, columns]``, and the codes that they come from


class Swiglu(nn.Module):
    """Experts as most classes of transformers keep them: rows are outputs, gates come first."""

    has_gate, has_bias, is_transposed = True, False, False

    def _apply_gate(self, rows: Tensor) -> Tensor:
        gate, up = rows.chunk(2, dim=-1)
        return silu(gate) * up


class Clamped(nn.Module):
    """Experts as gpt-oss keeps them: rows are inputs, gates and values take turns, and products have biases."""

    has_gate, has_bias, is_transposed, alpha, limit = True, True, True, 1.702, 7.0

    def _apply_gate(self, rows: Tensor) -> Tensor:
        gate, up = rows[..., ::2].clamp(max=self.limit), rows[..., 1::2].clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(gate * self.alpha)


def codes_of(count: int, rows: int, columns: int, dtype: torch.dtype, **form: Any) -> Made:
    """Return random codes of `count` matrices. `form` has bits, table, block and type of scales."""
    bits, table, (height, width) = form["bits"], form["table"], form["block"]
    dice = torch.Generator().manual_seed(rows + columns)
    all_rows = count * rows
    numbers = torch.randint(0, 256, (all_rows, -(-columns * bits // 8)), generator=dice, dtype=torch.uint8)
    if table in ("e4m3", "e5m2"):
        numbers = torch.where((numbers & 127) >= (127 if table == "e4m3" else 124), 1, numbers)  # these are no numbers
    grid = (1 if height >= all_rows else -(-all_rows // height)), -(-columns // width)
    kind, coded = form.get("scales", torch.bfloat16), ""
    if isinstance(kind, str):
        coded, span = kind, (119, 123) if kind == "e8m0" else (20, 60)
        scales = torch.randint(*span, grid, generator=dice, dtype=torch.uint8)
    else:
        scales = (torch.rand(grid, generator=dice) * 0.02 + 0.005).to(kind)
    zeros = torch.randint(0, 16, grid, generator=dice, dtype=torch.int16) if form.get("zeros") else None
    codes = Codes(numbers, columns, bits, table, scales, (height, width), torch.float32, coded, zeros)
    parts = [codes]
    if form.get("apart"):  # matrices that do not share a factor, as gate and up in NVFP4
        half = rows // 2
        starts = enumerate(range(0, all_rows, half))
        parts = [replace(codes.part(start, half), divisor=1.0 + number) for number, start in starts]
    return torch.cat([expand(part, torch.float32) for part in parts]).view(count, rows, columns), parts


def blocks_of(count: int, rows: int, columns: int, dtype: torch.dtype, **form: Any) -> Made:
    """Return random blocks of a GGUF, and their values by its package."""
    ggufs = pytest.importorskip("tests.ggufs", reason="pip install 'zinfer[gguf]'")
    kind, dice = ggufs.Kind[form["gguf"]], np.random.default_rng(rows + columns)
    stored = ggufs.random_blocks((count * rows, columns), kind, *form["factors"], dice)
    values = torch.from_numpy(ggufs.gguf.quants.dequantize(stored, kind)).view(count, rows, columns)
    return values, [block_codes(form["gguf"], torch.from_numpy(stored))]


def values_of(count: int, rows: int, columns: int, dtype: torch.dtype, **_form: Any) -> Made:
    """Return random matrices that are not quantised."""
    dice = torch.Generator().manual_seed(rows + columns)
    return (torch.randn(count, rows, columns, generator=dice) * 0.05).to(dtype), []


def mixed(count: int, rows: int, columns: int, dtype: torch.dtype, **forms: Any) -> Made:
    """Return gates and values in one format, and what follows in another."""
    name = forms["first" if rows > columns else "second"]
    make, form = FORMATS[name]
    return make(count, rows, columns, dtype, **form)


# Factors of a GGUF's blocks: the byte where they begin, and their means.
FORMATS: dict[str, tuple[Callable[..., Made], dict[str, Any]]] = {
    "bf16": (values_of, {}),
    "mxfp4": (codes_of, {"bits": 4, "table": "e2m1", "block": (1, 32), "scales": "e8m0"}),
    "nvfp4": (codes_of, {"bits": 4, "table": "e2m1", "block": (1, 16), "scales": "e4m3", "apart": True}),
    "int4 groups": (codes_of, {"bits": 4, "table": "middle4", "block": (1, 128)}),
    "int4 of 32": (codes_of, {"bits": 4, "table": "whole4", "block": (1, 32), "zeros": True, "scales": torch.float16}),
    "int4 zeros": (codes_of, {"bits": 4, "table": "whole4", "block": (1, 128), "zeros": True}),
    "int8 rows": (codes_of, {"bits": 8, "table": "int8", "block": (1, 1 << 20), "scales": torch.float32}),
    "int8 groups": (codes_of, {"bits": 8, "table": "middle8", "block": (1, 64)}),
    "int8 zeros": (codes_of, {"bits": 8, "table": "whole8", "block": (1, 64), "zeros": True}),
    "int8 of 32": (codes_of, {"bits": 8, "table": "whole8", "block": (1, 32), "zeros": True}),
    "mxfp8": (codes_of, {"bits": 8, "table": "e4m3", "block": (1, 32), "scales": "e8m0"}),
    "fp8 blocks": (codes_of, {"bits": 8, "table": "e4m3", "block": (128, 128), "scales": torch.float32}),
    "fp8 rows": (codes_of, {"bits": 8, "table": "e4m3", "block": (1, 1 << 20), "scales": torch.float32}),
    "Q4_0": (blocks_of, {"gguf": "Q4_0", "factors": (0, [5e-3])}),
    "Q4_1": (blocks_of, {"gguf": "Q4_1", "factors": (0, [5e-3, -4e-2])}),
    "Q8_0": (blocks_of, {"gguf": "Q8_0", "factors": (0, [4e-4])}),
    "Q4_K": (blocks_of, {"gguf": "Q4_K", "factors": (0, [2e-4, 2e-3])}),
    "Q5_K": (blocks_of, {"gguf": "Q5_K", "factors": (0, [1e-4, 2e-3])}),
    "Q6_K": (blocks_of, {"gguf": "Q6_K", "factors": (208, [2e-5])}),
    "Q4_K, Q6_K": (mixed, {"first": "Q4_K", "second": "Q6_K"}),
    "e5m2": (codes_of, {"bits": 8, "table": "e5m2", "block": (1, 1 << 20), "scales": torch.float32}),
}  # fmt: skip
# Experts, hidden values, and values between: of registers, of `SUPER`, of half a register, or of none.
SIZES = {"whole": (8, 256, 384), "super": (8, 512, 768), "half": (8, 192, 320), "odd": (5, 100, 68)}


def made(
    module: nn.Module, name: str, size: tuple[int, int, int], dtype: torch.dtype, **other: Any
) -> tuple[CpuExperts, dict[str, Tensor]]:
    """Return packed experts of a format, ready to compute, and their values."""
    make, form = FORMATS[name]
    (count, hidden, inner), transposed = size, bool(module.is_transposed)
    tensors, coded = dict[str, Any](), dict[str, Any]()
    values, entries = dict[str, Tensor](), dict[str, Entry]()
    for leaf, rows, columns in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
        height, width = form.get("block", (1, 1))
        if height > 1:  # blocks do not reach from one expert to the next
            height = min(height, rows) if rows % min(height, rows) == 0 else 4
        stored, codes = make(count, rows, columns, dtype, **form | ({"block": (height, width)} if form else {}))
        values[leaf] = stored.mT.contiguous() if transposed else stored
        coded |= {leaf: [replace(part, transposed=transposed) for part in codes]} if codes else {}
        tensors |= {} if codes else {leaf: values[leaf]}
        shape = values[leaf].shape
        entries[leaf] = Entry((leaf,), ((module, leaf),), torch.empty(shape, dtype=dtype, device="meta"), 0)
        if module.has_bias:
            bias = torch.randn(count, rows, generator=torch.Generator().manual_seed(rows)).to(dtype)
            tensors[f"{leaf}_bias"] = values[f"{leaf}_bias"] = bias
            entries[f"{leaf}_bias"] = Entry((leaf,), ((module, leaf),), bias, 0)
    arena = PinnedArena(1 << 26, pin=False, grow=True)
    experts = Experts(module, entries, count)
    packed = pack_experts(experts, tensors, coded, arena, plain=True)
    buffer = torch.full((packed.unpacked_bytes,), 255, dtype=torch.uint8)
    for leaf, weight in packed.blocks.items():
        setattr(module, leaf, weight.view(buffer))
    computed = CpuExperts(CPU, 33, **other)
    computed.attach(0, packed, experts, arena.memory, buffer)
    return computed, values


def call(tokens: int, hidden: int, count: int, dtype: torch.dtype, each: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Return states, choice and weights; several tokens have the same expert, and one choice names none."""
    dice = torch.Generator().manual_seed(tokens)
    states = torch.randn(tokens, hidden, generator=dice).to(dtype)
    chosen = torch.stack([torch.randperm(count, generator=dice)[:each] for _ in range(tokens)])
    chosen[-1, 0] = count
    return states, chosen, torch.rand(tokens, each, generator=dice).to(dtype)


def exact(
    module: Any,
    values: dict[str, Tensor],
    states: Tensor,
    chosen: Tensor,
    weights: Tensor,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Compute experts in float64. Results are rounded to `dtype` where the compiled code rounds those of Swiglu."""

    def rounded(tensor: Tensor) -> Tensor:
        return tensor.to(dtype).double()

    out = torch.zeros(states.shape, dtype=torch.float64)
    matrices = {name: value.double() for name, value in values.items()}
    for token, row in enumerate(states.double()):
        for number, weight in zip(chosen[token].tolist(), weights[token].tolist(), strict=True):
            if number == len(values["down_proj"]):
                continue
            inner = row
            for leaf in ("gate_up_proj", "down_proj"):
                matrix = matrices[leaf][number]
                inner = inner @ (matrix if module.is_transposed else matrix.t())
                if module.has_bias:
                    inner = inner + matrices[f"{leaf}_bias"][number]
                inner = rounded(inner)
                if leaf == "gate_up_proj" and isinstance(module, Swiglu):
                    gate, up = inner.chunk(2)
                    inner = rounded(rounded(silu(gate)) * up)
                elif leaf == "gate_up_proj":
                    inner = module._apply_gate(inner)
            out[token] += rounded(weight * inner)
    return rounded(out)


def check(module: nn.Module, name: str, size: str, dtype: torch.dtype, tokens: int, fast: bool | None = None) -> None:
    computed, values = made(module, name, SIZES[size], dtype)
    assert computed.status == "on"
    count, hidden, _ = SIZES[size]
    if fast is not None:
        layer = computed._layers[0]
        assert (bool(layer.up.fast), bool(layer.down.fast)) == (fast, fast)
    given = call(tokens, hidden, count, dtype)
    result, expected = computed.compute(0, *given), exact(module, values, *given)
    # Activations are rounded to the type of the states after each product: 8 bits for bf16, 11 for fp16.
    assert error(result, expected) < {torch.bfloat16: 1e-2, torch.float16: 1e-3, torch.float32: 2e-6}[dtype]
    if dtype == torch.bfloat16 and isinstance(module, Swiglu):  # nothing else is rounded but inputs to 16 bits
        assert error(result, exact(module, values, *given, dtype)) < 3e-3
    assert torch.equal(computed.compute(0, *given), result)


@pytest.fixture
def fast(compiler: None) -> Callable[[str], bool]:
    """Tells whether this processor has fast products of a format."""
    computed, _ = made(Swiglu(), "bf16", SIZES["odd"], torch.bfloat16)
    level = computed._library.experts_fast()
    return lambda name: name != "e5m2" and level > (name.endswith("bf16") or "8" in name)


@pytest.mark.parametrize("tokens", [1, 2, 8, 33])
@pytest.mark.parametrize("name", FORMATS)
def test_experts_are_exact_in_every_format(name: str, tokens: int, fast: Callable[[str], bool]) -> None:
    check(Swiglu(), name, "super" if "_K" in name else "whole", torch.bfloat16, tokens, fast(name))


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "int4 of 32", "Q4_0", "Q8_0"])
def test_rows_that_do_not_fill_registers_are_exact(name: str, fast: Callable[[str], bool]) -> None:
    for tokens in (1, 5):
        check(Swiglu(), name, "half", torch.bfloat16, tokens, fast(name))


def test_experts_of_gpt_oss_with_biases_are_exact(fast: Callable[[str], bool]) -> None:
    for tokens in (1, 7, 32):
        check(Clamped(), "mxfp4", "whole", torch.bfloat16, tokens, fast("mxfp4"))


def test_codes_are_fast_in_float16_too(fast: Callable[[str], bool]) -> None:
    for (name, size), tokens in product((("bf16", "whole"), ("int4 zeros", "whole"), ("Q4_K, Q6_K", "super")), (1, 8)):
        check(Swiglu(), name, size, torch.float16, tokens, fast(name) and name != "bf16")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_odd_sizes_and_other_types_are_exact(dtype: torch.dtype, compiler: None) -> None:
    for name in ("bf16", "mxfp4", "int4 zeros", "fp8 blocks"):
        check(Swiglu(), name, "odd", dtype, 5)
    for name in ("bf16", "mxfp4"):
        check(Clamped(), name, "odd", dtype, 5)


@pytest.mark.parametrize("lesser", PROCESSORS, indirect=True)
def test_every_processor_computes_the_same(lesser: None) -> None:
    for name in ("bf16", "mxfp4", "nvfp4", "int8 zeros", "fp8 blocks"):
        check(Swiglu(), name, "whole", torch.bfloat16, 5)
    check(Clamped(), "mxfp4", "whole", torch.bfloat16, 5)
    check(Swiglu(), "bf16", "whole", torch.float16, 5)
    for name in ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "Q4_K, Q6_K"):
        for dtype, tokens in product((torch.bfloat16, torch.float32), (1, 2, 8, 33)):
            check(Swiglu(), name, "super", dtype, tokens)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_number_of_threads_computes_them(threads: int, compiler: None) -> None:
    for module, name in ((Swiglu(), "int4 groups"), (Clamped(), "mxfp4")):
        computed, values = made(module, name, SIZES["whole"], torch.bfloat16, threads=threads)
        for each in (1, 3):  # the memory grows
            given = call(5, 256, 8, torch.bfloat16, each)
            assert error(computed.compute(0, *given), exact(module, values, *given)) < 1e-2


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_compute_what_a_device_asks_for(threads: int, compiler: None) -> None:
    """The test writes to pinned memory what a device would write."""
    computed, values = made(Swiglu(), "int4 groups", SIZES["whole"], torch.bfloat16, threads=threads)
    server, numbers = Server(computed._library, threads, pin=False), dict[int, int]()
    for tokens in (1, 5, 1, 5, 2) * 8:
        states, chosen, weights = call(tokens, 256, 8, torch.bfloat16)
        *sent, out, _ = computed._memory_for(3)
        if tokens not in numbers:
            numbers[tokens] = server.number(computed._call(0, tokens, 3))
        for host, tensor in zip(sent, (states, chosen, weights), strict=True):
            host[: tensor.numel()].view(tensor.shape).copy_(tensor)
        server.done[0], server.asked[0] = 0, numbers[tokens]
        while not server.done:
            time.sleep(1e-4 if tokens == 5 else 4e-3)  # threads sleep when nothing is asked for
        expected = exact(Swiglu(), values, states, chosen, weights)
        assert error(out[: states.numel()].view(states.shape), expected) < 1e-2
        assert int(server.asked) == 0
    server.close()
    assert not any(thread.name == "zinfer-experts" for thread in threading.enumerate())


def test_the_kernels_that_ask_for_experts_compile_for_an_h100() -> None:
    from zinfer.engine.stream.experts import request

    host = {"host_states": "*bf16", "host_chosen": "*i64", "host_weights": "*fp32", "asked": "*i32", "done": "*i32"}
    sent = {"states": "*bf16", "chosen": "*i64", "weights": "*fp32"} | host
    compile_for_h100(request._send, {"BLOCK": request.SENT}, sent, num_warps=8)
    received = {"host": "*bf16", "done": "*i32", "out": "*bf16"}
    compile_for_h100(request._receive, {"linked": None, "BLOCK": request.RECEIVED}, received, num_warps=4)


def quantised(name: str, directory: Path, **sizes: int) -> tuple[Path, dict[str, Any]]:
    """Make a small mixture. Also return options with which its experts lie in host memory as released."""
    kind, _, form = name.partition(" ")
    if form == "gguf":
        ggufs = pytest.importorskip("tests.ggufs", reason="pip install 'zinfer[gguf]'")
        directory.mkdir()
        ggufs.write(kind, directory / "m.gguf", ggufs.Kind.Q4_K, down=ggufs.Kind.Q6_K)
        return directory, {"weight_codec": "lossless"}
    save_config(directory, kind, **MIXTURES[kind] | sizes)
    if form == "mxfp4":
        quantized.mxfp4(directory)
    elif form in ("int4", "nvfp4"):
        pytest.importorskip("compressed_tensors")
        quantized.compressed(directory, "int4 groups" if form == "int4" else form)
    elif form == "fp8":
        quantized.fp8(directory, (16, 16))
    return directory, {"weight_codec": "lossless"} if form else {}


NAMES = ["gpt_oss mxfp4", "mixtral int4", "mixtral nvfp4", "qwen3_moe fp8", "qwen3_moe", "gpt_oss", "deepseek_v3"]


@pytest.mark.parametrize("name", [*NAMES, "mixtral gguf"])
def test_engines_give_the_logits_of_experts_on_the_device(name: str, tmp_path: Path, compiler: None) -> None:
    """The CPU computes steps; the experts of prompts cross the link. In float32, since rounding leads
    tokens to other experts."""
    directory, options = quantised(name, tmp_path / "m")
    expected, loaded = (load(directory, experts, **options) for experts in ("on-demand", "cpu"))
    assert all(error(*step) < 1e-4 for step in zip(steps(loaded), steps(expected), strict=True))
    settings = loaded.effective().settings
    assert settings["cpu_experts"] == "on"
    assert settings["experts_fetched_per_step"] == 0
    assert settings["experts_on_cpu_per_step"] > 0
    assert torch.equal(*(greedy(engine, BATCHES[0]) for engine in (expected, loaded)))


def share_of(directory: Path, layers: int) -> str:
    """Return a share of the weights with the experts of `layers` layers. It holds all else, too."""
    spec = resolve.from_directory(directory)
    mixtures = sum(layer.expert_parameters > 0 for layer in spec.layers)
    kept = spec.streamed_bytes - spec.routed_bytes * (1 - layers / mixtures)
    return f"{min(100, 100 * kept / spec.streamed_bytes + 1e-4):.5f}%"


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """Have torch multiply from codes, without kernels of Triton."""

    def multiply_pairs(self: Double, states: Tensor, experts: Tensor, _aligned: object) -> Tensor:
        rows = states.repeat_interleave(experts.numel() // len(states), 0)
        matrices = self.values[experts.flatten()]
        return self.kernel(lambda: (matrices @ rows[..., None])[:, None, :, 0])

    monkeypatch.setattr(Double, "multiply_pairs", multiply_pairs)
    monkeypatch.setattr(Double, "nbytes", property(lambda self: self.form.weight.nbytes + self.form.scales.nbytes))
    return replaced(monkeypatch)


@pytest.mark.parametrize(("name", "count"), covering(NAMES, [0, 1, 2, 3, None]))
def test_the_device_computes_the_experts_of_layers_that_stay(
    name: str, count: int | None, tmp_path: Path, compiler: None, kernels: Kernel
) -> None:
    """The CPU computes those of the others. Of layers that stay nothing is in host memory."""
    directory, options = quantised(name, tmp_path / "m")
    expected, share = load(directory, **options), "100%" if count is None else share_of(directory, count)
    loaded = load(directory, "cpu", share, **options)
    poisoned(loaded)
    assert all(error(*step) < 1e-4 for step in zip(steps(loaded), steps(expected), strict=True))
    for lengths in BATCHES:
        assert torch.equal(greedy(expected, lengths), greedy(loaded, lengths))
    effective = loaded.effective()
    mixtures, stay = len(loaded._pool.layers), len(loaded.plan.placement.expert_layers)
    stays = mixtures if count is None else count
    assert stay == (0 if name.endswith("fp8") else stays), "codes in FP8 would be unpacked in each pass"
    stay = 0 if name.endswith("nvfp4") else stay  # gate and value have a factor each, which no kernel reads
    assert effective.settings["cpu_experts"] == "on"
    assert effective.settings["gpu_expert_layers"] == stay
    assert effective.settings["cpu_expert_layers"] == mixtures - stay
    assert effective.settings["experts_fetched_per_step"] == effective.wire_bytes_per_step == 0
    assert (effective.settings["experts_on_cpu_per_step"] > 0) == (stay < mixtures)


@pytest.mark.parametrize("count", [0, 1, 2, None])
@pytest.mark.parametrize("name", ["gpt_oss mxfp4", "mixtral int4", "mixtral nvfp4", "qwen3_moe"])
def test_planned_bytes_are_those_of_experts_that_stay_and_of_those_that_do_not(
    name: str, count: int | None, tmp_path: Path, compiler: None, kernels: Kernel
) -> None:
    directory, options = quantised(name, tmp_path / "m")
    share = "100%" if count is None else share_of(directory, count)
    loaded = load(directory, "cpu", share, dtype="bfloat16", **options)
    effective, plan = loaded.effective(), loaded.plan
    aligned = partial(pytest.approx, rel=0.05)  # tensors of small models are a few hundred bytes
    if not name.endswith("nvfp4"):  # see above
        assert effective.gpu_weight_bytes == aligned(plan.gpu.weights)
        assert effective.host_weight_bytes == aligned(plan.host.weights)
    planned, stored = plan.gpu.weights + plan.host.weights, effective.gpu_weight_bytes + effective.host_weight_bytes
    assert stored == aligned(planned), "each weight lies in one place"


@pytest.mark.parametrize("name", ["gpt_oss mxfp4", "mixtral int4", "qwen3_moe"])
@pytest.mark.parametrize("reads", [True, False])
def test_layers_whose_experts_stay_may_change(
    name: str, reads: bool, tmp_path: Path, compiler: None, request: pytest.FixtureRequest
) -> None:
    """Their experts are in host memory, too. Without kernels that read codes the CPU computes them all."""
    if reads:
        request.getfixturevalue("kernels")
    directory, options = quantised(name, tmp_path / "m")
    expected, loaded = load(directory, **options), load(directory, "cpu", share_of(directory, 0), **options)
    texts = [greedy(expected, lengths) for lengths in BATCHES]
    every = tuple(range(loaded.plan.model.num_layers))
    for layers in ((), (0, 2), (1,), every, (3,), ()):
        loaded.clear()
        loaded.apply_placement(loaded.plan.placement.model_copy(update={"expert_layers": layers}))
        poisoned(loaded)
        assert equal((greedy(loaded, lengths) for lengths in BATCHES), texts)
        settings, stay = loaded.effective().settings, len(layers) if reads or name == "qwen3_moe" else 0
        assert settings["gpu_expert_layers"] == stay
        assert settings["cpu_expert_layers"] == len(every) - stay
    pool = loaded._pool
    assert pool.kept_bytes == 0
    assert pool._memory.nbytes == (pool.staging + pool.cached) * pool.buffer_bytes


def check_calls(name: str, path: Path, patch: pytest.MonkeyPatch, run: Callable[[Stream], object]) -> None:
    """Check each call of experts on the CPU in bf16. There rounding leads tokens to other experts."""
    directory, options = quantised(name, path)
    checked, calls = CpuExperts.checked, list[object]()

    def always(self: CpuExperts, kind: object, kernel: Any, plain: Any) -> Tensor | None:
        self._checked.clear()
        calls.append(kind)
        return checked(self, kind, kernel, plain)

    patch.setattr(CpuExperts, "checked", always)
    loaded = load(directory, "cpu", dtype="bfloat16", cuda_graphs="off", **options)
    run(loaded)
    assert loaded.effective().settings["cpu_experts"] == "on"
    assert len(calls) >= 3 * len(loaded._pool.layers)


@pytest.mark.parametrize("name", [*NAMES, "mixtral gguf"])
def test_every_call_of_an_engine_gives_what_the_model_computes(
    name: str, tmp_path: Path, compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_calls(name, tmp_path / "m", monkeypatch, lambda loaded: (steps(loaded), greedy(loaded, BATCHES[0])))


@pytest.mark.parametrize("count", [None, 0, 2, 4])
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "gpt_oss mxfp4"])
def test_steps_are_recorded_with_their_experts(
    name: str, count: int | None, tmp_path: Path, compiler: None, kernels: Kernel, recorder: Rerun
) -> None:
    """Such steps wait for no choice, whoever computes. Other weights may cross the link."""
    directory, options = quantised(name, tmp_path / "m")
    share = "0%" if count is None else share_of(directory, count)
    batches = *BATCHES, BATCHES[0]
    expected = load(directory, share=share, cuda_graphs="off", **options)
    loaded = load(directory, "cpu", share, **options)
    for rows in batches:
        assert torch.equal(greedy(loaded, rows), greedy(expected, rows))
    settings = loaded.effective().settings
    assert settings["cuda_graphs"] == (BY_LAYER if count is None else "on")
    assert (settings["cpu_experts"], settings["gpu_expert_layers"]) == ("on", count or 0)
    assert recorder.replayed > 8
    fault = not_as_asked(loaded.plan.case, loaded.effective(), loaded.plan.model.streamed_bytes)
    assert fault is None, "a step that brings nothing did what was asked"
    assert not loaded._pool.scanning


def test_without_a_compiler_experts_come_on_demand(no_compiler: None, tmp_path: Path) -> None:
    directory, _ = quantised("mixtral", tmp_path / "m")
    expected, loaded = load(directory), load(directory, "cpu")
    assert equal(steps(expected), steps(loaded))
    settings = loaded.effective().settings
    assert settings["cpu_experts"] == "no C compiler that works here"
    assert settings["experts_fetched_per_step"] > 0


def test_slow_products_are_for_those_who_ask(compiler: None) -> None:
    computed, _ = made(Swiglu(), "bf16", SIZES["odd"], torch.bfloat16, fast=True)
    assert computed.status.startswith("slow: ")
    assert computed.settings["cpu_experts"] == computed.status
    assert not computed.takes(0, *call(1, 100, 5, torch.bfloat16))
