"""Command `zinfer doctor`: names what is missing and the remedy; its exit code tells whether any engine can run."""

import re
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests import Patch, invoke, mentions
from zinfer.commands import doctor
from zinfer.core.engine import ENGINES, EngineKind
from zinfer.engine import EngineError
from zinfer.system import host


def machine() -> dict[str, doctor.Finding]:
    return {row.name: row for row in doctor.machine_rows()}


def refuse(name: str) -> EngineKind:
    raise EngineError(f"engine {name} needs torch: pip install 'zinfer[engines]'")


@pytest.mark.torch
def test_one_engine_is_enough(monkeypatch: Patch) -> None:
    monkeypatch.setattr("zinfer.engine.kind", lambda name: ENGINES[name] if name == "stream" else refuse(name))
    assert invoke("doctor").exit_code == 0
    rows = {row.name: row for row in (*doctor.package_rows(), *doctor.machine_rows(), *doctor.engine_rows())}
    assert mentions(rows["stream"].finding, "can run", "cpu, none")
    assert rows["deepspeed"].finding == "cannot run"
    assert "pip install" in rows["deepspeed"].advice
    assert set(ENGINES) | set(doctor.PACKAGES) | {"python", "GPU", "host memory", "free disk"} <= set(rows)


def test_no_engine_is_an_error_of_the_environment(monkeypatch: Patch) -> None:
    monkeypatch.setattr("zinfer.engine.kind", refuse)
    result = invoke("doctor")
    assert result.exit_code == 5
    assert "cannot run" in result.stdout


@pytest.mark.torch
def test_an_engine_that_fails_to_import_is_reported(monkeypatch: Patch) -> None:
    broken = ImportError("libcudart.so.13: cannot open\nshared object file")
    monkeypatch.setattr("zinfer.engine.base.load", Mock(side_effect=broken))
    assert all("libcudart.so.13: cannot open shared" in row.advice for row in doctor.engine_rows())


def test_missing_packages_name_their_extra(monkeypatch: Patch) -> None:
    monkeypatch.setattr(host, "package_version", lambda package: "")
    advice = {row.name: row.advice for row in doctor.package_rows()}
    assert advice["deepspeed"] == "pip install 'zinfer[engines]'"
    assert advice["click"] == "pip install zinfer"
    monkeypatch.setattr("zinfer.engine.kind", refuse)
    assert "zinfer[tensorrt-rtx]" in "".join(invoke("doctor").stdout.split())


def test_libaio_and_compilers_are_looked_for(monkeypatch: Patch, tmp_path: Path) -> None:
    monkeypatch.setattr("ctypes.util.find_library", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: None)
    rows = machine()
    assert mentions(rows["libaio"].finding, "no libaio", "no C++ compiler")
    assert mentions(rows["libaio"].advice, "libaio-dev", "deepspeed", "nvme")
    assert rows["C compiler"].finding == "none"
    assert "install gcc" in rows["C compiler"].advice
    monkeypatch.setattr("ctypes.util.find_library", lambda name: f"lib{name}.so.1")
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    (tmp_path / "libaio.h").touch()
    monkeypatch.setenv("CPATH", str(tmp_path))
    found = machine()["libaio"]
    assert mentions(found.finding, "libaio.so.1", "libaio.h", "/usr/bin/c++")
    assert found.advice == ""


def test_machine_rows(monkeypatch: Patch) -> None:
    monkeypatch.setattr(host, "gpus", lambda: [{"name": "NVIDIA H200", "driver": "580"}] * 2)
    monkeypatch.setattr(host, "memory_limit", lambda: 2 << 30)
    monkeypatch.setattr("shutil.which", lambda name: {"gcc": "/usr/bin/gcc"}.get(name))
    rows = {row.name: row.finding for row in doctor.machine_rows()}
    assert mentions(rows["GPU"], "2 x NVIDIA H200", "580")
    assert re.search(r"2\.0 GiB, .*control group.* \d+\.\d GiB", rows["host memory"])
    assert rows["C compiler"].endswith("/gcc")
    monkeypatch.setattr(host, "gpus", list)
    rows = {row.name: row.finding for row in doctor.machine_rows()}
    assert rows["GPU"].startswith("none")
    assert not any("CUDA" in finding or "GPU" in finding for finding in rows.values())
