"""Report: it answers first, keeps failures, names missing data, and escapes all markup in records."""

import json
import re
from contextlib import chdir
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import pytest
from click.testing import CliRunner, Result

from tests import mentions
from tests.results import accuracy_run, case, kept_point, point, reuse_run, sweep, traced
from zinfer.analysis.study import deviations
from zinfer.cli import cli
from zinfer.core.machine import Machine
from zinfer.record import study
from zinfer.record.measurement import Measurement
from zinfer.record.store import Header, Store
from zinfer.report.document import Details, Document, Row, Section, Table, Text
from zinfer.report.markdown import cell, fenced, markdown, prose
from zinfer.report.measured import rated
from zinfer.report.page import CONTRAST, DARK, LIGHT, TEXT_CONTRAST, contrast, readable, shell
from zinfer.report.plot.style import PALETTE
from zinfer.system.machines import load

pytestmark = pytest.mark.drawing

HOSTILE = '"><script>alert(1)</script><img src=http://example.com/x onerror=alert(1)> | `code` [a](b) # *b*'
SECTIONS = (
    "Answer", "Question and workload", "System under test", "Memory plan", "Results", "Does offload pay?", "Bottleneck",
    "Sizing and cost", "What-if machines", "Comparison", "Validity", "How to reproduce",
)  # fmt: skip
MACHINE = Machine(
    name="h100", source="measured", gpu_name="H100 80GB", gpu_count=1, gpu_bytes=79 << 30, h2d_bandwidth=54.6e9
)
WHOLE = load("h100-80gb").model_copy(update={"name": "h100", "host_bytes": 128 << 30, "host_bandwidth": 78e9})


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(cli, list(map(str, arguments)))


def store(path: Path, points: list[Measurement], machine: Machine | None = None) -> None:
    with Store.open(path) as file:
        recipe = {"model": ["bloom-176b"], "layers": [14], "batch_size": "auto*8", "dtype": None, "options": {}}
        file.append_header(Header(machine="h100", recipe=recipe | {"engine": ["stream", "deepspeed"], "repeats": 3}))
        for one in points:
            file.append(one)
    if machine is not None:
        (path.parent / "machine.json").write_text(json.dumps(machine.model_dump()))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where no recipe asks anything


@pytest.fixture
def results(tmp_path: Path) -> Path:
    store(tmp_path / "results" / "h100" / "bloom.jsonl", sweep())
    return tmp_path / "results"


@pytest.fixture
def described(tmp_path: Path) -> Path:
    store(tmp_path / "results" / "h100" / "bloom.jsonl", sweep(), WHOLE)
    return tmp_path / "results"


class Report(NamedTuple):
    """Both forms of a report."""

    text: str  # Markdown
    page: str  # HTML


def written(results: Path, *options: object) -> Report:
    output = results.parent / "plots" / "report.html"
    done = invoke("report", results, "-o", output, *options)
    assert done.exit_code == 0, done.output
    assert done.stdout.split() == [str(output), str(output.with_suffix(".md"))]
    return Report(output.with_suffix(".md").read_text(), output.read_text())


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Provide the report on `results`, for tests that only read it."""
    folder = tmp_path_factory.mktemp("plain")
    store(folder / "results" / "h100" / "bloom.jsonl", sweep())
    with chdir(folder):
        return written(folder / "results")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Provide the report on `described`, for tests that only read it."""
    folder = tmp_path_factory.mktemp("described")
    store(folder / "results" / "h100" / "bloom.jsonl", sweep(), WHOLE)
    with chdir(folder):
        return written(folder / "results")


class Outline(HTMLParser):
    """Elements with their attributes, and the text of headings."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.headings: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)
        if tag == "h2":
            self.headings.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["h2"]:
            self.headings[-1] += data


def drawings(html: str) -> list[Element]:
    """The figures of a page."""
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", html, re.DOTALL)]


def words(figure: Element, tag: str) -> list[str]:
    return [element.text or "" for element in figure.iter(tag)]


def section(text: str, title: str) -> str:
    return re.split(r"^## \d+\. ", text, flags=re.MULTILINE)[SECTIONS.index(title) + 1]


def test_the_answer_comes_first_with_its_command(plain: Report) -> None:
    text = section(plain.text, "Answer")
    assert "**stream none, batch 8: 15" in text
    assert "```sh\nzinfer batch prompts.jsonl -o answers.jsonl --model bloom-176b --engine stream" in text
    assert mentions(text, "### bloom-176b", "14 of 70 layers", "h100")
    assert mentions(text, "Measured", "512 in", "32 out", "TTFT", "TPOT", "Single run")
    assert mentions(text, "Risks", "dummy", "slice")
    assert re.search(r"Offload cpu .* 0\.\d\dx", text)
    assert mentions(text, "tok/s", "95%")


def test_both_forms_have_every_section(plain: Report) -> None:
    text = plain.text
    assert tuple(re.findall(r"^## \d+\. (.+)$", text, re.MULTILINE)) == SECTIONS
    outline = Outline(plain.page)
    assert tuple(heading.split(" ", 1)[1] for heading in outline.headings) == SECTIONS
    assert outline.open == []


def test_every_point_is_in_the_table(plain: Report) -> None:
    text = section(plain.text, "Results")
    table = next(
        part
        for part in text.split("\n\n")
        if part.startswith("| configuration | batch | tok/s |") and "outcome |" in part.splitlines()[0]
    ).splitlines()
    assert len(table) == 2 + len(sweep())
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in table}) == 1
    assert sum("oom\\_gpu" in row for row in table) == 4
    assert "| accelerate cpu | 32 | timeout | decode | no step for 600 s |" in text


def test_what_is_missing_is_said(results: Path) -> None:
    text = written(results).text
    assert text.count("`zinfer probe`") > 2
    assert "`zinfer plot`" in text
    assert "`zinfer report --baseline FILE`" in text
    (results / "h100" / "machine.json").write_text(json.dumps(MACHINE.model_dump()))
    text = written(results).text
    assert "| link, host to GPU, page-locked | 54.6 GB/s | measured |" in text
    assert "GPU memory, copy, link, GPU to host" in text  # unknown, and named
    assert "A prediction needs" in section(text, "Bottleneck")


def test_memory_is_predicted_beside_what_was_measured(report: Report) -> None:
    text = section(report.text, "Memory plan")
    rows = [row for row in text.splitlines() if row.startswith("| stream none | 8 |")]
    assert [row.split(" | ")[2] for row in rows] == ["GPU", "host"]
    assert "| 20.0 GiB |" in rows[0]
    (gpu, host) = (found for found in drawings(report.page) if "memory" in words(found, "title")[0])
    table = [row.split(" | ") for row in text.splitlines() if re.match(r"\| .* \| \d+ \| (GPU|host) \|", row)]
    for figure, tier in ((gpu, "GPU"), (host, "host")):
        texts, own = words(figure, "text"), [row for row in table if row[2] == tier]
        assert len(own) == 5
        assert [text for text in texts if ", batch " in text] == [
            f"{name[2:]}, batch {size}".replace("\\_", "_") for name, size, *_ in own
        ]
        assert {row[9] for row in own} - {""} <= set(texts)
        assert (texts.count("predicted"), texts.count("measured")) == (5, 5)


def test_a_faster_link_helps_only_what_waits_for_it(report: Report) -> None:
    rows = {row.split(" | ")[0]: row for row in section(report.text, "Bottleneck").splitlines()}
    assert rows["| stream none"].rstrip(" |").endswith("1.00x | hbm")
    assert re.search(r"1\.[4-8]\dx \| host memory", rows["| deepspeed cpu"])


def test_cost_asks_for_prices_and_a_demand(plain: Report) -> None:
    text = section(plain.text, "Sizing and cost")
    assert "`--gpu-hour-usd`" in text
    assert "`--demand`" in text
    assert "| stream none | 8 | 15" in text
    assert "| not read |" in text


def test_prices_give_costs_and_a_demand_gives_gpus(tmp_path: Path) -> None:
    one = point(case(8), repeats=1, gpu={"energy_j": 2560.0})
    usd = 1e6 / (one.output_tok_s or 0) / 3600 * 3
    store(tmp_path / "results" / "a.jsonl", [one, point(case(1, "deepspeed"), repeats=1)])
    prices = ("--gpu-hour-usd", 2, "--host-hour-usd", 1, "--demand", "2Mtok/day")
    text = section(written(tmp_path / "results", *prices).text, "Sizing and cost")
    assert mentions(text, "GPU", "2 USD", "host", "1 USD")
    assert re.search(rf"\| {usd:,.2f} \| 10.0 J \| NVML", text)
    assert mentions(text, "2,000,000", "24 h 00 min", "80%")
    assert re.search(r"\| stream cpu \| 8 \| [\d.]+ \| 5 \| 1 \| 6 \| 6 \| \d\d% \|", text)
    assert "costs more" in text
    text = section(written(tmp_path / "results", "--power-usd-kwh", 0.1).text, "Sizing and cost")
    assert mentions(text, "deepspeed cpu", "energy")


def test_a_deadline_alone_is_refused(results: Path) -> None:
    assert invoke("report", results, "-o", results / "report.md", "--deadline", "8h").exit_code == 2


def test_other_machines_are_predicted_for_the_whole_model(report: Report) -> None:
    text = section(report.text, "What-if machines")
    assert mentions(text, "### bloom-176b", "70 layers", "512 in", "32 out")
    table = next(part for part in text.split("\n\n") if part.startswith("| machine | link |"))
    rows = {row.split(" | ")[0][2:]: row for row in table.splitlines()}
    assert {"h100", "a100-80gb", "h100-80gb", "h200", "gh200-96gb", "b200"} <= rows.keys()
    assert "does not fit" in rows["h100"]
    assert re.search(r"± \d+% \| 1\.00x", rows["h100-80gb"])
    assert mentions(text, "h100", "bloom-176b", "stream", "cpu", "233.5 GB of host memory")
    assert '<tr class="predicted">' in report.page


def test_a_baseline_is_compared_with(described: Path, tmp_path: Path) -> None:
    slower = [point(one.case, 1.1 * (one.tpot_ms or 0) / 1e3) for one in sweep() if one.usable][:4]
    store(tmp_path / "main.jsonl", slower)
    text = section(written(described, "--baseline", tmp_path / "main.jsonl").text, "Comparison")
    assert text.count("| better |") == 4
    assert "only in the baseline" in text
    store(tmp_path / "other.jsonl", [point(case(1, model="other"))])
    assert "no case in common" in written(described, "--baseline", tmp_path / "other.jsonl").text
    store(tmp_path / "two.jsonl", [point(case(1)), point(case(1), machine="a100")])
    assert "could not be compared" in written(described, "--baseline", tmp_path / "two.jsonl").text


def test_validity_reports_repeats_spread_weights_and_slices(report: Report) -> None:
    text = section(report.text, "Validity")
    assert "Dummy weights" in text
    assert "A slice: 14 of 70 layers" in text
    assert re.search(r"\| stream none \| 4 \| 3 \| ± \d\.\d% \| 372 \|", text)


def test_validity_reports_throttling_and_single_repeats(tmp_path: Path) -> None:
    gpu = {
        "throttle_reasons": ["SwPowerCap"],
        "sm_clock_mhz_min": 1350,
        "sm_clock_mhz_max": 1980,
        "power_w_mean": 256.4,
    }
    store(tmp_path / "results" / "a.jsonl", [point(case(1), repeats=1, gpu=gpu)])
    text = section(written(tmp_path / "results").text, "Validity")
    assert mentions(text, "1 of 1", "one repeat")
    assert "| 1350–1980 MHz | 256 W |" in text
    assert "SwPowerCap, 1 of 1" in text


def test_the_sweep_can_be_run_again(plain: Report) -> None:
    text = section(plain.text, "How to reproduce")
    assert (
        "zinfer sweep --model bloom-176b --engine stream,deepspeed --batch-size 'auto*8' --layers 14 --repeats 3"
        in text
    )
    assert "| torch | 2.11.0 |" in text


def test_figures_are_linked_from_where_the_report_is(results: Path) -> None:
    plots = results.parent / "plots"
    assert invoke("plot", results, "-o", plots).exit_code == 0
    found = written(results)
    links = re.findall(r"!\[\w+\]\(([^)]+)\)", found.text)
    assert links == [f"h100/bloom-{name}.svg" for name in ("throughput", "latency", "link")]
    assert all((plots / link).is_file() for link in links)
    assert "<img" not in found.page


def test_a_traced_step_has_its_figure_and_its_table(results: Path, plain: Report) -> None:
    assert "One traced decode step" not in plain.text
    lossless = (("weight_codec", "lossless"),)
    store(
        results / "h100" / "bloom.jsonl",
        [
            point(case(64), 1.29, timeline=traced()),
            point(case(64, options=lossless), 0.85, timeline=traced(copy_ms=60.5, decode_ms=6.2)),
        ],
    )
    plots = results.parent / "plots"
    assert invoke("plot", results, "-o", plots).exit_code == 0
    text, html = written(results)
    assert "![timeline](h100/bloom-timeline.svg)" in text
    table = section(text, "Bottleneck").split("One traced decode step")[1]
    assert "| stream cpu weight\\_codec=lossless | 64 | 854.8 ms |" in table
    assert "| 99.7% | 0.0% | 3.9% | 4.21 ms | 54.2 GB/s |" in table
    assert "when the link waits" in html


def test_a_traced_step_of_several_gpus_has_a_row_for_each(results: Path, plain: Report) -> None:
    gathers = [span.model_copy(update={"lane": "gather"}) for span in traced(compute_ms=9) if span.lane == "compute"]
    ranks = [span.model_copy(update={"rank": rank}) for rank in (0, 1) for span in (*traced(), *gathers[: 12 * rank])]
    two = point(case(64, options=(("gpus", 2),)), timeline=tuple(ranks))
    store(results / "h100" / "bloom.jsonl", [two, point(case(64), timeline=traced())])
    table = section(written(results).text, "Bottleneck").split("One traced decode step")[1]
    rows = [line.split(" | ")[4:] for line in table.splitlines() if line.startswith("| stream cpu")]
    assert rows[0] == ["99.7%", "", "0.0%", "3.9%", "4.21 ms", "27.1 GB/s |"], "a link carries its part"
    assert rows[1][1].endswith("%)")
    assert rows[2] == ["99.7%", "", "0.0%", "3.9%", "4.21 ms", "54.2 GB/s |"]
    assert [f"gpus=2, GPU {rank} |" in table for rank in (0, 1, 2)] == [True, True, False]
    assert "the share of the gathers that the link works beside" in table


def test_accuracy_and_prefix_reuse_are_reported_if_measured(results: Path, plain: Report) -> None:
    assert "Accuracy of settings" not in plain.text
    folder = results / "h100"
    study.append(folder / "accuracy.jsonl", accuracy_run())
    study.append(folder / "reuse.jsonl", reuse_run(kept_point(64, 1, 1)))
    study.append(folder / "reuse.jsonl", reuse_run(kept_point(64, 1, 2), kept_point(512, 8, 2)))
    text, html = written(results)
    assert "| kv\\_cache\\_dtype=int8 | own | 5 | 2% | 3% | 0.002 | 0.003 | 80.00% |  | 50% of 2 | 1 |" in text
    assert mentions(text, "model", "llama")
    assert "| 512 | 1.0 MB | 8 ms | 2 ms | 4.00x |" in text
    assert mentions(text, "memory", "128 tokens")
    assert mentions(html, "m, stream cpu", "h100")
    (folder / "reuse.jsonl").write_text("{}")
    assert mentions(written(results).text, "reuse.jsonl, line 1:", "machine")


@pytest.mark.parametrize("name", ["results", "nowhere", "empty.jsonl"])
def test_no_results_are_an_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "empty.jsonl").touch()
    done = invoke("report", tmp_path / name, "-o", tmp_path / "report.html")
    assert (done.exit_code, done.stderr.count("\n")) == (4, 1)
    assert mentions(done.stderr, "nowhere does not exist" if name == "nowhere" else "no results in")
    assert not (tmp_path / "report.html").exists()


def test_the_first_page_has_whole_models_slices_costs_and_a_place_to_sign(tmp_path: Path) -> None:
    whole = point(case(8, layers=None), gpu={"throttle_reasons": ["sw_power_cap"], "energy_j": 2560.0})
    long = point(case(2, layers=None, input_len=2048), gpu={"energy_j": 2560.0})
    store(tmp_path / "results" / "a.jsonl", [*sweep(), whole, long])
    text, page = written(tmp_path / "results", "--gpu-hour-usd", 2.5)
    first = section(text, "Answer")
    assert first.count("### bloom-176b") == 1, "one card for a model"
    card, sign, slices = (first.index(part) for part in ("### bloom-176b on h100", "- Signature:", "### Slices"))
    assert card < sign < slices < first.index("| bloom-176b, 14 of 70 layers; h100 |")
    assert mentions(first, "2048 in / 32 out", "tok/s", "single run")
    usd = 1e6 / (whole.output_tok_s or 0) / 3600 * 2.5
    assert mentions(first, "Cost", f"{usd:,.2f} USD a million", "60.00 USD a day")
    assert mentions(first, "Risks", "dummy", "clocks")
    assert mentions(text.split("## 1.")[0], "zinfer 0.1.0", "torch 2.11.0")
    assert page.index('class="sign"') < page.index('id="question"')


@pytest.mark.parametrize(("loads", "words"), [(1, "single run"), (2, "2 single runs"), (3, "3 loads of the model")])
def test_a_headline_has_three_loads_or_says_that_it_has_not(tmp_path: Path, loads: int, words: str) -> None:
    records = [point(case(8, layers=None), 1.3 + 0.01 * nth) for nth in range(loads)]
    store(tmp_path / "results" / "a.jsonl", records)
    first = section(written(tmp_path / "results").text, "Answer")
    assert words in first
    assert ("single run" in first.lower()) == (loads < 3)


def test_columns_without_a_value_are_left_out(tmp_path: Path) -> None:
    rows = (Row(("a", "", "1")), Row(("b", "", "")))
    assert Table("", ("name", "#none", "#some"), rows).filled() == Table(
        "", ("name", "#some"), (Row(("a", "1")), Row(("b", "")))
    )
    store(tmp_path / "results" / "a.jsonl", [point(case(8, offload="none"), host_peak_bytes=None)])
    results = section(written(tmp_path / "results").text, "Results")
    assert "| TTFT |" in results
    assert "link share" not in results
    assert "host peak" not in results


def test_lossy_settings_are_last_and_said_to_be(tmp_path: Path) -> None:
    int8 = point(case(8, layers=None, options=(("kv_cache_dtype", "int8"),)), 0.5)
    store(tmp_path / "results" / "a.jsonl", [int8, point(case(8, layers=None))])
    text = written(tmp_path / "results").text
    assert mentions(section(text, "Answer"), "Lossy, apart", "int8", "`zinfer study accuracy`")
    assert "**stream cpu, batch 8:" in text
    for title in ("Results", "Sizing and cost"):
        table = section(text, title)
        assert table.index("| stream cpu |") < table.index("| stream cpu kv\\_cache\\_dtype=int8 (lossy) |")


def test_the_cheapest_is_exact_and_losses_stand_beside_lossy_settings(tmp_path: Path) -> None:
    whole = case(8, model="m", layers=None, load_format="safetensors")
    int8 = whole.model_copy(update={"options": (("kv_cache_dtype", "int8"),)})
    int4 = whole.model_copy(update={"weights": "int4"})
    folder = tmp_path / "results" / "h100"
    store(folder / "a.jsonl", [point(int8, 0.5), point(int4, 0.6), point(whole, 0.7)])
    text, page = written(tmp_path / "results", "--gpu-hour-usd", 2.5)
    costs = page[page.index("USD a million tokens<") :]
    (best,) = re.findall(r'<tr class="?best"?>\s*<t[dh][^>]*>([^<]*)', costs)
    assert best == "stream cpu"
    assert mentions(section(text, "Answer"), "Lossy, apart", "`zinfer study accuracy` tells how far")
    study.append(folder / "accuracy.jsonl", accuracy_run())
    text, _ = written(tmp_path / "results")
    told = "the same most likely token at 80.00% of 5 positions"
    assert mentions(section(text, "Answer"), "Lossy, apart", told)
    found = section(text, "Results")
    assert found.index("(lossy)") < found.index("accuracy of the lossy settings")
    assert "| kv\\_cache\\_dtype=int8 | own | 5 | 2% | 3% |" in found
    assert "| batch 2" not in found


def test_an_accuracy_belongs_to_its_model_engine_and_setting() -> None:
    run = accuracy_run()
    whole = case(8, model="./m", layers=None)
    int8: dict[str, object] = {"options": (("kv_cache_dtype", "int8"),)}
    int4: dict[str, object] = {"weights": "int4"}
    assert [one.along for one in deviations(run, whole.model_copy(update=int8))] == ["own", "text"]
    others: tuple[dict[str, object], ...] = (int4, int8 | int4, int8 | {"model": "n"}, int8 | {"layers": 2}, {})
    assert [deviations(run, whole.model_copy(update=one)) for one in others] == [()] * len(others)
    random = run.asked.model_copy(update={"load_format": "dummy"})
    assert deviations(accuracy_run(case=random), whole.model_copy(update=int8)) == ()
    copy = run.of(study.Deviation)[1].model_copy(
        update={"case": run.asked.model_copy(update={"model": "packed/m-int4"})}
    )
    packed = accuracy_run(rows=(copy,))
    assert deviations(packed, whole.model_copy(update=int4)) == (copy,)
    assert deviations(packed, whole.model_copy(update=int4 | {"engine": "accelerate"})) == ()  # a format of its own


def test_details_are_no_markup_in_markdown() -> None:
    told = markdown(Document("t", "s", (Section("a", "A", [Details(HOSTILE, (Text("inside"),))]),)))
    (summary,) = re.findall(r"<summary>(.*)</summary>", told)
    assert not re.search(r"[<>`*_\[\]|]", summary)
    assert "inside" in told


KINDS = {
    "one point": [point(case(1))],
    "another machine": [point(case(1), machine="elsewhere")],
    "one repeat": [point(case(1), repeats=1), point(case(1, output_len=1), repeats=1)],
    "all oom": [point(case(size), status="oom_gpu", stage="load", error="CUDA out of memory") for size in (1, 2)],
    "host oom": [point(case(1), status="oom_host", stage="load")],
    "unknown model": [point(case(1, model="nobody/knows-it"))],
    "whole": [point(case(1, layers=None, offload="nvme", engine="deepspeed", load_format="safetensors"))],
    "unknowns": [point(case(4, options=(("gpus", 2),)), gpu_peak_bytes=None, link_bandwidth=None)],
}


@pytest.mark.parametrize(
    ("kind", "machine"),
    [
        *(pytest.param(kind, WHOLE, id=kind) for kind in KINDS),
        *(pytest.param(kind, MACHINE, id=f"{kind}, little known") for kind in ("one point", "all oom")),
        *(pytest.param(kind, None, id=f"{kind}, no machine") for kind in ("one point", "all oom", "unknowns")),
    ],
)
def test_any_results_make_a_report(tmp_path: Path, kind: str, machine: Machine | None) -> None:
    points = KINDS[kind]
    store(tmp_path / "results" / "h100" / "a.jsonl", points, machine)
    text = written(tmp_path / "results").text
    assert tuple(re.findall(r"^## \d+\. (.+)$", text, re.MULTILINE)) == SECTIONS
    assert ("**No point succeeded" in text) is all(not one.usable for one in points)
    assert not re.search(r"\bNone\b|\bnan\b|\binf\b", text.replace("stream none", "")), text


def test_a_cpu_is_a_device_too(tmp_path: Path) -> None:
    cpu = Machine(name="h100", source="measured", host_bytes=16 << 30, hbm_bandwidth=2e10, h2d_bandwidth=1e10)
    store(tmp_path / "results" / "a.jsonl", [point(case(1), gpu_peak_bytes=None, host_peak_bytes=9 << 30)], cpu)
    text = written(tmp_path / "results").text
    assert "CPU is the device" in text
    assert "| GPU |" not in section(text, "Memory plan")


def test_failures_and_damage_are_part_of_the_report(tmp_path: Path) -> None:
    results = tmp_path / "results"
    store(results / "a.jsonl", [point(case(1, model="a|b"), status="crashed", error="x | <b>\n```\n# y")])
    with (results / "a.jsonl").open("ab") as stream:
        stream.write(b'{"torn')
    text = written(results).text
    assert mentions(text, "**No point succeeded", "crashed", "batch 1")
    assert r"x \| &lt;b&gt; \`\`\` \# y" in text
    assert r"### a\|b, 14 of 70 layers" in text
    assert mentions(text, "a.jsonl, line 3")


def test_nothing_of_a_record_is_markup(tmp_path: Path) -> None:
    hostile = [
        point(case(1, model=HOSTILE), machine=HOSTILE, versions={HOSTILE: HOSTILE}, model_revision=HOSTILE),
        point(case(2, model=HOSTILE), machine=HOSTILE, status="crashed", stage=HOSTILE, error=HOSTILE),
        point(case(1, engine=HOSTILE, options=((HOSTILE, HOSTILE),))),
    ]
    store(tmp_path / "results" / "a.jsonl", hostile, MACHINE.model_copy(update={"gpu_name": HOSTILE, "name": "h100"}))
    twin, html = written(tmp_path / "results")
    outline = Outline(html)
    assert outline.open == []
    assert {"script", "img", "iframe", "object"}.isdisjoint(tag for tag, _ in outline.elements)
    assert not [name for _, attributes in outline.elements for name in attributes if name.startswith("on")]
    text = re.sub(r"```+sh\n.*?\n```+", "", twin, flags=re.DOTALL)
    bare = re.sub(r"(?<!`)`[^`\n]+`", "", text.replace("\\`", ""))
    assert "<script" not in bare
    assert not re.search(r"(?<!\\)\[a", bare)


def test_the_page_needs_nothing_else(report: Report) -> None:
    html = report.page
    assert not re.search(r"""(src|href)=["'](?!#|data:,)|url\((?!#)|@import""", html)
    assert "default-src 'none'" in html
    assert len(html) < 400_000


def test_figures_have_words(report: Report) -> None:
    html = report.page
    found = drawings(html)
    assert len(found) == html.count("<figure>") == 4
    for figure in found:
        assert figure.get("role") == "img"
        ids = {element.get("id"): element.text for element in figure.iter()}
        assert all(ids[name] for name in figure.attrib["aria-labelledby"].split())
        assert [element.tag for element in figure][:2] == ["title", "desc"]


def test_ids_are_unique_and_every_reference_leads_somewhere(report: Report) -> None:
    html = report.page
    ids = [str(attributes["id"]) for _, attributes in Outline(html).elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert set(re.findall(r"""(?:href="|url\()#([^")]+)""", html)) <= set(ids)


def test_the_page_shows_the_figures_of_plot(described: Path, report: Report) -> None:
    """Equal texts and equal paths: the page draws nothing by itself."""
    plots = described.parent / "plots"
    assert invoke("plot", described, "-o", plots, "--format", "svg", "--figure", "throughput").exit_code == 0
    drawn = ElementTree.parse(plots / "h100" / "bloom-throughput.svg").getroot()
    for element in drawn.iter():
        element.tag = element.tag.split("}")[-1]
    (shown,) = (figure for figure in drawings(report.page) if words(figure, "title") == words(drawn, "title"))
    assert words(shown, "text") == words(drawn, "text") != []
    for tag, names in (("path", ("d",)), ("use", ("x", "y")), ("text", ("x", "y", "transform"))):
        places = [[[found.get(name) for name in names] for found in figure.iter(tag)] for figure in (shown, drawn)]
        assert places[0] == places[1] != []


def test_a_figure_tells_each_timed_point_to_those_who_do_not_see_it(report: Report) -> None:
    told = {words(figure, "title")[0]: words(figure, "desc")[0] for figure in drawings(report.page)}
    (points,) = (text for title, text in told.items() if "which engine" in title)
    for one in sweep():
        said = f"batch {one.case.workload.batch_size}, {rated(one.output_tok_s or 0)} tok/s"
        assert (said in points) is one.usable


def test_figures_follow_the_colours_of_the_page(report: Report) -> None:
    html = report.page
    assert not [figure for figure in drawings(html) if re.search("#[0-9a-f]{6}", ElementTree.tostring(figure).decode())]
    light, dark = re.findall(r":root { (--paper:.*?) }", html)
    used = set(re.findall(r"var\((--[ct][0-9a-f]{6})\)", html))
    for paper, values in ((LIGHT, light), (DARK, dark)):
        given = dict(value.split(":") for value in values.strip(";").split(";"))
        assert used == given.keys() - {"--paper"} != set()
        for name, colour in given.items():
            least = TEXT_CONTRAST if name.startswith("--t") else CONTRAST
            assert name == "--paper" or contrast(colour, paper) >= least


@pytest.mark.parametrize("paper", [LIGHT, DARK])
@pytest.mark.parametrize("colour", [*PALETTE, "#ffffff", "#888888"])
def test_colours_stand_out_on_their_paper(colour: str, paper: str) -> None:
    assert contrast(readable(colour, paper), paper) >= CONTRAST
    assert contrast(colour, paper) < CONTRAST or readable(colour, paper) == colour


def test_contrast_is_that_of_the_guideline() -> None:
    assert contrast("#ffffff", "#000000") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


def test_equal_results_give_equal_bytes(described: Path, report: Report) -> None:
    assert written(described) == report


def test_cells_are_one_line_without_markup() -> None:
    assert cell("a\n b_c*[d](e)") == r"a b\_c\*\[d\](e)"
    assert cell("x" * 300) == "x" * 199 + "…"


def test_sentences_keep_their_code() -> None:
    assert prose("see `a_b`, not c_d") == r"see `a_b`, not c\_d"
    assert prose("a ` b_c") == r"a \` b\_c"
    assert prose("1. <b>") == r"1\. &lt;b&gt;"
    assert fenced("a\n```\nb") == "````sh\na\n```\nb\n````"
    assert shell("zinfer run --model '<b>'") == "zinfer run <span>--model</span> &#39;&lt;b&gt;&#39;"


def test_numbers_keep_their_digits() -> None:
    assert [rated(value) for value in (76.01, 0.7864, 229.1, 1480.2, 0.0)] == ["76.0", "0.786", "229", "1,480", "0"]
    assert Table("", ("a", "#b", "~c"), ()).heads == (("a", ""), ("b", "#"), ("c", "~"))


def test_a_name_that_is_neither_form_is_refused(results: Path) -> None:
    done = invoke("report", results, "-o", results / "report.pdf")
    assert (done.exit_code, ".html or .md" in done.stderr) == (2, True)


def test_a_folder_that_cannot_be_made_is_said(results: Path) -> None:
    done = invoke("report", results, "-o", results / "h100" / "bloom.jsonl" / "report.md")
    assert (done.exit_code, "cannot write" in done.stderr) == (5, True)


ROOT = Path(__file__).parents[1]
RECORD = ROOT / "sweeps" / "results" / "nvidia-h200-x4" / "bloom-176b-whole-kv.jsonl"


def test_planning_recipes_are_answered_beside_what_others_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert invoke("report", RECORD, "-o", tmp_path / "bloom.md").exit_code == 0
    text = (tmp_path / "bloom.md").read_text()
    part = text[text.index("(zinfer plan bloom-176b-machines)") :]
    assert "| gh200-96gb | stream cpu |" in part
    assert mentions(part, "GH200", "H100", "deepspeed", "4-5x")
    assert mentions(part, "GH200", "A100", "deepspeed", "9-11x")
    monkeypatch.chdir(tmp_path)
    store(tmp_path / "a.jsonl", [point(case(1, model="bloom-7b1", layers=None))])
    assert invoke("report", "a.jsonl", "-o", "report.md").exit_code == 0
    text = (tmp_path / "report.md").read_text()
    assert "bloom-7b1" in text
    assert "4-5x" not in text
