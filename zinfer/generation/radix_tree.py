"""A tree of token sequences, in which the longest known beginning of another one is found.

A node is a stretch of tokens that follows its parent's. Conversations with a common beginning share the nodes of it;
a node's digest tells all tokens from the beginning up to its end, and names it on disk.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any


def digest(before: str, tokens: Sequence[int] = ()) -> str:
    """What tells `tokens` after `before`, which is a digest itself or a seed, from everything else: 32 hex digits."""
    return sha256(f"{before}\n{json.dumps(list(tokens))}".encode()).hexdigest()[:32]


@dataclass(eq=False)
class Node:
    """`tokens` from position `first` on. `kept` is what memory holds of it, `path` its file; `size` is in bytes."""

    tokens: Sequence[int]
    first: int
    digest: str
    size: int = 0
    parent: "Node | None" = None
    children: list["Node"] = field(default_factory=list)
    kept: Any = None
    path: Path | None = None
    used: int = 0  # when, by a count that whoever uses it keeps

    @property
    def last(self) -> int:
        """The position after its last one."""
        return self.first + len(self.tokens)


class RadixTree:
    """Nodes below a root without tokens, whose digest comes from `seed`."""

    def __init__(self, seed: str) -> None:
        self.root = Node((), 0, digest(seed))
        self._nodes: dict[str, Node] = {}

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def get(self, name: str) -> Node | None:
        """The node of a digest, the root among them."""
        return self.root if name == self.root.digest else self._nodes.get(name)

    def match(self, tokens: Sequence[int]) -> list[tuple[Node, int]]:
        """The longest known beginning of `tokens`: nodes one after the other, and how many tokens of each it has. Only
        of the last one these may be fewer than all."""
        found: list[tuple[Node, int]] = []
        node, position = self.root, 0
        while node.children:
            count, _, node = max(
                ((common(child.tokens, tokens, position), child.used, child) for child in node.children),
                key=lambda one: one[:2],
            )
            if not count:
                break
            found.append((node, count))
            position += count
            if count < len(node.tokens):
                break
        return found

    def add(self, parent: Node, tokens: Sequence[int]) -> Node:
        """The node of `tokens` after `parent`, a new one unless it is there."""
        name = digest(parent.digest, tokens)
        if name not in self._nodes:
            self._nodes[name] = node = Node(tokens, parent.last, name, parent=parent)
            parent.children.append(node)
        return self._nodes[name]

    def remove(self, node: Node) -> list[Node]:
        """Forget `node` and all that follows it; these nodes."""
        if node.parent is not None:
            node.parent.children.remove(node)
        gone = [node]
        for one in gone:
            gone += one.children
            self._nodes.pop(one.digest, None)
        return gone


def common(first: Sequence[int], second: Sequence[int], start: int = 0) -> int:
    """How many tokens of `first` those of `second` from `start` on begin with."""
    length = min(len(first), len(second) - start)
    if length and first[0] != second[start]:  # as most are: nothing is copied to see it
        return 0
    if list(first[:length]) == list(second[start : start + length]):
        return length
    return next(index for index in range(length) if first[index] != second[start + index])
