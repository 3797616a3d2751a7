"""HTML report in a browser: no errors, no other files, no wider than the window, legible in light, in dark and on
paper."""

import os
import re
import signal
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests import invoke, mentions, wait
from tests.browser import CHROMIUM, Browser, browsing
from tests.grid import covering
from tests.live import live
from tests.results import case, kept_point, point, reuse_run, sweep
from tests.test_report import WHOLE, store
from zinfer.record import study
from zinfer.record.measurement import Measurement

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[1]
WIDTHS = (1280, 400)
HOSTILE = '"><script>alert(1)</script><img src=http://example.com/x onerror=alert(1)> | `code` [a](b) # *b*'

# Texts whose contrast with the colour behind them is below WCAG's 4.5.
FAINT = """
(() => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true}), known = new Map();
  const parts = colour => {
    if (!known.has(colour)) {
      canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
      known.set(colour, [...canvas.getImageData(0, 0, 1, 1).data]);
    }
    return known.get(colour);
  };
  const linear = part => part <= 10 ? part / 3294.6 : ((part / 255 + .055) / 1.055) ** 2.4;
  const luminance = colour => {
    const [r, g, b] = parts(colour).map(linear);
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const behind = element => {
    for (; element; element = element.parentElement) {
      const colour = getComputedStyle(element).backgroundColor;
      if (parts(colour)[3]) return colour;
    }
    return "white";
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), found = [];
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement, style = getComputedStyle(element);
    if (!walker.currentNode.data.trim() || !element.getClientRects().length) continue;
    const ink = luminance(style.color), paper = luminance(behind(element));
    const ratio = (Math.max(ink, paper) + .05) / (Math.min(ink, paper) + .05);
    if (ratio < 4.5) found.push(`${walker.currentNode.data.trim().slice(0, 40)}: ${ratio.toFixed(2)}`);
  }
  return found;
})()
"""
PICTURES = "[...document.images].map(one => one.complete && one.naturalWidth > 0)"
OPEN = "document.querySelectorAll('details').forEach(one => { one.open = true })"
# Margin boxes of the page rule: Chromium keeps those that it prints.
MARGINS = """
[...document.styleSheets].flatMap(sheet => [...sheet.cssRules]).flatMap(rule => rule.cssRules ? [...rule.cssRules] : [])
  .filter(rule => rule instanceof CSSPageRule).map(rule => rule.cssText).join(" ")
"""
SHEETS = 6  # pages of paper that the report on one model takes at most
# Boxes that reach beyond the window, but for the contents of a table, a figure or a command that scrolls by itself.
OUTSIDE = """
[...document.querySelectorAll("body *")].filter(e => !e.closest(".table *, pre *, .drawing *")).filter(e => {
  const box = e.getBoundingClientRect();
  return box.width && (box.right > innerWidth + 1 || box.left < -1);
}).map(e => e.outerHTML.slice(0, 80))
"""
TABLES = """
[...document.querySelectorAll(".table")].filter(t => t.scrollWidth > t.clientWidth).map(t => t.innerText.slice(0, 60))
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        reason = "no Chromium: apt-get install chromium"
        pytest.fail(reason) if os.environ.get("ZINFER_BROWSER") == "required" else pytest.skip(reason)
    with browsing(tmp_path_factory.mktemp("chromium")) as running:
        yield running


def hostile() -> list[Measurement]:
    """Provide records whose texts are markup, and words longer than a line."""
    long = "x" * 400
    return [
        point(case(1, model=HOSTILE), machine=HOSTILE, versions={HOSTILE: long}),
        point(case(2, model=HOSTILE), machine=HOSTILE, status="crashed", stage=long, error=HOSTILE),
        point(case(1, model=long, engine=HOSTILE, options=((HOSTILE, long),))),
        point(case(2, model=long, engine=HOSTILE, options=((HOSTILE, long),))),
    ]


@pytest.fixture(scope="module", params=["committed", "made", "hostile", "oom"])
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a report on records in git, or on results made up."""
    folder = tmp_path_factory.mktemp(request.param)
    words: list[object] = [folder / "results"]
    if request.param == "committed":
        words = [ROOT / "sweeps" / "results" / "nvidia-h100-80gb-hbm3", "--model", "bloom-176b"]
    else:
        oom = [point(case(1), status="oom_gpu", error="CUDA out of memory")]
        made = {"made": sweep(), "hostile": hostile(), "oom": oom}[request.param]
        store(folder / "results" / "a.jsonl", made, WHOLE)
    assert invoke("report", *words, "-o", folder / "report.html").exit_code == 0
    return folder / "report.html"


def test_a_live_page_fills_while_points_are_appended(browser: Browser, tmp_path: Path) -> None:
    words = "document.querySelector('main').innerText"
    with live(tmp_path, "results") as (address, process):
        seen = browser.open(address)
        assert "Nothing to show yet" in seen.ask("document.body.innerText")
        first = [measured for measured in sweep() if measured.case.offload == "none"]
        store(tmp_path / "results" / "a.jsonl", first)
        study.append(tmp_path / "results" / "reuse.jsonl", reuse_run(kept_point(64, 1, 2)))
        wait(lambda: "no alternative measured" in seen.ask(words))
        place = seen.ask(f"{OPEN}; scrollTo(0, 1e6); scrollY")
        note = f"() => {{ shown = {PICTURES} }}"
        seen.ask(f"new MutationObserver({note}).observe(document.lastChild, {{childList: true}})")
        store(tmp_path / "results" / "a.jsonl", [measured for measured in sweep() if measured not in first])
        wait(lambda: "fastest of 5 configurations" in seen.ask(words))
        assert seen.ask("scrollY") == place > 300
        assert seen.ask("[...document.querySelectorAll('details')].map(one => one.open)") == [True]
        assert seen.ask("shown") == [True], "no picture is still to come"
        assert browser.errors == ()
        process.send_signal(signal.SIGINT)
        wait(lambda: "has ended" in seen.ask("document.body.innerText"))
        assert "fastest of 5 configurations" in seen.ask(words), "the last page stays"


def is_committed(report: Path) -> bool:
    return report.parent.name.startswith("committed")


@pytest.mark.parametrize(("width", "scheme"), covering(WIDTHS, ["light", "dark"]))
def test_the_page_is_quiet_alone_and_fits(browser: Browser, report: Path, width: int, scheme: str) -> None:
    seen = browser.open(report, width, scheme)
    assert seen.errors == ()
    assert [address for address in seen.requests if not address.startswith("data:")] == [report.resolve().as_uri()]
    seen.ask(OPEN)
    assert seen.ask("document.documentElement.scrollWidth") <= width
    assert seen.ask(OUTSIDE) == []
    assert seen.ask(FAINT) == []
    if is_committed(report) and width == max(WIDTHS):
        assert seen.ask(TABLES) == [], "no table scrolls"
    drawn = seen.ask("[...document.querySelectorAll('.drawing img')].map(e => e.getBoundingClientRect().width)")
    assert all(min(width, 640) <= result + 1 for result in drawn), "legible: what does not fit scrolls"


def test_it_prints(browser: Browser, report: Path) -> None:
    seen = browser.open(report, 688, "light")  # A4 less its margins
    browser.send("Emulation.setEmulatedMedia", media="print")
    assert seen.ask("getComputedStyle(document.querySelector('nav')).display") == "none"
    shown = "[...document.querySelectorAll('details')].filter(one => getComputedStyle(one).display != 'none').length"
    assert seen.ask(shown) == 0, "details stay on the screen"
    assert mentions(seen.ask(MARGINS), "capacity report", "counter(page)", "counter(pages)")
    loose = "[...document.querySelectorAll('h2, h3, .caption')].map(one => getComputedStyle(one).breakAfter)"
    assert set(seen.ask(loose)) == {"avoid"}, "no heading stands alone at the end of a sheet"
    if is_committed(report):
        assert seen.ask(TABLES) == []
        height = "document.getElementById('results').getBoundingClientRect().top + scrollY"
        assert seen.ask(height) <= 688 * 264 / 182, "the summary is one page: A4 less its margins"
    browser.send("Emulation.setEmulatedMedia", media="")
    paper = seen.printed()
    assert paper.startswith(b"%PDF-")
    sheets = len(re.findall(rb"/Type /Page\b", paper))
    assert sheets
    assert sheets <= SHEETS or not is_committed(report)
    assert len(paper) < 150_000 * sheets  # of lines and text, as on the screen


def test_every_figure_has_a_name_and_a_table(browser: Browser, report: Path) -> None:
    seen = browser.open(report)
    seen.ask(OPEN)
    nodes = browser.send("Accessibility.getFullAXTree")["nodes"]
    images = [node["name"]["value"] for node in nodes if node["role"]["value"] in ("image", "img")]
    assert len(images) == seen.ask("document.querySelectorAll('figure img').length")
    assert all(images)
    assert seen.ask("[...document.querySelectorAll('figure')].every(f => f.parentElement.querySelector('table'))")
    heads = seen.ask("[...document.querySelectorAll('h1, h2, h3')].map(e => +e.tagName[1])")
    assert heads[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(heads))
