"""Routing of a mixture for plans, from traces or decode steps.

Random weights route evenly and tell nothing of a model, so points with dummy weights do not count.
"""

from collections.abc import Iterable
from statistics import fmean

from zinfer.core.engine import draft_of
from zinfer.core.model import ModelSpec, Routing
from zinfer.core.units import counted
from zinfer.record.measurement import Measurement
from zinfer.record.study import Hits, Study, Touched


def routing_of(model: ModelSpec, runs: Iterable[Study], points: Iterable[Measurement]) -> Routing | None:
    """Return a model's routing by its last trace, else by points. Slices of other depths do not count."""
    if model.num_experts < 2 or not model.expert_bytes:
        return None
    every = model.routed_bytes // model.expert_bytes
    traces = [
        run for run in runs if run.model == model.name and (run.num_layers or 0) * (run.num_experts or 0) == every
    ]
    if not traces:
        return _measured(model, points, every)
    run = traces[-1]
    return Routing(
        source=f"the routing recorded on {run.text.name if run.text else run.machine}",
        touched=tuple(sorted((row.batch_size, row.share) for row in run.of(Touched))),
        hits=tuple((row.batch_size, row.experts / every, row.hits) for row in run.of(Hits) if row.policy == "lfu"),
    )


def _measured(model: ModelSpec, points: Iterable[Measurement], every: int) -> Routing | None:
    """Return the routing by experts' counts; equal points are averaged."""
    needs: dict[int, list[float]] = {}
    met: dict[tuple[int, float], list[float]] = {}
    used = 0
    for point in points:
        case, settings = point.case, {} if point.effective is None else point.effective.settings
        if not point.usable or case.load_format == "dummy" or case.model != model.name:
            continue
        if draft_of(case.options) != "none":  # a step then has more tokens than rows
            continue
        hits, misses = (settings.get(f"experts_{name}_per_step", 0.0) for name in ("hits", "misses"))
        if (case.layers or model.total_layers) != model.num_layers or not hits + misses:
            continue
        used, batch_size = used + 1, case.workload.batch_size
        needs.setdefault(batch_size, []).append((hits + misses) / every)
        if cached := settings.get("cached_experts", 0):
            met.setdefault((batch_size, cached / every), []).append(hits / (hits + misses))
    if not used:
        return None
    return Routing(
        source=f"the decode steps of {counted(used, 'record')}, after prompts of random tokens",
        touched=tuple((size, min(1.0, fmean(shares))) for size, shares in sorted(needs.items()) if size > 1),
        hits=tuple((*key, fmean(shares)) for key, shares in sorted(met.items())),
    )
