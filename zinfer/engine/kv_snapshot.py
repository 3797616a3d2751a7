"""KV snapshots: keys and values of a conversation, kept in host memory, from which a later prefill continues.

To prefill a position takes a pass through the whole model; to copy it back takes only its keys and values. They lie
layer by layer in one block of exactly their size. The layout does not depend on the engine: an engine can continue from
a snapshot that another one made.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zinfer.engine.pinned import PinnedArena, TensorPlace

if TYPE_CHECKING:  # transformers takes seconds to import, and every engine imports this
    from zinfer.engine.cache import FixedLayer

HALVES = ("keys", "values")


class KVSnapshot:
    """Keys and values of a batch for `length` positions from `first` on: ``[B, kv_heads, length, head_dim]`` each, for
    every decoder layer, in page-locked memory if `pin`, until it is closed."""

    def __init__(self, first: int, blocks: Mapping[str, TensorPlace], pin: bool) -> None:
        self.first, self.blocks = first, blocks
        self.length: int = next(iter(blocks.values())).shape[2]
        self.nbytes = sum(block.size for block in blocks.values())
        self._arena = PinnedArena(self.nbytes, pin)

    @classmethod
    def of(cls, layers: "Sequence[FixedLayer]", first: int, last: int, pin: bool) -> "KVSnapshot":
        """Copy the positions from `first` to `last` (exclusive) out of `layers`; the copy is complete on return.

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
                # Made contiguous on the device: the link copies one contiguous piece at its full rate.
                block.view(kept.memory).copy_(states[name].contiguous(), non_blocking=pin)
            if pin:
                torch.cuda.current_stream().synchronize()
        except BaseException:
            kept.close()
            raise
        return kept

    @property
    def memory(self) -> Tensor:
        """All bytes of the snapshot, uint8 ``[nbytes]``."""
        return self._arena.memory[: self.nbytes]

    @property
    def pinned(self) -> bool:
        return self._arena.pinned

    def head(self, length: int) -> "KVSnapshot":
        """Return a snapshot of the first `length` positions only, in the same memory."""
        part = copy(self)
        part.length = length
        return part

    def put(self, layers: "Sequence[FixedLayer]", device: torch.device) -> None:
        """Append the snapshot to `layers`, which hold exactly the positions before it.

        The copies run on the current stream, before its next work; the snapshot must not be closed until they have run.
        """
        for index, layer in enumerate(layers):
            # Copied whole, which the link does at its full rate, and cut on the device.
            states = (self.blocks[f"{index}.{half}"].view(self.memory) for half in HALVES)
            keys, values = (part.to(device, non_blocking=True)[:, :, : self.length] for part in states)
            layer.update(keys, values)

    def fits(self, layers: int, batch_size: int) -> bool:
        """Tell whether the snapshot has `batch_size` sequences and comes from a model of `layers` decoder layers."""
        return len(self.blocks) == 2 * layers and all(block.shape[0] == batch_size for block in self.blocks.values())

    def close(self) -> None:
        """Free the memory, once no copy from it is under way."""
        if self._arena.pinned:
            torch.cuda.synchronize()
        self._arena.close()


def _end_to_end(states: Mapping[str, Tensor]) -> dict[str, TensorPlace]:
    """Return blocks without gaps, as safetensors requires; all tensors have one type, so that all are aligned."""

    def laid_out() -> Iterator[tuple[str, TensorPlace]]:
        end = 0
        for name, tensor in states.items():
            block = TensorPlace(end, tensor.shape, tensor.dtype)
            end += block.size
            yield name, block

    return dict(laid_out())
