"""`zinfer run --chat` on the terminal: read turns, print answers as they are generated, and report each turn's
times."""

import json
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, TypeVar

import click

from zinfer.cli import Failure
from zinfer.spec.errors import ENVIRONMENT, INTERNAL

Command = TypeVar("Command", bound=Callable[..., Any])

ANSWER = 512  # most tokens of an answer
CONTEXT = 4096  # tokens of a conversation that the plan has room for; fewer if the model has fewer positions


class Size(click.ParamType[Any]):
    """Number of bytes, written as 8GiB or 4096."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from zinfer.spec.units import parse_bytes

        try:
            return value if isinstance(value, int) else parse_bytes(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def chat_options(function: Command) -> Command:
    """Add the options that only a conversation has."""
    for option in (
        click.option(
            "--kv-cache-dir-size", type=Size(), default="64GiB", show_default=True,
            help="Most disk space for --kv-cache-dir.",
        ),
        click.option("--kv-cache-dir", type=click.Path(file_okay=False), help="Folder that also keeps the KV caches."),
        click.option(
            "--kv-cache-size", type=Size(), default="8GiB", show_default=True,
            help="Most host memory for KV caches of conversations.",
        ),
        click.option("--system", help="System message, before the first turn."),
        click.option("--chat", is_flag=True, help="Conversation: each prompt, else each line of stdin, is a turn."),
    ):  # fmt: skip
        function = option(function)
    return function


def turns(prompts: Iterable[str]) -> Iterator[str]:
    """Turns of a conversation: the prompts given, or the lines of stdin, with a prompt sign if that is a terminal."""
    asked = sys.stdin.isatty()
    given = list(prompts)
    if given:
        yield from given
        return
    if not asked:
        yield from (line.rstrip("\n") for line in sys.stdin if line.strip())
        return
    interrupted = False  # one ctrl-C at the prompt may have been meant for the answer
    while True:
        try:
            click.echo("> ", nl=False, err=True)
            line = sys.stdin.readline()
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


class Stop:
    """Ctrl-C during an answer: the first sets `asked`, the second raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> "Stop":
        self._before = signal.signal(signal.SIGINT, self._arrived)
        return self

    def _arrived(self, _number: int, _frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def __exit__(self, *_exception: object) -> None:
        signal.signal(signal.SIGINT, self._before)


def talk(worker: Any, said: Iterable[str], settings: dict[str, Any], say: Callable[[str], None], as_json: bool) -> None:
    """Hold the conversation of the turns `said` with a loaded `worker`; `settings` are those of
    `zinfer.generation.chat.Chat`.

    Raises Failure if a turn fails, KeyboardInterrupt at the second ctrl-C in an answer.
    """

    def ask(verb: str, **fields: Any) -> dict[str, Any]:
        answer: dict[str, Any] = worker.serve("chat", verb, **fields)
        if "error" in answer:
            code = INTERNAL if answer["status"] == "crashed" else ENVIRONMENT
            raise Failure(f"{answer['status']}: {answer['error']}", code)
        for note in answer.get("notes", ()):
            say(note)
        return answer

    ask("open", **settings)
    for number, turn in enumerate(said, start=1):
        with Stop() as stop:
            first = step = ask("ask", turn=turn)
            _show(step["text"], as_json)
            seconds, steps = 0.0, 0
            while step["ended"] is None and not stop.asked:
                step = ask("go_on")
                seconds, steps = seconds + step["seconds"], steps + 1
                _show(step["text"], as_json)
        outcome = {
            "turn": number, "prompt": turn, **_answer(ask("end")), "finish_reason": step["ended"] or "interrupted",
            "reloaded_tokens": first["reloaded"], "computed_tokens": first["computed"],
            "ttft_s": round(first["seconds"], 6), "decode_tok_s": round(steps / seconds, 3) if seconds else None,
        }  # fmt: skip
        click.echo(json.dumps(outcome, ensure_ascii=False) if as_json else "")
        say(summary(outcome))


def _show(text: str, as_json: bool) -> None:
    if text and not as_json:
        click.echo(text, nl=False)


def _answer(ended: dict[str, Any]) -> dict[str, Any]:
    return {key: ended[key] for key in ("output_ids", "output_text")}


def summary(outcome: dict[str, Any]) -> str:
    """One line about a turn: tokens reloaded and computed, TTFT, decode rate."""
    from zinfer.spec.units import duration, figures

    rate = "" if outcome["decode_tok_s"] is None else f", then {figures(outcome['decode_tok_s'])} tok/s"
    what = f"{outcome['reloaded_tokens']:,} tokens reloaded, {outcome['computed_tokens']:,} computed"
    return f"[{what}: TTFT {duration(outcome['ttft_s'])}{rate}]"
