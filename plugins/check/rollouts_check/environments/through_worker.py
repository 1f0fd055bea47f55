"""Checks of an environment that runs in a worker: does it behave as in the process of the run?

The other checks of `table.IN_WORKER` are those of `table.CHECKS`, on an environment whose code runs in a worker.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollouts.author_code import place_of_function
from rollouts.encoding import encode
from rollouts.env.schema import schema_of
from rollouts.errors import counted
from rollouts_check.environments.agents import play_each, says, tools_for
from rollouts_check.environments.rewards import difference_of, first_episodes, require_end
from rollouts_check.environments.subject import DRAWN, Subject
from rollouts_check.environments.tasks import plain_data
from rollouts_check.environments.traces import first_difference
from rollouts_check.report import FailedError, UntestedError

SPLITS = ("train", "eval")
NOT_HERE = "the environment is not installed in this Python, so nothing can be compared"
ENABLE = "type: pip install PACKAGE, or compare with `--worker process` where it is installed"
CHANGE = (
    "use nothing of the process: no global variable that another module sets, no working directory, no environment "
    "variable that a worker does not get (--pass-env), no order of a set"
)


def worker_tasks(subject: Subject) -> str:
    """The tasks and demonstrations of a worker equal those of the process of the run."""
    inline = _inline(subject)
    for split in SPLITS:
        drawn = [each.draw(DRAWN, split) for each in (inline, subject)]
        found = [[encode(task) for task in tasks] for tasks in drawn]
        _compare(found, f"draw the tasks of the split {split!r} here and in a worker", inline)
    found = [[encode(demonstration.messages) for demonstration in each.expert] for each in (inline, subject)]
    _compare(found, "read the demonstrations here and in a worker", inline)
    return f"{counted(len(subject.drawn), 'task')}, {counted(len(subject.expert), 'demonstration')}"


def worker_episodes(subject: Subject) -> str:
    """An episode in a worker has the tools, messages, rewards and metrics that it has in the process of the run."""
    inline = _inline(subject)
    schemas = [encode([schema_of(tool) for tool in tools_for(each)]) for each in (inline, subject)]
    if difference := first_difference(*schemas):
        raise FailedError("read the schemas of the tools here and in a worker", difference, CHANGE)
    pairs = list(zip(first_episodes(inline), first_episodes(subject), strict=True))
    for here, there in pairs:
        tried = f"play {here.words} here and in a worker"
        difference = difference_of(here.played, there.played)
        metrics = [
            {name: value for name, value in each.played.episode.metrics.items() if name.startswith("metric/")}
            for each in (here, there)
        ]
        if difference := difference or first_difference(*map(encode, metrics)):
            raise FailedError(tried, difference, CHANGE)
    return counted(len(pairs), "episode")


def worker_data(subject: Subject) -> str:
    """Tasks and demonstrations are plain data, so sending them changes nothing: a tuple would become a list."""
    return plain_data(_inline(subject))


def worker_lives(subject: Subject) -> str:
    """The worker has not died in any check, also not when an episode was cancelled, and it still plays."""
    first = first_episodes(subject)[0]
    (again,) = play_each(subject, [first.task], [says(*first.script)], turns=len(first.script))
    deaths = subject.deaths()
    if deaths:
        seen = f"{counted(deaths, 'worker')} died; the last episode ended as {again.episode.status.value}"
        change = "do not end the process, let `trio.Cancelled` pass, and run code that may crash elsewhere"
        raise FailedError("count the deaths of workers in all checks", seen, change)
    require_end(again, "play an episode after all others")
    return "no worker died"


def _inline(subject: Subject) -> Subject:
    """The environment in this process. Raises UntestedError if it is not installed here."""
    if subject.inline is None:
        raise UntestedError(NOT_HERE, ENABLE)
    return subject.inline


def _compare(found: Sequence[Sequence[bytes]], tried: str, inline: Subject) -> None:
    here, there = found
    for number in range(max(len(here), len(there))):
        first, second = (each[number] if number < len(each) else None for each in (here, there))
        if first != second:
            place = place_of_function(getattr(inline.component, "tasks", None))
            at = f" ({place})" if place else ""
            raise FailedError(tried, f"number {number + 1} differs: {first_difference(first, second)}{at}", CHANGE)
