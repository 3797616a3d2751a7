"""A model that drafts: the tokens are those of decoding one by one, however good it is, and wherever rows are."""

import json
import random
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import Checkpoints, Patch, Spy
from tests import test_cache_kinds as kinds
from tests.command import zinfer
from tests.inline_batch import completion
from tests.test_continuous import alike, begin, greedy, run, sequences, small
from tests.test_drafts import DRAFTED
from tests.test_graphs import Rerun, recorder
from tests.test_job import texts
from tests.test_parity import load
from tests.test_passes import keep_here, small_blocks
from zinfer.checkpoint import resolve
from zinfer.core.model import ModelError
from zinfer.engine import EngineError
from zinfer.engine.base import Engine
from zinfer.generation import draft_model, sequence, tuning
from zinfer.generation.draft_model import check_same_tokens
from zinfer.generation.drafts import Drafts
from zinfer.generation.pass_times import PassTimes
from zinfer.generation.scheduler import ContinuousScheduler

kind = kinds.kind  # the fixture
assert recorder  # a fixture


def like(directory: Path, target: Path, noise: float) -> Path:
    """Write a checkpoint with the weights of `directory` plus noise. Each weight is off by about `noise` of their
    spread."""
    shutil.copytree(directory, target)
    torch.manual_seed(3)
    for path in sorted(target.glob("*.safetensors")):
        tensors = load_file(path)
        save_file(
            {name: tensor + noise * tensor.std() * torch.randn(tensor.shape) if tensor.dim() > 1 else tensor
             for name, tensor in tensors.items()},
            path, {"format": "pt"},
        )  # fmt: skip
    return target


def drafting(engine: Engine, patch: Patch, **settings: Any) -> ContinuousScheduler:
    """Return a scheduler with the engine's draft model, whose drafts are free."""
    patch.setattr(PassTimes, "room", lambda *_: 1000)
    patch.setattr(Drafts, "_worth", lambda _drafts, counts, _rows: max(counts.values()))
    return begin(engine, **settings)


def check(
    engine: Engine, rows: Sequence[sequence.Sequence], running: ContinuousScheduler, *arrivals: list[sequence.Sequence]
) -> None:
    """Run `rows`, in groups if there are `arrivals`: the answers are those of each alone."""
    expected = {row.key: greedy(engine, row.prompt_ids, row.left) for row in rows}
    assert {row.key: row.output_ids for row in run(running, [*arrivals] or [[*rows]])} == expected
    running.end()


@pytest.mark.parametrize(
    ("way", "noise"),
    [
        pytest.param(way, noise, marks=() if way == "none" or noise else pytest.mark.slow)
        for way in sorted(DRAFTED)
        for noise in (0.0, 0.05)
    ],
)
def test_tokens_are_those_of_decoding_one_by_one(
    way: str, noise: float, checkpoint: Checkpoints, tmp_path: Path, monkeypatch: Patch
) -> None:
    small_blocks(monkeypatch, 20)
    small(monkeypatch)
    name, offload, options = DRAFTED[way]
    if options.get("kv_offload") == "auto":
        keep_here(monkeypatch, 3)
    small_one = like(checkpoint("llama"), tmp_path / "small", noise)
    engine: Any = load(name, checkpoint("llama"), offload, tmp_path, draft=str(small_one), **options)
    rows, running = sequences(14, 3), drafting(engine, monkeypatch)
    check(engine, rows, running, rows[:5], rows[5:6], rows[6:])
    drafted, accepted = running.drafts.drafted, running.drafts.accepted
    assert drafted > 20
    assert engine.draft.batches == []
    assert accepted == drafted if noise == 0 else 0.2 * drafted < accepted < drafted


@pytest.mark.parametrize("architecture", ["llama", "bloom"])
def test_steps_of_the_small_model_are_recorded(
    architecture: str, checkpoint: Checkpoints, tmp_path: Path, monkeypatch: Patch, recorder: Rerun
) -> None:
    """CUDA graphs launch one-token drafts, with varying numbers of tokens kept."""
    small(monkeypatch)
    small_one = like(checkpoint(architecture), tmp_path / "small", 0.05)
    engine: Any = load("stream", checkpoint(architecture), "cpu", draft=str(small_one))
    running = drafting(engine, monkeypatch)
    check(engine, alike(5, 8, 24), running)
    assert engine.draft.effective().settings["cuda_graphs"] == "on"
    assert recorder.replayed > running.drafts.drafted / 5
    assert 0 < running.drafts.accepted < running.drafts.drafted


def test_rows_that_have_ended_stay_until_most_have(checkpoint: Checkpoints, tmp_path: Path, monkeypatch: Patch) -> None:
    """The number of rows seldom changes: CUDA graphs are recorded for it."""
    small(monkeypatch)
    small_one = like(checkpoint("llama"), tmp_path / "small", 0.05)
    engine: Any = load("stream", checkpoint("llama"), "cpu", draft=str(small_one))
    rows = alike(8, 8, 30)
    for row in rows:
        row.left = 6 + 4 * row.key
    running = drafting(engine, monkeypatch)
    forward, sizes = engine.draft.forward, list[int]()

    def watched(works: Sequence[Any]) -> Any:
        sizes.append(works[0].batch.batch_size)
        return forward(works)

    monkeypatch.setattr(engine.draft, "forward", watched)
    check(engine, rows, running)
    sizes = sizes[sizes.index(8) :]  # rows have come one by one
    drafted = [size for index, size in enumerate(sizes) if not index or size != sizes[index - 1]]
    assert all(2 * after < before for before, after in pairwise(drafted)), drafted
    assert len(drafted) > 1, "most have ended at some time"


@pytest.mark.parametrize("architecture", ["bloom", pytest.param("gpt_neox", marks=pytest.mark.slow)])
def test_rows_come_pause_and_leave(architecture: str, checkpoint: Checkpoints, monkeypatch: Patch, spy: Spy) -> None:
    """Rows leave, wait in host memory, return, or pause drafting. The KV cache of the model that drafts closes its
    gaps."""
    small(monkeypatch, 60)
    monkeypatch.setattr(tuning, "DRAFTS", replace(tuning.DRAFTS, growth=12, backlog=3))
    engine: Any = load("stream", checkpoint(architecture), "cpu", draft=str(checkpoint("llama")))
    rows = alike(9, 8, 30)
    expected = {row.key: greedy(engine, row.prompt_ids, row.left) for row in rows}
    running = drafting(engine, monkeypatch, step=4)
    running.schedule.limits = running.schedule.limits._replace(positions=90)
    running.schedule._early = running.schedule._tokens = 1000
    monkeypatch.setattr(running.drafts, "max_drafts", 5)
    propose, calls = running.drafts.propose, Counter[int]()

    def now_and_then(
        rows: Mapping[int, sequence.Sequence], limits: Mapping[int, int], room: int
    ) -> dict[int, list[int]]:
        calls[0] += 1
        rows = {key: row for key, row in rows.items() if (key + calls[0] // 6) % 3}
        return propose(rows, {key: limits[key] for key in rows}, room)

    monkeypatch.setattr(running.drafts, "propose", now_and_then)
    moved = [spy(engine.draft, name) for name in ("move_rows", "retire", "rollback")]
    running.add(rows)
    done: list[sequence.Sequence] = []
    for number in range(400):
        if number == 5:
            running.drop([3])
        done += [row for row in running.step() if row.ended]
        drafter = running.drafts.drafter
        assert isinstance(drafter, draft_model.ModelDrafter)
        resting = {row.key for row in running.schedule.waiting}
        assert not resting & drafter._computed.keys(), "rows that wait have no memory on the device"
        if not running.running:
            break
    assert running.schedule.tally.yielded > 0
    assert min(verb.call_count for verb in moved) > 3
    running.end()
    assert {row.key: row.output_ids for row in done} == {key: ids for key, ids in expected.items() if key != 3}


def test_rows_beyond_the_positions_of_the_small_model_have_no_drafts(
    checkpoint: Checkpoints, monkeypatch: Patch
) -> None:
    small(monkeypatch, 200)
    engine: Any = load("stream", checkpoint("llama"), "none", draft=str(checkpoint("opt")))  # of 64 positions
    running = drafting(engine, monkeypatch)
    check(engine, alike(3, 40, 40), running)
    assert 0 < running.drafts.drafted < 3 * 16 * 24


def test_memory_that_is_short_for_drafts_ends_no_row(checkpoint: Checkpoints, monkeypatch: Patch) -> None:
    small(monkeypatch)
    engine: Any = load("stream", checkpoint("llama"), "cpu", draft=str(checkpoint("llama")))
    running = drafting(engine, monkeypatch)
    forward, calls = engine.draft.forward, count(1)

    def short(works: Any) -> Any:
        if next(calls) % 11 == 0:
            raise torch.OutOfMemoryError("no memory")
        return forward(works)

    monkeypatch.setattr(engine.draft, "forward", short)
    check(engine, sequences(6, 2), running)
    assert running.drafts.accepted > 5


class Timed:
    """Drafter whose tokens take `token_s` each."""

    def __init__(self, token_s: float | None) -> None:
        self._token_s, self.calls = token_s, list[int]()

    @property
    def token_s(self) -> float | None:
        return self._token_s

    def draft(self, rows: Mapping[int, sequence.Sequence], counts: Mapping[int, int]) -> dict[int, list[int]]:
        self.calls.append(max(counts.values()))
        return {key: [7] * count for key, count in counts.items()}

    def discard(self, key: int) -> None: ...


def simulated(
    token_s: float | None, pass_s: float, right: float, rows: int, limits: list[int]
) -> tuple[list[int], int, float]:
    """Return the drafts of each pass, the tokens and the seconds. A draft is right with probability `right`; a pass
    takes a second, or `pass_s` with drafts; `limits` are the drafts that a row may have in each pass."""
    drafter, dice = Timed(token_s), random.Random(1)
    drafts, sizes, tokens, seconds = Drafts(drafter), list[int](), 0, 0.0
    for limit in limits:
        asked = len(drafter.calls)
        sequences = {key: sequence.Sequence([1, 2, 3], limit + 1) for key in range(rows)}
        proposed = drafts.propose(sequences, dict.fromkeys(sequences, limit), 1000)
        took = pass_s if proposed else 1.0
        seconds += took + (token_s or 0) * sum(drafter.calls[asked:])
        tokens += rows
        for key, ids in proposed.items():
            accepted = next((index for index in range(len(ids)) if dice.random() >= right), len(ids))
            drafts.observe(key, len(ids), accepted)
            tokens += accepted
        drafts.passed(took)
        sizes.append(max(map(len, proposed.values()), default=0))
    return sizes, tokens, seconds


@pytest.mark.parametrize(
    ("token_s", "pass_s", "right", "low", "high"),
    [
        (0.001, 1.0, 0.9, 14, 16), (0.1, 1.0, 0.9, 4, 10), (0.1, 1.0, 0.3, 1, 2), (0.6, 1.0, 0.5, 0, 0),
        (2.0, 1.0, 1.0, 0, 0), (0.01, 1.0, 0.0, 0, 1), (None, 1.0, 0.9, 14, 16), (None, 3.0, 0.5, 0, 0),
        (0.05, 3.0, 0.9, 8, 16), (0.05, 3.0, 0.6, 0, 0),
    ],
)  # fmt: skip
def test_drafts_are_as_many_as_pay(token_s: float | None, pass_s: float, right: float, low: int, high: int) -> None:
    """A pass takes a second, or `pass_s` with drafts. Where they do not pay one is tried now and then."""
    sizes, tokens, seconds = simulated(token_s, pass_s, right, rows=4, limits=[999] * 600)
    assert low <= sorted(sizes[100:])[250] <= high
    assert tokens / seconds > 0.97 * 4, "never slower than without"


@pytest.mark.parametrize("rows", [1, 32])
@pytest.mark.parametrize("pass_s", [1.0, 1.06, 1.2])
def test_drafts_that_are_never_right_are_given_up_at_once(rows: int, pass_s: float) -> None:
    """Load of 64 tokens a row with one-second passes. With drafts they take `pass_s`. A token is drafted in 4 ms."""
    sizes, _, seconds = simulated(0.004, pass_s, 0.0, rows, limits=[*range(63, -1, -1)])
    assert sum(sizes) > 0
    assert seconds < 64 * 1.02


def test_models_of_other_tokens_cannot_draft(checkpoint: Checkpoints, tmp_path: Path) -> None:
    spec = resolve.from_directory(checkpoint("llama"))
    check_same_tokens(spec)
    check_same_tokens(spec.model_copy(update={"draft": resolve.from_directory(checkpoint("bloom"))}))
    other = shutil.copytree(checkpoint("bloom"), tmp_path / "other")
    text = (other / "tokenizer.json").read_text()
    tokens = json.loads(text)
    tokens["model"]["vocab"] |= {"a": tokens["model"]["vocab"]["b"], "b": tokens["model"]["vocab"]["a"]}
    special = json.loads(text)
    special["added_tokens"][2]["special"] = False
    for file, why in ((tokens, r"2 of 128 tokens differ, such as 'a'\)"), (special, "the special tokens differ")):
        (other / "tokenizer.json").write_text(json.dumps(file))
        with pytest.raises(ModelError, match=why):
            check_same_tokens(spec.model_copy(update={"draft": resolve.from_directory(other)}))
        (other / "tokenizer_config.json").unlink(missing_ok=True)


def test_a_model_that_cannot_forget_cannot_draft(checkpoint: Checkpoints, kind: Any) -> None:
    with pytest.raises(EngineError, match=r"draft=.*state that cannot forget"):
        load("stream", checkpoint("llama"), "cpu", draft=str(kind("mamba")))


def test_commands_take_drafts(folder: Path, checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Answers of `run` and `run --chat`, request counts, and one-line refusals."""
    target, small_one = checkpoint("bloom"), like(checkpoint("bloom"), tmp_path / "small", 0.02)
    model = ["--model", str(target), "--engine", "stream", "--offload", "cpu", "--dtype", "fp32"]
    for words in (["--prompt", "abcabcabc", "--output-len", "24"], ["--chat", "--output-len", "12"]):
        processes = [
            zinfer(folder, "run", *model, *words, "--ignore-eos", "--draft", draft, stdin="hello hello\nand again\n")
            for draft in ("none", "ngram", str(small_one))
        ]
        assert [process.returncode for process in processes] == [0, 0, 0], [process.stderr for process in processes]
        assert processes[0].stdout == processes[1].stdout == processes[2].stdout != ""
        assert "--chat" in words or " drafts right" in processes[2].stderr
        assert " drafts right" not in processes[0].stderr
    body = {"prompt": "abcabcabc", "max_tokens": 20, "temperature": 0.7}
    (folder / "asked.jsonl").write_bytes(b"\n".join(completion(str(seed), body | {"seed": seed}) for seed in range(4)))
    for name, draft in (("plain", "none"), ("drafted", str(small_one))):
        done = zinfer(folder, "batch", "asked.jsonl", "-o", f"{name}.jsonl", *model, "--draft", draft)
        assert done.returncode == 0, done.stderr
        assert (" drafts right" in done.stderr) == (name == "drafted")
    assert texts(folder / "plain.jsonl") == texts(folder / "drafted.jsonl")
    results = folder / "sweeps" / "results" / "load.jsonl"
    load = ["--request-lengths", "fixed:9,100", "--num-requests", "4", "--in-flight", "2", "-o", str(results)]
    done = zinfer(folder, "sweep", *model, "--draft", f"none,ngram,{small_one}", *load)
    assert done.returncode == 0, done.stderr
    plain, looked_up, drafted = (json.loads(line) for line in results.read_text().splitlines()[1:])
    assert 0 < looked_up["counts"]["accepted"] <= looked_up["counts"]["drafted"]
    assert len(looked_up["pass_ms"]) < len(plain["pass_ms"]) == 200
    refused = zinfer(folder, "sweep", *model, "--draft", "ngram", "--batch-size", "1")
    assert "equal batches of random tokens say nothing about drafts" in refused.stderr
    assert dict(drafted["case"]["options"])["draft"] == str(small_one)
    assert plain["counts"]["drafted"] == 0 < drafted["counts"]["drafted"]
    asked_for = ["--machine", "h100-80gb", "--offload", "cpu", "--batch-size", "1", "--draft", str(small_one), "--json"]
    (planned,) = json.loads(zinfer(folder, "plan", "-m", str(target), "--dtype", "fp32", *asked_for).stdout)
    right, checked = drafted["counts"]["accepted"], drafted["counts"]["checked"]
    assert planned["drafting"]["acceptance"] == right / checked
    assert planned["acceptance_from"] == f"measured: {right} of {checked} drafts in the records"
    (small_one / "tokenizer.json").write_text((small_one / "tokenizer.json").read_text().replace('"a"', '"\u00e9"'))
    for fault in ("other tokenizers (", str(small_one)):
        refused = zinfer(folder, "run", *model, "--prompt", "abc", "--draft", str(small_one))
        assert refused.returncode != 0
        assert fault in refused.stderr.splitlines()[-1]
        shard = min(small_one.glob("*.safetensors"))
        shard.write_bytes(shard.read_bytes()[:-8])
