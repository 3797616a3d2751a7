"""A batch whose rows are requests of their own: each with its length, its sampling, its stops, and what it has so far.

The chance that decides a sampled token is a hash of the row's seed and the token's place, so that a row continues in
the same way whatever batch it is in, and after a restart too.
"""

import time
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from zinfer.engine.base import Engine
from zinfer.generation.generate import eos_token_ids, load_tokenizer
from zinfer.generation.passes import decode, prefill
from zinfer.spec.model import ModelError, ModelSpec

ANSWER_S = 1.0  # decode that long before telling, unless a row ends
CHUNK = 1 << 23  # logits that are sampled from at once: sorting takes several times their memory


@dataclass
class Row:
    """One request in a batch: `made` is what it had before and has now, of which `left` tokens may be missing."""

    key: int
    made: list[int]
    left: int
    temperature: float
    top_p: float
    seed: str
    stop: tuple[str, ...]
    told: int = field(init=False)  # of `made`
    ended: bool = False

    def __post_init__(self) -> None:
        self.told = len(self.made)


class Rows:
    """Tokenises requests, and continues batches of them on an engine."""

    def __init__(self, spec: ModelSpec) -> None:
        self._tokenizer: Any = load_tokenizer(spec)
        self._ends = eos_token_ids(spec, self._tokenizer)
        self._rows: list[Row] = []

    def lengths(self, _engine: Engine | None, prompts: list[tuple[bool, Any]]) -> dict[str, Any]:
        """``lengths``: how many tokens each prompt has, or why it cannot be read. A prompt is a text, or, with True,
        a chat's messages."""
        found: list[int | str] = []
        for chat, prompt in prompts:
            try:
                found.append(len(self._encode(chat, prompt)) or "the prompt has no tokens: it needs at least one")
            except Exception as error:  # a template says no in whatever way its author chose
                found.append(" ".join(str(error).split())[:300] or type(error).__name__)
        return {"lengths": found}

    def _encode(self, chat: bool, prompt: Any) -> list[int]:
        if not chat:
            return list(self._tokenizer(prompt).input_ids)
        if not self._tokenizer.chat_template:
            raise ModelError("the model has no chat template: use /v1/completions")
        text = self._tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        return list(self._tokenizer(text, add_special_tokens=False).input_ids)

    def start(self, engine: Engine, rows: list[dict[str, Any]], reserve: int) -> dict[str, Any]:
        """Begin a batch of `rows`, which is to run for `reserve` tokens: its prefill and first token.

        A row is what a `Row` is made of, and its prompt as ``chat`` and ``prompt``. The answer is that of `go_on`.
        """
        prompts = [self._encode(row.pop("chat"), row.pop("prompt")) + row["made"] for row in rows]
        self._rows = [Row(**row) for row in rows]
        self._reserve = reserve
        length = max(map(len, prompts))
        padding = self._tokenizer.pad_token_id or 0
        token_ids = torch.tensor([[padding] * (length - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        began = time.monotonic()
        engine.clear()
        self._batch, logits = prefill(engine, token_ids, mask, reserve=reserve)
        return self._tell([self._take(logits, engine)], began)

    def go_on(self, engine: Engine) -> dict[str, Any]:
        """Decode until a row ends, the reserve is used up or `ANSWER_S` seconds have gone by.

        Returns ``steps`` and ``seconds`` they took, and the ``rows`` that went on: the ``key`` and new ``tokens`` of
        each; where it ended also ``finish_reason`` and ``text``, or ``error``.
        """
        began = time.monotonic()
        steps: list[list[dict[str, Any]]] = []
        while self._reserve and any(not row.ended for row in self._rows):
            steps.append(self._take(decode(engine, self._batch, self._chosen), engine))
            if steps[-1] or time.monotonic() - began > ANSWER_S:
                break
        return self._tell(steps, began)

    def _tell(self, steps: list[list[dict[str, Any]]], began: float) -> dict[str, Any]:
        """The answer about `steps`, each of which is the rows that ended in it."""
        seconds = time.monotonic() - began
        ended = {row["key"]: row for step in steps for row in step}
        rows = []
        for row in self._rows:
            if row.key in ended or not row.ended:
                rows.append({"key": row.key, "tokens": row.made[row.told :]} | ended.get(row.key, {}))
                row.told = len(row.made)
        return {"steps": len(steps), "seconds": seconds, "rows": rows}

    def _take(self, logits: Tensor, engine: Engine) -> list[dict[str, Any]]:
        """Choose every row's next token; what is to be told of the rows that end."""
        self._chosen, finite = choose(logits, self._rows)
        self._reserve -= 1
        return [
            told
            for row, token, sound in zip(self._rows, self._chosen.tolist(), finite.tolist(), strict=True)
            if not row.ended and (told := self._grow(row, token, sound))
        ]

    def _grow(self, row: Row, token: int, sound: bool) -> dict[str, Any] | None:
        """Add `token` to `row`; what is to be told if the row has ended, the end token itself left out."""
        told: dict[str, Any] | None = None
        if not sound:
            told = {"error": "the model's output is not a number"}
        elif token in self._ends:
            told = {"finish_reason": "stop", "text": self._decode(row.made)}
        else:
            row.made.append(token)
            row.left -= 1
            text = self._stopped(row)
            if text is not None:
                told = {"finish_reason": "stop", "text": text}
            elif row.left == 0:
                told = {"finish_reason": "length", "text": self._decode(row.made)}
        row.ended = told is not None
        return {"key": row.key} | told if told else None

    def _stopped(self, row: Row) -> str | None:
        """The text before the first of the row's stops, if there is one in it."""
        if not row.stop:
            return None
        recent = 8 + max(len(stop.encode(errors="replace")) for stop in row.stop)  # a token is a byte at least
        tail = self._decode(row.made[-recent:])
        if not any(stop in tail for stop in row.stop):
            return None
        text = self._decode(row.made)
        places = [place for stop in row.stop if (place := text.find(stop)) >= 0]
        return text[: min(places)] if places else None

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))


def chance(seed: str, place: int) -> float:
    """A number from 0 to 1 (exclusive), always the same for a seed and a place."""
    return int.from_bytes(blake2b(f"{seed}/{place}".encode(), digest_size=8).digest()) / 2**64


def choose(logits: Tensor, rows: list[Row]) -> tuple[Tensor, Tensor]:
    """The next token of each row, ``[B, V]`` logits to ``[B]`` ids, and whether its logits are numbers, ``[B]``.

    A sampled token is where the cumulated probabilities, those outside of the nucleus left out (Holtzman et al. 2020,
    arXiv:1904.09751), pass the row's chance.
    """
    best, ids = logits.max(-1)
    warm = [index for index, row in enumerate(rows) if row.temperature > 0 and not row.ended]
    size = max(1, CHUNK // logits.shape[-1])
    for nucleus in (False, True):  # apart, so that a row is not sampled otherwise for its neighbours' sake
        alike = [index for index in warm if (rows[index].top_p < 1) == nucleus]
        for start in range(0, len(alike), size):
            part = alike[start : start + size]
            ids[part] = _sample(logits[part], best[part], [rows[index] for index in part], nucleus)
    return ids, best.isfinite()


def _sample(logits: Tensor, best: Tensor, rows: list[Row], nucleus: bool) -> Tensor:
    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, device=logits.device)[:, None]

    scaled = (logits.float() - best.float()[:, None]) / column([max(row.temperature, 1e-6) for row in rows])
    kept, order = torch.softmax(scaled, dim=-1), None
    if nucleus:
        kept, order = kept.sort(dim=-1, descending=True)
        outside = kept.cumsum(-1) - kept >= column([row.top_p for row in rows])
        outside[:, 0] = False
        kept.masked_fill_(outside, 0)
    total = kept.cumsum(-1)
    whole = total[:, -1:]
    below = torch.nextafter(whole, torch.zeros_like(whole))  # a chance may round to 1
    target = torch.minimum(whole * column([chance(row.seed, len(row.made)) for row in rows]), below)
    place = (total <= target).sum(-1, keepdim=True).clamp(max=logits.shape[-1] - 1)
    return (place if order is None else order.gather(-1, place))[:, 0]
