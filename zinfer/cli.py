"""Command line: one group; verbs are imported when called."""

import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NoReturn

import click

from zinfer import __version__
from zinfer.core.errors import ENVIRONMENT, EXIT_CODES, INTERNAL, ZinferError, did_you_mean, is_out_of_memory
from zinfer.system.ending import interruption
from zinfer.system.printable import discard, guarded, refuse_surrogates

# groups of verbs in the order of work: verb -> its line in the help; its code is zinfer.commands.<verb>:command
GROUPS = {
    "Measure and decide": {
        "probe": "Measure this machine's memory, links and compute.",
        "sweep": "Measure batch sizes, offloads and engines; keep every point.",
        "plot": "Draw the figures of the results.",
        "best": "Name the best configuration and the command that runs it.",
        "report": "Write the results as an HTML page, or serve it while it fills.",
        "plan": "Predict what fits where and how fast it can be, without running.",
    },
    "Run a model": {
        "run": "Generate text.",
        "batch": "Answer a file of prompts, in the OpenAI batch format.",
        "serve": "Answer requests over HTTP, in the format of OpenAI's API.",
    },
    "Look closer": {
        "demo": "Measure a small model in every way, and explain the answer.",
        "doctor": "Check packages, hardware and which engines can run.",
        "compare": "Compare two result files; fail on a regression.",
        "export": "Write result files as CSV or JSON, a row a point.",
        "study": "Measure coding of weights, accuracy of settings, kept conversations, or routing.",
        "pack": "Store a checkpoint in the lossless wire format, quantised, or as a TensorRT plan.",
    },
}
VERBS = {verb: line for group in GROUPS.values() for verb, line in group.items()}
# Options of other programs, and ours that do the same.
FOREIGN_OPTIONS = {
    **dict.fromkeys(("--max-new-tokens", "--n-predict", "--num-predict", "--max-output-tokens"), "--max-tokens"),
    **dict.fromkeys(("--max-num-seqs", "--parallel", "--max-running-requests"), "--batch-size"),
    **dict.fromkeys(("--max-concurrency", "--num-concurrent"), "--concurrency"),
    **dict.fromkeys(("--tensor-parallel-size", "--tp-size", "--tp"), "--gpus"),
    **dict.fromkeys(("--model-path", "--model-name", "--pretrained", "--checkpoint"), "--model"),
    **dict.fromkeys(("--n-gpu-layers", "--gpu-layers", "--cpu-offload-gb"), "--gpu-weights"),
    **dict.fromkeys(("--cache-type-k", "--kv-cache-type"), "--kv-cache-dtype"),
    **dict.fromkeys(("--speculative-model", "--draft-model", "--model-draft"), "--draft"),
    **dict.fromkeys(("--quantization", "--load-in-4bit", "--load-in-8bit"), "--weights"),
    "--alias": "--served-model-name", "--num-prompts": "--num-requests", "--repeat-penalty": "--repetition-penalty",
}  # fmt: skip
# verbs that make files; at their start goes what a killed one of them left behind
MAKERS = frozenset(VERBS) - {"doctor", "best", "compare"}
MESSAGE = 2000  # most characters of an error message, which may repeat a value that somebody typed or wrote


def _fail(text: str, code: int) -> NoReturn:
    text = f"Error: {text if len(text) <= MESSAGE else f'{text[:MESSAGE]}…'}"
    if sys.stderr.isatty():
        from zinfer.commands.out import wrapped

        text = wrapped(text, sys.stderr)
    click.echo(text, err=True)
    sys.exit(code)


class _NoReader(Exception):
    """Error of a command whose stdout is closed, as after `| head`."""


@contextmanager
def _no_reader() -> Iterator[None]:
    """Turn a broken pipe into _NoReader: click would exit with 1."""
    try:
        yield
    except BrokenPipeError:
        raise _NoReader from None


class _Verbs(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        refuse_surrogates(args)
        with _no_reader():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        with _no_reader():
            try:
                return super().invoke(ctx)
            except click.NoSuchOption as error:
                name = error.option_name
                known = {word for param in error.ctx.command.params for word in param.opts} if error.ctx else set()
                if (near := FOREIGN_OPTIONS.get(name)) in known:
                    raise click.UsageError(f"No such option {name!r}: here it is {near}", error.ctx) from None
                raise

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in VERBS:
            return None
        command: click.Command = import_module(f"zinfer.commands.{name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if (name := args[0]) not in VERBS and not name.startswith("-"):
            ctx.fail(f"No such command {name!r}{did_you_mean(name, VERBS) or '; `zinfer --help` lists them'}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, VERBS))
        for title, group in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(f"{verb:{width}}", line) for verb, line in group.items()])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Exit codes"):
            formatter.write_dl(list(EXIT_CODES.items()))


@click.group(
    cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True}
)
@click.option("--debug", is_flag=True, help="Show tracebacks and the workers' own output.")
@click.version_option(__version__, message="zinfer %(version)s", help="Show the version.")
@click.pass_context
def cli(ctx: click.Context, debug: bool) -> None:
    """Run models larger than the GPU, measure every way, and choose.

    \b
    zinfer sweep --model bloom-176b --offload cpu    measure
    zinfer plot && zinfer best                       decide
    """
    ctx.obj = debug
    if ctx.invoked_subcommand in MAKERS:
        from zinfer.system import scratch

        scratch.remove_abandoned(lambda text: click.echo(text, err=True))


def _warn_in_a_line(message: Warning | str, category: type[Warning], *where: object, **_: object) -> None:
    """Print a warning of zinfer in one line; hide those of libraries."""
    if category.__name__ == "CheckpointWarning" or os.environ.get("ZINFER_DEBUG") == "1":
        click.echo(f"Warning: {message}", err=True)


def main() -> None:
    """Run the `zinfer` console script. A traceback is printed only with --debug or ZINFER_DEBUG=1."""
    warnings.showwarning = _warn_in_a_line
    with guarded():
        _main()


def _main() -> None:
    debug = "--debug" in sys.argv or os.environ.get("ZINFER_DEBUG") == "1"
    if debug:
        os.environ["ZINFER_DEBUG"] = "1"
    try:
        try:
            code = cli.main(standalone_mode=False)
        except SystemExit as end:
            code = end.code
        sys.stdout.flush()
        sys.exit(code)
    except click.exceptions.Abort as abort:
        _interrupted(interruption(abort) or signal.SIGINT)
    except click.ClickException as error:
        if isinstance(error, click.UsageError) and error.ctx is not None:
            hint = f"Try '{error.ctx.command_path} --help' for help."
            click.echo(f"{error.ctx.get_usage()}\n{hint}\n", err=True)
        _fail(error.format_message(), error.exit_code)
    except (_NoReader, BrokenPipeError):
        discard(sys.stdout)
        sys.exit(0)
    except OSError as error:
        if debug:
            raise
        discard(sys.stdout)
        name = error.filename if error.filename is not None else "the output"
        _fail(f"{name!s:.200}: {error.strerror or error}", ENVIRONMENT)
    except Exception as error:
        number = None if isinstance(error, ZinferError) else interruption(error)
        if number is not None:  # a library has turned the signal's exception into an error of its own
            _interrupted(number)
        if debug:
            raise
        if isinstance(error, ZinferError):
            _fail(str(error), error.exit_code)
        if isinstance(error, ModuleNotFoundError) and error.name in ("torch", "safetensors"):
            _fail(f"this needs {error.name}: pip install 'zinfer[engines]'", ENVIRONMENT)
        if is_out_of_memory(error):
            _fail("host memory ran out", ENVIRONMENT)
        text = " ".join(str(error).split())[:600]
        click.echo(f"Internal error ({type(error).__name__}): {text}; run with --debug for details", err=True)
        sys.exit(INTERNAL)


def _interrupted(number: int) -> NoReturn:
    click.echo("interrupted", err=True)
    sys.exit(128 + number)
