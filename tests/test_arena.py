"""Pinned arena: exact size, refused before it is touched when memory is short, freed with its
process."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import PATIENCE_S, Patch, mapping
from zinfer.checkpoint import resolve
from zinfer.checkpoint.architecture import decoder_layers, empty_model
from zinfer.engine import pinned
from zinfer.engine.pinned import CHUNK, HUGE, LOCK_LIMIT, PAGE, PinnedArena, lay_out
from zinfer.worker.session import status_of

HOLD = """
import sys
from zinfer.engine.pinned import PinnedArena
arena = PinnedArena(64 << 20, pin=False)
arena.memory.fill_(7)
print(arena.memory.data_ptr(), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("name", ["bloom-176b", "llama-3.1-405b", "mixtral-8x22b"])
def test_the_locked_bytes_are_the_stored_bytes(name: str) -> None:
    layers = decoder_layers(empty_model(resolve.from_catalogue(name)))[1]
    stored = sum(parameter.nbytes for layer in layers for parameter in layer.parameters())
    size = sum(lay_out(layer.named_parameters())[1] for layer in layers)
    assert stored <= size <= 1.01 * stored


def test_a_killed_process_leaves_nothing(tmp_path: Path) -> None:
    env = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", HOLD], stdin=-1, stdout=-1, text=True, env=env) as process:
        assert process.stdout is not None
        address = int(process.stdout.readline())
        proc = Path(f"/proc/{process.pid}")
        head, *rest = mapping(proc, address)
        files = {os.readlink(link) for link in (proc / "fd").iterdir()}
        process.send_signal(signal.SIGKILL)
        assert process.wait(timeout=PATIENCE_S) == -signal.SIGKILL
    assert head.split()[1] == "rw-p"
    assert head.split()[4] == "0", "no file stands behind it"
    facts = dict(line.split(":", 1) for line in rest)
    assert int(facts["Rss"].split()[0]) >= 64 << 10
    assert {"dc", "dd"} <= set(facts["VmFlags"].split()), "neither forks nor core dumps take it along"
    if Path("/sys/kernel/mm/transparent_hugepage").is_dir():
        assert "hg" in facts["VmFlags"].split()
    assert not any(file.startswith(("/dev/shm", str(tmp_path), "/memfd")) for file in files)
    assert not proc.exists()
    assert list(tmp_path.iterdir()) == []


def test_without_room_nothing_is_touched(monkeypatch: Patch) -> None:
    monkeypatch.setattr(pinned, "available_bytes", lambda: 3_000_000)
    monkeypatch.setattr(PinnedArena, "_touch", lambda *_: pytest.fail("touched"))
    with pytest.raises(MemoryError, match=r"5\.0 MB of host memory are needed, 3\.0 MB are free") as error:
        PinnedArena(5_000_000, pin=False)
    assert all(way in str(error.value) for way in ("--layers", "-O weight_codec=lossless", "--offload nvme"))
    assert status_of(error.value) == "oom_host"
    growing = PinnedArena(5_000_000, pin=False, grow=True)
    with pytest.raises(MemoryError, match="are free"):
        growing.allocate(4_000_000)
    assert growing.used == 0


def test_an_arena_may_be_larger_than_the_memory_at_hand() -> None:
    limit = PinnedArena(1 << 44, pin=False, grow=True)
    assert limit.allocate(PAGE).numel() == PAGE
    limit.seal()
    assert limit.size == PAGE
    limit.close()
    with pytest.raises(MemoryError, match=r"refused to map .* vm.overcommit_memory"):
        PinnedArena(1 << 60, pin=False, grow=True)


class Driver:
    """CUDA's driver: the sizes locked at each address, and sizes that it refuses."""

    def __init__(self, patch: Patch) -> None:
        self.locked, self.refused = dict[int, int](), list[int]()
        self.cudaHostUnregister = self.locked.pop
        patch.setattr("torch.cuda.cudart", lambda: self)

    def cudaHostRegister(self, address: int, size: int, _flags: int) -> int:
        assert address % PAGE == 0
        self.locked[address] = size
        return 2 if size in self.refused else 0

    def cudaGetErrorString(self, _code: int) -> str:
        return "out of memory"


@pytest.mark.parametrize(("size", "hint"), [(PAGE, False), (LOCK_LIMIT, True)])
def test_a_refusal_of_the_driver_names_its_cause(size: int, hint: bool, monkeypatch: Patch) -> None:
    Driver(monkeypatch).refused.append(size)
    monkeypatch.setattr(PinnedArena, "_touch", lambda *_: None)
    monkeypatch.setattr(pinned, "available_bytes", lambda: 1 << 40)
    with pytest.raises(MemoryError, match=r"page-lock .*\(out of memory\); .*--layers") as error:
        PinnedArena(size, pin=True)
    assert ("549.8 GB at once" in str(error.value)) is hint
    assert ("1099.5 GB more are free" in str(error.value)) is not hint


def test_the_whole_arena_is_locked_in_one_piece_and_let_go(monkeypatch: Patch) -> None:
    locked = Driver(monkeypatch).locked
    made = PinnedArena(8 * PAGE, pin=True, grow=True)
    made.allocate(PAGE)
    made.allocate(2 * PAGE + 1)
    assert not made.pinned
    made.seal()
    assert made.pinned
    assert locked == {made.memory.data_ptr(): 3 * PAGE + 1}
    made.close()
    assert locked == {}
    assert torch.numel(made.memory) == 0
    dropped = PinnedArena(3 * PAGE + 1, pin=True)
    assert locked == {dropped.memory.data_ptr(): 3 * PAGE + 1}
    del dropped
    assert locked == {}


def test_a_load_locks_what_it_has_taken_page_by_page(monkeypatch: Patch) -> None:
    driver = Driver(monkeypatch)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.set_device", lambda _device: None)
    monkeypatch.setattr(pinned, "LOCKED_TOGETHER", 2 * PAGE)
    made = PinnedArena(9 * PAGE, pin=True, grow=True)
    start = made.memory.data_ptr()
    for size in (PAGE + 1, PAGE, 5, 7):  # the first and the third end ranges
        made.allocate(size).fill_(size % 251)
        made.lock_taken()
    made.seal()
    assert driver.locked == {start: 2 * PAGE, start + 2 * PAGE: 2 * PAGE, start + 4 * PAGE: 7}
    assert made.size == made.used == 4 * PAGE + 7
    assert made.memory[2 * PAGE : 3 * PAGE + 5].unique().tolist() == sorted({PAGE % 251, 5})
    made.close()
    assert driver.locked == {}
    driver.refused.append(2 * PAGE)
    made = PinnedArena(9 * PAGE, pin=True, grow=True)
    made.allocate(2 * PAGE)
    made.lock_taken()
    with pytest.raises(MemoryError, match="refused to page-lock"):
        made.seal()
    made.close()


READ = """
import sys
from zinfer.engine.pinned import PinnedArena
arena = PinnedArena.attach(int(sys.argv[2]), int(sys.argv[1]))
print(arena.size, arena.used, int(arena.memory.to(int).sum()))
arena.memory[0] = 9
"""


def _huge_bytes(arena: PinnedArena) -> int:
    """Return the bytes of an arena's file mapped in huge pages."""
    _, *rest = mapping(Path("/proc/self"), arena.memory.data_ptr())
    return int(dict(line.split(":", 1) for line in rest).get("ShmemPmdMapped", "0").split()[0]) << 10


def test_shared_memory_has_huge_pages_where_the_system_gives_them() -> None:
    file = os.memfd_create("zinfer")
    size = 2 * CHUNK
    arena = PinnedArena(size, pin=False, shared=file)
    assert arena.memory.data_ptr() % HUGE == 0
    assert not arena.memory.any()
    plain = os.memfd_create("zinfer")
    os.ftruncate(plain, size)
    asked = PinnedArena.attach(size, plain)
    pinned._make_huge(asked.memory[:CHUNK])
    if not _huge_bytes(asked):
        pytest.skip("this system makes no huge pages of shared memory")
    assert _huge_bytes(arena) == size
    other = PinnedArena.attach(size, file)
    assert _huge_bytes(other) == size, "the other processes map them as such, too"
    other.memory[size - 1] = 5
    assert int(arena.memory[size - 1]) == 5
    for made, descriptor in ((arena, file), (asked, plain)):
        made.close()
        os.close(descriptor)
    other.close()


def test_a_shared_arena_is_one_copy_for_all_processes() -> None:
    file = os.memfd_create("zinfer")
    arena = PinnedArena(1 << 26, pin=False, grow=True, shared=file)
    arena.allocate(3 * PAGE).fill_(2)
    arena.seal()
    assert os.fstat(file).st_size == 3 * PAGE, "memory touched ahead is given back"
    words = [sys.executable, "-c", READ, str(file), str(arena.size)]
    process = subprocess.run(words, pass_fds=[file], capture_output=True, text=True, check=True)
    assert process.stdout.split() == [str(3 * PAGE), str(3 * PAGE), str(2 * 3 * PAGE)]
    assert int(arena.memory[0]) == 9
    with pytest.raises(ValueError, match="less than"):
        PinnedArena.attach(4 * PAGE, file)
    arena.close()
    os.close(file)
