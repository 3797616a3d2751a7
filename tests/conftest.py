"""Fixtures that several test files share."""

import gc
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import HealthCheck, settings

from tests.forked import executed, forked, ranks_forked
from tests.quick import Quick
from zinfer.record import store

imported = 0  # modules when the collector last froze
FIXTURES = executed, forked, ranks_forked
gc.disable()  # until `pytest_collection_finish`
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in zinfer.worker.process, and before torch is imported
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell that runs the tests in the background ignores it
    signal.signal(signal.SIGINT, signal.default_int_handler)

# As `make test` does: compiling what is imported takes longer than importing it, here and in each process.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

os.environ["COLUMNS"] = "80"  # printed tables are as wide as without a terminal
for name in ("FORCE_COLOR", "NO_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
    os.environ.pop(name, None)
if not os.access(os.path.expanduser("~"), os.W_OK | os.X_OK):  # caches of zinfer, Triton and others
    HOME = TemporaryDirectory(prefix="zinfer-tests-")
    os.environ["HOME"] = HOME.name
# Files that come first, so that no process is left alone with one of them at the end.
LONG = (
    "accuracy", "cache_kinds", "chat", "cli", "cluster", "codec", "continuous", "draft_model", "ending", "low_bit",
    "nvme", "packed", "parts", "quantized", "report", "requests", "state", "stream", "streams", "team",
    "team_ways", "tensorrt", "tokenizer_process", "worker",
)  # fmt: skip
STATE = TemporaryDirectory(prefix="zinfer-state-")  # scratch of the tests, apart from that of the user
os.environ["XDG_STATE_HOME"] = STATE.name
settings.register_profile("zinfer", deadline=None, suppress_health_check=[HealthCheck.too_slow])  # whatever the load
settings.load_profile("zinfer")


@pytest.fixture(scope="session", autouse=True)
def _records_decoded_once() -> Iterator[None]:
    """Decode each line of the committed records once in a process: dozens of tests read all of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "decode", lru_cache(maxsize=1024)(store.decode))
        yield


@pytest.fixture(scope="session", autouse=True)
def _little_is_copied(pytestconfig: pytest.Config) -> Iterator[None]:
    """Copy 1 MiB, not 256, to measure a link; all where there is a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        if not os.path.exists("/dev/nvidiactl") and not pytestconfig.getoption("quick"):
            patch.setattr("zinfer.worker.probe.MIB", 1 << 12)
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run the tests in the random order that SEED gives")
    parser.addoption("--quick", action="store_true", help="run only the tests that load no torch and draw little")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("quick"):
        config.pluginmanager.register(Quick())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.stem.removeprefix("test_") not in LONG)
    if (seed := config.getoption("shuffle")) is not None:
        random.Random(seed).shuffle(items)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let the garbage collector look only at what the tests make: not at the libraries, 0.3 s each time."""
    global imported
    gc.freeze()
    gc.enable()
    imported = len(sys.modules)


def pytest_runtest_setup() -> None:
    """Freeze what was imported since, too. What is frozen is never collected, so collect first."""
    global imported
    if len(sys.modules) > imported + 20:
        gc.collect()
        gc.freeze()
        imported = len(sys.modules)


def pytest_unconfigure() -> None:
    gc.unfreeze()  # else some libraries complain at the end that their objects are still there


@pytest.fixture(autouse=True)
def _engines_are_closed() -> Iterator[None]:
    """Close all engines that a test has constructed; safe for those that it closed itself."""
    base: Any = sys.modules.get("zinfer.engine.base")  # imported, with torch, only by the files that need it
    if base is None:
        yield
        return
    construct, opened = base.Engine.__init__, list[Any]()

    def constructed(self: Any, *args: Any, **settings: Any) -> None:
        opened.append(self)
        construct(self, *args, **settings)

    base.Engine.__init__ = constructed
    yield
    base.Engine.__init__ = construct
    for engine in reversed(opened):
        engine.close()


@pytest.fixture
def all_coded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in an empty folder, and code small weights too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("zinfer.engine.stream.weights.codec.MIN_NUMEL", 0)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that makes a checkpoint of `ARCHITECTURES` once. Tests must not change the folder."""

    @cache
    def make(architecture: str, hidden_size: int = 64) -> Path:
        from tests.checkpoints import save_checkpoint

        return save_checkpoint(architecture, tmp_path_factory.mktemp(architecture), hidden_size)

    return make


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, str], Mock]:
    """Return a function that watches one of an object: its calls are those of a Mock."""

    def watch(owner: Any, name: str) -> Mock:
        watched = Mock(side_effect=getattr(owner, name))
        monkeypatch.setattr(owner, name, lambda *given, **named: watched(*given, **named))  # binds, unlike a Mock
        return watched

    return watch


@pytest.fixture(scope="module")
def by_kernel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return what `main` of the test's module saves under Triton's interpreter."""
    import torch

    from tests.interpreter import interpreted

    path = tmp_path_factory.mktemp("kernel") / "results"
    interpreted(request.module.__name__, path)
    return torch.load(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Provide an empty folder of a user whose machine was probed already."""
    from tests.command import probed

    probed(tmp_path)
    return tmp_path
