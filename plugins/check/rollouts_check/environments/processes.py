"""Does an episode depend on the process that plays it, or on the episodes before it? Does it change the process?"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from rollouts.author_code import place_of_function
from rollouts.errors import counted
from rollouts.inference.chatting import ChatRequest
from rollouts.types import Message
from rollouts_check.environments.agents import Played, play_each, says, script_for
from rollouts_check.environments.rewards import LEFT, first_episodes, first_scripts
from rollouts_check.environments.subject import Subject
from rollouts_check.environments.surroundings import process_changes, restore_process, state_of_process
from rollouts_check.environments.traces import first_difference, random_sources, run_child_of, writes_outside
from rollouts_check.report import FailedError, SkippedError

DEPENDS = (
    "use nothing that differs between processes: no hash() of a text, no order of a set (sort it first), no id() of an "
    "object, no clock"
)


def process_state(subject: Subject) -> str:
    """An episode leaves the process as it is: its working directory, environment variables, signal handlers, files."""
    first = dict(subject.kept["process"])
    task = subject.tasks[0]
    script = script_for(subject, task)
    agent = says(*script)
    seen: list[str] = []
    variables = state_of_process()  # a library may have set some when it was first used
    first |= {name: value for name, value in variables.items() if " variable " in name or name == "sys.path"}

    def watching(request: ChatRequest) -> Message | Awaitable[Message]:
        seen.extend(process_changes(first, state_of_process()))
        return agent(request)

    try:
        with writes_outside(Path(tempfile.gettempdir())) as written:
            play_each(subject, [task], [watching], turns=len(script))
            seen += process_changes(first, state_of_process())
    finally:
        restore_process(first)
    if written:
        change = "write only into a folder that `setup` makes for the episode, and that `close` removes"
        raise FailedError("play an episode", f"it wrote {'; '.join(written[:3])}", change)
    if seen:
        change = "all episodes share the process: use paths and values of the object, `cwd=` and `env=` of a command"
        place = place_of_function(getattr(subject.component, "setup", None))
        at = f" ({place})" if place else ""
        raise FailedError("play an episode", "; ".join(dict.fromkeys(seen[:3])) + at, change)
    return counted(len(first), "value")


def other_process(subject: Subject) -> str:
    """Episodes in another process, with another hash seed, at another date and in another order, are the same. Nothing
    of them runs when the process has ended.
    """
    if not subject.is_importable:
        raise SkippedError("the class has no name that another process can import")
    known = first_episodes(subject)
    there = _play_in_child(subject, "1", is_late=True)
    for number, each in enumerate(known):
        if difference := first_difference(_encoded(summary(each.played)), _encoded(there[number])):
            tried = f"play {each.words} in another process, after other episodes"
            if there == _play_in_child(subject, "2", is_late=False):
                raise FailedError(tried, difference, LEFT)
            sources = [f"; {each}" for each in random_sources(subject, with_episode=True)]
            raise FailedError(tried, f"{difference}{''.join(sources)}", DEPENDS)
    return counted(len(known), "episode")


def _play_in_child(subject: Subject, hash_seed: str, *, is_late: bool) -> list[dict[str, Any]]:
    request = {"plays": True, "is_late": is_late}
    found: list[dict[str, Any]] = run_child_of(subject, request, {"PYTHONHASHSEED": hash_seed})
    return found


def played_backwards(subject: Subject) -> list[dict[str, Any]]:
    """The first episodes, played in another order: before them one of the last task, then the last one first."""
    scripts = first_scripts(subject)
    play_each(subject, subject.tasks[-1:], [says(*scripts[0][2])], turns=len(scripts[0][2]))
    found = []
    for _, task, script in reversed(scripts):
        (played,) = play_each(subject, [task], [says(*script)], turns=len(script))
        found.append(summary(played))
    return found[::-1]


def summary(played: Played) -> dict[str, Any]:
    """What two processes must have in common of an episode: the messages, the status and the rewards."""
    return {
        "conversations": [
            {"messages": [{each.role: each.text} for each in one.messages], "status": one.status.value}
            for one in played.episode.trajectories
        ],
        "rewards": [{each.role: each.score.parts} for each in played.episode.by_role],
    }


def _encoded(value: dict[str, Any]) -> bytes:
    return json.dumps(value).encode()
