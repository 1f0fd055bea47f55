"""Groups: why they are dropped, the numbers of their samples, and metrics."""

from __future__ import annotations

import functools

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from rollouts.env.mixing import RewardTerm
from rollouts.errors import RewardError, RunError
from rollouts.training.rollout_gen.groups import (
    Group,
    NamedFilter,
    check_judged,
    filter_group,
    group_samples,
    group_scorer,
)
from rollouts.training.rollout_gen.steps import reward_metrics, rollout_metrics
from rollouts.types import Episode, Message, Score, Segment, Status, Task, Trajectory

TASK = Task("2 + 2?", answer=4)


def episode(value=1.0, *, order=(0, 0), status=Status.COMPLETED, segments=1, parts=None, metrics=None):
    trajectory = Trajectory(
        TASK,
        [*TASK.messages, Message("assistant", "4")],
        [Segment([5, 6, 7], [0.0, 1.0, 1.0], [0.0, -0.5, -0.1], [-1, 0, 0]) for _ in range(segments)],
        status,
        {"turns": 1.0},
    )
    counts = {"turns": 1.0, "latency_seconds": 0.5} | (metrics or {})
    return Episode(order, TASK, [trajectory], Score(value, parts or {}), counts)


def group(*rewards, number=0):
    return Group(number, TASK, tuple(episode(value, order=(number, i)) for i, value in enumerate(rewards)))


def test_filters_say_why():
    def keep(rewards):
        return True

    def refuse(samples):
        return False

    def explain(trajectories, step, *, words="none"):
        return f"{words}_{len(trajectories)}_{step}"

    filters = [
        NamedFilter("keep", keep, {}),
        NamedFilter("explain", explain, {"words": "too_dull"}),
        NamedFilter("no", refuse, {}),
    ]
    assert filter_group(group(1.0, 0.0), filters, step=3).dropped == "too_dull_2_3"
    assert filter_group(group(1.0, 0.0), filters[2:], step=3).dropped == "no"
    assert filter_group(group(1.0, 0.0), filters[:1], step=3).dropped is None
    assert filter_group(group(1.0, 0.0), [NamedFilter("odd", lambda rewards: "", {})], step=0).dropped == "odd"


def test_a_group_that_nobody_judged_is_dropped():
    assert filter_group(group(None, None), [], step=0).dropped == "no_reward"
    assert filter_group(group(None, 0.0), [], step=0).dropped is None


def test_filters_see_the_trajectory_that_was_judged():
    other = Trajectory(TASK, [*TASK.messages, Message("assistant", "an aside")], status=Status.COMPLETED)
    first = episode()
    both = first._replace(trajectories=[other, *first.trajectories])
    seen = []
    spy = NamedFilter("spy", lambda trajectories: bool(seen.extend(t.last_text for t in trajectories)) or True, {})
    filter_group(Group(0, TASK, (both,)), [spy], step=0)
    assert seen == ["4"]


def test_all_failed_says_the_commonest_reasons():
    failed = [episode(None, status=Status.TIMEOUT)] * 2 + [episode(None, status=Status.INFERENCE_ERROR)]
    with pytest.raises(
        RunError, match=r"not one of the 3 rollouts of step 1 .*:\n  2 x timeout.*\n  1 x inference_err"
    ):
        check_judged(failed, "step 1")
    check_judged([*failed, episode(0.0)], "step 1")
    check_judged([], "step 1")


def test_only_passed_or_not_counts_as_pass_at_k():
    assert rollout_metrics([group(1.0, 0.0), group(0.0, 0.0)])["reward/pass@k"] == 0.5
    assert "reward/pass@k" not in rollout_metrics([group(0.9, 0.0), group(0.0, 0.0)])


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=4))
def test_samples_are_numbered_by_rollout(shape):
    """Groups of any sizes, rollouts of any number of segments (none, where the model never spoke)."""
    groups = [
        Group(g, TASK, tuple(episode(order=(g, r), segments=count) for r, count in enumerate(rollouts)))
        for g, rollouts in enumerate(shape)
    ]
    samples = group_samples(groups)
    expected, rollout = [], 0
    for g, rollouts in enumerate(shape):
        for count in rollouts:
            expected += [(g, rollout)] * count
            rollout += 1
    assert [(sample.group_index, sample.rollout_index) for sample in samples] == expected


def test_reward_metrics_leave_out_what_was_not_judged():
    episodes = [
        episode(1.0, parts={"right": 1.0}),
        episode(0.0, parts={"right": 0.0, "short": None}, metrics={"metric/used_tool": 1.0}),
        episode(None, status=Status.TIMEOUT),
    ]
    metrics = reward_metrics(episodes)
    assert metrics == {
        "reward/mean": 0.5,
        "reward/std": pytest.approx(0.5**0.5),
        "reward_part/right": 0.5,
        "metric/used_tool": 1.0,
    }
    assert reward_metrics([]) == {}
    assert "reward/mean" not in reward_metrics([episode(None)])


def test_rollout_metrics():
    groups = [
        group(1.0, 1.0),
        group(0.0, None, number=1)._replace(dropped="dull"),
        Group(2, TASK, (episode(0.0, status=Status.TRUNCATED), episode(None, status=Status.INFERENCE_ERROR))),
    ]
    metrics = rollout_metrics(groups)
    assert metrics["group/drop/dull"] == 1.0
    assert metrics["group/kept_frac"] == pytest.approx(2 / 3)
    assert metrics["group/zero_std_frac"] == 1.0
    assert metrics["reward/pass@k"] == pytest.approx(1 / 3)
    assert metrics["rollout/truncated_frac"] == metrics["rollout/infra_fail_frac"] == pytest.approx(1 / 6)
    assert metrics["rollout/tokens"] == 2.0
    assert metrics["rollout/latency_p50"] == metrics["rollout/latency_p95"] == 0.5
    assert rollout_metrics([]) == {}


# --- rewards of a whole group ---------------------------------------------------------------------------------------


def judge(function, episodes, *, policy="drop", seconds=5.0, requests=("tasks", "trajectories"), **settings):
    term = RewardTerm("rank", function, 0.5, settings, requests, True)
    scorer = group_scorer([RewardTerm("env", None), term], policy, timeout_seconds=seconds)
    assert scorer is not None
    (scored,) = trio.run(scorer, [episodes])
    return [each.score for each in scored]


def test_without_group_rewards_there_is_no_scorer():
    assert group_scorer([RewardTerm("env", None)], "drop", timeout_seconds=1) is None


def test_a_group_reward_is_mixed_into_each_score():
    def rank(tasks, trajectories, *, best=1.0):
        assert len(tasks) == len(trajectories) == 2
        return [best, None]

    episodes = [episode(1.0, parts={"right": 1.0}), episode(None, status=Status.TIMEOUT), episode(0.0)]
    first, failed, last = judge(rank, episodes, best=4.0)
    assert (first.value, first.parts, first.weights["rank"]) == (3.0, {"right": 1.0, "rank": 4.0}, 0.5)
    assert failed == episodes[1].score
    assert last.value is None and "rank could not judge" in last.why
    assert judge(rank, episodes, policy="zero", best=4.0)[2].value == 0.0


def test_a_group_of_failures_is_not_judged():
    def rank(tasks, trajectories):
        raise AssertionError("never called")

    episodes = [episode(None, status=Status.TIMEOUT)]
    assert judge(rank, episodes) == [episodes[0].score]


@pytest.mark.parametrize("policy", ["drop", "raise"])
def test_a_group_reward_that_raises_could_not_judge(policy):
    def rank(trajectories):
        raise ValueError("no ranking today")

    call = functools.partial(judge, rank, [episode(1.0), episode(0.0)], policy=policy, requests=("trajectories",))
    if policy == "raise":
        with pytest.raises(RewardError, match=r"'rank' could not judge a rollout: ValueError: no ranking today"):
            call()
    else:
        assert [score.value for score in call()] == [None, None]


def test_a_group_reward_that_takes_too_long_could_not_judge():
    async def rank(trajectories):
        await trio.sleep(60)

    (score,) = judge(rank, [episode(1.0)], seconds=0.02, requests=("trajectories",))
    assert score.value is None and "longer than 0.02 seconds" in score.why


@pytest.mark.parametrize("returned", [0.5, [0.5], "ab", [float("nan"), 1.0], ["x", 1.0]])
def test_what_is_no_list_of_rewards_is_a_mistake(returned):
    with pytest.raises(RewardError, match="'rank'"):
        judge(lambda trajectories: returned, [episode(1.0), episode(0.0)], requests=("trajectories",))


def test_none_judges_nobody():
    scores = judge(lambda trajectories: None, [episode(1.0), episode(0.0)], requests=("trajectories",))
    assert [score.value for score in scores] == [None, None]


# --- rewards of all groups that wait --------------------------------------------------------------------------------


def judge_all(function, groups, *, policy="drop", seconds=5.0):
    scorer = group_scorer([RewardTerm("rank", function, 1.0, {}, ("groups",), True)], policy, timeout_seconds=seconds)
    return [[each.score.value for each in scored] for scored in trio.run(scorer, groups)]


THREE = [[episode(0.0), episode(0.0)], [episode(None, status=Status.TIMEOUT)], [episode(5.0)]]


def test_a_reward_of_groups_is_called_once_without_failures():
    sizes = []

    async def rank(groups):
        sizes.append([len(group) for group in groups])
        await trio.lowlevel.checkpoint()
        return [[10.0 * number + place for place, _ in enumerate(group)] for number, group in enumerate(groups)]

    assert judge_all(rank, THREE) == [[0.0, 1.0], [None], [15.0]] and sizes == [[2, 1]]
    assert judge_all(rank, THREE[1:2]) == [[None]] and judge_all(rank, []) == [] and len(sizes) == 1
    assert judge_all(lambda groups: [None, [2.0]], THREE) == [[None, None], [None], [7.0]]
    assert judge_all(lambda groups: None, THREE) == [[None, None], [None], [None]]


def test_a_reward_of_groups_that_fails_judged_none_of_them():
    def rank(groups):
        raise ValueError("no ranking today")

    assert judge_all(rank, THREE) == [[None, None], [None], [None]]
    with pytest.raises(RewardError, match="could not judge a rollout: ValueError: no ranking today"):
        judge_all(rank, THREE, policy="raise")


def test_a_reward_of_groups_has_the_deadlines_of_all():
    clock = trio.testing.MockClock()

    async def rank(groups, *, seconds):
        clock.jump(seconds)
        await trio.lowlevel.checkpoint()
        return [[1.0] * len(group) for group in groups]

    async def judged(seconds):
        term = RewardTerm("rank", rank, 1.0, {"seconds": seconds}, ("groups",), True)
        scored = await group_scorer([term], "drop", timeout_seconds=5.0)(THREE)
        return [each.score.value for each in scored[0]], scored[0][0].score.why

    for seconds, expected in ((9.0, [1.0, 1.0]), (11.0, [None, None])):  # of two groups, without the failed one
        found, why = trio.run(judged, seconds, clock=clock)
        assert found == expected
    assert "longer than 10 seconds" in why


@pytest.mark.parametrize("returned", [[[1.0, 0.0]], [1.0, 2.0], [[1.0], [1.0]], "ab", [[1.0, 0.0], [float("nan")]]])
def test_what_is_no_list_of_lists_of_rewards_is_a_mistake(returned):
    with pytest.raises(RewardError, match="'rank'"):
        judge_all(lambda groups: returned, THREE)
