"""Grammars of answers, tools and thoughts: in the scheduler, by OpenAI's client, in batches, and in Python."""

import json
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel

import zinfer
from tests import Patch, structured
from tests.command import probed
from tests.command import zinfer as command
from tests.inline_batch import completion
from tests.inline_worker import InlineWorker
from tests.serving import NAME, Server, serving
from tests.test_continuous import LOAD, run, small
from tests.test_drafts import drafting
from tests.test_parity import load
from tests.test_serve import served_plan
from zinfer.core.model import ModelError
from zinfer.core.request import Sampling
from zinfer.engine.base import Engine
from zinfer.engine.stream.engine import Stream
from zinfer.generation import grammar, sequence, tokenizer_process
from zinfer.generation.scheduler import ContinuousScheduler
from zinfer.generation.sequence import Sequence as Row
from zinfer.generation.tokenizer import Tokenizer
from zinfer.generation.tokenizer_process import Facts, TokenizerProcess
from zinfer.job import structure
from zinfer.job.openai import Refused, read_body
from zinfer.job.structure import Call, Form, Parsed, Parser, form_of

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "Forecast.", "parameters": CITY}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "additionalProperties": False}}},
]
FOREVER = {"type": "integer", "multipleOf": 99_999_989}  # takes minutes to compile


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return structured.save(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def engine(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return load("stream", directory, "cpu", tmp_path_factory.mktemp("engine"))


@pytest.fixture(scope="module")
def tokenizer(engine: Engine) -> Tokenizer:
    return Tokenizer(engine.plan.model)


def by_schema(schema: dict[str, Any]) -> str:
    return structure.grammar(structure.PLAIN, structure.json_schema(schema), (), False)


@pytest.fixture
def finish(engine: Engine, tokenizer: Tokenizer) -> Callable[..., list[Row]]:
    """Return a function that runs rows of these groups to their ends."""
    return lambda *groups: run(ContinuousScheduler(engine, tokenizer, LOAD), list(groups))


Finish = Callable[..., list[Row]]


def rows_of(grammars: Sequence[str], seed: int, **sampling: Any) -> list[Row]:
    """Return rows with these grammars; "" is none."""
    dice = random.Random(seed)
    return [
        Row(
            [dice.randint(40, 600) for _ in range(dice.randint(1, 20))], 250 if text else 12,
            Sampling(grammar=text, seed=str(key), **sampling), key=key, ignore_eos=not text,
        )
        for key, text in enumerate(grammars)
    ]  # fmt: skip


# Rows under way


DRAWN = {"temperature": 1.0, "top_p": 0.95, "repetition_penalty": 1.1}


@pytest.mark.parametrize(
    ("count", "sampling"), [(16, {}), *(pytest.param(200, how, marks=pytest.mark.slow) for how in ({}, DRAWN))]
)
def test_answers_to_random_schemas_validate(
    count: int, sampling: dict[str, Any], finish: Finish, monkeypatch: Patch
) -> None:
    """Rows with a grammar and without run side by side; those without get the tokens that they get alone."""
    small(monkeypatch)
    dice, whole = random.Random(5), 0
    for start in range(0, count, 8):
        schemas = [structured.schema(dice) for _ in range(8)]
        texts = [text for schema in schemas for text in (by_schema(schema), "")][:15]
        rows = rows_of(texts, start, **sampling)
        finish(rows[:4], rows[4:])
        assert [row.failure for row in rows] == [None] * 15
        for row in rows:
            if row.sampling.grammar and row.finish_reason == "stop":
                jsonschema.validate(json.loads(row.text), schemas[row.key // 2])
                whole += 1
        plain = finish([row for row in rows_of(texts, start, **sampling) if not row.sampling.grammar])
        assert [rows[row.key].output_ids for row in plain] == [row.output_ids for row in plain]
    assert whole > 0.9 * count, "others have their limit"


def test_drafts_do_not_change_what_a_grammar_permits(
    engine: Engine, tokenizer: Tokenizer, finish: Finish, monkeypatch: Patch
) -> None:
    """Drafts are right, wrong, or not permitted at all."""
    small(monkeypatch)
    dice = random.Random(2)
    texts = [by_schema(structured.schema(dice)) if number % 3 else "" for number in range(9)]
    alone = finish(rows_of(texts, 1))
    assert all(row.failure is None for row in alone)
    expected = {row.key: (list(row.prompt_ids), [*row.output_ids, 0, 0]) for row in alone}
    running = drafting(engine, monkeypatch, expected, 0.3)
    running._tokenizer = tokenizer
    running._grammars = grammar.Grammars(tokenizer, engine.plan.model.vocab_size)
    drafted = run(running, [rows_of(texts, 1)])
    assert [(row.output_ids, row.text) for row in drafted] == [(row.output_ids, row.text) for row in alone]
    assert running.drafts.accepted > 50


def test_a_row_goes_on_within_its_grammar_after_a_kill(finish: Finish) -> None:
    (whole,), (again,) = finish(rows_of([by_schema(CITY)], 3)), rows_of([by_schema(CITY)], 3)
    assert len(whole.output_ids) > 8
    again.add(whole.output_ids[:5])
    finish([again])
    assert (again.text, again.finish_reason) == (whole.text, "stop")


class Panic(BaseException):
    pass


@pytest.mark.parametrize(
    ("fault", "message"), [("wrong", "unclosed group"), ("slow", "takes more than"), ("panic", "out of range")]
)
def test_a_faulty_grammar_ends_its_own_row_alone(fault: str, message: str, finish: Finish, monkeypatch: Patch) -> None:
    fill = grammar.Grammar.fill

    def panicking(it: grammar.Grammar, *how: Any) -> None:
        if it._consumed > 2 and len(it._output_ids) % 2:
            raise Panic("out of range")
        fill(it, *how)

    if fault == "slow":
        monkeypatch.setattr(grammar, "MASK_S", -1.0)
    if fault == "panic":
        monkeypatch.setattr(grammar.Grammar, "fill", panicking)
    faulty = by_schema(CITY) if fault != "wrong" else json.dumps({"grammars": [structure.asked("regex", "(")]})
    texts = [faulty, "", *[by_schema(CITY)] * (fault == "wrong")]
    rows = finish(rows_of(texts, 4))
    assert rows[0].failure is not None
    assert message in rows[0].failure.message
    assert [row.failure for row in rows[1:]] == [None] * (len(rows) - 1)
    assert len(rows[1].output_ids) == 12
    if fault == "wrong":
        assert rows[0].failure.code == "invalid_grammar"
        assert json.loads(rows[2].text)["city"] in ("Oslo", "Rome")


def test_a_row_dropped_while_it_compiles_is_gone(engine: Engine, tokenizer: Tokenizer) -> None:
    running = ContinuousScheduler(engine, tokenizer, LOAD)
    running.add(rows_of([by_schema(CITY), ""], 4))
    running.drop([0])
    while running.running:
        assert all(row.key == 1 for row in running.step())
    running.end()


@pytest.mark.parametrize(
    ("part", "why"),
    [
        (structure.asked("regex", "(" * 5000), "regex"),
        (structure.json_schema(FOREVER | {"multipleOf": 100_003}), "CPU time"),
        (structure.json_schema({"type": "object", "frobnicate": 3, "if": {}}), "if"),
        (structure.lark("start: a", "a: a"), "NoExtension"),
        (structure.json_schema({"anyOf": []}), "nsatisfiable"),
        (structure.asked("grammar", "?"), "xpected"),
    ],
)
def test_wrong_and_hostile_grammars_are_refused(
    tokenizer: Tokenizer, monkeypatch: Patch, part: dict[str, Any], why: str
) -> None:
    monkeypatch.setattr(grammar, "COMPILE_S", 0.02)
    vocabulary = grammar.Vocabulary(tokenizer.hf, len(tokenizer.hf), tokenizer.ends)
    with pytest.raises(ModelError, match=why):
        vocabulary.check(json.dumps({"grammars": [part]}))


# Bodies


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
        ({"structured_outputs": {"regex": 3}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs"),
        ({"structured_outputs": {"choice": "ab"}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "min_tokens": 3}, "min_tokens"),
        ({"structured_outputs": {"regex": "a" * 70_000}}, "structured_outputs"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": TOOLS * 65}, "tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]}, "messages"),
    ],
)  # fmt: skip
def test_wrong_bodies_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]} | fields
    with pytest.raises(Refused) as refused:
        read_body(body, True, form=Form("tags"))
    assert (refused.value.param, refused.value.status) == (param, 400)


def test_tools_need_a_known_form_and_grammars_their_package(monkeypatch: Patch) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
    with pytest.raises(Refused, match="no form of calls"):
        read_body(body, True)
    assert read_body(body | {"tool_choice": "none"}, True).tools == ()
    monkeypatch.setattr(grammar, "find_spec", lambda _: None)
    assert read_body(body, True, form=Form("json")).tools == ("weather", "now")
    with pytest.raises(Refused, match=r"tool_choice needs llguidance: pip install 'zinfer\[structured\]'"):
        read_body(body | {"tool_choice": "required"}, True, form=Form("json"))


# Answers


NOW = Call("now", "{}")
HARMONY = "<|channel|>analysis<|message|>Rain?<|end|><|start|>assistant"
ANSWERS: dict[str, tuple[Form, str, Parsed]] = {
    "plain": (Form(), "<think>no</think>", Parsed("", "<think>no</think>")),
    "thought": (Form(thoughts=True), "<think>\nhm\n</think>\n\nyes", Parsed("hm", "yes")),
    "begun": (Form(thoughts=True, think=7), "hm\n</think>\n\nyes ", Parsed("hm", "yes ")),
    "unended": (Form(thoughts=True, think=7), "hm, <", Parsed("hm, <")),
    "no thought": (Form(thoughts=True), "yes, a<b", Parsed("", "yes, a<b")),
    "tags": (
        Form("tags", True),
        '<think>x</think>Let me see.\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n<tool_call>\n'
        '{"name": "weather", "arguments": {"city": "</tool_call>", "days": {"a": "é"}}}\n</tool_call>',
        Parsed("x", "Let me see.", (NOW, Call("weather", '{"city": "</tool_call>", "days": {"a": "é"}}'))),
    ),
    "unknown": (
        Form("tags"), '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
        Parsed("", '<tool_call>{"name": "rm", "arguments": {}}</tool_call>'),
    ),
    "cut": (Form("tags"), 'a <tool_call>\n{"name": "no', Parsed("", 'a <tool_call>\n{"name": "no')),
    "json": (Form("json"), ' {"name": "now", "parameters": {"a": 1}}\n', Parsed("", "", (Call("now", '{"a": 1}'),))),
    "no call": (Form("json"), '{"name": "Ada"}', Parsed("", '{"name": "Ada"}')),
    "text": (Form("json"), "It rains.", Parsed("", "It rains.")),
    "harmony": (
        Form("harmony", True), f"{HARMONY}<|channel|>final<|message|>It does.", Parsed("Rain?", "It does."),
    ),
    "harmony call": (
        Form("harmony", True),
        f"{HARMONY}<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}',
        Parsed("Rain?", "I look.", (Call("weather", '{"city": "Oslo"}'),)),
    ),
    "call in a thought": (
        Form("harmony", True), "<|channel|>analysis to=functions.now <|constrain|>json<|message|>{}<|end|>",
        Parsed(calls=(NOW,)),
    ),
    "no channel": (Form("harmony", True), "It does.", Parsed("", "It does.")),
    "between calls": (
        Form("tags"), 'a\n<tool_call>{"name": "now", "arguments": {}}</tool_call>\nb <tool_call>no</tool_call>\n ',
        Parsed("", "ab <tool_call>no</tool_call>", (NOW,)),
    ),
    "recipient first": (
        Form("harmony", True), ' to=functions.now<|channel|>commentary json<|message|>{}', Parsed(calls=(NOW,)),
    ),
}  # fmt: skip


def streamed(texts: Sequence[str], form: Form, prompt: Sequence[int] = (5,)) -> tuple[Parsed, Parsed]:
    """Return an answer's parts, and those told before its end."""
    parser, parts = Parser(form, ("now", "weather"), prompt), [Parsed()]
    for number, text in enumerate(texts, start=1):
        new = parser.add(text, ended=number == len(texts))
        told = parts[-1]
        parts.append(Parsed(told.reasoning + new.reasoning, told.content + new.content, told.calls + new.calls))
        assert parser.calls == len(parts[-1].calls)
    return parts[-1], parts[-2]


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_are_taken_apart_whole_and_streamed(name: str) -> None:
    """However they come, their parts are the same."""
    form, text, expected = ANSWERS[name]
    prompt, dice = [5, 7, 9] if form.think else [5], random.Random(1)
    assert streamed([text], form, prompt)[0] == expected
    whole, told = streamed([*text, ""], form, prompt)
    assert whole == expected
    at_once = form.calls == "json" or expected.calls or "<tool_call>" in text or name == "no channel"
    assert at_once or told != Parsed(), "it streams"
    for _ in range(20):
        ends = [0, *sorted(dice.choices(range(len(text) + 1), k=4)), len(text)]
        assert streamed([text[start:end] for start, end in pairwise(ends)], form, prompt)[0] == expected


@pytest.mark.parametrize(
    ("form", "piece", "part"),
    [
        ("tags", '<tool_call>{"name": "now", "arguments": {}}</tool_call>\n', "calls"),
        ("harmony", "<|channel|>analysis<|message|>hm<|end|><|start|>assistant", "reasoning"),
        ("tags", "word ", "content"),
    ],
)
def test_a_long_answer_is_not_read_from_its_beginning(form: Any, piece: str, part: str, monkeypatch: Patch) -> None:
    parser, looked = Parser(Form(form), ("now",), [5]), 0

    def counting(text: str, stops: tuple[str, ...]) -> str:
        nonlocal looked
        looked += len(text)
        return sequence.before_a_stop(text, stops)

    monkeypatch.setattr(structure, "before_a_stop", counting)
    for _ in range(3000):
        assert getattr(parser.add(piece, ended=False), part)
        assert len(parser._rest) < len(piece)
    assert looked < 3 * 3000 * len(piece)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (Form("tags"), '<tool_call>{"name": "now", "arguments": {"a": "' + "</tool_call>" * 10_000),
        (Form("harmony"), "<|start|>assistant" * 10_000),
        (Form("harmony"), "<|channel|>final<|message|><|end|>" * 10_000),
    ],
)
def test_a_hostile_answer_is_read_once(form: Form, text: str, monkeypatch: Patch) -> None:
    """Whole, as it is read in the event loop."""
    tried, value = 0, structure._value

    def counting(text: str) -> Any:
        nonlocal tried
        tried += 1
        return value(text)

    monkeypatch.setattr(structure, "_value", counting)
    began = time.process_time()
    content = Parser(form, ("now",), [5]).add(text, ended=True).content
    assert content == (text if form.calls == "tags" else "")
    assert tried <= 1
    assert time.process_time() - began < 2


def test_forms_are_seen_in_templates() -> None:
    def seen(template: str | None, think: int | None = None) -> Form:
        return form_of(Facts([], None, template, think))

    calls = {name: seen(template, 9).calls for name, template in structured.TEMPLATES.items()}
    assert calls == {"plain": "none", "tags": "tags", "json": "json", "harmony": "harmony", "thinks": "none"}
    assert seen(structured.TEMPLATES["thinks"], 9) == Form("none", True, 9)
    assert seen("<tool_call><function=f><parameter=a>").calls == "none"
    assert seen('<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}').calls == "tags"
    assert seen(None) == Form()


# The server


@pytest.fixture(scope="module", params=structured.TEMPLATES)
def form(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(scope="module")
def server(form: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    plan = served_plan(structured.save(tmp_path_factory.mktemp(form), form))
    worker, tokenizer = InlineWorker(Stream), TokenizerProcess(plan.model)
    with serving(plan, lambda: worker, tokenizer=tokenizer, form=form_of(tokenizer.facts)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=60) as connected:
        yield connected


HI: list[Any] = [{"role": "user", "content": "hi"}]
WEATHER = {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather"}}}
HOW: dict[str, Any] = {"model": NAME, "messages": HI, "max_tokens": 90, "seed": 3}


class Trip(BaseModel):
    city: Literal["Oslo", "Rome"]
    days: int
    back: bool | None


def formatted(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def without_thought(server: Server, form: str) -> dict[str, Any]:
    """Return a bias against thoughts, which a random model does not end."""
    if form != "harmony":
        return {}
    vocabulary = Tokenizer(server.dispatcher.plan.model).hf.get_vocab()
    return {"logit_bias": {str(token): -100 for text, token in vocabulary.items() if "analysis".startswith(text)}}


def test_the_client_parses_answers_by_a_model(client: openai.OpenAI, form: str) -> None:
    if form in ("harmony", "thinks"):
        pytest.skip("a random model thinks for ever")
    trip = client.chat.completions.parse(response_format=Trip, **HOW).choices[0].message
    assert isinstance(trip.parsed, Trip)
    made = client.chat.completions.create(response_format={"type": "json_object"}, **HOW | {"max_tokens": 9})
    assert (made.choices[0].message.content or "").lstrip().startswith("{")
    asked: list[tuple[dict[str, Any], str]] = [
        ({"choice": ["yes", "no é"]}, "yes|no é"),
        ({"regex": r"[ab]{3}/\d"}, r"[ab]{3}/\d"),
        ({"grammar": 'root ::= "x" [0-9] "y"'}, "x[0-9]y"),
    ]
    for structured_outputs, pattern in asked:
        body = {"structured_outputs": structured_outputs}
        for choice in client.chat.completions.create(extra_body=body, n=2, **HOW).choices:
            assert choice.finish_reason == "stop"
            assert re.fullmatch(pattern, choice.message.content or "")
    body = {"structured_outputs": {"choice": ["b", "c"]}}
    text = client.completions.create(model=NAME, prompt=[5, 60], max_tokens=9, extra_body=body)
    assert text.choices[0].text in ("b", "c")


def test_a_required_tool_is_called_whole_and_streamed(server: Server, client: openai.OpenAI, form: str) -> None:
    if form in ("plain", "thinks"):
        with pytest.raises(openai.BadRequestError, match="no form of calls"):
            client.chat.completions.create(tools=TOOLS, **HOW)
        return
    how: Any = HOW | WEATHER | without_thought(server, form)
    choice = client.chat.completions.create(**how).choices[0]
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, call.function.name, choice.message.content) == ("tool_calls", "weather", None)
    jsonschema.validate(json.loads(call.function.arguments), CITY)
    with client.chat.completions.stream(**how) as stream:
        assert any(event.type == "tool_calls.function.arguments.done" for event in stream)
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    assert [it.function.arguments for it in final.message.tool_calls or ()] == [call.function.arguments]
    any_of = client.chat.completions.create(**how | {"tool_choice": "required", "parallel_tool_calls": False})
    if any_of.choices[0].finish_reason == "tool_calls":
        assert len(any_of.choices[0].message.tool_calls) == 1
    talk: list[Any] = [*HI, choice.message.model_dump(exclude_none=True)]
    talk += [{"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    assert client.chat.completions.create(**HOW | {"messages": talk, "tools": TOOLS}).choices


def test_thoughts_are_told_apart(client: openai.OpenAI, form: str) -> None:
    if form != "thinks":
        pytest.skip("of models that think")
    asked = {"structured_outputs": {"choice": ["yes"]}, "chat_template_kwargs": {"open": True}}
    whole = client.chat.completions.create(extra_body=asked, **HOW).choices[0]
    events = client.chat.completions.create(extra_body=asked, stream=True, **HOW)
    pieces = [event.choices[0].delta for event in events]
    assert "".join(getattr(it, "reasoning_content", None) or "" for it in pieces) == whole.message.reasoning_content
    assert "".join(it.content or "" for it in pieces) == whole.message.content
    assert whole.message.reasoning_content


def test_a_hostile_schema_is_refused_while_others_go_on(
    server: Server, client: openai.OpenAI, form: str, monkeypatch: Patch
) -> None:
    if form != "plain":
        pytest.skip("once is enough")
    monkeypatch.setattr(tokenizer_process, "PROMPT_S", 1.0)
    more = {"ignore_eos": True}
    stream = client.completions.create(model=NAME, prompt="a", max_tokens=40, stream=True, extra_body=more)
    status, answer, _ = server.ask("/v1/chat/completions", HOW | formatted(FOREVER))
    assert (status, "CPU time" in answer["error"]["message"]) == (400, True), answer
    assert sum(1 for _ in stream) > 1
    assert server.ask("/v1/chat/completions", HOW | formatted(CITY))[0] == 200
    status, answer, _ = server.ask("/v1/completions", {"prompt": [5], "structured_outputs": {"regex": "("}})
    assert (status, "unclosed group" in answer["error"]["message"]) == (400, True)


# Other doors


def test_run_batch_and_python_take_grammars(tmp_path: Path, monkeypatch: Patch) -> None:
    directory = structured.save(tmp_path / "model", "tags")
    probed(tmp_path)
    words = ["-m", str(directory), "--offload", "cpu", "--dtype", "fp32"]
    asked = ["--structured-outputs", json.dumps({"json": CITY}), "--output-len", "60"]
    done = command(tmp_path, "run", *words, *asked, "--json", "-p", "hi", "-p", "there")
    assert done.returncode == 0, done.stderr
    for answer in json.loads(done.stdout):
        jsonschema.validate(json.loads(answer["output_text"]), CITY)
    wrong = command(tmp_path, "run", *words, "--structured-outputs", '{"regex": "("}', "-p", "hi")
    assert (wrong.returncode, "unclosed group" in wrong.stderr) == (2, True)

    bodies = [
        {"messages": HI} | formatted(CITY),
        {"messages": HI} | WEATHER,
        {"messages": HI, "structured_outputs": {"regex": "("}},
    ]
    lines = [completion(str(key), body | {"max_tokens": 120}, chat=True) for key, body in enumerate(bodies)]
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(lines))
    done = command(tmp_path, "batch", "in.jsonl", "-o", "out.jsonl", *words)
    assert done.returncode == 3, done.stderr
    answers = {it["custom_id"]: it for it in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())}
    said, called = (answers[name]["response"]["body"]["choices"][0]["message"] for name in ("0", "1"))
    jsonschema.validate(json.loads(said["content"]), CITY)
    jsonschema.validate(json.loads(called["tool_calls"][0]["function"]["arguments"]), CITY)
    assert "unclosed group" in answers["2"]["error"]["message"]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("zinfer.worker.process.Worker", InlineWorker)
    monkeypatch.setattr("zinfer.plan.search.LARGEST_BATCH", 1 << 10)
    with zinfer.LLM(directory, offload="cpu", dtype="float32") as llm:
        params = zinfer.SamplingParams(structured_outputs={"choice": ["left", "right"]})
        assert all(it.outputs[0].text in ("left", "right") for it in llm.generate(["a", "b"], params))
        (told,) = llm.chat(HI, params, tools=TOOLS)
        assert told.outputs[0].text.startswith(("left", "right", "<tool_call>"))
        (untold,) = llm.chat(HI, params)
        assert len(told.prompt_token_ids) > len(untold.prompt_token_ids)
