"""Damage to JSON fields, safetensors files and bytes of text; the same seed does the same damage."""

import json
import random
import struct
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

HUGE = (10**9, 2**31, 2**63 - 1, 10**18, 10**30, 1e300)
Pairs = list[tuple[str, Any]]


def _nested(value: Any, levels: int) -> Any:
    for _ in range(levels):
        value = [value]
    return value


FIELD_DAMAGE: dict[str, Callable[[random.Random, Any], Any]] = {
    "null": lambda _, __: None,
    "negative": lambda _, value: -value if isinstance(value, int | float) and value else -1,
    "zero": lambda _, __: 0,
    "huge": lambda dice, __: dice.choice(HUGE),
    "one more": lambda _, value: value + 1 if isinstance(value, int | float) else 1,
    "fraction": lambda _, __: 0.5,
    "text": lambda dice, __: dice.choice(["", "wide", "\x1b[2J", "../../etc/passwd", "someone/code"]),
    "number as text": lambda _, value: str(value) if isinstance(value, int | float) else "12",
    "list": lambda _, value: [value],
    "empty list": lambda _, __: [],
    "object": lambda _, value: {"value": value},
    "empty object": lambda _, __: {},
    "true": lambda _, __: True,
    "nested": lambda dice, value: _nested(value, dice.choice((3, 50, 200))),
    "long": lambda _, value: [value] * 1000,
    "infinity": lambda dice, __: dice.choice((float("inf"), float("-inf"), float("nan"))),
}


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all fields and items in a JSON value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [inner for key, part in inside for inner in [(*path, key), *places(part, (*path, key))]]


def damage_field(dice: random.Random, value: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return a JSON object with one field damaged, and the damage."""
    copy, path = deepcopy(value), dice.choice(places(value))
    outer: Any = copy
    for key in path[:-1]:
        outer = outer[key]
    name = ".".join(map(str, path))
    kind = dice.choice(["drop", *FIELD_DAMAGE])
    if kind == "drop":
        del outer[path[-1]]
    else:
        outer[path[-1]] = FIELD_DAMAGE[kind](dice, outer[path[-1]])
    return copy, f"{name}: {kind}"


def damage_json(dice: random.Random, path: Path) -> str:
    """Damage a field of the JSON file `path`, or its text. Return the damage in words."""
    if dice.random() < 0.25:
        return damage_text(dice, path)
    damaged, what = damage_field(dice, json.loads(path.read_bytes()))
    path.write_text(json.dumps(damaged))
    return what


def damage_text(dice: random.Random, path: Path) -> str:
    """Damage the bytes of the text file `path`; return the damage in words."""
    content = path.read_bytes()
    at = dice.randrange(len(content) + 1)
    what, damaged = dice.choice(
        [
            (f"cut at {at}", content[:at]),
            ("empty", b""),
            (f"no UTF-8 at {at}", content[:at] + b"\xff\xfe" + content[at:]),
            (f"zero bytes at {at}", content[:at] + bytes(8) + content[at:]),
            ("deep", b'{"a":' * 20_000),
            ("twice", content + content),
            ("a number", b"1" * 5000),
            ("a list", b"[]"),
            ("its mark", b"\xef\xbb\xbf" + content),
            (f"a byte at {at}", content[:at] + bytes([dice.randrange(256)]) + content[at + 1 :]),
        ]
    )
    path.write_bytes(damaged)
    return what


def read_header(path: Path) -> tuple[dict[str, Any], bytes]:
    """Return the header of a safetensors file, and its data."""
    content = path.read_bytes()
    end = 8 + struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8:end]), content[end:]


def write_header(path: Path, header: dict[str, Any] | Pairs, data: bytes) -> None:
    """Write a safetensors file with any header; a list of pairs may hold a name twice."""
    pairs = header if isinstance(header, list) else list(header.items())
    text = "{" + ",".join(f"{json.dumps(name)}:{json.dumps(entry)}" for name, entry in pairs) + "}"
    path.write_bytes(struct.pack("<Q", len(text)) + text.encode() + data)


def _moved(entry: dict[str, Any], start: int, end: int) -> dict[str, Any]:
    return entry | {"data_offsets": [start, end]}


def _own(header: dict[str, Any]) -> list[str]:
    """Return the names of tensors that have data, in order."""
    held = [name for name in header if name != "__metadata__" and len(set(header[name]["data_offsets"])) == 2]
    return sorted(held, key=lambda name: header[name]["data_offsets"][0])


def _at_zero(dice: random.Random, header: dict[str, Any], data: bytes) -> tuple[Any, bytes]:
    """Place all tensors at 0."""
    return {
        name: entry if name == "__metadata__" else _moved(entry, 0, entry["data_offsets"][1] - entry["data_offsets"][0])
        for name, entry in header.items()
    }, data


def _shifted(dice: random.Random, header: dict[str, Any], data: bytes) -> tuple[Any, bytes]:
    """Place all tensors a byte later."""
    return {
        name: entry if name == "__metadata__" else _moved(entry, *(offset + 1 for offset in entry["data_offsets"]))
        for name, entry in header.items()
    }, data + b"\0"


def _exchanged(dice: random.Random, header: dict[str, Any], data: bytes) -> tuple[Any, bytes]:
    """Place a tensor over another one."""
    first, other = dice.sample(_own(header), 2)
    start, end = header[first]["data_offsets"]
    begin = min(header[other]["data_offsets"][0] + 1, max(0, len(data) - (end - start)))
    if begin == start:
        begin = start - 1 if start else start + 1
    return header | {first: _moved(header[first], begin, begin + end - start)}, data


def _hole(dice: random.Random, header: dict[str, Any], data: bytes) -> tuple[Any, bytes]:
    """Leave a hole of 8 bytes in the middle."""
    at = header[dice.choice(_own(header))]["data_offsets"][0]
    moved = {
        name: entry
        if name == "__metadata__" or entry["data_offsets"][0] < at
        else _moved(entry, *(offset + 8 for offset in entry["data_offsets"]))
        for name, entry in header.items()
    }
    return moved, data[:at] + bytes(8) + data[at:]


def _twice(dice: random.Random, header: dict[str, Any], data: bytes) -> tuple[Any, bytes]:
    """Name a tensor twice, with the data of another one."""
    first, other = dice.sample(_own(header), 2)
    return [*header.items(), (first, header[other])], data


def _renamed(dice: random.Random, header: dict[str, Any], data: bytes) -> tuple[Any, bytes]:
    """Give a tensor the name of a layer with an endless number."""
    chosen = dice.choice(_own(header))
    number = dice.choice("123456789") * dice.choice([10, 25, 5000, 100_000])
    name = dice.choice(
        ["model.layers.{}.mlp.up_proj.weight", "h.{}.ln_1.bias", "model.layers.0.mlp.experts.{}.w1.weight"]
    )
    return {name.format(number) if key == chosen else key: entry for key, entry in header.items()}, data


def _field(name: str, values: tuple[Any, ...]) -> Callable[..., tuple[Any, bytes]]:
    def damaged(dice: random.Random, header: dict[str, Any], data: bytes) -> tuple[Any, bytes]:
        key = dice.choice(_own(header))
        return header | {key: header[key] | {name: dice.choice(values)}}, data

    return damaged


HEADER_DAMAGE: dict[str, Callable[[random.Random, dict[str, Any], bytes], tuple[Any, bytes]]] = {
    "all at 0": _at_zero,
    "a byte later": _shifted,
    "overlap": _exchanged,
    "hole": _hole,
    "name twice": _twice,
    "name": _renamed,
    "dtype": _field("dtype", ("F128", "", "U8", "F64", None, 3, ["F32"], "F32 ")),
    "shape": _field("shape", ([-1], "8", None, [2**62, 4], [0.5], [True], [[2]], {})),
    "data_offsets": _field("data_offsets", ([0], [8, 0], [-8, 8], None, "0,8", [0, 2**70], [0.0, 8.0], [])),
    "longer data": lambda _, header, data: (header, data + bytes(8)),
    "cut": lambda dice, header, data: (header, data[: dice.randrange(len(data))]),
    "metadata": lambda dice, header, data: (header | {"__metadata__": dice.choice([[], 3, {"a": 1}, "pt"])}, data),
}


def damage_header(dice: random.Random, path: Path, kind: str | None = None) -> str:
    """Make the header of the safetensors file `path` lie. Return the damage in words."""
    kind = kind or dice.choice(list(HEADER_DAMAGE))
    write_header(path, *HEADER_DAMAGE[kind](dice, *read_header(path)))
    return kind


def damage_safetensors(dice: random.Random, path: Path) -> str:
    """Damage the header of the safetensors file `path`, or its bytes. Return the damage in words.

    (A changed byte of the data is another weight, which nothing in the file tells.)
    """
    if dice.random() < 0.5:
        return damage_header(dice, path)
    content = bytearray(path.read_bytes())
    end = 8 + struct.unpack("<Q", content[:8])[0]
    at = dice.randrange(end)
    what = dice.choice(["flip", "cut", "length", "empty"])
    if what == "flip":
        content[at] ^= 1 << dice.randrange(8)
    elif what == "cut":
        del content[at:]
    elif what == "length":
        content[:8] = struct.pack("<Q", dice.choice([0, 1, 2**63, end, len(content), 10**9]))
    else:
        content.clear()
    path.write_bytes(content)
    return f"{what} at {at}"
