"""Commands for a measured point: to measure it again, and to use its configuration."""

import shlex

from zinfer.analysis.economics import Point
from zinfer.checkpoint.resolve import catalogue_names, from_catalogue
from zinfer.core.case import Case
from zinfer.core.machine import limit_of
from zinfer.core.requests import RequestLoad
from zinfer.record.measurement import Measurement


def commands(point: Point) -> tuple[str, str]:
    """Return shell commands that repeat a measurement and use its configuration."""
    requests = None if isinstance(point, Measurement) else point.requests
    return case_commands(point.case, requests, machine=point.machine)


def case_commands(
    case: Case,
    requests: RequestLoad | None = None,
    batch_size: object = None,
    output: str = "again.jsonl",
    machine: str = "",
) -> tuple[str, str]:
    """Return the `commands` of a case, or of requests, on `machine`.

    The first writes a file, for `zinfer compare`. The second is `zinfer serve` for requests that arrive at a rate, else
    `zinfer batch`, with the whole model. The best batch size of a slice, and weights that all stay on the GPU, are the
    slice's own, so the command of a slice leaves them to the plan.
    """
    load, settings, batch_size = case.workload, _settings(case), batch_size or case.workload.batch_size
    model, offload = ["--model", case.model, "--engine", case.engine], ["--offload", case.offload]
    more = ["--dtype", case.dtype, *(["--nvme-path", "FOLDER"] if case.offload == "nvme" else [])]
    more += ["--gpu-memory", limit] if (limit := limit_of(machine)) else []
    again = ["zinfer", "sweep", *model, *offload, *more]
    use = ["zinfer", "batch", "prompts.jsonl", "-o", "answers.jsonl"]
    if requests is None:
        lengths = ["--input-len", str(load.input_len), "--output-len", str(load.output_len)]
        again += ["--batch-size", str(batch_size), *lengths]
    else:
        again += _asked(requests)
        batch_size = requests.in_flight
        if requests.request_rate:
            use = ["zinfer", "serve"]
    again += ["--load-format", case.load_format]
    if case.layers is not None:
        again += ["--layers", str(case.layers)]
    use += [*model, *(offload if case.layers is None or case.offload != "none" else []), *more]
    if case.layers is None and isinstance(batch_size, int):
        use += ["--batch-size", str(batch_size)]
    if requests is None:
        use += ["--output-len", str(load.output_len)]
    if case.model in catalogue_names() and from_catalogue(case.model).hub_id is None:
        use += ["--load-format", "dummy"]
    return shlex.join([*again, *settings, "-o", output]), shlex.join([*use, *settings])


def _asked(requests: RequestLoad) -> list[str]:
    lengths = requests.source.partition(":")[0] in ("lognormal", "uniform", "fixed")
    words = ["--request-lengths", requests.source] if lengths else ["--requests", requests.source.rpartition(" ")[0]]
    words += ["--num-requests", str(requests.requests), "--seed", str(requests.seed)]
    if requests.in_flight is None:
        words += ["--request-rate", f"{requests.request_rate}"]
    else:
        words += ["--in-flight", str(requests.in_flight)]
    return words + (["--request-order", requests.order] if requests.order != "given" else [])


def _settings(case: Case) -> list[str]:
    words = [] if case.gpu_weights is None else ["--gpu-weights", case.gpu_weights]
    words += [] if case.weights == "as-released" else ["--weights", case.weights]
    for key, value in case.options:
        words += ["--option", f"{key}={str(value).lower() if isinstance(value, bool) else value}"]
    return words
