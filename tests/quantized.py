"""Quantised checkpoints, made in the way of each format's own library. From unquantised ones."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]
BLOCK = 32


def rewrite(directory: Path, config: dict[str, Any], change: Callable[[str, Tensor], Tensors | None]) -> Path:
    """Replace the decoder layers' matrices by what `change` makes of them. None keeps a matrix. Write one file, and put
    `config` into config.json as its quantization_config."""
    tensors: Tensors = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(file)
        file.unlink()
    (directory / "model.safetensors.index.json").unlink(missing_ok=True)
    changed: Tensors = {}
    for name, tensor in tensors.items():
        matrices = ("_proj.weight", "w1.weight", "w2.weight", "w3.weight", "_proj")
        inside = ".layers." in name and tensor.dim() > 1 and name.endswith(matrices)
        changed |= (change(name, tensor) if inside else None) or {name: tensor.to(torch.bfloat16)}
    save_file({name: tensor.contiguous() for name, tensor in changed.items()}, directory / "model.safetensors")
    return edit_config(directory, lambda old: old.update(dtype="bfloat16", quantization_config=config))


def edit_config(directory: Path, change: Callable[[dict[str, Any]], object], name: str = "config.json") -> Path:
    """Change a JSON file of a checkpoint."""
    content = json.loads((directory / name).read_text())
    change(content)
    (directory / name).write_text(json.dumps(content))
    return directory


def fp8(directory: Path, block: tuple[int, int] | None = (BLOCK, BLOCK), fp4_experts: bool = False) -> Path:
    """FP8 with a scale for each block or tensor. As DeepSeek-V3 is released; V4 with experts in FP4."""
    dice = torch.Generator().manual_seed(4)

    def scale_of(name: str) -> str:
        return f"{name.removesuffix('weight')}scale" if fp4_experts else f"{name}_scale_inv"

    def change(name: str, tensor: Tensor) -> Tensors:
        if fp4_experts and ".experts." in name:
            pairs, groups = (len(tensor), tensor.shape[1] // 2), (len(tensor), tensor.shape[1] // 32)
            codes = torch.randint(0, 256, pairs, generator=dice, dtype=torch.uint8)
            exponents = torch.randint(118, 124, groups, generator=dice, dtype=torch.uint8)
            return {name: codes.view(torch.int8), scale_of(name): exponents.view(torch.float8_e8m0fnu)}
        rows, columns = block or tensor.shape
        parts = tensor.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))  # [R, rows, C, columns]
        scales = parts.abs().amax(dim=(1, 3)) / 448
        codes = (parts / scales[:, None, :, None]).to(torch.float8_e4m3fn).reshape(tensor.shape)
        return {name: codes, scale_of(name): scales if block else scales.reshape(1)}

    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": ["lm_head"]}
    sizes = {"weight_block_size": block, "expert_dtype": "fp4" if fp4_experts else "fp8"}
    return rewrite(directory, config | sizes, change)


GROUPS: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16}
COMPRESSED: dict[str, tuple[str, dict[str, Any]]] = {  # format and weights' arguments of compressed-tensors
    "int4 groups": ("pack-quantized", GROUPS),
    "int4 asymmetric": ("pack-quantized", GROUPS | {"symmetric": False}),
    "int8 channels": ("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
    "int8 plain": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
    "fp8 channels": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "fp8 tensors": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "nvfp4": ("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}),
    "mxfp4": ("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}),
}


def compressed(directory: Path, kind: str) -> Path:
    """A format of compressed-tensors, compressed by the library itself."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    form, arguments = COMPRESSED[kind]
    arguments = {"symmetric": True, **arguments}
    if coded := {"mxfp4": "torch.uint8", "nvfp4": "torch.float8_e4m3fn"}.get(kind):
        arguments |= {"scale_dtype": coded, "zp_dtype": coded}
    given = QuantizationArgs(**arguments)
    scheme = QuantizationScheme(targets=["Linear"], weights=given)
    library = BaseCompressor.get_value_from_registry(form)

    def change(name: str, tensor: Tensor) -> Tensors:
        tensor = tensor.to(torch.bfloat16)
        size = {"channel": tensor.shape[1], "tensor": tensor.numel()}.get(arguments["strategy"], given.group_size)
        parts = tensor.reshape(-1, size)
        shape = {"channel": (-1, 1), "tensor": (1,)}.get(arguments["strategy"], (tensor.shape[0], -1))
        low, high = parts.amin(-1), parts.amax(-1)
        whole = None
        if kind == "nvfp4":
            whole = (448 * 6 / tensor.abs().max()).to(torch.float32).reshape(1)
        scales, zeros = calculate_qparams(low, high, given, global_scale=whole)
        state = {"weight": tensor, "weight_scale": scales.reshape(shape)}
        if kind == "mxfp4":
            state["weight_scale"] = (high.abs().maximum(low.abs()).float() / 6).log2().ceil().exp2().reshape(shape)
        if whole is not None:
            state["weight_global_scale"] = whole
        if not given.symmetric:
            state["weight_zero_point"] = zeros.reshape(shape).to(torch.int8)
        base = name.removesuffix("weight")
        return {f"{base}{leaf}": part for leaf, part in library.compress(state, scheme).items()}

    groups = {"group_0": {"targets": ["Linear"], "weights": arguments, "input_activations": None}}
    config = {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"], "config_groups": groups}
    return rewrite(directory, config | {"quantization_status": "compressed"}, change)


def _words(codes: Tensor, bits: int) -> Tensor:
    """Pack codes ``[n, m]`` along the rows into int32. The result is ``[n, m * bits / 32]``, the first code in the
    lowest bits."""
    parts = codes.to(torch.int64).unflatten(-1, (-1, 32 // bits))
    packed = (parts << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)


def columns(directory: Path, method: str, bits: int = 4, ordered: bool = False) -> tuple[Path, Tensors]:
    """GPTQ or AWQ; also returns the weights, in the arithmetic of these libraries: (code - zero) * scale in float16."""
    group, expected = 16, Tensors()
    dice = torch.Generator().manual_seed(3)

    def change(name: str, tensor: Tensor) -> Tensors:
        out, inside = tensor.shape
        order = torch.arange(inside) // group
        if ordered:
            order = order[torch.randperm(inside, generator=dice)]
        codes = torch.randint(0, 1 << bits, (inside, out), generator=dice)
        zeros = torch.randint(1, 1 << bits, (inside // group, out), generator=dice)
        largest = 16 / (1 << bits)  # weights of 8 bits are as large as those of 4, or rounding alone changes the tokens
        scales = (largest * (torch.rand(inside // group, out, generator=dice) * 0.02 + 0.001)).to(torch.float16)
        expected[name] = ((codes - zeros[order]).to(torch.float16) * scales[order]).t()
        base = name.removesuffix("weight")
        if method == "gptq":
            return {f"{base}qweight": _words(codes.t(), bits).t(), f"{base}qzeros": _words(zeros - 1, bits),
                    f"{base}scales": scales, f"{base}g_idx": order.to(torch.int32)}  # fmt: skip
        mixed = [0, 2, 4, 6, 1, 3, 5, 7]
        turned = [words.unflatten(-1, (-1, 8))[..., mixed].flatten(-2) for words in (codes, zeros)]
        return {f"{base}qweight": _words(turned[0], 4), f"{base}qzeros": _words(turned[1], 4), f"{base}scales": scales}

    config = {"quant_method": method, "bits": bits, "group_size": group, "desc_act": ordered, "sym": False}
    return rewrite(directory, config, change), expected


def mxfp4(directory: Path) -> Path:
    """Experts in MXFP4, as gpt-oss is released."""
    dice = torch.Generator().manual_seed(3)

    def change(name: str, tensor: Tensor) -> Tensors | None:
        if not name.endswith("experts.gate_up_proj") and not name.endswith("experts.down_proj"):
            return None
        experts, inside, out = tensor.shape
        blocks = torch.randint(0, 256, (experts, out, inside // 32, 16), generator=dice, dtype=torch.uint8)
        scales = torch.randint(118, 124, (experts, out, inside // 32), generator=dice, dtype=torch.uint8)
        return {f"{name}_blocks": blocks, f"{name}_scales": scales}

    return rewrite(directory, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}, change)


def modelopt(directory: Path, kind: str, separate: bool = False) -> tuple[Path, Tensors]:
    """Checkpoint as ModelOpt exports it. It has scales of activations and of the KV cache, and the weights in the
    arithmetic of `FP8QTensor.dequantize` and `NVFP4QTensor.dequantize`. With `separate`, config.json does not know."""
    expected = Tensors()

    def change(name: str, tensor: Tensor) -> Tensors:
        base, (rows, columns) = name.removesuffix("weight"), tensor.shape
        more = {f"{base}input_scale": torch.tensor(0.3)} if kind in ("FP8", "NVFP4") else {}
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            more[f"{base}{base[-7]}_scale"] = torch.tensor(0.5)
        if kind == "NVFP4":
            groups = tensor.float().unflatten(1, (-1, 16))
            whole = tensor.abs().max().float() / (6 * 448)
            scales = (groups.abs().amax(-1) / (6 * whole)).to(torch.float8_e4m3fn)
            numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
            exact = scales.float() * whole
            codes = ((groups / exact[..., None])[..., None] - numbers).abs().argmin(-1)
            expected[name] = (numbers[codes] * exact[..., None]).reshape(tensor.shape).to(torch.bfloat16)
            codes = codes.reshape(tensor.shape).to(torch.uint8)
            return {name: codes[:, 0::2] | codes[:, 1::2] << 4, f"{name}_scale": scales,
                    f"{name}_scale_2": whole.reshape(()), **more}  # fmt: skip
        block = {"FP8": (rows, columns), "FP8_PER_CHANNEL_PER_TOKEN": (1, columns), "FP8_PB_WO": (16, 32)}[kind]
        parts = tensor.unflatten(0, (-1, block[0])).unflatten(2, (-1, block[1]))
        scales = parts.abs().amax(dim=(1, 3), keepdim=True).float() / 448
        codes = (parts / scales).to(torch.float8_e4m3fn)
        product = codes.to(torch.bfloat16) * scales.to(torch.bfloat16)
        expected[name] = product.reshape(tensor.shape)
        shape = {"FP8": (), "FP8_PER_CHANNEL_PER_TOKEN": (rows,)}.get(kind, scales.shape)
        return {name: codes.reshape(tensor.shape), f"{name}_scale": scales.reshape(shape), **more}

    config_of_kind = {"quant_algo": kind, "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    rewrite(directory, {"quant_method": "modelopt", **config_of_kind}, change)
    if separate:
        edit_config(directory, lambda config: config.pop("quantization_config"))
        content = {"producer": {"name": "modelopt", "version": "0.33.0"}, "quantization": config_of_kind}
        (directory / "hf_quant_config.json").write_text(json.dumps(content))
    return directory, expected
