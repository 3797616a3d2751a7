"""First passes begin while later layers load: the same tokens and facts, and no damaged weight is ever believed."""

import shutil
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import Patch
from tests import test_parity as parity
from tests.checkpoints import save_config
from tests.command import zinfer
from tests.inline_batch import line
from tests.inline_worker import InlineWorker
from tests.serving import serving
from tests.test_finite import spoil
from tests.test_parity import BATCHES, greedy
from zinfer.checkpoint.headers import Checkpoint, CheckpointError
from zinfer.checkpoint.source import revision_of
from zinfer.core.request import Request, Sampling
from zinfer.engine import read
from zinfer.engine.stream.engine import Stream
from zinfer.engine.stream.weights import load, packed
from zinfer.job.serve import dispatcher
from zinfer.worker.process import LoadFailed
from zinfer.worker.tasks import BatchStart, BatchStep

CPU, STREAM = torch.device("cpu"), "zinfer.engine.stream.engine:Stream"
pytestmark = pytest.mark.usefixtures("all_coded")
LAYERS = 6
LAST = "model.layers.5.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("late")
    return save_config(folder, "llama", hidden_size=128, intermediate_size=192, num_key_value_heads=2)


plan_of = partial(parity.plan_of, dtype="bfloat16")


class Slow:
    """Disk that holds reads of a layer back until `gate` opens."""

    def __init__(self, folder: Path, monkeypatch: Patch, layer: int = LAYERS - 1) -> None:
        self.gate, self.held = threading.Event(), threading.Event()
        self._held = {
            (info.file, info.start)
            for name, info in Checkpoint.open(folder).tensors.items()
            if name.startswith(f"model.layers.{layer}.")
        }
        self._packed: tuple[Path, int] | None = None
        self._read = read._read
        monkeypatch.setattr(read, "_read", self)

    def hold_packed(self, folder: Path, layer: int) -> None:
        content = packed._read(folder)
        self._packed = folder / packed.DATA, content.layers[layer].start

    def __call__(self, file: Path, part: memoryview, offset: int) -> None:
        begins = self._packed is not None and file == self._packed[0] and offset >= self._packed[1]
        if begins or (file, offset) in self._held:
            self.held.set()
            assert self.gate.wait(60)
        self._read(file, part, offset)


def facts(loaded: Stream) -> tuple[Any, ...]:
    return loaded.effective(), loaded.loaded_bytes


CODED = {"weight_codec": "lossless"}
HOW = [CODED, {"weight_codec": "none"}, {"packed": "layers"}]
HOW += [CODED | {"gpu_weights": share} for share in ("50%", "auto")]
HOW += [CODED | {"kv_offload": "cpu", "kv_attention": device} for device in ("gpu", "cpu")]


@pytest.mark.parametrize("options", HOW)
def test_a_pass_begins_before_the_last_layer_is_loaded(
    options: dict[str, Any], checkpoint: Path, monkeypatch: Patch
) -> None:
    plan = plan_of(checkpoint, **options)
    if "packed" in options:
        packed.write(plan.model, revision_of(plan.model, "safetensors"), Path("layers"), CPU)
    whole = Stream(plan)
    expected, counted = [greedy(whole, lengths) for lengths in BATCHES], facts(whole)
    whole.close()
    slow = Slow(checkpoint, monkeypatch)
    if "packed" in options:
        slow.hold_packed(Path("layers"), LAYERS - 1)
    seen = list[tuple[str, float]]()
    early: Any = Stream.begin(plan, lambda stage, share: seen.append((stage, share)))
    late = early.late
    computed = list[bool]()

    def before_the_end(*_: object) -> None:
        computed.append(late.ended)
        slow.gate.set()

    handle = early._layers[0].register_forward_hook(before_the_end)
    assert slow.held.wait(60)
    assert not late.ended
    actual = [greedy(early, BATCHES[0])]
    handle.remove()
    assert computed[0] is False
    assert late.ended
    actual.append(greedy(early, BATCHES[1]))
    assert all(map(torch.equal, actual, expected))
    assert facts(early) == counted
    assert seen[-1][1] == 1
    early.close()


@pytest.mark.parametrize("way", ["counts", "closes"])
def test_what_counts_bytes_and_who_closes_wait_for_the_load(way: str, checkpoint: Path, monkeypatch: Patch) -> None:
    slow = Slow(checkpoint, monkeypatch, 3)
    early: Any = Stream.begin(plan_of(checkpoint))
    assert slow.held.wait(60)
    timer = threading.Timer(0.3, slow.gate.set)  # a read under way cannot be taken back
    timer.start()
    assert not early.late.ended
    if way == "counts":
        assert early.effective().host_weight_bytes > 0
        assert early.late.ended
    early.close()
    assert timer.finished.is_set(), "the thread was waited for"
    assert not any(thread.name == "zinfer-load" for thread in threading.enumerate())
    assert (early.late.fault is None) == (way == "counts")


def spoiled(checkpoint: Path, folder: Path) -> Path:
    """Copy a checkpoint whose last layer has a NaN."""
    shutil.copytree(checkpoint, folder)
    spoil(folder, float("nan"), LAST)
    return folder


REQUEST = Request(key=0, prompt_ids=[9, 8, 7], left=4, sampling=Sampling(temperature=0))


def test_a_fault_of_the_last_layer_is_raised_in_every_pass(
    checkpoint: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    folder = spoiled(checkpoint, tmp_path / "spoiled")
    with pytest.raises(CheckpointError, match=f"{LAST} holds NaN") as whole:
        Stream(plan_of(folder))
    slow = Slow(folder, monkeypatch)
    early: Any = Stream.begin(plan_of(folder))
    slow.gate.set()
    for _ in range(2):
        with pytest.raises(CheckpointError) as error:
            greedy(early, BATCHES[0])
        assert str(error.value) == str(whole.value)
        early.clear()
    with pytest.raises(CheckpointError):
        early.effective()
    early.close()


def test_a_worker_answers_early_and_gives_no_token_of_a_broken_checkpoint(
    checkpoint: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    for folder in (checkpoint, spoiled(checkpoint, tmp_path / "spoiled")):
        slow = Slow(folder, monkeypatch)
        loads = list[tuple[int, float]]()
        worker = InlineWorker(STREAM, on_loaded=lambda *what, loads=loads: loads.append(what))
        plan = plan_of(folder)
        worker.load(plan, early=True)
        assert worker.facts.load_s is None
        assert not loads
        started = worker.ask(BatchStart(load=plan.case.workload))
        assert started.loading
        assert worker.ask(BatchStep(answer_s=0)).loaded is None, "nothing is asked, and nothing waited for"
        slow.gate.set()
        step = BatchStep(requests=[REQUEST], answer_s=0)
        if folder == checkpoint:
            answer = worker.ask(step)
            assert answer.loaded is not None
            assert answer.loaded.load_s == worker.facts.load_s == loads[0][1] > 0
            assert loads[0][0] == answer.loaded.load_bytes == plan.model.weight_bytes
            assert len(answer.rows[0].tokens) == 1
            assert worker.ask(BatchStep(answer_s=0)).loaded is None, "it comes once"
        else:
            with pytest.raises(LoadFailed, match=f"{LAST} holds NaN") as failed:
                worker.ask(step)
            assert (failed.value.status, failed.value.exit_code) == ("io_error", CheckpointError.exit_code)
        worker.close()


def test_weights_that_change_meanwhile_are_refused(checkpoint: Path, monkeypatch: Patch) -> None:
    slow = Slow(checkpoint, monkeypatch)
    worker = InlineWorker(STREAM, revision="another")
    plan = plan_of(checkpoint)
    worker.load(plan, early=True)
    worker.ask(BatchStart(load=plan.case.workload))
    slow.gate.set()
    with pytest.raises(LoadFailed, match="does not hold the weights of the start any more"):
        worker.ask(BatchStep(requests=[REQUEST], answer_s=0))
    worker.close()


@pytest.mark.parametrize("verb", ["run", "batch"])
def test_a_command_ends_as_if_it_had_loaded_first(verb: str, checkpoint: Path, tmp_path: Path) -> None:
    folder = spoiled(checkpoint, tmp_path / "spoiled")
    how = ["--model", str(folder), "--engine", "stream", "--offload", "cpu", "--dtype", "bfloat16"]
    Path("in.jsonl").write_bytes(line("abc", 4))
    how += ["--prompt", "abc", "--output-len", "4"] if verb == "run" else ["in.jsonl", "-o", "out.jsonl"]
    done = zinfer(tmp_path, verb, *how)
    assert done.returncode == CheckpointError.exit_code, done.stderr
    assert f"{LAST} holds NaN or infinity (value 7)" in done.stderr
    assert "tok/s" not in done.stderr
    assert not done.stdout


def test_a_server_of_a_broken_checkpoint_ends_though_nobody_asks(
    checkpoint: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    folder = spoiled(checkpoint, tmp_path / "spoiled")
    slow = Slow(folder, monkeypatch)
    monkeypatch.setattr(dispatcher, "LOOK_S", 0.01)
    plan = plan_of(folder)
    with serving(plan, lambda: InlineWorker(STREAM), plan.case.workload) as server:
        assert server.dispatcher.state == "ready"
        slow.gate.set()
        server.wait(lambda: server.dispatcher.state == "ended")
    assert f"{LAST} holds NaN" in str(server.fault)
    assert server.dispatcher.exit_code == CheckpointError.exit_code


def test_a_load_without_room_ends_before_its_first_pass(checkpoint: Path, monkeypatch: Patch) -> None:
    slow = Slow(checkpoint, monkeypatch)
    early: Any = Stream.begin(plan_of(checkpoint))
    monkeypatch.setattr(load, "available_bytes", lambda: 0)
    ended = list[bool]()
    early._layers[0].register_forward_hook(lambda *_: ended.append(early.late.ended))
    timer = threading.Timer(0.3, slow.gate.set)
    timer.start()
    greedy(early, BATCHES[0])
    assert ended[0]
    early.close()
    timer.join()


def test_chunks_of_late_layers_that_are_larger_find_room(checkpoint: Path, monkeypatch: Patch) -> None:
    whole = Stream(plan_of(checkpoint))
    expected = greedy(whole, BATCHES[0])
    whole.close()
    slow = Slow(checkpoint, monkeypatch)
    early: Any = Stream.begin(plan_of(checkpoint))
    ring = early._ring
    with monkeypatch.context() as small:  # as if the first layers were all norms
        small.setattr(ring, "_chunk_bytes", lambda: iter([64]))
        ring.resize(ring.depth)
        assert {len(buffer) for buffer in ring._buffers} == {64}

        def go_on(*_: object) -> None:
            small.undo()
            slow.gate.set()

        early._layers[0].register_forward_hook(go_on)
        assert torch.equal(greedy(early, BATCHES[0]), expected)
    sizes = {len(buffer) for buffer in ring._buffers}
    assert sizes == {ring.buffer_bytes} == {max(chunk.size for layer in ring.layers for chunk in layer.chunks)}
    early.close()
