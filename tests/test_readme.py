"""Tests of README and guide: every figure comes from a record, every command is understood, every link leads to a file.

The tables are made again from the records and must be in the README."""

import hashlib
import json
import re
import shlex
from pathlib import Path

import click
import pytest

from zinfer.analysis.calibrate import fit, load_machines, load_points
from zinfer.cli import cli
from zinfer.plan.plan import make_plan
from zinfer.record import prefix_reuse, study
from zinfer.record.accuracy import AccuracyRecord
from zinfer.record.codec import CodecRecord
from zinfer.record.measurement import Measurement
from zinfer.record.prefix_reuse import Run
from zinfer.record.store import read
from zinfer.spec import machine, resolve

ROOT = Path(__file__).parents[1]
README, GUIDE = ((ROOT / name).read_text() for name in ("README.md", "GUIDE.md"))
RESULTS = ROOT / "sweeps" / "results"
H100 = RESULTS / "nvidia-h100-80gb-hbm3"
WHOLE = RESULTS / "nvidia-h200" / "bloom-176b-whole.jsonl"


def section(title: str) -> str:
    """Return the paragraph of the README that begins with `title` in bold, as one line."""
    return " ".join(README.split(f"**{title}", 1)[1].split("\n\n", 1)[0].split())


def timed(path: Path) -> list[Measurement]:
    """Return the timed points of a result file; the last one of a case that was measured twice."""
    return list({point.case: point for point in read(path).points if point.usable}.values())


def rows(path: Path) -> list[str]:
    """Return the table of a result file, as lines of Markdown."""
    return [row(point) for point in timed(path)]


def row(point: Measurement) -> str:
    """Return the line of a point in the README's tables."""
    share = f"{point.link_share:.0%}" if point.link_share else "-"
    ttft = sum(point.ttft_ms) / len(point.ttft_ms) / 1e3
    step = (point.step_median_ms or 0) / 1e3
    batch = point.case.workload.batch_size
    return f"| {point.case.label()} | {batch} | {point.output_tok_s:.2f} | {ttft:.2f} s | {step:.3f} s | {share} |"


SHOWN = [
    H100 / f"{name}.jsonl"
    for name in (
        "bloom-176b-slice",
        "bloom-176b-peers",
        "bloom-176b-kv",
        "bloom-176b-kv-ways",
        "dense-peers",
        "opt-30b",
    )
]


@pytest.mark.parametrize("path", [*SHOWN, WHOLE], ids=lambda path: path.stem)
def test_tables_are_those_of_the_records(path: Path) -> None:
    found = rows(path)
    assert found
    missing = [line for line in found if line not in README]
    assert not missing, "\n".join(missing)


def steps(name: str) -> dict[tuple[str, str, int], float]:
    """Return the median decode step (ms) of each timed point of a result file, by model, label and batch."""
    points = timed(H100 / f"{name}.jsonl")
    return {(p.case.model, p.case.label(), p.case.workload.batch_size): p.step_median_ms or 0.0 for p in points}


def test_ratios_are_those_of_the_records() -> None:
    found = {label: ms for (_, label, _), ms in steps("bloom-176b-peers").items()}
    labels = "|".join(sorted(map(re.escape, found), key=len, reverse=True))
    published = re.findall(rf"\*\*([\d.]+)x\*\* as fast as that of ({labels})", section("Every engine in one run"))
    assert {label: ratio for ratio, label in published} == {
        label: f"{ms / found['stream cpu']:.2f}" for label, ms in found.items() if label != "stream cpu"
    }


def test_gains_over_deepspeed_are_those_of_the_records() -> None:
    gains = {
        (name, model, batch): theirs / times[model, "stream cpu", batch]
        for name in ("bloom-176b-slice", "dense-peers")
        for times in [steps(name)]
        for (model, label, batch), theirs in times.items()
        if label == "deepspeed cpu" and (model, "stream cpu", batch) in times
    }
    slices = [gain for (name, _, _), gain in gains.items() if name == "bloom-176b-slice"]
    assert f"{min(slices):.2f}x to {max(slices):.2f}x" in section("A slice of BLOOM-176B")
    others = {model: gain for (name, model, _), gain in gains.items() if name == "dense-peers"}
    assert f"{others['opt-30b']:.2f}x and {others['llama-3.1-70b']:.2f}x" in section("Other families")
    best: dict[str, float] = {}
    for point in read(H100 / "bloom-176b-slice.jsonl").points:
        best[point.case.label()] = max(best.get(point.case.label(), 0.0), point.output_tok_s or 0.0)
    assert f"{best['stream cpu'] / best['deepspeed cpu']:.2f}x DeepSpeed's tok/s" in section("A slice of BLOOM-176B")


def test_the_whole_models_rates_are_those_of_the_record() -> None:
    found = sorted(timed(WHOLE), key=lambda point: (point.case.engine, point.case.workload.batch_size))
    theirs, small, *_, large = found
    assert small.effective is not None
    assert large.effective is not None
    text = section("All of BLOOM-176B on one GPU")
    assert f"**{small.decode_tok_s:.1f}** and **{large.decode_tok_s:.1f}** tok/s" in text
    batches = [point.case.workload.batch_size for point in (small, large)]
    on_gpu = batches[0] - int(small.effective.settings["kv_host_rows"])
    assert re.search(rf"batch {batches[0]} the KV cache of {on_gpu} sequences is on the GPU", text)
    assert re.search(rf"batch {batches[1]} that of {large.effective.settings['kv_host_rows']} is in host memory", text)
    factors = fit(load_points(RESULTS), load_machines(RESULTS), [])["deepspeed"]
    plan = make_plan(theirs.case, resolve.resolve("bloom-176b"), machine.load(WHOLE.parent), factors=factors)
    assert f"{theirs.decode_tok_s:.1f} tok/s at batch {theirs.case.workload.batch_size}; by the plan" in text
    assert f"room for {plan.max_batch_size}." in text
    ratio = (large.decode_tok_s or 0) / (theirs.decode_tok_s or 1)
    assert f"**{ratio:.2f}x** that" in text
    assert f"{(large.output_tok_s or 0) / (theirs.output_tok_s or 1):.2f}x with the prefill" in text
    bound = 32 * (small.link_bandwidth or 0) / (small.effective.streamed_bytes_per_step or 1)
    assert f"full rate, would give {bound:.1f} tok/s" in text


def test_the_gain_of_a_kv_cache_in_host_memory_is_that_of_the_record() -> None:
    rates: dict[str, float] = {}
    hosted: dict[str, list[int]] = {}
    for point in timed(H100 / "bloom-176b-kv.jsonl"):
        if point.effective is not None:
            label = point.case.label()
            rates[label] = max(rates.get(label, 0.0), point.output_tok_s or 0.0)
            hosted.setdefault(label, []).append(int(point.effective.settings.get("kv_host_rows", 0)))
    text = section("Batches beyond the GPU's memory")
    over_link, on_cpu = (f"stream cpu kv_attention={way} kv_offload=auto" for way in ("gpu", "cpu"))
    first, second, third = sorted(hosted[on_cpu])
    assert f"{min(hosted[over_link])} sequences comes over the link" in text
    assert f"{first}, {second} and {third} sequences (kv_attention=cpu)" in text
    best = max(rate for label, rate in rates.items() if label.startswith("stream"))
    peers = ("stream cpu", "deepspeed cpu", "accelerate cpu")
    assert re.findall(r"\*\*([\d.]+)x\*\*", text) == [f"{best / rates[label]:.2f}" for label in peers]


@pytest.mark.parametrize("name", ["llama-70b-long", "llama-70b-documents"])
def test_long_contexts_are_those_of_the_records(name: str) -> None:
    (point,) = read(H100 / f"{name}.jsonl").points
    label, *figures = row(point).strip("| ").split(" | ")
    assert f"| {label} | {point.case.workload.input_len:,} | {' | '.join(figures)} |" in README


def test_the_table_of_accuracy_is_that_of_its_record() -> None:
    found = [f"| {' | '.join(cells)} |" for cells in study.last(WHOLE.parent, AccuracyRecord).cells()]
    assert [line for line in found if line not in README] == []


def test_the_gain_of_resident_layers_is_that_of_the_record() -> None:
    found = {point.case.gpu_weights: point for point in read(H100 / "bloom-176b-resident.jsonl").points if point.usable}
    share = (found["25%"].step_median_ms or 0.0) / (found["0%"].step_median_ms or 1.0)
    assert f"a step takes **{share:.2f}x** as long" in section("Resident layers")


def test_what_a_reload_saves_is_that_of_the_record() -> None:
    (run,) = (run for run in study.read(H100 / "reuse.json", Run).runs if run.case.offload == "cpu")
    longest = run.measured[-1]
    text = section("Reloading a KV cache")
    assert f"from {prefix_reuse.break_even(run.points, 'memory'):,.0f} tokens on" in text
    assert f"at {longest.context:,} tokens it is {longest.gain('memory'):.2f}x as fast" in text


def test_every_engine_wrote_the_same_text() -> None:
    """The checksums are those of the original outputs; the repository keeps one of several equal outputs."""
    lines = (H100 / "text" / "md5sums").read_text().splitlines()
    sums = {name: md5 for md5, name in map(str.split, lines)}
    for dtype in ("float32", "bfloat16"):
        kept = (H100 / "text" / f"{dtype}.json").read_bytes()
        own = {name: md5 for name, md5 in sums.items() if name.endswith(f"-{dtype}.json")}
        assert {name.split("-")[0] for name in own} == {"stream", "deepspeed", "accelerate"}
        assert set(own.values()) == {hashlib.md5(kept).hexdigest()}
        assert all(output["output_ids"] for output in json.loads(kept))


def test_the_codecs_table_is_that_of_its_record() -> None:
    found = [f"| {' | '.join(cells)} |" for cells in study.last(H100, CodecRecord).cells()]
    assert [line for line in found if line not in README] == []


def test_linked_files_exist() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README + GUIDE)
    assert len(links) > 5
    assert [link for link in links if not (ROOT / link).exists()] == []


def commands() -> list[str]:
    """Return each ``zinfer ..`` of the code blocks, and of the text if options follow."""
    blocks = "\n".join(re.findall(r"```sh\n(.*?)```", README + GUIDE, flags=re.DOTALL)).replace("\\\n", " ")
    inline = re.findall(r"`(zinfer [a-z]+ [^`]*)`", " ".join((README + GUIDE).split()))
    return [line for line in [*blocks.splitlines(), *inline] if line.startswith("zinfer ")]


@pytest.mark.parametrize("line", commands())
def test_commands_of_readme_and_guide_are_understood(line: str) -> None:
    verb, *words = shlex.split(line, comments=True)[1:]
    context = click.Context(cli)
    command = cli.get_command(context, verb)
    assert command is not None
    if ">" not in words and "<" not in words:
        command.make_parser(click.Context(command, info_name=verb)).parse_args(words)


def test_readme_and_guide_show_the_main_commands() -> None:
    assert {line.split()[1] for line in commands()} >= {"sweep", "plan", "run", "batch", "best", "report", "build"}
