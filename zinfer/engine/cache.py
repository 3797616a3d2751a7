"""A KV cache with all its memory taken at the start, of any kinds of layers.

`transformers`' DynamicCache copies itself at every step to grow by one token, and its StaticCache makes attention read
the whole capacity. Here the memory is static and attention sees a view of the part that is filled: no copy, no waste,
and an out-of-memory error comes in prefill or not at all. Every layer can be narrowed to some of the rows, so that a
batch goes through the model a few rows at a time.

A layer that attends within a sliding window (or a chunk) has memory for that window, and reads no more. A layer with a
state of fixed size (recurrent, convolutional) keeps `transformers`' own tensors. A layer of sparse attention has the
keys of its indexer besides. A model that has layers of yet another kind (blocks of compressed keys) gets the cache that
`transformers` makes, which goes through the model whole.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig, cache_utils
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from zinfer.engine import EngineError
from zinfer.engine.choice import Alone, choosing


class CacheFullError(IndexError):
    """More tokens were computed than the cache was made for."""


CHUNK_BYTES = 256 << 20  # memory taken for several layers at a time
ALIGNMENT = 512  # bytes; at multiples of it tensors begin, as those do that PyTorch takes memory for
SPARE = 8  # a sliding window has 1/8 of its size as spare room; when that is full, the window moves to the front
LEAST_SPARE = 24  # tokens; a pass that verifies drafts may have 17


class Slots:
    """Slots of one layer: the map from positions to its `room` slots. Without a `window` each position has its own
    slot; with one there is room for the last positions, in order, and the visible ones move to the front when it is
    full.

    `window` counts the tokens that a token attends to, itself included. Slots are the same for all rows at a position.
    """

    def __init__(self, capacity: int, window: int | None = None) -> None:
        self.capacity, self.window = capacity, window
        self.room = capacity
        if window is not None:
            self.room = min(capacity, window - 1 + max(LEAST_SPARE, window // SPARE))
        self._bases = {0: 0}  # number of stored positions -> position in the first slot

    def first(self, length: int) -> int:
        """Return the first position that the next token after `length` ones still sees."""
        return 0 if self.window is None else max(0, length - self.window + 1)

    def held(self, length: int) -> slice:
        """Return the slots of all positions that the next token after `length` ones sees."""
        base = self._bases[length]
        return slice(self.first(length) - base, length - base)

    def add(self, start: int, count: int) -> "Step":
        """Take slots for `count` positions from `start` on. Raises CacheFullError beyond the capacity."""
        end = start + count
        if end > self.capacity:
            raise CacheFullError(f"the KV cache holds {self.capacity} tokens a sequence; token {end} was decoded")
        past, base = self.held(start), self._bases[start]
        moved = end - base > self.room
        if moved:
            whole = end - self.first(start) > self.room  # no room for all: store what the next token sees
            base = self.first(end) if whole else self.first(start)
        # Other rows may still have to go from `start` to `end`; nobody goes further back.
        self._bases = {at: first for at, first in self._bases.items() if at >= start} | {end: base}
        return Step(moved, past, slice(0 if moved else start - base, end - base))

    def place(self, start: int) -> int:
        """Return the slot of position `start`, the next one."""
        return start - self._bases[start]

    def settle(self, start: int, count: int) -> slice | None:
        """Make room for `count` positions from `start` on, where all rows go on: return the slots whose content is to
        move to the front now, None if there is room. Raises EngineError for more positions than a window moves for."""
        if start + count - self._bases[start] <= self.room:
            return None
        if start + count - self.first(start) > self.room:
            raise EngineError(f"{count} positions at a time are too many for a sliding window of {self.window}")
        moved = self.held(start)
        self._bases = {start: self.first(start)}
        return moved

    def begin(self, length: int) -> int:
        """Begin with `length` positions stored elsewhere; return how many of them, the last ones, have slots: those
        that the next token sees, in the first slots."""
        if length > self.capacity:
            raise CacheFullError(f"the KV cache holds {self.capacity} tokens a sequence; {length} come")
        self._bases = {length: self.first(length)}
        return length - self.first(length)

    def back(self, length: int) -> None:
        """Forget the positions from `length` on. Raises EngineError if positions that become visible again are gone."""
        end = max(self._bases)
        base = self._bases[end]
        if length > end or self.first(length) < base:
            raise EngineError(f"position {length} is outside of what a sliding window of {self.window} has stored")
        self._bases = {length: base}


class Step:
    """Slots that new positions take: `new`, behind the slots `past` that they see. If `moved`, the past moves to the
    front, and `new` are the slots of all that is kept."""

    def __init__(self, moved: bool, past: slice, new: slice) -> None:
        self.moved, self.past, self.new = moved, past, new

    def store(self, memory: Tensor, states: Tensor) -> Tensor:
        """Write `states`, ``[.., n, D]``, into `memory`, ``[.., room, D]``; return all states that the new positions
        see."""
        if not self.moved:
            memory[..., self.new, :] = states
            return self.seen(memory)
        if self.past.start < self.past.stop:
            states = torch.cat([memory[..., self.past, :], states], dim=-2)
        memory[..., self.new, :] = self.kept(states)
        return states

    def seen(self, memory: Tensor) -> Tensor:
        """Return all states that the new positions see, which are in `memory` unless the past moves."""
        return memory[..., self.past.start : self.new.stop, :]

    def kept(self, states: Tensor) -> Tensor:
        """Return the last positions of all `states` seen, ``[.., n, D]``: those that stay in memory."""
        return states[..., states.shape[-2] - (self.new.stop - self.new.start) :, :]


WIDE = torch.complex128, torch.int64, torch.int32  # widest first: moving takes time by the number, not by the bits


def wide(*tensors: Tensor) -> list[Tensor]:
    """Return the bits of `tensors`, ``[.., D]`` of one type, as fewer and wider numbers, of one type, for moving."""
    for dtype in WIDE:
        each = dtype.itemsize // tensors[0].itemsize
        if each and all(_in_blocks(one, each) for one in tensors):
            return [one.view(dtype) for one in tensors]
    return [*tensors]


def _in_blocks(states: Tensor, size: int) -> bool:
    """Tell whether the numbers of `states` lie in memory in whole blocks of `size`."""
    *steps, last = states.stride()
    return last == 1 and not any(number % size for number in (states.shape[-1], states.storage_offset(), *steps))


class Gaps:
    """Forgotten positions of rows, which lie between others: `real`, bool ``[b, length]``, tells which are not."""

    def __init__(self, real: Tensor) -> None:
        self.real = real
        self._orders: dict[int, Tensor] = {}  # by the number of positions; layers with a window have fewer

    def of(self, chosen: Tensor) -> "Gaps":
        """Return the gaps of some of the rows."""
        return Gaps(self.real[chosen])

    def order(self, count: int) -> Tensor:
        """Return the last `count` positions of each row, numbers from 0 on, ``[b, count]``: first those that are not
        real, then the others in their order."""
        if count not in self._orders:
            last = self.real[:, self.real.shape[1] - count :]
            self._orders[count] = last.long().argsort(dim=-1, stable=True)
        return self._orders[count]


def taken(memory: Tensor, rows: Tensor, held: slice, gaps: Gaps | None) -> Tensor:
    """Return the slots `held` of rows ``[b]`` of `memory` ``[B, heads, room, D]``, a copy; behind forgotten positions,
    if there are `gaps`, come the others."""
    (bits,) = wide(memory)
    if gaps is None:
        return bits[rows, :, held].view(memory.dtype)
    slots = held.start + gaps.order(held.stop - held.start)
    heads = torch.arange(memory.shape[1], device=memory.device)
    return bits[rows[:, None, None], heads[:, None], slots[:, None]].view(memory.dtype)


class Source(NamedTuple):
    """Rows ``[b]`` of a cache at position `length`, from which others are filled."""

    cache: Any
    rows: Tensor
    gaps: Gaps | None
    length: int


Form = tuple[tuple[int, ...], torch.dtype]  # of a tensor
Take = Callable[[Sequence[Form], torch.device], list[Tensor]]  # returns memory for tensors, its content undefined


def apart(forms: Sequence[Form], device: torch.device) -> list[Tensor]:
    """Take memory for each tensor by itself."""
    return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in forms]


class Chunks:
    """Memory for the keys and values of a micro-batch, taken for several layers at a time.

    What is freed has to be of use for micro-batches of another size. PyTorch gives whole pages of 20 MiB back to the
    device: single layers of a few rows would leave holes that hold none, and that layers of other sizes do not fill.

    `rooms` has the slots of a row in each layer; 0 where a layer has none.
    """

    def __init__(self, rooms: Sequence[int]) -> None:
        self._rooms = rooms
        self._rest: Tensor | None = None  # what is left of a chunk
        self._next: int | None = None  # layer that it is for
        self._alike = True  # until layers differ in their heads: then each gets memory of its own

    def take(self, layer: int, forms: Sequence[Form], device: torch.device) -> list[Tensor]:
        """Take memory for the tensors of `layer`, which hold as many rows in all layers to come."""
        sizes = [prod(shape) * dtype.itemsize for shape, dtype in forms]
        need, rest = sum(map(_aligned, sizes)), self._rest
        if rest is None or layer != self._next or len(rest) < need or rest.device != device:
            self._alike = self._alike and (rest is None or layer != self._next)
            self._rest = None  # a chunk whose last rows are gone is of use for the new one
            rest = torch.empty(self._chunk(layer, sizes), dtype=torch.uint8, device=device)
        found = []
        for (shape, dtype), size in zip(forms, sizes, strict=True):
            found.append(rest[:size].view(dtype).view(shape))
            rest = rest[_aligned(size) :]
        self._rest = rest if len(rest) else None
        self._next = next((later for later in range(layer + 1, len(self._rooms)) if self._rooms[later]), None)
        return found

    def _chunk(self, layer: int, sizes: Sequence[int]) -> int:
        """Return the bytes of a chunk for `layer`, whose tensors have `sizes`, and as many later ones as it holds."""
        found = 0
        for room in self._rooms[layer:] if self._alike else self._rooms[layer : layer + 1]:
            more = sum(_aligned(size * room // self._rooms[layer]) for size in sizes)
            if found and found + more > CHUNK_BYTES:
                break
            found += more
        return found


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class FixedLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of one decoder layer, ``[B, kv_heads, room, head_dim]`` each; their head_dim may differ.

    `window` limits what is written and seen to some of the rows, so that a batch can be prefilled a few rows at a time.
    `take` takes its memory.
    """

    def __init__(self, batch_size: int, capacity: int, window: int | None = None, take: Take = apart) -> None:
        super().__init__()
        self._take = take
        self.batch_size, self.capacity = batch_size, capacity
        self.slots, self.is_sliding = Slots(capacity, window), window is not None
        self._keys = self._values = torch.empty(0)
        self.spare: Sequence[Tensor] | None = None  # memory to take instead of new one, if it is of the same shape
        self.rows, self.length = slice(0, batch_size), 0

    @property
    def memory(self) -> tuple[Tensor, Tensor]:
        """Keys and values of all rows, ``[B, kv_heads, room, head_dim]`` each, computed or not."""
        return self._keys, self._values

    def window(self, rows: slice, length: int) -> None:
        """Continue at position `length` of `rows` only."""
        self.rows, self.length = rows, length
        if self.is_initialized:
            self._show()

    def rollback(self, length: int) -> None:
        """Forget the positions from `length` on, of all rows."""
        self.slots.back(length)
        self.window(slice(0, self.batch_size), length)

    def keep_rows(self, rows: Tensor) -> None:
        """Keep `rows` only (indices ``[b]``, rising), as rows 0, 1, .., and free the others' memory."""
        self.batch_size = len(rows)
        if self.is_initialized:
            self._take_rows(rows)
        self.window(slice(0, self.batch_size), self.length)

    def _take_rows(self, rows: Tensor) -> None:
        self._keys, self._values = self._copied(rows)

    def _copied(self, rows: Tensor) -> list[Tensor]:
        """Return copies of `rows` of `_memories`, in new memory."""
        memories = self._memories()
        found = self._take([((len(rows), *one.shape[1:]), one.dtype) for one in memories], memories[0].device)
        for to, memory in zip(found, memories, strict=True):
            torch.index_select(memory, 0, rows.to(memory.device), out=to)
        return found

    def _memories(self) -> list[Tensor]:
        """Return the tensors that hold the rows' positions, ``[B, kv_heads, room, *]`` each, of bits if in 8 bits."""
        return [self._keys, self._values]

    def stored(self, rows: Tensor, length: int, gaps: Gaps | None) -> list[Tensor]:
        """Return what `_memories` hold of `rows` at position `length`, ``[b, kv_heads, n, *]``, as `taken` has it."""
        held = self.slots.held(length)
        return [taken(memory, rows, held, gaps) for memory in self._memories()]

    def _like(self, block: Sequence[Tensor], dtype: torch.dtype) -> None:
        """Take memory for all rows, for states like those of `block`, of a model in `dtype`."""
        self._take_memory(block[0], block[1], dtype)

    def fill(self, blocks: Sequence[Sequence[Tensor]], length: int, dtype: torch.dtype) -> None:
        """Fill all rows with the last positions up to `length` of `blocks`, each what `stored` returned of some rows of
        a model in `dtype`; what they lack is padding."""
        self._like(blocks[0], dtype)
        count = self.slots.begin(length)
        row = 0
        for block in blocks:
            for memory, states in zip(self._memories(), block, strict=True):
                place = memory[row : row + len(states)]
                known = min(count, states.shape[2])
                place[:, :, : count - known] = 0  # padding must be numbers: attention multiplies it by zero
                into, bits = wide(place, states)
                into[:, :, count - known : count] = bits[:, :, states.shape[2] - known :]
            row += len(block[0])
        self.window(slice(0, self.batch_size), length)

    def gather(self, sources: Sequence[Source], length: int) -> None:
        """Fill the layer with rows of others, of which the longest has `length` positions."""
        if all(source.cache.is_initialized for source in sources):
            blocks = [source.cache.stored(source.rows, source.length, source.gaps) for source in sources]
            self.fill(blocks, length, sources[0].cache.dtype)

    def _show(self) -> None:
        held = self.slots.held(self.length)
        self.keys, self.values = self._keys[self.rows, :, held], self._values[self.rows, :, held]

    def get_seq_length(self) -> int:
        return self.length if self.is_initialized else 0

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """Return the number of keys that the next `query_length` tokens see, and the position of the first key."""
        count = query_length if isinstance(query_length, int) else query_length.shape[0]  # positions, before 5.4
        length = self.get_seq_length()
        first = self.slots.first(length)
        return length - first + count, first

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        self._take_memory(key_states, key_states if value_states is None else value_states, key_states.dtype)

    def _take_memory(self, keys: Tensor, values: Tensor, dtype: torch.dtype) -> None:
        """Take memory for all rows, for states like `keys` and `values`, of a model in `dtype`."""
        self.dtype, self.device, states = dtype, keys.device, (keys, values)
        shapes = [(self.batch_size, one.shape[1], self.slots.room, one.shape[3]) for one in states]
        spare, self.spare = self.spare, None
        alike = spare is not None and all(
            (memory.shape, memory.dtype, memory.device) == (shape, one.dtype, one.device)
            for memory, shape, one in zip(spare, shapes, states, strict=True)
        )
        if spare is None or not alike:
            del spare
            spare = self._take(list(zip(shapes, (keys.dtype, values.dtype), strict=True)), keys.device)
        self._keys, self._values = spare
        self.is_initialized = True

    def settle(self, length: int, count: int) -> None:
        """Have slots for `count` positions of all rows, which are at position `length`, without moving any: what is
        kept moves now, if it has to. Raises EngineError as `Slots.settle` does."""
        moved = self.slots.settle(length, count)
        if moved is not None:
            for memory in self._memories():
                memory[:, :, : moved.stop - moved.start] = memory[:, :, moved].clone()
            self.window(slice(0, self.batch_size), length)

    def advance(self, count: int) -> Step:
        """Take the next `count` positions. Raises CacheFullError beyond the capacity."""
        step = self.slots.add(self.length, count)
        self.length += count
        return step

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        step = self.advance(key_states.shape[2])
        seen = step.store(self._keys[self.rows], key_states), step.store(self._values[self.rows], value_states)
        self._show()
        return seen

    def store(self, keys: Tensor, values: Tensor) -> "Sequence[Tensor | Narrow]":
        """Store new keys and values as `update` does; return those that they see in the form in which they are
        stored."""
        return self.update(keys, values)


Widen = Callable[[Tensor, Tensor, torch.dtype], Tensor]


def widened(numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return int8 `numbers` ``[rows, heads, n, D]`` times float32 `scales` ``[rows, heads, n, 1]``, in `dtype`."""
    return torch.mul(numbers, scales, out=torch.empty(numbers.shape, dtype=dtype, device=numbers.device))  # one pass


@dataclass(frozen=True)
class Narrow:
    """Keys or values in 8 bits, `numbers` ``[rows, heads, n, D]``, with their `scales`, ``[rows, heads, n, 1]``;
    `widen` computes what `widened` does."""

    numbers: Tensor
    scales: Tensor
    dtype: torch.dtype  # the model's
    widen: Widen

    @property
    def shape(self) -> torch.Size:
        return self.numbers.shape

    @property
    def device(self) -> torch.device:
        return self.numbers.device

    def __len__(self) -> int:
        return len(self.numbers)

    def wide(self) -> Tensor:
        """Return numbers times scales, in the model's type, in memory of their own."""
        if self.numbers.dtype != torch.int8:
            return self.numbers.to(self.dtype).mul_(self.scales)
        return self.widen(self.numbers, self.scales, self.dtype)


class QuantizedLayer(FixedLayer):
    """Keys and values in 8 bits (`storage` is int8 or float8_e4m3fn), each head of each token with a scale of its own.
    `widen` computes what `widened` does.

    The prompt's attention sees exact keys and values. A later pass sees the stored ones, converted to the model's type
    in memory of their own, so attention should have few rows at a time. This saves memory, not time: attention over a
    cache in 16 bits reads 2 bytes a value; here a step reads 1, writes 2 and reads these 2.
    """

    def __init__(
        self,
        batch_size: int,
        capacity: int,
        storage: torch.dtype,
        window: int | None = None,
        widen: Widen = widened,
        take: Take = apart,
    ) -> None:
        super().__init__(batch_size, capacity, window, take)
        self._storage, self._widen = storage, widen
        self._largest = 127.0 if storage == torch.int8 else torch.finfo(storage).max
        # Smallest maximum of a row whose scale is a normal number; a row of zeros must not divide by zero.
        self._least = self._largest * torch.finfo(torch.float32).tiny
        self._stored: list[tuple[Tensor, Tensor]] = []  # keys, then values: 8-bit numbers and their scales

    @property
    def dequantized_bytes(self) -> int:
        """Bytes of a row's keys and values in the model's type; 0 before any are stored."""
        return sum(content[0].numel() * self.dtype.itemsize for content, _ in self._stored) if self.batch_size else 0

    def _show(self) -> None:
        """Show nothing: the model's type exists only during a pass."""

    def _take_rows(self, rows: Tensor) -> None:
        keys, of_keys, values, of_values = self._copied(rows)
        self._stored = [(keys.view(self._storage), of_keys), (values.view(self._storage), of_values)]

    def _memories(self) -> list[Tensor]:
        return [tensor for content, scales in self._stored for tensor in (content.view(torch.int8), scales)]

    def _like(self, block: Sequence[Tensor], dtype: torch.dtype) -> None:
        self._take_memory(block[0], block[2], dtype)

    def _take_memory(self, keys: Tensor, values: Tensor, dtype: torch.dtype) -> None:
        self.dtype, self.device = dtype, keys.device
        forms = list[Form]()
        for states in (keys, values):
            shape = (self.batch_size, states.shape[1], self.slots.room)
            forms += [((*shape, states.shape[3]), self._storage), ((*shape, 1), torch.float32)]
        content, scales, *of_values = self._take(forms, self.device)
        self._stored = [(content, scales), (of_values[0], of_values[1])]
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        exact = not self.length
        keys, values = self.store(key_states, value_states)
        return (key_states, value_states) if exact else (keys.wide(), values.wide())

    def store(self, keys: Tensor, values: Tensor) -> tuple[Narrow, Narrow]:
        """Store new keys and values; return those that they see, as they are stored."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        step = self.advance(keys.shape[2])
        seen = []
        for (content, scales), states in zip(self._stored, (keys, values), strict=True):
            scale = states.abs().amax(-1, keepdim=True).float().clamp_(min=self._least) / self._largest
            new = states / scale
            new = (new.round_() if self._storage == torch.int8 else new).to(self._storage)
            bits = step.store(content[self.rows].view(torch.int8), new.view(torch.int8)).view(self._storage)
            seen.append(Narrow(bits, step.store(scales[self.rows], scale), self.dtype, self._widen))
        return seen[0], seen[1]


STORAGE = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
STATES = ("conv_states", "recurrent_states")  # attributes of transformers' layers with states of fixed size, by number
_DUMMY = getattr(cache_utils, "DummyLayer", ())  # a layer that keeps nothing
_INDEXED = getattr(cache_utils, "DynamicIndexedLayer", None)  # a layer with the keys of an indexer


class _StateRows:
    """Mixin for a layer of `transformers` with a state of fixed size, narrowed to some of the rows. `_of_rows` puts it
    before the layer's own class, whose writes in place reach the states of all rows."""

    rows: slice
    has_previous_state: dict[int, bool]

    def take_rows(self, batch_size: int) -> None:
        self.batch_size, self.rows = batch_size, slice(0, batch_size)
        self._whole: dict[str, dict[int, Tensor]] = {name: {} for name in STATES}
        self._begun: set[int] = set()  # numbers of the states that hold earlier tokens

    def window(self, rows: slice, length: int) -> None:
        """Continue at position `length` of `rows` only."""
        self.rows = rows
        flags = self.has_previous_state
        self._begun |= {number for number, begun in flags.items() if begun}
        for number in flags:
            flags[number] = length > 0 and number in self._begun
        for name, whole in self._whole.items():
            for number, states in whole.items():
                getattr(self, name)[number] = states[rows]

    def keep_rows(self, rows: Tensor) -> None:
        """Keep `rows` only (indices ``[b]``, rising), as rows 0, 1, ..; `window` must follow."""
        self.batch_size = len(rows)
        for whole in self._whole.values():
            for number, states in whole.items():
                whole[number] = states[rows]

    def gathered(self, sources: "Sequence[tuple[Any, Tensor]]", length: int) -> Any:
        """Return a layer in place of this one with the states of rows ``[b]`` of other layers."""
        first = sources[0][0]
        made: Any = object.__new__(type(first))
        vars(made).update(vars(first))
        if hasattr(self, "attention"):
            made.attention = self.attention
        made.batch_size = sum(len(rows) for _, rows in sources)
        made._begun = set(first._begun)
        made.has_previous_state = dict(first.has_previous_state)
        made._whole = {
            name: {number: torch.cat([one._whole[name][number][rows] for one, rows in sources]) for number in whole}
            for name, whole in first._whole.items()
        }
        for name in STATES:
            setattr(made, name, dict(getattr(first, name)))
        made.window(slice(0, made.batch_size), length)
        return made

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
    """Mixin for a layer with a state that also has keys and values, in `attention`."""

    attention: FixedLayer

    def window(self, rows: slice, length: int) -> None:
        super().window(rows, length)
        self.attention.window(rows, length)

    def keep_rows(self, rows: Tensor) -> None:
        super().keep_rows(rows)
        self.attention.keep_rows(rows)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.is_initialized = True
        return self.attention.update(key_states, value_states, *args, **kwargs)

    def get_seq_length(self) -> int:
        return self.attention.get_seq_length()

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        return self.attention.get_mask_sizes(query_length)


def _of_rows(layer: Any, batch_size: int, attention: FixedLayer | None) -> Any:
    """Return `layer`, of `transformers` with a state of fixed size, as one that can be narrowed to some of the rows."""
    kind, own = type(layer), _StateRows if attention is None else _MixedRows
    made: Any = object.__new__(type(f"{kind.__name__}OfRows", (own, kind), {}))
    vars(made).update(vars(layer))
    made.take_rows(batch_size)
    if attention is not None:
        made.attention = attention
    return made


class IndexedLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of a layer of sparse attention, in `attention`, and the keys by which its indexer chooses.

    An indexer's keys, ``[B, 1, capacity, D]``, are read whole at every step: they stay on the device for all rows, also
    for those that have their keys and values in host memory. Rows choose as each would alone: `alone` tells what `rows`
    would have of a pass of so many tokens, or None if that is what they have.
    """

    is_sliding = False
    alone: Callable[[slice, int], Sequence[Alone] | None]

    def __init__(self, batch_size: int, capacity: int, attention: FixedLayer) -> None:
        self.attention = attention
        self.batch_size, self.capacity = batch_size, capacity
        self.rows, self.length = slice(0, batch_size), 0
        self._index = self._positions = torch.empty(0)  # positions: ids, [B, axes, capacity, 1]

    @property
    def keys(self) -> Tensor:
        """Keys of the rows shown, ``[b, kv_heads, length, D]``."""
        return self.attention.keys

    @property
    def values(self) -> Tensor:
        """Values of the rows shown."""
        return self.attention.values

    @property
    def is_initialized(self) -> bool:
        """True once keys and values are stored."""
        return bool(self.attention.is_initialized)

    def window(self, rows: slice, length: int) -> None:
        """Continue at position `length` of `rows` only."""
        self.rows, self.length = rows, length
        self.attention.window(rows, length)

    def keep_rows(self, rows: Tensor) -> None:
        """Keep `rows` only (indices ``[b]``, rising), as rows 0, 1, ..; `window` must follow."""
        self.batch_size = len(rows)
        self._index, self._positions = (
            memory[rows.to(memory.device)] if memory.numel() else memory for memory in (self._index, self._positions)
        )
        self.attention.keep_rows(rows)

    def gather(self, sources: Sequence[Source], length: int) -> None:
        """Fill the memory of the indexer with rows of other layers, of which the longest has `length` positions."""
        self._index = self._gathered([source.cache._index for source in sources], sources, length)
        self._positions = self._gathered([source.cache._positions for source in sources], sources, length)

    def _gathered(self, memories: Sequence[Tensor], sources: Sequence[Source], length: int) -> Tensor:
        if not all(memory.numel() for memory in memories):
            return memories[0].new_empty(0)
        _, heads, _, width = memories[0].shape
        found = memories[0].new_zeros((self.batch_size, heads, self.capacity, width))
        row = 0
        for memory, (_, rows, gaps, known) in zip(memories, sources, strict=True):
            kept = taken(memory, rows, slice(0, known), gaps)[:, :, max(0, known - length) :]
            found[row : row + len(rows), :, length - kept.shape[2] : length] = kept
            row += len(rows)
        return found

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.attention.update(key_states, value_states, *args, **kwargs)

    def update_indexer(self, states: Tensor) -> Tensor:
        """Store keys of the indexer, ``[b, n, D]``, behind the first `length`; return all of these rows."""
        end = self.length + states.shape[1]
        if end > self.capacity:
            raise CacheFullError(f"the KV cache holds {self.capacity} tokens a sequence; token {end} was decoded")
        if not self._index.numel():
            self._index = states.new_empty((self.batch_size, 1, self.capacity, states.shape[2]))
        self._index[self.rows, 0, self.length : end] = states
        keys, alone = self._index[self.rows, 0, :end], self.alone(self.rows, states.shape[1])
        return keys if alone is None else choosing(keys, alone, end)

    @property
    def indexer_position_ids(self) -> Tensor | None:
        """Position ids of the first `length` tokens, ``[axes, b, length]``; None if the model keeps none here."""
        if not self.length or not self._positions.numel():
            return None
        return self._positions[self.rows, :, : self.length, 0].transpose(0, 1)

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: Tensor) -> None:
        axes, _, end = positions.shape
        if not self._positions.numel():
            self._positions = positions.new_zeros((self.batch_size, axes, self.capacity, 1))
        self._positions[self.rows, :, :end, 0] = positions.transpose(0, 1)

    def get_seq_length(self) -> int:
        return self.attention.get_seq_length()

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        return self.attention.get_mask_sizes(query_length)


class RowCache(Cache):  # type: ignore[misc]
    """A cache that can be narrowed to some of the rows, layer by layer."""

    def window(self, rows: slice, length: int, layer: int | None = None) -> None:
        """Continue at position `length` of `rows` only: in `layer`, or in all layers."""
        for one in self.layers if layer is None else (self.layers[layer],):
            if not isinstance(one, _DUMMY):
                one.window(rows, length)

    def keep_rows(self, rows: Tensor, length: int) -> None:
        """Keep `rows` only (indices ``[b]``, rising), at position `length`, and free the others' memory."""
        for one in self.layers:
            if not isinstance(one, _DUMMY):
                one.keep_rows(rows)
        self.window(slice(0, len(rows)), length)

    def keep_in_layer(self, index: int, rows: Tensor, length: int) -> None:
        """Keep `rows` only in one layer, as `keep_rows` does; it keeps nothing if there are none."""
        layer = self.layers[index]
        if isinstance(layer, _DUMMY):
            return
        layer.keep_rows(rows)
        layer.window(slice(0, len(rows)), length)

    def gather(self, index: int, sources: Sequence[Source], length: int) -> None:
        """Fill layer `index` with rows of other caches, of which the longest has `length` positions. A layer with a
        state takes its form from the first source."""
        layer = self.layers[index]
        if isinstance(layer, _DUMMY):
            return
        found = [source._replace(cache=source.cache.layers[index]) for source in sources]
        attention = getattr(layer, "attention", layer)
        if isinstance(attention, FixedLayer):
            attention.gather([one._replace(cache=getattr(one.cache, "attention", one.cache)) for one in found], length)
        if isinstance(layer, IndexedLayer):
            layer.gather(found, length)
        if isinstance(layer, _StateRows):
            self.layers[index] = layer.gathered([(one.cache, one.rows) for one in found], length)

    def rollback(self, length: int) -> None:
        """Forget the positions from `length` on. Raises EngineError for states that cannot forget (`only_keys`)."""
        if not self.only_keys:
            raise EngineError("a state of fixed size cannot forget single positions")
        for layer in self.attention.values():
            if layer.is_initialized:
                layer.rollback(length)

    @property
    def only_keys(self) -> bool:
        """True if the layers hold nothing but keys and values."""
        return not any(isinstance(layer, _StateRows) for layer in self.layers)

    def has_length(self, length: int) -> bool:
        """Tell whether every layer that holds tokens holds `length` of them."""
        return all(layer.length == length for layer in self.attention.values() if layer.is_initialized)

    @property
    def attention(self) -> dict[int, FixedLayer]:
        """Keys and values by layer number."""
        found = {index: getattr(layer, "attention", layer) for index, layer in enumerate(self.layers)}
        return {index: layer for index, layer in found.items() if isinstance(layer, FixedLayer)}

    def put(self, index: int, attention: FixedLayer) -> None:
        """Make layer `index` keep its keys and values in `attention`."""
        if isinstance(self.layers[index], FixedLayer):
            self.layers[index] = attention
        else:
            self.layers[index].attention = attention


def make_cache(
    config: PreTrainedConfig,
    batch_size: int,
    capacity: int,
    storage: str = "auto",
    here: int | None = None,
    widen: Widen = widened,
) -> Cache:
    """Return a cache for `batch_size` sequences of up to `capacity` tokens, in the model's type or in `STORAGE`'s, with
    the keys and values of the first `here` sequences only, if given. `widen` is that of `QuantizedLayer`.

    It is a `RowCache`, except for a model whose layers keep something that is neither keys and values nor a state of
    fixed size nor the keys of an indexer: then it is `transformers`' own.
    """
    default = DynamicCache(config=config)
    layers = config.get_text_config(decoder=True).num_hidden_layers
    if len(default.layers) != layers or any(kind is not _INDEXED for kind in other_layers(default)):
        return default
    rows = batch_size if here is None else here
    windows = {index: _window(layer) for index, layer in enumerate(default.layers) if isinstance(layer, DynamicLayer)}
    places = range(len(default.layers))
    chunks = Chunks([Slots(capacity, windows[index]).room if index in windows else 0 for index in places])

    def keys_and_values(index: int) -> FixedLayer:
        take = partial(chunks.take, index)
        if storage in STORAGE:
            return QuantizedLayer(rows, capacity, STORAGE[storage], windows[index], widen, take)
        return FixedLayer(rows, capacity, windows[index], take)

    def made(index: int, layer: Any) -> Any:
        if isinstance(layer, _DUMMY):
            return layer
        attention = keys_and_values(index) if index in windows else None
        if _has_states(layer):
            return _of_rows(layer, batch_size, attention)
        return IndexedLayer(batch_size, capacity, attention) if attention and type(layer) is _INDEXED else attention

    return RowCache(layers=[made(index, layer) for index, layer in enumerate(default.layers)])


def _window(layer: DynamicLayer) -> int | None:
    """Return the sliding window of a layer of `transformers`, in tokens."""
    return int(layer.sliding_window) if isinstance(layer, DynamicSlidingWindowLayer) else None


def other_layers(cache: Cache) -> set[type]:
    """Return the kinds of layers in `transformers`' `cache` that hold neither keys and values alone nor states."""
    plain = (DynamicLayer, DynamicSlidingWindowLayer)
    layers = [layer for layer in cache.layers if not isinstance(layer, _DUMMY) and not _has_states(layer)]
    return {type(layer) for layer in layers if type(layer) not in plain}


def shares_keys(config: PreTrainedConfig) -> bool:
    """Tell whether layers attend to keys and values of earlier layers."""
    modes = getattr(config.get_text_config(decoder=True), "kv_sharing_modes", None) or ()
    return "store" in modes or any(isinstance(layer, _DUMMY) for layer in DynamicCache(config=config).layers)


def _has_states(layer: Any) -> bool:
    return all(isinstance(getattr(layer, name, None), dict) for name in (*STATES, "has_previous_state"))
