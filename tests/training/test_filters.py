"""Each filter keeps and drops what its docstring says, and names its reason."""

from __future__ import annotations

from rollouts.training import filters
from rollouts.types import Sample


def sample(tokens, rollout):
    return Sample(tokens=[0, *tokens], loss_mask=[0.0, *[1.0] * len(tokens)], rollout_index=rollout)


def test_rewards():
    assert filters.nonzero_std([0.0, 1.0, None]) is True
    assert filters.nonzero_std([0.1 + 0.2, 0.3]) == "zero_std"
    assert filters.nonzero_std([None, 1.0]) == "fewer_than_two_rewards"
    assert filters.any_success([0.0, None, 0.2]) is True
    assert filters.any_success([0.0, 0.2], threshold=0.5) == "no_success"
    assert filters.any_success([None]) == "no_success"
    assert filters.min_reward([0.4, 0.6, None], minimum=0.5) is True
    assert filters.min_reward([0.4], minimum=0.5) == "mean_reward_below_minimum"
    assert filters.min_reward([None]) == "mean_reward_below_minimum"


def test_samples():
    same = [sample([1, 2], 0), sample([1, 2], 1), sample([1, 2], 2)]
    assert filters.response_diversity(same) == "same_replies"
    assert filters.response_diversity([*same[:1], sample([3], 1)]) is True
    assert filters.response_diversity([]) == "no_samples"
    # Two segments of one rollout are one reply.
    assert filters.response_diversity(
        [sample([1], 0), sample([2], 0), sample([1], 1), sample([2], 1)], unique_frac_min=0.6
    )
    assert filters.reasonable_length(same, shortest=2, longest=2) is True
    assert filters.reasonable_length(same, shortest=3) == "too_short"
    assert filters.reasonable_length(same, longest=1) == "too_long"
    assert filters.reasonable_length([]) == "too_short"
