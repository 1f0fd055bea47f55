"""A real SGLang server on the CPU against the real trainer: logprobs, reloads, adapters, aborts, torch.distributed.

    ROLLOUTS_ENGINES=FOLDER pytest -m engines tests/engines/test_real_sglang.py

Two servers: about 25 s each until they answer, and half a minute for the tests.
"""

from __future__ import annotations

import random
import socket
import subprocess
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed
import trio
from rollouts_servers.checks import ServerSetup
from rollouts_servers.dialect import GroupPlace, RequestTarget
from rollouts_servers.http import HTTPClient
from rollouts_servers.options import ServerOptions
from rollouts_servers.process import ServerCommand
from rollouts_servers.server import Server
from rollouts_servers.sglang import SGLang, group_ranks, join_group, leave_group, receive, serve_sglang

from rollouts.errors import ConfigError, InferenceError
from rollouts.inference.base import GenerateRequest, WeightUpdate
from rollouts.models.folders import read_tensors
from rollouts.training.algorithms.recipes import GRPO
from rollouts.training.backends.optimizer import TorchSettings
from rollouts.training.backends.torch import create_torch_backend
from rollouts.training.batches import Row, TrainBatch
from rollouts.training.weights.files import manifest_of
from rollouts.training.weights.sync import WeightSyncManager

pytestmark = pytest.mark.engines

TINY = Path(__file__).parents[2] / "rollouts" / "tiny"
VOCABULARY, STOP, CONTEXT = 469, 2, 1024
BOUND = 1e-4  # nats a token, in float32
RANK = 4


def served(serve, log: Path, *extra: str, lora_rank: int = RANK, **env: str) -> str:
    """The URL of a server with these flags and this environment, which ends with the module."""
    options = ServerOptions(context_tokens=CONTEXT, device="cpu", flags=extra)

    def command(python: str, port: int) -> ServerCommand:
        made = serve_sglang(python, str(TINY), port, options, lora_rank=lora_rank)
        return made._replace(env={**made.env, **env})

    return serve(command, log)


@pytest.fixture(scope="module")
def url(serve, tmp_path_factory):
    return served(serve, tmp_path_factory.mktemp("sglang") / "server.log")


@pytest.fixture
def engine_of(url):
    def make(lora_rank=0, **settings):
        given = {"vocabulary_size": VOCABULARY, "model": "policy", "lora_rank": lora_rank}
        return Server(SGLang(), url, ServerSetup(**given, **settings))

    return make


@pytest.fixture
def trainer_of():
    """A trainer of the served model; `moved(n)` gives each of its weights noise of its own."""
    made = []

    def make(lora_rank=0):
        given = ("tiny", 0, 10, 1e-3, lora_rank, 4096, {"main": GRPO}, None)
        made.append(create_torch_backend(*given, settings=TorchSettings(device="cpu")))
        return made[-1]

    yield make
    for backend in made:
        backend.close()


def move(backend, seed: int, kind: str = "full") -> None:
    noise = torch.Generator().manual_seed(seed)
    weights = backend.get_weights(kind).wait()
    moved = {name: value + 0.03 * torch.randn(value.shape, generator=noise) for name, value in weights.items()}
    if kind == "full":
        moved["lm_head.weight"] = moved["model.embed_tokens.weight"]  # they are one
    backend.load_weights(moved).wait()


def update_of(backend, folder: Path, version: int, kind: str = "full") -> WeightUpdate:
    """The trainer's weights in a folder, as it writes a checkpoint."""
    backend.save(str(folder)).wait()
    return WeightUpdate(version, kind, path=str(folder))


def logprobs_of(backend, tokens: list[int], temperature: float = 1.0) -> list[float]:
    zeros = [0.0] * len(tokens)
    row = Row(tokens, list(zeros), list(zeros), list(zeros), list(zeros), rollout_index=0, group_index=0)
    batch = TrainBatch([row], denominator=1.0, rewards=[0.0], step=0, temperature=temperature)
    return backend.forward(batch, ("logprobs",)).wait().logprobs[0]


def prompt(seed: int, length: int = 170) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, VOCABULARY) for _ in range(length)]


def apart(ours, theirs) -> float:
    return max(abs(one - other) for one, other in zip(ours, theirs, strict=True))


def serves(engine, version: int) -> None:
    """It was given this version past the engine."""
    engine.version = version
    engine._versions.append(version)


async def samples(engine, temperature: float, count: int = 4, prompts: int = 2, tokens: int = 24):
    """Pairs (prompt, generation), all sampled at once; prompts are shared, so that caches are read."""
    found = []

    async def sample(tokens_in, seed):
        request = GenerateRequest(tokens_in, tokens, (STOP,), seed, temperature=temperature)
        found.append((tokens_in, await engine.generate(request)))

    async with trio.open_nursery() as nursery:
        for index in range(count * prompts):
            nursery.start_soon(sample, prompt(index % prompts), index)
    return found


async def far(backend, engine, temperature: float) -> float:
    """How far apart sampled logprobs and the trainer's are, at most."""
    worst = 0.0
    for tokens, generation in await samples(engine, temperature):
        ours = logprobs_of(backend, tokens + generation.tokens, temperature)[len(tokens) :]
        worst = max(worst, apart(ours, generation.logprobs))
    return worst


# --- numerics 17, 18 --------------------------------------------------------------------------------------------------


def test_sampled_logprobs_are_the_trainers_after_each_full_reload(engine_of, trainer_of, tmp_path):
    backend = trainer_of()

    async def main():
        async with engine_of(temperature=0.7) as engine:
            before = await engine.score(prompt(0))
            for version in (1, 2):
                move(backend, version)
                update = update_of(backend, tmp_path / f"v{version}", version)
                start = time.perf_counter()
                await engine.update_weights(update)
                print(f"full reload {version}: {time.perf_counter() - start:.3f} s")
                after = await engine.score(prompt(0))
                assert apart(after, before) > 0.1, "the weights have not moved"
                assert apart(after, logprobs_of(backend, prompt(0))) <= BOUND
                for temperature in (0.6, 0.7, 1.0):
                    assert await far(backend, engine, temperature) <= BOUND, temperature
                before = after
            # The control: at another temperature they are far from each other.
            (tokens, generation), *_ = await samples(engine, 0.7, 1, 1)
            other = logprobs_of(backend, tokens + generation.tokens, 1.0)[len(tokens) :]
            assert apart(other, generation.logprobs) > 0.01
            await engine.update_weights(WeightUpdate(3, path=str(TINY)))

    trio.run(main)


def test_greedy_logprobs_are_of_temperature_1_also_in_a_mixed_batch(engine_of, trainer_of):
    backend = trainer_of()

    async def main():
        async with engine_of() as engine:
            await engine.update_weights(WeightUpdate(1, path=str(TINY)))
            found = {}

            async def sample(name, temperature):
                request = GenerateRequest(prompt(3), 40, (), 1, temperature=temperature)
                found[name, temperature] = await engine.generate(request)

            async with trio.open_nursery() as nursery:
                for name in range(2):
                    for temperature in (0.0, 0.5, 2.0):
                        nursery.start_soon(sample, name, temperature)
            assert found[0, 0.0].tokens == found[1, 0.0].tokens
            for (_, temperature), generation in found.items():
                assert len(generation.tokens) == 40 and generation.finish == "length", "nothing stops it"
                ours = logprobs_of(backend, prompt(3) + generation.tokens, temperature or 1.0)[len(prompt(3)) :]
                assert apart(ours, generation.logprobs) <= BOUND

    trio.run(main)


def test_an_adapter_is_the_trainers_and_leaves_the_base_alone(engine_of, trainer_of, tmp_path):
    backend, plain = trainer_of(lora_rank=RANK), trainer_of()

    async def main():
        async with engine_of(lora_rank=RANK) as engine:
            await engine.dialect.load_full(engine._control, WeightUpdate(0, path=str(TINY)))
            before = await engine.score(prompt(0))
            for version in (1, 2, 3):
                move(backend, version, "adapter")
                update = update_of(backend, tmp_path / f"v{version}", version, "adapter")
                start = time.perf_counter()
                await engine.update_weights(update)
                print(f"adapter {version}: {time.perf_counter() - start:.3f} s")
                after = await engine.score(prompt(0))
                assert apart(after, before) > 0.01
                assert apart(after, logprobs_of(backend, prompt(0))) <= BOUND
                for temperature in (0.6, 1.0):
                    assert await far(backend, engine, temperature) <= BOUND
                before = after
            base = await engine.dialect.score(engine._client, prompt(0), RequestTarget("base"))
            assert apart(base, logprobs_of(plain, prompt(0))) <= BOUND
            # Merged into all the weights, it is the same.
            merged = tmp_path / "merged"
            backend.save(str(tmp_path / "adapter")).wait()
            plain.load_weights(backend.get_weights("full").wait()).wait()
            plain.save(str(merged)).wait()
        async with engine_of() as engine:
            await engine.update_weights(WeightUpdate(4, path=str(merged)))
            assert apart(await engine.score(prompt(0)), before) <= BOUND
            await engine.update_weights(WeightUpdate(5, path=str(TINY)))
            assert len(await models(engine)) <= 3, "the base, and two adapters: older ones are unloaded"

    trio.run(main)


async def models(engine):
    return (await engine._control.get("/v1/models", dict, timeout_seconds=30.0))["data"]


@pytest.mark.parametrize("lora_rank", [0, RANK])
def test_the_sync_of_the_loop_passes_its_own_probe(engine_of, trainer_of, tmp_path, lora_rank):
    backend = trainer_of(lora_rank=lora_rank)

    async def main():
        async with engine_of(lora_rank=lora_rank, temperature=0.7, weights_folder=str(tmp_path)) as engine:
            manager = WeightSyncManager([engine])
            for version in (1, 2):
                move(backend, 10 + version, "adapter" if lora_rank else "full")
                metrics = await manager.sync(backend)
                print(f"sync, rank {lora_rank}: {metrics}")
                assert metrics["sync/probe"] <= BOUND
                assert await far(backend, engine, 0.7) <= BOUND
        async with engine_of() as engine:
            await engine.update_weights(WeightUpdate(3, path=str(TINY)))

    trio.run(main)


# --- requests under way -----------------------------------------------------------------------------------------------


def test_an_aborted_reply_comes_back_as_far_as_it_came(engine_of, trainer_of):
    backend = trainer_of()

    async def main():
        async with engine_of() as engine:
            await engine.update_weights(WeightUpdate(1, path=str(TINY)))
            found = {}

            async def sample(session):
                request = GenerateRequest(prompt(1), 700, (), 5, session=session)
                found[session] = await engine.generate(request)

            sessions = [engine.open_session((0, index)) for index in range(3)]
            async with trio.open_nursery() as nursery:
                for session in sessions:
                    nursery.start_soon(sample, session)
                await trio.sleep(0.5)
                start = trio.current_time()
                await engine.abort(sessions[0])
                took = trio.current_time() - start
                assert set(found) == {sessions[0]}, "the others go on"
                for session in sessions[1:]:
                    await engine.abort(session)
            reply = found[sessions[0]]
            assert took < 2.0 and reply.finish == "abort" and 0 < len(reply.tokens) < 700
            ours = logprobs_of(backend, prompt(1) + reply.tokens)[len(prompt(1)) :]
            assert apart(ours, reply.logprobs) <= BOUND
            await engine.abort(sessions[0])

    trio.run(main)


def test_replies_under_way_outlive_a_reload_and_say_which_weights_gave_which_token(engine_of, trainer_of, tmp_path):
    backend = trainer_of()

    async def main():
        async with engine_of(temperature=0.7) as engine:
            move(backend, 21)
            await engine.update_weights(update_of(backend, tmp_path / "v1", 1))
            found = []

            async def sample():
                found.append(await engine.generate(GenerateRequest(prompt(2), 500, (), 5, temperature=0.7)))

            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(sample)
                await trio.sleep(0.5)
                await engine.update_weights(WeightUpdate(2, path=str(TINY)))
            plain = trainer_of()
            for generation in found:
                first, second = generation.spans
                assert (first.version, second.version) == (1, 2) and second.end == 500
                tokens = prompt(2) + generation.tokens
                old, new = (logprobs_of(each, tokens, 0.7)[len(prompt(2)) :] for each in (backend, plain))
                theirs, border = generation.logprobs, second.start
                assert apart(old[:border], theirs[:border]) <= BOUND
                assert apart(new[border:], theirs[border:]) <= BOUND
                assert apart(old[border:], theirs[border:]) > 0.1

    trio.run(main)


def test_stop_ids_alone_end_a_reply(engine_of):
    async def main():
        async with engine_of() as engine:
            await engine.update_weights(WeightUpdate(1, path=str(TINY)))
            # The model's own end-of-text id comes up within the reply, and does not end it.
            replies = [await engine.generate(GenerateRequest(prompt(4), 60, (468,), seed)) for seed in range(3)]
            assert any(STOP in reply.tokens[:-1] for reply in replies)
            for reply in replies:
                assert (reply.finish == "length" and len(reply.tokens) == 60) or reply.tokens[-1] == 468
            stopped = await engine.generate(GenerateRequest(prompt(4), 120, tuple(range(100)), 1))
            assert stopped.finish == "stop" and stopped.tokens[-1] < 100, "the stop id stays"

    trio.run(main)


# --- caches, and what goes wrong --------------------------------------------------------------------------------------


def test_no_cache_of_old_weights_is_read_even_where_it_was_not_flushed(engine_of, trainer_of, tmp_path):
    backend = trainer_of()

    async def main():
        async with engine_of() as engine:
            await engine.update_weights(WeightUpdate(1, path=str(TINY)))
            await samples(engine, 1.0)  # fills it
            move(backend, 31)
            update = update_of(backend, tmp_path / "v2", 2)
            body = {"model_path": update.path, "weight_version": "2", "flush_cache": False}
            await engine._control.post("/update_weights_from_disk", body, dict, timeout_seconds=60.0)
            # The control: by the old salt, the old cache is read.
            request = GenerateRequest(prompt(0), 24, (), 1)
            work = RequestTarget("stale", "", f"{engine._salt}-1")
            stale = await engine.dialect.generate(engine._client, request, work)
            ours = logprobs_of(backend, prompt(0) + stale.tokens)[len(prompt(0)) :]
            assert apart(ours, stale.logprobs) > 0.1
            serves(engine, 2)
            assert await far(backend, engine, 1.0) <= BOUND
            await engine.update_weights(WeightUpdate(3, path=str(TINY)))

    trio.run(main)


def test_weights_that_the_server_has_lost_are_noticed(engine_of):
    async def main():
        async with engine_of() as engine:
            await engine.update_weights(WeightUpdate(4, path=str(TINY)))
            # As after a start: it goes by another version.
            await engine._control.post("/update_weight_version", {"new_version": "default"}, dict, timeout_seconds=30.0)
            with pytest.raises(InferenceError, match="'default', but it got version 4: was it restarted"):
                await engine.generate(GenerateRequest(prompt(0), 4, (), 1))
            assert not (await engine.health()).ok
            await engine.update_weights(WeightUpdate(5, path=str(TINY)))
            assert (await engine.health()).ok

    trio.run(main)


def test_bad_folders_and_ranks_are_refused_and_it_serves_on(engine_of, url, tmp_path):
    async def main():
        async with engine_of() as engine:
            await engine.update_weights(WeightUpdate(1, path=str(TINY)))
            (tmp_path / "empty").mkdir()
            with pytest.raises(InferenceError, match="still serves the old ones"):
                await engine.dialect.load_full(engine._control, WeightUpdate(2, path=str(tmp_path / "empty")))
            assert (await engine.health()).ok
            with pytest.raises(InferenceError, match=r"did not load the adapter of version 2 .*--max-lora-rank"):
                await engine.dialect.load_adapter(
                    engine._control,
                    WeightUpdate(2, "adapter", path=str(tmp_path / "empty")),
                    old="",
                )
            with pytest.raises(InferenceError, match="temperature 1 only") as caught:
                await engine.score(prompt(0), 0.7)
            assert not caught.value.is_transient
        with pytest.raises(ConfigError, match=r"rank 4 at most.*--max-lora-rank 16"):
            await engine_of(lora_rank=16).check()
        with pytest.raises(ConfigError, match="serves policy, not 'other'"):
            await Server(SGLang(), url, ServerSetup(vocabulary_size=VOCABULARY, model="other")).check()
        with pytest.raises(ConfigError, match="another tokenizer"):
            await engine_of(tokenizer=("What is 3 + 4?", [1, 2, 3])).check()
        await engine_of(tokenizer=("What is 3 + 4?", [434, 21, 301, 22, 33])).check()

    trio.run(main)


def test_the_longest_prompt_that_it_says_is_the_longest_that_it_takes(engine_of):
    async def main():
        async with engine_of() as engine:
            assert engine.context_tokens_max == CONTEXT - 6
            await engine.generate(GenerateRequest(prompt(0, CONTEXT - 7), 1, (), 1))
            engine.context_tokens_max = CONTEXT  # the control: with one token more it refuses
            with pytest.raises(InferenceError, match="exceeds"):
                await engine.generate(GenerateRequest(prompt(0, CONTEXT - 6), 1, (), 1))

    trio.run(main)


# --- torch.distributed ------------------------------------------------------------------------------------------------


class Sender:
    """Rank 0 of a group of one server: its store listens on loopback."""

    def __init__(self, name: str) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.name, self.port = name, listener.getsockname()[1]
        self.store = torch.distributed.TCPStore(
            "127.0.0.1",
            self.port,
            2,
            True,
            timeout=timedelta(seconds=60),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        self.group = None

    def join(self) -> None:
        store = torch.distributed.PrefixStore(self.name, self.store)
        for prefix in (f"{self.name}/", "cpu/"):
            store = torch.distributed.PrefixStore(prefix, store)
        self.group = torch.distributed.ProcessGroupGloo(store, 0, 2, timedelta(seconds=60))

    def send(self, tensors) -> None:
        options = torch.distributed.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        for tensor in tensors:
            self.group.broadcast([tensor.contiguous()], options).wait()


def test_weights_arrive_over_torch_distributed(engine_of, url, trainer_of, tmp_path):
    backend = trainer_of()

    async def main():
        async with engine_of() as engine, HTTPClient(url) as client:
            await engine.update_weights(WeightUpdate(1, path=str(TINY)))
            assert await group_ranks(client) == 1
            for attempt in range(2):  # a name can be used again
                sender = Sender("rollouts-test")
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(trio.to_thread.run_sync, sender.join)
                    await join_group(client, GroupPlace("127.0.0.1", sender.port, 2, sender.name, "gloo"))
                for version in (2, 3):
                    move(backend, 40 + 2 * attempt + version)
                    backend.save(str(tmp_path / f"{attempt}-{version}")).wait()
                    tensors = read_tensors(tmp_path / f"{attempt}-{version}")
                    infos = manifest_of(tensors)
                    start = time.perf_counter()
                    async with trio.open_nursery() as nursery:
                        begun = trio.Event()
                        call = partial(receive, name=sender.name, bucket_bytes=2**18, receiving=begun.set)
                        nursery.start_soon(call, client, infos, version)
                        await begun.wait()
                        await trio.to_thread.run_sync(sender.send, [tensors[info.name] for info in infos])
                    size = sum(tensor.nbytes for tensor in tensors.values())
                    print(f"over gloo: {time.perf_counter() - start:.3f} s, {size} bytes")
                    serves(engine, version)
                    assert apart(await engine.score(prompt(0)), logprobs_of(backend, prompt(0))) <= BOUND
                    assert await far(backend, engine, 0.7) <= BOUND
                await leave_group(client, name=sender.name)
                await leave_group(client, name=sender.name)
            # Nothing to receive from: it says so at once, and serves on when it is given weights again.
            with pytest.raises(InferenceError, match="did not receive the weights of version 9"):
                await receive(client, infos, 9, name="nobody")
            await engine.update_weights(WeightUpdate(10, path=str(TINY)))
            assert (await engine.health()).ok

    trio.run(main)


DYING_SENDER = """
import socket, sys
from datetime import timedelta
import torch
from torch import distributed
limit = timedelta(seconds=60)
listener = socket.create_server(("127.0.0.1", 0))
port = listener.getsockname()[1]
store = distributed.TCPStore("127.0.0.1", port, 2, True, limit, False, master_listen_fd=listener.detach())
print(port, flush=True)
for prefix in ("rollouts-dies", "rollouts-dies/", "cpu/"):
    store = distributed.PrefixStore(prefix, store)
group = distributed.ProcessGroupGloo(store, 0, 2, limit)
sys.stdin.read()
"""


def test_a_trainer_that_dies_in_a_broadcast_does_not_hang_the_server(engine_of, url):
    """What it left open is closed by the next one."""

    async def main():
        async with engine_of() as engine, HTTPClient(url) as client:
            infos = manifest_of(read_tensors(TINY))
            with subprocess.Popen(  # noqa: ASYNC220 - it prints one line and waits
                [sys.executable, "-c", DYING_SENDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            ) as sender:
                try:
                    port = int(sender.stdout.readline())
                    name = "rollouts-dies"
                    await join_group(client, GroupPlace("127.0.0.1", port, 2, name, "gloo"))
                    start = trio.current_time()
                    with pytest.raises(ExceptionGroup) as caught:
                        async with trio.open_nursery() as nursery:
                            begun = trio.Event()
                            call = partial(receive, name=name, receiving=begun.set)
                            nursery.start_soon(call, client, infos, 2)
                            await begun.wait()
                            await trio.sleep(0.5)
                            sender.kill()
                    (error,) = caught.value.exceptions
                    assert isinstance(error, InferenceError) and "restart it" in str(error)
                    assert trio.current_time() - start < 10.0
                finally:
                    sender.kill()
            await leave_group(client, name=name)
            with pytest.raises(InferenceError, match="did not receive the weights of version 3"):
                await receive(client, infos, 3, name="nobody")
            await engine.update_weights(WeightUpdate(4, path=str(TINY)))
            assert (await engine.health()).ok

    trio.run(main)


# --- other servers ----------------------------------------------------------------------------------------------------


def test_keys_raw_logprobs_missing_flags_and_a_damaged_file(serve, tmp_path, capsys):
    """A second server, without LoRA, with a key, and with logprobs of temperature 1. The damaged file is its end."""
    key = "rollouts-test-key"
    url = served(serve, tmp_path / "log", "--api-key", key, lora_rank=0, SGLANG_RETURN_ORIGINAL_LOGPROB="1")

    def engine(**settings):
        return Server(SGLang(), url, ServerSetup(vocabulary_size=VOCABULARY, **settings))

    async def main():
        for given in ("", "wrong"):
            with pytest.raises(ConfigError, match=r"--inference\.api-key-env") as caught:
                await engine(api_key=given).check()
            assert key not in str(caught.value) and "wrong" not in str(caught.value)
        with pytest.raises(ConfigError, match="SGLANG_RETURN_ORIGINAL_LOGPROB=0") as caught:
            await engine(api_key=key, temperature=0.7).check()
        with pytest.raises(ConfigError, match="--enable-lora --max-lora-rank 4"):
            await engine(api_key=key, lora_rank=4).check()
        damaged = tmp_path / "damaged"
        damaged.mkdir()
        for name in ("config.json", "model.safetensors"):
            data = (TINY / name).read_bytes()
            (damaged / name).write_bytes(data[: 500_000 if name.endswith("safetensors") else None])
        async with engine(api_key=key) as remote:
            await remote.generate(GenerateRequest(prompt(0), 4, (), 1))
            assert remote.info.logprobs == "raw"
            with pytest.raises(InferenceError, match="was not sent to"):
                await remote.update_weights(WeightUpdate(1, path=str(damaged)))
            with pytest.raises(InferenceError, match="restart it") as caught:  # had nobody looked
                await remote.dialect.load_full(remote._control, WeightUpdate(2, path=str(damaged)))
            assert not caught.value.is_transient and key not in str(caught.value)
            assert not (await remote.health()).ok

    trio.run(main)
    assert key not in "".join(capsys.readouterr())
