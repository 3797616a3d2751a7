"""Several forward passes side by side, a decoder layer at a time, so that a layer's weights come once for all of them.

Each pass is a coroutine (a greenlet) that stops before every decoder layer: no model needs to know. While it stops it
holds its hidden states; what a layer needs beyond them exists for one pass at a time.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from greenlet import getcurrent, greenlet
from torch import Tensor

from zinfer.engine.stream.prefetch import Fetch, PrefetchRing


def interleave(
    ring: PrefetchRing,
    passes: Sequence[Callable[[], Tensor]],
    enter: Callable[[int, int], None],
    fetches: Sequence[Fetch] = (),
    beside: int = 0,
) -> list[Tensor]:
    """Run `passes`, each a forward pass through all layers of `ring` in order, in one trip; return their results.

    `enter` gets the number of a pass and of the layer that it is about to compute. `fetches` are the trip's transfers
    besides weights, in the order in which the passes borrow them. An exception of one pass ends all.

    The last `beside` passes, not all of them, wait for the device in the middle of a layer: they run in the ring's
    second queue, while the device computes the others.
    """
    outputs: dict[int, Tensor] = {}

    def runner(number: int) -> Callable[[], None]:
        def run() -> None:
            outputs[number] = passes[number]()

        return run

    workers: list[Any] = [greenlet(runner(number)) for number in range(len(passes))]
    numbers = {worker: number for number, worker in enumerate(workers)}

    def turn(layer: int) -> None:
        current = getcurrent()
        current.parent.switch()
        enter(numbers[current], layer)

    first = len(passes) - beside
    with ring.trip(len(passes), turn, fetches):
        try:
            while len(outputs) < len(passes):
                for number, worker in enumerate(workers):
                    with ring.beside() if number >= first else nullcontext():
                        worker.switch()
        finally:
            for worker in workers:
                if worker:  # begun and not finished: free its tensors now
                    worker.throw()
    return [outputs[number] for number in range(len(passes))]
