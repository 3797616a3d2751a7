"""CUDA graphs of decode steps: what lies on the GPU runs at the speed of its memory, not at that of launches.

A decode step of a few rows launches thousands of kernels, each of which takes Python longer than the GPU. Where no
weight crosses the link, the kernels of a step are recorded once and launched as one from then on (a CUDA graph). A
graph reads and writes the same memory each time, while the KV cache grows by a position a step. So the recorded pass
sees a number of positions that is rounded up (`end_of`), a mask hides positions not computed yet, and new keys and
values go to the position that a tensor on the device holds (`StaticKV.slot`). When the rounded length, or the number of
tokens a row, is another one, another graph is recorded. A layer with a sliding window is recorded with all slots that
it has; when they are full, those that are kept move to the front before the step.

Models run unchanged. Models that take their attention function by name run as joined passes do (`attention`), several
micro-batches in one graph. The others get the mask, one micro-batch at a time and one token a row, since a mask ``[B,
n]`` does not say where on the device a step's tokens are. A graph is believed only if its logits are those of the same
step without it. Rounding may lead a token to other experts, and grows from layer to layer, in random weights above all;
so where logits differ, the keys and values of the first layers decide.

What is recorded has fewer and faster kernels than the model's own code launches: of norms, products of few tokens,
rotary positions and routers (`fused`), new keys and values, and attention with sinks, or where few rows have many
positions (`split_attention`).

The memory of a retired micro-batch is kept for the next one of the same shape, together with its graphs; any other
micro-batch that is admitted frees it first (`Graphs.make_room`).
"""

import gc
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from zinfer.engine import gpu_memory
from zinfer.engine.cache import FixedLayer, RowCache
from zinfer.engine.decoder import DecoderBatch, Part
from zinfer.engine.stream.attention import MASKED, Attend, Bias, Ragged, bias
from zinfer.engine.stream.fused import Kernels, Linears, Norms, Rotations, Routers
from zinfer.engine.stream.kv.cpu import OwnAttentionError
from zinfer.engine.stream.layer_graphs import DIFFERS, NO_ROOM, LayerGraphs, fault_of
from zinfer.engine.stream.split_attention import plain_attention, split_attention
from zinfer.engine.triton_check import cannot_run

HIDDEN = "hidden_states"  # argument of a layer that is not positional


@dataclass(frozen=True)
class Tuning:
    """Tuned numbers of graphs."""

    bucket: int = 128  # positions: least step by which recorded lengths grow
    growth: int = 8  # a step is at most 1/8 of the length: reading masked positions costs little, and graphs stay few
    pays: int = 16  # replays that pay for a recording
    longest_wait: int = 64  # steps of one shape that rows decode together, at most, before their pass is recorded
    max_layered: int = 2  # numbers of positions of the same, for which each layer has a graph
    max_graphs: int = 16  # of one set of micro-batches, those used last
    checks: int = 2  # steps computed both ways before graphs are believed; the first step of each graph always is
    tries: int = 2  # differences between the two ways after which no more graphs are made
    # Share of the layers of a mixture that may differ: rounding alone leads a token of one in fifty to other experts.
    may_differ: float = 0.25
    observed: int = 16  # rows whose hidden states are compared: those of all rows and layers take a gigabyte
    # GPU bytes that have never been used, without which nothing is recorded: graphs keep memory (a pass's activations,
    # a workspace, the kernels' arguments), which no plan counts, and must not take it from a prefill.
    min_free: int = 512 << 20


TUNED = Tuning()
# Largest difference of logits between the two ways, relative to their norm, by bytes of a value: that of rounding.
TOLERANCE = {2: 0.06, 4: 1e-3, 8: 1e-6}

Run = Callable[[], Tensor]
Append = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
Shape = tuple[int, int]  # tokens of each row in a step, and the number of last ones whose logits are wanted
States = list[tuple[Tensor, Tensor]]  # hidden states before and after each decoder layer


class CudaRecorder:
    """Recorder of CUDA graphs, which share one pool of memory: each result is copied before the next graph runs."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._open_pool()

    def _open_pool(self) -> None:
        """Begin a pool of memory. An empty graph keeps it: PyTorch cannot record into a pool whose graphs are gone
        while a result of theirs is not."""
        self._pool, self._keeper = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        with torch.cuda.stream(self._stream), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an empty graph is meant
            self._keeper.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            self._keeper.capture_end()

    def record(self, run: Run) -> Run:
        """Record `run`; return a function that replays it, on the same memory, and returns the same tensor."""
        try:
            return self._record(run)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()  # PyTorch does not while it records: free memory of a prefill may be unused
            return self._record(run)

    def _record(self, run: Run) -> Run:
        free, total = gpu_memory.free_and_total()
        others = total - free - torch.cuda.memory_reserved(self._device)
        if total - others - torch.cuda.max_memory_allocated(self._device) < TUNED.min_free:
            raise torch.OutOfMemoryError("the next prefill may need the memory")
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            self._rehearse(run)
            self._stream.synchronize()
            # Other threads (telemetry) go on with their own work meanwhile. No garbage is collected: to free the GPU
            # memory of an engine that is gone would end the recording.
            collects = gc.isenabled()
            gc.disable()
            try:
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                result = run()
            except BaseException:
                self._abandon(graph)
                raise
            else:
                graph.capture_end()
            finally:
                if collects:
                    gc.enable()
        current.wait_stream(self._stream)

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay

    @staticmethod
    def _rehearse(run: Run) -> None:
        """Run a pass twice before its recording. That loads kernels, those that `fused.Linears` joins after the first
        run as well, and takes workspaces. Raises RuntimeError if the host waits for the device in it, which would spoil
        the recording."""
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            run()
            run()
        finally:
            torch.cuda.set_sync_debug_mode(before)

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a recording that failed. PyTorch leaves its pool open if the end fails, too."""
        with suppress(Exception):
            graph.capture_end()
        with suppress(Exception):
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
        self._open_pool()


def recorder_of(device: torch.device) -> CudaRecorder | str:
    """Return the recorder of a device, or why there is none."""
    return CudaRecorder(device) if device.type == "cuda" else "no GPU"


class ConstantsOnDevice(TorchFunctionMode):
    """Mode in which a model's constants are filled on the device. That is ``torch.tensor(number, device=..)``.
    Otherwise it copies the number from host memory, which cannot be recorded."""

    def __torch_function__(
        self, function: Any, _types: Any, args: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        options = options or {}
        scalar = len(args) == 1 and isinstance(args[0], int | float)
        if function is torch.tensor and scalar and options.keys() <= {"device", "dtype"}:
            return torch.full((), args[0], **options)
        return function(*args, **options)


def end_of(length: int, capacity: int) -> int:
    """Return how many positions a recorded pass sees after `length` tokens."""
    step = max(TUNED.bucket, (1 << length.bit_length()) // (2 * TUNED.growth))
    return min(capacity, -(-length // step) * step)


class StaticLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of one decoder layer in a recorded pass: the first `end` slots of memory ``[B, kv_heads, room,
    head_dim]``, computed or not. The new ones go to `slots`, ``[n]`` on the device, by a kernel `append` if given.
    `bias` is that of a sliding window."""

    is_compileable = True  # transformers then never looks at a mask's values, which are on the device
    is_sliding = False

    def __init__(
        self, keys: Tensor, values: Tensor, slots: Tensor, end: int, bias: Bias | None, append: Append | None
    ) -> None:
        super().__init__()
        self.bias, self._append = bias, append
        self.keys, self.values = keys[:, :, :end], values[:, :, :end]
        self._slots, self._end = slots, end
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        if self._append is not None and key_states.stride(-1) == 1 == value_states.stride(-1):
            self._append(self.keys, self.values, key_states, value_states, self._slots)
        else:
            self.keys.index_copy_(2, self._slots, key_states)
            self.values.index_copy_(2, self._slots, value_states)
        return self.keys, self.values

    def hand_back(self) -> None:
        """Do nothing: `update` returns no copy."""

    def get_seq_length(self) -> int:
        return self._end - 1

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        return self._end, 0


class StaticKV:
    """Memory of one micro-batch that graphs refer to: keys and values of all its layers, the position of the next token
    (`slot`), its slot in layers with each sliding window (`within`), and which positions are real (`mask`, ``[B,
    capacity]``). A later micro-batch of the same shape may take it over."""

    def __init__(self, batch: DecoderBatch) -> None:
        self.rows, self.capacity = batch.batch_size, batch.capacity
        layers = _layers(batch)
        self.tensors = [layer.memory for layer in layers]
        self.windows = [_window(layer, batch.capacity) for layer in layers]
        device = self.tensors[0][0].device
        self.slot = torch.zeros(1, dtype=torch.int64, device=device)
        self.within = {window: torch.zeros_like(self.slot) for window in self.windows if window is not None}
        self.mask = torch.ones((self.rows, self.capacity), dtype=torch.int64, device=device)
        self._positions = torch.arange(self.capacity, device=device)
        self._rooms = {window: pair[0].shape[2] for window, pair in zip(self.windows, self.tensors, strict=True)}
        self._padded, self._clean = False, False

    def _has_shape(self, batch: DecoderBatch) -> bool:
        count = len(getattr(batch.cache, "layers", ()))
        return (self.rows, self.capacity, len(self.tensors)) == (batch.batch_size, batch.capacity, count)

    def fits(self, batch: DecoderBatch) -> bool:
        """Tell whether a micro-batch has its keys and values in this memory."""
        return self._has_shape(batch) and all(
            layer.memory[0] is keys and layer.memory[1] is values
            for layer, (keys, values) in zip(_layers(batch), self.tensors, strict=True)
        )

    def offer(self, batch: DecoderBatch) -> bool:
        """Offer the memory to a new micro-batch; return whether it has the same shape."""
        layers = batch.cache.layers if isinstance(batch.cache, RowCache) else [None]
        if not all(isinstance(layer, FixedLayer) and layer.recordable for layer in layers):
            return False
        if not self._has_shape(batch):
            return False
        for layer, tensors in zip(layers, self.tensors, strict=True):
            layer.spare = tensors
        self._clean = False
        return True

    def feed(self, batch: DecoderBatch, count: int) -> None:
        """Set the inputs of the next pass besides tokens. It has `count` tokens a row."""
        self.slot.fill_(batch.length)
        layers = _layers(batch)
        for window, slot in self.within.items():
            slot.fill_(layers[self.windows.index(window)].slots.next_slot(batch.length))
        if batch.mask is not None:
            self.mask.copy_(batch.mask)
        elif self._padded:
            self.mask.fill_(1)
        self._padded = batch.mask is not None
        if not self._clean:  # attention multiplies hidden positions by zero, so they must be numbers
            hidden = zip(self.tensors, self.slots_of(batch), strict=True)
            torch._foreach_zero_([part[:, :, begin + count :] for pair, begin in hidden for part in pair])
            self._clean = True

    @staticmethod
    def slots_of(batch: DecoderBatch) -> list[int]:
        """Return the slot of the next token in each layer."""
        return [layer.slots.next_slot(batch.length) for layer in _layers(batch)]

    def layers(self, end: int, count: int, dtype: torch.dtype, append: Append | None) -> list[StaticLayer]:
        """Return the layers of a pass that sees the first `end` positions."""
        slots = {None: self.slots(count)} | {window: self.slots(count, window) for window in self.within}
        biases = {window: Bias(bias(self.seen_within(window, count), dtype)) for window in self.within}
        return [
            StaticLayer(*pair, slots[window], pair[0].shape[2] if window else end, biases.get(window or 0), append)
            for pair, window in zip(self.tensors, self.windows, strict=True)
        ]

    def slots(self, count: int, window: int | None = None) -> Tensor:
        """Return the slots of the next `count` tokens, ``[count]``, on the device."""
        return (self.slot if window is None else self.within[window]) + self._positions[:count]

    def seen(self, end: int, count: int) -> Tensor:
        """Return which of the first `end` positions each next token sees: bool ``[B, count, end]``."""
        return (self.mask[:, None, :end] != 0) & (self._positions[:end] <= self.slots(count)[:, None])

    def seen_within(self, window: int, count: int) -> Tensor:
        """Return which slots of a sliding `window` each next token sees: bool ``[B, count, room]``."""
        new_slots, slots = self.slots(count, window)[:, None], self._positions[: self._rooms[window]]
        real = self.mask[:, (slots + self.slot - self.within[window]).clamp(0, self.capacity - 1)] != 0
        return real[:, None] & (slots <= new_slots) & (slots > new_slots - window)

    def written(self, batch: DecoderBatch, count: int) -> list[Tensor]:
        """Return the keys and values of the next `count` positions: views of the memory."""
        each = zip(self.tensors, self.slots_of(batch), strict=True)
        return [part[:, :, begin : begin + count] for pair, begin in each for part in pair]


@dataclass(eq=False)
class Graph:
    """A recorded pass, and the memory of its inputs: ids and positions of the next tokens, ``[rows, n]``. It gives the
    logits of the last `keep` of them."""

    token_ids: Tensor
    positions: Tensor
    keep: int
    replay: Run | None = None
    status: ClassVar[str] = "on"
    checks: ClassVar[int] = 1  # passes computed both ways, at least, before it is believed
    checked: int = 0  # passes computed both ways that agreed


@dataclass(eq=False)
class GraphSet:
    """Micro-batches that decode in one pass: the steps of each shape that they have computed without a graph, and their
    graphs, by the shape and the number of positions that each of them sees, the one used last at the end."""

    memories: tuple[StaticKV, ...]
    steps: Counter[Shape] = field(default_factory=Counter)
    replays: int = 0
    graphs: dict[tuple[Shape, tuple[int, ...]], Graph | LayerGraphs] = field(default_factory=dict)

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """Number of rows, and capacity, of each micro-batch."""
        return tuple((memory.rows, memory.capacity) for memory in self.memories)


class Graphs:
    """Graphs of the decode passes of `model`. Its decoder `layers` are `routed` if they have experts. `surrounding` is
    the context of each recorded pass, `restart` has a layer's weights come anew for its own graph."""

    def __init__(
        self,
        model: PreTrainedModel,
        layers: Sequence[nn.Module],
        routed: bool,
        ragged: Ragged,
        recorder: CudaRecorder | str,
        surrounding: Callable[[], AbstractContextManager[None]],
        restart: Callable[[int], None],
    ) -> None:
        self._model, self._ragged, self._surrounding, self._restart = model, ragged, surrounding, restart
        self._layers, self._may_differ = layers, TUNED.may_differ * len(layers) if routed else 0.0
        self._recorder = None if isinstance(recorder, str) else recorder
        self._why_not = recorder if isinstance(recorder, str) else None  # for good
        self.status = self._why_not or "no decode step yet"
        self.paused = False
        self._memories = dict[int, tuple[DecoderBatch, StaticKV]]()  # by the id of their micro-batch
        self._spare: list[StaticKV] = []
        self._graph_sets = dict[tuple[int, ...], GraphSet]()  # by the ids of their memories
        self.wait = 1  # steps without a graph before a pass is recorded: fewer where recordings paid, else more
        self._checks, self._differences = 0, 0
        self.kernels = "none"  # whether own ones take the place of the model's
        self._replaced: list[Kernels] = []
        self._attend: Attend = plain_attention
        self._append: Append | None = None
        self._kinds = set(getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ())
        self._single = False  # steps of several tokens a row cannot be recorded
        # Shapes of steps, and rows and capacities of their micro-batches, that have no use for graphs.
        self._useless = set[tuple[Shape, tuple[tuple[int, int], ...]]]()

    @property
    def wanted(self) -> bool:
        """True if passes are recorded that `cannot` finds nothing against."""
        return self._why_not is None and not self.paused

    @property
    def checking(self) -> bool:
        """True while graphs are recorded and compared, or wait for that."""
        return self.wanted and bool(self._memories) and not self._useless and self._checks < TUNED.checks

    @property
    def takes_several(self) -> bool:
        """True if steps of several tokens a row are recorded, too."""
        return self._ragged.able and not self._single

    def make_room(self, rows: int, capacity: int) -> None:
        """Free retired micro-batches' memory, unless one has the next one's shape."""
        if all((memory.rows, memory.capacity) != (rows, capacity) for memory in self._spare):
            self._free()

    def reuse_memory(self, batch: DecoderBatch) -> None:
        """Reuse a retired micro-batch's memory and graphs for an equal shape. All such memory is freed if there is
        none."""
        for number, memory in enumerate(self._spare):
            if memory.offer(batch):
                self._memories[id(batch)] = batch, self._spare.pop(number)
                return
        self._free()

    def forward(self, parts: Sequence[Part], run: Callable[[bool], Tensor], by_layer: bool = False) -> Tensor:
        """Compute a decode pass of whole micro-batches; return its logits ``[rows, keep, V]``. They must be copied
        before the next pass. `cannot` finds nothing against the parts, which have as many tokens a row. With `by_layer`
        each layer has a graph. `run` computes the pass without a graph of all of it; it gets whether the layers are
        replayed, so that none attends."""
        graph_set, ends = self._begin(parts)
        shape = _shape(parts)
        graph = graph_set.graphs.pop((shape, ends), None)
        if (shape, graph_set.sizes) in self._useless or (graph is None and graph_set.steps[shape] < self.wait):
            graph_set.steps[shape] += 1
            return run(False)
        if graph is None:
            graph = self._new(graph_set, parts, ends, by_layer)
        for memory, part in zip(graph_set.memories, parts, strict=True):
            memory.feed(part.batch, shape[0])
        graph_set.replays += 1
        fault: str | None = None
        if graph.checked >= graph.checks and self._checks >= TUNED.checks:
            logits = graph.forward(partial(run, True)) if isinstance(graph, LayerGraphs) else _replay(graph, parts)
            _advance(parts)
        elif isinstance(graph, LayerGraphs):
            logits, fault = graph.check(partial(run, False)), graph.fault
            self._checks += fault is None
        else:
            logits, fault = self._both_ways(graph_set, graph, parts, ends, partial(run, False))
        if fault is None:
            self.status, graph_set.graphs[shape, ends] = graph.status, graph
        else:
            self._drop_faulty(graph_set, shape, fault, for_good=not by_layer)
        return logits

    def _begin(self, parts: Sequence[Part]) -> tuple[GraphSet, tuple[int, ...]]:
        """Return a decode pass's graphs, and the positions that parts see."""
        memories = tuple(self._memory_of(part.batch) for part in parts)
        count, _ = _shape(parts)
        for memory, part in zip(memories, parts, strict=True):
            for layer in _layers(part.batch) if memory.within else ():
                layer.reserve(part.batch.length, count)
        graph_set = self._graph_sets.setdefault(tuple(map(id, memories)), GraphSet(memories))
        return graph_set, tuple(end_of(part.batch.length + count, part.batch.capacity) for part in parts)

    def _new(
        self, graph_set: GraphSet, parts: Sequence[Part], ends: tuple[int, ...], by_layer: bool
    ) -> Graph | LayerGraphs:
        """Return a graph, not recorded yet, that sees `ends` positions; make room for it."""
        assert self._recorder is not None
        count, keep = _shape(parts)
        if self.kernels == "none":
            self._find_kernels(parts[0].token_ids.device)
        while len(graph_set.graphs) >= (TUNED.max_layered if by_layer else TUNED.max_graphs):
            del graph_set.graphs[next(iter(graph_set.graphs))]
        if not by_layer:
            token_ids, positions = ([getattr(part, name) for part in parts] for name in ("token_ids", "positions"))
            return Graph(torch.cat(token_ids), torch.cat(positions), keep)

        memories = graph_set.memories  # alone, or the graphs would hold themselves

        @contextmanager
        def cache() -> Iterator[Cache]:
            with self._joined(memories, ends, count, whole=False) as static, self._kernels():
                yield static

        return LayerGraphs(self._layers, self._recorder.record, cache, alike, self._restart, self._may_differ)

    def cannot(self, part: Part) -> str | None:
        """Return why a part's decode step cannot be recorded; None if it can."""
        batch, cache = part.batch, part.batch.cache
        if not isinstance(cache, RowCache) or any(not isinstance(layer, FixedLayer) for layer in cache.layers):
            return "layers hold more than keys and values"
        if not all(layer.recordable for layer in cache.layers):
            return "the KV cache is in host memory or in 8 bits"
        windows = {window for layer in cache.layers if (window := _window(layer, batch.capacity)) is not None}
        if windows and not self._ragged.able and (len(windows) > 1 or not self._kinds or not self._kinds <= MASKED):
            return f"a sliding window of {min(windows)} tokens moves"
        if not all(layer.is_initialized for layer in cache.layers):
            return "layers share keys and values"
        if not self._ragged.able and "attention_mask" not in self._ragged.accepted:
            return "the model takes no mask"
        return None

    def drop(self, batch: DecoderBatch) -> None:
        """Forget the graphs of a micro-batch whose memory changes."""
        if id(batch) in self._memories:
            self._discard([self._memories.pop(id(batch))[1]])

    def retire(self, batch: DecoderBatch) -> None:
        """Keep the memory of a micro-batch that ends, if it has graphs."""
        if id(batch) not in self._memories:
            return
        _, memory = self._memories.pop(id(batch))
        if memory.fits(batch) and any(each.graphs for key, each in self._graph_sets.items() if id(memory) in key):
            self._spare.append(memory)
        else:
            self._discard([memory])

    def clear(self) -> None:
        """Forget all graphs, and free the memory of retired micro-batches."""
        self._free()
        for batch, _ in list(self._memories.values()):
            self.drop(batch)

    def _free(self) -> None:
        spare, self._spare = self._spare, []
        self._discard(spare)

    def _memory_of(self, batch: DecoderBatch) -> StaticKV:
        entry = self._memories.get(id(batch))
        if entry is not None and not entry[1].fits(batch):
            self.drop(batch)
            entry = None
        if entry is None:
            self._memories[id(batch)] = entry = batch, StaticKV(batch)
        return entry[1]

    def _discard(self, memories: Sequence[StaticKV]) -> None:
        """Drop the graphs of passes in which `memories` take part; if these did not pay, the next ones wait longer."""
        ids = set(map(id, memories))
        for key in [key for key in self._graph_sets if not ids.isdisjoint(key)]:
            gone = self._graph_sets.pop(key)
            if count := len(gone.graphs):
                paid = gone.replays >= TUNED.pays * count
                self.wait = max(1, self.wait // 2) if paid else min(TUNED.longest_wait, 2 * self.wait)

    def _both_ways(
        self, graph_set: GraphSet, graph: Graph, parts: Sequence[Part], ends: tuple[int, ...], eager: Run
    ) -> tuple[Tensor, str | None]:
        """Compute a pass eagerly, then by its graph, recorded if need be; return the former's logits, and the fault."""
        assert self._recorder is not None
        with _observed(self._layers) as states:
            logits = eager()
        views = list[Tensor]()
        for memory, part in zip(graph_set.memories, parts, strict=True):
            views += memory.written(part.batch, part.token_ids.shape[1])
        kept, fault = [view.clone() for view in views], None
        static = partial(self._static, graph_set.memories, ends, graph)
        try:
            if graph.replay is None:
                graph.replay = self._recorder.record(static)
            replayed = _replay(graph, parts)
            same = alike(replayed, logits)
            if not same:  # rounding grows from layer to layer: compare them one by one
                replayed = replayed.clone()
                same = alike(replayed, static())  # the recorded work is repeated
                with _observed(self._layers, states) as others:
                    static()
                pairs = zip(others, states, strict=True)
                same = same and sum(not alike(output[1], observed[1]) for output, observed in pairs) <= self._may_differ
            if same:
                graph.checked += 1
                self._checks += 1
            else:
                fault = DIFFERS
        except OwnAttentionError:
            self._ragged.able = False  # its micro-batches run one by one from now on
        except Exception as error:
            fault = fault_of(error, "a decode step")
        torch._foreach_copy_(views, kept)  # the keys and values that go with the logits
        return logits, fault

    def _drop_faulty(self, graph_set: GraphSet, shape: Shape, fault: str, for_good: bool) -> None:
        """Drop the graphs of a shape, for these micro-batches or `for_good`."""
        graph_set.graphs = {key: graph for key, graph in graph_set.graphs.items() if key[0] != shape}
        self._useless.add((shape, graph_set.sizes))
        self.status = fault
        self._differences += fault == DIFFERS
        if fault == NO_ROOM or not for_good or (fault == DIFFERS and self._differences < TUNED.tries):
            return
        if shape[0] > 1:
            self._single = True
        else:
            self._why_not = fault
            self.clear()

    def _find_kernels(self, device: torch.device) -> None:
        """Choose the kernels that replace the model's own in recorded passes."""
        if (why_not := cannot_run(device)) is not None:
            self.kernels = f"off: {why_not}"
            return
        from zinfer.engine.stream.step_kernels import append

        model = self._model
        self._replaced = [Norms(model, device), Linears(self._layers), Rotations(model, device), Routers(model, device)]
        if self._ragged.able:
            self._attend = split_attention
        self._append, self.kernels = append, "on"

    @contextmanager
    def _kernels(self) -> Iterator[None]:
        """Have constants made on the device, and kernels replace the model's own."""
        with ConstantsOnDevice(), ExitStack() as stack:
            for kernels in self._replaced:
                stack.enter_context(kernels.fused())
            yield

    def _static(self, memories: Sequence[StaticKV], ends: Sequence[int], graph: Graph) -> Tensor:
        """Run the pass that is recorded: nothing in it depends on a number that changes from step to step."""
        count, dtype = graph.token_ids.shape[1], self._model.dtype
        mask: object = None
        caches: AbstractContextManager[Cache]
        if self._ragged.able:
            caches = self._joined(memories, ends, count)
        else:
            (memory,), seen = memories, memories[0].seen(ends[0], count)
            mask = seen[:, 0].long()
            if memory.within:  # models with several kinds of layers take a mask for each
                (window,) = memory.within
                within = bias(memory.seen_within(window, count), dtype)
                mask = {"full_attention": bias(seen, dtype), "sliding_attention": within}
            caches = nullcontext(Cache(layers=memory.layers(ends[0], count, dtype, self._append)))
        with caches as cache, self._surrounding(), self._kernels():
            return self._ragged.run(graph.token_ids, graph.positions, graph.keep, cache, mask)

    def _joined(
        self, memories: Sequence[StaticKV], ends: Sequence[int], count: int, whole: bool = True
    ) -> AbstractContextManager[Cache]:
        """Return joined attention of a recorded pass (`whole`), or layers of it."""
        dtype, device = self._model.dtype, memories[0].slot.device
        layers = [memory.layers(end, count, dtype, self._append) for memory, end in zip(memories, ends, strict=True)]
        biases = [
            self._ragged.bias(memory.seen(end, count), memory.mask[:, :end], end, dtype, device)
            for memory, end in zip(memories, ends, strict=True)
        ]
        return self._ragged.cache(layers, [memory.rows for memory in memories], biases, self._attend, whole=whole)


@contextmanager
def _observed(layers: Sequence[nn.Module], given: States | None = None) -> Iterator[States]:
    """Note the hidden states of the first rows of a pass's layers. They get those of another pass, if `given`."""
    states, rows = States(), TUNED.observed

    def before(number: int, _layer: nn.Module, args: Any, kwargs: Any) -> Any:
        if given is None:
            return None
        hidden = torch.cat((given[number][0], (args[0] if args else kwargs[HIDDEN])[rows:]))
        return ((hidden, *args[1:]), kwargs) if args else (args, kwargs | {HIDDEN: hidden})

    def after(_layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        hidden, output = args[0] if args else kwargs.get(HIDDEN), output[0] if isinstance(output, tuple) else output
        if isinstance(hidden, Tensor) and isinstance(output, Tensor):
            states.append((hidden[:rows].clone(), output[:rows].clone()))

    with ExitStack() as hooks:
        for number, layer in enumerate(layers):
            hooks.callback(layer.register_forward_pre_hook(partial(before, number), with_kwargs=True).remove)
            hooks.callback(layer.register_forward_hook(after, with_kwargs=True).remove)
        yield states


def _shape(parts: Sequence[Part]) -> Shape:
    return parts[0].token_ids.shape[1], parts[0].keep


def _replay(graph: Graph, parts: Sequence[Part]) -> Tensor:
    assert graph.replay is not None
    torch.cat([part.token_ids for part in parts], out=graph.token_ids)
    torch.cat([part.positions for part in parts], out=graph.positions)
    return graph.replay()


def _advance(parts: Sequence[Part]) -> None:
    """Count the tokens that a replay stored."""
    for part in parts:
        for layer in _layers(part.batch):
            layer.length = part.batch.length
            layer.advance(part.token_ids.shape[1])


def _window(layer: FixedLayer, capacity: int) -> int | None:
    """Return the sliding window of a layer, in tokens; None if it hides none of `capacity` positions."""
    window = layer.slots.window
    return None if window is None or window >= capacity else window


def _layers(batch: DecoderBatch) -> list[FixedLayer]:
    assert isinstance(batch.cache, RowCache)
    layers: list[FixedLayer] = batch.cache.layers
    return layers


def alike(actual: Tensor, expected: Tensor) -> bool:
    """Tell whether logits, keys or values ``[rows, ..]`` differ by rounding alone. The median row counts: where experts
    are chosen, rounding alone may lead a row elsewhere."""
    tolerance, expected = TOLERANCE[actual.dtype.itemsize], expected.double().flatten(1)
    error = (actual.double().flatten(1) - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-30)
    return float(error.median()) < tolerance
