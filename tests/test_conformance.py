"""Conformance record, and, if asked for, its agreement with the installed transformers."""

import os
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conformance import compare, record
from tests.conformance.compare import WAYS, Outcome
from tests.conformance.run import Row, run_all
from tests.conformance.small import Subject, cut, family, persistent_buffers, small_model
from zinfer.engine import EngineError
from zinfer.generation import scheduler
from zinfer.spec.architecture import COUNTS_PADDING

NEEDED = 125  # types that must be right


def test_the_record_has_no_wrong_text_in_it() -> None:
    found = record.counts(record.read()) + record.counts(record.read(), wrapper=True)
    assert not found["differs"]
    assert not found["crash"]
    assert record.counts(record.read())["right"] >= NEEDED


def test_the_record_tells_nothing_of_the_machine() -> None:
    text = record.RECORD.read_text()
    assert not [word for word in ("/tmp", "/home", "/root", "/work", "/usr", "site-packages") if word in text]


def test_all_kinds_of_layers_are_kept() -> None:
    assert cut(["a"] * 9 + ["b"], 4) == ["a", "a", "a", "b"]
    assert cut(["a", "b"], 5) == ["a", "b", "a", "b", "a"]
    config = small_model(Subject("jamba")).config
    assert set(config.layer_types) == {"linear_attention", "full_attention"}
    assert config.num_hidden_layers >= 6


def test_persistent_buffers_are_random_and_unlike_from_layer_to_layer() -> None:
    model = small_model(Subject("deepseek_v3"))
    assert family(model) == "Mixtures of experts"
    buffers = [owner._buffers[leaf] for _, owner, leaf in persistent_buffers(model)]
    assert len(buffers) >= 5
    assert all(buffer is not None and bool(buffer.any()) for buffer in buffers)
    assert len({tuple(buffer.tolist()) for buffer in buffers if buffer is not None}) == len(buffers)


def test_the_outcome_of_each_way_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Outcome] = {}
    expected: list[torch.Tensor] = []
    reference = compare.reference

    def observed(*args: Any) -> Any:
        found = reference(*args)
        expected.append(found[2])
        return found

    monkeypatch.setattr(compare, "reference", observed)

    def run(way: compare.Way, directory: Path, *_: object) -> torch.Tensor:
        if way.offload == "none":
            return expected[0]
        if way.packed:
            raise EngineError(f"{directory} cannot\nbe had")
        if way.prefill_tokens:
            raise ZeroDivisionError("at all")
        return expected[0].roll(1)

    monkeypatch.setattr(compare, "run", run)
    compare.compare(Subject("llama"), tmp_path, told.__setitem__)
    assert told.pop("family").why == "Dense"
    assert told.pop("reference").verdict == "right"
    assert {name: outcome.verdict for name, outcome in told.items()} == {
        "none": "right",
        "cpu": "differs",
        "rows": "crash",
        "kept": "differs",
        "packed": "refused",
        "kv-cpu": "differs",
        "kv-link": "differs",
        "int8": "differs",
        "experts": "does not apply",
        "requests": "differs",
        "mixed": "differs",
        "drafts": "differs",
        "mixed-d": "differs",
    }
    assert told["packed"].why == "llama cannot be had"
    assert told["rows"].why.startswith("ZeroDivisionError: at all [tests/test_conformance.py:")
    assert Row(Subject("llama"), told, 1.0).verdict == "crash"


def test_a_process_that_dies_costs_its_row_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def die(subject: Subject, _scratch: Path, tell: compare.Tell) -> None:
        if subject.type == "gpt2":
            os._exit(8)
        tell("reference", Outcome("right"))
        tell("none", Outcome("right"))
        if subject.type == "bloom":
            os._exit(9)
        for name in WAYS:
            tell(name, Outcome("right"))

    monkeypatch.setattr("tests.conformance.run.compare", die)
    rows = run_all([Subject("bloom"), Subject("llama"), Subject("gpt2")], 1, lambda row: None)
    assert [row.verdict for row in rows] == ["crash", "right", "cannot be compared"]
    assert rows[0].outcomes["cpu"] == Outcome("crash", "the process ended with 9")


@pytest.mark.parametrize("way", ["requests", "drafts"])
def test_a_wrong_token_of_a_row_that_ends_early_is_told(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row itself is gone when the others end; `mixed` and `drafts` are compared by the same function."""
    chosen = scheduler.add_token

    def add_token(tokenizer: Any, sequence: scheduler.Sequence, token: int, finite: bool) -> None:
        wrong = sequence.key == 4 and len(sequence.output_ids) == 2
        chosen(tokenizer, sequence, token + wrong, finite)

    monkeypatch.setattr(compare, "WAYS", {way: compare.WAYS[way]})
    outcomes: list[str] = []
    for patch in (nullcontext, partial(monkeypatch.setattr, scheduler, "add_token", add_token)):
        patch()
        told: dict[str, Outcome] = {}
        compare.compare(Subject("llama"), tmp_path / str(len(outcomes)), told.__setitem__)
        outcomes.append(told[way].verdict)
    assert outcomes == ["right", "differs"]


def test_padding_that_changes_the_text_has_to_be_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "WAYS", {"cpu": compare.WAYS["cpu"]})
    for known, verdict in ((COUNTS_PADDING, "right"), (frozenset[str](), "differs")):
        monkeypatch.setattr("zinfer.engine.decoder.COUNTS_PADDING", known)
        told: dict[str, Outcome] = {}
        compare.compare(Subject("recurrent_gemma"), tmp_path / verdict, told.__setitem__)
        assert told["cpu"].verdict == verdict, told


@pytest.mark.slow  # every type of the installed transformers, in all ways
def test_every_model_gives_the_tokens_of_transformers_or_is_refused() -> None:
    from tests.conformance.__main__ import conformance

    told = conformance((), len(os.sched_getaffinity(0)))
    wrong = {name: entry["why"] for name, entry in told["types"].items() if entry["verdict"] in ("differs", "crash")}
    assert not wrong
    assert record.counts(told)["right"] >= NEEDED
