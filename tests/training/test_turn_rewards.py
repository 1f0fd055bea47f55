"""Rewards by turn: from a Score to the advantage that names `turn_rewards`, against a formula."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollouts import Message, Score, Task, Trajectory, Turn, reward
from rollouts.env.checks import reward_term
from rollouts.env.mixing import Verdict, env_term, mix, read_verdict
from rollouts.errors import ConfigError, EnvironmentDefinitionError, RewardError, SignatureError, TrainingError
from rollouts.plugins.signature import check_signature
from rollouts.training.algorithms.advantages import group_mean, turn_return
from rollouts.training.algorithms.calls import group_advantages
from rollouts.training.algorithms.recipes import GRPO
from rollouts.training.loops.rl import RLSettings
from rollouts.training.loops.rl_batch import prepare_rl_batch
from rollouts.training.rollout_gen.groups import Group
from rollouts.training.samples import episode_samples
from rollouts.types import Episode, Segment, Status

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
    batch = prepare_rl_batch([group], GRPO._replace(advantage=discounted), RLSettings(1), 0)
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


# --- @reward(per="turn") ----------------------------------------------------------------------------------------------


def yes(turn: Turn) -> float:
    return float("yes" in turn.message.text)


class EachTurn(Quiz):
    """The same rewards as `Steps`, one turn at a time."""

    @reward(weight=2.0, per="turn")
    async def right(self, turn: Turn, task: Any) -> Score:
        said = "yes" in turn.message.text
        return Score(float(said), {"words": len(turn.message.text.split())}, "said it" if said else "")

    @reward(per="turn")
    def ending(self, trajectory: Any) -> list[float]:
        texts = [turn.message.text for turn in trajectory.turn_messages]
        return [2.0 * (text == "end" and place == len(texts) - 1) for place, text in enumerate(texts)]

    def reply(self, trajectory: Any) -> str | None:
        return "more" if trajectory.turns < 3 else None


def test_a_reward_per_turn_is_asked_about_each_turn() -> None:
    said = ("yes", "no", "end")
    alone, listed = (play(cls, FakeEngine(*said)).score for cls in (EachTurn, Steps))
    assert (alone.value, alone.turns) == (listed.value, listed.turns) == (4.0, [2.0, 0.0, 2.0])
    assert alone.parts["words"] == 3.0 and alone.why == "right: turn 1: said it"
    function = play(Quiz, FakeEngine("yes"), rewards=[reward_term("yes", yes, 0.5)]).score
    assert (function.value, function.turns) == (0.5, [0.5])


def test_a_turn_has_its_message_and_the_answers_to_it() -> None:
    messages = [Message("user", "?"), Message("assistant", "an example"), Message("user", "now you")]
    played = [Message("assistant", "a"), Message("tool", "1"), Message("user", "go on"), Message("assistant", "b")]
    turns = Trajectory(Task(messages), [*messages, *played]).turn_messages
    assert [(turn.index, turn.message.text) for turn in turns] == [(0, "a"), (1, "b")]
    assert [[each.text for each in turn.answers] for turn in turns] == [["1", "go on"], []]
    assert Trajectory(Task(messages), messages).turn_messages == []


def test_a_turn_that_could_not_be_judged_leaves_the_rollout_unknown() -> None:
    def unsure(turn: Turn) -> float | None:
        return None if turn.index == 1 else 1.0

    class Unsure(Quiz):
        reply = Steps.reply

    terms = [reward_term("unsure", unsure)]
    score = play(Unsure, FakeEngine("a", "b", "c"), rewards=terms).score
    assert score.value is None and score.turns == [] and "turn 2: it returned None" in score.why
    assert play(Unsure, FakeEngine("a", "b", "c"), rewards=terms, on_invalid_reward="zero").score.value == 0.0


def test_wrong_rewards_per_turn_are_refused() -> None:
    with pytest.raises(EnvironmentDefinitionError, match=r"@reward\(per='step'\): it may be 'turn'"):
        reward(per="step")  # type: ignore[call-overload]

    def mixed(turn: Turn, trajectories: Any) -> float:
        return 0.0

    with pytest.raises(SignatureError, match="'turn' of one episode and 'trajectories' of a whole group"):
        check_signature(mixed, "rewards", "reward mixed")

    def nested(turn: Turn) -> Score:
        return Score(None, turns=[1.0])

    @reward(per="turn")
    def number(trajectory: Any) -> float:
        return 1.0

    @reward(per="turn")
    def short(trajectory: Any) -> list[float]:
        return [1.0, 2.0]

    words = {
        nested: "asked about one turn",
        number: "name `turn` to be called once",
        short: "2 turns, but the model had 1",
    }
    for function, expected in words.items():
        with pytest.raises(RewardError, match=expected):
            play(Quiz, rewards=[reward_term("wrong", function)])


# --- turn_return ------------------------------------------------------------------------------------------------------


def returns_of(turn_rewards: Any, gamma: float) -> list[list[float]]:
    return [
        [sum(gamma ** (later - turn) * own[later] for later in range(turn, len(own))) for turn in range(len(own))]
        for own in turn_rewards
    ]


def by_loops(turn_rewards: list[list[float]], gamma: float, scale: bool, eps: float = 1e-4) -> list[list[float]]:
    """The advantage by turn, from its formula, with plain loops."""
    returns = returns_of(turn_rewards, gamma)
    found = []
    for place, own in enumerate(returns):
        peers = returns[:place] + returns[place + 1 :]
        row = []
        for turn, value in enumerate(own):
            last = min(turn, max(map(len, peers)) - 1)  # the last turn, up to this one, that another rollout has
            others = [peer[last] for peer in peers if len(peer) > last]
            spread = np.std([value, *others], ddof=1)
            difference = (1 - 1 / len(returns)) * (value - np.mean(others))
            row.append(difference / (spread + eps if scale else 1.0) if spread > 1e-9 else 0.0)
        found.append(row)
    return found


@pytest.mark.parametrize("scale", [False, True], ids=["differences", "scaled"])
@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
def test_turn_return_is_the_formula(gamma: float, scale: bool) -> None:
    rewards = [[1.0, 0.0, 2.0], [0.5], [0.0, -1.0], [0.25, 3.0, 0.5, 1.0], [0.1, 0.2]]
    found = turn_return(rewards, gamma=gamma, scale=scale)
    for ours, wanted in zip(found, by_loops(rewards, gamma, scale), strict=True):
        assert ours.tolist() == pytest.approx(wanted, abs=1e-12)
    assert found[3][3] != 0  # no other rollout has a fourth turn: it is compared with the third ones
    whole = turn_return([[1.0], [0.0]], scale=False)
    assert [float(each) for each in whole] == group_mean([1.0, 0.0]).tolist()  # of one turn: as without turns
    assert turn_return([]) == []
    for scale in (True, False):
        assert [own.tolist() for own in turn_return([[], []], scale=scale)] == [[], []]
        assert [own.tolist() for own in turn_return([[], [1.0]], scale=scale)] == [[], [0.0]]
    assert [own.tolist() for own in turn_return([[1.0, 2.0]])] == [[0.0, 0.0]]  # nothing to compare with
    flat = turn_return([[1.0, 2.0], [1.0, 2.0], [1.0]], gamma=0.0, eps=0.0)
    assert [own.tolist() for own in flat] == [[0.0, 0.0], [0.0, 0.0], [0.0]]  # not 0 / 0
    for wrong in ({"gamma": 1.5}, {"eps": -1.0}):
        with pytest.raises(ConfigError, match=r"--advantage\."):
            turn_return([[1.0]], **wrong)


def test_credit_by_turn_has_the_true_gradient_and_less_variance() -> None:
    """All groups of two rollouts with two turns and two actions, with their probabilities: no sampling. The expected
    policy gradient is (J - 1) / J times that of the expected reward, which finite differences give.
    """
    logits = np.array([0.4, -0.7])  # of action 1, in turn 0 and in turn 1
    actions = list(itertools.product((0, 1), repeat=2))

    def earned(taken: tuple[int, int]) -> list[float]:
        return [5.0 * taken[0], 3.0 * taken[1] + 2.0 * taken[0] * taken[1]]

    def probability(taken: tuple[int, int], at: np.ndarray) -> float:
        ones = 1 / (1 + np.exp(-at))
        return float(np.prod([one if action else 1 - one for action, one in zip(taken, ones, strict=True)]))

    def value(at: np.ndarray) -> float:
        return sum(probability(taken, at) * sum(earned(taken)) for taken in actions)

    def moments(advantage: Any) -> tuple[np.ndarray, float]:
        mean, square = np.zeros(2), 0.0
        for first, second in itertools.product(actions, repeat=2):
            weight = probability(first, logits) * probability(second, logits)
            found = advantage([earned(first), earned(second)])
            scores = [np.array(taken) - 1 / (1 + np.exp(-logits)) for taken in (first, second)]
            gradient = sum(np.array(own) * score for own, score in zip(found, scores, strict=True)) / 2
            mean += weight * gradient
            square += weight * float(gradient @ gradient)
        return mean, square - float(mean @ mean)

    def by_turn(rewards: Any) -> Any:
        return [each.tolist() for each in turn_return(rewards, scale=False)]

    def by_sum(rewards: Any) -> Any:
        return [[each, each] for each in group_mean([sum(own) for own in rewards]).tolist()]

    def swapped(rewards: Any) -> Any:
        return [own[::-1] for own in by_turn(rewards)]

    step = 1e-6
    true = np.array([(value(logits + step * unit) - value(logits - step * unit)) / (2 * step) for unit in np.eye(2)])
    (turn, turn_variance), (whole, whole_variance), (wrong, _) = map(moments, (by_turn, by_sum, swapped))
    assert turn == pytest.approx(true / 2, abs=1e-8) and whole == pytest.approx(true / 2, abs=1e-8)
    assert not np.allclose(wrong, true / 2, atol=1e-2)  # control
    assert turn_variance < 0.8 * whole_variance


def by_present(turn_rewards: Any, gamma: float) -> list[list[float]]:
    """The control: a turn minus the mean of those that are there, and 0 for the only one."""
    returns = returns_of(turn_rewards, gamma)
    columns = [[own[turn] for own in returns if len(own) > turn] for turn in range(max(map(len, returns)))]
    return [[value - float(np.mean(columns[turn])) for turn, value in enumerate(own)] for own in returns]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("gamma", [0.0, 0.6, 1.0])
def test_credit_by_turn_has_the_true_gradient_where_rollouts_end_early(size: int, gamma: float) -> None:
    """All groups over a tree of up to three turns, in which most episodes end early: no sampling. The gradient is that
    of sum_k E[G_k log pi(turn k)], with gamma 1 of the expected reward.
    """
    logits = np.array([-1.2, -0.4, 0.3])  # of going on, of going on, of the good action
    ones = 1 / (1 + np.exp(-logits))
    paths = [[0], [1, 0], [1, 1, 0], [1, 1, 1]]
    rewards = [[0.3], [0.1, 0.7], [0.1, -0.2, 0.5], [0.1, -0.2, 4.0]]

    def probability(path: list[int], at: np.ndarray = logits) -> float:
        own = 1 / (1 + np.exp(-at[: len(path)]))
        return float(np.prod(np.where(path, own, 1 - own)))

    def gradient(path: list[int], advantages: Any) -> np.ndarray:
        return np.pad((path - ones[: len(path)]) * np.array(advantages), (0, 3 - len(path)))

    def expected(advantage: Any) -> np.ndarray:
        total = np.zeros(3)
        for group in itertools.product(range(4), repeat=size):
            weight = np.prod([probability(paths[each]) for each in group])
            found = advantage([rewards[each] for each in group])
            total += weight * sum(gradient(paths[each], own) for each, own in zip(group, found, strict=True)) / size
        return total

    true = sum(
        probability(path) * gradient(path, own) for path, own in zip(paths, returns_of(rewards, gamma), strict=True)
    )
    true = (1 - 1 / size) * np.array(true)
    assert expected(lambda of: [own.tolist() for own in turn_return(of, gamma=gamma, scale=False)]) == pytest.approx(
        true
    )
    assert not np.allclose(expected(lambda of: by_present(of, gamma)), true, rtol=0.1)  # control
    if gamma == 1.0:
        whole = expected(
            lambda of: [[a] * len(own) for a, own in zip(group_mean([*map(sum, of)]).tolist(), of, strict=True)]
        )
        assert whole == pytest.approx(true)

        def value(at: np.ndarray) -> float:
            return sum(probability(path, at) * sum(own) for path, own in zip(paths, rewards, strict=True))

        step = 1e-6
        slopes = [(value(logits + step * unit) - value(logits - step * unit)) / (2 * step) for unit in np.eye(3)]
        assert (1 - 1 / size) * np.array(slopes) == pytest.approx(true, abs=1e-8)


# --- from turns to tokens ---------------------------------------------------------------------------------------------


def test_the_tokens_of_each_turn_get_its_advantage() -> None:
    said = [("yes", "no", "end"), ("no", "yes"), ("no", "no", "no")]
    episodes = [play(Steps, FakeEngine(*texts), order=(0, place)) for place, texts in enumerate(said)]
    cut = episodes[2].trajectory
    cut.status = Status.TRUNCATED  # in the baseline, and not trained
    unjudged = episodes[0]._replace(score=Score(None))
    group = Group(0, episodes[0].task, (*episodes, unjudged))
    algorithm = GRPO._replace(advantage=turn_return)
    rows = prepare_rl_batch([group], algorithm, RLSettings(1), 0).batch.rows
    wanted = by_loops([episode.score.turns for episode in episodes], 1.0, True)
    for row, episode, numbers in zip(rows[:2], episodes, wanted, strict=False):
        (segment,) = episode.trajectory.segments
        assert [turn for turn, _ in segment.turns] == list(range(episode.trajectory.turns))
        ends = [start for _, start in segment.turns[1:]] + [len(row.tokens)]
        for (turn, start), end in zip(segment.turns, ends, strict=True):
            live = [a for a, weight in zip(row.advantages[start:end], row.loss_mask[start:end], strict=True) if weight]
            assert live and live == pytest.approx([numbers[turn]] * len(live))
    assert all(not weight for row in rows[2:] for weight in row.loss_mask)
    assert all(not advantage for row in rows[2:] for advantage in row.advantages)
    assert all(not a for row in rows for a, weight in zip(row.advantages, row.loss_mask, strict=True) if not weight)


def episode_of(*trajectories: Trajectory) -> Episode:
    return Episode((0, 0), trajectories[0].task, list(trajectories), Score(1.0), {})


def told(texts: str, *segments: Segment, role: str = "") -> Trajectory:
    task = Task("?")
    messages = [*task.messages, *(Message("assistant", text) for text in texts)]
    return Trajectory(task, messages, list(segments), Status.COMPLETED, role=role)


def segment(mask: str, *turns: tuple[int, int]) -> Segment:
    weights = [float(each) for each in mask]
    return Segment(
        [5] * len(mask), weights, [-0.5 * each for each in weights], [int(each) - 1 for each in weights], [*turns]
    )


def turns_of(*trajectories: Trajectory) -> list[list[tuple[int, int]]]:
    return [sample.turns for sample in episode_samples(episode_of(*trajectories), 0, 0)]


def test_segments_branches_and_older_files_have_the_right_turns() -> None:
    # Two segments, and a reply of the environment between the replies of the model, which is the second turn.
    assert turns_of(told("abc", segment("011", (0, 1)), segment("00011", (2, 3)))) == [[(0, 1)], [(2, 3)]]
    # A file without turns: each run of live tokens is a turn; the first replies may be those of another conversation.
    assert turns_of(told("ab", segment("0110"), segment("001"))) == [[(0, 1)], [(1, 2)]]
    assert turns_of(told("abc", segment("0011011"))) == [[(1, 2), (2, 5)]]
    # A branch left the judged conversation after its first reply: its later replies get the credit from there on.
    left = told("axy", segment("0101011", (0, 1), (1, 3), (2, 5)))
    assert turns_of(left, told("abc", segment("0001011", (1, 3), (2, 5)))) == [
        [(0, 1), (1, 3), (1, 5)],
        [(1, 3), (2, 5)],
    ]
    # A conversation of its own gets the credit of the whole.
    assert turns_of(told("xy", segment("0101", (0, 1), (1, 3))), told("b", segment("01", (0, 1))))[0] == [
        (0, 1),
        (0, 3),
    ]


def test_wrong_numbers_by_turn_are_named() -> None:
    def short(turn_rewards: Any) -> Any:
        return [[1.0] for _ in turn_rewards]

    def unnamed(rewards: Any) -> Any:
        return [[1.0, 2.0] for _ in rewards]

    turns = [[0.5, 0.5], [0.0, 0.0]]
    with pytest.raises(TrainingError, match="one for each turn: of 2, 2 numbers"):
        group_advantages(short, [1.0, 0.0], turn_rewards=turns)
    with pytest.raises(TrainingError, match="unnamed got 2 rewards and returned"):
        group_advantages(unnamed, [1.0, 0.0], turn_rewards=turns)
    assert group_advantages(turn_return, [1.0, None, 0.0], turn_rewards=[[1.0], [], [0.0]])[1] == 0.0
    assert group_advantages(turn_return, [1.0, 0.0], turn_rewards=[[1.0], []]) == [0.0, []]
