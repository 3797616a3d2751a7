"""Streamed layers: every bit arrives, through arena, ring and slot, and the tokens stay the same."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from tests import Checkpoints, Patch
from tests.grid import covering
from tests.running import equal, prefill
from tests.test_parity import BATCHES, check_tokens, greedy, load
from tests.test_ring import FakeQueues, plain
from tools.steered import steered
from zinfer.engine.base import Engine, Work
from zinfer.engine.pinned import PAGE, PinnedArena
from zinfer.engine.state import Entry
from zinfer.engine.stream.engine import Stream
from zinfer.engine.stream.passes import interleave
from zinfer.engine.stream.weights import chunk as chunk_module
from zinfer.engine.stream.weights import codec
from zinfer.engine.stream.weights.chunk import PackedLayer, pack
from zinfer.engine.stream.weights.ring import PrefetchRing
from zinfer.engine.stream.weights.source import MemorySource
from zinfer.plan.bytes import Sizes
from zinfer.plan.planner import make_plan
from zinfer.worker.session import not_as_asked

CPU = torch.device("cpu")


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).mul(0.02).to(dtype)


def layer_tensors(seed: int) -> dict[str, Tensor]:
    """Return two compressible matrices, a bias, and an odd tensor."""
    matrices = {"a_weight": normal(256, 256 + seed), "b_weight": normal(128, 512)}
    return matrices | {"a_bias": normal(256), "b_odd": normal(7, 3 + seed, dtype=torch.float32)}


_opened = ExitStack()


@pytest.fixture(autouse=True)
def small(monkeypatch: Patch) -> Iterator[None]:
    """Code small tensors too, in small chunks. A matrix of a test then has several."""
    monkeypatch.setattr(codec, "MIN_NUMEL", 0)
    monkeypatch.setattr(chunk_module, "CHUNK_BYTES", 3 * codec.BLOCK * 2)
    with _opened:
        yield


def packed(layers: list[dict[str, Tensor]], plain: bool = False) -> tuple[PinnedArena, list[PackedLayer]]:
    arena = PinnedArena(1 << 22, pin=False, grow=True)
    _opened.callback(arena.close)
    packed_layers = [pack(tensors, arena, plain=plain) for tensors in layers]
    arena.seal()
    return arena, packed_layers


as_they_are = partial(packed, plain=True)


def test_an_arena_that_grows_keeps_what_it_holds_and_has_an_end() -> None:
    arena = PinnedArena(10 * PAGE, pin=False, grow=True)
    _opened.callback(arena.close)
    taken = [arena.allocate(size).fill_(size % 251) for size in (100, PAGE, 3, 2 * PAGE + 1)]
    arena.allocate(PAGE)
    assert [part.unique().tolist() for part in taken] == [[part.numel() % 251] for part in taken]
    with pytest.raises(MemoryError, match="the arena has"):
        arena.allocate(9 * PAGE)


class Layer(nn.Module):
    """Module that returns its parameters' values at each call."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        for name in tensors:
            self.register_parameter(name, nn.Parameter(torch.empty(0), requires_grad=False))

    def forward(self) -> dict[str, Tensor]:
        return {name: parameter.data.clone() for name, parameter in self.named_parameters()}


def ring_of(
    make: Callable[..., tuple[PinnedArena, list[PackedLayer]]], count: int, depth: int = 2, kept: Sequence[int] = ()
) -> tuple[PrefetchRing, list[Layer], list[dict[str, Tensor]]]:
    tensors = [layer_tensors(seed) for seed in range(count)]
    arena, packed_layers = make(tensors)
    ring = PrefetchRing(MemorySource(arena, packed_layers), depth, CPU)
    _opened.callback(ring.close)
    for index in kept:
        ring.keep_only(index, arena.memory[packed_layers[index].start : packed_layers[index].end].clone())
    layers = [Layer(tensor) for tensor in tensors]
    for index, layer in enumerate(layers):
        entries = {name: Entry((name,), ((layer, name),), tensor, index) for name, tensor in tensors[index].items()}
        ring.attach(index, layer, entries)
    ring.start()
    return ring, layers, tensors


def same(layers: list[Layer], tensors: list[dict[str, Tensor]]) -> bool:
    """Call the layers; tell whether each sees its own weights."""
    seen = (bits.contiguous().view(torch.uint8) for layer in layers for _, bits in sorted(layer().items()))
    wanted = (bits.contiguous().view(torch.uint8) for each in tensors for _, bits in sorted(each.items()))
    return equal(seen, wanted)


@pytest.mark.parametrize("make", [packed, as_they_are])
def test_the_ring_shows_each_layer_its_own_weights_step_after_step(
    make: Callable[..., tuple[PinnedArena, list[PackedLayer]]],
) -> None:
    ring, layers, tensors = ring_of(make, 3, depth=3)
    ways: list[tuple[list[int], list[int]]] = [([], []), ([1], [1]), ([0, 2], [2]), ([0, 1, 2], [0, 1, 2])]
    for resident, unpacked in [*ways, ([0, 1, 2], [1]), ([1, 2], [1, 2]), ([], [])]:
        ring.keep(resident, unpacked)
        ring.start()
        before = ring.bytes_copied
        for _ in range(2):
            with ring.weight_pass():
                assert same(layers, tensors)
        moved = sum(chunk.size for index in ring.streamed for chunk in ring.layers[index].chunks)
        assert ring.bytes_copied - before == 2 * moved
        plain = unpacked if make is packed else []  # uncoded layers are, always
        sizes = [ring.layers[i].unpacked_bytes if i in plain else ring.layers[i].size for i in resident]
        assert (ring.kept_bytes, ring.unpacked) == (sum(sizes), frozenset(plain))
    with pytest.raises(RuntimeError, match="layer 1 is next"), ring.weight_pass():  # noqa: PT012
        layers[0]()
        layers[2]()
    with pytest.raises(RuntimeError, match="outside of a pass"):
        layers[0]()
    with ring.weight_pass():  # left half-way
        assert same(layers[:1], tensors[:1])
    with ring.weight_pass():
        assert same(layers, tensors)


def test_a_layer_that_lies_nowhere_else_can_be_coded_again() -> None:
    ring, layers, tensors = ring_of(packed, 3, kept=[1])
    coded = ring.kept_bytes
    for unpacked in ([1], [], [1], [0, 1], []):
        ring.keep([], unpacked)
        assert ring.streamed == (0, 2)
        assert ring.unpacked == {1}.intersection(unpacked)
        assert ring.kept_bytes == (ring.layers[1].unpacked_bytes if 1 in unpacked else coded)
        with ring.weight_pass():
            assert same(layers, tensors)


def test_a_ring_that_the_device_has_no_room_for_can_be_made_smaller(monkeypatch: Patch) -> None:
    packed_layers = [plain([("weight", torch.empty(64))], 0)]
    arena = PinnedArena(packed_layers[-1].end, pin=False)
    ring = PrefetchRing(MemorySource(arena, packed_layers), 2, CPU, FakeQueues())
    ring.resize(3)
    for depth, size in ((6, 0), (3, 8192)):
        with monkeypatch.context() as short_of_memory:
            short_of_memory.setattr(torch, "empty", Mock(side_effect=torch.OutOfMemoryError("no room")))
            with pytest.raises(torch.OutOfMemoryError):
                ring.resize(depth, size)
        ring.resize(min(2, ring.depth))
        ring.resize(2)
        assert [buffer.numel() for buffer in ring._buffers] == [ring.buffer_bytes] * 2
        assert ring.depth == 2


def test_a_pass_that_fails_ends_all_and_the_ring_goes_on() -> None:
    ring, layers, tensors = ring_of(packed, 3)
    left: list[int] = []

    def forward(rows: int) -> Tensor:
        try:
            layers[0]()
            if rows == 2:
                raise MemoryError("no more")
            layers[1]()
        finally:
            left.append(rows)
        return torch.tensor(rows)

    with pytest.raises(MemoryError, match="no more"):
        interleave(ring, [lambda rows=rows: forward(rows) for rows in range(4)], lambda *_: None)  # type: ignore[misc]
    assert sorted(left) == [0, 1, 2, 3]
    with ring.weight_pass():
        assert same(layers, tensors)


def tokens(loaded: Engine) -> list[Tensor]:
    return [greedy(loaded, lengths, 6) for lengths in BATCHES]


@pytest.mark.parametrize(
    "architecture", ["mixtral", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bloom", "llama", "opt"))]
)
def test_the_engine_gives_the_same_tokens_from_fewer_bytes(
    architecture: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    directory = checkpoint(architecture, hidden_size=128)
    codecs = ("lossless", "none")
    coded, raw = (load("stream", directory, "cpu", tmp_path, "bfloat16", weight_codec=each) for each in codecs)
    assert equal(tokens(coded), tokens(raw))
    actual, plain = coded.effective(), raw.effective()
    assert (actual.settings["weight_codec"], plain.settings["weight_codec"]) == codecs
    assert isinstance(coded, Stream)
    held = sum(parameter.nbytes for layer in coded._layers for parameter in layer.parameters())
    assert actual.streamed_bytes_per_step == held
    assert plain.wire_bytes_per_step == plain.streamed_bytes_per_step == pytest.approx(held, rel=0.02)
    assert (actual.wire_bytes_per_step or 0) < 0.8 * actual.streamed_bytes_per_step
    assert actual.host_weight_bytes == pytest.approx(actual.wire_bytes_per_step, rel=0.02)


@pytest.mark.parametrize(
    ("placed", "weight_codec"),
    covering([("0%", 0), ("34%", 1), ("67%", 2), ("100%", 3), ("auto", 0)], ["none", "lossless"]),
)
def test_layers_that_stay_are_not_streamed_and_give_the_same_tokens(
    placed: tuple[str, int], weight_codec: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    share, resident = placed
    directory = checkpoint("llama", hidden_size=128)
    plain = load("stream", directory, "cpu", tmp_path, "bfloat16", weight_codec=weight_codec)
    loaded: Any = load("stream", directory, "cpu", tmp_path, "bfloat16", gpu_weights=share, weight_codec=weight_codec)
    assert equal(tokens(loaded), tokens(plain))
    actual, full = loaded.effective(), plain.effective()
    away = 3 - resident  # without a GPU nothing stays by itself
    assert actual.host_weight_bytes == pytest.approx(full.host_weight_bytes * away / 3, rel=0.01)
    assert actual.pinned_bytes == 0
    assert actual.settings["resident_layers"] == resident
    assert actual.streamed_bytes_per_step == full.streamed_bytes_per_step * away // 3
    assert actual.wire_bytes_per_step == pytest.approx((full.wire_bytes_per_step or 0) * away / 3, rel=0.01)
    kept = actual.gpu_weight_bytes - full.gpu_weight_bytes
    assert kept == pytest.approx(full.host_weight_bytes * resident / 3, rel=0.01)
    assert not_as_asked(loaded.plan.case, actual, loaded.plan.model.streamed_bytes) is None
    if share == "67%":
        loaded._ring.keep([])  # they are nowhere else
        assert loaded.effective().settings["resident_layers"] == resident


@pytest.mark.parametrize("share", ["0%", "25%", "50%", "100%", "auto"])
def test_coded_layers_that_stay_are_kept_unpacked_while_there_is_room(
    share: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    directory = checkpoint("llama", hidden_size=128)
    plain = load("stream", directory, "none", tmp_path, "bfloat16")
    expected = tokens(plain)
    case = plain.plan.case.model_copy(update={"gpu_weights": share, "offload": "cpu"})
    rates = {"hbm_bandwidth": 1e9, "h2d_bandwidth": 2e9, "matmul_flops": 1e15}  # unpacking takes longer than the link
    machine = plain.plan.machine.model_copy(update={"gpu_count": 1, "gpu_bytes": 4 << 30, **rates})
    loaded: Any = Stream(make_plan(case, plain.plan.model, machine))
    ratio = sum(layer.size for layer in loaded._ring.layers) / loaded.plan.model.streamed_bytes
    stay = {"0%": 0, "25%": 1, "50%": 2}.get(share, 3)
    placement = loaded.plan.placement
    others = [placement.model_copy(update={"unpacked_layers": kept}) for kept in ((), placement.resident_layers[-1:])]
    if share == "auto":
        fewer = {"resident_layers": (0, 2), "resident_bytes": placement.resident_bytes * 2 // 3}
        others.append(others[1].model_copy(update=fewer | {"unpacked_layers": (2,)}))
    for now in (placement, *others, placement):
        loaded.apply_placement(now)
        assert equal(tokens(loaded), expected)
        actual, kept = loaded.effective(), (len(now.resident_layers), len(now.unpacked_layers))
        assert (actual.settings["resident_layers"], actual.settings["unpacked_layers"]) == kept
        away = (3 - kept[0]) * loaded.plan.model.streamed_bytes // 3
        assert actual.streamed_bytes_per_step == pytest.approx(away, rel=0.01)
        sizes = Sizes(now, loaded.plan.model)
        kept_bytes = (sizes.stays - sizes.kept_unpacked) * ratio + sizes.kept_unpacked
        assert actual.gpu_weight_bytes == pytest.approx(kept_bytes + loaded.plan.model.other_bytes, rel=0.005)
    assert len(placement.unpacked_layers) == len(placement.resident_layers) == stay


@pytest.mark.parametrize("architecture", ["bloom", "llama", "mixtral"])
def test_a_prefill_in_blocks_streams_the_weights_once(architecture: str, checkpoint: Checkpoints) -> None:
    directory = checkpoint(architecture)
    engine: Any = load("stream", directory, "cpu")
    for at_once in (18, 1):  # two rows, one row
        engine.plan = steered(engine.plan, tokens=at_once)
        check_tokens(engine, directory)
    before, size = engine._ring.bytes_copied, sum(chunk.size for each in engine._ring.layers for chunk in each.chunks)
    prefill(engine, torch.full((3, 5), 9), torch.ones(3, 5, dtype=torch.int64), reserve=4)
    assert engine._ring.bytes_copied - before == size


def test_weights_that_do_not_shrink_go_as_they_are(checkpoint: Checkpoints) -> None:
    coded, plain = (load("stream", checkpoint("llama"), weight_codec=way) for way in ("lossless", "none"))
    assert equal(tokens(coded), tokens(plain))
    assert coded.effective().wire_bytes_per_step == plain.effective().wire_bytes_per_step


def test_a_step_can_be_traced(checkpoint: Checkpoints, tmp_path: Path) -> None:
    directory, token_ids = checkpoint("llama", hidden_size=128), torch.full((2, 5), 9)
    engine: Any = load("stream", directory, "cpu", tmp_path, "bfloat16", weight_codec="lossless")
    prefill(engine, token_ids, torch.ones_like(token_ids), reserve=3)
    spans = engine.timeline([Work(engine.batches[0], torch.tensor([[9], [9]]))])
    computed = [span for span in spans if span.lane == "compute"]
    assert [span.layer for span in computed if span.layer is not None] == [0, 1, 2]
    assert list(dict.fromkeys(span.layer for span in spans if span.lane == "unpack")) == [0, 1, 2]
    assert all(span.end_ms <= other.start_ms for span, other in pairwise(computed))
    assert engine._ring._trace is None


@pytest.mark.parametrize(
    ("blocks", "gpus", "chunks"),
    [
        ((9, 5), 1, ([2, 2, 2, 2, 1], [2, 2, 1])),
        ((60, 5), 1, ([4] * 15, [3, 2])),
        ((60, 5), 2, ([4] * 15, [3, 2])),
        ((60, 5), 4, ([8] * 7 + [4], [5])),
        ((27, 5), 4, ([4] * 6 + [3], [3, 2])),
        ((9, 5), 4, ([2, 2, 2, 2, 1], [2, 2, 1])),
    ],
)
def test_chunks_are_of_one_size_and_those_of_large_layers_and_of_several_gpus_are_larger(
    blocks: tuple[int, int], gpus: int, chunks: tuple[list[int], list[int]], monkeypatch: Patch
) -> None:
    block = codec.BLOCK * 2  # bytes
    monkeypatch.setattr(chunk_module, "CHUNK_BYTES", 2 * block)
    monkeypatch.setattr("zinfer.core.engine.CHUNK_BYTES", 2 * block)
    monkeypatch.setattr("zinfer.core.engine.LARGE_LAYER", 50 * block)
    weights = {name: normal(count * codec.BLOCK) for name, count in zip("ab", blocks, strict=True)}
    memory = chunk_module.LayerMemory(CPU)
    packed_layer = pack(weights, memory, gpus=gpus)
    layouts = (chunk.layout for chunk in packed_layer.chunks)
    sizes = [layout.numel // codec.BLOCK for layout in layouts if isinstance(layout, codec.Layout)]
    assert sizes == [*chunks[0], *chunks[1]]
    content, buffer = memory.whole(), torch.zeros(packed_layer.unpacked_bytes, dtype=torch.uint8)
    for chunk in packed_layer.chunks:
        chunk.unpack(content[chunk.start :], buffer)
    for name, tensor in weights.items():
        assert torch.equal(packed_layer.blocks[name].view(buffer), tensor)
