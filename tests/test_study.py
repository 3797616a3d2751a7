"""Runs of studies: written whole, read back equal, damage told, records of earlier versions read."""

import json
from pathlib import Path

import pytest

from tests.results import accuracy_run, case, codec_run, kept_point, point, reuse_run
from zinfer.record import study
from zinfer.record.accuracy import AccuracyRecord
from zinfer.record.codec import CodecRecord
from zinfer.record.jsonl import StoreError, seal, unseal
from zinfer.record.prefix_reuse import Run
from zinfer.record.routing import Hits, RoutingRecord
from zinfer.record.store import Store, files, read
from zinfer.record.study import Study, StudyError

RESULTS = Path(__file__).parents[1] / "sweeps" / "results"
RUNS: dict[str, Study] = {
    "codec": codec_run("gaussian", "laplace"),
    "nothing": codec_run(),
    "accuracy": accuracy_run(),
    "routing": RoutingRecord(
        machine="h100",
        device="H100",
        model="m",
        told="drawn",
        text="book",
        tokens=9,
        num_layers=2,
        num_experts=8,
        experts_per_token=2,
        rows=(Hits(policy="lru", experts=4, hits=0.25), Hits(policy="lfu", experts=4, hits=0.5)),
    ),
    "reuse": reuse_run(kept_point(8, 1, 1), kept_point(16, 2, 1)),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "results" / "h100" / "some.jsonl"


@pytest.mark.parametrize("name", RUNS)
def test_runs_are_read_as_they_were_written(name: str, path: Path) -> None:
    run = RUNS[name]
    study.append(path, run)
    study.append(path, run)
    assert study.read(path, type(run)) == ((run, run), ())
    assert study.last(path, type(run)) == run
    assert study.holds(path, type(run))
    lines = path.read_bytes().splitlines()
    assert len(lines) == 2 * (1 + sum(len(getattr(run, points)) for points in run.POINTS))
    kind, fields = unseal(lines[0])
    assert kind == f"study.{run.KIND}"
    assert fields["machine"] == run.machine
    assert not fields.keys() & set(run.POINTS)


@pytest.mark.parametrize("name", RUNS)
def test_a_document_of_an_earlier_version_is_read_and_continued(name: str, tmp_path: Path) -> None:
    run = RUNS[name]
    document = json.loads(run.model_dump_json())
    if isinstance(run, Run):
        own = {key: value for key, value in document.items() if key not in ("machine", "device")}
        document = {"machine": run.machine, "device": run.device, "runs": [own, own]}
    path = tmp_path / f"{run.KIND}.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    earlier = study.read(path, type(run)).runs
    assert earlier == (run,) * len(document.get("runs", [1]))
    study.append(path, run)
    assert study.read(path, type(run)) == ((*earlier, run), ())


@pytest.mark.parametrize("kind", [CodecRecord, AccuracyRecord, RoutingRecord, Run])
def test_committed_records_are_readable(kind: type[Study]) -> None:
    found = study.files(RESULTS, kind)
    assert found
    for file in found:
        runs, damaged = study.read(file, kind)
        assert runs
        assert damaged == ()
        assert all(run.machine == file.parent.name and run.started_at for run in runs)
        assert all(any(getattr(run, points) for points in run.POINTS) for run in runs)


def test_committed_sweeps_are_readable_and_written_as_they_stand(tmp_path: Path) -> None:
    studies = {f"{kind}.jsonl" for kind in ("codec", "reuse", "accuracy", "routing")}
    for file in [one for one in files(RESULTS) if one.parent != RESULTS]:  # the campaign's record belongs to no machine
        if file.name in studies:
            continue
        records = read(file)
        assert records.points or records.requests
        assert records.headers
        assert records.damaged == ()
        for line in file.read_bytes().splitlines():
            assert seal(*unseal(line)) == line


def test_of_a_run_with_a_damaged_line_nothing_is_taken(path: Path) -> None:
    for names in (("a", "b"), ("c", "d"), ("e",)):
        study.append(path, codec_run(*names))
    lines = path.read_bytes().splitlines(keepends=True)
    for nth, (left, told) in {
        0: (["c", "e"], 3),  # a header: its points belong to nobody
        4: (["a", "e"], 3),  # a point, the one after it, and their header
        7: (["a", "c"], 2),
    }.items():
        changed = lines[nth].replace(b'"h100"', b'"h200"').replace(b'"drawn"', b'"dream"')
        path.write_bytes(b"".join([*lines[:nth], changed, *lines[nth + 1 :]]))
        runs, damaged = study.read(path, CodecRecord)
        assert [run.rows[0].name for run in runs] == left
        assert len(damaged) == told
        assert damaged[0].line <= nth + 1 <= damaged[-1].line


def test_a_torn_end_is_cut_off_by_the_next_run(path: Path) -> None:
    study.append(path, codec_run("a"))
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"torn')
    assert study.read(path, CodecRecord).runs == (codec_run("a"),)
    study.append(path, codec_run("b"))
    assert path.read_bytes().startswith(whole)
    assert study.read(path, CodecRecord) == ((codec_run("a"), codec_run("b")), ())


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"machine": "m"}', '{"checksum": "0"}', "a\nb\n"])
@pytest.mark.parametrize("kind", [CodecRecord, AccuracyRecord, Run])
def test_other_files_are_refused_and_left_alone(text: str, kind: type[Study], path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(StudyError, match=rf"some.jsonl is no record of `zinfer {kind.KIND}`"):
        study.read(path, kind)
    assert not study.holds(path, kind)
    if text not in ("", "{"):  # the second may be the first line ever, torn
        with pytest.raises(StoreError, match="is not a record of `zinfer codec`"):
            study.append(path, codec_run("a"))
        assert path.read_text() == text


def test_another_kind_of_study_is_no_run(path: Path) -> None:
    study.append(path, codec_run("a"))
    with pytest.raises(StudyError, match="no record of `zinfer reuse`"):
        study.read(path, Run)
    with pytest.raises(StudyError, match="holds no record of `zinfer reuse`"):
        study.last(path.parent, Run)


def test_studies_lie_beside_sweeps_without_being_points_of_them(path: Path) -> None:
    study.append(path, codec_run("a"))
    with Store.open(path.with_name("sweep.jsonl")) as store:
        store.append(point(case(1)))
    records = read(path.parent)
    assert len(records.points) == 1
    assert records.damaged == ()
