"""Radix tree: finds the same prefix as a search through all sequences."""

import random

from zinfer.generation.radix_tree import RadixTree, common, digest


def test_the_longest_known_prefix_is_found() -> None:
    dice = random.Random(4)
    tree, sequences = RadixTree("model"), list[tuple[int, ...]]()
    for _ in range(200):
        tokens = tuple(dice.randrange(3) for _ in range(dice.randrange(1, 12)))
        match = tree.match(tokens)
        length = sum(count for _, count in match)
        assert length == max((common(sequence, tokens) for sequence in sequences), default=0)
        assert [token for node, count in match for token in node.tokens[:count]] == list(tokens[:length])
        assert all(count == len(node.tokens) for node, count in match[:-1])
        whole = [node for node, count in match if count == len(node.tokens)]
        parent = whole[-1] if whole else tree.root
        if length < len(tokens):
            node = tree.add(parent, tokens[parent.last :])
            assert (node.first, node.last) == (parent.last, len(tokens))
            assert tree.get(node.digest) is node
            assert tree.add(parent, tokens[parent.last :]) is node
        sequences.append(tokens)
    for node in list(tree):
        if tree.get(node.digest) is not None:
            gone = tree.remove(node)
            assert all(tree.get(node.digest) is None for node in gone)
    assert tree.match(sequences[0]) == []


def test_nodes_that_are_split_share_beginnings_and_keep_their_names() -> None:
    dice = random.Random(5)
    tree, sequences = RadixTree("model"), list[tuple[int, ...]]()
    for _ in range(200):
        tokens = tuple(dice.randrange(3) for _ in range(dice.randrange(1, 12)))
        match = tree.match(tokens)
        length = sum(count for _, count in match)
        assert length == max((common(sequence, tokens) for sequence in sequences), default=0)
        parent = match[-1][0] if match else tree.root
        if match and match[-1][1] < len(parent.tokens):
            parent = tree.split(*match[-1])
        if length < len(tokens):
            tree.add(parent, tokens[length:])
        sequences.append(tokens)
        for node in tree:
            assert node.parent is not None
            assert node.first == node.parent.last
            assert node.digest == digest(node.parent.digest, node.tokens)
            assert tree.get(node.digest) is node
    assert sum(len(node.tokens) for node in tree) == len(
        {sequence[:end] for sequence in sequences for end in range(1, len(sequence) + 1)}
    )
    for children in list(tree.root.children.values()):
        assert len(children) == 1
        tree.remove(children[0])
    assert not list(tree)
    assert tree.match(sequences[0]) == []


def test_a_digest_tells_sequences_and_models_apart() -> None:
    names = {digest("a"), digest("b"), digest("a", (1, 2)), digest("a", (12,)), digest("a", (1,)), digest("a", (2, 1))}
    assert len(names) == 6
    assert digest("a", (1, 2)) == digest("a", [1, 2])
