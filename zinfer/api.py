"""The Python API: models in a worker, plans, sweeps and their results.

Options are those of the command line, with underscores for hyphens: the help of `zinfer batch`, `zinfer plan` and
`zinfer sweep` says what they do. Errors of usage are ZinferError, a ValueError; those of a worker are WorkerError, a
RuntimeError.
"""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from zinfer.analysis.requests import goodput
from zinfer.commands import options as flags
from zinfer.commands import plan as plan_verb
from zinfer.commands import sweep as sweep_verb
from zinfer.commands.verb import Verb
from zinfer.core.case import MAX_COUNT
from zinfer.core.errors import ZinferError, did_you_mean
from zinfer.core.model import ModelError
from zinfer.core.request import Request, TokenScore, Update, nth_seed
from zinfer.core.value import Closing
from zinfer.generation.schedule import largest_load
from zinfer.generation.tokenizer_process import Refusal
from zinfer.job import sweep as sweep_job
from zinfer.job.batch.packing import fitting, typical_plan
from zinfer.job.driver import Driver
from zinfer.job.openai import ServerLimits, answer_limit, read_body
from zinfer.job.structure import PLAIN, form_of
from zinfer.plan.planner import Plan
from zinfer.record import export
from zinfer.record.measurement import Measurement
from zinfer.record.requests import RequestPoint
from zinfer.record.store import Records, Store, files, read
from zinfer.system import local
from zinfer.worker import process
from zinfer.worker.process import WorkerError
from zinfer.worker.tasks import Answer, BatchStart, BatchStep, Command

if TYPE_CHECKING:
    import pandas

AHEAD = 256  # rows that wait in the worker
STREAM_S, TURN_S = 0.05, 1.0  # seconds of decoding between two answers of the worker, of a stream and else
Prompt = str | Sequence[int]
Message = Mapping[str, Any]


@click.command("LLM", cls=Verb)
@flags.model
@flags.job_options
def _load(**how: Any) -> dict[str, Any]:
    return how


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling of answers, by vLLM's names and defaults. Raises ZinferError for a value out of its limits.

    `max_tokens` None is the option `output_len` of the model; `seed` None another seed each time; `logprobs` the number
    of alternatives that each token's log-probability comes with. `structured_outputs` has one of ``json`` (a schema),
    ``json_object`` (True), ``regex``, ``choice`` (texts) and ``grammar`` (Lark or GBNF).
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    structured_outputs: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        read_body(self.body(False) | {"prompt": ""}, False, ServerLimits(MAX_COUNT, MAX_COUNT))

    def body(self, chat: bool) -> dict[str, Any]:
        """Return the fields of a request's body."""
        body = {name: value for name, value in vars(self).items() if value is not None}
        body["stop"] = self.stop if isinstance(self.stop, str) else list(self.stop or ())
        body["stop_token_ids"] = list(self.stop_token_ids or ())
        body["logit_bias"] = {str(token): value for token, value in (self.logit_bias or {}).items()}
        if chat and self.logprobs is not None:
            body |= {"logprobs": True, "top_logprobs": self.logprobs}
        return body


@dataclass
class CompletionOutput:
    """One answer. `finish_reason` is ``stop`` or ``length``, None while it is under way."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: list[TokenScore] = field(default_factory=list)


@dataclass
class RequestOutput:
    """A prompt, its token ids, and its answers. The prompt of a chat is its messages."""

    prompt: Any
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]


class Delta(NamedTuple):
    """New text and tokens of answer `output` to the prompt number `prompt`."""

    prompt: int
    output: int
    text: str
    token_ids: list[int]
    finish_reason: str | None


class LLM(Closing):
    """A model of any size in a worker.

    `close`, or the end of a ``with`` block, frees it. `options` are those of `zinfer batch`; others are the engine's,
    as of ``-O``. Without any the plan chooses. Prompts are texts or token ids. Raises ZinferError for wrong options
    and prompts, WorkerError where the worker fails.
    """

    def __init__(self, model: str | Path, *, debug: bool = False, **options: Any) -> None:
        context, how = _asked(_load, {"model": model} | options)
        with ExitStack() as stack, _errors(), context.scope(cleanup=False):
            stack.callback(context.close)
            job = flags.prepared("LLM", how)
            machine, spec = flags.this_machine(how["nvme_path"], how["gpu_memory"]), job.source.spec
            plan, load = typical_plan(job.cases(), spec, machine, how["nvme_path"], how["batch_size"], AHEAD)
            if load is None:
                raise ZinferError(str(plan.why_not))
            settings: dict[str, Any] = {"timeout_s": how["timeout_s"], "debug": debug, "revision": job.source.revision}
            self._driver = stack.enter_context(Driver(partial(process.Worker, job.target, **settings)))
            self._driver.load(plan, early=True)
            self.plan, self._how, self._tokenizer, self._planner = plan, how, job.tokenizer, plan.planner()
            self._call = 0  # number of the latest one
            self._stack = stack.pop_all()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Continue prompts, each by its parameters or the same; answers are in their order."""
        return self._answer(_several(prompts), sampling_params, chat=False)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, as the chat template formats them.

        Calls of `tools`, which are OpenAI's, are part of the text, in the model's form.
        """
        return self._answer(_conversations(messages), sampling_params, True, chat_template_kwargs, tools)

    def stream(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> Iterator[Delta]:
        """Yield the text of answers as it comes. `prompts` are those of `generate` or the messages of `chat`.

        Another call ends it: one that goes on then raises ZinferError.
        """
        first = prompts[0] if prompts else None
        chat = isinstance(first, Mapping) or (isinstance(first, list) and isinstance((*first, None)[0], Mapping))
        rows = _conversations(prompts) if chat else _several(prompts)
        requests, outputs = self._requests(rows, sampling_params, chat, chat_template_kwargs, stream=True)
        places = [(owner, answer.index) for owner, output in enumerate(outputs) for answer in output.outputs]
        for update in self._updates(requests):
            yield Delta(*places[update.key], update.delta, update.tokens, update.finish_reason)

    def close(self) -> None:
        """End the worker, and free its memory. Safe to call twice."""
        self._stack.close()

    def _answer(self, prompts: list[Any], params: Any, chat: bool, *of_a_chat: Any) -> list[RequestOutput]:
        requests, outputs = self._requests(prompts, params, chat, *of_a_chat)
        answers = [answer for output in outputs for answer in output.outputs]
        for update in self._updates(requests):
            answer = answers[update.key]
            answer.token_ids += update.tokens
            answer.logprobs += update.scores
            answer.text, answer.finish_reason = update.text, update.finish_reason
        return outputs

    def _requests(
        self, prompts: list[Any], params: Any, chat: bool, settings: Any = None, tools: Any = None, stream: bool = False
    ) -> tuple[list[Request], list[RequestOutput]]:
        """Return the worker's requests, numbered by `key`, and answers to fill in. Raises ZinferError."""
        spec, subject = self.plan.model, "messages" if chat else "prompt"
        every = [params or SamplingParams()] * len(prompts) if isinstance(params, SamplingParams | None) else [*params]
        if len(every) != len(prompts):
            raise ZinferError(f"{len(prompts)} prompts and {len(every)} sampling_params: give one for each, or one")
        more: dict[str, Any] = {"stream": stream} | ({"chat_template_kwargs": settings} if settings else {})
        more |= {"tools": [*map(dict, tools)]} if tools else {}
        form = form_of(self._tokenizer.facts) if chat else PLAIN
        requests, outputs = list[Request](), list[RequestOutput]()
        for owner, (prompt, wanted) in enumerate(zip(prompts, every, strict=True)):
            body = wanted.body(chat) | {subject: prompt} | more
            asked = read_body(body, chat, ServerLimits(spec.vocab_size, MAX_COUNT), form)
            ids: Any = asked.prompts[0]
            if not isinstance(ids, list):
                ids = self._tokenizer.encode_alone(ids)
            if isinstance(ids, Refusal):
                raise ModelError(f"prompt {owner}: {ids.message}")
            limit = answer_limit(asked.output_len, len(ids), spec.max_position, self._how["output_len"])
            seed = asked.seed or secrets.token_hex(8)
            for number in range(asked.n):
                requests.append(asked.request(ids, limit, nth_seed(seed, number), key=len(requests), owner=owner))
            outputs.append(RequestOutput(prompt, ids, [CompletionOutput(index) for index in range(asked.n)]))
        needs = [request.need for request in requests]
        for request, fits in zip(requests, fitting(self._planner, needs), strict=True):
            if not fits:
                lengths = f"the prompt's {request.length} tokens and {request.limit} of the answer"
                raise ZinferError(f"prompt {request.owner}: {lengths} need more memory than there is")
        return requests, outputs

    def _updates(self, requests: list[Request]) -> Iterator[Update]:
        """Run requests, and yield their updates. Raises WorkerError, after which the next call loads again."""
        if not requests:
            return
        self._call = call = self._call + 1
        self._driver.load(self.plan, early=True)
        rows = self._how["batch_size"]
        self._ask(BatchStart(load=largest_load(self._planner, [it.need for it in requests], rows), rows=rows))
        left, waiting, room = len(requests), iter(requests), AHEAD
        answer_s = STREAM_S if requests[0].stream else TURN_S
        while left:
            if call != self._call:
                raise ZinferError("another call has ended this one: a model answers one call at a time")
            step = self._ask(BatchStep(requests=list(islice(waiting, room)), answer_s=answer_s))
            room = max(0, AHEAD - step.waiting)
            for update in step.rows:
                if update.failure is not None:
                    raise ZinferError(f"prompt {requests[update.key].owner}: {update.failure.message}")
                left -= update.ended
                yield update

    def _ask(self, command: Command[Answer]) -> Answer:
        try:
            with self._driver.lend() as worker:
                return worker.ask(command)
        except WorkerError as error:
            self._driver.failed(error)
            raise
        except BaseException:  # ctrl-C: the worker's answer would be taken for that to the next command
            self._driver.end(kill=True)
            raise


def plan(model: str | Path | Sequence[str] | None = None, *, recipe: str | None = None, **options: Any) -> list[Plan]:
    """Return predictions, as `zinfer plan`: one for each machine, engine, offload and length.

    `calibrate=True` predicts what engines reach, instead of limits. Raises ZinferError.
    """
    calibrate = options.pop("calibrate", None)
    more = {} if calibrate in (None, False) else {"calibrate": plan_verb.SHIPPED if calibrate is True else calibrate}
    _, given = _asked(plan_verb.command, {"model": model} | more | options, [] if recipe is None else [recipe])
    with _errors():
        del given["recipe"], given["listed"]
        groups, *_ = plan_verb.planned(recipe, given.pop("calibrate"), given)
        return [plan for group in groups for plan in group.plans]


def sweep(
    model: str | Path | Sequence[str] | None = None,
    *,
    recipe: str | None = None,
    output: str | Path | None = None,
    **options: Any,
) -> Iterator[Measurement | RequestPoint]:
    """Measure as `zinfer sweep`; yield every point once it is on disk.

    `output` is its file. Signals raise what they raise in the caller; a worker is ended with the iterator. Raises
    ZinferError.
    """
    _, given = _asked(sweep_verb.command, {"model": model} | options, [] if recipe is None else [recipe])
    if wrong := [name for name in ("merge", "cluster", "shard", "dry_run", "as_json") if given[name]]:
        raise ZinferError(f"{wrong[0]} is for the command line")
    del given["recipe"], given["shard"], given["output"]
    with _errors():
        how = sweep_verb.taken(given)
        wanted = sweep_verb.asked(recipe, given, how)
        name = f"{sweep_verb.name_of(recipe, wanted)}.jsonl"
        path, jobs, header, recorded = sweep_verb.begin(wanted, Path(output or local.results_folder() / name), how)
    return _measured(wanted, jobs, path, header, recorded)


def _measured(wanted: Any, jobs: Any, path: Path, header: Any, recorded: Any) -> Iterator[Measurement | RequestPoint]:
    with Store(path) as store:
        store.append(header)
        yield from sweep_job.measure(wanted, jobs, store, recorded)


@dataclass(frozen=True)
class Results:
    """Records of each file: `points` of equal sequences and `requests` of loads, damaged lines left out."""

    by_file: dict[str, Records]

    @property
    def points(self) -> list[Measurement]:
        return [point for records in self.by_file.values() for point in records.points]

    @property
    def requests(self) -> list[RequestPoint]:
        return [point for records in self.by_file.values() for point in records.requests]

    def rows(self, requests: bool = False) -> list[export.Row]:
        """Return the rows of `zinfer export`: a dict a point, or a load of requests."""
        files = self.by_file.items()
        return export.request_table(files, goodput) if requests else export.table(files)

    def frame(self, requests: bool = False) -> "pandas.DataFrame":
        """Return `rows` as a frame of pandas. Raises ImportError without pandas."""
        import pandas

        return pandas.DataFrame(self.rows(requests))


def results(path: str | Path | None = None) -> Results:
    """Return the records of a file or folder (default: sweeps/results). Raises StoreError."""
    return Results({str(file): read(file) for file in files(Path(path or local.RESULTS))})


# Options as words of a command line, so that they have its types, limits and messages.


@contextmanager
def _errors() -> Iterator[None]:
    """Raise errors of a command as ZinferError."""
    try:
        yield
    except click.ClickException as error:
        raise ZinferError(error.format_message()) from None


def _asked(
    command: click.Command, given: Mapping[str, Any], words: Sequence[str] = ()
) -> tuple[click.Context, dict[str, Any]]:
    """Return a context for the parameters `given`, and their values. Raises ZinferError, TypeError."""
    known = {name.lstrip("-").replace("-", "_"): param for param in command.params for name in param.opts}
    known |= {str(param.name): param for param in command.params}
    arguments, loads = [*words], "nvme_path" in known
    for name, value in given.items():
        if value is None or value is False:
            continue
        param = known.get(name)
        if param is None and loads:  # an option of the engine
            arguments += ["-O", f"{name}={_word(value)}"]
        elif not isinstance(param, click.Option):
            raise TypeError(f"{command.name}: no option {name!r}{did_you_mean(name, known)}")
        elif param.is_flag and param.flag_value is True:
            arguments += [param.opts[0]] if value else []
        else:
            several = value if param.multiple and isinstance(value, list | tuple) else [value]
            arguments += [word for each in several for word in (param.opts[0], _word(each))]
    with _errors():
        context = command.make_context(command.name, arguments)
        return context, flags.merged(context.params) if loads else dict(context.params)


def _word(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _several(prompts: Any) -> list[Any]:
    """Return prompts as a list: one is a text, or token ids."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]
    return [prompt if isinstance(prompt, str) else list(prompt) for prompt in prompts]


def _conversations(messages: Any) -> list[Any]:
    several = [messages] if messages and isinstance(messages[0], Mapping) else messages
    return [[dict(message) for message in conversation] for conversation in several]
