"""`zinfer study accuracy`: the error that a setting of an engine adds, against the same engine without it."""

from hashlib import sha256
from pathlib import Path
from typing import Any

import click

from zinfer.analysis.study import compared, label
from zinfer.checkpoint.quantization import SCHEMES
from zinfer.checkpoint.source import Source, find
from zinfer.commands import options, pack
from zinfer.commands.failure import Failure
from zinfer.commands.options import option
from zinfer.commands.study import keep, present
from zinfer.commands.watch import Watch
from zinfer.core.engine import OptionError, conflict
from zinfer.core.errors import ENVIRONMENT, NOTHING, PARTIAL
from zinfer.core.model import check_positions
from zinfer.job import sweep
from zinfer.job.accuracy import AccuracyStudy, describe, text_of
from zinfer.job.signals import Interrupted, Signals
from zinfer.plan.planner import Plan, make_plan
from zinfer.record.study import Failed, Study, Text
from zinfer.worker.process import WorkerError, study_header


@click.command("accuracy", cls=options.LoadCommand)
@options.model
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
def command(debug: bool, /, output: Path | None, **how: Any) -> None:
    """Measure the cost of an engine's setting in accuracy.

    Each setting (a comma list is an axis), or the model's weights in fewer bits, is compared with the engine's
    defaults: the error of its logits, how often its most likely token differs, the text's perplexity, and the first
    token at which greedy texts differ.

    Each of --samples pieces of the text makes two rows, which go on with the reference's greedy tokens or the text's;
    every setting is fed the same tokens. The reference's logits are stored in TMPDIR: rows x tokens x vocabulary x 2
    bytes, or x 4 in fp32. Random weights say little: their record is written only with --output.

    \b
    zinfer study accuracy --model ./my-checkpoint --offload cpu --kv-cache-dtype int8,fp8
    zinfer study accuracy --model ./my-checkpoint --weights int4 --weights int8 --weights fp8
    """
    if not how["settings"] and not how["copies"]:
        raise click.UsageError("no setting to compare: name one, as in --kv-cache-dtype int8,fp8 or --weights int4")
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
        study = AccuracyStudy(reference, settings, text, how["samples"], worker, watch.loading)
        try:
            with signals.raised():
                study.run()
        except WorkerError as error:
            raise Failure(f"the reference: {error.line}", error.exit_code) from None
        except Interrupted as interrupt:
            signal = interrupt.signal
            if not study.rows:
                raise SystemExit(128 + signal) from None
    case = reference.case
    run = Study(
        study="accuracy", model=case.model, about=describe(source.spec), revision=source.revision, case=case,
        logits_dtype=study.logits_dtype, samples=how["samples"], rows=tuple(study.rows), **start,
        text=Text(name=name, sha256=sha256(text.encode()).hexdigest(), tokens=study.tokens),
    )  # fmt: skip
    # Random weights say nothing of a model, so they do not take the place of a checkpoint's.
    if compared(run) and (output is not None or case.load_format != "dummy"):
        keep(run, output)
    else:
        click.echo("not written: no setting was measured, or only random weights", err=True)
    present(run)
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
    ours, theirs = ({**dict(spec), **_NOT_COMPARED} for spec in (source.spec, copy.spec))
    if ours != theirs:
        text = f"--weights {wanted}: it is another model than {source.spec.name}: its shape differs"
        raise Failure(text, ENVIRONMENT)
    return copy


# Fields in which a model and its quantised copy may differ.
_NOT_COMPARED: dict[str, Any] = {
    "name": "", "config": {}, "directory": None, "hub_id": None, "stored_ratio": 1.0, "fp8_ratio": 0.0,
}  # fmt: skip


def _plans(how: dict[str, Any], source: Source, copies: list[Source]) -> tuple[Plan, list[Plan], str]:
    """Return the plans of reference and settings; of `copies`, too; and the engine's module:Class."""
    offload, gpu_weights, nvme_path = how["offload"], how["gpu_weights"], how["nvme_path"]
    options.check_nvme([offload], nvme_path)
    if gpu_weights and len(gpu_weights) > 1:
        raise click.UsageError("--gpu-weights takes one share here: the settings are what is compared")
    machine = options.this_machine(nvme_path)

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
