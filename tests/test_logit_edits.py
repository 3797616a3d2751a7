"""Penalties, bias, minimum length and limits of sampling: equal to transformers' processors, and a row's own."""

import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation import logits_process as hf

from tests import Checkpoints, Patch, passes
from tests.command import zinfer
from tests.test_continuous import Words, begin, run, sequences, small
from tests.test_drafts import drafting
from tests.test_parity import load
from zinfer.core.request import Sampling
from zinfer.engine.base import Engine
from zinfer.generation import sampling, scheduler
from zinfer.generation.sampling import EditedRow, LogitEdits, choose, distribution, edit
from zinfer.generation.sequence import Sequence as Row

SIZE, ENDS = 150, (3, 7)
EDITED: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.3},
    "encouraged": {"repetition_penalty": 0.8},
    "presence": {"presence_penalty": 0.7},
    "frequency": {"frequency_penalty": -0.3},
    "bias": {"logit_bias": ((5, 4.0), (40, -100.0), (7, 2.5))},
    "minimum": {"min_tokens": 9, "stop_token_ids": (11,)},
    "all": {
        "repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.2,
        "logit_bias": ((5, 4.0), (7, -3.0)), "min_tokens": 40, "stop_token_ids": (11, 2),
    },
}  # fmt: skip


def histories(count: int, seed: int = 1) -> list[tuple[list[int], list[int]]]:
    """Return prompts and outputs of random tokens, many of them twice."""
    dice = random.Random(seed)

    def tokens(least: int, most: int) -> list[int]:
        return [dice.randrange(SIZE // 2) for _ in range(dice.randint(least, most))]

    return [(tokens(1, 60), tokens(0, 20) if row % 2 else tokens(0, 200)) for row in range(count)]


def expected(logits: Tensor, asked: Sampling, prompt: list[int], output: list[int]) -> Tensor:
    """Return logits as transformers' processors and OpenAI's formula change them."""
    ids, row = torch.tensor([[*prompt, *output]]), logits[None].clone()
    if asked.min_tokens:
        ends = sorted({*ENDS, *asked.stop_token_ids})
        row = hf.MinNewTokensLengthLogitsProcessor(len(prompt), asked.min_tokens, ends, "cpu")(ids, row)
    if asked.logit_bias:
        row = hf.SequenceBiasLogitsProcessor({(token,): value for token, value in asked.logit_bias})(ids, row)
    if asked.repetition_penalty != 1:
        row = hf.RepetitionPenaltyLogitsProcessor(asked.repetition_penalty)(ids, row)
    for token, count in Counter(output).items():
        row[0, token] -= torch.tensor(asked.frequency_penalty) * count
        row[0, token] -= asked.presence_penalty
    return row[0]


@pytest.mark.parametrize("name", [*EDITED, "mixed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_edited_logits_are_those_of_transformers(name: str, dtype: torch.dtype) -> None:
    kinds, rows = [*EDITED.values()] if name == "mixed" else [EDITED[name]], histories(28)
    asked = [Sampling(**kinds[number % len(kinds)]) for number in range(28)]
    logits = (4 * torch.randn(28, SIZE, generator=torch.Generator().manual_seed(2))).to(dtype)
    wanted = torch.stack([expected(logits[number].float(), asked[number], *row) for number, row in enumerate(rows)])
    edits = [EditedRow(LogitEdits(each, *row, ENDS)) for each, row in zip(asked, rows, strict=True)]
    assert torch.equal(edit(logits.clone(), edits), wanted)
    assert torch.equal(edit(logits.clone(), edits), wanted), "what is on the device already counts once"
    assert not torch.equal(wanted, logits.float())


@pytest.mark.gpu
def test_a_gpu_edits_and_draws_as_the_cpu_does() -> None:
    rows, kinds = histories(70), [Sampling(**fields) for fields in ({}, *EDITED.values())]
    asked = [kinds[row % 8].model_copy(update={"top_k": row % 5, "seed": str(row)}) for row in range(70)]
    asked = [each.model_copy(update={"temperature": row % 3 / 2}) for row, each in enumerate(asked)]
    logits = 4 * torch.randn(70, SIZE, generator=torch.Generator().manual_seed(3))
    chosen = []
    for device in ("cpu", "cuda"):
        edited = {n: EditedRow(LogitEdits(it, *rows[n], ENDS)) for n, it in enumerate(asked) if it.edits}
        places = [len(output) for _, output in rows]
        chosen += [choose(logits.to(device), asked, places, edited)[0].tolist() for _ in range(2)]
    assert chosen[0] == chosen[1] == chosen[2] == chosen[3]


@pytest.mark.gpu
def test_a_gpu_masks_as_the_cpu_does() -> None:
    logits, bits = torch.randn(5, 1000), torch.randint(-(1 << 31), 1 << 31, (5, 32)).int()

    def masked(device: str) -> Tensor:
        asked = LogitEdits(Sampling(), [1], [])
        return edit(logits.to(device), [EditedRow(asked, mask=row) for row in bits.to(device)]).cpu()

    assert torch.equal(masked("cpu"), masked("cuda"))
    assert not masked("cpu").isfinite().all()


def test_a_mask_leaves_the_tokens_of_its_bits() -> None:
    torch.manual_seed(1)
    logits = torch.randn(3, 70)
    allowed = [[0, 31, 32, 69], [5]]
    masks = torch.zeros(2, 3, dtype=torch.int64)
    for mask, tokens in zip(masks, allowed, strict=True):
        for token in tokens:
            mask[token // 32] |= 1 << token % 32
    bits = torch.where(masks >= 1 << 31, masks - (1 << 32), masks).int()
    asked = LogitEdits(Sampling(logit_bias=((31, 3.0),)), [1], [])
    edited = edit(logits.clone(), [EditedRow(asked, mask=bits[0]), EditedRow(asked), EditedRow(asked, mask=bits[1])])
    for row, tokens in zip((0, 2), allowed, strict=True):
        assert edited[row].isfinite().nonzero()[:, 0].tolist() == tokens
    assert edited[0, 31] == logits[0, 31] + 3
    assert edited[1].isfinite().all()


def test_edits_follow_a_growing_row_and_its_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "TAIL", 5)
    asked, prompt, output = Sampling(**EDITED["all"]), [1, 2, 2], list[int]()
    edits, dice = LogitEdits(asked, prompt, output, ENDS), random.Random(4)
    for _ in range(60):
        drafts = [dice.randrange(SIZE) for _ in range(dice.randint(0, 4))]
        logits = 4 * torch.randn(len(drafts) + 1, SIZE)
        changed = edit(logits.clone(), [EditedRow(edits, drafts[:ahead]) for ahead in range(len(drafts) + 1)])
        for ahead, row in enumerate(logits):
            assert torch.equal(changed[ahead], expected(row, asked, prompt, [*output, *drafts[:ahead]]))
        output += [dice.randrange(20) for _ in range(dice.randint(1, 3))]
    assert len(output) > 60


def warped(logits: Tensor, asked: Sampling) -> Tensor:
    """Return the probabilities that transformers' processors leave, in vLLM's order."""
    chain: list[Any] = [hf.TemperatureLogitsWarper(asked.temperature)]
    chain += [hf.MinPLogitsWarper(asked.min_p)] if asked.min_p else []
    chain += [hf.TopKLogitsWarper(asked.top_k)] if asked.top_k else []
    chain += [hf.TopPLogitsWarper(asked.top_p)] if asked.top_p < 1 else []
    for processor in chain:
        logits = processor(torch.zeros(1, 1), logits)
    return logits.softmax(-1)


@pytest.mark.parametrize("nucleus", [True, False])
def test_limits_leave_what_those_of_transformers_do(nucleus: bool) -> None:
    """Kept tokens are the same. Probabilities differ by 1e-6 at most."""
    dice, count = random.Random(5), 300
    choices: dict[str, Any] = {
        "temperature": (0.4, 1.0, 1.7), "top_k": (0, 1, 5, 40, SIZE + 9), "min_p": (0.0, 0.05, 0.3, 1.0),
        "top_p": (0.95, 0.9, 0.5) if nucleus else (1.0,),
    }  # fmt: skip
    asked = [Sampling(**{name: dice.choice(values) for name, values in choices.items()}) for _ in range(count)]
    logits = 3 * torch.randn(count, SIZE, generator=torch.Generator().manual_seed(6))
    asked[0], logits[0, :6] = Sampling(temperature=1, top_k=2), torch.tensor([30.0, 10, 20, 20, 20, 0])
    kept, order = distribution(logits, asked, nucleus)
    kept = kept if order is None else torch.zeros_like(kept).scatter_(-1, order, kept)
    kept /= kept.sum(-1, keepdim=True)
    wanted = torch.cat([warped(logits[row : row + 1], each) for row, each in enumerate(asked)])
    assert torch.equal(kept > 0, wanted > 0)
    assert (kept[0, :6] > 0).tolist() == [True, False, True, True, True, False], "equal ones at the edge all stay"
    assert torch.allclose(kept, wanted, atol=1e-6, rtol=0)
    assert len({int(number) for number in (kept > 0).sum(-1)}) > 10


def test_tokens_are_drawn_by_the_limits_whatever_the_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows without parameters draw as they do alone."""
    monkeypatch.setattr(sampling, "CHUNK", 4 * SIZE)
    dice, count = random.Random(7), 60
    logits, rows = 3 * torch.randn(count, SIZE, generator=torch.Generator().manual_seed(8)), histories(count)
    limits: Any = [{}, {"top_p": 0.8}, {"top_k": 3}, {"min_p": 0.2, "top_p": 0.9}, {"temperature": 0.0}]
    kinds: Any = [{}, *EDITED.values()]
    fields = [{"temperature": 1.0, "seed": str(row)} | dice.choice(limits) for row in range(count)]
    asked = [Sampling.model_validate(each | dice.choice(kinds)) for each in fields]
    edited = {row: EditedRow(LogitEdits(each, *rows[row], ENDS)) for row, each in enumerate(asked) if each.edits}
    places = [len(output) for _, output in rows]
    ids, _ = choose(logits, asked, places, edited)
    raw = logits.clone()
    for row, each in enumerate(asked):
        alone = {0: edited[row]} if row in edited else {}
        assert ids[row] == choose(logits[row : row + 1], [each], places[row : row + 1], alone)[0][0]
        changed = expected(logits[row], each, *rows[row]) if each.edits else logits[row]
        if each.temperature:
            assert warped(changed[None], each)[0, ids[row]] > 0
        else:
            assert ids[row] == changed.argmax()
    assert torch.equal(logits, raw), "scores are of the model's own logits"


# Rows under way


def by_transformers(engine: Engine, row: Row) -> list[int]:
    """Return a row's greedy output, computed whole for each token."""
    prompt, output = list(row.prompt_ids), list[int]()
    while len(output) < row.limit:
        ids = torch.tensor([[*prompt, *output]])
        batch, logits = passes.prefill(engine, ids, torch.ones_like(ids), 1)
        engine.retire(batch)
        output.append(int(expected(logits[0].float(), row.sampling, prompt, output).argmax()))
    return output


def asked_rows(kinds: Sequence[Sampling]) -> list[Row]:
    rows = sequences(len(kinds), 9, max_tokens=14)
    for row, asked in zip(rows, kinds, strict=True):
        row.sampling = asked
    return rows


def test_penalised_rows_run_beside_others_with_drafts_and_without(checkpoint: Checkpoints, monkeypatch: Patch) -> None:
    small(monkeypatch)
    monkeypatch.setattr(sampling, "TAIL", 3)
    engine = load("stream", checkpoint("llama"), "cpu")
    kinds = [Sampling(**fields) for fields in ({}, *EDITED.values(), {})]
    kinds = [kind.model_copy(update={"stop_token_ids": ()}) for kind in kinds]
    wanted = [by_transformers(engine, row) for row in asked_rows(kinds)]
    assert len({tuple(tokens) for tokens in wanted}) > 6
    answers = {row.key: (row.prompt_ids, tokens) for row, tokens in zip(asked_rows(kinds), wanted, strict=True)}
    for running in (begin(engine), drafting(engine, monkeypatch, answers, 0.3)):
        rows = run(running, [asked_rows(kinds)])
        assert [row.output_ids for row in rows] == wanted
        drafted = running.drafts.drafted
        running.end()
    assert drafted > 20


def test_a_row_ends_at_its_own_tokens_and_not_before_its_minimum(checkpoint: Checkpoints, monkeypatch: Patch) -> None:
    small(monkeypatch)
    engine = load("stream", checkpoint("llama"), "cpu")
    rows = asked_rows([Sampling()] * 4)
    for row in rows:
        row.prompt_ids, row.left = rows[3].prompt_ids, 14
    (free,) = run(begin(engine), [rows[3:]])
    third = free.output_ids[2]
    first = free.output_ids.index(third)
    rows[0].sampling, rows[0].ignore_eos = Sampling(stop_token_ids=(third,)), True  # of the model's ends alone
    rows[2].sampling = Sampling(stop_token_ids=(third,), min_tokens=6)
    run(begin(engine), [rows[:3]])
    assert (rows[0].output_ids, rows[0].finish_reason) == (free.output_ids[:first], "stop")
    assert (rows[1].output_ids, rows[1].finish_reason) == (free.output_ids, "length")
    assert third not in rows[2].output_ids[:6]
    assert len(rows[2].output_ids) >= 6


class Spelling(Words):
    def decode(self, token_ids: Sequence[int], _before: Sequence[int] = ()) -> str:
        return "".join(chr(token) for token in token_ids)


def test_stops_count_after_the_minimum_alone() -> None:
    row = Row([1], 20, Sampling(min_tokens=4), stop=("ab",))
    for letter in "abxab":
        assert not row.ended
        scheduler.add_token(Spelling(), row, ord(letter), True)  # type: ignore[arg-type]
    assert (row.text, row.finish_reason) == ("abx", "stop"), "the stop ends after four tokens"
    (row := Row([1], 20, Sampling(min_tokens=2), stop=("ab",))).output_ids += map(ord, "aba")
    scheduler.add_token(Spelling(), row, ord("b"), True)  # type: ignore[arg-type]
    assert (row.text, row.finish_reason) == ("ab", "stop"), "a row that goes on after a kill"


def test_run_takes_all_parameters_with_drafts_and_without(folder: Path, checkpoint: Checkpoints) -> None:
    words = ["run", "-m", str(checkpoint("llama")), "--offload", "cpu", "--dtype", "fp32", "--json"]
    words += ["-p", "hello hello"]
    words += ["--output-len", "20", "--ignore-eos"]
    kinds = [
        [], ["--repetition-penalty", "1.5"], ["--presence-penalty", "2", "--frequency-penalty", "1"],
        ["--logit-bias", "70=100"], ["--temperature", "1", "--top-k", "2", "--min-p", "0.2"],
        ["--logit-bias", "70=100", "--stop-token-ids", "70,71", "--min-tokens", "4"],
    ]  # fmt: skip
    answers = []
    for kind in kinds:
        plain = zinfer(folder, *words, *kind)
        assert plain.returncode == 0, plain.stderr
        answers.append(json.loads(plain.stdout)[0])
    drafted = zinfer(folder, *words, *kinds[1], "--draft", "ngram")
    assert json.loads(drafted.stdout)[0]["output_ids"] == answers[1]["output_ids"]
    ids = [tuple(answer["output_ids"]) for answer in answers]
    assert len({*ids}) == len(kinds)
    assert ids[3] == (70,) * 20
    assert (len(ids[5]), answers[5]["finish_reason"]) == (4, "stop")
    assert not {70, 71} & {*ids[5]}
    wrong = {"logit_bias has token 9999": ["--logit-bias", "9999=1"], "min_p must be": ["--temperature=1", "--min-p=2"]}
    for message, kind in wrong.items():
        refused = zinfer(folder, *words, *kind)
        assert (refused.returncode, message in refused.stderr) == (2, True)
