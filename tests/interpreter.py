"""Triton's interpreter on the CPU, in forked processes of its own.

It must be chosen before triton is imported, which other tests may have done.

    python -m tests.interpreter tests.test_codec PATH        calls `main(PATH)` of that module
"""

import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

VARIABLES = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}


@cache
def _server() -> subprocess.Popen[str]:
    """Start a process that imports what all modules import. It ends with this one."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.interpreter"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | VARIABLES, cwd=Path(__file__).parent.parent, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def interpreted(module: str, path: Path) -> None:
    """Call ``main(path)`` of a test module under Triton's interpreter."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    print(module, path, file=server.stdin, flush=True)
    status, log = server.stdout.readline().strip(), path.with_suffix(".log")
    assert status == "0", log.read_text() if log.exists() else f"exit status {status}"


def serve() -> None:
    """Fork a process for each module and path that stdin brings; write its exit status to stdout."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a module prints
    import_module("tests.test_stream")
    for line in sys.stdin:
        module, path = line.split()
        if (pid := os.fork()) == 0:
            run(module, Path(path))
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=answers, flush=True)


def run(module: str, path: Path) -> None:
    """Call ``main(path)`` of a module, and end this process."""
    status = 1
    try:
        import_module(module).main(path)
        status = 0
    except BaseException:
        path.with_suffix(".log").write_text(traceback.format_exc())
    finally:
        os._exit(status)


def replace_once() -> None:
    """Replace the functions of triton's language once per kernel. Else that takes a third of its time."""
    from triton.runtime import interpreter

    replace: Callable[[Any], Any] | None = getattr(interpreter, "_patch_lang", None)
    if replace is None:  # an interpreter that works in another way
        return
    language = interpreter.tl, interpreter.tl.core
    replaced: set[str] = set()  # modules whose functions are replaced, while a kernel runs

    @cache
    def seen_by(function: Any) -> frozenset[str]:
        ids = list(map(id, function.__globals__.values()))
        return frozenset(module.__name__ for module in language if id(module) in ids)

    def once(function: Any) -> Any:
        seen = seen_by(function)
        if replaced >= seen:
            return None
        outermost, scope = not replaced, replace(function)
        replaced.update(seen)
        if outermost:
            restore = scope.restore

            def ended() -> None:
                replaced.clear()
                restore()

            scope.restore = ended
        return scope

    interpreter._patch_lang = once


if __name__ == "__main__":
    replace_once()
    if sys.argv[1:]:
        import_module(sys.argv[1]).main(Path(sys.argv[2]))
    else:
        serve()
