"""Rotary positions of longrope, whose angles depend on a length.

`transformers` turns all rows of a batch by the length of the longest one (`longrope_frequency_update` of
`transformers.modeling_rope_utils`). Here each row is turned by its own length: positions of a prompt by that of the
prompt, later ones by their own number. So a row has the same keys in any batch, in chunks of its prompt, and with
drafts. A row that grows beyond the switch is computed again by the other angles, as `generate` does with Phi.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from zinfer.engine import EngineError

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


def follow_lengths(model: PreTrainedModel) -> int | None:
    """Make longrope of `model` turn each row by its length. Returns the switch, the longest of the short sequences."""
    switches: list[int] = []
    for module in model.modules():
        kinds: Any = getattr(module, "rope_type", None)
        settings: Any = module.config.rope_parameters if kinds is not None else {}
        if not isinstance(kinds, Mapping):
            kinds, settings = {None: kinds}, {None: settings}
        at = {
            name: int(settings[name]["original_max_position_embeddings"])
            for name, kind in kinds.items()
            if kind == "longrope"
        }
        if at:
            module.forward = _by_lengths(module.forward, at)
            switches += at.values()
    return min(switches, default=None)


def _by_lengths(turn: Callable[..., Any], switches: Mapping[str | None, int]) -> Callable[..., Any]:
    """Return a rotary embedding in which lengths choose the angles."""

    @wraps(turn)
    def forward(x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        named = {} if layer_type is None else {"layer_type": layer_type}
        positions, lengths = torch.atleast_2d(position_ids), _LENGTHS.get()
        if layer_type not in switches:
            return turn(x, positions, **named)
        if lengths is None:
            lengths = (positions.amax(-1, keepdim=True) + 1).expand(positions.shape)
        if positions.shape[-1] != lengths.shape[-1] or len(positions) not in (1, len(lengths)):
            raise EngineError(
                f"longrope is asked for {tuple(positions.shape)} positions of {tuple(lengths.shape)} tokens: their "
                "angles are those of other lengths"
            )
        # All positions are turned both ways, and chosen: the CPU waits for no length on the device.
        switch, positions = switches[layer_type], positions.expand(lengths.shape)
        short = turn(x, positions.clamp(max=switch - 1), **named)
        last = positions.new_full((len(positions), 1), switch)
        long = turn(x, torch.cat([positions, last], -1), **named)
        choice = (lengths > switch)[..., None]
        return tuple(torch.where(choice, far[:, :-1], near) for far, near in zip(long, short, strict=True))

    return forward
