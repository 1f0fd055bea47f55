"""Names become functions: every component of a run found, imported, checked and told its settings.

Nothing heavy is loaded: a `Plan` needs no model. Every mistake that can be seen before a model loads is raised here.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from random import Random
from typing import Any, NamedTuple

from rollouts.config import Component, Resolved, complete_settings, convert_settings, settings_path
from rollouts.config.settings import COMPONENT_KINDS, Settings
from rollouts.env.checks import check_environment, reward_term
from rollouts.env.mixing import RewardTerm, env_term
from rollouts.errors import ConfigError, EnvironmentDefinitionError, RolloutsError, SignatureError, words_of
from rollouts.plugins.index import KIND_WORDS, ComponentRef
from rollouts.plugins.manager import PluginManager
from rollouts.plugins.signature import Setting, Signature, check_signature
from rollouts.training.algorithms.algorithm import (
    Algorithm,
    algorithm_settings,
    as_algorithm,
    bind_algorithm,
    check_advantage,
    check_needs,
    needs,
)
from rollouts.training.datasets.buffer import as_task, draw_tasks
from rollouts.training.rollout_gen.groups import Filter
from rollouts.types import Message, Task

__all__ = ["Chosen", "Plan", "make_plan"]

# Learning rates where none is given: the embedded model is small and learns fast; trained models are easily broken.
LR_TINY = 3e-4
LR_RL = 1e-6
LR_SFT = 1e-5
LR_LORA_FACTOR = 10.0


class Chosen(NamedTuple):
    """A component, found and told its settings. `ref` is None for the environment's own rewards and advantages."""

    name: str
    component: Any
    settings: dict[str, Any]
    ref: ComponentRef | None
    alias: str = ""


class Plan(NamedTuple):
    """A composed run: functions and settings, no model yet. `resolved` is complete, so that writing it repeats the
    run.
    """

    resolved: Resolved
    settings: Settings
    lr: float
    chosen: dict[str, list[Chosen]]
    make_env: Callable[[], Any]
    rewards: tuple[RewardTerm, ...]
    filters: tuple[Filter, ...]
    algorithm: Algorithm
    manager: PluginManager

    @property
    def needs(self) -> list[str]:
        """What the loss asks for."""
        return sorted(needs(self.algorithm))

    def one(self, key: str) -> Chosen:
        """The component of a kind of which there is exactly one."""
        (chosen,) = self.chosen[key]
        return chosen

    def eval_tasks(self) -> list[Task]:
        """The held-out tasks, drawn before any training task; the system prompt is in them."""
        count = self.settings.eval_tasks
        if count == 0:
            return []
        return [self._instructed(task) for task in draw_tasks(self._tasks("eval", Random(f"{self._seed}/eval")), count)]

    def training_source(self) -> Sequence[Task] | Callable[[int], Iterator[Task]]:
        """The training tasks: a sequence to shuffle, or a function of the epoch that reads them in their order."""
        first = self._tasks("train", Random(f"{self._seed}/train/0"))
        if isinstance(first, Sequence):
            return [self._instructed(as_task(task)) for task in first]
        return lambda epoch: (
            self._instructed(as_task(task)) for task in self._tasks("train", Random(f"{self._seed}/train/{epoch}"))
        )

    def demonstrations(self) -> Iterator[list[Message]]:
        """Expert conversations for supervised training. Raises EnvironmentDefinitionError where there are none."""
        env = self.make_env()
        label = f"{self.one('env').name}.demonstrations('train', rng)"
        if not hasattr(env, "demonstrations"):
            raise EnvironmentDefinitionError(
                f"the environment {self.one('env').name} has no demonstrations; write `def demonstrations(self, split, "
                "rng)` that yields lists of Message, or train it with `rollouts run`"
            )
        conversation = None
        with _authors_code(label):
            given = env.demonstrations("train", Random(f"{self._seed}/demonstrations"))
        for conversation in _guarded(given, label):
            yield [*self._system_messages(), *conversation]
        if conversation is None:
            raise EnvironmentDefinitionError(
                f"the environment {self.one('env').name} has no demonstration: demonstrations('train', rng) gave "
                "nothing; it has to yield lists of Message"
            )

    @property
    def _seed(self) -> int:
        return self.settings.seed

    def _tasks(self, split: str, rng: Random) -> Iterable[Any]:
        label = f"{self.one('env').name}.tasks({split!r}, rng)"
        with _authors_code(label):
            tasks = self.make_env().tasks(split, rng)
        if inspect.isawaitable(tasks) or not isinstance(tasks, Iterable):
            if inspect.iscoroutine(tasks):
                tasks.close()
            raise EnvironmentDefinitionError(
                f"{label} gave {type(tasks).__name__}, which cannot be iterated; "
                "it must be a plain generator or return a list of Task"
            )
        return tasks if isinstance(tasks, Sequence) else _guarded(tasks, label)

    def _system_messages(self) -> list[Message]:
        return [Message("system", self.settings.system)] if self.settings.system else []

    def _instructed(self, task: Task) -> Task:
        """The task with the run's system prompt before it; its key stays that of the task as it was written."""
        if not self.settings.system:
            return task
        return Task([*self._system_messages(), *task.messages], task.answer, task.info, task.id or task.key)


def make_plan(resolved: Resolved) -> Plan:
    """Find, import and check every component. Raises UserError of one kind or another, with what to type."""
    settings = resolved.settings
    if not resolved.components["env"]:
        raise ConfigError(
            "no environment was named; type --env calculator (`rollouts plugins list` shows what there is)"
        )
    if settings.mode == "sft" and settings.filter:
        raise ConfigError("--filter: filters judge groups of rollouts; mode sft has none")
    manager = PluginManager()
    resolved = _with_data(resolved, manager)
    chosen = {
        key: [_choose(manager, resolved, key, each) for each in resolved.components[key]] for key in COMPONENT_KINDS
    }
    completed = resolved._replace(
        components={
            key: [
                component._replace(settings=each.settings)
                for component, each in zip(resolved.components[key], chosen[key], strict=True)
            ]
            for key in COMPONENT_KINDS
        }
    )
    (env,) = chosen["env"]
    make_env = functools.partial(_build_env, env.component, env.settings)
    rewards = tuple(
        env_term(component.weight, component.alias)
        if each.component is None
        else reward_term(component.alias, each.component, component.weight, each.settings)
        for component, each in zip(completed.components["reward"], chosen["reward"], strict=True)
    )
    filters = tuple(Filter(each.alias, each.component, each.settings) for each in chosen["filter"])
    with _authors_code(f"building the environment {env.name}"):
        first_env = make_env()
    check_environment(first_env, rewards if settings.mode == "rl" or settings.eval_tasks else None)
    return Plan(
        completed,
        settings,
        settings.lr if settings.lr is not None else _default_lr(settings),
        chosen,
        make_env,
        rewards,
        filters,
        _bind(chosen, settings),
        manager,
    )


def _default_lr(settings: Settings) -> float:
    full = LR_TINY if settings.model == "tiny" else LR_SFT if settings.mode == "sft" else LR_RL
    return full * LR_LORA_FACTOR if settings.lora_rank else full


def _choose(manager: PluginManager, resolved: Resolved, key: str, component: Component) -> Chosen:
    """One component with its settings converted and completed."""
    kind = COMPONENT_KINDS[key]
    label = f"{KIND_WORDS[kind]} {component.name}"
    path = settings_path(key, component)
    if key == "reward" and component.name == "env":
        none = Signature((), ())
        convert_settings(none, component.settings, "the environment's own rewards", resolved.source, path)
        return Chosen("env", None, {}, None, component.alias)
    if not component.name:  # settings for the algorithm's own advantage, or none at all
        (loss,) = resolved.components["loss"]
        own = _algorithm(manager.load(manager.find("losses", loss.name)), f"loss {loss.name}").advantage
        signature = check_signature(own, kind, f"the advantage of {loss.name}")
        converted = convert_settings(
            signature, component.settings, f"the advantage of {loss.name}", resolved.source, path
        )
        return Chosen("", own, complete_settings(signature, converted), None, component.alias)
    ref = manager.find(kind, component.name)
    found = manager.load(ref)
    if key == "loss":
        found = _algorithm(found, label)
        known: tuple[Setting, ...] = algorithm_settings(found)
        signature = Signature((), known)
    else:
        signature = check_signature(found, kind, label)
    converted = convert_settings(signature, component.settings, label, resolved.source, path)
    return Chosen(component.name, found, complete_settings(signature, converted), ref, component.alias)


def _algorithm(found: Any, label: str) -> Algorithm:
    try:
        return as_algorithm(found)
    except SignatureError as error:
        raise SignatureError(f"{label}: {error}") from error


def _with_data(resolved: Resolved, manager: PluginManager) -> Resolved:
    """`--data FILE` is the environment's setting `data`."""
    data = resolved.settings.data
    if not data:
        return resolved
    (env,) = resolved.components["env"]
    label = f"environment {env.name}"
    known = check_signature(manager.load(manager.find("environments", env.name)), "environments", label).settings
    if not any(setting.name == "data" for setting in known):
        raise ConfigError(f"--data {data}: the {label} has no setting `data`; `--env prompts` reads files of rows")
    given = {"data": data} | env.settings
    return resolved._replace(components=resolved.components | {"env": [env._replace(settings=given)]})


def _build_env(component: Any, settings: dict[str, Any]) -> Any:
    """A new environment; two of them share no list."""
    return component(**copy.deepcopy(settings))


@contextlib.contextmanager
def _authors_code(label: str) -> Iterator[None]:
    """What an environment's own code raises becomes one EnvironmentDefinitionError that names it."""
    try:
        yield
    except RolloutsError:
        raise
    except Exception as error:  # the author's code may raise anything
        raise EnvironmentDefinitionError(f"{label} raised {words_of(error)}") from error


def _guarded(values: Iterable[Any], label: str) -> Iterator[Any]:
    """The same values, one at a time; the author's code runs at each step."""
    with _authors_code(label):
        iterator = iter(values)
    end = object()
    while True:
        with _authors_code(label):
            value = next(iterator, end)
        if value is end:
            return
        yield value


def _bind(chosen: dict[str, list[Chosen]], settings: Settings) -> Algorithm:
    """The algorithm with every part replaced that a flag replaced. Raises ConfigError, SignatureError."""
    (loss,) = chosen["loss"]
    advantages = chosen["advantage"]
    algorithm = bind_algorithm(
        loss.component,
        loss.settings,
        advantages[0].component if advantages else None,
        advantages[0].settings if advantages else None,
        settings.aggregation or None,
    )
    check_needs(algorithm)
    check_advantage(algorithm.advantage)
    if settings.mode == "sft":
        if algorithm.aggregation == "dr_grpo":
            raise ConfigError("--aggregation dr_grpo divides by the length of a rollout, and mode sft has none")
        rl_only = {"advantages", "old_logprobs", "rollout_logprobs", "rewards"} & needs(algorithm)
        if rl_only:
            raise ConfigError(
                f"--loss {loss.name} asks for {', '.join(sorted(rl_only))}, which demonstrations do not have; "
                "type --loss sft, or --mode rl"
            )
    return algorithm
