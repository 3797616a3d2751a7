"""Radix tree of token sequences: finds the longest prefix of a sequence that the tree holds.

A node is a run of tokens that follows its parent's. Conversations with a common prefix share its nodes; a node within
which they part can be split. A node's digest identifies all tokens from the first one to the node's last one, and is
its file's name on disk.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any


def digest(before: str, tokens: Sequence[int] = ()) -> str:
    """Hash `tokens` after `before`, a digest or seed, to 32 hex digits."""
    return sha256(f"{before}\n{json.dumps(list(tokens))}".encode()).hexdigest()[:32]


@dataclass(eq=False)
class Node:
    """Node of the tree: `tokens` from position `first` on."""

    tokens: Sequence[int]
    first: int
    digest: str
    size: int = 0  # bytes
    parent: "Node | None" = None
    children: dict[int, list["Node"]] = field(default_factory=dict)  # by their first token
    kept: Any = None  # its snapshot in memory
    path: Path | None = None  # its file
    used: int = 0  # time of the last use, by the user's own count

    @property
    def last(self) -> int:
        """Position after the last token."""
        return self.first + len(self.tokens)


class RadixTree:
    """Radix tree with an empty root, whose digest comes from `seed`."""

    def __init__(self, seed: str) -> None:
        self.root = Node((), 0, digest(seed))
        self._nodes: dict[str, Node] = {}

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def get(self, name: str) -> Node | None:
        """Return the node (or the root) whose digest is `name`; None if there is none."""
        return self.root if name == self.root.digest else self._nodes.get(name)

    def match(self, tokens: Sequence[int]) -> list[tuple[Node, int]]:
        """Return the longest prefix of `tokens` in the tree: its nodes in order, each with the number of its matching
        tokens. Only the last node may match in part."""
        path: list[tuple[Node, int]] = []
        node, position = self.root, 0
        while position < len(tokens) and (children := node.children.get(tokens[position])):
            count, _, node = max(
                ((common(child.tokens, tokens, position), child.used, child) for child in children),
                key=lambda candidate: candidate[:2],
            )
            path.append((node, count))
            position += count
            if count < len(node.tokens):
                break
        return path

    def add(self, parent: Node, tokens: Sequence[int]) -> Node:
        """Return the node of `tokens` after `parent`; make it if it does not exist."""
        name = digest(parent.digest, tokens)
        if name not in self._nodes:
            self._nodes[name] = node = Node(tokens, parent.last, name, parent=parent)
            self._hang(node, parent)
        return self._nodes[name]

    def split(self, node: Node, count: int) -> Node:
        """Split `node` after its first `count` tokens, some of them; return a new node with these, whose child `node`
        keeps the others. The digests of `node` and of all below it change."""
        parent, below = node.parent, self.remove(node)
        assert parent is not None
        head = self.add(parent, node.tokens[:count])
        head.used = node.used
        node.tokens, node.first = node.tokens[count:], node.first + count
        self._hang(node, head)
        for child in below:  # parents come before their children
            assert child.parent is not None
            child.digest = digest(child.parent.digest, child.tokens)
            self._nodes[child.digest] = child
        return head

    def _hang(self, node: Node, parent: Node) -> None:
        node.parent = parent
        parent.children.setdefault(node.tokens[0], []).append(node)

    def remove(self, node: Node) -> list[Node]:
        """Remove `node` and all nodes below it, whose names are forgotten; return them."""
        if node.parent is not None:
            siblings = node.parent.children[node.tokens[0]]
            siblings.remove(node)
            if not siblings:
                del node.parent.children[node.tokens[0]]
        gone = [node]
        for removed in gone:
            for children in removed.children.values():
                gone += children
            self._nodes.pop(removed.digest, None)
        return gone


def common(first: Sequence[object], second: Sequence[object], start: int = 0) -> int:
    """Return the length of the common prefix of `first` and `second[start:]`."""
    length = min(len(first), len(second) - start)
    if length and first[0] != second[start]:  # the common case, found without a copy
        return 0
    if list(first[:length]) == list(second[start : start + length]):
        return length
    return next(index for index in range(length) if first[index] != second[start + index])
