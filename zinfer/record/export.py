"""Export of records as a flat table, one row a point.

Failures are rows too; an unknown value is an empty cell, never 0. Only usable points have rates. Units are part of the
column names: tokens a second, milliseconds, seconds, bytes, bytes a second. The columns of `COLUMNS` always come first,
in that order; a column for each recorded prediction and for each recorded version follows::

    table = FlatTable.of([("bloom", point) for point in points])
    Path("bloom.csv").write_bytes(to_csv(table))

Model names and error texts come from outside and are never trusted: no cell of CSV starts a formula.
"""

import csv
import io
import json
import re
from collections.abc import Callable, Iterable
from functools import partial
from operator import attrgetter
from statistics import fmean
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel

from zinfer.core.case import Case, Workload
from zinfer.record.measurement import Effective, Measurement, latest
from zinfer.record.requests import METRICS, PassCounts, RequestMetric, RequestPoint, Summary
from zinfer.record.stats import ci95_half_width

Cell = str | int | float | None

# First characters of a formula in a spreadsheet (OWASP, "CSV Injection"): an apostrophe is put before them.
_FORMULA = ("=", "+", "-", "@", "\t", "\n", "＝", "＋", "－", "＠")


class _Column(NamedTuple):
    kind: type[Any]  # type of the cells that are not empty: str, int or float
    cell: Callable[[Any], Cell]


def _kind(annotation: Any) -> type[Any]:
    """Return the cell type of a field: int, float, else str."""
    return next((kind for kind in (int, float) if kind in (annotation, *get_args(annotation))), str)


def _json(value: Any) -> str | None:
    return json.dumps(value, sort_keys=True, default=str) if value else None


def _attributes(kind: type[Any], *names: str) -> dict[str, _Column]:
    return {name: _Column(kind, attrgetter(name)) for name in names}


def _timed(cell: Callable[[Measurement], Cell]) -> _Column:
    return _Column(float, lambda point: cell(point) if point.usable else None)


def _rates(*names: str, unit: str = "") -> dict[str, _Column]:
    return {f"{name}{unit}": _timed(attrgetter(name)) for name in names}


def _fields(model: type[BaseModel], holder: str, prefix: str = "") -> dict[str, _Column]:
    """Return a column per field of `model`, a point's attribute `holder`."""
    return {
        f"{prefix}{name}": _Column(_kind(field.annotation), partial(_field, f"{holder}.{name}"))
        for name, field in model.model_fields.items()
        if name != "workload"
    }


def _field(path: str, point: Any) -> Cell:
    holder, _, name = path.rpartition(".")
    value: Any = getattr(attrgetter(holder)(point), name, None)
    return _cell(dict(value) if name == "options" else value)


def _cell(value: Any) -> Cell:
    """Return the value of a field as text or number."""
    if isinstance(value, dict | tuple):
        return _json(value)
    return str(value).lower() if isinstance(value, bool) else value


_LOAD = _fields(Case, "case")
_OUTCOME = {
    "model_revision": _Column(str, lambda p: p.model_revision or None),
    **_attributes(int, "num_layers", "total_layers"),
    **_attributes(str, "status", "stage", "error"),
}
_LINKS = {f"{name}_bytes_s": _Column(float, attrgetter(name)) for name in ("link_bandwidth", "links_bandwidth")}
_CONDITIONS = {
    **_attributes(int, "gpu_peak_bytes", "gpu_used_bytes", "host_peak_bytes"),
    **_fields(Effective, "effective", "effective_"),
    "gpu_readings": _Column(str, lambda p: _json(p.gpu)),
    "started_at": _Column(str, lambda p: p.started_at or None),
}
_COLUMNS: dict[str, _Column] = {
    **_attributes(str, "machine"),
    **_LOAD,
    **_fields(Workload, "case.workload"),
    **_OUTCOME,
    "repeats": _Column(int, lambda p: len(p.ttft_ms) or None),
    **_rates("output_tok_s"),
    "output_tok_s_half_width": _timed(lambda p: ci95_half_width(p.output_tok_s_samples)),
    **_rates("decode_tok_s", "prefill_tok_s"),
    "ttft_ms": _timed(lambda p: fmean(p.ttft_ms)),
    "ttft_ms_half_width": _timed(lambda p: ci95_half_width(p.ttft_ms)),
    **_rates("tpot_ms"),
    "tpot_ms_half_width": _timed(lambda p: ci95_half_width([fmean(steps) for steps in p.step_ms if steps])),
    **_rates("step_median_ms"),
    "e2e_ms": _timed(lambda p: fmean(p.e2e_ms)),
    **_attributes(float, "load_s"),
    **_attributes(int, "load_bytes"),
    "load_bandwidth_bytes_s": _Column(float, lambda p: p.load_bandwidth),
    **_rates("h2d_bandwidth", unit="_bytes_s"),
    **_LINKS,
    **_rates("link_share"),
    **_CONDITIONS,
}
COLUMNS = ("file", *_COLUMNS)


def _statistic(metric: RequestMetric, name: str) -> _Column:
    return _Column(float, lambda p: getattr(p.summary(metric), name, None) if p.usable else None)


def _with_passes(cell: Callable[[Any], Cell], point: RequestPoint) -> Cell:
    return cell(point) if point.pass_ms else None


def _asked(name: str) -> _Column:
    return _Column(str, lambda p: None if (value := getattr(p.requests, name)) is None else str(value))


_REQUEST_COLUMNS: dict[str, _Column] = {
    **_attributes(str, "machine"),
    **_LOAD,
    **{name: _Column(kind, attrgetter(f"requests.{name}"))
       for name, kind in (("source", str), ("requests", int), ("seed", int))},
    "in_flight": _asked("in_flight"),
    "request_rate": _asked("request_rate"),
    "request_order": _asked("order"),
    **_OUTCOME,
    "mean_input_len": _Column(float, lambda p: p.mean_lengths and p.mean_lengths[0]),
    "mean_output_len": _Column(float, lambda p: p.mean_lengths and p.mean_lengths[1]),
    **_rates("wall_ms", "busy_ms"),
    "passes": _Column(int, lambda p: len(p.pass_ms) or None),
    **_attributes(float, "output_tok_s", "input_tok_s", "request_s", "waiting_tok_s", "steady_tok_s", "padding",
                  "link_busy"),
    **{f"{metric}_{name}": _statistic(metric, name) for metric in METRICS for name in Summary._fields},
    **{name: column._replace(cell=partial(_with_passes, column.cell))
       for name, column in _fields(PassCounts, "counts").items()},
    "kv_positions": _Column(int, lambda p: p.kv_positions or None),
    **_LINKS,
    **_CONDITIONS,
    "sla": _Column(str, lambda p: _json(p.sla)),
}  # fmt: skip


class FlatTable(NamedTuple):
    """Columns with the type of their cells, and rows."""

    columns: dict[str, type[Any]]
    rows: tuple[tuple[Cell, ...], ...]

    @classmethod
    def of(cls, points: Iterable[tuple[str, Measurement]]) -> "FlatTable":
        """Return the table of each file's latest points."""
        files: dict[str, list[Measurement]] = {}
        for file, point in points:
            files.setdefault(file, []).append(point)
        kept = [(file, point) for file, file_points in files.items() for point in latest(file_points)]
        predicted = sorted({name for _, point in kept for name in point.predicted})
        versions = sorted({name for _, point in kept for name in point.versions})
        columns: dict[str, type[Any]] = {"file": str} | {name: column.kind for name, column in _COLUMNS.items()}
        columns |= {f"predicted_{name}": float for name in predicted} | {f"version_{name}": str for name in versions}
        rows = tuple(
            (
                file,
                *(column.cell(point) for column in _COLUMNS.values()),
                *(point.predicted.get(name) for name in predicted),
                *(point.versions.get(name) for name in versions),
            )
            for file, point in kept
        )
        return cls(columns, rows)


def request_table(
    points: Iterable[tuple[str, RequestPoint]], goodput: Callable[[RequestPoint], float | None]
) -> FlatTable:
    """Return the table of loads of requests, repeated ones included."""
    columns = {"file": str} | {name: column.kind for name, column in _REQUEST_COLUMNS.items()}
    rows = tuple(
        (file, *(column.cell(point) for column in _REQUEST_COLUMNS.values()), goodput(point)) for file, point in points
    )
    return FlatTable(columns | {"goodput_request_s": float}, rows)


def to_csv(table: FlatTable) -> bytes:
    """Return comma-separated UTF-8 with a header. Every line break is one newline; numbers are as exact as in the
    records; a text that a spreadsheet would take for a formula begins with an apostrophe."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(map(_unarmed, table.columns))
    writer.writerows([_plain(cell) for cell in row] for row in table.rows)
    return text.getvalue().encode()


def to_json(table: FlatTable) -> bytes:
    """Return a JSON list of objects; null is unknown."""
    return json.dumps([dict(zip(table.columns, row, strict=True)) for row in table.rows], indent=1).encode() + b"\n"


WRITERS: dict[str, Callable[[FlatTable], bytes]] = {"csv": to_csv, "json": to_json}


def _plain(cell: Cell) -> Cell:
    return _unarmed(cell) if isinstance(cell, str) else cell


def _unarmed(text: str) -> str:
    text = "\n".join(re.split("\r\n?", text))  # the csv module of Python 3.12 and before leaves a lone \r unquoted
    return f"'{text}" if text.lstrip(" ").startswith(_FORMULA) else text
