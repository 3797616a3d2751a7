"""`zinfer run`: generate text with a model larger than the GPU, or converse with it."""

import json
import re
import select
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

import click

from zinfer.commands import options
from zinfer.commands.options import SIZE, Parsed, chat_template, option, option_group
from zinfer.commands.verb import TEXT, Failure, Verb
from zinfer.commands.watch import Watch
from zinfer.core.case import MAX_COUNT
from zinfer.core.engine import ENGINES
from zinfer.core.errors import ENVIRONMENT
from zinfer.core.model import ModelError, check_positions
from zinfer.core.request import Request, Update, nth_seed
from zinfer.core.units import counted, duration, figures
from zinfer.generation.schedule import largest_load
from zinfer.generation.tokenizer_process import Prompt, Refusal, TokenizerProcess
from zinfer.job.batch.packing import best_plan
from zinfer.job.driver import Driver
from zinfer.job.openai import Asked, ServerLimits, read_body
from zinfer.job.recipe import engine_recipe
from zinfer.job.signals import Signals
from zinfer.job.structure import Parser, form_of
from zinfer.system import documents
from zinfer.system.documents import parse_json
from zinfer.system.printable import show_generated, shows_unicode, text_lines
from zinfer.worker.process import Client, WorkerError
from zinfer.worker.tasks import BatchStart, BatchStep, BatchStepped

STREAM_S = 0.05  # seconds of decoding before new text is shown
ANSWER = 512  # default limit of an answer, in tokens
WAIT_S = 0.2  # wait for a line of the terminal at a time
CONTEXT = 4096  # tokens of a conversation that the plan has room for; fewer if the model has fewer positions


def _object(text: str) -> dict[str, Any]:
    """Return the object of a JSON text. Raises ValueError."""
    settings = parse_json(text.encode(), "it")
    if not isinstance(settings, dict):
        raise ValueError("write an object")
    return settings


def _bias(text: str) -> dict[str, float]:
    pairs = [word.partition("=") for word in text.split(",")]
    return {token.strip(): float(value) for token, _, value in pairs}


JSON = Parsed("JSON", _object)
TOKENS = options.Parsed("ID,..", lambda text: [*map(int, text.split(","))], "token ids with commas between")
BIAS = Parsed("ID=X,..", _bias, "token ids and what is added, as 11=-100,42=2.5")
OF_A_CHAT = ("system", "chat_template", "chat_template_kwargs", "kv_cache_size")
DRAWN = ("top_p", "top_k", "min_p")  # without an effect on greedy text
SAMPLED = (  # fields of a request's body
    *DRAWN, "temperature", "seed", "ignore_eos", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "logit_bias", "stop_token_ids", "min_tokens", "structured_outputs",
)  # fmt: skip
sampling_options = option_group(  # as in bodies of requests, which have the same limits
    option("--top-k", int, "Sample among so many tokens; 0 is all.  [default: 0]"),
    option("--min-p", float, "Sample among tokens with this share of the likeliest one's chance.  [default: 0]"),
    option("--repetition-penalty", float, "Divide logits of tokens in prompt or answer by this.  [default: 1]"),
    option("--presence-penalty", float, "Take this from logits of tokens in the answer.  [default: 0]"),
    option("--frequency-penalty", float, "Take this from logits for each time in the answer.  [default: 0]"),
    option("--logit-bias", BIAS, "Add to the logits of tokens, -100 to 100 each."),
    option("--stop-token-ids", TOKENS, "Tokens that end an answer, too."),
    option("--structured-outputs", JSON, '{"json": SCHEMA}, {"regex": ..}, {"choice": [..]} or {"grammar": ..}.'),
    option("--min-tokens", int, "Tokens of an answer before it may end.  [default: 0]"),
)
chat_options = option_group(  # that only a conversation has
    option("--chat", bool, "Converse: each prompt, or line of stdin, is a turn."),
    option("--system-prompt --system system", str, "System message, before the first turn."),
    chat_template,
    option("--chat-template-kwargs", JSON, 'Its settings, as {"enable_thinking": false}.'),
    option("--kv-cache-size", SIZE, "Host memory for the KV cache of --chat.", default="8GiB"),
)


@click.command("run", cls=Verb)
@options.any_model
@options.engine
@options.offload_if_needed
@option("-p --prompt prompts", str, "A prompt. Repeatable; without one each line of stdin is a prompt.", multiple=True)
@option("--prompt-file", click.Path(exists=True, allow_dash=True), "File with a prompt in each line; - is stdin.")
@option("--max-tokens --output-len output_len", options.COUNT, "Most tokens of an answer.  [default: 32; chat: 512]")
@option("--batch-size", options.COUNT, "Prompts at once.  [default: all that fit]")
@option("--temperature", options.AMOUNT, "0 is greedy.", default=0.0)
@option("--top-p", options.SHARE, "Sample among the likeliest tokens of this share.", default=1.0)
@sampling_options
@option("--seed", int, "Seed of the sampling.", default=0)
@option("--ignore-eos", bool, "Generate all --max-tokens, past the end of a text.")
@chat_options
@options.load_options
@options.weights
@options.timeout(36000, "the whole run")
@option("--json as_json", bool, "Print JSON: a list with an object a prompt, or with --chat a line a turn.")
@click.pass_obj
def command(debug: bool, /, chat: bool, as_json: bool, **how: Any) -> None:
    """Continue prompts with a model of any size. Greedy unless --temperature is set. Ctrl-C keeps the text so far.

    With --chat they are turns of one conversation, with the model's chat template if it has one. Its KV cache
    stays in host memory, so that a turn computes little more than its new tokens. Ctrl-C ends an answer.

    \b
    zinfer run ./my-checkpoint --prompt "Once upon a time"
    zinfer run --model bigscience/bloom-560m --offload cpu --prompt-file prompts.txt --json
    zinfer run --model ./my-checkpoint --chat
    """
    prompts, prompt_file, batch_size = how["prompts"], how["prompt_file"], how["batch_size"]
    if chat:
        options.refuse(("batch_size",), "is not for a conversation, which is one row")
    else:
        options.refuse(OF_A_CHAT, "is for a conversation: add --chat")
    if not how["temperature"]:
        options.refuse(DRAWN, "has no effect on greedy text: add --temperature, such as 1")
    output_len = how["output_len"] or (ANSWER if chat else 32)
    texts = [] if chat and not (prompts or prompt_file) else _prompts(prompts, prompt_file)
    recipe = engine_recipe(how["engine"])
    if chat and "kv_offload" in ENGINES[recipe.engine].defaults.keys() - recipe.options.keys():
        how["settings"].setdefault("kv_offload", ("none",))  # a conversation goes on from a KV cache on the GPU alone
    job = options.prepared("run", how)
    spec, tokenizer = job.source.spec, job.tokenizer
    body = {name: how[name] for name in SAMPLED if how[name] is not None} | {"max_tokens": output_len, "stream": True}
    body |= {"messages": [{"role": "user", "content": ""}]} if chat else {"prompt": texts}
    asked = read_body(body, chat, ServerLimits(spec.vocab_size, MAX_COUNT), form_of(tokenizer.facts))
    dialogue = Dialogue(tokenizer, how["system"], how["chat_template_kwargs"]) if chat else None
    prompt_ids = [] if chat else _encoded(tokenizer, texts, asked.prompts)
    longest = max(map(len, prompt_ids), default=1)
    check_positions(spec, longest, 1 if chat else output_len, f"a prompt of {longest} tokens")
    machine = options.this_machine(how["nvme_path"], how["gpu_memory"])
    length = min(CONTEXT, max(1, (spec.max_position or CONTEXT) - output_len)) if chat else longest
    rows = batch_size or max(1, len(texts))
    plan = best_plan(job.cases(length, output_len), [(length, output_len)] * rows, spec, machine, how["nvme_path"])
    planner = plan.planner()
    if not plan.fits:
        raise Failure(str(plan.why_not), ENVIRONMENT)
    with Watch() as watch:
        try:
            with Driver(watch.workers(job.target, how["timeout_s"], debug), watch.loading) as driver:
                driver.load(plan, early=True)
                if dialogue is not None:
                    watch.quiet()
                    room = largest_load(planner, [(length, output_len)], 1)
                    opening = BatchStart(load=room, rows=1, arrivals=True, cache_size=how["kv_cache_size"])
                    with driver.lend() as worker:
                        talk(worker, dialogue, turns(texts), opening, asked, spec.max_position, watch.message, as_json)
                    return
                if sys.stdout.isatty() and not as_json:
                    watch.quiet()
                rows = batch_size or max(1, min(len(texts), plan.max_batch_size))
                workload = largest_load(planner, [(len(ids), output_len) for ids in prompt_ids], rows)
                requests = [nth_request(asked, number, ids, output_len) for number, ids in enumerate(prompt_ids)]
                answers = Answers(texts, list(map(len, prompt_ids)), as_json)
                with Stop() as stop, driver.lend() as worker:
                    worker.ask(BatchStart(load=workload, rows=rows))
                    while not answers.all_ended and not stop.asked:
                        answer_s = STREAM_S if answers.all_begun else 0
                        answers.add(worker.ask(BatchStep(requests=requests, answer_s=answer_s)))
                        requests = []
                        watch.progress("generating", answers.tokens / (len(texts) * output_len))
                if not answers.all_ended:
                    driver.end(kill=True)
                    answers.end()
                    watch.message("interrupted; the text so far is kept")
                    raise SystemExit(130)
                answers.end()
        except WorkerError as error:
            raise Failure(error.line, error.exit_code) from None
        watch.message(answers.summary())


class Answers:
    """Answers to prompts on stdout. As they come, in the prompts' order, or as JSON at the end."""

    def __init__(self, prompts: list[str], lengths: list[int], as_json: bool) -> None:
        self.answers = list(map(Answer, prompts, lengths))
        self.seconds = self._prompt_s = 0.0  # of all steps; of those that computed prompts
        self._generated = self._passes = self._drafted = self._accepted = 0  # the first counts tokens of other steps
        self._as_json, self._shown, self._length = as_json, 0, 0  # prompts shown to their end; characters of the next

    @property
    def all_begun(self) -> bool:
        return all(answer.ttft_s is not None for answer in self.answers)

    @property
    def all_ended(self) -> bool:
        return all(answer.finish_reason is not None for answer in self.answers)

    @property
    def tokens(self) -> int:
        return sum(len(answer.output_ids) for answer in self.answers)

    def summary(self) -> str:
        """Return a line about tokens, seconds and rates."""
        drafts = options.drafts_right(self._drafted, self._accepted)
        passes = f"; {self._passes:,} passes{drafts}" if drafts else ""
        prompts = sum(answer.prompt_tokens for answer in self.answers)
        times = [answer.ttft_s or 0.0 for answer in self.answers]
        parts = [f"prompts {figures(prompts / self._prompt_s)} tok/s"]
        if self._generated:
            parts.append(f"generation {figures(self._generated / (self.seconds - self._prompt_s))} tok/s")
        parts.append(f"{'TTFT' if len(times) == 1 else 'median TTFT'} {duration(median(times))}")
        rate = figures(self.tokens / self.seconds)
        return f"{counted(self.tokens, 'token')} in {duration(self.seconds)}: {rate} tok/s ({', '.join(parts)}){passes}"

    def add(self, step: BatchStepped) -> None:
        """Add new tokens of rows, and show the text that is next. Raises Failure for a row that failed."""
        # Until all have begun a step is one pass; it computes prompts if rows run that have no token yet.
        begun = sum(answer.ttft_s is not None for answer in self.answers)
        self.seconds += step.seconds
        if len(self.answers) - step.waiting > begun:
            self._prompt_s += step.seconds
        else:
            self._generated += sum(len(update.tokens) for update in step.rows)
        self._passes, self._drafted = self._passes + step.passes, self._drafted + step.drafted
        self._accepted += step.accepted
        for update in step.rows:
            self.answers[update.key].add(update, self.seconds)
        if not self._as_json:
            self._show()

    def end(self) -> None:
        """Show the rest, also of an interrupted run."""
        if self._as_json:
            rows = [answer.row() for answer in self.answers]
            click.echo(json.dumps(rows, indent=1, ensure_ascii=not shows_unicode()))
        else:
            self._show(over=True)

    def _show(self, over: bool = False) -> None:
        for answer in self.answers[self._shown :]:
            text, ended = answer.prompt + answer.text, over or answer.finish_reason is not None
            if answer.text or answer.finish_reason is not None:
                show_generated(text[self._length :] + "\n" * ended)
                self._length = len(text)
            if not ended:
                return
            self._shown, self._length = self._shown + 1, 0


def turns(prompts: Iterable[str]) -> Iterator[str]:
    """Yield the turns of a conversation. The prompts given, or the lines of stdin, with a sign on a terminal."""
    if given := list(prompts):
        yield from given
        return
    if not sys.stdin.isatty():
        yield from (line.rstrip("\n") for line in text_lines(sys.stdin, "stdin") if line.strip())
        return
    interrupted = False  # one ctrl-C at the prompt may have been meant for the answer
    while True:
        try:
            with Signals(signal.SIGINT) as signals, signals.raised():
                click.echo("> ", nl=False, err=True)
                while not select.select([sys.stdin], [], [], WAIT_S)[0]:
                    pass  # so that signals are handled
                line = next(text_lines(sys.stdin, "stdin"), "")  # ctrl-C ends the generator
        except KeyboardInterrupt:
            if interrupted:
                raise
            interrupted = True
            click.echo("\npress ctrl-D, or ctrl-C again, to end the conversation", err=True)
            continue
        interrupted = False
        if not line:
            click.echo(err=True)
            return
        if line.strip():
            yield line.rstrip("\n")


class Stop(Signals):
    """Ctrl-C during an answer: the first sets `asked`, the second raises KeyboardInterrupt."""

    asked = False

    def __init__(self) -> None:
        super().__init__(signal.SIGINT)

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        self._waiting = self.asked
        self.asked = True
        super()._arrived(number, frame)

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        super().__exit__(kind, *exception)
        if self._waiting and not (kind is not None and issubclass(kind, KeyboardInterrupt)):
            self._raise_pending()  # a library dropped it


class Dialogue:
    """Turns of a user and answers, formatted by the chat template. It gets `settings`; without one they are joined.
    Raises ModelError where the model has several chat templates, and none was chosen."""

    def __init__(
        self, tokenizer: TokenizerProcess, system: str | None = None, settings: dict[str, Any] | None = None
    ) -> None:
        self._tokenizer, self.template = tokenizer, tokenizer.facts.template
        if not self.template and tokenizer.template.names:
            raise ModelError(tokenizer.template.why_not)
        self._settings = settings or {}
        self._messages = [{"role": "system", "content": system}] if system else []
        self._turn = {"role": "user", "content": ""}

    def ask(self, turn: str) -> list[int]:
        """Return the tokens of the conversation and `turn`, added by `answered`. Raises ModelError."""
        self._turn = {"role": "user", "content": turn}
        messages = [*self._messages, self._turn]
        prompt: Prompt = {"messages": messages, "template": self._settings}
        if not self.template:
            prompt = "".join(message["content"] for message in messages)
        ids = self._tokenizer.encode_alone(prompt)
        if isinstance(ids, Refusal):
            raise ModelError(ids.message)
        return ids

    def answered(self, text: str, reasoning: str = "") -> None:
        """Add the last turn and its answer to the conversation; the template gets the `reasoning`, too."""
        thought = {"reasoning_content": reasoning} if reasoning else {}
        self._messages += [self._turn, {"role": "assistant", "content": text} | thought]


def nth_request(asked: Asked, number: int, ids: list[int], left: int) -> Request:
    """Return the request for an answer; `number` is its key, and seeds it."""
    return asked.request(ids, left, nth_seed(asked.seed or "0", number), key=number, owner=number)


def talk(
    worker: Client,
    dialogue: Dialogue,
    prompts: Iterable[str],
    opening: BatchStart,
    asked: Asked,
    positions: int | None,
    on_message: Callable[[str], None],
    as_json: bool,
) -> None:
    """Hold a conversation of the turns `prompts` with a loaded worker: each is a batch of one row.

    Each answer is what `asked` says, within the model's `positions`. Raises ModelError for a turn without tokens,
    WorkerError if one fails, KeyboardInterrupt at the second ctrl-C in an answer.
    """
    output_len = asked.output_len or ANSWER
    if not dialogue.template:
        on_message("the model has no chat template: turns and answers follow each other as they are")
    started = worker.ask(opening)
    if started.cannot_reuse is not None:
        on_message(f"each turn computes the whole conversation: {started.cannot_reuse}")

    for number, prompt in enumerate(prompts):
        ids = dialogue.ask(prompt)
        left = output_len if positions is None else min(output_len, positions - len(ids))
        if left < 1:
            raise ModelError(f"the conversation has {len(ids)} tokens, and the model {positions} positions")
        request, answer = nth_request(asked, number, ids, left), Answer(prompt, len(ids))
        screen, seconds = _Screen(asked.parser(ids), as_json), 0.0
        with Stop() as stop:
            for requests in chain([[request]], repeat([])):
                step = worker.ask(BatchStep(requests=requests, answer_s=0))
                seconds += step.seconds
                for update in step.rows:
                    answer.add(update, seconds)
                    screen.show(update.delta, update.ended)
                if answer.finish_reason is not None or stop.asked:
                    break
        if answer.finish_reason is None:
            worker.ask(BatchStep(drop=[number], answer_s=0))
            screen.show(ended=True)
        parsed = asked.parser(ids).add(answer.text, ended=True)
        dialogue.answered(parsed.content, parsed.reasoning)
        turn = {"turn": number + 1} | answer.row() | {"output_text": parsed.content}
        turn |= {"reasoning_content": parsed.reasoning, "reloaded_tokens": answer.reloaded}
        turn["computed_tokens"] = len(ids) - answer.reloaded
        click.echo(json.dumps(turn, ensure_ascii=not shows_unicode()) if as_json else "")
        tokens = f"{answer.reloaded:,} tokens reloaded, {turn['computed_tokens']:,} computed"
        then = "" if answer.decode_tok_s is None else f", then {figures(answer.decode_tok_s)} tok/s"
        on_message(f"[{tokens}: TTFT {duration(answer.ttft_s or 0)}{then}]")


@dataclass
class Answer:
    """Answer to a prompt so far. Seconds count from the start of all."""

    prompt: str
    prompt_tokens: int
    output_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    reloaded: int = 0
    ttft_s: float | None = None
    latest_s: float = 0.0

    def add(self, update: Update, seconds: float) -> None:
        """Add what came after so many seconds. Raises Failure where the row failed."""
        if update.failure is not None:
            raise Failure(update.failure.message)
        if self.ttft_s is None and (update.tokens or update.ended):
            self.ttft_s = seconds
        self.output_ids += update.tokens
        self.text = self.text + update.delta if update.finish_reason is None else update.text
        self.finish_reason, self.reloaded, self.latest_s = update.finish_reason, update.cached, seconds

    @property
    def decode_tok_s(self) -> float | None:
        """Tokens a second after the first one."""
        more, seconds = len(self.output_ids) - 1, self.latest_s - (self.ttft_s or 0.0)
        return round(more / seconds, 3) if more > 0 and seconds else None

    def row(self) -> dict[str, Any]:
        """Return the answer as JSON; null is unknown."""
        return {
            "prompt": self.prompt,
            "output_ids": self.output_ids,
            "output_text": self.text,
            "finish_reason": self.finish_reason or "interrupted",
            "prompt_tokens": self.prompt_tokens,
            "prompt_tok_s": round(self.prompt_tokens / self.ttft_s, 3) if self.ttft_s else None,
            "ttft_s": self.ttft_s and round(self.ttft_s, 6),
            "decode_tok_s": self.decode_tok_s,
        }


@dataclass
class _Screen:
    """Text of an answer as it comes, unless `as_json`; thoughts go to stderr."""

    parser: Parser
    as_json: bool
    thinks: bool = False

    def show(self, delta: str = "", ended: bool = False) -> None:
        """Show the parts that `delta` adds."""
        if self.as_json:
            return
        new = self.parser.add(delta, ended)
        if new.reasoning:
            show_generated(("" if self.thinks else "[thought: ") + new.reasoning, sys.stderr)
            self.thinks = True
        if self.thinks and (new.content or ended):
            click.echo("]", err=True)
            self.thinks = False
        if new.content:
            show_generated(new.content)


def _encoded(tokenizer: TokenizerProcess, texts: list[str], prompts: Sequence[Any]) -> list[list[int]]:
    """Return the token ids of each prompt. Raises ModelError for a prompt without any, and a wrong grammar."""
    prompt_ids = []
    for text, ids in zip(texts, tokenizer.encode(prompts), strict=True):
        if isinstance(ids, Refusal):
            raise ModelError(f"prompt {text[:40]!r}: {ids.message}")
        prompt_ids.append(ids)
    tokenizer.close()
    return prompt_ids


def _prompts(prompts: tuple[str, ...], prompt_file: str | None) -> list[str]:
    """Return the prompts of the options, of the file, or of stdin. Raises UsageError, DocumentError, ZinferError."""
    texts = list(prompts)
    lines: Iterable[str] = ()
    if prompt_file is not None and prompt_file != "-":
        content = documents.decode(documents.read_bytes(Path(prompt_file)), prompt_file)
        lines = re.split("\r\n?|\n", content)
    elif prompt_file == "-" or not prompts:
        if sys.stdin.isatty():
            raise click.UsageError("no prompt: --prompt TEXT, --prompt-file FILE, or text on stdin, a prompt a line")
        lines = text_lines(sys.stdin, "stdin")
    texts += [line.rstrip("\n") for line in lines if line.strip()]
    if not texts:
        raise click.UsageError("no prompt: the input is empty")
    if (longest := max(map(len, texts))) > TEXT:
        raise click.UsageError(f"a prompt of {longest:,} characters: at most {TEXT:,}")
    return texts
