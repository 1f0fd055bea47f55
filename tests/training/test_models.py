"""Names of models: what cannot be loaded is told in one message, with what to do."""

from __future__ import annotations

import pytest
import torch

from rollouts.errors import ModelError
from rollouts.training import models


def test_a_folder_loads(tiny, tmp_path):
    tiny.qwen3().save_pretrained(tmp_path)
    model = models.load_hf_model(str(tmp_path), dtype="bfloat16", device="cpu")
    assert model.dtype == torch.bfloat16 and not model.training
    with pytest.raises(ModelError, match="choices: bfloat16"):
        models.load_hf_model(str(tmp_path), dtype="half")


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "~/nowhere-at-all", "runs/x/checkpoints"])
def test_paths_that_do_not_exist(name):
    with pytest.raises(ModelError, match="there is no folder"):
        models.load_hf_model(name)
    with pytest.raises(ModelError, match="there is no folder"):
        models.load_tokenizer(name)


def test_folders_that_hold_no_model(tiny, tmp_path):
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        models.load_hf_model(str(tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="is a file"):
        models.load_hf_model(str(tmp_path / "file"))
    with pytest.raises(ModelError, match="no model was given"):
        models.resolve_model_name("")
    tiny.qwen3().save_pretrained(tmp_path / "run" / "step_000010")
    with pytest.raises(ModelError, match=r"did you mean .*step_000010"):
        models.load_hf_model(str(tmp_path / "run"))
    weights = tmp_path / "run" / "step_000010" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelError, match="could not be loaded"):
        models.load_hf_model(str(tmp_path / "run" / "step_000010"))


def test_a_hub_that_cannot_be_reached(monkeypatch):
    from transformers import AutoModelForCausalLM

    def unreachable(name, **settings):
        raise OSError("We couldn't connect.\n" + "a long story\n" * 50)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", unreachable)
    with pytest.raises(ModelError) as caught:
        models.load_hf_model("someone/some-model")
    message = str(caught.value)
    assert "'someone/some-model'" in message and "--model tiny" in message and "long story" not in message
