"""`zinfer study reuse`: TTFT of a conversation whose KV cache was kept, against computing it again."""

from pathlib import Path
from typing import Any

import click

from zinfer.analysis.study import measured
from zinfer.checkpoint.source import find
from zinfer.commands import options
from zinfer.commands.failure import Failure
from zinfer.commands.options import option
from zinfer.commands.study import keep, present
from zinfer.commands.watch import Watch
from zinfer.core.case import Workload
from zinfer.core.errors import NOTHING, PARTIAL
from zinfer.job import sweep
from zinfer.job.driver import Driver
from zinfer.plan.planner import Plan
from zinfer.record.study import Reload, Study
from zinfer.worker.process import TaskFailed, WorkerDied, WorkerError, study_header
from zinfer.worker.tasks import Facts, PrefixReuse


def _context(word: str) -> int:
    shortened = word.lower().removesuffix("k")
    return options.positive(shortened) * (1024 if shortened != word.lower() else 1)


CONTEXTS = options.comma_list("n,nk,..", _context, "numbers of tokens, such as 512,1k,32k")


@click.command("reuse", cls=options.LoadCommand)
@options.model
@option("--engine", options.Words(), options.ENGINES_HELP, default="stream")
@option("--offload", options.Words(options.OFFLOADS), "Weights on the GPU, in host memory, on NVMe.", default="cpu")
@option("--context contexts", CONTEXTS, "Context lengths in tokens; k is 1024.", default="1k,2k,4k,8k,16k,32k")
@option("--new-tokens", options.COUNT, "Trailing tokens to compute; the rest comes from the cache.", default=32)
@option("--repeats", options.COUNT, "Samples a context length.", default=3)
@options.load_options
@options.weights
@options.timeout(3600, "a load or a context")
@options.record("reuse")
@click.pass_obj
def command(debug: bool, /, output: Path | None, **how: Any) -> None:
    """Measure TTFT with a conversation's KV cache kept, and computed again.

    The cache of each context length is kept in host memory. Reports the length from which on a reload wins. Runs are
    added to the file; of those of the same model, engine and settings the last one counts.

    \b
    zinfer study reuse --model bloom-176b --layers 14 --context 1k,2k
    zinfer study reuse --model ./my-checkpoint --offload none,cpu
    """
    contexts, nvme_path = tuple(sorted(set(how["contexts"]))), how["nvme_path"]
    options.check_nvme(how["offload"], nvme_path)
    if contexts[0] <= how["new_tokens"]:
        raise click.UsageError(f"--context {contexts[0]} has to exceed --new-tokens {how['new_tokens']}")
    weights: Any = how["weights"] or ("as-released",)
    if len(weights) > 1:
        raise click.UsageError("reuse takes one value for --weights")
    load_format: Any = how["load_format"] or "auto"
    source = find(how["model"], how["dtype"], how["layers"], load_format, weights=weights[0])
    wanted = options.sweep_of(how, offload=how["offload"], input_len=contexts, output_len=1)
    machine = options.this_machine(nvme_path)
    jobs = sweep.prepare(wanted, machine, lambda _load: source, options.locate, nvme_path, positions=False)
    if not jobs:
        raise click.UsageError(f"engine {', '.join(how['engine'])} has no offload {', '.join(how['offload'])}")
    reasons = [_why_not(job.planner.at(case.workload)) for job in jobs for case in job.cases]
    if all(reasons):  # a run without a measured context would take the place of an earlier one
        raise Failure(str(reasons[0]), NOTHING)
    runs: list[Study] = []
    with Watch() as watch:
        for job in jobs:
            runs.append(_run(job, watch, debug, how))
            keep(runs[-1], output)
    for run in runs:
        present(run)
    done = sum(len(measured(run)) for run in runs)
    if not done:
        raise Failure(next(point.skipped for run in runs for point in run.of(Reload) if point.skipped), NOTHING)
    if (lost := reasons.count(None) - done) > 0:
        raise Failure(f"{lost} of {reasons.count(None)} context lengths failed; the others are recorded", PARTIAL)


def _run(job: sweep.LoadJob, watch: Watch, debug: bool, how: dict[str, Any]) -> Study:
    spec, start, facts, failed = job.plan.model, study_header(job.plan.case.engine), Facts(), ""
    points: list[Reload] = []
    plans = [job.planner.at(case.workload) for case in job.cases]
    usable = [plan for plan in plans if _why_not(plan) is None]
    with Driver(watch.workers(job.target, how["timeout_s"], debug), watch.loading) as driver:
        try:
            if usable:
                driver.load(usable[-1])
                with driver.lend() as worker:
                    facts = worker.facts
        except WorkerError as error:
            failed = error.line
        for plan in plans:
            context = plan.case.workload.input_len
            point = Reload(context=context, new_tokens=how["new_tokens"], skipped=_why_not(plan) or failed or None)
            if point.skipped is None:
                asked = PrefixReuse(context=context, new_tokens=point.new_tokens, repeats=how["repeats"])
                try:
                    with driver.lend() as worker:
                        point = worker.ask(asked)
                    watch.message(f"{context:,} tokens measured")
                except TaskFailed as error:  # a longer context would fail, too
                    point = point.model_copy(update={"skipped": error.line})
                    failed = f"{context:,} tokens failed ({error.status})"
                except WorkerDied as death:
                    failed = f"{death.status}: {death}"
                    point = point.model_copy(update={"skipped": failed})
            points.append(point)
    case = job.plan.case.model_copy(update={"workload": Workload(batch_size=1, input_len=1, output_len=1)})
    return Study(
        study="reuse", model=case.model, case=case, num_layers=spec.num_layers, total_layers=spec.total_layers,
        revision=job.revision, link=facts.link_bandwidth, rows=tuple(points),
        **start | {"machine": job.plan.machine.name, "versions": facts.versions},
    )  # fmt: skip


def _why_not(plan: Plan) -> str | None:
    length, positions = plan.case.workload.input_len, plan.model.max_position
    if positions is not None and length > positions:
        return f"{plan.model.name} has {positions:,} positions"
    return None if plan.fits else str(plan.why_not)
