"""Decisions on fabricated points whose answers follow by arithmetic."""

import re
from collections.abc import Sequence
from typing import Any

import pytest

from tests import mentions
from tests.results import case, point, sweep
from zinfer.analysis.group import by_load, groups
from zinfer.analysis.rates import best, best_by_load, cautions, edges, offload_verdicts, tied, winner
from zinfer.analysis.sla import decide
from zinfer.core.case import Case
from zinfer.record.measurement import Measurement, latest
from zinfer.record.stats import spread


def exact(batch_size: int, step_s: float, engine: str = "stream", offload: str = "cpu", **fields: Any) -> Measurement:
    """Return a point with constant prefill and step times. Its throughput is batch_size / step_s."""
    step_ms = step_s * 1e3
    return point(case(batch_size, engine, offload, output_len=4, **fields), ttft_ms=[step_ms], step_ms=[[step_ms] * 3])


def failed(batch_size: int, status: str = "oom_gpu", engine: str = "stream", offload: str = "cpu") -> Measurement:
    return point(case(batch_size, engine, offload, output_len=4), status=status)


# the published shape: without offload batch 16 is the most that fits, with it batch 32 gives 1.5x
PUBLISHED = (
    *(exact(size, 0.1 + size / 160, offload="none") for size in (4, 8, 16)),
    failed(32, offload="none"),
    *(exact(size, 32 / 120 if size == 32 else 0.21) for size in (4, 8, 16, 32)),
    failed(64),
)


def test_the_best_point_is_the_fastest_usable_one() -> None:
    fastest = best(PUBLISHED)
    assert fastest is not None
    assert (fastest.case.offload, fastest.case.workload.batch_size) == ("cpu", 32)
    assert fastest.output_tok_s == pytest.approx(120)
    assert best([failed(1)]) is best([]) is None
    assert best([exact(16, 2.0), smaller := exact(8, 1.0), exact(32, 4.0)]) is smaller, "of equally fast ones"


def test_each_load_is_taken_and_judged_at_its_own_best_batch_and_at_equal_batch() -> None:
    batches = [(point.case.offload, point.case.workload.batch_size) for point in best_by_load(PUBLISHED)]
    assert batches == [("cpu", 32), ("none", 16)]
    labels = ["accelerate cpu", "deepspeed cpu", "stream none", "stream cpu", "stream cpu weight_codec=lossless"]
    assert [load.label() for load in by_load(sweep())] == labels
    (verdict,) = offload_verdicts(PUBLISHED)
    assert (verdict.engine, verdict.offload) == ("stream", "cpu")
    assert verdict.gain == pytest.approx(1.5)
    assert mentions(verdict.text, "cpu", "1.50x", "120 tok/s", "batch 32", "80 tok/s", "batch 16")
    assert mentions(verdict.text, "At equal batch (4 to 16", "60% to 95%")


@pytest.mark.parametrize(
    ("points", "facts"),
    [
        ([exact(8, 1.0)], ["fits on the GPU: not measured", "`zinfer sweep ", "--offload none"]),
        (
            [exact(8, 1.0), failed(2, offload="none"), failed(1, offload="none"), failed(4, "crashed", offload="none")],
            ["cpu", "8 tok/s", "batch 8", "failed", "crashed", "batch 4", "oom_gpu", "batch 1"],
        ),
        (
            [exact(4, 1.0, offload="none"), failed(1, "offload_not_effective")],
            ["cpu", "offload_not_effective", "batch 1", "4 tok/s", "batch 4"],
        ),
        ([failed(1)], ["fits on the GPU: not measured"]),
    ],
)
def test_a_verdict_names_a_missing_side(points: list[Measurement], facts: list[str]) -> None:
    (verdict,) = offload_verdicts(points)
    assert mentions(verdict.text, *facts)
    assert verdict.gain is None


def test_several_engines_are_judged_together_first() -> None:
    points = [exact(4, 1.0, "accelerate", "none"), exact(8, 1.0, "stream", "cpu")]
    assert [(v.engine, v.gain) for v in offload_verdicts(points)] == [(None, 2.0)]
    assert offload_verdicts([exact(4, 1.0, offload="none")]) == ()


def test_edges_are_the_last_that_fits_and_the_first_that_does_not() -> None:
    points = [*PUBLISHED, failed(1, "timeout", "accelerate"), failed(128, "oom_host")]
    batches_by_load = {edge.load.label(): (edge.largest_ok, edge.smallest_oom) for edge in edges(points)}
    assert batches_by_load == {"accelerate cpu": (None, None), "stream none": (16, 32), "stream cpu": (32, 64)}


@pytest.mark.parametrize(
    ("samples", "half_width"),  # from tables of Student's t: 12.706, 4.303, 2.228, 2.086, 1.984
    [((1, 3), 12.706), ((1, 2, 3), 2.484), (range(11), 2.228), (range(21), 2.824), (range(101), 5.784)],
)
def test_spread_is_students_interval(samples: Sequence[float], half_width: float) -> None:
    interval = spread(samples)
    assert interval is not None
    assert interval.mean == pytest.approx(sum(samples) / len(samples))
    assert interval.half_width == pytest.approx(half_width, rel=4e-3)


def test_groups_never_mix_what_cannot_be_compared() -> None:
    others: list[dict[str, Any]] = [
        *({"layers": None}, {"model": "opt-30b"}, {"dtype": "float16"}, {"load_format": "safetensors"}),
        *({"input_len": 128}, {"output_len": 64}),
    ]
    points = [point(case(8)), point(case(8), machine="h200"), *(point(case(8, **fields)) for fields in others)]
    by_group = groups(points)
    assert [len(members) for members in by_group.values()] == [1] * len(points)
    assert len({group.stem("all", alone=False) for group in by_group}) == len(points)


def test_a_cancelled_point_replaces_no_other() -> None:
    measured, cancelled, short = failed(4, "oom_gpu"), failed(4, "cancelled"), failed(4, "oom_host")
    assert latest([measured, cancelled]) == (measured,)
    assert latest([cancelled, measured]) == (measured,)
    assert latest([measured, short, cancelled]) == (short,)
    early, late = (measured.model_copy(update={"started_at": f"2026-01-0{day}"}) for day in (1, 2))
    assert latest([late, early, measured]) == (late,)
    assert latest([cancelled, failed(8, "cancelled")]) == (cancelled, failed(8, "cancelled"))


def test_a_group_says_slice_weights_and_machine() -> None:
    (group,) = groups(sweep())
    assert mentions(group.title, "bloom-176b", "14 of 70 layers", "512 in", "32 out")
    assert mentions(group.conditions, "h100", "slice", "dummy", "bfloat16")
    assert group.stem("bloom", alone=True) == "h100/bloom"
    (other,) = groups([point(case(1, model="/data/../my model", layers=None), machine="../x")])
    assert other.title == "my model, 512 in / 32 out"
    assert "the whole model" in other.conditions
    assert other.stem("../s", alone=False) == "x/s-my-model-512-32-bfloat16-dummy"


def spreading(asked: Case, *seconds: float) -> Measurement:
    """Return a one-token point whose repeats take `seconds`."""
    return point(asked, ttft_ms=[1e3 * value for value in seconds], step_ms=[()] * len(seconds))


def test_a_difference_within_the_noise_is_no_gain() -> None:
    with_offload = spreading(case(8, output_len=1), 0.010, 0.013, 0.018)
    without = spreading(case(8, offload="none", output_len=1), 0.012, 0.015, 0.019)
    (verdict,) = offload_verdicts([with_offload, without])
    assert (verdict.gain or 0) > 1.1
    assert mentions(verdict.text, "no difference beyond the noise", "±", "batch 8")
    assert not re.search(r"\d%|\dx", verdict.text)
    assert mentions(verdict.text, "At equal batch (8) there is no difference")
    assert mentions(tied([with_offload, without], with_offload), "stream none", "batch 8")


def test_a_gain_beyond_the_noise_has_its_spread_and_single_runs_are_called_so() -> None:
    with_offload = spreading(case(8, output_len=1), 0.0100, 0.0101, 0.0102)
    without = spreading(case(8, offload="none", output_len=1), 0.0200, 0.0201, 0.0203)
    (verdict,) = offload_verdicts([with_offload, without])
    assert re.search(r"gives 1\.99x ± 0\.0\d", verdict.text), verdict.text
    assert tied([with_offload, without], with_offload) == ""
    (verdict,) = offload_verdicts([exact(8, 1.0), exact(4, 1.0, offload="none")])
    assert verdict.gain == 2
    assert mentions(verdict.text, "cpu", "2.00x, single run", "8 tok/s", "batch 8", "4 tok/s", "batch 4")
    assert "one repeat" in str(cautions([exact(8, 1.0)]))
    assert "one repeat" not in str(cautions(sweep()))


def test_lossy_settings_are_ranked_apart() -> None:
    fast = exact(8, 0.5, options=(("kv_cache_dtype", "int8"),))
    slow, without = exact(8, 1.0), exact(8, 2.0, offload="none")
    assert winner([fast, slow, without]) is slow
    assert winner([fast]) is fast
    (verdict,) = offload_verdicts([fast, slow, without])
    assert verdict.change is not None
    assert verdict.change.second == slow
    decision = decide([fast, slow, without], (), "throughput")
    assert (decision.point, decision.lossy, decision.usable) == (slow, fast, 2)
    assert not case(1, options=(("weight_codec", "lossless"),)).lossy
    assert not case(1, options=(("kv_cache_dtype", "bf16"),)).lossy


def test_without_a_gpu_offload_is_a_copy() -> None:
    cpu, gpu = point(case(8), gpu_peak_bytes=None), point(case(4))
    assert "without a GPU" in str(cautions([cpu]))
    assert "without a GPU" not in str(cautions([cpu, gpu]))
    assert "random" in str(cautions([cpu]))
    assert "random" not in str(cautions([point(case(8, load_format="safetensors"))]))
