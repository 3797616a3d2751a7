"""Contract of an engine: `Engine.forward` computes a pass for any work.

The running sequences live in micro-batches, which the engine makes (`Engine.admit`) and the caller holds. So the
caller, a scheduler, decides what each pass carries, and one loop, one clock and one sampler serve all engines.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from pkgutil import resolve_name
from typing import Any, ClassVar, Generic, NamedTuple

import torch
from torch import Tensor
from typing_extensions import TypeVar

from zinfer.core.case import Workload
from zinfer.core.engine import EngineOptions, parse_options
from zinfer.core.progress import Progress, silent
from zinfer.engine import EngineError, gpu_memory
from zinfer.engine.kv_snapshot import KVSnapshot, RowsPast
from zinfer.engine.late import Late
from zinfer.plan.planner import Plan
from zinfer.record.measurement import Effective, Span
from zinfer.system.host import peak_bytes


class MicroBatch:
    """Rectangle of sequences with a KV cache (FlexGen's term, arXiv:2303.06865). Every sequence has `length` tokens in
    the cache, padding included, and there is room for `capacity`. The first `prompt_len` of them are the prompt's."""

    def __init__(self, batch_size: int, prompt_len: int, capacity: int) -> None:
        if not 0 < prompt_len <= capacity:
            raise ValueError(f"a prompt of {prompt_len} tokens does not fit a KV cache of {capacity}")
        self.batch_size, self.prompt_len, self.capacity = batch_size, prompt_len, capacity
        self.length = 0

    @property
    def host_rows(self) -> int:
        """Rows with their KV cache in host memory, which move slowly."""
        return 0


B = TypeVar("B", bound=MicroBatch, default=Any)  # an engine's kind of micro-batch


class Work(NamedTuple, Generic[B]):
    """Tokens that a pass computes for one micro-batch."""

    batch: B
    token_ids: Tensor  # [B, n] int64: a chunk of prompts (n large), one token (decode), k + 1 (verify k drafts)
    keep: int = 1  # number of last positions whose logits are wanted


class Engine(ABC, Generic[B]):
    """Model ready to run. Constructed means loaded: the constructor raises every error of loading. Only an engine that
    `begin` returns may raise them later, in `finish_loading` and in passes."""

    draft: "Engine | None" = None  # engine of the model that drafts for this one
    late: Late[Any] | None = None  # load that a thread goes on with, or did until `finish_loading`
    several: ClassVar[str] = ""  # ``module:Class`` of the engine that does the same on several GPUs, if there is one

    @property
    def one_pass(self) -> bool:
        """True if several works share one pass of the weights."""
        return False

    @property
    def joins(self) -> bool:
        """True if micro-batches that decode share a forward pass of the model."""
        return False

    def __init__(self, plan: Plan, progress: Progress = silent) -> None:
        self.plan = plan
        case = plan.case
        self.options: EngineOptions = parse_options(case.engine, case.options, case.offload)
        self.progress = progress
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self.device.type == "cuda":
            gpu_memory.limit(plan)
        self.expected: Workload | None = None
        self.batches: list[B] = []  # micro-batches admitted and not retired

    @property
    def plan(self) -> Plan:
        """Plan that the engine was loaded with; `planner` makes other workloads' plans."""
        return self._plan

    @plan.setter
    def plan(self, plan: Plan) -> None:
        self._plan, self.planner = plan, plan.planner()

    @classmethod
    def start(cls, plan: Plan, progress: Progress = silent, early: bool = False) -> "Engine":
        """Load the engine that `plan` describes, on several GPUs that of `several`. With `early` an engine that can is
        returned before all is loaded (`finish_loading`)."""
        if plan.placement.gpus > 1 and cls.several:
            return load(cls.several)(plan, progress)
        return cls.begin(plan, progress) if early else cls(plan, progress)

    @classmethod
    def begin(cls, plan: Plan, progress: Progress = silent) -> "Engine":
        """Load what the first pass needs first, or all of it."""
        return cls(plan, progress)

    def finish_loading(self) -> None:
        """Wait until all weights are loaded; the first pass ends with this. Raises every error of loading."""

    @classmethod
    def unable(cls) -> str | None:
        """Return why this machine cannot run the installed engine."""
        return None

    @property
    def loaded_bytes(self) -> int:
        """Weight bytes that the load read, or made at random, as stored."""
        spec = self.plan.model
        rounded = spec.weights != "as-released" and self.plan.case.load_format == "safetensors"
        return spec.weight_bytes if rounded else spec.stored_bytes

    @abstractmethod
    def admit(self, attention_mask: Tensor, capacity: int, past: RowsPast | None = None) -> B:
        """Reserve the KV cache of a new micro-batch; compute nothing.

        `attention_mask` ``[B, S]`` belongs to its left-padded prompts (1 token, 0 padding); `capacity` counts the
        prompt and all tokens that will follow it. `past` has the first positions of these prompts: the batch begins
        with them in its cache, and they are its `length`; one position at least must be left to compute. No snapshot of
        it may be closed before the first `forward` has run.

        Raises EngineError for a past where `cannot_snapshot` gives a reason; torch.OutOfMemoryError or MemoryError
        without room.
        """

    @abstractmethod
    def forward(self, works: Sequence[Work[B]]) -> list[Tensor]:
        """Compute the next ``[B, n]`` tokens of each work in one pass.

        They are appended to its micro-batch's KV cache. Returns the logits of each work's last `keep` positions, ``[B,
        keep, V]``, on the device. A micro-batch may occur once. Raises EngineError for work that the engine cannot do
        (`Engine.cannot_chunk`), IndexError beyond the capacity. After any exception the works' micro-batches must be
        retired.
        """

    @abstractmethod
    def retire(self, batch: B, rows: Sequence[int] | None = None) -> None:
        """Free the KV cache of a micro-batch, or of its `rows` only. The other rows close up, in their order. Retiring
        a micro-batch a second time does nothing."""

    def move_rows(self, sources: Sequence[tuple[B, Sequence[int]]], capacity: int) -> B:
        """Move rows of micro-batches into a new one; compute nothing.

        It has room for `capacity` positions. This merges, splits, compacts and enlarges micro-batches. Rows keep the
        order given. Padding and forgotten positions go as far as the longest row permits: the new micro-batch is
        left-padded, and all its positions belong to its prompt. The sources keep their other rows, closed up; a source
        without rows is retired.

        Raises EngineError where `cannot_move_rows` gives a reason, and for rows that are not computed yet; memory
        errors as `admit` does. After any exception all micro-batches that took part must be retired.
        """
        raise EngineError(self.cannot_move_rows() or "there is nothing to move")

    def expect(self, load: Workload | None) -> None:
        """Make room for micro-batches that together are as large as `load`; None: the admitted ones. An engine that
        gives free memory away then does so once, not at every `admit`."""
        self.expected = load

    def rollback(self, batch: B, lengths: Tensor) -> None:
        """Forget positions (rejected drafts): keep the first `lengths` ``[B]`` of each row.

        The micro-batch's new length is the largest of them; shorter rows have padding in between, which nothing attends
        to. Positions that the last `forward` added, or had begun to add when it raised, can be forgotten. Raises
        EngineError for others that cannot, and for lengths that differ where `equal_lengths` gives a reason.
        """
        raise EngineError(f"engine {self.plan.case.engine} cannot forget positions")

    # What the engine, or its model, cannot do: the reason, or None where it can.

    def cannot_move_rows(self) -> str | None:
        """Return why rows cannot move from one micro-batch to another."""
        return f"engine {self.plan.case.engine} keeps the rows of a micro-batch together"

    def cannot_pad(self) -> str | None:
        """Return why all rows of a micro-batch must be of one length."""
        return None

    def cannot_chunk(self) -> str | None:
        """Return why a pass cannot compute a chunk of a prompt."""
        return f"engine {self.plan.case.engine} computes whole prompts and single tokens"

    def cannot_draft(self) -> str | None:
        """Return why a pass cannot verify drafts."""
        return f"engine {self.plan.case.engine} cannot forget positions"

    def equal_lengths(self) -> str | None:
        """Return why `rollback` must keep as many positions of each row."""
        return None

    def cannot_snapshot(self) -> str | None:
        """Return why computed keys and values cannot be copied, and continued from."""
        return f"engine {self.plan.case.engine} keeps no keys and values"

    def snapshot(self, batch: B, first: int, last: int, row: int = 0) -> KVSnapshot:
        """Copy some positions' keys and values of a `row` to host memory. These are `first` to `last` (excluded),
        computed before; the row's first token is position 0. Raises EngineError where `cannot_snapshot` gives a reason,
        MemoryError where there is no room."""
        raise EngineError(self.cannot_snapshot() or "there is nothing to copy")

    @property
    def warming(self) -> bool:
        """True while decode steps are slower, since they are recorded and compared."""
        return False

    def timeline(self, works: Sequence[Work[B]]) -> tuple[Span, ...]:
        """Run one more pass and return its spans; nothing without tracing. Spans cover all that was under way during
        the pass, also copies that began before it or end after it. A span begins when its stream has finished waiting:
        time that no span of a lane covers counts as idle."""
        return ()

    @abstractmethod
    def effective(self) -> Effective:
        """Return the bytes on each tier and the bytes streamed a step. They are counted, not planned."""

    def described(self) -> dict[str, Any]:
        """Return what a record says of this engine besides."""
        return {}

    def give_back(self) -> None:
        """Give unused memory of PyTorch back to the device."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def reset_peak(self) -> None:
        """Give unused memory back, and begin to measure the peak anew."""
        self.give_back()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def device_memory(self) -> tuple[int, int] | None:
        """Return the GPU's peak bytes of tensors, and its bytes in use. None without a GPU, or with a lost one."""
        if self.device.type != "cuda":
            return None
        with suppress(RuntimeError):
            free, total = torch.cuda.mem_get_info()
            return torch.cuda.max_memory_allocated(), total - free
        return None

    def use_threads(self, count: int) -> None:
        """Use no more than `count` threads of the CPU."""
        torch.set_num_threads(count)

    def bring(self) -> int | None:
        """Copy a sample of the weights over all links at once. Returns its bytes; None where there is one link."""
        return None

    def host_memory(self) -> int:
        """Return the peak of host memory of the engine's processes, in bytes."""
        return peak_bytes()

    def is_live(self, batch: B) -> bool:
        """Tell whether a micro-batch is admitted and not retired."""
        return any(batch is live for live in self.batches)

    def discard(self, batch: B) -> None:
        """Take a micro-batch off the live ones."""
        self.batches = [live for live in self.batches if live is not batch]

    def clear(self) -> None:
        """Retire every micro-batch; weights stay. For callers that lost track of them in an exception."""
        for batch in list(self.batches):
            self.retire(batch)

    def close(self) -> None:
        """Free everything, page-locked memory included. Safe to call twice."""


def _check_live(batches: Sequence[MicroBatch], live: Sequence[MicroBatch]) -> None:
    ids = {id(batch) for batch in batches}
    if len(ids) < len(batches) or not ids <= {id(batch) for batch in live}:
        raise ValueError("rows come from micro-batches admitted and not retired, each of them once")


def check_works(works: Sequence[Work[B]], live: Sequence[B]) -> None:
    """Raise ValueError unless works are complete and of different `live` micro-batches. Raises IndexError for tokens
    beyond a capacity."""
    _check_live([work.batch for work in works], live)
    for work in works:
        batch, (rows, count) = work.batch, work.token_ids.shape
        if rows != batch.batch_size or not 1 <= work.keep <= count:
            raise ValueError(f"{rows} rows of {count} tokens, logits of {work.keep}, for a batch of {batch.batch_size}")
        if batch.length + count > batch.capacity:
            raise IndexError(f"the KV cache holds {batch.capacity} tokens a sequence; {batch.length + count} are asked")


def check_sources(sources: Sequence[tuple[B, Sequence[int]]], live: Sequence[B]) -> None:
    """Raise ValueError unless rows to move are of different `live` micro-batches. Raises EngineError for rows that are
    not computed."""
    _check_live([batch for batch, _ in sources], live)
    for batch, rows in sources:
        if not rows or len(set(rows)) < len(rows) or not all(0 <= row < batch.batch_size for row in rows):
            raise ValueError(f"rows {list(rows)} of a batch of {batch.batch_size}")
        if not batch.length:
            raise EngineError("rows are moved once some of their positions are computed")


def is_step(works: Sequence[Work]) -> bool:
    """Tell whether a pass decodes. Each row has one token, or several to verify behind the prompt."""
    sizes = [(work.batch, work.token_ids.shape[1]) for work in works]
    return all(batch.length and (count == 1 or batch.length >= batch.prompt_len) for batch, count in sizes)


def combined_workload(batches: Sequence[MicroBatch], rows: int, length: int, capacity: int) -> Workload:
    """Return the workload of all micro-batches and new rows, as if one."""
    lengths = [length, *(batch.prompt_len for batch in batches)]
    capacities = [capacity, *(batch.capacity for batch in batches)]
    size = rows + sum(batch.batch_size for batch in batches)
    return Workload(batch_size=size, input_len=max(lengths), output_len=max(1, max(capacities) - max(lengths)))


load: Callable[[str], type[Engine]] = resolve_name  # takes ``module:Class``
