"""An engine without a model, which fails on demand: for tests of what stands around."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from tests.running import StepEngine
from zinfer.core.progress import Progress, silent
from zinfer.engine.base import Work
from zinfer.plan.planner import Plan
from zinfer.record.measurement import Effective, Span

VOCAB = 64  # as in tests.inline.SPEC
TARGET = "tests.fakes:FakeEngine"
ERRORS: dict[str, Callable[[], Exception]] = {
    "oom_gpu": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "oom_host": lambda: MemoryError("no host memory left"),
    "io_error": lambda: OSError(5, "Input/output error"),
    "error": lambda: RuntimeError("something\nbroke"),
}


class FakeEngine(StepEngine):
    """Engine with random logits. Option `fail` names an error, which occurs from batch `at_batch` on, in `stage`."""

    DEFAULTS: ClassVar[dict[str, object]] = {"fail": "", "at_batch": 1, "stage": "decode", "step_ms": 0.0}

    def __init__(self, plan: Plan, progress: Progress = silent) -> None:
        super().__init__(plan, progress)
        self._options = self.DEFAULTS | dict(plan.case.options)
        progress("loading weights", 0.5)
        self._accident("load", 1 << 30)

    def _accident(self, stage: str, batch_size: int) -> None:
        fail, reached = str(self._options["fail"]), batch_size >= int(str(self._options["at_batch"]))
        if fail in {"", "nan", "idle"} or stage != self._options["stage"] or not reached:
            return
        if fail in ERRORS:
            raise ERRORS[fail]()
        if fail == "exit":
            os._exit(7)
        if fail == "hang":
            time.sleep(600)
        os.kill(os.getpid(), getattr(signal, fail))

    def step(self, stage: str, batch_size: int) -> Tensor:
        time.sleep(float(str(self._options["step_ms"])) / 1e3)
        self._accident(stage, batch_size)
        logits = torch.rand(batch_size, VOCAB)
        if self._options["fail"] == "nan" and batch_size >= int(str(self._options["at_batch"])):
            logits[0, 0] = float("nan")
        return logits

    def timeline(self, works: Sequence[Work]) -> tuple[Span, ...]:
        self._accident("timeline", works[0].batch.batch_size)
        return (Span(lane="copy", layer=0, start_ms=-0.5, end_ms=1.23456),)

    def effective(self) -> Effective:
        idle = self.plan.case.offload == "none" or self._options["fail"] == "idle"
        return Effective(gpu_weight_bytes=1000, streamed_bytes_per_step=0 if idle else 1000)
