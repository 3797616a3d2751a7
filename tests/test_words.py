"""Plain words: docstrings begin with what a newcomer would grep for, and names are the field's standard terms."""

import ast
import gc
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAX_WORDS = 12  # of a first sentence
END = re.compile(r"(?<=[.!?:;])\s")
RIDDLE = re.compile(r"(Of|What|Where|Those|Whether|How|Why)\b|[a-z]")
NOUN_PHRASE = re.compile(r"(The|A|An|This|These|One|Every|Each|Its)\b")
Scope = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@cache
def trees(folder: str) -> dict[str, ast.Module]:
    """Return the parsed modules below a folder, by path."""
    paths = sorted((ROOT / folder).rglob("*.py"))
    gc.disable()  # it would look through all trees again and again: three quarters of the time
    try:
        return {str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8")) for path in paths}
    finally:
        gc.freeze()
        gc.enable()


def scopes(node: ast.AST) -> Iterator[Scope]:
    """Yield a module, its classes and its functions."""
    if isinstance(node, Scope):
        yield node
    for name in ("body", "orelse", "handlers", "finalbody"):
        for child in getattr(node, name, ()):
            yield from scopes(child)


def docstrings(*folders: str) -> Iterator[tuple[str, Scope, str]]:
    """Yield the source, the scope and the text of each docstring."""
    for folder in folders:
        for path, tree in trees(folder).items():
            for node in scopes(tree):
                if text := ast.get_docstring(node):
                    yield f"{path}:{getattr(node, 'lineno', 1)}", node, text


def is_value(node: Scope) -> bool:
    return not isinstance(node, ast.FunctionDef) or any("property" in ast.unparse(name) for name in node.decorator_list)


def test_docstrings_begin_with_a_word_to_search_for_and_a_short_sentence() -> None:
    firsts = [
        (source, END.split(" ".join(text.split()))[0]) for source, _, text in docstrings("zinfer", "tests", "tools")
    ]
    assert len(firsts) > 1000
    assert [first for first in firsts if RIDDLE.match(first[1])] == []
    assert [first for first in firsts if len(first[1].split()) > MAX_WORDS] == []


def test_docstrings_of_functions_begin_with_a_verb() -> None:
    functions = [(source, text) for source, node, text in docstrings("zinfer") if not is_value(node)]
    assert len(functions) > 500
    assert [(source, text[:60]) for source, text in functions if NOUN_PHRASE.match(text)] == []
