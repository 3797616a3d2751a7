"""Tables and figures of README.md and docs/*.md, made from the records in `sweeps/results`.

The pages call these functions between cog's markers; `make readme` writes the output into the pages. The paragraphs of
docs/results.md are written by hand: `FIGURES` has what they must quote, and tests/test_readme.py compares.
"""

import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import chain, pairwise
from pathlib import Path
from statistics import mean, median
from unittest.mock import patch

from click.testing import CliRunner
from cogapp import Cog  # type: ignore[import-untyped]

from tests.campaign import record as campaign
from tests.conformance import record as conformance
from zinfer.analysis.calibrate import fit, load_machines, load_points
from zinfer.checkpoint import resolve
from zinfer.cli import cli
from zinfer.commands.demo import explanation
from zinfer.core.engine import ENGINES
from zinfer.core.errors import EXIT_CODES
from zinfer.core.machine import Machine
from zinfer.core.units import gib
from zinfer.plan.cost import Efficiency
from zinfer.plan.plan import make_plan
from zinfer.record import accuracy, codec, prefix_reuse, routing, store, study
from zinfer.record.measurement import Measurement, latest
from zinfer.record.requests import RequestPoint
from zinfer.record.requests import latest as latest_loads
from zinfer.report import requests
from zinfer.report.document import Table
from zinfer.system.machines import load as load_machine

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "sweeps" / "results"
PAGES = ("README.md", *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md"))))
# Machines whose records are in git; other folders are of whoever runs this.
SHIPPED = re.findall(r"^SHIPPED := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[0].split(",")
# Record of a `zinfer demo`. Its name does not end as a results file's does, so that no demo resumes it, and no answer
# from the folder has it; a renewed one is a copy of sweeps/results/MACHINE/demo.jsonl.
DEMO = RESULTS / "demo.record"
ENGINE_LINES = {
    "stream": "zinfer's own: losslessly coded weights in page-locked host memory; copies run ahead of compute across "
    "layers and steps; one layer at a time on the GPU",
    "deepspeed": "DeepSpeed ZeRO-Inference: ZeRO stage 3 with `offload_param`, tuned for decode",
    "accelerate": "Hugging Face Accelerate's offload hooks, from pinned memory",
    "tensorrt": "a TensorRT plan made by `zinfer build`, with TensorRT's own weight streaming",
}
OFFLOADS = ("none", "cpu", "nvme")
UNTRIED = "experimental: no plan has run on a GPU"
LOADS = ("batch", "loads", "output tok/s", "decode tok/s", "TTFT", "decode step", "range", "link share")
COLUMNS = ("batch", "output tok/s", "prefill tok/s", "decode tok/s", "TTFT", "decode step", "link share")
WIDTH = 120
read = cache(store.read)  # no record changes while pages are made


def cog(*options: str) -> int:
    """Run cog on the pages and return its exit status: with ``-r`` it writes them, with ``--check`` it compares."""
    pages = [str(ROOT / page) for page in PAGES]
    status: int = Cog().main(["cog", "-P", "-p", "from tests.readme import *", "--verbosity=1", *options, *pages])
    return status


@cache
def points(name: str) -> tuple[Measurement, ...]:
    """Return the timed points of the sweep `name` in the order of the README: by model, engine, load and batch size.

    Where several machines have a sweep of that name, `name` is ``<machine>/<sweep>``.
    """
    (path,) = RESULTS.rglob(f"{name}.jsonl")
    found = [point for point in latest(read(path).points) if point.usable]
    models, loads = ([*dict.fromkeys(keys)] for keys in ((p.case.model for p in found), (p.case.load for p in found)))

    def order(point: Measurement) -> tuple[int, ...]:
        case = point.case
        place = models.index(case.model), list(ENGINES).index(case.engine), loads.index(case.load)
        return *place, case.workload.batch_size

    return tuple(sorted(found, key=order))


def table(*names: str) -> str:
    """Return the points of sweeps as a table; a column tells models or prompt lengths apart where there are several."""
    found = [point for name in names for point in points(name)]
    models = len({point.case.model for point in found}) > 1
    lengths = len({point.case.workload.input_len for point in found}) > 1
    heads = ["model"] * models + ["configuration"] + ["#tokens in"] * lengths + [f"#{column}" for column in COLUMNS]
    rows = [
        [point.case.model] * models
        + [point.case.label()]
        + [f"{point.case.workload.input_len:,}"] * lengths
        + cells(point)
        for point in found
    ]
    return markdown(heads, rows)


def cells(point: Measurement) -> list[str]:
    """Return a point's text under `COLUMNS`."""
    return [
        str(point.case.workload.batch_size),
        f"{point.output_tok_s:.2f}",
        f"{point.prefill_tok_s:,.1f}",
        f"{point.decode_tok_s:,.2f}" if point.decode_tok_s else "-",
        f"{sum(point.ttft_ms) / len(point.ttft_ms) / 1e3:.2f} s",
        f"{step_ms(point) / 1e3:.3f} s",
        f"{point.link_share:.0%}" if point.link_share else "-",
    ]


def loads(name: str) -> dict[tuple[str, int], list[Measurement]]:
    """Return the points of a sweep whose model is loaded several times, by label and batch size."""
    (path,) = RESULTS.rglob(f"{name}.jsonl")
    found: dict[tuple[str, int], list[Measurement]] = {}
    for point in read(path).points:
        if point.usable:
            found.setdefault((point.case.label(), point.case.workload.batch_size), []).append(point)
    return dict(sorted(found.items(), key=lambda one: (list(ENGINES).index(one[1][0].case.engine), one[0])))


def table_of_loads(*names: str) -> str:
    """Return a table of sweeps whose model is loaded several times: means over the loads, and the range of the decode
    steps."""
    rows = []
    for (label, batch), found in chain.from_iterable(loads(name).items() for name in names):
        steps = [step_ms(point) for point in found]
        shares = [point.link_share for point in found if point.link_share]
        rows.append((
            label, f"{batch}", f"{len(found)}", f"{mean(p.output_tok_s or 0 for p in found):,.2f}",
            f"{mean(p.decode_tok_s or 0 for p in found):,.2f}", f"{mean(p.ttft_ms[0] for p in found):,.0f} ms",
            f"{mean(steps):,.1f} ms", f"{min(steps):,.1f} to {max(steps):,.1f}",
            f"{mean(shares):.0%}" if shares else "-",
        ))  # fmt: skip
    return markdown(("configuration", *(f"#{column}" for column in LOADS)), rows)


def table_of_disks() -> str:
    """Return the table of the sweep `nvme`: how much of the weights each step reads from disk, and how fast."""
    rows = []
    for point in points("nvme"):
        _, output, _, decode, ttft, step, _ = cells(point)
        gigabytes, rate = _from_disk(point)
        read_bytes, bandwidth = (f"{gigabytes:.2f} GB", f"{rate:.2f} GB/s") if gigabytes else ("-", "-")
        rows.append((point.case.label(), output, decode, ttft, step, read_bytes, bandwidth))
    heads = "configuration", "#output tok/s", "#decode tok/s", "#TTFT", "#decode step", "#read a step", "#rate of reads"
    return markdown(heads, rows)


def _from_disk(point: Measurement) -> tuple[float, float]:
    """Return what a decode step reads from disk, in GB, and how fast, in GB/s; zeros where nothing is recorded."""
    assert point.effective is not None
    read_bytes = point.effective.nvme_bytes_per_step
    return read_bytes / 1e9, read_bytes / step_ms(point) / 1e6


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown; columns whose head begins with ``#`` are set right."""
    rule = ["---:" if head.startswith("#") else "---" for head in heads]
    lines = [[head.removeprefix("#") for head in heads], rule, *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def accuracies(machine: str, *settings: str) -> str:
    """Return the table of the last record of `zinfer accuracy` on a machine: of all settings, or of those named."""
    rows = study.last(RESULTS / machine, accuracy.AccuracyRecord).cells()
    found = [row for row in rows if not settings or row[0] in settings]
    assert {row[0] for row in found} >= set(settings)
    return markdown(accuracy.COLUMNS, found)


def codecs() -> str:
    """Return the table of `zinfer codec`'s record."""
    return markdown(codec.COLUMNS, study.last(RESULTS, codec.CodecRecord).cells())


def routings() -> str:
    """Return the table of `zinfer routing`'s record, and its verdict."""
    run = study.last(RESULTS, routing.RoutingRecord)
    told = f"({run.told}; {run.tokens:,} tokens of {run.text}.) {run.verdict()}"
    table = markdown(routing.COLUMNS, run.cells())
    return f"{table}\n\n{textwrap.fill(told, WIDTH, break_on_hyphens=False)}"


def engines() -> str:
    """Return the table of engines: offloads, what was measured of each on a GPU, and a line about it."""
    measured = [point for name in SHIPPED for point in read(RESULTS / name).points if point.usable]
    rows = []
    for name, kind in ENGINES.items():
        own = [point for point in measured if point.case.engine == name]
        hosts = len({_host(name) for name in {point.machine for point in own}})
        state = f"{len(own)} points on {hosts} host{'s' * (hosts != 1)}" if own else UNTRIED
        rows.append((f"`{name}`", ", ".join(o for o in OFFLOADS if o in kind.offloads), state, ENGINE_LINES[name]))
    return markdown(("engine", "offload", "measured", "description"), rows)


def _host(name: str) -> tuple[object, ...]:
    """Return what tells the host of a machine's records apart: a control group with less memory is no other host."""
    one = load_machine(RESULTS / name)
    host = one.details["host"]
    return one.gpu_name, one.gpu_count, host["cores"], round(host["memory_bytes"] / 2**30)


def machines() -> str:
    """Return the table of the machines that were measured, with the range of the link's rate over all loads."""
    rows = []
    for name in SHIPPED:
        one = load_machine(RESULTS / name)
        links = [point.link_bandwidth or 0.0 for point in read(RESULTS / name).points if point.usable]
        links = sorted(rate / 1e9 for rate in links if rate)
        host = one.details["host"]
        memory = min(one.host_bytes or 0, host["memory_bytes"])
        span = f"{links[0]:.1f} to {links[-1]:.1f}, median {median(links):.1f}"
        rows.append((one.gpu_name or "", gib(one.gpu_bytes, 0), gib(memory, 0), f"{host['cores']}", span))
    return markdown(("GPU", "#its memory", "#host memory", "#cores", "#link of each load, GB/s"), rows)


def headlines() -> str:
    """Return six results of the records, a row each, with their conditions."""
    whole, beside = loads("bloom-176b-whole-kv").values()
    rates = _rates_of(whole, beside)
    ours, deepspeed = _slice_loads()
    tried = deepspeed[0].case.workload.batch_size
    (decode, their_decode), (output, their_output) = both = _slice_rates()
    (mixture,) = points("mixtral-whole")
    llama = {p.case.label(): p for p in points("dense-peers") if p.case.model == "llama-3.1-70b"}
    (long,) = points("llama-70b-long")
    fitting, offloaded = (
        max((p for p in points("opt-30b") if p.case.label() == label), key=lambda p: p.output_tok_s or 0.0)
        for label in ("stream none", "stream cpu")
    )
    stream_llama = step_ms(llama["stream cpu"])
    rows = [
        _headline(
            whole[0], f"decode {rates[0][0]:.1f} tok/s, {rates[1][0]:.1f} with the prefill",
            f"DeepSpeed, batch {beside[0].case.workload.batch_size}: {rates[0][1]:.1f} and {rates[1][1]:.1f} tok/s",
            *(one / other for one, other in rates), runs=len(whole),
        ),
        _headline(
            ours[0], f"decode {decode:.0f} tok/s, {output:.0f} with the prefill",
            f"DeepSpeed, batch {tried}: {their_decode:.1f} and {their_output:.1f} tok/s",
            *(one / other for one, other in both), runs=len(ours),
        ),
        _headline(
            mixture, f"decode {mixture.decode_tok_s:,.0f} tok/s, {mixture.output_tok_s:.0f} with the prefill", "-",
        ),
        _headline(
            llama["stream cpu"], f"decode step {stream_llama / 1e3:.3f} s",
            f"DeepSpeed: {step_ms(llama['deepspeed cpu']) / 1e3:.3f} s",
            step_ms(llama["deepspeed cpu"]) / stream_llama,
        ),
        _headline(
            fitting, f"without offload {fitting.output_tok_s:.0f} tok/s",
            f"offload cpu, batch {offloaded.case.workload.batch_size}: {offloaded.output_tok_s:.0f} tok/s",
            (fitting.output_tok_s or 0) / (offloaded.output_tok_s or 1),
        ),
        _headline(long, f"TTFT {long.ttft_ms[0] / 1e3:.1f} s, then {step_ms(long) / 1e3:.1f} s a token", "-"),
    ]  # fmt: skip
    return markdown(("model", "GPU", "#in / out", "#batch", "#runs", "result", "beside it", "#ratio"), rows)


def _headline(point: Measurement, result: str, beside: str, *ratios: float, runs: int | None = None) -> list[str]:
    assert not point.case.lossy, "headlines are of settings that keep the model's own numbers"
    load = point.case.workload
    whole = "all" if point.num_layers == point.total_layers else f"{point.num_layers} of {point.total_layers} layers"
    return [
        f"{point.case.model}, {whole}",
        point.machine.split("-")[1].upper(),
        f"{load.input_len:,} / {load.output_len}",
        f"{load.batch_size}",
        f"{runs or len(point.ttft_ms)}",
        result,
        beside,
        ", ".join(f"{ratio:.2f}x" for ratio in ratios) or "-",
    ]


def demo() -> str:
    """Return the last screen of `zinfer demo`, from the record of a run, as a block of text."""
    ended = CliRunner().invoke(cli, ["best", str(DEMO)], env={"COLUMNS": "80", "TERM": "dumb"}, catch_exceptions=False)
    found = read(DEMO)
    one = Machine(name=found.headers[0].machine, source="measured")  # without a GPU
    with patch("shutil.which", return_value=None):  # as where `make demo` has just installed it
        text = explanation(found.points, one)
    lines = f"{ended.stdout.rstrip()}\n\n{text}".splitlines()
    return "\n".join(("```text", *(line.rstrip() for line in lines), "```"))


def reliability() -> str:
    """Return the table of the last fault campaign (`make campaign`), and its conditions in a line."""
    if not (RESULTS / "reliability.jsonl").exists():
        return "No campaign is recorded yet."
    return campaign.markdown(study.last(RESULTS / "reliability.jsonl", campaign.Campaign))


def request_loads() -> str:
    """Return the table of the loads of requests that were recorded, and of the times that requests waited; those with
    drafts have a table of their own."""
    recorded = [point for name in SHIPPED for point in read(RESULTS / name).requests]
    drafts = {point.case.model for point in recorded if "draft" in dict(point.case.options)}
    found = [point for point in recorded if point.case.model not in drafts]
    if not found:
        return "No load of requests is recorded yet."
    tables = [one.filled() for blocks in requests.tables(found) for one in blocks if isinstance(one, Table)]
    shown = [(one.caption, markdown(one.columns, [row.cells for row in one.rows])) for one in tables]
    return "\n\n".join(part for pair in shown for part in pair)


DRAFTERS = {"none": "none", "ngram": "n-grams", ".scratch/draft": "a model", ".scratch/untrained": "an untrained model"}
DRAFTS = (
    "drafts", "#in flight", "#time of a token", "#rate", "#tokens a pass", "#right drafts", "#drafting a pass",
    "#all requests",
)  # fmt: skip


@cache
def draft_loads() -> dict[tuple[str, int], RequestPoint]:
    """Return the loads of requests of `make drafts`, by who drafts and the number of requests in flight."""
    (path,) = RESULTS.rglob("padded.jsonl")
    found = {}
    for point in latest_loads(read(path).requests):
        name = str(dict(point.case.options).get("draft", "none"))
        found[name, int(point.requests.in_flight or 0)] = point
    return dict(sorted(found.items(), key=lambda pair: (pair[0][1], [*DRAFTERS].index(pair[0][0]))))


def draft_gain(name: str, in_flight: int) -> float | None:
    """Return how many times the rate of a row's tokens is that without drafts."""
    plain, drafted = (draft_loads()[key, in_flight] for key in ("none", name))
    if not (plain.usable and drafted.usable and plain.tpot_ms and drafted.tpot_ms):
        return None
    return plain.tpot_ms / drafted.tpot_ms


def table_of_drafts() -> str:
    """Return the table of `make drafts`."""
    rows = []
    for (name, in_flight), point in draft_loads().items():
        took, gain, head = point.tpot_ms, draft_gain(name, in_flight), [DRAFTERS[name], str(in_flight)]
        if took is None or gain is None:
            rows.append([*head, *["-"] * (len(DRAFTS) - 3), point.status])
            continue
        passes = [len({*one.passes}) - 1 for one in point.samples]
        tokens = [one.tokens - 1 for one in point.samples]
        right, drafting_ms = point.acceptance, point.counts.drafting_ms / len(point.pass_ms)
        rows.append([
            *head, f"{took:,.0f} ms", f"{gain:.2f}x", f"{sum(tokens) / sum(passes):.1f}",
            "-" if right is None else f"{right:.0%}", "-" if name == "none" else f"{drafting_ms:,.0f} ms",
            f"{point.output_tok_s or 0:,.1f} tok/s",
        ])  # fmt: skip
    return markdown(DRAFTS, rows)


def exit_codes() -> str:
    """Return the table of exit codes."""
    return markdown(("#code", "meaning"), EXIT_CODES.items())


def supported_models() -> str:
    """Return the counts of the conformance record, as a paragraph with a link."""
    text = f"[Supported models](models.md): {conformance.summary(conformance.read())}"
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def model_tables() -> str:
    """Return the tables of docs/models.md."""
    return conformance.table(conformance.read())


def step_ms(point: Measurement) -> float:
    """Return the median decode step."""
    assert point.step_median_ms is not None
    return point.step_median_ms


def steps(name: str) -> dict[tuple[str, str, int], float]:
    """Return the median decode step, in ms, of each point of a sweep by model, label and batch size."""
    return {(p.case.model, p.case.label(), p.case.workload.batch_size): step_ms(p) for p in points(name)}


def rates(name: str) -> dict[str, float]:
    """Return the best output rate of each label of a sweep."""
    found: dict[str, float] = {}
    for point in points(name):
        found[point.case.label()] = max(found.get(point.case.label(), 0.0), point.output_tok_s or 0.0)
    return found


def gains(name: str) -> dict[tuple[str, int], float]:
    """Return DeepSpeed's decode step over that of `stream`, by model and batch size, for those that both ran."""
    times = steps(name)
    return {
        (model_name, batch): theirs / times[model_name, "stream cpu", batch]
        for (model_name, label, batch), theirs in times.items()
        if label == "deepspeed cpu" and (model_name, "stream cpu", batch) in times
    }


def host_rows(point: Measurement) -> int:
    """Return the number of sequences whose KV cache was in host memory."""
    assert point.effective is not None
    return int(point.effective.settings.get("kv_host_rows", 0))


def _ratios(name: str, batch: int, one: str, other: str) -> tuple[float, float, float]:
    """Return the mean, least and largest ratio of the decode steps of two labels, load by load."""
    found = loads(name)
    ratios = [step_ms(a) / step_ms(b) for a, b in zip(found[one, batch], found[other, batch], strict=True)]
    return mean(ratios), min(ratios), max(ratios)


def _experts() -> list[str]:
    told = []
    for batch in (1, 4):
        found = _ratios("mixtral-experts", batch, "stream cpu experts=all", "stream cpu experts=on-demand")
        told += [f"{one:.2f}x" for one in found]
    brought = [
        (point.effective.wire_bytes_per_step or 0) / 1e9
        for label in ("stream cpu experts=all", "stream cpu experts=on-demand")
        for point in loads("mixtral-experts")[label, 1][-1:]
        if point.effective is not None
    ]
    return [*(f"{one:.1f} GB" for one in brought), *told]


def _qwen() -> list[str]:
    found = _ratios("qwen3-235b-experts", 1, "stream cpu experts=all", "stream cpu experts=on-demand")
    return [f"{one:.2f}x" for one in found]


def _cpu_experts() -> list[str]:
    labels = "stream cpu experts_cpu=on", "stream cpu"
    return [f"{_ratios('mixtral-cpu-experts', batch, *labels)[0]:.2f}x" for batch in (1, 4)]


def _mixtral() -> list[str]:
    (there,), (away,) = points("mixtral-whole"), points("mixtral-whole-kv")
    batches = [point.case.workload.batch_size for point in (there, away)]
    return [
        f"batch {batches[0]}", f"{there.decode_tok_s:,.0f} tok/s", f"{host_rows(away)} of {batches[1]}",
        f"{away.decode_tok_s:,.0f} tok/s",
    ]  # fmt: skip


def _mixtral_rates() -> list[str]:
    own, deepspeed, accelerate = (f"{point.decode_tok_s:.1f} tok/s" for point in points("mixtral-whole-peers"))
    return [own, accelerate, deepspeed]


def _mixtral_peers() -> list[str]:
    found = {point.case.label(): step_ms(point) for point in points("mixtral-peers")}
    none, some = "gpu-weights=0%", "gpu-weights=70%"
    return [
        f"{found['deepspeed cpu'] / found[f'stream cpu {none}']:.2f}x",
        *(f"{found[f'accelerate cpu {share}'] / found[f'stream cpu {share}']:.2f}x" for share in (none, some)),
    ]


def _fp8() -> list[str]:
    gains = []
    for found in loads("deepseek-v3-codec").values():
        for point in found:
            assert point.effective is not None
            assert point.link_bandwidth
            released = (point.effective.streamed_bytes_per_step or 0) / 2  # the record counts them as 16 bits
            gains.append(released / (step_ms(point) / 1e3) / point.link_bandwidth)
    return [f"{min(gains):.2f}x", f"{max(gains):.2f}x"]


def _small() -> list[str]:
    opt = loads("resident-opt-30b")["stream none", 1]
    rate = mean((point.effective.gpu_weight_bytes if point.effective else 0) / step_ms(point) * 1e3 for point in opt)
    one = load_machine(RESULTS / opt[0].machine)
    return [f"{rate / 1e12:.1f} TB/s", f"{rate / (one.hbm_bandwidth or 1):.0%}"]


def _small_mixture() -> list[str]:
    steps = loads("resident-small-batches")["stream none", 1]
    case = steps[0].case
    spec = resolve.resolve(case.model, layers=case.layers)
    # A step reads the experts of one token, and one row of the embeddings.
    read_bytes = (spec.parameters_read(1) - spec.vocab_size * spec.hidden_size) * spec.dtype_bytes
    rate = mean(read_bytes / step_ms(point) * 1e3 for point in steps)
    one = load_machine(RESULTS / steps[0].machine)
    return [f"{rate / 1e12:.1f} TB/s", f"{rate / (one.hbm_bandwidth or 1):.0%}"]


def _drafts() -> list[str]:
    loads, told = draft_loads(), []
    for name in (".scratch/draft", "ngram", ".scratch/untrained"):
        told += [f"{gain:.2f}x" for in_flight in (1, 32, 96) if (gain := draft_gain(name, in_flight)) is not None]
        told.append(f"{loads[name, 96].acceptance or 0:.0%}")
    return told


def _never_right() -> list[str]:
    (path,) = RESULTS.rglob("padded-never-right.jsonl")
    found = [one for one in read(path).requests if one.usable]
    plain, tried = (
        [one.tpot_ms or 0.0 for one in found if ("draft" in dict(one.case.options)) == drafts]
        for drafts in (False, True)
    )
    return [
        *(f"{ours / theirs:.3f}x" for ours, theirs in zip(plain, tried, strict=True)),
        f"{mean(plain) / mean(tried):.3f}x",
        f"{max(plain) / min(plain) - 1:.0%}",
    ]


def _requests() -> list[str]:
    (queue,) = RESULTS.rglob("chats-queue.jsonl")
    (peers,) = RESULTS.rglob("chats-deepspeed.jsonl")
    found = read(queue)
    equal, unequal = ([one.output_tok_s or 0.0 for one in kind] for kind in (found.points, found.requests))
    own, theirs = (one.output_tok_s or 0.0 for one in read(peers).requests)
    return [
        *(f"{one / other:.2f}x" for one, other in zip(unequal, equal, strict=True)),
        f"{mean(unequal):,.0f} tok/s",
        f"{own / theirs:.2f}x",
    ]


def _slice_requests() -> list[str]:
    found = read(RESULTS / "nvidia-h100-80gb-hbm3" / "bloom-176b-requests.jsonl").requests
    figures = []
    for share in ("0%", "58%"):
        own = [one for one in found if one.case.gpu_weights == share and one.status == "ok"]
        assert len(own) == 3
        rates = [one.output_tok_s or 0.0 for one in own]
        lengths = own[0].samples[0]
        (rows,) = {one.kv_positions // (lengths.input_len + lengths.output_len) for one in own}
        figures += [f"{rows} ran", f"{min(rates):.1f}", f"{max(rates):.1f} tok/s"]
    return figures


def _whole_requests() -> list[str]:
    folder = RESULTS / "nvidia-h100-80gb-hbm3-x2"
    equal = [one for one in read(folder / "bloom-176b-whole-80gb.jsonl").points if one.usable]
    found = [one for one in read(folder / "bloom-176b-whole-requests-80gb.jsonl").requests if one.status == "ok"]
    starts = [one.started_at for pair in zip(found, equal, strict=True) for one in pair]
    assert len(equal) == 3
    assert starts == sorted(starts)
    own, theirs = ([one.output_tok_s or 0.0 for one in kind] for kind in (found, equal))
    (older,) = read(RESULTS / "nvidia-h200-x2" / "bloom-176b-whole-requests.jsonl").requests
    (rows,) = points("bloom-176b-whole-requests")
    return [
        f"{found[0].requests.requests} of them",
        f"{found[0].requests.in_flight} at a time",
        f"{found[0].case.gpu_weights} of the weights",
        f"{min(own):.1f} to {max(own):.1f} tok/s",
        f"batch {equal[0].case.workload.batch_size}",
        f"{min(theirs):.1f} to {max(theirs):.1f} tok/s",
        *(f"{one / other:.2f}x" for one, other in zip(own, theirs, strict=True)),
        f"{(older.output_tok_s or 0) / (rows.output_tok_s or 1):.2f}x",
        f"batch {rows.case.workload.batch_size}",
    ]


def _whole() -> list[str]:
    small, *_, large, theirs = points("bloom-176b-whole")
    assert small.effective is not None
    batches = [point.case.workload.batch_size for point in (small, large, theirs)]
    streamed_to_32 = 32 * (small.link_bandwidth or 0) / (small.effective.streamed_bytes_per_step or 1)
    return [
        f"batch {batches[0]}",
        f"{batches[0] - host_rows(small)} sequences",
        f"batch {batches[1]}",
        f"{host_rows(large)}",
        f"{small.decode_tok_s:.1f}",
        f"{large.decode_tok_s:.1f}",
        f"{theirs.decode_tok_s:.1f} tok/s",
        f"batch {batches[2]}",
        f"{_most_rows(theirs)}",
        f"{(large.decode_tok_s or 0) / (theirs.decode_tok_s or 1):.2f}x",
        f"{(large.output_tok_s or 0) / (theirs.output_tok_s or 1):.2f}x",
        f"{streamed_to_32:.1f} tok/s",
    ]


def _two_gpus() -> list[str]:
    ((_, both),) = loads("bloom-176b-two-gpus").items()
    (alone,) = points("bloom-176b-whole-requests")
    steps, last, host = [step_ms(one) for one in both], both[-1], load_machine(RESULTS / both[-1].machine)
    assert last.effective is not None
    slow = [sum(ms > 1.5 * step_ms(one) for repeat in one.step_ms for ms in repeat) for one in both]
    assert slow == [3, 0]
    return [
        f"batch {last.case.workload.batch_size}",
        f"{min(steps) / 1e3:.2f} s",
        f"{max(steps) / 1e3:.2f} s",
        f"{last.effective.wire_bytes / step_ms(last) / 1e6:.0f} GB/s",
        f"{(host.links_bandwidth or 0) / 1e9:.0f} GB/s",
        f"batch {alone.case.workload.batch_size}",
        f"{step_ms(alone) / 1e3:.2f} s",
        f"{(last.decode_tok_s or 0) / (alone.decode_tok_s or 1):.1f}x",
    ]


def _two_small_gpus() -> list[str]:
    ((_, alone),) = loads("bloom-176b-whole-80gb-kept").items()
    on_gpus, hosted = loads("bloom-176b-two-gpus-80gb-kept").values()
    starts = [one.started_at for turn in zip(alone, on_gpus, hosted, strict=True) for one in turn]
    assert starts == sorted(starts)
    (rows,) = {host_rows(one) for one in hosted}
    assert {host_rows(one) for one in on_gpus} == {0}
    one_gpu, two_gpus, at_most = ([step_ms(one) / 1e3 for one in found] for found in (alone, on_gpus, hosted))
    wire = [(one.effective.wire_bytes if one.effective else 0) / step_ms(one) / 1e6 for one in on_gpus]
    shares = [one.link_share or 0.0 for one in on_gpus]
    gains = [(one.decode_tok_s or 0) / (other.decode_tok_s or 1) for one, other in zip(hosted, alone, strict=True)]
    return [
        f"{alone[0].case.gpu_weights} of the weights",
        f"{min(one_gpu):.2f} s to {max(one_gpu):.2f} s",
        f"batch {alone[0].case.workload.batch_size}",
        f"{on_gpus[0].case.gpu_weights} of the weights",
        f"{min(two_gpus):.2f} s to {max(two_gpus):.2f} s",
        f"batch {on_gpus[0].case.workload.batch_size}",
        f"{min(wire):.0f} GB/s",
        f"{max(wire):.0f} GB/s",
        f"{min(shares):.0%} to {max(shares):.0%}",
        f"batch {hosted[0].case.workload.batch_size}",
        f"{rows} of the sequences",
        f"{median(gains):.2f}x",
        f"{min(gains):.2f}x",
        f"{max(gains):.2f}x",
        f"{min(at_most):.2f} s to {max(at_most):.2f} s",
        f"{max(ms for repeat in hosted[-1].step_ms for ms in repeat) / 1e3:.1f} s",
    ]


def _one_of_four(name: str) -> list[str]:
    own, theirs = loads(name).values()
    both = _rates_of(own, theirs)
    steps = [step_ms(one) / 1e3 for one in own]
    (rows,) = {host_rows(one) for one in own}
    return [
        f"{own[0].case.gpu_weights} of the weights",
        f"batch {own[0].case.workload.batch_size}",
        *([f"{rows} sequences"] if rows < own[0].case.workload.batch_size else []),
        f"{median(steps):.2f} s",
        *([f"{min(steps):.2f} s to {max(steps):.2f} s"] if len(steps) > 1 else []),
        *(f"{one:.1f} tok/s" for one in both[0]),
        f"batch {theirs[0].case.workload.batch_size}",
        f"room for {_most_rows(theirs[0])}",
        *(f"{one / other:.2f}x" for one, other in both),
    ]


def _one_of_four_h200() -> list[str]:
    name = "bloom-176b-whole-kv"
    own, _ = loads(name).values()
    host = load_machine(RESULTS / own[0].machine)
    read_bytes = (host.shared_attention_bandwidth or 0.0) + (host.shared_h2d_bandwidth or 0.0)
    return [*_one_of_four(name), f"{mean(one.link_share or 0.0 for one in own):.0%}", f"{read_bytes / 1e9:.0f} GB/s"]


def _largest_batch() -> list[str]:
    streamed, kept = loads("bloom-176b-whole-186").values()
    return [
        *_kind_and_rates(streamed),
        f"{kept[0].case.gpu_weights} of the weights",
        *_kind_and_rates(kept)[1:],  # at that batch, too
    ]


def _most_rows(point: Measurement) -> int:
    """Return the largest batch of a point's configuration by the plan for its machine."""
    host, factors = load_machine(RESULTS / point.machine), _calibrated()[point.case.engine]
    return make_plan(point.case, resolve.resolve(point.case.model), host, factors=factors).max_batch_size


@cache
def _calibrated() -> dict[str, Efficiency]:
    """Return what each engine reaches, from all records."""
    return fit(load_points(RESULTS), load_machines(RESULTS))


def _four_h200() -> list[str]:
    own, theirs = loads("bloom-176b-four-gpus").values()
    both = _rates_of(own, theirs)
    (decode, their_decode), (output, their_output) = both
    return [
        f"{own[0].case.gpu_weights} of the weights",
        f"batch {own[0].case.workload.batch_size}",
        f"{median(step_ms(one) for one in own) / 1e3:.2f} s",
        f"{decode:.0f} tok/s",
        f"{output:.0f} with the prefill",
        f"{median((one.effective.wire_bytes if one.effective else 0) / step_ms(one) / 1e6 for one in own):.0f} GB/s",
        f"{median(one.link_share or 0.0 for one in own):.0%}",
        f"batch {theirs[0].case.workload.batch_size}",
        f"room for {_most_rows(theirs[0])}",
        f"{median(step_ms(one) for one in theirs) / 1e3:.2f} s",
        f"{their_decode:.1f} tok/s",
        f"{their_output:.1f} with the prefill",
        *(f"{one / other:.2f}x" for one, other in both),
    ]


def _four_h100() -> list[str]:
    own, theirs = loads("bloom-176b-four-gpus-80gb").values()
    both = _rates_of(own, theirs)
    wire = [(one.effective.wire_bytes if one.effective else 0) / step_ms(one) / 1e6 for one in own]
    return [
        f"batch {own[0].case.workload.batch_size}",
        f"{median(step_ms(one) for one in own) / 1e3:.2f} s",
        f"{median(wire):.0f} GB/s",
        f"{median(one.link_share or 0.0 for one in own):.0%}",
        f"{median(step_ms(one) for one in theirs) / 1e3:.2f} s",
        *(f"{one / other:.2f}x" for one, other in both),
    ]


def _of_one_kind(own: Sequence[Measurement]) -> list[str]:
    """Return the batch of loads of one kind, the sequences with their KV cache in host memory, and the decode step."""
    (rows,) = {host_rows(one) for one in own}
    return [
        f"batch {own[0].case.workload.batch_size}",
        f"{rows} sequences",
        f"{median(step_ms(one) for one in own) / 1e3:.2f} s",
    ]


def _kind_and_rates(own: Sequence[Measurement]) -> list[str]:
    """Return what `_of_one_kind` returns, and the mean rates: in decode, and with the prefill included."""
    return [
        *_of_one_kind(own),
        f"{mean(one.decode_tok_s or 0.0 for one in own):.1f} tok/s",
        f"{mean(one.output_tok_s or 0.0 for one in own):.1f} tok/s",
    ]


def _kv8_of_four() -> list[str]:
    found = []
    for name in ("bloom-176b-whole-kv8", "bloom-176b-whole-80gb-kv8"):
        (own,) = loads(name).values()
        kept = own[0].case.gpu_weights
        found += [
            *([f"{kept} of the weights"] if kept != "0%" else []),
            *_kind_and_rates(own),
        ]
    return found


def _kv8_four_h200() -> list[str]:
    lossy, wide = loads("bloom-176b-four-gpus-kv8").values()
    found = [f"{lossy[0].case.gpu_weights} of the weights"]
    for own in (lossy, wide):
        found += [
            f"batch {own[0].case.workload.batch_size}",
            f"{median(step_ms(one) for one in own) / 1e3:.2f} s",
            f"{mean(one.decode_tok_s or 0.0 for one in own):.0f} tok/s",
            f"{mean(one.output_tok_s or 0.0 for one in own):.0f} with the prefill",
        ]
    return [*found, *(f"{one / other:.2f}x" for one, other in _rates_of(lossy, wide))]


def _int4_h100() -> list[str]:
    own, theirs = loads("bloom-176b-whole-80gb-kv-int4").values()
    both = _rates_of(own, theirs)
    return [
        *_of_one_kind(own),
        f"{both[0][0]:.1f} tok/s",
        f"batch {theirs[0].case.workload.batch_size}",
        f"{median(step_ms(one) for one in theirs) / 1e3:.2f} s",
        f"{both[0][1]:.1f} tok/s",
        *(f"{one / other:.2f}x" for one, other in both),
    ]


def _requests_h100() -> list[str]:
    own = _one_load("nvidia-h100-80gb-hbm3-x4", "bloom-176b-whole-80gb-kv-requests")
    return [
        *_closed_loop(own),
        f"{own.case.gpu_weights} of the weights",
        f"room for {_room(own)}",
        f"{own.output_tok_s:.1f} tok/s",
        _after_the_last(own),
    ]


def _requests_kv8() -> list[str]:
    own = _one_load("nvidia-h100-80gb-hbm3-x2", "bloom-176b-whole-requests-80gb-kv8")
    return [
        *_closed_loop(own),
        f"{own.output_tok_s:.1f} tok/s",
        f"{own.waiting_tok_s:.1f} while",
        f"{_median_pass_s(own):.2f} s a pass",
        _after_the_last(own),
    ]


def _requests_h200() -> list[str]:
    own = _one_load("nvidia-h200-x4", "bloom-176b-whole-kv-requests")
    assert own.effective is not None
    _, equal = points("bloom-176b-whole-186")
    assert equal.case.gpu_weights == own.case.gpu_weights
    return [
        *_closed_loop(own),
        *_closed_loop_rates(own),
        f"{own.effective.settings['kv_host_rows']} rows",
        f"{_median_pass_s(own):.2f} s in the median",
        f"batch {equal.case.workload.batch_size}",
        f"{equal.output_tok_s:.1f} tok/s",
    ]


def _requests_h200_kv8() -> list[str]:
    own = _one_load("nvidia-h200-x4", "bloom-176b-whole-kv8-requests")
    assert own.effective is not None
    rows, hosted = _room(own), own.effective.settings["kv_host_rows"]
    assert isinstance(hosted, int)
    return [
        f"{own.requests.requests} of them",
        f"{own.requests.in_flight} at a",
        *_closed_loop_rates(own),
        f"{rows} of them run",
        f"all but {rows - hosted}",
        f"{_median_pass_s(own):.2f} s in the median",
        _after_the_last(own),
    ]


def _closed_loop_rates(own: RequestPoint) -> list[str]:
    return [
        f"{own.case.gpu_weights} of the weights",
        f"{own.output_tok_s:.1f} tok/s",
        f"{own.waiting_tok_s:.1f} while",
        f"{own.steady_tok_s:.1f} between",
    ]


def _room(own: RequestPoint) -> int:
    """Return how many requests of the first one's lengths the KV cache has room for."""
    lengths = own.samples[0]
    return own.kv_positions // (lengths.input_len + lengths.output_len)


def _median_pass_s(own: RequestPoint) -> float:
    return median(after - before for before, after in pairwise([0.0, *own.pass_ms])) / 1e3


def _one_load(machine: str, name: str) -> RequestPoint:
    (own,) = read(RESULTS / machine / f"{name}.jsonl").requests
    return own


def _closed_loop(own: RequestPoint) -> list[str]:
    lengths = own.samples[0]
    return [
        f"{lengths.input_len} tokens in",
        f"{lengths.output_len} out",
        f"{own.requests.requests} of them",
        f"{own.requests.in_flight} at a time",
    ]


def _after_the_last(own: RequestPoint) -> str:
    """Return the share of the time in which no request waited."""
    return f"{1 - own.waiting_ms / (own.busy_ms or 0.0):.0%}"


def _disks() -> list[str]:
    found = {point.case.label(): point for point in points("nvme")}
    kept, read_all = found["stream nvme"], found["stream nvme host_weights=0%"]
    own = load_machine(RESULTS / kept.machine.removesuffix("-32-cores-10-gib"))
    assert kept.effective is not None
    rate = own.nvme_bandwidth or 0
    assert all(_from_disk(one)[1] * 1e9 > 0.95 * rate for one in (kept, read_all))
    peers = [step_ms(found[label]) for label in ("deepspeed nvme", "accelerate nvme")]
    return [
        *(f"{_from_disk(one)[1]:.2f} GB/s" for one in (kept, read_all)),
        f"{rate / 1e9:.2f} GB/s",
        *(f"{ms / step_ms(read_all):.2f}x" for ms in peers),
        f"{kept.effective.settings['host_layers']} layers",
        *(f"{ms / step_ms(kept):.2f}x" for ms in peers),
    ]


def _two_gpus_peers() -> list[str]:
    own, theirs = points("bloom-176b-two-gpus-peers")
    return [
        f"batch {own.case.workload.batch_size}",
        f"{step_ms(theirs) / step_ms(own):.2f}x",
        f"{(own.output_tok_s or 0) / (theirs.output_tok_s or 1):.2f}x",
    ]


def _slice() -> list[str]:
    name = "bloom-176b-slice"
    found = gains(name).values()
    shares = [point.link_share or 0.0 for point in points(name) if point.case.label() == "deepspeed cpu"]
    return [
        f"{min(found):.2f}x",
        f"{max(found):.2f}x",
        f"{100 * min(shares):.0f}-{max(shares):.0%}",
    ]


def _slice_loads() -> tuple[list[Measurement], list[Measurement]]:
    found = loads("bloom-176b-slice-loads")
    return found["stream cpu", 132], found["deepspeed cpu", 132]


def _slice_rates() -> list[tuple[float, float]]:
    """Return the means over the loads of `stream` and of DeepSpeed, tok/s: in decode, and with the prefill included."""
    return _rates_of(*_slice_loads())


def _rates_of(own: Sequence[Measurement], theirs: Sequence[Measurement]) -> list[tuple[float, float]]:
    """Return the means over two kinds of loads, tok/s: in decode, and with the prefill included."""
    return [
        (mean(p.decode_tok_s or 0 for p in own), mean(p.decode_tok_s or 0 for p in theirs)),
        (mean(p.output_tok_s or 0 for p in own), mean(p.output_tok_s or 0 for p in theirs)),
    ]


def _int4_resident() -> list[str]:
    streamed, resident = (f"stream cpu gpu-weights={share} weights=int4" for share in ("0%", "100%"))
    ratio, least, most = _ratios("bloom-176b-int4-resident", 8, streamed, resident)
    found = loads("bloom-176b-int4-resident")[resident, 8]
    rate = mean((point.effective.gpu_weight_bytes if point.effective else 0) / step_ms(point) * 1e3 for point in found)
    share = rate / (load_machine(RESULTS / found[0].machine).hbm_bandwidth or 1)
    return [f"{ratio:.1f}x", f"{least:.1f}x", f"{most:.1f}x", f"{rate / 1e12:.1f} TB/s", f"{share:.0%}"]


def _peers() -> list[str]:
    found = {label: ms for (_, label, _), ms in steps("bloom-176b-peers").items()}
    own = found.pop("stream cpu")
    return [part for label, ms in found.items() for part in (f"{ms / own:.2f}x", label)]


def _int4() -> list[str]:
    (lossy,) = points("bloom-176b-int4-kv8")
    return [*(f"{ms / 1e3:.2f} s" for ms in steps("bloom-176b-int4").values()), f"{lossy.decode_tok_s:.1f} tok/s"]


def _kv() -> list[str]:
    best = rates("bloom-176b-kv")
    over_link, on_cpu = (f"stream cpu kv_attention={way} kv_offload=auto" for way in ("gpu", "cpu"))
    hosted = {way: [host_rows(p) for p in points("bloom-176b-kv") if p.case.label() == way] for way in best}
    first, second, third = hosted[on_cpu]
    return [
        f"{min(hosted[over_link])} sequences",
        f"{first}",
        f"{second}",
        f"{third} sequences",
        *(f"{best[on_cpu] / best[label]:.2f}x" for label in ("stream cpu", "deepspeed cpu", "accelerate cpu")),
    ]


def _opt() -> list[str]:
    (fitting, offloaded), best = (
        [max((p for p in points("opt-30b") if p.case.offload == offload), key=lambda p: p.case.workload.batch_size)
         for offload in ("none", "cpu")],
        rates("opt-30b"),
    )  # fmt: skip
    return [
        f"{offloaded.case.workload.batch_size}",
        f"{fitting.case.workload.batch_size}",
        f"{step_ms(offloaded) / step_ms(fitting):.1f}x",
        f"{best['stream cpu'] / best['stream none']:.2f}x",
    ]


def _resident() -> float:
    found = {point.case.gpu_weights: step_ms(point) for point in points("bloom-176b-resident")}
    return found["25%"] / found["0%"]


def _reload() -> list[str]:
    (file,) = study.files(RESULTS, prefix_reuse.Run)
    (run,) = (run for run in study.read(file, prefix_reuse.Run).runs if run.case.offload == "cpu")
    longest = run.measured[-1]
    return [
        f"{prefix_reuse.break_even(run.points, 'memory'):,.0f} tokens",
        f"{longest.context:,} tokens",
        f"{longest.gain('memory'):.2f}x",
    ]


# What the paragraphs of docs/results.md quote from records: the bold beginning of each, and its figures in order
FIGURES: dict[str, Callable[[], list[str]]] = {
    "All of BLOOM-176B on one GPU": _whole,
    "All of BLOOM-176B on two GPUs": _two_gpus,
    "All of BLOOM-176B on two GPUs of 80 GB": _two_small_gpus,
    "All of BLOOM-176B on one of four H200": _one_of_four_h200,
    "Nearly the largest batch on one of four H200": _largest_batch,
    "All of BLOOM-176B on four H200": _four_h200,
    "All of BLOOM-176B on one of four H100": lambda: _one_of_four("bloom-176b-whole-80gb-kv"),
    "All of BLOOM-176B on four H100": _four_h100,
    "With a KV cache in 8 bits on one of four GPUs": _kv8_of_four,
    "With a KV cache in 8 bits on four H200": _kv8_four_h200,
    "In int4 on one of four H100": _int4_h100,
    "DeepSpeed on two GPUs": _two_gpus_peers,
    "Weights on disk": _disks,
    "All of BLOOM-176B in int4": _int4,
    "BLOOM-176B in int4, wholly on one H200": _int4_resident,
    "A slice of BLOOM-176B": _slice,
    "The same slice in three loads": lambda: [f"{own / theirs:.2f}x" for own, theirs in _slice_rates()],
    "Every engine in one run": _peers,
    "OPT-30B": _opt,
    "Other families": lambda: [f"{gain:.2f}x" for gain in gains("dense-peers").values()],
    "Batches beyond the GPU's memory": _kv,
    "Resident layers": lambda: [f"{_resident():.2f}x"],
    "Reloading a KV cache": _reload,
    "Experts on demand": _experts,
    "Fewer experts of more": _qwen,
    "Experts on the CPU": _cpu_experts,
    "All of Mixtral-8x7B": _mixtral,
    "Mixtral-8x7B in every engine": _mixtral_rates,
    "With 8 tokens out": _mixtral_peers,
    "FP8 as released": _fp8,
    "Small batches without offload": _small,
    "Small batches of a mixture": _small_mixture,
    "Requests of different lengths": _requests,
    "Requests on a fifth of BLOOM-176B": _slice_requests,
    "Requests on all of BLOOM-176B": _whole_requests,
    "Requests with a KV cache in 8 bits": _requests_kv8,
    "Requests on one of four H200": _requests_h200,
    "Requests in 8 bits on one of four H200": _requests_h200_kv8,
    "Requests on one of four H100": _requests_h100,
    "Drafts": _drafts,
    "Drafts that are never right": _never_right,
}


if __name__ == "__main__":
    sys.exit(cog(*(sys.argv[1:] or ["-r"])))
