"""CPU kernels of attention: a few queries and many keys, at the speed of host memory.

`attend.c` is compiled for this processor at its first use and kept in the user's cache folder. Without a C compiler,
torch computes the same at a fraction of the rate.

`attend` computes the attention of rows of several micro-batches at once.

Keys and values may be int8 if `quantize_rows` made them: each row has a scale of its own, in the four bytes behind it.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from zinfer.engine.cache import TINIEST
from zinfer.system import scratch

SOURCE = Path(__file__).with_name("attend.c")
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in (*FLOATS, torch.int8)}
SCALE_BYTES = 4
MAX_ROWS, MAX_WIDTH, MAX_COLUMNS = 128, 1024, 256  # ROWS, WIDTH and SPAN in attend.c
HEADS_PER_THREAD = 8  # heads of rows for each thread that are shared out evenly enough; fewer are taken in parts
TOKENS_PER_PART = 512  # tokens of a part at least


class _Block(ctypes.Structure):
    """Keys and values of one micro-batch: `block` in attend.c."""

    _fields_: ClassVar = [
        ("keys", ctypes.c_void_p), ("values", ctypes.c_void_p), ("bias", ctypes.c_void_p * 2),
        ("rows", ctypes.c_int64), ("heads", ctypes.c_int64), ("tokens", ctypes.c_int64),
        ("of_keys", ctypes.c_int64 * 3), ("of_values", ctypes.c_int64 * 3), ("of_bias", ctypes.c_int64 * 3 * 2),
    ]  # fmt: skip


def attend(
    queries: Tensor, blocks: Sequence[tuple[Tensor, Tensor]], biases: Sequence[Sequence[Tensor]] = (),
    scale: float = 1.0, threads: int | None = None, softcap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the attention of queries ``[B, heads, n, D]`` to blocks: float32 ``[B, heads, n, E]``. Each block is keys
    ``[b, heads, m, D]`` and values ``[b, heads, m, E]`` of the next b rows, with an m of its own. The `biases` of each
    are added to its scaled scores: float32, of shapes that expand to ``[b, heads, n, m]``. Before, scores are kept
    below `softcap`. `sinks`, ``[heads * s]``, are scores that take their part of each softmax, where s query heads
    share keys and n is a multiple of s. A query that sees nothing, since all is -inf, gets zeros. `threads` compute it,
    by default the count that torch uses. `can_attend` tells whether the compiled code can do it."""
    rows, heads, count, width = queries.shape
    longest, columns = max(keys.shape[2] for keys, _ in blocks), blocks[0][1].shape[-1]
    table, held = (_Block * len(blocks))(), list[Tensor]()
    for entry, (keys, values), seen in zip(table, blocks, biases or [()] * len(blocks), strict=True):
        entry.keys, entry.values = keys.data_ptr(), values.data_ptr()
        entry.rows, entry.heads, entry.tokens = keys.shape[:3]
        entry.of_keys[:], entry.of_values[:] = keys.stride()[:3], values.stride()[:3]
        for index, added in enumerate(seen if len(seen) < 3 else [sum(seen[1:], seen[0])]):
            bias = added.expand(len(keys), heads, count, keys.shape[2])
            held.append(bias if bias.stride(-1) == 1 else bias.contiguous())
            entry.bias[index] = held[-1].data_ptr()
            entry.of_bias[index][:] = held[-1].stride()[:3]
    queries, out = queries.to(torch.float32).contiguous(), torch.empty((rows, heads, count, columns))
    threads = threads or torch.get_num_threads()
    parts = min(-(-HEADS_PER_THREAD * threads // (rows * heads)), -(-longest // TOKENS_PER_PART))
    sums = torch.empty((rows * heads, parts, count, columns) if parts > 1 else 0)
    states = torch.empty((rows * heads, parts, count, 2))
    each = None if sinks is None else sinks_of(sinks, heads, count)
    function = getattr(library(), f"attend_{NAMES[blocks[0][0].dtype]}")
    numbers = map(ctypes.c_int64, (rows * heads, parts, count, width, columns))
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (out, sums, states)]
    function(
        ctypes.c_void_p(queries.data_ptr()), table, ctypes.c_void_p(each if each is None else each.data_ptr()),
        *pointers, *numbers, ctypes.c_float(scale), ctypes.c_float(softcap or 0), ctypes.c_int(threads),
    )  # fmt: skip
    return out


def sinks_of(sinks: Tensor, heads: int, count: int) -> Tensor:
    """Return the sink of each query, float32 ``[heads, count]``; `attend` has their shape."""
    return sinks.float().view(heads, -1).repeat_interleave(count * heads // len(sinks), 1)


def can_attend(queries: Tensor, blocks: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """Tell whether the compiled code can compute `attend`: sizes, and how rows lie in memory."""
    halves = [half for block in blocks for half in block]
    whole_rows = all(half.stride(-1) == 1 and _has_scales(half) for half in halves)
    width, columns = queries.shape[3], blocks[0][1].shape[3]
    fits = queries.shape[2] <= MAX_ROWS and width <= MAX_WIDTH and columns <= MAX_COLUMNS
    one_type = len({half.dtype for half in halves}) == 1
    return fits and whole_rows and one_type and library() is not None


def quantize_rows(states: Tensor) -> Tensor:
    """Quantise the rows of `states` (``[.., D]``, any float) to 8 bits: symmetric, rounded to nearest. Returns uint8
    ``[.., D + 4]``, each row with its scale; `attend` reads `int8_of` it."""
    scale = states.abs().amax(-1, keepdim=True).float().clamp_(min=TINIEST) / 127
    return join_scales((states.float() / scale).round_().to(torch.int8), scale)


def join_scales(numbers: Tensor, scales: Tensor) -> Tensor:
    """Join int8 `numbers` and their float32 `scales` as `quantize_rows` does. They are ``[.., D]`` and ``[.., 1]``."""
    return torch.cat([numbers.view(torch.uint8), scales.view(torch.uint8)], dim=-1)


def split_scales(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Split what `quantize_rows` returns into numbers and scales: int8 ``[.., D]`` and float32 ``[.., 1]``."""
    return int8_of(rows), rows[..., rows.shape[-1] - SCALE_BYTES :].contiguous().view(torch.float32)


def int8_of(rows: Tensor) -> Tensor:
    """Return the int8 numbers ``[.., D]`` of quantised rows. `attend` finds the scales beside them."""
    return rows[..., : rows.shape[-1] - SCALE_BYTES].view(torch.int8)


def dequantized(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a copy of an int8 `matrix` in `dtype`; any other matrix as it is. Raises ValueError for lost scales."""
    if matrix.dtype != torch.int8:
        return matrix
    if not _has_scales(matrix):
        raise ValueError("an int8 matrix without the scales of its rows")
    behind = matrix.storage_offset() + matrix.shape[-1]
    scale = matrix.as_strided((*matrix.shape[:-1], SCALE_BYTES), matrix.stride(), behind).contiguous()
    return (matrix.float() * scale.view(torch.float32)).to(dtype)


def _has_scales(matrix: Tensor) -> bool:
    """Tell whether rows have their scales behind them, if they need some."""
    return matrix.dtype != torch.int8 or matrix.stride(-2) >= matrix.shape[-1] + SCALE_BYTES


@cache
def library(source: Path = SOURCE) -> Any:
    """Return the library compiled from a C file; None if it cannot be compiled or loaded."""
    for compiler in filter(None, map(shutil.which, COMPILERS)):
        with suppress(OSError, RuntimeError, subprocess.CalledProcessError):  # also a user without a home folder
            return ctypes.CDLL(str(_compiled(source, compiler)))
    return None


def _compiled(source: Path, compiler: str) -> Path:
    """Return a compiled C file, perhaps from the cache. Raises OSError, and CalledProcessError from the compiler."""
    made_of = source.read_bytes() + " ".join((compiler, *FLAGS, _processor())).encode()
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zinfer"
    built = folder / f"{source.stem}-{hashlib.sha256(made_of).hexdigest()[:16]}.so"
    if not built.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with scratch.folder(folder, "compile") as made_in:  # another process may compile too
            made, env = made_in.path / built.name, {**os.environ, "TMPDIR": str(made_in.path)}
            subprocess.run([compiler, *FLAGS, str(source), "-o", str(made)], check=True, capture_output=True, env=env)
            made.replace(built)
    return built


def _processor() -> str:
    """Return what ``-march=native`` depends on: machines with different processors may share a home folder."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())
