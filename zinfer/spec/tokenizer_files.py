"""Tokenizer files of a checkpoint, checked and cleaned before a library reads them.

`transformers` passes all fields of `tokenizer_config.json` to a class that the file names, and looks for more files in
the folder. So it gets a folder of its own: links to the vocabularies, which are regular files of bounded size, and a
configuration without the fields that name code or files. Nothing else of the checkpoint is in it: no pickled
vocabulary, no adapter, no processor, no module.
"""

import json
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr

from zinfer.spec import configuration, lease
from zinfer.spec.configuration import DIGITS, MAX_TOKEN, CheckpointWarning, without_code
from zinfer.spec.documents import DocumentError, decode, open_regular, read_bytes, read_object, validate
from zinfer.spec.model import ModelError

CONFIG, TEMPLATE, GENERATION = "tokenizer_config.json", "chat_template.jinja", "generation_config.json"
MAX_VOCABULARY = 1 << 30  # bytes of a vocabulary; the largest in use have 40 MB
MAX_CONFIG = 16 << 20
MAX_TEMPLATE = 1 << 20
_SUFFIXES = (".json", ".txt", ".model", ".tiktoken", ".bpe", ".vocab", ".spm", ".codes", ".tokenizer")
# Files with these endings and none of a tokenizer: other configurations, lists of weights, texts about the model.
_OTHERS = ("config.json", "processor.json", "index.json", "template.json", "modules.json", "readme.txt", "license.txt")
_JSON_MAPS = ("special_tokens_map.json", "added_tokens.json")
# Fields that name code, or choose it; fields that name files are left out without a word, since old checkpoints hold
# the paths of their authors' machines.
_CODE = frozenset({"auto_map", "custom_generate", "trust_remote_code", "tokenizer_object", "slow_tokenizer"})
_FILES = frozenset({"name_or_path", "_name_or_path", "_commit_hash", "init_inputs", "fast_tokenizer_files"})
_FILE_ENDS = ("_file", "_files", "_path", "_dir", "_folder")

TokenId = Annotated[StrictInt, Field(ge=-1, le=MAX_TOKEN)]


class _NamedTemplate(BaseModel):
    name: StrictStr
    template: StrictStr


class _TokenizerConfig(BaseModel):
    """Fields that zinfer relies on; a tokenizer class has more."""

    model_config = ConfigDict(extra="allow")

    tokenizer_class: StrictStr | None = None
    chat_template: StrictStr | list[_NamedTemplate] | dict[str, StrictStr] | None = None
    added_tokens_decoder: dict[str, dict[str, Any]] = Field(default_factory=dict)
    model_max_length: float | None = None


class _GenerationConfig(BaseModel):
    """Field of `generation_config.json` that zinfer uses; it samples as its own options say."""

    eos_token_id: TokenId | list[TokenId] | None = None


def require(directory: Path) -> None:
    """Raise ModelError, in one line, if `directory` holds no tokenizer, or if a file of it cannot be read or believed.
    Needs neither torch nor transformers."""
    with _explained(directory):
        _read(directory, lambda _: True)
    end_tokens(directory)


def end_tokens(directory: Path) -> list[int] | None:
    """Return the tokens that end a text, as `generation_config.json` has them; None if it does not say. Raises
    ModelError for a file that cannot be read or believed."""
    path = directory / GENERATION
    if not os.path.lexists(path):
        return None
    with _explained(directory):
        settings = read_object(path, MAX_CONFIG, infinite=True, digits=DIGITS)
        found = validate(_GenerationConfig, settings, path).eos_token_id
    return [found] if isinstance(found, int) else found


def files(directory: Path) -> list[Path]:
    """Return the files in `directory` that describe its tokenizer, and `generation_config.json`, by name."""
    named = {CONFIG, TEMPLATE, GENERATION, *_JSON_MAPS}
    return [
        path
        for path in sorted(directory.iterdir())
        if path.is_file() and (path.name in named or _is_vocabulary(path.name))
    ]


@contextmanager
def cleaned(directory: Path, is_tokenizer: Callable[[str], bool]) -> Iterator[Path]:
    """Provide a temporary folder from which the tokenizer of `directory` can be loaded safely; `is_tokenizer` tells
    whether a name is that of a tokenizer class. Raises ModelError as `require` does."""
    with _explained(directory):
        documents, vocabularies = _read(directory, is_tokenizer)
    with lease.folder(Path(tempfile.gettempdir()), "tokenizer", ("*", "*@")) as owned:
        folder = owned.path
        for name, content in documents.items():
            (folder / name).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        for path in vocabularies:
            (folder / path.name).symlink_to(path.resolve())
        yield folder


@contextmanager
def _explained(directory: Path) -> Iterator[None]:
    try:
        yield
    except DocumentError as error:
        raise ModelError(str(error)) from None
    except OSError as error:
        raise ModelError(f"the tokenizer of {directory} cannot be read: {error.strerror or error}") from None


def _read(directory: Path, is_tokenizer: Callable[[str], bool]) -> tuple[dict[str, Any], list[Path]]:
    """Return the documents of the tokenizer, cleaned, by file name, and the paths of its vocabularies."""
    documents: dict[str, Any] = {}
    vocabularies: list[Path] = []
    for path in sorted(directory.iterdir()):
        name = path.name
        if name == CONFIG:
            settings = read_object(path, MAX_CONFIG, infinite=True, digits=DIGITS)
            validate(_TokenizerConfig, settings, path)
            documents[name] = _without_code(settings, path, is_tokenizer)
        elif name == TEMPLATE:
            documents[name] = decode(read_bytes(path, MAX_TEMPLATE), path)
        elif name in _JSON_MAPS:
            documents[name] = read_object(path, MAX_CONFIG)
        elif _is_vocabulary(name):
            if path.is_dir():
                continue
            with open_regular(path) as stream:
                if (size := os.fstat(stream.fileno()).st_size) > MAX_VOCABULARY:
                    raise DocumentError(f"{path} has {size:,} bytes: it is no vocabulary")
            vocabularies.append(path)
    if not vocabularies and CONFIG not in documents:
        raise ModelError(f"{directory} has no tokenizer: it holds no tokenizer.json, {CONFIG} or vocabulary")
    if os.path.lexists(directory / "config.json"):
        config = without_code(configuration.read(directory / "config.json"), directory / "config.json")
        documents["config.json"] = _class_checked(config, directory / "config.json", is_tokenizer)
    return documents, vocabularies


def _is_vocabulary(name: str) -> bool:
    return name.endswith(_SUFFIXES) and not name.lower().endswith(_OTHERS)


def _without_code(settings: Mapping[str, Any], path: Path, is_tokenizer: Callable[[str], bool]) -> dict[str, Any]:
    """Return the tokenizer's settings without the fields that name code or files, with a warning of the former."""
    if left_out := sorted(key for key in settings.keys() & _CODE if settings[key]):
        _warn(f"{path}: {', '.join(left_out)} left out: code of a checkpoint is never run")
    kept = {key: _without_files(value) for key, value in settings.items() if not (key in _CODE or _names_file(key))}
    return _class_checked(kept, path, is_tokenizer)


def _class_checked(settings: dict[str, Any], path: Path, is_tokenizer: Callable[[str], bool]) -> dict[str, Any]:
    name = settings.get("tokenizer_class")
    if name is None or (isinstance(name, str) and is_tokenizer(name)):
        return settings
    _warn(f"{path}: tokenizer_class {str(name)[:80]!r} left out: transformers has no tokenizer of this name")
    return {key: value for key, value in settings.items() if key != "tokenizer_class"}


def _without_files(value: Any) -> Any:
    """Return a copy of a nested setting without the fields that name files (those of sentencepiece, for example)."""
    if isinstance(value, list):
        return [_without_files(part) for part in value]
    if not isinstance(value, dict):
        return value
    return {key: _without_files(part) for key, part in value.items() if not _names_file(key)}


def _names_file(key: str) -> bool:
    return key in _FILES or key.endswith(_FILE_ENDS)


def _warn(message: str) -> None:
    warnings.warn(CheckpointWarning(message), stacklevel=2)
