"""What this machine is, read and not measured: GPUs from NVML, processor and memory from the kernel; without torch."""

import contextlib
import os
import platform
import re
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any


def slug() -> str:
    """A name for this machine that says what it is and not whose: ``nvidia-h100-80gb-hbm3`` (``-x4`` for four of them)
    or ``cpu-amd-epyc-2-cores``. Measures nothing and does not import torch."""
    return name_of(gpus())


def gpus() -> list[dict[str, Any]]:
    """The GPUs that this process may use, as NVML describes them: name, memory, driver, PCIe, NVLink, power."""
    if metadata_version("torch").endswith("+cpu"):  # a driver is of no use to a torch without CUDA
        return []
    try:
        import pynvml as nvml

        nvml.nvmlInit()
    except Exception:  # no driver, or none that NVML can talk to; torch has the last word
        return _gpus_of_torch() if Path("/dev/nvidiactl").exists() else []
    try:
        return [_gpu_facts(nvml, handle) for handle in _visible(nvml)]
    finally:
        nvml.nvmlShutdown()


def _visible(nvml: Any) -> list[Any]:
    """NVML handles of what CUDA_VISIBLE_DEVICES leaves; as in CUDA, the list ends at the first entry that is none."""
    count = nvml.nvmlDeviceGetCount()
    handles = []
    for entry in os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(","):
        try:
            index = entry.strip()
            by_index = index.isdigit()
            handles.append(
                nvml.nvmlDeviceGetHandleByIndex(int(index)) if by_index else nvml.nvmlDeviceGetHandleByUUID(index)
            )
        except nvml.NVMLError:
            break
    return handles


def _gpu_facts(nvml: Any, handle: Any) -> dict[str, Any]:
    facts: dict[str, Callable[[], Any]] = {
        "name": lambda: nvml.nvmlDeviceGetName(handle),
        "memory_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total,
        "driver": lambda: nvml.nvmlSystemGetDriverVersion(),
        "compute_capability": lambda: ".".join(map(str, nvml.nvmlDeviceGetCudaComputeCapability(handle))),
        "pcie_generation": lambda: nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle),
        "pcie_generation_max": lambda: nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle),
        "pcie_width": lambda: nvml.nvmlDeviceGetCurrPcieLinkWidth(handle),
        "pcie_width_max": lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(handle),
        "power_limit_w": lambda: nvml.nvmlDeviceGetPowerManagementLimit(handle) / 1000,
        "nvlinks": lambda: sum(_nvlink(nvml, handle, link) for link in range(nvml.NVML_NVLINK_MAX_LINKS)),
        "c2c": lambda: bool(nvml.nvmlDeviceGetC2cModeInfoV(handle).isC2cEnabled),
    }
    found = {}
    for key, read in facts.items():
        with contextlib.suppress(nvml.NVMLError, AttributeError):  # not every GPU and driver answers every question
            found[key] = read()
    return found


def _nvlink(nvml: Any, handle: Any, link: int) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetNvLinkState(handle, link))
    except nvml.NVMLError:
        return False


def _gpus_of_torch() -> list[dict[str, Any]]:
    with contextlib.suppress(ImportError):
        import torch

        return [{"name": torch.cuda.get_device_name(index)} for index in range(torch.cuda.device_count())]
    return []


def metadata_version(package: str) -> str:
    """The installed version of a distribution, without importing it; empty where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def name_of(devices: list[dict[str, Any]]) -> str:
    """The slug of a machine with these GPUs, or with none."""
    if devices:
        text = str(devices[0].get("name", "gpu")) + (f" x{len(devices)}" if len(devices) > 1 else "")
    else:
        model = re.sub(r"\(\w+\)|@.*|\b(CPU|Processor|\w+-Core)\b", " ", cpu_model(), flags=re.IGNORECASE)
        text = f"cpu {model} {len(os.sched_getaffinity(0))} cores"
    return "-".join(re.findall(r"[a-z0-9.]+", text.lower()))


def cpu_model() -> str:
    """The CPU's name, or its architecture where the kernel gives no name (as on Arm)."""
    match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return match[1].strip() if match else platform.machine()


def memory_total() -> int:
    """MemTotal, in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def memory_limit(groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The least memory limit of this process's control group and of those above it, in bytes; None where there is none.

    Version 2 says ``max`` for no limit, version 1 a number near 2^63.
    """
    limits = []
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        folder, file = (root / "memory", "memory.limit_in_bytes") if controllers else (root, "memory.max")
        group = Path(path.lstrip("/"))
        for level in (group, *group.parents):
            with contextlib.suppress(OSError, ValueError):
                limits.append(int((folder / level / file).read_text()))
    return min((limit for limit in limits if limit < 1 << 60), default=None)


def host_bytes() -> int:
    """Memory that a process may use: all there is, or the control group's limit where that is lower."""
    return min(memory_total(), memory_limit() or memory_total())


def host_facts() -> dict[str, Any]:
    """Processor, cores this process may use, NUMA nodes and memory, for a machine's details."""
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "numa_nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1,
        "memory_bytes": memory_total(),
        "memory_limit_bytes": memory_limit(),
    }
