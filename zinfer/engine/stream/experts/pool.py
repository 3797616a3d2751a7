"""Experts on demand: only routed experts that the router chose cross the link.

All other weights come through the ring (`zinfer.engine.stream.weights.ring`). Each routed expert is a run of bytes of
its own in host memory, encoded like a layer. When a layer's router has chosen, the CPU reads the choice (a few numbers,
the only thing that it waits for), and the copy queue brings the experts that are not on the device into the buffers of
a pool. They are unpacked into a layer buffer, in which each expert has its place, and the model's own function
computes: it reads the places of the chosen experts and no others (`zinfer.engine.stream.experts.modules`).

A pass whose many tokens touch nearly all experts brings all of them, in order and ahead of compute, without waiting for
any router. Buffers that hold experts of earlier passes are the cache. In a pass of few tokens the CPU may compute them
instead (`zinfer.engine.stream.experts.cpu`): no buffer gets any then, but a share of them crosses the link on its own
way (`zinfer.engine.stream.experts.link`). Some layers keep all of their experts on the device (`ResidentExperts`),
which computes them itself in every pass.
"""

import inspect
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import groupby
from math import log2
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zinfer.core.case import Option, spread
from zinfer.engine.pinned import ALIGNMENT, TensorPlace
from zinfer.engine.stream.experts.cpu import CpuExperts
from zinfer.engine.stream.trace import mark
from zinfer.engine.stream.weights import codec
from zinfer.engine.stream.weights.chunk import ONCE
from zinfer.engine.stream.weights.low_bit import Matrix
from zinfer.engine.stream.weights.packed_experts import Experts, Key, PackedExpert, PackedExperts, chunks_of
from zinfer.engine.stream.weights.products import LazyWeight, PackedProducts, Parts, holds_codes
from zinfer.engine.stream.weights.queues import Event
from zinfer.engine.stream.weights.ring import PrefetchRing
from zinfer.engine.stream.weights.source import MemorySource

HALF_LIFE = 32  # passes after which a use of an expert counts half, for the cache of the most used ones


class ExpertCache:
    """Experts that stay on the device, in their order of eviction: the one used least goes first. Each use is weighted
    by its age, and counts half after `HALF_LIFE` passes. An expert used less than all that stay is rejected."""

    def __init__(self) -> None:
        # Of all experts ever used, log2 of the weighted uses, had they been weighted at pass 0: ages alike for all
        self._ranks: dict[Key, float] = {}
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
        """Insert `key`, which was used; return the evicted key (`key` itself if rejected), or None. Unless this use
        `counts`, it evicts no other expert."""
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
        now, before = self._passes / HALF_LIFE, self._ranks.get(key)
        self._ranks[key] = now if before is None else log2(2 ** (before - now) + 1) + now
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


@dataclass(frozen=True)
class ResidentExperts:
    """Experts of a layer that all stay on the device: its own kernels compute them, and none comes. What is quantised
    is among `matrices`, in the form of kernels; `tensors` are stacked as the model's own code reads them."""

    matrices: dict[str, Matrix] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        matrices = sum(matrix.nbytes for matrix in self.matrices.values())
        return matrices + sum(tensor.nbytes for tensor in self.tensors.values())


def resident(
    packed: PackedExperts, content: Tensor, buffer: Tensor, products: PackedProducts | None
) -> ResidentExperts | None:
    """Return the experts of `content`, their bytes on the device; None if no kernel reads their codes. A trial of
    `products` writes to `buffer`, the layer buffer. Raises torch.OutOfMemoryError."""
    parts = {name: _parts(packed, block, content) for name, block in packed.blocks.items()}
    plain = {name for name, weight in parts.items() if all(chunk.layout is None for chunk, _ in weight)}
    coded = {name: (packed.blocks[name], parts[name]) for name in parts.keys() - plain}
    readable = all(holds_codes([chunk for chunk, _ in weight], block) for block, weight in coded.values())
    matrices = products.matrices_of(coded, buffer) if products is not None and coded and readable else {}
    if matrices.keys() != coded.keys():
        return None
    return ResidentExperts(matrices, {name: _stacked(packed.blocks[name], parts[name]) for name in plain})


def _parts(packed: PackedExperts, block: TensorPlace, content: Tensor) -> Parts:
    """Return the chunks of a stacked weight with their bytes. They are in the order of its rows."""
    chunks = [chunk for number in range(len(packed.experts)) for chunk in chunks_of(packed, block, number)]
    return [(chunk, content[chunk.start - packed.start :][: chunk.size]) for chunk in chunks]


def _stacked(block: TensorPlace, parts: Parts) -> Tensor:
    """Return an uncoded weight in memory of its own."""
    memory = torch.empty(block.size, dtype=torch.uint8, device=parts[0][1].device)
    for chunk, content in parts:
        memory[chunk.place - block.offset :][: chunk.size].copy_(content)
    return block.view(memory, -block.offset)


class ExpertCounts(NamedTuple):
    """Counts of experts since the load."""

    wire: int = 0  # bytes that crossed the link
    delivered: int = 0  # bytes, unpacked
    fetched: int = 0  # copies
    hits: int = 0  # needs that the cache met; none in a pass that brings all experts
    misses: int = 0
    on_cpu: int = 0  # choices of tokens that the CPU computed

    def since(self, before: "ExpertCounts") -> "ExpertCounts":
        return ExpertCounts(*(now - then for now, then in zip(self, before, strict=True)))


class ExpertPool:
    """Buffers that experts arrive in, and their layer buffer. They come from `source`, whose `experts` are the packed
    experts of each layer, by number. A buffer is free, or holds an expert that is coming (asked for, or ahead of
    compute, and not used yet), or one that stays. At most `staging` are coming. An expert crosses the link in parts, so
    that the first ones are unpacked while the last ones come. The rules of `zinfer.engine.stream.weights.ring` hold
    here, too: a part of a buffer is read behind its event `arrived`; a buffer is written behind its event `freed`,
    recorded behind its last read; and a copy into it is issued only once that has been recorded, since only then it is
    free. `cpu` computes the experts of passes of few tokens, if it can. The experts of some layers are in no source:
    `given` are their bytes, on the device. Codes of experts that stay are multiplied by `products`."""

    def __init__(
        self,
        source: MemorySource,
        device: torch.device,
        ring: PrefetchRing,
        cpu: CpuExperts | None = None,
        products: PackedProducts | None = None,
        given: Mapping[int, Tensor] | None = None,
    ) -> None:
        self.layers = layers = source.experts
        self._cpu, self._products = cpu, products
        self._given = dict(given or {})  # until they are in the form in which they stay
        self._only_resident = frozenset(self._given)
        self._resident: dict[int, ResidentExperts] = {}  # by layer
        self._unread = set[int]()  # layers whose codes no kernel reads
        self._returned: dict[int, Tensor] = {}  # bytes of such layers that were given, in host memory
        self._experts: dict[int, Experts] = {}  # by layer
        self._weights: dict[int, dict[str, Tensor]] = {}  # of each layer's module
        self._filled_in = set[str]()  # weights that stay, unpacked to the layer buffer in the call under way
        self._computing = False  # the CPU computes the experts of the pass under way
        self.counts = ExpertCounts()
        self._beside, self._begun = (0, 0), 2  # what was done beside the CPU, and passes begun, since the last step
        self.steps: deque[ExpertCounts] = deque(maxlen=256)  # of the latest decode steps: a step differs from the next
        self.scanning = False  # the pass under way brings all experts in order
        self._source, self._device, self._ring, self._queues = source.memory, device, ring, ring.queues
        size = max(packed.unpacked_bytes for packed in layers.values())
        self.layer_buffer = torch.empty(size, dtype=torch.uint8, device=device)
        self._filled: tuple[int, set[int]] = -1, set()  # layer in the layer buffer, and its experts that are there
        self._cache = ExpertCache()
        self._at: dict[Key, int] = {}  # number of the buffer of each expert that is coming or stays
        self._places: dict[int, tuple[Tensor, int] | None] = {}  # by layer whose experts all stay: where codes are
        self._hits = 0  # experts that a token of a pass has
        self._coming: dict[Key, None] = {}  # experts whose copy was issued and that were not used yet, in order
        self._asked: deque[Key] = deque()  # experts needed now whose copy waits for a free buffer
        self._ahead: deque[Key] = deque()  # experts to bring before they are needed, in order
        self._free: deque[int] = deque()
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._arrived: list[list[Event]] = []  # of each buffer: of each part
        self._freed: list[Event] = []
        self._chosen, self._on_host = self._queues.event(), torch.empty((0, 1), dtype=torch.int64)
        self._attached: list[nn.Module] = []  # modules of experts
        self.staging = self.cached = 0  # buffers of coming and of resident experts
        # All experts in the order of the layers; a pass that brings all keeps as many of each layer.
        self._keys = self._keys_of(layers)
        self._spread = frozenset[Key]()
        largest = max((self._packed(key).size for key in self._keys), default=0)
        self.buffer_bytes = -(-largest // ALIGNMENT) * ALIGNMENT
        self.resize(2, 0)

    def note_step(self, before: ExpertCounts, tokens: int) -> None:
        """Note a decode step that began with the counts `before`. It had `tokens` tokens, and may be a replay. Experts
        that came beside the CPU's are those of the step before, as the host does not wait for the device."""
        if self._cpu is not None and self.computes(tokens):
            layers, pairs = self.layers.keys() - self._resident.keys(), tokens * self._cpu.each
            linked = [layer for layer in layers if self._cpu.linked(layer, pairs)]
            before_it, self._beside = self._beside, self._cpu.beside
            fetched, on_cpu = (now - then for now, then in zip(self._beside, before_it, strict=True))
            on_cpu += pairs * (len(layers) - len(linked))
            if self._begun <= 1 or not linked:  # no other pass came between
                size, unpacked = self._sizes(linked)
                self.steps.append(ExpertCounts(fetched * size, fetched * unpacked, fetched, on_cpu=on_cpu))
            self._begun = 0
        else:
            self.steps.append(ExpertCounts(hits=self._hits) if self.stays(tokens) else self.counts.since(before))

    def _sizes(self, layers: Sequence[int]) -> tuple[int, int]:
        """Return the bytes of an expert of `layers`, packed and unpacked. All of them have the same."""
        expert = self._packed((layers[0], 0)) if layers else None
        return (0, 0) if expert is None else (expert.size, expert.unpacked_bytes)

    def computes(self, tokens: int) -> bool:
        """Tell whether the CPU computes the experts of passes of `tokens` tokens. Layers whose experts stay do without
        it. Graphs can hold such passes."""
        return self._cpu is not None and self._cpu.status == "on" and tokens <= self._cpu.tokens

    def stays(self, tokens: int) -> bool:
        """Tell whether passes of `tokens` tokens need nothing of the host. All experts stay then, and the device alone
        learns which are chosen."""
        if self.layers.keys() == self._resident.keys():
            return True
        return tokens == 1 and self._places.keys() == self.layers.keys() and None not in self._places.values()

    def per_step(self, name: str) -> float:
        """Return a count's mean over the latest decode steps."""
        total: float = sum(getattr(step, name) for step in self.steps)
        return total / max(1, len(self.steps))

    @property
    def settings(self) -> dict[str, Option]:
        """Buffers, and counts of experts in a decode step, for the record."""
        names = ["fetched", "hits", "misses", *(["on_cpu"] if self._cpu is not None else [])]
        return {
            "experts": "on-demand",
            "expert_buffers": self.staging,
            "expert_buffer_bytes": self.buffer_bytes,
            "expert_cache": "lfu",
            "cached_experts": self.cached,
            "gpu_expert_layers": len(self._resident),
            "cpu_expert_layers": len(self.layers) - len(self._resident) if self.computes(1) else 0,
            **({} if self._cpu is None else self._cpu.settings),
            **{f"experts_{name}_per_step": round(self.per_step(name), 3) for name in names},
        }

    @property
    def kept_bytes(self) -> int:
        """Bytes of the experts that stay on the device."""
        cached = sum(self.layers[layer].experts[expert].size for layer, expert in self._cache)
        return cached + sum(experts.nbytes for experts in self._resident.values())

    @property
    def host_bytes(self) -> int:
        """Bytes of experts in host memory besides the source's."""
        return sum(memory.nbytes for memory in self._returned.values())

    @property
    def reads_codes(self) -> bool:
        """True if experts that stay are multiplied from their codes."""
        return any(experts.matrices for experts in self._resident.values())

    def attach(self, layer: int, experts: Experts) -> None:
        """Make a layer's experts views of the layer buffer. Those chosen come before they compute, or the CPU does."""
        self._experts[layer] = experts
        if self._cpu is not None and layer not in self._given:
            self._cpu.attach(layer, self.layers[layer], experts, self._source, self.layer_buffer)
        self._weights[layer] = {name: entry.put(self._weight(layer, name)) for name, entry in experts.weights.items()}
        signature, computed = inspect.signature(type(experts.module).forward), experts.module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            given = list(signature.bind(experts.module, *args, **kwargs).arguments.values())[1:]

            def on_device() -> Any:
                self.bring(layer, given[1])
                return computed(*args, **kwargs)

            self._filled_in.clear()
            if layer in self._resident:
                return computed(*args, **kwargs)
            if self._cpu is None or not self._computing or len(given) != 3 or not self._cpu.takes(layer, *given):
                return on_device()
            self._filled = -1, set()  # the link's experts are unpacked there
            kind = type(experts.module), given[0].dtype
            output = self._cpu.checked(kind, partial(self._cpu.compute, layer, *given), on_device)
            return on_device() if output is None else output

        experts.module.forward = forward
        self._attached.append(experts.module)

    def _weight(self, layer: int, name: str) -> Tensor:
        """Return a weight as a view of the layer buffer. Kernels may read its codes instead while it stays."""
        packed = self.layers[layer]
        block, view = packed.blocks[name], packed.blocks[name].view(self.layer_buffer)
        chunks = [chunk for number in self._numbers(layer) for chunk in chunks_of(packed, block, number)]
        if self._products is None or self._products.status != "on" or not holds_codes(chunks, block):
            return view
        return LazyWeight(
            view, partial(self._fill_in, layer, name), lambda *_: None, partial(self._matrix, layer, name)
        )

    def _matrix(self, layer: int, name: str) -> Matrix | None:
        return self._resident[layer].matrices.get(name) if layer in self._resident else None

    def _fill_in(self, layer: int, name: str) -> None:
        """Unpack a weight that stays, once a call. One that came is unpacked."""
        if (matrix := self._matrix(layer, name)) is None or name in self._filled_in:
            return
        self._filled_in.add(name)
        self._filled = -1, set()
        with self._ring.untimed(layer, unpacks=True):
            matrix.unpack(self.layers[layer].blocks[name].view_stored(self.layer_buffer))

    def keeps(self, layers: Iterable[int]) -> bool:
        """Tell whether `keep` changes nothing."""
        return self._wanted(layers) == self._resident.keys()

    def _wanted(self, layers: Iterable[int]) -> set[int]:
        return {*layers, *self._only_resident} - self._unread

    def keep(self, layers: Iterable[int]) -> None:
        """Keep all experts of `layers` on the device from now on. Those without a source stay, too; those whose codes
        no kernel reads do not. If that changes anything, it waits for the device and drops all experts in buffers.
        Raises torch.OutOfMemoryError."""
        wanted = self._wanted(layers)
        if wanted == self._resident.keys():
            return
        self._empty()
        for layer in self._resident.keys() - wanted:
            del self._resident[layer]
            for name, weight in self._weights[layer].items():
                weight.data = self.layers[layer].blocks[name].view(self.layer_buffer)
        try:
            for layer in sorted(wanted - self._resident.keys()):
                given = self._given.pop(layer, None)
                content = self._copy_of(layer) if given is None else given
                made = resident(self.layers[layer], content, self.layer_buffer, self._products)
                if made is not None:
                    self._resident[layer] = made
                    for name, tensor in made.tensors.items():
                        self._weights[layer][name].data = tensor
                    continue
                self._unread.add(layer)
                if given is not None:
                    self._return(layer, given)
        finally:
            self._keys = self._keys_of(self.layers.keys() - self._resident.keys())
            self._choose_spread()

    def _choose_spread(self) -> None:
        """Choose the experts that a pass which brings all keeps: as many of each layer."""
        count = len(self._keys)
        self._spread = frozenset(self._keys[index] for index in spread(min(self.cached, count), count))

    def _return(self, layer: int, content: Tensor) -> None:
        """Put experts into host memory that cannot stay on the device."""
        memory = torch.empty(content.shape, dtype=torch.uint8, pin_memory=content.is_cuda)
        self._returned[layer] = memory.copy_(content)
        if self._cpu is not None:
            self._cpu.attach(layer, self.layers[layer], self._experts[layer], memory, self.layer_buffer)

    def _copy_of(self, layer: int) -> Tensor:
        packed = self.layers[layer]
        content = torch.empty(packed.size, dtype=torch.uint8, device=self._device)
        return content.copy_(self._source[packed.start : packed.start + packed.size])

    def _keys_of(self, layers: Iterable[int]) -> list[Key]:
        return [(layer, expert) for layer in sorted(layers) for expert in self._numbers(layer)]

    def _empty(self) -> None:
        """Wait for the device and drop all experts in buffers."""
        self._queues.finish()
        self._cache.clear()
        self._at, self._coming, self._places, self._ahead = {}, {}, {}, deque()
        self._asked.clear()
        self._filled = -1, set()
        self._free = deque(range(len(self._freed)))

    def resize(self, staging: int, cached: int) -> None:
        """Have `staging` buffers for coming experts, and `cached` for resident ones. There are at least two of the
        former. If that changes anything, it waits for the device and drops all experts."""
        staging, cached = max(2, staging), min(cached, len(self._keys))
        if (staging, cached) == (self.staging, self.cached):
            return
        self._empty()
        self._free.clear()
        self.staging = self.cached = 0  # until all of them are there: the device may be short of memory
        self._memory = torch.empty(0, dtype=torch.uint8)
        count = staging + cached
        self._memory = torch.empty(count * self.buffer_bytes, dtype=torch.uint8, device=self._device)
        parts = max(len(expert.parts) for packed in self.layers.values() for expert in packed.experts)
        self._arrived = [[self._queues.event() for _ in range(parts)] for _ in range(count)]
        self._freed = [self._queues.event() for _ in range(count)]
        self.staging, self.cached = staging, cached
        self._free.extend(range(count))
        self._choose_spread()

    def begin(self, scanning: bool, computing: bool = False) -> None:
        """Begin a pass; with `scanning` it brings all experts of all layers, in order. With `computing` the CPU
        computes them. Experts that stay neither come nor go."""
        self.scanning, self._computing = scanning and not computing, computing
        self._begun += 1
        if self._resident or self._cpu is not None:  # whose graphs may have filled the layer buffer
            self._filled = -1, set()
        self._asked.clear()
        while self._coming:
            self._drop(next(iter(self._coming)))
        coming = self.layers.keys() - self._resident.keys()
        self._ring.holds = frozenset() if scanning or computing else frozenset(coming)
        self._ahead = deque(self._keys if self.scanning else ())
        if self.scanning:
            self._issue()
        elif not computing:
            self._cache.next_pass()

    def bring(self, layer: int, chosen: Tensor) -> None:
        """Bring the `chosen` experts of a layer, or all."""
        if not self.scanning and self._unpack_chosen(layer, chosen):
            return
        numbers: Iterable[int] = self._numbers(layer)
        if not self.scanning:
            with self._ring.untimed(layer):
                numbers = sorted(set(self._read(chosen)).intersection(numbers))
        if self._filled[0] != layer:
            self._filled = layer, set()
        missing = [(layer, expert) for expert in numbers if expert not in self._filled[1]]
        cached = [key for key in missing if key in self._cache]
        others = sorted((key for key in missing if key not in self._cache), key=lambda key: key not in self._at)
        if not self.scanning:
            self._count(hits=len(cached), misses=len(others))
        self._asked.extend(key for key in others if key not in self._at and not self._will_come(key))
        self._issue()
        self._ring.resume()
        if brought := deque((*cached, *others)):
            while brought:
                self._ensure(brought[0])
                run = [brought.popleft()]
                while brought and len(run) < self._run(layer) and self._follows(run[-1], brought[0]):
                    run.append(brought.popleft())
                self._unpack(run)
            self._filled[1].update(expert for _, expert in missing)

    def close(self) -> None:
        self._queues.finish()
        if self._cpu is not None:
            self._cpu.close()
        for module in self._attached:
            del module.forward  # it holds the module, and the pool
        self._attached, self._experts, self._weights = [], {}, {}
        self._resident, self._given, self._returned = {}, {}, {}
        self._at, self._coming, self._places, self._ahead = {}, {}, {}, deque()
        self._source = self._memory = self.layer_buffer = torch.empty(0, dtype=torch.uint8)

    def _read(self, chosen: Tensor) -> list[int]:
        """Wait for the router's choice, and return its numbers."""
        if self._on_host.numel() < chosen.numel() or self._on_host.dtype != chosen.dtype:
            with torch.inference_mode(False):
                self._on_host = torch.empty(chosen.numel(), dtype=chosen.dtype, pin_memory=chosen.is_cuda)
        host = self._on_host[: chosen.numel()]
        host.copy_(chosen.flatten(), non_blocking=True)
        self._chosen.record()
        self._chosen.synchronize()
        numbers: list[int] = host.tolist()
        return numbers

    def _numbers(self, layer: int) -> range:
        return range(len(self.layers[layer].experts))

    def _packed(self, key: Key) -> PackedExpert:
        return self.layers[key[0]].experts[key[1]]

    def _will_come(self, key: Key) -> bool:
        return bool(self._ahead) and key >= self._ahead[0]

    def _run(self, layer: int) -> int:
        return min(self.layers[layer].run(self.buffer_bytes), self.staging // 2)

    def _follows(self, key: Key, after: Key) -> bool:
        """Tell whether the next expert is in the next buffer."""
        return after == (key[0], key[1] + 1) and self._at.get(after) == self._at[key] + 1

    def _issue(self, now: bool = False) -> None:
        """Issue copies into free buffers: first experts needed now, then experts needed later. These wait until a whole
        run of buffers is free, unless they are needed `now`."""
        while room := min(len(self._free), self.staging - len(self._coming)):
            if self._asked:
                run = [self._asked.popleft()]
            elif self._ahead:
                count = self._run(layer := self._ahead[0][0])
                if not now and self._coming and room < min(count, len(self._numbers(layer)) - self._ahead[0][1]):
                    return
                run = []
                while self._ahead and self._ahead[0][0] == layer and len(run) < min(count, room):
                    run.append(self._ahead.popleft())
            else:
                return
            if run := [key for key in run if key not in self._at]:
                self._copy(run)

    def _copy(self, run: Sequence[Key]) -> None:
        """Issue the copies of a layer's experts. Successive ones go into successive buffers as one."""
        copies, layer = list[list[Key]](), run[0][0]
        for key in run:
            number, packed = self._free.popleft(), self._packed(key)
            self._at[key], self._coming[key] = number, None
            self._count(wire=packed.size, delivered=packed.unpacked_bytes, fetched=1)
            if copies and self._follows(copies[-1][-1], key):
                copies[-1].append(key)
            else:
                copies.append([key])
        with self._queues.copying():
            for key in run:
                self._freed[self._at[key]].wait()  # rule 2
            begin = mark(self._device.type == "cuda")
            for keys in copies:
                number, packed, start = self._at[keys[0]], self._packed(keys[0]), 0
                if len(keys) > 1:
                    size = (len(keys) - 1) * self.buffer_bytes + packed.size
                    self._write(layer, packed.start, number * self.buffer_bytes, size)
                for part, stop in enumerate(packed.parts):
                    if len(keys) == 1:
                        self._write(layer, packed.start + start, number * self.buffer_bytes + start, stop - start)
                    for place in range(number, number + len(keys)):
                        self._arrived[place][part].record()
                    start = stop
            end = mark(self._device.type == "cuda")
        self._ring.note(("copy", layer, begin, end, "expert"))

    def _write(self, layer: int, source: int, target: int, size: int) -> None:
        """Copy host memory of a layer to the buffers. It goes from byte `source` on to their byte `target`."""
        memory = self._returned.get(layer, self._source)[source : source + size]
        self._memory[target : target + size].copy_(memory, non_blocking=True)

    def _ensure(self, key: Key) -> None:
        """Have an expert come, unless it does."""
        while key not in self._at:  # it was asked for, or dropped
            if key not in self._asked and not self._will_come(key):
                self._asked.appendleft(key)
            if not self._free or len(self._coming) >= self.staging:
                self._drop(next(reversed(self._coming)))
            self._issue(now=True)

    def _unpack(self, run: Sequence[Key]) -> None:
        """Unpack experts in successive buffers. Each stays then, or makes room."""
        layer = run[0][0]
        packed, numbers = self._packed(run[0]), range(self._at[run[0]], self._at[run[0]] + len(run))
        content = self._memory[numbers.start * self.buffer_bytes : numbers.stop * self.buffer_bytes]
        repeats = [step._replace(times=len(run)) for step in self.layers[layer].repeats] if len(run) > 1 else []
        for part, chunks in groupby(enumerate(packed.chunks), lambda item: packed.part_of(item[1])):
            with self._ring.untimed(layer):
                for number in numbers:
                    self._arrived[number][part].wait()  # rule 1
            with self._ring.untimed(layer, unpacks=True):
                for index, chunk in chunks:
                    repeat = repeats[index] if repeats else ONCE
                    chunk.unpack(content[chunk.start - packed.start :], self.layer_buffer, repeat)
        for number, key in zip(numbers, run, strict=True):
            self._freed[number].record()  # rule 2
            self._retain(key)
        self._issue()

    def _unpack_chosen(self, layer: int, chosen: Tensor) -> bool:
        """Unpack a token's experts if all of the layer stay for good. The CPU does not wait for the choice then."""
        if chosen.numel() != chosen.shape[-1] or self.cached < len(self._keys):
            return False
        if layer not in self._places and all((layer, number) in self._cache for number in self._numbers(layer)):
            self._places[layer] = self._places_of(layer)
        if (places := self._places.get(layer)) is None:
            return False
        self._hits = chosen.numel() * len(self.layers)
        self._ring.resume()
        if self._filled[0] != layer:
            self._filled = layer, set()
        with self._ring.untimed(layer, unpacks=True):
            codec.decode_chosen(self._memory, *places, chosen.flatten(), self.layer_buffer)
        return True

    def _places_of(self, layer: int) -> tuple[Tensor, int] | None:
        """Return the places of a layer's codes, and the largest chunk's blocks. None unless all are coded bf16."""
        places = []
        for number in self._numbers(layer):
            packed, begin = self._packed((layer, number)), self._at[layer, number] * self.buffer_bytes
            chunks = [
                (chunk.layout, begin + chunk.start - packed.start, chunk.place)
                for chunk in packed.chunks
                if isinstance(chunk.layout, codec.Layout)
            ]
            places.append(codec.chunk_places(chunks) if len(chunks) == len(packed.chunks) else None)
        if None in places or len({len(rows or ()) for rows in places}) > 1:
            return None
        table = torch.tensor(places)
        return table.to(self._device), int(table[..., 2].max())

    def _retain(self, key: Key) -> None:
        self._coming.pop(key, None)
        if self.scanning and key not in self._cache and key not in self._spread:
            evicted: Key | None = key
        else:  # a pass that brings all experts evicts none: it would leave only the last layers' experts
            evicted = self._cache.insert(key, self.cached, counts=not self.scanning)
        if evicted is not None:
            self._free.append(self._at.pop(evicted))

    def _drop(self, key: Key) -> None:
        del self._coming[key]
        self._free.append(self._at.pop(key))

    def _count(self, **more: int) -> None:
        self.counts = self.counts._replace(**{name: getattr(self.counts, name) + add for name, add in more.items()})
