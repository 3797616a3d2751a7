"""Damage to files of a checkpoint; the same seed does the same damage."""

import json
import random
import struct
from pathlib import Path

from tests.damage_documents import damaged, torn


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


def write_header(path: Path, header: object, data: bytes) -> None:
    """Write a safetensors file with any header, or with its text."""
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def damage_header(dice: random.Random, path: Path) -> str:
    """Damage a value of the header of the safetensors file `path`. Return the damaged header, shortened."""
    content = path.read_bytes()
    end = 8 + struct.unpack("<Q", content[:8])[0]
    write_header(path, header := damaged(dice, json.loads(content[8:end])), content[end:])
    return repr(header)[:300]


def damage_bytes(dice: random.Random, path: Path) -> str:
    """Damage bytes of the header of the safetensors file `path`. Return the damage in words.

    (A changed byte of the data is another weight, which nothing in the file tells.)
    """
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
