"""Numerics 11 and 22: GAE and REINFORCE++ see actions only; a teacher that is the student teaches nothing.

A rollout is written as a list of tokens (value, reward of the token, live); a batch joins rows of them.
"""

from __future__ import annotations

import functools
import math
import random
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from rollouts.config.settings import REQUIRED
from rollouts.errors import ConfigError, TrainingError
from rollouts.plugins.signature import check_signature
from rollouts.training.algorithms.calls import batch_advantages
from rollouts.training.algorithms.losses import importance
from rollouts.training.algorithms.token_advantages import distill, gae, reinforce_pp

NAN = math.nan
TOOL = (NAN, NAN, 0.0)


def random_rollouts(seed, count=4, longest=7):
    """Rollouts of 0 to `longest` actions with tool text in between and around."""
    generator = random.Random(seed)
    rollouts = []
    for _ in range(count):
        tokens = [TOOL] * generator.randrange(3)
        for _ in range(generator.randint(0, longest)):
            tokens += [(generator.gauss(0, 1), generator.gauss(0, 0.2), 1.0)] + [TOOL] * generator.choice([0, 0, 1, 3])
        rollouts.append(tokens)
    rewards = [generator.gauss(0, 1) if any(t[2] for t in tokens) else NAN for tokens in rollouts]
    return rollouts, rewards


def batch_of(rows, rewards, dtype=torch.float64, turns=None):
    """What an advantage of the batch may name; `rows` are (rollout, tokens). A reward is a number, or a list with one
    for each turn. `turns` [T] are the turns of the tokens; None: all are of the first.
    """
    flat = [(rollout, *token) for rollout, tokens in rows for token in tokens]
    by_turn = [list(given) if isinstance(given, (list, tuple)) else [given] for given in rewards]
    return {
        "batch": None,
        "turn_rewards": [[] if any(map(math.isnan, given)) else given for given in by_turn],
        "values": torch.tensor([token[1] for token in flat], dtype=dtype),
        "token_rewards": torch.tensor([token[2] for token in flat], dtype=dtype),
        "mask": torch.tensor([token[3] for token in flat], dtype=dtype),
        "rollout_index": torch.tensor([token[0] for token in flat], dtype=torch.int64),
        "turn_index": torch.tensor(turns or [0] * len(flat), dtype=torch.int64),
    }


def call(function, rollouts, rewards, turns=None, **settings):
    given = batch_of(list(enumerate(rollouts)), rewards, turns=turns)
    if function is reinforce_pp:
        del given["values"]
    return function(*given.values(), **settings)


def of_actions(stream, rollouts):
    """The values of the live tokens, and a check that the others got 0."""
    live = [token[2] > 0 for tokens in rollouts for token in tokens]
    values = stream.tolist()
    assert all(value == 0.0 for value, on in zip(values, live, strict=True) if not on)
    return [value for value, on in zip(values, live, strict=True) if on]


def slow_gae(rollouts, rewards, gamma, lam):
    """Every advantage as the sum over all later deltas, and the targets."""
    advantages, returns = [], []
    for tokens, reward in zip(rollouts, rewards, strict=True):
        actions = [token for token in tokens if token[2] > 0]
        given = [token[1] for token in actions]
        if given:
            given[-1] += reward
        values = [token[0] for token in actions] + [0.0]
        deltas = [given[t] + gamma * values[t + 1] - values[t] for t in range(len(actions))]
        for t in range(len(actions)):
            advantages.append(sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(actions))))
            returns.append(advantages[-1] + values[t])
    return advantages, returns


def slow_returns(rollouts, rewards, gamma):
    returns = []
    for tokens, reward in zip(rollouts, rewards, strict=True):
        given = [token[1] for token in tokens if token[2] > 0]
        if given:
            given[-1] += reward
        returns += [sum(gamma ** (k - t) * given[k] for k in range(t, len(given))) for t in range(len(given))]
    return returns


def slow_whitened(values):
    mean, deviation = statistics.fmean(values), statistics.stdev(values)
    return [(value - mean) / deviation for value in values]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (0.99, 1.0), (1.0, 0.0), (0.0, 0.95)])
def test_gae_is_the_formula(seed, gamma, lam):
    rollouts, rewards = random_rollouts(seed)
    advantages, returns = call(gae, rollouts, rewards, gamma=gamma, lam=lam, whiten=False)
    expected, targets = slow_gae(rollouts, rewards, gamma, lam)
    assert of_actions(advantages, rollouts) == pytest.approx(expected)
    assert of_actions(returns, rollouts) == pytest.approx(targets)
    white, same = call(gae, rollouts, rewards, gamma=gamma, lam=lam)
    assert of_actions(white, rollouts) == pytest.approx(slow_whitened(expected), abs=1e-6)
    assert torch.equal(same, returns), "the critic's targets are not whitened"
    wrong, _ = slow_gae(rollouts, rewards, gamma, lam + 0.05)  # control
    if gamma:
        assert wrong != pytest.approx(expected)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_reinforce_pp_is_the_formula(seed, gamma):
    rollouts, rewards = random_rollouts(seed)
    found = of_actions(call(reinforce_pp, rollouts, rewards, gamma=gamma), rollouts)
    assert found == pytest.approx(slow_whitened(slow_returns(rollouts, rewards, gamma)), abs=1e-6)
    assert found != pytest.approx(slow_whitened(slow_returns(rollouts, rewards, 0.5)), abs=1e-3)  # control


def test_undiscounted_returns_are_the_rollouts_rewards():
    rollouts = [[(0.0, 0.0, 1.0)] * 3, [TOOL, (0.0, 0.0, 1.0), TOOL], [(0.0, 0.0, 1.0)] * 2]
    rewards = [1.0, -0.5, 0.25]
    found = of_actions(call(reinforce_pp, rollouts, rewards, gamma=1.0), rollouts)
    assert found == pytest.approx(slow_whitened([1.0] * 3 + [-0.5] + [0.25] * 2))
    discounted = of_actions(call(reinforce_pp, rollouts, rewards, gamma=0.5), rollouts)  # control
    assert len(set(found)) == 3 < len(set(discounted))


def test_what_single_tokens_are_given_flows_back_to_the_earlier_ones_only():
    """A KL penalty at the middle one of three tokens."""
    plain = [[(0.0, 0.0, 1.0)] * 3]
    penalized = [[(0.0, 0.0, 1.0), (0.0, -2.0, 1.0), (0.0, 0.0, 1.0)]]
    before, _ = call(gae, plain, [1.0], gamma=1.0, lam=1.0, whiten=False)
    after, returns = call(gae, penalized, [1.0], gamma=1.0, lam=1.0, whiten=False)
    assert before.tolist() == [1.0, 1.0, 1.0]
    assert after.tolist() == returns.tolist() == [-1.0, -1.0, 1.0]
    assert call(reinforce_pp, plain, [1.0]).tolist() == [0.0] * 3, "no spread"
    assert call(reinforce_pp, penalized, [1.0]).tolist() == pytest.approx(slow_whitened([-1.0, -1.0, 1.0]))


def with_tools(rollouts, seed):
    """The same rollouts with more tool text, anywhere."""
    generator = random.Random(seed)
    longer = []
    for tokens in rollouts:
        tokens = list(tokens)
        for _ in range(generator.randrange(6)):
            tokens.insert(generator.randint(0, len(tokens)), TOOL)
        longer.append(tokens)
    return longer


FUNCTIONS = [
    lambda *args: call(gae, *args, gamma=0.9, lam=0.8)[0],
    lambda *args: call(gae, *args, gamma=0.9, lam=0.8)[1],
    lambda *args: call(gae, *args, gamma=0.9, lam=0.8, whiten=False)[0],
    lambda *args: call(reinforce_pp, *args, gamma=0.9),
]


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_tool_tokens_change_no_actions_advantage(seed, tools):
    rollouts, rewards = random_rollouts(seed)
    longer = with_tools(rollouts, tools)
    for function in FUNCTIONS:
        before, after = function(rollouts, rewards), function(longer, rewards)
        assert of_actions(after, longer) == of_actions(before, rollouts), "to the last bit"


def test_a_version_that_discounts_across_tool_tokens_is_caught():
    """The control: every position is a step of time, as in trainers that pass masked tokens to the recursion."""

    def naive(rollouts, rewards):
        found = []
        for tokens, reward in zip(rollouts, rewards, strict=True):
            after = 0.0
            streams = []
            for place in range(len(tokens) - 1, -1, -1):
                own = tokens[place][1] if tokens[place][2] else 0.0
                after = own + (reward if place == len(tokens) - 1 else 0.0) + 0.9 * after
                streams.append(after if tokens[place][2] else 0.0)
            found += streams[::-1]
        return torch.tensor(found, dtype=torch.float64)

    rollouts, rewards = [[(0.0, 0.0, 1.0), (0.0, 0.0, 1.0)]], [1.0]
    longer = [[(0.0, 0.0, 1.0), TOOL, TOOL, (0.0, 0.0, 1.0)]]
    assert of_actions(naive(longer, rewards), longer) != of_actions(naive(rollouts, rewards), rollouts)
    found = [of_actions(call(gae, each, rewards, gamma=0.9, whiten=False)[0], each) for each in (rollouts, longer)]
    assert found[0] == found[1]


@pytest.mark.parametrize("seed", range(5))
def test_segments_of_a_rollout_are_one_sequence(seed):
    """Cut anywhere, with rows of other rollouts in between."""
    generator = random.Random(seed)
    rollouts, rewards = random_rollouts(seed, count=3)
    rows, later = [], []
    for rollout, tokens in enumerate(rollouts):
        cut = generator.randint(0, len(tokens))
        rows.append((rollout, tokens[:cut]))
        later.append((rollout, tokens[cut:]))
    generator.shuffle(later)
    given = batch_of(rows + later, rewards)
    cut_advantages, cut_returns = gae(*given.values(), gamma=0.9)
    whole_advantages, whole_returns = call(gae, rollouts, rewards, gamma=0.9)
    for found, expected in ((cut_advantages, whole_advantages), (cut_returns, whole_returns)):
        for rollout in range(3):
            live = (given["rollout_index"] == rollout) & (given["mask"] > 0)
            start = sum(len(tokens) for tokens in rollouts[:rollout])
            own = expected[start : start + len(rollouts[rollout])]
            assert found[live].tolist() == pytest.approx(own[own != 0].tolist(), abs=1e-12)
    # The control: segments taken for rollouts of their own. The first then ends without a reward.
    apart = batch_of([(0, [(0.0, 0.0, 1.0)] * 2), (1, [(0.0, 0.0, 1.0)])], [0.0, 1.0])
    joined = batch_of([(0, [(0.0, 0.0, 1.0)] * 2), (0, [(0.0, 0.0, 1.0)])], [1.0])
    assert gae(*apart.values(), whiten=False)[0].tolist() == [0.0, 0.0, 1.0]
    assert gae(*joined.values(), whiten=False, lam=1.0)[0].tolist() == [1.0, 1.0, 1.0]


# --- rewards by turn ------------------------------------------------------------------------------------------------


def random_turns(seed, count=4):
    """Rollouts of one to four turns, each with one to three actions between tool text; the rewards by turn, and the
    turn of each token.
    """
    generator = random.Random(seed)
    rollouts, rewards, turns = [], [], []
    for number in range(count):
        tokens, earned = [], []
        for turn in range(generator.randint(1, 4) if number else 3):
            own = [TOOL] * generator.randrange(3)
            for _ in range(generator.randint(1, 3)):
                own += [(generator.gauss(0, 1), generator.gauss(0, 0.2), 1.0)] + [TOOL] * generator.randrange(2)
            tokens += own
            turns += [turn] * len(own)
            earned.append(generator.gauss(0, 1))
        rollouts.append(tokens)
        rewards.append(earned)
    return rollouts, rewards, turns


def steps_of(rollouts, rewards, turns):
    """For each rollout its actions in order, as numpy rows (value, reward, turn). A turn's last one has its reward."""
    place, found = 0, []
    for tokens, earned in zip(rollouts, rewards, strict=True):
        rows = [(*token[:2], turns[place + n]) for n, token in enumerate(tokens) if token[2] > 0]
        place += len(tokens)
        rows = np.array(rows).reshape(-1, 3)
        for turn, reward in enumerate(earned):
            rows[np.flatnonzero(rows[:, 2] == turn)[-1], 1] += reward
        found.append(rows)
    return found


@pytest.mark.parametrize("seed", range(8))
def test_a_turns_reward_arrives_at_its_last_action(seed):
    """With gamma = lam = 1: the rewards to go minus the value."""
    rollouts, rewards, turns = random_turns(seed)
    advantages, returns = call(gae, rollouts, rewards, turns, gamma=1.0, lam=1.0, whiten=False)
    steps = steps_of(rollouts, rewards, turns)
    to_go = np.concatenate([np.cumsum(rows[::-1, 1])[::-1] for rows in steps])
    values = np.concatenate([rows[:, 0] for rows in steps])
    assert of_actions(advantages, rollouts) == pytest.approx(list(to_go - values))
    assert of_actions(returns, rollouts) == pytest.approx(list(to_go))
    found = of_actions(call(reinforce_pp, rollouts, rewards, turns), rollouts)
    assert found == pytest.approx(slow_whitened(list(to_go)), abs=1e-6)
    # The control: the sum of the rewards at the end of the rollout, which later turns share with earlier ones.
    sums = [sum(earned) for earned in rewards]
    at_the_end = of_actions(call(gae, rollouts, sums, turns, gamma=1.0, lam=1.0, whiten=False)[1], rollouts)
    assert at_the_end != pytest.approx(list(to_go), abs=1e-3)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (0.0, 0.95), (1.0, 0.0)])
def test_gae_with_rewards_by_turn_is_the_formula_by_token_and_by_turn(seed, gamma, lam):
    rollouts, rewards, turns = random_turns(seed)
    for per in ("token", "turn"):
        advantages, returns = [], []
        for rows in steps_of(rollouts, rewards, turns):
            of_turn = [np.flatnonzero(rows[:, 2] == turn) for turn in np.unique(rows[:, 2])]
            step = of_turn if per == "turn" else [np.array([n]) for n in range(len(rows))]
            values = np.array([rows[own[0], 0] for own in step] + [0.0])
            deltas = np.array([rows[own, 1].sum() for own in step]) + gamma * values[1:] - values[:-1]
            weights = (gamma * lam) ** np.maximum(np.subtract.outer(np.arange(len(step)), np.arange(len(step))).T, 0)
            sums = (np.triu(weights) * deltas).sum(1)
            sizes = [len(own) for own in step]
            advantages += list(np.repeat(sums, sizes))
            returns += list(np.repeat(sums + values[:-1], sizes))
        found = call(gae, rollouts, rewards, turns, gamma=gamma, lam=lam, per=per, whiten=False)
        assert of_actions(found[0], rollouts) == pytest.approx(advantages)
        assert of_actions(found[1], rollouts) == pytest.approx(returns)
    other = call(gae, rollouts, rewards, turns, gamma=gamma, lam=lam, per="token", whiten=False)[0]
    assert not torch.allclose(other, found[0], atol=1e-3)  # control: tokens and turns are different time steps


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.sampled_from(["token", "turn"]))
def test_tool_tokens_between_turns_change_no_actions_advantage(seed, tools, per):
    rollouts, rewards, turns = random_turns(seed)
    generator, longer, later, place = random.Random(tools), [], [], 0
    for tokens in rollouts:
        own = list(zip(tokens, turns[place : place + len(tokens)], strict=True))
        place += len(tokens)
        for _ in range(generator.randrange(6)):
            where = generator.randint(0, len(own))
            own.insert(where, (TOOL, own[max(where - 1, 0)][1]))
        longer.append([token for token, _ in own])
        later += [turn for _, turn in own]
    for number in (0, 1):
        before, after = (
            call(gae, each, rewards, whose, gamma=0.9, lam=0.8, per=per)[number]
            for each, whose in ((rollouts, turns), (longer, later))
        )
        assert of_actions(after, longer) == of_actions(before, rollouts), "to the last bit"


LIVE = (0.0, 0.0, 1.0)
DEAD = (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("tokens", "turns", "expected"),
    [
        ([LIVE, LIVE, LIVE], [0, 1, 2], [7.0, 6.0, 4.0]),
        ([LIVE, DEAD, LIVE], [0, 1, 2], [7.0, 0.0, 4.0]),  # the second turn is masked: the first action earned it
        ([LIVE, LIVE, DEAD], [0, 1, 2], [7.0, 6.0, 0.0]),  # the last one too
        ([DEAD, LIVE, LIVE], [0, 1, 2], [0.0, 6.0, 4.0]),  # no action had a part in the first reward
        ([LIVE, LIVE, LIVE], [0, 0, 0], [7.0, 7.0, 7.0]),  # turns that are unknown
        ([LIVE, LIVE, LIVE], [0, 2, 5], [7.0, 4.0, 4.0]),  # a turn beyond the last reward counts as the last
        ([LIVE, LIVE, LIVE], [2, 0, 1], [4.0, 7.0, 6.0]),  # another conversation, which parts at the third turn
    ],
)
def test_whose_reward_it_is(tokens, turns, expected):
    for per in ("token", "turn"):
        _, returns = call(gae, [tokens], [[1.0, 2.0, 4.0]], turns, lam=1.0, per=per, whiten=False)
        assert returns.tolist() == expected


def test_time_steps_are_tokens_or_turns():
    with pytest.raises(ConfigError, match="the setting per is episode, but it has to be token or turn"):
        call(gae, [[LIVE]], [1.0], per="episode")


def test_whitening_counts_live_tokens_only():
    rollouts, rewards = random_rollouts(3, count=6)
    for stream in (call(gae, rollouts, rewards)[0], call(reinforce_pp, rollouts, rewards)):
        values = of_actions(stream, rollouts)
        assert statistics.fmean(values) == pytest.approx(0.0, abs=1e-12)
        assert statistics.stdev(values) == pytest.approx(1.0, abs=1e-6)
        assert float(stream.std()) != pytest.approx(1.0, abs=1e-2)  # control: with the masked ones
    same = [[(0.0, 0.0, 1.0)] * 2] * 3
    assert not call(reinforce_pp, same, [0.1 + 0.2, 0.3, 0.3]).any(), "no spread but that of rounding"
    assert not call(gae, [[(0.5, 0.0, 1.0)]], [1.0])[0].any(), "one token has nothing to be compared with"
    assert call(gae, [[(0.5, 0.0, 1.0)]], [1.0])[1].tolist() == [1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_precision_is_kept(dtype):
    rollouts, rewards = random_rollouts(1)
    given = batch_of(list(enumerate(rollouts)), rewards, dtype)
    advantages, returns = gae(*given.values())
    assert advantages.dtype == returns.dtype == dtype
    del given["values"]
    assert reinforce_pp(*given.values()).dtype == dtype
    expected = call(reinforce_pp, rollouts, rewards)
    assert reinforce_pp(*given.values()).tolist() == pytest.approx(expected.tolist(), abs=1e-5)


def test_nothing_live_and_no_rollouts_are_fine():
    for rollouts, rewards in ([[TOOL], [TOOL] * 2], [NAN, NAN]), ([[], []], [NAN, NAN]), ([], []):
        advantages, returns = call(gae, rollouts, rewards)
        assert not advantages.any() and not returns.any() and len(advantages) == sum(map(len, rollouts))
        assert not call(reinforce_pp, rollouts, rewards).any()


def test_the_work_does_not_grow_with_the_number_of_rollouts():
    class Counting(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.calls += 1
            return func(*args, **(kwargs or {}))

    counts = []
    for rollouts in (4, 400):
        given = batch_of([(n, [(0.1 * n, 0.0, 1.0), TOOL] * 6) for n in range(rollouts)], list(range(rollouts)))
        with Counting() as counting:
            gae(*given.values())
        counts.append(counting.calls)
    assert counts[0] == counts[1] < 100


def test_a_teacher_that_is_the_student_teaches_nothing():
    own = torch.tensor([-0.3, -4.0, -1e-9], dtype=torch.float64)
    advantages = distill(None, own, own.clone())
    assert advantages.tolist() == [0.0, 0.0, 0.0]
    logprobs = own.clone().requires_grad_()
    importance(logprobs, own, advantages).sum().backward()
    assert logprobs.grad.tolist() == [0.0, 0.0, 0.0]
    other = distill(None, own, own - 0.5)  # control
    logprobs = own.clone().requires_grad_()
    importance(logprobs, own, other).sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([0.5] * 3), (
        "the gradient makes less likely what the teacher likes less"
    )


def test_distillation_is_the_reverse_kl_a_token():
    student, teacher = torch.tensor([-1.0, -2.0, -0.1]), torch.tensor([-0.5, -3.0, -1000.0], requires_grad=True)
    found = distill(None, student, teacher, coef=2.0)
    assert found.tolist() == pytest.approx([1.0, -2.0, -40.0]) and not found.requires_grad
    logits, other = torch.randn(2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).log_softmax(1)
    expected = torch.distributions.kl_divergence(*(torch.distributions.Categorical(logits=x) for x in (logits, other)))
    assert float((logits.exp() * distill(None, logits, other)).sum()) == pytest.approx(-float(expected))


@pytest.mark.parametrize(
    ("function", "name", "value"),
    [
        (gae, "gamma", 1.1),
        (gae, "gamma", NAN),
        (gae, "lam", -0.1),
        (reinforce_pp, "gamma", 2),
        (reinforce_pp, "eps", -1),
    ],
)
def test_settings_out_of_their_domain_are_named(function, name, value):
    with pytest.raises(ConfigError, match=f"the setting {name} is"):
        call(function, [[(0.0, 0.0, 1.0)]], [1.0], **{name: value})


@pytest.mark.parametrize("coef", [0, -1.0, NAN])
def test_a_distillation_that_counts_nothing_is_refused(coef):
    with pytest.raises(ConfigError, match="setting coef"):
        distill(None, torch.zeros(1), torch.zeros(1), coef=coef)


def available(**streams):
    return {"mask": torch.tensor([0.0, 1.0, 1.0]), "rewards": torch.ones(1), **streams}


def test_the_caller_takes_both_forms_and_zeroes_what_is_masked():
    def plain(batch, mask):
        assert batch is None
        return torch.tensor([NAN, 1.0, 2.0], requires_grad=True)

    def both(batch, mask):
        return torch.tensor([5.0, 1.0, 2.0]), [math.inf, 3.0, 4.0]

    advantages, returns = batch_advantages(plain, available(), 3)
    assert advantages.tolist() == [0.0, 1.0, 2.0] and returns is None and not advantages.requires_grad
    advantages, returns = batch_advantages(functools.partial(both), available(), 3)
    assert advantages.tolist() == [0.0, 1.0, 2.0] and returns.tolist() == [0.0, 3.0, 4.0]
    pair = {"mask": torch.ones(2)}
    assert batch_advantages(lambda batch: torch.tensor([1.0, 2.0]), pair, 2)[1] is None, "two tokens are no pair"
    nothing = {"mask": torch.zeros(3)}
    assert batch_advantages(lambda batch: 1 / 0, nothing, 3)[0].tolist() == [0.0] * 3, "it is not called"


def test_the_caller_runs_what_is_shipped():
    given = batch_of(list(enumerate([[TOOL, (0.5, 0.0, 1.0)], [(0.5, 0.1, 1.0), TOOL]])), [1.0, 0.0])
    for function in (gae, reinforce_pp):
        advantages, returns = batch_advantages(function, given, 4)
        assert advantages[[0, 3]].tolist() == [0.0, 0.0] and advantages[1] > 0 > advantages[2]
        assert (returns is None) == (function is reinforce_pp)
    streams = {"rollout_logprobs": torch.tensor([NAN, -1.0, -2.0]), "teacher_logprobs": torch.tensor([0.0, -2.0, -2.0])}
    assert batch_advantages(distill, available(**streams), 3)[0].tolist() == [0.0, -1.0, 0.0]


def test_the_caller_names_who_is_at_fault():
    def reduced(batch, mask):
        return mask.mean()

    def infinite(batch, mask):
        return mask, mask / torch.tensor([1.0, 1.0, 0.0])

    def raising(batch, mask):
        return mask[7]

    with pytest.raises(TrainingError, match=r"advantage reduced returned as advantages shape \(\)"):
        batch_advantages(reduced, available(), 3)
    with pytest.raises(TrainingError, match=r"advantage infinite returned as returns .* at 1 of 2 live"):
        batch_advantages(infinite, available(), 3)
    with pytest.raises(TrainingError, match="advantage raising raised IndexError"):
        batch_advantages(raising, available(), 3)
    with pytest.raises(TrainingError, match="NoneType None"):
        batch_advantages(lambda batch: None, available(), 3)


@pytest.mark.parametrize("function", [gae, reinforce_pp])
def test_nan_at_a_live_token_is_not_whitened_away(function):
    given = batch_of([(0, [(0.0, 0.0, 1.0), (0.0, NAN, 1.0)]), (1, [(0.0, 0.0, 1.0)])], [1.0, 0.0])
    with pytest.raises(TrainingError, match=f"{function.__name__} .*NaN"):
        batch_advantages(function, given, 3)


@pytest.mark.parametrize("function", [gae, reinforce_pp, distill])
def test_what_is_named_is_in_the_vocabulary_and_settings_say_what_they_are(function):
    signature = check_signature(function, "advantages", function.__name__)
    assert all(setting.doc and setting.default is not REQUIRED for setting in signature.settings)
