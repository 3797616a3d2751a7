"""`zinfer plan`: bytes on each tier, speed, and whether to stream at all; nothing runs."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, reduce
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zinfer.commands import options
from zinfer.commands.prices import price_options
from zinfer.core.engine import ENGINES, OptionError, conflict
from zinfer.core.machine import override

if TYPE_CHECKING:
    from zinfer.analysis.best import Objective
    from zinfer.commands.decision import DecisionCriteria
    from zinfer.core.case import Case
    from zinfer.core.engine import Options
    from zinfer.core.machine import Machine
    from zinfer.core.model import ModelSpec
    from zinfer.job.recipe import Sweep, SweepLoad
    from zinfer.plan.cost import Efficiency
    from zinfer.plan.plan import Plan
    from zinfer.record.measurement import Measurement
    from zinfer.record.store import Records
    from zinfer.record.study import Study

HOST_NEGLIGIBLE = 4 << 30  # bytes of host memory that every host has
DEFAULTS = {"engine": "stream", "offload": ("none", "cpu"), "batch_size": "auto"}
# options that become axes of `Case.options`, with the value that changes nothing
SCENARIOS = {
    "weight_codec": "auto", "kv_offload": "none", "kv_cache_dtype": "auto", "draft": "none", "experts": "auto",
    "gpus": 1,
}  # fmt: skip


@click.command("plan")
@click.argument("recipe", required=False)
@click.option(
    "--list", "listed", type=click.Choice(["models", "machines"]),
    help="List the catalogue instead, or show the one that RECIPE names: a model (catalogue name, folder, hub id), or "
    "a machine (catalogue name, machine.json) with the source of each figure.",
)  # fmt: skip
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
@click.option(
    "--batch-size",
    type=options.Batches(),
    help="Sequences at once; auto: the batch with the best throughput.  [default: auto]",
)
@click.option("--input-len", type=options.NUMBERS, help="Prompt tokens; 512,2048 plans both.  [default: 512]")
@click.option("--output-len", type=options.NUMBERS, help="Generated tokens.  [default: 32]")
@click.option("--dtype", type=options.Dtype(), metavar=options.DTYPE, help="Weight type.  [default: the model's own]")
@options.revision
@options.layers
@click.option(
    "--gpu-weights", type=options.GPU_WEIGHTS,
    help="Part of the offloaded weights that stays on the GPU: auto, a share (25%) or a size (40GiB).",
)  # fmt: skip
@options.shorthand("weight_codec")
@options.weights
@options.shorthand("kv_offload")
@options.shorthand("kv_cache_dtype")
@options.shorthand("draft")
@click.option(
    "--acceptance", type=click.FloatRange(0, 1, max_open=True),
    help="Chance that a draft is right if those before it were.  [default: as recorded for the model and --draft]",
)  # fmt: skip
@options.shorthand("experts")
@click.option("--gpus", type=options.NUMBERS, help="GPUs, each with its own link.  [default: 1]")
@click.option(
    "--calibrate", type=click.Path(exists=True, path_type=Path), metavar="RESULTS",
    help="Predict the speed that engines reach, from these records, instead of the physical limit.",
)  # fmt: skip
@click.option(
    "--sla", "levels", multiple=True, metavar="METRIC:STATISTIC:<=:VALUE",
    help="A service level to keep, such as ttft:mean:<=:2s or output_tok_s:mean:>=:30. Repeatable.",
)  # fmt: skip
@click.option(
    "--objective", type=click.Choice(["throughput", "cost", "latency"]), default="throughput", show_default=True,
    help="Quantity to choose the best configuration by.",
)  # fmt: skip
@price_options
@click.option(
    "--figure", type=click.Path(dir_okay=False, path_type=Path), help="Draw throughput over batch (png, svg)."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    recipe: str | None,
    listed: str | None,
    settings: tuple[str, ...],
    calibrate: Path | None,
    acceptance: float | None,
    figure: Path | None,
    as_json: bool,
    levels: tuple[str, ...],
    objective: "Objective",
    demand: str | None,
    deadline: str | None,
    utilisation: float,
    spare: int,
    gpu_hour_usd: float | None,
    host_hour_usd: float | None,
    power_usd_kwh: float | None,
    gpus_per_server: int,
    **given: Any,
) -> None:
    """Predict bytes on each tier, the largest batch, times and throughput of model x machine x engine x offload, and
    whether to stream.

    Without --calibrate the times are physical limits (the link, GPU memory and matrix products at their peaks), which
    no engine passes; with it they are predictions with an error band. RECIPE is a file, or a name in sweeps/ or among
    those that come with zinfer. Comma lists are axes. With --sla, --objective or prices the batch is the best that
    keeps the levels. A prediction is one value, which every statistic of a level is compared with.

    The exit code is 4 if nothing fits, or nothing keeps the levels.

    \b
    zinfer plan --model bloom-176b --machine h100-80gb,gh200-96gb --offload cpu --calibrate sweeps/results
    zinfer plan --model bloom-176b --machine h200 --gpu-weights auto --weights as-released,int4
    zinfer plan --model opt-30b --machine h100-80gb --sla 'ttft:mean:<=:2s' --gpu-hour-usd 2.50
    zinfer plan bloom-176b-machines --calibrate sweeps/results
    zinfer plan --list models
    """
    if listed is not None:
        from zinfer.commands import catalogue

        return (catalogue.models if listed == "models" else catalogue.machines)(recipe, as_json)
    from zinfer.commands import decision
    from zinfer.core.errors import NOTHING
    from zinfer.plan.published import beside
    from zinfer.plan.search import advice
    from zinfer.system import local, machines

    if power_usd_kwh is not None:
        raise click.UsageError("--power-usd-kwh needs a reading of the energy: no plan has one, `zinfer best` may")
    prices = {"gpu_hour_usd": gpu_hour_usd, "host_hour_usd": host_hour_usd, "gpus_per_server": gpus_per_server}
    criteria = decision.question(levels, objective, False, demand, deadline, utilisation, spare, **prices)
    wanted = _sweep(recipe, given)
    named = [machines.load(name) for name in wanted.machine] if wanted.machine else [local.this_machine()]
    places = [reduce(override, settings, place) for place in named]
    factors = _factors(calibrate)
    if acceptance is not None and all(_draft_of(load) == "none" for load in wanted.loads(planning=True)):
        raise click.UsageError("--acceptance is that of drafts: add --draft ngram, or --draft MODEL")
    recorded = _Recorded(acceptance, calibrate)
    groups = list(_plans(wanted, places, factors, criteria, recorded))
    plans = [plan for _, own in groups for plan in own]
    if figure is not None:
        _draw(figure, wanted, places, factors, recorded)
    answers = [criteria.answer(_as_points(own)) for _, own in groups] if criteria is not None else []
    if as_json:
        click.echo(json.dumps([_row(plan, recorded) for plan in plans], indent=1))
    else:
        for nth, (title, own) in enumerate(groups):
            _print(title, own, bool(factors), criteria)
            click.echo(advice(own))
            for line in (*_experts(own), *map(recorded.describe, own)):
                if line:
                    click.echo(line)
            if criteria is not None:
                click.echo(_decided(answers[nth], own))
        click.echo()
        for place in places:
            _print_machine(place, bool(factors))
        for engine, told in factors.items():
            if any(plan.case.engine == engine for plan in plans):
                click.echo(f"{engine}: {told.describe()}")
        for claim in beside(
            () if given["model"] else wanted.published, plans, factors
        ):  # they are of the recipe's model
            click.echo(claim.describe())
    for reason in dict.fromkeys(_remarks(plans)):
        click.echo(reason, err=True)
    none_kept = answers and all(answer.decision.point is None for answer in answers)
    if none_kept or not any(plan.holds for plan in plans):
        raise SystemExit(NOTHING)


def _as_points(plans: "Sequence[Plan]") -> "tuple[Measurement, ...]":
    """Return predictions in the form of points, so that levels and prices are applied as to measured ones. They are
    never written, nor shown as measured."""
    from zinfer.record.measurement import Measurement

    return tuple(
        Measurement(
            case=plan.case, status="ok", machine=plan.machine.name, ttft_ms=(plan.prefill_s * 1e3,),
            step_ms=((plan.step_s * 1e3,) * (plan.case.workload.output_len - 1),),
        )
        for plan in plans
        if plan.holds and plan.prefill_s is not None and plan.step_s is not None
    )  # fmt: skip


def _decided(answer: Any, plans: "Sequence[Plan]") -> str:
    """Return the sentences on levels and prices for one table."""
    from zinfer.commands import decision

    found = answer.decision
    point = found.point or found.nearest
    if point is None:
        return "No plan that fits has known times."
    levels = [f"  {kept.sla.describe()}: predicted {kept.value}{kept.missed}" for kept in found.kept]
    where = f"{point.case.label()}, batch {point.case.workload.batch_size}"
    if found.point is None:
        return "\n".join([f"No plan keeps every level. The nearest is {where}:", *levels])
    lines = [f"Best by {found.objective}, {found.keeping} of {len(plans)} plans to choose from: {where}", *levels]
    return "\n".join([*lines, *(f"  {line}" for line in decision.costs(answer))])


def _print_machine(place: "Machine", calibrated: bool) -> None:
    """Print the link's rate, the figures that were replaced, and the peaks that limits are made of."""
    shown = dict.fromkeys(("h2d_bandwidth", *place.overridden))
    click.echo(f"{place.name}: " + "; ".join(f"{field} {place.describe(field)}" for field in shown))
    peak = place.at_peak().model_copy(update={"sources": {}})
    raised = [field for field in ("h2d_bandwidth", "hbm_bandwidth", "matmul_flops") if getattr(peak, field)]
    if not calibrated and raised:
        told = ", ".join(f"{field} {peak.describe(field).partition(' (')[0]}" for field in raised)
        click.echo(f"{place.name}: limits are made of {told}")


def _remarks(plans: "Sequence[Plan]") -> "Iterator[str]":
    """Yield what a reader has to know of plans: why one does not fit, what it assumes, and that no engine runs it."""
    for plan in plans:
        if plan.why_not:
            yield plan.why_not
        elif not plan.holds and not plan.max_batch_size:
            what = f"{plan.case.model} with {plan.case.label()}"
            yield f"{what} needs nearly all memory of {plan.machine.name}: no room is left for a sequence"
    for plan in plans:
        yield from _assumptions(plan)
    for option in sorted({key for plan in plans for key in _hypothetical(plan)}):
        yield f"{option} is a what-if: no engine of zinfer runs it so"


def _assumptions(plan: "Plan") -> "Iterator[str]":
    """Yield the memory that a plan needs of a tier whose size is not known."""
    from math import ceil

    from zinfer.plan.plan import HOST_SHARE

    place = plan.machine
    if not plan.holds:
        return
    for tier, known in (("host", place.host_bytes), ("nvme", place.nvme_bytes)):
        need = getattr(plan, tier).total
        if known is None and need > (0 if tier == "nvme" else HOST_NEGLIGIBLE):
            size = f"{ceil(need / HOST_SHARE / (1 << 30))}GiB"
            what = f"{place.name}: its {tier} memory is not known; {plan.case.label()} fits only with {size}"
            yield f"{what} (--set {tier}_bytes={size} says that it is there)"


def _hypothetical(plan: "Plan") -> list[str]:
    """Return the options of a plan that its engine does not have."""
    known = ENGINES[plan.case.engine].options.model_fields if plan.case.engine in ENGINES else {}
    return [f"{key}={value} with {plan.case.engine}" for key, value in plan.case.options if key not in known]


def _sweep(recipe: str | None, given: dict[str, Any]) -> "Sweep":
    """Return the recipe with the given options in place of its own; one of requests without other lengths has the mean
    lengths of its first load of requests."""
    from zinfer.job.recipe import make_sweep, read_toml, sweep_recipe, with_options
    from zinfer.job.requests import request_sets

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
        raise click.UsageError(
            "say what to plan: --model NAME, or a recipe (`zinfer plan --list models` lists the catalogue)"
        )
    wanted = make_sweep(fields, recipe or "the command line")
    served = () if {"input_len", "output_len"} & fields.keys() else request_sets(wanted)
    if not served:
        return wanted
    input_len, output_len = served[0].mean_lengths
    return wanted.model_copy(update={"input_len": (input_len,), "output_len": (output_len,)})


def _factors(results: Path | None) -> "Mapping[str, Efficiency]":
    from zinfer.analysis import calibrate
    from zinfer.commands.failure import Failure
    from zinfer.core.errors import NOTHING

    if results is None:
        return {}
    found = calibrate.fit(calibrate.load_points(results), calibrate.load_machines(results))
    if not found:
        raise Failure(f"{results} has no point to calibrate with: measure first, with `zinfer sweep`", NOTHING)
    return found


def _plans(
    wanted: "Sweep",
    places: "list[Machine]",
    factors: "Mapping[str, Efficiency]",
    criteria: "DecisionCriteria | None",
    recorded: "_Recorded",
) -> "Iterator[tuple[str, list[Plan]]]":
    """Yield the plans of each model, machine and pair of lengths, with a title. Loads that no engine can run are left
    out.

    Raises ModelError if all lengths exceed the models' positions, UsageError if no engine has the offload.
    """
    from zinfer.checkpoint.resolve import resolve
    from zinfer.core.model import ModelError, check_positions
    from zinfer.plan.cost import Efficiency

    runnable = [load for load in wanted.loads(planning=True) if load.offload in ENGINES[load.engine].offloads]
    packed = {load: conflict(load.engine, (), load.offload, load.weights, load.gpu_weights) for load in runnable}
    refusals = list(dict.fromkeys(reason for reason in packed.values() if reason is not None))
    if refusals and None not in packed.values():
        raise OptionError(refusals[0])
    for reason in refusals:
        click.echo(f"left out: {reason}", err=True)
    runnable = [load for load, reason in packed.items() if reason is None]
    if not runnable:
        able = [name for name, kind in ENGINES.items() if kind.offloads & set(wanted.offload)]
        lacking = f"engine {', '.join(wanted.engine)} has no offload {', '.join(wanted.offload)}"
        raise click.UsageError(f"{lacking}; choose from --engine {', '.join(able)}")
    loads: dict[tuple[str, int | None], list[SweepLoad]] = {}
    for load in runnable:
        loads.setdefault((load.model, load.layers), []).append(load)
    refused: list[ModelError] = []
    yielded = False
    for place, (input_len, output_len), name, layers in product(places, wanted.lengths(), wanted.model, wanted.layers):
        own, cases = [], set()
        specs = {form: resolve(name, wanted.dtype, layers, form) for form in {load.weights for load in runnable}}
        spec = next(iter(specs.values()))
        try:
            check_positions(spec, input_len, output_len)
        except ModelError as error:
            refused.append(error)
            continue
        for load in loads[name, layers]:
            case = load.case("dummy", spec.dtype, input_len, output_len)
            case = case.model_copy(update={"options": _telling(load)})
            if case in cases:
                continue
            cases.add(case)
            told = factors.get(load.engine, Efficiency()) if factors else None
            spec = recorded.routed(specs[load.weights])
            if load.draft_model is not None:
                small = resolve(load.draft_model, spec.dtype)
                spec = spec.model_copy(update={"draft": small})
            own += _batches(wanted, case, spec, place, told, criteria, recorded)
        part = "" if layers is None else f", {layers} layers"
        positions = f" ({spec.max_position:,} positions)" if spec.max_position else ""
        machine = f"{place.name}{'*' * bool(place.overridden)}"
        yielded = True
        yield f"{name}{part}{positions} on {machine}, {input_len} in / {output_len} out", own
    if refused and not yielded:
        raise refused[-1]
    for one in refused:
        click.echo(f"left out: {one}", err=True)


def _batches(
    wanted: "Sweep",
    case: Any,
    spec: "ModelSpec",
    place: "Machine",
    told: "Efficiency | None",
    criteria: "DecisionCriteria | None",
    recorded: "_Recorded",
) -> "list[Plan]":
    """Plan a case at the batches that were asked for; with ``auto`` at the best one, which keeps the levels if any
    does. Drafts count in the times, but the batch that is best without them is taken."""
    from zinfer.plan.plan import make_plan
    from zinfer.plan.search import batches_within, best_batch

    if not isinstance(wanted.batch_size, str):
        sizes = [case.with_batch(size) for size in wanted.batch_size]
        first = make_plan(sizes[0], spec, place, factors=told)
        edge = first.max_batch_size  # the same for all of them, and it takes the most time
        return [
            recorded.counted(one)
            for one in (first, *(make_plan(one, spec, place, None, told, edge) for one in sizes[1:]))
        ]
    if criteria is None:
        return [recorded.counted(best_batch(case, spec, place, told))]

    def kept(plan: "Plan") -> bool:
        return criteria.answer(_as_points([recorded.counted(plan)])).decision.point is not None

    plans = [recorded.counted(plan) for plan in batches_within(case, spec, place, told, kept)]
    chosen = criteria.answer(_as_points(plans)).decision
    point = chosen.point or chosen.nearest
    return [plan for plan in plans if point is None or plan.case == point.case][:1]


def _telling(load: "SweepLoad") -> "Options":
    """Return the options that change something: a codec does nothing for weights that stay."""
    idle = SCENARIOS | ({"weight_codec": dict(load.options).get("weight_codec")} if load.offload == "none" else {})
    return tuple((key, value) for key, value in load.options if key not in idle or idle[key] != value)


def _row(plan: "Plan", recorded: "_Recorded") -> dict[str, Any]:
    names = ("output_tok_s", "prefill_tok_s", "decode_tok_s", "e2e_s", "bounds")
    derived = {name: getattr(plan, name) for name in names}
    derived |= {"fits": plan.holds, "assumes": list(_assumptions(plan)), "what_if": _hypothetical(plan)}
    if plan.drafting is not None:
        derived["acceptance_from"] = recorded.source(plan)
    if plan.placement.experts == "on-demand":
        derived["routing_from"] = _routing(plan)
    return plan.model_dump(mode="json", exclude={"model": {"layers", "config", "draft", "routing"}}) | derived


def _print(title: str, plans: "list[Plan]", calibrated: bool, criteria: "DecisionCriteria | None") -> None:
    from zinfer.commands.out import console, table
    from zinfer.core.units import duration, figures, gb

    def told(plan: "Plan", value: float | None, form: "Callable[[float], str]") -> str:
        return form(value) if plan.holds and value else "-"

    cells = []
    for plan in plans:
        band = "" if not calibrated else f" ± {plan.error:.0%}" if plan.error else " (no record)"
        cost = ""
        if criteria is not None and criteria.prices.known and plan.holds:
            paid = criteria.answer(_as_points([plan])).decision.cost
            cost = figures(paid.usd_per_mtok) if paid is not None and paid.usd_per_mtok is not None else ""
        cells.append(
            (
                plan.case.label(),
                str(plan.case.workload.batch_size),
                str(plan.max_batch_size) if plan.fits else "-",
                told(plan, plan.output_tok_s, figures) + (band if plan.holds and plan.output_tok_s else ""),
                told(plan, plan.prefill_s, duration),
                told(plan, plan.step_s, duration),
                told(plan, plan.prefill_tok_s, figures),
                told(plan, plan.decode_tok_s, figures),
                (", ".join(plan.bounds) or "-") if plan.holds else "does not fit",
                cost,
                gb(plan.streamed_bytes) if plan.streamed_bytes else "",
                gb(plan.gpu.total),
                gb(plan.host.total),
                gb(plan.nvme.total) if plan.nvme.total else "",
            )
        )
    columns = (
        "configuration", "#batch", "#of", "#tok/s", "#TTFT", "#TPOT", "#prefill tok/s", "#decode tok/s", "bound by",
        "#USD/Mtok", "#over the link", "#GPU", "#host", "#NVMe",
    )  # fmt: skip
    what = "predicted" if calibrated else "physical limits"
    drop = ("over the link", "NVMe", "GPU", "host")
    console().print(table(f"{title}: {what}, nothing was run", columns, cells, drop=drop))


def _draft_of(load: "SweepLoad | Case") -> str:
    return str(dict(load.options).get("draft", "none"))


class _Recorded:
    """Acceptance of drafts, which may be `stated`, and routing of mixtures, by the records at `results`, by default
    those in sweeps/results."""

    def __init__(self, stated: float | None, results: Path | None) -> None:
        from zinfer.system.local import RESULTS

        self._stated, self._results = stated, results or RESULTS

    @cached_property
    def _records(self) -> "Records":
        from zinfer.record.store import Records, read

        return read(self._results) if self._results.exists() else Records()

    @cached_property
    def _traces(self) -> "Sequence[Study]":
        from zinfer.record import study
        from zinfer.system.local import RESULTS

        folders = (folder for folder in dict.fromkeys((RESULTS, self._results)) if folder.is_dir())
        return [run for folder in folders for run in study.read(folder, "routing").runs]

    def routed(self, spec: "ModelSpec") -> "ModelSpec":
        """Return a model with its routing, if that was recorded."""
        from zinfer.analysis.routing import routing_of

        if spec.num_experts < 2:
            return spec
        return spec.model_copy(update={"routing": routing_of(spec, self._traces, self._records.points)})

    def _accepted(self, plan: "Plan") -> tuple[int, int]:
        from zinfer.analysis.requests import acceptance

        return acceptance(self._records.requests, plan.case.model, _draft_of(plan.case))

    def counted(self, plan: "Plan") -> "Plan":
        """Return a plan with what its drafts gain, if that is known."""
        if _draft_of(plan.case) == "none":
            return plan
        if self._stated is not None:
            return plan.with_acceptance(self._stated)
        right, checked = self._accepted(plan)
        return plan.with_acceptance(right / checked) if checked else plan

    def source(self, plan: "Plan") -> str:
        """Return how the acceptance of a plan's drafts was come by."""
        if self._stated is not None:
            return "stated, not measured"
        right, checked = self._accepted(plan)
        return f"measured: {right:,} of {checked:,} drafts in the records"

    def describe(self, plan: "Plan") -> str:
        """Return what a plan's drafts gain, in a sentence; nothing without drafts."""
        from zinfer.core.units import counted, duration

        where, found = f"{plan.case.label()}, batch {plan.case.workload.batch_size}", plan.drafting
        if _draft_of(plan.case) == "none" or not plan.holds:
            return ""
        if found is None:
            why = "no record says how often a draft is right"
            return f"{where}: {why}, so times are those without drafts; --acceptance states it."
        told = (
            f"{where}: {found.tokens_a_pass:.2f} tokens of each row from a pass with {counted(found.drafts, 'draft')}"
        )
        told += f", of {duration(found.pass_s)}"
        told += f" and {duration(found.drafting_s)} of drafting" if found.drafting_s else ""
        return f"{told}; acceptance {found.acceptance:.2f} ({self.source(plan)})."


def _experts(plans: "Sequence[Plan]") -> "Iterator[str]":
    """Yield which experts of a mixture cross the link, in a sentence for each plan that streams."""
    from zinfer.core.units import gb
    from zinfer.plan.cost import chooses

    for plan in plans:
        model, setup, tokens = plan.model, plan.placement, _step_tokens(plan)
        if model.num_experts < 2 or not plan.streamed_bytes or setup.tier != "host":
            continue
        where = f"{plan.case.label()}, batch {plan.case.workload.batch_size}"
        if setup.experts == "all":
            yield f"{where}: all experts come in every step."
            continue
        touched = model.touched_share(tokens) if chooses(setup, tokens) else 1.0
        stay = f", {setup.cached_experts} experts stay on the GPU" if setup.cached_experts else ""
        yield (
            f"{where}: experts on demand; a step touches {touched:.0%} of the experts and brings "
            f"{gb(plan.streamed_bytes)}{stay}; passes of {setup.whole_tokens} tokens or more bring all."
        )
        yield _routing(plan)


def _step_tokens(plan: "Plan") -> int:
    """Return the tokens of a decode step, drafts included."""
    return plan.case.workload.batch_size * (1 + (0 if plan.drafting is None else plan.drafting.drafts))


def _routing(plan: "Plan") -> str:
    """Return what a step with experts on demand is predicted from, in a sentence: a record of the model's routing, or
    the assumption that each token chooses evenly. A step of one token whose experts all come needs neither."""
    from zinfer.plan.cost import cached_share, chooses

    model, setup, tokens = plan.model, plan.placement, _step_tokens(plan)
    if not chooses(setup, tokens):
        return ""
    known: list[str] = []
    assumed: list[str] = []
    recorded, cached = model.routing, cached_share(setup, model)
    if tokens > 1:
        (known if recorded is not None and recorded.touched else assumed).append(
            f"{model.touched_share(tokens):.0%} of the experts touched"
        )
    if setup.cached_experts:
        is_known = recorded is not None and recorded.hit_rate("lfu", cached, tokens) is not None
        (known if is_known else assumed).append(f"{model.hits('lfu', cached, tokens):.0%} cache hits")
    if plan.factors is not None:  # limits take it that the link never waits for a router
        right = f"{model.guess_accuracy:.0%} right guesses"
        (known if recorded is not None and recorded.guessed is not None else assumed).append(right)
    parts = [f"{', '.join(known)} by {recorded.source}"] if known and recorded is not None else []
    parts += [f"{', '.join(assumed)} as if tokens chose evenly (`zinfer study routing`)"] if assumed else []
    return f"Predicted: {'; '.join(parts)}." if parts else ""


def _draw(
    path: Path,
    wanted: "Sweep",
    places: "list[Machine]",
    factors: "Mapping[str, Efficiency]",
    recorded: "_Recorded",
) -> None:
    from zinfer.report.plot import figures as plot
    from zinfer.report.plot import style
    from zinfer.system import atomic

    form = path.suffix.removeprefix(".")
    if form not in ("png", "svg"):
        raise click.BadParameter(f"{path}: end it in .png or .svg", param_hint="--figure")
    edges = {max(1, plan.max_batch_size) for _, own in _plans(wanted, places, factors, None, recorded) for plan in own}
    sizes = edges | {1 << power for power in range(max(edges).bit_length())}
    every = wanted.model_copy(update={"batch_size": tuple(sorted(sizes))})
    drawn = plot.prediction([plan for _, own in _plans(every, places, factors, None, recorded) for plan in own])
    if drawn is None:
        click.echo(f"{path} was not drawn: no plan has a throughput", err=True)
        return
    atomic.write(path, style.render(drawn, "svg" if form == "svg" else "png"))
    click.echo(str(path), err=True)
