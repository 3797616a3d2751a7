"""Input of a report: groups of points with their machines, and studies."""

from collections.abc import Mapping
from typing import NamedTuple

from zinfer.analysis.group import Group, Points
from zinfer.core.case import Case
from zinfer.core.machine import Machine
from zinfer.record.requests import RequestPoint
from zinfer.record.study import Study


class WorkloadFindings(NamedTuple):
    """Group of points of one sweep or several."""

    sweeps: tuple[str, ...]
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
