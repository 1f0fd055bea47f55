"""Train on the calculator with GRPO, with all steps of the loop on one page. Read it from top to bottom.

    python examples/grpo_by_hand.py               # about a minute on a laptop's CPU, offline
    python examples/grpo_by_hand.py --steps 10

Each step does four things. It samples a group of rollouts for each task. It rewards every rollout and compares it with
the others of its group. It takes one gradient step. It tells the engine that the weights have changed. `rollouts run`
does the same, and adds what this page leaves out: checkpoints and resuming, a folder with every token, deadlines for
whole runs, retries, filters, KL terms, minibatches, several GPUs, and engines in other processes.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import random
import statistics
from collections.abc import Awaitable, Callable

import trio
from rollouts_calculator import Calculator
from torch import Tensor

from rollouts.agent.episode import run_episode
from rollouts.agent.model import EpisodeLimits
from rollouts.chat import ChatFormat, load_chat_format
from rollouts.env.mixing import env_term
from rollouts.inference.base import InferenceBackend, WeightUpdate
from rollouts.inference.embedded.hf import create_hf_inference
from rollouts.models.loading import load_tokenizer
from rollouts.training import create_pytorch_backend
from rollouts.training.batching import make_batch
from rollouts.training.samples import episode_samples
from rollouts.types import Episode, Task

MODEL = "tiny"  # 0.36 M parameters, part of the package
PROMPTS, ROLLOUTS = 8, 8  # tasks per step, rollouts per task
LIMITS = EpisodeLimits(max_tokens=64, max_turns=4)
Job = tuple[Task, tuple[int, int]]  # a task, and the numbers of its group and its rollout


# --- the mathematics: one loss, one advantage ---


def grpo_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip: float = 0.2) -> Tensor:
    """PPO's clipped objective [T], one value per trained token; the engine applies the mask and the denominator."""
    ratio = (logprobs - old_logprobs).exp()
    return -(ratio * advantages).minimum(ratio.clamp(1 - clip, 1 + clip) * advantages)


def group_advantages(rewards: list[float]) -> list[float]:
    """The advantage of each rollout: its reward minus the group's mean, in standard deviations; 0 if all are equal."""
    mean, deviation = statistics.fmean(rewards), statistics.stdev(rewards)
    return [(reward - mean) / (deviation + 1e-6) if deviation > 1e-6 else 0.0 for reward in rewards]


# --- rollouts: an episode is one agent in one environment ---


async def play(
    task: Task,
    order: tuple[int, int],
    *,
    engine: InferenceBackend,
    chat: ChatFormat,
    seed: int,
    temperature: float = 1.0,
) -> Episode:
    """Run one episode: the model replies, its tool calls run, and the environment's @reward judges."""

    async def make_environment() -> Calculator:
        return Calculator()

    return await run_episode(
        task,
        make_env=make_environment,
        chat=chat,
        inference=engine,
        limits=LIMITS._replace(temperature=temperature),
        rewards=[env_term()],
        session=engine.open_session(order),
        order=order,
        seed=seed,
    )


async def play_all(jobs: list[Job], player: Callable[..., Awaitable[Episode]]) -> list[Episode]:
    """Run all episodes at the same time. Results have the order of the jobs. The engine batches waiting requests."""
    episodes: list[Episode | None] = [None] * len(jobs)

    async def one(place: int) -> None:
        episodes[place] = await player(*jobs[place])

    async with trio.open_nursery() as nursery:
        for place in range(len(jobs)):
            nursery.start_soon(one, place)
    return [episode for episode in episodes if episode is not None]


def reward_of(episode: Episode) -> float:
    return episode.score.value or 0.0


# --- the loop ---


async def main(steps: int, seed: int, held_out: int) -> float:
    """Train. Returns the mean reward on the held-out tasks."""
    chat = load_chat_format(load_tokenizer(MODEL))
    backend = create_pytorch_backend(MODEL, lr=3e-4, num_steps=steps, algorithm=grpo_loss, seed=seed)
    exam = list(itertools.islice(Calculator().tasks("eval", random.Random(f"{seed}/eval")), held_out))
    asked = {task.prompt for task in exam}  # never trained on
    drawn = Calculator().tasks("train", random.Random(f"{seed}/train"))
    tasks = (task for task in drawn if task.prompt not in asked)
    numbers = itertools.count()

    async with create_hf_inference(MODEL, backend, seed) as engine:  # it samples with the trainer's own weights
        player = functools.partial(play, engine=engine, chat=chat, seed=seed)
        for step in range(steps):
            # 1. Sample: a group of rollouts for each task.
            groups = [(task, next(numbers)) for task in itertools.islice(tasks, PROMPTS)]
            jobs = [(task, (group, member)) for task, group in groups for member in range(ROLLOUTS)]
            episodes = await play_all(jobs, player)

            # 2. Compare each rollout with its group.
            rewards = [reward_of(episode) for episode in episodes]
            advantages = [
                advantage
                for start in range(0, len(episodes), ROLLOUTS)
                for advantage in group_advantages(rewards[start : start + ROLLOUTS])
            ]

            # 3. Take one gradient step. Only sampled tokens are trained on, exactly the ids that were sampled.
            samples = [
                sample
                for number, episode in enumerate(episodes)
                for sample in episode_samples(episode, group_index=number // ROLLOUTS, rollout_index=number)
            ]
            batch = make_batch(samples, advantages, aggregation="token_mean", step=step)
            for row in batch.rows:
                row.old_logprobs = row.rollout_logprobs  # the engine shares the weights: these are the old policy's
            metrics = await backend.forward_backward(batch)
            result = await backend.optim_step()

            # 4. Sync: the engine shares the weights, so it only needs their new version.
            await engine.update_weights(WeightUpdate(result.version))
            if step % 10 == 0 or step == steps - 1:
                print(f"step {step:3}  reward {statistics.fmean(rewards):.3f}  loss {metrics['policy/loss']:+.4f}")

        jobs = [(task, (next(numbers), 0)) for task in exam]
        score = statistics.fmean(map(reward_of, await play_all(jobs, functools.partial(player, temperature=0.0))))
    backend.close()
    print(f"held-out tasks, greedy: {score:.3f}")
    return score


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--held-out", type=int, default=100)
    given = parser.parse_args()
    trio.run(main, given.steps, given.seed, given.held_out)
