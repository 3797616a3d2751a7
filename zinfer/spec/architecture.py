"""The model of a configuration: built by `transformers` without memory for its weights, and measured by a forward pass.

A configuration's keys have many names and the arithmetic behind them differs between architectures. So the model is
asked: which parameters each decoder layer has, and which of them are routed experts, stands in its modules; what a
layer caches, how many heads attend and how many experts a token is sent to shows while it computes. Tensors on the meta
device have shapes and no data, so this takes a second or two for a model of any size.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from math import ceil
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import Cache, DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

from zinfer.spec.model import CONFIG_KEYS, Dtype, LayerSpec, ModelError, ModelSpec, Shape

# Sequences and tokens of the measuring pass. The tokens are recognised in the shapes of what is cached, so their number
# is none that a model has for a width; a prime, which is no multiple of one either.
_ROWS, _TOKENS = 2, 13
_MORE = 8 * 256 + 13  # where something is cached once for up to 256 tokens
# Model types that build and run, but whose text would be another one than that of `transformers`, and why.
_UNLIKE = {
    "kosmos-2": "it numbers positions by its padding token, and not from the first token on",
    "kosmos-2.5": "it numbers positions by its padding token, and not from the first token on",
    "paligemma": "each token of its prompts attends to all others, also to later ones",
}
_RESULTS = ("loss", "logits", "hidden_states", "attentions")


def model_config(spec: ModelSpec) -> PreTrainedConfig:
    """The `transformers` configuration of `spec`. Raises ModelError where transformers knows no such architecture."""
    return _configured(spec.name, spec.architecture, spec.config)


def empty_model(spec: ModelSpec) -> PreTrainedModel:
    """The model of `spec` with its parameters on the meta device and its buffers (rotary tables and the like) real, on
    the CPU. Raises ModelError where transformers cannot build it as a causal language model."""
    with _refusing(spec.name), init_empty_weights(include_buffers=False):
        model = _causal(model_config(spec), spec.dtype)
    model.tie_weights()
    return model.requires_grad_(False).eval()


def decoder_layers(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """The name and the list of the decoder layers, in depth order: of the lists of blocks that lie in no other one,
    those of the text model's depth before those of another, and of these the largest.

    Raises ModelError where there is none (the model is not a stack of decoder layers).
    """
    stacks: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        nested = any(name.startswith(f"{outer}.") for outer in stacks)
        if isinstance(module, nn.ModuleList) and len(module) and not nested and _weights(module):
            stacks[name] = module
    if not stacks:
        raise ModelError(f"{type(model).__name__} is not a stack of decoder layers: zinfer has nothing to stream")
    depth = getattr(_text(model.config), "num_hidden_layers", None)
    return max(stacks.items(), key=lambda stack: (len(stack[1]) == depth, _weights(stack[1])))


def measure(name: str, config: Mapping[str, Any]) -> Shape:
    """The figures of the model that `config` describes, from the model itself; those of equal ones are kept.

    Raises ModelError, with `name` in it, where transformers cannot build it, or it is no stack of decoder layers that
    keeps what it has seen in a cache.
    """
    try:
        return _measure(json.dumps(config, sort_keys=True))
    except ModelError as error:
        raise ModelError(f"{name}: {error}") from None


@cache
def _measure(config_json: str) -> Shape:
    config = json.loads(config_json)
    with _refusing(), torch.device("meta"), _NoData():
        model = _causal(_configured("", config.get("model_type", ""), config), "bfloat16").eval()
    _, layers = decoder_layers(model)
    watch = _watched(model, layers, _TOKENS)
    if any(seen.may_grow for seen in watch.layers):
        for seen, later in zip(watch.layers, _watched(model, layers, _MORE).layers, strict=True):
            seen.compare(later)
    return _told(model, layers, watch.layers)


def _watched(model: PreTrainedModel, layers: nn.ModuleList, tokens: int) -> "_Watch":
    """What each layer does in a forward pass of `tokens` tokens."""

    def run(**cache: Cache) -> _Watch:
        watch = _Watch(layers, tokens)
        try:
            with torch.device("meta"), torch.no_grad(), watch:
                ids = torch.zeros(_ROWS, tokens, dtype=torch.long)
                watch.settle(model(input_ids=ids, use_cache=True, **cache))
            if not all(seen.entered for seen in watch.layers):
                raise ModelError("a text does not pass through all of its layers: they cannot be streamed in order")
        finally:
            for hook in watch.hooks:
                hook.remove()
        return watch

    with _refusing():
        try:
            return run()
        except IndexError:  # the cache that it makes has a layer for each of an encoder that it does not have
            return run(past_key_values=DynamicCache())


def _told(model: PreTrainedModel, layers: nn.ModuleList, watched: "list[_Seen]") -> Shape:
    """What the modules and the watched pass say, in the words of a ModelSpec."""
    text, routed = _text(model.config), [_experts(layer) for layer in layers]
    times = Counter(id(parameter) for layer in layers for parameter in layer.parameters())
    parts = []
    for layer, experts, seen in zip(layers, routed, watched, strict=True):
        own = {id(weight): weight.numel() for weight in layer.parameters() if times[id(weight)] == 1}
        inside = {id(weight) for module in experts for weight in module.parameters()}
        part = LayerSpec(
            parameters=sum(own.values()),
            expert_parameters=sum(size for weight, size in own.items() if weight in inside),
            kv_width=seen.kv_width,
            window=seen.window if seen.kv_width else _window(layer),
            state=seen.state,
            attention=seen.products // 2 if seen.kv_width or not seen.state else 0,
        )
        parts.append(part)
    if not any(part.kv_width or part.state for part in parts):
        raise ModelError(f"{type(model).__name__} keeps nothing of the tokens that it has seen: it cannot decode")
    num_experts = max((_number(module) for modules in routed for module in modules), default=0)
    chosen = max((k for seen in watched for width, k in seen.chosen if width == num_experts), default=0)
    embedding = model.get_input_embeddings().weight
    hidden = _first(text, CONFIG_KEYS["hidden_size"]) or embedding.shape[-1]
    kv_heads, head_dim = max((seen.keys for seen in watched), key=lambda keys: keys[0] * keys[1])
    heads = max(seen.heads for seen in watched) if any(part.attention for part in parts) else 0
    if kv_heads and not heads:  # they attend in a way that is not seen, and as most models do
        heads = _first(text, CONFIG_KEYS["num_heads"]) or kv_heads
        parts = [part.model_copy(update={"attention": part.kv_width and heads * head_dim}) for part in parts]
    return Shape(
        num_layers=len(parts),
        layers=tuple(parts),
        other_parameters=_weights(model) - sum(part.parameters for part in parts),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads or heads,
        head_dim=head_dim,
        ffn_size=_expert_width(routed, hidden) or _ffn_size(text, layers, hidden),
        vocab_size=embedding.shape[0],
        max_position=_first(text, CONFIG_KEYS["max_position"]),
        num_experts=num_experts,
        experts_per_token=min(num_experts, chosen or _first(text, CONFIG_KEYS["experts_per_token"]) or 1),
    )


def _weights(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _text(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration of the decoder within `config`, which is itself where there is nothing else in it."""
    try:
        return config.get_text_config(decoder=True)
    except ValueError:  # several may be meant
        return config


def _first(config: PreTrainedConfig, names: Iterable[str]) -> int | None:
    """The first of the settings `names` that `config` has as a number, or as one a layer, of which the largest."""
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, (list, tuple)):
            value = max((number for number in value if isinstance(number, int)), default=None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def _window(layer: nn.Module) -> int | None:
    """The sliding window of a layer that attends to what another one has cached."""
    sizes = [getattr(module, "sliding_window", None) for module in layer.modules()]
    return next((size for size in sizes if isinstance(size, int)), None)


def _experts(layer: nn.Module) -> list[nn.Module]:
    """The modules of a layer that hold the weights of routed experts: by name or class they are experts, and neither
    shared ones nor in another such module."""
    found: dict[str, nn.Module] = {}
    for name, module in layer.named_modules():
        own = name.rpartition(".")[2].lower()
        nested = any(name.startswith(f"{outer}.") for outer in found)
        said = "expert" in own or "expert" in type(module).__name__.lower()
        if said and "shared" not in own and not nested and _number(module) > 1 and _weights(module):
            found[name] = module
    return list(found.values())


def _number(experts: nn.Module) -> int:
    """How many experts a module holds: that many modules, weights with that many rows of matrices, or so it says."""
    if isinstance(experts, (nn.ModuleList, nn.ModuleDict)):
        return len(experts)
    stacked = [parameter.shape[0] for parameter in experts.parameters() if parameter.dim() == 3]
    told = (getattr(experts, name, None) for name in ("num_experts", "moe_num_experts", "num_local_experts"))
    return max(stacked, default=0) or next((number for number in told if isinstance(number, int)), 0)


def _expert_width(routed: Iterable[list[nn.Module]], hidden: int) -> int:
    """Values between the matrices of one expert, the widest of all layers; 0 without experts."""
    widths = [0]
    for module in (module for modules in routed for module in modules):
        stacked = max(parameter.dim() for parameter in module.parameters())  # biases have a dimension less
        sizes = [parameter.shape[-2:] for parameter in module.parameters() if parameter.dim() == stacked]
        inner = [size for shape in sizes for size in _others(shape, hidden)]
        widths.append(min(inner, default=hidden))
    return max(widths)


def _ffn_size(config: PreTrainedConfig, layers: Iterable[nn.Module], hidden: int) -> int:
    """Values between the matrices of a feed-forward network: as the configuration says, or else the width that most
    weights lead to and from."""
    told = _first(config, CONFIG_KEYS["ffn_size"])
    if told is not None:
        return told
    shapes = {tuple(parameter.shape) for layer in layers for parameter in layer.parameters() if parameter.dim() == 2}
    both = [size for shape in shapes for size in _others(shape, hidden) if shape[::-1] in shapes]
    return max(both, default=4 * hidden)


def _others(shape: Iterable[int], hidden: int) -> list[int]:
    """The other size of a matrix with one of `hidden`."""
    sizes = list(shape)
    if hidden not in sizes:
        return []
    sizes.remove(hidden)
    return sizes


def _configured(name: str, architecture: str, config: Mapping[str, Any]) -> PreTrainedConfig:
    # A copy: transformers writes into nested settings (rotary scaling) that it is given.
    settings: dict[str, Any] = _numbers(dict(config))
    for key in ("model_type", "dtype", "torch_dtype"):
        settings.pop(key, None)
    told = f"{name}: " if name else ""
    if architecture not in CONFIG_MAPPING:
        raise ModelError(
            f"{told}transformers cannot build a {architecture!r} model without code of the repository, which zinfer "
            "does not run"
        )
    try:
        return AutoConfig.for_model(architecture, **settings)
    except Exception as error:  # each architecture has checks of its own
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"{told}transformers cannot build a {architecture!r} model: {reason}") from None


def _numbers(value: Any) -> Any:
    """A copy of a part of a `config.json`, with the numbers in it that JSON has no words for and transformers spells
    as ``{"__float__": "Infinity"}``."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
            return float(value["__float__"])
        return {key: _numbers(part) for key, part in value.items()}
    return [_numbers(part) for part in value] if isinstance(value, list) else value


def _causal(config: PreTrainedConfig, dtype: Dtype) -> PreTrainedModel:
    """The causal language model of `config`: of the text model within it where that can stand alone, so that what sees
    and hears is neither loaded nor counted; else of the whole."""
    if config.model_type in _UNLIKE:
        raise ModelError(f"{config.model_type} models are not supported: {_UNLIKE[config.model_type]}")
    text = getattr(config, "text_config", None)
    if text is not None and type(text) in MODEL_FOR_CAUSAL_LM_MAPPING:
        # Standing alone it has the head, which the whole model ties or not.
        text.tie_word_embeddings = getattr(config, "tie_word_embeddings", False)
        config = text
    elif isinstance(text, PreTrainedConfig) and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText.from_config(config, dtype=getattr(torch, dtype), trust_remote_code=False)
    elif type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(f"a {config.model_type!r} model is no decoder-only language model")
    return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), trust_remote_code=False)


@contextmanager
def _refusing(name: str = "") -> Iterator[None]:
    """Turn whatever an architecture raises into a ModelError of one line, that begins with `name`."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:  # anything can go wrong in the code of some architecture with some configuration
        reason = " ".join(str(error).split())[:200]
        told = f"{name}: " if name else ""
        raise ModelError(f"{told}transformers cannot build it for text generation: {reason}") from None


class _NoData(TorchFunctionMode):
    """Goes on where a model looks at values, which tensors on the meta device do not have.

    A check that would only warn or take a shortcut is told "yes" or 1; a loop over the experts that tokens were sent to
    finds none. Shapes, all that is measured, are the same either way.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _LOOKS and isinstance(args[0], Tensor) and args[0].is_meta:
            return _LOOKS[func](*args, **kwargs)
        return self.computed(func, args, func(*args, **kwargs), kwargs)

    def computed(self, func: Callable[..., Any], args: tuple[Any, ...], out: Any, kwargs: dict[str, Any]) -> Any:
        """The result of a function, for those who watch."""
        return out


def _no_index(tensor: Tensor, *_: object, as_tuple: bool = False, **__: object) -> Any:
    if as_tuple:
        return (torch.zeros(0, dtype=torch.long, device="meta"),) * max(tensor.dim(), 1)
    return torch.zeros(0, tensor.dim(), dtype=torch.long, device="meta")


def _where(condition: Tensor, *others: Any, **named: Any) -> Any:
    return torch.where(condition, *others, **named) if others or named else _no_index(condition, as_tuple=True)


def _split(tensor: Tensor, sizes: int | list[int], dim: int = 0) -> tuple[Tensor, ...]:
    """Parts of sizes that are not known, since they are values: the first takes what the others leave."""
    if isinstance(sizes, list):
        sizes = [tensor.shape[dim] - sum(sizes[1:]), *sizes[1:]]
    return torch.split(tensor, sizes, dim)


def _grouped(rows: Tensor, weights: Tensor, *_: object, **__: object) -> Tensor:
    """Rows times the matrices of their groups, without the alignment that the kernel asks for."""
    return rows.new_empty(*rows.shape[:-1], weights.shape[-1])


_LOOKS: dict[Callable[..., Any], Callable[..., Any]] = {
    Tensor.item: lambda tensor: 1.0 if tensor.is_floating_point() else 1,
    Tensor.__bool__: lambda _: True,
    Tensor.__int__: lambda _: 1,
    Tensor.__index__: lambda _: 1,
    Tensor.__float__: lambda _: 1.0,
    Tensor.__contains__: lambda *_: False,
    Tensor.tolist: lambda tensor: [0] * tensor.numel(),
    Tensor.split: _split,
    Tensor.nonzero: _no_index,
    torch.nonzero: _no_index,
    torch.where: _where,
    torch._grouped_mm: _grouped,
    torch.nn.functional.grouped_mm: _grouped,
}
_PRODUCTS = (
    torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.baddbmm, Tensor.baddbmm, torch.einsum,
)  # fmt: skip


class _Seen:
    """What one decoder layer did in a pass of `tokens` tokens."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.entries: list[Any] = []  # of the cache
        self.entered = False
        self.heads = 0  # of queries
        self.products = 0  # for each token and each that it attends to
        self.chosen: list[tuple[int, int]] = []  # (among how many, how many) by a router, or another that picks
        self._grown = 0  # values a token, of what is cached once for several of them
        self._constant: int | None = None  # values of a sequence, where that is not what this pass left

    @property
    def tensors(self) -> list[tuple[Any, str, Tensor]]:
        """What it has cached: part of the cache, name in it, values. (Keys may be the values too, and count once.)"""
        found = [(entry, name, tensor) for entry in self.entries for name, tensor in _tensors(entry)]
        return list({id(tensor): (entry, name, tensor) for entry, name, tensor in reversed(found)}.values())

    def cached(self, name: str, tensor: Tensor) -> int:
        """How many tokens a cached tensor holds something of each for; 0 if it is a state of the sequence."""
        if name in ("keys", "values") and tensor.dim() == 4:
            return tensor.shape[-2]  # all of them, or a window's
        return self.tokens if self.tokens in tensor.shape[1:] else 0

    @property
    def _widths(self) -> list[tuple[int, int | None]]:
        """Values a token, and the window, of each tensor that holds something of each token."""
        return [
            (tensor.numel() // (_ROWS * tokens), size if isinstance(size, int) else None)
            for entry, name, tensor in self.tensors
            if (tokens := self.cached(name, tensor))
            for size in (getattr(entry, "sliding_window", None),)
        ]

    @property
    def window(self) -> int | None:
        """The widest window; None if something of all tokens is kept as well."""
        sizes = [size for _, size in self._widths if size is not None]
        return max(sizes) if sizes and len(sizes) == len(self._widths) and not self._grown else None

    @property
    def kv_width(self) -> int:
        whole = self.window is None
        return self._grown + sum(width for width, size in self._widths if size is None or not whole)

    @property
    def state(self) -> int:
        """Values whose number does not grow: also a window's, beside something of all tokens."""
        own = self._constant
        if own is None:
            own = sum(tensor.numel() // _ROWS for _, name, tensor in self.tensors if not self.cached(name, tensor))
        beside = self.window is None
        return own + sum(width * size for width, size in self._widths if size is not None and beside)

    @property
    def may_grow(self) -> bool:
        """Whether it caches what may be of several tokens together: a state in a part of a class of the model's own."""
        return any(
            not isinstance(entry, Tensor)
            and type(entry).__module__ not in (Cache.__module__, "builtins")
            and not self.cached(name, tensor)
            for entry, name, tensor in self.tensors
        )

    def compare(self, later: "_Seen") -> None:
        """Tell what grows with the tokens, though more slowly, from what does not, by a longer pass."""
        before, after = (
            sum(tensor.numel() // _ROWS for _, name, tensor in seen.tensors if not seen.cached(name, tensor))
            for seen in (self, later)
        )
        self._grown = ceil(max(0, after - before) / (later.tokens - self.tokens))
        self._constant = max(0, after - self._grown * later.tokens)

    @property
    def keys(self) -> tuple[int, int]:
        """Heads of the widest keys, and the width of one."""
        shapes = [tensor.shape for _, name, tensor in self.tensors if name == "keys" and tensor.dim() == 4]
        return max(((shape[1], shape[3]) for shape in shapes), key=lambda pair: pair[0] * pair[1], default=(0, 0))


class _Watch(_NoData):
    """A forward pass on the meta device, and what each of `layers` does in it."""

    def __init__(self, layers: Iterable[nn.Module], tokens: int) -> None:
        super().__init__()
        self.layers: list[_Seen] = []
        self.hooks: list[RemovableHandle] = []
        self._tokens = tokens
        self._now: _Seen | None = None
        self._owned: set[int] = set()
        for layer in layers:
            seen = _Seen(tokens)
            self.layers.append(seen)
            self.hooks += (
                layer.register_forward_pre_hook(lambda *_, seen=seen: self._enter(seen)),
                layer.register_forward_hook(lambda _, args, kwargs, __: self._leave(args, kwargs), with_kwargs=True),
            )

    def _enter(self, seen: _Seen) -> None:
        seen.entered = True
        self._now = seen

    def _leave(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Whatever a cache holds since this layer ran is this layer's."""
        seen, self._now = self._now, None
        caches = [argument for argument in (*args, *kwargs.values()) if isinstance(argument, Cache)]
        beside = ((value for name, value in vars(own).items() if name != "layers") for own in caches)
        lists = (value for values in beside for value in values if isinstance(value, (list, dict)))
        parts = [part for some in lists for part in (some.values() if isinstance(some, dict) else some)]
        for entry in (*(entry for own in caches for entry in own.layers), *parts):
            if seen is not None and id(entry) not in self._owned and any(_tensors(entry)):
                self._owned.add(id(entry))
                seen.entries.append(entry)

    def settle(self, out: Mapping[str, Any]) -> None:
        """Share out a cache of a class of the model's own, which comes back as a whole, evenly among the layers."""
        if any(seen.entries for seen in self.layers):
            return
        kept = [tensor for key, value in out.items() if key not in _RESULTS for _, tensor in _tensors(value)]
        total = sum(tensor.numel() for tensor in kept)
        for seen in self.layers if total else ():
            seen.entries = [torch.empty(_ROWS, ceil(total / _ROWS / len(self.layers)), device="meta")]

    def computed(self, func: Callable[..., Any], args: tuple[Any, ...], out: Any, kwargs: dict[str, Any]) -> Any:
        name = getattr(func, "__name__", "")
        if name.endswith("_") and not name.endswith("__") and args and isinstance(args[0], nn.Parameter):
            raise ModelError("it changes its weights as it runs, so that they cannot be streamed")
        seen = self._now
        if seen is None:
            return out
        if func in (torch.topk, Tensor.topk):
            values = kwargs["input"] if "input" in kwargs else args[0]
            seen.chosen.append((values.shape[kwargs.get("dim", args[2] if len(args) > 2 else -1)], out[0].shape[-1]))
        elif func is scaled_dot_product_attention:
            query, _, value = (
                kwargs[name] if name in kwargs else args[nth] for nth, name in enumerate(("query", "key", "value"))
            )
            heads = query.numel() // (_ROWS * self._tokens * query.shape[-1])
            seen.heads = max(seen.heads, heads)
            seen.products += heads * (query.shape[-1] + value.shape[-1])
        elif func in _PRODUCTS and isinstance(out, Tensor):
            self._product(seen, [arg for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor)][-2:], out)
        return out

    def _product(self, seen: _Seen, factors: list[Tensor], out: Tensor) -> None:
        """A matrix product, if it is one of an attention: of queries with keys, or of its outcome with values."""
        square = (self._tokens, self._tokens)
        if out.shape[-2:] == square:
            heads = out.numel() // (_ROWS * self._tokens**2)
            seen.heads = max(seen.heads, heads)
            seen.products += heads * factors[0].shape[-1]
        elif any(factor.shape[-2:] == square for factor in factors):
            seen.products += out.numel() // (_ROWS * self._tokens)


def _tensors(value: Any, name: str = "", depth: int = 3) -> Iterator[tuple[str, Tensor]]:
    """The tensors of numbers in an object or a container, with the names they have there."""
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.dim():
            yield name, value
        return
    inside: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        inside = value.items()
    elif isinstance(value, (list, tuple)):
        inside = enumerate(value)
    elif hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)):
        inside = vars(value).items()
    for key, part in inside if depth else ():
        yield from _tensors(part, key if isinstance(key, str) else name, depth - 1)
