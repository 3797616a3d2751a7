"""KV snapshots: keys and values in host memory, where a prefill of any engine continues.

Prefill of a position takes a pass through the whole model; to copy it back takes only its keys and values.
"""

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING

import torch

from zinfer.engine.pinned import PinnedArena, lay_out

if TYPE_CHECKING:  # transformers takes seconds to import, and every engine imports this
    from zinfer.engine.cache import FixedLayer


class KVSnapshot:
    """Keys and values of a row in all decoder layers. Each is ``[1, kv_heads, length, head_dim]``.

    Positions `first` to `last` (exclusive) of `row`, which count from position `pad`, are copied out of `layers` to
    memory of its own, page-locked if `pin`, until it is closed.
    """

    def __init__(self, layers: "Sequence[FixedLayer]", first: int, last: int, row: int, pad: int, pin: bool) -> None:
        both = [part for layer in layers for part in (layer.keys, layer.values)]
        states = [part[row : row + 1, :, pad + first : pad + last] for part in both]
        blocks, size = lay_out((str(number), part) for number, part in enumerate(states))
        self._arena = PinnedArena(size, pin)
        self.states = [*self._arena.views(blocks).values()]  # keys and values of each layer in turn
        self.first, self.length, self.nbytes = first, last - first, sum(part.nbytes for part in self.states)
        try:
            for target, part in zip(self.states, states, strict=True):
                # Made contiguous on the device: the link copies one contiguous block at its full rate.
                target.copy_(part.contiguous(), non_blocking=pin)
            if pin:
                torch.cuda.current_stream().synchronize()
        except BaseException:
            self.close()
            raise

    def head(self, length: int) -> "KVSnapshot":
        """Return the first `length` positions, or all, in the same memory."""
        part = copy(self)
        part.length = min(length, self.length)
        return part

    def close(self) -> None:
        """Free the memory, once no copy from it is under way."""
        if self._arena.pinned:
            torch.cuda.synchronize()
        self.states.clear()  # views, which would keep the memory
        self._arena.close()


class RowsPast:
    """First `length` positions of left-padded rows, each of its own snapshots. `rows` are the snapshots of each row, of
    one sequence each, in order from its first token on; they hold at least what the row has behind its padding, `pads`
    positions."""

    def __init__(self, rows: Sequence[Sequence[KVSnapshot]], pads: Sequence[int], length: int) -> None:
        self.length = length
        self.rows = [
            ([part.head(length - pad - part.first) for part in parts if part.first < length - pad], pad)
            for parts, pad in zip(rows, pads, strict=True)
        ]
        # Heads, width and type of keys and values, as in any snapshot: all of some rows may be padding.
        states = next((part.states for parts, _ in self.rows for part in parts), [])
        self.kinds = [(part.shape[1], part.shape[3], part.dtype) for part in states]

    def put(self, layers: "Sequence[FixedLayer]", device: torch.device) -> None:
        """Append the positions to `layers`, on the current stream. Until then no snapshot must be closed."""
        for index, layer in enumerate(layers):
            both = []
            for number in (2 * index, 2 * index + 1):
                heads, size, dtype = self.kinds[number]
                # Padding must be numbers: attention multiplies it by zero.
                states = torch.zeros((len(self.rows), heads, self.length, size), dtype=dtype, device=device)
                for row, (parts, pad) in enumerate(self.rows):
                    for part in parts:
                        held, begin = part.states[number], pad + part.first
                        place = slice(begin, begin + part.length)
                        # Copied whole, which the link does at its full rate, and cut there.
                        states[row, :, place] = held.to(device, non_blocking=True)[0, :, : part.length]
                both.append(states)
            layer.update(*both)
