"""The Python API: the answers and records of the command line, by another door."""

import json
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import zinfer
from tests import PATIENCE_S, Checkpoints, Patch
from tests.command import probed
from tests.command import zinfer as command
from tests.inline_worker import InlineWorker
from tests.test_serve import Reference
from zinfer import SamplingParams as Params
from zinfer.core.errors import ZinferError
from zinfer.record.store import Store
from zinfer.worker.process import WorkerError

PROMPTS = ["Once upon a time", "ab", "etaoin shrdlu"]
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ 'x' * (more or 0) }}"
SLOW: dict[str, Any] = {"offload": "cpu", "dtype": "float32"}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: Patch) -> Path:
    probed(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("zinfer.worker.process.Worker", InlineWorker)
    monkeypatch.setattr("zinfer.plan.search.LARGEST_BATCH", 1 << 10)
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    return tmp_path


@pytest.fixture
def llm(here: Path, checkpoint: Checkpoints) -> Iterator[zinfer.LLM]:
    with zinfer.LLM(checkpoint("llama"), chat_template=here / "template.jinja", **SLOW) as model:
        yield model


def test_importing_the_package_is_light() -> None:
    script = "import sys, zinfer\nassert 'click' not in sys.modules\nassert callable(zinfer.plan)\n"
    script += "import zinfer.plan.planner\nassert callable(zinfer.plan) and zinfer.LLM\n"
    script += "assert not {'torch', 'transformers', 'pandas'} & set(sys.modules), sys.modules.keys()"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=PATIENCE_S)


def test_texts_are_those_of_transformers(llm: zinfer.LLM, checkpoint: Checkpoints) -> None:
    reference = Reference(checkpoint("llama"))
    greedy = Params(temperature=0, max_tokens=12)
    prompts: list[Any] = [*PROMPTS, reference.ids("No")]
    every = llm.generate(prompts, greedy)
    assert [output.prompt for output in every] == prompts
    for output in every:
        expected = reference.greedy(output.prompt_token_ids, 12)
        (answer,) = output.outputs
        assert (answer.token_ids, answer.text) == (expected, reference.text(expected))
        assert answer.finish_reason == ("length" if len(expected) == 12 else "stop")
    assert llm.generate(PROMPTS[0], greedy) == every[:1]
    pieces: dict[int, str] = {}
    for delta in llm.stream(PROMPTS, greedy):
        pieces[delta.prompt] = pieces.get(delta.prompt, "") + delta.text
    assert [pieces[number] for number in range(3)] == [output.outputs[0].text for output in every[:3]]
    left = llm.stream("ab", Params(temperature=0, max_tokens=500, ignore_eos=True))
    assert next(left).prompt == 0
    assert llm.generate(PROMPTS[0], greedy) == every[:1], "an iterator that was left behind changes nothing"
    with pytest.raises(ZinferError, match="another call has ended this one"):
        next(left)
    assert not llm.generate([])
    assert not [*llm.stream([])]


def test_parameters_are_those_of_a_request(llm: zinfer.LLM) -> None:
    params = [
        Params(n=3, seed=5, max_tokens=6, ignore_eos=True, logprobs=2),
        Params(logit_bias={70: 100}, temperature=0, max_tokens=4, stop_token_ids=[70], min_tokens=2),
        Params(temperature=0, max_tokens=9, stop="<"),
    ]
    drawn, biased, stopped = llm.generate(PROMPTS, params)
    assert [answer.index for answer in drawn.outputs] == [0, 1, 2]
    assert len({answer.text for answer in drawn.outputs}) == 3
    assert all(len(answer.logprobs) == 6 and len(answer.logprobs[0].top) == 2 for answer in drawn.outputs)
    assert llm.generate(PROMPTS, params)[0] == drawn
    assert (biased.outputs[0].finish_reason, len(biased.outputs[0].token_ids)) == ("stop", 2)
    assert "<" not in stopped.outputs[0].text
    assert {delta.output for delta in llm.stream("ab", params[0])} == {0, 1, 2}
    free = Params(max_tokens=20, ignore_eos=True)
    assert llm.generate("ab", free) != llm.generate("ab", free), "another seed each time"


def test_chats_are_rendered(llm: zinfer.LLM, checkpoint: Checkpoints) -> None:
    reference = Reference(checkpoint("llama"))
    greedy = Params(temperature=0, max_tokens=5, logprobs=1)
    talk = [{"role": "user", "content": "hi"}]
    (one,) = llm.chat(talk, greedy)
    longer, _ = llm.chat([talk, [*talk, *talk]], greedy, chat_template_kwargs={"more": 3})
    for output, text in ((one, "[user]hi"), (longer, "[user]hixxx")):
        assert output.prompt_token_ids == reference.tokenizer(text, add_special_tokens=False).input_ids
    assert "".join(delta.text for delta in llm.stream(talk, greedy)) == one.outputs[0].text
    assert len(one.outputs[0].logprobs) == 5


def test_mistakes_are_errors_of_a_line(llm: zinfer.LLM, checkpoint: Checkpoints) -> None:
    mixed = list[Any](["ab", [10**6]])
    wrong: dict[Callable[[], Any], str] = {
        (lambda: Params(top_p=2)): "top_p must be a number from 0 to 1",
        (lambda: Params(max_tokens=0)): "max_tokens must be a whole number",
        (lambda: llm.generate("ab", Params(stop_token_ids=[10**6]))): "stop_token_ids has token 1000000",
        (lambda: llm.generate(mixed)): "prompt has token 1000000",
        (lambda: llm.generate("ab", [Params(), Params()])): "1 prompts and 2 sampling_params",
        (lambda: llm.generate("ab", Params(max_tokens=10**6))): "exceed the model's",
        (lambda: llm.generate("")): "no tokens",
        (lambda: llm.chat([{"role": "user", "content": "a"}], chat_template_kwargs={"no": 1})): "no setting 'no'",
        (lambda: zinfer.LLM(checkpoint("llama"), offload="gpu")): "'gpu' is not one of",
        (lambda: zinfer.LLM(checkpoint("llama"), prefech=1)): "prefech",
        (lambda: zinfer.LLM(checkpoint("llama"), kv_offload="cpu,none")): "takes one value for each option",
        (lambda: zinfer.plan("bloom-176b", input_len=0)): "--input-len",
        (lambda: zinfer.sweep(checkpoint("llama"), merge=True)): "merge is for the command line",
    }  # fmt: skip
    for make, why in wrong.items():
        with pytest.raises(ZinferError, match=why):
            make()
    with pytest.raises(TypeError, match="plan: no option 'machin'; did you mean 'machine'"):
        zinfer.plan("bloom-176b", machin="x")
    assert llm.generate("ab")[0].outputs[0].text


def test_a_worker_that_fails_is_loaded_again(here: Path, checkpoint: Checkpoints, monkeypatch: Patch) -> None:
    made: list[InlineWorker] = []

    def make(*words: Any, **settings: Any) -> InlineWorker:
        made.append(InlineWorker(*words, **settings))
        return made[-1]

    monkeypatch.setattr("zinfer.worker.process.Worker", make)
    with zinfer.LLM(checkpoint("llama"), **SLOW) as llm:
        first = llm.generate("ab", greedy := Params(temperature=0))
        for error in (KeyboardInterrupt(), WorkerError("crashed", "gone")):
            with monkeypatch.context() as patch:
                patch.setattr(made[-1], "ask", Mock(side_effect=error))
                with pytest.raises(type(error)) as raised:
                    llm.generate("ab")
            assert raised.value is error
            assert llm.generate("ab", greedy) == first
        assert len(made) == 3
    assert not hasattr(made[-1].session, "engine")


def test_plans_are_those_of_the_command(here: Path) -> None:
    plans = zinfer.plan("bloom-176b", machine=["h100-80gb", "l40s"], offload="cpu", batch_size=8, calibrate=True)
    words = "plan --model bloom-176b --machine h100-80gb,l40s --offload cpu --batch-size 8 --calibrate --json"
    printed = json.loads(command(here, *words.split()).stdout)
    assert [plan.machine.name for plan in plans] == ["h100-80gb", "l40s"]
    assert [plan.expected()[1] for plan in plans] == [row["step_s"] for row in printed]
    assert all(plan.efficiency is not None for plan in plans)
    (limit,) = zinfer.plan("bloom-176b", machine="h100-80gb", offload="cpu", batch_size=8)
    assert limit.efficiency is None


def test_a_sweep_yields_each_point_once_it_is_on_disk(here: Path, checkpoint: Checkpoints) -> None:
    model, axes = checkpoint("llama"), {"engine": ["stream", "accelerate"], "offload": "cpu", "batch_size": [1, 2]}
    how: dict[str, Any] = {"input_len": 6, "output_len": 3, "repeats": 1, "output": here / "r.jsonl", **axes}
    measuring = zinfer.sweep(model, **how)
    first = next(measuring)
    assert zinfer.results("r.jsonl").points == [first]
    measuring.close()  # type: ignore[attr-defined]
    with Store(here / "r.jsonl"):
        pass  # it is free
    with pytest.raises(ZinferError, match="--resume goes on"):
        zinfer.sweep(model, **how)
    points = [*zinfer.sweep(model, **how, resume=True)]
    found = zinfer.results("r.jsonl")
    assert points == found.points
    assert [point.case.engine for point in found.points] == ["stream"] * 2 + ["accelerate"] * 2
    assert [row["batch_size"] for row in found.rows()] == [1, 2, 1, 2]
    exported = json.loads(command(here, "export", "r.jsonl", "--format", "json").stdout)
    assert [row | {"file": "r.jsonl"} for row in found.rows()] == exported
    assert not found.requests
    assert not found.rows(requests=True)
    pandas = pytest.importorskip("pandas")
    assert isinstance(found.frame(), pandas.DataFrame)


EXAMPLES = Path(__file__).parents[1] / "examples"


def run_example(name: str, monkeypatch: Patch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", [name, *words])
    runpy.run_path(str(EXAMPLES / name))


def test_the_examples_run(
    here: Path, checkpoint: Checkpoints, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(checkpoint("llama"))
    run_example("choose_machine.py", monkeypatch, "bloom-7b1")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[-2:]] == ["fastest:", "cheapest:"]
    assert lines[-2].split()[1] == "h200"
    (here / "prompts.txt").write_text("Once upon\n\nab\n")
    run_example("answer_prompts.py", monkeypatch, model, "prompts.txt")
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [answer["prompt"] for answer in answers] == ["Once upon", "ab"]
    assert all(answer["answer"] for answer in answers)
    run_example("compare_engines.py", monkeypatch, model, "curve.svg")
    assert {point.case.engine for point in zinfer.results("curve.jsonl").points} == {"stream", "accelerate"}
    assert "stream" in (here / "curve.svg").read_text()


def test_the_notebook_runs(here: Path, checkpoint: Checkpoints, monkeypatch: Patch) -> None:
    """Each cell of code, in its order."""
    monkeypatch.setenv("MODEL", str(checkpoint("llama")))
    book = json.loads((EXAMPLES / "zinfer.ipynb").read_text())
    assert (book["nbformat"], {cell["cell_type"] for cell in book["cells"]}) == (4, {"code", "markdown"})
    names: dict[str, Any] = {}
    for cell in book["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            exec("".join(cell["source"]), names)
    assert len(names["rows"]) == 6
    assert (here / "notebook.svg").stat().st_size > 1000
