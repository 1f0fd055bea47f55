"""Models and data of a hub: a run records their commits, and has the same ones when it is resumed or repeated."""

from __future__ import annotations

import json
import shutil
import threading
import types
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants
from rollouts_servers.options import ServerOptions
from rollouts_servers.sglang import serve_sglang
from rollouts_servers.vllm import serve_vllm

import rollouts
from rollouts.cli import main
from rollouts.errors import ConfigError, ModelError
from rollouts.models import revisions
from rollouts.models.loading import TINY_PATH, adapters_beneath, load_config, load_tokenizer
from rollouts.runs import several

OLD, NEW = "a" * 40, "b" * 40
NAME = "acme/small"
SMALL = {"env": "calculator", "prompts_per_step": 1, "samples_per_prompt": 2, "eval_tasks": 0, "max_tokens": 4,
         "steps": 1, "lora_rank": 2, "quiet": True}  # fmt: skip


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A cache with two commits of a model, of which `main` is the older one, and no network. Gives the file of main."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    folder = tmp_path / "hub" / "models--acme--small"
    for commit, spread in ((OLD, 0.01), (NEW, 0.02)):
        shutil.copytree(TINY_PATH, folder / "snapshots" / commit)
        config = folder / "snapshots" / commit / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"initializer_range": spread}))
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(OLD)
    return folder / "refs" / "main"


def known(folder):
    return json.loads((Path(folder) / "manifest.json").read_text())["revisions"]


def test_all_parts_of_a_model_have_one_commit_within_a_run(hub):
    with revisions.pinned({}):
        assert load_config(NAME).initializer_range == 0.01
        hub.write_text(NEW)
        assert load_tokenizer(NAME).eos_token and load_config(NAME).initializer_range == 0.01
        assert revisions.used() == {NAME: OLD}
        assert load_config(f"{NAME}@main").initializer_range == 0.02, "a name with a revision is one of its own"
        assert load_config(f"{NAME}@{OLD}").initializer_range == 0.01
    assert load_config(NAME).initializer_range == 0.02, "nothing is pinned outside of a run"
    with pytest.raises(ModelError, match="acme/small@v9"):
        load_config(f"{NAME}@v9")


@pytest.mark.slow
def test_a_run_is_resumed_and_repeated_with_its_commit(hub):
    rollouts.run(model=NAME, out="first", **SMALL)
    assert known("first") == {NAME: OLD}
    adapter = json.loads(Path("first/checkpoints/step_000001/adapter_config.json").read_text())
    assert (adapter["base_model_name_or_path"], adapter["revision"]) == (NAME, OLD)
    hub.write_text(NEW)
    rollouts.resume("first", steps=2)
    assert known("first") == {NAME: OLD}
    assert adapters_beneath("first/checkpoints/step_000002")[0] == f"{NAME}@{OLD}", "a loaded base is the same one"
    rollouts.run("first/config.toml", out="again")
    assert known("again") == {NAME: OLD}
    rollouts.run("first/config.toml", model=f"{NAME}@main", out="newest")
    assert known("newest") == {f"{NAME}@main": NEW}
    assert rollouts.run(mode="eval", env="calculator", model="newest", out="eval", eval_tasks=1, quiet=True)
    assert known("eval") == {f"{NAME}@{NEW}": NEW}


def test_runs_of_all_seeds_have_the_commit_of_the_first(hub, monkeypatch):
    def run_child(arguments, variables):
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            code = main(arguments)
        hub.write_text(NEW)
        return code

    monkeypatch.setattr(several, "run_child", run_child)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items() if name != "quiet"]
    assert main(["run", *flags, f"--model={NAME}", "--out=m", "--seeds=0-1"]) == 0
    assert known("m/seed_0") == known("m/seed_1") == {NAME: OLD}


def test_servers_start_with_the_commit(hub):
    options = ServerOptions()
    with revisions.pinned({NAME: OLD}):
        vllm = serve_vllm("python", NAME, 1, options).argv
        sglang = serve_sglang("python", f"{NAME}@v1", 1, options).argv
    assert vllm[vllm.index("--model") + 1] == NAME and vllm[vllm.index("--revision") + 1] == OLD
    assert vllm[vllm.index("--tokenizer-revision") + 1] == OLD
    assert sglang[sglang.index("--model-path") + 1] == NAME and sglang[sglang.index("--revision") + 1] == "v1"
    assert "--revision" not in serve_vllm("python", str(TINY_PATH), 1, options).argv


class Answers(BaseHTTPRequestHandler):
    """A hub whose data sets all have the commit NEW."""

    def do_GET(self):
        data = json.dumps({"id": "acme/rows", "sha": NEW}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *given):
        pass


@pytest.fixture
def rows(monkeypatch, tmp_path):
    """The calls of `datasets.load_dataset`; what it gives has files of the commit in `cached`."""
    import datasets

    calls, cached = [], []

    class Rows(list):
        @property
        def cache_files(self):
            return [{"filename": f"/cache/acme___rows/default/0.0.0/{commit}/rows-train.arrow"} for commit in cached]

    def load(source, config, **given):
        calls.append(given.get("revision"))
        return Rows([{"question": "What is 1 + 1?", "answer": "2"}] * 4)

    monkeypatch.setattr(datasets, "load_dataset", load)
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.chdir(tmp_path)
        yield types.SimpleNamespace(calls=calls, cached=cached)
        server.shutdown()


def read_rows(**settings):
    from rollouts.data.source import open_rows

    return list(open_rows({"name": "acme/rows", **settings}))


def test_data_is_read_at_one_commit_and_again_at_that(rows, monkeypatch):
    with revisions.pinned({}):
        assert len(read_rows()) == 4
        read_rows(revision="v1", streaming=True)
        assert revisions.used() == {"datasets/acme/rows": NEW, "datasets/acme/rows@v1": NEW}
    with revisions.pinned({"datasets/acme/rows": OLD}):
        read_rows()
    assert rows.calls == [NEW, NEW, OLD]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    rows.cached.append(OLD)
    with revisions.pinned({}):
        read_rows()
        assert rows.calls[-1] is None and revisions.used() == {"datasets/acme/rows": OLD}, "what the cache has"
    with revisions.pinned({"datasets/acme/rows": NEW}):
        with pytest.raises(ConfigError, match=f"at commit {OLD}, and this run has {NEW}\n.*--data.revision {OLD}"):
            read_rows()
