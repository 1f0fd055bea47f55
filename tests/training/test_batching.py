"""Batches, microbatches and layouts: aligned, within bounds, and every live row exactly once."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest

from rollouts.errors import TrainingError
from rollouts.training.batching import make_batch, plan_layout, split_batch, split_microbatches
from rollouts.types import Sample


def batch_of(samples, **settings):
    count = 1 + max(s.rollout_index for s in samples)
    return make_batch(samples, [0.1 * n for n in range(count)], aggregation="token_mean", step=0, **settings)


def test_rows_carry_everything_aligned(tiny):
    samples = tiny.make_samples()
    batch = batch_of(samples)
    for number, (row, sample) in enumerate(zip(batch.rows, samples, strict=True)):
        assert row.tokens == sample.tokens
        assert {len(row.loss_mask), len(row.weights), len(row.advantages), len(row.rollout_logprobs)} == {
            len(row.tokens)
        }
        assert row.prefix_length == sample.prompt_length
        assert all(a == (0.1 * number if w else 0.0) for a, w in zip(row.advantages, row.loss_mask, strict=True))
    assert batch.denominator == sum(map(sum, (s.loss_mask for s in samples)))
    assert batch.rewards == [s.reward for s in samples]


def test_unjudged_rewards_are_not_live(tiny):
    samples = tiny.make_samples()
    before = batch_of(samples).denominator
    samples[0].reward = None
    batch = batch_of(samples)
    assert not any(batch.rows[0].loss_mask) and math.isnan(batch.rewards[0])
    assert batch.denominator == before - sum(samples[0].loss_mask)


def test_a_prompt_that_differs_is_not_shared_further_than_it_is_the_same(tiny):
    samples = tiny.make_samples(groups=1)
    samples[2].tokens[5] = (samples[2].tokens[5] + 1) % 61
    assert {row.prefix_length for row in batch_of(samples).rows} == {5}


def test_supervised_samples_need_no_indices():
    samples = [Sample(tokens=[1, 2, 3], loss_mask=[1.0, 0.0, 1.0]), Sample(tokens=[4, 5], loss_mask=[0.0, 0.5])]
    batch = make_batch(samples, [0.0, 0.0], aggregation="token_mean", step=0)
    assert batch.rows[0].loss_mask == [0.0, 0.0, 1.0], "nothing predicts the first token"
    assert batch.denominator == 1.5 and batch.rows[0].group_index != batch.rows[1].group_index


def test_misaligned_samples_are_our_mistake():
    with pytest.raises(AssertionError, match="3 tokens but 2 mask entries"):
        make_batch([Sample(tokens=[1, 2, 3], loss_mask=[0.0, 1.0])], [0.0], aggregation="sum", step=0)
    with pytest.raises(AssertionError, match="rollout_index 7 but 1 advantages"):
        make_batch([Sample(tokens=[1], loss_mask=[0.0], rollout_index=7)], [0.0], aggregation="sum", step=0)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("tokens_max", [1, 40, 64, 100, 10_000])
def test_microbatches_hold_every_row_once_within_the_bound(tiny, tokens_max, share):
    batch = batch_of(tiny.make_samples(groups=4))
    parts = split_microbatches(batch, tokens_max, share_prefix=share)
    assert sorted(id(row) for part in parts for row in part) == sorted(id(row) for row in batch.rows)
    for part in parts:
        layout = plan_layout(part, share_prefix=share)
        assert len(part) == 1 or layout.padded_tokens([len(row.tokens) for row in part]) <= tokens_max
        assert sorted(row for bucket in layout.buckets for row in bucket) == list(range(len(part)))
    if tokens_max == 10_000:
        assert len(parts) == 1


def test_what_a_loss_names_stays_together_or_is_an_error(tiny):
    batch = batch_of(tiny.make_samples(groups=4))
    parts = split_microbatches(batch, 100, keep="group")
    assert len(parts) > 1
    for group in range(4):
        assert sum(any(row.group_index == group for row in part) for part in parts) == 1
    with pytest.raises(TrainingError, match=r"names group_index.*Give --tokens-per-microbatch \d+"):
        split_microbatches(batch, 30, keep="group")


def test_rows_with_nothing_live_are_left_out(tiny):
    samples = tiny.make_samples()
    samples[3].loss_mask = [0.0] * len(samples[3].tokens)
    samples[3].rollout_log_probs = [0.0] * len(samples[3].tokens)
    batch = batch_of(samples)
    assert sum(map(len, split_microbatches(batch, 10_000))) == len(samples) - 1
    assert sum(map(len, split_microbatches(batch, 10_000, only_live=False))) == len(samples)


def test_layout_shares_and_buckets(tiny):
    rows = batch_of(tiny.make_samples(groups=2)).rows
    layout = plan_layout(rows, share_prefix=True)
    assert [len(prefix) for prefix in layout.prefixes] == [rows[0].prefix_length - 1, rows[4].prefix_length - 1]
    assert plan_layout(rows, share_prefix=False).prefixes == []
    assert plan_layout(rows[:1]).prefixes == [], "a prompt that one row has is not shared"
    fine = plan_layout(rows, bucket_saving_min=1)
    lengths = [len(row.tokens) for row in rows]
    assert len(fine.buckets) > len(plan_layout(rows, bucket_saving_min=10_000).buckets)
    assert fine.padded_tokens(lengths) < plan_layout(rows, bucket_saving_min=10_000).padded_tokens(lengths)


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_split_batch_shares_out_the_denominator(tiny, parts):
    batch = batch_of(tiny.make_samples())
    pieces = split_batch(batch, parts)
    assert sum(piece.denominator for piece in pieces) == pytest.approx(batch.denominator)
    assert [row for piece in pieces for row in piece.rows] == batch.rows


def test_batching_and_filters_import_no_torch():
    code = "import sys, rollouts.training.batching, rollouts.training.filters; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
