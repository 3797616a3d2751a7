"""Control characters, markup and other hostile text in names: no output obeys them, whatever the verb."""

import ast
import io
import json
import re
import sys
import unicodedata
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from xml.etree import ElementTree

import click
import pytest

from tests.damage_documents import NASTY
from tests.fuzz_documents import prepare, run
from tests.results import accuracy_run, case, codec_run, kept_point, point, reuse_run, sweep, traced
from zinfer.commands.out import PlainConsole, Table
from zinfer.core.machine import Machine
from zinfer.record import study
from zinfer.record.measurement import Measurement
from zinfer.record.store import Header, encode
from zinfer.record.study import Text
from zinfer.system.printable import Guard, generated, guarded, printable, show_generated, shows_unicode

EVIL = " ".join(NASTY)
ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(tmp_path)
    monkeypatch.chdir(tmp_path)


def harmful(text: str) -> set[str]:
    """Return control, direction and zero-width characters of `text`."""
    bad = {letter for letter in text if unicodedata.category(letter) in ("Cc", "Cf", "Cs", "Zl", "Zp")}
    return bad - {"\n", "\t"}


def test_every_invisible_character_is_written_out() -> None:
    visible = re.compile("[\u0600-\u0605\u06dd\u070f\u0890\u0891\u08e2\U000110bd\U000110cd\U00013430-\U0001343f]")
    every = "".join(map(chr, [*range(0x1F000), *range(0xE0000, 0xE0200)]))
    assert not harmful(visible.sub("", printable(every)))
    kept = [letter for letter in every if unicodedata.category(letter)[0] in "LMNPS"]
    assert printable("".join(kept)) == "".join(kept)
    assert printable("a\x1b[1m\u202e\tb\n") == "a\\u001b[1m\\u202e\tb\n"
    assert json.loads(printable(json.dumps(EVIL, ensure_ascii=False))) == EVIL, "printed JSON keeps its value"
    text = "می‌خواهم 👩‍👩‍👧 \x1b]0;owned\x07\t\n"
    assert generated(text) == "می‌خواهم 👩‍👩‍👧 \\u001b]0;owned\\u0007\t\n", "a model's text keeps its joiners"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("kind", "shown"),  # click itself takes colours off where there is no terminal
    [(Terminal, "a\\u001b[2Jb\nc\\u001b[2J\n"), (io.StringIO, "a\x1b[2Jb\nc\n")],
)
def test_generated_text_is_changed_on_a_terminal_only(
    kind: type[io.StringIO], shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", stdout := kind())
    with guarded():
        show_generated("a\x1b[2Jb\n")
        click.echo("c\x1b[2J")
    assert stdout.getvalue() == shown


def test_progress_bars_of_others_may_move_the_cursor_and_nothing_else_may() -> None:
    stream = io.StringIO()
    guard = Guard(stream)
    for text in ("\r 5%|#", "\n", "\x1b[A", "\r", "name\rspoof", "x\x1b[A"):
        guard.write(text)
    assert stream.getvalue() == "\r 5%|#\n\x1b[A\rname\\u000dspoofx\\u001b[A"
    with pytest.raises(TypeError):
        guard.write(b"bytes")  # type: ignore[arg-type]


def test_tables_have_no_markup_and_no_controls() -> None:
    stream = io.StringIO()
    PlainConsole(file=stream, width=200).print(Table(EVIL[:40], [EVIL[:30], "#b"], [[text, "1"] for text in NASTY]))
    shown = stream.getvalue()
    assert not harmful(shown)
    assert "[/red][link=http://example.com]" in shown


def hostile(measurement: Measurement, **fields: Any) -> Measurement:
    """Return a point whose every text is hostile."""
    asked = measurement.case.model_copy(update={"model": EVIL, "gpu_weights": "25%"})
    texts = {"machine": EVIL, "error": EVIL, "model_revision": EVIL, "started_at": EVIL, "versions": {EVIL: EVIL}}
    seen = {"shortfall": EVIL, "settings": {EVIL: EVIL}}
    effective = measurement.effective and measurement.effective.model_copy(update=seen)
    gpu = {"throttle_reasons": [EVIL], EVIL: EVIL, "energy_j": 5000.0}
    return measurement.model_copy(update={"case": asked, "effective": effective, "gpu": gpu} | texts | fields)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Provide records, studies and a machine with hostile texts."""
    folder = tmp_path / "sweeps" / "results" / "bad\x1b[31m <img src=x> $$ `x` ![](y) \u202e"
    folder.mkdir()
    odd = case(4, "stream", options=(("weight_codec", "lossless"), (EVIL, EVIL)))
    points = [hostile(measurement) for measurement in (*sweep()[::3], point(odd))]
    points.append(hostile(point(case(2)), timeline=traced()))
    header = Header(machine=EVIL, recipe={"model": [EVIL], EVIL: EVIL, "options": {EVIL: [EVIL]}}, versions={"a": EVIL})
    lines = [encode(header), *map(encode, points), b'{"kind":"\x1b[31m<img src=x>"}', EVIL.encode()]
    (folder / "r\x07 <img src=x> $$ \u202e.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
    reused = reuse_run(kept_point(512, 90.0, 50.0), kept_point(4096, 300.0, 60.0), kept_point(9, 1.0, 2.0), model=EVIL)
    accurate = accuracy_run().model_copy(update={"about": EVIL, "text": Text(name=EVIL, tokens=9)})
    coded = codec_run(EVIL, description=EVIL)
    for name, made in (("codec", coded), ("reuse", reused), ("accuracy", accurate)):
        evil = {"machine": EVIL, "device": EVIL, "versions": {EVIL: EVIL}}
        study.append(folder / f"{name}.jsonl", made.model_copy(update=evil))
    machine = Machine(
        name=EVIL[:200], source="measured", gpu_name=EVIL, gpu_count=1, gpu_bytes=80 << 30, host_bytes=1 << 40,
        h2d_bandwidth=5e10, note=EVIL, sources={"h2d_bandwidth": EVIL}, details={"gpu": {"driver": EVIL}},
    )  # fmt: skip
    (folder / "machine.json").write_text(machine.model_dump_json())
    return folder


def printed(words: list[str], codes: set[int], encoding: str = "utf-8") -> str:
    """Return all that a verb prints, which is something."""
    code, out, err, _ = run(words, encoding=encoding)
    assert code in codes, err
    assert "Internal" not in err
    assert out + err
    return out + err


class Page(HTMLParser):
    """Reader of an HTML page that notes whatever is alive in it."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        drawn = tag == "img" and str(dict(attrs).get("src")).startswith("data:image/svg+xml;base64,")  # runs nothing
        if (tag in ("img", "script", "iframe", "object") and not drawn) or any(n.startswith("on") for n, _ in attrs):
            self.alive.append(f"{tag} {attrs}")
        if any(name in ("href", "src") and not str(value).startswith(("#", "data:")) for name, value in attrs):
            self.alive.append(f"{tag} {attrs}")


@pytest.mark.long
def test_figures_and_reports_of_hostile_names_are_inert(results: Path, tmp_path: Path) -> None:
    output = printed(["plot", str(results), "-o", "drawn", "--format", "svg"], {0})
    drawn = sorted((tmp_path / "drawn").rglob("*.svg"))
    assert len(drawn) >= 4
    for path in drawn:
        assert path.relative_to(tmp_path).as_posix().isascii()
        content = path.read_text(encoding="utf-8")
        assert not harmful(content)
        tags = {element.tag.rsplit("}")[-1] for element in ElementTree.fromstring(content).iter()}
        assert not tags & {"script", "img", "image", "a"}
    assert any("$$" in path.read_text(encoding="utf-8") for path in drawn), "the names are shown, and as they are"
    output += printed(["report", str(results), "-o", "page.html"], {0})
    html = Path("page.html").read_text(encoding="utf-8")
    assert not harmful(output + html)
    page = Page()
    page.feed(html)
    assert page.alive == []


@pytest.mark.parametrize(
    "words",
    [
        ["best", "FOLDER"],
        ["best", "FOLDER", "--json"],
        ["best", "FOLDER", "--model", EVIL.replace("\0", "")],
        ["best", "FOLDER", "--gpu-hour-usd", "2", "--sla", "ttft:p99:<=:1ms"],
        ["best", "FOLDER/none\x1b[2J"],
        ["compare", "FILE", "FILE"],
        ["export", "FILE", "--format", "json"],
        ["plan", "-m", "opt-30b", "--machine", "FOLDER"],
        ["plan", "-m", "opt-30b", "--machine", "FOLDER/nowhere\x1b[2J\u202e"],
        ["plan", "bad"],
        ["plan", "none\x1b[2J"],
        ["sweep", "bad", "--dry-run"],
        ["plan", "--list", "models", "model\x1b[2J\u202e"],
        ["plan", "--list", "models", "m\x9b31m"],
        ["run", "-m", "x\x1b[2J", "-p", "x"],
        ["frobnicate\x1b[2J\u202e"],
        ["plan", "-m", "opt-30b", "--machine", "h200", "--set", "speed\x1b[2J=3"],
        ["plan", "-m", "opt-30b", "--machine", "h200", "--engine", "e\x1b[2J\u202e"],
        ["plan", "-m", "opt-30b", "--machine", "h200", "--calibrate", "FOLDER"],
    ],
)
def test_no_verb_prints_what_a_terminal_obeys(words: list[str], results: Path) -> None:
    file = next(results.glob("r*.jsonl"))
    recipe = {"model": "opt-30b", "description": EVIL, "machine": "h200", "options": {EVIL: EVIL}}
    lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in recipe.items() if key != "options")
    Path("sweeps/bad.toml").write_text(f"{lines}[options]\n{json.dumps(EVIL)} = {json.dumps(EVIL)}\n")
    words = [word.replace("FOLDER", str(results)).replace("FILE", str(file)) for word in words]
    assert not harmful(printed(words, {0, 2, 3, 4, 5, 6}))


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp437", "utf-8"])
@pytest.mark.parametrize(
    "words",
    ["plan --list models", "plan -m opt-30b --machine h200", "best RESULTS", "plan --list models no-such–model"],
)
def test_a_terminal_of_any_encoding_gets_what_it_can_show(words: str, encoding: str, tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    file.write_bytes(b"".join(encode(measurement) + b"\n" for measurement in sweep()))
    assert printed(words.replace("RESULTS", str(file)).split(), {0, 2}, encoding)


def test_an_argument_that_is_no_utf8_is_refused() -> None:
    for words in ("plan --list models a\udcff", "run -m bloom-tiny -p \udcc3\udc28", "best \udcff.jsonl"):
        code, out, err, _ = run(words.split())
        assert (code, out) == (2, "")
        assert "is not UTF-8 text" in err


def test_prompts_that_are_no_utf8_name_their_line() -> None:
    Path("p.txt").write_bytes(b"one\ntwo \xff\n")
    assert "p.txt is not UTF-8 text (byte 8 is 0xff)" in printed(["run", "bloom-tiny", "--prompt-file", "p.txt"], {2})
    code, _, err, _ = run(["run", "-m", "bloom-tiny"], stdin=b"one\ntwo \xff\n")
    assert code == 2
    assert "line 2 of stdin is not UTF-8 text" in err


def test_no_module_goes_around_the_exits() -> None:
    """Hold the rule: consoles are made by `PlainConsole`, and nobody prints."""
    for path in (ROOT / "zinfer").rglob("*.py"):
        name, text = path.relative_to(ROOT / "zinfer").as_posix(), path.read_text(encoding="utf-8")
        if not re.search(r"(print|Console)\(", text):
            continue
        calls = [node.func for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
        called = {func.id for func in calls if isinstance(func, ast.Name)}
        assert name == "commands/out.py" or "Console" not in called, name
        assert not name.startswith(("commands", "report", "analysis", "record")) or "print" not in called, name


def test_json_keeps_its_value_on_a_terminal_that_lacks_its_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    for encoding, expected in (("latin-1", False), ("ascii", False), ("utf-8", True), ("UTF8", True)):
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
        before = sys.stdout, sys.stderr
        with guarded():
            assert isinstance(sys.stdout, Guard)
            assert shows_unicode() is expected
        assert (sys.stdout, sys.stderr) == before


def test_a_folder_that_may_not_be_entered_is_no_internal_error(monkeypatch: pytest.MonkeyPatch) -> None:
    denied = PermissionError(13, "Permission denied", "secret\x07")
    monkeypatch.setattr(Path, "exists", Mock(side_effect=denied))
    code, out, err, _ = run(["best", "secret\x07"])
    assert (code, out, err) == (5, "", "Error: secret\\u0007: Permission denied\n")
