"""A document as one HTML file: styles and figures within it, no script, nothing fetched, ready to print.

Every text is escaped where it is written, and the page's own policy forbids whatever slipped through to load or to run.
"""

import re
from functools import cache
from importlib.resources import files

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup, escape

from zinfer.report.document import Document
from zinfer.report.figure import DARK, LIGHT


def html(document: Document) -> str:
    """The page, with styles and figures inside."""
    return _template().render(document=document, style=Markup(_file("page.css")), light=LIGHT, dark=DARK)


def prose(text: str) -> Markup:
    """A sentence with its backticks as code, everything escaped."""
    parts = text.split("`")
    if len(parts) % 2 == 0:  # a backtick without its partner
        parts[-2:] = ["`".join(parts[-2:])]
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if nth % 2 else escape(part) for nth, part in enumerate(parts)
    )


def shell(text: str) -> Markup:
    """Lines for a shell that do not wrap within the name of an option."""
    return Markup(re.sub(r"(?<=\s)--?[A-Za-z][A-Za-z-]*", r"<span>\g<0></span>", str(escape(text))))


def columned(mark: str, text: str = "") -> Markup:
    """The class of a table's cell: numbers flush right, predicted ones shaded, text as wide as it is long."""
    prose = "" if not text else "s" if len(text) < 16 else "m" if len(text) < 60 else "l"
    kind = {"#": "n", "~": "n p"}.get(mark, prose)
    return Markup(f' class="{kind}"') if kind else Markup("")


@cache
def _template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"prose": prose, "shell": shell, "columned": columned, "drawn": Markup}
    environment.filters["form"] = lambda block: type(block).__name__
    return environment.from_string(_file("page.html"))


def _file(name: str) -> str:
    return (files("zinfer.report") / name).read_text(encoding="utf-8")
