"""Bins contain every row once, stay within the limit, and are always the same."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts.training.batching import pack_rows


@given(st.lists(st.integers(0, 50)), st.integers(1, 60))
def test_every_row_once_within_the_budget(lengths, tokens_max):
    bins = pack_rows(lengths, tokens_max)
    assert sorted(row for chosen in bins for row in chosen) == list(range(len(lengths)))
    sums = [sum(lengths[row] for row in chosen) for chosen in bins]
    for chosen, total in zip(bins, sums, strict=True):
        assert total <= tokens_max or len([row for row in chosen if lengths[row]]) == 1
    # No bin could have gone into an earlier one, so at most one is half empty.
    assert sum(2 * total <= tokens_max for total in sums) <= 1
    assert bins == pack_rows(lengths, tokens_max)


def test_longest_first_into_the_first_that_has_room():
    assert pack_rows([3, 7, 5, 5, 2, 30], 10) == [[5], [0, 1], [2, 3], [4]]
    assert pack_rows([], 10) == []
    assert pack_rows([4, 4, 4], 8) == [[0, 1], [2]], "equal lengths go in their order"


def test_a_budget_of_nothing_is_our_mistake():
    with pytest.raises(AssertionError, match="bins of 0 tokens"):
        pack_rows([1], 0)


def test_no_torch():
    code = "import sys, rollouts.training.batching; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
