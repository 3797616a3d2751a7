"""Several GPUs of a host as one engine: each computes its own rows of every micro-batch, of weights that come in parts
over all links.

A rank is a whole engine with its own micro-batches. `Team`, the engine that the worker sees, divides the rows between
the ranks, and has all of them do one thing at a time (`Member`): so every rank takes part in every pass, also one
without rows. The plan counts the whole batch. An engine that can do so has a subclass of both.
"""

import gc
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import count
from multiprocessing.connection import Connection
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from zinfer.core.progress import Progress, silent
from zinfer.engine import EngineError
from zinfer.engine.base import Engine, MicroBatch, Work, check_sources, check_works
from zinfer.engine.kv_snapshot import KVSnapshot, Past, Sent, received, sent
from zinfer.engine.pinned import TensorPlace
from zinfer.engine.ranks import Channel, Follower, Group, Leader, Start
from zinfer.plan.planner import Plan
from zinfer.record.measurement import Effective
from zinfer.system.host import peak_bytes, shared_bytes

E = TypeVar("E", bound=Engine)


class RankWork(NamedTuple):
    """Work of one rank: the key of its micro-batch, and as in `Work`."""

    key: int
    token_ids: Tensor
    keep: int


class Passed(NamedTuple):
    """Answer of a rank to a pass: the logits of each of its works, None if the pass has to be run once more; and the
    recording, if one was asked for."""

    logits: list[Tensor] | None
    recording: Any = None


class Member(Generic[E]):
    """A rank's end of a team: loads an engine when it is made, and does what the leader says with it. Micro-batches
    have keys."""

    def __init__(self, plan: Plan, progress: Progress, group: Group) -> None:
        self.group = group
        self.engine = self.load(plan, progress)
        self._batches: dict[int, MicroBatch] = {}

    @abstractmethod
    def load(self, plan: Plan, progress: Progress) -> E:
        """Return the engine of this rank, one of `group`."""

    @abstractmethod
    def forward(self, works: Sequence[Any]) -> Passed:
        """Take part in a pass, with the works that `Team.orders` gives this rank."""

    def use_threads(self, count: int) -> None:
        """Use no more than `count` threads of the CPU."""
        torch.set_num_threads(count)

    def maybe(self, order: "tuple[str, tuple[Any, ...]] | None") -> Any:
        """Do what is ordered, by name and values; nothing where the order is for others."""
        return None if order is None else getattr(self, order[0])(*order[1])

    def admit(
        self,
        key: int,
        mask: Tensor,
        capacity: int,
        past: Sequence[Past | tuple[Sent, list[TensorPlace]]],
        answered: Sequence[int],
    ) -> int:
        """Make a micro-batch; return the number of its rows with their KV cache in host memory."""
        known = [self._received(*one) if isinstance(one, tuple) else one for one in past]
        self._batches[key] = batch = self.engine.admit(mask, capacity, known, answered)
        if known and self.engine.device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # the copies have run
        return batch.hosted

    def _received(self, past: Sent, places: Sequence[TensorPlace]) -> Past:
        assert isinstance(self.group, Follower)
        return received(past, self.group.taken(places))

    def snapshot(self, key: int, first: int, last: int, row: int | None) -> KVSnapshot:
        return self.engine.snapshot(self._batches[key], first, last, row)

    def regroup(self, key: int, sources: Sequence[tuple[int, Sequence[int]]], capacity: int) -> tuple[int, int]:
        """Move rows to a new micro-batch; return its length, and rows as `admit` does."""
        moved = [(self._batches[source], rows) for source, rows in sources]
        self._batches[key] = batch = self.engine.regroup(moved, capacity)
        self._forget()
        return batch.length, batch.hosted

    def retire(self, key: int, rows: Sequence[int] | None) -> int:
        """Retire a micro-batch, or rows of it; return rows as `admit` does."""
        batch = self._batches.get(key)
        if batch is None:
            return 0
        self.engine.retire(batch, rows)
        self._forget()
        return self._batches[key].hosted if key in self._batches else 0

    def rollback(self, key: int, lengths: Tensor) -> None:
        self.engine.rollback(self._batches[key], lengths.to(self.engine.device))

    def works(self, works: Sequence[RankWork]) -> list[Work]:
        """Return works with their micro-batches."""
        return [Work(self._batches[key], token_ids, keep) for key, token_ids, keep in works]

    def close(self) -> None:
        """Part from the other ranks, and free everything."""
        self.group.leave()
        self.engine.close()

    def effective(self) -> Effective:
        return self.engine.effective()

    def clear(self) -> None:
        """Retire all micro-batches."""
        self.engine.clear()
        self._batches = {}

    def give_back(self) -> None:
        self.engine.give_back()

    def reset_peak(self) -> None:
        gc.collect()
        self.engine.reset_peak()

    def device_memory(self) -> tuple[int, int] | None:
        return self.engine.device_memory()

    def host_memory(self) -> tuple[int, int]:
        """Return the most memory that this process has held, and how much of it others have, too, in bytes."""
        return peak_bytes(), shared_bytes()

    def _forget(self) -> None:
        live = {id(batch) for batch in self.engine.batches}
        self._batches = {key: batch for key, batch in self._batches.items() if id(batch) in live}


def follow(descriptor: int) -> None:
    """Load as the leader says, then serve its commands until it ends."""
    channel = Channel(Connection(descriptor))
    with suppress(EOFError):
        start = channel.receive()
        assert isinstance(start, Start)
        group = Follower(start, channel)
        try:
            torch.set_num_threads(start.threads)
            member = start.member(start.plan, silent, group)
        except EOFError:
            return
        except BaseException as error:
            group.answer(error)
            channel.receive()  # until the leader has heard of it
            return
        try:
            group.agree()
            _serve(group, member)
        finally:
            member.close()


def _serve(group: Follower, member: Member[Any]) -> None:
    while True:
        name, *values = group.receive()
        try:
            found = getattr(member, name)(*values)
        except Exception as error:
            group.answer(error)
            del error  # its traceback holds what the failed pass held
            continue
        if isinstance(found, Passed):
            group.answer(found._replace(logits=None), found.logits)
        elif isinstance(found, KVSnapshot):
            told, memory = sent(found)
            group.answer(told, memory)
            found.close()
        else:
            group.answer(found)


class TeamBatch(MicroBatch):
    """A micro-batch whose rows lie on several ranks."""

    def __init__(self, key: int, ranks: Sequence[int], prompt_len: int, capacity: int) -> None:
        super().__init__(len(ranks), prompt_len, capacity)
        self.key, self.ranks = key, list(ranks)  # rank of each row
        self.lengths = dict.fromkeys(ranks, 0)  # positions in the cache of each rank
        self.hosted_of: dict[int, int] = {}  # rows in host memory of each rank

    @property
    def hosted(self) -> int:
        return sum(self.hosted_of.values())

    def rows_of(self, rank: int) -> list[int]:
        """Return the rows of a rank, in their order there."""
        return [row for row, own in enumerate(self.ranks) if own == rank]


class Team(Engine, Generic[E]):
    """Engine on `Placement.gpus` GPUs; on as many processes of the CPU where there is none. Each is a `member`."""

    member: ClassVar[type[Member[Any]]]
    one_copy: ClassVar[bool] = False  # True if weights lie in memory that all ranks share
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
            self._member.use_threads(max(1, self._threads // self._group.size))
        except BaseException:
            self.close()
            raise
        self.draft = self._engine.draft
        self.alike_until, self.recompute_beyond = self._engine.alike_until, self._engine.recompute_beyond

    @property
    def _engine(self) -> E:
        assert self._member is not None
        return self._member.engine

    @property
    def one_trip(self) -> bool:
        return self._engine.one_trip

    @property
    def joins(self) -> bool:
        return self._engine.joins

    @property
    def loaded_bytes(self) -> int:
        return self._engine.loaded_bytes

    def _run(self, name: str, orders: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Have every rank do `name` with its own values; return the answers of all, in the order of their numbers.
        Raises the first exception of a rank once all have answered."""
        self._group.order([(name, *values) for values in orders[1:]])
        failed: Exception | None = None
        own: Any = None
        try:
            own = getattr(self._member, name)(*orders[0])
        except Exception as error:
            failed = error
        try:
            others = self._group.answers()
        except Exception as error:
            raise (failed or error) from None
        if failed is not None:
            raise failed
        return [own, *others]

    def _all(self, name: str, *values: Any) -> list[Any]:
        return self._run(name, [values] * self._group.size)

    def _some(self, name: str, orders: dict[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Have the ranks that `orders` names do `name`; return their answers."""
        everyone = [(name, orders[rank]) if rank in orders else None for rank in range(self._group.size)]
        found = self._run("maybe", [(one,) for one in everyone])
        return {rank: found[rank] for rank in orders}

    # Micro-batches

    def _room(self, _rows: int, _length: int, _capacity: int) -> AbstractContextManager[None]:
        """Make room in all ranks for one more micro-batch, which the block makes; it may fail in some of them."""
        return nullcontext()

    def admit(
        self, attention_mask: Tensor, capacity: int, past: Sequence[Past] = (), answered: Sequence[int] = ()
    ) -> TeamBatch:
        if past and (why_not := self.cannot_snapshot()) is not None:
            raise EngineError(why_not)
        mask = attention_mask.cpu()
        rows, length = mask.shape
        batch = TeamBatch(next(self._keys), self._divide(rows, capacity), length, capacity)
        with self._room(rows, length, capacity):
            self.batches.append(batch)
            try:
                orders = {
                    rank: (batch.key, mask[rows], capacity, self._given(past, batch, rank), own)
                    for rank in batch.lengths
                    for rows in [batch.rows_of(rank)]
                    for own in [[answered[row] for row in rows] if answered else []]
                }
                batch.hosted_of = self._some("admit", orders)
            except BaseException:
                self.retire(batch)
                raise
        batch.length = sum(part.length for part in past)
        batch.lengths = dict.fromkeys(batch.lengths, batch.length)
        return batch

    def _given(self, past: Sequence[Past], batch: TeamBatch, rank: int) -> list[Any]:
        """Return the parts of `past` that belong to the rows of a rank, as it can have them."""
        if any(not part.fits(self.plan.model.num_layers, batch.batch_size) for part in past):
            raise EngineError("the snapshots belong to other rows or another model, or are not in order")
        own = [part.select(batch.rows_of(rank)) for part in past]
        if rank == 0 or not own:
            return own
        told = [sent(part) for part in own]
        places = iter(self._group.give(rank, [one for _, memory in told for one in memory]))
        return [(one, [next(places) for _ in memory]) for one, memory in told]

    @torch.inference_mode()
    def snapshot(self, batch: MicroBatch, first: int, last: int, row: int | None = None) -> KVSnapshot:
        if (why_not := self.cannot_snapshot()) is not None:
            raise EngineError(why_not)
        if not isinstance(batch, TeamBatch) or not 0 <= first < last <= batch.length:
            raise EngineError(f"positions {first} to {last} have not been computed")
        pin = self.device.type == "cuda"
        if row is not None:
            rank = batch.ranks[row]
            place = batch.rows_of(rank).index(row)
            found = _snapshot(self._some("snapshot", {rank: (batch.key, first, last, place)})[rank])
            return found if rank == 0 else KVSnapshot.joined([(found, [0])], 1, first, last, pin)
        # Rows of a rank have as many positions fewer in its cache as its longest row is shorter.
        fewer = {rank: batch.length - length for rank, length in batch.lengths.items()}
        orders = {
            rank: (batch.key, max(0, first - less), last - less, None) for rank, less in fewer.items() if last > less
        }
        parts = {rank: _snapshot(one) for rank, one in self._some("snapshot", orders).items()}
        try:
            own = [(one, batch.rows_of(rank)) for rank, one in parts.items()]
            return KVSnapshot.joined(own, batch.batch_size, first, last, pin)
        finally:
            for one in parts.values():
                one.close()

    def _divide(self, rows: int, capacity: int) -> list[int]:
        """Return a rank for each of `rows`: the first ranks get the first rows, those with most room most of them."""
        used = [sum(one.capacity * len(one.rows_of(rank)) for one in self.batches) for rank in range(self._group.size)]
        counts = [0] * len(used)
        for _ in range(rows):
            rank = min(range(len(used)), key=lambda one: used[one])
            used[rank] += capacity
            counts[rank] += 1
        return [rank for rank, number in enumerate(counts) for _ in range(number)]

    def retire(self, batch: MicroBatch, rows: Sequence[int] | None = None) -> None:
        if all(batch is not one for one in self.batches):
            return
        assert isinstance(batch, TeamBatch)
        gone = set(range(batch.batch_size) if rows is None else rows)
        orders: dict[int, tuple[Any, ...]] = {}
        for rank in batch.lengths:
            own = [place for place, row in enumerate(batch.rows_of(rank)) if row in gone]
            if own:
                orders[rank] = (batch.key, own if len(own) < len(batch.rows_of(rank)) else None)
        batch.hosted_of |= self._some("retire", orders)
        self._drop(batch, gone)

    def _drop(self, batch: TeamBatch, gone: set[int]) -> None:
        """Note that rows of a batch are gone from their ranks."""
        batch.ranks = [rank for row, rank in enumerate(batch.ranks) if row not in gone]
        batch.batch_size = len(batch.ranks)
        live = set(batch.ranks)
        batch.lengths = {rank: length for rank, length in batch.lengths.items() if rank in live}
        batch.hosted_of = {rank: number for rank, number in batch.hosted_of.items() if rank in live}
        if not batch.ranks:
            self.batches = [one for one in self.batches if one is not batch]

    def cannot_regroup(self) -> str | None:
        return self._engine.cannot_regroup()

    def regroup(self, sources: Sequence[tuple[MicroBatch, Sequence[int]]], capacity: int) -> TeamBatch:
        if (why_not := self.cannot_regroup()) is not None:
            raise EngineError(why_not)
        check_sources(sources, self.batches)
        moved: list[tuple[TeamBatch, Sequence[int]]] = []
        for batch, rows in sources:
            assert isinstance(batch, TeamBatch)
            moved.append((batch, rows))
        ranks = [batch.ranks[row] for batch, rows in moved for row in rows]
        length = min(capacity, max(batch.length for batch, _ in moved))  # the ranks count what is real
        target = TeamBatch(next(self._keys), ranks, length, capacity)
        orders = {rank: (target.key, _own(moved, rank), capacity) for rank in target.lengths}
        with self._room(len(ranks), length, capacity):
            found = self._some("regroup", orders)
        target.lengths = {rank: own for rank, (own, _) in found.items()}
        target.hosted_of = {rank: hosted for rank, (_, hosted) in found.items()}
        target.length = target.prompt_len = max(target.lengths.values())
        self.batches.append(target)
        for batch, rows in moved:
            self._drop(batch, set(rows))
        return target

    def rollback(self, batch: MicroBatch, lengths: Tensor) -> None:
        assert isinstance(batch, TeamBatch)
        kept = lengths.cpu()
        # Rows of a rank have as many positions fewer in its cache as its longest row is shorter.
        own = {rank: kept[batch.rows_of(rank)] - (batch.length - length) for rank, length in batch.lengths.items()}
        self._some("rollback", {rank: (batch.key, each) for rank, each in own.items()})
        batch.lengths = {rank: int(each.max()) for rank, each in own.items()}
        batch.length = int(kept.max())

    def cannot_pad(self) -> str | None:
        return self._engine.cannot_pad()

    def cannot_chunk(self) -> str | None:
        return self._engine.cannot_chunk()

    def cannot_draft(self) -> str | None:
        return self._engine.cannot_draft()

    def one_length(self) -> str | None:
        return self._engine.one_length()

    def cannot_snapshot(self) -> str | None:
        return self._engine.cannot_snapshot()

    # Passes

    @torch.inference_mode()
    def forward(self, works: Sequence[Work]) -> list[Tensor]:
        return self._passes(works, "forward")[0]

    def orders(self, works: Sequence[Work]) -> list[list[Any]]:
        """Return what each rank does in a pass, for `Member.forward`; a rank without rows has nothing to compute."""
        orders: list[list[Any]] = [[] for _ in range(self._group.size)]
        for batch, token_ids, keep in works:
            assert isinstance(batch, TeamBatch)
            here = token_ids.cpu()
            for rank in batch.lengths:
                orders[rank].append(RankWork(batch.key, here[batch.rows_of(rank)], keep))
        return orders

    def _passes(self, works: Sequence[Work], name: str) -> tuple[list[Tensor], list[Any]]:
        """Run a pass; return the logits ``[B, keep, V]`` of each work, on the leader's device, and the recording of
        each rank, if there are some."""
        check_works(works, self.batches)
        orders = self.orders(works)
        logits: list[list[Tensor]] = [[] for _ in orders]
        done = [False] * len(orders)
        traced: list[Any] = []
        while not all(done):  # ranks that have to compute theirs in another way, while the others have none
            todo = [[] if ready else own for own, ready in zip(orders, done, strict=True)]
            answers = [_passed(one) for one in self._run(name, [(own,) for own in todo])]
            traced = [one.recording for one in answers if one.recording is not None]
            for rank, (found, _) in enumerate(answers):
                if found is not None and not done[rank]:
                    logits[rank], done[rank] = [one.to(self.device) for one in found] if rank else found, True
        for work in works:
            assert isinstance(work.batch, TeamBatch)
            more = work.token_ids.shape[1]
            work.batch.length += more
            work.batch.lengths = {rank: length + more for rank, length in work.batch.lengths.items()}
        parts = [iter(own) for own in logits]
        return [self._joined(work, parts) for work in works], traced

    def _joined(self, work: Work, parts: Sequence[Iterator[Tensor]]) -> Tensor:
        """Return the logits of a work, whose parts come next from each of its ranks."""
        batch = work.batch
        assert isinstance(batch, TeamBatch)
        own = {rank: next(parts[rank]) for rank in sorted(batch.lengths)}
        first = next(iter(own.values()))
        if len(own) == 1:
            return first.clone()
        whole = first.new_empty((batch.batch_size, *first.shape[1:]), device=self.device)
        for rank, part in own.items():
            whole[batch.rows_of(rank)] = part.to(self.device)
        return whole

    # All else

    def effective(self) -> Effective:
        found: list[Effective] = self._all("effective")
        weights = sum(one.gpu_weight_bytes for one in found)
        pinned = found[0].pinned_bytes if self.one_copy else sum(one.pinned_bytes for one in found)
        settings = self._settings([one.settings for one in found]) | {"gpus": self._group.size}
        counted = {"gpu_weight_bytes": weights, "pinned_bytes": pinned, "settings": settings}
        return found[0].model_copy(update=counted)

    def _settings(self, found: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the settings of all ranks together."""
        return dict(found[0])

    def give_back(self) -> None:
        self._all("give_back")

    def reset_peak(self) -> None:
        self._all("reset_peak")

    def device_memory(self) -> tuple[int, int] | None:
        found = [one for one in self._all("device_memory") if one is not None]
        return (max(peak for peak, _ in found), max(used for _, used in found)) if found else None

    def host_memory(self) -> int:
        found: list[tuple[int, int]] = self._all("host_memory")
        return found[0][0] + sum(max(0, peak - shared) for peak, shared in found[1:])

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


def _own(moved: Sequence[tuple[TeamBatch, Sequence[int]]], rank: int) -> list[tuple[int, list[int]]]:
    """Return the rows of a rank among those that are moved, as it counts them, by the key of their batch."""
    found = []
    for batch, rows in moved:
        places = {row: place for place, row in enumerate(batch.rows_of(rank))}
        if own := [places[row] for row in rows if row in places]:
            found.append((batch.key, own))
    return found


def _snapshot(answer: Any) -> KVSnapshot:
    """Return a rank's answer to `snapshot`: the leader's own, or one over bytes that the next answer overwrites."""
    found = received(*answer) if isinstance(answer, tuple) else answer
    assert isinstance(found, KVSnapshot)
    return found


def _passed(answer: Any) -> Passed:
    """Return a rank's answer to `forward` or `watched`: as it is, or with logits that came by another way."""
    if isinstance(answer, Passed):
        return answer
    passed, logits = answer
    assert isinstance(passed, Passed)
    return passed._replace(logits=logits)
