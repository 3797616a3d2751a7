"""Queue of waiting requests: who begins next, without a look at all that wait."""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from heapq import heappop, heapreplace
from itertools import islice
from typing import Generic, TypeVar

from zinfer.core.request import Request
from zinfer.generation import tuning

R = TypeVar("R", bound=Request)


class Queue(Generic[R]):
    """Waiting requests in the order in which they begin.

    Long answers begin first, then long prompts: they end last, and neighbours are alike. Tokens to come count by powers
    of two. If `fair`, owners take turns: first comes the one with fewest running rows, as `hold` counts them; of
    several the one with so few for longest (`turn`); of its rows the first by key, a number that grows. Rows must not
    change while they wait. What a call touches does not grow with the queue, but for a search by halves.
    """

    def __init__(self, fair: bool = False, rows: Iterable[R] = ()) -> None:
        self.fair = fair
        self.held: Counter[int] = Counter()  # running rows of each owner
        self._rows: dict[int, R] = {}  # by key
        self._lanes: dict[int, list[R]] = {}  # rows of each owner, or all, the next one last
        self._places: dict[int, tuple[int, int, int, int]] = {}  # of each lane in `_order`
        self._order: list[tuple[int, int, int, int]] = []  # lanes, the next one last
        self._since: dict[int, int] = {}  # turn since which an owner waits for a further row
        self._turn = 0
        self._front: list[R] = []  # the last answer of `front`, until the order changes
        self.add(rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: int) -> bool:
        return key in self._rows

    def __iter__(self) -> Iterator[R]:
        """Yield all rows, in the order in which they came."""
        return iter(self._rows.values())

    def _lane(self, row: R) -> int:
        return row.owner if self.fair else 0

    def _rank(self, row: R) -> tuple[int, ...]:
        """Return the sort key within a lane; the largest is next."""
        return (-row.key,) if self.fair else (row.left.bit_length(), row.length, row.left, -row.key)

    def add(self, rows: Iterable[R]) -> None:
        """Let rows wait."""
        new: dict[int, list[R]] = {}
        for row in rows:
            self._rows[row.key] = row
            new.setdefault(self._lane(row), []).append(row)
        for lane, added in new.items():
            if lane not in self._since:
                self._turn += 1
                self._since[lane] = self._turn
            waiting = self._lanes.setdefault(lane, [])
            if len(added) * tuning.TUNED.singly > len(waiting):
                waiting += added
                waiting.sort(key=self._rank)
            else:
                for row in added:
                    insort(waiting, row, key=self._rank)
        self._sort(new)

    def remove(self, rows: Iterable[R]) -> None:
        """Take rows out that wait."""
        changed = set()
        for row in rows:
            waiting = self._lanes[self._lane(row)]
            del waiting[bisect_left(waiting, self._rank(row), key=self._rank)], self._rows[row.key]
            changed.add(self._lane(row))
        self._sort(changed)

    def begin(self, rows: Collection[R]) -> None:
        """Take rows out that run from now on."""
        self.held.update(row.owner for row in rows)
        self.remove(rows)

    def get(self, key: int) -> R | None:
        """Return the waiting row with a key; None if there is none."""
        return self._rows.get(key)

    def front(self, count: int) -> list[R]:
        """Return the first `count` rows, or all."""
        if len(self._front) < min(count, len(self._rows)):
            lanes = [lane for *_, lane in self._order[: -count - 1 : -1]]  # others' rows come later than their first
            next_ones = [(self.held[lane], self._since[lane], self._lanes[lane][-1].key, lane, -1) for lane in lanes]
            front: list[R] = []
            while next_ones and len(front) < count:
                held, since, _, lane, place = next_ones[0]
                waiting = self._lanes[lane]
                front.append(waiting[place])
                if place > -len(waiting):  # the next one comes as if this one ran
                    heapreplace(next_ones, (held + 1, since, waiting[place - 1].key, lane, place - 1))
                else:
                    heappop(next_ones)
            self._front = front
        return self._front[:count]

    def hold(self, held: Counter[int]) -> None:
        """Count the running rows of each owner anew."""
        changed = {owner for owner, _ in held.items() ^ self.held.items()}
        self.held = held
        self._sort(changed)

    def turn(self, owner: int) -> None:
        """Put an owner, whose row has ended, behind its equals."""
        self._turn += 1
        self._since[owner] = self._turn
        self._sort([owner])

    def shares(self) -> bool:
        """Tell whether several owners have rows here, or running ones."""
        return self.fair and len(self.held.keys() | set(islice(self._lanes, 2))) > 1

    def _sort(self, lanes: Collection[int]) -> None:
        """Put lanes that have changed into their places."""
        if not lanes:
            return
        self._front = []
        singly = len(lanes) * tuning.TUNED.singly < len(self._order)
        for lane in lanes:
            old = self._places.pop(lane, None)
            if singly and old is not None:
                del self._order[bisect_left(self._order, old)]
            if waiting := self._lanes.get(lane):
                self._places[lane] = place = -self.held[lane], -self._since[lane], -waiting[-1].key, lane
                if singly:
                    insort(self._order, place)
            else:
                self._lanes.pop(lane, None)
                if not self.held[lane]:
                    self._since.pop(lane, None)
        if not singly:
            self._order = sorted(self._places.values())
