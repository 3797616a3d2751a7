"""Comparisons with known outcomes, and the regression check's exit code 7."""

from functools import partial
from math import sqrt
from pathlib import Path
from typing import Any, get_args

import pytest

from tests import Patch, invoke, mentions
from tests.results import case, point
from zinfer.analysis.compare import HIGHER_IS_BETTER, CompareError, Metric, compare, value
from zinfer.commands.compare import AXES, METRICS
from zinfer.core.case import Case
from zinfer.record.measurement import Measurement
from zinfer.record.store import Store


def timed(step_ms: tuple[float, ...], batch_size: int = 1, engine: str = "stream", **fields: Any) -> Measurement:
    """Return a four-token point whose repeats take `step_ms`. Each takes one of them for a step and for prefill."""
    samples = {"ttft_ms": step_ms, "step_ms": tuple((step,) * 3 for step in step_ms)}
    return point(case(batch_size, engine, output_len=4, **fields)).model_copy(update=samples)


def failed(status: str = "oom_gpu", batch_size: int = 1, engine: str = "stream") -> Measurement:
    return point(case(batch_size, engine, output_len=4), status=status)


STEADY, SLOWER, NEARLY = (100.0, 101.0, 99.0), (120.0, 121.0, 119.0), (101.0, 102.0, 100.0)


def write(folder: Path, **files: list[Measurement]) -> list[Path]:
    """Write files of points, such as a.jsonl; return their paths."""
    for name, points in files.items():
        with Store(folder / f"{name}.jsonl") as store:
            store.append(*points)
    return [folder / f"{name}.jsonl" for name in files]


run = partial(invoke, "compare")


def test_every_metric_knows_its_sense_and_every_axis_is_a_field() -> None:
    assert set(METRICS) == set(get_args(Metric)) == set(HIGHER_IS_BETTER)
    assert set(AXES) == set(Case.model_fields) - {"model", "workload", "layers", "allow_nan"}


@pytest.mark.parametrize(
    ("metric", "mean", "noise"),
    [
        # three repeats 99, 100, 101 have deviation 1; Student's t for 2 degrees of freedom is 4.303
        ("ttft_ms", 100, 4.303 / sqrt(3)),
        ("tpot_ms", 100, 4.303 / sqrt(3)),
        ("output_tok_s", 80.0027, 80 * 0.04303 / sqrt(3)),
        ("decode_tok_s", 80, 80 * 0.04303 / sqrt(3)),
        ("gpu_peak_bytes", 20 << 30, None),
    ],
)
def test_a_value_has_the_confidence_of_its_own_repeats(metric: Metric, mean: float, noise: float | None) -> None:
    three, single = (value(timed(repeats, batch_size=8), metric) for repeats in (STEADY, (100.0,)))
    assert three is not None
    assert three.mean == pytest.approx(mean, rel=1e-4)
    assert three.half_width == (None if noise is None else pytest.approx(noise, rel=1e-3))
    assert single is not None
    assert (single.half_width, value(failed(), metric)) == (None, None)


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        (timed(STEADY), timed(STEADY), "same"),
        (timed(STEADY), timed(NEARLY), "noise"),
        (timed(STEADY), timed(SLOWER), "worse"),
        (timed(SLOWER), timed(STEADY), "better"),
        (timed(STEADY), timed((120.0,)), "unknown"),
        (timed((100.0,)), timed(SLOWER), "unknown"),
        (timed(STEADY), failed(), "broken"),
        (timed(STEADY), failed("offload_not_effective"), "broken"),
        (failed(), timed(STEADY), "fixed"),
        (failed(), failed("timeout"), "failed"),
        (timed(STEADY), timed(()), "untimed"),
        (timed(()), failed(), "broken"),
    ],
)
@pytest.mark.parametrize("metric", ["output_tok_s", "prefill_tok_s", "decode_tok_s", "ttft_ms", "tpot_ms"])
def test_verdicts(before: Measurement, after: Measurement, verdict: str, metric: Metric) -> None:
    (change,) = compare([before], [after], metric).changes
    assert change.verdict == verdict
    assert change.regressed(0.05) == (verdict in ("worse", "unknown", "broken"))
    assert change.regressed(0.5) == (verdict == "broken")


def test_less_memory_is_better_and_its_noise_is_unknown() -> None:
    less, more = point(case(1)), point(case(1), gpu_peak_bytes=25 << 30)
    (worse,), (better,) = (compare([a], [b], "gpu_peak_bytes").changes for a, b in ((less, more), (more, less)))
    assert (worse.verdict, worse.loss, worse.regressed(0.2)) == ("unknown", 0.25, True)
    assert better.loss == 0


def test_noise_of_both_sides_adds_in_quadrature_and_one_generated_token_has_no_decode() -> None:
    (change,) = compare([timed(STEADY)], [timed(NEARLY)], "tpot_ms").changes
    assert change.relative == pytest.approx(0.01)
    assert change.noise == pytest.approx(4.303 / sqrt(3) * sqrt(2))
    short = point(case(1, output_len=1)).model_copy(update={"ttft_ms": (5.0, 6.0), "step_ms": ((), ())})
    assert compare([short], [short], "tpot_ms").changes[0].verdict == "untimed"
    assert compare([short], [short]).changes[0].verdict == "same"


def test_points_are_matched_by_case_and_the_rest_is_listed() -> None:
    before = [timed(STEADY, 16), timed(STEADY, 2), timed(STEADY, 4), failed("cancelled", 8)]
    after = [failed("crashed", 2), timed(STEADY, 2), timed(STEADY, 16), failed(batch_size=64), timed(STEADY, 8)]
    comparison = compare(before, after)
    changes = [(change.batch_size, change.verdict) for change in comparison.changes]
    assert changes == [(2, "same"), (16, "same")], "of equal cases the last one counts"
    assert [point.case.workload.batch_size for point in comparison.only_before] == [4]
    assert [point.case.workload.batch_size for point in comparison.only_after] == [8, 64]


def test_engines_are_compared_across_the_axis() -> None:
    ours, theirs = [timed(STEADY)], [timed(SLOWER, engine="deepspeed")]
    assert compare(ours, theirs).changes == ()
    (change,) = compare(ours, theirs, across=("engine",)).changes
    assert change.label == "stream cpu → deepspeed cpu"
    assert change.verdict == "worse"
    with pytest.raises(CompareError, match="stream cpu and deepspeed cpu"):
        compare([*ours, *theirs], ours, across=("engine",))


def test_the_table_says_what_is_noise_and_what_is_unknown(tmp_path: Path) -> None:
    before = [timed(STEADY, 1), timed(STEADY, 2), timed((100.0,), 4), timed(STEADY, 8), timed(STEADY, 32)]
    after = [timed(NEARLY, 1), timed(SLOWER, 2), timed(STEADY, 4), failed(batch_size=8), failed(batch_size=64)]
    older = [point.model_copy(update={"versions": {"torch": "2.9.0"}}) for point in before]
    a, b = write(tmp_path, a=older, b=after)
    done = run(a, b)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[:2] == [f"A: {a}", f"B: {b}"]
    assert {"torch: 2.9.0 → 2.11.0", "zinfer: unknown → 0.1.0"} <= {*lines}
    assert mentions(done.stdout, "bloom-176b", "14 layers", "512 in", "4 out", "dummy", "bfloat16")
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]
    assert [row[1] for row in rows] == ["1", "2", "4", "8"]
    assert [row[-1] for row in rows] == ["~", "worse", "?", "broken"]
    assert rows[1][4] == "-16.7%"
    assert rows[3][2:4] == ["80 tok/s", "oom_gpu"]
    assert mentions(done.stdout, "only in A", "stream cpu", "batch 32")
    assert mentions(done.stdout, "only in B", "stream cpu", "batch 64", "oom_gpu")
    assert sum(line.startswith(("? ", "~ ")) for line in lines) == 2, "the legend"


@pytest.mark.parametrize(
    ("after", "allowed", "code"),
    [
        (timed(SLOWER), "5%", 7),
        (timed(SLOWER), "16%", 7),
        (timed(SLOWER), "17%", 0),  # 120 ms in place of 100 is a sixth fewer tokens a second
        (timed(NEARLY), "0%", 0),
        (timed((102.0,)), "1%", 7),  # the noise of one repeat counts as zero
        (timed((102.0,)), "2.5%", 0),
        (failed(), "100%", 7),
        (timed((50.0,)), "0%", 0),
    ],
)
def test_a_regression_exits_seven(tmp_path: Path, after: Measurement, allowed: str, code: int) -> None:
    a, b = write(tmp_path, a=[timed(STEADY)], b=[after])
    done = run(a, b, "--fail-on-regression", allowed)
    assert done.exit_code == code, done.output
    assert mentions(done.stderr, "1 of 1", "stream cpu", "batch 1") == (code == 7)
    assert "stream cpu" in done.stdout, "the table comes all the same"
    assert run(a, b).exit_code == 0


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["no.jsonl", "b.jsonl"], 2, "'no.jsonl' does not exist"),
        (["empty.jsonl", "b.jsonl"], 4, "no results in empty.jsonl"),
        (["torn.jsonl", "b.jsonl"], 4, "torn.jsonl:1: not a whole record"),
        (["a.jsonl", "."], 2, "'.' is a directory"),
        (["a.jsonl", "machine.json"], 4, "machine.json:1: not a whole record"),
        (["a.jsonl", "c.jsonl"], 2, "try --across engine"),
        (["a.jsonl", "e.jsonl", "--across", "engine"], 2, "try --across engine,gpu_weights"),
        (["a.jsonl", "d.jsonl"], 2, "batch sizes"),
        (["two.jsonl", "b.jsonl"], 2, "h100 and h200"),
        (["a.jsonl", "b.jsonl", "--fail-on-regression", "5"], 2, "'5' is not a percentage: write 5%"),
        (["a.jsonl", "b.jsonl", "--fail-on-regression", "-5%"], 2, "is not a percentage"),
        (["a.jsonl", "b.jsonl", "--metric", "speed"], 2, "output_tok_s"),
        (["a.jsonl", "b.jsonl", "--across", "model"], 2, "choose from engine, offload"),
    ],
)
def test_mistakes_are_one_message(tmp_path: Path, monkeypatch: Patch, words: list[str], code: int, says: str) -> None:
    monkeypatch.chdir(tmp_path)
    steady, other, theirs = timed(STEADY), timed(STEADY, 2), timed(STEADY, engine="deepspeed")
    kept = timed(STEADY, engine="deepspeed", gpu_weights="auto")
    two = [steady, other.model_copy(update={"machine": "h200"})]
    write(tmp_path, a=[steady], b=[steady], c=[theirs], e=[kept], d=[other], two=two)
    Path("empty.jsonl").touch()
    Path("torn.jsonl").write_text('{"case"')
    Path("machine.json").write_text("{}")
    done = run(*words)
    assert done.exit_code == code, done.output
    assert says in done.stderr
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) <= 4
