"""Plain English in docstrings: no riddle at the beginning, and functions that say what they do with a verb."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
FORBIDDEN = re.compile(r"(Of|What|Where|Those|Whether|How|Why)\b|[a-z]")
NOUN_PHRASE = re.compile(r"(The|A|An|This|These|One|Every|Each|Its)\b")


@cache
def docstrings(folder: str) -> list[tuple[str, ast.AST, str]]:
    found: list[tuple[str, ast.AST, str]] = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text is not None:
                    found.append((f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}", node, text))
    return found


def is_value(node: ast.AST) -> bool:
    return not isinstance(node, ast.FunctionDef) or any("property" in ast.unparse(one) for one in node.decorator_list)


def test_docstrings_begin_with_a_word_to_search_for() -> None:
    found = [(place, text) for folder in ("zinfer", "tests", "tools") for place, _node, text in docstrings(folder)]
    assert len(found) > 1000
    assert [(place, text[:60]) for place, text in found if FORBIDDEN.match(text)] == []


def test_docstrings_of_functions_begin_with_a_verb() -> None:
    found = [(place, text) for place, node, text in docstrings("zinfer") if not is_value(node)]
    assert len(found) > 500
    assert [(place, text[:60]) for place, text in found if NOUN_PHRASE.match(text)] == []
