"""Numerics 6, without the timing: chunked logprobs and entropy equal the naive ones, forward and backward."""

from __future__ import annotations

import pytest
import torch

from rollouts.training.algorithms.logprobs import logprobs_and_entropy, token_logprobs


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
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(23, 8)
    tied = torch.nn.Linear(8, 23, bias=False)
    tied.weight = embedding.weight
    return {"tied": tied, "lora": LoraHead(), "capped": torch.nn.Sequential(torch.nn.Linear(8, 23), torch.nn.Tanh())}


@pytest.mark.parametrize("which", ["tied", "lora", "capped"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("rows_a_chunk", [1, 4, 7, 17, 100])
def test_chunked_equals_naive(which, temperature, rows_a_chunk):
    head = heads()[which]
    hidden = torch.randn(17, 8, requires_grad=True)
    targets = torch.randint(23, (17,))
    weights = torch.randn(2, 17)
    results = []
    for chunked in (True, False):
        for variable in (hidden, *head.parameters()):
            variable.grad = None
        if chunked:
            found = logprobs_and_entropy(
                head, hidden, targets, vocabulary_size=23, temperature=temperature, chunk_elements_max=23 * rows_a_chunk
            )
        else:
            found = naive(head(hidden), targets, temperature)
        (found[0] * weights[0] + found[1] * weights[1]).sum().backward()
        gradients = [v.grad.clone() for v in (hidden, *head.parameters()) if v.grad is not None]
        results.append((*(value.detach() for value in found), *gradients))
    assert len(results[0]) == len(results[1])
    for ours, reference in zip(*results, strict=True):
        torch.testing.assert_close(ours, reference, atol=1e-5, rtol=1e-5)
    wrong = naive(head(hidden), targets, temperature * 1.1)[0]  # control: another temperature
    assert not torch.allclose(results[0][0], wrong, atol=1e-3)


@pytest.mark.parametrize("outputs", [(0,), (1,), (0, 1)])
def test_gradcheck(outputs):
    logits = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(7, (5,))
    divisor = torch.tensor([0.5, 1.0, 2.0, 1.0, 0.7], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: tuple(token_logprobs(x, targets, divisor)[i] for i in outputs), (logits,))


def test_a_masked_vocabulary_is_no_nan():
    logits = torch.tensor([[1.0, 2.0, float("-inf")]], requires_grad=True)
    logprobs, entropy = token_logprobs(logits, torch.tensor([1]))
    (logprobs + entropy).sum().backward()
    assert torch.isfinite(logits.grad).all() and torch.isfinite(entropy).all()
    expected = naive(torch.tensor([[1.0, 2.0]]), torch.tensor([1]), 1.0)
    torch.testing.assert_close((logprobs, entropy), expected)


def test_half_precision_is_scored_in_fp32():
    logprobs, entropy = token_logprobs(torch.randn(3, 5).bfloat16(), torch.tensor([0, 1, 2]))
    assert logprobs.dtype == entropy.dtype == torch.float32
