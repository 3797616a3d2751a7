"""`zinfer run --chat` on the terminal: read turns, print answers as they are generated, and report each turn's
times."""

import json
import select
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import click

from zinfer.commands.failure import Failure
from zinfer.commands.options import Size, chat_template
from zinfer.job.signals import kept
from zinfer.system import ending
from zinfer.system.printable import show_generated, shows_unicode, text_lines

if TYPE_CHECKING:
    from zinfer.generation.dialogue import Dialogue
    from zinfer.worker.process import Client
    from zinfer.worker.tasks import Answer, ChatOpen, Request

Command = TypeVar("Command", bound=Callable[..., Any])

ANSWER = 512  # most tokens of an answer
WAIT_S = 0.2  # wait for a line of the terminal at a time
CONTEXT = 4096  # tokens of a conversation that the plan has room for; fewer if the model has fewer positions


def chat_options(function: Command) -> Command:
    """Add the options that only a conversation has."""
    for option in (
        click.option(
            "--kv-cache-dir-size", type=Size(), default="64GiB", show_default=True,
            help="Most disk space for --kv-cache-dir, as 8GiB.",
        ),
        click.option("--kv-cache-dir", type=click.Path(file_okay=False), help="Folder that also keeps the KV caches."),
        click.option(
            "--kv-cache-size", type=Size(), default="8GiB", show_default=True,
            help="Most host memory for KV caches of conversations, as 8GiB.",
        ),
        chat_template,
        click.option("--system", help="System message, before the first turn."),
        click.option("--chat", is_flag=True, help="Conversation: each prompt, else each line of stdin, is a turn."),
    ):  # fmt: skip
        function = option(function)
    return function


def turns(prompts: Iterable[str]) -> Iterator[str]:
    """Yield the turns of a conversation: the prompts given, or the lines of stdin, with a prompt sign if that is a
    terminal."""
    asked = sys.stdin.isatty()
    given = list(prompts)
    if given:
        yield from given
        return
    if not asked:
        yield from (line.rstrip("\n") for line in text_lines(sys.stdin, "stdin") if line.strip())
        return
    interrupted = False  # one ctrl-C at the prompt may have been meant for the answer
    while True:
        try:
            with _raised():
                click.echo("> ", nl=False, err=True)
                _until_typed()
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


def _until_typed() -> None:
    """Wait until a line can be read from the terminal, a moment at a time: a signal that arrives just before a wait
    begins is handled when the wait is over."""
    while not select.select([sys.stdin], [], [], WAIT_S)[0]:
        pass


@contextmanager
def _raised() -> Iterator[None]:
    """Let ctrl-C raise KeyboardInterrupt; it ends the command elsewhere."""
    thrown: list[KeyboardInterrupt] = []

    def arrived(_number: int, _frame: FrameType | None) -> None:
        thrown.append(KeyboardInterrupt())
        raise thrown[-1]

    before = signal.signal(signal.SIGINT, arrived)
    try:
        with kept(thrown):
            yield
    finally:
        signal.signal(signal.SIGINT, before)
        ending.handed_back()


class Stop:
    """Ctrl-C during an answer: the first sets `asked`, the second raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.asked = False
        self._thrown: list[KeyboardInterrupt] = []

    def __enter__(self) -> "Stop":
        self._before = signal.signal(signal.SIGINT, self._arrived)
        return self

    def _arrived(self, _number: int, _frame: FrameType | None) -> None:
        if self.asked:
            self._thrown.append(KeyboardInterrupt())
            raise self._thrown[-1]
        self.asked = True

    def __exit__(self, kind: type[BaseException] | None, *_exception: object) -> None:
        signal.signal(signal.SIGINT, self._before)
        ending.handed_back()
        if self._thrown and not (kind is not None and issubclass(kind, KeyboardInterrupt)):
            raise KeyboardInterrupt from None


def talk(
    worker: "Client",
    dialogue: "Dialogue",
    prompts: Iterable[str],
    opening: "ChatOpen",
    say: Callable[[str], None],
    as_json: bool,
) -> None:
    """Hold a conversation of the turns `prompts` with a loaded `worker`; `say` gets lines for the user.

    Raises ModelError for a turn that has no tokens, Failure if one fails, KeyboardInterrupt at the second ctrl-C in an
    answer.
    """
    from zinfer.worker.process import TaskFailed
    from zinfer.worker.tasks import ChatAsk, ChatEnd, ChatStep, ChatToken

    def ask(request: "Request[Answer]") -> "Answer":
        try:
            answer = worker.ask(request)
        except TaskFailed as failed:
            raise Failure(failed.line, failed.exit_code) from None
        for note in getattr(answer, "notes", ()):
            say(note)
        return answer

    if not dialogue.template:
        say("the model has no chat template: turns and answers follow each other as they are")
    ask(opening)
    for number, prompt in enumerate(prompts, start=1):
        with Stop() as stop:
            first = ask(ChatAsk(prompt_ids=dialogue.ask(prompt)))
            step: ChatToken = first
            _show(step.text, as_json)
            seconds, steps = 0.0, 0
            while step.finish_reason is None and not stop.asked:
                step = ask(ChatStep())
                seconds, steps = seconds + step.seconds, steps + 1
                _show(step.text, as_json)
        answer = ask(ChatEnd())
        dialogue.answered(answer.output_ids, answer.output_text)
        turn = {
            "turn": number, "prompt": prompt, "output_ids": answer.output_ids, "output_text": answer.output_text,
            "finish_reason": step.finish_reason or "interrupted", "reloaded_tokens": first.reloaded,
            "computed_tokens": first.computed, "ttft_s": round(first.seconds, 6),
            "decode_tok_s": round(steps / seconds, 3) if seconds else None,
        }  # fmt: skip
        click.echo(json.dumps(turn, ensure_ascii=not shows_unicode()) if as_json else "")
        say(summary(turn))


def _show(text: str, as_json: bool) -> None:
    if text and not as_json:
        show_generated(text)


def summary(turn: dict[str, Any]) -> str:
    """Return one line about a turn: tokens reloaded and computed, TTFT, decode rate."""
    from zinfer.core.units import duration, figures

    rate = "" if turn["decode_tok_s"] is None else f", then {figures(turn['decode_tok_s'])} tok/s"
    tokens = f"{turn['reloaded_tokens']:,} tokens reloaded, {turn['computed_tokens']:,} computed"
    return f"[{tokens}: TTFT {duration(turn['ttft_s'])}{rate}]"
