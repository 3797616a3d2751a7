"""`zinfer reuse`: TTFT of a conversation whose KV cache was kept, against computing it again."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from zinfer.commands import options
from zinfer.commands.failure import Failure
from zinfer.core.errors import NOTHING, PARTIAL

if TYPE_CHECKING:
    from zinfer.commands.out import Table
    from zinfer.commands.watch import Watch
    from zinfer.job.sweep import LoadJob
    from zinfer.record.prefix_reuse import Point, Run


def _context(word: str) -> int:
    shortened = word.lower().removesuffix("k")
    return options.positive(shortened) * (1024 if shortened != word.lower() else 1)


CONTEXTS = options.Values("n,nk,..", _context, "numbers of tokens, such as 512,1k,32k")


@click.command("reuse", cls=options.LoadCommand)
@options.model
@click.option(
    "--engine",
    type=options.Words(),
    default="stream",
    show_default=True,
    help="Engines (accelerate, deepspeed, stream, tensorrt), or recipes in the folder engines/.",
)
@click.option(
    "--offload", type=options.Words(options.OFFLOADS), default="cpu", show_default=True,
    help="Weights on the GPU (none), in host memory (cpu) or on an NVMe drive.",
)  # fmt: skip
@click.option(
    "--context",
    type=CONTEXTS,
    default="1k,2k,4k,8k,16k,32k",
    show_default=True,
    help="Context lengths in tokens; k is 1024.",
)
@click.option(
    "--new-tokens",
    type=click.IntRange(min=1),
    default=32,
    show_default=True,
    help="Trailing tokens to compute; the rest comes from the cache.",
)
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="Samples a context length.")
@click.option("--kv-cache-dir", type=click.Path(file_okay=False), help="Also reload from a file in this folder.")
@options.load_options
@options.weights
@options.timeout(3600, "a load or a context")
@options.record("reuse")
@click.pass_obj
def command(
    debug: bool,
    /,
    model: str,
    engine: tuple[str, ...],
    offload: Any,
    context: tuple[int, ...],
    dtype: Any,
    load_format: Any,
    layers: int | None,
    nvme_path: str | None,
    gpu_weights: tuple[str, ...] | None,
    settings: dict[str, tuple[Any, ...]],
    output: Path | None,
    as_json: bool,
    **how: Any,
) -> None:
    """Measure the TTFT of a context whose KV cache was kept in host memory (and, with --kv-cache-dir, on disk) against
    computing all of it, for each context length; and the length from which on a reload wins.

    Runs are added to the file; of those of the same model, engine and settings the last one counts.

    \b
    zinfer reuse --model bloom-176b --layers 14 --context 1k,2k
    zinfer reuse --model ./my-checkpoint --offload none,cpu --kv-cache-dir /mnt/nvme/kv
    """
    from zinfer.checkpoint.source import find
    from zinfer.commands.out import console, study_file
    from zinfer.commands.watch import Watch
    from zinfer.job import recipe, sweep
    from zinfer.record import study
    from zinfer.record.measurement import latest
    from zinfer.record.prefix_reuse import Run

    context = tuple(sorted(set(context)))
    options.check_nvme(offload, nvme_path)
    if context[0] <= how["new_tokens"]:
        raise click.UsageError(f"--context {context[0]} has to exceed --new-tokens {how['new_tokens']}")
    if len(weights := how["weights"] or ("as-released",)) > 1:
        raise click.UsageError("reuse takes one value for --weights")
    source = find(model, dtype, layers, load_format or "auto", weights=cast("Any", weights[0]))
    machine = options.this_machine(nvme_path)
    fields = {
        "model": (model,), "engine": engine, "offload": offload, "input_len": context, "output_len": (1,),
        "layers": (layers,), "gpu_weights": gpu_weights or (None,), "options": settings,
        "allow_nan": bool(how["allow_nan"]), "weights": weights,
    }  # fmt: skip
    wanted = recipe.make_sweep(fields, "the command line")
    jobs = sweep.prepare(wanted, machine, lambda _load: source, options.locate, nvme_path, positions=False)
    if not jobs:
        raise click.UsageError(f"engine {', '.join(engine)} has no offload {', '.join(offload)}")
    reasons = [_why_not(job.plan.at(case.workload)) for job in jobs for case in job.cases]
    if all(reasons):  # a run without a measured context would take the place of an earlier one
        raise Failure(str(reasons[0]), NOTHING)
    path = study_file(Run, machine.name, output)
    done: list[Run] = []
    with Watch() as watch:
        for job in jobs:
            with _scratch(how["kv_cache_dir"]) as folder:
                done.append(_run(job, watch, debug, how | {"folder": folder}))
            study.append(path, done[-1])
    if as_json:
        click.echo(_json(latest(study.read(path, Run).runs)))
    else:
        for run in done:
            console().print(table(run), *run.verdicts, sep="\n", highlight=False)
    click.echo(f"wrote {path}", err=True)
    if not any(run.measured for run in done):
        raise Failure(next(point.skipped for run in done for point in run.points if point.skipped), NOTHING)
    possible = reasons.count(None)
    if (lost := possible - sum(len(run.measured) for run in done)) > 0:
        raise Failure(f"{lost} of {possible} context lengths failed; the others are recorded", PARTIAL)


def _json(runs: "Sequence[Run]") -> str:
    """Return runs of one machine as a JSON document."""
    import json

    shared = {"machine": runs[-1].machine, "device": runs[-1].device}
    own = [json.loads(run.model_dump_json(exclude={"machine", "device"})) for run in runs]
    return json.dumps(shared | {"runs": own}, indent=1)


@contextmanager
def _scratch(folder: str | None) -> Iterator[str | None]:
    """Make a temporary folder in `folder`, removed at the end even if the worker is killed; None without `folder`."""
    from zinfer.system import lease

    if folder is None:
        yield None
        return
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise click.UsageError(f"--kv-cache-dir {folder} is not a folder") from None
    with lease.folder(Path(folder), "reuse", ("*.safetensors", "*.part")) as found:
        yield found.name


def _run(job: "LoadJob", watch: "Watch", debug: bool, how: dict[str, Any]) -> "Run":
    """Measure one load, context after context; a context that cannot be measured gets a reason."""
    from zinfer.core.case import Workload
    from zinfer.record.prefix_reuse import Point, Run
    from zinfer.worker.process import TaskFailed, Worker, WorkerDied, now
    from zinfer.worker.tasks import About, Facts, PrefixReuse

    spec = job.plan.model
    plans = [job.plan.at(case.workload) for case in job.cases]
    began, facts, failed = now(), Facts(), ""
    points: list[Point] = []
    usable = [plan for plan in plans if _why_not(plan) is None]
    worker: Worker | None = None
    try:
        if usable:
            watch.loading(job.plan)
            worker = Worker(
                job.target, timeout_s=how["timeout_s"], notice=watch.progress, loaded=watch.loaded, debug=bool(debug)
            )
            try:
                worker.start(usable[-1])
            except TaskFailed as refused:
                failed = refused.line
        for plan in plans:
            point = Point(context=plan.case.workload.input_len, new_tokens=how["new_tokens"])
            why_not = _why_not(plan) or failed
            if why_not or worker is None:
                points.append(point.model_copy(update={"skipped": why_not}))
                continue
            facts = worker.ask(About())
            request = PrefixReuse(
                context=point.context, new_tokens=point.new_tokens, repeats=how["repeats"], folder=how["folder"]
            )
            try:
                answer = worker.ask(request)
            except TaskFailed as error:  # a longer context would fail, too
                points.append(point.model_copy(update={"skipped": f"{error.status}: {error}"}))
                failed = f"{point.context:,} tokens failed ({error.status})"
            else:
                points.append(Point.model_validate(point.model_dump() | answer.model_dump()))
                watch.say(_line(points[-1]))
    except WorkerDied as death:
        failed = f"{death.status}: {death}"
        for plan in plans[len(points) :]:
            left = Point(context=plan.case.workload.input_len, new_tokens=how["new_tokens"], skipped=failed)
            points.append(left)
    except KeyboardInterrupt:
        if worker is not None:
            worker.kill()
        raise
    finally:
        if worker is not None:
            worker.close()
    case = job.plan.case.model_copy(update={"workload": Workload(batch_size=1, input_len=1, output_len=1)})
    return Run(
        machine=job.plan.machine.name, device=_device(job.plan.machine), case=case, num_layers=spec.num_layers,
        total_layers=spec.total_layers, model_revision=job.revision, started_at=began,
        link=facts.link_bandwidth, versions=facts.versions, points=tuple(points),
    )  # fmt: skip


def _why_not(plan: Any) -> str | None:
    """Return the reason why a context cannot be measured; None if it can."""
    length, most = plan.case.workload.input_len, plan.model.max_position
    if most is not None and length > most:
        return f"{plan.model.name} has {most:,} positions"
    return None if plan.fits else str(plan.why_not)


def _device(machine: Any) -> str:
    from zinfer.system.host import cpu_model

    return str(machine.gpu_name or cpu_model())


def _line(point: "Point") -> str:
    """Return one line about a measured context."""
    from zinfer.record.prefix_reuse import SOURCES, median_text

    gains = {source: point.gain(source) for source in SOURCES}
    ways = [f"{source} {median_text(point.samples(source))} ({gain:.2f}x)" for source, gain in gains.items() if gain]
    text = ", ".join([f"{point.context:,} tokens: recompute {median_text(point.recompute_ms)}", *ways])
    return text if point.same_token else f"{text}, with ANOTHER token"


def table(run: "Run") -> "Table":
    """Return the medians of a run, a line for each context."""
    from zinfer.commands import out
    from zinfer.record.prefix_reuse import COLUMNS

    title = f"{run.title}: time to the first token\n{run.conditions}"
    return out.table(title, COLUMNS, [point.cells for point in run.measured])
