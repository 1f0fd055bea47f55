"""Rows without an advantage skip the backward pass only if gradient, metrics and step stay the same."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from rollouts.models.lora import add_lora
from rollouts.training.algorithms.algorithm import KL, Term, as_algorithm
from rollouts.training.algorithms.corrections import truncated
from rollouts.training.algorithms.kl import rk3_loss
from rollouts.training.algorithms.losses import entropy_bonus, ppo_clip
from rollouts.training.algorithms.recipes import CISPO, DAPO, DR_GRPO, GRPO, GSPO, IS, REINFORCE, RLOO
from rollouts.training.backends.optimizer import TrainerSettings
from rollouts.training.backends.torch import Executor, TorchBackend
from rollouts.training.backends.trainer import Trainer
from rollouts.training.batching import make_batch

FLAT = {"grpo": GRPO, "dapo": DAPO, "dr_grpo": DR_GRPO, "gspo": GSPO, "cispo": CISPO, "reinforce": REINFORCE, "is": IS}
FLAT |= {"rloo": RLOO, "corrected": GRPO._replace(correction=truncated)}


@pytest.fixture
def backend_of():
    made = []

    def make(model, algorithm, *, lora_rank=0, **settings):
        causal = copy.deepcopy(model)
        adapter = add_lora(causal, rank=lora_rank, alpha=None, targets="all-linear", seed=0) if lora_rank else None
        settings = TrainerSettings(**{"lr": 1e-2, "warmup_steps": 0, **settings})
        made.append(TorchBackend(Executor(Trainer(causal, {"main": algorithm}, settings, adapter=adapter))))
        return made[-1]

    yield make
    for backend in made:
        backend.close()


def batch_of(tiny, algorithm, informative=(2,), *, groups=4):
    """Four groups, of which some have advantages; the others' rewards were equal."""
    samples = tiny.make_samples(groups=groups)
    advantages = [math.sin(3.0 * n + 1) if n // 4 in informative else 0.0 for n in range(4 * groups)]
    batch = make_batch(samples, advantages, aggregation=algorithm.aggregation, step=0, max_tokens=16)
    batch.anchor = "current" if algorithm.correction else "sampler"
    return batch


def zero(logprobs):
    return logprobs * 0.0


def full(algorithm):
    """The same algorithm with a term that does not name the advantages, so that every row's backward is run."""
    return algorithm._replace(terms=(*algorithm.terms, Term(zero)))


def in_place(logprobs, advantages):
    return -logprobs.clamp_(min=-20.0) * advantages


def passes_of(backend):
    """Grows by (with a backward?, tokens) whenever the first layer runs; passes of two tokens are left out."""
    layer = next(m for name, m in backend.model.named_modules() if name.endswith(".0.mlp"))
    runs = []

    def note(module, inputs):
        if inputs[0].shape[1] > 2:
            runs.append((torch.is_grad_enabled(), inputs[0].shape[1]))

    layer.register_forward_pre_hook(note)
    return runs


def gradient_of(backend, batch):
    metrics = backend.forward_backward(batch).wait()
    gradient = torch.cat([p.grad.reshape(-1) for p in backend.model.parameters() if p.grad is not None])
    return gradient, {name: value for name, value in metrics.items() if not name.startswith("perf/")}


def assert_same(backends, batch):
    (found, metrics), (expected, wanted) = (gradient_of(backend, batch) for backend in backends)
    assert found.shape == expected.shape
    assert (found - expected).norm() <= 1e-5 * expected.norm()
    assert metrics == pytest.approx(wanted, rel=1e-4, abs=1e-6)
    return found, metrics


@pytest.mark.parametrize("name", FLAT)
def test_gradient_and_metrics_are_those_of_all_rows(tiny, backend_of, name):
    model, algorithm, batch = tiny.qwen3(), FLAT[name], batch_of(tiny, FLAT[name])
    backend = backend_of(model, algorithm)
    runs = passes_of(backend)
    gradient, metrics = assert_same([backend, backend_of(model, full(algorithm))], batch)
    assert gradient.norm() > 0 and {"policy/loss", "policy/entropy", "mismatch/k3"} <= set(metrics)
    assert sum(tokens for graded, tokens in runs if not graded) > 2 * sum(tokens for graded, tokens in runs if graded)


@pytest.mark.parametrize(
    "settings", [{"share_prefix": False}, {"gradient_checkpointing": True}, {"lora_rank": 4},
                 {"tokens_per_microbatch": 60}]
)  # fmt: skip
def test_however_rows_are_run(tiny, backend_of, settings):
    model, batch = tiny.qwen3(), batch_of(tiny, GRPO)
    backend = backend_of(model, GRPO, **settings)
    runs = passes_of(backend)
    assert_same([backend, backend_of(model, full(GRPO), **settings)], batch)
    assert any(not graded for graded, _ in runs)


@pytest.mark.parametrize(
    "algorithm",
    [
        GRPO._replace(terms=(Term(ppo_clip), Term(entropy_bonus, 0.01, "entropy"))),
        GRPO._replace(kl=KL(rk3_loss, 0.1)),
        as_algorithm(lambda logprobs, advantages: -(advantages + 0.1) * logprobs),
    ],
    ids=["entropy", "kl", "own"],
)
def test_a_term_that_does_not_depend_on_advantages_trains_every_row(tiny, backend_of, algorithm):
    model = tiny.qwen3()
    batch = batch_of(tiny, algorithm, ())
    for row in batch.rows:
        row.ref_logprobs = [-3.0] * len(row.tokens)
    backend = backend_of(model, algorithm)
    gradient, _ = assert_same([backend, backend_of(model, full(algorithm))], batch)
    assert gradient.norm() > 0.01
    runs = passes_of(backend)
    backend.forward_backward(batch).wait()
    assert runs and all(graded for graded, _ in runs), "what was found not to be flat is not tried again"


def test_a_step_in_which_no_row_has_an_advantage_is_a_step(tiny, backend_of):
    """The optimizer goes on by its momentum, and every metric is written, as if the backward had been run."""
    model = tiny.qwen3()
    settings = {"weight_decay": 0.1, "eps": 1e-2}  # a small eps blows rounding up to whole steps
    backends = [backend_of(model, algorithm, **settings) for algorithm in (GRPO, full(GRPO))]
    for backend in backends:
        backend.forward_backward(batch_of(tiny, GRPO)).wait()
        backend.optim_step().wait()
    before = backends[0].get_weights().wait()
    runs = passes_of(backends[0])
    metrics = [backend.forward_backward(batch_of(tiny, GRPO, ())).wait() for backend in backends]
    assert runs and not any(graded for graded, _ in runs)
    kept = [{name: value for name, value in each.items() if not name.startswith("perf/")} for each in metrics]
    assert kept[0] == pytest.approx(kept[1], rel=1e-4, abs=1e-6) and kept[0]["policy/loss"] == 0.0
    assert all(0 < each["perf/tflops"] for each in metrics)
    results = [backend.optim_step().wait() for backend in backends]
    assert [result.version for result in results] == [2, 2]
    assert results[0].metrics == pytest.approx(results[1].metrics, abs=1e-12)
    after = [backend.get_weights().wait() for backend in backends]
    assert any(not torch.equal(before[name], value) for name, value in after[0].items())
    for name, value in after[0].items():
        torch.testing.assert_close(value, after[1][name], rtol=1e-5, atol=1e-6)


def test_a_model_that_is_broken_skips_the_step_whatever_the_advantages_are(tiny, backend_of):
    backend = backend_of(tiny.qwen3(), GRPO)
    with torch.no_grad():
        next(backend.model.parameters())[:] = math.nan
    for informative in ((), (2,)):
        backend.forward_backward(batch_of(tiny, GRPO, informative)).wait()
        result = backend.optim_step().wait()
        assert result.metrics["optim/skipped"] == 1.0 and result.version == 0


def test_few_rows_without_an_advantage_get_no_microbatch_of_their_own(tiny, backend_of):
    """One short row among many costs less in their pass than in one of its own."""
    backend = backend_of(tiny.qwen3(), GRPO, share_prefix=False)
    batch = batch_of(tiny, GRPO, (0, 1, 2, 3))
    shortest = min(batch.rows, key=lambda row: len(row.tokens))
    shortest.advantages = [0.0] * len(shortest.tokens)
    runs = passes_of(backend)
    backend.forward_backward(batch).wait()
    assert len(shortest.tokens) * 2 / 3 < 32 and all(graded for graded, _ in runs)


def test_a_loss_may_change_its_tensors_in_place(tiny, backend_of):
    algorithm = as_algorithm(in_place)
    batch = batch_of(tiny, algorithm)
    assert_same([backend_of(tiny.qwen3(), algorithm), backend_of(tiny.qwen3(), full(algorithm))], batch)
