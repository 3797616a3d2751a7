"""Commands for a measured point: one that measures it again, one that uses its configuration."""

import shlex

from zinfer.analysis.economics import Point
from zinfer.checkpoint.resolve import catalogue_names, from_catalogue
from zinfer.core.case import Case
from zinfer.record.measurement import Measurement
from zinfer.record.requests import RequestKey


def commands(point: Point) -> tuple[str, str]:
    """Return the command that measures a point again, and the one that uses its configuration: `zinfer batch`, or
    `zinfer serve` for requests that arrive at a rate."""
    if isinstance(point, Measurement):
        return sweep_command(point.case), batch_command(point.case)
    return requests_command(point.key), use_command(point.key)


def requests_command(key: RequestKey) -> str:
    """Return the shell command that measures a load of requests and nothing else; that of a file names it as the
    record does, without its folder and checksum."""
    case, asked = key
    words = ["zinfer", "sweep", *_load(case)]
    lengths = asked.source.partition(":")[0] in ("lognormal", "uniform", "fixed")
    words += ["--request-lengths", asked.source] if lengths else ["--requests", asked.source.rpartition(" ")[0]]
    words += ["--num-requests", str(asked.requests), "--seed", str(asked.seed)]
    in_flight = asked.in_flight is not None
    words += ["--in-flight", str(asked.in_flight)] if in_flight else ["--request-rate", f"{asked.request_rate}"]
    words += ["--request-order", asked.order] if asked.order != "given" else []
    words += ["--load-format", case.load_format]
    if case.layers is not None:
        words += ["--layers", str(case.layers)]
    return shlex.join([*words, *_settings(case), "-o", "again.jsonl"])


def use_command(key: RequestKey) -> str:
    """Return the shell command that answers a file of prompts, or requests over HTTP, in the configuration of a load
    of requests, as `batch_command` does."""
    case, asked = key
    words = ["zinfer", "serve"] if asked.request_rate else ["zinfer", "batch", "prompts.jsonl", "-o", "answers.jsonl"]
    words += _load(case)
    if case.layers is None and isinstance(asked.in_flight, int):
        words += ["--batch-size", str(asked.in_flight)]
    return shlex.join(_whole_model(words, case))


def sweep_command(case: Case) -> str:
    """Return the shell command that measures `case` and nothing else: the same model or slice, weights, lengths, batch
    size and options. It writes a file of its own, for `zinfer compare`."""
    load = case.workload
    words = ["zinfer", "sweep", *_load(case), "--batch-size", str(load.batch_size)]
    words += ["--input-len", str(load.input_len), "--output-len", str(load.output_len)]
    words += ["--load-format", case.load_format]
    if case.layers is not None:
        words += ["--layers", str(case.layers)]
    return shlex.join([*words, *_settings(case), "-o", "again.jsonl"])


def batch_command(case: Case) -> str:
    """Return the shell command that answers a file of prompts in the configuration of `case`, with the whole model.

    Real weights, or random ones of a model that has no others. The best batch size of a slice, and weights that all
    stay on the GPU, are the slice's own, so the command of a slice leaves them to the plan.
    """
    words = ["zinfer", "batch", "prompts.jsonl", "-o", "answers.jsonl", *_load(case)]
    if case.layers is None:
        words += ["--batch-size", str(case.workload.batch_size)]
    words += ["--output-len", str(case.workload.output_len)]
    return shlex.join(_whole_model(words, case))


def _whole_model(words: list[str], case: Case) -> list[str]:
    """Return the words of a command for the whole model of a case, with its settings."""
    if case.model in catalogue_names() and from_catalogue(case.model).hub_id is None:
        words += ["--load-format", "dummy"]
    if case.layers is not None and case.offload == "none":
        at = words.index("--offload")
        del words[at : at + 2]
    return [*words, *_settings(case)]


def _load(case: Case) -> list[str]:
    words = ["--model", case.model, "--engine", case.engine, "--offload", case.offload, "--dtype", case.dtype]
    return [*words, "--nvme-path", "FOLDER"] if case.offload == "nvme" else words


def _settings(case: Case) -> list[str]:
    words = [] if case.gpu_weights is None else ["--gpu-weights", case.gpu_weights]
    words += [] if case.weights == "as-released" else ["--weights", case.weights]
    for key, value in case.options:
        words += ["--option", f"{key}={str(value).lower() if isinstance(value, bool) else value}"]
    return words
