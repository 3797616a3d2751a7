"""Markdown of a document (``--format md``); tables stand for the figures."""

import re

from zinfer.report.document import Block, Command, Document, Heading, Items, Picture, Section, Signature, Table, Text
from zinfer.system.printable import markdown as plain
from zinfer.system.printable import printable


def markdown(document: Document) -> str:
    """Return the whole document, ending in a newline."""
    parts = [f"# {cell(document.title)}", prose(document.subtitle)]
    for number, section in enumerate(document.sections, start=1):
        parts += _section(number, section)
    return printable("\n\n".join(part for part in parts if part) + "\n")


def cell(text: str, length: int = 200) -> str:
    """Return `text` as one escaped line of a Markdown table, shortened."""
    flat = " ".join(text.split())
    return plain(flat if len(flat) <= length else f"{flat[: length - 1]}…")


def prose(text: str) -> str:
    """Return a sentence, safe as a paragraph; words between backticks stay code.

    A backtick that has no partner, or nothing between itself and it, is text. No two pairs touch: a run of backticks
    would begin and end code elsewhere, and what a pair holds is not escaped.
    """
    parts = " ".join(text.split()).split("`")
    if len(parts) % 2 == 0:  # a backtick without its partner
        parts[-2:] = ["`".join(parts[-2:])]
    written = ""
    for nth, part in enumerate(parts):
        if nth % 2 == 0:
            written += _plain(part)
        elif part.strip():
            written += " " * written.endswith("`") + f"`{part}`"
        else:
            written += r"\`\`"
    return re.sub(r"^(\d*)([-+.)>=])", r"\1\\\2", written)


def _plain(text: str) -> str:
    lead, tail = text[: len(text) - len(text.lstrip())], text[len(text.rstrip()) :]
    return lead + cell(text, len(text) + 1) + (tail if text.strip() else "")


def fenced(text: str) -> str:
    """Return `text` as a fenced block of shell code."""
    fence = "`" * max(3, 1 + max(map(len, re.findall(r"`+", text)), default=0))
    return f"{fence}sh\n{text}\n{fence}"


def _section(number: int, section: Section) -> list[str]:
    return [f"## {number}. {cell(section.title)}", *(_block(block) for block in section.blocks)]


def _block(block: Block) -> str:
    match block:
        case Text(words):
            return prose(words)
        case Heading(words):
            return f"### {cell(words)}"
        case Items(lines):
            return "\n".join(f"- {prose(line)}" for line in lines)
        case Command(text):
            return fenced(text)
        case Table():
            return _table(block)
        case Picture():
            return ""
        case Signature(lines):
            return "\n".join(f"- {cell(line)}: ____________________" for line in lines)


def _table(table: Table) -> str:
    heads = [f"| {' | '.join(cell(title) for title, _ in table.heads)} |"]
    rule = f"|{''.join(' ---: |' if mark else ' --- |' for _, mark in table.heads)}"
    rows = [f"| {' | '.join(map(cell, row.cells))} |" for row in table.rows]
    return f"{prose(table.caption)}\n\n" + "\n".join([*heads, rule, *rows])
