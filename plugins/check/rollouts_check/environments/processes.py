"""Does an episode depend on the process that plays it, or on the episodes before it? Does it change the process? Does
the environment behave in a worker as in the process of the run?

The other checks of `table.IN_WORKER` are those of `table.CHECKS`, on an environment whose code runs in a worker.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

from rollouts.encoding import encode
from rollouts.env.schema import schema_of
from rollouts.errors import counted
from rollouts.inference.chatting import ChatRequest
from rollouts.types import Message
from rollouts_check.environments import agents, traces
from rollouts_check.environments.definition import plain_data
from rollouts_check.environments.rewards import LEFT, difference_of, first_episodes, first_scripts, require_end
from rollouts_check.environments.subject import DRAWN, Subject
from rollouts_check.report import FailedError, SkippedError, UntestedError

DEPENDS = "use nothing that differs between processes: no hash() of a text, no order of a set, no id(), no clock"


def process_state(subject: Subject) -> str:
    """An episode leaves the process as it is: its working directory, environment variables, signal handlers, files.

    Advice: write only into a folder that `setup` makes for the episode, and that `close` removes
    """
    task = subject.tasks[0]
    script = agents.script_for(subject, task)
    agent = agents.says(*script)
    seen: list[str] = []
    late = {
        name: value for name, value in traces.state_of_process().items() if " variable " in name or name == "sys.path"
    }
    first = subject.kept["process"] | late  # a library may have set variables when it was first used

    def watching(request: ChatRequest) -> Message | Awaitable[Message]:
        seen.extend(traces.process_changes(first, traces.state_of_process()))
        return agent(request)

    try:
        with traces.writes_outside(Path(tempfile.gettempdir())) as written:
            agents.play_each(subject, [task], [watching], turns=len(script))
            seen += traces.process_changes(first, traces.state_of_process())
    finally:
        traces.restore_process(first)
    subject.attempt("play an episode").require(not written, f"it wrote {'; '.join(written[:3])}")
    change = "all episodes share the process: use paths and values of the object, `cwd=` and `env=` of a command"
    subject.attempt("play an episode", "setup", change=change).require(not seen, "; ".join(dict.fromkeys(seen[:3])))
    return counted(len(first), "value")


def other_process(subject: Subject) -> str:
    """Episodes in another process, with another hash seed, at another date and in another order, are the same. Nothing
    of them runs when the process has ended.
    """
    if not subject.found.is_importable:
        raise SkippedError("the class has no name that another process can import")
    known = first_episodes(subject)
    there = traces.ask_child_of(subject, "play", hash_seed="1", is_late=True)
    for each, other in zip(known, there, strict=True):
        if difference := traces.first_difference(json.dumps(summary(each.played)).encode(), json.dumps(other).encode()):
            tried = f"play {each.words} in another process, after other episodes"
            if there == traces.ask_child_of(subject, "play", hash_seed="2"):
                raise FailedError(tried, difference, LEFT)
            sources = [f"; {each}" for each in traces.random_sources(subject, with_episode=True)]
            raise FailedError(tried, f"{difference}{''.join(sources)}", DEPENDS)
    return counted(len(known), "episode")


def played_backwards(subject: Subject) -> list[dict[str, Any]]:
    """The first episodes, played in another order: before them one of the last task, then the last one first."""
    scripts = first_scripts(subject)
    agents.play_each(subject, subject.tasks[-1:], [agents.says(*scripts[0][2])], turns=len(scripts[0][2]))
    found = [
        agents.play_each(subject, [task], [agents.says(*script)], turns=len(script))
        for _, task, script in reversed(scripts)
    ]
    return [summary(played) for (played,) in reversed(found)]


def summary(played: agents.Played) -> dict[str, Any]:
    """What two processes must have in common of an episode: the messages, the status and the rewards."""
    return {
        "conversations": [
            {"messages": [{each.role: each.text} for each in one.messages], "status": one.status.value}
            for one in played.episode.trajectories
        ],
        "rewards": [{each.role: each.score.parts} for each in played.episode.by_role],
    }


# --- in a worker ------------------------------------------------------------------------------------------------------


SPLITS = ("train", "eval")
NOT_HERE = "the environment is not installed in this Python, so nothing can be compared"
ENABLE = "type: pip install PACKAGE, or compare with `--worker process` where it is installed"
CHANGE = (
    "use nothing of the process: no global variable of another module, no working directory, no order of a set, and no "
    "environment variable that a worker does not get (--pass-env)"
)


def worker_tasks(subject: Subject) -> str:
    """The tasks and demonstrations of a worker equal those of the process of the run."""
    both = (_inline(subject), subject)
    for split in SPLITS:
        found = [list(map(encode, each.draw(DRAWN, split))) for each in both]
        _compare(subject, found, f"draw the tasks of the split {split!r} here and in a worker")
    found = [[encode(demonstration.messages) for demonstration in each.expert] for each in both]
    _compare(subject, found, "read the demonstrations here and in a worker")
    return f"{counted(len(subject.drawn), 'task')}, {counted(len(subject.expert), 'demonstration')}"


def worker_episodes(subject: Subject) -> str:
    """An episode in a worker has the tools, messages, rewards and metrics that it has in the process of the run."""
    inline = _inline(subject)
    schemas = [encode([schema_of(tool) for tool in agents.tools_for(each)]) for each in (inline, subject)]
    difference = traces.first_difference(*schemas)
    subject.attempt("read the schemas of the tools here and in a worker", change=CHANGE).require(
        not difference, difference
    )
    pairs = list(zip(first_episodes(inline), first_episodes(subject), strict=True))
    for here, there in pairs:
        metrics = [
            {name: value for name, value in each.played.episode.metrics.items() if name.startswith("metric/")}
            for each in (here, there)
        ]
        difference = difference_of(here.played, there.played) or traces.first_difference(*map(encode, metrics))
        subject.attempt(f"play {here.words} here and in a worker", change=CHANGE).require(not difference, difference)
    return counted(len(pairs), "episode")


def worker_data(subject: Subject) -> str:
    """Tasks and demonstrations are plain data, so sending them changes nothing: a tuple would become a list."""
    return plain_data(_inline(subject))


def worker_lives(subject: Subject) -> str:
    """The worker has not died in any check, also not when an episode was cancelled, and it still plays.

    Advice: do not end the process, let `trio.Cancelled` pass, and run code that may crash elsewhere
    """
    first = first_episodes(subject)[0]
    (again,) = agents.play_each(subject, [first.task], [agents.says(*first.script)], turns=len(first.script))
    deaths = subject.deaths()
    seen = f"{counted(deaths, 'worker')} died; the last episode ended as {again.episode.status.value}"
    subject.attempt("count the deaths of workers in all checks").require(not deaths, seen)
    require_end(again, "play an episode after all others")
    return "no worker died"


def _inline(subject: Subject) -> Subject:
    """The environment in this process. Raises UntestedError if it is not installed here."""
    if subject.inline is None:
        raise UntestedError(NOT_HERE, ENABLE)
    return subject.inline


def _compare(subject: Subject, found: Sequence[Sequence[bytes]], tried: str) -> None:
    for number, (first, second) in enumerate(itertools.zip_longest(*found), start=1):
        if first != second:
            seen = f"number {number} differs: {traces.first_difference(first, second)}"
            raise subject.attempt(tried, "tasks", change=CHANGE).failed(seen)
