"""Source of a pass: the weights of the layers off the device, packed as they cross the link.

They lie in an arena of host memory, of this process or of all ranks together, or in files of which host memory keeps a
part. Layers that stay on the device with every batch lie there alone. Layers come from the checkpoint, stored layer by
layer there or not, or from the folder of `zinfer pack`. Of a layer whose experts come on demand, each expert is packed
apart.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from zinfer.checkpoint.source import revision_of
from zinfer.core.engine import StreamOptions
from zinfer.core.progress import Progress
from zinfer.engine import EngineError
from zinfer.engine.decoder import offload_folder
from zinfer.engine.direct import StripedFile
from zinfer.engine.pinned import PinnedArena, check_free, lay_out
from zinfer.engine.quantization.dequantize import Codes
from zinfer.engine.state import Entry, Loaded, ModelState, by_layer
from zinfer.engine.stream import disk, packed
from zinfer.engine.stream.disk import DiskLayers, DiskRing
from zinfer.engine.stream.expert_images import (
    Experts,
    LayerImages,
    fill_plain,
    pack_experts,
    padding,
    plain_experts,
)
from zinfer.engine.stream.gather import GatherRing, own_parts
from zinfer.engine.stream.packed_layer import LayerMemory, PackedLayer, pack, plain
from zinfer.engine.stream.prefetch import PrefetchRing
from zinfer.plan.planner import Plan
from zinfer.system.host import drives
from zinfer.system.scratch import Scratch

if TYPE_CHECKING:
    from zinfer.engine.ranks import Group

DEPTH = 2  # buffers of a new ring; prefill makes it deeper


class _Staying(NamedTuple):
    """Word of the leader of a group that it gives all ranks the bytes of a layer that stays."""

    layer: int  # its number
    image: PackedLayer
    size: int  # bytes


class LayerSource:
    """Layers of `state` off the device, as `plan` and `options` say.

    `experts` are the routed ones that come on demand, by layer. With `group`, its leader loads the arena, and the other
    ranks map it.
    """

    arena: PinnedArena | None = None
    disk: DiskLayers | None = None
    expert_images: dict[int, LayerImages]
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
        self.expert_images = {}
        self._staying = frozenset(plan.placement.resident_layers if plan.placement.moved else ())
        self._kept: dict[int, Tensor] = {}  # their bytes, on the device, until the ring has them
        self._alone_bytes = 0  # of all ranks together

    @property
    def lossless(self) -> bool:
        """True if weights are encoded where that makes them smaller."""
        return self._plan.placement.codec == "lossless"

    def load(self, resident: Mapping[str, Tensor]) -> PrefetchRing:
        """Load the layers, and the weights outside of them into `resident`, by name; return the ring that brings the
        layers to the device.

        Raises EngineError, CheckpointError, OSError, and MemoryError where host memory is too small.
        """
        group = self._group
        ring: PrefetchRing
        if self._plan.case.offload == "nvme":
            self.disk = self._in_files(resident)
            ring = disk_ring = DiskRing(self.disk, DEPTH, self._device)
            disk_ring.hold(self._plan.placement.host_layers, self._progress)
        else:
            images = self._in_memory(resident) if group is None else self._shared(group, resident)
            assert self.arena is not None
            source = self.arena.memory
            if group is None:
                ring = PrefetchRing(source, images, DEPTH, self._device)
            else:
                ring = GatherRing(source, images, DEPTH, self._device, group)
        for index in sorted(self._kept):
            ring.keep_alone(index, self._kept.pop(index))
        del self._state, self._experts  # the engine alone keeps the model
        return ring

    @property
    def loaded_bytes(self) -> int | None:
        """Bytes that were read, with those of the weights outside the layers, where they came from a folder of packed
        layers; else None."""
        if not self.from_folder:
            return None
        return self.host_bytes + self._alone_bytes + self._plan.model.other_bytes

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
        found: dict[str, Any] = {"weight_codec": "lossless" if self.lossless else "none"}
        if self.disk is None:
            return found | {"numa_node": None if self.arena is None else self.arena.numa_node}
        return found | {
            "numa_node": None,
            "host_layers": len(self.disk.layers),
            "disk_ring_bytes": self.disk.ring_bytes,
            "disk_reads": "direct" if self.disk.direct else "buffered: the file system refuses direct ones",
        }

    def close(self) -> None:
        """Give memory and files back; the ring must be closed before."""
        if self.arena is not None:
            self.arena.close()
            self.arena = None
        for folder in self._folders:
            folder.cleanup()
        self._folders = ()

    def _in_memory(self, resident: Mapping[str, Tensor]) -> list[PackedLayer]:
        """Fill an arena with the layers, and `resident`; return the places of the layers."""
        return self._coded(resident) if self.lossless else self._plain(resident)

    def _shared(self, group: "Group", resident: Mapping[str, Tensor]) -> list[PackedLayer]:
        """Do as `_in_memory`, the leader of a group by loading, the others by what they get from it."""
        images: list[PackedLayer]
        group.agree()
        group.join()
        if group.rank == 0:
            images = self._in_memory(resident)
            assert self.arena is not None
            group.share((images, self.arena.size))
        else:
            while isinstance(told := group.share(None), _Staying):
                content = torch.empty(told.size, dtype=torch.uint8, device=self._device)
                self._put(told.layer, told.image, content)
            images, size = told
            self.arena = PinnedArena.attach(size, group.weights)
        if self._device.type == "cuda":
            self.arena.lock()  # all ranks at once
        group.agree()
        for name in sorted(resident):
            group.broadcast(resident[name])
        return images

    def _new_arena(self, size: int, grow: bool = False) -> PinnedArena:
        """Return an arena for the layers: that of this process, or one that all ranks share and lock later."""
        if self._group is not None:
            return PinnedArena(size, False, self._progress, grow, shared=self._group.weights)
        return PinnedArena(size, self._device.type == "cuda", self._progress, grow)

    def _plain(self, resident: Mapping[str, Tensor]) -> list[PackedLayer]:
        """Do as `_in_memory`, uncoded."""
        images: list[PackedLayer] = []
        end, gpus = 0, self._plan.placement.gpus
        for number in range(len(self._state.layers)):
            if number in self._staying:
                images.append(plain(self._layout(number), 0, gpus))
                continue
            images.append(plain(self._layout(number), end, gpus))
            end = images[-1].end
            if number in self._experts:
                self.expert_images[number], end = plain_experts(self._experts[number], end)
        self.arena = self._new_arena(end)
        staying: dict[int, Tensor] = {}  # bytes of layers that are not whole yet: a buffer may come first
        missing = {number: set(images[number].blocks) for number in self._staying}
        for index, group in by_layer(self._state, self._state.load(self._device, self._progress)):
            if index is None:
                copy_into(resident, group)
                continue
            image = images[index]
            if index in self._staying and index not in staying:
                staying[index] = torch.empty(image.end, dtype=torch.uint8, device=self._device)
            memory = staying.get(index, self.arena.memory)
            for name, tensor in group:
                if name in self._apart(index):
                    fill_plain(self.expert_images[index], name, tensor, memory)
                else:
                    image.blocks[name].view(memory, image.start).copy_(tensor)
                    missing.get(index, set()).discard(name)
            if index in staying and not missing[index]:
                self._put(index, image, staying.pop(index))
        assert not staying, "state.load yields every entry, or raises"
        return images

    def _put(self, index: int, image: PackedLayer, content: Tensor) -> None:
        """Keep a layer that stays on the device, its bytes `content` whole, or this rank's part of them: of a group the
        leader gives all ranks its `content`."""
        group = self._group
        self._alone_bytes += content.numel()
        if group is not None:
            if group.rank == 0:
                group.share(_Staying(index, image, content.numel()))
            with group.undivided():
                group.broadcast(content)
                content = torch.cat(own_parts(image, content, group.rank, group.size))
        self._kept[index] = content

    def _coded(self, resident: Mapping[str, Tensor]) -> list[PackedLayer]:
        """Do as `_in_memory`, with packed layers, from their folder if there is one."""
        state, count = self._state, len(self._state.layers)
        raw = sum(lay_out(self._layout(index))[1] for index in range(count) if index not in self._staying)
        for experts in self._experts.values():
            raw += sum(entry.tensor.nbytes for entry in experts.weights.values()) + padding(experts)
        self.arena = self._new_arena(raw, grow=True)
        folder = None if self._experts else self._folder()  # packed layers hold their experts in one piece
        self.from_folder = folder is not None
        images: dict[int, PackedLayer] = {}
        loaded: Iterator[tuple[str, Loaded]]
        if folder is None:
            check_free(round(raw * self._plan.placement.wire_ratio))
            loaded = state.load_stored(self._device, self._progress)
        else:

            def put(index: int, image: PackedLayer, content: Tensor) -> None:
                self._put(index, image, content.to(self._device))

            stay = packed.Stay(self._staying, put)
            images = dict(enumerate(packed.load(folder, state, self.arena, self._progress, stay)))
            loaded = state.load(self._device, self._progress, layers=False)
        for index, group in by_layer(state, loaded):
            if index is None:
                copy_into(resident, group)
                continue
            entries = state.of_layer(index)
            tensors, coded = packed.on_device(group, entries, self._device)
            if index in images or tensors.keys() | coded.keys() != entries.keys():
                raise EngineError(f"layer {index} is not stored in one piece: use weight_codec=none")
            apart = self._apart(index)
            memory: LayerMemory | PinnedArena = LayerMemory(self._device) if index in self._staying else self.arena
            images[index] = pack(
                {name: tensor for name, tensor in tensors.items() if name not in apart},
                memory,
                {name: one for name, one in coded.items() if name not in apart},
                self._plan.placement.gpus,
            )
            if isinstance(memory, LayerMemory):
                del tensors, coded  # its bytes are there twice while they are put together
                self._put(index, images[index], memory.whole())
                continue
            if apart:
                codes = {name: matrices for name, (_, matrices) in coded.items() if name in apart}
                self.expert_images[index] = pack_experts(self._experts[index], tensors, codes, self.arena)
        self.arena.seal()
        return [images[index] for index in range(count)]

    def _in_files(self, resident: Mapping[str, Tensor]) -> DiskLayers:
        """Return the layers in files, as `zinfer pack` stored them or newly written, and fill `resident`."""
        folder, state = self._folder() if self.lossless else None, self._state
        self.from_folder = folder is not None
        if folder is not None:
            path, images, sums = packed.places(folder, state)
            paths = [path]
            copy_into(resident, state.load(self._device, self._progress, layers=False))
        else:
            if self._plan.nvme_path is None:
                offload_folder(None)  # raises
            for drive in drives(str(self._plan.nvme_path)):
                self._folders = (*self._folders, offload_folder(str(drive)))
            paths = [folder.path / packed.DATA for folder in self._folders]
            images, sums = disk.write(paths, self._packed_one_by_one(resident))
        ring_bytes, pin = self._plan.placement.disk_ring_bytes, self._device.type == "cuda"
        files = StripedFile(paths)
        try:
            return DiskLayers(files, images, sums, ring_bytes, pin)
        except BaseException:
            files.close()
            raise

    def _packed_one_by_one(self, resident: Mapping[str, Tensor]) -> Iterator[tuple[int, PackedLayer, Tensor]]:
        """Yield the number, the places from byte 0 on and the bytes of each layer, packed as it crosses the link, and
        fill `resident`."""
        state = self._state
        tensors: dict[int, dict[str, Tensor]] = {}  # parts of layers that are not whole yet: a buffer may come first
        coded: dict[int, dict[str, tuple[Tensor, list[Codes]]]] = {}
        device = self._device if self.lossless else torch.device("cpu")
        load = state.load_stored if self.lossless else state.load
        for index, group in by_layer(state, load(device, self._progress)):
            if index is None:
                copy_into(resident, group)
                continue
            entries = state.of_layer(index)
            for parts, more in zip((tensors, coded), packed.on_device(group, entries, device), strict=True):
                parts.setdefault(index, {}).update(more)  # type: ignore[attr-defined]
            del more
            if tensors[index].keys() | coded[index].keys() == entries.keys():
                arena = PinnedArena(lay_out(self._layout(index))[1], pin=False, grow=True)
                yield index, self._pack_into(arena, index, tensors.pop(index), coded.pop(index)), arena.memory
                arena.close()

    def _pack_into(
        self,
        arena: PinnedArena,
        index: int,
        tensors: Mapping[str, Tensor],
        coded: Mapping[str, tuple[Tensor, list[Codes]]],
    ) -> PackedLayer:
        """Put the weights of a layer into an empty `arena`, as they cross the link; return their places."""
        if self.lossless:
            return pack(tensors, arena, coded)
        image = plain(self._layout(index), 0)
        arena.take(arena.size)
        for name, place in image.blocks.items():
            place.view(arena.memory).copy_(tensors[name])
        return image

    def _layout(self, index: int) -> list[tuple[str, Tensor]]:
        """Return the entries of a layer's image: names within it, and tensors that give shape and type."""
        entries = self._state.of_layer(index)
        return [(name, entry.tensor) for name, entry in entries.items() if name not in self._apart(index)]

    def _apart(self, index: int) -> Mapping[str, Entry]:
        """Return the weights of a layer's experts that come on demand, by their names within it."""
        return self._experts[index].weights if index in self._experts else {}

    def _folder(self) -> Path | None:
        """Return the folder of the checkpoint's packed layers; None if there is none."""
        spec, case = self._plan.model, self._plan.case
        if case.load_format == "dummy":
            return None
        revision = revision_of(spec, case.load_format)
        return packed.find(spec, revision, self._options.packed, case.allow_nan, self._progress)


def copy_into(resident: Mapping[str, Tensor], loaded: Iterable[tuple[str, Loaded]]) -> None:
    """Copy weights to their place on the device, by name."""
    for name, tensor in loaded:
        assert isinstance(tensor, Tensor)
        resident[name].copy_(tensor)
