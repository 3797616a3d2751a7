"""Money, energy, service levels and sizing: the arithmetic, the unknown, and the wording."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import invoke, mentions
from tests.results import case, point, sweep
from zinfer.analysis import economics
from zinfer.analysis.economics import COUNTER, READINGS, Cost, EconomicsError, cost, energy, fleet
from zinfer.analysis.sla import SlaError, check, decide, parse, statistic
from zinfer.record.measurement import Measurement
from zinfer.record.store import Store


def timed(batch: int = 32, step_s: float = 2.0, first_s: float = 8.0, repeats: int = 2, **fields: Any) -> Measurement:
    """Return a point of 10 output tokens with exact times: `first_s` and nine steps of `step_s`, `repeats` times."""
    asked = case(batch, output_len=10)
    samples: dict[str, Any] = {"ttft_ms": [first_s * 1e3] * repeats, "step_ms": [[step_s * 1e3] * 9] * repeats}
    return point(asked, **(samples | fields))


def test_a_token_costs_the_hours_it_takes_and_the_energy() -> None:
    """Energy comes from the counter, else from power readings."""
    measured = timed(gpu={"energy_j": 6400.0, "timed_s": 52.0})
    assert measured.output_tok_s == pytest.approx(320 / 26)
    hours = 1e6 / (320 / 26) / 3600
    paid, read = cost(measured, 3.6), energy(timed(gpu={"power_w_mean": 400.0, "timed_s": 52.0}))
    assert paid.usd_per_mtok == pytest.approx(hours * 3.6)
    assert paid.j_per_token == pytest.approx(6400 / 640)
    assert paid.method == COUNTER
    assert read is not None
    assert read[0] == pytest.approx(400 * 52 / 640)
    assert read[1] == READINGS
    assert energy(timed(gpu={})) is None
    unpaid = Cost(usd_per_mtok=None, j_per_token=None, method="")
    assert cost(timed(gpu={})) == cost(point(case(1), status="oom_gpu"), 1) == unpaid


def test_demands() -> None:
    expected = {
        ("2Mtok/day", None): (2e6, 86400),
        ("2Mtok/day", "8h"): (2e6, 28800),
        ("500 k/h", None): (5e5, 3600),
        ("5Mtok", "90min"): (5e6, 5400),
        ("1e6tokens/d", None): (1e6, 86400),
    }
    assert {(text, until): economics.parse_demand(text, until) for text, until in expected} == expected


@pytest.mark.parametrize(
    ("text", "deadline"),
    [("0tok/day", None), ("lots", None), ("-1tok/day", None), ("5Mtok", None), ("1Mtok/h", "2h"), ("1Mtok", "0h")],
)
def test_bad_demands_say_how_to_write_one(text: str, deadline: str | None) -> None:
    with pytest.raises(EconomicsError, match=r"write|add --deadline|is longer"):
        economics.parse_demand(text, deadline)


def test_numbers_of_prompts_and_durations() -> None:
    assert [*map(economics.parse_count, ("100k", "2.5 M", "7"))] == [100_000, 2_500_000, 7]
    assert [*map(economics.parse_seconds, ("8h", "250ms", "1.5 min", "2 s"))] == [28800, 0.25, 90, 2]
    for bad in ("0", "-1", "k", "10q", "", "1e3"):
        with pytest.raises(EconomicsError, match="write 2500, 100k"):
            economics.parse_count(bad)


def test_a_fleet_covers_its_demand_and_configurations_of_two_gpus_pay_for_both() -> None:
    measured = timed()
    two = measured.model_copy(update={"case": measured.case.model_copy(update={"options": (("gpus", 2),)})})
    for record, working in ((measured, 8), (two, 16)):  # 2e6 / (12.31 · 0.8 · 28800) = 7.05
        sized = fleet(record, 2e6, 28800, utilisation=0.8, spare=2)
        assert (sized.working, sized.gpus) == (working, working + 2)
        assert sized.load == pytest.approx(2e6 / (8 * 320 / 26 * 28800))
    assert cost(two, 4).usd_per_mtok == pytest.approx(2 * (cost(measured, 4).usd_per_mtok or 0))
    assert fleet(measured, 1e-6, 86400).working == 1
    with pytest.raises(EconomicsError, match="a measured throughput"):
        fleet(point(case(1), status="crashed"), 1, 1)


@given(st.floats(1, 1e12), st.floats(1, 1e12), st.floats(60, 1e6), st.floats(0.05, 1.0))
def test_more_demand_never_takes_fewer_gpus(tokens: float, more: float, seconds: float, share: float) -> None:
    measured = timed()
    small, large = (fleet(measured, amount, seconds, share) for amount in sorted((tokens, more)))
    assert small.gpus <= large.gpus
    capacity = large.working * large.gpu_tok_s * share * seconds
    assert capacity >= large.tokens * (1 - 1e-6)


def test_levels_have_a_short_form_and_are_read_as_they_are_shown() -> None:
    for short, long in {
        "ttft<=30s": "ttft:p99:<=:30s",
        " tpot <= 100ms ": "tpot:p99:<=:100ms",
        "e2e p50<=0.5min": "e2e:p50:<=:30s",
        "20 tok/s": "output_tok_s:mean:>=:20",
        "5tok/s/user": "user_tok_s:mean:>=:5",
        "output_tok_s>=2.5 tok/s": "output_tok_s:mean:>=:2.5",
    }.items():
        level = parse(short)
        assert level == parse(long) == parse(level.describe())


def test_percentiles_go_by_rank_from_the_good_end() -> None:
    values = [float(n) for n in range(1, 101)]
    expected = {"p50": 50, "p90": 90, "p95": 95, "p99": 99, "max": 100, "min": 1, "mean": 50.5}
    assert {name: statistic(values, name) for name in expected} == expected
    assert statistic(values, "p99", worst_high=False) == 2
    assert statistic([7.0], "p99") == 7.0


def test_levels_are_checked_over_every_sample_and_few_samples_are_reported() -> None:
    measured = timed(step_ms=[[100.0] * 8 + [900.0]] * 2, ttft_ms=[1000.0, 3000.0])
    levels = "ttft:p99:<=:2s ttft:mean:<=:2s tpot:p50:<=:100ms tpot:max:<=:1s output_tok_s:mean:>=:10tok/s"
    kept = check(measured, [parse(text) for text in f"{levels} user_tok_s:p90:>=:5 e2e:max:<=:10min".split()])
    assert [level.ok for level in kept] == [False, True, True, True, True, True, True]
    assert mentions(kept[0].describe(), "ttft p99 <= 2 s", "3 s", "2 samples")
    assert kept[0].miss == pytest.approx(0.5)
    assert mentions(kept[1].describe(), "ttft mean <= 2 s", "2 s")
    assert not any("sample" in level.describe() for level in kept[1:3])
    (single,) = check(timed(repeats=1), [parse("ttft:p99:<=:9s")])
    assert mentions(single.describe(), "ttft p99 <= 9 s", "8 s", "sample")
    (none,) = check(point(case(1), status="oom_gpu"), [parse("ttft:max:<=:9s")])
    assert not none.ok
    assert mentions(none.describe(), "ttft max <= 9 s", "not measured")


@pytest.mark.parametrize(
    "text",
    ["", "ttft", "ttft:p99:<:2s", "speed:p99:<=:2s", "ttft:p42:<=:2s", "ttft:p99:<=:2 parsecs", "tpot:max:<=:0s",
     "20", "x tok/s", "1.2.3 tok/s", "ttft 20 tok/s", "20 tok/s/gpu",
     "output_tok_s:mean:>=:2s", "user_tok_s:max:>=:2", "ttft:min:<=:2s", "output_tok_s:mean:>=:0", "ttft:p99:<=:2s:x"],
)  # fmt: skip
def test_bad_levels_list_what_there_is(text: str) -> None:
    with pytest.raises(SlaError, match=rf"^{re.escape(repr(text))}.*: write "):
        parse(text)


POINTS = [
    timed(4, step_s=1.0, first_s=1.0, gpu={"energy_j": 9000.0, "timed_s": 20.0}),
    timed(32, step_s=1.5, first_s=6.0, gpu={"energy_j": 9600.0, "timed_s": 39.0}),
    timed(64, step_s=4.0, first_s=20.0, gpu={"energy_j": 32000.0, "timed_s": 112.0}),
]


@pytest.mark.parametrize(
    ("objective", "levels", "batch"),
    [
        ("throughput", (), 32),
        ("latency", (), 4),
        ("cost", (), 32),
        ("throughput", ("ttft:max:<=:2s",), 4),
        ("latency", ("output_tok_s:mean:>=:10",), 32),
    ],
)
def test_each_objective_has_its_best_under_the_levels(objective: Any, levels: tuple[str, ...], batch: int) -> None:
    decision = decide(POINTS, tuple(map(parse, levels)), objective, 2.0)
    assert decision.point is not None
    assert decision.point.case.workload.batch_size == batch
    assert decision.nearest is None


def test_the_latency_of_a_single_token_does_not_grow_with_the_repeats() -> None:
    slow, fast = (
        point(case(batch, output_len=1), ttft_ms=[first_s * 1e3] * repeats, step_ms=[[]] * repeats)
        for batch, first_s, repeats in ((1, 2.0, 1), (2, 1.0, 3))
    )
    assert decide([slow, fast], (), "latency").point is fast


def test_when_nothing_keeps_the_levels_the_nearest_is_named() -> None:
    decision = decide(POINTS, (parse("ttft:max:<=:500ms"),), "throughput")
    assert (decision.point, decision.nearest) == (None, POINTS[0])
    assert decision.kept[0].miss == pytest.approx(1.0)
    nothing = decide([point(case(1), status="oom_gpu")], (), "throughput")
    assert (nothing.point, nothing.nearest, nothing.usable) == (None, None, 0)
    every = decide(sweep(), (parse("tpot:max:<=:100s"),), "throughput", 1.0)
    assert every.point is not None
    assert every.keeping == every.usable
    with pytest.raises(EconomicsError, match=r"--objective cost .*--gpu-hour-usd"):
        decide(POINTS, (), "cost")


@given(st.floats(0.5, 30), st.floats(0.5, 30))
def test_a_stricter_level_never_gives_a_faster_answer(level: float, other: float) -> None:
    levels = [(parse(f"ttft:max:<=:{bound:.3f}s"),) for bound in sorted((level, other))]
    strict, loose = (decide(POINTS, each, "throughput").point for each in levels)
    assert strict is None or (loose is not None and (strict.output_tok_s or 0) <= (loose.output_tok_s or 0))


def test_a_rate_is_that_of_a_whole_repeat() -> None:
    uneven = timed(8, step_ms=[[20.0] * 8 + [200.0]] * 2)
    (user,) = check(uneven, [parse("user_tok_s:mean:>=:30")])
    (rows,) = check(uneven, [parse("decode_tok_s:mean:>=:30")])
    assert user.actual == pytest.approx(1e3 / uneven.tpot_ms)  # type: ignore[operator]
    assert rows.actual == pytest.approx(uneven.decode_tok_s)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    with Store(tmp_path / "r.jsonl") as store:
        store.append(*POINTS)
    return tmp_path / "r.jsonl"


best = partial(invoke, "best")


def test_the_command_line_decides(results: Path) -> None:
    words = "--sla ttft:p99:<=:10s --objective cost --gpu-hour-usd 2.5 --demand 2Mtok/day --deadline 8h"
    done = best(results, *words.split())
    assert done.exit_code == 0, done.output
    assert mentions(done.stdout, "cost", "2 of 3", "stream cpu", "batch 32")
    assert mentions(done.stdout, "ttft p99 <= 10 s", "6 s", "2 samples")
    assert mentions(done.stdout, "8 h 00 min", "6 GPUs", "1 spare")
    assert mentions(done.stdout, "14 layers"), "the money of a slice is said to be"
    for line in (r"\d USD a million", r"\d J an output token.*NVML", "zinfer sweep.*--batch-size 32"):
        assert re.search(line, done.stdout)


def test_the_decision_as_json_and_only_when_asked(results: Path) -> None:
    (plain,) = json.loads(best(results, "--json").stdout)
    assert "decision" not in plain
    (row,) = json.loads(best(results, "--json", "--objective", "latency", "--demand", "1Mtok/day").stdout)
    answer = row["decision"]
    assert answer["point"]["batch_size"] == 4
    assert answer["fleet"]["gpus"] == answer["fleet"]["working"] + 1
    assert answer["point"]["command"].startswith("zinfer sweep")
    assert answer["point"]["usd_per_mtok"] is None


def test_an_unkept_level_exits_4_and_names_the_nearest_without_its_command(results: Path) -> None:
    done = best(results, "--sla", "ttft:max:<=:500ms")
    assert done.exit_code == 4
    assert mentions(done.stdout, "No point of 3")
    assert mentions(done.stdout, "ttft max <= 500 ms", "1 s", "500 ms", "100%")
    assert "reproduce:" not in done.stdout
    (command,) = re.findall("reproduce:.*", best(results, "--sla", "ttft:max:<=:2s").stdout)
    assert "--batch-size 4 " in command


def test_a_batch_longer_than_the_deadline_has_no_fleet(results: Path) -> None:
    words = ("--demand", "2Mtok/day", "--deadline", "5s")
    assert mentions(best(results, *words).stdout, "19.5 s", "--deadline")
    (row,) = json.loads(best(results, *words, "--json").stdout)
    assert row["decision"]["fleet"] is None
    alone = best(results, *words[2:])
    assert (alone.exit_code, "--deadline needs a --demand" in alone.stderr) == (2, True)
