"""The sampler: probabilities, nucleus and seed decide, and never the batch that a row is in."""

import pytest
import torch

from zinfer.generation import sampling
from zinfer.generation.sampling import GREEDY, Sampling, chance, choose


def drawn(temperature: float = 1.0, top_p: float = 1.0, seed: str = "s") -> Sampling:
    return Sampling(temperature=temperature, top_p=top_p, seed=seed)


def test_a_rows_chances_are_even_and_its_own() -> None:
    drawn = [chance("seed", place) for place in range(2000)]
    assert all(0 <= one < 1 for one in drawn)
    assert abs(sum(drawn) / 2000 - 0.5) < 0.03
    assert len(set(drawn)) == 2000
    assert chance("seed", 1) != chance("other", 1)


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
        found = torch.bincount(ids, minlength=4) / 4000
        assert torch.allclose(found, torch.tensor(shares, dtype=torch.float), atol=0.025)
        assert bool(finite.all())


def test_a_chance_next_to_one_draws_what_can_be_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "chance", lambda _seed, _place: 1 - 2**-53)
    logits = torch.full((2, 1000), float("-inf"))
    logits[:, :7] = torch.rand(2, 7)
    ids, _ = choose(logits, [Sampling(temperature=1), Sampling(temperature=1, top_p=0.5)], [0, 0])
    assert ids.tolist()[0] == 6
    assert ids.tolist()[1] < 7


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
