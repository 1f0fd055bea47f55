"""Numerics 1 and 2: one by one = left-padded = forest, logprobs and gradients; a row sees only itself; the check at the
start finds what is wrong.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rollouts.training.algorithms.logprobs import token_logprobs
from rollouts.training.backends import attention, transformer
from rollouts.training.backends.transformer import make_inputs, run_features
from rollouts.training.batching import make_batch

MODELS = ("qwen3", "llama", "gpt2", "mistral", "gemma3")
PROMPT = (18, 24)  # long enough to be shared


def rows_of(samples):
    rows = make_batch(samples, [1.0] * len(samples), aggregation="token_mean", step=0).rows
    return [row.tokens for row in rows], [np.flatnonzero(row.loss_mask) for row in rows]


def one_by_one(model, rows, wanted):
    """Logprobs of the wanted tokens by row, each row alone through `model(...).logits`: the reference."""
    found = []
    for row, positions in zip(rows, wanted, strict=True):
        logits = model(input_ids=torch.tensor([row]), use_cache=False).logits[0]
        found.append(token_logprobs(logits[positions - 1], torch.tensor(row)[positions])[0])
    return torch.cat(found)


def left_padded(model, rows, wanted):
    """As one batch padded on the left, with a mask and positions of its own: another independent way."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    found = []
    for number, (row, index) in enumerate(zip(rows, wanted, strict=True)):
        found.append(token_logprobs(logits[number, width - len(row) + index - 1], torch.tensor(row)[index])[0])
    return torch.cat(found)


def as_forest(paths, rows, wanted, *, share=True):
    inputs = make_inputs(rows, wanted, share=share)
    with paths.attending():
        features, _ = run_features(paths, inputs)
        values, _ = paths.logprobs_and_entropy(features, torch.from_numpy(inputs.targets), 1.0)
    return inputs.of_tokens(values)


def gradients(model, values):
    weights = torch.randn(values.shape, generator=torch.Generator().manual_seed(3))
    model.zero_grad()
    (values * weights).sum().backward()
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()])


def assert_same(model, values, reference, reference_gradient):
    assert (values - reference).abs().max() <= 1e-5
    gradient = gradients(model, values)
    assert (gradient - reference_gradient).norm() <= 1e-4 * reference_gradient.norm()


@pytest.mark.parametrize("name", [*MODELS, "gemma2"])
def test_all_ways_of_running_rows_agree(tiny, name):
    model = getattr(tiny, name)()
    rows, wanted = rows_of(tiny.make_samples(groups=3, rollouts=3, prompt=PROMPT))
    reference = one_by_one(model, rows, wanted)
    expected = gradients(model, reference)
    reference = reference.detach()
    paths = transformer.inspect_model(model)
    assert paths.runs_forests == (name != "gemma2")
    assert paths.windows == {"mistral": (8,), "gemma3": (None, 8)}.get(name, (None,))
    assert_same(model, left_padded(model, rows, wanted), reference, expected)
    for share in (True, False):
        assert_same(model, as_forest(paths, rows, wanted, share=share), reference, expected)
    budgets = paths._replace(budgets=(100, 256))
    assert_same(model, as_forest(budgets, rows, wanted), reference, expected)


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_what_is_beside_a_row_changes_nothing_of_it(tiny, name, implementation):
    """Numerics 2: bit-equal."""
    model = getattr(tiny, name)()
    model.set_attn_implementation(implementation)
    rows, wanted = rows_of(tiny.make_samples(groups=2, rollouts=1))
    paths = transformer.inspect_model(model)
    with torch.no_grad():
        before = as_forest(paths, rows, wanted)[: len(wanted[0])]
        other = [(7 * token + 3) % 61 for token in rows[1]]
        assert torch.equal(before, as_forest(paths, [rows[0], other], wanted)[: len(wanted[0])])
    assert model.config._attn_implementation == implementation, "outside of forests it is the model's own"


def ranged(forest):
    return forest._replace(positions=list(range(len(forest.tokens))))


def unforked(forest):
    """Every branch continues the one before it in the order."""
    branches = [
        branch._replace(parent=number - 1, depth=branch.start, end=len(forest.tokens))
        for number, branch in enumerate(forest.branches)
    ]
    return forest._replace(branches=branches)


@pytest.mark.parametrize(
    ("name", "wrong"), [("gpt2", ranged), ("qwen3", ranged), ("qwen3", unforked), ("llama", unforked)]
)
def test_control_wrong_positions_and_masks_are_found_at_the_start(tiny, monkeypatch, name, wrong):
    model = getattr(tiny, name)()
    groups = 1 if name == "gpt2" else 2  # its table has 64 positions
    rows, wanted = rows_of(tiny.make_samples(groups=groups, rollouts=3, prompt=(18, 18)))
    reference = one_by_one(model, rows, wanted).detach()
    paths = transformer.inspect_model(model)
    right = transformer.make_forest
    monkeypatch.setattr(transformer, "make_forest", lambda *rows, **how: wrong(right(*rows, **how)))
    with torch.no_grad():
        assert (as_forest(paths, rows, wanted) - reference).abs().max() > 1e-3
    notes = transformer.inspect_model(model).notes
    assert notes and notes[-1].startswith("rows are padded, and shared prompts run more than once, because it")


def test_control_a_mask_that_is_read_from_positions_hides_ancestors(tiny, monkeypatch):
    """Without a mask transformers takes jumps of positions for the bounds of rows. Ours is registered without a
    function for masks, so that it makes none.
    """
    from transformers import AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    monkeypatch.setitem(AttentionMaskInterface._global_mapping, attention.NAME, sdpa_mask)
    paths = transformer.inspect_model(tiny.qwen3())
    assert not paths.runs_forests and "a mask" in paths.notes[-1]


def test_why_a_model_runs_no_forests(tiny):
    def reason(model):
        paths = transformer.inspect_model(model)
        assert not paths.runs_forests
        return paths.notes[-1].removeprefix("rows are padded, and shared prompts run more than once, because ")

    assert reason(tiny.gemma2()) == "it raises NotImplementedError: its attention needs softcap"
    model = tiny.llama()
    model.config.sliding_window = 4096
    assert reason(model) == "its layers do not say that their attention has a window"
    model = tiny.llama()
    model.config.layer_types = ["full_attention", "linear_attention"]
    assert reason(model) == "it has layers of kind linear_attention"
    model = tiny.llama()
    model.config.attention_chunk_size = 4096
    assert reason(model) == "its attention is in chunks"
    model = tiny.llama()
    model.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    assert reason(model) == "its positions depend on the length of the whole input"


def test_attention_that_cannot_be_replaced_is_found_out():
    """Small weights hide that rows see each other; but no layer calls ours."""
    from transformers import BloomConfig, BloomForCausalLM

    config = BloomConfig(vocab_size=61, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.02)
    paths = transformer.inspect_model(BloomForCausalLM(config).eval().bfloat16())
    assert not paths.runs_forests and "its attention is its own" in paths.notes[-1]


def test_a_recurrent_model_is_found_out_by_its_logits():
    """Mamba takes what it is given, and carries one row into the next."""
    from transformers import MambaConfig, MambaForCausalLM

    torch.manual_seed(0)
    config = MambaConfig(vocab_size=61, hidden_size=16, state_size=4, num_hidden_layers=2, initializer_range=0.3)
    paths = transformer.inspect_model(MambaForCausalLM(config).eval())
    assert not paths.runs_forests and "because it" in paths.notes[-1]


def test_shared_prompts_get_their_gradient(tiny):
    """Cutting the trunk's gradient off is visible: the prompt's embeddings would stay without it."""
    model = tiny.qwen3(tied=False)
    rows, wanted = rows_of(tiny.make_samples(groups=1, rollouts=3, prompt=PROMPT))
    for row in rows:  # token 60 occurs in the prompt only
        row[:] = [60 if t == 1 else min(token, 59) for t, token in enumerate(row)]
    as_forest(transformer.inspect_model(model), rows, wanted).sum().backward()
    assert model.get_input_embeddings().weight.grad[60].norm() > 0


def test_the_head_runs_once_for_each_prediction(tiny):
    """Eight members of a group say the same, up to the last token."""
    prompt = list(range(20))
    rows = [[*prompt, 30, 31 + number % 2] for number in range(8)]
    inputs = make_inputs(rows, [np.array([20, 21])] * 8)
    assert len(inputs.nodes) == 1 + 2 and len(inputs.gather) == 16
    model = tiny.qwen3()
    found = as_forest(transformer.inspect_model(model), rows, inputs.wanted)
    assert (found - one_by_one(model, rows, inputs.wanted)).abs().max() <= 1e-5


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
    rows, wanted = rows_of(tiny.make_samples(groups=2, rollouts=3))
    assert (as_forest(paths, rows, wanted) - one_by_one(model, rows, wanted)).abs().max() <= 1e-5


def test_positions_end_where_the_table_ends(tiny):
    """GPT-2 has a table of positions; a forest must not reach beyond it."""
    model = tiny.gpt2(positions=40)
    rows, wanted = rows_of(tiny.make_samples(groups=2, rollouts=3, prompt=(25, 28)))
    assert 35 < max(map(len, rows)) <= 40
    paths = transformer.inspect_model(model)._replace(budgets=(512,))
    assert paths.runs_forests
    assert (as_forest(paths, rows, wanted) - one_by_one(model, rows, wanted)).abs().max() <= 1e-5


def test_no_requested_position_is_our_mistake():
    with pytest.raises(AssertionError, match="no position was requested"):
        make_inputs([[1, 2]], [np.array([], dtype=int)])
