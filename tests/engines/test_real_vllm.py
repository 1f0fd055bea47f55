"""A real vLLM server on the CPU against the real trainer: logprobs, reloads, adapters, caches, aborts, refusals.

    ROLLOUTS_ENGINES=FOLDER pytest -m engines tests/engines/test_real_vllm.py

Three servers: about 25 s each until they answer, and a minute for the tests; two minutes in all on two idle cores.
"""

from __future__ import annotations

import functools
import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
from rollouts_servers.checks import ServerSetup
from rollouts_servers.dialect import RequestTarget
from rollouts_servers.http import HTTPFailure
from rollouts_servers.options import ServerOptions
from rollouts_servers.process import ServerCommand
from rollouts_servers.server import Server
from rollouts_servers.vllm import VLLM, serve_vllm

from rollouts.errors import ConfigError, InferenceError
from rollouts.inference.base import GenerateRequest, Generation, WeightUpdate
from rollouts.models.loading import load_tokenizer
from rollouts.training.algorithms.recipes import GRPO
from rollouts.training.backends.optimizer import TorchSettings
from rollouts.training.backends.torch import create_torch_backend
from rollouts.training.batches import Row, TrainBatch
from rollouts.training.weights.sync import WeightSyncManager

pytestmark = pytest.mark.engines

TINY = Path(__file__).parents[2] / "rollouts" / "tiny"
VOCABULARY, STOP, RANK = 469, 2, 4
BOUND = 1e-4  # nats a token, in float32
TEXT = "What is 12 * 34?\n<tool>"


@pytest.fixture(scope="module")
def url(serve, tmp_path_factory):
    """A server that takes adapters and all weights; its model is the trainer's."""
    options = ServerOptions(device="cpu")
    log = tmp_path_factory.mktemp("vllm") / "server.log"
    return serve(lambda python, port: serve_vllm(python, str(TINY), port, options, lora_rank=RANK), log)


@pytest.fixture
def trainers():
    made = []

    def make(lora_rank: int = 0) -> Any:
        algorithms = {"main": GRPO}
        made.append(
            create_torch_backend(
                "tiny", 0, 10, 1e-2, lora_rank, 4096, algorithms, None, settings=TorchSettings(device="cpu")
            )
        )
        return made[-1]

    yield make
    for backend in made:
        backend.close()


def engine_of(url: str, lora_rank: int = 0, **settings: Any) -> Server:
    given = {"vocabulary_size": VOCABULARY, "model": "policy", "lora_rank": lora_rank, **settings}
    return Server(VLLM(), url, ServerSetup(**given))


def prompt(seed: int, length: int = 300) -> list[int]:
    """Longer than two blocks of the server's prefix cache, which are of 128 tokens on a CPU."""
    draw = random.Random(seed)
    return [draw.randrange(3, VOCABULARY) for _ in range(length)]


def row(tokens: list[int], weight: float = 0.0) -> Row:
    zeros = [0.0] * len(tokens)
    weights = [0.0] + [weight] * (len(tokens) - 1)
    return Row(tokens, weights, list(weights), list(weights), zeros, rollout_index=0, group_index=0)


def logprobs_of(backend: Any, tokens: list[int], temperature: float = 1.0) -> list[float]:
    batch = TrainBatch([row(tokens)], denominator=1.0, rewards=[0.0], step=0, temperature=temperature)
    return backend.forward(batch, ("logprobs",)).wait().logprobs[0]


def step(backend: Any) -> None:
    """One optimizer step, as the loop takes it."""
    tokens = prompt(77, 40)
    trained = row(tokens, 1.0)
    trained.rollout_logprobs = logprobs_of(backend, tokens)
    backend.forward_backward(TrainBatch([trained], denominator=39.0, rewards=[1.0], step=0)).wait()
    backend.optim_step().wait()


def shaken(backend: Any, seed: int) -> None:
    """All weights with noise, so that each of them is seen."""
    noise = torch.Generator().manual_seed(seed)
    weights = backend.get_weights("full").wait()
    moved = {name: value + 0.03 * torch.randn(value.shape, generator=noise) for name, value in weights.items()}
    moved["lm_head.weight"] = moved["model.embed_tokens.weight"]  # they are one
    backend.load_weights(moved).wait()


def saved(backend: Any, folder: Path, version: int, kind: Any = "full") -> WeightUpdate:
    backend.save(str(folder)).wait()
    return WeightUpdate(version, kind, str(folder))


def apart(ours: list[float], theirs: list[float]) -> float:
    return max(abs(one - other) for one, other in zip(ours, theirs, strict=True))


async def ask(engine: Server, seed: int = 0, tokens: int = 24, **more: Any) -> Generation:
    return await engine.generate(GenerateRequest(prompt(seed), tokens, (STOP,), seed, **more))


async def far(backend: Any, engine: Server, temperature: float, seeds: int = 6) -> float:
    """How far apart sampled logprobs and the trainer's are, at most; requests are batched, prompts are shared."""
    worst = 0.0

    async def sample(seed: int) -> None:
        nonlocal worst
        request = GenerateRequest(prompt(seed % 2), 24, (STOP,), seed, temperature=temperature)
        found = await engine.generate(request)
        ours = logprobs_of(backend, request.tokens + found.tokens, temperature)[len(request.tokens) :]
        worst = max(worst, apart(ours, found.logprobs))

    async with trio.open_nursery() as nursery:
        for seed in range(seeds):
            nursery.start_soon(sample, seed)
    return worst


def run(test: Any) -> None:
    async def bounded() -> None:
        with trio.fail_after(120):
            await test()

    trio.run(bounded)


async def base_again(url: str) -> None:
    """The weights that every test begins with."""
    async with engine_of(url) as engine:
        await engine.update_weights(WeightUpdate(0, path=str(TINY)))


# --- numerics 17, 18 --------------------------------------------------------------------------------------------------


def test_sampled_logprobs_are_the_trainers_and_all_weights_arrive(url, trainers, tmp_path):
    backend = trainers()

    async def test() -> None:
        await base_again(url)
        text = (TEXT, load_tokenizer("tiny").encode(TEXT, add_special_tokens=False))
        async with engine_of(url, temperature=0.6, tokenizer=text) as engine:
            assert engine.info.software == "vLLM 0.32.0" and engine.context_tokens_max == 2048
            assert (engine.info.logprobs, engine.info.lora_rank_max) == ("processed", 8)
            for version in range(3):
                before = await engine.score(prompt(0))
                if version:
                    shaken(backend, version)
                    update = saved(backend, tmp_path / f"v{version}", version)
                    start = time.perf_counter()
                    await engine.update_weights(update)
                    print(f"full weights: {time.perf_counter() - start:.3f} s")
                after = await engine.score(prompt(0))
                assert apart(after, logprobs_of(backend, prompt(0))) <= BOUND
                assert (apart(after, before) > 0.1) == (version > 0)
                for temperature in (0.6, 1.0):
                    assert await far(backend, engine, temperature) <= BOUND
            # The control: at another temperature they differ.
            found = await ask(engine, temperature=0.6)
            ours = logprobs_of(backend, prompt(0) + found.tokens)[len(prompt(0)) :]
            assert apart(ours, found.logprobs) > 0.01 and set(found.versions) == {2}

    run(test)


@pytest.mark.parametrize("lora_rank", [0, RANK])
def test_after_a_step_the_sync_of_the_loop_passes_and_all_numbers_have_moved(url, trainers, tmp_path, lora_rank):
    backend, plain = trainers(lora_rank), trainers()

    async def test() -> None:
        await base_again(url)
        given = {"temperature": 0.6, "weights_folder": str(tmp_path)}
        async with engine_of(url, lora_rank, **given) as engine:
            manager = WeightSyncManager([engine], temperature=0.6)
            await manager.sync(backend)
            for _ in range(3):
                before = await engine.score(prompt(0))
                step(backend)
                metrics = await manager.sync(backend)
                print({name: f"{value:.3g}" for name, value in metrics.items()})
                after = await engine.score(prompt(0))
                assert apart(after, logprobs_of(backend, prompt(0))) <= BOUND
                assert all(one != other for one, other in zip(before[1:], after[1:], strict=True))
                for temperature in (0.6, 1.0):
                    assert await far(backend, engine, temperature) <= BOUND
            if lora_rank:
                base = await VLLM().score(engine._client, prompt(0), RequestTarget("base"))
                assert apart(base, logprobs_of(plain, prompt(0))) <= BOUND, "the base has not moved"
                plain.load_weights(backend.get_weights("full").wait()).wait()
                assert apart(after, logprobs_of(plain, prompt(0))) <= BOUND, "merged it is the same"
                models = (await engine._control.get("/v1/models", dict, timeout_seconds=30.0))["data"]
                assert len(models) == 3, "the base and the last two adapters"

    run(test)


# --- caches -----------------------------------------------------------------------------------------------------------


def test_no_cache_of_other_weights_is_read(url, trainers, tmp_path):
    """Also where folder and version are those of another run, whose cache the server still has."""
    first, second = trainers(), trainers()
    shaken(first, 1)
    shaken(second, 2)
    updates = [saved(backend, tmp_path / f"full{index}", 1) for index, backend in enumerate((first, second))]

    async def test() -> None:
        for backend, update in ((first, updates[0]), (second, updates[1]), (first, updates[0])):
            async with engine_of(url) as engine:
                await engine.update_weights(update)
                for _ in range(2):  # the second one reads the cache of the first
                    assert await far(backend, engine, 1.0, seeds=2) <= BOUND
        # The control: what a bare reload leaves is stale, and it shows.
        async with engine_of(url) as engine:
            await engine.update_weights(updates[0])
            await ask(engine)
            call = {"method": "rollouts_reload", "kwargs": {"folder": updates[1].path}}
            await engine._control.post("/collective_rpc", call, bytes, timeout_seconds=60)
            assert await far(second, engine, 1.0, seeds=2) > 0.1

    run(test)


def test_an_adapter_in_a_folder_that_another_one_was_in_is_not_taken_for_that(url, trainers, tmp_path):
    async def test() -> None:
        await base_again(url)
        async with engine_of(url, RANK) as engine:
            for version in (1, 2, 3):
                backend = trainers(RANK)
                for _ in range(version):
                    step(backend)
                shutil.rmtree(tmp_path / "same", ignore_errors=True)
                await engine.update_weights(saved(backend, tmp_path / "same", version, "adapter"))
                assert await far(backend, engine, 1.0, seeds=2) <= BOUND

    run(test)


# --- requests under way -----------------------------------------------------------------------------------------------


def test_an_aborted_reply_comes_back_as_far_as_it_came(url, trainers):
    backend = trainers()

    async def test() -> None:
        await base_again(url)
        async with engine_of(url) as engine:
            found = {}

            async def sample(session: str) -> None:
                request = GenerateRequest(prompt(1), 1500, (), 5, session=session)
                found[session] = await engine.generate(request)

            sessions = [engine.open_session((0, index)) for index in range(3)]
            async with trio.open_nursery() as nursery:
                for session in sessions:
                    nursery.start_soon(sample, session)
                await trio.sleep(1.0)
                start = trio.current_time()
                await engine.abort(sessions[0])
                took = trio.current_time() - start
                assert set(found) == {sessions[0]}, "the others go on"
                for session in sessions[1:]:
                    await engine.abort(session)
            print(f"abort: {took:.3f} s, {[len(each.tokens) for each in found.values()]} tokens")
            for reply in found.values():
                assert reply.finish == "abort" and 0 < len(reply.tokens) < 1500
                ours = logprobs_of(backend, prompt(1) + reply.tokens)[len(prompt(1)) :]
                assert apart(ours, reply.logprobs) <= BOUND
            # Its seed gives the same tokens again: nothing of the aborted one is left.
            again = await engine.generate(GenerateRequest(prompt(1), 20, (), 5))
            assert again.tokens == found[sessions[0]].tokens[:20]

    run(test)


def test_a_request_that_is_left_stops_at_the_server(url):
    async def test() -> None:
        async with engine_of(url) as engine:
            with trio.move_on_after(0.5):
                await engine.generate(GenerateRequest(prompt(1), 1500, (), 5))
            for _ in range(100):
                if not await running(engine):
                    return
                await trio.sleep(0.05)
            pytest.fail("it still runs")

    run(test)


async def running(engine: Server) -> float:
    text = (await engine._control.get("/metrics", bytes, timeout_seconds=30.0)).decode()
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith("vllm:num_requests_run"))


def test_a_reply_under_way_goes_on_with_new_weights_and_says_so(url, trainers, tmp_path):
    old, new = trainers(), trainers()
    shaken(new, 1)
    update = saved(new, tmp_path / "new", 7)

    async def test() -> None:
        await base_again(url)
        async with engine_of(url) as engine:
            found = []

            async def sample() -> None:
                found.append(await engine.generate(GenerateRequest(prompt(1), 600, (), 5)))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(sample)
                await trio.sleep(0.7)
                await engine.update_weights(update)
            (reply,) = found
            first, second = reply.spans
            assert (first.version, second.version, second.end) == (0, 7, 600) and 0 < first.end == second.start < 600
            for span, backend in ((first, old), (second, new)):
                ours = logprobs_of(backend, prompt(1) + reply.tokens)[len(prompt(1)) :]
                part = slice(span.start, span.end)
                assert apart(ours[part], reply.logprobs[part]) <= BOUND

    run(test)


def test_replies_under_way_keep_their_adapter_also_beside_new_ones(url, trainers, tmp_path):
    """Loaded again under one name, the new one would take over as soon as another request of that name joins."""
    old, new = trainers(RANK), trainers(RANK)
    step(old)
    for _ in range(3):
        step(new)
    updates = [
        saved(each, tmp_path / name, version, "adapter") for each, name, version in ((old, "a", 1), (new, "b", 2))
    ]

    async def test() -> None:
        await base_again(url)
        async with engine_of(url, RANK) as engine:
            found = {}

            async def sample(name: str) -> None:
                found[name] = await engine.generate(GenerateRequest(prompt(1), 300, (), 5))

            await engine.update_weights(updates[0])
            async with trio.open_nursery() as nursery:
                nursery.start_soon(sample, "old")
                await trio.sleep(0.7)
                await engine.update_weights(updates[1])
                nursery.start_soon(sample, "new")
                assert not found, "the first is still under way"
            for name, backend, version in (("old", old, 1), ("new", new, 2)):
                assert set(found[name].versions) == {version}
                ours = logprobs_of(backend, prompt(1) + found[name].tokens)[len(prompt(1)) :]
                assert apart(ours, found[name].logprobs) <= BOUND
            assert apart(logprobs_of(old, prompt(1)), logprobs_of(new, prompt(1))) > 0.01

    run(test)


# --- what is refused --------------------------------------------------------------------------------------------------


def test_what_it_refuses_harms_nobody_else(url, trainers, tmp_path):
    async def test() -> None:
        await base_again(url)
        with pytest.raises(ConfigError, match=r"serves policy, not 'other'; give --inference.served-model policy"):
            await engine_of(url, model="other").check()
        with pytest.raises(ConfigError, match="up to rank 8, but this run's adapter has rank 16"):
            await engine_of(url, 16).check()
        with pytest.raises(ConfigError, match="another tokenizer than --model"):
            await engine_of(url, tokenizer=(TEXT, [1, 2, 3])).check()
        with pytest.raises(ConfigError, match=r"not like vLLM .* without /v1"):
            await engine_of(f"{url}/v1").check()
        async with engine_of(url) as engine:
            for tokens, words in (([469], "outside the vocabulary"), (prompt(0, 2040), "do not fit into the 2048")):
                with pytest.raises(InferenceError, match=words):
                    await engine.generate(GenerateRequest(tokens, 24, (), 0))
            engine.vocabulary_size, engine.context_tokens_max = 10_000, 10_000  # the server's own words then
            for tokens, words in (
                ([469], "out of vocabulary"),
                (prompt(0, 2050), "longer than the maximum model length"),
            ):
                with pytest.raises(HTTPFailure, match=words) as raised:
                    await engine.generate(GenerateRequest(tokens, 24, (), 0))
                assert not raised.value.retryable
            with pytest.raises(InferenceError, match="temperature 1 only"):
                await engine.score(prompt(0), 0.6)
            assert (await engine.health()).ok

    run(test)


@pytest.mark.parametrize("lora_rank", [0, RANK])
def test_a_load_that_failed_is_told_and_a_good_one_mends_it(url, trainers, tmp_path, lora_rank):
    good, other = trainers(lora_rank), trainers(16)
    kind: Any = "adapter" if lora_rank else "full"
    bad = saved(other, tmp_path / "bad", 1, kind)  # an adapter, of a rank that is too large

    async def test() -> None:
        await base_again(url)
        async with engine_of(url, lora_rank) as engine, trio.open_nursery() as nursery:
            ended = []

            async def under_way() -> None:
                with pytest.raises(InferenceError, match="did not load version 1"):
                    await engine.generate(GenerateRequest(prompt(1), 1500, (), 5))
                ended.append(True)

            nursery.start_soon(under_way)
            await trio.sleep(0.3)
            words = "greater than max_lora_rank" if lora_rank else "the server stays paused until a load succeeds"
            with pytest.raises(InferenceError, match=words):
                await engine.update_weights(bad)
            with pytest.raises(InferenceError, match=words):
                await ask(engine)
            assert not (await engine.health()).ok
            if not lora_rank:
                with pytest.raises(ConfigError, match="is paused"):
                    await engine.check()
            if lora_rank:
                step(good)
            else:
                shaken(good, 3)
            await engine.update_weights(saved(good, tmp_path / "good", 2, kind))
            assert await far(good, engine, 1.0, seeds=2) <= BOUND and (await engine.health()).ok
            assert ended

    run(test)


def test_a_server_without_what_is_needed_is_told_which_flag(serve, tmp_path):
    """Started as vLLM's own documentation does it, with a key."""

    def bare(python: str, port: int, *flags: str, **env: str) -> ServerCommand:
        argv = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(TINY), "--host", "127.0.0.1"]
        argv += ["--port", str(port), "--served-model-name", "policy", "--dtype", "float32", "--enforce-eager", *flags]
        offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
        return ServerCommand(argv, {**offline, "VLLM_API_KEY": "hush-hush", **env})

    url = serve(functools.partial(bare), tmp_path / "bare.log")

    async def test() -> None:
        for key, words in (("", "requires an API key, but none is set"), ("wrong-one", "refuses the API key")):
            with pytest.raises(ConfigError, match=words) as raised:
                await engine_of(url, api_key=key).check()
            assert "hush" not in str(raised.value) and "wrong" not in str(raised.value)
        with pytest.raises(ConfigError, match="start it with --enable-scale-out"):
            await engine_of(url, api_key="hush-hush").check()

    run(test)


def test_a_server_whose_logprobs_are_of_temperature_1_is_refused_at_another(serve, tmp_path):
    def raw(python: str, port: int) -> ServerCommand:
        command = serve_vllm(python, str(TINY), port, ServerOptions(device="cpu"))
        argv = [each.replace("processed_logprobs", "raw_logprobs") for each in command.argv]
        env = {name: value for name, value in command.env.items() if name != "VLLM_SERVER_DEV_MODE"}
        return ServerCommand(argv, env)

    assert "VLLM_SERVER_DEV_MODE" not in os.environ
    url = serve(raw, tmp_path / "raw.log")

    async def test() -> None:
        with pytest.raises(
            ConfigError, match="start it with --logprobs-mode processed_logprobs, or type --temperature"
        ):
            await engine_of(url, temperature=0.7).check()
        with pytest.raises(ConfigError, match="cannot load new weights: start it with VLLM_SERVER_DEV_MODE=1"):
            await engine_of(url).check()
        with pytest.raises(ConfigError, match=f"does not load adapters: start it with .*--max-lora-rank {RANK}"):
            await engine_of(url, RANK).check()
        async with engine_of(url, takes_weights=False) as engine:  # for evaluation it will do
            assert (await engine.health()).ok and engine.info.logprobs == "raw"

    run(test)
