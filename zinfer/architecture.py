"""The model of a configuration, built by `transformers` without memory for its weights."""

from copy import deepcopy

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from zinfer.model import ModelError, ModelSpec


def model_config(spec: ModelSpec) -> PreTrainedConfig:
    """The `transformers` configuration of `spec`. Raises ModelError where transformers knows no such architecture."""
    # A copy: transformers writes into nested settings (rotary scaling) that it is given.
    settings = deepcopy(spec.config)
    for key in ("model_type", "dtype", "torch_dtype"):
        settings.pop(key, None)
    try:
        return AutoConfig.for_model(spec.architecture, **settings)
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{spec.name}: transformers cannot build a {spec.architecture!r} model: {error}") from None


def empty_model(spec: ModelSpec) -> PreTrainedModel:
    """The model of `spec` with its parameters on the meta device and its buffers (rotary tables and the like) real, on
    the CPU. Raises ModelError where transformers cannot build it as a causal language model."""
    config = model_config(spec)
    try:
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, spec.dtype), trust_remote_code=False)
    except (ValueError, KeyError) as error:
        raise ModelError(f"{spec.name}: transformers cannot build it for text generation: {error}") from None
    model.tie_weights()
    return model.requires_grad_(False).eval()


def decoder_layers(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """The name and the list of the decoder layers: the model's largest list of `num_hidden_layers` blocks.

    Raises ModelError where there is none (the model is not a stack of decoder layers).
    """
    depth = model.config.get_text_config().num_hidden_layers
    stacks = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == depth
    ]
    if not stacks:
        raise ModelError(f"{type(model).__name__} is not a stack of {depth} decoder layers: it cannot be streamed")
    return max(stacks, key=lambda stack: sum(parameter.numel() for parameter in stack[1].parameters()))
