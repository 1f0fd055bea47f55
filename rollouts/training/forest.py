"""Rows as a forest: what several rows begin with is computed once.

The rows of a microbatch are put into a trie. The prompt of a group is a root, and its replies branch off. Segments of a
rollout whose template rewrites history branch off where they part. A row that begins like no other is a tree of one
branch. The tokens of the trie are its *nodes*, numbered in depth-first order, so a subtree is a range of numbers. Node
j is visible to node i exactly if j <= i < ends[j]. This rule describes sharing, packing and causality alike. The
position of a node is its depth. Shared runs of fewer than SHARED_MIN tokens are computed for each row. Not here:
attention over a forest (`backends.attention`), and the choice of the rows (`batching`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

SHARED_MIN = 16
"""Shorter runs are not shared: a branch of its own costs more than their tokens."""


class Branch(NamedTuple):
    """A run of nodes without a fork: nodes `start` to `stop` - 1. `parent` is the number of the branch that it
    continues, or -1. `depth` is the position of its first node. `end` is one past the last node of its subtree.
    """

    start: int
    stop: int
    parent: int
    depth: int
    end: int


class Forest(NamedTuple):
    """M nodes in depth-first order.

    Attributes:
        tokens: [M] ids
        positions: [M] the depth of each node
        branches: in depth-first order; together they have all nodes
        paths: for each row, the node of each of its tokens [L]
    """

    tokens: np.ndarray
    positions: np.ndarray
    branches: list[Branch]
    paths: list[np.ndarray]

    def ends(self) -> np.ndarray:
        """[M] one past the last descendant of each node."""
        sizes = [branch.stop - branch.start for branch in self.branches]
        return np.repeat(np.array([branch.end for branch in self.branches], dtype=np.int64), sizes)

    def padded(self, count: int) -> Forest:
        """The same forest with `count` nodes in all. The added nodes are a tree of their own, which no row uses."""
        own = len(self.tokens)
        assert count >= own, f"{own} nodes do not fit into {count}"
        if count == own:
            return self
        zeros = np.zeros(count - own, dtype=np.int64)
        filler = Branch(own, count, -1, 0, count)
        tokens, positions = np.concatenate([self.tokens, zeros]), np.concatenate([self.positions, zeros])
        return Forest(tokens, positions, [*self.branches, filler], self.paths)


def make_forest(rows: Sequence[Sequence[int]], *, share: bool = True) -> Forest:
    """The forest of rows of token ids. Without `share`, every row is a tree of one branch."""
    keys = [_key(row) for row in rows]
    order = sorted(range(len(rows)), key=lambda row: (keys[row], row)) if share else list(range(len(rows)))
    lengths = [len(rows[row]) for row in order]
    common = _common(keys, order) if share else [0] * len(rows)  # of a row and the one before it in the order
    branches: list[Branch] = []
    pieces: list[np.ndarray] = []
    chains: list[list[int]] = [[] for _ in rows]  # the branches of each row
    waiting = [(first, last, 0, -1) for first, last in reversed(_groups(common, 0, len(rows), 0))]
    while waiting:
        first, last, depth, parent = waiting.pop()
        stop = min(common[first + 1 : last], default=lengths[first])
        if stop > depth:
            start = branches[-1].stop if branches else 0
            branches.append(Branch(start, start + stop - depth, parent, depth, 0))
            pieces.append(np.frombuffer(keys[order[first]], dtype=">u4")[depth:stop])
            parent = len(branches) - 1
            for place in range(first, last):
                chains[order[place]].append(parent)
        while first < last and lengths[first] == stop:  # the shorter rows come first, and end here
            first += 1
        if first < last:
            waiting += [(one, other, stop, parent) for one, other in reversed(_groups(common, first, last, stop))]
    branches = _with_ends(branches)
    paths = [
        np.concatenate([np.arange(branches[each].start, branches[each].stop) for each in chain] or [np.arange(0)])
        for chain in chains
    ]
    depths = [np.arange(each.stop - each.start) + each.depth for each in branches]
    tokens = np.concatenate(pieces or [np.arange(0)]).astype(np.int64)
    return Forest(tokens, np.concatenate(depths or [np.arange(0)]), branches, paths)


def in_tree_order(rows: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Row numbers in an order in which rows that begin alike are neighbors, and how many of its leading tokens each
    shares with the row before it; 0 if these are too few to share.
    """
    keys = [_key(row) for row in rows]
    order = sorted(range(len(rows)), key=lambda row: (keys[row], row))
    return order, [count if count >= SHARED_MIN else 0 for count in _common(keys, order)]


def count_nodes(rows: Sequence[Sequence[int]], *, share: bool = True) -> int:
    """The number of nodes of the forest of these rows."""
    return len(make_forest(rows, share=share).tokens) if share else sum(map(len, rows))


def _key(row: Sequence[int]) -> bytes:
    """Bytes that sort like the ids of a row."""
    return np.asarray(row, dtype=">u4").tobytes()


def _common(keys: Sequence[bytes], order: Sequence[int]) -> list[int]:
    """How many leading ids each row of the order shares with the row before it."""
    found = [0] * len(order)
    for place in range(1, len(order)):
        one, other = keys[order[place - 1]], keys[order[place]]
        size = min(len(one), len(other))
        if one[:size] == other[:size]:
            found[place] = size // 4
        else:
            left, right = (np.frombuffer(key, dtype=np.uint32, count=size // 4) for key in (one, other))
            found[place] = int(np.argmax(left != right))
    return found


def _groups(common: Sequence[int], first: int, last: int, depth: int) -> list[tuple[int, int]]:
    """Cut the places `first` to `last` - 1 into groups that share at least SHARED_MIN tokens from `depth` on."""
    cuts = [place for place in range(first + 1, last) if common[place] < depth + SHARED_MIN]
    return list(zip([first, *cuts], [*cuts, last], strict=True)) if last > first else []


def _with_ends(branches: Sequence[Branch]) -> list[Branch]:
    ends = [branch.stop for branch in branches]
    for number in reversed(range(len(branches))):
        if (parent := branches[number].parent) >= 0:
            ends[parent] = max(ends[parent], ends[number])
    return [branch._replace(end=end) for branch, end in zip(branches, ends, strict=True)]


def ancestors(branches: Sequence[Branch], number: int) -> Iterator[Branch]:
    """A branch and those that it continues, from the root on."""
    chain = [branches[number]]
    while chain[-1].parent >= 0:
        chain.append(branches[chain[-1].parent])
    return reversed(chain)
