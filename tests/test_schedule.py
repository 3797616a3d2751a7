"""Continuous batching, simulated: rows of mixed lengths on a clock that has the plan's seconds."""

import random
from collections import Counter
from collections.abc import Callable, Iterable
from math import log
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import committed
from zinfer.analysis.calibrate import calibrate
from zinfer.checkpoint.resolve import from_catalogue
from zinfer.core.case import Case, Workload
from zinfer.core.machine import Machine
from zinfer.generation.pass_times import PassLoad, PassTimes
from zinfer.generation.queue import Queue
from zinfer.generation.schedule import (
    Abilities,
    Limits,
    PlannedBatch,
    PlannedWork,
    Schedule,
    Tally,
    largest_load,
    load_of_pass,
)
from zinfer.generation.sequence import Sequence
from zinfer.generation.tuning import TUNED
from zinfer.plan.planner import Plan, Planner, make_plan
from zinfer.plan.times import Efficiency
from zinfer.system import machines

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "sweeps" / "results"
H100 = machines.load(RESULTS / "nvidia-h100-80gb-hbm3" / "machine.json")
SPEC = from_catalogue("llama-2-70b").slice(8)


def plan_of(rows: int = 420, machine: Machine = H100, gpu_weights: str | None = None, **options: str) -> Plan:
    how: dict[str, Any] = {"model": "llama-2-70b", "layers": 8, "gpu_weights": gpu_weights}
    load = Workload(batch_size=rows, input_len=256, output_len=64)
    case = Case(engine="stream", offload="cpu", workload=load, options=tuple(options.items()), **how)
    return make_plan(case, SPEC, machine, efficiency=Efficiency())


PLAN = plan_of()


def times(plan: Plan = PLAN, joins: bool = True) -> PassTimes:
    return PassTimes(plan.placement, plan.model, plan.machine, joins=joins)


def separate_passes() -> PassTimes:
    """Seconds where each batch has a forward pass of its own."""
    return times(joins=False)


def lengths(count: int, mean: float, longest: int, sigma: float, dice: random.Random) -> list[int]:
    """Return log-normal lengths of mean `mean`, cut to `longest`. `mean` holds before the cut."""
    return [max(1, min(longest, round(dice.lognormvariate(log(mean) - sigma**2 / 2, sigma)))) for _ in range(count)]


def row(key: int, length: int, left: int, owner: int = 0) -> Sequence:
    return Sequence(range(length), left, key=key, owner=owner)


def chats(count: int, input_len: float, output_len: float, dice: random.Random, sigma: float = 0.8) -> list[Sequence]:
    """Return rows of log-normal lengths, cut to 1,500 and 400 tokens."""
    input_lens = lengths(count, input_len, 1500, sigma, dice)
    output_lens = lengths(count, output_len, 400, sigma, dice)
    return [row(key, *pair) for key, pair in enumerate(zip(input_lens, output_lens, strict=True))]


class Engine:
    """Positions that micro-batches hold, as an engine would have them: checks every move and work."""

    def __init__(self, able: Abilities) -> None:
        self.able = able
        self.live: dict[PlannedBatch, tuple[int, int, int]] = {}  # rows, length, capacity

    @property
    def reserved(self) -> int:
        return sum(rows * capacity for rows, _, capacity in self.live.values())

    def run(self, schedule: Schedule, clock: PassTimes) -> tuple[list[PlannedWork], float]:
        """Carry out the next pass; return its works and its seconds."""
        moves, works = schedule.plan()
        for kind, batch, sources in moves:
            if kind == "admit":
                assert len(batch.rows) >= 1
                self.live[batch] = len(batch.rows), batch.length, batch.capacity
            elif kind == "move_rows":
                assert self.able.moves_rows
                for source, places in sources:
                    rows, length, _ = self.live.pop(source)
                    assert length == source.length
                    assert list(places) == source.alive
                    assert rows == len(source.rows)
                assert batch.length == max(source.computed(index) for source, places in sources for index in places)
                moved = sum(len(places) for _, places in sources)  # rows of the batch may be given up by now
                self.live[batch] = moved, batch.length, batch.capacity
            elif kind == "yield":
                ((source, places),) = sources
                rows, length, capacity = self.live.pop(source)
                assert len(set(places)) == len(places) == len(batch.rows) <= rows
                if len(places) < rows:
                    self.live[source] = rows - len(places), length, capacity
            else:
                self.live.pop(batch)
        assert {id(batch) for batch in schedule.batches} == {id(batch) for batch in self.live}
        assert len(works) <= 1 or self.able.one_pass
        assert len({id(work.batch) for work in works}) == len(works)
        for batch, count in works:
            rows, length, capacity = self.live[batch]
            assert length == batch.length
            assert count >= 1
            assert length + count <= capacity
            assert self.able.chunks or batch.running or count == batch.width - length
            self.live[batch] = rows, length + count, capacity
        return works, clock.seconds(load_of_pass(works))


class Pass(NamedTuple):
    """Facts about a simulated pass."""

    seconds: float
    tokens: int
    waiting: int
    batches: int
    reserved: int


class Served:
    """Requests that come while others run: `tokens` that each has got, by request, and `rows` that each has now."""

    def __init__(
        self,
        limits: Limits,
        able: Abilities | None = None,
        clock: Callable[[], PassTimes] = times,
        truth: PassTimes | None = None,
        arrivals: bool = True,
    ) -> None:
        self.able, self.truth = able or Abilities(), truth or clock()
        self.schedule, self.engine = Schedule(clock(), limits, self.able, arrivals), Engine(self.able)
        self.left: dict[int, int] = {}
        self.tokens: Counter[int] = Counter()

    def add(self, request: int, count: int, input_len: int, left: int) -> None:
        first = len(self.left)
        rows = [row(first + number, input_len, left, request) for number in range(count)]
        self.left |= {row.key: left for row in rows}
        self.schedule.waiting.add(rows)

    def step(self) -> Pass | None:
        waiting = len(self.schedule.waiting)
        works, seconds = self.engine.run(self.schedule, self.truth)
        ended, tokens = [], 0
        for batch, count in works:
            if batch.length + count >= batch.width:
                for row in filter(None, batch.rows):
                    row.add([0])
                    tokens += 1
                    self.tokens[row.owner] += 1
                    self.left[row.key] -= 1
                    ended += [row.key] * (self.left[row.key] == 0)
        self.schedule.done(works, seconds, ended, {})
        return Pass(seconds, tokens, waiting, len(works), self.engine.reserved) if works else None

    def until(self, fact: Callable[[], bool], max_passes: int) -> int:
        """Run passes until something is so; return their number."""
        for count in range(max_passes + 1):
            if fact():
                return count
            self.step()
        raise AssertionError(f"not within {max_passes} passes: {self.tokens}, {self.rows}")

    @property
    def rows(self) -> Counter[int]:
        return Counter(row.owner for row in self.schedule.running)

    def finish(self) -> None:
        self.until(lambda: not any(self.left.values()), 100_000)
        self.step()
        assert not self.engine.live


def simulate(
    rows: Iterable[Sequence],
    limits: Limits,
    able: Abilities | None = None,
    clock: Callable[[], PassTimes] = times,
    arrivals: bool = False,
    ends: dict[int, int] | None = None,
    ending: float = 0.0,
    kept: dict[int, int] | None = None,
) -> tuple[Tally, list[Pass]]:
    """Run `rows` to their end: their limit, or the token that `ends` has for their key. `kept` are the positions, by
    key, that are reused."""
    served = Served(limits, able, clock, arrivals=arrivals)
    schedule, rows = served.schedule, list(rows)
    schedule._early, schedule._tokens = round(1e6 * ending), round(1e6 * (1 - ending))
    schedule.reusable = lambda row: (kept or {}).get(row.key, 0)
    served.left = {row.key: min(row.left, (ends or {}).get(row.key, 1 << 30)) for row in rows}
    schedule.waiting.add(rows)
    passes: list[Pass] = []
    while schedule.busy:
        if (done := served.step()) is None:
            assert not schedule.busy
        else:
            passes.append(done)
    assert not served.engine.live
    assert set(served.left.values()) == {0}
    return schedule.tally, passes


def padding(tally: Tally) -> float:
    """Return the share of the KV cache read that is padding."""
    return tally.padded / tally.read


def rate(passes: list[Pass]) -> float:
    return sum(step.tokens for step in passes) / sum(step.seconds for step in passes)


OTHERS: list[tuple[Any, ...]] = [(0.5, times, 0.1), (0.8, times, 0.1), (0.8, separate_passes, 0.2)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("sigma", "clock", "max_padding"),
    [*(pytest.param(*other, marks=pytest.mark.slow) for other in OTHERS), (1.0, times, 0.1)],
)
def test_a_thousand_chats_run_as_fast_as_equal_rows(
    sigma: float, clock: Callable[[], PassTimes], max_padding: float
) -> None:
    """While rows wait, mixed lengths reach the rate of equal ones; then the longest answers set the end. Where each
    batch has a forward pass of its own, there are fewer batches, and more padding."""
    rows = chats(1000, 245, 106, random.Random(1), sigma)
    left = [row.left for row in rows]
    mean_len = sum(row.length for row in rows) // 1000
    equal = PLAN.planner().at(Workload(batch_size=420, input_len=mean_len, output_len=sum(left) // 1000))
    tally, passes = simulate(rows, Limits(1_900_000, 420), clock=clock)
    full = [step for step in passes if step.waiting]
    link_s = min(step.seconds for step in passes)
    assert sum(step.tokens for step in passes) == sum(left)
    assert rate(full) >= 0.9 * (equal.output_tok_s or 0.0)
    assert padding(tally) < max_padding
    assert (tally.again, tally.yielded) == (0, 0)
    # No order of the rows takes fewer passes than the longest answer has tokens.
    assert tally.seconds <= 1.06 * max(left) * link_s
    assert max(step.batches for step in passes) <= 24


def test_rows_wait_for_memory() -> None:
    rows = chats(300, 245, 106, random.Random(3))
    tally, passes = simulate(rows, Limits(40_000))
    assert max(step.reserved for step in passes) <= 1.03 * 40_000
    assert tally.yielded < 0.05 * len(rows)
    assert padding(tally) < 0.1
    used = [step.reserved for step in passes if step.waiting]
    assert sum(used) / len(used) > 0.6 * 40_000


@pytest.mark.parametrize("count", [2, 60])
def test_rows_that_were_expected_to_end_give_way(count: int) -> None:
    """Admission reckons with rows that end early; if none does, rows wait again, and few are computed again."""
    rows = [row(key, 100, 6000 // count) for key in range(count)]
    tally, passes = simulate(rows, Limits(5_000 if count == 2 else 10_000), ending=0.02)
    assert 0 < tally.yielded < 3 * count
    assert sum(step.tokens for step in passes) == count * (6000 // count)
    assert max(step.reserved for step in passes) <= 1.1 * 10_000


def test_rows_end_early() -> None:
    rows = [row(key, 50 + key, 400) for key in range(200)]
    dice = random.Random(5)
    ends = {key: dice.randint(1, 60) for key in range(200)}
    tally, passes = simulate(rows, Limits(60_000), ends=ends, ending=1 / 30)
    assert sum(step.tokens for step in passes) == sum(ends.values())
    assert padding(tally) < 0.1
    assert tally.seconds < 1.5 * max(step.seconds for step in passes) * 80


def test_prompts_of_all_lengths_hide_behind_the_link() -> None:
    """Beyond the minimum tokens a pass never exceeds the link's time. A long prompt comes in chunks."""
    clock = times()
    rows = [row(0, 20_000, 50), *(row(key, 300, 50) for key in range(1, 60))]
    _, passes = simulate(rows, Limits(1_000_000), arrivals=True)
    assert max(step.seconds for step in passes) <= 1.1 * clock.link_s
    assert len(passes) < 20_000 / clock.room(PassLoad()) + 120


def test_kept_positions_are_not_computed_again() -> None:
    """Chats whose history is kept, beside new prompts: histories are not computed, and pad nobody's new tokens."""
    dice = random.Random(6)
    rows, kept, new = list[Sequence](), dict[int, int](), 0
    for key in range(200):
        history, turn = dice.choice([0, dice.randint(500, 4000)]), dice.randint(20, 300)
        rows.append(row(key, history + turn, 40))
        kept[key], new = history, new + turn
    whole = sum(row.length for row in rows)
    tally, passes = simulate(rows, Limits(4_000_000), arrivals=True, kept=kept)
    assert sum(step.tokens for step in passes) == 40 * len(rows)
    assert new <= tally.prompts < 1.5 * new
    assert tally.prompts < 0.25 * whole
    assert tally.again == 0
    assert padding(tally) < 0.1


WAYS = [
    pytest.param(Limits(1_000_000, 64), Abilities(), id="rows"),
    pytest.param(Limits(12_000), Abilities(), id="positions"),
    pytest.param(Limits(12_000), Abilities(moves_rows="rarely"), id="in host memory"),
    pytest.param(Limits(1_000_000, 64), Abilities(one_pass=False), id="a pass each"),
    pytest.param(Limits(1_000_000, 64), Abilities(chunks=False), id="no chunks"),
]


@pytest.mark.parametrize(("limits", "able"), WAYS)
def test_a_request_of_many_rows_does_not_hold_up_one_of_one_token(limits: Limits, able: Abilities) -> None:
    """Nor does it later, when those that came meanwhile run; and all get their tokens."""
    served = Served(limits, able)
    served.add(0, 256, 20, 90)
    served.until(lambda: served.rows[0] >= 16 and served.schedule.tally.passes > 8, 200)
    for request in range(1, 6):
        served.add(request, 1, 30, 1)
        assert served.until(lambda: served.tokens[request] == 1, 12) > 0, request  # noqa: B023
    assert served.rows[0] >= 15
    served.add(9, 3, 100, 50)
    served.until(lambda: served.tokens[9] == 150, 100)
    assert 0 < served.schedule.tally.yielded < 40
    served.finish()
    assert served.tokens == Counter({0: 256 * 90, 9: 150} | dict.fromkeys(range(1, 6), 1))


def test_requests_of_many_rows_share_them() -> None:
    """Rows move between requests until each has its share. One with a quarter gives none up."""
    served = Served(Limits(1_000_000, 64))
    for request, parts in ((0, 1), (1, 2), (2, 3), (3, 4)):
        served.add(request, 256, 20, 600)
        served.until(lambda: min(served.rows[request] for request in range(parts)) >= 64 // parts - 1, 200)  # noqa: B023
        assert sum(served.rows.values()) == 64
    served.add(4, 256, 20, 600)
    before = served.schedule.tally.yielded
    for _ in range(50):
        served.step()
    assert served.schedule.tally.yielded == before
    assert served.rows == Counter(dict.fromkeys(range(4), 16))
    served.until(lambda: served.rows[4] > 0, 1000)  # as soon as one has ended


@pytest.mark.long
def test_a_request_waits_for_few_rows_of_as_many_large_ones_as_there_is_room_for() -> None:
    """Each large request runs one row and queues as many more."""
    served = Served(Limits(1_000_000, 4))
    for request in range(4):
        served.add(request, 100, 20, 20 + request)
    served.until(lambda: min(served.tokens[request] for request in range(4)) > 30, 200)
    for request in (10, 11, 12):
        served.add(request, 2, 30, 5)
        served.until(lambda: served.tokens[request] == 10, 80)  # noqa: B023
    for request in range(4, 8):
        served.add(request, 100, 20, 20 + request)
    before = Counter(served.tokens)
    for _ in range(1000):
        served.step()
    gained = [served.tokens[request] - before[request] for request in range(8)]
    assert min(gained) > 0.7 * max(gained), gained
    served.finish()


def test_long_prompts_of_one_request_do_not_hold_up_short_ones_of_another() -> None:
    served = Served(Limits(1 << 40, 256))
    served.add(0, 4, 2_000_000, 10)
    for _ in range(5):
        served.step()
    assert served.rows[0] >= 1
    assert served.tokens[0] == 0
    served.add(1, 1, 40, 2)
    served.until(lambda: served.tokens[1] == 2, 4)
    served.add(2, 1, 400_000, 1)
    alone = Served(Limits(1 << 40, 256))
    alone.add(2, 1, 400_000, 1)
    needed = alone.until(lambda: alone.tokens[2] == 1, 1000)
    served.until(lambda: served.tokens[2] == 1, 3 * needed + 4)  # half of each pass
    served.finish()


@pytest.mark.long
def test_a_large_request_alone_is_as_fast_as_many_small_ones() -> None:
    """No row is held back for later requests, or given up."""
    dice = random.Random(8)
    needs = list(zip(lengths(1000, 100, 900, 0.8, dice), lengths(1000, 60, 300, 0.8, dice), strict=True))
    single, each = ([row(key, *need, request * key) for key, need in enumerate(needs)] for request in (0, 1))
    (whole, _), (separate, _) = (simulate(rows, Limits(60_000, 256), arrivals=True) for rows in (single, each))
    assert (whole.seconds, whole.passes) == (separate.seconds, separate.passes)
    assert whole.yielded == separate.yielded == whole.again == 0


def fair_order(rows: Iterable[Sequence], held: Counter[int], since: dict[int, int]) -> list[Sequence]:
    """Sort rows in the plain way: by rows that their owners have before them, then by turn, then by key."""
    counts, ranked = Counter(held), []
    for waiting in sorted(rows, key=lambda row: row.key):
        ranked.append(((counts[waiting.owner], since[waiting.owner], waiting.key), waiting))
        counts[waiting.owner] += 1
    return [waiting for _, waiting in sorted(ranked, key=lambda pair: pair[0])]


@pytest.mark.parametrize("fair", [True, False])
@given(steps=st.lists(st.tuples(st.sampled_from(["add", "begin", "end", "drop", "again"]), st.integers(0, 200)),
                      max_size=60))  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_rows_begin_in_their_order(fair: bool, steps: list[tuple[str, int]]) -> None:
    """The order is that of a plain sort, whatever comes and leaves."""
    queue, waiting, running, turns, key = Queue[Sequence](fair), list[Sequence](), list[Sequence](), Counter[int](), 0
    for number, (kind, chosen) in enumerate(steps, 1):
        if kind == "add":
            new = [row(key + more, 5 + chosen, 1 + chosen % 7, chosen % 5) for more in range(1 + chosen % 25)]
            turns |= dict.fromkeys({chosen % 5} - turns.keys(), number)
            queue.add(new[::-1])
            waiting, key = waiting + new, key + len(new)
        elif kind == "begin":
            begun = queue.front(chosen % 5)
            queue.begin(begun)
            waiting, running = [other for other in waiting if other not in begun], running + begun
        elif kind == "drop" and waiting:
            queue.remove([waiting.pop(chosen % len(waiting))])
        elif kind in ("end", "again") and running:
            gone = running.pop(chosen % len(running))
            if kind == "end":
                queue.turn(gone.owner)
                turns[gone.owner] = number
            else:
                queue.add([gone])
                waiting.append(gone)
        held = Counter(other.owner for other in running)
        queue.hold(held)
        current = held.keys() | {other.owner for other in waiting}
        turns = Counter({owner: turn for owner, turn in turns.items() if owner in current})
        order = fair_order(waiting, held, turns) if fair else sorted(waiting, key=like)
        assert queue.front(7) == order[:7]
        assert queue.front(len(waiting)) == order
        assert (len(queue), set(queue)) == (len(waiting), set(waiting))


def like(row: Sequence) -> tuple[int, int, int, int]:
    return -row.left.bit_length(), -row.length, -row.left, row.key


@pytest.mark.long
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 12), st.integers(1, 900), st.integers(1, 60),
                          st.integers(0, 20)), min_size=1, max_size=12),
       st.integers(2_000, 20_000), st.integers(1, 20),
       st.sampled_from([*(way.values[1] for way in WAYS), Abilities(False, False, False)]))  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_every_row_gets_its_tokens_whoever_comes(
    arrivals: list[tuple[int, int, int, int, int]], positions: int, max_rows: int, able: Any
) -> None:
    served = Served(Limits(positions, max_rows), able)
    expected: Counter[int] = Counter()
    for request, count, input_len, left, passes in arrivals:
        served.add(request, count, input_len, left)
        expected[request] += count * left
        for _ in range(passes):
            served.step()
    served.finish()
    assert served.tokens == expected


def test_seconds_are_the_plans_until_they_are_measured() -> None:
    clock = times()
    step = PLAN.step_s or 0.0
    assert clock.link_s == pytest.approx(step, rel=0.1)
    decode = PassLoad(420, 420 * 256, 0, 10)
    assert clock.seconds(decode) == clock.link_s
    room = clock.room(decode)
    assert 1000 < room < 8000
    assert clock.room(decode._replace(prompts=10)) < room
    assert clock.seconds(decode._replace(prompt_tokens=room)) == pytest.approx(clock.link_s, rel=0.01)
    assert separate_passes().max_batches < clock.max_batches <= 20
    assert separate_passes().room(decode) < room
    for _ in range(40):
        clock.observe(PassLoad(10, 1000, 0, 1), 0.3)
    assert clock.link_s == pytest.approx(0.3, rel=0.01)
    before = clock.room(PassLoad())
    for _ in range(60):
        clock.observe(PassLoad(prompt_tokens=before), 0.6)  # the work takes twice as long as was thought
    assert clock.room(PassLoad()) == pytest.approx(before / 2, rel=0.2)
    unknown = PassTimes(PLAN.placement, SPEC, H100.model_copy(update={"matmul_flops": None}))
    assert unknown.room(PassLoad(5, 5)) == PLAN.placement.pass_tokens


def test_the_first_passes_are_expected_to_be_a_bit_slower_than_those_on_record() -> None:
    fitted = calibrate(committed.points(), committed.machines())["stream"]
    for name in ("link_share", "mfu", "expert_mfu"):
        assert 0.85 * getattr(fitted, name) <= getattr(TUNED.at_first, name) <= getattr(fitted, name)


def test_prompts_do_not_hide_behind_the_unpacking_of_what_stays() -> None:
    small = H100.model_copy(update={"gpu_bytes": 14 << 30})  # no room to keep layers unpacked
    coded = plan_of(4, small, "100%", weight_codec="lossless")
    clock, decode = times(coded), PassLoad(rows=4, positions=4 * 256, batches=1)
    assert coded.bound_by == "unpacking"
    assert clock.seconds(decode) == pytest.approx(coded.step_s or 0.0, rel=0.05)
    assert clock.seconds(decode) > 2 * clock.link_s
    assert clock.room(decode) == 0


def test_the_load_is_what_the_machine_has_room_for() -> None:
    needs = [(245, 106)] * 10_000
    planner = PLAN.planner()
    load = largest_load(planner, needs)
    assert (load.input_len, load.output_len) == (245, 106)
    held = load.batch_size * load.total_len * SPEC.kv_bytes_per_token
    assert 0.3 * H100.gpu_bytes < held < 0.95 * H100.gpu_bytes
    assert largest_load(planner, needs[:7]).batch_size == 7
    assert largest_load(planner, needs, max_rows=30).batch_size == 30
    host_share = largest_load(plan_of(kv_offload="cpu", kv_attention="gpu").planner(), needs)
    assert 1 <= host_share.batch_size <= TUNED.max_rows
    assert planner.placement(load).ring_depth >= PLAN.placement.layer_chunks  # the link goes on while a layer computes


@pytest.mark.parametrize(("share", "rows"), [("25%", 42), ("27%", 37)])
def test_a_share_of_weights_that_leaves_no_margin_leaves_rows(share: str, rows: int) -> None:
    load = Workload(batch_size=1, input_len=512, output_len=16)
    case = Case(model="bloom-176b", engine="stream", offload="cpu", gpu_weights=share, workload=load,
                options=(("kv_offload", "auto"),))  # fmt: skip
    planner = Planner(case, from_catalogue("bloom-176b"), committed.machines()["nvidia-h100-80gb-hbm3-x2"])
    load = largest_load(planner, [(512, 16)] * 100)
    assert load.batch_size == rows
    assert planner.at(load).fits


class Imperfect(PassTimes):
    """Machine whose link and work overlap only in part. A fifth of the shorter does not hide behind the longer."""

    def seconds(self, load: PassLoad) -> float:
        return super().seconds(load) + 0.2 * min(self.link_s, self.work_seconds(load))


@pytest.mark.parametrize(("host_share", "max_batches"), [(1 / 3, 20), (1.0, 33)])
def test_work_that_hides_imperfectly_does_not_end_the_flow_of_prompts(
    host_share: float, max_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BLOOM-176B, a fifth: a closed loop of 200 rows, a third of them, or all, with their KV cache in host memory.
    Passes that are longer than the link, whatever they carry, are no reason to carry less; and batches in host memory,
    one for each pass of a row, are not merged, which would take as long as several passes."""
    spec, rows = from_catalogue("bloom-176b").slice(14), 200
    load = Workload(batch_size=rows, input_len=512, output_len=32)
    case = Case(
        model="bloom-176b", engine="stream", offload="cpu", layers=14, workload=load, options=(("kv_offload", "auto"),)
    )
    placement = make_plan(case, spec, H100, efficiency=Efficiency()).placement
    served = Served(
        Limits(rows * load.total_len, rows),
        Abilities(moves_rows="rarely"),
        lambda: PassTimes(placement, spec, H100, 512),
        Imperfect(placement, spec, H100, 512),
    )
    schedule, run = served.schedule, served.engine.run
    device_positions = round((1 - host_share) * rows) * load.total_len
    merged, seen = 0, set[int]()

    def placed(*how: Any) -> tuple[list[PlannedWork], float]:
        """Run a pass; place new batches on the device first, as engines do."""
        nonlocal merged, seen
        before = [batch for batch in schedule.batches if batch.on_host]
        done = run(*how)
        merged += sum(len(batch.alive) > 0 and batch not in schedule.batches for batch in before)
        used = sum(batch.reserved for batch in schedule.batches if id(batch) in seen and not batch.on_host)
        for batch in [batch for batch in schedule.batches if id(batch) not in seen]:
            batch.on_host = batch.on_host or used + batch.reserved > device_positions
            used += 0 if batch.on_host else batch.reserved
        seen = {id(batch) for batch in schedule.batches}
        return done

    monkeypatch.setattr(served.engine, "run", placed)
    passes: list[Pass] = []
    while len(served.left) < 600 or schedule.busy:
        free = rows - len(schedule.running) - len(schedule.waiting)
        served.add(0, min(free, 600 - len(served.left)), 512, 32)
        if (done := served.step()) is not None:
            passes.append(done)
    assert not any(served.left.values())
    assert rate(passes[32:-32]) >= 0.7 * rows / served.truth.link_s, "without the first and the last rows"
    assert schedule.tally.again == 0
    assert (max(step.batches for step in passes) <= max_batches, merged) == (True, 0)


def calm_until(schedule: Schedule, goal: Limits, max_passes: int = 100 * TUNED.calm) -> int:
    """Run passes that have enough memory until the limits are `goal`; return how many there were."""
    for number in range(max_passes):
        if schedule.limits == goal:
            return number
        schedule.done([], 1.0, [], {})
    raise AssertionError(schedule.limits)


def test_limits_rise_again_after_memory_fell_short() -> None:
    """All rows wait again; a second shortage lowers the limits further."""
    whole = Limits(10_000, 40, 3000)
    schedule = Schedule(times(), whole)
    schedule.waiting.add(row(key, 256, 64) for key in range(30))

    def short() -> Limits:
        Engine(Abilities()).run(schedule, times())
        reserved = [batch.reserved for batch in schedule.batches]
        before, rows = schedule.limits, len(schedule.running)
        assert 0 < sum(reserved) <= before.positions
        assert rows > 0
        schedule.fell_short()
        assert (schedule.running, len(schedule.waiting)) == ([], 30)
        assert schedule.limits == Limits(
            sum(reserved) * 4 // 5, 40, min(before.batch_positions, max(reserved)) * 4 // 5
        )
        return schedule.limits

    assert short().positions < whole.positions
    assert calm_until(schedule, whole) > TUNED.calm
    schedule.done([], 1.0, [], {})
    assert schedule.limits == whole, "never above what they were at first"
    lowered = short()
    assert short().positions < lowered.positions, "twice in a row: once more than was too much"
    assert calm_until(schedule, whole) > TUNED.calm
    assert schedule.tally.retries == 3
