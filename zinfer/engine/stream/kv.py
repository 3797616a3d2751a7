"""The KV cache of a batch's last sequences in host memory, read over the link by every step, behind the weights.

The GPU holds the cache of as many sequences as it has room for; the others lie here, in parts: rows that pass through
the layers together. A layer's part is one range of bytes, a position after the other, so that a step reads it in one
copy and adds to it in another.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zinfer.engine.arena import HostArena
from zinfer.engine.cache import FixedLayer
from zinfer.engine.stream.ring import Load, Ring


class HostCache:
    """Keys and values of `parts` (rows of the batch) in `arena`, for up to `capacity` tokens a sequence.

    A layer's part is ``[capacity, K and V of all its rows]``; its shapes are those that are stored first.
    """

    def __init__(self, arena: HostArena, ring: Ring, parts: list[slice], capacity: int) -> None:
        self.parts, self.capacity = parts, capacity
        self._ring, self._memory, self._used = ring, arena.memory, 0
        self._places: dict[tuple[int, int], Tensor] = {}  # layer, part: uint8 [capacity, bytes of a position]
        self._lengths: dict[tuple[int, int], int] = {}
        self._cuda = ring.on_gpu
        self._stream = torch.cuda.Stream() if self._cuda else None
        self._written: dict[tuple[int, int], Any] = {}  # events

    def number(self, rows: slice) -> int | None:
        """Of the part that is `rows`; None where they are none of ours."""
        return self.parts.index(rows) if rows in self.parts else None

    def loads(self, first_length: int) -> Callable[[int, int], Iterator[Load]]:
        """What a pass fetches for a layer, for `Ring.fetch`: nothing while prompts of `first_length` tokens are
        prefilled (pass 0), and then all that was stored before."""

        def more(turn: int, layer: int) -> Iterator[Load]:
            length = first_length + turn - 1
            for part in range(len(self.parts)) if turn else ():
                key = (layer, part)
                yield Load(
                    layer,
                    source=partial(self._first, key, length),
                    ready=partial(self._reaches, key, length),
                    before=partial(self._wait, key),
                )

        return more

    def _first(self, key: tuple[int, int], length: int) -> Tensor:
        return self._places[key][:length].view(-1)

    def _reaches(self, key: tuple[int, int], length: int) -> bool:
        return self._lengths.get(key, 0) >= length

    def _wait(self, key: tuple[int, int]) -> None:
        if self._cuda:
            self._written[key].wait()

    def extend(self, layer: int, part: int, keys: Tensor, values: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Store keys and values, ``[rows, kv_heads, n, head_dim]``, of positions `start` on; all of them so far."""
        key = (layer, part)
        packed = torch.cat([states.permute(2, 0, 1, 3).reshape(states.shape[2], -1) for states in (keys, values)], 1)
        if key not in self._places:
            size = self.capacity * packed[0].nbytes
            self._places[key] = self._memory[self._used : self._used + size].view(self.capacity, -1)
            self._used += size
        end = start + packed.shape[0]
        self._store(key, packed, start)
        self._lengths[key] = end
        if not start:
            return keys, values
        place = self._places[key]
        held = self._ring.borrow(layer)
        if self._cuda:
            place = held[: self.capacity * place.shape[1]].view(place.shape)
            place[start:end] = packed.view(torch.uint8)
        seen = place[:end].view(packed.dtype)
        rows, heads = keys.shape[:2]
        split = rows * heads * keys.shape[3]
        return (
            seen[:, :split].view(end, rows, heads, -1).permute(1, 2, 0, 3),
            seen[:, split:].view(end, rows, heads, -1).permute(1, 2, 0, 3),
        )

    def _store(self, key: tuple[int, int], packed: Tensor, start: int) -> None:
        target = self._places[key][start : start + packed.shape[0]]
        if self._stream is None:
            target.copy_(packed.view(torch.uint8))
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            target.copy_(packed.view(torch.uint8), non_blocking=True)
            packed.record_stream(self._stream)
            event = self._written[key] = torch.cuda.Event()
            event.record()


class SplitLayer(FixedLayer):
    """The cache of decoder layer `index`: of the first `rows` sequences on the device, of the parts of `host` there."""

    def __init__(self, index: int, rows: int, capacity: int, host: HostCache) -> None:
        super().__init__(rows, capacity)
        self._index, self._host = index, host
        self._part: int | None = None

    def window(self, rows: slice, length: int) -> None:
        self._part = self._host.number(rows)
        if self._part is None and rows.stop <= self.batch_size:
            super().window(rows, length)
        self.length = length

    def get_seq_length(self) -> int:
        return self.length

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self._part is None:
            return super().update(key_states, value_states, *args, **kwargs)
        start, self.length = self.length, self.length + key_states.shape[2]
        if self.length > self.capacity:
            raise IndexError(f"the KV cache holds {self.capacity} tokens a sequence; token {self.length} was decoded")
        return self._host.extend(self._index, self._part, key_states, value_states, start)
