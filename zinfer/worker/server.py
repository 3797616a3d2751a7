"""The worker's end of the pipe: JSON lines in, one answer each, progress in between."""

import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from zinfer.plan.plan import Plan
from zinfer.record.measurement import Effective, Measurement, Status
from zinfer.spec.case import Case, resident_bytes
from zinfer.spec.errors import one_line
from zinfer.worker.failure import status_of, told
from zinfer.worker.process import now, versions
from zinfer.worker.tasks import Services

BEAT_SECONDS = 0.2  # between two messages of progress


class Server:
    """The worker's end."""

    def __init__(self, answers: IO[str]) -> None:
        self._answers = answers
        self._lock = threading.Lock()
        self._last_beat = 0.0
        self._engine: Any = None
        self._plan: Any = None  # of what is loaded
        self._facts: dict[str, Any] = {}
        self._services = Services(self._beat)

    def serve(self, requests: IO[str]) -> None:
        for line in requests:
            request = json.loads(line)
            verb = request.pop("do")
            self._say(getattr(self, f"_{verb}")(**request))
        if self._engine is not None:
            self._engine.close()

    def _say(self, message: dict[str, Any]) -> None:
        with self._lock:
            self._answers.write(json.dumps(message) + "\n")
            self._answers.flush()

    def _beat(self, what: str, share: float) -> None:
        if share >= 1 or time.monotonic() - self._last_beat > BEAT_SECONDS:
            self._last_beat = time.monotonic()
            self._say({"progress": what, "share": share})

    def _load(self, target: str, plan: dict[str, Any]) -> dict[str, Any]:
        self._plan = Plan.model_validate(plan)
        spec = self._plan.model
        self._facts = {
            "machine": self._plan.machine.name,
            "num_layers": spec.num_layers,
            "total_layers": spec.total_layers,
            "started_at": now(),
        }
        try:
            self._beat("starting", 0.0)
            from zinfer import engine
            from zinfer.worker.probe import measure_link

            engine_class = engine.load(target)
            import torch

            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            self._facts |= {"versions": versions(self._plan.case.engine), "link_bandwidth": measure_link(device)}
            started = time.monotonic()
            self._engine = engine_class(self._plan, self._beat)
            load = {"load_s": round(time.monotonic() - started, 3), "load_bytes": spec.weight_bytes}
        except BaseException as error:
            return self._answer(self._plan.case, told(error, "load"))
        self._facts |= load
        return load

    def _answer(self, case: Case, fields: dict[str, Any]) -> dict[str, Any]:
        return {"point": Measurement(case=case, **(self._facts | fields)).model_dump(mode="json")}

    def _measure(self, case: dict[str, Any], repeats: int, tolerance: float) -> dict[str, Any]:
        import gc
        import resource

        import torch

        from zinfer.record.stats import relative_half_width
        from zinfer.worker.measure import Samples, measure

        asked = Case.model_validate(case)
        samples, engine, spec = Samples(), self._engine, self._plan.model
        self._facts["started_at"] = now()
        cuda = engine.device.type == "cuda"
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

        def enough(e2e_ms: Any) -> bool:
            spread = relative_half_width(e2e_ms)
            return spread is not None and spread <= tolerance

        failed: dict[str, Any] = {}
        try:
            measure(engine, asked.workload, spec.vocab_size, samples, repeats=repeats, enough=enough, beat=self._beat)
        except BaseException as error:  # not kept beyond this block: its traceback holds what the failed pass held
            failed = told(error, samples.stage)
        effective: Effective = engine.effective()
        fields: dict[str, Any] = {
            "ttft_ms": samples.ttft_ms,
            "step_ms": samples.step_ms,
            "gpu": samples.gpu,
            "timeline": samples.timeline,
            "effective": effective,
            "host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        if cuda:
            with suppress(RuntimeError):  # of a device that was lost after the samples were taken
                free, total = torch.cuda.mem_get_info()
                fields |= {"gpu_peak_bytes": torch.cuda.max_memory_allocated(), "gpu_used_bytes": total - free}
        status: Status = samples.status
        if status == "ok" and (shortfall := not_as_asked(asked, effective)) is not None:
            status, fields["error"] = "offload_not_effective", shortfall
        return self._answer(asked, {"status": status} | fields | failed)

    def _generate(self, prompts: list[str], batch_size: int, sampling: dict[str, Any]) -> dict[str, Any]:
        from zinfer.generation.generate import Sampling, generate

        try:
            started, choice = time.monotonic(), Sampling.model_validate(sampling)
            texts = generate(self._engine, self._plan.model, prompts, choice, batch_size, self._beat)
            return {"texts": texts, "seconds": time.monotonic() - started}
        except Exception as error:
            return {"status": status_of(error), "error": one_line(error)}

    def _about(self) -> dict[str, Any]:
        return self._facts

    def _serve(self, service: str, verb: str, fields: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._services.answer(service, verb, self._engine, self._plan, fields)
        except Exception as error:
            failed = told(error, verb)
        with suppress(Exception):  # what a failed batch held would be missed by the next one
            self._engine.clear()
        return failed


def not_as_asked(asked: Case, effective: Effective) -> str | None:
    """Where the weights are not where the case wants them: what is wrong; None when all is well."""
    offloaded = effective.host_weight_bytes + effective.nvme_weight_bytes
    all_may_stay = 0 < offloaded <= resident_bytes(asked.gpu_weights, offloaded, automatic=offloaded)
    if asked.offload != "none" and effective.streamed_bytes_per_step == 0 and not all_may_stay:
        return effective.shortfall or f"offload {asked.offload} was asked for, and no weight is streamed"
    return effective.shortfall


def _die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies (Linux), and to prefer it when host memory runs out."""
    import ctypes

    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != int(os.environ.get("ZINFER_PARENT", os.getppid())):
        os._exit(1)  # the parent was gone before the request took effect
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def main() -> None:
    """Serve a parent on stdin and stdout; anything else that is printed goes to stderr."""
    _die_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    Server(answers).serve(sys.stdin)


if __name__ == "__main__":
    main()
