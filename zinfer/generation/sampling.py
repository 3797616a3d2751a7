"""The sampler: the next token of each row from its logits, greedy or drawn.

The chance that decides a drawn token is a hash of the row's seed and the token's place in the row's output. So a row
continues in the same way whatever batch it is in, and after a restart.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

from zinfer.spec.errors import ZinferError
from zinfer.spec.value import Frozen

if TYPE_CHECKING:  # the parent process, which has no torch, imports `Sampling`
    from torch import Tensor

CHUNK = 1 << 23  # logits that are sampled from at once: sorting takes several times their memory


class NotFiniteError(ZinferError):
    """Logits that are not numbers."""

    def __init__(self) -> None:
        super().__init__("the model's output is not a number")


class Sampling(Frozen):
    """The choice of a row's next token: temperature 0 is greedy, `top_p` below 1 is nucleus sampling."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: str = "0"


GREEDY = Sampling()


def chance(seed: str, place: int) -> float:
    """Return a number from 0 to 1 (exclusive), always the same for a seed and a place."""
    return int.from_bytes(blake2b(f"{seed}/{place}".encode(), digest_size=8).digest()) / 2**64


class Score(NamedTuple):
    """Log-probability of a token, in nats, and those of the most likely ones in its place, by id, the best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def scores(logits: "Tensor", tokens: Sequence[int], count: int) -> list[Score]:
    """Return the scores of `tokens`, one for each row of ``[n, V]`` logits, with the `count` most likely ones beside
    it; temperature and nucleus play no part in them."""
    import torch

    found: list[Score] = []
    size = max(1, CHUNK // logits.shape[-1])
    for start in range(0, len(tokens), size):
        part = torch.log_softmax(logits[start : start + size].float(), dim=-1)
        ids = torch.tensor(tokens[start : start + size], device=logits.device)
        own = part.gather(-1, ids[:, None])[:, 0].tolist()
        best = part.topk(min(count, part.shape[-1]), dim=-1)
        rows = zip(ids.tolist(), own, best.indices.tolist(), best.values.tolist(), strict=True)
        found += [Score(token, value, tuple(zip(top, tops, strict=True))) for token, value, top, tops in rows]
    return found


def greedy(logits: "Tensor") -> "tuple[Tensor, Tensor]":
    """Return the most likely token of each row, ``[B, V]`` logits to ``[B]`` ids, and whether its logits are numbers,
    ``[B]``; the first of equal logits counts."""
    best, ids = logits.max(-1)
    return ids, best.isfinite()


def choose(logits: "Tensor", samplings: Sequence[Sampling], places: Sequence[int]) -> "tuple[Tensor, Tensor]":
    """Return the next token of each row, ``[B, V]`` logits to ``[B]`` ids, and whether its logits are numbers, ``[B]``.

    `places` are the tokens that each row's output has so far. A drawn token is the one at which the cumulated
    probabilities, those outside of the nucleus left out (Holtzman et al. 2020, arXiv:1904.09751), pass the row's
    chance.
    """
    ids, finite = greedy(logits)
    drawn = [row for row, sampling in enumerate(samplings) if sampling.temperature > 0]
    size = max(1, CHUNK // logits.shape[-1])
    for nucleus in (False, True):  # apart, so that a row is not sampled otherwise for its neighbours' sake
        alike = [row for row in drawn if (samplings[row].top_p < 1) == nucleus]
        for start in range(0, len(alike), size):
            part = alike[start : start + size]
            ids[part] = _draw(logits[part], [samplings[row] for row in part], [places[row] for row in part], nucleus)
    return ids, finite


def _draw(logits: "Tensor", samplings: Sequence[Sampling], places: Sequence[int], nucleus: bool) -> "Tensor":
    """Draw a token for each row of ``[n, V]`` logits, with a nucleus for all of them or for none: ``[n]`` ids."""
    import torch

    def column(values: list[float]) -> "Tensor":
        return torch.tensor(values, device=logits.device)[:, None]

    best = logits.max(-1, keepdim=True).values.float()
    temperature = column([max(sampling.temperature, 1e-6) for sampling in samplings])
    kept, order = torch.softmax((logits.float() - best) / temperature, dim=-1), None
    if nucleus:
        kept, order = kept.sort(dim=-1, descending=True)
        outside = kept.cumsum(-1) - kept >= column([sampling.top_p for sampling in samplings])
        outside[:, 0] = False
        kept.masked_fill_(outside, 0)
    total = kept.cumsum(-1)
    whole = total[:, -1:]
    below = torch.nextafter(whole, torch.zeros_like(whole))  # a chance may round to 1
    chances = [chance(sampling.seed, place) for sampling, place in zip(samplings, places, strict=True)]
    target = torch.minimum(whole * column(chances), below)
    position = (total <= target).sum(-1, keepdim=True).clamp(max=logits.shape[-1] - 1)
    return (position if order is None else order.gather(-1, position))[:, 0]
