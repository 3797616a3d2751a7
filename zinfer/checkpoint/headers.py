"""Local checkpoints, safetensors or GGUF, checked before any weight is read.

A truncated shard behind a memory map reads as zeros in most loaders, and a weight map may name any file on the disk;
both are refused here, from the headers alone. Nothing is unpickled and no code of a checkpoint is run.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from zinfer.checkpoint import configuration, gguf
from zinfer.core.errors import ZinferError, environment_error
from zinfer.system.documents import DocumentError, open_regular, read_object

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MODELOPT = "hf_quant_config.json"
QUANTIZATION = ("quantization_config", "compression_config")  # fields of a configuration
MAX_HEADER = 100 << 20  # the limit of the reference implementation
_PICKLED = (".bin", ".pt", ".pth")
ADAPTER = "adapter_config.json"
_MERGE = "merge it into its base model first (merge_and_unload of peft) and give that folder"
MAX_NAME = 1000  # characters of a tensor's name
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
    """Location of a tensor: bytes ``[start, end)`` of `file`. `dtype` is a name of safetensors or GGUF (``BF16``)."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Checkpoint:
    """A folder with safetensors files, or a GGUF, all headers checked.

    `config` is the configuration as it is written: `zinfer.checkpoint.configuration.without_code` comes before any use.
    `sources` are the folder's files that say where weights are; the first one was read. Tensors of a GGUF have their
    names there, until `zinfer.checkpoint.gguf_names` gives them others; `architecture` is that of a GGUF.
    """

    directory: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    sources: tuple[Path, ...] = ()
    architecture: str = ""

    @classmethod
    def open(cls, path: Path, bare: bool = False) -> "Checkpoint":
        """Read the headers of a folder or GGUF. Raises CheckpointError. `bare`: a config.json will do."""
        if (held := _gguf(path)) is not None:
            return held
        if bare and not path.is_dir():
            return cls(path.parent, _config(path), {})
        if (kind := unsupported_kind(path)) is not None:
            raise CheckpointError(kind)
        config = _config(path / "config.json", "it is not a checkpoint folder without it")
        sources = weight_source_files(path, config.get("transformers_weights"))
        if sources:
            return cls(path, config, _tensors(sources[0]), sources)
        others = sorted(file.name for file in path.iterdir() if file.suffix in _PICKLED)
        if bare and not (others or any(path.glob("*.safetensors"))):
            return cls(path, config, {})
        hint = f"; {others[0]} is pickled and is not read: convert it to safetensors" if others else ""
        raise CheckpointError(f"{path} holds no {SINGLE} and no {INDEX}{hint}")

    @classmethod
    def of_file(cls, file: Path) -> "Checkpoint":
        """Return the tensors of one file, without a configuration. Raises CheckpointError as `open` does."""
        return cls(file.parent, {}, _read_header(file))

    @property
    def revision(self) -> str:
        """Fingerprint of configuration, headers, and both ends of each tensor: hashing 350 GB takes long."""
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        for name, info in sorted(self.tensors.items()):
            digest.update(f"{name} {info.file.name} {info.dtype} {info.shape} {info.start} {info.end}\n".encode())
        ordered = sorted(self.tensors.values(), key=lambda info: (info.file, info.start))
        for file, inside in groupby(ordered, key=lambda info: info.file):
            with file.open("rb", buffering=0) as stream:
                for info in inside:
                    for begin in sorted({info.start, max(info.start, info.end - SAMPLE)}):
                        digest.update(os.pread(stream.fileno(), min(SAMPLE, info.end - begin), begin))
        return digest.hexdigest()[:16]

    def notes(self) -> Iterator[str]:
        """Yield a line for each source of weights that is not read."""
        for other in self.sources[1:]:
            yield (
                f"{self.directory} holds several sources of weights: {self.sources[0].name} is read, as transformers "
                f"does, and {other.name} is not"
            )


def unsupported_kind(path: Path) -> str | None:
    """Return what `path` is if it cannot be a checkpoint."""
    if not path.is_dir():
        return None
    names = {file.name for file in path.iterdir()}
    if ADAPTER in names and ("config.json" not in names or any(name.startswith("adapter_model.") for name in names)):
        return f"{path} is an adapter (LoRA or another kind of peft), or holds one beside a model: {_MERGE}"
    return None


def _gguf(path: Path) -> Checkpoint | None:
    """Return the GGUF at `path`, if it is one. Raises CheckpointError."""
    with _refusing(path):
        if not (parts := gguf.find(path)):
            return None
        read = gguf.read(parts)
        configuration.check(read.config, parts[0])
    _check_names(parts[0], read.tensors)
    tensors = {name: TensorInfo(parts[place.part], *place[1:]) for name, place in read.tensors.items()}
    return Checkpoint(parts[0].parent, read.config, tensors, parts[:1], read.architecture)


def weight_source_files(directory: Path, named: object = None) -> tuple[Path, ...]:
    """Return the files that place weights, the one `named` in config.json first. Raises CheckpointError."""
    first = [] if named is None else [_inside(directory, str(named), "config.json")]
    others = [directory / name for name in (SINGLE, INDEX) if os.path.lexists(directory / name)]
    return tuple(dict.fromkeys(first + sorted(others, key=lambda path: not path.is_file())))  # broken links last


def weight_files(source: Path) -> list[Path]:
    """Return the files of a source, all shards of an index. Raises CheckpointError."""
    if not source.name.endswith(".json"):
        return [source]
    return [_inside(source.parent, name, source.name) for name in sorted(set(_weight_map(source).values()))]


def is_ignored_tensor(name: str) -> bool:
    """Tell whether a stored tensor of this name makes no text."""
    return TABLE.search(name) is not None or HEAD.match(name) is not None


def _weight_map(path: Path) -> dict[str, str]:
    """Return the file of each tensor that the index `path` gives. Raises CheckpointError."""
    with _refusing(path):
        weight_map = read_object(path, MAX_HEADER).get("weight_map")
        if not (weight_map and isinstance(weight_map, dict) and all(isinstance(f, str) for f in weight_map.values())):
            raise DocumentError(f"{path} has no weight_map from names to files")
        return weight_map


def _config(path: Path, why: str = "") -> dict[str, Any]:
    """Return the configuration in a file, with the quantisation of ModelOpt."""
    with _refusing(path, why):
        config = configuration.read(path)
        modelopt = path.with_name(MODELOPT)
        if not any(config.get(key) for key in QUANTIZATION) and os.path.lexists(modelopt):
            inner = read_object(modelopt).get("quantization")
            if not isinstance(inner, dict):
                raise DocumentError(f"{modelopt} has no object 'quantization'")
            if inner.get("quant_algo") is not None:  # else only the KV cache is quantised
                config["quantization_config"] = {**inner, "quant_method": "modelopt"}
        return config


@contextmanager
def _refusing(path: Path, why: str = "the checkpoint is not complete") -> Iterator[None]:
    """Turn errors of reading `path` into CheckpointError."""
    try:
        yield
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing" + (f": {why}" if why else "")) from None
    except DocumentError as error:
        raise error.converted(CheckpointError) from None
    except OSError as error:
        raise environment_error(CheckpointError(f"{path} cannot be read: {error.strerror or error}")) from None


def _inside(directory: Path, name: str, where: str) -> Path:
    """Return the path of a shard, which must lie in `directory`."""
    if name != Path(name).name or not name.endswith((".safetensors", ".safetensors.index.json")) or "\0" in name:
        raise CheckpointError(f"{directory / where} points to {name!r}: shards are .safetensors files of this folder")
    return directory / name


def _tensors(source: Path) -> dict[str, TensorInfo]:
    """Return the tensors of a source of weights, by name. Raises CheckpointError for the first fault found."""
    weight_map = _weight_map(source) if source.name.endswith(".json") else {}
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


def _read_header(file: Path) -> dict[str, TensorInfo]:
    """Return the tensors of a safetensors file. Raises CheckpointError where the library refuses its header."""
    from safetensors import SafetensorError, safe_open

    try:
        with _refusing(file), open_regular(file) as stream, safe_open(file, "numpy"):
            base = 8 + int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(base - 8))
    except (SafetensorError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{file} is damaged or cut off ({reason}): copy it again") from None
    header.pop("__metadata__", None)
    _check_names(file, header)
    return {
        name: TensorInfo(file, entry["dtype"], tuple(entry["shape"]), *(base + at for at in entry["data_offsets"]))
        for name, entry in header.items()
    }


def _check_names(file: Path, names: Iterable[str]) -> None:
    if any(len(name) > MAX_NAME or _LONG_NUMBER.search(name) for name in names):
        raise CheckpointError(f"{file} is damaged: a name has at most {MAX_NAME:,} characters and numbers of 9 digits")
