"""The sampler: the next token of each row from its logits, greedy or drawn.

A drawn token is the winner of a race: each token has a waiting time, exponentially distributed, divided by its
probability, and the shortest wins (the exponential form of the Gumbel-max trick, Maddison et al. 2014,
arXiv:1411.0030). The waiting times are hashes of the row's seed, the place in the row's output, and the token. So a row
continues in the same way whatever batch it is in, and after a restart; and two models whose tokens are drawn with the
same waiting times draw the same token often (Daliri et al. 2024, arXiv:2408.07978), which drafts live on.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Tensor

from zinfer.core.request import Sampling
from zinfer.engine.transfer import to_device

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


def choose(logits: Tensor, samplings: Sequence[Sampling], places: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Choose the next token of each row of ``[B, V]`` logits; return ids, and whether the logits are numbers. `places`
    are the tokens that each row's output has so far. Tokens outside of a nucleus take no part in the race (Holtzman et
    al. 2020, arXiv:1904.09751)."""
    ids, finite = greedy(logits)
    drawn = [row for row, sampling in enumerate(samplings) if sampling.temperature > 0]
    size = max(1, CHUNK // logits.shape[-1])
    for nucleus in (False, True):  # one by one: neighbours do not change how a row is sampled
        alike = [row for row in drawn if (samplings[row].top_p < 1) == nucleus]
        for start in range(0, len(alike), size):
            part = alike[start : start + size]
            rows = to_device(torch.tensor(part), logits.device)
            ids[rows] = _draw(logits[rows], [samplings[row] for row in part], [places[row] for row in part], nucleus)
    return ids, finite


def _draw(logits: Tensor, samplings: Sequence[Sampling], places: Sequence[int], nucleus: bool) -> Tensor:
    """Draw a token for each row of ``[n, V]`` logits: ``[n]`` ids. All rows have a nucleus, or none."""

    def column(values: list[float]) -> Tensor:
        return to_device(torch.tensor(values), logits.device)[:, None]

    best = logits.max(-1, keepdim=True).values.float()
    temperature = column([max(sampling.temperature, 1e-6) for sampling in samplings])
    kept, order = torch.softmax((logits.float() - best) / temperature, dim=-1), None
    times = waiting_times(samplings, places, logits.shape[-1], logits.device)
    if nucleus:
        kept, order = kept.sort(dim=-1, descending=True)
        outside = kept.cumsum(-1) - kept >= column([sampling.top_p for sampling in samplings])
        outside[:, 0] = False
        kept.masked_fill_(outside, 0)
        times = times.gather(-1, order)
    winner = (kept / times).argmax(-1, keepdim=True)
    return (winner if order is None else order.gather(-1, winner))[:, 0]
