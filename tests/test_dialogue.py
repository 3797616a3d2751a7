"""Conversations as tokens: each turn continues the tokens of the one before if the text allows it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.inline import SPEC
from zinfer.core.model import ModelError
from zinfer.generation.detokenizer import common
from zinfer.generation.dialogue import Dialogue
from zinfer.generation.tokenizer import byte_tokenizer, decode
from zinfer.generation.tokenizer_process import TokenizerProcess

Make = Callable[..., Dialogue]

EXTENDING = (
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
TRIMMING = EXTENDING.replace("{{ m.content }}", "{{ m.content | trim }}")
FORGETFUL = EXTENDING.replace("{{ m.content }}", "{{ m.content if m.role == 'user' else '' }}")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Make]:
    """Return a function that begins a conversation with a tokenizer of `transformers`."""
    started: list[TokenizerProcess] = []

    def begin(hf: Any, template: str | None = None, system: str | None = None) -> Dialogue:
        hf.chat_template = template
        folder = tmp_path / str(len(started))
        hf.save_pretrained(folder)
        (folder / "config.json").write_text('{"model_type": "llama"}')
        spec = SPEC.model_copy(update={"directory": str(folder), "vocab_size": 400, "max_position": None})
        started.append(TokenizerProcess(spec))
        return Dialogue(started[-1], system)

    yield begin
    for process in started:
        process.close()


@pytest.fixture
def characters(checkpoint: Callable[..., Path]) -> Any:
    """Return a tokenizer with one token per character, and special tokens."""
    return AutoTokenizer.from_pretrained(checkpoint("llama"))


def answered(talk: Dialogue, hf: Any, answer: list[int]) -> str:
    """Give an answer; return its text."""
    reply = decode(hf, answer)
    talk.answered(answer, reply)
    return reply


def sentencepiece() -> Any:
    """Return a tokenizer like Llama 2's. It writes a space before its input, and bytes for unknown characters."""
    words = ["<unk>", "▁", *(f"<0x{byte:02X}>" for byte in range(256)), *map(chr, range(33, 127))]
    model = models.BPE({word: index for index, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def test_a_template_that_extends_has_every_token_used_again(characters: Any, start: Make) -> None:
    talk = start(characters, EXTENDING, "Be brief.")
    first = talk.ask("Hi")
    assert decode(characters, first, special=True) == "<s>system: Be brief.</s><s>user: Hi</s><s>assistant: "
    answer = [40, 41, 120, 42]  # 120 is no character of the text, and another tokeniser would cut it in six
    reply = answered(talk, characters, answer)
    second = talk.ask("And?")
    assert second[: len(first) + 4] == first + answer
    assert decode(characters, second[len(first) + 4 :], special=True) == "</s><s>user: And?</s><s>assistant: "
    messages = [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": reply}, {"role": "user", "content": "And?"},
    ]  # fmt: skip
    theirs = characters.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert decode(characters, second, special=True) == theirs
    assert talk.ask("And?") == second, "a turn without an answer is not part of the conversation"


@pytest.mark.parametrize("template", [TRIMMING, FORGETFUL])
def test_a_template_that_does_not_extend_leaves_the_common_prefix(template: str, characters: Any, start: Make) -> None:
    talk = start(characters, template)
    first = talk.ask("Hi")
    reply = answered(talk, characters, [4, 40, 41, 4])  # with blanks around it
    assert reply[0] == reply[-1] == " "
    second = talk.ask("And?")
    shown = reply.strip() if template == TRIMMING else ""
    whole = f"<s>user: Hi</s><s>assistant: {shown}</s><s>user: And?</s><s>assistant: "
    assert second == characters(whole, add_special_tokens=False).input_ids
    assert common(first, second) == len(first)


def test_a_template_that_says_no_is_one_line(characters: Any, start: Make) -> None:
    talk = start(characters, "{{ raise_exception('no system\nturns') }}", "Be brief.")
    with pytest.raises(ModelError, match=r"chat template .*no system turns"):
        talk.ask("Hi")
    with pytest.raises(ModelError, match="no tokens"):
        start(byte_tokenizer()).ask("")


def test_without_a_template_turns_follow_each_other(start: Make) -> None:
    tokenizer = byte_tokenizer()
    talk = start(tokenizer, system="S.")
    first = talk.ask("Hé ")
    half = tokenizer("é").input_ids[:1]  # an answer that ends within a character
    answered(talk, tokenizer, half)
    second = talk.ask("llo")
    assert second == first + half + tokenizer("llo").input_ids
    assert decode(tokenizer, first) == "S.Hé "


def test_a_tokenizer_that_adds_a_blank_is_noticed(start: Make) -> None:
    tokenizer = sentencepiece()
    talk = start(tokenizer)
    first = talk.ask("Hi")
    assert decode(tokenizer, first) == "Hi"
    answer = tokenizer("you").input_ids[1:]
    answered(talk, tokenizer, answer)
    second = talk.ask("!")
    assert decode(tokenizer, second) == "Hiyou!"
    assert second == tokenizer("Hiyou!").input_ids
