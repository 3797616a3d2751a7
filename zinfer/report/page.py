"""HTML page of a document in one file, without scripts.

Every text is escaped where it is written, and the page's own policy forbids to load or run whatever slipped through.
"""

import re
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from itertools import count
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup, escape

from zinfer.report.document import Block, Document, Picture
from zinfer.report.plot.style import GREY, GRID, INK
from zinfer.system.printable import printable

LIGHT, DARK = "#ffffff", "#14171b"  # the page's paper
CONTRAST, TEXT_CONTRAST = 3.0, 4.5  # least contrast with the paper, of graphics and of text: WCAG 2.2, 1.4.11 and 1.4.3
# colours of figures that the page names; paper is white in them
_VARIABLES = {"#ffffff": "--paper", INK: "--ink", GREY: "--soft", GRID: "--grid"}
_HEX = re.compile(r"#[0-9a-f]{6}\b")
_SVG, _HREF = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}href"


def html(document: Document) -> str:
    """Return the page with its styles and figures, without invisible characters."""
    figures, styles = count(1), dict[str, str]()

    def drawn(block: Block) -> Block:
        if isinstance(block, Picture):
            return block._replace(svg=embed(block, f"f{next(figures)}", styles))
        return block

    sections = [section._replace(blocks=tuple(map(drawn, section.blocks))) for section in document.sections]
    looks = "".join(f".{name}{{{style}}}\n" for style, name in styles.items())
    page = _template().render(
        document=document._replace(sections=tuple(sections)),
        style=Markup(_file("page.css") + looks),
        papers=[Markup(f"--paper:{paper};{inks(styles, paper)}") for paper in (LIGHT, DARK)],
    )
    return printable(page)


def embed(picture: Picture, name: str, styles: dict[str, str]) -> str:
    """Return the figure as an SVG element for this page.

    Its ids begin with `name`, which must be unique on the page. Its styles become classes, which are added to `styles`
    (declarations -> class) so that all figures share them; their colours are variables, to which `inks` gives values
    for light and for dark paper. The description is the picture's.
    """
    root = ElementTree.fromstring(picture.svg)
    identified = [element for element in root.iter() if "id" in element.attrib]
    renamed = {element.attrib["id"]: f"{name}-{nth}" for nth, element in enumerate(identified)}
    for element in root.iter():
        element.tag = element.tag.removeprefix(_SVG)
        if style := _style(element):
            element.set("class", styles.setdefault(style, f"s{len(styles)}"))
        for key, value in list(element.items()):
            if key == "id":
                element.set(key, renamed[value])
            elif key == _HREF:
                del element.attrib[key]
                element.set("href", f"#{renamed[value.removeprefix('#')]}")
            elif "url(#" in value:
                element.set(key, re.sub(r"url\(#([^)]+)\)", lambda match: f"url(#{renamed[match[1]]})", value))
    width, height = root.get("viewBox", "0 0 1 1").split()[2:]
    root.attrib = {key: root.attrib[key] for key in ("viewBox", "role", "class")}
    root.attrib |= {"width": width, "height": height, "aria-labelledby": f"{name}-title {name}-desc"}
    title, description = root[0], root[1]  # as `render` puts them
    title.set("id", f"{name}-title")
    description.set("id", f"{name}-desc")
    description.text = printable(picture.description)
    return ElementTree.tostring(root, encoding="unicode")


def _style(element: Element) -> str:
    """Remove an element's style; return it with colours as variables.

    They are of text (``t``) or of graphics (``c``).
    """
    style, kind = element.attrib.pop("style", ""), "t" if element.tag == "text" else "c"
    if paint := element.attrib.pop("fill", ""):  # colour of the pattern behind a hatch
        style = f"fill:{paint};{style}"
    style = re.sub(r"font-family:[^;]*;?", "", style)  # the page's own is narrower
    return _HEX.sub(lambda match: f"var({_VARIABLES.get(match[0], f'--{kind}{match[0][1:]}')})", style)


def inks(styles: Iterable[str], paper: str) -> str:
    """Return the colour variables of `styles`, legible on `paper`, as CSS."""
    used = sorted({colour for style in styles for colour in re.findall(r"var\(--([ct])([0-9a-f]{6})\)", style)})
    contrasts = {"c": CONTRAST, "t": TEXT_CONTRAST}
    return "".join(f"--{kind}{hexed}:{readable(f'#{hexed}', paper, contrasts[kind])};" for kind, hexed in used)


def contrast(first: str, second: str) -> float:
    """Return the ratio of two colours' luminances, 1 to 21: https://www.w3.org/TR/WCAG22/#dfn-contrast-ratio."""
    high, low = sorted((_luminance(first), _luminance(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def readable(colour: str, paper: str, min_contrast: float = CONTRAST) -> str:
    """Return `colour`, changed until its contrast with the paper suffices."""
    goal = 255 if _luminance(paper) < 0.2 else 0
    mixed = colour
    for step in range(1, 21):
        if contrast(mixed, paper) >= min_contrast:
            break
        mixed = "#" + "".join(f"{round(part + (goal - part) * step / 20):02x}" for part in _parts(colour))
    return mixed


def prose(text: str) -> Markup:
    """Return a sentence with its backticks as code and everything escaped."""
    parts = text.split("`")
    if len(parts) % 2 == 0:  # a backtick without its partner
        parts[-2:] = ["`".join(parts[-2:])]
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if nth % 2 else escape(part) for nth, part in enumerate(parts)
    )


def shell(text: str) -> Markup:
    """Return shell lines that do not wrap within an option's name."""
    return Markup(re.sub(r"(?<=\s)--?[A-Za-z][A-Za-z-]*", r"<span>\g<0></span>", str(escape(text))))


def columned(mark: str, text: str = "") -> Markup:
    """Return the class of a table's cell: numeric, predicted, or prose."""
    prose = "" if not text else "s" if len(text) < 16 else "m" if len(text) < 60 else "l"
    kind = {"#": "n", "~": "n p"}.get(mark, prose)
    return Markup(f' class="{kind}"') if kind else Markup("")


def _parts(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def _luminance(colour: str) -> float:
    linear = [part / 255 / 12.92 if part <= 10 else ((part / 255 + 0.055) / 1.055) ** 2.4 for part in _parts(colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@cache
def _template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"prose": prose, "shell": shell, "columned": columned, "drawn": Markup}
    environment.filters["form"] = lambda block: type(block).__name__
    return environment.from_string(_file("page.html"))


def _file(name: str) -> str:
    return (files("zinfer.report") / name).read_text(encoding="utf-8")
