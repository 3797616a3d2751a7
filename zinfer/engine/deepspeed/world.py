"""What DeepSpeed wants of the process it runs in, and how weights that come one at a time become its own."""

import logging
import os
import sys
from contextlib import redirect_stdout, suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zinfer.engine import EngineError


class World:
    """What DeepSpeed wants of a process: a process group, of one, and a launcher's environment, until `close`."""

    def __init__(self, device: torch.device) -> None:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"  # it builds its ops with ninja
        wanted = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "DS_ACCELERATOR": device.type, "PATH": path}
        self._kept = {name: os.environ.get(name) for name in wanted}
        os.environ.update(wanted)
        with redirect_stdout(sys.stderr):
            import deepspeed

            if device.type == "cpu":  # all-reduce through shared memory: a minute to compile, and nobody to reduce with
                vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False
            self._backend = "nccl" if device.type == "cuda" else "gloo"
            self._owner = not dist.is_initialized()
            if self._owner:
                store = dist.HashStore()  # type: ignore[attr-defined]
                dist.init_process_group(self._backend, store=store, rank=0, world_size=1)
            deepspeed.init_distributed(self._backend, auto_mpi_discovery=False)
        for handler in logging.getLogger("DeepSpeed").handlers:  # where another package imported it before
            if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stdout:
                handler.setStream(sys.stderr)

    def close(self) -> None:
        with suppress(ImportError, AttributeError):
            from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK

            FWD_MODULE_STACK.clear()
        if self._owner and dist.is_initialized():
            import deepspeed

            deepspeed.comm.destroy_process_group()
        self._owner = False
        for name, value in self._kept.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._kept = {}


class Partition:
    """`zero.Init` for weights that come one at a time, none of which may be on the device longer than it takes."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self._first: Any = None

    def __call__(self, parameter: nn.Parameter) -> None:
        """Make `parameter` a ZeRO parameter: its data goes where the configuration says."""
        if self._first is not None:
            self._first.convert_to_zero_parameters([parameter])
            return
        import deepspeed

        deepspeed.zero.Init(module=nn.ParameterList([parameter]), config_dict_or_path=deepcopy(self._config))
        self._first = parameter


def check_async_io() -> None:
    """Raise EngineError unless DeepSpeed's asynchronous file I/O can be built here."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible(verbose=False):
        raise EngineError("DeepSpeed's offload nvme needs libaio: apt install libaio-dev, and a C++ compiler")
