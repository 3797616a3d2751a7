"""Quantised copy of a checkpoint, in the format of compressed-tensors.

The matrices of the decoder layers are quantised (`zinfer.engine.quantization.loading.quantize`); embeddings, norms,
biases, the head and routers stay as stored. Tensors keep their stored names, and are written a bounded file at a time.

`config.json` is removed before anything else is written, and written last: what a kill leaves is no checkpoint.
"""

import json
import os
import shutil
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors.torch import save
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from zinfer.checkpoint import quantization, tokenizer_files
from zinfer.checkpoint.configuration import without_code
from zinfer.checkpoint.headers import INDEX, QUANTIZATION, Checkpoint
from zinfer.checkpoint.quantization import Scheme
from zinfer.core.model import ModelSpec
from zinfer.core.progress import Progress, silent
from zinfer.core.units import gb
from zinfer.engine import EngineError
from zinfer.engine.quantization.loading import group_size, quantize
from zinfer.engine.read import check_finite, empty_tensor, read_groups
from zinfer.engine.state import ModelState
from zinfer.system import atomic
from zinfer.system.documents import DocumentError, open_regular, read_object

SHARD_BYTES = 2_000_000_000  # largest file, unless one tensor alone is larger; host memory holds it several times
MARK = "zinfer-pack"  # file that names the others which `write` made, so that it may replace them
COPIED = 16 << 20  # bytes of a tokenizer's file that are copied at a time


class Written(NamedTuple):
    """Bytes of a copy, before and after, and its unquantised matrices."""

    nbytes: int
    before: int
    after: int
    matrices: int
    kept: tuple[str, ...]


def choose(
    state: ModelState, checkpoint: Checkpoint, scheme: Scheme
) -> tuple[frozenset[str], int, list[str], tuple[str, ...]]:
    """Choose the stored tensors to quantise. These are weights of linear modules in the decoder layers, and matrices of
    experts; none of routers, and none that layers share. Returns their names, how many columns share a scale in all of
    them (int4), and the linear modules and the layers' stored matrices that are not quantised. Raises EngineError, in
    one line, for a model whose layers have none, and for experts in one stored tensor."""
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
        columns = {group_size(shape[1], scheme) for shape in shapes}
        if entry.tensor.dtype != wanted or not (linear or len(stored) > 1) or router or 0 in columns:
            kept += stored
            continue
        names += stored
        sizes |= columns
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
    return frozenset(names), min(sizes), ignored, tuple(kept)


def write(
    spec: ModelSpec, revision: str, folder: Path, scheme: Scheme, device: torch.device, progress: Progress = silent
) -> Written:
    """Write a quantised copy of `spec`'s checkpoint into `folder`.

    It takes the place of an earlier one; `device` computes. Raises EngineError, before anything is written, for a
    checkpoint that is quantised already or cannot be, for a folder with other files, and where the disk is too small;
    CheckpointError for a checkpoint that does not fit the model, or that holds NaN or infinity.
    """
    source = Path(str(spec.directory))
    checkpoint = Checkpoint.open(source)
    if quantization.settings_of(checkpoint.config) is not None:
        raise EngineError(f"{spec.name} is stored quantised already: it is used as it is")
    if checkpoint.architecture:
        raise EngineError(f"{spec.name} is a GGUF: zinfer quantises checkpoints in safetensors")
    if "text_config" in checkpoint.config:
        raise EngineError(f"{spec.name} is a multimodal checkpoint: zinfer quantises those of text models")
    state, dtype = ModelState(spec, "safetensors"), getattr(torch, spec.dtype)
    chosen, size, ignored, kept = choose(state, checkpoint, scheme)

    def parts_of(name: str, tensor: Tensor) -> dict[str, Tensor]:
        if name not in chosen:
            return {name: tensor}
        stored = quantize(tensor.to(dtype), scheme, size if scheme == "int4" else None)
        return {f"{name.removesuffix('weight')}{leaf}": part for leaf, part in stored.items()}

    parts = {name: parts_of(name, empty_tensor(name, info)) for name, info in checkpoint.tensors.items()}
    sizes = {name: sum(part.nbytes for part in several.values()) for name, several in parts.items()}
    split = split_state_dict_into_shards_factory(
        sizes, get_storage_size=int, filename_pattern="model{suffix}.safetensors", max_shard_size=SHARD_BYTES
    )
    shards = {file: tuple(names) for file, names in split.filename_to_tensors.items()}
    tokenizer = tokenizer_files.files(source)
    replaced = _replaceable(folder)
    folder.mkdir(parents=True, exist_ok=True)
    free, total = shutil.disk_usage(folder).free + sum(file.stat().st_size for file in replaced), sum(sizes.values())
    if free < total:
        raise EngineError(f"{folder} has {gb(free)} free, and {gb(total)} are needed: name another folder with -o")
    made = [*shards, *([INDEX] if split.is_sharded else []), *(path.name for path in tokenizer)]
    origin = f"{Path(spec.name).name} ({revision}) in {scheme}, by zinfer pack --weights"
    (folder / "config.json").unlink(missing_ok=True)
    for file in replaced:
        file.unlink(missing_ok=True)
    try:
        atomic.write(folder / MARK, json.dumps({"origin": origin, "files": made}))
        contents = read_groups(checkpoint, list(shards.values()), [partial(check_finite, checkpoint)])
        for number, (name, content) in enumerate(zip(shards, contents, strict=True), start=1):
            tensors = dict[str, Tensor]()
            for stored, tensor in content.items():
                moved = tensor[...].to(device) if stored in chosen else tensor[...]
                for part, values in parts_of(stored, moved).items():
                    tensors[part] = values.to("cpu").contiguous()
            atomic.write(folder / name, save(tensors, {"format": "pt"}))
            progress(f"writing {scheme} weights", number / len(shards))
        for path in tokenizer:
            with open_regular(path) as opened, atomic.writing(folder / path.name) as stream:
                shutil.copyfileobj(opened, stream, COPIED)
        if split.is_sharded:
            files = {part: file for name, file in split.tensor_to_filename.items() for part in parts[name]}
            index = {"metadata": split.metadata, "weight_map": files}
            atomic.write(folder / INDEX, json.dumps(index))
        config = without_code(dict(checkpoint.config), spec.name)
        for key in (*QUANTIZATION, "torch_dtype", "transformers_weights"):
            config.pop(key, None)
        settings = quantization.scheme(scheme, size) | {"ignore": ignored}
        config |= {"dtype": spec.dtype, "quantization_config": settings}
        atomic.write(folder / "config.json", json.dumps(config, indent=1))
    except BaseException:
        for name in (*made, MARK):
            (folder / name).unlink(missing_ok=True)
        raise
    before = sum(checkpoint.tensors[name].end - checkpoint.tensors[name].start for name in chosen)
    after = sum(sizes[name] for name in chosen)
    return Written(total, before, after, len(chosen), kept)


def _replaceable(folder: Path) -> list[Path]:
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
