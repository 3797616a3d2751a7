"""OpenAI batch format: requests that are understood, requests that are refused and how, and ids that depend on the
lines alone."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import mentions
from zinfer.core.request import Failure, Sampling, TokenScore
from zinfer.generation.tokenizer_process import Refusal
from zinfer.job.batch import openai
from zinfer.job.batch.openai import BatchLine, Done, Fault, answer, decode, encode, failed, read_requests, refusal
from zinfer.job.openai import chat_logprobs, text_logprobs
from zinfer.record.jsonl import Garbled

TALK = [{"role": "user", "content": "hi"}]


def line(body: Any, chat: bool = False, **fields: Any) -> bytes:
    url = "/v1/chat/completions" if chat else "/v1/completions"
    return json.dumps({"custom_id": "a", "method": "POST", "url": url, "body": body} | fields).encode()


def understood(content: bytes) -> BatchLine:
    (request,) = read_requests(content)
    assert isinstance(request, BatchLine)
    return request


def refused(content: bytes) -> Fault:
    (fault,) = read_requests(content)
    assert isinstance(fault, Fault)
    return fault


def test_the_bytes_of_a_token_are_told_also_of_a_part_of_a_character() -> None:
    scores = [TokenScore(token="é", logprob=-1.0, top=[("bytes:\\xe6\\x97", -2.0), ("\ud800", -3.0)])]
    (score,) = chat_logprobs(scores)["content"]
    assert score["bytes"] == [0xC3, 0xA9]
    assert [top["bytes"] for top in score["top_logprobs"]] == [[0xE6, 0x97], [ord("?")]]
    parts = [TokenScore(token=token, logprob=-1.0) for token in ("ab", "bytes:\\xe6", "c")]
    assert text_logprobs(parts, 0)["text_offset"] == [0, 2, 3]


def test_a_request_is_understood() -> None:
    body = {
        "model": "gpt-4o", "prompt": "Once", "max_tokens": 9, "temperature": 0, "top_p": 0.5, "seed": 3, "stop": "\n",
        "n": 1, "stream": False, "logprobs": None, "user": "me", "logit_bias": {}, "presence_penalty": 0.0,
        "repetition_penalty": 1.0, "top_k": -1, "min_p": 0.0, "min_tokens": 0, "skip_special_tokens": True,
    }  # fmt: skip
    request = understood(line(body))
    assert (request.custom_id, request.prompt) == ("a", "Once")
    assert request.asked[:6] == (False, ("Once",), 9, Sampling(top_p=0.5), ("\n",), "3")
    plain = understood(line({"prompt": ""}))
    assert plain.asked[2:5] == (None, Sampling(temperature=1.0), ())
    assert plain.id == f"batch_req_{plain.asked.seed}"
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    talk = [{"role": "system", "content": parts}, {"role": "user", "content": "x", "name": "me"}]
    chat = understood(line({"messages": talk, "max_tokens": 5, "max_completion_tokens": 7}, chat=True))
    assert (chat.asked.chat, chat.asked.output_len) == (True, 7)
    assert chat.prompt == {"messages": [{"role": "system", "content": "one two"}, talk[1]]}


@pytest.mark.parametrize(
    ("content", "code", "message"),
    [
        (b'{"custom_id": "a"', "invalid_json_line", "line 1 is not valid JSON"),
        (b"[1]", "invalid_json_line", "not a JSON object"),
        (b"\xff\xfe", "invalid_json_line", "not valid JSON"),
        (b"[" * 100_000, "invalid_json_line", "not valid JSON"),
        (line({"prompt": "x", "temperature": float("nan")}), "invalid_json_line", "not valid JSON"),
        (line({"prompt": "x"}, custom_id=7), "missing_required_parameter", "custom_id"),
        (line({"prompt": "x"}, method="GET"), "invalid_method", "POST"),
        (line({"prompt": "x"}, url="/v1/embeddings"), "invalid_url", "/v1/chat/completions"),
        (line({"prompt": "x"}, url=["/v1/completions"]), "invalid_url", "/v1/chat/completions"),
        (line(None), "missing_required_parameter", "body"),
        (line({}), "missing_required_parameter", "prompt"),
        (line({"messages": TALK}), "unsupported_parameter", "messages"),
        (line({"prompt": "x"}, chat=True), "unsupported_parameter", "prompt"),
        (line({"prompt": ["x", "y"]}), "invalid_type", "prompt must be"),
        (line({"prompt": "x", "n": 2}), "unsupported_parameter", "n=2 is not supported"),
        (line({"prompt": "x", "max_tokens": 1.5}), "invalid_value", "max_tokens"),
        (line({"prompt": "x", "temperature": -1}), "invalid_value", "temperature must be a number from 0 to 2"),
        (line({"prompt": "x", "top_p": 1.1}), "invalid_value", "top_p"),
        (line({"prompt": "x", "seed": "s"}), "invalid_value", "seed must be a whole number"),
        (line({"prompt": "x", "stop": {"a": 1}}), "invalid_value", "stop"),
        (line({"prompt": "\ud83d"}), "invalid_value", "prompt has half of a surrogate pair"),
        (line({"prompt": "x", "stop": "\udc00"}), "invalid_value", "stop has half of a surrogate pair"),
        (line({"messages": [{"role": "user", "content": "\ud83d"}]}, chat=True), "invalid_value", "surrogate"),
        (line({"messages": ["hi"]}, chat=True), "invalid_value", "a role"),
        (line({"messages": [{"role": "user"}]}, chat=True), "unsupported_parameter", "content must be text"),
        (line({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, chat=True),
         "unsupported_parameter", "content must be text"),
    ],
)  # fmt: skip
def test_a_bad_line_says_why(content: bytes, code: str, message: str) -> None:
    fault = refused(content)
    assert fault.failure.code == code
    assert message in fault.failure.message


def test_the_good_lines_around_a_bad_one_are_kept() -> None:
    good = [line({"prompt": "x"}, custom_id=name) for name in "abc"]
    content = b"\xef\xbb\xbf" + b"\n".join([good[0], b"", b"  ", b"broken", good[1] + b"\r", good[0], good[2]])
    requests = read_requests(content)
    assert [item.custom_id for item in requests] == ["a", None, "b", "a", "c"]
    assert [type(item) for item in requests] == [BatchLine, Fault, BatchLine, Fault, BatchLine]
    repeated = requests[3]
    assert isinstance(repeated, Fault)
    assert repeated.failure.code == "duplicate_custom_id"
    assert mentions(repeated.failure.message, "line 6", "line 1", "'a'")


@pytest.mark.parametrize("value", [b"9" * 25, b'{"a":' * 200 + b"1" + b"}" * 200, b"NaN", b"1e999", b'{"a":1,"a":2}'])
def test_a_line_that_is_refused_as_json_keeps_its_custom_id(value: bytes) -> None:
    """An answer without it belongs to nobody: the caller finds neither the answer nor the fault."""
    begun = b'{"custom_id": "a \\u00e9\\"}", "method": "POST", "url": "/v1/completions", "body": '
    fault = refused(begun + b'{"prompt": "x", "custom_id": "inner", "seed": ' + value + b"}}")
    assert (fault.custom_id, fault.failure.code) == ('a é"}', "invalid_json_line")
    assert json.loads(encode(refusal(fault)))["custom_id"] == 'a é"}'


@pytest.mark.parametrize(
    "content",
    [b'{"custom_id": 7, "x": 1e999}', b'{"custom_id": "", "x": 1e999}', b'["custom_id", "a", 1e999]',
     b'{"custom_id": "a', b'{"custom_id": "a", "x": "\xff"}', b'{"custom_id": "a", "x": ' + b"[" * (17 << 20)],
)  # fmt: skip
def test_a_line_without_a_custom_id_is_a_fault_all_the_same(content: bytes) -> None:
    fault = refused(content)
    assert (fault.custom_id, fault.failure.code) == (None, "invalid_json_line")


def test_a_line_that_cannot_be_parsed_has_its_custom_id_for_itself() -> None:
    faults = read_requests(b'{"custom_id": "a", "x": 1e999}\n' + line({"prompt": "x"}))
    assert [fault.custom_id for fault in faults] == ["a", "a"]
    assert [fault.failure.code for fault in faults if isinstance(fault, Fault)] == [
        "invalid_json_line",
        "duplicate_custom_id",
    ]


def test_ids_depend_on_the_lines_alone() -> None:
    lines = [line({"prompt": "x"}, custom_id=name) for name in "ab"]
    ids = [request.id for request in read_requests(b"\n".join([*lines, lines[0], b"broken", b"broken"]))]
    assert len(set(ids)) == 5
    other = line({"prompt": "first"}, custom_id="first")
    moved = read_requests(b"\r\n".join([other, b"broken", lines[0], lines[1]]))
    assert [moved[2].id, moved[3].id, moved[1].id] == [ids[0], ids[1], ids[3]]


def test_answers_are_those_of_the_endpoint() -> None:
    text, chat = understood(line({"prompt": "x"})), understood(line({"messages": TALK}, chat=True))
    record = answer(text, "é", "stop", (3, 2), "llama", 1700000000)
    assert list(record) == ["id", "custom_id", "response", "error"]
    assert (record["custom_id"], record["error"], record["response"]["status_code"]) == ("a", None, 200)
    body = record["response"]["body"]
    assert body["object"] == "text_completion"
    assert body["choices"] == [{"index": 0, "text": "é", "logprobs": None, "finish_reason": "stop"}]
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    assert body["created"] == 1700000000
    talk = answer(chat, "yes", "length", (3, 2), "llama", 0)["response"]["body"]
    assert talk["object"] == "chat.completion"
    assert talk["choices"][0]["message"] == {"role": "assistant", "content": "yes"}
    assert talk["id"].startswith("chatcmpl-")
    assert encode(record).isascii()
    assert decode(encode(record)) == Done(text.id, True, 2)


def test_errors_stand_where_readers_look_for_them() -> None:
    fault, request = refused(line({"prompt": "x", "n": 2})), understood(line({"prompt": "x"}))
    record = refusal(fault)
    error = {"code": "unsupported_parameter", "message": "n=2 is not supported"}
    assert record["response"]["status_code"] == 400
    assert record["response"]["body"] == {"error": {"type": "invalid_request_error", "param": "n"} | error}
    assert record["error"] == error
    lost = failed(request, Failure(code="oom_gpu", message="no room"))
    assert (lost["response"], lost["error"]) == (None, {"code": "oom_gpu", "message": "no room"})
    assert decode(encode(record)) == Done(fault.id, False, 0)
    assert decode(encode(lost)) == Done(request.id, False, 0)


@given(st.binary(max_size=60) | st.builds(lambda body: line(body), st.dictionaries(st.text(), st.integers())))
def test_no_line_raises(content: bytes) -> None:
    for request in read_requests(content):
        if isinstance(request, Fault):
            assert decode(encode(refusal(request))).id == request.id


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"{}", b'{"id":1}', b'{"id":"x","custom_id":"a","response":null}', b'"x"', b"[" * 9999],
)
def test_a_damaged_output_is_recognised(content: bytes) -> None:
    with pytest.raises(Garbled):
        decode(content)


def test_rows_get_the_tokens_that_they_may_have() -> None:
    lines = [line({"prompt": "x"} | more, custom_id=str(key)) for key, more in enumerate(
        ({}, {"max_tokens": 10}, {}, {"max_tokens": 11}, {"max_tokens": 5}, {}, {"max_tokens": 4})
    )]  # fmt: skip
    asked = [request for request in read_requests(b"\n".join(lines)) if isinstance(request, BatchLine)]
    made = {asked[6].id: [1, 2, 3]}
    no_template = Refusal("invalid_prompt", "no template")
    prompts = [n if isinstance(n, Refusal) else [7] * n for n in (10, 90, 95, 90, no_template, 100, 3)]
    rows, faults = openai.requests_of(asked, prompts, 100, 8, 20, made)
    lengths = [(len(row.prompt_ids), row.limit) for row in rows]
    assert lengths == [(10, 20), (90, 10), (95, 5), (3, 4)]
    assert [(fault.custom_id, fault.failure.code) for fault in faults] == [
        ("3", "context_length_exceeded"), ("4", "invalid_prompt"), ("5", "context_length_exceeded")
    ]  # fmt: skip
    assert "100 positions" in faults[0].failure.message
    assert (rows[3].output_ids, rows[3].need) == ([1, 2, 3], (6, 1))
    assert openai.requests_of(asked[:1], [range(10**6)], None, 8, 20, {})[0][0].limit == 20
    for wrong in ([1, 2, 3, 4], [1, 8], [-1]):  # as many tokens as its limit, or none of the model's
        begun = openai.requests_of(asked, prompts, 100, 8, 20, {asked[6].id: wrong})[0][3]
        assert (begun.output_ids, begun.need) == ([], (3, 4))
    kept, left = openai.split(asked, rows, [True, False, True, True], "the machine")
    assert [row.key for row in kept] == [0, 2, 6]
    assert "memory" in left[0].failure.message
