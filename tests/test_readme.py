"""Every figure in the README comes from a record: its tables are made again here and have to stand there. What it and
the guide tell a reader to type or to open is there."""

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
from zinfer.record import accuracy, codec, prefix_reuse
from zinfer.record.measurement import Measurement
from zinfer.record.store import read
from zinfer.spec import machine, model

ROOT = Path(__file__).parents[1]
README, GUIDE = ((ROOT / name).read_text() for name in ("README.md", "GUIDE.md"))
RESULTS = ROOT / "sweeps" / "results"
H100 = RESULTS / "nvidia-h100-80gb-hbm3"
WHOLE = RESULTS / "nvidia-h200" / "bloom-176b-whole.jsonl"


def timed(path: Path) -> list[Measurement]:
    """The timed points of a result file; of a case measured twice the last."""
    return list({point.case: point for point in read(path).points if point.usable}.values())


def rows(path: Path) -> list[str]:
    """Their table, as Markdown."""
    return [row(point) for point in timed(path)]


def row(point: Measurement) -> str:
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
    """The median decode step (ms) of each timed point of a result file, by model, label and batch."""
    points = timed(H100 / f"{name}.jsonl")
    return {(p.case.model, p.case.label(), p.case.workload.batch_size): p.step_median_ms or 0.0 for p in points}


def test_ratios_are_those_of_the_records() -> None:
    found = {label: ms for (_, label, _), ms in steps("bloom-176b-peers").items()}
    labels = "|".join(sorted(map(re.escape, found), key=len, reverse=True))
    told = re.findall(rf"\*\*([\d.]+)x\*\* (?:than that of )?({labels})", " ".join(README.split()))
    assert {label: ratio for ratio, label in told} == {
        label: f"{ms / found['stream cpu']:.2f}" for label, ms in found.items() if label != "stream cpu"
    }


def test_gains_over_deepspeed_are_those_of_the_records() -> None:
    text = " ".join(README.split())
    gains = {
        (name, model, batch): theirs / times[model, "stream cpu", batch]
        for name in ("bloom-176b-slice", "dense-peers")
        for times in [steps(name)]
        for (model, label, batch), theirs in times.items()
        if label == "deepspeed cpu" and (model, "stream cpu", batch) in times
    }
    slices = [gain for (name, _, _), gain in gains.items() if name == "bloom-176b-slice"]
    assert f"is {min(slices):.2f}x to {max(slices):.2f}x as fast as DeepSpeed's" in text
    others = {model: gain for (name, model, _), gain in gains.items() if name == "dense-peers"}
    assert f"{others['opt-30b']:.2f}x and {others['llama-3.1-70b']:.2f}x DeepSpeed" in text
    best: dict[str, float] = {}
    for point in read(H100 / "bloom-176b-slice.jsonl").points:
        best[point.case.label()] = max(best.get(point.case.label(), 0.0), point.output_tok_s or 0.0)
    assert f"`stream` gives {best['stream cpu'] / best['deepspeed cpu']:.2f}x its tokens a second" in text


def test_the_whole_models_rates_are_those_of_the_record() -> None:
    found = sorted(timed(WHOLE), key=lambda point: (point.case.engine, point.case.workload.batch_size))
    theirs, small, *_, large = found
    assert small.effective is not None
    assert large.effective is not None
    text = " ".join(README.split())
    assert f"**{small.decode_tok_s:.1f}** and **{large.decode_tok_s:.1f}** tokens a second in decode" in text
    batches = [point.case.workload.batch_size for point in (small, large)]
    here = batches[0] - int(small.effective.settings["kv_host_rows"])
    assert f"At batch {batches[0]} the KV cache of {here} sequences is on the GPU" in text
    assert (
        f"at {batches[1]} that of {large.effective.settings['kv_host_rows']} is in host memory, where the CPU" in text
    )
    factors = fit(load_points(RESULTS), load_machines(RESULTS), [])["deepspeed"]
    plan = make_plan(theirs.case, model.resolve("bloom-176b"), machine.load(WHOLE.parent), factors=factors)
    assert (
        f"at batch {theirs.case.workload.batch_size} of the {plan.max_batch_size} that it has room for by the plan"
        in text
    )
    assert f"gives {theirs.decode_tok_s:.1f}: the best" in text
    ratio = (large.decode_tok_s or 0) / (theirs.decode_tok_s or 1)
    assert f"**{ratio:.2f}x** that, {(large.output_tok_s or 0) / (theirs.output_tok_s or 1):.2f}x with" in text
    bound = 32 * (small.link_bandwidth or 0) / (small.effective.streamed_bytes_per_step or 1)
    assert f"to batch 32 at this link's full rate, would give {bound:.1f}." in text


def test_what_a_cache_in_host_memory_gains_is_that_of_the_record() -> None:
    rates: dict[str, float] = {}
    hosted: dict[str, list[int]] = {}
    for point in timed(H100 / "bloom-176b-kv.jsonl"):
        if point.effective is not None:
            label = point.case.label()
            rates[label] = max(rates.get(label, 0.0), point.output_tok_s or 0.0)
            hosted.setdefault(label, []).append(int(point.effective.settings.get("kv_host_rows", 0)))
    text = " ".join(README.split())
    over_link, on_cpu = (f"stream cpu kv_attention={way} kv_offload=auto" for way in ("gpu", "cpu"))
    first, second, third = sorted(hosted[on_cpu])
    assert f"KV cache of {min(hosted[over_link])} sequences coming over the link" in text
    assert f"or of {first}, {second} and {third} attended to by the CPU" in text
    best = max(rate for label, rate in rates.items() if label.startswith("stream"))
    told = re.search(
        r"\*\*([\d.]+)x\*\* what `stream` gives without it, \*\*([\d.]+)x\*\* DeepSpeed's and \*\*([\d.]+)x\*\*", text
    )
    assert told is not None
    peers = ("stream cpu", "deepspeed cpu", "accelerate cpu")
    assert told.groups() == tuple(f"{best / rates[label]:.2f}" for label in peers)


@pytest.mark.parametrize("name", ["llama-70b-long", "llama-70b-documents"])
def test_long_contexts_are_those_of_the_records(name: str) -> None:
    (point,) = read(H100 / f"{name}.jsonl").points
    label, *figures = row(point).strip("| ").split(" | ")
    assert f"| {label} | {point.case.workload.input_len:,} | {' | '.join(figures)} |" in README


def test_the_table_of_accuracy_is_that_of_its_record() -> None:
    found = [f"| {' | '.join(cells)} |" for cells in accuracy.load(WHOLE.with_name(accuracy.FILE)).cells()]
    assert [line for line in found if line not in README] == []


def test_what_staying_layers_save_is_that_of_the_record() -> None:
    found = {point.case.gpu_weights: point for point in read(H100 / "bloom-176b-resident.jsonl").points if point.usable}
    share = (found["25%"].step_median_ms or 0.0) / (found["0%"].step_median_ms or 1.0)
    assert f"(`zinfer sweep bloom-176b-resident`), a step takes **{share:.2f}x** as long" in " ".join(README.split())


def test_what_a_reload_saves_is_that_of_the_record() -> None:
    (run,) = (run for run in prefix_reuse.load(H100 / prefix_reuse.FILE).runs if run.case.offload == "cpu")
    longest = run.measured[-1]
    told = f"from {prefix_reuse.break_even(run.points, 'memory'):,.0f} tokens on (`zinfer reuse`), "
    told += f"{longest.gain('memory'):.2f}x as soon at {longest.context:,}."
    assert told in " ".join(README.split())


def test_every_engine_wrote_the_same_text() -> None:
    """The sums are those of the outputs as they were made; of equal ones the repository keeps one."""
    sums = dict(reversed(line.split()) for line in (H100 / "text" / "md5sums").read_text().splitlines())
    for dtype in ("float32", "bfloat16"):
        kept = (H100 / "text" / f"{dtype}.json").read_bytes()
        own = {name: md5 for name, md5 in sums.items() if name.endswith(f"-{dtype}.json")}
        assert {name.split("-")[0] for name in own} == {"stream", "deepspeed", "accelerate"}
        assert set(own.values()) == {hashlib.md5(kept).hexdigest()}
        assert all(output["output_ids"] for output in json.loads(kept))


def test_the_codecs_table_is_that_of_its_record() -> None:
    record = H100 / codec.FILE
    if not record.exists():
        pytest.skip("the codec was not measured on the H100")
    found = [f"| {' | '.join(cells)} |" for cells in codec.load(record).cells()]
    assert [line for line in found if line not in README] == []


def test_linked_files_are_there() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README + GUIDE)
    assert len(links) > 5
    assert [link for link in links if not (ROOT / link).exists()] == []


def commands() -> list[str]:
    """Each ``zinfer ..`` of a code block, and of the text where options follow."""
    blocks = "\n".join(re.findall(r"```sh\n(.*?)```", README + GUIDE, flags=re.DOTALL)).replace("\\\n", " ")
    inline = re.findall(r"`(zinfer [a-z]+ [^`]*)`", " ".join((README + GUIDE).split()))
    return [line for line in [*blocks.splitlines(), *inline] if line.startswith("zinfer ")]


@pytest.mark.parametrize("line", commands())
def test_what_a_reader_may_type_is_understood(line: str) -> None:
    verb, *words = shlex.split(line, comments=True)[1:]
    context = click.Context(cli)
    command = cli.get_command(context, verb)
    assert command is not None
    if ">" not in words and "<" not in words:
        command.make_parser(click.Context(command, info_name=verb)).parse_args(words)


def test_there_is_something_to_type() -> None:
    assert {line.split()[1] for line in commands()} >= {"sweep", "plan", "run", "batch", "best", "report", "build"}
