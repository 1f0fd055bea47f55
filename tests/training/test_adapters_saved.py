"""Saved, exported and sent weights of a LoRA run are those that were trained, whichever layers have an adapter."""

from __future__ import annotations

import shutil
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from rollouts.cli import main
from rollouts.errors import ModelError
from rollouts.models.loading import TINY_PATH, load_hf_model
from rollouts.runs.export import export
from rollouts.training.algorithms.recipes import GRPO
from rollouts.training.backends.optimizer import TorchSettings
from rollouts.training.backends.torch import create_torch_backend
from rollouts.training.batching import make_batch
from rollouts.types import Sample

TOKENS = list(range(3, 40))
TIED = ["lm_head", "embed_tokens", "q_proj,lm_head", "embed_tokens,lm_head"]


def logits(model):
    with torch.no_grad():
        return model(torch.tensor([TOKENS])).logits


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    """The embedded model with a head of its own."""
    folder = tmp_path_factory.mktemp("untied")
    model = load_hf_model("tiny", device="cpu")
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * 1.1)
    model.save_pretrained(folder)
    for file in TINY_PATH.iterdir():
        if not (folder / file.name).exists():
            shutil.copyfile(file, folder / file.name)
    return str(folder)


def make_backend(model, targets):
    return create_torch_backend(
        model, 0, 2, 1e-2, 2, 1000, {"main": GRPO}, None, settings=TorchSettings(device="cpu", lora_targets=targets)
    )  # fmt: skip


def rows():
    count = len(TOKENS)
    sample = Sample(
        tokens=TOKENS,
        loss_mask=[0.0] + [1.0] * (count - 1),
        rollout_log_probs=[0.0] + [-1.0] * (count - 1),
        policy_versions=[-1] + [0] * (count - 1),
        group_index=0,
        rollout_index=0,
    )
    return make_batch([sample], [1.0], aggregation="token_mean", step=0)


@pytest.mark.parametrize(
    "targets",
    [
        "all-linear",
        "embed_tokens,lm_head,q_proj",
        *(pytest.param(each, marks=pytest.mark.nightly) for each in ("embed_tokens", "lm_head")),
    ],
)
def test_every_way_out_gives_the_trainers_logits(untied, targets, tmp_path):
    backend = make_backend(untied, targets)
    try:
        generator = torch.Generator().manual_seed(0)
        adapter = backend.get_weights("adapter").wait()
        moved = {name: value + 0.1 * torch.randn(value.shape, generator=generator) for name, value in adapter.items()}
        backend.load_weights(moved).wait()
        live = logits(backend.model)
        assert (live - logits(load_hf_model(untied, device="cpu"))).abs().max() > 0.1

        scored = backend.forward(rows(), ("logprobs",)).wait().logprobs[0][1:]
        expected = live[0, :-1].log_softmax(-1)[range(len(TOKENS) - 1), TOKENS[1:]]
        torch.testing.assert_close(torch.tensor(scored), expected, atol=1e-4, rtol=0)

        full = load_hf_model(untied, device="cpu")
        full.load_state_dict(backend.get_weights("full").wait())
        torch.testing.assert_close(logits(full), live, atol=1e-3, rtol=0)

        backend.save(str(tmp_path / "saved")).wait()
        assert export(str(tmp_path / "saved"), str(tmp_path / "out")).merged == 1
        torch.testing.assert_close(logits(load_hf_model(str(tmp_path / "out"), device="cpu")), live, atol=1e-3, rtol=0)

        other = make_backend(untied, targets)
        other.load(str(tmp_path / "saved")).wait()
        assert torch.equal(logits(other.model), live)
        other.close()
    finally:
        backend.close()


@pytest.mark.parametrize("dry", [[], ["--dry-run"]], ids=["run", "dry run"])
@pytest.mark.parametrize("targets", TIED)
def test_an_adapter_on_a_tied_weight_is_refused_before_the_run(targets, dry, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    flags = ["--lora-rank", "2", "--training.lora-targets", targets, "--out", str(tmp_path / "out"), *dry]
    assert main(["run", "--env", "calculator", "--eval-tasks", "0", *flags]) == 2
    printed = capsys.readouterr().err
    assert "and an adapter on one of them cannot be merged into the weight of both; leave " in printed
    assert " out of --training.lora-targets" in printed
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("targets", TIED)
def test_an_adapter_of_others_on_a_tied_weight_is_not_merged(targets, tmp_path, capsys):
    """peft merges it, and gives another model."""
    config = peft.LoraConfig(r=2, target_modules=targets.split(","), init_lora_weights=False, task_type="CAUSAL_LM")
    adapter = peft.get_peft_model(load_hf_model("tiny", device="cpu"), config)
    adapter.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    with pytest.raises(ModelError, match=r"its model ties the weight of that layer to .*\n?.*--adapter"):
        load_hf_model(str(tmp_path / "adapter"), device="cpu")
    assert main(["export", str(tmp_path / "adapter"), str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()
    assert main(["export", str(tmp_path / "adapter"), str(tmp_path / "alone"), "--adapter"]) == 0


def test_an_export_that_gives_other_logits_is_not_there(tmp_path, monkeypatch, capsys):
    """Whatever spoils what is written, a library's new version say, is seen."""
    model = load_hf_model("tiny", device="cpu")
    write = type(model).save_pretrained

    def spoil(self, folder, **settings):
        write(self, folder, **settings)
        path = Path(folder) / "model.safetensors"
        tensors = load_file(path)
        tensors["model.norm.weight"] = tensors["model.norm.weight"] * 1.1
        save_file(tensors, path, metadata={"format": "pt"})

    monkeypatch.setattr(type(model), "save_pretrained", spoil)
    assert main(["export", str(TINY_PATH), str(tmp_path / "out")]) == 2
    assert "gives other logits" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_merge_that_gives_other_logits_is_refused(tmp_path, monkeypatch):
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    peft.get_peft_model(load_hf_model("tiny", device="cpu"), config).save_pretrained(tmp_path / "adapter")
    load_hf_model(str(tmp_path / "adapter"), device="cpu")
    monkeypatch.setattr(peft.tuners.lora.layer.Linear, "merge", lambda self, **_: None)
    with pytest.raises(ModelError, match="other logits than beside them"):
        load_hf_model(str(tmp_path / "adapter"), device="cpu")
