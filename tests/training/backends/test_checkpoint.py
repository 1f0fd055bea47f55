"""A checkpoint is complete or not there, whatever is killed, flipped, truncated or full; and it loads elsewhere."""

from __future__ import annotations

import copy
import functools
import json
import os
import random
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import forks
import numpy as np
import pytest
import torch

from rollouts.errors import CheckpointError, ConfigError, ModelError
from rollouts.models import lora
from rollouts.models.folders import complete_checkpoints
from rollouts.models.loading import TINY_PATH, load_hf_model
from rollouts.training.weights import checkpoint, files, store
from rollouts.training.weights.files import ModelFiles

WORKER = Path(__file__).with_name("checkpoint_worker.py")
PRINT = "0123456789abcdef"


def tensors(add=0.0):
    """Names with dots, a scalar, an odd shape, half precision, and a view that is not contiguous."""
    return {
        "optimizer": {
            "causal.a.weight": {"exp_avg": torch.arange(6.0).reshape(2, 3) + add, "step": torch.tensor(4.0 + add)},
            "causal.b.weight": {"exp_avg": (torch.arange(12.0).reshape(3, 4) + add).t()},
        },
        "critic": {"linear.weight": (torch.arange(5.0) + add).bfloat16()},
    }


def blank():
    found = tensors()
    for value in checkpoint.flat(found).values():
        value.fill_(-7)
    return found


def same(one, other):
    one, other = checkpoint.flat(one), checkpoint.flat(other)
    return set(one) == set(other) and all(torch.equal(one[name], other[name]) for name in one)


def write(path, *, add=0.0, metric=None, kind="full", fingerprint=PRINT, state=None):
    run = {"step": 1, "metric": metric} if state is None else state
    words = {"kind": kind, "fingerprint": fingerprint, "version": 5, "world_size": 1}
    with store.new_checkpoint(str(path)) as folder:
        checkpoint.write_tensors(folder, tensors(add))
        (folder / "config.json").write_text("{}")
        store.finish_checkpoint(folder, state={"backend": {"add": add}, "run": run}, **words)
    return path


def check(path):
    store.check_folder(str(path), kind="full", fingerprint=PRINT)


def names(folder):
    return sorted(each.name for each in folder.iterdir())


# What was written is read back.


def test_tensors_and_state_come_back(tmp_path):
    path = write(tmp_path / "checkpoints" / "step_000005", add=0.5)
    check(path)
    assert names(path.parent) == ["step_000005"]
    found = blank()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint.read_trainer_tensors(path, found)
    assert same(found, tensors(0.5)) and not same(found, tensors())
    assert found["critic"]["linear.weight"].dtype == torch.bfloat16
    assert store.read_state(path) == {"backend": {"add": 0.5}, "run": {"step": 1, "metric": None}}
    assert set(checkpoint.saved_tensors(path)) == {
        "optimizer.causal.a.weight.exp_avg",
        "optimizer.causal.a.weight.step",
        "optimizer.causal.b.weight.exp_avg",
        "critic.linear.weight",
    }
    manifest = json.loads((path / "manifest.json").read_text())
    assert {key: manifest[key] for key in ("format", "kind", "model", "version", "world_size")} == {
        "format": 2,
        "kind": "full",
        "model": PRINT,
        "version": 5,
        "world_size": 1,
    }
    on_disk = {str(each.relative_to(path)) for each in path.rglob("*") if each.is_file()}
    assert set(manifest["files"]) == on_disk - {"manifest.json"}


def test_a_part_of_the_tensors_can_be_read_into_parameters_that_are_trained(tmp_path):
    path = write(tmp_path / "step_000001")
    wanted = torch.nn.Parameter(torch.zeros(5, dtype=torch.bfloat16))
    checkpoint.read_trainer_tensors(path, {"critic": {"linear.weight": wanted}})
    assert torch.equal(wanted, tensors()["critic"]["linear.weight"]) and wanted.requires_grad


def test_nothing_to_write_writes_nothing(tmp_path):
    with pytest.raises(RuntimeError, match="given up"), store.new_checkpoint(str(tmp_path / "step_000000")) as folder:
        checkpoint.write_tensors(folder, {})
        checkpoint.write_tensors(folder, {"optimizer": {}})
        assert names(folder) == []
        raise RuntimeError("given up")
    assert names(tmp_path) == []
    assert set(checkpoint.saved_tensors(tmp_path)) == set()
    checkpoint.read_trainer_tensors(tmp_path, {"optimizer": {}})


def test_tensors_that_are_not_there_or_of_another_shape(tmp_path):
    path = write(tmp_path / "step_000001")
    with pytest.raises(ConfigError, match=r"has no tensor reference\.x \(1 of 2 are missing\).*settings of the run"):
        checkpoint.read_trainer_tensors(
            path, {"reference": {"x": torch.zeros(1)}, "critic": {"linear.weight": torch.zeros(5)}}
        )
    with pytest.raises(ConfigError, match=r"linear\.weight with the shape \(5,\), and here it has \(4,\)"):
        checkpoint.read_trainer_tensors(path, {"critic": {"linear.weight": torch.zeros(4)}})


def test_a_state_that_is_not_plain_data_is_told(tmp_path):
    with pytest.raises(CheckpointError, match=r"not plain data \(Object of type set.*numbers, text, lists and dicts"):
        write(tmp_path / "step_000001", state={"seen": {1}})
    assert names(tmp_path) == []


def test_saving_again_replaces(tmp_path):
    path = write(tmp_path / "step_000001")
    write(path, add=1.0)
    check(path)
    assert names(tmp_path) == ["step_000001"] and store.read_state(path)["backend"] == {"add": 1.0}


def test_the_fingerprint_tells_models_apart_and_not_states(tiny):
    one = checkpoint.model_fingerprint(tiny.qwen3().state_dict())
    assert one == checkpoint.model_fingerprint(tiny.qwen3(seed=5).state_dict())
    assert one == checkpoint.model_fingerprint(tiny.qwen3().to("meta").state_dict())
    assert one != checkpoint.model_fingerprint(tiny.qwen3(layers=1).state_dict())
    assert one != checkpoint.model_fingerprint(tiny.gpt2().state_dict())


# Killed, flipped, truncated, foreign.


class KilledError(BaseException):
    """Nothing runs any more, no clean-up either."""


@pytest.fixture
def kill_after(monkeypatch):
    """Let so many calls to the disk pass, then none: what a kill does. Gives the calls that were made."""
    made = []

    def arm(allowed, error=KilledError):
        made.clear()

        def guard(name, function):
            def guarded(*args, **kwargs):
                if len(made) >= allowed and (error is KilledError or len(made) == allowed):
                    made.append(name)
                    raise error("killed")
                made.append(name)
                return function(*args, **kwargs)

            return guarded

        monkeypatch.undo()
        for owner, name in ((os, "replace"), (os, "fsync"), (os, "unlink"), (shutil, "rmtree"), (Path, "unlink")):
            monkeypatch.setattr(owner, name, guard(name, getattr(owner, name)))

    arm.made, arm.undo = made, monkeypatch.undo
    return arm


def finish(path, add, arm=lambda: None):
    """A small checkpoint; `arm` is called once the folder is there."""
    words = {"kind": "full", "fingerprint": PRINT, "version": 1, "world_size": 1}
    with store.new_checkpoint(str(path)) as folder:
        (folder / "weights").write_text(str(add))
        arm()
        store.finish_checkpoint(folder, state={"add": add}, **words)


@pytest.mark.parametrize("replaces", [False, True])
def test_a_kill_at_any_step_leaves_what_is_whole(tmp_path, kill_after, replaces):
    """Each time the old or the new checkpoint is found, whole, once leftovers are cleared; at the end it is the new."""
    folder = tmp_path / "checkpoints"
    found = []
    for allowed in range(100):
        shutil.rmtree(folder, ignore_errors=True)
        before = folder / "step_000001"
        path = before if replaces else folder / "step_000002"
        finish(before, 0)
        try:
            finish(path, 1, functools.partial(kill_after, allowed))
            done = True
        except KilledError:
            done = False
        kill_after.undo()
        for each in complete_checkpoints(folder):
            check(each)
        store.remove_leftovers(folder)
        last = store.last_checkpoint(folder)
        check(last)
        assert (last / "weights").read_text() == str(store.read_state(last)["add"])
        assert names(folder) == sorted({before.name, last.name}), allowed
        check(before)
        found.append(store.read_state(last)["add"])
        if done:
            break
    assert found[-1] == 1 and found[0] == 0 and found == sorted(found) and len(found) > 6
    assert kill_after.made.count("replace") == (2 if replaces else 1)


def test_an_error_at_any_step_is_told_and_leaves_nothing_half_behind(tmp_path, kill_after):
    path = tmp_path / "step_000001"
    told = 0
    for allowed in range(100):
        finish(path, 0)
        try:
            finish(path, 1, functools.partial(kill_after, allowed, OSError))
        except CheckpointError as error:
            told += 1
            assert "step_000001 cannot be written: killed" in str(error) and ".writing" not in str(error)
        finally:
            kill_after.undo()
        check(path)
        assert (path / "weights").read_text() == str(store.read_state(path)["add"])
        store.remove_leftovers(tmp_path)
        assert names(tmp_path) == ["step_000001"]
        if len(kill_after.made) <= allowed:
            break
    assert told > 6


def test_a_kill_while_removing_leaves_nothing_that_looks_whole(tmp_path, kill_after):
    for allowed in range(100):
        shutil.rmtree(tmp_path / "c", ignore_errors=True)
        for step in (1, 2, 3):
            finish(tmp_path / "c" / f"step_{step}", 0)
        kill_after(allowed)
        try:
            store.prune_checkpoints(tmp_path / "c", 1)
            done = True
        except KilledError:
            done = False
        kill_after.undo()
        for each in complete_checkpoints(tmp_path / "c"):
            check(each)
        store.remove_leftovers(tmp_path / "c")
        assert "step_3" in names(tmp_path / "c") and not [n for n in names(tmp_path / "c") if n.startswith(".")]
        if done:
            break
    assert allowed > 3 and names(tmp_path / "c") == ["step_3"]


def test_every_flipped_bit_of_the_manifest_and_any_of_a_file_is_seen(tmp_path):
    path = tmp_path / "step_000001"
    finish(path, 0)
    manifest = path / "manifest.json"
    good, meaning = manifest.read_bytes(), json.loads(manifest.read_text())
    unseen = 0
    for place in range(len(good)):
        bad = bytearray(good)
        bad[place] ^= 1 << (place % 8)
        manifest.write_bytes(bytes(bad))
        try:
            check(path)
            unseen += 1
            assert json.loads(manifest.read_text()) == meaning, bytes(bad)  # a blank more or less
        except (ConfigError, ModelError):
            pass
    assert unseen < len(good) / 4
    manifest.write_bytes(good)
    write(path)
    for file in [each for each in path.rglob("*") if each.is_file() and each.name != "manifest.json"]:
        whole = file.read_bytes()
        place = random.Random(file.name).randrange(len(whole))
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        name = file.relative_to(path).as_posix()
        with pytest.raises(ConfigError, match=rf"is damaged: {name} is not what was written \(its checksum differs\)"):
            check(path)
        file.write_bytes(whole)
    check(path)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (shutil.rmtree, ConfigError, "there is no checkpoint .*step_000002; give a folder that a run wrote, such as"),
        (lambda f: (shutil.rmtree(f), f.write_text("")), ConfigError, "is a file; give a folder"),
        (lambda f: (f / "manifest.json").unlink(), ConfigError, "did not finish; give an earlier one, .*step_000001$"),
        (
            lambda f: (f / "manifest.json").write_text("{"),
            ConfigError,
            "manifest.json .* cannot be read: .*step_000001$",
        ),
        (lambda f: (f / "manifest.json").write_bytes(b"\xff"), ConfigError, "manifest.json .* cannot be read"),
        (lambda f: (f / "manifest.json").write_text('{"format": 2}'), ConfigError, "its checksum differs"),
        (lambda f: edit(f, format=3), ConfigError, "has format 3, and this version reads 2; type `pip install"),
        (lambda f: edit(f, format=1), ConfigError, "has format 1, and this version reads 2; .* type --model"),
        (lambda f: edit(f, format=None), ConfigError, "its format is None"),
        (
            lambda f: edit(f, kind="adapter"),
            ModelError,
            "holds a LoRA adapter, but this run trains all weights; .*rank",
        ),
        (lambda f: edit(f, model="x"), ModelError, "written by another model"),
        (lambda f: edit(f, files=3), ConfigError, "manifest.json .* cannot be read"),
        (lambda f: (f / "state.json").unlink(), ConfigError, "damaged: state.json is missing; .*step_000001$"),
        (lambda f: cut(f / "trainer" / "__0_0.distcp"), ConfigError, r"__0_0.distcp has \d+ bytes and not the \d+"),
        (lambda f: cut(f / "trainer" / ".metadata"), ConfigError, r"damaged: trainer/.metadata has"),
    ],
)
def test_what_is_no_good_is_refused_in_words(tmp_path, change, error, words):
    write(tmp_path / "step_000001")
    path = write(tmp_path / "step_000002")
    change(path)
    with pytest.raises(error, match=words) as caught:
        check(path)
    assert "\n" not in str(caught.value)
    check(tmp_path / "step_000001")


def edit(folder, **changes):
    manifest = json.loads((folder / "manifest.json").read_text()) | changes
    manifest["crc32"] = store.manifest_crc(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def cut(file):
    file.write_bytes(file.read_bytes()[:-20])


def test_folders_that_are_no_checkpoint(tmp_path):
    run = tmp_path / "run"
    write(run / "checkpoints" / "step_000007")
    (run / "manifest.json").write_text('{"rollouts": "0.2", "seed": 0}')
    for given in (run, run / "checkpoints"):
        with pytest.raises(ConfigError, match=r"is no checkpoint; did you mean .*checkpoints/step_000007\?"):
            check(given)
    with pytest.raises(ConfigError, match=r"is no checkpoint; it holds a model: type --model"):
        check(TINY_PATH)
    with pytest.raises(ConfigError, match="is no checkpoint; give a folder that a run wrote"):
        check(tmp_path)


def test_a_trainer_folder_that_cannot_be_read_is_told(tmp_path):
    path = write(tmp_path / "step_000001")
    (path / "trainer" / ".metadata").write_bytes(b"\x80\x04nonsense")
    for read in (checkpoint.saved_tensors, lambda each: checkpoint.read_trainer_tensors(each, tensors())):
        with pytest.raises(ConfigError, match=r"index of trainer/ .* cannot be read.*give an earlier one"):
            read(path)
    write(path)
    (path / "trainer" / "__0_0.distcp").write_bytes(b"x" * 9000)
    with pytest.raises(ConfigError, match=r"trainer/ of the checkpoint .* cannot be read: "):
        checkpoint.read_trainer_tensors(path, tensors())
    (path / "state.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"state.json of the checkpoint .* cannot be read: it holds a list"):
        store.read_state(path)


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "step_000001", tmp_path / "file"):
        with pytest.raises(CheckpointError, match=r"cannot be written: .*checkpoints before it are as they were"):
            finish(path, 0)
    with (
        pytest.raises(CheckpointError, match=r"step_000001 cannot be written: File exists"),
        store.new_checkpoint(str(tmp_path / "step_000001")) as folder,
    ):
        (folder / "trainer").write_text("")
        checkpoint.write_tensors(folder, tensors())
    assert names(tmp_path) == ["file"]


# The checkpoints of a run.


def metric(value, name="reward/mean", higher=True):
    return {"name": name, "value": value, "higher_is_better": higher}


def small(folder, step, given=None):
    path = folder / f"step_{step:06d}"
    words = {"kind": "full", "fingerprint": PRINT, "version": step, "world_size": 1}
    with store.new_checkpoint(str(path)) as temporary:
        store.finish_checkpoint(temporary, state={"run": {"metric": given}}, **words)
    return path


def test_the_last_one_is_the_one_with_the_highest_number(tmp_path):
    assert store.last_checkpoint(tmp_path / "none") is None and store.last_checkpoint(tmp_path) is None
    paths = [small(tmp_path, step) for step in (2, 10, 999_999, 1_000_000)]
    (tmp_path / "step_9000000").mkdir()  # not finished
    shutil.copytree(paths[0], tmp_path / ".step_9000001.writing-1")
    shutil.copytree(paths[0], tmp_path / "mine")
    assert complete_checkpoints(tmp_path) == paths
    assert store.last_checkpoint(tmp_path) == paths[-1]


@pytest.mark.parametrize(
    ("metrics", "keep", "left"),
    [
        ([metric(0.1), metric(0.9), metric(0.3), metric(0.2)], 1, [2, 4]),
        ([metric(0.1), metric(0.9), metric(0.3), metric(0.2)], 2, [2, 3, 4]),
        ([metric(0.1), metric(0.9), metric(0.3), metric(0.2)], 0, [1, 2, 3, 4]),
        ([metric(0.1), metric(0.9), metric(0.3), metric(0.2)], 9, [1, 2, 3, 4]),
        ([metric(0.9), metric(0.9), metric(0.3), metric(0.2)], 1, [2, 4]),  # of equals the newer
        ([metric(0.1, higher=False), metric(0.9, higher=False), metric(0.3, higher=False)], 1, [1, 3]),
        ([metric(0.9, "other"), metric(0.5), metric(0.3)], 1, [2, 3]),
        ([metric(0.9), metric(0.1), None], 1, [1, 3]),  # the newest was not evaluated
        ([metric(float("nan")), metric(0.2), metric(float("nan")), metric(0.1)], 1, [2, 4]),
        ([None, None, None], 1, [3]),
        ([{"name": 3}, "text", None], 2, [2, 3]),
    ],
)
def test_pruning_keeps_the_last_and_the_best(tmp_path, metrics, keep, left):
    paths = [small(tmp_path, step, given) for step, given in enumerate(metrics, 1)]
    removed = store.prune_checkpoints(tmp_path, keep)
    assert names(tmp_path) == [f"step_{step:06d}" for step in left]
    assert removed == [path for path in paths if not path.exists()]
    assert store.prune_checkpoints(tmp_path, keep) == []


def test_a_checkpoint_that_cannot_be_removed_is_told(tmp_path, monkeypatch):
    small(tmp_path, 1), small(tmp_path, 2)

    def refuse(*args):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(
        CheckpointError, match=r"step_000001 cannot be removed: Permission denied; .*keep-checkpoints 0"
    ):
        store.prune_checkpoints(tmp_path, 1)
    monkeypatch.undo()
    assert names(tmp_path) == ["step_000001", "step_000002"]


def test_leftovers_of_the_dead_go_and_those_of_the_living_stay(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    dead, living, own = ended.pid, os.getppid(), os.getpid()
    good = small(tmp_path, 1)
    for pid in (dead, living, own):
        for what in ("writing", "removed", "old"):
            shutil.copytree(good, tmp_path / f".step_000001.{what}-{pid}")
    shutil.copytree(good, tmp_path / f".step_000002.old-{dead}")  # the other one was not there yet
    shutil.copytree(good, tmp_path / f".step_000002.writing-{dead}")
    shutil.copytree(good, tmp_path / f".step_000003.old-{own}")  # a process with our number, in another container
    shutil.copytree(good, tmp_path / f".step_000004.old-{dead}")
    (tmp_path / f".step_000004.old-{dead}" / "manifest.json").unlink()
    shutil.copytree(good, tmp_path / f".step_000005.old-{living}")
    (tmp_path / f".note.writing-{dead}").write_text("a file, not ours")
    store.remove_leftovers(tmp_path)
    assert names(tmp_path) == sorted(
        [f".step_000001.{what}-{living}" for what in ("writing", "removed", "old")]
        + [f".step_000005.old-{living}", f".note.writing-{dead}", "step_000001", "step_000002", "step_000003"]
    )
    for each in complete_checkpoints(tmp_path):
        check(each)
    store.remove_leftovers(tmp_path / "none")


# Weights, as transformers and peft load them.


def load(path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path).eval()


def bit_equal(one, other):
    states = one.state_dict(), other.state_dict()
    return set(states[0]) == set(states[1]) and all(torch.equal(states[0][n], states[1][n]) for n in states[0])


@pytest.mark.parametrize("make", ["qwen3", "untied", "gpt2", "gemma2", "tiny"])
@pytest.mark.parametrize("gathered", [False, True])
def test_transformers_loads_the_weights_bit_equal(tiny, tmp_path, make, gathered):
    """Also where the model's own parameters are not here, and the state has a tied weight twice."""
    from safetensors import safe_open

    makers = {"untied": lambda: tiny.qwen3(tied=False), "tiny": lambda: load_hf_model("tiny", device="cpu")}
    model = makers[make]() if make in makers else getattr(tiny, make)()
    causal, weights = model, dict(model.state_dict())
    if gathered:
        causal = copy.deepcopy(model).to("meta")
        weights = {name: value.clone() for name, value in weights.items()}
    given = dict(weights)
    files.write_weights(tmp_path, "full", weights, ModelFiles(causal))
    assert weights.keys() == given.keys(), "what was given stays as it was"
    loaded = load(tmp_path)
    assert bit_equal(loaded, model) and loaded.dtype == model.dtype
    probe = torch.arange(20)[None]
    assert torch.equal(loaded(probe).logits, model(probe).logits)
    assert torch.equal(
        files.read_weights(str(tmp_path), kind="full", dtype=torch.float32)["lm_head.weight"], model.lm_head.weight
    )
    with safe_open(str(tmp_path / "model.safetensors"), "pt") as file:
        written = set(file.keys())
    assert ("lm_head.weight" in written) == (make == "untied")


def test_the_state_that_is_given_is_what_is_written(tiny, tmp_path):
    model, other = tiny.qwen3(), tiny.qwen3(seed=9)
    files.write_weights(tmp_path, "full", other.state_dict(), ModelFiles(model))
    assert bit_equal(load(tmp_path), other) and not bit_equal(load(tmp_path), model)
    assert (tmp_path / "config.json").is_file() and not (tmp_path / "tokenizer.json").exists()


def test_the_tokenizer_and_its_template_come_along(tmp_path):
    model = load_hf_model("tiny", device="cpu")
    files.write_weights(tmp_path, "full", model.state_dict(), ModelFiles(model, source="tiny"))
    from transformers import AutoTokenizer

    one, other = AutoTokenizer.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(TINY_PATH)
    assert one.get_vocab() == other.get_vocab() and one.chat_template == other.chat_template is not None


def test_merged_weights_of_a_model_with_adapters_are_written_as_a_model(tiny, tmp_path):
    model = tiny.qwen3()
    lora.add_lora(model, rank=2, alpha=None, targets="all-linear", seed=0)
    files.write_weights(tmp_path, "full", lora.merged_weights(model, copies), ModelFiles(model))
    assert bit_equal(load(tmp_path), tiny.qwen3())


def copies(named):
    return {name: value.detach().clone() for name, value in named}


def adapted(tiny, seed=0):
    causal = tiny.qwen3()
    adapter = lora.add_lora(causal, rank=2, alpha=None, targets="all-linear", seed=seed)
    with torch.no_grad():
        for name, parameter in causal.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    return causal, adapter


def model_files(causal, adapter):
    return ModelFiles(causal, None if adapter is None else adapter.peft_config[lora.ADAPTER])


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_peft_loads_the_adapter_bit_equal_and_its_files_are_pefts(tiny, tmp_path):
    from peft import PeftModel

    causal, adapter = adapted(tiny)
    weights = lora.read_adapter_weights(adapter, copies)
    (tmp_path / "ours").mkdir()
    files.write_weights(tmp_path / "ours", "adapter", weights, model_files(causal, adapter))
    adapter.save_pretrained(str(tmp_path / "pefts"), save_embedding_layers=False)
    assert names(tmp_path / "ours") == ["adapter_config.json", "adapter_model.safetensors"]
    for name in names(tmp_path / "ours"):
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "pefts" / name).read_bytes(), name
    assert not adapter.peft_config["default"].inference_mode
    read = files.read_weights(str(tmp_path / "ours"), kind="adapter", dtype=torch.float32)
    assert set(read) == set(weights) and all(torch.equal(read[name], weights[name]) for name in weights)
    loaded = PeftModel.from_pretrained(tiny.qwen3(), str(tmp_path / "ours")).eval()
    probe = torch.arange(20)[None]
    assert torch.equal(loaded(probe).logits, causal(probe).logits)
    assert not torch.equal(loaded(probe).logits, tiny.qwen3()(probe).logits)


def test_weights_that_cannot_be_read_are_told(tiny, tmp_path):
    for kind, name in (("adapter", "adapter_model.safetensors"), ("full", "model.safetensors")):
        folder = tmp_path / kind
        folder.mkdir()
        causal, adapter = adapted(tiny) if kind == "adapter" else (tiny.qwen3(), None)
        weights = lora.read_adapter_weights(adapter, copies) if adapter else causal.state_dict()
        files.write_weights(folder, kind, weights, model_files(causal, adapter))
        (folder / name).write_bytes(b"x" * 500)
        with pytest.raises((ConfigError, ModelError), match=r"(cannot be read|could not be loaded)"):
            files.read_weights(str(folder), kind=kind, dtype=torch.float32)


# Random states.


def draws():
    return random.random(), random.gauss(0, 1), float(np.random.rand()), float(np.random.randn()), float(torch.rand(()))


def test_random_states_come_back_through_json(tmp_path):
    mine = checkpoint.generator_states()
    try:
        random.seed(3), np.random.seed(3), torch.manual_seed(3)
        random.gauss(0, 1), np.random.randn()  # each keeps a second one for the next call
        state = json.loads(json.dumps(checkpoint.generator_states()))
        first, second = draws(), draws()
        assert first != second
        checkpoint.set_random_state(state)
        assert (draws(), draws()) == (first, second)
        with pytest.raises(
            ConfigError, match=r"random states of the checkpoint cannot be set here.*versions of python"
        ):
            checkpoint.set_random_state(state | {"torch": "AAAA"})
        with pytest.raises(ConfigError, match="random states"):
            checkpoint.set_random_state({})
    finally:
        checkpoint.set_random_state(mine)


# In processes of their own.


def run_ranks(work, ranks, folder):
    """Every rank must end well, within its time; none is left running."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    started = [
        forks.popen(
            [sys.executable, str(WORKER), work, str(rank), str(ranks), str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        for rank in range(ranks)
    ]
    try:
        said = [each.communicate(timeout=180)[0].decode() for each in started]
    finally:
        for each in started:
            each.kill()
            each.wait()
    assert [each.returncode for each in started] == [0] * ranks, "\n".join(said)


@pytest.mark.slow
def test_two_ranks_save_and_one_and_four_load(tmp_path):
    run_ranks("save", 2, tmp_path)
    path = tmp_path / "step_000003"
    model = load_hf_model("tiny", device="cpu")
    store.check_folder(str(path), kind="full", fingerprint=checkpoint.model_fingerprint(model.state_dict()))
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["world_size"] == 2 and {"trainer/__0_0.distcp", "trainer/__1_0.distcp"} <= set(manifest["files"])
    assert bit_equal(load(path), model) and (path / "tokenizer.json").is_file()
    assert json.loads((path / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
    found = {
        "optimizer": {"causal.layer.weight": {"exp_avg": torch.zeros(5, 3), "step": torch.zeros(())}},
        "critic": {"few": torch.zeros(1, 4), "vector": torch.zeros(7), "half": torch.zeros(6, 2).bfloat16()},
    }
    checkpoint.read_trainer_tensors(path, found)
    assert torch.equal(found["critic"]["vector"], torch.arange(7.0) * 1.5 + 0.25)
    rows = torch.arange(15.0).reshape(5, 3) * 1.5 + 0.25
    assert torch.equal(found["optimizer"]["causal.layer.weight"]["exp_avg"], rows)
    assert found["optimizer"]["causal.layer.weight"]["step"] == 12
    run_ranks("load", 4, tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="there is no limit on the size of files to set")
def test_a_full_disk_is_told_and_the_last_checkpoint_stays(tmp_path):
    done = forks.run([sys.executable, str(WORKER), "full-disk", str(tmp_path)], timeout=180)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert set(said) == {"tensors", "weights", "adapter", "tokenizer", "state"}
    for name, message in said.items():
        assert "step_000001 cannot be written: " in message and "File too large" in message, (name, message)
        assert "free some space, or keep fewer (--keep-checkpoints)" in message, (name, message)
