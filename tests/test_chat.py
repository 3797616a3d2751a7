"""Command `zinfer run --chat`: the same tokens as a model that computes every turn anew, on a terminal and in a
pipe."""

import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests import PATIENCE_S, Checkpoints, Patch, environment, mentions, structured
from tests.command import zinfer
from tests.inline_worker import InlineWorker
from tests.test_dialogue import EXTENDING, TRIMMING
from tests.test_parity import load
from zinfer.checkpoint.resolve import from_directory
from zinfer.checkpoint.tokenizer_files import ChatTemplate, chat_template
from zinfer.commands import run as terminal
from zinfer.commands.run import Dialogue
from zinfer.core.case import Workload
from zinfer.core.model import ModelError, ModelSpec
from zinfer.core.request import Update
from zinfer.engine.base import Engine
from zinfer.generation.tokenizer_process import TokenizerProcess
from zinfer.job.openai import ServerLimits, read_body
from zinfer.worker.tasks import Answer, BatchStart, BatchStep, Command

TURNS = ["Hello there", "And again", "third"]


class Inline(InlineWorker):
    """A worker in this process; `on_token` hears how many tokens after the first ones were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.on_token: Callable[[int], None] = lambda _count: None
        self.tokens = 0

    def ask(self, request: Command[Answer]) -> Answer:
        if isinstance(request, BatchStep) and not request.requests and not request.drop:
            self.tokens += 1
            self.on_token(self.tokens)
        return super().ask(request)


@pytest.fixture(scope="module")
def engine(checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    loaded = load("stream", checkpoint("llama"), "cpu", tmp_path_factory.mktemp("engine"))
    yield loaded
    loaded.close()


def opening() -> BatchStart:
    load = Workload(batch_size=1, input_len=32, output_len=10)
    return BatchStart(load=load, rows=1, arrivals=True, cache_size=1 << 30)


@cache
def tokenizer_of(spec: str, template: str | None) -> TokenizerProcess:
    """A tokenizer for all tests of this file."""
    return TokenizerProcess(ModelSpec.model_validate_json(spec), ChatTemplate(template))


@pytest.fixture(scope="module", autouse=True)
def closed() -> Iterator[None]:
    yield
    tokenizer_of.cache_clear()


def dialogue_for(worker: Inline, template: str | None = None, system: str | None = None) -> Dialogue:
    return Dialogue(tokenizer_of(worker.session.plan.model.model_dump_json(), template), system)


def talk(
    worker: Inline,
    capsys: pytest.CaptureFixture[str],
    turns: list[str] | None = None,
    dialogue: Dialogue | None = None,
    ignore_eos: bool = True,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the answers to `TURNS` as JSON, and the other output."""
    messages: list[str] = []
    dialogue = dialogue or dialogue_for(worker)
    body = {"messages": [{"role": "user", "content": ""}], "max_tokens": 10, "temperature": 0, "ignore_eos": ignore_eos}
    asked = read_body(body | {"stream": True}, True, ServerLimits(worker.session.plan.model.vocab_size, 1))
    positions = worker.session.plan.model.max_position
    terminal.talk(worker, dialogue, turns or TURNS, opening(), asked, positions, messages.append, as_json=True)
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()], messages


@pytest.mark.parametrize("template", [None, EXTENDING, TRIMMING])
def test_answers_are_those_of_transformers(
    template: str | None, engine: Engine, checkpoint: Checkpoints, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = Inline.around(engine)
    directory = checkpoint("llama")
    answers, messages = talk(worker, capsys, dialogue=dialogue_for(worker, template, "Sys"))
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    tokenizer, dialogue = AutoTokenizer.from_pretrained(directory), dialogue_for(worker, template, "Sys")
    for turn, answer in zip(TURNS, answers, strict=True):
        ids = torch.tensor([dialogue.ask(turn)])
        ones = torch.ones_like(ids)
        output = model.generate(ids, attention_mask=ones, max_new_tokens=10, do_sample=False, pad_token_id=0)
        expected = output[0, ids.shape[1] :].tolist()
        assert answer["output_ids"] == expected
        assert answer["output_text"] == tokenizer.decode(expected, skip_special_tokens=True)
        dialogue.answered(answer["output_text"])
        assert answer["reloaded_tokens"] + answer["computed_tokens"] == ids.shape[1]
        assert answer["finish_reason"] == "length"
    assert answers[0]["reloaded_tokens"] == 0
    assert answers[1]["reloaded_tokens"] >= answers[0]["computed_tokens"]
    assert answers[2]["reloaded_tokens"] >= answers[1]["reloaded_tokens"] + answers[1]["computed_tokens"]
    assert len(messages) == (4 if template is None else 3)
    assert re.search(r"\b0 tokens reloaded, \d+ computed: TTFT .*s, .*[\d,.]+ tok/s", messages[-3])
    assert ("no chat template" in messages[0]) == (template is None)


def test_the_text_of_an_answer_is_that_of_its_end() -> None:
    """Pieces keep characters that a tokenizer took back afterwards; the next turn needs the text without them."""
    answer = terminal.Answer("", 1)
    answer.add(Update(key=0, tokens=[1], delta="a?"), 0.5)
    answer.add(Update(key=0, tokens=[2], delta="c", text="abc", finish_reason="length"), 1.0)
    assert (answer.text, answer.output_ids, answer.ttft_s, answer.decode_tok_s) == ("abc", [1, 2], 0.5, 2.0)


def test_one_of_several_templates_must_be_chosen(checkpoint: Checkpoints, tmp_path: Path) -> None:
    model = Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))
    (folder := model / "additional_chat_templates").mkdir()
    (folder / "rag.jinja").write_text("{{ messages[0].content }}")
    spec = from_directory(model)
    with TokenizerProcess(spec) as tokenizer, pytest.raises(ModelError, match=r"are rag, .*--chat-template"):
        Dialogue(tokenizer)
    with TokenizerProcess(spec, chat_template(model, "rag")) as tokenizer:
        assert Dialogue(tokenizer).ask("ab") == [69, 70]


def test_an_answer_ends_at_the_end_token(
    engine: Engine, capsys: pytest.CaptureFixture[str], monkeypatch: Patch
) -> None:
    free, _ = talk(Inline.around(engine), capsys)
    end = free[0]["output_ids"][4]
    length = free[0]["output_ids"].index(end)
    monkeypatch.setattr("zinfer.checkpoint.tokenizer_files.end_tokens", lambda *_: [end])
    ended, _ = talk(Inline.around(engine), capsys, turns=TURNS[:2], ignore_eos=False)
    assert ended[0]["output_ids"] == free[0]["output_ids"][:length]
    assert ended[0]["finish_reason"] == "stop"
    assert ended[1]["reloaded_tokens"] >= ended[0]["computed_tokens"]


def test_ctrl_c_ends_the_answer_and_a_second_one_the_program(
    engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = Inline.around(engine)
    worker.on_token = lambda count: os.kill(os.getpid(), signal.SIGINT) if count == 3 else None
    answers, _ = talk(worker, capsys, turns=TURNS[:2])
    assert [answer["finish_reason"] for answer in answers] == ["interrupted", "length"]
    assert len(answers[0]["output_ids"]) == 4
    assert answers[1]["reloaded_tokens"] == answers[0]["computed_tokens"] + 3

    def twice(_count: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    worker.on_token = twice
    with pytest.raises(KeyboardInterrupt):
        talk(worker, capsys)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_conversation_ends_where_positions_do(checkpoint: Checkpoints, capsys: pytest.CaptureFixture[str]) -> None:
    engine = load("stream", checkpoint("opt"), "none")
    with pytest.raises(ModelError, match=r"\d+ tokens.* 64 positions"):
        talk(Inline.around(engine), capsys, turns=["a" * 20, "b" * 20, "c" * 14, "d"])
    lengths = [len(json.loads(line)["output_ids"]) for line in capsys.readouterr().out.splitlines()]
    assert lengths == [10, 10], "as many as there is room for, and no more"


def test_an_engine_without_reuse_says_so_and_answers(
    engine: Engine, checkpoint: Checkpoints, capsys: pytest.CaptureFixture[str]
) -> None:
    other = load("stream", checkpoint("llama"), "cpu", kv_offload="cpu")
    answers, messages = talk(Inline.around(other), capsys)
    other.close()
    assert mentions(messages[1], "whole", "kv_offload=cpu")
    assert [answer["reloaded_tokens"] for answer in answers] == [0, 0, 0]
    kept, _ = talk(Inline.around(engine), capsys)
    assert [answer["output_ids"] for answer in answers] == [answer["output_ids"] for answer in kept]


def test_options_reach_the_template(folder: Path, checkpoint: Checkpoints) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ 'x' * (length or 0) }}"
    (folder / "template.jinja").write_text(template)
    words = ["run", "-m", str(checkpoint("llama")), "--chat", "--json", "--output-len", "2", "--ignore-eos"]
    words += ["--chat-template", "template.jinja", "-p", "ab"]
    counts = []
    for more in ([], ["--chat-template-kwargs", '{"length": 50}'], ["--system-prompt", "Be brief."]):
        result = zinfer(folder, *words, *more)
        assert result.returncode == 0, result.stderr
        counts.append(json.loads(result.stdout)["computed_tokens"])
    assert counts[0] < counts[2]
    assert counts[1] - counts[0] >= 10
    for wrong, why in (("[1]", "write an object"), ("{", "is damaged"), ('{"len": 1}', "no setting 'len'")):
        refused = zinfer(folder, *words, "--chat-template-kwargs", wrong)
        assert (refused.returncode, why in refused.stderr) == (2, True), refused.stderr


@pytest.mark.parametrize("template", ["harmony", "thinks"])
def test_thoughts_are_no_part_of_the_answer(folder: Path, template: str) -> None:
    """As in answers of the server: channels and marks are taken away, and thoughts go elsewhere."""
    directory = structured.save(folder / "model", template)
    words = ["run", "-m", str(directory), "--offload", "cpu", "--chat", "--max-tokens", "30", "-p", "hi", "-p", "ho"]
    words += ["--structured-outputs", '{"choice": ["yes"]}']
    if template == "thinks":
        words += ["--chat-template-kwargs", '{"open": true}', "--seed", "3", "--temperature", "1"]
    else:  # a random model does not end a thought
        vocabulary = AutoTokenizer.from_pretrained(directory).get_vocab()
        bias = [f"{token}=-100" for text, token in vocabulary.items() if "analysis".startswith(text)]
        words += ["--logit-bias", ",".join(bias)]
    shown, listed = zinfer(folder, *words), zinfer(folder, *words, "--json")
    assert (shown.returncode, listed.returncode) == (0, 0), shown.stderr + listed.stderr
    answers = [json.loads(line) for line in listed.stdout.splitlines()]
    assert shown.stdout == "".join(f"{answer['output_text']}\n" for answer in answers)
    thinks = template == "thinks"
    found = [(answer["output_text"], answer["reasoning_content"] != "") for answer in answers]
    assert found == [("", True) if thinks else ("yes", False)] * 2
    assert shown.stderr.count("[thought: ") == 2 * thinks


def test_a_pipe_is_a_conversation(
    folder: Path, engine: Engine, checkpoint: Checkpoints, capsys: pytest.CaptureFixture[str]
) -> None:
    earlier, _ = talk(Inline.around(engine), capsys)
    words = ["run", "-m", str(checkpoint("llama")), "--engine", "accelerate", "--offload", "cpu", "--chat", "--json"]
    result = zinfer(folder, *words, "--output-len", "10", "--ignore-eos", stdin="Hello there\n\nAnd again\nthird\n")
    assert result.returncode == 0, result.stderr
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    assert [answer["output_ids"] for answer in answers] == [answer["output_ids"] for answer in earlier]
    assert [(answer["turn"], answer["prompt"]) for answer in answers] == list(enumerate(TURNS, start=1))
    assert result.stderr.count("tokens reloaded, ") == 3


def test_a_terminal(folder: Path, checkpoint: Checkpoints) -> None:
    master, slave = pty.openpty()
    words = ["run", "-m", str(checkpoint("llama")), "--offload", "none", "--chat", "--output-len", "1900"]
    process = subprocess.Popen(
        [sys.executable, "-m", "zinfer", *words, "--ignore-eos"], cwd=folder, stdin=slave, stdout=slave,
        stderr=slave, env=environment(TERM="dumb"), start_new_session=True,
    )  # fmt: skip
    os.close(slave)
    screen = ""

    def until(pattern: str) -> None:
        nonlocal screen
        deadline = time.monotonic() + PATIENCE_S
        while not re.search(pattern, screen):
            ready, _, _ = select.select([master], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, screen
            screen += os.read(master, 4096).decode(errors="replace")

    until(r"> $")
    for turn, reloaded in (("Hello", "0"), ("More", r"[1-9]\d*")):
        os.write(master, f"{turn}\n".encode())
        until(rf"{turn}\r\n.{{20}}")
        process.send_signal(signal.SIGINT)
        until(rf"\[{reloaded} tokens reloaded, [\d,]+ computed.*tok/s\]\s+> $")
    process.send_signal(signal.SIGINT)  # meant for the answer, perhaps
    until(r"ctrl-D, or ctrl-C again, .*\s+> $")
    os.write(master, b"\x04")
    assert process.wait(timeout=PATIENCE_S) == 0
    os.close(master)
    assert "Traceback" not in screen
