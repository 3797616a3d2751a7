"""The ring of several GPUs: of every chunk a part comes over each link, and whatever happens in a pass, all ranks
gather the same chunks in the same order."""

from collections.abc import Callable
from itertools import cycle, islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.test_ring import Answer, Bench, FakeQueues, Race
from zinfer.engine.pinned import PinnedArena
from zinfer.engine.stream.weights import chunk as chunk_module
from zinfer.engine.stream.weights.chunk import PackedLayer
from zinfer.engine.stream.weights.gather import GatherRing, part_bytes
from zinfer.engine.stream.weights.ring import PrefetchRing
from zinfer.engine.stream.weights.source import MemorySource


class FakeRanks:
    """Rank `rank` of `size` whose peers always have the next chunk. Chunks come in the order of layers: a gather of
    anything else is a gather that the other ranks do not make."""

    def __init__(self, rank: int, size: int, queues: FakeQueues) -> None:
        self.rank, self.size, self._queues = rank, size, queues
        self.order: Any = iter(())
        self.count = 0

    def knows(self, source: Tensor, layers: list[PackedLayer]) -> None:
        self._source, self._chunks = source, [chunk for packed in layers for chunk in packed.chunks]
        self.again()

    def again(self) -> None:
        """Begin with the first chunk, as all ranks do together."""
        self.order = cycle(self._chunks)

    def gather(self, whole: Tensor, part: Tensor) -> None:
        chunk = next(self.order)
        size = part_bytes(chunk.size, self.size)
        assert (whole.numel(), part.numel()) == (size * self.size, size)
        expected = self._source[chunk.start : chunk.end]
        content = expected[self.rank * size : (self.rank + 1) * size]
        assert torch.equal(part[: content.numel()], content), "a part of another chunk"
        self._queues.write(whole)
        whole[: expected.numel()] = expected
        self.count += 1


class GatherBench(Bench):
    def buffers(self) -> list[Tensor]:
        assert isinstance(self.ring, GatherRing)
        return [*self.ring._buffers, *self.ring._staging.buffers]


def bench(
    sizes: list[int], depth: int, patch: pytest.MonkeyPatch, rank: int = 0, size: int = 2, skipped_wait: str = ""
) -> tuple[Bench, FakeRanks]:
    patch.setattr(chunk_module, "CHUNK_BYTES", 1024)
    queues = FakeQueues(skip_waits=skipped_wait)
    ranks = FakeRanks(rank, size, queues)

    def make(arena: PinnedArena, layers: list[PackedLayer], depth: int, *where: Any) -> PrefetchRing:
        ranks.knows(arena.memory, layers)
        return GatherRing(MemorySource(arena, layers), depth, where[0], ranks, where[1])  # type: ignore[arg-type]

    return GatherBench(sizes, depth, queues, patch, make), ranks


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([40, 512, 1300, 2600, 5000]), min_size=1, max_size=5),
    depth=st.integers(2, 7),
    rank_and_size=st.sampled_from([(0, 2), (1, 2), (0, 3), (2, 3)]),
    kept=st.sets(st.integers(0, 4)),
    passes=st.lists(
        st.tuples(st.integers(1, 3), st.integers(0, 2)) | st.sampled_from(["idle", "fails"]), min_size=1, max_size=6
    ),
)
def test_every_pass_has_the_same_gathers(
    sizes: list[int], depth: int, rank_and_size: tuple[int, int], kept: set[int], passes: list[Any]
) -> None:
    """Passes of any mixture, idle ones and ones that fail half-way: the weights are right, no buffer is overwritten
    early, and after each pass the same number of chunks was gathered."""
    with pytest.MonkeyPatch.context() as patch:
        checked, ranks = bench(sizes, depth, patch, *rank_and_size)
        ring = checked.ring
        assert isinstance(ring, GatherRing)
        chunks = sum(len(packed.chunks) for packed in ring.layers)
        layers = kept & set(range(len(sizes)))
        if layers:
            ring.keep(layers)
            ranks.again()
            ranks.count = 0
            ring.start()
        assert ring.depth == depth or depth == 2, "buffers for layers that stay are some of the ring's"
        first = 0 if 0 in layers else min(len(ring._buffers), len(ring.layers[0].chunks))
        whole = sum(packed.unpacked_bytes for index, packed in enumerate(ring.layers) if index not in layers)
        for number, run_pass in enumerate(passes):
            before = ring.bytes_copied
            if run_pass == "idle":
                ring.idle_pass()
            elif run_pass == "fails":
                checked.layers[0].due = number % 2
                with pytest.raises(MemoryError), ring.weight_pass(1, fetches=[Answer(0, number)]):  # noqa: PT012
                    checked.layers[0]()
                    raise MemoryError
            else:
                calls, count = run_pass
                checked.borrowed.clear()
                checked.run_pass(calls, [Answer(fetch, number) for fetch in range(count)])
                assert checked.borrowed == [[f, layer, number, 7] for layer in range(len(sizes)) for f in range(count)]
            assert ring.bytes_copied - before == whole
            assert (ring.passes, ranks.count) == (number + 1, (number + 1) * chunks + first)
        checked.close()


@pytest.mark.parametrize("kept", [[], [1]])
@pytest.mark.parametrize("skipped_wait", ["gather", "compute", "copy"])
def test_a_wait_that_is_missing_is_seen(skipped_wait: str, kept: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Race):  # noqa: PT012
        checked, ranks = bench([2600, 2600, 2600], 3, monkeypatch, skipped_wait=skipped_wait)
        checked.ring.keep(kept)
        ranks.again()
        checked.run_pass()


def test_copies_go_on_while_a_layer_that_stays_is_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a resident layer take none of the link's buffers."""
    checked, ranks = bench([4096, 1 << 14, 4096], 6, monkeypatch)
    checked.ring.keep([1])
    ranks.again()
    issued = dict[int, int]()

    def turn(layer: int) -> None:
        issued[layer] = checked.ring._issued

    with checked.ring.weight_pass(turn=turn):
        for layer, weight in zip(checked.layers, checked.weights, strict=True):
            assert torch.equal(layer(), weight)
    assert (len(checked.ring._buffers), checked.ring.depth) == (4, 6)
    assert issued == {0: 4, 1: 8, 2: 8}, "all of the last layer is on its way when the one that stays has its turn"
    checked.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_links_are_measured_with_parts_of_some_layers(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    checked, ranks = bench([5000, 700, 900, 800, 1300, 600], 3, monkeypatch, rank=rank)
    ring, before = checked.ring, ranks.count
    assert isinstance(ring, GatherRing)
    chunks = [(index, number) for index in (0, 4) for number in range(len(ring.layers[index].chunks))]
    assert ring.bring() == sum(ring._part(*chunk).numel() for chunk in chunks)
    assert ranks.count == before, "nothing is gathered"
    checked.close()


def test_a_fetch_wider_than_a_buffer_leaves_what_was_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    checked, ranks = bench([1300, 1300], 3, monkeypatch)
    before = ranks.count
    with checked.ring.weight_pass(1, fetches=[Answer(0, 0, nbytes=1 << 14)]):
        assert checked.ring.buffer_bytes == 1 << 14
        assert ranks.count - before <= 3
    checked.ring.resize(3)
    checked.run_pass()
    assert checked.ring.buffer_bytes == 1 << 14, "no rank begins anew for itself"
    checked.close()


@pytest.mark.parametrize(
    "change", [lambda ring: ring.resize(5), lambda ring: ring.keep([1]), GatherRing.abandon, GatherRing.bring]
)
def test_what_all_ranks_change_begins_anew(
    change: Callable[[GatherRing], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    checked, ranks = bench([1300, 700], 3, monkeypatch)
    checked.run_pass()
    assert isinstance(checked.ring, GatherRing)
    change(checked.ring)
    ranks.again()
    checked.ring.start()
    checked.run_pass()
    assert list(islice(ranks.order, 1)) == [checked.ring.layers[1].chunks[0]], "one chunk of the next pass came ahead"
    checked.close()
