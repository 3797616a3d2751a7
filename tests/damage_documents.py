"""Damage to what users and others write: recipes, machine.json, records, requests, options. Seeded, and never the same.

`damaged` changes the value of one field, or of a few, in a tree of plain data; `torn` changes the bytes of a file.
"""

import json
import math
from copy import deepcopy
from random import Random
from typing import Any

# Texts that a terminal, a page, a figure or a table must not obey. None of them may reach an output as it is.
NASTY = (
    "\x1b[2J\x1b]0;title\x07", "\x9b31m", "<img src=x onerror=alert(1)>", "![](http://example.com/x.png)",
    "$$\\frac", "$x^", "a|b", "`<img src=x>``y```", "line\nbreak", "\u202egnp.exe", "zero\u200bwidth\ufeff",
    "\r\x08\x08", "[/red][link=http://example.com]", "=cmd()", "{{ 7 * 7 }}", "%s%n", "../../etc/passwd",
    "</svg><script>", "\u2028", "'; rm -rf ~ #", "--help", "\ufffe\uffff",
)  # fmt: skip
NUMBERS = (
    0, -1, 1, 2, 3.5, -0.0, 1e-300, 1e-9, 1e300, 1e18, 10**9, 10**9 + 1, 2**31, 2**63, 10**30, 10**400, math.inf,
    -math.inf, math.nan, True, False,
)  # fmt: skip


def value(dice: Random) -> Any:
    """Return a value that no field expects."""
    return dice.choice(
        (
            lambda: dice.choice(NUMBERS),
            lambda: dice.choice(NASTY),
            lambda: dice.choice((None, "", " ", "auto", "none", "a" * 100_000, "é" * 300, "\ud800", "0", "1e400GB")),
            lambda: dice.choice(([], {}, [[]], [None], {"": 0}, {"a": {"b": []}})),
            lambda: [dice.choice(NUMBERS) for _ in range(dice.choice((1, 3, 200)))],
            lambda: [f"name-{nth}" for nth in range(dice.choice((2, 50, 2000)))],
            lambda: nested(dice.choice((5, 70, 150))),
        )
    )()


def nested(depth: int) -> Any:
    """Return a list in a list .. `depth` levels deep."""
    tree: Any = 1
    for _ in range(depth):
        tree = [tree]
    return tree


def damaged(dice: Random, tree: Any, times: int = 1) -> Any:
    """Return a damaged copy of plain data. Values in `times` places are replaced, deleted, doubled or added to."""
    copy = deepcopy(tree)
    for _ in range(times):
        places = list(_places(copy))
        if not places:
            return value(dice)
        holder, key = dice.choice(places)
        match dice.randrange(8):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, dict):
                holder[str(dice.choice((*NASTY, "extra", "", "a" * 5000)))] = value(dice)
            case 2 if isinstance(holder, list):
                holder.append(deepcopy(holder[key]))
            case 3 if isinstance(holder[key], int | float):
                holder[key] = holder[key] * dice.choice((-1, 0, 1e-12, 1e12, 1e200))
            case 4 if isinstance(holder[key], str):
                holder[key] += dice.choice(NASTY)
            case _:
                holder[key] = value(dice)
    return copy


def _places(tree: Any) -> Any:
    """Yield each dict or list of a tree with each key."""
    for key, inner in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield tree, key
        yield from _places(inner)


def torn(dice: Random, content: bytes) -> bytes:
    """Return a file's bytes, cut, flipped, doubled or with insertions."""
    at, end = sorted(dice.randrange(len(content) + 1) for _ in range(2))
    put = dice.choice(
        (
            b"\xff\xfe", b"\0", b"\xed\xa0\x80", b"[" * 100_000, b"{" * 500, b'"', b"\n", b"9" * 5000, b"1e400", b"NaN",
            b".".join([b"a"] * 20_000) + b" = 1\n", b"\xef\xbb\xbf", b"\r\n", b" " * 50_000, b"\\u0000", b"\\ud800",
            json.dumps(dice.choice(NASTY)).encode(),
        )
    )  # fmt: skip
    match dice.randrange(6):
        case 0:
            return content[:at]
        case 1:
            return content[:at] + content[end:]
        case 2:
            return content[:at] + put + content[at:]
        case 3:
            return content[:at] + put + content[end:]
        case 4:
            return content + content[at:end]
        case _:
            flipped = bytearray(content or b"\0")
            for _ in range(dice.randrange(1, 5)):
                flipped[dice.randrange(len(flipped))] = dice.randrange(256)
            return bytes(flipped)


def toml(tree: dict[str, Any]) -> bytes:
    """Return plain data as TOML. What TOML does not have, such as null, makes a file that cannot be parsed."""
    return "".join(f"{json.dumps(key)} = {_toml(inner)}\n" for key, inner in tree.items()).encode(
        "utf-8", "surrogatepass"
    )


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(key))} = {_toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=isinstance(value, str) and not value.isprintable())
