"""Small random checkpoints of any type that transformers can build."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tools.conformance.sizes import ADJUSTMENTS, DEPTH, FIRST_TOKEN, SETTINGS, SIDE_DEPTH, SIZES, UNSET, WINDOW

MAX_DEPTH = 16
RECURRENT = ("linear", "conv", "mamba", "recurrent", "hybrid")  # words in the names of kinds of layers
MAX_PARAMETERS = 20_000_000
SCALED_FROM = "original_max_position_embeddings"  # position from which on queries are scaled
# Lists with an item for each layer.
KINDS = ("layer_types", "layers_block_type", "mlp_layer_types", "layers_num_experts", "indexer_types")
TEXT = ("text", "decoder", "language", "llm", "global")  # words in the names of nested configurations
# Factor by which a matrix widens values; models whose own norms would make all tokens alike need a larger one.
GAINS = (2.0, 3.5, 7.0)
WORD_STD, EMBEDDING_STD, NOISE = 0.2, 0.05, 0.1  # standard deviations: word and other embeddings, disturbed weights


class CannotBuild(ValueError):
    """Raised, with the reason, for a type without a small model."""


class Subject(NamedTuple):
    """Subject of a row of the record: a type, as a causal language model or as a wrapper around one."""

    type: str
    wrapper: bool = False

    @property
    def name(self) -> str:
        return f"{self.type}+wrapper" if self.wrapper else self.type


def subjects() -> list[Subject]:
    """Return every causal type of transformers, and wrappers around one."""
    texts = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    images = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    others = [name for name in images if name in CONFIG_MAPPING and texts.get(name) != images[name]]
    wrappers = [name for name in others if "text_config" in CONFIG_MAPPING[name].sub_configs]
    return [*map(Subject, texts), *(Subject(name, wrapper=True) for name in wrappers)]


def small_config(kind: str) -> PreTrainedConfig:
    """Return a small configuration of type `kind`, with all layer kinds."""
    config_class = CONFIG_MAPPING[kind]
    wanted = _kinds(_default(config_class).get_text_config(decoder=True))
    for depth in range(DEPTH, MAX_DEPTH + 1):
        config = _small(config_class, depth)
        if wanted <= _kinds(config.get_text_config(decoder=True)):
            return config
    raise CannotBuild(f"{MAX_DEPTH} layers do not have all of {', '.join(sorted(wanted))}")


def _default(config_class: type[PreTrainedConfig]) -> PreTrainedConfig:
    try:
        return config_class()
    except Exception:
        return config_class(**ADJUSTMENTS.get(config_class.model_type, {}))


def _kinds(config: PreTrainedConfig) -> set[str]:
    """Return the kinds of layers that a configuration names."""
    values = [(name, getattr(config, name, None) or ()) for name in KINDS]
    return {f"{name} {item}" for name, items in values for item in items if isinstance(item, str)}


def _small(config_class: type[PreTrainedConfig], depth: int) -> PreTrainedConfig:
    default = _default(config_class)
    adjusted = ADJUSTMENTS.get(config_class.model_type, {})
    names = [field.name for field in fields(config_class)]
    layers = _value(default, "num_hidden_layers")
    settings: dict[str, Any] = {}
    for name in names:
        value = _value(default, name)
        if name in adjusted:
            continue
        if isinstance(value, PreTrainedConfig):
            text = any(word in name for word in TEXT)
            settings[name] = _small(type(value), depth if text else SIDE_DEPTH)
        elif isinstance(value, list | tuple) and layers is not None and len(value) == layers > 1:
            settings[name] = cut(value, depth)
        elif name in SETTINGS:
            settings[name] = SETTINGS[name]
        elif isinstance(value, int) and not isinstance(value, bool):
            size: Any = next((size for pattern, size in SIZES if re.fullmatch(pattern, name)), None)
            if size is not None:
                settings[name] = depth if size in ("depth", depth) else min(value, size)
    if "kv_lora_rank" in names and "num_key_value_heads" in names:  # heads of latent attention share no keys
        settings["num_key_value_heads"] = settings.get("num_attention_heads")
    settings |= {name: size for name, size in UNSET.items() if name in names and _value(default, name) is None}
    special = [name for name in names if re.fullmatch(r".*(_token_id|_token_index|_index)", name)
               and isinstance(_value(default, name), int) and name not in settings]  # fmt: skip
    settings |= {name: 3 + index for index, name in enumerate(special)}
    if "mrope_section" in getattr(config_class, "ignore_keys_at_rope_validation", ()):
        rope = dict(_value(default, "rope_parameters") or {})
        head_dim = settings.get("head_dim", settings["hidden_size"] // settings["num_attention_heads"])
        half = int(head_dim * rope.get("partial_rotary_factor", 1.0)) // 2
        third = -(-half // 3)
        settings["rope_parameters"] = rope | {"mrope_section": [third, third, half - 2 * third]}
    rope, scaled_from = settings.get("rope_parameters") or _value(default, "rope_parameters") or {}, SCALED_FROM
    if "rope_parameters" not in adjusted and rope.get(scaled_from) and rope.get("rope_type") != "longrope":
        settings["rope_parameters"] = dict(rope) | {scaled_from: WINDOW}
    overrides = default.to_dict().get("per_layer_config")
    if overrides and "layer_types" in settings:
        settings["per_layer_config"] = _per_layer(default, overrides, settings)
    adjusted = {name: value(depth) if callable(value) else value for name, value in adjusted.items()}
    return config_class(**settings | adjusted)


def _value(config: PreTrainedConfig, name: str) -> Any:
    """Return a field of a configuration; for a field that differs between layers, the common value."""
    try:
        return object.__getattribute__(config, config.attribute_map.get(name, name))
    except AttributeError:
        return None


def _per_layer(
    default: PreTrainedConfig, overrides: dict[str, dict[str, Any]], settings: dict[str, Any]
) -> dict[int, dict[str, Any]]:
    """Return the settings of single layers, in proportion to common ones."""
    kinds = _value(default, "layer_types")
    of_kind = {kinds[int(index)]: values for index, values in overrides.items()}

    def shrunk(name: str, value: Any) -> Any:
        common = _value(default, name)
        return value * settings[name] // common if name in settings and isinstance(value, int) and common else value

    return {
        index: {name: shrunk(name, value) for name, value in of_kind[kind].items()}
        for index, kind in enumerate(settings["layer_types"])
        if kind in of_kind
    }


def cut(values: Sequence[Any], depth: int) -> list[Any]:
    """Return the first `depth` of `values`, one for each layer. Kinds that first occur later take the last places."""
    kept = [values[index % len(values)] for index in range(depth)]
    late = [value for index, value in enumerate(values) if value not in values[:index] and value not in kept]
    return kept[: depth - len(late)] + late if len(late) < depth else kept


def small_model(subject: Subject, gain: float = GAINS[0]) -> PreTrainedModel:
    """Return a small model in float32 with random weights and persistent buffers. Raises CannotBuild."""
    auto = AutoModelForImageTextToText if subject.wrapper else AutoModelForCausalLM
    try:
        config = small_config(subject.type)
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in auto.from_config(config).parameters())
        if size > MAX_PARAMETERS:
            raise CannotBuild(f"{size / 1e6:.0f}M parameters with small sizes")
        torch.manual_seed(1)
        model = auto.from_config(config, dtype=torch.float32).eval()
    except CannotBuild:
        raise
    except Exception as error:
        raise CannotBuild(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from error
    randomise(model, gain)
    return model


@torch.no_grad()
def randomise(model: PreTrainedModel, gain: float) -> None:
    """Draw weights so that greedy tokens depend on the prompt.

    Matrices are drawn wide and embeddings narrow. The mean of activations is set to zero, as it would drown the rest.
    The scales of norms get random signs, so that a token is not its own successor with tied embeddings. All other
    weights are disturbed, so that a weight left out changes the tokens.
    """
    std: dict[int, float] = {}
    inputs: dict[int, int] = {}  # the dimension of a matrix's inputs
    fixed: set[int] = set()  # tables of sines and cosines: rotary keys keep their distances by these alone
    scales: set[int] = set()  # scales of norms: all one, or all zero if the module adds one
    for module in model.modules():
        weight, kind = getattr(module, "weight", None), type(module).__name__
        if not isinstance(weight, nn.Parameter):
            continue
        if isinstance(module, nn.Embedding) and not weight.requires_grad:
            fixed.add(id(weight))
        elif isinstance(module, nn.Embedding):
            std[id(weight)] = EMBEDDING_STD
        elif isinstance(module, nn.Linear) or kind == "Conv1D":
            inputs[id(weight)] = 0 if kind == "Conv1D" else -1
            std.setdefault(id(weight), gain * max(1, weight.shape[inputs[id(weight)]]) ** -0.5)
        elif "norm" in kind.lower() and weight.dim() == 1 and bool((weight == weight[0]).all()):
            scales.add(id(weight))
    if (words := getattr(model.get_input_embeddings(), "weight", None)) is not None:
        std[id(words)] = WORD_STD
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        if id(parameter) in std:
            parameter.normal_(0.0, std[id(parameter)], generator=generator)
            if id(parameter) in inputs and parameter.shape[inputs[id(parameter)]] > 1:
                parameter.sub_(parameter.mean(inputs[id(parameter)], keepdim=True))
        elif parameter.is_floating_point() and id(parameter) not in fixed:
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=NOISE)
            if id(parameter) in scales:
                parameter.sub_(torch.randint(0, 2, parameter.shape, generator=generator) * 2)
    head = getattr(model.get_output_embeddings(), "weight", None)
    if head is not None:  # never generate special tokens, for images or the like
        head[:FIRST_TOKEN] = 0
    for _, owner, leaf in persistent_buffers(model):
        buffer = owner.get_buffer(leaf)
        noise = torch.randn(buffer.shape, generator=generator)
        owner._buffers[leaf] = torch.where(buffer == 0, NOISE * noise, buffer * (1 + 2 * NOISE * noise)).to(buffer)


def persistent_buffers(model: nn.Module) -> Iterable[tuple[str, nn.Module, str]]:
    """Yield the floating-point buffers that a checkpoint holds: name, owner, and name within the owner."""
    for prefix, module in model.named_modules():
        for leaf, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point() and leaf not in module._non_persistent_buffers_set:
                yield f"{prefix}.{leaf}".lstrip("."), module, leaf


def family(model: PreTrainedModel) -> str:
    """Return the family of a model, one of `tools.conformance.record.FAMILIES`."""
    kinds = set(getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ())
    if model._is_stateful or any(word in kind for kind in kinds for word in RECURRENT):
        return "Recurrent and hybrid"
    experts = any("experts" in name for name, _ in model.named_parameters())
    return "Mixtures of experts" if experts else "Dense"


def save(model: PreTrainedModel, directory: Path) -> None:
    """Save `model` in the form in which models are published: safetensors in several shards."""
    size = sum(parameter.numel() for parameter in model.parameters()) * 4
    model.save_pretrained(directory, max_shard_size=size // 3 + 1)
