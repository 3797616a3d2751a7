"""Choice of positions in sparse attention: that of each row alone, in any micro-batch and pass, also among equals."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.running import prefill
from tests.test_parity import load, prompts
from tools.conformance.reference import reference
from tools.conformance.rows import side_by_side
from tools.conformance.small import Subject, save, small_model
from zinfer.engine.cache import CacheFullError, RowCache
from zinfer.engine.choice import choosing
from zinfer.engine.decoder import DecoderBatch

COUNT = 4  # positions chosen
LENGTHS = (13, 5, 9)  # of prompts
HIDDEN = {"bool": -torch.inf, "float": torch.finfo(torch.float32).min}


def tied(rows: int, size: int, dice: random.Random) -> Tensor:
    """Scores ``[rows, size, size]`` with few different values: those of queries and positions of whole rows."""
    generator = torch.Generator().manual_seed(dice.randrange(1 << 30))
    return torch.randint(0, 3, (rows, size, size), generator=generator).float()


def alone(scores: Tensor, hidden: float, prompt: int) -> list[set[int]]:
    """Positions that each query of a row chooses and sees. The row of scores ``[size, size]`` is computed alone: first
    a prompt at once, then tokens one by one.
    """
    size = len(scores)
    seen = torch.ones(size, size).tril().bool()
    masked = scores.masked_fill(~seen, hidden)
    positions = []
    for query in range(size):
        width = prompt if query < prompt else query + 1
        row = masked[:prompt, :width] if query < prompt else masked[query : query + 1, :width]
        chosen = row.topk(min(COUNT, width), dim=-1).indices[query if query < prompt else 0]
        positions.append({int(position) for position in chosen if position <= query})
    return positions


def in_pass(batch: DecoderBatch, count: int, whole: list[Tensor], real: Tensor, hidden: float) -> list[list[set[int]]]:
    """Positions that each row's new tokens choose in a pass. Of its own real ones, in their order."""
    end = batch.length + count
    places = [real[row, :end].nonzero()[:, 0] for row in range(len(whole))]
    scores = torch.rand(len(whole), count, end)  # those of padding must not matter
    for row, real_positions in enumerate(places):
        before = int((real_positions < batch.length).sum())
        seen = torch.ones(end, end).tril().bool()[batch.length :] & real[row, :end]
        scores[row].masked_fill_(~seen, hidden)
        fresh = real_positions[before:] - batch.length
        values = whole[row][before : len(real_positions), : len(real_positions)]
        scores[row][fresh[:, None], real_positions] = values.masked_fill(~seen[fresh][:, real_positions], hidden)
    rows = batch.alone(slice(0, len(whole)), count)
    best = (scores if rows is None else choosing(scores, rows, end)).topk(min(COUNT, end), dim=-1)
    assert torch.equal(best.indices.sort(-1).values[..., -1] < end, torch.ones(len(whole), count).bool())
    positions = []
    for row, real_positions in enumerate(places):
        order = {int(position): number for number, position in enumerate(real_positions)}
        before = int((real_positions < batch.length).sum())
        fresh = real_positions[before:] - batch.length
        positions.append(
            [
                {
                    order[int(position)]
                    for position in best.indices[row, token]
                    if int(position) in order and order[int(position)] <= before + number
                }
                for number, token in enumerate(fresh.tolist())
            ]
        )
    return positions


@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("seed", range(8))
def test_every_row_chooses_as_alone(seed: int, hidden: str) -> None:
    """Padded rows, chunked prompts, single tokens and drafts, in any order. Each row forgets some of its drafts."""
    dice = random.Random(seed)
    lengths = [dice.randint(1, 20) for _ in range(5)]
    width, steps = max(lengths), 24
    whole = [tied(1, length + steps, dice)[0] for length in lengths]
    expected = [alone(scores, HIDDEN[hidden], length) for scores, length in zip(whole, lengths, strict=True)]
    mask = torch.tensor([[0] * (width - length) + [1] * length for length in lengths])
    batch = DecoderBatch(mask, width + 2 * steps, RowCache(layers=[]), None)
    chunked, chosen = seed % 2 == 1, 0
    while all(int(batch.real(torch.tensor([row])).sum()) < length + steps - 4 for row, length in enumerate(lengths)):
        rest = width - batch.length
        count = dice.randint(1, 4) if rest <= 0 else min(rest, dice.randint(2, 7)) if chunked else rest
        if batch.length + count > batch.capacity:
            break
        real = torch.ones(len(lengths), batch.length + count).bool()
        if batch.mask is not None:
            real = batch.mask[:, : batch.length + count].bool()
        before = [int(real[row, : batch.length].sum()) for row in range(len(lengths))]
        actual = in_pass(batch, count, whole, real, HIDDEN[hidden])
        for row, positions in enumerate(actual):
            assert positions == expected[row][before[row] : before[row] + len(positions)], (row, batch.length, count)
            chosen += len(positions)
        batch.advance(count)
        if rest <= 0 and count > 1:
            batch.rollback(batch.length - torch.tensor([dice.randint(0, count - 1) for _ in lengths]))
    assert chosen > 60


def test_scores_as_they_would_be_alone_are_left_as_they_are() -> None:
    batch = DecoderBatch(torch.ones(2, 5).long(), 12, RowCache(layers=[]), None)
    assert batch.alone(slice(0, 2), 5) is None
    assert batch.alone(slice(0, 2), 3) is not None  # a chunk
    batch.advance(5)
    assert batch.alone(slice(0, 2), 1) is None
    assert batch.alone(slice(0, 2), 7) is not None  # drafts


def test_other_choices_than_of_positions_are_left_as_they_are() -> None:
    """Other top-k choices than an indexer's: among experts, of blocks, of other shapes."""
    batch = DecoderBatch(torch.tensor([[0, 1, 1], [1, 1, 1]]), 8, RowCache(layers=[]), None)
    rows: Any = batch.alone(slice(0, 2), 3)
    scores = choosing(torch.rand(2, 3, 3), rows, 3)
    for other in (scores[0], scores[..., :2], scores[..., None]):
        dim = 0 if other.dim() == 2 else -1
        plain = other.as_subclass(Tensor)
        best = other.topk(1, dim=dim)
        assert torch.equal(best.indices, plain.topk(1, dim=dim).indices)
    assert torch.equal(scores.topk(2, dim=1).indices, scores.as_subclass(Tensor).topk(2, dim=1).indices)
    assert type(scores > 0) is Tensor
    assert scores.shape == (2, 3, 3)


def test_the_keys_of_an_indexer_go_with_their_rows(tmp_path: Path) -> None:
    directory = tmp_path / "sparse"
    model = small_model(Subject("deepseek_v32"))
    save(model, directory)
    engine = load("stream", directory, "cpu", tmp_path)
    expected = reference(type(model), directory)
    assert float(side_by_side(engine, expected).max()) < expected.tolerance
    token_ids, mask = prompts(LENGTHS)
    prefill(engine, token_ids, mask, reserve=4)
    (batch,) = engine.batches
    spec = engine.plan.model
    index, room = 6 * 16 * 4, max(LENGTHS) + 4
    assert spec.index_bytes(1, 1) == index
    assert sum(layer._index.nbytes for layer in batch.cache.layers) == 3 * room * index
    engine.retire(batch, [1])
    assert sum(layer._index.nbytes for layer in batch.cache.layers) == 2 * room * index
    layer = batch.cache.layers[0]
    layer.rows, layer.length = slice(0, 2), room
    with pytest.raises(CacheFullError, match=f"holds {room} tokens"):
        layer.update_indexer(torch.zeros(2, 1, 16))
    engine.close()
