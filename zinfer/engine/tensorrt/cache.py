"""The KV cache's memory, in the layout that each kind of network wants, and the tensors a step binds."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from zinfer.engine.tensorrt.attention import CacheKind
from zinfer.spec.model import ModelSpec

Tensors = dict[str, Tensor]


class Cache(ABC):
    """Keys and values of a batch of `batch_size` sequences of up to `capacity` tokens. Bind, run, then `keep`."""

    _buffers: Tensors  # key_0, value_0, key_1, ..

    @abstractmethod
    def bind(self, rows: slice, past: int, new: int) -> tuple[Tensors, Tensors]:
        """The cache's inputs and outputs of a pass of `rows` that puts `new` tokens behind the `past` there are."""

    @abstractmethod
    def keep_rows(self, rows: Tensor) -> None:
        """Keep `rows` only (indices ``[b]``, rising), and free the others' memory."""

    def keep(self) -> None:  # noqa: B027 - where outputs are bound in their place, nothing is left to do
        """Put the outputs bound last into their place."""


class InPlace(Cache):
    """For `Native` networks: ``[B, kv_heads, max_seq_len, D]``, read and written by the network itself."""

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
    """For `Plain` networks: ``[capacity, B, kv_heads, D]``. The past is a front part, the new tokens are written right
    behind it; of a pass over some of the rows they lie elsewhere first."""

    def __init__(self, spec: ModelSpec, batch_size: int, capacity: int, device: torch.device) -> None:
        shape = (capacity, batch_size, spec.num_kv_heads, spec.head_dim)
        self._batch_size, self._buffers = batch_size, _buffers(spec, shape, device)
        self._aside: list[tuple[Tensor, Tensor]] = []

    def bind(self, rows: slice, past: int, new: int) -> tuple[Tensors, Tensors]:
        inputs, outputs = {}, {}
        partial = len(range(self._batch_size)[rows]) < self._batch_size
        if partial and past:
            raise ValueError("a plain cache is filled row by row from the start, and then goes on with all rows")
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
    """The cache of a batch for `length` tokens a sequence. A native network has `max_seq_len` written into it."""
    if kind == "native":
        return InPlace(spec, batch_size, max_seq_len, device)
    return Appended(spec, batch_size, length, device)
