"""Session of a worker. The loaded engine, the batch that runs on it, and its tasks.

`zinfer.worker.server` runs one in a process of its own.
"""

import gc
import os
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import cache, cached_property, partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from zinfer.checkpoint.headers import CheckpointError
from zinfer.checkpoint.source import revision_of
from zinfer.core.case import Case, resident_bytes
from zinfer.core.engine import OptionError
from zinfer.core.errors import ENVIRONMENT, INTERNAL, NotFiniteError, ZinferError, error_line, is_out_of_memory
from zinfer.core.model import ModelError
from zinfer.core.progress import Progress
from zinfer.engine import EngineError
from zinfer.plan.planner import Plan
from zinfer.record.measurement import Effective, Measurement, Status
from zinfer.record.stats import relative_half_width
from zinfer.system.documents import DocumentError
from zinfer.worker.process import LoadFailed, TaskFailed, WorkerDied, now, versions
from zinfer.worker.tasks import BatchStart, BatchStep, Command, Facts, Load, Measure

if TYPE_CHECKING:
    from zinfer.engine.base import Engine
    from zinfer.generation.scheduler import ContinuousScheduler
    from zinfer.generation.tokenizer import Tokenizer

MakeEngine = Callable[[Plan, Progress], "Engine"]
EARLY = (Load, BatchStart, BatchStep)  # commands that can run while the engine still loads
_STATUSES: dict[Status, tuple[type[BaseException], ...]] = {
    "nan_output": (NotFiniteError,),
    "unsupported": (ModelError, EngineError, OptionError, NotImplementedError),
    "io_error": (CheckpointError, DocumentError, OSError),
    "cancelled": (KeyboardInterrupt,),
}


def import_engine(target: str, early: bool) -> "MakeEngine":
    """Import the engine class at ``module:Class``; return what starts it, `early` if it can.

    Its libraries' 360,000 objects are kept from the garbage collector, whose every run would take 0.3 s.
    """
    gc.disable()
    try:
        from zinfer.engine import base

        return partial(base.load(target).start, early=early)
    finally:
        gc.freeze()
        gc.enable()


class Session:
    """State of one worker. `find` returns what makes the engine at a target, early or not."""

    def __init__(self, on_progress: Progress, find: Callable[[str, bool], MakeEngine] = import_engine) -> None:
        self.on_progress, self.find = on_progress, find
        self.facts = Facts()
        self.engine: Engine  # once it is loaded
        self.scheduler: ContinuousScheduler | None = None  # scheduler of the running batch
        self.unfinished: Callable[[], None] | None = None  # ends a load that goes on, and checks its weights
        self._fault: Exception | None = None  # exception of that

    @property
    def plan(self) -> Plan:
        """Plan of the loaded engine."""
        return self.engine.plan

    @cached_property
    def tokenizer(self) -> "Tokenizer":
        """Tokenizer of the loaded model."""
        from zinfer.generation.tokenizer import Tokenizer

        return Tokenizer(self.plan.model)

    @cached_property
    def token_text(self) -> Callable[[int], str]:
        """Text of one token alone, also of a special one."""
        return cache(self.tokenizer.text_of)

    def answer(self, command: Command[Any]) -> Any:
        """Run one task; return its answer, or its failure."""
        try:
            if not isinstance(command, EARLY):
                self.finish_loading()
            return self.function(command)(self, command)
        except WorkerDied:  # raised by a stand-in for a process that ends
            raise
        except Exception as error:
            with suppress(Exception):
                self.finish_loading(wait=False)  # which may have broken a pass
            kind = LoadFailed if self._fault or isinstance(command, Load) else TaskFailed
            return kind(*failure_of(self._fault or error))

    def function(self, command: Command[Any]) -> Callable[..., Any]:
        """Import the function of a command."""
        function: Callable[..., Any] = resolve_name(command.task)
        return function

    def finish_loading(self, wait: bool = True) -> None:
        """Wait for a load that goes on; without `wait` do nothing while it does. Raises what it raises, and
        CheckpointError for weights that have changed."""
        if self.unfinished is None or not (wait or self.engine.late is None or self.engine.late.ended):
            return
        try:
            self.unfinished()
        except Exception as error:
            self._fault = error
            raise
        self.unfinished = None

    def close(self, engine: bool = True) -> None:
        """End the batch, and the engine if `engine`. Safe to call twice."""
        with suppress(Exception):
            if self.scheduler is not None:
                self.scheduler.end()
        self.scheduler = self.unfinished = self._fault = None
        loaded: Engine | None = vars(self).pop("engine", None)
        if loaded is not None and engine:
            loaded.close()


def load(session: Session, command: Load) -> Facts:
    """Load the engine that the session finds. Raises its errors, and CheckpointError for changed weights."""
    plan = command.plan
    session.facts = facts_of(plan)
    session.on_progress("starting", 0.0)
    if plan.model.draft is not None:
        from zinfer.generation.draft_model import check_same_tokens

        check_same_tokens(plan.model)
    from zinfer.worker.probe import measure_link

    make = session.find(command.target, command.early)
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    facts: dict[str, Any] = {"versions": versions(plan.case.engine), "link_bandwidth": measure_link(device)}
    session.facts = session.facts.model_copy(update=facts)
    started = time.monotonic()
    session.engine = engine = make(plan, session.on_progress)

    def finish() -> None:
        """Wait for all weights, note their seconds, and check them."""
        engine.finish_loading()
        seconds = max(1e-3, (time.monotonic() if engine.late is None else engine.late.ended_at) - started)
        # Once they are read, and outside the time that is recorded.
        if command.revision and revision_of(plan.model, plan.case.load_format) != command.revision:
            raise CheckpointError(f"{plan.model.directory} does not hold the weights of the start any more: start anew")
        facts = {"load_s": round(seconds, 3), "load_bytes": engine.loaded_bytes}
        session.facts = session.facts.model_copy(update=facts)

    session.unfinished = finish
    session.finish_loading(wait=False)
    return session.facts


def facts_of(plan: Plan) -> Facts:
    """Return the facts of a load that are known before it begins."""
    spec, machine = plan.model, plan.machine.name
    return Facts(machine=machine, num_layers=spec.num_layers, total_layers=spec.total_layers, started_at=now())


def measure(session: Session, command: Measure) -> Measurement:
    """Measure one case of the loaded engine. An exception becomes the point's status."""
    from zinfer.engine.server.engine import Server
    from zinfer.worker.measure import Samples, measure_server
    from zinfer.worker.measure import measure as measure_passes

    case, samples, vocab_size = command.case, Samples(), session.plan.model.vocab_size
    clock: Callable[..., None] = measure_server if isinstance(session.engine, Server) else measure_passes

    def enough(e2e_ms: Any) -> bool:
        spread = relative_half_width(e2e_ms)
        return spread is not None and spread <= command.tolerance

    passes = partial(clock, session.engine, case.workload, vocab_size, samples, command.repeats, enough)
    fields = recorded(session, case, samples, partial(passes, session.on_progress))
    taken = {name: getattr(samples, name) for name in ("ttft_ms", "step_ms", "timeline")}
    return Measurement(case=case, **fields | taken)


def recorded(session: Session, case: Case, samples: Any, run: Callable[[], object]) -> dict[str, Any]:
    """Run what takes `samples`; return what all records share.

    These are memory, the placement of the weights, and the status, also of an exception. It differs from that of the
    samples if the weights are not where the case wants them. Before a load's first point several links are measured.
    """
    from zinfer.worker.probe import measure_links

    engine, failed = session.engine, dict[str, Any]()
    engine.clear()  # it may keep the memory of the last batch for the next one
    links = session.facts.all_links_bandwidth or measure_links(engine)
    session.facts = session.facts.model_copy(update={"started_at": now(), "all_links_bandwidth": links})
    gc.collect()
    engine.reset_peak()
    try:
        run()
    except BaseException as error:  # not kept beyond this block: its traceback holds what the failed pass held
        status, line, _ = failure_of(error)
        failed = {"status": status, "error": line, "stage": samples.stage}
    effective: Effective | None = engine.effective()  # None: a server's cannot be counted
    fields = session.facts.model_dump(exclude_unset=True) | {"gpu": samples.gpu, "status": samples.status}
    fields |= {"effective": effective, "host_peak_bytes": engine.host_memory()}
    if (memory := engine.device_memory()) is not None:
        fields |= dict(zip(("gpu_peak_bytes", "gpu_used_bytes"), memory, strict=True))
    fields |= engine.described()
    if samples.status == "ok" and effective is not None:
        shortfall = not_as_asked(case, effective, engine.plan.model.streamed_bytes)
        fields |= {} if shortfall is None else {"status": "offload_not_effective", "error": shortfall}
    return fields | failed


def not_as_asked(case: Case, effective: Effective, streamable: int = 0) -> str | None:
    """Return why weights are not where the case wants them, or None. The layers of the model have `streamable` bytes,
    for an engine with none of them in host memory or on disk."""
    offloaded = effective.host_weight_bytes + effective.nvme_weight_bytes or streamable
    all_may_stay = 0 < offloaded <= resident_bytes(case.gpu_weights, offloaded, automatic=offloaded)
    # The experts of a step may all have stayed, or the CPU may have computed them.
    all_may_stay |= any(effective.settings.get(f"experts_{name}_per_step", 0) > 0 for name in ("hits", "on_cpu"))
    if case.offload != "none" and effective.streamed_bytes_per_step == 0 and not all_may_stay:
        return effective.shortfall or f"offload {case.offload} was asked for, and no weight is streamed"
    return effective.shortfall


def failure_of(error: BaseException) -> tuple[Status, str, int]:
    """Return status, line and exit code; with --debug, stderr gets the traceback."""
    if os.environ.get("ZINFER_DEBUG") == "1":
        traceback.print_exception(error)
    status, text = status_of(error), error_line(error)
    if status == "oom_host" and not ("memory" in text and isinstance(error, MemoryError)):
        text = f"host memory ran out ({text})"
    exit_code = INTERNAL if status == "crashed" else ENVIRONMENT
    if isinstance(error, ZinferError) and not isinstance(error, EngineError):  # the same engine may run elsewhere
        exit_code = error.exit_code
    return status, text, exit_code


def status_of(error: BaseException) -> Status:
    """Return the status for an exception of loading or measuring."""
    text = str(error).lower()
    names = {base.__name__ for base in type(error).__mro__}
    if "OutOfMemoryError" in names or ("cuda" in text and "out of memory" in text) or "alloc_failed" in text:
        return "oom_gpu"
    if is_out_of_memory(error):
        return "oom_host"
    return next((status for status, kinds in _STATUSES.items() if isinstance(error, kinds)), "crashed")
