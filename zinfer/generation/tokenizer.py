"""Tokenizers: prompts and chats to token ids, token ids to text, and the tokens that end a text."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zinfer.generation.chat_template import ChatTemplate
from zinfer.spec import tokenizer_files
from zinfer.spec.model import ModelError, ModelSpec

if TYPE_CHECKING:  # it takes seconds to import, and whoever decodes without text does not need it
    from transformers import PreTrainedTokenizerBase

BYTES = "bytes:"  # before the bytes of a token that is part of a character
UNFINISHED = "\ufffd"  # tokenizers decode the bytes of an incomplete character to it
CONTEXT = 16  # tokens before others, enough to know how the text goes on
NO_TOKENS = "has no tokens: it needs at least one"


class Tokenizer:
    """A model's tokenizer; `hf` is that of transformers, `ends` are the tokens that end a text."""

    def __init__(self, spec: ModelSpec) -> None:
        self.hf: Any = load_tokenizer(spec)
        self.ends = eos_token_ids(spec, self.hf)
        self._spec = spec
        self._template: ChatTemplate | None = None
        self._letter: list[int] | None = None  # tokens of a text that a token is shown behind
        padding = int(self.hf.pad_token_id or 0)
        self.padding = padding if 0 <= padding < spec.vocab_size else 0  # no row attends to it

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, with the special tokens that the tokenizer begins or ends a text with.

        Raises ModelError for a token that the model does not have.
        """
        return self._ids(text, add_special_tokens=True)

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            return self.known(self.hf(text, add_special_tokens=add_special_tokens).input_ids)
        except BaseException as error:
            _check_library(error)
            if isinstance(error, ModelError):
                raise
            reason = " ".join(str(error).split())[:300]
            raise ModelError(f"the tokenizer of {self._spec.name} fails: {reason}") from None

    def known(self, ids: Sequence[int]) -> list[int]:
        """Return the `ids` of a prompt. Raises ModelError for one that the model does not have."""
        if ids and max(ids) >= self._spec.vocab_size:
            raise ModelError(
                f"the tokenizer gives token {max(ids):,}, and {self._spec.name} has {self._spec.vocab_size:,}: they do "
                "not belong together"
            )
        return list(ids)

    @property
    def template(self) -> ChatTemplate | None:
        """The model's chat template; None if it has none."""
        if self._template is None:
            self._template = chat_template(self.hf)
        return self._template

    def encode_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        """Return the ids of a chat up to where its answer begins, by the model's chat template.

        Raises ModelError where the model has none, or it refuses the messages.
        """
        if self.template is None:
            raise ModelError("the model has no chat template: use /v1/completions")
        if any("tool_calls" in message for message in messages) and not self.template.shows("tool_calls"):
            raise ModelError("the model's chat template shows no tool calls: leave such messages out")
        return self._ids(self.template.render(messages), add_special_tokens=False)

    def try_encode(self, prompt: str | list[dict[str, Any]]) -> list[int] | str:
        """Return the ids of a text or of a chat's messages, or one line with the reason why there are none."""
        try:
            found = self.encode(prompt) if isinstance(prompt, str) else self.encode_chat(prompt)
            return found or f"the prompt {NO_TOKENS}"
        except Exception as error:  # a template says no in whatever way its author chose
            return " ".join(str(error).split())[:300] or type(error).__name__

    def decode(self, token_ids: Iterable[int], before: Sequence[int] = ()) -> str:
        """Return the text of `token_ids`, special tokens left out; with `before`, as it continues the text of those.

        Tokenizers such as Llama 2's drop the space before the first word of every text.
        """
        ids = list(token_ids)
        if before:
            context = list(before)[-CONTEXT:]
            head, both = self.decode(context), self.decode(context + ids)
            if both.startswith(head):
                return both[len(head) :]
        return str(self.hf.decode(ids, skip_special_tokens=True))

    def text_of(self, token: int) -> str:
        """Return the text of one token within a text, also of a special one; of a part of a character the bytes, as
        OpenAI's API writes them: ``bytes:\\xe6``."""
        if self._letter is None:
            self._letter = self.hf("a", add_special_tokens=False).input_ids
        head, both = (decode(self.hf, ids, special=True) for ids in (self._letter, [*self._letter, token]))
        text = both[len(head) :] if both.startswith(head) else decode(self.hf, [token], special=True)
        return (_bytes_of(self.hf.convert_ids_to_tokens(token)) or text) if UNFINISHED in text else text


def load_tokenizer(spec: ModelSpec) -> "PreTrainedTokenizerBase":
    """Load the checkpoint's own tokenizer, or bytes as tokens for dummy weights. Raises ModelError where there is
    none."""
    if spec.directory is None:
        return byte_tokenizer()
    from transformers import AutoTokenizer

    directory = Path(spec.directory)
    with tokenizer_files.cleaned(directory, _is_tokenizer) as folder:
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                folder, padding_side="left", trust_remote_code=False, local_files_only=True
            )
        except BaseException as error:
            _check_library(error)
            reason = " ".join(str(error).split())[:300].replace(str(folder), str(directory))
            raise ModelError(f"{directory} has no tokenizer that transformers can load: {reason}") from None
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    return tokenizer


def _is_tokenizer(name: str) -> bool:
    """Tell whether `transformers` has a tokenizer class of this name (and not a model, or a function)."""
    from transformers import PreTrainedTokenizerBase
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    if not name.isidentifier():
        return False
    found = tokenizer_class_from_name(name)
    return isinstance(found, type) and issubclass(found, PreTrainedTokenizerBase)


def _check_library(error: BaseException) -> None:
    """Raise `error` again unless it is a fault that the libraries of tokenizers find: an exception, or a panic of
    compiled code, which is none."""
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error


def _bytes_of(name: str) -> str | None:
    """Return the bytes of a token by its name, ``<0xE6>`` or letters that stand for bytes (GPT-2's); None if it is
    neither."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    if (found := re.fullmatch("<0x([0-9A-F]{2})>", name)) is not None:
        return f"{BYTES}\\x{found[1].lower()}"
    values = {letter: byte for byte, letter in bytes_to_unicode().items()}
    return BYTES + "".join(f"\\x{values[letter]:02x}" for letter in name) if values.keys() >= set(name) else None


def decode(tokenizer: Any, ids: list[int], special: bool = False) -> str:
    """Return the text of `ids`, without cleaning up spaces; `special` keeps special tokens."""
    return str(tokenizer.decode(ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False))


def count_tokens(file: Path, texts: list[str]) -> list[int] | None:
    """Return the number of tokens of each text, by the `tokenizer.json` at `file`; None if that cannot be loaded.
    Imports neither torch nor transformers."""
    from tokenizers import Tokenizer as Fast

    try:
        fast = Fast.from_file(str(file))
        fast.no_padding()
        fast.no_truncation()
        return [len(encoding.ids) for encoding in fast.encode_batch(texts)]
    except BaseException as error:
        _check_library(error)
        return None  # the worker, which needs all of the tokenizer, says what is wrong with it


def chat_template(hf: Any) -> ChatTemplate | None:
    """Return the chat template of a tokenizer of transformers, its default one if it has several; None if it has none.
    Raises ModelError for one that is no text."""
    found = hf.chat_template.get("default") if isinstance(hf.chat_template, dict) else hf.chat_template
    if not found:
        return None
    if not isinstance(found, str):
        raise ModelError("the model's chat template is no text")
    variables = {
        name: [str(one) for one in token] if isinstance(token, list | tuple) else str(token)
        for name, token in hf.special_tokens_map.items()
    }
    return ChatTemplate(found, variables)


def byte_tokenizer() -> "PreTrainedTokenizerBase":
    """Make a tokenizer with a token for each byte: for dummy weights, whose text means nothing but has a length."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<pad>": 0} | {letter: index for index, letter in enumerate(alphabet, start=1)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", padding_side="left")


def eos_token_ids(spec: ModelSpec, tokenizer: "PreTrainedTokenizerBase") -> frozenset[int]:
    """Return the tokens that end a text, by the checkpoint's generation settings, else its configuration, else its
    tokenizer."""
    found: Any = None
    if spec.directory is not None:
        found = tokenizer_files.end_tokens(Path(spec.directory))
    if found is None:
        found = spec.config.get("eos_token_id")
    if found is None:
        found = tokenizer.eos_token_id
    if found is None:
        return frozenset()
    return frozenset(token for token in (found if isinstance(found, list) else [found]) if token >= 0)
