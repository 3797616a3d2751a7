"""Memory and caches, read from fabricated kernel files."""

from pathlib import Path

import pytest

from zinfer.system import host
from zinfer.system.host import available_bytes


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")


def test_the_last_caches_of_all_processors_are_one_sum(tmp_path: Path) -> None:
    """Each cache counts once, however many cores share it; a cache without a size counts as zero."""
    assert host.cache_bytes(tmp_path) == 0
    for core, shared in enumerate(("0-1", "0-1", "2-3", "2-3")):
        cache = {"index2/level": "2", "index2/shared_cpu_list": str(core), "index2/size": "2048K"}
        cache |= {"index3/level": "3", "index3/shared_cpu_list": shared, "index3/size": "32768K"}
        write(tmp_path / f"devices/system/cpu/cpu{core}/cache", cache | {"index4/level": "4"})
    assert host.cache_bytes(tmp_path) == 2 * (32 << 20)


V2 = {"memory.max": "6000000", "memory.current": "5000000"}
V2_STAT = "anon 1000000\nactive_file 500000\ninactive_file 1500000\nslab_reclaimable 100000"
V1 = {"memory/job/memory.limit_in_bytes": "6000000", "memory/job/memory.usage_in_bytes": "5000000"}
V1_STAT = "total_cache 9\nactive_file 1\ninactive_file 1\ntotal_active_file 500000\ntotal_inactive_file 1500000"


@pytest.mark.parametrize(
    ("groups", "files", "kib", "free"),
    [
        ("0::/", {"memory.max": "max"}, (8000, 5000, 100), 5100 * 1024),
        ("0::/", {}, (8000, 5000, 0), 5000 * 1024),
        # the group's page cache can be freed, its other memory cannot
        ("0::/", V2 | {"memory.stat": V2_STAT}, (8000, 5000, 0), 6_000_000 - 5_000_000 + 2_100_000),
        ("4:memory:/job\n0::/", V1 | {"memory/job/memory.stat": V1_STAT}, (8000, 5000, 0), 3_000_000),
        # a group below with little room
        (
            "0::/a",
            V2 | {"a/memory.max": "90", "a/memory.current": "70", "a/memory.stat": "anon 1"},
            (8000, 5000, 0),
            20,
        ),
        ("0::/a", V2 | {"a/memory.max": "90", "a/memory.current": "99", "a/memory.stat": "anon 1"}, (8000, 5000, 0), 0),
        # a limit without a use counts whole, and so does the machine's free memory
        ("0::/", {"memory.max": "6000000"}, (8000, 5000, 0), 5000 * 1024),
        # less memory than the limit: more comes as it is used
        ("0::/", V2 | {"memory.stat": V2_STAT}, (1000, 300, 0), 3_100_000),
    ],
)
def test_available_memory(
    groups: str, files: dict[str, str], kib: tuple[int, int, int], free: int, tmp_path: Path
) -> None:
    total, available, swap = kib
    meminfo = (
        f"MemTotal: {total} kB\nMemFree: 1 kB\nMemAvailable: {available} kB\nSwapFree: {swap} kB\nHugePages_Total: 0"
    )
    write(tmp_path, {"proc/meminfo": meminfo, "proc/self/cgroup": groups})
    write(tmp_path / "cgroup", files)
    assert available_bytes(tmp_path / "proc", tmp_path / "cgroup") == free


@pytest.mark.parametrize(
    ("groups", "folder", "file"),
    [("0::/job", "", "memory.events"), ("4:memory:/job\n0::/", "memory", "memory.oom_control")],
)
def test_kills_for_want_of_memory_count_in_the_own_group_alone(
    groups: str, folder: str, file: str, tmp_path: Path
) -> None:
    write(tmp_path, {"groups": groups})
    assert host.oom_kills(tmp_path / "groups", tmp_path) == 0
    write(tmp_path / folder, {file: "low 1\noom_kill 4"})
    assert host.oom_kills(tmp_path / "groups", tmp_path) == 4  # a container may see no other group
    write(tmp_path / folder / "job", {file: "low 1\noom_kill 2"})
    assert host.oom_kills(tmp_path / "groups", tmp_path) == 2


@pytest.mark.parametrize(
    ("total", "limit", "usable"), [(8, None, 8), (8, 5, 5), (31, 256, 256), (126, 128, 126), (128, 128, 128)]
)
def test_the_limit_tells_what_a_process_may_use(
    total: int, limit: int | None, usable: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "memory_total", lambda: total)
    monkeypatch.setattr(host, "memory_limit", lambda: limit)
    assert host.host_bytes() == usable
