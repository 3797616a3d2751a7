"""Configurations of models (`config.json`), checked before anything is built from them.

A configuration comes with a checkpoint, so anybody may have written it. Its common fields have bounds: sizes beyond
any model's would take hours or all memory before an error shows. Fields that name code of a repository are left
out, with a warning, or refused: zinfer chooses implementations itself. All other fields pass, since each architecture
has its own.
"""

import math
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
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Fields that choose an implementation (of attention, of experts), and the implementations of transformers itself.
_CHOOSES = frozenset(
    f"{prefix}{part}_implementation{suffix}"
    for prefix in ("", "_")
    for part in ("attn", "experts")
    for suffix in ("", "_internal")
)
_IMPLEMENTATIONS = frozenset(
    {"None", "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention", "grouped_mm", "batched_mm"}
)
# Fields that name code or files of a repository, or switch them on.
_CODE = frozenset(
    {"auto_map", "custom_pipelines", "custom_generate", "use_kernels", "kernel_config", "trust_remote_code",
     "use_pretrained_backbone", "use_timm_backbone", "backbone_kwargs"}
)  # fmt: skip

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
    """Return the configuration in the file `path`, as it is written.

    Raises DocumentError, with file and field, if it cannot be read or believed; FileNotFoundError if it is missing.
    """
    return parse(read_bytes(path, MAX_BYTES), path)


def parse(content: bytes, name: object) -> dict[str, Any]:
    """Return the configuration that `content` holds, as it is written.

    `name` is its file, for messages. Raises DocumentError as `read` does; warns of fields that are left out.
    """
    config = parse_json(content, name, infinite=True, digits=DIGITS)
    if not isinstance(config, dict):
        raise DocumentError(f"{name} is not a JSON object")
    check(config, name)
    if dropped := sorted({key for _, key, part in _fields(config) if part and _names_code(key)}):
        warn(f"{name}: {', '.join(dropped)} left out: code of a checkpoint is never run")
    return config


def check(config: Mapping[str, Any], name: object) -> None:
    """Raise DocumentError for a configuration that is not believed.

    That is for a size out of bounds, for one of the wrong type among the fields that zinfer itself reads, and for an
    implementation that is none of transformers' own. The message has `name`, field and fault.
    """
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
    """Return a configuration without fields that name code or a classifier's labels.

    transformers would fetch a repository that is named as an implementation, and import it. Raises DocumentError, with
    `name`, for an implementation that is none of transformers' own.
    """
    for _, key, part in _fields(value):
        named = () if key not in _CHOOSES else part.values() if isinstance(part, Mapping) else [part]
        if unknown := [text for text in map(str, named) if text not in _IMPLEMENTATIONS]:
            prefix = f"{name}: " if name else ""
            raise DocumentError(f"{prefix}{key} {unknown[0][:80]!r} names code that zinfer does not run; remove it")
    kept: dict[str, Any] = without(value, lambda key: key in _CHOOSES or key in _LABELS or _names_code(key))
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


def _names_code(key: str) -> bool:
    named = key in _CODE or key.endswith(("_implementation", "_implementation_internal"))
    return named and key not in _CHOOSES


def _fields(value: Any, outer: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield path, name and value of each field, also of nested ones."""
    if isinstance(value, list):
        for part in value:
            yield from _fields(part, outer)
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield f"{outer}{key}", key, part
            yield from _fields(part, f"{outer}{key}.")
