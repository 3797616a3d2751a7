"""Measurement of the lossless codec, on drawn weights and on checkpoints.

Weights are laid end to end and coded as one tensor, so that the time is the codec's and not that of many launches. A
pass decodes at least `SIZE` bytes, each copy from and to memory of its own: far more than a cache holds.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from zinfer.checkpoint.headers import Checkpoint, TensorInfo
from zinfer.core.model import LAYER_INDEX
from zinfer.engine.stream.weights import codec
from zinfer.record.study import Coded, Rate, Study, StudyError
from zinfer.worker import probe, process

SIZE = {"cuda": 1 << 30, "cpu": 64 << 20}  # bytes of drawn weights and of a timed pass; limit for a checkpoint's
REPEATS = 20
SCALE, WIDTH = 0.02, 8192
DRAWN = "gaussian"
_FLOATS = ("BF16", "F16", "F32")


@dataclass(frozen=True)
class Stored:
    """Matrices of a checkpoint's layers, or all if no layer is numbered."""

    name: str
    model_type: str  # from config.json; "" if unknown
    matrices: Mapping[str, TensorInfo]

    @property
    def bytes(self) -> int:
        """Size of the matrices as bf16, in bytes."""
        return 2 * sum(math.prod(info.shape) for info in self.matrices.values())


def find(path: Path) -> Stored:
    """Find the float matrices of a checkpoint or safetensors file. Raises StudyError, CheckpointError."""
    if not path.exists() or not (path.is_dir() or path.suffix == ".safetensors"):
        raise StudyError(f"{path} is neither the folder of a checkpoint nor a .safetensors file")
    checkpoint = Checkpoint.open(path) if path.is_dir() else Checkpoint.of_file(path)
    floats = {n: info for n, info in checkpoint.tensors.items() if len(info.shape) == 2 and info.dtype in _FLOATS}
    chosen = {name: info for name, info in floats.items() if LAYER_INDEX.search(name)} or floats
    if (numel := sum(math.prod(info.shape) for info in chosen.values())) < codec.MIN_NUMEL:
        raise StudyError(f"{path} has {numel} weights to code, at least {codec.MIN_NUMEL} are needed")
    name = path.resolve().name.removesuffix(".safetensors")
    return Stored(name, checkpoint.config.get("model_type", ""), chosen)


def measure(checkpoints: Sequence[Path] = (), progress: Callable[[str], object] = str) -> Study:
    """Measure the codec on drawn weights and `checkpoints` (see `find`). It runs on the GPU if there is one. `progress`
    gets the name of each measurement. Raises the errors of `find` before anything is measured."""
    stored = [find(path) for path in checkpoints]
    start = process.study_header("stream")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    progress("the link")
    link = probe.measure_link(device)
    size = SIZE[device.type]
    if device.type == "cuda":
        size = min(size, torch.cuda.mem_get_info()[0] // 8 // (2 * WIDTH) * 2 * WIDTH)
    progress(DRAWN)
    rows = [_measure(DRAWN, f"normal, standard deviation {SCALE:g}", size, draw(size, device), size)]
    for checkpoint in stored:
        progress(checkpoint.name)
        values, description = read(checkpoint, size)
        rows.append(_measure(checkpoint.name, description, checkpoint.bytes, values.to(device), size))
    return Study(study="codec", link=link, rows=tuple(rows), **start)


def draw(size: int, device: torch.device) -> Tensor:
    """Draw `size` bytes of normally distributed bf16, the same every time."""
    generator = torch.Generator(device).manual_seed(0)
    values = torch.empty(size // 2 // WIDTH, WIDTH, dtype=torch.bfloat16, device=device)
    for rows in values.split(2048):
        rows.copy_(torch.empty(rows.shape, device=device).normal_(generator=generator) * SCALE)
    return values.view(-1)


def read(stored: Stored, size: int) -> tuple[Tensor, str]:
    """Read the matrices end to end, in bf16; return them and their description. If they have more than `size` bytes,
    only the first rows of each matrix are read, in proportion."""
    share = min(1.0, size / stored.bytes)
    parts, description = [], [stored.model_type] if stored.model_type else []
    with ExitStack() as stack:
        files = dict.fromkeys(info.file for info in stored.matrices.values())
        readers = {file: stack.enter_context(safe_open(file, framework="pt")) for file in files}
        for reader in readers.values():
            source = (reader.metadata() or {}).get("source")
            description += [source] if source and source not in description else []
        for name, info in stored.matrices.items():
            rows = readers[info.file].get_slice(name)[: math.ceil(info.shape[0] * share)]
            parts.append(rows.to(torch.bfloat16).view(-1))
    types = "/".join(sorted({info.dtype for info in stored.matrices.values()})).lower()
    description.append(f"{len(parts)} matrices, stored as {types}" + f", the first {share:.1%} of each" * (share < 1))
    return torch.cat(parts), "; ".join(description)


def _measure(name: str, description: str, total: int, values: Tensor, size: int) -> Coded:
    coded, raw = codec.encode(values), values.nbytes
    coded_bytes = raw if coded is None else coded.data.numel()
    sizes: dict[str, Any] = {"total_bytes": total, "raw_bytes": raw, "coded_bytes": coded_bytes}
    row = partial(Coded, name=name, description=description, bound=_bound(values), **sizes)
    if coded is None:
        return row(status="no_smaller")
    layout = coded.layout
    jobs = [(coded.data.clone(), torch.full_like(values, torch.nan)) for _ in range(math.ceil(size / raw))]
    del coded

    def decode() -> None:
        for source, out in jobs:
            codec.decode(source, layout, out)

    decoded = probe.rate(decode, raw * len(jobs), values.device, REPEATS)
    if not all(torch.equal(out.view(torch.int16), values.view(torch.int16)) for _, out in jobs):
        return row(status="wrong_bits")
    jobs.clear()
    encoded = probe.rate(lambda: codec.encode(values), raw, values.device, REPEATS)
    return row(status="ok", encode=Rate(**encoded), decode=Rate(**decoded))


def _bound(values: Tensor) -> float:
    """Return the lower bound on the coded size, as a share: the entropy of exponents; see `Coded`."""
    block, entropy = codec.BLOCK, 0.0
    blocks = values[: len(values) // block * block].view(torch.int16).view(-1, block)
    for part in blocks.split(1024):
        keys = (part.int() >> 7 & 255) + 256 * torch.arange(len(part), device=part.device)[:, None]
        counts = keys.view(-1).bincount(minlength=256 * len(part)).view(-1, 256)
        entropy += float(torch.special.entr(counts.double() / block).sum()) / math.log(2)
    return (8 + entropy / len(blocks)) / 16
