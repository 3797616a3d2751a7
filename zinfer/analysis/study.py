"""Tables and answers of studies, for commands, report and plans.

Coded bytes are fewer on the link, and some are decoded while the next ones cross: it brings at most ``1 / max(coded /
raw, link / decode)`` times as many weights a second, where `link` and `decode` are rates of raw bytes. A reload of a KV
cache saves computing its context, but no pass of streamed weights: it wins from some context on, the break-even. With
experts chosen evenly and at random, a cache that holds a share of them meets the same share of the needs.
"""

from collections.abc import Callable, Iterable, Sequence
from math import inf, log
from pathlib import PurePath
from statistics import median, median_low
from typing import NamedTuple

from zinfer.core.case import Case, weights_text, without_folders
from zinfer.core.model import ModelSpec, Routing
from zinfer.core.units import duration, figures, gb
from zinfer.record import study
from zinfer.record.measurement import latest_by
from zinfer.record.study import Coded, Deviation, Hits, Reload, Study, Touched


class Shown(NamedTuple):
    """Run as text: title, method, table, and notes below it."""

    subject: str
    title: str
    method: str
    columns: tuple[str, ...]
    cells: Sequence[tuple[str, ...]]
    notes: tuple[str, ...]


def show(run: Study) -> Shown:
    """Return a run of any study as text."""
    shown: dict[str, Callable[[Study], Shown]]
    shown = {"codec": _codec, "accuracy": _accuracy, "reuse": _reuse, "routing": _routing}
    return shown[run.study](run)


def latest(runs: Iterable[Study]) -> tuple[Study, ...]:
    """Return the latest run of each machine and, of `reuse`, load."""
    return latest_by(runs, lambda run: (run.machine, run.study, run.case if run.study == "reuse" else None))


def gain(row: Coded, link: float) -> float | None:
    """Return the codec's largest speed-up behind `link`, or None."""
    return 1 / max(row.ratio, link / row.decode.median) if row.status == "ok" and row.decode else None


def pays(row: Coded, link: float) -> str:
    """Return whether the codec pays behind a link, and why."""
    speed_up = gain(row, link)
    if speed_up is None:
        return "FAILED" if row.status == "wrong_bits" else "no, as large"
    return "no, too slow" if speed_up <= 1 else f"yes, {speed_up:.2f}x"


def wrong(run: Study) -> tuple[str, ...]:
    """Return the names of the weights that came back with other bits."""
    return tuple(row.name for row in run.of(Coded) if row.status == "wrong_bits")


def _codec(run: Study) -> Shown:
    def rate(measured: study.Rate | None, spread: bool = False) -> str:
        return "" if measured is None else figures(measured.median / 1e9) + f" ± {measured.spread / 2:.1%}" * spread

    link, rows = run.link or 0.0, run.of(Coded)
    return Shown(
        "Lossless coding of weights",
        f"{run.machine}, link {gb(link)}/s",
        "Bound: the least size that coding exponents one by one can reach. Rates count raw bytes; pays: upper bound on "
        "the speed-up, given the link bandwidth.",
        ("weights", "#bytes", "#coded to", "#bound", "#encode GB/s", "#decode GB/s", "pays"),
        [
            (row.name, gb(row.raw_bytes), f"{row.ratio:.1%}", f"{row.bound:.1%}", rate(row.encode),
             rate(row.decode, spread=True), pays(row, link))
            for row in rows
        ],
        tuple(f"{row.name}: {row.description}." for row in rows),
    )  # fmt: skip


def compared(run: Study) -> tuple[Case, ...]:
    """Return the settings that have numbers, without the reference in other batches."""
    batch_size = run.asked.workload.batch_size
    return tuple(dict.fromkeys(row.case for row in run.of(Deviation) if row.case.workload.batch_size == batch_size))


def label(run: Study, case: Case) -> str:
    """Return the settings in which `case` differs from the reference, as text."""
    reference, batch_size = run.asked, case.workload.batch_size
    settings = [f"{key}={value}" for key, value in case.options if (key, value) not in reference.options]
    if case.model != reference.model:
        # A copy in the default folder is told by its format.
        settings.insert(0, f"weights={PurePath(case.model).name.rpartition(f'-{run.revision}-')[2]}")
    settings += [f"batch {batch_size}"] * (batch_size != reference.workload.batch_size)
    return " ".join(settings) or "none"


def _accuracy(run: Study) -> Shown:
    reference, load, read = run.asked, run.asked.workload, run.text.name if run.text else ""
    dummy = "RANDOM WEIGHTS, which say nothing of a model: " if reference.load_format == "dummy" else ""
    lengths = f"{load.input_len} tokens in, {load.output_len} followed"
    failed = (f"{label(run, row.case)} failed ({row.status}): {row.error}" for row in run.of(study.Failed))
    return Shown(
        "Accuracy of settings",
        f"{dummy}{reference.model}, against {reference.label()}, {lengths}, on {run.machine}",
        f"Logits in {run.logits_dtype}; rows begin with {read}. Teacher forcing: each setting gets the same tokens as "
        "the reference, the reference's own greedy ones or the text's. Logit error: root mean square, over the "
        "standard deviation of the reference's logits. The first rows are the reference beside itself in smaller "
        "batches: the effect of floating point alone.",
        ("setting", "tokens fed", "#positions", "#logit error", "#largest", "#KL, nats", "#largest KL", "#same token",
         "#perplexity", "#same texts", "#tokens before a difference"),
        [(label(run, row.case), *_deviation(row)) for row in run.of(Deviation)],
        (f"The model: {run.about}.", *failed),
    )  # fmt: skip


def _deviation(row: Deviation) -> tuple[str, ...]:
    before, after, same, until = row.reference_perplexity, row.perplexity, "", ""
    change = (
        "" if before is None or after is None else f"{figures(before, 4)} {round(after / before - 1, 4) + 0.0:+.2%}"
    )
    if row.first_differences:
        same = f"{row.first_differences.count(None) / row.rows:.0%} of {row.rows}"
        tokens = median_low(inf if count is None else count for count in row.first_differences)
        until = f"all {row.case.workload.output_len}" if tokens == inf else str(tokens)
    return (
        row.along, f"{row.positions:,}", f"{100 * row.error:.3g}%", f"{100 * row.error_max:.3g}%", f"{row.kl:.3g}",
        f"{row.kl_max:.3g}", f"{row.agreement:.2%}", change, same, until,
    )  # fmt: skip


def measured(run: Study) -> tuple[Reload, ...]:
    """Return the contexts that were measured."""
    return tuple(point for point in run.of(Reload) if point.recompute_ms)


def title(run: Study) -> str:
    """Return the model, slice and load of `reuse`."""
    case = run.asked
    part = "" if case.layers is None else f", {run.num_layers} of {run.total_layers} layers"
    return f"{without_folders(case.model)}{part}, {case.label()}"


def conditions(run: Study) -> str:
    """Return what a run of `reuse` was measured with."""
    new = ", ".join(sorted({str(point.new_tokens) for point in run.of(Reload)}))
    link = "" if run.link is None else f", link {gb(run.link)}/s"
    return f"{weights_text(run.asked.load_format)}, {run.asked.dtype}{link}; the last {new} tokens are new"


def break_even(points: Sequence[Reload]) -> float | None:
    """Return the context in tokens from which a reload is faster (0: always, inf: never), or None."""
    gains = sorted((point.context, gain) for point in points if (gain := point.gain) is not None)
    losing = [index for index, (_, gain) in enumerate(gains) if gain <= 1]
    if not gains:
        return None
    if not losing:
        return 0.0
    if losing[-1] == len(gains) - 1:
        return inf
    (before, below), (after, above) = gains[losing[-1] : losing[-1] + 2]
    share = -log(below) / (log(above) - log(below))
    return float(before * (after / before) ** share)


def verdict(points: Sequence[Reload]) -> str | None:
    """Return the break-even in words; None if nothing was measured."""
    even = break_even(points)
    if even is None:
        return None
    contexts = [point.context for point in points if point.gain is not None]
    if even == 0:
        return f"reload from memory always wins, from {min(contexts):,} tokens on"
    if even == inf:
        wins = any((point.gain or 0) > 1 for point in points)
        return f"reload from memory {'does not win at' if wins else 'never wins, up to'} {max(contexts):,} tokens"
    return f"reload from memory wins from {round(even):,} tokens on"


def _reuse(run: Study) -> Shown:
    def middle(samples_ms: Sequence[float]) -> str:
        return duration(median(samples_ms) / 1e3)

    def cells(point: Reload) -> tuple[str, ...]:
        reload = ("", "") if point.gain is None else (middle(point.memory_ms), f"{point.gain:.2f}x")
        difference = "" if point.max_difference is None else figures(point.max_difference, 2)
        same = "same" if point.same_token else "OTHER"
        return f"{point.context:,}", gb(point.kept_bytes), middle(point.recompute_ms), *reload, same, difference

    points = run.of(Reload)
    skipped = (f"{point.context:,} tokens skipped: {point.skipped}" for point in points if point.skipped)
    return Shown(
        f"Keeping a conversation, {title(run)}",
        title(run),
        f"TTFT in the median, with the whole context computed or its kept KV cache reloaded. {conditions(run)}.",
        ("#context", "#kept", "#recompute", "#memory", "#faster", "token", "#logits"),
        [cells(point) for point in measured(run)],
        (*filter(None, [verdict(points)]), *skipped),
    )


def hits(run: Study, experts: int) -> float:
    """Return a cache's hit rate at the next smaller measured size."""
    rows = [row for row in run.of(Hits) if row.policy == "lfu" and row.experts <= experts and row.batch_size == 1]
    return max(rows, key=lambda row: row.experts).hits if rows else 0.0


def routing_of(model: ModelSpec, runs: Iterable[Study]) -> Routing | None:
    """Return a model's routing by its last trace; slices of other depths do not count."""
    every = model.routed_bytes // max(1, model.expert_bytes)
    alike = [run for run in runs if run.model == model.name and (run.num_layers or 0) * (run.num_experts or 0) == every]
    if not alike or model.num_experts < 2:
        return None
    touched = tuple(sorted((row.batch_size, row.share) for row in alike[-1].of(Touched)))
    hits = tuple((row.batch_size, row.experts / every, row.hits) for row in alike[-1].of(Hits) if row.policy == "lfu")
    read = alike[-1].text.name if alike[-1].text else alike[-1].machine
    return Routing(source=f"the routing recorded on {read}", touched=touched, hits=hits)


def _routing(run: Study) -> Shown:
    every = (run.num_layers or 0) * (run.num_experts or 0)
    sizes = sorted({row.experts for row in run.of(Hits)})
    missed = 1 - (run.experts_per_token or 0) / (run.num_experts or 1)  # by a token that chooses at random
    return Shown(
        "Experts that a text needs",
        f"{run.model}: {run.about}",
        "Hits: share of the needs that a cache of that size meets.",
        ("cache", "#experts", "#hits"),
        [(f"{size / every:.0%}", str(size), f"{hits(run, size):.1%}") for size in sizes],
        tuple(
            f"A step of {row.batch_size} tokens touches {row.share:.0%} of the experts; at random, "
            f"{1 - missed**row.batch_size:.0%}."
            for row in run.of(Touched)[-1:]
        ),
    )
