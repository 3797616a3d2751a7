"""Experts on the CPU: computed for a few tokens from their codes, where these lie in host memory.

A decode step touches a few experts of each layer. The CPU reads them faster than the link brings them, so of most only
hidden states cross it: a kernel writes them to pinned memory and asks for their experts, threads of `cpu_experts.c`
that wait for such requests compute these, and another kernel waits for the result
(`zinfer.engine.stream.experts.request`). Meanwhile the link brings the others (`zinfer.engine.stream.experts.link`). No
Python runs, the host never waits for the device, and a CUDA graph can hold all of it.

`cpu_experts.c` is compiled as attention's kernels are (`zinfer.engine.stream.kv.cpu_kernel`). The first result of each
kind is compared with that of the model's own code; without a compiler, or where they differ, experts come on demand.
"""

import weakref
from collections.abc import Callable
from ctypes import POINTER, Structure, byref, c_float, c_int32, c_int64, c_void_p, pointer
from functools import partial
from itertools import pairwise
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from zinfer.core.case import Option
from zinfer.core.progress import Progress, silent
from zinfer.engine.quantization.dequantize import table
from zinfer.engine.stream.experts.link import LinkExperts
from zinfer.engine.stream.experts.modules import computes_more, gate_of
from zinfer.engine.stream.kv.cpu_kernel import library
from zinfer.engine.stream.weights.formats import CodesLayout
from zinfer.engine.stream.weights.packed_experts import Experts, PackedExperts, chunks_of
from zinfer.engine.stream.weights.products import CheckedKernel
from zinfer.engine.triton_check import cannot_run
from zinfer.system.host import attending_cpus, usable_cpus

SOURCE = Path(__file__).with_name("cpu_experts.c")
MAX_PAIRS, LANE_COLUMNS = 1024, 64  # MAX_PAIRS and CHUNK in cpu_experts.c
LINE = 16  # words of a line of the cache: `mail[16]` in cpu_experts.c
MAX_CALLS = 1 << 16  # of all layers and numbers of tokens
_TYPES = (torch.float32, torch.bfloat16, torch.float16)  # as `type` in cpu_experts.c begins
_MORE = ("e8m0", "e4m3", "int16", "int8", "whole8", "codes8", "codes4", "codes5", "codes6")  # as it goes on
_KINDS = {name: number for number, name in enumerate(_MORE, len(_TYPES))}
_ZEROS = {torch.float16: _TYPES.index(torch.float16), torch.int16: _KINDS["int16"], torch.uint8: _KINDS["whole8"]}
_SUPERS = {("whole8", (1, 32), True), ("int8", (1, 16), False)}  # tables and blocks of scales with factors; minimums
Linked = Callable[[], Tensor] | None  # computes the link's experts meanwhile


class Unsupported(Exception):
    """Experts that the compiled code cannot read; the message says why."""


def _struct(*fields: tuple[str, Any]) -> Any:
    """Return a structure of cpu_experts.c with named fields of types."""
    named = [(name, kind) for names, kind in fields for name in names.split()]
    return type("Struct", (Structure,), {"_fields_": named})


_Part = _struct(("codes scales zeros supers", c_void_p), ("rows", c_int64), ("factor unused", c_float))
_Matrix = _struct(
    ("parts", POINTER(_Part)), ("bias", POINTER(c_void_p)), ("table", POINTER(c_float)),
    ("count rows columns row_bytes height width down across", c_int64),
    ("kind scale_kind zero_kind inner fast unused", c_int32),
)  # fmt: skip
_Layer = _struct(
    ("up down", _Matrix), ("experts", c_int64), ("states interleaved", c_int32), ("alpha limit offset unused", c_float)
)
_Call = _struct(
    ("experts", POINTER(_Layer)), ("states chosen weights out sums", c_void_p), ("tokens each threads", c_int64)
)
_Requests = _struct(
    ("mail", c_void_p), ("calls", POINTER(POINTER(_Call))), ("threads", c_int64), ("stop unused", c_int32)
)


class Server:
    """Threads that compute calls that a device asks for. It writes a call's number to `asked`, and waits until `done`
    is not 0. Both are one word, int32 ``[1]``, in pinned memory."""

    def __init__(self, code: Any, threads: int, pin: bool = True) -> None:
        with torch.inference_mode(False):
            mail = torch.zeros(2 * LINE, dtype=torch.int32, pin_memory=pin)
        self.asked, self.done = mail[:1], mail[LINE : LINE + 1]
        self._calls, self._count = (POINTER(_Call) * MAX_CALLS)(), 0
        requests = _Requests(mail.data_ptr(), self._calls, threads, 0, 0)
        thread = Thread(target=code.serve_experts, args=(byref(requests),), name="zinfer-experts", daemon=True)
        thread.start()
        # Also at the end of the process, before its pinned memory is gone.
        self._stop = weakref.finalize(self, _stop, requests, thread, mail, self._calls)

    def number(self, call: Any) -> int:
        """Return the number by which a device asks for a call."""
        self._calls[self._count] = pointer(call)
        self._count += 1
        return self._count

    def close(self) -> None:
        """End the threads; the device must have no request."""
        self._stop()


def _stop(requests: Any, thread: Thread, *_kept: object) -> None:
    requests.stop = 1
    thread.join()


class CpuExperts(CheckedKernel):
    """Experts that the CPU computes. Calls have up to `tokens` tokens, and results go to `device`. `threads` compute
    them, by default one on nearly every core. With `fast` they are computed only where all products are fast ones. The
    device computes a share `linked` of them meanwhile, which it brings itself. `status` is ``on``, or why the CPU
    computes none."""

    status: str

    def __init__(
        self,
        device: torch.device,
        tokens: int,
        threads: int | None = None,
        fast: bool = False,
        progress: Progress = silent,
        linked: float = 0.0,
    ) -> None:
        self._library = library(SOURCE)
        trouble = cannot_run(device) if device.type == "cuda" else None  # kernels ask for them
        status = trouble or "on" if self._library else "no C compiler that works here"
        super().__init__(status, "the model's own experts", progress)
        self.tokens, self._device, self._fast = tokens, device, fast
        self._link = LinkExperts(device, linked, progress)
        self.each = 0  # experts of a token in the latest call
        self._threads = threads or attending_cpus(usable_cpus())
        self._layers: dict[int, Any] = {}
        self._calls: dict[tuple[int, int, int], Any] = {}  # by layer, tokens, and experts of each
        self._server: Server | None = None
        self._latest: torch.cuda.Event | None = None  # behind the latest call of a device
        self._buffers: tuple[Tensor, ...] = ()  # states, choice, weights and result in pinned memory; sums
        self._kept = list[tuple[object, ...]]()  # calls and buffers of before
        self._dtype, self._width = torch.float32, 0

    def attach(self, number: int, packed: PackedExperts, experts: Experts, memory: Tensor, buffer: Tensor) -> None:
        """Read the experts of layer `number` where they lie in `memory`; `status` says why if that cannot be. Their
        module's weights are views of the layer buffer `buffer`."""
        if self.status != "on":
            return
        try:
            self._layers[number] = self._layer_of(packed, experts, memory)
        except Unsupported as error:
            self.status = str(error)
        if self.status == "on":
            self._link.attach(number, packed, experts.module, memory, buffer, MAX_PAIRS)

    def takes(self, layer: int, states: Tensor, chosen: Tensor, weights: Tensor) -> bool:
        """Tell whether the experts of a call can be computed."""
        return (
            self.status == "on"
            and states.dim() == chosen.dim() == 2
            and chosen.shape == weights.shape
            and len(states) == len(chosen) <= self.tokens
            and chosen.numel() <= MAX_PAIRS
            and (states.dtype, states.shape[1]) == (self._dtype, self._width)
            and layer in self._layers
        )

    def compute(self, layer: int, states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Queue the experts of a layer; return their sum ``[tokens, H]``. Takes hidden states ``[tokens, H]``, numbers
        of the chosen experts and their weights, ``[tokens, k]`` each. Nothing waits for the device."""
        count, self.each = chosen.shape
        self._memory_for(self.each)
        call = self._call(layer, count, self.each)
        compute = self._requested if self._device.type == "cuda" else self._computed
        alone = partial(compute, call, states, chosen, weights)
        if not self.linked(layer, chosen.numel()):
            return alone()

        def shared() -> Tensor:
            split = self._link.split(layer, chosen)
            linked = partial(self._link.compute, layer, split, states, weights)
            return compute(call, states, split.others, weights, linked)

        output = self._link.checked((states.dtype, weights.dtype), shared, alone)
        return alone() if output is None else output

    def linked(self, layer: int, pairs: int) -> int:
        """Return how many experts of a layer the link brings. Given are `pairs` choices of different ones."""
        return self._link.slots(layer, pairs)

    @property
    def beside(self) -> tuple[int, int]:
        """Counts since the load: experts that the link brought, choices that the CPU computed beside them."""
        return self._link.done

    def _computed(self, call: Any, states: Tensor, chosen: Tensor, weights: Tensor, linked: Linked = None) -> Tensor:
        """Compute a call at once."""
        *host, out, _ = self._buffers
        for memory, tensor in zip(host, (states, chosen, weights), strict=True):
            memory[: tensor.numel()].view(tensor.shape).copy_(tensor)
        self._library.compute_experts(byref(call))
        result = out[: states.numel()].view(states.shape)
        return result.clone() if linked is None else result + linked()

    def _requested(self, call: Any, states: Tensor, chosen: Tensor, weights: Tensor, linked: Linked = None) -> Tensor:
        """Have the device ask for a call and wait for it. Both are in its current stream, as is what it computes
        meanwhile."""
        from zinfer.engine.stream.experts.request import receive, send

        if self._server is None:
            self._server = Server(self._library, self._threads)
        if not hasattr(call, "number"):
            call.number = self._server.number(call)
        *sent, out, _ = self._buffers
        recorded = torch.cuda.is_current_stream_capturing()  # all of it is in one stream then
        if self._latest is not None and not recorded:
            self._latest.wait()  # calls share memory, and may come from two streams
        send((states, chosen, weights), sent, self._server.asked, self._server.done, call.number)
        result = receive(out, self._server.done, states, None if linked is None else linked())
        if not recorded:
            self._latest = torch.cuda.Event()
            self._latest.record()
        return result

    @property
    def settings(self) -> dict[str, Option]:
        """Way in which experts are computed, for the record."""
        matrices = [matrix for own in self._layers.values() for matrix in (own.up, own.down)]
        codes = {matrix.kind >= _KINDS["codes8"] for matrix in matrices}
        fast = "int16" if codes == {True} else "bf16"  # to what inputs are rounded
        return {
            "cpu_experts": self.status,
            "cpu_expert_tokens": self.tokens,
            "cpu_expert_threads": self._threads,
            "cpu_expert_products": fast if matrices and all(matrix.fast for matrix in matrices) else "float32",
            **self._link.settings,
        }

    def close(self) -> None:
        """Forget all experts; the device must have computed them."""
        if self._server is not None:
            self._server.close()
        self._link.close()
        self._layers, self._calls, self._buffers, self._kept = {}, {}, (), []
        self.status = "closed"

    def _memory_for(self, each: int) -> tuple[Tensor, ...]:
        """Return the memory of calls with `each` experts a token."""
        if not self._buffers or self._buffers[1].numel() < self.tokens * each:
            pin, tokens, shape = self._device.type == "cuda", self.tokens, self.tokens * self._width
            room = self._library.experts_room
            room.restype = c_int64
            size = max(room(byref(layer), c_int64(tokens), c_int64(each)) for layer in self._layers.values())
            self._kept.append((self._calls, self._buffers))  # graphs may hold them
            self._calls = {}
            with torch.inference_mode(False):
                self._buffers = (
                    torch.zeros(shape, dtype=self._dtype, pin_memory=pin),
                    torch.zeros(tokens * each, dtype=torch.int64, pin_memory=pin),
                    torch.zeros(tokens * each, dtype=torch.float32, pin_memory=pin),
                    torch.zeros(shape, dtype=self._dtype, pin_memory=pin),
                    torch.zeros(size, dtype=torch.float32),
                )
        return self._buffers

    def _call(self, layer: int, tokens: int, each: int) -> Any:
        """Return the call of a shape, which graphs hold."""
        key = layer, tokens, each
        if key not in self._calls:
            pointers = [tensor.data_ptr() for tensor in self._buffers]
            own = pointer(self._layers[layer])
            self._calls[key] = _Call(own, *pointers, tokens, each, self._threads)
        return self._calls[key]

    def _layer_of(self, packed: PackedExperts, experts: Experts, memory: Tensor) -> Any:
        module = experts.module
        gate = None if computes_more(module) else gate_of(module)
        if gate is None:
            raise Unsupported(f"{type(module).__name__} computes more than products and a known gate")
        names = {name.rpartition(".")[2]: name for name in experts.weights}
        if not {"gate_up_proj", "down_proj"} <= names.keys() or not hasattr(module, "is_transposed"):
            raise Unsupported(f"{type(module).__name__} has other matrices")
        matrices = []
        for leaf in ("gate_up_proj", "down_proj"):
            if bool(module.is_transposed) != packed.blocks[names[leaf]].transposed:
                raise Unsupported("matrices whose rows are inputs")
            made = _matrix(packed, names[leaf], memory, self._library)
            if bias := names.get(f"{leaf}_bias"):
                made.bias = _addresses(packed, bias, memory)
            matrices.append(made)
        up, down = matrices
        if self._fast and not (up.fast and down.fast):
            lacks = ("a CPU without AVX2", "these sizes or types without AVX-512", "these sizes or types")
            what = lacks[self._library.experts_fast()]
            raise Unsupported(f"slow: {what} (--experts cpu has the CPU compute them all the same)")
        block = packed.blocks[names["down_proj"]]
        self._dtype, self._width = block.dtype, block.stored_shape[1]
        numbers = len(packed.experts), _TYPES.index(self._dtype), gate.interleaved
        own = _Layer(up, down, *numbers, gate.alpha, gate.limit, gate.offset)
        own.kept = memory, up, down  # what it points to goes with it
        return own


def _addresses(packed: PackedExperts, name: str, memory: Tensor) -> Any:
    """Return where each expert's bias is."""
    chunks = [chunks_of(packed, packed.blocks[name], number) for number in range(len(packed.experts))]
    if any(len(expert) != 1 or expert[0].layout is not None for expert in chunks):
        raise Unsupported(f"{name} is coded")
    return (c_void_p * len(chunks))(*(memory.data_ptr() + chunk.start for (chunk,) in chunks))


def _matrix(packed: PackedExperts, name: str, memory: Tensor, code: Any) -> Any:
    """Describe a weight to the compiled code; it lies in `memory` as ``[E, outputs, inputs]``. Raises Unsupported."""
    block, base, parts = packed.blocks[name], memory.data_ptr(), list[Any]()
    rows, columns = block.stored_shape[1:]
    if block.dtype not in _TYPES:
        raise Unsupported(f"values of {block.dtype}")
    chunks = [chunks_of(packed, block, number) for number in range(len(packed.experts))]
    layouts = {chunk.layout for expert in chunks for chunk in expert}
    made = _Matrix(rows=rows, columns=columns, height=1, width=columns, down=1, across=1)
    if layouts == {None}:
        made.kind, made.row_bytes, made.count = _TYPES.index(block.dtype), columns * block.dtype.itemsize, 1
        for expert in chunks:
            if any(first.end != second.start for first, second in pairwise(expert)):
                raise Unsupported("parts of an expert that lie apart")
            parts.append(_Part(base + expert[0].start, None, None, None, rows, 1.0))
    else:
        coded = [layout for layout in layouts if isinstance(layout, CodesLayout) and layout.coded is None]
        if len(coded) < len(layouts) or any(layout.order for layout in coded):
            raise Unsupported("experts that are coded, or whose columns have an order of their own")
        first = coded[0]
        names = "bits", "table", "block", "scale_dtype", "scale_table", "zeros", "zero_dtype", "supers", "inner"
        form = {(*(getattr(each, name) for name in names), each.grid[1], each.grid[0] > 1) for each in coded}
        if len(form) > 1 or len({tuple(chunk.place - e[0].place for chunk in e) for e in chunks}) > 1:
            raise Unsupported("experts of several formats")
        if first.supers and (first.scale_table, first.block, first.zeros) not in _SUPERS:
            raise Unsupported("factors of scales that no block of a GGUF has")
        whole = all(each.grid[0] == -(-each.rows // each.block[0]) for each in coded)
        if not whole and any(each.grid[0] > 1 for each in coded):
            raise Unsupported("blocks of scales that do not fit the rows")
        made.count, made.row_bytes = len(chunks[0]), -(-columns * first.bits // 8)
        made.height, made.width = (first.block[0] if whole else 1), first.block[1]
        made.down, made.across = max(each.grid[0] for each in coded), first.grid[1]
        made.kind = _KINDS["e4m3" if first.table == "e4m3" else f"codes{first.bits}"]
        made.inner = _TYPES.index(first.inner if block.dtype == torch.float32 else torch.float32)
        made.scale_kind = _KINDS[first.scale_table] if first.scale_table else _TYPES.index(first.scale_dtype)
        made.zero_kind = _ZEROS[first.zero_dtype]
        values = table(first.table, torch.device("cpu")).tolist()
        made.table = (c_float * len(values))(*values)
        for chunk in (chunk for expert in chunks for chunk in expert):
            layout: Any = chunk.layout
            start, (scales, zeros, _, supers) = base + chunk.start, layout.starts
            minimums = start + zeros if layout.zeros else None
            factors = start + supers if layout.supers else None
            factor = layout.factor / layout.divisor
            parts.append(_Part(start, start + scales, minimums, factors, layout.rows, factor))
    made.parts = (_Part * len(parts))(*parts)
    made.fast = _is_fast(made, _TYPES.index(block.dtype), code.experts_fast())
    return made


def _is_fast(made: Any, states: int, level: int) -> bool:
    """Tell whether values are multiplied as they are unpacked. `level` is what `experts_fast` returns."""
    bf16, fp16 = _TYPES.index(torch.bfloat16), _TYPES.index(torch.float16)
    few = made.kind >= _KINDS["codes4"]
    codes = few or (made.kind == _KINDS["codes8"] and made.table[255] in (-1, 127, 255))
    widths = [32 << power for power in range(16)] + ([16] if few else [])
    groups = made.across == 1 or made.width in widths
    kinds = (codes and states in (bf16, fp16)) or (made.kind in (_KINDS["e4m3"], bf16) and states == bf16)
    return kinds and level > (not few) and groups and made.columns % LANE_COLUMNS == 0
