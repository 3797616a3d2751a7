"""Prefix cache: keys and values of earlier requests, kept in host memory for later ones that begin alike.

A request reuses the longest prefix that it shares with any kept one. The tokens are a tree, whose nodes hold the keys
and values of runs of tokens; a run may part from within another. The least recently used nodes are dropped first, ends
before beginnings.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from zinfer.engine import EngineError
from zinfer.engine.base import Engine, MicroBatch
from zinfer.engine.kv_snapshot import KVSnapshot
from zinfer.generation import tuning
from zinfer.generation.sequence import common
from zinfer.system.host import available_bytes


@dataclass(eq=False)
class Node:
    """Run of tokens from position `first` on; it follows its parent's, or the first of these."""

    tokens: list[int]
    first: int
    parent: "Node | None"
    kept: KVSnapshot
    children: "dict[tuple[int, int], Node]" = field(default_factory=dict)  # by first position and first token


class PrefixCache:
    """Cache of keys and values, in `size` bytes of host memory. What is kept at a time is divided into nodes of at most
    `chunk` tokens, so that the end of it may be dropped alone. `min_free` bytes of host memory stay free, whatever the
    size is. What has no room is not kept."""

    def __init__(self, size: int, chunk: int = 1 << 30, min_free: int = 0) -> None:
        self.held = 0  # bytes
        self.version = 0  # changes with what `matched` returns
        self._size, self._chunk, self._min_free = size, chunk, min_free
        self._children: dict[tuple[int, int], Node] = {}  # first nodes
        self._nodes: dict[Node, None] = {}  # the least recently used first

    def matched(self, tokens: Sequence[int]) -> int:
        """Return the length of the longest kept prefix, less the last token."""
        return sum(length for _, length in self._match(tokens[:-1]))

    def find(self, tokens: Sequence[int]) -> list[KVSnapshot]:
        """Return the longest kept prefix, at least a token short; valid until the next `keep`."""
        path = self._match(tokens[:-1])
        self._touch(node for node, _ in path)
        return [node.kept if length == len(node.tokens) else node.kept.head(length) for node, length in path]

    def keep(self, tokens: Sequence[int], engine: Engine, batch: MicroBatch, row: int = 0) -> int:
        """Keep the keys and values of `tokens` that are not kept yet; `tokens` are the first ones of `row` in `batch`,
        a micro-batch on `engine`. Return how many are kept now."""
        path = self._match(tokens)
        nodes, begin = [node for node, _ in path], sum(length for _, length in path)
        with suppress(MemoryError, EngineError, torch.OutOfMemoryError):  # the GPU needs memory for the copy, too
            for first in range(begin, len(tokens), self._chunk):
                part = list(tokens[first : first + self._chunk])
                self._make_room(engine.plan.model.kv_bytes(1, len(part)), {*nodes})
                self._add(part, first, nodes, engine.snapshot(batch, first, first + len(part), row))
                begin = first + len(part)
        self._touch(nodes)
        return begin

    def close(self) -> None:
        """Free the memory, and forget everything."""
        while self._nodes:
            self._drop(next(iter(self._nodes)))

    def _match(self, tokens: Sequence[int]) -> list[tuple[Node, int]]:
        """Return the longest kept prefix: its nodes, and the tokens of each."""
        path: list[tuple[Node, int]] = []
        children, position = self._children, 0
        while position < len(tokens) and (node := children.get((position, tokens[position]))) is not None:
            path.append((node, common(node.tokens, tokens[position : position + len(node.tokens)])))
            children, position = node.children, position + path[-1][1]
        return path

    def _add(self, tokens: list[int], first: int, path: list[Node], kept: KVSnapshot) -> None:
        parent = path[-1] if path else None
        node = Node(tokens, first, parent, kept)
        self._siblings(node)[first, tokens[0]] = node
        self._nodes[node] = None
        self.held += kept.nbytes
        self.version += 1
        path.append(node)

    def _siblings(self, node: Node) -> dict[tuple[int, int], Node]:
        return self._children if node.parent is None else node.parent.children

    def _touch(self, path: Iterable[Node]) -> None:
        """Mark nodes as used now, ends before beginnings: an end is dropped first."""
        for node in reversed(list(path)):
            self._nodes[node] = self._nodes.pop(node)  # the last one now

    def _make_room(self, size: int, spare: set[Node]) -> None:
        """Make room for `size` bytes without dropping `spare`. Raises MemoryError if there is none."""
        while (
            self.held + size > self._size
            or len(self._nodes) >= tuning.TUNED.max_snapshots
            or (self._min_free > 0 and available_bytes() < size + self._min_free)
        ):
            oldest = next((node for node in self._nodes if node not in spare), None)
            if oldest is None:
                raise MemoryError
            self._drop(oldest)

    def _drop(self, node: Node) -> None:
        self.version += 1
        node.kept.close()
        self.held -= node.kept.nbytes
        del self._nodes[node], self._siblings(node)[node.first, node.tokens[0]]
