"""The ring's protocol on queues that record who waited for whom: nothing is read before it has arrived, and nothing is
overwritten before it was read, whatever the order in which a device runs what it is given.

Each queue has a clock, as in a race detector: an operation happens before another one only if the other's queue has
waited, directly or through others, for an event recorded behind it. The queues run at once, on the CPU; the clocks tell
whether a device, which runs them at any time, would have been held to the same result.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from zinfer.engine.pinned import PinnedArena
from zinfer.engine.state import Entry
from zinfer.engine.stream import packed_layer, prefetch
from zinfer.engine.stream.packed_layer import PackedLayer, plain
from zinfer.engine.stream.prefetch import PrefetchRing, Transfer

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
    """Two compute queues, a copy queue and one between devices. `forget_waits` drops the waits of the queue of that
    name: a broken ring. `passed` tells, query by query, whether an event is passed; all are when it ends."""

    def __init__(self, forget_waits: str = "", passed: Iterable[bool] = ()) -> None:
        self.passed = iter(passed)
        self._clocks: dict[str, Clock] = {"compute": {}, "copy": {}, "beside": {}, "gather": {}}
        self._current = "compute"
        self.forget_waits = forget_waits
        self.writes: dict[int, tuple[str, int]] = {}  # a buffer's last write: queue and time
        self.reads: dict[int, Clock] = {}  # a buffer's last read in each queue

    @property
    def clock(self) -> Clock:
        return self._clocks[self._current]

    @property
    def forgets(self) -> bool:
        return self.forget_waits == self._current

    def event(self) -> FakeEvent:
        return FakeEvent(self)

    @contextmanager
    def copying(self) -> Iterator[None]:
        before, self._current = self._current, "copy"
        yield
        self._current = before

    @contextmanager
    def beside(self) -> Iterator[None]:
        self._current = "beside"
        yield
        self._current = "compute"

    @contextmanager
    def gathering(self) -> Iterator[None]:
        before, self._current = self._current, "gather"
        yield
        self._current = before

    def read_behind(self) -> None:
        """Raise Race unless all that the second queue was given comes before what the first one is given next."""
        self._after(("beside", self._clocks["beside"].get("beside", 0)), "the second queue is not waited for")

    def finish(self) -> None:
        known = {queue: clock.get(queue, 0) for queue, clock in self._clocks.items()}
        for clock in self._clocks.values():
            clock.update(known)

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


class Layer(nn.Module):
    """A layer that hands out its weight, and reads the fetches that it is due."""

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
    """A fetch whose bytes tell the layer and the trip that they are for."""

    number: int
    trip: int = 0
    nbytes: int = 4

    def transfer(self, layer: int) -> Transfer | None:
        return Transfer(layer, lambda: torch.tensor([self.number, layer, self.trip % 250, 7], dtype=torch.uint8))

    def following(self) -> "Answer":
        return Answer(self.number, self.trip + 1)


class Bench:
    """A ring over `sizes`, the layers' lengths in bytes, whose copies and reads `queues` watches. With `hands_back`
    each fetch is handed back when it was read, else at the end of the call."""

    hands_back = False
    brings = True  # each layer is brought before its calls in the second queue

    def __init__(
        self,
        sizes: Sequence[int],
        depth: int,
        queues: FakeQueues,
        monkeypatch: pytest.MonkeyPatch,
        ring: Callable[..., PrefetchRing] = PrefetchRing,
    ) -> None:
        self.queues = queues
        weights = [torch.arange(size, dtype=torch.uint8) + index for index, size in enumerate(sizes)]
        images: list[PackedLayer] = []
        for weight in weights:
            images.append(plain([("weight", weight)], images[-1].end if images else 0))
        self.arena = PinnedArena(images[-1].end, pin=False)
        for weight, image in zip(weights, images, strict=True):
            self.arena.views(image.blocks, image.start)["weight"].copy_(weight)
        real_copy, real_unpack = PrefetchRing._copy, packed_layer.unpack

        def copy(ring: PrefetchRing, transfer: Transfer) -> None:
            buffer = ring._buffers[ring._issued % len(ring._buffers)]

            def before() -> None:
                transfer.before()
                queues.write(buffer)

            real_copy(ring, Transfer(transfer.layer, transfer.source, transfer.piece, transfer.ready, before))

        def unpack(piece: packed_layer.Chunk, content: Tensor, slot: Tensor) -> None:
            if any(content.data_ptr() == buffer.data_ptr() for buffer in self.buffers()):
                queues.read(content)
            queues.write(slot)
            real_unpack(piece, content, slot)

        monkeypatch.setattr(PrefetchRing, "_copy", copy)
        monkeypatch.setattr(prefetch, "unpack", unpack)
        self.ring = ring(self.arena.memory, images, depth, CPU, queues=queues)
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

    def trip(self, calls: int = 1, fetches: Sequence[Answer] = (), beside: int = 0) -> None:
        """One trip in which every layer is called `beside` times in the second queue, then so often in the first one,
        where the last call borrows all fetches."""
        with self.ring.trip(calls + beside, fetches=fetches):
            for number, (layer, weight) in enumerate(zip(self.layers, self.weights, strict=True)):
                if beside and self.brings:
                    self.ring.bring_layer(number)
                for call in range(calls + beside):
                    layer.due = len(fetches) if call == calls + beside - 1 and calls else 0
                    with self.ring.beside() if call < beside else nullcontext():
                        assert torch.equal(layer(), weight)
                        self.queues.read(self.ring._slot)
        self.queues.read_behind()

    def close(self) -> None:
        self.ring.close()
        self.arena.close()


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_layer, "PIECE", 512)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([40, 512, 1300, 2600]), min_size=1, max_size=5),
    depth=st.integers(2, 7),
    trips=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=6),
)
def test_no_buffer_is_read_early_or_overwritten_late(
    sizes: list[int], depth: int, trips: list[tuple[int, int, int]]
) -> None:
    """Trips of any mixture: calls of a layer that share its weights, and what is fetched besides, guessed or not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_layer, "PIECE", 512)
        bench = Bench(sizes, depth, FakeQueues(), patch)
        for number, (calls, count, beside) in enumerate(trips):
            fetches = [Answer(one, number) for one in range(count)]
            bench.borrowed.clear()
            bench.trip(calls, fetches, beside)
            assert bench.borrowed == [[one, layer, number, 7] for layer in range(len(sizes)) for one in range(count)]
        bench.close()


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([40, 512, 1300]), min_size=1, max_size=4),
    depth=st.integers(2, 4),
    trips=st.lists(st.tuples(st.integers(1, 2), st.integers(0, 6)), min_size=1, max_size=4),
)
def test_fetches_that_are_handed_back_need_no_more_buffers(
    sizes: list[int], depth: int, trips: list[tuple[int, int]]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_layer, "PIECE", 512)
        bench = Bench(sizes, depth, FakeQueues(), patch)
        bench.hands_back = True
        for number, (calls, count) in enumerate(trips):
            bench.borrowed.clear()
            bench.trip(calls, [Answer(one, number) for one in range(count)])
            assert bench.borrowed == [[one, layer, number, 7] for layer in range(len(sizes)) for one in range(count)]
        bench.close()


@pytest.mark.parametrize(("forget", "message"), [("compute", "before its content"), ("copy", "overwritten before")])
def test_the_clocks_see_a_wait_that_is_missing(forget: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench([2600, 2600, 2600], 3, FakeQueues(forget_waits=forget), monkeypatch)
    with pytest.raises(Race, match=message):
        bench.trip()


def test_the_clocks_see_a_missing_wait_between_the_compute_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    deaf = Bench([512, 512], 3, FakeQueues(forget_waits="beside"), monkeypatch)
    with pytest.raises(Race, match="before its content"):
        deaf.trip(1, (), 1)
    bench = Bench([512, 512], 3, FakeQueues(), monkeypatch)
    bench.trip(1, (), 1)
    monkeypatch.setattr(PrefetchRing, "_join", lambda *_: None)
    with pytest.raises(Race, match="overwritten before"):
        bench.trip(1, (), 1)


@pytest.mark.parametrize("filling", ["compute", "beside"])
def test_weights_that_one_queue_fills_in_are_there_for_the_other(filling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call in the second queue pauses; calls in the first one come before it goes on."""
    queues = FakeQueues()
    bench = Bench([512, 512], 3, queues, monkeypatch)
    ring = bench.ring

    def fill_in() -> None:
        assert ring._trip is not None
        ring._trip.left = {"weight": ()}
        ring._fill_in(0, "weight")
        assert not ring._trip.left

    monkeypatch.setattr(PrefetchRing, "_unpack_kept", lambda *_: queues.write(ring._slot))
    with ring.trip(2):
        ring.bring_layer(0)
        with ring.beside():
            ring._acquire(0)
            if filling == "beside":
                fill_in()
        ring._acquire(0)
        if filling == "compute":
            fill_in()
        queues.read(ring._slot)
        with ring.beside():
            queues.read(ring._slot)
        bench.layers[1]()
    bench.close()


def test_a_layer_comes_into_the_slot_in_the_first_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench([512, 512], 3, FakeQueues(), monkeypatch)
    bench.brings = False
    with pytest.raises(RuntimeError, match="must come in the first queue"):
        bench.trip(1, (), 1)


def test_a_buffer_given_back_too_early_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench([2600, 2600, 2600], 3, FakeQueues(), monkeypatch)
    take = PrefetchRing._take

    def careless(ring: PrefetchRing, index: int, piece: packed_layer.Chunk | None) -> Tensor:
        content = take(ring, index, piece)
        ring._give_back()  # before it is read
        ring._returned -= 1
        return content

    monkeypatch.setattr(PrefetchRing, "_take", careless)
    with pytest.raises(Race):
        bench.trip()


def test_what_a_trip_did_not_guess_costs_a_new_beginning_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []
    begin = PrefetchRing._begin

    def counted(ring: PrefetchRing, fetches: tuple[Answer, ...]) -> None:
        begun.append(len(fetches))
        begin(ring, fetches)

    monkeypatch.setattr(PrefetchRing, "_begin", counted)
    bench = Bench([1300, 40, 2600], 4, FakeQueues(), monkeypatch)
    bench.trip()
    bench.trip(2)
    assert begun == [0], "trips of weights alone follow each other"
    bench.trip(1, [Answer(0, 5)])
    bench.trip(1, [Answer(0, 6)])
    bench.trip(1, [Answer(0, 7)])
    assert begun == [0, 1], "and so do fetches that go on as they did"
    bench.trip(1, [Answer(0, 9)])
    bench.trip()
    assert begun == [0, 1, 1, 0]
    assert [one[2] for one in bench.borrowed] == [5] * 3 + [6] * 3 + [7] * 3 + [9] * 3
    bench.close()


def test_a_trip_that_fails_leaves_a_ring_that_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench([1300, 40, 2600], 4, FakeQueues(), monkeypatch)
    with pytest.raises(MemoryError), bench.ring.trip():  # noqa: PT012
        bench.layers[0]()
        raise MemoryError
    with bench.ring.trip():  # left after its first layer
        bench.layers[0]()
    with pytest.raises(RuntimeError, match="a trip is under way"), bench.ring.trip(), bench.ring.trip():
        pass
    for _ in range(3):
        bench.trip()
    bench.close()
