"""Files that others wrote: what cannot be read, parsed or believed is refused in one line that names file and field."""

import json
import os
from pathlib import Path

import pytest
from pydantic import BaseModel, Field

from zinfer.system.documents import Bounds, DocumentError, parse_json, read_bytes, read_object, read_toml, validate


class Size(BaseModel):
    layers: int = Field(gt=0)


@pytest.mark.parametrize(
    "content",
    [
        b'{"a": 1',
        b'{"a": 1, "a": 2}',
        b'{"a": NaN}',
        b'{"a": 1e400}',
        b'{"a": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b"[" * 65 + b"]" * 65,
        b'{"a": "\xff"}',
        b"",
    ],
)
def test_damaged_json_is_refused_by_name(content: bytes) -> None:
    with pytest.raises(DocumentError, match=r"config\.json"):
        parse_json(content, "config.json")


def test_a_document_is_read_with_its_mark_and_its_infinity(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_bytes(b'\xef\xbb\xbf{"limit": [0.0, Infinity], "n": -9223372036854775808}')
    assert read_object(tmp_path / "c.json", infinite=True) == {"limit": [0.0, float("inf")], "n": -(2**63)}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" + b",".join([b"[]"] * 100) + b"]", "100 texts, lists and objects"),
        (b"[" + b",".join([b'"a"'] * 101) + b"]", "100 texts, lists and objects"),
        (b"{" + b",".join(b'"%d":1' % key for key in range(101)) + b"}", "100 texts, lists and objects"),
        (b"[" + b",".join([b"1"] * 1001) + b"]", "1,000 values"),
        (b'"' * 300, "100 texts"),
        (b"[" * 300, "100 texts"),
    ],
)
def test_a_document_of_too_many_values_is_not_parsed(content: bytes, message: str) -> None:
    with pytest.raises(DocumentError, match=rf"the body is too large: .*{message}"):
        parse_json(content, "the body", bounds=Bounds(1000, 100))


def test_values_and_levels_are_counted_outside_of_texts() -> None:
    """Texts full of commas, brackets, quotes and backslashes count once each."""
    texts = [", " * 2000, "[{" * 2000, '"' * 2000, "\\" * 1999, '\\"[,' * 500, '\\\\"' * 3, ""]
    content = json.dumps({"a": texts, "b": [1] * 900}).encode()
    assert parse_json(content, "the body", bounds=Bounds(1000, 12)) == {"a": texts, "b": [1] * 900}
    with pytest.raises(DocumentError, match="11 texts"):
        parse_json(content, "the body", bounds=Bounds(1000, 11))
    deep = b'["]", ' * 64 + b"1" + b"]" * 64
    assert parse_json(deep, "the body")[0] == "]"
    with pytest.raises(DocumentError, match="nested more than 64"):
        parse_json(b"[" + deep + b"]", "the body")
    with pytest.raises(DocumentError, match="nested more than 64"):
        parse_json(b"[" * 300 + b"}", "the body")


@pytest.mark.parametrize("content", [b"a = ", b"a = " + b"[" * 60_000, b"\xff", b"a = 1\na = 2"])
def test_damaged_toml_is_refused_by_name(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_bytes(content)
    with pytest.raises(DocumentError, match=r"recipe\.toml"):
        read_toml(tmp_path / "recipe.toml")


def test_only_regular_files_of_bounded_size_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "large").write_bytes(b"12345")
    (tmp_path / "loop").symlink_to("loop")
    for path in (tmp_path / "fifo", tmp_path, Path("/dev/zero"), tmp_path / "large", tmp_path / "loop"):
        with pytest.raises(DocumentError, match=path.name):
            read_bytes(path, limit=4)
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "none")


def test_a_bad_value_is_refused_with_its_file_and_field() -> None:
    assert validate(Size, {"layers": 3}, "m.json").layers == 3
    with pytest.raises(DocumentError, match=r"m\.json: layers: .*-1"):
        validate(Size, {"layers": -1}, "m.json")
