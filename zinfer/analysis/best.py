"""Best configuration by one objective, within service levels."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

from zinfer.analysis.economics import Cost, EconomicsError, Fleet, Point, cost
from zinfer.analysis.rates import exact, lossy
from zinfer.analysis.sla import Sla, SlaCheck, check
from zinfer.core.value import Frozen

Objective = Literal["throughput", "cost", "latency"]


class Decision(Frozen):
    """Decision for one group of points; those with lossy settings are ranked by themselves."""

    objective: Objective
    point: Point | None = None  # None if no point keeps every level
    kept: tuple[SlaCheck, ...] = ()  # the levels, checked on `point`, or else on `nearest`
    cost: Cost | None = None
    nearest: Point | None = None  # point that misses by least, where none keeps every level
    keeping: int = 0  # points that keep the levels
    usable: int = 0
    lossy: Point | None = None  # best of the points with lossy settings
    gpu_hour_usd: float | None = None
    fleet: Fleet | None = None  # for a demand, if one was asked for
    too_slow: float | None = None  # seconds of one batch, or of a mean request, if that alone exceeds the deadline


def decide(
    points: Sequence[Point],
    slas: Sequence[Sla],
    objective: Objective,
    gpu_hour_usd: float | None = None,
    rate: Callable[[Point], float | None] = lambda point: point.output_tok_s,
) -> Decision:
    """Choose the best of `points`, the smaller batch if two are equal. Raises EconomicsError without a price."""
    if objective == "cost" and gpu_hour_usd is None:
        raise EconomicsError("--objective cost needs a price: give --gpu-hour-usd")
    usable = [point for point in points if point.usable]
    if exact(usable) and lossy(usable):
        best, apart = (decide(kind(usable), slas, objective, gpu_hour_usd, rate) for kind in (exact, lossy))
        return best.model_copy(update={"lossy": apart.point})
    keeping = [point for point in usable if all(kept.ok for kept in check(point, slas))]
    counts: dict[str, Any] = {"keeping": len(keeping), "usable": len(usable), "gpu_hour_usd": gpu_hour_usd}
    counts["objective"] = objective
    if not keeping:
        nearest = min(usable, key=lambda point: sum(kept.miss for kept in check(point, slas)), default=None)
        return Decision(**counts, kept=check(nearest, slas) if nearest else (), nearest=nearest)

    def rank(point: Point) -> tuple[float, int]:
        value = {
            "throughput": -(rate(point) or 0.0),
            "latency": point.tpot_ms or point.mean_ttft_ms or 0.0,
            "cost": cost(point, gpu_hour_usd).usd_per_mtok or 0.0,
        }[objective]
        return value, point.case.workload.batch_size

    point = min(keeping, key=rank)
    return Decision(**counts, point=point, kept=check(point, slas), cost=cost(point, gpu_hour_usd))
