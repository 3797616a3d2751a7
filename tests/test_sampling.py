"""The sampler: probabilities, nucleus and seed decide, and never the batch that a row is in."""

import pytest
import torch

from zinfer.core.request import GREEDY, Sampling
from zinfer.generation import sampling
from zinfer.generation.sampling import choose, waiting_times


def drawn(temperature: float = 1.0, top_p: float = 1.0, seed: str = "s") -> Sampling:
    return Sampling(temperature=temperature, top_p=top_p, seed=seed)


def test_waiting_times_are_exponential_and_a_rows_own() -> None:
    seeds = [drawn(seed=str(row % 2)) for row in range(400)]
    places = [row // 2 for row in range(400)]
    times = waiting_times(seeds, places, 1000, torch.device("cpu"))
    assert bool((times > 0).all())
    assert len(set(times.flatten().tolist())) > 390_000
    for threshold in (0.01, 0.5, 1.0, 3.0, 6.0):  # rows, tokens and all of them
        share, wanted = (times > threshold).float(), torch.tensor(-threshold).exp()
        assert (share.mean() - wanted).abs() < 5 * (wanted / 400_000).sqrt()
        for index in (0, 1):
            spread = share.mean(index).std() / (wanted * (1 - wanted) / times.shape[index]).sqrt()
            assert 0.85 < spread < 1.15
    correlations = torch.corrcoef(times.t()[:300]) - torch.eye(300)
    assert correlations.abs().max() < 6 / 400**0.5
    again = waiting_times(seeds[7:9], places[7:9], 1000, torch.device("cpu"))
    assert torch.equal(again, times[7:9])


def test_sampling_follows_temperature_and_nucleus() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().repeat(4000, 1)
    for temperature, top_p, shares in (
        (1.0, 1.0, (0.5, 0.3, 0.15, 0.05)),
        (1.0, 0.6, (0.625, 0.375, 0, 0)),
        (0.5, 1.0, (0.685, 0.247, 0.062, 0.007)),
        (1.0, 0.0, (1, 0, 0, 0)),
        (1e-40, 1.0, (1, 0, 0, 0)),
        (0.0, 1.0, (1, 0, 0, 0)),
    ):
        ids, finite = choose(logits, [Sampling(temperature=temperature, top_p=top_p)] * 4000, range(4000))
        actual = torch.bincount(ids, minlength=4) / 4000
        assert torch.allclose(actual, torch.tensor(shares, dtype=torch.float), atol=0.025)
        assert bool(finite.all())


def test_the_longest_waits_draw_what_can_be_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    for hashed in (0, 2**32 - 1):
        monkeypatch.setattr(sampling, "_mixed", lambda numbers, hashed=hashed: torch.full_like(numbers, hashed))
        logits = torch.full((2, 1000), float("-inf"))
        logits[:, 3:7] = torch.rand(2, 4)
        ids, _ = choose(logits, [Sampling(temperature=1), Sampling(temperature=1, top_p=0.5)], [0, 0])
        assert all(3 <= token < 7 for token in ids.tolist())


def test_tokens_drawn_of_two_models_are_often_the_same() -> None:
    """Tokens follow the first model, and often equal the second's. They are the same as often as the waiting times have
    it, which is nearly as often as rejection sampling accepts (Leviathan et al. 2023), one minus the total variation
    distance.
    """
    torch.manual_seed(1)
    count = 40_000
    for noise in (0.3, 1.0, 3.0):
        first = 2 * torch.randn(6)
        second = first + noise * torch.randn(6)
        samplings, places = [drawn(seed=str(row)) for row in range(count)], [0] * count
        ours, theirs = (choose(logits.repeat(count, 1), samplings, places)[0] for logits in (first, second))
        p, q = first.softmax(-1), second.softmax(-1)
        chi = float(((torch.bincount(ours, minlength=6) - p * count) ** 2 / (p * count)).sum())
        assert chi < 20.5, "5 degrees of freedom: larger in one of 1,000 cases"
        same = float((ours == theirs).float().mean())
        wanted = float((1 / torch.maximum(p[None] / p[:, None], q[None] / q[:, None]).sum(1)).sum())
        assert abs(same - wanted) < 4 * (wanted * (1 - wanted) / count) ** 0.5
        distance = float((p - q).abs().sum() / 2)
        assert (1 - distance) / (1 + distance) <= wanted <= 1 - distance


def test_rows_of_many_kinds_are_chosen_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "CHUNK", 100)
    logits = torch.rand(7, 50)
    kinds = [
        GREEDY, drawn(seed="a"), drawn(0.7, 0.3, "b"), GREEDY, drawn(2.0, 1.0, "c"), drawn(seed="d"), GREEDY,
    ]  # fmt: skip
    places = [0, 0, 5, 1, 3, 0, 2]
    ids, _ = choose(logits, kinds, places)
    alone = [int(choose(logits[row : row + 1], kinds[row : row + 1], places[row : row + 1])[0]) for row in range(7)]
    assert ids.tolist() == alone
    order = [4, 2, 6, 0, 5, 1, 3]
    other, _ = choose(logits[order], [kinds[row] for row in order], [places[row] for row in order])
    assert other.tolist() == [alone[row] for row in order]


def test_the_nucleus_is_the_fewest_tokens_that_reach_top_p() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().repeat(2000, 1)
    for top_p, kept in ((0.4, {0}), (0.6, {0, 1}), (0.85, {0, 1, 2}), (1.0, {0, 1, 2, 3})):
        ids, _ = choose(logits, [drawn(top_p=top_p)] * 2000, range(2000))
        assert set(ids.tolist()) == kept


def test_greedy_takes_the_first_of_equal_logits_and_tells_what_is_no_number() -> None:
    logits = torch.tensor([[0.0, 2, 2], [1, float("nan"), 0], [-1, -2, float("-inf")], [0, 1, float("inf")]])
    ids, finite = choose(logits, [GREEDY] * 4, [0] * 4)
    assert ids[[0, 2]].tolist() == [1, 0]
    assert finite.tolist() == [True, False, True, False]
