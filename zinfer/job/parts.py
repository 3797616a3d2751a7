"""Parts of a sweep: a results file a shard, and their merge.

A part begins as every results file does, with a header that names its shard; a second header, which is `complete`, ends
it. `merge` believes no part: it must be one of this recipe, and have been measured to its end.
"""

from pathlib import Path
from typing import NamedTuple

from zinfer.job.recipe import Sweep
from zinfer.job.shard import Shard, ShardError, shards_begun, whole_split
from zinfer.job.sweep import FINAL, Outcome, Point, key_of, recipe_of
from zinfer.record.jsonl import read_lines
from zinfer.record.store import Header, Store, decode, encode, read


class Part(NamedTuple):
    """Records of a part, in their order. `complete` if its last start came to its end without a damaged line."""

    headers: list[Header]
    points: list[Point]
    complete: bool


def parts_path(output: Path) -> Path:
    """Return the path whose shards (`Shard.path`) are the parts of `output`."""
    return output.with_suffix(".part")


def read_part(output: Path, shard: Shard, sweep: Sweep) -> Part:
    """Return the part of a shard. Raises ShardError for a part of another sweep or shard, StoreError."""
    path = shard.path(parts_path(output))
    headers: list[Header] = []
    points: list[Point] = []
    sound = complete = False
    for line in read_lines(path):
        try:
            record = decode(line)
        except ValueError:
            sound = complete = False
            continue
        if not isinstance(record, Header):
            points.append(record)
            continue
        if record.recipe != recipe_of(sweep):
            raise ShardError(f"{path} is a part of another sweep: remove it, or name the recipe that it was made with")
        if record.shard != str(shard):
            raise ShardError(f"{path} is that of shard {record.shard}: give each file its own name back")
        sound, complete = sound if record.complete else True, sound and record.complete
        headers.append(record)
    if points and not headers:
        raise ShardError(f"{path} does not say which sweep it belongs to: remove it, and run --shard {shard} again")
    return Part(headers, points, complete)


def merge(sweep: Sweep, output: Path, whole: bool = True, force: bool = False) -> Outcome:
    """Append the points of the parts to `output`, once each; return all. Raises ShardError for a foreign part, for an
    `output` of another recipe without `force`, and, if the sweep has to be `whole`, for parts that are missing or not
    complete; StoreError."""
    path = parts_path(output)
    shards = whole_split(path) if whole else shards_begun(path)
    parts = {shard: read_part(output, shard, sweep) for shard in shards}
    if whole and (lacking := [str(shard) for shard, part in parts.items() if not part.complete]):
        again = f"run them again with --resume, and they go on: --shard {', '.join(lacking)[:600]}"
        raise ShardError(f"{len(lacking):,} of {len(shards):,} shards have not ended: {again}")
    headers = _common([header for part in parts.values() for header in part.headers])
    points = [point for part in parts.values() for point in part.points]
    revisions: dict[object, str] = {}
    for point in points:
        model = point.case.model, point.case.layers, point.case.weights
        if revisions.setdefault(model, point.model_revision) != point.model_revision:
            raise ShardError(f"parts have different weights of {point.case.model}: remove those of one revision")
    with Store.open(output) as store:
        before = read(output)
        if before.headers and before.headers[-1].recipe != recipe_of(sweep) and not force:
            raise ShardError(f"{output} has points of another sweep: --force adds to them, -o takes another file")
        starts = {_undated(header) for header in before.headers}
        for header in headers:
            if _undated(header) not in starts:
                store.append(header)
        lines = {*read_lines(output)}
        new = [point for point in points if encode(point) not in lines]
        store.append(*new)
        store.check()
    every = [*before.points, *before.requests, *new]
    last = {key_of(point): point for point in every}  # failures that were tried again are left out
    return Outcome([point for point in every if point.status in FINAL or last[key_of(point)] is point])


def _common(headers: list[Header]) -> list[Header]:
    revisions = {word for header in headers for word in header.model_revision.split(",") if word}
    alike = {"shard": None, "complete": False, "model_revision": ",".join(sorted(revisions))}
    return [*{_undated(header): header.model_copy(update=alike) for header in reversed(headers)}.values()][::-1]


def _undated(header: Header) -> str:
    return f"{header.machine} {sorted(header.versions.items())}"
