"""Drafts: tokens guessed ahead, which one pass verifies together (speculative decoding).

A pass of streamed weights takes as long as the link needs, whatever it computes; so verifying several tokens of a row
costs next to nothing, and each draft that is right is a token that needs no pass of its own. `NgramDrafter` guesses
without a model: what followed the last tokens when they occurred before, in the prompt or in the answer (prompt lookup
decoding).

A row's tokens are the same with drafts and without. The sampler chooses a token for every position of the pass as it
would have, one by one (`zinfer.generation.sampling`: the chance that decides belongs to the row's seed and the place);
drafts are kept up to the first that differs from the choice. For a draft that is one token, not a distribution, this is
the rejection sampling of Leviathan et al. 2023 (arXiv:2211.17192): it is accepted with its probability, and otherwise
the token is drawn from the others.

The number of drafts follows what was accepted: `Drafts` weighs each row's next drafts by their chance, and a pass takes
those that are worth it, within the work that hides behind the link.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from zinfer.engine.base import Engine

LONGEST, SHORTEST = 4, 2  # tokens of the suffix that is looked for, the longest first
MOST = 8  # drafts of a row in one pass
FIRST = 0.5  # chance of a draft before any was verified
MEMORY = 0.9  # weight of what was verified before, at each further verification
MISSES = 3  # verifications in a row without a right draft after which a row pauses
LONGEST_PAUSE = 64  # passes; a pause is twice as long as the one before
WORTH = 0.03  # tokens gained for each row that a further draft is worth: a pass computes one in every row of it


class Drafter(Protocol):
    """A source of drafts for any number of rows."""

    def draft(self, key: int, token_ids: Sequence[int], count: int) -> list[int]:
        """Return up to `count` tokens that may follow `token_ids`, those of row `key` so far."""

    def forget(self, key: int) -> None:
        """Forget a row."""


class NgramDrafter:
    """Drafts from a row's own tokens: those that followed its last `LONGEST` to `SHORTEST` tokens when they occurred
    for the last time before. Where a repetition reaches the end, it goes on."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[int, dict[tuple[int, ...], int]]] = {}  # tokens indexed; place behind each n-gram

    def draft(self, key: int, token_ids: Sequence[int], count: int) -> list[int]:
        known, behind = self._rows.get(key, (0, {}))
        for end in range(max(1, known), len(token_ids)):  # n-grams that a token follows
            for size in range(SHORTEST, min(LONGEST, end) + 1):
                behind[tuple(token_ids[end - size : end])] = end
        self._rows[key] = len(token_ids), behind
        for size in range(min(LONGEST, len(token_ids)), SHORTEST - 1, -1):
            start = behind.get(tuple(token_ids[len(token_ids) - size :]))
            if start is not None:
                found: list[int] = []
                for place in range(start, start + count):
                    found.append(token_ids[place] if place < len(token_ids) else found[place - len(token_ids)])
                return found
        return []

    def forget(self, key: int) -> None:
        self._rows.pop(key, None)


@dataclass
class _Record:
    """Drafts of a row that were verified, and accepted ones among them, both weighted by age."""

    verified: float = 0.0
    accepted: float = 0.0
    misses: int = 0  # verifications in a row without a right draft
    pause: int = 0  # passes to come without drafts

    @property
    def chance(self) -> float:
        return (self.accepted + FIRST) / (self.verified + 1)


@dataclass
class Drafts:
    """Drafts of all rows, by the row's key: how many are worth verifying, and what became of them."""

    drafter: Drafter
    most: int = MOST
    drafted: int = 0  # tokens that were verified
    accepted: int = 0
    _records: dict[int, _Record] = field(default_factory=dict)

    def propose(self, rows: Mapping[int, tuple[Sequence[int], int]], room: int) -> dict[int, list[int]]:
        """Return the drafts of a pass, by key; none where none are worth their work.

        `rows` holds for each running row its tokens so far, and the most tokens that it may still get. A pass computes
        as many positions in every row as in the one with most drafts: `room` is the number of rows times drafts that
        there is time for.
        """
        room = min(self.most, room // max(1, len(rows)))
        found: dict[int, list[int]] = {}
        for key, (token_ids, left) in rows.items():
            record = self._records.setdefault(key, _Record())
            count = min(room, left - 1)
            if record.pause:
                record.pause -= 1
            elif count > 0 and (drafts := self.drafter.draft(key, token_ids, count)):
                found[key] = drafts
        gains = [
            sum(self._records[key].chance ** (place + 1) for key, drafts in found.items() if len(drafts) > place)
            for place in range(max(map(len, found.values()), default=0))
        ]
        count = max((place + 1 for place, gain in enumerate(gains) if gain >= WORTH * len(rows)), default=0)
        return {key: drafts[:count] for key, drafts in found.items() if count}

    def saw(self, key: int, drafted: int, accepted: int) -> None:
        """Note that `accepted` of `drafted` tokens of a row were right; the first wrong one says nothing of those
        behind it."""
        self.drafted += drafted
        self.accepted += accepted
        record = self._records.setdefault(key, _Record())
        record.verified = MEMORY * record.verified + min(drafted, accepted + 1)
        record.accepted = MEMORY * record.accepted + accepted
        record.misses = 0 if accepted else record.misses + 1
        if record.misses >= MISSES:
            record.pause = min(LONGEST_PAUSE, 1 << record.misses)

    def forget(self, key: int) -> None:
        """Forget a row."""
        self._records.pop(key, None)
        self.drafter.forget(key)


def drafter_of(engine: "Engine") -> Drafter | None:
    """Return the drafter that the engine's option `draft` asks for; None for none."""
    return NgramDrafter() if getattr(engine.options, "draft", "none") == "ngram" else None
