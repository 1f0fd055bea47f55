"""The gradient of a step with two roles equals a formula that is written out by hand, turn by turn, for both roles."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import torch
import trio

from rollouts import Role, reward
from rollouts.agent.episode import run_episode
from rollouts.agent.model import EpisodeLimits
from rollouts.env.mixing import env_term
from rollouts.training.algorithms.advantages import group_mean
from rollouts.training.algorithms.algorithm import Algorithm, Term
from rollouts.training.algorithms.losses import ppo_clip
from rollouts.training.backends.optimizer import TrainerSettings
from rollouts.training.backends.torch import Executor, TorchBackend
from rollouts.training.backends.trainer import Trainer
from rollouts.training.loops.rl_batch import RLSettings, prepare_rl_batch
from rollouts.training.rollout_gen.groups import Group, role_groups
from rollouts.types import Task

sys.path.insert(0, str(Path(__file__).parents[2]))
from agent_fakes import END, ROLES, FakeChat, FakeEngine

MEAN = Algorithm(group_mean, "token_mean", (Term(ppo_clip, 1.0),))
TASK = Task("a lamp")
SPEAKERS = ("seller", "buyer", "seller")  # of the turns of each episode
REPLIES = [("five", "no", "four"), ("nine", "yes", ""), ("six", "maybe not", "ok"), ("", "hm", "three please")]


class Market:
    roles = (Role("seller", system="Sell."), Role("buyer"))

    def tasks(self, split, rng):
        return [TASK]

    async def rollout(self, task, model):
        heard = task.prompt
        for name in SPEAKERS:
            heard = (await model.role(name).say(heard)).text

    @reward(role="seller")
    def price(self, trajectory):
        return SELLER[trajectory.last_text]

    @reward(role="buyer")
    def glad(self, trajectory):
        return 10.0 + len(trajectory.last_text)


SELLER = {"four": 0.0, "": 3.0, "ok": 1.0, "three please": -2.0}
REWARDS = {"seller": [0.0, 3.0, 1.0, -2.0], "buyer": [12.0, 13.0, 19.0, 12.0]}


def small(token):
    """The token of a model with 64 tokens."""
    known = {END: 0, **{role: number for number, role in enumerate(ROLES.values(), start=1)}}
    return known.get(token, 5 + token % 59)


def played():
    """The group of four episodes, and the turns of each: (context, sampled ids, logprobs)."""
    episodes, turns = [], []
    for rollout, replies in enumerate(REPLIES):
        engine = FakeEngine(*replies)

        async def play(engine=engine, rollout=rollout):
            return await run_episode(
                TASK,
                make_env=Market,
                chat=FakeChat(),
                inference=engine,
                limits=EpisodeLimits(),
                rewards=[env_term()],
                session="s",
                order=(0, rollout),
                seed=1,
            )

        episode = trio.run(play)
        for trajectory in episode.trajectories:
            for segment in trajectory.segments:
                segment.tokens[:] = map(small, segment.tokens)
        episodes.append(episode)
        turns.append(
            [
                ([small(t) for t in request.tokens], [small(t) for t in said.tokens], list(said.logprobs))
                for request, said in engine.turns
            ]
        )
    return Group(0, TASK, tuple(episodes)), turns


def by_hand(model, turns, baselines):
    """The gradient of -1/T sum over the sampled tokens of every turn of min(r A, clip(r, 0.8, 1.2) A), in float64."""
    model = copy.deepcopy(model).double().train()
    total, count = torch.zeros((), dtype=torch.float64), 0
    for rollout, own in enumerate(turns):
        for role, (context, sampled, logprobs) in zip(SPEAKERS, own, strict=True):
            advantage = REWARDS[role][rollout] - baselines[role]
            logits = model(torch.tensor([context + sampled])).logits[0, len(context) - 1 : -1]
            chosen = logits.log_softmax(-1).gather(1, torch.tensor(sampled).unsqueeze(1)).squeeze(1)
            ratio = (chosen - torch.tensor(logprobs, dtype=torch.float64)).exp()
            total = total - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum()
            count += len(sampled)
    (total / count).backward()
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()]).float()


def test_the_gradient_of_both_roles_is_the_formula(tiny):
    torch.manual_seed(0)
    model = tiny.qwen3(vocab=64)
    group, turns = played()
    groups = role_groups(group)
    assert {each.role: each.rewards for each in groups} == REWARDS
    backend = TorchBackend(Executor(Trainer(copy.deepcopy(model), {"main": MEAN}, TrainerSettings(lr=1e-3))))
    try:
        batch = prepare_rl_batch(groups, MEAN, RLSettings(1, response_tokens_max=64), 0).batch
        backend.forward_backward(batch).wait()
        found = torch.cat([p.grad.reshape(-1) for p in backend.model.parameters()]) / batch.denominator
    finally:
        backend.close()
    wanted = by_hand(model, turns, {"seller": 0.5, "buyer": 14.0})
    assert (found - wanted).norm() <= 1e-4 * wanted.norm()
    pooled = by_hand(model, turns, {"seller": 7.25, "buyer": 7.25})
    assert (found - pooled).norm() > 0.1 * wanted.norm(), "one baseline for both roles is another gradient"
