"""Memory headroom: device memory that no pass needed, for more ring buffers and rows.

A plan leaves a margin for what it does not see, moments of a pass and gaps between tensors. PyTorch keeps all memory
that it ever needed, so what the device still has free after some passes was never needed: it is given away. The ring
comes first: where layers stay and the CPU attends, the link otherwise stops in each pass (`prefetch_distance`). Then
come rows whose keys and values would be in host memory.
"""

from collections.abc import Collection

import torch

MIN_PASSES = 12  # passes after which the memory that they need has been seen: some of them had prompts
FREE_SHARE = 0.04  # share of the device's memory that stays free: gaps between tensors grow for a while


class MemoryHeadroom:
    """Room beyond a plan's: `positions` of it have been given to rows of the load that runs, and the ring has at least
    `ring_depth` buffers."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.begin()

    def begin(self) -> None:
        """Begin with another load: no room has been seen."""
        self.positions = self.ring_depth = self._passes = 0
        self._short = False

    def note_pass(self) -> None:
        """Count a pass that had enough memory."""
        self._passes += 1

    def note_shortage(self) -> None:
        """Take the spare memory back from the ring and new rows: memory fell short."""
        self.positions = self.ring_depth = 0
        self._short = True

    @property
    def measured(self) -> bool:
        """Tell whether passes have shown their need, and left this memory free."""
        return not self._short and self._passes >= MIN_PASSES

    def deepen(self, depth: int, wanted: int, buffer_bytes: int) -> int:
        """Return how many buffers a ring of `depth` has from now on: up to `wanted`, as far as there is room."""
        room = max(0, self.unused_bytes()) // buffer_bytes
        self.ring_depth = max(depth, min(wanted, depth + room))
        return self.ring_depth

    def rows(self, max_rows: int, row_bytes: int, promised: int) -> int:
        """Return how many rows of `row_bytes` each have room; others will still take `promised` bytes."""
        if not self.measured or not row_bytes:
            return 0
        return max(0, min(max_rows, (self.unused_bytes() - promised) // row_bytes))

    def unused_bytes(self) -> int:
        """Return the device bytes that no pass has needed, less a margin; 0 without a GPU."""
        if self._device.type != "cuda":
            return 0
        free, total = torch.cuda.mem_get_info(self._device)
        return free - int(FREE_SHARE * total)


def prefetch_distance(streamed: Collection[int], count: int) -> float:
    """Return the ring's size in layers, 1 to 2. It keeps the link busy. Of `count` layers those `streamed` come over
    it. A pass takes the link's time if a layer's computation takes no more than its share of it:
    `len(streamed) / count` of the time in which the link brings a layer. The link fills the ring while one streamed
    layer computes and the resident layers behind it."""
    if not 0 < len(streamed) < count:
        return 1.0
    places = sorted(streamed)
    gaps = [after - before for before, after in zip(places, [*places[1:], places[0] + count], strict=True)]
    return min(2.0, max(1.0, max(gaps) * len(places) / count))
