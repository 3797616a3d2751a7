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
from zinfer.analysis.economics import (
    COUNTER,
    READINGS,
    Cost,
    EconomicsError,
    cost,
    energy,
    fleet,
    parse_count,
    parse_demand,
    parse_seconds,
)
from zinfer.analysis.sla import SlaError, check, decide, parse, statistic
from zinfer.record.measurement import Measurement
from zinfer.record.store import Store


def timed(batch: int = 32, step_s: float = 2.0, first_s: float = 8.0, repeats: int = 2, **fields: Any) -> Measurement:
    """Return a point of 10 output tokens with exact times: `first_s` and nine steps of `step_s`, `repeats` times."""
    asked = case(batch, output_len=10)
    samples: dict[str, Any] = {"ttft_ms": [first_s * 1e3] * repeats, "step_ms": [[step_s * 1e3] * 9] * repeats}
    return point(asked, **(samples | fields))


def test_a_token_costs_the_hours_it_takes_and_the_energy() -> None:
    measured = timed(gpu={"energy_j": 6400.0, "timed_s": 52.0})
    assert measured.output_tok_s == pytest.approx(320 / 26)
    paid = cost(measured, 3.6)
    assert paid.j_per_token == pytest.approx(6400 / 640)
    assert paid.method == COUNTER
    hours = 1e6 / (320 / 26) / 3600
    assert paid.usd_per_mtok == pytest.approx(hours * 3.6)


def test_energy_comes_from_the_counter_else_from_power_readings() -> None:
    read = energy(timed(gpu={"power_w_mean": 400.0, "timed_s": 52.0}))
    assert read is not None
    assert read[0] == pytest.approx(400 * 52 / 640)
    assert read[1] == READINGS
    bare = timed(gpu={})
    assert energy(bare) is None
    unpaid = cost(bare)
    assert (unpaid.usd_per_mtok, unpaid.j_per_token, unpaid.method) == (None, None, "")
    assert cost(point(case(1), status="oom_gpu"), 1) == Cost()


@pytest.mark.parametrize(
    ("text", "deadline", "expected"),
    [
        ("2Mtok/day", None, (2e6, 86400)),
        ("2Mtok/day", "8h", (2e6, 28800)),
        ("500 k/h", None, (5e5, 3600)),
        ("5Mtok", "90min", (5e6, 5400)),
        ("1e6tokens/d", None, (1e6, 86400)),
    ],
)
def test_demands(text: str, deadline: str | None, expected: tuple[float, float]) -> None:
    assert parse_demand(text, deadline) == expected


@pytest.mark.parametrize(
    ("text", "deadline"),
    [("0tok/day", None), ("lots", None), ("-1tok/day", None), ("5Mtok", None), ("1Mtok/h", "2h"), ("1Mtok", "0h")],
)
def test_bad_demands_say_how_to_write_one(text: str, deadline: str | None) -> None:
    with pytest.raises(EconomicsError, match=r"write|add --deadline|is longer"):
        parse_demand(text, deadline)


@pytest.mark.parametrize(("text", "number"), [("100k", 100_000), ("2.5 M", 2_500_000), ("7", 7)])
def test_numbers_of_prompts(text: str, number: int) -> None:
    assert parse_count(text) == number
    for bad in ("0", "-1", "k", "10q", "", "1e3"):
        with pytest.raises(EconomicsError, match="write 2500, 100k"):
            parse_count(bad)


@pytest.mark.parametrize(("text", "seconds"), [("8h", 28800), ("250ms", 0.25), ("1.5 min", 90), ("2 s", 2)])
def test_durations(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


def test_a_fleet_covers_its_demand() -> None:
    measured = timed()
    sized = fleet(measured, 2e6, 28800, utilisation=0.8, spare=2)
    assert sized.working == 8  # 2e6 / (12.31 · 0.8 · 28800) = 7.05
    assert sized.gpus == 10
    assert fleet(measured, 1e-6, 86400).working == 1
    assert sized.load == pytest.approx(2e6 / (8 * 320 / 26 * 28800))
    with pytest.raises(EconomicsError, match="a measured throughput"):
        fleet(point(case(1), status="crashed"), 1, 1)


def test_a_configuration_of_two_gpus_pays_for_both() -> None:
    record, prices = timed(), 4
    two = record.model_copy(update={"case": record.case.model_copy(update={"options": (("gpus", 2),)})})
    alone, both = cost(record, prices), cost(two, prices)
    assert both.usd_per_mtok == pytest.approx(2 * alone.usd_per_mtok)  # type: ignore[operator]
    sized = fleet(two, 2e6, 28800, utilisation=0.8, spare=2)
    assert (sized.working, sized.gpus) == (16, 18)
    assert sized.load == pytest.approx(2e6 / (8 * 320 / 26 * 28800))


@given(st.floats(1, 1e12), st.floats(1, 1e12), st.floats(60, 1e6), st.floats(0.05, 1.0))
def test_more_demand_never_takes_fewer_gpus(tokens: float, more: float, seconds: float, share: float) -> None:
    measured = timed()
    small, large = (fleet(measured, amount, seconds, share) for amount in sorted((tokens, more)))
    assert small.gpus <= large.gpus
    capacity = large.working * large.gpu_tok_s * share * seconds
    assert capacity >= large.tokens * (1 - 1e-6)


@given(st.floats(0, 1e4), st.floats(0, 1e4))
def test_a_higher_price_never_lowers_the_cost(first: float, second: float) -> None:
    low, high = (cost(timed(), price) for price in sorted((first, second)))
    assert (low.usd_per_mtok or 0) <= (high.usd_per_mtok or 0)


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ("ttft<=30s", "ttft:p99:<=:30s"),
        (" tpot <= 100ms ", "tpot:p99:<=:100ms"),
        ("e2e p50<=0.5min", "e2e:p50:<=:30s"),
        ("20 tok/s", "output_tok_s:mean:>=:20"),
        ("5tok/s/user", "user_tok_s:mean:>=:5"),
        ("output_tok_s>=2.5 tok/s", "output_tok_s:mean:>=:2.5"),
    ],
)
def test_levels_have_a_short_form_and_are_read_as_they_are_shown(short: str, long: str) -> None:
    level = parse(short)
    assert level == parse(long) == parse(level.describe())


def test_percentiles_go_by_rank_from_the_good_end() -> None:
    values = [float(n) for n in range(1, 101)]
    assert [statistic(values, name) for name in ("p50", "p90", "p95", "p99", "max", "min", "mean")] == [
        50, 90, 95, 99, 100, 1, 50.5,
    ]  # fmt: skip
    assert statistic(values, "p99", worst_high=False) == 2
    assert statistic([7.0], "p99") == 7.0


def test_levels_are_checked_over_every_sample_and_few_samples_are_reported() -> None:
    measured = timed(step_ms=[[100.0] * 8 + [900.0]] * 2, ttft_ms=[1000.0, 3000.0])
    kept = check(measured, [parse(text) for text in (
        "ttft:p99:<=:2s", "ttft:mean:<=:2s", "tpot:p50:<=:100ms", "tpot:max:<=:1s", "output_tok_s:mean:>=:10tok/s",
        "user_tok_s:p90:>=:5", "e2e:max:<=:10min",
    )])  # fmt: skip
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
    prices = 2.0
    decision = decide(POINTS, tuple(map(parse, levels)), objective, prices)
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
    assert decision.point is None
    assert decision.nearest is POINTS[0]
    assert decision.kept[0].miss == pytest.approx(1.0)
    nothing = decide([point(case(1), status="oom_gpu")], (), "throughput")
    assert (nothing.point, nothing.nearest, nothing.usable) == (None, None, 0)


@given(st.floats(0.5, 30), st.floats(0.5, 30))
def test_a_stricter_level_never_gives_a_faster_answer(level: float, other: float) -> None:
    strict, loose = (
        decide(POINTS, (parse(f"ttft:max:<=:{bound:.3f}s"),), "throughput") for bound in sorted((level, other))
    )
    fast = loose.point.output_tok_s or 0 if loose.point else 0
    assert (strict.point.output_tok_s or 0 if strict.point else 0) <= fast


def test_objectives_that_lack_their_data_say_what_is_needed() -> None:
    with pytest.raises(EconomicsError, match=r"--objective cost .*--gpu-hour-usd"):
        decide(POINTS, (), "cost")


def test_a_rate_is_that_of_a_whole_repeat() -> None:
    uneven = timed(8, step_ms=[[20.0] * 8 + [200.0]] * 2)
    (user,) = check(uneven, [parse("user_tok_s:mean:>=:30")])
    (rows,) = check(uneven, [parse("decode_tok_s:mean:>=:30")])
    assert user.actual == pytest.approx(1e3 / uneven.tpot_ms)  # type: ignore[operator]
    assert rows.actual == pytest.approx(uneven.decode_tok_s)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    with Store.open(tmp_path / "r.jsonl") as store:
        store.append(*POINTS)
    return tmp_path / "r.jsonl"


best = partial(invoke, "best")


def test_the_command_line_decides(results: Path) -> None:
    done = best(
        results, "--sla", "ttft:p99:<=:10s", "--objective", "cost", "--gpu-hour-usd", 2.5, "--demand", "2Mtok/day",
        "--deadline", "8h",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert mentions(done.stdout, "cost", "2 of 3", "stream cpu", "batch 32")
    assert mentions(done.stdout, "ttft p99 <= 10 s", "6 s", "2 samples")
    assert any(re.search(r"\d USD a million", line) for line in lines)
    assert any(re.search(r"\d J an output token", line) and "NVML" in line for line in lines)
    assert mentions(done.stdout, "8 h 00 min", "6 GPUs", "1 spare")
    assert any("zinfer sweep" in line and "--batch-size 32" in line for line in lines)


def test_the_decision_as_json_and_only_when_asked(results: Path) -> None:
    (plain,) = json.loads(best(results, "--json").stdout)
    assert "decision" not in plain
    (row,) = json.loads(best(results, "--json", "--objective", "latency", "--demand", "1Mtok/day").stdout)
    answer = row["decision"]
    assert answer["point"]["batch_size"] == 4
    assert answer["fleet"]["gpus"] == answer["fleet"]["working"] + 1
    assert answer["point"]["command"].startswith("zinfer sweep")
    assert answer["point"]["usd_per_mtok"] is None


def test_an_unkept_level_exits_4_and_names_the_nearest(results: Path) -> None:
    done = best(results, "--sla", "ttft:max:<=:500ms")
    assert done.exit_code == 4
    assert mentions(done.stdout, "No point of 3")
    assert mentions(done.stdout, "ttft max <= 500 ms", "1 s", "500 ms", "100%")


def test_only_the_chosen_command_is_printed(results: Path) -> None:
    done = best(results, "--sla", "ttft:max:<=:2s")
    commands = [line for line in done.stdout.splitlines() if "reproduce:" in line]
    assert len(commands) == 1
    assert "--batch-size 4 " in commands[0]
    assert "reproduce:" not in best(results, "--sla", "ttft:max:<=:500ms").stdout


def test_a_batch_longer_than_the_deadline_has_no_fleet(results: Path) -> None:
    done = best(results, "--demand", "2Mtok/day", "--deadline", "5s")
    assert mentions(done.stdout, "19.5 s", "--deadline")
    (row,) = json.loads(best(results, "--demand", "2Mtok/day", "--deadline", "5s", "--json").stdout)
    assert row["decision"]["fleet"] is None


def test_money_of_a_slice_is_said_to_be(results: Path) -> None:
    assert mentions(best(results, "--gpu-hour-usd", 2).stdout, "14 layers"), "not of 70"


@pytest.mark.parametrize(
    "words",
    [("--deadline", "8h"), ("--demand", "lots"), ("--sla", "x"), ("--objective", "cost"), ("--gpu-hour-usd", "-1"),
     ("--utilisation", "0"), ("--spare", "-1"), ("--gpu-hour-usd", "nan")],
)  # fmt: skip
def test_mistakes_are_one_message(results: Path, words: tuple[str, str]) -> None:
    done = best(results, *words)
    assert done.exit_code != 0
    assert isinstance(done.exception, SystemExit | EconomicsError | SlaError)


def test_committed_kinds_of_points_can_all_be_decided_on() -> None:
    decision = decide(sweep(), (parse("tpot:max:<=:100s"),), "throughput", 1.0)
    assert decision.point is not None
    assert decision.keeping == decision.usable
