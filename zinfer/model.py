"""What a model costs: parameters, bytes and FLOPs from its shape alone.

A decoder-only model is `num_layers` equal blocks between an embedding and a head. Decode reads every weight once a
step, so bytes are the currency here, and they are exact: the catalogue's counts are those of the `transformers` model
(a test compares them), a local checkpoint's are read from its safetensors headers.
"""

import json
import re
import tomllib
from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, get_args

from zinfer.frozen import Frozen

Dtype = Literal["bfloat16", "float16", "float32"]
DTYPE_BYTES: dict[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}

# One name for one thing here; the published configurations have several.
_CONFIG_KEYS = {
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "hidden_size": ("hidden_size", "n_embed", "n_embd"),
    "num_heads": ("num_attention_heads", "n_head"),
    "num_kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_dim": ("head_dim",),
    "ffn_size": ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner"),
    "vocab_size": ("vocab_size",),
    "max_position": ("max_position_embeddings", "n_positions", "seq_length"),
    "num_experts": ("num_local_experts", "num_experts"),
    "experts_per_token": ("num_experts_per_tok",),
}
LAYER_INDEX = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
# Families whose configuration, if it says nothing, ties the head to the embedding; checkpoints may hold both even so.
_TIED = frozenset({"bloom", "cohere", "falcon", "gemma", "gemma2", "gpt2", "gpt_bigcode", "mpt", "opt", "starcoder2"})
_HEADS = ("lm_head.weight", "embed_out.weight")
# Causal masks and rotary frequencies: older checkpoints hold them, the model computes them.
_BUFFER = re.compile(r"(?:^|\.)(?:attention|attn)\.(?:masked_)?bias$|rotary_emb\.inv_freq$")
_TENSOR_DTYPES: dict[str, str] = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


class ModelError(ValueError):
    """A model reference or description that cannot be used; the message says what to do next."""


class ModelSpec(Frozen):
    """A decoder-only model, whole or the first `num_layers` of `total_layers`.

    `layer_parameters` counts the weights of each decoder layer in depth order, `other_parameters` all that is outside
    the layers (embeddings, head, final norm), `expert_parameters` the share of one layer that lies in its experts.
    """

    name: str
    architecture: str
    num_layers: int
    total_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    max_position: int | None = None
    num_experts: int = 0
    experts_per_token: int = 0
    dtype: Dtype = "bfloat16"
    layer_parameters: tuple[int, ...]
    other_parameters: int
    expert_parameters: int = 0
    config: dict[str, Any]  # the Hugging Face configuration the model is built from
    directory: str | None = None  # a local checkpoint
    hub_id: str | None = None

    @property
    def parameters(self) -> int:
        """All weights of the layers at hand, and those outside the layers."""
        return sum(self.layer_parameters) + self.other_parameters

    @property
    def active_parameters(self) -> int:
        """Weights one token passes through: with experts, only `experts_per_token` of each layer's."""
        idle = self.expert_parameters * (1 - self.experts_per_token / self.num_experts) if self.num_experts else 0
        return self.parameters - round(idle * self.num_layers)

    @property
    def ffn_matrices(self) -> int:
        """Matrices of a feed-forward network: two, three with a gate."""
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim * self.hidden_size
        one = max(self.layer_parameters) - attention
        if self.num_experts:
            one = self.expert_parameters // self.num_experts
        return max(2, round(one / (self.hidden_size * self.ffn_size)))

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def weight_bytes(self) -> int:
        return self.parameters * self.dtype_bytes

    @property
    def layer_bytes(self) -> int:
        """Bytes of the largest decoder layer: what one slot of a ring has to hold."""
        return max(self.layer_parameters) * self.dtype_bytes

    @property
    def streamed_bytes(self) -> int:
        """Bytes of all decoder layers: what full offload moves over the link a step."""
        return sum(self.layer_parameters) * self.dtype_bytes

    @property
    def other_bytes(self) -> int:
        """Bytes outside the decoder layers (embeddings, head, final norm)."""
        return self.other_parameters * self.dtype_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token over all layers at hand: 2 · layers · kv_heads · head_dim · bytes."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype_bytes

    def kv_bytes(self, batch_size: int, length: int) -> int:
        """KV cache of `batch_size` sequences of `length` tokens."""
        return batch_size * length * self.kv_bytes_per_token

    def decode_flops(self, batch_size: int, context_len: int) -> int:
        """One decode step: two FLOPs a weight and token, and attention over `context_len` cached tokens.

        Source: Kaplan et al. 2020 (arXiv:2001.08361), section 2.1: 2N + 2 · n_layer · n_ctx · d_attn forward, the
        second term once for the scores and once for the weighted sum of values.
        """
        attention = 4 * self.num_layers * self.num_heads * self.head_dim * context_len
        return batch_size * (2 * self._matmul_parameters + attention)

    def prefill_flops(self, batch_size: int, input_len: int) -> int:
        """Prefill of `input_len` tokens: as `decode_flops` for every position (causal: half the context on average);
        the head runs for the last position only."""
        head = 2 * self.vocab_size * self.hidden_size
        attention = 2 * self.num_layers * self.num_heads * self.head_dim * input_len
        token = 2 * self._matmul_parameters - head + attention
        return batch_size * (input_len * token + head)

    @property
    def _matmul_parameters(self) -> int:
        """Weights that a token is multiplied with: the layers and the head, not the embedding it is looked up in."""
        layers = self.active_parameters - self.other_parameters
        return layers + self.vocab_size * self.hidden_size

    def slice(self, layers: int) -> "ModelSpec":
        """The same model with its first `layers` decoder layers only.

        Raises ModelError unless 1 <= layers <= num_layers.
        """
        if not 1 <= layers <= self.num_layers:
            raise ModelError(f"--layers {layers}: {self.name} has {self.num_layers} layers")
        key = _config_key(self.config, "num_layers") or "num_hidden_layers"
        config = {
            name: value[:layers] if isinstance(value, list) and len(value) == self.num_layers else value
            for name, value in self.config.items()
        } | {key: layers}
        parameters = self.layer_parameters[:layers]
        return self.model_copy(update={"num_layers": layers, "layer_parameters": parameters, "config": config})

    def with_dtype(self, dtype: Dtype) -> "ModelSpec":
        return self.model_copy(update={"dtype": dtype})


def _config_key(config: Mapping[str, Any], field: str) -> str | None:
    return next((key for key in _CONFIG_KEYS[field] if config.get(key) is not None), None)


def shape_from_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The shape fields of a ModelSpec out of a Hugging Face `config.json`, whatever names it uses.

    `num_kv_heads` are the heads that transformers caches. Raises ModelError when the configuration is not that of a
    decoder-only model with plain weights.
    """
    if config.get("quantization_config"):
        raise ModelError("the weights are quantised, which zinfer does not read: use the unquantised checkpoint")
    shape: dict[str, Any] = {"architecture": config.get("model_type", "")}
    for field in _CONFIG_KEYS:
        key = _config_key(config, field)
        if key is not None:
            shape[field] = config[key]
    missing = [field for field in ("num_layers", "hidden_size", "num_heads", "vocab_size") if field not in shape]
    if missing:
        raise ModelError(f"the configuration does not describe a decoder-only language model: no {', '.join(missing)}")
    shape["total_layers"] = shape["num_layers"]
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


@cache
def _catalogue() -> dict[str, Any]:
    with (files("zinfer") / "catalog" / "models.toml").open("rb") as file:
        return tomllib.load(file)


def catalogue_names() -> tuple[str, ...]:
    """Names that `--model` takes without a download, in the catalogue's order."""
    return tuple(_catalogue())


def from_catalogue(name: str) -> ModelSpec:
    """The catalogue's entry `name`. Raises KeyError when there is none."""
    entry = _catalogue()[name]
    shape = shape_from_config(entry["config"])
    return ModelSpec(
        name=name,
        **shape,
        layer_parameters=(entry["layer_parameters"],) * shape["num_layers"],
        other_parameters=entry["other_parameters"],
        expert_parameters=entry.get("expert_parameters", 0),
        dtype=entry.get("dtype", "bfloat16"),
        config=deepcopy(entry["config"]),
        hub_id=entry.get("hub_id"),
    )


def from_parameter_shapes(
    name: str, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], **fields: Any
) -> ModelSpec:
    """A spec counted from parameter names and shapes, as a checkpoint or a meta-device model lists them.

    Raises ModelError when `config` is not that of a decoder-only model, or a layer of it has no weights.
    """
    try:
        shape = shape_from_config(config)
    except ModelError as error:
        raise ModelError(f"{name}: {error}") from None
    layers = [0] * shape["num_layers"]
    other = experts = 0
    for tensor, dims in shapes.items():
        size = 1
        for dim in dims:
            size *= dim
        match = LAYER_INDEX.search(tensor)
        if match is None:
            other += size
        elif int(match[1]) < len(layers):
            layers[int(match[1])] += size
            experts += size if ".experts." in tensor else 0
    if 0 in layers:
        raise ModelError(f"{name}: no weights of decoder layer {layers.index(0)} of {len(layers)}")
    return ModelSpec(
        name=name,
        **shape,
        layer_parameters=tuple(layers),
        other_parameters=other,
        expert_parameters=experts // shape["num_layers"],
        config=deepcopy(dict(config)),
        **fields,
    )


def from_directory(path: Path) -> ModelSpec:
    """A local checkpoint's spec, counted from its safetensors headers; no weight is read.

    Raises ModelError when the folder holds no usable `config.json` and safetensors.
    """
    from zinfer.checkpoint import Checkpoint, CheckpointError

    try:
        checkpoint = Checkpoint.open(path)
    except CheckpointError as error:
        raise ModelError(str(error)) from None
    config = checkpoint.config
    tied = config.get("tie_word_embeddings", config.get("model_type") in _TIED)
    tensors = {
        name: tensor
        for name, tensor in checkpoint.tensors.items()
        if not (_BUFFER.search(name) or (tied and name in _HEADS))
    }
    largest = max(tensors.values(), key=lambda tensor: tensor.end - tensor.start)
    dtype = config.get("dtype") or config.get("torch_dtype") or _TENSOR_DTYPES.get(largest.dtype, largest.dtype)
    if dtype not in get_args(Dtype):
        raise ModelError(f"{path}: weights of type {dtype} are not supported; use one of {', '.join(get_args(Dtype))}")
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    return from_parameter_shapes(str(path), config, shapes, dtype=dtype, directory=str(path))


def resolve(reference: str, dtype: Dtype | None = None, layers: int | None = None) -> ModelSpec:
    """The model a user means: a catalogue name, a checkpoint directory, or a Hugging Face hub id.

    Raises ModelError, in one line, for anything else.
    """
    if not reference:
        raise ModelError("--model is empty; `zinfer models` lists the catalogue")
    path = Path(reference).expanduser()
    if reference in _catalogue():
        spec = from_catalogue(reference)
    elif path.is_dir():
        spec = from_directory(path).model_copy(update={"name": reference})
    elif path.exists():
        raise ModelError(f"{reference} is a file: --model takes the folder that holds config.json and the safetensors")
    elif re.fullmatch(r"[\w.-]+/[\w.-]+", reference):
        from zinfer.hub import spec_from_hub

        spec = spec_from_hub(reference)
    else:
        close = [name for name in catalogue_names() if name.split("-")[0] in reference or reference in name]
        hint = f"; did you mean {', '.join(close)}?" if close else "; `zinfer models` lists the catalogue"
        raise ModelError(f"no model {reference!r}: not in the catalogue, not a folder, not a hub id{hint}")
    if dtype is not None:
        spec = spec.with_dtype(dtype)
    return spec if layers is None else spec.slice(layers)


def config_text(spec: ModelSpec) -> str:
    """The configuration as canonical JSON, for fingerprints."""
    return json.dumps(spec.config, sort_keys=True)
