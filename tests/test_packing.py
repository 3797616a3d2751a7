"""Packing of batches: rows that share a batch, the length of a block, and when to pack anew, from the plan alone."""

import random
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.inline import SPEC
from tests.inline_batch import CASE, InlineRows, line, run_inline
from zinfer.job.batch import packing
from zinfer.job.batch.packing import (
    BatchShape,
    PlannedBatch,
    Progress,
    RowDemand,
    StepTimeModel,
    best_plan,
    expected,
    fits_alone,
    fitting,
    needed,
    order,
    pack,
    room_of,
    shaped,
    worth_packing_anew,
)
from zinfer.plan.cost import Efficiency
from zinfer.plan.plan import CAUTIOUS, largest_batch, make_plan
from zinfer.spec import machine
from zinfer.spec.resolve import from_catalogue

H100 = machine.load("h100-80gb").model_copy(update={"host_bytes": 1 << 40})
BLOOM = from_catalogue("bloom-176b")
STREAMED = CASE.model_copy(update={"model": "bloom-176b"})


class Ruler(StepTimeModel):
    """Step times by a ruler: `again` seconds a token of prefill, and one second a step."""

    def __init__(self, again: float = 0.0, base: float = 1.0) -> None:
        self.again, self.base = again, base

    def prefill(self, shape: BatchShape) -> float:
        return max(self.base, self.again * shape.rows * shape.length)

    def step(self, _shape: BatchShape, _made: int) -> float:
        return 1.0


def room(tokens: int) -> packing.Room:
    return lambda length, reserve: tokens // (length + reserve)


needs = st.lists(st.builds(RowDemand, st.integers(1, 500), st.integers(1, 500)), min_size=1, max_size=60)


@given(needs, st.integers(1, 20_000), st.floats(0, 0.1), st.sampled_from([0.0, 0.001, 0.1]))
def test_a_batch_stays_within_its_room_and_positions(
    rows: list[RowDemand], tokens: int, ending: float, again: float
) -> None:
    rows = sorted(rows, key=order)
    positions = max(sum(need) for need in rows)
    block = pack(rows, room(tokens), Ruler(again), positions, ending)
    shape, taken = block.shape, rows[: block.shape.rows]
    assert 1 <= shape.rows <= len(rows)
    assert shape.length == max(need.length for need in taken)
    assert 1 <= shape.reserve <= max(need.left for need in taken)
    assert all(need.length + shape.reserve <= positions for need in taken)
    if shape.rows > 1:
        assert shape.padded <= tokens
    assert shape.padded >= needed(shape, taken)
    assert 0 < block.tokens < shape.rows * shape.reserve + 1e-6


def test_rows_of_like_lengths_lie_side_by_side() -> None:
    dice = random.Random(1)
    rows = [RowDemand(dice.randint(1, 900), dice.choice((10, 100, 1000))) for _ in range(400)]

    def waste(sequence: list[RowDemand]) -> float:
        """Return the ratio of tokens that batches have room for, if they run to their end, to tokens that rows need."""
        padded = real = 0
        while sequence:
            length = left = count = 0
            for need in sequence:
                longer, more = max(length, need.length), max(left, need.left)
                if count and (count + 1) * (longer + more) > 20_000:
                    break
                length, left, count = longer, more, count + 1
            shape = BatchShape(count, length, left)
            padded, real = padded + shape.padded, real + needed(shape, sequence[:count])
            sequence = sequence[count:]
        return padded / real

    ours = waste(sorted(rows, key=order))
    assert ours < 1.15
    assert waste(rows) > 1.8
    assert waste(sorted(rows, key=lambda need: -need.length)) > 1.3
    first, *_, last = sorted(rows, key=order)
    assert (first.left, last.left) == (1000, 10)
    assert first.length > 800


def test_blocks_are_short_and_batches_large_if_a_new_prefill_is_free() -> None:
    rows = [RowDemand(100, 1000)] * 100
    free, dear = (pack(rows, room(20_000), Ruler(again)).shape for again in (0.0, 1.0))
    assert free.reserve < 300 < dear.reserve
    assert free.rows > 2 * dear.rows


def test_rows_that_are_likely_to_end_are_not_given_room_for_all_they_might_have() -> None:
    rows = [RowDemand(100, 1000)] * 100
    shapes = [pack(rows, room(20_000), Ruler(0.1), None, ending).shape for ending in (0.0, 0.002, 0.02)]
    assert all(before.reserve > after.reserve for before, after in pairwise(shapes))
    assert expected(10, 0.0) == 10
    assert expected(2, 0.5) == 1.5
    assert expected(10**6, 0.01) == pytest.approx(100)


def test_a_batch_ends_where_positions_do() -> None:
    assert pack([RowDemand(90, 10)] * 3, room(10**6), Ruler(), 100).shape == (3, 90, 10)
    assert pack([RowDemand(20, 16), RowDemand(99, 1)], room(10**6), Ruler(0.1), 100).shape == (1, 20, 16)


def test_a_row_without_room_is_taken_alone() -> None:
    assert pack([RowDemand(50, 5), RowDemand(50, 5)], room(3), Ruler()).shape == (1, 50, 1)


def test_a_thin_batch_is_left_where_reading_again_is_cheap() -> None:
    shape, following = BatchShape(100, 100, 200), PlannedBatch(BatchShape(100, 150, 200), 20_000, 200)
    alive, joining = [RowDemand(150, 150)] * 10, [RowDemand(100, 200)] * 90

    def worth(rows: int, pace: StepTimeModel, finishing: float = 0.0, block: PlannedBatch = following) -> bool:
        return worth_packing_anew(Progress(shape, 50, alive[:1] * rows), block, joining, pace, finishing)

    assert worth(10, Ruler(0.001))
    assert not worth(84, Ruler(0.0))  # nearly full
    assert not worth(60, Ruler(0.1))  # reading it again takes 900 steps
    assert worth(10, Ruler(0.01))
    assert not worth(10, Ruler(0.01), finishing=0.09)  # in a moment there is nothing to be read again
    nobody_waits = PlannedBatch(BatchShape(10, 150, 150), 1500, 150)
    assert not worth_packing_anew(Progress(shape, 50, alive), nobody_waits, [], Ruler(), 0.0)


def test_room_is_the_plans_with_caution() -> None:
    plan_room = room_of(STREAMED, BLOOM, H100)
    exact = largest_batch(shaped(STREAMED, BatchShape(1, 512, 32)), BLOOM, H100)
    assert 0.8 * exact <= plan_room(512, 32) <= exact
    assert plan_room(500, 20) == plan_room(512, 32)
    assert plan_room(1024, 32) < plan_room(512, 32)


def test_no_more_rows_share_a_batch_than_make_it_fast() -> None:
    """Rows with slow attention on the CPU would fit, but slow down the others."""
    slow = H100.model_copy(update={"attention_bandwidth": 24e9, "host_bandwidth": 80e9})
    options = (("kv_attention", "cpu"), ("kv_offload", "auto"))
    case = STREAMED.model_copy(update={"options": options})
    rows = room_of(case, BLOOM, slow)(512, 32)
    asked = shaped(case, BatchShape(1, 512, 32))
    assert room_of(STREAMED, BLOOM, slow)(512, 32) < rows < largest_batch(asked, BLOOM, slow, CAUTIOUS) / 2
    here, more = (make_plan(asked.with_batch(size), BLOOM, slow, factors=CAUTIOUS) for size in (rows, 2 * rows))
    assert (here.output_tok_s or 0) > 1.05 * (more.output_tok_s or 0)
    unknown = slow.model_copy(update={"matmul_flops": None})
    assert room_of(case, BLOOM, unknown)(512, 32) == largest_batch(asked, BLOOM, unknown, CAUTIOUS)


def test_seconds_are_the_plans_until_they_are_measured() -> None:
    pace, shape = StepTimeModel(STREAMED, BLOOM, H100), BatchShape(8, 512, 32)
    plan = make_plan(shaped(STREAMED, shape), BLOOM, H100, factors=Efficiency())
    assert plan.prefill_s
    assert plan.step_s
    assert pace.prefill(shape) == pytest.approx(plan.prefill_s, rel=0.1)
    assert pace.step(shape, 16) == pytest.approx(plan.step_s, rel=0.1)
    ratio = pace.prefill(BatchShape(64, 2048, 32)) / pace.prefill(shape)
    pace.saw_prefill(shape, 100.0)
    pace.saw_step(shape, 16, 3.0)
    assert pace.prefill(shape) == pytest.approx(100)
    assert pace.prefill(BatchShape(64, 2048, 32)) == pytest.approx(100 * ratio)
    assert pace.step(shape, 16) == pytest.approx(3)
    unknown = StepTimeModel(CASE, SPEC, H100.model_copy(update={"matmul_flops": None}))
    assert unknown.prefill(BatchShape(4, 20, 1)) == 2 * unknown.prefill(BatchShape(4, 10, 1))
    assert unknown.step(shape, 1) == unknown.step(shape, 20)


def test_the_faster_of_the_loads_that_fit_is_chosen() -> None:
    opt = from_catalogue("opt-30b")
    cases = [CASE.model_copy(update={"model": "opt-30b", "offload": offload}) for offload in ("none", "cpu")]
    typical = [RowDemand(300, 100)] * 10
    assert best_plan(cases, typical, opt, H100).case.offload == "none"  # PCIe 5 is too slow for it to pay
    long = [*typical, RowDemand(2000, 48)] * 2
    assert best_plan(cases, long, opt, H100).case.workload.total_len == 2048
    small = H100.model_copy(update={"gpu_bytes": 62 << 30})
    assert fits_alone(cases[0], RowDemand(300, 100), opt, small)
    assert fitting(cases[0], long, opt, small) == [True] * 22
    huge = RowDemand(30_000, 100)
    assert fitting(cases[0], [*typical, huge], opt, small) == [True] * 10 + [False]
    assert best_plan(cases, [*typical, huge], opt, small).case.offload == "cpu"
    refused = best_plan(cases, typical, opt, small.model_copy(update={"gpu_bytes": 4 << 30, "host_bytes": 1 << 30}))
    assert not refused.fits


def test_refilling_is_faster_than_batches_that_run_to_their_end(tmp_path: Path) -> None:
    """BLOOM-176B on an H100, by the plan's seconds: 120 prompts that end before their limit of 400 tokens."""
    dice = random.Random(2)
    prompts = [line(f"a{dice.randint(20, 600)}/{dice.randint(5, 300)}/{key}", 400) for key in range(120)]
    plan = make_plan(shaped(STREAMED, BatchShape(1, 600, 400)), BLOOM, H100)
    pace = StepTimeModel(plan.case, plan.model, plan.machine)
    run = run_inline(tmp_path / "out.jsonl", prompts, InlineRows(pace=pace, steps=8), plan=plan)
    assert run.ended == run.rows == 120

    static, waiting = (
        0.0,
        sorted((tuple(map(int, one.split(b'"')[3][1:].split(b"/"))) for one in prompts), reverse=True),
    )
    plan_room = room_of(plan.case, plan.model, plan.machine)
    while waiting:
        count = plan_room(waiting[0][0], 400)
        shape, batch = BatchShape(count, waiting[0][0], 400), waiting[:count]
        last = max(natural for _, natural, _ in batch)
        static += pace.prefill(shape) + (last - 1) * pace.step(shape, last // 2)
        waiting = waiting[count:]
    assert run.seconds < 0.6 * static
