"""Shards of a sweep: each load is measured by one of them, and what is merged is whole or refused."""

import shutil
import signal
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.command import ran
from tests.inline import MACHINE, FakeWorker
from zinfer.commands import options
from zinfer.commands.sweep import _measure
from zinfer.job import sweep
from zinfer.job.parts import merge, parts_path
from zinfer.job.recipe import Sweep
from zinfer.job.shard import Shard, ShardError
from zinfer.record.measurement import Measurement
from zinfer.record.store import Records, Store, decode, encode, read
from zinfer.worker import process
from zinfer.worker.session import Session
from zinfer.worker.tasks import Measure

SMALL = ["sweep", "-m", "bloom-tiny", "--load-format", "dummy", "--input-len", "8", "--output-len", "4"]
COUNTED = count()
PLAN = Sweep(
    model=("bloom-tiny",), engine=("stream",), offload=("none", "cpu"), weights=("as-released", "int8"),
    batch_size="auto", input_len=(8,), output_len=(4,), load_format="dummy", rounds=2,
)  # fmt: skip
LOADS = len([*PLAN.loads()])


class Stamped(FakeWorker):
    """A worker whose points differ, as measured ones do."""

    def _measure_point(self, session: Session, request: Measure) -> Measurement:
        point = super()._measure_point(session, request)
        return point.model_copy(update={"started_at": f"{next(COUNTED):09}"})


def measure(plan: Sweep, output: Path, worker: FakeWorker, shard: Shard | None = None) -> sweep.Outcome:
    """Run `zinfer sweep --resume --force`, or a shard, on `MACHINE` with `worker`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(options, "this_machine", lambda *_limits: MACHINE)
        patch.setattr(process, "Worker", lambda *words, debug, **settings: worker(*words, **settings))
        how = dict.fromkeys(("yes", "resume", "force"), True) | dict.fromkeys(("nvme_path", "gpu_memory"))
        return _measure(plan, output, False, how, shard)


def summary(records: Records) -> list[Any]:
    return sorted((repr(point.case), point.status, len(point.ttft_ms)) for point in records.points)


def part(output: Path, number: int, total: int) -> Path:
    return Shard(number, total).path(parts_path(output))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide records of a sweep in one process and in three shards."""
    folder = tmp_path_factory.mktemp("measured")
    measure(PLAN, folder / "alone.jsonl", Stamped(5))
    for shard in Shard.all(3):
        measure(PLAN, folder / "out.jsonl", Stamped(5), shard)
    return folder


@pytest.fixture
def alone(tmp_path: Path, measured: Path) -> Path:
    """Provide the records of the sweep in one process."""
    return Path(shutil.copy(measured / "alone.jsonl", tmp_path))


@pytest.fixture
def output(tmp_path: Path, measured: Path) -> Path:
    """Provide the path of a sweep whose three shards have ended."""
    for path in measured.glob("*.part"):
        shutil.copy(path, tmp_path)
    return tmp_path / "out.jsonl"


@pytest.mark.long
@pytest.mark.parametrize("total", [1, 2, LOADS, LOADS + 1])
def test_shards_write_what_one_process_writes(tmp_path: Path, alone: Path, total: int) -> None:
    """Batches found by doubling are included."""
    output = tmp_path / "out.jsonl"
    for shard in reversed(Shard.all(total)):
        measure(PLAN, output, Stamped(5), shard)
    outcome = merge(PLAN, output)
    ours, theirs = read(output), read(alone)
    assert len(theirs.points) > 3 * LOADS * PLAN.rounds
    assert summary(ours) == summary(theirs)
    headers = [[header.model_copy(update={"started_at": ""}) for header in each.headers] for each in (ours, theirs)]
    assert headers[0] == headers[1]
    assert outcome.points == [*ours.points]
    assert sweep.exit_code(PLAN, outcome.points) == 0
    before = output.read_bytes()
    merge(PLAN, output)
    assert output.read_bytes() == before


class Killed(BaseException):
    """Stands for the end of the process."""


def dying(monkeypatch: pytest.MonkeyPatch, path: Path, writes: int) -> None:
    """Let this process end at a write to `path`, after so many."""
    append = Store.append

    def write(store: Store, *records: Any) -> None:
        nonlocal writes
        if store.path == path:
            writes -= 1
            if writes < 0:
                raise Killed
        append(store, *records)

    monkeypatch.setattr(Store, "append", write)


@pytest.mark.long
def test_a_shard_that_was_killed_at_any_line_goes_on(
    tmp_path: Path, alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.fsync", lambda _descriptor: None)
    output = tmp_path / "out.jsonl"
    measure(PLAN, output, Stamped(5), Shard(1, 2))
    kills = 0
    while True:
        with pytest.MonkeyPatch.context() as patch:
            dying(patch, part(output, 2, 2), 5)
            try:
                measure(PLAN, output, Stamped(5), Shard(2, 2))
                break
            except Killed:
                kills += 1
        with pytest.raises(ShardError, match=r"1 of 2 shards have not ended: .*--shard 2/2$"):
            merge(PLAN, output)
        assert not output.exists()
    assert kills > 3
    merge(PLAN, output)
    assert summary(read(output)) == summary(read(alone))


def test_a_merge_that_was_killed_loses_and_doubles_nothing(output: Path, alone: Path) -> None:
    for writes in (0, 1):
        with pytest.MonkeyPatch.context() as patch:
            dying(patch, output, writes)
            with pytest.raises(Killed):
                merge(PLAN, output)
        assert len(read(output).headers) == writes
    merge(PLAN, output)
    assert summary(read(output)) == summary(read(alone))
    assert len(read(output).headers) == 1


def test_points_that_the_sweep_has_are_neither_measured_nor_merged_again(tmp_path: Path, alone: Path) -> None:
    before = alone.read_bytes()
    worker = Stamped(5)
    for shard in Shard.all(2):
        measure(PLAN, alone, worker, shard)
    assert worker.measured == []
    merge(PLAN, alone)
    assert alone.read_bytes() == before


def test_what_failed_is_tried_again_and_a_shard_that_was_interrupted_goes_on(tmp_path: Path) -> None:
    plan = PLAN.model_copy(update={"rounds": 1, "batch_size": (1, 2)})
    output, other = tmp_path / "out.jsonl", tmp_path / "other.jsonl"
    measure(plan, output, Stamped(5, {2: "timeout"}), Shard(1, 1))
    assert sweep.exit_code(plan, merge(plan, output).points) == 3
    with pytest.raises(SystemExit) as ended:
        measure(plan, other, Stamped(5, signal_at=(2, signal.SIGINT)), Shard(1, 1))
    assert ended.value.code == 130
    for path in (output, other):
        measure(plan, path, Stamped(5), Shard(1, 1))
        assert sweep.exit_code(plan, merge(plan, path).points) == 0
    assert sorted(point.status for point in read(output).points) == ["ok"] * 2 * LOADS + ["timeout"] * LOADS
    assert [point.status for point in read(other).points] == ["ok", "cancelled"] + ["ok"] * (2 * LOADS - 1)


def swap(output: Path) -> None:
    part(output, 1, 3).rename(output)
    part(output, 2, 3).rename(part(output, 1, 3))
    output.rename(part(output, 2, 3))


def change(output: Path, how: Callable[[list[bytes]], list[bytes]]) -> None:
    """Change the lines of a part."""
    path = part(output, 2, 3)
    path.write_bytes(b"".join(how(path.read_bytes().splitlines(True))))


def garble(output: Path) -> None:
    change(output, lambda lines: [*lines[:3], lines[3].replace(b'"ok"', b'"no"'), *lines[4:]])


def give(output: Path, **fields: Any) -> None:
    """Give those records of a part that have these fields other values."""
    records = [decode(line) for line in part(output, 2, 3).read_bytes().splitlines()]
    changed = [
        record.model_copy(update=fields) if fields.keys() <= type(record).model_fields.keys() else record
        for record in records
    ]
    change(output, lambda _: [encode(record) + b"\n" for record in changed])


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "swapped": (swap, r"00001-of-00003\.part is that of shard 2/3"),
    "cut": (partial(change, how=lambda lines: lines[:-1]), r"1 of 3 shards have not ended: .*--shard 2/3"),
    "garbled": (garble, r"1 of 3 shards have not ended: .*--shard 2/3"),
    "another sweep": (partial(give, recipe={"model": ["other"]}), r"00002-of-00003\.part is a part of another sweep"),
    "other weights": (partial(give, model_revision="other", stage=""), r"different weights of bloom-tiny"),
    "no start": (partial(change, how=lambda lines: lines[1:-1]), r"00002-of-00003\.part does not say which sweep"),
    "already there": (
        lambda output: measure(PLAN.model_copy(update={"rounds": 1}), output, Stamped(5)),
        r"out\.jsonl has points of another sweep: --force",
    ),
}


@pytest.mark.parametrize(("damage", "message"), FAULTS.values(), ids=FAULTS)
def test_parts_that_are_not_one_whole_sweep_are_refused(
    output: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(output)
    before = output.read_bytes() if output.exists() else None
    with pytest.raises(ShardError, match=message) as caught:
        merge(PLAN, output)
    assert caught.value.exit_code == 6
    assert "\n" not in str(caught.value)
    assert (output.read_bytes() if output.exists() else None) == before


def test_a_damaged_point_is_measured_again(output: Path, alone: Path) -> None:
    garble(output)
    worker = Stamped(5)
    measure(PLAN, output, worker, Shard(2, 3))
    assert len(worker.measured) == 1
    merge(PLAN, output)
    assert summary(read(output)) == summary(read(alone))


@pytest.mark.torch
def test_the_command_measures_in_shards_what_it_measures_alone(folder: Path) -> None:
    words = [*SMALL, "--repeats", "1", "--batch-size", "1,2", "-o", "out.jsonl"]
    ran(folder, *words[:-1], "alone.jsonl")
    assert ran(folder, *words, "--shard", "1/2").stdout.strip() == "out-00001-of-00002.part"
    ran(folder, *words, "--merge", code=6, says="run --shard 2/2")
    ran(folder, *words, "--shard", "1/2", code=2, says="--resume goes on with it")
    assert ran(folder, *words, "--shard", "1/2", "--resume").stderr.count("[recorded]") == 2
    ran(folder, *words, "--shard", "2/2")
    assert ran(folder, *words, "--merge").stdout.strip() == "out.jsonl"
    ours, theirs = read(folder / "out.jsonl"), read(folder / "alone.jsonl")
    assert [point.case for point in ours.points] == [point.case for point in theirs.points]
    assert {point.status for point in ours.points} == {"ok"}
    assert [header.recipe for header in ours.headers] == [header.recipe for header in theirs.headers]


@pytest.mark.torch
def test_a_shard_without_a_load_has_nothing_to_do(folder: Path) -> None:
    words = [*SMALL, "--repeats", "1", "--batch-size", "1", "--offload", "none", "-o", "out.jsonl"]
    for more in (("--shard", "1/2"), ("--shard", "2/2"), ("--merge",)):
        ran(folder, *words, *more)
    assert len(read(folder / "out.jsonl").points) == 1
