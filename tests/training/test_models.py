"""Names of models: adapters are merged into theirs, and one error message says why a model cannot be loaded."""

from __future__ import annotations

import json
import shutil
import socket
import sys
import threading
import time
import warnings
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import forks
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file

from rollouts.chat import load_chat_format
from rollouts.errors import ModelError
from rollouts.models import loading as models
from rollouts.models import revisions
from rollouts.models.revisions import model_file
from rollouts.types import Message


def test_a_folder_loads(tiny, tmp_path):
    tiny.qwen3().save_pretrained(tmp_path)
    model = models.load_hf_model(str(tmp_path), dtype="bfloat16", device="cpu")
    assert model.dtype == torch.bfloat16 and not model.training
    with pytest.raises(ModelError, match="choices: auto, bfloat16"):
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


def test_a_download_that_fails(monkeypatch):
    from transformers import AutoModelForCausalLM

    def unreachable(name, **settings):
        raise OSError("We couldn't connect.\n" + "a long story\n" * 50)

    monkeypatch.setattr(models, "_check_hub", lambda name: None)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", unreachable)
    with pytest.raises(ModelError) as caught:
        models.load_hf_model("someone/some-model")
    message = str(caught.value)
    assert "'someone/some-model'" in message and "--model tiny" in message and "long story" not in message


# --- adapters -------------------------------------------------------------------------------------------------------

PROBE = torch.arange(20)[None]


def logits(model):
    with torch.no_grad():
        return model(PROBE).logits


def save_adapter(folder, base, *, seed=1, **settings):
    """A LoRA adapter in peft's format, with deltas that are not 0; gives the logits of base and adapter."""
    from peft import LoraConfig, get_peft_model

    model = models.load_hf_model(str(base), device="cpu")
    config = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = get_peft_model(model, config)
    torch.manual_seed(seed)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    adapted.save_pretrained(str(folder), save_embedding_layers=False)
    return logits(adapted.eval())


def edit(folder, **changes):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture
def base(tiny, tmp_path):
    tiny.qwen3(tied=True).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.parametrize("settings", [{}, {"use_rslora": True, "lora_alpha": 16}, {"use_dora": True}], ids=str)
def test_an_adapter_is_merged_as_peft_does(base, tmp_path, settings):
    from peft import PeftModel

    live = save_adapter(tmp_path / "adapter", base, **settings)
    model = models.load_hf_model(str(tmp_path / "adapter"), device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = PeftModel.from_pretrained(models.load_hf_model(str(base), device="cpu"), str(tmp_path / "adapter"))
        theirs = theirs.merge_and_unload()
    assert all(
        torch.equal(a, b) for a, b in zip(model.state_dict().values(), theirs.state_dict().values(), strict=True)
    )
    assert list(model.state_dict()) == list(models.load_hf_model(str(base), device="cpu").state_dict()), "plain again"
    assert all(parameter.requires_grad for parameter in model.parameters()) and not model.training
    assert (logits(model) - live).abs().max() < 1e-4
    assert (logits(model) - logits(models.load_hf_model(str(base), device="cpu"))).abs().max() > 1e-2


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_rounds_the_sum_once(base, tmp_path, dtype):
    save_adapter(tmp_path / "adapter", base)
    exact = models.load_hf_model(str(tmp_path / "adapter"), device="cpu")
    half = models.load_hf_model(str(tmp_path / "adapter"), dtype=dtype, device="cpu")
    plain = models.load_hf_model(str(base), dtype=dtype, device="cpu")
    assert half.dtype == getattr(torch, dtype)
    for name, value in half.state_dict().items():
        assert torch.equal(value, exact.state_dict()[name].to(value.dtype))
    buffers = [(name, value.dtype) for name, value in plain.named_buffers()]
    assert [(name, value.dtype) for name, value in half.named_buffers()] == buffers
    assert torch.float32 in [dtype for _, dtype in buffers], "frequencies are never rounded"


def test_adapters_of_adapters(base, tmp_path):
    """An adapter that was trained on another one names its folder, and both are merged."""
    first, second, sibling = (tmp_path / name for name in ("first", "second", "sibling"))
    save_adapter(first, base)
    live = save_adapter(second, first, seed=2)
    save_adapter(sibling, base, seed=2)
    assert json.loads((second / "adapter_config.json").read_text())["base_model_name_or_path"] == str(first)
    assert models.adapters_beneath(str(second)) == (str(base), (str(first), str(second)))
    assert models.adapters_beneath(str(sibling)) == (str(base), (str(sibling),))
    model = models.load_hf_model(str(second), device="cpu")
    assert (logits(model) - live).abs().max() < 1e-4
    assert (logits(model) - logits(models.load_hf_model(str(sibling), device="cpu"))).abs().max() > 1e-2
    edit(first, base_model_name_or_path=str(second))
    with pytest.raises(ModelError, match="names its own folder as the base model"):
        models.load_hf_model(str(second))


def test_the_base_is_found_where_it_is_now(base, tmp_path, monkeypatch):
    adapter = tmp_path / "adapter"
    save_adapter(adapter, "tiny")
    for name in ("tiny", "/opt/other/site-packages/rollouts/tiny", "C:\\lib\\rollouts\\tiny"):
        edit(adapter, base_model_name_or_path=name)
        assert models.adapters_beneath(str(adapter)) == (str(models.TINY_PATH), (str(adapter),))
    monkeypatch.chdir(tmp_path)
    save_adapter(tmp_path / "relative", "base")
    stored = json.loads((tmp_path / "relative" / "adapter_config.json").read_text())
    assert stored["base_model_name_or_path"] == str(base), "whole, so that it is found from elsewhere too"
    edit(adapter, base_model_name_or_path="someone/some-model")
    assert models.adapters_beneath("adapter") == ("someone/some-model", ("adapter",))


def test_a_run_of_two_phases_can_be_moved(base, tmp_path):
    one = tmp_path / "old" / "sft" / "checkpoints" / "step_000002"
    two = tmp_path / "old" / "rl" / "checkpoints" / "step_000003"
    save_adapter(one, base)
    live = save_adapter(two, one, seed=2)
    (tmp_path / "old").rename(tmp_path / "new")
    moved = tmp_path / "new" / "rl" / "checkpoints" / "step_000003"
    assert (logits(models.load_hf_model(str(moved), device="cpu")) - live).abs().max() < 1e-4
    shutil.rmtree(tmp_path / "new" / "sft" / "checkpoints" / "step_000002")
    with pytest.raises(ModelError, match=r"was trained on the model in .*old.*step_000002, and there is no such"):
        models.load_hf_model(str(moved))


def test_the_tokenizer_of_an_adapter(tmp_path):
    save_adapter(tmp_path / "adapter", "tiny")
    tokenizer = models.load_tokenizer(str(tmp_path / "adapter"))
    assert tokenizer.chat_template == models.load_tokenizer("tiny").chat_template
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(tmp_path / "adapter")
    assert models.load_tokenizer(str(tmp_path / "adapter")).chat_template == "{{ messages }}"
    save_adapter(tmp_path / "second", tmp_path / "adapter")
    assert models.load_tokenizer(str(tmp_path / "second")).chat_template == "{{ messages }}"


@pytest.mark.parametrize(("listed", "ends"), [(7, {7}), ([7, 2], {7, 2}), (None, set())])
def test_the_ends_that_a_model_lists_end_a_reply(tmp_path, listed, ends):
    shutil.copytree(models.TINY_PATH, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": listed}))
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"eos_token_id": 9}))
    save_adapter(tmp_path / "adapter", tmp_path / "model")
    for name in ("model", "adapter"):
        tokenizer = models.load_tokenizer(str(tmp_path / name))
        chat = load_chat_format(tokenizer)
        assert set(chat.stop_ids) == ends | {9, tokenizer.eos_token_id}
        text = chat.encode("Hello")
        asked, more = [Message("user", "Hi")], [Message("user", "And?")]
        for end in chat.stop_ids:
            reply = chat.parse([*text, end], [])
            assert reply.text == "Hello"
            added = chat.extend(asked, reply, more, [], [*text, end])
            assert (added is not None) == (end in chat.closers.values()), "history shows another end: a new segment"
    (tmp_path / "model" / "generation_config.json").unlink()
    assert models.load_tokenizer(str(tmp_path / "model")).model_ends == (9,)
    (tmp_path / "model" / "generation_config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"generation_config.json of the model .* cannot be read"):
        models.load_tokenizer(str(tmp_path / "model"))


def damage_weights(folder, base, tiny):
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:300])


def lose_weights(folder, base, tiny):
    (folder / "adapter_model.safetensors").unlink()


def damage_config(folder, base, tiny):
    (folder / "adapter_config.json").write_text("{")


def list_config(folder, base, tiny):
    (folder / "adapter_config.json").write_text("[]")


def no_base(folder, base, tiny):
    edit(folder, base_model_name_or_path=None)


def lost_base(folder, base, tiny):
    edit(folder, base_model_name_or_path="/models/lost")


def empty_base(folder, base, tiny):
    (base / "config.json").unlink()


def other_architecture(folder, base, tiny):
    save_model(base, tiny.gpt2())


def deeper_base(folder, base, tiny):
    save_model(base, tiny.qwen3(layers=3))
    edit(folder, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "gate_proj"])


def shallower_base(folder, base, tiny):
    save_model(base, tiny.qwen3(layers=1))
    edit(folder, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "gate_proj"])


def other_rank(folder, base, tiny):
    edit(folder, r=4)


def other_kind(folder, base, tiny):
    edit(folder, peft_type="NEVER_HEARD_OF")


def save_model(folder, model):
    shutil.rmtree(folder)
    model.save_pretrained(folder)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (damage_weights, "the adapter in .* cannot be read"),
        (lose_weights, "has no adapter_model.safetensors"),
        (damage_config, "adapter_config.json in .* cannot be read"),
        (list_config, "must hold an object"),
        (no_base, 'does not say on which model it was trained; write .* as "base_model_name_or_path"'),
        (lost_base, "trained on the model in /models/lost, and there is no such folder here; .*write its folder"),
        (empty_base, r"the adapter in .* needs its model: .* holds no config\.json"),
        (other_architecture, "does not fit the model that it names, .*base: "),
        (deeper_base, r"does not fit the model that it names, .*layers\.2\..*, and the other does not"),
        (shallower_base, r"does not fit the model that it names, .*layers\.1\..*, and the other does not"),
        (other_rank, "does not fit the model that it names, .*size mismatch"),
        (other_kind, "NEVER_HEARD_OF"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_adapters_that_cannot_be_used(tiny, base, tmp_path, spoil, words):
    folder = tmp_path / "adapter"
    save_adapter(folder, base)
    spoil(folder, base, tiny)
    with pytest.raises(ModelError, match=words):
        models.load_hf_model(str(folder), device="cpu")


def test_an_adapter_of_the_hub_is_told_so(tiny, monkeypatch):
    from transformers import AutoModelForCausalLM

    model = tiny.qwen3()
    model._hf_peft_config_loaded = True
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda name, **settings: model)
    with pytest.raises(ModelError, match="hf download someone/some-lora"):
        models.load_hf_model("someone/some-lora")


def test_published_packages_find_what_has_moved():
    import rollouts.training.estimates
    from rollouts.training.backends.futures import TorchThread
    from rollouts.training.models import at_revision, load_tokenizer

    from rollouts.models import estimates, futures
    from rollouts.training import models as earlier

    assert TorchThread is futures.TorchThread
    assert load_tokenizer is models.load_tokenizer and earlier.TINY_PATH == models.TINY_PATH
    assert at_revision is revisions.at_revision
    assert rollouts.training.estimates.estimate_memory is estimates.estimate_memory
    with pytest.raises(ImportError, match="load_nothing"):
        from rollouts.training.models import load_nothing  # noqa: F401


# --- names of the hub -------------------------------------------------------------------------------------------------


def ask_hub(monkeypatch, endpoint, cache, name, offline=False):
    """The error of loading a tokenizer from this hub, with no cache but `cache`."""
    for setting, value in {"ENDPOINT": endpoint, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": offline}.items():
        monkeypatch.setattr(constants, setting, value)
    with pytest.raises(ModelError) as caught:
        models.load_tokenizer(name)
    return str(caught.value)


class Hub(BaseHTTPRequestHandler):
    """A hub without models. Notes each request."""

    asked: ClassVar[list[str]] = []

    def do_GET(self):
        self.asked.append(self.path)
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *given):
        pass


def test_a_name_that_the_hub_does_not_know_asks_once(tmp_path, monkeypatch):
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        said = ask_hub(monkeypatch, url, tmp_path, "models/nope")
        server.shutdown()
    assert f"there is no folder models/nope, and as a name of the hub, {url} does not know it" in said
    assert [path for path in Hub.asked if "nope" in path] == ["/api/models/models/nope"]


def test_a_hub_that_cannot_be_asked(tmp_path, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        said = ask_hub(monkeypatch, url, tmp_path, "models/nope")
    assert f"there is no folder models/nope, and as a name of the hub, {url} could not be reached" in said
    said = ask_hub(monkeypatch, url, tmp_path, "models/nope", offline=True)
    assert "there is no folder models/nope, and as a name of the hub it is not in the cache, and HF_HUB_OFFLINE" in said


class HubOfOtherFiles(Hub):
    """A hub whose models do not have the file that is asked for."""

    def do_GET(self):
        self.send_response(404)
        self.send_header("X-Error-Code", "EntryNotFound")
        self.send_header("X-Repo-Commit", "a" * 40)
        self.end_headers()

    do_HEAD = do_GET


def test_a_file_that_cannot_be_asked_for_is_not_taken_as_absent(tmp_path, monkeypatch):
    """Without generation_config.json, a model would have fewer ends."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # between attempts

    def ask(url, offline=False, name="generation_config.json", **settings):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
        return model_file("acme/small", name, **settings)

    folder = tmp_path / "models--acme--small" / "snapshots" / ("a" * 40)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder.parents[1] / "refs").mkdir()
    (folder.parents[1] / "refs" / "main").write_text("a" * 40)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        away = f"http://127.0.0.1:{free.getsockname()[1]}"
        assert ask(away, name="config.json") == folder / "config.json"
        said = r"generation_config.json of the model acme/small could not be loaded .*\n.*type HF_HUB_OFFLINE=1 before"
        with pytest.raises(ModelError, match=said):
            ask(away)
        assert ask(away, offline=True) is None and ask(away, local_files_only=True) is None
        with ThreadingHTTPServer(("127.0.0.1", 0), HubOfOtherFiles) as server:
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            assert ask(f"http://127.0.0.1:{server.server_port}") is None
            server.shutdown()
        assert ask(away) is None, "the cache has what the hub has said"


def test_a_path_is_never_asked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert models.resolve_model_name("org/name") == "org/name"
    (tmp_path / "org").mkdir()
    with pytest.raises(ModelError, match="there is no folder org/name, and org is a folder here"):
        models.resolve_model_name("org/name")
    for step in (5, 10, 20):
        folder = tmp_path / "org" / f"step_{step:06d}"
        folder.mkdir()
        (folder / "manifest.json").write_text("{}")
    near = "the nearest checkpoints: org/step_000005, org/step_000010$"
    with pytest.raises(ModelError, match=near):
        models.resolve_model_name("org/step_000007")
    with pytest.raises(ModelError, match=r"the nearest checkpoints: .*/org/step_000020$"):
        models.resolve_model_name(str(tmp_path / "org" / "step_000099"))


# --- threads ----------------------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_runs_in_two_threads_are_as_alone(tmp_path):
    """In a process of its own, which has imported transformers: its first import fails in two threads."""
    code = """
import sys
from concurrent.futures import ThreadPoolExecutor
import rollouts

def run(name):
    sizes = {"steps": 1, "prompts_per_step": 1, "samples_per_prompt": 2, "eval_tasks": 2, "max_tokens": 8}
    out = f"{sys.argv[1]}/{name}"
    more = {"lora_rank": 2, "checkpoint_every": 1, "quiet": True, "out": out}
    rollouts.run(env="calculator", loss="grpo", **sizes, **more)

with ThreadPoolExecutor(2) as threads:
    list(threads.map(run, ["one", "two"]))
run("alone")
"""
    done = forks.run([sys.executable, "-c", code, str(tmp_path)], timeout=120)
    assert done.returncode == 0, done.stderr
    weights = "checkpoints/step_000001/adapter_model.safetensors"
    alone = load_file(tmp_path / "alone" / weights)
    for name in ("one", "two"):
        own = load_file(tmp_path / name / weights)
        assert own.keys() == alone.keys()
        assert all(torch.equal(own[key], alone[key]) for key in alone)
