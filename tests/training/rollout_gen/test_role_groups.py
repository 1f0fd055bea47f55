"""Each role of a prompt is a group of its own: rewards, baselines, filters, samples, metrics. Prompts are counted."""

from __future__ import annotations

import itertools
import json
import statistics

import pytest
import trio
from rollouts_notes.manager import NO_ENGINE, AsyncRolloutManager
from rollouts_notes.rows import RolloutConfig

from rollouts.env.checks import reward_term
from rollouts.evaluate import Evaluation, evaluate, evaluation_metrics
from rollouts.runs.folder import episode_records
from rollouts.training.algorithms.advantages import group_mean
from rollouts.training.algorithms.algorithm import Algorithm, Term
from rollouts.training.algorithms.losses import ppo_clip
from rollouts.training.datasets.buffer import DataBuffer
from rollouts.training.filters import check_reward_nonzero_std
from rollouts.training.loops.rl_batch import RLSettings, prepare_rl_batch
from rollouts.training.rollout_gen.groups import Group, NamedFilter, group_samples, group_scorer, role_groups
from rollouts.training.rollout_gen.steps import RolloutStatistics, environment_metrics, rollout_metrics
from rollouts.types import Episode, Message, RoleResult, Score, Segment, Status, Task, Trajectory, mean_score

MEAN = Algorithm(group_mean, "token_mean", (Term(ppo_clip, 1.0),))
CONFIG = RLSettings(1, response_tokens_max=8)
TASK = Task("?")


def conversation(task: Task, role: str, sampled: int) -> Trajectory:
    mask = [0.0] + [1.0] * sampled
    segment = Segment([7] * len(mask), mask, [-1.0 * live for live in mask], [0 if live else -1 for live in mask])
    messages = [Message("user", "?"), Message("assistant", role)]
    counts = {"turns": 1.0, "tool_calls": 0.0, "tool_failures": 0.0}
    return Trajectory(task, messages, [segment], Status.COMPLETED, counts, role=role)


def episode(order: tuple[int, int], task: Task, **rewards: float | None) -> Episode:
    """One conversation of each role; the first role says one token, the next one two."""
    own = [conversation(task, role, place + 1) for place, role in enumerate(rewards)]
    roles = tuple(
        RoleResult(role, Score(value, {"part": value}, "", {"part": 1.0}), {"turns": 1.0, f"metric/{role}": 1.0}, place)
        for place, (role, value) in enumerate(rewards.items())
    )
    return Episode(order, task, own, mean_score(roles), {"turns": 2.0}, roles=roles)


def failed(order: tuple[int, int], task: Task) -> Episode:
    """It failed before the environment was made, so its roles are unknown."""
    trajectory = Trajectory(task, task.messages, status=Status.ENVIRONMENT_ERROR, error="no memory")
    return Episode(order, task, [trajectory], Score(None, {}, "no memory"), {})


def group_of(seller: list[float | None], buyer: list[float | None], task: Task = TASK, number: int = 0) -> Group:
    pairs = enumerate(zip(seller, buyer, strict=True))
    return Group(number, task, tuple(episode((number, g), task, seller=a, buyer=b) for g, (a, b) in pairs))


def test_a_reward_of_one_role_does_not_move_the_other_roles_baseline():
    def advantages(buyer: list[float | None]) -> dict[str, list[float]]:
        groups = role_groups(group_of([1.0, 0.0, 0.5, 0.0], buyer))
        prepared = prepare_rl_batch(groups, MEAN, CONFIG, 0)
        assert [group.role for group in groups] == ["seller", "buyer"]
        assert {row.group_index for row in prepared.batch.rows} == {0, 1}
        return {"seller": prepared.advantages[:4], "buyer": prepared.advantages[4:]}

    low, high = advantages([0.0, 1.0, 0.0, 0.0]), advantages([50.0, 90.0, None, 10.0])
    assert low["seller"] == high["seller"] == pytest.approx([0.625, -0.375, 0.125, -0.375])
    assert low["buyer"] == pytest.approx([-0.25, 0.75, -0.25, -0.25])
    assert high["buyer"] == pytest.approx([0.0, 40.0, 0.0, -40.0])
    pooled = statistics.fmean([1.0, 0.0, 0.5, 0.0, 0.0, 1.0, 0.0, 0.0])
    assert low["seller"][0] != pytest.approx(1.0 - pooled), "one baseline for both roles would give this"


def test_samples_have_the_reward_of_their_role_and_say_whose_they_are():
    samples = group_samples(role_groups(group_of([1.0, 0.0], [5.0, 6.0])))
    assert [s.reward for s in samples] == [1.0, 0.0, 5.0, 6.0]
    assert [s.metadata["role"] for s in samples] == ["seller"] * 2 + ["buyer"] * 2
    assert [s.rollout_index for s in samples] == [0, 1, 2, 3] and [s.group_index for s in samples] == [0, 0, 1, 1]
    assert [sum(s.loss_mask) for s in samples] == [1.0, 1.0, 2.0, 2.0]


def test_selectors_and_pairs_choose_within_a_role():
    groups = role_groups(group_of([1.0, 0.0], [5.0, 6.0]))
    selected = prepare_rl_batch(
        groups, MEAN._replace(select=lambda rewards: [reward >= 1 for reward in rewards]), CONFIG, 0
    )
    assert [any(row.loss_mask) for row in selected.batch.rows] == [True, False, True, True]
    best_and_worst = MEAN._replace(
        pairs=lambda rewards: [(int(rewards.argmax()), int(rewards.argmin()))],
        aggregation="pair_mean",
    )
    paired = prepare_rl_batch(groups, best_and_worst, CONFIG, 0)
    assert [(row.pair_index, row.rollout_index) for row in paired.batch.rows] == [(0, 0), (0, 1), (1, 3), (1, 2)]


def test_an_episode_that_failed_before_it_had_roles_is_in_the_group_of_each():
    task = Task("?")
    whole = Group(0, task, (episode((0, 0), task, seller=1.0, buyer=2.0), failed((0, 1), task)))
    groups = role_groups(whole)
    assert [(group.role, group.rewards) for group in groups] == [("seller", [1.0, None]), ("buyer", [2.0, None])]
    only_failed = Group(0, task, (failed((0, 0), task), failed((0, 1), task)))
    assert role_groups(only_failed) == [only_failed]


def manager(rewards, filters=(), **changed) -> AsyncRolloutManager:
    """A manager whose episodes get the next rewards (seller, buyer) of the prompt."""

    async def play(job, session, inference):
        await trio.lowlevel.checkpoint()
        group, rollout = job.order
        seller, buyer = rewards[group % len(rewards)]
        return episode(job.order, job.task, seller=seller[rollout], buyer=buyer[rollout])

    config = RolloutConfig(2, 2, **changed)
    buffer = DataBuffer([Task("a"), Task("b"), Task("c")], shuffle=False)
    return AsyncRolloutManager(buffer, config, play=play, inference=NO_ENGINE, filters=filters)


FLAT = [NamedFilter("flat", check_reward_nonzero_std, {})]


def test_a_prompt_is_trained_if_a_filter_keeps_one_of_its_roles():
    rewards = [((1.0, 0.0), (3.0, 3.0)), ((1.0, 1.0), (2.0, 2.0)), ((0.0, 1.0), (0.0, 1.0))]
    own = manager(rewards, FLAT, refill=True)
    step = trio.run(own.generate_batch)
    assert [(group.number, group.role, group.dropped) for group in step.groups] == [
        (0, "seller", None),
        (0, "buyer", "flat"),
        (1, "seller", "flat"),
        (1, "buyer", "flat"),
        (2, "seller", None),
        (2, "buyer", None),
    ]
    assert own.statistics == RolloutStatistics(begun=3, kept=2, dropped=1), "prompts are counted, not roles"
    metrics = rollout_metrics(step.groups)
    assert metrics["group/drop/flat"] == 3.0 and metrics["group/kept_frac"] == 0.5
    assert step.metrics["group/refilled"] == 1.0


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_checkpoint_of_unfinished_prompts_gives_the_same_roles(staleness):
    rewards = [((float(n), 0.0), (0.0, float(n))) for n in range(1, 9)]

    async def two_steps(first: AsyncRolloutManager, second: AsyncRolloutManager) -> list[list[Group]]:
        steps = []
        async with first as own:
            steps.append((await own.generate_batch(wanted=2)).groups)
            with trio.move_on_after(0.01):
                await trio.sleep_forever()  # the next step is prefetched
            async with own.pause():
                state, data = own.state_dict(), own.data_buffer.state_dict()
        state = json.loads(json.dumps(state))
        second.data_buffer.load_state_dict(data)
        second.load_state_dict(state)
        async with second as own:
            steps.append((await own.generate_batch(wanted=1)).groups)
        return steps

    made = [manager(rewards, FLAT, staleness=staleness) for _ in range(2)]
    steps = trio.run(two_steps, *made)
    assert [[(g.number, g.role) for g in groups] for groups in steps] == [
        list(itertools.product((0, 1), ("seller", "buyer"))),
        list(itertools.product((2, 3), ("seller", "buyer"))),
    ]
    assert made[1].statistics.kept == 4 and [g.rewards for g in steps[1]][:2] == [[3.0, 0.0], [0.0, 3.0]]


def test_a_reward_of_a_whole_group_sees_one_role_at_a_time():
    seen = []

    def rank(trajectories):
        seen.append([trajectory.role for trajectory in trajectories])
        return [100.0 * len(trajectories)] * len(trajectories)

    score = group_scorer([reward_term("rank", rank)], "drop", timeout_seconds=5.0)
    task = Task("?")
    whole = [episode((0, 0), task, seller=1.0, buyer=2.0), failed((0, 1), task), episode((0, 2), task, seller=3.0)]
    (scored,) = trio.run(score, [whole])
    assert seen == [["seller", "seller"], ["buyer"]]
    assert [[r.score.value for r in each.roles] for each in scored] == [[201.0, 102.0], [], [203.0]]
    assert scored[0].score.value == 151.5 and scored[1] == whole[1]
    seen.clear()
    (split,) = trio.run(score, [role_groups(Group(0, task, tuple(whole)))[0].episodes])
    assert [each.score.value for each in split] == [201.0, None, 203.0] and seen == [["seller", "seller"]]


def test_each_role_is_a_group_of_a_reward_of_groups():
    seen = []

    def rank(groups):
        seen.append([[trajectory.role for trajectory in group] for group in groups])
        return [[float(len(seen[0]))] * len(group) for group in groups]

    score = group_scorer([reward_term("rank", rank)], "drop", timeout_seconds=5.0)
    whole = [episode((0, 0), TASK, seller=1.0, buyer=2.0), episode((0, 1), TASK, seller=3.0)]
    first, second = trio.run(score, [whole, [episode((1, 0), TASK, seller=0.0)]])
    assert seen == [[["seller", "seller"], ["buyer"], ["seller"]]]
    assert [[r.score.value for r in each.roles] for each in (*first, *second)] == [[4.0, 5.0], [6.0], [3.0]]


def test_metrics_by_role_and_by_environment():
    game, other = Task("?", env="game"), Task("?", env="sums")
    groups = role_groups(group_of([1.0, 0.0], [4.0, 4.0]))
    metrics = rollout_metrics(groups)
    assert metrics["reward/mean"] == 2.25
    assert {name: value for name, value in metrics.items() if name.startswith("role/")} == {
        "role/seller/reward": 0.5,
        "role/seller/reward_part/part": 0.5,
        "role/seller/metric/seller": 1.0,
        "role/seller/kept_frac": 1.0,
        "role/seller/zero_std_frac": 0.0,
        "role/seller/tokens": 1.0,
        "role/seller/turns": 1.0,
        "role/buyer/reward": 4.0,
        "role/buyer/reward_part/part": 4.0,
        "role/buyer/metric/buyer": 1.0,
        "role/buyer/kept_frac": 1.0,
        "role/buyer/zero_std_frac": 1.0,
        "role/buyer/tokens": 2.0,
        "role/buyer/turns": 1.0,
    }
    alone = Group(1, other, (failed((1, 0), other),))
    several = [*role_groups(group_of([1.0, 0.0], [4.0, 4.0], game)), alone]
    assert rollout_metrics(several)["env/game/role/buyer/reward"] == 4.0
    assert environment_metrics(several, {})["env/game/share"] == 0.5, "a prompt counts once"


def test_an_evaluation_has_the_numbers_of_each_role():
    async def play(job, session, inference):
        await trio.lowlevel.checkpoint()
        if job.task.env == "sums":
            return failed(job.order, job.task)
        return episode(job.order, job.task, seller=float(job.order[0]), buyer=1.0)

    async def evaluated(tasks):
        return await evaluate(tasks, play=play, inference=NO_ENGINE)

    numbers, episodes = trio.run(evaluated, [Task("a"), Task("b"), Task("c")])
    assert (numbers["tasks"], numbers["episodes"], numbers["judged"]) == (3, 3, 3)
    assert numbers["reward_mean"] == 1.0 and numbers["parts"] == {"part": 1.0}
    assert [numbers["roles"][role]["reward_mean"] for role in ("seller", "buyer")] == [1.0, 1.0]
    assert numbers["roles"]["seller"]["reward_stderr"] == pytest.approx((1 / 3) ** 0.5)
    assert numbers["roles"]["buyer"]["pass@k"] == {"1": 1.0} and numbers["turns_mean"] == 1.0
    summary = Evaluation(numbers, numbers).as_dict()
    metrics = evaluation_metrics(summary)
    assert metrics["eval/role/seller/reward_mean"] == 1.0 and metrics["eval/role/buyer/reward_part/part"] == 1.0
    several, _ = trio.run(evaluated, [Task("a", env="game"), Task("b", env="sums")])
    metrics = evaluation_metrics(Evaluation(several, several).as_dict())
    assert metrics["eval/game/role/seller/reward_mean"] == 0.0 and "eval/sums/reward_mean" not in metrics
    lines = list(episode_records(episodes[2]))
    assert [(line["role"], line["reward"], len(line["segments"])) for line in lines] == [
        ("seller", 2.0, 1),
        ("buyer", 1.0, 1),
    ]
    assert ["metric/seller" in line["metrics"] for line in lines] == [True, False]
    assert "role" not in next(episode_records(failed((0, 0), Task("?")))), "a line without roles is as before"
