"""GPU memory of this process: all, or as much as `--gpu-memory` allows.

PyTorch's allocator holds the limit, and so is the only place that knows it. What it does not allocate, as the CUDA
context, is taken for `ALLOWANCES.context_bytes`; so is memory that TensorRT allocates for itself not limited.
"""

import torch

from zinfer.core.machine import Machine
from zinfer.plan.bytes import ALLOWANCES


def limit(machine: Machine) -> None:
    """Hold this process to the GPU memory of a limited `machine` (`Machine.limited`)."""
    if "gpu_bytes" in machine.overridden:
        total = torch.cuda.mem_get_info()[1]
        share = max(0, machine.gpu_bytes - ALLOWANCES.context_bytes) / total
        torch.cuda.set_per_process_memory_fraction(min(1.0, share))


def free_and_total() -> tuple[int, int]:
    """Return free and all bytes of GPU memory, within the limit."""
    free, total = torch.cuda.mem_get_info()
    share = torch.cuda.get_per_process_memory_fraction()
    if share == 1.0:
        return free, total
    allowed = int(share * total)
    return max(0, min(free, allowed - torch.cuda.memory_reserved())), allowed
