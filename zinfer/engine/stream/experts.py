"""Experts on demand: of a mixture's routed experts only those that the router chose cross the link.

Attention, router, shared experts, norms and dense layers come through the ring (`zinfer.engine.stream.prefetch`). Each
routed expert is a run of bytes of its own in host memory, encoded like a layer. When a layer's router has chosen, the
CPU reads the choice (a few numbers, the only thing that it waits for), and the copy queue brings the experts that are
not on the device into the buffers of a pool. They are unpacked into the layer's slot, in which each expert has its
place, and the model's own function computes: it reads the places of the chosen experts and no others.

While a choice is awaited, the link has brought all that is needed and would idle. It brings experts that the router is
guessed to choose then (`zinfer.engine.stream.routers`), in small copies, and no more as soon as the choice is known: a
wrong guess costs the rest of a copy under way.

A pass with so many tokens that they touch nearly all experts brings all of them, in order and ahead of compute, without
waiting for any router. Buffers that hold experts of earlier passes are the cache.

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
from zinfer.engine.stream.expert_images import ExpertImage, Experts, Key, LayerImages
from zinfer.engine.stream.packed_layer import unpack
from zinfer.engine.stream.prefetch import Event, PrefetchRing, Queues
from zinfer.engine.stream.routers import Routers
from zinfer.engine.stream.trace import mark

GUESSED = 8 << 20  # bytes of a guessed expert in one copy: little waits for it if the guess is wrong
AHEAD = 2  # such copies that are issued and not done, at most, so that the link does not wait for the CPU
TRIALS = 64  # layers whose guesses are judged before wrong ones may end them
FADING = 0.98  # weight of what guesses brought before the latest layer
END = maxsize, 0  # behind all experts, in the order of layers
HALF_LIFE = 32  # passes after which a use of an expert counts half, for the cache that keeps those used most

Policy = Literal["lru", "lfu"]


class ExpertCache:
    """Order in which experts that stay on the device make room for others.

    Policy `lru` drops the one not used for longest, `lfu` the one used least, each use weighted by its age: after
    `HALF_LIFE` passes it counts half. With `lfu` an expert used less than all that stay is not taken in.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._ranks: dict[Key, float] = {}  # of all experts ever used; the lowest goes first
        self._inside: set[Key] = set()
        self._order: list[tuple[float, int, Key]] = []  # a heap; entries of an earlier rank are void
        self._uses = self._passes = 0

    def __len__(self) -> int:
        return len(self._inside)

    def __contains__(self, key: Key) -> bool:
        return key in self._inside

    def __iter__(self) -> Iterator[Key]:
        return iter(self._inside)

    def next_pass(self) -> None:
        self._passes += 1

    def rank(self, key: Key) -> float:
        """Return a number that is the lower the sooner an expert makes room; 0 if it was never used."""
        return self._ranks.get(key, 0.0)

    def use(self, key: Key) -> None:
        """Note a use of an expert, whether it stays or not."""
        self._uses += 1
        rank = float(self._uses)
        if self._policy == "lfu":  # log2 of the weighted uses, had they been weighted at pass 0: ages alike for all
            now = self._passes / HALF_LIFE
            before = self._ranks.get(key)
            rank = now if before is None else log2(2 ** (before - now) + 1) + now
        self._ranks[key] = rank
        if key in self._inside:
            self._enter(key)

    def add(self, key: Key) -> None:
        self._inside.add(key)
        self._enter(key)

    def replace_for(self, key: Key) -> Key | None:
        """Take in `key`, which was used, in place of the expert that goes first; return that one, None if `key` would
        go before it."""
        while self._order:
            rank, _, first = self._order[0]
            if self._void(self._order[0]):
                heappop(self._order)
                continue
            if self.rank(key) < rank:
                return None
            heappop(self._order)
            self._inside.remove(first)
            self.add(key)
            return first
        return None

    def settle(self, key: Key, room: int, counts: bool = True) -> Key | None:
        """Decide on an expert that was used, in a cache with `room` for so many: return the one that leaves, `key`
        itself perhaps; None if nobody has to. Unless this use `counts`, it drives no other one out."""
        if counts:
            self.use(key)
        if key in self:
            return None
        if len(self) < room:
            self.add(key)
            return None
        gone = self.replace_for(key) if room and counts else None
        return key if gone is None else gone

    def clear(self) -> None:
        """Drop all experts; their uses are remembered."""
        self._inside.clear()
        self._order.clear()

    def _void(self, entry: tuple[float, int, Key]) -> bool:
        return entry[2] not in self._inside or self.rank(entry[2]) != entry[0]

    def _enter(self, key: Key) -> None:
        heappush(self._order, (self.rank(key), self._uses, key))
        if len(self._order) > 64 + 4 * len(self._inside):
            self._order = [one for one in self._order if not self._void(one)]
            heapify(self._order)


class ExpertCounts(NamedTuple):
    """Counts of experts since the load: copied bytes, as they cross the link and as they are in the slot, copies, and
    needs of a pass met by the cache, or not; a pass that brings all experts has neither hits nor misses. Copies of
    guessed experts that were begun, and those among them that were needed; of the others only bytes on the link
    count."""

    wire: int = 0
    delivered: int = 0
    fetched: int = 0
    hits: int = 0
    misses: int = 0
    guessed: int = 0
    right: int = 0

    def since(self, before: "ExpertCounts") -> "ExpertCounts":
        return ExpertCounts(*(now - then for now, then in zip(self, before, strict=True)))


class _Guesses:
    """Guessed experts whose copies were begun and that no layer has chosen yet, and what guesses were worth.

    A right guess saves the time in which its bytes crossed the link before the choice was known. A wrong one costs the
    time of what is still under way then. Guesses end once they cost more than they save.
    """

    def __init__(self) -> None:
        self.wanted: deque[Key] = deque()  # experts to copy, the most probable ones first
        self.begun: dict[Key, int] = {}  # bytes whose copies were issued
        self.flight: deque[tuple[Event, Key, int]] = deque()  # copies under way, and their bytes
        self._layers = 0
        self._balance = 0.0  # bytes saved, less bytes that cost

    @property
    def cost_too_much(self) -> bool:
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
        late = Counter[bool]()
        for _, key, size in self.flight:
            late[key in begun and key[1] in chosen] += size
        saved = sum(size for key, size in begun.items() if key[1] in chosen) - late[True]
        self._balance = FADING * self._balance + saved - late[False]
        self._layers += 1

    def clear(self) -> None:
        """Forget the copies that were begun."""
        self.wanted.clear()
        self.begun.clear()
        self.flight.clear()


class ExpertPool:
    """Buffers on the device that experts arrive in, from `source` (uint8, host memory), and the slot that the layers of
    `images`, by number, compute from.

    A buffer is free, or holds an expert that is coming (asked for, or ahead of compute, and not used yet), or one that
    stays. At most `staging` are coming. An expert crosses the link in parts, so that the first ones are unpacked while
    the last ones come. The rules of `zinfer.engine.stream.prefetch` hold here, too: a part of a buffer is read behind
    its event `arrived`; a buffer is written behind its event `freed`, recorded behind its last read; and a copy into
    it is issued only once that has been recorded, since only then it is free. A guessed expert is coming, too, and
    makes room for one that is needed. Without queues there are no buffers and no guesses, and experts are unpacked from
    where they are; everything else is the same.
    """

    def __init__(
        self,
        source: Tensor,
        images: Mapping[int, LayerImages],
        device: torch.device,
        ring: PrefetchRing,
    ) -> None:
        self.images = images
        self.counts = ExpertCounts()
        self.scanning = False  # the pass under way brings all experts in order
        self._source, self._device, self._ring, self._queues = source, device, ring, ring.queues
        self._slot = torch.empty(max(one.slot_bytes for one in images.values()), dtype=torch.uint8, device=device)
        self._filled: tuple[int, set[int]] = -1, set()  # layer in the slot, and its experts that are there
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
        self._staging = self._cached = 0
        # All experts in the order of the layers, and those of them that passes which bring all keep: as many of each
        # layer.
        self._keys = [(layer, one) for layer in sorted(images) for one in range(len(images[layer].experts))]
        self._spread = frozenset[Key]()
        whole = max((image.size for one in images.values() for image in one.experts), default=0)
        self.buffer_bytes = -(-whole // ALIGNMENT) * ALIGNMENT
        self.resize(2, 0)

    @property
    def staging(self) -> int:
        """Number of buffers that experts may be coming in."""
        return self._staging

    @property
    def slot_bytes(self) -> int:
        return self._slot.nbytes

    @property
    def kept_bytes(self) -> int:
        """Bytes of the experts that stay on the device."""
        return sum(self.images[layer].experts[expert].size for layer, expert in self._cache)

    @property
    def cached(self) -> int:
        """Number of buffers for experts that stay."""
        return self._cached

    @property
    def guessing(self) -> str:
        """State of guesses: ``on``, or the reason why there are none."""
        if self._routers is None:
            return "off"
        if self._guesses.cost_too_much:
            return "ended: wrong guesses cost more than right ones saved"
        return self._routers.why_not or "on"

    @property
    def router_bytes(self) -> int:
        """Bytes of routers that stay on the device for guesses."""
        return 0 if self._routers is None else self._routers.nbytes

    def attach(self, layer: int, module: nn.Module, experts: Experts) -> None:
        """Make the weights of the experts of `module`, the decoder layer number `layer`, views of the slot, and bring
        those that its router chose before they compute."""
        blocks = self.images[layer].blocks
        for name, entry in experts.weights.items():
            entry.put(blocks[name].view(self._slot))
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
        """Have `staging` buffers for experts that are coming, two at least, and `cached` for those that stay; if that
        changes anything, wait for the device and drop all experts."""
        every = sum(len(one.experts) for one in self.images.values())
        staging, cached = max(2, staging), min(cached, every)
        if (staging, cached) == (self._staging, self._cached):
            return
        if self._queues is not None:
            self._queues.finish()
        self._cache.clear()
        self._at, self._coming, self._ahead = {}, {}, iter(())
        self._asked.clear()
        self._forget_guesses()
        self._free.clear()
        self._staging = self._cached = 0  # until all of them are there: the device may be short of memory
        self._memory = torch.empty(0, dtype=torch.uint8)
        count = staging + cached
        if self._queues is not None:
            self._memory = torch.empty(count * self.buffer_bytes, dtype=torch.uint8, device=self._device)
            most = max(len(image.parts) for one in self.images.values() for image in one.experts)
            self._arrived = [[self._queues.event() for _ in range(most)] for _ in range(count)]
            self._freed = [self._queues.event() for _ in range(count)]
        self._staging, self._cached = staging, cached
        self._free.extend(range(count))
        self._spread = frozenset(self._keys[place] for place in spread(cached, len(self._keys)))

    def begin(self, scanning: bool) -> None:
        """Begin a pass; with `scanning` it brings all experts of all layers, in order."""
        self.scanning = scanning
        self._asked.clear()
        while self._coming:
            self._drop(next(iter(self._coming)))
        self._forget_guesses()
        self._ring.holds = frozenset() if scanning else frozenset(self.images)
        self._ahead, self._reached = iter(()), (-1, -1)
        if scanning:
            self._ahead = iter(self._keys)
            self._issue()
        else:
            self._cache.next_pass()

    def bring(self, layer: int, chosen: Tensor) -> None:
        """Have the experts of `layer` whose numbers are in `chosen` in the slot, or all in a pass that brings all."""
        count = len(self.images[layer].experts)
        numbers: Iterable[int] = range(count)
        if not self.scanning:
            with self._ring.aside(layer):
                self._choice.send(chosen)
                self._copy_guesses(self._choice.event)
                numbers = sorted(set(self._choice.numbers(count)))
            self._end_guesses(layer, set(numbers))
        if self._filled[0] != layer:
            self._filled = layer, set()
        missing = [(layer, expert) for expert in numbers if expert not in self._filled[1]]
        here = [key for key in missing if key in self._cache]
        # What was guessed is there first, and is unpacked while the rest comes.
        others = sorted((key for key in missing if key not in self._cache), key=lambda key: key not in self._at)
        if not self.scanning:
            self._count(hits=len(here), misses=len(others))
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
        if brought := (*here, *others):
            for key in brought:
                self._use(key)
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
        self._forget_guesses()
        if self._routers is not None:
            self._routers.close()
        self._source = self._memory = self._slot = torch.empty(0, dtype=torch.uint8)

    def _buffer(self, number: int) -> Tensor:
        return self._memory[number * self.buffer_bytes : (number + 1) * self.buffer_bytes]

    def _image(self, key: Key) -> ExpertImage:
        return self.images[key[0]].experts[key[1]]

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
                self._count(delivered=self._image(following).unpacked, fetched=1)
                self._copy(following, 0, self._image(following).size)

    @property
    def _has_room(self) -> bool:
        return bool(self._free) and len(self._coming) < self._staging

    def _begin_copy(self, key: Key) -> None:
        """Give an expert a free buffer."""
        number = self._free.popleft()
        self._at[key], self._coming[key] = number, None
        if self._queues is not None:
            with self._queues.copying():
                self._freed[number].wait()  # rule 2

    def _copy(self, key: Key, start: int, end: int) -> None:
        """Issue the copy of bytes `start` to `end` of an expert into its buffer."""
        image, number = self._image(key), self._at[key]
        self._count(wire=end - start)
        if self._queues is None:
            return
        with self._queues.copying():
            begin = mark(self._device.type == "cuda")
            for part, stop in enumerate(image.parts):
                if start < stop <= end:
                    self._write(key, number, start, stop)
                    self._arrived[number][part].record()
                    start = stop
            if start < end:
                self._write(key, number, start, end)
            end_mark = mark(self._device.type == "cuda")
        self._ring.note(("copy", key[0], begin, end_mark, "guess" if key in self._guesses.begun else "expert"))

    def _complete(self, key: Key) -> None:
        """Issue the copy of what is left of a guessed expert, which is needed."""
        begun = self._guesses.begun.pop(key, None)
        if begun is None:
            return
        self._count(right=1, delivered=self._image(key).unpacked, fetched=1)
        if begun < self._image(key).size:
            self._copy(key, begun, self._image(key).size)

    def _guess_next(self, layer: int) -> None:
        """Have the device guess what the layer behind `layer` will choose, before it waits for experts."""
        assert self._routers is not None
        states = self._routers.take(layer)
        if self.scanning or states is None or self.guessing != "on":
            return
        with self._ring.aside(layer):
            found = self._routers.guess(layer, states)
            if found is not None:
                self._guessed_layer, chosen = found
                self._guess.send(chosen)

    def _copy_guesses(self, choice: Event | None) -> None:
        """Copy guessed experts while nothing else is under way, until `choice` is passed."""
        guesses = self._guesses
        if choice is None or self._needed is None or not (self._guess.sent or guesses.wanted):
            return
        self._needed.synchronize()  # nothing is chosen before
        while not choice.query():
            if self._guess.sent and not self._take_guess():
                continue
            if guesses.wanted and self._tail is not None and self._tail.query() and guesses.under_way() < AHEAD:
                self._copy_guess()
            if not guesses.wanted:
                return

    def _take_guess(self) -> bool:
        """Take the experts of the latest guess, most votes of tokens first; return False if the device is not there
        yet."""
        event, layer = self._guess.event, self._guessed_layer
        if event is None or not event.query():
            return False
        votes = Counter(self._guess.numbers(len(self.images[layer].experts)))
        own = ((layer, expert) for expert, _ in votes.most_common())
        self._guesses.wanted.extend(key for key in own if key not in self._at and key not in self._guesses.wanted)
        return True

    def _copy_guess(self) -> None:
        """Issue one copy of the expert that comes first among those guessed."""
        guesses = self._guesses
        key = guesses.wanted[0]
        if key not in guesses.begun:
            if key in self._at or not self._has_room:
                guesses.wanted.popleft()
                return
            self._begin_copy(key)
            guesses.begun[key] = 0
            self._count(guessed=1)
        start, size = guesses.begun[key], self._image(key).size
        end = min(start + GUESSED, size)
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
        """Give up the guesses for `layer`, and those for layers before it, that it has not chosen."""
        guesses = self._guesses
        guesses.judge(layer, chosen)
        if self._guessed_layer <= layer:
            self._guess.sent = False
        guesses.wanted = deque(key for key in guesses.wanted if key[0] > layer)
        for key in [key for key in guesses.begun if key[0] < layer or (key[0] == layer and key[1] not in chosen)]:
            self._drop(key)

    def _forget_guesses(self) -> None:
        self._guesses.clear()
        self._guess.sent = False
        self._needed = None

    def _write(self, key: Key, number: int, start: int, end: int) -> None:
        """Copy bytes `start` to `end` of an expert into buffer `number`."""
        first = self._image(key).start
        source = self._source[first + start : first + end]
        self._buffer(number)[start:end].copy_(source, non_blocking=True)

    def _use(self, key: Key) -> None:
        """Unpack an expert into its place in the slot; it stays then, or makes room."""
        while key not in self._at:  # it was asked for, or dropped
            if key not in self._asked and not self._will_come(key):
                self._asked.appendleft(key)
            if not self._has_room:
                self._drop(next(reversed(self._coming)))
            self._issue()
        self._complete(key)
        number, image = self._at[key], self._image(key)
        if self._queues is None:
            content = self._source[image.start : image.start + image.size]
        else:
            self._freed[number].wait()  # another queue may have read it before: the event is behind both then
            content = self._buffer(number)
        for part, pieces in groupby(image.pieces, image.part_of):
            if self._queues is not None:
                with self._ring.aside(key[0]):
                    self._arrived[number][part].wait()  # rule 1
            with self._ring.aside(key[0], unpacks=True):
                for piece in pieces:
                    unpack(piece, content[piece.start - image.start :], self._slot)
        if self._queues is not None:
            self._freed[number].record()  # rule 2
            self._needed = self._arrived[number][len(image.parts) - 1]
        self._settle(key)
        self._issue()

    def _settle(self, key: Key) -> None:
        """Decide on the buffer of an expert that was used: it stays, in place of another perhaps, or is free."""
        self._coming.pop(key, None)
        if self.scanning and key not in self._cache and key not in self._spread:
            gone: Key | None = key
        else:  # a pass that brings all experts drives none out: it would leave only those of the last layers
            gone = self._cache.settle(key, self._cached, counts=not self.scanning)
        if gone is not None:
            self._free.append(self._at.pop(gone))

    def _drop(self, key: Key) -> None:
        """Give up the copy of an expert that was not used."""
        self._guesses.begun.pop(key, None)
        del self._coming[key]
        self._free.append(self._at.pop(key))

    def _count(self, **more: int) -> None:
        self.counts = self.counts._replace(**{name: getattr(self.counts, name) + one for name, one in more.items()})


class _Choice:
    """Experts that a router chose, as the CPU gets to know them: one small copy from the device."""

    def __init__(self, queues: Queues | None) -> None:
        self.sent = False  # a choice is on its way, or there, and was not taken
        self.event = None if queues is None else queues.event()  # behind the copy
        self._memory = self._host = torch.empty((0, 1), dtype=torch.int64)

    def send(self, chosen: Tensor) -> None:
        """Have the device copy `chosen`, ``[.., K]``, to the host."""
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
        """Return the numbers below `count` that were sent, each token's first choice first; wait for them."""
        if self.event is not None:
            self.event.synchronize()
        self.sent = False
        return [number for number in self._host.T.flatten().tolist() if 0 <= number < count]
