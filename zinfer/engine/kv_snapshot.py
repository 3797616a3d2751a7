"""What was computed of a conversation, kept in host memory: keys and values that a later prefill takes up as its past.

A position costs a prefill the whole model's work, and a copy only its keys and values. They lie layer by layer in one
block of exactly their size, in an order that no engine is named in: what one engine kept, another can go on from.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import copy

import torch
from torch import Tensor

from zinfer.engine.cache import FixedLayer
from zinfer.engine.pinned import Block, PinnedArena

HALVES = ("keys", "values")


class KVSnapshot:
    """Keys and values of `length` positions, from `first` on, of a batch: for each decoder layer ``[B, kv_heads, n,
    head_dim]`` each, in page-locked memory if `pin`, until it is closed.

    `head` is a part of it that shares its memory.
    """

    def __init__(self, first: int, blocks: Mapping[str, Block], pin: bool) -> None:
        self.first, self.blocks = first, blocks
        self.length: int = next(iter(blocks.values())).shape[2]
        self.nbytes = sum(block.size for block in blocks.values())
        self._arena = PinnedArena(self.nbytes, pin)

    @classmethod
    def of(cls, layers: Sequence[FixedLayer], first: int, last: int, pin: bool) -> "KVSnapshot":
        """A copy of what `layers` hold of the positions from `first` up to `last`; it is complete on return.

        Raises MemoryError where the host has no room for it.
        """
        states = {
            f"{index}.{half}": part[:, :, first:last]
            for index, layer in enumerate(layers)
            for half, part in zip(HALVES, (layer.keys, layer.values), strict=True)
        }
        kept = cls(first, _end_to_end(states), pin)
        try:
            for name, block in kept.blocks.items():
                # Laid out on the device: of what is in one piece there, the link carries a copy at its full rate.
                block.view(kept.memory).copy_(states[name].contiguous(), non_blocking=pin)
            if pin:
                torch.cuda.current_stream().synchronize()
        except BaseException:
            kept.close()
            raise
        return kept

    @property
    def memory(self) -> Tensor:
        """All of it, uint8 ``[nbytes]``."""
        return self._arena.memory[: self.nbytes]

    @property
    def pinned(self) -> bool:
        return self._arena.pinned

    def head(self, length: int) -> "KVSnapshot":
        """Its first `length` positions only, in the same memory."""
        part = copy(self)
        part.length = length
        return part

    def put(self, layers: Sequence[FixedLayer], device: torch.device) -> None:
        """Add it to `layers`, which hold exactly the positions before it. The copies are ordered before whatever the
        current stream computes next; it must not be closed until that has run."""
        for index, layer in enumerate(layers):
            # Whole, as the link likes it, and cut on the device.
            states = (self.blocks[f"{index}.{half}"].view(self.memory) for half in HALVES)
            keys, values = (part.to(device, non_blocking=True)[:, :, : self.length] for part in states)
            layer.update(keys, values)

    def fits(self, layers: int, batch_size: int) -> bool:
        """Whether it is of `batch_size` sequences and of a model of so many layers."""
        return len(self.blocks) == 2 * layers and all(block.shape[0] == batch_size for block in self.blocks.values())

    def close(self) -> None:
        """Free the memory, once no copy from it is under way."""
        if self._arena.pinned:
            torch.cuda.synchronize()
        self._arena.close()


def _end_to_end(states: Mapping[str, Tensor]) -> dict[str, Block]:
    """Blocks without gaps, as safetensors wants its data; every tensor is of one type, so that all are aligned."""

    def laid_out() -> Iterator[tuple[str, Block]]:
        end = 0
        for name, tensor in states.items():
            block = Block(end, tensor.shape, tensor.dtype)
            end += block.size
            yield name, block

    return dict(laid_out())
