"""The sampler: the next token of each row from its logits, greedy or drawn.

A drawn token is the winner of a race: each token has a waiting time, exponentially distributed, divided by its
probability, and the shortest wins (the exponential form of the Gumbel-max trick, Maddison et al. 2014,
arXiv:1411.0030). The waiting times are hashes of the row's seed, the place in the row's output, and the token. So a row
continues in the same way whatever batch it is in, and after a restart; and two models whose tokens are drawn with the
same waiting times draw the same token often (Daliri et al. 2024, arXiv:2408.07978), which drafts live on.

A row's logits are changed before, in the order of vLLM: ends are masked up to `min_tokens`, `logit_bias` is added, then
come the repetition penalty (Keskar et al. 2019, arXiv:1909.05858) over tokens of prompt and output, and OpenAI's
frequency and presence penalties over those of the output; the mask of a grammar is last. A row's tokens stay on the
device, but for its last ones, which each pass brings for all rows.
"""

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from zinfer.core.request import Sampling
from zinfer.engine.transfer import to_device
from zinfer.generation.grammar import Grammar

TAIL = 64  # output tokens of a row that each pass brings anew
CHUNK = 1 << 23  # logits that are sampled from at once: sorting takes several times their memory


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


def waiting_times(samplings: Sequence[Sampling], places: Sequence[int], size: int, device: torch.device) -> Tensor:
    """Return exponentially distributed numbers, float32 ``[n, size]``: the same for a row's seed, place and token."""
    words = []
    for sampling, index in zip(samplings, places, strict=True):
        digest = blake2b(f"{sampling.seed}/{index}".encode(), digest_size=8).digest()
        words.append([int.from_bytes(digest[:4]), int.from_bytes(digest[4:])])
    first, second = to_device(torch.tensor(words), device).t()[:, :, None]
    hashed = _mixed(_mixed(torch.arange(size, device=device) ^ first) + second & 0xFFFFFFFF)
    return -torch.log1p(-((hashed.float() + 0.5) / 2**32).clamp(max=1 - 2**-24))  # finite


def _mixed(numbers: Tensor) -> Tensor:
    """Hash numbers of 32 bits one-to-one, in place: products stay within 64 bits."""
    for _ in range(2):
        numbers.bitwise_xor_(numbers >> 16).mul_(0x45D9F3B).bitwise_and_(0xFFFFFFFF)
    return numbers.bitwise_xor_(numbers >> 16)


class Score(NamedTuple):
    """Log-probability of a token, in nats, and the likeliest tokens, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def scores(logits: Tensor, tokens: Sequence[int], count: int) -> list[Score]:
    """Score `tokens`, one for each row of ``[n, V]`` logits; with the `count` likeliest, by the model alone."""
    token_scores: list[Score] = []
    size = max(1, CHUNK // logits.shape[-1])
    for start in range(0, len(tokens), size):
        part = torch.log_softmax(logits[start : start + size].float(), dim=-1)
        ids = to_device(torch.tensor(tokens[start : start + size]), logits.device)
        chosen = part.gather(-1, ids[:, None])[:, 0].tolist()
        best = part.topk(min(count, part.shape[-1]), dim=-1)
        rows = zip(ids.tolist(), chosen, best.indices.tolist(), best.values.tolist(), strict=True)
        token_scores += [Score(token, value, tuple(zip(top, tops, strict=True))) for token, value, top, tops in rows]
    return token_scores


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the likeliest ids of ``[B, V]`` logits; whether these are numbers."""
    best, ids = logits.max(-1)
    return ids, best.isfinite()


def choose(
    logits: Tensor,
    samplings: Sequence[Sampling],
    places: Sequence[int],
    edited: Mapping[int, EditedRow] = MappingProxyType({}),
) -> tuple[Tensor, Tensor]:
    """Choose the next token of each row of ``[B, V]`` logits; return ids, and whether the logits are numbers. `places`
    are the tokens that each row's output has so far; rows of `edited` have their logits changed before."""
    ids, finite = greedy(logits)
    size = max(1, CHUNK // logits.shape[-1])
    kinds: dict[tuple[bool, bool, bool], list[int]] = {}  # one by one: neighbours do not change how a row is sampled
    for row, sampling in enumerate(samplings):
        drawn = sampling.temperature > 0
        if drawn or row in edited:
            kinds.setdefault((row in edited, drawn, sampling.top_p < 1), []).append(row)
    for (edits, drawn, nucleus), alike in kinds.items():
        for start in range(0, len(alike), size):
            part = alike[start : start + size]
            rows = to_device(torch.tensor(part), logits.device)
            values = edit(logits[rows], [edited[row] for row in part]) if edits else logits[rows]
            if drawn:
                ids[rows] = _draw(values, [samplings[row] for row in part], [places[row] for row in part], nucleus)
            else:
                ids[rows] = values.argmax(-1)
    return ids, finite


def distribution(logits: Tensor, samplings: Sequence[Sampling], nucleus: bool = True) -> tuple[Tensor, Tensor | None]:
    """Return probabilities to draw by, float32 ``[n, V]``; their order if sorted. As in vLLM, `top_p` is a share of
    what `min_p` and `top_k` leave (Holtzman et al. 2020, arXiv:1904.09751; Nguyen et al. 2024, arXiv:2407.01082), and
    of equal tokens at the edge of `top_k` all stay. Without `nucleus` no row has a `top_p`. Those of a nucleus do not
    add up to 1."""

    def column(values: list[float]) -> Tensor:
        return to_device(torch.tensor(values), logits.device)[:, None]

    best = logits.max(-1, keepdim=True).values.float()
    scaled = (logits.float() - best) / column([max(sampling.temperature, 1e-6) for sampling in samplings])
    lowest = column([sampling.min_p for sampling in samplings]).log()
    size = logits.shape[-1]
    if count := min(max(sampling.top_k for sampling in samplings), size):
        last = [(min(sampling.top_k, size) or count) - 1 for sampling in samplings]
        edge = scaled.topk(count, dim=-1).values.gather(-1, to_device(torch.tensor(last), logits.device)[:, None])
        every = to_device(torch.tensor([sampling.top_k == 0 for sampling in samplings]), logits.device)[:, None]
        lowest = torch.maximum(lowest, edge.masked_fill_(every, -torch.inf))
    scaled = scaled.masked_fill(scaled < lowest, -torch.inf)
    kept, order = torch.softmax(scaled, dim=-1), None
    if nucleus:
        kept, order = kept.sort(dim=-1, descending=True)
        outside = kept.cumsum(-1) - kept >= column([sampling.top_p for sampling in samplings])
        outside[:, 0] = False
        kept.masked_fill_(outside, 0)
    return kept, order


def _draw(logits: Tensor, samplings: Sequence[Sampling], places: Sequence[int], nucleus: bool) -> Tensor:
    """Draw a token for each row of ``[n, V]`` logits: ``[n]`` ids. `nucleus` is `distribution`'s, for all rows."""
    kept, order = distribution(logits, samplings, nucleus)
    times = waiting_times(samplings, places, logits.shape[-1], logits.device)
    if order is not None:
        times = times.gather(-1, order)
    winner = (kept / times).argmax(-1, keepdim=True)
    return (winner if order is None else order.gather(-1, winner))[:, 0]
