"""What `rollouts eval` tells: means, their errors, pass@k, and what failed."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts.evaluate import numbers_of
from rollouts.reducers import Reducer, pass_at_k, pass_hat_k
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


# --- several samples of a task as one number --------------------------------------------------------------------------


@given(st.integers(1, 7).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_hat_k_is_the_share_of_all_choices_that_pass_throughout(case):
    samples, passed, k = case
    outcomes = [True] * passed + [False] * (samples - passed)
    chosen = [all(choice) for choice in itertools.combinations(outcomes, k)]
    assert pass_hat_k(samples, passed, k) == pytest.approx(statistics.fmean(chosen))


def answered(task: int, *samples: tuple[str, float | None]) -> list[Episode]:
    found = [episode(task, number, value) for number, (_, value) in enumerate(samples)]
    for each, (text, _) in zip(found, samples, strict=True):
        each.trajectory.messages[-1] = Message("assistant", text)
    return found


ANSWERS = st.lists(
    st.tuples(st.sampled_from(["a", "b", " a ", "c", "", "  "]), st.floats(0, 1)), min_size=1, max_size=9
)


@given(st.lists(ANSWERS, min_size=1, max_size=4))
def test_each_reducer_is_its_formula(tasks):
    played = [answered(number, *samples) for number, samples in enumerate(tasks)]
    one_each = {"best": [], "worst": [], "majority": []}
    for samples in tasks:
        rewards = [reward for _, reward in samples]
        one_each["best"].append(sorted(rewards)[-1])
        one_each["worst"].append(sorted(rewards)[0])
        texts = [text.strip() for text, _ in samples]
        voters = [text for text in texts if text] or texts
        winner = sorted(voters, key=lambda text: (-voters.count(text), voters.index(text)))[0]
        own = [reward for text, reward in zip(texts, rewards, strict=True) if text == winner]
        one_each["majority"].append(sum(own) / len(own))
    for how, values in one_each.items():
        found = numbers_of(played, Reducer(how))
        assert (found["reduce"], found["reduced_mean"]) == (how, pytest.approx(statistics.fmean(values)))
        error = None if len(values) < 2 else pytest.approx(statistics.stdev(values) / math.sqrt(len(values)))
        assert found["reduced_stderr"] == error
        assert found["reward_mean"] == numbers_of(played)["reward_mean"], "the mean over episodes stays what it is"
    assert "reduce" not in numbers_of(played)


@pytest.mark.parametrize(
    ("pattern", "texts", "value"),
    [
        ("", ["It is 7.", "7", "7"], 0.0),
        (r"-?\d+", ["It is 7.", "6, no: 7", "8"], 0.5),
        (r"answer: (\w+)", ["answer: x, or the answer: y", "y", "answer: y"], 0.5),
        (r"(\w+)!|x", ["x", "x", "so!"], 0.0),
    ],
)
def test_what_an_answer_is(pattern, texts, value):
    rewards = [1.0, 0.0, 0.0]
    assert Reducer("majority", pattern).reduce(rewards, texts) == value


def test_a_tie_does_not_depend_on_the_order_in_which_episodes_ended():
    first = answered(0, ("x", 1.0), ("y", 0.0))
    assert numbers_of([first], Reducer("majority"))["reduced_mean"] == 1.0
    assert numbers_of([first[::-1]], Reducer("majority"))["reduced_mean"] == 1.0


def test_what_was_not_judged_has_no_vote():
    played = [answered(0, ("x", None), ("x", None), ("y", 1.0)), answered(1, ("x", None))]
    found = numbers_of(played, Reducer("majority"))
    assert (found["reduced_mean"], found["reduced_stderr"]) == (1.0, None)
    assert numbers_of(played[1:], Reducer("best"))["reduced_mean"] is None
