"""Packed layers on disk: a load reads two thirds of the bytes (of FP8 weights five sixths) and encodes nothing.

A folder holds `layers.bin`, all packed layers as they lie in the arena, and `packed.json`, written last, with the place
of every tensor and a CRC-32 of every chunk. Weights outside the layers are small and still come from the checkpoint.

Packed layers of other weights are never used. `packed.json` names the revision of the weights, which does not see a
change in the middle of a tensor. So it also has the CRC-32 of every tensor that was packed, and the identity of each
file of the checkpoint: size, inode, times of the last change of its content and of its state, which no program can set
back. If one differs, its tensors are read once and compared; the new identity is kept.
"""

import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field

from zinfer.checkpoint.headers import Checkpoint, CheckpointError
from zinfer.core.model import ModelSpec
from zinfer.core.progress import Progress, silent
from zinfer.core.units import gb
from zinfer.engine import EngineError
from zinfer.engine.pinned import PinnedArena, TensorPlace, check_free
from zinfer.engine.read import DTYPES, ahead, as_bytes, fill, reading, visit_tensors
from zinfer.engine.state import ModelState
from zinfer.engine.stream.weights import codec, disk
from zinfer.engine.stream.weights.chunk import Chunk, PackedLayer
from zinfer.engine.stream.weights.codec import Layout
from zinfer.engine.stream.weights.formats import CodesLayout
from zinfer.engine.stream.weights.pack import AnyMemory, Packing
from zinfer.system import atomic
from zinfer.system.documents import DocumentError, read_object, validate

PACKED = Path("engines/packed")
DATA, INDEX = "layers.bin", "packed.json"
FORMAT = 7
MAX_INDEX = 512 << 20  # bytes of packed.json; that of a model with 60,000 tensors has 10 MB
LAYERS_AHEAD = 3  # layers that are read while one is checked: a checksum takes about as long as a fast disk

Count = Annotated[int, Field(ge=0, le=1 << 62, strict=True)]
_TYPES = {str(dtype)[6:]: dtype for dtype in DTYPES.values()}


class _StoredLayer(BaseModel):
    """A packed layer in `packed.json`: bytes `start` to `end` of the data."""

    model_config = ConfigDict(extra="forbid")

    start: Count
    end: Count
    unpacked_bytes: Count
    # name -> offset in the layer buffer, shape, type, and whether its last dimensions are exchanged there
    blocks: dict[str, tuple[Count, list[Count], str, bool]]
    # start, end, place in the layer buffer, layout
    chunks: Annotated[list[tuple[Count, Count, Count, dict[str, Any] | None]], Field(min_length=1)]
    crc32: list[Count]

    @classmethod
    def of(cls, layer: PackedLayer, sums: list[int], end: int) -> "_StoredLayer":
        """Describe a layer of the data, which ends before byte `end`. `sums` are the CRC-32 of its chunks."""
        start = layer.start
        return cls(
            start=start,
            end=end,
            unpacked_bytes=layer.unpacked_bytes,
            blocks={
                name: (block.offset, list(block.shape), str(block.dtype)[6:], block.transposed)
                for name, block in layer.blocks.items()
            },
            chunks=[
                (chunk.start - start, chunk.end - start, chunk.place, _stored(chunk.layout)) for chunk in layer.chunks
            ],
            crc32=sums,
        )

    def layer(self, start: int) -> PackedLayer:
        blocks = {
            name: TensorPlace(offset, torch.Size(shape), _TYPES[dtype], transposed)
            for name, (offset, shape, dtype, transposed) in self.blocks.items()
        }
        chunks = tuple(
            Chunk(start + begin, start + end, block, _layout(layout)) for begin, end, block, layout in self.chunks
        )
        return PackedLayer(chunks, blocks, self.unpacked_bytes)


def _stored(layout: Layout | CodesLayout | None) -> dict[str, Any] | None:
    """Return the fields of a layout, types as their names."""
    fields: dict[str, Any] = {} if layout is None else dict(vars(layout))
    if isinstance(layout, CodesLayout):
        fields["coded"] = _stored(layout.coded)
    return {name: str(value)[6:] if isinstance(value, torch.dtype) else value for name, value in fields.items()} or None


def _layout(stored: dict[str, Any] | None) -> Any:
    """Return the layout of fields that `_stored` returned."""
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in (stored or {}).items()
    }
    if "sections" in fields:
        return Layout(**fields)
    types = {name: _TYPES[value] for name, value in fields.items() if "dtype" in name or name == "inner"}
    return CodesLayout(**fields | types | {"coded": _layout(fields["coded"])}) if fields else None


class _Index(BaseModel):
    """Content of `packed.json`."""

    model_config = ConfigDict(extra="forbid")

    format: int
    revision: str
    dtype: str
    allow_nan: bool
    files: dict[str, tuple[Count, Count, Count, Count]]  # name -> size, inode, times of change in ns
    tensors: dict[str, Count]  # name in the checkpoint -> CRC-32
    bytes: Count
    layers: list[_StoredLayer]
    digest: str = ""  # SHA-256 of all other fields

    def signed(self) -> "_Index":
        """Return the index with its digest."""
        content = json.dumps(self.model_dump(mode="json", exclude={"digest"}), sort_keys=True)
        return self.model_copy(update={"digest": hashlib.sha256(content.encode()).hexdigest()})

    def write(self, folder: Path) -> None:
        """Write `packed.json`, with a digest."""
        atomic.write(folder / INDEX, self.signed().model_dump_json())


class _Sums:
    """CRC-32 of each tensor, from its chunks in any order."""

    def __init__(self) -> None:
        self._chunks: dict[str, dict[int, int]] = {}

    def __call__(self, name: str, begin: int, part: memoryview) -> None:
        self._chunks.setdefault(name, {})[begin] = zlib.crc32(part)

    @property
    def tensors(self) -> dict[str, int]:
        return {
            name: zlib.crc32(json.dumps([chunks[begin] for begin in sorted(chunks)]).encode())
            for name, chunks in sorted(self._chunks.items())
        }


def _identity(checkpoint: Checkpoint) -> dict[str, tuple[int, int, int, int]]:
    """Return size, inode and times of change of a checkpoint's files."""
    files = {info.file.name: os.stat(info.file) for info in checkpoint.tensors.values()}
    return {
        name: (status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns)
        for name, status in sorted(files.items())
    }


def folder_name(spec: ModelSpec, revision: str) -> str:
    """Return the name of a model's folder under `PACKED`. It differs for other weights, types and slices."""
    return f"{Path(spec.name).name}-{spec.num_layers}l-{spec.dtype}-{revision}"


def write(
    spec: ModelSpec,
    revision: str,
    folder: Path,
    device: torch.device,
    progress: Progress = silent,
    allow_nan: bool = False,
) -> int:
    """Pack the decoder layers of a checkpoint into `folder`; return the bytes written. The tensors are encoded on
    `device`. Raises CheckpointError for a checkpoint that does not fit the model, or that holds NaN or infinity (unless
    `allow_nan`), and EngineError where the disk is too small; no files are left behind then."""
    if spec.stored_ratio < 1 and not spec.fp8_ratio:
        raise EngineError(
            f"{spec.name} is stored quantised, not in FP8, and crosses the link so: there is nothing to pack"
        )
    sums, before = _Sums(), _identity(Checkpoint.open(Path(str(spec.directory))))
    state = ModelState(spec, "safetensors", allow_nan=allow_nan, visits=[sums])
    packing = Packing(state, True, device, progress)
    size = sum(map(packing.unpacked_bytes, range(len(state.layers))))
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    needed = round(size * min(1.0, spec.stored_ratio + 0.01))
    if free < needed:
        raise EngineError(
            f"{folder} has {gb(free)} free, and up to {gb(needed)} are needed: name another folder with -o"
        )
    (folder / INDEX).unlink(missing_ok=True)
    with atomic.writing(folder / DATA) as stream:
        layers, checksums = disk.write(stream.write, packing.one_by_one())
        end = stream.tell()
    ends = [*(layer.start for layer in layers[1:]), end]
    stored = list(map(_StoredLayer.of, layers, checksums, ends))
    _Index(
        format=FORMAT, revision=revision, dtype=spec.dtype, allow_nan=allow_nan, files=before, tensors=sums.tensors,
        bytes=end, layers=stored,
    ).write(folder)  # fmt: skip
    return end


def why_whole(spec: ModelSpec) -> str:
    """Return the reason why packing `spec` saves nothing."""
    if spec.fp8_ratio and spec.dtype == "float32":
        return "codes in FP8 are decoded to weights of 16 bits, not to float32"
    if spec.dtype != "bfloat16" and not spec.fp8_ratio:
        return f"weights in {spec.dtype} are not coded, only those in bfloat16"
    return (
        f"matrices have fewer than {codec.MIN_NUMEL:,} weights, which to unpack takes longer than it saves, or their "
        "exponents vary too much"
    )


def find(
    spec: ModelSpec, revision: str, where: str, allow_nan: bool = False, progress: Progress = silent
) -> Path | None:
    """Return the folder of `spec`'s packed layers: `where`, or with ``auto`` the one under `PACKED`, None if it does
    not exist. Raises EngineError for a folder that holds other weights, or was packed with NaN unless `allow_nan`, and
    for a given path without finished packed layers."""
    folder = PACKED / folder_name(spec, revision) if where == "auto" else Path(where)
    if not os.path.lexists(folder / INDEX):
        if where == "auto":
            return None
        raise EngineError(f"{folder} holds no packed layers: make them with `zinfer pack --model {spec.name}`")
    content = _read(folder)
    wanted = {"revision": revision, "dtype": spec.dtype, "layers": spec.num_layers}
    stored = {"revision": content.revision, "dtype": content.dtype, "layers": len(content.layers)}
    if stored != wanted:
        different = ", ".join(
            f"{key} {stored[key]} instead of {wanted[key]}" for key in wanted if stored[key] != wanted[key]
        )
        raise EngineError(f"{folder} is packed from other weights ({different}): pack these with `zinfer pack`")
    if content.allow_nan and not allow_nan:
        raise EngineError(f"{folder} was packed with --allow-nan: add it here, or pack the weights again without it")
    if spec.directory is not None:
        _check_source(folder, content, Checkpoint.open(Path(spec.directory)), progress)
    return folder


def _check_source(folder: Path, content: _Index, checkpoint: Checkpoint, progress: Progress) -> None:
    """Raise EngineError if a tensor of `checkpoint` differs from the packed one. Reads it only if its files changed."""
    now = _identity(checkpoint)
    if now == content.files:
        return
    files: dict[Path, list[str]] = {}
    for name in content.tensors.keys() & checkpoint.tensors.keys():
        files.setdefault(checkpoint.tensors[name].file, []).append(name)
    sums = _Sums()
    for done, (_, names) in enumerate(sorted(files.items()), start=1):
        visit_tensors(checkpoint, sorted(names), sums)
        progress("comparing the checkpoint with its packed layers", done / len(files))
    now_stored = sums.tensors
    for name, checksum in content.tensors.items():
        if now_stored.get(name) != checksum:
            raise EngineError(f"{folder} is packed from other weights ({name} has changed since): pack them again")
    with suppress(OSError):  # in a folder of somebody else, it is read again next time
        content.model_copy(update={"files": now}).write(folder)


def _belonging(folder: Path, state: ModelState) -> tuple[_Index, Path]:
    """Return the index and the data's path. Raises EngineError unless they hold every entry of the layers of `state`
    with its shape and type, CheckpointError for data that are cut off or missing."""
    content = _read(folder)
    for number, stored in enumerate(content.layers):
        wanted = {name: (entry.tensor.shape, entry.tensor.dtype) for name, entry in state.of_layer(number).items()}
        blocks = {name: (block.shape, block.dtype) for name, block in stored.layer(0).blocks.items()}
        if wanted != blocks:
            name = min(name for name in wanted.keys() | blocks.keys() if wanted.get(name) != blocks.get(name))
            raise EngineError(f"{folder}: {name} of layer {number} does not fit the model: pack it again")
    path = folder / DATA
    if not path.is_file() or os.stat(path).st_size != content.bytes:
        raise CheckpointError(f"{path} is cut off, missing, or not a regular file: pack it again")
    return content, path


def places(folder: Path, state: ModelState) -> tuple[Path, list[PackedLayer], list[list[int]]]:
    """Return the data file, the layers' places, and their chunks' CRC-32. Raises as `read` does, but reads nothing of
    the layers."""
    content, path = _belonging(folder, state)
    return path, [stored.layer(stored.start) for stored in content.layers], [stored.crc32 for stored in content.layers]


def read(
    folder: Path, state: ModelState, memory_of: Callable[[int], tuple[AnyMemory, object]], progress: Progress = silent
) -> Iterator[tuple[int, PackedLayer, None, AnyMemory]]:
    """Read packed layers with many threads, and check them. Yields what
    `zinfer.engine.stream.weights.pack.Packing.layers` yields; `memory_of` names the memory that a layer is read into.
    Raises EngineError unless the layers fit `state`, CheckpointError for data that are cut off or damaged, with the
    number of the layer, and MemoryError, before anything is read, where memory is too small."""
    content, path = _belonging(folder, state)
    memories = [memory_of(number)[0] for number in range(len(content.layers))]
    in_host_memory = (isinstance(memory, PinnedArena) for memory in memories)
    check_free(
        sum(stored.end - stored.start for stored, counts in zip(content.layers, in_host_memory, strict=True) if counts)
    )
    with (
        reading() as readers,
        ThreadPoolExecutor(len(os.sched_getaffinity(0))) as cores,
        ThreadPoolExecutor(LAYERS_AHEAD) as checkers,
    ):

        def check(number: int, layer: PackedLayer, memory: memoryview, reads: list[Future[None]]) -> PackedLayer:
            for done in reads:
                done.result()
            chunks = [memory[chunk.start - layer.start : chunk.end - layer.start] for chunk in layer.chunks]
            if list(cores.map(zlib.crc32, chunks)) != content.layers[number].crc32:
                raise CheckpointError(f"{path}: layer {number} is damaged: pack it again")
            return layer

        def begin(number: int) -> Future[PackedLayer]:
            stored, memory = content.layers[number], memories[number]
            layer = stored.layer(memory.used)
            part = memory.allocate(stored.end - stored.start)
            reads = fill(readers, part, path, stored.start)
            return checkers.submit(check, number, layer, as_bytes(part), reads)

        for number, checked in ahead(begin, range(len(memories)), LAYERS_AHEAD):
            layer = checked.result()
            progress("loading packed layers", content.layers[number].end / content.bytes)
            yield number, layer, None, memories[number]


def _read(folder: Path) -> _Index:
    """Return the content of `packed.json`. Raises EngineError unless it is sound."""
    path = folder / INDEX
    try:
        fields = read_object(path, MAX_INDEX)
        if fields.get("format") != FORMAT:
            raise EngineError(f"{path} does not describe packed layers of format {FORMAT}: pack them again")
        content = validate(_Index, fields, path)
    except (DocumentError, OSError) as error:
        raise EngineError(f"{path} does not describe packed layers: pack them again ({error})") from None
    if content.signed().digest != content.digest:
        raise EngineError(f"{path} is damaged (its own checksum differs): pack it again")
    return content
