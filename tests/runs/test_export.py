"""What is exported is what was trained: merged, loadable by others, whole or not at all."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import warnings
from pathlib import Path

import pytest
import torch

import rollouts
from rollouts.cli import main
from rollouts.errors import ConfigError, ModelError, OutputError
from rollouts.models.loading import load_hf_model
from rollouts.runs.earlier_run import find_checkpoint
from rollouts.runs.export import export
from rollouts.runs.folder import RunFolder
from rollouts.training.algorithms.recipes import GRPO
from rollouts.training.backends.optimizer import TorchSettings
from rollouts.training.backends.torch import create_torch_backend
from rollouts.training.batching import make_batch
from rollouts.types import Sample

PROBE = torch.arange(40)[None]
SMALL = {
    "env": "calculator",
    "steps": 2,
    "prompts_per_step": 2,
    "samples_per_prompt": 4,
    "eval_tasks": 0,
    "max_tokens": 8,
}


def logits(model):
    with torch.no_grad():
        return model(PROBE.to(model.device)).logits


def test_the_card_asks_the_model_as_the_run_did(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    more = {"system": "Be brief.", "out": "run"}
    rollouts.run(**SMALL | {"steps": 1, "samples_per_prompt": 2} | more)
    assert not export("run", "model").problem
    snippet = re.search(r"```python\n(.*?)```", Path("model/README.md").read_text(), re.DOTALL)[1]
    (line, *_) = Path("run/trajectories/step_000000.jsonl").read_text().splitlines()
    line = json.loads(line)
    question = line["task"]["prompt"][1]["content"]
    assert question.startswith("What is") and 'tokenizer.decode(reply[0, prompt["input_ids"].shape[1]:])' in snippet
    known = {}
    exec(snippet.replace('"..."', repr(question)).partition("reply =")[0], known)
    segment = line["segments"][0]
    assert known["prompt"]["input_ids"][0].tolist() == segment["tokens"][: segment["loss_mask"].index(1)]


def test_an_exported_model_knows_its_environment(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("from rollouts_calculator import Calculator as Mine\n")
    rollouts.run(**SMALL | {"steps": 1, "samples_per_prompt": 2, "env": "./mine.py:Mine", "out": "run"})
    assert "to use its settings elsewhere, copy ./mine.py into the exported folder" in export("run", "model").words()
    assert export("model", "again").kind == "full"
    assert Path("model/rollouts.toml").read_text() == Path("again/rollouts.toml").read_text()
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["chat", "again"]) == 0
    assert "again · ./mine.py:Mine · tools: calculator" in capsys.readouterr().err
    Path("mine.py").unlink()
    assert main(["chat", "again"]) == 0
    error = capsys.readouterr().err
    assert "the environment of the run cannot be loaded (environment 'again/mine.py:Mine': there is no file" in error
    assert "type --env NAME\n" in error and "no environment (type --env NAME for its tools)" in error
    assert "the schemas of its tools are not there: environment './mine.py:Mine'" in export("run", "third").words()


def theirs(folder):
    """As transformers loads it, without a word of ours."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()


def trained(path, rank, model="tiny"):
    """A checkpoint after two real steps, and the logits of the trainer that wrote it."""
    samples = [
        Sample(
            tokens=list(range(20 + n)),
            loss_mask=[0.0] * 10 + [1.0] * (10 + n),
            rollout_log_probs=[0.0] * 10 + [-1.0] * (10 + n),
            policy_versions=[-1] * 10 + [0] * (10 + n),
            group_index=n // 2,
            rollout_index=n,
        )
        for n in range(4)
    ]
    batch = make_batch(samples, [1.0, -1.0, 1.0, -1.0], aggregation="token_mean", step=0)
    backend = create_torch_backend(
        model=str(model),
        seed=0,
        steps=2,
        lr=1e-2,
        lora_rank=rank,
        tokens_per_microbatch=1000,
        algorithms={"main": GRPO},
        auxiliary_models=None,
        settings=TorchSettings(device="cpu"),
    )
    try:
        for _ in range(2):
            backend.forward_backward(batch).wait()
            backend.optim_step().wait()
        backend.save(str(path)).wait()
        return logits(backend.model)
    finally:
        backend.close()


def test_a_full_model_is_bit_equal(tmp_path):
    live = trained(tmp_path / "checkpoint", 0)
    exported = export(str(tmp_path / "checkpoint"), str(tmp_path / "out"))
    assert (exported.kind, exported.dtype, exported.merged, exported.has_tokenizer) == ("full", "float32", 0, True)
    model = theirs(tmp_path / "out")
    assert torch.equal(logits(model), live)
    before = theirs(tmp_path / "checkpoint").state_dict()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_exported_is_merged_is_trained(tmp_path):
    from peft import PeftModel

    live = trained(tmp_path / "checkpoint", 4)
    exported = export(str(tmp_path / "checkpoint"), str(tmp_path / "out"))
    assert (exported.kind, exported.merged) == ("full", 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        merged = PeftModel.from_pretrained(load_hf_model("tiny", device="cpu"), str(tmp_path / "checkpoint"))
        merged = merged.merge_and_unload()
    assert torch.equal(logits(theirs(tmp_path / "out")), logits(merged))
    assert (logits(theirs(tmp_path / "out")) - live).abs().max() < 1e-4
    assert (logits(load_hf_model("tiny", device="cpu")) - live).abs().max() > 1e-2, "it was trained"


def test_adapters_one_after_the_other(tmp_path):
    """Each is trained on the model with those before it merged; a full run may begin from one as well."""
    trained(tmp_path / "one", 4)
    live = trained(tmp_path / "two", 2, tmp_path / "one")
    assert export(str(tmp_path / "two"), str(tmp_path / "out")).merged == 2
    assert (logits(theirs(tmp_path / "out")) - live).abs().max() < 1e-4
    full = trained(tmp_path / "three", 0, tmp_path / "two")
    assert torch.equal(logits(theirs(tmp_path / "three")), full)
    again = trained(tmp_path / "four", 4, tmp_path / "out")
    assert (logits(load_hf_model(str(tmp_path / "four"), device="cpu")) - again).abs().max() < 1e-4


def test_others_find_all_that_they_need(tmp_path):
    from transformers import AutoTokenizer

    trained(tmp_path / "checkpoint", 4)
    export(str(tmp_path / "checkpoint"), str(tmp_path / "deep" / "out"), dtype="bfloat16")
    out = tmp_path / "deep" / "out"
    names = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in out.iterdir()} == names | {"chat_template.jinja"}
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"] and config["dtype"] == "bfloat16"
    assert str(tmp_path) not in (out / "config.json").read_text()
    half, exact = theirs(out), load_hf_model(str(tmp_path / "checkpoint"), device="cpu").state_dict()
    assert all(torch.equal(value, exact[name].bfloat16()) for name, value in half.state_dict().items())
    text = AutoTokenizer.from_pretrained(out).apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert "Hi" in text


def test_a_model_is_exported_in_the_type_it_is_stored_in(tmp_path):
    load_hf_model("tiny", dtype="bfloat16", device="cpu").save_pretrained(tmp_path / "half")
    exported = export(str(tmp_path / "half"), str(tmp_path / "out"))
    assert exported.dtype == "bfloat16" and not exported.has_tokenizer
    assert "there is none" in exported.words()
    assert theirs(tmp_path / "out").dtype == torch.bfloat16


def test_the_adapter_alone(tmp_path):
    live = trained(tmp_path / "checkpoint", 4)
    exported = export(str(tmp_path / "checkpoint"), str(tmp_path / "out"), adapter=True)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "chat_template.jinja"} <= names
    assert not names & {"trainer", "state.json", "manifest.json"} and exported.kind == "adapter"
    needed = json.loads((tmp_path / "out" / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert f": the adapter alone, which needs the base model {needed}, " in exported.words()
    assert (logits(load_hf_model(str(tmp_path / "out"), device="cpu")) - live).abs().max() < 1e-4
    stored = tmp_path / "checkpoint" / "adapter_config.json"
    stored.write_text(stored.read_text().replace(str(Path(rollouts.__file__).parent), "/elsewhere/rollouts"))
    assert "/elsewhere/rollouts/tiny" in stored.read_text()
    (tmp_path / "checkpoint" / "state.json").unlink()  # else the change of the file is seen
    export(str(tmp_path / "checkpoint"), str(tmp_path / "moved"), adapter=True)
    base = json.loads((tmp_path / "moved" / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert Path(base).is_dir(), "peft finds it"


@pytest.mark.parametrize("mode", [pytest.param("rl", marks=pytest.mark.nightly), "sft+rl"])
def test_the_command_exports_a_run(tmp_path, monkeypatch, capsys, mode):
    monkeypatch.chdir(tmp_path)
    summary = rollouts.run(**SMALL | {"steps": 1}, mode=mode, lora_rank=2, checkpoint_every=1, out="run")
    assert find_checkpoint("run") == Path("run") / summary["checkpoint"]
    assert find_checkpoint("run/checkpoints" if mode == "rl" else "run/rl") == Path("run") / summary["checkpoint"]
    assert main(["export", "run", "out"]) == 0
    out = capsys.readouterr().out
    assert f"run/{summary['checkpoint']} -> out: a whole model in float32, " in out
    assert ("2 adapters merged in" if mode == "sft+rl" else "1 adapter merged in") in out
    exact = load_hf_model(f"run/{summary['checkpoint']}", device="cpu")
    assert torch.equal(logits(theirs("out")), logits(exact))


def test_a_run_of_two_phases_that_has_only_the_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rollouts.run(**SMALL, mode="sft+rl", sft={"steps": 1}, out="run")
    os.rename("run/rl", "gone")
    assert find_checkpoint("run") == Path("run/sft/checkpoints/step_000001")


def test_a_run_that_is_still_running_has_no_checkpoint_yet(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = RunFolder(Path("first"))
    run.write_text("config.toml", 'env = "calculator"\nsteps = 40\n')
    words = rf"run in first is still running \(process {os.getpid()} on .*no checkpoint yet"
    with pytest.raises(ConfigError, match=words):
        find_checkpoint("first")
    run.close()
    assert main(["export", "first", "out"]) == 2
    assert "first has no checkpoint yet; to continue it, type: rollouts resume first\n" in capsys.readouterr().err


def test_bad_input_is_told_and_leaves_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    trained("checkpoint", 0)
    Path("empty").mkdir()
    Path("begun/checkpoints").mkdir(parents=True)
    Path("begun/config.toml").touch()
    Path("file").touch()
    before = sorted(path.name for path in tmp_path.iterdir())
    for arguments, words in (
        (["lost", "out"], "lost does not exist; give the folder of a run"),
        (["file", "out"], "file is a file; give the folder"),
        (["empty", "out"], "holds no run, no checkpoint, no model and no adapter"),
        (["begun", "out"], "has no checkpoint yet; to continue it, type: rollouts resume begun"),
        (["checkpoint", "empty"], "empty exists already and is not overwritten"),
        (["checkpoint", "out", "--adapter"], "holds a whole model and no adapter"),
        (["checkpoint", "out", "--adapter", "--dtype", "float16"], "leave one of them out"),
        (["checkpoint", "out", "--dtype", "int8"], "bfloat16"),
        (["checkpoint"], "OUT"),
    ):
        assert main(["export", *arguments]) == 2, arguments
        assert words in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_damaged_checkpoint_is_not_exported(tmp_path):
    trained(tmp_path / "step_000001", 0)
    weights = tmp_path / "step_000001" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-5] ^= 1
    weights.write_bytes(bytes(data))
    with pytest.raises(ConfigError, match="is damaged"):
        export(str(tmp_path / "step_000001"), str(tmp_path / "out"))
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]


def test_an_adapter_without_its_model_is_not_exported(tmp_path):
    trained(tmp_path / "base", 0)
    trained(tmp_path / "adapter", 2, tmp_path / "base")
    os.rename(tmp_path / "base", tmp_path / "gone")
    with pytest.raises(ModelError, match=r"trained on the model in .*base, and there is no such folder"):
        export(str(tmp_path / "adapter"), str(tmp_path / "deep" / "out"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "gone"]


@pytest.mark.parametrize("where", ["fsync", "replace", "weights"])
def test_a_disk_that_refuses(tmp_path, monkeypatch, where):
    from safetensors import SafetensorError

    trained(tmp_path / "checkpoint", 0)

    def full(*arguments, **settings):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def full_in_rust(*arguments, **settings):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    if where == "weights":
        monkeypatch.setattr("transformers.modeling_utils.PreTrainedModel.save_pretrained", full_in_rust)
    else:
        monkeypatch.setattr(os, where, full)
    with pytest.raises(OutputError, match=r"out cannot be written: .*No space left on device"):
        export(str(tmp_path / "checkpoint"), str(tmp_path / "deep" / "out"))
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
