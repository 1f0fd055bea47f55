"""Carried-over episodes with the tiny model and its engine: the agent loop, the template, tools, several versions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import trio
from rollouts_notes.manager import AsyncRolloutManager
from rollouts_notes.rows import RolloutConfig

from rollouts.agent.episode import run_episode
from rollouts.agent.model import EpisodeLimits
from rollouts.chat.format import load_chat_format
from rollouts.env import reward
from rollouts.inference.embedded.hf import HFInference
from rollouts.models.futures import TorchThread
from rollouts.models.loading import load_hf_model, load_tokenizer
from rollouts.training.datasets.buffer import DataBuffer
from rollouts.types import Episode, Task


class Talk:
    """Two turns of small talk, so that histories, sessions and budgets go over a turn."""

    open = 0

    def setup(self, task: Task) -> None:
        Talk.open += 1

    def close(self) -> None:
        Talk.open -= 1

    def reply(self, trajectory: Any) -> str | None:
        return "Go on." if trajectory.turns < 2 else None

    @reward
    def said(self, trajectory: Any) -> float:
        return float(trajectory.sampled_count)


class Training:
    """As much of a training backend as the engine may touch: the weights stay, their version does not."""

    def __init__(self, model: Any) -> None:
        self.model, self.version, self.thread = model, 0, TorchThread()


@pytest.fixture(scope="module")
def parts() -> Any:
    model = load_hf_model("tiny", dtype="float32", device="cpu")
    return model, load_chat_format(load_tokenizer("tiny"))


def play_steps(parts: Any, factor: float, steps: int) -> tuple[dict[tuple[int, int], Episode], int]:
    model, chat = parts
    training = Training(model)
    limits = EpisodeLimits(max_tokens=60, max_turns=3, temperature=1.3)

    async def main() -> Any:
        episodes: dict[tuple[int, int], Episode] = {}
        offsets = 0
        async with HFInference(model, training) as engine:
            generate = engine.generate

            async def counted(request: Any) -> Any:
                nonlocal offsets
                offsets += request.offset > 0
                return await generate(request)

            engine.generate = counted

            async def play(job: Any, session: str, inference: Any) -> Episode:
                return await run_episode(
                    job.task, make_env=Talk, chat=chat, inference=inference, limits=limits, rewards=[],
                    session=session, order=job.order, seed=1,
                )  # fmt: skip

            buffer = DataBuffer([f"What is {n} * {n + 3}?" for n in range(40)], seed=0)
            config = RolloutConfig(2, 4, factor, reward_fn=lambda sample: float(len(sample.tokens)))
            async with AsyncRolloutManager(buffer, config, play=play, inference=engine) as manager:
                for _ in range(steps):
                    step = await manager.generate_batch()
                    assert engine.statistics().open_sessions <= 8
                    episodes |= {e.order: e for g in step.groups for e in g.episodes}
                    training.version += 1
            assert engine.statistics().open_sessions == 0
        return episodes, offsets

    found: tuple[dict[tuple[int, int], Episode], int] = trio.run(main)
    training.thread.close()
    return found


@pytest.mark.slow
def test_streams_are_those_of_an_unbroken_generation(parts):
    carried, offsets = play_steps(parts, 2.0, 5)
    whole, none = play_steps(parts, 1.0, 8)
    assert offsets > 0 and none == 0
    shared = set(carried) & set(whole)
    assert len(shared) >= 24 and Talk.open == 0
    broken = 0
    for order in sorted(shared):
        found, expected = carried[order].trajectory, whole[order].trajectory
        assert carried[order].status is whole[order].status
        for one, other in zip(found.segments, expected.segments, strict=True):
            assert (one.tokens, one.loss_mask) == (other.tokens, other.loss_mask)
            assert torch.allclose(torch.tensor(one.logprobs), torch.tensor(other.logprobs), atol=1e-4)
            live = [v for v, weight in zip(one.versions, one.loss_mask, strict=True) if weight > 0]
            assert live == sorted(live) and -1 not in live
            broken += len(set(live)) > 1
        assert found.messages == expected.messages and found.sampled_count <= 60
    assert broken > 0, "some reply was sampled by several versions"


def test_at_factor_one_one_seed_is_one_result(parts):
    first, second = play_steps(parts, 1.0, 2), play_steps(parts, 1.0, 2)
    for order, episode in first[0].items():
        assert episode.trajectory == second[0][order].trajectory and episode.score == second[0][order].score
