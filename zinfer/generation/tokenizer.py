"""Tokenizers: prompts and chats to token ids, token ids to text, and the tokens that end a text."""

from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from zinfer.spec.model import ModelError, ModelSpec

if TYPE_CHECKING:  # it takes seconds to import, and whoever decodes without text does not need it
    from transformers import PreTrainedTokenizerBase

NO_TOKENS = "has no tokens: it needs at least one"


class Tokenizer:
    """A model's tokenizer; `hf` is that of transformers, `ends` are the tokens that end a text."""

    def __init__(self, spec: ModelSpec) -> None:
        self.hf: Any = load_tokenizer(spec)
        self.ends = eos_token_ids(spec, self.hf)
        self.padding = int(self.hf.pad_token_id or 0)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, with the special tokens that the tokenizer begins or ends a text with."""
        return list(self.hf(text).input_ids)

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Return the ids of a chat up to where its answer begins, by the model's chat template.

        Raises ModelError where the model has none, and whatever the template raises to refuse the messages.
        """
        if not self.hf.chat_template:
            raise ModelError("the model has no chat template: use /v1/completions")
        text = self.hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(self.hf(text, add_special_tokens=False).input_ids)

    def try_encode(self, prompt: str | list[dict[str, str]]) -> list[int] | str:
        """Return the ids of a text or of a chat's messages, or one line with the reason why there are none."""
        try:
            found = self.encode(prompt) if isinstance(prompt, str) else self.encode_chat(prompt)
            return found or f"the prompt {NO_TOKENS}"
        except Exception as error:  # a template says no in whatever way its author chose
            return " ".join(str(error).split())[:300] or type(error).__name__

    def decode(self, token_ids: Iterable[int]) -> str:
        """Return the text of `token_ids`, special tokens left out."""
        return str(self.hf.decode(list(token_ids), skip_special_tokens=True))


def load_tokenizer(spec: ModelSpec) -> "PreTrainedTokenizerBase":
    """Load the checkpoint's own tokenizer, or bytes as tokens for dummy weights. Raises ModelError where there is
    none."""
    from transformers import AutoTokenizer

    if spec.directory is None:
        return byte_tokenizer()
    try:
        tokenizer = AutoTokenizer.from_pretrained(spec.directory, padding_side="left", trust_remote_code=False)
    except (OSError, ValueError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ModelError(f"{spec.directory} has no tokenizer that transformers can load: {reason}") from None
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    return tokenizer


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
    from transformers import GenerationConfig

    found: Any = None
    if spec.directory is not None:
        with suppress(OSError):
            found = GenerationConfig.from_pretrained(spec.directory).eos_token_id
    if found is None:
        found = spec.config.get("eos_token_id")
    if found is None:
        found = tokenizer.eos_token_id
    if found is None:
        return frozenset()
    return frozenset(found if isinstance(found, list) else [found])
