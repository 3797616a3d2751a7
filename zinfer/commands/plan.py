"""`zinfer plan`: bytes on each tier, speed, and whether to stream at all; nothing runs."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, cached_property, reduce
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from zinfer.commands import options
from zinfer.commands.out import say
from zinfer.commands.prices import PerMachine, sizing_options
from zinfer.core.engine import ENGINES, OptionError, conflict
from zinfer.core.machine import override

if TYPE_CHECKING:
    from zinfer.commands.decision import DecisionCriteria, GroupDecision
    from zinfer.commands.ranking import Question
    from zinfer.core.case import Case
    from zinfer.core.engine import Options
    from zinfer.core.machine import Machine
    from zinfer.core.model import ModelSpec
    from zinfer.job.recipe import Sweep, SweepLoad
    from zinfer.plan.planner import Plan, Planner
    from zinfer.plan.times import Efficiency
    from zinfer.record.store import Records
    from zinfer.record.study import Study

SHIPPED = Path(str(files("zinfer"))) / "catalog" / "calibration.json"  # `--calibrate` without a value
ALL = "all"
DEFAULTS = {"engine": "stream", "offload": ("none", "cpu"), "batch_size": "auto"}
# options that become axes of `Case.options`, with the value that changes nothing
SCENARIOS = {
    "weight_codec": "auto",
    "kv_offload": "auto",
    "kv_cache_dtype": "auto",
    "draft": "none",
    "experts": "auto",
    "gpus": 1,
}


# options of `zinfer.commands.ranking.Question`
ASKED = ("levels", "objective", "demand", "deadline", "utilisation", "spare", "host_hour_usd", "gpus_per_server")


@click.command("plan")
@click.argument("recipe", required=False)
@click.option(
    "--list",
    "listed",
    type=click.Choice(["models", "machines"]),
    help="List the catalogue instead, or show the one that RECIPE names: a model (catalogue name, folder, hub id), or "
    "a machine (catalogue name, machine.json) with the source of each figure.",
)
@options.models
@click.option(
    "--machine",
    type=options.Words(),
    help="Catalogue names or machine.json files, or all of the catalogue; several are ranked.  [default: this one]",
)
@click.option("--details", is_flag=True, help="Show the table of each machine, too, where several are ranked.")
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="FIELD=VALUE",
    help="Replace a figure of every machine, as h2d_bandwidth=200GB/s. Repeatable.",
)
@click.option(
    "--host-memory",
    type=PerMachine(click.STRING),
    multiple=True,
    help="Memory of the host, as 128GiB or rtx-4090=64GiB,h200=1TiB. Repeatable.",
)
@click.option("--engine", type=options.Words(), help=options.ENGINES_HELP)
@options.offloads
@click.option(
    "--batch-size",
    type=options.BATCHES,
    help="Sequences at once; auto: the batch with the best throughput.  [default: auto]",
)
@click.option("--input-len", type=options.NUMBERS, help="Prompt tokens; 512,2048 plans both.  [default: 512]")
@click.option("--output-len", type=options.NUMBERS, help="Generated tokens.  [default: 32]")
@options.dtype
@options.revision
@options.layers
@options.gpu_weights
@options.shorthand("weight_codec")
@options.weights
@options.shorthand("kv_offload")
@options.shorthand("kv_cache_dtype")
@options.shorthand("draft")
@click.option(
    "--acceptance",
    type=click.FloatRange(0, 1, max_open=True),
    help="Chance that a draft is right if those before it were.  [default: as recorded for the model and --draft]",
)
@options.shorthand("experts")
@click.option("--gpus", type=options.NUMBERS, help="GPUs, each with its own link.  [default: 1]")
@click.option(
    "--calibrate",
    type=click.Path(exists=True, path_type=Path),
    metavar="[RESULTS]",
    is_flag=False,
    flag_value=str(SHIPPED),
    help="Predict the speed that engines reach, instead of the physical limit: by these records, or by the calibration "
    "that comes with zinfer if none are given.",
)
@click.option(
    "--sla",
    "--want",
    "levels",
    multiple=True,
    metavar="LEVEL",
    help="A service level to keep: 'ttft<=30s', 'tpot<=100ms', 'e2e<=5min', '20 tok/s' of the batch, '5 tok/s/user', "
    "or METRIC:STATISTIC:<=:VALUE. Repeatable.",
)
@click.option(
    "--objective",
    type=click.Choice(["throughput", "cost", "latency"]),
    help="Quantity to choose the best configuration and machine by.  [default: cost with --price, else throughput]",
)
@click.option(
    "--price",
    "--gpu-hour-usd",
    "stated",
    type=PerMachine(click.FloatRange(min=0)),
    multiple=True,
    help="USD of a GPU-hour, as 2.50 or rtx-4090=0.4. Repeatable.  [default: the catalogue's assumption]",
)
@click.option(
    "--prompts",
    metavar="NUMBER",
    help="Prompts to answer, as 100k: the hours and USD on one machine, and with --deadline the GPUs.",
)
@sizing_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    recipe: str | None,
    listed: str | None,
    settings: tuple[str, ...],
    details: bool,
    host_memory: tuple[tuple[tuple[str, str], ...], ...],
    stated: tuple[tuple[tuple[str, float], ...], ...],
    prompts: str | None,
    calibrate: Path | None,
    acceptance: float | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Predict memory, speed and the best batch, and whether to stream.

    Comma lists are axes: model x machine x engine x offload. Several machines are ranked in one table, by tokens a
    second or by cost. Without --calibrate the times are physical limits (the link, GPU memory and matrix products at
    their peaks), which no engine passes; with it they are predictions with an error band. RECIPE is a file, or a name
    in sweeps/ or among those that come with zinfer. With --sla, --objective or prices the batch is the best that keeps
    the levels. A prediction is one value, which every statistic of a level is compared with.

    The exit code is 4 if nothing fits, or nothing keeps the levels.

    \b
    zinfer plan --model bloom-176b --machine h100-80gb,gh200-96gb --offload cpu --calibrate
    zinfer plan --model bloom-176b --machine h200 --gpu-weights auto --weights as-released,int4
    zinfer plan --model gpt-oss-120b --machine all --want '20 tok/s' --price rtx-4090=0.4 --host-memory 128GiB
    zinfer plan --model opt-30b --machine h100-80gb,l40s --prompts 100k --sla 'ttft<=30s' --deadline 8h
    zinfer plan bloom-176b-machines --calibrate sweeps/results
    zinfer plan --list models
    """
    if listed is not None:
        from zinfer.commands import catalogue

        return (catalogue.models if listed == "models" else catalogue.machines)(recipe, as_json)
    from zinfer.analysis.economics import parse_count
    from zinfer.commands import ranking
    from zinfer.core.errors import NOTHING
    from zinfer.plan.advice import advice, choices, peers

    asked = {name: given.pop(name) for name in ASKED}
    sweep = _sweep(recipe, given)
    machines, efficiencies = _machines(sweep, settings, host_memory), _efficiencies(calibrate)
    prices = _by_machine("--price", stated, machines)
    question = ranking.Question(machines, prices, None if prompts is None else parse_count(prompts), **asked)
    if acceptance is not None and all(_draft_of(load) == "none" for load in sweep.loads(planning=True)):
        raise click.UsageError("--acceptance is that of drafts: add --draft ngram, or --draft MODEL")
    planning = _Planning(machines, efficiencies, _Records(acceptance, None if calibrate == SHIPPED else calibrate))
    groups = list(planning.groups(sweep, question))
    plans = [plan for group in groups for plan in group.plans]
    ranked = [ranking.Ranked(question, group.plans, group.answer) for group in groups]
    several = len(machines) > 1
    if as_json:
        click.echo(json.dumps([_row(plan, planning.records, question) for plan in plans], indent=1))
    else:
        for group, row in zip(groups, ranked, strict=True) if details or not several else ():
            _print(group, bool(efficiencies))
            say(advice(group.plans))
            records = map(planning.records.describe, group.plans)
            for line in (*choices(group.plans), *peers(group.plans), *_experts(group.plans), *records):
                if line:
                    say(line)
            if group.answer is not None:
                say(_decided(group.answer, group.plans))
            for line in filter(None, (question.describe(row.plan), question.assumption(group.machine))):
                say(line)
        click.echo()
        for title in dict.fromkeys(group.title for group in groups) if several else ():
            rows = [row for row, group in zip(ranked, groups, strict=True) if group.title == title]
            ranking.show(title, rows, question, bool(efficiencies))
        for machine in machines if details or not several else ():
            _print_machine(machine, bool(efficiencies))
        for engine, efficiency in efficiencies.items():
            if any(plan.case.engine == engine for plan in plans):
                say(f"{engine}: {efficiency.describe()}")
    for remark in dict.fromkeys(_remarks(plans, brief=several and not details)):
        say(remark, err=True)
    answers = [group.answer for group in groups if group.answer is not None]
    if not any(plan.holds for plan in plans):
        say(ranking.fitting(groups[0].plans), err=True)
        raise SystemExit(NOTHING)
    if answers and all(answer.decision.point is None for answer in answers):
        raise SystemExit(NOTHING)


def _machines(
    sweep: "Sweep", settings: tuple[str, ...], host_memory: tuple[tuple[tuple[str, str], ...], ...]
) -> "list[Machine]":
    """Return the machines to plan for, by default this one."""
    from zinfer.core.machine import catalogue_names
    from zinfer.system import local, machines

    names = [name for asked in sweep.machine for name in (catalogue_names() if asked == ALL else (asked,))]
    named = [machines.load(name) for name in dict.fromkeys(names)] if names else [local.this_machine()]
    sizes = _by_machine("--host-memory", host_memory, named)
    every = [reduce(override, settings, machine) for machine in named]
    stated = [
        sizes.get(machine.name, "" if machine.unified and len(named) > 1 else sizes.get("", "")) for machine in every
    ]
    return [
        override(machine, f"host_bytes={size}") if size else machine
        for machine, size in zip(every, stated, strict=True)
    ]


def _by_machine(
    option: str, given: tuple[tuple[tuple[str, Any], ...], ...], machines: "Sequence[Machine]"
) -> dict[str, Any]:
    """Return the values of an option by machine. Raises UsageError for another machine."""
    values = dict(pair for pairs in given for pair in pairs)
    names = [machine.name for machine in machines]
    if unknown := [name for name in values if name not in ("", *names)]:
        raise click.UsageError(f"{option}: {unknown[0]!r} is not among the machines planned: {', '.join(names)}")
    return values


def _decided(answer: "GroupDecision", plans: "Sequence[Plan]") -> str:
    """Return the sentences on levels and prices for one table."""
    from zinfer.commands import decision

    decided = answer.decision
    point = decided.point or decided.nearest
    if point is None:
        return "No plan that fits has known times."
    levels = [f"  {kept.sla.describe()}: predicted {kept.value}{kept.missed}" for kept in decided.kept]
    label = f"{point.case.label()}, batch {point.case.workload.batch_size}"
    if decided.point is None:
        return "\n".join([f"No plan keeps every level. The nearest is {label}:", *levels])
    head = f"Best by {decided.objective}, {decided.keeping} of {len(plans)} plans to choose from: {label}"
    return "\n".join([head, *levels, *(f"  {line}" for line in decision.costs(answer))])


def _print_machine(machine: "Machine", calibrated: bool) -> None:
    """Print the link's rate, replaced figures, and the peaks of limits."""
    shown = dict.fromkeys(("h2d_bandwidth", *machine.overridden))
    say(f"{machine.name}: " + "; ".join(f"{field} {machine.describe(field)}" for field in shown))
    peak = machine.at_peak().model_copy(update={"sources": {}})
    raised = [field for field in ("h2d_bandwidth", "hbm_bandwidth", "matmul_flops") if getattr(peak, field)]
    if not calibrated and raised:
        peaks = ", ".join(f"{field} {peak.describe(field).partition(' (')[0]}" for field in raised)
        say(f"{machine.name}: limits are made of {peaks}")


def _remarks(plans: "Sequence[Plan]", brief: bool) -> "Iterator[str]":
    """Yield notes on plans: why one does not fit, what it assumes, that no engine runs it.

    Of them a ranking says all but the last, so `brief` leaves them out.
    """
    for plan in () if brief else plans:
        if plan.why_not:
            yield plan.why_not
        elif not plan.holds and not plan.max_batch_size:
            load = f"{plan.case.model} with {plan.case.label()}"
            yield f"{load} needs nearly all memory of {plan.machine.name}: no room is left for a sequence"
    for plan in () if brief else plans:
        yield from _assumptions(plan)
    for option in sorted({key for plan in plans for key in _hypothetical(plan)}):
        yield f"{option} is a what-if: no engine of zinfer runs it so"


def _assumptions(plan: "Plan") -> "Iterator[str]":
    """Yield the memory that a plan needs of an unknown tier."""
    from zinfer.commands import ranking
    from zinfer.core.units import gib

    machine, label = plan.machine, plan.case.label()
    if ranking.host_unknown(plan):
        size = ranking.host_needed(plan).rstrip("?").replace(" ", "")
        head = f"{machine.name}: its host memory is not known; {label} fits only with {size}"
        yield f"{head} (--host-memory {size} says that it is there)"
    if plan.holds and machine.nvme_bytes is None and plan.nvme.total:
        yield f"{machine.name}: its disk is not known; {label} fits only with {gib(plan.nvme.total)} free"


def _hypothetical(plan: "Plan") -> list[str]:
    """Return the options of a plan that its engine does not have."""
    fields = ENGINES[plan.case.engine].options.model_fields if plan.case.engine in ENGINES else {}
    return [f"{key}={value} with {plan.case.engine}" for key, value in plan.case.options if key not in fields]


def _sweep(recipe: str | None, given: dict[str, Any]) -> "Sweep":
    """Return the recipe with the given options in place of its own.

    One of requests without other lengths has the mean lengths of its first load of requests.
    """
    from zinfer.job.recipe import make_sweep, read_toml, sweep_recipe, with_options
    from zinfer.job.requests import request_sets

    origin = recipe or "the command line"
    fields: dict[str, Any] = {} if recipe is None else read_toml(sweep_recipe(recipe))
    scenarios = {key: given.pop(key) for key in SCENARIOS}
    fields = DEFAULTS | fields | {key: value for key, value in given.items() if value is not None}
    for key, values in scenarios.items():
        if values is not None:
            axis = tuple(int(value) if str(value).isdigit() else value for value in values)
            fields = with_options(fields, {key: axis}, origin)
    if "model" not in fields:
        raise click.UsageError(
            "say what to plan: --model NAME, or a recipe (`zinfer plan --list models` lists the catalogue)"
        )
    sweep = make_sweep(fields, origin)
    served = () if {"input_len", "output_len"} & fields.keys() else request_sets(sweep)
    if not served:
        return sweep
    input_len, output_len = served[0].mean_lengths
    return sweep.model_copy(update={"input_len": (input_len,), "output_len": (output_len,)})


def _efficiencies(results: Path | None) -> "Mapping[str, Efficiency]":
    from zinfer.analysis import calibrate
    from zinfer.commands.failure import Failure
    from zinfer.core.errors import NOTHING
    from zinfer.plan.times import shipped

    if results is None:
        return {}
    if results == SHIPPED:
        return shipped()
    fitted = calibrate.fit(calibrate.load_points(results), calibrate.load_machines(results))
    if not fitted:
        raise Failure(f"{results} has no point to calibrate with: measure first, with `zinfer sweep`", NOTHING)
    return fitted


class _Group(NamedTuple):
    """Plans of one model and pair of lengths on one machine."""

    title: str  # without the machine
    machine: "Machine"
    plans: "list[Plan]"
    criteria: "DecisionCriteria | None"
    answer: "GroupDecision | None"


class _Planning:
    """Plans of sweeps: predictions with `efficiencies`, limits without any."""

    def __init__(
        self, machines: "Sequence[Machine]", efficiencies: "Mapping[str, Efficiency]", records: "_Records"
    ) -> None:
        self.machines, self.efficiencies, self.records = machines, efficiencies, records

    def groups(self, sweep: "Sweep", question: "Question") -> "Iterator[_Group]":
        """Yield plans by model, machine and lengths.

        Loads that no engine can run are left out. Raises ModelError if all lengths exceed the models' positions,
        UsageError if no engine has the offload.
        """
        from zinfer.checkpoint.resolve import resolve
        from zinfer.commands.ranking import as_points
        from zinfer.core.model import ModelError, check_positions

        runnable = _runnable(sweep)
        refused: list[ModelError] = []
        titles = 0
        axes = product(self.machines, sweep.lengths(), sweep.model, sweep.layers)
        for machine, (input_len, output_len), name, layers in axes:
            specs = {load.weights: resolve(name, sweep.dtype, layers, load.weights) for load in runnable}
            spec = next(iter(specs.values()))
            try:
                check_positions(spec, input_len, output_len)
            except ModelError as error:
                refused.append(error)
                continue
            planners: dict[Case, Planner] = {}
            for load in runnable:
                if (load.model, load.layers) == (name, layers):
                    case = load.case("dummy", spec.dtype, input_len, output_len)
                    case = case.model_copy(update={"options": _effective_options(load)})
                    if case not in planners:
                        planners[case] = self._planner(load, case, specs[load.weights], machine)
            part = "" if layers is None else f", {layers} layers"
            positions = f" ({spec.max_position:,} positions)" if spec.max_position else ""
            titles += 1
            criteria = question.on(machine, output_len)
            plans = [plan for planner in planners.values() for plan in self._batches(sweep, planner, criteria)]
            answer = None if criteria is None else criteria.answer(as_points(plans))
            title = f"{name}{part}{positions}, {input_len} in / {output_len} out"
            yield _Group(title, machine, plans, criteria, answer)
        if refused and not titles:
            raise refused[-1]
        for refusal in refused:
            say(f"left out: {refusal}", err=True)

    def _planner(self, load: "SweepLoad", case: "Case", spec: "ModelSpec", machine: "Machine") -> "Planner":
        from zinfer.checkpoint.resolve import resolve
        from zinfer.plan.planner import Planner
        from zinfer.plan.times import Efficiency

        efficiency = self.efficiencies.get(load.engine, Efficiency()) if self.efficiencies else None
        spec = self.records.routed(spec)
        if load.draft_model is not None:
            spec = spec.model_copy(update={"draft": resolve(load.draft_model, spec.dtype)})
        return Planner(case, spec, machine, efficiency)

    def _batches(self, sweep: "Sweep", planner: "Planner", criteria: "DecisionCriteria | None") -> "list[Plan]":
        """Plan the batches that were asked for; with ``auto`` the best one, which keeps the levels if any does.

        Drafts count in the times, but the batch that is best without them is taken.
        """
        from zinfer.commands.ranking import as_points
        from zinfer.job.recipe import automatic

        workload, with_drafts = planner.case.workload, self.records.with_drafts
        sizes = automatic(sweep.batch_size) if isinstance(sweep.batch_size, str) else sweep.batch_size
        chosen = [(planner.searched(workload, size), size) for size in sizes]
        stated = [with_drafts(each, each.at(each.case.with_batch(size).workload)) for each, size in chosen]
        if not isinstance(sweep.batch_size, str):
            return stated
        fastest = planner.searched(workload)
        if criteria is None or not (criteria.slas or criteria.objective == "latency"):
            return [*stated, with_drafts(fastest, fastest.best(workload))]

        def keeps(plan: "Plan") -> bool:
            return criteria.answer(as_points([with_drafts(planner, plan)])).decision.point is not None

        able = {each.case: each for each in (fastest, planner.searched(workload, 1))}.values()
        plans = [with_drafts(each, plan) for each in able for plan in each.within(workload, keeps)]
        decided = criteria.answer(as_points(plans)).decision
        point = decided.point or decided.nearest
        return [*stated, *[plan for plan in plans if point is None or plan.case == point.case][:1]]


def _runnable(sweep: "Sweep") -> "list[SweepLoad]":
    """Return the loads that an engine can run; name the others."""
    loads = [load for load in sweep.loads(planning=True) if load.offload in ENGINES[load.engine].offloads]
    reasons = {load: conflict(load.engine, (), load.offload, load.weights, load.gpu_weights) for load in loads}
    refusals = [reason for reason in dict.fromkeys(reasons.values()) if reason is not None]
    runnable = [load for load, reason in reasons.items() if reason is None]
    if refusals and not runnable:
        raise OptionError(refusals[0])
    for reason in refusals:
        say(f"left out: {reason}", err=True)
    if not runnable:
        able = [name for name, kind in ENGINES.items() if kind.offloads & set(sweep.offload)]
        lacking = f"engine {', '.join(sweep.engine)} has no offload {', '.join(sweep.offload)}"
        raise click.UsageError(f"{lacking}; choose from --engine {', '.join(able)}")
    return runnable


def _effective_options(load: "SweepLoad") -> "Options":
    """Return the options that change something: a codec does nothing for weights that stay."""
    idle = SCENARIOS | ({"weight_codec": dict(load.options).get("weight_codec")} if load.offload == "none" else {})
    return tuple((key, value) for key, value in load.options if key not in idle or idle[key] != value)


def _row(plan: "Plan", records: "_Records", question: "Question") -> dict[str, Any]:
    names = ("output_tok_s", "prefill_tok_s", "decode_tok_s", "e2e_s", "bounds")
    derived = {name: getattr(plan, name) for name in names}
    derived |= {"fits": plan.holds, "assumes": list(_assumptions(plan)), "what_if": _hypothetical(plan)}
    derived |= question.row(plan)
    if plan.drafting is not None:
        derived["acceptance_from"] = records.source(plan)
    if plan.placement.experts == "on-demand":
        derived["routing_from"] = _routing(plan)
    return plan.model_dump(mode="json", exclude={"model": {"layers", "config", "draft", "routing"}}) | derived


def _print(group: _Group, calibrated: bool) -> None:
    from zinfer.commands import ranking
    from zinfer.commands.out import console, table_of
    from zinfer.core.units import duration, figures, gb

    def shown(plan: "Plan", value: float | None, form: "Callable[[float], str]") -> str:
        return form(value) if plan.holds and value else "-"

    criteria = group.criteria

    def price(plan: "Plan") -> str:
        if criteria is None or not criteria.prices.known or not plan.holds:
            return ""
        paid = criteria.answer(ranking.as_points([plan])).decision.cost
        return figures(paid.usd_per_mtok) if paid is not None and paid.usd_per_mtok is not None else ""

    def band(plan: "Plan") -> str:
        if not calibrated or not plan.holds or not plan.output_tok_s:
            return ""
        return f" ± {plan.error:.0%}" if plan.error else " (no record of this kind)"

    columns: dict[str, Callable[[Plan], str]] = {
        "configuration": lambda plan: plan.case.label(),
        "#batch": lambda plan: str(plan.case.workload.batch_size) if plan.fits else "-",
        "#of": lambda plan: str(plan.max_batch_size) if plan.fits else "-",
        "#tok/s": lambda plan: shown(plan, plan.output_tok_s, figures) + band(plan),
        "#TTFT": lambda plan: shown(plan, plan.prefill_s, duration),
        "#TPOT": lambda plan: shown(plan, plan.step_s, duration),
        "#prefill tok/s": lambda plan: shown(plan, plan.prefill_tok_s, figures),
        "#decode tok/s": lambda plan: shown(plan, plan.decode_tok_s, figures),
        "bound by": lambda plan: (", ".join(plan.bounds) or "-") if plan.holds else "does not fit",
        "#USD/Mtok": price,
        "#over the link": lambda plan: gb(plan.streamed_bytes) if plan.streamed_bytes else "",
        "#GPU": lambda plan: gb(plan.gpu.total),
        "#host": lambda plan: gb(plan.host.total) + "?" * ranking.host_unknown(plan),
        "#NVMe": lambda plan: gb(plan.nvme.total) if plan.nvme.total else "",
    }
    rows = {
        plan.case if plan.fits else plan.case.load: plan for plan in reversed(group.plans)
    }  # no batch fits: one row
    machine, (name, _, lengths) = group.machine, group.title.rpartition(", ")
    title = f"{name} on {machine.name}{'*' * bool(machine.overridden)}, {lengths}"
    kind = "predicted" if calibrated else "physical limits"
    drop = ("over the link", "NVMe", "GPU", "host")
    console().print(table_of(columns, reversed(rows.values()), f"{title}: {kind}, nothing was run", drop=drop))


def _draft_of(load: "SweepLoad | Case") -> str:
    return str(dict(load.options).get("draft", "none"))


class _Records:
    """Acceptance of drafts and routing of mixtures, as recorded."""

    def __init__(self, stated: float | None, results: Path | None) -> None:
        from zinfer.system.local import RESULTS

        self._stated, self._folders = stated, (RESULTS, results or RESULTS)
        self._points = cache(self._read)

    def _read(self, *words: str) -> "Records":
        """Return the records with all of these texts in them: the others are not parsed."""
        from zinfer.record.store import Records, read

        folder = self._folders[-1]
        return read(folder, tuple(json.dumps(word) for word in words)) if folder.exists() else Records()

    @cached_property
    def _traces(self) -> "Sequence[Study]":
        from zinfer.record import study

        folders = (folder for folder in dict.fromkeys(self._folders) if folder.is_dir())
        return [run for folder in folders for run in study.read(folder, "routing").runs]

    def routed(self, spec: "ModelSpec") -> "ModelSpec":
        """Return a model with its routing, if that was recorded."""
        from zinfer.analysis.routing import routing_of

        if spec.num_experts < 2:
            return spec
        points = self._points(spec.name, "experts_hits_per_step").points
        return spec.model_copy(update={"routing": routing_of(spec, self._traces, points)})

    def _accepted(self, plan: "Plan") -> tuple[int, int]:
        from zinfer.analysis.requests import acceptance

        return acceptance(self._points(plan.case.model, "draft").requests, plan.case.model, _draft_of(plan.case))

    def with_drafts(self, planner: "Planner", plan: "Plan") -> "Plan":
        """Return a plan with what its drafts gain, if that is known."""
        if _draft_of(plan.case) == "none":
            return plan
        right, checked = (self._stated, 1) if self._stated is not None else self._accepted(plan)
        return planner.with_drafts(plan, right / checked) if checked else plan

    def source(self, plan: "Plan") -> str:
        """Return where the acceptance of a plan's drafts comes from."""
        if self._stated is not None:
            return "stated, not measured"
        right, checked = self._accepted(plan)
        return f"measured: {right:,} of {checked:,} drafts in the records"

    def describe(self, plan: "Plan") -> str:
        """Return what a plan's drafts gain, in a sentence; nothing without drafts."""
        from zinfer.core.units import counted, duration

        label, drafting = f"{plan.case.label()}, batch {plan.case.workload.batch_size}", plan.drafting
        if _draft_of(plan.case) == "none" or not plan.holds:
            return ""
        if drafting is None:
            why = "no record says how often a draft is right"
            return f"{label}: {why}, so times are those without drafts; --acceptance states it."
        drafts = counted(drafting.drafts, "draft")
        extra = f" and {duration(drafting.drafting_s)} of drafting" if drafting.drafting_s else ""
        return (
            f"{label}: {drafting.tokens_a_pass:.2f} tokens of each row from a pass with {drafts}, of "
            f"{duration(drafting.pass_s)}{extra}; acceptance {drafting.acceptance:.2f} ({self.source(plan)})."
        )


def _experts(plans: "Sequence[Plan]") -> "Iterator[str]":
    """Yield a sentence on the experts that cross the link, by plan."""
    from zinfer.core.units import gb

    for plan in plans:
        model, placement, tokens = plan.model, plan.placement, _step_tokens(plan)
        if model.num_experts < 2 or not plan.streamed_bytes or placement.tier != "host":
            continue
        label = f"{plan.case.label()}, batch {plan.case.workload.batch_size}"
        if placement.experts == "all":
            yield f"{label}: all experts come in every step."
            continue
        touched = model.touched_share(tokens) if placement.chooses(tokens) else 1.0
        stay = f", {placement.cached_experts} experts stay on the GPU" if placement.cached_experts else ""
        yield (
            f"{label}: experts on demand; a step touches {touched:.0%} of the experts and brings "
            f"{gb(plan.streamed_bytes)}{stay}; passes of {placement.whole_tokens} tokens or more bring all."
        )
        yield _routing(plan)


def _step_tokens(plan: "Plan") -> int:
    """Return the tokens of a decode step, drafts included."""
    return plan.case.workload.batch_size * (1 + (0 if plan.drafting is None else plan.drafting.drafts))


def _routing(plan: "Plan") -> str:
    """Return the source of a prediction with experts on demand.

    It is a record of the model's routing, or the assumption that each token chooses evenly. A step of one token whose
    experts all come needs neither.
    """
    from zinfer.plan.bytes import Sizes

    model, placement, tokens = plan.model, plan.placement, _step_tokens(plan)
    if not placement.chooses(tokens):
        return ""
    figures: dict[bool, list[str]] = {True: [], False: []}  # by whether they are recorded
    recorded, cached = model.routing, Sizes(placement, model).cached_share
    if tokens > 1:
        touched = f"{model.touched_share(tokens):.0%} of the experts touched"
        figures[recorded is not None and bool(recorded.touched)].append(touched)
    if placement.cached_experts:
        hits = f"{model.hits('lfu', cached, tokens):.0%} cache hits"
        figures[recorded is not None and recorded.hit_rate("lfu", cached, tokens) is not None].append(hits)
    parts = [f"{', '.join(figures[True])} by {recorded.source}"] if figures[True] and recorded is not None else []
    if figures[False]:
        parts.append(f"{', '.join(figures[False])} as if tokens chose evenly (`zinfer study routing`)")
    return f"Predicted: {'; '.join(parts)}." if parts else ""
