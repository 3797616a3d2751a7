"""Several GPUs of a host as one engine, each with its rows.

A rank is a whole engine with its own micro-batches; its weights come in parts over all links. `Team`, the engine that
the worker sees, divides the rows between the ranks (`Member`); all do one thing at a time, so that every rank takes
part in every pass, also one without rows. The plan counts the whole batch.
"""

import gc
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import count
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from zinfer.core.progress import Progress, silent
from zinfer.engine import EngineError
from zinfer.engine.base import Engine, MicroBatch, Work, check_sources, check_works
from zinfer.engine.kv_snapshot import RowsPast
from zinfer.engine.ranks import Channel, Follower, Group, Leader
from zinfer.plan.planner import Plan
from zinfer.record.measurement import Effective
from zinfer.system.host import peak_bytes, shared_bytes

E = TypeVar("E", bound=Engine)
REASONS = "move_rows", "pad", "chunk", "draft"  # of what the ranks' engines cannot do


class RankWork(NamedTuple):
    """Work of one rank: as `Work`, with the key of its micro-batch."""

    key: int
    token_ids: Tensor
    keep: int


class PassResult(NamedTuple):
    """Logits of a rank's works, and its recording. Logits are None if the pass must run once more."""

    logits: list[Tensor] | None
    recording: Any = None


class Member(Generic[E]):
    """A rank's end of a team: an engine that obeys the leader. Micro-batches have keys."""

    def __init__(self, plan: Plan, progress: Progress, group: Group) -> None:
        self.group = group
        self.engine = self.load(plan, progress)
        self._batches: dict[int, MicroBatch] = {}

    @abstractmethod
    def load(self, plan: Plan, progress: Progress) -> E:
        """Load the engine of this rank, one of `group`."""

    @abstractmethod
    def forward(self, works: Sequence[Any]) -> PassResult:
        """Take part in a pass, with the works of `Team.orders`."""

    def obey(self, name: str, *values: Any) -> Any:
        """Call the method `name` of this object, or else of its engine."""
        return getattr(self if hasattr(self, name) else self.engine, name)(*values)

    def skip(self) -> None:
        """Do nothing: the order is for others."""

    def admit(self, key: int, mask: Tensor, capacity: int) -> int:
        """Make a micro-batch; return the number of its host rows."""
        batch: MicroBatch = self.engine.admit(mask, capacity)
        self._batches[key] = batch
        return batch.host_rows

    def move_rows(self, key: int, sources: Sequence[tuple[int, Sequence[int]]], capacity: int) -> tuple[int, int]:
        """Move rows to a new micro-batch; return its length and host rows."""
        batch = self.engine.move_rows([(self._batches[source], rows) for source, rows in sources], capacity)
        self._batches[key] = batch
        self._drop_retired()
        return batch.length, batch.host_rows

    def retire(self, key: int, rows: Sequence[int] | None) -> int:
        """Retire a micro-batch, or rows of it; return its host rows left."""
        if key in self._batches:
            self.engine.retire(self._batches[key], rows)
            self._drop_retired()
        return self._batches[key].host_rows if key in self._batches else 0

    def rollback(self, key: int, lengths: Tensor) -> None:
        self.engine.rollback(self._batches[key], lengths.to(self.engine.device))

    def works(self, works: Sequence[RankWork]) -> list[Work]:
        """Return works with their micro-batches."""
        return [Work(self._batches[key], token_ids, keep) for key, token_ids, keep in works]

    def close(self) -> None:
        """Part from the other ranks, and free everything."""
        self.group.leave()
        self.engine.close()

    def clear(self) -> None:
        self.engine.clear()
        self._batches = {}

    def reset_peak(self) -> None:
        gc.collect()
        self.engine.reset_peak()

    def host_memory(self) -> tuple[int, int]:
        """Return the peak memory of this process, and its shared bytes."""
        return peak_bytes(), shared_bytes()

    def _drop_retired(self) -> None:
        self._batches = {key: batch for key, batch in self._batches.items() if self.engine.is_live(batch)}


def follow(descriptor: int, orders: int, answers: int) -> None:
    """Entry point of a follower: load, then serve the leader's commands."""
    channel = Channel(descriptor, answers, orders)
    with suppress(EOFError):
        member_class, plan, threads, place = channel.receive()
        group = Follower(channel, *place)
        try:
            torch.set_num_threads(threads)
            member = member_class(plan, silent, group)
        except EOFError:
            return
        except BaseException as error:
            group.answer(error)
            channel.receive()  # until the leader has heard of it
            return
        try:
            group.agree()
            while True:  # nothing here keeps an error: its traceback holds what the failed pass held
                group.answer(_obeyed(member, group.receive()))
        finally:
            member.close()


def _obeyed(member: Member[Any], order: Sequence[Any]) -> Any:
    """Return a member's answer to an order, or its exception."""
    try:
        return member.obey(*order)
    except Exception as error:
        return error


class TeamBatch(MicroBatch):
    """Micro-batch whose rows lie on several ranks."""

    def __init__(self, key: int, ranks: Sequence[int], prompt_len: int, capacity: int) -> None:
        super().__init__(len(ranks), prompt_len, capacity)
        self.key, self.ranks = key, list(ranks)  # rank of each row
        self.lengths = dict.fromkeys(ranks, 0)  # positions in the cache of each rank
        self.host_rows_of: dict[int, int] = {}  # rows in host memory of each rank

    @property
    def host_rows(self) -> int:
        return sum(self.host_rows_of.values())

    def rows_of(self, rank: int) -> list[int]:
        """Return the rows of a rank, in their order there."""
        return [row for row, owner in enumerate(self.ranks) if owner == rank]


class Team(Engine[TeamBatch], Generic[E]):
    """Engine on `Placement.gpus` GPUs, or processes of the CPU. Each is a `member`."""

    member: ClassVar[type[Member[Any]]]
    shares_weights: ClassVar[bool] = False  # True if weights lie in memory that all ranks share
    _member: Member[E] | None = None
    _group: Leader

    def __init__(self, plan: Plan, progress: Progress = silent) -> None:
        super().__init__(plan, progress)
        self._keys = count()
        self._threads = torch.get_num_threads()
        self._group = Leader(plan, self.member)
        try:
            self._member = self.member(plan, progress, self._group)
            self._group.agree()
            self._engine.use_threads(max(1, self._threads // self._group.size))
        except BaseException:
            self.close()
            raise
        self.draft = self._engine.draft
        for name in ("equal_lengths", *(f"cannot_{reason}" for reason in REASONS)):
            setattr(self, name, getattr(self._engine, name))

    @property
    def _engine(self) -> E:
        assert self._member is not None
        return self._member.engine

    @property
    def one_pass(self) -> bool:
        return self._engine.one_pass

    @property
    def joins(self) -> bool:
        return self._engine.joins

    @property
    def loaded_bytes(self) -> int:
        return self._engine.loaded_bytes

    def _run(self, orders: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Have each rank obey its order (a name, values). Raises the first exception once all have answered."""
        assert self._member is not None
        self._group.order(orders[1:])
        answer = _obeyed(self._member, orders[0])
        try:
            others = self._group.answers()
        except Exception as error:
            raise (answer if isinstance(answer, Exception) else error) from None
        if isinstance(answer, Exception):
            raise answer
        return [answer, *others]

    def _all(self, name: str, *values: Any) -> list[Any]:
        return self._run([(name, *values)] * self._group.size)

    def _some(self, name: str, values: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Have the ranks that have `values` do `name`; return their answers."""
        ranks = range(self._group.size)
        answers = self._run([(name, *values[rank]) if rank in values else ("skip",) for rank in ranks])
        return {rank: answers[rank] for rank in values}

    # Micro-batches

    def cannot_snapshot(self) -> str | None:
        return "several GPUs keep no keys and values of earlier prompts"

    def _room(self, _rows: int, _length: int, _capacity: int) -> AbstractContextManager[None]:
        """Make room in all ranks for a micro-batch that the block makes. That may fail in some of them."""
        return nullcontext()

    def admit(self, attention_mask: Tensor, capacity: int, past: RowsPast | None = None) -> TeamBatch:
        if past is not None:
            raise EngineError(self.cannot_snapshot())
        mask = attention_mask.cpu()
        rows, length = mask.shape
        batch = TeamBatch(next(self._keys), self._divide(rows, capacity), length, capacity)
        with self._room(rows, length, capacity):
            self.batches.append(batch)
            try:
                orders = {rank: (batch.key, mask[batch.rows_of(rank)], capacity) for rank in batch.lengths}
                batch.host_rows_of = self._some("admit", orders)
            except BaseException:
                self.retire(batch)
                raise
        return batch

    def _divide(self, rows: int, capacity: int) -> list[int]:
        """Choose a rank for each of `rows`. The emptiest ranks get most rows, the first ranks the first rows."""
        ranks = range(self._group.size)
        used = [sum(batch.capacity * len(batch.rows_of(rank)) for batch in self.batches) for rank in ranks]
        chosen = []
        for _ in range(rows):
            rank = min(ranks, key=used.__getitem__)
            used[rank] += capacity
            chosen.append(rank)
        return sorted(chosen)

    def retire(self, batch: TeamBatch, rows: Sequence[int] | None = None) -> None:
        if not self.is_live(batch):
            return
        gone = set(range(batch.batch_size) if rows is None else rows)
        orders: dict[int, tuple[Any, ...]] = {}
        for rank in batch.lengths:
            mine = batch.rows_of(rank)
            if retired := [index for index, row in enumerate(mine) if row in gone]:
                orders[rank] = batch.key, retired if len(retired) < len(mine) else None
        batch.host_rows_of |= self._some("retire", orders)
        self._drop(batch, gone)

    def _drop(self, batch: TeamBatch, gone: set[int]) -> None:
        """Note that rows of a batch are gone from their ranks."""
        batch.ranks = [rank for row, rank in enumerate(batch.ranks) if row not in gone]
        batch.batch_size = len(batch.ranks)
        batch.lengths = {rank: length for rank, length in batch.lengths.items() if rank in batch.ranks}
        batch.host_rows_of = {rank: number for rank, number in batch.host_rows_of.items() if rank in batch.ranks}
        if not batch.ranks:
            self.discard(batch)

    def move_rows(self, sources: Sequence[tuple[TeamBatch, Sequence[int]]], capacity: int) -> TeamBatch:
        if (why_not := self.cannot_move_rows()) is not None:
            raise EngineError(why_not)
        check_sources(sources, self.batches)
        ranks = [batch.ranks[row] for batch, rows in sources for row in rows]
        length = min(capacity, max(batch.length for batch, _ in sources))  # the ranks count what is real
        target = TeamBatch(next(self._keys), ranks, length, capacity)
        orders = dict[int, tuple[Any, ...]]()
        for rank in target.lengths:
            numbers = [(batch.key, batch.rows_of(rank), rows) for batch, rows in sources]
            parts = [(key, [mine.index(row) for row in rows if row in mine]) for key, mine, rows in numbers]
            orders[rank] = target.key, [(key, indices) for key, indices in parts if indices], capacity
        with self._room(len(ranks), length, capacity):
            answers = self._some("move_rows", orders)
        target.lengths = {rank: length for rank, (length, _) in answers.items()}
        target.host_rows_of = {rank: host_rows for rank, (_, host_rows) in answers.items()}
        target.length = target.prompt_len = max(target.lengths.values())
        self.batches.append(target)
        for batch, rows in sources:
            self._drop(batch, set(rows))
        return target

    def rollback(self, batch: TeamBatch, lengths: Tensor) -> None:
        kept = lengths.cpu()
        # Rows of a rank have as many positions fewer in its cache as its longest row is shorter.
        mine = {rank: kept[batch.rows_of(rank)] - (batch.length - length) for rank, length in batch.lengths.items()}
        self._some("rollback", {rank: (batch.key, kept_there) for rank, kept_there in mine.items()})
        batch.lengths = {rank: int(kept_there.max()) for rank, kept_there in mine.items()}
        batch.length = int(kept.max())

    # Passes

    @torch.inference_mode()
    def forward(self, works: Sequence[Work[TeamBatch]]) -> list[Tensor]:
        return self._passes(works, "forward")[0]

    def orders(self, works: Sequence[Work[TeamBatch]]) -> list[list[Any]]:
        """Return what each rank does in a pass, for `Member.forward`. A rank without rows has nothing to compute."""
        orders: list[list[Any]] = [[] for _ in range(self._group.size)]
        for batch, token_ids, keep in works:
            for rank in batch.lengths:
                orders[rank].append(RankWork(batch.key, token_ids.cpu()[batch.rows_of(rank)], keep))
        return orders

    def _passes(self, works: Sequence[Work[TeamBatch]], name: str) -> tuple[list[Tensor], list[Any]]:
        """Run a pass; return logits ``[B, keep, V]`` of each work. Returns the recordings of the ranks, too."""
        check_works(works, self.batches)
        orders = self.orders(works)
        logits: list[list[Tensor]] = [[] for _ in orders]
        done = [False] * len(orders)
        recordings: list[Any] = []
        while not all(done):  # ranks that have to compute theirs in another way, while the others have none
            todo = [[] if ready else order for order, ready in zip(orders, done, strict=True)]
            results: list[PassResult] = self._run([(name, order) for order in todo])
            recordings = [result.recording for result in results if result.recording is not None]
            for rank, (parts, _) in enumerate(results):
                if parts is not None and not done[rank]:
                    logits[rank], done[rank] = [part.to(self.device) for part in parts], True
        for work in works:
            more = work.token_ids.shape[1]
            work.batch.length += more
            work.batch.lengths = {rank: length + more for rank, length in work.batch.lengths.items()}
        parts_of = [iter(parts) for parts in logits]
        return [self._joined(work.batch, parts_of) for work in works], recordings

    def _joined(self, batch: TeamBatch, parts: Sequence[Iterator[Tensor]]) -> Tensor:
        """Join the logits of a micro-batch, the next part of each rank."""
        mine = {rank: next(parts[rank]) for rank in sorted(batch.lengths)}
        first = next(iter(mine.values()))
        whole = first.new_empty((batch.batch_size, *first.shape[1:]))
        for rank, part in mine.items():
            whole[batch.rows_of(rank)] = part
        return whole

    # All else

    def effective(self) -> Effective:
        ranks: list[Effective] = self._all("effective")
        first = ranks[0]
        pinned = first.pinned_bytes if self.shares_weights else sum(rank.pinned_bytes for rank in ranks)
        settings = self._settings([rank.settings for rank in ranks]) | {"gpus": self._group.size}
        counted = {"pinned_bytes": pinned, "settings": settings}
        return first.model_copy(update=counted | {"gpu_weight_bytes": sum(rank.gpu_weight_bytes for rank in ranks)})

    def _settings(self, ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return dict(ranks[0])

    def give_back(self) -> None:
        self._all("give_back")

    def reset_peak(self) -> None:
        self._all("reset_peak")

    def device_memory(self) -> tuple[int, int] | None:
        ranks = [memory for memory in self._all("device_memory") if memory is not None]
        return (max(peak for peak, _ in ranks), max(used for _, used in ranks)) if ranks else None

    def host_memory(self) -> int:
        (peak, _), *others = self._all("host_memory")
        return int(peak + sum(max(0, peak - shared) for peak, shared in others))

    def clear(self) -> None:
        self._all("clear")
        self.batches = []

    def close(self) -> None:
        if self._member is not None:
            self.batches = []
            self._group.dismiss()
            self._member.close()
            self._group.close()
            self._member = self.draft = None
            torch.set_num_threads(self._threads)
        elif "_group" in self.__dict__:
            self._group.close()
