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


@pytest.fixture(scope="module")
def engine(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    loaded = load("stream", checkpoint("llama"), "none", tmp_path_factory.mktemp("engine"))
    yield loaded
    loaded.close()


@pytest.fixture
def told() -> list[str]:
    return []


def shelf(engine: Engine, told: list[str], positions: int = 1000, **fields: Any) -> PrefixCache:
    """Return a prefix cache with memory for a number of positions."""
    size = engine.plan.model.kv_bytes(1, positions)
    known: dict[str, Any] = {"identity": MODEL, "size": size, "folder_size": 1 << 30, "on_message": told.append}
    return PrefixCache(**(known | fields))


def run(engine: Engine, tokens: list[int], own: PrefixCache | None = None) -> tuple[torch.Tensor, int]:
    """Return the logits after `tokens`, which are kept then, and the number of them that were found in the cache."""
    parts = own.find(tokens) if own else []
    ids = torch.tensor([tokens])
    logits = prefill(engine, ids, torch.ones_like(ids), past=parts)
    known = sum(part.length for part in parts)
    if own:
        own.keep(tokens, engine, engine.batches[-1])
    return logits, known


def check(engine: Engine, own: PrefixCache, tokens: list[int], known: int) -> None:
    logits, found = run(engine, tokens, own)
    assert found == known
    assert torch.allclose(logits, run(engine, tokens)[0], atol=1e-4)


def test_each_turn_finds_the_one_before_and_an_edited_one_their_beginning(engine: Engine, told: list[str]) -> None:
    own = shelf(engine, told)
    check(engine, own, TOKENS[:10], 0)
    check(engine, own, TOKENS[:20], 10)
    check(engine, own, TOKENS[:35], 20)
    assert own.held == engine.plan.model.kv_bytes(1, 35), "no position is there twice"
    check(engine, own, TOKENS[:35], 34)
    check(engine, own, [*TOKENS[:25], 5, 6, 7, 8], 25)
    check(engine, own, [*TOKENS[:25], 5, 6, 7, 8, 9], 29)
    check(engine, own, TOKENS[:3], 2)
    assert told == []
    own.close()
    assert own.held == 0


@pytest.mark.parametrize("piece", [1, 7, 1 << 30])
def test_the_last_token_is_always_computed(engine: Engine, told: list[str], piece: int) -> None:
    """Its logits are those of the next token, so `matched` and `find` leave it out, however much is kept."""
    own = shelf(engine, told, chunk=piece)
    run(engine, TOKENS[:20], own)
    for count in (1, 2, 7, 8, 19, 20):
        assert own.matched(TOKENS[:count]) == sum(part.length for part in own.find(TOKENS[:count])) == count - 1
    for asked, known in (([], 0), (TOKENS[:21], 20), ([*TOKENS[:19], 5], 19), ([5], 0)):
        assert own.matched(asked) == sum(part.length for part in own.find(asked)) == known
    assert told == []
    own.close()


def test_the_least_recently_used_goes_first_and_its_end_before_its_beginning(engine: Engine, told: list[str]) -> None:
    own = shelf(engine, told, positions=40)
    other, third = TOKENS[::-1], [7, *TOKENS[5:]]
    run(engine, TOKENS[:10], own)
    run(engine, TOKENS[:20], own)
    run(engine, other[:20], own)
    assert own.held == engine.plan.model.kv_bytes(1, 40)
    run(engine, third[:10], own)  # takes the place of the first one's end
    assert own.held == engine.plan.model.kv_bytes(1, 40)
    assert sum(part.length for part in own.find(TOKENS)) == 10
    assert sum(part.length for part in own.find(other)) == 20
    run(engine, third[:39], own)
    assert sum(part.length for part in own.find(other)) == 0
    assert told == []
    run(engine, [8, *TOKENS, 5], own)
    assert "limited" in told[0]
    own.close()


def test_a_beginning_that_two_share_is_there_once_and_the_end_may_go_alone(engine: Engine, told: list[str]) -> None:
    """A second conversation parts from the first within a node; ends of both go before the common beginning."""
    own = shelf(engine, told, positions=50, chunk=8)
    check(engine, own, TOKENS[:20], 0)
    other = [*TOKENS[:13], *TOKENS[29:13:-1]]
    check(engine, own, other, 13)
    assert own.held == engine.plan.model.kv_bytes(1, 20 + len(other) - 13)
    check(engine, own, TOKENS[:20], 19)
    check(engine, own, other, len(other) - 1)
    assert own.matched([*TOKENS[:20], 5]) == 20
    check(engine, own, [*other, *TOKENS[:20]], len(other))  # 50 positions: the end of the first one goes
    assert own.matched([*TOKENS[:20], 5]) == 13
    assert own.held <= engine.plan.model.kv_bytes(1, 50)
    check(engine, own, TOKENS[:20], 13)
    assert own.matched([*other, 5]) == len(other)
    own.close()
    assert (own.held, own.matched(TOKENS)) == (0, 0)


def test_host_memory_that_others_need_is_given_back(
    engine: Engine, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 0
    each = engine.plan.model.kv_bytes(1, 1)
    own = shelf(engine, told, chunk=8, min_free=100)
    monkeypatch.setattr("zinfer.generation.prefix_cache.available_bytes", lambda: free - own.held)
    run(engine, TOKENS[:10], own)
    assert own.held == 0, "no memory but what is to stay free"
    free = 100 + 20 * each
    run(engine, TOKENS[:20], own)
    assert own.held == 20 * each
    own.give_way(0)
    assert own.held == 20 * each
    own.give_way(5 * each)
    assert own.matched(TOKENS) == 8, "the last 12 positions are in two nodes"
    own.give_way(1 << 40)
    assert own.held == 0
    own.close()


def test_the_disk_gives_it_back_after_a_restart(engine: Engine, told: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    own = shelf(engine, told, folder=folder)
    run(engine, TOKENS[:10], own)
    run(engine, TOKENS[:30], own)
    own.close()
    assert len(list(folder.iterdir())) == 2
    again = shelf(engine, told, folder=folder)
    assert again.held == 0, "nothing is read before it is needed"
    check(engine, again, [*TOKENS[:9], 5, 6], 9)
    check(engine, again, TOKENS[:35], 30)
    again.close()
    small = shelf(engine, told, positions=12, folder=folder)
    check(engine, small, TOKENS[:36], 10)  # as far as memory goes
    small.close()
    assert told == []


def test_memory_gives_way_to_what_is_on_disk(engine: Engine, told: list[str], tmp_path: Path) -> None:
    own = shelf(engine, told, positions=25, folder=tmp_path)
    run(engine, TOKENS[:20], own)
    run(engine, TOKENS[::-1][:20], own)
    check(engine, own, TOKENS[:21], 20)
    check(engine, own, TOKENS[::-1][:21], 20)
    assert own.held <= engine.plan.model.kv_bytes(1, 25)
    own.close()
    assert told == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content[:-3], "cut off"),
        (lambda content: content[:-3] + bytes([content[-3] ^ 64]) + content[-2:], "is damaged"),
        (lambda content: content.replace(b'\\"first\\": 0', b'\\"first\\": 9'), None),
        (lambda content: content.replace(b'tokens\\": [', b'tokens\\": [1'), "is damaged|header"),
        (lambda content: b"x" * 100, "not a safetensors file"),
        (lambda content: b"", "not a safetensors file"),
    ],
)
def test_a_damaged_file_costs_a_line_and_is_written_again(
    change: Callable[[bytes], bytes], message: str | None, engine: Engine, told: list[str], tmp_path: Path
) -> None:
    own = shelf(engine, told, folder=tmp_path)
    run(engine, TOKENS[:20], own)
    own.close()
    (path,) = tmp_path.iterdir()
    path.write_bytes(change(path.read_bytes()))
    again = shelf(engine, told, folder=tmp_path)
    check(engine, again, TOKENS[:20], 0)
    again.close()
    if message is not None:
        assert len(told) == 1
        assert told[0].startswith("skipped: ")
        assert any(words in told[0] for words in message.split("|"))
    third = shelf(engine, told, folder=tmp_path)
    check(engine, third, TOKENS[:21], 20)
    third.close()


def test_files_of_others_are_left_alone(engine: Engine, told: list[str], tmp_path: Path) -> None:
    own = shelf(engine, told, folder=tmp_path)
    run(engine, TOKENS[:20], own)
    own.close()
    other = shelf(engine, told, folder=tmp_path, identity=MODEL | {"revision": "r2"})
    check(engine, other, TOKENS[:20], 0)
    other.close()
    assert [mentions(note, "skipped", "1 files", str(tmp_path)) for note in told] == [True]
    assert len(list(tmp_path.iterdir())) == 2
    told.clear()
    (tmp_path / "0.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    own = shelf(engine, told, folder=tmp_path)
    check(engine, own, TOKENS[:21], 20)
    own.close()
    assert "0.safetensors" in told[0]


def test_the_disk_has_a_budget_and_may_fail(engine: Engine, told: list[str], tmp_path: Path) -> None:
    own = shelf(engine, told, folder=tmp_path)
    run(engine, TOKENS[:20], own)
    (first,) = tmp_path.iterdir()
    own.close()
    tight = shelf(engine, told, folder=tmp_path, folder_size=first.stat().st_size * 3 // 2)
    run(engine, TOKENS[::-1][:20], tight)
    assert first.exists() is False
    assert len(list(tmp_path.iterdir())) == 1
    check(engine, tight, TOKENS[::-1][:21], 20)
    tight.close()
    assert told == []
    none = shelf(engine, told, folder=tmp_path, folder_size=10)
    run(engine, [9, *TOKENS], none)
    assert "are not written" in told.pop()
    check(engine, none, [9, *TOKENS, 3], 41)
    none.close()
    told.clear()
    blocked = tmp_path / "file"
    blocked.write_text("")
    run(engine, TOKENS, shelf(engine, told, folder=blocked))
    assert len(told) == 1
    assert told[0].endswith(f"neither read from disk nor written to it: {blocked} is not a folder")


def test_files_that_vanish_are_missed_without_harm(engine: Engine, told: list[str], tmp_path: Path) -> None:
    own = shelf(engine, told, folder=tmp_path)
    run(engine, TOKENS[:20], own)
    own.close()
    again = shelf(engine, told, folder=tmp_path)
    shutil.rmtree(tmp_path)
    check(engine, again, TOKENS[:21], 0)
    assert told[0].startswith("skipped: ")
    again.close()


@pytest.mark.parametrize(
    "header", ["[1,2]", "12", '{"a":' * 5000 + "1" + "}" * 5000, '{"a": {"data_offsets": [0, 1.5]}}']
)
def test_a_file_with_a_wrong_header_costs_a_line(engine: Engine, told: list[str], tmp_path: Path, header: str) -> None:
    text = header.encode()
    (tmp_path / "bad.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    own = shelf(engine, told, folder=tmp_path)
    assert len(told) == 1
    assert "skipped: " in told[0]
    check(engine, own, TOKENS[:10], 0)


def test_a_file_takes_no_more_memory_than_it_has(tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [1, 1, 64, 1], "data_offsets": [0, 256]}
    header = {"__metadata__": {"told": "{}", "crc32": "0"}, **{f"{i}.keys": entry for i in range(99)}}
    text = json.dumps(header).encode()
    path = tmp_path / "bad.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(256))
    with pytest.raises(CheckpointError, match=r"holds no keys and values|header is damaged"):
        kv_file.read(path, 0, pin=False)


def test_files_of_conversations_are_private(engine: Engine, told: list[str], tmp_path: Path) -> None:
    check(engine, shelf(engine, told, folder=tmp_path), TOKENS[:10], 0)
    (path,) = tmp_path.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("way", ["fifo", "link", "group", "everyone", "owner"])
def test_a_file_that_others_may_have_written_is_not_believed(
    engine: Engine, told: list[str], tmp_path: Path, way: str
) -> None:
    folder = tmp_path / "kv"
    first = shelf(engine, told, folder=folder)
    check(engine, first, TOKENS[:10], 0)
    first.close()
    assert folder.stat().st_mode & 0o777 == 0o700
    (path,) = folder.iterdir()
    if way == "owner":
        if os.geteuid():
            pytest.skip("only root can give files away")
        os.chown(path, 12345, -1)
    elif way in {"group", "everyone"}:
        path.chmod(0o620 if way == "group" else 0o602)
    else:
        path.rename(tmp_path / "moved")
        os.mkfifo(path) if way == "fifo" else path.symlink_to(tmp_path / "moved")
    second = shelf(engine, told, folder=folder)
    assert len(told) == 1
    assert told[0].startswith(f"skipped: {path} ")
    assert second.find(TOKENS[:10]) == []
    second.close()


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770])
def test_a_folder_that_others_may_write_to_is_not_used(
    engine: Engine, told: list[str], tmp_path: Path, mode: int
) -> None:
    first = shelf(engine, told, folder=tmp_path / "kv")
    run(engine, TOKENS[:10], first)
    first.close()
    (tmp_path / "kv").chmod(mode)
    before = list((tmp_path / "kv").iterdir())
    second = shelf(engine, told, folder=tmp_path / "kv")
    assert len(told) == 1
    assert mentions(told[0], "can be written to by other users", "chmod go-w")
    check(engine, second, TOKENS[:20], 0)
    second.close()
    assert list((tmp_path / "kv").iterdir()) == before
