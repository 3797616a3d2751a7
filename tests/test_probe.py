"""Probe of the machine that runs the tests: the figures are plausible and nothing is left behind."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from click.testing import CliRunner

from tests import Patch, invoke, mapping
from zinfer.commands.out import write
from zinfer.commands.probe import command
from zinfer.core.machine import Machine, MachineError
from zinfer.engine import direct
from zinfer.system import host, local
from zinfer.system.machines import load
from zinfer.worker import probe
from zinfer.worker.process import versions

H100 = {"name": "NVIDIA H100 80GB HBM3"}


@pytest.fixture
def no_gpu(monkeypatch: Patch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


@pytest.fixture
def swift(monkeypatch: Patch, no_gpu: None) -> None:
    """Let the CPU's rates be given: the probe takes no time."""
    monkeypatch.setattr(probe, "MIB", 1 << 20)
    monkeypatch.setattr(probe, "WARM_UP_S", 0.0)
    monkeypatch.setattr(probe, "_host_copy", lambda size, repeats: [4e9, 5e9, 6e9])
    monkeypatch.setattr(probe, "_attention", lambda size, repeats, sharing: [7e9, 8e9, 9e9])
    monkeypatch.setattr(probe, "_matmul", lambda device, dtype, size, repeats: [3e9 if dtype == "bfloat16" else 2e9])


@pytest.fixture
def sizes(swift: None, monkeypatch: Patch) -> list[int]:
    """Bytes that each measurement of attention has: of keys and values, a copy of which has as many again."""
    asked: list[int] = []

    def attention(size: int, repeats: int, sharing: Any) -> list[float]:
        asked.append(size)
        return [1e9]

    monkeypatch.setattr(probe, "_attention", attention)
    return asked


@pytest.mark.torch
def test_quick_probe_of_this_machine(no_gpu: None, monkeypatch: Patch) -> None:
    monkeypatch.setattr(probe, "WARM_UP_S", 0.01)
    monkeypatch.setattr(probe, "BUDGET_S", 0.1)
    machine = probe.probe(quick=True)
    assert machine.source == "measured"
    assert machine.name.startswith("cpu-")
    assert machine.gpu_count == 0
    assert machine.device_bytes == machine.host_bytes == host.host_bytes()
    assert machine.host_bandwidth == 2 * (machine.h2d_bandwidth or 0)
    for rate in (machine.h2d_bandwidth, machine.matmul_flops, machine.attention_bandwidth):
        assert rate is not None
        assert 0 < rate < 1e15


@pytest.mark.torch
def test_figures_are_medians_and_keep_their_spread(swift: None) -> None:
    machine = probe.probe()
    assert (machine.h2d_bandwidth, machine.host_bandwidth, machine.hbm_bandwidth) == (5e9, 1e10, 1e10)
    assert machine.matmul_flops == 3e9  # the faster of the two types
    assert machine.details["samples"]["h2d_bandwidth"] == {"median": 5e9, "spread": 0.4, "samples": 3}
    assert (machine.attention_bandwidth, machine.grouped_attention_bandwidth) == (8e9, 8e9)
    assert machine.nvme_bandwidth is None
    assert "no GPU" in machine.note


@pytest.mark.torch
def test_the_cpu_attends_to_more_than_its_caches_hold(sizes: list[int], monkeypatch: Patch) -> None:
    monkeypatch.setattr(probe, "available_bytes", lambda: 64 << 30)
    for cache in (32, 300, 1 << 20):
        monkeypatch.setattr(host, "cache_bytes", lambda cache=cache: cache << 20)
        probe.probe(quick=True)
    assert sizes[::2] == sizes[1::2] == [256 << 20, 1200 << 20, 8 << 30]  # no more than an eighth of memory


def flags_of(memory: memoryview) -> list[str]:
    """Return the kernel's flags (`VmFlags`) of the mapping that `memory` lies in."""
    lines = mapping(Path("/proc/self"), np.frombuffer(memory, dtype=np.uint8).ctypes.data)
    return next(line for line in lines if line.startswith("VmFlags:")).split()[1:]


@pytest.mark.torch
def test_disk_is_read_and_left_as_it_was(swift: None, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(probe, "BUDGET_S", 0.05)
    requests, real = dict[int, set[str]](), os.preadv

    def preadv(file: int, parts: list[memoryview], offset: int) -> int:
        requests.setdefault(len(parts[0]), set()).update(flags_of(parts[0]))
        return real(file, parts, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    machine = probe.probe(nvme_path=tmp_path, quick=True)
    assert machine.nvme_bytes
    assert machine.nvme_bandwidth
    assert requests.keys() == {direct.PAGE, direct.REQUEST}, "of the size with which stream reads layers"
    assert "hg" in requests[direct.REQUEST], "into memory that gets huge pages, as the memory of stream does"
    assert "sh" not in requests[direct.REQUEST], "which shared memory does not get"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.torch
def test_a_disk_without_direct_io_is_noted(swift: None, tmp_path: Path, monkeypatch: Patch) -> None:
    real = os.open

    def refuse(path: str, flags: int, *rest: int, **more: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    (drive := tmp_path / "drive").mkdir()
    words = ["--quick", "--nvme-path", str(drive), "-o", str(tmp_path / "machine.json")]
    result = CliRunner().invoke(command, words)
    machine = load(tmp_path / "machine.json")
    assert machine.nvme_bandwidth is None
    assert "no direct I/O at the offload path (Invalid argument)" in machine.note
    assert f"{drive} was not measured: {machine.note}" in result.stderr
    assert list(drive.iterdir()) == []


def test_a_path_that_cannot_be_measured_is_refused(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _path: SimpleNamespace(free=1 << 20))
    for folder, code, fault in ((tmp_path / "none", 2, "is not a folder"), (tmp_path, 5, "too little to measure with")):
        result = CliRunner().invoke(command, ["--nvme-path", str(folder), "-o", str(tmp_path / "m.json")])
        assert isinstance(result.exception, MachineError)
        assert (result.exception.exit_code, fault in str(result.exception)) == (code, True)


@pytest.mark.torch
def test_the_cpu_works_before_it_is_measured(swift: None, monkeypatch: Patch) -> None:
    copy = Mock(return_value=[4e9])
    monkeypatch.setattr(probe, "WARM_UP_S", 0.5)
    monkeypatch.setattr(probe, "perf_counter", Mock(side_effect=[0.0, 0.1, 0.4, 0.6]))
    monkeypatch.setattr(probe, "_host_copy", copy)
    probe.probe(quick=True)
    assert [call.args[1] for call in copy.mock_calls] == [1, 1, 3]


@pytest.mark.parametrize(
    ("devices", "cpu", "name"),
    [
        ([H100], "", "nvidia-h100-80gb-hbm3"),
        ([H100] * 4, "", "nvidia-h100-80gb-hbm3-x4"),
        ([], "AMD EPYC", "cpu-amd-epyc-2-cores"),
        ([], "Intel(R) Xeon(R) Platinum 8480C CPU @ 2.00GHz", "cpu-intel-xeon-platinum-8480c-2-cores"),
        ([], "AMD EPYC 7763 64-Core Processor", "cpu-amd-epyc-7763-2-cores"),
        ([], "aarch64", "cpu-aarch64-2-cores"),
    ],
)
def test_names(devices: list[dict[str, str]], cpu: str, name: str, monkeypatch: Patch) -> None:
    monkeypatch.setattr(host, "cpu_model", lambda: cpu)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert host.name_of(devices) == name


class FakeNvml(SimpleNamespace):
    """NVML with three GPUs that answer only for their names. It counts how often it is open."""

    class NVMLError(Exception):
        pass

    opened = 0

    def nvmlInit(self) -> None:
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlDeviceGetCount(self) -> int:
        return 3

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index >= 3:
            raise self.NVMLError
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        if uuid != "GPU-b":
            raise self.NVMLError
        return 1

    def nvmlDeviceGetName(self, handle: int) -> str:
        return f"gpu {handle}"


@pytest.mark.parametrize(
    ("visible", "handles"), [(None, [0, 1, 2]), ("", []), ("2,0", [2, 0]), ("1,7,0", [1]), ("GPU-b", [1]), ("-1", [])]
)
def test_visible_devices(visible: str | None, handles: list[int], monkeypatch: Patch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert host._visible(FakeNvml()) == handles


def test_a_gpu_that_answers_little_is_still_described() -> None:
    assert host._gpu_facts(FakeNvml(), 1) == {"name": "gpu 1"}


def test_nvml_is_closed_after_use(monkeypatch: Patch) -> None:
    """A process forked with NVML open reads no driver. Its results would have other settings."""
    nvml = FakeNvml()
    nvml.nvmlSystemGetDriverVersion = lambda: nvml.opened and "580.1"
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert versions("stream")["driver"] == "580.1"
    assert nvml.opened == 0


CFS = {"cpu/job/cpu.cfs_period_us": "100000"}


@pytest.mark.parametrize(
    ("limit", "groups", "files", "expected"),
    [
        (host.memory_limit, "0::/a/b\n", {"a/memory.max": "5000", "a/b/memory.max": "max"}, 5000),
        (host.memory_limit, "0::/a/b\n", {"memory.max": "4000", "a/b/memory.max": "6000"}, 4000),
        (host.memory_limit, "0::/\n", {"memory.max": "max"}, None),
        (host.memory_limit, "0::/gone\n", {}, None),
        (host.memory_limit, "4:cpu,memory:/job\n2:pids:/x\n", {"memory/job/memory.limit_in_bytes": "700"}, 700),
        (host.memory_limit, "4:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712"}, None),
        (host.memory_limit, "4:memory:/host/path\n0::/\n", {"memory/memory.limit_in_bytes": "800"}, 800),
        (host.usable_cpus, "0::/a/b\n", {"a/cpu.max": "250000 100000", "a/b/cpu.max": "max 100000"}, 3),
        (host.usable_cpus, "0::/\n", {"cpu.max": "max 100000"}, 64),
        (host.usable_cpus, "0::/\n", {"cpu.max": "50000 100000"}, 1),
        (host.usable_cpus, "3:cpu,cpuacct:/job\n", CFS | {"cpu/job/cpu.cfs_quota_us": "400000"}, 4),
        (host.usable_cpus, "3:cpu:/job\n", CFS | {"cpu/job/cpu.cfs_quota_us": "-1"}, 64),
        (host.usable_cpus, "0::/gone\n", {}, 64),
    ],
)
def test_limits_of_a_container(
    limit: Callable[[Path, Path], int | None],
    groups: str,
    files: dict[str, str],
    expected: int | None,
    tmp_path: Path,
    monkeypatch: Patch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(range(64)))
    (tmp_path / "groups").write_text(groups)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert limit(tmp_path / "groups", tmp_path) == expected


@pytest.mark.torch
def test_command_writes_where_plans_look(swift: None, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(command, [])
    assert result.exit_code == 0, result.output
    (written,) = tmp_path.rglob("*.json")
    assert written == tmp_path / "sweeps/results" / load(written).name / "machine.json"
    assert "h2d_bandwidth" in result.stdout
    assert "measuring" not in result.stdout
    assert "measuring host memory" in result.stderr


@pytest.mark.torch
@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({}, True),
        ({"details": {"host": {"cores": 1000}}}, False),
        ({"host_bytes": 1 << 50}, False),
        pytest.param({"host_bytes": None}, False, marks=pytest.mark.slow),
        pytest.param({"host_bytes": 1 << 50, "details": {}}, True, marks=pytest.mark.slow),  # by hand: unknown
    ],
)
def test_figures_of_another_host_are_left_to_it(
    changes: dict[str, object], same: bool, swift: None, tmp_path: Path, monkeypatch: Patch
) -> None:
    """Both hosts have the same GPU; the figures under its name came with the repository, for example."""
    monkeypatch.chdir(tmp_path)
    assert local.name() == host.slug()
    facts = {"host": host.host_facts()}
    machine = Machine(name=host.slug(), source="measured", host_bytes=host.host_bytes(), details=facts)
    path = local.RESULTS / machine.name / "machine.json"
    write(path, machine.model_copy(update=changes).model_dump_json())
    before = path.read_text()
    cores = facts["host"]["cores"]
    size = f"{host.host_bytes() >> 30}-gib" if host.host_bytes() >= local.ROUND else f"{host.host_bytes() >> 20}-mib"
    expected = machine.name if same else f"{machine.name}-{cores}-cores-{size}"
    assert local.name() == expected
    assert CliRunner().invoke(command, ["--quick", "--force"]).exit_code == 0
    assert load(local.RESULTS / expected).name == local.this_machine().name == expected
    assert (path.read_text() == before) is not same


def test_machines_of_little_memory_keep_their_figures_apart(tmp_path: Path, monkeypatch: Patch) -> None:
    """All of them had 0 GiB; a few MiB more or less, as after another boot, make no other machine."""
    monkeypatch.chdir(tmp_path)
    names = []
    for size in (64 << 30, 900 << 20, 300 << 20, 905 << 20, 299 << 20, 1100 << 20, 1900 << 20, 64 << 30):
        monkeypatch.setattr(local, "host_bytes", lambda size=size: size)
        names.append(local.name())
        path = local.RESULTS / names[-1] / "machine.json"
        if not path.exists():
            facts = {"host": host.host_facts()}
            write(path, Machine(name=names[-1], source="measured", host_bytes=size, details=facts).model_dump_json())
    slug, cores = host.slug(), len(os.sched_getaffinity(0))
    small = [f"{slug}-{cores}-cores-{size}-mib" for size in (900, 300, 900, 300, 1100, 1900)]
    assert names == [slug, *small, slug]


@pytest.mark.parametrize("recorded", [1 << 50, None])
def test_no_more_memory_is_planned_than_the_limit_in_force(
    recorded: int | None, tmp_path: Path, monkeypatch: Patch
) -> None:
    """The control group's limit fell, or the record came from elsewhere."""
    monkeypatch.chdir(tmp_path)
    path = local.RESULTS / host.slug() / "machine.json"
    write(path, Machine(name=host.slug(), source="measured", host_bytes=recorded).model_dump_json())
    for limit in (3 << 30, 1 << 30):
        monkeypatch.setattr(host, "memory_limit", lambda limit=limit: limit)
        assert local.this_machine().host_bytes == limit
    plan = ["plan", "-m", "opt-13b", "--offload", "cpu", "--input-len", "8", "--output-len", "8"]
    done = invoke(*plan)
    assert done.exit_code == 4
    assert "of host memory" in done.output
    assert "has 1.1 GB" in done.output


@pytest.mark.torch
@pytest.mark.gpu
def test_probe_of_a_gpu() -> None:
    machine = probe.probe(quick=True)
    assert machine.name == host.slug()
    rates = {name: value for name, value in vars(machine).items() if name.endswith("_bandwidth") and value is not None}
    ways = {"h2d", "d2h", "pageable", "hbm", "host", "attention", "shared_h2d", "shared_attention"}
    assert {f"{way}_bandwidth" for way in ways} <= rates.keys()
    assert ("links_bandwidth" in rates) == ("gather_bandwidth" in rates) == (machine.gpu_count > 1)
    assert all(0 < rate < float("inf") for rate in (*rates.values(), probe.measure_link("cuda")))
    assert rates["host_bandwidth"] >= rates["shared_attention_bandwidth"] + rates["shared_h2d_bandwidth"]


@pytest.mark.torch
@pytest.mark.parametrize("memory", [None, 64 << 20])
def test_the_probe_takes_a_share_of_the_memory_that_is_left(
    sizes: list[int], monkeypatch: Patch, memory: int | None
) -> None:
    def copy(size: int, repeats: int) -> list[float]:
        sizes.append(size)
        return [5e9]

    monkeypatch.setattr(probe, "_host_copy", copy)
    monkeypatch.setattr(probe, "available_bytes", lambda: 400 << 20)
    probe.probe(memory=memory)
    assert 0 < 2 * max(sizes) <= (200 << 20 if memory is None else memory)
    sizes.clear()
    probe.measure_link("cpu")
    assert 0 < 2 * max(sizes) <= 100 << 20


def test_a_probe_that_is_killed_for_memory_says_how_to_do_with_less(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(local, "PROBE", (sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"))
    with pytest.raises(MachineError, match="zinfer probe --quick --memory 64MiB") as caught:
        local.this_machine()
    assert caught.value.exit_code == 5


@pytest.mark.torch
def test_a_probe_under_load_does_not_replace_a_quieter_one(swift: None, tmp_path: Path, monkeypatch: Patch) -> None:
    path = tmp_path / "machine.json"
    monkeypatch.setattr(os, "cpu_count", lambda: 4)

    def probed(load_average: float, *words: str) -> tuple[int, str, float]:
        """Return a probe's exit code and stderr, and the recorded load."""
        monkeypatch.setattr(os, "getloadavg", lambda: (load_average, 0.0, 0.0))
        result = invoke("probe", "--quick", "-o", path, *words)
        return result.exit_code, result.stderr, load(path).details["load_average"]

    code, text, recorded = probed(0.5)
    assert (code, recorded, "load average" in text) == (0, 0.5, False)
    code, text, recorded = probed(3.0)
    assert (code, recorded) == (5, 0.5)
    assert "the load average is 3.0 on 4 CPUs" in text
    assert "--force" in text
    code, text, recorded = probed(3.0, "--force")
    assert (code, recorded, "figures may be too low" in text) == (0, 3.0, True)
    for load_average in (2.0, 0.9):  # the first one was made under more load
        assert probed(load_average)[::2] == (0, load_average)


def test_a_machine_that_cannot_be_written_is_one_line(monkeypatch: Patch) -> None:
    machine = Machine(name="x", source="measured")
    monkeypatch.setattr(probe, "probe", lambda *_given: machine)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    result = CliRunner().invoke(command, ["-o", "/dev/full"])
    assert result.exit_code == 5
    assert "No space left on device" in result.output
    assert len(result.output.splitlines()) == 1
