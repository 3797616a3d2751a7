"""Accuracy studies: the error is zero for an equal setting, grows with the rounding, and is large for broken
quantisation."""

import json
import math
import os
import shutil
import signal
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from transformers import AutoModelForCausalLM

from tests import Checkpoints, Patch, invoke, mentions
from tests.inline_worker import InlineWorker
from tests.running import decode, prefill
from tests.test_parity import plan_of
from zinfer.analysis.study import compared, label, show
from zinfer.engine import base
from zinfer.engine.cache import QuantizedLayer
from zinfer.generation.tokenizer_process import TokenizerProcess, windows
from zinfer.job import accuracy as study
from zinfer.job.accuracy import AccuracyStudy
from zinfer.plan.planner import Plan
from zinfer.record import study as studies
from zinfer.record.study import Deviation, Failed, Position, StudyError
from zinfer.worker.process import Client, WorkerDied
from zinfer.worker.studies import deviation
from zinfer.worker.tasks import Answer, Command, Load, LogitsCompare

TEXT = "".join(f"{number} is {number * number}, which is more than {number}. " for number in range(60))
INPUT, OUTPUT, SAMPLES = 12, 10, 6
TARGET = "zinfer.engine.stream.engine:Stream"


inline = partial(InlineWorker, TARGET)


@cache
def samples_of(directory: Path) -> list[list[int]]:
    """Pieces of the text, as the comparison takes them."""
    with TokenizerProcess(plan(directory).model) as tokenizer:
        return windows(tokenizer, TEXT, SAMPLES, INPUT + OUTPUT)[0]


@pytest.fixture(autouse=True)
def swift(monkeypatch: Patch) -> None:
    monkeypatch.setattr("zinfer.worker.probe.measure_link", lambda device: 5e9)


@pytest.fixture
def here(folder: Path, monkeypatch: Patch) -> Path:
    """The folder that commands run in, with workers in this process."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr("zinfer.worker.process.Worker", InlineWorker)
    return folder


def plan(directory: Path, batch_size: int = 5, **options: Any) -> Plan:
    return plan_of(directory, sizes=(batch_size, INPUT, OUTPUT), **options)


def ran(directory: Path, *storages: str, make_worker: Callable[[], Client] = inline) -> AccuracyStudy:
    """Compare these types of the KV cache with that of the weights."""
    settings = [plan(directory, kv_cache_dtype=storage) for storage in storages]
    compared = AccuracyStudy(plan(directory), settings, TEXT, SAMPLES, make_worker)
    compared.run()
    return compared


def failed(study: AccuracyStudy) -> list[Failed]:
    return [row for row in study.rows if isinstance(row, Failed)]


def by_setting(results: AccuracyStudy) -> dict[tuple[str, str], Deviation]:
    rows = [row for row in results.rows if isinstance(row, Deviation)]
    return {(str(dict(row.case.options).get("kv_cache_dtype", "noise")), row.along): row for row in rows}


@pytest.mark.parametrize("architecture", ["bloom", "llama"])
def test_the_error_grows_with_the_rounding(architecture: str, checkpoint: Checkpoints) -> None:
    compared_study = ran(checkpoint(architecture), "bf16", "int8")
    assert (compared_study.tokens, compared_study.logits_dtype) == (len(TEXT), "float32")
    deviations = by_setting(compared_study)
    assert len(deviations) == len(compared_study.rows) == 6
    for along in ("own", "text"):
        noise, same, int8 = (deviations[name, along] for name in ("noise", "bf16", "int8"))
        assert same.rows == int8.rows == SAMPLES
        assert noise.rows == (3 if along == "own" else 2)  # of the first batch, of 5
        assert (same.error, same.error_max, same.kl, same.kl_max, same.agreement) == (0, 0, 0, 0, 1)
        assert 0 <= noise.error_max < 1e-4
        assert noise.error_max < int8.error < 0.1
        assert 0 < int8.kl < 1
        assert 0.5 < int8.agreement <= 1
        assert int8.error < int8.error_max
    for name in ("bf16", "int8"):
        assert len(deviations[name, "own"].first_differences) == SAMPLES
        assert deviations[name, "text"].positions == SAMPLES * OUTPUT
        assert deviations[name, "text"].first_differences == ()
        assert deviations[name, "own"].perplexity is None
    text = deviations["bf16", "text"]
    assert text.perplexity == text.reference_perplexity == deviations["int8", "text"].reference_perplexity
    assert set(deviations["bf16", "own"].first_differences) == {None}


def test_a_row_that_runs_freely_leaves_the_reference_where_it_is_said_to(checkpoint: Checkpoints) -> None:
    directory = checkpoint("llama")
    rows = [row for sample in samples_of(directory) for row in (sample[:INPUT], sample[:INPUT])]
    freely = []
    for asked in (plan(directory), plan(directory, kv_cache_dtype="int8")):
        loaded = base.load(TARGET)(asked)
        made = []
        for start in range(0, len(rows), 5):
            token_ids = torch.tensor(rows[start : start + 5])
            tokens = [prefill(loaded, token_ids, torch.ones_like(token_ids), reserve=OUTPUT).argmax(-1)]
            while len(tokens) < OUTPUT:
                tokens.append(decode(loaded, tokens[-1]).argmax(-1))
            made += torch.stack(tokens, 1).tolist()
        loaded.close()
        freely.append(made[::2])
    expected = []
    for ours, theirs in zip(*freely, strict=True):
        over = next((i + 1 for i, token in enumerate(ours) if token == 2), OUTPUT)
        expected.append(next((i for i in range(over) if ours[i] != theirs[i]), None))
    assert list(sound_int8(directory).first_differences) == expected
    assert any(tokens is not None for tokens in expected)


def test_the_perplexity_is_that_of_transformers(checkpoint: Checkpoints) -> None:
    directory = checkpoint("llama")
    text = by_setting(ran(directory, "bf16"))["bf16", "text"]
    whole = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    token_ids = torch.tensor(samples_of(directory))
    with torch.inference_mode():
        logits = whole(token_ids).logits[:, INPUT - 1 : -1]
    nats = torch.nn.functional.cross_entropy(logits.flatten(0, 1), token_ids[:, INPUT:].flatten())
    assert text.perplexity == pytest.approx(nats.exp().item(), rel=1e-3)


@cache
def sound_int8(directory: Path) -> Deviation:
    return by_setting(ran(directory, "int8"))["int8", "own"]


BREAKS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "scrambled": lambda keys, values: (keys.roll(1, -1), values),
    "forgetful": lambda keys, values: (keys, values.index_fill(2, torch.arange(3), 0)),
    "wrong scale": lambda keys, values: (keys * 1.1, values),
    "not a number": lambda keys, values: (keys, values * float("nan")),
}


@pytest.mark.parametrize("broken", BREAKS)
def test_broken_quantisation_shows(broken: str, checkpoint: Checkpoints, monkeypatch: Patch) -> None:
    directory = checkpoint("llama")
    sound, update = sound_int8(directory), QuantizedLayer.update
    monkeypatch.setattr(QuantizedLayer, "update", lambda *states, **rest: BREAKS[broken](*update(*states, **rest)))
    compared_study = ran(directory, "int8")
    if broken == "not a number":
        (failure,) = failed(compared_study)
        assert (failure.status, failure.error) == ("nan_output", "the model's output is not a number")
        return
    deviations = by_setting(compared_study)["int8", "own"]
    assert deviations.error > 1.5 * sound.error
    assert deviations.kl > 1.5 * sound.kl
    if broken != "wrong scale":
        assert deviations.agreement < 0.6 < sound.agreement
        assert None not in deviations.first_differences


def test_a_failed_setting_is_reported_and_the_others_run(checkpoint: Checkpoints) -> None:
    failing = ran(checkpoint("llama"), "int9", "bf16")
    (failure,) = failed(failing)
    assert (dict(failure.case.options), failure.status) == ({"kv_cache_dtype": "int9"}, "unsupported")
    assert "choose from auto, bf16, int8" in failure.error
    assert ("bf16", "text") in by_setting(failing)


@pytest.mark.parametrize("dies_at", [1, 2])
def test_the_death_of_a_worker_is_reported(dies_at: int, checkpoint: Checkpoints) -> None:
    workers: list[Client] = []

    class Mortal(InlineWorker):
        def ask(self, request: Command[Answer]) -> Answer:
            if isinstance(request, Load) and len(workers) == dies_at:
                raise WorkerDied("oom_host", "the kernel killed the worker: host memory ran out")
            return super().ask(request)

    def make() -> Client:
        workers.append(Mortal(TARGET))
        return workers[-1]

    if dies_at == 1:
        with pytest.raises(WorkerDied, match="host memory ran out"):
            ran(checkpoint("llama"), "int8", "bf16", make_worker=make)
        return
    failing = ran(checkpoint("llama"), "int8", "bf16", make_worker=make)
    assert [failure.status for failure in failed(failing)] == ["oom_host"]
    assert ("bf16", "own") in by_setting(failing)


def test_a_rows_own_text_is_over_at_its_end_token(checkpoint: Checkpoints, tmp_path: Path) -> None:
    worker = inline()
    worker.load(plan(checkpoint("llama")))
    sample, *_ = samples_of(checkpoint("llama"))
    rows = [study.AccuracyRow(sample[:INPUT], None), study.AccuracyRow(sample[:INPUT], sample[INPUT:])]
    record = partial(study.record, worker, rows, OUTPUT, str(tmp_path / "logits"))
    free = record(frozenset())
    generated, given = free.logits.tokens
    assert (free.lengths, given) == ([OUTPUT, OUTPUT], sample[INPUT:])
    ended = record(frozenset({generated[2], given[0]}))
    assert ended.lengths == [generated.index(generated[2]) + 1, OUTPUT]
    worker.close()


def test_the_comparison_of_one_position() -> None:
    reference, logits = torch.tensor([[0.0, math.log(3)]] * 2), torch.tensor([[0.0, 0.0], [1.0, math.log(3) + 1]])
    first, second = (Position(*row) for row in deviation(reference, logits, torch.tensor([0, 1])).tolist())
    assert first.error == pytest.approx(math.sqrt(2))  # ln 3 / sqrt 2, over ln 3 / 2
    assert first.kl == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5))
    assert (first.same, second.same) == (0, 1)
    assert (first.reference_nats, first.nats) == pytest.approx((math.log(4), math.log(2)))
    assert second.kl == pytest.approx(0, abs=1e-12)  # a constant added to all logits changes no probability
    assert second.error == pytest.approx(2 / math.log(3))
    assert second.nats == pytest.approx(second.reference_nats)


def test_pieces_of_a_text_are_spread_and_begin_with_the_tokenizers_prefix(
    checkpoint: Checkpoints, tmp_path: Path
) -> None:
    with TokenizerProcess(plan(checkpoint("llama")).model) as tokenizer:
        samples, tokens = windows(tokenizer, "abcdefghijk", 3, 3)
        characters = [[chr(token + 28) for token in sample] for sample in samples]
        assert characters == [list("abc"), list("efg"), list("ijk")]
        assert tokens == 11
        assert tokenizer.facts.ends == [2]
        with pytest.raises(StudyError, match="8 tokens, too few for 3 samples of 3"):
            windows(tokenizer, "abcdefgh", 3, 3)
    folder = Path(shutil.copytree(checkpoint("llama"), tmp_path / "begins"))
    content = json.loads((folder / "tokenizer.json").read_text())
    begin = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    content["post_processor"] = {
        "type": "TemplateProcessing", "single": [begin, {"Sequence": {"id": "A", "type_id": 0}}], "pair": [],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with TokenizerProcess(plan(folder).model) as tokenizer:
        assert windows(tokenizer, "abcd", 2, 3)[0] == [[1, 69, 70], [1, 71, 72]]


study_accuracy = partial(invoke, "study", "accuracy")


def error_text(result: Result) -> str:
    return result.stderr if isinstance(result.exception, SystemExit) else str(result.exception)


AXIS = ("-O", "kv_cache_dtype=int8")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--kv-cache-dtype int8"),
        ([*AXIS, "--layers", "2"], "--layers: "),
        ([*AXIS, "--prompt-file", "missing.txt"], "--prompt-file missing.txt cannot be read: No such file"),
        ([*AXIS, "--prompt-file", "model.bin"], "model.bin is not UTF-8 text"),
        ([*AXIS, "--input-len", "99"], "exceed the 64 positions of model"),
        ([*AXIS, "--samples", "99"], f"the text has {len(TEXT):,} tokens, too few for 99 samples of 32"),
        (["-m", "bloom-tiny", *AXIS], "bloom-tiny has no weights to fetch: give a checkpoint folder"),
    ],
)
@pytest.mark.usefixtures("here")
def test_mistakes_are_one_line(words: list[str], message: str, checkpoint: Checkpoints) -> None:
    Path("text.txt").write_text(TEXT)
    Path("model").symlink_to(checkpoint("opt"))
    Path("model.bin").write_bytes(b"\xff")
    result = study_accuracy("-m", "model", "--prompt-file", "text.txt", "--input-len", 16, "--output-len", 16, *words)
    assert result.exit_code != 0
    assert message in error_text(result)
    assert not isinstance(result.exception, SystemExit) or len(result.stderr.strip().splitlines()) <= 4
    assert not list(Path().rglob("accuracy.json*"))


def no_int8(engine: Any, _option: str) -> str | None:
    return "not in int8" if engine.options.kv_cache_dtype == "int8" else None


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_some_settings_may_fail_and_random_weights_are_marked(monkeypatch: Patch) -> None:
    words = ["-m", "bloom-tiny", "--load-format", "dummy", "--samples", 2, "--input-len", 8, "--output-len", 4]
    with monkeypatch.context() as refusing:
        refusing.setattr("zinfer.engine.stream.engine.Stream._cannot_have", no_int8)
        result = study_accuracy(*words, "-O", "kv_cache_dtype=int8,bf16", "-o", "found.jsonl")
        nothing = study_accuracy(*words, *AXIS, "-o", "found.jsonl")
    assert result.exit_code == 3
    assert mentions(result.stderr, "kv_cache_dtype=int8", "unsupported", "not in int8")
    assert "RANDOM WEIGHTS" in result.stdout
    recorded = studies.last(Path("found.jsonl"), "accuracy")
    assert recorded.about.endswith("random weights")
    assert recorded.text is not None
    assert recorded.text.name.startswith("the manual of Python 3.")
    assert nothing.exit_code == 4
    assert "not written" in nothing.stderr
    assert studies.last(Path("found.jsonl"), "accuracy") == recorded
    assert study_accuracy(*words, *AXIS).exit_code == 0
    assert not list(Path("sweeps").rglob("accuracy.json*"))


@pytest.mark.usefixtures("here")
def test_the_reference_among_other_settings_is_not_compared_again(checkpoint: Checkpoints) -> None:
    words = ["-m", checkpoint("llama"), "--samples", 2, "--input-len", 8, "--output-len", 4, "-o", "found.jsonl"]
    for setting, expected in (("auto,int8", ["kv_cache_dtype=int8"]), ("auto", ["none"])):
        assert study_accuracy(*words, "--kv-cache-dtype", setting).exit_code == 0
        recorded = studies.last(Path("found.jsonl"), "accuracy")
        assert [label(recorded, case) for case in compared(recorded)] == expected


def test_an_interrupt_keeps_the_settings_that_were_compared(
    here: Path, checkpoint: Checkpoints, monkeypatch: Patch
) -> None:
    asked = 0

    class Interrupting(InlineWorker):
        def ask(self, request: Command[Answer]) -> Answer:
            nonlocal asked
            if isinstance(request, LogitsCompare):
                asked += 1
                if asked == 4:  # twice the reference, in halves, and one setting
                    os.kill(os.getpid(), signal.SIGTERM)
            return super().ask(request)

    monkeypatch.setattr("zinfer.worker.process.Worker", Interrupting)
    (scratch := here / "scratch").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    words = ["--kv-cache-dtype", "int8,bf16", "--samples", 2, "--batch-size", 4, "--input-len", 8]
    result = study_accuracy("-m", checkpoint("llama"), *words, "--output-len", 4, "-o", "found.jsonl")
    assert result.exit_code == 143
    assert "wrote found.jsonl" in result.stderr
    assert not list(scratch.iterdir())
    recorded = studies.last(Path("found.jsonl"), "accuracy")
    assert [case.options for case in compared(recorded)] == [(("kv_cache_dtype", "int8"),)]
    failures = [(row.case.options[0][1], row.status, row.error) for row in recorded.of(Failed)]
    assert failures == [("bf16", "cancelled", "SIGTERM")]


def test_the_record_is_printed_and_lies_with_the_machines_results(here: Path, checkpoint: Checkpoints) -> None:
    (here / "text.txt").write_text(TEXT)
    (here / "model").symlink_to(checkpoint("llama"))
    words = ["-m", "model", "--offload", "cpu", "--kv-cache-dtype", "int8", "--prompt-file", "text.txt"]
    result = study_accuracy(*words, "--input-len", "16", "--output-len", "8", "--samples", "4")
    assert result.exit_code == 0, result.stderr
    (written,) = here.glob("sweeps/results/*/accuracy.jsonl")
    recorded = studies.last(written, "accuracy")
    assert "kv_cache_dtype=int8" in result.stdout
    assert written.parent.name == recorded.machine
    assert mentions(recorded.about, "llama", "3 layers", "4 heads", "16", "2")
    assert (recorded.text and recorded.text.tokens, recorded.samples, recorded.asked.options) == (len(TEXT), 4, ())
    assert {(label(recorded, row.case), row.along) for row in recorded.of(Deviation)} == {
        (setting, along) for setting in ("batch 4", "kv_cache_dtype=int8") for along in ("own", "text")
    }
    assert "tokens in, 8 followed" in show(recorded).title


@pytest.mark.gpu
def test_eight_bits_on_a_gpu(checkpoint: Checkpoints, monkeypatch: Patch) -> None:
    monkeypatch.undo()
    deviations = by_setting(ran(checkpoint("llama"), "bf16", "int8"))
    assert deviations["bf16", "own"].error_max == 0
    assert 0 < deviations["int8", "own"].error < 0.1
