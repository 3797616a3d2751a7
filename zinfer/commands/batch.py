"""`zinfer batch`: answer the prompts of a file, in OpenAI's batch format."""

import sys
import time
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import click

from zinfer.commands import options
from zinfer.commands.options import option
from zinfer.commands.out import say
from zinfer.commands.verb import Failure, Verb
from zinfer.commands.watch import Watch
from zinfer.core.engine import plan_options
from zinfer.core.errors import ENVIRONMENT, NOTHING, PARTIAL
from zinfer.core.units import counted, duration, figures
from zinfer.generation.tokenizer_process import Refusal, TokenizerProcess
from zinfer.job.batch import packing
from zinfer.job.batch.ledger import Ledger
from zinfer.job.batch.ledger import merge as merge_shards
from zinfer.job.batch.nodes import answer_on_nodes
from zinfer.job.batch.openai import BatchLine, Fault, digest, read_requests, refusal, requests_of, split
from zinfer.job.batch.run import BatchJob, BatchProgress
from zinfer.job.driver import Driver
from zinfer.job.shard import Shard
from zinfer.job.structure import form_of
from zinfer.record.jsonl import MAX_BYTES
from zinfer.system.documents import read_bytes

KEPT = "answers so far are kept, the same command goes on"
AT_ONCE = 500  # prompts that are read before progress shows


@click.command("batch", cls=Verb)
@click.argument("prompts", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@option("-o --output", options.FILE, "JSON lines of the answers, appended one by one.", required=True)
@option("-m --model", str, f"{options.MODEL_HELP}  [required, but for --merge]", metavar="MODEL")
@options.job_options
@option("--shard", options.SHARD, "Answer only the lines i, i+n, .., into a part beside --output: for a job array.")
@option("--merge", bool, "Put the answers of all shards together, in the order of PROMPTS.")
@option("--ray", str, "Answer a shard on each node of Ray, and merge: auto, HOST:PORT or local.", metavar="ADDRESS")
@option("--force", bool, "Add to answers of another job; with --merge: replace other answers.")
@click.pass_obj
def command(debug: bool, /, merge: bool, ray: str | None, shard: Shard | None, **how: Any) -> None:
    """Answer every line of PROMPTS, a file of OpenAI batch requests.

    As many rows run together as fit. A row that ends makes room for the next, whose prompt is computed beside the
    others. The job may be killed at any moment: the same command continues it, and no answer is lost or given twice.
    A line that cannot be served is answered with an error.

    \b
    zinfer batch prompts.jsonl -o out.jsonl --model bigscience/bloom-560m --offload cpu --batch-size 64
    zinfer batch prompts.jsonl -o out.jsonl --model ./my-checkpoint --shard 2/8      on each of eight machines
    zinfer batch prompts.jsonl -o out.jsonl --merge                                  when all shards have ended

    A line: {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Once upon a time",
    "max_tokens": 64, "temperature": 0}}, or with "messages" and /v1/chat/completions, if the model has a chat template.
    A line's "model" is ignored. As in OpenAI's API, a line without a temperature is sampled at 1.
    """
    if merge:
        options.refuse(options.typed().keys() - {"prompts", "output", "merge", "force"}, "is not for --merge")
        _merge(how["prompts"], how["output"], how["force"])
    if how["model"] is None:
        raise click.MissingParameter(param_hint="'-m' / '--model'", param_type="option")
    if ray is not None and shard is None:  # a task of Ray has both
        with Watch() as watch, watch.interruptible(KEPT):
            words = [sys.executable, "-m", "zinfer", *sys.argv[1:]]
            answer_on_nodes(words, how["output"], ray, bool(debug), watch.message)
        _merge(how["prompts"], how["output"], how["force"])
    raise SystemExit(_answer(bool(debug), how, shard))


def _answer(debug: bool, how: dict[str, Any], shard: Shard | None) -> int:
    """Answer the lines of a file or shard; return the exit code."""
    prompts = how["prompts"]
    output = how["output"] if shard is None else shard.path(how["output"])
    content = _content(prompts, output)
    job = options.prepared("batch", how)
    lines = read_requests(content, form_of(job.tokenizer.facts))
    lines = lines if shard is None else [*shard.of(lines)]
    source, tokenizer, load = job.source, job.tokenizer, next(iter(job.loads))
    cache = plan_options(load.engine, load.options)
    identity = {
        "prompts": digest(content),
        "model": how["model"],
        "model_revision": source.revision,
        "dtype": source.spec.dtype,
        "kv_cache_dtype": cache.kv_cache_dtype if cache.kv_quantized else None,
        "layers": how["layers"],
        "output_len": how["output_len"],
        "shard": shard and str(shard),
        "chat_template": how["chat_template"] and digest((tokenizer.template.text or "").encode()),
    }
    with Ledger.open(output, identity, int(time.time()), how["force"]) as ledger, Watch() as watch:
        for damage in ledger.damaged:
            watch.message(f"left out {damage}")
        lacking = [line for line in lines if line.id not in ledger.done]
        ledger.add(refusal(line) for line in lacking if isinstance(line, Fault))
        waiting = [line for line in lacking if not isinstance(line, Fault)]
        progress = _run(waiting, job, ledger, watch, debug, how) if waiting else None
        ledger.finish()
        done = [ledger.done[line.id] for line in lines if line.id in ledger.done]
        errors = sum(not answer.ok for answer in done)
        return _told(watch.message, len(done), errors, output, progress)


def _content(prompts: Path, output: Path) -> bytes:
    """Return the file of the prompts. Raises UsageError if it has no line."""
    content = read_bytes(prompts, MAX_BYTES)
    if output.exists() and output.samefile(prompts):
        raise click.UsageError(f"--output {output} is the file of the prompts: name another file")
    if not read_requests(content):
        raise click.UsageError(f"{prompts} holds no request")
    return content


def _merge(prompts: Path, output: Path, force: bool) -> NoReturn:
    """Put the shards of `output` together, and exit. Raises ShardError if they are not whole."""
    content = _content(prompts, output)
    requests, message = read_requests(content), partial(say, err=True)
    merged = merge_shards(output, digest(content), requests, force)
    for line in merged.damaged:
        message(f"left out {line}")
    raise SystemExit(_told(message, len(requests), sum(not done.ok for done in merged.done), output))


def _run(
    waiting: list[BatchLine], job: options.Prepared, ledger: Ledger, watch: Watch, debug: bool, how: dict[str, Any]
) -> BatchProgress | None:
    """Answer the waiting lines and return the job's progress. None if none of them can be served."""
    spec, machine = job.source.spec, options.this_machine(how["nvme_path"], how["gpu_memory"])
    make_worker = watch.workers(job.target, how["timeout_s"], debug, job.source.revision)
    with watch.interruptible(KEPT), Driver(make_worker, watch.loading) as driver:
        driver.start()  # it imports its libraries while prompts are read
        prompts = _tokenize(waiting, job.tokenizer, watch)
        limits = spec.max_position, spec.vocab_size, how["output_len"]
        requests, faults = requests_of(waiting, prompts, *limits, ledger.made)
        ledger.add(map(refusal, faults))
        if not requests:
            return None
        needs = [request.need for request in requests]
        plan = packing.best_plan(job.cases(), needs, spec, machine, how["nvme_path"])
        if not plan.fits:
            raise Failure(str(plan.why_not), ENVIRONMENT)
        fits = packing.fitting(plan.planner(), needs)
        requests, faults = split(waiting, requests, fits, f"{machine.name} with {plan.case.label()}")
        ledger.add(map(refusal, faults))
        return BatchJob(plan, waiting, requests, ledger, driver, how["batch_size"], watch.rows, watch.message).run()


def _tokenize(waiting: list[BatchLine], tokenizer: TokenizerProcess, watch: Watch) -> list[Sequence[int] | Refusal]:
    """Return each prompt's token ids, or the reason why it has none. Raises ModelError without a tokenizer."""
    prompts: list[Sequence[int] | Refusal] = []
    for start in range(0, len(waiting), AT_ONCE):
        watch.progress("reading prompts", start / len(waiting))
        encoded = tokenizer.encode([line.prompt for line in waiting[start : start + AT_ONCE]])
        # Four bytes an id: a job may have millions of them.
        prompts += [ids if isinstance(ids, Refusal) else array("i", ids) for ids in encoded]
    tokenizer.close()
    return prompts


def _told(
    message: Callable[[str], None], lines: int, errors: int, output: Path, progress: BatchProgress | None = None
) -> int:
    """Print how many lines are answered, and how fast; return the exit code."""
    counts = f"{counted(lines - errors, 'answer')} and {counted(errors, 'error')} in {output}"
    if progress is not None and progress.rate is not None:
        time = f"{counted(progress.tokens, 'token')} in {duration(progress.seconds)}: {figures(progress.rate)} tok/s"
        drafts = options.drafts_right(progress.drafted, progress.accepted)
        counts += f"; {time}, {progress.passes:,} passes, {progress.padding:.0%} padding{drafts}"
    message(counts)
    return 0 if not errors else PARTIAL if errors < lines else NOTHING
