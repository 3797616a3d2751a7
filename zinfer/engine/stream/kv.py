"""The KV cache of a batch's last sequences in host memory; the GPU holds that of as many as it has room for.

Two ways to attend to it. `LinkCache` brings it over the link at every step, behind the weights of the layer that needs
it. `CpuCache` leaves it where it is and has the CPU compute with it, while the link carries weights: faster wherever
host memory is read faster than the link carries, as both then run at once.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from zinfer.engine.arena import HostArena
from zinfer.engine.cache import FixedLayer
from zinfer.engine.stream.attend import coded, library
from zinfer.engine.stream.hosted import code, fetched, host, keep_freed
from zinfer.engine.stream.ring import Load, Ring

IN_FLIGHT = 512 << 20  # bytes on their way to the host at a time, which take as much of the device's memory


class Sender:
    """Copies to the host beside what the device computes, on a stream of their own, in order; without a GPU at once.

    One for all batches: so nothing of a former batch arrives in memory that is used anew.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._under_way: deque[tuple[int, Any]] = deque()  # bytes, event
        self._bytes = 0  # of these

    def send(self, states: Tensor, target: Tensor) -> Any:
        """Copy `states` to `target`, page-locked; the event that tells when it is there, None where it is."""
        if self._stream is None:
            target.copy_(states)
            return None
        while self._under_way and (self._bytes + states.nbytes > IN_FLIGHT or self._under_way[0][1].query()):
            size, arrived = self._under_way.popleft()
            arrived.synchronize()
            self._bytes -= size
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            target.copy_(states, non_blocking=True)
            states.record_stream(self._stream)
            event = torch.cuda.Event()
            event.record()
        self._under_way.append((states.nbytes, event))
        self._bytes += states.nbytes
        return event

    def finish(self) -> None:
        """Wait until all is there."""
        if self._stream is not None:
            self._stream.synchronize()
        self._under_way.clear()
        self._bytes = 0


class HostCache(ABC):
    """Keys and values of the `rows` of a batch in `arena`, for up to `capacity` tokens a sequence."""

    place: str  # of the attention to it: gpu, cpu, or "cpu, torch" where no compiler was found
    rows: slice
    parts: list[slice]  # rows that go through the model together in a decode step

    @abstractmethod
    def extend(self, layer: int, rows: slice, keys: Tensor, values: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Store keys and values, ``[rows, kv_heads, n, head_dim]``, of positions `start` on; all of them so far."""


class CpuCache(HostCache):
    """In the order that attention reads it, ``[rows, kv_heads, capacity, head_dim]``; comes as `Hosted` tensors. With
    `in_8_bits`, as `zinfer.engine.stream.attend.coded` has it."""

    def __init__(
        self,
        arena: HostArena,
        sender: Sender,
        rows: slice,
        capacity: int,
        device: torch.device,
        in_8_bits: bool = False,
    ) -> None:
        self.rows, self.parts, self.capacity = rows, [rows], capacity
        self._memory, self._used, self._device, self._in_8_bits = arena.memory, 0, device, in_8_bits
        self._sender = sender
        keep_freed()
        self.place = "cpu" if library() is not None else "cpu, torch"
        self._places: dict[int, tuple[Tensor, Tensor]] = {}  # layer: keys, values
        self._writing = False  # prompts' keys

    def extend(self, layer: int, rows: slice, keys: Tensor, values: Tensor, start: int) -> tuple[Tensor, Tensor]:
        stored = (coded(keys), coded(values)) if self._in_8_bits else (keys, values)
        if layer not in self._places:
            self._places[layer] = self._take(stored[0]), self._take(stored[1])
        own = slice(rows.start - self.rows.start, rows.stop - self.rows.start)
        end = start + keys.shape[2]
        if not start:
            for place, states in zip(self._places[layer], stored, strict=True):
                # One copy of whole rows: what lies beyond the prompt means nothing yet.
                self._sender.send(pad(states, (0, 0, 0, self.capacity - end)), place[own])
            self._writing = True
            return keys, values
        if self._writing:
            self._sender.finish()
        self._writing = False
        for place, states in zip(self._places[layer], fetched(*stored), strict=True):  # waits for the device
            place[own, :, start:end].copy_(states)
        seen = (place[own, :, :end] for place in self._places[layer])
        if self._in_8_bits:
            rows_of = (place.view(torch.int8)[..., : keys.shape[3]] for place in seen)
            return tuple(code(place, self._device, keys.dtype) for place in rows_of)  # type: ignore[return-value]
        return tuple(host(place, self._device) for place in seen)  # type: ignore[return-value]

    def _take(self, states: Tensor) -> Tensor:
        shape = (self.rows.stop - self.rows.start, states.shape[1], self.capacity, states.shape[3])
        begin, self._used = self._used, self._used + prod(shape) * states.itemsize
        return self._memory[begin : self._used].view(states.dtype).view(shape)


class LinkCache(HostCache):
    """In `parts`, each of which is one range of bytes in a layer, a position after the other: ``[capacity, K and V of
    its rows]``. A step reads that in one copy, into a buffer of `ring`, and adds to it in another."""

    place = "gpu"

    def __init__(self, arena: HostArena, sender: Sender, ring: Ring, parts: list[slice], capacity: int) -> None:
        self.rows = slice(parts[0].start, parts[-1].stop)
        self.parts, self.capacity = parts, capacity
        self._ring, self._memory, self._used = ring, arena.memory, 0
        self._places: dict[tuple[int, int], Tensor] = {}  # layer, part: uint8 [capacity, bytes of a position]
        self._lengths: dict[tuple[int, int], int] = {}
        self._cuda, self._sender = ring.on_gpu, sender
        self._written: dict[tuple[int, int], Any] = {}  # events

    def loads(self, first_length: int) -> Callable[[int, int], Iterator[Load]]:
        """What a pass fetches for a layer, for `Ring.fetch`: nothing while prompts of `first_length` tokens are
        prefilled (pass 0), and then all that was stored before."""

        def more(turn: int, layer: int) -> Iterator[Load]:
            length = first_length + turn - 1
            for part in range(len(self.parts)) if turn else ():
                key = (layer, part)
                yield Load(
                    layer,
                    source=partial(self._first, key, length),
                    ready=partial(self._reaches, key, length),
                    before=partial(self._wait, key),
                )

        return more

    def _first(self, key: tuple[int, int], length: int) -> Tensor:
        return self._places[key][:length].view(-1)

    def _reaches(self, key: tuple[int, int], length: int) -> bool:
        return self._lengths.get(key, 0) >= length

    def _wait(self, key: tuple[int, int]) -> None:
        if self._cuda:
            self._written[key].wait()

    def extend(self, layer: int, rows: slice, keys: Tensor, values: Tensor, start: int) -> tuple[Tensor, Tensor]:
        key = (layer, self.parts.index(rows))
        packed = torch.cat([states.permute(2, 0, 1, 3).reshape(states.shape[2], -1) for states in (keys, values)], 1)
        if key not in self._places:
            size = self.capacity * packed[0].nbytes
            self._places[key] = self._memory[self._used : self._used + size].view(self.capacity, -1)
            self._used += size
        end = start + packed.shape[0]
        self._written[key] = self._sender.send(packed.view(torch.uint8), self._places[key][start:end])
        self._lengths[key] = end
        if not start:
            return keys, values
        place = self._places[key]
        held = self._ring.borrow(layer)
        if self._cuda:
            place = held[: self.capacity * place.shape[1]].view(place.shape)
            place[start:end] = packed.view(torch.uint8)
        seen = place[:end].view(packed.dtype)
        count, heads = keys.shape[:2]
        split = count * heads * keys.shape[3]
        return (
            seen[:, :split].view(end, count, heads, -1).permute(1, 2, 0, 3),
            seen[:, split:].view(end, count, heads, -1).permute(1, 2, 0, 3),
        )


class SplitLayer(FixedLayer):
    """The cache of decoder layer `index`: of the batch's first sequences in `here`, of the others in `host`."""

    def __init__(self, index: int, here: FixedLayer, host: HostCache) -> None:
        super().__init__(here.batch_size, here.capacity)
        self._index, self._here, self._host = index, here, host

    def window(self, rows: slice, length: int) -> None:
        self.rows, self.length = rows, length
        if rows.stop <= self.batch_size:
            self._here.window(rows, length)

    def get_seq_length(self) -> int:
        return self.length

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        start = self.advance(key_states.shape[2])
        if self.rows.stop <= self.batch_size:
            return self._here.update(key_states, value_states, *args, **kwargs)
        return self._host.extend(self._index, self.rows, key_states, value_states, start)
