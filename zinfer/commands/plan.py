"""`zinfer plan`: bytes on each tier, speed, and whether to stream at all; nothing runs."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, cached_property, reduce
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any

import click

from zinfer.analysis import calibrate, rates
from zinfer.analysis.economics import parse_count, parse_seconds
from zinfer.analysis.requests import acceptance as acceptance_of
from zinfer.analysis.sla import parse
from zinfer.analysis.study import routing_of
from zinfer.checkpoint.resolve import resolve
from zinfer.commands import catalogue, options, ranking
from zinfer.commands.best import lines as decision_lines
from zinfer.commands.options import option
from zinfer.commands.out import cell, console, say, table_of
from zinfer.commands.ranking import PlanGroup
from zinfer.commands.verb import Failure, Verb
from zinfer.core.case import Case
from zinfer.core.engine import ENGINES, OptionError, conflict, draft_of, is_server
from zinfer.core.errors import NOTHING
from zinfer.core.machine import Machine, override
from zinfer.core.machine import catalogue as machine_catalogue
from zinfer.core.model import ModelError, ModelSpec, check_positions
from zinfer.core.units import counted, duration, figures, gb, gib
from zinfer.core.value import group_by
from zinfer.job import requests
from zinfer.job.recipe import Sweep, SweepLoad, automatic, make_sweep, read_toml, sweep_recipe, with_options
from zinfer.plan.advice import advice, choices, host_needed, host_unknown, left_out, peers
from zinfer.plan.bytes import Sizes
from zinfer.plan.planner import Plan, Planner
from zinfer.plan.times import Efficiency, shipped
from zinfer.record import study
from zinfer.record.measurement import Measurement, latest
from zinfer.record.store import Records, read
from zinfer.system import local
from zinfer.system.machines import load as load_machine

SHIPPED = Path(str(files("zinfer"))) / "catalog" / "calibration.json"  # `--calibrate` without a value
ALL = "all"
SAME_MEMORY = 1.1  # GPUs of one name report sizes that differ a little
DEFAULTS = {"engine": "stream", "offload": ("none", "cpu"), "batch_size": "auto"}
# options that become axes of `Case.options`, with the value that changes nothing
UNSET = dict.fromkeys(("weight_codec", "kv_offload", "kv_cache_dtype", "experts"), "auto")
SCENARIOS = UNSET | {"draft": "none", "gpus": 1}
# options that are not of the recipe
ASKED = ("settings", "host_memory", "acceptance", "levels", "objective", "stated", "prompts", "deadline", "as_json")
PerMachineValues = tuple[tuple[tuple[str, Any], ...], ...]  # pairs of a machine, or "" for all, and a value


@click.command("plan", cls=Verb)
@click.argument("recipe", required=False)
@option("--list listed", click.Choice(["models", "machines"]), "List the catalogue, or show its entry RECIPE.")
@options.models
@option(
    "--machine",
    options.words("MACHINE,.."),
    "Catalogue names, machine.json files, all; several are ranked.  [default: this]",
)
@options.repeatable("--set settings", "Replace a figure: h2d_bandwidth=200GB/s.", "FIELD=VALUE")
@option("--host-memory", options.per_machine(click.STRING), "As 128GiB or rtx-4090=64GiB. Repeatable.", multiple=True)
@option("--engine", options.words("ENGINE,.."), options.ENGINES_HELP)
@options.offloads
@option("--batch-size", options.BATCHES, "Sequences at once; auto: that of the best throughput.  [default: auto]")
@option("--input-len", options.NUMBERS, "Prompt tokens; 512,2048 plans both.  [default: 512]")
@option("--output-len", options.NUMBERS, "Generated tokens.  [default: 32]")
@options.dtype
@options.layers
@options.gpu_weights
@options.shorthand("weight_codec")
@options.weights
@options.shorthand("kv_offload")
@options.shorthand("kv_cache_dtype")
@options.shorthand("draft")
@option("--acceptance", click.FloatRange(0, 1, max_open=True), "Chance that a draft is right.  [default: as recorded]")
@options.shorthand("experts")
@option("--gpus", options.NUMBERS, "GPUs, each with its own link.  [default: 1]")
@option(
    "--calibrate",
    click.Path(exists=True, path_type=Path),
    "Predict what engines reach, instead of limits: by these records, else by the calibration that ships.",
    metavar="[RESULTS]",
    is_flag=False,
    flag_value=str(SHIPPED),
)
@options.repeatable(
    "--sla --want levels",
    "A service level to keep: 'ttft<=30s', 'tpot<=100ms', 'e2e<=5min', '20 tok/s' of the batch, '5 tok/s/user', "
    "or METRIC:STATISTIC:<=:VALUE.",
    "LEVEL",
)
@option("--objective", click.Choice(["throughput", "cost", "latency"]), "Quantity to choose by.")
@option(
    "--price stated",
    options.per_machine(options.AMOUNT),
    "USD of a GPU-hour, as 2.50 or rtx-4090=0.4. Repeatable.  [default: the catalogue's assumption]",
    multiple=True,
)
@option("--prompts", str, "Prompts to answer, as 100k: the hours and USD on one machine.", metavar="NUMBER")
@option("--deadline", str, "Time in which --prompts are due, as 8h: the number of machines.", metavar="TIME")
@option("--json as_json", bool, "Print JSON.")
def command(recipe: str | None, listed: str | None, calibrate: Path | None, **given: Any) -> None:
    """Predict memory, speed and the best batch, and whether to stream.

    Comma lists are axes: model x machine x engine x offload. Several machines are ranked in one table, by tokens a
    second or by cost. Without --calibrate the times are physical limits (the link, GPU memory and matrix products at
    their peaks), which no engine passes; with it they are predictions with an error band. RECIPE is a file, or a name
    in sweeps/ or among those that come with zinfer; a checkpoint in its place is the --model. With --sla, --objective
    or prices the batch is the best that keeps the levels. The exit code is 4 if nothing fits, or nothing keeps them.

    \b
    zinfer plan --model bloom-176b --machine h100-80gb,gh200-96gb --offload cpu --calibrate
    zinfer plan --model gpt-oss-120b --machine all --want '20 tok/s' --price rtx-4090=0.4 --host-memory 128GiB
    zinfer plan --model opt-30b --machine h100-80gb,l40s --prompts 100k --sla 'ttft<=30s'
    zinfer plan --list models
    """
    if listed is not None:
        if given["as_json"]:
            raise click.UsageError("--json is of plans: leave it out with --list")
        return (catalogue.models if listed == "models" else catalogue.machines)(recipe)
    groups, records, question, efficiencies = planned(recipe, calibrate, given)
    machines, plans = question.machines, [plan for group in groups for plan in group.plans]
    several, calibrated = len(machines) > 1, bool(efficiencies)
    if given["as_json"]:
        click.echo(json.dumps([_row(plan, records, question) for plan in plans], indent=1))
    elif several:
        click.echo()
        for title, alike in group_by(groups, lambda group: group.title).items():
            ranking.show(title, alike, question, calibrated)
    else:
        for group in groups:
            _print(group, question, calibrated)
            lines = [advice(group.plans), *choices(group.plans), *records.servers(group)]
            lines += [*peers(group.plans), *_experts(group.plans), *left_out(group.plans)]
            lines += map(records.describe, group.plans)
            lines += [] if group.answer is None else decision_lines(group.answer, "plan")
            for line in filter(None, [*lines, question.describe(group.plan), question.assumption(group.machine)]):
                say(line)
        click.echo()
        _print_machine(machines[0], calibrated)
    what_ifs = sorted({f"{name} is a what-if: no engine runs it so" for plan in plans for name in _hypothetical(plan)})
    for remark in dict.fromkeys([*(() if several else _remarks(plans)), *what_ifs]):
        say(remark, err=True)
    answers = [group.answer for group in groups if group.answer is not None]
    if not any(plan.holds for plan in plans) or (answers and all(answer.point is None for answer in answers)):
        raise SystemExit(NOTHING)


def planned(
    recipe: str | None, calibrate: Path | None, given: dict[str, Any]
) -> tuple[list[PlanGroup], "_Records", ranking.Question, Mapping[str, Efficiency]]:
    """Return groups of plans, and what they were made with. Raises Failure."""
    how = {name: given[name] for name in ASKED}
    acceptance, prompts = how["acceptance"], how["prompts"]
    sweep = _sweep(recipe, {name: value for name, value in given.items() if name not in ASKED})
    machines, efficiencies = _machines(sweep, how["settings"], how["host_memory"]), _efficiencies(calibrate)
    prices = _by_machine("--price", how["stated"], machines)
    count = None if prompts is None else parse_count(prompts)
    if how["deadline"] is not None and count is None:
        raise click.UsageError("--deadline is that of --prompts: say how many")
    deadline = None if how["deadline"] is None else parse_seconds(how["deadline"])
    question = ranking.Question(machines, prices, count, tuple(map(parse, how["levels"])), how["objective"], deadline)
    if acceptance is not None and all(draft_of(load.options) == "none" for load in sweep.loads(planning=True)):
        raise click.UsageError("--acceptance is that of drafts: add --draft ngram, or --draft MODEL")
    records = _Records(acceptance, None if calibrate == SHIPPED else calibrate)
    groups = list(_groups(sweep, machines, efficiencies, records, question))
    return groups, records, question, efficiencies


def _machines(sweep: Sweep, settings: tuple[str, ...], host_memory: PerMachineValues) -> list[Machine]:
    names = [name for asked in sweep.machine for name in (machine_catalogue() if asked == ALL else (asked,))]
    named = [load_machine(name) for name in dict.fromkeys(names)] if names else [local.this_machine()]
    sizes = _by_machine("--host-memory", host_memory, named)
    every = []
    for machine in named:
        machine = reduce(override, settings, machine)
        all_of_them = "" if machine.unified and len(named) > 1 else sizes.get("", "")
        size = sizes.get(machine.name, all_of_them)
        every.append(override(machine, f"host_bytes={size}") if size else machine)
    return every


def _by_machine(option: str, given: PerMachineValues, machines: Sequence[Machine]) -> dict[str, Any]:
    """Return the values of an option by machine. Raises UsageError for another machine."""
    values = dict(pair for pairs in given for pair in pairs)
    names = [machine.name for machine in machines]
    if unknown := [name for name in values if name not in ("", *names)]:
        raise click.UsageError(f"{option}: {unknown[0]!r} is not among the machines planned: {', '.join(names)}")
    return values


def _print_machine(machine: Machine, calibrated: bool) -> None:
    shown = dict.fromkeys(("h2d_bandwidth", *machine.overridden))
    say(f"{machine.name}: " + "; ".join(f"{field} {machine.describe(field)}" for field in shown))
    peak = machine.at_peak().model_copy(update={"sources": {}})
    raised = [field for field in ("h2d_bandwidth", "hbm_bandwidth", "matmul_flops") if getattr(peak, field)]
    if not calibrated and raised:
        peaks = ", ".join(f"{field} {peak.describe(field).partition(' (')[0]}" for field in raised)
        say(f"{machine.name}: limits are made of {peaks}")


def _remarks(plans: Sequence[Plan]) -> Iterator[str]:
    """Yield why plans do not fit, and what they assume; a ranking has both in its rows."""
    for plan in plans:
        if plan.why_not:
            yield plan.why_not
        elif not plan.holds and not plan.max_batch_size:
            load = f"{plan.case.model} with {plan.case.label()}"
            yield f"{load} needs nearly all memory of {plan.machine.name}: no room is left for a sequence"
    for plan in plans:
        yield from _assumptions(plan)


def _assumptions(plan: Plan) -> Iterator[str]:
    machine, label = plan.machine, plan.case.label()
    if host_unknown(plan):
        size = host_needed(plan).rstrip("?").replace(" ", "")
        head = f"{machine.name}: its host memory is not known; {label} fits only with {size}"
        yield f"{head} (--host-memory {size} says that it is there)"
    if plan.holds and machine.nvme_bytes is None and plan.nvme.total:
        yield f"{machine.name}: its disk is not known; {label} fits only with {gib(plan.nvme.total)} free"


def _hypothetical(plan: Plan) -> list[str]:
    fields = ENGINES[plan.case.engine].options.model_fields if plan.case.engine in ENGINES else {}
    return [f"{key}={value} with {plan.case.engine}" for key, value in plan.case.options if key not in fields]


def _sweep(recipe: str | None, given: dict[str, Any]) -> Sweep:
    """Return the recipe with the given options in place of its own. Requests give mean lengths."""
    recipe, given = options.recipe_or_model(recipe, given)
    origin = recipe or "the command line"
    fields: dict[str, Any] = {} if recipe is None else read_toml(sweep_recipe(recipe))
    scenarios = {key: values for key in SCENARIOS if (values := given.pop(key)) is not None}
    fields = DEFAULTS | fields | {key: value for key, value in given.items() if value is not None}
    fields = with_options(fields, scenarios, origin)
    if "model" not in fields:
        raise click.UsageError(f"say what to plan: {options.NAME_A_MODEL}")
    sweep = make_sweep(fields, origin)
    served = () if {"input_len", "output_len"} & fields.keys() else requests.request_sets(sweep)
    if not served:
        return sweep
    input_len, output_len = served[0].mean_lengths
    return sweep.model_copy(update={"input_len": (input_len,), "output_len": (output_len,)})


def _efficiencies(results: Path | None) -> Mapping[str, Efficiency]:
    if results is None or results == SHIPPED:
        return shipped() if results else {}
    fitted = calibrate.calibrate(latest(read(results).points), calibrate.load_machines(results))
    if not fitted:
        raise Failure(f"{results} has no point to calibrate with: measure first, with `zinfer sweep`", NOTHING)
    return fitted


def _groups(
    sweep: Sweep,
    machines: Sequence[Machine],
    efficiencies: Mapping[str, Efficiency],
    records: "_Records",
    question: ranking.Question,
) -> Iterator[PlanGroup]:
    """Yield plans by model, machine and lengths: predictions with `efficiencies`, limits without any."""
    runnable, refused, planned = _runnable(sweep), list[ModelError](), False
    for machine, (input_len, output_len), name, layers in product(machines, sweep.lengths(), sweep.model, sweep.layers):
        loads = [load for load in runnable if (load.model, load.layers) == (name, layers)]
        specs = {load.weights: resolve(name, sweep.dtype, layers, load.weights) for load in loads}
        spec = next(iter(specs.values()))
        try:
            check_positions(spec, input_len, output_len)
        except ModelError as error:
            refused.append(error)
            continue
        planners: dict[Case, Planner] = {}
        for load in loads:
            # what changes nothing: a codec does nothing for weights that stay
            codec = {"weight_codec": dict(load.options).get("weight_codec")} if load.offload == "none" else {}
            settings = tuple(pair for pair in load.options if pair not in (SCENARIOS | codec).items())
            case = load.case("dummy", spec.dtype, input_len, output_len).model_copy(update={"options": settings})
            model = records.routed(specs[load.weights])
            if load.draft_model is not None:
                model = model.model_copy(update={"draft": resolve(load.draft_model, spec.dtype)})
            efficiency = efficiencies.get(load.engine, Efficiency()) if efficiencies else None
            planners.setdefault(case, Planner(case, model, machine, efficiency))
        part = "" if layers is None else f", {layers} layers"
        part += f" ({spec.max_position:,} positions)" if spec.max_position else ""
        planned = True
        plans = [plan for planner in planners.values() for plan in _batches(sweep, planner, question, records)]
        title = f"{name}{part}, {input_len} in / {output_len} out"
        yield PlanGroup(title, machine, plans, question.answer(plans))
    if refused and not planned:
        raise refused[-1]
    for refusal in refused:
        say(f"left out: {refusal}", err=True)


def _batches(sweep: Sweep, planner: Planner, question: ranking.Question, records: "_Records") -> list[Plan]:
    """Plan the batches that were asked for; with ``auto`` the best, which keeps the levels if any does."""
    workload, with_drafts = planner.case.workload, records.with_drafts
    sizes = automatic(sweep.batch_size) if isinstance(sweep.batch_size, str) else sweep.batch_size
    chosen = [(planner.searched(workload, size, exact=True), size) for size in sizes]
    stated = [with_drafts(each, each.at(each.case.with_batch(size).workload)) for each, size in chosen]
    if not isinstance(sweep.batch_size, str):
        return stated
    fastest = planner.searched(workload)
    if not (question.slas or question.objective == "latency"):
        return [*stated, with_drafts(fastest, fastest.best(workload))]

    def keeps(plan: Plan) -> bool:
        answer = question.answer([with_drafts(planner, plan)])
        return answer is not None and answer.point is not None

    able = {each.case: each for each in (fastest, planner.searched(workload, 1, exact=True))}.values()
    plans = [with_drafts(each, plan) for each in able for plan in each.within(workload, keeps)]
    answer = question.answer(plans)
    point = None if answer is None else answer.point or answer.nearest
    return [*stated, *[plan for plan in plans if point is None or plan.case == point.case][:1]]


def _runnable(sweep: Sweep) -> list[SweepLoad]:
    """Return the loads that an engine can run; name the others."""
    every = list(sweep.loads(planning=True))
    if servers := sorted({load.engine for load in every if is_server(load.engine)}):
        raise click.UsageError(f"{', '.join(servers)}: a server cannot be planned, measure it with `zinfer sweep`")
    loads = [load for load in every if load.offload in ENGINES[load.engine].offloads]
    if not loads:
        able = [name for name, kind in ENGINES.items() if kind.offloads & set(sweep.offload)]
        lacking = f"engine {', '.join(sweep.engine)} has no offload {', '.join(sweep.offload)}"
        raise click.UsageError(f"{lacking}; choose from --engine {', '.join(able)}")
    reasons = {load: conflict(load.engine, (), load.offload, load.weights, load.gpu_weights) for load in loads}
    refusals = [reason for reason in dict.fromkeys(reasons.values()) if reason is not None]
    runnable = [load for load, reason in reasons.items() if reason is None]
    if not runnable:
        raise OptionError(refusals[0])
    for reason in refusals:
        say(f"left out: {reason}", err=True)
    return runnable


def _row(plan: Plan, records: "_Records", question: ranking.Question) -> dict[str, Any]:
    names = ("output_tok_s", "prefill_tok_s", "decode_tok_s", "e2e_s", "bounds")
    derived = {name: getattr(plan, name) for name in names}
    derived |= {"fits": plan.holds, "assumes": list(_assumptions(plan)), "what_if": _hypothetical(plan)}
    derived |= question.row(plan)
    if plan.drafting is not None:
        derived["acceptance_from"] = records.source(plan)
    if plan.placement.experts == "on-demand":
        derived["routing_from"] = _routing(plan)
    return plan.model_dump(mode="json", exclude={"model": {"layers", "config", "draft", "routing"}}) | derived


def _print(group: PlanGroup, question: ranking.Question, calibrated: bool) -> None:
    def held(value: float | None, form: Callable[[float], str] = figures) -> str:
        return cell(value, form) or "-"

    def rate(plan: Plan) -> str:
        band = f"± {plan.error:.0%}" if plan.error else "(no record of this kind)"
        return held(plan.output_tok_s) + f" {band}" * bool(calibrated and plan.output_tok_s)

    columns: dict[str, Callable[[Plan], str]] = {
        "configuration": lambda plan: plan.case.label(),
        "#batch": lambda plan: str(plan.case.workload.batch_size) if plan.fits else "-",
        "#of": lambda plan: str(plan.max_batch_size) if plan.fits else "-",
        "#tok/s": lambda plan: rate(plan) if plan.holds else "-",
        "#TTFT": lambda plan: held(plan.prefill_s if plan.holds else None, duration),
        "#TPOT": lambda plan: held(plan.step_s if plan.holds else None, duration),
        "#prefill tok/s": lambda plan: held(plan.prefill_tok_s if plan.holds else None),
        "#decode tok/s": lambda plan: held(plan.decode_tok_s if plan.holds else None),
        "bound by": lambda plan: (", ".join(plan.bounds) or "-") if plan.holds else "does not fit",
        "#USD/Mtok": lambda plan: (
            "" if not question.pays or (usd := question.usd_per_mtok(plan)) is None else figures(usd)
        ),
        "#over the link": lambda plan: cell(plan.streamed_bytes, gb),
        "#GPU": lambda plan: gb(plan.gpu.total),
        "#host": lambda plan: gb(plan.host.total) + "?" * host_unknown(plan),
        "#NVMe": lambda plan: cell(plan.nvme.total, gb),
    }
    # no batch fits: one row
    rows = {plan.case if plan.fits else plan.case.load: plan for plan in reversed(group.plans)}
    machine, (name, _, lengths) = group.machine, group.title.rpartition(", ")
    title = f"{name} on {machine.name}{'*' * bool(machine.overridden)}, {lengths}"
    kind = "predicted" if calibrated else "physical limits"
    drop = ("over the link", "NVMe", "GPU", "host")
    console().print(table_of(columns, reversed(rows.values()), f"{title}: {kind}, nothing was run", drop=drop))


class _Records:
    """Acceptance of drafts and routing of mixtures, as recorded."""

    def __init__(self, stated: float | None, results: Path | None) -> None:
        self._stated, self._folders = stated, (local.RESULTS, results or local.RESULTS)
        self._points = cache(self._read)

    def _read(self, *words: str) -> Records:
        """Return the records with all of these texts in them: the others are not parsed."""
        folder = self._folders[-1]
        return read(folder, tuple(json.dumps(word) for word in words)) if folder.exists() else Records()

    @cached_property
    def _traces(self) -> list[study.Study]:
        folders = (folder for folder in dict.fromkeys(self._folders) if folder.is_dir())
        return [run for folder in folders for run in study.read(folder, "routing").runs]

    def routed(self, spec: ModelSpec) -> ModelSpec:
        """Return a model with its routing, if that was recorded."""
        routing = routing_of(spec, self._traces) if spec.num_experts > 1 else None
        return spec if routing is None else spec.model_copy(update={"routing": routing})

    def _accepted(self, plan: Plan) -> tuple[int, int]:
        model, draft = plan.case.model, draft_of(plan.case.options)
        return acceptance_of(self._points(model, "draft").requests, model, draft)

    def with_drafts(self, planner: Planner, plan: Plan) -> Plan:
        """Return a plan with what its drafts gain, if that is known."""
        if draft_of(plan.case.options) == "none":
            return plan
        right, checked = (self._stated, 1) if self._stated is not None else self._accepted(plan)
        return planner.with_drafts(plan, right / checked) if checked else plan

    def source(self, plan: Plan) -> str:
        """Return where the acceptance of a plan's drafts comes from."""
        if self._stated is not None:
            return "stated, not measured"
        right, checked = self._accepted(plan)
        return f"measured: {right:,} of {checked:,} drafts in the records"

    def servers(self, group: PlanGroup) -> Iterator[str]:
        """Yield a sentence on a server that is faster by a record."""
        case, machine = group.plan.case, group.machine
        points = self._points(case.model, "command").points  # which only servers have
        machines = calibrate.load_machines(self._folders[-1]) if points else {}

        def work(case: Case) -> tuple[object, ...]:
            return case.workload.input_len, case.workload.output_len, case.layers

        rows = max(plan.case.workload.batch_size for plan in group.plans)

        def alike(point: Measurement) -> bool:
            there = machines.get(point.machine)
            gpus = there is not None and (there.gpu_name, there.gpu_count) == (machine.gpu_name, machine.gpu_count)
            room = there is None or there.gpu_bytes <= SAME_MEMORY * machine.gpu_bytes  # which `--set` may limit
            same = (gpus or point.machine == machine.name) and room and work(point.case) == work(case)
            return same and is_server(point.case.engine) and point.case.workload.batch_size <= rows

        fastest = rates.winner([point for point in latest(points) if alike(point)])
        ours = max((plan.expected_tok_s or 0.0 for plan in group.plans if plan.holds), default=0.0)
        if fastest is not None and (fastest.output_tok_s or 0.0) > ours:
            there = f"{fastest.machine}, {fastest.started_at[:10]}: `zinfer best`"
            made = f"{fastest.case.batch_label}, made {rates.rate_text(fastest)} tok/s ({there})"
            yield f"A server of others is faster: {made}; {figures(ours)} are predicted of zinfer."

    def describe(self, plan: Plan) -> str:
        """Return what a plan's drafts gain, in a sentence; nothing without drafts."""
        label, drafting = plan.case.batch_label, plan.drafting
        if draft_of(plan.case.options) == "none" or not plan.holds:
            return ""
        if drafting is None:
            return f"{label}: no record says how often a draft is right, so none is counted; --acceptance states it."
        extra = f" and {duration(drafting.drafting_s)} of drafting" if drafting.drafting_s else ""
        rows = f"{drafting.tokens_a_pass:.2f} tokens of each row from a pass with {counted(drafting.drafts, 'draft')}"
        source = f"acceptance {drafting.acceptance:.2f} ({self.source(plan)})"
        return f"{label}: {rows}, of {duration(drafting.pass_s)}{extra}; {source}."


def _experts(plans: Sequence[Plan]) -> Iterator[str]:
    for plan in plans:
        model, placement, label = plan.model, plan.placement, plan.case.batch_label
        drafts = 0 if plan.drafting is None else plan.drafting.drafts
        tokens, sizes = plan.case.workload.batch_size * (1 + drafts), Sizes(placement, model)  # of a step
        crosses = bool(plan.streamed_bytes or placement.computes(tokens))
        if model.num_experts < 2 or not crosses or placement.tier != "host" or not plan.holds:
            continue
        count, stay = sum(layer.expert_parameters > 0 for layer in model.layers), len(placement.expert_layers)
        share, link = f"{model.touched_share(tokens):.0%}", gb(plan.streamed_bytes)
        if stay and stay == count:
            yield f"{label}: the experts of all layers stay on the GPU."
        elif placement.computes(tokens):
            where = f"{count - stay} of {count} layers in " if stay else ""
            yield (
                f"{label}: the CPU computes the experts of {where}passes of up to {placement.cpu_tokens} tokens; a "
                f"step reads {share} of them, {gb(sizes.touched(tokens) * placement.expert_ratio)}, and brings {link} "
                f"of other weights; {_routing(plan)}."
            )
        elif placement.experts == "all":
            yield f"{label}: all experts come in every step."
        else:
            kept = f"the experts of {stay} of {count} layers" if stay else f"{placement.cached_experts} experts"
            kept += " stay on the GPU"
            if chooses := placement.chooses(tokens):
                kept += f", with {model.hits(sizes.cached_share, tokens):.0%} cache hits; {_routing(plan)}"
            yield (
                f"{label}: experts on demand; a step touches {share if chooses else '100%'} of the experts and brings "
                f"{link}; passes of {placement.whole_tokens} tokens or more bring all; {kept}."
            )


def _routing(plan: Plan) -> str:
    routing, evenly = plan.model.routing, "as if tokens chose evenly (`zinfer study routing`)"
    return f"predicted {evenly}" if routing is None else f"predicted by {routing.source}; what it lacks, {evenly}"
