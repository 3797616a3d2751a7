"""Disk faults and an audit of syncs, by a preloaded library.

This module builds it, loads it, and says what strikes when.
"""

import ctypes
import errno
import mmap
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("shim.c")
COMPILERS = ("cc", "gcc", "clang")
READS, WRITES, SYNCS, NAMES, OPENS = 1, 2, 4, 8, 16  # kinds of operations, as in shim.c
CHANGES = WRITES | SYNCS | NAMES
NONE, FULL, FAIL, KILL, TORN, VANISH, COUNT = range(7)


class _Control(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int) for name in ("mode", "kinds", "error", "lasting")),
        *((name, ctypes.c_long) for name in ("at", "budget", "operations", "hits", "written")),
        ("process", ctypes.c_int),
        ("folders", (ctypes.c_char * 2048) * 2),
        ("audit", ctypes.c_int),
        ("unsynced", ctypes.c_long),
        ("first", ctypes.c_char * 1024),
    )


def build(folder: Path) -> Path | None:
    """Return the library compiled into `folder`; None without a C compiler."""
    target = folder / "shim.so"
    for compiler in filter(None, map(shutil.which, COMPILERS)):
        command = [compiler, "-shared", "-fPIC", "-O1", "-U_FORTIFY_SOURCE", "-o", str(target), str(SOURCE), "-ldl"]
        if subprocess.run(command, capture_output=True, check=False).returncode == 0:
            return target
    return None


def restart_with(library: Path, module: str) -> None:
    """Replace this process by ``python -m module`` with `library` preloaded."""
    environment = os.environ | {"LD_PRELOAD": str(library), "ZINFER_CAMPAIGN_SHIM": str(library)}
    os.execve(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]], environment)


class Shim:
    """Control over the faults of processes started from now on."""

    def __init__(self) -> None:
        """Take the library that this process was started with. Raises LookupError if there is none."""
        name = os.environ.get("ZINFER_CAMPAIGN_SHIM")
        if name is None:
            raise LookupError("no shim is loaded")
        os.environ.pop("LD_PRELOAD", None)  # compilers and other children do without
        self.library = Path(name)
        self._loaded = ctypes.CDLL(name)
        self._loaded.zf_use.argtypes = [ctypes.c_void_p]
        self._memory = mmap.mmap(-1, mmap.PAGESIZE * 2)
        self._control: Any = _Control.from_buffer(self._memory)

    def arm(
        self,
        mode: int,
        folders: Sequence[Path],
        *,
        kinds: int = CHANGES,
        at: int = 0,
        budget: int = 0,
        error: int = errno.EIO,
        lasting: bool = False,
        audit: bool = False,
    ) -> None:
        """Say which fault strikes below `folders` (at most two). Counts begin at 0.

        With `audit` the order of their writes and syncs is checked, too.
        """
        control = self._control
        control.mode, control.audit, control.unsynced, control.first = NONE, audit, 0, b""
        control.kinds, control.at, control.budget, control.error, control.lasting = kinds, at, budget, error, lasting
        control.operations = control.hits = control.written = control.process = 0
        for slot in range(2):
            control.folders[slot].value = os.fsencode(folders[slot].resolve()) if slot < len(folders) else b""
        control.mode = mode

    def disarm(self) -> None:
        self._control.mode, self._control.audit = NONE, False

    def enter(self) -> None:
        """Let the faults strike this process, a forked child, and its children."""
        self._loaded.zf_use(ctypes.addressof(self._control))

    @property
    def unsynced(self) -> str:
        """First fault in the order of writes since `arm`. Empty if none."""
        more = int(self._control.unsynced) - 1
        first = os.fsdecode(self._control.first)
        return "" if more < 0 else f"{first} (and {more} more)" if more else first

    @property
    def hits(self) -> int:
        """Number of operations that the fault struck."""
        return int(self._control.hits)

    @property
    def operations(self) -> int:
        """Number of operations counted since `arm`."""
        return int(self._control.operations)

    @property
    def written(self) -> int:
        """Bytes that were written, or tried, since `arm`; counted in modes FULL and COUNT."""
        return int(self._control.written)
