from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollouts.inference.embedded import decode
from rollouts.inference.embedded.decode import sample, uniforms


def test_a_stream_is_its_seed():
    first, second = uniforms(3), uniforms(3)
    numbers = [next(first) for _ in range(200)]
    assert numbers == [next(second) for _ in range(200)]
    assert numbers != list(itertools.islice(uniforms(4), 200))
    assert all(0 <= u <= 1 - 2**-24 for u in numbers)
    assert abs(np.mean(numbers) - 0.5) < 0.06
    next(uniforms(-1))
    next(uniforms(2**63))


def test_frequencies_follow_the_distribution_at_the_temperature():
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    stream = uniforms(0)
    for temperature in (1.0, 0.5):
        count = 4000
        ids, logprobs = sample(logits.expand(count, -1), [next(stream) for _ in range(count)], [temperature] * count)
        expected = (logits[0] / temperature).softmax(0)
        found = torch.bincount(torch.tensor(ids), minlength=4) / count
        assert (found - expected).abs().max() < 0.03
        assert np.allclose(logprobs, expected.log()[ids], atol=1e-6)


@given(
    st.lists(st.one_of(st.floats(-60, 60, width=32), st.just(-math.inf)), min_size=2, max_size=9),
    st.sampled_from([0.0, 2**-24, 0.25, 0.5, 1 - 2**-24]),
    st.sampled_from([0.0, 0.6, 1.0]),
)
def test_no_id_of_probability_zero_and_no_positive_logprob(row, uniform, temperature):
    row[0] = 1.5
    ids, logprobs = sample(torch.tensor([row]), [uniform], [temperature])
    assert row[ids[0]] > -math.inf
    assert -math.inf < logprobs[0] <= 0


def test_zero_temperature_is_argmax_at_temperature_one_beside_sampled_rows():
    logits = torch.tensor([[0.0, 3.0, 1.0]] * 2)
    ids, logprobs = sample(logits, [0.0, 0.0], [0.0, 1.0])
    assert ids == [1, 0]
    assert np.allclose(logprobs, logits[0].log_softmax(0)[[1, 0]])


def test_rows_do_not_touch_each_other():
    logits = torch.randn(5, 11)
    uniforms = [0.1, 0.3, 0.5, 0.7, 0.9]
    ids, logprobs = sample(logits, uniforms, [0.6] * 5)
    for row in range(5):
        assert sample(logits[row : row + 1], uniforms[row : row + 1], [0.6]) == ([ids[row]], [logprobs[row]])


def test_a_sum_that_is_not_monotone_is_drawn_again_exactly(monkeypatch):
    monkeypatch.setattr(decode, "_invert", lambda logprobs, uniforms: torch.tensor([2]))  # an id of probability 0
    logits = torch.tensor([[0.0, 0.0, -math.inf, 0.0]])
    assert sample(logits, [0.5], [1.0])[0] == [1]
    assert sample(logits, [0.9], [1.0])[0] == [3]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_normalized_in_float32(dtype):
    logits = torch.randn(3, 50).to(dtype)
    ids, logprobs = sample(logits, [0.2, 0.5, 0.8], [1.0] * 3)
    expected = logits.float().log_softmax(1)[range(3), ids]
    assert np.allclose(logprobs, expected, atol=1e-6)
