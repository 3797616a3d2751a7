"""Source of weights off the device: packed layers, and the bytes of their chunks.

They lie in host memory, of this process or of all ranks together (`MemorySource`), or in files of which host memory
keeps a part (`zinfer.engine.stream.weights.disk.DiskSource`). The ring reads any of them alike.
"""

# ruff: noqa: B027 - what only a source on disk has to do is nothing here

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zinfer.core.progress import Progress, silent
from zinfer.engine.late import Late
from zinfer.engine.pinned import PinnedArena
from zinfer.engine.stream.trace import Reads
from zinfer.engine.stream.weights.chunk import Chunk, PackedLayer
from zinfer.engine.stream.weights.packed_experts import PackedExperts
from zinfer.engine.stream.weights.queues import PASSED, Event


class WeightSource(ABC):
    """Packed layers, and the bytes of their chunks; `experts` come on demand, by layer. Nothing of it is on disk,
    unless a subclass says so. Chunks on disk come in the order that `begin` names, and are given back one by one."""

    host_bytes = pinned_bytes = 0  # bytes of layers in host memory; its page-locked bytes
    file_bytes = 0
    late_bytes = 0  # of the largest layer, unpacked, if layers may still be loading
    host_layers: tuple[int, ...] = ()  # layers on disk that host memory keeps

    def __init__(
        self, layers: Sequence[PackedLayer] | Late[PackedLayer], experts: Mapping[int, PackedExperts] | None = None
    ) -> None:
        self.layers, self.experts = layers, experts or {}
        self.late = layers if isinstance(layers, Late) else None  # layers that may still be loading

    def count_bytes(self) -> None:
        """Count the bytes of layers that were late."""

    @abstractmethod
    def get(self, chunk: Chunk) -> Tensor:
        """Wait for a chunk's bytes, uint8. Those of a chunk on disk are valid until `release`."""

    def on_disk(self, _chunk: Chunk) -> bool:
        """Tell whether host memory does not keep a chunk."""
        return False

    def ready(self, _chunk: Chunk) -> bool:
        """Tell whether `get` returns at once."""
        return True

    def begin(self, chunks: Iterable[Chunk]) -> None:
        """Read `chunks` ahead from disk, in this order."""

    def release(self, last: Event = PASSED) -> None:
        """Give the latest chunk back once `last` is passed."""

    def stop(self) -> None:
        """Read no more. The device must have read its chunks."""

    def keep(self, layers: Iterable[int], progress: Progress = silent) -> None:
        """Keep `layers`, and no others, in host memory."""

    def reads(self) -> Reads:
        """Return layer, begin and end of the latest reads from disk."""
        return ()

    @property
    def settings(self) -> dict[str, Any]:
        """Place of the layers, for the record."""
        return {}

    def close(self) -> None:
        """Give memory and files back; the ring must be closed before."""


class MemorySource(WeightSource):
    """Weights in the memory of `arena`, which goes with it. It is filled, but for late layers."""

    def __init__(
        self,
        arena: PinnedArena,
        layers: Sequence[PackedLayer] | Late[PackedLayer],
        experts: Mapping[int, PackedExperts] | None = None,
    ) -> None:
        super().__init__(layers, experts)
        self.memory, self._arena = arena.memory, arena
        self.count_bytes()

    def count_bytes(self) -> None:
        self.host_bytes = self._arena.size
        self.pinned_bytes = self.host_bytes if self._arena.pinned else 0

    def get(self, chunk: Chunk) -> Tensor:
        return self.memory[chunk.start : chunk.end]

    def close(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        self._arena.close()
