"""`zinfer sweep`: measure points, and keep every one."""

import json
import sys
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any

import click

from zinfer.analysis import sla
from zinfer.commands import options
from zinfer.commands.options import option
from zinfer.commands.out import say
from zinfer.commands.results import warned
from zinfer.commands.verb import Failure, Verb
from zinfer.commands.watch import Watch
from zinfer.core.engine import OptionError, draft_of, is_server
from zinfer.core.errors import ENVIRONMENT, INTEGRITY, PARTIAL
from zinfer.core.machine import Machine
from zinfer.core.units import counted, duration
from zinfer.job import parts, requests, sweep
from zinfer.job.forecast import Outlook, likely_batches
from zinfer.job.recipe import RecipeError, Sweep, make_sweep, parse_option, read_toml, sweep_recipe, with_options
from zinfer.job.shard import Shard, shards_begun
from zinfer.job.signals import Interrupted
from zinfer.plan.advice import describe
from zinfer.record.store import Header, Records, Store, read
from zinfer.system import local
from zinfer.worker import process

LONG_S = 3600  # seconds from which on a sweep asks first
# Fields that choose what is measured: without any of them a sweep measures what `zinfer best` needs to decide.
CHOICES = {"engine", "offload", "batch_size", "gpu_weights", "weights", "requests", "request_lengths"}
DECIDING = {"engine": ("stream", "peer"), "offload": ("none", "cpu"), "batch_size": "1,8,auto"}
MINUTES = options.Parsed("N|none", lambda text: 0.0 if text == "none" else float(text), "a number of minutes, or none")
IN_FLIGHT = options.comma_list("auto|N,..", parse_option, "auto, or positive whole numbers with commas between")
RATES = options.comma_list("R,..", parse_option, "positive numbers with commas between, or inf")


@click.command("sweep", cls=Verb)
@click.argument("recipe", required=False)
@options.models
@option(
    "--engine",
    options.words("ENGINE,.."),
    "Engines, recipes in engines/, or peer (deepspeed, else accelerate).  "
    "[default: stream; with --model alone, stream,peer]",
)
@options.offloads
@option(
    "--batch-size",
    options.BATCHES,
    "Sequences at once; auto: double while that pays.  [default: auto; with --model alone, 1,8,auto]",
)
@option("--input-len", options.NUMBERS, "Prompt tokens.  [default: 512]")
@option("--output-len", options.NUMBERS, "Generated tokens.  [default: 32]")
@option("--requests", click.Path(dir_okay=False), "Load: OpenAI batch lines, or input_len,output_len.")
@options.repeatable(
    "--request-lengths",
    "Random requests, of mean tokens in and out: lognormal:245,106,sigma=0.8; fixed:245,106; "
    "with max_input_len=1500,max_output_len=400.",
    "DISTRIBUTION",
)
@option("--num-requests", options.COUNT, "Requests of a load.  [default: 1000, or all of FILE]")
@option("--concurrency --in-flight in_flight", IN_FLIGHT, "Requests at a time.  [default: auto, all that fit]")
@option("--request-rate", RATES, "Requests a second, at random; inf: all at once.")
@option("--request-order", click.Choice(["given", "longest-first"]), "Order with --in-flight N.  [default: given]")
@option("--seed", click.IntRange(min=0), "Seed of lengths, arrivals and tokens.  [default: 0]")
@options.repeatable("--sla", "Level for goodput, as ttft:p99:<=:30s.", "LEVEL")
@option("--rounds", options.COUNT, "Repeat all N times, loading anew.  [default: 1]")
@option("--minutes", MINUTES, "Begin no point after N minutes.  [default: 15; of shards none]")
@option("--yes", bool, "Begin a sweep of more than an hour without a question.")
@options.load_options
@options.weights
@option("--repeats", options.COUNT, "Maximum runs per point.  [default: 3]")
@option("--timeout timeout_s", options.SECONDS, "Seconds for a point or load.  [default: 1800]")
@option("-o --output", options.FILE, "Result file (JSON lines).")
@option("--resume", bool, "Measure only the points that the file lacks.")
@option("--force", bool, "Resume although recipe, model or version changed.")
@option("--dry-run", bool, "Print the plan of every point and stop.")
@option("--json as_json", bool, "With --dry-run: print the plans as JSON.")
@option("--shard", options.SHARD, "Measure loads i, i+n, .. into a part (job arrays).")
@option("--merge", bool, "Put the points of all shards together.")
@option("--cluster", click.Choice(["slurm"]), "Measure each load in a job of Slurm.")
@options.repeatable(
    "--slurm-arg slurm_args", "Option of sbatch: time=4:00:00, exclusive; setup=COMMAND.", "KEY[=VALUE]"
)
@click.pass_obj
def command(debug: bool, /, recipe: str | None, output: Path | None, shard: Shard | None, **given: Any) -> None:
    """Measure throughput over batch size, with offload on and off; every point is on disk before the next one.

    With --model alone it measures what decides, in at most 15 minutes: weights on the GPU and in host memory, engine
    stream and the one to compare it with, batch 1, 8 and more until that gains nothing. With --requests or
    --request-lengths it measures loads of requests instead; with --batch-size, both.

    RECIPE is a file, a name in sweeps/ or of zinfer's own, or a checkpoint; options replace what it says. Comma lists
    are axes.

    \b
    zinfer sweep ./my-checkpoint
    zinfer sweep --model opt-30b --engine stream,deepspeed --offload none,cpu --batch-size 1-64*2
    zinfer sweep --model opt-30b --offload cpu --request-lengths lognormal:245,106 --in-flight 64,auto
    zinfer sweep mixtral -o out.jsonl --shard 2/4         on each of four machines
    zinfer sweep mixtral -o out.jsonl --merge             when all shards have ended
    """
    how = taken(given)
    nvme_path, cluster, merge = how["nvme_path"], how["cluster"], how["merge"]
    plan = asked(recipe, given, how, shared=shard is not None or cluster is not None)
    if cluster is None:
        options.refuse(("slurm_args",), "is for --cluster slurm")
    if not how["dry_run"]:
        options.refuse(("as_json",), "is for --dry-run; `zinfer export --format json` writes the points of a file")
    if sum((how["dry_run"], merge, shard is not None or cluster is not None)) > 1:
        raise click.UsageError("--dry-run, --shard, --merge and --cluster each do another thing: leave out all but one")
    if how["dry_run"]:
        machine = options.this_machine(nvme_path, how["gpu_memory"])
        _print_plans(plan, _prepared(plan, machine, nvme_path), how["as_json"])
        return
    shared = merge or shard is not None or cluster is not None  # between machines, which may have different names
    output = output or (local.RESULTS if shared else local.results_folder()) / f"{name_of(recipe, plan)}.jsonl"
    if merge:
        outcome = parts.merge(plan, output, force=how["force"])
    elif cluster is not None and shard is None:  # a job of the cluster has both
        outcome = _on_cluster(plan, output, how)
    else:
        outcome = _measure(plan, output, bool(debug), how, shard)
    click.echo(output if shard is None else shard.path(parts.parts_path(output)))
    raise SystemExit(sweep.exit_code(plan, outcome.points) if outcome.points or shard is None else 0)


def taken(given: dict[str, Any]) -> dict[str, Any]:
    """Take what is not of a recipe out of `given`; return it."""
    return {name: given.pop(name) for name in given.keys() - Sweep.model_fields.keys()}


def asked(recipe: str | None, given: dict[str, Any], how: dict[str, Any], shared: bool = False) -> Sweep:
    """Return the sweep of parameters; `shared`: by several jobs. Raises UsageError, ZinferError."""
    settings = how["settings"]
    recipe, given = options.recipe_or_model(recipe, given)
    fields = {} if recipe is None else read_toml(sweep_recipe(recipe))
    fields |= {key: value for key, value in given.items() if value not in (None, ())}
    if settings:
        fields = with_options(fields, settings, str(recipe))
    if recipe is None and not settings and not CHOICES & fields.keys():
        fields |= DECIDING
    if shared:
        fields.setdefault("minutes", 0)
    if "model" not in fields:
        raise click.UsageError(f"say what to measure: {options.NAME_A_MODEL}")
    plan = make_sweep(fields, recipe or "the command line")
    if plan.machine:
        raise RecipeError(f"{recipe} is a recipe to plan with, for {', '.join(plan.machine)}: `zinfer plan {recipe}`")
    if any(sla.parse(text).metric == "decode_tok_s" for text in plan.sla):
        raise sla.SlaError("--sla: requests have no decode_tok_s: write user_tok_s or output_tok_s")
    if plan.batch_size != () and any(draft_of(load.options) != "none" for load in plan.loads()):
        raise OptionError("draft: equal batches of random tokens say nothing about drafts; measure requests alone")
    options.check_nvme(plan.offload, how["nvme_path"])
    if how["gpu_memory"] and (servers := [name for name in plan.engine if is_server(name)]):
        raise click.UsageError(f"--gpu-memory does not reach {', '.join(servers)}: limit a server by -O args=..")
    conflicts = [load.conflict for load in plan.loads()]
    if all(conflicts):
        raise OptionError(str(conflicts[0]))
    if not any(options.locate(load) for load in plan.loads()):
        raise RecipeError(f"none of the engines {', '.join(plan.engine)} has offload {', '.join(plan.offload)}")
    return plan


def _prepared(plan: Sweep, machine: Machine, nvme_path: str | None, shard: Shard | None = None) -> list[sweep.LoadJob]:
    loads = [load for load in plan.loads() if options.locate(load) is not None]
    loads = loads if shard is None else [*shard.of(loads)]
    source, sets = partial(sweep.source_of, plan), requests.request_sets(plan)
    return sweep.prepare(plan, machine, source, options.locate, nvme_path, requests=sets, loads=loads)


def begin(
    plan: Sweep, output: Path, how: dict[str, Any], shard: Shard | None = None
) -> tuple[Path, list[sweep.LoadJob], Header, list[sweep.Point]]:
    """Return file, loads, header and recorded points. Raises Failure."""
    resume, nvme_path = how["resume"], how["nvme_path"]
    machine = options.this_machine(nvme_path, how["gpu_memory"])
    jobs = _prepared(plan, machine, nvme_path, shard)
    if shard is None and not any(job.plan.fits for job in jobs):
        raise Failure(str(jobs[0].plan.why_not), ENVIRONMENT)
    path = output if shard is None else shard.path(parts.parts_path(output))
    header = sweep.header_of(plan, machine.name, [(job.plan.case.model, job.revision) for job in jobs], shard)
    done = _recorded(path, resume)
    _check_settings(path, done, header, how["force"])
    merged = read(output) if resume and shard is not None and output.exists() else Records()
    return path, jobs, header, [*merged.points, *done.points, *merged.requests, *done.requests]


def _measure(plan: Sweep, output: Path, debug: bool, how: dict[str, Any], shard: Shard | None) -> sweep.Outcome:
    """Measure a sweep into `output`, or a shard into its part. Exits where it is interrupted."""
    path, jobs, header, recorded = begin(plan, output, how, shard)
    expected = _announce(plan, sweep.outlook(plan, jobs, recorded), how["yes"])
    make_worker = partial(process.Worker, debug=debug)
    kept = f"every finished point is in {path}, `--resume` goes on"
    with Store(path) as store, Watch() as watch, watch.interruptible(kept):
        watch.message(f"results: {path}\n{expected}\nlive: zinfer report --serve {quote(str(path))}")
        store.append(header)
        outcome = sweep.run(plan, jobs, store, recorded, watch.events(), make_worker)
        if shard is not None and not outcome.left:
            store.append(header.model_copy(update={"complete": True}))
        store.check()
        if outcome.left:
            rest = f"not measured: {'; '.join(outcome.left)}. --resume goes on, --minutes none measures all"
            watch.message(f"ended by --minutes {plan.minutes:g}, {rest}")
    return outcome


def _announce(plan: Sweep, outlook: Outlook, yes: bool) -> str:
    """Return the line on the time of a sweep. On a terminal, ask before one of more than an hour."""
    seconds = outlook.seconds_left
    about = "a time that is not known" if seconds is None else f"about {duration(seconds)}"
    points = f"{'' if outlook.exact else 'about '}{counted(outlook.points - outlook.done, 'point')}"
    bound = f"at most {plan.minutes:g} minutes (--minutes)" if plan.minutes else "no limit (--minutes)"
    line = f"time: {about} for {points}, {bound}"
    if (seconds or 0) > LONG_S and not yes and sys.stdin.isatty() and sys.stderr.isatty():
        click.confirm(f"{line}. Begin?", default=True, abort=True, err=True)
    return line


def _recorded(output: Path, resume: bool) -> Records:
    """Return the content of the result file. Raises Failure if it has anything and is not to be resumed."""
    if not output.is_file() or not output.stat().st_size:
        return Records()
    if not resume:
        raise Failure(f"{output} exists: --resume goes on with it, -o takes another file")
    return warned(read(output))


def _check_settings(output: Path, done: Records, header: Header, force: bool) -> None:
    if force or not done.headers:
        return
    defaults = Sweep.model_construct(model=()).model_dump(mode="json")  # keys that an older file does not have
    old, new = (
        {"machine": each.machine, "model": each.model_revision, **each.versions}
        | {f"recipe.{key}": value for key, value in (defaults | each.recipe).items()}
        for each in (done.headers[-1], header)
    )
    names = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
    if changes := "\n".join(f"  {key}: {old.get(key)} -> {new.get(key)}" for key in names):
        raise Failure(f"{output} was made with other settings; --force goes on all the same.\n{changes}", INTEGRITY)


def _on_cluster(plan: Sweep, output: Path, how: dict[str, Any]) -> sweep.Outcome:
    """Measure each load of a sweep in a job, and merge them. Exits where it is interrupted or jobs fail."""
    path, resume, force = parts.parts_path(output), how["resume"], how["force"]
    loads = [load for load in plan.loads() if options.locate(load) is not None]
    revisions = [(load.model, sweep.source_of(plan, load).revision) for load in loads]
    begun = shards_begun(path)
    if begun and not resume:
        raise Failure(f"{begun[0].path(path)} has points of jobs: --resume goes on, -o takes another file")
    done = _recorded(output, resume)
    machine = done.headers[-1].machine if done.headers else ""
    _check_settings(output, done, sweep.header_of(plan, machine, revisions), force)
    cluster = parts.Cluster(output, how["slurm_args"])
    shards = Shard.all(begun[0].total if begun else len(loads))
    with Store(output), Watch() as watch:
        watch.message(f"results: {output}")
        cluster.end_earlier([shard.path(path) for shard in begun], watch.message)
        for shard in begun:
            parts.read_part(output, shard, plan)
        signal = 0
        try:
            # A job may be on another node: what must be equal is checked here and by the merge.
            cluster.run([sys.executable, "-m", "zinfer", *sys.argv[1:]], len(shards), watch.message)
        except Interrupted as interrupt:
            signal = interrupt.signal
            watch.message(f"interrupted; jobs are cancelled, finished points are kept, `--resume` goes on ({output})")
    written = {shard: parts.read_part(output, shard, plan) for shard in shards_begun(path)}
    lacking = [str(shard) for shard in shards if shard not in written or not written[shard].complete]
    outcome = parts.merge(plan, output, whole=not lacking, force=force)
    if signal:
        raise SystemExit(128 + signal)
    if lacking:
        shards_of = ", ".join(lacking)[:200]
        raise Failure(f"shards {shards_of} did not end, --resume goes on; logs of jobs: {cluster.folder}", PARTIAL)
    cluster.clear(shard.path(path) for shard in shards)
    return outcome


def name_of(recipe: str | None, plan: Sweep) -> str:
    if recipe is not None:
        return Path(recipe).stem
    models = [Path(model).name for model in plan.model]
    return "-".join([*models, *(f"{layers}-layers" for layers in plan.layers if layers is not None)])


def _print_plans(plan: Sweep, jobs: list[sweep.LoadJob], as_json: bool) -> None:
    rows = [
        job.planner.at(case.workload.with_batch(size))
        for job in jobs
        for case in job.cases
        for size in likely_batches(plan, job.planner, case.workload)
    ]
    if as_json:
        click.echo(json.dumps([row.model_dump(mode="json", exclude={"model", "machine"}) for row in rows], indent=1))
        return
    for row in rows:
        workload = row.case.workload
        lengths = f"{workload.input_len}/{workload.output_len} batch {workload.batch_size}"
        room = "" if workload.batch_size <= row.max_batch_size else f" · more than the {row.max_batch_size} that fit"
        say(f"{row.case.model} {row.case.label()} {lengths}: " + (row.why_not or describe(row) + room))
    for job in jobs:
        for key, request_set in job.requests:
            lengths = "/".join(map(str, request_set.mean_lengths))
            room = job.plan.why_not or f"{key.requests.describe()}, {lengths} tokens on average"
            say(f"{key.case.model} {key.case.label()}: {room}")
    say(f"{counted(plan.rounds * len(jobs), 'load')}; {_announce(plan, sweep.outlook(plan, jobs), yes=True)}")
