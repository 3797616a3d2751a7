"""Measurement loop, with an engine whose steps take a known time."""

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests import Patch
from tests.inline import MACHINE, SPEC
from tests.running import StepEngine
from zinfer.core.case import Case, Workload
from zinfer.engine.base import MicroBatch, Work
from zinfer.engine.kv_snapshot import RowsPast
from zinfer.generation.scheduler import DecodeLoop
from zinfer.plan.planner import make_plan
from zinfer.record.measurement import Effective, Measurement, Span
from zinfer.worker import measure as clock
from zinfer.worker.measure import WARM_UP_STEPS, Samples, measure, prompts

WORKLOAD = Workload(batch_size=3, input_len=5, output_len=4)
CASE = Case(model="fake", engine="stream", offload="none", workload=WORKLOAD)


PREFILL_S, STEP_S = 0.020, 0.005


class Metronome(StepEngine):
    """Engine on a fake clock. Prefill takes 20 ms, the i-th call, if it is a decode step, 5 + i / 10."""

    def __init__(self) -> None:
        super().__init__(make_plan(CASE, SPEC, MACHINE))
        self.calls: list[str] = []
        self.seconds = 100.0
        self.raise_at = self.nan_at = 0
        self.warms = 0  # calls that are slower than later ones

    def perf_counter(self) -> float:
        return self.seconds

    @property
    def warming(self) -> bool:
        return len(self.calls) < self.warms

    def _logits(self, name: str, seconds: float, rows: int) -> torch.Tensor:
        self.calls.append(name)
        if len(self.calls) == self.raise_at:
            raise torch.OutOfMemoryError("out of memory")
        self.seconds += seconds + (len(self.calls) / 1e4 if name == "decode" else 0)
        return torch.full((rows, 64), float("nan") if len(self.calls) == self.nan_at else 0.0)

    def step(self, name: str, rows: int) -> torch.Tensor:
        return self._logits(name, PREFILL_S if name == "prefill" else STEP_S, rows)

    def admit(self, attention_mask: torch.Tensor, capacity: int, past: RowsPast | None = None) -> MicroBatch:
        assert (attention_mask.shape, capacity, self.batches) == ((3, 5), 9, [])
        return super().admit(attention_mask, capacity, past)

    def timeline(self, works: Sequence[Work]) -> tuple[Span, ...]:
        assert [work.token_ids.shape for work in works] == [(3, 1)]
        self._logits("timeline", STEP_S, 3)
        return (Span(lane="compute", layer=None, start_ms=0, end_ms=5),)

    def effective(self) -> Effective:
        return Effective(gpu_weight_bytes=0)


def run(engine: Metronome, repeats: int, samples: Samples | None = None, **how: Any) -> Samples:
    """Measure; return the samples, which are added to those given."""
    samples = samples or Samples()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(clock, "time", engine)
            measure(engine, WORKLOAD, 64, samples, repeats=repeats, **how)
    finally:
        assert engine.batches == []
    return samples


@pytest.mark.parametrize(("warms", "steps"), [(3, 2), (4, 3), (9, 3)])
def test_warm_up_lasts_while_steps_are_slower_but_no_longer_than_a_run(warms: int, steps: int) -> None:
    engine = Metronome()
    engine.warms = warms
    run(engine, 1)
    assert engine.calls == ["prefill", *(["decode"] * steps), "prefill", *(["decode"] * 3), "timeline"]


def test_warm_up_is_not_timed_and_every_step_is() -> None:
    """The clock stands still between a step and the next: progress is reported there, which may wait for a pipe."""
    engine = Metronome()

    def on_progress(_stage: str, _share: float) -> None:
        engine.seconds += 7

    samples = run(engine, 2, on_progress=on_progress)
    assert engine.calls == ["prefill", *["decode"] * WARM_UP_STEPS] + ["prefill", *["decode"] * 3] * 2 + ["timeline"]
    assert len(samples.timeline) == 1
    assert samples.ttft_ms == pytest.approx([20, 20])
    assert samples.step_ms == [pytest.approx((5.5, 5.6, 5.7)), pytest.approx((5.9, 6.0, 6.1))]


class Lagging(Metronome):
    """A device that works behind the CPU: the clock moves where somebody waits for it, in `synchronize`."""

    def __init__(self) -> None:
        super().__init__()
        self.asked_s = 0.0  # seconds of work that nobody has waited for

    def _logits(self, name: str, seconds: float, rows: int) -> torch.Tensor:
        before = self.seconds
        logits = super()._logits(name, seconds, rows)
        self.asked_s, self.seconds = self.asked_s + self.seconds - before, before
        return logits

    def retire(self, batch: MicroBatch, rows: Sequence[int] | None = None) -> None:
        super().retire(batch, rows)
        self.asked_s += 0.001  # of copies that go on when a batch has ended

    def synchronize(self, device: torch.device) -> None:
        assert device == self.device
        self.seconds, self.asked_s = self.seconds + self.asked_s, 0.0


def test_work_counts_where_it_was_asked_for(monkeypatch: Patch) -> None:
    """TTFT ends when the first token exists, not when it is requested. So is each step's."""
    engine = Lagging()
    monkeypatch.setattr(clock, "synchronize", engine.synchronize)
    samples = run(engine, 2)
    assert samples.ttft_ms == pytest.approx([20, 20])
    assert samples.step_ms == [pytest.approx((5.5, 5.6, 5.7)), pytest.approx((5.9, 6.0, 6.1))]
    loop = DecodeLoop(engine, lambda logits: logits.argmax(-1))
    engine._logits("decode", STEP_S, 3)  # of somebody before
    prompt = prompts(WORKLOAD, 64)
    monkeypatch.setattr(engine, "admit", partial(StepEngine.admit, engine))
    monkeypatch.setattr(clock, "time", engine)
    assert clock.first_token_ms(loop, prompt) == pytest.approx(20)
    loop.end()


def test_a_gpu_is_waited_for_on_the_stream_that_computes(monkeypatch: Patch) -> None:
    waits: list[torch.device] = []
    stream = SimpleNamespace(synchronize=lambda: waits.append(torch.device("cuda", 1)))
    monkeypatch.setattr(torch.cuda, "current_stream", {torch.device("cuda", 1): stream}.__getitem__)
    clock.synchronize(torch.device("cpu"))
    assert waits == []
    clock.synchronize(torch.device("cuda", 1))
    assert waits == [torch.device("cuda", 1)]


@pytest.mark.parametrize("nan_at", [4, 5, 7])
def test_output_that_is_no_number_ends_it(nan_at: int) -> None:
    """NaN in the prefill, a step, or the first run's last step."""
    engine = Metronome()
    engine.nan_at = nan_at
    samples = run(engine, 2)
    assert (samples.status, samples.ttft_ms, samples.step_ms, len(engine.calls)) == ("nan_output", [], [], 7)


def test_zero_repeats_only_try_the_batch() -> None:
    engine = Metronome()
    samples = run(engine, 0)
    assert (samples.status, samples.ttft_ms, samples.timeline) == ("ok", [], ())
    assert engine.calls == ["prefill", "decode", "decode"]


@pytest.mark.parametrize(("raise_at", "stage", "kept"), [(1, "warm-up", 0), (4, "prefill", 0), (9, "decode", 1)])
def test_samples_before_an_error_stay(raise_at: int, stage: str, kept: int) -> None:
    engine, samples = Metronome(), Samples()
    engine.raise_at = raise_at
    with pytest.raises(torch.OutOfMemoryError):
        run(engine, 3, samples)
    assert samples.stage == stage
    assert len(samples.ttft_ms) == len(samples.step_ms) == kept


def test_repeats_stop_when_enough() -> None:
    engine = Metronome()
    samples = run(engine, 9, enough=lambda e2e: len(e2e) >= 2)
    assert len(samples.ttft_ms) == 2
    assert engine.calls.count("timeline") == len(samples.timeline) == 1


def test_a_wrong_timeline_is_not_kept(monkeypatch: Patch) -> None:
    engine = Metronome()
    for nonsense in (None, [("copy", 0, 0.0, float("nan"))], [("copy", 0, 2.0, 1.0)], [("head", 0, 0.0, 1.0)]):
        monkeypatch.setattr(engine, "timeline", lambda _tokens, nonsense=nonsense: nonsense)
        samples = run(engine, 1)
        assert (samples.status, samples.timeline) == ("ok", ())
    engine.calls.clear()
    assert StepEngine.timeline(engine, []) == ()
    assert engine.calls == [], "an engine that cannot tell makes no step"


def test_prompts_are_the_same_for_everyone_and_within_the_vocabulary() -> None:
    first, second = prompts(WORKLOAD, 64), prompts(WORKLOAD, 64)
    assert torch.equal(first, second)
    assert first.shape == (3, 5)
    assert 8 <= int(first.min()) <= int(first.max()) < 64


def test_rates_are_derived_from_the_samples() -> None:
    """4-bit weights cross the link as 16 bits: its share counts what crosses it."""
    steps, bandwidth = ((10.0, 10.0, 40.0), (10.0, 10.0, 10.0)), 2e9
    for weights, share in (
        ({"streamed_bytes_per_step": 10**7}, 0.5),
        ({"streamed_bytes_per_step": 10**7, "wire_bytes_per_step": 3 * 10**6}, 0.15),
    ):
        point = Measurement(
            case=CASE, status="ok", machine="m", ttft_ms=(100.0, 300.0), step_ms=steps, link_bandwidth=bandwidth,
            effective=Effective.model_validate({"gpu_weight_bytes": 0} | weights),
        )  # fmt: skip
        assert point.h2d_bandwidth == pytest.approx(share * bandwidth)
        assert point.link_share == pytest.approx(share)
        assert point.e2e_ms == (160.0, 330.0)
        assert point.output_tok_s_samples == (12 / 0.160, 12 / 0.330)
        assert point.tpot_ms == pytest.approx(15.0)
        assert point.decode_tok_s == pytest.approx(3 / 0.015)
        assert point.prefill_tok_s == pytest.approx(15 / 0.2)
