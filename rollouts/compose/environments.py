"""The environments of a run: their tasks, and in which shares they are mixed.

An environment that is alone has no alias, and its random numbers are named by the run's seed only; of several, each has
random numbers of its own, and its tasks say whose they are (`Task.env`). What an author's code raises becomes one
EnvironmentDefinitionError that names it, with what to install where a module is missing. Left out: how episodes are
played, and the order of demonstrations (`demonstrations`).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from random import Random
from typing import Any, NamedTuple

import msgspec

from rollouts.author_code import authors_code
from rollouts.compose.choosing import Chosen, curriculum
from rollouts.config import Component, Source
from rollouts.config.settings import Settings
from rollouts.env.author_thread import AuthorThread
from rollouts.errors import EnvironmentDefinitionError, RolloutsError, words_of
from rollouts.plugins.index import ComponentRef, install_hint
from rollouts.plugins.manager import PluginManager
from rollouts.training.datasets import mixing
from rollouts.training.datasets.buffer import DataBuffer, as_conversation, as_task, draw_tasks, shuffled
from rollouts.types import Message, Task

__all__ = ["Environment", "held_out_tasks", "plan_environments", "task_buffer", "task_identity"]


class Environment(NamedTuple):
    """One environment of a run: `alias` is empty where it is the only one. `share` is its mean share over the run's
    steps; `curriculum` the chosen component where its weight is one, as `ref` is the environment's own.
    """

    alias: str
    name: str
    component: Any
    settings: Mapping[str, Any]
    ref: ComponentRef | None
    weight: mixing.Weight
    curriculum: Chosen | None
    share: float
    seed: int
    system: str
    tasks_seconds: float = math.inf

    def make(self) -> Any:
        """A new environment object; two of them share no list."""
        return self.component(**copy.deepcopy(dict(self.settings)))

    def make_checked(self) -> Any:
        """The same; what its constructor raises is an EnvironmentDefinitionError."""
        with self._authors_code(f"building the environment {self.name}"):
            return self.make()

    def held_out(self, count: int) -> list[Task]:
        """The first `count` different tasks of the split "eval"; fewer where there are fewer."""
        if count == 0:
            return []
        return [self._ours(task) for task in draw_tasks(self._tasks("eval", self._rng("eval")), count)]

    def training_source(self) -> Sequence[Task] | Callable[[int], Iterator[Task]]:
        """The training tasks: a sequence to shuffle, or a function of the epoch that reads them in their order."""
        first = self._tasks("train", self._rng("train/0"), whole=True)
        if isinstance(first, Sequence):
            return [self._ours(as_task(task)) for task in first]
        return lambda epoch: (self._ours(as_task(task)) for task in self._tasks("train", self._rng(f"train/{epoch}")))

    def demonstrations(self) -> Iterator[list[Message]]:
        """Expert conversations for supervised training, each once: a sequence in an order that the seed decides, an
        iterator as `shuffled` has it. Raises EnvironmentDefinitionError where there are none.
        """
        env = self.make_checked()
        label = f"{self.name}.demonstrations('train', rng)"
        if not hasattr(env, "demonstrations"):
            raise EnvironmentDefinitionError(
                f"the environment {self.name} has no demonstrations; write `def demonstrations(self, split, "
                "rng)` that yields lists of Message, or train it with `rollouts run`"
            )
        conversation = None
        thread = AuthorThread()
        rng = self._rng("demonstrations")
        given = self._in_time(thread, lambda: env.demonstrations("train", rng), label)
        for conversation in self._in_order(given, thread, label):
            yield [*self._system_messages(), *as_conversation(conversation, label)]
        if conversation is None:
            raise EnvironmentDefinitionError(
                f"the environment {self.name} has no demonstration: demonstrations('train', rng) gave "
                "nothing; it has to yield lists of Message"
            )

    def demonstration_order(self, count: int, epoch: int) -> list[int]:
        """The order of `count` demonstrations in an epoch: a function of the seed and the epoch alone."""
        order = list(range(count))
        self._rng(f"demonstrations/{epoch}").shuffle(order)
        return order

    def _rng(self, purpose: str) -> Random:
        return Random("/".join(filter(None, (str(self.seed), self.alias, purpose))))

    def _in_order(self, given: Any, thread: AuthorThread, label: str) -> Iterator[Any]:
        """The demonstrations that the author's code gave, in the order of the first epoch."""
        if not isinstance(given, Sequence):
            return shuffled(self._guarded(given, thread, label), self._rng("demonstrations/0"))
        order = self.demonstration_order(self._in_time(thread, lambda: len(given), label), 0)
        return self._guarded((given[index] for index in order), thread, label)

    def _tasks(self, split: str, rng: Random, *, whole: bool = False) -> Iterable[Any]:
        """What `tasks` gives; with `whole` a sequence is read to its end."""
        label = f"{self.name}.tasks({split!r}, rng)"
        thread = AuthorThread()
        tasks = self._in_time(thread, lambda: self.make().tasks(split, rng), label)
        if inspect.isawaitable(tasks) or not isinstance(tasks, Iterable):
            if inspect.iscoroutine(tasks):
                tasks.close()
            raise EnvironmentDefinitionError(
                f"{label} gave {type(tasks).__name__}, which cannot be iterated; "
                "it must be a plain generator or return a list of Task"
            )
        if isinstance(tasks, list | tuple):
            return tasks
        if whole and isinstance(tasks, Sequence):
            drawn: list[Any] = self._in_time(thread, lambda: list(tasks), label)
            return drawn
        return self._guarded(tasks, thread, label)

    def _system_messages(self) -> list[Message]:
        return [Message("system", self.system)] if self.system else []

    def _ours(self, task: Task) -> Task:
        """The task with the run's system prompt before it, and this environment's alias; its key stays that of the
        task as it was written.
        """
        if self.system:
            prompt = [*self._system_messages(), *task.messages]
            return Task(prompt, task.answer, task.info, task.id or task.key, self.alias)
        return task if task.env == self.alias else msgspec.structs.replace(task, env=self.alias)

    @contextlib.contextmanager
    def _authors_code(self, label: str) -> Iterator[None]:
        """What an environment's own code raises becomes one EnvironmentDefinitionError that names it."""
        try:
            with authors_code():
                yield
        except RolloutsError:
            raise
        except Exception as error:  # the author's code may raise anything
            hint = install_hint(error, self.ref) if self.ref else ""
            raise EnvironmentDefinitionError(f"{label} raised {words_of(error)}" + (hint and f"\n{hint}")) from error

    def _in_time(self, thread: AuthorThread, function: Callable[[], Any], label: str) -> Any:
        """What the environment's own code returns, in at most `tasks_seconds`."""
        with self._authors_code(label):
            try:
                return thread.call(function, self.tasks_seconds)
            except TimeoutError as error:
                if not thread.is_late:
                    raise
                raise EnvironmentDefinitionError(
                    f"{label} gave nothing for {self.tasks_seconds:g} seconds, and --tasks-seconds is its deadline; "
                    "type a larger one, or let it load its data faster"
                ) from error

    def _guarded(self, values: Iterable[Any], thread: AuthorThread, label: str) -> Iterator[Any]:
        """The same values, one at a time; the author's code runs at each step."""
        iterator = self._in_time(thread, lambda: iter(values), label)
        end = object()
        while True:
            value = self._in_time(thread, lambda: next(iterator, end), label)
            if value is end:
                return
            yield value


def plan_environments(
    manager: PluginManager,
    components: Sequence[Component],
    chosen: Sequence[Chosen],
    settings: Settings,
    source: Source,
) -> tuple[Environment, ...]:
    """The environments of a run with their weights. Raises UserError: a curriculum that is not there, or cannot be
    used, and weights that are negative or all 0, at any step of the run.
    """
    curricula: list[Chosen | None] = []
    weights: dict[str, mixing.Weight] = {}
    for component in components:
        weight: mixing.Weight
        given = component.weight
        curricula.append(curriculum(manager, component, source) if isinstance(given, dict) else None)
        if isinstance(given, dict):
            found = curricula[-1]
            assert found is not None, "it was chosen in the line above"
            weight = functools.partial(found.component, **found.settings)
        else:
            weight = mixing.piecewise(given) if isinstance(given, list) else given
        weights[component.alias] = weight
    shares = mixing.mean_shares(weights, settings.steps)
    return tuple(
        Environment(
            component.alias,
            component.name,
            found.component,
            found.settings,
            found.ref,
            weights[component.alias],
            each,
            share,
            settings.seed,
            settings.system,
            settings.tasks_seconds,
        )
        for component, found, each, share in zip(components, chosen, curricula, shares, strict=True)
    )


def held_out_tasks(environments: Sequence[Environment], count: int) -> list[Task]:
    """`count` held-out tasks of all environments together, shared out by their mean shares over the run."""
    counts = mixing.share_out(count, [env.share for env in environments])
    return [task for env, own in zip(environments, counts, strict=True) for task in env.held_out(own)]


def task_identity(task: Task) -> str:
    """The task's key; that of a prompt does not depend on the system prompt of a run."""
    return task.key.removeprefix("id:") if task.key.startswith("id:prompt:") else task.key


def task_buffer(environments: Sequence[Environment], held_out: Sequence[Task], tasks_per_step: int) -> DataBuffer:
    """Where training tasks come from: one environment's own, or a mixture. No held-out task is among them; where two
    environments have one prompt, it is held out of both (an id means something in its own environment only).

    Raises EnvironmentDefinitionError where an environment that has a share has no training task.
    """
    sources = [env.training_source() for env in environments if env.share > 0]
    parts = []
    for env, source in zip([env for env in environments if env.share > 0], sources, strict=True):
        exclude = frozenset(
            task.key for task in held_out if task.env == env.alias or task.key.startswith(("prompt:", "id:prompt:"))
        )
        try:
            DataBuffer(source, seed=env.seed, exclude=exclude).get_prompts(1)
        except EnvironmentDefinitionError as error:
            if not env.alias:
                raise
            raise EnvironmentDefinitionError(f"{env.alias}: {error}") from error
        parts.append(mixing.Source(env.alias, source, env.weight, exclude))
    (first, *_) = parts
    if not first.name:
        return DataBuffer(first.prompts, seed=environments[0].seed, exclude=first.exclude)
    idle = [mixing.Source(env.alias, (), 0.0) for env in environments if env.share == 0]
    return mixing.MixedBuffer([*parts, *idle], seed=environments[0].seed, tasks_per_step=tasks_per_step)
