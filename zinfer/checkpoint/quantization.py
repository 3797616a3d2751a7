"""Quantisation schemes: the settings that zinfer reads from a checkpoint, and its own.

`zinfer.checkpoint.quantized_tensors` finds the stored tensors. Sources: the quantisers of transformers (fp8, mxfp4,
gptq, awq), the formats of the library compressed-tensors, and the checkpoints that NVIDIA's ModelOpt exports.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args

from zinfer.checkpoint.headers import DTYPE_NAMES, QUANTIZATION
from zinfer.core.model import ModelError, text_config

Scheme = Literal["int4", "int8", "fp8"]  # ways in which zinfer itself quantises
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)

METHODS = ("fp8", "mxfp4", "compressed-tensors", "gptq", "awq", "modelopt")
# Algorithms of ModelOpt whose weights are found by their tensors.
MODELOPT = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "MXFP8", "NVFP4", "W4A16_NVFP4", "MIXED_PRECISION")
# Formats of compressed-tensors whose weights are found by their tensors.
COMPRESSED = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "dense", "mixed-precision",
)  # fmt: skip
FP8 = "F8_E4M3"  # codes that `stream` codes losslessly
GROUP_SIZES = (128, 64, 32, 16)  # values that may share a scale where the wanted number of them does not divide a row
STORED_DTYPES = {dtype: stored for stored, dtype in DTYPE_NAMES.items()}


def settings_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the quantisation settings in `config`, if it has some. Raises ModelError for those not read."""
    parts = (config, text_config(config))
    settings = next((part[key] for part in parts for key in QUANTIZATION if part.get(key)), None)
    if settings is None:
        return None
    if not isinstance(settings, Mapping):
        raise ModelError("its quantization_config is no object")
    for fault in _faults(settings):
        raise ModelError(fault)
    return settings


def _faults(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield why zinfer does not read weights of these settings."""
    method, algorithm, bits, version = (
        str(settings.get(key))[:60] for key in ("quant_method", "quant_algo", "bits", "version")
    )
    if method not in METHODS:
        yield (
            f"its weights are quantised by {method!r}; zinfer reads {', '.join(METHODS)}, and unquantised "
            "checkpoints: take such a version of the model"
        )
    for key, value in settings.items():
        given = value.get("config_groups", value) if isinstance(value, Mapping) else value
        if given and re.search("transform|rotat|hadamard|spin_?quant|quip", key, re.IGNORECASE):
            yield (
                f"its weights are rotated or otherwise transformed ({key[:60]} in quantization_config, as of QuIP and "
                "SpinQuant), which zinfer does not undo: take another version of the model"
            )
    if method == "compressed-tensors":
        for name in (settings.get("format"), *(group.get("format") for group in groups_of(settings))):
            if name not in (None, *COMPRESSED):
                yield f"its weights are in the format {str(name)[:60]!r}; zinfer reads {', '.join(COMPRESSED)}"
        sparse = settings.get("sparsity_config")
        if isinstance(sparse, Mapping) and sparse.get("format", "dense") != "dense":
            yield f"its weights are sparse ({str(sparse['format'])[:60]!r}), which zinfer does not read"
    if method == "modelopt" and algorithm.upper() not in MODELOPT:
        yield f"its weights are quantised by {algorithm!r} of ModelOpt; zinfer reads {', '.join(MODELOPT)}"
    if method in ("gptq", "awq") and settings.get("bits") not in (4, 8):
        yield f"its weights have {bits!r} bits by {method}: zinfer reads 4 and 8"
    if method == "awq" and settings.get("version", "gemm") != "gemm":
        yield f"its weights are in AWQ's order {version!r}: zinfer reads 'gemm'"


def groups_of(settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the groups of compressed-tensors that quantise weights."""
    groups = settings.get("config_groups")
    members = groups.values() if isinstance(groups, Mapping) else ()
    return [group for group in members if isinstance(group, Mapping) and isinstance(group.get("weights"), Mapping)]


def scheme(weights: Scheme, group_size: int | None = None) -> dict[str, Any]:
    """Return zinfer's own quantization_config: int4 in groups of `group_size`, int8 and fp8 a scale a row."""
    bits, kind, layout, strategy = {
        "int4": (4, "int", "pack-quantized", "group"),
        "int8": (8, "int", "int-quantized", "channel"),
        "fp8": (8, "float", "float-quantized", "channel"),
    }[weights]
    arguments: dict[str, Any] = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True}
    if strategy == "group":
        arguments["group_size"] = group_size or GROUP_SIZES[0]
    group = {"targets": ["Linear"], "format": layout, "weights": arguments, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*router"],
        "config_groups": {"group_0": group},
    }


def group_size(columns: int, wanted: int = GROUP_SIZES[0]) -> int:
    """Return how many values of a row share a scale."""
    return next((size for size in (wanted, *GROUP_SIZES) if size <= wanted and columns % size == 0), 0)
