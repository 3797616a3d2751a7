"""Load of the weights off the device, and their ring.

Layers come from the checkpoint (`zinfer.engine.stream.weights.pack`) or from the folder of `zinfer pack`, into an arena
of host memory, of this process or of all ranks together, or into files. Layers that stay on the device with every batch
lie there alone.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from zinfer.checkpoint.source import revision_of
from zinfer.core.engine import StreamOptions
from zinfer.core.progress import Progress
from zinfer.engine.decoder import offload_folder
from zinfer.engine.direct import StripedFile, StripedWriter
from zinfer.engine.pinned import PAGE, PinnedArena, check_free
from zinfer.engine.state import ModelState
from zinfer.engine.stream.weights import disk, packed
from zinfer.engine.stream.weights.chunk import LayerMemory, PackedLayer
from zinfer.engine.stream.weights.disk import DiskSource
from zinfer.engine.stream.weights.gather import GatherRing, parts_of_rank
from zinfer.engine.stream.weights.pack import Packing, copy_into
from zinfer.engine.stream.weights.packed_experts import Experts, PackedExperts, padding
from zinfer.engine.stream.weights.ring import PrefetchRing
from zinfer.engine.stream.weights.source import MemorySource, WeightSource
from zinfer.plan.planner import Plan
from zinfer.system.host import drives

if TYPE_CHECKING:
    from zinfer.engine.ranks import Group

DEPTH = 2  # buffers of a new ring; prefill makes it deeper


class _ResidentLayer(NamedTuple):
    """Message of a group's leader: all ranks get a resident layer's bytes."""

    number: int
    layer: PackedLayer
    size: int  # bytes


class Loader:
    """Load of the layers as `plan` and `options` say. `experts` come on demand, by layer. The leader of a `group` loads
    the arena, and the other ranks map it."""

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
        self._plan, self._device, self._progress, self._group = plan, device, progress, group
        self._state, self._pin, lossless = state, device.type == "cuda", plan.placement.codec == "lossless"
        self._packing = Packing(state, lossless, device, progress, experts, plan.placement.gpus)
        self._staying = frozenset(plan.placement.resident_layers if plan.placement.moved else ())
        self._resident: dict[int, Tensor] = {}  # bytes of these layers, on the device
        self._resident_bytes = 0  # of all ranks together
        self._folder: Path | None = None  # of packed layers that serve
        spec, case = plan.model, plan.case
        if case.load_format != "dummy" and lossless and not experts:  # packed layers hold their experts
            revision = revision_of(spec, case.load_format)
            self._folder = packed.find(spec, revision, options.packed, case.allow_nan, progress)

    def load(self, resident: Mapping[str, Tensor]) -> tuple[WeightSource, PrefetchRing, int | None]:
        """Load the layers, and other weights into `resident`. Returns source and ring, and the bytes read, if packed
        ones were. Raises EngineError, CheckpointError, OSError, and MemoryError where host memory is too small."""
        source: WeightSource
        with ExitStack() as owned:
            if self._plan.case.offload == "nvme":
                source = self._in_files(resident, owned)
            elif self._group is None:
                source = MemorySource(*self._in_memory(resident, owned))
            else:
                source = self._shared(self._group, resident, owned)
            owned.callback(source.close)
            if self._group is None:
                ring = PrefetchRing(source, DEPTH, self._device)
            else:
                ring = GatherRing(source, DEPTH, self._device, self._group)
            ring.hold(self._plan.placement.host_layers, self._progress)
            for index in sorted(self._resident):
                ring.keep_only(index, self._resident.pop(index))
            owned.pop_all()
        size = source.host_bytes + self._resident_bytes + self._plan.model.other_bytes
        return source, ring, None if self._folder is None else size

    def _in_memory(
        self, resident: Mapping[str, Tensor], owned: ExitStack
    ) -> tuple[PinnedArena, list[PackedLayer], dict[int, PackedExperts]]:
        """Load streamed layers into an arena, resident ones onto the device."""
        count, group = len(self._state.layers), self._group
        size = sum(self._packing.unpacked_bytes(number) for number in range(count) if number not in self._staying)
        size += PAGE * count  # what `lock_taken` leaves out between layers
        for experts in self._packing.experts.values():
            size += sum(entry.tensor.nbytes for entry in experts.weights.values()) + padding(experts)
        shared = None if group is None else group.weights  # all ranks lock it later
        arena = PinnedArena(size, self._pin and group is None, self._progress, grow=True, shared=shared)
        owned.callback(arena.close)
        device = torch.device("cpu") if self._folder is not None else self._device

        def memory_of(number: int) -> LayerMemory | PinnedArena:
            return LayerMemory(device) if number in self._staying else arena

        packed_layers: Iterator[tuple[int, PackedLayer, PackedExperts | None, LayerMemory | PinnedArena]]
        if self._folder is None:
            check_free(round(size * self._plan.placement.wire_ratio))
            packed_layers = self._packing.layers(memory_of, resident)
        else:
            packed_layers = packed.read(self._folder, self._state, memory_of, self._progress)
        layers, on_demand = dict[int, PackedLayer](), dict[int, PackedExperts]()
        for number, layer, packed_experts, memory in packed_layers:
            layers[number] = layer
            arena.lock_taken()
            if packed_experts is not None:
                on_demand[number] = packed_experts
            if isinstance(memory, LayerMemory):
                self._keep(number, layer, memory.whole().to(self._device))
        self._load_others(resident)
        arena.seal()
        return arena, [layers[number] for number in range(count)], on_demand

    def _shared(self, group: "Group", resident: Mapping[str, Tensor], owned: ExitStack) -> MemorySource:
        """Load as a group's leader, or get the layers from it."""
        group.agree()
        group.join()
        if group.rank == 0:
            arena, layers, _ = self._in_memory(resident, owned)
            group.share((layers, arena.size))
        else:
            while isinstance(message := group.share(None), _ResidentLayer):
                content = torch.empty(message.size, dtype=torch.uint8, device=self._device)
                self._keep(message.number, message.layer, content)
            layers, size = message
            arena = PinnedArena.attach(size, group.weights)
            owned.callback(arena.close)
        if self._pin:
            arena.lock()  # all ranks at once
        group.agree()
        for name in sorted(resident):
            group.broadcast(resident[name])
        return MemorySource(arena, layers)

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

    def _in_files(self, resident: Mapping[str, Tensor], owned: ExitStack) -> DiskSource:
        """Return the layers in files: those of `zinfer pack`, or new ones."""
        if self._folder is not None:
            path, layers, sums = packed.places(self._folder, self._state)
            paths = [path]
            self._load_others(resident)
        else:
            nvme_path = self._plan.nvme_path
            paths = []
            for drive in [None] if nvme_path is None else drives(str(nvme_path)):  # None raises
                folder = offload_folder(None if drive is None else str(drive))
                owned.callback(folder.cleanup)
                paths.append(folder.path / packed.DATA)
            with StripedWriter(paths) as writer:
                layers, sums = disk.write(writer.write, self._packing.one_by_one(resident))
                writer.flush()
        files = StripedFile(paths)
        owned.callback(files.close)
        return DiskSource(files, layers, sums, self._plan.placement.disk_ring_bytes, self._pin, owned)

    def _load_others(self, resident: Mapping[str, Tensor]) -> None:
        """Load the other weights, where layers come packed from a folder."""
        if self._folder is not None:
            copy_into(resident, self._state.load(self._device, self._progress, layers=False))
