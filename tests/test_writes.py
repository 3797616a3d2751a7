"""Files are written in one place: whole or not at all (`zinfer.system.atomic`), but for a few named here."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Module -> what it may write by itself.
ALLOWED = {
    "system.atomic": "the one atomic write",
    "system.printable": "opens /dev/null",
    "__main__": "opens /dev/null; the last line on stderr",
    "system.scratch": "entries, locked before they name anything; removes them and what they name",
    "checkpoint.tokenizer_files": "a tokenizer, in an owned folder",
    "checkpoint.gguf": "a tokenizer made in an owned folder, then renamed",
    "system.ending": "the last line on stderr",
    "record.jsonl": "an append-only log; cuts a torn line off a log",
    "worker.server": "/proc, and the pipe to the parent",
    "worker.process": "an unnamed temporary file",
    "engine.server.process": "an unnamed temporary file",
    "worker.probe": "an unnamed temporary file",
    "worker.studies": "logits, in an owned folder",
    "engine.direct": "layers, in owned folders",
    "engine.stream.kv.cpu_kernel": "a library made in an owned folder, then renamed",
    "engine.tensorrt.build": "an unnamed temporary file",
    "engine.pinned": "the size of a file in memory",
    "engine.ranks": "the size of a file in memory; a line on stderr",
    "job.parts": "removes the parts and the logs of a sweep's jobs, whose points are recorded",
    "engine.stream.weights.packed": "removes the old index first; the data go through an atomic write",
    "engine.quantization.checkpoint": "removes an earlier copy of its own; the data go through atomic writes",
    "report.plot.style": "into memory",
}
WRITING = {"w", "a", "x", "+"}
METHODS = {
    "write_text", "write_bytes", "savefig", "unlink", "rename", "touch", "mkfifo", "truncate", "ftruncate", "rmtree",
    "symlink_to", "hardlink_to", "copyfile", "copytree", "copy2", "move", "mkstemp", "mkdtemp", "NamedTemporaryFile",
    "TemporaryDirectory", "TemporaryFile", "SpooledTemporaryFile", "to_csv", "to_excel", "to_parquet", "write_table",
    "save_file", "fdopen", "tofile",
}  # fmt: skip


def mode_of(call: ast.Call, position: int) -> str:
    """Return the mode of an open; "?" if it is not written out."""
    given = [word.value for word in call.keywords if word.arg == "mode"] + call.args[position : position + 1]
    if not given:
        return "r"
    return given[0].value if isinstance(given[0], ast.Constant) and isinstance(given[0].value, str) else "?"


def writes(call: ast.Call) -> bool:
    """Tell whether a call may write, create, rename or remove files."""
    function = call.func
    if isinstance(function, ast.Name):
        return function.id == "open" and (bool(WRITING & set(mode := mode_of(call, 1))) or mode == "?")
    if not isinstance(function, ast.Attribute):
        return False
    if function.attr == "callback":  # as in stack.callback(path.unlink)
        return any(isinstance(given, ast.Attribute) and given.attr in METHODS for given in call.args)
    module = function.value.id if isinstance(function.value, ast.Name) else ""
    if function.attr == "open" and module == "os":
        flags = ast.dump(call.args[1]) if len(call.args) > 1 else "O_CREAT"
        return any(flag in flags for flag in ("O_WRONLY", "O_RDWR", "O_CREAT", "O_APPEND", "O_TRUNC", "O_TMPFILE"))
    if function.attr == "open":
        return bool(WRITING & set(mode_of(call, 0)))
    if function.attr in {"replace", "remove", "link", "symlink", "write", "pwrite", "save"}:
        # also methods of texts and lists; those of a Path have one argument
        path = function.attr == "replace" and len(call.args) == 1 and not call.keywords
        return module in {"os", "shutil", "np", "numpy", "torch"} or path
    return function.attr in METHODS


@pytest.mark.long
def test_nothing_writes_files_but_the_atomic_write_and_what_is_named() -> None:
    writers = set()
    for path in (ROOT / "zinfer").rglob("*.py"):
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        if any(map(writes, calls)):
            writers.add(".".join(path.relative_to(ROOT / "zinfer").with_suffix("").parts))
    assert writers - ALLOWED.keys() == set(), "write it with zinfer.system.atomic"
    assert ALLOWED.keys() - writers == set(), "these write no more"
