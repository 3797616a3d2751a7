"""A chain of kills of a batch job with a real model: the answers are those of a job that nobody killed."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from zinfer.cli import cli
from zinfer.job.batch import run as jobs
from zinfer.worker import generation
from zinfer.worker.inline import InlineWorker

Texts = dict[str, str]


class Killed(BaseException):
    """Stands for the end of the process."""


class Killable(InlineWorker):
    """Worker killed with its parent after some exchanges of a batch."""

    left: int | None = None

    def _exchange(self, message: dict[str, Any]) -> dict[str, Any]:
        answer = super()._exchange(message)
        if Killable.left is not None and message["task"].startswith("batch"):
            Killable.left -= 1
            if Killable.left < 0:
                raise Killed
        return answer


def prompts_for(path: Path, dice: random.Random, count: int) -> dict[str, str]:
    """Write requests of random lengths; return the prompts by custom_id."""
    prompts = {str(number): "".join(dice.choices("abcdef XYZ", k=dice.randint(1, 30))) for number in range(count)}
    path.write_text(
        "".join(
            json.dumps(
                {"custom_id": name, "method": "POST", "url": "/v1/completions",
                 "body": {"prompt": prompt, "max_tokens": dice.randint(4, 20), "temperature": 0}}
            ) + "\n"
            for name, prompt in prompts.items()
        )
    )  # fmt: skip
    return prompts


def texts(path: Path) -> Texts:
    answers: Texts = {}
    for record in map(json.loads, path.read_text().splitlines()):
        assert record["custom_id"] not in answers, "answered twice"
        answers[record["custom_id"]] = record["response"]["body"]["choices"][0]["text"]
    return answers


def words_of(output: str, model: Path) -> list[str]:
    return ["batch", "prompts.jsonl", "-o", output, "-m", str(model), "--dtype", "float32", "--batch-size", "4"]


def chain(output: str, model: Path, dice: random.Random, max_kills: int) -> tuple[Texts, int]:
    """Run a job that is killed up to `max_kills` times; return its answers and the number of kills."""
    kills = 0
    while True:
        Killable.left = dice.randint(2, 12) if kills < max_kills else None
        try:
            assert CliRunner().invoke(cli, words_of(output, model)).exit_code == 0
            return texts(Path(output)), kills
        except Killed:
            kills += 1


@pytest.fixture
def killable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    monkeypatch.setattr("zinfer.worker.process.Worker", Killable)
    monkeypatch.setattr(jobs, "SAVE_S", 0.0)  # every token is on disk at once
    monkeypatch.setattr(generation, "ANSWER_S", 0.0)
    monkeypatch.setattr(Killable, "left", None)
    return folder


def test_a_chain_of_kills_changes_no_answer(killable: Path, checkpoint: Callable[..., Path]) -> None:
    dice, model = random.Random(3), checkpoint("llama")
    prompts = prompts_for(Path("prompts.jsonl"), dice, 8)
    assert CliRunner().invoke(cli, words_of("whole.jsonl", model)).exit_code == 0
    answers, kills = chain("killed.jsonl", model, dice, max_kills=2)
    assert kills == 2
    assert answers == texts(Path("whole.jsonl"))
    assert answers.keys() == prompts.keys()
