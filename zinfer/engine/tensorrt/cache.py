"""Memory of the KV cache, in the layout that each kind of network needs, and the tensors that a step binds."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from zinfer.core.model import ModelSpec
from zinfer.engine.tensorrt.attention import CacheKind

Tensors = dict[str, Tensor]


class Cache(ABC):
    """Keys and values of a batch of sequences. Order of calls in a step: `bind`, run the network, `keep`."""

    _buffers: Tensors  # key_0, value_0, key_1, ..

    @abstractmethod
    def bind(self, rows: slice, past: int, new: int) -> tuple[Tensors, Tensors]:
        """Return the inputs and outputs of a pass of `rows` that appends `new` tokens to the `past` ones."""

    @abstractmethod
    def keep_rows(self, rows: Tensor) -> None:
        """Keep `rows` only (indices ``[b]``, rising), and free the others' memory."""

    def keep(self) -> None:  # noqa: B027 - nothing is left to do if outputs were bound in their final place
        """Move the outputs bound last to their final place."""


class InPlace(Cache):
    """Cache of `Native` networks: ``[B, kv_heads, max_seq_len, D]``, read and written by the network itself."""

    def __init__(self, spec: ModelSpec, batch_size: int, capacity: int, device: torch.device) -> None:
        shape = (batch_size, spec.num_kv_heads, capacity, spec.head_dim)
        self._buffers = _buffers(spec, shape, device)

    def bind(self, rows: slice, past: int, new: int) -> tuple[Tensors, Tensors]:
        outputs = {name: buffer[rows] for name, buffer in self._buffers.items()}
        inputs = {f"past_{name}": view for name, view in outputs.items()}
        first = next(iter(outputs.values()))
        inputs["write_at"] = torch.full((first.shape[0],), past, dtype=torch.int32, device=first.device)
        return inputs, outputs

    def keep_rows(self, rows: Tensor) -> None:
        for name, buffer in self._buffers.items():
            self._buffers[name] = buffer[rows]


class Appended(Cache):
    """Cache of `Plain` networks: ``[capacity, B, kv_heads, D]``. The new tokens are written right behind the past; a
    pass over some of the rows writes them to separate buffers first."""

    def __init__(self, spec: ModelSpec, batch_size: int, capacity: int, device: torch.device) -> None:
        shape = (capacity, batch_size, spec.num_kv_heads, spec.head_dim)
        self._batch_size, self._buffers = batch_size, _buffers(spec, shape, device)
        self._aside: list[tuple[Tensor, Tensor]] = []

    def bind(self, rows: slice, past: int, new: int) -> tuple[Tensors, Tensors]:
        inputs, outputs = {}, {}
        partial = len(range(self._batch_size)[rows]) < self._batch_size
        if partial and past:
            raise ValueError("a plain cache takes some of the rows only at position 0; later passes need all rows")
        for name, buffer in self._buffers.items():
            inputs[f"past_{name}"], place = buffer[:past, rows], buffer[past : past + new, rows]
            outputs[name] = torch.empty_like(place, memory_format=torch.contiguous_format) if partial else place
            if partial:
                self._aside.append((place, outputs[name]))
        return inputs, outputs

    def keep_rows(self, rows: Tensor) -> None:
        self._batch_size = len(rows)
        for name, buffer in self._buffers.items():
            self._buffers[name] = buffer[:, rows]

    def keep(self) -> None:
        for place, values in self._aside:
            place.copy_(values)
        self._aside.clear()


def _buffers(spec: ModelSpec, shape: tuple[int, ...], device: torch.device) -> Tensors:
    names = [f"{part}_{layer}" for layer in range(spec.num_layers) for part in ("key", "value")]
    return {name: torch.empty(shape, dtype=getattr(torch, spec.dtype), device=device) for name in names}


def make_cache(
    kind: CacheKind, spec: ModelSpec, batch_size: int, length: int, max_seq_len: int, device: torch.device
) -> Cache:
    """Return the cache of a batch for `length` tokens a sequence. A native network fixes it at `max_seq_len` tokens."""
    if kind == "native":
        return InPlace(spec, batch_size, max_seq_len, device)
    return Appended(spec, batch_size, length, device)
