"""Tasks of a worker: commands, the answers to them, and their functions.

Commands and answers travel pickled. The functions are imported where they run: this module needs no torch.
"""

from collections.abc import Sequence
from typing import ClassVar, Generic, TypeVar

from pydantic import Field

from zinfer.core.case import Case, Workload
from zinfer.core.request import Request, Update
from zinfer.core.requests import RequestLoad
from zinfer.core.value import Frozen
from zinfer.plan.planner import Plan
from zinfer.record.measurement import Measurement
from zinfer.record.requests import RequestPoint
from zinfer.record.study import Position, Reload

Answer = TypeVar("Answer")


class Command(Frozen, Generic[Answer]):
    """Command to a worker, which answers with an `Answer`."""

    task: ClassVar[str]  # ``module:function``, of the worker's session and the command


# Loading and measuring


class Facts(Frozen):
    """Facts that all records of a load have."""

    machine: str = ""
    num_layers: int | None = None
    total_layers: int | None = None
    started_at: str = ""
    versions: dict[str, str] = Field(default_factory=dict)
    link_bandwidth: float | None = None  # bytes a second, host to device
    all_links_bandwidth: float | None = None  # rate of several GPUs' links at once, once a point was measured
    load_s: float | None = None
    load_bytes: int | None = None


class Load(Command[Facts]):
    """Load the engine at `target`, ``module:Class``, for a plan."""

    task = "zinfer.worker.session:load"
    target: str
    plan: Plan
    revision: str = ""  # fingerprint of the only weights to load, if there is one
    early: bool = False  # answer before all is loaded, if the engine can; the first pass then ends with the load


class Measure(Command[Measurement]):
    """Measure a case of the loaded engine. A spread within `tolerance` ends the repeats early."""

    task = "zinfer.worker.session:measure"
    case: Case
    repeats: int
    tolerance: float


class MeasureRequests(Command[RequestPoint]):
    """Measure requests as a load. Those without a prompt get as many random tokens as `input_lens` says."""

    task = "zinfer.worker.requests:measure_requests"
    case: Case
    load: RequestLoad
    requests: Sequence[Request]
    input_lens: list[int]
    sla: tuple[str, ...] = ()


# Text


class BatchStarted(Frozen):
    """Positions of KV cache, and why prompts cannot be reused."""

    positions: int
    cannot_reuse: str | None = None
    loading: bool = False  # weights are still being loaded


class BatchStart(Command[BatchStarted]):
    """Begin a batch in place of a running one. `load` is the largest load to reckon with; at most `rows` run at a time,
    the earliest before others if `arrivals`. KV caches of earlier rows may take `cache_size` bytes of host memory."""

    task = "zinfer.worker.generation:batch_start"
    load: Workload
    rows: int | None = None
    arrivals: bool = False
    cache_size: int = 0


class BatchStepped(Frozen):
    """Passes of a batch, and the updates of its rows."""

    passes: int
    seconds: float
    rows: list[Update]
    running: int = 0  # rows that run now; `waiting`: rows that have not begun
    waiting: int = 0
    read: int = 0  # positions of KV cache that were read; `padded`: padding among them
    padded: int = 0
    drafted: int = 0  # drafts that were verified; `accepted`: right ones among them
    accepted: int = 0
    kept_bytes: int = 0  # host memory that kept KV caches take now
    loaded: Facts | None = None  # of a load that went on until now


class BatchStep(Command[BatchStepped]):
    """Run passes until a row ends or `answer_s` seconds have gone by. The default is a second, and 0 is one pass. First
    the rows whose keys are `drop` are discarded, and `requests` begin to wait."""

    task = "zinfer.worker.generation:batch_step"
    requests: Sequence[Request] = Field(default_factory=list)
    drop: list[int] = Field(default_factory=list)
    answer_s: float | None = None


# Studies


class PrefixReuse(Command[Reload]):
    """Time the first token after `context` tokens. All but `new_tokens` are reloaded, or all computed."""

    task = "zinfer.worker.studies:prefix_reuse"
    context: int
    new_tokens: int
    repeats: int


class LogitsRecorded(Frozen):
    """Tokens that followed each prompt, and their logits in a file. The former are ``[B, steps]``, the latter, of which
    `shape` is, ``[steps, B, V]``."""

    tokens: list[list[int]]
    file: str
    dtype: str
    shape: tuple[int, int, int]


class LogitsRecord(Command[LogitsRecorded]):
    """Continue prompts of one length, and write the logits to `file`. A row's `steps` tokens are those of `tokens`, or
    the most likely ones where that is None."""

    task = "zinfer.worker.studies:logits_record"
    prompts: list[list[int]]
    tokens: list[list[int] | None]
    steps: int
    file: str


class LogitsCompare(Command[list[list[Position]]]):
    """Compare logits along the recorded tokens of rows with the recorded ones. `prompts` are those of the rows from
    `first` on. The answer has the deviation at every step of each row."""

    task = "zinfer.worker.studies:logits_compare"
    prompts: list[list[int]]
    first: int
    logits: LogitsRecorded
