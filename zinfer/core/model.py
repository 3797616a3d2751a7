"""Models: parameters, bytes and FLOPs of a decoder-only model, from its shape alone.

A decoder-only model is a stack of layers, equal or not, between an embedding and a head. Decode reads every weight once
a step, so time is counted in bytes here, and they are exact: they come from the `transformers` model itself, built
without memory (`zinfer.checkpoint.architecture`). The catalogue holds these counts (a test compares them); on machines
without torch, the closed forms of `zinfer.checkpoint.formula` replace it.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from pydantic import Field

from zinfer.core.errors import ZinferError
from zinfer.core.value import Frozen

Dtype = Literal["bfloat16", "float16", "float32"]
DTYPE_BYTES: dict[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}
# Formats of the weights in decoder layers; all but the first are made here, of weights in 16 bits, and are lossy.
Weights = Literal["as-released", "int4", "int8", "fp8"]

ExpertPolicy = Literal["lru", "lfu"]  # experts that leave a cache first: not used for longest, or used least

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
MAX_STRETCH = 1024  # largest factor by which YaRN is believed to stretch a model's positions
LAYER_INDEX = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_TEXT = ("text_config",)  # key of the part of a configuration that describes the text model
_SHARING = ("num_kv_shared_layers",)


class ModelError(ZinferError):
    """A model reference or description that cannot be used; the message says what to do next."""


class Matrix(NamedTuple):
    """Weights of a linear module, ``[rows, columns]``, or of such a module in each of `experts`.

    `name` is the module's name within its layer, as checkpoints store it; ``*`` stands for the number of an expert. A
    name of experts without it is that of one stored tensor for all of them.
    """

    name: str
    rows: int
    columns: int
    experts: int = 0

    @property
    def numel(self) -> int:
        """Number of values, those of all experts together."""
        return max(1, self.experts) * self.rows * self.columns


class LayerSpec(Frozen):
    """One decoder layer: its parameters, and the number of values that it caches."""

    parameters: int
    expert_parameters: int = 0  # parameters of routed experts among them; a token passes through a few experts
    kv_width: int = 0  # values cached a token, keys and values together, and the keys of an indexer
    index_width: int = 0  # those of an indexer, which stay on the device
    window: int | None = None  # sliding window: most tokens cached
    state: int = 0  # values cached a sequence, independent of its length
    attention: int = 0  # query heads, times the mean width of a key and a value; 0 without attention
    matrices: tuple[Matrix, ...] = ()  # parameters that a format may store quantised; empty if they are not known

    def tokens(self, length: int) -> int:
        """Return the number of tokens of `length` that are cached and attended to."""
        return length if self.window is None else min(length, self.window)


class _Same:
    """Stack of layers as a cache key that compares by identity, which is faster than comparing layers."""

    def __init__(self, layers: tuple[LayerSpec, ...]) -> None:
        self.layers = layers

    def __hash__(self) -> int:
        return id(self.layers)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.layers is self.layers


@lru_cache(maxsize=256)
def _kinds(same: _Same) -> tuple[tuple[LayerSpec, int], ...]:
    """Return the different layers of a stack with their counts; cached, since a plan asks thousands of times."""
    return tuple(Counter(same.layers).items())


class _Sums(NamedTuple):
    """Parameters of a stack of layers: of all, of the largest one, of all routed experts, and of one layer's."""

    total: int
    largest: int
    routed: int
    experts: int


@lru_cache(maxsize=256)
def _sums(same: _Same) -> _Sums:
    """Return the parameters of a stack of layers, cached as `_kinds` are."""
    kinds = _kinds(same)
    return _Sums(
        total=sum(times * layer.parameters for layer, times in kinds),
        largest=max(layer.parameters for layer, _ in kinds),
        routed=sum(times * layer.expert_parameters for layer, times in kinds),
        experts=max(layer.expert_parameters for layer, _ in kinds),
    )


class Shape(Frozen):
    """Shape of a model: its counts and widths, without a name, a dtype or weights.

    `other_parameters` counts all that is not in one decoder layer alone: embeddings, head, final norm, and weights that
    several layers share. Heads and widths are those of the layer that caches most; `ffn_size` is that of one expert in
    a model with experts.
    """

    num_layers: int
    layers: tuple[LayerSpec, ...]  # in depth order
    other_parameters: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    max_position: int | None = None
    num_experts: int = 0
    experts_per_token: int = 0
    stack: str = ""  # name of the module that holds the decoder layers, if it is known


class Routing(Frozen):
    """Routing of a mixture as it was recorded, for plans; what is not known is reckoned as if every token chose its
    experts evenly."""

    source: str  # what was recorded, as a noun phrase
    touched: tuple[tuple[int, float], ...] = ()  # tokens of a step, ascending from 2 on, and the share of experts
    # By policy: tokens of a step, size of the cache as a share of all experts, and the share of needs that it meets.
    hits: Mapping[ExpertPolicy, tuple[tuple[int, float, float], ...]] = Field(default_factory=dict)
    guessed: float | None = Field(default=None, ge=0, le=1)  # right guesses of the next layer's experts, as a share

    def hits_of(self, policy: ExpertPolicy, cached: float, tokens: int) -> float | None:
        """Return the share of the needs of a step that a cache of the share `cached` of all experts meets, between
        those of the nearest known sizes and numbers of tokens; None if nothing is known of the policy."""
        known = self.hits.get(policy, ())
        sizes = sorted({step for step, _, _ in known})
        met = [
            (step, _between([(0.0, 0.0), *sorted((size, hits) for one, size, hits in known if one == step), (1.0, 1.0)],
                            cached))
            for step in sizes
        ]  # fmt: skip
        return _between(met, tokens) if met else None


def _between(known: Iterable[tuple[float, float]], at: float) -> float:
    """Interpolate linearly between `known` points, ascending; beyond them the nearest one counts."""
    known = list(known)
    for (low, first), (high, second) in pairwise(known):
        if low <= at < high:
            return first + (second - first) * (at - low) / (high - low)
    return known[0][1] if at < known[0][0] else known[-1][1]


class ModelSpec(Shape):
    """Decoder-only model, whole or the first `num_layers` of `total_layers` layers."""

    name: str
    architecture: str
    total_layers: int
    dtype: Dtype = "bfloat16"
    config: dict[str, Any]  # Hugging Face configuration that the model is built from
    directory: str | None = None  # folder of a local checkpoint
    stored_ratio: float = Field(default=1.0, gt=0)  # bytes of layers as released over those in `dtype`; 1 if equal
    fp8_ratio: float = Field(default=0.0, ge=0)  # part of `stored_ratio` that are FP8 codes (e4m3)
    weights: Weights = "as-released"  # format that the layers' weights are given here; `config` describes it, too
    hub_id: str | None = None
    draft: "ModelSpec | None" = None  # small model of the same tokenizer that drafts for this one
    routing: Routing | None = None  # routing that a plan reckons with; None: tokens choose their experts evenly

    @property
    def layer_parameters(self) -> tuple[int, ...]:
        """Parameters of each decoder layer, in depth order."""
        return tuple(layer.parameters for layer in self.layers)

    @property
    def _in_layers(self) -> int:
        return _sums(_Same(self.layers)).total

    @property
    def expert_parameters(self) -> int:
        """Parameters of the routed experts of one layer, the layer with most."""
        return _sums(_Same(self.layers)).experts

    @property
    def parameters(self) -> int:
        """Parameters of this model: those of its `num_layers` layers and those outside layers."""
        return self._in_layers + self.other_parameters

    @property
    def active_parameters(self) -> int:
        """Parameters that one token passes through: only `experts_per_token` experts of each layer."""
        return self.parameters - round(self._routed * (1 - self.experts_per_token / max(1, self.num_experts)))

    def parameters_read(self, batch_size: int) -> float:
        """Return the expected number of parameters that a decode step of `batch_size` tokens reads. Experts count if
        some token is sent to them: (1 - (1 - k/E)^B) of them if tokens choose independently."""
        return self.parameters - self._routed * (1 - self.touched_share(batch_size))

    def touched_share(self, tokens: int) -> float:
        """Return the expected share of a layer's routed experts that some of `tokens` tokens are sent to: as `routing`
        says, and beyond what it says, if tokens choose independently and all experts alike: 1 - (1 - k/E)^n."""
        known = [(1, self.experts_per_token / max(1, self.num_experts))]
        known += [] if self.routing is None else self.routing.touched
        last, share = known[-1]
        return _between(known, tokens) if tokens < last else 1 - (1 - share) ** (tokens / last)

    def hits(self, policy: ExpertPolicy, cached: float, tokens: int) -> float:
        """Return the expected share of the experts that `tokens` tokens touch which a cache holds, of the share
        `cached` of all experts: as `routing` says; the same share if all experts are alike."""
        recorded = None if self.routing is None else self.routing.hits_of(policy, cached, tokens)
        return cached if recorded is None else recorded

    @property
    def right_guesses(self) -> float:
        """Expected share of right ones among guesses of the next layer's experts: as `routing` says; by chance, k/E, if
        nothing is known."""
        if self.routing is not None and self.routing.guessed is not None:
            return self.routing.guessed
        return self.experts_per_token / max(1, self.num_experts)

    @property
    def _routed(self) -> int:
        return _sums(_Same(self.layers)).routed

    @property
    def routed_bytes(self) -> int:
        """Bytes of the routed experts of all layers."""
        return self._routed * self.dtype_bytes

    @property
    def expert_bytes(self) -> int:
        """Bytes of one routed expert; 0 without experts."""
        return self.expert_parameters * self.dtype_bytes // max(1, self.num_experts)

    @property
    def dense_layer_bytes(self) -> int:
        """Bytes of a decoder layer without its routed experts, the layer with most."""
        return max(layer.parameters - layer.expert_parameters for layer, _ in _kinds(_Same(self.layers))) * (
            self.dtype_bytes
        )

    @property
    def ffn_matrices(self) -> int:
        """Matrices of a feed-forward network: two, or three with a gate."""
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim * self.hidden_size
        one = self.layer_bytes // self.dtype_bytes - attention
        if self.num_experts:
            one = self.expert_parameters // self.num_experts
        return min(3, max(2, round(one / (self.hidden_size * self.ffn_size))))

    @property
    def dtype_bytes(self) -> int:
        """Bytes of one parameter."""
        return DTYPE_BYTES[self.dtype]

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters."""
        return self.parameters * self.dtype_bytes

    @property
    def stored_bytes(self) -> int:
        """Bytes of all parameters in the format that they are stored in: as released, or as `weights` says."""
        return round(self.streamed_bytes * self.stored_ratio) + self.other_bytes

    @property
    def layer_bytes(self) -> int:
        """Bytes of the largest decoder layer: the size of one slot of a ring."""
        return _sums(_Same(self.layers)).largest * self.dtype_bytes

    @property
    def streamed_bytes(self) -> int:
        """Bytes of all decoder layers: full offload moves them over the link each step."""
        return self._in_layers * self.dtype_bytes

    @property
    def other_bytes(self) -> int:
        """Bytes outside the decoder layers (embeddings, head, final norm)."""
        return self.other_parameters * self.dtype_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all layers, before any window is full."""
        return sum(layer.kv_width for layer in self.layers) * self.dtype_bytes

    def kv_layer_bytes(self, batch_size: int, length: int) -> tuple[int, ...]:
        """Return the bytes that each layer caches for `batch_size` sequences of `length` tokens: keys and values of the
        tokens in its window, and its constant state."""
        return tuple(
            batch_size * (layer.tokens(length) * layer.kv_width + layer.state) * self.dtype_bytes
            for layer in self.layers
        )

    def largest_kv_layer_bytes(self, batch_size: int, length: int) -> int:
        """Return the largest number of bytes that a layer caches; see `kv_layer_bytes`."""
        kinds = _kinds(_Same(self.layers))
        values = max(layer.tokens(length) * layer.kv_width + layer.state for layer, _ in kinds)
        return batch_size * values * self.dtype_bytes

    def index_bytes(self, batch_size: int, length: int) -> int:
        """Return the part of `kv_bytes` that stays on the device wherever keys and values are: keys of indexers."""
        values = sum(times * layer.tokens(length) * layer.index_width for layer, times in _kinds(_Same(self.layers)))
        return batch_size * values * self.dtype_bytes

    def kv_bytes(self, batch_size: int, length: int) -> int:
        """Return the KV cache of all layers for `batch_size` sequences of `length` tokens, in bytes."""
        values = sum(
            times * (layer.tokens(length) * layer.kv_width + layer.state) for layer, times in _kinds(_Same(self.layers))
        )
        return batch_size * values * self.dtype_bytes

    def decode_flops(self, batch_size: int, context_len: int) -> int:
        """Return the FLOPs of one decode step: two for each weight and token, and attention over `context_len` cached
        tokens.

        Source: Kaplan et al. 2020 (arXiv:2001.08361), section 2.1: 2N + 2 · n_layer · n_ctx · d_attn forward, the
        second term once for the scores and once for the weighted sum of values.
        """
        kinds = _kinds(_Same(self.layers))
        attention = 4 * sum(times * layer.attention * layer.tokens(context_len) for layer, times in kinds)
        return batch_size * (2 * self._matmul_parameters + attention)

    def prefill_flops(self, batch_size: int, input_len: int) -> int:
        """Return the FLOPs of a prefill of `input_len` tokens: as `decode_flops` for every position (causal: half the
        context on average, until a window is full); the head runs for the last position only."""
        head = 2 * self.vocab_size * self.hidden_size
        attention = 0
        for layer, times in _kinds(_Same(self.layers)):
            seen = layer.tokens(input_len)
            attention += 2 * times * layer.attention * (2 * seen * input_len - seen**2)
        return batch_size * (input_len * (2 * self._matmul_parameters - head) + attention + head)

    @property
    def _matmul_parameters(self) -> int:
        """Weights that a token is multiplied with: those of the layers and the head. The embedding is a look-up."""
        layers = self.active_parameters - self.other_parameters
        return layers + self.vocab_size * self.hidden_size

    def slice(self, layers: int) -> "ModelSpec":
        """Return a copy of this model with its first `layers` decoder layers only.

        Raises ModelError unless 1 <= layers <= num_layers.
        """
        if not 1 <= layers <= self.num_layers:
            raise ModelError(f"--layers {layers}: {self.name} has {self.num_layers} layers")
        config = cut(self.config, self.num_layers, layers)
        return self.model_copy(update={"num_layers": layers, "layers": self.layers[:layers], "config": config})

    def with_dtype(self, dtype: Dtype) -> "ModelSpec":
        """Return the same model with its weights in `dtype`; as released they are what they were."""
        times = self.dtype_bytes / DTYPE_BYTES[dtype]
        ratio = self.stored_ratio * times if self.stored_ratio != 1 else 1.0
        return self.model_copy(update={"dtype": dtype, "stored_ratio": ratio, "fp8_ratio": self.fp8_ratio * times})


def cut(config: Mapping[str, Any], depth: int, layers: int) -> dict[str, Any]:
    """Shorten `config`, of a model with `depth` decoder layers, to its first `layers`: the depth itself, whatever its
    key, and each list or string with an item a layer; in the text model's configuration if that is nested."""

    def first(key: str, value: Any) -> Any:
        if key in CONFIG_KEYS["num_layers"] and value == depth:
            return layers
        if key in _SHARING and isinstance(value, int):  # the last so many layers use the cache of earlier ones
            return max(0, layers - (depth - value))
        if isinstance(value, dict):
            return {name: first(name, inner) for name, inner in value.items()} if key in _TEXT else value
        if key == "attention_types" and isinstance(value, list):  # pairs of kinds and repetitions
            kinds = [kind for some, times in value for kind in [*some] * times]
            return [[kinds[:layers], 1]] if len(kinds) == depth else value
        items = isinstance(value, list) or (isinstance(value, str) and key.endswith("pattern"))
        return value[:layers] if items and len(value) == depth and not key.endswith(("_id", "_ids")) else value

    return {key: first(key, value) for key, value in config.items()}


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration of the text model: a part of `config` if the model has other modalities, else all of
    it."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of rotary positions in a text model's configuration, under the older name, too."""
    found = config.get("rope_parameters") or config.get("rope_scaling")
    return found if isinstance(found, Mapping) else {}


def stretched(positions: int | None, settings: Mapping[str, Any]) -> int | None:
    """Return `positions` (``max_position_embeddings``), or those to which YaRN and dynamic NTK stretch them.

    `settings` are those of rotary positions. The documentation of `transformers` (``RopeParameters``) gives the bound:
    a factor of x serves sequences of x times the original length. (Model cards of Qwen add YaRN to a configuration and
    leave ``max_position_embeddings`` as it was; dynamic NTK begins beyond it.)
    """
    kind, factor = settings.get("rope_type", settings.get("type")), settings.get("factor")
    own = (settings.get("original_max_position_embeddings") if kind == "yarn" else None) or positions
    if positions is None or kind not in ("yarn", "dynamic") or type(own) is not int or isinstance(factor, bool):
        return positions
    if not isinstance(factor, int | float) or not 1 <= factor <= MAX_STRETCH:
        return positions
    return max(positions, int(own * factor))


def check_positions(spec: ModelSpec, input_len: int, output_len: int, prompt: str = "") -> None:
    """Raise ModelError if a prompt and its answer are longer than the model's positions (its learned table, or the
    angles it was trained with). `prompt` names the prompt in the message; by default its option."""
    if spec.max_position is not None and input_len + output_len > spec.max_position:
        raise ModelError(
            f"{prompt or f'--input-len {input_len}'} and --output-len {output_len} exceed the {spec.max_position} "
            f"positions of {spec.name}"
        )


def config_text(spec: ModelSpec) -> str:
    """Return the configuration as canonical JSON, for fingerprints."""
    return json.dumps(spec.config, sort_keys=True)
