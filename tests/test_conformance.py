"""Conformance record, and, if asked for, its agreement with the installed transformers."""

import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import Patch, environment
from tools.conformance import compare, record, reference, rows
from tools.conformance.compare import NOTES, WAYS, Outcome
from tools.conformance.reference import Reference
from tools.conformance.run import Row, run_all
from tools.conformance.small import Subject, cut, family, persistent_buffers, save, small_model
from zinfer.engine import EngineError
from zinfer.engine.base import Work
from zinfer.engine.stream.engine import Stream
from zinfer.generation.scheduler import ContinuousScheduler

NEEDED = 125  # types that must be right


def test_the_record_has_no_wrong_text_in_it_and_tells_nothing_of_the_machine() -> None:
    text, types, wrappers = record.RECORD.read_text(), record.counts(record.read()), record.counts(record.read(), True)
    assert not types["differs"] + types["crash"] + wrappers["differs"] + wrappers["crash"]
    assert types["right"] >= NEEDED
    assert not [word for word in ("/tmp", "/home", "/root", "/work", "/usr", "site-packages") if word in text]


def test_all_kinds_of_layers_are_kept_and_buffers_are_random_and_unlike_from_layer_to_layer() -> None:
    assert cut(["a"] * 9 + ["b"], 4) == ["a", "a", "a", "b"]
    assert cut(["a", "b"], 5) == ["a", "b", "a", "b", "a"]
    config = small_model(Subject("jamba")).config
    assert set(config.layer_types) == {"linear_attention", "full_attention"}
    assert config.num_hidden_layers >= 6
    model = small_model(Subject("deepseek_v3"))
    assert family(model) == "Mixtures of experts"
    buffers = [owner._buffers[leaf] for _, owner, leaf in persistent_buffers(model)]
    assert len(buffers) >= 5
    assert all(buffer is not None and bool(buffer.any()) for buffer in buffers)
    assert len({tuple(buffer.tolist()) for buffer in buffers if buffer is not None}) == len(buffers)


def test_the_outcome_of_each_way_is_reported(tmp_path: Path, monkeypatch: Patch) -> None:
    outcomes: dict[str, Outcome] = {}

    def run(way: compare.Way, directory: Path, expected: Reference, _scratch: Path) -> tuple[torch.Tensor | None, str]:
        errors = torch.full((4, 12), expected.tolerance / 2)
        if way.offload == "none":
            return errors, ""
        if way.packed:
            raise EngineError(f"{directory} cannot\nbe had")
        if way.prefill_tokens:
            raise ZeroDivisionError("at all")
        if way.kept:
            return None, ""
        errors[2, 3] = 2 * expected.tolerance if way.drafts else torch.inf if way.rows else torch.nan
        return errors, "it knows no padding"

    monkeypatch.setattr(compare, "run", run)
    compare.compare(Subject("llama"), tmp_path, outcomes.__setitem__)
    assert [outcomes.pop(name).why for name in NOTES] == ["Dense", "0", "1.0e-03", "it knows no padding"]
    others = {"none": "right", "rows": "crash", "packed": "refused"} | dict.fromkeys(
        ["experts", "reused"], "does not apply"
    )
    assert {name: outcome.verdict for name, outcome in outcomes.items()} == dict.fromkeys(WAYS, "differs") | others
    assert outcomes["packed"].why == "llama cannot be had"
    assert outcomes["cpu"].why == "47 of 48 logits equal, all of the first 3 steps; rows [2] by nan"
    assert outcomes["rows"].why.startswith("ZeroDivisionError: at all [tests/test_conformance.py:")
    assert Row(Subject("llama"), outcomes).verdict == "crash"


def test_a_process_that_dies_costs_its_row_only(monkeypatch: Patch) -> None:
    def die(subject: Subject, _scratch: Path, tell: compare.Tell) -> None:
        if subject.type == "gpt2":
            os._exit(8)
        tell("skipped", Outcome("right", "2"))
        tell("tolerance", Outcome("right", "1.0e-03"))
        tell("none", Outcome("right"))
        if subject.type == "bloom":
            os._exit(9)
        tell("skipped", Outcome("right", "1"))
        tell("tolerance", Outcome("right", "3.0e-03"))
        for name in WAYS:
            tell("padding", Outcome("right", "it has none" if name == "cpu" else ""))
            tell(name, Outcome("right"))

    monkeypatch.setattr("tools.conformance.run.compare", die)
    rows = run_all([Subject("bloom"), Subject("llama"), Subject("gpt2")], 1, lambda row: None)
    assert [row.verdict for row in rows] == ["crash", "right", "cannot be compared"]
    assert rows[0].outcomes["cpu"] == Outcome("crash", "the process ended with 9")
    notes = [(row.padded, row.skipped, row.tolerance) for row in rows]
    assert notes == [(True, 2, 1e-3), (False, 3, 3e-3), (True, 0, 0.0)]


@pytest.mark.parametrize(
    "way", ["requests", *(pytest.param(way, marks=pytest.mark.slow) for way in ("reused", "accelerate"))]
)
def test_a_wrong_logit_of_a_row_that_ends_early_is_told(way: str, tmp_path: Path, monkeypatch: Patch) -> None:
    """The row itself is gone when the others end. `mixed`, `drafts` and `deepspeed` take the same function."""
    monkeypatch.setattr(compare, "WAYS", {way: compare.WAYS[way]})
    outcomes: list[Outcome] = []
    for wrong in (False, True):
        with monkeypatch.context() as patch:
            if wrong:
                patch.setattr(rows._Watch, "__init__", partialmethod(_with_a_fault, rows._Watch.__init__))
            by_way: dict[str, Outcome] = {}
            compare.compare(Subject("llama"), tmp_path / str(wrong), by_way.__setitem__)
            outcomes.append(by_way[way])
    assert [outcome.verdict for outcome in outcomes] == ["right", "differs"], outcomes
    assert "rows [5] by" in outcomes[1].why
    assert outcomes[1].why.startswith("95 of 96 logits equal, all of the first 2 steps")


def _with_a_fault(watch: Any, init: Any, engine: Any, running: ContinuousScheduler, expected: Reference) -> None:
    """Change one logit of row 5's third token slightly."""
    forward = engine.forward

    def wrong(works: Sequence[Work]) -> list[torch.Tensor]:
        outputs = [logits.clone() for logits in forward(works)]
        batches = {id(batch.micro_batch): batch for batch in running.schedule.batches}
        for work, logits in zip(works, outputs, strict=True):
            for index, row in enumerate(batches[id(work.batch)].rows):
                if row is not None and row.key == 5 and len(running.sequences[5].output_ids) == 2:
                    logits[index, 0, 17] += 0.01 * logits.std()
        return outputs

    engine.forward = wrong
    init(watch, engine, running, expected)


def test_padding_that_changes_the_text_is_seen(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(compare, "WAYS", {"cpu": compare.WAYS["cpu"]})
    for wrong, verdict in ((False, "right"), (True, "differs")):
        if wrong:
            monkeypatch.setattr(Stream, "cannot_pad", lambda _engine: None)
        outcomes: dict[str, Outcome] = {}
        compare.compare(Subject("doge"), tmp_path / verdict, outcomes.__setitem__)
        assert outcomes["cpu"].verdict == verdict, outcomes
        assert (outcomes["padding"].why == "") == wrong


def test_prompts_are_left_out_for_what_transformers_alone_does(tmp_path: Path, monkeypatch: Patch) -> None:
    model = small_model(Subject("llama"))
    save(model, tmp_path)
    expected = reference.reference(type(model), tmp_path)
    assert (expected.skipped, expected.tolerance) == (0, reference.TOLERANCE)
    assert [len(row) for row in expected.prompts] == list(reference.LENGTHS)
    alone, calls = reference._alone, list[int]()

    def sensitive(*args: Any) -> Any:
        calls.append(len(args))
        tokens, logits = alone(*args)
        return tokens, logits + (len(calls) == 2) * torch.randn(logits.shape)

    monkeypatch.setattr(reference, "_alone", sensitive)
    monkeypatch.setattr(reference, "SEEDS", 2)
    second = reference.reference(type(model), tmp_path)
    assert second.skipped == 1
    assert second.prompts == reference.prompts(1)
    monkeypatch.setattr(reference, "ROUNDING", 0.5)
    with pytest.raises(reference.CannotCompare, match="other logits with weights rounded otherwise"):
        reference.reference(type(model), tmp_path)


@pytest.mark.slow  # every type of the installed transformers, in all ways
def test_every_model_gives_the_tokens_of_transformers_or_is_refused(tmp_path: Path) -> None:
    """A process of its own forks the others: a fork of this one crashes after some tests."""
    words = [sys.executable, "-m", "tools.conformance", "--output", str(tmp_path / "record.json")]
    done = subprocess.run(words, env=environment(), stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr[-2000:]
    report = record.read(tmp_path / "record.json")
    wrong = {name: entry["why"] for name, entry in report["types"].items() if entry["verdict"] in ("differs", "crash")}
    assert not wrong
    assert record.counts(report)["right"] >= NEEDED
