"""The environment that is checked: found by its name, in a folder, in a file, or given as a class.

What several checks use is computed once: the first tasks, and the demonstrations whose tasks are known.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from rollouts.config.files import Source
from rollouts.config.flags import Tree
from rollouts.config.merging import merge
from rollouts.config.objects import take_objects
from rollouts.config.resolving import Resolved, resolve
from rollouts.encoding import encode
from rollouts.env.authoring import rewards_of
from rollouts.env.mixing import RewardTerm
from rollouts.errors import ConfigError, PluginError, counted
from rollouts.plugins.manager import PluginManager
from rollouts.runs.components import choose
from rollouts.runs.environments import PlannedEnvironment, plan_environments
from rollouts.runs.plan import reward_terms
from rollouts.runs.workers import Workers, pools_of, refuse_env_of_rewards, with_sandboxes
from rollouts.types import Message, Task
from rollouts_check.packages import Found
from rollouts_check.report import Attempt, SkippedError, UntestedError, at

TASKS = 5  # tasks that are played, unless the user says otherwise
DRAWN = 50  # tasks that are compared
READ_MAX = 1000  # tasks and demonstrations that are read to find a demonstration's task
TASKS_SECONDS = 60.0
CONCURRENCY = 8  # sandboxes at the same time
DEMONSTRATE = "write `demonstrations(self, split, rng)`: docs/check.md, Demonstrations"


class Demonstration(NamedTuple):
    """A task of the environment, and the messages of an expert after its prompt."""

    task: Task
    messages: list[Message]

    @property
    def replies(self) -> list[Message]:
        """The expert's messages."""
        return [message for message in self.messages if message.role == "assistant"]


@dataclass(eq=False)
class Subject:
    """An environment with its settings, and how it is checked. `resolved` has its settings as the user gave them."""

    found: Found
    resolved: Resolved
    environment: PlannedEnvironment
    rewards: tuple[RewardTerm, ...]
    scratch: Path
    seed: int = 0
    tasks_max: int = TASKS
    settings: Tree = field(default_factory=dict)
    kept: dict[Any, Any] = field(default_factory=dict)  # what a check computes for others
    inline: Subject | None = None  # of an environment in a worker: the same one here, if it is installed here

    @property
    def component(self) -> Any:
        """The class; of an environment in a worker that is not installed here, the class in its place."""
        return self.inline.component if self.inline is not None else self.environment.chosen.component

    def at(self, *methods: str) -> str:
        """The line of the first of these methods that the class has, in parentheses; empty if it has none."""
        return at(*(getattr(self.component, name, None) for name in methods))

    def attempt(self, tried: str, *methods: str, change: str = "") -> Attempt:
        """What a check tries. Its failures have the line of the first of these methods that the class has."""
        return Attempt(tried, *(getattr(self.component, name, None) for name in methods), change=change)

    def has(self, method: str) -> bool:
        """Whether the environment has this optional method."""
        if self.inline is None and self.environment.remote is not None:
            return hasattr(self.made, method)
        return hasattr(self.component, method)

    @cached_property
    def made(self) -> Any:
        """An environment object that plays no episode."""
        return self.environment.make_checked()

    def deaths(self) -> int:
        """How many of its workers have died."""
        return sum(pool.deaths for pool in pools_of([self.environment]).values())

    def close(self) -> None:
        """End its workers."""
        for pool in pools_of([self.environment]).values():
            pool.close()

    @property
    def reward_range(self) -> tuple[float, float] | None:
        """The range that the class declares, or None. The attribute is checked by `rewards`."""
        declared = getattr(self.component, "reward_range", None)
        return (float(declared[0]), float(declared[1])) if declared is not None else None

    def rng(self, purpose: str = "check") -> Random:
        """Random numbers that depend on `--seed` and the purpose alone."""
        return Random(f"{self.seed}/{purpose}")

    def draw(self, count: int, split: str = "train", purpose: str = "check", seconds: float = math.inf) -> list[Task]:
        """The first `count` tasks; fewer if there are not enough, or if drawing takes longer than `seconds`."""
        rng = self.rng(purpose if split == "train" else f"{purpose}/{split}")
        drawn, deadline = itertools.islice(self.environment.draw(split, rng), count), time.monotonic() + seconds
        return list(itertools.takewhile(lambda _: time.monotonic() < deadline, drawn))

    @cached_property
    def drawn(self) -> list[Task]:
        """The first training tasks."""
        return self.draw(DRAWN)

    @cached_property
    def tasks(self) -> list[Task]:
        """The tasks that are played: different ones."""
        return list({task.key: task for task in self.drawn}.values())[: self.tasks_max]

    @cached_property
    def demonstrations(self) -> list[Demonstration]:
        """Demonstrations of different tasks, each with its task. Raises SkippedError if there are none."""
        if not self.has("demonstrations"):
            raise UntestedError("the environment has no demonstrations", DEMONSTRATE)
        found: dict[bytes, Demonstration] = {}
        tasks = _TasksByPrompt(self.environment.draw("train", self.rng()))
        with contextlib.suppress(ConfigError):  # the rows of `prompts` need no responses
            for messages in itertools.islice(self.environment.draw_demonstrations("train", self.rng()), READ_MAX):
                if (known := tasks.find(messages)) is not None:
                    found.setdefault(encode(known.task), known)
                if len(found) >= self.tasks_max:
                    break
        if not found:
            raise UntestedError(
                f"none of the first {counted(READ_MAX, 'task')} has the prompt of a demonstration",
                "draw tasks and demonstrations in the same way from `rng`: docs/check.md, Demonstrations",
            )
        return list(found.values())

    @property
    def expert(self) -> list[Demonstration]:
        """The demonstrations; none if there are none."""
        with contextlib.suppress(SkippedError):
            return self.demonstrations
        return []

    @property
    def is_judged(self) -> bool:
        """Whether a reward judges the rollouts."""
        return bool(rewards_of(self.component)) or any(term.function is not None for term in self.rewards)

    def require_rewards(self) -> None:
        """Raise SkippedError if nothing judges the rollouts."""
        if not self.is_judged:
            raise UntestedError("the environment has no @reward", "name a reward: --reward NAME")


class _TasksByPrompt:
    """Finds the task of a demonstration: the one at the same place, else the only one with the same prompt.

    Tasks with one prompt and different answers are used at the same place only.
    """

    def __init__(self, tasks: Iterator[Task]) -> None:
        self._tasks = itertools.islice(tasks, READ_MAX)
        self._known: dict[bytes, Task | None] = {}

    def find(self, messages: list[Message]) -> Demonstration | None:
        """The demonstration with its task; None if no known task has its prompt."""
        beside = next(self._tasks, None)
        if beside is not None:
            key = encode(beside.messages)
            other = self._known.setdefault(key, beside)
            if other is not None and encode(other) != encode(beside):
                self._known[key] = None
            if messages[: len(beside.messages)] == beside.messages:
                return Demonstration(beside, messages[len(beside.messages) :])
        for length in range(len(messages) - 1, 0, -1):
            if (task := self._known.get(encode(messages[:length]))) is not None:
                return Demonstration(task, messages[length:])
        return None


def make_subject(found: Found, settings: Tree, scratch: Path, *, seed: int = 0, tasks: int = TASKS) -> Subject:
    """Import the environment and read its settings: a tree with `env` and perhaps `reward`, which may hold classes and
    functions.

    Raises UserError if the environment cannot be imported, or if a setting is wrong.
    """
    found.use_path()
    given, objects = take_objects(settings)
    tree = merge({"env": found.name}, given)
    resolved = resolve(tree, Source().with_objects(objects))
    resolved = resolved._replace(components={key: resolved.components[key] for key in ("env", "reward", "sandbox")})
    manager = PluginManager(objects.components)
    workers = Workers(resolved, manager)
    chosen = choose(manager, resolved.components, resolved.source, workers=workers)
    core = dataclasses.replace(resolved.settings, tasks_seconds=TASKS_SECONDS)
    (environment,) = plan_environments(manager, resolved.components["env"], chosen["env"], core, resolved.source)
    (environment,) = with_sandboxes(chosen["sandbox"][0], (environment,), CONCURRENCY)
    rewards = reward_terms(resolved.components["reward"], chosen["reward"])
    refuse_env_of_rewards([environment], rewards)
    subject = Subject(found, resolved, environment, rewards, scratch, seed, tasks, tree)
    (own,) = resolved.components["env"]
    if workers.has(own):
        here = {name: value for name, value in settings.items() if name != "worker"}
        absent = (PluginError,) if workers.is_elsewhere(own) else ()
        with contextlib.suppress(*absent):
            subject.inline = make_subject(found, here, scratch, seed=seed, tasks=tasks)
    return subject
