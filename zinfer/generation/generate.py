"""Text out of an engine: tokenise, pad left, prefill, decode until every row has ended, turn back into text."""

from contextlib import suppress
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from zinfer.engine.base import Engine, Progress
from zinfer.generation.passes import decode, prefill
from zinfer.spec.model import ModelError, ModelSpec, check_positions
from zinfer.spec.value import Frozen


class Sampling(Frozen):
    """How the next token is chosen and when a row ends. Temperature 0 is greedy."""

    output_len: int = 32
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    ignore_eos: bool = False


def load_tokenizer(spec: ModelSpec) -> PreTrainedTokenizerBase:
    """The checkpoint's own tokenizer, or bytes as tokens for dummy weights. Raises ModelError where there is none."""
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


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """A token for each byte: for dummy weights, whose text means nothing but has to have some length."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<pad>": 0} | {letter: index for index, letter in enumerate(alphabet, start=1)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", padding_side="left")


def eos_token_ids(spec: ModelSpec, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The tokens that end a row: of the checkpoint's generation settings, else configuration, else tokenizer."""
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


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """The next token of each row: ``[B, V]`` logits to ``[B]`` ids.

    Nucleus sampling keeps the fewest tokens whose probabilities reach `top_p` (Holtzman et al. 2020, arXiv:1904.09751).
    """
    if sampling.temperature == 0:
        return logits.argmax(-1)
    probabilities = torch.softmax(logits.float() / sampling.temperature, dim=-1)
    if sampling.top_p < 1:
        ordered, order = probabilities.sort(dim=-1, descending=True)
        ordered[ordered.cumsum(-1) - ordered >= sampling.top_p] = 0
        probabilities = torch.zeros_like(probabilities).scatter_(-1, order, ordered)
    return torch.multinomial(probabilities, 1, generator=generator)[:, 0]


def generate(
    engine: Engine,
    spec: ModelSpec,
    prompts: list[str],
    sampling: Sampling,
    batch_size: int,
    progress: Progress,
) -> list[dict[str, Any]]:
    """Continue every prompt; an object each, in order: `prompt`, `output_ids` (without the end token), `output_text`,
    `finish_reason` (``stop`` at an end token, ``length`` otherwise).

    Raises ModelError for a prompt without tokens, or one that leaves no room for `output_len` in the model's positions.
    """
    tokenizer = load_tokenizer(spec)
    ends = frozenset() if sampling.ignore_eos else eos_token_ids(spec, tokenizer)
    generator = torch.Generator(engine.device).manual_seed(sampling.seed)
    texts: list[dict[str, Any]] = []
    for start in range(0, len(prompts), batch_size):
        group = prompts[start : start + batch_size]
        encoded = tokenizer(group, return_tensors="pt", padding=True)
        _check(spec, group, encoded["attention_mask"], sampling)

        def tick(share: float, start: int = start, size: int = len(group)) -> None:
            progress("generating", (start + size * share) / len(prompts))

        rows = _continue(engine, encoded["input_ids"], encoded["attention_mask"], sampling, ends, generator, tick)
        for prompt, (output_ids, reason) in zip(group, rows, strict=True):
            texts.append(
                {
                    "prompt": prompt,
                    "output_ids": output_ids,
                    "output_text": tokenizer.decode(output_ids, skip_special_tokens=True),
                    "finish_reason": reason,
                }
            )
    return texts


def _check(spec: ModelSpec, prompts: list[str], mask: Tensor, sampling: Sampling) -> None:
    lengths = mask.sum(-1).tolist()
    if min(lengths) == 0:
        raise ModelError(f"prompt {prompts[lengths.index(0)]!r} has no tokens: a prompt needs at least one")
    check_positions(spec, max(lengths), sampling.output_len, f"a prompt of {max(lengths)} tokens")


def _continue(
    engine: Engine,
    token_ids: Tensor,
    mask: Tensor,
    sampling: Sampling,
    ends: frozenset[int],
    generator: torch.Generator,
    tick: Any,
) -> list[tuple[list[int], str]]:
    """Decode one batch; each row's ids up to its end token, and why it ended."""
    end_ids = torch.tensor(sorted(ends), device=engine.device)
    alive = torch.ones(len(token_ids), dtype=torch.bool, device=engine.device)
    chosen: list[Tensor] = []
    batch, logits = prefill(engine, token_ids, mask, reserve=sampling.output_len)
    for step in range(sampling.output_len):
        token = choose(logits, sampling, generator)
        chosen.append(token)
        alive &= ~torch.isin(token, end_ids)
        tick((step + 1) / sampling.output_len)
        if step + 1 == sampling.output_len or not bool(alive.any()):
            break
        logits = decode(engine, batch, token)
    engine.retire(batch)
    rows = []
    for row in torch.stack(chosen, dim=1).tolist():
        stop = next((index for index, token in enumerate(row) if token in ends), None)
        rows.append((row[:stop], "length" if stop is None else "stop"))
    return rows
