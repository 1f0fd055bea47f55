"""Numerics 6: chunked logprobs and entropy equal the naive ones, forward and backward, and hold one chunk at a time.

Time and resident memory: benchmarks/logprobs.py.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rollouts.training.algorithms import logprobs as logprobs_module
from rollouts.training.algorithms.logprobs import (
    logprobs_and_entropy,
    logprobs_with_alternatives,
    token_logprobs,
    topk_logprobs,
)


def naive(logits, targets, temperature):
    logp = torch.log_softmax(logits.float() / temperature, dim=-1)
    return logp.gather(-1, targets[:, None]).squeeze(-1), -(logp.exp() * logp).sum(-1)


class LoraHead(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.base = torch.nn.Linear(8, 23, bias=False).requires_grad_(False)
        self.a, self.b = torch.nn.Linear(8, 2, bias=False), torch.nn.Linear(2, 23, bias=False)

    def forward(self, hidden):
        return self.base(hidden) + self.b(self.a(hidden))


def heads():
    """Plain ones (the fused path) and others (any function), in fp64."""
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(23, 8)
    tied = torch.nn.Linear(8, 23, bias=False)
    tied.weight = embedding.weight
    hooked = torch.nn.Linear(8, 23, bias=False)
    hooked.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))
    frozen = torch.nn.Linear(8, 23).requires_grad_(False)
    capped = torch.nn.Sequential(torch.nn.Linear(8, 23), torch.nn.Tanh())
    all_heads = {"tied": tied, "bias": torch.nn.Linear(8, 23), "frozen": frozen}
    all_heads |= {"hooked": hooked, "lora": LoraHead(), "peft": peft_head(), "capped": capped}
    return {name: head.double() for name, head in all_heads.items()}


def peft_head():
    import peft

    model = torch.nn.Sequential(torch.nn.Linear(8, 23, bias=False))
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights=False), model)
    return model[0]


NAMES = ("tied", "bias", "frozen", "hooked", "lora", "peft", "capped")
TEMPERATURES = (1.0, 0.6)


@pytest.fixture
def chunks_of(monkeypatch):
    """Sets the size of a chunk, in rows of the vocabulary of 23."""
    return lambda rows: monkeypatch.setattr(logprobs_module, "CHUNK_ELEMENTS_MAX", 23 * rows)


def naive_of(logits, targets, alternatives, temperature):
    """[17], [17], [17, 3] by the plain formulas."""
    logp = torch.log_softmax(logits / temperature, dim=-1)
    return logp.gather(-1, targets[:, None]).squeeze(-1), -(logp.exp() * logp).sum(-1), logp.gather(-1, alternatives)


def with_gradients(head, hidden, found, weights):
    """The values, and the gradients of a weighted sum of them."""
    for variable in (hidden, *head.parameters()):
        variable.grad = None
    sum((value * weight).sum() for value, weight in zip(found, weights, strict=True) if weight is not None).backward()
    gradients = [v.grad.clone() for v in (hidden, *head.parameters()) if v.grad is not None]
    return [*(value.detach() for value in found), *gradients]


@pytest.mark.parametrize("which", NAMES)
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("rows_a_chunk", [4, *(pytest.param(rows, marks=pytest.mark.nightly) for rows in (1, 17))])
@pytest.mark.parametrize("learned", ["all", "logprobs", "entropy", "alternatives"])
def test_chunked_equals_naive(which, temperature, rows_a_chunk, learned, chunks_of, monkeypatch):
    chunks_of(rows_a_chunk)
    monkeypatch.setattr(logprobs_module, "_SCRATCH_ELEMENTS_CPU", 2 * 23)  # blocks of two rows within a chunk
    head = heads()[which]
    hidden = torch.randn(17, 8, dtype=torch.float64, requires_grad=True)
    targets, alternatives = torch.randint(23, (17,)), torch.stack([torch.randperm(23)[:3] for _ in range(17)])
    alternatives[3, 1] = targets[3]  # the target may be among them
    weights = [torch.randn(17).double(), torch.randn(17).double(), torch.randn(17, 3).double()]
    if learned != "all":
        kept = ("logprobs", "entropy", "alternatives").index(learned)
        weights = [weight if place == kept else None for place, weight in enumerate(weights)]
    settings = {"vocabulary_size": 23, "temperature": temperature}
    ours = logprobs_with_alternatives(head, hidden, targets, alternatives, **settings)
    expected = with_gradients(head, hidden, naive_of(head(hidden), targets, alternatives, temperature), weights)
    for one, other in zip(with_gradients(head, hidden, ours, weights), expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-10)
    if learned in ("logprobs", "entropy"):
        ours = (*logprobs_and_entropy(head, hidden, targets, **settings), ours[2].detach())
        for one, other in zip(with_gradients(head, hidden, ours, weights), expected, strict=True):
            torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-10)
    # control: another temperature
    wrong = with_gradients(head, hidden, naive_of(head(hidden), targets, alternatives, temperature * 1.1), weights)
    for one, other in zip(wrong, expected, strict=True):
        assert not torch.allclose(one, other, atol=1e-4)


@pytest.mark.parametrize("which", NAMES)
def test_without_gradient_and_again_with_a_graph_that_was_kept(which, chunks_of):
    chunks_of(5)
    head = heads()[which]
    hidden, targets = torch.randn(17, 8, dtype=torch.float64, requires_grad=True), torch.randint(23, (17,))
    settings = {"vocabulary_size": 23}
    found = logprobs_and_entropy(head, hidden, targets, **settings)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(logprobs_and_entropy(head, hidden, targets, **settings), found)
    total = (found[0] * torch.linspace(0, 1, 17) + found[1] * torch.linspace(1, 0, 17)).sum()
    first = torch.autograd.grad(total, hidden, retain_graph=True)[0]
    torch.testing.assert_close(torch.autograd.grad(total, hidden)[0], first)


@pytest.mark.parametrize("which", NAMES)
def test_no_tokens_are_no_error(which):
    head = heads()[which]
    hidden = torch.randn(0, 8, dtype=torch.float64, requires_grad=True)
    logprobs, entropy = logprobs_and_entropy(head, hidden, torch.zeros(0, dtype=torch.long), vocabulary_size=23)
    (logprobs.sum() + entropy.sum()).backward()
    assert logprobs.shape == entropy.shape == (0,) and hidden.grad.shape == (0, 8)


@pytest.mark.parametrize("which", NAMES)
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("rows_a_chunk", [7, *(pytest.param(rows, marks=pytest.mark.nightly) for rows in (1, 17))])
def test_topk_is_that_of_the_whole(which, temperature, rows_a_chunk, chunks_of):
    chunks_of(rows_a_chunk)
    head = heads()[which]
    hidden = torch.randn(17, 8, dtype=torch.float64, requires_grad=True)
    settings = {"vocabulary_size": 23, "temperature": temperature}
    ids, logprobs = topk_logprobs(head, hidden, 4, **settings)
    assert not logprobs.requires_grad
    expected = naive_of(head(hidden), ids[:, 0], torch.arange(23).expand(17, -1), temperature)[2].topk(4, -1)
    assert torch.equal(ids, expected.indices)
    torch.testing.assert_close(logprobs, expected.values.detach())
    mine = logprobs_with_alternatives(head, hidden, ids[:, 0], ids, **settings)[2]
    torch.testing.assert_close(mine.detach(), logprobs)
    with pytest.raises(AssertionError, match="the 24 likeliest of 23 tokens"):
        topk_logprobs(head, hidden, 24, vocabulary_size=23)


class Largest(TorchDispatchMode):
    """The largest storage that any operation gives, in numbers."""

    def __init__(self):
        super().__init__()
        self.found = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(each, torch.Tensor):
                self.found = max(self.found, each.untyped_storage().nbytes() // each.element_size())
        return result


@pytest.mark.parametrize("which", ["plain", "any"])
def test_nothing_is_as_large_as_tokens_times_vocabulary(which, monkeypatch):
    monkeypatch.setattr(logprobs_module, "CHUNK_ELEMENTS_MAX", 20 * 500)
    head = torch.nn.Linear(4, 500, bias=False)
    function = head if which == "plain" else (lambda states: head(states))
    hidden, targets = torch.randn(300, 4, requires_grad=True), torch.randint(500, (300,))
    with Largest() as largest:
        values = logprobs_and_entropy(function, hidden, targets, vocabulary_size=500)
        (values[0].sum() + values[1].sum()).backward()
    assert largest.found == 20 * 500
    with Largest() as control:
        sum(value.sum() for value in naive(head(hidden), targets, 1.0)).backward()
    assert control.found >= 300 * 500


def test_half_precision_heads(chunks_of):
    """The same numbers as the layer itself gives, scored in fp32."""
    chunks_of(17)
    torch.manual_seed(0)
    head = torch.nn.Linear(8, 23).bfloat16()
    reference = copy.deepcopy(head)
    hidden = torch.randn(17, 8).bfloat16().requires_grad_()
    targets = torch.randint(23, (17,))
    ours = logprobs_and_entropy(head, hidden, targets, vocabulary_size=23)
    expected = token_logprobs(reference(hidden), targets)
    torch.testing.assert_close(ours, expected)
    mine = torch.autograd.grad(ours[0].sum(), [hidden, *head.parameters()])
    theirs = torch.autograd.grad(expected[0].sum(), [hidden, *reference.parameters()])
    torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("outputs", [(0,), (1,), (0, 1)])
def test_gradcheck(outputs):
    logits = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(7, (5,))
    assert torch.autograd.gradcheck(lambda x: tuple(token_logprobs(x, targets, 0.7)[i] for i in outputs), (logits,))


def test_a_masked_vocabulary_is_no_nan():
    logits = torch.tensor([[1.0, 2.0, float("-inf")]], requires_grad=True)
    logprobs, entropy = token_logprobs(logits, torch.tensor([1]))
    (logprobs + 100 * entropy).sum().backward()
    assert torch.isfinite(logits.grad).all() and torch.isfinite(entropy).all()
    expected = naive(torch.tensor([[1.0, 2.0]]), torch.tensor([1]), 1.0)
    torch.testing.assert_close((logprobs, entropy), expected)


def test_a_bias_that_masks_the_vocabulary_is_no_nan():
    head = torch.nn.Linear(2, 3)
    with torch.no_grad():
        head.bias[2] = float("-inf")
    hidden = torch.randn(4, 2, requires_grad=True)
    for temperature in (1.0, 0.01):
        values = logprobs_and_entropy(
            head, hidden, torch.zeros(4, dtype=torch.long), vocabulary_size=3, temperature=temperature
        )
        (values[0] + values[1]).sum().backward()
        assert torch.isfinite(torch.cat(values)).all()
        assert all(torch.isfinite(v.grad).all() for v in (hidden, head.weight, head.bias))


def test_half_precision_is_scored_in_fp32():
    logprobs, entropy = token_logprobs(torch.randn(3, 5).bfloat16(), torch.tensor([0, 1, 2]))
    assert logprobs.dtype == entropy.dtype == torch.float32
