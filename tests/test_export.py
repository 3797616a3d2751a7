"""Export: one row per point, one column per field, empty cells for the unknown, and no formulas for spreadsheets."""

import csv
import io
import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import pytest

from tests import invoke
from tests.results import case, point, sweep
from zinfer.core.case import Case, Workload
from zinfer.core.value import group_by
from zinfer.record import export as exporting
from zinfer.record.export import Row, to_csv, to_json
from zinfer.record.measurement import Effective, Measurement
from zinfer.record.store import Records, Store

ERROR = "CUDA out of memory | tried\n<b>2 GiB</b>"
CODED = case(8, options=(("weight_codec", "lossless"),))
POINTS = [
    ("a.jsonl", point(CODED, predicted={"step_ms": 1200.5, "ttft_ms": None})),
    ("a.jsonl", point(case(64), status="oom_gpu", stage="prefill", error=ERROR, versions={"zinfer": "0.1.0"})),
]


export = partial(invoke, "export")


def table(points: Iterable[tuple[str, Measurement]]) -> list[Row]:
    """Return the rows of points with their files."""
    files = group_by(points, lambda pair: pair[0]).items()
    return exporting.table((file, Records(tuple(measured for _, measured in pairs))) for file, pairs in files)


def read_csv(content: bytes) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(content.decode(), newline="")))


@pytest.fixture
def results(tmp_path: Path) -> Path:
    with Store(tmp_path / "results" / "h100" / "bloom.jsonl") as store:
        store.append(*sweep())
    return tmp_path / "results"


def test_every_field_has_a_column() -> None:
    assert {*Case.model_fields, *Workload.model_fields} - {"workload"} <= table(POINTS)[0].keys()
    assert {f"effective_{name}" for name in Effective.model_fields} <= table(POINTS)[0].keys()
    elsewhere = "case ttft_ms step_ms effective link_bandwidth all_links_bandwidth gpu versions predicted timeline"
    assert set(Measurement.model_fields) - {*elsewhere.split()} <= table(POINTS)[0].keys()
    last = ["predicted_step_ms", "predicted_ttft_ms", "version_torch", "version_zinfer"]
    assert [*table(POINTS)[1]][-4:] == [*table(POINTS)[0]][-4:] == last


def test_the_rate_of_a_load_is_empty_where_its_bytes_are_not_recorded() -> None:
    sizes = {"a": 50_000_000_000, "b": None}
    rows = table([(name, point(case(1), load_s=20.0, load_bytes=size)) for name, size in sizes.items()])
    loads = [(row["load_bytes"], row["load_bandwidth_bytes_s"]) for row in rows]
    assert loads == [(50_000_000_000, 2.5e9), (None, None)]


def test_values_are_those_of_the_record() -> None:
    ours = POINTS[0][1]
    row, _ = json.loads(to_json(table(POINTS)))
    assert ours.output_tok_s is not None
    assert ours.effective is not None
    for name in ("output_tok_s", "decode_tok_s", "prefill_tok_s", "tpot_ms", "link_share"):
        assert row[name] == getattr(ours, name)
    assert row["h2d_bandwidth_bytes_s"] == ours.h2d_bandwidth
    assert row["ttft_ms"] == pytest.approx(sum(ours.ttft_ms) / 3)
    assert row["e2e_ms"] == pytest.approx(8 * 32 / ours.output_tok_s * 1e3, rel=1e-3)
    assert 0 < row["output_tok_s_half_width"] < row["output_tok_s"]
    assert 0 < row["tpot_ms_half_width"] < row["tpot_ms"]
    assert row["options"] == '{"weight_codec": "lossless"}'
    assert (row["batch_size"], row["input_len"], row["layers"], row["repeats"]) == (8, 512, 14, 3)
    assert row["effective_streamed_bytes_per_step"] == ours.effective.streamed_bytes_per_step
    assert (row["predicted_step_ms"], row["predicted_ttft_ms"], row["version_torch"]) == (1200.5, None, "2.11.0")


def test_a_failure_is_a_row_of_empty_cells_never_of_zeros() -> None:
    for rows in (read_csv(to_csv(table(POINTS))), json.loads(to_json(table(POINTS)))):
        failed = rows[1]
        assert (failed["status"], failed["stage"], failed["error"]) == ("oom_gpu", "prefill", ERROR)
        for column in ("output_tok_s", "ttft_ms", "tpot_ms_half_width", "gpu_peak_bytes", "repeats", "options",
                       "effective_gpu_weight_bytes", "version_torch", "predicted_step_ms"):  # fmt: skip
            assert failed[column] in ("", None), column


def test_rates_of_an_unusable_point_are_left_out() -> None:
    idle = point(case(8)).model_copy(update={"status": "offload_not_effective"})
    (row,) = json.loads(to_json(table([("a", idle)])))
    assert (row["status"], row["output_tok_s"], row["ttft_ms"], row["repeats"]) == (idle.status, None, None, 3)


def test_the_last_point_of_equal_cases_counts() -> None:
    once, again = point(case(8), status="crashed"), point(case(8))
    rows = table([("a", once), ("a", again), ("b", once)])
    assert [(row["file"], row["status"]) for row in rows] == [("a", "ok"), ("b", "crashed")]


def test_numbers_in_csv_are_exact() -> None:
    row = read_csv(to_csv(table(POINTS)))[0]
    assert float(row["output_tok_s"]) == POINTS[0][1].output_tok_s
    assert row["gpu_peak_bytes"] == str(20 << 30)
    assert to_csv(table(POINTS)).count(b"\r") == 0
    below = point(case(1)).model_copy(update={"load_s": -1.5})
    assert read_csv(to_csv(table([("a", below)])))[0]["load_s"] == "-1.5", "no start of a formula"


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "  =HYPERLINK(1)", "＝1", "\n=1"])
def test_no_cell_of_csv_starts_a_formula(text: str) -> None:
    nasty = point(case(1, model=text), status="crashed", error=text, machine=text, versions={text: text})
    row = read_csv(to_csv(table([(text, nasty)])))[0]
    for column in ("file", "model", "error", "machine"):
        assert row[column] == "'" + text.replace("\r", "\n")
    assert row["version_" + text.replace("\r", "\n")].startswith("'")
    assert json.loads(to_json(table([(text, nasty)])))[0]["error"] == text, "JSON runs nowhere and stays as it is"


def test_the_command_writes_all_points_of_a_folder_once(results: Path) -> None:
    file = results / "h100" / "bloom.jsonl"
    for words in ([results], [file, file], [results, file]):
        done = export(*words)
        assert done.exit_code == 0, done.output
        rows = read_csv(done.stdout_bytes)
        assert len(rows) == len(sweep())
        assert {row["status"] for row in rows} == {"ok", "oom_gpu", "timeout"}
        assert {row["file"] for row in rows} == {str(file)}


def test_the_ending_of_the_output_names_the_format(results: Path, tmp_path: Path) -> None:
    for ending, start in (("csv", b"file,machine,"), ("json", b"[\n {"), ("txt", b"file,machine,")):
        output = tmp_path / "new" / f"all.{ending}"
        done = export(results, "-o", output)
        assert (done.exit_code, done.stdout) == (0, f"{output}\n"), done.output
        assert output.read_bytes().startswith(start)
    done = export(results, "-o", tmp_path / "all.csv", "--format", "json")
    assert len(json.loads((tmp_path / "all.csv").read_bytes())) == len(sweep())
    file = results / "h100" / "bloom.jsonl"
    before = file.read_bytes()
    for output, message in ((tmp_path / "x.xlsx", ".csv"), (file, "is one of the result files")):
        refused = export(results, "-o", output)
        assert (refused.exit_code, message in refused.stderr) == (2, True)
    assert not (tmp_path / "x.xlsx").exists()
    assert file.read_bytes() == before


def test_nothing_to_export_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name, code, message in (("nowhere.jsonl", 2, "does not exist"), ("empty", 4, "measure first")):
        done = export(tmp_path / name)
        assert (done.exit_code, done.stdout) == (code, "")
        assert message in done.stderr
