"""Flat rows and forests have the same gradient, for every recipe and every model beside the policy.

200 random forests in float64. The layers normalize in float64 too; transformers' own norms would round to float32.
"""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import nn

from rollouts.models.lora import add_lora
from rollouts.training.algorithms.algorithm import KL, Term
from rollouts.training.algorithms.corrections import truncated
from rollouts.training.algorithms.kl import ema, rk3_loss
from rollouts.training.algorithms.losses import entropy_bonus, ppo_clip, value_loss
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
    SFT,
)
from rollouts.training.backends.optimizer import TrainerSettings
from rollouts.training.backends.torch import Executor, TorchBackend
from rollouts.training.backends.trainer import Trainer
from rollouts.training.batches import AuxiliaryModels
from rollouts.training.batching import make_batch
from rollouts.types import Sample

RECIPES = {
    **{"grpo": GRPO, "ppo": PPO, "dapo": DAPO, "dr_grpo": DR_GRPO, "gspo": GSPO, "cispo": CISPO, "is": IS, "sft": SFT},
    **{"reinforce": REINFORCE, "reinforce_pp": REINFORCE_PP, "rloo": RLOO, "rft": RFT, "dpo": DPO, "opd": OPD},
    "kl": GRPO._replace(kl=KL(rk3_loss, 0.1)),
    "entropy": GRPO._replace(terms=(Term(ppo_clip), Term(entropy_bonus, 0.1, "entropy"))),
    "value": PPO._replace(terms=(Term(ppo_clip), Term(value_loss, 0.5, "value"))),
    "corrected": GRPO._replace(correction=truncated),
}
SETTINGS = {
    "plain": {},
    "checkpointing": {"gradient_checkpointing": True},
    "microbatches": {"tokens_per_microbatch": 90},
    "adapters": {"lora_rank": 2},
    "roles": {"lora_rank": 2, "roles": ("buyer", "seller")},
    "critic": {"critic": "head"},
}
FORESTS = 200


class Norm(nn.Module):
    """transformers' RMSNorm without its conversion to float32."""

    def __init__(self, like):
        super().__init__()
        self.weight, self.eps = like.weight, like.variance_epsilon

    def forward(self, hidden):
        return self.weight * (hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.eps))


def in_float64(model):
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if "RMSNorm" in type(child).__name__:
                setattr(module, name, Norm(child))
    return model.double()


def random_samples(rng, roles=("",)):
    """Groups whose members share a prompt; their turns continue, rewrite or repeat what came before."""
    samples = []
    for group in range(rng.randint(1, 3)):
        prompt = [rng.randrange(61) for _ in range(rng.choice((4, 17, 30)))]
        for _ in range(rng.randint(2, 4)):
            rollout, role = 1 + max((s.rollout_index for s in samples), default=-1), rng.choice(roles)
            history = list(prompt)
            for _ in range(rng.randint(1, 3)):  # segments
                reply = [rng.randrange(61) for _ in range(rng.randint(1, 12))]
                if samples and rng.random() < 0.2:
                    history, reply = list(samples[-1].tokens[:-1]), [samples[-1].tokens[-1]]  # one token, two rows
                mask = [0.0] * len(history) + [rng.choice((0.5, 1.0)) for _ in reply]
                samples.append(
                    Sample(
                        tokens=[*history, *reply][:100],
                        loss_mask=mask[:100],
                        reward=rng.random(),
                        group_index=group,
                        rollout_index=rollout,
                        rollout_log_probs=[-5 * rng.random() if weight else 0.0 for weight in mask[:100]],
                        policy_versions=[0 if weight else -1 for weight in mask[:100]],
                        prompt_length=len(prompt),
                        metadata={"role": role} if role else {},
                    )
                )
                history += reply[-rng.randint(0, len(reply)) :] + [rng.randrange(61) for _ in range(rng.randint(0, 20))]
    return [sample for sample in samples if len(sample.tokens) > 1 and any(sample.loss_mask[1:])]


def random_batch(rng, algorithm, roles):
    samples = random_samples(rng, roles)
    count = 1 + max(s.rollout_index for s in samples)
    pairs = [(n, n + 1) for n in range(0, count - 1, 2)] if algorithm is DPO else None
    how = {"aggregation": algorithm.aggregation, "step": 0, "max_tokens": 16, "pairs": pairs}
    batch = make_batch(samples, [rng.gauss(0, 1) for _ in range(count)], temperature=rng.choice((0.7, 1.0)), **how)
    batch.anchor = "current" if algorithm.correction else "sampler"
    stale = rng.random() < 0.5  # a later step of the batch: the anchor is that of the first one
    for row in batch.rows:
        if algorithm is GSPO:  # its clip range is so narrow that only the current policy is inside
            row.rollout_logprobs, stale = None, False
        streams = ["ref_logprobs", "teacher_logprobs", *(["old_logprobs"] if stale else [])]
        for name in streams:
            setattr(row, name, [-4 * rng.random() for _ in row.tokens])
        row.old_values, row.returns = [rng.random() for _ in row.tokens], [rng.random() for _ in row.tokens]
    return batch


def gradient_of(model, algorithm, batch, *, share, lora_rank=0, roles=(), critic="", **settings):
    causal = copy.deepcopy(model)
    adapter = None
    if lora_rank:
        adapter = add_lora(causal, rank=lora_rank, alpha=None, targets="all-linear", seed=0, roles=roles)
        for name, parameter in causal.named_parameters():
            if "lora_" in name:
                parameter.data = torch.cos(torch.arange(parameter.numel()).view(parameter.shape).double() * 7) / 4
    beside = AuxiliaryModels(critic=critic)
    chosen = TrainerSettings(lr=1e-2, warmup_steps=0, share_prefix=share, dtype="float64", **settings)
    trainer = Trainer(causal, {"main": algorithm}, chosen, adapter=adapter, auxiliary_models=beside)
    if critic:
        with torch.no_grad():
            trainer.networks.critic.linear.weight.fill_(0.1)
    backend = TorchBackend(Executor(trainer))
    try:
        metrics = backend.forward_backward(batch).wait()
        return torch.cat([p.grad.flatten().double() for p in trainer._names if p.grad is not None]), metrics
    finally:
        backend.close()


def needed(algorithm):
    return {"critic": "head"} if algorithm in (RECIPES["value"], PPO) else {}


CASES = [(recipe, "plain") for recipe in RECIPES] + [("grpo", name) for name in SETTINGS if name != "plain"]


@pytest.mark.parametrize("forests", [1, pytest.param(-(-FORESTS // len(CASES)), marks=pytest.mark.slow)])
@pytest.mark.parametrize(("recipe", "name"), CASES, ids=[f"{recipe}-{name}" for recipe, name in CASES])
def test_flat_rows_and_forests_have_the_same_gradient(tiny, recipe, name, forests):
    algorithm, settings = RECIPES[recipe], SETTINGS[name] | needed(RECIPES[recipe])
    rng = random.Random(f"{recipe} {name}")
    model = in_float64(tiny.qwen3(tied="lora_rank" not in settings))
    tolerance = 1e-6 if "critic" in settings else 1e-9  # the layer of values is float32
    shared = 0
    for _ in range(forests):
        batch = random_batch(rng, algorithm, settings.get("roles", ("",)))
        (flat, one), (forest, other) = (
            gradient_of(model, algorithm, copy.deepcopy(batch), share=share, **settings) for share in (False, True)
        )
        assert flat.norm() > 0 and (flat - forest).norm() <= tolerance * flat.norm()
        for metric in set(one) - {"perf/pad_frac", "perf/tflops", "perf/peak_gib"}:
            assert one[metric] == pytest.approx(other[metric], rel=1e-5, abs=1e-6), metric
        shared += one["perf/tflops"] != other["perf/tflops"]
    assert shared or forests == 1


def test_two_rows_on_one_sampled_token_keep_their_advantages(tiny):
    """r = 1.3, clip .2, A = +1 and -1: the row of +1 is clipped, so the gradient is that of the other one. Merged
    advantages would give 0.
    """
    model = in_float64(tiny.qwen3())
    tokens = list(range(20))
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -2]
    sampled = float(torch.log_softmax(logits, -1)[tokens[-1]]) - torch.tensor(1.3).log().item()
    mask, logprobs = [0.0] * 19 + [1.0], [0.0] * 19 + [sampled]
    versions = [-1] * 19 + [0]
    samples = [
        Sample(
            tokens=tokens,
            loss_mask=mask,
            reward=1.0,
            rollout_index=n,
            group_index=0,
            rollout_log_probs=logprobs,
            policy_versions=versions,
        )
        for n in range(2)
    ]
    both = make_batch(samples, [1.0, -1.0], aggregation="sum", step=0)
    alone = make_batch(samples[1:], [0.0, -1.0], aggregation="sum", step=0)
    algorithm = GRPO._replace(aggregation="sum")
    expected, _ = gradient_of(model, algorithm, alone, share=False)
    for share in (True, False):
        found, _ = gradient_of(model, algorithm, copy.deepcopy(both), share=share)
        assert expected.norm() > 0 and (found - expected).norm() <= 1e-9 * expected.norm()


def test_a_reference_a_teacher_and_values_are_those_of_flat_rows(tiny, tmp_path):
    model = tiny.qwen3(tied=False)
    teacher = str(tmp_path / "teacher")
    tiny.qwen3(seed=5).save_pretrained(teacher)
    rng = random.Random(9)
    beside = AuxiliaryModels(reference=ema, critic=teacher, teacher=teacher)
    needs = ("logprobs", "entropy", "ref_logprobs", "teacher_logprobs", "values")
    for _ in range(5):
        batch = random_batch(rng, GRPO, ("",))
        outputs = []
        for share in (True, False):
            settings = TrainerSettings(lr=1e-2, share_prefix=share)
            trainer = Trainer(copy.deepcopy(model), {"main": GRPO}, settings, auxiliary_models=beside)
            with torch.no_grad():
                trainer.networks.critic.linear.weight.fill_(0.1)
            backend = TorchBackend(Executor(trainer))
            outputs.append(backend.forward(batch, needs).wait())
            backend.close()
        for name in needs:
            for one, other in zip(getattr(outputs[0], name), getattr(outputs[1], name), strict=True):
                assert one == pytest.approx(other, abs=2e-5) and any(one)
