"""A resolved configuration becomes a plan: every component of a run found, checked and put in its place.

How components are chosen stands in choosing.py, what is made of those of the algorithm in algorithms.py, and of
environments in environments.py. Nothing heavy is loaded: a `Plan` needs no model. Every mistake that can be seen before
a model loads is raised here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from rollouts.compose.algorithms import compose_stages
from rollouts.compose.choosing import Chosen, bind_each, choose_all, completed
from rollouts.compose.demonstrations import Demonstration, demonstrations
from rollouts.compose.environments import Environment, held_out_tasks, plan_environments, task_buffer
from rollouts.config import OWN, Component, Resolved, scheduled_parts, scheduled_table
from rollouts.config.settings import Settings
from rollouts.env.checks import check_environment, reward_term
from rollouts.env.mixing import RewardTerm, env_term
from rollouts.errors import ConfigError
from rollouts.inference.chatting import is_evaluation_only
from rollouts.plugins.checks import run_check
from rollouts.plugins.manager import PluginManager
from rollouts.plugins.signature import check_signature
from rollouts.training.algorithms.algorithm import Algorithm, function_label
from rollouts.training.algorithms.needs import needs
from rollouts.training.algorithms.schedule import Stage
from rollouts.training.datasets.buffer import DataBuffer
from rollouts.training.rollout_gen.groups import Filter
from rollouts.training.types import Companions, TrainingBackend
from rollouts.types import Task

__all__ = ["Chosen", "Plan", "make_plan", "reward_terms", "with_data"]

Components = dict[str, list[Component]]

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
    environments: tuple[Environment, ...]
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

    def inference_arguments(self, training: TrainingBackend | None, folder: str) -> dict[str, Any]:
        """What an engine may ask for; `training` is None as long as there is no model."""
        settings = self.settings
        return {
            "model": settings.model,
            "training": training,
            "seed": settings.seed,
            "temperature": settings.temperature,
            "folder": folder,
            "concurrency": settings.concurrency,
            "lora_rank": settings.lora_rank,
        }

    def one(self, key: str) -> Chosen:
        """The component of a kind of which there is exactly one."""
        (chosen,) = self.chosen[key]
        return chosen

    @property
    def env_name(self) -> str:
        """What the run is played in, for a title: the environment's name, or the aliases of several."""
        return " + ".join(env.alias or env.name for env in self.environments)

    def environment_of(self, task: Task) -> Environment:
        """The environment that this task of the run is played in."""
        (found,) = (env for env in self.environments if env.alias == task.env)
        return found

    def eval_tasks(self) -> list[Task]:
        """The held-out tasks, drawn before any training task; the system prompt is in them. Several environments have
        their shares of them.
        """
        return held_out_tasks(self.environments, self.settings.eval_tasks)

    def task_buffer(self, held_out: Sequence[Task]) -> DataBuffer:
        """The training tasks, without these. Raises EnvironmentDefinitionError where an environment has none."""
        return task_buffer(self.environments, held_out, self.settings.prompts_per_step)

    def demonstrations(self, held_out: Sequence[Task]) -> Iterator[Demonstration]:
        """Expert conversations for supervised training, without end and without those of these tasks. Raises
        EnvironmentDefinitionError where there are none.
        """
        return demonstrations(self.environments, held_out, self.settings.prompts_per_step)


def make_plan(resolved: Resolved) -> Plan:
    """Find, import and check every component. Raises UserError of one kind or another, with what to type."""
    settings = resolved.settings
    if settings.mode == "sft+rl":
        raise ConfigError(
            "mode sft+rl is two runs, and each has a plan; rollouts.compose.phases.phases() gives their settings"
        )
    if settings.mode == "eval":
        raise ConfigError("mode eval trains nothing and has a plan of its own: compose.evaluation_plan makes it")
    if not resolved.components["env"]:
        raise ConfigError(
            "no environment was named; type --env calculator (`rollouts plugins list` shows what there is)"
        )
    manager = PluginManager()
    resolved = with_data(resolved, manager)
    chosen = choose_all(manager, resolved.components, resolved.source)
    _check_trainable(chosen["inference"])
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
    environments = plan_environments(manager, components["env"], chosen["env"], settings, resolved.source)
    components = _with_curricula(components, environments)
    rewards = reward_terms(components["reward"], chosen["reward"])
    for env in environments:
        check_environment(env.make_checked(), rewards if settings.mode == "rl" or settings.eval_tasks else None)
    plan = Plan(
        resolved._replace(settings=settings, components=components),
        settings,
        lr,
        critic_lr,
        chosen,
        environments,
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
    inference = plan.one("inference")
    run_check(inference.component, plan.inference_arguments(None, ""), inference.settings)
    return plan


def reward_terms(components: Sequence[Component], chosen: Sequence[Chosen]) -> tuple[RewardTerm, ...]:
    """The rewards of a run, each with its weight. Raises SignatureError."""
    terms = []
    for component, each in zip(components, chosen, strict=True):
        assert isinstance(component.weight, float), f"the weight of the reward {component.alias}: {component.weight}"
        if each.component is None:
            terms.append(env_term(component.weight, component.alias))
        else:
            terms.append(reward_term(component.alias, each.component, component.weight, each.settings))
    return tuple(terms)


def _filters(chosen: Sequence[Chosen]) -> tuple[Filter, ...]:
    """The user's filters, with the algorithm's own where the word for them stands."""
    filters: list[Filter] = []
    for each in chosen:
        if each.ref is None and each.name == OWN:
            filters += [Filter(function_label(own), own, {}) for own in bind_each(each.component, each.settings)]
        else:
            filters.append(Filter(each.alias, each.component, each.settings))
    return tuple(filters)


def _check_trainable(chosen: Sequence[Chosen]) -> None:
    """Refuse engines that are good for evaluation only, where that can be seen already. Raises ConfigError."""
    for each in chosen:
        if is_evaluation_only(each.component):
            raise ConfigError(
                f"--inference {each.name}: it takes messages and returns no token ids with logprobs, so nothing can be "
                "trained on what it says\ntype: --inference hf to train, or `rollouts eval` to evaluate with it"
            )


def _default_lr(settings: Settings) -> float:
    full = LR_TINY if settings.model == "tiny" else LR_SFT if settings.mode == "sft" else LR_RL
    return full * LR_LORA_FACTOR if settings.lora_rank else full


def with_data(resolved: Resolved, manager: PluginManager) -> Resolved:
    """The same with `data` where it belongs: `--data FILE` is the setting `data` of the environment, or of those of
    several that have one. Raises ConfigError.
    """
    data = resolved.settings.data
    if not data:
        return resolved
    given = []
    for env in resolved.components["env"]:
        label = f"environment {env.name}"
        known = check_signature(manager.load(manager.find("environments", env.name)), "environments", label).settings
        takes = any(setting.name == "data" for setting in known)
        given.append(env._replace(settings={"data": data} | env.settings) if takes else env)
    if given == resolved.components["env"]:
        names = " and ".join(env.name for env in given)
        raise ConfigError(
            f"--data {data}: the environment {names} has no setting `data`; `--env prompts` reads files of rows"
        )
    return resolved._replace(components=resolved.components | {"env": given})


def _with_curricula(components: Components, environments: Sequence[Environment]) -> Components:
    """The components with every setting of the weights filled in."""
    written = [
        component._replace(weight={"name": env.curriculum.name, **env.curriculum.settings})
        if env.curriculum is not None
        else component
        for component, env in zip(components["env"], environments, strict=True)
    ]
    return components | {"env": written}
