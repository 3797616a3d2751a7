"""Transfer of small tensors between host memory and the device, beside weights that stream over the same link."""

from collections.abc import Sequence

import torch
from torch import Tensor

from zinfer.engine.triton_check import trouble


def fetched(*tensors: Tensor) -> list[Tensor]:
    """Return copies of `tensors` in host memory, page-locked (several times as fast) if they come from a GPU."""
    found = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
    if tensors[0].is_cuda:
        torch.cuda.current_stream(tensors[0].device).synchronize()
    return found


def landed(tensor: Tensor, home: torch.device) -> Tensor:
    """Return the tensor `tensor` on the device `home`; one from host memory does not wait there for weights that were
    to come before it."""
    if home.type != "cuda" or tensor.device.type != "cpu" or trouble() is not None:
        return tensor.to(home)
    from zinfer.engine.zero_copy import lift

    return lift(tensor, home)


def landed_together(tensors: Sequence[Tensor], home: torch.device) -> list[Tensor]:
    """Return `tensors`, of one type, on the device `home`: by one transfer, if all come from host memory."""
    if home.type != "cuda" or not tensors or any(one.device.type != "cpu" for one in tensors):
        return [landed(one, home) for one in tensors]
    flat = landed(torch.cat([one.flatten() for one in tensors]), home)
    parts = flat.split([one.numel() for one in tensors])
    return [part.view(one.shape) for part, one in zip(parts, tensors, strict=True)]
