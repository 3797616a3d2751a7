"""Host rows: whose keys and values are in host memory, who attends to them, and with how many CPU threads."""

from collections.abc import Iterable
from typing import Any

import torch

from zinfer.core.case import Option, Workload
from zinfer.core.engine import StreamOptions
from zinfer.core.model import ModelSpec
from zinfer.core.progress import Progress
from zinfer.engine.cache import RowCache
from zinfer.engine.pinned import ALIGNMENT
from zinfer.engine.stream.kv.cpu import CpuStore
from zinfer.engine.stream.kv.cpu_kernel import library
from zinfer.engine.stream.kv.link import LinkStore
from zinfer.engine.stream.kv.pool import HostCopier, HostPool
from zinfer.engine.stream.kv.store import HostRoom, HostStore, SplitLayer
from zinfer.engine.stream.weights.ring import PrefetchRing
from zinfer.plan.bytes import Placement
from zinfer.system.host import attending_cpus


class HostKV:
    """Keys and values of all micro-batches' host rows. They are `shared` if later layers of the model attend to the
    same ones. The CPU attends where the weights are all on the device, not `streamed`."""

    def __init__(
        self,
        model: ModelSpec,
        options: StreamOptions,
        device: torch.device,
        progress: Progress,
        *,
        streamed: bool,
        shared: bool,
    ) -> None:
        self._model, self._pin, self._progress = model, device.type == "cuda", progress
        self._in_8_bits, self._streamed, self._shared = options.kv_cache_dtype == "int8", streamed, shared
        self._copier, self._threads = HostCopier(device), torch.get_num_threads()
        self._lent = False  # the CPU has fewer threads while it attends
        self.pool: HostPool | None = None
        self.begin()

    def begin(self) -> None:
        """Count anew: most host rows at a time, who attends, CPU threads."""
        self.rows, self._device, self._attending = 0, "gpu", 0

    @property
    def settings(self) -> dict[str, Option]:
        return {"kv_attention": self._device, "kv_host_rows": self.rows, "kv_threads": self._attending}

    def use_threads(self, count: int) -> None:
        self._threads = count
        torch.set_num_threads(count)

    def restore_threads(self, batches: Iterable[Any]) -> None:
        """Use all threads again, unless the CPU attends to rows of `batches`."""
        if self._lent and not any(batch.on_cpu for batch in batches):
            torch.set_num_threads(self._threads)
            self._lent = False

    def prepare(self, placement: Placement, load: Workload) -> None:
        """Do what takes seconds before rows of `load` wait for it."""
        if placement.host_rows(load.batch_size):
            self._reserve(placement, load)
            if self._on_cpu(placement):
                library()

    def store(
        self,
        cache: RowCache,
        parts: list[slice],
        capacity: int,
        ring: PrefetchRing | None,
        placement: Placement,
        load: Workload,
    ) -> HostStore:
        """Move the last rows of `cache`, those of `parts`, to host memory. They have room for `capacity` tokens each,
        `load` counts all rows. Raises MemoryError."""
        windows = {index: layer.slots.window for index, layer in cache.attention.items() if layer.slots.window}
        room = HostRoom(self._reserve(placement, load), self._copier, capacity, windows)
        host: HostStore
        if self._on_cpu(placement) or ring is None:
            rows = slice(parts[0].start, parts[-1].stop)
            host = CpuStore(room, rows, self._in_8_bits)
            self._attending = max(1, round(placement.kv_cpu_share * attending_cpus(self._threads)))
            # The number holds for all work of the CPU: teams of two sizes in turn end and start threads each time.
            torch.set_num_threads(self._attending)
            self._lent = True
        else:
            host = LinkStore(room, ring, parts, self._shared)
        self._device = host.attends_on
        for index, on_device in cache.attention.items():
            cache.put(index, SplitLayer(index, on_device, host))
        return host

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()
            self.pool = None

    def _on_cpu(self, placement: Placement) -> bool:
        return placement.kv_on_cpu or not self._streamed

    def _reserve(self, placement: Placement, load: Workload) -> HostPool:
        if self.pool is None:
            self.pool = HostPool(self._pin, self._progress)
        model, rows = self._model, placement.host_rows(load.batch_size)
        self.pool.reserve(
            int(model.kv_bytes(rows, load.total_len) * placement.kv_ratio) + 2 * ALIGNMENT * model.num_layers
        )
        return self.pool
