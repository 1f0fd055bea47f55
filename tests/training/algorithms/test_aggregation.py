"""The table of the normalizations: u and D, float masks, segments of one rollout, nothing live."""

from __future__ import annotations

import pytest

from rollouts.errors import ConfigError
from rollouts.training.algorithms.aggregation import AGGREGATIONS, Masks, aggregate

# Rollout 0 has two segments (2 + 1 live), rollout 1 one (2 live), rollout 2 nothing live; groups 0, 0, 0, 1.
BATCH = Masks([[0, 1, 1], [0, 1], [0, 1, 0, 1], [0, 0]], [0, 0, 1, 2], [0, 0, 0, 1], [0, 0, 1, -1], max_tokens=10)


@pytest.mark.parametrize(
    ("name", "weights", "denominator"),
    [
        ("token_mean", [[0, 1, 1], [0, 1], [0, 1, 0, 1], [0, 0]], 5),
        ("rollout_mean", [[0, 1 / 3, 1 / 3], [0, 1 / 3], [0, 0.5, 0, 0.5], [0, 0]], 2),
        ("rollout_sum", [[0, 1, 1], [0, 1], [0, 1, 0, 1], [0, 0]], 2),
        ("dr_grpo", [[0, 0.1, 0.1], [0, 0.1], [0, 0.1, 0, 0.1], [0, 0]], 2),
        ("group_mean", [[0, 0.2, 0.2], [0, 0.2], [0, 0.2, 0, 0.2], [0, 0]], 1),
        ("sum", [[0, 1, 1], [0, 1], [0, 1, 0, 1], [0, 0]], 1),
        ("pair_mean", [[0, 1, 1], [0, 1], [0, 1, 0, 1], [0, 0]], 2),
        ("per_rollout", [[0, 1, 1], [0, 1], [0, 1, 0, 1], [0, 0]], 2),
    ],
)
def test_table(name, weights, denominator):
    found = aggregate(name, BATCH)
    assert [pytest.approx(row) for row in found.weights] == weights
    assert found.denominator == denominator


@pytest.mark.parametrize("name", ["token_mean", "rollout_mean", "group_mean"])
def test_a_constant_loss_has_itself_as_mean_under_float_masks(name):
    masks = [[0.0, 0.5, 1.0], [0.0, 0.25, 2.0]]
    found = aggregate(name, Masks(masks, [0, 1], [0, 0]))
    assert sum(map(sum, found.weights)) / found.denominator == pytest.approx(1.0)


def test_a_rollout_counts_by_the_sum_of_its_tokens():
    """Of the objective of rollout_sum, rollout n is the sum over its tokens / live rollouts, in however many rows."""
    masks, losses = [[0.0, 1.0, 0.5], [0.0, 2.0], [0.0, 1.0, 1.0], [0.0, 0.0]], [[9, 1, 2], [9, 3], [9, 4, 5], [9, 9]]
    found = aggregate("rollout_sum", Masks(masks, [0, 0, 1, 2], [0, 0, 0, 0]))
    objective = sum(u * v for us, vs in zip(found.weights, losses, strict=True) for u, v in zip(us, vs, strict=True))
    assert objective / found.denominator == pytest.approx(((1 + 0.5 * 2 + 2 * 3) + (4 + 5)) / 2)


def test_nothing_live_has_no_denominator():
    for name in sorted(set(AGGREGATIONS) - {"sum"}):
        assert aggregate(name, Masks([[0.0, 0.0]], [0], [0], [-1], 4)).denominator == 0.0


def test_what_cannot_be_used_is_refused():
    with pytest.raises(ConfigError, match="did you mean 'token_mean'"):
        aggregate("token_means", BATCH)
    with pytest.raises(ConfigError, match="its length is None"):
        aggregate("dr_grpo", BATCH._replace(max_tokens=None))


def test_units():
    assert {name: aggregate(name, BATCH).unit for name in AGGREGATIONS} == {
        "dr_grpo": "token",
        "group_mean": "token",
        "pair_mean": "pair",
        "per_rollout": "rollout",
        "rollout_mean": "token",
        "rollout_sum": "token",
        "sum": "token",
        "token_mean": "token",
    }
