"""Experts on demand: of a mixture's routed experts only those that the router chose cross the link.

Attention, router, shared experts, norms and dense layers come through the ring (`zinfer.engine.stream.prefetch`). Each
routed expert is a run of bytes of its own in host memory, encoded like a layer. When a layer's router has chosen, the
CPU reads the choice (a few numbers, the only thing that it waits for), and the copy queue brings the experts that are
not on the device into the buffers of a pool. They are unpacked into a layer buffer, in which each expert has its place,
and the model's own function computes: it reads the places of the chosen experts and no others.

While a choice is awaited, the link has brought all that is needed and would idle. It brings experts that the router
probably chooses (`zinfer.engine.stream.routers`), in small copies, and stops as soon as the choice is there: a wrong
guess costs the rest of a copy under way.

A pass whose many tokens touch nearly all experts brings all of them, in order and ahead of compute, without waiting for
any router. Buffers that hold experts of earlier passes are the cache.

The classes of experts that `transformers` dispatches through its `ExpertsInterface` give the place for it, without code
for architectures: they keep their weights stacked, ``[E, ..]``, get the hidden states, the indices of the chosen
experts and their weights, and read no expert that is not among the indices.
"""

import inspect
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from heapq import heapify, heappop, heappush
from itertools import groupby
from math import log2
from sys import maxsize
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from zinfer.core.case import spread
from zinfer.engine.pinned import ALIGNMENT
from zinfer.engine.stream.packed_experts import Experts, Key, PackedExpert, PackedExperts
from zinfer.engine.stream.prefetch import Event, PrefetchRing, Queues
from zinfer.engine.stream.routers import Routers
from zinfer.engine.stream.trace import mark

GUESS_BYTES = 8 << 20  # bytes of a guessed expert in one copy: little waits for it if the guess is wrong
GUESSES_IN_FLIGHT = 2  # such copies that are issued and not done, so that the link does not wait for the CPU
TRIALS = 64  # layers whose guesses are judged before wrong ones may end them
FADING = 0.98  # weight of what guesses brought before the latest layer
END = maxsize, 0  # behind all experts, in the order of layers
HALF_LIFE = 32  # passes after which a use of an expert counts half, for the cache of the most used ones

Policy = Literal["lru", "lfu"]


class ExpertCache:
    """Experts that stay on the device, in their order of eviction. Policy `lru` evicts the one not used for longest,
    `lfu` the one used least, each use weighted by its age: after `HALF_LIFE` passes it counts half. With `lfu` an
    expert used less than all that stay is rejected."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._ranks: dict[Key, float] = {}  # of all experts ever used; the lowest goes first
        self._inside: set[Key] = set()
        self._order: list[tuple[float, int, Key]] = []  # a heap; entries of an earlier rank are stale
        self._uses = self._passes = 0

    def __len__(self) -> int:
        return len(self._inside)

    def __contains__(self, key: Key) -> bool:
        return key in self._inside

    def __iter__(self) -> Iterator[Key]:
        return iter(self._inside)

    def next_pass(self) -> None:
        self._passes += 1

    def insert(self, key: Key, capacity: int, counts: bool = True) -> Key | None:
        """Insert `key`, which was used; return the evicted key (`key` itself if rejected), or None.

        Unless this use `counts`, it evicts no other expert.
        """
        if counts:
            self._use(key)
        if key in self:
            return None
        if len(self) < capacity:
            self._add(key)
            return None
        if not capacity or not counts:
            return key
        while self._is_stale(self._order[0]):
            heappop(self._order)
        if self._ranks[key] < self._order[0][0]:
            return key
        evicted = heappop(self._order)[2]
        self._inside.remove(evicted)
        self._add(key)
        return evicted

    def clear(self) -> None:
        """Evict all experts, and keep the counts of their uses."""
        self._inside.clear()
        self._order.clear()

    def _use(self, key: Key) -> None:
        self._uses += 1
        rank = float(self._uses)
        if self._policy == "lfu":  # log2 of the weighted uses, had they been weighted at pass 0: ages alike for all
            now = self._passes / HALF_LIFE
            before = self._ranks.get(key)
            rank = now if before is None else log2(2 ** (before - now) + 1) + now
        self._ranks[key] = rank
        if key in self._inside:
            self._add(key)

    def _add(self, key: Key) -> None:
        self._inside.add(key)
        heappush(self._order, (self._ranks.get(key, 0.0), self._uses, key))
        if len(self._order) > 64 + 4 * len(self._inside):
            self._order = [entry for entry in self._order if not self._is_stale(entry)]
            heapify(self._order)

    def _is_stale(self, entry: tuple[float, int, Key]) -> bool:
        return entry[2] not in self._inside or self._ranks.get(entry[2], 0.0) != entry[0]


class ExpertCounts(NamedTuple):
    """Counts of experts since the load; of guessed experts that were not needed, only bytes on the link count."""

    wire: int = 0  # bytes that crossed the link
    delivered: int = 0  # bytes, unpacked
    fetched: int = 0  # copies
    hits: int = 0  # needs that the cache met; none in a pass that brings all experts
    misses: int = 0
    guessed: int = 0  # copies of guessed experts that were begun
    right: int = 0  # of these, those that were needed

    def since(self, before: "ExpertCounts") -> "ExpertCounts":
        return ExpertCounts(*(now - then for now, then in zip(self, before, strict=True)))


class _Guesses:
    """Guessed experts whose copies were begun, and their worth. A right guess saves the time in which its bytes crossed
    the link before the choice was known. A wrong one costs the time of what is still under way then. Guesses end once
    they cost more than they save."""

    def __init__(self) -> None:
        self.wanted: deque[Key] = deque()  # experts to copy, the most probable ones first
        self.begun: dict[Key, int] = {}  # bytes whose copies were issued
        self.flight: deque[tuple[Event, Key, int]] = deque()  # copies under way, and their bytes
        self._layers = 0
        self._balance = 0.0  # bytes saved, less bytes that cost

    @property
    def unprofitable(self) -> bool:
        return self._layers >= TRIALS and self._balance < 0

    def under_way(self) -> int:
        """Return the number of copies that are not done."""
        while self.flight and self.flight[0][0].query():
            self.flight.popleft()
        return len(self.flight)

    def judge(self, layer: int, chosen: set[int]) -> None:
        """Judge the guesses for `layer`, which has chosen."""
        begun = {key: size for key, size in self.begun.items() if key[0] == layer}
        if not begun:
            return
        self.under_way()
        right = {key for key in begun if key[1] in chosen}
        late = sum(size for _, key, size in self.flight if key in right)
        wasted = sum(size for _, key, size in self.flight if key not in right)
        self._balance = FADING * self._balance + sum(begun[key] for key in right) - late - wasted
        self._layers += 1

    def clear(self) -> None:
        """Drop the copies that were begun."""
        self.wanted.clear()
        self.begun.clear()
        self.flight.clear()


class ExpertPool:
    """Buffers that experts arrive in, and their layer buffer.

    They come from `source` (uint8, host memory); `layers` are the packed experts of each layer, by number. A buffer is
    free, or holds an expert that is coming (asked for, or ahead of compute, and not used yet), or one that stays. At
    most `staging` are coming. An expert crosses the link in parts, so that the first ones are unpacked while the last
    ones come. The rules of `zinfer.engine.stream.prefetch` hold here, too: a part of a buffer is read behind its event
    `arrived`; a buffer is written behind its event `freed`, recorded behind its last read; and a copy into it is issued
    only once that has been recorded, since only then it is free. A guessed expert is coming, too, and makes room for
    one that is needed. Without queues there are no buffers and no guesses, and experts are unpacked from where they
    are; everything else is the same.
    """

    def __init__(
        self,
        source: Tensor,
        layers: Mapping[int, PackedExperts],
        device: torch.device,
        ring: PrefetchRing,
    ) -> None:
        self.layers = layers
        self.counts = ExpertCounts()
        self.scanning = False  # the pass under way brings all experts in order
        self._source, self._device, self._ring, self._queues = source, device, ring, ring.queues
        size = max(packed.unpacked_bytes for packed in layers.values())
        self.layer_buffer = torch.empty(size, dtype=torch.uint8, device=device)
        self._filled: tuple[int, set[int]] = -1, set()  # layer in the layer buffer, and its experts that are there
        self._cache = ExpertCache("lfu")
        self._at: dict[Key, int] = {}  # number of the buffer of each expert that is coming or stays
        self._coming: dict[Key, None] = {}  # experts whose copy was issued and that were not used yet, in order
        self._asked: deque[Key] = deque()  # experts needed now whose copy waits for a free buffer
        self._ahead: Iterator[Key] = iter(())  # experts to bring before they are needed, in order
        self._reached: Key = -1, -1  # the last of them that was taken up
        self._free: deque[int] = deque()
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._arrived: list[list[Event]] = []  # of each buffer: of each part
        self._freed: list[Event] = []
        self._unpacked = None if self._queues is None else self._queues.event()
        self._routers = Routers() if self._queues is not None else None
        self._guesses, self._guessed_layer = _Guesses(), -1
        self._choice, self._guess = _Choice(self._queues), _Choice(self._queues)
        self._attached: list[nn.Module] = []  # modules of experts
        # Points in the copy queue: behind the latest expert that was used, and behind all that was issued with it.
        self._needed: Event | None = None
        self._tail = None if self._queues is None else self._queues.event()
        self.staging = self.cached = 0  # buffers of coming experts, and of those that stay
        # All experts in the order of the layers; a pass that brings all keeps as many of each layer.
        self._keys = [(layer, expert) for layer in sorted(layers) for expert in range(len(layers[layer].experts))]
        self._spread = frozenset[Key]()
        largest = max((self._packed(key).size for key in self._keys), default=0)
        self.buffer_bytes = -(-largest // ALIGNMENT) * ALIGNMENT
        self.resize(2, 0)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the experts that stay on the device."""
        return sum(self.layers[layer].experts[expert].size for layer, expert in self._cache)

    @property
    def guessing(self) -> str:
        """State of guesses: ``on``, or the reason why there are none."""
        if self._routers is None:
            return "off"
        if self._guesses.unprofitable:
            return "ended: wrong guesses cost more than right ones saved"
        return self._routers.why_not or "on"

    @property
    def router_bytes(self) -> int:
        """Bytes of routers that stay on the device for guesses."""
        return 0 if self._routers is None else self._routers.nbytes

    def attach(self, layer: int, module: nn.Module, experts: Experts) -> None:
        """Make a layer's experts views of the layer buffer. Those chosen come before they compute. `layer` is the
        number of decoder layer `module`."""
        blocks = self.layers[layer].blocks
        for name, entry in experts.weights.items():
            entry.put(blocks[name].view(self.layer_buffer))
        signature, computed = inspect.signature(type(experts.module).forward), experts.module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            given = list(signature.bind(experts.module, *args, **kwargs).arguments.values())[1:]
            if self._routers is not None:
                self._routers.see(layer, given[1])
            self.bring(layer, given[1])
            return computed(*args, **kwargs)

        experts.module.forward = forward
        self._attached.append(experts.module)
        if self._routers is not None:
            self._routers.attach(layer, module, experts.module)

    def resize(self, staging: int, cached: int) -> None:
        """Have `staging` buffers for coming experts, and `cached` for resident ones. There are at least two of the
        former. If that changes anything, it waits for the device and drops all experts."""
        staging, cached = max(2, staging), min(cached, len(self._keys))
        if (staging, cached) == (self.staging, self.cached):
            return
        if self._queues is not None:
            self._queues.finish()
        self._cache.clear()
        self._at, self._coming, self._ahead = {}, {}, iter(())
        self._asked.clear()
        self._discard_guesses()
        self._free.clear()
        self.staging = self.cached = 0  # until all of them are there: the device may be short of memory
        self._memory = torch.empty(0, dtype=torch.uint8)
        count = staging + cached
        if self._queues is not None:
            self._memory = torch.empty(count * self.buffer_bytes, dtype=torch.uint8, device=self._device)
            parts = max(len(self._packed(key).parts) for key in self._keys)
            self._arrived = [[self._queues.event() for _ in range(parts)] for _ in range(count)]
            self._freed = [self._queues.event() for _ in range(count)]
        self.staging, self.cached = staging, cached
        self._free.extend(range(count))
        self._spread = frozenset(self._keys[place] for place in spread(cached, len(self._keys)))

    def begin(self, scanning: bool) -> None:
        """Begin a pass; with `scanning` it brings all experts of all layers, in order."""
        self.scanning = scanning
        self._asked.clear()
        while self._coming:
            self._drop(next(iter(self._coming)))
        self._discard_guesses()
        self._ring.holds = frozenset() if scanning else frozenset(self.layers)
        self._ahead, self._reached = iter(()), (-1, -1)
        if scanning:
            self._ahead = iter(self._keys)
            self._issue()
        else:
            self._cache.next_pass()

    def bring(self, layer: int, chosen: Tensor) -> None:
        """Bring the `chosen` experts of a layer, or all."""
        count = len(self.layers[layer].experts)
        numbers: Iterable[int] = range(count)
        if not self.scanning:
            with self._ring.untimed(layer):
                self._choice.send(chosen)
                self._copy_guesses(self._choice.event)
                numbers = sorted(set(self._choice.numbers(count)))
            self._end_guesses(layer, set(numbers))
        if self._filled[0] != layer:
            self._filled = layer, set()
        missing = [(layer, expert) for expert in numbers if expert not in self._filled[1]]
        cached = [key for key in missing if key in self._cache]
        # What was guessed is there first, and is unpacked while the rest comes.
        others = sorted((key for key in missing if key not in self._cache), key=lambda key: key not in self._at)
        if not self.scanning:
            self._count(hits=len(cached), misses=len(others))
        for key in others:
            self._complete(key)
        self._asked.extend(key for key in others if key not in self._at and not self._will_come(key))
        self._issue()
        self._ring.resume()
        if self._queues is not None and self._tail is not None and self._routers is not None:
            with self._queues.copying():
                self._tail.record()
            self._guess_next(layer)
        if self._unpacked is not None:
            self._unpacked.wait()  # if another queue unpacked the experts that are there
        if brought := (*cached, *others):
            for key in brought:
                self._unpack(key)
            self._filled[1].update(expert for _, expert in brought)
            if self._unpacked is not None:
                self._unpacked.record()

    def close(self) -> None:
        if self._queues is not None:
            self._queues.finish()
        for module in self._attached:
            del module.forward  # it holds the module, and the pool
        self._attached = []
        self._at, self._coming, self._ahead = {}, {}, iter(())
        self._discard_guesses()
        if self._routers is not None:
            self._routers.close()
        self._source = self._memory = self.layer_buffer = torch.empty(0, dtype=torch.uint8)

    def _buffer(self, number: int) -> Tensor:
        return self._memory[number * self.buffer_bytes : (number + 1) * self.buffer_bytes]

    def _packed(self, key: Key) -> PackedExpert:
        return self.layers[key[0]].experts[key[1]]

    def _will_come(self, key: Key) -> bool:
        return self.scanning and key > self._reached

    def _issue(self) -> None:
        """Issue copies into free buffers: first of experts that are needed, then of those that will be."""
        while True:
            if self._asked and not self._has_room and self._guesses.begun:
                self._drop(next(reversed(self._guesses.begun)))
            if not self._has_room:
                return
            if self._asked:
                following = self._asked.popleft()
            else:
                self._reached = following = next(self._ahead, END)
                if following == END:
                    return
            if following in self._at:
                self._complete(following)
            else:
                self._begin_copy(following)
                self._count(delivered=self._packed(following).unpacked_bytes, fetched=1)
                self._copy(following, 0, self._packed(following).size)

    @property
    def _has_room(self) -> bool:
        return bool(self._free) and len(self._coming) < self.staging

    def _begin_copy(self, key: Key) -> None:
        number = self._free.popleft()
        self._at[key], self._coming[key] = number, None
        if self._queues is not None:
            with self._queues.copying():
                self._freed[number].wait()  # rule 2

    def _copy(self, key: Key, start: int, end: int) -> None:
        """Copy bytes `start` to `end` of an expert into its buffer."""
        packed, number = self._packed(key), self._at[key]
        self._count(wire=end - start)
        if self._queues is None:
            return
        with self._queues.copying():
            begin = mark(self._device.type == "cuda")
            for part, stop in enumerate(packed.parts):
                if start < stop <= end:
                    self._write(key, number, start, stop)
                    self._arrived[number][part].record()
                    start = stop
            if start < end:
                self._write(key, number, start, end)
            end_mark = mark(self._device.type == "cuda")
        self._ring.note(("copy", key[0], begin, end_mark, "guess" if key in self._guesses.begun else "expert"))

    def _complete(self, key: Key) -> None:
        """Copy what is left of a guessed expert, which is needed."""
        begun = self._guesses.begun.pop(key, None)
        if begun is None:
            return
        self._count(right=1, delivered=self._packed(key).unpacked_bytes, fetched=1)
        if begun < self._packed(key).size:
            self._copy(key, begun, self._packed(key).size)

    def _guess_next(self, layer: int) -> None:
        """Guess the next layer's choice before the device waits for experts."""
        assert self._routers is not None
        states = self._routers.take_states(layer)
        if self.scanning or states is None or self.guessing != "on":
            return
        with self._ring.untimed(layer):
            guess = self._routers.guess(layer, states)
            if guess is not None:
                self._guessed_layer, chosen = guess
                self._guess.send(chosen)

    def _copy_guesses(self, choice: Event | None) -> None:
        """Copy guessed experts while nothing else is, until `choice` is passed."""
        guesses = self._guesses
        if choice is None or self._needed is None or not (self._guess.sent or guesses.wanted):
            return
        self._needed.synchronize()  # nothing is chosen before
        while not choice.query():
            if self._guess.sent and not self._receive_guess():
                continue
            if (
                guesses.wanted
                and self._tail is not None
                and self._tail.query()
                and guesses.under_way() < GUESSES_IN_FLIGHT
            ):
                self._copy_guess()
            if not guesses.wanted:
                return

    def _receive_guess(self) -> bool:
        """Queue the guessed experts, most votes first; False if none arrived."""
        event, layer = self._guess.event, self._guessed_layer
        if event is None or not event.query():
            return False
        votes = Counter(self._guess.numbers(len(self.layers[layer].experts)))
        wanted = self._guesses.wanted
        keys = ((layer, expert) for expert, _ in votes.most_common())
        wanted.extend(key for key in keys if key not in self._at and key not in wanted)
        return True

    def _copy_guess(self) -> None:
        """Issue one copy of the first guessed expert."""
        guesses = self._guesses
        key = guesses.wanted[0]
        if key not in guesses.begun:
            if key in self._at or not self._has_room:
                guesses.wanted.popleft()
                return
            self._begin_copy(key)
            guesses.begun[key] = 0
            self._count(guessed=1)
        start, size = guesses.begun[key], self._packed(key).size
        end = min(start + GUESS_BYTES, size)
        self._copy(key, start, end)
        guesses.begun[key] = end
        assert self._queues is not None
        with self._queues.copying():
            done = self._queues.event()
            done.record()
        guesses.flight.append((done, key, end - start))
        if end == size:
            guesses.wanted.popleft()

    def _end_guesses(self, layer: int, chosen: set[int]) -> None:
        """Drop wrong guesses for `layer`, and those for layers before it."""
        guesses = self._guesses
        guesses.judge(layer, chosen)
        if self._guessed_layer <= layer:
            self._guess.sent = False
        guesses.wanted = deque(key for key in guesses.wanted if key[0] > layer)
        for key in [key for key in guesses.begun if key[0] < layer or (key[0] == layer and key[1] not in chosen)]:
            self._drop(key)

    def _discard_guesses(self) -> None:
        self._guesses.clear()
        self._guess.sent = False
        self._needed = None

    def _write(self, key: Key, number: int, start: int, end: int) -> None:
        first = self._packed(key).start
        source = self._source[first + start : first + end]
        self._buffer(number)[start:end].copy_(source, non_blocking=True)

    def _unpack(self, key: Key) -> None:
        """Unpack an expert into the layer buffer; it stays then, or makes room."""
        while key not in self._at:  # it was asked for, or dropped
            if key not in self._asked and not self._will_come(key):
                self._asked.appendleft(key)
            if not self._has_room:
                self._drop(next(reversed(self._coming)))
            self._issue()
        self._complete(key)
        number, packed = self._at[key], self._packed(key)
        if self._queues is None:
            content = self._source[packed.start : packed.start + packed.size]
        else:
            self._freed[number].wait()  # another queue may have read it before: the event is behind both then
            content = self._buffer(number)
        for part, chunks in groupby(packed.chunks, packed.part_of):
            if self._queues is not None:
                with self._ring.untimed(key[0]):
                    self._arrived[number][part].wait()  # rule 1
            with self._ring.untimed(key[0], unpacks=True):
                for chunk in chunks:
                    chunk.unpack(content[chunk.start - packed.start :], self.layer_buffer)
        if self._queues is not None:
            self._freed[number].record()  # rule 2
            self._needed = self._arrived[number][len(packed.parts) - 1]
        self._retain(key)
        self._issue()

    def _retain(self, key: Key) -> None:
        """Keep a used expert in its buffer, or free a buffer."""
        self._coming.pop(key, None)
        if self.scanning and key not in self._cache and key not in self._spread:
            evicted: Key | None = key
        else:  # a pass that brings all experts evicts none: it would leave only those of the last layers
            evicted = self._cache.insert(key, self.cached, counts=not self.scanning)
        if evicted is not None:
            self._free.append(self._at.pop(evicted))

    def _drop(self, key: Key) -> None:
        self._guesses.begun.pop(key, None)
        del self._coming[key]
        self._free.append(self._at.pop(key))

    def _count(self, **more: int) -> None:
        self.counts = self.counts._replace(**{name: getattr(self.counts, name) + add for name, add in more.items()})


class _Choice:
    """Experts that a router chose, copied to the host."""

    def __init__(self, queues: Queues | None) -> None:
        self.sent = False  # a choice is on its way, or there, and was not read
        self.event = None if queues is None else queues.event()  # behind the copy
        self._memory = self._host = torch.empty((0, 1), dtype=torch.int64)

    def send(self, chosen: Tensor) -> None:
        self.sent = True
        chosen = chosen.reshape(-1, chosen.shape[-1])
        if self.event is None:
            self._host = chosen
            return
        if self._memory.numel() < chosen.numel() or self._memory.dtype != chosen.dtype:
            with torch.inference_mode(False):
                self._memory = torch.empty(chosen.numel(), dtype=chosen.dtype, pin_memory=chosen.is_cuda)
        self._host = self._memory[: chosen.numel()].view_as(chosen)
        self._host.copy_(chosen, non_blocking=True)
        self.event.record()

    def numbers(self, count: int) -> list[int]:
        """Wait for the numbers, and return those below `count`. Each token's first choice comes first."""
        if self.event is not None:
            self.event.synchronize()
        self.sent = False
        return [number for number in self._host.T.flatten().tolist() if 0 <= number < count]
