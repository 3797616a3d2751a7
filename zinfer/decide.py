"""From points to one answer: those that keep the service levels, and of these the best by one objective."""

from collections.abc import Sequence
from typing import Literal

from zinfer.analysis import pareto
from zinfer.economics import Cost, EconomicsError, Prices, cost
from zinfer.frozen import Frozen
from zinfer.group import Points
from zinfer.record import Measurement
from zinfer.sla import Kept, Sla, check

Objective = Literal["throughput", "cost", "energy", "latency"]


class Decision(Frozen):
    """The answer for one group of points.

    `point` is None where no point keeps every level; `nearest` is then the one that misses by least.
    """

    objective: Objective
    point: Measurement | None = None
    kept: tuple[Kept, ...] = ()  # of `point`, or of `nearest`
    cost: Cost | None = None
    nearest: Measurement | None = None
    front: tuple[Measurement, ...] = ()  # of the points that keep the levels: tok/s against tok/s of one user
    keeping: int = 0  # points that keep the levels
    usable: int = 0


def decide(points: Points, slas: Sequence[Sla], objective: Objective, prices: Prices) -> Decision:
    """The best of `points` by `objective` under `slas`; of equals the smaller batch.

    Raises EconomicsError for an objective that lacks its prices or its readings.
    """
    usable = [point for point in points if point.usable]
    keeping = [point for point in usable if all(kept.ok for kept in check(point, slas))]
    if not keeping:
        nearest = min(usable, key=lambda point: sum(kept.miss for kept in check(point, slas)), default=None)
        kept = check(nearest, slas) if nearest is not None else ()
        return Decision(objective=objective, kept=kept, nearest=nearest, usable=len(usable))
    costs = [_cost(point, objective, prices) for point in keeping]
    if objective == "energy" and all(found.j_per_token is None for found in costs):
        raise EconomicsError(
            "--objective energy needs a reading of the energy, which NVML gives on a GPU: none was made"
        )

    def rank(pair: tuple[Measurement, Cost]) -> tuple[float, int]:
        point, found = pair
        value = {
            "throughput": -(point.output_tok_s or 0.0),
            "latency": point.tpot_ms or sum(point.ttft_ms),
            "cost": found.usd_per_mtok,
            "energy": found.j_per_token,
        }[objective]
        return float("inf") if value is None else value, point.case.workload.batch_size

    point, found = min(zip(keeping, costs, strict=True), key=rank)
    return Decision(
        objective=objective, point=point, kept=check(point, slas), cost=found, front=pareto(keeping),
        keeping=len(keeping), usable=len(usable),
    )  # fmt: skip


def _cost(point: Measurement, objective: Objective, prices: Prices) -> Cost:
    """The point's cost; where the objective is another, energy that has a price but no reading is left out."""
    if objective == "cost" and prices.gpu_hour_usd is None and prices.host_hour_usd is None:
        raise EconomicsError("--objective cost needs a price: --gpu-hour-usd, and --host-hour-usd where that is apart")
    return cost(point, prices) or Cost()
