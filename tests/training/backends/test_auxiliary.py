"""Reference policies, teachers and critics: their values, when they change, and that they change nothing else."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from rollouts.errors import ConfigError, ModelError, TrainingError
from rollouts.models.lora import add_lora
from rollouts.plugins.signature import bind
from rollouts.training.algorithms.algorithm import KL, Term, as_algorithm
from rollouts.training.algorithms.corrections import truncated
from rollouts.training.algorithms.kl import adapter_off, ema, every_n, frozen, rk3_loss
from rollouts.training.algorithms.losses import distill_topk
from rollouts.training.algorithms.recipes import DPO, GRPO, OPD, PPO, REINFORCE
from rollouts.training.backends.optimizer import TrainerSettings
from rollouts.training.backends.torch import Executor, TorchBackend
from rollouts.training.backends.trainer import Trainer
from rollouts.training.batches import AuxiliaryModels
from rollouts.training.batching import make_batch
from rollouts.training.loops.rl_batch import estimate_advantages


@pytest.fixture
def backend_of():
    """Makes backends and ends their threads."""
    made = []

    def make(model, algorithm=GRPO, *, rank=0, auxiliary_models=None, **settings):
        model = copy.deepcopy(model)
        adapter = add_lora(model, rank=rank, alpha=None, targets="all-linear", seed=0) if rank else None
        settings = TrainerSettings(**{"lr": 1e-2, "warmup_steps": 0, "device": "cpu", **settings})
        made.append(
            TorchBackend(
                Executor(
                    Trainer(model, {"main": algorithm}, settings, adapter=adapter, auxiliary_models=auxiliary_models)
                )
            )
        )
        return made[-1]

    yield make
    for backend in made:
        backend.close()


def batch_of(samples, aggregation="token_mean", **settings):
    count = 1 + max(sample.rollout_index for sample in samples)
    return make_batch(
        samples,
        [math.sin(3.0 * n + 1) for n in range(count)],
        aggregation=aggregation,
        step=0,
        max_tokens=16,
        **settings,
    )


def step(backend, batch):
    backend.forward_backward(batch).wait()
    return backend.optim_step().wait()


def logprobs_of(backend, batch, name="logprobs"):
    output = backend.forward(batch, (name,), only_live=True).wait()
    return torch.tensor([value for stream in getattr(output, name) for value in stream])


def stamp(batch, name, values):
    start = 0
    for row in batch.rows:
        setattr(row, name, values[start : start + len(row.tokens)].tolist())
        start += len(row.tokens)
    return batch


def saved(model, path):
    model.save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("rank", [0, 4])
def test_a_frozen_reference_stays_where_the_run_began(tiny, backend_of, rank):
    batch = batch_of(tiny.make_samples())
    backend = backend_of(tiny.qwen3(), rank=rank, auxiliary_models=AuxiliaryModels(reference=frozen))
    before = logprobs_of(backend, batch)
    assert torch.equal(logprobs_of(backend, batch, "ref_logprobs"), before)
    step(backend, batch)
    assert torch.equal(logprobs_of(backend, batch, "ref_logprobs"), before)
    after = logprobs_of(backend, batch)
    assert not torch.allclose(after, before, atol=1e-4), "the policy moved, and scoring the reference left it alone"
    assert torch.equal(logprobs_of(backend, batch), after)


def test_adapter_off_is_the_base_model_whatever_the_adapters_are(tiny, backend_of):
    model, batch = tiny.qwen3(), batch_of(tiny.make_samples())
    base = logprobs_of(backend_of(model), batch)
    backend = backend_of(model, rank=4, auxiliary_models=AuxiliaryModels(reference=adapter_off))
    for _ in range(3):
        step(backend, batch)
    assert torch.allclose(logprobs_of(backend, batch, "ref_logprobs"), base, atol=1e-6)
    with pytest.raises(ConfigError, match="adapter_off needs adapters, and this run trains all weights; type --lora"):
        backend_of(model, auxiliary_models=AuxiliaryModels(reference=adapter_off))


def test_references_that_follow(tiny, backend_of):
    """ema and every_n against a policy kept beside them, by weights; a decay of 0 is the policy itself."""
    batch = batch_of(tiny.make_samples())
    model = tiny.qwen3()
    for rule, expected in (
        (bind(ema, {"decay": 0.75}), lambda kept: 0.75 * (0.75 * kept[0] + 0.25 * kept[1]) + 0.25 * kept[2]),
        (bind(every_n, {"steps": 2}), lambda kept: kept[2]),
        (bind(every_n, {"steps": 3}), lambda kept: kept[0]),
    ):
        backend = backend_of(model, auxiliary_models=AuxiliaryModels(reference=rule))
        kept = [backend.model.lm_head.weight.detach().clone()]
        for _ in range(2):
            step(backend, batch)
            kept.append(backend.model.lm_head.weight.detach().clone())
        with backend._trainer._reference.in_place():
            found = backend.model.lm_head.weight.detach().clone()
        assert torch.allclose(found, expected(kept), atol=1e-6)
        assert torch.equal(backend.model.lm_head.weight, kept[2])


def test_a_reference_is_in_the_checkpoint(tiny, backend_of, tmp_path):
    batch = batch_of(tiny.make_samples())
    auxiliary_models = AuxiliaryModels(reference=bind(ema, {"decay": 0.5}), critic="head", critic_lr=0.1)
    algorithm = PPO._replace(kl=KL(rk3_loss))
    batch = stamp(stamp(batch, "old_values", torch.zeros(sum(len(r.tokens) for r in batch.rows))), "ref_logprobs",
                  torch.zeros(sum(len(r.tokens) for r in batch.rows)))  # fmt: skip
    first = backend_of(tiny.qwen3(), algorithm, auxiliary_models=auxiliary_models)
    step(first, batch)
    step(first, batch)
    first.save(str(tmp_path / "here")).wait()
    second = backend_of(tiny.qwen3(), algorithm, auxiliary_models=auxiliary_models)
    second.load(str(tmp_path / "here")).wait()
    for name in ("ref_logprobs", "values", "logprobs"):
        assert torch.equal(logprobs_of(second, batch, name), logprobs_of(first, batch, name))
    assert step(first, batch) == step(second, batch), "the next step is the same"
    with pytest.raises(ConfigError, match="has a critic; give the --critic of the run"):
        backend_of(tiny.qwen3()).load(str(tmp_path / "here")).wait()


def test_kl_pulls_back_to_the_reference(tiny, backend_of):
    """Trained on the KL alone, from afar, the policy comes closer; the metric says how far it is."""
    samples, model = tiny.make_samples(), tiny.qwen3()
    algorithm = GRPO._replace(kl=KL(rk3_loss, 1.0))
    backend = backend_of(model, algorithm, auxiliary_models=AuxiliaryModels(reference=frozen), lr=1e-3)
    away = {name: value + 0.05 * torch.randn_like(value) for name, value in model.state_dict().items()}
    away["lm_head.weight"] = away["model.embed_tokens.weight"]
    backend.load_weights(away).wait()
    batch = make_batch(samples, [0.0] * 12, aggregation="token_mean", step=0)
    stamp(batch, "ref_logprobs", logprobs_of(backend, batch, "ref_logprobs"))
    seen = []
    for _ in range(6):
        stamp(batch, "rollout_logprobs", logprobs_of(backend, batch))
        seen.append(backend.forward_backward(batch).wait()["policy/kl_ref"])
        backend.optim_step().wait()
    assert seen[-1] < 0.8 * seen[0]


def test_dpo_starts_at_log_2_and_prefers_what_was_chosen(tiny, backend_of):
    samples = tiny.make_samples()
    backend = backend_of(
        tiny.qwen3(), DPO, auxiliary_models=AuxiliaryModels(reference=frozen), tokens_per_microbatch=90
    )
    batch = batch_of(samples, "pair_mean", pairs=[(0, 1), (0, 2), (5, 4), (9, 11)])
    stamp(batch, "ref_logprobs", logprobs_of(backend, batch, "ref_logprobs"))
    losses = []
    for _ in range(4):
        losses.append(backend.forward_backward(batch).wait()["policy/loss"])
        backend.optim_step().wait()
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6) and losses[-1] < 0.9 * losses[0]
    whole = backend_of(tiny.qwen3(), DPO)
    parts = backend_of(tiny.qwen3(), DPO, tokens_per_microbatch=90)
    for each in (whole, parts):
        each.forward_backward(batch).wait()
    for one, other in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, rtol=1e-4, atol=1e-6), "pairs are whole in every microbatch"


@pytest.mark.parametrize("share", [True, False])
def test_a_teacher_scores_the_policys_tokens(tiny, backend_of, tmp_path, share):
    samples = tiny.make_samples()
    batch = batch_of(samples)
    teacher = saved(tiny.qwen3(seed=5), tmp_path / "teacher")
    backend = backend_of(tiny.qwen3(), OPD, auxiliary_models=AuxiliaryModels(teacher=teacher), share_prefix=share)
    alone = backend_of(tiny.qwen3(seed=5))
    assert torch.allclose(logprobs_of(backend, batch, "teacher_logprobs"), logprobs_of(alone, batch), atol=1e-5)


def test_teacher_and_student_the_same_give_no_gradient(tiny, backend_of, tmp_path):
    model, samples = tiny.qwen3(), tiny.make_samples()
    teacher = saved(model, tmp_path / "teacher")
    same = AuxiliaryModels(teacher=teacher, teacher_top_k=7)

    def norm(algorithm, student):
        backend = backend_of(student, algorithm, auxiliary_models=same)
        batch = stamp(batch_of(samples), "rollout_logprobs", logprobs_of(backend, batch_of(samples)))
        stamp(batch, "teacher_logprobs", logprobs_of(backend, batch, "teacher_logprobs"))
        estimate_advantages(batch, algorithm)
        return step(backend, batch).metrics["optim/grad_norm"]

    for algorithm in (OPD, as_algorithm(distill_topk)):
        assert norm(algorithm, model) < 1e-5
        assert norm(algorithm, tiny.qwen3(seed=3)) > 1e-2, "control: another student has one"


def test_topk_distillation_is_the_kl_of_the_teacher_where_k_is_the_vocabulary(tiny, backend_of, tmp_path):
    model, samples = tiny.qwen3(), tiny.make_samples(groups=1)
    teacher = tiny.qwen3(seed=5)
    auxiliary_models = AuxiliaryModels(teacher=saved(teacher, tmp_path / "teacher"), teacher_top_k=10_000)
    backend = backend_of(model, as_algorithm(distill_topk), auxiliary_models=auxiliary_models)
    found = backend.forward_backward(batch_of(samples)).wait()["policy/loss"]
    divergences = []
    with torch.no_grad():
        for sample in samples:
            ids = torch.tensor([sample.tokens])
            ours, theirs = (each(input_ids=ids).logits[0].log_softmax(-1) for each in (model, teacher))
            per_token = (theirs.exp() * (theirs - ours)).sum(-1)
            divergences += [per_token[t - 1].item() for t, live in enumerate(sample.loss_mask) if live]
    assert found == pytest.approx(sum(divergences) / len(divergences), rel=1e-4)


def test_a_teacher_of_another_vocabulary_is_refused(tiny, backend_of, tmp_path):
    other = saved(tiny.qwen3(vocab=50), tmp_path / "other")
    with pytest.raises(ModelError, match="has 50 tokens and the policy 61; a teacher needs the tokenizer"):
        backend_of(tiny.qwen3(), auxiliary_models=AuxiliaryModels(teacher=other))


def test_what_a_backend_was_not_given_it_cannot_score(tiny, backend_of):
    backend = backend_of(tiny.qwen3())
    for name in ("ref_logprobs", "teacher_logprobs", "values"):
        with pytest.raises(TrainingError, match=rf"cannot compute {name}; it can compute logprobs, entropy"):
            backend.forward(batch_of(tiny.make_samples()), (name,)).wait()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["head", pytest.param("model", marks=pytest.mark.nightly)])
def test_a_critic_starts_at_0_and_learns_the_returns(tiny, backend_of, tmp_path, kind):
    """Rewards that the first prompt token decides: the value loss falls, and the explained variance rises."""
    samples = tiny.make_samples(groups=6)
    for sample in samples:
        sample.reward = float(sample.group_index % 2)
    critic = "head" if kind == "head" else saved(tiny.llama(), tmp_path / "critic")
    algorithm = PPO._replace(terms=tuple(term for term in PPO.terms if term.name != "entropy"))
    backend = backend_of(tiny.qwen3(), algorithm, auxiliary_models=AuxiliaryModels(critic=critic, critic_lr=1e-2))
    batch = make_batch(samples, [0.0] * 24, aggregation="token_mean", step=0)
    seen = []
    for _ in range(25):
        values = logprobs_of(backend, batch, "values")
        stamp(batch, "old_values", values)
        for row in batch.rows:
            row.returns = None
        stamp(batch, "rollout_logprobs", logprobs_of(backend, batch))
        seen.append(backend.forward_backward(batch).wait())
        backend.optim_step().wait()
    assert seen[0]["value/mean"] == 0.0 and seen[0]["value/explained_var"] == pytest.approx(0.0, abs=1e-6)
    assert seen[-1]["value/loss"] < 0.5 * seen[0]["value/loss"] and seen[-1]["value/explained_var"] > 0.3


def test_a_separate_critic_leaves_the_policy_alone_and_the_reverse(tiny, backend_of, tmp_path):
    critic = saved(tiny.llama(), tmp_path / "critic")
    samples = tiny.make_samples()
    backend = backend_of(tiny.qwen3(), PPO, auxiliary_models=AuxiliaryModels(critic=critic, critic_lr=1e-2))
    batch = make_batch(samples, [0.0] * 12, aggregation="token_mean", step=0)
    stamp(batch, "old_values", torch.zeros(sum(len(row.tokens) for row in batch.rows)))
    before, values = logprobs_of(backend, batch), logprobs_of(backend, batch, "values")
    result = step(backend, batch)
    assert result.metrics["optim/grad_norm"] == 0.0 and result.metrics["optim/critic_grad_norm"] > 0
    assert torch.equal(logprobs_of(backend, batch), before), "advantages of 0 move nothing"
    assert not torch.equal(logprobs_of(backend, batch, "values"), values)


def test_a_correction_counts_the_importance_weight_once(tiny, backend_of):
    """A sampler that is off by 0.3 a token: -sg(w) A grad log pi, w = min(exp(0.3), cap), ratio 1."""
    samples, model = tiny.make_samples(), tiny.qwen3()
    plain = backend_of(model, GRPO)
    batch = batch_of(samples)
    own = logprobs_of(plain, batch)
    stamp(batch, "rollout_logprobs", own)
    plain.forward_backward(batch).wait()
    live = torch.tensor([weight > 0 for row in batch.rows for weight in row.loss_mask])
    off = stamp(batch_of(samples), "rollout_logprobs", torch.where(live, own - 0.3, own))
    off.anchor = "current"
    for cap, factor in ((2.0, math.exp(0.3)), (1.1, 1.1)):
        backend = backend_of(model, GRPO._replace(correction=bind(truncated, {"cap": cap})))
        metrics = backend.forward_backward(off).wait()
        for one, other in zip(backend.model.parameters(), plain.model.parameters(), strict=True):
            assert torch.allclose(one.grad, factor * other.grad, rtol=1e-3, atol=1e-5)
        assert metrics["policy/ratio_max"] == 1.0 and metrics["mismatch/weight_mean"] == pytest.approx(factor, rel=1e-4)
        assert metrics["mismatch/ess"] == pytest.approx(1.0, abs=1e-4) and metrics["mismatch/rejected_frac"] == 0.0
    uncorrected = backend_of(model, GRPO._replace(correction=truncated))
    off.anchor = "sampler"
    assert "mismatch/ess" not in uncorrected.forward_backward(off).wait(), "the ratio against the sampler counts it"


def test_one_value_a_rollout_is_the_same_in_every_microbatch(tiny, backend_of):
    def per_rollout_loss(logprobs, advantages, rollout_index):
        """-A times the mean logprob of each rollout."""
        numbers, place = torch.unique(rollout_index, return_inverse=True)
        zeros = logprobs.new_zeros(len(numbers))
        return -zeros.index_add(0, place, logprobs * advantages) / zeros.index_add(0, place, torch.ones_like(logprobs))

    samples, model = tiny.make_samples(), tiny.qwen3()
    algorithm = as_algorithm(per_rollout_loss)._replace(aggregation="per_rollout", terms=(Term(per_rollout_loss),))
    batch = batch_of(samples, "per_rollout")
    by_tokens = backend_of(model, REINFORCE)
    by_tokens.forward_backward(batch_of(samples, "rollout_mean")).wait()
    for bound in (40, 10_000):
        backend = backend_of(model, algorithm, tokens_per_microbatch=bound)
        backend.forward_backward(batch).wait()
        for one, other in zip(backend.model.parameters(), by_tokens.model.parameters(), strict=True):
            assert (one.grad - other.grad).norm() <= 1e-4 * other.grad.norm(), "the same objective, value by value"
