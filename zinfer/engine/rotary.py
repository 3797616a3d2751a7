"""Rotary positions whose angles depend on a length: dynamic NTK, longrope.

`transformers` turns all rows of a batch by the length of the longest one (`dynamic_rope_update` of
`transformers.modeling_rope_utils`). Here each position is turned as in the row alone: positions of a prompt by the
length of the prompt, each later one by its own number, since alone it is computed in a pass of its own. So a row has
the same keys in any batch, in chunks of its prompt, with drafts, and computed again.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from zinfer.engine import EngineError

DYNAMIC, LONGROPE = "dynamic", "longrope"
# Lengths by which the pass under way turns its positions, [B, n]. Each greenlet has a context of its own.
_LENGTHS: ContextVar[Tensor | None] = ContextVar("lengths", default=None)


@contextmanager
def turned_by(lengths: Tensor | None) -> Iterator[None]:
    """Turn the positions of a pass by `lengths` ``[B, n]``. Without them each row is turned by its largest position."""
    token = _LENGTHS.set(lengths)
    try:
        yield
    finally:
        _LENGTHS.reset(token)


def follow_lengths(model: PreTrainedModel) -> dict[str, int]:
    """Make rotary embeddings of `model` turn positions by lengths, where needed.

    Returns the kinds of these embeddings, `DYNAMIC` and `LONGROPE`, each with the tokens up to which a sequence is
    turned by the model's own angles, or by those for short sequences.
    """
    limits = dict[str, int]()
    modules: list[Any] = [module for module in model.modules() if hasattr(module, "rope_type")]
    for module in modules:
        kinds, settings = module.rope_type, module.config.rope_parameters
        if not isinstance(kinds, Mapping):
            kinds, settings = {"": kinds}, {"": settings}
        for name, kind in kinds.items():
            if kind not in (DYNAMIC, LONGROPE):
                continue
            if not hasattr(module, "by_lengths"):
                module.by_lengths = _ByLengths(module)
            limit = (
                module.original_max_seq_len if kind == DYNAMIC else settings[name]["original_max_position_embeddings"]
            )
            limits[kind] = min(int(limit), limits.get(kind, int(limit)))
    return limits


def recomputes(model: PreTrainedModel) -> bool:
    """Tell whether `generate` recomputes a sequence beyond the switch of longrope. The model's code names it."""
    code = getattr(type(model).prepare_inputs_for_generation, "__code__", None)
    return "original_max_position_embeddings" in getattr(code, "co_names", ())


class _ByLengths:
    """Rotary embedding in which each position is turned by its own length."""

    def __init__(self, module: nn.Module) -> None:
        self._module: Any = module
        self._turn: Callable[..., Any] = module.forward

        @wraps(module.forward)
        def forward(x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
            return self._forward(x, torch.atleast_2d(position_ids), layer_type)

        module.forward = forward

    def _forward(self, x: Tensor, positions: Tensor, layer_type: str | None) -> Any:
        kind, settings = self._module.rope_type, self._module.config.rope_parameters
        if layer_type is not None:
            kind, settings = kind[layer_type], settings[layer_type]
        named = {} if layer_type is None else {"layer_type": layer_type}
        lengths = _LENGTHS.get()
        if lengths is None:  # several positions of a token, of text and of images, are in dimensions before
            lengths = positions.flatten(end_dim=-2).view(-1, *positions.shape[-2:]).amax((0, 2))[:, None] + 1
            lengths = lengths.expand(positions.shape[-2:])
        if positions.shape[-1] != lengths.shape[-1] or positions.shape[-2] not in (1, len(lengths)):
            raise EngineError(
                f"{type(self._module).__name__} is asked for {tuple(positions.shape)} positions of "
                f"{tuple(lengths.shape)} tokens: their angles are those of other lengths"
            )
        positions = positions.expand(*positions.shape[:-2], *lengths.shape)
        if kind == LONGROPE:
            return self._longrope(x, positions, lengths, int(settings["original_max_position_embeddings"]), named)
        return self._dynamic(x, positions, lengths, named) if kind == DYNAMIC else self._turn(x, positions, **named)

    def _longrope(self, x: Tensor, positions: Tensor, lengths: Tensor, switch: int, named: dict[str, str]) -> Any:
        """Turn all positions both ways, and choose. So the CPU waits for no length on the device."""
        short = self._turn(x, positions.clamp(max=switch - 1), **named)
        long = self._by_length(x, positions, switch + 1, named)
        choice = (lengths > switch)[..., None]
        return _map(lambda far, near: torch.where(choice, far, near), long, short)

    def _dynamic(self, x: Tensor, positions: Tensor, lengths: Tensor, named: dict[str, str]) -> Any:
        """Turn the positions of each length together."""
        module = self._module
        start, prefix = int(module.original_max_seq_len), "".join(f"{name}_" for name in named.values())
        lengths = lengths.clamp(min=start)
        whole: Any = None
        for length in lengths.unique().tolist():
            # The module keeps the angles of the last length: it begins anew, as with a row alone.
            setattr(module, f"{prefix}inv_freq", getattr(module, f"{prefix}original_inv_freq"))
            setattr(module, f"{prefix}max_seq_len_cached", start)
            chosen = lengths == length
            turned = self._by_length(x, positions[..., chosen][..., None, :], length, named)
            if whole is None:
                whole = _map(lambda part: part.new_empty((*part.shape[:-3], *lengths.shape, part.shape[-1])), turned)
            _map(lambda target, part: _put(target, chosen, part), whole, turned)  # noqa: B023 - called at once
        return whole

    def _by_length(self, x: Tensor, positions: Tensor, length: int, named: dict[str, str]) -> Any:
        """Turn positions as in a sequence of `length` tokens."""
        last = positions.new_full((*positions.shape[:-1], 1), length - 1)
        return _map(lambda part: part[..., :-1, :], self._turn(x, torch.cat([positions, last], -1), **named))


def _put(target: Tensor, chosen: Tensor, values: Tensor) -> Tensor:
    target[..., chosen, :] = values.squeeze(-3)
    return target


def _map(function: Callable[..., Tensor], *results: Any) -> Any:
    """Apply a function to cosines and sines, or to one tensor. They are ``[.., B, n, D]``."""
    return tuple(map(function, *results)) if isinstance(results[0], tuple) else function(*results)
