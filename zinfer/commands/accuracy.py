"""`zinfer accuracy`: what a setting of an engine costs in accuracy, against the same engine without it."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zinfer.cli import Failure
from zinfer.commands import options
from zinfer.spec.errors import ENVIRONMENT, NOTHING, PARTIAL

if TYPE_CHECKING:
    from rich.table import Table

    from zinfer.plan.plan import Plan
    from zinfer.record.accuracy import AccuracyRecord


@click.command("accuracy", short_help="State what a setting costs in accuracy.")
@click.option("-m", "--model", required=True, help=options.MODEL_HELP)
@click.option("--engine", default="stream", show_default=True, help="An engine, or a recipe of the folder engines/.")
@click.option(
    "--offload", type=click.Choice(options.OFFLOADS), help="Where the weights live.  [default: none if they fit]"
)
@click.option(
    "--reference", multiple=True, callback=options.engine_options, metavar="KEY=VALUE",
    help="A setting of the reference, which has the engine's defaults otherwise. Repeatable.",
)  # fmt: skip
@click.option("--prompt-file", default="default", show_default=True, help="A text; default: Python's own manual.")
@click.option("--input-len", type=click.IntRange(min=1), default=256, show_default=True, help="Tokens of a prompt.")
@click.option("--output-len", type=click.IntRange(min=1), default=64, show_default=True, help="Tokens followed.")
@click.option(
    "--samples", type=click.IntRange(min=1), default=16, show_default=True, help="Pieces of the text, two rows each."
)
@click.option("--batch-size", type=click.IntRange(min=1), default=8, show_default=True, help="Rows at once.")
@options.load_options
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(min=0, min_open=True), default=36000, help="Seconds a batch."
)
@click.option("--output", "-o", type=click.Path(path_type=Path), help="Default: sweeps/results/MACHINE/accuracy.json.")
@click.option("--json", "as_json", is_flag=True, help="Print the record as JSON.")
@click.pass_obj
def command(debug: bool, /, output: Path | None, as_json: bool, **how: Any) -> None:
    """Compare each setting (a comma list is an axis) with the engine as it comes: the error of its logits, how
    often its most likely token is another one, the text's perplexity, and when a greedy text first differs.

    Each of --samples pieces of the text makes two rows: one goes on from the piece's first --input-len tokens with the
    reference's own greedy tokens, one with the text's. All settings are led along the same tokens, --output-len a row.
    The reference's logits wait in TMPDIR: rows x tokens x vocabulary x 2 bytes, or 4. Of random weights, which say
    little, a record is written only where --output says so.

    \b
    zinfer accuracy --model ./my-checkpoint --offload cpu --kv-cache-dtype int8,fp8
    zinfer accuracy --model ./my-checkpoint --dtype fp32 --kv-cache-dtype int8 --prompt-file book.txt --samples 64
    """
    from zinfer.commands.out import console
    from zinfer.commands.probe import write
    from zinfer.record import accuracy

    record = _measure(debug, how)
    path = output or Path("sweeps/results") / record.machine
    if output is None or path.is_dir():
        path = path / accuracy.FILE
    text = record.model_dump_json(indent=1) + "\n"
    # What says nothing of a model does not take the place of what does.
    kept = record.compared and (output is not None or record.reference.load_format != "dummy")
    if kept:
        write(path, text)
    if as_json:
        click.echo(text, nl=False)
    else:
        console().print(table(record))
    click.echo(f"wrote {path}" if kept else "not written: no setting was measured, or only random weights", err=True)
    if record.failed:
        told = "; ".join(f"{record.label(one.case)}: {one.status}: {one.error}" for one in record.failed)
        raise Failure(told, PARTIAL if record.compared else NOTHING)


def _measure(debug: bool, how: dict[str, Any]) -> "AccuracyRecord":
    """Refuse what cannot be compared, then compare."""
    from hashlib import sha256

    from zinfer.commands.watch import Watch
    from zinfer.job import accuracy as deviate
    from zinfer.job import sweep
    from zinfer.job.accuracy import NoAnswer, text_of, told_of
    from zinfer.job.signals import Interrupted, Signals
    from zinfer.record.accuracy import AccuracyRecord, Prompts
    from zinfer.spec import host, local
    from zinfer.spec.model import ModelError, check_positions
    from zinfer.spec.source import find
    from zinfer.worker.process import Worker, now, versions

    if not how["settings"]:
        raise click.UsageError("say what to compare, as in --kv-cache-dtype int8,fp8")
    if how["layers"] is not None:
        raise click.UsageError("--layers: what a part of a model's layers say is no text; leave it out")
    if any(len(values) > 1 for values in how["reference"].values()):
        raise click.UsageError("--reference takes one value for each option: there is one reference")
    model, load_format = how["model"], how["load_format"]
    source = find(model, how["dtype"], None, load_format or "auto", fetch=True)
    if source.load_format == "dummy" and load_format != "dummy":
        raise ModelError(f"{model} has no weights to fetch: give a checkpoint folder, or --load-format dummy to try it")
    spec = source.spec
    check_positions(spec, how["input_len"], how["output_len"])
    started, (reference, settings, target) = now(), _plans(how, source)
    name, text = text_of(how["prompt_file"])
    with Watch() as watch, Signals() as signals:
        comparison = deviate.Comparison(
            reference=reference,
            settings=settings,
            text=text,
            samples=how["samples"],
            make_worker=lambda: Worker(
                target, timeout_s=how["timeout_s"], notice=watch.progress, loaded=watch.loaded, debug=bool(debug)
            ),
            loading=lambda plan: watch.loading(sweep.Job(plan, (plan.case,), target)),
        )
        try:
            with signals.raised():
                found = comparison.run()
        except NoAnswer as error:
            raise Failure(f"the reference: {error.status}: {error}", ENVIRONMENT) from None
        except Interrupted as interrupt:
            raise SystemExit(128 + interrupt.signal) from None
    devices = host.gpus()
    return AccuracyRecord(
        machine=local.name(),
        device=str(devices[0].get("name", "gpu")) if devices else host.cpu_model(),
        started_at=started,
        versions=versions(reference.case.engine),
        told=told_of(spec),
        revision=source.revision,
        reference=reference.case,
        logits_dtype=found.logits_dtype,
        samples=how["samples"],
        prompts=Prompts(name=name, sha256=sha256(text.encode()).hexdigest(), tokens=found.tokens),
        deviations=found.deviations,
        failed=found.failed,
    )


def _plans(how: dict[str, Any], source: Any) -> "tuple[Plan, list[Plan], str]":
    """The reference's plan, those of the settings, and their engine."""
    from zinfer.job import recipe
    from zinfer.plan.plan import make_plan
    from zinfer.spec import local

    offload, gpu_weights, nvme_path = how["offload"], how["gpu_weights"], how["nvme_path"]
    if offload == "nvme" and nvme_path is None:
        raise click.UsageError("--offload nvme needs --nvme-path, a folder on the NVMe drive")
    if gpu_weights and (offload == "none" or len(gpu_weights) > 1):
        raise click.UsageError("--gpu-weights is one share of offloaded weights: leave out --offload none")
    machine = options.with_nvme(local.this_machine(), nvme_path)

    def plans(choice: Any, axes: dict[str, Any]) -> "list[tuple[Plan, str]]":
        wanted = recipe.Sweep(
            model=(how["model"],), engine=(how["engine"],), offload=(choice,), gpu_weights=gpu_weights or (None,),
            input_len=(how["input_len"],), output_len=(how["output_len"],), options=axes,
        )  # fmt: skip
        found = []
        for load in wanted.loads():
            target = options.locate(load)
            if target is None:
                raise click.UsageError(f"engine {how['engine']} has no offload {choice}")
            case = wanted.case(load, source.load_format, source.spec.dtype, next(wanted.lengths()))
            plan = make_plan(case.with_batch(how["batch_size"]), source.spec, machine, nvme_path)
            found.append((plan, target))
        return found

    why_not = None
    for choice in [offload] if offload else ["cpu"] if gpu_weights else ["none", "cpu"]:
        ((reference, target),), settings = plans(choice, how["reference"]), plans(choice, how["settings"])
        every = [reference, *(plan for plan, _ in settings)]
        why_not = next((plan.why_not for plan in every if not plan.fits), None)
        if why_not is None:
            return reference, every[1:], target
    raise Failure(str(why_not), ENVIRONMENT)


def table(record: "AccuracyRecord") -> "Table":
    """Each setting beside the reference, along its own tokens and along the text."""
    from rich.table import Table

    from zinfer.record.accuracy import COLUMNS

    found = Table(title=record.title, title_justify="left", caption=record.told, caption_justify="left")
    for name in COLUMNS:
        found.add_column(name.lstrip("#"), justify="right" if name.startswith("#") else "left")
    for row in record.cells():
        found.add_row(*row)
    return found
