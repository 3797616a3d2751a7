"""Files are written in one place: whole or not at all (`zinfer.system.atomic`), but for a few named here."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Function of a module -> why it may write by itself.
ALLOWED = {
    "system.atomic:writing": "the one atomic write",
    "system.printable:discard": "opens /dev/null",
    "__main__:_open_standard_streams": "opens /dev/null",
    "system.scratch:Scratch.cleanup": "removes an entry",
    "system.scratch:_open_entry": "an entry, locked before it names anything",
    "system.scratch:_remove_if_dead": "removes the entry of a dead process",
    "system.scratch:_removed": "removes what an entry names",
    "checkpoint.tokenizer_files:cleaned": "a tokenizer, in an owned folder",
    "checkpoint.gguf:tokenizer": "a tokenizer made in an owned folder, then renamed",
    "system.ending:_end": "the last line on stderr",
    "__main__:_interrupted": "the last line on stderr",
    "record.jsonl:AppendLog.open": "an append-only log",
    "record.jsonl:_append": "an append-only log",
    "record.jsonl:_cut": "cuts a torn line off a log",
    "worker.server:main": "/proc, and the pipe to the parent",
    "worker.process:Worker.__init__": "an unnamed temporary file",
    "engine.server.process:ServerProcess.__init__": "an unnamed temporary file",
    "worker.probe:_probe_disk": "an unnamed temporary file",
    "worker.studies:logits_record": "logits, in an owned folder",
    "engine.direct:DirectWriter.__init__": "layers, in owned folders",
    "engine.direct:DirectWriter.write": "layers, in owned folders",
    "engine.stream.kv.cpu_kernel:_compiled": "a library made in an owned folder, then renamed",
    "engine.tensorrt.build:_weights": "an unnamed temporary file",
    "engine.pinned:PinnedArena.__init__": "the size of a file in memory",
    "engine.pinned:PinnedArena.seal": "the size of a file in memory",
    "engine.ranks:SharedTensors.put": "the size of a file in memory",
    "engine.ranks:Group.undivided": "a line on stderr",
    "engine.ranks:Leader._watch": "a line on stderr",
    "job.parts:Cluster.clear": "removes the parts and the logs of a sweep's jobs, whose points are recorded",
    "engine.stream.weights.packed:write": "removes the old index first; the data go through an atomic write",
    "engine.quantization.checkpoint:write": "removes an earlier copy of its own; the data go through atomic writes",
    "report.plot.style:render": "into memory",
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


class Finder(ast.NodeVisitor):
    """The functions of a module that write."""

    def __init__(self) -> None:
        self.scopes, self.writers = list[str](), set[str]()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.scopes.append(node.name)
        self.generic_visit(node)
        self.scopes.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.scopes.append(node.name)
        self.generic_visit(node)
        self.scopes.pop()

    def visit_Call(self, node: ast.Call) -> None:
        if writes(node):
            outer = self.scopes[:2] if self.scopes and self.scopes[0].lstrip("_")[0].isupper() else self.scopes[:1]
            self.writers.add(".".join(outer) or "<module>")
        if isinstance(node.func, ast.Attribute) and node.func.attr == "callback":  # as in stack.callback(path.unlink)
            for given in node.args:
                if isinstance(given, ast.Attribute) and given.attr in METHODS:
                    self.writers.add(".".join(self.scopes[:1]))
        self.generic_visit(node)


def writers_in(source: str) -> set[str]:
    finder = Finder()
    finder.visit(ast.parse(source))
    return finder.writers


@pytest.mark.long
def test_nothing_writes_files_but_the_atomic_write_and_what_is_named() -> None:
    writers = set()
    for path in sorted((ROOT / "zinfer").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT / "zinfer").with_suffix("").parts)
        writers |= {f"{module}:{name}" for name in writers_in(path.read_text())}
    assert writers - ALLOWED.keys() == set(), "write it with zinfer.system.atomic"
    assert ALLOWED.keys() - writers == set(), "these write no more"
