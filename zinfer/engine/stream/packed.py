"""Packed layers on disk, so that a load reads two thirds of the bytes and codes nothing.

A folder holds `layers.bin`, the images of all layers as they lie in the arena, and `packed.json`, written last, with
where everything is and a CRC-32 of every coded tensor and of each layer's rest. What lies outside the layers is small
and still comes from the checkpoint, whose revision the folder tells: packed layers of other weights are never used.
"""

import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from zinfer.checkpoint import CheckpointError
from zinfer.engine import EngineError
from zinfer.engine.arena import Block, HostArena, lay_out
from zinfer.engine.base import Progress, silent
from zinfer.engine.stream.codec import Layout
from zinfer.engine.stream.wire import Coded, Image, by_layer, pack
from zinfer.engine.weights import decoder_layers, weights
from zinfer.model import ModelSpec
from zinfer.units import gb

PACKED = Path("engines/packed")
DATA, INDEX = "layers.bin", "packed.json"
FORMAT = 1
READ_BYTES = 64 << 20  # that one thread reads at a time


def folder_name(spec: ModelSpec, revision: str) -> str:
    """The folder of a model's packed layers under `PACKED`: unlike that of other weights, types and slices."""
    return f"{Path(spec.name).name}-{spec.num_layers}l-{spec.dtype}-{revision}"


def write(
    model: PreTrainedModel,
    spec: ModelSpec,
    revision: str,
    folder: Path,
    device: torch.device,
    progress: Progress = silent,
) -> int:
    """Pack the decoder layers of `spec`'s checkpoint into `folder`, coding on `device`; returns the bytes written.

    Raises EngineError where the disk is too small, and leaves nothing behind when it fails.
    """
    stack, layers = decoder_layers(model)
    sizes = [lay_out(layer.named_parameters())[1] for layer in layers]
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < sum(sizes):
        raise EngineError(
            f"{folder} has {gb(free)} free, and up to {gb(sum(sizes))} are needed: -o takes another folder"
        )
    part = folder / f"{DATA}.{os.getpid()}.part"
    (folder / INDEX).unlink(missing_ok=True)
    images: dict[int, dict[str, Any]] = {}
    end = 0
    try:
        with part.open("wb") as stream:
            source = weights(model, spec, "safetensors", torch.device("cpu"), progress)
            for index, group in by_layer(f"{stack}.", source):
                if index is None:
                    continue
                arena = HostArena(sizes[index], pin=False, grow=True)
                image = pack({name: tensor.to(device, copy=True) for name, tensor in group}, arena)
                memory = _bytes(arena.memory[: image.end])
                images[index] = _told(image, memory) | {"start": end, "end": end + image.end}
                stream.write(memory)
                end += image.end
                del memory
                arena.close()
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(folder / DATA)
    finally:
        part.unlink(missing_ok=True)
    told = {
        "format": FORMAT, "revision": revision, "dtype": spec.dtype, "bytes": end,
        "images": [images[index] for index in range(len(layers))],
    }  # fmt: skip
    temporary = folder / f"{INDEX}.{os.getpid()}.part"
    temporary.write_text(json.dumps(told))
    temporary.replace(folder / INDEX)
    return end


def _told(image: Image, memory: memoryview) -> dict[str, Any]:
    """An image as JSON, with the checksums of its pieces."""
    blocks = {name: [block.offset, list(block.shape), str(block.dtype)[6:]] for name, block in image.blocks.items()}
    names = {block: name for name, block in image.blocks.items()}
    coded = [{"name": names[piece.block], "offset": piece.offset, **asdict(piece.layout)} for piece in image.coded]
    sums = [zlib.crc32(piece) for piece in _pieces(image, memory)]
    return {"slot_bytes": image.slot_bytes, "blocks": blocks, "coded": coded, "raw": image.raw, "crc32": sums}


def _pieces(image: Image, memory: memoryview) -> Iterator[memoryview]:
    """The parts of an image that have a checksum each: coded tensors, then the rest."""
    for piece in image.coded:
        yield memory[piece.offset : piece.offset + piece.layout.size]
    offset, _, size = image.raw
    yield memory[offset : offset + size]


def _bytes(memory: Tensor) -> memoryview:
    array: Any = memory.numpy()
    return memoryview(array)


def find(spec: ModelSpec, revision: str, where: str) -> Path | None:
    """The folder of `spec`'s packed layers: `where`, or with ``auto`` that under `PACKED`, None where there is none.

    Raises EngineError for a folder, given by its path, that holds other weights or is not finished.
    """
    folder = PACKED / folder_name(spec, revision) if where == "auto" else Path(where)
    if not (folder / INDEX).is_file():
        if where == "auto":
            return None
        raise EngineError(f"{folder} holds no packed layers: make them with `zinfer pack --model {spec.name}`")
    told = _read(folder)
    wanted = {"revision": revision, "dtype": spec.dtype, "layers": spec.num_layers, "format": FORMAT}
    found = {"layers": len(told["images"]), **{key: told.get(key) for key in ("revision", "dtype", "format")}}
    if found != wanted:
        unlike = ", ".join(
            f"{key} {found[key]} instead of {wanted[key]}" for key in wanted if found[key] != wanted[key]
        )
        raise EngineError(f"{folder} is packed from other weights ({unlike}): pack these with `zinfer pack`")
    return folder


def load(folder: Path, arena: HostArena, progress: Progress = silent) -> list[Image]:
    """Read the packed layers of `folder` into `arena`, with many threads, and check them.

    Raises CheckpointError for data that are cut off or damaged, naming the layer.
    """
    told = _read(folder)
    path = folder / DATA
    if not path.is_file() or path.stat().st_size != told["bytes"]:
        raise CheckpointError(f"{path} is cut off: pack it again")
    images = []
    with path.open("rb") as stream, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for index, entry in enumerate(told["images"]):
            image = _image(entry, arena.used)
            memory = arena.take(image.end - image.start)
            _each(pool, _reads(memory, stream.fileno(), entry["start"]))
            if list(pool.map(zlib.crc32, _pieces(image, _bytes(memory)))) != entry["crc32"]:
                raise CheckpointError(f"{path}: layer {index} is damaged: pack it again")
            images.append(image)
            progress("loading packed layers", entry["end"] / told["bytes"])
    return images


def _reads(memory: Tensor, file: int, start: int) -> Iterator[Callable[[], None]]:
    """Jobs that fill `memory` with the bytes of `file` from `start` on."""
    view = _bytes(memory)

    def read(begin: int, end: int) -> None:
        while begin < end:
            count = os.preadv(file, [view[begin:end]], start + begin)
            if not count:
                raise CheckpointError("the packed layers end before their time: pack them again")
            begin += count

    for begin in range(0, len(view), READ_BYTES):
        end = min(begin + READ_BYTES, len(view))
        yield lambda begin=begin, end=end: read(begin, end)  # type: ignore[misc]


def _each(pool: ThreadPoolExecutor, jobs: Iterator[Callable[[], None]]) -> None:
    for done in [pool.submit(job) for job in jobs]:
        done.result()


def _read(folder: Path) -> dict[str, Any]:
    try:
        told: dict[str, Any] = json.loads((folder / INDEX).read_text())
        if told["format"] == FORMAT and isinstance(told["bytes"], int) and isinstance(told["images"], list):
            return told
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise EngineError(f"{folder / INDEX} does not describe packed layers of format {FORMAT}: pack them again")


def _image(entry: dict[str, Any], start: int) -> Image:
    """The image of an entry, in an arena from `start` on."""
    blocks = {
        name: Block(offset, torch.Size(shape), getattr(torch, dtype))
        for name, (offset, shape, dtype) in entry["blocks"].items()
    }
    coded = tuple(
        Coded(one["offset"], Layout(one["numel"], tuple(one["sections"])), blocks[one["name"]])
        for one in entry["coded"]
    )
    offset, place, size = entry["raw"]
    end = start + entry["end"] - entry["start"]
    return Image(start, end, entry["slot_bytes"], blocks, coded, (offset, place, size))
