"""The sampler: the next token of each row from its logits, greedy or drawn.

A drawn token is the winner of a race: each token has a waiting time, exponentially distributed, divided by its
probability, and the shortest wins (the exponential form of the Gumbel-max trick, Maddison et al. 2014,
arXiv:1411.0030). The waiting times are hashes of the row's seed, the place in the row's output, and the token. So a row
continues in the same way whatever batch it is in, and after a restart; and two models whose tokens are drawn with the
same waiting times draw the same token often (Daliri et al. 2024, arXiv:2408.07978), which drafts live on.
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from zinfer.core.request import Sampling
from zinfer.engine.transfer import to_device
from zinfer.generation.logit_edits import EditedRow, edit

CHUNK = 1 << 23  # logits that are sampled from at once: sorting takes several times their memory


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
