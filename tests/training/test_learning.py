"""A bandit with a known optimum: every online algorithm finds the best arm, and wrong ones do not (numerics, 23)."""

from __future__ import annotations

import copy

import pytest
import torch
import trio

from rollouts.plugins.signature import bind
from rollouts.training.algorithms.algorithm import KL, bind_algorithm
from rollouts.training.algorithms.kl import frozen, k1_reward, rk3_loss
from rollouts.training.algorithms.recipes import (
    CISPO,
    DAPO,
    DPO,
    DR_GRPO,
    GRPO,
    GSPO,
    IS,
    OPD,
    PPO,
    REINFORCE,
    REINFORCE_PP,
    RFT,
    RLOO,
)
from rollouts.training.algorithms.selection import reward_at_least
from rollouts.training.backends.optimizer import TrainerSettings
from rollouts.training.backends.torch import Executor, TorchBackend
from rollouts.training.backends.trainer import Trainer
from rollouts.training.batches import AuxiliaryModels
from rollouts.training.batching import part_batch
from rollouts.training.loops.rl_batch import RLSettings, complete_batch, prepare_rl_batch
from rollouts.training.rollout_gen.groups import Group
from rollouts.types import Episode, Message, Score, Segment, Status, Task, Trajectory

PROMPT, ARMS, ROLLOUTS = [1, 2, 3], 8, 16
REWARDS = [arm / (ARMS - 1) for arm in range(ARMS)]
TASK = Task("which arm?")


def pull(backend, generator):
    """Two groups of rollouts, an arm each."""
    with torch.no_grad():
        logprobs = backend.model(input_ids=torch.tensor([PROMPT])).logits[0, -1].log_softmax(-1)
    groups = []
    for number in range(2):
        arms = torch.multinomial(logprobs.exp(), ROLLOUTS, replacement=True, generator=generator).tolist()
        episodes = []
        for place, arm in enumerate(arms):
            segment = Segment([*PROMPT, arm], [0.0, 0, 0, 1], [0.0, 0, 0, float(logprobs[arm])], [-1, -1, -1, 0])
            messages = [*TASK.messages, Message("assistant", str(arm))]
            trajectory = Trajectory(TASK, messages, [segment], Status.COMPLETED)
            episodes.append(Episode((number, place), TASK, [trajectory], Score(REWARDS[arm]), {}))
        groups.append(Group(number, TASK, tuple(episodes)))
    return groups, sum(p * r for p, r in zip(logprobs.exp().tolist(), REWARDS, strict=True))


def train(model, algorithm, *, steps=40, auxiliary_models=None, minibatches=1, reward=None):
    """The expected reward before and after."""
    backend = TorchBackend(
        Executor(
            Trainer(
                copy.deepcopy(model),
                {"main": algorithm},
                TrainerSettings(lr=3e-3, warmup_steps=0),
                auxiliary_models=auxiliary_models,
            )
        )
    )
    generator = torch.Generator().manual_seed(0)
    config = RLSettings(steps, response_tokens_max=4, minibatches=minibatches)
    expected = []
    try:
        for step in range(steps + 1):
            groups, value = pull(backend, generator)
            expected.append(value)
            if reward is not None:
                groups = [reward(group, generator) for group in groups]
            batch = prepare_rl_batch(groups, algorithm, config, step).batch
            trio.run(lambda batch=batch: complete_batch(backend, batch, algorithm, minibatches=minibatches))
            for part in part_batch(batch, minibatches, algorithm.aggregation, 4):
                backend.forward_backward(part).wait()
                backend.optim_step().wait()
        return expected[0], expected[-1], backend.model
    finally:
        backend.close()


ONLINE = {
    "cispo": (CISPO, None),
    "dapo": (DAPO._replace(filters=()), None),
    "dpo": (DPO, AuxiliaryModels(reference=frozen)),
    "dr_grpo": (DR_GRPO, None),
    "grpo": (GRPO, None),
    "gspo": (GSPO, None),
    "is": (IS, None),
    "ppo": (bind_algorithm(PPO, {"value_coef": 0.1}), AuxiliaryModels(critic="head", critic_lr=1e-2)),
    "reinforce": (REINFORCE, None),
    "reinforce_pp": (REINFORCE_PP, None),
    "rft": (RFT._replace(select=bind(reward_at_least, {"threshold": 0.7})), None),
    "rloo": (RLOO, None),
    "entropy": (bind_algorithm(GRPO, {"entropy_coef": 0.01}), None),
    "rk3_loss": (GRPO._replace(kl=KL(rk3_loss, 0.01)), AuxiliaryModels(reference=frozen)),
    "k1_reward": (GRPO._replace(kl=KL(k1_reward, 0.01)), AuxiliaryModels(reference=frozen)),
}


@pytest.mark.parametrize(
    "name",
    [
        *("dpo", "grpo"),
        *(pytest.param(name, marks=pytest.mark.nightly) for name in sorted(ONLINE.keys() - {"dpo", "grpo"})),
    ],
)
def test_the_best_arm_is_found(tiny, name):
    algorithm, auxiliary_models = ONLINE[name]
    before, after, _ = train(tiny.qwen3(vocab=ARMS), algorithm, auxiliary_models=auxiliary_models)
    assert after > before + 0.2 and after > 0.85, (before, after)


@pytest.mark.nightly
def test_several_optimizer_steps_a_batch(tiny):
    before, after, _ = train(tiny.qwen3(vocab=ARMS), GRPO, minibatches=2)
    assert after > before + 0.2 and after > 0.85, (before, after)


@pytest.mark.nightly
def test_a_student_comes_to_its_teacher_without_rewards(tiny, tmp_path):
    before, taught, teacher = train(tiny.qwen3(vocab=ARMS), GRPO, steps=20)
    assert taught > before + 0.2
    teacher.save_pretrained(tmp_path / "teacher")

    def judge_all_alike(group, generator):
        return group._replace(episodes=tuple(episode._replace(score=Score(0.5)) for episode in group.episodes))

    auxiliary_models = AuxiliaryModels(teacher=str(tmp_path / "teacher"))
    start, after, _ = train(
        tiny.qwen3(vocab=ARMS), OPD, steps=20, auxiliary_models=auxiliary_models, reward=judge_all_alike
    )
    assert start == before and after > taught - 0.1


@pytest.mark.slow
def test_controls_do_not_find_it(tiny):
    """Rewards the wrong way round, and a reference that holds the policy with all its weight."""
    model = tiny.qwen3(vocab=ARMS)

    def reversed_rewards(group, generator):
        return group._replace(
            episodes=tuple(episode._replace(score=Score(1 - episode.score.value)) for episode in group.episodes)
        )

    before, after, _ = train(model, GRPO, reward=reversed_rewards)
    assert after < before and after < 0.2
    held = GRPO._replace(kl=KL(rk3_loss, 100.0))
    before, after, _ = train(model, held, auxiliary_models=AuxiliaryModels(reference=frozen))
    assert abs(after - before) < 0.1
