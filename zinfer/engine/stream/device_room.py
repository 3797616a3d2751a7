"""Room on the device for keys and values of more rows than a plan puts there: in memory that no pass has needed.

A plan leaves a margin for what it does not see, moments of a pass and gaps between tensors. Where requests come and go,
passes show how much that is. PyTorch keeps all memory that it ever needed, so what the device still has free was never
needed: after some passes it is given to rows whose keys and values would be in host memory.
"""

import torch

SEASONED = 12  # passes after which the memory that they need has been seen: some of them had prompts
LEFT_SHARE = 0.04  # share of the device's memory that stays free: gaps between tensors grow for a while


class DeviceRoom:
    """Room beyond a plan's: `positions` of it have been given to rows of the load that runs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.positions = 0
        self._passes = 0
        self._short = False

    def begin(self) -> None:
        """Begin with another load: no room has been seen."""
        self.positions, self._passes, self._short = 0, 0, False

    def saw_pass(self) -> None:
        """Count a pass that had enough memory."""
        self._passes += 1

    def saw_shortage(self) -> None:
        """Give no more room to this load, and take back what new rows would get: memory fell short."""
        self.positions, self._short = 0, True

    def rows(self, most: int, row_bytes: int, promised: int) -> int:
        """Return how many rows, `most` at most, of `row_bytes` each have room; `promised` bytes are still to be taken
        by others."""
        if self._short or self._passes < SEASONED or not row_bytes:
            return 0
        return max(0, min(most, (self.unused_bytes() - promised) // row_bytes))

    def unused_bytes(self) -> int:
        """Return the bytes of the device that no pass has needed, less those that stay free; 0 without a GPU."""
        if self._device.type != "cuda":
            return 0
        free, total = torch.cuda.mem_get_info(self._device)
        return free - int(LEFT_SHARE * total)
