"""Closed forms: a model's shape from its configuration, without torch.

Each form is held against the model in tests/test_formula.py; an architecture without a form is refused, since a guess
would look like an answer. The catalogue's models have their counts in the catalogue.
"""

from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

from zinfer.core.errors import environment_error
from zinfer.core.model import CONFIG_KEYS, LAYER_INDEX, LayerSpec, ModelError, Shape, rope, stretched, text_config

_NEEDS = "needs torch and transformers: pip install 'zinfer[engines]'"


def fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a Shape that a `config.json` states.

    The layers are not among them. `num_kv_heads` counts the heads that transformers caches. Raises ModelError if the
    configuration is not that of a decoder-only model.
    """
    shape: dict[str, Any] = {}
    for field, keys in CONFIG_KEYS.items():
        value = next((config[key] for key in keys if config.get(key) is not None), None)
        if value is not None:
            shape[field] = value
    missing = [field for field in ("num_layers", "hidden_size", "num_heads", "vocab_size") if field not in shape]
    if missing:
        raise ModelError(f"the configuration does not describe a decoder-only language model: no {', '.join(missing)}")
    shape.setdefault("head_dim", shape["hidden_size"] // shape["num_heads"])
    shape.setdefault("ffn_size", 4 * shape["hidden_size"])
    if config.get("new_decoder_architecture"):
        # Falcon 40B and 180B: transformers copies each key and value to all heads of its group before it caches them.
        shape["num_kv_heads"] = shape["num_heads"]
    elif config.get("multi_query", config.get("model_type") in {"falcon", "gpt_bigcode"}):
        shape["num_kv_heads"] = 1
    elif config.get("model_type") == "falcon":
        shape["num_kv_heads"] = shape["num_heads"]
    shape.setdefault("num_kv_heads", shape["num_heads"])
    if "max_position" in shape:
        start = config.get("original_max_position_embeddings")
        shape["max_position"] = stretched(
            shape["max_position"], {"original_max_position_embeddings": start, **rope(config)}
        )
    if not shape.get("num_experts"):
        shape["num_experts"] = shape["experts_per_token"] = 0
    return shape


class _Family(NamedTuple):
    """Deviations of an architecture from Llama's layers, and its defaults."""

    qkv_bias: bool = False
    head_norm: bool = False  # norms of each head's queries and keys
    tied: bool = False
    sliding: bool = False  # all layers have the configured window, unless it lists them one by one
    shared_gate: bool = False  # a gate weighs the shared expert
    latent: bool = False  # keys and values are cached compressed: DeepSeek's MLA


# Architectures whose parameters follow from the configuration.
_FAMILIES = {
    "llama": _Family(),
    "mistral": _Family(sliding=True),
    "mixtral": _Family(sliding=True),
    "qwen2": _Family(qkv_bias=True),
    "qwen3": _Family(head_norm=True),
    "qwen2_moe": _Family(qkv_bias=True, shared_gate=True),
    "qwen3_moe": _Family(head_norm=True),
    "glm4_moe": _Family(),
    "deepseek_v3": _Family(latent=True),
}
# Architectures whose cache follows from heads and widths; their weights have to be counted in the checkpoint.
_PLAIN = frozenset({"bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "opt", "phi", "stablelm"})


def shape(name: str, config: Mapping[str, Any], counted: Mapping[str, tuple[int, ...]] | None = None) -> Shape:
    """Return the shape of a model from its configuration.

    Without a closed form for its parameters they are those of the weights `counted` (names and shapes). Raises
    ModelError, with `name` in it, for an architecture without a closed form, or one that needs `counted`.
    """
    text = text_config(config)
    kind = text.get("model_type", "")
    if kind not in _FAMILIES and not (kind in _PLAIN and counted):
        raise environment_error(ModelError(f"{name}: a {kind!r} model {_NEEDS}"))
    try:
        stated = fields(text)
        if kind in _PLAIN:
            width, inner = 2 * stated["num_kv_heads"] * stated["head_dim"], stated["num_heads"] * stated["head_dim"]
            layers = [LayerSpec(parameters=0, kv_width=width, attention=inner)] * stated["num_layers"]
            other = 0
        else:
            layers, other = _layers(text, stated, _FAMILIES[kind])
    except ModelError as error:
        raise ModelError(f"{name}: {error}") from None
    except (KeyError, TypeError) as error:
        needs = f"{name}: a {kind!r} model with such a configuration ({error}) {_NEEDS}"
        raise environment_error(ModelError(needs)) from None
    if counted and text is config:
        layers, other = _counted(layers, counted)
    return Shape(**stated, layers=tuple(layers), other_parameters=other)


def _layers(config: Mapping[str, Any], stated: dict[str, Any], family: _Family) -> tuple[list[LayerSpec], int]:
    """Return the layers and the parameters outside; completes the `stated` fields."""
    hidden, heads, kv_heads, head = (stated[key] for key in ("hidden_size", "num_heads", "num_kv_heads", "head_dim"))
    if family.latent:
        rank, rope, nope, value, queries = (
            config[key] for key in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "q_lora_rank")
        )
        out = heads * (nope + rope)
        attention = hidden * out if queries is None else hidden * queries + queries + queries * out
        attention += hidden * (rank + rope) + rank + rank * heads * (nope + value) + heads * value * hidden
        width, products = rank + rope, heads * (nope + rope + value) // 2
        stated |= {"num_kv_heads": 1, "head_dim": rank}
    else:
        attention = 2 * hidden * (heads + kv_heads) * head
        attention += (heads + 2 * kv_heads) * head if config.get("attention_bias", family.qkv_bias) else 0
        if config.get("attention_bias") and config["model_type"] == "llama":
            attention += hidden  # the output projection has a bias, too
        attention += 2 * head if config.get("use_qk_norm", family.head_norm) else 0
        width, products = 2 * kv_heads * head, heads * head
    experts, dense = stated["num_experts"], 3 * hidden * stated["ffn_size"]
    if config.get("mlp_bias"):
        dense += 2 * stated["ffn_size"] + hidden
    expert = 3 * hidden * config.get("moe_intermediate_size", stated["ffn_size"])
    shared = expert * (config.get("n_shared_experts") or 0)
    if family.shared_gate:
        shared = 3 * hidden * config["shared_expert_intermediate_size"] + hidden
    window = config.get("sliding_window") if family.sliding else None
    if config.get("use_sliding_window") or "layer_types" in config:
        raise KeyError("layers of different windows")
    layers = []
    for index in range(stated["num_layers"]):
        mixture = experts and index >= config.get("first_k_dense_replace", 0)
        mixture = mixture and index not in (config.get("mlp_only_layers") or ())
        mixture = mixture and (index + 1) % (config.get("decoder_sparse_step") or 1) == 0
        inner = experts * (expert + hidden) + shared if mixture else dense
        layers.append(
            LayerSpec(
                parameters=attention + inner + 2 * hidden,
                expert_parameters=experts * expert if mixture else 0,
                kv_width=width,
                window=window,
                attention=products,
            )
        )
    if experts:
        stated["ffn_size"] = expert // (3 * hidden)
    embeddings = stated["vocab_size"] * hidden
    return layers, hidden + embeddings * (1 if config.get("tie_word_embeddings", family.tied) else 2)


def _counted(layers: list[LayerSpec], weights: Mapping[str, tuple[int, ...]]) -> tuple[list[LayerSpec], int]:
    """Return the layers with the sizes of stored tensors, and the rest."""
    sizes, other, experts = [0] * len(layers), 0, [0] * len(layers)
    for tensor, dims in weights.items():
        match = LAYER_INDEX.search(tensor)
        if match is None:
            other += prod(dims)
        elif (index := int(match[1])) < len(layers):
            sizes[index] += prod(dims)
            experts[index] += prod(dims) if ".experts." in tensor else 0
    counts = zip(layers, sizes, experts, strict=True)
    return [
        layer.model_copy(update={"parameters": size, "expert_parameters": routed}) for layer, size, routed in counts
    ], other
