"""What `rollouts eval` tells: means, their errors, pass@k, and what failed."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollouts.evaluate import numbers_of, pass_at_k
from rollouts.types import Episode, Message, Score, Status, Task, Trajectory


def episode(task: int, sample: int, value: float | None, status: Status = Status.COMPLETED, env: str = "") -> Episode:
    shown = Task(f"task {task}", env=env)
    trajectory = Trajectory(shown, [*shown.messages, Message("assistant", "yes")], status=status)
    parts = {} if value is None else {"own": value}
    metrics = {"turns": 1.0, "tool_calls": 2.0, "tool_failures": 1.0, "latency_seconds": 0.5}
    return Episode((task, sample), shown, [trajectory], Score(value, parts), metrics)


def groups(*rewards: list[float | None]) -> list[list[Episode]]:
    return [[episode(t, s, value) for s, value in enumerate(values)] for t, values in enumerate(rewards)]


@given(st.integers(1, 7).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_all_choices_that_hold_a_pass(case):
    samples, passed, k = case
    outcomes = [True] * passed + [False] * (samples - passed)
    chosen = [any(choice) for choice in itertools.combinations(outcomes, k)]
    assert pass_at_k(samples, passed, k) == pytest.approx(statistics.fmean(chosen))


def test_the_error_is_that_of_tasks_not_of_episodes():
    found = numbers_of(groups([1, 1, 1, 1], [0, 0, 0, 0]))
    assert found["reward_mean"] == 0.5 and found["reward_stderr"] == pytest.approx(0.5)  # two tasks, whatever k is
    assert found["pass@k"] == {"1": 0.5, "2": 0.5, "4": 0.5}
    one_each = numbers_of(groups([1], [0], [1], [0]))
    assert one_each["reward_stderr"] == pytest.approx(statistics.stdev([1, 0, 1, 0]) / 2)
    assert numbers_of(groups([1, 0]))["reward_stderr"] is None


@settings(deadline=None)
@given(st.lists(st.lists(st.sampled_from([0.0, 1.0]), min_size=6, max_size=6), min_size=1, max_size=5))
def test_pass_at_k_grows_from_the_mean_to_any(rewards):
    found = numbers_of(groups(*rewards))["pass@k"]
    assert list(found) == ["1", "2", "4", "6"]
    values = list(found.values())
    assert values == sorted(values) and values[0] == pytest.approx(statistics.fmean(map(statistics.fmean, rewards)))
    assert values[-1] == pytest.approx(statistics.fmean(float(any(each)) for each in rewards))


def test_graded_rewards_do_not_say_what_passes():
    assert numbers_of(groups([0.5, 1.0]))["pass@k"] == {}


def test_what_failed_is_in_no_mean_and_is_counted():
    played = groups([1.0, None], [None, None])
    played[0][1] = episode(0, 1, None, Status.INFERENCE_ERROR)
    played[1] = [episode(1, 0, None, Status.TIMEOUT), episode(1, 1, 0.0, Status.TRUNCATED)]
    found = numbers_of(played)
    assert (found["reward_mean"], found["judged"], found["episodes"], found["tasks"]) == (0.5, 2, 4, 2)
    assert found["failed"] == {"inference_error": 1, "timeout": 1} and found["truncated"] == 1
    assert (found["tool_calls"], found["tool_failures"]) == (8, 4)
    assert found["pass@k"] == {"1": 0.5}  # of one task only one episode was judged


def test_nothing_judged_has_no_mean():
    found = numbers_of(groups([None], [None]))
    assert found["reward_mean"] is None and found["reward_stderr"] is None and found["pass@k"] == {}
    assert numbers_of([])["episodes"] == 0


def test_each_environment():
    both = [[episode(0, 0, 1.0, env="a")], [episode(1, 0, 0.0, env="b")], [episode(2, 0, 1.0, env="b")]]
    found = numbers_of(both)
    assert {alias: own["reward_mean"] for alias, own in found["environments"].items()} == {"a": 1.0, "b": 0.5}
    assert math.isclose(found["reward_mean"], 2 / 3)


def test_the_weights_of_the_parts_are_those_of_the_reward():
    weighted = episode(0, 0, 1.0)
    weighted = weighted._replace(score=Score(0.5, {"own": 1.0, "logged": 2.0}, "", {"own": 0.5}))
    assert numbers_of([[weighted]])["weights"] == {"own": 0.5}
    assert numbers_of([])["weights"] == {}
