"""The contract fake of vLLM and SGLang, by itself over HTTP: its numbers, its nasty parts, its planted faults."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

SERVERS = Path(__file__).parents[1] / "servers"
sys.path[:0] = [str(SERVERS)]
from fake_core import FAULTS  # noqa: E402
from fake_engines import FakeServer, FakeServers, FakeTrainer, started, write_model  # noqa: E402
from fake_model import Model, read_tensors  # noqa: E402

KINDS = ("vllm", "sglang")
pytestmark = pytest.mark.nightly  # of the fakes alone; what uses them is in the normal run
VOCABULARY = 64
LONG = [(7 * i + 3) % VOCABULARY for i in range(160)]
EXACT = 1e-9


class Said(NamedTuple):
    """One reply, whatever the kind calls its parts."""

    tokens: list[int]
    logprobs: list[float]
    finish: str
    scores: list[float]
    cached: int
    spans: list[dict[str, Any]]


def say(server: FakeServer, kind: str, tokens: list[int], *, score: bool = False, **given: Any) -> Said:
    """Ask for a reply. `most`, `temperature`, `adapter`, `name`, `salt`, and whatever else is a sampling key."""
    most, adapter, name, salt = (given.pop(key, default) for key, default in DEFAULTS.items())
    given = {"ignore_eos": True, **given}
    if kind == "vllm":
        given |= {"max_tokens": most, "logprobs": 0} | ({"prompt_logprobs": 0} if score else {})
        body = {"request_id": name, "model": adapter or "policy", "token_ids": tokens, "sampling_params": given}
        status, reply = server.ask("POST", "/inference/v1/generate", body | ({"cache_salt": salt} if salt else {}))
        assert status == 200, (status, reply)
        (choice,) = reply["choices"]
        content = choice["logprobs"]["content"]
        assert [entry["token_id"] for entry in content] == choice["token_ids"]
        named = zip(tokens[1:], (reply["prompt_logprobs"] or [])[1:], strict=False)
        scores = [0.0, *(entry[str(token)]["logprob"] for token, entry in named)]
        cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
        logprobs = [entry["logprob"] for entry in content]
        return Said(choice["token_ids"], logprobs, choice["finish_reason"], scores, cached, choice["weight_versions"])
    body = {"rid": name, "input_ids": tokens, "sampling_params": {"max_new_tokens": most, **given}}
    body |= {"return_logprob": True, "lora_path": adapter or None, "extra_key": salt or None}
    status, reply = server.ask("POST", "/generate", body | ({"logprob_start_len": 0} if score else {}))
    assert status == 200, (status, reply)
    meta = reply["meta_info"]
    scores = [0.0, *(logprob for logprob, _, _ in meta["input_token_logprobs"][1:])]
    logprobs = [logprob for logprob, _, _ in meta["output_token_logprobs"]]
    finish, spans = meta["finish_reason"]["type"], meta.get("weight_versions", [])
    return Said(reply["output_ids"], logprobs, finish, scores, meta.get("cached_tokens", 0), spans)


DEFAULTS: dict[str, Any] = {"most": 8, "adapter": "", "name": "r", "salt": ""}


def off(model: Model, prompt: list[int], said: Said, temperature: float = 1.0) -> float:
    """How far the reply's logprobs are from what the model gives, at most."""
    return apart(model.score(prompt + said.tokens, temperature)[len(prompt) :], said.logprobs)


def apart(ours: list[float], theirs: list[float]) -> float:
    return float(np.abs(np.array(ours) - np.array(theirs)).max())


def load(server: FakeServer, kind: str, folder: Path, *, flush: bool = True) -> tuple[int, Any]:
    """Load all weights out of a folder."""
    if kind == "sglang":
        body = {"model_path": str(folder), "weight_version": folder.name, "flush_cache": flush}
        return server.ask("POST", "/update_weights_from_disk", body)
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
    answer = server.ask("POST", "/collective_rpc", body)
    if answer[0] == 200 and flush:
        assert server.ask("POST", "/reset_prefix_cache") == (200, {"success": True})
    return answer


def load_adapter(server: FakeServer, kind: str, folder: Path, name: str, **more: Any) -> tuple[int, Any]:
    path = "/v1/load_lora_adapter" if kind == "vllm" else "/load_lora_adapter"
    return server.ask("POST", path, {"lora_name": name, "lora_path": str(folder), **more})


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), vocabulary=VOCABULARY)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def servers() -> Iterator[FakeServers]:
    with FakeServers() as found:
        yield found


@pytest.fixture(scope="module")
def healthy(model_folder: Path) -> Iterator[dict[str, FakeServer]]:
    """One of each kind, for tests that change no weights."""
    with started("vllm", model_folder) as one, started("sglang", model_folder) as other:
        yield {"vllm": one, "sglang": other}


@pytest.fixture
def server(kind: str, servers: FakeServers, model_folder: Path) -> Iterator[FakeServer]:
    """A fresh one."""
    with servers.take(kind, model_folder) as found:
        yield found


@pytest.fixture
def trainer(model_folder: Path) -> FakeTrainer:
    return FakeTrainer(model_folder)


# --- numbers ---------------------------------------------------------------------------------------------------------


def test_every_tensor_and_every_high_bit_shows(trainer: FakeTrainer) -> None:
    whole = trainer.model.score(LONG)
    for name, value in trainer.tensors.items():
        without = {other: each for other, each in trainer.tensors.items() if other != name}
        assert apart(whole, Model.of(without, VOCABULARY).score(LONG)) > 1e-2, name
        for bit in (20, 21, 22, 24, 27, 30, 31):
            flipped = value.copy()
            flipped.reshape(-1).view(np.uint32)[value.size // 2] ^= np.uint32(1 << bit)
            assert apart(whole, Model.of({**trainer.tensors, name: flipped}, VOCABULARY).score(LONG)) > 1e-3, (
                name,
                bit,
            )
    moved = {name: value + 0.0 for name, value in trainer.tensors.items()}
    assert apart(whole, Model.of(moved, VOCABULARY).score(LONG)) == 0.0
    swapped = dict(zip(moved, [moved["model.norm.weight"], *list(moved.values())[1:]], strict=True))
    assert apart(whole, Model.of(swapped, VOCABULARY).score(LONG)) > 1e-2, "a tensor under another's name"


def test_an_adapter_on_the_base_is_the_merged_model(model_folder: Path, tmp_path: Path) -> None:
    trainer = FakeTrainer(model_folder, lora_rank=4)
    assert trainer.model.score(LONG) == FakeTrainer(model_folder).model.score(LONG), "no step was taken"
    trainer.nudge()
    merged = read_tensors(trainer.write(tmp_path))
    assert apart(Model.of(merged, VOCABULARY).score(LONG), trainer.model.score(LONG)) < 1e-5  # float32 in the file


def test_a_healthy_server_says_what_the_trainer_says(
    kind: str, healthy: dict[str, FakeServer], trainer: FakeTrainer
) -> None:
    for temperature in (1.0, 0.7):
        said = say(healthy[kind], kind, LONG, most=20, temperature=temperature, score=True)
        assert len(said.tokens) == 20 and said.finish == "length"
        assert off(trainer.model, LONG, said, temperature) < EXACT
        assert apart(said.scores, trainer.model.score(LONG)) < EXACT, "prompts are scored at temperature 1"
    greedy = [say(healthy[kind], kind, LONG, temperature=0.0) for _ in range(2)]
    assert greedy[0].tokens == greedy[1].tokens and off(trainer.model, LONG, greedy[0]) < EXACT


def test_raw_logprobs_are_of_temperature_1(servers: FakeServers, model_folder: Path, trainer: FakeTrainer) -> None:
    with servers.take("sglang", model_folder, logprobs_mode="raw_logprobs") as server:
        assert off(trainer.model, LONG, say(server, "sglang", LONG, temperature=0.7)) < EXACT
    with servers.take("vllm", model_folder, logprobs_mode="raw_logprobs") as server:
        said = say(server, "vllm", LONG, temperature=0.7)
        assert off(trainer.model, LONG, said) < EXACT < 1e-2 < off(trainer.model, LONG, said, 0.7)
        _, info = server.ask("GET", "/server_info?config_format=json")
        assert info["vllm_config"]["model_config"]["logprobs_mode"] == "raw_logprobs"


def test_seeds_work_with_vllm_alone(healthy: dict[str, FakeServer]) -> None:
    drawn = [say(healthy["vllm"], "vllm", LONG, most=16, seed=seed).tokens for seed in (7, 7, 8)]
    assert drawn[0] == drawn[1] != drawn[2]
    drawn = [say(healthy["sglang"], "sglang", LONG, most=16, sampling_seed=7).tokens for _ in range(2)]
    assert drawn[0] != drawn[1]


def test_stops_keep_their_id(kind: str, healthy: dict[str, FakeServer]) -> None:
    ids = list(range(0, VOCABULARY, 2))
    said = say(healthy[kind], kind, LONG, most=40, stop_token_ids=ids, ignore_eos=False)
    assert said.finish == "stop" and said.tokens[-1] in ids and not set(said.tokens[:-1]) & set(ids)


def test_the_models_own_end_stops_unless_it_is_ignored(kind: str, healthy: dict[str, FakeServer]) -> None:
    for is_ignored in (False, True):
        said = say(healthy[kind], kind, LONG, most=300, ignore_eos=is_ignored, logit_bias={"2": 5.0})
        assert (said.finish == "length") is is_ignored and 2 in said.tokens
        assert is_ignored or said.tokens.index(2) == len(said.tokens) - 1


def test_several_answers(healthy: dict[str, FakeServer]) -> None:
    body = {"token_ids": LONG, "sampling_params": {"max_tokens": 3, "n": 2, "seed": 1}}
    _, reply = healthy["vllm"].ask("POST", "/inference/v1/generate", body)
    assert [choice["index"] for choice in reply["choices"]] == [0, 1]
    sampling = {"max_new_tokens": 3, "n": 2}
    _, reply = healthy["sglang"].ask("POST", "/generate", {"input_ids": LONG, "sampling_params": sampling})
    assert isinstance(reply, list) and len(reply) == 2
    _, reply = healthy["sglang"].ask("POST", "/generate", {"input_ids": [LONG, [1]], "sampling_params": {}})
    assert isinstance(reply, list) and len(reply) == 2


def test_completions_give_ids_too(healthy: dict[str, FakeServer], trainer: FakeTrainer) -> None:
    body = {"model": "policy", "prompt": LONG, "logprobs": 0, "return_token_ids": True, "ignore_eos": True}
    _, reply = healthy["vllm"].ask("POST", "/v1/completions", body)
    (choice,) = reply["choices"]
    assert len(choice["token_ids"]) == 16 and choice["prompt_token_ids"] == LONG
    scores = trainer.model.score(LONG + choice["token_ids"])[len(LONG) :]
    assert apart(scores, choice["logprobs"]["token_logprobs"]) < EXACT


# --- refusals --------------------------------------------------------------------------------------------------------


def test_unknown_sampling_keys(healthy: dict[str, FakeServer]) -> None:
    assert say(healthy["vllm"], "vllm", LONG, max_tokenz=3).finish == "length"
    body = {"input_ids": LONG, "sampling_params": {"max_tokens": 3}}
    status, reply = healthy["sglang"].ask("POST", "/generate", body)
    assert status == 400 and "max_tokens" in reply["error"]["message"]


def test_too_long(kind: str, healthy: dict[str, FakeServer]) -> None:
    with pytest.raises(AssertionError, match=r"400.*maximum context length"):
        say(healthy[kind], kind, LONG, most=400)


def test_an_id_outside_the_vocabulary(server: FakeServer, kind: str) -> None:
    if kind == "vllm":
        with pytest.raises(AssertionError, match=r"400.*Token id 64 is out of vocabulary"):
            say(server, kind, [1, VOCABULARY])
        assert say(server, kind, [1, 2]).tokens, "and it serves on"
    else:
        with pytest.raises(OSError):
            say(server, kind, [1, VOCABULARY])
        assert server.has_died()


def test_keys_are_asked_for(servers: FakeServers, kind: str, model_folder: Path) -> None:
    path = "/inference/v1/generate" if kind == "vllm" else "/generate"
    with servers.take(kind, model_folder, api_key="open sesame") as server:
        for key in ("", "wrong"):
            assert server.ask("POST", path, {}, key) == (401, {"error": "Unauthorized"})
        assert server.ask("GET", "/v1/models", None, "open sesame")[0] == 200
        assert server.ask("GET", "/health")[0] == 200
        # vLLM guards no more than what begins with /v1, /v2, /inference and /cohere.
        assert server.ask("GET", "/server_info")[0] == (200 if kind == "vllm" else 401)


def test_vllm_without_its_flags(servers: FakeServers, model_folder: Path) -> None:
    options = {"scale_out": False, "dev_mode": False, "runtime_lora": False}
    with servers.take("vllm", model_folder, **options) as server:
        status, reply = server.ask("POST", "/inference/v1/generate", {})
        assert status == 403 and "--enable-scale-out" in reply["error"]["message"]
        assert server.ask("POST", "/v1/load_lora_adapter", {})[0] == 404
        assert server.ask("GET", "/server_info")[0] == server.ask("POST", "/pause")[0] == 404
    with servers.take("vllm", model_folder, version="0.29.1") as server:
        assert server.ask("GET", "/version") == (200, {"version": "0.29.1"})
        assert server.ask("POST", "/inference/v1/generate", {})[0] == 404


def test_what_they_say_of_themselves(healthy: dict[str, FakeServer], kind: str, model_folder: Path) -> None:
    _, models = healthy[kind].ask("GET", "/v1/models")
    assert [(each["id"], each["max_model_len"]) for each in models["data"]] == [("policy", 512)]
    _, reply = healthy[kind].ask("POST", "/tokenize", {"model": "policy", "prompt": "ab"})
    assert reply["tokens"] == [97 % VOCABULARY, 98 % VOCABULARY] and reply["max_model_len"] == 512
    if kind == "sglang":
        _, info = healthy[kind].ask("GET", "/server_info")
        assert info["version"] == "0.5.23" and info["max_lora_rank"] == 8 and info["context_length"] == 512
        _, info = healthy[kind].ask("GET", "/model_info")
        assert info["weight_version"] == "default" and info["model_path"] == str(model_folder)
    else:
        _, info = healthy[kind].ask("GET", "/server_info?config_format=json")
        assert info["vllm_config"]["lora_config"]["max_lora_rank"] == 8


# --- weights ---------------------------------------------------------------------------------------------------------


def test_a_reload_arrives_and_a_cache_that_is_not_flushed_is_stale(
    server: FakeServer, kind: str, trainer: FakeTrainer, tmp_path: Path
) -> None:
    say(server, kind, LONG)
    assert say(server, kind, LONG).cached == (144 if kind == "vllm" else 159)
    trainer.nudge()
    assert load(server, kind, trainer.write(tmp_path / "v1"), flush=False)[0] == 200
    said = say(server, kind, LONG, score=True)
    assert apart(said.scores, trainer.model.score(LONG)) < EXACT, "scoring does not read the cache"
    stale = say(server, kind, LONG)
    assert stale.cached and off(trainer.model, LONG, stale) > 1e-3
    salted = say(server, kind, LONG, salt="v1")
    assert not salted.cached and off(trainer.model, LONG, salted) < EXACT
    assert load(server, kind, tmp_path / "v1")[0] == 200
    fresh = say(server, kind, LONG)
    assert not fresh.cached and off(trainer.model, LONG, fresh) < EXACT
    if kind == "sglang":
        assert server.ask("GET", "/model_info")[1]["weight_version"] == "v1"
        assert fresh.spans == [{"version": "v1", "start": 0, "end": 8}]


def test_a_bad_path(server: FakeServer, kind: str, tmp_path: Path) -> None:
    status, _ = load(server, kind, tmp_path / "nothing")
    assert status == (500 if kind == "vllm" else 400)
    assert server.ask("GET", "/health")[0] == 200
    if kind == "sglang":
        assert say(server, kind, LONG).tokens, "it serves on"
    else:
        with pytest.raises(AssertionError, match=r"500.*EngineCore"):
            say(server, kind, LONG)
        assert server.has_died()


def test_a_corrupt_file(server: FakeServer, kind: str, trainer: FakeTrainer, tmp_path: Path) -> None:
    file = trainer.write(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    if kind == "sglang":
        with pytest.raises(OSError):
            load(server, kind, tmp_path)
        assert server.has_died()
    else:
        assert load(server, kind, tmp_path)[0] == 500
        assert server.ask("GET", "/health")[0] == 200


def test_a_file_that_lacks_a_tensor_leaves_the_old_one(
    server: FakeServer, kind: str, trainer: FakeTrainer, tmp_path: Path
) -> None:
    old = dict(trainer.tensors)
    trainer.nudge()
    kept = trainer.tensors.pop("model.norm.weight")
    assert load(server, kind, trainer.write(tmp_path))[0] == 200
    trainer.tensors["model.norm.weight"] = old["model.norm.weight"]
    assert apart(say(server, kind, LONG, score=True).scores, trainer.model.score(LONG)) < EXACT
    trainer.tensors["model.norm.weight"] = kept
    assert apart(say(server, kind, LONG, score=True).scores, trainer.model.score(LONG)) > 1e-3


def test_vllms_own_transfer(servers: FakeServers, model_folder: Path, trainer: FakeTrainer, tmp_path: Path) -> None:
    trainer.nudge()
    folder = str(trainer.write(tmp_path / "v1"))
    with servers.take("vllm", model_folder, weight_transfer=True) as server:
        ask = server.ask
        assert ask("POST", "/pause?mode=keep")[0] == ask("POST", "/start_weight_update", {})[0] == 200
        assert ask("POST", "/update_weights", {"update_info": {"path": str(tmp_path / "no")}})[0] == 500
        assert ask("POST", "/update_weights", {"update_info": {"path": folder}})[0] == 200
        assert ask("POST", "/finish_weight_update", {"weight_version": "7"})[0] == 200
        assert ask("POST", "/reset_prefix_cache")[0] == ask("POST", "/resume")[0] == 200
        said = say(server, "vllm", LONG)
        assert off(trainer.model, LONG, said) < EXACT and said.spans[0]["version"] == "7"
        assert ask("GET", "/weight_info") == (200, {"weight_version": "7"})
    with servers.take("vllm", model_folder) as server:
        assert server.ask("POST", "/start_weight_update", {})[0] == 500


# --- adapters --------------------------------------------------------------------------------------------------------


def test_an_adapter_is_loaded_named_and_replaced(
    kind: str, server: FakeServer, model_folder: Path, tmp_path: Path
) -> None:
    trainer = FakeTrainer(model_folder, lora_rank=4)
    base = trainer.model
    trainer.nudge()
    folder = trainer.write(tmp_path / "v1", "adapter")
    assert load_adapter(server, kind, folder, "one")[0] == 200
    assert off(trainer.model, LONG, say(server, kind, LONG, adapter="one")) < EXACT
    assert off(base, LONG, say(server, kind, LONG)) < EXACT, "the base is as it was"
    status, reply = load_adapter(server, kind, folder, "one")
    assert status == 400 and "already" in json.dumps(reply)
    trainer.nudge()
    if kind == "vllm":
        trainer.write(folder, "adapter")
        assert load_adapter(server, kind, folder, "one", load_inplace=True)[0] == 200
        assert off(trainer.model, LONG, say(server, kind, LONG, adapter="one")) > 1e-3, "its path is the same"
        other = trainer.write(tmp_path / "v2", "adapter")
        assert load_adapter(server, kind, other, "one", load_inplace=True)[0] == 200
    else:
        assert server.ask("POST", "/unload_lora_adapter", {"lora_name": "one"})[0] == 200
        assert load_adapter(server, kind, trainer.write(folder, "adapter"), "one")[0] == 200
    assert off(trainer.model, LONG, say(server, kind, LONG, adapter="one")) < EXACT


def test_adapters_that_are_refused(
    servers: FakeServers, kind: str, server: FakeServer, model_folder: Path, tmp_path: Path
) -> None:
    missing, wide, unknown = (404, 500, 404) if kind == "vllm" else (400, 400, 400)
    assert load_adapter(server, kind, tmp_path / "nothing", "one")[0] == missing
    folder = FakeTrainer(model_folder, lora_rank=16).write(tmp_path / "wide", "adapter")
    status, reply = load_adapter(server, kind, folder, "one")
    assert status == wide and ("max_lora_rank 8" if kind == "vllm" else "--max-lora-rank") in json.dumps(reply)
    with pytest.raises(AssertionError, match=f"{unknown}.*one"):
        say(server, kind, LONG, adapter="one")
    assert say(server, kind, LONG).tokens, "both are harmless"
    with servers.take(kind, model_folder, lora_rank=0) as plain:
        narrow = FakeTrainer(model_folder, lora_rank=2).write(tmp_path / "narrow", "adapter")
        assert load_adapter(plain, kind, narrow, "one")[0] >= 400


def test_sglang_evicts_without_a_word_and_takes_up_again(
    servers: FakeServers, model_folder: Path, tmp_path: Path
) -> None:
    trainer = FakeTrainer(model_folder, lora_rank=2)
    with servers.take("sglang", model_folder, loaded_loras=2) as server:
        models = []
        for version in range(3):
            trainer.nudge()
            models.append(trainer.model)
            folder = trainer.write(tmp_path / f"v{version}", "adapter")
            assert load_adapter(server, "sglang", folder, f"v{version}")[0] == 200
        assert server.statistics()["adapters"] == ["v1", "v2"]
        assert off(models[0], LONG, say(server, "sglang", LONG, adapter="v0")) < EXACT
        for file in (tmp_path / "v1").iterdir():
            file.unlink()
        with pytest.raises(AssertionError, match=r"400.*implicitly load"):
            say(server, "sglang", LONG, adapter="v1")


# --- pausing, aborting, dying ----------------------------------------------------------------------------------------


@pytest.fixture
def slow(kind: str, servers: FakeServers, model_folder: Path) -> Iterator[FakeServer]:
    """200 tokens a second."""
    with servers.take(kind, model_folder, token_seconds=0.005) as found:
        yield found


def in_thread(call: Callable[[], Any]) -> Callable[[], Any]:
    """Begin a call; the result of its function waits for it."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except (AssertionError, OSError) as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def wait() -> Any:
        thread.join(10)
        return found[0]

    return wait


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.005)


def begun(server: FakeServer, kind: str, name: str = "r", **more: Any) -> Callable[[], Any]:
    """A long reply that has begun."""
    before = server.statistics()["tokens"]
    wait = in_thread(lambda: say(server, kind, LONG, most=300, name=name, **more))
    until(lambda: server.statistics()["tokens"] >= before + 3)
    return wait


def test_aborts_give_back_what_there_is(kind: str, slow: FakeServer, trainer: FakeTrainer) -> None:
    wait = begun(slow, kind, "7-1")
    if kind == "vllm":
        assert slow.ask("POST", "/abort_requests", {"request_ids": ["7-1"]})[0] == 200
        assert slow.statistics()["running"] == ["generate-tokens-7-1"], "its name has a prefix"
        slow.ask("POST", "/abort_requests", {"request_ids": ["generate-tokens-7-1"]})
    else:
        other = begun(slow, kind, "7-12")
        slow.ask("POST", "/abort_request", {"rid": "7-1"})
        assert other().finish == "abort", "whose name begins so is aborted too"
    said = wait()
    assert said.finish == "abort" and 3 <= len(said.tokens) < 300
    assert off(trainer.model, LONG, said) < EXACT
    if kind == "vllm":  # which takes two of a name, and tells them apart for nobody
        first, second = begun(slow, kind, "7-1"), begun(slow, kind, "7-1")
        slow.ask("POST", "/abort_requests", {"request_ids": ["generate-tokens-7-1"]})
        assert (first().finish, second().finish) == ("abort", "abort")
    wait = begun(slow, kind)
    slow.ask("POST", "/abort_requests", {}) if kind == "vllm" else slow.ask(
        "POST", "/abort_request", {"abort_all": True}
    )
    assert wait().finish == "abort"


def test_who_comes_to_a_paused_server_waits(kind: str, slow: FakeServer) -> None:
    paths = ("/pause?mode=abort", "/resume") if kind == "vllm" else ("/pause_generation", "/continue_generation")
    wait = begun(slow, kind)
    assert slow.ask("POST", paths[0], {})[0] == 200
    assert wait().finish == "abort"
    late, kept = (in_thread(lambda name=name: say(slow, kind, LONG, name=name)) for name in ("late", "kept"))
    until(lambda: len(slow.statistics()["running"]) == 2)
    if kind == "vllm":
        slow.ask("POST", "/abort_requests", {"request_ids": ["generate-tokens-late"]})
        assert late().tokens == [] and late().finish == "abort"
    else:
        slow.ask("POST", "/abort_request", {"rid": "late"})  # passed over
    assert slow.ask("POST", paths[1], {})[0] == 200
    assert kept().finish == "length" and late().finish == ("abort" if kind == "vllm" else "length")


@pytest.mark.parametrize("mode", ["keep", "retract", "in_place"])
def test_replies_that_are_paused_go_on_with_new_weights(
    servers: FakeServers, mode: str, model_folder: Path, trainer: FakeTrainer, tmp_path: Path
) -> None:
    kind = "vllm" if mode == "keep" else "sglang"
    old, trainer_folder = trainer.model, tmp_path / "v1"
    trainer.nudge()
    trainer.write(trainer_folder)
    with servers.take(kind, model_folder, token_seconds=0.005) as server:
        wait = begun(server, kind)
        if kind == "vllm":
            assert server.ask("POST", "/pause?mode=keep")[0] == 200
            assert load(server, kind, trainer_folder)[0] == 200
            server.ask("POST", "/update_weight_version", {"new_version": "v1"})
            server.ask("POST", "/resume")
        else:
            server.ask("POST", "/pause_generation", {"mode": mode})
            status, reply = load(server, kind, trainer_folder)
            assert (status == 400) is (mode == "in_place"), reply  # it cannot be flushed while requests are in place
            server.ask("POST", "/update_weight_version", {"new_version": "v1"})
            server.ask("POST", "/continue_generation", {})
        time.sleep(0.05)
        body: dict[str, Any] = {"request_ids": ["generate-tokens-r"]} if kind == "vllm" else {"rid": "r"}
        server.ask("POST", "/abort_requests" if kind == "vllm" else "/abort_request", body)
        said = wait()
    first, second = said.spans
    assert (first["version"], second["version"], second["end"]) == ("default", "v1", len(said.tokens))
    begin = first["end"]
    early, late = said.logprobs[:begin], said.logprobs[begin:]
    scores = trainer.model.score(LONG + said.tokens)[len(LONG) + begin :]
    assert apart(old.score(LONG + said.tokens)[len(LONG) : len(LONG) + begin], early) < EXACT
    assert (apart(scores, late) < EXACT) is (mode != "in_place"), "its keys and values are of the old weights"


def test_vllms_cache_is_not_reset_while_requests_run(servers: FakeServers, model_folder: Path) -> None:
    with servers.take("vllm", model_folder, token_seconds=0.005) as server:
        begun(server, "vllm")
        assert server.ask("POST", "/reset_prefix_cache") == (200, {"success": False})
        server.ask("POST", "/abort_requests", {})
        until(lambda: not server.statistics()["running"])
        assert server.ask("POST", "/reset_prefix_cache") == (200, {"success": True})
    with servers.take("sglang", model_folder, token_seconds=0.005) as server:
        begun(server, "sglang")
        assert server.ask("POST", "/flush_cache")[0] == 400


def test_a_client_that_leaves_is_not_worked_for(kind: str, slow: FakeServer) -> None:
    code = f"""
import sys; sys.path[:0] = [{str(SERVERS)!r}, {str(Path(__file__).parent)!r}]
import test_fake_engines as t
t.say(t.FakeServer({slow.url!r}, None), {kind!r}, t.LONG, most=300)
"""
    client = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    until(lambda: slow.statistics()["tokens"] >= 3)
    client.kill()
    client.wait(10)
    until(lambda: not slow.statistics()["running"])


# --- planted faults --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault", ["drop_tensor", "drop_tensor=model.norm.weight", "flip_bit", "old_version", "other_model"]
)
def test_weights_that_do_not_arrive(
    fault: str, kind: str, server: FakeServer, trainer: FakeTrainer, tmp_path: Path
) -> None:
    server.plant(fault)
    trainer.nudge()
    assert load(server, kind, trainer.write(tmp_path / "v1"))[0] == 200, "it says that all is well"
    assert apart(say(server, kind, LONG, score=True).scores, trainer.model.score(LONG)) > 1e-3
    planted = server.statistics()["planted"]
    name = fault.partition("=")[2]
    assert fault == "other_model" or (planted and fault.partition("=")[0] in planted[0] and name in planted[0])
    server.plant()
    assert load(server, kind, tmp_path / "v1")[0] == 200
    assert apart(say(server, kind, LONG, score=True).scores, trainer.model.score(LONG)) < EXACT, "healed"


@pytest.mark.parametrize("fault", ["drop_tensor", "flip_bit", "old_version", "adapter_not_loaded", "other_model"])
def test_adapters_that_do_not_arrive(
    fault: str, kind: str, server: FakeServer, model_folder: Path, tmp_path: Path
) -> None:
    trainer = FakeTrainer(model_folder, lora_rank=4)
    trainer.nudge()
    assert load_adapter(server, kind, trainer.write(tmp_path / "v1", "adapter"), "v1")[0] == 200
    server.plant(fault)
    trainer.nudge()
    assert load_adapter(server, kind, trainer.write(tmp_path / "v2", "adapter"), "v2")[0] == 200
    assert off(trainer.model, LONG, say(server, kind, LONG, adapter="v2")) > 1e-3


def test_a_cache_that_is_never_flushed(kind: str, server: FakeServer, trainer: FakeTrainer, tmp_path: Path) -> None:
    server.plant("no_flush")
    say(server, kind, LONG, salt="v0")
    trainer.nudge()
    assert load(server, kind, trainer.write(tmp_path / "v1"))[0] == 200
    said = say(server, kind, LONG, salt="v1")
    assert said.cached and off(trainer.model, LONG, said) > 1e-3


def test_other_tokenizers_and_dying(kind: str, server: FakeServer, trainer: FakeTrainer, tmp_path: Path) -> None:
    before = server.ask("POST", "/tokenize", {"prompt": "ab"})[1]["tokens"]
    server.plant("other_tokenizer")
    assert server.ask("POST", "/tokenize", {"prompt": "ab"})[1]["tokens"] != before
    server.plant("die_after=2")
    assert say(server, kind, LONG).tokens
    with pytest.raises(OSError):
        say(server, kind, LONG)
    assert server.has_died()
    with started(kind, trainer.folder, faults=["die_in_load"]) as other, pytest.raises(OSError):
        load(other, kind, trainer.write(tmp_path))
    assert not other.process.poll() == 0


def test_a_dead_engine_still_says_that_it_is_well(servers: FakeServers, model_folder: Path) -> None:
    with servers.take("vllm", model_folder) as server:
        server.plant("dead_engine")
        wait = in_thread(lambda: say(server, "vllm", LONG))
        assert server.ask("GET", "/health")[0] == 200
        until(lambda: server.statistics()["running"])
        server.plant()
        assert wait().tokens


def test_unknown_faults_are_refused(healthy: dict[str, FakeServer]) -> None:
    with pytest.raises(AssertionError, match="die_in_load"):
        healthy["vllm"].plant("die_in_bed")
    words = (SERVERS / "fake_engines.py").read_text()
    assert all(fault in words for fault in FAULTS), "each is told of"


def test_real_flags_start_it(model_folder: Path, tmp_path: Path) -> None:
    """As a launcher does, which waits for the URL."""
    command = [sys.executable, str(SERVERS / "fake_engines.py"), "--kind", "vllm", "--model", str(model_folder)]
    command += ["--port", "0", "--dtype", "float32", "--enable-lora", "--max-lora-rank", "4"]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        server = FakeServer(f"http://127.0.0.1:{process.stdout.readline().strip()}", process)
        status, reply = server.ask("POST", "/inference/v1/generate", {})
        assert status == 403 and "--enable-scale-out" in reply["error"]["message"]
    finally:
        process.kill()
        process.wait(10)
        assert process.stdout is not None
        process.stdout.close()
