"""CPU attention: rows whose keys and values stay in host memory.

The cache hands a model its new keys and values with a `HostStates`. The attention function
(`zinfer.engine.stream.attention`) finds it there: new keys, values and queries go to host memory, the CPU attends to
all that is stored, and the result comes back to the device.
"""

import ctypes
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from zinfer.engine.cache import WindowIndex
from zinfer.engine.pinned import ALIGNMENT
from zinfer.engine.stream.kv.cpu_kernel import (
    MAX_ROWS,
    attend,
    can_attend,
    dequantized,
    int8_of,
    join_scales,
    library,
    quantize_rows,
    sinks_of,
    split_scales,
)
from zinfer.engine.stream.kv.store import HostRoom, HostStore, PartLayer
from zinfer.engine.stream.weights.queues import Event
from zinfer.engine.transfer import to_device, to_host

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # from glibc's <malloc.h>
# Options of attention functions that change nothing where a mask, or none, says what each token sees.
HARMLESS = {
    "dropout", "scaling", "is_causal", "sliding_window", "position_ids", "cache_position", "use_cache",
    "output_attentions", "output_hidden_states", "return_dict", "layer_idx",
}  # fmt: skip
Block = tuple[Tensor, Tensor]  # keys and values of one micro-batch
Biases = Sequence[Sequence[Tensor]]  # what the scores of each micro-batch get


class OwnAttentionError(RuntimeError):
    """The model attends in a way of its own; caches may hold part of the pass."""


def unknown(options: dict[str, Any], *supported: str) -> set[str]:
    """Return the names of options that change attention, but for `supported` ones."""
    given = {name for name, content in options.items() if content is not None and content is not False}
    return given - HARMLESS - set(supported)


class HostStates:
    """New keys and values of one layer's host rows. They are those of one or several micro-batches. `counts` are their
    numbers of rows. `biases` returns what the scores of each get, from the positions stored of each and the number of
    queries that share a head; without it the model's own mask counts. `new` are the keys and values, if not those that
    the attention function gets."""

    def __init__(
        self,
        parts: Sequence[PartLayer],
        counts: Sequence[int],
        biases: Callable[[tuple[int, ...], int], Biases] | None = None,
        new: Block | None = None,
    ) -> None:
        self._parts, self._counts, self._biases, self._new = parts, counts, biases, new
        self._blocks: list[Block] = []

    @property
    def attended(self) -> bool:
        return bool(self._blocks)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]) -> Tensor:
        """Store new keys and values once, and attend to all. `query` is ``[B, heads, n, head_dim]``, the result
        ``[B, n, heads, head_dim]``."""
        (total, heads, tokens, width), home, dtype = query.shape, query.device, query.dtype
        shared, sinks = heads // key.shape[1], options.get("s_aux")
        if other := unknown(options, "softcap", "s_aux", "position_bias"):
            raise OwnAttentionError(f"attention with {sorted(other)}")
        if self._biases is None and mask is None and tokens > 1:
            raise OwnAttentionError("attention of several tokens without a mask")
        if self._new is not None:
            key, value = self._new
        sent = [query] if sinks is None else [query, sinks]
        if self.attended:  # an earlier layer's keys
            query, *rest = to_host(*sent)
        else:
            keys, values, query, *rest = to_host(*self._parts[0].narrowed().encode(key, value), *sent)
            self._store(keys, values)
        if self._biases is not None:
            biases: Biases = self._biases(tuple(keys.shape[2] for keys, _ in self._blocks), shared if tokens > 1 else 1)
        else:
            given = (mask, options.get("position_bias"))
            biases = [[_grouped(_on_host(added), shared, tokens) for added in given if added is not None]]
        queries = query.reshape(total, heads // shared, shared * tokens, width)
        if rest:
            (sinks,) = rest
        scale = options.get("scaling")
        mixed = attend_all(queries, self._blocks, biases, scale, options.get("softcap"), sinks)
        separated = mixed.to(dtype).view(total, heads // shared, shared, tokens, -1)
        return to_device(separated.permute(0, 3, 1, 2, 4).reshape(total, tokens, heads, -1), home)

    def _store(self, keys: Tensor, values: Tensor) -> None:
        first, self._new = 0, None
        for part, count in zip(self._parts, self._counts, strict=True):
            rows = slice(first, first + count)
            first = rows.stop
            self._blocks.append(part.narrowed().append(keys[rows], values[rows]))


def attend_all(
    queries: Tensor,
    blocks: Sequence[Block],
    biases: Biases,
    scale: float | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the float32 attention of `queries` to all `blocks`. It is what `cpu_kernel.attend` returns; torch
    computes what the compiled code cannot. Scores are kept below `softcap`; `sinks`,
    ``[query heads]``, are scores that take their part of each softmax."""
    factor = queries.shape[-1] ** -0.5 if scale is None else scale
    if can_attend(queries, blocks):
        return attend(queries, blocks, biases, factor, torch.get_num_threads(), softcap, sinks)
    parts = queries.split([len(keys) for keys, _ in blocks])
    each = zip(parts, blocks, biases or [()] * len(blocks), strict=True)
    return torch.cat([_attend_apart(*part, factor, softcap, sinks) for part in each])


def _attend_apart(
    queries: Tensor, block: Block, biases: Sequence[Tensor], scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Compute `attend_all` for one block. It is done by products, or for many queries by torch's own kernel."""
    if queries.shape[2] > MAX_ROWS and softcap is None and sinks is None:
        dtype = queries.dtype if block[0].dtype == torch.int8 else block[0].dtype
        keys, values = (dequantized(half, dtype) for half in block)
        bias = sum(biases[1:], biases[0]).to(dtype) if biases else None
        return scaled_dot_product_attention(queries.to(dtype), keys, values, bias, scale=scale).float()
    keys, values = (dequantized(half, torch.float32).float() for half in block)
    scores = queries.float() @ keys.mT * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    for bias in biases:
        scores = scores + bias
    if sinks is not None:
        each = sinks_of(sinks, *scores.shape[1:3])
        scores = torch.cat([scores, each[None, :, :, None].expand(len(scores), -1, -1, 1)], dim=-1)
    shares = scores.softmax(-1).masked_fill_(scores.amax(-1, keepdim=True) == float("-inf"), 0)  # all is hidden
    return shares[..., : keys.shape[2]] @ values


def _on_host(added: Tensor) -> Tensor:
    """Return a float32 mask or bias on the CPU, which layers share."""
    copy: Tensor | None = getattr(added, "zinfer_on_host", None)
    if copy is None:
        (copy,) = to_host(added)
        if copy.dtype == torch.bool:
            copy = torch.zeros(copy.shape).masked_fill_(~copy, torch.finfo(torch.float32).min)
        added.zinfer_on_host = copy = copy.float()  # type: ignore[attr-defined]
    return copy


def _grouped(bias: Tensor, shared: int, tokens: int) -> Tensor:
    """Return a bias for queries whose heads stand where tokens do. `shared` of them have one head of keys."""
    if shared == 1 or bias.shape[1:3] == (1, 1):
        return bias
    if bias.shape[1] == 1:
        return bias.repeat(1, 1, shared, 1)
    return bias.expand(-1, -1, tokens, -1).reshape(len(bias), -1, shared * tokens, bias.shape[-1])


class CpuStore(HostStore):
    """Host store that the CPU attends to: keys and values ``[rows, kv_heads, room, head_dim]``, in the order in which
    attention reads them; with `in_8_bits`, in the format of `zinfer.engine.stream.kv.cpu_kernel.quantize_rows`."""

    on_cpu = True

    def __init__(self, room: HostRoom, rows: slice, in_8_bits: bool) -> None:
        super().__init__(room, [rows])
        self._in_8_bits = in_8_bits
        keep_freed_memory()
        self.attends_on = "cpu" if library() is not None else "cpu, torch"
        self._layers: dict[int, tuple[WindowIndex, Tensor, Tensor]] = {}  # layer -> slots, keys, values
        self._sent: list[Event] = []  # events behind copies of prompts' keys that may be under way

    def states(self, part: PartLayer, keys: Tensor, values: Tensor) -> HostStates:
        return HostStates([part], [len(keys)], new=(keys, values))

    def encode(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return (quantize_rows(keys), quantize_rows(values)) if self._in_8_bits else (keys, values)

    def append(self, layer: int, rows: slice, states: tuple[Tensor, Tensor], start: int) -> tuple[Tensor, Tensor]:
        if not start:
            self._send(layer, rows, states)
            return states
        slots, *stores = self._layers[layer]
        step = slots.add(start, states[0].shape[2])
        for event in self._sent:
            event.synchronize()
        self._sent = []
        indices = self._row_range(rows)
        keys, values = (step.store(store[indices], new) for store, new in zip(stores, states, strict=True))
        return (int8_of(keys), int8_of(values)) if self._in_8_bits else (keys, values)

    def fill(self, layer: int, rows: slice, blocks: Sequence[Tensor]) -> None:
        if self._in_8_bits:
            blocks = join_scales(*blocks[:2]), join_scales(*blocks[2:])
        self._send(layer, rows, blocks)

    def _row_range(self, rows: slice) -> slice:
        return slice(rows.start - self.rows.start, rows.stop - self.rows.start)

    def _send(self, layer: int, rows: slice, states: Sequence[Tensor]) -> None:
        if layer not in self._layers:
            slots = self._slots(layer)
            self._layers[layer] = slots, *self._allocate(layer, slots, states)
        slots, *stores = self._layers[layer]
        step = slots.add(0, states[0].shape[2])
        for store, new in zip(stores, states, strict=True):
            # One copy of whole rows: positions beyond the prompt have no meaning yet.
            padded = pad(step.kept(new), (0, 0, 0, slots.room - step.new.stop))
            self._sent.append(self._copier.send(padded, store[self._row_range(rows)]))

    def stored(self, layer: int, rows: Sequence[int], length: int) -> list[Tensor]:
        self._copier.finish()
        slots, *stores = self._layers[layer]
        indices = [row - self.rows.start for row in rows]
        blocks = [store[indices][:, :, slots.held(length)] for store in stores]
        return [part for block in blocks for part in split_scales(block)] if self._in_8_bits else blocks

    def rollback(self, length: int) -> None:
        for slots, _, _ in self._layers.values():
            slots.rollback(length)

    def keep_rows(self, rows: Sequence[int], first: int) -> None:
        self._copier.finish()
        for layer, (slots, *stores) in self._layers.items():
            for store in stores:
                for to, row in enumerate(rows):
                    if row - self.rows.start != to:
                        store[to].copy_(store[row - self.rows.start])
            keys, values = (store[: len(rows)] for store in stores)
            self._layers[layer] = slots, keys, values
        self.rows = slice(first, first + len(rows))
        self.parts = [self.rows]

    def _allocate(self, layer: int, slots: WindowIndex, states: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        rows = self.rows.stop - self.rows.start
        shapes = [(rows, new.shape[1], slots.room, new.shape[3]) for new in states]
        keys, values = (prod(shape) * new.itemsize for shape, new in zip(shapes, states, strict=True))
        begin = -(-keys // ALIGNMENT) * ALIGNMENT
        memory = self._memory(layer, begin + values)
        dtype = states[0].dtype
        return memory[:keys].view(dtype).view(shapes[0]), memory[begin:].view(dtype).view(shapes[1])


@cache
def keep_freed_memory() -> None:
    """Make malloc keep freed memory in this process, up to 2 GiB; needs glibc. Otherwise attention's intermediate
    results, tens of MB, go back to the system at once, which hands out and clears their pages again in the next layer:
    that can take as long as attention itself."""
    with suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)
