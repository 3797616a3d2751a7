"""The ring's protocol on queues that record who waited for whom: nothing is read before it has arrived, and nothing is
overwritten before it was read, whatever the order in which a device runs what it is given.

Each queue has a clock, as in a race detector: an operation happens before another one only if the other's queue has
waited, directly or through others, for an event recorded behind it. The queues run at once, on the CPU; the clocks tell
whether a device, which runs them at any time, would have been held to the same result.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests import Patch, Spy
from zinfer.engine.pinned import PinnedArena, lay_out
from zinfer.engine.state import Entry
from zinfer.engine.stream.weights import chunk as chunk_module
from zinfer.engine.stream.weights.chunk import Chunk, PackedLayer
from zinfer.engine.stream.weights.ring import PrefetchRing, Transfer
from zinfer.engine.stream.weights.source import MemorySource

CPU = torch.device("cpu")
Clock = dict[str, int]  # of each queue, how many of its operations are known to be done


class Race(AssertionError):
    """Two operations on one buffer, in two queues, that nothing orders."""


class FakeEvent:
    """A point in a queue; until it is recorded, waiting for it is no wait, as CUDA has it."""

    def __init__(self, queues: "FakeQueues") -> None:
        self._queues = queues
        self._clock: Clock | None = None

    def record(self) -> None:
        self._clock = dict(self._queues.clock)

    def wait(self) -> None:
        if self._queues.forgets:
            return
        for queue, time in (self._clock or {}).items():
            self._queues.clock[queue] = max(self._queues.clock.get(queue, 0), time)

    def query(self) -> bool:
        return next(self._queues.passed, True)

    def synchronize(self) -> None:  # the CPU gives no work before, and what it gives is in order all the same
        pass


class FakeQueues:
    """A compute queue, a copy queue and one between devices. `skip_waits` drops the waits of the queue of that
    name: a broken ring. `passed` tells, query by query, whether an event is passed; all are when it ends."""

    def __init__(self, skip_waits: str = "", passed: Iterable[bool] = ()) -> None:
        self.passed = iter(passed)
        self._clocks: dict[str, Clock] = {"compute": {}, "copy": {}, "gather": {}}
        self._current = "compute"
        self.skip_waits = skip_waits
        self.writes: dict[int, tuple[str, int]] = {}  # a buffer's last write: queue and time
        self.reads: dict[int, Clock] = {}  # a buffer's last read in each queue

    @property
    def clock(self) -> Clock:
        return self._clocks[self._current]

    @property
    def forgets(self) -> bool:
        return self.skip_waits == self._current

    def event(self) -> FakeEvent:
        return FakeEvent(self)

    @contextmanager
    def copying(self) -> Iterator[None]:
        before, self._current = self._current, "copy"
        yield
        self._current = before

    @contextmanager
    def gathering(self) -> Iterator[None]:
        before, self._current = self._current, "gather"
        yield
        self._current = before

    def finish(self) -> None:
        done = {queue: clock.get(queue, 0) for queue, clock in self._clocks.items()}
        for clock in self._clocks.values():
            clock.update(done)

    def _now(self) -> tuple[str, int]:
        clock = self._clocks[self._current]
        clock[self._current] = clock.get(self._current, 0) + 1
        return self._current, clock[self._current]

    def _after(self, what: tuple[str, int] | None, message: str) -> None:
        if what is not None and self._clocks[self._current].get(what[0], 0) < what[1]:
            raise Race(message)

    def write(self, buffer: Tensor) -> None:
        for read in self.reads.get(buffer.data_ptr(), {}).items():
            self._after(read, "a buffer is overwritten before it was read")
        self._after(self.writes.get(buffer.data_ptr()), "a buffer is written twice at once")
        self.writes[buffer.data_ptr()] = self._now()

    def read(self, buffer: Tensor) -> None:
        self._after(self.writes[buffer.data_ptr()], "a buffer is read before its content has arrived")
        queue, now = self._now()
        self.reads.setdefault(buffer.data_ptr(), {})[queue] = now


def plain(tensors: Iterable[tuple[str, Tensor]], start: int) -> PackedLayer:
    """Return the packed layer of uncoded tensors, from byte `start` on."""
    blocks, size = lay_out(tensors)
    chunks = chunk_module._cut(start, 0, size, chunk_module._largest_chunk(size, 1))
    return PackedLayer(tuple(chunks), blocks, size)


class Layer(nn.Module):
    """Layer that returns its weight, and reads the fetches due."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index, self.due = index, 0
        self.weight = nn.Parameter(torch.empty(0), requires_grad=False)
        self.use: Callable[[int], None] = lambda _layer: None

    def forward(self) -> Tensor:
        for _ in range(self.due):
            self.use(self.index)
        return self.weight.data.clone()


@dataclass(frozen=True)
class Answer:
    """Fetch whose bytes name its layer and pass."""

    number: int
    run_pass: int = 0
    nbytes: int = 4

    def transfer(self, layer: int) -> Transfer | None:
        return Transfer(layer, lambda: torch.tensor([self.number, layer, self.run_pass % 250, 7], dtype=torch.uint8))

    def following(self) -> "Answer":
        return Answer(self.number, self.run_pass + 1)


def in_memory(
    arena: PinnedArena, layers: list[PackedLayer], depth: int, device: torch.device, queues: "FakeQueues"
) -> PrefetchRing:
    return PrefetchRing(MemorySource(arena, layers), depth, device, queues)


class Bench:
    """Ring over `sizes`, the layers' lengths in bytes. Its copies and reads are watched by `queues`. With `hands_back`
    each fetch is handed back when it was read, else at the end of the call."""

    hands_back = False

    def __init__(
        self,
        sizes: Sequence[int],
        depth: int,
        queues: FakeQueues,
        monkeypatch: Patch,
        ring: Callable[..., PrefetchRing] = in_memory,
    ) -> None:
        self.queues = queues
        weights = [torch.arange(size, dtype=torch.uint8) + index for index, size in enumerate(sizes)]
        layers: list[PackedLayer] = []
        for weight in weights:
            layers.append(plain([("weight", weight)], layers[-1].end if layers else 0))
        self.arena = PinnedArena(layers[-1].end, pin=False)
        for weight, packed in zip(weights, layers, strict=True):
            self.arena.views(packed.blocks, packed.start)["weight"].copy_(weight)
        real_copy, real_unpack = PrefetchRing._copy, Chunk.unpack

        def copy(ring: PrefetchRing, transfer: Transfer) -> None:
            buffer = ring._buffers[ring._issued % len(ring._buffers)]

            def before() -> None:
                transfer.before()
                queues.write(buffer)

            real_copy(ring, Transfer(transfer.layer, transfer.source, transfer.chunk, transfer.ready, before))

        def unpack(chunk: Chunk, content: Tensor, layer_buffer: Tensor) -> None:
            if any(content.data_ptr() == buffer.data_ptr() for buffer in self.buffers()):
                queues.read(content)
            queues.write(layer_buffer)
            real_unpack(chunk, content, layer_buffer)

        monkeypatch.setattr(PrefetchRing, "_copy", copy)
        monkeypatch.setattr(Chunk, "unpack", unpack)
        self.ring = ring(self.arena, layers, depth, CPU, queues)
        self.weights, self.layers = weights, [Layer(index) for index in range(len(sizes))]
        self.borrowed: list[list[int]] = []
        for index, layer in enumerate(self.layers):
            layer.use = self.use
            self.ring.attach(index, layer, {"weight": Entry(("weight",), ((layer, "weight"),), weights[index], index)})
        self.ring.start()

    def buffers(self) -> list[Tensor]:
        return self.ring._buffers

    def use(self, layer: int) -> None:
        content = self.ring.borrow(layer)
        self.queues.read(content)
        self.borrowed.append(content[:4].tolist())
        if self.hands_back:
            self.ring.hand_back()

    def run_pass(self, calls: int = 1, fetches: Sequence[Answer] = ()) -> None:
        """Call every layer `calls` times in one pass. The last call borrows all fetches."""
        with self.ring.weight_pass(calls, fetches=fetches):
            for layer, weight in zip(self.layers, self.weights, strict=True):
                for call in range(calls):
                    layer.due = len(fetches) if call == calls - 1 else 0
                    assert torch.equal(layer(), weight)
                    self.queues.read(self.ring.layer_buffer)

    def close(self) -> None:
        self.ring.close()
        self.arena.close()


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: Patch) -> None:
    monkeypatch.setattr(chunk_module, "CHUNK_BYTES", 512)


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([40, 512, 1300, 2600]), min_size=1, max_size=5),
    depth=st.integers(2, 7),
    passes=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 2)), min_size=1, max_size=6),
    hands_back=st.booleans(),
)
def test_no_buffer_is_read_early_or_overwritten_late(
    sizes: list[int], depth: int, passes: list[tuple[int, int]], hands_back: bool
) -> None:
    """Passes of any mixture: calls of a layer that share its weights, and fetches, guessed or not.

    Fetches that are handed back one by one need no more buffers.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_module, "CHUNK_BYTES", 512)
        bench = Bench(sizes, depth, FakeQueues(), patch)
        bench.hands_back = hands_back
        for number, (calls, count) in enumerate(passes):
            count = 3 * count if hands_back else count
            bench.borrowed.clear()
            bench.run_pass(calls, [Answer(fetch, number) for fetch in range(count)])
            assert bench.borrowed == [[f, layer, number, 7] for layer in range(len(sizes)) for f in range(count)]
        bench.close()


@pytest.mark.parametrize(
    ("skipped_wait", "message"), [("compute", "before its content"), ("copy", "overwritten before")]
)
def test_the_clocks_see_a_wait_that_is_missing(skipped_wait: str, message: str, monkeypatch: Patch) -> None:
    bench = Bench([2600, 2600, 2600], 3, FakeQueues(skip_waits=skipped_wait), monkeypatch)
    with pytest.raises(Race, match=message):
        bench.run_pass()


def test_what_a_pass_did_not_guess_costs_a_new_beginning_and_nothing_else(monkeypatch: Patch, spy: Spy) -> None:
    begin = spy(PrefetchRing, "_begin")

    def begun() -> list[int]:
        return [len(call.args[1]) for call in begin.mock_calls]

    bench = Bench([1300, 40, 2600], 4, FakeQueues(), monkeypatch)
    bench.run_pass()
    bench.run_pass(2)
    assert begun() == [0], "passes of weights alone follow each other"
    bench.run_pass(1, [Answer(0, 5)])
    bench.run_pass(1, [Answer(0, 6)])
    bench.run_pass(1, [Answer(0, 7)])
    assert begun() == [0, 1], "and so do fetches that go on as they did"
    bench.run_pass(1, [Answer(0, 9)])
    bench.run_pass()
    assert begun() == [0, 1, 1, 0]
    assert [entry[2] for entry in bench.borrowed] == [5] * 3 + [6] * 3 + [7] * 3 + [9] * 3
    bench.close()


def test_a_pass_that_fails_leaves_a_ring_that_begins_anew(monkeypatch: Patch) -> None:
    bench = Bench([1300, 40, 2600], 4, FakeQueues(), monkeypatch)
    with pytest.raises(MemoryError), bench.ring.weight_pass():  # noqa: PT012
        bench.layers[0]()
        raise MemoryError
    with bench.ring.weight_pass():  # left after its first layer
        bench.layers[0]()
    with pytest.raises(RuntimeError, match="a pass is under way"), bench.ring.weight_pass(), bench.ring.weight_pass():
        pass
    for _ in range(3):
        bench.run_pass()
    bench.close()
