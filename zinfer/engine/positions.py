"""Probe of models that number positions themselves, without position ids.

Some count the tokens that the attention mask shows (BLOOM), others columns of the batch. Then padding in front of a row
may change its text (BART adds the column to each token), or rows must keep their columns, since their keys carry them
(RoFormer); and forgotten positions in between count, which makes tokens more distant than they are (MPT). The inputs of
the first layer tell all this, and need the embeddings alone.

Layers that get position ids may count columns of the cache all the same, by asking it for its length. Llama 4 scales
queries by them: here it does so by the positions.
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
    """Abilities of a model with chunks, padding, forgotten positions and moved rows."""

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
    """Probe `model` up to its layer `first`; `make` returns a cache. Raises torch.OutOfMemoryError."""

    def entering(pads: int, past: int, count: int, gap: bool = False) -> Mapping[str, Tensor]:
        """Return the numbers that enter the layer, by argument. Nothing comes if the model fails."""
        cache = make()
        if past:  # what the keys are does not matter
            keys = torch.zeros((1, 1, pads + past, 1), device=device)
            for layer in cache.attention.values():
                layer.fill([(keys, keys)], pads + past, model.dtype)
        begin = vocab_size // 2 + past
        token_ids = [*([0] * pads if not past else []), *range(begin, begin + count)]
        mask = [*[0] * pads, *[1] * (past + count)]
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
            seen.update(_numbers({key: value for key, value in given.items() if key != name}))
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
        step, padded_step = entering(0, TOKENS, 1), entering(PADS, TOKENS, 1)
        gap_step = entering(0, TOKENS, 1, gap=True)
        return Probe(
            chunks=bool(entering(0, TOKENS, 2)),
            padding=_alike(prompt, padded, "hidden_states") and _alike(step, padded_step, "hidden_states"),
            gaps=not all(_alike(step, gap_step, name) for name in step),
            moves=all(_alike(step, padded_step, name) for name in step if name in padded_step),
        )


class _Scaled:
    """Attention whose queries are scaled by the position ids of its `layer`."""

    def __init__(self, layer: nn.Module, attention: Any) -> None:
        self._attention, self._positions = attention, torch.empty(0)
        attention.attn_temperature_tuning = False
        attention.q_proj.register_forward_hook(self._scale)
        forward = layer.forward

        @wraps(forward)
        def noting_positions(*args: Any, **named: Any) -> Any:  # behind the hooks, where another pass may take turns
            self._positions = named["position_ids"]
            return forward(*args, **named)

        layer.forward = noting_positions

    def _scale(self, _module: nn.Module, _args: tuple[Any, ...], queries: Tensor) -> Tensor:
        steps = torch.floor((self._positions.float() + 1.0) / self._attention.floor_scale)
        scale: Tensor = torch.log1p(steps) * self._attention.attn_scale + 1.0
        return (queries * scale[..., None]).to(queries.dtype)


def scale_by_positions(layers: Iterable[nn.Module]) -> None:
    """Scale queries by positions, not by columns of the cache."""
    for layer in layers:
        for module in layer.modules():
            plain = not getattr(module, "use_rope", True) and not hasattr(module, "qk_norm")
            if plain and getattr(module, "attn_temperature_tuning", False):
                _Scaled(layer, module)


def asks_length(layers: Iterable[nn.Module]) -> bool:
    """Tell whether code of the layers asks the cache for its length."""

    def asks(module: nn.Module) -> bool:
        code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
        return "get_seq_length" in getattr(code, "co_names", ()) and not hasattr(module, "attn_temperature_tuning")

    return any(asks(module) for layer in layers for module in layer.modules())


def _numbers(arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the floating-point tensors among arguments, but for masks."""
    values = {
        f"{name} {index}": part
        for name, value in arguments.items()
        for index, part in enumerate(value if isinstance(value, tuple | list) else (value,))
        if "mask" not in name
    }
    return {
        name: part.float() for name, part in values.items() if isinstance(part, Tensor) and part.is_floating_point()
    }


def _alike(calls: Mapping[str, Tensor], others: Mapping[str, Tensor], name: str) -> bool:
    """Tell whether two calls got the same numbers. Tensors of other shapes, such as of all keys, are not compared."""
    if name not in calls or name not in others:
        return False
    first, second = calls[name], others[name]
    return first.shape != second.shape or bool((first - second).norm() <= ALIKE * first.norm())
