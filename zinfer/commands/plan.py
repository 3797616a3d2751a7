"""`zinfer plan`: bytes on each tier, speed, and whether to stream at all; nothing runs."""

import json
from collections.abc import Iterator, Mapping
from functools import reduce
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zinfer.commands import options
from zinfer.spec.engine import PlanOptions, values

if TYPE_CHECKING:
    from zinfer.job.recipe import Sweep, SweepLoad
    from zinfer.plan.cost import Efficiency
    from zinfer.plan.plan import Plan
    from zinfer.spec.engine import Options
    from zinfer.spec.machine import Machine

DEFAULTS = {"engine": "stream", "offload": ("none", "cpu"), "batch_size": "auto"}
# options that become axes of `Case.options`, with the value that changes nothing
SCENARIOS = {"weight_codec": "auto", "weight_bits": 16, "kv_offload": "none", "kv_cache_dtype": "auto", "gpus": 1}


@click.command("plan")
@click.argument("recipe", required=False)
@click.option("-m", "--model", type=options.Words(), help=options.MODEL_HELP)
@click.option("--machine", type=options.Words(), help="Catalogue names or machine.json files.  [default: this one]")
@click.option(
    "--set", "settings", multiple=True, metavar="FIELD=VALUE",
    help="Replace a figure of every machine, as h2d_bandwidth=200GB/s. Repeatable.",
)  # fmt: skip
@click.option("--engine", type=options.Words(), help=options.ENGINES_HELP)
@click.option(
    "--offload", type=options.Words(options.OFFLOADS),
    help="Weights on the GPU (none), in host memory (cpu) or on an NVMe drive (nvme).  [default: none,cpu]",
)  # fmt: skip
@click.option("--batch-size", type=options.Batches(), help="auto: the batch with the best throughput.  [default: auto]")
@click.option("--input-len", type=options.Numbers(), help="Prompt tokens.  [default: 512]")
@click.option("--output-len", type=options.Numbers(), help="Generated tokens.  [default: 32]")
@click.option("--dtype", type=options.Dtype(), help="Weight type.  [default: the model's own]")
@click.option("--layers", type=click.IntRange(min=1), help="A slice: the model's first N layers only.")
@click.option(
    "--gpu-weights", type=options.GpuWeights(),
    help="Part of the offloaded weights that stays on the GPU: auto, a share (25%) or a size (40GiB).",
)  # fmt: skip
@options.shorthand("weight_codec")
@click.option(
    "--weight-bits", type=options.Words(tuple(values(PlanOptions.model_fields["weight_bits"]))),
    help="Bits of a weight (16, 8 or 4), with 16-bit scales.  [default: 16]",
)  # fmt: skip
@options.shorthand("kv_offload")
@options.shorthand("kv_cache_dtype")
@click.option("--gpus", type=options.Numbers(), help="GPUs, each with its own link.  [default: 1]")
@click.option(
    "--calibrate", type=click.Path(exists=True, path_type=Path), metavar="RESULTS",
    help="Predict the speed that engines reach, from these records, instead of the physical limit.",
)  # fmt: skip
@click.option(
    "--figure", type=click.Path(dir_okay=False, path_type=Path), help="Draw throughput over batch (png, svg)."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    recipe: str | None,
    settings: tuple[str, ...],
    calibrate: Path | None,
    figure: Path | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Predict bytes on each tier, the largest batch, times and throughput of model x machine x engine x offload, and
    whether to stream.

    Without --calibrate the times are the physical limits, which an engine approaches from above; with it they are
    predictions with an error band. RECIPE is a file, or a name in sweeps/ or among those that come with
    zinfer. Comma lists are axes.

    \b
    zinfer plan --model bloom-176b --machine h100-80gb,gh200-96gb --offload cpu --calibrate sweeps/results
    zinfer plan --model bloom-176b --machine h200 --weight-bits 16,4
    zinfer plan bloom-176b-machines --calibrate sweeps/results
    """
    from zinfer.plan.published import beside
    from zinfer.plan.search import advice
    from zinfer.spec import local, machine

    wanted = _sweep(recipe, given)
    named = [machine.load(name) for name in wanted.machine] if wanted.machine else [local.this_machine()]
    places = [reduce(machine.override, settings, place) for place in named]
    factors = _factors(calibrate)
    groups = list(_plans(wanted, places, factors))
    plans = [plan for _, own in groups for plan in own]
    if figure is not None:
        _draw(figure, wanted, places, factors)
    if as_json:
        click.echo(json.dumps([_row(plan) for plan in plans], indent=1))
        return
    for title, own in groups:
        _print(title, own, bool(factors))
        click.echo(advice(own))
    click.echo()
    for place in places:
        shown = dict.fromkeys(("h2d_bandwidth", *place.overridden))
        click.echo(f"{place.name}: " + "; ".join(f"{field} {place.describe(field)}" for field in shown))
    for engine, told in factors.items():
        if any(plan.case.engine == engine for plan in plans):
            click.echo(f"{engine}: {told.describe()}")
    for claim in beside(wanted.published, plans, factors):
        click.echo(claim.describe())
    for reason in dict.fromkeys(plan.why_not for plan in plans if plan.why_not):
        click.echo(reason, err=True)


def _sweep(recipe: str | None, given: dict[str, Any]) -> "Sweep":
    """Return the recipe with the given options in place of its own."""
    from zinfer.job.recipe import make_sweep, read_toml, sweep_recipe, with_options

    fields: dict[str, Any] = {}
    if recipe is not None:
        fields = read_toml(sweep_recipe(recipe))
    scenarios = {key: given.pop(key) for key in SCENARIOS}
    fields = DEFAULTS | fields | {key: value for key, value in given.items() if value is not None}
    for key, asked in scenarios.items():
        if asked is not None:
            axis = tuple(int(value) if str(value).isdigit() else value for value in asked)
            fields = with_options(fields, {key: axis}, recipe or "the command line")
    if "model" not in fields:
        raise click.UsageError("say what to plan: --model NAME, or a recipe (`zinfer models` lists the catalogue)")
    return make_sweep(fields, recipe or "the command line")


def _factors(results: Path | None) -> "Mapping[str, Efficiency]":
    from zinfer.analysis import calibrate
    from zinfer.cli import Failure
    from zinfer.spec.errors import NOTHING

    if results is None:
        return {}
    found = calibrate.fit(calibrate.load_points(results), calibrate.load_machines(results))
    if not found:
        raise Failure(f"{results} has no point to calibrate with: measure first, with `zinfer sweep`", NOTHING)
    return found


def _plans(
    wanted: "Sweep", places: "list[Machine]", factors: "Mapping[str, Efficiency]"
) -> "Iterator[tuple[str, list[Plan]]]":
    """Yield the plans of each model, machine and pair of lengths, with a title."""
    from zinfer.plan.cost import Efficiency
    from zinfer.plan.plan import make_plan
    from zinfer.plan.search import best_batch
    from zinfer.spec.model import check_positions
    from zinfer.spec.resolve import resolve

    loads: dict[tuple[str, int | None], list[SweepLoad]] = {}
    for load in wanted.loads(planning=True):
        loads.setdefault((load.model, load.layers), []).append(load)
    for place, (input_len, output_len), name, layers in product(places, wanted.lengths(), wanted.model, wanted.layers):
        own, cases = [], set()
        spec = resolve(name, wanted.dtype, layers)
        for load in loads[name, layers]:
            check_positions(spec, input_len, output_len)
            case = load.case("dummy", spec.dtype, input_len, output_len)
            case = case.model_copy(update={"options": _telling(load)})
            if case in cases:
                continue
            cases.add(case)
            told = factors.get(load.engine, Efficiency()) if factors else None
            if isinstance(wanted.batch_size, str):
                own.append(best_batch(case, spec, place, told))
            else:
                sizes = [case.with_batch(size) for size in wanted.batch_size]
                first = make_plan(sizes[0], spec, place, factors=told)
                edge = first.max_batch_size  # the same for all of them, and it takes the most time
                own += [first, *(make_plan(one, spec, place, None, told, edge) for one in sizes[1:])]
        part = "" if layers is None else f", {layers} layers"
        yield f"{name}{part} on {place.name}{'*' * bool(place.overridden)}, {input_len} in / {output_len} out", own


def _telling(load: "SweepLoad") -> "Options":
    """Return the options that change something: a codec does nothing for weights that stay."""
    idle = SCENARIOS | ({"weight_codec": dict(load.options).get("weight_codec")} if load.offload == "none" else {})
    return tuple((key, value) for key, value in load.options if key not in idle or idle[key] != value)


def _row(plan: "Plan") -> dict[str, Any]:
    derived = {"output_tok_s": plan.output_tok_s, "e2e_s": plan.e2e_s, "fits": plan.fits, "bounds": plan.bounds}
    return plan.model_dump(mode="json", exclude={"model": {"layers", "config"}}) | derived


def _print(title: str, plans: "list[Plan]", calibrated: bool) -> None:
    from rich.table import Table

    from zinfer.commands.out import console
    from zinfer.spec.units import duration, figures, gb

    what = "predicted" if calibrated else "physical limits"
    table = Table(
        "configuration", "batch", "of", "GPU", "host", "NVMe", "over the link", "TTFT", "TPOT", "bound by", "tok/s", "",
        title=f"{title}: {what}, nothing was run",
    )  # fmt: skip
    for plan in plans:
        size = plan.case.workload.batch_size
        fits = plan.fits and size <= plan.max_batch_size
        band = (
            "limit" if plan.error is None and not calibrated else f"± {plan.error:.0%}" if plan.error else "no record"
        )
        table.add_row(
            plan.case.label(),
            str(size),
            str(plan.max_batch_size) if plan.fits else "-",
            gb(plan.gpu.total),
            gb(plan.host.total),
            gb(plan.nvme.total) if plan.nvme.total else "-",
            gb(plan.streamed_bytes) if plan.streamed_bytes else "-",
            duration(plan.prefill_s) if fits and plan.prefill_s else "-",
            duration(plan.step_s) if fits and plan.step_s else "-",
            (", ".join(plan.bounds) or "-") if fits else "does not fit",
            figures(plan.output_tok_s) if fits and plan.output_tok_s else "-",
            band if fits and plan.output_tok_s else "",
        )
    console().print(table)


def _draw(path: Path, wanted: "Sweep", places: "list[Machine]", factors: "Mapping[str, Efficiency]") -> None:
    from zinfer.report.plot import figures as plot
    from zinfer.report.plot import style
    from zinfer.spec import atomic

    form = path.suffix.removeprefix(".")
    if form not in ("png", "svg"):
        raise click.BadParameter(f"{path}: end it in .png or .svg", param_hint="--figure")
    edges = {max(1, plan.max_batch_size) for _, own in _plans(wanted, places, factors) for plan in own}
    sizes = edges | {1 << power for power in range(max(edges).bit_length())}
    every = wanted.model_copy(update={"batch_size": tuple(sorted(sizes))})
    drawn = plot.prediction([plan for _, own in _plans(every, places, factors) for plan in own])
    if drawn is not None:
        atomic.write(path, style.render(drawn, "svg" if form == "svg" else "png"))
        click.echo(str(path), err=True)
