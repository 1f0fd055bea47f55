"""Environments of GEM (`gem-llm`), which have the interface of gymnasium with texts as observations and actions.

Games and the data sets of reasoning-gym are served. What downloads when it is made is refused.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import logging
import random
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, ClassVar

import gymnasium
import numpy as np

from rollouts.errors import ConfigError
from rollouts_gymnasium.environment import GymEnvironment, named_class
from rollouts_gymnasium.registry import Facts, explained, facts_of
from rollouts_gymnasium.spaces import AnyText

DOWNLOADS = ("math", "code", "qa", "logic", "eval")  # the kinds of ids that load a data set from the hub
NEED_WORDS = ("Wordle", "Hangman", "WordSearch")  # games that need a list of words, which nltk downloads

_lock = threading.Lock()


class GemAsGym(gymnasium.Env[str, str]):
    """An environment of GEM with gymnasium's interface.

    GEM draws from the global random generators. Each object has states of its own, which are in the generators only
    while it acts; one object of the process acts at a time.
    """

    observation_space = action_space = AnyText()

    def __init__(self, env_id: str, kwargs: Mapping[str, Any]) -> None:
        self._states: tuple[Any, Any] | None = None
        with self._own_chance():
            self._env = upstream().make(env_id, **kwargs)

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Begin an episode."""
        super().reset(seed=seed)
        with self._own_chance():
            observation, info = self._env.reset(seed=seed)
        return observation, info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take an action."""
        with self._own_chance():
            observation, reward, terminated, truncated, info = self._env.step(action)
        return observation, float(reward), bool(terminated), bool(truncated), info

    @contextlib.contextmanager
    def _own_chance(self) -> Iterator[None]:
        with _lock:
            before = random.getstate(), np.random.get_state()
            if self._states is not None:
                random.setstate(self._states[0])
                np.random.set_state(self._states[1])
            try:
                yield
            finally:
                self._states = random.getstate(), np.random.get_state()
                random.setstate(before[0])
                np.random.set_state(before[1])


@dataclass
class GemEnvironment(GymEnvironment):
    """An environment of GEM, played by text or by tool calls."""

    instructions: str | None = ""  # the text before the first observation, which says itself how to act

    pack: ClassVar[str] = "gem"

    def facts(self) -> Facts:
        """What the upstream environment is. Raises ConfigError if it cannot be made."""
        if self.max_steps is not None:
            raise ConfigError("--env.max-steps: GEM has no step limit of its own; type --env.kwargs.max_turns N")
        return _facts(self.env_id, json.dumps(self.kwargs, sort_keys=True))

    def make(self) -> gymnasium.Env[Any, Any]:
        """A new upstream environment."""
        return _make(self.env_id, self.kwargs)


def environment_class(env_id: str) -> type[GymEnvironment] | None:
    """The class of one of GEM's environments; None if there is none of this id."""
    if find_spec("gem") is not None and env_id not in upstream().ENV_REGISTRY:
        return None
    return named_class(env_id, GemEnvironment)


def served_ids() -> list[str]:
    """The ids that need no download."""
    return [env_id for env_id in upstream().ENV_REGISTRY if not _why_refused(env_id)]


def abouts() -> dict[str, str]:
    """The ids that need no download, with what they are; none if GEM is not installed."""
    return {env_id: f"{env_id} of GEM" for env_id in served_ids()} if find_spec("gem") is not None else {}


@functools.cache
def upstream() -> Any:
    """The module with GEM's registry and `make`. Raises ConfigError if GEM is not installed."""
    if find_spec("gem") is None:
        raise ConfigError("gem is not installed\ntype: pip install 'rollouts-gymnasium[gem]'")
    quiet = logging.NullHandler()  # with a handler, gem's import does not configure the logging of the process
    logging.root.addHandler(quiet)
    try:
        importlib.import_module("gem.envs")
    finally:
        logging.root.removeHandler(quiet)
    return importlib.import_module("gem.envs.registration")


def _make(env_id: str, kwargs: Mapping[str, Any]) -> gymnasium.Env[Any, Any]:
    with explained(env_id, kwargs, pack="gem"):
        return GemAsGym(env_id, kwargs)


@functools.lru_cache(maxsize=256)
def _facts(env_id: str, kwargs_json: str) -> Facts:
    if why := _why_refused(env_id):
        raise ConfigError(f"gem/{env_id} {why}")
    env = _make(env_id, json.loads(kwargs_json))
    _, info = env.reset(seed=0)
    return facts_of(env, info)._replace(description="")


def _why_refused(env_id: str) -> str:
    """Why an environment is not served; empty if it is."""
    kind, _, name = env_id.partition(":")
    if kind in DOWNLOADS:
        return "downloads its data set when it is made\nplay its rows instead: --env prompts --data rows.jsonl"
    if name.startswith(NEED_WORDS) and not _has_words():
        return "needs nltk's list of words\ntype: python -m nltk.downloader words"
    return ""


@functools.cache
def _has_words() -> bool:
    nltk = importlib.import_module("nltk")
    try:
        nltk.data.find("corpora/words")
    except LookupError:
        return False
    return True
