"""Configurations of models (`config.json`), checked before anything is built from them.

Common fields have bounds: sizes beyond any model's would take hours or all memory before an error shows. Fields that
name code of a repository are left out, with a warning, or refused. All others pass: each architecture has its own.
"""

import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, StrictBool, StrictInt, StrictStr

from zinfer.core.model import CONFIG_KEYS
from zinfer.system.documents import DocumentError, parse_json, read_bytes, validate

MAX_BYTES = 16 << 20  # of a config.json
DIGITS = 40  # of an integer: transformers writes 10**30 for "no limit"
MAX_LAYERS = 1024  # the deepest published models have 160
# Our name of a quantity -> smallest and largest value. Null stands for the architecture's default.
_LIMITS = {"num_layers": (1, MAX_LAYERS), "hidden_size": (1, 1 << 20), "vocab_size": (1, 1 << 24),
           "max_position": (-1, 1 << 40)}  # fmt: skip
_BOUNDS = {name: _LIMITS.get(quantity, (0, 1 << 24)) for quantity, names in CONFIG_KEYS.items() for name in names}
_DEPTHS = ("layers", "n_layer", "depth", "depths", "blocks", "num_stages")  # ends of names that count modules
# Fields that choose an implementation (of attention, of experts), and the implementations of transformers itself.
_CHOOSES = re.compile(r"_?(attn|experts)_implementation(_internal)?")
_IMPLEMENTATIONS = frozenset(
    {"None", "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention", "grouped_mm", "batched_mm"}
)
# Fields that name code or files of a repository, or switch them on.
_CODE = re.compile(
    "auto_map|custom_pipelines|custom_generate|use_kernels|kernel_config|trust_remote_code|use_pretrained_backbone"
    "|use_timm_backbone|backbone_kwargs|.*_implementation(_internal)?"
)
# Labels of a classifier, which no language model has: transformers would make a text for each of num_labels.
_LABELS = frozenset({"num_labels", "id2label", "label2id"})
TokenId = Annotated[StrictInt, Field(ge=-1, lt=1 << 31)]


class _Config(BaseModel):
    """Fields that zinfer itself reads; each architecture has more."""

    model_type: StrictStr = ""
    text_config: "_Config | None" = None
    dtype: StrictStr | None = None
    torch_dtype: StrictStr | None = None
    architectures: list[StrictStr] | None = None
    tie_word_embeddings: StrictBool | None = None
    bos_token_id: TokenId | list[TokenId] | None = None
    eos_token_id: TokenId | list[TokenId] | None = None
    pad_token_id: TokenId | list[TokenId] | None = None
    initializer_range: float | None = Field(default=None, ge=0, lt=1e6)
    # kinds of layers, and how often they are repeated
    attention_types: list[tuple[list[Any], Annotated[int, Field(ge=0, le=MAX_LAYERS)]]] | StrictStr | None = None


class CheckpointWarning(UserWarning):
    """A part of a checkpoint that zinfer leaves out."""


def read(path: Path) -> dict[str, Any]:
    """Return the configuration in the file `path`, as it is written. Raises DocumentError, FileNotFoundError."""
    return parse(read_bytes(path, MAX_BYTES), path)


def parse(content: bytes, name: object) -> dict[str, Any]:
    """Return the configuration that `content` of the file `name` holds. Raises DocumentError; warns of code."""
    config = parse_json(content, name, infinite=True, digits=DIGITS)
    if not isinstance(config, dict):
        raise DocumentError(f"{name} is not a JSON object")
    check(config, name)
    code = {key for _, key, part in _fields(config) if part and _CODE.fullmatch(key)}
    if dropped := sorted(key for key in code if not _CHOOSES.fullmatch(key)):
        warn(f"{name}: {', '.join(dropped)} left out: code of a checkpoint is never run")
    return config


def check(config: Mapping[str, Any], name: object) -> None:
    """Raise DocumentError for sizes out of bounds, wrong types, or foreign implementations."""
    without_code(config, name)
    for path, key, part in _fields(config):
        low, high = _BOUNDS.get(key, (-math.inf, math.inf))
        if key.endswith(_DEPTHS) and key != "max_window_layers":
            high = min(high, MAX_LAYERS)
        for number in part if isinstance(part, list) else [part]:
            if isinstance(number, int | float) and not low <= number <= high:
                lower = f"at least {low:,}, " if math.isfinite(low) else ""
                raise DocumentError(f"{name}: {path} is {str(number)[:40]}: zinfer takes {lower}at most {high:,}")
    validate(_Config, config, name)


def without_code(value: Mapping[str, Any], name: object) -> dict[str, Any]:
    """Return a configuration without code's fields and labels. Raises DocumentError for foreign implementations."""
    for _, key, part in _fields(value):
        named = map(str, part.values() if isinstance(part, Mapping) else [part])
        if _CHOOSES.fullmatch(key) and (unknown := [text for text in named if text not in _IMPLEMENTATIONS]):
            prefix = f"{name}: " if name else ""
            raise DocumentError(f"{prefix}{key} {unknown[0][:80]!r} names code that zinfer does not run; remove it")
    kept: dict[str, Any] = without(value, lambda key: key in _LABELS or _CODE.fullmatch(key) is not None)
    return kept


def without(value: Any, drop: Callable[[str], bool]) -> Any:
    """Return a copy of JSON without the fields whose name `drop` tells."""
    if isinstance(value, list):
        return [without(part, drop) for part in value]
    if not isinstance(value, Mapping):
        return value
    return {key: without(part, drop) for key, part in value.items() if not drop(key)}


def warn(message: str) -> None:
    warnings.warn(CheckpointWarning(message), stacklevel=3)


def _fields(value: Any, outer: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield path, name and value of each field, also of nested ones."""
    if isinstance(value, list):
        for part in value:
            yield from _fields(part, outer)
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield f"{outer}{key}", key, part
            yield from _fields(part, f"{outer}{key}.")
