"""An environment of rollouts that plays one of gymnasium's.

A task is a seed of `reset`. The model reads observations as text, and acts by its reply (`actions = "text"`) or by a
call of the tool `act` (`actions = "tool"`). Spaces are read and written by `spaces`; not here: which environments there
are (`registry`), and who can solve them (`experts`).
"""

from __future__ import annotations

import functools
import importlib
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import gymnasium

from rollouts import Message, Score, Task, Trajectory, metric, reward, tool
from rollouts.config.importing import beside
from rollouts.env import tool_use
from rollouts.errors import ConfigError, suggestion
from rollouts_gymnasium import registry, views
from rollouts_gymnasium.codecs import Codec, load_codec
from rollouts_gymnasium.experts import attempts_max, expert, is_solved
from rollouts_gymnasium.registry import Facts

SEEDS = 2**30
FAILED_MAX = 50  # seeds in a row that an expert may fail to solve
END = "The episode is over."


@dataclass
class GymEnvironment:
    """An environment of gymnasium, played by text or by tool calls."""

    kwargs: dict[str, Any] = field(default_factory=dict)  # keyword arguments of gymnasium.make
    actions: Literal["text", "tool"] = "text"  # the model's reply is the action, or it calls the tool `act`
    observe: str = "auto"  # `ansi` (the render mode), `observation`, or `info:KEY`; auto: ansi if there is one
    rewards: Literal["sum", "turn"] = "sum"  # the reward of the episode, or also that of each turn
    codec: str | list[str] = ""  # your codec: ./my_codec.py:Codec, or functions that show and read, as a list of two
    action_names: list[str] = field(default_factory=list)  # names for the values of a Discrete action space
    instructions: str | None = None  # the text before the first observation; by default upstream's description
    max_steps: int | None = None  # another step limit than that of the registry
    max_errors: int = 3  # the episode ends at the next invalid action after so many
    digits: int = 4  # significant digits of numbers in observations

    env_id: ClassVar[str] = ""
    pack: ClassVar[str] = "gym"

    def __post_init__(self) -> None:
        for name, least in (("max_steps", 1), ("max_errors", 0), ("digits", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"--env.{name.replace('_', '-')} {value}: expected at least {least}")
        if "render_mode" in self.kwargs:
            raise ConfigError("--env.kwargs.render_mode: type --env.observe ansi instead")
        self._facts = self.facts()
        self._view = self._chosen_view()
        self._codec = load_codec(self.codec, self._facts, self._action_names(), self)
        self._env: gymnasium.Env[Any, Any] | None = None
        self._moves: list[Any] = []  # what the model gave as an action, also invalid ones
        self._gains: list[float | None] = []  # the reward of each; None: it was invalid
        self._errors, self._is_over, self._seen = 0, False, ""
        if self.actions == "tool":
            self.__class__ = _with_tool(type(self), self._codec)

    # --- what upstream offers -----------------------------------------------------------------------------------------

    def facts(self) -> Facts:
        """What the upstream environment is. Raises ConfigError if it cannot be made."""
        return registry.facts(self.env_id, self.kwargs, self.max_steps)

    def make(self) -> gymnasium.Env[Any, Any]:
        """A new upstream environment."""
        mode = "ansi" if self._view == "ansi" else None
        with registry.explained(self.env_id, self.kwargs):
            return registry.make(self.env_id, self.kwargs, render_mode=mode, max_steps=self.max_steps)

    def _chosen_view(self) -> str:
        """`ansi`, `observation`, or the key of info behind `info:`."""
        has_ansi = "ansi" in self._facts.render_modes
        chosen = ("ansi" if has_ansi and not self.codec else "observation") if self.observe == "auto" else self.observe
        keys = [f"info:{key}" for key in self._facts.info_keys]
        choices = [*(["ansi"] if has_ansi else []), "observation", *keys]
        if chosen not in choices:
            expected = f"{self.pack}/{self.env_id} has: auto, {', '.join(choices)}"
            near = suggestion(chosen, choices, "--env.observe {}".format)
            raise ConfigError("\n".join(filter(None, (f"--env.observe {self.observe}: {expected}", near))))
        return chosen

    def _action_names(self) -> tuple[str, ...]:
        space, names = self._facts.action_space, tuple(self.action_names)
        if not names:
            return self._facts.names
        count = int(space.n) if isinstance(space, gymnasium.spaces.Discrete) else 0
        if len(names) != count or len({name.lower() for name in names}) != count:
            raise ConfigError(
                f"--env.action-names {list(names)}: expected {count} different names, one for each value of {space}"
                if count
                else f"--env.action-names: the action space {space} is not Discrete, so its actions have no names"
            )
        return names

    # --- tasks and demonstrations -------------------------------------------------------------------------------------

    def tasks(self, split: str, rng: random.Random) -> Iterator[Task]:
        """Endless tasks, each with a seed of `reset`. The seeds of the two splits have no seed in common."""
        env = self.make()
        try:
            while True:
                seed = 2 * rng.randrange(SEEDS) + (split == "eval")
                self._reset(env, seed)
                yield Task(self._prompt(), info={"seed": seed}, id=f"{self.env_id}/{seed}")
        finally:
            env.close()

    def _demonstrations(self, split: str, rng: random.Random) -> Iterator[list[Message]]:
        """Conversations of an expert in the tasks of `tasks`, in the same order; those that it does not solve are left
        out.
        """
        env, failed = self.make(), 0
        try:
            while failed < FAILED_MAX:
                seed = 2 * rng.randrange(SEEDS) + (split == "eval")
                attempts = (self._demonstrate(env, seed, attempt) for attempt in range(attempts_max(env)))
                messages = next(filter(None, attempts), [])
                failed = 0 if messages else failed + 1
                if messages:
                    yield messages
        finally:
            env.close()

    def _demonstrate(self, env: gymnasium.Env[Any, Any], seed: int, attempt: int) -> list[Message]:
        """The conversation of an expert in one episode; empty if it does not solve it."""
        self._reset(env, seed)
        messages, policy = [Message("user", self._prompt())], expert(env, seed, attempt)
        rewards: list[float] = []
        terminated = truncated = False
        while not (terminated or truncated):
            action = policy()
            observation, gain, terminated, truncated, info = env.step(action)
            rewards.append(float(gain))
            seen, written = self._observation(env, observation, info), self._codec.write(action)
            if self.actions == "text":
                messages += [Message("assistant", written), Message("user", seen)]
                continue
            result = f"{seen}\n\n{END}" if terminated or truncated else seen
            messages += tool_use("act", {"action": self._codec.data(action)}, result, len(rewards))
        last = [Message("assistant", END)] if self.actions == "tool" else []
        messages = messages if last else messages[:-1]  # a reply that ends the episode gets no answer
        return [*messages, *last] if is_solved(env, rewards, terminated=terminated) else []

    def _prompt(self) -> str:
        """The first message of an episode. `instructions` replaces all but the observation."""
        facts, legal = self._facts, self._codec.legal
        if self.instructions is not None:
            return "\n\n".join(filter(None, (self.instructions, self._seen)))
        how = f"Reply with your action and nothing else: {legal}."
        if self.actions == "tool":
            how = f"Call the tool act with your action: {legal}."
        limit = f"The episode ends after {facts.steps_max} steps." if facts.steps_max else ""
        return "\n\n".join(filter(None, (facts.description, how, limit, self._seen)))

    # --- one episode --------------------------------------------------------------------------------------------------

    def setup(self, task: Task) -> None:
        """Make the upstream environment, and reset it with the seed of the task."""
        self._env = self.make()
        self._reset(self._env, task.info["seed"])
        if not task.messages[-1].text.endswith(self._seen):
            raise RuntimeError(
                f"the seed {task.info['seed']} gave another first observation than when the task was drawn, so it does "
                f"not decide {self.env_id}; perhaps --env.kwargs has a seed of its own"
            )

    def close(self) -> None:
        """Close the upstream environment."""
        if self._env is not None:
            self._env.close()

    def reply(self, trajectory: Trajectory) -> str | None:
        """The next observation, or what is wrong with the action. None at the end of the episode."""
        if self._is_over:
            return None
        if self.actions == "tool":
            self._count_error()
            return None if self._is_over else f"Error: call the tool act with your action: {self._codec.legal}."
        try:
            seen = self._step(trajectory.last_text)
        except ValueError as error:
            return None if self._is_over else f"Error: {error}"
        return None if self._is_over else seen

    def _act(self, action: Any) -> str:
        """The tool `act`."""
        if self._is_over:
            raise ValueError("the episode is over; write a last message without a call")
        try:
            seen = self._step(action)
        except ValueError as error:
            raise ValueError(f"{error} {END}" if self._is_over else str(error)) from error
        return f"{seen}\n\n{END}" if self._is_over else seen

    def _step(self, given: Any) -> str:
        """Take the action that the model gave. Returns the next observation. Raises ValueError if it is invalid."""
        assert self._env is not None, "setup has run"
        self._moves.append(given)
        try:
            action = self._codec.read(given)
        except ValueError:
            self._gains.append(None)
            self._count_error()
            raise
        observation, gain, terminated, truncated, info = self._env.step(action)
        self._gains.append(float(gain))
        self._is_over = bool(terminated or truncated)
        self._seen = self._observation(self._env, observation, info)
        return self._seen

    def _count_error(self) -> None:
        self._errors += 1
        self._is_over = self._errors > self.max_errors

    def _reset(self, env: gymnasium.Env[Any, Any], seed: int) -> None:
        observation, info = env.reset(seed=seed)
        self._seen = self._observation(env, observation, info)

    def _observation(self, env: gymnasium.Env[Any, Any], observation: Any, info: Mapping[str, Any]) -> str:
        """What the model reads of an observation."""
        if self._view == "ansi":
            return views.colors_as_tags(str(env.render()))
        if self._view != "observation":
            return str(info[self._view.removeprefix("info:")])
        return self._codec.show(observation, info, env)

    # --- the verdict --------------------------------------------------------------------------------------------------

    @reward
    def upstream(self, trajectory: Trajectory) -> Score | float:
        """The sum of the upstream rewards."""
        turns = self._turn_rewards(trajectory)
        if turns is None:
            return Score(None, why="a step took longer than the deadline of the tool, so its reward is not known")
        return Score(sum(turns), turns=turns) if self.rewards == "turn" else sum(turns)

    @metric
    def steps(self) -> float:
        """The steps of the episode."""
        return float(len(self._gains) - self._gains.count(None))

    @metric
    def invalid_actions(self) -> float:
        """The actions that could not be read."""
        return float(self._errors)

    def _turn_rewards(self, trajectory: Trajectory) -> list[float] | None:
        """The reward of each turn of the model. None: the steps do not belong to the turns."""
        turns: list[float] = []
        gains = [gain or 0.0 for gain in self._gains if gain is not None or self.actions == "text"]
        rest = iter(gains)
        for message in trajectory.messages[len(trajectory.task.messages) :]:
            if message.role == "assistant":
                turns.append(0.0 if self.actions == "tool" or message.tool_calls else next(rest, 0.0))
            elif message.role == "tool" and message.name == "act" and not message.text.startswith("Error:") and turns:
                turns[-1] += next(rest, 0.0)
        return turns if not list(rest) else None

    def state(self) -> dict[str, Any]:
        """The model's actions so far, which `restore` takes again."""
        return {"moves": self._moves, "errors": self._errors, "seen": self._seen}

    def restore(self, state: dict[str, Any]) -> None:
        """Take the actions of `state` again. Raises RuntimeError if they lead to another observation."""
        for move in state["moves"]:
            try:
                self._step(move)
            except ValueError:
                continue
        self._errors = state["errors"]
        self._is_over = self._is_over or self._errors > self.max_errors
        if self._seen != state["seen"]:
            raise RuntimeError(f"the same actions led to another observation; {self.env_id} is not deterministic")


class WithDemonstrations(GymEnvironment):
    """An environment that an expert can solve."""

    def demonstrations(self, split: str, rng: random.Random) -> Iterator[list[Message]]:
        """Conversations of an expert."""
        return self._demonstrations(split, rng)


def environment_class(env_id: str) -> type[GymEnvironment] | None:
    """The class of one of gymnasium's environments; None if there is none of this id. `module:id` imports the module
    first, which registers the environment.
    """
    module, _, env_id = env_id.rpartition(":")
    if module:
        beside(Path.cwd() / "any")  # a module of the working directory is found too
        importlib.import_module(module)
    if env_id not in registry.known_ids():
        return None
    try:
        has_expert = registry.facts(env_id, {}).has_expert
    except ConfigError:  # the class raises it again when the run is composed
        has_expert = False
    return named_class(env_id, WithDemonstrations if has_expert else GymEnvironment)


@functools.lru_cache(maxsize=1024)
def named_class(env_id: str, base: type[GymEnvironment]) -> type[GymEnvironment]:
    """The subclass for one id."""
    about = {
        "env_id": env_id,
        "__doc__": f"{base.pack}/{env_id}, played by text or by tool calls.",
        "__module__": __name__,
    }
    return type(env_id, (base,), about)


_with_tools: dict[tuple[type, str, str], type] = {}


def _with_tool(cls: type[GymEnvironment], codec: Codec) -> type[GymEnvironment]:
    """The class with the tool `act`, whose schema is that of the action space. Equal settings give the same class."""
    key = (cls, codec.legal, repr(codec.hint))
    if key not in _with_tools:

        def act(self: GymEnvironment, action: Any) -> str:
            return self._act(action)

        act.__doc__ = f"Take an action. Returns the next observation.\n\nArgs:\n    action: {codec.legal}"
        act.__annotations__ = {"action": codec.hint, "return": str}
        about = {"act": tool(act), "__doc__": cls.__doc__, "__module__": cls.__module__}
        _with_tools[key] = type(cls.__name__, (cls,), about)
    return _with_tools[key]
