"""Turns a resolved configuration into a plan: finds and checks every component of a run, and composes them.

components.py chooses components, algorithms.py composes algorithms, environments.py composes environments. No model is
loaded. Every mistake that can be found before a model loads is raised here. An evaluation has a plan too, without the
parts of training. What was chosen and has no effect gets a note, with what would give it one: the run is as it was
asked. What is refused, because the run cannot be what was asked, is in `algorithms` and `training.algorithms.checks`.
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

from rollouts.config.convert import unflagged
from rollouts.config.merging import Component, component_tables
from rollouts.config.render import to_toml
from rollouts.config.resolving import Resolved
from rollouts.config.secrets import tree_without_secrets
from rollouts.config.settings import AUTO, EVAL, OWN, Settings, without_secrets
from rollouts.env.advice import warn_about
from rollouts.env.authoring import rewards_of, roles_of
from rollouts.env.checks import check_environment, reward_term
from rollouts.env.mixing import RewardTerm, env_term
from rollouts.env.toolsets import AddedTool
from rollouts.errors import ConfigError, EnvironmentDefinitionError, UserError, counted, said_of
from rollouts.inference.chatting import is_evaluation_only
from rollouts.loggers.base import plain_settings
from rollouts.models.estimates import how_estimated
from rollouts.models.loading import bundled, resolve_model_name
from rollouts.plugins.checks import run_check
from rollouts.plugins.index import ComponentRef
from rollouts.plugins.loading import MODEL_PACKAGES, require_packages
from rollouts.plugins.manager import PluginManager
from rollouts.runs.algorithms import Composed, asked_names, compose, from_step
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
from rollouts.runs.earlier_run import differing_notes, evaluated, find_checkpoint, flattened, is_of_run, run_of
from rollouts.runs.environments import PlannedEnvironment, held_out_tasks, plan_environments
from rollouts.runs.held_objects import manager_for, refuse_ranks, unread_notes, with_rows
from rollouts.runs.manifest import changed_code, code_files, is_older, naming_copies
from rollouts.runs.opponents import PlannedOpponent, plan_lora_roles, plan_opponents
from rollouts.runs.session import EngineSpec, model_words
from rollouts.runs.workers import Workers, refuse_env_of_rewards, with_sandboxes
from rollouts.training.algorithms import checks, corrections
from rollouts.training.algorithms.algorithm import Algorithm, Stage, active_terms, function_label, needs, requests
from rollouts.training.algorithms.checks import CRITIC_NAMES, TEACHER_NAMES
from rollouts.training.batches import AuxiliaryModels
from rollouts.training.rollout_gen.groups import NamedFilter
from rollouts.types import Task

if TYPE_CHECKING:
    from rollouts.chat.tool_parsers import ChosenParser

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
    environments: tuple[PlannedEnvironment, ...]
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
    def asked(self) -> frozenset[str]:
        """The inputs that the algorithms of all stages need from the run."""
        return frozenset(name for stage in self.schedule for name in asked_names(stage.algorithm))

    @property
    def evaluates(self) -> bool:
        """Whether held-out tasks are played."""
        return self.settings.eval_tasks > 0 and bool(self.environments)

    @property
    def plays(self) -> bool:
        """Whether any episode is played."""
        return self.settings.samples or self.evaluates

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
    def tool_parser(self) -> ChosenParser | None:
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
        flat: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(dict(flattened(tree_without_secrets(tree)))))
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

    @property
    def engine(self) -> EngineSpec:
        """What the run gives to its engines, without the training backend and the folder."""
        settings = self.settings
        sampling = settings.seed, settings.temperature, settings.concurrency
        return EngineSpec(settings.model, *sampling, settings.lora_rank, self.lora_roles)

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
    `may_be_absent`, torch may be missing: a training backend that needs it is `Chosen.is_absent`. The components
    of the keys `used_elsewhere` have an effect in another phase of the run. Raises a UserError that says what to type.
    """
    resolved = with_rows(resolved)
    settings, source, model = resolved.settings, resolved.source, resolved.settings.model
    _check_settings(settings, needs_environment and not resolved.components["env"])
    # 1. Every component is found, imported, and given its settings.
    is_evaluation = settings.mode == "eval"
    keys = [key for key in resolved.components if key in EVAL or not is_evaluation]
    manager = manager_for(resolved, keys)
    workers = Workers(resolved, manager)
    resolved = with_data(resolved, manager, workers)
    own = {key: resolved.components[key] for key in keys}
    with naming_copies(Path(source.path).parent if source.path else next(iter(settings.from_run), None)):
        chosen = choose(manager, own, source, workers=workers, may_be_absent=may_be_absent)
    _check_engine(chosen, resolved)
    # 2. The algorithm of each stage, and the models.
    if is_evaluation:
        settings, of_models = evaluated(settings, chosen["inference"][0])
        composed = Composed((), (), (), None, ())
    else:
        settings, of_models = _models_of_runs(settings)
        with_models = resolved._replace(settings=settings)
        composed = compose(manager, with_models, chosen, _critic_lr(settings), has_torch=not may_be_absent)
        settings = dataclasses.replace(settings, schedule=composed.schedule)
    # 3. The environments, with what the run gives to each of them, and the rewards.
    components = {**resolved.components, **completed(own, chosen)}
    run, unread = _run_of(model, is_evaluation=is_evaluation)
    shared = settings
    if is_evaluation and run is not None:  # several share the held-out tasks by their mean weights over that run
        shared = dataclasses.replace(settings, steps=run.settings.steps, mode="rl")
    environments = plan_environments(manager, components["env"], chosen["env"], shared, source)
    environments = _of_run(environments, chosen, settings)
    components["env"] = _with_curricula(components["env"], environments)
    filters = _filters(chosen["filter"]) if settings.mode == "rl" else ()
    rewards = reward_terms(components["reward"], chosen["reward"])
    resolved = resolved._replace(settings=settings, components=components)
    refuse_env_of_rewards(environments, rewards)
    judges = needs_environment and (settings.mode == "rl" or settings.eval_tasks > 0)
    demonstrates = settings.mode == "sft" and not takes_rows(settings.mode, chosen)
    _check_environments(environments, chosen["tool"], rewards if judges else None, demonstrates=demonstrates)
    # 4. Notes.
    notes = [*of_models, *composed.notes, *unread, *_notes_of_run(run, resolved, chosen)]
    notes += [*_dropped_rewards(environments, rewards), *unread_notes(resolved)]
    notes += [_tools_shown(env) for env in environments if demonstrates and env.chooses_tools]
    plan = Plan(
        resolved,
        chosen,
        environments,
        rewards,
        filters,
        composed.stages,
        composed.stages_chosen,
        composed.auxiliary_models,
        tuple(notes),
        manager,
        None if is_evaluation else chosen_optimizer(chosen),
        plan_opponents(manager, settings, environments, source),
        plan_lora_roles(settings, chosen, environments),
    )
    _run_checks(plan, may_be_absent)
    return plan._replace(notes=(*notes, *_unused(plan, (*used_elsewhere, *(() if needs_environment else _OF_TALKS)))))


def _notes_of_run(run: Resolved | None, resolved: Resolved, chosen: Mapping[str, list[Chosen]]) -> list[str]:
    """Notes about the run that wrote the model: settings that differ, and for an evaluation, files that changed."""
    if run is None:
        return []
    notes = list(differing_notes(run, resolved))
    if resolved.settings.mode == "eval":
        used = [each.ref for each in (*chosen["env"], *chosen["reward"]) if each.ref is not None]
        notes += changed_code(Path(run.source.path).parent, code_files(used, resolved.source))
    return notes


def _run_of(model: str, *, is_evaluation: bool) -> tuple[Resolved | None, list[str]]:
    """The run that wrote the model, or a note if its settings cannot be read. Raises ConfigError if an evaluation
    cannot read them.
    """
    try:
        return run_of(model), []
    except ConfigError as error:
        if is_evaluation:
            raise
        return None, [f"--model {model}: the settings of its run cannot be read: {error}"]


def _run_checks(plan: Plan, may_be_absent: bool) -> None:
    """Let the backends and the rewards check their settings. Raises ConfigError, and MissingExtraError for an
    evaluation without the packages of its engine.
    """
    check_pinned(plan.chosen.get("eval_inference", ()), plan.settings)
    if plan.settings.mode == "eval" and not may_be_absent and not plan.is_chat:
        engine = plan.one("inference")
        require_packages(  # a tokenizer for token ids, and torch for an engine of this process
            f"the engine {engine.name}",
            MODEL_PACKAGES if how_estimated(engine.component) == "embedded" else ("transformers",),
            otherwise="or evaluate a model behind a server, which needs no such package: "
            "--inference openai --inference.url URL",
        )
    if plan.settings.mode != "eval":
        training = plan.one("training")
        run_check(training.component, plan.training_arguments(), training.settings)
    for inference in (plan.one("inference"), *plan.chosen.get("eval_inference", ())):
        run_check(inference.component, plan.engine._asdict(), inference.settings)
    for reward in plan.chosen["reward"]:
        if reward.component is not None:  # not the environment's own rewards
            run_check(reward.component, {}, reward.settings)


def _of_run(
    environments: Sequence[PlannedEnvironment], chosen: Mapping[str, list[Chosen]], settings: Settings
) -> tuple[PlannedEnvironment, ...]:
    """The environments with what the run gives to each of them. Raises UserError."""
    keeps_all = bool(settings.out) and is_older(Path(settings.out))  # what it evaluates is never trained
    text_only, tools = not is_evaluation_only(chosen["inference"][0].component), added_tools(chosen["tool"])
    return tuple(
        env._replace(text_only=text_only, trains=env.trains and not keeps_all, tools=tools)
        for env in with_sandboxes(chosen["sandbox"][0], environments, settings.concurrency)
    )


def _with_curricula(components: Sequence[Component], environments: Sequence[PlannedEnvironment]) -> list[Component]:
    """The chosen environments with every setting of their curricula."""
    return [
        each._replace(weight={"name": env.curriculum.name, **env.curriculum.settings}) if env.curriculum else each
        for each, env in zip(components, environments, strict=True)
    ]


def _check_environments(
    environments: Sequence[PlannedEnvironment],
    tools: Sequence[Chosen],
    rewards: Sequence[RewardTerm] | None,
    *,
    demonstrates: bool,
) -> None:
    """Raise EnvironmentDefinitionError for the first mistake of an environment, and ConfigError if an added tool has
    the name of one of its own. `rewards` None: nothing is judged.
    """
    for env in environments:
        made = env.make_checked()
        if demonstrates:
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


def _dropped_rewards(environments: Sequence[PlannedEnvironment], rewards: Sequence[RewardTerm]) -> tuple[str, ...]:
    """A note if the chosen rewards replace those of an environment, because users usually want both."""
    if not rewards or any(term.function is None for term in rewards):
        return ()
    own = dict.fromkeys(each.name for env in environments for each in rewards_of(env.chosen.component))
    if not own:
        return ()
    named, left_out = ", ".join(term.alias for term in rewards), ", ".join(own)
    return (f"--reward {named} replaces the environment's own reward ({left_out}); to keep it, add --reward env:1",)


def _tools_shown(environment: PlannedEnvironment) -> str:
    tools = ", ".join(tool.name for tool in environment.all_tools()) or "none"
    return (
        f"the demonstrations of {environment.name} belong to no task, so they show the model the tools that its class "
        f"marks ({tools}), not those of tools(task)"
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
    notes, changes = [], dict[str, Any]()
    for name in ("model", "critic", "teacher"):
        given: str = getattr(settings, name)
        if is_of_run(given):
            path = find_checkpoint(given)
            changes[name], flag = str(path), "" if name == "model" else f"--{name} "
            notes.append(f"{flag}{given} is a run's folder: its newest checkpoint is used, {path.name}")
        elif name != "model" and given not in ("", "head"):
            with said_of(f"--{name}"):
                resolve_model_name(given)
    return dataclasses.replace(settings, **changes), tuple(notes)


def _check_engine(chosen: Mapping[str, list[Chosen]], resolved: Resolved) -> None:
    """Raise ConfigError if the engine takes messages, and the run trains or has a tool parser; or if ranks would not
    find a component.
    """
    (inference,), (parser,) = chosen["inference"], chosen["tool_parser"]
    takes_messages = is_evaluation_only(inference.component)
    if parser.component is not None and takes_messages:
        raise ConfigError(
            f"--tool-parser {parser.name}: with --inference {inference.name} the server reads the calls itself\n"
            "leave --tool-parser out"
        )
    if resolved.settings.mode == "eval":
        return
    refuse_ranks(resolved, chosen["training"][0])
    if takes_messages:
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


# --- what was chosen and has no effect ------------------------------------------------------------------------------
# The tables have a rule for every key that names components: it says why nothing uses such a component, or "". A key
# without a rule fails in every run, so that a new key gets one.


def _unused(plan: Plan, used_elsewhere: Sequence[str] = ()) -> list[str]:
    """A note for each component and setting that was given and has no effect. `used_elsewhere` are keys whose
    components another phase of the run uses.
    """
    notes = [
        f"--{key.replace('_', '-')} {each.name} is not used: {why}"
        for key, several in plan.chosen.items()
        if key not in used_elsewhere and key not in _OF_STAGE
        for each in several
        if _is_named(key, each) and (why := _OF_RUN[key](plan, each))
    ]
    before: Mapping[str, list[Chosen]] = {}
    stages = zip(plan.schedule, (plan.chosen, *plan.stages_chosen), strict=True) if plan.schedule else ()
    for stage, parts in stages:
        place = f"{from_step(stage.step)}: " if stage.step else ""
        notes += [
            f"{place}--{key} {each.name} is not used: {why}"
            for key, rule in _OF_STAGE.items()
            for each in parts[key]
            if _is_named(key, each) and (why := rule(plan, stage.algorithm))
        ]
        if before and all(_same(parts[key], before[key]) for key in _OF_STAGE):
            notes.append(f"{place}it changes nothing; write other settings, or leave it out")
        before = parts
    return [*notes, *_unused_settings(plan), *_dropping_all(plan)]


def _is_named(key: str, component: Chosen) -> bool:
    """Whether the user chose it: it is neither a default nor a part of the algorithm."""
    is_default = component.name in ("", OWN, AUTO, getattr(Settings, key))
    return component.component is not None and not is_default


def _same(ours: Sequence[Chosen], theirs: Sequence[Chosen]) -> bool:
    return [(e.name, e.alias, e.settings) for e in ours] == [(e.name, e.alias, e.settings) for e in theirs]


# --- components of the whole run ------------------------------------------------------------------------------------


def _if_played(plan: Plan, component: Chosen) -> str:
    how = "type --eval-tasks 64 to evaluate" if plan.environments else "name an --env"
    return "" if plan.plays or plan.settings.from_run else f"no episode is played; {how}"


def _env(plan: Plan, component: Chosen) -> str:
    if not plan.plays and takes_rows(plan.settings.mode, plan.chosen):
        return "the conversations are those of --data, and nothing is evaluated; type --eval-tasks 64 to evaluate"
    share = next(env.share for env in plan.environments if env.alias == component.alias)
    return "" if share else f"its weight is 0 in all steps; type --env {component.alias}={component.name}:1"


def _tool(plan: Plan, component: Chosen) -> str:
    is_demonstrated = plan.settings.mode == "sft" and not takes_rows(plan.settings.mode, plan.chosen)
    return "" if is_demonstrated else _if_played(plan, component)


def _tool_parser(plan: Plan, component: Chosen) -> str:
    offers = any(e.all_tools() or e.chooses_tools or hasattr(e.make_checked(), "rollout") for e in plan.environments)
    is_used = plan.settings.mode == "sft" or offers or not plan.environments
    return "" if is_used else "no environment has a tool; type --tool NAME to add one"


def _sandbox(plan: Plan, component: Chosen) -> str:
    is_used = any(env.sandboxes is not None for env in plan.environments)
    return "" if is_used else "no environment asks for one with `def setup(self, task, sandbox)`"


def _reward(plan: Plan, component: Chosen) -> str:
    if not plan.settings.from_run:
        return _if_played(plan, component)
    with contextlib.suppress(UserError):  # reading its trajectories reports it
        theirs = run_of(plan.settings.from_run[0])
        if theirs is None or component.name in {each.name for each in theirs.components["reward"]}:
            return ""
    again = f"to judge again: rollouts rescore {plan.settings.from_run[0]} --reward ..."
    evaluates = ", and only evaluations ask it" if plan.evaluates else ""
    return f"--from trains on the rewards that were saved{evaluates}; {again}"


def _sampler(plan: Plan, component: Chosen) -> str:
    return "" if plan.settings.samples else "it chooses tasks to sample, and this run samples none; leave it out"


def _reference(plan: Plan, component: Chosen) -> str:
    return "" if "ref_logprobs" in plan.asked else "nothing names `ref_logprobs`; --kl rk3_loss would"


def _dropping_all(plan: Plan) -> Iterator[str]:
    """A warning for each filter that drops every group, because groups have one rollout."""
    for each in plan.filters if plan.settings.samples and plan.settings.samples_per_prompt == 1 else ():
        if checks.drops_groups_of_one(each.function, each.settings):
            yield (
                f"warning: the filter {each.name} drops every group of one rollout, so nothing is trained; type "
                "--samples-per-prompt 8, or --filter none"
            )


def _eval_inference(plan: Plan, component: Chosen) -> str:
    lacks = "--eval-every 10" if not plan.settings.eval_every else "" if plan.evaluates else "--eval-tasks 64"
    return f"it is for evaluations between steps; type {lacks}" if lacks else ""


def _always(*_: object) -> str:
    return ""


_OF_RUN: Mapping[str, Callable[[Plan, Chosen], str]] = {
    "env": _env,
    "tool": _tool,
    "tool_parser": _tool_parser,
    "sandbox": _sandbox,
    "reward": _reward,
    "sampler": _sampler,
    "reference": _reference,
    "inference": _if_played,
    "eval_inference": _eval_inference,
    **dict.fromkeys(("data", "filter", "training", "optimizer", "logger"), _always),
}

# --- components of one stage ----------------------------------------------------------------------------------------


def _uses_advantages(algorithm: Algorithm) -> bool:
    return algorithm.pairs is None and bool({"advantages", "returns"} & needs(algorithm))


def _if_rewarded(plan: Plan, algorithm: Algorithm) -> str:
    """Whether the rewards decide on anything after they are mixed and shaped."""
    of_advantage = {"rewards", "turn_rewards"} & set(requests(algorithm.advantage, "advantages"))
    reads = plan.filters or algorithm.select or algorithm.pairs or "rewards" in needs(algorithm)
    is_used = reads or (_uses_advantages(algorithm) and of_advantage)
    return "" if is_used else "nothing that is trained depends on the rewards"


def _advantage(plan: Plan, algorithm: Algorithm) -> str:
    if algorithm.pairs is not None:
        return "pairs are compared"
    names = " + ".join(function_label(term.function) for term in active_terms(algorithm))
    return "" if _uses_advantages(algorithm) else f"the loss {names} names neither `advantages` nor `returns`"


def _kl(plan: Plan, algorithm: Algorithm) -> str:
    is_used = any(stage.algorithm.kl is not None for stage in plan.schedule)  # a later stage may turn it off
    return "" if is_used else "its coefficient is 0; type --kl.coef 0.01"


def _correction(plan: Plan, algorithm: Algorithm) -> str:
    if not checks.is_weighed(algorithm):
        return "the loss has no value a token that it would weigh"
    settings, inference = plan.settings, plan.one("inference")
    is_own = corrections.samples_current_weights(settings) and how_estimated(inference.component) == "embedded"
    if is_own and checks.keeps_own_tokens(algorithm.correction):
        return f"{inference.name} samples with the weights that are trained, so every token has the weight 1"
    return ""


_OF_STAGE: Mapping[str, Callable[[Plan, Algorithm], str]] = {
    "advantage": _advantage,
    "kl": _kl,
    "correction": _correction,
    "mix": _if_rewarded,
    "shaping": _if_rewarded,
    **dict.fromkeys(("loss", "aggregation", "select", "pairs"), _always),  # pairs: refused if the loss compares none
}

# --- settings -------------------------------------------------------------------------------------------------------


def _unused_settings(plan: Plan) -> Iterator[str]:
    """Notes about settings without the component that they belong to."""
    settings, asked, critic = plan.settings, plan.asked, plan.settings.critic
    if len(plan.environments) == 1 and (plan.environments[0].curriculum or plan.environments[0].weight != 1.0):
        yield f"--env {plan.environments[0].name}: its weight is not used, because it is the only environment"
    if settings.mode == "eval":
        return
    of_backend = unflagged(plan.chosen["training"][0].settings)
    has_lora, alpha = bool(settings.lora_rank), of_backend.get("lora_alpha")
    lacks_lora = "every weight is trained; type --lora-rank 16"
    of_critic = "nothing names `values`, `old_values` or `returns`; --loss ppo would"
    of_teacher = "nothing names `teacher_logprobs` or `teacher_topk_logprobs`; --loss opd or --loss opd_topk would"
    of_filter = "there is no filter; type --filter nonzero_std"
    top_k = settings.teacher_top_k if settings.teacher_top_k != Settings.teacher_top_k else 0
    has_k = asked & (TEACHER_NAMES - {"teacher_logprobs"})
    has_tasks, targets = bool(plan.environments), of_backend.get("lora_targets", "all-linear")
    table = (  # what was typed, whether it was, whether it is used, and why it is not
        ("eval-tasks", settings.eval_tasks, has_tasks, "conversations alone have no tasks; name an --env"),
        ("critic", critic, asked & CRITIC_NAMES, of_critic),
        ("teacher", settings.teacher, asked & TEACHER_NAMES, of_teacher),
        ("critic-lr", settings.critic_lr, critic, "there is no critic"),
        ("teacher-top-k", top_k, has_k, "nothing names `topk_logprobs`; --loss opd_topk would"),
        ("refill", settings.refill, plan.filters, of_filter),
        ("training.lora-alpha", alpha not in (None, "none"), has_lora, lacks_lora),
        ("training.lora-targets", targets != "all-linear", has_lora, lacks_lora),
    )
    for flag, was_typed, is_used, why in table:
        if was_typed and not is_used:
            value = f" {was_typed}" if not isinstance(was_typed, bool) else ""
            yield f"--{flag}{value} is not used: {why}"
    if (
        critic not in ("", "head")
        and asked & CRITIC_NAMES
        and not any(_uses_values(s.algorithm) for s in plan.schedule)
    ):
        yield f"--critic {critic} is trained, and nothing uses its values; type --advantage gae"


def _uses_values(algorithm: Algorithm) -> bool:
    """Whether the policy depends on what the critic predicts: by an advantage, or by a term of the policy."""
    readers = [set(requests(term.function)) for term in active_terms(algorithm)]
    readers = [names for names in readers if {"logprobs", "advantages"} & names]
    readers += [set(requests(algorithm.advantage, "advantages"))] if _uses_advantages(algorithm) else []
    return any({"values", "old_values"} & names for names in readers)
