"""Best configuration by one objective, within service levels."""

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Literal

from zinfer.analysis import requests, sla
from zinfer.analysis.economics import Cost, EconomicsError, Point, Prices, cost
from zinfer.analysis.rates import exact, lossy, pareto
from zinfer.analysis.sla import Sla, SlaCheck
from zinfer.core.value import Frozen
from zinfer.record.measurement import Measurement

Objective = Literal["throughput", "cost", "energy", "latency"]


class Decision(Frozen):
    """Decision for one group of points, of equal sequences or of requests.

    `point` is None if no point keeps every level; `nearest` is then the point that misses by least. `point` is also
    None if the objective's value is not known for any point that keeps them. Points with lossy settings are ranked
    apart: `lossy` is the best of them, unless there are no others.
    """

    objective: Objective
    point: Point | None = None
    kept: tuple[SlaCheck, ...] = ()  # the levels, checked on `point`, or else on `nearest`
    cost: Cost | None = None
    nearest: Point | None = None
    front: tuple[Point, ...] = ()  # Pareto front of the points that keep the levels: tok/s, tok/s of one user
    keeping: int = 0  # points that keep the levels
    usable: int = 0
    unknown: int = 0  # points that keep the levels, without a known cost or energy
    lossy: Point | None = None  # best of the points with lossy settings


def decide(
    points: Sequence[Point],
    slas: Sequence[Sla],
    objective: Objective,
    prices: Prices,
    rate: Callable[[Point], float | None] = lambda point: point.output_tok_s,
) -> Decision:
    """Choose the best of `points` by `objective` under `slas`.

    The smaller batch wins a tie; `rate` gives the output tok/s of a point. A point whose value is not known is not
    chosen. Raises EconomicsError for the objective cost without prices.
    """
    if objective == "cost" and prices.gpu_hour_usd is None and prices.host_hour_usd is None:
        raise EconomicsError("--objective cost needs a price: give --gpu-hour-usd")
    points = [point for point in points if point.usable]
    if exact(points) and lossy(points):
        best_lossy = decide(lossy(points), slas, objective, prices, rate).point
        return decide(exact(points), slas, objective, prices, rate).model_copy(update={"lossy": best_lossy})
    usable = list(points)
    keeping = [point for point in usable if all(kept.ok for kept in check(point, slas))]
    if not keeping:
        nearest = min(usable, key=lambda point: sum(kept.miss for kept in check(point, slas)), default=None)
        kept = check(nearest, slas) if nearest is not None else ()
        return Decision(objective=objective, kept=kept, nearest=nearest, usable=len(usable))

    def value(point: Point, cost: Cost) -> float | None:
        return {
            "throughput": -(rate(point) or 0.0),
            "latency": point.tpot_ms or fmean(_ttft_ms(point)),
            "cost": cost.usd_per_mtok,
            "energy": cost.j_per_token,
        }[objective]

    costs = [known_cost(point, prices) for point in keeping]
    ranked = [
        (worth, point.case.workload.batch_size, nth)
        for nth, (point, cost) in enumerate(zip(keeping, costs, strict=True))
        if (worth := value(point, cost)) is not None
    ]
    chosen = min(ranked)[-1] if ranked else None
    point = None if chosen is None else keeping[chosen]
    return Decision(
        objective=objective, point=point, kept=check(point, slas) if point else (), front=pareto(keeping),
        cost=None if chosen is None else costs[chosen], keeping=len(keeping), usable=len(usable),
        unknown=len(keeping) - len(ranked),
    )  # fmt: skip


def check(point: Point, slas: Sequence[Sla]) -> tuple[SlaCheck, ...]:
    """Check a point of either kind against each service level."""
    return sla.check(point, slas) if isinstance(point, Measurement) else requests.check(point, slas)


def _ttft_ms(point: Point) -> Sequence[float]:
    """Return the TTFT of each repeat, or of each request, in ms."""
    return point.ttft_ms if isinstance(point, Measurement) else point.of("ttft_ms")


def known_cost(point: Point, prices: Prices) -> Cost:
    """Return the cost of the point, without USD if that is unknown."""
    try:
        return cost(point, prices) or Cost()
    except EconomicsError:
        return cost(point, Prices()) or Cost()
