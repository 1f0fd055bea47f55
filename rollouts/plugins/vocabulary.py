"""The inputs that a component of each kind may name, and which inputs exclude each other.

`vocabulary.toml` has the inputs with their meanings and axes.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path

VOCABULARY: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
"""The inputs by kind and name, each with its meaning. `metrics` are the `@metric` methods of an environment."""

GROUP_REWARD = ("tasks", "trajectories", "groups")
"""A reward that names one of these is a reward of whole groups."""


def mixing_fault(kind: str, requests: Sequence[str]) -> str:
    """Why these inputs cannot be named together; empty if they can.

    >>> mixing_fault("rewards", ["trajectory", "env"])
    ''
    """

    def named(*names: str, others: bool = False) -> str:
        return quoted([name for name in requests if (name in names) is not others])

    if kind == "rewards" and (group := named(*GROUP_REWARD)):
        if single := named(*GROUP_REWARD, others=True):
            names = "task, trajectory, env, turn; or, for a whole group, some of tasks, trajectories"
            return f"it names {single} of one episode and {group} of a whole group\nname some of {names}"
        if "groups" in requests and (one := named("groups", others=True)):
            return f"it names {one} of one group and 'groups' of several\nname groups alone: a Trajectory has its task"
    if kind == "advantages":
        group, batch = named("lengths"), named("rewards", "turn_rewards", "lengths", "batch", others=True)
        if "batch" in requests and group:
            again = "without `batch` it is called for each group, and may name rewards, lengths, turn_rewards"
            return f"it names 'batch' and {group}, but only a group has {group}\n{again}"
        if "batch" not in requests and batch:
            again = "name `batch` too; it is then called once, with rewards [N] and token inputs [T]"
            return f"it names {batch}, but not 'batch', and only the whole batch has {batch}\n{again}"
    return ""


def quoted(names: Sequence[str]) -> str:
    """The names in quotes, separated by commas."""
    return ", ".join(repr(name) for name in names)
