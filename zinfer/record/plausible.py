"""Plausibility of records: the one place that decides which recorded values are believed.

A line may be whole and sealed and still hold a time of 0 ms, 10^300 bytes or a name of a million characters, because it
was made by hand or by a faulty program. Readers leave such a record out and name its file and line, so that nothing
behind them has to guard against it.
"""

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, TypeGuard, get_args

from pydantic import BaseModel

from zinfer.core.model import ExpertPolicy
from zinfer.record.measurement import Measurement, Recorded
from zinfer.record.requests import RequestPoint

LARGEST = 1e18  # of any number
LONGEST = 20_000  # characters of any text: messages of errors are cut to less
ITEMS = 1_000_000  # of a list
DEPTH = 20  # of nested lists and objects
SHORTEST_MS, LONGEST_MS = 1e-4, 1e10  # a hundred ns, which no clock of Python resolves, and four months
NAME = 1024  # characters of the name of a model, a machine, an engine
NAMES = frozenset({"machine", "model", "engine", "device", "gpu_weights", "name"})
DRIFT_MS = 1e7  # a timeline's spans may begin so long before their step

_TIMES = ("ttft_ms", "step_ms", "recompute_ms", "memory_ms", "disk_ms")
_POSITIVE = (
    "load_s", "load_bytes", "link_bandwidth", "all_links_bandwidth", "link", "layers", "num_layers", "total_layers",
    "context", "new_tokens", "total_bytes", "raw_bytes", "coded_bytes", "median", "rows", "positions", "samples",
    "perplexity", "reference_perplexity",
)  # fmt: skip
_NOT_NEGATIVE = (
    "gpu_peak_bytes", "gpu_used_bytes", "host_peak_bytes", "gpu_weight_bytes", "host_weight_bytes", "nvme_weight_bytes",
    "streamed_bytes_per_step", "wire_bytes_per_step", "nvme_bytes_per_step", "pinned_bytes", "kept_bytes", "spread",
    "bound", "tokens", "first_differences",
)  # fmt: skip
# Field of any record -> the smallest and the largest value that is believed, of each sample in a list.
_RANGES = (
    dict.fromkeys(_TIMES, (SHORTEST_MS, LONGEST_MS))
    | dict.fromkeys(_POSITIVE, (1e-9, LARGEST))
    | dict.fromkeys(_NOT_NEGATIVE, (0.0, LARGEST))
    | {"agreement": (0.0, 1.0)}
)


def implausible(record: BaseModel) -> str | None:
    """Return the first reason, as ``field: fault``, not to believe a record; None if there is none."""
    faults = _of_point(record) if isinstance(record, Recorded) else ()
    fault = next(chain(faults, _of_fields(record, "", "")), None)
    return None if fault is None else fault[:300]


def _of_point(point: Recorded) -> Iterator[str]:
    """Yield the faults between fields, and in settings, readings and predictions."""
    if isinstance(point, Measurement):
        yield from _of_samples(point)
    if isinstance(point, RequestPoint):
        yield from _of_requests(point)
    if point.num_layers and point.total_layers and point.num_layers > point.total_layers:
        yield f"num_layers: {point.num_layers} of {point.total_layers} layers"
    if point.effective is not None:
        yield from _settings(point.effective.settings)
    for name, value in point.gpu.items():
        if name == "throttle_reasons":
            if not isinstance(value, list | tuple):
                yield f"gpu.{name}: not a list"
        elif not isinstance(value, str | None) and not (_number(value) and value >= 0):
            yield f"gpu.{name}: {value!r:.40} is no reading"
    for name, predicted in point.predicted.items():
        if predicted is not None and not predicted >= 0:
            yield f"predicted.{name}: {predicted!r:.40} is no prediction"


def _of_requests(point: RequestPoint) -> Iterator[str]:
    counts = point.counts
    if point.pass_ms and not SHORTEST_MS <= point.pass_ms[0] <= point.pass_ms[-1] <= LONGEST_MS:
        yield f"pass_ms: passes from {point.pass_ms[0]} to {point.pass_ms[-1]} ms"
    if point.usable and not point.waiting_ms - 1 <= point.busy_ms <= point.wall_ms + 1:
        yield f"busy_ms: {point.busy_ms} of {point.wall_ms} ms, {point.waiting_ms} of them with requests that waited"
    if counts.padded > counts.read or counts.again > max(counts.computed, counts.read):
        yield f"counts: {counts.padded} of {counts.read} positions are padding, {counts.again} are computed again"
    if counts.accepted > (counts.checked or counts.drafted) or counts.checked > counts.drafted:
        yield f"counts: {counts.accepted} of {counts.drafted} drafts are right, {counts.checked} of them are checked"
    if point.waiting_tokens > point.output_tokens:
        yield f"waiting_tokens: {point.waiting_tokens} of {point.output_tokens}"
    if any(not 0 <= sample.arrived_ms <= LONGEST_MS for sample in point.samples):
        yield "samples: a request that arrived at no time"


def _of_samples(point: Measurement) -> Iterator[str]:
    load = point.case.workload
    if len(point.ttft_ms) != len(point.step_ms):
        yield f"step_ms: {len(point.step_ms)} repeats, and ttft_ms has {len(point.ttft_ms)}"
    for steps in point.step_ms if point.status == "ok" else ():
        if len(steps) != load.output_len - 1:
            yield f"step_ms: {len(steps)} steps for {load.output_len} tokens, the first of which is the prefill's"
    gpus = point.gpus
    for span in point.timeline:
        if not (-DRIFT_MS <= span.start_ms <= span.end_ms <= LONGEST_MS):
            yield f"timeline: a span from {span.start_ms} to {span.end_ms} ms"
        if span.layer is not None and not 0 <= span.layer <= LARGEST:
            yield f"timeline: layer {span.layer}"
        if not 0 <= span.rank < gpus:
            yield f"timeline: GPU {span.rank} of {gpus}"
    if point.timeline and max(span.end_ms for span in point.timeline) <= 0:
        yield "timeline: a step of no length"


def _settings(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield faults of the settings that a calibration computes with (`zinfer.analysis.calibrate`)."""
    for name in ("slot_bytes", "buffer_bytes", "ring_depth", "kv_host_rows", "kv_threads", "expert_buffers",
                 "expert_buffer_bytes", "cached_experts", "experts_hits_per_step", "experts_misses_per_step",
                 "experts_guessed_per_step", "experts_right_per_step"):  # fmt: skip
        value = settings.get(name)
        if name in settings and not (_number(value) and value >= 0) and not (value is None and name == "kv_threads"):
            yield f"effective.settings.{name}: {value!r:.40} is no count"
    if "expert_cache" in settings and settings["expert_cache"] not in get_args(ExpertPolicy):
        yield f"effective.settings.expert_cache: {settings['expert_cache']!r:.40} is no policy"
    for name, needs in (("slot_bytes", "ring_depth"), ("kv_host_rows", "kv_attention"),
                        ("cached_experts", "expert_cache")):  # fmt: skip
        if name in settings and needs not in settings:
            yield f"effective.settings: {name} without {needs}"


def _number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _of_fields(value: Any, name: str, field: str, depth: int = 0) -> Iterator[str]:
    """Yield a fault for each value beyond the bounds of its `field`; `name` is the path to it."""
    if isinstance(value, BaseModel):
        for key in type(value).model_fields:
            if key != "timeline":  # thousands of spans, which `_of_point` has seen
                yield from _of_fields(getattr(value, key), f"{name}.{key}".lstrip("."), key, depth)
    elif isinstance(value, str):
        if len(value) > (NAME if field in NAMES else LONGEST):
            yield f"{name}: a text of {len(value):,} characters"
    elif _number(value):
        low, high = _RANGES.get(field, (-LARGEST, LARGEST))
        if not low <= value <= high:
            yield f"{name}: {value!r:.40} is not believable"
    elif isinstance(value, Mapping | list | tuple):
        if depth > DEPTH or len(value) > ITEMS:
            yield f"{name}: {len(value):,} items, or too deep"
        elif isinstance(value, Mapping):
            for key, item in value.items():
                if len(str(key)) > NAME:
                    yield f"{name}: a key of {len(str(key)):,} characters"
                else:
                    yield from _of_fields(item, f"{name}.{key}", "", depth + 1)
        elif {type(item) for item in value} <= {int, float}:  # most items of a record stand in such lists
            low, high = _RANGES.get(field, (-LARGEST, LARGEST))
            yield from (f"{name}: {item!r:.40} is not believable" for item in value if not low <= item <= high)
        else:
            for item in value:
                yield from _of_fields(item, name, field, depth + 1)
