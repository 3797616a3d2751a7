"""Queue of waiting requests: who begins next."""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from heapq import heapify, heappop, heapreplace
from typing import Generic, TypeVar

from zinfer.core.request import Request
from zinfer.generation import tuning

R = TypeVar("R", bound=Request)


class Queue(Generic[R]):
    """Waiting requests in the order in which they begin. Long answers begin first, then long prompts: they end last,
    and neighbours are alike. Tokens to come count by powers of two. If `fair`, owners take turns: first comes the one
    with fewest running rows, as `hold` counts them; of several the one with so few for longest (`turn`); of its rows
    the first by key, a number that grows. Rows must not change while they wait."""

    def __init__(self, fair: bool = False, rows: Iterable[R] = ()) -> None:
        self.fair = fair
        self.held: Counter[int] = Counter()  # running rows of each owner
        self._rows: dict[int, R] = {}  # by key
        self._lanes: dict[int, list[R]] = {}  # rows of each owner, or all, the next one last
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
                self.turn(lane)
            waiting = self._lanes.setdefault(lane, [])
            if len(added) * tuning.TUNED.singly > len(waiting):
                waiting += added
                waiting.sort(key=self._rank)
            else:
                for row in added:
                    insort(waiting, row, key=self._rank)
        self._front = []

    def remove(self, rows: Iterable[R]) -> None:
        """Take rows out that wait."""
        for row in rows:
            waiting = self._lanes[self._lane(row)]
            del waiting[bisect_left(waiting, self._rank(row), key=self._rank)], self._rows[row.key]
            if not waiting:
                del self._lanes[self._lane(row)]
        self._front = []

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
            items = self._lanes.items()
            heap = [(self.held[lane], self._since[lane], waiting[-1].key, lane, -1) for lane, waiting in items]
            heapify(heap)
            self._front = []
            while heap and len(self._front) < count:
                held, since, _, lane, place = heap[0]
                waiting = self._lanes[lane]
                self._front.append(waiting[place])
                if place > -len(waiting):  # the next one comes as if this one ran
                    heapreplace(heap, (held + 1, since, waiting[place - 1].key, lane, place - 1))
                else:
                    heappop(heap)
        return self._front[:count]

    def hold(self, held: Counter[int]) -> None:
        """Count the running rows of each owner anew."""
        self.held, self._front = held, []
        self._since = {lane: turn for lane, turn in self._since.items() if lane in self._lanes or held[lane]}

    def turn(self, owner: int) -> None:
        """Put an owner, whose row has ended, behind its equals."""
        self._turn += 1
        self._since[owner if self.fair else 0] = self._turn
        self._front = []

    def shares(self) -> bool:
        """Tell whether several owners have rows here, or running ones."""
        return self.fair and len(self.held.keys() | self._lanes.keys()) > 1
