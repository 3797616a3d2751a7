"""Drafts: tokens guessed ahead, which one pass verifies together (speculative decoding).

A pass of streamed weights takes as long as the link needs, so each draft that is right is a token that needs no pass of
its own. `NgramDrafter` takes what followed the last tokens when they occurred before (prompt lookup decoding),
`zinfer.generation.draft_model.ModelDrafter` asks a small model.

The text is that without drafts: the sampler chooses a token for every position by the chance of the row's seed and the
place, and drafts are kept up to the first that differs. For a draft that is one token, not a distribution, this is the
rejection sampling of Leviathan et al. 2023 (arXiv:2211.17192). A model that drafts draws by the same chance, and so
nearly as often the token that rejection sampling would accept.
"""

import time
from collections.abc import Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from statistics import median_high
from typing import Protocol

from zinfer.core.engine import MAX_DRAFTS
from zinfer.generation import tuning
from zinfer.generation.sequence import Sequence


class Drafter(Protocol):
    """A source of drafts for any number of rows."""

    @property
    def token_s(self) -> float | None:
        """Seconds in which a token of all rows is drafted; None while they are not known, or are none."""

    def draft(self, rows: Mapping[int, Sequence], counts: Mapping[int, int]) -> Mapping[int, list[int]]:
        """Return up to `counts` tokens for some of `rows`, by key."""

    def discard(self, key: int) -> None: ...


class NgramDrafter:
    """Drafts from a row's own tokens. Where a repetition reaches the end, it goes on."""

    token_s = None  # it takes no time

    def __init__(self) -> None:
        self._rows: dict[int, tuple[int, dict[tuple[int, ...], int]]] = {}  # tokens indexed; place behind each n-gram

    def draft(self, rows: Mapping[int, Sequence], counts: Mapping[int, int]) -> dict[int, list[int]]:
        return {key: self._of_row(key, rows[key].known_ids, count) for key, count in counts.items()}

    def _of_row(self, key: int, token_ids: Several[int], count: int) -> list[int]:
        indexed, behind = self._rows.get(key, (0, {}))
        for end in range(max(1, indexed), len(token_ids)):  # n-grams that a token follows
            for size in range(tuning.DRAFTS.shortest, min(tuning.DRAFTS.longest, end) + 1):
                behind[tuple(token_ids[end - size : end])] = end
        self._rows[key] = len(token_ids), behind
        for size in range(min(tuning.DRAFTS.longest, len(token_ids)), tuning.DRAFTS.shortest - 1, -1):
            start = behind.get(tuple(token_ids[len(token_ids) - size :]))
            if start is not None:
                drafts: list[int] = []
                for index in range(start, start + count):
                    drafts.append(token_ids[index] if index < len(token_ids) else drafts[index - len(token_ids)])
                return drafts
        return []

    def discard(self, key: int) -> None:
        self._rows.pop(key, None)


@dataclass
class _Record:
    """Counts of verified and of accepted drafts, both weighted by age."""

    verified: float = 0.0
    accepted: float = 0.0

    def chance(self, before: float) -> float:
        """Return a draft's chance, `before` when none was verified."""
        return (self.accepted + before) / (self.verified + 1)

    def age(self) -> None:
        self.verified, self.accepted = tuning.DRAFTS.memory * self.verified, tuning.DRAFTS.memory * self.accepted


@dataclass
class Drafts:
    """Drafts of all rows, by the row's key: how many are worth drafting and verifying, and what became of them."""

    drafter: Drafter
    max_drafts: int = MAX_DRAFTS
    drafted: int = 0  # tokens that were verified
    accepted: int = 0
    checked: int = 0  # drafts up to the first wrong one of each verification, which alone say how often one is right
    seconds: float = 0.0  # time of drafting
    _records: dict[int, _Record] = field(default_factory=dict)
    _all: _Record = field(default_factory=_Record)  # of all rows
    _seconds: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})  # of passes with drafts
    _with_drafts: bool = False  # the pass under way
    _until_plain: int = field(default_factory=lambda: tuning.DRAFTS.first_plain)  # passes until one is without drafts
    _pause: int = 0  # passes to come without drafts, since they take longer than they gain
    _next_pause: int = 1

    def _pass_s(self, with_drafts: bool) -> float | None:
        """Return the seconds of a pass with drafts or without: the median of the last ones; None before the first."""
        return median_high(seconds) if (seconds := self._seconds[with_drafts]) else None

    def propose(self, rows: Mapping[int, Sequence], limits: Mapping[int, int], room: int) -> dict[int, list[int]]:
        """Return the drafts of a pass, by key of its running rows. `room` is the number of rows times drafts that there
        is time for, `limits` each row's maximum. There are as many as give the most tokens a second, by the seconds of
        passes with drafts and without, and of drafting. If there are none, a single one is tried now and then."""
        if self._with_drafts:
            self._all.age()
            self._until_plain -= 1
        self._with_drafts = False
        room = min(self.max_drafts, room // max(1, len(rows)))
        counts = {key: count for key, limit in limits.items() if (count := min(room, limit)) > 0}
        if not counts or not (worth := self._worth(counts, len(rows))):
            return {}
        counts = {key: min(count, worth) for key, count in counts.items()}
        began = time.monotonic()
        proposed = {key: drafts for key, drafts in self.drafter.draft(rows, counts).items() if drafts}
        seconds = time.monotonic() - began
        self.seconds += seconds
        if self._pause and (plain_s := self._pass_s(False)):  # it was a try, and may have had to begin anew
            self._pause = max(self._pause, int(seconds / (tuning.DRAFTS.trying * plain_s)))
        gains = self._gains({key: len(drafts) for key, drafts in proposed.items()})
        threshold = tuning.DRAFTS.worth * len(rows)
        count = max((index for index, gain in enumerate(gains, 1) if gain >= threshold), default=1)
        self._with_drafts = bool(proposed)
        return {key: drafts[:count] for key, drafts in proposed.items()}

    def _chance(self, key: int) -> float:
        """Return the chance of a row's draft: at first what the others had, and not less than is worth a free try."""
        record, others = self._records.get(key, _Record()), self._all.chance(tuning.DRAFTS.first_chance)
        if not record.verified and self.drafter.token_s is None:
            return max(others, tuning.DRAFTS.min_first_chance)
        return record.chance(others)

    def _gains(self, counts: Mapping[int, int]) -> list[float]:
        chances = {key: self._chance(key) for key in counts}
        return [
            sum(chances[key] ** (index + 1) for key, count in counts.items() if count > index)
            for index in range(max(counts.values(), default=0))
        ]

    def _worth(self, counts: Mapping[int, int], rows: int) -> int:
        """Return the draft length that maximises tokens per second; 0 where a pass is to be without drafts."""
        token_s, plain_s, drafted_s = self.drafter.token_s or 0.0, self._pass_s(False), self._pass_s(True)
        if self._pause:
            self._pause -= 1
            return 0
        if self._until_plain <= 0:
            self._until_plain = tuning.DRAFTS.plain
            return 0
        plain_s, drafted_s = plain_s or drafted_s, drafted_s or plain_s
        if not plain_s or not drafted_s:
            return min(max(counts.values()), tuning.DRAFTS.first_drafts)
        tokens, seconds, best, worth = float(rows), drafted_s, (1 + tuning.DRAFTS.margin) * rows / plain_s, 0
        for index, gain in enumerate(self._gains(counts)):
            tokens, seconds = tokens + gain, seconds + token_s
            if tokens / seconds > best:
                best, worth = tokens / seconds, index + 1
        if worth:
            self._next_pause = 1
            return worth
        self._pause = max(self._next_pause, int((drafted_s + token_s - plain_s) / (tuning.DRAFTS.trying * plain_s)))
        self._next_pause = min(tuning.DRAFTS.longest_pause, 2 * self._next_pause)
        return 1

    def passed(self, seconds: float) -> None:
        """Note the seconds of a pass of running rows."""
        recent = self._seconds[self._with_drafts]
        recent[:] = [*recent[1 - tuning.DRAFTS.recent :], seconds]
        if not self._with_drafts:
            self._until_plain = max(self._until_plain, tuning.DRAFTS.plain)

    def observe(self, key: int, drafted: int, accepted: int, given_up: bool = False) -> None:
        """Note a row's right drafts. With `given_up` the next was right too, but not another row's."""
        self.drafted += drafted
        self.accepted += accepted
        checked = accepted if given_up else min(drafted, accepted + 1)
        self.checked += checked
        record = self._records.setdefault(key, _Record())
        record.age()
        for counts in (self._all, record):
            counts.verified, counts.accepted = counts.verified + checked, counts.accepted + accepted

    def discard(self, key: int) -> None:
        """Discard a row."""
        self._records.pop(key, None)
        self.drafter.discard(key)
