"""Rows of a batch: each continues as it would alone, with the tokens of `transformers`, whatever stops and joins beside
it."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests import Checkpoints, Patch
from tests.inline_batch import completion
from tests.inline_worker import InlineWorker
from tests.test_parity import MACHINE, plan_of
from zinfer.checkpoint.resolve import from_directory
from zinfer.core.case import Workload
from zinfer.core.errors import NotFiniteError
from zinfer.core.request import Request
from zinfer.engine.base import Engine, Work
from zinfer.engine.stream.engine import Stream
from zinfer.generation import tuning
from zinfer.generation.pass_times import PassTimes
from zinfer.generation.scheduler import ContinuousScheduler
from zinfer.job.batch import run as jobs
from zinfer.job.batch.ledger import Ledger
from zinfer.job.batch.openai import BatchLine, read_requests, requests_of
from zinfer.job.batch.packing import best_plan
from zinfer.job.batch.run import BatchJob
from zinfer.job.driver import Driver
from zinfer.plan.planner import Plan
from zinfer.worker import generation as worker_side
from zinfer.worker.tasks import Answer, BatchStart, BatchStep, Command

TEMPLATE = "{% for m in messages %}{% if m.role == 'bad' %}{{ raise_exception('no such role') }}{% endif %}"
TEMPLATE += "[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"


Asked = TypeVar("Asked", bound=Command[Any])


def request(name: str, body: dict[str, Any]) -> BatchLine:
    (parsed,) = read_requests(completion(name, body))
    assert isinstance(parsed, BatchLine), parsed
    return parsed


class Watched(InlineWorker):
    """A worker in this process, and the requests that it got."""

    def __init__(self, directory: Path, engine: type[Engine] = Stream) -> None:
        super().__init__(engine)
        self.spec = from_directory(directory)
        self.commands: list[Command[Any]] = []

    def ask(self, command: Command[Answer]) -> Answer:
        self.commands.append(command)
        return super().ask(command)

    def asked(self, kind: type[Asked]) -> list[Asked]:
        return [command for command in self.commands if isinstance(command, kind)]


def plan_for(worker: Watched, directory: Path, rows: list[Request]) -> Plan:
    return best_plan([plan_of(directory, sizes=(1, 1, 1)).case], [row.need for row in rows], worker.spec, MACHINE)


def answers(
    directory: Path, output: Path, requests: list[BatchLine], **settings: Any
) -> tuple[dict[str, Any], Watched]:
    """The completions by custom_id, and the worker that gave them."""
    worker, tokenizer = Watched(directory), AutoTokenizer.from_pretrained(directory)
    prompts = [tokenizer(request.prompt).input_ids for request in requests]
    rows, faults = requests_of(requests, prompts, worker.spec.max_position, worker.spec.vocab_size, 20, {})
    assert not faults
    with Ledger.open(output, {}, 7) as ledger:
        BatchJob(plan_for(worker, directory, rows), requests, rows, ledger, Driver(lambda: worker), **settings).run()
    lines = map(json.loads, output.read_text().splitlines())
    return {answer["custom_id"]: answer["response"]["body"] for answer in lines}, worker


@pytest.mark.parametrize(
    "architecture", ["llama", "bloom", *(pytest.param(name, marks=pytest.mark.slow) for name in ("opt", "mixtral"))]
)
def test_greedy_answers_are_those_of_each_prompt_alone(
    architecture: str, checkpoint: Checkpoints, tmp_path: Path, monkeypatch: Patch
) -> None:
    """Rows of all lengths share room for few tokens. They come to the worker one after the other, three at a time, up
    to the last position of the model."""
    dice = random.Random(4)
    monkeypatch.setattr(worker_side, "ANSWER_S", 0.0)
    monkeypatch.setattr(jobs, "AHEAD", 2)
    monkeypatch.setattr(tuning, "TUNED", replace(tuning.TUNED, growth=8, min_prompt_tokens=5, few_batches=1))
    monkeypatch.setattr(PassTimes, "room", lambda *_: 11)
    directory = checkpoint(architecture)
    texts = ["".join(dice.choice("etaoin shrdlu") for _ in range(dice.randint(1, 30))) for _ in range(9)]
    texts.append("x" * 60)
    limits = [dice.randint(1, 24) for _ in range(9)] + [4]
    requests = [
        request(str(key), {"prompt": prompt, "max_tokens": limit, "temperature": 0})
        for key, (prompt, limit) in enumerate(zip(texts, limits, strict=True))
    ]
    actual, worker = answers(directory, tmp_path / "out.jsonl", requests, max_rows=3)
    assert len(worker.asked(BatchStart)) == 1
    assert len(worker.asked(BatchStep)) >= 9
    whole = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    for key, (prompt, limit) in enumerate(zip(texts, limits, strict=True)):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        whole_ids = whole.generate(ids, max_new_tokens=limit, do_sample=False, pad_token_id=0)
        expected = whole_ids[0, ids.shape[1] :].tolist()
        stopped = 2 in expected
        expected = expected[: expected.index(2)] if stopped else expected
        body = actual[str(key)]
        assert body["choices"][0]["text"] == tokenizer.decode(expected, skip_special_tokens=True)
        assert body["choices"][0]["finish_reason"] == ("stop" if stopped else "length")
        assert [*body["usage"].values()] == [ids.shape[1], len(expected), ids.shape[1] + len(expected)]


def test_sampled_answers_do_not_depend_on_the_batch(checkpoint: Checkpoints, tmp_path: Path) -> None:
    bodies = [{"prompt": "ab" * size, "max_tokens": 12, "temperature": 1, "top_p": 0.9} for size in range(1, 6)]
    requests = [request(str(key), body) for key, body in enumerate(bodies)]
    alike = [request(name, bodies[0] | {"seed": 5}) for name in ("x", "y")]
    directory = checkpoint("llama")
    mixed, _ = answers(directory, tmp_path / "a.jsonl", [*requests, *alike])
    separate, worker = answers(directory, tmp_path / "b.jsonl", [*requests, *alike], max_rows=1)
    assert worker.asked(BatchStart)[0].rows == 1
    assert mixed == separate
    assert mixed["x"]["choices"] == mixed["y"]["choices"]
    assert len({body["choices"][0]["text"] for body in mixed.values()}) == 6


def test_a_token_that_the_model_does_not_have_is_the_fault_of_its_line() -> None:
    bad, good = (request(name, {"prompt": "x", "stop_token_ids": [token]}) for name, token in (("a", 10_000), ("b", 7)))
    (row,), (fault,) = requests_of([bad, good], [[1], [1]], None, 128, 20, {})
    assert row.sampling.stop_token_ids == (7,)
    assert (fault.failure.code, "stop_token_ids has token 10000" in fault.failure.message) == ("invalid_value", True)


def test_rows_go_on_with_their_tokens_however_often_the_worker_fails(
    checkpoint: Checkpoints, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(worker_side, "ANSWER_S", 0.0)
    step = ContinuousScheduler.step
    fails = [5, 11, 30]

    def failing(self: Any) -> Any:
        fails[:] = [count - 1 for count in fails]
        if 0 in fails:
            self.end()
            raise RuntimeError("a fault")
        return step(self)

    monkeypatch.setattr(ContinuousScheduler, "step", failing)
    body = {"max_tokens": 12, "temperature": 0}
    requests = [request(str(size), {"prompt": "ab" * size} | body) for size in range(1, 6)]
    _, worker = answers(checkpoint("llama"), tmp_path / "out.jsonl", requests, max_rows=2)
    rows = [row for step in worker.asked(BatchStep) for row in step.requests]
    assert len(worker.asked(BatchStart)) == 4
    assert len(rows) > 8
    assert any(row.output_ids for row in rows)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint("llama"))
    assert all(row.prompt_ids == tokenizer("ab" * (row.key + 1)).input_ids for row in rows)


def test_a_row_that_is_not_a_number_fails_alone(checkpoint: Checkpoints) -> None:
    class Broken(Stream):
        def forward(self, works: Sequence[Work]) -> list[torch.Tensor]:
            (logits,) = super().forward(works)
            logits = logits.clone()
            if works[0].batch.length == 1:  # the prefill
                logits[1, :, 5] = float("nan")
            return [logits]

    directory = checkpoint("llama")
    worker = Watched(directory, Broken)
    requests = [request(name, {"prompt": name, "max_tokens": 2, "temperature": 1}) for name in "abc"]
    wanted, _ = requests_of(requests, [[5], [6], [7]], None, 128, 20, {})
    worker.load(plan_for(worker, directory, wanted))
    worker.ask(BatchStart(load=Workload(batch_size=3, input_len=1, output_len=2)))
    results = worker.ask(BatchStep(requests=wanted))
    again = worker.ask(BatchStep())
    worker.close()
    failures = [row.failure and row.failure.message for row in results.rows]
    assert failures == [None, str(NotFiniteError()), None]
    assert [len(row.tokens) for row in results.rows] == [1, 0, 1]
    assert {row.key for row in again.rows} == {0, 2}
    assert (again.running, again.waiting) == (0, 0)
