"""Tables in any terminal: nothing is cut, numbers are whole, and what is left out is named."""

import io
import re
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from tests import invoke
from zinfer.commands.out import Table, wrapped

RECORDS = Path(__file__).parents[1] / "sweeps" / "results" / "nvidia-h100-80gb-hbm3"
COLUMNS = ("configuration", "#batch", "#tok/s", "#TTFT", "#TPOT", "#link share", "#GPU peak", "remark")
ROWS = (
    (
        "stream cpu kv_attention=gpu kv_cache_dtype=bf16",
        "64",
        "122.59 ± 3.2",
        "1.42 s",
        "390 ms",
        "93%",
        "20.3 GiB",
        "",
    ),
    ("deepspeed [cpu]", "128", "494 ± 160", "1.07 s", "67.9 ms", "", "1.0 GiB", ""),
)


def drawn(shown: Table, width: int) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(shown)
    return console.export_text()


@pytest.mark.parametrize("width", [20, 25, 40, 60, 80, 100, 200])
def test_no_width_cuts_a_cell(width: int) -> None:
    text = drawn(Table("title", COLUMNS, ROWS, drop=("GPU peak", "link share")), width)
    assert "…" not in text
    assert max(map(cell_len, text.splitlines())) <= width
    flat = " ".join(text.split())
    gone = re.search(r"left out for want of room: ([^(]*)", flat)
    left_out = [name.strip() for name in gone[1].split(",")] if gone else []
    assert set(left_out) <= {"GPU peak", "link share"}
    for row in ROWS:
        for name, cell in zip(COLUMNS, row, strict=True):
            shown = all(word in text for word in cell.split())
            assert shown or name.lstrip("#") in left_out or width < 25, (name, cell)
    assert "remark" not in text, "a column without content is left out"


def test_columns_go_in_the_order_asked_for_before_rows_become_blocks() -> None:
    shown = Table("", COLUMNS, ROWS, drop=("GPU peak", "link share"))
    assert "left out" not in drawn(shown, 100)
    assert "left out for want of room: GPU peak (" in drawn(shown, 66)
    assert "left out for want of room: GPU peak, link share (" in " ".join(drawn(shown, 60).split())
    blocks = drawn(shown, 40)
    assert "left out" not in blocks
    assert re.search(r"^  GPU peak +20.3 GiB$", blocks, re.M)


@pytest.mark.parametrize("width", [40, 80])
@pytest.mark.parametrize(
    "words",
    [
        ["best", str(RECORDS / "bloom-176b-kv-ways.jsonl"), "--machine", "nvidia-h100-80gb-hbm3"],
        ["compare", str(RECORDS / "dense-peers.jsonl"), str(RECORDS / "dense-peers.jsonl")],
        ["plan", "--list", "models"],
        ["plan", "-m", "opt-30b,llama-3.1-70b", "--machine", "h100-80gb", "--set", "host_bytes=1TB"],
    ],
)
def test_verbs_cut_nothing(words: list[str], width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    done = invoke(*words)
    assert done.exit_code == 0, done.output
    assert "…" not in done.stdout


class Screen(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        return True


def test_prose_is_wrapped_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    text = "The best batch, by far, is 8: measure it\n  with `zinfer sweep -m demo`, where it was not measured.\n"
    assert wrapped(text, io.StringIO()) == text
    lines = wrapped(text, Screen()).split("\n")
    assert max(map(len, lines)) <= 40
    assert lines[0] == "The best batch, by far, is 8: measure it"
    assert all(line.startswith("  ") for line in lines[1:-1])
    assert any("`zinfer sweep -m demo`" in line for line in lines), "a command stays together"
    assert " ".join(" ".join(lines).split()) == " ".join(text.split())
    assert wrapped("x" * 99, Screen()) == "x" * 99
