"""Folders of weights: transformers and peft load them, and errors name tensors that are not the trainer's."""

from __future__ import annotations

import json
import os
import sys

import forks
import pytest
import torch
from safetensors.torch import load_file

from rollouts.errors import ConfigError, InferenceError
from rollouts.models.folders import read_tensors
from rollouts.models.loading import load_hf_model, load_tokenizer
from rollouts.training import create_pytorch_backend
from rollouts.training.weights.files import (
    ModelFiles,
    check_weights_folder,
    file_tensors,
    find_faults,
    manifest_of,
    prune_folders,
    read_manifest,
    save_tensors,
    write_folder,
)


@pytest.fixture(scope="module")
def backend():
    made = create_pytorch_backend("tiny", 1e-3, 1, device="cpu")
    yield made
    made.close()


@pytest.fixture(scope="module")
def adapted():
    made = create_pytorch_backend("tiny", 1e-3, 1, lora_rank=4, device="cpu")
    weights = made.get_weights("adapter").wait()
    made.load_weights({name: torch.randn_like(value) * 0.1 for name, value in weights.items()}).wait()
    yield made
    made.close()


def write(backend, parent, version=7, kind="full", **settings):
    weights = backend.get_weights(kind).wait()
    files = backend.model_files
    tensors = file_tensors(weights, kind, files.causal)
    return write_folder(parent, version, kind, weights, files, **settings), manifest_of(tensors)


def flip_bit(path, place=-5):
    data = bytearray(path.read_bytes())
    data[place] ^= 0x10
    path.write_bytes(data)


def test_transformers_loads_a_full_folder(backend, tmp_path):
    path, manifest = write(backend, tmp_path)
    assert path == tmp_path / "v000007"
    assert [each.name for each in tmp_path.iterdir()] == ["v000007"]  # and nothing temporary
    loaded, own = load_hf_model(str(path), device="cpu").state_dict(), backend.model.state_dict()
    assert loaded.keys() == own.keys() and all(torch.equal(loaded[name], own[name]) for name in own)
    assert "lm_head.weight" in own and "lm_head.weight" not in {each.name for each in manifest}  # tied: written once
    assert load_tokenizer(str(path)).get_vocab() == load_tokenizer("tiny").get_vocab()
    config = json.loads((path / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"] and config["dtype"] == "float32"
    assert (path / "generation_config.json").is_file()
    check_weights_folder(path, manifest, 7)


def test_peft_loads_an_adapter_folder_and_nothing_else_lies_there(adapted, tmp_path):
    path, manifest = write(adapted, tmp_path, kind="adapter")
    assert sorted(each.name for each in path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    merged, own = load_hf_model(str(path), device="cpu").state_dict(), adapted.get_weights("full").wait()
    assert all(torch.allclose(merged[name], own[name], atol=1e-6) for name in own)
    check_weights_folder(path, manifest, 7)
    full, _ = write(adapted, tmp_path, version=8)  # the same weights merged, as a whole model
    loaded = load_hf_model(str(full), device="cpu").state_dict()
    assert all(torch.equal(loaded[name], own[name]) for name in own)


def test_another_version_takes_over_what_stays_the_same(backend, tmp_path):
    first, manifest = write(backend, tmp_path)
    second, _ = write(backend, tmp_path, version=8, like=first)
    assert {each.name for each in first.iterdir()} == {each.name for each in second.iterdir()}
    assert (first / "tokenizer.json").samefile(second / "tokenizer.json")
    assert not (first / "model.safetensors").samefile(second / "model.safetensors")
    again, _ = write(backend, tmp_path, version=8, like=second)  # the same version once more
    check_weights_folder(again, manifest, 8)
    (tmp_path / ".v000009.writing-1").mkdir()
    (tmp_path / "notes").mkdir()
    prune_folders(tmp_path, {8, 5})
    assert sorted(each.name for each in tmp_path.iterdir()) == ["notes", "v000008"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.bool])
def test_types_and_shapes_of_all_kinds_are_read_as_safetensors_reads_them(dtype, tmp_path):
    tensors = {
        "odd": torch.ones(3, dtype=torch.uint8),
        "view": torch.arange(12).reshape(3, 4).T.to(dtype),
        "scalar": torch.tensor(1, dtype=dtype),
        "none": torch.zeros(0, 4, dtype=dtype),
    }
    save_tensors(tmp_path / "model.safetensors", tensors)
    (tmp_path / "config.json").write_text("{}")
    found = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(found[name], tensors[name]) and found[name].dtype == tensors[name].dtype for name in tensors)
    assert find_faults(manifest_of(tensors), read_manifest(tmp_path)) == []
    assert all(torch.equal(each, tensors[name]) for name, each in read_tensors(tmp_path).items())


def test_a_flipped_bit_is_named(backend, tmp_path):
    path, manifest = write(backend, tmp_path)
    last = sorted(manifest, key=lambda each: each.name)[-1]  # the file's last tensor
    flip_bit(path / "model.safetensors")
    with pytest.raises(InferenceError, match=rf"version 7 .*{last.name} has other bytes \(crc32") as caught:
        check_weights_folder(path, manifest, 7)
    assert "No engine was asked" in str(caught.value) and not caught.value.is_transient
    flip_bit(path / "model.safetensors")  # and back
    check_weights_folder(path, manifest, 7)


def test_a_dropped_tensor_and_others_that_differ_are_named(backend, tmp_path):
    _, manifest = write(backend, tmp_path)
    tensors = read_tensors(tmp_path / "v000007")
    dropped = tensors.pop("model.norm.weight")
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].T
    tensors["strange"] = dropped
    write_folder(tmp_path, 7, "full", tensors, backend.model_files)
    with pytest.raises(InferenceError, match="3 such faults"):
        check_weights_folder(tmp_path / "v000007", manifest, 7)
    faults = find_faults(manifest, read_manifest(tmp_path / "v000007"))
    assert "model.norm.weight [128] is missing" in faults and "strange does not belong there" in faults
    up = next(each for each in faults if "up_proj" in each)
    assert up.endswith("is float32 [128, 256], and must be float32 [256, 128]")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda path: (path / "model.safetensors").unlink(), "holds no model.safetensors"),
        (lambda path: (path / "config.json").unlink(), "holds no config.json"),
        (lambda path: (path / "model.safetensors").write_bytes(b""), "no safetensors file, or cut off"),
        (lambda path: (path / "model.safetensors").write_bytes(b"x" * 99), "no safetensors file, or cut off"),
        (lambda path: flip_bit(path / "model.safetensors", 9), "header"),
        (
            lambda path: (path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes()[:-9]),
            "cut off: .*not fully covered",
        ),
        (
            lambda path: (path / "model.safetensors.index.json").write_text(
                '{"weight_map": {"a": "gone.safetensors"}}'
            ),
            "lacks gone.safetensors",
        ),
        (lambda path: (path / "model.safetensors.index.json").write_text("[]"), "cannot be read"),
    ],
)
def test_folders_that_are_not_whole(backend, tmp_path, spoil, words):
    path, manifest = write(backend, tmp_path)
    spoil(path)
    with pytest.raises(ConfigError, match=words):
        read_manifest(path)
    with pytest.raises(InferenceError, match=words):
        check_weights_folder(path, manifest, 7)
    with pytest.raises(ConfigError, match="there is no folder"):
        read_manifest(tmp_path / "nowhere")


CUT_WHILE_CHECKED = """
import os, sys, zlib
from rollouts.errors import ConfigError
from rollouts.training.weights.files import read_manifest

checksum = zlib.crc32

def cut_off_then_checksum(*args):
    os.truncate(sys.argv[1] + "/model.safetensors", 1000)
    return checksum(*args)

zlib.crc32 = cut_off_then_checksum
try:
    read_manifest(sys.argv[1])
except ConfigError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_file_that_is_cut_off_while_it_is_checked_does_not_end_the_process(tmp_path):
    save_tensors(tmp_path / "model.safetensors", {name: torch.zeros(4_000_000) for name in "ab"})
    (tmp_path / "config.json").write_text("{}")
    done = forks.run([sys.executable, "-c", CUT_WHILE_CHECKED, str(tmp_path)], timeout=60)
    assert done.returncode == 0, done
    assert "model.safetensors cannot be read: it ends too early" in done.stdout


def test_a_folder_that_cannot_be_written_leaves_nothing(backend, tmp_path, monkeypatch):
    path, manifest = write(backend, tmp_path)

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(InferenceError, match=r"version 7 .*No space left on device; make room .*weights-folder"):
        write(backend, tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["v000007"]
    check_weights_folder(path, manifest, 7)  # the one before is whole
    (tmp_path / "file").write_text("")
    with pytest.raises(InferenceError, match="cannot be written"):
        write(backend, tmp_path / "file")


def test_a_file_system_without_modes_of_its_own_takes_a_folder(backend, tmp_path, monkeypatch):
    def refuse(path, mode, **kwargs):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "chmod", refuse)
    monkeypatch.setattr("pathlib.Path.chmod", refuse)
    path, manifest = write(backend, tmp_path)
    check_weights_folder(path, manifest, 7)


def test_tied_weights_that_differ_are_refused(backend):
    weights = backend.get_weights().wait()
    weights["lm_head.weight"] += 1
    with pytest.raises(InferenceError, match=r"ties lm_head.weight to model.embed_tokens.weight, but here they differ"):
        file_tensors(weights, "full", ModelFiles(backend.model).causal)
