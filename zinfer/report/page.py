"""HTML page of a document in one file, without scripts.

Every text is escaped where it is written, and the page's own policy forbids to load or run whatever slipped through; it
names the one script of a live page by its hash.
"""

import re
from base64 import b64encode
from functools import cache
from hashlib import sha256
from importlib.resources import files

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup, escape

from zinfer.report.document import Document
from zinfer.system.printable import printable


def html(document: Document, live: bool = False) -> str:
    """Return the page with its style and figures, without invisible characters. A `live` one replaces itself."""
    script = Markup(_file("page.js")) if live else ""
    digest = b64encode(sha256(script.encode()).digest()).decode()
    style = Markup(_file("page.css"))
    return printable(_template().render(document=document, style=style, script=script, digest=digest))


def image(svg: str) -> str:
    """Return a figure as an address that holds all of it."""
    return f"data:image/svg+xml;base64,{b64encode(svg.encode()).decode()}"


def prose(text: str) -> Markup:
    """Return a sentence with its backticks as code and everything escaped."""
    return Markup(re.sub("`([^`]*)`", r"<code>\1</code>", str(escape(text))))


def shell(text: str) -> Markup:
    """Return shell lines that do not wrap within an option's name."""
    return Markup(re.sub(r"(?<=\s)--?[A-Za-z][A-Za-z-]*", r"<span>\g<0></span>", str(escape(text))))


def columned(mark: str, text: str = "") -> Markup:
    """Return the class of a table's cell: numeric, predicted, or prose."""
    prose = "" if not text else "s" if len(text) < 16 else "m" if len(text) < 60 else "l"
    kind = {"#": "n", "~": "n p"}.get(mark, prose)
    return Markup(f' class="{kind}"') if kind else Markup("")


@cache
def _template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"prose": prose, "shell": shell, "columned": columned, "image": image}
    environment.filters["form"] = lambda block: type(block).__name__
    return environment.from_string(_file("page.html"))


def _file(name: str) -> str:
    return (files("zinfer.report") / name).read_text(encoding="utf-8")
