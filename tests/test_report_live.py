"""The report as a page that fills while a sweep writes: its answers, whom they are for, and when it is made again."""

import os
import re
import signal
import socket
from collections.abc import Iterator
from http.client import HTTPConnection
from itertools import pairwise
from pathlib import Path
from threading import Event, Thread
from time import monotonic, process_time
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest

from tests import invoke, wait
from tests.live import live
from tests.results import case, plain, point
from zinfer.commands.report import _state
from zinfer.commands.results import choose
from zinfer.core.errors import ENVIRONMENT, USAGE
from zinfer.record.store import Header, Store, encode
from zinfer.report.live import LiveServer

pytestmark = pytest.mark.long


class Answer(NamedTuple):
    status: int
    tag: str
    text: str


def ask(address: str, method: str = "GET", path: str = "/", **headers: str) -> Answer:
    connection = HTTPConnection(urlsplit(address).netloc, timeout=60)
    try:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return Answer(answer.status, answer.getheader("ETag", ""), answer.read().decode())
    finally:
        connection.close()


def next_page(address: str, last: Answer) -> Answer:
    """Return the page as soon as it is another one."""
    wait(lambda: ask(address, If_None_Match=last.tag).status == 200)
    return ask(address)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve a report on one secret point."""
    folder = tmp_path_factory.mktemp("live")
    with Store.open(folder / "a.jsonl") as file:
        file.append(point(case(1), machine="secret"))
    with live(folder, "a.jsonl") as (address, _):
        yield address


def test_the_page_fills_while_a_sweep_writes(tmp_path: Path) -> None:
    path = tmp_path / "results" / "a.jsonl"
    with live(tmp_path, "results") as (address, process):
        page = ask(address)
        assert "results does not exist" in page.text
        assert ask(address, If_None_Match=page.tag) == Answer(304, page.tag, "")
        with Store.open(path) as file:
            file.append(Header(machine="h100"))
        page = next_page(address, page)
        assert "no results in results" in page.text, "a sweep has begun, and has no point"
        with Store.open(path) as file:
            file.append(point(case(1)))
        page = next_page(address, page)
        assert "stream cpu, batch 1" in plain(page.text)
        line = encode(point(case(64), 1.4)) + b"\n"
        with path.open("ab") as raw:
            raw.write(line[:500])
            raw.flush()
            half = next_page(address, page)
            assert "stream cpu, batch 1" in plain(half.text)
            assert "a.jsonl, line 3" in half.text
            raw.write(line[500:])
        page = next_page(address, half)
        assert "stream cpu, batch 64" in plain(page.text)
        assert "line 3" not in page.text
        path.unlink()
        assert "no results in results" in next_page(address, page).text
        process.send_signal(signal.SIGINT)
        assert process.communicate() == ("", "interrupted\n")
    assert process.returncode == 130


def test_the_page_is_that_of_the_file_with_a_script(tmp_path: Path, address: str) -> None:
    with Store.open(tmp_path / "a.jsonl") as file:
        file.append(point(case(1), machine="secret"))
    assert invoke("report", tmp_path / "a.jsonl", "-o", tmp_path / "r.html").exit_code == 0
    page = re.sub(r"<script>.*</script>\n|; connect-src 'self'; script-src '[^']+'", "", ask(address).text, flags=re.S)
    assert page == (tmp_path / "r.html").read_text()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:80", "LOCALHOST:9000", "[::1]:8001"])
def test_this_machine_is_answered(address: str, host: str) -> None:
    assert "secret" in ask(address, Host=host).text


@pytest.mark.parametrize(
    "host", ["", "example.com", "127.0.0.1.example.com", "localhost.", "127.0.0.1:80:80", "0.0.0.0"]
)
def test_another_name_that_leads_here_is_refused(address: str, host: str) -> None:
    answer = ask(address, Host=host)
    assert answer.status == 403
    assert "secret" not in answer.text


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/a.jsonl", 404), ("GET", "/../a.jsonl", 404), ("POST", "/", 501), ("HEAD", "/", 501)],
)
def test_there_is_one_page_and_one_method(address: str, method: str, path: str, status: int) -> None:
    answer = ask(address, method, path)
    assert answer.status == status
    assert "secret" not in answer.text


def test_no_other_address_is_listened_at(address: str) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", urlsplit(address).port or 0)).close()


def test_a_client_that_says_nothing_keeps_nobody_waiting(address: str) -> None:
    with socket.create_connection(("127.0.0.1", urlsplit(address).port or 0)):
        assert ask(address).status == 200


def test_mistakes_are_one_message(tmp_path: Path, address: str) -> None:
    taken = invoke("report", "--serve", "--port", urlsplit(address).port)
    assert taken.exit_code == ENVIRONMENT
    assert taken.output.startswith("Error: --port ")
    assert "--port 0" in taken.output
    assert invoke("report", "--serve", "-o", tmp_path / "r.html").exit_code == USAGE


@pytest.fixture
def server() -> Iterator[LiveServer]:
    with LiveServer(0) as server:
        yield server
        server.shutdown()


def running(server: LiveServer, *arguments: Any) -> None:
    Thread(target=server.run, args=arguments, daemon=True).start()
    wait(lambda: hasattr(server, "page"))


def test_nobody_waits_for_a_page_to_be_made(server: LiveServer) -> None:
    made, states, going_on = list[str](), iter(range(100)), Event()

    def make() -> str:
        made.append("page")
        return f"{len(made)}" if len(made) == 1 or going_on.wait(60) else ""

    running(server, make, lambda: next(states))
    first = ask(server.address)
    wait(lambda: len(made) == 2)
    assert ask(server.address) == first
    going_on.set()
    assert next_page(server.address, first).text >= "2"


def test_pages_are_made_where_somebody_asks_and_something_changed_and_not_too_often(server: LiveServer) -> None:
    state, began = [0], list[float]()

    def make() -> str:
        began.append(monotonic())
        end = process_time() + 0.03
        while process_time() < end:
            pass
        return str(state[0])

    running(server, make, lambda: state[0], 0.1)
    ask(server.address)
    assert len(began) == 1, "nothing has changed"
    state[0] = 1
    assert len(began) == 1, "nobody asks"
    while len(began) < 4:
        ask(server.address)
        state[0] += 1
    assert all(later - earlier >= 0.3 for earlier, later in pairwise(began[1:]))


def test_all_files_of_a_report_are_looked_at(tmp_path: Path) -> None:
    part = tmp_path / "out-00001-of-00002.part"
    part.write_text("1")
    chosen = choose(part, None)
    seen = [_state(chosen)]
    for path, text in ((part, "12"), (tmp_path / "accuracy.jsonl", ""), (tmp_path / "machine.json", "{}")):
        path.write_text(text)
        seen.append(_state(chosen))
    os.utime(part, (0, 0))
    part.write_text("21")
    assert len({frozenset(each) for each in [*seen, _state(chosen)]}) == 5
