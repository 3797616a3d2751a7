"""Tokenizers: token ids to text, and the tokens that end a text.

`zinfer.generation.tokenizer_process` turns prompts into token ids, in a process with limits; it loads a checkpoint's
tokenizer before a worker does.
"""

import re
from collections.abc import Iterable, Sequence
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zinfer.checkpoint import tokenizer_files
from zinfer.core.model import ModelError, ModelSpec

if TYPE_CHECKING:  # it takes seconds to import, and whoever decodes without text does not need it
    from transformers import PreTrainedTokenizerBase

BYTES = "bytes:"  # before the bytes of a token that is part of a character
UNFINISHED = "\ufffd"  # tokenizers decode the bytes of an incomplete character to it
CONTEXT = 16  # tokens before others, enough to know how the text goes on
NO_TOKENS = "has no tokens: it needs at least one"


class Tokenizer:
    """Tokenizer of a model in a worker; `hf` is that of transformers, `ends` are the tokens that end a text."""

    _special = False  # True if texts have special tokens

    def __init__(self, spec: ModelSpec) -> None:
        directory = tokenizer_files.folder_of(spec)
        self.hf: Any = load_tokenizer(directory)
        self.ends = frozenset(tokenizer_files.end_tokens(directory, spec.config, own_end(self.hf), spec.vocab_size))
        self._letter = self.hf("a", add_special_tokens=False).input_ids  # tokens of a text before one that is shown
        padding = int(self.hf.pad_token_id or 0)
        self.padding = padding if 0 <= padding < spec.vocab_size else 0  # no row attends to it

    def decode(self, token_ids: Iterable[int], before: Sequence[int] = ()) -> str:
        """Return the text of `token_ids`; with `before`, as it continues the text of those.
        Tokenizers such as Llama 2's drop the space before the first word of every text."""
        ids = list(token_ids)
        if before:
            context = list(before)[-CONTEXT:]
            head, both = self.decode(context), self.decode(context + ids)
            if both.startswith(head):
                return both[len(head) :]
        return decode(self.hf, ids, self._special)

    @cached_property
    def raw(self) -> "Tokenizer":
        """The same tokenizer, whose texts have special tokens."""
        raw = copy(self)
        raw._special = True
        return raw

    def text_of(self, token: int) -> str:
        """Return the text of a token within a text. Part of a character is ``bytes:\\xe6``, as OpenAI has it."""
        each = self._letter, [*self._letter, token], [token]
        head, both, alone = (decode(self.hf, ids, special=True, clean_up_tokenization_spaces=False) for ids in each)
        text = both[len(head) :] if both.startswith(head) else alone
        return (_bytes_of(self.hf.convert_ids_to_tokens(token)) or text) if UNFINISHED in text else text


def load_tokenizer(directory: Path | None) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of a folder, or bytes for dummy weights. Raises ModelError."""
    if directory is None:
        return byte_tokenizer()
    from transformers import AutoTokenizer

    with tokenizer_files.cleaned(directory, _is_tokenizer) as folder:
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                folder, padding_side="left", trust_remote_code=False, local_files_only=True
            )
        except BaseException as error:
            check_library(error)
            reason = " ".join(str(error).split())[:300].replace(str(folder), str(directory))
            raise ModelError(f"{directory} has no tokenizer that transformers can load: {reason}") from None
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    return tokenizer


def _is_tokenizer(name: str) -> bool:
    from transformers import PreTrainedTokenizerBase
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    if not name.isidentifier():
        return False
    kind = tokenizer_class_from_name(name)
    return isinstance(kind, type) and issubclass(kind, PreTrainedTokenizerBase)


def check_library(error: BaseException) -> None:
    """Raise `error` again unless it is of a library: an exception, or a panic of compiled code, which is none."""
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error


def _bytes_of(name: str) -> str | None:
    """Return the bytes of a token by its name: ``<0xE6>``, or letters that stand for bytes (GPT-2's); else None."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    if (match := re.fullmatch("<0x([0-9A-F]{2})>", name)) is not None:
        return f"{BYTES}\\x{match[1].lower()}"
    values = {letter: byte for byte, letter in bytes_to_unicode().items()}
    return BYTES + "".join(f"\\x{values[letter]:02x}" for letter in name) if values.keys() >= set(name) else None


def decode(tokenizer: Any, ids: list[int], special: bool = False, **how: bool) -> str:
    """Return the text of `ids`; `special` keeps special tokens. Raises ModelError."""
    try:
        return str(tokenizer.decode(ids, skip_special_tokens=not special, **how))
    except BaseException as error:
        check_library(error)
        raise ModelError(f"the tokenizer cannot decode tokens: {' '.join(str(error).split())[:300]}") from None


def byte_tokenizer() -> "PreTrainedTokenizerBase":
    """Make a tokenizer with a token for each byte: for dummy weights, whose text means nothing but has a length."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<pad>": 0} | {letter: index for index, letter in enumerate(alphabet, start=1)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", padding_side="left")


def own_end(hf: Any) -> int | None:
    """Return the end token of the tokenizer `hf`; None if it names none of its vocabulary."""
    token = hf.eos_token_id
    if token is None or hf.convert_ids_to_tokens(token) != str(hf.eos_token):  # an unknown one has the id of <unk>
        return None
    return int(token)
