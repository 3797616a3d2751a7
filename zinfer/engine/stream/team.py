"""`stream` on several GPUs of a host: a pass brings the weights once to every rank, whose parts of each layer are
gathered (`zinfer.engine.stream.weights.gather`). The ranks place their weights and buffers alike, for the whole
batch."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from zinfer.core.case import Workload
from zinfer.core.progress import Progress, silent
from zinfer.engine.base import Work, combined_workload
from zinfer.engine.stream.engine import Stream
from zinfer.engine.stream.trace import joined
from zinfer.engine.stream.weights.gather import GatherRing
from zinfer.engine.team import Member, PassResult, RankWork, Team, TeamBatch
from zinfer.plan.bytes import Placement
from zinfer.plan.planner import Plan
from zinfer.record.measurement import Span


class StreamMember(Member[Stream]):
    """A rank's `Stream`."""

    def load(self, plan: Plan, progress: Progress) -> Stream:
        return Stream(plan, progress, self.group)

    @property
    def _ring(self) -> GatherRing:
        assert isinstance(self.engine.ring, GatherRing)
        return self.engine.ring

    def bring(self) -> int:
        return self._ring.bring()

    def abandon(self) -> None:
        """Begin anew with the next pass."""
        self._ring.abandon()

    def expect(self, load: Workload | None, placement: Placement | None) -> None:
        self.engine.given = placement
        self.engine.expect(load)

    def forward(self, works: Sequence[RankWork]) -> PassResult:
        before = self._ring.passes
        try:
            return PassResult(self.engine.attempt(self.works(works)) if works else [])
        finally:
            if self._ring.passes == before:
                self._ring.idle_pass()

    def watched(self, works: Sequence[RankWork]) -> PassResult:
        with self._ring.watched() as trace:
            return self.forward(works)._replace(recording=(trace.begun, trace.spans()))


class StreamTeam(Team[Stream]):
    """Engine `stream` on several GPUs."""

    shares_weights: ClassVar[bool] = True
    member = StreamMember

    def __init__(self, plan: Plan, progress: Progress = silent) -> None:
        self._whole: Workload | None = None  # load that the ranks are placed for
        self._current: Placement | None = None
        super().__init__(plan, progress)

    def bring(self) -> int:
        return sum(self._all("bring"))

    def _apply_placement(self, placement: Placement) -> None:
        """Place all ranks alike. If that fails they may differ: all begin anew then, and are placed before a pass."""
        self._current = None
        try:
            self._all("apply_placement", placement)
        except BaseException:
            self._all("abandon")
            raise
        self._current = placement

    @contextmanager
    def _room(self, rows: int, length: int, capacity: int) -> Iterator[None]:
        whole = self.expected or combined_workload(self.batches, rows, length, capacity)
        placement = self._current if whole == self._whole else None
        self._whole = None
        self._apply_placement(placement or self.planner.placement(whole))
        try:
            yield
        except BaseException:
            self._current = None
            self._all("abandon")
            raise
        self._whole = whole

    def _restore_placement(self) -> None:
        """Place the ranks for the micro-batches that there are. Raises torch.OutOfMemoryError or MemoryError."""
        first, *others = self.batches
        whole = self.expected or combined_workload(others, first.batch_size, first.prompt_len, first.capacity)
        self._apply_placement(self.planner.placement(whole))

    def expect(self, load: Workload | None) -> None:
        super().expect(load)
        if load is None:
            self._all("expect", None, None)
            return
        part = load.model_copy(update={"batch_size": -(-load.batch_size // self._group.size)})
        self._current = self._whole = None  # a rank without room says so only later
        self._all("abandon")
        self._all("expect", part, self.planner.placement(load))

    def orders(self, works: Sequence[Work[TeamBatch]]) -> list[list[RankWork]]:
        if self._current is None:
            self._restore_placement()
        return super().orders(works)

    def timeline(self, works: Sequence[Work[TeamBatch]]) -> tuple[Span, ...]:
        with torch.inference_mode():
            return joined(self._passes(works, "watched")[1])

    def _settings(self, ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
        settings = super()._settings(ranks)
        for name in ("kv_host_rows", "kv_threads", "kv_bytes_per_step"):
            settings[name] = sum(rank[name] for rank in ranks)
        attending = [rank["kv_attention"] for rank in ranks if rank["kv_host_rows"]]
        return settings | {"kv_attention": (attending or ["gpu"])[0]}
