"""Shards: disjoint parts of one job, done by independent processes.

Shard 2 of 4 has the items 2, 6, 10, .. of a job, whichever machine it runs on, and a file of its own:
``out-00002-of-00004.jsonl`` for ``--output out.jsonl``.
"""

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Self, TypeVar

from zinfer.core.errors import INTEGRITY, ZinferError
from zinfer.record.jsonl import AppendLog, StoreError

MAX_SHARDS = 99_999  # shards of a job: five digits in a file's name
LOOK_S = 0.5  # seconds between two looks at a file that another process writes
Item = TypeVar("Item")


class ShardError(ZinferError):
    """Shards that are not the whole of one job. The message says which, and what to do."""

    exit_code = INTEGRITY


class Shard(NamedTuple):
    """Part `number` of `total` of a job; the first is 1."""

    number: int
    total: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the shard that is written as ``2/4``. Raises ValueError."""
        match = re.fullmatch(r"([0-9]{1,5})/([0-9]{1,5})", text)
        shard = cls(*map(int, match.groups())) if match else cls(0, 0)
        if not 1 <= shard.number <= shard.total:
            raise ValueError(f"{text[:60]!r}: write i/n, from 1/n to n/n, with n up to {MAX_SHARDS:,}")
        return shard

    @classmethod
    def all(cls, total: int) -> list[Self]:
        """Return all shards of a job, in order."""
        return [cls(number, total) for number in range(1, total + 1)]

    def __str__(self) -> str:
        return f"{self.number}/{self.total}"

    def of(self, items: Sequence[Item]) -> Sequence[Item]:
        """Return this shard's part of all `items`."""
        return items[self.number - 1 :: self.total]

    def path(self, output: Path) -> Path:
        """Return the path of this shard's file; `output` is the whole job's."""
        return output.with_name(f"{output.stem}-{self.number:05d}-of-{self.total:05d}{output.suffix}")


def shards_begun(output: Path) -> list[Shard]:
    """Return the shards of `output` that have a file, in order. Raises ShardError for shards of two jobs."""
    pattern = re.compile(re.escape(output.stem) + r"-([0-9]{5})-of-([0-9]{5})" + re.escape(output.suffix))
    files = output.parent.iterdir() if output.parent.is_dir() else ()
    begun = sorted(Shard(*map(int, match.groups())) for path in files if (match := pattern.fullmatch(path.name)))
    totals = sorted({shard.total for shard in begun})
    if len(totals) > 1:
        raise ShardError(f"{output} has shards of {' and of '.join(map(str, totals))}: remove those of one job")
    return begun


def whole_split(output: Path) -> list[Shard]:
    """Return all shards of `output`, in order. Raises ShardError unless there is a file of each."""
    begun = shards_begun(output)
    if not begun:
        raise ShardError(f"{output} has no shards: run --shard 1/n to n/n first")
    shards = Shard.all(begun[0].total)
    absent = [str(shard) for shard in shards if shard not in begun]
    if absent:
        names = ", ".join(absent)[:600]
        raise ShardError(f"{output} lacks {len(absent):,} of {len(shards):,} shards: run --shard {names}")
    return shards


def wait_until_free(path: Path, seconds: float) -> None:
    """Wait until no process writes the file `path`, which may be missing. Raises StoreError after `seconds`."""
    deadline = time.monotonic() + seconds
    while path.exists():
        try:
            AppendLog(path).close()
            return
        except StoreError:
            if time.monotonic() > deadline:
                raise
            time.sleep(LOOK_S)
