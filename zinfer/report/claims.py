"""Planning questions of the recipes, and the ratios that others have published, beside what these records predict."""

from collections.abc import Iterator

from zinfer.plan.plan import Plan
from zinfer.plan.published import beside
from zinfer.plan.search import advice, best_batch
from zinfer.report.document import Block, Heading, Items, Row, Table
from zinfer.report.measured import rated
from zinfer.report.predicted import Forecast
from zinfer.report.study import Findings, shape
from zinfer.spec.units import duration


def claims(findings: Findings, known: Forecast) -> Iterator[Block]:
    """Each question's plans at their best batch, with the factors of these records where their engine has any."""
    for question in findings.questions:
        plans = [
            best_batch(case, spec, place, known.factors.get(case.engine))
            for place in question.machines
            for case in question.cases
            if (spec := shape(case)) is not None
        ]
        if not plans:
            continue
        yield Heading(question.title)
        columns = (
            "machine",
            "configuration",
            "#batch",
            "#first token",
            "#each after",
            "bound by",
            "#tok/s",
            "#error band",
        )
        caption = "Predicted, nothing was run: each engine with its factors from these records, at its best batch."
        yield Table(caption, columns, tuple(map(_row, plans)))
        told = [f"{place.name}: {advice([p for p in plans if p.machine == place])}" for place in question.machines]
        yield Items((*told, *(found.words for found in beside(question.published, plans, known.factors))))


def _row(plan: Plan) -> Row:
    if not plan.fits or plan.prefill_s is None or plan.step_s is None or plan.output_tok_s is None:
        return Row((plan.machine.name, plan.case.label(), *[""] * 3, "does not fit", *[""] * 2), "predicted")
    cells = (
        plan.machine.name,
        plan.case.label(),
        str(plan.case.workload.batch_size),
        duration(plan.prefill_s),
        duration(plan.step_s),
        plan.bound_by or "",
        rated(plan.output_tok_s),
        f"± {plan.error:.0%}" if plan.error else "a limit, not fitted",
    )
    return Row(cells, "predicted")
