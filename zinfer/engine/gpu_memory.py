"""GPU memory of this process: all, or as much as `--gpu-memory` allows.

PyTorch's allocator holds the limit, and so is the only place that knows it. It does not allocate the CUDA context, for
which plans have an allowance, nor what TensorRT takes for itself, which is not limited.
"""

import torch

from zinfer.plan.planner import Plan


def limit(plan: Plan) -> None:
    """Hold this process to the GPU memory of a limited machine (`Machine.limited`)."""
    if "gpu_bytes" in plan.machine.overridden:
        share = max(0, plan.machine.gpu_bytes - plan.gpu.overhead) / torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, share))


def free_and_total() -> tuple[int, int]:
    """Return free and all bytes of GPU memory, within the limit."""
    free, total = torch.cuda.mem_get_info()
    share = torch.cuda.get_per_process_memory_fraction()
    if share == 1.0:
        return free, total
    allowed = int(share * total)
    return max(0, min(free, allowed - torch.cuda.memory_reserved())), allowed
