"""Checks of rewards, on invented episodes or on the tasks of an environment (`--env`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import trio

from rollouts.env import calls
from rollouts.env.mixing import ask, check_turns, read_verdict
from rollouts.errors import RolloutsError, counted
from rollouts.plugins.signature import read_signature
from rollouts.plugins.vocabulary import GROUP_REWARD
from rollouts.types import Trajectory
from rollouts_check.components.episodes import REPLIES, TASK, Played, invented_trajectory, unusual_episodes
from rollouts_check.components.subject import Function, Subject, at, trying
from rollouts_check.environments.agents import in_trio, progressed
from rollouts_check.environments.subject import make_subject as make_environment
from rollouts_check.packages import Found
from rollouts_check.report import FailedError

REWARD_SECONDS = 30.0
ENABLE = "name an environment whose tasks it knows: --env NAME"


def trial(subject: Subject, function: Function) -> Any:
    """The verdicts on the first episodes."""
    values(subject)  # skips the check if the reward cannot judge
    return _judge(subject, function, _episodes(subject)[:2])


def values(subject: Subject) -> str:
    """It judges an ordinary episode: with a finite number, a Score, or None."""
    usual = _episodes(subject)[:2]
    expected = "return a finite number, a Score, or None if it cannot judge"
    try:
        with trying(f"judge {usual[0].words} and {usual[1].words}", expected, subject.function):
            found = _judge(subject, subject.function, usual)
    except FailedError as error:  # a reward may need a certain environment's tasks
        if error.__cause__ is None or isinstance(error.__cause__, RolloutsError) or "env" in subject.given:
            raise
        raise subject.skipped(f"it cannot judge an invented task: {error.seen}", ENABLE) from error
    shown_values = ", ".join("none" if value is None else f"{value:g}" for value in found)
    return f"{shown_values} for {' and '.join(each.words for each in usual)}"


def any_reply(subject: Subject) -> str:
    """It judges every reply without an exception: empty, very long, unicode, a failed call, no reply at all."""
    episodes = _episodes(subject)
    values(subject)

    async def each_twice() -> None:  # in one trio run, which keeps the processes of a reward that has some
        for each in episodes:
            with trying(f"judge {each.words}", "return a number for any reply: 0 if it is no answer", subject.function):
                await _judged(subject, subject.function, [each, each])
            progressed()

    in_trio(each_twice)
    return counted(len(episodes), "episode")


def _judge(subject: Subject, function: Function, episodes: Sequence[Played]) -> list[float | None]:
    """The values for these episodes, as a run reads them. Raises RewardError, and what the reward raises."""
    return in_trio(_judged, subject, function, episodes)


async def _judged(subject: Subject, function: Function, episodes: Sequence[Played]) -> list[float | None]:
    requests = read_signature(function, "rewards").requests
    fresh = [msgspec.convert(msgspec.to_builtins(each.trajectory), Trajectory) for each in episodes]
    label = subject.found.label

    def read(returned: Any, trajectory: Trajectory) -> float | None:
        return check_turns(read_verdict(label, 1.0, returned), trajectory.turns).value

    try:
        if any(name in GROUP_REWARD for name in requests):
            group = {"tasks": [each.task for each in fresh], "trajectories": fresh, "groups": [fresh]}
            arguments = [group[name] for name in requests]
            returned = await calls.call(function, *arguments, timeout_seconds=REWARD_SECONDS)
            if "groups" in requests:
                (returned,) = _one_each(function, returned, 1, "group", "return a list with one list for each group")
            change = "return a list with one number (or None) for each episode"
            values = _one_each(function, returned, len(fresh), "episode", change)
            return [read(value, each) for value, each in zip(values, fresh, strict=True)]
        found = []
        for trajectory, played in zip(fresh, episodes, strict=True):
            own = {"task": trajectory.task, "trajectory": trajectory, "env": played.env}
            found.append((await ask(function, requests, own, name=label, seconds=REWARD_SECONDS)).value)
        return found
    except trio.TooSlowError:
        seen = f"it took longer than {REWARD_SECONDS:g} seconds{at(function)}"
        raise FailedError("judge an episode", seen, "do less, or give what it waits for a deadline") from None


def _one_each(function: Function, returned: Any, count: int, of: str, change: str) -> list[Any]:
    values = [None] * count if returned is None else list(returned)
    if len(values) != count:
        seen = f"it returned {counted(len(values), 'value')} for {counted(count, of)}{at(function)}"
        raise FailedError("judge a group", seen, change)
    return values


def _episodes(subject: Subject) -> list[Played]:
    """Invented episodes, first two plain ones. With `--env`, of the environment's own tasks."""
    if "episodes" not in subject.kept:
        tasks, env = [TASK], None
        if "env" in subject.given:
            name = subject.given["env"]
            given = {"env": name} if isinstance(name, str) else {"env": dict(name)}
            label = name if isinstance(name, str) else str(name.get("name", ""))
            own = make_environment(Found(label, label), given, subject.scratch, seed=subject.seed)
            tasks, env = own.tasks, own.environment.make()
        requests = read_signature(subject.function, "rewards").requests
        if "env" in requests and env is None:
            raise subject.skipped("it names `env`", ENABLE)
        answered = str(tasks[0].answer) if tasks[0].answer is not None else REPLIES["a plain reply"]
        replies = {**REPLIES, "a plain reply": answered}
        found = [
            Played(words, invented_trajectory(tasks[number % len(tasks)], reply), env)
            for number, (words, reply) in enumerate(replies.items())
        ]
        subject.kept["episodes"] = [*found, *unusual_episodes(tasks[0], env)]
    episodes: list[Played] = subject.kept["episodes"]
    return episodes
