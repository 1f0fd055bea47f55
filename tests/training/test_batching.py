"""Batches and microbatches: aligned, within limits, and with every live row exactly once."""

from __future__ import annotations

import math
import random
import subprocess
import sys

import pytest

from rollouts.errors import TrainingError
from rollouts.training import batching
from rollouts.training.batches import Row, TrainBatch
from rollouts.training.batching import make_batch, microbatch_tokens, part_batch, split_microbatches
from rollouts.training.forest import count_nodes
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


def test_supervised_samples_need_no_indices():
    samples = [Sample(tokens=[1, 2, 3], loss_mask=[1.0, 0.0, 1.0]), Sample(tokens=[4, 5], loss_mask=[0.0, 0.5])]
    batch = make_batch(samples, [0.0, 0.0], aggregation="token_mean", step=0)
    assert batch.rows[0].loss_mask == [0.0, 0.0, 1.0], "nothing predicts the first token"
    assert batch.denominator == 1.5 and batch.rows[0].group_index != batch.rows[1].group_index


def test_rollouts_that_were_not_selected_are_not_live_but_keep_their_reward(tiny):
    samples = tiny.make_samples(groups=1)
    batch = batch_of(samples, trained=[True, False, True, False])
    assert [any(row.loss_mask) for row in batch.rows] == [True, False, True, False]
    assert batch.rewards == [sample.reward for sample in samples]
    assert batch.denominator == sum(sum(sample.loss_mask) for sample in (samples[0], samples[2]))
    assert batch_of(samples, rewards=[1.0, None, 2.0, 3.0]).rewards[2] == 2.0


def test_pairs_have_their_rows_with_the_sign_of_their_side(tiny):
    samples = tiny.make_samples(groups=2)
    batch = make_batch(samples, [0.0] * 8, aggregation="pair_mean", step=0, pairs=[(0, 2), (0, 3), (6, 5)])
    assert [(row.rollout_index, row.pair_index) for row in batch.rows] == [
        (0, 0),
        (2, 0),
        (0, 1),
        (3, 1),
        (6, 2),
        (5, 2),
    ]
    for row, sign in zip(batch.rows, [1.0, -1.0] * 3, strict=True):
        assert {a for a, live in zip(row.advantages, row.loss_mask, strict=True) if live} == {sign}
    assert batch.denominator == 3 and batch.unit == "pair"
    assert len({id(row) for row in batch.rows}) == 6, "a rollout in two pairs has rows of its own in each"
    for part in split_microbatches(batch, 100, keep="pair"):
        sides = [row.pair_index for row in part]
        assert all(sides.count(pair) == 2 for pair in sides), "a pair is never parted"


def test_segments_of_a_rollout_are_numbered():
    samples = [Sample(tokens=[1, 2], loss_mask=[0, 1], rollout_index=number) for number in (0, 0, 1, 0)]
    assert [row.segment for row in make_batch(samples, [0.0] * 2, aggregation="sum", step=0).rows] == [0, 1, 0, 2]


@pytest.mark.parametrize("aggregation", ["token_mean", "rollout_mean", "rollout_sum", "group_mean", "dr_grpo", "sum"])
def test_minibatches_are_whole_groups_weighed_by_themselves(tiny, aggregation):
    samples = tiny.make_samples(groups=5)
    batch = make_batch(samples, [0.5] * 20, aggregation=aggregation, step=3, max_tokens=9)
    for row in batch.rows:
        row.ref_logprobs = [-1.0] * len(row.tokens)
    parts = part_batch(batch, 2, aggregation, 9)
    assert [sorted({row.group_index for row in part.rows}) for part in parts] == [[0, 1], [2, 3, 4]]
    for number, part in enumerate(parts):
        alone = make_batch(
            [sample for sample in samples if (sample.group_index >= 2) == bool(number)],
            [0.5] * 20, aggregation=aggregation, step=3, max_tokens=9)  # fmt: skip
        assert part.denominator == alone.denominator and part.step == 3
        assert [row.weights for row in part.rows] == [row.weights for row in alone.rows]
        assert all(row.ref_logprobs for row in part.rows)
    assert part_batch(batch, 1, aggregation) == [batch]
    assert [len(part_batch(batch, parts, aggregation, 9)) for parts in (3, 4, 5, 99)] == [3, 4, 5, 5]


def test_misaligned_samples_are_our_mistake():
    with pytest.raises(AssertionError, match="3 tokens but 2 mask entries"):
        make_batch([Sample(tokens=[1, 2, 3], loss_mask=[0.0, 1.0])], [0.0], aggregation="sum", step=0)
    with pytest.raises(AssertionError, match="rollout_index 7 but 1 advantages"):
        make_batch([Sample(tokens=[1], loss_mask=[0.0], rollout_index=7)], [0.0], aggregation="sum", step=0)


@pytest.mark.parametrize(("share", "padded"), [(True, False), (False, False), (False, True)])
@pytest.mark.parametrize("tokens_max", [1, 40, 64, 100, 10_000])
def test_microbatches_hold_every_row_once_within_the_bound(tiny, tokens_max, share, padded):
    batch = batch_of(tiny.make_samples(groups=4, prompt=(16, 20)))
    parts = split_microbatches(batch, tokens_max, share=share, padded=padded)
    assert sorted(id(row) for part in parts for row in part) == sorted(id(row) for row in batch.rows)
    sizes = [microbatch_tokens(part, share=share, padded=padded) for part in parts]
    assert all(len(part) == 1 or size <= tokens_max for part, size in zip(parts, sizes, strict=True))
    if share and tokens_max >= 64:  # no group is cut
        assert sum(sizes) == microbatch_tokens(batch.rows)
    if tokens_max == 10_000:
        assert len(parts) == 1


def test_short_runs_below_a_fork_are_counted():
    """Replies that agree on up to 15 tokens more share the prompt alone."""
    rng = random.Random(0)
    for _ in range(60):
        prompt, reply = [rng.randrange(50) for _ in range(60)], [rng.randrange(50) for _ in range(60)]
        rows = []
        for number in range(16):
            tokens = [*prompt, *reply[: rng.randrange(60)], *(100 + number for _ in range(20))]
            rows.append(Row(tokens, [0.0] * 60 + [1.0] * (len(tokens) - 60), [], [], [], number, 0))
        parts = split_microbatches(TrainBatch(rows, 1.0, [], 0), 300)
        assert all(microbatch_tokens(part) <= 300 for part in parts)


def test_a_microbatch_of_many_short_rows_is_counted_a_few_times(monkeypatch):
    """Not once for every row: 2,000 rows took 11 seconds."""
    prompt = list(range(200))
    rows = [
        Row([*prompt, *(number + 300, number % 7)], [0.0] * 200 + [1.0] * 2, [], [], [], number, 0)
        for number in range(2000)
    ]
    calls = []
    monkeypatch.setattr(batching, "count_nodes", lambda *rows, **how: calls.append(1) or count_nodes(*rows, **how))
    parts = split_microbatches(TrainBatch(rows, 1.0, [], 0), 1000)
    assert len(parts) == 5 and len(calls) <= 2 * len(parts)


def test_a_tree_above_the_bound_is_cut_at_its_branches():
    prompt = list(range(40))
    replies = [[100 + number] * 10 for number in range(10)]
    rows = [Row([*prompt, *reply], [0.0] * 40 + [1.0] * 10, [], [], [], n, 0) for n, reply in enumerate(replies)]
    parts = split_microbatches(TrainBatch(rows, 1.0, [], 0), 70)
    assert [microbatch_tokens(part) for part in parts] == [70, 70, 70, 50], "each part runs the trunk"


@pytest.mark.parametrize("keep", ["rollout", "group"])
def test_sets_that_stay_together_count_their_nodes(tiny, keep):
    batch = batch_of(tiny.make_samples(groups=6, prompt=(16, 30)))
    for tokens_max in (120, 200, 300):
        parts = split_microbatches(batch, tokens_max, keep=keep)
        assert sorted(id(row) for part in parts for row in part) == sorted(id(row) for row in batch.rows)
        assert all(microbatch_tokens(part) <= tokens_max for part in parts)
        for part in parts:
            numbers = {getattr(row, f"{keep}_index") for row in part}
            assert len(part) == sum(getattr(row, f"{keep}_index") in numbers for row in batch.rows)


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


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_split_batch_shares_out_the_denominator(tiny, parts):
    batch = batch_of(tiny.make_samples())
    pieces = tiny.split_batch(batch, parts)
    assert sum(piece.denominator for piece in pieces) == pytest.approx(batch.denominator)
    assert [row for piece in pieces for row in piece.rows] == batch.rows


def test_batching_and_filters_import_no_torch():
    code = "import sys, rollouts.training.batching, rollouts.training.filters; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(("saving", "is_apart"), [(20, True), (21, False)])
def test_rows_without_an_advantage_go_apart_from_where_it_pays(saving, is_apart):
    """Their 30 tokens are spared the backward, two thirds of the work: as much as a microbatch of 20 tokens costs."""

    def row(group, advantage):
        return Row([1] * 30, [1.0] * 30, [1.0] * 30, [advantage] * 30, [0.0] * 30, group, group)

    batch = TrainBatch([row(0, 0.0), row(1, 1.0)], 60.0, [0.0, 1.0], 0)
    found = split_microbatches(batch, 1000, flat_saving_min=saving)
    assert [sorted(each.group_index for each in part) for part in found] == ([[1], [0]] if is_apart else [[0, 1]])
