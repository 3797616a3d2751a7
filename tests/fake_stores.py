"""Streamed engine with fake stores, for tests of its own decisions. It loads and computes nothing."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.test_parity import MACHINE, plan_of
from tests.test_ring import FakeQueues, plain
from zinfer.core.case import Workload
from zinfer.core.machine import Machine
from zinfer.core.progress import Progress, silent
from zinfer.engine.decoder import Part
from zinfer.engine.state import Entry
from zinfer.engine.stream.engine import Stream
from zinfer.engine.stream.experts.pool import ExpertCounts
from zinfer.engine.stream.kv.host import HostKV
from zinfer.engine.stream.kv.pool import HostCopier, HostPool
from zinfer.engine.stream.kv.store import HostRoom, HostStore
from zinfer.engine.stream.weights.chunk import Chunk, PackedLayer
from zinfer.engine.stream.weights.ring import PrefetchRing
from zinfer.engine.stream.weights.source import WeightSource
from zinfer.plan.bytes import Placement
from zinfer.plan.planner import Plan

CPU = torch.device("cpu")
LAYER = 256  # bytes of a layer of `FakeSource`, in one chunk


class FakeSource(WeightSource):
    """Three layers of zeros."""

    def __init__(self) -> None:
        layers = list[PackedLayer]()
        for _ in range(3):
            layers.append(plain([("weight", torch.empty(LAYER // 4, 1))], layers[-1].end if layers else 0))
        super().__init__(layers)
        self.host_bytes = layers[-1].end

    def get(self, chunk: Chunk) -> Tensor:
        return torch.zeros(chunk.size, dtype=torch.uint8)

    def keep(self, layers: Iterable[int], progress: Progress = silent) -> None:
        self.host_layers = tuple(layers)


class FakeStore(HostStore):
    """Host store that counts its rows and positions."""

    attends_on = "cpu"

    def __init__(self, parts: list[slice], capacity: int, on_cpu: bool) -> None:
        super().__init__(HostRoom(HostPool(pin=False), HostCopier(CPU), capacity, {}), parts)
        self.on_cpu, self.length, self.closed = on_cpu, 0, False

    def append(self, layer: int, rows: slice, states: Any, start: int) -> Any:
        raise AssertionError("nothing is computed")

    def stored(self, layer: int, rows: Sequence[int], length: int) -> list[Tensor]:
        raise AssertionError("nothing is stored")

    def rollback(self, length: int) -> None:
        self.length = length

    def keep_rows(self, rows: Sequence[int], first: int) -> None:
        self.rows = slice(first, first + len(rows))
        self.parts = [self.rows]

    def close(self) -> None:
        self.closed = True


class FakeKV(HostKV):
    """Host rows without memory, attended to as their placement says."""

    def prepare(self, placement: Placement, load: Workload) -> None:
        """Nothing takes time."""

    def store(self, cache: Any, parts: list[slice], capacity: int, _ring: Any, placement: Any, _load: Any) -> FakeStore:
        return FakeStore(parts, capacity, placement.kv_on_cpu)


class FakePool:
    """Buffers of experts; `events` gets their sizes."""

    def __init__(self, events: list[str]) -> None:
        self.counts, self.steps, self._events = ExpertCounts(), deque[ExpertCounts](), events
        self.staging, self.cached, self.kept_bytes, self.layer_buffer = 2, 0, 7, torch.empty(5, dtype=torch.uint8)
        self.settings, self.reads_codes, self.host_bytes = {"experts": "on-demand"}, False, 0

    def resize(self, staging: int, cached: int) -> None:
        self._events.append(f"experts {staging} {cached}")
        self.staging, self.cached = staging, cached

    def keeps(self, layers: tuple[int, ...]) -> bool:
        return not layers

    def keep(self, layers: tuple[int, ...]) -> None:
        assert not layers

    def note_step(self, before: ExpertCounts, tokens: int) -> None:
        self.steps.append(self.counts.since(before))

    def per_step(self, _name: str) -> float:
        return 11.0


class FakeStream(Stream):
    """Streamed engine of fake stores. `run` computes the logits of a part."""

    def __init__(self, plan: Plan, source: FakeSource, pool: FakePool | None = None) -> None:
        self.fake, self.fake_pool = source, pool
        self.run: Callable[[Part], Tensor] = lambda part: torch.zeros(len(part.token_ids), part.keep, 1)
        super().__init__(plan)

    def _load_streamed(self, _state: Any, _resident: Any) -> None:
        self._source, self._ring = self.fake, PrefetchRing(self.fake, 2, CPU, FakeQueues())
        for index in range(len(self.fake.layers)):
            module = nn.Linear(1, LAYER // 4, bias=False)
            self._ring.attach(index, module, {"weight": Entry(("",), ((module, "weight"),), module.weight, index)})
        self._pool = self.fake_pool  # type: ignore[assignment]
        self._kv = FakeKV(self.plan.model, self.options, CPU, silent, streamed=True, shared=False)

    def _ready(self) -> None:
        """Do nothing: there are no weights."""

    def _run(self, parts: Sequence[Part]) -> list[Tensor]:
        return [self.run(part) for part in parts]


def fake_stream(
    directory: Path,
    pool: FakePool | None = None,
    machine: Machine = MACHINE,
    gpu_weights: str | None = None,
    **options: Any,
) -> FakeStream:
    """Return a streamed engine with fake stores, of the model in `directory`."""
    plan = plan_of(directory, machine=machine, sizes=(3, 9, 12), load_format="dummy",
                   gpu_weights=gpu_weights, **options)  # fmt: skip
    return FakeStream(plan, FakeSource(), pool)
