"""Export of records as a flat table, one row a point.

Failures are rows too; an unknown value is an empty cell, never 0. Only usable points have rates. Units are part of the
column names. A column for each recorded prediction and for each recorded version comes last. Model names and error
texts come from outside and are never trusted: no cell of CSV starts a formula.
"""

import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import Any

from pydantic import BaseModel

from zinfer.core.case import Case, Workload
from zinfer.record.measurement import Effective, Measurement, Recorded, latest
from zinfer.record.requests import METRICS, PassCounts, RequestPoint, Summary
from zinfer.record.stats import ci95_half_width
from zinfer.record.store import Records

Cell = str | int | float | None
Row = dict[str, Cell]

# First characters of a formula in a spreadsheet (OWASP, "CSV Injection"): an apostrophe is put before them.
_FORMULA = ("=", "+", "-", "@", "\t", "\n", "＝", "＋", "－", "＠")


def _json(value: Any) -> str | None:
    return json.dumps(value, sort_keys=True, default=str) if value else None


def _cell(value: Any) -> Cell:
    if isinstance(value, dict | tuple):
        return _json(value)
    return str(value).lower() if isinstance(value, bool) else value


def _fields(kind: type[BaseModel], value: BaseModel | None, prefix: str = "") -> Row:
    """Return a cell for each field of a model; empty ones for None."""
    cells: dict[str, Any] = {name: getattr(value, name, None) for name in kind.model_fields if name != "workload"}
    return {prefix + name: _cell(dict(cell) if name == "options" else cell) for name, cell in cells.items()}


def _attributes(point: object, names: str, usable: bool = True) -> Row:
    """Return a cell for each of `names`; empty ones unless `usable`."""
    return {name: getattr(point, name) if usable else None for name in names.split()}


def _row(file: str, point: Recorded, load: Row, rates: Row) -> Row:
    """Return the cells of a point: its case, what was asked of it, how it ended, `rates`, and its conditions."""
    return {
        "file": file,
        "machine": point.machine,
        **_fields(Case, point.case),
        **load,
        "model_revision": point.model_revision or None,
        **_attributes(point, "num_layers total_layers status stage error"),
        **rates,
        **{f"{name}_bytes_s": getattr(point, name) for name in ("link_bandwidth", "links_bandwidth")},
        **_attributes(point, "gpu_peak_bytes gpu_used_bytes host_peak_bytes command"),
        **_fields(Effective, point.effective, "effective_"),
        "gpu_readings": _json(point.gpu),
        "started_at": point.started_at or None,
    }


def _rates(point: Measurement) -> Row:
    usable, tpot_ms = point.usable, [fmean(steps) for steps in point.step_ms if steps]
    return {
        "repeats": len(point.ttft_ms) or None,
        **_attributes(point, "output_tok_s", usable),
        "output_tok_s_half_width": ci95_half_width(point.output_tok_s_samples) if usable else None,
        **_attributes(point, "decode_tok_s prefill_tok_s", usable),
        "ttft_ms": point.mean_ttft_ms if usable else None,
        "ttft_ms_half_width": ci95_half_width(point.ttft_ms) if usable else None,
        **_attributes(point, "tpot_ms", usable),
        "tpot_ms_half_width": ci95_half_width(tpot_ms) if usable else None,
        **_attributes(point, "step_median_ms", usable),
        "e2e_ms": fmean(point.e2e_ms) if usable else None,
        **_attributes(point, "load_s load_bytes"),
        "load_bandwidth_bytes_s": point.load_bandwidth,
        "h2d_bandwidth_bytes_s": point.h2d_bandwidth if usable else None,
        **_attributes(point, "link_share", usable),
    }


def _request_rates(point: RequestPoint) -> Row:
    lengths, usable = point.mean_lengths or (None, None), point.usable
    times = {metric: point.summary(metric) if usable else None for metric in METRICS}
    return {
        "mean_input_len": lengths[0],
        "mean_output_len": lengths[1],
        **_attributes(point, "wall_ms busy_ms", usable),
        "passes": len(point.pass_ms) or None,
        **_attributes(point, "output_tok_s input_tok_s request_s waiting_tok_s padding link_busy"),
        **{f"{metric}_{name}": getattr(times[metric], name, None) for metric in METRICS for name in Summary._fields},
        **_fields(PassCounts, point.counts if point.pass_ms else None),
        "kv_positions": point.kv_positions or None,
        "sla": _json(point.sla),
    }


def table(files: Iterable[tuple[str, Records]]) -> list[Row]:
    """Return a row for each file's latest points."""
    kept = [(file, point) for file, records in files for point in latest(records.points)]
    predicted = sorted({name for _, point in kept for name in point.predicted})
    versions = sorted({name for _, point in kept for name in point.versions})
    return [
        _row(file, point, _fields(Workload, point.case.workload), _rates(point))
        | {f"predicted_{name}": point.predicted.get(name) for name in predicted}
        | {f"version_{name}": point.versions.get(name) for name in versions}
        for file, point in kept
    ]


def request_table(files: Iterable[tuple[str, Records]], goodput: Callable[[RequestPoint], float | None]) -> list[Row]:
    """Return a row for each load of requests, repeated ones included."""
    rows = []
    for file, point in ((file, point) for file, records in files for point in records.requests):
        asked = point.requests
        texts = {"in_flight": asked.in_flight, "request_rate": asked.request_rate, "request_order": asked.order}
        load = _attributes(asked, "source requests seed")
        load |= {name: None if value is None else str(value) for name, value in texts.items()}
        rows.append(_row(file, point, load, _request_rates(point)) | {"goodput_request_s": goodput(point)})
    return rows


def to_csv(rows: Sequence[Row]) -> bytes:
    """Return comma-separated UTF-8 with a header. No text is a formula."""

    def unarmed(cell: Cell) -> Cell:
        if not isinstance(cell, str):
            return cell
        cell = "\n".join(re.split("\r\n?", cell))  # the csv module of Python 3.12 and before leaves a lone \r unquoted
        return f"'{cell}" if cell.lstrip(" ").startswith(_FORMULA) else cell

    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(map(unarmed, row) for row in (rows[0], *map(dict.values, rows)))
    return text.getvalue().encode()


def to_json(rows: Sequence[Row]) -> bytes:
    """Return a JSON list of objects; null is unknown."""
    return json.dumps(rows, indent=1).encode() + b"\n"


WRITERS: dict[str, Callable[[Sequence[Row]], bytes]] = {"csv": to_csv, "json": to_json}
