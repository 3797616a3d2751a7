"""Rotary positions whose angles depend on the length of a sequence: dynamic NTK and longrope.

`transformers` turns all rows of a batch by the length of the longest one (`dynamic_rope_update` of
`transformers.modeling_rope_utils`). Here each position is turned as in the row alone: those of a prompt by the length
of the prompt, each later one by its own place, since alone it is computed in a pass of its own. So a row has the same
keys beside any others, in chunks of its prompt, with drafts, and computed again.
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
# Lengths that the positions of the pass under way are turned by, [B, n]. Each greenlet has a context of its own.
_LENGTHS: ContextVar[Tensor | None] = ContextVar("lengths", default=None)


@contextmanager
def turned_by(lengths: Tensor | None) -> Iterator[None]:
    """Have rotary embeddings turn the positions of a pass by `lengths`, ``[B, n]``; without them, each row by its own
    largest position."""
    token = _LENGTHS.set(lengths)
    try:
        yield
    finally:
        _LENGTHS.reset(token)


def follow_lengths(model: PreTrainedModel) -> frozenset[str]:
    """Have each rotary embedding of `model` turn positions as `turned_by` says, if its angles depend on a length;
    return the kinds that it has of these: `DYNAMIC`, `LONGROPE`."""
    found: set[str] = set()
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        own = {DYNAMIC, LONGROPE} & set(kinds.values() if isinstance(kinds, Mapping) else [kinds])
        if own and not hasattr(module, "by_lengths"):
            module.by_lengths = _ByLengths(module)
        found |= own
    return frozenset(found)


def switch_of(model: PreTrainedModel) -> int | None:
    """Return the most tokens of a sequence that longrope turns by its angles for short ones; None without longrope."""
    settings = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    groups = [settings, *(group for group in settings.values() if isinstance(group, dict))]
    found = [int(group["original_max_position_embeddings"]) for group in groups if group.get("rope_type") == LONGROPE]
    return min(found, default=None)


def start_of(model: PreTrainedModel) -> int:
    """Return the most tokens of a sequence that dynamic NTK turns by the model's own angles."""
    return min(int(module.original_max_seq_len) for module in model.modules() if hasattr(module, "by_lengths"))


def recomputes(model: PreTrainedModel) -> bool:
    """Tell whether `generate` computes a sequence anew where it grows beyond the switch of longrope: by the names in
    the model's code. With other models the keys before stay as they are."""
    code = getattr(type(model).prepare_inputs_for_generation, "__code__", None)
    return "original_max_position_embeddings" in getattr(code, "co_names", ())


class _ByLengths:
    """Forward pass of a rotary embedding, `module`, in which each position is turned by a length of its own."""

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
        """Turn all positions both ways, and choose: the CPU then waits for no length on the device."""
        short = self._turn(x, positions.clamp(max=switch - 1), **named)
        long = self._by_length(x, positions, switch + 1, named)
        choice = (lengths > switch)[..., None]
        return _each(lambda one, other: torch.where(choice, one, other), long, short)

    def _dynamic(self, x: Tensor, positions: Tensor, lengths: Tensor, named: dict[str, str]) -> Any:
        """Turn the positions of each length together."""
        module = self._module
        start, prefix = int(module.original_max_seq_len), "".join(f"{name}_" for name in named.values())
        lengths = lengths.clamp(min=start)
        found: Any = None
        for length in lengths.unique().tolist():
            # The module keeps the angles of the last length: it begins anew, as with a row alone.
            setattr(module, f"{prefix}inv_freq", getattr(module, f"{prefix}original_inv_freq"))
            setattr(module, f"{prefix}max_seq_len_cached", start)
            here = lengths == length
            turned = self._by_length(x, positions[..., here][..., None, :], length, named)
            if found is None:
                found = _each(lambda one: one.new_empty((*one.shape[:-3], *lengths.shape, one.shape[-1])), turned)
            _each(lambda all_of, own: _put(all_of, here, own), found, turned)  # noqa: B023 - called at once
        return found

    def _by_length(self, x: Tensor, positions: Tensor, length: int, named: dict[str, str]) -> Any:
        """Turn positions, none of which is beyond `length`, as the module does in a sequence of that length."""
        last = positions.new_full((*positions.shape[:-1], 1), length - 1)
        return _each(lambda one: one[..., :-1, :], self._turn(x, torch.cat([positions, last], -1), **named))


def _put(target: Tensor, here: Tensor, values: Tensor) -> Tensor:
    target[..., here, :] = values.squeeze(-3)
    return target


def _each(function: Callable[..., Tensor], *found: Any) -> Any:
    """Apply a function to what an embedding returns: cosines and sines, or one tensor, ``[.., B, n, D]``."""
    return tuple(map(function, *found)) if isinstance(found[0], tuple) else function(*found)
