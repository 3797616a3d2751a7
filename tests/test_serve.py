"""`zinfer serve` with a real engine: the client of OpenAI gets the tokens and log-probabilities of `transformers`."""

import json
import shutil
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests import Checkpoints, Patch
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


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=60) as connected:
        yield connected


@pytest.fixture
def small(monkeypatch: Patch) -> None:
    """Make decisions that are made for thousands of tokens with few."""
    monkeypatch.setattr(tuning, "TUNED", replace(tuning.TUNED, min_prompt_tokens=6, min_kept=2))
    monkeypatch.setattr(PassTimes, "room", lambda *_: 11)


def free(server: Server, worker: InlineWorker) -> None:
    """Wait until no row is left anywhere: neither in the server, nor in the dispatcher, worker and engine."""
    server.wait(lambda: not server.server.desk.exchanges and server.dispatcher.unfinished == 0)
    session = worker.session
    server.wait(lambda: not (sequences(worker) or session.engine.batches))


def sequences(worker: InlineWorker) -> dict[int, Sequence]:
    """Return the worker's unfinished rows, by key."""
    scheduler = worker.session.scheduler
    return {} if scheduler is None else scheduler.sequences


@pytest.mark.usefixtures("small")
def test_greedy_text_is_that_of_transformers(
    client: openai.OpenAI, reference: Reference, server: Server, worker: InlineWorker
) -> None:
    """Texts, token ids and a stream get the same answers. They are asked at once."""
    expected = [reference.text(reference.greedy(reference.ids(text), 12)) for text in PROMPTS]
    ids = [reference.ids(text) for text in PROMPTS]
    kind: dict[str, Any] = {"model": NAME, "max_tokens": 12, "temperature": 0}
    stream = client.completions.create(prompt=PROMPTS[2], stream=True, stream_options={"include_usage": True}, **kind)
    texts = client.completions.create(prompt=PROMPTS, **kind)
    assert [choice.text for choice in texts.choices] == expected
    assert [choice.index for choice in texts.choices] == [0, 1, 2, 3]
    assert texts.usage is not None
    assert texts.usage.prompt_tokens == sum(map(len, ids))
    assert [choice.text for choice in client.completions.create(prompt=ids, **kind).choices] == expected
    assert client.completions.create(prompt=ids[3], **kind).choices[0].text == expected[3]
    *events, last = stream
    assert "".join(event.choices[0].text for event in events) == expected[2]
    assert sum(bool(event.choices[0].text) for event in events) > 3
    assert [event.choices[0].finish_reason for event in events][-1] in ("length", "stop")
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.prompt_tokens == len(ids[2])
    free(server, worker)


def test_parameters_of_one_request_do_not_touch_another(
    client: openai.OpenAI, reference: Reference, server: Server, worker: InlineWorker
) -> None:
    """Penalties, bias and ends are each request's own."""
    kind: dict[str, Any] = {"model": NAME, "max_tokens": 12, "temperature": 0}
    ids = [reference.ids(text) for text in PROMPTS]
    expected = [reference.text(reference.greedy(prompt, 12)) for prompt in ids]
    penalised = reference.greedy(ids[0], 12, repetition_penalty=0.5)
    letter = reference.ids("e")[-1]
    asked: list[dict[str, Any]] = [{"prompt": prompt} for prompt in ids]
    asked += [{"prompt": ids[0], "extra_body": {"repetition_penalty": 0.5}}]
    asked += [{"prompt": ids[1], "logit_bias": {str(letter): 100}}]
    biased = {"logit_bias": {str(letter): 100}, "extra_body": {"stop_token_ids": [letter], "min_tokens": 3}}
    asked += [{"prompt": ids[2], **biased}, {"prompt": ids[3], "frequency_penalty": -2, "presence_penalty": -2}]
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(lambda fields: client.completions.create(**kind | fields), asked))
    texts = [answer.choices[0].text for answer in answers]
    assert texts[:5] == [*expected, reference.text(penalised)]
    assert texts[4] != expected[0]
    assert texts[5] == reference.text([letter] * 12)
    usage = answers[6].usage
    assert usage is not None
    assert (answers[6].choices[0].finish_reason, usage.completion_tokens) == ("stop", 3)
    assert texts[7] != expected[3]
    with pytest.raises(openai.BadRequestError, match="min_p must be a number from 0 to 1"):
        client.completions.create(prompt="x", extra_body={"min_p": 7}, **kind)
    free(server, worker)


def test_a_stop_ends_the_text_and_no_part_of_it_is_streamed(client: openai.OpenAI, reference: Reference) -> None:
    whole = reference.text(reference.greedy(reference.ids(PROMPTS[0]), 12))
    stop = whole[5:8]
    expected = whole[: whole.index(stop)]
    kind: dict[str, Any] = {"model": NAME, "prompt": PROMPTS[0], "max_tokens": 12, "temperature": 0, "stop": [stop]}
    choice = client.completions.create(**kind).choices[0]
    assert (choice.text, choice.finish_reason) == (expected, "stop")
    assert "".join(event.choices[0].text for event in client.completions.create(stream=True, **kind)) == expected


def test_a_chat_is_rendered_and_streamed(client: openai.OpenAI, reference: Reference) -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    rendered = reference.tokenizer("[user]hi[assistant]", add_special_tokens=False).input_ids
    expected = reference.text(reference.greedy(rendered, 9))
    kind: dict[str, Any] = {"model": NAME, "messages": messages, "max_completion_tokens": 9, "temperature": 0}
    whole = client.chat.completions.create(logprobs=True, top_logprobs=2, **kind)
    message = whole.choices[0].message
    assert (message.role, message.content) == ("assistant", expected)
    assert whole.choices[0].logprobs is not None
    tops = [
        [top_logprob.logprob for top_logprob in token.top_logprobs] for token in whole.choices[0].logprobs.content or ()
    ]
    assert all(len(top) == 2 and top[0] > top[1] for top in tops)
    assert whole.usage is not None
    assert len(tops) == whole.usage.completion_tokens
    events = list(client.chat.completions.create(stream=True, **kind))
    assert events[0].choices[0].delta.role == "assistant"
    assert "".join(event.choices[0].delta.content or "" for event in events) == expected
    turns: Any = [*messages, message.model_dump(), {"role": "user", "content": "go on"}]  # with all its empty fields
    ids = reference.tokenizer(f"[user]hi[assistant]{expected}[user]go on[assistant]", add_special_tokens=False)
    again = client.chat.completions.create(**kind | {"messages": turns, "max_completion_tokens": 3})
    assert again.choices[0].message.content == reference.text(reference.greedy(ids.input_ids, 3))
    bad: Any = [{"role": "bad", "content": ""}]
    with pytest.raises(openai.BadRequestError, match="no such role"):
        client.chat.completions.create(model=NAME, messages=bad)


def test_answers_to_one_prompt_have_it_read_once(directory: Path, monkeypatch: Patch) -> None:
    plan = served_plan(directory)
    tokenizer, read = TokenizerProcess(plan.model), list[str]()
    quickly = tokenizer.encode_quickly

    def watched(prompt: Any) -> Any:
        read.append(prompt)
        return quickly(prompt)

    monkeypatch.setattr(tokenizer, "encode_quickly", watched)
    with serving(plan, lambda: InlineWorker(Stream), tokenizer=tokenizer) as server:
        _, answer, _ = server.ask("/v1/completions", {"prompt": ["ab", "cd"], "n": 5, "max_tokens": 1})
        assert len(answer["choices"]) == 10
        assert answer["usage"]["prompt_tokens"] == 4
    assert read == ["ab", "cd"]


@pytest.mark.usefixtures("small")
def test_log_probabilities_of_an_echoed_prompt_are_those_of_transformers(
    client: openai.OpenAI, reference: Reference, monkeypatch: Patch
) -> None:
    """Prompts come in chunks, with answers of zero, one and three tokens."""
    monkeypatch.setattr(tuning, "TUNED", replace(tuning.TUNED, scored_logits=128 * 12))
    ids = [reference.ids(text) for text in PROMPTS]
    for count in (0, 1, 3):
        completion = client.completions.create(
            model=NAME, prompt=ids, max_tokens=count, temperature=0, logprobs=1, echo=True, seed=1
        )
        for prompt, choice in zip(ids, completion.choices, strict=True):
            whole = prompt + reference.greedy(prompt, count) if count else prompt
            table = reference.logprobs(whole)
            assert choice.logprobs is not None
            values, tops = choice.logprobs.token_logprobs or [], choice.logprobs.top_logprobs or []
            assert values[0] is None
            assert len(values) == len(whole)
            expected = [float(table[index, token]) for index, token in enumerate(whole[1:])]
            assert values[1:] == pytest.approx(expected, abs=1e-4)
            best = [float(row.max()) for row in table[: len(whole) - 1]]
            assert [max(top.values()) for top in tops[1:]] == pytest.approx(best, abs=1e-4)
            assert choice.text == reference.text(whole)
        assert completion.usage is not None
        assert completion.usage.completion_tokens == (
            0 if not count else sum(len(reference.greedy(prompt, count)) for prompt in ids)
        )


def test_the_end_token_has_a_log_probability_though_it_has_no_text(client: openai.OpenAI, reference: Reference) -> None:
    """Scoring clients of an echoed prompt drop the answer's only token."""
    prompt = reference.ending()
    kind: dict[str, Any] = {"model": NAME, "max_tokens": 1, "temperature": 0}
    choice = client.completions.create(prompt=prompt, logprobs=1, echo=True, **kind).choices[0]
    assert (choice.text, choice.finish_reason) == (reference.text(prompt), "stop")
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == [*map(chr, [token + 28 for token in prompt]), "</s>"]
    table = reference.logprobs(prompt)
    expected = [float(table[0, prompt[1]]), float(table[1, 2])]
    assert (choice.logprobs.token_logprobs or [])[1:] == pytest.approx(expected, abs=1e-4)
    events = list(client.completions.create(prompt=prompt, logprobs=1, stream=True, **kind))
    assert [
        token for event in events if (logprobs := event.choices[0].logprobs) for token in logprobs.tokens or ()
    ] == ["</s>"]


def test_answers_have_exact_lengths_and_streams_count_their_tokens_for_load_generators(
    client: openai.OpenAI, reference: Reference
) -> None:
    prompt = reference.ending()
    kind: dict[str, Any] = {"model": NAME, "prompt": prompt, "max_tokens": 20, "temperature": 0}
    assert client.completions.create(**kind).choices[0].finish_reason == "stop"
    kind["extra_body"] = {"ignore_eos": True}
    whole = client.completions.create(**kind)
    assert whole.usage is not None
    assert (whole.usage.completion_tokens, whole.choices[0].finish_reason) == (20, "length")
    counts: Any = {"include_usage": True, "continuous_usage_stats": True}
    events = list(client.completions.create(stream=True, stream_options=counts, **kind))
    usages = [event.usage for event in events if event.usage is not None]
    assert len(usages) == len(events)
    token_counts = [usage.completion_tokens for usage in usages]
    assert token_counts == sorted(token_counts)
    assert token_counts[-2:] == [20, 20]
    assert {usage.prompt_tokens for usage in usages} == {2}
    assert "".join(event.choices[0].text for event in events[:-1]) == whole.choices[0].text


@pytest.mark.usefixtures("small")
def test_a_conversation_reuses_its_earlier_turns(
    client: openai.OpenAI, reference: Reference, server: Server, worker: InlineWorker
) -> None:
    """Each turn computes its own tokens; a stream says so, too. Scores of a whole prompt need all of it."""
    assert server.ask("/health")[:2] == (200, {"status": "ok", "worker": "idle", "prefix_reuse": "on"})
    kind: dict[str, Any] = {"model": NAME, "max_tokens": 9, "temperature": 0}
    before, whole, cached = server.metric("zinfer_prompt_tokens_cached_total"), 0, 0
    messages: list[Any] = [{"role": "system", "content": "a long system prompt"}]
    for turn in ("hello", "and then?", "go on"):
        messages.append({"role": "user", "content": turn})
        text = "".join(f"[{message['role']}]{message['content']}" for message in messages) + "[assistant]"
        ids = reference.tokenizer(text, add_special_tokens=False).input_ids
        expected = reference.text(reference.greedy(ids, 9))
        answer = client.chat.completions.create(messages=messages, **kind)
        assert answer.choices[0].message.content == expected
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        count = answer.usage.prompt_tokens_details.cached_tokens or 0
        assert whole <= count < len(ids) == answer.usage.prompt_tokens
        whole, cached = len(ids), cached + count
        messages.append({"role": "assistant", "content": expected})
    assert cached > whole
    server.wait(lambda: server.metric("zinfer_prompt_tokens_cached_total") == before + cached)
    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    *events, last = client.chat.completions.create(messages=messages[:-1], n=2, **options, **kind)
    for index in range(2):
        parts = [event.choices[0].delta.content or "" for event in events if event.choices[0].index == index]
        assert "".join(parts) == expected
    assert last.usage.prompt_tokens_details.cached_tokens == whole - 1
    scored = client.completions.create(prompt=ids, logprobs=1, echo=True, **kind)
    assert scored.usage is not None
    assert scored.usage.prompt_tokens_details is not None
    assert scored.usage.prompt_tokens_details.cached_tokens == 0
    assert scored.choices[0].text == reference.text(ids + reference.greedy(ids, 9))
    assert server.metric("zinfer_kv_cache_kept_bytes") > 0
    free(server, worker)


def test_a_prompt_beyond_the_models_positions_is_refused(client: openai.OpenAI) -> None:
    for prompt in ("x" * 2048, [5] * 2048):
        with pytest.raises(openai.BadRequestError, match=r"2048 tokens and 1 of the answer exceed .* 2048 positions"):
            client.completions.create(model=NAME, prompt=prompt)


def test_answers_to_one_prompt_differ_and_a_seed_repeats_them(client: openai.OpenAI) -> None:
    kind: dict[str, Any] = {"model": NAME, "prompt": "Once", "max_tokens": 12, "n": 3, "seed": 5}
    first, again = (client.completions.create(**kind) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert len(set(texts)) == 3
    assert [choice.text for choice in again.choices] == texts
    assert first.usage is not None
    assert first.usage.prompt_tokens == 4


def test_a_client_that_goes_away_frees_its_rows(
    client: openai.OpenAI, server: Server, worker: InlineWorker, reference: Reference
) -> None:
    """Others are answered while its rows run."""
    expected = reference.text(reference.greedy(reference.ids("ab"), 3))
    before = server.metric("zinfer_generated_tokens_total")
    for stream in (True, False):
        connection = server.connect()
        body = {"prompt": ["Once upon", "ab"], "max_tokens": 700, "stream": stream, "temperature": 0}
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        server.wait(lambda: len(sequences(worker)) == 2)
        short = client.completions.create(model=NAME, prompt="ab", max_tokens=3, temperature=0)
        assert short.choices[0].text == expected
        assert sequences(worker), "its rows run meanwhile, unless a row has met an end token"
        connection.sock.shutdown(socket.SHUT_RDWR)
        connection.close()
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
        with openai.OpenAI(base_url=other.url, api_key="none", max_retries=0, timeout=60) as client:
            kind: dict[str, Any] = {"model": NAME, "temperature": 0}
            stream = client.completions.create(prompt=PROMPTS[0], stream=True, max_tokens=700, **kind)
            assert next(stream).choices[0].text
            whole = client.completions.create(prompt=PROMPTS, max_tokens=20, **kind)
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
