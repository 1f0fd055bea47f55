"""A device with too little memory: a batch runs again in smaller microbatches, with the same gradient, or the error
says what to type.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import re

import pytest
import torch

from rollouts.errors import OutOfMemoryError
from rollouts.training.algorithms.algorithm import as_algorithm
from rollouts.training.algorithms.recipes import GRPO
from rollouts.training.backends.optimizer import TrainerSettings
from rollouts.training.backends.torch import Executor, TorchBackend
from rollouts.training.backends.trainer import Trainer
from rollouts.training.batching import make_batch

CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 0.50 GiB free. Of the allocated memory 9 is unused."
CPU = "[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."
ERRORS = [torch.OutOfMemoryError(CUDA), RuntimeError(CPU), MemoryError()]


@pytest.fixture
def backend_of():
    made = []

    def make(model, algorithm=GRPO, **settings):
        settings = {"lr": 1e-3, "share_prefix": False, **settings}
        made.append(
            TorchBackend(Executor(Trainer(copy.deepcopy(model), {"main": algorithm}, TrainerSettings(**settings))))
        )
        return made[-1]

    yield make
    for backend in made:
        backend.close()


def batch_of(samples):
    advantages = [math.sin(3.0 * n + 1) for n in range(len(samples))]
    return make_batch(samples, advantages, aggregation="token_mean", step=0, max_tokens=16)


def gradient_of(backend, batch):
    """The accumulated gradient, and the metrics without those of the clock and the system."""
    metrics = backend.forward_backward(batch).wait()
    gradient = torch.cat([p.grad.reshape(-1) for p in backend.model.parameters() if p.grad is not None])
    return gradient, {name: value for name, value in metrics.items() if not name.startswith("perf/")}


def of_group(logprobs, advantages, group_index):
    return -advantages * logprobs


def limit(backend, tokens_max, error, *, in_backward=False, with_gradient=True):
    """A model whose pass over more than `tokens_max` tokens raises `error`. Gives the numbers of tokens of passes.
    `with_gradient` False: passes with a gradient fit.
    """
    passes = []

    def forward(module, inputs):
        passes.append(inputs[0].numel())
        if passes[-1] > tokens_max and not in_backward and (with_gradient or not torch.is_grad_enabled()):
            raise error

    def backward(module, inputs, outputs):
        if outputs[0].shape[:-1].numel() > tokens_max and in_backward:
            assert any(p.grad is not None for p in backend.model.parameters()), "the later layers have a gradient"
            raise error

    backend.model.get_input_embeddings().register_forward_pre_hook(forward)
    backend.model.model.layers[0].register_full_backward_hook(backward)
    return passes


@pytest.mark.parametrize("error", ERRORS, ids=["cuda", "cpu", "python"])
@pytest.mark.parametrize("in_backward", [False, True], ids=["forward", "backward"])
def test_the_batch_runs_again_in_halves_with_the_same_gradient(tiny, backend_of, error, in_backward):
    model, batch = tiny.qwen3(), batch_of(tiny.make_samples())
    settings = {"tokens_per_microbatch": 200}
    reference, wanted = gradient_of(backend_of(model, **settings), copy.deepcopy(batch))
    backend = backend_of(model, **settings)
    passes = limit(backend, 120, error, in_backward=in_backward)
    found, metrics = gradient_of(backend, batch)
    assert torch.allclose(found, reference, rtol=1e-4, atol=1e-5) and max(passes) > 120
    assert metrics == pytest.approx(wanted, rel=1e-4, abs=1e-6)
    assert backend._trainer._denominator == batch.denominator, "D counts once"
    (note,) = [each for each in backend.notes if "out of memory" in each]
    assert (
        "rows and" in note
        and "from now on microbatches of forward_backward have at most" in note
        and "Of the allocated" not in note
        and "alloc_cpu" not in note
    )
    backend.optim_step().wait()
    again = len(passes)
    backend.forward_backward(batch).wait()
    assert all(count <= 120 for count in passes[again:]), "later batches begin with the smaller size"


def test_logprobs_alone_are_computed_in_halves_too(tiny, backend_of):
    model, batch = tiny.qwen3(), batch_of(tiny.make_samples())
    wanted = backend_of(model).forward(batch).wait().logprobs
    backend = backend_of(model, tokens_per_microbatch=200)
    gradient_of(backend, batch)  # gradients that wait are no reason not to
    limit(backend, 120, ERRORS[0])
    found = backend.forward(batch).wait().logprobs
    assert [pytest.approx(row, abs=1e-5) for row in wanted] == found and backend._trainer.has_gradients


@pytest.mark.parametrize(
    ("tokens_max", "words"),
    [
        (60, r"in a microbatch of \d+ rows and \d+ tokens, at most \d+ a row: CUDA out of memory.*free\n"
             r"type --tokens-per-microbatch \d+, --training.gradient-checkpointing true, "),
        (10, r"in a microbatch of one row of \d+ tokens: .*\ntype a smaller --max-tokens"),
    ],
)  # fmt: skip
def test_what_is_still_too_large_is_an_error_with_sizes_and_flags(tiny, backend_of, tokens_max, words):
    tokens = 250 if tokens_max > 10 else 1
    backend = backend_of(tiny.qwen3(), tokens_per_microbatch=tokens)
    limit(backend, tokens_max, ERRORS[0])
    with pytest.raises(OutOfMemoryError, match=words) as caught:
        backend.forward_backward(batch_of(tiny.make_samples())).wait()
    assert caught.value.__context__ is None or not isinstance(caught.value.__context__, torch.OutOfMemoryError)
    assert not backend._trainer.has_gradients


def test_gradients_of_an_earlier_call_are_never_half_lost(tiny, backend_of):
    """They cannot be told from those of the failed call, so the step fails."""
    backend = backend_of(tiny.qwen3(), tokens_per_microbatch=200)
    first, second = tiny.split_batch(batch_of(tiny.make_samples()), 2)
    backend.forward_backward(first).wait()
    limit(backend, 60, ERRORS[0])
    with pytest.raises(OutOfMemoryError):
        backend.forward_backward(second).wait()
    assert not backend._trainer.has_gradients and not backend._trainer.lower_limits


def test_rows_that_must_stay_together_are_not_halved(tiny, backend_of):
    backend = backend_of(tiny.qwen3(), as_algorithm(of_group), tokens_per_microbatch=200)
    limit(backend, 10, ERRORS[0])
    with pytest.raises(OutOfMemoryError, match="type a smaller --max-tokens or --samples-per-prompt, "):
        backend.forward_backward(batch_of(tiny.make_samples(groups=1))).wait()
    assert not backend._trainer.lower_limits


def test_less_without_a_gradient_is_less_for_that_alone(tiny, backend_of):
    """Rows that must stay together with a gradient may take more, and the advice is a number that they fit into."""
    model, batch = tiny.qwen3(), batch_of(tiny.make_samples())
    reference, _ = gradient_of(backend_of(model, as_algorithm(of_group)), batch)
    backend = backend_of(model, as_algorithm(of_group), tokens_per_microbatch=400)
    passes = limit(backend, 160, ERRORS[0], with_gradient=False)
    backend.forward(batch).wait()
    assert max(passes) > 160 > passes[-1]
    (note,) = [each for each in backend.notes if "out of memory" in each]
    forgotten = len(passes)
    assert torch.allclose(gradient_of(backend, batch)[0], reference, rtol=1e-4, atol=1e-5)
    assert max(passes[forgotten:]) > 160
    advised = int(note.rpartition("--tokens-per-microbatch ")[2])
    assert advised < max(passes)
    gradient_of(backend_of(model, as_algorithm(of_group), tokens_per_microbatch=advised), batch)


def test_a_larger_group_later_runs_as_the_settings_allow(tiny, backend_of):
    samples, more = tiny.make_samples(), tiny.make_samples(groups=1, prompt=(48, 48))
    backend = backend_of(tiny.qwen3(), as_algorithm(of_group), tokens_per_microbatch=400)
    passes = limit(backend, 260, ERRORS[0])
    backend.forward_backward(batch_of(samples)).wait()
    backend.optim_step().wait()
    lower = backend._trainer.lower_limits["forward_backward"]
    backend.forward_backward(batch_of(more)).wait()
    assert lower < passes[-1] <= 260


def test_the_advice_is_a_number_that_rows_which_stay_together_fit_into(tiny, backend_of):
    """On several ranks, where nothing runs again: half of the microbatch is less than its larger group."""
    small, large = tiny.make_samples(groups=1, rollouts=2), tiny.make_samples(groups=1, prompt=(48, 48))
    batch = batch_of(small + [dataclasses.replace(sample, group_index=1) for sample in large])
    backend = backend_of(tiny.qwen3(), as_algorithm(of_group), tokens_per_microbatch=400)
    backend._trainer.is_sharded = True
    limit(backend, 260, ERRORS[0])
    with pytest.raises(OutOfMemoryError) as caught:
        backend.forward_backward(batch).wait()
    advised = int(re.search(r"--tokens-per-microbatch (\d+)", str(caught.value))[1])
    again = backend_of(tiny.qwen3(), as_algorithm(of_group), tokens_per_microbatch=advised)
    passes = limit(again, 260, ERRORS[0])
    again.forward_backward(batch).wait()
    assert max(passes) == advised


def test_ranks_try_nothing_again(tiny, backend_of):
    """They would be out of step."""
    backend = backend_of(tiny.qwen3(), tokens_per_microbatch=200)
    backend._trainer.is_sharded = True
    passes = limit(backend, 60, ERRORS[0])
    with pytest.raises(OutOfMemoryError, match=r"rows? .*\ntype --tokens-per-microbatch"):
        backend.forward_backward(batch_of(tiny.make_samples())).wait()
    assert len(passes) == 1


def test_another_error_is_no_matter_of_memory(tiny, backend_of):
    backend = backend_of(tiny.qwen3())
    limit(backend, 10, RuntimeError("shapes differ"))
    with pytest.raises(RuntimeError, match="shapes differ"):
        backend.forward_backward(batch_of(tiny.make_samples())).wait()


def test_the_optimizer_says_what_takes_less(tiny, backend_of):
    backend = backend_of(tiny.qwen3())
    backend.forward_backward(batch_of(tiny.make_samples())).wait()

    def step():
        raise ERRORS[0]

    backend._trainer._optimizer.step = step
    with pytest.raises(OutOfMemoryError, match=r"in optim_step: CUDA .*\ntype --lora-rank 16, --training.optimizer"):
        backend.optim_step().wait()
