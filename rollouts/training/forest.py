"""Rows as a forest: what several rows begin with is computed once.

The rows of a microbatch are put into a trie. The prompt of a group is a root, and its replies branch off. Segments of a
rollout whose template rewrites history branch off where they part. A row that begins like no other is a tree of one
branch. The tokens of the trie are its *nodes*, numbered in depth-first order, so a subtree is a range of numbers. Node
j is visible to node i exactly if j <= i < ends[j]. This rule describes sharing, packing and causality alike. The
position of a node is its depth. Shared runs of fewer than SHARED_MIN tokens are computed for each row. Not here:
attention over a forest (`backends.attention`), and the choice of the rows (`batching`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

SHARED_MIN = 16
"""Shorter runs are not shared: a branch of its own costs more than their tokens."""
_MULTIPLE = 128  # of node budgets: the blocks of FlexAttention
_FILLER = 128  # nodes of a tree that is padding: attention over it must cost little


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

    tokens: list[int]
    positions: list[int]
    branches: list[Branch]
    paths: list[list[int]]

    def ends(self) -> list[int]:
        """[M] one past the last descendant of each node."""
        return [branch.end for branch in self.branches for _ in range(branch.start, branch.stop)]

    def padded(self, count: int) -> Forest:
        """The same forest with `count` nodes in all. The added nodes are short trees, which no row uses. A single
        branch becomes longer instead, so it remains one sequence.
        """
        own = len(self.tokens)
        assert count >= own, f"{own} nodes do not fit into {count}"
        if count == own:
            return self
        zeros = [0] * (count - own)
        starts = range(own, count, _FILLER)
        filler = [Branch(start, min(start + _FILLER, count), -1, 0, min(start + _FILLER, count)) for start in starts]
        branches = [Branch(0, count, -1, 0, count)] if len(self.branches) == 1 else [*self.branches, *filler]
        return Forest(self.tokens + zeros, self.positions + zeros, branches, self.paths)


def make_forest(rows: Sequence[Sequence[int]], *, share: bool = True) -> Forest:
    """The forest of rows of token ids. Without `share`, every row is a tree of one branch."""
    order, common = _in_order(rows) if share else (list(range(len(rows))), [0] * len(rows))
    lengths = [len(rows[row]) for row in order]
    tokens: list[int] = []
    branches: list[Branch] = []
    paths: list[list[int]] = [[] for _ in rows]
    waiting = [(first, last, 0, -1) for first, last in reversed(_groups(common, 0, len(rows), 0))]
    while waiting:
        first, last, depth, parent = waiting.pop()
        stop = min(common[first + 1 : last], default=lengths[first])
        if stop > depth:
            start = len(tokens)
            tokens += rows[order[first]][depth:stop]
            branches.append(Branch(start, len(tokens), parent, depth, 0))
            parent = len(branches) - 1
            for place in range(first, last):
                paths[order[place]] += range(start, len(tokens))
        while first < last and lengths[first] == stop:  # the shorter rows come first, and end here
            first += 1
        if first < last:
            waiting += [(one, other, stop, parent) for one, other in reversed(_groups(common, first, last, stop))]
    positions = [position for each in branches for position in range(each.depth, each.depth + each.stop - each.start)]
    return Forest(tokens, positions, _with_ends(branches), paths)


def in_tree_order(rows: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Row numbers in an order in which rows that begin alike are neighbors, and how many of its leading tokens each
    shares with the row before it; 0 if these are too few to share.
    """
    order, common = _in_order(rows)
    return order, [count if count >= SHARED_MIN else 0 for count in common]


def count_nodes(rows: Sequence[Sequence[int]], *, share: bool = True) -> int:
    """The number of nodes of the forest of these rows."""
    return len(make_forest(rows, share=share).tokens) if share else sum(map(len, rows))


def node_budgets(tokens_max: int) -> tuple[int, ...]:
    """The few numbers of nodes that microbatches of at most `tokens_max` tokens are padded to."""
    return tuple(-(-max(_MULTIPLE, tokens_max // part) // _MULTIPLE) * _MULTIPLE for part in (8, 4, 2, 1))


def budget_for(count: int, budgets: Sequence[int]) -> int:
    """The budget for so many nodes; the number itself without budgets. A row above the largest one has a multiple of
    the smallest.
    """
    if not budgets:
        return count
    return next((each for each in budgets if each >= count), -(-count // budgets[0]) * budgets[0])


def _in_order(rows: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Row numbers in the order of the rows' ids, and how many leading ids each row shares with the row before it."""
    order = sorted(range(len(rows)), key=lambda row: (rows[row], row))
    common = [_shared(rows[one], rows[other]) for one, other in itertools.pairwise(order)]
    return order, [0, *common][: len(rows)]


def _shared(left: Sequence[int], right: Sequence[int]) -> int:
    """The length of the common beginning. Slices are compared, which is faster than ids one by one."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


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
