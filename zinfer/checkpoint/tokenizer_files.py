"""Tokenizer files of a checkpoint, cleaned before a library reads them.

`transformers` passes all fields of `tokenizer_config.json` to a class that the file names, and looks for more files in
the folder. So it gets a folder of its own: links to the vocabularies, which are regular files of bounded size, and a
configuration without fields that name code or files. The chat template is zinfer's to choose.
"""

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, StrictStr

from zinfer.checkpoint import configuration, gguf
from zinfer.checkpoint.configuration import DIGITS, TokenId, warn, without, without_code
from zinfer.core.model import ModelError, ModelSpec
from zinfer.system import scratch
from zinfer.system.documents import DocumentError, decode, open_regular, read_bytes, read_object, validate

CONFIG, GENERATION = "tokenizer_config.json", "generation_config.json"
TEMPLATE, TEMPLATES = "chat_template.jinja", "additional_chat_templates"  # a file, and a folder of named ones
# Files whose `chat_template` counts where there is none of these: the tokenizer's own, then those of a processor.
TEMPLATE_HOLDERS = (CONFIG, "chat_template.json", "processor_config.json")
DEFAULT = "default"  # name of the chat template that is used unless another is asked for
MAX_VOCABULARY = 1 << 30  # bytes of a vocabulary; the largest in use have 40 MB
MAX_CONFIG = 16 << 20
MAX_TEMPLATE = 1 << 20
_SUFFIXES = (".json", ".txt", ".model", ".tiktoken", ".bpe", ".vocab", ".spm", ".codes", ".tokenizer")
# Files with these endings and none of a tokenizer: other configurations, lists of weights, texts about the model.
_OTHERS = ("config.json", "processor.json", "index.json", "template.json", "modules.json", "readme.txt", "license.txt")
_JSON_MAPS = ("special_tokens_map.json", "added_tokens.json")
# Fields that name code, or choose it.
_CODE = frozenset({"auto_map", "custom_generate", "trust_remote_code", "tokenizer_object", "slow_tokenizer"})
# Fields that are left out without a word: templates, and names of files on the machines of their authors.
_SILENT = frozenset(
    {"chat_template", "name_or_path", "_name_or_path", "_commit_hash", "init_inputs", "fast_tokenizer_files"}
)
_FILE_ENDS = ("_file", "_files", "_path", "_dir", "_folder")


class _NamedTemplate(BaseModel):
    name: StrictStr
    template: StrictStr


class _TemplateHolder(BaseModel):
    """A file that may hold chat templates: one, or several by name."""

    chat_template: StrictStr | list[_NamedTemplate] | dict[str, StrictStr] | None = None


class _GenerationConfig(BaseModel):
    eos_token_id: TokenId | list[TokenId] | None = None


class ChatTemplate(NamedTuple):
    """Text of a chat template, or why there is none."""

    text: str | None = None
    why_not: str = ""
    names: tuple[str, ...] = ()


def folder_of(spec: ModelSpec) -> Path | None:
    """Return the folder of a model's tokenizer, of a GGUF a copy; None for dummy weights. Raises ModelError."""
    if spec.directory is None:
        return None
    with _explained(Path(spec.directory)):
        return gguf.tokenizer(parts) if (parts := gguf.find(Path(spec.directory))) else Path(spec.directory)


def require(directory: Path) -> None:
    """Raise ModelError if `directory` holds no tokenizer that can be believed."""
    with _explained(directory):
        _read(directory, lambda _: True)
        _templates(directory)
    _generation_ends(directory)


def end_tokens(
    directory: Path | None, config: Mapping[str, Any], tokenizer_end: int | None, vocab_size: int
) -> list[int]:
    """Return the tokens that end a text: those of all sources, which often differ. Raises ModelError."""
    given = config.get("eos_token_id")
    ends = [*_generation_ends(directory), *(given if isinstance(given, list) else [given]), tokenizer_end]
    return [token for token in dict.fromkeys(ends) if isinstance(token, int) and 0 <= token < vocab_size]


def _generation_ends(directory: Path | None) -> list[Any]:
    if directory is None or not os.path.lexists(directory / GENERATION):
        return []
    with _explained(directory):
        settings = read_object(directory / GENERATION, MAX_CONFIG, infinite=True, digits=DIGITS)
        ends = validate(_GenerationConfig, settings, directory / GENERATION).eos_token_id
    return ends if isinstance(ends, list) else [ends]


def chat_template(directory: Path | None, wanted: str | None = None) -> ChatTemplate:
    """Return the chat template. It is the checkpoint's, or the name or file `wanted`. Raises ModelError."""
    templates = {}
    if directory is not None:
        with _explained(directory):
            templates = _templates(directory)
    names = tuple(sorted(templates))
    if (chosen := DEFAULT if wanted is None else wanted) in templates:
        return ChatTemplate(templates[chosen], names=names)
    if wanted is None:
        why = "the model has no chat template: use /v1/completions, or --chat-template FILE"
        if names:
            listed = ", ".join(names)[:200]
            why = f"the model's chat templates are {listed}, none the default: choose one with --chat-template"
        return ChatTemplate(None, why, names)
    try:
        return ChatTemplate(decode(read_bytes(Path(wanted), MAX_TEMPLATE), wanted), names=names)
    except FileNotFoundError:
        choices = f"the model's are {', '.join(names)[:200]}" if names else "the model has none"
        raise ModelError(f"--chat-template {wanted[:200]}: no such file or chat template; {choices}") from None
    except DocumentError as error:
        raise error.converted(ModelError) from None


def _templates(directory: Path) -> dict[str, str]:
    """Return the chat templates by name, of the first source with any."""
    templates: dict[str, str] = {}
    if os.path.lexists(directory / TEMPLATE):
        templates[DEFAULT] = decode(read_bytes(directory / TEMPLATE, MAX_TEMPLATE), directory / TEMPLATE)
    if (directory / TEMPLATES).is_dir():
        for path in sorted((directory / TEMPLATES).glob("*.jinja")):
            templates[path.stem] = decode(read_bytes(path, MAX_TEMPLATE), path)
    for name in TEMPLATE_HOLDERS:
        path = directory / name
        if any(templates.values()) or not os.path.lexists(path):
            continue
        settings = read_object(path, MAX_CONFIG, infinite=True, digits=DIGITS)
        given = validate(_TemplateHolder, settings, path).chat_template
        if isinstance(given, list):
            given = {template.name: template.template for template in given}
        templates = {DEFAULT: given} if isinstance(given, str) else given or {}
        if any(len(text) > MAX_TEMPLATE for text in templates.values()):
            raise DocumentError(f"{path}: a chat template has more than {MAX_TEMPLATE:,} characters")
    return {name: text for name, text in templates.items() if text}


def files(directory: Path) -> list[Path]:
    """Return the files of a tokenizer, its chat template and end tokens."""
    names = {TEMPLATE, *TEMPLATE_HOLDERS, GENERATION, *_JSON_MAPS}
    paths = sorted(path for path in directory.iterdir() if path.is_file())
    return [path for path in paths if path.name in names or _is_vocabulary(path.name)]


@contextmanager
def cleaned(directory: Path, is_tokenizer: Callable[[str], bool]) -> Iterator[Path]:
    """Provide a temporary folder to load the tokenizer of `directory` from safely. Raises ModelError."""
    with _explained(directory):
        documents, vocabularies = _read(directory, is_tokenizer)
    with scratch.folder(Path(tempfile.gettempdir()), "tokenizer") as owned:
        for name, content in documents.items():
            (owned.path / name).write_text(json.dumps(content), encoding="utf-8")
        for path in vocabularies:
            (owned.path / path.name).symlink_to(path.resolve())
        yield owned.path


@contextmanager
def _explained(directory: Path) -> Iterator[None]:
    try:
        yield
    except DocumentError as error:
        raise error.converted(ModelError) from None
    except OSError as error:
        raise ModelError(f"the tokenizer of {directory} cannot be read: {error.strerror or error}") from None


def _read(directory: Path, is_tokenizer: Callable[[str], bool]) -> tuple[dict[str, Any], list[Path]]:
    """Return the cleaned documents of the tokenizer, and its vocabularies."""
    documents: dict[str, Any] = {}
    vocabularies: list[Path] = []
    for path in sorted(directory.iterdir()):
        name = path.name
        if name == CONFIG:
            settings = read_object(path, MAX_CONFIG, infinite=True, digits=DIGITS)
            if dropped := sorted(key for key in settings.keys() & _CODE if settings[key]):
                warn(f"{path}: {', '.join(dropped)} left out: code of a checkpoint is never run")
            kept = without(settings, lambda key: key in _CODE or key in _SILENT or key.endswith(_FILE_ENDS))
            documents[name] = _class_checked(kept, path, is_tokenizer)
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


def _class_checked(settings: dict[str, Any], path: Path, is_tokenizer: Callable[[str], bool]) -> dict[str, Any]:
    name = settings.get("tokenizer_class")
    if name is None or (isinstance(name, str) and is_tokenizer(name)):
        return settings
    warn(f"{path}: tokenizer_class {str(name)[:80]!r} left out: transformers has no tokenizer of this name")
    return {key: value for key, value in settings.items() if key != "tokenizer_class"}
