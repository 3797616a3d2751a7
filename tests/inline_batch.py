"""A batch job without processes, on a worker without an engine; and its slaughter.

A prompt ``a30/12`` has 30 tokens and is continued by 12, or fewer if it may not have so many. Its tokens depend on the
prompt and the position alone. The text after another ``/`` only makes the prompt unique.
"""

import hashlib
import json
import random
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

from tests.inline import MACHINE, SPEC, slaughter
from tests.inline_worker import InlineWorker
from zinfer.core.case import Case, Workload
from zinfer.core.request import Request, Update
from zinfer.generation.tokenizer_process import Refusal, TokenizerProcess
from zinfer.job.batch import run as jobs
from zinfer.job.batch.ledger import Ledger, job_path
from zinfer.job.batch.openai import BatchLine, read_requests, refusal, requests_of
from zinfer.job.batch.run import BatchJob, BatchProgress
from zinfer.job.driver import Driver
from zinfer.plan.planner import Plan, make_plan
from zinfer.record.measurement import Status
from zinfer.worker.process import Client, WorkerDied
from zinfer.worker.session import Session
from zinfer.worker.tasks import BatchStart, BatchStarted, BatchStep, BatchStepped, Command, Facts, Load

CASE = Case(model="fake", engine="stream", offload="cpu", workload=Workload(batch_size=1, input_len=64, output_len=64))
PLAN = make_plan(CASE, SPEC, MACHINE)
ADD = Ledger.add
SETTINGS = {"prompts": "abc", "model": "fake"}


def line(prompt: str, max_tokens: int | None = 40, **body: Any) -> bytes:
    """Return a request whose prompt is its custom_id."""
    return completion(prompt, body | {"prompt": prompt} | ({} if max_tokens is None else {"max_tokens": max_tokens}))


def completion(name: str, body: dict[str, Any], chat: bool = False) -> bytes:
    """Return a line of a batch: a request for a text or a chat."""
    url = "/v1/chat/completions" if chat else "/v1/completions"
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body}).encode()


def token(prompt: str, index: int) -> int:
    return hashlib.blake2b(f"{prompt}/{index}".encode(), digest_size=1).digest()[0]


def text(prompt: str, max_tokens: int = 40) -> str:
    """Return the continuation of a prompt."""
    natural = int(prompt.split("/")[1])
    return " ".join(str(token(prompt, index)) for index in range(min(max_tokens, natural)))


class OutOfMemoryError(ValueError):
    """Stands for torch's."""


FAILURES: dict[Status, type[Exception]] = {"oom_gpu": OutOfMemoryError, "oom_host": MemoryError, "crashed": ValueError}
PROMPTS: dict[int, str] = {}  # by the first of their ids


def prompt_ids(prompt: str) -> list[int]:
    """Token ids of a prompt, as many as it says. The first one tells it from others."""
    first = int.from_bytes(hashlib.blake2b(prompt.encode(), digest_size=4).digest())
    PROMPTS[first] = prompt
    return [first] + [0] * (int(prompt.split("/")[0][1:]) - 1)


class InlineTokenizer(TokenizerProcess):
    """A tokenizer of such prompts, in this process."""

    def __init__(self) -> None:
        self.closed = 0

    def encode_quickly(self, prompt: Any) -> list[int] | Refusal:
        return self.encode_alone(prompt)

    def encode_alone(self, prompt: Any, special: bool = True) -> list[int] | Refusal:
        if isinstance(prompt, str) and "/" in prompt:
            return prompt_ids(prompt)
        if prompt == "hi":  # with which a server tries it
            return [0]
        return Refusal("invalid_prompt", "no prompt")

    def close(self) -> None:
        self.closed += 1


@dataclass(eq=False)
class InlineRows(InlineWorker):
    """A worker without an engine. With more rows than `edge` in it, it fails with `status`, by death if it `dies`."""

    edge: int = 1 << 20
    status: Status = "oom_gpu"
    dies: bool = False
    pause_s: float = 0.0
    refused: Status | None = None
    steps: int = 4

    def __post_init__(self) -> None:
        super().__init__(instead={Load: self._load_point, BatchStart: self._start, BatchStep: self._step})
        self.loads, self.closed = 0, 0
        self.alive: list[Request] = []  # rows that run
        self.queue: list[Request] = []
        self.sizes: list[int] = []  # rows in the worker at each step
        self.before: Callable[[type[Command[Any]]], object] = lambda _command: None

    def __call__(self) -> Self:
        return self

    def _load_point(self, _session: Session, _request: Load) -> Facts:
        self.loads += 1
        if self.refused is not None:
            raise FAILURES[self.refused]("no memory")
        return Facts()

    def _exchange(self, command: Command[Any]) -> Any:
        if not isinstance(command, Load):
            self.before(type(command))
        return super()._exchange(command)

    def _start(self, _session: Session, request: BatchStart) -> BatchStarted:
        self.alive, self.queue, self.max_rows = [], [], request.rows or 1 << 20
        return BatchStarted(positions=1 << 20)

    def _step(self, _session: Session, request: BatchStep) -> BatchStepped:
        assert not {row.key for row in request.requests} & {row.key for row in (*self.alive, *self.queue)}
        self.queue += request.requests
        self.sizes.append(len(self.alive) + len(self.queue))
        if self.sizes[-1] > self.edge:
            if self.dies:
                raise WorkerDied(self.status, "the worker ended")
            raise FAILURES[self.status]("too large")
        time.sleep(self.pause_s)
        answers: dict[int, Update] = {}
        passes = 0
        while passes < self.steps and not any(answer.finish_reason for answer in answers.values()):
            free = self.max_rows - len(self.alive)
            self.alive, self.queue = self.alive + self.queue[:free], self.queue[free:]
            passes += 1
            self._pass(answers)
        left: dict[str, Any] = {"running": len(self.alive), "waiting": len(self.queue)}
        spent: dict[str, Any] = {"passes": passes, "seconds": 0.1 * passes, "read": 100 * passes, "padded": 5 * passes}
        return BatchStepped(rows=list(answers.values()), **left, **spent)

    def _pass(self, answers: dict[int, Update]) -> None:
        alive = []
        for row in self.alive:
            row.add([token(prompt_of(row), len(row.output_ids))])
            before = answers[row.key].tokens if row.key in answers else []
            answer = Update(key=row.key, tokens=[*before, row.output_ids[-1]])
            if row.left == 0 or len(row.output_ids) == natural(row):
                reason: Literal["length", "stop"] = "length" if row.left == 0 else "stop"
                answer = replace(answer, finish_reason=reason, text=" ".join(map(str, row.output_ids)))
            else:
                alive.append(row)
            answers[row.key] = answer
        self.alive = alive

    def close(self) -> None:
        super().close()
        self.closed += 1


def prompt_of(row: Request) -> str:
    """The prompt whose ids a row has."""
    return PROMPTS[row.prompt_ids[0]]


def natural(row: Request) -> int:
    """The tokens that a row's prompt is continued by."""
    return int(prompt_of(row).split("/")[1])


def run_inline(
    path: Path, lines: Iterable[bytes], worker: Callable[[], Client], *, plan: Plan = PLAN, **more: Any
) -> BatchProgress:
    """Run or continue a job whose answers are in `path`. `more` has settings of the ledger, and of the job."""
    requests = read_requests(b"\n".join(lines))
    with Ledger.open(path, more.pop("settings", SETTINGS), 7, more.pop("force", False)) as ledger:
        new = [request for request in requests if request.id not in ledger.done]
        ledger.add(refusal(fault) for fault in new if not isinstance(fault, BatchLine))
        waiting = [request for request in new if isinstance(request, BatchLine)]
        prompts = [prompt_ids(request.prompt) for request in waiting]
        rows, faults = requests_of(waiting, prompts, plan.model.max_position, 256, 40, ledger.made)
        ledger.add(map(refusal, faults))
        progress = BatchJob(plan, waiting, rows, ledger, Driver(worker), **more).run()
        ledger.finish()
    return progress


def _slaughter(folder: Path, kills: int, seed: int) -> tuple[int, int, int]:
    """Kill a job, `kills` times; return the number of finished jobs, of answers on disk, and of starts that continued
    unfinished rows. Exit with a message if an answer is lost, doubled or another's."""
    dice, resumed = random.Random(seed), 0
    jobs.SAVE_S = 0.004
    lines = [line(f"a{dice.randint(1, 90)}/{dice.randint(1, 60)}/{number}") for number in range(40)]

    def work(path: Path, write: Callable[[bytes], object]) -> None:
        def report(ledger: Ledger, records: Iterable[dict[str, Any]]) -> None:
            records = list(records)
            ADD(ledger, records)
            write(b"".join(record["custom_id"].encode() + b"\n" for record in records))

        setattr(Ledger, "add", report)  # noqa: B010 - the process of a job that is killed
        run_inline(path, lines, InlineRows(pause_s=0.0004), max_rows=4)

    def stored(path: Path) -> list[bytes]:
        nonlocal resumed
        resumed += job_path(path).is_file() and b'"tokens"' in job_path(path).read_bytes()
        whole, _, torn = path.read_bytes().rpartition(b"\n") if path.is_file() else (b"", b"", b"")
        if torn and not torn.startswith(b"{"):
            sys.exit("a torn line is not the beginning of one")
        records = [json.loads(record) for record in whole.splitlines()]
        if any(record["response"]["body"]["choices"][0]["text"] != text(record["custom_id"]) for record in records):
            sys.exit("an answer is not that of its prompt")
        return [record["custom_id"].encode() for record in records]

    return *slaughter(folder, kills, dice, len(lines), stored, work), resumed


if __name__ == "__main__":
    print(*_slaughter(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
