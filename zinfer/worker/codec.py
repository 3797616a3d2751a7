"""Measurement of the lossless codec, on drawn weights and on checkpoints.

Weights are laid end to end and coded as one tensor, so that the time is the codec's and not that of many launches. A
pass decodes at least `SIZE` bytes, each copy from and to memory of its own: far more than a cache holds.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from zinfer.checkpoint.headers import Checkpoint, TensorInfo
from zinfer.core.errors import environment_error
from zinfer.core.model import LAYER_INDEX
from zinfer.record.study import Coded, Rate, Study, StudyError
from zinfer.worker import probe, process

if TYPE_CHECKING:
    import torch

SIZE = {"cuda": 1 << 30, "cpu": 64 << 20}  # bytes of drawn weights and of a timed pass; limit for a checkpoint's
REPEATS = 20
SCALE, WIDTH, SIDE = 0.02, 8192, 128
FP8 = "gaussian in fp8"
DRAWN = {
    "gaussian": f"normal, standard deviation {SCALE:g}",
    "row-scaled": f"normal, rows of {WIDTH} whose scale is {SCALE:g} times e to a normal power",
    "laplace": f"Laplace, scale {SCALE:g}",
    FP8: f"normal, rounded to FP8 (e4m3) with a scale for each {SIDE} x {SIDE} of rows of {WIDTH}",
}
_FLOATS = ("BF16", "F16", "F32")
_FP8 = "F8_E4M3"


@dataclass(frozen=True)
class Stored:
    """Matrices of a checkpoint's layers, or all if no layer is numbered."""

    name: str
    model_type: str  # from config.json; "" if unknown
    matrices: Mapping[str, TensorInfo]

    @property
    def fp8(self) -> bool:
        """True for codes in FP8 (e4m3)."""
        return any(info.dtype == _FP8 for info in self.matrices.values())

    @property
    def bytes(self) -> int:
        """Size of the matrices as bf16, or in FP8, in bytes."""
        return sum((1 if self.fp8 else 2) * math.prod(info.shape) for info in self.matrices.values())


def find(path: Path, cast: bool = False) -> Stored:
    """Find the matrices to code in a checkpoint or safetensors file.

    These are the matrices in bf16, or with `cast` in any float type, cast to bf16; or those in FP8 (e4m3) if these have
    more weights. Raises StudyError or CheckpointError where there is nothing to code.
    """
    if not path.exists() or not (path.is_dir() or path.suffix == ".safetensors"):
        raise StudyError(f"{path} is neither the folder of a checkpoint nor a .safetensors file")
    checkpoint = Checkpoint.open(path) if path.is_dir() else Checkpoint.of_file(path)
    floats = {n: info for n, info in checkpoint.tensors.items() if len(info.shape) == 2 and info.dtype in _FLOATS}
    usable = {name: info for name, info in floats.items() if cast or info.dtype == "BF16"}
    codes = {  # other tensors of this type are scales
        name: info
        for name, info in checkpoint.tensors.items()
        if len(info.shape) == 2 and info.dtype == _FP8 and name.endswith("weight")
    }
    from zinfer.engine.stream.weights.codec import MIN_NUMEL

    def numel(matrices: Mapping[str, TensorInfo]) -> int:
        return sum(math.prod(info.shape) for info in matrices.values())

    chosen = max(
        ({name: info for name, info in some.items() if LAYER_INDEX.search(name)} or some for some in (usable, codes)),
        key=numel,
    )
    name = path.resolve().name.removesuffix(".safetensors")
    if numel(chosen) < MIN_NUMEL:
        hint = "; --dtype bf16 casts its other floats to bf16" if len(usable) < len(floats) else ""
        kind = "FP8" if chosen is codes and codes else "bf16"
        raise StudyError(f"{path} has {numel(chosen)} {kind} weights to code, at least {MIN_NUMEL} are needed{hint}")
    return Stored(name, checkpoint.config.get("model_type", ""), chosen)


def measure(checkpoints: Sequence[Path] = (), cast: bool = False, progress: Callable[[str], object] = str) -> Study:
    """Measure the codec on drawn weights and `checkpoints` (see `find`). It runs on the GPU if there is one.

    `progress` gets the name of each measurement. Raises StudyError where torch is missing, and the errors of `find`,
    before anything is measured.
    """
    try:
        import torch
    except ImportError:
        raise environment_error(StudyError("the measurement needs torch: pip install 'zinfer[engines]'")) from None
    stored = [find(path, cast) for path in checkpoints]
    start = process.study_header("stream")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    progress("the link")
    link = probe.measure_link(device)
    size = SIZE[device.type]
    if device.type == "cuda":
        size = min(size, torch.cuda.mem_get_info()[0] // 8 // (2 * WIDTH) * 2 * WIDTH)
    rows = []
    for name, description in DRAWN.items():
        progress(name)
        rows.append(_measure(name, description, size, draw(name, size, device), size))
    for checkpoint in stored:
        progress(checkpoint.name)
        values, description = read(checkpoint, size)
        rows.append(_measure(checkpoint.name, description, checkpoint.bytes, values.to(device), size))
    return Study(study="codec", link=link, rows=tuple(rows), **start)


def draw(name: str, size: int, device: "torch.device") -> "torch.Tensor":
    """Draw `size` bytes of the distribution `name`, the same every time.

    Returns bf16 ``[size // 2]``, rounded from float32, or e4m3 ``[size]``.
    """
    import torch

    if name == FP8:
        weights = draw("gaussian", 2 * size, device).view(-1, WIDTH)
        codes = torch.empty(weights.shape, dtype=torch.float8_e4m3fn, device=device)
        for rows, out in zip(weights.split(SIDE), codes.split(SIDE), strict=True):
            blocks = rows.float().unflatten(1, (-1, SIDE))
            out.copy_((blocks / (blocks.abs().amax((0, 2), keepdim=True) / 448)).flatten(1))
        return codes.view(-1)
    generator = torch.Generator(device).manual_seed(0)
    values = torch.empty(size // 2 // WIDTH, WIDTH, dtype=torch.bfloat16, device=device)
    for rows in values.split(2048):
        noise = torch.empty(rows.shape, device=device)
        if name == "laplace":
            noise.exponential_(generator=generator)
            noise -= torch.empty_like(noise).exponential_(generator=generator)
        else:
            noise.normal_(generator=generator)
        if name == "row-scaled":
            noise *= torch.empty(len(rows), 1, device=device).normal_(generator=generator).exp_()
        rows.copy_(noise * SCALE)
    return values.view(-1)


def read(stored: Stored, size: int) -> "tuple[torch.Tensor, str]":
    """Read the matrices end to end, in bf16 or e4m3; return them and their description.

    If they have more than `size` bytes, only the first rows of each matrix are read, in proportion.
    """
    import torch
    from safetensors import safe_open

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
            parts.append((rows.view(torch.uint8) if stored.fp8 else rows.to(torch.bfloat16)).view(-1))
    types = "/".join(sorted({info.dtype for info in stored.matrices.values()})).lower()
    description.append(f"{len(parts)} matrices, stored as {types}" + f", the first {share:.1%} of each" * (share < 1))
    values = torch.cat(parts)
    return values.view(torch.float8_e4m3fn) if stored.fp8 else values, "; ".join(description)


def _measure(name: str, description: str, total: int, values: "torch.Tensor", size: int) -> Coded:
    import torch

    bound, (encode, expected) = _bound(values), _ways(values)
    coded = encode()
    row = Coded(
        name=name, told=description, total_bytes=total, raw_bytes=values.nbytes, coded_bytes=values.nbytes, bound=bound,
        status="no_smaller",
    )  # fmt: skip
    if coded is None:
        return row
    data, decode = coded
    row = row.model_copy(update={"coded_bytes": data.numel()})
    copies = math.ceil(size / values.nbytes)
    jobs = [(data.clone(), torch.full_like(expected, torch.nan)) for _ in range(copies)]
    del coded, data

    def run() -> None:
        for source, out in jobs:
            decode(source, out)

    decoded = probe.rate(run, values.nbytes * len(jobs), values.device, REPEATS)
    numbers = ~expected.isnan() if values.dtype == torch.float8_e4m3fn else torch.ones_like(expected, dtype=torch.bool)
    wanted = expected.view(torch.int16)[numbers]
    for _, out in jobs:
        if not torch.equal(out.view(torch.int16)[numbers], wanted) or not bool(out[~numbers].isnan().all()):
            return row.model_copy(update={"status": "wrong_bits"})
    jobs.clear()
    encoded = probe.rate(encode, values.nbytes, values.device, REPEATS)
    rates = {"encode": Rate(**encoded), "decode": Rate(**decoded)}
    return row.model_copy(update={"status": "ok"} | rates)


Decode = Callable[["torch.Tensor", "torch.Tensor"], None]  # from coded data to weights


def _ways(
    values: "torch.Tensor",
) -> "tuple[Callable[[], tuple[torch.Tensor, Decode] | None], torch.Tensor]":
    """Return a function that encodes `values`, and the expected weights.

    It returns data and a function that decodes them, or None where they are no smaller. Weights in e4m3 come back as
    bf16, multiplied by scales of 1 as in an engine.
    """
    import torch

    from zinfer.engine.quantization.dequantize import Codes
    from zinfer.engine.stream.weights import codec, formats

    def plain() -> tuple[torch.Tensor, Decode] | None:
        coded = codec.encode(values)
        return None if coded is None else (coded.data, lambda data, out: codec.decode(data, coded.layout, out))

    if values.dtype == torch.bfloat16:
        return plain, values
    whole = len(values) % WIDTH == 0
    width = WIDTH if whole else len(values)
    numbers = values.view(torch.uint8).view(-1, width)
    grid = (-(-len(numbers) // SIDE), width // SIDE) if whole else (1, 1)
    scales = torch.ones(grid, device=values.device)
    codes = Codes(numbers, width, 8, "e4m3", scales, (SIDE, SIDE), torch.bfloat16)

    def scaled() -> tuple[torch.Tensor, Decode] | None:
        ((layout, data),) = formats.encode_chunks(codes, torch.bfloat16, 2 * len(values))
        return None if layout.coded is None else (data, lambda data, out: formats.unpack(data, layout, out))

    return scaled, values.to(torch.bfloat16)


def _bound(values: "torch.Tensor") -> float:
    """Return the lower bound on the coded size, as a share: the entropy of exponents; see `Coded`."""
    import torch

    from zinfer.engine.stream.weights.codec import BITS, BLOCK

    bits = BITS[values.dtype]
    kind, shift, mask = (torch.int16, 7, 255) if bits == 16 else (torch.uint8, 3, 15)
    blocks = values[: len(values) // BLOCK * BLOCK].view(kind).view(-1, BLOCK)

    def entropies() -> Iterator[float]:
        for part in blocks.split(1024):
            keys = (part.int() >> shift & mask) + 256 * torch.arange(len(part), device=part.device)[:, None]
            counts = keys.view(-1).bincount(minlength=256 * len(part)).view(-1, 256)
            yield float(torch.special.entr(counts.double() / BLOCK).sum()) / math.log(2)

    return (bits / 2 + sum(entropies()) / len(blocks)) / bits
