"""Memory of the KV cache: ``[B, kv_heads, max_seq_len, D]`` a layer."""

import torch
from torch import Tensor

from zinfer.core.model import ModelSpec

Tensors = dict[str, Tensor]


class Cache:
    """Keys and values of a batch of sequences."""

    def __init__(self, spec: ModelSpec, batch_size: int, max_seq_len: int, device: torch.device) -> None:
        shape, dtype = (batch_size, spec.num_kv_heads, max_seq_len, spec.head_dim), getattr(torch, spec.dtype)
        names = [f"{part}_{layer}" for layer in range(spec.num_layers) for part in ("key", "value")]
        self._buffers = {name: torch.empty(shape, dtype=dtype, device=device) for name in names}

    def bind(self, rows: slice, past: int) -> tuple[Tensors, Tensors]:
        """Return the inputs and outputs of a pass of `rows`."""
        outputs = {name: buffer[rows] for name, buffer in self._buffers.items()}
        inputs = {f"past_{name}": view for name, view in outputs.items()}
        first = next(iter(outputs.values()))
        inputs["write_at"] = torch.full((len(first),), past, dtype=torch.int32, device=first.device)
        return inputs, outputs

    def keep_rows(self, rows: Tensor) -> None:
        """Keep `rows` only (indices ``[b]``, rising), and free the others' memory."""
        for name, buffer in self._buffers.items():
            self._buffers[name] = buffer[rows]
