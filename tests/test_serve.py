"""`zinfer serve` with a real engine: the client of OpenAI gets the tokens and log-probabilities of `transformers`."""

import shutil
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import call

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests import Checkpoints, Patch, Spy
from tests.inline_worker import InlineWorker
from tests.serving import NAME, Server, serving
from tests.test_parity import MACHINE, plan_of
from tests.test_rows import TEMPLATE
from zinfer.engine.stream.engine import Stream
from zinfer.generation import tuning
from zinfer.generation.pass_times import PassTimes
from zinfer.generation.sequence import Sequence
from zinfer.generation.tokenizer_process import TokenizerProcess
from zinfer.job.batch.packing import best_plan
from zinfer.plan.planner import Plan
from zinfer.worker.generation import batch_step
from zinfer.worker.process import WorkerDied
from zinfer.worker.session import Session
from zinfer.worker.tasks import BatchStep, BatchStepped, Facts, Load

PROMPTS = ["Once upon a time", "ab", "etaoin shrdlu, etaoin", "x" * 40]
Ask = Callable[..., Any]  # of OpenAI's client


def served_plan(directory: Path) -> Plan:
    plan = plan_of(directory, sizes=(1, 1, 1))
    return best_plan([plan.case], [(60, 40)], plan.model, MACHINE)


class Reference:
    """The same checkpoint in `transformers`."""

    def __init__(self, directory: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(directory)
        self.tokenizer = AutoTokenizer.from_pretrained(directory)

    def ids(self, text: str) -> list[int]:
        token_ids: list[int] = self.tokenizer(text).input_ids
        return token_ids

    @torch.inference_mode()
    def logprobs(self, ids: list[int]) -> torch.Tensor:
        logits = self.model(torch.tensor([ids])).logits[0]
        return torch.log_softmax(logits.float(), -1)

    def greedy(self, ids: list[int], count: int, **settings: Any) -> list[int]:
        made = self.model.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), max_new_tokens=count,
            do_sample=False, pad_token_id=0, **settings,
        )  # fmt: skip
        continuation = made[0, len(ids) :].tolist()
        return [token for token in continuation if token != 2]

    @torch.inference_mode()
    def ending(self) -> list[int]:
        """A prompt after which the most likely token is the end token."""
        pairs = torch.cartesian_prod(torch.arange(4, 99), torch.arange(4, 99))
        ends = self.model(pairs).logits[:, -1].argmax(-1) == 2
        prompt: list[int] = pairs[ends][0].tolist()
        return prompt

    def text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


@pytest.fixture(scope="module")
def directory(checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(shutil.copytree(checkpoint("llama"), tmp_path_factory.mktemp("served") / "model"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def reference(directory: Path) -> Reference:
    return Reference(directory)


@pytest.fixture(scope="module")
def worker() -> InlineWorker:
    return InlineWorker(Stream)


@pytest.fixture(scope="module")
def server(directory: Path, worker: InlineWorker) -> Iterator[Server]:
    with serving(served_plan(directory), lambda: worker, cache_size=1 << 22) as running:
        yield running


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with client_of(server) as connected:
        yield connected


@pytest.fixture
def complete(client: openai.OpenAI) -> Ask:
    return partial(client.completions.create, model=NAME, max_tokens=12, temperature=0)


@pytest.fixture
def chat(client: openai.OpenAI) -> Ask:
    return partial(client.chat.completions.create, model=NAME, max_completion_tokens=9, temperature=0)


@pytest.fixture
def small(monkeypatch: Patch) -> None:
    """Make decisions that are made for thousands of tokens with few."""
    monkeypatch.setattr(tuning, "TUNED", replace(tuning.TUNED, min_prompt_tokens=6, min_kept=2))
    monkeypatch.setattr(PassTimes, "room", lambda *_: 11)


def free(server: Server, worker: InlineWorker) -> None:
    """Wait until no row is left anywhere: neither in the server, nor in the dispatcher, worker and engine."""
    server.wait(lambda: server.dispatcher.unfinished == 0)
    server.wait(lambda: not (sequences(worker) or worker.session.engine.batches))


@pytest.fixture
def freed(server: Server, worker: InlineWorker) -> Iterator[None]:
    yield
    free(server, worker)


def sequences(worker: InlineWorker) -> dict[int, Sequence]:
    """Return the worker's unfinished rows, by key."""
    scheduler = worker.session.scheduler
    return {} if scheduler is None else scheduler.sequences


@pytest.mark.usefixtures("small", "freed")
def test_greedy_text_is_that_of_transformers(complete: Ask, reference: Reference) -> None:
    """Texts, token ids and a stream get the same answers. They are asked at once."""
    ids = [reference.ids(text) for text in PROMPTS]
    expected = [reference.text(reference.greedy(prompt, 12)) for prompt in ids]
    stream = complete(prompt=PROMPTS[2], stream=True, stream_options={"include_usage": True})
    texts = complete(prompt=PROMPTS)
    assert [(choice.index, choice.text) for choice in texts.choices] == [*enumerate(expected)]
    assert texts.usage.prompt_tokens == sum(map(len, ids))
    assert [choice.text for choice in complete(prompt=ids).choices] == expected
    assert complete(prompt=ids[3]).choices[0].text == expected[3]
    *events, last = stream
    assert "".join(event.choices[0].text for event in events) == expected[2]
    assert sum(bool(event.choices[0].text) for event in events) > 3
    assert events[-1].choices[0].finish_reason in ("length", "stop")
    assert (last.choices, last.usage.prompt_tokens) == ([], len(ids[2]))


@pytest.mark.usefixtures("freed")
def test_parameters_of_one_request_do_not_touch_another(complete: Ask, reference: Reference) -> None:
    """Penalties, bias and ends are each request's own."""
    ids = [reference.ids(text) for text in PROMPTS]
    expected = [reference.text(reference.greedy(prompt, 12)) for prompt in ids]
    penalised = reference.greedy(ids[0], 12, repetition_penalty=0.5)
    letter = reference.ids("e")[-1]
    bias = {str(letter): 100}
    asked: list[dict[str, Any]] = [
        *({"prompt": prompt} for prompt in ids),
        {"prompt": ids[0], "extra_body": {"repetition_penalty": 0.5}},
        {"prompt": ids[1], "logit_bias": bias},
        {"prompt": ids[2], "logit_bias": bias, "extra_body": {"stop_token_ids": [letter], "min_tokens": 3}},
        {"prompt": ids[3], "frequency_penalty": -2, "presence_penalty": -2},
    ]
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(lambda fields: complete(**fields), asked))
    texts = [answer.choices[0].text for answer in answers]
    assert texts[:6] == [*expected, reference.text(penalised), reference.text([letter] * 12)]
    assert texts[4] != expected[0]
    assert (answers[6].choices[0].finish_reason, answers[6].usage.completion_tokens) == ("stop", 3)
    assert texts[7] != expected[3]
    with pytest.raises(openai.BadRequestError, match="min_p must be a number from 0 to 1"):
        complete(prompt="x", extra_body={"min_p": 7})


def test_a_stop_ends_the_text_and_no_part_of_it_is_streamed(complete: Ask, reference: Reference) -> None:
    whole = reference.text(reference.greedy(reference.ids(PROMPTS[0]), 12))
    stop = whole[5:8]
    expected = whole[: whole.index(stop)]
    choice = complete(prompt=PROMPTS[0], stop=[stop]).choices[0]
    assert (choice.text, choice.finish_reason) == (expected, "stop")
    events = complete(prompt=PROMPTS[0], stop=[stop], stream=True)
    assert "".join(event.choices[0].text for event in events) == expected


def test_a_chat_is_rendered_and_streamed(chat: Ask, reference: Reference) -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    rendered = reference.tokenizer("[user]hi[assistant]", add_special_tokens=False).input_ids
    expected = reference.text(reference.greedy(rendered, 9))
    whole = chat(messages=messages, logprobs=True, top_logprobs=2)
    message = whole.choices[0].message
    assert (message.role, message.content) == ("assistant", expected)
    tops = [[top.logprob for top in token.top_logprobs] for token in whole.choices[0].logprobs.content]
    assert all(len(top) == 2 and top[0] > top[1] for top in tops)
    assert len(tops) == whole.usage.completion_tokens
    events = list(chat(messages=messages, stream=True))
    assert events[0].choices[0].delta.role == "assistant"
    assert "".join(event.choices[0].delta.content or "" for event in events) == expected
    turns = [*messages, message.model_dump(), {"role": "user", "content": "go on"}]  # with all its empty fields
    ids = reference.tokenizer(f"[user]hi[assistant]{expected}[user]go on[assistant]", add_special_tokens=False)
    again = chat(messages=turns, max_completion_tokens=3)
    assert again.choices[0].message.content == reference.text(reference.greedy(ids.input_ids, 3))
    with pytest.raises(openai.BadRequestError, match="no such role"):
        chat(messages=[{"role": "bad", "content": ""}])


def test_answers_to_one_prompt_have_it_read_once(directory: Path, spy: Spy) -> None:
    plan = served_plan(directory)
    tokenizer = TokenizerProcess(plan.model)
    read = spy(tokenizer, "encode_quickly")
    with serving(plan, lambda: InlineWorker(Stream), tokenizer=tokenizer) as server:
        _, answer, _ = server.ask("/v1/completions", {"prompt": ["ab", "cd"], "n": 5, "max_tokens": 1})
        assert len(answer["choices"]) == 10
        assert answer["usage"]["prompt_tokens"] == 4
    assert read.mock_calls == [call("ab"), call("cd")]


@pytest.mark.usefixtures("small")
def test_log_probabilities_of_an_echoed_prompt_are_those_of_transformers(
    complete: Ask, reference: Reference, monkeypatch: Patch
) -> None:
    """Prompts come in chunks, with answers of zero, one and three tokens."""
    monkeypatch.setattr(tuning, "TUNED", replace(tuning.TUNED, scored_logits=128 * 12))
    ids = [reference.ids(text) for text in PROMPTS]
    for count in (0, 1, 3):
        completion = complete(prompt=ids, max_tokens=count, logprobs=1, echo=True, seed=1)
        answers = [reference.greedy(prompt, count) if count else [] for prompt in ids]
        for prompt, answer, choice in zip(ids, answers, completion.choices, strict=True):
            whole = prompt + answer
            table = reference.logprobs(whole)
            values, tops = choice.logprobs.token_logprobs, choice.logprobs.top_logprobs
            assert values[0] is None
            assert len(values) == len(whole)
            expected = [float(table[index, token]) for index, token in enumerate(whole[1:])]
            assert values[1:] == pytest.approx(expected, abs=1e-4)
            best = [float(row.max()) for row in table[: len(whole) - 1]]
            assert [max(top.values()) for top in tops[1:]] == pytest.approx(best, abs=1e-4)
            assert choice.text == reference.text(whole)
        assert completion.usage.completion_tokens == sum(map(len, answers))


def test_the_end_token_has_a_log_probability_though_it_has_no_text(complete: Ask, reference: Reference) -> None:
    """Scoring clients of an echoed prompt drop the answer's only token."""
    prompt = reference.ending()
    choice = complete(prompt=prompt, max_tokens=1, logprobs=1, echo=True).choices[0]
    assert (choice.text, choice.finish_reason) == (reference.text(prompt), "stop")
    assert choice.logprobs.tokens == [*map(chr, [token + 28 for token in prompt]), "</s>"]
    table = reference.logprobs(prompt)
    expected = [float(table[0, prompt[1]]), float(table[1, 2])]
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(expected, abs=1e-4)
    events = [event.choices[0] for event in complete(prompt=prompt, max_tokens=1, logprobs=1, stream=True)]
    assert [token for event in events if event.logprobs for token in event.logprobs.tokens] == ["</s>"]


def test_answers_have_exact_lengths_and_streams_count_their_tokens_for_load_generators(
    complete: Ask, reference: Reference
) -> None:
    kind: dict[str, Any] = {"prompt": reference.ending(), "max_tokens": 20}
    assert complete(**kind).choices[0].finish_reason == "stop"
    kind["extra_body"] = {"ignore_eos": True}
    whole = complete(**kind)
    assert (whole.usage.completion_tokens, whole.choices[0].finish_reason) == (20, "length")
    counts = {"include_usage": True, "continuous_usage_stats": True}
    events = list(complete(stream=True, stream_options=counts, **kind))
    token_counts = [event.usage.completion_tokens for event in events]
    assert token_counts == sorted(token_counts)
    assert token_counts[-2:] == [20, 20]
    assert {event.usage.prompt_tokens for event in events} == {2}
    assert "".join(event.choices[0].text for event in events[:-1]) == whole.choices[0].text


@pytest.mark.usefixtures("small", "freed")
def test_a_conversation_reuses_its_earlier_turns(
    chat: Ask, complete: Ask, reference: Reference, server: Server
) -> None:
    """Each turn computes its own tokens; a stream says so, too. Scores of a whole prompt need all of it."""
    assert server.ask("/health")[:2] == (200, {"status": "ok", "worker": "idle", "prefix_reuse": "on"})
    before, whole, cached = server.metric("zinfer_prompt_tokens_cached_total"), 0, 0
    messages: list[Any] = [{"role": "system", "content": "a long system prompt"}]
    for turn in ("hello", "and then?", "go on"):
        messages.append({"role": "user", "content": turn})
        text = "".join(f"[{message['role']}]{message['content']}" for message in messages) + "[assistant]"
        ids = reference.tokenizer(text, add_special_tokens=False).input_ids
        expected = reference.text(reference.greedy(ids, 9))
        answer = chat(messages=messages)
        assert answer.choices[0].message.content == expected
        count = answer.usage.prompt_tokens_details.cached_tokens
        assert whole <= count < len(ids) == answer.usage.prompt_tokens
        whole, cached = len(ids), cached + count
        messages.append({"role": "assistant", "content": expected})
    assert cached > whole
    server.wait(lambda: server.metric("zinfer_prompt_tokens_cached_total") == before + cached)
    *events, last = chat(messages=messages[:-1], n=2, stream=True, stream_options={"include_usage": True})
    for index in range(2):
        parts = [event.choices[0].delta.content or "" for event in events if event.choices[0].index == index]
        assert "".join(parts) == expected
    assert last.usage.prompt_tokens_details.cached_tokens == whole - 1
    scored = complete(prompt=ids, max_tokens=9, logprobs=1, echo=True)
    assert scored.usage.prompt_tokens_details.cached_tokens == 0
    assert scored.choices[0].text == reference.text(ids + reference.greedy(ids, 9))
    assert server.metric("zinfer_kv_cache_kept_bytes") > 0


def test_a_prompt_beyond_the_models_positions_is_refused(complete: Ask) -> None:
    for prompt in ("x" * 2048, [5] * 2048):
        with pytest.raises(openai.BadRequestError, match=r"2048 tokens and 1 of the answer exceed .* 2048 positions"):
            complete(prompt=prompt, max_tokens=None)


def test_answers_to_one_prompt_differ_and_a_seed_repeats_them(complete: Ask) -> None:
    first, again = (complete(prompt="Once", n=3, seed=5, temperature=None) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert len(set(texts)) == 3
    assert [choice.text for choice in again.choices] == texts
    assert first.usage.prompt_tokens == 4


def test_a_client_that_goes_away_frees_its_rows(
    complete: Ask, server: Server, worker: InlineWorker, reference: Reference
) -> None:
    """Others are answered while its rows run."""
    expected = reference.text(reference.greedy(reference.ids("ab"), 3))
    before = server.metric("zinfer_generated_tokens_total")
    for stream in (True, False):
        body = {"prompt": ["Once upon", "ab"], "max_tokens": 700, "stream": stream, "temperature": 0}
        with server.sent(body) as connection:
            server.wait(lambda: len(sequences(worker)) == 2)
            assert complete(prompt="ab", max_tokens=3).choices[0].text == expected
            assert sequences(worker), "its rows run meanwhile, unless a row has met an end token"
            connection.shutdown(socket.SHUT_RDWR)
        free(server, worker)
        assert server.metric("zinfer_generated_tokens_total") - before < 1400


def test_a_worker_that_dies_is_replaced_and_its_rows_go_on(
    directory: Path, reference: Reference, worker: InlineWorker, server: Server
) -> None:
    """The first worker dies with five rows in it: the stream that has sent text ends with an error, the others go on
    with the tokens that they have."""
    expected = [reference.text(reference.greedy(reference.ids(text), 20)) for text in PROMPTS]
    workers: list[InlineWorker] = []
    steps = 0
    engine = worker.session.engine

    def loads(session: Session, _request: Load) -> Facts:
        session.engine = engine
        return Facts()

    def dies(session: Session, request: BatchStep) -> BatchStepped:
        nonlocal steps
        steps += session.scheduler is not None and len(session.scheduler.sequences) == 5
        if steps == 4:
            raise WorkerDied("crashed", "killed by SIGKILL")
        return batch_step(session, request)

    def make() -> InlineWorker:
        instead: dict[Any, Any] = {Load: loads} | ({} if workers else {BatchStep: dies})
        workers.append(InlineWorker.around(engine, instead=instead))
        return workers[-1]

    server.wait(lambda: server.dispatcher.unfinished == 0)
    with serving(served_plan(directory), make) as other:
        with client_of(other) as client:
            complete: Ask = partial(client.completions.create, model=NAME, temperature=0)
            stream = complete(prompt=PROMPTS[0], stream=True, max_tokens=700)
            assert next(stream).choices[0].text
            whole = complete(prompt=PROMPTS, max_tokens=20)
            assert [choice.text for choice in whole.choices] == expected
            with pytest.raises(openai.APIError, match="the worker failed: crashed"):
                list(stream)
        assert len(workers) == 2
        assert other.metric("zinfer_worker_restarts_total") == 1
        free(other, workers[1])


def test_an_idle_server_sleeps(server: Server) -> None:
    server.wait(lambda: server.dispatcher.unfinished == 0)
    time.sleep(0.1)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.1
