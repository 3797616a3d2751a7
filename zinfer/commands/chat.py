"""`zinfer run --chat` on the terminal. Read turns, print answers as they come, and report their times."""

import json
import select
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import click

from zinfer.commands.failure import Failure
from zinfer.commands.options import SIZE, Parsed, chat_template, option, option_group
from zinfer.core.model import ModelError
from zinfer.core.request import Request, Sampling, nth_seed
from zinfer.core.units import duration, figures
from zinfer.generation.tokenizer_process import Prompt, Refusal, TokenizerProcess
from zinfer.job.signals import Signals
from zinfer.job.structure import PLAIN, Form, Parser
from zinfer.system.documents import parse_json
from zinfer.system.printable import show_generated, shows_unicode, text_lines
from zinfer.worker.process import Client
from zinfer.worker.tasks import BatchStart, BatchStep, BatchStepped

ANSWER = 512  # default limit of an answer, in tokens
WAIT_S = 0.2  # wait for a line of the terminal at a time
CONTEXT = 4096  # tokens of a conversation that the plan has room for; fewer if the model has fewer positions


def object_of(text: str) -> dict[str, Any]:
    """Return the object of a JSON text. Raises ValueError."""
    settings = parse_json(text.encode(), "it")
    if not isinstance(settings, dict):
        raise ValueError("write an object")
    return settings


chat_options = option_group(  # that only a conversation has
    option("--chat", bool, "Converse: each prompt, or line of stdin, is a turn."),
    option("--system-prompt --system system", str, "System message, before the first turn."),
    chat_template,
    option(
        "--chat-template-kwargs",
        Parsed("JSON", object_of),
        'Its settings, as {"enable_thinking": false}.',
    ),
    option("--kv-cache-size", SIZE, "Host memory for the KV cache of --chat.", default="8GiB"),
)


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


def prompt_request(
    number: int, ids: list[int], left: int, sampling: Sampling, ignore_eos: bool, **fields: Any
) -> Request:
    """Return the request for a streamed answer; `number` is its key, and seeds it."""
    seeded = sampling.model_copy(update={"seed": nth_seed(sampling.seed, number)})
    return Request(ids, left, seeded, ignore_eos=ignore_eos, key=number, owner=number, stream=True, **fields)


def talk(
    worker: Client,
    dialogue: Dialogue,
    prompts: Iterable[str],
    opening: BatchStart,
    limits: tuple[int, int | None, Sampling, bool],
    on_message: Callable[[str], None],
    as_json: bool,
    form: Form = PLAIN,
) -> None:
    """Hold a conversation of the turns `prompts` with a loaded worker: each is a batch of one row.

    Answers have a `form`. `limits` are output tokens, positions, sampling, and whether to go past an end. Raises
    ModelError for a turn without tokens, WorkerError if one fails, KeyboardInterrupt at the second ctrl-C in an answer.
    """
    output_len, positions, sampling, ignore_eos = limits
    if not dialogue.template:
        on_message("the model has no chat template: turns and answers follow each other as they are")
    started = worker.ask(opening)
    if started.cannot_reuse is not None:
        on_message(f"each turn computes the whole conversation: {started.cannot_reuse}")

    def step(*requests: Request, **fields: Any) -> BatchStepped:
        return worker.ask(BatchStep(requests=requests, answer_s=0, **fields))

    for number, prompt in enumerate(prompts):
        ids = dialogue.ask(prompt)
        left = output_len if positions is None else min(output_len, positions - len(ids))
        if left < 1:
            raise ModelError(f"the conversation has {len(ids)} tokens, and the model {positions} positions")
        request = prompt_request(number, ids, left, sampling, ignore_eos, chat=True, special=form.calls == "harmony")
        answer = _Answer(Parser(form, (), ids), as_json)
        with Stop() as stop:
            answer.add(step(request))
            while answer.finish_reason is None and not stop.asked:
                answer.add(step())
        if answer.finish_reason is None:
            step(drop=[number])
            answer.show(ended=True)
        parsed = Parser(form, (), ids).add(answer.text, ended=True)
        dialogue.answered(parsed.content, parsed.reasoning)
        rate = (len(answer.output_ids) - 1) / answer.decode_s if answer.decode_s else None
        turn = {
            "turn": number + 1,
            "prompt": prompt,
            "output_ids": answer.output_ids,
            "output_text": parsed.content,
            "reasoning_content": parsed.reasoning,
            "finish_reason": answer.finish_reason or "interrupted",
            "reloaded_tokens": answer.reloaded,
            "computed_tokens": len(ids) - answer.reloaded,
            "ttft_s": round(answer.ttft_s, 6),
            "decode_tok_s": rate and round(rate, 3),
        }
        click.echo(json.dumps(turn, ensure_ascii=not shows_unicode()) if as_json else "")
        tokens = f"{answer.reloaded:,} tokens reloaded, {turn['computed_tokens']:,} computed"
        then = "" if rate is None else f", then {figures(rate)} tok/s"
        on_message(f"[{tokens}: TTFT {duration(answer.ttft_s)}{then}]")


@dataclass
class _Answer:
    """Answer to a turn so far, shown as it comes unless `as_json`. `decode_s` follow its first token.

    Thoughts go to stderr.
    """

    parser: Parser
    as_json: bool
    output_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    reloaded: int = 0
    ttft_s: float = 0.0
    decode_s: float = 0.0
    thinks: bool = False

    def add(self, step: BatchStepped) -> None:
        """Add the new tokens of a pass. Raises Failure where the row failed."""
        if self.output_ids:
            self.decode_s += step.seconds
        else:
            self.ttft_s += step.seconds
        for update in step.rows:
            if update.failure is not None:
                raise Failure(update.failure.message)
            self.output_ids += update.tokens
            self.text = self.text + update.delta if update.finish_reason is None else update.text
            self.finish_reason, self.reloaded = update.finish_reason, update.cached
            self.show(update.delta, update.finish_reason is not None)

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
