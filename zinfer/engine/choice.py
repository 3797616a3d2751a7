"""Choice of positions in sparse attention, for each row as if alone.

An indexer scores the positions of a row, and `topk` takes the best of them. Where scores are equal, such as the zeros
behind a ReLU, which ones it takes depends on the layout: on the padding in front, on the rest of a prompt that comes in
chunks, on tokens that are verified together. So the scores of each token are laid out as they would be for the row
alone, whatever micro-batch and pass it is in.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


class Alone(NamedTuple):
    """Rows of a pass that have the same positions.

    `rows` are their indices in it. `columns` are the real ones among the positions of the pass, up to its last token;
    `prompt` of them belong to the prompt, which alone is computed as a whole, `before` come before the tokens of the
    pass.
    """

    rows: list[int]
    columns: slice | Tensor
    before: int
    prompt: int

    def choose(self, scores: Tensor, count: int, values: Tensor, indices: Tensor) -> None:
        """Write the `count` best of `scores` ``[B, n, T]``, and their positions."""
        scores = scores[self.rows][..., self.columns]
        size, last = scores.shape[2], scores.shape[1]
        first = last - (size - self.before)  # token of the pass that is the row's next one; padding comes before it
        whole = first + min(max(0, self.prompt - self.before), last - first)
        parts = [(slice(first, whole), self.prompt)] if whole > first else []
        parts += [(slice(token, token + 1), self.before + token + 1 - first) for token in range(whole, last)]
        for tokens, width in parts:
            part = scores[:, tokens, :width]
            if width > size:  # later tokens of the prompt are hidden: as the last one is from the first
                hidden = part[:, :1, -1:] if part.shape[1] > 1 else part.new_full((1, 1, 1), -torch.inf)
                rest = hidden.expand(*part.shape[:2], width - size)
                part = torch.cat([part, rest], dim=-1)
            best, positions = part.topk(min(count, width), dim=-1)
            # Where fewer positions can be seen than are chosen, all of them are: the first one stands for the others.
            positions = torch.nn.functional.pad(positions.where(positions < size, 0), (0, count - positions.shape[2]))
            positions = positions + self.columns.start if isinstance(self.columns, slice) else self.columns[positions]
            values[self.rows, tokens, : best.shape[2]], indices[self.rows, tokens] = best, positions


class Chosen(Tensor):
    """Keys of an indexer, or their scores, with their own `topk`. Made by `choosing`."""

    alone: Sequence[Alone]
    positions: int

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        source = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls))
        with torch._C.DisableTorchFunctionSubclass():
            if func in (Tensor.topk, torch.topk) and source.dim() == 3 and source.shape[2] == source.positions:
                return _topk(source.as_subclass(Tensor), source.alone, *args[1:], **kwargs)
            result = func(*args, **kwargs)
        if not isinstance(result, Tensor) or not result.is_floating_point():
            return result
        return choosing(result, source.alone, source.positions)


def choosing(keys: Tensor, alone: Sequence[Alone], positions: int) -> Chosen:
    """Return keys or scores among which rows choose as `alone`."""
    chosen = keys.as_subclass(Chosen)
    chosen.alone, chosen.positions = alone, positions
    return chosen


def _topk(scores: Tensor, alone: Sequence[Alone], k: int, dim: int = -1, **_options: Any) -> Any:
    """Return what `torch.topk` gives for each row alone."""
    if dim not in (2, -1):
        return scores.topk(k, dim)
    values = scores.new_full((*scores.shape[:2], k), -torch.inf)
    indices = torch.zeros(values.shape, dtype=torch.int64, device=scores.device)
    for rows in alone:
        rows.choose(scores, k, values, indices)
    return torch.return_types.topk((values, indices))
