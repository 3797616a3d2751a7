"""Plan files and `zinfer pack --engine tensorrt`: whole or not at all, and never a wrong plan."""

import os
import re
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests import Checkpoints, Patch, invoke
from tests.command import small_files, started, zinfer
from zinfer.checkpoint.resolve import resolve
from zinfer.core.model import ModelSpec
from zinfer.engine import EngineError
from zinfer.engine.tensorrt import planfile
from zinfer.engine.tensorrt.build import COPIES, build, plan_key
from zinfer.engine.tensorrt.library import Library, find_library
from zinfer.engine.tensorrt.planfile import PLANS, PlanFile, PlanKey
from zinfer.system import atomic

BUILD = ("pack", "--engine", "tensorrt", "--max-batch-size", "2", "--max-seq-len", "16")


@pytest.fixture(scope="module")
def library() -> Library:
    return find_library()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: Patch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def spec(checkpoint: Checkpoints) -> ModelSpec:
    return resolve(str(checkpoint("bloom")), "bfloat16", None)


@pytest.fixture
def key(library: Library, spec: ModelSpec) -> PlanKey:
    return plan_key(library, str(spec.directory), spec, "safetensors", None, 4, 32)


def fake(key: PlanKey, path: Path | None = None, content: bytes = b"plan" * 1000) -> PlanFile:
    """Write a finished plan file whose content no library has made."""
    path = path or PLANS / f"{key.stem}.plan"
    with atomic.writing(path) as stream:
        stream.write(content)
    return planfile.finish(path, key, prefill_rows=4, weight_bytes=4000)


def test_a_plan_is_found_again_by_its_key(folder: Path, key: PlanKey) -> None:
    file = fake(key)
    assert planfile.find(key) == file
    assert planfile.find(key.model_copy(update={"max_batch_size": 1, "max_seq_len": 8})) == file
    larger = fake(key.model_copy(update={"max_batch_size": 64}))
    assert planfile.find(key) == larger
    assert planfile.find(key, str(file.path)) == file
    assert file.path.name.startswith(f"{Path(key.model).name}-bfloat16-b4-s32-")


def test_every_part_of_the_key_is_in_the_name(key: PlanKey) -> None:
    others = {
        "model": "x", "revision": "x", "dtype": "float16", "load_format": "dummy", "layers": 2, "max_batch_size": 5,
        "max_seq_len": 33, "network": 99, "library": "tensorrt", "version": "0", "target": "9.0",
    }  # fmt: skip
    assert set(others) == set(PlanKey.model_fields)
    stems = {key.model_copy(update={field: value}).stem for field, value in others.items()}
    assert len(stems | {key.stem}) == len(others) + 1


STALE = {
    "version": "0.1", "network": 0, "target": "9.0", "revision": "other", "dtype": "float16", "layers": 2,
    "max_batch_size": 2, "max_seq_len": 16,
}  # fmt: skip


@pytest.mark.parametrize("field", STALE)
@pytest.mark.parametrize("explicit", [False, True])
def test_a_foreign_or_stale_plan_is_refused_with_the_reason(
    folder: Path, key: PlanKey, field: str, explicit: bool
) -> None:
    file = fake(key.model_copy(update={field: STALE[field]}))
    wanted = f"{'less than' if field.startswith('max') else 'not'} {getattr(key, field)}"
    with pytest.raises(EngineError, match=re.escape(f"its {field} is {STALE[field]}, {wanted}")) as error:
        planfile.find(key, str(file.path) if explicit else "auto")
    assert "Build one: zinfer pack --engine tensorrt --model " in str(error.value)
    assert "--max-batch-size 4 --max-seq-len 32" in str(error.value)
    assert "--layers 2 --max-batch-size 4" in planfile.build_command(key.model_copy(update={"layers": 2}))


def _piped(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("suffix", "spoil", "words"),
    [
        (".plan", lambda path: os.truncate(path, path.stat().st_size - 1), "is cut off"),
        (".plan", lambda path: path.write_bytes(b"Q" + path.read_bytes()[1:]), "not the plan that its JSON file"),
        (".json", Path.unlink, "is missing"),
        (".json", lambda path: path.write_text("{"), "does not describe a plan"),
        (".json", lambda path: path.write_text('{"size": 3}'), "does not describe a plan"),
        (".json", _piped, "does not describe a plan"),
    ],
)
def test_a_spoilt_plan_is_refused(
    folder: Path, key: PlanKey, suffix: str, spoil: Callable[[Path], None], words: str
) -> None:
    file = fake(key)
    spoil(file.path.with_suffix(suffix))
    with pytest.raises(EngineError, match=words):
        planfile.find(key, str(file.path))
    with pytest.raises(EngineError, match="no TensorRT plan in"):
        planfile.find(key)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("during", ["loading weights", "building engine"])
def test_a_cancelled_build_leaves_nothing(library: Library, spec: ModelSpec, key: PlanKey, during: str) -> None:
    stages: list[str] = []
    with pytest.raises(CancelledError):
        build(library, key, spec, PLANS / "x.plan", lambda stage, _: stages.append(stage), lambda: during in stages)
    assert stages[-1] == during or during == "building engine"
    assert list(PLANS.iterdir()) == []


@pytest.mark.usefixtures("folder")
def test_a_build_that_cannot_succeed_is_refused_before_it_starts(
    library: Library, spec: ModelSpec, key: PlanKey, monkeypatch: Patch
) -> None:
    make = partial(build, library, key, path=PLANS / "x.plan")
    with pytest.raises(EngineError, match=r"of host memory; this machine has 1\.0 GB"):
        make(spec=spec, host_bytes=1_000_000_000)
    monkeypatch.setattr("shutil.disk_usage", lambda _path: SimpleNamespace(free=1))
    with pytest.raises(EngineError, match="with -o"):
        make(spec=spec)
    with pytest.raises(EngineError, match="--dtype bfloat16"):
        make(spec=resolve("bloom-7b1", "float32", None))


def test_a_disk_that_fills_up_leaves_nothing(folder: Path, spec: ModelSpec) -> None:
    with small_files(1 << 20):
        result = zinfer(folder, *BUILD, "-m", str(spec.directory), "--dtype", "fp32")
    assert result.returncode == 5, result.stderr
    assert "the build failed" in result.stderr
    assert "Traceback" not in result.stderr
    assert list((folder / PLANS).iterdir()) == []


def test_build_on_the_command_line(folder: Path, spec: ModelSpec) -> None:
    words: tuple[str, ...] = (*BUILD, "-m", str(spec.directory), "--dtype", "bf16")
    first = zinfer(folder, *words)
    assert first.returncode == 0, first.stderr
    path = Path(first.stdout.strip())
    assert (folder / path).stat().st_size > spec.weight_bytes
    again = invoke(*words)
    assert again.stdout == first.stdout
    assert "is there already" in again.stderr
    for settings in (("--load-format", "dummy"), ("--level", "3")):
        other = invoke(*words, "-o", path, *settings)
        assert other.exit_code == 2
        assert "--force replaces it" in other.stderr
    if not torch.cuda.is_available():
        words = ("--engine", "tensorrt", "--offload", "cpu", "--gpu-weights", "50%", "--dtype", "bf16")
        words += ("--input-len", "8", "--output-len", "4", "--batch-size", "1")
        sweep = zinfer(folder, "sweep", "-m", str(spec.directory), *words)
        assert sweep.returncode == 4
        assert sweep.stderr.count("engine tensorrt needs a GPU") == 1


def _peak(folder: Path, directory: Path) -> int:
    """Return the peak anonymous memory of a build. Pages of mapped files do not count."""
    process, peak = started(folder, *BUILD, "-m", str(directory), "--dtype", "bf16", stdout=None, stderr=None), 0
    while process.poll() is None:
        used = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
        peak = max(peak, int(used[1]) << 10 if used else 0)
        time.sleep(0.005)
    assert process.returncode == 0
    return peak


@pytest.mark.slow  # it builds twice
def test_a_build_takes_no_more_memory_than_it_says(folder: Path, checkpoint: Checkpoints, spec: ModelSpec) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"num_hidden_layers": 6, "hidden_size": 2048, "intermediate_size": 4096, "num_attention_heads": 16}
    config = AutoConfig.for_model("llama", **sizes, vocab_size=256)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder / "model", max_shard_size="100MB")
    large = resolve(str(folder / "model"), "bfloat16", None)
    shard = max(path.stat().st_size for path in (folder / "model").glob("*.safetensors"))
    base = _peak(folder, checkpoint("bloom")) - spec.weight_bytes
    assert _peak(folder, folder / "model") - base < COPIES * large.weight_bytes + shard
