"""Packed layers on disk: a load reads two thirds of the bytes (of FP8 weights five sixths) and encodes nothing.

A folder holds `layers.bin`, all packed layers as they lie in the arena, and `packed.json`, written last, with the place
of every tensor and a CRC-32 of every chunk. Weights outside the layers are small and still come from the checkpoint.
`packed.json` names the revision of the weights: packed layers of other weights are never used.

A revision does not see a change in the middle of a tensor. So `packed.json` also has the CRC-32 of every tensor that
was packed, computed while it was read, and the identity of each file of the checkpoint: size, inode, times of the last
change of its content and of its state, which no program can set back. While these are the same, so is the content. If
one differs (the checkpoint was copied, or changed), its tensors are read once and compared; the new identity is kept.
"""

import hashlib
import json
import os
import shutil
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat
from torch import Tensor

from zinfer.checkpoint.headers import Checkpoint, CheckpointError
from zinfer.core.model import ModelSpec
from zinfer.core.progress import Progress, silent
from zinfer.core.units import gb
from zinfer.engine import EngineError
from zinfer.engine.pinned import ALIGNMENT, PinnedArena, TensorPlace, check_free, lay_out
from zinfer.engine.quantization.dequantize import Codes, table
from zinfer.engine.read import DTYPES, as_bytes, fill, map_groups, reading
from zinfer.engine.state import Entry, Loaded, ModelState, by_layer
from zinfer.engine.stream import codec
from zinfer.engine.stream.codec import Layout
from zinfer.engine.stream.packed_layer import Chunk, PackedLayer, pack
from zinfer.engine.stream.quantized import CodesLayout
from zinfer.system import atomic
from zinfer.system.documents import DocumentError, open_regular, read_object, validate

PACKED = Path("engines/packed")
DATA, INDEX = "layers.bin", "packed.json"
FORMAT = 5  # 4 had no quantised weights and is still read, 3 no checksums of the checkpoint, 2 no persistent buffers
READ = (4, FORMAT)
MAX_INDEX = 512 << 20  # bytes of packed.json; that of a model with 60,000 tensors has 10 MB
LAYERS_AHEAD = 3  # layers that are read while one is checked: a checksum takes about as long as a fast disk

Count = Annotated[int, Field(ge=0, le=1 << 62, strict=True)]
Size = Annotated[int, Field(ge=1, le=1 << 40, strict=True)]
_TYPES = {str(dtype)[6:]: dtype for dtype in DTYPES.values()}
_FLOATS = ("bfloat16", "float16", "float32")
# Tables of codes, as `zinfer.engine.quantization.dequantize.table` names them, and those of scales.
_TABLES = ("e2m1", "e4m3", "e5m2", "int8", "middle4", "middle8", "whole4", "whole8")
_SCALE_TABLES = ("e8m0", "e4m3")


class _Rows(BaseModel):
    """Layout of a chunk of quantised rows (`CodesLayout`) without an order of its columns."""

    model_config = ConfigDict(extra="forbid")

    rows: Size
    columns: Size
    bits: Literal[4, 8]
    table: str
    block: tuple[Size, Size]
    grid: tuple[Size, Size]
    scale_dtype: str
    scale_table: str
    zeros: bool
    divisor: FiniteFloat
    factor: FiniteFloat
    inner: str
    dtype: str
    coded: list[Count] | None  # number of values and sections of a `Layout`

    @classmethod
    def of(cls, layout: CodesLayout) -> "_Rows":
        """Return a layout as it is stored. Raises EngineError for one with an order."""
        if layout.order:
            raise EngineError("its columns are in another order than their scales, and cross the link as they are")
        fields = {name: getattr(layout, name) for name in cls.model_fields}
        types = {name: str(fields[name])[6:] for name in ("scale_dtype", "inner", "dtype")}
        coded = layout.coded and [layout.coded.numel, *layout.coded.sections]
        return cls.model_validate(fields | types | {"coded": coded})

    @property
    def sound(self) -> bool:
        """True if tables and types are known, the scales are those of the rows, and coded data fit them."""
        known = (
            self.table in _TABLES
            and len(table(self.table, torch.device("cpu"))) == 1 << self.bits
            and self.columns * self.bits % 8 == 0
            and self.scale_table in (*_SCALE_TABLES, "")
            and self.scale_dtype in (("uint8",) if self.scale_table else _FLOATS)
            and self.inner in _FLOATS
            and self.dtype in _FLOATS
            and self.divisor != 0
            and all(
                count in (1, -(-size // block))
                for count, size, block in zip(self.grid, (self.rows, self.columns), self.block, strict=True)
            )
        )
        if not known or self.coded is None:
            return known
        coded = Layout(self.coded[0], tuple(self.coded[1:]), 8) if self.coded else None
        plain = (self.table, self.zeros, self.divisor, self.factor) == ("e4m3", False, 1.0, 1.0)
        fits = coded is not None and coded.sound and coded.numel == self.rows * self.columns < codec.MAX_NUMEL
        return plain and fits and self.dtype != "float32"

    @property
    def layout(self) -> CodesLayout:
        return CodesLayout(
            self.rows, self.columns, self.bits, self.table, self.block, self.grid, _TYPES[self.scale_dtype],
            self.scale_table, self.zeros, False, self.divisor, self.factor, _TYPES[self.inner], _TYPES[self.dtype],
            Layout(self.coded[0], tuple(self.coded[1:]), 8) if self.coded else None,
        )  # fmt: skip


class _Image(BaseModel):
    """A packed layer in `packed.json`: bytes `start` to `end` of the data."""

    model_config = ConfigDict(extra="forbid")

    start: Count
    end: Count
    slot_bytes: Count
    blocks: dict[str, tuple[Count, list[Count], str]]  # name -> offset in the slot, shape, type
    pieces: Annotated[list[tuple[Count, Count, Count, list[Count] | _Rows | None]], Field(min_length=1)]
    crc32: list[Count]


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
    images: list[_Image]
    digest: str = ""  # SHA-256 of all other fields

    def signed(self) -> "_Index":
        """Return the index with its digest."""
        content = json.dumps(self.model_dump(mode="json", exclude={"digest"}), sort_keys=True)
        return self.model_copy(update={"digest": hashlib.sha256(content.encode()).hexdigest()})


class _Sums:
    """CRC-32 of each tensor, from the CRC-32s of its chunks, which arrive in any order from several threads."""

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
    """Return size, inode and times of change of each file of a checkpoint."""
    found = {info.file.name: os.stat(info.file) for info in checkpoint.tensors.values()}
    return {
        name: (status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns)
        for name, status in sorted(found.items())
    }


def folder_name(spec: ModelSpec, revision: str) -> str:
    """Return the name of the folder of a model's packed layers under `PACKED`; it differs for other weights, types and
    slices."""
    return f"{Path(spec.name).name}-{spec.num_layers}l-{spec.dtype}-{revision}"


def write(
    spec: ModelSpec,
    revision: str,
    folder: Path,
    device: torch.device,
    progress: Progress = silent,
    allow_nan: bool = False,
) -> int:
    """Pack the decoder layers of `spec`'s checkpoint, weights and persistent buffers, into `folder`; return the bytes
    written. The tensors are encoded on `device`.

    Raises CheckpointError for a checkpoint that does not fit the model, or that holds NaN or infinity (unless
    `allow_nan`), and EngineError where the disk is too small; no files are left behind then.
    """
    if spec.stored_ratio < 1 and not spec.fp8_ratio:
        raise EngineError(
            f"{spec.name} is stored quantised, not in FP8, and crosses the link so: there is nothing to pack"
        )
    sums, before = _Sums(), _identity(Checkpoint.open(Path(str(spec.directory))))
    state = ModelState(spec, "safetensors", allow_nan=allow_nan, visits=[sums])
    layers = [state.of_layer(index) for index in range(len(state.layers))]
    sizes = [lay_out((name, entry.tensor) for name, entry in layer.items())[1] for layer in layers]
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    most = round(sum(sizes) * min(1.0, spec.stored_ratio + 0.01))
    if free < most:
        raise EngineError(f"{folder} has {gb(free)} free, and up to {gb(most)} are needed: name another folder with -o")
    (folder / INDEX).unlink(missing_ok=True)
    images: dict[int, dict[str, Any]] = {}
    end = 0
    with atomic.writing(folder / DATA) as stream:
        for index, group in by_layer(state, state.load_stored(torch.device("cpu"), progress)):
            if index is None:
                continue
            tensors, coded = on_device(group, layers[index], device)
            if index in images or tensors.keys() | coded.keys() != layers[index].keys():
                raise EngineError(f"layer {index} is not stored in one piece, so it cannot be packed")
            arena = PinnedArena(sizes[index], pin=False, grow=True)
            image = pack(tensors, arena, coded)
            memory = as_bytes(arena.memory[: arena.used])
            images[index] = _described(image, memory) | {"start": end, "end": end + arena.used}
            stream.write(memory)
            end += arena.used
            del memory
            arena.close()
    content = _Index(
        format=FORMAT, revision=revision, dtype=spec.dtype, allow_nan=allow_nan, files=before, tensors=sums.tensors,
        bytes=end, images=[_Image.model_validate(images[index]) for index in range(len(layers))],
    )  # fmt: skip
    atomic.write(folder / INDEX, content.signed().model_dump_json())
    return end


def on_device(
    group: Iterable[tuple[str, Loaded]], entries: Mapping[str, Entry], device: torch.device
) -> tuple[dict[str, Tensor], dict[str, tuple[Tensor, list[Codes]]]]:
    """Return the loaded entries of a layer on `device`, where coding is fast, as `pack` takes them; `entries` are those
    of the layer."""
    tensors, coded = dict[str, Tensor](), dict[str, tuple[Tensor, list[Codes]]]()
    for name, loaded in group:  # valid until the next one comes
        if isinstance(loaded, Tensor):
            tensors[name] = loaded.to(device, copy=True)
        else:
            coded[name] = entries[name].tensor, [codes.to(device) for codes in loaded]
    return tensors, coded


def why_whole(spec: ModelSpec) -> str:
    """Return the reason why packing `spec` saves nothing."""
    if spec.fp8_ratio and spec.dtype == "float32":
        return "codes in FP8 are decoded to weights of 16 bits, not to float32"
    if spec.dtype != "bfloat16" and not spec.fp8_ratio:
        return f"weights in {spec.dtype} are not coded, only those in bfloat16"
    largest = max(spec.layer_parameters)
    if largest < codec.MIN_NUMEL:
        least = f"{codec.MIN_NUMEL:,}"
        return f"a layer has {largest:,} weights, and unpacking fewer than {least} takes longer than it saves"
    return "the exponents of these weights vary too much, or no matrix of a layer has a block of weights"


def _described(image: PackedLayer, memory: memoryview) -> dict[str, Any]:
    """Return a packed layer as JSON, with the checksums of its chunks."""
    blocks = {name: [block.offset, list(block.shape), str(block.dtype)[6:]] for name, block in image.blocks.items()}
    places = [
        _Rows.of(layout) if isinstance(layout, CodesLayout) else layout and [layout.numel, *layout.sections]
        for layout in (piece.layout for piece in image.pieces)
    ]
    pieces = [[one.start, one.end, one.place, place] for one, place in zip(image.pieces, places, strict=True)]
    sums = [zlib.crc32(part) for part in _parts(image, memory)]
    return {"slot_bytes": image.slot_bytes, "blocks": blocks, "pieces": pieces, "crc32": sums}


def _parts(image: PackedLayer, memory: memoryview) -> Iterator[memoryview]:
    """Yield the bytes of a packed layer's chunks; `memory` begins where the layer does."""
    for piece in image.pieces:
        yield memory[piece.start - image.start : piece.end - image.start]


def find(
    spec: ModelSpec, revision: str, where: str, allow_nan: bool = False, progress: Progress = silent
) -> Path | None:
    """Return the folder of `spec`'s packed layers: `where`, or with ``auto`` the one under `PACKED`, None if it does
    not exist.

    Raises EngineError for a folder that holds other weights, or was packed with NaN unless `allow_nan`, and for a given
    path without finished packed layers.
    """
    folder = PACKED / folder_name(spec, revision) if where == "auto" else Path(where)
    if not os.path.lexists(folder / INDEX):
        if where == "auto":
            return None
        raise EngineError(f"{folder} holds no packed layers: make them with `zinfer pack --model {spec.name}`")
    content = _read(folder)
    wanted = {"revision": revision, "dtype": spec.dtype, "layers": spec.num_layers}
    found = {"revision": content.revision, "dtype": content.dtype, "layers": len(content.images)}
    if found != wanted:
        unlike = ", ".join(
            f"{key} {found[key]} instead of {wanted[key]}" for key in wanted if found[key] != wanted[key]
        )
        raise EngineError(f"{folder} is packed from other weights ({unlike}): pack these with `zinfer pack`")
    if content.allow_nan and not allow_nan:
        raise EngineError(f"{folder} was packed with --allow-nan: add it here, or pack the weights again without it")
    if spec.directory is not None:
        _check_source(folder, content, Checkpoint.open(Path(spec.directory)), progress)
    return folder


def _check_source(folder: Path, content: _Index, checkpoint: Checkpoint, progress: Progress) -> None:
    """Raise EngineError if a tensor of `checkpoint` is not the one that was packed. Reads it only if its files are not
    those that were packed, or not as they were."""
    now = _identity(checkpoint)
    if now == content.files:
        return
    files: dict[Path, list[str]] = {}
    for name in content.tensors.keys() & checkpoint.tensors.keys():
        files.setdefault(checkpoint.tensors[name].file, []).append(name)
    sums = _Sums()
    groups = [tuple(sorted(names)) for _, names in sorted(files.items())]
    for done, _ in enumerate(map_groups(checkpoint, groups, [sums]), start=1):
        progress("comparing the checkpoint with its packed layers", done / len(groups))
    found = sums.tensors
    for name, checksum in content.tensors.items():
        if found.get(name) != checksum:
            raise EngineError(f"{folder} is packed from other weights ({name} has changed since): pack them again")
    with suppress(OSError):  # in a folder of somebody else, it is read again next time
        kept = content.model_copy(update={"files": now}).signed()
        atomic.write(folder / INDEX, kept.model_dump_json())


def _belonging(folder: Path, state: ModelState) -> tuple[_Index, Path]:
    """Return the index of a folder's packed layers, and the path of their data, once both are found to fit `state`.

    Raises EngineError unless they hold every entry of the layers with its shape and type, CheckpointError for data
    that are cut off or missing.
    """
    content = _read(folder)
    if len(content.images) != len(state.layers):
        raise EngineError(
            f"{folder} has {len(content.images)} layers, and the model {len(state.layers)}: pack it again"
        )
    for index, entry in enumerate(content.images):
        wanted = {name: (item.tensor.shape, item.tensor.dtype) for name, item in state.of_layer(index).items()}
        found = {name: (block.shape, block.dtype) for name, block in _image(entry, 0).blocks.items()}
        if wanted != found:
            name = min(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
            raise EngineError(f"{folder}: {name} of layer {index} does not fit the model: pack it again")
    path = folder / DATA
    try:
        with open_regular(path) as stream:
            size = os.fstat(stream.fileno()).st_size
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: pack it again") from None
    except DocumentError as error:
        raise CheckpointError(str(error)) from None
    if size != content.bytes:
        raise CheckpointError(f"{path} is cut off: pack it again")
    return content, path


def places(folder: Path, state: ModelState) -> tuple[Path, list[PackedLayer], list[list[int]]]:
    """Return the data file of a folder's packed layers, which belong to `state`, their places in it, and the CRC-32 of
    the chunks of each. Raises as `load` does, but reads nothing of the layers."""
    content, path = _belonging(folder, state)
    return path, [_image(entry, entry.start) for entry in content.images], [entry.crc32 for entry in content.images]


class Stay(NamedTuple):
    """Layers that do not go into an arena, by number, and the function that takes the bytes of each."""

    layers: Collection[int]
    put: Callable[[int, PackedLayer, Tensor], None]


def load(
    folder: Path, state: ModelState, arena: PinnedArena, progress: Progress = silent, stay: Stay | None = None
) -> list[PackedLayer]:
    """Read the packed layers of `folder`, which belong to `state`, into `arena`, with many threads, and check them;
    those of `stay` go to its function.

    Raises EngineError unless they hold every entry of the layers with its shape and type, CheckpointError for data
    that are cut off or damaged, with the number of the layer, and MemoryError, before anything is read, where memory is
    too small for them.
    """
    content, path = _belonging(folder, state)
    staying = () if stay is None else stay.layers
    check_free(sum(entry.end - entry.start for index, entry in enumerate(content.images) if index not in staying))
    images: list[PackedLayer] = []
    under_way: deque[tuple[int, Tensor, Future[int]]] = deque()
    with (
        reading() as readers,
        ThreadPoolExecutor(len(os.sched_getaffinity(0))) as cores,
        ThreadPoolExecutor(LAYERS_AHEAD) as layers,
    ):

        def check(index: int, memory: memoryview, reads: list[Future[None]]) -> int:
            entry = content.images[index]
            for done in reads:
                done.result()
            if list(cores.map(zlib.crc32, _parts(images[index], memory))) != entry.crc32:
                raise CheckpointError(f"{path}: layer {index} is damaged: pack it again")
            return entry.end

        for index, entry in enumerate(content.images):
            size = entry.end - entry.start
            images.append(_image(entry, 0 if index in staying else arena.used))
            memory = torch.empty(size, dtype=torch.uint8) if index in staying else arena.take(size)
            reads = fill(readers, memory, path, entry.start)
            under_way.append((index, memory, layers.submit(check, index, as_bytes(memory), reads)))
            while len(under_way) > (LAYERS_AHEAD if index + 1 < len(content.images) else 0):
                number, memory, checked = under_way.popleft()
                progress("loading packed layers", checked.result() / content.bytes)
                if stay is not None and number in staying:
                    stay.put(number, images[number], memory)
    return images


def _read(folder: Path) -> _Index:
    """Return the content of a folder's `packed.json`. Raises EngineError for one of another format, and for one whose
    layers do not follow each other in the data, or whose tensors are not where the chunks are."""
    path = folder / INDEX
    try:
        fields = read_object(path, MAX_INDEX)
        if fields.get("format") not in READ:
            raise EngineError(f"{path} does not describe packed layers of format {FORMAT}: pack them again")
        content = validate(_Index, fields, path)
    except (DocumentError, OSError) as error:
        raise EngineError(f"{path} does not describe packed layers: pack them again ({error})") from None
    fault = None
    if content.signed().digest != content.digest:
        fault = "its own checksum differs"
    elif [0, *(image.end for image in content.images)] != [*(image.start for image in content.images), content.bytes]:
        fault = "a layer is listed twice, or is missing"
    for index, image in enumerate(content.images):
        fault = fault or (f"layer {index}: {inside}" if (inside := _fault(image)) else None)
    if fault:
        raise EngineError(f"{path} is damaged ({fault}): pack it again")
    return content


def _fault(image: _Image) -> str | None:
    """Return what is wrong with a packed layer's places; None if they are sound."""
    if any(dtype not in _TYPES for _, _, dtype in image.blocks.values()):
        return "a type is unknown"
    if len(image.crc32) != len(image.pieces):
        return "checksums are missing"
    if any(isinstance(rows, _Rows) and not rows.sound for *_, rows in image.pieces):
        return "quantised rows do not fit their scales"
    packed = _image(image, 0)
    if any(
        piece.layout is not None
        and (
            piece.layout.size != piece.size
            or piece.start % 16
            or (isinstance(piece.layout, Layout) and not piece.layout.sound)
        )
        for piece in packed.pieces
    ):
        return "a chunk is not as long as its layout says"
    source = [(piece.start, piece.end) for piece in packed.pieces]
    if not _apart(source, image.end - image.start):
        return "chunks overlap"
    slot = sorted((piece.place, piece.place + _unpacked(piece)) for piece in packed.pieces)
    blocks = sorted((block.offset, block.offset + block.size) for block in packed.blocks.values())
    if not _apart(slot, image.slot_bytes) or not _apart(blocks, image.slot_bytes):
        return "tensors overlap"
    if blocks and -(-blocks[-1][1] // ALIGNMENT) * ALIGNMENT != image.slot_bytes:
        return "its size is not that of its tensors"
    covered = iter([*slot, (image.slot_bytes, image.slot_bytes)])
    begin, end = next(covered)
    for start, stop in blocks:
        while start < stop:
            while end <= start and begin < image.slot_bytes:
                begin, end = next(covered)
            if not begin <= start < end:
                return "a tensor has no data"
            start = end
    return None


def _unpacked(piece: Chunk) -> int:
    """Return the bytes of a chunk in the slot."""
    if isinstance(piece.layout, CodesLayout):
        return piece.layout.nbytes
    return piece.size if piece.layout is None else 2 * piece.layout.numel


def _layout(stored: list[int] | _Rows | None) -> Layout | CodesLayout | None:
    if isinstance(stored, _Rows):
        return stored.layout
    return Layout(stored[0], tuple(stored[1:])) if stored else None


def _apart(ranges: Iterable[tuple[int, int]], size: int) -> bool:
    """Tell whether ascending ranges are in order, do not overlap, and lie within `size` bytes."""
    bounds = [0, *(bound for pair in ranges for bound in pair), size]
    return all(one <= other for one, other in pairwise(bounds))


def _image(entry: _Image, start: int) -> PackedLayer:
    """Return the packed layer of an entry of the index, in an arena from `start` on."""
    blocks = {
        name: TensorPlace(offset, torch.Size(shape), getattr(torch, dtype))
        for name, (offset, shape, dtype) in entry.blocks.items()
    }
    pieces = tuple(
        Chunk(start + begin, start + end, place, _layout(layout)) for begin, end, place, layout in entry.pieces
    )
    return PackedLayer(pieces, blocks, entry.slot_bytes)
