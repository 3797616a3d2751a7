"""`zinfer compare`: two result files side by side, with noise."""

import re
from functools import partial
from pathlib import Path
from typing import get_args

import click

from zinfer.analysis.compare import HIGHER_IS_BETTER, Change, CompareError, Comparison, Metric, compare
from zinfer.commands import options
from zinfer.commands.options import option
from zinfer.commands.out import Table, console, say
from zinfer.commands.results import warned
from zinfer.commands.verb import Failure, Verb
from zinfer.core.case import Case, weights_text
from zinfer.core.errors import NOTHING, REGRESSION
from zinfer.core.units import counted, figures, gib, milliseconds
from zinfer.core.value import group_by
from zinfer.record.measurement import Measurement
from zinfer.record.store import read

METRICS = get_args(Metric)
_MARKS = {"noise": "~", "unknown": "?", "same": "=", "untimed": "not timed"}
RESULTS = click.Path(exists=True, dir_okay=False, path_type=Path)
AXES = ("engine", "offload", "gpu_weights", "weights", "options", "dtype", "load_format")


def _share(text: str) -> float:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", text)
    if match is None:
        raise ValueError(f"{text!r} is not a percentage: write 5%")
    return float(match[1]) / 100


@click.command("compare", cls=Verb)
@click.argument("before", metavar="A", type=RESULTS)
@click.argument("after", metavar="B", type=RESULTS)
@option("--metric", click.Choice(METRICS), "Metric to compare.", default="output_tok_s")
@option("--across", options.words("", AXES), f"Fields in which matched cases may differ: {', '.join(AXES)}.")
@option(
    "--fail-on-regression allowed",
    options.Parsed("percent", _share),
    "Exit with 7 if a point is worse by more than this (5%) and by more than noise, or fails in B only.",
)
def command(before: Path, after: Path, metric: Metric, across: tuple[str, ...] | None, allowed: float | None) -> None:
    """Compare result file B with A, case by case. The machine is not part of a case: files of different machines or
    versions can be compared, and differences between them are printed first.

    A change is noise (~) if it lies within the 95% confidence interval of both sides' repeats. A single repeat has
    unknown noise (?): its change is called neither better nor worse, but --fail-on-regression counts its noise as zero.

    \b
    zinfer compare main.jsonl branch.jsonl --fail-on-regression 5%
    zinfer compare stream.jsonl deepspeed.jsonl --across engine --metric tpot_ms
    """
    ours, theirs, axes = _points(before), _points(after), across or ()
    for path, side in ((before, ours), (after, theirs)):
        try:
            compare(side, (), metric, axes)
        except CompareError as error:
            raise Failure(f"{path} {error}") from error
    comparison = compare(ours, theirs, metric, axes)
    if not comparison.changes:
        raise Failure(_nothing_common(before, after, comparison))
    _show(before, after, metric, comparison)
    if worse := [change for change in comparison.changes if allowed is not None and change.regressed(allowed)]:
        which = ", ".join(f"{change.label} batch {change.batch_size}" for change in worse[:3])
        more = f" and {len(worse) - 3} more" if len(worse) > 3 else ""
        points = counted(len(comparison.changes), "point")
        raise Failure(f"{len(worse)} of {points} regressed: {which}{more}", REGRESSION)


def _points(path: Path) -> tuple[Measurement, ...]:
    records = warned(read(path))
    if records.requests and not records.points:
        raise Failure(f"{path} has loads of requests only, which are not compared: see `zinfer report`", NOTHING)
    if not records.points:
        raise Failure(f"no results in {path}: measure first, with `zinfer sweep`", NOTHING)
    return records.points


def _nothing_common(before: Path, after: Path, comparison: Comparison) -> str:
    sides = [[point.case for point in points] for points in (comparison.only_before, comparison.only_after)]
    values = {name: [{str(getattr(case, name)) for case in side} for side in sides] for name in Case.model_fields}
    apart = [name for name, (ours, theirs) in values.items() if name != "workload" and not ours & theirs]
    what = ", ".join(apart) or "batch sizes, lengths or combinations of settings"
    across = f"; try --across {','.join(apart)}" if apart and {*apart} <= {*AXES} else ""
    return f"no case is in both {before} and {after}: their {what} differ{across}"


def _show(before: Path, after: Path, metric: Metric, comparison: Comparison) -> None:
    say(f"A: {before}\nB: {after}")
    for name, ours, theirs in comparison.differences:
        say(f"{name}: {ours or 'unknown'} → {theirs or 'unknown'}")
    sense = "higher" if HIGHER_IS_BETTER[metric] else "lower"
    for title, changes in group_by(comparison.changes, _title).items():
        say(f"\n{title}\n{metric}, {sense} is better")
        columns = ("configuration", "#batch", "#A", "#B", "#change", "#noise", "")
        rows = []
        for change in changes:
            mark = _MARKS.get(change.verdict, change.verdict)
            rows.append((change.label, str(change.batch_size), *change.cells(partial(_amount, metric=metric)), mark))
        console().print(Table("", columns, rows))
    verdicts = {change.verdict for change in comparison.changes}
    if "unknown" in verdicts:
        say("? one side has a single repeat, so its noise is unknown: measure with --repeats 3 or more")
    if "noise" in verdicts:
        say("~ within the noise of the repeats (95% confidence)")
    for letter, points in (("A", comparison.only_before), ("B", comparison.only_after)):
        for point in points:
            status = "" if point.status == "ok" else f" ({point.status})"
            say(f"only in {letter}: {point.case.batch_label}{status}")


def _title(change: Change) -> str:
    case = change.second.case
    part = "" if case.layers is None else f", {case.layers} layers"
    lengths = f"{case.workload.input_len} in / {case.workload.output_len} out"
    return f"{case.model}{part}, {lengths} · {weights_text(case.load_format)} · {case.dtype}"


def _amount(value: float, metric: Metric) -> str:
    if metric == "gpu_peak_bytes":
        return gib(value, 2)
    return milliseconds(value) if metric.endswith("_ms") else f"{figures(value)} tok/s"
