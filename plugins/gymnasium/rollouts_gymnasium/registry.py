"""Gymnasium's registered environments: which there are, what one needs, making one, and why it cannot be made.

Importing this module imports gymnasium, and minigrid if it is installed, which registers its environments.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import os
import re
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, NamedTuple

import gymnasium

from rollouts.errors import ConfigError

OURS = "rollouts"  # the namespace of environments of rollouts in gymnasium (`envs`), which are not offered again
PACKAGES = ("minigrid",)  # packages that register environments when they are imported
DESCRIPTION_MAX = 4000  # characters of an environment's description in the prompt

# What an environment needs besides gymnasium: its entry point begins so, the module, and what to install.
NEEDS = (
    ("gymnasium.envs.box2d", "Box2D", "gymnasium[box2d]"),
    ("gymnasium.envs.mujoco", "mujoco", "gymnasium[mujoco]"),
    ("gymnasium.envs.phys2d", "jax", "gymnasium[jax]"),
    ("gymnasium.envs.tabular", "jax", "gymnasium[jax]"),
    ("shimmy", "shimmy", "shimmy[gym-v21]"),
    ("minigrid.envs.wfc", "imageio", "minigrid[wfc]"),
    ("minigrid.envs.wfc", "networkx", "minigrid[wfc]"),
)

# The names of the actions, in their order, of environments that do not say them (by the id without its version).
ACTION_NAMES = {
    "Acrobot": ["minus", "none", "plus"],
    "Blackjack": ["stick", "hit"],
    "CartPole": ["left", "right"],
    "CliffWalking": ["up", "right", "down", "left"],
    "CliffWalkingSlippery": ["up", "right", "down", "left"],
    "FrozenLake": ["left", "down", "right", "up"],
    "FrozenLake8x8": ["left", "down", "right", "up"],
    "LunarLander": ["none", "left", "main", "right"],
    "MountainCar": ["left", "none", "right"],
    "Taxi": ["south", "north", "east", "west", "pickup", "dropoff"],
}

os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")  # minigrid imports pygame, which prints a line on stdout
for _name in PACKAGES:
    if find_spec(_name) is not None:
        importlib.import_module(_name)
if "minigrid" in sys.modules:  # its levels print a line whenever they draw a room anew
    vars(importlib.import_module("minigrid.envs.babyai.core.roomgrid_level"))["print"] = lambda *words: None


class Facts(NamedTuple):
    """What an environment with certain keyword arguments is. `names` are those of a Discrete action space's values."""

    action_space: gymnasium.Space[Any]
    observation_space: gymnasium.Space[Any]
    render_modes: tuple[str, ...]
    description: str
    names: tuple[str, ...]
    steps_max: int | None
    info_keys: tuple[str, ...]
    is_minigrid: bool = False
    has_expert: bool = False


def known_ids() -> list[str]:
    """The ids that can be asked for, in the order of their registration."""
    return [name for name, spec in gymnasium.registry.items() if spec.namespace != OURS and spec.entry_point]


def served_ids() -> list[str]:
    """The ids whose packages are installed."""
    specs = ((name, gymnasium.registry[name]) for name in known_ids())
    return [name for name, spec in specs if not _only_raises(spec) and _missing(spec) is None]


def abouts() -> dict[str, str]:
    """The ids whose packages are installed, with what they are."""
    return {env_id: about(env_id) for env_id in served_ids()}


def about(env_id: str) -> str:
    """The class of an environment and its package, in words. Nothing is imported.

    >>> about("FrozenLake-v1")
    'FrozenLakeEnv of gymnasium'
    """
    entry = gymnasium.registry[env_id].entry_point
    module, _, name = entry.partition(":") if isinstance(entry, str) else (entry.__module__, ":", entry.__qualname__)
    return f"{name} of {module.partition('.')[0]}"


def make(
    env_id: str, kwargs: Mapping[str, Any], *, render_mode: str | None = None, max_steps: int | None = None
) -> gymnasium.Env[Any, Any]:
    """A new environment. The registry's step limit holds unless `max_steps` is given."""
    options = dict(kwargs) | ({"render_mode": render_mode} if render_mode else {})
    # By its spec, because an id warns of newer versions; without the checker, which warns of style.
    return gymnasium.make(gymnasium.registry[env_id], disable_env_checker=True, max_episode_steps=max_steps, **options)


def facts(env_id: str, kwargs: Mapping[str, Any], max_steps: int | None = None) -> Facts:
    """What an environment is. It is made once in a process for each `kwargs`. Raises ConfigError, with what to type, if
    it cannot be made.
    """
    return _facts(env_id, json.dumps(kwargs, sort_keys=True), max_steps)


@functools.lru_cache(maxsize=256)
def _facts(env_id: str, kwargs_json: str, max_steps: int | None) -> Facts:
    kwargs = json.loads(kwargs_json)
    refuse(env_id)
    with explained(env_id, kwargs):
        env = make(env_id, kwargs, max_steps=max_steps)
        try:
            _, info = env.reset(seed=0)
            return facts_of(env, info)
        finally:
            env.close()


def facts_of(env: gymnasium.Env[Any, Any], info: Mapping[str, Any]) -> Facts:
    """What this environment is. `info` is what its `reset` returned."""
    from rollouts_gymnasium.experts import has_expert

    inner, spec = env.unwrapped, env.spec
    return Facts(
        env.action_space,
        env.observation_space,
        tuple(env.metadata.get("render_modes") or ()),
        description_of(type(inner)),
        _action_names(env),
        spec.max_episode_steps if spec else None,
        tuple(info),
        is_minigrid(inner),
        has_expert(env),
    )


class explained:
    """A context in which an environment is made: an exception becomes a ConfigError that says what to type."""

    def __init__(self, env_id: str, kwargs: Mapping[str, Any], *, pack: str = "gym") -> None:
        self._name, self._kwargs = f"{pack}/{env_id}", dict(kwargs)

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, Exception) or isinstance(error, ConfigError):
            return
        words = f"{self._name} cannot be made: {type(error).__name__}: {' '.join(str(error).split())}"
        if isinstance(error, ImportError):  # gymnasium's DependencyNotInstalled says itself what to install
            hint = "install what it names, or choose another: rollouts plugins list --all"
        else:
            hint = f"its keyword arguments are {json.dumps(self._kwargs)}; change them with --env.kwargs.NAME VALUE"
        raise ConfigError(f"{words}\n{hint}") from error


def refuse(env_id: str) -> None:
    """Raise ConfigError if the environment cannot be served."""
    spec = gymnasium.registry[env_id]
    if (missing := _missing(spec)) is not None:
        module, install = missing
        raise ConfigError(
            f"gym/{env_id} needs the module {module}, which is not installed\ntype: pip install '{install}'"
        )
    if spec.nondeterministic:
        raise ConfigError(
            f"gym/{env_id} is registered as nondeterministic: a seed does not give the same episode again, and a task "
            "is a seed\nchoose another: rollouts plugins list --all"
        )


def _only_raises(spec: gymnasium.envs.registration.EnvSpec) -> bool:
    """Whether the entry point only says that gymnasium has the environment no more."""
    return getattr(spec.entry_point, "__name__", "").startswith("_raise")


def _missing(spec: gymnasium.envs.registration.EnvSpec) -> tuple[str, str] | None:
    """A module that the environment needs and that is not installed, and what to install; None if it has all."""
    entry = spec.entry_point if isinstance(spec.entry_point, str) else ""
    needs = ((module, install) for start, module, install in NEEDS if entry.startswith(start))
    return next((need for need in needs if find_spec(need[0]) is None), None)


def is_minigrid(env: object) -> bool:
    """Whether the environment is one of minigrid, whose observations are a dict of mission, direction and image."""
    return any(each.__module__ == "minigrid.minigrid_env" for each in type(env).__mro__)


def description_of(cls: type) -> str:
    """What an environment's docstring says before its section on actions, without headings; empty without docstring."""
    text = inspect.cleandoc(vars(cls).get("__doc__") or "")
    before = re.split(r"^ *#+ (?!Description).*$", text, maxsplit=1, flags=re.MULTILINE)[0]
    plain = re.sub(r"^ *#+ .*\n*|!\[.*?\]\(.*?\)", "", before, flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", plain).strip()[:DESCRIPTION_MAX]


def _action_names(env: gymnasium.Env[Any, Any]) -> tuple[str, ...]:
    """The names of the actions: those of the table, or of an enumeration `actions` of the environment."""
    space = env.action_space
    if not isinstance(space, gymnasium.spaces.Discrete):
        return ()
    members = getattr(getattr(env.unwrapped, "actions", None), "__members__", {})
    names = ACTION_NAMES.get(env.spec.name if env.spec else "", [])
    if members and [int(each) for each in members.values()] == list(range(int(space.n))):
        names = list(members)
    return tuple(names) if len(names) == space.n else ()
