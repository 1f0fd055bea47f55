"""Each environment that is counted equals upstream's own loop: with the same seed and the same actions, the same
observations, rewards and end.
"""

from __future__ import annotations

import itertools
import random
from typing import NamedTuple

import gymnasium
import pytest
from gymnasium.utils.env_checker import data_equivalence
from rollouts_gymnasium import registry, spaces, views
from rollouts_gymnasium.environment import GymEnvironment, environment_class

from rollouts.types import Message, Task, Trajectory

STEPS_MAX = 60
QUICK = [
    "FrozenLake-v1", "CliffWalkingSlippery-v1", "Taxi-v4", "Blackjack-v1", "CartPole-v1", "Pendulum-v1", "Acrobot-v1",
    "MiniGrid-DoorKey-5x5-v0", "BabyAI-GoToRedBall-v0", "MiniGrid-Dynamic-Obstacles-5x5-v0",
]  # fmt: skip


def first_task(env: GymEnvironment, split: str) -> Task:
    """The first task of the split, drawn with one seed."""
    tasks = env.tasks(split, random.Random(1))
    try:
        return next(tasks)
    finally:
        tasks.close()


def upstream(env_id: str, seed: int) -> tuple[list, list, list[float], tuple[bool, bool]]:
    """Upstream's own loop with random actions: observations, actions, rewards, and how it ended."""
    env = gymnasium.make(gymnasium.registry[env_id])
    env.action_space.seed(seed)
    observations, actions, rewards, ends = [env.reset(seed=seed)[0]], [], [], (False, False)
    while len(actions) < STEPS_MAX and not any(ends):
        actions.append(env.action_space.sample())
        observation, reward, *ends, _ = env.step(actions[-1])
        observations.append(observation)
        rewards.append(reward)
    env.close()
    return observations, actions, rewards, tuple(ends)


class Played(NamedTuple):
    """What our environment did: raw observations, texts, the rewards by turn, their sum, and whether it ended."""

    raw: list
    texts: list[str]
    turns: list[float]
    total: float
    ended: bool


def ours(env: GymEnvironment, seed: int, actions: list) -> Played:
    """Play the same actions through the contract."""
    raw, observe = [], env._observation

    def observation(upstream_env, observed, info):
        raw.append(observed)
        return observe(upstream_env, observed, info)

    task = first_task(env, "eval" if seed % 2 else "train")
    assert task.info["seed"] == seed
    env._observation = observation
    env.setup(task)
    messages, texts, answer = list(task.messages), [env._seen], ""
    for action in actions:
        messages.append(Message("assistant", env._codec.write(action)))
        answer = env.reply(Trajectory(task, messages))
        texts.append(env._seen)
        messages += [Message("user", answer)] if answer is not None else []
    score = env.upstream(Trajectory(task, messages))
    env.close()
    assert env.invalid_actions() == 0 and env.steps() == len(actions)
    return Played(raw, texts, score.turns, score.value, answer is None)


def check_equality(env_id: str) -> None:
    cls = environment_class(env_id)
    for split in ("train", "eval"):
        env = cls(observe="observation", rewards="turn")
        seed = first_task(env, split).info["seed"]
        observations, actions, rewards, ends = upstream(env_id, seed)
        played = ours(env, seed, actions)
        assert data_equivalence(played.raw, observations)
        assert played.texts == [env._codec.show(observation, {}, None) for observation in observations]
        assert played.turns == [float(reward) for reward in rewards]
        assert played.total == sum(played.turns)
        assert played.ended == any(ends)


def counted(env_id: str):
    """The id as a parameter, whose test is counted with the package of the environment."""
    kind = registry.about(env_id).rpartition(" ")[2]
    return pytest.param(env_id, marks=pytest.mark.equals_upstream(kind))


@pytest.mark.parametrize("env_id", [counted(each) for each in QUICK])
def test_an_episode_equals_upstreams_loop(env_id):
    check_equality(env_id)


@pytest.mark.adapters
@pytest.mark.parametrize("env_id", [counted(each) for each in registry.served_ids()])
def test_every_episode_equals_upstreams_loop(env_id):
    check_equality(env_id)


@pytest.mark.parametrize("env_id", [name for name in QUICK if name.split("-")[0] in ("FrozenLake", "Taxi")])
def test_the_text_of_ansi_is_what_upstream_renders(env_id):
    env = environment_class(env_id)()
    seed = first_task(env, "train").info["seed"]
    theirs = gymnasium.make(env_id, render_mode="ansi")
    theirs.reset(seed=seed)
    _, actions, _, _ = upstream(env_id, seed)
    texts = [views.colors_as_tags(theirs.render())]
    for action in actions:
        theirs.step(action)
        texts.append(views.colors_as_tags(theirs.render()))
    assert ours(environment_class(env_id)(rewards="turn"), seed, actions).texts == texts
    assert len(set(texts)) > 1 and not any("\x1b" in text for text in texts)
    theirs.close()


def test_upstreams_contract():
    """The names and the behavior that this package was written for, in gymnasium 1.4.0 and minigrid 3.2.0."""
    spec = gymnasium.registry["FrozenLake-v1"]
    changed = "gymnasium changed {}; rollouts-gymnasium was written for 1.4.0"
    assert spec.max_episode_steps == 100 and spec.kwargs == {"map_name": "4x4"}, changed.format("EnvSpec")
    env = gymnasium.make(spec, disable_env_checker=True, max_episode_steps=7, render_mode="ansi", is_slippery=False)
    assert env.spec.max_episode_steps == 7, changed.format("make(max_episode_steps=...)")
    observation, info = env.reset(seed=3)
    assert (observation, info) == (0, {"prob": 1}), changed.format("reset")
    assert len(env.step(1)) == 5, changed.format("step")
    assert env.unwrapped.P[0][1] == [(1.0, 4, 0, False)] and env.unwrapped.s == 4, changed.format("the table P")
    assert "\x1b[41m" in env.render(), changed.format("the colors of the render mode ansi")
    env.close()
    served = [name for name in registry.served_ids() if "minigrid" not in str(gymnasium.registry[name].entry_point)]
    assert served == [
        "CartPole-v0", "CartPole-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Pendulum-v1", "Acrobot-v1",
        "Blackjack-v1", "FrozenLake-v1", "FrozenLake8x8-v1", "CliffWalking-v1", "CliffWalkingSlippery-v1", "Taxi-v4",
    ], changed.format("its environments without extras")  # fmt: skip


def test_upstreams_contract_of_minigrid():
    minigrid = pytest.importorskip("minigrid")
    changed = f"minigrid {minigrid.__version__} changed {{}}; rollouts-gymnasium was written for 3.2.0"
    ids = [name for name in registry.served_ids() if "minigrid" in str(gymnasium.registry[name].entry_point)]
    assert len(ids) == 172, changed.format("its environments without extras")
    env = gymnasium.make("MiniGrid-Empty-5x5-v0")
    observation, _ = env.reset(seed=0)
    assert set(observation) == {"mission", "direction", "image"}, changed.format("its observations")
    assert list(env.unwrapped.actions.__members__)[:3] == ["left", "right", "forward"], changed.format("its actions")
    env.close()


@pytest.mark.parametrize("env_id", ["BabyAI-GoToRedBall-v0", "MiniGrid-DoorKey-6x6-v0", "MiniGrid-LavaGapS7-v0"])
def test_different_observations_of_minigrid_have_different_texts(env_id):
    found: dict[str, tuple] = {}
    for seed in range(8):
        for observed in upstream(env_id, seed)[0]:
            exact = (observed["image"].tobytes(), int(observed["direction"]), observed["mission"])
            assert found.setdefault(views.grid_as_text(observed), exact) == exact
    assert len(found) > 50


def test_the_seeds_of_the_splits_have_none_in_common():
    env = environment_class("FrozenLake-v1")()
    drawn = {
        split: {task.info["seed"] for task in itertools.islice(env.tasks(split, random.Random(0)), 200)}
        for split in ("train", "eval")
    }
    assert len(drawn["train"]) == len(drawn["eval"]) == 200 and not drawn["train"] & drawn["eval"]


def test_a_number_in_an_observation_is_rounded_only_in_the_text():
    space = gymnasium.spaces.Box(-1.0, 1.0, (2,))
    value = space.sample()
    assert spaces.show(space, value, 17) == str(value.astype(float).tolist())
