"""Loop of a batch job: smaller batches after a failure, continuation after a kill, and saved tokens after a signal."""

import json
import os
import random
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests import PATIENCE_S, mentions
from tests.fakes import TARGET
from tests.inline import MACHINE, SPEC
from tests.inline_batch import CASE, InlineRows, line, prompt_of, run_inline, text
from zinfer.core.case import Workload
from zinfer.job.batch import run as jobs
from zinfer.job.batch.ledger import job_path
from zinfer.job.batch.run import BatchProgress, JobFailed
from zinfer.job.signals import Interrupted
from zinfer.plan.planner import make_plan
from zinfer.worker.process import Worker
from zinfer.worker.session import Session
from zinfer.worker.tasks import BatchStart, BatchStep, BatchStepped, Command

PROMPTS = [f"a{10 * size}/{size}" for size in range(1, 31)]
LINES = [line(prompt) for prompt in PROMPTS]


def texts(path: Path) -> dict[str, str | None]:
    """Return the output by custom_id: the text, or the error's code."""
    outputs = {}
    for record in map(json.loads, path.read_text().splitlines()):
        assert record["custom_id"] not in outputs
        error = record["error"]
        outputs[record["custom_id"]] = error["code"] if error else record["response"]["body"]["choices"][0]["text"]
    return outputs


EXPECTED = {prompt: text(prompt) for prompt in PROMPTS}


def test_every_prompt_is_answered_with_its_own_text(tmp_path: Path) -> None:
    path, worker, messages = tmp_path / "out.jsonl", InlineRows(), list[str]()
    seen: list[tuple[int, float | None]] = []
    bad = [b"broken", line("a5/5", n=3), LINES[0]]
    progress = run_inline(
        path, [*LINES, *bad], worker, max_rows=4, on_message=messages.append,
        on_progress=lambda now: seen.append((now.ended, now.seconds_left)),
    )  # fmt: skip
    records = [json.loads(line) for line in path.read_text().splitlines()]
    good = {record["custom_id"]: record["response"]["body"] for record in records if record["error"] is None}
    assert {name: body["choices"][0]["text"] for name, body in good.items()} == EXPECTED
    faults = [record["error"]["code"] for record in records if record["error"]]
    assert faults == ["invalid_json_line", "unsupported_parameter", "duplicate_custom_id"]
    assert good["a50/5"]["usage"] == {"prompt_tokens": 50, "completion_tokens": 5, "total_tokens": 55}
    assert (good["a50/5"]["choices"][0]["finish_reason"], good["a50/5"]["created"]) == ("stop", 7)
    assert (worker.loads, messages) == (1, [])
    assert worker.closed >= 1
    assert len(worker.sizes) > 30
    assert (progress.rows, progress.ended, progress.failed, progress.left) == (30, 30, 0, 0)
    assert progress.tokens == sum(range(1, 31))
    assert seen[-1] == (30, 0.0)
    assert progress.padding == pytest.approx(0.05)
    assert progress.passes >= 30
    assert (progress.running, progress.waiting) == (0, 0)
    assert len(job_path(path).read_bytes().splitlines()) == 1


@pytest.mark.parametrize("dies", [False, True])
def test_a_batch_that_fails_is_tried_in_parts_and_the_job_goes_on(tmp_path: Path, dies: bool) -> None:
    messages: list[str] = []
    worker = InlineRows(edge=16, dies=dies)
    progress = run_inline(tmp_path / "out.jsonl", LINES, worker, max_rows=24, on_message=messages.append)
    assert texts(tmp_path / "out.jsonl") == EXPECTED
    assert worker.sizes[:2] == [30, 7]
    assert 7 < max(worker.sizes[1:]) <= 15  # more of them again once it goes well, and never as many as failed
    assert worker.loads == (2 if dies else 1)
    assert mentions(messages[0], "30", "oom_gpu", "batches of 7")
    assert len(messages) == 1
    assert progress.failed == 0


def test_rows_that_fail_again_and_again_get_an_error(tmp_path: Path) -> None:
    """The first row cannot be run at all, the others can."""
    path, poison = tmp_path / "out.jsonl", PROMPTS[-1]

    class Poisoned(InlineRows):
        def _step(self, session: Session, request: BatchStep) -> BatchStepped:
            rows = map(prompt_of, (*self.alive, *self.queue, *request.requests))
            self.edge = 0 if poison in rows else 99
            return super()._step(session, request)

    worker = Poisoned()
    progress = run_inline(path, LINES, worker, max_rows=8)
    assert texts(path) == EXPECTED | {poison: "oom_gpu"}
    assert (progress.ended, progress.failed) == (30, 1)
    record = next(json.loads(line) for line in path.read_text().splitlines() if poison in line)
    assert record["response"] is None


def test_a_job_whose_batches_all_fail_ends_and_loses_no_prompt(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with pytest.raises(JobFailed, match=r"a batch of \d+ .*crashed: too large"):
        run_inline(path, LINES, InlineRows(edge=0, status="crashed"), max_rows=8)
    lost = texts(path)
    assert set(lost.values()) == {"crashed"}
    assert len(lost) < 3
    run_inline(path, LINES, InlineRows())
    assert texts(path) == EXPECTED | lost


def test_a_load_that_fails_answers_nothing(tmp_path: Path) -> None:
    path, worker = tmp_path / "out.jsonl", InlineRows(refused="oom_host")
    with pytest.raises(JobFailed, match=r"^oom_host: .*no memory"):
        run_inline(path, LINES, worker)
    assert texts(path) == {}
    assert worker.closed >= 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_keeps_what_unfinished_rows_have(tmp_path: Path, number: int) -> None:
    path, worker, calls = tmp_path / "out.jsonl", InlineRows(), []

    def interrupt(called: type[Command[Any]]) -> None:
        calls.append(called)
        if len(calls) > 12:
            os.kill(os.getpid(), number)

    worker.before = interrupt
    before = signal.getsignal(number)
    with pytest.raises(Interrupted) as caught:
        run_inline(path, LINES, worker, max_rows=4)
    assert caught.value.signal == number
    assert signal.getsignal(number) is before
    kept = [json.loads(line) for line in job_path(path).read_bytes().splitlines()[1:]]
    made = sum(len(record["tokens"]) for record in kept)
    assert set(calls) == {BatchStart, BatchStep}
    answered = sum(len(output.split()) for output in texts(path).values() if output)
    again = InlineRows()
    progress = run_inline(path, LINES, again, max_rows=4)
    assert texts(path) == EXPECTED
    assert made > 0
    assert progress.tokens == sum(range(1, 31)) - answered - made
    assert b"tokens" not in job_path(path).read_bytes()


@pytest.mark.parametrize("kills", [8, pytest.param(60, marks=pytest.mark.slow)])
def test_kills_lose_and_double_nothing(tmp_path: Path, kills: int) -> None:
    """SIGKILL at random moments of a job that continues each time; an answer that was reported must be on disk once."""
    seed = str(random.Random(7).randrange(1 << 30))
    command = [sys.executable, "-m", "tests.inline_batch", str(tmp_path), str(kills), seed]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    finished, answers, resumed = map(int, done.stdout.split())
    assert finished >= kills // 20
    assert answers > 2 * kills
    assert resumed > kills // 10, "tokens are saved while the job runs"


def test_more_rows_are_begun_only_within_bounds(tmp_path: Path) -> None:
    """Without bounds, all long answers would be half done before the first."""
    lines = [line(f"a20/40/{key}", 400) for key in range(600)]
    worker = InlineRows(steps=20)
    seen: list[tuple[int, int]] = []
    run_inline(tmp_path / "out.jsonl", lines, worker, max_rows=50,
               on_progress=lambda now: seen.append((now.running, now.waiting)))  # fmt: skip
    assert max(running for running, _ in seen) == 50
    assert seen[0] == (50, 550)
    assert max(worker.sizes) <= 50 + 2 * jobs.AHEAD


def test_a_worker_that_dies_is_started_again(tmp_path: Path) -> None:
    """Real processes: with eight rows the engine's process ends, with four it does not."""
    workload = Workload(batch_size=1, input_len=8, output_len=4)
    fields = {"engine": TARGET, "options": (("at_batch", 5), ("fail", "exit")), "workload": workload}
    plan = make_plan(CASE.model_copy(update=fields), SPEC, MACHINE)
    lines = [line(f"a{key}/4", 4) for key in range(1, 9)]
    messages: list[str] = []
    path = tmp_path / "out.jsonl"
    run_inline(path, lines, partial(Worker, TARGET, timeout_s=PATIENCE_S), plan=plan, on_message=messages.append)
    assert len(messages) == 1
    assert mentions(messages[0], "8", "crashed", "exit code 7")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert {record["custom_id"] for record in records} == {f"a{key}/4" for key in range(1, 9)}
    assert all(record["response"]["body"]["usage"]["completion_tokens"] == 4 for record in records)


def test_the_remaining_time_is_estimated_from_finished_rows() -> None:
    progress = BatchProgress(rows=10, tokens=100, seconds=50.0, left=400)
    assert progress.rate == 2.0
    assert progress.seconds_left == 200.0
    progress.used, progress.allowed = 30, 60
    assert progress.seconds_left == 100.0
    assert BatchProgress(rows=10, left=400).seconds_left is None
