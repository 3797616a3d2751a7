"""Machine catalogue: it is consistent, and a damaged description is refused in one line."""

from datetime import date
from pathlib import Path

import pytest

from tests import Patch, invoke, mentions
from tests.results import case, point
from zinfer.analysis import reproduce
from zinfer.analysis.economics import list_prices
from zinfer.analysis.rates import offload_verdicts
from zinfer.checkpoint.resolve import resolve
from zinfer.core.machine import FIGURES, Machine, MachineError, catalogue, limit_of, override
from zinfer.plan.planner import make_plan
from zinfer.system import machines as machines
from zinfer.system.machines import load


@pytest.mark.parametrize("name", catalogue())
def test_catalogue_is_sound(name: str) -> None:
    machine = load(name)
    assert machine.name == name
    assert machine.note
    assert machine.gpu_count >= 1
    assert machine.gpu_name
    assert machine.device_bytes == machine.gpu_bytes > 15e9
    assert machine.hbm_bandwidth is not None
    assert machine.h2d_bandwidth is not None
    assert machine.matmul_flops is not None
    assert machine.hbm_bandwidth > 5 * machine.h2d_bandwidth or name == "dgx-spark"
    assert 1e10 < machine.h2d_bandwidth < 5e11
    assert 5e13 < machine.matmul_flops < 3e15
    assert (machine.duplex_bandwidth or 0) <= machine.h2d_bandwidth
    assert (machine.pageable_bandwidth or 0) < machine.h2d_bandwidth
    assert machine.coherent == (machine.h2d_bandwidth > 1.3e11)
    assert bool(machine.host_bytes) == machine.coherent, "known only where it is sold with the GPU"
    assert machine.unified == (name == "dgx-spark")


@pytest.mark.parametrize("name", catalogue())
def test_every_figure_of_the_catalogue_has_a_source(name: str) -> None:
    machine = load(name)
    figures = {field for field in FIGURES if getattr(machine, field)}
    assert set(machine.sources) == figures
    words = {source.split()[0].rstrip(":") for source in machine.sources.values()}
    assert words <= {"measured", "datasheet", "assumed"}
    assert (machine.source == "measured") == all("zinfer probe" in source for source in machine.sources.values())
    assert not machine.overridden


def test_the_command_lists_the_catalogue_and_the_sources_of_one() -> None:
    table = invoke("plan", "--list", "machines", env={"COLUMNS": "200"}).stdout
    assert all(name in table for name in catalogue())
    assert mentions(table, "h100-80gb", "79.2 GiB", "54.9 GB/s", "measured")
    assert mentions(table, "rtx-4090", "25.2 GB/s", "0.34")
    assert mentions(table, "gb300", "447.0 GiB", "datasheet")
    result = invoke("plan", "--list", "machines", "dgx-spark", env={"COLUMNS": "200"})
    assert mentions(result.stdout, "hbm_bandwidth", "273.0 GB/s", "datasheet of the DGX Spark")
    assert mentions(result.stdout, "host_bytes", "assumed: what is left")
    assert mentions(result.stdout, "nvme_bytes", "unknown")
    assert mentions(result.stdout, "USD a GPU-hour", "unknown")
    priced = invoke("plan", "--list", "machines", "b200-pcie6", env={"COLUMNS": "200"})
    assert mentions(priced.stdout, "USD a GPU-hour", "5.98", "assumed", "RunPod", "2026-03-10"), "that of its GPU"


def test_assumed_prices_are_of_machines_and_say_when_who_listed_them() -> None:
    prices = list_prices()
    assert set(prices) <= set(catalogue())
    assert len(prices) > len(catalogue()) / 2
    for price in prices.values():
        assert 0.1 < price.usd_per_gpu_hour < 10
        assert date(2025, 11, 1) < price.date < date(2026, 12, 1)
        assert price.source


def test_memory_that_cpu_and_gpu_share_cannot_be_set_beside_it() -> None:
    with pytest.raises(MachineError, match="share one memory"):
        override(load("dgx-spark"), "host_bytes=128GiB")
    assert override(load("gh200-96gb"), "host_bytes=128GiB").host_bytes == 128 << 30


def test_a_probed_machine_is_read_back_as_it_was(tmp_path: Path) -> None:
    machine = load("h100-80gb").model_copy(update={"name": "mine", "details": {"host": {"cores": 16}}})
    (tmp_path / "machine.json").write_text(machine.model_dump_json())
    assert load(tmp_path) == load(tmp_path / "machine.json") == machine


def test_an_unknown_machine_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match=r"a100-80gb, .*h200"):
        load("h300")
    with pytest.raises(MachineError, match=r"not a machine\.json"):
        load(tmp_path)


def test_a_description_from_before_sources_is_still_read(tmp_path: Path) -> None:
    old = Machine(name="old", source="measured", gpu_count=1, gpu_bytes=80 << 30, h2d_bandwidth=55e9)
    (tmp_path / "machine.json").write_text(old.model_dump_json(exclude={"sources"}))
    assert load(tmp_path) == old
    assert load(tmp_path).describe("h2d_bandwidth") == "55.0 GB/s (measured)"


@pytest.mark.parametrize(
    ("setting", "field", "value"),
    [
        ("h2d_bandwidth=200GB/s", "h2d_bandwidth", 200e9),
        (" h2d_bandwidth = 200 gb ", "h2d_bandwidth", 200e9),
        ("gpu_bytes=24GiB", "gpu_bytes", 24 << 30),
        ("host_bytes=1TB", "host_bytes", 1e12),
        ("matmul_flops=400TFLOP/s", "matmul_flops", 400e12),
        ("matmul_flops=1.5PFLOPS", "matmul_flops", 1.5e15),
        ("matmul_flops=4e14", "matmul_flops", 4e14),
    ],
)
def test_a_figure_can_be_replaced_and_says_so(setting: str, field: str, value: float) -> None:
    before = load("a100-80gb")
    after = override(before, setting)
    assert getattr(after, field) == value
    assert after.overridden == (field,)
    assert after.describe(field).split("(")[1].startswith("set by hand")
    assert after.model_copy(update={field: getattr(before, field), "sources": before.sources}) == before
    assert Machine.model_validate_json(after.model_dump_json()) == after


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("h2d=200GB/s", "one of gpu_bytes, .*matmul_flops"),
        ("name=x", "one of gpu_bytes"),
        ("gpu_count=2", "one of gpu_bytes"),
        ("", "one of gpu_bytes"),
        ("h2d_bandwidth", "write it as 200GB/s"),
        ("h2d_bandwidth=fast", "write it as 200GB/s"),
        ("h2d_bandwidth=-1GB/s", "write it as 200GB/s"),
        ("h2d_bandwidth=0", "write it as 200GB/s"),
        ("h2d_bandwidth=1e999", "write it as 200GB/s"),
        ("h2d_bandwidth=3TFLOP/s", "write it as 200GB/s"),
        ("gpu_bytes=80GB/s", "write it as 80GB or 24GiB"),
        ("matmul_flops=400GB/s", "write it as 400TFLOP/s"),
        ("matmul_flops=nan", "write it as 400TFLOP/s"),
    ],
)
def test_a_wrong_figure_is_refused_in_one_line(setting: str, says: str) -> None:
    with pytest.raises(MachineError, match=says) as error:
        override(load("h200"), setting)
    assert "\n" not in str(error.value)


def test_a_limit_is_another_machine_and_changes_the_plan(monkeypatch: Patch) -> None:
    whole = load("h100-80gb")
    small = whole.limited(24_000_000_000)
    assert (small.gpu_bytes, small.overridden, whole.overridden) == (24_000_000_000, ("gpu_bytes",), ())
    assert (limit_of(small.name), limit_of(whole.name)) == ("24GB", None)
    assert limit_of(whole.limited(24 << 30).name) == "25.769803776GB", "to the byte"
    for machine, size in ((whole, whole.gpu_bytes + 1), (Machine(name="x", source="measured"), 1)):
        with pytest.raises(MachineError, match="--gpu-memory"):
            machine.limited(size)

    monkeypatch.setattr("zinfer.system.local.this_machine", lambda: whole)
    sweep = ["sweep", "--model", "opt-30b", "--offload", "none", "--batch-size", "1", "--dry-run"]
    fits, short = (invoke(*sweep, *more).stdout for more in ([], ["--gpu-memory", "24GB"]))
    assert "24.0 GB" not in fits
    assert mentions(short, "h100-80gb-gpu-24-gb", "24.0 GB")
    asked = point(case(8), machine=small.name)
    for command in (*reproduce.commands(asked), offload_verdicts([asked])[0].text.strip("`")):
        assert "--gpu-memory 24GB" in command
    refused = invoke(*sweep, "--engine", "stream,llama-server", "--gpu-memory", "24GB")
    assert refused.exit_code == 2
    assert "does not reach llama-server" in refused.stderr


@pytest.mark.torch
def test_a_limit_leaves_what_a_process_has_not_taken(monkeypatch: Patch) -> None:
    from zinfer.engine import gpu_memory

    total, set_to, plan = 141 << 30, [1.0], make_plan(case(1), resolve("opt-30b"), load("h200"))
    cuda = {
        "mem_get_info": lambda: (total - (7 << 30), total), "memory_reserved": lambda: 5 << 30,
        "set_per_process_memory_fraction": set_to.append, "get_per_process_memory_fraction": lambda: set_to[-1],
    }  # fmt: skip
    for name, function in cuda.items():
        monkeypatch.setattr(f"torch.cuda.{name}", function)
    gpu_memory.limit(plan)
    assert gpu_memory.free_and_total() == (total - (7 << 30), total)
    gpu_memory.limit(plan.model_copy(update={"machine": plan.machine.limited(24 << 30)}))
    free, allowed = gpu_memory.free_and_total()
    assert allowed == pytest.approx((24 << 30) - plan.gpu.overhead, abs=9)
    assert free == allowed - (5 << 30)
