"""Closed forms: what a configuration says of a model, where torch is not installed to ask the model itself.

The catalogue takes heads and widths from here too. Each form is held against the model in tests/test_formula.py; an
architecture that has none here is refused, since a guess would look like an answer.
"""

from collections.abc import Mapping
from typing import Any

from zinfer.model import CONFIG_KEYS, ModelError, Shape

_NEEDS = "needs torch and transformers: pip install 'zinfer[engines]'"


def fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a Shape that stand in a Hugging Face `config.json`, whatever names it uses; the layers do not.

    `num_kv_heads` are the heads that transformers caches. Raises ModelError when the configuration is not that of a
    decoder-only model.
    """
    shape: dict[str, Any] = {}
    for field, keys in CONFIG_KEYS.items():
        found = next((config[key] for key in keys if config.get(key) is not None), None)
        if found is not None:
            shape[field] = found
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
    if not shape.get("num_experts"):
        shape["num_experts"] = shape["experts_per_token"] = 0
    return shape


def shape(name: str, config: Mapping[str, Any], counted: Mapping[str, tuple[int, ...]] | None = None) -> Shape:
    """The shape of a model by its configuration alone, and by the weights `counted` (names and shapes), if any.

    Raises ModelError, with `name` in it, for an architecture that has no closed form.
    """
    raise ModelError(f"{name}: {_NEEDS}")
