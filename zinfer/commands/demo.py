"""`zinfer demo`: measure a small model, draw figures, explain the answer."""

import io
import shutil
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

import click

from zinfer.analysis import rates
from zinfer.commands.out import say
from zinfer.commands.verb import Verb
from zinfer.core.errors import PARTIAL
from zinfer.core.machine import Machine
from zinfer.core.units import counted, figures
from zinfer.record.measurement import Measurement
from zinfer.record.stats import relative_half_width
from zinfer.record.store import read
from zinfer.system import local

NOISY = 0.2  # half of the confidence interval, as a share of the mean, from which on a warning is due


@click.command("demo", cls=Verb)
@click.pass_context
def command(ctx: click.Context) -> None:
    """Measure a 15 MB model with every engine of this machine. Draws the figures, names the best configuration, and
    explains the results; runs on a GPU or the CPU. Takes two minutes; a second run goes on where the first one ended.
    """
    click.echo("1 of 3: measure (zinfer sweep demo --resume)", err=True)
    printed = io.StringIO()
    with redirect_stdout(printed):
        code = _run(ctx, "sweep", "demo", "--resume")
    if code not in (0, PARTIAL):
        raise SystemExit(code)
    results = printed.getvalue().strip()
    for step, verb in ("2 of 3: draw", "plot"), ("3 of 3: decide", "best"):
        click.echo(f"{step} (zinfer {verb} {results})\n", err=True)
        if ended := _run(ctx, verb, results):
            raise SystemExit(ended)
    say("\n" + explanation(read(Path(results)).points, local.this_machine()))
    raise SystemExit(code)


def _run(ctx: click.Context, *words: str) -> int:
    group = ctx.find_root().command
    try:
        group.main(list(words), prog_name="zinfer", standalone_mode=False, obj=ctx.obj)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    return 0


def explanation(points: Sequence[Measurement], machine: Machine) -> str:
    """Return the text below the answer."""
    usable = [point for point in points if point.usable]
    cases = [point.case for point in usable]
    batches = [case.workload.batch_size for case in cases]
    gpu = machine.gpu_name if machine.gpu_count else None
    best = rates.winner(usable)
    assert best is not None  # the sweep succeeded
    noise = relative_half_width(best.output_tok_s_samples) or 0
    busy = "Its runs differ much (±), so this machine was busy: measure again before you trust it."
    random = "The weights are random: speeds are as with real ones, texts would be meaningless."
    cautions = {
        busy: noise > NOISY,
        "Without a GPU, offload copies within one memory and cannot pay.": gpu is None,
        random: any(case.load_format == "dummy" for case in cases),
    }
    runs, engines = max(len(point.ttft_ms) for point in usable), ", ".join(sorted({case.engine for case in cases}))
    remarks = "".join(f"  {text}\n" for text, holds in cautions.items() if holds)
    activate = "  source .venv/bin/activate\n" * (shutil.which("zinfer") is None)
    return f"""\
WHAT WAS MEASURED
  {counted(len(usable), "point")} on {gpu or "the CPU, since no GPU is here"}: {engines};
  weights on the {"GPU" if gpu else "device"} (offload none) and in host memory (offload cpu);
  {min(batches)} to {max(batches)} sequences at once; up to {runs} runs each, as mean ± 95% confidence.
WHAT THE ANSWER MEANS
  {best.case.batch_label} makes the most text: {figures(best.output_tok_s or 0)} tokens a second,
  prompts included. TTFT is the wait for a sequence's first token, TPOT the time between two tokens.
  A larger batch makes more tokens a second, and each reader waits longer.
{remarks}WHAT TO DO NEXT
{activate}  zinfer plan --model bloom-176b --machine h200,gh200-96gb      what a large model would do
  zinfer run --model ./my-checkpoint --prompt 'Once upon'       text of a model of yours
  zinfer sweep --model ./my-checkpoint && zinfer best           its fastest configuration here"""
