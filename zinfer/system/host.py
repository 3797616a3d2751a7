"""Hardware of this machine, read and not measured, without torch: GPUs from NVML, the rest from the kernel."""

import contextlib
import os
import platform
import re
import resource
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from zinfer.core.units import parse_bytes

MANY_CPUS = 8  # CPUs of which attention leaves one to everything else that runs
GROUPS, GROUP_ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
GROWN = 0.9  # share of a control group's limit: a host with less memory than that adds memory as it is used


def slug() -> str:
    """Return this machine's name by its hardware: ``nvidia-h100-80gb-hbm3-x4``, ``cpu-amd-epyc-2-cores``."""
    return name_of(gpus())


def gpus() -> list[dict[str, Any]]:
    """Return the GPUs that this process may use: name, memory, driver, PCIe and power, by NVML."""
    if package_version("torch").endswith("+cpu"):  # torch without CUDA cannot use a driver
        return []
    try:
        import pynvml as nvml

        nvml.nvmlInit()
    except Exception:  # there is no driver
        return []
    try:
        return [_gpu_facts(nvml, handle) for handle in _visible(nvml)]
    finally:
        nvml.nvmlShutdown()  # open, it would not work in forks


def _visible(nvml: Any) -> list[Any]:
    """Return the NVML handles of CUDA_VISIBLE_DEVICES; as in CUDA, the list ends at the first invalid entry."""
    count = nvml.nvmlDeviceGetCount()
    handles = []
    for entry in os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(","):
        try:
            by_index, index = nvml.nvmlDeviceGetHandleByIndex, entry.strip()
            handles.append(by_index(int(index)) if index.isdigit() else nvml.nvmlDeviceGetHandleByUUID(index))
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
        "c2c": lambda: bool(nvml.nvmlDeviceGetC2cModeInfoV(handle).isC2cEnabled),
    }
    answers = {}
    for key, read in facts.items():
        with contextlib.suppress(nvml.NVMLError, AttributeError):  # not every GPU and driver answers every question
            answers[key] = read()
    return answers


def package_version(package: str) -> str:
    """Return a distribution's version, or an empty text, without importing it. Torch's has its build: ``+cu130``."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        distribution = metadata.distribution(package)
        if package == "torch" and "+" not in distribution.version:
            with contextlib.suppress(OSError):
                source = Path(str(distribution.locate_file("torch/version.py"))).read_text()
                if (build := re.search(r"^__version__ = '([\w.+]+)'$", source, re.MULTILINE)) is not None:
                    return build[1]
        return distribution.version
    return ""


def name_of(devices: list[dict[str, Any]]) -> str:
    """Return the slug of a machine with these GPUs, or with none."""
    if devices:
        text = str(devices[0].get("name", "gpu")) + (f" x{len(devices)}" if len(devices) > 1 else "")
    else:
        model = re.sub(r"\(\w+\)|@.*|\b(CPU|Processor|\w+-Core)\b", " ", cpu_model(), flags=re.IGNORECASE)
        text = f"cpu {model} {len(os.sched_getaffinity(0))} cores"
    return "-".join(re.findall(r"[a-z0-9.]+", text.lower()))


def cpu_model() -> str:
    """Return the CPU's name, or its architecture (as on Arm)."""
    return _kernel_fact("cpuinfo", "model name") or platform.machine()


def vectors() -> dict[str, bool]:
    """Tell which instructions of compiled experts this CPU has: for all formats, and for those of few bits."""
    flags = set(_kernel_fact("cpuinfo", "flags").split())
    needed = {"avx512": {"avx512bw", "avx512vl", "avx512_vnni", "fma"}, "avx2": {"avx2", "f16c", "fma"}}
    return {name: needs <= flags for name, needs in needed.items()}


def _kernel_fact(file: str, name: str) -> str:
    """Return the first value of a name in a file of /proc; empty if it has none."""
    match = re.search(rf"^{name}[ \t]*:(.*)$", Path("/proc", file).read_text(), re.MULTILINE)
    return match[1].strip() if match else ""


def peak_bytes() -> int:
    """Return the peak memory of this process in bytes, shared memory included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def shared_bytes() -> int:
    """Return this process's memory from files in memory (RssShmem), in bytes."""
    return int((_kernel_fact("self/status", "RssShmem") or "0").split()[0]) * 1024


def memory_total() -> int:
    """Return the memory of this host (MemTotal), in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def memory_limit(groups: Path = GROUPS, root: Path = GROUP_ROOT) -> int | None:
    """Return the smallest memory limit of this process's control groups in bytes; None if there is none."""
    return min((limit for limit, _ in _memory_groups(groups, root)), default=None)


def oom_kills(groups: Path = GROUPS, root: Path = GROUP_ROOT) -> int:
    """Count the kernel's out-of-memory kills in this process's control group; 0 if unknown."""
    for folder, first_version in _control_groups("memory", groups, root):
        with contextlib.suppress(OSError, ValueError, KeyError):
            file = folder / ("memory.oom_control" if first_version else "memory.events")
            return int(dict(line.split() for line in file.read_text().splitlines())["oom_kill"])
    return 0


def _memory_groups(groups: Path, root: Path) -> list[tuple[int, int]]:
    """Return limit and used bytes of each limited control group."""
    limited = []
    for folder, first in _control_groups("memory", groups, root):
        with contextlib.suppress(OSError, ValueError):
            limit = int((folder / ("memory.limit_in_bytes" if first else "memory.max")).read_text())
            if limit < 1 << 60:
                limited.append((limit, _in_use(folder)))
    return limited


def _control_groups(controller: str, groups: Path, root: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the folders of this process's control groups with a controller. Also tell whether they are of version 1."""
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        folder, group = root / controller if controllers else root, Path(path.lstrip("/"))
        for level in (group, *group.parents):
            yield folder / level, bool(controllers)


def usable_cpus(groups: Path = GROUPS, root: Path = GROUP_ROOT) -> int:
    """Return the number of CPUs that this process may use. A container's may be given as time, not as certain ones."""
    counts = [len(os.sched_getaffinity(0))]
    for folder, first in _control_groups("cpu", groups, root):
        files = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if first else ("cpu.max",)
        with contextlib.suppress(OSError, ValueError):
            quota, period = " ".join((folder / file).read_text() for file in files).split()
            if quota not in ("max", "-1"):
                counts.append(max(1, -(-int(quota) // int(period))))
    return min(counts)


def _in_use(group: Path) -> int:
    """Return the bytes that a control group holds, without its page cache; 0 if the kernel does not report them."""
    with contextlib.suppress(OSError, ValueError):
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        total = "total_" if "total_cache" in stat else ""  # version 1: sums that include the child groups
        kinds = "active_file", "inactive_file", "slab_reclaimable"
        reclaimable = sum(int(stat.get(f"{total}{kind}", 0)) for kind in kinds)
        return int((group / ("memory.usage_in_bytes" if total else "memory.current")).read_text()) - reclaimable
    return 0


def available_bytes(proc: Path = Path("/proc"), root: Path = GROUP_ROOT) -> int:
    """Return the host memory that is left, page cache and swap included.

    If a control group's limit exceeds all memory there is, the limit alone counts: some hosts add memory as it is used.
    """
    fields = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
    texts = fields["MemTotal"], fields.get("MemAvailable", fields["MemTotal"]), fields.get("SwapFree", "0")
    total, *free = (int(text.split()[0]) * 1024 for text in texts)
    groups = _memory_groups(proc / "self/cgroup", root)
    room = min((limit - used for limit, used in groups), default=None)
    if room is None:
        return sum(free)
    return max(0, room if min(groups)[0] > total else min(room, sum(free)))


def host_bytes() -> int:
    """Return the memory that a process may use, in bytes: all of it, or the control group's limit.

    The limit counts if it is lower, or so much higher (see GROWN) that the host must add memory as it is used.
    """
    total, limit = memory_total(), memory_limit()
    if limit is None or total < limit <= total / GROWN:
        return total
    return limit


def attending_cpus(cpus: int) -> int:
    """Return the number of `cpus` CPUs that attention uses: of many, all but one.

    The threads wait for each other after every product. One that shares its CPU with another program holds up all, by
    milliseconds each time; and the others read memory as fast without it.
    """
    return cpus - (cpus >= MANY_CPUS)


def cache_folder() -> Path:
    """Return the folder for what can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "zinfer"


def cache_bytes(root: Path = Path("/sys")) -> int:
    """Return the last-level caches of all processors together, in bytes; 0 if the kernel does not report them."""
    sizes: dict[tuple[int, str], int] = {}
    for cache in (root / "devices/system/cpu").glob("cpu[0-9]*/cache/index[0-9]*"):
        try:
            level, cores, size = ((cache / name).read_text().strip() for name in ("level", "shared_cpu_list", "size"))
            sizes[int(level), cores] = parse_bytes(f"{size}iB")
        except (OSError, ValueError):
            continue
    last = max((level for level, _ in sizes), default=0)
    return sum(size for (level, _), size in sizes.items() if level == last)


def host_facts() -> dict[str, Any]:
    """Return the processor of this host, its caches, and the memory."""
    return {
        "cpu": cpu_model(),
        "cores": usable_cpus(),
        **vectors(),
        "cache_bytes": cache_bytes(),
        "numa_nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1,
        "memory_bytes": memory_total(),
        "memory_limit_bytes": memory_limit(),
    }
