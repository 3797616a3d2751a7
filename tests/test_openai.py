"""Bodies as clients send them: what has no effect is taken, what has one is carried out, or refused by name."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from zinfer.core.request import Sampling
from zinfer.job.openai import Asked, Refused, ServerLimits, read_body

SERVED = ServerLimits(vocab_size=100, answers=64)
TALK = [{"role": "user", "content": "hi"}]
# What vLLM's clients send of its request with nothing set, beside OpenAI's own parameters.
VLLM = {
    "frequency_penalty": 0.0, "presence_penalty": 0, "repetition_penalty": 1.0, "length_penalty": 1.0, "top_k": -1,
    "min_p": 0.0, "n": 1, "best_of": 1, "logit_bias": {}, "use_beam_search": False, "early_stopping": False,
    "stop": [], "stop_token_ids": [], "bad_words": [], "include_stop_str_in_output": False, "ignore_eos": False,
    "min_tokens": 0, "skip_special_tokens": True, "spaces_between_special_tokens": True, "priority": 0,
    "truncate_prompt_tokens": None, "prompt_logprobs": None, "allowed_token_ids": None, "return_token_ids": False,
    "return_tokens_as_token_ids": False, "guided_json": None, "structured_outputs": None, "cache_salt": None,
    "kv_transfer_params": None, "vllm_xargs": None, "response_format": {"type": "text"}, "seed": None,
}  # fmt: skip
# Of OpenAI's request, as its client, LangChain and LiteLLM send it.
OPENAI = {
    "user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "safety_identifier": "x",
    "prompt_cache_key": "k", "prompt_cache_retention": "24h", "prompt_cache_options": {"mode": "implicit"},
    "parallel_tool_calls": True, "verbosity": "medium", "prediction": None, "audio": None, "reasoning_effort": None,
    "modalities": ["text"], "tools": [], "functions": [], "tool_choice": "auto", "function_call": "none",
    "web_search_options": None, "moderation": None, "logprobs": False, "top_logprobs": 0, "stream": False,
    "stream_options": {"include_usage": False, "include_obfuscation": True}, "temperature": None, "top_p": None,
    "max_tokens": None, "max_completion_tokens": None,
}  # fmt: skip


def chat(served: bool = True, **fields: Any) -> Asked:
    return read_body({"messages": TALK} | fields, True, SERVED if served else None)


def text(served: bool = True, **fields: Any) -> Asked:
    return read_body({"prompt": "x"} | fields, False, SERVED if served else None)


def parsed(message: dict[str, Any]) -> Any:
    (talk,) = chat(messages=[message]).prompts
    assert isinstance(talk, dict)
    return talk["messages"][0]


@pytest.mark.parametrize("served", [True, False])
def test_defaults_and_empty_values_change_nothing(served: bool) -> None:
    alone = chat(served)
    assert chat(served, **VLLM, **OPENAI, add_special_tokens=False, add_generation_prompt=True) == alone
    assert chat(served, **dict.fromkeys([*VLLM, *OPENAI, "frobnicate"])) == alone
    completion = {key: value for key, value in OPENAI.items() if key not in ("top_logprobs", "modalities")}
    assert text(served, **VLLM, **completion, add_special_tokens=True, suffix="", echo=False) == text(served)
    empties: tuple[Any, ...] = ("", [], {})
    assert all(chat(served, frobnicate=empty, tools=empty) == alone for empty in empties)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_beam_search", True), ("spaces_between_special_tokens", False), ("skip_special_tokens", False),
        ("add_special_tokens", True), ("add_generation_prompt", False), ("continue_final_message", True),
        ("length_penalty", 2), ("include_stop_str_in_output", True), ("best_of", 2), ("return_token_ids", True),
        ("guided_json", {"type": "object"}), ("functions", [{"name": "f"}]), ("function_call", {"name": "f"}),
        ("audio", {"voice": "x"}), ("modalities", ["text", "audio"]), ("prediction", {"type": "content"}),
        ("verbosity", "low"), ("web_search_options", {}), ("cache_salt", "x"), ("echo", True), ("chat_template", "x"),
        ("priority", True), ("frobnicate", False), ("frobnicate", "x" * 10_000_000), ("frobnicate", [1] * 10_000),
        ("frobnicate", {"a": "x" * 10_000}), ("frobnicate", 10**18),
    ],
)  # fmt: skip
def test_a_value_with_an_effect_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(Refused, match=f"^{key}.* is not supported$") as refused:
        chat(**{key: value})
    assert (refused.value.code, refused.value.param) == ("unsupported_parameter", key)
    assert len(str(refused.value)) < 100, "a long value is shown in part"


SAMPLING: dict[str, Any] = {
    "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.2, "presence_penalty": -2,
    "frequency_penalty": 2, "logit_bias": {"5": 1, "99": -100.0}, "stop_token_ids": [3, 0], "min_tokens": 4,
}  # fmt: skip


@pytest.mark.parametrize("served", [True, False])
@pytest.mark.parametrize("read", [chat, text])
def test_sampling_is_taken_from_a_body(served: bool, read: Callable[..., Asked]) -> None:
    asked = read(served, **SAMPLING, seed=9)
    wanted = SAMPLING | {"logit_bias": ((5, 1.0), (99, -100.0)), "stop_token_ids": (3, 0), "seed": "9"}
    sampling = asked.request([1], 8).sampling
    assert sampling == Sampling(**wanted)
    assert sampling.edits
    assert read(served).sampling == Sampling(temperature=1.0)
    assert not read(served, top_k=3, stop_token_ids=[3]).sampling.edits


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("top_k", -2, "top_k must be a whole number from 0"), ("top_k", 1.5, "whole"), ("top_k", True, "whole"),
        ("min_p", 1.1, "min_p must be a number from 0 to 1"), ("min_p", "0", "number"),
        ("repetition_penalty", 0, "from 0.01 to 100"), ("presence_penalty", 2.1, "from -2 to 2"),
        ("frequency_penalty", float("nan"), "from -2 to 2"), ("logit_bias", [5], "an object of at most 1,024 token"),
        ("logit_bias", {"x": 1}, "an object"), ("logit_bias", {"-1": 1}, "an object"),
        ("logit_bias", {"5": 1, "05": 2}, "an object"), ("logit_bias", {"9" * 5000: 1}, "an object"),
        ("logit_bias", {str(key): 1 for key in range(1025)}, "1,024"), ("logit_bias", {"5": 101}, "from -100 to 100"),
        ("logit_bias", {"5": None}, "number"), ("logit_bias", {"100": 1}, "token 100: ids are from 0 to 99"),
        ("stop_token_ids", 3, "a list of at most 128"), ("stop_token_ids", [True], "a list"),
        ("stop_token_ids", [1] * 129, "a list"), ("stop_token_ids", [-1], "token -1"),
        ("stop_token_ids", [100], "token 100"), ("min_tokens", -1, "whole"), ("min_tokens", 17, "exceeds max_tokens"),
    ],
)  # fmt: skip
def test_wrong_sampling_is_refused_by_name(key: str, value: Any, why: str) -> None:
    with pytest.raises(Refused, match=why) as refused:
        chat(**{key: value}, max_tokens=16)
    assert (refused.value.param, refused.value.status) == (key, 400)
    assert len(str(refused.value)) < 100


def test_settings_of_the_chat_template_go_with_the_messages() -> None:
    (asked,) = chat(chat_template_kwargs={"enable_thinking": False}, reasoning_effort="low").prompts
    assert asked == {"messages": TALK, "template": {"reasoning_effort": "low", "enable_thinking": False}}
    wrong: list[tuple[str, Any]] = [
        ("reasoning_effort", "lots"),
        ("reasoning_effort", 0),
        ("chat_template_kwargs", [1]),
    ]
    for key, value in wrong:
        with pytest.raises(Refused, match=f"^{key} must be") as refused:
            chat(**{key: value})
        assert refused.value.param == key
        with pytest.raises(Refused, match=f"^{key}.* is not supported$"):
            text(**{key: value})
    with pytest.raises(Refused, match="add_special_tokens=false"):  # of a chat true is: its template has them
        text(add_special_tokens=False)


def test_options_of_a_stream_need_one_only_if_they_ask_for_something() -> None:
    for options in (None, {}, {"include_usage": None, "include_obfuscation": True}, {"continuous_usage_stats": False}):
        assert chat(stream_options=options) == chat()
    asked = chat(stream=True, stream_options={"include_usage": True, "include_obfuscation": False})
    assert (asked.usage, asked.usages) == (True, False)
    with pytest.raises(Refused, match="goes with stream only"):
        chat(stream_options={"include_usage": True})
    with pytest.raises(Refused, match=r"stream_options\.frobnicate=1 is not supported"):
        chat(stream=True, stream_options={"frobnicate": 1})


def test_an_earlier_answer_is_taken_as_clients_keep_it() -> None:
    """All fields of OpenAI's and vLLM's answers that are null or empty."""
    kept: dict[str, Any] = {"role": "assistant", "content": "hi", "refusal": None, "annotations": [], "audio": None,
            "function_call": None, "tool_calls": None, "reasoning": None, "reasoning_content": ""}  # fmt: skip
    assert parsed(kept) == {"role": "assistant", "content": "hi"}
    assert parsed(kept | {"tool_calls": []}) == {"role": "assistant", "content": "hi"}
    parts = [{"type": "text", "text": "h", "annotations": [], "cache_control": {"type": "ephemeral"}},
             {"type": "text", "text": "i", "prompt_cache_breakpoint": {"mode": "explicit"}, "extra": None}]  # fmt: skip
    assert parsed(kept | {"content": parts}) == {"role": "assistant", "content": "hi"}


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ({"role": "assistant", "content": None}, "content must be text"),
        ({"role": "assistant", "content": "x", "refusal": "no"}, 'refusal="no" in a message'),
        ({"role": "assistant", "content": "x", "audio": {"id": "a"}}, "audio in a message"),
        ({"role": "assistant", "content": "x", "function_call": {"name": "f"}}, "function_call in a message"),
        ({"role": "assistant", "content": "x", "reasoning_content": 3}, "reasoning_content of a message must be"),
        ({"role": "assistant", "content": "x", "prefix": True}, "prefix=true in a message"),
        ({"role": "user", "content": [{"type": "text", "text": "x", "mood": "sad"}]}, "mood.* in a part of a message"),
        ({"role": "user", "content": "x", "name": 5}, "name of a message must be a text"),
        ({"role": "assistant", "content": "x", "tool_calls": [{"id": "c1"}]}, "a tool call of a message must have"),
        ({"role": "assistant", "content": None, "tool_calls": 5}, "tool_calls of a message must be a list"),
        ({"role": "tool", "content": "x", "tool_call_id": 1}, "tool_call_id of a message must be a text"),
    ],
)  # fmt: skip
def test_a_message_with_more_than_text_is_refused_by_name(message: dict[str, Any], why: str) -> None:
    with pytest.raises(Refused, match=why) as refused:
        parsed(message)
    assert refused.value.param == "messages"


def test_messages_are_few_and_stops_are_short() -> None:
    with pytest.raises(Refused, match="10,001 of them, and at most 10,000"):
        chat(messages=TALK * 10_001)
    assert text(stop=["x" * 1000] * 16).stop == ("x" * 1000,) * 16
    for stop in (["x"] * 17, ["x" * 1001]):
        with pytest.raises(Refused, match="at most 16 texts of 1,000 characters"):
            text(stop=stop)


def test_the_body_of_a_batch_file_is_read_by_the_same_table() -> None:
    for key, value in (("n", 2), ("stream", True), ("logprobs", True), ("ignore_eos", True)):
        with pytest.raises(Refused, match=f"{key}={json.dumps(value)} is not supported"):
            chat(served=False, **{key: value})
    assert read_body({"messages": TALK, "stream_options": {"include_usage": True}}, True).chat
