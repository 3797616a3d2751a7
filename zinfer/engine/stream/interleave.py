"""Interleaved forward passes, so that a layer's weights come once for all. Each forward pass is a coroutine (a
greenlet) that stops before every decoder layer, without code for models. While it stops it holds its hidden states;
what a layer needs beyond them exists for one forward pass at a time."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from greenlet import getcurrent, greenlet
from torch import Tensor

from zinfer.engine.stream.host_work import PAUSED, PausingPass
from zinfer.engine.stream.weights.ring import Fetch, PrefetchRing


def interleave(
    ring: PrefetchRing,
    passes: Sequence[Callable[[], Tensor]],
    enter: Callable[[int, int], None],
    fetches: Sequence[Fetch] = (),
    on_cpu: int = 0,
) -> list[Tensor]:
    """Run several forward passes in one pass of the weights.

    `enter` gets the number of a forward pass and of the layer that it is about to compute. `fetches` are the transfers
    besides weights, in the order in which the forward passes borrow them. An exception of one forward pass ends all.

    The CPU attends to rows of the last `on_cpu` of `passes`, not all of them. They begin each layer, in the ring's
    second queue, and may pause in it (`zinfer.engine.stream.host_work`) while the others are launched.
    """
    outputs: dict[int, Tensor] = {}
    first = len(passes) - on_cpu

    def runner(number: int) -> Callable[[], None]:
        def run() -> None:
            outputs[number] = passes[number]()

        return run

    kinds = [PausingPass if number >= first else greenlet for number in range(len(passes))]
    workers: list[Any] = [kind(runner(number)) for number, kind in enumerate(kinds)]
    numbers = {worker: number for number, worker in enumerate(workers)}

    def turn(layer: int) -> None:
        current = getcurrent()
        current.parent.switch(layer)
        enter(numbers[current], layer)

    def go_on(number: int) -> Any:
        """Run a forward pass up to its next layer; return that. PAUSED if it pauses before, None if it ends."""
        with ring.second_stream() if number >= first else nullcontext():
            return workers[number].switch()

    order = [*range(first, len(passes)), *range(first)]
    with ring.weight_pass(len(passes), turn, fetches):
        try:
            layer: int | None = None
            while len(outputs) < len(passes):
                if on_cpu and layer is not None:
                    ring.bring_layer(layer)
                stops = {number: go_on(number) for number in order}
                for number in order[:on_cpu]:
                    while stops[number] is PAUSED:
                        stops[number] = go_on(number)
                layer = stops[order[-1]]
        finally:
            for worker in workers:
                if worker:  # begun and not finished: free its tensors now
                    worker.throw()
    return [outputs[number] for number in range(len(passes))]
