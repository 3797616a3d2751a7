"""Probe of models that number the positions of their tokens themselves, since their forward pass takes no position ids.

Some count the tokens that the attention mask shows (BLOOM), others places in the batch. Then padding in front of a row
may change its text (BART adds the place to each token), or rows must stay where they are, since their keys carry the
place (RoFormer); and forgotten positions in between count, which makes tokens more distant than they are (MPT). What
enters the first layer tells all this, and needs the embeddings alone.

Layers that are told positions may count places in the cache all the same, by asking it for its length. Those of Llama 4
scale queries by them: here they do so by the positions.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from zinfer.engine.cache import RowCache

TOKENS, PADS = 3, 5  # of the probe: tokens of a prompt, and padding before them
ALIKE = 1e-2  # difference of states, as a share of their norm, that rounding may cause


class Probe(NamedTuple):
    """Abilities of a model: to take several tokens behind others, padding before a row, forgotten positions within it,
    and rows whose keys and values have moved to other places."""

    chunks: bool = True
    padding: bool = True
    gaps: bool = True
    moves: bool = True


class _Entered(Exception):
    """Raised where the first layer is entered."""


def probe(
    model: PreTrainedModel,
    first: nn.Module,
    device: torch.device,
    cache_name: str,
    make: Callable[[], RowCache],
    vocab_size: int,
) -> Probe:
    """Probe `model` on `device`, whose layer `first` comes first; `make` returns a cache of one row.

    Runs the model up to its first layer only. Raises torch.OutOfMemoryError.
    """

    def entering(pads: int, known: int, count: int, gap: bool = False) -> Mapping[str, Tensor]:
        """Return what enters for `count` tokens behind `known` ones: numbers, by the name of the layer's argument; the
        states ``[count, H]`` as ``hidden_states``. Nothing if the model fails."""
        cache = make()
        if known:  # what the keys are does not matter
            keys = torch.zeros((1, 1, pads + known, 1), device=device)
            for layer in cache.attention.values():
                layer.fill([(keys, keys)], pads + known, model.dtype)
        begin = vocab_size // 2 + known
        token_ids = [*([0] * pads if not known else []), *range(begin, begin + count)]
        mask = [*[0] * pads, *[1] * (known + count)]
        if gap:
            mask[1] = 0
        inputs: dict[str, Any] = {
            "input_ids": torch.tensor([token_ids], device=device),
            "attention_mask": torch.tensor([mask], device=device),
            cache_name: cache,
            "use_cache": True,
        }
        seen = dict[str, Tensor]()

        def stop(_module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            given = dict(zip(inspect.signature(first.forward).parameters, args, strict=False)) | named
            name, states = next(iter(given.items()))
            if isinstance(states, Tensor):
                seen.update({"hidden_states": states[0, -count:].float()})
            seen.update(_numbers({key: one for key, one in given.items() if key != name}))
            raise _Entered

        handle = first.register_forward_pre_hook(stop, with_kwargs=True, prepend=True)
        try:
            model(**inputs)
        except _Entered:
            pass
        except torch.OutOfMemoryError:
            raise
        except (AssertionError, ValueError, IndexError, RuntimeError):
            seen.clear()
        finally:
            handle.remove()
        return seen

    with torch.inference_mode():
        prompt, padded = entering(0, 0, TOKENS), entering(PADS, 0, TOKENS)
        step, later = entering(0, TOKENS, 1), entering(PADS, TOKENS, 1)
        apart = entering(0, TOKENS, 1, gap=True)
        return Probe(
            chunks=bool(entering(0, TOKENS, 2)),
            padding=_alike(prompt, padded, "hidden_states") and _alike(step, later, "hidden_states"),
            gaps=not all(_alike(step, apart, name) for name in step),
            moves=all(_alike(step, later, name) for name in step if name in later),
        )


class _Scaled:
    """Attention whose queries are scaled by the positions that its `layer` is told."""

    def __init__(self, layer: nn.Module, attention: Any) -> None:
        self._attention, self._positions = attention, torch.empty(0)
        attention.attn_temperature_tuning = False
        attention.q_proj.register_forward_hook(self._scale)
        forward = layer.forward

        @wraps(forward)
        def told(*args: Any, **named: Any) -> Any:  # behind the hooks, in which another pass may take its turn
            self._positions = named["position_ids"]
            return forward(*args, **named)

        layer.forward = told

    def _scale(self, _module: nn.Module, _args: tuple[Any, ...], queries: Tensor) -> Tensor:
        steps = torch.floor((self._positions.float() + 1.0) / self._attention.floor_scale)
        scale: Tensor = torch.log1p(steps) * self._attention.attn_scale + 1.0
        return (queries * scale[..., None]).to(queries.dtype)


def scale_by_positions(layers: Iterable[nn.Module]) -> None:
    """Have attention that scales queries by their places in the cache, padding counted, scale them by positions."""
    for layer in layers:
        for module in layer.modules():
            plain = not getattr(module, "use_rope", True) and not hasattr(module, "qk_norm")
            if plain and getattr(module, "attn_temperature_tuning", False):
                _Scaled(layer, module)


def asks_length(layers: Iterable[nn.Module]) -> bool:
    """Tell whether modules of layers ask the cache for its length: by the names in their code."""
    modules = {type(module): module for layer in layers for module in layer.modules()}
    asking = [
        module for kind, module in modules.items()
        if "get_seq_length" in getattr(getattr(inspect.unwrap(kind.forward), "__code__", None), "co_names", ())
    ]  # fmt: skip
    return any(not hasattr(module, "attn_temperature_tuning") for module in asking)


def _numbers(given: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the floating-point tensors among arguments and within tuples of them, but for masks."""
    found = dict[str, Tensor]()
    for name, value in given.items():
        if "mask" in name:
            continue
        values = value if isinstance(value, tuple | list) else (value,)
        found |= {f"{name} {place}": one.float() for place, one in enumerate(values)
                  if isinstance(one, Tensor) and one.is_floating_point()}  # fmt: skip
    return found


def _alike(one: Mapping[str, Tensor], other: Mapping[str, Tensor], name: str) -> bool:
    """Tell whether two calls got the same numbers; those of other shape, such as of all keys, are not compared."""
    if name not in one or name not in other:
        return False
    here, there = one[name], other[name]
    return here.shape != there.shape or bool((here - there).norm() <= ALIKE * here.norm())
