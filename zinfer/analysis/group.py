"""Groups of comparable points: equal model, slice, lengths, weights and machine."""

import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from operator import attrgetter
from statistics import fmean
from typing import Any, Literal, Self, TypeVar, get_args

from zinfer.core.case import Case, LoadFormat, Offload, weights_text, without_folders
from zinfer.core.model import Dtype, Weights
from zinfer.core.value import Frozen, group_by
from zinfer.record.measurement import Measurement, Recorded, latest

Points = Sequence[Measurement]
P = TypeVar("P", bound=Recorded)
CASES = 1 << 14  # cases whose load and order are kept: a report asks for them again and again
load_of = lru_cache(CASES)(attrgetter("load"))
Metric = Literal["ttft_ms", "tpot_ms", "e2e_ms", "output_tok_s", "prefill_tok_s", "decode_tok_s", "user_tok_s"]


class Setting(Frozen):
    """Properties that points of any kind must share to be compared."""

    machine: str
    model: str
    layers: int | None
    dtype: Dtype
    load_format: LoadFormat
    total_layers: int | None = None  # None if no point got far enough to record it

    @classmethod
    def of(cls, point: Recorded, **more: Any) -> Self:
        """Return the setting of a point."""
        shared = {name: getattr(point.case, name) for name in ("model", "layers", "dtype", "load_format")}
        return cls(machine=point.machine, **shared, **more)

    @property
    def rank(self) -> tuple[Any, ...]:
        """Sort key: whole models first."""
        return self.layers is not None, self.machine, self.model, self.layers or 0

    @property
    def model_name(self) -> str:
        """Model name without the folders of a local path."""
        return without_folders(self.model)

    @property
    def part(self) -> str:
        """Model, and its measured part: ``bloom-176b, 14 of 70 layers``."""
        name = self.model_name
        return name if self.layers is None else f"{name}, {self.layers} of {self.total_layers or '?'} layers"

    @property
    def conditions(self) -> str:
        """Conditions of the numbers: machine, slice, weights, type."""
        whole = "the whole model" if self.layers is None else "a slice of the model"
        return f"{self.machine} · {whole} · {weights_text(self.load_format)} · {self.dtype}"

    @property
    def caution(self) -> str | None:
        """Warning about a slice: its memory is not its model's. None for a whole model."""
        caution = "A slice takes a slice's memory: its largest batches, with and without offload, are its own."
        return None if self.layers is None else f"{caution} See `zinfer plan --model {self.model_name}`."


G = TypeVar("G", bound=Setting)


class Group(Setting):
    """Setting and lengths that points of equal sequences share."""

    input_len: int
    output_len: int

    @property
    def rank(self) -> tuple[Any, ...]:
        return *super().rank, self.input_len, self.output_len, self.dtype

    @property
    def title(self) -> str:
        """Title of a figure: ``bloom-176b, 14 of 70 layers, 512 in / 32 out``."""
        return f"{self.part}, {self.input_len} in / {self.output_len} out"

    def stem(self, sweep: str, alone: bool) -> str:
        """Return the path of this group's figures, longer unless `alone`."""
        part = "" if self.layers is None else f"-{self.layers}l"
        name = f"{self.model_name}{part}-{self.input_len}-{self.output_len}-{self.dtype}-{self.load_format}"
        return f"{path_part(self.machine)}/{path_part(sweep if alone else f'{sweep}-{name}')}"


def grouped(points: Iterable[P], of: Callable[[P], G]) -> dict[G, tuple[P, ...]]:
    """Return points by group, sorted; groups of slices know the number of all layers, if any point does."""
    result = {}
    for group, members in sorted(group_by(points, of).items(), key=lambda item: item[0].rank):
        total = max(point.total_layers or 0 for point in members) or None
        result[group.model_copy(update={"total_layers": total})] = tuple(members)
    return result


def groups(points: Iterable[Measurement]) -> dict[Group, tuple[Measurement, ...]]:
    """Return the latest points by group, sorted, whole models first."""

    def group_of(point: Measurement) -> Group:
        load = point.case.workload
        return Group.of(point, input_len=load.input_len, output_len=load.output_len)

    return grouped(sorted(latest(points), key=lambda point: order(point.case)), group_of)


def loads_of(points: Iterable[Measurement]) -> dict[tuple[str, Case], tuple[float, ...]]:
    """Return the output tok/s of every usable record by machine and case."""
    records = group_by((point for point in points if point.usable), lambda point: (point.machine, point.case))
    return {key: tuple(point.output_tok_s or 0.0 for point in of_case) for key, of_case in records.items()}


def by_load(points: Points) -> dict[Case, tuple[Measurement, ...]]:
    """Return points by load (the case at batch 1), batch sizes ascending."""
    loads = group_by(sorted(points, key=lambda point: order(point.case)), lambda point: load_of(point.case))
    return {load: tuple(load_points) for load, load_points in loads.items()}


@lru_cache(CASES)
def order(case: Case) -> tuple[str | int, ...]:
    """Return the sort key of cases: loads, then batch sizes."""
    load, offload = case.workload, get_args(Offload).index(case.offload)
    shared = (case.model, case.layers or 0, load.input_len, load.output_len, case.dtype, case.load_format)
    options = get_args(Weights).index(case.weights), len(case.options), str(case.options)
    return *shared, case.engine, offload, *options, load.batch_size


def samples(point: Measurement, metric: Metric) -> tuple[float, ...]:
    """Return the metric of each repeat with it, in ms or tok/s."""
    if not point.usable:
        return ()
    steps = [fmean(repeat) for repeat in point.step_ms if repeat]
    batch = point.case.workload.batch_size
    values: dict[Metric, Sequence[float]] = {
        "ttft_ms": point.ttft_ms,
        "tpot_ms": steps,
        "e2e_ms": point.e2e_ms,
        "output_tok_s": point.output_tok_s_samples,
        "prefill_tok_s": [batch * point.case.workload.input_len / first * 1e3 for first in point.ttft_ms],
        "decode_tok_s": [batch / step * 1e3 for step in steps],
        "user_tok_s": [1e3 / step for step in steps],
    }
    return tuple(values[metric])


def path_part(text: str) -> str:
    """Return `text` as one path component, never hidden or empty."""
    return re.sub(r"[^A-Za-z0-9.-]+", "-", text).strip(".-") or "unnamed"
