"""Chains of kills of a batch job with a real model: the answers are those of a job that nobody killed.

In float32 they are the same. In 16 bits a row that continues in another batch, or whose tokens so far are prefilled
again, has logits that are rounded differently; where the best two are closer than that, the other one may be chosen. It
takes no kill for that: how rows are packed depends on measured times.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests import PATIENCE_S, environment
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


def words_of(output: str, model: Path, dtype: str) -> list[str]:
    return ["batch", "prompts.jsonl", "-o", output, "-m", str(model), "--dtype", dtype, "--batch-size", "8"]


def chain(output: str, model: Path, dtype: str, dice: random.Random, max_kills: int) -> tuple[Texts, int]:
    """Run a job that is killed up to `most` times; return its answers and the number of kills."""
    kills = 0
    while True:
        Killable.left = dice.randint(2, 12) if kills < max_kills else None
        try:
            assert CliRunner().invoke(cli, words_of(output, model, dtype)).exit_code == 0
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


@pytest.mark.parametrize(
    ("dtype", "count", "max_kills"), [("float32", 12, 4), pytest.param("bfloat16", 40, 30, marks=pytest.mark.slow)]
)
def test_a_chain_of_kills_changes_no_answer_but_near_ties_of_16_bits(
    killable: Path, checkpoint: Callable[..., Path], dtype: str, count: int, max_kills: int
) -> None:
    dice, model = random.Random(3), checkpoint("llama")
    prompts = prompts_for(Path("prompts.jsonl"), dice, count)
    assert CliRunner().invoke(cli, words_of("whole.jsonl", model, dtype)).exit_code == 0
    whole = texts(Path("whole.jsonl"))
    killed, kills = chain("killed.jsonl", model, dtype, dice, max_kills)
    assert kills >= 4
    assert killed.keys() == whole.keys() == prompts.keys()
    differing = {name for name in whole if whole[name] != killed[name]}
    if dtype == "float32":
        assert not differing
    for name in differing:
        gap, noise = near_tie(model, prompts[name], whole[name], killed[name])
        assert gap <= 2 * noise, f"{prompts[name]!r}: {whole[name]!r} and {killed[name]!r}"


def near_tie(model: Path, prompt: str, answer: str, other: str) -> tuple[float, float]:
    """Return the logit gap where two answers differ, and bf16's error. The gap is between the first differing tokens,
    in float32; the error is the largest of a logit there.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    coarse, end = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16), tokenizer.eos_token_id
    asked, unseen = tokenizer(prompt).input_ids, {*tokenizer.all_special_ids} - {end}

    def ids_of(text: str) -> list[int]:
        """Return the tokens of an answer; those that have no text are the most likely ones where they were."""
        ids: list[int] = []
        for token in [tokenizer.vocab[word] for word in re.findall(r"<\d+>|.", text)]:
            while len(ids) < 30:
                with torch.no_grad():
                    top = int(coarse(torch.tensor([asked + ids])).logits[0, -1].argmax())
                if top == token or top not in unseen:
                    break
                ids.append(top)
            ids.append(token)
        return ids

    first, second = ids_of(answer), ids_of(other)
    position = next(
        (i for i, pair in enumerate(zip(first, second, strict=False)) if len({*pair}) > 1), min(len(first), len(second))
    )
    tokens = [(ids[position] if position < len(ids) else end) for ids in (first, second)]
    context = torch.tensor([asked + first[:position]])
    with torch.no_grad():
        rounded = coarse(context).logits[0, -1].float()
        exact = coarse.float()(context).logits[0, -1]
    return abs(float(exact[tokens[0]] - exact[tokens[1]])), float((rounded - exact).abs().max())


@pytest.mark.slow
def test_real_kills_change_no_answer(folder: Path, checkpoint: Callable[..., Path]) -> None:
    dice, model = random.Random(5), checkpoint("llama")
    prompts = prompts_for(folder / "prompts.jsonl", dice, 12)

    def start(output: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "zinfer", *words_of(output, model, "float32")]
        return subprocess.Popen(command, cwd=folder, env=environment(HF_HUB_OFFLINE="1"), stderr=subprocess.DEVNULL)

    assert start("whole.jsonl").wait(timeout=PATIENCE_S) == 0
    output, kills = folder / "killed.jsonl", 0
    while True:
        size = output.stat().st_size if output.exists() else 0
        process, deadline = start(output.name), time.monotonic() + PATIENCE_S
        while process.poll() is None and time.monotonic() < deadline and kills < 4:
            if output.exists() and output.stat().st_size > size:
                os.kill(process.pid, signal.SIGKILL)
                kills += 1
                break
        if process.wait(timeout=PATIENCE_S) == 0:
            break
    assert texts(output) == texts(folder / "whole.jsonl")
    assert texts(output).keys() == prompts.keys()
