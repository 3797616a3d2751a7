"""Command `zinfer study reuse`: measurement on a real engine, break-even, record and figure."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import invoke, mentions
from tests.command import zinfer
from tests.inline_worker import InlineWorker
from tests.results import kept_point as point
from tests.test_parity import load
from zinfer.analysis.study import break_even, measured, verdict
from zinfer.core.machine import Machine
from zinfer.record import study
from zinfer.record.study import Reload, Study
from zinfer.system.host import slug
from zinfer.worker.process import TaskFailed, WorkerDied
from zinfer.worker.tasks import Answer, Command, PrefixReuse

Checkpoints = Callable[..., Path]


@pytest.mark.parametrize(
    ("gains", "expected", "words"),
    [
        ((0.5, 2.0), 200, "wins from 200 tokens on"),
        ((0.25, 2.0), 252, "wins from 252 tokens on"),
        ((1.0, 2.0), 100, "wins from 100 tokens on"),
        ((2.0, 0.5, 0.5, 2.0), 566, "wins from 566 tokens on"),
        ((2.0, 3.0), 0, "always wins, from 100 tokens on"),
        ((0.5, 0.9), float("inf"), "never wins, up to 400 tokens"),
        ((2.0, 0.9), float("inf"), "does not win at 400 tokens"),
        ((), None, None),
    ],
)
def test_the_break_even(gains: tuple[float, ...], expected: float | None, words: str | None) -> None:
    contexts = (100, 200, 400, 800) if len(gains) > 2 else (100, 400)
    points = [point(context, 10 * gain, 10) for context, gain in zip(contexts, gains, strict=False)]
    points.append(Reload(context=9999, new_tokens=8, skipped="too long"))
    actual = break_even(points)
    assert actual == (None if expected is None else pytest.approx(expected, rel=2e-3))
    assert words is None or str(verdict(points)).endswith(words)


@pytest.mark.parametrize("name", ["stream", "accelerate"])
def test_each_way_gives_the_same_token(name: str, checkpoint: Checkpoints) -> None:
    engine = load(name, checkpoint("llama"), "cpu")
    beats: list[float] = []
    worker = InlineWorker.around(engine, on_progress=lambda _what, share: beats.append(share))
    request = PrefixReuse(context=40, new_tokens=8, repeats=2)
    answer = worker.ask(request)
    assert [len(samples) for samples in (answer.recompute_ms, answer.memory_ms)] == [2, 2]
    assert answer.kept_bytes == engine.plan.model.kv_bytes(1, 32)
    assert answer.same_token is True
    assert answer.max_difference is not None
    assert 0 <= answer.max_difference < 1e-3
    assert beats == sorted(beats)
    assert beats[-1] == 1


def test_an_engine_that_cannot_says_so(checkpoint: Checkpoints) -> None:
    engine = load("stream", checkpoint("llama"), "cpu", kv_offload="cpu")
    with pytest.raises(TaskFailed, match="kv_offload=cpu is not kept") as failed:
        InlineWorker.around(engine).ask(PrefixReuse(context=40, new_tokens=8, repeats=1))
    assert failed.value.status == "unsupported"


def test_measured_recorded_and_drawn(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["study", "reuse", "-m", "bloom-tiny", "--context", "16,64,256,4k", "--new-tokens", "8", "--repeats", "2"]
    result = zinfer(folder, *words, "--layers", "2")
    assert result.returncode == 0, result.stderr
    path = folder / "sweeps" / "results" / slug() / "reuse.jsonl"
    (recorded,) = study.read(path, "reuse").runs
    assert recorded.machine == slug()
    points = measured(recorded)
    assert [point.context for point in points] == [16, 64, 256]
    assert all(len(point.recompute_ms) == len(point.memory_ms) == 2 for point in points)
    assert recorded.of(Reload)[-1].skipped == "bloom-tiny has 2,048 positions"
    assert recorded.link is not None
    assert "torch" in recorded.versions
    assert points[-1].gain > 0  # type: ignore[operator]
    assert mentions(result.stdout, "4,096 tokens", "bloom-tiny", "2,048 positions")
    assert str(verdict(points)) in result.stdout
    assert "256 tokens measured" in result.stderr
    monkeypatch.chdir(folder)
    drawn = [invoke("plot", where, "-o", where[-1]) for where in ("sweeps/results", str(path))]
    for command, out in zip(drawn, ("s", "l"), strict=True):
        assert command.exit_code == 0, command.output
        lines = command.stdout.split()
        assert lines == [f"{out}/{slug()}/reuse-bloom-tiny-2-of-8-layers-stream-cpu.{form}" for form in ("png", "svg")]
    first, second = (Path(command.stdout.split()[1]).read_bytes() for command in drawn)
    assert first == second
    assert b"break-even" in first or verdict(points) is not None


class Inline(InlineWorker):
    """A worker in this process, which dies at `dies` tokens."""

    dies = 0

    def ask(self, request: Command[Answer]) -> Answer:
        if isinstance(request, PrefixReuse) and request.context == self.dies:
            raise WorkerDied("oom_host", "the kernel killed the worker")
        return super().ask(request)


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[Any, Study]]:
    """Run `zinfer study reuse` in this process; return its outcome and its record."""
    machine = Machine(name=slug(), source="measured", host_bytes=20 << 30, h2d_bandwidth=8e9, hbm_bandwidth=16e9)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("zinfer.system.local.this_machine", lambda: machine)
    monkeypatch.setattr("zinfer.worker.process.Worker", Inline)

    def measured(*words: str, dies: int = 0) -> tuple[Any, Study]:
        monkeypatch.setattr(Inline, "dies", dies)
        result = invoke("study", "reuse", "-m", "bloom-tiny", "--repeats", "1", "-o", "r.jsonl", *words)
        assert Path("r.jsonl").exists(), (result.output, result.exception)
        return result, study.last(Path("r.jsonl"), "reuse")

    return measured


def test_samples_before_a_crash_stay(inline: Callable[..., tuple[Any, Study]]) -> None:
    result, recorded = inline("--context", "16,32,64", "--new-tokens", "8", dies=32)
    assert result.exit_code == 3, result.output
    assert "2 of 3 context lengths failed" in result.stderr
    assert [reload.skipped for reload in recorded.of(Reload)] == [
        None,
        "oom_host: the kernel killed the worker",
        "32 tokens failed (oom_host)",
    ]
    result, recorded = inline("--context", "16,32", "--new-tokens", "8", "-O", "kv_offload=cpu")
    assert result.exit_code == 4
    assert "kv_offload=cpu is not kept" in result.stderr
    assert [reload.skipped for reload in recorded.of(Reload)] == [
        "unsupported: a KV cache with kv_offload=cpu is not kept",
        "16 tokens failed (unsupported)",
    ]
    assert len(study.read(Path("r.jsonl"), "reuse").runs) == 2


def test_a_run_without_a_measured_context_leaves_earlier_ones(inline: Callable[..., tuple[Any, Study]]) -> None:
    _, recorded = inline("--context", "16", "--new-tokens", "8")
    result, last = inline("--context", "4k,8k")
    assert (result.exit_code, last) == (4, recorded)
    assert "bloom-tiny has 2,048 positions" in result.stderr
