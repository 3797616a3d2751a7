"""`zinfer run` streams text in prompt order, and keeps it when interrupted."""

import json
import os
import random
import signal
from itertools import groupby
from typing import Any, Literal

import pytest
from click.testing import CliRunner

from tests import Checkpoints, mentions
from tests.inline_worker import InlineWorker
from zinfer.cli import cli
from zinfer.commands import run as run_side
from zinfer.commands.run import Answers
from zinfer.core.request import Update
from zinfer.generation.scheduler import add_token
from zinfer.generation.sequence import Sequence
from zinfer.worker.tasks import BatchStep, BatchStepped

PROMPTS = ["-p", "Once upon", "-p", "ab"]


def words(checkpoint: Checkpoints, *more: str) -> list[str]:
    return ["run", "-m", str(checkpoint("llama")), "--offload", "cpu", "--output-len", "9", "--ignore-eos", *more]


@pytest.fixture
def one_pass_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zinfer.worker.process.Worker", InlineWorker)
    monkeypatch.setattr(run_side, "STREAM_S", 0.0)


@pytest.mark.usefixtures("one_pass_a_step")
def test_text_comes_in_pieces_that_make_the_whole(checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    add = Answers.add

    def watched(self: Answers, step: BatchStepped) -> None:
        add(self, step)
        shown.extend(row.delta for row in step.rows if row.key == 0)

    monkeypatch.setattr(Answers, "add", watched)
    whole = CliRunner().invoke(cli, words(checkpoint, *PROMPTS, "--json"))
    assert whole.exit_code == 0, whole.output
    answers = json.loads(whole.stdout)
    facts = [(answer["prompt"], answer["finish_reason"], len(answer["output_ids"])) for answer in answers]
    assert facts == [("Once upon", "length", 9), ("ab", "length", 9)]
    assert sum(map(bool, shown)) > 3
    assert "".join(shown) == answers[0]["output_text"]
    plain = CliRunner().invoke(cli, words(checkpoint, *PROMPTS))
    assert plain.exit_code == 0, plain.output
    assert plain.stdout == "".join(answer["prompt"] + answer["output_text"] + "\n" for answer in answers)
    assert mentions(plain.stderr, "18 tokens in", "tok/s")


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.usefixtures("one_pass_a_step")
def test_an_interrupt_keeps_the_text_so_far(
    as_json: bool, checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = json.loads(CliRunner().invoke(cli, words(checkpoint, "-p", "Once upon", "--json")).stdout)[0]
    ask, count = InlineWorker.ask, 0

    def interrupted(self: InlineWorker, request: Any) -> Any:
        nonlocal count
        count += isinstance(request, BatchStep)
        if count == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return ask(self, request)

    monkeypatch.setattr(InlineWorker, "ask", interrupted)
    result = CliRunner().invoke(cli, words(checkpoint, "-p", "Once upon", *["--json"] * as_json))
    assert result.exit_code == 130, result.output
    assert count == 5
    assert mentions(result.stderr, "interrupted", "kept")
    if as_json:
        (answer,) = json.loads(result.stdout)
        assert answer["finish_reason"] == "interrupted"
        assert answer["output_ids"] == whole["output_ids"][:5]
        assert whole["output_text"].startswith(answer["output_text"])
    else:
        assert ("Once upon" + whole["output_text"]).startswith(result.stdout.rstrip("\n"))
        assert len(result.stdout) > len("Once upon\n")


def test_answers_are_shown_in_the_order_of_their_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    answers = Answers(["a", "b", "c"], [1, 1, 1], as_json=False)

    def step(number: int, text: str, whole: str = "") -> str:
        reason: Literal["length"] | None = "length" if whole else None
        row = Update(key=number, tokens=[1], delta=text, finish_reason=reason, text=whole)
        answers.add(BatchStepped(rows=[row], seconds=1.0, passes=1))
        return capsys.readouterr().out

    assert step(1, "2") == ""
    assert step(0, "1") == "a1"
    assert step(1, "2", "22") == ""
    assert step(0, "1") == "1"
    assert step(0, "", "11!") == "!\nb22\n"
    answers.end()
    assert capsys.readouterr().out == ""
    assert (answers.tokens, answers.seconds) == (5, 5.0)


def test_prompts_and_generation_have_rates_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    """Two of three rows run at once. The third one begins when the first has ended."""
    answers = Answers(["a", "b", "c"], [10, 20, 30], as_json=True)

    def step(seconds: float, waiting: int, *keys: int, ending: bool = False) -> None:
        reason: Literal["stop"] | None = "stop" if ending else None
        rows = [Update(key=key, tokens=[1], finish_reason=reason) for key in keys]
        answers.add(BatchStepped(rows=rows, seconds=seconds, passes=1, waiting=waiting))

    step(1.0, 1, 0, 1)
    assert not answers.all_begun
    step(0.5, 1, 0, 1)
    step(0.5, 1, 0, ending=True)
    step(2.0, 0, 1, 2)
    assert answers.all_begun
    step(1.0, 0, 1, 2, ending=True)
    assert mentions(answers.summary(), "9", "5 s", "1.8 tok/s", "20 tok/s", "2.5 tok/s", "1 s")
    answers.end()
    shown = json.loads(capsys.readouterr().out)
    assert [answer["ttft_s"] for answer in shown] == [1.0, 1.0, 4.0]
    assert [answer["prompt_tok_s"] for answer in shown] == [10.0, 20.0, 7.5]
    assert [answer["decode_tok_s"] for answer in shown] == [2.0, 0.75, 1.0]


class Bytes:
    def decode(self, ids: list[int], before: Any = ()) -> str:
        return bytes(ids).decode(errors="replace")


class Fallback:
    """Adjacent bytes become characters only together, like `ByteFallback`."""

    def decode(self, ids: list[int], before: Any = ()) -> str:
        runs = [(kind, [*run]) for kind, run in groupby(ids, lambda token_id: token_id < 256)]
        return "".join(self._bytes(bytes(run)) if kind else "".join(map(chr, run)) for kind, run in runs)

    def _bytes(self, run: bytes) -> str:
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(run)


@pytest.mark.parametrize(
    ("tokenizer", "tokens", "texts"),
    [
        (Bytes(), [*"aé b".encode(), 0xC3], ["a", "", "é", "", " b", ""]),
        (Fallback(), [*"éà".encode(), 0xFF, 0x3B1, 0x3B2], ["", "é", "", "à", "", "\ufffd" * 5 + "α", "β"]),
    ],
)
def test_pieces_wait_for_whole_characters(tokenizer: Any, tokens: list[int], texts: list[str]) -> None:
    """They go on where a tokenizer takes characters back. They end with what is left of one."""
    sequence, shown = Sequence([1], 9), []
    for token in tokens:
        sequence.output_ids.append(token)
        shown.append(sequence.new_text(tokenizer))
    assert shown == texts
    sequence.finish_reason, sequence.text = "length", tokenizer.decode(tokens)
    assert sequence.new_text(tokenizer) == ("\ufffd" if tokens[-1] == 0xC3 else "")


class Cleaned:
    """Words that clean spaces up as they are joined; counts the tokens that it decodes."""

    ends: frozenset[int] = frozenset()

    def __init__(self, words: list[str]) -> None:
        self.words, self.decoded = words, 0

    def decode(self, ids: list[int], before: Any = ()) -> str:
        self.decoded += len(ids)
        text = "".join(self.words[number] for number in ids)
        return text.replace(" .", ".").replace(" ,", ",").replace(" n't", "n't")


@pytest.mark.parametrize("stops", [(), ("the en", "they"), ("\n\n",)])
def test_pieces_of_a_long_text_are_its_text_up_to_a_stop(stops: tuple[str, ...]) -> None:
    """Spaces are cleaned up as tokenizers of words do; long texts are decoded from their last tokens on."""
    dice = random.Random(3)
    words = [dice.choice(["the", " e", " en", "then", " .", " ,", " n't", "é", "\n", " "]) for _ in range(400)]
    tokenizer, sequence, streamed = Cleaned(words), Sequence([1], 400, stop=stops), ""
    for number in range(400):
        sequence.output_ids.append(number)
        whole = tokenizer.decode(sequence.output_ids)
        ends = [index for stop in stops if (index := whole.find(stop)) >= 0]
        if ends or number == 399:
            sequence.finish_reason, sequence.text = "stop", whole[: min(ends)] if ends else whole
        before, tokenizer.decoded = tokenizer.decoded, 0
        streamed += sequence.new_text(tokenizer)  # type: ignore[arg-type]
        assert tokenizer.decoded <= 2 * (16 + 16) + 16
        tokenizer.decoded += before
        if sequence.ended:
            break
        assert whole.startswith(streamed)
    assert streamed == sequence.text
    assert bool(stops) == (len(sequence.output_ids) < 400)


@pytest.mark.parametrize("seed", range(20))
def test_a_sequence_ends_with_the_token_that_completes_a_stop(seed: int) -> None:
    """Stops across tokens, within tokens, and after a false start."""
    dice = random.Random(seed)
    tokenizer = Cleaned([dice.choice(["ab", "a", "b", "aab", " ", " .", ".", " n't", "é"]) for _ in range(300)])
    whole = tokenizer.decode(list(range(300)))
    stops = [whole[start : start + dice.randint(1, 9)] for start in dice.sample(range(100, 280), 2)]
    stops.append("aaaab" * 30)
    sequence = Sequence([], 300, stop=tuple(stops), ignore_eos=True)
    for number in range(300):
        add_token(tokenizer, sequence, number, True)  # type: ignore[arg-type]
        text = tokenizer.decode(list(range(number + 1)))
        places = [index for stop in stops if (index := text.find(stop)) >= 0]
        assert sequence.ended == bool(places), number
        if places:
            assert (sequence.finish_reason, sequence.text) == ("stop", text[: min(places)])
            return
    pytest.fail("no stop was in the text")


def test_looking_for_a_stop_takes_as_long_whatever_its_length() -> None:
    tokenizer = Cleaned(["ab"] * 600)
    counts = {}
    for length in (1, 1000):
        sequence = Sequence([], 600, stop=("x" * length,) * 16, ignore_eos=True)
        before = tokenizer.decoded
        for number in range(599):
            add_token(tokenizer, sequence, number, True)  # type: ignore[arg-type]
        counts[length] = tokenizer.decoded - before
    assert counts[1] == counts[1000] < 599 * 40
