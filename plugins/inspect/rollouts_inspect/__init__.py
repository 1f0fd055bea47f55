"""Tasks of Inspect as environments: `--env inspect/PACKAGE/TASK`, or `--env inspect/my_eval.py@TASK`.

A sample of the dataset is a task. Upstream's own solver makes the prompt, and its scorers judge the reply.

    loading   from a name to upstream's task, and why one cannot be served
    playing   upstream's solver and scorers, around a reply
    hooks     the names, for `rollouts`
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from rollouts import Score, Task, Trajectory, reward
from rollouts_inspect import loading
from rollouts_inspect.playing import scored

__all__ = ["Inspect", "environment_of"]


@dataclass
class Inspect:
    """A task of Inspect."""

    spec: ClassVar[str] = ""
    args: dict[str, Any] = dataclasses.field(default_factory=dict)  # arguments of the task's function
    score: str = ""  # which score is the reward, such as `match` or `quality.style`; by default the first

    def __post_init__(self) -> None:
        self._loaded = loading.load(self.spec, json.dumps(self.args, sort_keys=True))

    def tasks(self, split: str, rng: random.Random) -> Sequence[Task]:
        """A task for each sample. Both splits have the same ones, of which the run holds some out."""
        samples, prompts = self._loaded.samples, self._loaded.prompts
        return [
            Task(prompt, _answer(sample.target), {"sample": index}, str(index if sample.id is None else sample.id))
            for index, (sample, prompt) in enumerate(zip(samples, prompts, strict=True))
        ]

    @reward
    def upstream(self, task: Task, trajectory: Trajectory) -> Score:
        """Upstream's score of the reply. The other scores are logged; None, with the reason, if it could not judge."""
        found = scored(self._loaded, task.info["sample"], trajectory)
        if found.why:
            return Score(None, why=found.why)
        parts = {name: value for name, value in found.values.items() if math.isfinite(value)}
        chosen = self.score or next(iter(found.values))
        if chosen not in found.values:
            return Score(None, parts, f"there is no score {chosen}; type: --env.score {next(iter(found.values))}")
        if chosen not in parts:
            return Score(None, parts, f"upstream left the score {chosen} open (NaN)")
        return Score(parts.pop(chosen), parts)


def _answer(target: Any) -> str | None:
    return target if isinstance(target, str) else None


@functools.cache
def environment_of(spec: str) -> type[Inspect] | None:
    """The environment of a task; None if inspect-ai is not installed, or if this is no name of a task."""
    if find_spec("inspect_ai") is None or not loading.is_name(spec):
        return None
    title = "".join(part.capitalize() for part in Path(spec).name.replace("@", "_").replace(".", "_").split("_"))
    members: Mapping[str, Any] = {"spec": spec, "__doc__": f"{spec}, a task of Inspect.", "__module__": __name__}
    return type(title, (Inspect,), dict(members))
