"""A resolved configuration becomes a plan: every component of a run found, checked and put in its place.

How components are chosen stands in choosing.py, what is made of those of the algorithm in algorithms.py. Nothing heavy
is loaded: a `Plan` needs no model. Every mistake that can be seen before a model loads is raised here.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from random import Random
from typing import Any, NamedTuple

from rollouts.compose.algorithms import compose_stages
from rollouts.compose.choosing import Chosen, bind_each, choose_all, completed
from rollouts.config import OWN, Component, Resolved, scheduled_parts, scheduled_table
from rollouts.config.settings import Settings
from rollouts.env.checks import check_environment, reward_term
from rollouts.env.mixing import RewardTerm, env_term
from rollouts.errors import ConfigError, EnvironmentDefinitionError, RolloutsError, words_of
from rollouts.plugins.checks import run_check
from rollouts.plugins.manager import PluginManager
from rollouts.plugins.signature import check_signature
from rollouts.training.algorithms.algorithm import Algorithm, function_label
from rollouts.training.algorithms.needs import needs
from rollouts.training.algorithms.schedule import Stage
from rollouts.training.datasets.buffer import as_task, draw_tasks
from rollouts.training.rollout_gen.groups import Filter
from rollouts.training.types import Companions
from rollouts.types import Message, Task

__all__ = ["Chosen", "Plan", "make_plan"]

# Learning rates where none is given: the embedded model is small and learns fast; trained models are easily broken.
LR_TINY = 3e-4
LR_RL = 1e-6
LR_SFT = 1e-5
LR_LORA_FACTOR = 10.0
LR_CRITIC_FACTOR = 10.0


class Plan(NamedTuple):
    """A composed run: functions and settings, no model yet. `resolved` is complete, so that writing it repeats the
    run.

    `schedule` holds every stage, the first included; `companions` are the models beside the policy (None: none).
    `stages_chosen` are the components of each stage, as `chosen` of the whole run. `notes` are for whoever starts the
    run.
    """

    resolved: Resolved
    settings: Settings
    lr: float
    critic_lr: float
    chosen: dict[str, list[Chosen]]
    make_env: Callable[[], Any]
    rewards: tuple[RewardTerm, ...]
    filters: tuple[Filter, ...]
    schedule: tuple[Stage, ...]
    stages_chosen: tuple[dict[str, list[Chosen]], ...]
    companions: Companions | None
    notes: tuple[str, ...]
    manager: PluginManager

    @property
    def algorithm(self) -> Algorithm:
        """The one that the run begins with."""
        return self.schedule[0].algorithm

    @property
    def algorithms(self) -> dict[str, Algorithm]:
        """Those of all stages, by the name that batches carry."""
        return {stage.name: stage.algorithm for stage in self.schedule}

    @property
    def reference(self) -> Callable[..., Any] | None:
        """How the reference policy follows the policy; None where nothing needs one."""
        return None if self.companions is None else self.companions.reference

    @property
    def needs(self) -> list[str]:
        """What the losses of all stages ask for; without the names of a correction that may not be used."""
        return sorted({name for stage in self.schedule for name in needs(stage.inside().algorithm)})

    def training_arguments(self) -> dict[str, Any]:
        """What a training backend may ask for, but for the run's own text."""
        settings = self.settings
        return {
            "model": settings.model,
            "seed": settings.seed,
            "steps": settings.steps * (1 if settings.mode == "sft" else settings.minibatches),
            "lr": self.lr,
            "lora_rank": settings.lora_rank,
            "tokens_per_microbatch": settings.tokens_per_microbatch,
            "algorithms": self.algorithms,
            "companions": self.companions,
        }

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
    if settings.mode == "sft+rl":
        raise ConfigError(
            "mode sft+rl is two runs, and each has a plan; rollouts.compose.phases.phases() gives their settings"
        )
    if not resolved.components["env"]:
        raise ConfigError(
            "no environment was named; type --env calculator (`rollouts plugins list` shows what there is)"
        )
    manager = PluginManager()
    resolved = _with_data(resolved, manager)
    chosen = choose_all(manager, resolved.components, resolved.source)
    planned = scheduled_parts(resolved.components, settings.schedule, resolved.source)
    stages_chosen = (
        {key: chosen[key] for key in planned[0].components},
        *(choose_all(manager, each.components, resolved.source, each.places) for each in planned[1:]),
    )
    components = completed(resolved.components, chosen)
    tables = [
        scheduled_table(each.step, each.given, completed(each.components, parts))
        for each, parts in zip(planned[1:], stages_chosen[1:], strict=True)
    ]
    settings = dataclasses.replace(settings, schedule=tuple(tables))
    lr = settings.lr if settings.lr is not None else _default_lr(settings)
    critic_lr = settings.critic_lr if settings.critic_lr is not None else lr * LR_CRITIC_FACTOR
    stages = [(0, chosen), *((each.step, parts) for each, parts in zip(planned[1:], stages_chosen[1:], strict=True))]
    composed = compose_stages(stages, chosen, settings, critic_lr)
    (env,) = chosen["env"]
    make_env = functools.partial(_build_env, env.component, env.settings)
    rewards = _rewards(components["reward"], chosen["reward"])
    with _authors_code(f"building the environment {env.name}"):
        first_env = make_env()
    check_environment(first_env, rewards if settings.mode == "rl" or settings.eval_tasks else None)
    plan = Plan(
        resolved._replace(settings=settings, components=components),
        settings,
        lr,
        critic_lr,
        chosen,
        make_env,
        rewards,
        _filters(chosen["filter"]) if settings.mode == "rl" else (),
        composed.stages,
        stages_chosen,
        composed.companions,
        composed.notes,
        manager,
    )
    (training,) = chosen["training"]
    run_check(training.component, plan.training_arguments(), training.settings)
    return plan


def _rewards(components: Sequence[Component], chosen: Sequence[Chosen]) -> tuple[RewardTerm, ...]:
    return tuple(
        env_term(component.weight, component.alias)
        if each.component is None
        else reward_term(component.alias, each.component, component.weight, each.settings)
        for component, each in zip(components, chosen, strict=True)
    )


def _filters(chosen: Sequence[Chosen]) -> tuple[Filter, ...]:
    """The user's filters, with the algorithm's own where the word for them stands."""
    filters: list[Filter] = []
    for each in chosen:
        if each.ref is None and each.name == OWN:
            filters += [Filter(function_label(own), own, {}) for own in bind_each(each.component, each.settings)]
        else:
            filters.append(Filter(each.alias, each.component, each.settings))
    return tuple(filters)


def _default_lr(settings: Settings) -> float:
    full = LR_TINY if settings.model == "tiny" else LR_SFT if settings.mode == "sft" else LR_RL
    return full * LR_LORA_FACTOR if settings.lora_rank else full


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
