"""Source of the weights that are off the device: the layers, packed as they cross the link.

They lie in an arena of host memory, of this process or of all ranks together, or in files of which host memory keeps a
part. Layers that stay on the device with every batch lie there alone. Layers come from the checkpoint
(`zinfer.engine.stream.weights.pack`), or from the folder of `zinfer pack`.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from zinfer.checkpoint.source import revision_of
from zinfer.core.engine import StreamOptions
from zinfer.core.progress import Progress
from zinfer.engine.decoder import offload_folder
from zinfer.engine.direct import StripedFile
from zinfer.engine.pinned import PinnedArena, check_free, lay_out
from zinfer.engine.state import ModelState
from zinfer.engine.stream.weights import disk, packed
from zinfer.engine.stream.weights.chunk import LayerMemory, PackedLayer
from zinfer.engine.stream.weights.disk import DiskLayers, DiskRing
from zinfer.engine.stream.weights.gather import GatherRing, parts_of_rank
from zinfer.engine.stream.weights.pack import copy_into, dense_tensors, pack_layers
from zinfer.engine.stream.weights.packed_experts import Experts, PackedExperts, padding
from zinfer.engine.stream.weights.ring import PrefetchRing
from zinfer.plan.planner import Plan
from zinfer.system.host import drives
from zinfer.system.scratch import Scratch

if TYPE_CHECKING:
    from zinfer.engine.ranks import Group

DEPTH = 2  # buffers of a new ring; prefill makes it deeper


class _ResidentLayer(NamedTuple):
    """Message of a group's leader: all ranks get a resident layer's bytes."""

    number: int
    layer: PackedLayer
    size: int  # bytes


class LayerSource:
    """Layers off the device, as `plan` and `options` say. `experts` come on demand, by layer. With `group`, its leader
    loads the arena, and the other ranks map it."""

    arena: PinnedArena | None = None
    disk: DiskLayers | None = None
    packed_experts: dict[int, PackedExperts]
    from_folder = False  # layers are read as `zinfer pack` stored them
    _folders: tuple[Scratch, ...] = ()  # files of layers, written for this process alone, one a drive

    def __init__(
        self,
        plan: Plan,
        options: StreamOptions,
        state: ModelState,
        experts: Mapping[int, Experts],
        device: torch.device,
        progress: Progress,
        group: "Group | None" = None,
    ) -> None:
        self._plan, self._options, self._device, self._progress, self._group = plan, options, device, progress, group
        self._state, self._experts = state, experts
        self.packed_experts = {}
        self._staying = frozenset(plan.placement.resident_layers if plan.placement.moved else ())
        self._resident: dict[int, Tensor] = {}  # their bytes, on the device, until the ring has them
        self._resident_bytes = 0  # of all ranks together

    @property
    def lossless(self) -> bool:
        """True if weights are encoded where that shrinks them."""
        return self._plan.placement.codec == "lossless"

    def load(self, resident: Mapping[str, Tensor]) -> PrefetchRing:
        """Load the layers, and other weights into `resident`; return the ring. Raises EngineError, CheckpointError,
        OSError, and MemoryError where host memory is too small."""
        ring: PrefetchRing
        if self._plan.case.offload == "nvme":
            self.disk = self._in_files(resident)
            ring = disk_ring = DiskRing(self.disk, DEPTH, self._device)
            disk_ring.hold(self._plan.placement.host_layers, self._progress)
        else:
            layers = self._in_memory(resident) if self._group is None else self._shared(self._group, resident)
            assert self.arena is not None
            make = PrefetchRing if self._group is None else partial(GatherRing, ranks=self._group)
            ring = make(self.arena.memory, layers, DEPTH, self._device)
        for index in sorted(self._resident):
            ring.keep_only(index, self._resident.pop(index))
        del self._state, self._experts  # the engine alone keeps the model
        return ring

    @property
    def loaded_bytes(self) -> int | None:
        """Bytes read from a folder of packed layers, other weights included. None for other loads."""
        if not self.from_folder:
            return None
        return self.host_bytes + self._resident_bytes + self._plan.model.other_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of the layers in host memory."""
        if self.disk is not None:
            return self.disk.kept_bytes
        return 0 if self.arena is None else self.arena.size

    @property
    def pinned_bytes(self) -> int:
        """Page-locked bytes of host memory."""
        if self.disk is not None:
            return self.disk.pinned_bytes
        return self.arena.size if self.arena is not None and self.arena.pinned else 0

    def settings(self) -> dict[str, Any]:
        """Return where the layers are, for the record."""
        settings: dict[str, Any] = {
            "weight_codec": "lossless" if self.lossless else "none",
            "numa_node": None if self.arena is None else self.arena.numa_node,
        }
        if self.disk is not None:
            settings |= {
                "host_layers": len(self.disk.host_layers),
                "disk_ring_bytes": self.disk.ring_bytes,
                "disk_reads": "direct" if self.disk.direct else "buffered: the file system refuses direct ones",
            }
        return settings

    def close(self) -> None:
        """Give memory and files back; the ring must be closed before."""
        if self.arena is not None:
            self.arena.close()
            self.arena = None
        for folder in self._folders:
            folder.cleanup()
        self._folders = ()

    def _in_memory(self, resident: Mapping[str, Tensor]) -> list[PackedLayer]:
        """Load streamed layers into an arena, resident ones onto the device."""
        count, pin = len(self._state.layers), self._device.type == "cuda" and self._group is None
        size = sum(self._unpacked_bytes(number) for number in range(count) if number not in self._staying)
        for experts in self._experts.values():
            size += sum(entry.tensor.nbytes for entry in experts.weights.values()) + padding(experts)
        shared = None if self._group is None else self._group.weights  # all ranks lock it later
        self.arena = arena = PinnedArena(size, pin, self._progress, grow=True, shared=shared)
        folder = self._folder()
        self.from_folder = folder is not None
        if folder is None:
            check_free(round(size * self._plan.placement.wire_ratio))
            packed_layers = self._pack(resident, self._memory_of)
        else:
            packed_layers = packed.read(folder, self._state, self._memory_of, self._progress)
        layers: dict[int, PackedLayer] = {}
        for number, layer, packed_experts, memory in packed_layers:
            layers[number] = layer
            if packed_experts is not None:
                self.packed_experts[number] = packed_experts
            if isinstance(memory, LayerMemory):
                self._keep(number, layer, memory.whole().to(self._device))
        if folder is not None:
            copy_into(resident, self._state.load(self._device, self._progress, layers=False))
        arena.seal()
        return [layers[number] for number in range(count)]

    def _memory_of(self, number: int) -> LayerMemory | PinnedArena:
        assert self.arena is not None
        if number not in self._staying:
            return self.arena
        return LayerMemory(torch.device("cpu") if self.from_folder else self._device)

    def _pack(
        self, resident: Mapping[str, Tensor], memory_of: Any
    ) -> Iterator[tuple[int, PackedLayer, PackedExperts | None, Any]]:
        gpus = self._plan.placement.gpus
        return pack_layers(
            self._state, self.lossless, self._device, memory_of, resident, self._progress, self._experts, gpus
        )

    def _shared(self, group: "Group", resident: Mapping[str, Tensor]) -> list[PackedLayer]:
        """Load as a group's leader, or get the layers from it."""
        layers: list[PackedLayer]
        group.agree()
        group.join()
        if group.rank == 0:
            layers = self._in_memory(resident)
            assert self.arena is not None
            group.share((layers, self.arena.size))
        else:
            while isinstance(message := group.share(None), _ResidentLayer):
                content = torch.empty(message.size, dtype=torch.uint8, device=self._device)
                self._keep(message.number, message.layer, content)
            layers, size = message
            self.arena = PinnedArena.attach(size, group.weights)
        if self._device.type == "cuda":
            self.arena.lock()  # all ranks at once
        group.agree()
        for name in sorted(resident):
            group.broadcast(resident[name])
        return layers

    def _keep(self, number: int, layer: PackedLayer, content: Tensor) -> None:
        """Keep a resident layer: its bytes, or this rank's part of them. The leader of a group gives all ranks its
        `content`."""
        group = self._group
        self._resident_bytes += content.numel()
        if group is not None:
            if group.rank == 0:
                group.share(_ResidentLayer(number, layer, content.numel()))
            with group.undivided():
                group.broadcast(content)
                content = torch.cat(parts_of_rank(layer, content, group.rank, group.size))
        self._resident[number] = content

    def _in_files(self, resident: Mapping[str, Tensor]) -> DiskLayers:
        """Return the layers in files: those of `zinfer pack`, or new ones."""
        folder = self._folder()
        self.from_folder = folder is not None
        if folder is not None:
            path, layers, sums = packed.places(folder, self._state)
            paths = [path]
            copy_into(resident, self._state.load(self._device, self._progress, layers=False))
        else:
            if self._plan.nvme_path is None:
                offload_folder(None)  # raises
            for drive in drives(str(self._plan.nvme_path)):
                self._folders = (*self._folders, offload_folder(str(drive)))
            paths = [folder.path / packed.DATA for folder in self._folders]
            layers, sums = disk.write(paths, self._one_by_one(resident))
        ring_bytes, pin = self._plan.placement.disk_ring_bytes, self._device.type == "cuda"
        files = StripedFile(paths)
        try:
            return DiskLayers(files, layers, sums, ring_bytes, pin)
        except BaseException:
            files.close()
            raise

    def _one_by_one(self, resident: Mapping[str, Tensor]) -> Iterator[tuple[int, PackedLayer, Tensor]]:
        """Yield each layer's number, its places from byte 0 on, its bytes."""

        def memory_of(number: int) -> PinnedArena:
            return PinnedArena(self._unpacked_bytes(number), pin=False, grow=True)

        for number, layer, _, arena in self._pack(resident, memory_of):
            yield number, layer, arena.memory
            arena.close()

    def _unpacked_bytes(self, number: int) -> int:
        return lay_out(dense_tensors(self._state.of_layer(number), self._experts.get(number)))[1]

    def _folder(self) -> Path | None:
        """Return the folder of packed layers; None if none serves."""
        spec, case = self._plan.model, self._plan.case
        if case.load_format == "dummy" or not self.lossless or self._experts:  # packed layers hold their experts
            return None
        revision = revision_of(spec, case.load_format)
        return packed.find(spec, revision, self._options.packed, case.allow_nan, self._progress)
