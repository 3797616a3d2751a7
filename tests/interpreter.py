"""Triton's interpreter on the CPU, in a process of its own. It must be chosen before triton is imported, which other
tests may have done.

    python -m tests.interpreter tests.test_codec PATH        calls `main(PATH)` of that module
"""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

VARIABLES = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}


def interpreted(module: str, path: Path) -> None:
    """Call ``main(path)`` of a test module under Triton's interpreter."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.interpreter", module, path],
        env=os.environ | VARIABLES, cwd=Path(__file__).parent.parent, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stderr}"


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
    import_module(sys.argv[1]).main(Path(sys.argv[2]))
