"""`zinfer plan`: what fits where and how fast it can be at best; nothing runs."""

import json
from typing import Any

import click

from zinfer.commands import options


@click.command("plan", short_help="Say what fits where and how fast it can be, without running.")
@click.option("-m", "--model", required=True, type=options.Words(), help=options.MODEL_HELP)
@click.option(
    "--machine", "machines", type=options.Words(), help="Catalogue names or machine.json files.  [default: this]"
)
@click.option(
    "--set", "settings", multiple=True, metavar="FIELD=VALUE",
    help="Replace a figure of every machine, as h2d_bandwidth=200GB/s. Repeatable.",
)  # fmt: skip
@click.option("--engine", type=options.Words(), default="stream", show_default=True)
@click.option("--offload", type=options.Words(options.OFFLOADS), default="none,cpu", show_default=True)
@click.option("--batch-size", type=options.Batches(), default="1,8,32", show_default=True, help="auto: the largest.")
@click.option("--input-len", type=options.Numbers(), default="512", show_default=True, help="Prompt tokens.")
@click.option("--output-len", type=options.Numbers(), default="32", show_default=True, help="Generated tokens.")
@click.option("--dtype", type=options.Dtype(), help="Weight type; the model's own by default.")
@click.option("--layers", type=click.IntRange(min=1), help="A slice: the model's first N layers only.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    model: tuple[str, ...],
    machines: tuple[str, ...] | None,
    settings: tuple[str, ...],
    engine: tuple[str, ...],
    offload: tuple[str, ...],
    batch_size: Any,
    input_len: tuple[int, ...],
    output_len: tuple[int, ...],
    dtype: Any,
    layers: int | None,
    as_json: bool,
) -> None:
    """Bytes on each tier, the largest batch, and the best times the links allow. Figures are predictions, not
    measurements: the physical limit of each step, which a real engine approaches from above.

    \b
    zinfer plan --model bloom-176b --machine h100-80gb,gh200-96gb --offload cpu
    zinfer plan --model bloom-176b --machine h100-80gb --set h2d_bandwidth=200GB/s --set host_bytes=1TB
    """
    from functools import reduce

    from rich.console import Console
    from rich.table import Table

    from zinfer import here, machine
    from zinfer.model import resolve
    from zinfer.plan import Plan, make_plan
    from zinfer.recipe import Sweep
    from zinfer.units import duration, gb

    wanted = Sweep.model_validate(
        {
            "model": model,
            "engine": engine,
            "offload": offload,
            "batch_size": batch_size,
            "input_len": input_len,
            "output_len": output_len,
            "layers": (layers,),
        }
    )
    plans: list[Plan] = []
    named = [machine.load(name) for name in machines] if machines else [here.this_machine()]
    places = [reduce(machine.override, settings, place) for place in named]
    for place in places:
        for load in wanted.loads():
            spec = resolve(load.model, dtype, layers)
            for lengths in wanted.lengths():
                case = wanted.case(load, "dummy", spec.dtype, lengths)
                largest = max(1, make_plan(case, spec, place).max_batch_size)
                batches = (largest,) if isinstance(wanted.batch_size, str) else wanted.batch_size
                plans += [make_plan(case.with_batch(batch), spec, place) for batch in batches]
    if as_json:
        rows = [plan.model_dump(mode="json", exclude={"model": {"layer_parameters"}}) for plan in plans]
        click.echo(
            json.dumps([row | {"output_tok_s": plan.output_tok_s} for row, plan in zip(rows, plans, strict=True)])
        )
        return
    title = "predicted limits, nothing was run"
    table = Table(
        "machine", "model", "engine", "batch", "GPU", "host", "largest batch", "prefill", "step", "bound by", "tok/s",
        title=title,
    )  # fmt: skip
    for plan in plans:
        fits = plan.fits and plan.case.workload.batch_size <= plan.max_batch_size
        times = (plan.prefill_s, plan.step_s, plan.output_tok_s)
        known = fits and None not in times
        table.add_row(
            plan.machine.name + "*" * bool(plan.machine.overridden),
            plan.case.model + (f" ({layers} layers)" if layers else ""),
            plan.case.label(),
            str(plan.case.workload.batch_size),
            gb(plan.gpu.total),
            gb(plan.host.total),
            str(plan.max_batch_size) if plan.fits else "-",
            duration(plan.prefill_s) if known and plan.prefill_s else "-",
            duration(plan.step_s) if known and plan.step_s else "-",
            (plan.bound_by or "-") if fits else "does not fit",
            f"{plan.output_tok_s:.2f}" if known and plan.output_tok_s else "-",
        )
    console = Console()
    # cells are cut to fit a terminal, never a file
    (console if console.is_terminal else Console(width=160)).print(table)
    for place in places:
        told = dict.fromkeys(("h2d_bandwidth", *place.overridden))
        click.echo(f"{place.name}: " + "; ".join(f"{field} {place.told(field)}" for field in told))
    for reason in dict.fromkeys(plan.why_not for plan in plans if plan.why_not):
        click.echo(reason, err=True)
