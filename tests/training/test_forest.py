"""A forest of rows: the rule of visibility, against the rows themselves."""

from __future__ import annotations

import random

import numpy as np
import pytest

from rollouts.training.forest import SHARED_MIN, count_nodes, in_tree_order, make_forest


def random_rows(rng, vocabulary=3, longest=60):
    """Rows of which many begin like another one; some are the same, or the beginning of another."""
    rows = [[rng.randrange(vocabulary) for _ in range(rng.randint(1, longest))]]
    for _ in range(rng.randint(0, 11)):
        before = rng.choice(rows)
        shared = before[: rng.randint(0, len(before))] if rng.random() < 0.8 else []
        rows.append(shared + [rng.randrange(vocabulary) for _ in range(rng.randint(0 if shared else 1, longest // 2))])
    return rows


def test_a_node_sees_the_tokens_before_it_in_its_rows():
    rng = random.Random(0)
    shared = 0
    for _ in range(150):
        rows = random_rows(rng)
        forest = make_forest(rows)
        nodes, ends = np.arange(len(forest.tokens)), np.array(forest.ends())
        for row, path in zip(rows, forest.paths, strict=True):
            assert [forest.tokens[node] for node in path] == row
            assert [forest.positions[node] for node in path] == list(range(len(row)))
            for place, node in enumerate(path):
                visible = (nodes <= node) & (node < ends)
                assert np.flatnonzero(visible).tolist() == path[: place + 1]
        assert sorted({node for path in forest.paths for node in path}) == nodes.tolist()
        shared += sum(map(len, rows)) - len(nodes)
    assert shared > 5_000


def test_runs_are_shared_from_a_length_on():
    for length in (SHARED_MIN - 1, SHARED_MIN, SHARED_MIN + 1):
        prompt = list(range(length))
        rows = [[*prompt, 100], [*prompt, 101, 102]]
        assert count_nodes(rows) == (length + 3 if length >= SHARED_MIN else 2 * length + 3)
        assert count_nodes(rows, share=False) == 2 * length + 3
    turn = [*range(20), *range(50, 50 + SHARED_MIN - 1)]  # the second run is too short
    assert count_nodes([[*range(20), 9], [*turn, 7], [*turn, 8]]) == 20 + 1 + 2 * SHARED_MIN


def test_a_row_that_is_the_beginning_of_another_ends_in_its_path():
    rows = [list(range(40)), list(range(20)), list(range(40))]
    forest = make_forest(rows)
    assert len(forest.tokens) == 40 and [len(path) for path in forest.paths] == [40, 20, 40]
    assert make_forest([]).paths == [] and len(make_forest([]).tokens) == 0


def test_one_row_is_a_tree_of_one_branch():
    forest = make_forest([[7, 8, 9]])
    assert len(forest.branches) == 1 and forest.ends() == [3, 3, 3]


def test_deep_trees_need_no_deep_stack():
    rows = [[1] * (20 * turn) + [2] * 5 for turn in range(1, 1200, 10)]
    assert count_nodes(rows) == max(map(len, rows)) + 5 * (len(rows) - 1)


def test_added_nodes_are_trees_of_their_own():
    assert make_forest([[1, 2, 3]]).padded(5).ends() == [5] * 5, "one sequence remains one"
    assert len(make_forest([[1, 2, 3], [4]]).padded(1000).branches) == 2 + 8
    forest = make_forest([[1, 2, 3], [4]])
    padded = forest.padded(8)
    assert len(padded.tokens) == 8 and padded.ends() == [3, 3, 3, 4, 8, 8, 8, 8]
    assert padded.paths is forest.paths and forest.padded(4) is forest
    with pytest.raises(AssertionError, match="do not fit"):
        forest.padded(3)


def test_neighbors_in_tree_order_share_the_most():
    rng = random.Random(1)
    for _ in range(100):
        rows = random_rows(rng)
        order, shared = in_tree_order(rows)
        assert sorted(order) == list(range(len(rows))) and shared[0] == 0
        # Appended one by one, each row adds at most its own tokens; exactly these if every fork is deep enough.
        assert count_nodes(rows) >= sum(len(rows[row]) for row in order) - sum(shared)
