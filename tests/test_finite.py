"""Refuse weights with NaN or infinity while reading, unless --allow-nan. The error has the tensor's name."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from tests import Checkpoints, Patch
from tests.command import probed
from tests.inline_worker import InlineWorker
from zinfer.checkpoint.headers import Checkpoint, CheckpointError
from zinfer.checkpoint.resolve import from_directory
from zinfer.cli import cli
from zinfer.core.case import Case, Workload
from zinfer.engine import read
from zinfer.engine.read import _NOT_FINITE, DTYPES, check_finite, first_not_finite, read_groups
from zinfer.engine.state import ModelState
from zinfer.engine.stream.weights import packed

CPU = torch.device("cpu")
WEIGHT = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize("name", _NOT_FINITE)
def test_every_bit_pattern_is_told_as_torch_tells_it(name: str, monkeypatch: Patch) -> None:
    monkeypatch.setattr(read, "BLOCK", 4096)
    dtype = DTYPES[name]
    size = _NOT_FINITE[name][0]
    if size <= 2:
        patterns = torch.arange(1 << 8 * size, dtype=torch.int64).to(torch.int16 if size == 2 else torch.uint8)
        values = patterns.view(dtype)
    else:
        bits = torch.randint(-(2**63), 2**63 - 1, (20_000,), generator=torch.Generator().manual_seed(1))
        special = [0, 1, 0x7FF << 52, 0xFFF << 52, (0x7FF << 52) - 1, (0x7FF << 52) + 1, 0x7F800000, 0x7F7FFFFF, -1]
        extra = torch.tensor([value - (1 << 64) if value >= 1 << 63 else value for value in special])
        values = torch.cat([bits, extra]).view(dtype)
        values = torch.view_as_real(values).flatten() if dtype.is_complex else values
    finite = torch.isfinite(values.to(torch.float64) if size < 8 else values)
    actual = [first_not_finite(part) is None for part in values.split(1)]
    assert actual == finite.tolist()
    assert first_not_finite(values[finite]) is None
    assert first_not_finite(values) == int((~finite).nonzero()[0])


@pytest.fixture
def folder(checkpoint: Checkpoints, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint("llama"), tmp_path / "llama"))


def spoil(folder: Path, value: float, name: str = WEIGHT, dtype: torch.dtype | None = None) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    file = folder / index["weight_map"][name]
    tensors = load_file(file)
    tensors[name] = tensors[name].clone().to(dtype or tensors[name].dtype)
    tensors[name].view(-1)[7] = value
    save_file(tensors, file, {"format": "pt"})


def weights(folder: Path, dtype: Any = None, **how: Any) -> dict[str, torch.Tensor]:
    spec = from_directory(folder)
    state = ModelState(spec if dtype is None else spec.with_dtype(dtype), "safetensors", **how)
    return {name: tensor.clone() for name, tensor in state.load(CPU)}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_is_no_number_is_refused(value: float, folder: Path) -> None:
    spoil(folder, value)
    with pytest.raises(CheckpointError, match=rf"{WEIGHT} holds NaN or infinity \(value 7\).*--allow-nan") as error:
        weights(folder)
    assert "\n" not in str(error.value)
    assert "safetensors" in str(error.value)
    assert not weights(folder, allow_nan=True)[WEIGHT].isfinite().all()


def test_all_bytes_are_checked(folder: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(read, "CHUNK", 64)
    spoil(folder, float("nan"))
    opened = Checkpoint.open(folder)
    seen: list[tuple[str, int]] = []  # several threads count: append loses nothing

    def count(name: str, _begin: int, part: memoryview) -> None:
        seen.append((name, len(part)))

    def check(*what: Any) -> None:
        check_finite(opened, *what)

    groups = [tuple(name for name in opened.tensors if name != WEIGHT), (WEIGHT,)]
    contents = read_groups(opened, groups, [count, check])
    with pytest.raises(CheckpointError, match="holds NaN or infinity"):
        list(contents)
    sizes = Counter[str]()
    for name, size in seen:
        sizes[name] += size
    assert {name: size for name, size in sizes.items() if name != WEIGHT} == {
        name: info.end - info.start for name, info in opened.tensors.items() if name != WEIGHT
    }


def test_a_number_too_large_for_the_type_is_refused(folder: Path) -> None:
    spoil(folder, 1e6)
    assert weights(folder)[WEIGHT].view(-1)[7] == 1e6
    with pytest.raises(CheckpointError, match=f"{WEIGHT} as float16 holds NaN or infinity .value 7"):
        weights(folder, "float16")
    assert weights(folder, "float16", allow_nan=True)[WEIGHT].view(-1)[7].isinf()


def test_pack_refuses_them_and_says_so_later(folder: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    spoil(folder, float("nan"))
    refused = CliRunner().invoke(cli, ["pack", "-m", str(folder), "-o", "out"])
    assert isinstance(refused.exception, CheckpointError)
    assert not list((tmp_path / "out").iterdir())
    done = CliRunner().invoke(cli, ["pack", "-m", str(folder), "-o", "out", "--allow-nan"])
    assert done.exit_code == 0, done.output
    spec = from_directory(folder)
    revision = Checkpoint.open(folder).revision
    with pytest.raises(ValueError, match="packed with --allow-nan"):
        packed.find(spec, revision, "out")
    assert packed.find(spec, revision, "out", allow_nan=True) == Path("out")


@pytest.mark.parametrize("engine", ["stream", "accelerate"])
def test_run_refuses_them_and_takes_them(engine: str, folder: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(folder.parent)
    probed(folder.parent)
    monkeypatch.setattr("zinfer.worker.process.Worker", InlineWorker)
    spoil(folder, float("inf"), "model.layers.2.input_layernorm.weight")
    words = ["run", "-m", str(folder), "-p", "a", "--offload", "cpu", "--engine", engine, "--output-len", "2"]
    refused = CliRunner().invoke(cli, words)
    assert refused.exit_code == 2, refused.output
    assert "model.layers.2.input_layernorm.weight holds NaN or infinity" in refused.output
    taken = CliRunner().invoke(cli, [*words, "--allow-nan"])
    assert "holds NaN" not in taken.output


def test_the_record_says_it() -> None:
    case = Case(model="m", engine="stream", offload="cpu", workload=Workload(batch_size=1, input_len=1, output_len=1))
    assert "allow_nan" not in case.model_dump()
    assert "allow_nan" not in case.model_dump_json()
    allowed = case.model_copy(update={"allow_nan": True})
    assert json.loads(allowed.model_dump_json())["allow_nan"] is True
    assert Case.model_validate_json(allowed.model_dump_json()) == allowed
    assert Case.model_validate_json(case.model_dump_json()) == case
    assert "allow-nan" in allowed.label()
    assert hash(allowed) != hash(case) or allowed != case
