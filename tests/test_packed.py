"""Packed layers on disk: the same weights return, and damaged, foreign or unfinished files are never used."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from tests.command import zinfer
from tests.test_parity import BATCHES, greedy, load
from zinfer.cli import cli
from zinfer.engine import EngineError
from zinfer.engine.stream import codec, packed
from zinfer.spec.checkpoint import CheckpointError
from zinfer.spec.model import ModelSpec
from zinfer.spec.resolve import resolve
from zinfer.spec.source import revision_of

Checkpoints = Callable[..., Path]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(codec, "MIN_NUMEL", 0)


@pytest.fixture
def spec(checkpoint: Checkpoints) -> ModelSpec:
    return resolve(str(checkpoint("llama", hidden_size=256)), "bfloat16", None)


def write(spec: ModelSpec) -> Path:
    revision = revision_of(spec, "safetensors")
    folder = packed.PACKED / packed.folder_name(spec, revision)
    packed.write(spec, revision, folder, CPU)
    return folder


def tokens(directory: str, **options: Any) -> list[torch.Tensor]:
    loaded = load("stream", Path(directory), "cpu", Path(), "bfloat16", **options)
    try:
        return [greedy(loaded, lengths) for lengths in BATCHES]
    finally:
        loaded.close()


@pytest.mark.parametrize("architecture", ["llama", "bloom", "mixtral"])
def test_a_load_from_packed_layers_gives_the_same_tokens_and_codes_nothing(
    architecture: str, checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = resolve(str(checkpoint(architecture, hidden_size=256)), "bfloat16", None)
    folder = write(spec)
    assert (folder / packed.DATA).stat().st_size < 0.8 * spec.streamed_bytes
    expected = tokens(str(spec.directory))
    monkeypatch.setattr(codec, "encode", None)
    for own in (tokens(str(spec.directory), weight_codec="lossless"), tokens(
        str(spec.directory), weight_codec="lossless", packed=str(folder)
    )):  # fmt: skip
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(own, expected, strict=True))


def test_packing_is_the_same_every_time_and_leaves_nothing_else(spec: ModelSpec) -> None:
    folder = write(spec)
    first = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert set(first) == {packed.DATA, packed.INDEX}
    write(spec)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == first


@pytest.mark.parametrize("where", [0, 0.3, 0.6, 1.0])
def test_a_flipped_bit_is_found_wherever_it_is(spec: ModelSpec, where: float) -> None:
    data = write(spec) / packed.DATA
    content = bytearray(data.read_bytes())
    position = min(int(where * len(content)), len(content) - 1)
    told = json.loads((data.parent / packed.INDEX).read_text())
    ranges = [
        (image["start"] + begin, image["start"] + end) for image in told["images"] for begin, end, *_ in image["pieces"]
    ]
    position = next((p for p in range(position, -1, -1) if any(a <= p < b for a, b in ranges)), 0)
    content[position] ^= 1
    data.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"layer \d is damaged"):
        tokens(str(spec.directory), weight_codec="lossless")


def test_cut_off_or_unfinished_files_are_refused(spec: ModelSpec) -> None:
    folder = write(spec)
    size = (folder / packed.DATA).stat().st_size
    os.truncate(folder / packed.DATA, size - 1)
    with pytest.raises(CheckpointError, match="is cut off"):
        tokens(str(spec.directory), weight_codec="lossless")
    (folder / packed.INDEX).write_text("{}")
    with pytest.raises(EngineError, match="does not describe packed layers"):
        tokens(str(spec.directory), weight_codec="lossless")
    (folder / packed.INDEX).unlink()
    revision = revision_of(spec, "safetensors")
    assert packed.find(spec, revision, "auto") is None
    with pytest.raises(EngineError, match="make them with `zinfer pack"):
        packed.find(spec, revision, str(folder))


def test_packed_layers_of_other_weights_are_refused(spec: ModelSpec, checkpoint: Checkpoints) -> None:
    folder = write(spec)
    other = resolve(str(checkpoint("bloom", hidden_size=256)), "bfloat16", None)
    with pytest.raises(EngineError, match="is packed from other weights"):
        packed.find(other, revision_of(other, "safetensors"), str(folder))
    half = spec.with_dtype("float16")
    assert packed.find(half, revision_of(half, "safetensors"), "auto") is None
    with pytest.raises(EngineError, match="dtype bfloat16 instead of float16"):
        packed.find(half, revision_of(half, "safetensors"), str(folder))


def test_a_failure_leaves_nothing_behind(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packed, "pack", full)
    with pytest.raises(OSError, match="No space left"):
        write(spec)
    assert [path for path in packed.PACKED.rglob("*") if path.is_file()] == []


def test_the_command_packs_and_the_engine_finds_it(
    spec: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli, ["pack", "-m", str(spec.directory), "--dtype", "bf16"])
    assert done.exit_code == 0, done.stderr
    folder = tmp_path / done.stdout.strip()
    assert sorted(path.name for path in folder.iterdir()) == [packed.DATA, packed.INDEX]
    assert packed.find(spec, revision_of(spec, "safetensors"), "auto") is not None
    refused = zinfer(tmp_path, "pack", "-m", "bloom-176b", "--layers", "1")
    assert refused.returncode == 2
    assert len(refused.stderr.strip().splitlines()) <= 2
