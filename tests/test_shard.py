"""Shards of a batch job: each request is answered by one of them, and what is put together is whole or refused."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.command import ran
from tests.test_batch_command import line
from zinfer.core.request import Failure
from zinfer.job.batch.ledger import Ledger, job_path, merge
from zinfer.job.batch.openai import BatchLine, digest, failed, read_requests
from zinfer.job.shard import Shard, ShardError

COUNT, TOTAL = 10, 3
CONTENT = "".join(line(f"r{number}", prompt="x", max_tokens=2) for number in range(COUNT)).encode()
REQUESTS = read_requests(CONTENT)
PROMPTS = digest(CONTENT)
SHARDS = Shard.all(TOTAL)
MERGE = ["batch", "prompts.jsonl", "-o", "out.jsonl", "--merge"]


@given(st.integers(0, 40), st.integers(1, 50))
def test_shards_are_disjoint_complete_and_even(lines: int, total: int) -> None:
    parts = [shard.of(range(lines)) for shard in Shard.all(total)]
    assert sorted(index for part in parts for index in part) == list(range(lines))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("text", ["0/4", "5/4", "1/0", "4", "1/4/2", "-1/4", "1/100000", "", "a/b", "1 / 4", "１/4"])
def test_what_is_no_shard_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="i/n"):
        Shard.parse(text)


def answer(output: Path, shard: Shard, leave_out: int = 0, **settings: object) -> Path:
    """Answer a shard's requests in reverse, but the last `leave_out`. A job whose rows end in any order does so."""
    path = shard.path(output)
    requests = [request for request in shard.of(REQUESTS) if isinstance(request, BatchLine)]
    identity = {"prompts": PROMPTS, "model": "m", "shard": str(shard)} | settings
    with Ledger.open(path, identity, 7 + shard.number) as ledger:
        waiting = [request for request in requests[: len(requests) - leave_out] if request.id not in ledger.done]
        lost = Failure(code="oom_gpu", message="no")
        ledger.add(failed(request, lost) for request in reversed(waiting))
        ledger.finish()
    return path


@pytest.fixture
def output(tmp_path: Path) -> Path:
    for shard in SHARDS:
        answer(tmp_path / "out.jsonl", shard)
    return tmp_path / "out.jsonl"


def test_shards_come_together_in_the_order_of_the_requests(output: Path) -> None:
    merged = merge(output, PROMPTS, REQUESTS)
    answers = [json.loads(text) for text in output.read_text().splitlines()]
    assert [record["custom_id"] for record in answers] == [f"r{number}" for number in range(COUNT)]
    assert [done.id for done in merged.done] == [record["id"] for record in answers]
    before = output.read_bytes(), job_path(output).read_bytes()
    merge(output, PROMPTS, REQUESTS)
    assert (output.read_bytes(), job_path(output).read_bytes()) == before
    with Ledger.open(output, {"prompts": PROMPTS, "model": "m"}, 99) as ledger:  # a job without shards has it all
        assert len(ledger.done) == COUNT
        assert ledger.created == 8


def test_a_merge_that_was_killed_between_its_two_files_is_done_again(output: Path) -> None:
    merge(output, PROMPTS, REQUESTS)
    job_path(output).unlink()
    merge(output, PROMPTS, REQUESTS)
    assert job_path(output).exists()


def test_a_shard_that_has_not_ended_is_named(output: Path) -> None:
    path = SHARDS[1].path(output)
    path.unlink()
    answer(output, SHARDS[1], leave_out=2)
    with pytest.raises(ShardError, match=r"2 of 10 answers are missing.*--shard 2/3 \(2\)$") as caught:
        merge(output, PROMPTS, REQUESTS)
    assert caught.value.exit_code == 6
    assert not output.exists()
    answer(output, SHARDS[1])
    assert len(merge(output, PROMPTS, REQUESTS).done) == COUNT


def add(output: Path, number: int) -> None:
    """Append the first answer of the first shard to another one."""
    with SHARDS[number].path(output).open("ab") as file:
        file.write(SHARDS[0].path(output).read_bytes().splitlines(True)[0])


def swap(output: Path) -> None:
    path, other = (shard.path(output) for shard in SHARDS[:2])
    for first, second in ((path, other), (job_path(path), job_path(other))):
        first.rename(output)
        second.rename(first)
        output.rename(second)


def answer_anew(output: Path, *shards: Shard, **settings: Any) -> None:
    for shard in shards:
        shard.path(output).unlink()
        job_path(shard.path(output)).unlink()
        answer(output, shard, **settings)


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "lost": (lambda output: SHARDS[2].path(output).unlink(), r"lacks 1 of 3 shards: run --shard 3/3"),
    "repeated": (partial(add, number=0), r"00001-of-00003\.jsonl:5 answers a request for the second time"),
    "mixed": (partial(add, number=1), r"00002-of-00003\.jsonl:4 answers no request of shard 2/3"),
    "swapped": (swap, r"is that of shard 2/3"),
    "another model": (
        lambda output: answer_anew(output, SHARDS[1], model="other"),
        r"shards 1/3 and 2/3 are of different jobs: model: m -> other",
    ),
    "other prompts": (lambda output: answer_anew(output, *SHARDS, prompts="abc"), r"answers another file of prompts"),
    "no job": (lambda output: job_path(SHARDS[1].path(output)).unlink(), r"does not say which job"),
    "two splits": (lambda output: answer(output, Shard(1, 2)), r"has shards of 2 and of 3"),
    "already there": (lambda output: output.write_text("mine\n"), r"has other answers than the shards: --force"),
}


@pytest.mark.parametrize(("damage", "message"), FAULTS.values(), ids=FAULTS)
def test_shards_that_are_not_one_whole_job_are_refused(
    output: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(output)
    before = output.read_bytes() if output.exists() else None
    with pytest.raises(ShardError, match=message) as caught:
        merge(output, PROMPTS, REQUESTS)
    assert caught.value.exit_code == 6
    assert "\n" not in str(caught.value)
    assert (output.read_bytes() if output.exists() else None) == before


def test_torn_lines_are_left_out_and_said(output: Path) -> None:
    """Torn lines stay where another process appended behind them. Its request has an answer further down."""
    path = SHARDS[0].path(output)
    path.write_bytes(b'{"id":"batch_r\n' + path.read_bytes())
    merged = merge(output, PROMPTS, REQUESTS)
    assert [fault.split(": ")[0] for fault in merged.damaged] == [f"{path}:1"]
    assert len(output.read_bytes().splitlines()) == COUNT


def test_jobs_of_an_array_answer_what_one_job_does(folder: Path) -> None:
    prompts = [line(f"p{size}", prompt="ab" * size, max_tokens=size, temperature=0) for size in range(1, 6)]
    (folder / "prompts.jsonl").write_text("".join([*prompts[:2], "broken\n\n", *prompts[2:]]))
    job = ["batch", "prompts.jsonl", "-m", "bloom-tiny", "--load-format", "dummy", "--dtype", "fp32", "-o"]
    ran(folder, *job, "whole.jsonl", code=3)
    ran(folder, *job, "out.jsonl", "--shard", "1/2", code=3)
    ran(folder, *MERGE, code=6, says="run --shard 2/2")
    ran(folder, *job, "out.jsonl", "--shard", "2/2")
    ran(folder, *MERGE, code=3, says="5 answers and 1 error in out.jsonl")

    def answers(name: str) -> dict[str, Any]:
        records = map(json.loads, (folder / name).read_text().splitlines())
        return {record["id"]: record | {"response": record["response"]["body"].get("choices")} for record in records}

    assert answers("out.jsonl") == answers("whole.jsonl")
    assert [record["custom_id"] for record in answers("out.jsonl").values()] == ["p1", "p2", None, "p3", "p4", "p5"]
    assert "tok/s" not in ran(folder, *job, "out.jsonl", code=3).stderr
    ran(folder, *MERGE, "-m", "bloom-tiny", code=2, says="--model is not for --merge")


def test_a_shard_without_a_request_is_whole(folder: Path) -> None:
    (folder / "prompts.jsonl").write_text(line("a", prompt="x", max_tokens=2))
    job = ["batch", "prompts.jsonl", "-o", "out.jsonl", "-m", "bloom-tiny", "--load-format", "dummy"]
    for words in ([*job, "--shard", "1/2"], [*job, "--shard", "2/2"], MERGE):
        ran(folder, *words)
