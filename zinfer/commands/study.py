"""`zinfer study`: studies of one question each, in records of one type."""

from hashlib import sha256
from pathlib import Path
from typing import Any

import click

from zinfer.analysis.study import compared, label, measured, show, wrong
from zinfer.checkpoint.quantization import SCHEMES
from zinfer.checkpoint.source import Source, find
from zinfer.commands import options, pack
from zinfer.commands.options import option
from zinfer.commands.out import Table, console
from zinfer.commands.verb import Failure, Verb
from zinfer.commands.watch import Watch
from zinfer.core.case import Workload
from zinfer.core.engine import ENGINES, OptionError, conflict
from zinfer.core.errors import ENVIRONMENT, INTEGRITY, NOTHING, PARTIAL
from zinfer.core.model import check_positions
from zinfer.job import sweep
from zinfer.job.accuracy import AccuracyStudy, describe, text_of
from zinfer.job.driver import Driver
from zinfer.job.signals import Interrupted, Signals
from zinfer.plan.planner import Plan, make_plan
from zinfer.record import study
from zinfer.record.study import Failed, Reload, Study, Text
from zinfer.system.local import RESULTS
from zinfer.worker.process import WorkerError, study_header
from zinfer.worker.tasks import Facts, PrefixReuse


def _context(word: str) -> int:
    shortened = word.lower().removesuffix("k")
    return options.positive(shortened) * (1024 if shortened != word.lower() else 1)


CONTEXTS = options.comma_list("N,Nk,..", _context, "numbers of tokens, such as 512,1k,32k")
# fields in which a model and its quantised copy may differ
COPY_FIELDS = {"name", "config", "directory", "hub_id", "stored_ratio", "fp8_ratio", "routed_ratio"}


@click.group("study")
def command() -> None:
    """Measure one question apart from a sweep. Each run is added to sweeps/results/MACHINE/STUDY.jsonl."""


def _keep(run: Study, output: Path | None) -> None:
    path = output or RESULTS / run.machine
    if output is None or path.is_dir():
        path /= f"{run.study}.jsonl"
    study.append(path, run)
    click.echo(f"wrote {path}", err=True)


def _present(run: Study) -> None:
    shown = show(run)
    console().print(Table(shown.title, shown.columns, shown.cells), *shown.notes, sep="\n", highlight=False)


@command.command("codec", cls=Verb)
@click.argument("checkpoints", nargs=-1, metavar="[CHECKPOINT]...", type=click.Path(path_type=Path))
@options.record("codec")
def codec(checkpoints: tuple[Path, ...], output: Path | None) -> None:
    """Measure size and speed of losslessly coded weights, and whether coding pays.

    Drawn weights are coded and decoded, and those of each CHECKPOINT (a folder, or one safetensors file), floats cast
    to bf16. Reports their size as a share of the original, the speed, whether every bit returns, and the gain of a
    streamed model over this machine's link. Checkpoints are not changed; of a large one, a sample of each matrix is
    taken. The exit code is 6 if the codec returned other bits.

    \b
    zinfer study codec
    zinfer study codec ./my-checkpoint
    """
    from zinfer.worker import codec  # with torch

    run = codec.measure(checkpoints, lambda what: click.echo(f"measuring {what}", err=True))
    _keep(run, output)
    _present(run)
    if names := wrong(run):
        raise Failure(f"{', '.join(names)}: the codec returned other bits", INTEGRITY)


@command.command("accuracy", cls=Verb)
@options.any_model
@options.engine
@options.offload_if_needed
@option("--weights copies", str, "Quantised copy: a folder, or int4, int8, fp8. Repeatable.", multiple=True)
@options.prompt_text
@option("--input-len", options.COUNT, "Tokens of a prompt.", default=256)
@option("--output-len", options.COUNT, "Tokens compared in each row.", default=64)
@option("--samples", options.COUNT, "Pieces of the text; each makes two rows.", default=16)
@option("--batch-size", options.COUNT, "Rows in a batch.", default=8)
@options.load_options
@options.timeout(36000, "a batch")
@options.record("accuracy")
@click.pass_obj
def accuracy(debug: bool, /, output: Path | None, **how: Any) -> None:
    """Measure the cost of an engine's setting in accuracy.

    Each setting (a comma list is an axis), or the model's weights in fewer bits, is compared with the engine's
    defaults: the error of its logits, how often its most likely token differs, the text's perplexity, and the first
    token at which greedy texts differ.

    Each of --samples pieces of the text makes two rows, which go on with the reference's greedy tokens or the text's;
    every setting is fed the same tokens. The reference's logits are stored in TMPDIR: rows x tokens x vocabulary x 2
    bytes, or x 4 in fp32. Random weights say little: their record is written only with --output.

    \b
    zinfer study accuracy --model ./my-checkpoint --offload cpu --kv-cache-dtype int8
    zinfer study accuracy --model ./my-checkpoint --weights int4 --weights int8 --weights fp8
    """
    if not how["settings"] and not how["copies"]:
        raise click.UsageError("no setting to compare: name one, as in --kv-cache-dtype int8 or --weights int4")
    if how["layers"] is not None:
        raise click.UsageError("--layers: a part of a model's layers generates no text; leave it out")
    source = options.weights_of(how)
    check_positions(source.spec, how["input_len"], how["output_len"])
    name, text = text_of(how["prompt_file"])
    with Watch() as watch:
        copies = [_copy(source, wanted, watch) for wanted in dict.fromkeys(how["copies"])]
    reference, settings, target = _plans(how, source, copies)
    start, signal = study_header(reference.case.engine), 0
    with Watch() as watch, Signals() as signals:
        worker = watch.workers(target, how["timeout_s"], debug)
        asked = AccuracyStudy(reference, settings, text, how["samples"], worker, watch.loading)
        try:
            with signals.raised():
                asked.run()
        except WorkerError as error:
            raise Failure(f"the reference: {error.line}", error.exit_code) from None
        except Interrupted as interrupt:
            signal = interrupt.signal
            if not asked.rows:
                raise SystemExit(128 + signal) from None
    case = reference.case
    run = Study(
        study="accuracy", model=case.model, about=describe(source.spec), revision=source.revision, case=case,
        logits_dtype=asked.logits_dtype, samples=how["samples"], rows=tuple(asked.rows), **start,
        text=Text(name=name, sha256=sha256(text.encode()).hexdigest(), tokens=asked.tokens),
    )  # fmt: skip
    # Random weights say nothing of a model, so they do not take the place of a checkpoint's.
    if compared(run) and (output is not None or case.load_format != "dummy"):
        _keep(run, output)
    else:
        click.echo("not written: no setting was measured, or only random weights", err=True)
    _present(run)
    if signal:
        raise SystemExit(128 + signal)
    if failed := run.of(Failed):
        reasons = "; ".join(f"{label(run, row.case)}: {row.status}: {row.error}" for row in failed)
        raise Failure(reasons, PARTIAL if compared(run) else NOTHING)


def _copy(source: Source, wanted: str, watch: Watch) -> Source:
    """Return a quantised copy of the model: of the folder `wanted`, or of a scheme, written if it is missing."""
    folder = Path(wanted)
    if wanted in SCHEMES:
        if source.load_format == "dummy":
            raise click.UsageError("--weights: random weights have no copies; give a checkpoint")
        folder = pack.quantised_folder(source, wanted)
        if not (folder / "config.json").exists():
            pack.quantised(source, wanted, None, watch)
    copy = find(str(folder), source.spec.dtype, None, "safetensors")
    ours, theirs = (spec.model_dump(exclude=COPY_FIELDS) for spec in (source.spec, copy.spec))
    if ours != theirs:
        text = f"--weights {wanted}: it is another model than {source.spec.name}: its shape differs"
        raise Failure(text, ENVIRONMENT)
    return copy


def _plans(how: dict[str, Any], source: Source, copies: list[Source]) -> tuple[Plan, list[Plan], str]:
    """Return the plans of reference and settings; of `copies`, too; and the engine's module:Class."""
    offload, gpu_weights, nvme_path = how["offload"], how["gpu_weights"], how["nvme_path"]
    options.check_nvme([offload], nvme_path)
    if gpu_weights and len(gpu_weights) > 1:
        raise click.UsageError("--gpu-weights takes one share here: the settings are what is compared")
    machine = options.this_machine(nvme_path, how["gpu_memory"])

    def plans(choice: Any, axes: dict[str, Any], model: str, source: Source) -> list[tuple[Plan, str]]:
        lengths = {"input_len": how["input_len"], "output_len": how["output_len"]}
        wanted = options.sweep_of(how, model=model, offload=choice, options=axes, **lengths)
        jobs = sweep.prepare(wanted, machine, lambda _load: source, options.locate, nvme_path)
        if not jobs:
            raise click.UsageError(f"engine {how['engine']} has no offload {choice}")
        cases = [(job.cases[0].with_batch(how["batch_size"]), job.target) for job in jobs]
        return [(make_plan(case, source.spec, machine, nvme_path), target) for case, target in cases]

    for choice in options.offload_choices(offload, gpu_weights):
        ((reference, target),) = plans(choice, {}, how["model"], source)
        settings = plans(choice, how["settings"], how["model"], source) if how["settings"] else []
        for copy in copies:
            settings += plans(choice, how["settings"], copy.spec.name, copy)
        # What equals the reference says nothing that comparing it with itself in halves does not.
        others = [plan for plan, _ in settings if plan.case != reference.case] or [plan for plan, _ in settings]
        refused = next((plan for plan in (reference, *others) if not plan.fits), None)
        if refused is None:
            return reference, others, target
    assert refused is not None
    case = refused.case
    if contradiction := conflict(case.engine, case.options, case.offload, gpu_weights=case.gpu_weights):
        raise OptionError(contradiction)
    raise Failure(str(refused.why_not), ENVIRONMENT)


@command.command("reuse", cls=Verb)
@options.any_model
@option(
    "--engine", options.words("ENGINE,.."), f"Engines ({', '.join(ENGINES)}), or recipes in engines/.", default="stream"
)
@option("--offload", options.words("", options.OFFLOADS), options.OFFLOAD_HELP, default="cpu")
@option("--context contexts", CONTEXTS, "Context lengths in tokens; k is 1024.", default="1k,2k,4k,8k,16k,32k")
@option("--new-tokens", options.COUNT, "Trailing tokens to compute; the rest comes from the cache.", default=32)
@option("--repeats", options.COUNT, "Samples a context length.", default=3)
@options.load_options
@options.weights
@options.timeout(3600, "a load or a context")
@options.record("reuse")
@click.pass_obj
def reuse(debug: bool, /, output: Path | None, **how: Any) -> None:
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
    machine = options.this_machine(nvme_path, how["gpu_memory"])
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
            _keep(runs[-1], output)
    for run in runs:
        _present(run)
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
                except WorkerError as error:  # a longer context would fail, too
                    point = point.model_copy(update={"skipped": error.line})
                    failed = f"{context:,} tokens failed ({error.status})"
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


@command.command("routing", cls=Verb)
@options.any_model
@options.prompt_text
@option("--samples", options.COUNT, "Pieces of the text.", default=16)
@option("--length", click.IntRange(min=2), "Tokens of a piece.", default=256)
@options.record("routing")
def routing(model: str, prompt_file: str, samples: int, length: int, output: Path | None) -> None:
    """Measure the experts that a trained mixture needs, and a cache's hits.

    The experts that the routers of a checkpoint choose for each token of a text are replayed on a cache of experts: the
    share of needs that it meets, with each policy and for several sizes. Random weights route evenly and are refused.

    \b
    zinfer study routing --model ./my-mixture --prompt-file book.txt --samples 64
    """
    from zinfer.worker import routing  # with torch

    spec, text = find(model, None, None, "safetensors").spec, text_of(prompt_file)
    progress = lambda what: click.echo(f"traced {what}", err=True)  # noqa: E731
    run = routing.measure(spec, text, samples, length, describe(spec), progress)
    _keep(run, output)
    _present(run)
