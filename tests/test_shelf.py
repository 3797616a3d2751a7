"""Prefix cache: conversations are kept and found again, with a real engine, within budgets, and after a restart."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import mentions
from tests.running import prefill
from tests.test_parity import load
from zinfer.checkpoint.headers import CheckpointError
from zinfer.engine import kv_file
from zinfer.engine.base import Engine
from zinfer.generation.prefix_cache import PrefixCache

MODEL = {"model": "tiny", "revision": "r1"}
TOKENS = torch.randint(4, 128, (40,), generator=torch.Generator().manual_seed(2)).tolist()


HEADERS = b"[1,2]", b"12", b'{"a":' * 5000 + b"1" + b"}" * 5000, b'{"a": {"data_offsets": [0, 1.5]}}'


@pytest.fixture(scope="module")
def engine(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    loaded = load("stream", checkpoint("llama"), "none", tmp_path_factory.mktemp("engine"))
    yield loaded
    loaded.close()


class Bench:
    """Prefix caches of an engine, and what they say."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.messages = engine, list[str]()

    def size(self, positions: int) -> int:
        return self.engine.plan.model.kv_bytes(1, positions)

    def cache(self, positions: int = 1000, **fields: Any) -> PrefixCache:
        """Return a prefix cache with memory for a number of positions."""
        defaults: dict[str, Any] = {"identity": MODEL, "size": self.size(positions), "folder_size": 1 << 30}
        return PrefixCache(**(defaults | {"on_message": self.messages.append} | fields))

    def run(self, tokens: list[int], cache: PrefixCache | None = None) -> tuple[torch.Tensor, int]:
        """Compute and cache `tokens`. Return the logits after them, and how many were cached before."""
        parts = cache.find(tokens) if cache else []
        ids = torch.tensor([tokens])
        logits = prefill(self.engine, ids, torch.ones_like(ids), past=parts)
        if cache:
            cache.keep(tokens, self.engine, self.engine.batches[-1])
        return logits, sum(part.length for part in parts)

    def check(self, cache: PrefixCache, tokens: list[int], cached: int) -> None:
        logits, count = self.run(tokens, cache)
        assert count == cached
        assert torch.allclose(logits, self.run(tokens)[0], atol=1e-4)


@pytest.fixture
def bench(engine: Engine) -> Bench:
    return Bench(engine)


def test_each_turn_finds_the_one_before_and_an_edited_one_their_beginning(bench: Bench) -> None:
    cache = bench.cache()
    bench.check(cache, TOKENS[:10], 0)
    bench.check(cache, TOKENS[:20], 10)
    bench.check(cache, TOKENS[:35], 20)
    assert cache.held == bench.size(35), "no position is there twice"
    bench.check(cache, TOKENS[:35], 34)
    bench.check(cache, [*TOKENS[:25], 5, 6, 7, 8], 25)
    bench.check(cache, [*TOKENS[:25], 5, 6, 7, 8, 9], 29)
    bench.check(cache, TOKENS[:3], 2)
    assert bench.messages == []
    cache.close()
    assert cache.held == 0


@pytest.mark.parametrize("piece", [1, 7, 1 << 30])
def test_the_last_token_is_always_computed(bench: Bench, piece: int) -> None:
    """`matched` and `find` leave out the last token. Its logits are those of the next one."""
    cache = bench.cache(chunk=piece)
    bench.run(TOKENS[:20], cache)
    for count in (1, 2, 7, 8, 19, 20):
        assert cache.matched(TOKENS[:count]) == sum(part.length for part in cache.find(TOKENS[:count])) == count - 1
    for asked, cached in (([], 0), (TOKENS[:21], 20), ([*TOKENS[:19], 5], 19), ([5], 0)):
        assert cache.matched(asked) == sum(part.length for part in cache.find(asked)) == cached
    assert bench.messages == []


def test_the_least_recently_used_goes_first_and_its_end_before_its_beginning(bench: Bench) -> None:
    cache = bench.cache(positions=40)
    other, third = TOKENS[::-1], [7, *TOKENS[5:]]
    bench.run(TOKENS[:10], cache)
    bench.run(TOKENS[:20], cache)
    bench.run(other[:20], cache)
    assert cache.held == bench.size(40)
    bench.run(third[:10], cache)  # takes the place of the first one's end
    assert cache.held == bench.size(40)
    assert sum(part.length for part in cache.find(TOKENS)) == 10
    assert sum(part.length for part in cache.find(other)) == 20
    bench.run(third[:39], cache)
    assert sum(part.length for part in cache.find(other)) == 0
    assert bench.messages == []
    bench.run([8, *TOKENS, 5], cache)
    assert "limited" in bench.messages[0]


def test_a_beginning_that_two_share_is_there_once_and_the_end_may_go_alone(bench: Bench) -> None:
    """A second conversation parts from the first within a node; ends of both go before the common beginning."""
    cache = bench.cache(positions=50, chunk=8)
    bench.check(cache, TOKENS[:20], 0)
    other = [*TOKENS[:13], *TOKENS[29:13:-1]]
    bench.check(cache, other, 13)
    assert cache.held == bench.size(20 + len(other) - 13)
    bench.check(cache, TOKENS[:20], 19)
    bench.check(cache, other, len(other) - 1)
    assert cache.matched([*TOKENS[:20], 5]) == 20
    bench.check(cache, [*other, *TOKENS[:20]], len(other))  # 50 positions: the end of the first one goes
    assert cache.matched([*TOKENS[:20], 5]) == 13
    assert cache.held <= bench.size(50)
    bench.check(cache, TOKENS[:20], 13)
    assert cache.matched([*other, 5]) == len(other)
    cache.close()
    assert (cache.held, cache.matched(TOKENS)) == (0, 0)


def test_host_memory_that_others_need_is_given_back(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    free = 0
    each = bench.size(1)
    cache = bench.cache(chunk=8, min_free=100)
    monkeypatch.setattr("zinfer.generation.prefix_cache.available_bytes", lambda: free - cache.held)
    bench.run(TOKENS[:10], cache)
    assert cache.held == 0, "no memory but what is to stay free"
    free = 100 + 20 * each
    bench.run(TOKENS[:20], cache)
    assert cache.held == 20 * each
    cache.give_way(0)
    assert cache.held == 20 * each
    cache.give_way(5 * each)
    assert cache.matched(TOKENS) == 8, "the last 12 positions are in two nodes"
    cache.give_way(1 << 40)
    assert cache.held == 0


def test_the_disk_gives_it_back_after_a_restart(bench: Bench, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    cache = bench.cache(folder=folder)
    bench.run(TOKENS[:10], cache)
    bench.run(TOKENS[:30], cache)
    cache.close()
    assert len(list(folder.iterdir())) == 2
    again = bench.cache(folder=folder)
    assert again.held == 0, "nothing is read before it is needed"
    bench.check(again, [*TOKENS[:9], 5, 6], 9)
    bench.check(again, TOKENS[:35], 30)
    again.close()
    small = bench.cache(positions=12, folder=folder)
    bench.check(small, TOKENS[:36], 10)  # as far as memory goes
    small.close()
    assert bench.messages == []


def test_memory_gives_way_to_what_is_on_disk(bench: Bench, tmp_path: Path) -> None:
    cache = bench.cache(positions=25, folder=tmp_path)
    bench.run(TOKENS[:20], cache)
    bench.run(TOKENS[::-1][:20], cache)
    bench.check(cache, TOKENS[:21], 20)
    bench.check(cache, TOKENS[::-1][:21], 20)
    assert cache.held <= bench.size(25)
    cache.close()
    assert bench.messages == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content[:-3], "cut off"),
        (lambda content: content[:-3] + bytes([content[-3] ^ 64]) + content[-2:], "is damaged"),
        (lambda content: content.replace(b'\\"first\\": 0', b'\\"first\\": 9'), None),
        (lambda content: content.replace(b'tokens\\": [', b'tokens\\": [1'), "is damaged|header"),
        (lambda content: b"x" * 100, "is damaged or cut off"),
        (lambda content: b"", "is damaged or cut off"),
        *((lambda _, header=header: len(header).to_bytes(8, "little") + header, "") for header in HEADERS),
    ],
)
def test_a_damaged_file_costs_a_line_and_is_written_again(
    change: Callable[[bytes], bytes], message: str | None, bench: Bench, tmp_path: Path
) -> None:
    cache = bench.cache(folder=tmp_path)
    bench.run(TOKENS[:20], cache)
    cache.close()
    (path,) = tmp_path.iterdir()
    path.write_bytes(change(path.read_bytes()))
    again = bench.cache(folder=tmp_path)
    bench.check(again, TOKENS[:20], 0)
    again.close()
    if message is not None:
        assert len(bench.messages) == 1
        assert bench.messages[0].startswith("skipped: ")
        assert any(words in bench.messages[0] for words in message.split("|"))
    third = bench.cache(folder=tmp_path)
    bench.check(third, TOKENS[:21], 20)


def test_files_of_others_are_left_alone(bench: Bench, tmp_path: Path) -> None:
    cache = bench.cache(folder=tmp_path)
    bench.run(TOKENS[:20], cache)
    cache.close()
    other = bench.cache(folder=tmp_path, identity=MODEL | {"revision": "r2"})
    bench.check(other, TOKENS[:20], 0)
    other.close()
    assert [mentions(note, "skipped", "1 files", str(tmp_path)) for note in bench.messages] == [True]
    assert len(list(tmp_path.iterdir())) == 2
    bench.messages.clear()
    (tmp_path / "0.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    cache = bench.cache(folder=tmp_path)
    bench.check(cache, TOKENS[:21], 20)
    cache.close()
    assert "0.safetensors" in bench.messages[0]


def test_the_disk_has_a_budget_and_may_fail(bench: Bench, tmp_path: Path) -> None:
    cache = bench.cache(folder=tmp_path)
    bench.run(TOKENS[:20], cache)
    (first,) = tmp_path.iterdir()
    cache.close()
    tight = bench.cache(folder=tmp_path, folder_size=first.stat().st_size * 3 // 2)
    bench.run(TOKENS[::-1][:20], tight)
    assert first.exists() is False
    assert len(list(tmp_path.iterdir())) == 1
    bench.check(tight, TOKENS[::-1][:21], 20)
    tight.close()
    assert bench.messages == []
    none = bench.cache(folder=tmp_path, folder_size=10)
    bench.run([9, *TOKENS], none)
    assert "are not written" in bench.messages.pop()
    bench.check(none, [9, *TOKENS, 3], 41)
    none.close()
    bench.messages.clear()
    blocked = tmp_path / "file"
    blocked.write_text("")
    bench.run(TOKENS, bench.cache(folder=blocked))
    assert len(bench.messages) == 1
    assert bench.messages[0].endswith(f"neither read from disk nor written to it: {blocked} is not a folder")


def test_files_that_vanish_are_missed_without_harm(bench: Bench, tmp_path: Path) -> None:
    cache = bench.cache(folder=tmp_path)
    bench.run(TOKENS[:20], cache)
    cache.close()
    again = bench.cache(folder=tmp_path)
    shutil.rmtree(tmp_path)
    bench.check(again, TOKENS[:21], 0)
    assert bench.messages[0].startswith("skipped: ")


def test_a_file_takes_no_more_memory_than_it_has(tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [1, 1, 64, 1], "data_offsets": [0, 256]}
    header = {"__metadata__": {"told": "{}", "crc32": "0"}, **{f"{i}.keys": entry for i in range(99)}}
    text = json.dumps(header).encode()
    path = tmp_path / "bad.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(256))
    with pytest.raises(CheckpointError, match=r"is damaged or cut off"):
        kv_file.read(path, 0, pin=False)


@pytest.mark.parametrize("way", ["fifo", "link", "group", "everyone", "owner"])
def test_a_file_that_others_may_have_written_is_not_believed(bench: Bench, tmp_path: Path, way: str) -> None:
    folder = tmp_path / "kv"
    first = bench.cache(folder=folder)
    bench.check(first, TOKENS[:10], 0)
    first.close()
    assert folder.stat().st_mode & 0o777 == 0o700
    (path,) = folder.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    if way == "owner":
        if os.geteuid():
            pytest.skip("only root can give files away")
        os.chown(path, 12345, -1)
    elif way in {"group", "everyone"}:
        path.chmod(0o620 if way == "group" else 0o602)
    else:
        path.rename(tmp_path / "moved")
        os.mkfifo(path) if way == "fifo" else path.symlink_to(tmp_path / "moved")
    second = bench.cache(folder=folder)
    assert len(bench.messages) == 1
    assert bench.messages[0].startswith(f"skipped: {path} ")
    assert second.find(TOKENS[:10]) == []


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770])
def test_a_folder_that_others_may_write_to_is_not_used(bench: Bench, tmp_path: Path, mode: int) -> None:
    first = bench.cache(folder=tmp_path / "kv")
    bench.run(TOKENS[:10], first)
    first.close()
    (tmp_path / "kv").chmod(mode)
    before = list((tmp_path / "kv").iterdir())
    second = bench.cache(folder=tmp_path / "kv")
    assert len(bench.messages) == 1
    assert mentions(bench.messages[0], "can be written to by other users", "chmod go-w")
    bench.check(second, TOKENS[:20], 0)
    second.close()
    assert list((tmp_path / "kv").iterdir()) == before
