"""The clock. One loop measures every engine: warm-up, prefill to the first token, decode steps, each synchronised.

Prompts are random tokens without padding, so that a batch of B prompts of S tokens costs exactly B · S positions. The
next token is chosen greedily; a step's time includes that choice, as a user's would.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from zinfer.core.case import Workload
from zinfer.core.progress import Progress, silent
from zinfer.engine.base import Engine, Work
from zinfer.engine.kv_snapshot import RowsPast
from zinfer.engine.server.engine import Server
from zinfer.generation.sampling import greedy
from zinfer.generation.scheduler import DecodeLoop
from zinfer.record.bounds import SHORTEST_MS
from zinfer.record.measurement import Span, Status, spans
from zinfer.worker.client import ask_at_once, draw

WARM_UP_STEPS, MAX_WARM_UP_STEPS = 2, 6
SAMPLE_SECONDS = 0.25
MAX_SEED = 1_000_003  # more than any batch: seeds of two runs never meet
THROTTLING = {  # reasons of NVML, by name
    "SwPowerCap": 4,
    "HwSlowdown": 8,
    "SwThermalSlowdown": 32,
    "HwThermalSlowdown": 64,
    "HwPowerBrake": 128,
}

Clock = Callable[[], float]  # seconds


@dataclass
class Samples:
    """Samples of a point. On an exception the samples taken so far stay, and `stage` says where it happened."""

    ttft_ms: list[float] = field(default_factory=list)
    step_ms: list[tuple[float, ...]] = field(default_factory=list)
    stage: str = "warm-up"
    status: Status = "ok"
    gpu: dict[str, Any] = field(default_factory=dict)
    timeline: tuple[Span, ...] = ()

    def add(self, first_ms: float, step_ms: Sequence[float]) -> list[float]:
        """Add a run; return the milliseconds of each whole run so far."""
        self.ttft_ms.append(first_ms)
        self.step_ms.append(tuple(step_ms))
        return [first + sum(rest) for first, rest in zip(self.ttft_ms, self.step_ms, strict=True)]


def synchronize(device: torch.device) -> None:
    """Wait for the device, as the reader of a token does. Copies on an engine's own stream go on meanwhile."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def prompts(workload: Workload, vocab_size: int) -> Tensor:
    """Return random token ids ``[B, S]``, the same for every engine; not the lowest, often special."""
    return torch.tensor(draw([workload.input_len] * workload.batch_size, vocab_size, workload.batch_size))


class Greedy:
    """Sampler that is timed: it chooses the most likely tokens."""

    def __init__(self) -> None:
        self._finite: list[Tensor] = []

    def __call__(self, logits: Tensor) -> Tensor:
        ids, finite = greedy(logits)
        self._finite.append(finite)
        return ids

    def finite(self) -> bool:
        """Return whether all logits since the last call were numbers."""
        seen, self._finite = self._finite, []
        return bool(torch.stack(seen).all())


def measure(
    engine: Engine,
    workload: Workload,
    vocab_size: int,
    samples: Samples,
    *,
    repeats: int = 3,
    enough: Callable[[Sequence[float]], bool] = lambda _e2e_ms: False,
    on_progress: Progress = silent,
    clock: Clock = time.perf_counter,
) -> None:
    """Fill `samples` with up to `repeats` whole runs of `workload`. There are fewer once `enough` says so of their
    times (ms). With no repeats only the warm-up runs, which tells whether the batch fits. Samples stay whatever the
    engine raises. After the last run one more step is traced, outside of all samples. Logits that are not finite end it
    with status ``nan_output``."""
    token_ids = prompts(workload, vocab_size).to(engine.device)
    mask = torch.ones_like(token_ids)
    sampler = Greedy()
    loop = DecodeLoop(engine, sampler)

    def tick(step: int) -> None:
        on_progress(samples.stage, step / (repeats * workload.output_len))

    with Telemetry(engine.device, engine.plan.placement.gpus) as telemetry:
        try:
            on_progress("warm-up", 0.0)
            loop.start(token_ids, mask, reserve=max(workload.output_len, WARM_UP_STEPS))
            for step in range(max(WARM_UP_STEPS, min(MAX_WARM_UP_STEPS, workload.output_len - 1))):
                if step < WARM_UP_STEPS or engine.warming:  # the first ones also show the bytes that a step streams
                    loop.step()
            synchronize(engine.device)
            sampler.finite()
            telemetry.start()
            for repeat in range(repeats):
                first_ms, step_ms = _run_once(loop, token_ids, workload, samples, tick, clock)
                if not sampler.finite():
                    samples.status = "nan_output"
                    return
                e2e_ms = samples.add(first_ms, step_ms)
                if repeat + 1 == repeats or enough(e2e_ms):
                    samples.gpu = telemetry.summary()
                    further = [Work(loop.batch, loop.tokens[:, None])]  # a step that counts for nothing
                    with suppress(Exception):
                        samples.timeline = spans(engine.timeline(further))
                    return
        finally:
            samples.gpu = samples.gpu or telemetry.summary()
            with suppress(Exception):
                loop.end()


def measure_server(
    server: Server,
    workload: Workload,
    vocab_size: int,
    samples: Samples,
    *,
    repeats: int = 3,
    enough: Callable[[Sequence[float]], bool] = lambda _e2e_ms: False,
    on_progress: Progress = silent,
) -> None:
    """Fill `samples` with up to `repeats` runs on a server; prompts differ. Raises EngineError for other lengths."""
    server.prepare(workload)
    lengths = [workload.input_len] * workload.batch_size
    with Telemetry(server.device, server.plan.placement.gpus) as telemetry:
        for repeat in range(repeats + 1):
            warm_up = repeat == 0
            samples.stage = "warm-up" if warm_up else "decode"
            on_progress(samples.stage, repeat / (repeats + 1))
            prompts = draw(lengths, vocab_size, seed=repeat * MAX_SEED + workload.batch_size)
            tokens = min(1 + WARM_UP_STEPS, workload.output_len) if warm_up else workload.output_len
            completions = ask_at_once(server, prompts, tokens)
            if warm_up:
                telemetry.start()
                continue
            began = min(completion.asked for completion in completions)
            ends = [max(moments) for moments in zip(*(completion.tokens for completion in completions), strict=True)]
            first, *steps = [max(SHORTEST_MS, (end - last) * 1e3) for last, end in pairwise([began, *ends])]
            if enough(samples.add(first, steps)):
                break
        samples.gpu = telemetry.summary()


def _run_once(
    loop: DecodeLoop, token_ids: Tensor, workload: Workload, samples: Samples, tick: Callable[[int], None], clock: Clock
) -> tuple[float, list[float]]:
    """Time one repeat: its prefill and its decode steps, in ms."""
    done, step_ms = len(samples.ttft_ms) * workload.output_len, list[float]()
    samples.stage = "prefill"
    tick(done)
    first_ms = first_token_ms(loop, token_ids, reserve=workload.output_len, clock=clock)
    samples.stage = "decode"
    for step in range(1, workload.output_len):
        last = clock()
        loop.step()
        synchronize(loop.engine.device)
        step_ms.append((clock() - last) * 1e3)
        tick(done + step)
    return first_ms, step_ms


def first_token_ms(
    loop: DecodeLoop,
    token_ids: Tensor,
    past: RowsPast | None = None,
    reserve: int = 1,
    clock: Clock = time.perf_counter,
) -> float:
    """Return the milliseconds to the first token, with the positions of `past`; a batch that was running is ended."""
    loop.end()
    synchronize(loop.engine.device)
    start = clock()
    loop.start(token_ids, torch.ones_like(token_ids), reserve=reserve, past=past)
    synchronize(loop.engine.device)
    return (clock() - start) * 1e3


class Telemetry:
    """Telemetry of the first `count` GPUs, by NVML. Clocks, temperature and reasons for throttling are those of any,
    power and energy of all together. Without NVML, or without a GPU, the summary is empty."""

    def __init__(self, device: torch.device, count: int = 1) -> None:
        self._handles: list[Any] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._power, self._clock, self._temperature = list[int](), list[int](), list[int]()
        self._reasons = 0
        if device.type == "cuda":
            with suppress(Exception):
                import pynvml

                pynvml.nvmlInit()
                self._nvml = pynvml
                for number in range(count):
                    uuid = f"GPU-{torch.cuda.get_device_properties(number).uuid}"
                    self._handles.append(pynvml.nvmlDeviceGetHandleByUUID(uuid))

    def __enter__(self) -> "Telemetry":
        return self

    def start(self) -> None:
        """Begin to sample, and to count energy."""
        if self._handles:
            self._energy, self._started = self._read("TotalEnergyConsumption"), time.perf_counter()
            self._thread = threading.Thread(target=self._sample, daemon=True)
            self._thread.start()

    def _read(self, what: str, *args: Any) -> list[int]:
        try:
            return [getattr(self._nvml, f"nvmlDeviceGet{what}")(handle, *args) for handle in self._handles]
        except self._nvml.NVMLError:
            return []

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            if power := self._read("PowerUsage"):
                self._power.append(sum(power))
            self._clock += self._read("ClockInfo", self._nvml.NVML_CLOCK_SM)
            self._temperature += self._read("Temperature", self._nvml.NVML_TEMPERATURE_GPU)
            for reasons in self._read("CurrentClocksThrottleReasons"):
                self._reasons |= reasons

    def __exit__(self, *_exception: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def summary(self) -> dict[str, Any]:
        """Return means and extremes over the timed part. Empty if nothing was sampled."""
        if self._thread is None:
            return {}
        self.__exit__()
        summary: dict[str, Any] = {"timed_s": round(time.perf_counter() - self._started, 3)}
        energy = self._read("TotalEnergyConsumption")
        if energy and self._energy:
            summary["energy_j"] = (sum(energy) - sum(self._energy)) / 1e3
        if self._power:
            summary["power_w_mean"] = round(mean(self._power) / 1e3, 1)
        if self._clock:
            summary |= {"sm_clock_mhz_min": min(self._clock), "sm_clock_mhz_max": max(self._clock)}
        if self._temperature:
            summary["temperature_c_max"] = max(self._temperature)
        summary["throttle_reasons"] = sorted(name for name, bit in THROTTLING.items() if self._reasons & bit)
        return summary
