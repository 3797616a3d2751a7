"""Machines: memory of each tier, and bandwidth of the links between tiers.

A datasheet's bandwidth is 10-15% above what a copy reaches, so a measured machine (`zinfer probe`) takes precedence
over a catalogue entry, and every figure of the catalogue states its source.
"""

import re
import tomllib
from functools import cache
from importlib.resources import files
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from zinfer.core.errors import ZinferError
from zinfer.core.units import figures, gb, parse_bytes
from zinfer.core.value import Frozen, first_fault

Bytes = Annotated[int, Field(gt=0, le=1 << 60)]
Rate = Annotated[float, Field(ge=1, le=1e18, allow_inf_nan=False)]  # bytes or operations a second
Text = Annotated[str, Field(max_length=4000)]
DESCRIPTION_BYTES = 1 << 20  # largest machine.json


class MachineError(ZinferError):
    """A machine reference that cannot be used; the message says what to do next."""


# Payload of PCIe x16 in bytes per second by generation: the wire's rate, of which packets of 256 bytes leave 256 / 276
# to the data (PCI Express Base Specification 5.0, section 2.2: 12 bytes of header, 8 of framing, sequence and LCRC).
PCIE_BANDWIDTH = {
    generation: lane * 16 * 256 / 276 for generation, lane in {3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 8e9}.items()
}
GROUPED_SHARE = 0.43  # `grouped_attention_bandwidth` over `attention_bandwidth` of 16 cores beside an H200
SHARING = 8  # query heads a key head that `grouped_attention_bandwidth` is measured with: as in most current models


class Machine(Frozen):
    """One host with zero or more equal GPUs. Bytes, and bytes per second; None is unknown, never zero.

    Without a GPU the CPU is the device: device memory is host memory and the "link" is a copy within it.
    """

    name: str = Field(min_length=1, max_length=200)
    source: Literal["measured", "datasheet"]
    gpu_name: Text | None = None
    gpu_count: int = Field(default=0, ge=0, le=4096)
    gpu_bytes: int = Field(default=0, ge=0, le=1 << 60)  # usable memory of one GPU
    host_bytes: Bytes | None = None  # memory that a process may use: the cgroup's limit, if it has one
    nvme_bytes: int | None = Field(default=None, ge=0, le=1 << 60)  # free space at the offload path
    hbm_bandwidth: Rate | None = None  # device-to-device copy, bytes read plus written
    h2d_bandwidth: Rate | None = None  # pinned host memory to the device
    d2h_bandwidth: Rate | None = None
    duplex_bandwidth: Rate | None = None  # bandwidth in each direction, while both copy
    links_bandwidth: Rate | None = None  # pinned host memory to all GPUs at once, bytes over all links
    gather_bandwidth: Rate | None = None  # bytes a GPU gets from others, while each gets as many
    pageable_bandwidth: Rate | None = None  # pageable host memory to the device
    host_bandwidth: Rate | None = None  # memcpy, bytes read plus written; link and CPU together if that is more
    attention_bandwidth: Rate | None = None  # bf16 keys and values that CPU attention reads in decode
    grouped_attention_bandwidth: Rate | None = None  # the same with SHARING query heads for each key head
    shared_attention_bandwidth: Rate | None = None  # the same while the link copies to the device
    shared_h2d_bandwidth: Rate | None = None  # the link's bandwidth meanwhile
    nvme_bandwidth: Rate | None = None  # direct-I/O read
    matmul_flops: Rate | None = None  # dense bf16
    coherent: bool = False  # the link is cache-coherent (NVLink-C2C)
    unified: bool = False  # CPU and GPU share one memory: `gpu_bytes` of it are the GPU's, `host_bytes` the system's
    peaks: dict[str, Rate] = Field(default_factory=dict)  # figure -> the vendor's peak, where the figure is measured
    note: Text = ""  # kind of machine, or figures that `probe` could not measure
    sources: dict[str, Text] = Field(default_factory=dict)  # figure -> source: "measured ..", "datasheet ..", "set .."
    details: dict[str, Any] = Field(default_factory=dict)  # further facts: driver, PCIe, NUMA, every block size

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if bool(self.gpu_count) != bool(self.gpu_bytes):
            raise ValueError(f"gpu_count is {self.gpu_count} and gpu_bytes {self.gpu_bytes}: both, or neither, are 0")
        for part in ("host", "gpu"):
            if not isinstance(self.details.get(part, {}), dict):
                raise ValueError(f"details.{part} is not an object")
        cores = self.details.get("host", {}).get("cores", 0)
        if type(cores) is not int or not 0 <= cores <= 1 << 20:
            raise ValueError(f"details.host.cores is {cores!r:.40}")
        return self

    def attention_rate(self, sharing: int) -> float | None:
        """Return `attention_bandwidth` for `sharing` query heads a key head."""
        if self.attention_bandwidth is None:
            return None
        # No slower than while the link copies: where it was measured so, its first samples were too early.
        alone = max(self.attention_bandwidth, self.shared_attention_bandwidth or 0.0)
        grouped = self.grouped_attention_bandwidth or GROUPED_SHARE * alone
        return min(alone, grouped * SHARING / sharing)

    @property
    def device_bytes(self) -> int:
        """Memory for weights in use, KV cache and activations, in bytes."""
        return self.gpu_bytes if self.gpu_count else (self.host_bytes or 0)

    def at_peak(self) -> "Machine":
        """Return the machine at its known peaks: the vendor's, and the wire's of links. Set figures stay."""
        alike = (entry for entry in catalogue().values() if entry.get("gpu_name") == self.gpu_name)
        peaks = self.peaks or next((entry["peaks"] for entry in alike if "peaks" in entry), {})
        rates = {field: max(getattr(self, field) or 0.0, peak) for field, peak in peaks.items()}
        gpu = self.details.get("gpu") or {}
        generation, width = gpu.get("pcie_generation_max"), gpu.get("pcie_width_max")
        if not self.details and (match := re.search(r"PCIe(\d) x16", self.sources.get("h2d_bandwidth", ""))):
            generation, width = int(match[1]), 16
        if self.h2d_bandwidth and not self.coherent and generation in PCIE_BANDWIDTH and isinstance(width, int):
            wire = PCIE_BANDWIDTH[generation] * width / 16
            for field, links in (("h2d_bandwidth", 1), ("links_bandwidth", self.gpu_count), ("duplex_bandwidth", 1)):
                if measured := getattr(self, field):
                    rates[field] = max(measured, wire * links)
        rates = {field: value for field, value in rates.items() if field not in self.overridden}
        if self.pageable_bandwidth and "pageable_bandwidth" not in self.overridden:
            link = rates.get("h2d_bandwidth", self.h2d_bandwidth) or 0.0
            rates["pageable_bandwidth"] = max(self.pageable_bandwidth, link)
        return self.model_copy(update=rates)

    def limited(self, gpu_bytes: int) -> "Machine":
        """Return the machine as if its GPUs had `gpu_bytes` each. Raises MachineError for more than they have."""
        if gpu_bytes > self.gpu_bytes:
            there = f"a GPU of {self.name} has {gb(self.gpu_bytes)}" if self.gpu_count else f"{self.name} has no GPU"
            raise MachineError(f"--gpu-memory {gb(gpu_bytes)}: {there}")
        sources = self.sources | {"gpu_bytes": "set by --gpu-memory"}
        name = f"{self.name}-gpu-{gpu_bytes / 1e9:.12g}-gb"
        return self.model_copy(update={"name": name, "gpu_bytes": gpu_bytes, "sources": sources})

    @property
    def overridden(self) -> tuple[str, ...]:
        """Names of the figures that `override` changed."""
        return tuple(field for field, source in self.sources.items() if source.startswith("set"))

    def describe(self, field: str) -> str:
        """Return one of `FIGURES` with its unit and its source: ``25.2 GB/s (measured by others, PCIe4 x16)``."""
        value = getattr(self, field)
        if not value:
            return "unknown"
        text = gb(value) + "/s" * field.endswith("_bandwidth")
        text = f"{figures(value / 1e12, 4)} TFLOP/s" if field.endswith("_flops") else text
        return f"{text} ({self.sources.get(field, self.source)})"


FIGURES = tuple(name for name in Machine.model_fields if name.endswith(("_bytes", "_bandwidth", "_flops")))


def limit_of(name: str) -> str | None:
    """Return the limit that a name holds, as it is typed (`Machine.limited`)."""
    match = re.search(r"-gpu-([\d.]+)-gb$", name)
    return f"{match[1]}GB" if match else None


def override(machine: Machine, setting: str) -> Machine:
    """Return a copy of `machine` with one figure replaced; its source then says so.

    A setting is ``h2d_bandwidth=200GB/s``, ``host_bytes=1TiB`` or ``matmul_flops=400TFLOP/s``. Raises MachineError.
    """
    field, _, text = (part.strip() for part in setting.partition("="))
    if field not in FIGURES:
        names = ", ".join(FIGURES)
        raise MachineError(f"{setting!r} is not a setting of a machine: write FIELD=VALUE with FIELD one of {names}")
    if field == "host_bytes" and machine.unified:
        raise MachineError(f"{setting!r}: CPU and GPU of {machine.name} share one memory, of which it has no more")
    try:
        value = _flops(text) if field.endswith("_flops") else parse_bytes(text)
    except (ValueError, OverflowError):
        value = 0
    if value <= 0 or ("/s" in text and field.endswith("_bytes")):
        unit = {"_bytes": "80GB or 24GiB", "_flops": "400TFLOP/s"}.get(field[field.rindex("_") :], "200GB/s")
        raise MachineError(f"{setting!r}: {text!r} is not a value for {field}: write it as {unit}")
    before = getattr(machine, field)
    source = f"set by hand, in place of {machine.describe(field)}" if before else "set by hand"
    alone = field in ("host_bandwidth", "h2d_bandwidth", "attention_bandwidth")
    stale = dict[str, float | None](shared_h2d_bandwidth=None, shared_attention_bandwidth=None) if alone else {}
    if field == "attention_bandwidth":
        stale["grouped_attention_bandwidth"] = value
    changed = machine.model_copy(update=stale | {field: value, "sources": machine.sources | {field: source}})
    try:
        return Machine.model_validate(changed.model_dump())
    except ValidationError as error:
        raise MachineError(f"{setting!r}: {first_fault(error)}") from None


def _flops(text: str) -> int:
    """Return the FLOP/s of ``400TFLOP/s``, ``400 TFLOPS`` or ``4e14``, decimal prefixes. Raises ValueError."""
    bare = re.sub(r"FLOP(S|/s)?$", "B", text.strip(), flags=re.IGNORECASE)
    if bare == text.strip() and not re.fullmatch(r"[\d.e]+", bare, re.IGNORECASE):
        raise ValueError(f"{text!r} is not a rate of operations")
    return parse_bytes(bare)


@cache
def catalogue() -> dict[str, Any]:
    """Return the entries of the catalogue, by the name that `--machine` takes."""
    with (files("zinfer") / "catalog" / "machines.toml").open("rb") as file:
        return tomllib.load(file)
