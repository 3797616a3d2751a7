"""Command line: `python -m tools.conformance [TYPE ...] [--jobs N] [--output FILE]` compares, prints a table and writes
the record.

`make readme` writes the tables of ``docs/models.md`` anew from the record.
"""

import os
import sys
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tools.conformance import record
from zinfer.core.value import group_by

if TYPE_CHECKING:
    from tools.conformance.run import Row

# Modules that every child needs, imported in the parent (`save_pretrained` imports DeepSpeed if it is installed).
PRELOADED = (
    "transformers.models.llama.modeling_llama",
    "zinfer.commands.watch",
    "zinfer.engine.stream.engine",
    "deepspeed",
)
SHORT = {"differs": "DIFFERS", "crash": "CRASH", "does not apply": "-"}


@click.command()
@click.argument("types", nargs=-1)
@click.option("--jobs", type=click.IntRange(min=1), default=len(os.sched_getaffinity(0)), help="Processes at a time.")
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help=f"File of the record; with TYPE, its entries are replaced.  [default: {record.RECORD} if all types run]",
)
def main(types: tuple[str, ...], jobs: int, output: Path | None) -> None:
    """Compare zinfer with transformers on a small checkpoint of each TYPE.

    TYPE+wrapper names the multimodal model that contains the language model.
    """
    report = conformance(types, jobs)
    if types and output is not None and output.exists():
        report["types"] = record.read(output)["types"] | report["types"]
    if output is not None or not types:
        record.write(report, output or record.RECORD)
    if any(entry["verdict"] in ("crash", "differs") for entry in report["types"].values()):
        sys.exit(1)


def conformance(types: tuple[str, ...], jobs: int) -> dict[str, Any]:
    """Run `types`, or all; print one line each with its reasons, and the counts; return the record."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # every machine's record is of the CPU
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import transformers

    from tools.conformance.compare import WAYS
    from tools.conformance.run import run_all
    from tools.conformance.small import subjects

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    for module in PRELOADED:
        if find_spec(module.partition(".")[0]):
            import_module(module)
    chosen = [subject for subject in subjects() if not types or subject.name in types or subject.type in types]
    unknown = set(types) - {name for subject in chosen for name in (subject.name, subject.type)}
    if unknown:
        raise click.UsageError(f"no such type: {', '.join(sorted(unknown))}")
    begun = time.monotonic()
    click.echo(f"{'':34} {' '.join(f'{way:8}' for way in WAYS)}")
    rows = run_all(chosen, jobs, _show)
    document = record.to_json(rows, {name: way.says for name, way in WAYS.items()})
    for wrapper, title in ((False, "types of AutoModelForCausalLM"), (True, "multimodal models around one")):
        if counts := record.counts(document, wrapper):
            verdicts = ", ".join(f"{n} {verdict}" for verdict, n in counts.most_common())
            click.echo(f"{counts.total()} {title}: {verdicts}")
    click.echo(f"{time.monotonic() - begun:.0f} s")
    return document


def _show(row: "Row") -> None:
    if "all" in row.outcomes:
        click.echo(f"{row.subject.name:34} {row.verdict}: {row.outcomes['all'].why}")
        return
    verdicts = [SHORT.get(outcome.verdict, outcome.verdict) for outcome in row.outcomes.values()]
    click.echo(f"{row.subject.name:34} {' '.join(f'{verdict:8}' for verdict in verdicts)}")
    reasons = group_by(row.outcomes, lambda way: row.outcomes[way].why)
    for why, ways in reasons.items():
        if why:
            click.echo(f"    {', '.join(ways)}: {why}")


if __name__ == "__main__":
    main()
