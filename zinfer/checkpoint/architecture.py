"""Model measurement: build a `transformers` model without memory, and watch a pass.

Configurations name the same quantity in many ways, so the model itself is read, on the meta device: its modules tell
the parameters and routed experts of each decoder layer, a forward pass what it caches, how it attends and routes.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from itertools import count
from math import ceil
from typing import Any
from unittest.mock import patch

import torch
import transformers
from accelerate import init_empty_weights
from huggingface_hub import constants
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.modules.module import register_module_module_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from zinfer.checkpoint.configuration import without_code
from zinfer.checkpoint.headers import QUANTIZATION
from zinfer.core.errors import ZinferError
from zinfer.core.model import CONFIG_KEYS, Dtype, LayerSpec, Matrix, ModelError, ModelSpec, Shape, stretched

# Sequences and tokens of the measuring pass. The number of tokens is recognised in the shapes of cached tensors, so it
# must not equal any width of a model nor a multiple of one: a prime.
_ROWS, _TOKENS = 2, 13
MAX_MODULES = 400_000  # of a model; those of the largest have 100,000
MAX_BUFFERS = 4 << 30  # bytes that a model computes for itself: masks, tables of positions
_MORE = 8 * 256 + 13  # tokens of the second pass, for models that cache one entry for up to 256 tokens
# Model types that build and run, but would generate another text than `transformers` does -> the reason.
_UNLIKE = {
    "kosmos-2": "it numbers positions by its padding token, and not from the first token on",
    "kosmos-2.5": "it numbers positions by its padding token, and not from the first token on",
    "paligemma": "each token of its prompts attends to all others, also to later ones",
}
# Text models whose code lets padding before a row change its text, though their cache does not show it: tokens of a
# prompt see later ones where no mask hides padding (doge). `make conformance` finds them. Rows of a micro-batch have to
# be of one length, and prompts are computed whole.
COUNTS_PADDING = frozenset({"doge"})
# Names of the cache argument of forward passes: from transformers 5.24 on, before, and of models without attention.
CACHE_NAMES = ("cache", "past_key_values", "cache_params")
# Model types under names of their own -> the type that transformers knows them by. Kimi K2's model card says so.
_SAME = {"kimi_k2": "deepseek_v3"}
_RESULTS = ("loss", "logits", "hidden_states", "attentions")


def empty_model(spec: ModelSpec) -> PreTrainedModel:
    """Return the model of `spec` on the meta device, with real buffers. Raises ModelError."""
    with _refusing(spec.name), building(), init_empty_weights(include_buffers=False):
        model = _causal(_configured(spec.architecture, spec.config), spec.dtype)
    model.tie_weights()
    return model.requires_grad_(False).eval()


def decoder_layers(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Return the decoder layers and their name: of the model's depth, then of most weights. Raises ModelError."""
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
    """Return the shape of the model that `config` describes. Raises ModelError, with `name` in it."""
    with _refusing(name):
        with building(), torch.device("meta"), _Watch():
            model = _causal(_configured(config.get("model_type", ""), config), "bfloat16").eval()
        if (size := sum(buffer.nbytes for buffer in model.buffers())) > MAX_BUFFERS:
            raise ModelError(f"its tables and masks take {size / 1e9:,.0f} GB: positions in its config.json are wrong")
        stack, layers = decoder_layers(model)
        watched = _watched(model, layers, _TOKENS)
        slow = any(seen.may_grow for seen in watched)
        longer = _watched(model, layers, _MORE) if slow else [None] * len(layers)
        return _shape(model, stack, layers, list(zip(watched, longer, strict=True)))


def _watched(model: PreTrainedModel, layers: nn.ModuleList, tokens: int) -> "list[_Seen]":
    """Run a forward pass of `tokens` tokens and record each layer."""

    def run(**cache: Cache) -> list[_Seen]:
        watch = _Watch(layers, tokens)
        with torch.device("meta"), torch.no_grad(), watch:
            ids = torch.zeros(_ROWS, tokens, dtype=torch.long)
            watch.divide(model(input_ids=ids, use_cache=True, **cache))
        if not all(seen.entered for seen in watch.layers):
            raise ModelError("a text does not pass through all of its layers: they cannot be streamed in order")
        return watch.layers

    try:
        return run()
    except IndexError:  # the model's own cache counts the layers of an encoder that it does not have
        accepted = signature(model.forward).parameters
        return run(**{next(name for name in CACHE_NAMES if name in accepted): DynamicCache()})


def _shape(
    model: PreTrainedModel, stack: str, layers: nn.ModuleList, watched: "Sequence[tuple[_Seen, _Seen | None]]"
) -> Shape:
    text, routed = _text(model.config), [_experts(layer) for layer in layers]
    times = Counter(id(parameter) for layer in layers for parameter in layer.parameters())
    parts, find = [], MatrixFinder(model)
    for layer, experts, (seen, longer) in zip(layers, routed, watched, strict=True):
        sizes = {id(weight): weight.numel() for weight in layer.parameters() if times[id(weight)] == 1}
        routed_weights = {id(weight) for module in experts for weight in module.parameters()}
        cache = seen.cache(longer)
        if not cache["kv_width"]:  # it may attend to another layer's cache
            windows = (getattr(module, "sliding_window", None) for module in layer.modules())
            cache["window"] = next((size for size in windows if isinstance(size, int)), None)
        part = LayerSpec(
            parameters=sum(sizes.values()),
            expert_parameters=sum(size for weight, size in sizes.items() if weight in routed_weights),
            attention=seen.products // 2 if cache["kv_width"] or not cache["state"] else 0,
            matrices=tuple(matrix for matrix, weight, _ in find(layer) if id(weight) in sizes),
            **cache,
        )
        parts.append(part)
    if not any(part.kv_width or part.state for part in parts):
        raise ModelError(f"{type(model).__name__} keeps nothing of the tokens that it has seen: it cannot decode")
    num_experts = max((_number(module) for modules in routed for module in modules), default=0)
    chosen = max((k for seen, _ in watched for width, k in seen.chosen if width == num_experts), default=0)
    embedding = model.get_input_embeddings().weight
    hidden = _first(text, CONFIG_KEYS["hidden_size"]) or embedding.shape[-1]
    kv_heads, head_dim = max((seen.keys for seen, _ in watched), key=lambda keys: keys[0] * keys[1])
    heads = max(seen.heads for seen, _ in watched) if any(part.attention for part in parts) else 0
    if kv_heads and not heads:  # an attention that the watch does not recognise: assume the usual one
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
        ffn_size=_expert_width(routed, hidden) or _first(text, CONFIG_KEYS["ffn_size"]) or 4 * hidden,
        vocab_size=embedding.shape[0],
        max_position=stretched(_first(text, CONFIG_KEYS["max_position"]), getattr(text, "rope_parameters", None) or {}),
        num_experts=num_experts,
        experts_per_token=min(num_experts, chosen or _first(text, CONFIG_KEYS["experts_per_token"]) or 1),
        stack=stack,
    )


class MatrixFinder:
    """Search for the matrices that a format may quantise: of linear modules and experts."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._merged: list[tuple[str, tuple[str, ...]]] = []  # end of a parameter's name, and of those merged into it
        for rule in get_model_conversion_mapping(model):
            if isinstance(rule, WeightConverter) and merges_experts(rule) and len(rule.target_patterns) == 1:
                sources = tuple(source.strip("^$").replace("\\.", ".") for source in rule.source_patterns)
                self._merged.append((rule.target_patterns[0].strip("^$").replace("\\.", "."), sources))

    def __call__(self, layer: nn.Module) -> Iterator[tuple[Matrix, Tensor, str]]:
        """Yield the matrices of a layer, with their parameter and its name. An expert's come in order."""
        for path, module in layer.named_modules():
            if isinstance(module, nn.Linear):
                rows, columns = module.weight.shape
                yield Matrix(path, rows, columns), module.weight, f"{path}.weight"
        for module in _experts(layer):
            path = next(name for name, inner in layer.named_modules() if inner is module)
            for leaf, weight in module.named_parameters():
                if weight.dim() == 3:
                    yield from self._of_experts(f"{path}.{leaf}", weight)

    def _of_experts(self, name: str, weight: Tensor) -> Iterator[tuple[Matrix, Tensor, str]]:
        experts, rows, columns = weight.shape
        for target, sources in self._merged:
            if f".{name}".endswith(target if target.startswith(".") else f".{target}"):
                before = f".{name}"[: -len(target)].removeprefix(".")
                for source in sources:
                    stored = f"{before}{source.removesuffix('.weight')}"
                    yield Matrix(stored, rows // len(sources), columns, experts), weight, name
                return
        yield Matrix(name, columns, rows, experts), weight, name  # stored as it is used: transposed


def merges_experts(rule: WeightConverter) -> bool:
    """Tell whether a conversion stacks the rows of single experts."""
    kinds = [(type(operation).__name__, getattr(operation, "dim", None)) for operation in rule.operations]
    return kinds in ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)])


def _weights(module: nn.Module) -> int:
    """Return the number of values of a module, also of partitioned ones."""
    return sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in module.parameters())


def _text(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the configuration of the decoder within `config`."""
    try:
        return config.get_text_config(decoder=True)
    except ValueError:  # ambiguous: several parts qualify
        return config


def _first(config: PreTrainedConfig, names: Iterable[str]) -> int | None:
    """Return the first of the settings `names` that is positive. Of a list with a value per layer it is the largest."""
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, (list, tuple)):
            value = max((number for number in value if isinstance(number, int)), default=None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def _experts(layer: nn.Module) -> list[nn.Module]:
    """Return the outermost modules of a layer with routed experts."""
    modules: dict[str, nn.Module] = {}
    for name, module in layer.named_modules():
        leaf = name.rpartition(".")[2].lower()
        nested = any(name.startswith(f"{outer}.") for outer in modules)
        named = "expert" in leaf or "expert" in type(module).__name__.lower()
        if named and "shared" not in leaf and not nested and _number(module) > 1 and _weights(module):
            modules[name] = module
    return list(modules.values())


def _number(experts: nn.Module) -> int:
    if isinstance(experts, (nn.ModuleList, nn.ModuleDict)):
        return len(experts)
    stacked = [parameter.shape[0] for parameter in experts.parameters() if parameter.dim() == 3]
    declared = (getattr(experts, name, None) for name in ("num_experts", "moe_num_experts", "num_local_experts"))
    return max(stacked, default=0) or next((number for number in declared if isinstance(number, int)), 0)


def _expert_width(routed: Iterable[list[nn.Module]], hidden: int) -> int:
    """Return the largest inner width of an expert; 0 without experts."""
    widths = [0]
    for module in (module for modules in routed for module in modules):
        stacked = max(parameter.dim() for parameter in module.parameters())  # biases have a dimension less
        sizes = [parameter.shape[-2:] for parameter in module.parameters() if parameter.dim() == stacked]
        widths.append(min((sum(shape) - hidden for shape in sizes if hidden in shape), default=hidden))
    return max(widths)


def _configured(architecture: str, config: Mapping[str, Any]) -> PreTrainedConfig:
    architecture = _SAME.get(architecture, architecture)
    # A copy: transformers writes into the nested settings (rotary scaling) that it receives.
    settings: dict[str, Any] = without_code(_numbers(dict(config)), "")
    for key in ("model_type", "dtype", "torch_dtype"):
        settings.pop(key, None)
    for part in (settings, settings.get("text_config") or {}):
        for key in QUANTIZATION:
            part.pop(key, None)  # weights reach the model as numbers of its own type
    if architecture not in CONFIG_MAPPING:
        raise ModelError(
            f"transformers cannot build a {architecture!r} model without code of the repository, which zinfer does "
            "not run"
        )
    return transformers.AutoConfig.for_model(architecture, **settings)


def _numbers(value: Any) -> Any:
    """Return a copy with floats for ``{"__float__": "Infinity"}`` of transformers."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
            return float(value["__float__"])
        return {key: _numbers(part) for key, part in value.items()}
    return [_numbers(part) for part in value] if isinstance(value, list) else value


def _causal(config: PreTrainedConfig, dtype: Dtype) -> PreTrainedModel:
    """Build the causal language model of `config`, without towers where possible."""
    make: Any = transformers.AutoModelForCausalLM
    if config.model_type in _UNLIKE:
        raise ModelError(f"{config.model_type} models are not supported: {_UNLIKE[config.model_type]}")
    text = getattr(config, "text_config", None)
    if text is not None and type(text) in MODEL_FOR_CAUSAL_LM_MAPPING:
        # The head belongs to the text model then; the setting that ties it stands in the outer configuration.
        text.tie_word_embeddings = getattr(config, "tie_word_embeddings", False)
        config = text
    elif isinstance(text, PreTrainedConfig) and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        make = transformers.AutoModelForImageTextToText
    elif type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(f"a {config.model_type!r} model is no decoder-only language model")
    model: PreTrainedModel = make.from_config(config, dtype=getattr(torch, dtype), trust_remote_code=False)
    return model


@contextmanager
def building() -> Iterator[None]:
    """Bound the building of a model: nothing is fetched, and ModelError ends more than MAX_MODULES modules."""
    numbers = count(1)

    def counted(_module: nn.Module, _name: str, _child: nn.Module | None) -> None:
        if next(numbers) > MAX_MODULES:
            raise ModelError(f"its config.json describes more than {MAX_MODULES:,} modules")

    with register_module_module_registration_hook(counted), patch.object(constants, "HF_HUB_OFFLINE", True):
        yield


@contextmanager
def _refusing(name: str) -> Iterator[None]:
    """Turn any exception into a one-line ModelError: an architecture's code may raise anything."""
    try:
        yield
    except ZinferError as error:
        raise ModelError(f"{name}: {error}") from None
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"{name}: transformers cannot build it for text generation: {reason}") from None


def _no_index(tensor: Tensor, *_: object, as_tuple: bool = False, **__: object) -> Any:
    if as_tuple:
        return (torch.zeros(0, dtype=torch.long, device="meta"),) * max(tensor.dim(), 1)
    return torch.zeros(0, tensor.dim(), dtype=torch.long, device="meta")


def _where(condition: Tensor, *others: Any, **named: Any) -> Any:
    return torch.where(condition, *others, **named) if others or named else _no_index(condition, as_tuple=True)


def _split(tensor: Tensor, sizes: int | list[int], dim: int = 0) -> tuple[Tensor, ...]:
    """Split a tensor into parts of unknown sizes. The first part takes what the others leave."""
    if isinstance(sizes, list):
        sizes = [tensor.shape[dim] - sum(sizes[1:]), *sizes[1:]]
    return torch.split(tensor, sizes, dim)


def _grouped(rows: Tensor, weights: Tensor, *_: object, **__: object) -> Tensor:
    """Return the shape of rows times the matrices of their groups."""
    return rows.new_empty(*rows.shape[:-1], weights.shape[-1])


_LOOKS: dict[Callable[..., Any], Callable[..., Any]] = {
    Tensor.item: lambda tensor: 1.0 if tensor.is_floating_point() else 1,
    Tensor.__bool__: lambda _: True,
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
    """Observations of one decoder layer in a pass of `tokens` tokens."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.entries: list[Any] = []  # parts of the cache that this layer wrote
        self.entered = False
        self.heads = 0  # query heads
        self.products = 0  # multiplications for each pair of a token and one that it attends to
        self.chosen: list[tuple[int, int]] = []  # (candidates, chosen) of each top-k: a router's, or another's

    @property
    def tensors(self) -> list[tuple[Any, str, Tensor]]:
        """Cached tensors as (part of the cache, name in it, tensor). One that is both keys and values counts once."""
        every = [(entry, name, tensor) for entry in self.entries for name, tensor in _tensors(entry)]
        return list({id(tensor): (entry, name, tensor) for entry, name, tensor in reversed(every)}.values())

    def cached(self, name: str, tensor: Tensor) -> int:
        """Return how many tokens a cached tensor has entries for."""
        if name in ("keys", "values") and tensor.dim() == 4:
            return tensor.shape[-2]  # all tokens, or those of a window
        return self.tokens if self.tokens in tensor.shape[1:] else 0

    @property
    def constant(self) -> int:
        """Values a sequence of tensors without an entry for each token."""
        return sum(tensor.numel() // _ROWS for _, name, tensor in self.tensors if not self.cached(name, tensor))

    def cache(self, longer: "_Seen | None") -> dict[str, Any]:
        """Return the fields of a LayerSpec on its cache. A `longer` pass tells a state from slow growth."""
        grown, state = 0, self.constant
        if longer is not None:
            grown = ceil(max(0, longer.constant - state) / (longer.tokens - self.tokens))
            state = max(0, longer.constant - grown * longer.tokens)
        widths = [  # values a token, and the window if any, of each growing tensor
            (tensor.numel() // (_ROWS * tokens), size if isinstance(size, int) else None)
            for entry, name, tensor in self.tensors
            if (tokens := self.cached(name, tensor))
            for size in (getattr(entry, "sliding_window", None),)
        ]
        sizes = [size for _, size in widths if size is not None]
        window = max(sizes) if sizes and len(sizes) == len(widths) and not grown else None
        if window is None:
            state += sum(width * size for width, size in widths if size is not None)
            widths = [(width, size) for width, size in widths if size is None]
        indexers = [tensor for _, name, tensor in self.tensors if name == "indexer_keys"]  # they choose positions
        return {
            "kv_width": grown + sum(width for width, _ in widths),
            "index_width": sum(tensor.numel() // (_ROWS * self.tokens) for tensor in indexers),
            "window": window,
            "state": state,
        }

    @property
    def may_grow(self) -> bool:
        """True if the cache may hold one entry for several tokens."""
        return any(
            not isinstance(entry, Tensor)
            and type(entry).__module__ not in (Cache.__module__, "builtins")
            and not self.cached(name, tensor)
            for entry, name, tensor in self.tensors
        )

    @property
    def keys(self) -> tuple[int, int]:
        """Number of heads and head width of the widest cached keys."""
        shapes = [tensor.shape for _, name, tensor in self.tensors if name == "keys" and tensor.dim() == 4]
        return max(((shape[1], shape[3]) for shape in shapes), key=lambda pair: pair[0] * pair[1], default=(0, 0))


class _Watch(TorchFunctionMode):
    """Function mode that records `layers`, with made-up values for meta tensors.

    A check that would only warn or take a shortcut gets True or 1; a loop over the experts that tokens were sent to
    finds none. Shapes, which are all that is measured, are the same either way.
    """

    def __init__(self, layers: Iterable[nn.Module] = (), tokens: int = 0) -> None:
        super().__init__()
        self.layers: list[_Seen] = []
        self._hooks: list[RemovableHandle] = []
        self._tokens = tokens
        self._now: _Seen | None = None
        self._owned: set[int] = set()
        for layer in layers:
            seen = _Seen(tokens)
            self.layers.append(seen)
            self._hooks += (
                layer.register_forward_pre_hook(lambda *_, seen=seen: self._enter(seen)),
                layer.register_forward_hook(lambda _, args, kwargs, __: self._leave(args, kwargs), with_kwargs=True),
            )

    def __enter__(self) -> Any:
        # transformers 5.3 asks whether autocast is on for the meta device, which torch does not answer
        self._asks, torch.is_autocast_enabled = torch.is_autocast_enabled, lambda *_: False
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        torch.is_autocast_enabled = self._asks
        for hook in self._hooks:
            hook.remove()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _LOOKS and isinstance(args[0], Tensor) and args[0].is_meta:
            return _LOOKS[func](*args, **kwargs)
        out = func(*args, **kwargs)
        if self.layers:
            self._computed(func, args, out, kwargs)
        return out

    def _enter(self, seen: _Seen) -> None:
        seen.entered = True
        self._now = seen

    def _leave(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Assign cache entries that appeared since this layer was entered to it."""
        seen, self._now = self._now, None
        caches = [argument for argument in (*args, *kwargs.values()) if isinstance(argument, Cache)]
        extra = [value for held in caches for name, value in vars(held).items() if name != "layers"]
        parts = [part for value in extra if isinstance(value, list) for part in value]
        parts += [part for value in extra if isinstance(value, dict) for part in value.values()]
        for entry in (*(layer for held in caches for layer in held.layers), *parts):
            if seen is not None and id(entry) not in self._owned and any(_tensors(entry)):
                self._owned.add(id(entry))
                seen.entries.append(entry)

    def divide(self, out: Mapping[str, Any]) -> None:
        """Divide a cache of the model's own class evenly among the layers."""
        if any(seen.entries for seen in self.layers):
            return
        values = [value for key, value in out.items() if key not in _RESULTS]
        total = sum(tensor.numel() for value in values for _, tensor in _tensors(value))
        for seen in self.layers if total else ():
            seen.entries = [torch.empty(_ROWS, ceil(total / _ROWS / len(self.layers)), device="meta")]

    def _computed(self, func: Callable[..., Any], args: tuple[Any, ...], out: Any, kwargs: dict[str, Any]) -> None:
        name, seen = getattr(func, "__name__", ""), self._now
        in_place = name.endswith("_") and not name.endswith("__")
        if in_place and args and isinstance(args[0], nn.Parameter):
            raise ModelError("it changes its weights as it runs, so that they cannot be streamed")
        if seen is None:
            return
        if func in (torch.topk, Tensor.topk):
            named = dict(zip(("input", "k", "dim"), args, strict=False)) | kwargs
            seen.chosen.append((named["input"].shape[named.get("dim", -1)], out[0].shape[-1]))
        elif func is scaled_dot_product_attention:
            named = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
            query, value = named["query"], named["value"]
            heads = query.numel() // (_ROWS * self._tokens * query.shape[-1])
            seen.heads = max(seen.heads, heads)
            seen.products += heads * (query.shape[-1] + value.shape[-1])
        elif func in _PRODUCTS and isinstance(out, Tensor):
            self._product(seen, [arg for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor)][-2:], out)

    def _product(self, seen: _Seen, operands: list[Tensor], out: Tensor) -> None:
        """Count a matrix product if it belongs to an attention."""
        square = (self._tokens, self._tokens)
        if out.shape[-2:] == square:
            heads = out.numel() // (_ROWS * self._tokens**2)
            seen.heads = max(seen.heads, heads)
            seen.products += heads * operands[0].shape[-1]
        elif any(operand.shape[-2:] == square for operand in operands):
            seen.products += out.numel() // (_ROWS * self._tokens)


def _tensors(value: Any, name: str = "", depth: int = 3) -> Iterator[tuple[str, Tensor]]:
    """Yield the floating-point tensors in an object, with their names there."""
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
