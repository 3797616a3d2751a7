"""Groups: points that may be compared, which share model (or slice of it), lengths, dtype and machine."""

import re
from collections.abc import Iterable, Sequence
from pathlib import PurePath
from typing import get_args

from zinfer.record.measurement import Measurement
from zinfer.spec.case import Case, LoadFormat, Offload
from zinfer.spec.model import Dtype
from zinfer.spec.value import Frozen

Points = Sequence[Measurement]


class Group(Frozen):
    """Fields that points must share to be compared. `layers` is set for a slice of the model's `total_layers`."""

    machine: str
    model: str
    layers: int | None
    input_len: int
    output_len: int
    dtype: Dtype
    load_format: LoadFormat
    total_layers: int | None = None  # None if no point got far enough to record it

    @property
    def model_name(self) -> str:
        """Model name without the folders of a local path."""
        return PurePath(self.model).name if self.model.startswith((".", "/", "~")) else self.model

    @property
    def title(self) -> str:
        """Title of a figure or table: ``bloom-176b, 14 of 70 layers, 512 in / 32 out``."""
        part = "" if self.layers is None else f", {self.layers} of {self.total_layers or '?'} layers"
        return f"{self.model_name}{part}, {self.input_len} in / {self.output_len} out"

    @property
    def conditions(self) -> str:
        """Conditions of the numbers: machine, whole model or slice, kind of weights, dtype."""
        whole = "the whole model" if self.layers is None else "a slice of the model"
        weights = "dummy weights" if self.load_format == "dummy" else "weights of the checkpoint"
        return f"{self.machine} · {whole} · {weights} · {self.dtype}"

    @property
    def caution(self) -> str | None:
        """Warning for a slice about figures that do not hold for the whole model; None for a whole model."""
        if self.layers is None:
            return None
        plan = f"`zinfer plan --model {self.model_name}`"
        return (
            f"A slice takes a slice's memory: its largest batches, with and without offload, are its own. See {plan}."
        )

    def stem(self, sweep: str, alone: bool) -> str:
        """File stem of this group's figures, ``<machine>/<sweep>``, with a suffix if it is not `alone` in its sweep."""
        part = "" if self.layers is None else f"-{self.layers}l"
        name = f"{self.model_name}{part}-{self.input_len}-{self.output_len}-{self.dtype}-{self.load_format}"
        return f"{path_part(self.machine)}/{path_part(sweep if alone else f'{sweep}-{name}')}"


def groups(points: Iterable[Measurement]) -> dict[Group, tuple[Measurement, ...]]:
    """Points by group, sorted; if a case was measured several times, the last point counts."""
    latest = {(point.machine, point.case): point for point in points}
    found: dict[Group, list[Measurement]] = {}
    for point in latest.values():
        case = point.case
        group = Group(
            machine=point.machine,
            model=case.model,
            layers=case.layers,
            input_len=case.workload.input_len,
            output_len=case.workload.output_len,
            dtype=case.dtype,
            load_format=case.load_format,
        )
        found.setdefault(group, []).append(point)
    result = {}
    for group in sorted(found, key=lambda g: (g.machine, g.model, g.layers or 0, g.input_len, g.output_len, g.dtype)):
        total = max((point.total_layers or 0 for point in found[group]), default=0) or None
        result[group.model_copy(update={"total_layers": total})] = tuple(sorted(found[group], key=_order))
    return result


def by_load(points: Points) -> dict[Case, tuple[Measurement, ...]]:
    """Points of a group by load (engine, offload and options, at batch size 1), by ascending batch size."""
    loads: dict[Case, list[Measurement]] = {}
    for point in sorted(points, key=_order):
        loads.setdefault(point.case.load, []).append(point)
    return {load: tuple(own) for load, own in loads.items()}


def _order(point: Measurement) -> tuple[str, int, int, str, int]:
    case = point.case
    offload = get_args(Offload).index(case.offload)
    return case.engine, offload, len(case.options), str(case.options), case.workload.batch_size


def path_part(text: str) -> str:
    """`text` as one path component: letters, digits, dot and dash; never hidden, never empty."""
    return re.sub(r"[^A-Za-z0-9.-]+", "-", text).strip(".-") or "unnamed"
