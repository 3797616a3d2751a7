"""`zinfer sweep`: measure points, and keep every one."""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zinfer.commands import options
from zinfer.commands.failure import Failure
from zinfer.commands.out import say
from zinfer.core.errors import ENVIRONMENT, INTEGRITY, PARTIAL

if TYPE_CHECKING:
    from zinfer.core.machine import Machine
    from zinfer.job.forecast import Outlook
    from zinfer.job.recipe import Sweep
    from zinfer.job.shard import Shard
    from zinfer.job.sweep import LoadJob, Outcome
    from zinfer.record.store import Header, Records


def _in_flight(word: str) -> int | str:
    return word if word == "auto" else options.positive(word)


def _rate(word: str) -> float | str:
    if word != "inf" and not (re.fullmatch(r"[0-9]{1,7}(\.[0-9]{1,9})?", word) and float(word) > 0):
        raise ValueError(word)
    return word if word == "inf" else float(word)


def _minutes(text: str) -> float:
    if text != "none" and not re.fullmatch(r"[0-9]{1,7}(\.[0-9]{1,3})?", text):
        raise ValueError(f"{text[:60]!r}: write a number of minutes, or none")
    return 0.0 if text == "none" else float(text)


LONG_S = 3600  # seconds from which on a sweep asks first
# Fields that choose what is measured: without any of them a sweep measures what `zinfer best` needs to decide.
CHOICES = {"engine", "offload", "batch_size", "gpu_weights", "weights", "requests", "request_lengths"}
DECIDING = {"engine": ("stream", "peer"), "offload": ("none", "cpu"), "batch_size": "1,8,auto"}
IN_FLIGHT = options.Values("auto|n,..", _in_flight, "auto, or positive whole numbers with commas between")
RATES = options.Values("r,..|inf", _rate, "positive numbers with commas between, or inf")


@click.command("sweep", cls=options.LoadCommand)
@click.argument("recipe", required=False)
@options.models
@click.option(
    "--engine",
    type=options.Words(),
    help="Engines (accelerate, deepspeed, stream, tensorrt), recipes in engines/, or peer: deepspeed for offloads if "
    "it is installed, else accelerate.  [default: stream; with --model alone, stream,peer]",
)
@options.offloads
@click.option(
    "--batch-size",
    type=options.BATCHES,
    help="Sequences at once; auto: double until two doublings together gain under 5%, or up to the edge of memory. "
    "Numbers may come before.  [default: auto; with --model alone, 1,8,auto]",
)
@click.option("--input-len", type=options.NUMBERS, help="Prompt tokens.  [default: 512]")
@click.option("--output-len", type=options.NUMBERS, help="Generated tokens.  [default: 32]")
@click.option(
    "--requests",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="Measure a load of requests: JSON lines of OpenAI's batch format, or of input_len and output_len.",
)
@click.option(
    "--request-lengths",
    multiple=True,
    metavar="DISTRIBUTION",
    help="Measure a load of random requests: lognormal:245,106,max_input_len=1500,max_output_len=400,sigma=0.8; "
    "uniform:245,106,spread=0.5; fixed:245,106 (mean tokens in and out). Repeatable.",
)
@click.option(
    "--num-requests",
    type=click.IntRange(min=1),
    help="Requests of a load.  [default: 1000, or all of FILE]",
)
@click.option(
    "--in-flight",
    type=IN_FLIGHT,
    help="Closed loop: requests at a time; auto: all that there is room for.  [default: auto, unless there is a rate]",
)
@click.option("--request-rate", type=RATES, help="Open loop: requests a second, at random times; inf: all at once.")
@click.option(
    "--request-order",
    type=click.Choice(["given", "longest-first"]),
    help="Order in which requests come with --in-flight N; longest-first: as in a job whose requests are all known.  "
    "[default: given]",
)
@click.option("--seed", type=click.IntRange(min=0), help="Seed of lengths, arrivals and tokens.  [default: 0]")
@click.option(
    "--sla",
    "sla",
    multiple=True,
    metavar="METRIC:STATISTIC:<=|>=:VALUE",
    help="Service level of requests, such as ttft:p99:<=:30s; requests that keep all make the goodput. Repeatable.",
)
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    help="Repeat the whole sweep N times, reloading the model each time.  [default: 1]",
)
@click.option(
    "--minutes",
    type=options.Parsed("n|none", _minutes),
    help="Begin no point after N minutes; none: no limit.  [default: 15; with --shard or --cluster, none]",
)
@click.option("--yes", is_flag=True, help="Begin a sweep of more than an hour without a question.")
@options.load_options
@options.weights
@click.option("--repeats", type=click.IntRange(min=1), help="Maximum runs per point.  [default: 3]")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    help="Limit for a point or a load, in seconds.  [default: 1800]",
)
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Result file (JSON lines).")
@click.option("--resume", is_flag=True, help="Continue a result file: measure only the points that it lacks.")
@click.option("--force", is_flag=True, help="Resume although the recipe, the model or a version changed.")
@click.option("--dry-run", is_flag=True, help="Print the plan of every point and stop.")
@click.option("--json", "as_json", is_flag=True, help="Print the points as JSON, not the result file's path.")
@click.option(
    "--shard",
    type=options.SHARD,
    help="Measure the loads i, i+n, i+2n, .. only, into a part beside --output: for a job of an array.",
)
@click.option("--merge", is_flag=True, help="Put the points of all shards together.")
@click.option(
    "--cluster",
    type=click.Choice(["slurm"]),
    help="Measure each load as a shard, in a job of an array in Slurm's queue.",
)
@click.option(
    "--slurm-arg",
    "slurm_args",
    multiple=True,
    metavar="KEY[=VALUE]",
    help="An option of sbatch for the jobs: time=4:00:00, partition=gpu, gpus-per-node=1, exclusive, .., or "
    "setup='module load cuda'. Repeatable.",
)
@click.pass_obj
def command(
    debug: bool,
    /,
    recipe: str | None,
    nvme_path: str | None,
    output: Path | None,
    resume: bool,
    force: bool,
    dry_run: bool,
    yes: bool,
    as_json: bool,
    shard: "Shard | None",
    merge: bool,
    cluster: str | None,
    slurm_args: tuple[str, ...],
    settings: dict[str, tuple[Any, ...]],
    **given: Any,
) -> None:
    """Measure throughput over batch size, with offload on and off. Every point is on disk before the next one starts.

    With --model alone it measures what decides, in at most 15 minutes: weights on the GPU and in host memory, engine
    stream and the one to compare it with, batch 1, 8 and more until that gains nothing.

    With --requests or --request-lengths it measures loads of requests instead: TTFT, TPOT, ITL and E2E of each, and the
    rate of them all; with --batch-size, both.

    RECIPE is a file, or a name in sweeps/ or among those that come with zinfer; options given besides it replace its
    own. Comma lists are axes.

    \b
    zinfer sweep --model ./my-checkpoint
    zinfer sweep --model bloom-176b --offload cpu --minutes none
    zinfer sweep --model opt-30b --engine stream,deepspeed --offload none,cpu --batch-size 1-64*2
    zinfer sweep --model opt-30b --offload cpu --request-lengths lognormal:245,106 --in-flight 64,auto
    zinfer sweep demo --resume
    zinfer sweep mixtral -o out.jsonl --shard 2/4         on each of four machines
    zinfer sweep mixtral -o out.jsonl --merge             when all shards have ended
    zinfer sweep mixtral --cluster slurm --slurm-arg partition=gpu --slurm-arg gpus-per-node=1 --slurm-arg time=4:00:00
    """
    from zinfer.analysis import sla
    from zinfer.core.engine import OptionError
    from zinfer.job import parts, sweep
    from zinfer.job.recipe import RecipeError, make_sweep, read_toml, sweep_recipe, with_options
    from zinfer.system import local

    fields = {}
    if recipe is not None:
        fields = read_toml(sweep_recipe(recipe))
    fields |= {key: value for key, value in given.items() if value not in (None, ())}
    if settings:
        fields = with_options(fields, settings, str(recipe))
    if recipe is None and not settings and not CHOICES & fields.keys():
        fields |= DECIDING
    if shard is not None or cluster is not None:
        fields.setdefault("minutes", 0)
    if "model" not in fields:
        raise click.UsageError(
            "say what to measure: --model NAME, or a recipe (`zinfer plan --list models` lists the catalogue)"
        )
    plan = make_sweep(fields, recipe or "the command line")
    if plan.machine:
        raise RecipeError(f"{recipe} is a recipe to plan with, for {', '.join(plan.machine)}: `zinfer plan {recipe}`")
    for text in plan.sla:
        if sla.parse(text).metric == "decode_tok_s":
            raise sla.SlaError(f"{text!r}: requests have no decode_tok_s: write user_tok_s or output_tok_s")
    if plan.batch_size != () and any(dict(load.options).get("draft", "none") != "none" for load in plan.loads()):
        raise OptionError("draft: equal batches of random tokens say nothing about drafts; measure requests alone")
    options.check_nvme(plan.offload, nvme_path)
    conflicts = [load.conflict for load in plan.loads()]
    if all(conflicts):
        raise OptionError(str(conflicts[0]))
    if slurm_args and cluster is None:
        raise click.UsageError("--slurm-arg is for --cluster slurm")
    if sum((dry_run, merge, shard is not None or cluster is not None)) > 1:
        raise click.UsageError("--dry-run, --shard, --merge and --cluster each do another thing: leave out all but one")
    if not any(options.locate(load) for load in plan.loads()):
        raise RecipeError(f"none of the engines {', '.join(plan.engine)} has offload {', '.join(plan.offload)}")
    if dry_run:
        _print_plans(plan, _prepared(plan, options.this_machine(nvme_path), nvme_path), as_json)
        return
    shared = merge or shard is not None or cluster is not None  # between machines, which may have different names
    output = output or (local.RESULTS if shared else local.results_folder()) / f"{_name(recipe, plan)}.jsonl"
    if merge:
        outcome = parts.merge(plan, output, force=force)
    elif cluster is not None and shard is None:  # a job of the cluster has both
        outcome = _on_cluster(slurm_args, plan, output, resume, force)
    else:
        outcome = _measure(plan, output, nvme_path, bool(debug), yes, resume, force, shard)
    path = output if shard is None else shard.path(parts.parts_path(output))
    rows = [*map(_row, outcome.points), *map(_request_row, outcome.requests)]
    click.echo(json.dumps(rows, indent=1) if as_json else path)
    raise SystemExit(sweep.exit_code(plan, outcome.all) if rows or shard is None else 0)


def _prepared(
    plan: "Sweep", machine: "Machine", nvme_path: str | None, shard: "Shard | None" = None
) -> "list[LoadJob]":
    """Return the loads of a sweep or shard, ready to run."""
    from functools import partial

    from zinfer.job import sweep
    from zinfer.job.requests import request_sets

    loads = [load for load in plan.loads() if options.locate(load) is not None]
    return sweep.prepare(
        plan,
        machine,
        partial(sweep.source_of, plan),
        options.locate,
        nvme_path,
        requests=request_sets(plan),
        loads=loads if shard is None else shard.of(loads),
    )


def _measure(
    plan: "Sweep",
    output: Path,
    nvme_path: str | None,
    debug: bool,
    yes: bool,
    resume: bool,
    force: bool,
    shard: "Shard | None" = None,
) -> "Outcome":
    """Measure a sweep into `output`, or a shard into its part. Exits where it is interrupted."""
    from functools import partial

    from zinfer.commands.watch import Watch
    from zinfer.job import parts, sweep
    from zinfer.job.signals import Interrupted
    from zinfer.record.store import Records, Store, read
    from zinfer.worker.process import Worker

    machine = options.this_machine(nvme_path)
    jobs = _prepared(plan, machine, nvme_path, shard)
    if shard is None and not any(job.plan.fits for job in jobs):
        raise Failure(str(jobs[0].plan.why_not), ENVIRONMENT)
    path = output if shard is None else shard.path(parts.parts_path(output))
    header = sweep.header_of(plan, machine.name, [(job.plan.case.model, job.revision) for job in jobs], shard)
    done = _recorded(path, resume)
    _check_settings(path, done, header, force)
    merged = read(output) if resume and shard is not None and output.exists() else Records()
    recorded: list[sweep.Point] = [*merged.points, *done.points, *merged.requests, *done.requests]
    expected = _announce(plan, sweep.outlook(plan, jobs, recorded), yes)
    with Store.open(path) as store, Watch() as watch:
        watch.message(f"results: {path}")
        watch.message(expected)
        store.append_header(header)
        try:
            outcome = sweep.run(plan, jobs, store, recorded, watch.events(), partial(Worker, debug=debug))
            if shard is not None and not outcome.left:
                store.append_header(header.model_copy(update={"complete": True}))
            store.check()
            if outcome.left:
                watch.message(
                    f"ended by --minutes {plan.minutes:g}, not measured: {'; '.join(outcome.left)}. --resume goes on, "
                    "--minutes none measures all"
                )
        except Interrupted as interrupt:
            watch.message(f"interrupted; every finished point is in {path}, `--resume` goes on")
            raise SystemExit(128 + interrupt.signal) from None
    return outcome


def _announce(plan: "Sweep", outlook: "Outlook", yes: bool) -> str:
    """Return the line on the time of a sweep. On a terminal, ask before one of more than an hour."""
    import sys

    from zinfer.core.units import counted, duration

    seconds = outlook.seconds_left
    about = "a time that is not known" if seconds is None else f"about {duration(seconds)}"
    points = f"{'' if outlook.exact else 'about '}{counted(outlook.points - outlook.done, 'point')}"
    bound = f"at most {plan.minutes:g} minutes (--minutes)" if plan.minutes else "no limit (--minutes)"
    line = f"time: {about} for {points}, {bound}"
    if seconds is not None and seconds > LONG_S and not yes and sys.stdin.isatty() and sys.stderr.isatty():
        click.confirm(f"{line}. Begin?", default=True, abort=True, err=True)
    return line


def _recorded(output: Path, resume: bool) -> "Records":
    """Return the content of the result file. Raises Failure if it has anything and is not to be resumed."""
    from zinfer.record.store import Records, read

    if not output.is_file() or not output.stat().st_size:
        return Records()
    done = read(output)
    if not resume:
        raise Failure(f"{output} exists: --resume goes on with it, -o takes another file")
    if done.warning:
        say(done.warning, err=True)
    return done


def _check_settings(output: Path, done: "Records", header: "Header", force: bool) -> None:
    """Raise Failure if the result file was made with other settings."""
    if done.headers and not force and (changes := _changes(done.headers[-1], header)):
        message = f"{output} was made with other settings; --force goes on all the same.\n" + changes
        raise Failure(message, INTEGRITY)


def _on_cluster(slurm_args: tuple[str, ...], plan: "Sweep", output: Path, resume: bool, force: bool) -> "Outcome":
    """Measure each load of a sweep in a job, and merge them. Exits where it is interrupted or jobs fail."""
    import sys

    from zinfer.commands.watch import Watch
    from zinfer.job import parts, sweep
    from zinfer.job.cluster import Cluster
    from zinfer.job.shard import Shard, shards_begun
    from zinfer.job.signals import Interrupted
    from zinfer.record.store import Store

    path = parts.parts_path(output)
    loads = [load for load in plan.loads() if options.locate(load) is not None]
    revisions = [(load.model, sweep.source_of(plan, load).revision) for load in loads]
    begun = shards_begun(path)
    if begun and not resume:
        raise Failure(f"{begun[0].path(path)} has points of jobs: --resume goes on with them, -o takes another file")
    done = _recorded(output, resume)
    machine = done.headers[-1].machine if done.headers else ""
    _check_settings(output, done, sweep.header_of(plan, machine, revisions), force)
    cluster = Cluster(output, slurm_args)
    shards = Shard.all(begun[0].total if begun else len(loads))
    with Store.open(output), Watch() as watch:
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
            watch.message(
                f"interrupted; the jobs are cancelled, every finished point is kept, `--resume` goes on ({output})"
            )
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


def _name(recipe: str | None, plan: Any) -> str:
    """Return the result file's stem. The recipe's, or the model's and the slice's."""
    if recipe is not None:
        return Path(recipe).stem
    models = "-".join(Path(model).name for model in plan.model)
    slices = [f"-{layers}-layers" for layers in plan.layers if layers is not None]
    return models + "".join(slices)


def _changes(before: Any, after: Any) -> str:
    """Return the differences between two headers, a line each."""
    from zinfer.job.recipe import Sweep

    defaults = Sweep.model_construct(model=()).model_dump(mode="json")  # keys that an older file does not have
    old, new = (
        {"machine": header.machine, "model": header.model_revision, **header.versions}
        | {f"recipe.{key}": value for key, value in (defaults | header.recipe).items()}
        for header in (before, after)
    )
    changed = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
    return "\n".join(f"  {key}: {old.get(key)} -> {new.get(key)}" for key in changed)


def _print_plans(plan: Any, jobs: list[Any], as_json: bool) -> None:
    from zinfer.core.units import counted
    from zinfer.job import sweep
    from zinfer.job.forecast import likely_batches
    from zinfer.plan.advice import describe

    rows = [
        job.planner.at(case.with_batch(batch).workload)
        for job in jobs
        for case in job.cases
        for batch in likely_batches(plan, job.planner, case.workload)
    ]
    if as_json:
        click.echo(json.dumps([row.model_dump(mode="json", exclude={"model", "machine"}) for row in rows], indent=1))
        return
    for row in rows:
        workload = row.case.workload
        lengths = f"{workload.input_len}/{workload.output_len}"
        head = f"{row.case.model} {row.case.label()} {lengths} batch {workload.batch_size}"
        room = "" if workload.batch_size <= row.max_batch_size else f" · more than the {row.max_batch_size} that fit"
        say(f"{head}: " + (row.why_not or describe(row) + room))
    for job in jobs:
        for key, request_set in job.requests:
            lengths = "/".join(map(str, request_set.mean_lengths))
            room = job.plan.why_not or f"{key.requests.describe()}, {lengths} tokens on average"
            say(f"{key.case.model} {key.case.label()}: {room}")
    say(f"{counted(plan.rounds * len(jobs), 'load')}; {_announce(plan, sweep.outlook(plan, jobs), yes=True)}")


def _request_row(point: Any) -> dict[str, Any]:
    """Return a load of requests as JSON. Its record, its statistics and its rates; null is unknown."""
    from zinfer.analysis.requests import goodput
    from zinfer.record.requests import METRICS

    rates = (
        "output_tok_s", "input_tok_s", "request_s", "waiting_tok_s", "steady_tok_s", "padding", "link_busy",
        "acceptance",
    )  # fmt: skip
    row: dict[str, Any] = point.model_dump(mode="json") | {name: getattr(point, name) for name in rates}
    summaries = {metric: point.summary(metric) for metric in METRICS}
    row |= {metric: None if value is None else value._asdict() for metric, value in summaries.items()}
    return row | {"goodput_request_s": goodput(point)}


def _row(point: Any) -> dict[str, Any]:
    rates = ("output_tok_s", "decode_tok_s", "prefill_tok_s", "tpot_ms", "h2d_bandwidth", "link_share")
    row: dict[str, Any] = point.model_dump(mode="json")
    return row | {name: getattr(point, name) for name in rates}
