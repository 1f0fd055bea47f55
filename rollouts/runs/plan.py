"""Turns a resolved configuration into a plan: finds and checks every component of a run, and composes them.

components.py chooses components, algorithms.py composes algorithms, environments.py composes environments. No model is
loaded. Every mistake that can be found before a model loads is raised here. An evaluation has a plan too, without the
parts of training.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from rollouts.config.merging import Component, component_tables
from rollouts.config.render import to_toml
from rollouts.config.resolving import Resolved
from rollouts.config.secrets import tree_without_secrets
from rollouts.config.settings import EVAL, OWN, Settings, without_secrets
from rollouts.env.advice import warn_about
from rollouts.env.authoring import rewards_of, roles_of
from rollouts.env.checks import check_environment, reward_term
from rollouts.env.mixing import RewardTerm, env_term
from rollouts.env.toolsets import AddedTool
from rollouts.errors import ConfigError, EnvironmentDefinitionError, counted, said_of
from rollouts.inference.chatting import is_evaluation_only
from rollouts.loggers.base import plain_settings
from rollouts.models.estimates import how_estimated
from rollouts.models.loading import bundled, resolve_model_name
from rollouts.plugins.checks import run_check
from rollouts.plugins.index import ComponentRef
from rollouts.plugins.loading import MODEL_PACKAGES, require_packages
from rollouts.plugins.manager import PluginManager
from rollouts.runs.algorithms import Composed, compose
from rollouts.runs.components import (
    Chosen,
    added_tools,
    bind_each,
    check_pinned,
    check_tool_names,
    choose,
    chosen_optimizer,
    completed,
    parser_of,
    takes_rows,
    with_data,
)
from rollouts.runs.earlier_run import (
    evaluated,
    find_checkpoint,
    is_of_run,
    overlap_notes,
    run_of,
    trained_before,
    unused_of_run,
)
from rollouts.runs.environments import Environment, held_out_tasks, plan_environments
from rollouts.runs.held_objects import manager_for, refuse_ranks, unread_notes, with_rows
from rollouts.runs.manifest import changed_code, code_files, is_older, naming_copies
from rollouts.runs.opponents import PlannedOpponent, plan_lora_roles, plan_opponents
from rollouts.runs.session import model_words
from rollouts.runs.unused import Whole, unused
from rollouts.runs.workers import Workers, refuse_env_of_rewards, with_sandboxes
from rollouts.training.algorithms.algorithm import Algorithm, Stage, function_label, needs
from rollouts.training.batches import AuxiliaryModels, TrainingBackend
from rollouts.training.rollout_gen.groups import NamedFilter
from rollouts.types import Task

if TYPE_CHECKING:
    from rollouts.chat.tool_parsers import ToolParser

# The default learning rate of a model that is neither bundled nor trained from a bundled one. A larger rate may break
# it.
LR_RL = 1e-6
LR_SFT = 1e-5
LR_LORA_FACTOR = 10.0
LR_CRITIC_FACTOR = 10.0


class Plan(NamedTuple):
    """A composed run: functions and settings, without a model. `resolved` is complete: a config file of it repeats the
    run.

    An evaluation has no filters, no schedule and no auxiliary models. In a training run, `schedule` has all stages, the
    first included; `chosen` are the components of the whole run, and `stages_chosen` those of each later stage;
    `auxiliary_models` are reference, critic and teacher (None: no such models). `make_optimizer` makes the chosen
    optimizer (None: none is chosen). `opponents` and `lora_roles`: see `rollouts.runs.opponents`. `notes` are warnings.
    """

    resolved: Resolved
    chosen: dict[str, list[Chosen]]
    environments: tuple[Environment, ...]
    rewards: tuple[RewardTerm, ...]
    filters: tuple[NamedFilter, ...]
    schedule: tuple[Stage, ...]
    stages_chosen: tuple[dict[str, list[Chosen]], ...]
    auxiliary_models: AuxiliaryModels | None
    notes: tuple[str, ...]
    manager: PluginManager
    make_optimizer: Any = None
    opponents: tuple[PlannedOpponent, ...] = ()
    lora_roles: tuple[str, ...] = ()

    @property
    def settings(self) -> Settings:
        """The core's settings."""
        return self.resolved.settings

    @property
    def lr(self) -> float:
        """The learning rate: the setting, or a default that depends on the model."""
        return _lr(self.settings)

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm of the first stage."""
        return self.schedule[0].algorithm

    @property
    def algorithms(self) -> dict[str, Algorithm]:
        """The algorithms of all stages, by their names in batches."""
        return {stage.name: stage.algorithm for stage in self.schedule}

    @property
    def needs(self) -> list[str]:
        """The inputs of the losses of all stages, without those of a correction that may not be used."""
        return sorted({name for stage in self.schedule for name in needs(stage.inside().algorithm)})

    @property
    def is_chat(self) -> bool:
        """Whether the engine takes messages, so that no tokenizer is needed. Only an evaluation may have such an
        engine.
        """
        return is_evaluation_only(self.one("inference").component)

    @property
    def tools(self) -> tuple[AddedTool, ...]:
        """The tools that the run adds to those of its environments."""
        return added_tools(self.chosen["tool"])

    @property
    def tool_parser(self) -> ToolParser | None:
        """The chosen tool parser; None: the chat template decides how calls are read."""
        return parser_of(self.one("tool_parser"))

    @property
    def references(self) -> list[ComponentRef]:
        """Every component of the run, including those of later stages; each once, in the order of the settings."""
        parts = [self.chosen, *self.stages_chosen]
        found = [each.ref for chosen in parts for several in chosen.values() for each in several]
        found += [env.curriculum.ref for env in self.environments if env.curriculum is not None]
        return list(dict.fromkeys(ref for ref in found if ref is not None))

    @property
    def config(self) -> str:
        """The content of config.toml."""
        return config_text(self.resolved)

    @property
    def config_of_ranks(self) -> str:
        """The content of config.toml with secrets, for this run's own ranks."""
        return config_text(self.resolved, with_secrets=True)

    @property
    def plain(self) -> dict[str, Any]:
        """The resolved settings as plain data, without secrets: for loggers and hooks."""
        settings = plain_settings(self.resolved.without_secrets().settings)
        if self.settings.mode == "eval":
            settings = {name: value for name, value in settings.items() if name in EVAL}
        else:
            settings["lr"] = self.lr
        for key, chosen in self.chosen.items():
            for each in chosen:
                if each.settings:
                    name = f"{key}.{each.alias}" if each.alias else key
                    settings[f"{name}.settings"] = without_secrets(plain_settings(each.settings))
        return settings

    @property
    def flat(self) -> dict[str, Any]:
        """Every setting of the run, including those of components, by its dotted name, as JSON data for checkpoints.
        Default learning rates are filled in.
        """
        tree: dict[str, Any] = plain_settings(self.settings) | {"lr": self.lr}
        if self.settings.critic:
            tree["critic_lr"] = _critic_lr(self.settings)
        for name in ("out", "resume"):
            del tree[name]
        tree |= plain_settings(component_tables(self.resolved.components))
        flat: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(dict(_flattened(tree_without_secrets(tree)))))
        return flat

    @property
    def env_name(self) -> str:
        """The environment's name, or the aliases of several, for a title."""
        return " + ".join(env.alias or env.name for env in self.environments) or Path(self.settings.data).stem

    @property
    def on_step(self) -> tuple[Callable[..., Any], ...]:
        """The functions to call after each step."""
        return self.resolved.source.objects.on_step

    def one(self, key: str) -> Chosen:
        """The component of a kind that has exactly one component."""
        (chosen,) = self.chosen[key]
        return chosen

    def training_arguments(self) -> dict[str, Any]:
        """The arguments that the factory of a training backend may name, except `config`."""
        settings = self.settings
        return {
            "model": settings.model,
            "seed": settings.seed,
            "steps": settings.steps * (1 if settings.mode == "sft" else settings.minibatches),
            "lr": self.lr,
            "lora_rank": settings.lora_rank,
            "lora_roles": self.lora_roles,
            "tokens_per_microbatch": settings.tokens_per_microbatch,
            "algorithms": self.algorithms,
            "auxiliary_models": self.auxiliary_models,
            "companions": self.auxiliary_models,
            "make_optimizer": self.make_optimizer,
        }

    def inference_arguments(
        self, training: TrainingBackend | None, folder: str, *, pinned: bool = False
    ) -> dict[str, Any]:
        """The arguments that the factory of an engine may name. `training` is None if there is no training backend.
        `pinned`: for an engine of `--eval-inference`.
        """
        settings = self.settings
        return {
            "model": settings.model,
            "training": training,
            "seed": settings.seed,
            "temperature": settings.temperature,
            "folder": folder,
            "concurrency": settings.concurrency,
            "lora_rank": settings.lora_rank,
            "lora_roles": self.lora_roles,
            "pinned": pinned,
        }

    def eval_tasks(self) -> list[Task]:
        """The held-out tasks, drawn before any training task; with the system prompt. Several environments share them.
        Raises EnvironmentDefinitionError if an evaluation would have no tasks.
        """
        tasks = held_out_tasks(self.environments, self.settings.eval_tasks)
        if not tasks and self.settings.mode == "eval":
            raise EnvironmentDefinitionError(
                f"{self.env_name} gave no held-out task: tasks('eval', rng) has to yield at least one Task"
            )
        return tasks


def title(plan: Plan) -> str:
    """The training run in one line, for the observer."""
    settings = plan.settings
    size = counted(settings.prompts_per_step, "group" if settings.from_run else "prompt")
    size += f" × {counted(settings.samples_per_prompt, 'rollout')}" if settings.samples else ""
    size += "".join(f" of {os.path.relpath(run)}" for run in settings.from_run)
    lora = f", LoRA rank {settings.lora_rank}" if settings.lora_rank else ""
    if settings.lora_per_role:
        lora += f" for each of {', '.join(plan.lora_roles)}"
    return (
        f"{plan.env_name} · {plan.one('loss').name} · {settings.model}{lora} · {counted(settings.steps, 'step')} of "
        f"{size} · lr {plan.lr:g} · seed {settings.seed}{model_words(settings.model)}"
    )


_OF_TALKS = ("inference", "tool_parser")  # what `chat` and `serve` use, which play no task


def make_plan(
    resolved: Resolved,
    *,
    needs_environment: bool = True,
    may_be_absent: bool = False,
    used_elsewhere: Sequence[str] = (),
) -> Plan:
    """Find, import and check every component. Only a conversation with a model needs no environment. With
    `may_be_absent`, torch may be missing: a training backend that needs it is `Chosen.is_absent`. `used_elsewhere`
    are keys whose components another phase of the run uses. Raises a UserError that says what to type.
    """
    resolved = with_rows(resolved)
    settings, source = resolved.settings, resolved.source
    _check_settings(settings, needs_environment and not resolved.components["env"])
    is_evaluation, given = settings.mode == "eval", settings.model
    keys = [key for key in resolved.components if key in EVAL or not is_evaluation]
    manager = manager_for(resolved, keys)
    workers = Workers(resolved, manager)
    resolved = with_data(resolved, manager, workers)
    own = {key: resolved.components[key] for key in keys}
    with naming_copies(Path(source.path).parent if source.path else next(iter(settings.from_run), None)):
        chosen = choose(manager, own, source, workers=workers, may_be_absent=may_be_absent)
    (inference,) = chosen["inference"]
    _check_parser(chosen["tool_parser"][0], inference)
    if is_evaluation:
        settings, notes = evaluated(settings, inference)
        composed = Composed((), (), (), None, notes)
    else:
        _check_trainable(inference, chosen["training"][0], resolved)
        settings, notes = _models_of_runs(settings)
        with_models = resolved._replace(settings=settings)
        composed = compose(manager, with_models, chosen, _critic_lr(settings), has_torch=not may_be_absent)
        settings = dataclasses.replace(settings, schedule=composed.schedule)
    components = {**resolved.components, **completed(own, chosen)}
    run = run_of(resolved.settings.model) if is_evaluation else None
    # Several environments share the held-out tasks by their mean weights over the steps of the run.
    shared = settings if run is None else dataclasses.replace(settings, steps=run.settings.steps, mode="rl")
    environments = plan_environments(manager, components["env"], chosen["env"], shared, source)
    environments = _of_run(environments, chosen, settings)
    filters = _filters(chosen["filter"]) if settings.mode == "rl" else ()
    notes = composed.notes if is_evaluation else (*notes, *composed.notes)
    resolved = resolved._replace(settings=settings, components=components)
    notes += _notes_of_earlier_run(manager, environments, resolved, chosen, run, given)
    rewards = reward_terms(components["reward"], chosen["reward"])
    notes += (*_dropped_rewards(environments, rewards), *unread_notes(resolved))
    mode = "rl" if takes_rows(settings.mode, chosen) else settings.mode  # of the environments
    notes += _tools_of_demonstrations(environments) if mode == "sft" else ()
    refuse_env_of_rewards(environments, rewards)
    judges = needs_environment and (settings.mode == "rl" or settings.eval_tasks > 0)
    _check_environments(environments, chosen["tool"], rewards if judges else None, mode)
    components["env"] = _with_curricula(components["env"], environments)
    whole = Whole(settings, chosen, composed.stages, composed.stages_chosen, environments, rewards, filters)
    notes += tuple(unused(whole, (*used_elsewhere, *(() if needs_environment else _OF_TALKS))))
    plan = Plan(
        resolved,
        chosen,
        environments,
        rewards,
        filters,
        composed.stages,
        composed.stages_chosen,
        composed.auxiliary_models,
        notes,
        manager,
        None if is_evaluation else chosen_optimizer(chosen),
        plan_opponents(manager, settings, environments, source),
        plan_lora_roles(settings, chosen, environments),
    )
    _run_checks(plan, may_be_absent)
    return plan


def _notes_of_earlier_run(
    manager: PluginManager,
    environments: Sequence[Environment],
    resolved: Resolved,
    chosen: Mapping[str, list[Chosen]],
    run: Resolved | None,
    model: str,
) -> tuple[str, ...]:
    """Notes about the run that wrote the model: of an evaluation of `model`, its settings are `run`."""
    if resolved.settings.mode != "eval":
        return trained_before(manager, environments, resolved)
    if run is None:
        return ()
    used = [each.ref for each in (*chosen["env"], *chosen["reward"]) if each.ref is not None]
    return (
        *overlap_notes(manager, run, environments, resolved),
        *unused_of_run(run, resolved, model),
        *changed_code(Path(run.source.path).parent, code_files(used, resolved.source)),
    )


def _run_checks(plan: Plan, may_be_absent: bool) -> None:
    """Let the backends and the rewards check their settings. Raises ConfigError, and MissingExtraError for an
    evaluation without the packages of its engine.
    """
    check_pinned(plan.chosen.get("eval_inference", ()), plan.settings)
    if plan.settings.mode == "eval" and not may_be_absent:
        _require_packages(plan.one("inference"))
    if plan.settings.mode != "eval":
        training = plan.one("training")
        run_check(training.component, plan.training_arguments(), training.settings)
    for inference in (plan.one("inference"), *plan.chosen.get("eval_inference", ())):
        run_check(inference.component, plan.inference_arguments(None, ""), inference.settings)
    for reward in plan.chosen["reward"]:
        if reward.component is not None:  # not the environment's own rewards
            run_check(reward.component, {}, reward.settings)


def _of_run(
    environments: Sequence[Environment], chosen: Mapping[str, list[Chosen]], settings: Settings
) -> tuple[Environment, ...]:
    """The environments with what the run gives to each of them. Raises UserError."""
    keeps_all = bool(settings.out) and is_older(Path(settings.out))  # what it evaluates is never trained
    text_only, tools = not is_evaluation_only(chosen["inference"][0].component), added_tools(chosen["tool"])
    return tuple(
        env._replace(text_only=text_only, trains=env.trains and not keeps_all, tools=tools)
        for env in with_sandboxes(chosen["sandbox"][0], environments, settings.concurrency)
    )


def _with_curricula(components: Sequence[Component], environments: Sequence[Environment]) -> list[Component]:
    """The chosen environments with every setting of their curricula."""
    return [
        each._replace(weight={"name": env.curriculum.name, **env.curriculum.settings}) if env.curriculum else each
        for each, env in zip(components, environments, strict=True)
    ]


def _check_environments(
    environments: Sequence[Environment], tools: Sequence[Chosen], rewards: Sequence[RewardTerm] | None, mode: str
) -> None:
    """Raise EnvironmentDefinitionError for the first mistake of an environment, and ConfigError if an added tool has
    the name of one of its own. `rewards` None: nothing is judged.
    """
    for env in environments:
        made = env.make_checked()
        if mode == "sft":
            env.require_demonstrations(made)
        check_environment(made, rewards)
        if env.system and (roles := roles_of(made)):
            raise ConfigError(
                f"--system: the environment {env.name} has roles ({', '.join(role.name for role in roles)}), and each "
                "has its own system prompt (Role(name, system=...)); leave --system out"
            )
        check_tool_names(tools, made, env.name)
        warn_about(made)


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


def _dropped_rewards(environments: Sequence[Environment], rewards: Sequence[RewardTerm]) -> tuple[str, ...]:
    """A note if the chosen rewards replace those of an environment, because users usually want both."""
    if not rewards or any(term.function is None for term in rewards):
        return ()
    own = dict.fromkeys(each.name for env in environments for each in rewards_of(env.chosen.component))
    if not own:
        return ()
    named, left_out = ", ".join(term.alias for term in rewards), ", ".join(own)
    return (f"--reward {named} replaces the environment's own reward ({left_out}); to keep it, add --reward env:1",)


def _tools_of_demonstrations(environments: Sequence[Environment]) -> tuple[str, ...]:
    """A note for each environment whose tasks have tools of their own, which its demonstrations do not show."""
    return tuple(
        f"the demonstrations of {env.name} belong to no task, so they show the model the tools that its class marks "
        f"({', '.join(tool.name for tool in env.all_tools()) or 'none'}), not those of tools(task)"
        for env in environments
        if env.chooses_tools
    )


def _filters(chosen: Sequence[Chosen]) -> tuple[NamedFilter, ...]:
    """The user's filters, with the algorithm's own filters in place of the word `algorithm`."""
    filters: list[NamedFilter] = []
    for each in chosen:
        if each.ref is None and each.name == OWN:
            filters += [NamedFilter(function_label(own), own, {}) for own in bind_each(each.component, each.settings)]
        else:
            filters.append(NamedFilter(each.alias, each.component, each.settings))
    return tuple(filters)


def _models_of_runs(settings: Settings) -> tuple[Settings, tuple[str, ...]]:
    """The settings with the newest checkpoint in place of each folder of a run, and a note for each. Raises
    ConfigError, and ModelError for a critic or a teacher that is a path without a model.
    """
    given = {name: getattr(settings, name) for name in ("model", "critic", "teacher")}
    found = {name: find_checkpoint(folder) for name, folder in given.items() if is_of_run(folder)}
    notes = tuple(
        ("" if name == "model" else f"--{name} ")
        + f"{given[name]} is a run's folder: its newest checkpoint is used, {path.name}"
        for name, path in found.items()
    )
    for name in ("critic", "teacher"):
        if given[name] not in ("", "head") and name not in found:
            with said_of(f"--{name}"):
                resolve_model_name(given[name])
    changes: dict[str, Any] = {name: str(path) for name, path in found.items()}
    return dataclasses.replace(settings, **changes), notes


def _require_packages(inference: Chosen) -> None:
    """Raise MissingExtraError if the engine of an evaluation needs packages that are not installed: a tokenizer if it
    takes token ids, and torch if it runs in this process.
    """
    if not is_evaluation_only(inference.component):
        is_embedded = how_estimated(inference.component) == "embedded"
        require_packages(
            f"the engine {inference.name}",
            MODEL_PACKAGES if is_embedded else ("transformers",),
            otherwise="or evaluate a model behind a server, which needs no such package: "
            "--inference openai --inference.url URL",
        )


def _check_parser(parser: Chosen, inference: Chosen) -> None:
    """Raise ConfigError if a tool parser is chosen for an engine that takes messages."""
    if parser.component is not None and is_evaluation_only(inference.component):
        raise ConfigError(
            f"--tool-parser {parser.name}: with --inference {inference.name} the server reads the calls itself\n"
            "leave --tool-parser out"
        )


def _check_trainable(inference: Chosen, training: Chosen, resolved: Resolved) -> None:
    """Raise ConfigError if the engine is marked as only for evaluation, or if ranks would not find a component."""
    refuse_ranks(resolved, training)
    if is_evaluation_only(inference.component):
        raise ConfigError(
            f"--inference {inference.name}: it takes messages and returns no token ids with logprobs, so a run "
            "cannot train on its replies\ntype: --inference hf to train, or `rollouts eval` to evaluate with it"
        )


def config_text(resolved: Resolved, *, with_secrets: bool = False) -> str:
    """The content of config.toml: all settings but the folder and `resume`, so that running it again makes a new
    folder. Secrets are left out unless `with_secrets`, which is for this run's own ranks.
    """
    resolved = resolved._replace(settings=dataclasses.replace(resolved.settings, out="", resume="never"))
    return to_toml(resolved if with_secrets else resolved.without_secrets())


def _flattened(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flattened(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def _lr(settings: Settings) -> float:
    if settings.lr is not None:
        return settings.lr
    usual = LR_SFT if settings.mode == "sft" else LR_RL
    known = bundled(settings.model)
    full = usual if known is None else known.lr
    return full * LR_LORA_FACTOR if settings.lora_rank else full


def _critic_lr(settings: Settings) -> float:
    return settings.critic_lr if settings.critic_lr is not None else _lr(settings) * LR_CRITIC_FACTOR


def _check_settings(settings: Settings, lacks_environment: bool) -> None:
    """Raise ConfigError for settings that cannot work. An example is a system prompt that is the path of a file: the
    model would read the path.
    """
    if settings.mode == "sft+rl":
        raise ConfigError(
            "mode sft+rl is two runs, and each has a plan; rollouts.runs.sft_then_rl.phases() gives their settings"
        )
    if lacks_environment and not (settings.mode == "sft" and settings.data):
        raise ConfigError(
            "no environment was named; type --env calculator (`rollouts plugins list` shows what there is)"
        )
    if settings.mode == "eval" and not settings.eval_tasks:
        raise ConfigError("--eval-tasks 0: an evaluation needs tasks; leave it out, or give a number")
    system = settings.system
    with contextlib.suppress(OSError, ValueError):  # the text is too long for a path, or is not a path
        if system and Path(system).is_file():
            raise ConfigError(
                f"--system {system}: this is the text of a system prompt, and {system} is a file\n"
                f'type: --system "$(cat {shlex.quote(system)})"'
            )
