"""Sections about measurements: configurations and percentiles, studies, machines."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from zinfer.analysis import rates, requests, sla, study
from zinfer.analysis.economics import cost
from zinfer.analysis.group import Group, Points, by_load
from zinfer.analysis.requests import RequestRates
from zinfer.core.case import Case
from zinfer.core.machine import FIGURES, Machine
from zinfer.core.units import duration, figures, gib, milliseconds
from zinfer.core.value import group_by
from zinfer.record.measurement import Measurement, Recorded
from zinfer.record.requests import METRICS, RequestPoint
from zinfer.record.study import Study
from zinfer.report.document import Block, Heading, Items, Kind, Picture, Row, Table, Text, table
from zinfer.report.plot import style
from zinfer.report.plot.figures import draw

_NAMES = {
    "gpu_bytes": "GPU memory, usable, each",
    "host_bytes": "host memory, usable",
    "nvme_bytes": "disk, free",
    "hbm_bandwidth": "GPU memory, copy",
    "h2d_bandwidth": "link, host to GPU, page-locked",
    "d2h_bandwidth": "link, GPU to host, page-locked",
    "duplex_bandwidth": "link, each way, both at once",
    "links_bandwidth": "links of all GPUs together, host to GPU, page-locked",
    "gather_bandwidth": "GPU to GPU, what each gets while all exchange",
    "pageable_bandwidth": "link, host to GPU, pageable",
    "host_bandwidth": "host memory, copy",
    "attention_bandwidth": "host memory, attention of the CPU",
    "grouped_attention_bandwidth": "host memory, attention of the CPU where eight heads share a key",
    "shared_attention_bandwidth": "host memory, attention of the CPU while the link copies",
    "shared_h2d_bandwidth": "link while the CPU attends",
    "nvme_bandwidth": "disk, read",
    "matmul_flops": "matrix product, bf16",
}
# Errors, as shares, of which nine in ten predictions of a time, and all of a peak of host memory, have less.
PLAN_BAND, HOST_BAND = 0.2, 0.1
DRAWN = 3  # models with a figure: `zinfer plot` draws all
_PERCENTILES = ("p50", "p90", "p99")
_TIMES: tuple[sla.Metric, ...] = ("ttft", "tpot")
_WORDS = (
    "Each configuration at its own best batch; those with lossy settings stand last. TTFT is the time to the first "
    "token, over the repeats, and TPOT the time per token after it, over the decode steps. A percentile that has too "
    f"few samples is left out: p90 needs {sla.needed('p90')}, p99 {sla.needed('p99')}. In the name of a configuration "
    "`none` means weights on the GPU, `cpu` weights in host memory, `nvme` weights on disk. Over the plan: what was "
    f"measured over what was predicted before, with (!) where they differ by more than {PLAN_BAND:.0%}, in host memory "
    f"by {HOST_BAND:.0%}. `zinfer plan --model MODEL --machine all --calibrate` predicts other "
    "machines; with one of them, it says what bounds a step."
)
_REQUEST_TIMES = ("configuration", "time", "#mean", "#p50", "#p90", "#p99")
_REQUEST_WORDS = (
    "Requests of different lengths that come and end at any time, unlike the equal sequences of other tables, with "
    "which they are not compared. Output tok/s are the tokens of answers over the time of the whole load, its end "
    "included, in which few requests are left; tok/s while others waited leave that out. Prompts are computed in the "
    "same passes as answers: the rates of both are over the same time. Link busy: the weights' bytes of a pass at the "
    "link's measured rate, over the time of the passes."
)


class WorkloadFindings(NamedTuple):
    """Group of points of one sweep or several."""

    group: Group
    points: Points
    loads: Mapping[Case, tuple[float, ...]] = {}  # output tok/s of each usable record of a case, one for each load

    @property
    def name(self) -> str:
        """Model, slice, lengths and machine: the name of a table's subject."""
        return f"{self.group.title}, {self.group.machine}"


class Findings(NamedTuple):
    """Everything that a report is made from. `damaged` names the lines of result files that could not be used."""

    workloads: tuple[WorkloadFindings, ...] = ()
    damaged: tuple[str, ...] = ()
    gpu_hour_usd: float | None = None
    studies: tuple[Study, ...] = ()
    requests: tuple[RequestPoint, ...] = ()
    machines: Mapping[str, Machine] = {}  # machines of workloads by name, those that are described

    @property
    def main(self) -> tuple[WorkloadFindings, ...]:
        """Workloads of whole models; all of them if there are only slices."""
        return tuple(workload for workload in self.workloads if workload.group.layers is None) or self.workloads

    @property
    def points(self) -> Points:
        return tuple(point for workload in self.workloads for point in workload.points)


def results(findings: Findings) -> Iterator[Block]:
    """Yield each workload's figure, configurations and failures; then loads of requests."""
    if findings.workloads:
        yield Text(_WORDS)
    if (price := findings.gpu_hour_usd) is not None:
        yield Text(f"Price as given: an hour of a GPU {price:g} USD, always at work. Nothing else is counted.")
    comparing = [workload.group for workload in findings.main if len(rates.best_by_load(workload.points)) > 1]
    drawn = [*{group.model: group for group in reversed(comparing)}.values()][-DRAWN:]
    for workload in findings.workloads:
        yield Heading(workload.name)
        yield from _figure(workload) if workload.group in drawn else ()
        yield _tops(workload, findings.gpu_hour_usd)
        verdicts = (verdict for verdict in rates.offload_verdicts(workload.points) if verdict.compares)
        yield Items(f"{verdict.engine or 'Any engine'}: {verdict.text}" for verdict in verdicts)
        yield _failed(workload.points)
    yield from _loads(findings.requests)


def titled(point: Recorded) -> str:
    """Return the configuration's name, marked if it is lossy."""
    return point.case.label() + " (lossy)" * point.case.lossy


def _figure(workload: WorkloadFindings) -> Iterator[Picture]:
    def described(point: Measurement) -> str:
        first = duration((point.mean_ttft_ms or 0.0) / 1e3)
        return f"batch {point.case.workload.batch_size}, {rates.rate_text(point)} tok/s, TTFT {first}"

    for figure in draw(workload.group, workload.points, ("latency",)).values():
        title = "Latency against output tok/s, a line for each configuration from its smallest to its largest batch."
        timed = by_load([point for point in workload.points if point.usable])
        loads = ". ".join(f"{load.label()}: {'; '.join(map(described, points))}" for load, points in timed.items())
        yield Picture(title, f"{title} {loads}.", style.render(figure, "svg").decode())


def _tops(workload: WorkloadFindings, price: float | None) -> Table:
    top = rates.winner(workload.points)
    edges = {edge.load: edge for edge in rates.edges(workload.points)}

    columns: dict[str, Callable[[Measurement], str]] = {
        "configuration": titled,
        "#batch": lambda point: str(point.case.workload.batch_size),
        "#tok/s": rates.rate_text,
        **{f"#{time.upper()} {name}": _percentile(time, name) for time in _TIMES for name in _PERCENTILES},
        "#link share": lambda point: f"{point.link_share:.0%}" if point.usable and point.link_share else "",
        "#GPU peak": lambda point: gib(point.gpu_bytes) if point.gpu_bytes else "",
        "#host peak": lambda point: gib(point.host_peak_bytes) if point.host_peak_bytes else "",
        "over the plan": over_the_plan,
        "#OOM at": lambda point: str(edges[point.case.load].smallest_oom or ""),
    }
    if price is not None:
        columns |= {
            "#USD a million tokens": lambda point: f"{usd:,.2f}" if (usd := cost(point, price).usd_per_mtok) else "",
            "#J a token": lambda point: figures(joules) if (joules := cost(point).j_per_token) else "",
            "energy from": lambda point: cost(point).method or "not read",
        }

    def kind(point: Measurement) -> Kind:
        return "best" if point is top else "" if point.status == "ok" else "failed"

    return table(f"{workload.group.conditions}.", columns, rates.ranked(workload.points), kind)


def _percentile(time: sla.Metric, name: str) -> Callable[[Measurement], str]:
    def cell(point: Measurement) -> str:
        values = sla.samples(point, time)
        enough = len(values) >= (1 if name == "p50" else sla.needed(name))
        return duration(sla.statistic(values, name)) if enough else ""

    return cell


def over_the_plan(point: Measurement) -> str:
    """Return measured values over what the plan predicted: ``step 1.31x (!)``. Those beyond a band are marked."""
    values = (
        ("TTFT", point.mean_ttft_ms, "ttft_ms", PLAN_BAND),
        ("step", point.tpot_ms, "step_ms", PLAN_BAND),
        ("host", point.host_peak_bytes, "host_bytes", HOST_BAND),
    )
    known = ((name, value, point.predicted.get(key), band) for name, value, key, band in values)
    ratios = ((name, value / planned, band) for name, value, planned, band in known if value and planned)
    return ", ".join(f"{name} {ratio:.2f}x" + " (!)" * (abs(ratio - 1) > band) for name, ratio, band in ratios)


def _failed(points: Points) -> Table:
    failed = [point for point in points if point.status != "ok"]
    failures = group_by(failed, lambda point: (point.case.label(), point.status, point.stage or ""))
    columns: dict[str, Callable[[list[Measurement]], str]] = {
        "configuration": lambda alike: alike[0].case.label(),
        "#batch": lambda alike: ", ".join(str(point.case.workload.batch_size) for point in alike),
        "outcome": lambda alike: alike[0].status,
        "in": lambda alike: alike[0].stage or "",
        "message": lambda alike: style.shortened(" ".join((alike[0].error or "").split()), 160),
    }
    return table("Failed points, and how the smallest such batch ended.", columns, failures.values())


def _loads(points: Iterable[RequestPoint]) -> Iterator[Block]:
    """Yield tables of each group of loads of requests."""
    by_group = requests.groups(points)
    if by_group:
        yield Text(_REQUEST_WORDS)

    def last(
        value: Callable[[RequestPoint], float | None], form: Callable[[float], str] = figures
    ) -> Callable[[RequestRates], str]:
        return lambda row: "" if (number := value(row.point)) is None else form(number)

    columns: dict[str, Callable[[RequestRates], str]] = {
        "configuration": lambda row: titled(row.point),
        "#tokens in / out": lambda row: " / ".join(f"{length:.0f}" for length in row.point.mean_lengths or ()),
        "#loads": lambda row: str(len(row.rates)),
        "#output tok/s": lambda row: figures(row.mean),
        "#range": lambda row: row.range,
        "#tok/s while others waited": last(lambda point: point.waiting_tok_s),
        "#goodput, requests/s": last(requests.goodput),
        "#link busy": last(lambda point: point.link_busy, "{:.0%}".format),
    }
    for group, records in by_group.items():
        rows = requests.ranked(records)
        ran, failed = {row.point.key for row in rows}, {record.key: record for record in records}
        yield Heading(f"{group.title}, {group.machine}")
        yield table(f"{group.conditions}. Output tok/s over all loads, the rest of the last one.", columns, rows)
        yield _times([row.point for row in rows])
        yield Items(
            f"{record.case.label()}: {record.status}: {record.error or ''}".rstrip(": ")[:160]
            for key, record in failed.items()
            if key not in ran
        )
        yield Items(
            f"{row.point.case.label()}: {level.describe()}."
            for row in rows
            for level in sla.check(row.point, map(sla.parse, row.point.sla))
        )


def _times(points: Iterable[RequestPoint]) -> Table:
    rows = [
        Row((point.case.label(), metric.removesuffix("_ms").upper(), *map(milliseconds, times)))
        for point in points
        for metric in METRICS
        for times in (point.summary(metric) or (None,) * 4,)
    ]
    return Table("Times of requests in the last load.", _REQUEST_TIMES, tuple(rows))


def studies(findings: Findings) -> Iterator[Block]:
    """Yield the studies that were made on each machine."""
    for run in findings.studies:
        shown, failed = study.show(run), study.wrong(run)
        yield Heading(f"{shown.subject}, {run.machine}")
        yield Items(shown.notes)
        caption = f"{shown.title}. Measured by `zinfer study {run.study}` on {run.device}. {shown.method}"
        rows = tuple(Row(cells, "failed" if cells[0] in failed else "") for cells in shown.cells)
        yield Table(caption, shown.columns, rows, folded=run.study != "accuracy")


def system(findings: Findings) -> Iterator[Block]:
    """Yield the machines as far as they are described."""
    facts: dict[str, dict[str, str]] = {}
    for machine in findings.machines.values():
        gpu = f"{machine.gpu_count} × {machine.gpu_name}" if machine.gpu_count else "none: the CPU is the device"
        machine_facts = {"GPU": gpu} | {
            _NAMES.get(name, name): machine.describe(name).removesuffix(" (measured)")
            for name in FIGURES
            if getattr(machine, name)
        }
        if machine.gpu_count and machine.coherent:
            machine_facts["link, kind"] = "cache-coherent"
        for name, value in (machine_facts | _details(machine)).items():
            facts.setdefault(name, {})[machine.name] = value
    names = dict.fromkeys(name for values in facts.values() for name in values)
    rows = tuple(Row((fact, *(values.get(name, "") for name in names))) for fact, values in facts.items())
    yield Table("Capacities and rates, measured by `zinfer probe` unless said otherwise.", ("", *names), rows)


def _details(machine: Machine) -> dict[str, str]:
    gpu, host = machine.details.get("gpu", {}), machine.details.get("host", {})
    lanes = f"generation {gpu.get('pcie_generation')}, {gpu.get('pcie_width')} lanes"
    details = {
        "PCIe": lanes if "pcie_width" in gpu else "",
        "power limit": f"{gpu['power_limit_w']:g} W" if isinstance(gpu.get("power_limit_w"), int | float) else "",
        "driver": str(gpu.get("driver") or ""),
        "CPU": str(host.get("cpu") or ""),
        "CPU cores, NUMA nodes": f"{host['cores']}, {host.get('numa_nodes', '?')}" if "cores" in host else "",
        "torch": str(machine.details.get("torch") or ""),
    }
    return {name: value for name, value in details.items() if value}
