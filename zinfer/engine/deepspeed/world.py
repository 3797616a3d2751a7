"""What DeepSpeed wants of the process it runs in, and how weights that come one at a time become its own."""

import logging
import os
import sys
from contextlib import ExitStack, redirect_stdout, suppress
from copy import deepcopy
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from zinfer.engine import EngineError


class World:
    """Process state that DeepSpeed needs: a process group of one and a launcher's environment, until `close`.

    Engines that are open at once share it: the first sets it up, the last one to close restores what was there. Where
    setting it up fails, what had been changed until then is restored at once.
    """

    _open: ClassVar[list["World"]] = []
    _shared: ClassVar[ExitStack] = ExitStack()  # what the last to close takes back

    def __init__(self, device: torch.device) -> None:
        if not self._open:
            with ExitStack() as undo:
                _prepare(device, undo)
                World._shared = undo.pop_all()
        self._open.append(self)

    def close(self) -> None:
        """Leave; the last one takes everything back. Safe to call twice."""
        if self in self._open:
            self._open.remove(self)
            if not self._open:
                self._shared.close()


def _prepare(device: torch.device, undo: ExitStack) -> None:
    """Set up DeepSpeed in this process; `undo` gets a callback for each thing that was changed."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"  # it builds its ops with ninja
    wanted = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "DS_ACCELERATOR": device.type, "PATH": path}
    undo.callback(_restore, {name: os.environ.get(name) for name in wanted})
    os.environ.update(wanted)
    with redirect_stdout(sys.stderr):
        import deepspeed

        if device.type == "cpu":  # all-reduce through shared memory: a minute to compile, and nobody to reduce with
            vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False
        backend = "nccl" if device.type == "cuda" else "gloo"
        if not dist.is_initialized():
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
            undo.callback(_leave_group)
        deepspeed.init_distributed(backend, auto_mpi_discovery=False)
    for handler in logging.getLogger("DeepSpeed").handlers:  # where another package imported it before
        if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stdout:
            handler.setStream(sys.stderr)


def _restore(environment: dict[str, str | None]) -> None:
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _leave_group() -> None:
    """Destroy the process group, and DeepSpeed's references to it where it has taken notice of it."""
    if not dist.is_initialized():
        return
    import deepspeed

    if deepspeed.comm.is_initialized():
        deepspeed.comm.destroy_process_group()
    else:
        dist.destroy_process_group()


def modules_under_way() -> list[nn.Module]:
    """DeepSpeed's own list of the modules whose forward pass is under way, in all engines of the process; each engine's
    whole model is on it from its start. Empty where DeepSpeed has not got that far."""
    with suppress(ImportError, AttributeError):
        from deepspeed.runtime.zero import parameter_offload

        stack: list[nn.Module] = parameter_offload.FWD_MODULE_STACK
        return stack
    return []


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


def check_dtype(dtype: str) -> None:
    """Raise EngineError unless DeepSpeed says that it computes in `dtype` (float16, bfloat16, float32) here.

    Which types a CPU computes in depends on its model: its accelerator object is asked, before anything is loaded.
    """
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    supported = [str(each).removeprefix("torch.") for each in accelerator.supported_dtypes()]
    if dtype not in supported:
        name = accelerator.device_name()
        raise EngineError(f"DeepSpeed does not compute in {dtype} on this {name}; --dtype {' or '.join(supported)}")
