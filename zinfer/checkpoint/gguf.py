"""GGUF files: their metadata as a configuration, the places of their tensors, and their tokenizer.

The maps of `transformers` make the configuration; sizes and rotary positions complete it. Parsing takes seconds, so the
result is kept in the user's cache. `zinfer.checkpoint.gguf_names` gives tensors the names of a model.
"""

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel

from zinfer.core.errors import environment_error, error_line
from zinfer.system import atomic, scratch
from zinfer.system.documents import DocumentError, open_regular, read_bytes
from zinfer.system.host import cache_folder

SUFFIX = ".gguf"
# Types that are read: values as they are, and blocks of codes -> values of a block, bytes of it, and bits of a code.
VALUES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
BLOCKS = {
    "Q4_0": (32, 18, 4), "Q4_1": (32, 20, 4), "Q8_0": (32, 34, 8), "MXFP4": (32, 17, 4),
    "Q4_K": (256, 144, 4), "Q5_K": (256, 176, 5), "Q6_K": (256, 210, 6),
}  # fmt: skip
HELD = {"Q4_K": 148 / 144, "Q5_K": 180 / 176}  # bytes in memory over those of the file: a scale of 6 bits takes a byte
FORMS = {"Q4_K": 160 / 144, "Q5_K": 192 / 176, "Q6_K": 224 / 210}  # likewise as kernels read them, with wider scales
# Architectures that are read, where the installed transformers maps them; others might be read wrong without a word.
ARCHITECTURES = (
    "gemma2", "gemma3", "gpt-oss", "llama", "mistral", "phi3", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "stablelm",
    "starcoder2",
)  # fmt: skip
ROTATION = "rope_freqs.weight"  # tensor that tells how Llama 3.1 and later stretch positions
_FACTORS = re.compile(r"rope_factors_(?:long|short)\.weight")
_SPLIT = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf")
_LONG = 1000  # numbers of an array that is no part of a configuration
# Fields of the metadata that transformers does not read for all architectures -> fields of a configuration.
_MORE = {
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "rope.freq_base": "rope_theta",
}
_PARTLY_ROTATED = {"phi3", "stablelm"}  # model types whose rope.dimension_count is not all of a head
_SCALINGS = {
    "factor": "factor", "original_context_length": "original_max_position_embeddings",
    "attn_factor": "attention_factor", "yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow",
}  # fmt: skip
_27B = (46, 62)  # layers of Gemma 2 and 3 in this size, whose queries are scaled otherwise


class Place(NamedTuple):
    """Tensor of a GGUF: its type, and bytes ``[start, end)`` of the part number `part`."""

    part: int
    type: str
    shape: tuple[int, ...]
    start: int
    end: int


class Gguf(BaseModel):
    """Content of a GGUF: architecture, configuration, and places of tensors by its own names."""

    architecture: str
    config: dict[str, Any]
    tensors: dict[str, Place]


def find(path: Path) -> tuple[Path, ...]:
    """Return the files of the GGUF at `path`.

    That is a file, or a folder that holds one and no safetensors; else the result is empty. Raises DocumentError for
    several, and for missing parts.
    """
    if path.suffix == SUFFIX and not path.is_dir():
        return _parts_of(path)
    if not path.is_dir() or any(path.glob("*.safetensors*")):
        return ()
    files = sorted(file for file in path.glob(f"*{SUFFIX}") if not file.name.startswith("mmproj"))
    models = list(dict.fromkeys(map(_parts_of, files)))
    if len(models) > 1:
        names = ", ".join(parts[0].name for parts in models[:4])
        raise DocumentError(f"{path} holds several GGUF models: name one of {names}")
    return models[0] if models else ()


def _parts_of(file: Path) -> tuple[Path, ...]:
    split = _SPLIT.fullmatch(file.name)
    if split is None:
        return (file,)
    count = int(split[2])
    parts = tuple(file.with_name(f"{split[1]}-{number:05}-of-{split[2]}{SUFFIX}") for number in range(1, count + 1))
    for part in parts:
        if not part.exists():
            raise DocumentError(f"{part} is missing: it is one of the {count} parts of a GGUF")
    return parts


def _cached(parts: tuple[Path, ...], kind: str) -> Path:
    """Return the place of something made of a GGUF. Raises OSError, DocumentError."""
    try:
        made_of = [version("gguf"), version("transformers")]
    except PackageNotFoundError:
        fault = DocumentError(f"{parts[0]} is a GGUF file: pip install 'zinfer[engines,gguf]'")
        raise environment_error(fault) from None
    for part in parts:
        status = part.stat()
        made_of += [str(part.resolve()), str([status.st_size, status.st_ino, status.st_mtime_ns])]
    digest = hashlib.sha256(json.dumps(made_of).encode() + Path(__file__).read_bytes()).hexdigest()[:24]
    return cache_folder() / f"gguf-{digest}{kind}"


def read(parts: tuple[Path, ...]) -> Gguf:
    """Return the content of a GGUF. Raises DocumentError for types and architectures that are not read, and OSError."""
    cache = _cached(parts, ".json")
    with suppress(OSError, ValueError):
        return Gguf.model_validate_json(read_bytes(cache))
    fields, tensors = dict[str, Any](), dict[str, Place]()
    for number, part in enumerate(parts):
        _read_part(number, part, fields, tensors)
    architecture = fields.get("general.architecture")
    if not isinstance(architecture, str) or not tensors:
        raise DocumentError(f"{parts[0]} is no GGUF of a language model: it names no architecture, or holds no tensors")
    for name, place in tensors.items():
        if place.type not in {*VALUES, *BLOCKS}:
            known = ", ".join((*BLOCKS, *VALUES))
            raise DocumentError(f"{parts[place.part]} holds {name} as {place.type}: zinfer reads {known}")
    config = _config(parts[0], architecture, fields, tensors)
    result = Gguf(architecture=architecture, config=config, tensors=tensors)
    with suppress(OSError):  # without the file it is parsed again next time
        atomic.write(cache, result.model_dump_json())
    return result


def _read_part(number: int, part: Path, fields: dict[str, Any], tensors: dict[str, Place]) -> None:
    """Add metadata, with the values of `ROTATION`, and places of tensors."""
    from gguf import GGUFReader

    open_regular(part).close()
    try:
        reader = GGUFReader(str(part))
        for name, field in reader.fields.items():
            if len(field.data) <= _LONG:
                fields.setdefault(name, field.contents())
        for tensor in reader.tensors:
            end = int(tensor.data_offset + tensor.n_bytes)
            if end > part.stat().st_size or tensor.name in tensors:
                raise ValueError(f"{tensor.name} lies outside of the file, or is stored twice")
            shape = tuple(int(length) for length in reversed(tensor.shape))
            tensors[tensor.name] = Place(number, tensor.tensor_type.name, shape, int(tensor.data_offset), end)
            if tensor.name == ROTATION:
                fields[ROTATION] = tensor.data.tolist()
    except OSError:
        raise
    except Exception as error:  # the library raises many kinds
        raise DocumentError(f"{part} is damaged or cut off ({error_line(error)[:120]}): copy it again") from None


def _config(file: Path, architecture: str, fields: Mapping[str, Any], tensors: Mapping[str, Place]) -> dict[str, Any]:
    """Return the configuration. Raises DocumentError for an architecture that is not read."""
    from transformers.integrations import GGUF_CONFIG_DEFAULTS_MAPPING, GGUF_CONFIG_MAPPING

    maps = {name: name.replace("-", "_").replace("moe", "_moe") for name in ARCHITECTURES}  # names in transformers
    maps = {name: mapped for name, mapped in maps.items() if mapped in GGUF_CONFIG_MAPPING}
    if architecture not in maps:
        raise DocumentError(
            f"{file} is a GGUF of the architecture {architecture[:80]!r}; with transformers {version('transformers')} "
            f"zinfer reads {', '.join(maps)}"
        )
    mapped = maps[architecture]

    def field(name: str) -> Any:
        return fields.get(f"{architecture}.{name}")

    names = [*_MORE.items(), *GGUF_CONFIG_MAPPING[mapped].items()]
    given = [(key, field(name)) for name, key in names if isinstance(key, str)]
    given += [(key, fields.get(f"tokenizer.{name}")) for name, key in GGUF_CONFIG_MAPPING["tokenizer"].items()]
    config: dict[str, Any] = GGUF_CONFIG_DEFAULTS_MAPPING.get(mapped, {}) | {k: v for k, v in given if v is not None}
    kind = "mixtral" if mapped == "llama" and field("expert_count") else {"gemma3": "gemma3_text"}.get(mapped, mapped)
    config["model_type"] = kind
    if kind == "stablelm":
        config["use_qkv_bias"] = "blk.0.attn_q.bias" in tensors
        config["use_parallel_residual"] = "blk.0.ffn_norm.weight" not in tensors
    if kind == "gpt_oss" and "moe_intermediate_size" in config:
        config["intermediate_size"] = config["moe_intermediate_size"]
    if (embedding := tensors.get("token_embd.weight")) is not None:
        config["vocab_size"] = embedding.shape[0]
    config["tie_word_embeddings"] = "output.weight" not in tensors
    width = config.get("head_dim") or (config.get("hidden_size") or 0) // (config.get("num_attention_heads") or 1)
    rotated = field("rope.dimension_count")
    if kind in _PARTLY_ROTATED and rotated and width:
        config["partial_rotary_factor"] = rotated / width
    if kind in ("gemma2", "gemma3_text"):
        large = config.get("num_hidden_layers") in _27B
        config["query_pre_attn_scalar"] = config["hidden_size"] / config["num_attention_heads"] if large else width
    theta = float(config.get("rope_theta") or 10000.0)
    if (scaling := _scaling(file, field, kind, theta, width, fields.get(ROTATION))) is not None:
        config["rope_scaling"] = scaling
    if factors := next(filter(_FACTORS.fullmatch, tensors), None):
        raise DocumentError(f"{file} holds {factors}: transformers takes no factors of positions from a GGUF")
    config["dtype"] = _dtype(tensors)
    return config


def _scaling(
    file: Path, field: Callable[[str], Any], kind: str, theta: float, width: int, rotation: Any
) -> dict[str, Any] | None:
    """Return how positions are stretched, as `rope_scaling`. Raises DocumentError for an unknown way."""
    if rotation is not None and max(rotation) != 1:
        if not _is_llama3(rotation, theta, width):
            raise DocumentError(f"{file} holds {ROTATION} with other factors than those of Llama 3")
        return {"rope_type": "llama3", "factor": float(max(rotation)), "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
    method = field("rope.scaling.type")
    if method in (None, "none"):
        return None
    if method not in ("linear", "yarn"):
        raise DocumentError(f"{file} stretches positions by {method!r}; zinfer reads linear and yarn from a GGUF")
    scaling = {"rope_type": method}
    for name, key in _SCALINGS.items():
        if field(f"rope.scaling.{name}") is not None:
            scaling[key] = field(f"rope.scaling.{name}")
    return scaling | ({"truncate": False} if kind == "gpt_oss" else {})


def _is_llama3(rotation: list[float], theta: float, width: int) -> bool:
    """Tell whether factors are those of Llama 3 for 8,192 positions."""
    turns = [8192 / (2 * math.pi * theta ** (2 * number / width)) for number in range(width // 2)]
    smooth = [min(1.0, max(0.0, (turn - 1) / 3)) for turn in turns]
    wanted = [1 / ((1 - share) / max(rotation) + share) for share in smooth]
    alike = (math.isclose(given, factor, rel_tol=1e-3) for given, factor in zip(rotation, wanted, strict=False))
    return len(rotation) == len(wanted) and all(alike)


def _dtype(tensors: Mapping[str, Place]) -> str:
    """Return the type of the model: that of most bytes, bfloat16 if they are codes."""
    sizes = Counter[str]()
    for place in tensors.values():
        sizes[VALUES.get(place.type, "bfloat16")] += place.end - place.start
    return sizes.most_common(1)[0][0]


def tokenizer(parts: tuple[Path, ...]) -> Path:
    """Return a folder with the tokenizer of a GGUF.

    transformers makes it, once, in the user's cache. Raises DocumentError where it cannot be made, and OSError.
    """
    folder = _cached(parts, "-tokenizer")
    if (folder / "generation_config.json").is_file():
        return folder
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    folder.parent.mkdir(parents=True, exist_ok=True)
    fields = dict[str, Any]()
    _read_part(0, parts[0], fields, {})
    first = fields.get("tokenizer.ggml.bos_token_id")
    begins = fields.get("tokenizer.ggml.add_bos_token", fields.get("tokenizer.ggml.model") == "llama")
    ends = {fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")} - {None}
    with scratch.folder(folder.parent, "tokenizer") as made:
        try:
            hf = AutoTokenizer.from_pretrained(parts[0].parent, gguf_file=parts[0].name)
            if first is not None and (hf("a").input_ids[:1] == [first]) != begins:  # some versions leave it out
                start = f"{hf.convert_ids_to_tokens(first)} " if begins else ""
                hf.backend_tokenizer.post_processor = TemplateProcessing(
                    f"{start}$A", f"{start}$A {start}$B:1", [(start.strip(), first)] if begins else []
                )
            hf.save_pretrained(made.path)
        except Exception as error:
            reason = error_line(error)[:160]
            raise DocumentError(f"{parts[0]}: transformers cannot make its tokenizer ({reason})") from None
        named = made.path / "tokenizer_config.json"
        settings = json.loads(named.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}  # just tokenizer.json
        named.write_text(json.dumps(settings))
        (made.path / "generation_config.json").write_text(json.dumps({"eos_token_id": sorted(ends)} if ends else {}))
        with suppress(OSError):  # another process was faster
            made.path.rename(folder)
        if not folder.is_dir():
            raise DocumentError(f"{folder} cannot be written: it is for the tokenizer of {parts[0]}")
    return folder
