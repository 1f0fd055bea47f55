"""A resolved configuration of mode eval becomes a plan: what an evaluation has of a run, found and checked.

Nothing heavy is loaded, and nothing of training is composed. Left out: playing it (`evaluation`).
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rollouts.compose.choosing import Chosen, choose_each, completed
from rollouts.compose.environments import Environment, held_out_tasks, plan_environments, task_identity
from rollouts.compose.plan import reward_terms, with_data
from rollouts.config import Component, Resolved, load_file, resolve
from rollouts.config.of_run import HOLDING_OUT, run_settings_file
from rollouts.config.secrets import components_without_secrets, leaves_out
from rollouts.config.settings import EVAL, Settings
from rollouts.env.checks import check_environment
from rollouts.env.mixing import RewardTerm
from rollouts.errors import ConfigError, EnvironmentDefinitionError, UserError
from rollouts.inference.chatting import is_evaluation_only
from rollouts.plugins.checks import run_check
from rollouts.plugins.manager import PluginManager
from rollouts.types import Task

__all__ = ["EvaluationPlan", "make_evaluation_plan"]


class EvaluationPlan(NamedTuple):
    """A composed evaluation. `resolved` is complete, so that writing it repeats it; its `model` is a checkpoint where
    the folder of a run was given. `is_chat`: the engine takes messages, so that no tokenizer is needed. `notes` are for
    whoever starts it.
    """

    resolved: Resolved
    settings: Settings
    chosen: dict[str, list[Chosen]]
    environments: tuple[Environment, ...]
    rewards: tuple[RewardTerm, ...]
    is_chat: bool
    notes: tuple[str, ...]
    manager: PluginManager

    @property
    def stages_chosen(self) -> tuple[dict[str, list[Chosen]], ...]:
        """An evaluation has no stages."""
        return ()

    def one(self, key: str) -> Chosen:
        """The component of a kind of which there is exactly one."""
        (chosen,) = self.chosen[key]
        return chosen

    @property
    def env_name(self) -> str:
        """What is played, for a title: the environment's name, or the aliases of several."""
        return " + ".join(env.alias or env.name for env in self.environments)

    def environment_of(self, task: Task) -> Environment:
        """The environment that this task is played in."""
        (found,) = (env for env in self.environments if env.alias == task.env)
        return found

    def eval_tasks(self) -> list[Task]:
        """The held-out tasks, as a training run draws them. Raises EnvironmentDefinitionError where there is none."""
        tasks = held_out_tasks(self.environments, self.settings.eval_tasks)
        if not tasks:
            raise EnvironmentDefinitionError(
                f"{self.env_name} gave no held-out task: tasks('eval', rng) has to yield at least one Task"
            )
        return tasks

    def inference_arguments(self, folder: str) -> dict[str, Any]:
        """What an inference backend may ask for."""
        settings = self.settings
        return {
            "model": settings.model,
            "training": None,
            "seed": settings.seed,
            "temperature": settings.temperature,
            "folder": folder,
            "concurrency": settings.concurrency,
            "lora_rank": 0,
        }


def make_evaluation_plan(resolved: Resolved) -> EvaluationPlan:
    """Find, import and check every component. Raises UserError of one kind or another, with what to type."""
    if not resolved.components["env"]:
        raise ConfigError(
            "no environment was named; type --env calculator (`rollouts plugins list` shows what there is)"
        )
    if resolved.settings.eval_tasks == 0:
        raise ConfigError("--eval-tasks 0: an evaluation needs tasks; leave it out, or give a number")
    manager = PluginManager()
    resolved = with_data(resolved, manager)
    own = {key: resolved.components[key] for key in resolved.components if key in EVAL}
    chosen = choose_each(manager, own, resolved.source)
    (inference,) = chosen["inference"]
    is_chat = is_evaluation_only(inference.component)
    settings, notes = _with_model(resolved.settings, is_chat)
    notes += _check_served(resolved.settings.model, settings, inference, is_chat)
    components: dict[str, list[Component]] = {**resolved.components, **completed(own, chosen)}
    run = _run_of(resolved.settings.model)
    # Several environments share the held-out tasks by their mean weights over the steps of the run.
    shared = settings if run is None else dataclasses.replace(settings, steps=run.settings.steps)
    environments = plan_environments(manager, components["env"], chosen["env"], shared, resolved.source)
    if run is not None:
        notes += _held_out_notes(manager, run, environments, components["env"], settings)
    rewards = reward_terms(components["reward"], chosen["reward"])
    for env in environments:
        check_environment(env.make_checked(), rewards)
    if is_chat and settings.template:
        name = next(iter(settings.template))
        raise ConfigError(
            f"--template.{name.replace('_', '-')}: with --inference {inference.name} the server shows the conversation "
            "to the model, not we; vLLM and SGLang take such arguments in the request: "
            f"--inference.body '{{chat_template_kwargs = {{{name} = ...}}}}'"
        )
    resolved = resolved._replace(settings=settings, components=components)
    plan = EvaluationPlan(resolved, settings, chosen, environments, rewards, is_chat, notes, manager)
    run_check(inference.component, plan.inference_arguments(""), inference.settings)
    return plan


def _run_of(model: str) -> Resolved | None:
    """The settings of the run that wrote this model, without its secrets; None where it is no run's. Raises
    ConfigError.
    """
    file = run_settings_file(model)
    if file is None:
        return None
    tree, source = load_file(file)
    return resolve(tree, source, allow_left_out=True)


def _held_out_notes(
    manager: PluginManager,
    run: Resolved,
    environments: Sequence[Environment],
    components: Sequence[Component],
    settings: Settings,
) -> tuple[str, ...]:
    """What the tasks have that the run may have been trained on, in words; nothing where it held them all out, or where
    it never saw these environments.
    """
    trained_in = {component.name for component in run.components["env"]}
    own = [env for env in environments if env.name in trained_in]
    here, there = ({name: getattr(each, name) for name in HOLDING_OUT} for each in (settings, run.settings))
    differing = [
        f"{name} is {here[name]} and was {there[name]} in the run" for name in HOLDING_OUT if here[name] != there[name]
    ]
    try:
        run = with_data(run, manager)
        theirs_given = run.components["env"]
        if components_without_secrets(components) == components_without_secrets(theirs_given):
            theirs_given = list(components)  # the same, with the secrets that are left out of the run's file
        else:
            differing.append("the environment or its settings are not those of the run")
        if not own or not differing:
            return ()
        if leaves_out([each.settings for each in theirs_given]):
            raise ConfigError(f"{run.source.path} leaves out a secret of the environment")
        chosen = choose_each(manager, {"env": theirs_given}, run.source)["env"]
        theirs = plan_environments(manager, theirs_given, chosen, run.settings, run.source)
        held_out = {task_identity(task) for task in held_out_tasks(theirs, run.settings.eval_tasks)}
        aliases = {env.alias for env in own}
        asked = [task for task in held_out_tasks(environments, settings.eval_tasks) if task.env in aliases]
    except UserError as error:
        return (f"which of these tasks the run held out is not known: {error}",)
    unseen = sum(task_identity(task) in held_out for task in asked)
    words = f": it held out {unseen} of these {len(asked)} tasks, and may have trained on the others"
    return ("; ".join(differing) + (words if unseen < len(asked) else ""),)


def _check_served(given: str, settings: Settings, inference: Chosen, is_chat: bool) -> tuple[str, ...]:
    """That the numbers will be of --model; what to tell of it. Weights are sent to nobody here, so what a server at a
    URL loaded when it was started is what speaks: of what a run has written somebody has to say that it is that.

    Raises ConfigError.
    """
    url, name = inference.settings.get("url"), inference.settings.get("served_model")
    if is_chat or not url or name is None:
        return ()
    if name:
        place = url if isinstance(url, str) else ",".join(url)
        return (f"what is evaluated is what {place} serves as {name!r}; that this is {settings.model} is not checked",)
    if not _is_of_a_run(given):
        return ()
    raise ConfigError(
        f"--model {given} with --inference.url: nothing is sent to servers that are evaluated, so the numbers "
        "would be of whatever is loaded there. Leave --inference.url out, and a server is started with that model; or "
        f"start that server with it (`rollouts export {shlex.quote(given)} FOLDER` writes what it can load), and "
        "type --inference.served-model NAME, its name there, to say so"
    )


def _is_of_a_run(model: str) -> bool:
    """Whether it is the folder of a run, a checkpoint or an adapter: no model as somebody would have started a server
    with it.
    """
    path = Path(model).expanduser()
    if not path.is_dir():
        return False
    from rollouts.compose.export import find_checkpoint
    from rollouts.training.adapters import is_adapter
    from rollouts.training.backends.checkpoint_files import STATE

    return find_checkpoint(model) != path or (path / STATE).exists() or is_adapter(path)


def _with_model(settings: Settings, is_chat: bool) -> tuple[Settings, tuple[str, ...]]:
    """The settings with the checkpoint that is meant, where the folder of a run was given; and what to tell of it."""
    path = Path(settings.model).expanduser()
    if is_chat or not path.is_dir():
        return settings, ()  # a name, whose meaning is the engine's business
    from rollouts.compose.export import find_checkpoint
    from rollouts.training.backends.checkpoint_files import STATE, check_folder

    found = find_checkpoint(settings.model)
    if (found / STATE).exists():
        check_folder(str(found))
    if found == path:
        return settings, ()
    note = f"the model of {settings.model} is that of its last checkpoint, {found.name}"
    return dataclasses.replace(settings, model=str(found)), (note,)
