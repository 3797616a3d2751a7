"""Weights, one tensor at a time, for whoever keeps them: random ones made on the device, or a checkpoint's.

A checkpoint's tensors pass through `transformers`' own conversion (names differ between versions, Mixtral's experts are
stored one by one and used fused), a decoder layer at a time. While one layer is used, many threads read the next, so
that a load takes as long as the slower of both; the peak of host memory is two layers.
"""

import inspect
import zlib
from collections import defaultdict
from collections.abc import Generator, Mapping
from contextlib import closing
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging

from zinfer.checkpoint import Checkpoint, CheckpointError
from zinfer.engine.base import Progress, silent
from zinfer.engine.read import Group, groups_mapped, groups_read
from zinfer.model import LAYER_INDEX, ModelSpec
from zinfer.plan import LoadFormat

logging.disable_progress_bar()


def install(model: PreTrainedModel, parameters: Mapping[str, nn.Parameter]) -> None:
    """Put `parameters`, by their names in `named_parameters`, in the place of the model's own; tied ones everywhere."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for module in model.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None and names[id(parameter)] in parameters:
                module._parameters[leaf] = parameters[names[id(parameter)]]


def weights(
    model: PreTrainedModel,
    spec: ModelSpec,
    load_format: LoadFormat,
    device: torch.device,
    progress: Progress = silent,
    mapped: bool = False,
) -> Generator[tuple[str, Tensor]]:
    """Every parameter of `model` (as `empty_model` makes it) once, by its name in `named_parameters`; tied ones once.

    The tensor is a loan until the next one is asked for, and the model has to stay as it is until the last; who stops
    before that closes the generator, which reads ahead. With `mapped`, tensors of a checkpoint may be kept: they are
    views of its files, and read when they are used. Raises CheckpointError when the checkpoint lacks one.
    """
    total = sum(parameter.numel() for parameter in model.parameters())
    done = 0
    source = dummy(model, device) if load_format == "dummy" else from_checkpoint(model, spec, mapped)
    with closing(source) as tensors:
        for name, tensor in tensors:
            yield name, tensor
            done += tensor.numel()
            progress("loading weights", done / total)


def dummy(model: PreTrainedModel, device: torch.device) -> Generator[tuple[str, Tensor]]:
    """Normally distributed weights at the scale of a fresh initialisation, made on `device`.

    Matrices and biases have the configuration's `initializer_range` as standard deviation, norm scales the same around
    one. Seeded by name: every engine and every run gets the same model. Never constants, which compress, and multiply,
    unlike real weights.
    """
    std = getattr(model.config.get_text_config(), "initializer_range", None) or 0.02
    norms = {f"{name}.weight" for name, module in model.named_modules() if "norm" in type(module).__name__.lower()}
    generator = torch.Generator(device)
    for name, parameter in model.named_parameters():
        generator.manual_seed(zlib.crc32(name.encode()))
        tensor = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        yield name, tensor.normal_(1.0 if name in norms else 0.0, std, generator=generator)


def from_checkpoint(model: PreTrainedModel, spec: ModelSpec, mapped: bool = False) -> Generator[tuple[str, Tensor]]:
    """The parameters of `model` out of the safetensors under `spec.directory`, on the CPU, in the model's dtype."""
    if spec.directory is None:
        raise CheckpointError(f"{spec.name} has no local checkpoint; use --load-format dummy or give a folder")
    checkpoint = Checkpoint.open(Path(spec.directory))
    slots = [
        (module, leaf, parameter)
        for module in model.modules()
        for leaf, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
    ]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    missing = set(names.values())
    load_config = LoadStateDictConfig(
        dtype=getattr(torch, spec.dtype),
        device_map={"": torch.device("cpu")},
        weight_mapping=get_model_conversion_mapping(model),
    )
    # transformers < 5.5 has a tensor-parallel plan as a required argument.
    extra = {"tp_plan": None} if "tp_plan" in inspect.signature(convert_and_load_state_dict_in_model).parameters else {}
    groups = _by_layer(checkpoint, spec.num_layers)
    with closing((groups_mapped if mapped else groups_read)(checkpoint, groups)) as contents:
        for content in contents:
            info = convert_and_load_state_dict_in_model(
                model=model, state_dict=content, load_config=load_config, **extra
            )[0]
            trouble = [*info.conversion_errors.values(), *info.mismatched_keys]
            if trouble:
                raise CheckpointError(f"{spec.directory} does not fit a {spec.architecture} model: {trouble[0]}")
            for module, leaf, parameter in slots:
                value = module._parameters[leaf]
                if value is None or value is parameter:
                    continue
                module._parameters[leaf] = parameter
                name = names[id(parameter)]
                if name in missing:  # a tied weight may be stored under both of its names
                    missing.remove(name)
                    yield name, value.data
    if missing:
        raise CheckpointError(f"{spec.directory} lacks {len(missing)} tensors, {min(missing)} among them")


def _by_layer(checkpoint: Checkpoint, num_layers: int) -> list[Group]:
    """Checkpoint names in groups that belong together: what lies outside the layers, then each layer wanted."""
    groups: dict[int, list[str]] = defaultdict(list)
    for name in checkpoint.tensors:
        match = LAYER_INDEX.search(name)
        groups[int(match[1]) if match else -1].append(name)
    return [tuple(groups[index]) for index in sorted(groups) if index < num_layers]
