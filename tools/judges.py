"""Judges that others made: harness, LoadGen, LangChain, LiteLLM, openai-harmony (extra `judges`)."""

import array
import json
import queue
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from importlib.util import find_spec
from operator import add
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import torch
from pydantic import BaseModel, ConfigDict
from tokenizers import Tokenizer as Fast
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from tests import PATIENCE_S, environment, structured
from tests.inline_worker import InlineWorker
from tests.serving import NAME, Server, serving
from tests.smollm2 import make as make_smollm2
from tests.test_continuous import LOAD
from tests.test_parity import load
from tests.test_serve import Reference, served_plan
from tests.test_serve_command import process
from zinfer.core.request import Sampling
from zinfer.engine.base import Engine
from zinfer.engine.stream.engine import Stream
from zinfer.generation import sequence
from zinfer.generation.schedule import largest_load
from zinfer.generation.scheduler import ContinuousScheduler
from zinfer.generation.tokenizer import Tokenizer
from zinfer.generation.tokenizer_process import TokenizerProcess
from zinfer.job.structure import Call, Form, Parsed, Parser, form_of, grammar, json_schema

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow
Checkpoints = Callable[..., Path]
Docs = list[dict[str, Any]]
has_harness = pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs lm-eval[api]")
has_gguf = pytest.mark.skipif(find_spec("gguf") is None, reason="needs gguf")


# lm-evaluation-harness


class Judged(NamedTuple):
    """Findings of the harness: scores by task and metric, and the model's answers by task and document."""

    scores: dict[str, dict[str, float]]
    answers: dict[str, dict[int, list[Any]]]


def judge(folder: Path, tasks: Sequence[str], model: str, arguments: str, *more: str) -> Judged:
    """Run the harness over tasks of `folder` in its own process. `arguments` are those of its `model`."""
    out = folder / model
    words = ["--model", model, "--model_args", arguments, "--include_path", str(folder / "tasks"), "--tasks",
             ",".join(tasks), "--output_path", str(out), "--log_samples", *more]  # fmt: skip
    settings = environment(HF_HUB_OFFLINE="1", HF_HOME=str(folder / "hf"), TQDM_DISABLE="1")
    done = subprocess.run(
        [sys.executable, "-m", "lm_eval", *words], cwd=folder, env=settings, capture_output=True, text=True,
        timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    (file,) = out.glob("*/results_*.json")
    scores = {
        task: {
            name: value for name, value in metrics.items() if isinstance(value, int | float) and "stderr" not in name
        }
        for task, metrics in json.loads(file.read_text())["results"].items()
    }
    answers: dict[str, dict[int, list[Any]]] = {}
    for task in tasks:
        (file,) = out.glob(f"*/samples_{task}_*.jsonl")
        lines = map(json.loads, file.read_text().splitlines())
        answers[task] = {sample["doc_id"]: [answer for (answer,) in sample["resps"]] for sample in lines}
    return Judged(scores, answers)


def write_tasks(folder: Path, docs: Docs, until: Sequence[str], texts: Docs | None = None) -> list[str]:
    """Write a task of each kind over `docs` and `texts`. Return their names."""
    (folder / "tasks").mkdir()

    def source(name: str, docs: Docs) -> dict[str, Any]:
        path = folder / f"{name}.json"
        path.write_text("\n".join(map(json.dumps, docs)))
        return {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(path)}}, "test_split": "test"}

    asked = source("docs", docs) | {"doc_to_text": "{{text}}", "target_delimiter": ""}
    read = source("texts", texts or docs) | {"doc_to_text": "", "doc_to_target": "{{text}}"}
    target = {"doc_to_target": "{{target}}"}
    match = {"metric": "exact_match", "ignore_case": True, "ignore_punctuation": True}
    tasks = {
        "choice": asked | {"output_type": "multiple_choice", "doc_to_choice": "choices", "doc_to_target": "label",
                           "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}]},
        "score": asked | target | {"output_type": "loglikelihood",
                                   "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}]},
        "write": asked | target | {"output_type": "generate_until", "metric_list": [match],
                                   "generation_kwargs": {"until": list(until), "max_gen_toks": 24, "do_sample": False}},
        "read": read | {"output_type": "loglikelihood_rolling",
                        "metric_list": [{"metric": "byte_perplexity"}, {"metric": "bits_per_byte"}]},
    }  # fmt: skip
    for name, task in tasks.items():  # YAML, of which JSON is a part
        text = json.dumps({"task": name} | task, ensure_ascii=False)
        (folder / "tasks" / f"{name}.yaml").write_text(text)
    return list(tasks)


def judge_both(folder: Path, directory: Path, tasks: Sequence[str]) -> tuple[Judged, Judged]:
    """Judge a checkpoint run by `transformers` and by `zinfer serve`."""
    hf = judge(folder, tasks, "hf", f"pretrained={directory},dtype=float32", "--device", "cpu", "--batch_size", "4")
    with process(folder, "-m", str(directory), "--offload", "cpu") as server:
        where = f"base_url=http://127.0.0.1:{server.port}/v1/completions"
        arguments = f"model={directory},{where},num_concurrent=4,max_retries=1"
        ours = judge(folder, tasks, "local-completions", arguments, "--batch_size", "8")
    return hf, ours


def check_equal(hf: Judged, ours: Judged) -> None:
    """Compare scores, texts, and log-probabilities."""
    for task, answers in hf.answers.items():
        assert ours.scores[task] == pytest.approx(hf.scores[task], rel=1e-4), task
        if task == "write":
            assert ours.answers[task] == answers
            continue
        numbers, expected = (
            {number: [_numbers(answer) for answer in answers_of] for number, answers_of in judged.answers[task].items()}
            for judged in (ours, hf)
        )
        assert numbers.keys() == expected.keys()
        for number, values in expected.items():
            for actual, other in zip(numbers[number], values, strict=True):
                assert actual == pytest.approx(other, rel=1e-4, abs=1e-4), (task, number)


def _numbers(answer: Any) -> list[float]:
    """Return a log-probability, as stored, and what it says."""
    logprob, *greedy = answer if isinstance(answer, list) else [answer]
    return [float(logprob), *(float(flag == "True") for flag in greedy)]


def save_small(directory: Path) -> Reference:
    """Save a model that often ends its text, and a tokenizer."""
    fast = Fast(models.BPE())
    fast.pre_tokenizer, fast.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    names = dict(zip(("pad_token", "bos_token", "eos_token"), ("<pad>", "<s>", "</s>"), strict=True))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=list(names.values()), initial_alphabet=alphabet, show_progress=False
    )
    fast.train([str(ROOT / "docs" / "architecture.md")], trainer)
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(
        "llama", num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, hidden_size=64,
        intermediate_size=96, vocab_size=fast.get_vocab_size(), initializer_range=0.4, **ids,
    )  # fmt: skip
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(0.1)
        model.lm_head.weight[2].mul_(2)  # its end token
    model.save_pretrained(directory)
    PreTrainedTokenizerFast(tokenizer_object=fast, padding_side="left", **names).save_pretrained(directory)
    return Reference(directory)


@has_harness
def test_the_harness_gives_the_scores_and_answers_of_transformers(folder: Path) -> None:
    """Half of the targets are what the model writes. After some answers the model ends; some tokens are bytes of a
    character."""
    reference = save_small(folder / "model")
    dice = random.Random(1)
    words = ["the", "of", "weights", "streamed", "while", "café", "naïve", "東京", "🙂", "1,234", "rows", "decode\n"]

    def say(max_words: int) -> str:
        return " ".join(dice.choice(words) for _ in range(dice.randint(1, max_words)))

    docs: Docs = []
    for number in range(60):
        text, choices, label = say(40), [f" {say(6)}" for _ in range(4)], dice.randrange(4)
        if number % 2:
            choices[label] = reference.text(reference.greedy(reference.ids(text), 3)) or choices[label]
        docs.append({"text": text, "choices": choices, "label": label, "target": choices[label]})
    ends = [
        int(reference.logprobs(reference.ids(doc["text"] + choice))[-1].argmax()) == 2
        for doc in docs
        for choice in doc["choices"]
    ]
    assert any(ends)
    hf, ours = judge_both(folder, folder / "model", write_tasks(folder, docs, ["er", "\n", "🙂"]))
    assert {"True", "False"} == {answer[1] for (answer,) in hf.answers["score"].values()}
    assert len({answer for (answer,) in hf.answers["write"].values()}) > 20
    check_equal(hf, ours)


CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Japan": "Tokyo", "Egypt": "Cairo", "Spain": "Madrid", "Greece": "Athens",
    "Russia": "Moscow", "Germany": "Berlin", "China": "Beijing", "Portugal": "Lisbon", "Austria": "Vienna",
    "Ireland": "Dublin", "Cuba": "Havana", "Peru": "Lima", "Kenya": "Nairobi", "Iran": "Tehran", "Iraq": "Baghdad",
    "Norway": "Oslo", "Poland": "Warsaw", "Hungary": "Budapest", "Sweden": "Stockholm", "Finland": "Helsinki",
    "Canada": "Ottawa", "Thailand": "Bangkok",
}  # fmt: skip


@has_harness
@has_gguf
def test_the_harness_gives_the_scores_of_transformers_for_published_weights(folder: Path) -> None:
    """SmolLM2-135M-Instruct knows most capitals."""
    directory = make_smollm2(ROOT / ".scratch" / "smollm2")
    cities = [f" {city}" for city in CAPITALS.values()]
    docs: Docs = [
        {"text": f"Question: What is the capital of {country}?\nAnswer: The capital of {country} is",
         "choices": [cities[(number + step) % len(cities)] for step in (0, 5, 11, 17)],
         "label": 0, "target": cities[number]}
        for number, country in enumerate(CAPITALS)
    ]  # fmt: skip
    texts: Docs = [
        {"text": part} for part in (ROOT / "docs" / "architecture.md").read_text().split("\n\n") if len(part) > 200
    ][:8]
    hf, ours = judge_both(folder, directory, write_tasks(folder, docs, ["\n", "."], texts))
    assert hf.scores["choice"]["acc,none"] > 0.5
    check_equal(hf, ours)


# MLPerf LoadGen


class Device:
    """System under test: a thread that gives LoadGen's queries to a scheduler, and its tokens back."""

    def __init__(self, loadgen: Any, engine: Engine, prompts: Sequence[list[int]], limits: Sequence[int]) -> None:
        self._loadgen, self._prompts, self._limits = loadgen, prompts, limits
        largest = largest_load(engine.planner, [(len(ids), limit) for ids, limit in zip(prompts, limits, strict=True)])
        self._running = ContinuousScheduler(engine, Tokenizer(engine.plan.model), largest)
        self._issued: queue.SimpleQueue[list[tuple[int, int]] | None] = queue.SimpleQueue()
        self.samples: dict[int, int] = {}  # place of its prompt, by the id of each query
        self.answered: list[int] = []
        self.tokens = 0
        self.fault: BaseException | None = None
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def issue(self, samples: Any) -> None:
        self._issued.put([(sample.id, sample.index) for sample in samples])

    def end(self) -> None:
        self._issued.put(None)
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        if self.fault is not None:
            raise self.fault

    def _serve(self) -> None:
        try:
            while self._add():
                ended = [row for row in self._running.step() if row.ended]
                if ended:
                    self._complete([(row.key, row.output_ids) for row in ended])
                    self.answered += [row.key for row in ended]
                    self.tokens += sum(len(row.output_ids) for row in ended)
            self._running.release()
        except BaseException as fault:
            self.fault = fault
            self._complete([(key, []) for key in self.samples.keys() - set(self.answered)])  # LoadGen waits for all
        finally:
            self._running.end()

    def _add(self) -> bool:
        """Take all queries that have come; wait where nothing runs. Return False at the end."""
        while not self._running.running or not self._issued.empty():
            new = self._issued.get(timeout=PATIENCE_S)
            if new is None:
                return False
            self.samples |= dict(new)
            self._running.add(
                sequence.Sequence(self._prompts[index], self._limits[index], key=key) for key, index in new
            )
        return True

    def _complete(self, answers: Sequence[tuple[int, list[int]]]) -> None:
        """Give LoadGen the tokens of queries, by their ids."""
        buffers = [array.array("i", ids) for _, ids in answers]
        places = [buffer.buffer_info() for buffer in buffers]
        self._loadgen.QuerySamplesComplete(
            [
                self._loadgen.QuerySampleResponse(key, address, length * array.array("i").itemsize, length)
                for (key, _), (address, length) in zip(answers, places, strict=True)
            ]
        )


def run_loadgen(folder: Path, loadgen: Any, device: Device, count: int, mode: str, rate: float) -> dict[str, str]:
    """Run LoadGen's Offline scenario at `rate` queries a second. Return its summary."""
    settings, logs = loadgen.TestSettings(), loadgen.LogSettings()
    settings.scenario, settings.mode = loadgen.TestScenario.Offline, getattr(loadgen.TestMode, mode)
    settings.offline_expected_qps, settings.min_duration_ms = rate, 1000
    settings.use_token_latencies = True
    logs.log_output.outdir, logs.log_output.copy_summary_to_stdout, logs.enable_trace = str(folder), False, False
    under_test = loadgen.ConstructSUT(device.issue, lambda: None)
    library = loadgen.ConstructQSL(count, count, lambda _: None, lambda _: None)
    try:
        loadgen.StartTestWithLogSettings(under_test, library, settings, logs)
    finally:
        loadgen.DestroyQSL(library)
        loadgen.DestroySUT(under_test)
        device.end()
    return dict(re.findall(r"^ *(.+?) *: (.+)$", (folder / "mlperf_log_summary.txt").read_text(), flags=re.MULTILINE))


def test_loadgen_finds_its_offline_runs_valid(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Every query is answered once, with the tokens of `generate`."""
    loadgen = pytest.importorskip("mlperf_loadgen")
    directory, dice = checkpoint("llama"), random.Random(3)
    prompts = [[dice.randint(4, 98) for _ in range(dice.randint(1, 40))] for _ in range(64)]
    limits = [dice.randint(2, 32) for _ in prompts]
    reference = Reference(directory)
    expected = [reference.greedy(ids, limit) for ids, limit in zip(prompts, limits, strict=True)]
    engine = load("stream", directory, "cpu", tmp_path)

    def device() -> Device:
        return Device(loadgen, engine, prompts, limits)

    first, began = device(), time.monotonic()
    (tmp_path / "accuracy").mkdir()
    run_loadgen(tmp_path / "accuracy", loadgen, first, len(prompts), "AccuracyOnly", 1.0)
    rate = len(prompts) / (time.monotonic() - began)
    records = json.loads((tmp_path / "accuracy" / "mlperf_log_accuracy.json").read_text())
    assert sorted(record["qsl_idx"] for record in records) == list(range(len(prompts)))
    for answer in records:
        assert array.array("i", bytes.fromhex(answer["data"])).tolist() == expected[answer["qsl_idx"]]

    second = device()
    (tmp_path / "performance").mkdir()
    summary = run_loadgen(tmp_path / "performance", loadgen, second, len(prompts), "PerformanceOnly", 8 * rate)
    assert summary["Result is"] == "VALID", summary
    assert (summary["Min duration satisfied"], summary["Min queries satisfied"]) == ("Yes", "Yes")
    for run in (first, second):
        assert sorted(run.answered) == sorted(run.samples)
        assert len(run.answered) == len(set(run.answered))
    assert second.tokens == sum(len(expected[index]) for index in second.samples.values())
    seconds = int(summary["Max latency (ns)"]) / 1e9
    assert float(summary["Tokens per second"]) == pytest.approx(second.tokens / seconds, rel=0.01)
    engine.close()


# LangChain and LiteLLM


class Trip(BaseModel):
    """A trip to plan."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Oslo", "Rome"]
    days: Literal[1, 2, 3]


@pytest.fixture(scope="module", params=["tags", "json"])
def structured_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve a random model, whose answers only a grammar makes right."""
    plan = served_plan(structured.save(tmp_path_factory.mktemp(request.param), request.param))
    worker, tokenizer = InlineWorker(Stream), TokenizerProcess(plan.model)
    form = form_of(tokenizer.facts)
    with serving(plan, lambda: worker, tokenizer=tokenizer, form=form) as server:
        yield server


def test_langchain_gets_objects_and_calls(structured_server: Server) -> None:
    chat = pytest.importorskip("langchain_openai").ChatOpenAI(
        base_url=structured_server.url, api_key="none", model=NAME, max_tokens=200, temperature=0, max_retries=0
    )
    for method in ("json_schema", "function_calling"):
        assert isinstance(chat.with_structured_output(Trip, method=method, strict=True).invoke("Where to?"), Trip)
    bound = chat.bind_tools([Trip], tool_choice="Trip", strict=True)
    answer = bound.invoke("Where to?")
    assert Trip.model_validate(answer.tool_calls[0]["args"])
    streamed = reduce(add, bound.stream("Where to?"))
    assert streamed.tool_calls[0]["args"] == answer.tool_calls[0]["args"]
    result = {"role": "tool", "content": "rain", "tool_call_id": answer.tool_calls[0]["id"]}
    assert chat.bind_tools([Trip]).invoke([("human", "Where to?"), answer, result]).type == "ai"


def test_litellm_gets_objects_and_calls(structured_server: Server) -> None:
    litellm = pytest.importorskip("litellm")
    tools = [{"type": "function", "function": {"name": "plan_trip", "parameters": Trip.model_json_schema()}}]
    how = {"model": f"openai/{NAME}", "api_base": structured_server.url, "api_key": "none", "max_tokens": 200,
           "seed": 1, "messages": [{"role": "user", "content": "Where to?"}]}  # fmt: skip
    made = litellm.completion(**how, response_format=Trip).choices[0].message.content
    assert Trip.model_validate_json(made)
    asked = how | {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    whole = litellm.completion(**asked).choices[0]
    streamed = litellm.stream_chunk_builder(list(litellm.completion(**asked, stream=True))).choices[0]
    assert whole.finish_reason == streamed.finish_reason == "tool_calls"
    calls = [choice.message.tool_calls[0].function for choice in (whole, streamed)]
    assert calls[0].name == calls[1].name == "plan_trip"
    assert Trip.model_validate_json(calls[0].arguments) == Trip.model_validate_json(calls[1].arguments)


# gpt-oss's channels


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the encoding of `openai-harmony`. Its vocabulary is a file of LiteLLM: it would fetch its own."""
    library, litellm = pytest.importorskip("openai_harmony"), find_spec("litellm")
    folder = tmp_path_factory.mktemp("vocabulary")
    (name,) = (litellm and litellm.submodule_search_locations) or pytest.skip("needs litellm")
    o200k = Path(name) / "litellm_core_utils" / "tokenizers" / "fb374d419588a4632f3f557e76b4b70aebbca790"
    (folder / "o200k_base.tiktoken").symlink_to(o200k)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_ENCODINGS_BASE", str(folder))
        return library.load_harmony_encoding("HarmonyGptOss")


HEADS = {  # of messages, by whether they call a tool
    False: ["<|channel|>analysis", "<|channel|>final", "<|channel|>commentary", "<|channel|>final <|constrain|>json"],
    True: [
        "<|channel|>commentary to=functions.now <|constrain|>json", " to=functions.now<|channel|>commentary json",
        " to=functions.now<|channel|>commentary <|constrain|>json", "<|channel|>analysis to=functions.now code",
    ],
}  # fmt: skip
BODIES = ["It rains.", "a\n\n<b> ", " to=functions.now", "<|start|", "é 東京 🙂", '{"a": 1}', "<tool_call>", "x" * 40]


def read(encoding: Any, ids: Sequence[int]) -> Parsed:
    """Return the parts of an answer as `openai-harmony` reads them."""
    texts: dict[bool, list[str]] = {True: [], False: []}
    calls = []
    assistant = pytest.importorskip("openai_harmony").Role.ASSISTANT
    for message in encoding.parse_messages_from_completion_tokens(ids, assistant):
        text = "".join(part.text for part in message.content)
        if message.recipient == "functions.now":
            calls.append(Call("now", json.dumps(json.loads(text), ensure_ascii=False)))
        else:
            texts[message.channel == "analysis"].append(text)
    return Parsed("\n".join(texts[True]), "\n".join(texts[False]), tuple(calls))


def test_channels_are_what_gpt_oss_calls_them(harmony: Any) -> None:
    """Whole, and token by token: nothing is taken back."""
    dice, form = random.Random(4), Form("harmony", True)
    for _ in range(300):
        kinds = [dice.random() < 0.3 for _ in range(dice.randint(1, 5))]
        bodies = [json.dumps({"a": dice.choice(BODIES)}) if call else "".join(dice.sample(BODIES, 2)) for call in kinds]
        parts = [f"{dice.choice(HEADS[call])}<|message|>{body}" for call, body in zip(kinds, bodies, strict=True)]
        text = "<|end|><|start|>assistant".join(parts)
        ids = harmony.encode(text, allowed_special="all")
        expected = read(harmony, [*ids, 200012 if kinds[-1] else 200002])
        assert Parser(form, ("now",), ()).add(text, ended=True) == expected, text
        parser, shown, told = Parser(form, ("now",), ()), "", ["", ""]
        for count in range(1, len(ids) + 1):
            beginning = harmony.decode(ids[:count])
            if "\ufffd" in beginning:  # half of a character
                continue
            new = parser.add(beginning[len(shown) :], ended=False)
            shown, told = beginning, [told[0] + new.reasoning, told[1] + new.content]
            assert expected.reasoning.startswith(told[0])
            assert expected.content.startswith(told[1])
            assert expected.calls[: parser.calls][parser.calls - len(new.calls) :] == new.calls


def test_a_grammar_lets_gpt_oss_say_what_its_parser_reads(harmony: Any, tmp_path: Path) -> None:
    """A model that is random but for its grammar."""
    engine = load("stream", structured.save(tmp_path / "harmony", "harmony"), "cpu", tmp_path)
    tokenizer = Tokenizer(engine.plan.model)
    form, tool = Form("harmony", True, None), {"name": "now", "parameters": Trip.model_json_schema()}
    answer = json_schema(Trip.model_json_schema())
    texts = [grammar(form, None, [tool], True), grammar(form, answer, (), False), grammar(form, answer, [tool], False)]
    quiet = tuple((token, -100.0) for text, token in tokenizer.hf.get_vocab().items() if "analysis".startswith(text))
    rows = [
        sequence.Sequence(
            [40 + key], 250, Sampling(grammar=text, logit_bias=quiet, temperature=1.0, seed=str(key)), key=key,
            chat=True, special=True,
        )
        for key, text in enumerate(texts * 5)
    ]  # fmt: skip
    scheduler = ContinuousScheduler(engine, tokenizer, LOAD)
    scheduler.add(rows)
    while scheduler.running:
        scheduler.step()
    scheduler.end()
    engine.close()
    whole = [row for row in rows if row.finish_reason == "stop"]
    assert len(whole) > 10
    for row in whole:
        ids = harmony.encode(row.text, allowed_special="all")
        expected = read(harmony, ids)
        assert Parser(form, ("now",), ()).add(row.text, ended=True) == expected
        assert Trip.model_validate_json(expected.content or expected.calls[0].arguments)
        assert bool(expected.calls) or "final" in row.text
