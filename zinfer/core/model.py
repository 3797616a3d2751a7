"""Models: parameters, bytes and FLOPs of a decoder-only model, from its shape.

Decode reads every weight once a step, so time is counted in bytes here, and they are exact: they come from the
`transformers` model itself, built without memory (`zinfer.checkpoint.architecture`). The catalogue holds these counts
(a test compares them).
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from pydantic import Field

from zinfer.core.errors import ZinferError
from zinfer.core.value import Frozen, group_by

Dtype = Literal["bfloat16", "float16", "float32"]
DTYPE_BYTES: dict[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}
# Formats of the weights in decoder layers; all but the first are made here, of weights in 16 bits, and are lossy.
Weights = Literal["as-released", "int4", "int8", "fp8"]

# Our name of a quantity -> the names that published configurations use.
CONFIG_KEYS = {
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers"),
    "hidden_size": ("hidden_size", "n_embed", "n_embd", "d_model"),
    "num_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"),
    "num_kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_dim": ("head_dim",),
    "ffn_size": ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", "decoder_ffn_dim"),
    "vocab_size": ("vocab_size",),
    "max_position": ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len"),
    "num_experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "experts_per_token": ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"),
}
# Model types whose KV cache stays on the GPU: they compute attention without the AttentionInterface of transformers
# (`tests/test_architecture.py` compares them) ..
_WITHOUT_INTERFACE = {
    "big_bird", "codegen", "cpmant", "ctrl", "falcon", "gpt_neo", "gpt_neox_japanese", "gptj", "megatron-bert", "mpt",
    "mvp", "prophetnet", "rembert", "roformer", "trocr", "xglm", "xlm",
}  # fmt: skip
# .. or do more with cached keys and values than attend to them: most cache what these are made of.
_TRANSFORMED_KEYS = {
    "axk1", "axk2", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "deepseek_v32", "diffllama", "doge", "dots3_note",
    "dots3_note_text", "glm4_moe_lite", "glm_moe_dsa", "hy_v4", "inkling2_text", "jetmoe", "kimi_k2", "kimi_k25",
    "kimi_linear", "minicpm3", "mistral_large4", "youtu",
}  # fmt: skip
ATTEND_THEMSELVES = frozenset(_WITHOUT_INTERFACE | _TRANSFORMED_KEYS)
MAX_STRETCH = 1024  # largest factor by which YaRN is believed to stretch a model's positions
LAYER_INDEX = re.compile(r"(?:^|\.)(?:layers?|h|blocks|blk)\.(\d+)\.")


class ModelError(ZinferError):
    """A model that cannot be used; the message says what to do."""


class Matrix(NamedTuple):
    """Weights ``[rows, columns]`` of a linear module, or of each of `experts`."""

    name: str  # within its layer, as stored; ``*`` is the number of an expert, without it one tensor has them all
    rows: int
    columns: int
    experts: int = 0

    @property
    def numel(self) -> int:
        """Number of values, summed over all experts."""
        return max(1, self.experts) * self.rows * self.columns


class LayerSpec(Frozen):
    """One decoder layer: its parameters, and the values that it caches."""

    parameters: int
    expert_parameters: int = 0  # parameters of routed experts among them; a token passes through a few experts
    kv_width: int = 0  # values cached a token, keys and values together, and the keys of an indexer
    index_width: int = 0  # the indexer's part of them, which stays on the device
    window: int | None = None  # sliding window: maximum of tokens cached
    state: int = 0  # values cached a sequence, independent of its length
    attention: int = 0  # query heads, times the mean width of a key and a value; 0 without attention
    matrices: tuple[Matrix, ...] = ()  # parameters that a format may store quantised; empty if they are not known

    def tokens(self, length: int) -> int:
        """Return how many of `length` tokens are cached and attended to."""
        return length if self.window is None else min(length, self.window)


class Shape(Frozen):
    """Shape of a model; heads and widths are those of the layer that caches most."""

    num_layers: int
    layers: tuple[LayerSpec, ...]  # in depth order
    other_parameters: int  # embeddings, head, final norm, and weights that several layers share
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int  # that of one expert in a model with experts
    vocab_size: int
    max_position: int | None = None
    num_experts: int = 0
    experts_per_token: int = 0
    stack: str = ""  # name of the module that holds the decoder layers, if it is known


class Routing(Frozen):
    """Recorded routing of a mixture; without a record, experts are chosen evenly."""

    source: str  # what was recorded, as a noun phrase
    touched: tuple[tuple[int, float], ...] = ()  # tokens of a step, ascending from 2 on, and the share of experts
    # Tokens of a step, size of the cache as a share of all experts, and the share of needs that it meets (lfu).
    hits: tuple[tuple[int, float, float], ...] = ()


def _interpolated(points: Sequence[tuple[float, float]], at: float) -> float:
    """Interpolate linearly between ascending `points`; beyond them the nearest one counts."""
    for (low, first), (high, second) in pairwise(points):
        if low <= at < high:
            return first + (second - first) * (at - low) / (high - low)
    return points[0][1] if at < points[0][0] else points[-1][1]


class ModelSpec(Shape):
    """Decoder-only model, whole or the first `num_layers` of `total_layers` layers."""

    name: str
    architecture: str
    total_layers: int
    dtype: Dtype = "bfloat16"
    config: dict[str, Any]  # Hugging Face configuration that the model is built from
    directory: str | None = None  # folder of a local checkpoint
    stored_ratio: float = Field(default=1.0, gt=0)  # bytes of layers as released over those in `dtype`; 1 if equal
    form_ratio: float = Field(default=1.0, ge=1)  # bytes of codes as kernels of a GPU read them over those as released
    fp8_ratio: float = Field(default=0.0, ge=0)  # part of `stored_ratio` that are FP8 codes (e4m3)
    routed_ratio: float | None = Field(default=None, gt=0)  # `stored_ratio` of routed experts; None: not known
    weights: Weights = "as-released"  # format that the layers' weights are given here; `config` describes it, too
    hub_id: str | None = None
    draft: "ModelSpec | None" = None  # small model of the same tokenizer that drafts for this one
    routing: Routing | None = None  # routing that a plan reckons with; None: tokens choose their experts evenly

    @property
    def attends_by_name(self) -> bool:
        """True if zinfer may compute the model's attention. Host memory can then hold its KV cache."""
        return self.architecture not in ATTEND_THEMSELVES and not any(layer.index_width for layer, _ in self._kinds)

    @property
    def layer_parameters(self) -> tuple[int, ...]:
        return tuple(layer.parameters for layer in self.layers)

    @cached_property
    def _kinds(self) -> tuple[tuple[LayerSpec, int], ...]:
        """Different layers with their counts."""
        return tuple(Counter(self.layers).items())

    @cached_property
    def _in_layers(self) -> int:
        return sum(count * layer.parameters for layer, count in self._kinds)

    @cached_property
    def expert_parameters(self) -> int:
        """Parameters of the routed experts in the layer with most."""
        return max(layer.expert_parameters for layer, _ in self._kinds)

    @property
    def parameters(self) -> int:
        return self._in_layers + self.other_parameters

    @property
    def active_parameters(self) -> int:
        """Parameters that one token passes through: only `experts_per_token` experts of each layer."""
        return self.parameters - round(self._routed * (1 - self.experts_per_token / max(1, self.num_experts)))

    def parameters_read(self, batch_size: int) -> float:
        """Return the expected number of parameters that a decode step reads."""
        return self.parameters - self._routed * (1 - self.touched_share(batch_size))

    def touched_share(self, tokens: int) -> float:
        """Return the expected share of a layer's experts that tokens reach: `routing`, then 1 - (1 - k/E)^n."""
        shares = [(1, self.experts_per_token / max(1, self.num_experts))]
        shares += [] if self.routing is None else self.routing.touched
        last, share = shares[-1]
        return _interpolated(shares, tokens) if tokens < last else 1 - (1 - share) ** (tokens / last)

    def hits(self, cached: float, tokens: int) -> float:
        """Return the hit rate of a cache of a share of experts."""
        rates = []
        for step, rows in group_by(sorted(self.routing.hits if self.routing else ()), lambda row: row[0]).items():
            by_size = [(0.0, 0.0), *((size, hits) for _, size, hits in rows), (1.0, 1.0)]
            rates.append((step, _interpolated(by_size, cached)))
        return _interpolated(rates, tokens) if rates else cached

    @cached_property
    def _routed(self) -> int:
        return sum(count * layer.expert_parameters for layer, count in self._kinds)

    @cached_property
    def routed_bytes(self) -> int:
        """Bytes of the routed experts of all layers."""
        return self._routed * self.dtype_bytes

    @property
    def expert_ratio(self) -> float:
        """Bytes of routed experts as released over those in `dtype`."""
        return self.stored_ratio if self.routed_ratio is None else self.routed_ratio

    @property
    def expert_bytes(self) -> int:
        """Bytes of one routed expert; 0 without experts."""
        return self.expert_parameters * self.dtype_bytes // max(1, self.num_experts)

    @cached_property
    def dense_layer_bytes(self) -> int:
        """Bytes of the largest decoder layer without its routed experts."""
        return max(layer.parameters - layer.expert_parameters for layer, _ in self._kinds) * self.dtype_bytes

    @cached_property
    def ffn_matrices(self) -> int:
        """Matrices of a feed-forward network: two, or three with a gate."""
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim * self.hidden_size
        network = self.layer_bytes // self.dtype_bytes - attention
        if self.num_experts:
            network = self.expert_parameters // self.num_experts
        return min(3, max(2, round(network / (self.hidden_size * self.ffn_size))))

    @cached_property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def weight_bytes(self) -> int:
        return self.parameters * self.dtype_bytes

    @property
    def stored_bytes(self) -> int:
        """Bytes of all parameters as released, or as `weights` says."""
        return round(self.streamed_bytes * self.stored_ratio) + self.other_bytes

    @cached_property
    def layer_bytes(self) -> int:
        """Bytes of the largest decoder layer: the size of a layer buffer."""
        return max(layer.parameters for layer, _ in self._kinds) * self.dtype_bytes

    @cached_property
    def streamed_bytes(self) -> int:
        """Bytes of all decoder layers, which full offload moves each step."""
        return self._in_layers * self.dtype_bytes

    @property
    def other_bytes(self) -> int:
        """Bytes outside the decoder layers (embeddings, head, final norm)."""
        return self.other_parameters * self.dtype_bytes

    @cached_property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's keys and values, before any window is full."""
        return sum(layer.kv_width for layer in self.layers) * self.dtype_bytes

    def largest_kv_layer_bytes(self, batch_size: int, length: int) -> int:
        """Return the KV cache bytes of the layer that caches most."""
        values = max(layer.tokens(length) * layer.kv_width + layer.state for layer, _ in self._kinds)
        return batch_size * values * self.dtype_bytes

    def index_bytes(self, batch_size: int, length: int) -> int:
        """Return the bytes of indexers' keys, which always stay on the device."""
        values = sum(count * layer.tokens(length) * layer.index_width for layer, count in self._kinds)
        return batch_size * values * self.dtype_bytes

    def kv_bytes(self, batch_size: int, length: int) -> int:
        """Return the bytes of the KV cache of all layers."""
        values = sum(count * (layer.tokens(length) * layer.kv_width + layer.state) for layer, count in self._kinds)
        return batch_size * values * self.dtype_bytes

    def decode_flops(self, batch_size: int, context_len: int) -> int:
        """Return the FLOPs of a decode step over `context_len` cached tokens.

        Source: Kaplan et al. 2020 (arXiv:2001.08361), section 2.1: 2N + 2 · n_layer · n_ctx · d_attn forward, the
        second term for the scores and for the weighted sum of values.
        """
        attention = 4 * sum(count * layer.attention * layer.tokens(context_len) for layer, count in self._kinds)
        return batch_size * (2 * self._matmul_parameters + attention)

    def prefill_flops(self, batch_size: int, input_len: int) -> int:
        """Return the FLOPs of a prefill of `input_len` tokens; the head runs for the last position only."""
        head = 2 * self.vocab_size * self.hidden_size
        attention = self.prefill_attention_flops(batch_size, input_len)
        return batch_size * (input_len * (2 * self._matmul_parameters - head) + head) + attention

    def prefill_attention_flops(self, batch_size: int, input_len: int) -> int:
        """Return the part of `prefill_flops` that computes attention."""
        attention = 0
        for layer, count in self._kinds:
            window = layer.tokens(input_len)
            attention += 2 * count * layer.attention * (2 * window * input_len - window**2)
        return batch_size * attention

    @property
    def _matmul_parameters(self) -> int:  # the embedding is a look-up
        layers = self.active_parameters - self.other_parameters
        return layers + self.vocab_size * self.hidden_size

    def slice(self, layers: int) -> "ModelSpec":
        """Return this model with its first `layers` decoder layers only. Raises ModelError."""
        if not 1 <= layers <= self.num_layers:
            raise ModelError(f"--layers {layers}: {self.name} has {self.num_layers} layers")
        config = cut(self.config, self.num_layers, layers)
        return self.model_copy(update={"num_layers": layers, "layers": self.layers[:layers], "config": config})

    def with_dtype(self, dtype: Dtype) -> "ModelSpec":
        """Return the same model in `dtype`; quantised weights keep their size."""
        factor = self.dtype_bytes / DTYPE_BYTES[dtype]
        ratio = self.stored_ratio * factor if self.stored_ratio != 1 else 1.0
        routed = self.routed_ratio and self.routed_ratio * factor
        update = {"dtype": dtype, "stored_ratio": ratio, "fp8_ratio": self.fp8_ratio * factor, "routed_ratio": routed}
        return self.model_copy(update=update)


def cut(config: Mapping[str, Any], depth: int, layers: int) -> dict[str, Any]:
    """Shorten the `config` of a model to its first `layers`: the depth, and lists with an item a layer."""

    def first(key: str, value: Any) -> Any:
        if key in CONFIG_KEYS["num_layers"] and value == depth:
            return layers
        if key == "num_kv_shared_layers" and isinstance(value, int):  # the last ones use the cache of earlier ones
            return max(0, layers - (depth - value))
        if isinstance(value, dict):
            text = key in ("text_config", "sparse_attention_config")
            return {name: first(name, inner) for name, inner in value.items()} if text else value
        if key == "attention_types" and isinstance(value, list):  # pairs of kinds and repetitions
            kinds = [kind for pattern, times in value for kind in [*pattern] * times]
            return [[kinds[:layers], 1]] if len(kinds) == depth else value
        items = isinstance(value, list) or (isinstance(value, str) and key.endswith("pattern"))
        return value[:layers] if items and len(value) == depth and not key.endswith(("_id", "_ids")) else value

    return {key: first(key, value) for key, value in config.items()}


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of `config` that describes the text model."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def stretched(positions: int | None, settings: Mapping[str, Any]) -> int | None:
    """Return `positions`, or those that YaRN or longrope serve.

    A factor of x serves x times the original length, says `transformers` (``RopeParameters``); model cards of Qwen add
    YaRN and leave ``max_position_embeddings``. Longer sequences of longrope have other keys from their first token on.
    """
    kind = settings.get("rope_type", settings.get("type"))
    factor: Any = settings.get("factor")
    original = settings.get("original_max_position_embeddings") or positions
    if positions is None or type(original) is not int:
        return positions
    if kind in ("longrope", "su"):
        return min(positions, original)
    if kind == "yarn" and type(factor) in (int, float) and 1 <= factor <= MAX_STRETCH:
        return max(positions, int(original * factor))
    return positions


def check_positions(spec: ModelSpec, input_len: int, output_len: int, prompt: str = "") -> None:
    """Raise ModelError if prompt and answer exceed the model's positions."""
    if spec.max_position is not None and input_len + output_len > spec.max_position:
        lengths = f"{prompt or f'--input-len {input_len}'} and --output-len {output_len}"
        raise ModelError(f"{lengths} exceed the {spec.max_position} positions of {spec.name}")
