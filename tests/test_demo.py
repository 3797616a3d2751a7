"""Command `zinfer demo`: all steps in one, and a last screen that explains itself."""

from pathlib import Path

import pytest

from tests import invoke
from tests.inline import FakeWorker
from tests.results import sweep
from zinfer.commands.demo import explanation
from zinfer.core.machine import Machine
from zinfer.record.measurement import Measurement
from zinfer.system.host import slug

CPU = Machine(name=slug(), source="measured", host_bytes=20 << 30, h2d_bandwidth=8e9, hbm_bandwidth=16e9)
GPU = CPU.model_copy(update={"gpu_count": 1, "gpu_name": "NVIDIA H200", "gpu_bytes": 150 << 30})


def trained(point: Measurement) -> Measurement:
    return point.model_copy(update={"case": point.case.model_copy(update={"load_format": "safetensors"})})


def test_the_last_screen_says_what_was_measured_what_it_means_and_what_to_do() -> None:
    text = explanation(sweep(), CPU)
    places = [text.index(head) for head in ("WHAT WAS MEASURED", "WHAT THE ANSWER MEANS", "WHAT TO DO NEXT")]
    assert places == sorted(places)
    for fact in ("no GPU is here", "stream", "deepspeed", "3 runs", "TTFT", "TPOT", "random"):
        assert fact in text
    commands = [line.split()[1] for line in text.splitlines() if line.startswith("  zinfer ")]
    assert commands == ["plan", "run", "sweep"]
    assert max(map(len, text.splitlines())) <= 100


def test_what_does_not_hold_is_not_said() -> None:
    text = explanation([trained(record) for record in sweep()], GPU)
    assert "NVIDIA H200" in text
    for word in ("random", "no GPU", "cannot pay", "busy"):
        assert word not in text


@pytest.mark.long
def test_the_demo_measures_draws_decides_and_explains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "sweeps" / "results" / slug()
    folder.mkdir(parents=True)
    (folder / "machine.json").write_text(CPU.model_dump_json())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("zinfer.worker.process.Worker", FakeWorker(edge=99))
    done = invoke("demo")
    assert done.exit_code == 0, done.output
    assert all(f"{step} of 3" in done.stderr for step in (1, 2, 3))
    assert "[18/18]" in done.stderr
    assert ".svg" in done.stdout
    assert done.stdout.index("Best of ") < done.stdout.index("WHAT TO DO NEXT")
    again = invoke("demo")
    assert again.exit_code == 0
    assert again.stderr.count("[recorded]") == 18
