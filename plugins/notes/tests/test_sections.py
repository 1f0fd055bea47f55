"""Config: into a file and back, into a run's settings and back, and fields that are wrong."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

import rollouts
import rollouts.config
from rollouts import training
from rollouts.cli import main
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
    served = Config(deployment=DeploymentConfig([1], sglang_port=30000), data=DataConfig("rows.jsonl"))
    assert served.to_settings()["inference"] == {"name": "sglang", "url": "http://127.0.0.1:30000"}
    assert (served.to_settings()["env"], served.to_settings()["data"]) == ("prompts", "rows.jsonl")
    assert served.to_settings()["training"] == {"device": "cuda:1"}
    sft = Config(output={"mode": "sft"}, sft={"batch_size": 3}).to_settings()
    assert (sft["prompts_per_step"], "samples_per_prompt" in sft) == (3, False)


ROWS = {"data": {"dataset_id": "rows.jsonl"}}
SFT, BOTH = {"output": {"mode": "sft"}}, {"output": {"mode": "sft+rl"}}
EFFECTS = {
    "model.model_id": ("other", {}, {"model": "other"}),
    "model.dtype": ("bfloat16", {}, {"training": {"dtype": "bfloat16"}}),
    "model.device": ("cpu", {}, {"training": {"device": "cpu"}}),
    "data.dataset_id": ("a.csv", {}, {"env": "prompts", "data": "a.csv"}),
    "data.split": ("test", ROWS, {"data": {"name": "rows.jsonl", "split": "test"}}),
    "data.num_samples": (2, ROWS, {"data": {"name": "rows.jsonl", "limit": 2}}),
    "data.environment": ("calculator", {}, {"env": "calculator"}),
    "data.sft_mixture": (["a.jsonl"], {}, "data.sft_mixture is .*a run reads one dataset"),
    "data.rl_mixture": (["a.jsonl"], {}, "data.rl_mixture is .*a run reads one dataset"),
    "training.num_steps": (3, {}, {"steps": 3}),
    "training.batch_size": (3, {}, {"prompts_per_step": 3}),
    "training.lr": (0.5, {}, {"lr": 0.5}),
    "training.log_every": (5, {}, {"logger": ["jsonl", {"name": "console", "every": 5}]}),
    "training.checkpoint_every": (4, {}, {"checkpoint_every": 4}),
    "deployment.gpu_ranks": ([2], {}, {"training": {"device": "cuda:2"}}),
    "deployment.gpu_type": ("H100", {}, "deployment.gpu_type is 'H100', which no run uses"),
    "deployment.sglang_port": (30000, {}, {"inference": {"name": "sglang", "url": "http://127.0.0.1:30000"}}),
    "sft.num_steps": (3, SFT, {"steps": 3}),
    "sft.num_epochs": (2, SFT, "sft.num_epochs is 2, which no run uses: a run counts steps"),
    "sft.batch_size": (3, SFT, {"prompts_per_step": 3}),
    "sft.matrix_lr": (0.5, BOTH, {"sft": {"steps": 100, "prompts_per_step": 8, "lr": 0.5}}),
    "rl.num_steps": (3, {}, {"steps": 3}),
    "rl.num_epochs": (2, {}, "rl.num_epochs is 2, which no run uses: a run counts steps"),
    "rl.examples_per_step": (3, {}, {"prompts_per_step": 3}),
    "rl.num_samples": (3, {}, {"samples_per_prompt": 3}),
    "rl.batch_size": (16, {}, {"minibatches": 4}),
    "rl.matrix_lr": (0.5, {}, {"lr": 0.5}),
    "output.mode": ("sft+rl", {}, {"mode": "sft+rl", "sft": {"steps": 100, "prompts_per_step": 8}}),
    "output.source_checkpoint": ("folder", {}, {"model": "folder"}),
    "output.save_dir": ("runs/x", {}, {"out": "runs/x"}),
    "settings": ({"seed": 3}, {}, {"seed": 3}),
}
"""Field -> a value, what else the Config has, and the settings that change, or the words of the refusal."""


def fields_of(kind):
    """The fields of a Config, and those of its sections as `section.field`."""
    for each in dataclasses.fields(kind):
        section = getattr(Config(), each.name)
        yield from (
            (f"{each.name}.{own.name}" for own in dataclasses.fields(section))
            if each.name != "settings"
            else [each.name]
        )


@pytest.mark.parametrize("name", list(fields_of(Config)))
def test_every_field_has_an_effect_on_a_run_or_is_refused(name):
    value, others, expected = EFFECTS[name]
    section, _, field = name.partition(".")
    before = Config(**others).to_settings()
    changed = Config(**others | {section: {**others.get(section, {}), field: value} if field else value})
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            changed.to_settings()
        return
    after = changed.to_settings()
    assert {key: each for key, each in after.items() if before.get(key) != each} == expected
    assert Config(**dataclasses.asdict(changed)) == changed, "saved and loaded"
    resolve(after)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"deployment": {"gpu_ranks": [2, 3]}}, "type: CUDA_VISIBLE_DEVICES=2,3 rollouts run FILE --training fsdp"),
        ({"deployment": {"gpu_ranks": [2]}, "model": {"device": "cpu"}}, "give one GPU, without model.device"),
        ({"data": {"environment": "calculator", "split": "test"}}, "it is the split of data.dataset_id"),
        ({"data": {"environment": "calculator", "num_samples": 3}}, "they are the rows of data.dataset_id"),
    ],
)
def test_fields_that_only_act_together(config, words):
    with pytest.raises(ConfigError, match=words):
        Config(**config).to_settings()


@pytest.mark.parametrize(
    ("data", "code", "words"),
    [
        ({"num_samples": 2}, 0, ""),
        ({}, 2, "rows.jsonl, line 3: "),
        ({"num_samples": 2, "split": "nosuchsplit"}, 2, "data.*split"),
    ],
)
def test_a_run_reads_the_rows_that_the_config_names(tmp_path, capsys, data, code, words):
    row = {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 2 + "this is no row\n")
    Config(
        output={"mode": "sft", "save_dir": str(tmp_path / "out")},
        data={"dataset_id": str(tmp_path / "rows.jsonl"), **data},
        training={"num_steps": 1, "batch_size": 2},
    ).save(tmp_path / "config.json")
    assert main([str(tmp_path / "config.json")]) == code
    assert re.search(words, capsys.readouterr().err)


def test_a_settings_file_may_hold_a_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
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

    monkeypatch.setattr("rollouts_notes.endpoint.find_component", missing)
    assert index.find_component is not missing
    with pytest.raises(UnknownComponentError, match="type: pip install rollouts-calculator"):
        rollouts.CalculatorEnvironment  # noqa: B018
