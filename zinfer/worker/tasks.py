"""The tasks of a worker: one table from a name to its request, its answer and its function.

Requests and answers travel as JSON. The functions are imported where they run: the table needs no torch.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field

from zinfer.core.case import Case, Workload
from zinfer.core.errors import ENVIRONMENT
from zinfer.core.requests import RequestLoad
from zinfer.core.value import Frozen
from zinfer.generation.sampling import GREEDY, Sampling
from zinfer.plan.planner import Plan
from zinfer.record.measurement import Measurement
from zinfer.record.requests import RequestPoint
from zinfer.record.study import Position


class Message(Frozen):
    """A request or an answer; numbers that are not finite travel, too."""

    model_config = ConfigDict(ser_json_inf_nan="constants")


Answer = TypeVar("Answer", bound=Message)


class Request(Message, Generic[Answer]):
    """A request whose answer is an `Answer`."""


def _unicode(value: Any) -> Any:
    return value.encode(errors="replace").decode() if isinstance(value, str) else value


Text = Annotated[str, BeforeValidator(_unicode)]  # bytes of a command line that are not UTF-8 become question marks


# Loading and measuring


class Loaded(Message):
    """Seconds and bytes of a load, or the point with the reason why the engine is not ready, and the exit code of a
    command that cannot go on without it."""

    load_s: float = 0.0
    load_bytes: int = 0
    refused: Measurement | None = None
    exit_code: int = ENVIRONMENT


class Load(Request[Loaded]):
    """Load the engine at `target`, ``module:Class``, for a plan, and no other weights than those of `revision`."""

    target: str
    plan: Plan
    revision: str = ""  # fingerprint; any weights without one


class Facts(Message):
    """Facts of a load that every record of it has."""

    machine: str = ""
    num_layers: int | None = None
    total_layers: int | None = None
    started_at: str = ""
    versions: dict[str, str] = Field(default_factory=dict)
    link_bandwidth: float | None = None  # bytes a second, host to device
    all_links_bandwidth: float | None = None  # the same of several GPUs' links at once, once a point was measured
    load_s: float | None = None
    load_bytes: int | None = None


class About(Request[Facts]):
    """Describe the load."""


class Measured(Message):
    """A measured point, whatever its status."""

    point: Measurement


class Measure(Request[Measured]):
    """Measure a case of the loaded engine; fewer repeats do where their spread is within `tolerance`."""

    case: Case
    repeats: int
    tolerance: float


class RequestRow(Message):
    """A request of a load: the ids of its prompt, or their number for random ones, the number of tokens to come, and
    how they are sampled."""

    input_len: int
    output_len: int
    prompt_ids: list[int] | None = None
    sampling: Sampling = GREEDY


class RequestsMeasured(Message):
    """A measured load of requests, whatever its status."""

    point: RequestPoint


class MeasureRequests(Request[RequestsMeasured]):
    """Measure a load of requests on the loaded engine; `rows` come in their order, as `load` says."""

    case: Case
    load: RequestLoad
    rows: list[RequestRow]
    sla: tuple[str, ...] = ()


# Text


class BatchRow(Message):
    """A row of a request: the number of its prompt, its output so far, and what may follow."""

    key: int
    prompt: int = 0
    output_ids: list[int] = Field(default_factory=list)
    left: int
    sampling: Sampling = GREEDY


class BatchRequest(Message):
    """Rows of one request, `key`, and what they have in common, the token ids of their prompts too: it comes once. The
    fields are those of a `zinfer.generation.scheduler.Sequence`; `stream` asks for the text of rows in pieces, `echo`
    for the text of their prompts, and with `logprobs` for the scores of its tokens."""

    key: int
    prompts: list[list[int]]
    rows: list[BatchRow]
    stop: tuple[Text, ...] = ()
    ignore_eos: bool = False
    chat: bool = False
    stream: bool = False
    logprobs: int | None = None
    echo: bool = False


class TokenScore(Message):
    """Text of a token, its log-probability in nats, and those of the most likely tokens in its place, the best
    first."""

    token: str
    logprob: float
    top: list[tuple[str, float]] = Field(default_factory=list)


class EchoedPrompt(Message):
    """Text of a prompt, of its first token, and the scores of its other tokens if they were asked for."""

    text: str
    first: str
    scores: list[TokenScore] = Field(default_factory=list)


class RowStep(Message):
    """New `tokens` of a row; one that ended has a `finish_reason` and its `text`, or an `error`. `piece` is new text,
    `scores` are those of the tokens and of the end token, `prompt` comes once, before the first token, if they were
    asked for. `cached` counts the tokens of the prompt that were reused and not computed."""

    key: int
    tokens: list[int]
    finish_reason: Literal["stop", "length"] | None = None
    text: str = ""
    error: str | None = None
    piece: str = ""
    scores: list[TokenScore] = Field(default_factory=list)
    prompt: EchoedPrompt | None = None
    cached: int = 0


class BatchStarted(Message):
    """Positions of KV cache that the rows may take together, and the reasons why prompts cannot be scored, and kept
    ones not reused. `notes` are lines for the user, as those of `BatchStepped`."""

    positions: int
    notes: list[str] = Field(default_factory=list)
    cannot_score: str | None = None
    cannot_reuse: str | None = None


class BatchStart(Request[BatchStarted]):
    """Begin a batch to which rows come and from which they go, in place of one that runs. `load` is the largest load to
    reckon with; at most `rows` run at a time, those that came first before others if `arrivals`. KV caches of earlier
    rows may take `cache_size` bytes of host memory, and `folder_size` bytes of the disk under `folder`."""

    load: Workload
    rows: int | None = None
    arrivals: bool = False
    cache_size: int = 0
    folder: str | None = None
    folder_size: int = 0


class BatchStepped(Message):
    """Passes of a batch: their number and seconds, the rows that went on, the numbers of rows that run and wait now,
    the positions of KV cache that were read, those of them that were padding, positions computed again, drafts that
    were verified, those of them that were right, and the bytes of host memory that kept KV caches take now. `dropped`
    are the texts of rows with `stream` that were dropped, by key; `notes` are new lines for the user."""

    passes: int
    seconds: float
    rows: list[RowStep]
    running: int = 0
    waiting: int = 0
    read: int = 0
    padded: int = 0
    again: int = 0
    drafted: int = 0
    accepted: int = 0
    kept_bytes: int = 0
    dropped: dict[int, str] = Field(default_factory=dict)
    notes: list[str] = Field(default_factory=list)


class BatchStep(Request[BatchStepped]):
    """Forget the rows whose keys are `drop`, add those of `requests` to the batch, and run passes until a row ends or
    `answer_s` seconds have gone by, a second by default; 0 is one pass. `ending` is the chance that a row ends at a
    token before its limit."""

    requests: list[BatchRequest] = Field(default_factory=list)
    drop: list[int] = Field(default_factory=list)
    ending: float = 0.0
    answer_s: float | None = None


# Studies


class PrefixReused(Message):
    """Samples, in ms, and findings of a `zinfer.record.study.Reload`."""

    recompute_ms: list[float]
    memory_ms: list[float]
    disk_ms: list[float] = Field(default_factory=list)
    kept_bytes: int
    same_token: bool
    max_difference: float


class PrefixReuse(Request[PrefixReused]):
    """Time the first token after `context` tokens: with all of them computed, and with all but `new_tokens` reloaded
    from host memory, and from a file in `folder`."""

    context: int
    new_tokens: int
    repeats: int
    folder: str | None = None


class LogitsFile(Message):
    """Logits on disk: their type and their shape, ``[steps, B, V]``."""

    file: str
    dtype: str
    shape: tuple[int, int, int]


class LogitsRecorded(Message):
    """Tokens that followed each prompt, ``[B, steps]``, and the logits that they were chosen from."""

    tokens: list[list[int]]
    logits: LogitsFile


class LogitsRecord(Request[LogitsRecorded]):
    """Continue prompts of one length by `steps` tokens: those of `tokens`, or the most likely ones for a row with None;
    write the logits to `file`."""

    prompts: list[list[int]]
    tokens: list[list[int] | None]
    steps: int
    file: str


class LogitsCompared(Message):
    """Deviation at every step of each row."""

    rows: list[list[Position]]


class LogitsCompare(Request[LogitsCompared]):
    """Compare the engine's logits along `tokens`, which follow `prompts`, with recorded ones, of whose rows these are
    those from `first` on."""

    prompts: list[list[int]]
    tokens: list[list[int]]
    first: int
    logits: LogitsFile


class Task(NamedTuple):
    """A task: its request, its answer, and its function as ``module:function``, which takes the worker's session and
    the request."""

    request: type[Request[Any]]
    answer: type[Message]
    target: str

    def function(self) -> Callable[[Any, Any], Message]:
        """Import the function."""
        module, _, name = self.target.partition(":")
        found: Callable[[Any, Any], Message] = getattr(import_module(module), name)
        return found


TASKS: Mapping[str, Task] = {
    "load": Task(Load, Loaded, "zinfer.worker.session:load"),
    "about": Task(About, Facts, "zinfer.worker.session:about"),
    "measure": Task(Measure, Measured, "zinfer.worker.session:measure"),
    "measure_requests": Task(MeasureRequests, RequestsMeasured, "zinfer.worker.requests:measure_requests"),
    "batch_start": Task(BatchStart, BatchStarted, "zinfer.worker.generation:batch_start"),
    "batch_step": Task(BatchStep, BatchStepped, "zinfer.worker.generation:batch_step"),
    "prefix_reuse": Task(PrefixReuse, PrefixReused, "zinfer.worker.prefix_reuse:prefix_reuse"),
    "logits_record": Task(LogitsRecord, LogitsRecorded, "zinfer.worker.teacher_forcing:logits_record"),
    "logits_compare": Task(LogitsCompare, LogitsCompared, "zinfer.worker.teacher_forcing:logits_compare"),
}
NAMES: Mapping[type[Message], str] = {task.request: name for name, task in TASKS.items()}
