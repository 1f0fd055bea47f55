"""Environments of GEM. They are played only where `gem-llm` is installed; it needs other versions of packages."""

from __future__ import annotations

import random
from importlib.util import find_spec

import numpy as np
import pytest
from rollouts_gymnasium import gem

from rollouts.cli import main
from rollouts.types import Message, Trajectory

INSTALLED = find_spec("gem") is not None
needs_gem = [
    pytest.mark.adapters,
    pytest.mark.skipif(not INSTALLED, reason="gem-llm is not installed: pip install 'rollouts-gymnasium[gem]'"),
    pytest.mark.filterwarnings("default"),  # of packages that gem imports
]


@pytest.mark.skipif(INSTALLED, reason="gem-llm is installed")
def test_without_gem_it_says_what_to_install(capsys):
    assert main(["play", "gem/game:Sudoku-v0-easy"]) == 2
    assert "gem is not installed\ntype: pip install 'rollouts-gymnasium[gem]'" in capsys.readouterr().err


def ids():
    """The games, and some of reasoning-gym's data sets (which another package serves)."""
    if not INSTALLED:
        return ["game:Sudoku-v0-easy"]
    # gem 0.1.0 cannot make two of them, and draws the rooms of two for minutes
    left_out = ("FifteenPuzzle-v0-random", "Crosswords-v0-random", "Sokoban-v0-hard", "Sokoban-v0-random")
    games = [each for each in gem.served_ids() if each.startswith("game:") and not each.endswith(left_out)]
    return [*games, "rg:chain_sum", "rg:basic_arithmetic", "rg:countdown"]


def replies(count=12):
    """Replies in GEM's own form, some of them wrong."""
    words = ["1", "up", "1 2", "A", "left", "reveal 0 1", "3", "1 1 2", "A C"]
    rng = random.Random(0)
    return [f"\\boxed{{{rng.choice(words)}}}" for _ in range(count - 1)] + ["none"]


@pytest.mark.equals_upstream("gem")
@pytest.mark.parametrize("env_id", [pytest.param(env_id, marks=needs_gem) for env_id in ids()])
def test_an_episode_equals_upstreams_loop(env_id):
    cls = gem.environment_class(env_id)
    task = next(cls().tasks("train", random.Random(2)))
    theirs = gem.upstream().make(env_id)
    observations, gains, ended = [theirs.reset(seed=task.info["seed"])[0]], [], False
    for reply in replies():
        if ended:
            break
        observation, reward, terminated, truncated, _ = theirs.step(reply)
        observations.append(observation)
        gains.append(float(reward))
        ended = terminated or truncated
    env, other = cls(rewards="turn"), cls()  # two episodes at the same time, which both draw
    env.setup(task), other.setup(task)
    messages, seen = list(task.messages), [env._seen]
    for reply in replies()[: len(gains)]:
        state = random.getstate(), np.random.get_state()[1].tolist()
        messages.append(Message("assistant", reply))
        answer = env.reply(Trajectory(task, messages))
        other.reply(Trajectory(task, messages))
        seen.append(env._seen)
        messages += [Message("user", answer)] if answer is not None else []
        assert state == (random.getstate(), np.random.get_state()[1].tolist())  # the global generators are as before
    assert task.prompt == observations[0] and seen == observations and other._seen == observations[-1]
    assert env.upstream(Trajectory(task, messages)).turns == gains
    assert (answer is None) == ended


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gem/math:GSM8K"], "downloads its data set when it is made\nplay its rows instead: --env prompts"),
        (["gem/game:Wordle-v0-easy"], "needs nltk's list of words\ntype: python -m nltk.downloader words"),
        (["gem/game:Crosswords-v0-random"], "gem/game:Crosswords-v0-random cannot be made: ValueError"),
        (["gem/game:Sudoko-v0-easy"], "did you mean: gem/game:Sudoku-v0-easy"),
        (["gem/game:Sudoku-v0-easy", "--env.max-steps", "3"], "type --env.kwargs.max_turns N"),
    ],
)
@pytest.mark.adapters
@pytest.mark.skipif(not INSTALLED, reason="gem-llm is not installed: pip install 'rollouts-gymnasium[gem]'")
@pytest.mark.filterwarnings("default")
def test_mistakes_are_one_message(capsys, words, message):
    assert main(["play", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.adapters
@pytest.mark.skipif(not INSTALLED, reason="gem-llm is not installed: pip install 'rollouts-gymnasium[gem]'")
def test_upstreams_contract():
    registry = gem.upstream()
    changed = "gem changed {}; rollouts-gymnasium was written for gem-llm 0.1.0"
    kinds = {env_id.partition(":")[0] for env_id in registry.ENV_REGISTRY}
    assert kinds == {"game", "rg", *gem.DOWNLOADS}, changed.format("the kinds of its environments")
    env = registry.make("game:GuessTheNumber-v0-easy")
    assert len(env.reset(seed=1)) == 2 and len(env.step("\\boxed{3}")) == 5, changed.format("reset or step")
