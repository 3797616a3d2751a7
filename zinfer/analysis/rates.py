"""Rates: the fastest engine and batch size, and whether offload pays, by the points of one group.

Offload costs speed at a given batch and makes room for a larger one, so a setting is judged at its **own best batch**,
next to the price at equal batch.
"""

from collections.abc import Sequence
from pathlib import PurePath
from typing import NamedTuple, TypeVar

from zinfer.analysis import reproduce
from zinfer.analysis.compare import Change
from zinfer.analysis.economics import Point
from zinfer.analysis.group import Points, by_load
from zinfer.core.case import Case, Offload
from zinfer.core.units import figures
from zinfer.core.value import Frozen
from zinfer.record.measurement import Measurement
from zinfer.record.stats import spread

P = TypeVar("P", bound=Point)
ACCURACY = "`zinfer study accuracy` tells how far its text differs"  # of a lossy setting
OFFLOADS: tuple[Offload, ...] = ("cpu", "nvme")  # offloads that are compared with none


class Edge(Frozen):
    """Largest batch of a load that fitted, smallest that did not."""

    load: Case  # at batch size 1
    largest_ok: int | None = None
    smallest_oom: int | None = None


class OffloadVerdict(NamedTuple):
    """Verdict on an offload for one engine; for all engines together if `engine` is None."""

    engine: str | None
    offload: Offload
    change: Change | None  # of `output_tok_s` without and with it, each at its own best batch
    text: str
    compares: bool  # points with and without it were tried; else the text says how to try those without

    @property
    def gain(self) -> float | None:
        """Ratio of the throughputs at each side's own best batch."""
        return self.change.ratio if self.change else None


def best(points: Points) -> Measurement | None:
    """Return the fastest usable point, the smaller batch if two are equal."""
    usable = [point for point in points if point.usable and point.output_tok_s is not None]
    return max(usable, key=lambda point: (point.output_tok_s, -point.case.workload.batch_size), default=None)


def best_by_load(points: Points) -> tuple[Measurement, ...]:
    """Return the best usable point of each load, the fastest first."""
    tops = (best(of_load) for of_load in by_load(points).values())
    return tuple(sorted(filter(None, tops), key=lambda point: -(point.output_tok_s or 0.0)))


def ranked(points: Points) -> tuple[Measurement, ...]:
    """Return the best point of each load, lossy settings last."""
    return (*best_by_load(exact(points)), *best_by_load(lossy(points)))


def exact(points: Sequence[P]) -> tuple[P, ...]:
    """Return the points whose settings keep the model's numbers."""
    return tuple(point for point in points if not point.case.lossy)


def lossy(points: Sequence[P]) -> tuple[P, ...]:
    """Return the points with lossy settings, such as an 8-bit KV cache."""
    return tuple(point for point in points if point.case.lossy)


def winner(points: Points) -> Measurement | None:
    """Return the fastest usable point with exact settings; the fastest lossy one if there is no other."""
    return best(exact(points)) or best(points)


def ties(points: Points, first: Measurement) -> tuple[Measurement, ...]:
    """Return the best points of other loads within the noise of `first`."""
    others = [point for point in best_by_load(exact(points)) if point.case.load != first.case.load]
    return tuple(point for point in others if not Change(point, first).clear)


def tied(points: Points, first: Measurement) -> str:
    """Return the sentence that names the ties of `first`, if any."""
    names = [f"{point.case.label()} at batch {point.case.workload.batch_size}" for point in ties(points, first)]
    return f"As fast within the noise: {', '.join(names)}." if names else ""


def cautions(points: Points) -> tuple[str, ...]:
    """Return sentences that a reader needs to read the rates right."""
    usable = [point for point in points if point.usable]
    single = sum(len(point.ttft_ms) == 1 for point in usable)
    some = "Every point has" if single == len(usable) else f"{single} of {len(usable)} points have"
    repeat = f"{some} one repeat, whose noise is unknown: differences may be chance."
    return (*conditions(usable), *[repeat] * (single > 0))


def conditions(usable: Sequence[Point]) -> tuple[str, ...]:
    """Return sentences on the conditions of usable points: random weights, no GPU."""
    sentences = []
    if any(point.case.load_format == "dummy" for point in usable):
        sentences.append(
            "The weights are random (dummy): the speed is that of real ones, but generated text means nothing."
        )
    if usable and all(point.gpu_peak_bytes is None and not point.gpu for point in usable):
        sentences.append(
            "This machine computed without a GPU: the weights are in host memory with and without offload, and the two "
            "differ only in copying: offload copies each layer before it computes."
        )
    return tuple(sentences)


def offload_verdicts(points: Points) -> tuple[OffloadVerdict, ...]:
    """Return the verdicts on each offload against none: of all engines, if several, and each."""
    points = exact(points) or points
    engines: list[str | None] = [*sorted({point.case.engine for point in points})]
    verdicts = []
    for number, engine in enumerate([None, *engines] if len(engines) > 1 else engines):
        of_engine = [point for point in points if engine in (None, point.case.engine)]
        without = [point for point in of_engine if point.case.offload == "none"]
        for offload in OFFLOADS:
            using = [point for point in of_engine if point.case.offload == offload]
            if using and (without or number == 0):
                verdicts.append(_verdict(engine, offload, using, without))
    return tuple(verdicts)


def _verdict(engine: str | None, offload: Offload, using: Points, without: Points) -> OffloadVerdict:
    ours, theirs = best(using), best(without)
    gain = Change(theirs, ours) if ours and theirs else None
    other = f"without it {f'every point failed ({statuses(without)})' if theirs is None else _rate(theirs)}"
    if not without:
        point = ours or using[0]
        path = f"sweeps/results/{point.machine}/{PurePath(point.case.model).name}-none.jsonl"
        case = point.case.model_copy(update={"offload": "none", "gpu_weights": None, "options": ()})
        command, _ = reproduce.case_commands(case, None, "1,8,auto", path, point.machine)
        text = f"fits on the GPU: not measured; measure it with `{command}`"
    elif ours is None:
        text = f"Nothing succeeded with offload {offload} ({statuses(using)}); {other}."
    elif gain is None:
        text = f"Offload {offload} reaches {_rate(ours)}; {other}."
    else:
        gives = f"gives {gain.times}" if gain.clear else "makes no difference beyond the noise"
        text = f"Offload {offload} {gives} at each side's own best batch: {_rate(ours)}, {other}. "
        text += _at_equal_batch(using, without)
    return OffloadVerdict(engine=engine, offload=offload, change=gain, text=text, compares=bool(without))


def edges(points: Points) -> tuple[Edge, ...]:
    """Return the edge of each load; an untimed run counts."""
    return tuple(
        Edge(
            load=load,
            largest_ok=max((p.case.workload.batch_size for p in tried if p.status == "ok"), default=None),
            smallest_oom=min((p.case.workload.batch_size for p in tried if p.status.startswith("oom")), default=None),
        )
        for load, tried in by_load(points).items()
    )


def statuses(points: Points) -> str:
    """Return each status with its smallest batch: ``oom_gpu from batch 16``."""
    smallest: dict[str, int] = {}
    for point in sorted(points, key=lambda point: -point.case.workload.batch_size):
        smallest[point.status] = point.case.workload.batch_size
    return ", ".join(f"{status} from batch {size}" for status, size in sorted(smallest.items()))


def _at_equal_batch(using: Points, without: Points) -> str:
    """Return the sentence on batch sizes that both sides have."""
    fast, slow = by_batch(using), by_batch(without)
    changes = [Change(slow[size], fast[size]) for size in sorted(fast.keys() & slow.keys())]
    if not changes:
        return "No batch size was measured on both sides."
    clear = [change for change in changes if change.clear]
    unsure = [change.batch_size for change in changes if not change.clear]
    if not clear:
        return f"At equal batch ({_range(unsure, '{}')}) there is no difference beyond the noise."
    shares = _range([change.ratio or 0.0 for change in clear], "{:.0%}")
    batches = _range([change.batch_size for change in clear], "{}")
    single = ", single runs" if any(change.verdict == "unknown" for change in clear) else ""
    text = f"At equal batch ({batches}{single}) it runs at {shares} of the speed without"
    rest = f"; at batch {', '.join(map(str, unsure))} the difference is within the noise" if unsure else ""
    return f"{text}{rest}."


def by_batch(points: Points) -> dict[int, Measurement]:
    """Return the fastest usable point of each batch size."""
    ascending = sorted((point for point in points if point.usable), key=lambda point: point.output_tok_s or 0)
    return {point.case.workload.batch_size: point for point in ascending}


def _range(values: Sequence[float], form: str) -> str:
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low} to {high}"


def _rate(point: Measurement) -> str:
    return f"{rate_text(point)} tok/s at batch {point.case.workload.batch_size}"


def rate_text(point: Measurement) -> str:
    """Return output tok/s with its 95% confidence: ``612 ± 150``."""
    rate = spread(point.output_tok_s_samples)
    if rate is None:
        return ""
    return figures(rate.mean) + (f" ± {figures(rate.half_width, 2)}" if rate.half_width else "")
