"""A resolved configuration becomes a plan: every component of a run found, checked and put in its place.

How components are chosen is in components.py, what is made of those of the algorithm in algorithms.py, and of
environments in environments.py. Nothing heavy is loaded: a `Plan` needs no model. Every mistake that can be seen before
a model loads is raised here. An evaluation has a plan too, in which nothing of training is composed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rollouts.config.convert import plain
from rollouts.config.files import load_file
from rollouts.config.merging import Component, component_tables
from rollouts.config.render import to_toml
from rollouts.config.resolving import HOLDING_OUT, Resolved, resolve, run_settings_file
from rollouts.config.secrets import components_without_secrets, leaves_out, tree_without_secrets
from rollouts.config.settings import EVAL, OWN, Settings, without_secrets
from rollouts.env.advice import warn_about
from rollouts.env.authoring import rewards_of
from rollouts.env.checks import check_environment, reward_term
from rollouts.env.mixing import RewardTerm, env_term
from rollouts.errors import ConfigError, EnvironmentDefinitionError, UserError, said_of
from rollouts.inference.chatting import is_evaluation_only
from rollouts.loggers.base import plain_settings
from rollouts.plugins.checks import run_check
from rollouts.plugins.index import ComponentRef
from rollouts.plugins.manager import PluginManager
from rollouts.plugins.signature import check_signature
from rollouts.runs.algorithms import Composed, compose
from rollouts.runs.components import Chosen, bind_each, choose, completed
from rollouts.runs.environments import Environment, held_out_tasks, plan_environments, task_identity
from rollouts.runs.manifest import changed_code, code_files, is_older
from rollouts.training.algorithms.algorithm import Algorithm, Stage, function_label, needs
from rollouts.training.models import bundled, resolve_model_name
from rollouts.training.rollout_gen.groups import Filter
from rollouts.training.types import AuxiliaryModels, TrainingBackend
from rollouts.types import Task

# Default learning rates of models that are neither bundled nor descend from such a one: larger ones break them.
LR_RL = 1e-6
LR_SFT = 1e-5
LR_LORA_FACTOR = 10.0
LR_CRITIC_FACTOR = 10.0


class Plan(NamedTuple):
    """A composed run: functions and settings, no model yet. `resolved` is complete, so that writing it repeats the run.

    An evaluation has no filters, no schedule and no auxiliary models. Of a training run `schedule` holds every stage,
    the first included; `stages_chosen` are the components of each later stage, as `chosen` are of the whole run;
    `auxiliary_models` are reference, critic and teacher (None: none). `notes` are for the user who starts the run.
    """

    resolved: Resolved
    chosen: dict[str, list[Chosen]]
    environments: tuple[Environment, ...]
    rewards: tuple[RewardTerm, ...]
    filters: tuple[Filter, ...]
    schedule: tuple[Stage, ...]
    stages_chosen: tuple[dict[str, list[Chosen]], ...]
    auxiliary_models: AuxiliaryModels | None
    notes: tuple[str, ...]
    manager: PluginManager

    @property
    def settings(self) -> Settings:
        """The core's settings."""
        return self.resolved.settings

    @property
    def lr(self) -> float:
        """The learning rate: the setting, or what suits the model where none is given."""
        return _lr(self.settings)

    @property
    def critic_lr(self) -> float:
        """The same of the critic."""
        return _critic_lr(self.settings)

    @property
    def algorithm(self) -> Algorithm:
        """The one that the run begins with."""
        return self.schedule[0].algorithm

    @property
    def algorithms(self) -> dict[str, Algorithm]:
        """Those of all stages, by the name that batches carry."""
        return {stage.name: stage.algorithm for stage in self.schedule}

    @property
    def needs(self) -> list[str]:
        """What the losses of all stages ask for; without the names of a correction that may not be used."""
        return sorted({name for stage in self.schedule for name in needs(stage.inside().algorithm)})

    @property
    def is_chat(self) -> bool:
        """Whether the engine takes messages, so that no tokenizer is needed: an evaluation's may."""
        return is_evaluation_only(self.one("inference").component)

    @property
    def references(self) -> list[ComponentRef]:
        """Every component of the run, those of later stages too; each once, in the order of the settings."""
        parts = [self.chosen, *self.stages_chosen]
        found = [each.ref for chosen in parts for several in chosen.values() for each in several]
        found += [env.curriculum.ref for env in self.environments if env.curriculum is not None]
        return list(dict.fromkeys(ref for ref in found if ref is not None))

    @property
    def config(self) -> str:
        """What config.toml holds."""
        return config_text(self.resolved)

    @property
    def config_of_ranks(self) -> str:
        """The same with secrets: what this run's own ranks get."""
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
        """Every setting of the run, components' ones too, by its dotted name: plain data, as JSON has it, for its
        checkpoints. The learning rates are those that hold, also where none is given.
        """
        tree: dict[str, Any] = plain_settings(self.settings) | {"lr": self.lr}
        if self.settings.critic:
            tree["critic_lr"] = self.critic_lr
        for name in ("out", "resume"):
            del tree[name]
        tree |= plain_settings(component_tables(self.resolved.components))
        flat: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(dict(_flattened(tree_without_secrets(tree)))))
        return flat

    @property
    def env_name(self) -> str:
        """The environment's name, or the aliases of several, for a title."""
        return " + ".join(env.alias or env.name for env in self.environments)

    def one(self, key: str) -> Chosen:
        """The component of a kind of which there is exactly one."""
        (chosen,) = self.chosen[key]
        return chosen

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
            "auxiliary_models": self.auxiliary_models,
            "companions": self.auxiliary_models,
        }

    def inference_arguments(self, training: TrainingBackend | None, folder: str) -> dict[str, Any]:
        """What an engine may ask for; `training` is None where there is no trained model (yet)."""
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

    def eval_tasks(self) -> list[Task]:
        """The held-out tasks, drawn before any training task; the system prompt is in them. Several environments have
        their shares of them. Raises EnvironmentDefinitionError where an evaluation would have none.
        """
        tasks = held_out_tasks(self.environments, self.settings.eval_tasks)
        if not tasks and self.settings.mode == "eval":
            raise EnvironmentDefinitionError(
                f"{self.env_name} gave no held-out task: tasks('eval', rng) has to yield at least one Task"
            )
        return tasks


def make_plan(resolved: Resolved, *, needs_environment: bool = True) -> Plan:
    """Find, import and check every component. Only a conversation with a model needs no environment. Raises UserError
    of one kind or another, with what to type.
    """
    settings, source = resolved.settings, resolved.source
    _check_settings(settings, needs_environment and not resolved.components["env"])
    is_evaluation = settings.mode == "eval"
    manager = PluginManager()
    resolved = _with_data(resolved, manager)
    own = {key: each for key, each in resolved.components.items() if key in EVAL or not is_evaluation}
    chosen = choose(manager, own, source)
    (inference,) = chosen["inference"]
    if is_evaluation:
        settings, notes = _evaluated(settings, inference)
        composed = Composed((), (), (), None, notes)
    else:
        _check_trainable(inference)
        settings, notes = _models_of_runs(settings)
        composed = compose(manager, resolved._replace(settings=settings), chosen, _critic_lr(settings))
        settings = dataclasses.replace(settings, schedule=composed.schedule)
    components = {**resolved.components, **completed(own, chosen)}
    run = _run_of(resolved.settings.model) if is_evaluation else None
    # Several environments share the held-out tasks by their mean weights over the steps of the run.
    shared = settings if run is None else dataclasses.replace(settings, steps=run.settings.steps, mode="rl")
    environments = plan_environments(manager, components["env"], chosen["env"], shared, source)
    is_chat = is_evaluation_only(inference.component)
    keeps_all = bool(settings.out) and is_older(Path(settings.out))  # what it evaluates is never trained
    environments = tuple(
        env._replace(text_only=not is_chat, trains=env.trains and not keeps_all) for env in environments
    )
    filters = _filters(chosen["filter"]) if settings.mode == "rl" else ()
    unused = _unused(resolved, filters)
    resolved = resolved._replace(settings=settings, components=components)
    notes = composed.notes if is_evaluation else (*notes, *composed.notes, *unused)
    if run is not None:
        notes += _held_out_notes(manager, run, environments, resolved)
        used = [each.ref for each in (*chosen["env"], *chosen["reward"]) if each.ref is not None]
        notes += tuple(changed_code(Path(run.source.path).parent, code_files(used)))
    rewards = _reward_terms(components["reward"], chosen["reward"])
    notes += _dropped_rewards(environments, rewards)
    judges = needs_environment and (settings.mode == "rl" or settings.eval_tasks > 0)
    for env in environments:
        made = env.make_checked()
        if settings.mode == "sft":
            env.require_demonstrations(made)
        check_environment(made, rewards if judges else None)
        warn_about(made)
    components["env"] = [
        each._replace(weight={"name": env.curriculum.name, **env.curriculum.settings}) if env.curriculum else each
        for each, env in zip(components["env"], environments, strict=True)
    ]
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
    )
    if not is_evaluation:
        training = plan.one("training")
        run_check(training.component, plan.training_arguments(), training.settings)
    run_check(inference.component, plan.inference_arguments(None, ""), inference.settings)
    return plan


def _reward_terms(components: Sequence[Component], chosen: Sequence[Chosen]) -> tuple[RewardTerm, ...]:
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
    """A note where the named rewards replace those of an environment; usually a user wants both."""
    if not rewards or any(term.function is None for term in rewards):
        return ()
    own = dict.fromkeys(each.name for env in environments for each in rewards_of(env.chosen.component))
    if not own:
        return ()
    named, left_out = ", ".join(term.alias for term in rewards), ", ".join(own)
    return (f"--reward {named} replaces the environment's own reward ({left_out}); to keep it, add --reward env:1",)


def _filters(chosen: Sequence[Chosen]) -> tuple[Filter, ...]:
    """The user's filters, with the algorithm's own in the place of the word for them."""
    filters: list[Filter] = []
    for each in chosen:
        if each.ref is None and each.name == OWN:
            filters += [Filter(function_label(own), own, {}) for own in bind_each(each.component, each.settings)]
        else:
            filters.append(Filter(each.alias, each.component, each.settings))
    return tuple(filters)


def _models_of_runs(settings: Settings) -> tuple[Settings, tuple[str, ...]]:
    """The settings with the newest checkpoint in place of each folder of a run, and a note for each. Raises
    ConfigError, and ModelError for a critic or a teacher that is a path without a model.
    """
    from rollouts.runs.export import find_checkpoint, is_of_run

    given = {name: getattr(settings, name) for name in ("model", "critic", "teacher")}
    found = {name: find_checkpoint(folder) for name, folder in given.items() if is_of_run(folder)}
    notes = tuple(
        f"--{name} {given[name]} is a run's folder: its newest checkpoint is used, {path.name}"
        for name, path in found.items()
    )
    for name in ("critic", "teacher"):
        if given[name] not in ("", "head"):
            with said_of(f"--{name}"):
                resolve_model_name(given[name])
    changes: dict[str, Any] = {name: str(path) for name, path in found.items()}
    return dataclasses.replace(settings, **changes), notes


def _check_trainable(inference: Chosen) -> None:
    """Refuse an engine that is good for evaluation only, where that can be seen already. Raises ConfigError."""
    if is_evaluation_only(inference.component):
        raise ConfigError(
            f"--inference {inference.name}: it takes messages and returns no token ids with logprobs, so a run "
            "cannot train on its replies\ntype: --inference hf to train, or `rollouts eval` to evaluate with it"
        )


def config_text(resolved: Resolved, *, with_secrets: bool = False) -> str:
    """What config.toml holds: everything but the folder and `resume`, so that running it again writes to a new one.
    Secrets are left out, but for what goes to this run's own ranks.
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


def _unused(resolved: Resolved, filters: Sequence[Filter]) -> list[str]:
    """What was given for LoRA or for filters in a training run that has none, in words."""
    settings, notes = resolved.settings, []
    if not settings.lora_rank:
        of_lora = {"lora_alpha": (None, "none"), "lora_targets": ("all-linear",)}
        settings_of_backend = plain(resolved.components["training"][0].settings)
        given = [n for n, defaults in of_lora.items() if settings_of_backend.get(n, defaults[0]) not in defaults]
        notes = [
            f"--training.{name.replace('_', '-')} is not used: every weight is trained; type --lora-rank 16"
            for name in given
        ]
    if settings.refill and not filters:
        notes.append(f"--refill {settings.refill} is not used: there is no filter; type --filter nonzero_std")
    return notes


def _check_settings(settings: Settings, lacks_environment: bool) -> None:
    """Raise ConfigError for settings of which no plan can be made. A system prompt that is the path of a file is one:
    the model would read the path.
    """
    if settings.mode == "sft+rl":
        raise ConfigError(
            "mode sft+rl is two runs, and each has a plan; rollouts.runs.sft_then_rl.phases() gives their settings"
        )
    if lacks_environment:
        raise ConfigError(
            "no environment was named; type --env calculator (`rollouts plugins list` shows what there is)"
        )
    if settings.mode == "eval" and not settings.eval_tasks:
        raise ConfigError("--eval-tasks 0: an evaluation needs tasks; leave it out, or give a number")
    system = settings.system
    with contextlib.suppress(OSError, ValueError):  # a text that is too long for a path, or no path at all
        if system and Path(system).is_file():
            raise ConfigError(
                f"--system {system}: this is the text of a system prompt, and {system} is a file\n"
                f'type: --system "$(cat {shlex.quote(system)})"'
            )


def _with_data(resolved: Resolved, manager: PluginManager) -> Resolved:
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


def _evaluated(settings: Settings, inference: Chosen) -> tuple[Settings, tuple[str, ...]]:
    """The settings of an evaluation with the checkpoint that is meant, and notes about what will be evaluated. Raises
    ConfigError.
    """
    if is_evaluation_only(inference.component):  # the name of the model is the server's business
        if settings.template:
            name = next(iter(settings.template))
            raise ConfigError(
                f"--template.{name.replace('_', '-')}: with --inference {inference.name} the server applies "
                "the chat template, not rollouts; vLLM and SGLang take the argument in the request: "
                f"--inference.body '{{chat_template_kwargs = {{{name} = ...}}}}'"
            )
        return settings, ()
    given = settings.model
    path = Path(given).expanduser()
    if not path.is_dir():  # a name, whose meaning is the engine's business
        return settings, _check_served(given, given, inference, of_run=False)
    from rollouts.runs.export import find_checkpoint
    from rollouts.training.weights.store import STATE, check_folder

    found = find_checkpoint(given)
    if (found / STATE).exists():
        check_folder(str(found))
    model = given if found == path else str(found)
    notes = [] if found == path else [f"--model {given} is a run's folder: its newest checkpoint is used, {found.name}"]
    served = _check_served(given, model, inference, of_run=found != path or is_written_by_run(path))
    return dataclasses.replace(settings, model=model), (*notes, *served)


def _check_served(given: str, model: str, inference: Chosen, *, of_run: bool) -> tuple[str, ...]:
    """Check that the numbers will be of --model, and note what cannot be checked. An evaluation sends no weights, so a
    server at a URL speaks with what it loaded when it was started. The user has to say that this is what a run wrote.

    Raises ConfigError.
    """
    url, name = inference.settings.get("url"), inference.settings.get("served_model")
    if not url or name is None:
        return ()
    if name:
        place = url if isinstance(url, str) else ",".join(url)
        return (f"what is evaluated is what {place} serves as {name!r}; that this is {model} is not checked",)
    if not of_run:
        return ()
    raise ConfigError(
        f"--model {given} with --inference.url: an evaluation sends no weights to a running server, so "
        "the results would be those of the model that the server has loaded. Leave --inference.url out, and a server "
        f"is started with {given}; or export it (`rollouts export {shlex.quote(given)} FOLDER`), start the server with "
        "the exported folder, and type --inference.served-model NAME with the server's name for the model"
    )


def is_written_by_run(folder: Path) -> bool:
    """Whether this is a checkpoint or an adapter, and no model that a server would have been started with."""
    from rollouts.training.models import is_adapter
    from rollouts.training.weights.store import STATE

    return (folder / STATE).exists() or is_adapter(folder)


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
    resolved: Resolved,
) -> tuple[str, ...]:
    """What the tasks have that the run may have been trained on, in words; nothing where it held them all out, or where
    it never saw these environments.
    """
    trained_in = {component.name for component in run.components["env"]}
    own = [env for env in environments if env.name in trained_in]
    here, there = ({name: getattr(each, name) for name in HOLDING_OUT} for each in (resolved.settings, run.settings))
    differing = [
        f"{name} is {here[name]} and was {there[name]} in the run" for name in HOLDING_OUT if here[name] != there[name]
    ]
    components = resolved.components["env"]
    try:
        run = _with_data(run, manager)
        theirs_given = run.components["env"]
        if components_without_secrets(components) == components_without_secrets(theirs_given):
            theirs_given = list(components)  # the same, with the secrets that are left out of the run's file
        else:
            differing.append("the environment or its settings are not those of the run")
        if not own or not differing:
            return ()
        if leaves_out([each.settings for each in theirs_given]):
            raise ConfigError(f"{run.source.path} leaves out a secret of the environment")
        chosen = choose(manager, {"env": theirs_given}, run.source)["env"]
        theirs = plan_environments(manager, theirs_given, chosen, run.settings, run.source)
        held_out = {task_identity(task) for task in held_out_tasks(theirs, run.settings.eval_tasks)}
        aliases = {env.alias for env in own}
        asked = [task for task in held_out_tasks(environments, resolved.settings.eval_tasks) if task.env in aliases]
    except UserError as error:
        return (f"which of these tasks the run held out is not known: {error}",)
    unseen = sum(task_identity(task) in held_out for task in asked)
    words = f": it held out {unseen} of these {len(asked)} tasks, and may have trained on the others"
    return ("; ".join(differing) + (words if unseen < len(asked) else ""),)
