"""Products of a few rows with a long matrix in host memory, at the speed of that memory.

`attend.c` is compiled for this processor when it is first wanted, and kept in the user's cache folder. Where there is
no C compiler, torch computes the same, at a fraction of the rate.

    rows, keys: [.., n, D] and [.., m, D]         dots(rows, keys): [.., n, m]
    rows, values: [.., n, m] and [.., m, D]       mix(rows, values): [.., n, D]

Matrices may be int8, if `coded` made them: each row has a scale of its own, in the four bytes behind it.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("attend.c")
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in (*FLOATS, torch.int8)}
SCALE_BYTES = 4
TINIEST = 127 * torch.finfo(torch.float32).tiny  # of which the scale is still a normal number
MOST_ROWS, WIDEST = 128, 1024  # ROWS and WIDTH in attend.c


def dots(rows: Tensor, keys: Tensor) -> Tensor:
    """``rows @ keys^T`` in float32."""
    if suits(rows, keys):
        return _run("dots", rows, keys, keys.shape[-2])
    rows, keys = _alike(rows, keys)
    return (rows @ keys.transpose(-1, -2)).float()


def mix(rows: Tensor, values: Tensor) -> Tensor:
    """``rows @ values`` in float32."""
    if suits(rows, values):
        return _run("mix", rows, values, values.shape[-1])
    rows, values = _alike(rows, values)
    return (rows @ values).float()


def _alike(rows: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Both in one type, as torch's product wants them: the wider of the two."""
    matrix = widened(matrix, rows.dtype)
    dtype = torch.promote_types(rows.dtype, matrix.dtype)
    return rows.to(dtype), matrix.to(dtype)


def coded(states: Tensor) -> Tensor:
    """Rows of `states`, ``[.., D]`` of any float type, in 8 bits each with its scale: uint8 ``[.., D + 4]``, of which
    ``view(torch.int8)[.., :D]`` is a matrix for `dots` and `mix`. Symmetric, rounded to nearest."""
    scale = states.abs().amax(-1, keepdim=True).float().clamp_(min=TINIEST) / 127
    content = (states.float() / scale).round_().to(torch.int8)
    return torch.cat([content.view(torch.uint8), scale.view(torch.uint8)], dim=-1)


def widened(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """`matrix` in `dtype`: a copy if it is int8, itself otherwise."""
    if matrix.dtype != torch.int8:
        return matrix
    if matrix.stride(-2) < matrix.shape[-1] + SCALE_BYTES:
        raise ValueError("rows in 8 bits that lost their scales")
    behind = matrix.storage_offset() + matrix.shape[-1]
    scale = matrix.as_strided((*matrix.shape[:-1], SCALE_BYTES), matrix.stride(), behind).contiguous()
    return (matrix.float() * scale.view(torch.float32)).to(dtype)


def suits(rows: Tensor, matrix: Tensor) -> bool:
    """Whether this is compiled code's to compute: few rows, and up to two batch dimensions of a matrix whose own rows
    are whole in memory."""
    return (
        matrix.dtype in NAMES
        and rows.dtype in FLOATS
        and 2 <= matrix.dim() == rows.dim() <= 4
        and rows.shape[:-2] == matrix.shape[:-2]
        and rows.shape[-2] <= MOST_ROWS
        and matrix.shape[-1] <= WIDEST
        and matrix.stride(-1) == 1
        and (matrix.dtype in FLOATS or matrix.stride(-2) >= matrix.shape[-1] + SCALE_BYTES)
        and matrix.device.type == rows.device.type == "cpu"
        and library() is not None
    )


def _run(kind: str, rows: Tensor, matrix: Tensor, width: int) -> Tensor:
    rows, out = rows.to(torch.float32).contiguous(), torch.empty((*rows.shape[:-1], width))
    missing = 4 - matrix.dim()
    batch, strides = (1,) * missing + matrix.shape[:-2], (0,) * missing + matrix.stride()[:-1]
    numbers = (*batch, *strides, rows.shape[-2], *matrix.shape[-2:])
    pointers = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (rows, matrix, out))
    function = getattr(library(), f"{kind}_{NAMES[matrix.dtype]}")
    function(*pointers, *map(ctypes.c_int64, numbers), ctypes.c_int(torch.get_num_threads()))
    return out


@cache
def library() -> Any:
    """`attend.c`, compiled; None where that cannot be."""
    for compiler in filter(None, map(shutil.which, COMPILERS)):
        with suppress(OSError, RuntimeError, subprocess.CalledProcessError):  # a user without a home is no accident
            return ctypes.CDLL(str(_compiled(compiler)))
    return None


def _compiled(compiler: str) -> Path:
    """What `compiler` makes of `attend.c`, now or before. Raises OSError, and CalledProcessError where it refuses."""
    made_of = SOURCE.read_bytes() + " ".join((compiler, *FLAGS, _processor())).encode()
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zinfer"
    place = folder / f"attend-{hashlib.sha256(made_of).hexdigest()[:16]}.so"
    if not place.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:  # another process may be at the same
            made = Path(scratch) / place.name
            subprocess.run([compiler, *FLAGS, str(SOURCE), "-o", str(made)], check=True, capture_output=True)
            made.replace(place)
    return place


def _processor() -> str:
    """What ``-march=native`` goes by: a home folder may be shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())
