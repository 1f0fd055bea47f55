"""Checks of rewards, on invented episodes or on the tasks of an environment (`--env`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import trio

from rollouts.env import calls
from rollouts.env.mixing import ask, check_turns, read_verdict
from rollouts.errors import RolloutsError, counted
from rollouts.plugins.signature import read_signature
from rollouts.plugins.vocabulary import GROUP_REWARD
from rollouts.types import Message, Segment, Status, Task, ToolCall, Trajectory
from rollouts_check.components.common import Function, Subject
from rollouts_check.environments.agents import in_trio, progressed
from rollouts_check.environments.subject import make_subject as make_environment
from rollouts_check.packages import Found
from rollouts_check.report import Attempt, FailedError
from rollouts_check.runner import once

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
        with subject.trying(f"judge {usual[0].words} and {usual[1].words}", expected):
            found = _judge(subject, subject.function, usual)
    except FailedError as error:  # a reward may need a certain environment's tasks
        if error.__cause__ is None or isinstance(error.__cause__, RolloutsError) or "env" in subject.given:
            raise
        raise subject.skipped(f"it cannot judge an invented task: {error.seen}", ENABLE) from error
    shown_values = ", ".join("none" if value is None else f"{value:g}" for value in found)
    return f"{shown_values} for {' and '.join(each.words for each in usual)}"


def any_reply(subject: Subject) -> str:
    """It judges every reply without an exception: empty, very long, unicode, a failed call, no reply at all.

    Advice: return a number for any reply: 0 if it is no answer
    """
    episodes = _episodes(subject)
    values(subject)

    async def each_twice() -> None:  # in one trio run, which keeps the processes of a reward that has some
        for each in episodes:
            with subject.trying(f"judge {each.words}"):
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
        attempt = Attempt("judge an episode", function, change="do less, or give what it waits for a deadline")
        raise attempt.failed(f"it took longer than {REWARD_SECONDS:g} seconds") from None


def _one_each(function: Function, returned: Any, count: int, of: str, change: str) -> list[Any]:
    values = [None] * count if returned is None else list(returned)
    seen = f"it returned {counted(len(values), 'value')} for {counted(count, of)}"
    Attempt("judge a group", function, change=change).require(len(values) == count, seen)
    return values


@once
def _episodes(subject: Subject) -> list[Played]:
    """Invented episodes, first two plain ones. With `--env`, of the environment's own tasks."""
    tasks, env = [TASK], None
    if name := subject.given.get("env"):
        label = name if isinstance(name, str) else str(name.get("name", ""))
        given = {"env": name if isinstance(name, str) else dict(name)}
        own = make_environment(Found(label, label), given, subject.scratch, seed=subject.seed)
        tasks, env = own.tasks, own.environment.make()
    if "env" in read_signature(subject.function, "rewards").requests and env is None:
        raise subject.skipped("it names `env`", ENABLE)
    answered = REPLIES["a plain reply"] if tasks[0].answer is None else str(tasks[0].answer)
    found = [
        Played(words, invented_trajectory(tasks[number % len(tasks)], reply), env)
        for number, (words, reply) in enumerate({**REPLIES, "a plain reply": answered}.items())
    ]
    return [*found, *unusual_episodes(tasks[0], env)]


# --- invented episodes ------------------------------------------------------------------------------------------------


LONG = 200_000  # characters of a long reply
TASK = Task("What is 12 * 7?", answer="84", info={"level": 1}, id="a task")
REPLIES = {
    "a plain reply": "It is 84.",
    "a wrong reply": " I do not know.\n",
    "an empty reply": "",
    "spaces": " \n\t",
    "unicode": "é 👩‍🚀 \u202e ﷽ \u0000",
    "half a character": "\ud800",
    "a very long reply": "word " * (LONG // 5),
    "one very long word": "x" * LONG,
    "signs": "[[]] {} () ** \\boxed{ ``` <answer> $$ %s {0}",
    "numbers": "nan -inf 1e999 0x10 1/0 ٣ ½",
}


class Played(NamedTuple):
    """An invented episode, and what is special about it. `env` is its environment object, if a reward may name it."""

    words: str
    trajectory: Trajectory
    env: Any = None


def unusual_episodes(task: Task, env: Any) -> list[Played]:
    """Episodes that are cut off, call tools, or have no reply."""
    call = Message("assistant", "", [ToolCall("search", {"query": "stars"}, "call_1")])
    bad = Message("assistant", "", [ToolCall("", {}, "call_2", error="it is not valid JSON")])
    answers = [Message("tool", "Error: not found", tool_call_id="call_1", name="search")]
    several = invented_trajectory(task, "It is 84.", before=[call, *answers, bad, Message("user", "Try again.")])
    cut = invented_trajectory(task, "It is 8", status=Status.TRUNCATED)
    silent = Trajectory(task, task.messages, status=Status.TRUNCATED)
    words = ("an episode with calls of tools", "a reply that the token limit cut off", "an episode without a reply")
    return [Played(each, trajectory, env) for each, trajectory in zip(words, (several, cut, silent), strict=True)]


def invented_trajectory(
    task: Task, reply: str, *, before: Sequence[Message] = (), status: Status = Status.COMPLETED, live: int = 3
) -> Trajectory:
    """A trajectory that ends with this reply, whose segment has `live` trained tokens."""
    messages = [*task.messages, *before, Message("assistant", reply)]
    mask = [0.0, 0.0] + [1.0] * live
    tokens = [5, 6, *range(7, 7 + live)]
    segment = Segment(tokens, mask, [-0.5 * weight for weight in mask], [-1 if weight == 0 else 0 for weight in mask])
    return Trajectory(task, messages, [segment], status)
