"""Disk faults and an audit of syncs, by a preloaded library."""

import ctypes
import errno
import mmap
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("shim.c")
READS, WRITES, SYNCS, NAMES, OPENS = 1, 2, 4, 8, 16  # kinds of operations, as in shim.c
CHANGES = WRITES | SYNCS | NAMES
NONE, FULL, FAIL, KILL, TORN, VANISH, COUNT = range(7)


class _Control(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int) for name in ("mode", "kinds", "error", "lasting")),
        *((name, ctypes.c_long) for name in ("at", "budget", "operations", "hits", "written")),
        ("folders", (ctypes.c_char * 2048) * 2),
        ("audit", ctypes.c_int),
        ("unsynced", ctypes.c_long),
        ("first", ctypes.c_char * 1024),
    )


def build(folder: Path) -> Path | None:
    """Return the library compiled into `folder`; None without a C compiler."""
    target = folder / "shim.so"
    for compiler in filter(None, map(shutil.which, ("cc", "gcc", "clang"))):
        command = [compiler, "-shared", "-fPIC", "-O1", "-U_FORTIFY_SOURCE", "-o", str(target), str(SOURCE), "-ldl"]
        if subprocess.run(command, capture_output=True, check=False).returncode == 0:
            return target
    return None


class Shim:
    """Faults of the processes that have its `environment`; they share the file `page` with this one."""

    def __init__(self, library: Path, page: Path) -> None:
        page.write_bytes(bytes(ctypes.sizeof(_Control)))
        with page.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self._control: Any = _Control.from_buffer(self._memory)
        self.environment = {"LD_PRELOAD": str(library), "ZINFER_SHIM": str(page)}

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
        """Say which fault strikes below `folders` (at most two). Counts begin at 0; `audit` checks syncs."""
        control = self._control
        control.mode, control.audit, control.unsynced, control.first = NONE, audit, 0, b""
        control.kinds, control.at, control.budget, control.error, control.lasting = kinds, at, budget, error, lasting
        control.operations = control.hits = control.written = 0
        for index in range(2):
            control.folders[index].value = os.fsencode(folders[index].resolve()) if index < len(folders) else b""
        control.mode = mode

    def disarm(self) -> None:
        self._control.mode, self._control.audit = NONE, False

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
