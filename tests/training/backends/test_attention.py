"""Attention over a forest: every way that a CPU has equals dense attention under the rule."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from rollouts.training.backends import attention
from rollouts.training.backends.attention import attend, plan_attention
from rollouts.training.forest import make_forest

CPU = torch.device("cpu")


def random_rows(rng):
    rows = [[rng.randrange(3) for _ in range(rng.randint(1, 60))]]
    for _ in range(rng.randint(0, 9)):
        before = rng.choice(rows)
        shared = before[: rng.randint(0, len(before))] if rng.random() < 0.8 else []
        rows.append(shared + [rng.randrange(3) for _ in range(rng.randint(0 if shared else 1, 30))])
    return rows


def visible_to(forest, window=None):
    """[M, M] from the rows: node i sees what is before it in a row, at most `window` tokens of it."""
    count = len(forest.tokens)
    visible = torch.zeros(count, count, dtype=torch.bool)
    for path in forest.paths:
        for place, node in enumerate(path):
            seen = path[: place + 1] if window is None else path[max(0, place + 1 - window) : place + 1]
            visible[node, seen] = True
    return visible


def inputs_of(forest, generator, heads=4, kv_heads=2):
    count = len(forest.tokens)
    query, key, value = (
        torch.randn(1, number, count, 8, dtype=torch.float64, generator=generator, requires_grad=True)
        for number in (heads, kv_heads, kv_heads)
    )
    return query, key, value


def attended(forest, tensors, way, window):
    plan = plan_attention(forest, CPU, torch.float64, windows=(window,), way=way)
    return attend(torch.nn.Identity(), *tensors, None, 0.3, sliding_window=window, forest=plan)[0]


def dense(forest, tensors, window):
    query, key, value = tensors
    found = scaled_dot_product_attention(
        query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1), visible_to(forest, window), scale=0.3
    )
    return found.transpose(1, 2)


@pytest.mark.parametrize("window", [None, 7])
def test_blocks_equal_dense_attention(window):
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    for _ in range(30):
        forest = make_forest(random_rows(rng))
        tensors = inputs_of(forest, generator)
        found, expected = attended(forest, tensors, "blocks", window), dense(forest, tensors, window)
        weights = torch.randn(found.shape, dtype=torch.float64, generator=generator)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        ours = torch.autograd.grad((found * weights).sum(), tensors)
        theirs = torch.autograd.grad((expected * weights).sum(), tensors)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


def test_blocks_are_cut_where_padding_costs_more(monkeypatch):
    rng = random.Random(3)
    forest = make_forest([[rng.randrange(50) for _ in range(length)] for length in (3, 100, 101, 5, 4)])
    for saving, count in ((1, 5), (3000, 2), (10**9, 1)):
        monkeypatch.setattr(attention, "_BLOCK_SAVING_MIN", saving)
        assert len(plan_attention(forest, CPU, torch.float32).blocks) == count


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_mask_of_flex_attention_is_the_rule(monkeypatch):
    """1,000 random forests. Some run too; without compilation, which takes seconds for each shape."""
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr(attention, "_flex", lambda: flex_attention)
    monkeypatch.setattr(attention, "_FLEX_BLOCK", 16)
    rng, generator = random.Random(1), torch.Generator().manual_seed(1)
    for number in range(1000):
        forest, window = make_forest(random_rows(rng)), (None, 7)[number % 2]
        nodes, zero = torch.arange(len(forest.tokens)), torch.tensor(0)
        found = attention.visibility(forest, CPU, window)(zero, zero, nodes[:, None], nodes[None])
        expected = visible_to(forest, window)
        assert torch.equal(found, expected)
        if number % 50:
            continue
        mask = plan_attention(forest, CPU, torch.float64, windows=(window,), way="flex").masks[window]
        count = len(nodes)
        blocks = torch.nn.functional.pad(expected, (0, -count % 16, 0, -count % 16))
        blocks = blocks.unflatten(0, (-1, 16)).unflatten(2, (-1, 16)).any(3).any(1)
        listed = mask.to_dense()[0, 0].bool()
        # A block that only a window hides may be listed; its pairs are masked one by one.
        assert torch.equal(listed, blocks) if window is None else torch.equal(listed | blocks, listed)
        tensors = [tensor.detach() for tensor in inputs_of(forest, generator)]  # no backward pass on a CPU
        torch.testing.assert_close(attended(forest, tensors, "flex", window), dense(forest, tensors, window))


def test_one_row_is_causal_attention():
    forest = make_forest([list(range(40))])
    tensors = inputs_of(forest, torch.Generator().manual_seed(2))
    torch.testing.assert_close(attended(forest, tensors, "dense", None), dense(forest, tensors, None))


def test_sequences_of_varying_length_get_their_bounds(monkeypatch):
    """A stand-in for torch's kernel, which needs a GPU, reads the arguments as torch documents them."""

    def varlen(query, key, value, starts, starts_too, longest, longest_too, *, scale, window_size):
        assert starts is starts_too and longest == longest_too
        assert query.shape[1] == key.shape[1], "heads are not grouped there"
        pieces = []
        for first, last in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
            assert last - first <= longest
            if first == last:
                continue
            at = torch.arange(last - first)
            seen = at[None] <= at[:, None]
            if window_size[0] >= 0:
                seen &= at[:, None] - at[None] <= window_size[0]
            own = (tensor[first:last].transpose(0, 1)[None] for tensor in (query, key, value))
            pieces.append(scaled_dot_product_attention(*own, seen, scale=scale)[0].transpose(0, 1))
        return torch.cat(pieces)

    monkeypatch.setattr(attention, "_varlen", lambda: varlen)
    rng, generator = random.Random(4), torch.Generator().manual_seed(4)
    for window in (None, 7):
        forest = make_forest([[rng.randrange(50) for _ in range(rng.randint(1, 40))] for _ in range(5)]).padded(256)
        tensors = inputs_of(forest, generator)
        used = np.concatenate(forest.paths)
        found, expected = attended(forest, tensors, "varlen", window), dense(forest, tensors, window)
        torch.testing.assert_close(found[:, used], expected[:, used])


def test_the_way_follows_device_dtype_and_forest(monkeypatch):
    monkeypatch.setattr(attention, "_varlen", lambda: print)
    gpu, half = torch.device("cuda"), torch.bfloat16
    one, apart = make_forest([[1, 2, 3]]), make_forest([[1, 2, 3], [4, 5]])
    prompt = list(range(20))
    forked = make_forest([[*prompt, 30], [*prompt, 31]])

    def ways(device, dtype, window=0):
        return [attention._fastest(forest, device, dtype, window) for forest in (one, apart, forked)]

    assert ways(CPU, half) == ways(gpu, torch.float32) == ["blocks"] * 3
    assert ways(gpu, half) == ["dense", "varlen", "flex"]
    assert ways(gpu, half, window=2) == ["varlen", "varlen", "flex"]
    assert ways(gpu, half, window=9) == ["dense", "varlen", "flex"]
    monkeypatch.setattr(attention, "_varlen", lambda: None)
    assert ways(gpu, half) == ["dense", "flex", "flex"]


@pytest.mark.parametrize("others", [{"softcap": 50.0}, {"s_aux": 1.0}, {"dropout": 0.1}])
def test_another_kind_of_attention_is_refused(others):
    forest = make_forest([[1, 2, 3]])
    plan = plan_attention(forest, CPU, torch.float64)
    with pytest.raises(NotImplementedError, match="its attention needs"):
        attend(torch.nn.Identity(), *inputs_of(forest, None), None, 0.3, forest=plan, **others)
