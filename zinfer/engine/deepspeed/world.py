"""DeepSpeed: process state that it needs, its partitioning, its quantised weights.

DeepSpeed's `post_init_quant` keeps all layers twice for a while; here each weight is quantised as it is loaded, by its
functions (0.19, `inference/quantization/{layers,utils}.py`), and each linear module dequantises its weight first.
"""

import logging
import os
import sys
from contextlib import ExitStack, nullcontext, redirect_stdout
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.cpp_extension import get_default_build_root

from zinfer.core.progress import Progress, note, silent
from zinfer.engine import EngineError
from zinfer.engine.pinned import ALIGNMENT, PinnedArena

if TYPE_CHECKING:
    from zinfer.engine.ranks import Group


def prepare(device: torch.device, undo: ExitStack, progress: Progress = silent, group: "Group | None" = None) -> None:
    """Set up the environment of a launcher, and a process group. The group has this process alone, or the ranks of
    `group`; `undo` restores the old state. Raises EngineError beside another group, which all engines would share."""
    if dist.is_initialized():
        raise EngineError("engine deepspeed is alone in its process: close the other one first")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"  # its ops are built with ninja
    rank, size = (0, 1) if group is None else (group.rank, group.size)
    # Each process sees its own GPU as the first one.
    launcher = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": size, "DS_ACCELERATOR": device.type, "PATH": path}
    undo.enter_context(patch.dict(os.environ, {name: str(value) for name, value in launcher.items()}))
    for lock in Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root()).rglob("lock"):
        note(progress, f"{lock}: another process compiles this operator of DeepSpeed; if none does, delete the file")
    with redirect_stdout(sys.stderr):
        import deepspeed

        if device.type == "cpu":  # all-reduce over shared memory takes a minute to compile, and is not used
            vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False
        backend = "nccl" if device.type == "cuda" else "gloo"
        undo.callback(_leave_group)
        _count_anew()
        if group is not None:
            group.join()
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        deepspeed.init_distributed(backend, auto_mpi_discovery=False)
    for handler in logging.getLogger("DeepSpeed").handlers:  # made before, if another package imported DeepSpeed
        if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stdout:
            handler.setStream(sys.stderr)


def _count_anew() -> None:
    """Number parameters and modules from 0 again, alike in all ranks."""
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.partition_parameters import Init

    Init.param_id, Init.apply_param_persistence = 0, False
    for default in DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__ or ():
        default[0] = 0  # a list, in which it counts


def _leave_group() -> None:
    """Destroy the process group, and DeepSpeed's references to it."""
    import deepspeed

    if deepspeed.comm.is_initialized():
        deepspeed.comm.destroy_process_group()
    elif dist.is_initialized():
        dist.destroy_process_group()


def modules_under_way() -> list[nn.Module]:
    """Return DeepSpeed's list of running modules, of all engines."""
    from deepspeed.runtime.zero import parameter_offload

    stack: list[nn.Module] = parameter_offload.FWD_MODULE_STACK
    return stack


class Partition:
    """Partitioning of single weights by `zero.Init`, to spare device memory."""

    def __init__(self, config: dict[str, Any], arena: PinnedArena | None = None) -> None:
        self._config, self._arena = config, arena
        self._first: Any = None

    def __call__(self, parameter: nn.Parameter) -> None:
        """Make `parameter` a ZeRO parameter, whose data moves. Raises MemoryError where the arena has no room."""
        import deepspeed
        from deepspeed.accelerator import get_accelerator

        pinned = patch.object(get_accelerator(), "pin_memory", self._pinned)
        with nullcontext() if self._arena is None else pinned:
            if self._first is not None:
                self._first.convert_to_zero_parameters([parameter])
                return
            deepspeed.zero.Init(module=nn.ParameterList([parameter]), config_dict_or_path=deepcopy(self._config))
            self._first = parameter

    def _pinned(self, tensor: Tensor, *_: object, **__: object) -> Tensor:
        assert self._arena is not None
        memory = self._arena.allocate(-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT)
        return memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def check(dtype: str, offload: str, bits: int | None, device: torch.device) -> None:
    """Raise EngineError unless DeepSpeed can run this here. Which of float16, bfloat16 and float32 a CPU computes in
    depends on its model; `offload` nvme, and float16 weights of 4 or 8 `bits` on a GPU, need compiled extensions."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops.op_builder import AsyncIOBuilder, QuantizerBuilder

    accelerator = get_accelerator()
    supported = [str(kind).removeprefix("torch.") for kind in accelerator.supported_dtypes()]
    if dtype not in supported:
        name = accelerator.device_name()
        raise EngineError(f"DeepSpeed does not compute in {dtype} on this {name}; --dtype {' or '.join(supported)}")
    if offload == "nvme" and not AsyncIOBuilder().is_compatible(verbose=False):
        raise EngineError("engine deepspeed needs libaio and a C++ compiler for --offload nvme: apt install libaio-dev")
    compiled = bits is not None and dtype == "float16" and device.type == "cuda"
    if compiled and not QuantizerBuilder().is_compatible(verbose=False):
        raise EngineError(
            "DeepSpeed dequantises float16 by an extension that nvcc compiles, and there is none: --dtype bfloat16"
        )


GROUP = 64  # weights that share a scale and a minimum, as in DeepSpeed's example


def quantise(parameter: nn.Parameter, bits: int) -> None:
    """Replace a matrix by codes, scales and minima in one tensor ``[n]``."""
    from deepspeed.inference.quantization import utils

    config = {"num_bits": bits, "group_size": GROUP, "group_dim": 1, "symmetric": False}
    utils._quantize_param(parameter, config)


def quantised_linear(module: Any, inputs: Tensor) -> Tensor:
    """Compute a linear module whose weight `quantise` has changed."""
    weight = module.weight
    codes, scale, minimum = weight.deconcat(weight)
    matrix = weight.dequantizer.dequantize(codes.view(torch.uint8), scale, minimum)
    return nn.functional.linear(inputs, matrix, module.bias)
