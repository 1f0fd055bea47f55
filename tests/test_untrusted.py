"""Checkpoints, adapters and models of other people: they are read, and run no code."""

from __future__ import annotations

import json
import pickle
import shutil
import zlib
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from rollouts.cli import main
from rollouts.errors import ConfigError
from rollouts.models.loading import TINY_PATH
from rollouts.training.weights.checkpoint import read_trainer_tensors, saved_tensors, write_tensors
from rollouts.training.weights.store import check_folder, manifest_crc

RUN = ["--env", "calculator", "--mode", "sft", "--steps", "1", "--prompts-per-step", "1", "--eval-tasks", "0"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    return tmp_path


@pytest.fixture
def checkpoint():
    assert main(["run", *RUN, "--out", "mine"]) == 0
    (found,) = Path("mine/checkpoints").glob("step_*")
    return found


class Call:
    """Pickled: the call of a function."""

    def __init__(self, function, *arguments):
        self.called = (function, arguments)

    def __reduce__(self):
        return self.called


def replace(checkpoint, name, data):
    """Put other bytes into a file of a checkpoint, whose manifest is right all the same: its author made it."""
    (checkpoint / name).write_bytes(data)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"][name] = {"bytes": len(data), "crc32": f"{zlib.crc32(data):08x}"}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest | {"crc32": manifest_crc(manifest)}))
    check_folder(str(checkpoint))


@pytest.mark.parametrize("place", ["whole", "inside"])
def test_resuming_from_a_checkpoint_runs_no_code_of_its_index(checkpoint, place, capsys):
    call = Call(Path.mkdir, Path("owned"))
    if place == "inside":
        index = FileSystemReader(checkpoint / "trainer").read_metadata()
        index.planner_data = call
        call = index
    replace(checkpoint, "trainer/.metadata", pickle.dumps(call))
    assert main(["resume", "mine", "--steps", "2", "--checkpoint", str(checkpoint)]) == 2
    assert "which is no part of a checkpoint's index" in capsys.readouterr().err
    assert not Path("owned").exists()


def test_an_index_reads_no_file_beyond_its_folder(checkpoint, capsys):
    index = FileSystemReader(checkpoint / "trainer").read_metadata()
    for info in index.storage_data.values():
        info.relative_path = "../../../elsewhere"
    replace(checkpoint, "trainer/.metadata", pickle.dumps(index))
    assert main(["resume", "mine", "--steps", "2"]) == 2
    assert "'../../../elsewhere', which is not in its folder" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_the_index_of_every_type_is_read(tmp_path, dtype, protocol):
    tensors = {"optimizer": {"a": torch.ones(3, 2).to(dtype), "step": torch.tensor(1).to(dtype)}}
    write_tensors(tmp_path, tensors, alone=True)
    path = tmp_path / "trainer" / ".metadata"
    path.write_bytes(pickle.dumps(FileSystemReader(tmp_path / "trainer").read_metadata(), protocol))
    found = {"optimizer": {name: torch.zeros_like(each) for name, each in tensors["optimizer"].items()}}
    read_trainer_tensors(tmp_path, found, alone=True)
    assert all(torch.equal(found["optimizer"][name], each) for name, each in tensors["optimizer"].items())
    path.write_bytes(pickle.dumps(Call(print, "hello"), protocol))
    with pytest.raises(ConfigError, match="no part of a checkpoint's index"):
        saved_tensors(tmp_path)


class Member:
    """Pickled as Python 3.11.0 to 3.11.3 pickle the member of an enumeration."""

    def __init__(self, owner, name):
        self.asks = (owner, name)

    def __reduce__(self):
        return getattr, self.asks


def test_an_index_gives_members_of_its_enumerations_and_no_other_attribute(tmp_path):
    write_tensors(tmp_path, {"optimizer": {"a": torch.ones(3, 2)}}, alone=True)
    path = tmp_path / "trainer" / ".metadata"
    metadata = FileSystemReader(tmp_path / "trainer").read_metadata()
    metadata.note = Member(_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT")
    path.write_bytes(pickle.dumps(metadata))
    assert set(saved_tensors(tmp_path)) == {"optimizer.a"}
    for owner, name in ((_MEM_FORMAT_ENCODING, "__reduce_ex__"), (torch.Size, "count")):
        metadata.note = Member(owner, name)
        path.write_bytes(pickle.dumps(metadata))
        with pytest.raises(ConfigError, match="the checkpoint is refused"):
            saved_tensors(tmp_path)


def test_an_adapter_imports_no_module_that_it_names(here, monkeypatch, capsys):
    assert main(["run", *RUN, "--lora-rank", "1", "--out", "mine"]) == 0
    (folder,) = Path("mine/checkpoints").glob("step_*")
    config = json.loads((folder / "adapter_config.json").read_text())
    named = {"megatron_config": {"a": 1}, "megatron_core": "evil.core"}
    (folder / "adapter_config.json").write_text(json.dumps(config | named))
    Path("evil").mkdir()
    Path("evil/__init__.py").write_text("open('owned', 'w')")
    Path("evil/core.py").touch()
    monkeypatch.syspath_prepend(str(here))
    assert main(["run", *RUN, "--model", str(folder), "--out", "next"]) == 2
    assert "is one of Megatron's, which is not supported" in capsys.readouterr().err
    assert not Path("owned").exists()


CODE = """\
from pathlib import Path
from transformers import Qwen3Config, Qwen3ForCausalLM, PreTrainedTokenizerFast

Path("owned").touch()


class OwnConfig(Qwen3Config):
    model_type = "own"


class OwnModel(Qwen3ForCausalLM):
    config_class = OwnConfig


class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def model_with_code(tmp_path, monkeypatch):
    """The embedded model with Python code beside it, which leaves the file `owned` where it runs."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("sys.stdin", None)  # a question cannot be answered
    folder = Path("theirs")
    shutil.copytree(TINY_PATH, folder)
    (folder / "own.py").write_text(CODE)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "architectures": ["OwnModel"]}
    config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", *RUN, "--model"],
        ["run", *RUN, "--dry-run", "--model"],
        ["run", *RUN, "--trust-remote-code", "false", "--model"],
        ["eval", "--env", "calculator", "--model"],
        ["run", "--env", "calculator", "--eval-tasks", "0", "--loss", "opd", "--teacher"],
        ["run", "--env", "calculator", "--eval-tasks", "0", "--loss", "ppo", "--critic"],
    ],
    ids=["run", "dry run", "false", "eval", "teacher", "critic"],
)
def test_the_code_of_a_model_is_refused_without_a_question(model_with_code, arguments, capsys):
    assert main([*arguments, model_with_code]) == 2
    assert "read it, then type --trust-remote-code true" in capsys.readouterr().err
    assert not Path("owned").exists()


def test_the_code_of_a_tokenizer_is_refused_without_a_question(model_with_code, capsys):
    path = Path(model_with_code) / "tokenizer_config.json"
    named = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}}
    path.write_text(json.dumps(json.loads(path.read_text()) | named))
    assert main(["run", *RUN, "--model", model_with_code]) == 2
    assert "the tokenizer of theirs is Python code" in capsys.readouterr().err
    assert not Path("owned").exists()


def test_the_code_of_a_model_runs_where_the_setting_says_so(model_with_code, capsys):
    trusting = ["--trust-remote-code", "true"]
    assert main(["run", *RUN, "--model", model_with_code, *trusting, "--out", "mine"]) == 0
    assert Path("owned").exists()
    assert main(["resume", "mine", "--steps", "2"]) == 0
    Path("owned").unlink()
    assert main(["export", "mine", "refused"]) == 2
    assert "type --trust-remote-code" in capsys.readouterr().err
    assert main(["export", "mine", "exported", "--trust-remote-code"]) == 0
    assert Path("exported/own.py").is_file()
    assert main(["run", *RUN, "--model", model_with_code, "--out", "next"]) == 2  # it is the setting of one run
