"""Hugging Face Accelerate: hooks that fetch a module's weights before it runs and drop them after it.

A fetch is a blocking copy, one weight at a time, on the stream that computes, and ends with freeing the device's cached
memory (`set_module_tensor_to_device`). Nothing overlaps: a step takes copies, allocations and compute together.
Page-locked memory, which a user can add, is worth a factor of six on PCIe; Accelerate pins nothing by itself.
Weights outside the decoder layers, and those that several layers share, stay on the device, as a user's device map
would have it, and with `--gpu-weights` the first layers, as in the map that `device_map="auto"` makes for a limit of
memory (`max_memory`): each weight lies in one place, on the device or off it.

With `--weights int8` or `int4` the linear modules of the layers have torchao's weight-only formats: tensors that hold
codes and scales, which Accelerate moves as they are and torchao multiplies with.

Source: torchao 0.18, `quantization/quant_api.py` and `utils.py` (`TorchAOBaseTensor`); Accelerate 1.15,
`utils/modeling.py` (`set_module_tensor_to_device`).
"""

import dis
import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from accelerate.hooks import attach_align_device_hook_on_blocks
from accelerate.utils import OffloadedWeightsLoader, offload_weight, save_offload_index
from torch import Tensor, nn

from zinfer.checkpoint.resolve import as_released
from zinfer.core.engine import AccelerateOptions
from zinfer.core.model import Weights
from zinfer.engine import EngineError
from zinfer.engine.base import Work, is_step
from zinfer.engine.decoder import Decoder, offload_folder
from zinfer.engine.pinned import PinnedArena, lay_out
from zinfer.engine.state import ModelState
from zinfer.record.measurement import Effective
from zinfer.system.scratch import Scratch

GROUP = 128  # weights that share a scale and a zero point in torchao's int4, its default
LINEAR = 0.9  # part of the layers' weights that must be in linear modules for a format to be worth its name


class Accelerate(Decoder):
    """Engine `accelerate`: the model whole on the device (`none`), or its layers but those that stay in host memory
    (`cpu`) or in files (`nvme`).

    Files are read through the page cache, as Accelerate does it: files that fit into free host memory are read from
    there.
    """

    options: AccelerateOptions
    _arena: PinnedArena | None = None
    _folder: Scratch | None = None
    _offloaded: "_Weights | None" = None
    _streamed_per_step = 0
    _stay: int | None = None  # layers that stay on the device; None without offload
    _format = ""  # torchao's name of the tensors that hold codes

    @property
    def loaded_bytes(self) -> int:
        return as_released(self.plan.model).stored_bytes  # torchao rounds what was loaded

    def _load(self) -> None:
        case = self.plan.case
        state = ModelState(as_released(self.plan.model), case.load_format, allow_nan=case.allow_nan)
        self.model = state.model
        quantised = self._quantised(state)
        away = set(range(len(state.layers)))
        if case.offload == "none":
            away.clear()
        else:
            away.difference_update(self.plan.placement.resident_layers)
            self._stay = len(state.layers) - len(away)
        streamed = {
            name: quantised.get(name, entry.tensor)
            for name, entry in state.entries.items()
            if entry.layer in away and entry.is_parameter
        }
        host: dict[str, Tensor] = {}
        index: dict[str, dict[str, Any]] = {}
        if case.offload == "cpu":
            blocks, size = lay_out(part for name, tensor in streamed.items() for part in _parts(name, tensor).items())
            pin = self.options.pin_memory and self.device.type == "cuda"
            self._arena = PinnedArena(size, pin, self.progress)
            views = self._arena.views(blocks)
            host = {name: _assembled(name, tensor, views) for name, tensor in streamed.items()}
        elif case.offload == "nvme":
            self._folder = offload_folder(self.plan.nvme_path)
        resident: dict[str, Tensor] = {}
        for name, tensor in state.load(self.device, self.progress):
            if name in quantised:
                tensor = quantise(tensor.to(self.device), case.weights)
            if name in host:
                host[name].copy_(tensor)
            elif name in streamed and self._folder is not None:
                offload_weight(tensor, name, self._folder.name, index)
            else:
                resident[name] = tensor.to(self.device, copy=True)
        for name, tensor in (quantised | resident).items():
            state.entries[name].put(tensor)
        if streamed:
            if self._folder is not None:
                save_offload_index(index, self._folder.name)
            inside = f"{state.stack}."
            shared = {
                name: module.get_parameter(leaf)
                for entry in state.entries.values() if entry.layer is None and entry.is_parameter
                for name, (module, leaf) in zip(entry.names, entry.places, strict=True) if name.startswith(inside)
            }  # fmt: skip
            self._offloaded = _Weights(host, self._folder.name if self._folder else None, shared)
            self._attach({f"{state.stack}.{number}": number in away for number in range(len(state.layers))})
        for name in quantised.keys() & streamed.keys():
            for module, _ in state.entries[name].places:
                _move_outside_inference_mode(module)
        self._ready(state.layers[0])

    def _quantised(self, state: ModelState) -> dict[str, Tensor]:
        """Return the weights that torchao quantises, by name: tensors in its format on the meta device.

        Raises EngineError where the format does not suit the model.
        """
        spec, weights = self.plan.model, self.plan.case.weights
        if weights == "as-released":
            return {}
        if weights == "int4" and spec.dtype != "bfloat16":
            raise EngineError(f"torchao's int4 weights are for bfloat16, not for {spec.dtype}: --dtype bfloat16")
        inside = {name: one for name, one in state.entries.items() if one.layer is not None and one.is_parameter}
        linear = {
            name: entry.tensor
            for name, entry in inside.items()
            if entry.places[0][1] == "weight" and all(type(module) is nn.Linear for module, _ in entry.places)
        }
        share = sum(map(Tensor.numel, linear.values())) / sum(entry.tensor.numel() for entry in inside.values())
        if share < LINEAR:
            raise EngineError(
                f"torchao quantises linear modules, which hold {share:.0%} of the layers of {spec.name}: leave "
                "--weights out"
            )
        made: dict[torch.Size, Tensor] = {}
        for name, tensor in linear.items():
            if weights == "int4" and tensor.shape[1] % GROUP:
                raise EngineError(f"torchao's int4 weights are groups of {GROUP}: {name} has {tensor.shape[1]} inputs")
            if tensor.shape not in made:
                made[tensor.shape] = quantise(torch.zeros_like(tensor, device=self.device), weights).to("meta")
        self._format = type(next(iter(made.values()))).__name__
        return {name: made[tensor.shape] for name, tensor in linear.items()}

    def _attach(self, layers: Mapping[str, bool]) -> None:
        """Set Accelerate's own hooks on `layers`, as `dispatch_model` sets them for a device map that offloads those
        with True."""
        attach_align_device_hook_on_blocks(
            self.model,
            execution_device=dict.fromkeys(["", *layers], self.device),
            offload=dict(layers),
            weights_map=self._offloaded,
            skip_keys=list(self.model._skip_keys_device_placement or ["past_key_values"]),
            preload_module_classes=sorted({type(one).__name__ for one in self.model.modules() if _reaches_into(one)}),
        )

    def forward(self, works: Sequence[Work]) -> list[Tensor]:
        before, step = self._offloaded.bytes_read if self._offloaded is not None else 0, is_step(works)
        logits = super().forward(works)
        if self._offloaded is not None and step:
            self._streamed_per_step = self._offloaded.bytes_read - before
        return logits

    def effective(self) -> Effective:
        parameters = dict(self.model.named_parameters())
        kept = {id(parameter): parameter for parameter in parameters.values() if not parameter.is_meta}
        if self._offloaded is not None:  # hooks take the weights that layers share away, too
            kept |= {id(parameter): parameter for parameter in self._offloaded.shared.values()}
            parameters = {name: one for name, one in parameters.items() if name not in self._offloaded.shared}
        away = {name: _bytes(parameter) for name, parameter in parameters.items() if parameter.is_meta}
        on_disk = {name for name in away if self._offloaded is not None and name in self._offloaded.index}
        pinned = self._arena is not None and self._arena.pinned
        return Effective(
            gpu_weight_bytes=sum(_bytes(parameter) for parameter in kept.values()),
            host_weight_bytes=sum(size for name, size in away.items() if name not in on_disk),
            nvme_weight_bytes=sum(away[name] for name in on_disk),
            streamed_bytes_per_step=self._streamed_per_step,
            pinned_bytes=self._arena.size if self._arena is not None and pinned else 0,
            settings={
                "pin_memory": pinned,
                "attention": self.model.config._attn_implementation,
                **({} if self._stay is None else {"resident_layers": self._stay}),
                **({"torchao": self._format} if self._format else {}),
            },
        )

    def close(self) -> None:
        super().close()
        self._offloaded = None
        if self._arena is not None:
            self._arena.close()
            self._arena = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _reaches_into(module: nn.Module) -> bool:
    """Tell whether the code of a module reads weights of its children, whose own hooks then do not fetch them."""
    children = dict(module.named_children())
    for kind in type(module).__mro__[: type(module).__mro__.index(nn.Module)]:
        for method in filter(inspect.isfunction, map(inspect.unwrap, vars(kind).values())):
            names = [one.argval for one in dis.get_instructions(method) if one.opname == "LOAD_ATTR"]
            if any(child in children and name in children[child]._parameters for child, name in pairwise(names)):
                return True
    return False


class _Weights(OffloadedWeightsLoader):  # type: ignore[misc]
    """Accelerate's map from names to offloaded weights, in memory or in files, with a count of the bytes read from it.

    Weights that layers share are in `shared`, by all their names, and stay on the device.
    """

    def __init__(self, host: dict[str, Tensor], folder: str | None, shared: Mapping[str, Tensor]) -> None:
        super().__init__(state_dict=host, save_folder=folder)
        self.bytes_read, self.shared = 0, shared

    def __getitem__(self, key: str) -> Tensor:
        if key in self.shared:
            return self.shared[key]
        tensor: Tensor = super().__getitem__(key)
        self.bytes_read += _bytes(tensor)
        return tensor


def quantise(matrix: Tensor, weights: Weights) -> Tensor:
    """Return `matrix` ``[out, in]`` in torchao's weight-only format `weights`, int8 or int4, on the same device.

    torchao has two layouts of int4, for the kernels of CPUs and of GPUs.
    """
    from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

    if weights == "int8":
        config = Int8WeightOnlyConfig(set_inductor_config=False)
    elif matrix.device.type == "cuda":
        layout = "tile_packed_to_4d"
        config = Int4WeightOnlyConfig(group_size=GROUP, int4_packing_format=layout, set_inductor_config=False)
    else:
        from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

        config = PrototypeInt4WeightOnlyConfig(group_size=GROUP, set_inductor_config=False)
    module = nn.Linear(1, 1, bias=False, device="meta")
    module.weight = nn.Parameter(matrix, requires_grad=False)
    quantize_(module, config)
    return module.weight.data


def _move_outside_inference_mode(module: Any) -> None:
    """Let the hook that moves the weights of `module` do so outside inference mode, in which torchao's tensors have no
    `to` (`transformers` itself generates without that mode)."""
    hook = module._hf_hook
    hook.pre_forward, hook.post_forward = _outside(hook.pre_forward), _outside(hook.post_forward)


def _outside(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return call


def _parts(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Return the plain tensors that `tensor` consists of, by names that begin with `name`."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return {name: tensor}
    return {f"{name}.{part}": getattr(tensor, part) for part in tensor.__tensor_flatten__()[0]}


def _assembled(name: str, tensor: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
    """Return a tensor like `tensor` that consists of `parts`, which have the names that `_parts` gives."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return parts[name]
    names, attributes = tensor.__tensor_flatten__()
    found: Tensor = type(tensor).__tensor_unflatten__(  # type: ignore[attr-defined]
        {part: parts[f"{name}.{part}"] for part in names}, attributes, tensor.shape, tensor.stride()
    )
    return found


def _bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor, of its codes and scales if it is quantised."""
    return sum(part.nbytes for part in _parts("", tensor).values())
