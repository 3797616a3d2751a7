"""Every figure in the README comes from a record: its tables are made again here and have to stand there."""

import re
from pathlib import Path

import pytest

from zinfer.record import Measurement
from zinfer.store import read

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
H100 = ROOT / "sweeps" / "results" / "nvidia-h100-80gb-hbm3"


def rows(name: str) -> list[str]:
    """The table of a result file's timed points, as Markdown."""
    return [row(point) for point in read(H100 / f"{name}.jsonl").points if point.usable]


def row(point: Measurement) -> str:
    share = f"{point.link_share:.0%}" if point.link_share else "-"
    ttft = sum(point.ttft_ms) / len(point.ttft_ms) / 1e3
    step = (point.step_median_ms or 0) / 1e3
    batch = point.case.workload.batch_size
    return f"| {point.case.label()} | {batch} | {point.output_tok_s:.2f} | {ttft:.2f} s | {step:.3f} s | {share} |"


@pytest.mark.parametrize("name", ["bloom-176b-slice", "bloom-176b-peers", "opt-30b"])
def test_tables_are_those_of_the_records(name: str) -> None:
    found = rows(name)
    assert found
    missing = [line for line in found if line not in README]
    assert not missing, "\n".join(missing)


def test_ratios_are_those_of_the_records() -> None:
    step = {p.case.label(): p.step_median_ms for p in read(H100 / "bloom-176b-peers.jsonl").points}
    ours = step["stream cpu"]
    told = re.findall(r"\*\*([\d.]+)x\*\* (deepspeed cpu tuned=False|deepspeed cpu|accelerate cpu pin_memory=False|"
                      r"accelerate cpu)", README)  # fmt: skip
    assert {label: ratio for ratio, label in told} == {
        label: f"{ms / ours:.2f}" for label, ms in step.items() if label != "stream cpu" and ms and ours
    }


def test_linked_files_are_there() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert len(links) > 3
    assert [link for link in links if not (ROOT / link).exists()] == []
