"""Layer graphs: decode steps whose weights cross the link, without launches.

A layer's weights come into memory of their own before each of its calls, outside of its graph. What the layer computes
then is recorded as in a step without offload (`zinfer.engine.stream.graphs`), and launched as one. All tensors that the
model hands a layer are copied to memory that the graph reads, unless they are there: the output of a graph is the input
of the next one.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from transformers.cache_utils import Cache

Record = Callable[[Callable[[], Any]], Callable[[], Any]]
BY_LAYER = "on, layer by layer"
DIFFERS = "their results differ from those of a step without them"
NO_ROOM = "no GPU memory for them"


def fault_of(error: Exception, what: str) -> str:
    """Return the fault of a graph of `what` that raised `error`."""
    if isinstance(error, torch.OutOfMemoryError):
        return NO_ROOM
    return f"{what} cannot be recorded: {str(error).strip().partition(chr(10))[0][:120] or type(error).__name__}"


@dataclass
class LayerGraph:
    """A recorded layer, and the memory of its arguments' tensors, in order."""

    inputs: list[Tensor]
    replay: Callable[[], Any]


class LayerGraphs:
    """Graphs of all `layers` for a decode step of one shape. `record` makes a graph of a function, and `cache` is the
    cache of static shape in place of the step's. `alike` tells whether two results differ by rounding alone; at most
    `may_differ` layers of a pass need not be alike. `restart` has a layer's weights come anew, as before its call: what
    the call unpacks itself is part of its graph."""

    status: ClassVar[str] = BY_LAYER
    checks: ClassVar[int] = 2  # the second time shows arguments that grow with the tokens

    def __init__(
        self,
        layers: Sequence[nn.Module],
        record: Record,
        cache: Callable[[], AbstractContextManager[Cache]],
        alike: Callable[[Tensor, Tensor], bool],
        restart: Callable[[int], None],
        may_differ: float = 0.0,
    ) -> None:
        self._restart, self._may_differ, self._different = restart, may_differ, 0
        self._layers, self._record, self._cache, self._alike = layers, record, cache, alike
        self._graphs: list[LayerGraph] = []
        self._memory = dict[int, tuple[Tensor, Tensor]]()  # of a pass's tensors, by their id, while layers are recorded
        self._copied = set[int]()
        self._checks = False  # layers are computed both ways
        self.checked = 0  # passes computed so
        self.fault: str | None = None

    def check(self, run: Callable[[], Tensor]) -> Tensor:
        """Run a forward pass whose layers are computed both ways. They are recorded if need be. The results are those
        without graphs; `fault` is set if those with them differ."""
        self._checks, self._different = True, 0
        try:
            return self.forward(run)
        finally:
            self._checks = False
            self.checked += 1

    def forward(self, run: Callable[[], Tensor]) -> Tensor:
        """Run a forward pass whose layers are replayed."""
        self._copied.clear()
        before = [vars(layer).get("forward") for layer in self._layers]
        for index, layer in enumerate(self._layers):
            layer.forward = partial(self._call, index, layer.forward)
        try:
            logits = run()
        finally:
            self._memory.clear()
            for layer, forward in zip(self._layers, before, strict=True):
                del layer.forward
                if forward is not None:
                    layer.forward = forward
        return logits

    def _call(self, index: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given, form = tree_flatten((args, kwargs))
        tensors = [value for value in given if isinstance(value, Tensor)]
        if not self._checks:
            graph = self._graphs[index]
            self._copy(tensors, graph.inputs)
            return graph.replay()

        def call(inputs: Iterator[Tensor], cache: Cache) -> Any:
            """Call the layer with other tensors, and another cache, among its arguments."""
            swapped = [
                next(inputs) if isinstance(value, Tensor) else cache if isinstance(value, Cache) else value
                for value in given
            ]
            others, options = tree_unflatten(swapped, form)
            return forward(*others, **options)

        output = forward(*args, **kwargs)
        if self.fault is None:
            try:
                self._check(index, call, tensors, output)
            except Exception as error:
                self.fault = fault_of(error, "a decoder layer")
        return output

    def _copy(self, tensors: Sequence[Tensor], memories: Sequence[Tensor]) -> None:
        for tensor, memory in zip(tensors, memories, strict=True):
            if tensor is memory or id(memory) in self._copied:
                continue
            if tensor.shape != memory.shape:
                raise ValueError(f"an argument {list(tensor.shape)} was {list(memory.shape)} before")
            memory.copy_(tensor)
            self._copied.add(id(memory))

    def _check(
        self, index: int, call: Callable[[Iterator[Tensor], Cache], Any], tensors: Sequence[Tensor], output: Any
    ) -> None:
        """Record a layer, unless it is, and compare it with `output`."""
        if index == len(self._graphs):
            for tensor in tensors:
                if id(tensor) not in self._memory:
                    self._memory[id(tensor)] = tensor, tensor.clone()
            inputs = [self._memory[id(tensor)][1] for tensor in tensors]

            def static() -> Any:
                self._restart(index)
                with self._cache() as cache:
                    return call(iter(inputs), cache)

            self._graphs.append(LayerGraph(inputs, self._record(static)))
        graph = self._graphs[index]
        self._copied.clear()  # the memory of an output has the value of the graph before
        self._copy(tensors, graph.inputs)
        result = graph.replay()
        same = True
        for expected, actual in zip(tree_leaves(output), tree_leaves(result), strict=True):
            if isinstance(expected, Tensor):
                self._memory[id(expected)] = expected, actual
                same = same and self._alike(actual, expected)
        self._different += not same
        if self._different > self._may_differ:
            self.fault = DIFFERS
