"""evaluate: every held-out task once, failures not judged, the numbers under their names."""

from __future__ import annotations

import pytest
import trio

from rollouts.errors import RewardError
from rollouts.evaluate import Evaluation, check_passes, evaluate, evaluation_metrics, numbers_of
from rollouts.inference.base import Capabilities
from rollouts.types import Episode, Score, Status, Task, Trajectory

TASKS = [Task(str(number), answer=number) for number in range(5)]


class Engine:
    capabilities = Capabilities()
    context_tokens_max = vocabulary_size = version = 0

    def open_session(self, order):
        return str(order)

    def close_session(self, session):
        pass


def episode(task, value, *, order=(0, 0), status=Status.COMPLETED, parts=None):
    return Episode(order, task, [Trajectory(task, task.messages, status=status)], Score(value, parts or {}), {})


def numbers(mean, parts, judged, tasks):
    return {"reward_mean": mean, "parts": parts, "judged": judged, "tasks": tasks}


def seen(report):
    """The part of the numbers of an evaluation that a training run keeps."""
    return {name: report[name] for name in ("reward_mean", "parts", "judged", "tasks")}


async def play(job, session, inference):
    await trio.lowlevel.checkpoint()
    value = job.task.answer % 2
    return episode(job.task, float(value), order=job.order, parts={"odd": float(value), "vague": None})


def test_each_task_once():
    played = []

    async def watch(job, session, inference):
        played.append((job.task.prompt, job.order))
        return await play(job, session, inference)

    async def main():
        return (await evaluate(TASKS, play=watch, inference=Engine(), concurrency=2))[0]

    report = trio.run(main)
    assert sorted(played) == [(task.prompt, (index, 0)) for index, task in enumerate(TASKS)]
    assert seen(report) == numbers(0.4, {"odd": 0.4}, 5, 5)


def test_group_rewards_see_groups_of_one():
    async def score(groups):
        return [[one._replace(score=Score(one.score.value + 1))] for (one,) in groups]

    async def main():
        return (await evaluate(TASKS, play=play, inference=Engine(), score_groups=score))[0]

    assert trio.run(main)["reward_mean"] == 1.4


def test_a_reward_that_is_none_ends_it():
    async def wrong(job, session, inference):
        raise RewardError("reward 'x' returned nan")

    async def main():
        return await evaluate(TASKS, play=wrong, inference=Engine())

    with pytest.raises(RewardError, match="returned nan"):
        trio.run(main)


def test_failures_are_not_judged():
    episodes = [episode(TASKS[0], 1.0), episode(TASKS[1], None, status=Status.TIMEOUT)]
    assert seen(numbers_of([[each] for each in episodes])) == numbers(1.0, {}, 1, 2)
    assert seen(numbers_of([episodes[1:]])) == numbers(None, {}, 0, 1)


def test_a_pass_without_a_judged_rollout_gets_a_note_unless_neither_has_one():
    """In the middle of a run one greedy pass must not end the run. The error counts both passes."""
    judged, unjudged = episode(TASKS[0], 1.0), episode(TASKS[0], None)
    unjudged = unjudged._replace(score=Score(None, {}, "happy could not judge: it returned None (h.py, line 3)"))
    some, none = numbers_of([[judged]]), numbers_of([[unjudged]])
    assert list(check_passes([some, some], [judged, judged], "step 3")) == []
    (note,) = check_passes([some, none], [judged, unjudged], "step 3")
    assert note.startswith("held-out, step 3: the only greedy rollout could not be judged")
    with pytest.raises(RewardError, match=r"2 rollouts of the evaluation at step 3 \(1 sampled, 1 greedy\)") as no:
        list(check_passes([none, none], [unjudged, unjudged], "step 3"))
    assert "h.py, line 3" in str(no.value) and "did you forget `return`?" in str(no.value)


def test_evaluation_in_the_summary_and_in_the_metrics():
    evaluation = Evaluation(
        numbers(0.5, {"odd": 0.25}, 4, 5)
        | {"weights": {"odd": 2.0}, "metrics": {"calls": 3.0}}
        | {"tool_calls": 3, "tool_failures": 1, "reward_stderr": 0.2},
        numbers(None, {}, 0, 5) | {"reward_stderr": None},
    )
    assert evaluation.as_dict() == {
        "reward_mean": 0.5,
        "reward_stderr": 0.2,
        "greedy_mean": None,
        "greedy_stderr": None,
        "parts": {"odd": 0.25},
        "greedy_parts": {},
        "tool_calls": 3,
        "tool_failures": 1,
        "weights": {"odd": 2.0},
        "metrics": {"calls": 3.0},
        "tasks": 5,
        "judged": 4,
    }
    expected = {"eval/reward_part/odd": 0.25, "eval/reward_mean": 0.5}
    assert evaluation_metrics(evaluation.as_dict()) == expected | {"eval/metric/calls": 3.0}
    older = {name: value for name, value in evaluation.as_dict().items() if name not in ("weights", "metrics")}
    assert evaluation_metrics(older) == expected, "the summary of an older run"
