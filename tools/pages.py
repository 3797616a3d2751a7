"""Tables of README.md and docs/*.md, made from the records in `sweeps/results`.

A tool of the checkout: the pages call these functions between cog's markers, and `make readme` writes their output.
"""

import os
import shlex
import subprocess
import sys
import textwrap
from bisect import bisect
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

from zinfer.analysis.group import Setting
from zinfer.analysis.study import show
from zinfer.checkpoint.resolve import resolve
from zinfer.core.engine import ENGINES
from zinfer.core.errors import EXIT_CODES
from zinfer.core.units import counted, duration, figures, gb, gib
from zinfer.record import store, study
from zinfer.record.measurement import Measurement
from zinfer.record.requests import RequestPoint
from zinfer.system import documents
from zinfer.system.machines import load as load_machine

Point = Measurement | RequestPoint
RESULTS, RECIPES = Path("sweeps/results"), Path(str(files("zinfer") / "catalog" / "sweeps"))
WIDTH = 120
# Machines whose records are in git; other folders belong to whoever runs this.
MACHINES = (
    "nvidia-h200-x4", "nvidia-h200-x2", "nvidia-h200", "nvidia-h200-16-cores-125-gib", "nvidia-h100-80gb-hbm3-x4",
    "nvidia-h100-80gb-hbm3-x2", "nvidia-h100-80gb-hbm3-x2-32-cores-10-gib", "nvidia-h100-80gb-hbm3",
)  # fmt: skip
HEADLINES = (
    "nvidia-h200-x4/bloom-176b-whole-kv",
    "nvidia-h100-80gb-hbm3-x4/bloom-176b-whole-80gb-kv",
    "nvidia-h200-16-cores-125-gib/gpt-oss-120b-llama-server",
    "nvidia-h100-80gb-hbm3/mixtral-whole",
    "nvidia-h100-80gb-hbm3/opt-30b",
    "nvidia-h100-80gb-hbm3/llama-70b-31k-default",
)
# Figures in git, `zinfer plot`'s: <machine>/<sweep>-<figure>.
FIGURES = (
    "nvidia-h200/bloom-176b-whole-throughput",
    "nvidia-h100-80gb-hbm3/bloom-176b-slice-throughput",
    "nvidia-h100-80gb-hbm3/bloom-176b-slice-timeline",
    "nvidia-h100-80gb-hbm3/opt-30b-throughput",
    "nvidia-h100-80gb-hbm3/reuse-llama-3.1-8b-stream-cpu",
    "nvidia-h200-16-cores-125-gib/llama-3.1-8b-tensorrt-budget",
)
HEADS = (
    "model", "GPU", "#in / out", "configuration", "#batch", "#loads", "#weights on GPU", "#decode tok/s",
    "#output tok/s", "beside it", "#weights on GPU", "#decode ratio", "#output ratio",
)  # fmt: skip
PROLOGUE = """\
from tools.pages import *
from tools.campaign.record import reliability
from tools.conformance.record import model_tables
"""
read = cache(store.read)  # no record changes while pages are made


def cog(*options: str) -> int:
    """Run cog on the pages: ``-r`` writes them, ``--check`` compares."""
    from cogapp import Cog  # type: ignore[import-untyped]

    pages = ["README.md", *map(str, sorted(Path("docs").glob("*.md")))]
    status: int = Cog().main(["cog", "-P", "-p", PROLOGUE, "--verbosity=1", *options, *pages])
    return status


class Entry(NamedTuple):
    """Loads of one configuration at one batch size or request arrival."""

    points: tuple[Point, ...]

    @property
    def last(self) -> Point:
        """Point of the last load."""
        return self.points[-1]

    @property
    def label(self) -> str:
        """Configuration, marked if it changes the model's numbers."""
        return self.last.case.label() + " (lossy)" * self.last.case.lossy

    @property
    def size(self) -> str:
        """Batch size, or the arrival of requests."""
        if isinstance(self.last, RequestPoint):
            return f"{self.last.requests.requests:,} requests, {self.last.requests.loop}"
        return f"batch {self.last.case.workload.batch_size}"

    @property
    def gpu_bytes(self) -> int:
        """Weight bytes on the GPUs, in the form that they wait in."""
        return self.last.effective.gpu_weight_bytes if self.last.effective else 0

    @property
    def host_rows(self) -> int:
        """Sequences with their KV cache in host memory."""
        return int(self.last.effective.settings.get("kv_host_rows", 0)) if self.last.effective else 0

    def runs(self, starts: Sequence[str]) -> list[int]:
        """Return the number of the start that each load belongs to."""
        return [bisect(starts, point.started_at) for point in self.points]

    def rates(self, name: str = "output_tok_s") -> list[float]:
        """Return a rate of each load that has it, in tok/s."""
        return [rate for point in self.points if (rate := getattr(point, name, None))]

    def rate(self, name: str = "output_tok_s") -> float:
        """Return the mean of `rates`; 0 without one."""
        return fmean(self.rates(name) or [0.0])


class Workload(NamedTuple):
    """Entries of a results file with equal model and lengths."""

    entries: tuple[Entry, ...]
    starts: tuple[str, ...]

    @property
    def title(self) -> str:
        """Model, and the part of it that was measured."""
        point = self.entries[0].last
        return Setting.of(point, total_layers=point.total_layers).part

    @property
    def lengths(self) -> str:
        """Tokens in and out of a sequence, or the requests' source."""
        lengths = {
            entry.last.requests.source.replace(",", ", ")
            if isinstance(entry.last, RequestPoint)
            else f"{entry.last.case.workload.input_len:,} / {entry.last.case.workload.output_len:,}"
            for entry in self.entries
        }
        return "; ".join(sorted(lengths))

    @property
    def best(self) -> Entry:
        """Entry with the highest output rate, an exact one if possible."""
        return max([entry for entry in self.entries if not entry.last.case.lossy] or self.entries, key=Entry.rate)

    @property
    def peers(self) -> list[Entry]:
        """Best entry of each other configuration, and of equal rows beside requests."""
        best_entries: dict[tuple[str, type], Entry] = {}
        for entry in sorted(self.entries, key=Entry.rate):
            best_entries[entry.label, type(entry.last)] = entry
        del best_entries[self.best.label, type(self.best.last)]
        return sorted(best_entries.values(), key=self.entries.index)

    def ratio(self, ours: Entry, theirs: Entry, rate: str = "output_tok_s") -> str:
        """Return the ratio of two mean rates, measured in one run.

        One run is one start of the sweep, or starts that took turns, two of each at least.
        """
        our_runs, their_runs = ours.runs(self.starts), theirs.runs(self.starts)
        runs = set(our_runs) & set(their_runs)
        if (
            not runs
            and min(len(our_runs), len(their_runs)) > 1
            and min(our_runs) < max(their_runs)
            and min(their_runs) < max(our_runs)
        ):
            runs = {*our_runs, *their_runs}
        first, second = (
            Entry(tuple(point for point, run in zip(entry.points, numbers, strict=True) if run in runs)).rates(rate)
            for entry, numbers in ((ours, our_runs), (theirs, their_runs))
        )
        ratios = [a / b for a, b in zip(first, second, strict=False)]
        if not ratios:
            return ""
        spread = f" ({min(ratios):.2f} to {max(ratios):.2f})" if len(ratios) > 1 else ""
        return f"{fmean(first[: len(ratios)]) / fmean(second[: len(ratios)]):.2f}x{spread}"

    def ratios(self, theirs: Entry) -> tuple[str, str]:
        """Return the best entry's decode and output ratios over a peer."""
        if theirs not in self.peers:
            return "", ""
        decode, output = (self.ratio(self.best, theirs, rate) for rate in ("decode_tok_s", "output_tok_s"))
        return decode, output


@cache
def workloads(name: str) -> tuple[Workload, ...]:
    """Return the workloads of the results file ``<machine>/<sweep>``. Raises StoreError if there is none."""
    records = read(RESULTS / f"{name}.jsonl")
    entries_by_group: dict[object, dict[object, list[Point]]] = {}
    every: list[Point] = [*records.points, *records.requests]
    usable = [point for point in every if point.usable]
    for point in sorted(usable, key=lambda point: (point.case.workload.batch_size, point.started_at)):
        load = point.case.workload
        lengths = None if records.requests else (load.input_len, load.output_len)  # rows beside requests are their like
        key = point.key if isinstance(point, RequestPoint) else point.case
        entries_by_group.setdefault((point.case.model, point.case.layers, lengths), {}).setdefault(key, []).append(
            point
        )
    starts = tuple(header.started_at for header in records.headers)
    order = dict(zip(ENGINES, range(len(ENGINES)), strict=True))  # servers of others are last
    return tuple(
        Workload(tuple(sorted(some, key=lambda entry: order.get(entry.last.case.engine, len(order)))), starts)
        for entries in entries_by_group.values()
        if (some := [Entry(tuple(points)) for points in entries.values()])
    )


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table without empty columns."""
    rows = list(rows)
    kept = [nth for nth in range(len(heads)) if any(row[nth] for row in rows)]
    rule = ["---:" if heads[nth].startswith("#") else "---" for nth in kept]
    lines = [[heads[nth].removeprefix("#") for nth in kept], rule, *([row[nth] for nth in kept] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


SWEEP = ("sweep", "machine", "in / out")  # first columns of both tables
RATIOS = ("#best over it, decode", "#output")
ROWS = (
    *SWEEP, "configuration", "#batch", "#loads", "#weights on GPU", "#rows in host memory", "#output tok/s",
    "#decode tok/s", "#TTFT", "#decode step", "#range of loads", "#link share", "#read from disk", *RATIOS,
)  # fmt: skip
REQUESTS = (
    *SWEEP, "configuration", "requests", "#loads", "#weights on GPU", "#rows in host memory", "#output tok/s",
    "#range of loads", "#while others waited", "#TTFT p50", "#p99", "#TPOT p50", "#p99", "#right drafts", *RATIOS,
)  # fmt: skip
Cells = tuple[str, ...]


def cells(workload: Workload, entry: Entry) -> Cells:
    """Return the cells of an entry, in `ROWS` or in `REQUESTS`."""
    last, points = entry.last, [point for point in entry.points if isinstance(point, Measurement)]
    where = f"{len(entry.points)}", gb(entry.gpu_bytes, 0) if entry.gpu_bytes else "", f"{entry.host_rows or ''}"
    if isinstance(last, RequestPoint):
        rates, waiting, counts = entry.rates(), entry.rates("waiting_tok_s"), last.counts
        right = counts.accepted / counts.checked if counts.checked else None
        times = [last.summary("ttft_ms"), last.summary("tpot_ms")]
        return (
            entry.label,
            entry.size,
            *where,
            figures(entry.rate(), 4),
            f"{figures(min(rates), 4)} to {figures(max(rates), 4)}" if len(rates) > 1 else "",
            figures(fmean(waiting), 4) if waiting else "",
            *(_seconds(ms) if time else "" for time in times for ms in (time[1:4:2] if time else (0.0, 0.0))),
            "" if right is None else f"{right:.0%}",
            *workload.ratios(entry),
        )
    steps = [point.step_median_ms or 0.0 for point in points]
    shares = [point.link_share for point in points if point.link_share]
    disk = last.effective.nvme_bytes_per_step if last.effective else 0
    return (
        entry.label, f"{last.case.workload.batch_size}", *where, figures(entry.rate(), 4),
        figures(entry.rate("decode_tok_s"), 4), _seconds(fmean(fmean(point.ttft_ms) for point in points)),
        _seconds(fmean(steps)), f"{_seconds(min(steps))} to {_seconds(max(steps))}" if len(steps) > 1 else "",
        f"{fmean(shares):.0%}" if shares else "",
        f"{gb(disk)} a step, {gb(disk / fmean(steps) * 1e3, 2)}/s" if disk else "", *workload.ratios(entry),
    )  # fmt: skip


def tables(sweeps: Iterable[tuple[str, Workload]]) -> Iterator[str]:
    """Yield the tables of equal rows and of loads of requests."""
    shown: dict[type[Point], list[Cells]] = {Measurement: [], RequestPoint: []}
    for name, workload in sweeps:
        machine, _, sweep = name.partition("/")
        for kind, rows in shown.items():
            first = sweep, machine.removeprefix("nvidia-"), workload.lengths  # of the first row only
            for entry in (entry for entry in workload.entries if isinstance(entry.last, kind)):
                rows.append((*first, *cells(workload, entry)))
                first = "", "", ""
    yield from (markdown(ROWS if kind is Measurement else REQUESTS, rows) for kind, rows in shown.items() if rows)


def _seconds(ms: float) -> str:
    return duration(ms / 1e3)


def results() -> str:
    """Return a section for each model or slice; whole models first."""
    sections: dict[tuple[bool, str, str], list[tuple[str, Workload]]] = {}
    for machine in MACHINES:
        for file in sorted((RESULTS / machine).glob("*.jsonl")):
            for workload in workloads(name := f"{machine}/{file.stem}"):
                case = workload.entries[0].last.case
                weights = "random weights" if case.load_format == "dummy" else "weights of a checkpoint"
                key = case.layers is not None, workload.title, f"{case.dtype}, {weights}"
                sections.setdefault(key, []).append((name, workload))
    return "\n\n".join(_section(*key[1:], sections[key]) for key in sorted(sections))


def _section(title: str, conditions: str, sweeps: Sequence[tuple[str, Workload]]) -> str:
    points = [point for _, workload in sweeps for entry in workload.entries for point in entry.points]
    days = sorted({point.started_at[:10] for point in points})
    names = dict.fromkeys(name for name, _ in sweeps)
    descriptions = [f"{name.rpartition('/')[2]}: {text}" for name in names if (text := _description(name))]
    words = f"{conditions}, {' to '.join(dict.fromkeys((days[0], days[-1])))}. {' '.join(descriptions)}"
    drawn = [f"![{title}](../plots/{figure}.svg)" for figure in FIGURES if figure.rpartition("-")[0] in names]
    return "\n\n".join(filter(None, (f"### {title}", wrapped(words), " ".join(drawn), *tables(sweeps))))


def _description(name: str) -> str:
    """Return a sweep's description, from its header or its packaged recipe."""
    header, path = read(RESULTS / f"{name}.jsonl").headers[0], RECIPES / f"{Path(name).name}.toml"
    if header.description or not path.exists():
        return header.description
    recipe = documents.read_toml(path)
    axes = {key: recipe[key] for key in ("model", "engine", "layers", "gpu_weights") if key in recipe}
    same = all(header.recipe.get(key) == (value if isinstance(value, list) else [value]) for key, value in axes.items())
    return str(recipe["description"]) if same else ""


def wrapped(text: str) -> str:
    """Return a paragraph of at most `WIDTH` characters a line."""
    return textwrap.fill(text.strip(), WIDTH, break_long_words=False, break_on_hyphens=False)


def headlines() -> str:
    """Return the table of `HEADLINES`: the best exact configurations and their peers."""
    rows, rates = [], ("decode_tok_s", "output_tok_s")
    for name in HEADLINES:
        (workload,) = workloads(name)
        best, case = workload.best, workload.best.last.case
        peers = [
            peer
            for of in ("engine", "offload")
            for peer in sorted(workload.peers, key=Entry.rate, reverse=True)
            if getattr(peer.last.case, of) != getattr(case, of) and workload.ratio(best, peer)
        ]
        gpu = load_machine(RESULTS / best.last.machine).gpu_name or ""
        row = [workload.title, gpu, workload.lengths, best.label, f"{case.workload.batch_size}", f"{len(best.points)}"]
        row += [gb(best.gpu_bytes, 0), *(figures(best.rate(rate)) for rate in rates)]
        for peer in peers[:1]:
            row += [f"{peer.label}, {peer.size}", gb(peer.gpu_bytes, 0) if peer.gpu_bytes else "-"]
            row += [workload.ratio(best, peer, rate) for rate in rates]
        rows.append(row + ["-"] * (len(HEADS) - len(row)))
    return markdown(HEADS, rows)


def _traced(name: str) -> Measurement:
    """Return the best configuration's last point that has a timeline."""
    (workload,) = workloads(name)
    return [point for point in workload.best.points if isinstance(point, Measurement) and point.timeline][-1]


def pass_bytes(name: str) -> str:
    """Return the table of a decode step's weight bytes and their time."""
    point = _traced(name)
    effective, link = point.effective, point.link_bandwidth
    assert effective is not None
    assert link is not None
    weights, settings = resolve(point.case.model).weight_bytes, effective.settings
    rows = [
        ("all weights, as released", weights),
        (f"without the {settings['resident_layers']} layers that stay on the GPU", effective.streamed_bytes_per_step),
        ("the same, losslessly coded", effective.wire_bytes),
    ]
    heads = ("weights in a decode step", "#bytes", f"#time on a link of {link / 1e9:.1f} GB/s")
    host_rows = f"{settings['kv_host_rows']} of {point.case.workload.batch_size} sequences"
    measured = f"**measured**, with the KV cache of {host_rows} in host memory"
    times = [(what, gb(size, 0), duration(size / link)) for what, size in rows]
    return markdown(heads, [*times, (measured, "", _seconds(point.step_median_ms or 0.0))])


def timeline(name: str, ms: float = 400.0, width: int = 100) -> str:
    """Return the first `ms` of a traced decode step as text.

    A row is a lane; a digit is the last one of a layer. A sentence names the layers that stay.
    """
    inside = (span for span in _traced(name).timeline if span.end_ms > 0 and span.start_ms < ms)
    spans = [span for span in inside if span.layer is not None]
    rows = []
    for lane in ("copy", "unpack", "compute"):
        row = [" "] * width
        for span in (span for span in spans if span.lane == lane):
            first, last = int(max(0.0, span.start_ms) / ms * width), round(min(ms, span.end_ms) / ms * width)
            row[first : max(first + 1, last)] = str((span.layer or 0) % 10) * max(1, last - first)
        rows.append(f"{lane:8}|{''.join(row[:width])}|")
    axis = f"{'':8}0 ms{f'{ms:.0f} ms':>{width - 2}}"
    computed, copied = ({span.layer for span in spans if span.lane == lane} for lane in ("compute", "copy"))
    *some, last_layer = map(str, sorted(layer for layer in computed - copied if layer is not None))
    stay = f"No copy is of layer {', '.join(some)} or {last_layer}: they stay on the GPU."
    return "\n".join(("```text", *rows, axis, "```", "", stay))


def engines() -> str:
    """Return the table of engines, their offloads and measured points."""
    measured = [point for name in MACHINES for point in read(RESULTS / name).points if point.usable]
    rows = []
    for name, kind in ENGINES.items():
        points = [point for point in measured if point.case.engine == name]
        hosts = len({_host(name) for name in {point.machine for point in points}})
        state = f"{len(points)} points on {counted(hosts, 'host')}" if points else "experimental: never timed on a GPU"
        rows.append(
            (f"`{name}`", ", ".join(offload for offload in ("none", "cpu", "nvme") if offload in kind.offloads), state)
        )
    return markdown(("engine", "offload", "measured"), rows)


def _host(name: str) -> tuple[object, ...]:
    """Return a host's identity, whatever its control group's memory."""
    machine = load_machine(RESULTS / name)
    host = machine.details["host"]
    return machine.gpu_name, machine.gpu_count, host["cores"], round(host["memory_bytes"] / 2**30)


def machines() -> str:
    """Return the table of measured machines and their links."""
    rows = []
    for name in MACHINES:
        machine = load_machine(RESULTS / name)
        links = sorted(point.link_bandwidth / 1e9 for point in read(RESULTS / name).points if point.link_bandwidth)
        host = machine.details["host"]
        rows.append((
            f"`{name}`", f"{machine.gpu_count} {machine.gpu_name}", gib(machine.gpu_bytes, 0),
            gib(min(machine.host_bytes or 0, host["memory_bytes"]), 0), f"{host['cores']}",
            f"{links[0]:.1f} to {links[-1]:.1f}, median {median(links):.1f}",
        ))  # fmt: skip
    return markdown(("machine", "GPUs", "#memory of each", "#host memory", "#cores", "#link of each load, GB/s"), rows)


def last_study(kind: str, machine: str = "") -> str:
    """Return the table of the last study of a kind."""
    shown = show(study.last(RESULTS / machine, kind))
    return markdown(shown.columns, shown.cells)


def routings() -> str:
    """Return the table of the routing study, and its verdict."""
    run = study.last(RESULTS, "routing")
    text = "" if run.text is None else f"; {run.text.tokens:,} tokens of {run.text.name}"
    notes = " ".join([f"({run.about}{text}.)", *show(run).notes])
    return f"{last_study('routing')}\n\n{wrapped(notes)}"


def exit_codes() -> str:
    """Return the table of exit codes."""
    return markdown(("#code", "meaning"), EXIT_CODES.items())


def command(line: str) -> str:
    """Return a command's output on 80 columns as a text block."""
    environment = os.environ | {"COLUMNS": "80", "TERM": "dumb"}
    words = [sys.executable, "-m", *shlex.split(line)]
    done = subprocess.run(words, check=True, capture_output=True, text=True, env=environment)
    return "\n".join(("```text", *(row.rstrip() for row in done.stdout.rstrip().splitlines()), "```"))


if __name__ == "__main__":
    sys.exit(cog(*(sys.argv[1:] or ["-r"])))
