"""What a run does to the process that it is in."""

from __future__ import annotations

import gc

import pytest

from rollouts.compose.launch import _passed_over_by_gc


def test_the_collector_is_given_back_what_it_was_to_pass_over():
    assert gc.get_freeze_count() == 0
    with pytest.raises(KeyError), _passed_over_by_gc():
        assert gc.get_freeze_count() > 10_000
        raise KeyError
    assert gc.get_freeze_count() == 0
