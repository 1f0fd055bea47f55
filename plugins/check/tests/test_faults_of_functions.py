"""Functions with one mistake each: exactly the expected check finds it. The same function without it passes."""

from __future__ import annotations

import random

import pytest
import torch
from rollouts_check import check_component
from rollouts_check.components.table import FAMILIES
from rollouts_check.scaffold.packages import KIND_NAMES

from rollouts.plugins.index import HOOKS, KINDS
from rollouts.training.algorithms import Algorithm, Term
from rollouts.training.algorithms.aggregation import TokenWeights

OF_PACKAGE = ("imports", "wheel")


# --- losses -----------------------------------------------------------------------------------------------------------


def good_loss(logprobs, old_logprobs, advantages, *, cap: float = 2.0):
    """The weight is detached, so its gradient is not that of its values."""
    ratio = (logprobs - old_logprobs).detach().clamp(-20, 20).exp()
    return -ratio.clamp(max=cap) * advantages * logprobs, {"capped": (ratio > cap).float()}


def good_rollout_loss(logprobs, advantages, mask, rollout_index):
    rollouts, place = torch.unique(rollout_index, return_inverse=True)
    terms = torch.where(mask > 0, advantages * logprobs, 0.0)
    return -torch.zeros(len(rollouts)).to(terms).index_add(0, place, terms)


def reduced(logprobs, advantages):
    return (-logprobs * advantages).mean()


def wrong_metric(logprobs, advantages):
    return -logprobs * advantages, {"metric": [1.0, 2.0]}


def unknown_input(logprobs, advantage):
    return -logprobs * advantage


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * x  # the 2 is missing


class _RightSquare(_Square):
    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * 2 * x


def good_custom_backward(logprobs, advantages):
    return _RightSquare.apply(logprobs) * advantages


def wrong_backward(logprobs, advantages):
    return _Square.apply(logprobs) * advantages


def no_gradient(logprobs, advantages):
    return -logprobs.detach() * advantages


def mean_with_masked(logprobs, old_logprobs, advantages, rollout_index):
    apart = (logprobs - old_logprobs).clamp(-20, 20)
    rollouts, place = torch.unique(rollout_index, return_inverse=True)
    sums = torch.zeros(len(rollouts)).to(apart).index_add(0, place, apart)
    counts = torch.zeros(len(rollouts)).to(apart).index_add(0, place, torch.ones_like(apart))
    return -(sums / counts)[place].exp() * advantages


def sum_with_masked(logprobs, rollout_index):
    rollouts, place = torch.unique(rollout_index, return_inverse=True)
    return -torch.zeros(len(rollouts)).to(logprobs).index_add(0, place, logprobs)


def whitened(logprobs, advantages):
    return -logprobs * (advantages - advantages.mean()) / (advantages.std() + 1e-6)


def positions(logprobs, advantages):
    return -logprobs * advantages * torch.arange(1, len(logprobs) + 1)


def unbounded(logprobs, old_logprobs, advantages):
    return -(logprobs - old_logprobs).exp() * advantages


def infinite_gradient(logprobs, advantages):
    return -torch.where(logprobs < 0, (-logprobs).sqrt(), 0.0) * advantages


def in_place(logprobs, advantages):
    return -logprobs * advantages.mul_(2.0)


def noisy(logprobs, advantages):
    return -logprobs * advantages + torch.rand(1)


class _Counts:
    """A loss with a state."""

    count = 0

    def __call__(self, logprobs, advantages):
        self.count += 1
        return -logprobs * advantages * (1 + 1e-3 * self.count)


def bad_advantage(rewards):
    return (rewards - rewards.mean()) / rewards.std(correction=0)


BAD_PARTS = Algorithm(bad_advantage, "token_mean", (Term(good_loss),))


# --- KL estimators and corrections ------------------------------------------------------------------------------------


def kl_scalar(logprobs, ref_logprobs):
    return (logprobs - ref_logprobs).sum()


def kl_not_zero(logprobs, ref_logprobs):
    apart = (ref_logprobs - logprobs).clamp(-20, 20)
    return apart.exp() - apart


def kl_infinite(logprobs, ref_logprobs):
    apart = ref_logprobs - logprobs
    return apart.expm1() - apart


def negative_weight(old_logprobs, rollout_logprobs):
    return old_logprobs - rollout_logprobs


def zero_at_agreement(old_logprobs, rollout_logprobs):
    return (old_logprobs - rollout_logprobs).abs()


def normalized_weight(old_logprobs, rollout_logprobs, mask):
    ratio = (old_logprobs - rollout_logprobs).where(mask > 0, 0.0).clamp(-5, 5).exp()
    return ratio / ratio.mean()


# --- functions of a group ---------------------------------------------------------------------------------------------


def good_advantage(rewards):
    centered = rewards - rewards.mean()
    return centered / (centered.square().mean().sqrt() + 1e-4)


def not_per_rollout(rewards):
    return rewards.mean()


def divides_by_zero(rewards):
    return rewards * 0 if len(rewards) < 2 else (rewards - rewards.mean()) / rewards.std()


def needs_two(rewards):
    return (rewards - rewards.mean()) / (rewards.std() + 1e-4)


def per_token(rewards, lengths):
    return rewards / lengths


def against_the_first(rewards):
    return rewards - rewards[0]


def against_the_ones_before(rewards):
    before = rewards.cumsum(0) - rewards
    return rewards - before / (rewards * 0 + 1).cumsum(0)


def wrong_sign(rewards):
    return rewards.mean() - rewards


def good_batch_advantage(batch, rewards, rollout_index):
    judged = rewards[~rewards.isnan()]
    return (rewards - judged.mean())[rollout_index]


def masked_in_mean(batch, rewards, values, rollout_index):
    return rewards.nan_to_num(0.0)[rollout_index] - values.mean()


def nan_in_mean(batch, rewards, rollout_index):
    return (rewards - rewards.mean())[rollout_index]


def changes_rewards(rewards):
    rewards -= rewards.mean()
    return rewards.clone()


def shape_of_parts(parts, weights):
    return parts * weights


def against_the_weights(parts, weights):
    return -(parts @ weights)


def price_of_length(rewards, lengths):
    return rewards - 1 / lengths


def penalty_for_rewards(rewards):
    return -rewards


def floats(rewards):
    return rewards * 1.0


def first_half(rewards):
    return torch.arange(len(rewards)) < (len(rewards) + 1) // 2


def pairs_with_itself(rewards):
    return [(int(rewards.argmax()), int(rewards.argmax()))]


def worst_is_chosen(rewards):
    if float(rewards.max()) == float(rewards.min()):
        return []
    return [(int(rewards.argmin()), int(rewards.argmax()))]


# --- aggregations, filters, rewards, curricula ------------------------------------------------------------------------


def only_weights(masks):
    return [list(mask) for mask in masks]


def counts_masked(masks):
    return TokenWeights([[1.0] * len(mask) for mask in masks], float(sum(map(len, masks))))


def divides_by_live(masks):
    return TokenWeights([[value / sum(mask) for value in mask] for mask in masks], float(len(masks)))


def by_place(masks):
    weights = [[value * (place + 1) for value in mask] for place, mask in enumerate(masks)]
    return TokenWeights(weights, float(sum(map(sum, weights))))


def returns_count(rewards):
    return len(rewards)


def compares_none(rewards):
    return max(rewards) > min(rewards)


def first_is_best(rewards):
    return rewards[0] == max(reward for reward in rewards if reward is not None)


def sorts(rewards):
    rewards.sort(key=lambda reward: -1 if reward is None else reward)
    return True


def good_reward(trajectory):
    return min(1.0, 20 / max(len(trajectory.last_text.split()), 1))


def good_group_reward(trajectories):
    shortest = min(len(each.last_text) for each in trajectories)
    return [float(len(each.last_text) == shortest) for each in trajectories]


def good_reward_of_groups(groups):
    return [[float(len(each.last_text)) for each in group] for group in groups]


async def good_async_reward(trajectory):
    return float(len(trajectory.last_text))


def not_a_number(trajectory):
    return float("nan")


def needs_words(trajectory):
    return 1.0 / len(trajectory.last_text.split())


def reads_unicode(trajectory):
    return float(len(trajectory.last_text.encode()))


def takes_the_reply(trajectory):
    return float(len(trajectory.messages.pop().text))


def strips_the_messages(trajectory):
    for message in trajectory.messages:
        message.content = message.content.strip()
    return float("please" in trajectory.last_text)


def throws_dice(trajectory):
    return random.random()


def one_for_all(trajectories):
    return [1.0]


def one_for_all_groups(groups):
    return [1.0 for group in groups for _ in group]


def negative_later(step):
    return 1.0 - step / 50


def never(step):
    return 0


class _Grows:
    """A curriculum that counts its calls."""

    weight = 0.0

    def __call__(self, step):
        self.weight += 1.0
        return self.weight


# --- datasets ---------------------------------------------------------------------------------------------------------


def good_rows(*, count: int = 3):
    return [{"prompt": f"{n}?", "answer": n} for n in range(count)]


def good_file(source, streaming):
    """Its rows need a source, so most checks are skipped."""
    with open(source) as lines:
        return [{"prompt": line} for line in lines]


def one_table():
    return {"prompt": ["1?", "2?"]}


def rows_of_lists():
    return [["1?", 1]]


def rows_of_complex_numbers():
    return [{"prompt": "1?", "answer": 1j}]


def no_rows():
    return []


def other_columns():
    return [{"q": "1?", "a": 1}]


def streams_backwards(streaming):
    rows = good_rows()
    return rows[::-1] if streaming else rows


def any_source(source):
    return good_rows()


def unnamed_source(source):
    if source:
        raise ValueError("it cannot be read")
    return good_rows()


def shuffled_rows():
    rows = good_rows(count=50)
    random.shuffle(rows)
    return rows


def own_limit(*, limit: int = 3):
    return good_rows(count=limit)


FAULTS = [
    ("losses", unknown_input, "definition"),
    ("losses", reduced, "values"),
    ("losses", wrong_metric, "values"),
    ("losses", wrong_backward, "gradient"),
    ("losses", no_gradient, "gradient"),
    ("losses", mean_with_masked, "masked"),
    ("losses", sum_with_masked, "masked"),
    ("losses", whitened, "rows"),
    ("losses", positions, "rows"),
    ("losses", unbounded, "finite"),
    ("losses", infinite_gradient, "finite"),
    ("losses", in_place, "unchanged"),
    ("losses", noisy, "repeatable"),
    ("losses", BAD_PARTS, "parts"),
    ("kl", kl_scalar, "values"),
    ("kl", kl_not_zero, "equal"),
    ("kl", kl_infinite, "finite"),
    ("corrections", negative_weight, "values"),
    ("corrections", zero_at_agreement, "agreement"),
    ("corrections", normalized_weight, "rows"),
    ("advantages", not_per_rollout, "values"),
    ("advantages", divides_by_zero, "equal-rewards"),
    ("advantages", needs_two, "one-rollout"),
    ("advantages", per_token, "finite"),
    ("advantages", against_the_first, "order"),
    ("advantages", against_the_ones_before, "order"),
    ("advantages", wrong_sign, "better"),
    ("advantages", masked_in_mean, "masked"),
    ("advantages", nan_in_mean, "masked"),
    ("advantages", changes_rewards, "unchanged"),
    ("mixers", shape_of_parts, "values"),
    ("mixers", against_the_weights, "better"),
    ("shapings", price_of_length, "finite"),
    ("shapings", penalty_for_rewards, "better"),
    ("selectors", floats, "values"),
    ("selectors", first_half, "order"),
    ("pairings", pairs_with_itself, "values"),
    ("pairings", worst_is_chosen, "better"),
    ("aggregations", only_weights, "values"),
    ("aggregations", counts_masked, "masked"),
    ("aggregations", divides_by_live, "nothing-live"),
    ("aggregations", by_place, "order"),
    ("filters", returns_count, "values"),
    ("filters", compares_none, "any-group"),
    ("filters", first_is_best, "order"),
    ("filters", sorts, "unchanged"),
    ("rewards", not_a_number, "values"),
    ("rewards", one_for_all, "values"),
    ("rewards", one_for_all_groups, "values"),
    ("rewards", needs_words, "any-reply"),
    ("rewards", reads_unicode, "any-reply"),
    ("rewards", takes_the_reply, "unchanged"),
    ("rewards", strips_the_messages, "unchanged"),
    ("rewards", throws_dice, "repeatable"),
    ("datasets", one_table, "rows"),
    ("datasets", rows_of_lists, "rows"),
    ("datasets", rows_of_complex_numbers, "rows"),
    ("datasets", no_rows, "rows"),
    ("datasets", other_columns, "usable"),
    ("datasets", streams_backwards, "streaming"),
    ("datasets", unnamed_source, "no-source"),
    ("datasets", shuffled_rows, "repeatable"),
    ("datasets", own_limit, "definition"),
    ("curricula", negative_later, "values"),
    ("curricula", never, "values"),
    ("curricula", _Grows(), "repeatable"),
]
GOOD = [
    ("losses", good_loss),
    ("losses", good_rollout_loss),
    ("losses", good_custom_backward),
    ("advantages", good_advantage),
    ("advantages", good_batch_advantage),
    ("datasets", good_rows),
    ("datasets", good_file),
    ("rewards", good_reward),
    ("rewards", good_group_reward),
    ("rewards", good_reward_of_groups),
    ("rewards", good_async_reward),
]


def name_of(value):
    return value if isinstance(value, str) else getattr(value, "__name__", type(value).__name__)


def failed(kind, component, **options):
    """The names of the failed checks, and the message."""
    try:
        check_component(component, kind, skip=OF_PACKAGE, **options)
    except AssertionError as error:
        lines = [line for line in str(error).splitlines() if " FAILED" in line]
        return [line.split()[0] for line in lines], str(error)
    return [], ""


@pytest.mark.parametrize(("kind", "component", "expected"), FAULTS, ids=name_of)
def test_exactly_the_expected_check_finds_a_fault(kind, component, expected):
    found, message = failed(kind, component)
    assert found == [expected], message
    assert all(f"\n    {word} " in message for word in ("tried", "seen", "change"))
    assert "test_faults_of_functions.py, line " in " ".join(message.split()) or expected == "definition"


@pytest.mark.parametrize(("kind", "component"), GOOD, ids=name_of)
def test_a_function_without_a_mistake_passes(kind, component):
    assert failed(kind, component) == ([], "")


def test_a_state_is_found():
    """A check before it may fail too: it calls the function several times."""
    assert "repeatable" in failed("losses", _Counts(), only=["repeatable"])[0]


def test_each_family_of_functions_has_faults():
    faults = [kind for kind, _, _ in FAULTS]
    functions = {kind for kind, family in FAMILIES.items() if family.trial is not None}
    assert functions - set(faults) == {
        "optimizers",
        "references",
        "samplers",
        "tool_parsers",
    }  # test_faults_of_objects.py
    assert all(faults.count(kind) >= 2 for kind in set(faults))


def test_a_loader_is_checked_with_its_source(tmp_path):
    file = tmp_path / "rows.txt"
    file.write_text("one\ntwo\n")
    report = check_component(good_file, "dataset", skip=OF_PACKAGE, source=str(file))
    assert {result.status for result in report.results} == {"passed"}
    assert "2 rows with the columns prompt" in [result.remark for result in report.results]
    report = check_component(good_file, "dataset", skip=OF_PACKAGE)
    (first, *_) = [result for result in report.results if result.status == "skipped"]
    assert first.name == "rows" and first.enable == "name one that it can read: --data.source FILE"


def test_a_source_without_an_effect_is_a_note():
    report = check_component(any_source, "dataset", skip=OF_PACKAGE)
    (notes,) = [result.notes for result in report.results if result.name == "no-source"]
    assert "it returned 3 rows; a loader that takes no source should not name `source` (" in notes[0]


def test_columns_of_a_loader_can_be_renamed():
    found, _ = failed("datasets", other_columns, prompt="q", answer="a")
    assert found == []
    found, message = failed("datasets", other_columns, prompt="question")
    assert found == ["usable"] and "has no column 'question'" in message


def test_every_kind_has_a_table():
    assert {*FAMILIES, "environments"} == set(KIND_NAMES.values()) == {*KINDS, HOOKS}


def test_another_seed_finds_the_same(pytestconfig):
    for component, expected in ((good_loss, []), (wrong_backward, ["gradient"]), (whitened, ["rows"])):
        assert failed("losses", component, seed=7)[0] == expected
