"""Merge of a batch job's shards (`zinfer.job.shard`) into one file.

Each shard has a .job file next to its answers, as every batch job has one. `merge` believes none of them: each request
must have exactly one answer, from its own shard, of the same job.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from zinfer.job.batch.ledger import header_line, job_path, read_job
from zinfer.job.batch.openai import BatchLine, Done, Fault, decode
from zinfer.job.shard import Shard, ShardError, whole_split
from zinfer.record.jsonl import Garbled, StoreError, read_lines
from zinfer.system import atomic


class Merged(NamedTuple):
    """Answers of all shards, and the lines that were no answers."""

    done: list[Done]
    damaged: list[str]


def merge(output: Path, prompts: str, requests: Sequence[BatchLine | Fault], force: bool = False) -> Merged:
    """Write all answers to `output` in order, or change nothing. `prompts` is the digest of the requests' file. Raises
    ShardError for shards of several jobs or of other requests, for answers that are missing, doubled or foreign, and
    for another `output` without `force`; StoreError."""
    shards = whole_split(output)
    header = _header(shards, output, prompts)
    answers: list[bytes] = [b""] * len(requests)
    done: list[Done] = [Done("", False, 0)] * len(requests)
    damaged: list[str] = []
    for shard in shards:
        path = shard.path(output)
        numbers = {requests[index].id: index for index in shard.of(range(len(requests)))}
        for number, line in enumerate(read_lines(path), start=1):
            try:
                answer = decode(line)
            except Garbled as fault:
                damaged.append(f"{path}:{number}: {fault}")
                continue
            index = numbers.get(answer.id)
            if index is None:
                raise ShardError(f"{path}:{number} answers no request of shard {shard}: remove that line")
            if answers[index]:
                raise ShardError(f"{path}:{number} answers a request for the second time: remove one of the two lines")
            answers[index], done[index] = line, answer
    lacking = [(shard, sum(not line for line in shard.of(answers))) for shard in shards]
    if missing := sum(count for _, count in lacking):
        again = ", ".join(f"--shard {shard} ({count})" for shard, count in lacking if count)
        lack = f"{missing:,} of {len(requests):,} answers are missing"
        raise ShardError(f"{lack}: run these shards again, which go on where they ended: {again[:600]}")
    _write(output, b"".join(line + b"\n" for line in answers), header, force)
    return Merged(done, damaged)


def _header(shards: Sequence[Shard], output: Path, prompts: str) -> bytes:
    """Return the first line of the whole job's .job file. Raises ShardError."""
    headers: list[dict[str, Any]] = []
    for shard in shards:
        path = job_path(shard.path(output))
        header, _ = read_job(path)
        if header is None:
            raise ShardError(f"{path} does not say which job {shard.path(output).name} belongs to: run the shard again")
        if header.get("shard") != str(shard):
            raise ShardError(f"{path} is that of shard {header.get('shard')}: give each file its own name back")
        if header.get("prompts") != prompts:
            raise ShardError(f"{shard.path(output)} answers another file of prompts")
        headers.append(header)
        for key in sorted((header.keys() | headers[0].keys()) - {"created", "shard"}):
            if header.get(key) != headers[0].get(key):
                change = f"{key}: {headers[0].get(key)} -> {header.get(key)}"
                raise ShardError(f"shards {shards[0]} and {shard} are of different jobs: {change}")
    created = [header["created"] for header in headers if isinstance(header.get("created"), int)]
    return header_line(headers[0] | {"shard": None}, min(created, default=0))


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
