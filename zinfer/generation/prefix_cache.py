"""Prefix cache: keys and values of conversations, kept for their next turn in host memory and optionally on disk.

A turn reuses the longest prefix that it shares with any kept conversation, so that edited turns, and conversations with
the same system prompt, are served too. A turn that continues a kept conversation adds only its new tokens; one that
parts from it shares its beginning, if that is in memory alone. Memory and disk have a budget each; the least recently
used nodes are dropped first, ends before beginnings.
"""

import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import ValidationError

from zinfer.checkpoint.headers import CheckpointError
from zinfer.checkpoint.source import revision_of
from zinfer.core.units import gb
from zinfer.core.value import Frozen
from zinfer.engine import EngineError, kv_file
from zinfer.engine.base import Engine, MicroBatch
from zinfer.engine.kv_snapshot import KVSnapshot
from zinfer.generation import tuning
from zinfer.generation.radix_tree import Node, RadixTree, digest
from zinfer.plan.planner import Plan
from zinfer.system.host import available_bytes

FORMAT = 1
OURS = re.compile(r"[0-9a-f]{32}\.safetensors")


class Label(Frozen):
    """Label of a file: the model that its keys and values come from, and their tokens."""

    format: int
    identity: Mapping[str, str]  # identity of the model
    parent: str  # digest of the tokens before
    first: int  # position of the first token
    tokens: tuple[int, ...]
    bytes: int


class KeptFolder(NamedTuple):
    """Folder whose files hold up to `size` bytes of keys and values."""

    path: Path
    size: int


def cache_identity(plan: Plan) -> dict[str, str]:
    """Return what identifies a model's keys and values on any engine."""
    spec = plan.model
    return {
        "model": Path(spec.name).name,
        "revision": revision_of(spec, plan.case.load_format),
        "dtype": spec.dtype,
        "layers": str(spec.num_layers),
    }


class PrefixCache:
    """Cache of one model's keys and values, in memory and on disk. It holds up to `size` bytes in memory and
    `folder_size` bytes in `folder`, for the model that `identity` describes. What is kept at a time is divided into
    nodes of at most `chunk` tokens, so that the end of it may be dropped alone. `min_free` bytes of host memory stay
    free, whatever the size is. `on_message` gets a line of text for everything that cannot be kept or read; no error is
    raised for it.
    """

    def __init__(
        self,
        identity: Mapping[str, str],
        size: int,
        folder: Path | None = None,
        folder_size: int = 0,
        on_message: Callable[[str], object] = str,
        pin: bool = False,
        chunk: int = 1 << 30,
        min_free: int = 0,
    ) -> None:
        self.held = 0  # bytes in memory
        self.version = 0  # changes with what `matched` returns
        self._identity, self._size, self._folder, self._folder_size = dict(identity), size, folder, folder_size
        self._on_message, self._pin, self._chunk, self._min_free = on_message, pin, chunk, min_free
        self._memory: dict[Node, None] = {}  # nodes in memory, the least recently used first
        self._tree = RadixTree(f"{FORMAT} {sorted(self._identity.items())}")
        self._clock = count(1)
        if folder is not None:
            try:
                kv_file.private_folder(folder)
                self._list(folder)
            except (CheckpointError, OSError) as error:
                self._folder = None
                self._on_message(f"conversations are neither read from disk nor written to it: {error}")

    def matched(self, tokens: Sequence[int]) -> int:
        """Return the longest kept prefix of `tokens`, less the last token."""
        return sum(length for _, length in self._tree.match(tokens[:-1]))

    def find(self, tokens: Sequence[int]) -> list[KVSnapshot]:
        """Load and return the snapshots of the longest kept prefix, in order. The prefix leaves out at least the last
        token, which has to be computed. The snapshots are valid until the next call of `find` or `keep`."""
        path = self._tree.match(tokens[:-1])
        spare = {node for node, _ in path}
        parts: list[KVSnapshot] = []
        for node, length in path:
            if node.kept is None and not self._load(node, spare):
                break
            parts.append(node.kept if length == len(node.tokens) else node.kept.head(length))
        self._touch(node for node, _ in path)
        return parts

    def keep(self, tokens: Sequence[int], engine: Engine, batch: MicroBatch, row: int = 0) -> None:
        """Keep the keys and values of `tokens` that are not kept yet; `tokens` are the first ones of `row` in `batch`,
        a micro-batch on `engine`."""
        path = self._tree.match(tokens)
        whole = [node for node, length in path if length == len(node.tokens)]
        if sum(length for _, length in path) == len(tokens):
            self._touch(whole)
            return
        if len(whole) < len(path) and (head := self._split(*path[-1])) is not None:
            whole.append(head)
        begin = whole[-1].last if whole else 0
        for first in range(begin, len(tokens), self._chunk):
            parent = whole[-1] if whole else self._tree.root
            part = tuple(tokens[first : first + self._chunk])
            if (node := self._add(parent, part, set(whole), engine, batch, row)) is None:
                break
            whole.append(node)
        self._touch(whole)
        if self._folder is not None and whole and whole[-1].last == len(tokens):
            self._write(whole, self._folder)

    def give_way(self, size: int) -> None:
        """Evict least recently used nodes until `size` bytes are free."""
        while self._memory and available_bytes() < size + self._min_free:
            self._drop_oldest(set())

    def close(self) -> None:
        """Free the memory, and forget everything; files stay."""
        for children in list(self._tree.root.children.values()):
            for node in list(children):
                self._discard(node)

    def _add(
        self, parent: Node, tokens: tuple[int, ...], spare: set[Node], engine: Engine, batch: MicroBatch, row: int
    ) -> Node | None:
        """Add a node with `tokens` after `parent`, without dropping `spare`; None if it cannot be kept."""
        first, last = parent.last, parent.last + len(tokens)
        size = engine.plan.model.kv_bytes(1, len(tokens))
        if not self._room(size, spare):
            self._on_message(
                f"{gb(size)} more of the conversation are not kept: memory for it is limited to {gb(self._size)}"
            )
            return None
        try:
            kept = engine.snapshot(batch, first, last, row)
        except (MemoryError, EngineError, torch.OutOfMemoryError) as error:  # the GPU needs memory for the copy, too
            self._on_message(f"{gb(size)} of the conversation are not kept: {error}")
            return None
        node = self._tree.add(parent, tokens)
        self._hold(node, kept)
        self.version += 1
        return node

    def _split(self, node: Node, count: int) -> Node | None:
        """Split a node after its first `count` tokens, for sharing; return the node of these, or None if it stays
        whole: it is on disk, or there is no memory for a copy.
        """
        if self._folder is not None or node.path is not None or node.kept is None:
            return None
        with ExitStack() as stack:
            try:
                first = node.kept.cut(0, count)
                stack.callback(first.close)
                rest = node.kept.cut(count, len(node.tokens))
            except MemoryError as error:
                self._on_message(f"a beginning that two conversations share is kept twice: {error}")
                return None
            stack.pop_all()
        node.kept.close()
        self.held -= node.size
        head = self._tree.split(node, count)
        self._hold(node, rest)  # which is used no more recently than before
        self._hold(head, first)
        return head

    def _hold(self, node: Node, kept: KVSnapshot) -> None:
        node.kept, node.size = kept, kept.nbytes
        self.held += node.size
        self._memory.setdefault(node)

    def _touch(self, path: Iterable[Node]) -> None:
        """Mark nodes as used now, ends before beginnings: an end is dropped first."""
        for node in reversed(list(path)):
            node.used = next(self._clock)
            if node in self._memory:
                self._memory[node] = self._memory.pop(node)  # the last one now
            if node.path is not None:
                with suppress(OSError):
                    os.utime(node.path, ns=(time.time_ns(),) * 2)  # finer than the time that the kernel sets

    def _room(self, size: int, spare: set[Node]) -> bool:
        """Make room for `size` bytes in memory without dropping `spare`; return True if there is room."""

        def lacks() -> bool:
            full = self.held + size > self._size or len(self._memory) >= tuning.TUNED.max_snapshots
            return full or (self._min_free > 0 and available_bytes() < size + self._min_free)

        while lacks():
            if not self._drop_oldest(spare):
                return False
        return True

    def _drop_oldest(self, spare: set[Node]) -> bool:
        """Drop the least recently used node, except `spare`, from memory; return True if there was any."""
        oldest = next((node for node in self._memory if node not in spare), None)
        if oldest is None:
            return False
        self._free(oldest)
        if oldest.path is None:
            self._discard(oldest)
        return True

    def _free(self, node: Node) -> None:
        if node.kept is not None:
            node.kept.close()
            node.kept = None
            self.held -= node.size
            del self._memory[node]

    def _discard(self, node: Node) -> None:
        """Remove a node that is nowhere stored, and the nodes below it."""
        self.version += 1
        for child in self._tree.remove(node):
            self._free(child)

    def _load(self, node: Node, spare: set[Node]) -> bool:
        """Load `node` into memory from its file; return True if that succeeded."""
        assert node.path is not None
        if not self._room(node.size, spare):
            return False
        try:
            node.kept = kv_file.read(node.path, node.first, self._pin)
            self.held += node.size
            self._memory[node] = None
            if (node.kept.length, node.kept.nbytes) != (len(node.tokens), node.size):
                raise CheckpointError(f"{node.path} is damaged")
        except MemoryError as error:
            self._on_message(f"{node.path} is not read: {error}")
            return False
        except (CheckpointError, OSError) as error:
            self._on_message(f"skipped: {error}")
            self._discard(node)
            return False
        return True

    def _list(self, folder: Path) -> None:
        """Add the files of `folder` to the tree, from their headers alone."""
        labels: dict[str, tuple[Label, Path]] = {}
        others = 0
        for path in sorted(folder.glob("*.safetensors")):
            try:
                label = Label.model_validate(kv_file.read_label(path))
                name = digest(label.parent, label.tokens)
                if label.format != FORMAT or dict(label.identity) != self._identity:
                    others += 1
                elif f"{name}.safetensors" != path.name or not label.tokens or label.bytes != kv_file.data_bytes(path):
                    raise CheckpointError(f"{path} is damaged")
                else:
                    labels[name] = label, path
            except ValidationError:
                self._on_message(f"skipped: {path} is not a kept conversation")
            except (CheckpointError, OSError) as error:
                self._on_message(f"skipped: {error}")
        if others:
            self._on_message(f"skipped: {others} files in {folder} are of other models or versions")
        for _name, (label, path) in sorted(labels.items(), key=lambda item: item[1][0].first):  # parents first
            parent = self._tree.get(label.parent)
            if parent is not None and parent.last == label.first:
                node = self._tree.add(parent, label.tokens)
                node.path, node.size = path, label.bytes
        for path in folder.glob("*.part"):
            with suppress(OSError):
                if OURS.match(path.name) and time.time() - path.stat().st_mtime > tuning.TUNED.abandoned_s:
                    path.unlink()

    def _write(self, path: Sequence[Node], folder: Path) -> None:
        """Write nodes that are not on disk yet, within the disk's budget."""
        for node in path:
            file = folder / f"{node.digest}.safetensors"
            if node.path is not None and file.exists():
                continue
            try:
                if node.kept is None or not self._room_on_disk(node.size, path, folder):
                    self._on_message(f"{gb(node.size)} are not written: {folder} is limited to {gb(self._folder_size)}")
                    return
                assert node.parent is not None
                label = Label(
                    format=FORMAT, identity=self._identity, parent=node.parent.digest, first=node.first,
                    tokens=tuple(node.tokens), bytes=node.size,
                )  # fmt: skip
                kv_file.write(node.kept, file, label.model_dump())
                node.path = file
            except OSError as error:
                self._on_message(f"{folder} cannot be written: {error.strerror}")
                return
        self._touch(path)

    def _room_on_disk(self, size: int, spare: Sequence[Node], folder: Path) -> bool:
        """Make room for `size` bytes in `folder`; return True if there is room. Files of any model may go, but
        `spare`."""
        names = {f"{node.digest}.safetensors" for node in spare}
        files = []
        for path in folder.glob("*.safetensors"):
            with suppress(FileNotFoundError):  # another process may make room, too
                files += [(path, path.stat())] if OURS.fullmatch(path.name) else []
        total = sum(status.st_size for _, status in files)
        for path, status in sorted(files, key=lambda entry: entry[1].st_mtime_ns):
            if total + size <= self._folder_size:
                break
            if path.name in names:
                continue
            path.unlink(missing_ok=True)
            total -= status.st_size
            node = self._tree.get(path.stem)
            if node is not None:
                node.path = None
                if node.kept is None:
                    self._discard(node)
        return total + size <= self._folder_size
