"""Source of weights off the device: packed layers, and the bytes of their chunks.

They lie in host memory, of this process or of all ranks together (`MemorySource`), or in files of which host memory
keeps a part (`zinfer.engine.stream.weights.disk.DiskSource`). The ring reads any of them alike.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from zinfer.core.progress import Progress, silent
from zinfer.engine.pinned import PinnedArena
from zinfer.engine.stream.trace import Reads
from zinfer.engine.stream.weights.chunk import Chunk, PackedLayer
from zinfer.engine.stream.weights.packed_experts import PackedExperts
from zinfer.engine.stream.weights.queues import Event


class WeightSource(Protocol):
    """Packed layers, and the bytes of their chunks in host memory. Chunks on disk come in the order that `begin` names,
    and are given back one by one."""

    @property
    def layers(self) -> Sequence[PackedLayer]: ...
    @property
    def experts(self) -> Mapping[int, PackedExperts]: ...  # those that come on demand, by layer
    def get(self, chunk: Chunk, /) -> Tensor: ...  # waits for a chunk's bytes, uint8; of disk, valid until `release`
    def ready(self, chunk: Chunk, /) -> bool: ...  # tells whether `get` returns at once
    def on_disk(self, chunk: Chunk, /) -> bool: ...  # tells whether host memory does not keep a chunk
    def begin(self, chunks: Iterable[Chunk], /) -> None: ...  # reads chunks ahead, from disk, in this order
    def release(self, last: Event | None = None, /) -> None: ...  # gives the latest chunk back once `last` is passed
    def stop(self) -> None: ...  # reads no more; the device must have read its chunks
    @property
    def host_layers(self) -> tuple[int, ...]: ...  # layers on disk that host memory keeps
    def keep(self, layers: Iterable[int], progress: Progress, /) -> None: ...  # makes host memory keep these
    def reads(self) -> Reads: ...  # the latest reads from disk
    @property
    def host_bytes(self) -> int: ...  # bytes of layers in host memory
    @property
    def pinned_bytes(self) -> int: ...  # page-locked bytes of host memory
    @property
    def file_bytes(self) -> int: ...
    @property
    def settings(self) -> dict[str, Any]: ...  # for the record
    def close(self) -> None: ...  # the ring must be closed before


class MemorySource:
    """Weights in the memory of `arena`, which goes with it."""

    host_layers = ()
    file_bytes = 0

    def __init__(
        self,
        arena: PinnedArena,
        layers: Sequence[PackedLayer],
        experts: Mapping[int, PackedExperts] | None = None,
    ) -> None:
        self.layers, self.experts, self.memory = layers, experts or {}, arena.memory
        self._arena = arena

    def get(self, chunk: Chunk) -> Tensor:
        return self.memory[chunk.start : chunk.end]

    def ready(self, _chunk: Chunk) -> bool:
        return True

    def on_disk(self, _chunk: Chunk) -> bool:
        return False

    def begin(self, _chunks: Iterable[Chunk]) -> None: ...
    def release(self, _last: Event | None = None) -> None: ...
    def stop(self) -> None: ...
    def keep(self, _layers: Iterable[int], _progress: Progress = silent) -> None: ...

    def reads(self) -> Reads:
        return ()

    @property
    def host_bytes(self) -> int:
        return self._arena.size

    @property
    def pinned_bytes(self) -> int:
        return self._arena.size if self._arena.pinned else 0

    @property
    def settings(self) -> dict[str, Any]:
        return {"numa_node": self._arena.numa_node}

    def lock(self) -> None:
        """Page-lock the memory for the GPU of this process. Raises MemoryError where the driver refuses."""
        self._arena.lock()

    def close(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        self._arena.close()
