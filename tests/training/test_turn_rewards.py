"""Rewards by turn: from a Score to the advantage that names `turn_rewards`, against a formula."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from rollouts import Score, reward
from rollouts.env.checks import reward_term
from rollouts.env.mixing import Verdict, env_term, mix, read_verdict
from rollouts.errors import RewardError
from rollouts.training.algorithms.calls import group_advantages
from rollouts.training.algorithms.recipes import GRPO
from rollouts.training.loops.rl import RLTrainingConfig
from rollouts.training.loops.rl_batch import prepare_rl_batch
from rollouts.training.rollout_gen.groups import Group

sys.path.insert(0, str(Path(__file__).parents[1]))
from agent_fakes import FakeEngine, Quiz, play

GAMMA = 0.5


def discounted(rewards: Any, turn_rewards: list[list[float]]) -> list[float]:
    sums = [sum(GAMMA**turn * each for turn, each in enumerate(turns)) for turns in turn_rewards]
    assert [sum(turns) for turns in turn_rewards] == pytest.approx(rewards.tolist())
    return [each - sum(sums) / len(sums) for each in sums]


class Steps(Quiz):
    """One point for each turn that says `yes`, and two for the last word `end`."""

    @reward(weight=2.0)
    def right(self, task: Any, trajectory: Any) -> Score:
        texts = [message.text for message in trajectory.messages if message.role == "assistant"]
        return Score(None, turns=[float("yes" in text) for text in texts])

    @reward
    def ending(self, trajectory: Any) -> float:
        return 2.0 * (trajectory.last_text == "end")

    def reply(self, trajectory: Any) -> str | None:
        return "more" if trajectory.turns < 3 else None


def test_turns_reach_the_advantage_as_the_formula_says() -> None:
    said = [("yes", "no", "end"), ("no", "yes", "yes"), ("no", "no", "no")]
    episodes = [play(Steps, FakeEngine(*texts), order=(0, place)) for place, texts in enumerate(said)]
    by_turn = [[2.0, 0.0, 2.0], [0.0, 2.0, 2.0], [0.0, 0.0, 0.0]]
    assert [episode.score.turns for episode in episodes] == by_turn
    assert [episode.score.value for episode in episodes] == [4.0, 4.0, 0.0]
    group = Group(0, episodes[0].task, tuple(episodes))
    batch = prepare_rl_batch([group], GRPO._replace(advantage=discounted), RLTrainingConfig(1), 0)
    returns = [2.0 + 2.0 * GAMMA**2, 2.0 * GAMMA + 2.0 * GAMMA**2, 0.0]
    mean = sum(returns) / 3
    assert batch.advantages == pytest.approx([each - mean for each in returns])


def test_without_turns_the_whole_reward_is_that_of_the_last_turn() -> None:
    episode = play(Quiz, FakeEngine('[double {"n": 21}]', "42"))
    assert episode.score.turns == []
    group = Group(0, episode.task, (episode, episode._replace(score=Score(None))))
    assert group.turn_rewards([1.0, None]) == [[0.0, 1.0], []]
    assert group.turn_rewards([0.25, None]) == [[0.0, 0.25], []]  # after shaping
    assert group_advantages(lambda rewards, turn_rewards: [turns[0] for turns in turn_rewards], [3.0]) == [3.0]


def test_the_rest_of_a_value_belongs_to_the_last_turn_and_an_unknown_reward_has_no_turns() -> None:
    given = read_verdict("a", 1.0, Score(1.0, turns=[0.25, 0.25]))
    assert mix([given]).turns == [0.25, 0.75] and mix([given]).value == 1.0
    assert mix([Verdict("b", 3.0, 1.0)], base=mix([given])).turns == [0.25, 3.75]
    assert mix([given, Verdict("b", 1.0, None)]).turns == []
    assert mix([given, Verdict("b", 1.0, None)], "zero").turns == [0.25, 0.75]
    assert read_verdict("a", 1.0, Score(None)).value is None


@pytest.mark.parametrize(
    ("turns", "words"),
    [
        ([1.0, 2.0], "reward 'right' returned a Score with 2 turns, but the model had 1"),
        ([float("nan")], "reward 'right, turn 1' returned nan"),
        ([None], "a Score's turns are numbers"),
        (1.0, "a Score's turns are a list of numbers, got 1.0"),
    ],
)
def test_turns_that_are_none_end_the_run_with_the_line(turns: Any, words: str) -> None:
    class Wrong(Quiz):
        @reward
        def right(self, task: Any, trajectory: Any) -> Score:
            return Score(None, turns=turns)

    def outside(trajectory: Any) -> Score:
        return Score(1.0, turns=[0.0, 0.0])

    with pytest.raises(RewardError) as caught:
        play(Wrong)
    assert words in str(caught.value) and "test_turn_rewards.py, line " in str(caught.value)
    with pytest.raises(RewardError, match="'outside' returned a Score with 2 turns, but the model had 1"):
        play(Quiz, rewards=[env_term(), reward_term("outside", outside)])
