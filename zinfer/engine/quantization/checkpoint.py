"""Quantised copy of a checkpoint: a folder in the format of compressed-tensors, which every command takes as a model.

The matrices of the decoder layers are quantised (`zinfer.engine.quantization.quantize`); embeddings, norms, biases, the
head and routers stay as they are stored. Tensors keep their stored names. They are read, quantised and written one at a
time, into files of bounded size whose headers are known before.

`config.json` is removed before anything else is written, and written last: what a kill leaves is no checkpoint.
"""

import json
import os
import shutil
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from zinfer.checkpoint import quantization, tokenizer_files
from zinfer.checkpoint.configuration import without_code
from zinfer.checkpoint.headers import INDEX, SINGLE, Checkpoint
from zinfer.checkpoint.quantization import Scheme
from zinfer.core.model import ModelSpec
from zinfer.core.progress import Progress, silent
from zinfer.core.units import gb
from zinfer.engine import EngineError
from zinfer.engine.quantization.quantize import group_size, quantize
from zinfer.engine.read import DTYPES, as_bytes, check_finite, read_groups
from zinfer.engine.state import ModelState
from zinfer.system import atomic
from zinfer.system.documents import DocumentError, open_regular, read_object

SHARD_BYTES = 5_000_000_000  # largest file, unless one weight alone is larger
READ_BYTES = 1 << 30  # stored tensors that are read together
MARK = "zinfer-pack"  # file that names the others which `write` made, so that it may replace them
COPIED = 16 << 20  # bytes of a tokenizer's file that are copied at a time

_SPELLED = {dtype: name for name, dtype in DTYPES.items()}
_FORMATS: dict[Scheme, str] = {"int4": "pack-quantized", "int8": "int-quantized", "fp8": "float-quantized"}


class _Part(NamedTuple):
    """A tensor of the copy: type as safetensors spells it, and shape."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass
class _Shard:
    """A file of the copy: its tensors by name, by the stored tensor that they come from."""

    parts: dict[str, dict[str, _Part]] = field(default_factory=dict)

    @property
    def tensors(self) -> dict[str, _Part]:
        """Tensors in the order of their data: wide types first, so that each begins at a multiple of its width."""
        every = {name: part for parts in self.parts.values() for name, part in parts.items()}
        return dict(sorted(every.items(), key=lambda item: -DTYPES[item[1].dtype].itemsize))


class Written(NamedTuple):
    """Result of `write`: bytes of the copy's tensors, of the quantised weights before and after, and the matrices of
    the layers that stay as they are."""

    nbytes: int
    before: int
    after: int
    matrices: int
    kept: tuple[str, ...]


class _Choice(NamedTuple):
    """Stored tensors to quantise, the columns that share a scale in all of them (int4), the linear modules of the model
    that are not quantised, and the stored matrices of its layers that are not."""

    scheme: Scheme
    names: frozenset[str]
    size: int | None
    ignored: tuple[str, ...]
    kept: tuple[str, ...]


def choose(state: ModelState, checkpoint: Checkpoint, scheme: Scheme) -> _Choice:
    """Return what is quantised: weights of linear modules in the decoder layers, and matrices of experts; none of
    routers, and none that layers share.

    Raises EngineError, in one line, for a model whose layers have none, and for experts in one stored tensor.
    """
    spec, wanted = state.spec, getattr(torch, state.spec.dtype)
    entries = {name: entry for entry in state.entries.values() for name in entry.names}
    names, sizes, modules, kept = list[str](), set[int](), set[str](), list[str]()
    for target, stored in state.stored_rows().items():
        entry, shapes = entries[target], [checkpoint.tensors[name].shape for name in stored]
        module, leaf = entry.places[0]
        if any(len(shape) == 3 and min(shape) > 1 and min(shape[1:]) >= 16 for shape in shapes):
            raise EngineError(
                f"{spec.name} stores the experts of a layer as one tensor ({stored[0]}), which compressed-tensors does "
                "not hold: zinfer quantises experts that are stored one by one"
            )
        if any(len(shape) != 2 for shape in shapes):
            continue
        linear = isinstance(module, nn.Linear) and leaf == "weight" and len(entry.places) == 1
        router = len(stored) == 1 and shapes[0][0] in {1, spec.num_experts}
        own = {group_size(shape[1], scheme) for shape in shapes}
        if entry.tensor.dtype != wanted or not (linear or len(stored) > 1) or router or 0 in own:
            kept += stored
            continue
        names += stored
        sizes |= own
        if linear:
            modules.add(target.removesuffix(".weight"))
    if not names:
        conv = any(isinstance(module, Conv1D) for module in state.layers.modules())
        why = "they are of the class Conv1D, stored transposed" if conv else "none belongs to a linear module"
        raise EngineError(f"{spec.name} has no weights in its layers that compressed-tensors holds quantised: {why}")
    ignored = [
        name for name, module in state.model.named_modules() if isinstance(module, nn.Linear) and name not in modules
    ]
    # One size for all: transformers dequantises the experts of a model, and the rest, by the first group alone.
    return _Choice(scheme, frozenset(names), min(sizes) if scheme == "int4" else None, tuple(ignored), tuple(kept))


def configuration(choice: _Choice) -> dict[str, Any]:
    """Return the quantization_config of the copy."""
    scheme, form = choice.scheme, _FORMATS[choice.scheme]
    weights = {"num_bits": 4 if scheme == "int4" else 8, "type": "float" if scheme == "fp8" else "int",
               "symmetric": True, "dynamic": False, "strategy": "channel" if choice.size is None else "group",
               "group_size": choice.size}  # fmt: skip
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None,
             "format": form}  # fmt: skip
    return {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
            "ignore": list(choice.ignored), "config_groups": {"group_0": group}}  # fmt: skip


def write(
    spec: ModelSpec,
    revision: str,
    folder: Path,
    scheme: Scheme,
    device: torch.device,
    progress: Progress = silent,
) -> Written:
    """Write a copy of `spec`'s checkpoint, quantised on `device`, into `folder`, in the place of an earlier one.

    Raises EngineError, before anything is written, for a checkpoint that is quantised already or cannot be, for a
    folder with other files, and where the disk is too small; CheckpointError for a checkpoint that does not fit the
    model, or that holds NaN or infinity.
    """
    source = Path(str(spec.directory))
    checkpoint = Checkpoint.open(source)
    if quantization.method(checkpoint.config) is not None:
        raise EngineError(f"{spec.name} is stored quantised already: it is used as it is")
    if "text_config" in checkpoint.config:
        raise EngineError(f"{spec.name} is a multimodal checkpoint: zinfer quantises those of text models")
    state = ModelState(spec, "safetensors")
    choice = choose(state, checkpoint, scheme)
    shards = list(_shards(checkpoint, spec, choice))
    tokenizer = tokenizer_files.files(source)
    total = sum(part.nbytes for shard in shards for part in shard.tensors.values())
    replaced = _own_files(folder)
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free + sum(file.stat().st_size for file in replaced)
    if free < total:
        raise EngineError(f"{folder} has {gb(free)} free, and {gb(total)} are needed: name another folder with -o")
    width = len(str(len(shards))) if len(shards) > 99999 else 5
    names = [f"model-{n:0{width}}-of-{len(shards):0{width}}.safetensors" for n in range(1, len(shards) + 1)]
    names = names if len(names) > 1 else [SINGLE]
    index = {name: file for file, shard in zip(names, shards, strict=True) for name in shard.tensors}
    made = [*names, *([INDEX] if len(names) > 1 else []), *(path.name for path in tokenizer)]
    origin = f"{Path(spec.name).name} ({revision}) in {scheme}, by zinfer pack --weights"
    (folder / "config.json").unlink(missing_ok=True)
    for file in replaced:
        file.unlink(missing_ok=True)
    try:
        atomic.write(folder / MARK, json.dumps({"origin": origin, "files": made}))
        _write_shards(checkpoint, spec, folder, dict(zip(names, shards, strict=True)), choice, device, origin, progress)
        for path in tokenizer:
            with open_regular(path) as content, atomic.writing(folder / path.name) as stream:
                shutil.copyfileobj(content, stream, COPIED)
        if len(names) > 1:
            atomic.write(folder / INDEX, json.dumps({"metadata": {"total_size": total}, "weight_map": index}))
        config = without_code(dict(checkpoint.config), spec.name)
        for key in (*quantization.KEYS, "torch_dtype", "transformers_weights"):
            config.pop(key, None)
        config |= {"dtype": spec.dtype, "quantization_config": configuration(choice)}
        atomic.write(folder / "config.json", json.dumps(config, indent=1))
    except BaseException:
        for name in (*made, MARK):
            (folder / name).unlink(missing_ok=True)
        raise
    before = sum(checkpoint.tensors[name].end - checkpoint.tensors[name].start for name in choice.names)
    after = sum(part.nbytes for shard in shards for name, parts in shard.parts.items() if name in choice.names
                for part in parts.values())  # fmt: skip
    return Written(total, before, after, len(choice.names), choice.kept)


def _own_files(folder: Path) -> list[Path]:
    """Return the files of an earlier copy in `folder`. Raises EngineError if it holds others."""
    if not os.path.lexists(folder):
        return []
    if not folder.is_dir():
        raise EngineError(f"{folder} is no folder: name another one with -o")
    names: object = []
    try:
        if any(folder.iterdir()):
            names = read_object(folder / MARK).get("files")
    except (OSError, DocumentError):
        names = None
    if not isinstance(names, list):
        raise EngineError(f"{folder} holds other files than a copy that zinfer made: name a new folder with -o")
    files = [folder / name for name in names if isinstance(name, str) and name == Path(name).name and name != MARK]
    return [file for file in files if file.is_file() or file.is_symlink()]


def _shards(checkpoint: Checkpoint, spec: ModelSpec, choice: _Choice) -> Iterator[_Shard]:
    """Yield the files of the copy, in the order of the stored tensors; the parts of a weight are in one file."""
    shard, held = _Shard(), 0
    for name, info in checkpoint.tensors.items():
        parts = {name: _Part(info.dtype, info.shape, info.end - info.start)}
        if name in choice.names:
            meta = torch.empty(info.shape, dtype=getattr(torch, spec.dtype), device="meta")
            parts = {
                leaf: _Part(_SPELLED[tensor.dtype], tuple(tensor.shape), tensor.nbytes)
                for leaf, tensor in _named(name, quantize(meta, choice.scheme, choice.size)).items()
            }
        size = sum(part.nbytes for part in parts.values())
        if shard.parts and held + size > SHARD_BYTES:
            yield shard
            shard, held = _Shard(), 0
        shard.parts[name] = parts
        held += size
    yield shard


def _named(name: str, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the stored tensors of the weight `name` by their whole names."""
    base = name.removesuffix("weight")
    return {f"{base}{leaf}": tensor for leaf, tensor in parts.items()}


def _write_shards(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    folder: Path,
    shards: Mapping[str, _Shard],
    choice: _Choice,
    device: torch.device,
    origin: str,
    progress: Progress,
) -> None:
    total, done = sum(info.end - info.start for info in checkpoint.tensors.values()), 0
    dtype = getattr(torch, spec.dtype)
    for file, shard in shards.items():
        header, places = _header(shard.tensors, origin)
        groups = list(_groups(checkpoint, shard))
        with atomic.writing(folder / file) as stream:
            stream.write(header)
            for content in read_groups(checkpoint, groups, [partial(check_finite, checkpoint)]):
                for name, stored in content.items():
                    tensor = stored if isinstance(stored, Tensor) else stored[...]
                    parts = {name: tensor}
                    if name in choice.names:
                        parts = _named(name, quantize(tensor.to(device).to(dtype), choice.scheme, choice.size))
                    for leaf, part in parts.items():
                        start, size = places[leaf]
                        assert part.nbytes == size
                        stream.seek(len(header) + start)
                        stream.write(as_bytes(part.to("cpu").contiguous().view(-1).view(torch.uint8)))
                    done += tensor.nbytes
                    progress(f"writing {choice.scheme} weights", done / total)


def _groups(checkpoint: Checkpoint, shard: _Shard) -> Iterator[tuple[str, ...]]:
    """Yield the stored tensors of a file in groups that are read together."""
    group, held = list[str](), 0
    for name in shard.parts:
        size = checkpoint.tensors[name].end - checkpoint.tensors[name].start
        if group and held + size > READ_BYTES:
            yield tuple(group)
            group, held = [], 0
        group.append(name)
        held += size
    yield tuple(group)


def _header(tensors: Mapping[str, _Part], origin: str) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """Return the header of a safetensors file, and the place of each tensor's data after it: offset and size."""
    fields: dict[str, Any] = {"__metadata__": {"format": "pt", "source": origin}}
    places, end = {}, 0
    for name, part in tensors.items():
        fields[name] = {"dtype": part.dtype, "shape": list(part.shape), "data_offsets": [end, end + part.nbytes]}
        places[name] = end, part.nbytes
        end += part.nbytes
    content = json.dumps(fields).encode()
    content += b" " * (-len(content) % 8)
    return struct.pack("<Q", len(content)) + content, places
