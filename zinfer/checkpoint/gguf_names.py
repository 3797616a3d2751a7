"""Names in a model of a GGUF's tensors, by `transformers`' maps.

Each expert of a stack is a run of bytes, and so becomes a tensor of its own, which transformers' conversion stacks
again. Its processors undo what is changed when a GGUF is written: rows in another order as codes, all else as values.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
from transformers import PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from zinfer.checkpoint.architecture import MatrixFinder, decoder_layers
from zinfer.checkpoint.gguf import BLOCKS, ROTATION
from zinfer.checkpoint.headers import Checkpoint, CheckpointError, TensorInfo
from zinfer.checkpoint.quantization import STORED_DTYPES
from zinfer.checkpoint.quantized_tensors import QuantizedWeight

_LAYER = re.compile(r"blk\.(\d+)\.")
_EXPERTS = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)_exps\.(weight|bias)")
Convert = Callable[..., Any]  # takes arrays of stored parts, returns that of the model


def named(
    checkpoint: Checkpoint, model: PreTrainedModel, layers: int, dtype: str
) -> tuple[Checkpoint, dict[str, QuantizedWeight]]:
    """Return the checkpoint with the model's names, and its quantised weights.

    Among these are weights whose values change. `dtype` is the type of the model. Layers of the file from `model`'s
    number on, up to `layers`, are left out. Raises CheckpointError for a tensor without a place in the model.
    """
    maker = _Names(checkpoint, model, STORED_DTYPES[dtype])
    for name, info in checkpoint.tensors.items():
        layer = _LAYER.match(name)
        if name == ROTATION or (layer is not None and maker.depth <= int(layer[1]) < layers):
            continue
        if match := _EXPERTS.fullmatch(name):
            maker.add_experts(name, info, int(match[1]), match[2], match[3])
        elif (target := maker.names.get(name) or maker.names.get(name.removesuffix(".weight"))) is not None:
            maker.add(name, info, target)
        else:
            raise maker.unknown(name)
    return replace(checkpoint, tensors=maker.tensors), maker.weights


class _Names:
    def __init__(self, checkpoint: Checkpoint, model: PreTrainedModel, dtype: str) -> None:
        self._checkpoint, self._model, self._dtype = checkpoint, model, dtype
        self._stack, self._layers = decoder_layers(model)
        self._find = MatrixFinder(model)
        self.depth = len(self._layers)
        self.tensors = dict[str, TensorInfo]()
        self.weights = dict[str, QuantizedWeight]()
        config = model.config.to_dict() | dict(checkpoint.config)
        self._processor: Any = TENSOR_PROCESSORS.get(checkpoint.architecture, TensorProcessor)(config=config)
        # The map goes down to each module, which would take long; only a base model's own names are needed.
        inner = {} if model.base_model is model else {model.base_model_prefix: _shell(model.base_model, {})}
        self.names: Mapping[str, str] = get_gguf_hf_weights_map(
            _shell(model, inner), self._processor, checkpoint.architecture, self.depth
        )

    def unknown(self, name: str) -> CheckpointError:
        file = self._checkpoint.tensors[name].file
        return CheckpointError(
            f"{file} stores {name[:200]}, which transformers has no name for in a {self._model.config.model_type} model"
        )

    def add(self, name: str, info: TensorInfo, target: str) -> None:
        """Add a tensor that is one of the model's."""
        self.tensors[target], (convert, by_rows) = as_bytes(info), self._change(name, info.shape)
        if info.dtype in BLOCKS or convert is not None:
            whole = convert is None or by_rows
            shape = info.shape if whole or convert is None else convert(np.empty(info.shape, np.float32)).shape
            self._weigh(target, info, shape, {"codes": target}, convert, whole)

    def _weigh(
        self, name: str, info: TensorInfo, shape: tuple[int, ...], parts: Mapping[str, str], convert: Convert | None,
        whole: bool = False, transposed: bool = False,
    ) -> None:  # fmt: skip
        """Note a weight; it is made of `whole` rows, or of values. Rows of a `transposed` one are columns."""
        size, _, bits = BLOCKS.get(info.dtype, (1, 1, 0))
        block = (size, 1) if transposed else (1, size)
        self.weights[name] = QuantizedWeight(
            name, "gguf", shape, self._dtype, parts, block, bits if whole else 0, kind=info.dtype, convert=convert
        )

    def _change(self, name: str, shape: tuple[int, ...]) -> tuple[Convert | None, bool]:
        """Return what changes a tensor, and whether that moves rows only."""

        def convert(values: Any) -> Any:
            kept: dict[str, Any] = {"parsed_parameters": {"tensors": {}}, "tensor_key_mapping": {}}
            return np.ascontiguousarray(self._processor.process(values, name, **kept).weights)

        if _EXPERTS.fullmatch(name):
            return None, False
        probe = np.arange(shape[0], dtype=np.float32).reshape(-1, *(1 for _ in shape[1:]))
        try:
            with np.errstate(all="ignore"):
                moved = convert(probe)
        except ValueError:  # it needs all columns
            return convert, False
        if moved.shape != probe.shape or not np.array_equal(np.sort(moved, axis=0), probe):
            return convert, False
        return (None, False) if np.array_equal(moved, probe) else (convert, True)

    def add_experts(self, name: str, info: TensorInfo, layer: int, role: str, leaf: str) -> None:
        """Add a stack of experts: tensors of single experts, or a stack that is used as it is stored."""
        matrix, experts = dict(self._sources(layer)).get(role, ("", 0))
        if not matrix or info.shape[0] != experts or ("*" in matrix and leaf != "weight"):
            raise self.unknown(name)
        if "*" not in matrix:
            self._add_stack(name, info, matrix, role, leaf)
            return
        size = info.nbytes // experts
        for expert in range(experts):
            start = info.start + expert * size
            one = info._replace(shape=info.shape[1:], start=start, end=start + size)
            self.add(name, one, f"{matrix.replace('*', str(expert))}.weight")

    def _sources(self, layer: int) -> Iterator[tuple[str, tuple[str, int]]]:
        """Yield role, name and number of a layer's experts."""
        found: dict[str, list[tuple[str, int]]] = {}
        for matrix, _, entry in self._find(self._layers[layer]) if layer < self.depth else ():
            if matrix.experts:
                found.setdefault(entry, []).append((f"{self._stack}.{layer}.{matrix.name}", matrix.experts))
        for several in found.values():
            if "*" not in several[0][0]:
                roles = ("gate", "up") if several[0][0].endswith("gate_up_proj") else ("down",)
                yield from ((role, several[0]) for role in roles)
            else:
                yield from zip(("gate", "up") if len(several) == 2 else ("down",), several, strict=True)

    def _add_stack(self, name: str, info: TensorInfo, matrix: str, role: str, leaf: str) -> None:
        """Add part of a stack of gpt-oss: ``[E, in, out]``, with the rows of gate and up in turns."""
        if self._checkpoint.architecture != "gpt-oss":
            raise self.unknown(name)
        self.tensors[name] = as_bytes(info)
        if role == "up":  # with its gate
            return
        other = name.replace("_gate_", "_up_")
        parts = {"codes": name} if role == "down" else {"codes": name, "up": other}
        like = self._checkpoint.tensors.get(other, info)
        if (like.dtype, like.shape) != (info.dtype, info.shape):
            raise self.unknown(other)
        experts, out, kept = info.shape[0], info.shape[1] * len(parts), info.dtype == "MXFP4"
        if leaf == "bias":
            self._weigh(f"{matrix}_bias", info, (experts, out), parts, partial(_together, False))
        else:
            shape = (experts, info.shape[2], out)
            self._weigh(matrix, info, shape, parts, partial(_together, not kept), kept, kept)


def _shell(model: Any, children: Mapping[str, Any]) -> Any:
    """Return what the map of names needs of a model."""
    return SimpleNamespace(config=model.config, state_dict=model.state_dict, named_children=children.items)


def as_bytes(info: TensorInfo) -> TensorInfo:
    """Return a tensor of blocks as bytes, ``[.., bytes of a row]``."""
    if info.dtype not in BLOCKS:
        return info
    size, width, _ = BLOCKS[info.dtype]
    return info._replace(dtype="U8", shape=(*info.shape[:-1], info.shape[-1] // size * width))


def _together(transposed: bool, *parts: Any) -> Any:
    """Return one stack of gate and up, their rows in turns."""
    both = np.stack(parts, 2).reshape(len(parts[0]), -1, *parts[0].shape[2:])
    return np.ascontiguousarray(both.swapaxes(1, 2)) if transposed else both
