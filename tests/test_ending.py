"""Ends of processes: within seconds, in one line, with the exit code of the signal, and with all that was started."""

import os
import pty
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests import PATIENCE_S, alive, environment, wait
from tests.command import python

pytestmark = pytest.mark.long

SOON_S = 3.0

# A command line whose verb does something that can be interrupted.
COMMAND = """
import sys, time, types
stub = types.ModuleType("zinfer.cli")
def main():
    print("ready", flush=True)
    {what}
    print("over", flush=True)
stub.main = main
sys.modules["zinfer.cli"] = stub
from zinfer.__main__ import main
main()
"""
IN_C = "import hashlib; hashlib.pbkdf2_hmac('sha256', b'x', b'x', 1 << 30)"  # not interrupted, unlike a sleep
SWALLOWED = """
    while True:
        try:
            time.sleep(600)
        except BaseException:
            pass
"""
FILE = """
    from pathlib import Path
    from zinfer.system import atomic, scratch
    own = scratch.folder(Path(sys.argv[1]), "weights")
    (own.path / "layer.dat").write_text("x")
    with atomic.writing(Path(sys.argv[1]) / "good") as stream:
        stream.write(b"half")
        print("ready", flush=True)
        time.sleep(600)
"""


def started(what: str, *words: str) -> Any:
    process = python("-c", COMMAND.replace("{what}", what), *words)
    assert process.stdout.readline() == "ready\n"
    return process


def interrupted(process: Any, number: int) -> None:
    """Send a signal and check the end."""
    began = time.monotonic()
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, stderr) == (128 + number, "interrupted\n")
    assert "over" not in stdout
    assert time.monotonic() - began < SOON_S


@pytest.mark.parametrize(
    ("what", "number"), [("time.sleep(600)", signal.SIGINT), (IN_C, signal.SIGTERM), (SWALLOWED, signal.SIGINT)]
)
def test_a_signal_ends_a_command_whatever_it_does(what: str, number: int) -> None:
    interrupted(started(what), number)


def test_what_a_command_has_made_goes_with_it(tmp_path: Path) -> None:
    (tmp_path / "good").write_text("good")
    process = started(FILE, str(tmp_path))
    assert process.stdout.readline() == "ready\n"
    assert len(list(tmp_path.iterdir())) == 3
    interrupted(process, signal.SIGTERM)
    assert [path.name for path in tmp_path.iterdir()] == ["good"]
    assert (tmp_path / "good").read_text() == "good"


def test_a_second_signal_has_the_same_exit_code() -> None:
    process = started("from zinfer.system import ending; ending.at_end(lambda: time.sleep(1)); time.sleep(600)")
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    interrupted(process, signal.SIGINT)


def test_a_signal_while_python_ends_does_not_change_the_exit_code() -> None:
    late = "import weakref; x = type('X', (), {'__del__': lambda self: time.sleep(1)})(); sys.modules['late'] = x"
    process = started(f"{late}; sys.exit(3)")
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, stderr) in {(3, ""), (130, "interrupted\n")}


def test_the_terminal_gets_its_cursor_back() -> None:
    what = "from zinfer.commands.watch import Watch; w = Watch(); w.__enter__(); print('ready'); time.sleep(600)"
    master, slave = pty.openpty()
    script = COMMAND.replace("{what}", what)
    process = python("-c", script, env=environment(TERM="xterm"), stdout=slave, stderr=slave)
    os.close(slave)
    seen = b""
    while seen.count(b"ready") < 2:
        seen += os.read(master, 1 << 12)
    assert b"\x1b[?25l" in seen, "the progress display hides the cursor"
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=PATIENCE_S) == 143
    with suppress(OSError):  # the terminal has no process any more
        while more := os.read(master, 1 << 12):
            seen += more
    os.close(master)
    assert seen.rfind(b"\x1b[?25h") > seen.rfind(b"\x1b[?25l")
    assert seen.endswith(b"interrupted\r\n")


def test_an_import_is_interrupted_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("import sys, time\nprint('importing', flush=True)\ntime.sleep(600)\n")
    env = environment()
    env["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{env['PYTHONPATH']}"
    process = python("-m", "zinfer", "plot", env=env)
    assert process.stdout.readline() == "importing\n"
    interrupted(process, signal.SIGINT)


PROBED = """
import sys
from zinfer.system import local
probe = "import os, sys, time; from zinfer.system.ending import with_parent; with_parent(); "
probe += "print(os.getpid(), file=sys.stderr, flush=True)"
local.PROBE = (sys.executable, "-c", probe + "; time.sleep(600)")
from zinfer.__main__ import main
main()
"""


def test_a_sweep_is_interrupted_in_its_probe(tmp_path: Path) -> None:
    process = python("-c", PROBED, "sweep", "-m", "bloom-tiny", cwd=tmp_path)
    probe = int(process.stderr.readline())
    interrupted(process, signal.SIGINT)
    wait(lambda: not alive(probe), SOON_S)


# A worker that starts a compiler, which starts another program; it writes the ids of all three as one line.
WORKER = """
import os, subprocess, time
from zinfer.system.ending import with_parent
with_parent()
child = subprocess.Popen(["sh", "-c", "trap '' TERM INT; sleep 600 & echo $$ $!; wait"], stdout=subprocess.PIPE)
os.write(1, b"%d %s" % (os.getpid(), child.stdout.readline()))
{then}
"""
PARENT = """
import os, subprocess, sys, time
env = {**os.environ, "ZINFER_PARENT": str(os.getpid())}
subprocess.Popen([sys.executable, "-c", sys.argv[1]], env=env, start_new_session=True).wait()
time.sleep(600)
"""


@pytest.mark.parametrize("way", ["the parent is killed", "the worker is killed", "the worker ends"])
def test_what_a_worker_has_started_ends_with_it(way: str) -> None:
    then = "time.sleep(0.5)" if way == "the worker ends" else "time.sleep(600)"
    parent = python("-c", PARENT, WORKER.replace("{then}", then), stderr=None)
    worker, *compilers = map(int, parent.stdout.readline().split())
    try:
        assert len(compilers) == 2
        assert all(map(alive, compilers))
        if way == "the parent is killed":
            parent.kill()
        elif way == "the worker is killed":
            os.kill(worker, signal.SIGKILL)
        wait(lambda: not any(map(alive, [worker, *compilers])), SOON_S)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()


TAKEN = """
import os, signal, time
from zinfer.system import ending
ending.handle_signals()
for _ in range(20):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(9)
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGINT, before)
        ending.handed_back()
time.sleep(2.5)
print("alive")
"""


def test_a_signal_that_a_context_took_ends_nothing() -> None:
    process = python("-c", TAKEN)
    stdout, stderr = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, stdout) == (0, "alive\n"), stderr
