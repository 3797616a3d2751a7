"""Input of a report: groups of points with their machines, and studies."""

from collections.abc import Mapping
from functools import cache
from os.path import expanduser, isdir
from typing import Any, NamedTuple

from zinfer.analysis.group import Group, Points
from zinfer.checkpoint.resolve import catalogue_name, resolve
from zinfer.core.case import Case
from zinfer.core.machine import Machine
from zinfer.core.model import ModelError, ModelSpec
from zinfer.record.requests import RequestPoint
from zinfer.record.study import Study


class WorkloadFindings(NamedTuple):
    """Group of points of one sweep or several, and its probed machine."""

    sweeps: tuple[str, ...]
    group: Group
    points: Points
    machine: Machine | None = None
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

    @property
    def machines(self) -> dict[str, Machine]:
        """Described machines, by the name that points know them by."""
        return {workload.group.machine: workload.machine for workload in self.workloads if workload.machine is not None}

    @property
    def main(self) -> tuple[WorkloadFindings, ...]:
        """Workloads of whole models; all of them if there are only slices."""
        return tuple(workload for workload in self.workloads if workload.group.layers is None) or self.workloads

    @property
    def slices(self) -> tuple[WorkloadFindings, ...]:
        """Workloads of slices, where there are whole models too."""
        main = self.main
        return tuple(workload for workload in self.workloads if workload not in main)

    @property
    def ordered(self) -> tuple[WorkloadFindings, ...]:
        """Workloads, those of slices last."""
        return self.main + self.slices

    @property
    def points(self) -> Points:
        return tuple(point for workload in self.workloads for point in workload.points)


def shape(case: Case) -> ModelSpec | None:
    """Return the model of a case if it is on this machine. A hub id is looked up in the catalogue alone."""
    return _shape(case.model, case.dtype, case.layers, case.weights)


@cache
def _shape(model: str, *settings: Any) -> ModelSpec | None:
    if catalogue_name(model) is None and not isdir(expanduser(model)):  # no name makes these raise
        return None
    try:
        return resolve(model, *settings)
    except ModelError:
        return None
