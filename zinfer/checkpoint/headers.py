"""Local safetensors checkpoints, checked before any weight is read.

The format: 8 bytes little-endian header length N, N bytes of JSON (name -> dtype, shape, data_offsets), then the data.
A truncated shard behind a memory map reads as zeros in most loaders, and a weight map may name any file on the disk;
both are refused here, from the headers alone. Nothing is unpickled and no code of a checkpoint is run.

Source of the format: the safetensors README, "Format".
"""

import hashlib
import json
import os
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from zinfer.checkpoint import configuration
from zinfer.core.errors import ZinferError, environment_error
from zinfer.system.documents import DocumentError, once, open_regular, read_object

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MODELOPT = "hf_quant_config.json"
QUANTIZATION = ("quantization_config", "compression_config")  # fields of a configuration
MAX_HEADER = 100 << 20  # the limit of the reference implementation
_PICKLED = ("*.bin", "*.pt", "*.pth")
ADAPTER = "adapter_config.json"
_MERGE = "merge it into its base model first (merge_and_unload of peft) and give that folder"
_INSTEAD = "give the folder or the hub id of the model in safetensors, or run the GGUF file with llama.cpp"
MAX_NAME = 1000  # characters of a tensor's name
MAX_RANK = 32  # dimensions of a tensor
MAX_SIZE = 1 << 62  # values of a tensor, bytes of a file
BITS = {  # type in safetensors -> bits of a value
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64,
    "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
DTYPE_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}  # type in safetensors -> in zinfer
# Masks and tables of positions: older checkpoints hold them, the model computes them.
TABLE = re.compile(
    r"(?:^|\.)(?:(?:attention|attn)\.(?:masked_)?bias|inv_freq|cos_cached|sin_cached|causal_mask|position_ids|rope\.freqs"
    r"|embed_positions\.weights|_float_tensor)$"
)
# Heads of reward and value models, which make no text.
HEAD = re.compile(r"(?:v_head|value_head|reward_head|score|classifier|qa_outputs)\.")
_LONG_NUMBER = re.compile(r"\d{10}")  # names count layers and experts
SAMPLE = 4096  # bytes hashed at either end of a tensor: tell retrained weights of one layout apart


class CheckpointError(ZinferError):
    """A checkpoint that cannot be loaded safely; the message names the fault."""


class TensorInfo(NamedTuple):
    """Location of a tensor: bytes ``[start, end)`` of `file`. `dtype` is as safetensors spells it (``BF16``)."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Checkpoint:
    """A folder with `config.json` and safetensors files, all headers checked.

    `config` is the configuration as it is written: `zinfer.checkpoint.configuration.without_code` comes before any use.
    `sources` are the folder's files that say where weights are; the first one was read.
    """

    directory: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    sources: tuple[Path, ...] = ()

    @classmethod
    def open(cls, directory: Path) -> "Checkpoint":
        """Read the headers under `directory`. Raises CheckpointError for the first fault found."""
        if (kind := unsupported_kind(directory)) is not None:
            raise CheckpointError(kind)
        config = _config(directory / "config.json", "it is not a checkpoint folder without it")
        sources = weight_source_files(directory, config.get("transformers_weights"))
        if not sources:
            others = sorted(path.name for pattern in _PICKLED for path in directory.glob(pattern))
            hint = f"; {others[0]} is pickled and is not read: convert it to safetensors" if others else ""
            raise CheckpointError(f"{directory} holds no {SINGLE} and no {INDEX}{hint}")
        return cls(directory, config, _tensors(sources[0]), sources)

    @classmethod
    def of_file(cls, file: Path) -> "Checkpoint":
        """Return the tensors of one file, without a configuration. Raises CheckpointError as `open` does."""
        return cls(file.parent, {}, _read_header(file))

    @property
    def revision(self) -> str:
        """Fingerprint of configuration, headers and a sample of every tensor.

        The sample is the first and last bytes, since hashing 350 GB takes longer than many a sweep: it changes with any
        training that touches a matrix as a whole.
        """
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        for name in sorted(self.tensors):
            info = self.tensors[name]
            digest.update(f"{name} {info.file.name} {info.dtype} {info.shape} {info.start} {info.end}\n".encode())
        for _, sample in _samples(self.tensors):
            digest.update(sample)
        return digest.hexdigest()[:16]

    def disagreements(self) -> Iterator[str]:
        """Yield a line for each other source of weights that differs."""
        for other in self.sources[1:]:
            try:
                same = _contents(_tensors(other)) == _contents(self.tensors)
            except (CheckpointError, OSError):
                same = False
            if not same:
                yield (
                    f"{self.directory} holds two sources of weights that differ: {self.sources[0].name} is read, as "
                    f"transformers does, and {other.name} is not"
                )


def unsupported_kind(path: Path) -> str | None:
    """Return what `path` is if it cannot be a checkpoint."""
    if not path.is_dir():
        return f"{path} is a GGUF file, which zinfer does not read: {_INSTEAD}" if _is_gguf(path) else None
    names = {file.name for file in path.iterdir()}
    if ADAPTER in names:
        if "config.json" not in names:
            return f"{path} is an adapter (LoRA or another kind of peft), not a whole model: {_MERGE}"
        if any(name.startswith("adapter_model.") for name in names):
            return f"{path} holds a model and an adapter beside it ({ADAPTER}): {_MERGE}, or remove the adapter's files"
    weights = {Path(name).suffix for name in names if name.endswith((".gguf", ".safetensors", ".bin", ".pt", ".pth"))}
    if weights == {".gguf"}:
        return f"{path} holds GGUF files only, which zinfer does not read: {_INSTEAD}"
    return None


def _is_gguf(path: Path) -> bool:
    if path.suffix == ".gguf":
        return True
    try:
        with open_regular(path) as stream:
            return stream.read(4) == b"GGUF"
    except (OSError, DocumentError):
        return False


def weightless_config(path: Path) -> Mapping[str, Any] | None:
    """Return the configuration in `path` if no weights lie next to it. Raises CheckpointError."""
    if not path.is_dir():
        return _config(path, "")
    weights = (SINGLE, INDEX, "*.safetensors", "*.gguf", ADAPTER, *_PICKLED)
    if not os.path.lexists(path / "config.json") or any(next(path.glob(pattern), None) for pattern in weights):
        return None
    return _config(path / "config.json", "")


def weight_source_files(directory: Path, named: object = None) -> tuple[Path, ...]:
    """Return the files that say where weights are, in transformers' order.

    These are the file that the configuration has `named`, one file with all weights, an index of shards. Raises
    CheckpointError where `named` is no such file in the folder.
    """
    names = [SINGLE, INDEX]
    if named is not None:
        names.insert(0, _inside(directory, str(named), "config.json").name)
    paths = dict.fromkeys(directory / name for name in names if name == named or os.path.lexists(directory / name))
    return tuple(sorted(paths, key=lambda path: path.name != named and not path.is_file()))  # broken links last


def weight_files(source: Path) -> list[Path]:
    """Return the files of a source, all shards of an index. Raises CheckpointError."""
    if not source.name.endswith(".json"):
        return [source]
    return [_inside(source.parent, name, source.name) for name in sorted(set(read_weight_map(source).values()))]


def is_ignored_tensor(name: str) -> bool:
    """Tell whether a stored tensor of this name makes no text."""
    return TABLE.search(name) is not None or HEAD.match(name) is not None


def read_weight_map(path: Path) -> dict[str, str]:
    """Return the file of each tensor that the index `path` gives. Raises CheckpointError."""
    try:
        weight_map = read_object(path, MAX_HEADER).get("weight_map")
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except DocumentError as error:
        raise error.converted(CheckpointError) from None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map")
    for name, file in weight_map.items():
        if not isinstance(file, str):
            raise CheckpointError(f"{path}: weight_map.{name[:200]} is no file name")
    return weight_map


def _config(path: Path, why: str) -> dict[str, Any]:
    """Return the configuration in a file, with the quantisation of ModelOpt."""
    try:
        config = configuration.read(path)
        modelopt = path.with_name(MODELOPT)
        if not any(config.get(key) for key in QUANTIZATION) and os.path.lexists(modelopt):
            inner = read_object(modelopt).get("quantization")
            if not isinstance(inner, dict):
                raise DocumentError(f"{modelopt} has no object 'quantization'")
            if inner.get("quant_algo") is not None:  # else only the KV cache is quantised
                config["quantization_config"] = {**inner, "quant_method": "modelopt"}
        return config
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing" + (f": {why}" if why else "")) from None
    except DocumentError as error:
        raise error.converted(CheckpointError) from None


def _inside(directory: Path, name: str, where: str) -> Path:
    """Return the path of a shard, which must lie in `directory`."""
    if name != Path(name).name or not name.endswith((".safetensors", ".safetensors.index.json")) or "\0" in name:
        raise CheckpointError(f"{directory / where} points to {name!r}: shards are .safetensors files of this folder")
    return directory / name


def _tensors(source: Path) -> dict[str, TensorInfo]:
    """Return the tensors of a source of weights, by name. Raises CheckpointError for the first fault found."""
    weight_map = read_weight_map(source) if source.name.endswith(".json") else {}
    tensors: dict[str, TensorInfo] = {}
    for file in weight_files(source):
        header = _read_header(file)
        for name in tensors.keys() & header.keys():
            raise CheckpointError(f"{file} and {tensors[name].file.name} both hold {name[:200]}")
        tensors |= header
    for name, file_name in weight_map.items():
        if name not in tensors or tensors[name].file.name != file_name:
            raise CheckpointError(f"{source} places {name} in {file_name}, which does not hold it")
    if not tensors:
        raise CheckpointError(f"{source.parent} holds no tensor")
    return tensors


def _samples(tensors: Mapping[str, TensorInfo]) -> Iterator[tuple[str, bytes]]:
    """Yield the first and last bytes of every tensor, in file order."""
    ordered = sorted(tensors.items(), key=lambda item: (item[1].file, item[1].start))
    for file, inside in groupby(ordered, key=lambda item: item[1].file):
        with file.open("rb", buffering=0) as stream:
            for name, info in inside:
                for begin in sorted({info.start, max(info.start, info.end - SAMPLE)}):
                    yield name, os.pread(stream.fileno(), min(SAMPLE, info.end - begin), begin)


def _contents(tensors: Mapping[str, TensorInfo]) -> dict[str, list[object]]:
    """Return type, shape and samples of every tensor, for comparison."""
    contents: dict[str, list[object]] = {name: [info.dtype, info.shape] for name, info in tensors.items()}
    for name, sample in _samples(tensors):
        contents[name].append(sample)
    return contents


def _read_header(file: Path) -> dict[str, TensorInfo]:
    """Return the tensors of a safetensors file. Raises CheckpointError where its header breaks a rule of the format.

    The rules: names once, known types, sizes that follow from type and shape, data one after the other from 0 to the
    end.
    """
    try:
        with open_regular(file) as stream:
            size = os.fstat(stream.fileno()).st_size
            length = struct.unpack("<Q", stream.read(8))[0] if size >= 8 else 0
            if not 2 <= length <= min(MAX_HEADER, size - 8):
                raise CheckpointError(f"{file} is not a safetensors file, or is cut off within its header")
            text = stream.read(length)
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing: the checkpoint is not complete") from None
    except DocumentError as error:
        raise error.converted(CheckpointError) from None
    except OSError as error:
        raise environment_error(CheckpointError(f"{file} cannot be read: {error.strerror or error}")) from None
    try:
        header = json.loads(text, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: its header is damaged ({' '.join(str(error).split())[:200]})") from None
    if not isinstance(header, dict) or text[:1] != b"{":
        raise CheckpointError(f"{file}: its header is damaged (not a JSON object)")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{file}: its header is damaged (__metadata__ is no map from text to text)")
    base = 8 + length
    tensors = {name: _entry(file, name, entry, base) for name, entry in header.items()}
    end = max((info.end for info in tensors.values()), default=base)
    if end != size:
        state = "cut off" if size < end else "longer than its header says"
        raise CheckpointError(f"{file} is {state}: {size} bytes, {end} expected; copy it again")
    done = base
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if info.start != done:
            fault = "overlap those of another tensor" if info.start < done else "leave a hole before them"
            raise CheckpointError(f"{file}: the header is damaged: the data of {name[:200]} {fault}")
        done = info.end
    return tensors


def _entry(file: Path, name: str, entry: Any, base: int) -> TensorInfo:
    """Return a tensor's entry of a header; data begin at byte `base`. Raises CheckpointError."""
    try:
        dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        bits, rank = BITS.get(dtype, 0), len(shape)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise CheckpointError(f"{file}: the header's entry for {name[:200]} is damaged") from None
    fault = ""
    if len(name) > MAX_NAME or _LONG_NUMBER.search(name):
        fault = f"a name has at most {MAX_NAME:,} characters, and numbers of at most 9 digits"
    elif len(entry) != 3 or type(shape) is not list or rank > MAX_RANK:
        fault = f"it has more than dtype, shape and data_offsets, or more than {MAX_RANK} dimensions"
    elif not bits:
        fault = f"safetensors has no type {str(dtype)[:40]!r}"
    elif not all(type(number) is int and 0 <= number <= MAX_SIZE for number in (start, end, *shape)):
        fault = "a size is no whole number, or is negative"
    elif prod(shape) * bits != (end - start) * 8:
        fault = f"{dtype} {shape[:8]} is not the size of its data_offsets"
    if fault:
        raise CheckpointError(f"{file}: the header's entry for {name[:200]} is damaged: {fault}")
    return TensorInfo(file, dtype, tuple(shape), base + start, base + end)
