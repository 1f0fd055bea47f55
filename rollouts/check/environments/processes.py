"""Does an episode depend on the process that plays it, or on the episodes before it?"""

from __future__ import annotations

import json
from typing import Any

from rollouts.check.environments.agents import Played, play_each, says
from rollouts.check.environments.rewards import first_episodes, first_scripts
from rollouts.check.environments.subject import Subject
from rollouts.check.environments.traces import first_difference, random_sources, run_child_of
from rollouts.check.report import FailedError, SkippedError
from rollouts.errors import counted

LEFT = (
    "an episode left something that a later one sees; keep its state on `self`, not in the class, in a module, in "
    "`shared` or on disk"
)
DEPENDS = (
    "use nothing that differs between processes: no hash() of a text, no order of a set (sort it first), no id() of an "
    "object"
)


def other_process(subject: Subject) -> str:
    """Episodes in another process, with another hash seed and in another order, are the same."""
    if not subject.is_importable:
        raise SkippedError("the class has no name that another process can import")
    known = first_episodes(subject)
    there = _play_in_child(subject, "1")
    for number, each in enumerate(known):
        if difference := first_difference(_encoded(summary(each.played)), _encoded(there[number])):
            tried = f"play {each.words} in another process, after other episodes"
            if there == _play_in_child(subject, "2"):
                raise FailedError(tried, difference, LEFT)
            sources = [f"; {each}" for each in random_sources(subject, with_episode=True)]
            raise FailedError(tried, f"{difference}{''.join(sources)}", DEPENDS)
    return counted(len(known), "episode")


def _play_in_child(subject: Subject, hash_seed: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = run_child_of(subject, {"plays": True}, {"PYTHONHASHSEED": hash_seed})
    return found


def played_backwards(subject: Subject) -> list[dict[str, Any]]:
    """The first episodes, played in another order: before them one of the last task, then the last one first."""
    scripts = first_scripts(subject)
    play_each(subject, subject.tasks[-1:], [says(*scripts[-1][2])], turns=len(scripts[-1][2]))
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
