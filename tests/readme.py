"""Tables and figures of README.md and docs/models.md, made from the records in `sweeps/results`.

Both pages call these functions between cog's markers; `make readme` writes the output into the pages. The README's
paragraphs are written by hand: `figures` returns what they must quote, and tests/test_readme.py compares.
"""

import sys
import textwrap
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from cogapp import Cog  # type: ignore[import-untyped]

from tests.conformance import record as conformance
from zinfer.analysis.calibrate import fit, load_machines, load_points
from zinfer.plan.plan import make_plan
from zinfer.record import accuracy, codec, prefix_reuse, study
from zinfer.record.measurement import Measurement, latest
from zinfer.record.store import read
from zinfer.spec import machine, resolve
from zinfer.spec.engine import ENGINES
from zinfer.spec.errors import EXIT_CODES

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "sweeps" / "results"
PAGES = ("README.md", "docs/models.md")
COLUMNS = ("batch", "output tok/s", "TTFT", "decode step", "link share")
WIDTH = 120


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
        f"{sum(point.ttft_ms) / len(point.ttft_ms) / 1e3:.2f} s",
        f"{step_ms(point) / 1e3:.3f} s",
        f"{point.link_share:.0%}" if point.link_share else "-",
    ]


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown; columns whose head begins with ``#`` are set right."""
    rule = ["---:" if head.startswith("#") else "---" for head in heads]
    lines = [[head.removeprefix("#") for head in heads], rule, *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def accuracies() -> str:
    """Return the table of `zinfer accuracy`'s record."""
    return markdown(accuracy.COLUMNS, study.last(RESULTS, accuracy.AccuracyRecord).cells())


def codecs() -> str:
    """Return the table of `zinfer codec`'s record."""
    return markdown(codec.COLUMNS, study.last(RESULTS, codec.CodecRecord).cells())


def exit_codes() -> str:
    """Return the table of exit codes."""
    return markdown(("#code", "meaning"), EXIT_CODES.items())


def supported_models() -> str:
    """Return the counts of the conformance record, as a paragraph with a link."""
    text = f"[Supported models](docs/models.md): {conformance.summary(conformance.read())}"
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


def figures() -> dict[str, list[str]]:
    """Return what the README's paragraphs quote from records: the bold beginning of each, and its figures in order."""
    return {
        "All of BLOOM-176B on one GPU": _whole(),
        "A slice of BLOOM-176B": _slice(),
        "Every engine in one run": _peers(),
        "Other families": [f"{gain:.2f}x" for gain in gains("dense-peers").values()],
        "Batches beyond the GPU's memory": _kv(),
        "Resident layers": [f"{_resident():.2f}x"],
        "Reloading a KV cache": _reload(),
    }


def _whole() -> list[str]:
    small, *_, large, theirs = points("bloom-176b-whole")
    folder = RESULTS / "nvidia-h200"
    factors = fit(load_points(RESULTS), load_machines(RESULTS), [])["deepspeed"]
    plan = make_plan(theirs.case, resolve.resolve(theirs.case.model), machine.load(folder), factors=factors)
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
        f"{plan.max_batch_size}",
        f"{(large.decode_tok_s or 0) / (theirs.decode_tok_s or 1):.2f}x",
        f"{(large.output_tok_s or 0) / (theirs.output_tok_s or 1):.2f}x",
        f"{streamed_to_32:.1f} tok/s",
    ]


def _slice() -> list[str]:
    name = "bloom-176b-slice"
    found, best = gains(name).values(), rates(name)
    shares = [point.link_share or 0.0 for point in points(name) if point.case.label() == "deepspeed cpu"]
    return [
        f"{min(found):.2f}x",
        f"{max(found):.2f}x",
        f"{100 * min(shares):.0f}-{max(shares):.0%}",
        f"{best['stream cpu'] / best['deepspeed cpu']:.2f}x",
    ]


def _peers() -> list[str]:
    found = {label: ms for (_, label, _), ms in steps("bloom-176b-peers").items()}
    own = found.pop("stream cpu")
    return [part for label, ms in found.items() for part in (f"{ms / own:.2f}x", label)]


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


if __name__ == "__main__":
    sys.exit(cog(*(sys.argv[1:] or ["-r"])))
