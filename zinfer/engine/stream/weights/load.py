"""Load of the weights off the device, and their ring.

Layers come from the checkpoint (`zinfer.engine.stream.weights.pack`) or from the folder of `zinfer pack`, into an arena
of host memory, of this process or of all ranks together, or into files. Layers that stay on the device with every batch
lie there alone.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from zinfer.checkpoint.source import revision_of
from zinfer.core.engine import StreamOptions
from zinfer.core.progress import Progress
from zinfer.engine.decoder import offload_folder
from zinfer.engine.direct import DirectFile, DirectWriter
from zinfer.engine.late import Late, Publish
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
from zinfer.plan.bytes import Placement, Tiers
from zinfer.plan.planner import Plan
from zinfer.system.host import available_bytes

if TYPE_CHECKING:
    from zinfer.engine.ranks import Group

DEPTH = 2  # buffers of a new ring; prefill makes it deeper
CODED_LAYERS = 3  # layers, uncoded, whose room coding takes at most: one that comes, and a few streams of its codes


class _ResidentLayer(NamedTuple):
    """Message of a group's leader: all ranks get a resident layer's bytes."""

    number: int
    layer: PackedLayer
    size: int  # bytes


class Loader:
    """Load of the layers as `plan` and `options` say. `experts` come on demand, by layer. The leader of a `group` loads
    the arena, and the other ranks map it. With `early` a thread goes on loading layers into the memory of the host, of
    one process, once the first one is there; others, and a model whose experts come on demand, load whole."""

    def __init__(
        self,
        plan: Plan,
        options: StreamOptions,
        state: ModelState,
        experts: Mapping[int, Experts],
        device: torch.device,
        progress: Progress,
        group: "Group | None" = None,
        early: bool = False,
    ) -> None:
        self._plan, self._device, self._progress, self._group = plan, device, progress, group
        self._early = early and group is None and plan.case.offload == "cpu" and not experts
        self.late: Late[PackedLayer] | None = None  # layers that a thread loads, or has loaded
        self.loading = self._early  # until `finish`
        state = state.with_own_model() if self._early else state
        self._state, self._pin, lossless = state, device.type == "cuda", plan.placement.codec == "lossless"
        plain = plan.placement.cpu_tokens > 0  # the CPU reads experts as released
        self._packing = Packing(state, lossless, device, progress, experts, plan.placement.gpus, plain)
        moved = plan.placement.moved
        self._staying = frozenset(plan.placement.resident_layers if moved else ())
        self._staying_experts = frozenset(plan.placement.expert_layers if moved else ())
        self._resident: dict[int, Tensor] = {}  # bytes of these layers, on the device
        self.experts: dict[int, Tensor] = {}  # bytes of the experts that stay, on the device, by layer
        self._resident_bytes = 0  # of all ranks together
        self._memory: PinnedArena | None = None
        self._folder: Path | None = None  # of packed layers that serve
        spec, case = plan.model, plan.case
        if case.load_format != "dummy" and lossless and not experts:  # packed layers hold their experts
            revision = revision_of(spec, case.load_format)
            self._folder = packed.find(spec, revision, options.packed, case.allow_nan, progress)

    def load(self, resident: Mapping[str, Tensor]) -> tuple[WeightSource, PrefetchRing]:
        """Load the layers, and other weights into `resident`; return source and ring. `keep` gives it the layers that
        stay. Raises EngineError, CheckpointError, OSError, and MemoryError where host memory is too small."""
        source: WeightSource
        with ExitStack() as owned:
            if self._plan.case.offload == "nvme":
                source = self._in_files(resident, owned)
            elif self._group is None:
                source = self._in_memory(resident, owned)
            else:
                source = self._shared(self._group, resident, owned)
            owned.callback(source.close)
            if self._group is None:
                ring = PrefetchRing(source, DEPTH, self._device)
            else:
                ring = GatherRing(source, DEPTH, self._device, self._group)
            ring.hold(self._plan.placement.host_layers, self._progress)
            owned.pop_all()
        return source, ring

    def keep(self, ring: PrefetchRing, index: int) -> None:
        """Give the ring a loaded layer that stays on the device alone."""
        if index in self._resident:
            ring.keep_only(index, self._resident.pop(index))

    def has_room(self, tiers: Tiers, placement: Placement) -> bool:
        """Tell whether work of these `tiers` fits while layers load. Of its `placement` layers that also
        lie in host memory are not on the GPU yet, where coding needs room, and host memory has to hold the rest."""
        stay = sum(map(self._packing.unpacked_bytes, set(placement.resident_layers) - self._staying))
        needed, on_gpu = tiers.host.total, tiers.gpu.total - round(stay * placement.wire_ratio)
        if self._device.type != "cuda":
            needed += on_gpu
        elif on_gpu + CODED_LAYERS * self._largest > self._plan.machine.device_bytes:
            return False
        return needed - (0 if self._memory is None else self._memory.used) <= available_bytes()

    @property
    def _largest(self) -> int:
        """Bytes of the largest layer, uncoded."""
        return max(map(self._packing.unpacked_bytes, range(len(self._state.layers))))

    def finish(self, ring: PrefetchRing) -> None:
        """Wait for the end of the load; give all layers their places. Raises what the load raises."""
        assert self.late is not None
        self.late.join()
        for number in range(len(self.late)):
            ring.arrive(number)
        ring.loaded()
        self.loading = False

    def folder_bytes(self, source: WeightSource) -> int | None:
        """Return the bytes read, if packed layers were."""
        size = source.host_bytes + self._resident_bytes + self._plan.model.other_bytes
        return None if self._folder is None else size

    def _in_memory(self, resident: Mapping[str, Tensor], owned: ExitStack) -> MemorySource:
        """Load streamed layers into an arena, resident ones onto the device."""
        arena = self._arena(owned)
        if not self._early:
            return MemorySource(arena, *self._fill(arena, resident))
        count, load = len(self._state.layers), partial(self._fill, arena, resident)
        self.late = Late(count, load, self._device, self._progress)
        owned.callback(self.late.stop)
        _ = self.late[0]  # weights outside the layers came before
        source = MemorySource(arena, self.late)
        source.late_bytes = self._largest
        return source

    def _arena(self, owned: ExitStack) -> PinnedArena:
        """Make the arena, of the bytes of streamed layers uncoded."""
        count, group = len(self._state.layers), self._group
        size = sum(self._packing.unpacked_bytes(number) for number in range(count) if number not in self._staying)
        size += PAGE * count  # what `lock_taken` leaves out between layers
        for number, experts in self._packing.experts.items():
            if number not in self._staying_experts:
                size += sum(entry.tensor.nbytes for entry in experts.weights.values()) + padding(experts)
        shared = None if group is None else group.weights  # all ranks lock it later
        arena = PinnedArena(size, self._pin and group is None, self._progress, grow=True, shared=shared)
        owned.callback(arena.close)
        self._memory = arena
        return arena

    def _fill(
        self,
        arena: PinnedArena,
        resident: Mapping[str, Tensor],
        publish: Publish[PackedLayer] = lambda _number, _layer: None,
        progress: Progress | None = None,
    ) -> tuple[list[PackedLayer], dict[int, PackedExperts]]:
        """Load all layers into the arena, or to where they stay; `publish` each. `progress` may end the load."""
        count, progress = len(self._state.layers), progress or self._progress
        device = torch.device("cpu") if self._folder is not None else self._device

        apart = dict[int, LayerMemory]()  # memory of experts that stay

        def memory_of(number: int) -> tuple[LayerMemory | PinnedArena, LayerMemory | PinnedArena]:
            if number in self._staying_experts:
                apart[number] = LayerMemory(device)
            return LayerMemory(device) if number in self._staying else arena, apart.get(number, arena)

        if self._folder is None:
            check_free(round(arena.size * self._plan.placement.wire_ratio))
            packed_layers = replace(self._packing, progress=progress).layers(memory_of, resident)
        else:
            self._load_others(resident)
            packed_layers = packed.read(self._folder, self._state, memory_of, progress)
        layers, on_demand = dict[int, PackedLayer](), dict[int, PackedExperts]()
        for number, layer, packed_experts, memory in packed_layers:
            layers[number] = layer
            arena.lock_taken()
            if packed_experts is not None:
                on_demand[number] = packed_experts
            if number in apart:
                self.experts[number] = apart.pop(number).whole()
            if isinstance(memory, LayerMemory):
                self._keep(number, layer, memory.whole().to(self._device))
            publish(number, layer)
        arena.seal()
        return [layers[number] for number in range(count)], on_demand

    def _shared(self, group: "Group", resident: Mapping[str, Tensor], owned: ExitStack) -> MemorySource:
        """Load as a group's leader, or get the layers from it."""
        group.agree()
        group.join()
        if group.rank == 0:
            arena = self._arena(owned)
            layers, _ = self._fill(arena, resident)
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
        """Keep a resident layer's bytes, or this rank's part of them. A group's leader gives all ranks `content`."""
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
            self._load_others(resident)
        else:
            folder = offload_folder(self._plan.nvme_path)
            owned.callback(folder.cleanup)
            path = folder.path / packed.DATA
            with DirectWriter(path) as writer:
                layers, sums = disk.write(writer.write, self._packing.one_by_one(resident))
                writer.flush()
        files = DirectFile(path)
        owned.callback(files.close)
        return DiskSource(files, layers, sums, self._plan.placement.disk_ring_bytes, self._pin, owned)

    def _load_others(self, resident: Mapping[str, Tensor]) -> None:
        """Load the other weights, where layers come packed from a folder."""
        copy_into(resident, self._state.load(self._device, self._progress, layers=False))
