"""Numerics 1: one by one = right-padded = shared prompt, logprobs and gradients; fast paths prove themselves."""

from __future__ import annotations

import pytest
import torch

from rollouts.training.algorithms.logprobs import logprobs_and_entropy, token_logprobs
from rollouts.training.backends import transformer
from rollouts.training.batching import make_batch, plan_layout

MODELS = ("qwen3", "llama", "gpt2", "gemma2")


def rows_of(samples):
    return make_batch(samples, [1.0] * len(samples), aggregation="token_mean", step=0).rows


def live(row):
    return [t for t, weight in enumerate(row.loss_mask) if weight > 0]


def one_by_one(model, rows):
    """Logprobs of live tokens by row, each row alone through `model(...).logits`: the reference."""
    found = []
    for row in rows:
        logits = model(input_ids=torch.tensor([row.tokens]), use_cache=False).logits[0]
        positions = torch.tensor(live(row))
        found.append(token_logprobs(logits[positions - 1], torch.tensor(row.tokens)[positions])[0])
    return torch.cat(found)


def left_padded(model, rows):
    """As one batch padded on the left, with a mask and positions of its own: another independent way."""
    width = max(len(row.tokens) for row in rows)
    ids = torch.tensor([[0] * (width - len(row.tokens)) + row.tokens for row in rows])
    mask = torch.tensor([[0] * (width - len(row.tokens)) + [1] * len(row.tokens) for row in rows])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    found = []
    for number, row in enumerate(rows):
        index = torch.tensor(live(row))
        targets = torch.tensor(row.tokens)[index]
        found.append(token_logprobs(logits[number, width - len(row.tokens) + index - 1], targets)[0])
    return torch.cat(found)


def by_layout(paths, rows, layout):
    features, selection = transformer.run_rows(paths, rows, layout, [live(row) for row in rows])
    targets = [rows[n].tokens[t] for n, ts in zip(selection.rows, selection.positions, strict=True) for t in ts]
    values, _ = logprobs_and_entropy(paths.head, features, torch.tensor(targets), vocabulary_size=paths.vocabulary_size)
    parts = dict(zip(selection.rows, torch.split(values, [len(p) for p in selection.positions]), strict=True))
    return torch.cat([parts[number] for number in range(len(rows))])


def gradients(model, values):
    weights = torch.randn(values.shape, generator=torch.Generator().manual_seed(3))
    model.zero_grad()
    (values * weights).sum().backward()
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()])


def assert_same(model, values, reference, reference_gradient):
    assert (values - reference).abs().max() <= 1e-5
    gradient = gradients(model, values)
    assert (gradient - reference_gradient).norm() <= 1e-4 * reference_gradient.norm()


@pytest.mark.parametrize("name", MODELS)
def test_all_ways_of_running_rows_agree(tiny, name):
    model = getattr(tiny, name)()
    rows = rows_of(tiny.make_samples(groups=3, rollouts=3))
    reference = one_by_one(model, rows)
    expected = gradients(model, reference)
    reference = reference.detach()
    paths = transformer.inspect_model(model)
    assert_same(model, left_padded(model, rows), reference, expected)
    assert_same(model, by_layout(paths, rows, plan_layout(rows, share_prefix=False)), reference, expected)
    assert paths.share_prefix == (name != "gemma2")
    if paths.share_prefix:
        for saving in (1, 10_000):
            layout = plan_layout(rows, share_prefix=True, bucket_saving_min=saving)
            assert len(layout.prefixes) == 3
            assert_same(model, by_layout(paths, rows, layout), reference, expected)


def test_control_wrong_positions_are_seen(tiny, monkeypatch):
    model = tiny.qwen3()
    rows = rows_of(tiny.make_samples(groups=2, rollouts=3))
    reference = one_by_one(model, rows).detach()
    paths = transformer.inspect_model(model)
    right = transformer._continue

    def shifted(*arguments):
        inputs = right(*arguments)
        return inputs | {"position_ids": inputs["position_ids"] - inputs["position_ids"][:, :1]}

    monkeypatch.setattr(transformer, "_continue", shifted)
    values = by_layout(paths, rows, plan_layout(rows, share_prefix=True))
    assert (values - reference).abs().max() > 1e-2
    notes = transformer.inspect_model(model).notes
    assert "shared prompts are not run once" in notes[0], "the probe at load would have caught it"


def test_control_a_leaking_mask_is_seen(tiny, monkeypatch):
    model = tiny.qwen3()
    right = transformer._continue
    monkeypatch.setattr(
        transformer,
        "_continue",
        lambda *arguments: (found := right(*arguments)) | {"attention_mask": found["attention_mask"] * 0},
    )
    assert not transformer.inspect_model(model).share_prefix


def test_shared_prompts_get_their_gradient(tiny):
    """Cutting the prefix's gradient off is visible: the prompt's embeddings would stay without it."""
    model = tiny.qwen3(tied=False)
    samples = tiny.make_samples(groups=1, rollouts=3)
    rows = rows_of(samples)
    for row in rows:  # token 60 occurs in the prompt only
        row.tokens = [60 if t == 1 else min(token, 59) for t, token in enumerate(row.tokens)]
    paths = transformer.inspect_model(model)
    by_layout(paths, rows, plan_layout(rows)).sum().backward()
    assert model.get_input_embeddings().weight.grad[60].norm() > 0


def test_a_head_that_is_not_what_it_seems_is_not_used(tiny):
    model = tiny.qwen3()
    own_forward = model.forward

    def forward(*args, **kwargs):
        output = own_forward(*args, **kwargs)
        output.logits = output.logits * 0.5
        return output

    model.forward = forward
    paths = transformer.inspect_model(model)
    assert paths.notes[0].startswith("the whole logits are computed, for its logits would be")
    rows = rows_of(tiny.make_samples(groups=2, rollouts=3))
    values = by_layout(paths, rows, plan_layout(rows, share_prefix=paths.share_prefix))
    assert (values - one_by_one(model, rows)).abs().max() <= 1e-5


def test_scaled_logits_of_configurations(tiny):
    assert transformer.inspect_model(tiny.gemma2()).notes == (
        "shared prompts are not run once, for it has layers of kind sliding_attention",
    )


def test_positions_end_where_the_table_ends(tiny):
    """GPT-2 has a table of positions; padding must not reach beyond it."""
    model = tiny.gpt2(positions=32)
    rows = rows_of(tiny.make_samples(groups=2, rollouts=3, prompt=(18, 20)))
    assert max(len(row.tokens) for row in rows) <= 32
    paths = transformer.inspect_model(model)
    values = by_layout(paths, rows, plan_layout(rows))
    assert (values - one_by_one(model, rows)).abs().max() <= 1e-5
