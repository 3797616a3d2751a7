"""KV cache whose memory is allocated once, for any kind of layer.

`transformers`' DynamicCache copies itself at every step, and its StaticCache makes attention read the whole capacity.
Here attention sees a view of the filled part, and an out-of-memory error comes in prefill or not at all. Every layer
can be narrowed to some rows, for passes of a few rows. A sliding window has memory for that window; a layer with a
state of fixed size keeps `transformers`' tensors; a model with another kind of layer gets the cache of `transformers`.
"""

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig, cache_utils
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from zinfer.engine import EngineError


class CacheFullError(IndexError):
    """More tokens were computed than the cache has room for."""


CHUNK_BYTES = 256 << 20  # allocated for several layers at a time
SPARE = 8  # a sliding window has 1/8 of its size as spare room; when that is full, the window moves to the front
MIN_SPARE = 24  # tokens; a pass that verifies drafts may have 17
TINIEST = 127 * torch.finfo(torch.float32).tiny  # smallest maximum in 8 bits whose scale is still a normal number
VIEWS = torch.complex128, torch.int64, torch.int32  # widest first: a copy takes time by the number, not by the bits


def _full(capacity: int, token: int) -> CacheFullError:
    return CacheFullError(f"the KV cache holds {capacity} tokens a sequence; token {token} was decoded")


class SlotAllocation(NamedTuple):
    """Slots of new positions: `new`, behind the seen `past`. If `moved`, the past moves to the front."""

    moved: bool
    past: slice
    new: slice

    def store(self, memory: Tensor, states: Tensor) -> Tensor:
        """Write `states` ``[.., n, D]`` into `memory`. Returns all states that the new ones see."""
        if not self.moved:
            memory[..., self.new, :] = states
            return self.seen(memory)
        if self.past.start < self.past.stop:
            states = torch.cat([memory[..., self.past, :], states], dim=-2)
        memory[..., self.new, :] = self.kept(states)
        return states

    def seen(self, memory: Tensor) -> Tensor:
        """Return the states that the new positions see. They are in `memory` unless the past moves."""
        return memory[..., self.past.start : self.new.stop, :]

    def kept(self, states: Tensor) -> Tensor:
        """Return the last of the seen `states`, which stay in memory."""
        return states[..., states.shape[-2] - (self.new.stop - self.new.start) :, :]


class WindowIndex:
    """Map from positions to the `room` slots of a layer. It is the same for all rows. Without a `window` each position
    has its own slot. With one there is room for the last positions, in order, and the visible ones move to the front
    when it is full. `window` counts the tokens that a token attends to, itself included."""

    def __init__(self, capacity: int, window: int | None = None) -> None:
        self.capacity, self.window = capacity, window
        self.room = capacity
        if window is not None:
            self.room = min(capacity, window - 1 + max(MIN_SPARE, window // SPARE))
        self._bases = {0: 0}  # number of stored positions -> position in the first slot

    def first(self, length: int) -> int:
        """Return the first position that the next token still sees."""
        return 0 if self.window is None else max(0, length - self.window + 1)

    def held(self, length: int) -> slice:
        """Return the slots of all positions that the next token sees."""
        base = self._bases[length]
        return slice(self.first(length) - base, length - base)

    def add(self, start: int, count: int) -> SlotAllocation:
        """Allocate slots for `count` positions from `start` on. Raises CacheFullError beyond the capacity."""
        end = start + count
        if end > self.capacity:
            raise _full(self.capacity, end)
        past, base = self.held(start), self._bases[start]
        moved = end - base > self.room
        if moved:
            whole = end - self.first(start) > self.room  # no room for all: store what the next token sees
            base = self.first(end) if whole else self.first(start)
        # Other rows may still have to go from `start` to `end`; nobody goes further back.
        self._bases = {length: first for length, first in self._bases.items() if length >= start} | {end: base}
        return SlotAllocation(moved, past, slice(0 if moved else start - base, end - base))

    def next_slot(self, start: int) -> int:
        """Return the slot of position `start`, the next one."""
        return start - self._bases[start]

    def reserve(self, start: int, count: int) -> slice | None:
        """Reserve `count` slots for all rows. Returns the slots whose content must move to the front first."""
        if start + count - self._bases[start] <= self.room:
            return None
        if start + count - self.first(start) > self.room:
            raise EngineError(f"{count} positions at a time are too many for a sliding window of {self.window}")
        moved = self.held(start)
        self._bases = {start: self.first(start)}
        return moved

    def begin(self, length: int) -> int:
        """Begin with `length` positions stored elsewhere. Returns how many of them, the last ones, need slots."""
        if length > self.capacity:
            raise _full(self.capacity, length)
        self._bases = {length: self.first(length)}
        return length - self.first(length)

    def rollback(self, length: int) -> None:
        """Forget the positions from `length` on. Raises EngineError if positions that become visible again are gone."""
        end = max(self._bases)
        base = self._bases[end]
        if length > end or self.first(length) < base:
            raise EngineError(f"position {length} is outside of what a sliding window of {self.window} has stored")
        self._bases = {length: base}


class RowMask:
    """Forgotten positions of rows: `real`, bool ``[b, length]``, is False for them."""

    def __init__(self, real: Tensor) -> None:
        self.real = real
        self._orders: dict[int, Tensor] = {}  # by the number of positions; layers with a window have fewer

    def of(self, rows: Tensor) -> "RowMask":
        return RowMask(self.real[rows])

    def order(self, count: int) -> Tensor:
        """Sort each row's last `count` positions, ``[b, count]``: forgotten ones first."""
        if count not in self._orders:
            last = self.real[:, self.real.shape[1] - count :]
            self._orders[count] = last.long().argsort(dim=-1, stable=True)
        return self._orders[count]


def _wide_views(*tensors: Tensor) -> list[Tensor]:
    """View tensors of one type as fewer, wider numbers, for copies."""

    def in_blocks(states: Tensor, size: int) -> bool:  # whether the numbers lie in memory in whole blocks of `size`
        *steps, last = states.stride()
        return last == 1 and not any(number % size for number in (states.shape[-1], states.storage_offset(), *steps))

    for dtype in VIEWS:
        size = dtype.itemsize // tensors[0].itemsize
        if size and all(in_blocks(states, size) for states in tensors):
            return [states.view(dtype) for states in tensors]
    return [*tensors]


def copy_slots(memory: Tensor, rows: Tensor, held: slice, mask: RowMask | None) -> Tensor:
    """Copy slots of rows ``[b]`` out of `memory` ``[B, heads, room, D]``. Forgotten positions come first."""
    (bits,) = _wide_views(memory)
    if mask is None:
        return bits[rows, :, held].view(memory.dtype)
    slots = held.start + mask.order(held.stop - held.start)
    heads = torch.arange(memory.shape[1], device=memory.device)
    return bits[rows[:, None, None], heads[:, None], slots[:, None]].view(memory.dtype)


class RowSource(NamedTuple):
    """Rows ``[b]`` of a cache or layer at position `length`, to copy."""

    cache: Any
    rows: Tensor
    mask: RowMask | None
    length: int


TensorSpec = tuple[tuple[int, ...], torch.dtype]
Allocator = Callable[[Sequence[TensorSpec], torch.device], list[Tensor]]  # the content of what it returns is undefined


def allocate_each(specs: Sequence[TensorSpec], device: torch.device) -> list[Tensor]:
    return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in specs]


class ChunkAllocator:
    """Memory for keys and values, allocated in chunks of several layers.

    What is freed must be of use to micro-batches of another size. PyTorch gives whole pages of 20 MiB back to the
    device: single layers of a few rows would leave holes that hold none, and that layers of other sizes do not fill.

    `rooms` has the slots of a row in each layer; 0 where a layer has none.
    """

    def __init__(self, rooms: Sequence[int]) -> None:
        self._rooms = rooms
        self._spare: dict[int, tuple[object, list[tuple[Tensor, ...]]]] = {}  # tensors of later layers, by room

    def allocate(self, layer: int, specs: Sequence[TensorSpec], device: torch.device) -> list[Tensor]:
        """Allocate the tensors of `layer`, and a chunk for later ones."""
        room, kind = self._rooms[layer], (tuple(specs), device)
        of_kind, spare = self._spare.pop(room, (None, []))
        if of_kind != kind or not spare:
            spare.clear()
            size = sum(prod(shape) * dtype.itemsize for shape, dtype in specs)
            count = max(1, min(CHUNK_BYTES // max(1, size), self._rooms[layer:].count(room)))
            chunks = [torch.empty((count, *shape), dtype=dtype, device=device) for shape, dtype in specs]
            spare = list(zip(*(chunk.unbind() for chunk in chunks), strict=True))
        tensors = spare.pop()
        if spare:
            self._spare[room] = kind, spare
        return [*tensors]


class FixedLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of one decoder layer, ``[B, kv_heads, room, head_dim]`` each. Their head_dim may differ."""

    recordable = True  # a CUDA graph may read and write the memory

    def __init__(
        self, batch_size: int, capacity: int, window: int | None = None, allocate: Allocator = allocate_each
    ) -> None:
        super().__init__()
        self._allocate = allocate
        self.batch_size, self.capacity = batch_size, capacity
        self.slots, self.is_sliding = WindowIndex(capacity, window), window is not None
        self.memories = [torch.empty(0)] * 2  # keys and values of all rows, computed or not; in 8 bits with scales
        self.spare: Sequence[Tensor] | None = None  # memory to use instead of new one, if it is of the same shape
        self.rows, self.length = slice(0, batch_size), 0

    @property
    def dequantized_bytes(self) -> int:
        """Bytes of the copy of a row that attention needs."""
        return 0

    @property
    def memory(self) -> tuple[Tensor, Tensor]:
        keys, values = self.memories
        return keys, values

    def window(self, rows: slice, length: int) -> None:
        """Continue at position `length` of `rows` only."""
        self.rows, self.length = rows, length
        if self.is_initialized:
            self._show()

    def rollback(self, length: int) -> None:
        """Forget the positions from `length` on, of all rows."""
        self.slots.rollback(length)
        self.window(slice(0, self.batch_size), length)

    def keep_rows(self, rows: Tensor) -> None:
        """Keep `rows` only (indices ``[b]``, rising), and free the others' memory."""
        self.batch_size = len(rows)
        if self.is_initialized:
            old = self.memories
            specs = [((len(rows), *memory.shape[1:]), memory.dtype) for memory in old]
            self.memories = self._allocate(specs, old[0].device)
            for target, memory in zip(self.memories, old, strict=True):
                torch.index_select(memory, 0, rows.to(memory.device), out=target)
        self.window(slice(0, self.batch_size), self.length)

    def stored(self, rows: Tensor, length: int, mask: RowMask | None) -> list[Tensor]:
        """Copy `memories` of `rows` at position `length`, as `copy_slots` does. They are ``[b, kv_heads, n, *]``."""
        held = self.slots.held(length)
        return [copy_slots(memory, rows, held, mask) for memory in self.memories]

    def fill(self, blocks: Sequence[Sequence[Tensor]], length: int, dtype: torch.dtype) -> None:
        """Fill all rows with the last positions of `blocks`, from `stored`. What they lack is padding."""
        first = blocks[0]
        self.lazy_initialization(first[0], first[len(first) // 2], dtype)
        count = self.slots.begin(length)
        row = 0
        for block in blocks:
            for memory, states in zip(self.memories, block, strict=True):
                rows, copied = memory[row : row + len(states)], min(count, states.shape[2])
                rows[:, :, : count - copied] = 0  # padding must be numbers: attention multiplies it by zero
                target, bits = _wide_views(rows, states)
                target[:, :, count - copied : count] = bits[:, :, states.shape[2] - copied :]
            row += len(block[0])
        self.window(slice(0, self.batch_size), length)

    def gather(self, sources: Sequence[RowSource], length: int) -> None:
        """Fill the layer with rows of others; the longest has `length` positions."""
        if all(source.cache.is_initialized for source in sources):
            blocks = [source.cache.stored(source.rows, source.length, source.mask) for source in sources]
            self.fill(blocks, length, sources[0].cache.dtype)

    def _show(self) -> None:
        held = self.slots.held(self.length)
        self.keys, self.values = (memory[self.rows, :, held] for memory in self.memories)

    def get_seq_length(self) -> int:
        return self.length if self.is_initialized else 0

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """Return the number of visible keys, and the position of the first."""
        count = query_length if isinstance(query_length, int) else query_length.shape[0]  # positions, before 5.4
        length = self.get_seq_length()
        first = self.slots.first(length)
        return length - first + count, first

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor, dtype: torch.dtype | None = None) -> None:
        self.dtype, self.device = dtype or key_states.dtype, key_states.device
        specs = self._specs(key_states, value_states)
        spare, self.spare = self.spare, None
        if spare is None or specs != [(memory.shape, memory.dtype) for memory in spare]:
            del spare
            spare = self._allocate(specs, self.device)
        self.memories, self.is_initialized = [*spare], True

    def _specs(self, *states: Tensor) -> list[TensorSpec]:
        return [((self.batch_size, part.shape[1], self.slots.room, part.shape[3]), part.dtype) for part in states]

    def reserve(self, length: int, count: int) -> None:
        """Reserve `count` slots for all rows, at position `length`. What is kept moves now, if it has to."""
        moved = self.slots.reserve(length, count)
        if moved is not None:
            for memory in self.memories:
                memory[:, :, : moved.stop - moved.start] = memory[:, :, moved].clone()
            self.window(slice(0, self.batch_size), length)

    def advance(self, count: int) -> SlotAllocation:
        """Allocate the next `count` positions. Raises CacheFullError beyond the capacity."""
        allocation = self.slots.add(self.length, count)
        self.length += count
        return allocation

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new, (keys, values) = self.advance(key_states.shape[2]), self.memories
        seen = new.store(keys[self.rows], key_states), new.store(values[self.rows], value_states)
        self._show()
        return seen

    @property
    def unattended(self) -> bool:
        """True if the last pass did not attend to its host rows."""
        return False

    def joins(self, rows: slice) -> bool:
        """Tell whether a decode step of these rows can join others."""
        return rows == slice(0, self.batch_size)

    def hand_back(self) -> None:
        """Free what `update` returned, if that is a copy."""


def dequantize_kv(numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply int8 numbers by float32 scales. These are ``[rows, heads, n, D]`` and ``[rows, heads, n, 1]``."""
    return torch.mul(numbers, scales, out=torch.empty(numbers.shape, dtype=dtype, device=numbers.device))  # one pass


class QuantizedLayer(FixedLayer):
    """Keys and values in 8 bits, with a scale for each head.

    The prompt's attention sees exact keys and values. A later pass sees the stored
    ones, converted to the model's type in memory of their own, so attention should have few rows at a time. This saves
    memory, not time: attention over a cache in 16 bits reads 2 bytes a value; here a step reads 1, writes 2 and reads
    these 2.
    """

    recordable = False

    @property
    def dequantized_bytes(self) -> int:
        if not self.is_initialized or not self.batch_size:
            return 0
        return sum(numbers[0].numel() * self.dtype.itemsize for numbers in self.memories[::2])

    def _show(self) -> None:
        """Show nothing: the model's type exists only during a pass."""

    def _specs(self, *states: Tensor) -> list[TensorSpec]:
        return [
            spec
            for (shape, _) in super()._specs(*states)
            for spec in ((shape, torch.int8), ((*shape[:3], 1), torch.float32))
        ]

    def joins(self, rows: slice) -> bool:
        return True  # a part at a time is attended to

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        exact = not self.length
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        allocation = self.advance(key_states.shape[2])
        halves = zip(self.memories[::2], self.memories[1::2], (key_states, value_states), strict=True)
        stored = [self._store(allocation, *half) for half in halves]
        if exact:
            return key_states, value_states
        keys, values = (dequantize_kv(*half, self.dtype) for half in stored)
        return keys, values

    def _store(
        self, allocation: SlotAllocation, numbers: Tensor, scales: Tensor, states: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Quantise and store new states; return numbers and scales that they see."""
        scale = states.abs().amax(-1, keepdim=True).float().clamp_(min=TINIEST) / 127
        new = (states / scale).round_().to(torch.int8)
        return allocation.store(numbers[self.rows], new), allocation.store(scales[self.rows], scale)


STATES = ("conv_states", "recurrent_states")  # attributes of transformers' layers with states of fixed size, by number
_DUMMY = getattr(cache_utils, "DummyLayer", ())  # a layer that keeps nothing


class _StateRows:
    """Mixin that narrows a layer with a fixed-size state to some rows. `_of_rows` puts it before the layer's own class,
    whose writes in place reach the states of all rows. `attention` has the keys and values of a layer that has these as
    well."""

    batch_size: int
    rows: slice
    has_previous_state: dict[int, bool]
    attention: FixedLayer | None
    _whole: dict[str, dict[int, Tensor]]  # states of all rows, by attribute and number
    _begun: set[int]  # numbers of the states that hold earlier tokens

    def window(self, rows: slice, length: int) -> None:
        self.rows = rows
        flags = self.has_previous_state
        self._begun |= {number for number, begun in flags.items() if begun}
        for number in flags:
            flags[number] = length > 0 and number in self._begun
        for name, whole in self._whole.items():
            for number, states in whole.items():
                getattr(self, name)[number] = states[rows]
        if self.attention is not None:
            self.attention.window(rows, length)

    def keep_rows(self, rows: Tensor) -> None:
        """Keep `rows` only (indices ``[b]``, rising); `window` must follow."""
        self.batch_size = len(rows)
        for whole in self._whole.values():
            for number, states in whole.items():
                whole[number] = states[rows]
        if self.attention is not None:
            self.attention.keep_rows(rows)

    def gathered(self, sources: Sequence[RowSource], length: int) -> Any:
        """Return a replacement of this layer with states of other layers."""
        first = sources[0].cache
        copied: Any = copy(first)
        copied.attention, copied._begun = self.attention, set(first._begun)
        copied.batch_size = sum(len(source.rows) for source in sources)
        copied.has_previous_state = dict(first.has_previous_state)
        copied._whole = {
            name: {
                number: torch.cat([source.cache._whole[name][number][source.rows] for source in sources])
                for number in whole
            }
            for name, whole in first._whole.items()
        }
        for name in STATES:
            setattr(copied, name, dict(getattr(first, name)))
        copied.window(slice(0, copied.batch_size), length)
        return copied

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        super().lazy_initialization(*args, **kwargs)  # type: ignore[misc]
        for name, whole in self._whole.items():
            shown: dict[int, Tensor | None] = getattr(self, name)
            for number, states in shown.items():
                if states is None or number in whole:
                    continue
                if states.shape[0] != self.rows.stop - self.rows.start:
                    raise EngineError(f"{type(self).__name__} keeps a state whose first dimension is not the batch")
                whole[number] = states.new_zeros((self.batch_size, *states.shape[1:]))
                shown[number] = whole[number][self.rows]


class _MixedRows(_StateRows):
    """Mixin for a layer with a state, and with keys and values."""

    attention: FixedLayer

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.is_initialized = True
        return self.attention.update(*args, **kwargs)

    def get_seq_length(self) -> int:
        return self.attention.get_seq_length()

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        return self.attention.get_mask_sizes(query_length)


def _of_rows(layer: Any, batch_size: int, attention: FixedLayer | None) -> Any:
    """Narrow `layer`, of `transformers` with a state of fixed size, to rows."""
    kind, mixin = type(layer), _StateRows if attention is None else _MixedRows
    narrowed: Any = object.__new__(type(f"{kind.__name__}OfRows", (mixin, kind), {}))
    whole: dict[str, dict[int, Tensor]] = {name: {} for name in STATES}
    rows = {"batch_size": batch_size, "rows": slice(0, batch_size), "_whole": whole, "_begun": set[int]()}
    vars(narrowed).update(vars(layer), attention=attention, **rows)
    return narrowed


class RowCache(Cache):  # type: ignore[misc]
    """Cache that can be narrowed to some rows, layer by layer."""

    def window(self, rows: slice, length: int, layer: int | None = None) -> None:
        """Continue at position `length` of `rows` only, in `layer` or all."""
        for chosen in self._chosen(layer):
            chosen.window(rows, length)

    def keep_rows(self, rows: Tensor, length: int, layer: int | None = None) -> None:
        """Keep `rows` only (indices ``[b]``, rising), in `layer` or all."""
        for chosen in self._chosen(layer):
            chosen.keep_rows(rows)
            chosen.window(slice(0, len(rows)), length)

    def _chosen(self, layer: int | None) -> list[Any]:
        layers = self.layers if layer is None else [self.layers[layer]]
        return [chosen for chosen in layers if not isinstance(chosen, _DUMMY)]

    def gather(self, index: int, sources: Sequence[RowSource], length: int) -> None:
        """Fill layer `index` with rows of others; the longest has `length` positions."""
        layer = self.layers[index]
        if isinstance(layer, _DUMMY):
            return
        layers = [source._replace(cache=source.cache.layers[index]) for source in sources]
        if isinstance(attention := _attention(layer), FixedLayer):
            attention.gather([source._replace(cache=_attention(source.cache)) for source in layers], length)
        if isinstance(layer, _StateRows):
            self.layers[index] = layer.gathered(layers, length)

    def rollback(self, length: int) -> None:
        """Forget the positions from `length` on. Only for caches with `only_keys`."""
        for layer in self.attention.values():
            if layer.is_initialized:
                layer.rollback(length)

    @property
    def only_keys(self) -> bool:
        """True if the layers hold nothing but keys and values."""
        return not any(isinstance(layer, _StateRows) for layer in self.layers)

    @property
    def attention(self) -> dict[int, FixedLayer]:
        """Keys and values by layer number."""
        layers = {index: _attention(layer) for index, layer in enumerate(self.layers)}
        return {index: layer for index, layer in layers.items() if isinstance(layer, FixedLayer)}

    def put(self, index: int, attention: FixedLayer) -> None:
        """Make layer `index` keep its keys and values in `attention`."""
        if isinstance(self.layers[index], FixedLayer):
            self.layers[index] = attention
        else:
            self.layers[index].attention = attention


def _attention(layer: Any) -> Any:
    return getattr(layer, "attention", layer)


def make_cache(
    config: PreTrainedConfig, batch_size: int, capacity: int, storage: str = "auto", device_rows: int | None = None
) -> Cache:
    """Make a cache for `batch_size` sequences of up to `capacity` tokens.

    `storage` is int8, or else means the model's type. Keys and values are those of the first `device_rows`
    sequences only, if given.

    It is a `RowCache`, except for a model whose layers keep something that is neither keys and values nor a state of
    fixed size: then it is `transformers`' own.
    """
    default = DynamicCache(config=config)
    count = config.get_text_config(decoder=True).num_hidden_layers
    if len(default.layers) != count or other_layers(default):
        return default
    rows = batch_size if device_rows is None else device_rows
    attentions = ((index, layer) for index, layer in enumerate(default.layers) if isinstance(layer, DynamicLayer))
    windows: dict[int, int | None] = {index: getattr(layer, "sliding_window", None) for index, layer in attentions}
    rooms = [WindowIndex(capacity, windows[index]).room if index in windows else 0 for index in range(count)]
    chunks, kind = ChunkAllocator(rooms), QuantizedLayer if storage == "int8" else FixedLayer
    layers: list[Any] = [*default.layers]
    for index, layer in enumerate(default.layers):
        attention = None
        if index in windows:
            attention = kind(rows, capacity, windows[index], partial(chunks.allocate, index))
        if not isinstance(layer, _DUMMY):
            layers[index] = _of_rows(layer, batch_size, attention) if _has_states(layer) else attention
    return RowCache(layers=layers)


def other_layers(cache: Cache) -> set[type]:
    """Return the kinds of layers that hold anything but keys and states."""
    plain = (DynamicLayer, DynamicSlidingWindowLayer)
    layers = [layer for layer in cache.layers if not isinstance(layer, _DUMMY) and not _has_states(layer)]
    return {type(layer) for layer in layers if type(layer) not in plain}


def shares_keys(config: PreTrainedConfig) -> bool:
    """Tell whether layers attend to keys and values of earlier layers."""
    modes = getattr(config.get_text_config(decoder=True), "kv_sharing_modes", None) or ()
    return "store" in modes or any(isinstance(layer, _DUMMY) for layer in DynamicCache(config=config).layers)


def _has_states(layer: Any) -> bool:
    return all(isinstance(getattr(layer, name, None), dict) for name in (*STATES, "has_previous_state"))
