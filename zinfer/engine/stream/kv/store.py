"""Store of keys and values in host memory: what all kinds of it do, and the layer that splits rows.

The device keeps as many rows of a micro-batch as it has room for (`zinfer.engine.cache.FixedLayer`), a `HostStore` the
last ones. There are two: `zinfer.engine.stream.kv.link.LinkStore` copies them over the link at every step, behind the
weights of the layer that needs them. `zinfer.engine.stream.kv.cpu.CpuStore` leaves them where they are, and the CPU
attends to them while the link carries weights: faster wherever host memory is read faster than the link carries, as
both then run at once.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import DynamicLayer

from zinfer.engine.cache import FixedLayer, RowMask, WindowIndex, copy_slots
from zinfer.engine.stream.kv.pool import Block, HostCopier, HostPool
from zinfer.engine.stream.weights.ring import Fetch


class HostRoom(NamedTuple):
    """Host memory for `capacity` tokens a sequence, and what copies them there. `windows` has the sliding windows, in
    tokens, by layer number."""

    pool: HostPool
    copier: HostCopier
    capacity: int
    windows: Mapping[int, int]


class HostStore(ABC):
    """Keys and values of a batch's rows in host memory. They are those of `parts`, and have `room`. Layers may differ
    in their heads and widths, and keys from values."""

    attends_on: str  # gpu, cpu, or "cpu, torch" without a C compiler
    on_cpu: bool  # True if the CPU attends
    rows: slice
    parts: list[slice]  # rows that go through the model together in a decode step

    def __init__(self, room: HostRoom, parts: list[slice]) -> None:
        self.rows, self.parts = slice(parts[0].start, parts[-1].stop), parts
        self._pool, self._copier, self.capacity, self._windows = room
        self._blocks: dict[int, Block] = {}  # memory of each layer

    def _slots(self, layer: int) -> WindowIndex:
        return WindowIndex(self.capacity, self._windows.get(layer))

    def _memory(self, layer: int, size: int) -> Tensor:
        """Return a layer's memory, uint8 ``[size]``. Its size at first is the largest. Raises MemoryError."""
        if layer not in self._blocks:
            self._blocks[layer] = self._pool.allocate(size)
        return self._blocks[layer].memory[:size]

    def joins(self, rows: slice) -> bool:
        """Tell whether a decode step of these rows can join others."""
        return rows in self.parts

    def encode(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values as they are stored. They are ``[rows, kv_heads, n, head_dim]``, on their device."""
        return keys, values

    @abstractmethod
    def append(self, layer: int, rows: slice, states: tuple[Tensor, Tensor], start: int) -> tuple[Tensor, Tensor]:
        """Append encoded keys and values, of positions `start` on. Returns all that these positions see, where they are
        attended to; of a prompt's first positions those given."""

    def fill(self, layer: int, rows: slice, blocks: Sequence[Tensor]) -> None:
        """Store the first positions of `rows`, as `FixedLayer.stored` returns them."""
        keys, values = blocks
        self.append(layer, rows, (keys, values), 0)

    @abstractmethod
    def stored(self, layer: int, rows: Sequence[int], length: int) -> list[Tensor]:
        """Return keys and values of `rows`, as `FixedLayer.stored` does. They may be on the host or the device. They
        are those that the next token after `length` ones sees."""

    @abstractmethod
    def rollback(self, length: int) -> None:
        """Forget the positions from `length` on, of all rows."""

    @abstractmethod
    def keep_rows(self, rows: Sequence[int], first: int) -> None:
        """Keep only `rows` (rising) of this store. They become rows `first`, `first` + 1, .. Memory stays reserved
        until the last row is gone."""

    def states(self, part: "PartLayer", keys: Tensor, values: Tensor) -> Any:
        """Return what attends to a part in place of the device. It appends its new keys and values first."""
        return None

    def fetch(self, part: slice, length: int, count: int) -> Fetch | None:
        """Return the transfers of a part's pass, besides weights. It adds `count` tokens to `length` stored ones."""
        return None

    def hand_back(self) -> None:  # noqa: B027 - nothing was lent
        """Free what `append` returned."""

    def drop_fetches(self) -> None:  # noqa: B027 - nothing is fetched
        """Forget transfers under way, before memory moves or is freed."""

    def close(self) -> None:
        """Give the memory back, once no copy needs it."""
        self._copier.finish()
        self.drop_fetches()
        for block in self._blocks.values():
            self._pool.free(block)
        self._blocks = {}


class SplitLayer(FixedLayer):
    """Cache of decoder layer `index`: the batch's first rows in `device_layer`, the others in `host`."""

    recordable = False

    def __init__(self, index: int, device_layer: FixedLayer, host: HostStore) -> None:
        super().__init__(device_layer.batch_size, device_layer.capacity, device_layer.slots.window)
        self.device_layer = device_layer
        self._index, self._host = index, host
        self.states: Any = None  # `zinfer.engine.stream.kv.cpu.HostStates` of the pass that runs, where the CPU attends

    @property
    def dequantized_bytes(self) -> int:
        return self.device_layer.dequantized_bytes

    @property
    def unattended(self) -> bool:
        return self.states is not None and not bool(self.states.attended)

    def window(self, rows: slice, length: int) -> None:
        self.rows, self.length = rows, length
        if rows.stop <= self.batch_size:
            self.device_layer.window(rows, length)

    def joins(self, rows: slice) -> bool:
        return self.device_layer.joins(rows) if rows.stop <= self.batch_size else self._host.joins(rows)

    def hand_back(self) -> None:
        if self.rows.stop > self.batch_size:
            self._host.hand_back()

    def stored(self, rows: Tensor, length: int, gaps: RowMask | None) -> list[Tensor]:
        on_device = rows < self.batch_size
        if bool(on_device.all()):
            return self.device_layer.stored(rows, length, gaps)
        blocks = [half.to(rows.device) for half in self._host.stored(self._index, rows[~on_device].tolist(), length)]
        if gaps is not None:
            every, host_gaps = torch.arange(len(blocks[0]), device=rows.device), gaps.of(~on_device)
            blocks = [copy_slots(half, every, slice(0, half.shape[2]), host_gaps) for half in blocks]
        if not bool(on_device.any()):
            return blocks
        device_blocks = self.device_layer.stored(rows[on_device], length, None if gaps is None else gaps.of(on_device))
        merged = []
        for device_block, host_block in zip(device_blocks, blocks, strict=True):
            both = host_block.new_empty((len(rows), *host_block.shape[1:]))
            both[on_device], both[~on_device] = device_block, host_block
            merged.append(both)
        return merged

    def fill(self, blocks: Sequence[Sequence[Tensor]], length: int, dtype: torch.dtype) -> None:
        whole = [_padded(parts, length) for parts in zip(*blocks, strict=True)]
        if self.batch_size:
            self.device_layer.fill([[block[: self.batch_size] for block in whole]], length, dtype)
        for part in self._host.parts:
            self._host.fill(self._index, part, [block[part] for block in whole])
        self.is_initialized, self.dtype = True, dtype
        self.window(slice(0, self.batch_size), length)
        self.length = length

    def rollback(self, length: int) -> None:
        """Forget the positions from `length` on in the rows on the device; `HostStore.rollback` does so in the
        others."""
        if self.batch_size:
            self.device_layer.rollback(length)
        self.length = length

    def keep_rows(self, rows: Tensor) -> None:
        """Keep only those of `rows` that are on the device; `HostStore.keep_rows` keeps the others."""
        self.device_layer.keep_rows(rows[rows < self.batch_size])
        self.batch_size = self.device_layer.batch_size

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        start = self.length
        self.is_initialized, self.dtype = True, key_states.dtype
        if self.rows.stop <= self.batch_size:
            self.length += key_states.shape[2]
            seen: tuple[Tensor, Tensor] = self.device_layer.update(key_states, value_states, *args, **kwargs)
            return seen
        if start:
            self.states = self._host.states(PartLayer(self, self.rows, start), key_states, value_states)
            if self.states is not None:
                return self._stand_in(key_states), self._stand_in(value_states)
        seen = self.append(*self.encode(key_states, value_states))
        return seen if start else (key_states, value_states)

    def _stand_in(self, new: Tensor) -> Tensor:
        """Return a tensor in the place of all keys or values. It has their shape, and is NaN."""
        seen, _ = self.get_mask_sizes(new.shape[2])
        stand_in = new.new_full((1,), float("nan")).expand(*new.shape[:2], seen, new.shape[3])
        stand_in.zinfer_states = self.states  # type: ignore[attr-defined]
        return stand_in

    def encode(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return self._host.encode(keys, values)

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append encoded keys and values of host rows; return all that they see."""
        start = self.length
        self.length += keys.shape[2]
        return self._host.append(self._index, self.rows, (keys, values), start)


class PartLayer(DynamicLayer):  # type: ignore[misc]
    """Layer narrowed to `rows`, for a forward pass that several parts share."""

    is_sliding = False
    bias = None

    def __init__(self, whole: FixedLayer, rows: slice, length: int) -> None:
        super().__init__()
        self._whole, self._rows, self._length = whole, rows, length

    def get_seq_length(self) -> int:
        return self._length

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        seen: tuple[Tensor, Tensor] = self.narrowed().update(key_states, value_states)
        return seen

    def narrowed(self) -> Any:
        """Return the layer of the whole batch, narrowed to the rows."""
        if self._whole.rows != self._rows or self._whole.length != self._length:
            self._whole.window(self._rows, self._length)
        return self._whole

    def hand_back(self) -> None:
        self._whole.hand_back()


def _padded(blocks: Sequence[Tensor], length: int) -> Tensor:
    """Stack blocks ``[b, kv_heads, n, D]``, zero-padded in front to `length`."""
    return torch.cat([pad(block, (0, 0, length - block.shape[2], 0)) for block in blocks])
