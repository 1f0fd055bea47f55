"""Policies that solve an environment, for demonstrations.

An environment with a table of transitions `P`, as those of toy text, is solved by value iteration. The levels of BabyAI
are solved by minigrid's own bot.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import numpy as np

DISCOUNT = 0.999  # below 1, so that a shorter path is worth more
RANDOM_SHARE = 0.2  # of the actions of a further attempt
TOLERANCE = 1e-9
SWEEPS_MAX = 20_000
UNSOLVED = ("Carrying-v0", "KeyInBox-v0")  # levels that the bot of minigrid does not solve, as its docstring says

Transitions = Mapping[int, Mapping[int, list[tuple[float, int, float, bool]]]]
Policy = Callable[[], int]


def has_expert(env: gymnasium.Env[Any, Any]) -> bool:
    """Whether `expert` solves the environment, which was reset."""
    return _has_table(env) or _has_bot(env)


def expert(env: gymnasium.Env[Any, Any], seed: int, attempt: int = 0) -> Policy:
    """A function that returns the next action in an environment that was reset. `seed` chooses among equal actions. In
    an environment with chance the best policy may fail; each further attempt takes other random actions now and then.
    """
    inner = env.unwrapped
    if _has_table(env):
        actions, rng = best_actions(_encoded(inner.P)), random.Random(f"{seed}/{attempt}")
        every = list(range(env.action_space.n))
        return lambda: rng.choice(every if attempt and rng.random() < RANDOM_SHARE else actions[int(inner.s)])
    from minigrid.utils.baby_ai_bot import BabyAIBot

    bot = BabyAIBot(env)
    return lambda: int(bot.replan())


def attempts_max(env: gymnasium.Env[Any, Any]) -> int:
    """How often it makes sense to try. The bot of minigrid always does the same."""
    return 50 if hasattr(env.unwrapped, "P") else 1


def is_solved(env: gymnasium.Env[Any, Any], rewards: list[float], *, terminated: bool) -> bool:
    """Whether an episode of the expert ended well: with the best reward that there is."""
    if not terminated or not rewards:
        return False
    if not _has_table(env):
        return rewards[-1] > 0
    table: Transitions = env.unwrapped.P
    return rewards[-1] >= max(row[2] for actions in table.values() for rows in actions.values() for row in rows)


@functools.lru_cache(maxsize=8)
def best_actions(table_json: str) -> dict[int, list[int]]:
    """The best actions in each state, by value iteration on a table of transitions: for each state and action, a list
    of (probability, next state, reward, end).

    >>> best_actions('{"0": {"0": [[1.0, 0, 0.0, false]], "1": [[1.0, 1, 1.0, true]]}, "1": {"0": [], "1": []}}')[0]
    [1]
    """
    table = json.loads(table_json)
    states = [int(state) for state in table]
    assert states == list(range(len(states))), "the states are numbers from 0 on"
    rows = [
        (state, int(action), *row) for state in states for action, found in table[str(state)].items() for row in found
    ]
    columns = list(zip(*rows, strict=True))
    source, action, following = (np.array(columns[place], dtype=int) for place in (0, 1, 3))
    probability, reward, ends = (np.array(columns[place], dtype=float) for place in (2, 4, 5))
    values, count = np.zeros(len(states)), 1 + int(action.max())
    for _ in range(SWEEPS_MAX):
        worth = np.zeros((len(states), count))
        np.add.at(worth, (source, action), probability * (reward + DISCOUNT * (1 - ends) * values[following]))
        change = float(np.abs(worth.max(axis=1) - values).max())
        values = worth.max(axis=1)
        if change < TOLERANCE:
            break
    near = worth >= values[:, None] - 100 * TOLERANCE / (1 - DISCOUNT)
    return {state: np.flatnonzero(near[state]).tolist() for state in states}


def _encoded(table: Transitions) -> str:
    plain = {int(state): {int(action): [[float(p), int(to), float(reward), bool(end)] for p, to, reward, end in rows]
             for action, rows in actions.items()} for state, actions in table.items()}  # fmt: skip
    return json.dumps(plain)


def _has_table(env: gymnasium.Env[Any, Any]) -> bool:
    inner = env.unwrapped
    table = getattr(inner, "P", None)
    is_known = isinstance(table, Mapping) and hasattr(inner, "s")
    return is_known and isinstance(env.action_space, gymnasium.spaces.Discrete) and env.action_space.start == 0


def _has_bot(env: gymnasium.Env[Any, Any]) -> bool:
    level = any(each.__module__.startswith("minigrid.envs.babyai.") for each in type(env.unwrapped).__mro__)
    return level and env.spec is not None and not env.spec.id.endswith(UNSOLVED)
