"""Roles of an environment that another model plays: a frozen model, an earlier checkpoint, or an API.

    [role.buyer]
    model = "runs/first/checkpoints/step_000010"

    [role.judge]
    inference = "openai"
    url = "http://127.0.0.1:9000/v1"

`inference` is the engine, `hf` by default, and the other keys are its settings. Such a role is neither judged nor
trained. The other roles share one policy, or each has a LoRA adapter of its own (`plan_lora_roles`). Not here: how an
episode uses the engines (`rollouts.agent.episode`).
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rollouts.agent.episode import Opponent
from rollouts.config.files import Source, where
from rollouts.config.merging import Component
from rollouts.config.settings import Settings
from rollouts.env.authoring import roles_of
from rollouts.errors import ConfigError, UserError, near_misses
from rollouts.inference.chatting import is_evaluation_only
from rollouts.models.folders import role_adapters
from rollouts.models.loading import load_tokenizer
from rollouts.plugins.manager import PluginManager
from rollouts.runs.components import Chosen, choose
from rollouts.runs.earlier_run import find_checkpoint
from rollouts.runs.environments import PlannedEnvironment
from rollouts.runs.session import EngineSpec, make_inference
from rollouts.training.algorithms.algorithm import requests

ENGINE = "hf"


class PlannedOpponent(NamedTuple):
    """The model of one role, and its engine."""

    role: str
    model: str
    engine: Chosen


def plan_opponents(
    manager: PluginManager, settings: Settings, environments: Sequence[PlannedEnvironment], source: Source
) -> tuple[PlannedOpponent, ...]:
    """The roles that other models play. Raises ConfigError for a role that no environment has, for an environment
    without another role, and for what `choose` refuses.
    """
    names = {env.name: [role.name for role in roles_of(env.make())] for env in environments} if settings.role else {}
    known = list(dict.fromkeys(name for own in names.values() for name in own))
    planned = []
    for given, table in settings.role.items():
        role = next((name for name in known if name.replace("-", "_") == given.replace("-", "_")), "")
        if not role:
            near = near_misses(given, known)
            has = f"the roles are {', '.join(known)}" if known else "the environment has no roles"
            path = ("role", given)
            place = where(path, None, source) if source.line_of(path) else f"--role.{given}"
            raise ConfigError(f"{place}: {has}" + (f"; did you mean --role.{near[0]}.model?" if near else ""))
        planned.append(_planned(manager, role, table, settings, source))
    taken = {each.role for each in planned}
    for name, own in names.items():
        if own and taken.issuperset(own):
            raise ConfigError(
                f"[role]: other models play every role of the environment {name}, so there is nothing to train or to "
                f"evaluate; leave out one of {', '.join(own)}"
            )
    return tuple(planned)


def _planned(
    manager: PluginManager, role: str, table: Mapping[str, Any], settings: Settings, source: Source
) -> PlannedOpponent:
    own = dict(table)
    name, model = str(own.pop("inference", ENGINE)), str(own.pop("model", ""))
    component = Component(name, own)
    chosen = choose(manager, {"inference": [component]}, source, places={"inference": ("role", role)})
    (engine,) = chosen["inference"]
    if is_evaluation_only(engine.component):
        return PlannedOpponent(role, model, engine)
    if not model:
        raise ConfigError(f"--role.{role}.inference {name}: which model? type: --role.{role}.model MODEL")
    if Path(model).expanduser().is_dir():
        found = find_checkpoint(model)
        model = str(role_adapters(found).get(role, found))
    return PlannedOpponent(role, model, engine)


def plan_lora_roles(
    settings: Settings, chosen: Mapping[str, list[Chosen]], environments: Sequence[PlannedEnvironment]
) -> tuple[str, ...]:
    """The roles with a LoRA adapter of their own: with `--lora-per-role` each role that the run trains, and in an
    evaluation those of the model's checkpoint. Raises ConfigError if that is not possible.
    """
    folders = role_adapters(settings.model) if settings.mode == "eval" else {}
    if not folders and not settings.lora_per_role:
        return ()
    what = f"{settings.model} has an adapter for each role" if folders else "--lora-per-role"
    if not folders and not settings.lora_rank:
        raise ConfigError(f"{what}: there are no adapters, because every weight is trained; type --lora-rank 16")
    if settings.mode == "sft":
        raise ConfigError(f"{what}: demonstrations do not say whose they are; leave it out in mode sft")
    one = f"or give that of one role: {', '.join(map(str, folders.values()))}" if folders else "or leave it out"
    roles = dict[str, None]()
    for env in environments:
        own = [role.name for role in roles_of(env.make())]
        if not own:
            raise ConfigError(f"{what}, and the environment {env.name} has no roles; give another one, {one}")
        roles |= dict.fromkeys(own)
    others = [name.replace("-", "_") for name in settings.role]
    found = tuple(folders or (role for role in roles if role.replace("-", "_") not in others))
    if missing := [role for role in roles if role not in found and role.replace("-", "_") not in others]:
        raise ConfigError(f"{what}, but none for {missing[0]}; type --role.{missing[0]}.model MODEL, {one}")
    if not roles:
        raise ConfigError(f"{what}, and no environment says who speaks; name one, {one}")
    for kind, own_name, verb in (("inference", ENGINE, "serves"), ("training", "torch", "trains")):
        for each in chosen.get(kind, ()):
            if not each.is_absent and "lora_roles" not in requests(each.component, kind):
                raise ConfigError(
                    f"{what}: --{kind} {each.name} {verb} one adapter at a time; type --{kind} {own_name}, {one}"
                )
    return found


def make_opponents(
    planned: Sequence[PlannedOpponent], settings: Settings, environments: Sequence[PlannedEnvironment], folder: str
) -> dict[str, Opponent]:
    """The engine of each of these roles, checked and not entered, with its chat format. Raises ConfigError. Do not call
    it inside trio.
    """
    from rollouts.chat.format import load_chat_format

    opponents = {}
    for each in planned:
        spec = EngineSpec(each.model, settings.seed, settings.temperature, settings.concurrency, folder=folder)
        try:
            engine = make_inference(each.engine, spec, environments, must_train=False)
            chat = None if engine.capabilities.chats else load_chat_format(load_tokenizer(each.model))
        except UserError as error:
            raise ConfigError(f"--role.{each.role}: {error}") from error
        opponents[each.role] = Opponent(engine, chat)
    return opponents


@contextlib.asynccontextmanager
async def entered(opponents: Mapping[str, Opponent]) -> AsyncIterator[None]:
    """Start the engines of these roles, and close them at the end of the block."""
    async with contextlib.AsyncExitStack() as stack:
        for opponent in opponents.values():
            await stack.enter_async_context(opponent.engine)
        yield
