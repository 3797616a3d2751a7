"""Transfer of small tensors while weights stream over the same link."""

from collections.abc import Sequence

import torch
from torch import Tensor

from zinfer.engine.triton_check import trouble


def to_host(*tensors: Tensor) -> list[Tensor]:
    """Copy `tensors` to host memory, page-locked if they come from a GPU. That is several times as fast."""
    copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
    if tensors[0].is_cuda:
        torch.cuda.current_stream(tensors[0].device).synchronize()
    return copies


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy `tensor` to `device`, past weights that stream."""
    if device.type != "cuda" or tensor.device.type != "cpu" or trouble() is not None:
        return tensor.to(device)
    from zinfer.engine.zero_copy import zero_copy

    return zero_copy(tensor, device)


def to_device_together(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy `tensors` of one type to `device`, by one transfer if possible."""
    if device.type != "cuda" or not tensors or any(tensor.device.type != "cpu" for tensor in tensors):
        return [to_device(tensor, device) for tensor in tensors]
    flat = to_device(torch.cat([tensor.flatten() for tensor in tensors]), device)
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
