"""Damage to files of a checkpoint; the same seed does the same damage."""

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.damage_documents import damaged, torn

Pairs = list[tuple[str, Any]]


def damage_json(dice: random.Random, path: Path) -> str:
    """Damage a value of a JSON file, or its text. Return the damaged text, shortened."""
    if dice.random() < 0.25:
        return damage_text(dice, path)
    text = json.dumps(damaged(dice, json.loads(path.read_bytes())))
    path.write_text(text)
    return text[:300]


def damage_text(dice: random.Random, path: Path) -> str:
    """Damage the bytes of the text file `path`; return them, shortened."""
    path.write_bytes(content := torn(dice, path.read_bytes()))
    return repr(content[:300])


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


def _with_data(header: dict[str, Any]) -> list[str]:
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
    first, other = dice.sample(_with_data(header), 2)
    start, end = header[first]["data_offsets"]
    begin = min(header[other]["data_offsets"][0] + 1, max(0, len(data) - (end - start)))
    if begin == start:
        begin = start - 1 if start else start + 1
    return header | {first: _moved(header[first], begin, begin + end - start)}, data


def _hole(dice: random.Random, header: dict[str, Any], data: bytes) -> tuple[Any, bytes]:
    """Leave a hole of 8 bytes in the middle."""
    at = header[dice.choice(_with_data(header))]["data_offsets"][0]
    moved = {
        name: entry
        if name == "__metadata__" or entry["data_offsets"][0] < at
        else _moved(entry, *(offset + 8 for offset in entry["data_offsets"]))
        for name, entry in header.items()
    }
    return moved, data[:at] + bytes(8) + data[at:]


def _twice(dice: random.Random, header: dict[str, Any], data: bytes) -> tuple[Any, bytes]:
    """Name a tensor twice, with the data of another one."""
    first, other = dice.sample(_with_data(header), 2)
    return [*header.items(), (first, header[other])], data


def _renamed(dice: random.Random, header: dict[str, Any], data: bytes) -> tuple[Any, bytes]:
    """Give a tensor the name of a layer with an endless number."""
    chosen = dice.choice(_with_data(header))
    number = dice.choice("123456789") * dice.choice([10, 25, 5000, 100_000])
    name = dice.choice(
        ["model.layers.{}.mlp.up_proj.weight", "h.{}.ln_1.bias", "model.layers.0.mlp.experts.{}.w1.weight"]
    )
    return {name.format(number) if key == chosen else key: entry for key, entry in header.items()}, data


def _field(name: str, values: tuple[Any, ...]) -> Callable[..., tuple[Any, bytes]]:
    def damaged(dice: random.Random, header: dict[str, Any], data: bytes) -> tuple[Any, bytes]:
        key = dice.choice(_with_data(header))
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
