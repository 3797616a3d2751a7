"""Fabricated measurements and studies: the arithmetic of a link-bound model with plausible noise, and no machine."""

import random
import re
from html.parser import HTMLParser
from typing import Any

from zinfer.core.case import Case, Workload
from zinfer.core.requests import RequestLoad
from zinfer.record.measurement import Measurement, Span
from zinfer.record.requests import RequestPoint
from zinfer.record.study import Coded, Deviation, ExpertPolicy, Hits, Position, Rate, Reload, Study

LAYERS_BYTES = 69_057_937_408  # 14 layers of BLOOM-176B in bf16
LINK = 54.6e9
RATE = Rate(median=8e11, spread=0.02, samples=20, of="bytes")


def case(batch_size: int = 1, engine: str = "stream", offload: Any = "cpu", **fields: Any) -> Case:
    lengths = {name: fields.pop(name, length) for name, length in (("input_len", 512), ("output_len", 32))}
    workload = Workload(batch_size=batch_size, **lengths)
    return Case(**{"model": "bloom-176b", "layers": 14, **fields}, engine=engine, offload=offload, workload=workload)


def request_point(**fields: Any) -> RequestPoint:
    """Return a load of three requests with one-second passes. Two are in flight."""
    given: dict[str, Any] = {
        "case": case(input_len=1, output_len=1), "requests": RequestLoad(source="fixed:20,3", requests=3, in_flight=2),
        "status": "ok", "machine": "h100", "total_layers": 70, "num_layers": 14,
        "pass_ms": [1000.0 * (number + 1) for number in range(6)],
        "samples": [[20, 3, 0.0, 0, 3], [20, 3, 0.0, 0, 2, 3, 1], [20, 3, 3000.0, 3, 3]],
        "counts": {"read": 300, "padded": 9, "computed": 70}, "busy_ms": 6000.0, "waiting_ms": 3000.0,
        "waiting_tokens": 5, "kv_positions": 400, "sla": ("ttft:p99:<=:2s",), "link_bandwidth": LINK,
    }  # fmt: skip
    return RequestPoint.model_validate(given | fields)


def point(asked: Case, step_s: float = 1.3, repeats: int = 3, **fields: Any) -> Measurement:
    """Return a point whose decode steps take about `step_s`. One of another `status` has no samples."""
    noise, workload, samples = random.Random(str(asked)), asked.workload, dict[str, Any]()
    if fields.get("status", "ok") == "ok":
        prefill_s = max(step_s, workload.batch_size * workload.input_len / 9000)
        streamed = 0 if asked.offload == "none" else LAYERS_BYTES
        wire = round(0.667 * streamed) if ("weight_codec", "lossless") in asked.options else None
        weights = {"gpu_weight_bytes": 76_000_000_000 - streamed, "host_weight_bytes": streamed}
        wires = {"streamed_bytes_per_step": streamed, "wire_bytes_per_step": wire}
        steps = range(workload.output_len - 1)
        samples = {"link_bandwidth": LINK, "gpu_peak_bytes": 20 << 30, "load_s": 80.0, "effective": weights | wires}
        samples["ttft_ms"] = [1e3 * prefill_s * noise.uniform(1, 1.04) for _ in range(repeats)]
        samples["step_ms"] = [[1e3 * step_s * noise.uniform(0.99, 1.03) for _ in steps] for _ in range(repeats)]
    given = {"machine": "h100", "status": "ok", "total_layers": 70, "num_layers": asked.layers or 70}
    given["versions"] = {"zinfer": "0.1.0", "torch": "2.11.0"}
    return Measurement.model_validate(given | samples | fields | {"case": asked})


def sweep(**fields: Any) -> list[Measurement]:
    """Return points of three engines. Offload lets large batches fit, whose steps hardly take longer."""
    loads: tuple[tuple[int, float, float, dict[str, Any]], ...] = (  # largest batch, seconds of a step, more for a row
        (8, 0.031, 0.0008, {"offload": "none"}),
        (64, 1.36, 0.0005, {}),
        (64, 0.92, 0.0006, {"options": (("weight_codec", "lossless"),)}),
        (32, 1.56, 0.004, {"engine": "deepspeed"}),
        (16, 8.9, 0.01, {"engine": "accelerate"}),
    )
    points = [
        point(case(size, **kind, **fields), step_s + more * size)
        for size in (1, 2, 4, 8, 16, 32, 64, 128)
        for most, step_s, more, kind in loads
        if size <= most
    ]
    *edges, slow = (case(2 * most, **kind, **fields) for most, *_, kind in loads)
    points += [point(asked, status="oom_gpu", error="CUDA out of memory", stage="prefill") for asked in edges]
    return [*points, point(slow, status="timeout", stage="decode", error="no step for 600 s")]


def traced(
    layers: int = 14,
    copy_ms: float = 90.8,
    compute_ms: float = 3.4,
    decode_ms: float = 0.0,
    depth: int = 2,
    running: bool = False,
    launch_ms: float = 0.6,
) -> tuple[Span, ...]:
    """Return the timeline of a step through a ring of `depth` slots: a copy waits until its slot is free, a layer until
    its copy has arrived.

    It begins with full slots and an idle link, as after a wait for the device, or with `running` in the middle of a
    copy. With `decode_ms` layers are unpacked, and a slot is free as soon as that is done.
    """
    noise = random.Random(f"{layers} {copy_ms} {depth} {running}")
    spans: list[Span] = []
    ready = [] if running else [0.0] * depth
    link = 0.0

    def copy(free: float) -> None:
        nonlocal link
        start = max(link, free) + 0.004
        link = start + copy_ms * noise.uniform(0.998, 1.004)
        spans.append(Span(lane="copy", layer=len(ready) % layers, start_ms=start, end_ms=link))
        ready.append(link)

    if running:
        link = -2 * compute_ms
        for _ in range(depth):
            copy(link)
    now = launch_ms
    spans.append(Span(lane="compute", layer=None, start_ms=launch_ms / 2, end_ms=now))
    for layer in range(layers):
        now = max(now, ready[layer]) + 0.05
        if decode_ms:
            spans.append(Span(lane="unpack", layer=layer, start_ms=now, end_ms=now + decode_ms))
            now += decode_ms
            copy(now)
        end = now + compute_ms * noise.uniform(0.97, 1.05)
        spans.append(Span(lane="compute", layer=layer, start_ms=now, end_ms=end))
        now = end
        if not decode_ms:
            copy(now)
    spans.append(Span(lane="compute", layer=None, start_ms=now, end_ms=now + compute_ms / 2))
    return tuple(spans)


def position(error: float, same: bool, nats: float = 1.0) -> Position:
    return Position(error, error / 10, float(same), 1.0, nats)


def accuracy_run(**fields: Any) -> Study:
    """A run of `zinfer study accuracy`: the reference in another batch, and one setting along both kinds of tokens."""
    asked = case(4, model="m", layers=None, input_len=256, output_len=3, load_format="safetensors")
    int8 = asked.model_copy(update={"options": (("kv_cache_dtype", "int8"),)})
    positions = [[position(0.01, True), position(0.03, False)], [position(0.02, True)] * 3]
    deviations = (
        Deviation.of(asked.with_batch(2), "own", positions[1:]),
        Deviation.of(int8, "own", positions),
        Deviation.of(int8, "text", [[position(0.5, True, 1.1)]]),
    )
    given: dict[str, Any] = {
        "study": "accuracy", "machine": "h100", "device": "H100", "started_at": "2026-01-01", "about": "llama",
        "model": "m", "revision": "r", "case": asked, "logits_dtype": "bfloat16", "samples": 2, "rows": deviations,
        "text": {"name": "book.txt", "sha256": "0" * 64, "tokens": 1000},
    }  # fmt: skip
    return Study.model_validate(given | fields)


def routing_run(**fields: Any) -> Study:
    """An old run of `zinfer study routing`, of two caches."""
    found: list[tuple[ExpertPolicy, int, float]] = [("lru", 4, 0.4), ("lfu", 4, 0.5), ("lru", 8, 0.8), ("lfu", 8, 0.7)]
    rows = tuple(Hits(policy=policy, experts=size, hits=share) for policy, size, share in found)
    given: dict[str, Any] = {
        "study": "routing", "machine": "h100", "device": "CPU", "model": "m", "about": "drawn", "num_layers": 2,
        "num_experts": 8, "experts_per_token": 2, "guessed": 0.75, "text": {"name": "t", "tokens": 9}, "rows": rows,
    }  # fmt: skip
    return Study.model_validate(given | fields)


def kept_point(context: int, recompute: float, memory: float, **fields: Any) -> Reload:
    """Context of `zinfer study reuse` with three recompute samples. Their median is `recompute` ms."""
    return Reload(
        context=context, new_tokens=8, kept_bytes=1 << 20, recompute_ms=(recompute, recompute * 9, recompute / 9),
        memory_ms=(memory,), same_token=True, max_difference=0.25, **fields,
    )  # fmt: skip


def reuse_run(*points: Reload, **fields: Any) -> Study:
    """A run of `zinfer study reuse`; `fields` are those of its case."""
    asked = case(**{"model": "m", "layers": None, "input_len": 1, "output_len": 1} | fields)
    return Study(
        study="reuse", machine="h100", device="H100", case=asked, num_layers=4, total_layers=8,
        started_at="2026-01-01", link=5e10, model=asked.model, rows=points,
    )  # fmt: skip


def codec_run(*names: str, **fields: Any) -> Study:
    """A run of `zinfer study codec` with a row for each name; `fields` are those of the rows."""
    numbers = {"total_bytes": 1 << 30, "raw_bytes": 1 << 30, "coded_bytes": 1 << 29, "bound": 0.45, "status": "ok"}
    rows = tuple(
        Coded.model_validate({"name": name, "description": "drawn", "encode": RATE, "decode": RATE} | numbers | fields)
        for name in names
    )
    return Study(study="codec", machine="h100", device="H100", link=5e10, started_at="2026-01-01", rows=rows)


LINES = {"h2": "## ", "h3": "### ", "li": "- ", "tr": "|", "p": "", "summary": "", "pre": "", "figcaption": ""}


class _Plain(HTMLParser):
    """Parser behind `plain`."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text, self._open = "", list[str]()
        self.feed(page[page.index("<main>") : page.index("</main>")])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.text += f"\n{LINES[tag]}" if tag in LINES else " " if tag in ("td", "th") else ""
        self.text += "`" * (tag == "code" and self._open[-1:] != ["pre"])
        if tag != "img":
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        self._open.pop()
        ends = {"td": " |", "th": " |", "code": "`" * (self._open[-1:] != ["pre"]), "span": ". " * ("h2" in self._open)}
        self.text += ends.get(tag, "\n" * (tag in LINES))

    def handle_data(self, data: str) -> None:
        self.text += data.strip("\n") if "pre" in self._open else re.sub(r"^\s+$", "", data)


def plain(page: str) -> str:
    """Return a report as lines: ``## 2. Results``, ``### Risks``, ``- an item``, ``| a | row |``, and words."""
    return _Plain(page).text
