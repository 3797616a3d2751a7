"""DeepSpeed's own weights in 4 or 8 bits, in groups of 64.

Its configuration's `post_init_quant` keeps all layers twice for a while; here each weight is quantised as it is loaded,
by DeepSpeed's functions (0.19, `inference/quantization/{layers,utils}.py`), and each linear module dequantises its
weight before it computes. float16 on a GPU is dequantised by an extension that is compiled at first use.
"""

from typing import Any

import torch
from torch import Tensor, nn

from zinfer.engine import EngineError

GROUP = 64  # weights that share a scale and a minimum, as in DeepSpeed's example


def check_dequantizer(dtype: str, device: torch.device) -> None:
    """Raise EngineError if weights of `dtype` cannot be dequantised on `device`."""
    if dtype != "float16" or device.type != "cuda":
        return
    from deepspeed.ops.op_builder import QuantizerBuilder

    if not QuantizerBuilder().is_compatible(verbose=False):
        raise EngineError(
            "DeepSpeed dequantises float16 by an extension that nvcc compiles, and there is none: --dtype bfloat16"
        )


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
