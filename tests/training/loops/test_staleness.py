"""The age of tokens, and the masking of old ones. With staleness 0, the loop equals one written by hand."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import trio
from rollouts_notes.manager import AsyncRolloutManager
from rollouts_notes.rows import RolloutConfig

from rollouts.agent.episode import run_episode
from rollouts.agent.model import EpisodeLimits
from rollouts.chat.format import load_chat_format
from rollouts.env import reward
from rollouts.env.mixing import env_term
from rollouts.errors import ConfigError
from rollouts.inference.base import WeightUpdate
from rollouts.inference.embedded.hf import HFInference
from rollouts.models.loading import load_tokenizer
from rollouts.training.algorithms.algorithm import Stage
from rollouts.training.algorithms.recipes import DPO, GRPO, RFT
from rollouts.training.algorithms.selection import top
from rollouts.training.backends.torch import create_torch_backend
from rollouts.training.datasets.buffer import DataBuffer
from rollouts.training.loops.rl import train_rl
from rollouts.training.loops.rl_batch import RLSettings, drop_stale, prepare_rl_batch
from rollouts.training.rollout_gen.groups import Group
from rollouts.training.weights.sync import WeightSyncManager
from rollouts.types import Episode, Message, Sample, Score, Segment, Status, Task, Trajectory


def sample(versions: list[int], mask: list[float] | None = None) -> Sample:
    live = mask or [float(version >= 0) for version in versions]
    length = len(versions)
    return Sample(tokens=[1] * length, loss_mask=live, rollout_log_probs=[-1.0] * length, policy_versions=versions)


def test_lags_are_counted_in_steps_not_in_optimizer_steps():
    """Two minibatches a step: versions go up by two."""
    fresh = drop_stale([sample([-1, 8, 6, 4, 2])], [2, 4, 6, 8], 2)
    assert [s.loss_mask for s in fresh.samples] == [[0.0, 1.0, 1.0, 1.0, 0.0]]
    assert fresh.metrics == {"staleness/mean": 1.0, "staleness/max": 2.0, "staleness/dropped": 1.0}


def test_without_a_bound_all_are_trained_on():
    given = [sample([-1, 8, 6, 4, 2])]
    fresh = drop_stale(given, [4, 6, 8], None)
    assert fresh.samples == given
    assert fresh.metrics == {"staleness/mean": 1.5, "staleness/max": 3.0, "staleness/dropped": 0.0}


def test_what_is_not_live_or_of_an_unknown_version_has_no_lag():
    masked, unknown = sample([0, 0], mask=[0.0, 0.0]), Sample(tokens=[1, 2], loss_mask=[0.0, 1.0])
    fresh = drop_stale([masked, unknown, sample([5, 5])], [1, 5], 0)
    assert [s.loss_mask for s in fresh.samples] == [[0.0, 0.0], [0.0, 1.0], [1.0, 1.0]]
    assert fresh.metrics == {"staleness/mean": 0.0, "staleness/max": 0.0, "staleness/dropped": 0.0}


def test_without_live_tokens_there_is_no_lag():
    fresh = drop_stale([sample([0, 0], mask=[0.0, 0.0])], [1], 0)
    assert fresh.metrics == {"staleness/mean": 0.0, "staleness/max": 0.0, "staleness/dropped": 0.0}


def test_arguments_are_not_changed():
    given = sample([0, 5])
    drop_stale([given], [1, 5], 0)
    assert given.loss_mask == [1.0, 1.0]


@pytest.mark.parametrize(("staleness", "every", "lag"), [(0, 1, None), (0, 4, None), (1, 1, 1), (2, 3, 4)])
def test_the_bound(staleness, every, lag):
    assert RLSettings(1, every, staleness=staleness).lag_max == lag


class Talk:
    """A reward that every reply gets another of."""

    @reward
    def said(self, trajectory: Any) -> float:
        return sum(map(ord, trajectory.last_text)) % 97 / 97


def run(body: Any) -> Any:
    """`body(backend, manager, engine, buffer)` over a fresh tiny model."""
    chat = load_chat_format(load_tokenizer("tiny"))
    limits = EpisodeLimits(max_tokens=12, max_turns=1, temperature=1.0)
    backend = create_torch_backend("tiny", 0, 3, 1e-3, 0, 4096, {"main": GRPO}, None)

    async def main() -> Any:
        async with HFInference(backend.model, backend) as engine:

            async def play(job: Any, session: str, inference: Any) -> Episode:
                return await run_episode(
                    job.task, make_env=Talk, chat=chat, inference=inference, limits=limits, rewards=[env_term()],
                    session=session, order=job.order, seed=1,
                )  # fmt: skip

            buffer = DataBuffer([f"What is {n} * {n + 3}?" for n in range(40)], seed=0)
            own = AsyncRolloutManager(buffer, RolloutConfig(2, 4), play=play, inference=engine)
            async with own:
                return await body(backend, own, engine, buffer)

    try:
        return trio.run(main), {name: weight.clone() for name, weight in backend.get_weights().wait().items()}
    finally:
        backend.close()


def test_staleness_0_is_generate_then_train_then_sync_bit_for_bit():
    async def library(backend: Any, own: Any, engine: Any, buffer: Any) -> Any:
        config = RLSettings(3, staleness=0)
        stages, syncing = [Stage(0, "main", GRPO)], WeightSyncManager([engine])
        history = await train_rl(backend, own, config, stages=stages, syncing=syncing)
        return [(line["policy/loss"], line["optim/grad_norm"]) for line in history]

    async def by_hand(backend: Any, own: Any, engine: Any, buffer: Any) -> Any:
        found = []
        for step in range(3):
            rollouts = await own.generate_batch()
            batch = prepare_rl_batch(rollouts.kept, GRPO, RLSettings(3), step).batch
            metrics = await backend.forward_backward(batch)
            result = await backend.optim_step()
            await engine.update_weights(WeightUpdate(backend.version))
            found.append((metrics["policy/loss"], result.metrics["optim/grad_norm"]))
        return found

    (history, weights), (expected, others) = run(library), run(by_hand)
    assert history == expected and len(set(history)) == 3
    assert weights.keys() == others.keys() and all((weights[name] == others[name]).all() for name in weights)


def group(*versions: int) -> Group:
    """A group of rollouts of three tokens, each sampled by one version; the first earned most."""
    task, episodes = Task("x"), []
    for index, version in enumerate(versions):
        segment = Segment([1, 2, 3, 4], [0.0, 1.0, 1.0, 1.0], [0.0, -1.0, -1.0, -1.0], [-1, *[version] * 3])
        trajectory = Trajectory(task, [Message("user", "x"), Message("assistant", "y")], [segment], Status.COMPLETED)
        episodes.append(Episode((0, index), task, [trajectory], Score(float(len(versions) - index)), {}))
    return Group(0, task, tuple(episodes))


def test_what_is_too_old_is_neither_compared_nor_selected():
    config, start_versions = RLSettings(10, staleness=1), [6, 7, 8, 9]
    batch = prepare_rl_batch([group(0, 9)], DPO, config, 9, start_versions=start_versions).batch
    assert not any(any(row.loss_mask) for row in batch.rows) and batch.denominator == 0, "one side is no pair"
    batch = prepare_rl_batch([group(0, 8, 9)], DPO, config, 9, start_versions=start_versions).batch
    assert batch.denominator == 1 and [any(row.loss_mask) for row in batch.rows] == [True, True]
    selected = RFT._replace(select=functools.partial(top, count=1))
    batch = prepare_rl_batch([group(0, 9)], selected, config, 9, start_versions=start_versions).batch
    assert batch.denominator == 3, "the best that can be trained on"


def test_loop_and_manager_must_have_one_staleness():
    manager = AsyncRolloutManager(DataBuffer(["x"]), RolloutConfig(1, staleness=2, generate_fn=lambda prompts: []))

    async def main() -> None:
        await train_rl(None, manager, RLSettings(1), stages=[Stage(0, "main", GRPO)], syncing=WeightSyncManager([]))

    with pytest.raises(ConfigError, match=r"staleness of 2 and the loop one of 0"):
        trio.run(main)
