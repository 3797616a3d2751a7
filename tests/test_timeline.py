"""Timeline of a step: busy and idle times, from spans with known sums."""

import pytest

from tests.results import LINK, case, point, traced
from zinfer.analysis.timeline import busy, busy_bandwidth, by_rank, idle, length_ms, share, total_ms
from zinfer.record.measurement import Effective, Span
from zinfer.record.measurement import spans as stored


def spans(*rows: tuple[str, int | None, float, float]) -> tuple[Span, ...]:
    return stored(rows)


def test_copies_of_experts_are_told_apart_in_a_row() -> None:
    rows = ["copy", 1, 2.0, 3.5], ["copy", 1, 2.0, 3.5, "guess"]
    first, other = stored(rows)
    assert (first.carries, other.carries) == (None, "guess")
    assert [span.row() for span in (first, other)] == [*rows]
    with pytest.raises(ValueError, match="guess"):
        stored([[*rows[0], "another"]])


def test_spans_of_several_gpus_are_told_apart_in_a_row() -> None:
    rows = [["gather", 1, 2.0, 3.5], ["gather", 1, 2.0, 3.5, None, 1], ["copy", 1, 2.0, 3.5, "guess", 3]]
    timeline = stored(rows)
    assert [(span.rank, span.carries) for span in timeline] == [(0, None), (1, None), (3, "guess")]
    assert [span.row() for span in timeline] == rows
    assert [len(group) for group in by_rank((*timeline, *timeline))] == [2, 2, 2]
    assert by_rank(()) == ()
    for wrong in (rows[0][:3], [*rows[2], 1]):
        with pytest.raises(ValueError, match=r"required|at most 6"):
            stored([wrong])


# link: 10 idle, 30 busy, 5 idle, 20 busy in two overlapping copies, 5 idle; meanwhile layers compute
STEP = spans(
    ("compute", None, 1, 2),
    ("compute", 0, 4, 12),
    ("copy", 1, 10, 40),
    ("compute", 1, 41, 44),
    ("copy", 2, 45, 60),
    ("copy", 3, 55, 65),
    ("compute", 2, 60, 68),
    ("compute", None, 68, 70),
)


def test_busy_and_idle_fill_the_step() -> None:
    assert length_ms(STEP) == 70
    assert busy(STEP, "copy") == ((10, 40), (45, 65))
    assert idle(STEP) == ((0, 10), (40, 45), (65, 70))
    assert total_ms(idle(STEP)) == 20
    assert busy(STEP, "unpack") == ()
    assert idle(STEP, "unpack") == ((0, 70),)
    assert share(STEP, "copy") == pytest.approx(50 / 70)
    assert share(STEP, "compute") == pytest.approx(22 / 70)


def test_a_step_that_hands_a_copy_on_ends_with_its_computation() -> None:
    step = spans(("copy", 0, -5, 20), ("copy", 1, 20, 45), ("compute", 0, 20, 24), ("compute", 1, 45, 48))
    step += spans(("copy", 0, 45, 70))
    assert length_ms(step) == 48
    assert busy(step, "copy") == ((0, 48),)
    assert idle(step) == ()
    cold = spans(("copy", 0, -25, 0), ("compute", 0, 1, 4), ("copy", 1, 4, 30), ("compute", 1, 2, 8))
    assert length_ms(cold) == 30, "what had arrived before the step is none of it"
    assert idle(cold) == ((0, 4),)


@pytest.mark.parametrize("running", [False, True])
def test_a_ring_s_step_is_its_bytes_and_its_waits(running: bool) -> None:
    step = traced(layers=20, copy_ms=50, running=running)
    assert length_ms(step) == pytest.approx(20 * 50 + total_ms(idle(step)), rel=0.003)
    assert total_ms(idle(step)) == pytest.approx(0.1 if running else 4.2, abs=0.2)


def test_a_disk_reads_on_for_the_next_step() -> None:
    step = (*STEP, *spans(("disk", 2, -5, 42), ("disk", 3, 41, 50), ("disk", 0, 66, 90)))
    assert length_ms(step) == 70, "the next step has the rest"
    assert busy(step, "disk") == ((0, 50), (66, 70))


def test_an_empty_trace_has_no_timeline() -> None:
    assert length_ms(()) == share((), "copy") == total_ms(idle(())) == 0
    assert busy((), "copy") == idle(()) == ()
    alone = spans(("compute", 0, 0, 8))
    assert idle(alone) == ((0, 8),)


def test_the_busy_link_s_bandwidth_is_that_of_what_crosses_it() -> None:
    effective = Effective(gpu_weight_bytes=0, streamed_bytes_per_step=10**9)
    assert busy_bandwidth(point(case(), timeline=STEP, effective=effective), STEP) == pytest.approx(1e9 / 0.050)
    wire = effective.model_copy(update={"wire_bytes_per_step": 700_000_000})
    assert busy_bandwidth(point(case(), timeline=STEP, effective=wire), STEP) == pytest.approx(0.7e9 / 0.050)
    assert busy_bandwidth(point(case(), timeline=STEP, effective=None), STEP) is None
    assert busy_bandwidth(point(case()), ()) is None
    assert busy_bandwidth(point(case()), traced()) == pytest.approx(LINK, rel=0.01)
    two = point(case(options=(("gpus", 2),)), effective=effective)
    assert busy_bandwidth(two, STEP) == pytest.approx(0.5e9 / 0.050), "each link carries its part"
