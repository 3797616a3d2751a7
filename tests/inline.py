"""Sweep without processes: the real code of the parent with a fake worker, and a test of kills."""

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

from tests.inline_worker import InlineWorker
from zinfer.checkpoint.source import Source
from zinfer.core.case import Case
from zinfer.core.machine import Machine
from zinfer.core.model import LayerSpec, ModelSpec
from zinfer.engine import EngineError
from zinfer.job import recipe
from zinfer.job.recipe import Sweep
from zinfer.job.sweep import FINAL, Events, LoadJob, Outcome, prepare, run
from zinfer.record.measurement import Effective, Measurement, Status
from zinfer.record.store import Header, Store, read
from zinfer.worker.session import Session
from zinfer.worker.tasks import Facts, Load, Measure

MACHINE = Machine(
    name="test", source="measured", gpu_name="fake", gpu_count=1, gpu_bytes=80 << 30, host_bytes=100 << 30
)
SPEC = ModelSpec(
    name="fake", architecture="fake", num_layers=4, total_layers=4, hidden_size=8, num_heads=2, num_kv_heads=2,
    head_dim=4, ffn_size=32, vocab_size=64,
    layers=(LayerSpec(parameters=100, kv_width=16, attention=8),) * 4, other_parameters=100, config={},
)  # fmt: skip


@dataclass(eq=False)
class FakeWorker(InlineWorker):
    """A worker without an engine: batches up to `edge` run, others fail as `fails` says, or for want of memory."""

    edge: int
    fails: dict[int, Status] = field(default_factory=dict)
    refuse_offload: str | None = None
    signal_at: tuple[int, int] | None = None  # batch size, signal
    pause_s: float = 0.0

    def __post_init__(self) -> None:
        super().__init__(instead={Load: self._load_point, Measure: self._measure_point})
        self.loads, self.measured = 0, list[int]()

    def __call__(self, _target: str, **_settings: Any) -> Self:
        return self

    def _load_point(self, _session: Session, request: Load) -> Facts:
        self.loads += 1
        if request.plan.case.offload == self.refuse_offload:
            raise EngineError("no")
        return Facts()

    def _measure_point(self, _session: Session, request: Measure) -> Measurement:
        case = request.case
        batch = case.workload.batch_size
        time.sleep(self.pause_s)
        if self.signal_at is not None and batch == self.signal_at[0]:
            os.kill(os.getpid(), self.signal_at[1])
            time.sleep(5)
        self.measured.append(batch)
        status: Status = self.fails.get(batch, "ok" if batch <= self.edge else "oom_gpu")
        timed = status == "ok" and request.repeats
        steps = (2.0,) * (case.workload.output_len - 1)
        samples: dict[str, Any] = {"ttft_ms": (1.0 + batch,), "step_ms": (steps,)} if timed else {}
        effective = Effective(gpu_weight_bytes=1, streamed_bytes_per_step=800)
        return Measurement(case=case, status=status, machine="test", effective=effective, **samples)


def prepared(sweep: Sweep) -> list[LoadJob]:
    """Return the jobs of `sweep` with the model `SPEC` on `MACHINE`."""

    def resolve(_load: recipe.SweepLoad) -> Source:
        return Source(SPEC, "dummy", "r1")

    return prepare(sweep, MACHINE, resolve, lambda load: load.engine)


def run_inline(
    path: Path, sweep: Sweep, worker: FakeWorker, events: Events | None = None, jobs: Sequence[LoadJob] | None = None
) -> list[Measurement]:
    """Return the points of `run_outcome`."""
    points = run_outcome(path, sweep, worker, events, jobs).points
    return [point for point in points if isinstance(point, Measurement)]


def run_outcome(
    path: Path, sweep: Sweep, worker: FakeWorker, events: Events | None = None, jobs: Sequence[LoadJob] | None = None
) -> Outcome:
    """Run or resume `sweep`, with records in `path`. Its `jobs` may be `prepared` before."""
    done = read(path).points if path.is_file() else ()
    jobs = prepared(sweep) if jobs is None else jobs
    with Store(path) as store:
        store.append(Header(machine="test"))
        outcome = run(sweep, jobs, store, done, events, worker)
        store.check()
        return outcome


def killed(
    work: Callable[[Callable[[bytes], object]], object], kills: int, dice: random.Random
) -> Iterator[list[bytes]]:
    """SIGKILL processes of `work` at random moments; yield the lines of each.

    It waits for some lines, then for milliseconds, so that the process gets as far on a busy machine.
    """
    for _ in range(kills):
        reader, writer = os.pipe()
        if (child := os.fork()) == 0:
            os.close(reader)
            work(partial(os.write, writer))
            os._exit(0)
        os.close(writer)
        written, lines = b"", dice.randrange(8)
        while written.count(b"\n") < lines and (more := os.read(reader, 1 << 16)):
            written += more
        time.sleep(dice.uniform(0, 0.01))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with os.fdopen(reader, "rb") as pipe:
            written += pipe.read()
        yield written[: written.rfind(b"\n") + 1].splitlines()


def slaughter(
    folder: Path,
    kills: int,
    dice: random.Random,
    whole: int,
    stored: Callable[[Path], list[bytes]],
    work: Callable[[Path, Callable[[bytes], object]], object],
) -> tuple[int, int]:
    """Kill `work` on a file, `kills` times; return what was whole.

    Another file follows when one has `whole` records. Returns the number of whole files and of records found. Exits
    with a message if a record that was reported is lost, or one doubled.
    """
    finished, reported = 0, set[bytes]()

    def file() -> Path:
        return folder / f"{finished}.jsonl"

    for lines in killed(lambda write: work(file(), write), kills, dice):
        reported |= set(lines)
        found = stored(file())
        if len(found) != len(set(found)):
            sys.exit("a record was made twice")
        if lost := reported - set(found):
            sys.exit(f"{len(lost)} records were lost")
        if len(found) == whole:
            finished, reported = finished + 1, set()
    return finished, whole * finished + len(reported)


def _slaughter(folder: Path, kills: int, seed: int) -> tuple[int, int]:
    """Kill a sweep, `kills` times; return the number of sweeps that finished all their points, and of points."""
    os.fsync = lambda fd: None  # what a killed process has written stays
    sweep = Sweep(model=("fake",), engine=("stream",), batch_size=tuple(range(1, 33)))
    jobs = prepared(sweep)

    def name(case: Case) -> bytes:
        return case.model_dump_json().encode()

    def work(path: Path, write: Callable[[bytes], object]) -> None:
        def report(point: Measurement, resumed: bool) -> None:
            if not resumed:
                write(name(point.case) + b"\n")

        run_inline(path, sweep, FakeWorker(edge=99, pause_s=0.0005), Events(point=report), jobs)

    def stored(path: Path) -> list[bytes]:
        points = read(path).points if path.is_file() else ()
        return [name(point.case) for point in points if point.status in FINAL]

    return slaughter(folder, kills, random.Random(seed), 64, stored, work)


if __name__ == "__main__":
    print(*_slaughter(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
