"""The clock. One loop measures every engine: warm-up, prefill to the first token, decode steps, each synchronised.

Prompts are random tokens without padding, so that a batch of B prompts of S tokens costs exactly B · S positions. The
next token is chosen greedily; a step's time includes that choice, as a user's would. Prompts of a server go over HTTP,
a thread each.
"""

import http.client
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from zinfer.core.case import Workload
from zinfer.core.progress import Progress, silent
from zinfer.core.value import Closing
from zinfer.engine.base import Engine, Work
from zinfer.engine.kv_snapshot import RowsPast
from zinfer.engine.server.completions import Completion, body, complete, token_times
from zinfer.engine.server.engine import Server
from zinfer.generation.sampling import greedy
from zinfer.generation.scheduler import DecodeLoop
from zinfer.record.bounds import SHORTEST_MS
from zinfer.record.measurement import Span, Status, spans

WARM_UP_STEPS, MAX_WARM_UP_STEPS = 2, 6
SAMPLE_SECONDS = 0.25
MAX_SEED = 1_000_003  # more than any batch: seeds of two runs never meet
TIMEOUT_S = 3600.0  # between two tokens of a server
# Reasons of NVML for slower clocks, by name.
THROTTLING = {"SwPowerCap": 4, "HwSlowdown": 8, "SwThermalSlowdown": 32, "HwThermalSlowdown": 64, "HwPowerBrake": 128}

Enough = Callable[[Sequence[float]], bool]  # of the milliseconds of each whole run so far


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


def draw(lengths: Sequence[int], vocab_size: int, seed: int) -> list[list[int]]:
    """Return random token ids of these lengths. They are not the lowest, often special; equal seeds, equal tokens."""
    generator = torch.Generator().manual_seed(seed)
    low = min(8, vocab_size - 1)
    return [torch.randint(low, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def prompts(workload: Workload, vocab_size: int) -> Tensor:
    """Return random token ids ``[B, S]``, the same for every engine."""
    return torch.tensor(draw([workload.input_len] * workload.batch_size, vocab_size, workload.batch_size))


def synchronize(device: torch.device) -> None:
    """Wait for the device, as the reader of a token does. Copies on an engine's own stream go on meanwhile."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def first_token_ms(loop: DecodeLoop, token_ids: Tensor, past: RowsPast | None = None, reserve: int = 1) -> float:
    """Return the milliseconds to the first token, with the positions of `past`; a batch that was running is ended."""
    loop.end()
    synchronize(loop.engine.device)
    mask = torch.ones_like(token_ids)
    return _milliseconds(loop, lambda: loop.start(token_ids, mask, reserve=reserve, past=past))


def _milliseconds(loop: DecodeLoop, work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    synchronize(loop.engine.device)
    return (time.perf_counter() - start) * 1e3


def measure(
    engine: Engine,
    workload: Workload,
    vocab_size: int,
    samples: Samples,
    repeats: int,
    enough: Enough = lambda _e2e_ms: False,
    on_progress: Progress = silent,
) -> None:
    """Fill `samples` with up to `repeats` whole runs of `workload`. There are fewer once `enough` says so of their
    times (ms). With no repeats only the warm-up runs, which tells whether the batch fits. Samples stay whatever the
    engine raises. After the last run one more step is traced, outside of all samples. Logits that are not finite end it
    with status ``nan_output``."""
    token_ids = prompts(workload, vocab_size).to(engine.device)
    finite: list[Tensor] = []  # of all logits since a run began

    def sampler(logits: Tensor) -> Tensor:
        ids, numbers = greedy(logits)
        finite.append(numbers)
        return ids

    loop, output_len = DecodeLoop(engine, sampler), workload.output_len
    with Telemetry(engine, samples) as telemetry:
        try:
            on_progress("warm-up", 0.0)
            loop.start(token_ids, torch.ones_like(token_ids), reserve=max(output_len, WARM_UP_STEPS))
            for step in range(max(WARM_UP_STEPS, min(MAX_WARM_UP_STEPS, output_len - 1))):
                if step < WARM_UP_STEPS or engine.warming:  # the first ones also show the bytes that a step streams
                    loop.step()
            synchronize(engine.device)
            telemetry.start()
            for repeat in range(repeats):
                finite.clear()
                samples.stage, step_ms = "prefill", list[float]()
                on_progress("prefill", repeat / repeats)
                first_ms = first_token_ms(loop, token_ids, reserve=output_len)
                samples.stage = "decode"
                for step in range(1, output_len):
                    step_ms.append(_milliseconds(loop, loop.step))
                    on_progress("decode", (repeat + step / output_len) / repeats)
                if not bool(torch.stack(finite).all()):
                    samples.status = "nan_output"
                    return
                if enough(samples.add(first_ms, step_ms)):
                    break
            telemetry.close()
            with suppress(Exception):
                if repeats:  # a step that counts for nothing
                    samples.timeline = spans(engine.timeline([Work(loop.batch, loop.tokens[:, None])]))
        finally:
            telemetry.close()
            with suppress(Exception):
                loop.end()


def ask(
    server: Server, prompt: Sequence[int], output_len: int, ready: Callable[[], object] = lambda: None
) -> Completion:
    """Have a prompt continued by `output_len` tokens, once `ready` returns. Raises EngineError, ServerDied."""
    request = body(server.model, prompt, output_len, server.preset.body)
    ready()
    try:
        asked, events = complete(server.address, request, TIMEOUT_S)
        return Completion(asked, token_times(events, len(prompt), output_len))
    except (OSError, http.client.HTTPException) as error:
        raise server.broken(error) from error


def measure_server(
    server: Server,
    workload: Workload,
    vocab_size: int,
    samples: Samples,
    repeats: int,
    enough: Enough,
    on_progress: Progress,
) -> None:
    """Fill `samples` with up to `repeats` runs on a server; prompts differ. Raises EngineError for other lengths."""
    server.prepare(workload)
    batch_size = workload.batch_size
    with Telemetry(server, samples) as telemetry, ThreadPoolExecutor(batch_size) as pool:
        for repeat in range(repeats + 1):
            warm_up = repeat == 0
            samples.stage = "warm-up" if warm_up else "decode"
            on_progress(samples.stage, repeat / (repeats + 1))
            prompts = draw([workload.input_len] * batch_size, vocab_size, seed=repeat * MAX_SEED + batch_size)
            tokens = min(1 + WARM_UP_STEPS, workload.output_len) if warm_up else workload.output_len
            together = threading.Barrier(batch_size).wait
            jobs = [pool.submit(ask, server, prompt, tokens, together) for prompt in prompts]
            completions = [job.result() for job in jobs]
            if warm_up:
                telemetry.start()
                continue
            began = min(completion.asked for completion in completions)
            ends = [max(moments) for moments in zip(*(completion.tokens for completion in completions), strict=True)]
            first, *steps = [max(SHORTEST_MS, (end - last) * 1e3) for last, end in pairwise([began, *ends])]
            if enough(samples.add(first, steps)):
                break


class Telemetry(Closing):
    """Telemetry of an engine's GPUs, by NVML. At its end `samples` get means over the timed part as their `gpu`. Power
    and energy are those of all together, reasons for throttling those of any. There are none without NVML or a GPU."""

    def __init__(self, engine: Engine, samples: Any) -> None:
        self._samples, self._handles = samples, list[Any]()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._power, self._reasons = list[int](), 0
        if engine.device.type == "cuda":
            with suppress(Exception):
                import pynvml

                pynvml.nvmlInit()
                self._nvml = pynvml
                for number in range(engine.plan.placement.gpus):
                    uuid = f"GPU-{torch.cuda.get_device_properties(number).uuid}"
                    self._handles.append(pynvml.nvmlDeviceGetHandleByUUID(uuid))

    def start(self) -> None:
        """Begin to sample, and to count energy."""
        if self._handles:
            self._energy, self._started = self._read("TotalEnergyConsumption"), time.perf_counter()
            self._thread = threading.Thread(target=self._sample, daemon=True)
            self._thread.start()

    def _read(self, what: str) -> list[int]:
        try:
            return [getattr(self._nvml, f"nvmlDeviceGet{what}")(handle) for handle in self._handles]
        except self._nvml.NVMLError:
            return []

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            if power := self._read("PowerUsage"):
                self._power.append(sum(power))
            for reasons in self._read("CurrentClocksThrottleReasons"):
                self._reasons |= reasons

    def close(self) -> None:
        """End the timed part. Safe to call twice."""
        if self._thread is None or self._stop.is_set():
            return
        self._stop.set()
        self._thread.join()
        summary: dict[str, Any] = {"timed_s": round(time.perf_counter() - self._started, 3)}
        energy = self._read("TotalEnergyConsumption")
        if energy and self._energy:
            summary["energy_j"] = (sum(energy) - sum(self._energy)) / 1e3
        if self._power:
            summary["power_w_mean"] = round(mean(self._power) / 1e3, 1)
        summary["throttle_reasons"] = sorted(name for name, bit in THROTTLING.items() if self._reasons & bit)
        self._samples.gpu = summary
