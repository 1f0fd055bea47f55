"""vLLM's dialect: what is sent and read, against the mock server and a client that only listens."""

from __future__ import annotations

import functools
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
import trio.testing
from rollouts_servers.checks import ServerSetup
from rollouts_servers.dialect import RequestTarget, Sampled, WeightSpan
from rollouts_servers.http import HTTPFailure, Retries
from rollouts_servers.options import ServerOptions
from rollouts_servers.server import Server
from rollouts_servers.vllm import (
    EXTENSION,
    EXTENSION_FOLDER,
    VLLM,
    Choice,
    GenerateReply,
    Logprobs,
    TokenLogprob,
    read_generate_reply,
    serve_vllm,
)

from rollouts.agent.episode import run_episode
from rollouts.agent.model import EpisodeLimits
from rollouts.chat.format import load_chat_format
from rollouts.env import reward, tool
from rollouts.env.mixing import env_term
from rollouts.errors import ConfigError, InferenceError
from rollouts.inference.base import GenerateRequest, WeightUpdate
from rollouts.models.loading import load_tokenizer
from rollouts.training.rollout_gen.pool import Job, run_episodes
from rollouts.types import Status, Task

SERVER = Path(__file__).parents[3] / "tests" / "servers" / "mock_engine.py"
REQUEST = GenerateRequest([5, 6, 7], 50, (2,), seed=2**63 - 1, temperature=0.7, session="0-0-1")


def load_mock() -> Any:
    specification = importlib.util.spec_from_file_location("mock_engine", SERVER)
    module = importlib.util.module_from_spec(specification)
    sys.modules["mock_engine"] = module
    specification.loader.exec_module(module)
    return module


started = load_mock().started


def use(url: str, function: Any, **settings: Any) -> Any:
    async def run() -> Any:
        given = {"vocabulary_size": 469, "takes_weights": False, **settings}
        async with Server(VLLM(), url, ServerSetup(**given)) as engine:
            return await function(engine)

    return trio.run(run)


# --- the whole path, against the mock ---------------------------------------------------------------------------------


class Adding:
    """One tool, one reward."""

    @tool(timeout_seconds=5)
    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    @reward
    def right(self, task: Task, trajectory: Any) -> float:
        return float(str(task.answer) in trajectory.last_text)


def test_the_whole_path_records_what_the_server_sent():
    tokenizer = load_tokenizer("tiny")
    chat = load_chat_format(tokenizer)
    encode = functools.partial(tokenizer.encode, add_special_tokens=False)
    call = encode('<tool_call>\n{"name": "add", "arguments": {"a": 12, "b": 34}}\n</tool_call><|im_end|>')
    answer = encode("The sum is 46.<|im_end|>")

    async def play(job: Job, session: str, inference: Any) -> Any:
        return await run_episode(
            job.task, make_env=Adding, chat=chat, inference=inference, limits=EpisodeLimits(max_tokens=500),
            rewards=[env_term()], session=session, order=job.order, seed=0,
        )  # fmt: skip

    jobs = [Job(Task(f"What is 12 + 34, number {i}?", answer=46), (i // 4, i % 4)) for i in range(24)]
    with started(call=call, answer=answer, delay_seconds=0.002) as server:
        episodes = use(server.url, lambda engine: run_episodes(jobs, play, engine, concurrency=8), connections_max=4)
        found = server.statistics()
    assert (found["requests"], found["answered"], found["in_flight_max"]) == (98, 98, 4)  # two were for the greeting
    for episode in episodes:
        assert (episode.status, episode.score.value, episode.trajectory.turns) == (Status.COMPLETED, 1.0, 4)
        (segment,) = episode.trajectory.segments
        live = [place for place, weight in enumerate(segment.loss_mask) if weight > 0]
        assert [segment.tokens[place] for place in live] == [*call, *call, *call, *answer]
        sent = [-0.5 - place / 64 for said in (call, call, call, answer) for place in range(len(said))]
        assert [segment.logprobs[place] for place in live] == sent
        assert {segment.versions[place] for place in live} == {0}


def test_scores():
    async def run(engine: Server) -> None:
        assert await engine.score([4, 5, 6]) == [0.0, -0.25, -0.25]
        assert await engine.score([4]) == [0.0]
        with pytest.raises(InferenceError, match=r"temperature 1 only, got 0\.7"):
            await engine.score([4, 5], 0.7)
        assert (await engine.health()).ok

    with started(delay_seconds=0) as server:
        use(server.url, run)


def test_a_server_that_goes_away():
    async def run(engine: Server) -> None:
        server.process.kill()
        server.process.wait(10)
        assert not (await engine.health()).ok  # it may have found a connection that was open
        health = await engine.health()
        assert not health.ok and "Connection refused" in health.detail
        with pytest.raises(HTTPFailure, match="Connection refused"):
            await engine.generate(REQUEST)
        with pytest.raises(ConfigError, match=r"cannot be used: .*Connection refused.*check that it runs, and its URL"):
            await engine.check()

    with started(delay_seconds=0) as server:
        use(server.url, run, retries=Retries(attempts_max=1))


def test_the_mock_server_ends_with_its_parent_even_where_that_is_killed():
    code = (
        f"import sys; sys.path.insert(0, {str(SERVER.parent)!r}); import mock_engine, time\n"
        "with mock_engine.started() as server:\n    print(server.process.pid, flush=True)\n    time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        child = int(parent.stdout.readline())
        assert _is_running(child)
        parent.send_signal(signal.SIGKILL)
        parent.wait(10)
        end = time.monotonic() + 60
        while _is_running(child) and time.monotonic() < end:
            time.sleep(0.02)
        assert not _is_running(child)
    finally:
        parent.kill()
        parent.wait(10)
        parent.stdout.close()


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] != "Z"


# --- what is sent and read, by a client that only listens -------------------------------------------------------------


class Listening:
    """In place of an HTTPClient: it notes what is asked, and answers by path (with an exception: raises it)."""

    url = "http://server"

    def __init__(self, answers: Mapping[str, Any] = {}) -> None:
        self.answers = dict(answers)
        self.asked: list[tuple[str, Any]] = []

    async def post(self, path: str, body: Any, reply_type: Any, **_: Any) -> Any:
        await trio.lowlevel.checkpoint()
        self.asked.append((path, msgspec.json.decode(msgspec.json.encode(body))))
        answer = self.answers.get(path, {})
        if isinstance(answer, list):
            answer = answer.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return b"" if reply_type is bytes else msgspec.convert(answer, reply_type)

    async def get(self, path: str, reply_type: Any, **_: Any) -> Any:
        return await self.post(path, None, reply_type)


def status(code: int | None, words: str = "") -> HTTPFailure:
    kind = "garbage" if code is None else "server" if code >= 500 else "client"
    return HTTPFailure(kind, f"status {code}: {words}", retryable=False, status=code)


def token(logprob: float) -> dict[str, Any]:
    content = [{"token_id": 9, "logprob": logprob}]
    return {"choices": [{"token_ids": [9], "finish_reason": "length", "logprobs": {"content": content}}]}


def scored(logprob: float) -> dict[str, Any]:
    return {"choices": [], "prompt_logprobs": [None, {"9": {"logprob": logprob}}]}


def info(mode: str = "processed_logprobs", rank: int = 0, device: str = "cuda", extension: str = "") -> dict[str, Any]:
    config: dict[str, Any] = {"model_config": {"logprobs_mode": mode}, "device_config": {"device": device}}
    config |= {"lora_config": {"max_lora_rank": rank} if rank else None}
    return {"vllm_config": config | {"parallel_config": {"worker_extension_cls": extension}}}


MODELS = {"data": [{"id": "policy", "max_model_len": 512}, {"id": "policy-lora", "parent": "policy"}]}
INFO, GENERATE, LOAD = "/server_info?config_format=json", "/inference/v1/generate", "/v1/load_lora_adapter"
GOOD = {
    "/version": {"version": "0.32.1"},
    "/v1/models": MODELS,
    INFO: info(rank=8),
    "/is_paused": {"is_paused": False},
    GENERATE: [token(-1.0), scored(-2.0)],
    LOAD: status(404, "Loading lora failed: No adapter found for /nonexistent"),
}


def handshake(**answers: Any) -> Any:
    return trio.run(VLLM().handshake, Listening({**GOOD, GENERATE: list(GOOD[GENERATE]), **answers}))


def test_it_says_who_it_is():
    found = handshake()
    assert found == ("vLLM 0.32.1", ("policy",), 512, "processed", True, 8, True)
    assert handshake(**{INFO: status(404)})._replace(loads_weights=True, lora_rank_max=8) == found
    assert not handshake(**{INFO: status(404)}).loads_weights  # without development endpoints
    assert not handshake(**{INFO: info()}).loads_adapters
    assert not handshake(**{INFO: status(404), LOAD: status(404, "Not Found")}).loads_adapters
    assert not handshake(**{INFO: status(404), LOAD: status(500, "LoRA is not enabled.")}).loads_adapters
    assert not handshake(**{INFO: info(device="cpu")}).loads_weights
    assert handshake(**{INFO: info(device="cpu", extension=EXTENSION)}).loads_weights
    assert handshake(**{"/version": {"version": "0.1.dev7+g1234567"}}).software.endswith("g1234567")
    assert handshake(**{"/version": {"version": "0.32.1", "build": None}}) == found  # what is not read may be anything


def test_the_convention_of_its_logprobs_is_measured():
    assert (
        handshake(**{GENERATE: [token(-1.0), scored(-1.0)] * 3 + [token(-1.0), scored(-1.4)]}).logprobs == "processed"
    )
    assert handshake(**{GENERATE: [token(-1.0), scored(-1.01)] * 16}).logprobs == "raw"


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({"/version": {"version": "0.31.2"}}, "is vLLM 0.31.2; 0.32 or later is needed: type pip install 'vllm>=0.32'"),
        ({"/version": status(404, "Not Found")}, "not like vLLM 0.32 or later .*without /v1"),
        ({"/version": status(None, "an answer that is no JSON")}, "answers, but not like vLLM"),
        ({GENERATE: status(403, "Scale-out endpoints are disabled.")}, "start it with --enable-scale-out"),
        ({"/is_paused": {"is_paused": True}}, "is paused, perhaps because a run was killed"),
        ({INFO: info("raw_logits", 8)}, "logits instead of logprobs: start it with --logprobs-mode processed_logprobs"),
        ({GENERATE: [token(3.0), scored(1.0)]}, "logits instead of logprobs"),
    ],
)
def test_what_cannot_be_used_is_refused(answers, words):
    with pytest.raises(ConfigError, match=words):
        handshake(**answers)


def test_what_it_was_started_with_has_types():
    for part in ({"lora_config": "LoRAConfig(...)"}, {"lora_config": {"max_lora_rank": None}}):
        with pytest.raises(msgspec.ValidationError):  # which a client makes an HTTPFailure
            handshake(**{INFO: {"vllm_config": part}})


@pytest.mark.parametrize("path", ["/version", "/v1/models", GENERATE, LOAD])
def test_a_key_that_is_refused_is_left_to_who_knows_about_keys(path):
    with pytest.raises(HTTPFailure) as raised:
        handshake(**{path: status(401, "Unauthorized")})
    assert raised.value.status == 401


def generate(request: GenerateRequest, work: RequestTarget) -> tuple[dict[str, Any], Sampled]:
    client = Listening({GENERATE: token(-1.0)})
    sampled = trio.run(functools.partial(VLLM().generate, client, request, work))
    ((path, body),) = client.asked
    assert path == GENERATE
    return body, sampled


def test_a_request():
    body, sampled = generate(REQUEST, RequestTarget("0-0-1-7", "mine", "salt"))
    sampling = {"max_tokens": 50, "temperature": 0.7, "stop_token_ids": [2], "seed": 2**63 - 1, "logprobs": 0}
    assert body == {
        "request_id": "0-0-1-7", "model": "mine", "token_ids": [5, 6, 7], "cache_salt": "salt",
        "sampling_params": {**sampling, "ignore_eos": True, "detokenize": False},
    }  # fmt: skip
    assert sampled == ([9], [-1.0], "length", ())
    bare, _ = generate(msgspec.structs.replace(REQUEST, stop_ids=()), RequestTarget("0-0-1-7"))
    assert set(bare) == {"request_id", "token_ids", "sampling_params"}  # which the server's base model answers


def test_a_reply_that_goes_on_gets_other_random_numbers():
    seeds = []
    for offset in (0, 1, 2, 0):
        body, _ = generate(msgspec.structs.replace(REQUEST, offset=offset), RequestTarget("a"))
        seeds.append(body["sampling_params"]["seed"])
    assert seeds[0] == seeds[3] == REQUEST.seed and len(set(seeds)) == 3 and all(0 <= seed < 2**63 for seed in seeds)


def choice(ids: list[int], scored: list[int] | None = None, finish: str = "stop", spans: Any = None) -> Choice:
    logprobs = None if scored is None else Logprobs([TokenLogprob(token, -1.0) for token in scored])
    return Choice(ids, finish, logprobs, spans)


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ([], "http://h returned a reply with 0 choices, expected 1"),
        ([choice([1], [1])] * 2, "with 2 choices"),
        ([choice([1, 2])], "2 token ids, and 0 logprobs"),
        ([choice([1, 2], [1, 3])], "that do not match"),
        ([choice([1], [1], "tired")], "ended a reply with 'tired', expected stop, length, abort"),
    ],
)
def test_replies_that_cannot_be_used_are_refused(choices, words):
    with pytest.raises(InferenceError, match=words):
        read_generate_reply(GenerateReply(choices), "http://h")


def test_replies_that_can_be_used():
    assert read_generate_reply(GenerateReply([choice([1, 2], [1, 2], "length")]), "http://h") == (
        [1, 2],
        [-1.0, -1.0],
        "length",
        (),
    )
    assert read_generate_reply(GenerateReply([choice([], None, "abort")]), "http://h") == ([], [], "abort", ())
    spans = [WeightSpan("default", 0, 1), WeightSpan("7", 1, 2)]
    found = read_generate_reply(GenerateReply([choice([1, 2], [1, 2], spans=spans)]), "http://h")
    assert found.spans == (("default", 0, 1), ("7", 1, 2))


def test_a_request_is_aborted_by_the_name_that_the_server_has_for_it():
    client = Listening()
    trio.run(VLLM().abort, client, ["a-1", "b-2"])
    assert client.asked == [
        ("/inference/v1/abort_requests", {"request_ids": ["generate-tokens-a-1", "generate-tokens-b-2"]})
    ]


# --- weights ----------------------------------------------------------------------------------------------------------

RESET = "/reset_prefix_cache?reset_running_requests=true"


def load(client: Listening, update: WeightUpdate, **more: Any) -> Any:
    method = VLLM().load_full if update.kind == "full" else VLLM().load_adapter
    return trio.run(functools.partial(method, client, update, **more))


@pytest.mark.parametrize("extended", [False, True])
def test_full_weights_are_loaded_while_it_pauses_and_no_cache_stays(extended):
    client = Listening({RESET: {"success": True}, INFO: info(extension=EXTENSION if extended else "")})
    load(client, WeightUpdate(7, path="some/folder"))
    folder = str(Path("some/folder").absolute())
    reload = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
    assert client.asked[1:] == [
        ("/pause?mode=keep", {}),
        ("/collective_rpc", {"method": "rollouts_reload", "kwargs": {"folder": folder}} if extended else reload),
        ("/update_weight_version", {"new_version": "7"}),
        (RESET, {}),
        ("/resume", {}),
    ]


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        (
            {"/collective_rpc": status(500, "no such file")},
            "no such file; the server stays paused .* it can read .*some/folder",
        ),
        ({RESET: {"success": False}}, "did not clear its prefix cache"),
        ({RESET: {"success": False}, "/resume": status(500, "and dead")}, "did not clear its prefix cache"),
        ({"/update_weight_version": status(404)}, "404"),
        ({"/pause?mode=keep": status(None, "no whole answer")}, "no whole answer"),
    ],
)
def test_only_a_load_that_failed_leaves_it_paused(answers, words):
    """It has no weights then; whatever else fails, it has some, and the next run must find it in order."""
    client = Listening({RESET: {"success": True}, INFO: info(), **answers})
    with pytest.raises(InferenceError, match=words):
        load(client, WeightUpdate(7, path="some/folder"))
    assert ("/resume" in dict(client.asked)) == ("/collective_rpc" not in answers)


@pytest.mark.parametrize("stuck", [False, True])
def test_a_load_goes_on_when_its_run_ends_but_not_for_ever(stuck):
    class Slow(Listening):
        async def post(self, path: str, *args: Any, **settings: Any) -> Any:
            answer = await super().post(path, *args, **settings)
            if path == "/collective_rpc":
                await trio.sleep(10**6 if stuck else 20)
            return answer

    async def run() -> list[str]:
        client = Slow({RESET: {"success": True}, INFO: info()})
        with trio.move_on_after(1) as scope:
            await VLLM().load_full(client, WeightUpdate(7, path="some/folder"))
        assert scope.cancelled_caught
        assert trio.current_time() - begun == pytest.approx(1 + 60 if stuck else 20, abs=0.5)
        return [path for path, _ in client.asked]

    clock = trio.testing.MockClock(autojump_threshold=0)
    begun = clock.current_time()
    paths = trio.run(run, clock=clock)
    assert paths[-2:] == (["/pause?mode=keep", "/collective_rpc"] if stuck else [RESET, "/resume"])


def test_each_adapter_has_a_name_that_none_had_before():
    client = Listening({"/v1/unload_lora_adapter": [{}, status(404, "cannot be found")]})
    update = WeightUpdate(3, "adapter", "some/folder")
    first, second, third = load(client, update, old=""), load(client, update, old="a"), load(client, update, old="b")
    assert len({first, second, third}) == 3 and all("v3" in name for name in (first, second, third))
    folder = str(Path("some/folder").absolute())
    assert client.asked == [
        (LOAD, {"lora_name": first, "lora_path": folder}),
        ("/v1/unload_lora_adapter", {"lora_name": "a"}),
        (LOAD, {"lora_name": second, "lora_path": folder}),
        ("/v1/unload_lora_adapter", {"lora_name": "b"}),
        (LOAD, {"lora_name": third, "lora_path": folder}),
    ]
    for path in ("/v1/unload_lora_adapter", LOAD):
        with pytest.raises(InferenceError, match="rank 16"):
            load(Listening({path: status(500, "rank 16 is too large")}), update, old="a")


# --- starting one -----------------------------------------------------------------------------------------------------


def values(argv: list[str]) -> dict[str, str]:
    return {flag: argv[place + 1] for place, flag in enumerate(argv[:-1]) if flag.startswith("--")}


def test_the_command_for_a_cpu(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", "mine")
    options = ServerOptions(context_tokens=512, device="cpu", memory_share=0.5, flags=("--foo", "1"))
    command = serve_vllm("python", str(tmp_path), 8123, options, lora_rank=9, seed=3)
    flags = values(command.argv)
    assert command.argv[0] == "python" and command.argv[-2:] == ["--foo", "1"]
    assert (flags["--port"], flags["--host"], flags["--model"]) == ("8123", "127.0.0.1", str(tmp_path))
    assert (flags["--dtype"], flags["--max-model-len"], flags["--max-lora-rank"]) == ("float32", "512", "16")
    assert (flags["--worker-extension-cls"], flags["--logprobs-mode"]) == (EXTENSION, "processed_logprobs")
    wanted = {"--enable-scale-out", "--enforce-eager", "--enable-lora", "--no-enable-chunked-prefill"}
    assert wanted <= set(command.argv) and flags["--max-num-batched-tokens"] == "8192"
    assert "--gpu-memory-utilization" not in command.argv
    assert command.env["PYTHONPATH"] == f"{EXTENSION_FOLDER}{os.pathsep}mine"
    assert command.env["VLLM_SERVER_DEV_MODE"] == "1" and command.env["HF_HUB_OFFLINE"] == "1"
    assert command.env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "True"


def test_prompts_are_read_whole_however_long_the_model_s_context_is(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "max_position_embeddings": 40960}')
    command = serve_vllm("python", str(tmp_path), 8123, ServerOptions(device="cpu"))
    assert values(command.argv)["--max-num-batched-tokens"] == "40960"
    bounded = serve_vllm("python", str(tmp_path), 8123, ServerOptions(context_tokens=9000, device="cpu"))
    assert values(bounded.argv)["--max-num-batched-tokens"] == "9000"


def test_prompts_of_a_model_on_the_hub_are_read_whole_where_its_context_is_known(monkeypatch):
    """Else vLLM would not start: 8192 tokens a step, whole prompts, and a context of 40960 do not go together."""
    transformers = pytest.importorskip("transformers")
    known = transformers.GPT2Config(n_positions=40960)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda name, **_: known)
    monkeypatch.setattr("rollouts.models.loading._check_hub", lambda name: None)
    command = serve_vllm("python", "org/model", 8123, ServerOptions(device="cpu"))
    assert values(command.argv)["--max-num-batched-tokens"] == "40960"
    assert "--no-enable-chunked-prefill" in command.argv

    def unknown(name: str, **_: Any) -> Any:
        raise OSError("there is no network")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", unknown)
    argv = serve_vllm("python", "org/model", 8123, ServerOptions(device="cpu")).argv
    assert "--no-enable-chunked-prefill" not in argv and values(argv)["--max-num-batched-tokens"] == "8192"
    bounded = serve_vllm("python", "org/model", 8123, ServerOptions(context_tokens=512, device="cpu")).argv
    assert "--no-enable-chunked-prefill" in bounded


def test_the_command_for_gpus():
    command = serve_vllm("python", "org/model", 8123, ServerOptions(device="cuda", memory_share=0.5, gpus="0,1"))
    flags = values(command.argv)
    assert (flags["--dtype"], flags["--gpu-memory-utilization"], flags["--tensor-parallel-size"]) == (
        "auto",
        "0.5",
        "2",
    )
    assert not {"--enforce-eager", "--enable-lora", "--max-model-len"} & set(command.argv)
    assert not {"HF_HUB_OFFLINE", "PYTHONPATH", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"} & set(command.env)


def test_the_extension_is_alone_in_its_folder_and_imports_nothing_of_rollouts():
    module, _, name = EXTENSION.partition(".")
    assert [path.name for path in EXTENSION_FOLDER.glob("*.py")] == [f"{module}.py"]
    text = (EXTENSION_FOLDER / f"{module}.py").read_text()
    assert f"class {name}" in text and "import rollouts" not in text and "from rollouts" not in text
