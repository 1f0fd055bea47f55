"""Numerics 1 and 2: one by one = right-padded = left-padded = shared prompt = packed, logprobs and gradients; what is
packed sees itself only; fast paths prove themselves.
"""

from __future__ import annotations

import pytest
import torch

from rollouts.training.algorithms.logprobs import logprobs_and_entropy, token_logprobs
from rollouts.training.backends import transformer
from rollouts.training.batching import make_batch, pack_rows, plan_layout

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
    return in_order(paths, rows, *transformer.run_rows(paths, rows, layout, [live(row) for row in rows]))


def packed(paths, rows, bins):
    return in_order(paths, rows, *transformer.run_packed(paths, rows, bins, [live(row) for row in rows]))


def in_order(paths, rows, features, selection):
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
    assert paths.packs == (name != "gemma2")
    if paths.packs:
        lengths = [len(row.tokens) for row in rows]
        layouts = [pack_rows(lengths, tokens_max) for tokens_max in (1, 60, 10_000)]
        assert [len(bins) > 1 for bins in layouts] == [True, True, False]
        for bins in (*layouts, [list(reversed(chosen)) for chosen in reversed(layouts[1])]):
            assert_same(model, packed(paths, rows, bins), reference, expected)


@pytest.mark.parametrize("name", ["qwen3", "llama", "gpt2"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_control_shared_positions_are_seen(tiny, monkeypatch, name, attention):
    model = getattr(tiny, name)()
    model.set_attn_implementation(attention)
    rows = rows_of(tiny.make_samples(groups=2, rollouts=1))  # 64 positions are GPT-2's table
    bins = [[0, 1]]
    reference = one_by_one(model, rows)
    expected = gradients(model, reference)
    reference = reference.detach()
    paths = transformer.inspect_model(model)
    assert_same(model, packed(paths, rows, bins), reference, expected)
    right = transformer._packed_inputs

    def going_on(*arguments):
        inputs = right(*arguments)
        return inputs | {"position_ids": torch.arange(inputs["input_ids"].shape[1])[None]}

    monkeypatch.setattr(transformer, "_packed_inputs", going_on)
    if name == "gpt2":
        with pytest.raises(AssertionError):
            assert_same(model, packed(paths, rows, bins), reference, expected)
        notes = transformer.inspect_model(model).notes
        assert notes and notes[-1].startswith("rows are not packed, because it"), (
            "the probe at load would have caught it"
        )
    else:
        # Rotary positions are relative, so under the mask rows may begin anywhere; without it positions are the bounds.
        monkeypatch.setattr(transformer, "_attention", lambda causal: "flex_attention")
        with monkeypatch.context() as undone:
            undone.setattr(transformer, "_packed_inputs", right)
            assert_same(model, packed(paths, rows, bins), reference, expected)
        with pytest.raises(AssertionError):
            assert_same(model, packed(paths, rows, bins), reference, expected)
        assert not transformer.inspect_model(model).packs


@pytest.mark.parametrize("name", ["qwen3", "llama", "gpt2"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("first", [True, False])
def test_what_is_packed_beside_a_row_changes_nothing_of_it(tiny, monkeypatch, name, attention, first):
    """Numerics 2: bit-equal; without the block mask a later row sees an earlier one."""
    model = getattr(tiny, name)()
    model.set_attn_implementation(attention)
    rows = rows_of(tiny.make_samples(groups=2, rollouts=1))
    paths = transformer.inspect_model(model)
    bins = [[0, 1]] if first else [[1, 0]]
    count = len(live(rows[0]))

    def both():
        with torch.no_grad():
            before = packed(paths, rows, bins)[:count]
            other = [(7 * token + 3) % 61 for token in rows[1].tokens]
            changed = [rows[0], type(rows[1])(**{**vars_of(rows[1]), "tokens": other})]
            return before, packed(paths, changed, bins)[:count]

    before, after = both()
    assert torch.equal(before, after)
    right = transformer._packed_inputs

    def causal_only(*arguments):
        inputs = right(*arguments)
        return {name: value for name, value in inputs.items() if name != "attention_mask"} | {
            "attention_mask": torch.ones_like(inputs["input_ids"])
        }

    monkeypatch.setattr(transformer, "_packed_inputs", causal_only)
    before, after = both()
    assert torch.equal(before, after) == first
    assert not transformer.inspect_model(model).packs, "the probe at load would have caught it"


def vars_of(row):
    return {field: getattr(row, field) for field in row.__struct_fields__}


def test_rows_that_are_not_asked_for_are_not_run(tiny):
    paths = transformer.inspect_model(tiny.qwen3())
    rows = rows_of(tiny.make_samples(groups=2, rollouts=1))
    features, selection = transformer.run_packed(paths, rows, [[0], [1]], [[], [3, 5]])
    assert features.shape == (2, 32) and selection == transformer.Selection([1], [[3, 5]])
    with pytest.raises(AssertionError, match="no position was requested"):
        transformer.run_packed(paths, rows, [[0, 1]], [[], []])


@pytest.mark.parametrize("attention", ["sdpa", "eager", "flash_attention_2", "flex_attention"])
def test_packing_is_preferred_where_attention_skips(tiny, attention):
    model = tiny.qwen3()
    model.config._attn_implementation_internal = attention
    assert transformer.prefers_packing(model) == (attention in ("flash_attention_2", "flex_attention"))
    inputs = transformer._packed_inputs(model, [[5, 6, 7], [8, 9]])
    assert inputs["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    # transformers reads the bounds from the positions, where it is given no mask
    assert ("attention_mask" in inputs) == (attention in ("sdpa", "eager"))


def test_why_rows_are_not_packed(tiny):
    def reason(model):
        paths = transformer.inspect_model(model)
        assert not paths.packs
        return paths.notes[-1]

    assert reason(tiny.gemma2()) == "rows are not packed, because it has layers of kind sliding_attention"
    model = tiny.llama()
    model.config.sliding_window = 4096
    assert reason(model) == "rows are not packed, because its attention has a window"
    model = tiny.llama()
    model.config.layer_types = ["full_attention", "linear_attention"]
    assert reason(model) == "rows are not packed, because it has layers of kind linear_attention"
    model = tiny.llama()
    model.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    assert reason(model) == "rows are not packed, because its positions depend on the length of the whole input"
    model = tiny.gemma2()
    model.config._attn_implementation_internal = "flash_attention_2"
    assert transformer._why_not(model, "packed") == "", "there transformers keeps windows within rows"
    model.config._attn_implementation_internal = "paged"
    assert "is untested with it" in transformer._why_not(model, "packed")


def test_a_recurrent_model_is_found_out_by_its_logits():
    """Mamba takes what it is given, and carries one row into the next."""
    from transformers import MambaConfig, MambaForCausalLM

    torch.manual_seed(0)
    config = MambaConfig(vocab_size=61, hidden_size=16, state_size=4, num_hidden_layers=2, initializer_range=0.3)
    paths = transformer.inspect_model(MambaForCausalLM(config).eval())
    assert not paths.packs and not paths.share_prefix
    assert paths.notes[-1].startswith("rows are not packed, because it")


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
    assert "shared prompts run more than once" in notes[0], "the probe at load would have caught it"


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
    assert paths.notes[0].startswith("the logits of all tokens are computed, because its logits would be")
    rows = rows_of(tiny.make_samples(groups=2, rollouts=3))
    values = by_layout(paths, rows, plan_layout(rows, share_prefix=paths.share_prefix))
    assert (values - one_by_one(model, rows)).abs().max() <= 1e-5


def test_scaled_logits_of_configurations(tiny):
    assert transformer.inspect_model(tiny.gemma2()).notes == (
        "shared prompts run more than once, because it has layers of kind sliding_attention",
        "rows are not packed, because it has layers of kind sliding_attention",
    )


def test_positions_end_where_the_table_ends(tiny):
    """GPT-2 has a table of positions; padding must not reach beyond it."""
    model = tiny.gpt2(positions=32)
    rows = rows_of(tiny.make_samples(groups=2, rollouts=3, prompt=(18, 20)))
    assert max(len(row.tokens) for row in rows) <= 32
    paths = transformer.inspect_model(model)
    values = by_layout(paths, rows, plan_layout(rows))
    assert (values - one_by_one(model, rows)).abs().max() <= 1e-5
