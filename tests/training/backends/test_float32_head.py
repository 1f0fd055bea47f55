"""The float32 head: logits closer to those of the fp32 model; tied or not, with LoRA, generated, saved and loaded."""

from __future__ import annotations

import copy

import numpy as np
import peft
import pytest
import torch
from rollouts_fsdp import backend
from transformers import AutoModelForCausalLM

from rollouts.errors import ConfigError
from rollouts.models import loading
from rollouts.training.backends import transformer
from rollouts.training.backends.optimizer import TorchSettings
from rollouts.training.backends.transformer import use_float32_head

IDS = torch.tensor([[5, 17, 3, 40, 8, 60, 1, 22, 9, 33, 12, 4]])


def model_of(tiny, name):
    if name == "qwen3":
        return tiny.qwen3()
    model = tiny.llama()
    if name == "llama_tied":
        model.config.tie_word_embeddings = True
        model.lm_head.weight = model.model.embed_tokens.weight
    return model


def tied(model):
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


def logits_of(model):
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


@pytest.mark.parametrize("name", ["qwen3", "llama", "llama_tied"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_are_fp32_and_not_rounded(tiny, name, dtype):
    plain = model_of(tiny, name).to(dtype)
    assert tied(plain) == (name != "llama")
    model = copy.deepcopy(plain)
    use_float32_head(model)
    use_float32_head(model)  # twice is once
    assert tied(model) == tied(plain)
    with torch.no_grad():
        hidden = model.base_model(input_ids=IDS, use_cache=False).last_hidden_state
        own = plain.base_model(input_ids=IDS, use_cache=False).last_hidden_state
    assert hidden.dtype == dtype and torch.equal(hidden, own), "the layers compute as before"
    assert model.base_model.layers[0].mlp.up_proj.weight.dtype == dtype
    found = logits_of(model)
    assert found.dtype == torch.float32
    exact = hidden.double() @ plain.get_output_embeddings().weight.double().T
    assert (found - exact).abs().max() <= 1e-5 * exact.abs().max()
    assert (logits_of(plain) - exact).abs().max() > 1e-4 * exact.abs().max(), "control: without it they are rounded"


def test_an_fp32_model_stays_as_it_is(tiny):
    model = tiny.qwen3()
    use_float32_head(model)
    assert not model.lm_head._forward_pre_hooks and not model.get_input_embeddings()._forward_hooks


def test_a_model_without_a_head_is_a_users_mistake(tiny):
    with pytest.raises(ConfigError, match="does not show its output embeddings"):
        use_float32_head(tiny.qwen3().bfloat16().base_model)


def test_float32_weights_that_will_be_sharded_need_no_head(tiny, monkeypatch):
    """What computes in bfloat16 is then the sharding's business."""
    headless = tiny.qwen3().base_model
    monkeypatch.setattr(loading, "load_hf_model", lambda *_, **__: headless)
    settings = TorchSettings(dtype="bfloat16", fp32_head=True)
    assert backend._load("any", 0, settings, 0, is_first=True) == (headless, None)


@pytest.mark.parametrize("lora_first", [True, False])
@pytest.mark.parametrize("name", ["qwen3", "llama"])
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_lora_on_the_head(tiny, name, lora_first):
    config = peft.LoraConfig(r=2, target_modules=["lm_head", "q_proj"], init_lora_weights=False)
    plain = model_of(tiny, name).bfloat16()
    model = copy.deepcopy(plain)
    if not lora_first:
        use_float32_head(model)
    torch.manual_seed(0)
    peft.inject_adapter_in_model(config, model)
    if lora_first:
        use_float32_head(model)
    assert type(model.lm_head) is not torch.nn.Linear
    model.lm_head.float()  # as peft casts adapters when it is asked to
    logits = model(input_ids=IDS, use_cache=False).logits
    assert logits.dtype == torch.float32
    with torch.no_grad():
        hidden = model.base_model(input_ids=IDS, use_cache=False).last_hidden_state.double()
    head = model.lm_head
    low, high = head.lora_A["default"].weight.double(), head.lora_B["default"].weight.double()
    exact = hidden @ (plain.lm_head.weight.double() + head.scaling["default"] * high @ low).T
    assert (logits - exact).abs().max() <= 1e-5 * exact.abs().max()
    logits.sum().backward()
    assert head.lora_B["default"].weight.grad.norm() > 0


@pytest.mark.parametrize("name", ["qwen3", "llama", "llama_tied"])
def test_saved_and_loaded(tiny, name, tmp_path):
    model_of(tiny, name).save_pretrained(tmp_path / "fp32")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "fp32", dtype=torch.bfloat16).eval()
    use_float32_head(model)
    model.save_pretrained(tmp_path / "bf16")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "bf16", dtype=torch.bfloat16).eval()
    assert tied(loaded) == tied(model) and loaded.lm_head.weight.dtype == torch.bfloat16
    use_float32_head(loaded)
    assert torch.equal(logits_of(loaded), logits_of(model))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "bf16", dtype="auto") is not None


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_generation_and_training_see_the_same_head(tiny, name):
    model = model_of(tiny, name).bfloat16()
    use_float32_head(model)
    told = model.generate(
        IDS, max_new_tokens=4, do_sample=False, output_logits=True, return_dict_in_generate=True, pad_token_id=0
    )
    with torch.no_grad():
        own = model(input_ids=told.sequences[:, :-1], use_cache=False).logits[0, IDS.shape[1] - 1 :]
    assert all(step.dtype == torch.float32 for step in told.logits)
    torch.testing.assert_close(torch.cat(told.logits), own, atol=0.05 * float(own.abs().max()), rtol=0)


def test_every_way_of_running_rows_still_runs(tiny):
    """Masks take the dtype of the layers, not that of the head and the embedding tied to it."""
    model = tiny.qwen3().bfloat16()
    use_float32_head(model)
    paths = transformer.inspect_model(model)
    assert paths.runs_forests, paths.notes
    rows = [sample.tokens for sample in tiny.make_samples(groups=1, rollouts=3)]
    inputs = transformer.make_inputs(rows, [np.array([len(row) - 1]) for row in rows])
    with paths.attending():
        forest, _ = transformer.run_features(paths, inputs)
    padded, _ = transformer.run_features(paths._replace(runs_forests=False), inputs)
    assert forest.dtype == padded.dtype == torch.bfloat16 and paths.head(forest).dtype == torch.float32
    torch.testing.assert_close(forest, padded, atol=0.1, rtol=0.05)
