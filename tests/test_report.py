"""The report answers first, keeps failures, and says what is missing."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.results import case, point, sweep
from zinfer.cli import cli
from zinfer.machine import Machine
from zinfer.report import cell
from zinfer.store import Store

MACHINE = Machine(
    name="h100", source="measured", gpu_name="H100 80GB", gpu_count=1, gpu_bytes=79 << 30, h2d_bandwidth=54.6e9
)


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(cli, list(map(str, arguments)))


@pytest.fixture
def results(tmp_path: Path) -> Path:
    with Store.open(tmp_path / "results" / "h100" / "bloom.jsonl") as store:
        for one in sweep():
            store.append(one)
    return tmp_path / "results"


def written(results: Path) -> str:
    output = results.parent / "plots" / "report.md"
    done = invoke("report", results, "-o", output)
    assert done.exit_code == 0, done.output
    assert done.stdout == f"{output}\n"
    return output.read_text()


def test_the_answer_comes_first_with_its_command(results: Path) -> None:
    text = written(results)
    assert text.index("stream none, batch 8: 156") < text.index("### Every point")
    assert "```sh\nzinfer run --model bloom-176b --engine stream --offload none --batch-size 8" in text
    assert "## bloom-176b, 14 of 70 layers, 512 in / 32 out" in text
    assert "dummy weights" in text
    assert "A slice takes a slice's memory" in text
    assert "- stream: Offload cpu gives 0." in text
    assert "torch 2.11.0, zinfer 0.1.0" in text


def test_every_point_is_in_the_table(results: Path) -> None:
    table = written(results).split("### Every point\n\n")[1].split("\n\n")[0].splitlines()
    assert len(table) == 2 + len(sweep())
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in table}) == 1
    assert sum("oom\\_gpu in prefill" in row for row in table) == 4
    assert any("no step for 600 s" in row for row in table)


def test_what_is_missing_is_said(results: Path) -> None:
    text = written(results)
    assert "`zinfer probe`" in text
    assert "`zinfer plot`" in text
    (results / "h100" / "machine.json").write_text(json.dumps(MACHINE.model_dump()))
    assert "host to device, pinned: 54.6 GB/s" in written(results)


def test_figures_are_linked_from_where_the_report_is(results: Path) -> None:
    plots = results.parent / "plots"
    assert invoke("plot", results, "-o", plots).exit_code == 0
    links = re.findall(r"!\[\w+\]\(([^)]+)\)", written(results))
    assert links == [f"h100/bloom-{name}.svg" for name in ("throughput", "latency", "link")]
    assert all((plots / link).is_file() for link in links)


@pytest.mark.parametrize("name", ["results", "nowhere"])
def test_no_results_make_a_report_that_says_so(tmp_path: Path, name: str) -> None:
    (tmp_path / "results").mkdir()
    assert "`zinfer sweep`" in written(tmp_path / name)


def test_failures_and_damage_are_part_of_the_report(tmp_path: Path) -> None:
    results = tmp_path / "results"
    with Store.open(results / "a.jsonl") as store:
        store.append(point(case(1, model="a|b"), status="crashed", error="x | <b>\n```\n# y"))
    with (results / "a.jsonl").open("ab") as stream:
        stream.write(b'{"torn')
    text = written(results)
    assert "**No point succeeded**: crashed from batch 1." in text
    assert r"x \| &lt;b&gt; \`\`\` \# y" in text
    assert r"## a\|b, 14 of 70 layers" in text
    assert "- a.jsonl, line 2: not a whole record" in text


def test_equal_results_give_equal_text(results: Path) -> None:
    assert written(results) == written(results)


def test_cells_are_one_line_without_markup() -> None:
    assert cell("a\n b_c*[d](e)") == r"a b\_c\*\[d\](e)"
    assert cell("x" * 300) == "x" * 199 + "…"


def test_a_folder_that_cannot_be_made_is_said(results: Path) -> None:
    done = invoke("report", results, "-o", results / "h100" / "bloom.jsonl" / "report.md")
    assert (done.exit_code, "cannot write" in done.stderr) == (5, True)
