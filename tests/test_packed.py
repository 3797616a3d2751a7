"""Packed layers on disk: the same weights return, and damaged, foreign or unfinished files are never used."""

import json
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tests import Checkpoints, Patch, invoke, quantized
from tests.checkpoints import save_checkpoint
from tests.command import zinfer_process
from tests.running import equal
from tests.test_parity import BATCHES, greedy, load
from zinfer.checkpoint.headers import Checkpoint, CheckpointError
from zinfer.checkpoint.resolve import from_directory, resolve
from zinfer.checkpoint.source import revision_of
from zinfer.core.model import ModelSpec
from zinfer.engine import EngineError
from zinfer.engine.stream.weights import codec, pack, packed

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("all_coded")


@pytest.fixture
def spec(checkpoint: Checkpoints) -> ModelSpec:
    return resolve(str(checkpoint("llama", hidden_size=256)), "bfloat16", None)


def write(spec: ModelSpec) -> Path:
    revision = revision_of(spec, "safetensors")
    folder = packed.PACKED / packed.folder_name(spec, revision)
    packed.write(spec, revision, folder, CPU)
    return folder


def find(spec: ModelSpec, where: object, *others: Any) -> Path | None:
    return packed.find(spec, revision_of(spec, "safetensors"), str(where), *others)


def tokens(directory: str, **options: Any) -> list[torch.Tensor]:
    loaded = load("stream", Path(directory), "cpu", Path(), "bfloat16", **options)
    if "packed" in options:
        assert loaded.loaded_bytes < 0.9 * loaded.plan.model.weight_bytes
    if "gpu_weights" in options:
        assert loaded.effective().settings["resident_layers"] == 1
        assert loaded.effective().host_weight_bytes < 0.8 * 2 / 3 * loaded.plan.model.streamed_bytes
    return [greedy(loaded, lengths, 5) for lengths in BATCHES]


@pytest.mark.parametrize(
    "architecture", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bloom", "mixtral"))]
)
def test_a_load_from_packed_layers_gives_the_same_tokens_and_codes_nothing(
    architecture: str, checkpoint: Checkpoints, monkeypatch: Patch
) -> None:
    spec = resolve(str(checkpoint(architecture, hidden_size=256)), "bfloat16", None)
    folder = write(spec)
    assert (folder / packed.DATA).stat().st_size < 0.8 * spec.streamed_bytes
    expected = tokens(str(spec.directory))
    monkeypatch.setattr(codec, "encode", None)
    for options in ({}, {"packed": str(folder)}, {"packed": str(folder), "gpu_weights": "34%"}):
        assert equal(tokens(str(spec.directory), weight_codec="lossless", **options), expected)


@pytest.mark.slow
def test_layers_that_stay_on_several_devices_come_from_packed_layers_too(spec: ModelSpec, monkeypatch: Patch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))  # of the other rank's process
    folder = str(write(spec))
    expected = tokens(str(spec.directory))
    options = {"packed": folder, "gpu_weights": "34%", "gpus": 2}
    assert equal(tokens(str(spec.directory), weight_codec="lossless", **options), expected)


@pytest.fixture
def fp8(tmp_path: Path) -> ModelSpec:
    """Return a model released in FP8, as `zinfer pack` takes it."""
    return resolve(str(quantized.fp8(save_checkpoint("llama", tmp_path / "fp8", hidden_size=256))), "bfloat16", None)


def test_weights_in_fp8_are_packed_in_fewer_bytes(fp8: ModelSpec, monkeypatch: Patch) -> None:
    monkeypatch.setattr(codec, "BLOCK", 1 << 12)  # divides every matrix
    expected = tokens(str(fp8.directory))
    done = invoke("pack", "-m", fp8.directory)
    assert done.exit_code == 0, done.output
    size = (Path(done.stdout.strip()) / packed.DATA).stat().st_size
    assert size < 0.88 * fp8.stored_ratio * fp8.streamed_bytes
    assert f"{size / (fp8.stored_ratio * fp8.streamed_bytes):.1%} of it" in done.stderr
    monkeypatch.setattr(codec, "encode", None)
    assert equal(tokens(str(fp8.directory), weight_codec="lossless"), expected)


def test_quantised_weights_that_do_not_shrink_are_not_packed(tmp_path: Path) -> None:
    made = quantized.columns(save_checkpoint("llama", tmp_path / "m"), "gptq")[0]
    done = invoke("pack", "-m", made)
    assert done.exit_code != 0
    assert "not in FP8" in str(done.exception)
    assert not packed.PACKED.exists()


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
    layers = json.loads((data.parent / packed.INDEX).read_text())["layers"]
    ranges = [range(*(each["start"] + end for end in chunk[:2])) for each in layers for chunk in each["chunks"]]
    position = next((p for p in range(position, -1, -1) if any(p in each for each in ranges)), 0)
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
    assert find(spec, "auto") is None
    with pytest.raises(EngineError, match="make them with `zinfer pack"):
        find(spec, folder)


def test_packed_layers_of_other_weights_are_refused(spec: ModelSpec, checkpoint: Checkpoints) -> None:
    folder = write(spec)
    with pytest.raises(EngineError, match="is packed from other weights"):
        find(resolve(str(checkpoint("bloom", hidden_size=256)), "bfloat16", None), folder)
    half = spec.with_dtype("float16")
    assert find(half, "auto") is None
    with pytest.raises(EngineError, match="dtype bfloat16 instead of float16"):
        find(half, folder)


def changed(folder: Path, change: Callable[[dict[str, Any]], object], sign: bool = True) -> None:
    """Change the index of `folder`; with `sign` as somebody does who also writes its checksum."""
    content = json.loads((folder / packed.INDEX).read_text())
    change(content)
    if sign:
        with suppress(ValueError):
            content = packed._Index.model_validate(content).signed().model_dump(mode="json")
    (folder / packed.INDEX).write_text(json.dumps(content))


def edit(name: str, value: Any) -> Callable[[dict[str, Any]], object]:
    return lambda content: content["layers"][1].update({name: value})


INDEX_DAMAGE: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "text": (edit("start", "0"), "layers.1.start"),
    "negative": (edit("end", -1), "layers.1.end"),
    "another field": (edit("more", 1), "layers.1.more"),
    "no chunks": (edit("chunks", []), "layers.1.chunks"),
    "files": (lambda content: content.update(files=[1]), "files"),
    "earlier format": (lambda content: content.update(format=packed.FORMAT - 1), f"of format {packed.FORMAT}"),
    "later format": (lambda content: content.update(format=packed.FORMAT + 1), f"of format {packed.FORMAT}"),
    "unsigned": (lambda content: content.update(allow_nan=True), "its own checksum differs"),
}


@pytest.mark.parametrize("damage", INDEX_DAMAGE)
def test_an_index_of_another_form_is_refused(damage: str, spec: ModelSpec) -> None:
    folder, (change, message) = write(spec), INDEX_DAMAGE[damage]
    changed(folder, change, sign=damage != "unsigned")
    with pytest.raises(EngineError, match=message) as error:
        find(spec, folder)
    assert "\n" not in str(error.value)


def test_a_checkpoint_that_changed_in_the_middle_of_a_tensor_is_noticed(spec: ModelSpec, tmp_path: Path) -> None:
    """Also where somebody set the time of its last change back."""
    copy = from_directory(Path(shutil.copytree(str(spec.directory), tmp_path / "copy"))).with_dtype("bfloat16")
    folder, revision = write(copy), revision_of(copy, "safetensors")
    opened = Checkpoint.open(tmp_path / "copy")
    info = max(opened.tensors.values(), key=lambda info: info.end - info.start)
    assert info.end - info.start > 3 * 4096
    before = info.file.stat()
    with info.file.open("r+b") as stream:
        stream.seek((info.start + info.end) // 2)
        stream.write(b"\0\0\0\0")
    os.utime(info.file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert revision_of(copy, "safetensors") == revision
    with pytest.raises(EngineError, match="has changed since"):
        find(copy, folder)


def test_a_copy_of_the_checkpoint_is_read_once_and_believed(
    spec: ModelSpec, tmp_path: Path, monkeypatch: Patch
) -> None:
    folder = write(spec)
    copy = from_directory(Path(shutil.copytree(str(spec.directory), tmp_path / "copy"))).with_dtype("bfloat16")
    read: list[float] = []
    for _ in range(2):
        assert find(copy, folder, False, lambda _, part: read.append(part)) == folder
    assert read == sorted(set(read)), "the second time nothing is read"
    assert read[-1] == 1.0


@pytest.mark.parametrize("name", [packed.DATA, packed.INDEX])
@pytest.mark.parametrize("target", ["fifo", "/dev/zero", "/proc/kmsg"])
def test_only_regular_files_are_read(name: str, target: str, spec: ModelSpec) -> None:
    folder = write(spec)
    (folder / name).unlink()
    if target == "fifo":
        os.mkfifo(folder / name)
    else:
        (folder / name).symlink_to(target)
    with pytest.raises(ValueError, match=f"{name}.*not a regular file"):
        tokens(str(spec.directory), weight_codec="lossless")


def test_a_failure_leaves_nothing_behind(spec: ModelSpec, monkeypatch: Patch) -> None:
    monkeypatch.setattr(pack, "pack", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        write(spec)
    assert [path for path in packed.PACKED.rglob("*") if path.is_file()] == []


@pytest.mark.slow
def test_the_command_packs_and_the_engine_finds_it(spec: ModelSpec, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    done = invoke("pack", "-m", spec.directory, "--dtype", "bf16")
    assert done.exit_code == 0, done.stderr
    folder = tmp_path / done.stdout.strip()
    assert sorted(path.name for path in folder.iterdir()) == [packed.DATA, packed.INDEX]
    assert find(spec, "auto") is not None
    refused = zinfer_process(tmp_path, "pack", "-m", "bloom-176b", "--layers", "1")
    assert refused.returncode == 5
    assert len(refused.stderr.strip().splitlines()) <= 2


@pytest.mark.parametrize(("dtype", "message"), [("bf16", "fewer than 1,048,576 weights"), ("fp16", "float16")])
def test_the_command_says_why_nothing_shrinks(dtype: str, message: str, spec: ModelSpec, monkeypatch: Patch) -> None:
    monkeypatch.setattr(codec, "MIN_NUMEL", 1 << 20)
    done = invoke("pack", "-m", spec.directory, "--dtype", dtype)
    assert re.search(r"100\.\d% of it: .*" + re.escape(message), done.stderr)
