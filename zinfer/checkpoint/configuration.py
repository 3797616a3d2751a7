"""Configurations of models (`config.json`), checked before anything is built from them.

A configuration comes with a checkpoint, so anybody may have written it. Its common fields have bounds: sizes beyond
any model's would take hours or all memory before an error shows. Fields that name code of a repository are left
out, with a warning, or refused: zinfer chooses implementations itself. All other fields pass, since each architecture
has its own.
"""

import math
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zinfer.core.model import CONFIG_KEYS
from zinfer.system.documents import DocumentError, parse_json, read_bytes

MAX_BYTES = 16 << 20  # of a config.json
DIGITS = 40  # of an integer: transformers writes 10**30 for "no limit"
MAX_LAYERS = 1024  # the deepest published models have 160
MAX_EXPERTS = 1 << 21  # of all layers together
MAX_TOKEN = (1 << 31) - 1
# Our name of a quantity -> smallest and largest value. Null stands for the architecture's default.
_LIMITS: dict[str, tuple[int, int]] = {
    "num_layers": (1, MAX_LAYERS),
    "hidden_size": (1, 1 << 20),
    "num_heads": (0, 1 << 16),
    "num_kv_heads": (0, 1 << 16),
    "head_dim": (0, 1 << 16),
    "ffn_size": (0, 1 << 24),
    "vocab_size": (1, 1 << 24),
    "max_position": (-1, 1 << 40),
    "num_experts": (0, 1 << 16),
    "experts_per_token": (0, 4096),
}
_BOUNDS = {name: _LIMITS[quantity] for quantity, names in CONFIG_KEYS.items() for name in names}
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
    if left_out := sorted(set(_code_fields(config))):
        warnings.warn(
            CheckpointWarning(f"{name}: {', '.join(left_out)} left out: code of a checkpoint is never run"),
            stacklevel=2,
        )
    return config


def check(config: Mapping[str, Any], name: object) -> None:
    """Raise DocumentError for a configuration that is not believed.

    That is for a value out of bounds, for one of the wrong type among the fields that zinfer itself reads, and for an
    implementation that is none of transformers' own. The message has `name`, field and fault.
    """
    without_code(config, name)
    _check_sizes(config, f"{name}: ")
    if not isinstance(config.get("model_type", ""), str):
        raise DocumentError(f"{name}: model_type is no text")
    inner = config.get("text_config")
    if not isinstance(inner, Mapping | None):
        raise DocumentError(f"{name}: text_config is no object")
    for prefix, part in (("", config), ("text_config.", inner or {})):
        _check_types(part, f"{name}: {prefix}")


def without_code(value: Any, name: object) -> Any:
    """Return a configuration without fields that name code or a classifier's labels.

    transformers would fetch a repository that is named as an implementation, and import it. Raises DocumentError, with
    `name`, for an implementation that is none of transformers' own.
    """
    if isinstance(value, list):
        return [without_code(part, name) for part in value]
    if not isinstance(value, Mapping):
        return value
    for key in sorted(_CHOOSES & value.keys()):
        named = value[key].values() if isinstance(value[key], Mapping) else [value[key]]
        if unknown := [text for text in map(str, named) if text not in _IMPLEMENTATIONS]:
            prefix = f"{name}: " if name else ""
            raise DocumentError(f"{prefix}{key} {unknown[0][:80]!r} names code that zinfer does not run; remove it")
    return {
        key: without_code(part, name)
        for key, part in value.items()
        if key not in _CHOOSES and key not in _LABELS and not _names_code(key)
    }


def _names_code(key: str) -> bool:
    return key in _CODE or key.endswith(("_implementation", "_implementation_internal"))


def _code_fields(value: Any) -> Iterator[str]:
    """Yield the names of fields that `without_code` leaves out as code."""
    if isinstance(value, list):
        for part in value:
            yield from _code_fields(part)
    elif isinstance(value, Mapping):
        for key, part in value.items():
            if key not in _CHOOSES and _names_code(key):
                if part:
                    yield key
            else:
                yield from _code_fields(part)


def _check_sizes(value: Any, where: str, outer: str = "") -> None:
    if isinstance(value, list):
        for part in value:
            if isinstance(part, Mapping | list):
                _check_sizes(part, where, outer)
        return
    for key, part in value.items():
        low, high = _BOUNDS.get(key, (-math.inf, math.inf))
        if key.endswith(_DEPTHS) and key != "max_window_layers":
            high = min(high, MAX_LAYERS)
        for number in part if isinstance(part, list) else [part]:
            if isinstance(number, int | float) and not low <= number <= high:
                lower = f"at least {low:,}, " if math.isfinite(low) else ""
                raise DocumentError(f"{where}{outer}{key} is {str(number)[:40]}: zinfer takes {lower}at most {high:,}")
        if isinstance(part, Mapping | list):
            _check_sizes(part, where, f"{outer}{key}." if isinstance(part, Mapping) else outer)
    layers = _largest(value, "num_layers")
    if (modules := layers * _largest(value, "num_experts")) > MAX_EXPERTS:
        raise DocumentError(f"{where}{outer}{modules:,} experts in all layers: zinfer takes at most {MAX_EXPERTS:,}")


def _largest(config: Mapping[str, Any], quantity: str) -> int:
    values = (config.get(name) for name in CONFIG_KEYS[quantity])
    return max((value for value in values if isinstance(value, int)), default=0)


def _check_types(config: Mapping[str, Any], where: str) -> None:
    """Raise DocumentError for a wrong type among the fields that zinfer reads."""
    for key in _BOUNDS.keys() & config.keys():
        for number in config[key] if isinstance(config[key], list) else [config[key]]:
            whole = (
                number.is_integer() if isinstance(number, float) else isinstance(number, int | list | Mapping | None)
            )
            if not whole or isinstance(number, bool):
                raise DocumentError(f"{where}{key} is {str(number)[:40]!r}: zinfer takes a whole number")
    for key in _TOKENS:
        for number in config[key] if isinstance(config.get(key), list) else [config.get(key)]:
            if number is not None and not (type(number) is int and -1 <= number <= MAX_TOKEN):
                raise DocumentError(f"{where}{key} is {str(number)[:40]!r}: zinfer takes a token's number")
    for key in ("dtype", "torch_dtype"):
        if not isinstance(config.get(key), str | None):
            raise DocumentError(f"{where}{key} is no text")
    names = config.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise DocumentError(f"{where}architectures is no list of names")
    if not isinstance(config.get("tie_word_embeddings"), bool | None):
        raise DocumentError(f"{where}tie_word_embeddings is neither true nor false")
    std = config.get("initializer_range")
    if std is not None and not (type(std) in (int, float) and 0 <= std < 1e6):
        raise DocumentError(f"{where}initializer_range is {str(std)[:40]!r}: zinfer takes a number from 0 on")
    for pair in config["attention_types"] if isinstance(config.get("attention_types"), list) else ():
        kinds, times = pair if isinstance(pair, list) and len(pair) == 2 else (None, None)
        if not (isinstance(kinds, list) and isinstance(times, int) and 0 <= times <= MAX_LAYERS):
            raise DocumentError(f"{where}attention_types is no list of kinds and repetitions")
