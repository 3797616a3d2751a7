"""Runs of studies: one record for all, written whole, read back equal, damage told, records of zinfer 0.1 read."""

import json
from pathlib import Path
from typing import get_args

import pytest

from tests.results import accuracy_run, case, codec_run, kept_point, point, reuse_run, routing_run
from zinfer.analysis.study import show
from zinfer.record import study
from zinfer.record.jsonl import SCHEMA_VERSION, StoreError, seal, unseal
from zinfer.record.store import Store, files, read
from zinfer.record.study import Coded, Deviation, Study, StudyName
from zinfer.system import machines

RESULTS = Path(__file__).parents[1] / "sweeps" / "results"
NAMES = get_args(StudyName)
RUNS = {
    "codec": codec_run("gaussian", "laplace"),
    "nothing": codec_run(),
    "accuracy": accuracy_run(),
    "routing": routing_run(),
    "reuse": reuse_run(kept_point(8, 1, 1), kept_point(16, 2, 1)),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "results" / "h100" / "some.jsonl"


def earlier(run: Study) -> list[bytes]:
    """Return a run of `zinfer study codec` as zinfer 0.1 wrote it: its header and its rows."""
    fields = json.loads(run.model_dump_json(exclude_none=True, exclude_defaults=True))
    del fields["study"]
    rows = fields.pop("rows")
    head = seal("study.codec", fields | {"lines": len(rows)})
    return [line + b"\n" for line in (head, *(seal("study.codec.rows", row) for row in rows))]


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_a_line_and_read_as_it_was_written(name: str, path: Path) -> None:
    run = RUNS[name]
    study.append(path, run)
    study.append(path, run)
    assert study.read(path, run.study) == ((run, run), ())
    assert study.last(path, run.study) == run
    kind, fields = unseal(path.read_bytes().splitlines()[1])
    assert (kind, fields["study"], fields["machine"]) == ("study", run.study, "h100")


@pytest.mark.parametrize("name", NAMES)
def test_committed_records_are_readable_and_shown(name: str) -> None:
    runs, damaged = study.read(RESULTS, name)
    assert (bool(runs), damaged) == (True, ())
    for run in runs:
        assert (RESULTS / run.machine).is_dir()
        assert run.started_at
        shown = show(run)
        assert shown.cells
        assert {len(row) for row in shown.cells} == {len(shown.columns)}


def test_committed_sweeps_are_readable_written_as_they_stand_and_of_their_machines() -> None:
    for file in files(RESULTS):
        if file.parent == RESULTS or file.stem in NAMES:  # the campaign's record belongs to no machine
            continue
        records, machine = read(file), machines.load(file.parent)
        assert records.points or records.requests
        assert (bool(records.headers), records.damaged) == (True, ())
        assert machine.source == "measured"
        assert {point.machine for point in records.points} <= {machine.name}
        for line in file.read_bytes().splitlines():
            fields = unseal(line)
            assert json.loads(line)["schema_version"] < SCHEMA_VERSION or seal(*fields) == line


def test_of_a_run_with_a_damaged_line_nothing_is_taken(path: Path) -> None:
    path.parent.mkdir(parents=True)
    lines = [line for names in ("ab", "cd", "e") for line in earlier(codec_run(*names))]
    for nth, (left, count) in {
        0: (["c", "e"], 3),  # a header: its points belong to nobody
        4: (["a", "e"], 3),  # a point, the one after it, and their header
        7: (["a", "c"], 2),
    }.items():
        changed = lines[nth].replace(b'"h100"', b'"h200"').replace(b'"drawn"', b'"dream"')
        path.write_bytes(b"".join([*lines[:nth], changed, *lines[nth + 1 :]]))
        runs, damaged = study.read(path, "codec")
        assert [run.of(Coded)[0].name for run in runs] == left
        assert len(damaged) == count
        assert damaged[0].line <= nth + 1 <= damaged[-1].line
    path.unlink()
    for name in "abc":  # as they are written today
        study.append(path, codec_run(name))
    path.write_bytes(path.read_bytes().replace(b'"name":"b"', b'"name":"x"'))
    runs, damaged = study.read(path, "codec")
    assert [run.of(Coded)[0].name for run in runs] == ["a", "c"]
    assert [damage.line for damage in damaged] == [2]


@pytest.mark.parametrize(
    ("name", "lack"), [("accuracy", "case"), ("accuracy", "text"), ("codec", "link"), ("routing", "num_experts")]
)
def test_what_a_study_is_shown_by_is_in_its_record(name: str, lack: str, path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_bytes(seal("study", json.loads(RUNS[name].model_dump_json(exclude={lack}))))
    runs, (damage,) = study.read(path, name)
    assert runs == ()
    assert lack in damage.reason


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"machine": "m"}', '{"checksum": "0"}', "a\nb\n", '{"runs": 3}', '{"rows": {}}']
)
@pytest.mark.parametrize("name", ["codec", "accuracy", "reuse"])
def test_other_files_are_refused_and_left_alone(text: str, name: str, path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert study.read(path, name).runs == ()
    with pytest.raises(StoreError, match=rf"some.jsonl holds no record of `zinfer study {name}`"):
        study.last(path, name)
    if text not in ("", "{"):  # the second may be the first line ever, torn
        with pytest.raises(StoreError, match="name another"):
            study.append(path, codec_run("a"))
        assert path.read_text() == text


def test_another_study_is_no_run(path: Path) -> None:
    study.append(path, codec_run("a"))
    study.append(path, accuracy_run())
    assert study.read(path, "reuse") == ((), ())
    assert study.last(path, "accuracy").of(Deviation)
    with pytest.raises(StoreError, match="holds no record of `zinfer study reuse`"):
        study.last(path.parent, "reuse")
    with Store(path.with_name("sweep.jsonl")) as store:
        store.append(point(case(1)))
    records = read(path.parent)
    assert (len(records.points), records.damaged) == (1, ()), "beside sweeps, and no point of them"
