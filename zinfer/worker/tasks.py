"""Table of a worker's tasks: command, answer and function of each.

Commands and answers travel as JSON. The functions are imported where they run: the table needs no torch.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pkgutil import resolve_name
from typing import Annotated, Any, Generic, NamedTuple, TypeVar

from pydantic import Field, PlainSerializer, PlainValidator

from zinfer.core.case import Case, Workload
from zinfer.core.request import Message, Request, Sampling, Update
from zinfer.core.requests import RequestLoad
from zinfer.core.value import Frozen
from zinfer.plan.planner import Plan
from zinfer.record.measurement import Measurement
from zinfer.record.requests import RequestPoint
from zinfer.record.study import Position, Reload

_FIELDS = tuple(field.name for field in dataclasses.fields(Request))
Answer = TypeVar("Answer", bound=Frozen)


def _changes(requests: Iterable[Request]) -> Iterator[dict[str, Any]]:
    """Yield the fields of each request that differ from its predecessor."""
    before: dict[str, Any] = {}
    for request in requests:
        fields = {name: getattr(request, name) for name in _FIELDS}  # a subclass may have more
        changed = {name: value for name, value in fields.items() if name not in before or value != before[name]}
        before = fields
        yield changed | ({"prompt_ids": list(request.prompt_ids)} if "prompt_ids" in changed else {})


def _requests(items: Iterable[Any]) -> list[Request]:
    """Return requests, of `_changes` or as they are; those with one prompt share its list."""
    requests, fields = list[Request](), dict[str, Any]()
    for item in items:
        if not isinstance(item, Request):
            fields |= item
            sampling = Sampling.model_validate(fields["sampling"])
            changed = {"sampling": sampling, "stop": tuple(fields["stop"]), "output_ids": list(fields["output_ids"])}
            item = Request(**fields | changed)
        requests.append(item)
    return requests


Requests = Annotated[Sequence[Request], PlainValidator(_requests), PlainSerializer(lambda items: [*_changes(items)])]


class Command(Message, Generic[Answer]):
    """Command to a worker, which answers with an `Answer`."""


# Loading and measuring


class Facts(Message):
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

    target: str
    plan: Plan
    revision: str = ""  # fingerprint of the only weights to load, if there is one
    early: bool = False  # answer before all is loaded, if the engine can; the first pass then ends with the load


class Measure(Command[Measurement]):
    """Measure a case of the loaded engine. A spread within `tolerance` ends the repeats early."""

    case: Case
    repeats: int
    tolerance: float


class MeasureRequests(Command[RequestPoint]):
    """Measure requests as a load. Those without a prompt get as many random tokens as `input_lens` says."""

    case: Case
    load: RequestLoad
    requests: Requests
    input_lens: list[int]
    sla: tuple[str, ...] = ()


# Text


class BatchStarted(Message):
    """Positions of KV cache, and why prompts cannot be reused."""

    positions: int
    cannot_reuse: str | None = None
    loading: bool = False  # weights are still being loaded


class BatchStart(Command[BatchStarted]):
    """Begin a batch in place of a running one. `load` is the largest load to reckon with; at most `rows` run at a time,
    the earliest before others if `arrivals`. KV caches of earlier rows may take `cache_size` bytes of host memory."""

    load: Workload
    rows: int | None = None
    arrivals: bool = False
    cache_size: int = 0


class BatchStepped(Message):
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

    requests: Requests = Field(default_factory=list)
    drop: list[int] = Field(default_factory=list)
    answer_s: float | None = None


# Studies


class PrefixReuse(Command[Reload]):
    """Time the first token after `context` tokens. All but `new_tokens` are reloaded, or all computed."""

    context: int
    new_tokens: int
    repeats: int


class LogitsFile(Message):
    """Logits on disk: their type and their shape, ``[steps, B, V]``."""

    file: str
    dtype: str
    shape: tuple[int, int, int]


class LogitsRecorded(Message):
    """Tokens that followed each prompt, ``[B, steps]``, and their logits."""

    tokens: list[list[int]]
    logits: LogitsFile


class LogitsRecord(Command[LogitsRecorded]):
    """Continue prompts of one length, and write the logits to `file`. A row's `steps` tokens are those of `tokens`, or
    the most likely ones where that is None."""

    prompts: list[list[int]]
    tokens: list[list[int] | None]
    steps: int
    file: str


class LogitsCompared(Message):
    """Deviation at every step of each row."""

    rows: list[list[Position]]


class LogitsCompare(Command[LogitsCompared]):
    """Compare logits along `tokens` with recorded ones. `tokens` follow `prompts`; `first` is the first row's."""

    prompts: list[list[int]]
    tokens: list[list[int]]
    first: int
    logits: LogitsFile


class Task(NamedTuple):
    """Command, answer, and function (``module:function``, of the worker's session and the command)."""

    command: type[Command[Any]]
    answer: type[Frozen]
    target: str

    def function(self) -> Callable[[Any, Any], Frozen]:
        """Import the function."""
        function: Callable[[Any, Any], Frozen] = resolve_name(self.target)
        return function


TASKS: Mapping[str, Task] = {
    "load": Task(Load, Facts, "zinfer.worker.session:load"),
    "measure": Task(Measure, Measurement, "zinfer.worker.session:measure"),
    "measure_requests": Task(MeasureRequests, RequestPoint, "zinfer.worker.requests:measure_requests"),
    "batch_start": Task(BatchStart, BatchStarted, "zinfer.worker.generation:batch_start"),
    "batch_step": Task(BatchStep, BatchStepped, "zinfer.worker.generation:batch_step"),
    "prefix_reuse": Task(PrefixReuse, Reload, "zinfer.worker.studies:prefix_reuse"),
    "logits_record": Task(LogitsRecord, LogitsRecorded, "zinfer.worker.studies:logits_record"),
    "logits_compare": Task(LogitsCompare, LogitsCompared, "zinfer.worker.studies:logits_compare"),
}
NAMES: Mapping[type[Message], str] = {task.command: name for name, task in TASKS.items()}
