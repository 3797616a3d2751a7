"""What a machine offers: memory by tier and the bandwidth of the links between the tiers.

Weight streaming lives and dies by one number, host-to-device bandwidth. A datasheet's value is 10-15% above what a copy
reaches, so a measured machine (`zinfer probe`) always stands before a catalogue entry.
"""

import json
import tomllib
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from zinfer.frozen import Frozen

Tier = Literal["gpu", "host", "nvme"]


class MachineError(ValueError):
    """A machine reference that cannot be used; the message says what to do next."""


class Machine(Frozen):
    """One host with zero or more equal GPUs. Bytes; bandwidths in bytes per second; None is unknown, never zero.

    Without a GPU the CPU is the device: device memory is host memory and the "link" is a copy within it.
    """

    name: str
    source: Literal["measured", "datasheet"]
    gpu_name: str | None = None
    gpu_count: int = 0
    gpu_bytes: int = 0  # usable memory of one GPU
    host_bytes: int | None = None  # what a process may use: the cgroup limit where there is one
    nvme_bytes: int | None = None  # free space at the offload path
    hbm_bandwidth: float | None = None  # device-to-device copy, read plus written
    h2d_bandwidth: float | None = None  # pinned host memory to the device
    d2h_bandwidth: float | None = None
    duplex_bandwidth: float | None = None  # each way, both directions at once
    pageable_bandwidth: float | None = None  # host to device from ordinary memory
    host_bandwidth: float | None = None  # host memcpy, read plus written
    nvme_bandwidth: float | None = None  # direct-I/O read
    matmul_flops: float | None = None  # dense bf16
    coherent: bool = False  # the link is cache-coherent (NVLink-C2C)
    note: str = ""  # where the figures come from
    details: dict[str, Any] = Field(
        default_factory=dict
    )  # what `probe` saw besides: driver, PCIe, NUMA, every block size

    @property
    def device_bytes(self) -> int:
        """Memory the weights in use, the KV cache and the activations have to fit into."""
        return self.gpu_bytes if self.gpu_count else (self.host_bytes or 0)


@cache
def _catalogue() -> dict[str, Any]:
    with (files("zinfer") / "catalog" / "machines.toml").open("rb") as file:
        return tomllib.load(file)


def catalogue_names() -> tuple[str, ...]:
    """Machines that `--machine` knows without a probe."""
    return tuple(_catalogue())


def load(reference: str | Path) -> Machine:
    """The machine a user means: a catalogue name, or the path of a `machine.json` that `zinfer probe` wrote.

    Raises MachineError, in one line, for anything else.
    """
    if str(reference) in _catalogue():
        return Machine(name=str(reference), **_catalogue()[str(reference)])
    path = Path(reference)
    if path.is_dir():
        path = path / "machine.json"
    if not path.is_file():
        raise MachineError(
            f"no machine {str(reference)!r}: not a machine.json, not one of {', '.join(catalogue_names())}"
        )
    try:
        return Machine.model_validate(json.loads(path.read_text()))
    except ValueError as error:
        raise MachineError(
            f"{path} is not a machine description: {str(error).splitlines()[0]}; run `zinfer probe`"
        ) from error
