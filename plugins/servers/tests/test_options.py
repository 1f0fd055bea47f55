"""create_server_pool: servers that are there, or started here, as one pool; what is refused before that."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import warnings
from dataclasses import asdict
from pathlib import Path

import pytest
import trio
from rollouts_servers import options as serving
from rollouts_servers.dialect import Sampled, ServerInfo
from rollouts_servers.options import (
    EnginePackage,
    ServedRun,
    ServerOptions,
    create_server_pool,
    find_engine,
    gpus_of_each,
    urls_of,
)
from rollouts_servers.process import ServerCommand
from rollouts_servers.sglang import create_sglang_inference
from rollouts_servers.vllm import create_vllm_inference

from rollouts.errors import ConfigError, ModelError
from rollouts.inference.base import GenerateRequest

PACKAGE = EnginePackage("msgspec", "pip install 'msgspec>=0.19'", "0.19")  # what is installed anyway
SERVER = """
import http.server, json, os, sys
port, model, options = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        self.reply({"pid": os.getpid(), "model": model, "options": options,
                    "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"), "key": self.headers.get("authorization")})
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        if self.path == "/die":
            os._exit(1)
        self.reply({"pid": os.getpid()})
    def reply(self, found):
        body = json.dumps(found).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


_find_once = functools.cache(find_engine)


@pytest.fixture(autouse=True)
def engines_are_found_once(monkeypatch):
    """Each search starts an interpreter, which reads the metadata of all that is installed."""
    monkeypatch.setattr(serving, "find_engine", _find_once)


class Toy:
    """A dialect for SERVER. Its reply's id says nothing; an id of 7 in the prompt kills the server."""

    software, scores_adapters_alone = "Toy", False
    adapter_flags = weights_flags = logprobs_flags = "--flag"

    def __init__(self, ids: list[int] | None = None) -> None:
        self.ids, self.seen = ids, list[dict]()

    async def handshake(self, client):
        self.seen.append(await client.get("/ready", dict, timeout_seconds=5))
        return ServerInfo("Toy 1", ("policy",), 100, loads_adapters=True)

    async def generate(self, client, request, work):
        path = "/die" if 7 in request.tokens else "/generate"
        await client.post(path, {"name": work.name}, dict, timeout_seconds=5, attempts_max=1)
        return Sampled([1], [-1.0], "stop")

    async def tokenize(self, client, text):
        await trio.lowlevel.checkpoint()
        return self.ids


def serve(python: str, model: str, port: int, options: ServerOptions, **own: int) -> ServerCommand:
    argv = [python, "-S", "-c", SERVER, str(port), model, json.dumps(asdict(options) | own)]
    return ServerCommand(argv, {}, "/ready")


def create(tmp_path: Path, dialect=None, *, serve=serve, package=PACKAGE, **settings):
    run = ServedRun(settings.pop("model", "tiny"), None, 3, 1.0, str(tmp_path / "run"), 4, settings.pop("lora_rank", 0))
    settings = settings if "url" in settings else {"start_seconds": 20.0, **settings}
    return create_server_pool(dialect or Toy(), serve, package, run, ServerOptions(**settings))


def lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_servers_that_are_started_here(tmp_path):
    toy = Toy()
    pool = create(tmp_path, toy, servers=2, gpus="0,1;2,3", dtype="float32", lora_rank=8, flags=("--more", "1"))
    assert not (tmp_path / "run").exists()  # nothing is started or written before
    assert pool.capabilities.weights_kind == "adapter"
    assert pool.capabilities.weights_folder == str(tmp_path / "run" / "weights")

    async def main():
        await pool.check()
        async with pool:
            assert pool.context_tokens_max == 100 and pool.vocabulary_size == 469
            by_gpus = {seen["gpus"]: seen for seen in toy.seen}
            assert sorted(by_gpus) == ["0,1", "2,3"]
            given = by_gpus["2,3"]["options"]
            assert (given.pop("lora_rank"), given.pop("seed"), given.pop("flags")) == (8, 4, ["--more", "1"])
            options = ServerOptions(**given)
            assert options == ServerOptions(gpus="2,3", dtype="float32", start_seconds=20.0)
            assert options.gpu_count == 2 and ServerOptions().gpu_count == 0
            os.makedirs(tmp_path / "run" / "weights" / "v000001")
            reply = await pool.generate(GenerateRequest([1, 2], 4, (), 0))
            assert reply.tokens == [1]
            await kill_and_ask(pool)
        return [seen["pid"] for seen in toy.seen]

    async def kill_and_ask(pool):
        os.kill(toy.seen[0]["pid"], signal.SIGKILL)
        with trio.fail_after(20):
            for _ in range(8):
                assert (await pool.generate(GenerateRequest([1, 2], 4, (), 0))).tokens == [1]
            while len(pool.members) < 2:  # noqa: ASYNC110 - it is started again in the background
                await trio.sleep(0.05)
        assert sum(each.restarts for each in pool.statistics().servers) == 1

    pids = trio.run(main)
    assert (Path(toy.seen[0]["model"]) / "config.json").is_file()
    assert len(set(pids)) == 3 and not any(map(lives, pids))
    assert os.listdir(tmp_path / "run") == ["servers"]  # no weights are left
    journal = (tmp_path / "run" / "servers" / "pool.log").read_text()
    assert "is down" in journal and "serves again" in journal
    assert sorted(path.name for path in (tmp_path / "run" / "servers").iterdir()) == [
        "msgspec-0.log",
        "msgspec-1.log",
        "pool.log",
    ]


def test_servers_that_are_there(tmp_path, monkeypatch):
    monkeypatch.setenv("TOY_KEY", "hush")
    port = serving_port()
    process = subprocess.Popen(serve(sys.executable, "theirs", port, ServerOptions()).argv)
    toy = Toy()
    try:
        pool = create(tmp_path, toy, url=f"http://127.0.0.1:{port}/", api_key_env="TOY_KEY", served_model="policy")

        async def main():
            with trio.fail_after(20):
                while True:
                    try:
                        await pool.check()
                        break
                    except ConfigError:
                        await trio.sleep(0.1)
            async with pool:
                assert (await pool.generate(GenerateRequest([1, 2], 4, (), 0))).tokens == [1]
            assert toy.seen[0]["model"] == "theirs" and toy.seen[0]["key"] == "Bearer hush"

        trio.run(main)
        assert process.poll() is None  # it is somebody else's
        with pytest.raises(ConfigError, match="another tokenizer than --model"):
            trio.run(create(tmp_path, Toy([1, 2, 3]), url=f"http://127.0.0.1:{port}").check)
        with pytest.raises(ConfigError, match="serves policy, not 'other'"):
            trio.run(create(tmp_path, Toy(), url=f"http://127.0.0.1:{port}", served_model="other").check)
    finally:
        process.kill()
        process.wait(10)
    with pytest.raises(ConfigError, match="cannot be used"):
        trio.run(pool.check)


def test_how_far_servers_may_be_from_the_trainer(tmp_path):
    for settings, expected in (
        ({}, 0.0),
        ({"dtype": "bfloat16"}, 0.05),
        ({"dtype": "bfloat16", "tolerance": 0.2}, 0.2),
        ({"tolerance": 1e-3}, 1e-3),
        ({"url": "http://127.0.0.1:1"}, 0.0),
        ({"url": "http://127.0.0.1:1", "tolerance": 0.2}, 0.2),
    ):
        assert create(tmp_path, Toy(), **settings).capabilities.tolerance == expected


def test_runs_that_share_a_folder_for_weights_have_one_each_in_it_which_goes_with_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mine = tmp_path / "shared" / "mine"
    mine.mkdir(parents=True)
    pools = [create(tmp_path, Toy(), weights_folder="shared") for _ in range(2)]
    folders = [Path(pool.capabilities.weights_folder) for pool in pools]
    assert len(set(folders)) == 2 and all(each.parent == tmp_path / "shared" for each in folders)
    assert all(each.name.startswith("run-") and each.is_absolute() for each in folders)
    for each in folders:
        (each / "v000001").mkdir(parents=True)

    async def main():
        async with pools[0]:
            assert all(each.is_dir() for each in folders)

    trio.run(main)
    assert not folders[0].exists() and folders[1].is_dir() and mine.is_dir()


def test_how_long_weights_may_take(tmp_path):
    for member in create(tmp_path, Toy(), load_seconds=7.0, servers=2).servers:
        assert member.capabilities.load_seconds == 7.0
    for factory in (create_vllm_inference, create_sglang_inference):
        options = ServerOptions(url="http://127.0.0.1:1", load_seconds=9.0)
        pool = factory("tiny", None, 0, 1.0, str(tmp_path / "run"), 4, 0, options=options)
        assert pool.servers[0].capabilities.load_seconds == 9.0


def serving_port() -> int:
    from rollouts_servers.process import free_port

    return free_port()


def test_a_server_that_ends_at_once_is_named_with_its_log(tmp_path):
    def failing(python, model, port, options, **own):
        return ServerCommand([python, "-S", "-c", "raise RuntimeError('no kernel for this CPU')"], {})

    async def main():
        async with create(tmp_path, serve=failing):
            raise AssertionError("entered")

    with pytest.raises(ConfigError, match="RuntimeError: no kernel for this CPU"):
        trio.run(main)


def test_the_tokenizer_s_probe_is_the_model_s(tmp_path, monkeypatch):
    from rollouts.models.loading import load_tokenizer

    ids = serving._ids_of("tiny", serving.PROBE_TEXT)
    tokenizer = load_tokenizer("tiny")
    assert len(ids) > 20 and tokenizer.decode(ids) == serving.PROBE_TEXT
    assert max(ids) < serving._vocabulary_size("tiny", None) == 469


def test_an_adapter_is_merged_for_the_servers(tmp_path):
    """Once, before they start; and nothing of it is left."""
    import torch
    from peft import LoraConfig, get_peft_model

    from rollouts.models.loading import TINY_PATH, load_hf_model

    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    with warnings.catch_warnings(action="ignore"):  # peft reads what newer transformers have renamed
        model = get_peft_model(load_hf_model("tiny"), config)
    model.peft_config["default"].base_model_name_or_path = str(TINY_PATH)
    model.save_pretrained(tmp_path / "adapter")
    toy, written = Toy(), tmp_path / "run" / "servers" / "model"

    async def main():
        async with create(tmp_path, toy, model=str(tmp_path / "adapter")):
            return load_hf_model(toy.seen[0]["model"]), os.listdir(written)

    merged, files = trio.run(main)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(files)
    assert toy.seen[0]["model"] == str(written) and not written.exists()
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, model(ids).logits, rtol=0, atol=1e-4)
        assert not torch.allclose(merged(ids).logits, load_hf_model(str(TINY_PATH))(ids).logits, atol=1e-2)


# --- what is refused --------------------------------------------------------------------------------------------------


def test_urls():
    assert urls_of("") == urls_of(()) == ()
    assert urls_of(("http://a:1", "https://b/v")) == ("http://a:1", "https://b/v")
    for wrong, words in (
        ("gpu7:8000", "expected one such as http://127.0.0.1:8000"),
        ("http://a:1,http://a:1/", "names http://a:1 twice"),
        ("http://me:secret@a", "contains a user name or a password"),
        ("http://a:port", "cannot be read"),
        ("http://a/v1?key=secret", "is 'http://a/v1'; expected .*, without a query"),
        ("http://a/v1#secret", "is 'http://a/v1'"),
    ):
        with pytest.raises(ConfigError, match=f"--inference.url.*{words}") as caught:
            urls_of(wrong)
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"url": "nowhere"}, "--inference.url"),
        ({"servers": 0}, "--inference.servers 0: expected 1 or more"),
        ({"context_tokens": -1}, "--inference.context-tokens -1"),
        ({"memory_share": 1.5}, "a share of at most 1"),
        ({"start_seconds": 0.0}, "--inference.start-seconds 0"),
        ({"request_seconds": float("nan")}, "--inference.request-seconds nan"),
        ({"url": "http://a", "servers": 2}, "--inference.servers is for servers that the run starts"),
        ({"url": "http://a", "python": "x"}, "--inference.python is for"),
        ({"url": "http://a", "flags": ("--x",)}, "--inference.flags is for"),
        ({"url": "http://a", "dtype": "bfloat16"}, "--inference.dtype is for"),
        ({"url": "http://a", "device": "cpu"}, "--inference.device is for"),
        ({"url": "http://a", "start_seconds": 20.0}, "--inference.start-seconds is for"),
        ({"load_seconds": 0.0}, "--inference.load-seconds 0"),
        ({"gpus": "0,1,2", "servers": 2}, "2 groups of different GPUs"),
        ({"gpus": "0;0", "servers": 2}, "different GPUs"),
        ({"python": "/no/such/venv"}, "there is no such interpreter"),
    ],
)
def test_settings_that_are_refused_before_anything_is_loaded(settings, words):
    ServerOptions()
    with pytest.raises(ConfigError) as caught:
        ServerOptions(**settings)
    assert words in str(caught.value)


def test_gpus():
    assert gpus_of_each(" 3 ", 1) == ["3"]
    assert gpus_of_each("0;1", 2) == ["0", "1"]


def test_an_engine_that_is_not_installed_or_too_old(tmp_path):
    assert find_engine("", PACKAGE) == find_engine(sys.executable, PACKAGE) == sys.executable
    with pytest.raises(ConfigError, match=r"(?s)this environment has no nosuchengine.*\n  pip install nosuchengine$"):
        find_engine("", EnginePackage("nosuchengine", "pip install nosuchengine"))
    with pytest.raises(ConfigError, match=r"99\.1 or newer is needed"):
        find_engine("", PACKAGE._replace(minimum="99.1"))
    shell = tmp_path / "bin" / "python"
    shell.parent.mkdir(exist_ok=True)
    shell.write_text("#!/bin/sh\necho hello\n")
    shell.chmod(0o755)
    with pytest.raises(ConfigError, match="does not run as a Python interpreter"):
        find_engine(str(tmp_path), PACKAGE)


def test_models_that_are_not_there(tmp_path):
    with pytest.raises(ModelError, match="there is no folder"):
        create(tmp_path, model="./nowhere")


# --- in a run ---------------------------------------------------------------------------------------------------------

ENGINE = """
from rollouts.errors import ConfigError
from rollouts.inference.embedded.hf import create_hf_inference
from rollouts_servers.options import ServerOptions

def engine(model, training, seed, temperature, folder, concurrency, lora_rank, *, options=ServerOptions()):
    made = create_hf_inference(model, training, seed)
    async def check():
        raise ConfigError(f"no server is at {options.url}: {temperature} {folder} {concurrency} {lora_rank}")
    made.check, made.capabilities = check, made.capabilities._replace(checks=True)
    return made
"""


def test_a_url_is_checked_when_the_run_is_composed_and_its_server_before_there_is_a_folder(tmp_path, monkeypatch):
    import rollouts
    from rollouts.config.resolving import resolve
    from rollouts.runs.plan import make_plan

    monkeypatch.chdir(tmp_path)
    Path("engine.py").write_text(ENGINE)
    tree = {"env": "calculator", "temperature": 0.7, "lora_rank": 2, "concurrency": 9}
    settings = {"inference": {"name": "./engine.py:engine", "url": "http://gpu7:8000"}}
    make_plan(resolve(tree | settings))
    with pytest.raises(ConfigError, match=r"--inference\.url.*'gpu7:8000'"):
        make_plan(resolve(tree | {"inference": {"name": "./engine.py:engine", "url": "gpu7:8000"}}))
    with pytest.raises(ConfigError, match=r"no server is at http://gpu7:8000: 0\.7 /.*/out 9 2$"):
        rollouts.run(**tree, **settings, out="out", steps=1)
    assert not Path("out").exists()
