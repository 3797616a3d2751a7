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

HALVES = ("keys", "values")


class KVSnapshot:
    """Keys and values of a row in all decoder layers. Each is ``[1, kv_heads, length, head_dim]``.

    Positions `first` to `last` (exclusive) of `row`, which count from position `pad`, are copied out of `layers` to
    memory of its own, page-locked if `pin`, until it is closed.
    """

    def __init__(self, layers: "Sequence[FixedLayer]", first: int, last: int, row: int, pad: int, pin: bool) -> None:
        states = {
            f"{index}.{half}": part[row : row + 1, :, pad + first : pad + last]
            for index, layer in enumerate(layers)
            for half, part in zip(HALVES, (layer.keys, layer.values), strict=True)
        }
        blocks, size = lay_out(states.items())
        self._arena = PinnedArena(size, pin)
        self.first, self.length, self.states = first, last - first, self._arena.views(blocks)
        self.nbytes = sum(tensor.nbytes for tensor in self.states.values())
        try:
            for name, target in self.states.items():
                # Made contiguous on the device: the link copies one contiguous block at its full rate.
                target.copy_(states[name].contiguous(), non_blocking=pin)
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
        states = next((part.states for parts, _ in self.rows for part in parts), {})
        self.kinds = {name: (part.shape[1], part.shape[3], part.dtype) for name, part in states.items()}

    def put(self, layers: "Sequence[FixedLayer]", device: torch.device) -> None:
        """Append the positions to `layers`, on the current stream. Until then no snapshot must be closed."""
        for index, layer in enumerate(layers):
            both = []
            for half in HALVES:
                name = f"{index}.{half}"
                heads, size, dtype = self.kinds[name]
                # Padding must be numbers: attention multiplies it by zero.
                states = torch.zeros((len(self.rows), heads, self.length, size), dtype=dtype, device=device)
                for row, (parts, pad) in enumerate(self.rows):
                    for part in parts:
                        held, begin = part.states[name], pad + part.first
                        place = slice(begin, begin + part.length)
                        # Copied whole, which the link does at its full rate, and cut there.
                        states[row, :, place] = held.to(device, non_blocking=True)[0, :, : part.length]
                both.append(states)
            layer.update(*both)
