"""Conversations as tokens."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.inline import SPEC
from zinfer.commands.run import Dialogue
from zinfer.core.model import ModelError
from zinfer.generation.tokenizer import byte_tokenizer, decode
from zinfer.generation.tokenizer_process import TokenizerProcess

Make = Callable[..., Dialogue]

EXTENDING = (
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
TRIMMING = EXTENDING.replace("{{ m.content }}", "{{ m.content | trim }}")


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


@pytest.mark.parametrize("template", [EXTENDING, TRIMMING])
def test_turns_are_the_tokens_of_the_whole_conversation(template: str, characters: Any, start: Make) -> None:
    talk = start(characters, template, "Be brief.")
    first = talk.ask("Hi")
    assert decode(characters, first, special=True) == "<s>system: Be brief.</s><s>user: Hi</s><s>assistant: "
    talk.answered(" Hello ")
    second = talk.ask("And?")
    messages = [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": " Hello "}, {"role": "user", "content": "And?"},
    ]  # fmt: skip
    theirs = characters.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert second == characters(theirs, add_special_tokens=False).input_ids
    assert second[: len(first)] == first, "their keys and values are reused"
    assert talk.ask("And?") == second, "a turn without an answer is not part of the conversation"


def test_a_template_gets_thoughts_of_answers(characters: Any, start: Make) -> None:
    told = EXTENDING.replace("{{ m.content }}", "{{ m.content }}{{ m.reasoning_content or '-' }}")
    talk = start(characters, told)
    talk.ask("Hi")
    talk.answered("yes", "hm")
    text = decode(characters, talk.ask("And?"), special=True)
    assert text == "<s>user: Hi-</s><s>assistant: yeshm</s><s>user: And?-</s><s>assistant: "


def test_a_template_that_says_no_is_one_line(characters: Any, start: Make) -> None:
    talk = start(characters, "{{ raise_exception('no system\nturns') }}", "Be brief.")
    with pytest.raises(ModelError, match=r"chat template .*no system turns"):
        talk.ask("Hi")
    with pytest.raises(ModelError, match="no tokens"):
        start(byte_tokenizer()).ask("")


@pytest.mark.parametrize("hf", [byte_tokenizer, sentencepiece])
def test_without_a_template_turns_follow_each_other(hf: Callable[[], Any], start: Make) -> None:
    tokenizer = hf()
    talk = start(tokenizer, system="S.")
    assert talk.ask("H ") == tokenizer("S.H ").input_ids
    talk.answered("e")
    assert talk.ask("llo") == tokenizer("S.H ello").input_ids
