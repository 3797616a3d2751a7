"""Packed layers on disk: a load reads two thirds of the bytes and encodes nothing.

A folder holds `layers.bin`, all packed layers as they lie in the arena, and `packed.json`, written last, with the place
of every tensor and a CRC-32 of every chunk. Weights outside the layers are small and still come from the checkpoint.
`packed.json` names the revision of the weights: packed layers of other weights are never used.
"""

import json
import os
import shutil
import zlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from zinfer.engine import EngineError
from zinfer.engine.pinned import PinnedArena, TensorPlace, check_free, lay_out
from zinfer.engine.read import as_bytes, fill, reading
from zinfer.engine.state import ModelState, by_layer
from zinfer.engine.stream.codec import Layout
from zinfer.engine.stream.packed_layer import Chunk, PackedLayer, pack
from zinfer.spec import atomic
from zinfer.spec.checkpoint import CheckpointError
from zinfer.spec.model import ModelSpec
from zinfer.spec.progress import Progress, silent
from zinfer.spec.units import gb

PACKED = Path("engines/packed")
DATA, INDEX = "layers.bin", "packed.json"
FORMAT = 3  # 2 had no persistent buffers
LAYERS_AHEAD = 3  # layers that are read while one is checked: a checksum takes about as long as a fast disk


def folder_name(spec: ModelSpec, revision: str) -> str:
    """Return the name of the folder of a model's packed layers under `PACKED`; it differs for other weights, types and
    slices."""
    return f"{Path(spec.name).name}-{spec.num_layers}l-{spec.dtype}-{revision}"


def write(spec: ModelSpec, revision: str, folder: Path, device: torch.device, progress: Progress = silent) -> int:
    """Pack the decoder layers of `spec`'s checkpoint, weights and persistent buffers, into `folder`; return the bytes
    written. The tensors are encoded on `device`.

    Raises CheckpointError for a checkpoint that does not fit the model and EngineError where the disk is too small; no
    files are left behind then.
    """
    state = ModelState(spec, "safetensors")
    layers = [state.of_layer(index) for index in range(len(state.layers))]
    sizes = [lay_out((name, entry.tensor) for name, entry in layer.items())[1] for layer in layers]
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < sum(sizes):
        raise EngineError(
            f"{folder} has {gb(free)} free, and up to {gb(sum(sizes))} are needed: name another folder with -o"
        )
    (folder / INDEX).unlink(missing_ok=True)
    images: dict[int, dict[str, Any]] = {}
    end = 0
    with atomic.writing(folder / DATA) as stream:
        for index, group in by_layer(state, state.load(torch.device("cpu"), progress)):
            if index is None:
                continue
            tensors = {name: tensor.to(device, copy=True) for name, tensor in group}
            if index in images or tensors.keys() != layers[index].keys():
                raise EngineError(f"layer {index} is not stored in one piece, so it cannot be packed")
            arena = PinnedArena(sizes[index], pin=False, grow=True)
            image = pack(tensors, arena)
            memory = as_bytes(arena.memory[: arena.used])
            images[index] = _described(image, memory) | {"start": end, "end": end + arena.used}
            stream.write(memory)
            end += arena.used
            del memory
            arena.close()
    content = {
        "format": FORMAT, "revision": revision, "dtype": spec.dtype, "bytes": end,
        "images": [images[index] for index in range(len(layers))],
    }  # fmt: skip
    atomic.write(folder / INDEX, json.dumps(content))
    return end


def _described(image: PackedLayer, memory: memoryview) -> dict[str, Any]:
    """Return a packed layer as JSON, with the checksums of its chunks."""
    blocks = {name: [block.offset, list(block.shape), str(block.dtype)[6:]] for name, block in image.blocks.items()}
    pieces = [
        [piece.start, piece.end, piece.place, piece.layout and [piece.layout.numel, *piece.layout.sections]]
        for piece in image.pieces
    ]
    sums = [zlib.crc32(part) for part in _parts(image, memory)]
    return {"slot_bytes": image.slot_bytes, "blocks": blocks, "pieces": pieces, "crc32": sums}


def _parts(image: PackedLayer, memory: memoryview) -> Iterator[memoryview]:
    """Yield the bytes of a packed layer's chunks; `memory` begins where the layer does."""
    for piece in image.pieces:
        yield memory[piece.start - image.start : piece.end - image.start]


def find(spec: ModelSpec, revision: str, where: str) -> Path | None:
    """Return the folder of `spec`'s packed layers: `where`, or with ``auto`` the one under `PACKED`, None if it does
    not exist.

    Raises EngineError for a folder that holds other weights, and for a given path without finished packed layers.
    """
    folder = PACKED / folder_name(spec, revision) if where == "auto" else Path(where)
    if not (folder / INDEX).is_file():
        if where == "auto":
            return None
        raise EngineError(f"{folder} holds no packed layers: make them with `zinfer pack --model {spec.name}`")
    content = _read(folder)
    wanted = {"revision": revision, "dtype": spec.dtype, "layers": spec.num_layers, "format": FORMAT}
    found = {"layers": len(content["images"]), **{key: content.get(key) for key in ("revision", "dtype", "format")}}
    if found != wanted:
        unlike = ", ".join(
            f"{key} {found[key]} instead of {wanted[key]}" for key in wanted if found[key] != wanted[key]
        )
        raise EngineError(f"{folder} is packed from other weights ({unlike}): pack these with `zinfer pack`")
    return folder


def load(folder: Path, state: ModelState, arena: PinnedArena, progress: Progress = silent) -> list[PackedLayer]:
    """Read the packed layers of `folder`, which belong to `state`, into `arena`, with many threads, and check them.

    Raises EngineError unless they hold every entry of the layers with its shape and type, CheckpointError for data
    that are cut off or damaged, with the number of the layer, and MemoryError, before anything is read, where memory is
    too small for them.
    """
    content = _read(folder)
    for index, entry in enumerate(content["images"]):
        wanted = {name: (item.tensor.shape, item.tensor.dtype) for name, item in state.of_layer(index).items()}
        found = {name: (block.shape, block.dtype) for name, block in _image(entry, 0).blocks.items()}
        if wanted != found:
            name = min(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
            raise EngineError(f"{folder}: {name} of layer {index} does not fit the model: pack it again")
    path = folder / DATA
    if not path.is_file() or path.stat().st_size != content["bytes"]:
        raise CheckpointError(f"{path} is cut off: pack it again")
    check_free(content["bytes"])
    images: list[PackedLayer] = []
    under_way: deque[Future[int]] = deque()
    with (
        reading() as readers,
        ThreadPoolExecutor(len(os.sched_getaffinity(0))) as cores,
        ThreadPoolExecutor(LAYERS_AHEAD) as layers,
    ):

        def check(index: int, memory: memoryview, reads: list[Future[None]]) -> int:
            entry = content["images"][index]
            for done in reads:
                done.result()
            if list(cores.map(zlib.crc32, _parts(images[index], memory))) != entry["crc32"]:
                raise CheckpointError(f"{path}: layer {index} is damaged: pack it again")
            return int(entry["end"])

        for index, entry in enumerate(content["images"]):
            images.append(_image(entry, arena.used))
            memory = arena.take(entry["end"] - entry["start"])
            reads = fill(readers, memory, path, entry["start"])
            under_way.append(layers.submit(check, index, as_bytes(memory), reads))
            while len(under_way) > (LAYERS_AHEAD if index + 1 < len(content["images"]) else 0):
                progress("loading packed layers", under_way.popleft().result() / content["bytes"])
    return images


def _read(folder: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads((folder / INDEX).read_text())
        if content["format"] == FORMAT and isinstance(content["bytes"], int) and isinstance(content["images"], list):
            return content
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise EngineError(f"{folder / INDEX} does not describe packed layers of format {FORMAT}: pack them again")


def _image(entry: dict[str, Any], start: int) -> PackedLayer:
    """Return the packed layer of an entry of the index, in an arena from `start` on."""
    blocks = {
        name: TensorPlace(offset, torch.Size(shape), getattr(torch, dtype))
        for name, (offset, shape, dtype) in entry["blocks"].items()
    }
    pieces = tuple(
        Chunk(start + begin, start + end, place, layout and Layout(layout[0], tuple(layout[1:])))
        for begin, end, place, layout in entry["pieces"]
    )
    return PackedLayer(pieces, blocks, entry["slot_bytes"])
