"""Shards of a batch job: disjoint parts of one file of requests, answered by jobs that know nothing of each other, and
put together again.

Shard 2 of 4 answers the requests 2, 6, 10, .. of the file, whichever machine it runs on, into a file of its own:
``out-00002-of-00004.jsonl`` for ``--output out.jsonl``, with a .job file beside it as every batch job has one. `merge`
believes none of them: each request must have exactly one answer, from its own shard, of the same job.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

from zinfer.core.errors import INTEGRITY, ZinferError
from zinfer.job.batch.ledger import header_line, job_path, read_job
from zinfer.job.batch.openai import BatchRequest, Done, Fault, decode
from zinfer.record.jsonl import Garbled, StoreError, read_lines
from zinfer.system import atomic

MOST = 99_999  # shards of a job: five digits in a file's name
Line = TypeVar("Line")


class ShardError(ZinferError):
    """Shards that are not the whole of one job; the message says which, and what to do."""

    exit_code = INTEGRITY


class Shard(NamedTuple):
    """Part `number` of `total` of a job's requests; the first is 1."""

    number: int
    total: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the shard that is written as ``2/4``. Raises ValueError."""
        found = re.fullmatch(r"([0-9]{1,5})/([0-9]{1,5})", text)
        shard = cls(*map(int, found.groups())) if found else cls(0, 0)
        if not 1 <= shard.number <= shard.total:
            raise ValueError(f"{text[:60]!r}: write i/n, from 1/n to n/n, with n up to {MOST:,}")
        return shard

    def __str__(self) -> str:
        return f"{self.number}/{self.total}"

    def of(self, lines: Sequence[Line]) -> Sequence[Line]:
        """Return this shard's part of all `lines`."""
        return lines[self.number - 1 :: self.total]

    def path(self, output: Path) -> Path:
        """Return the path of this shard's answers, where `output` is that of the whole job."""
        return output.with_name(f"{output.stem}-{self.number:05d}-of-{self.total:05d}{output.suffix}")


class Merged(NamedTuple):
    """Answers of all shards in the order of the requests, and the lines of files that were no answers."""

    done: list[Done]
    damaged: list[str]


def merge(output: Path, prompts: str, requests: Sequence[BatchRequest | Fault], force: bool = False) -> Merged:
    """Write the answers of all shards of `output` to it, in the order of the requests, with its .job file.

    `prompts` is the digest of the requests' file as .job files have it. Raises ShardError if the shards are not those
    of one job with these requests, if an answer is missing, given twice or of no request, or if `output` has anything
    else and `force` is not set; StoreError if a file cannot be read. `output` is whole or as it was.
    """
    shards = _shards(output)
    header = _header(shards, output, prompts)
    answers: list[bytes] = [b""] * len(requests)
    done: list[Done] = [Done("", False, 0)] * len(requests)
    damaged: list[str] = []
    for shard in shards:
        path = shard.path(output)
        places = {requests[place].id: place for place in shard.of(range(len(requests)))}
        for number, line in enumerate(read_lines(path), start=1):
            try:
                answer = decode(line)
            except Garbled as fault:
                damaged.append(f"{path}:{number}: {fault}")
                continue
            place = places.get(answer.id)
            if place is None:
                raise ShardError(f"{path}:{number} answers no request of shard {shard}: remove that line")
            if answers[place]:
                raise ShardError(f"{path}:{number} answers a request for the second time: remove one of the two lines")
            answers[place], done[place] = line, answer
    lacking = [(shard, sum(not line for line in shard.of(answers))) for shard in shards]
    if missing := sum(count for _, count in lacking):
        again = ", ".join(f"--shard {shard} ({count})" for shard, count in lacking if count)
        raise ShardError(
            f"{missing:,} of {len(requests):,} answers are missing: run these shards again, which go on where they "
            f"ended: {again[:600]}"
        )
    _write(output, b"".join(line + b"\n" for line in answers), header, force)
    return Merged(done, damaged)


def _shards(output: Path) -> list[Shard]:
    """Return all shards of `output`, in order. Raises ShardError unless there is a file of each."""
    pattern = re.compile(re.escape(output.stem) + r"-([0-9]{5})-of-([0-9]{5})" + re.escape(output.suffix))
    files = output.parent.iterdir() if output.parent.is_dir() else ()
    found = {Shard(*map(int, match.groups())) for path in files if (match := pattern.fullmatch(path.name))}
    totals = sorted({shard.total for shard in found})
    if not totals:
        raise ShardError(f"{output} has no shards: answer them with --shard 1/n to n/n first")
    if len(totals) > 1:
        raise ShardError(f"{output} has shards of {' and of '.join(map(str, totals))}: remove those of one job")
    (total,) = totals
    shards = [Shard(number, total) for number in range(1, total + 1)]
    absent = [str(shard) for shard in shards if shard not in found]
    if absent:
        names = ", ".join(absent)[:600]
        raise ShardError(f"{output} lacks {len(absent):,} of {total:,} shards: run --shard {names}")
    return shards


def _header(shards: Sequence[Shard], output: Path, prompts: str) -> bytes:
    """Return the first line of the whole job's .job file: what all shards have in common, and their first start. Raises
    ShardError."""
    common: dict[str, Any] | None = None
    for shard in shards:
        path = job_path(shard.path(output))
        header, _ = read_job(path) if path.exists() else (None, {})
        if header is None:
            raise ShardError(f"{path} does not say which job {shard.path(output).name} belongs to: run the shard again")
        if header.get("shard") != str(shard):
            raise ShardError(f"{path} is that of shard {header.get('shard')}: give each file its own name back")
        if header.get("prompts") != prompts:
            raise ShardError(f"{shard.path(output)} answers another file of prompts")
        if common is None:
            common = header
        for key in sorted((header.keys() | common.keys()) - {"created", "shard"}):
            if header.get(key) != common.get(key):
                change = f"{key}: {common.get(key)} -> {header.get(key)}"
                raise ShardError(f"shards {shards[0]} and {shard} are of different jobs: {change}")
        if isinstance(header.get("created"), int):
            common["created"] = min(common.get("created", header["created"]), header["created"])
    assert common is not None
    return header_line(common | {"shard": None}, common.get("created", 0))


def _write(output: Path, content: bytes, header: bytes, force: bool) -> None:
    """Replace `output` and its .job file, unless it has other answers. Raises ShardError and StoreError."""
    before = output.exists() and output.stat().st_size
    if before and not force and (before != len(content) or output.read_bytes() != content):
        raise ShardError(f"{output} has other answers than the shards: --force replaces it")
    try:
        if not before or force:
            atomic.write(output, content)
        atomic.write(job_path(output), header + b"\n")
    except OSError as error:
        raise StoreError(f"cannot write {output}: {error.strerror}") from error
