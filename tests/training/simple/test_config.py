"""Config: into a file and back, into a run's settings and back, and fields that are wrong."""

from __future__ import annotations

import dataclasses
import json

import pytest

import rollouts
import rollouts.config
from rollouts import training
from rollouts.config.files import load_file
from rollouts.config.resolving import resolve
from rollouts.errors import ConfigError, UnknownComponentError
from rollouts.plugins import index
from rollouts.training import Config, DataConfig, DeploymentConfig, GPUConfig, ModelConfig, TrainingConfig

WHOLE = {
    "model": {"model_id": "tiny", "dtype": "bfloat16"},
    "data": {"environment": "calculator"},
    "training": {"num_steps": 7, "batch_size": 4, "lr": 1e-3, "checkpoint_every": 2},
    "sft": {"num_steps": 3},
    "rl": {"num_samples": 5, "matrix_lr": 2e-3},
    "output": {"mode": "sft+rl", "save_dir": "runs/mine"},
    "settings": {"seed": 3},
}


def test_save_and_load(tmp_path):
    config = Config(**WHOLE)
    config.save(tmp_path / "config.json")
    assert Config.load(tmp_path / "config.json") == config
    (tmp_path / "mine.py").write_text("from rollouts.training import *\nconfig = Config(model=ModelConfig('x'))\n")
    assert Config.load(tmp_path / "mine.py") == Config(model=ModelConfig("x"))


def test_sections_take_the_general_numbers():
    config = Config(**WHOLE)
    assert (config.mode, config.output.mode) == ("sft+rl", "sft+rl")
    assert (config.sft.num_steps, config.sft.batch_size, config.sft.matrix_lr) == (3, 4, 1e-3)
    rl = config.rl
    assert (rl.num_steps, rl.examples_per_step, rl.batch_size, rl.matrix_lr) == (7, 4, 20, 2e-3)
    assert TrainingConfig(5, 2, 1e-4).learning_rate == 1e-4


def test_into_settings_and_back():
    settings = Config(**WHOLE).to_settings()
    assert settings == {
        "mode": "sft+rl",
        "model": "tiny",
        "steps": 7,
        "lr": 2e-3,
        "prompts_per_step": 4,
        "samples_per_prompt": 5,
        "sft": {"steps": 3, "lr": 1e-3, "prompts_per_step": 4},
        "env": "calculator",
        "out": "runs/mine",
        "checkpoint_every": 2,
        "training": {"dtype": "bfloat16"},
        "seed": 3,
    }
    assert resolve(settings).settings.steps == 7
    assert Config.from_settings(settings).to_settings() == settings
    changed = {**settings, "mode": "rl", "env": {"name": "calculator", "digits": 2}, "over_sampling": 1.5}
    del changed["sft"]
    assert Config.from_settings(changed).to_settings() == changed
    served = Config(deployment=DeploymentConfig([0, 1], sglang_port=30000), data=DataConfig("rows.jsonl"))
    assert served.to_settings()["inference"] == {"name": "sglang", "url": "http://127.0.0.1:30000"}
    assert (served.to_settings()["env"], served.to_settings()["data"]) == ("prompts", "rows.jsonl")
    sft = Config(output={"mode": "sft"}, sft={"batch_size": 3}).to_settings()
    assert (sft["prompts_per_step"], "samples_per_prompt" in sft) == (3, False)


def test_a_settings_file_may_hold_a_config(tmp_path):
    config = Config(**WHOLE)
    config.save(tmp_path / "config.json")
    (tmp_path / "mine.py").write_text(f"from rollouts.training import Config\nconfig = Config(**{WHOLE})\n")
    for name in ("config.json", "mine.py"):
        assert load_file(tmp_path / name)[0] == config.to_settings()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"training": {"num_stpes": 3}},
            "training: TrainingConfig has no field 'num_stpes'\ndid you mean: num_steps\\?\nits fields: num_s",
        ),
        ({"models": {}}, "config.json: Config has no field 'models'\ndid you mean: model\\?"),
        ({"output": {"mode": "rlhf"}}, "OutputConfig.mode is 'rlhf'; expected one of sft, rl, sft\\+rl"),
        ({"training": {"batch_size": 0}}, "TrainingConfig.batch_size is 0; expected 1 or more"),
        ({"training": {"num_steps": "many"}}, "training: a value of TrainingConfig has a wrong type"),
        ({"deployment": {"gpu_ranks": [0, 0]}}, "DeploymentConfig.gpu_ranks is .*; expected different numbers"),
        ({"model": "tiny"}, "model: expected a ModelConfig or a dict, got 'tiny'"),
    ],
)
def test_fields_that_are_wrong(tmp_path, change, words):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(dataclasses.asdict(Config()) | change))
    for read in (Config.load, load_file):
        with pytest.raises(ConfigError, match=words):
            read(path)


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "broken.py").write_text("1 / 0")
    (tmp_path / "empty.py").write_text("")
    for name, words in (("broken.py", "division"), ("none.json", "No such file"), ("empty.py", "expected a Config")):
        with pytest.raises(ConfigError, match=f"{name}.*{words}"):
            Config.load(tmp_path / name)


def test_gpus():
    assert GPUConfig(gpu_ranks=[0, 1, 2, 3], gpu_type="H100").get_cuda_visible_devices() == "0,1,2,3"


def test_the_names_are_in_rollouts_config_too():
    for name in rollouts.config.__all__:
        assert getattr(rollouts.config, name) is getattr(training, name, getattr(rollouts.config, name))
    assert rollouts.config.Config is Config


def test_the_calculator_environment(monkeypatch):
    from rollouts_calculator import Calculator

    assert rollouts.CalculatorEnvironment is Calculator and "CalculatorEnvironment" not in rollouts.__all__

    def missing(kind, name):
        raise UnknownComponentError(f"no {name}")

    monkeypatch.setattr("rollouts.training.simple.environments.find_component", missing)
    assert index.find_component is not missing
    with pytest.raises(UnknownComponentError, match="type: pip install rollouts-calculator"):
        rollouts.CalculatorEnvironment  # noqa: B018
