"""The record of conformance is what `docs/models.md` says, and, when asked for, true of what is installed."""

import os

import pytest

from tests.conformance import record

NEEDED = 125  # types that must be right


def test_the_page_agrees_with_the_record() -> None:
    page = record.PAGE.read_text()
    assert record.replace_table(page, record.read()) == page, "run `python -m tests.conformance --table`"


def test_the_record_has_no_wrong_text_in_it() -> None:
    found = record.counts(record.read()) + record.counts(record.read(), wrapper=True)
    assert not found["differs"]
    assert not found["crash"]
    assert record.counts(record.read())["right"] >= NEEDED


def test_the_record_tells_nothing_of_the_machine() -> None:
    text = record.RECORD.read_text()
    assert not [word for word in ("/tmp", "/home", "/root", "/work", "/usr", "site-packages") if word in text]


@pytest.mark.slow  # every type of the installed transformers, in six ways
def test_every_model_gives_the_tokens_of_transformers_or_is_refused() -> None:
    from tests.conformance.__main__ import conformance

    told = conformance((), len(os.sched_getaffinity(0)))
    wrong = {name: entry["why"] for name, entry in told["types"].items() if entry["verdict"] in ("differs", "crash")}
    assert not wrong
    assert record.counts(told)["right"] >= NEEDED
