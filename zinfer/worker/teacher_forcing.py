"""An engine led along given tokens, and its logits beside those that a reference had there.

A reference's logits go to a file, step by step and in their own type; what is compared with them reads them back as it
gets there. So a step's logits are all that is in memory, and the engines need not be loaded at the same time: the file
takes rows · steps · vocabulary · bytes of the type.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zinfer.engine.base import Engine, Progress, silent
from zinfer.generation.generate import eos_token_ids, load_tokenizer
from zinfer.generation.passes import decode, prefill
from zinfer.spec.model import ModelSpec

VALUES = 1 << 22  # logits that are compared at once: in 64 bits, and several times over


def windows(
    _engine: Engine | None, model: Any, text: str, count: int, length: int, beat: Progress = silent
) -> dict[str, Any]:
    """``pieces``: `count` of `text`, `length` tokens each, spread evenly, none overlapping; None where it is too short.
    Each begins with the token that the tokenizer of `model`, a spec as JSON, begins a text with, if it does.
    ``tokens``: how many all of the text has. ``ends``: those that end a text."""
    beat("reading the text", 0.0)
    spec = ModelSpec.model_validate(model)
    tokenizer = load_tokenizer(spec)
    begin = [tokenizer.bos_token_id] if tokenizer("").input_ids[:1] == [tokenizer.bos_token_id] else []
    token_ids = list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
    size = length - len(begin)
    last = len(token_ids) - size
    pieces = None
    if count * size <= len(token_ids):
        starts = [index * last // max(1, count - 1) for index in range(count)]
        pieces = [begin + token_ids[start : start + size] for start in starts]
    return {"pieces": pieces, "tokens": len(token_ids), "ends": sorted(eos_token_ids(spec, tokenizer))}


def _walk(
    engine: Engine, prompts: list[list[int]], tokens: list[list[int] | None], steps: int, beat: Progress
) -> Iterator[tuple[Tensor, Tensor]]:
    """For each of `steps`: logits ``[B, V]`` and the tokens ``[B]`` that come next, those of `tokens` or, where a row
    has none, the most likely ones."""
    token_ids = torch.tensor(prompts)
    given = torch.tensor([row or [-1] * steps for row in tokens], device=engine.device)
    batch, logits = prefill(engine, token_ids, torch.ones_like(token_ids), reserve=steps)
    for step in range(steps):
        chosen = torch.where(given[:, step] < 0, logits.argmax(-1), given[:, step])
        yield logits, chosen
        beat("following", (step + 1) / steps)
        if step + 1 < steps:
            logits = decode(engine, batch, chosen)
    engine.retire(batch)


def record(
    engine: Engine,
    prompts: list[list[int]],
    tokens: list[list[int] | None],
    steps: int,
    file: str,
    beat: Progress = silent,
) -> dict[str, Any]:
    """Continue `prompts`, all of one length, by `steps` tokens, and write the logits to `file`. Rows of `tokens` are
    followed; where there is None, the row's own most likely tokens are. Returns the ``tokens``, the ``dtype`` of the
    logits and their ``shape``, ``[steps, B, V]``."""
    chosen = []
    with Path(file).open("wb") as out:
        for logits, token in _walk(engine, prompts, tokens, steps, beat):
            if not bool(logits.isfinite().all()):
                return _no_number()
            logits.cpu().contiguous().view(torch.uint8).numpy().tofile(out)
            chosen.append(token)
    shape = [steps, *logits.shape]
    return {
        "tokens": torch.stack(chosen, 1).tolist(),
        "dtype": str(logits.dtype).removeprefix("torch."),
        "shape": shape,
    }


def compare(
    engine: Engine,
    prompts: list[list[int]],
    tokens: list[list[int]],
    file: str,
    dtype: str,
    shape: list[int],
    first: int = 0,
    beat: Progress = silent,
) -> dict[str, Any]:
    """Lead `engine` along `tokens`, which follow `prompts`, beside the logits in `file`, of whose rows these are the
    ones from `first` on. Returns the ``rows``: of each, the fields of a `zinfer.record.accuracy.Position` for every
    step."""
    steps, rows, vocabulary = shape
    kept = torch.from_file(file, size=steps * rows * vocabulary, dtype=getattr(torch, dtype)).view(shape)
    found: list[Tensor] = []
    for step, (logits, token) in enumerate(_walk(engine, prompts, list(tokens), steps, beat)):
        if not bool(logits.isfinite().all()):
            return _no_number()
        reference = kept[step, first : first + len(prompts)].to(logits.device)
        size = max(1, VALUES // vocabulary)
        parts = zip(reference.split(size), logits.split(size), token.split(size), strict=True)
        found.append(torch.cat([deviation(*part) for part in parts]).cpu())
    return {"rows": torch.stack(found, 1).tolist()}


def _no_number() -> dict[str, Any]:
    return {"status": "nan_output", "error": "the model's output is not a number"}


def deviation(reference: Tensor, logits: Tensor, tokens: Tensor) -> Tensor:
    """What `logits` are beside those of the `reference`, ``[B, V]`` each, of any float type: the fields of a
    `zinfer.record.accuracy.Position`, computed in float64, ``[B, 5]``; `tokens`, ``[B]``, come next."""
    same = reference.argmax(-1) == logits.argmax(-1)
    expected, actual = reference.double(), logits.double()
    error = (actual - expected).square().mean(-1).sqrt() / expected.std(-1, correction=0)
    expected, actual = expected.log_softmax(-1), actual.log_softmax(-1)
    kl = (expected.exp() * (expected - actual)).sum(-1)
    nats = [-log.gather(-1, tokens[:, None])[:, 0] for log in (expected, actual)]
    return torch.stack([error, kl.clamp(min=0), same.double(), *nats], dim=-1)
