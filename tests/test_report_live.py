"""The report as a page that fills while a sweep writes: its answers, whom they are for, and when it is made again."""

import os
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
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
from zinfer.record.store import Header, Record, Store, encode
from zinfer.report.live import LiveServer

pytestmark = pytest.mark.long


class Answer(NamedTuple):
    status: int
    tag: str
    text: str


def ask(address: str, method: str = "GET", path: str = "/", **headers: str) -> Answer:
    with closing(HTTPConnection(urlsplit(address).netloc, timeout=60)) as connection:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return Answer(answer.status, answer.getheader("ETag", ""), answer.read().decode())


def next_page(address: str, last: Answer) -> Answer:
    """Return the page as soon as it is another one."""
    wait(lambda: ask(address, If_None_Match=last.tag).status == 200)
    return ask(address)


def store(path: Path, *records: Record) -> None:
    with Store(path) as file:
        file.append(*records)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve a report on one secret point."""
    folder = tmp_path_factory.mktemp("live")
    store(folder / "a.jsonl", point(case(1), machine="secret"))
    with live(folder, "a.jsonl") as (address, _):
        yield address


def test_the_page_fills_while_a_sweep_writes(tmp_path: Path) -> None:
    path = tmp_path / "results" / "a.jsonl"
    with live(tmp_path, "results") as (address, process):
        page = ask(address)
        assert "results does not exist" in page.text
        assert ask(address, If_None_Match=page.tag) == Answer(304, page.tag, "")
        store(path, Header(machine="h100"))
        page = next_page(address, page)
        assert "no results in results" in page.text, "a sweep has begun, and has no point"
        store(path, point(case(1)))
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
    store(tmp_path / "a.jsonl", point(case(1), machine="secret"))
    assert invoke("report", tmp_path / "a.jsonl", "-o", tmp_path / "r.html").exit_code == 0
    page = re.sub(r"<script>.*</script>\n|; connect-src 'self'; script-src '[^']+'", "", ask(address).text, flags=re.S)
    assert page == (tmp_path / "r.html").read_text()


HOSTS = {
    200: ("127.0.0.1", "127.0.0.1:80", "LOCALHOST:9000", "[::1]:8001"),
    403: ("", "example.com", "127.0.0.1.example.com", "localhost.", "127.0.0.1:80:80", "0.0.0.0"),
}
REQUESTS = (("GET", "/a.jsonl", 404), ("GET", "/../a.jsonl", 404), ("POST", "/", 501), ("HEAD", "/", 501))


@pytest.mark.parametrize(
    ("method", "path", "status", "headers"),
    [
        *(("GET", "/", status, {"Host": host}) for status, hosts in HOSTS.items() for host in hosts),
        *((*request, {}) for request in REQUESTS),
    ],
)
def test_there_is_one_page_and_one_method_for_this_machine_alone(
    address: str, method: str, path: str, status: int, headers: dict[str, str]
) -> None:
    answer = ask(address, method, path, **headers)
    assert answer.status == status
    assert ("secret" in answer.text) is (status == 200)


def test_no_other_address_is_listened_at_and_a_silent_client_keeps_nobody_waiting(address: str) -> None:
    port = urlsplit(address).port or 0
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port)).close()
    with socket.create_connection(("127.0.0.1", port)):
        assert ask(address).status == 200


def test_mistakes_are_one_message(tmp_path: Path, address: str) -> None:
    taken = invoke("report", "--serve", "--port", urlsplit(address).port)
    assert taken.exit_code == ENVIRONMENT
    assert taken.output.startswith("Error: --port ")
    assert "--port 0" in taken.output
    assert invoke("report", "--serve", "-o", tmp_path / "r.html").exit_code == USAGE


@contextmanager
def running(*arguments: Any) -> Iterator[str]:
    """Serve pages that are made by a function; give their address."""
    with LiveServer(0) as server:
        Thread(target=server.run, args=arguments, daemon=True).start()
        wait(lambda: hasattr(server, "page"))
        yield server.address
        server.shutdown()


def test_nobody_waits_for_a_page_to_be_made() -> None:
    made, states, going_on = list[str](), iter(range(100)), Event()

    def make() -> str:
        made.append("page")
        return f"{len(made)}" if len(made) == 1 or going_on.wait(60) else ""

    with running(make, lambda: next(states)) as address:
        first = ask(address)
        wait(lambda: len(made) == 2)
        assert ask(address) == first
        going_on.set()
        assert next_page(address, first).text >= "2"


def test_pages_are_made_where_somebody_asks_and_something_changed_and_not_too_often() -> None:
    state, began = [0], list[float]()

    def make() -> str:
        began.append(monotonic())
        end = process_time() + 0.03
        while process_time() < end:
            pass
        return str(state[0])

    with running(make, lambda: state[0], 0.1) as address:
        ask(address)
        assert len(began) == 1, "nothing has changed"
        state[0] = 1
        assert len(began) == 1, "nobody asks"
        while len(began) < 4:
            ask(address)
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
