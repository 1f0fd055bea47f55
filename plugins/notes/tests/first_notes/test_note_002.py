"""Note 002: one Config for a whole run, saved and loaded, and `python -m rollouts FILE`."""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pytest
import trio
from note_blocks import block, execute

import rollouts.training
from rollouts.cli import main
from rollouts.config.files import load_file
from rollouts.config.resolving import resolve
from rollouts.errors import ConfigError
from rollouts.training import Config, DataConfig, DeploymentConfig, ModelConfig, TrainingConfig

CONFIGS = Path(__file__).parents[4] / "configs"
FIELDS = {
    ModelConfig: ("model_id", "dtype", "device"),
    DataConfig: ("dataset_id", "split", "num_samples"),
    TrainingConfig: ("num_steps", "batch_size", "lr"),
    DeploymentConfig: ("gpu_ranks", "gpu_type", "sglang_port"),
}
"""The checklist of the note."""


def test_the_five_classes_have_the_note_s_fields():
    names = block("002/config")
    for kind, wanted in FIELDS.items():
        assert f"class {kind.__name__}" in names
        assert set(wanted) <= {each.name for each in dataclasses.fields(kind)}
    parts = {each.name: getattr(Config(), each.name) for each in dataclasses.fields(Config)}
    assert {type(part) for part in parts.values()} >= set(FIELDS)


def small_config(tmp_path) -> Config:
    """One step of SFT on two conversations of a file."""
    rows = [{"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}] * 2
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Config(
        output={"mode": "sft"},
        model=ModelConfig(model_id="tiny", device="cpu"),
        data=DataConfig(dataset_id=str(tmp_path / "rows.jsonl")),
        training=TrainingConfig(num_steps=1, batch_size=2, lr=1e-3),
    )


def test_a_saved_config_is_the_same_when_loaded(tmp_path):
    config = small_config(tmp_path)
    config.save(tmp_path / "config.json")
    assert Config.load(tmp_path / "config.json") == config
    assert json.loads((tmp_path / "config.json").read_text())["model"]["model_id"] == "tiny"


def test_pattern_1_saves_what_ours_saves(tmp_path):
    """The note's own class, with its own `save`; both write nested JSON."""
    names = {"dataclass": dataclass, "field": field, "asdict": asdict, "json": json, "Path": Path}
    dataset = "@dataclass\nclass DatasetConfig:\n    name: str = 'rows'\n\n"
    theirs = execute(dataset + block("002/pattern_1"), **names)["Config"]()
    theirs.save(tmp_path / "theirs.json")
    Config().save(tmp_path / "ours.json")
    saved, own = (json.loads((tmp_path / f"{each}.json").read_text()) for each in ("theirs", "ours"))
    assert isinstance(saved["model"], dict) and isinstance(own["model"], dict)


def test_pattern_2_names_the_gpus():

    from rollouts.training import GPUConfig

    theirs = execute(block("002/pattern_2"), dataclass=dataclass, List=list)["GPUConfig"]
    for kind in (theirs, GPUConfig):
        config = kind(gpu_ranks=[0, 1, 3], gpu_type="H100")
        assert config.get_cuda_visible_devices() == "0,1,3"
        assert (config.python_version, config.cuda_version) == ("3.11", "12.4")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TrainingConfig(num_steps=-1, batch_size=1), "num_steps"),
        (lambda: TrainingConfig(num_steps=1, batch_size=0), "batch_size"),
        (lambda: Config(output={"mode": "slf"}), "mode"),
    ],
)
def test_a_wrong_value_is_refused_when_the_config_is_made(make, words):
    with pytest.raises((ConfigError, AssertionError), match=words):
        make()


def test_an_unknown_field_in_a_file_is_named(tmp_path):
    Config().save(tmp_path / "config.json")
    saved = json.loads((tmp_path / "config.json").read_text())
    saved["training"]["nums_steps"] = 3
    (tmp_path / "config.json").write_text(json.dumps(saved))
    with pytest.raises(ConfigError, match="nums_steps") as caught:
        Config.load(tmp_path / "config.json")
    assert "num_steps" in str(caught.value) and "config.json" in str(caught.value)


def test_the_note_s_main_loads_a_config_and_routes(tmp_path, monkeypatch, tokenizer):
    """`if config.mode == "sft": run_sft_training(...)`."""
    from rollouts.training import create_pytorch_backend, load_sft_dataset

    small_config(tmp_path).save(tmp_path / "config.json")
    monkeypatch.setattr(sys, "argv", ["rollouts", str(tmp_path / "config.json")])
    history = []

    async def run_sft_training(config):
        backend = create_pytorch_backend(config.model.model_id, lr=config.training.lr, num_steps=1)
        samples = load_sft_dataset(config.data.dataset_id, tokenizer)
        history.extend(await rollouts.training.run_sft_training(backend, samples, config.training))
        backend.close()

    code = block("002/main", {"run_sft_training(...)": "trio.run(run_sft_training, config)"})
    execute(code, __name__="__main__", sys=sys, trio=trio, Config=Config, run_sft_training=run_sft_training)
    assert len(history) == 1 and history[0]["loss"] > 0


def test_python_m_rollouts_file_trains(tmp_path, monkeypatch, capsys):
    """A saved Config, and a Python file with one, are settings files."""
    monkeypatch.chdir(tmp_path)
    small_config(tmp_path).save("config.json")
    Path("sft.py").write_text(
        "from rollouts.training import Config, DataConfig, ModelConfig, TrainingConfig\n"
        "config = Config(output={'mode': 'sft'}, model=ModelConfig(model_id='tiny', device='cpu'),\n"
        "    data=DataConfig(dataset_id='rows.jsonl'), training=TrainingConfig(num_steps=1, batch_size=2, lr=1e-3))\n"
    )
    for file in ("config.json", "sft.py"):
        assert main([file, "--out", f"run_{file}"]) == 0, capsys.readouterr().err
        (line,) = Path(f"run_{file}", "metrics.jsonl").read_text().splitlines()
        assert json.loads(line)["policy/loss"] > 0


@pytest.mark.parametrize("name", ["sft_qwen", "rl_math", "sft_openwebtext"])
def test_the_note_s_config_files(name):
    """They name real models and data, so nothing is loaded here."""
    tree, _ = load_file(CONFIGS / f"{name}.py")
    assert tree["model"] != "tiny" and resolve(tree).settings.steps == tree["steps"] > 0
    assert resolve(tree).settings.mode == ("rl" if name == "rl_math" else "sft")
