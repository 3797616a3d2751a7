"""Damaged recipes, machines, records, requests, prompts and options, by seed: no internal error, and no long wait."""

import time
from contextlib import chdir
from pathlib import Path

import pytest

from tests.fuzz_documents import KINDS, QUICK, prepare, requests, trial
from zinfer.job.batch.openai import BatchLine, Fault, decode, encode, read_requests, refusal

SHORT, LONG, DRAWN = 12, 2000, 100


@pytest.mark.parametrize("kind", QUICK)
def test_damaged_documents_are_refused_or_served(kind: str, tmp_path: Path) -> None:
    _try(kind, range(SHORT), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_damaged_documents_are_refused_or_served(kind: str, tmp_path: Path) -> None:
    _try(kind, range(1000, 1000 + (LONG // len(QUICK) if kind in QUICK else DRAWN)), tmp_path)


def _try(kind: str, seeds: range, folder: Path) -> None:
    prepare(folder)
    damaged = False
    with chdir(folder):
        for seed in seeds:
            outcome = trial(kind, seed)
            assert outcome.fault is None, (kind, seed, [word[:80] for word in outcome.words], outcome.fault)
            damaged |= outcome.code != 0 or "left out" in outcome.stderr
    assert damaged, "nothing was damaged"


def test_damaged_requests_are_answered() -> None:
    answers = []
    for seed in range(300):
        began = time.process_time()
        answers += read_requests(requests(seed))
        assert time.process_time() - began < 1, seed
    assert {type(line) for line in answers} == {BatchLine, Fault}
    for line in answers:
        if isinstance(line, Fault):
            assert not decode(encode(refusal(line))).ok
