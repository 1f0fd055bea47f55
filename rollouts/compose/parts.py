"""The stateful parts of a run, built from its plan: the model and its trainer, the engine, the folder, the loggers.

Left out: what is done with them (`launch`).
"""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any, NamedTuple

import trio

from rollouts.agent import Episode, EpisodeLimits, run_episode
from rollouts.author_code import authors_code
from rollouts.chat.format import ChatFormat, load_chat_format
from rollouts.compose.evaluation_plan import EvaluationPlan
from rollouts.compose.plan import Plan
from rollouts.compose.watch import Watcher
from rollouts.config import to_toml
from rollouts.config.secrets import resolved_without_secrets, without_secrets
from rollouts.config.settings import COMPONENT_KINDS, EVAL
from rollouts.env.authoring import tools_of
from rollouts.errors import ConfigError, ModelError, RolloutsError, RunError, named
from rollouts.inference.base import CanCheck, InferenceBackend
from rollouts.loggers.base import MetricsLogger, plain_settings
from rollouts.plugins.manager import PluginFault
from rollouts.plugins.signature import call_with
from rollouts.run_folder import RunFolder
from rollouts.training.models import load_tokenizer
from rollouts.training.rollout_gen.episodes import Job, Play
from rollouts.training.rollout_gen.group_rewards import GroupScorer
from rollouts.training.types import RankServer, TrainingBackend
from rollouts.types import Task

__all__ = [
    "Loggers",
    "Parts",
    "how_to_play",
    "load_chat",
    "make_inference",
    "make_loggers",
    "make_training",
    "plain_plan",
    "repeatable",
]


class Parts(NamedTuple):
    """The stateful parts of a run, and how an episode is played with them."""

    plan: Plan
    chat: ChatFormat
    backend: TrainingBackend
    inference: InferenceBackend
    folder: RunFolder
    logger: Loggers
    watcher: Watcher
    held_out: list[Task]
    score_group: GroupScorer | None

    def play(self, temperature: float, seed: int) -> Play:
        """How one episode is played at this temperature; `seed` and the episode's order decide its random numbers."""
        return how_to_play(self.plan, self.chat, temperature, seed)

    def call_hooks(self, event: str, **values: Any) -> None:
        """Hooks that fail are told, and stop nothing."""
        self.watcher.faults(self.plan.manager.call_event(event, **values))


def how_to_play(plan: Plan | EvaluationPlan, chat: ChatFormat | None, temperature: float, seed: int) -> Play:
    """How one episode of this plan is played (see `Parts.play`); `chat` is None for an engine that takes messages."""
    settings = plan.settings
    limits = EpisodeLimits(
        settings.max_tokens,
        settings.max_turns,
        temperature,
        episode_seconds=settings.episode_seconds,
        cleanup_seconds=settings.cleanup_seconds,
        reward_seconds=settings.reward_seconds,
        setup_seconds=settings.setup_seconds,
        turn_seconds=settings.turn_seconds or math.inf,
        tool_seconds=settings.tool_seconds or math.inf,
    )

    async def play(job: Job, session: str, inference: InferenceBackend) -> Episode:
        return await run_episode(
            job.task,
            make_env=plan.environment_of(job.task).make,
            chat=chat,
            inference=inference,
            limits=limits,
            rewards=plan.rewards,
            session=session,
            order=job.order,
            seed=seed,
            on_invalid_reward=settings.on_invalid_reward,
        )

    return play


def load_chat(plan: Plan | EvaluationPlan) -> ChatFormat:
    """The model's chat format. Raises ModelError where its template cannot show what the environment needs."""
    chat = load_chat_format(load_tokenizer(plan.settings.model), plan.settings.template)
    with_tools = [env.name for env in plan.environments if tools_of(env.make())]
    if with_tools and not chat.report.tools:
        raise ModelError(
            f"the environment {with_tools[0]} has tools, but the chat template of {plan.settings.model} cannot "
            f"show them ({'; '.join(chat.report.refusals) or 'it ignores them'}); choose a model whose template takes "
            "tools, such as --model tiny or a Qwen"
        )
    if plan.settings.system and not chat.report.system:
        raise ModelError(f"--system: the chat template of {plan.settings.model} refuses system messages")
    return chat


def make_training(plan: Plan) -> TrainingBackend | RankServer:
    """The training backend with its model loaded; on a rank above 0 of a distributed one, what serves rank 0.

    Raises UserError, also where a launcher started several processes of a backend that is in one.
    """
    settings = plan.settings
    available = plan.training_arguments() | {"config": repeatable(plan, with_secrets=True)}
    chosen = plan.one("training")
    backend: TrainingBackend | RankServer = call_with(chosen.component, available, chosen.settings)
    if isinstance(backend, RankServer):
        return backend
    launched = os.environ.get("WORLD_SIZE", "1")
    if launched != "1" and getattr(backend, "world_size", 1) == 1:
        backend.close()
        raise ConfigError(
            f"a launcher started {launched} processes (WORLD_SIZE), but --training {chosen.name} trains in one; type "
            "--training fsdp, or start it without a launcher"
        )
    can = all(hasattr(backend, name) for name in ("start_profile", "stop_profile"))
    if settings.profile and not can:
        backend.close()
        raise ConfigError(
            f"--profile {settings.profile}: the training backend {chosen.name} cannot be profiled; leave --profile "
            "out, or choose another one, such as --training torch"
        )
    return backend


def repeatable(plan: Plan | EvaluationPlan, *, with_secrets: bool = False) -> str:
    """What config.toml holds: everything but the folder and `resume`, so that running it again writes to a new one.
    Secrets are left out, but for what goes to this run's own ranks.
    """
    settings = dataclasses.replace(plan.resolved.settings, out="", resume="never")
    resolved = plan.resolved._replace(settings=settings)
    return to_toml(resolved if with_secrets else resolved_without_secrets(resolved))


def make_inference(plan: Plan, backend: TrainingBackend, folder: str) -> InferenceBackend:
    """The engine, not entered; `folder` is the run's, which need not be there yet. Raises UserError, also where what it
    returns cannot be trained on, or a server that it needs cannot be used.
    """
    chosen = plan.one("inference")
    available = plan.inference_arguments(backend, folder)
    inference: InferenceBackend = call_with(chosen.component, available, chosen.settings)
    if not inference.trainable and plan.settings.mode == "rl":
        raise ConfigError(
            f"--inference {chosen.name}: it returns no token ids with logprobs, so it is good for evaluation only; "
            "type --inference hf to train"
        )
    if isinstance(inference, CanCheck):
        trio.run(inference.check)
    return inference


def make_loggers(plan: Plan | EvaluationPlan, folder: RunFolder, first_step: int) -> Loggers:
    """Every logger of the run. Raises UserError; those made before the one at fault are closed."""
    available = {"folder": str(folder.path), "settings": plain_plan(plan), "first_step": first_step}
    made = Loggers()
    try:
        for chosen in plan.chosen["logger"]:
            made.add(chosen.alias, call_with(chosen.component, available, chosen.settings))
    except BaseException:
        made.close()
        raise
    return made


class Loggers:
    """Several loggers as one MetricsLogger. One that fails is named: a run whose numbers are lost is not a run."""

    def __init__(self) -> None:
        self.faults: list[PluginFault] = []
        self._loggers: list[tuple[str, MetricsLogger]] = []

    def add(self, name: str, logger: MetricsLogger) -> None:
        """One more, under the name that errors give it."""
        self._loggers.append((name, logger))

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Tell each of them; each has a copy of its own. Raises RunError, naming the logger."""
        for name, logger in self._loggers:
            try:
                with authors_code():
                    logger.log(dict(metrics), step)
            except RolloutsError:
                raise
            except Exception as error:  # a stranger's logger may raise anything
                raise RunError(f"the logger {name} failed: {named(error)}") from error

    def close(self) -> None:
        """Close every one, whatever the others do; `faults` names those that failed."""
        while self._loggers:
            name, logger = self._loggers.pop(0)
            try:
                with authors_code():
                    logger.close()
            except Exception as error:  # a failure here must hide no other error
                self.faults.append(PluginFault(f"logger {name}", "", f"close failed: {named(error)}"))


def plain_plan(plan: Plan | EvaluationPlan) -> dict[str, Any]:
    """The resolved settings as plain data, without secrets: for loggers and hooks."""
    settings = plain_settings(resolved_without_secrets(plan.resolved._replace(settings=plan.settings)).settings)
    if isinstance(plan, EvaluationPlan):
        settings = {name: value for name, value in settings.items() if name in EVAL}
    for key in COMPONENT_KINDS:
        for each in plan.chosen.get(key, ()):
            if each.settings:
                name = f"{key}.{each.alias}" if each.alias else key
                settings[f"{name}.settings"] = without_secrets(plain_settings(each.settings))
    if isinstance(plan, Plan):
        settings["lr"] = plan.lr
    return settings
