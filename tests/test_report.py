"""Report: values, structure and escaping of its document in both forms."""

import json
import re
from base64 import b64decode
from contextlib import chdir
from html import unescape
from html.parser import HTMLParser
from math import ceil
from pathlib import Path
from typing import Any

import pytest

from tests import invoke, mentions
from tests.results import accuracy_run, case, kept_point, plain, point, request_point, reuse_run, sweep
from zinfer.analysis.rates import rate_text
from zinfer.core.machine import Machine
from zinfer.core.units import duration, figures
from zinfer.record import study
from zinfer.record.measurement import Measurement
from zinfer.record.store import Header, Store
from zinfer.report.document import Row, Table
from zinfer.system.machines import load

pytestmark = pytest.mark.long

MACHINE = Machine(
    name="h100", source="measured", gpu_name="H100 80GB", gpu_count=1, gpu_bytes=79 << 30, h2d_bandwidth=54.6e9
)
WHOLE = load("h100-80gb").model_copy(update={"name": "h100", "host_bytes": 128 << 30, "host_bandwidth": 78e9})


def store(path: Path, points: list[Measurement], machine: Machine | None = None) -> None:
    with Store(path) as file:
        recipe = {"model": ["bloom-176b"], "layers": [14], "batch_size": "auto*8", "dtype": None, "options": {}}
        file.append(Header(machine="h100", recipe=recipe | {"engine": ["stream", "deepspeed"], "repeats": 3}))
        file.append(*points)
    if machine is not None:
        (path.parent / "machine.json").write_text(json.dumps(machine.model_dump()))


class Report:
    """Report as HTML and as plain text."""

    def __init__(self, results: Path, *options: object) -> None:
        output = results.parent / "plots" / "report.html"
        done = invoke("report", results, *options, "-o", output)
        assert (done.exit_code, done.stdout) == (0, f"{output}\n"), done.output
        self.page = output.read_text()
        self.text = plain(self.page)
        _, *parts = re.split(r"^## \d+\. +(.+)$", self.text, flags=re.MULTILINE)
        self.sections, self._contents = parts[::2], dict(zip(parts[::2], parts[1::2], strict=True))

    def rows(self, section: str, *heads: str) -> list[dict[str, str]]:
        """Return a section's first table with columns `heads`, by column."""
        for table in re.findall(r"(?:^\|.*\n+)+", self._contents[section], flags=re.MULTILINE):
            lines = [re.split(r" ?\| ?", line.strip())[1:-1] for line in table.split("\n") if line]
            if set(heads) <= set(lines[0]):
                return [dict(zip(lines[0], line, strict=True)) for line in lines[1:]]
        return []

    @property
    def summary(self) -> dict[str, str]:
        (row,) = self.rows("Summary", "model", "machine", "configuration", "tok/s", "TTFT", "evidence", "verdict")
        return row


def described(folder: Path) -> Path:
    """Return the results of a sweep on a known machine."""
    store(folder / "results" / "h100" / "bloom.jsonl", sweep(), WHOLE)
    return folder / "results"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Provide the report on `described`, for tests that only read it."""
    folder = tmp_path_factory.mktemp("described")
    with chdir(folder):
        return Report(described(folder))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where no recipe asks anything


class Outline(HTMLParser):
    """Ids of elements, and the text of headings."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids, self.open, self.headings = list[str](), list[str](), list[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids += [str(value) for name, value in attrs if name == "id"]
        if tag not in ("meta", "link", "br", "img"):
            self.open.append(tag)
        self.headings += [""] * (tag == "h2")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["h2"]:
            self.headings[-1] += data


def drawings(html: str) -> list[tuple[str, bytes]]:
    """Return the description and content of each figure of a page."""
    figures = re.findall(r'<img alt="([^"]+)" src="data:image/svg\+xml;base64,([^"]+)">', html)
    return [(unescape(words), b64decode(content)) for words, content in figures]


def test_rows_say_what_was_measured_over_the_plan(tmp_path: Path, report: Report) -> None:
    planned = {"step_ms": 0.95 * (point(case(8), 1.0).tpot_ms or 0), "host_bytes": 1e9, "ttft_ms": None}
    measured = point(case(8), 1.0, host_peak_bytes=3_000_000_000, predicted=planned)
    store(tmp_path / "results" / "h100" / "a.jsonl", [measured])
    (row,) = Report(tmp_path / "results").rows("Results", "over the plan")
    assert row["over the plan"] == "step 1.05x, host 3.00x (!)"
    assert "over the plan" not in report.rows("Results", "batch")[0], "an empty column"
    assert "zinfer plan --model MODEL --machine all --calibrate" in report.text


def test_the_summary_has_a_row_for_each_workload_then_decision_risks_and_signature(report: Report) -> None:
    row = report.summary
    assert row["model"] == "bloom-176b, 14 of 70 layers, 512 in / 32 out"
    assert (row["machine"], row["configuration"]) == ("h100", "stream none, batch 8")
    best = max(sweep(), key=lambda measurement: measurement.output_tok_s or 0)
    assert row["tok/s"].startswith(figures(best.output_tok_s or 0))
    assert mentions(row["evidence"], "single run", "3 repeats")
    assert "fastest of 5 configurations" in row["verdict"]
    order = [report.text.index(part) for part in ("### Decision", "zinfer batch", "### Risks", "## 2.")]
    assert order == sorted(order)
    risks = report.text[order[2] : order[3]]
    assert all(risk in risks for risk in ("3 loads", "dummy", "slice"))


def test_nothing_is_recommended_that_had_no_alternative(tmp_path: Path) -> None:
    """A single configuration is no choice, whatever else failed. Only others short of memory count."""
    alone, size = [point(case(size, layers=None)) for size in (1, 2)], case(2, "deepspeed", layers=None)
    for nth, (others, verdict) in enumerate((
        ([], "no alternative measured"),
        ([point(size, status="crashed")], "no alternative measured"),
        ([point(size, status="oom_gpu")], "the only one of 2 configurations that fits"),
        ([point(size, 9)], "fastest of 2 configurations"),
    )):  # fmt: skip
        store(tmp_path / str(nth) / "results" / "a.jsonl", [*alone, *others])
        document = Report(tmp_path / str(nth) / "results")
        assert document.summary["verdict"] == verdict
        summary = document.text[: document.text.index("### Risks")]
        assert ("zinfer batch" in summary) is ("no alternative" not in verdict), verdict
        assert ("<figure>" in document.page) is ("fastest" in verdict), "a figure compares"


@pytest.mark.parametrize(("loads", "words"), [(1, "single run"), (2, "2 loads"), (3, "3 loads")])
def test_the_evidence_counts_the_loads_of_the_model(tmp_path: Path, loads: int, words: str) -> None:
    for nth in range(loads):  # of one sweep or of several
        store(tmp_path / "results" / f"{nth}.jsonl", [point(case(8, layers=None), 1.3 + 0.01 * nth)])
    document = Report(tmp_path / "results")
    assert words in document.summary["evidence"]
    assert ("Fewer than 3 loads" in document.text) is (loads < 3)


def test_loads_of_requests_are_in_the_summary(tmp_path: Path) -> None:
    with Store(tmp_path / "results" / "a.jsonl") as file:
        file.append(request_point())
    document = Report(tmp_path / "results")
    assert (document.summary["verdict"], document.summary["evidence"]) == ("no alternative measured", "1 load")
    assert {"p50", "p90", "p99"} <= document.rows("Results", "time")[0].keys()


def test_percentiles_are_of_the_samples_and_left_out_where_these_are_too_few(tmp_path: Path) -> None:
    few, many = point(case(8, layers=None)), point(case(8, "deepspeed", layers=None, output_len=32), repeats=12)
    store(tmp_path / "results" / "a.jsonl", [few, many])
    rows = Report(tmp_path / "results").rows("Results", "TTFT p50", "TPOT p99")
    (less,) = (row for row in rows if row["configuration"].startswith("stream"))
    (more,) = (row for row in rows if row["configuration"].startswith("deepspeed"))
    steps = sorted(step for repeat in many.step_ms for step in repeat)
    assert more["TPOT p50"] == duration(steps[ceil(0.5 * len(steps)) - 1] / 1e3)
    assert more["TPOT p99"] == duration(steps[ceil(0.99 * len(steps)) - 1] / 1e3)
    assert more["TTFT p90"] == duration(sorted(many.ttft_ms)[10] / 1e3)
    assert less["TTFT p50"] == duration(sorted(few.ttft_ms)[1] / 1e3)
    assert (less["TTFT p90"], less["TPOT p99"]) == ("", ""), "3 repeats, 93 steps"
    assert all("TTFT p99" not in row for row in rows), "a column without a value"


def test_each_failure_is_in_a_table(report: Report) -> None:
    failed = report.rows("Results", "message")
    assert {row["outcome"] for row in failed} == {"oom_gpu", "timeout"}
    (late,) = (row for row in failed if row["outcome"] == "timeout")
    assert (late["batch"], late["in"], late["message"]) == ("32", "decode", "no step for 600 s")
    tops = {row["configuration"]: row for row in report.rows("Results", "OOM at")}
    assert (tops["deepspeed cpu"]["OOM at"], tops["accelerate cpu"]["OOM at"]) == ("64", "")


def test_a_price_gives_costs(tmp_path: Path, report: Report) -> None:
    assert "USD" not in report.text
    priced = point(case(8, layers=None), repeats=1, gpu={"energy_j": 2560.0})
    usd = 1e6 / (priced.output_tok_s or 0) / 3600 * 3
    lossy = point(case(8, layers=None, options=(("kv_cache_dtype", "int8"),)), 0.5, repeats=1)
    store(tmp_path / "results" / "a.jsonl", [priced, lossy, point(case(1, "deepspeed", layers=None), repeats=1)])
    document = Report(tmp_path / "results", "--gpu-hour-usd", 3)
    rows = document.rows("Results", "USD a million tokens")
    assert (rows[0]["USD a million tokens"], rows[0]["J a token"]) == (f"{usd:,.2f}", "10")
    assert (rows[0]["energy from"], rows[1]["energy from"]) == ("NVML's energy counter of the GPU", "not read")
    assert [row["configuration"].endswith("(lossy)") for row in rows] == [False, False, True], "ranked apart"
    assert mentions(document.text, "Cost", f"{usd:,.2f} USD a million", "USD a day")
    assert "an hour of a GPU 3 USD" in document.text


def test_the_evidence_has_versions_and_the_command(tmp_path: Path, report: Report) -> None:
    gpu = {"throttle_reasons": ["SwPowerCap"], "sm_clock_mhz_min": 1350, "sm_clock_mhz_max": 1980, "power_w_mean": 256}
    store(tmp_path / "results" / "a.jsonl", [point(case(1), repeats=1, gpu=gpu)])
    assert "clocks back" in Report(tmp_path / "results").text
    words = "zinfer sweep --model bloom-176b --engine stream --offload none --dtype bfloat16 --batch-size 8"
    assert words in report.text
    assert mentions(report.text, "torch 2.11.0")


def test_studies_are_reported_if_measured(tmp_path: Path, report: Report) -> None:
    assert "Studies" not in report.sections
    results = described(tmp_path)
    folder = results / "h100"
    study.append(folder / "accuracy.jsonl", accuracy_run())
    study.append(folder / "reuse.jsonl", reuse_run(kept_point(64, 1, 1)))
    study.append(folder / "reuse.jsonl", reuse_run(kept_point(64, 1, 2), kept_point(512, 8, 2)))
    document = Report(results)
    assert "| kv_cache_dtype=int8 | own | 5 | 2% | 3% | 0.002 | 0.003 | 80.00% |  | 50% of 2 | 1 |" in document.text
    assert "| 512 | 1.0 MB | 8 ms | 2 ms | 4.00x |" in document.text
    assert "| 64 | 1.0 MB | 1 ms | 1 ms |" not in document.text, "the last run counts"
    (folder / "reuse.jsonl").write_text("{}")
    assert mentions(Report(results).text, "reuse.jsonl, line 1:", "machine")


def test_lossy_settings_stand_apart_with_the_study_of_their_loss(tmp_path: Path) -> None:
    whole = case(8, model="m", layers=None, load_format="safetensors")
    int8 = whole.model_copy(update={"options": (("kv_cache_dtype", "int8"),)})
    folder = tmp_path / "results" / "h100"
    store(folder / "a.jsonl", [point(int8, 0.5), point(whole, 0.7)])
    document = Report(tmp_path / "results")
    assert document.summary["configuration"] == "stream cpu, batch 8"
    assert "lossy ones apart" in document.summary["verdict"]
    assert "`zinfer study accuracy` tells how far" in document.text
    names = [row["configuration"] for row in document.rows("Results", "TTFT p50")]
    assert names == ["stream cpu", "stream cpu kv_cache_dtype=int8 (lossy)"]


def test_a_model_can_be_reported_alone(tmp_path: Path) -> None:
    store(tmp_path / "results" / "a.jsonl", [point(case(1)), point(case(1, model="opt-30b"))])
    document = Report(tmp_path / "results", "--model", "opt-30b")
    assert document.summary["model"].split(",")[0] == "opt-30b"
    assert "bloom" not in document.text
    done = invoke("report", tmp_path / "results", "-m", "nobody", "-o", tmp_path / "report.html")
    assert (done.exit_code, "nobody" in done.stderr) == (4, True)


KINDS = {
    "one point": [point(case(1))],
    "another machine": [point(case(1), machine="elsewhere")],
    "one repeat": [point(case(1), repeats=1), point(case(1, output_len=1), repeats=1)],
    "all oom": [point(case(size), status="oom_gpu", stage="load", error="CUDA out of memory") for size in (1, 2)],
    "host oom": [point(case(1), status="oom_host", stage="load")],
    "unknown model": [point(case(1, model="nobody/knows-it"))],
    "whole": [point(case(1, layers=None, offload="nvme", engine="deepspeed", load_format="safetensors"))],
    "unknowns": [point(case(4, options=(("gpus", 2),)), gpu_peak_bytes=None, link_bandwidth=None)],
    "one token": [point(case(1, engine=engine, output_len=1)) for engine in ("stream", "deepspeed")],
}


@pytest.mark.parametrize(
    ("kind", "machine"),
    [
        *(pytest.param(kind, WHOLE, id=kind) for kind in KINDS),
        *(pytest.param(kind, MACHINE, id=f"{kind}, little known") for kind in ("one point", "all oom")),
        *(pytest.param(kind, None, id=f"{kind}, no machine") for kind in ("one point", "all oom", "unknowns")),
    ],
)
def test_any_results_make_a_report_without_empty_sections(tmp_path: Path, kind: str, machine: Machine | None) -> None:
    points = KINDS[kind]
    store(tmp_path / "results" / "h100" / "a.jsonl", points, machine)
    document = Report(tmp_path / "results")
    assert document.sections[:2] == ["Summary", "Results"]
    headings = Outline(document.page).headings
    assert [heading.split(" ", 1)[1] for heading in headings] == document.sections
    assert not re.search(r"^## .*\n+(?=## |\Z)", document.text, flags=re.MULTILINE)
    assert ("no point succeeded" in document.text) is all(not point.usable for point in points)
    usable = any(point.usable for point in points)
    described = machine is not None and kind != "another machine"
    assert ("not described" in document.text) is (usable and not described)
    assert not re.search(r"\bNone\b(?! known)|\bnan\b|\binf\b", document.text.replace("stream none", "")), document.text


def test_failures_and_damage_are_part_of_the_report(tmp_path: Path) -> None:
    results = tmp_path / "results"
    store(results / "a.jsonl", [point(case(1, model="a|b"), status="crashed", error="x | <b>\n```\n# y")])
    with (results / "a.jsonl").open("ab") as stream:
        stream.write(b'{"torn')
    text = Report(results).text
    assert mentions(text, "no point succeeded", "crashed", "batch 1")
    assert "x | <b> ``` # y" in text
    assert "### a|b, 14 of 70 layers" in text
    assert mentions(text, "a.jsonl, line 3")


def test_the_figure_has_words_and_is_that_of_plot(tmp_path: Path, report: Report) -> None:
    ((words, shown),) = drawings(report.page)
    for measurement in sweep():
        label = f"batch {measurement.case.workload.batch_size}, {rate_text(measurement)} tok/s"
        assert (label in words) is measurement.usable
    assert invoke("plot", described(tmp_path), "--format", "svg").exit_code == 0
    assert shown == (tmp_path / "plots" / "h100" / "bloom-latency.svg").read_bytes()


def test_a_whole_model_has_one_figure_and_its_slices_none(tmp_path: Path) -> None:
    def both(**changes: Any) -> list[Measurement]:
        return [point(case(8, engine, **changes), machine=name) for engine in ("stream", "deepspeed")
                for name in ("h100", "h200")]  # fmt: skip

    whole, slices, other = both(layers=None), both(layers=4), both(layers=4, model="opt-30b")
    for nth, (points, number) in enumerate(((whole, 1), (whole + slices + other, 1), (slices + other, 2))):
        store(tmp_path / str(nth) / "results" / "a.jsonl", points)
        assert len(drawings(Report(tmp_path / str(nth) / "results").page)) == number


def test_columns_of_numbers_are_known_and_empty_ones_are_left_out() -> None:
    assert Table("", ("a", "#b"), ()).heads == (("a", False), ("b", True))
    rows = (Row(("a", "", "1")), Row(("b", "", "")))
    assert Table("", ("name", "#none", "#some"), rows).filled() == Table(
        "", ("name", "#some"), (Row(("a", "1")), Row(("b", "")))
    )


@pytest.mark.parametrize("name", ["results", "nowhere", "empty.jsonl"])
def test_no_results_are_an_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "empty.jsonl").touch()
    done = invoke("report", tmp_path / name, "-o", tmp_path / "report.html")
    assert (done.exit_code, done.stderr.count("\n")) == (4, 1)
    assert mentions(done.stderr, "nowhere does not exist" if name == "nowhere" else "no results in")
    assert not (tmp_path / "report.html").exists()


def test_the_page_needs_nothing_else_and_refers_to_what_it_has(report: Report) -> None:
    html, ids = re.sub('data:image/svg[^"]*', "data:,", report.page), Outline(report.page).ids
    assert not re.search(r"""(src|href)=["'](?!#|data:,)|url\((?!#)|@import""", html)
    assert "default-src 'none'" in html
    assert len(report.page) < 400_000
    assert len(ids) == len(set(ids))
    assert set(re.findall(r"""(?:href="|url\()#([^")]+)""", report.page)) <= set(ids)


def test_equal_results_give_equal_bytes(tmp_path: Path, report: Report) -> None:
    assert Report(described(tmp_path)).page == report.page
