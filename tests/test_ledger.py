"""Files of a batch job: their owner, the cost of a torn line, and the tokens of interrupted rows."""

import json
import re
from pathlib import Path

import pytest

from zinfer.core.request import Failure
from zinfer.job.batch.ledger import JobChanged, Ledger, job_path
from zinfer.job.batch.openai import encode, failed
from zinfer.job.batch.openai import read_requests as read
from zinfer.record.jsonl import StoreError

SETTINGS = {"prompts": "abc", "model": "llama"}
RECORDS = [
    failed(request, Failure(code="oom_gpu", message="no"))  # type: ignore[arg-type]
    for name in "abc"
    for request in read(
        encode({"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {"prompt": name}})
    )
]
IDS = [record["id"] for record in RECORDS]


@pytest.fixture
def output(tmp_path: Path) -> Path:
    path = tmp_path / "sub" / "out.jsonl"
    with Ledger.open(path, SETTINGS, 7) as ledger:
        ledger.add(RECORDS[:2])
    return path


def test_a_job_goes_on_where_it_was(output: Path) -> None:
    with Ledger.open(output, SETTINGS, 99) as ledger:
        assert list(ledger.done) == IDS[:2]
        assert ledger.created == 7
        ledger.add(RECORDS[2:])
        ledger.finish()
    assert [json.loads(line) for line in output.read_text().splitlines()] == RECORDS
    with Ledger.open(output, SETTINGS, 99) as ledger:
        assert list(ledger.done) == IDS


@pytest.mark.parametrize("change", [{"model": "opt"}, {"prompts": "abd"}, {"layers": 3}])
def test_another_job_is_refused_with_the_difference_and_changes_nothing(
    output: Path, change: dict[str, object]
) -> None:
    before = output.read_bytes(), job_path(output).read_bytes()
    ((key, value),) = change.items()
    with pytest.raises(JobChanged, match=f"{key}: .* -> {value}") as caught:
        Ledger.open(output, SETTINGS | change, 99)
    assert caught.value.exit_code == 6
    assert (output.read_bytes(), job_path(output).read_bytes()) == before
    with Ledger.open(output, SETTINGS | change, 99, force=True) as ledger:
        assert list(ledger.done) == IDS[:2]
        assert ledger.created == 99
    with pytest.raises(JobChanged):
        Ledger.open(output, SETTINGS, 99)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("llama", "llamb", r"use --force(.|\n)* first line is damaged"),
        (".*", '{"custom_id": "1"}\n', "does not say which"),
        (".*", None, r"out\.jsonl\.job does not say which: it is missing"),
    ],
)
def test_answers_without_a_whole_job_are_refused(output: Path, old: str, new: str | None, message: str) -> None:
    job = job_path(output)
    content = None if new is None else re.sub(old, new, job.read_text(), count=1, flags=re.DOTALL)
    job.unlink() if content is None else job.write_text(content)
    with pytest.raises(JobChanged, match=message):
        Ledger.open(output, SETTINGS, 99)
    assert (job.read_text() if job.exists() else None) == content
    with Ledger.open(output, SETTINGS, 99, force=True) as ledger:
        assert list(ledger.done) == IDS[:2]
    Ledger.open(output, SETTINGS, 7).close()


@pytest.mark.parametrize("content", ["my\nnotes\n", "{}\n", '{"custom_id":"a","body":{}}\n', "{\n}", "\n"])
def test_a_file_that_is_not_an_output_is_not_touched(tmp_path: Path, content: str) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text(content)
    with pytest.raises(StoreError, match="not a batch output"):
        Ledger.open(notes, SETTINGS, 99)
    assert notes.read_text() == content
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_second_writer_is_refused(output: Path) -> None:
    with Ledger.open(output, SETTINGS, 7), pytest.raises(StoreError, match="another zinfer is writing"):
        Ledger.open(output, SETTINGS, 7)
    Ledger.open(output, SETTINGS, 7).close()


def test_an_answer_torn_at_any_byte_is_given_again(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda _descriptor: None)
    whole = output.read_bytes()
    start = whole.index(b"\n") + 1
    damaged = output.with_name("out.jsonl.damaged")
    for end in range(start, len(whole)):
        output.write_bytes(whole[:end])
        with Ledger.open(output, SETTINGS, 7) as ledger:
            kept = IDS[:1] if end < len(whole) - 1 else IDS[:2]  # only the newline is missing
            assert list(ledger.done) == kept
            assert len(ledger.damaged) == (end > start and len(kept) == 1)
            ledger.add(RECORDS[len(kept) :])
        assert [json.loads(line) for line in output.read_text().splitlines()] == RECORDS
    assert whole[start:-2] in damaged.read_bytes()


def test_unfinished_rows_keep_their_tokens(output: Path) -> None:
    with Ledger.open(output, SETTINGS, 7) as ledger:
        ledger.save([(IDS[2], 0, [5, 6]), ("other", 0, [])])
        ledger.save([(IDS[2], 2, [7])])
    job = job_path(output)
    job.write_bytes(job.read_bytes() + b'{"id":"' + IDS[2].encode() + b'","at":3,"tok')
    with Ledger.open(output, SETTINGS, 7) as ledger:
        assert ledger.made == {IDS[2]: [5, 6, 7]}
        ledger.save([(IDS[2], 3, [8])])
    with pytest.raises(JobChanged):
        Ledger.open(output, SETTINGS | {"model": "opt"}, 7)
    with Ledger.open(output, SETTINGS | {"prompts": "more"}, 9, force=True) as ledger:
        assert ledger.made == {IDS[2]: [5, 6, 7, 8]}
    with Ledger.open(output, SETTINGS | {"prompts": "more"}, 9) as ledger:
        assert ledger.made == {IDS[2]: [5, 6, 7, 8]}
    whole = job.read_bytes()
    with Ledger.open(output, SETTINGS | {"model": "opt"}, 7, force=True) as ledger:
        assert ledger.made == {}, "tokens of another model are of no use"
    assert b"tokens" not in job.read_bytes()
    job.write_bytes(whole)
    with Ledger.open(output, SETTINGS | {"prompts": "more"}, 9) as ledger:
        ledger.finish()
    assert len(job.read_bytes().splitlines()) == 1
    assert sorted(path.name for path in output.parent.iterdir()) == ["out.jsonl", "out.jsonl.job"]


def test_a_changed_byte_of_a_job_file_changes_no_token(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda _descriptor: None)
    with Ledger.open(output, SETTINGS, 7) as ledger:
        ledger.save([(IDS[2], 0, [5, 6])])
        ledger.save([(IDS[2], 2, [17])])
        ledger.save([(IDS[2], 3, [8, 9])])
    job = job_path(output)
    whole = job.read_bytes()
    header, first, second, third = whole.splitlines(keepends=True)
    start = len(header) + len(first)
    for at in range(start, start + len(second) - 1):
        job.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with Ledger.open(output, SETTINGS, 7) as ledger:
            assert ledger.made == {IDS[2]: [5, 6]}, whole[at:]
            assert [(damage.path, damage.line) for damage in ledger.damaged] == [(job, 3)]
    with Ledger.open(output, SETTINGS, 7) as ledger:  # it goes on from there, and the lines after it count no more
        ledger.save([(IDS[2], 2, [17, 8])])
    with Ledger.open(output, SETTINGS, 7) as ledger:
        assert ledger.made == {IDS[2]: [5, 6, 17, 8]}
    assert third in job.read_bytes()


def test_a_job_that_answered_nothing_may_become_another(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    Ledger.open(path, SETTINGS, 7).close()
    with Ledger.open(path, SETTINGS | {"model": "opt"}, 8) as ledger:
        assert ledger.created == 8
    job_path(path).write_bytes(b"")  # a power cut
    Ledger.open(path, SETTINGS, 9).close()
