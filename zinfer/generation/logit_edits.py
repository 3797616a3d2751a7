"""Changes of a row's logits before a token is chosen: minimum length, bias, penalties and grammar.

In the order of vLLM: ends are masked up to `min_tokens`, `logit_bias` is added, then come the repetition penalty
(Keskar et al. 2019, arXiv:1909.05858) over tokens of prompt and output, and OpenAI's frequency and presence penalties
over those of the output; the mask of a grammar is last. A row's tokens stay on the device, but for its last ones, which
each pass brings for all rows.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from zinfer.core.request import Sampling
from zinfer.engine.transfer import to_device

if TYPE_CHECKING:
    from zinfer.generation.grammar import Grammar

TAIL = 64  # output tokens of a row that each pass brings anew


class LogitEdits:
    """One row's changes of its logits. `output_ids` grows with the row; `ends` are the tokens that end a text."""

    def __init__(
        self, sampling: Sampling, prompt_ids: Sequence[int], output_ids: list[int], ends: Iterable[int] = ()
    ) -> None:
        self.sampling, self.output_ids = sampling, output_ids
        self.ends = sorted({*ends, *sampling.stop_token_ids}) if sampling.min_tokens else []
        self._prompt_ids = prompt_ids if sampling.repetition_penalty != 1 else ()
        self._bias: tuple[Tensor, Tensor] | None = None
        self._settled: Tensor | None = None  # prompt, and the first output tokens
        self.count = 0  # of the latter
        self.grammar: Grammar | None = None

    def bias(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return biased tokens, int64 ``[n]``, and their biases, float32 ``[n]``."""
        if self._bias is None:
            tokens, values = zip(*self.sampling.logit_bias, strict=True)
            self._bias = to_device(torch.tensor(tokens), device), to_device(torch.tensor(values), device)
        return self._bias

    def settled(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the row's tokens on the device, int64 ``[n]``: all, and its output's."""
        if self._settled is None:
            self._settled = to_device(torch.tensor([*self._prompt_ids], dtype=torch.int64), device)
        if len(self.output_ids) - self.count >= TAIL:
            new = to_device(torch.tensor(self.output_ids[self.count :]), device)
            self._settled, self.count = torch.cat([self._settled, new]), len(self.output_ids)
        return self._settled, self._settled[len(self._prompt_ids) :]


class EditedRow(NamedTuple):
    """Changes of a row's logits; `ahead` are drafts that precede the token to choose. `mask` has a bit for each token
    that the row's grammar permits, int32 ``[ceil(V / 32)]``."""

    edits: LogitEdits
    ahead: Sequence[int] = ()
    mask: Tensor | None = None


def edit(logits: Tensor, rows: Sequence[EditedRow]) -> Tensor:
    """Return changed logits of `rows`, float32 ``[n, V]``; `logits` may be overwritten."""
    edited, device, size = logits.float(), logits.device, logits.shape[-1]
    flat, samplings = edited.view(-1), [row.edits.sampling for row in rows]

    def column(name: str) -> Tensor:
        return to_device(torch.tensor([float(getattr(sampling, name)) for sampling in samplings]), device)

    def tokens(part: int, wanted: Sequence[bool]) -> Tensor:
        """Return places in `flat` of wanted rows' tokens: all (0), or their output's (1)."""
        chosen = [number for number, want in enumerate(wanted) if want]
        on_device = [(number, rows[number].edits.settled(device)[part]) for number in chosen]
        last = [
            number * size + token
            for number in chosen
            for token in (*rows[number].edits.output_ids[rows[number].edits.count :], *rows[number].ahead)
        ]
        return torch.cat([_places(on_device, size), to_device(torch.tensor(last, dtype=torch.int64), device)])

    ends = [
        number * size + token
        for number, (edits, ahead, _) in enumerate(rows)
        if len(edits.output_ids) + len(ahead) < edits.sampling.min_tokens
        for token in edits.ends
    ]
    if ends:
        flat[to_device(torch.tensor(ends), device)] = -torch.inf
    if biased := [(number, row.edits.bias(device)) for number, row in enumerate(rows) if samplings[number].logit_bias]:
        added = torch.cat([values for _, (_, values) in biased])
        flat.index_add_(0, _places([(number, ids) for number, (ids, _) in biased], size), added)
    if any(repeated := [sampling.repetition_penalty != 1 for sampling in samplings]):
        places = tokens(0, repeated)
        values, penalty = flat[places], column("repetition_penalty")[places // size]
        flat[places] = torch.where(values < 0, values * penalty, values / penalty)  # of a token twice, the same
    if any(counted := [bool(each.presence_penalty or each.frequency_penalty) for each in samplings]):
        places, counts = tokens(1, counted), torch.zeros_like(flat)
        counts.index_add_(0, places, torch.ones_like(places, dtype=torch.float32))
        counts = counts.view_as(edited)
        edited.sub_(column("frequency_penalty")[:, None] * counts)
        edited.sub_(column("presence_penalty")[:, None] * (counts > 0))
    if masks := {number: row.mask for number, row in enumerate(rows) if row.mask is not None}:
        bits = torch.stack([*masks.values()])[:, :, None] >> torch.arange(32, dtype=torch.int32, device=device)
        forbidden = (bits & 1 == 0).flatten(1)[:, :size]
        numbers = to_device(torch.tensor([*masks]), device)
        edited[numbers] = edited[numbers].masked_fill_(forbidden, -torch.inf)
    return edited


def _places(parts: Sequence[tuple[int, Tensor]], size: int) -> Tensor:
    """Return places of rows' tokens in flattened ``[n, size]`` logits, int64."""
    device, lengths = parts[0][1].device, [len(ids) for _, ids in parts]
    starts, counts = to_device(torch.tensor([[number * size for number, _ in parts], lengths]), device)
    return torch.cat([ids for _, ids in parts]).add(starts.repeat_interleave(counts, output_size=sum(lengths)))
