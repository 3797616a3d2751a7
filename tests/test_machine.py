"""The machine catalogue holds together, and what is no machine is refused in one line."""

import json
from pathlib import Path

import pytest

from zinfer import machine as machines
from zinfer.machine import Machine, MachineError, load


@pytest.mark.parametrize("name", machines.catalogue_names())
def test_catalogue_is_sound(name: str) -> None:
    machine = load(name)
    assert machine.name == name
    assert machine.note
    assert machine.gpu_count >= 1
    assert machine.gpu_name
    assert machine.device_bytes == machine.gpu_bytes > 20e9
    assert machine.hbm_bandwidth is not None
    assert machine.h2d_bandwidth is not None
    assert machine.matmul_flops is not None
    assert machine.hbm_bandwidth > 5 * machine.h2d_bandwidth
    assert 1e10 < machine.h2d_bandwidth < 5e11
    assert 1e14 < machine.matmul_flops < 3e15
    assert (machine.duplex_bandwidth or 0) <= machine.h2d_bandwidth
    assert (machine.pageable_bandwidth or 0) < machine.h2d_bandwidth
    assert machine.coherent == (machine.h2d_bandwidth > 1e11)


def test_generations_are_in_order() -> None:
    names = ("v100-32gb", "a100-40gb", "a100-80gb", "h100-80gb", "h200")
    bandwidths = [load(name).hbm_bandwidth or 0 for name in names]
    links = [load(name).h2d_bandwidth or 0 for name in (*names, "gh200-96gb")]
    assert bandwidths == sorted(bandwidths)
    assert links == sorted(links)


def test_without_a_gpu_the_host_is_the_device() -> None:
    assert Machine(name="x", source="measured", host_bytes=7).device_bytes == 7
    assert Machine(name="x", source="measured").device_bytes == 0


def test_a_probed_machine_is_read_back_as_it_was(tmp_path: Path) -> None:
    machine = load("h100-80gb").model_copy(update={"name": "mine", "details": {"host": {"cores": 16}}})
    (tmp_path / "machine.json").write_text(machine.model_dump_json())
    assert load(tmp_path) == load(tmp_path / "machine.json") == machine


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is not a machine description"),
        (json.dumps({"name": "x"}), "is not a machine description"),
        (json.dumps({"name": "x", "source": "measured", "speed": 1}), "is not a machine description"),
    ],
)
def test_what_is_no_machine_is_refused_in_one_line(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(text)
    with pytest.raises(MachineError, match=says) as error:
        load(path)
    assert "\n" not in str(error.value)
    assert "zinfer probe" in str(error.value)


def test_an_unknown_machine_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match=r"a100-80gb, .*h200"):
        load("h300")
    with pytest.raises(MachineError, match=r"not a machine\.json"):
        load(tmp_path)
