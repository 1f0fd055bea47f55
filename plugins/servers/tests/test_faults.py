"""What can go wrong between a trainer and real servers, planted: each is seen, and named in what a person reads.

The servers are contract fakes (`tests/servers/fake_engines.py`) in processes of their own, which compute; the trainer
is one that computes the same. Everything between them is ours: weight sync, dialects, engines, pool. Each fault has a
control beside it, which is the same without the fault.
"""

from __future__ import annotations

import functools
import http.server
import shutil
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import trio
from rollouts_servers.checks import ServerSetup
from rollouts_servers.http import Retries
from rollouts_servers.server import Server
from rollouts_servers.server_pool import ServerPool
from rollouts_servers.sglang import SGLang
from rollouts_servers.vllm import VLLM

from rollouts.errors import ConfigError, InferenceError
from rollouts.inference.base import GenerateRequest, Generation, WeightUpdate
from rollouts.training.weights import files as weight_files
from rollouts.training.weights.sync import WeightSyncManager

sys.path[:0] = [str(Path(__file__).parents[3] / "tests" / "servers")]
from fake_engines import FakeServers, FakeTrainer, started, write_model  # noqa: E402

DIALECTS = {"vllm": VLLM, "sglang": SGLang}
VOCABULARY, RANK = 64, 4
TENSOR = "model.layers.1.self_attn.q_proj.weight"
ADAPTER_TENSOR = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"
PROMPT = [(11 * i + 5) % VOCABULARY for i in range(40)]
SECRET = "sk-open-sesame-1234"
EXACT = 1e-6
QUICK = {"health_seconds": 2.0, "watch_seconds": 0.2, "back_seconds": 0.05}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), vocabulary=VOCABULARY)


@pytest.fixture(scope="module")
def servers() -> Iterator[FakeServers]:
    with FakeServers() as found:
        yield found


@pytest.fixture(autouse=True)
def names_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake trainer's tensors have the files' names already; to ask transformers takes seconds."""
    monkeypatch.setattr(weight_files, "file_tensors", lambda weights, *_: dict(weights))


@pytest.fixture(params=sorted(DIALECTS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["full", "adapter"])
def way(request: pytest.FixtureRequest) -> Any:
    return request.param


class Room(NamedTuple):
    """What the tests of one kind share: how to start its servers, and where weights go."""

    kind: str
    servers: FakeServers
    model_folder: Path
    weights_folder: Path

    def take(self, **options: Any) -> Any:
        """A server, as new."""
        return self.servers.take(self.kind, self.model_folder, **options)

    def engine(self, url: str, **options: Any) -> Server:
        """An engine of ours for the server there."""
        options = {
            "vocabulary_size": VOCABULARY,
            "model": "policy",
            "weights_folder": str(self.weights_folder),
        } | options
        options = {"retries": Retries(attempts_max=2, first_seconds=0.01)} | options
        return Server(DIALECTS[self.kind](), url, ServerSetup(**options))

    def trainer(self, way: str = "full") -> FakeTrainer:
        """Of that model."""
        return FakeTrainer(self.model_folder, lora_rank=RANK if way == "adapter" else 0)

    @property
    def software(self) -> str:
        """What an engine of ours calls its server."""
        return DIALECTS[self.kind].software


@pytest.fixture
def room(kind: str, servers: FakeServers, model_folder: Path, tmp_path: Path) -> Room:
    return Room(kind, servers, model_folder, tmp_path / "weights")


def lora(way: str) -> dict[str, int]:
    return {"lora_rank": RANK if way == "adapter" else 0}


def run(main: Callable[[], Awaitable[Any]], seconds: float = 20.0) -> Any:
    async def bounded() -> Any:
        with trio.fail_after(seconds):
            return await main()

    return trio.run(bounded)


async def refused(made: Callable[[], Awaitable[Any]]) -> str:
    """The one message with which a set-up is refused, before anything is sampled."""
    with pytest.raises(ConfigError) as raised:
        await made()
    words = str(raised.value)
    assert "\n" not in words.strip() and "Traceback" not in words, words
    return words


async def sync_fails(sync: WeightSyncManager, trainer: FakeTrainer, room: Room, url: str) -> str:
    """The message with which a sync stops the run; engine and version stand in it."""
    with pytest.raises(InferenceError) as raised:
        await sync.sync(trainer)
    words = str(raised.value)
    assert room.software in words and url in words, words
    assert f"version {trainer.version}" in words, words
    assert not raised.value.is_transient, words
    return words


async def check_served(engine: Any, trainer: FakeTrainer, temperature: float = 1.0) -> Generation:
    """What is sampled has the trainer's own logprobs."""
    request = GenerateRequest(PROMPT, 12, (), 3, temperature=temperature)
    reply: Generation = await engine.generate(request)
    apart_from(reply, trainer, temperature)
    assert set(reply.versions) == {trainer.version}
    return reply


def apart_from(reply: Generation, trainer: FakeTrainer, temperature: float = 1.0) -> None:
    ours = trainer.model.score(PROMPT + reply.tokens, temperature)[len(PROMPT) :]
    assert len(reply.tokens) == len(reply.logprobs) > 0
    apart = max(abs(one - other) for one, other in zip(ours, reply.logprobs, strict=True))
    assert apart < EXACT, f"{apart} apart"


# --- weights that do not arrive --------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.7, pytest.param(1.0, marks=pytest.mark.nightly)])
def test_healthy_servers_follow_the_trainer(room: Room, way: str, temperature: float) -> None:
    """The control of all that follows in this part."""

    async def main() -> None:
        with room.take() as server:
            async with room.engine(server.url, temperature=temperature, **lora(way)) as engine:
                trainer, sync = room.trainer(way), WeightSyncManager([engine], temperature=temperature)
                for _ in range(4):
                    metrics = await sync.sync(trainer)
                    assert metrics["sync/probe"] < EXACT and metrics["sync/version"] == trainer.version
                    await check_served(engine, trainer, temperature)
                    trainer.nudge()

    run(main)


FAULTS = {
    ("full", f"drop_tensor={TENSOR}"): ["some tensor did not arrive"],
    ("full", f"flip_bit={TENSOR}"): ["some tensor did not arrive whole"],
    ("full", "old_version"): ["still serves version 1"],
    ("full", "no_flush"): ["cache was not flushed", "version 1"],
    ("full", "other_model"): ["another model"],
    ("adapter", f"drop_tensor={ADAPTER_TENSOR}"): ["some tensor did not arrive"],
    ("adapter", f"flip_bit={ADAPTER_TENSOR}"): ["some tensor did not arrive whole"],
    ("adapter", "old_version"): ["still serves version 1"],
    ("adapter", "no_flush"): ["cache was not flushed", "version 1"],
    ("adapter", "other_model"): ["another model"],
    ("adapter", "adapter_not_loaded"): ["without an adapter"],
}


DAILY = (("full", "no_flush"), ("full", "old_version"), ("adapter", "adapter_not_loaded"))


@pytest.mark.parametrize(
    ("way", "fault"),
    [pytest.param(*each, marks=() if each in DAILY else pytest.mark.nightly) for each in FAULTS],
)
def test_a_sync_that_did_not_arrive_stops_and_says_what_it_looks_like(room: Room, way: str, fault: str) -> None:
    async def main() -> None:
        with room.take() as server:
            async with room.engine(server.url, **lora(way)) as engine:
                trainer, sync = room.trainer(way), WeightSyncManager([engine])
                await sync.sync(trainer)
                trainer.nudge()
                await sync.sync(trainer)
                server.plant(fault)
                trainer.nudge()
                words = await sync_fails(sync, trainer, room, server.url)
                for each in FAULTS[way, fault]:
                    assert each in words, words
                name = fault.partition("=")[0]
                assert name == "other_model" or name in server.statistics()["planted"][0]
                server.plant()
                if fault != "no_flush":
                    await sync.sync(trainer)
                    await check_served(engine, trainer)

    run(main)


def test_an_adapter_that_was_never_loaded(room: Room) -> None:
    """From the first sync on: there is no earlier version that it could be."""

    async def main(fault: str) -> None:
        with room.take(faults=[fault] if fault else []) as server:
            async with room.engine(server.url, lora_rank=RANK) as engine:
                trainer = room.trainer("adapter")
                trainer.nudge()
                sync = WeightSyncManager([engine])
                if fault:
                    words = await sync_fails(sync, trainer, room, server.url)
                    assert "adapter was not loaded" in words and "what it served before" in words, words
                else:
                    await sync.sync(trainer)

    run(lambda: main("adapter_not_loaded"))
    run(lambda: main(""))


@pytest.mark.parametrize("harm", ["drop", "flip", "cut", ""])
def test_files_that_are_not_the_trainers_are_seen_before_any_server_is_asked(
    room: Room, way: str, harm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = ADAPTER_TENSOR if way == "adapter" else TENSOR
    write = weight_files.write_folder

    def harmed(parent: Any, version: int, form: Any, tensors: dict[str, Any], *rest: Any, **more: Any) -> Path:
        tensors = {each: value.clone() for each, value in tensors.items() if (harm, each) != ("drop", name)}
        if harm == "flip":
            tensors[name].view(-1)[3] *= 1.0 + 2.0**-20
        folder = write(parent, version, form, tensors, *rest, **more)
        if harm == "cut":
            (file,) = folder.glob("*.safetensors")
            file.write_bytes(file.read_bytes()[:-4])
        return folder

    async def main() -> None:
        with room.take() as server:
            async with room.engine(server.url, **lora(way)) as engine:
                trainer, sync = room.trainer(way), WeightSyncManager([engine])
                trainer.nudge()
                monkeypatch.setattr(weight_files, "write_folder", harmed)
                loads = server.statistics()["loads"]
                if not harm:
                    await sync.sync(trainer)
                    assert server.statistics()["loads"] == loads + 1
                    return
                with pytest.raises(InferenceError) as raised:
                    await sync.sync(trainer)
                words = str(raised.value)
                assert f"version {trainer.version}" in words and "No engine was asked" in words, words
                assert ("cut off" if harm == "cut" else name) in words, words
                assert server.statistics()["loads"] == loads, "it was asked nevertheless"

    run(main)


def test_one_bad_server_of_two_is_named(room: Room) -> None:
    async def main() -> None:
        with room.take() as one, room.take() as two:
            async with room.engine(one.url) as good, room.engine(two.url) as bad:
                trainer, sync = room.trainer(), WeightSyncManager([good, bad])
                await sync.sync(trainer)
                two.plant("flip_bit")
                trainer.nudge()
                words = await sync_fails(sync, trainer, room, two.url)
                assert one.url not in words, words

    run(main)


def test_a_server_that_dies_in_a_load_is_named_and_asked_no_more(room: Room, way: str) -> None:
    async def main() -> None:
        with room.take() as server:
            async with room.engine(server.url, **lora(way)) as engine:
                trainer, sync = room.trainer(way), WeightSyncManager([engine])
                await sync.sync(trainer)
                server.plant("die_in_load")
                trainer.nudge()
                await sync_fails(sync, trainer, room, server.url)
                assert server.has_died()
                with trio.fail_after(2), pytest.raises(InferenceError, match="did not load version 1"):
                    await engine.generate(GenerateRequest(PROMPT, 4, (), 0))

    run(main)


def test_after_a_load_that_failed_requests_fail_at_once_until_one_succeeds(room: Room, tmp_path: Path) -> None:
    async def main() -> None:
        with room.take() as server:
            async with room.engine(server.url) as engine:
                trainer = room.trainer()
                other = write_model(tmp_path / "other", width=24, vocabulary=VOCABULARY)
                with pytest.raises(InferenceError) as raised:
                    await engine.update_weights(WeightUpdate(1, path=str(other)))
                assert "version 1" in str(raised.value) and server.url in str(raised.value)
                with trio.fail_after(2), pytest.raises(InferenceError, match="did not load version 1"):
                    await engine.generate(GenerateRequest(PROMPT, 4, (), 0))
                assert server.process.poll() is None, "no request may reach a server without weights"
                trainer.nudge()
                trainer.nudge()
                await engine.update_weights(WeightUpdate(2, path=str(trainer.write(tmp_path / "good"))))
                await check_served(engine, trainer)

    run(main)


def test_folders_that_a_server_would_die_of_are_not_shown_to_it(room: Room, tmp_path: Path) -> None:
    async def main() -> None:
        with room.take() as server:
            async with room.engine(server.url) as engine:
                trainer = room.trainer()
                cut = trainer.write(tmp_path / "cut") / "model.safetensors"
                cut.write_bytes(cut.read_bytes()[:-8])
                for folder in (cut.parent, tmp_path / "nothing"):
                    with pytest.raises(InferenceError, match=str(folder)):
                        await engine.update_weights(WeightUpdate(1, path=str(folder)))
                assert server.statistics()["loads"] == 0
                await check_served(engine, trainer)

    run(main)


def test_an_id_outside_the_vocabulary_is_not_sent(room: Room) -> None:
    async def main() -> None:
        with room.take() as server:
            async with room.engine(server.url) as engine:
                with pytest.raises(InferenceError, match="64 is outside the vocabulary of 64"):
                    await engine.generate(GenerateRequest([1, VOCABULARY], 4, (), 0))
                await check_served(engine, room.trainer())

    run(main)


# --- servers that go away --------------------------------------------------------------------------------------------


def pool_of(room: Room, *urls: str, give_up_seconds: float = 5.0, **options: Any) -> ServerPool:
    return ServerPool([room.engine(url, **QUICK | options) for url in urls], give_up_seconds=give_up_seconds)


async def until(condition: Callable[[], Any]) -> None:
    with trio.fail_after(5):
        while not condition():  # noqa: ASYNC110 - it is another process's
            await trio.sleep(0.01)


def test_killed_in_the_middle_of_a_generation_its_rollouts_finish_elsewhere(room: Room) -> None:
    async def main() -> None:
        with room.take(token_seconds=0.01) as one, room.take(token_seconds=0.01) as two:
            async with pool_of(room, one.url, two.url) as pool:
                trainer = room.trainer()
                await WeightSyncManager([pool]).sync(trainer)
                replies: dict[int, Generation] = {}

                async def episode(number: int) -> None:
                    session = pool.open_session((number, 0))
                    replies[number] = await pool.generate(GenerateRequest(PROMPT, 40, (), number, session=session))
                    pool.close_session(session)

                async with trio.open_nursery() as nursery:
                    for number in range(8):
                        nursery.start_soon(episode, number)
                    await until(lambda: one.statistics()["running"] and one.statistics()["tokens"] > 20)
                    assert not replies, "it dies before anything is finished"
                    one.kill()
                assert sorted(replies) == list(range(8))
                for reply in replies.values():
                    apart_from(reply, trainer)
                    assert len(reply.tokens) == 40 and reply.finish == "length"
                found = pool.statistics()
                assert found.rerouted >= 1 and found.failed == 0 and len(pool.members) == 1
                states = {each.name: (each.state, each.deaths) for each in found.servers}
                assert states == {one.url: ("down", 1), two.url: ("ready", 0)}

    run(main)


def test_none_is_moved_where_none_dies(room: Room) -> None:
    async def main() -> None:
        with room.take() as one, room.take() as two:
            async with pool_of(room, one.url, two.url) as pool:
                trainer = room.trainer()
                await WeightSyncManager([pool]).sync(trainer)
                for number in range(8):
                    apart_from(await pool.generate(GenerateRequest(PROMPT, 8, (), number, order=(number,))), trainer)
                found = pool.statistics()
                assert (found.rerouted, found.failed) == (0, 0) and len(pool.members) == 2

    run(main)


def test_killed_in_the_middle_of_a_sync_and_resynced_when_it_returns(room: Room, way: str) -> None:
    async def main() -> None:
        with room.take() as one, room.take() as two:
            async with pool_of(room, one.url, two.url, **lora(way)) as pool:
                trainer, sync = room.trainer(way), WeightSyncManager([pool])
                await sync.sync(trainer)
                trainer.nudge()
                one.plant("slow_load=5")
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(sync.sync, trainer)
                    await until(lambda: one.statistics()["loads"] == 2)
                    one.kill()
                assert len(pool.members) == 1
                await check_served(pool, trainer)
                port = int(one.url.rpartition(":")[2])
                with started(room.kind, room.model_folder, port=port) as again:
                    await until(lambda: len(pool.members) == 2)
                    assert again.statistics()["loads"] == 1, "it was given the weights before it serves"
                    for member in pool.members:
                        scores = await member.score(PROMPT)
                        assert scores == pytest.approx(trainer.model.score(PROMPT), abs=EXACT)
                    trainer.nudge()
                    await sync.sync(trainer)
                    assert again.statistics()["loads"] == 2

    run(main)


def test_a_server_that_returns_with_a_fault_does_not_serve(room: Room) -> None:
    async def main() -> None:
        with room.take() as one, room.take() as two:
            async with pool_of(room, one.url, two.url) as pool:
                trainer, sync = room.trainer(), WeightSyncManager([pool])
                trainer.nudge()
                await sync.sync(trainer)
                one.kill()
                port = int(one.url.rpartition(":")[2])
                with started(room.kind, room.model_folder, port=port, faults=["flip_bit"]) as again:
                    await until(lambda: again.statistics()["loads"] >= 1)
                    await check_served(pool, trainer)
                    await trio.sleep(0.2)
                    (reason,) = [each.reason for each in pool.statistics().servers if each.state != "ready"]
                    assert "does not serve the weights of version 1" in reason, reason
                    again.plant()
                    await until(lambda: len(pool.members) == 2)

    run(main)


def test_an_engine_that_is_dead_and_says_that_it_is_well(room: Room) -> None:
    async def main() -> None:
        with room.take() as one, room.take() as two:
            async with pool_of(room, one.url, two.url) as pool:
                trainer = room.trainer()
                await WeightSyncManager([pool]).sync(trainer)
                one.plant("dead_engine")
                if room.kind == "vllm":
                    assert one.ask("GET", "/health")[0] == 200
                await until(lambda: len(pool.members) == 1)
                await check_served(pool, trainer)
                one.plant()
                await until(lambda: len(pool.members) == 2)

    run(main)


def test_with_no_server_left_the_reasons_are_given(room: Room) -> None:
    async def main() -> None:
        with room.take() as one:
            async with pool_of(room, one.url, give_up_seconds=0.5) as pool:
                await pool.generate(GenerateRequest(PROMPT, 4, (), 0))
                one.kill()
                with pytest.raises(InferenceError, match=one.url):
                    await pool.generate(GenerateRequest(PROMPT, 4, (), 0))

    run(main)


def test_a_server_that_was_restarted_behind_our_back_is_seen(room: Room, way: str) -> None:
    """On the same port, between two requests, sooner than the pool looks after it: nothing of its first weights comes
    back as if it were of the last.
    """

    async def main() -> None:
        with room.take() as one:
            async with pool_of(room, one.url, watch_seconds=60.0, **lora(way)) as pool:
                trainer, sync = room.trainer(way), WeightSyncManager([pool])
                trainer.nudge()
                await sync.sync(trainer)
                await check_served(pool, trainer)
                one.reset(room.kind, room.model_folder)
                await check_served(pool, trainer)
                assert one.statistics()["loads"] >= 1

    run(main)


# --- servers that are others -----------------------------------------------------------------------------------------


def test_another_model_by_another_name(room: Room) -> None:
    async def main() -> None:
        with room.take(served_model="qwen-72b") as server:
            words = await refused(room.engine(server.url).check)
            assert "qwen-72b" in words and "'policy'" in words and "--inference.served-model" in words
            await room.engine(server.url, model="qwen-72b").check()

    run(main)


def test_another_model_of_the_same_name(room: Room, way: str, tmp_path: Path) -> None:
    """Of another shape it cannot load ours; of the same shape only its numbers tell, where a base stays."""

    async def main() -> None:
        wide = write_model(tmp_path / "wide", vocabulary=VOCABULARY, width=24)
        alike = write_model(tmp_path / "alike", vocabulary=VOCABULARY, seed=9)
        for folder in (wide, alike):
            with room.servers.take(room.kind, folder) as server:
                async with room.engine(server.url, **lora(way)) as engine:
                    trainer, sync = room.trainer(way), WeightSyncManager([engine])
                    trainer.nudge()
                    if folder == alike and way == "full":
                        await sync.sync(trainer)
                        await check_served(engine, trainer)
                        continue
                    words = await sync_fails(sync, trainer, room, server.url)
                    assert "model" in words, words

    run(main)


def test_tokenizers_that_differ(room: Room) -> None:
    async def main() -> None:
        text = "two and two"
        ids = [byte % VOCABULARY for byte in text.encode()]
        with room.take() as server:
            await room.engine(server.url, tokenizer=(text, ids)).check()
            server.plant("other_tokenizer")
            words = await refused(room.engine(server.url, tokenizer=(text, ids)).check)
            assert "another tokenizer" in words and repr(text) in words and server.url in words

    run(main)


class _Page(http.server.BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.send_header("content-type", "text/html")
        self.end_headers()
        self.wfile.write(b"<html>a nice page</html>")

    do_POST = do_GET

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def page() -> Iterator[str]:
    """A web server that is no model's."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Page)
    thread = threading.Thread(target=functools.partial(server.serve_forever, 0.02))
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    "status", [200, pytest.param(404, marks=pytest.mark.nightly), pytest.param(503, marks=pytest.mark.nightly)]
)
def test_a_url_that_answers_something_else(room: Room, page: str, status: int) -> None:
    _Page.status = status
    words = run(lambda: refused(room.engine(page).check))
    assert page in words and room.software in words


def test_a_url_of_the_other_kind_of_server(room: Room) -> None:
    async def main() -> None:
        other = "sglang" if room.kind == "vllm" else "vllm"
        with room.servers.take(other, room.model_folder) as server:
            words = await refused(room.engine(server.url).check)
            assert server.url in words and room.software in words
            await room._replace(kind=other).engine(server.url).check()

    run(main)


def test_a_url_without_a_server(room: Room) -> None:
    words = run(lambda: refused(room.engine("http://127.0.0.1:9").check))
    assert "127.0.0.1:9" in words and room.software in words


def test_a_url_with_the_path_of_an_api(room: Room) -> None:
    """As people type it who come from OpenAI's clients."""

    async def main() -> None:
        with room.take() as server:
            words = await refused(room.engine(server.url + "/v1").check)
            assert server.url in words and ("without" in words or "path" in words), words

    run(main)


# --- servers without a flag, too old, or with a key ------------------------------------------------------------------


MISSING: list[tuple[str, dict[str, Any], dict[str, Any], list[str]]] = [
    ("vllm", {"scale_out": False}, {}, ["--enable-scale-out"]),
    ("vllm", {"dev_mode": False}, {}, ["VLLM_SERVER_DEV_MODE=1"]),
    ("vllm", {"runtime_lora": False}, {"lora_rank": 4}, ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"]),
    ("vllm", {"lora_rank": 0}, {"lora_rank": 4}, ["--enable-lora", "--max-lora-rank 4"]),
    ("vllm", {"logprobs_mode": "raw_logprobs"}, {"temperature": 0.7}, ["--logprobs-mode processed_logprobs"]),
    ("sglang", {"lora_rank": 0}, {"lora_rank": 4}, ["--enable-lora", "--max-lora-rank 4"]),
    ("sglang", {"logprobs_mode": "raw_logprobs"}, {"temperature": 0.7}, ["SGLANG_RETURN_ORIGINAL_LOGPROB"]),
    ("sglang", {"admin_key": "another"}, {}, ["--admin-api-key"]),
]


@pytest.mark.parametrize(("kind", "server_options", "engine_options", "expected"), MISSING)
def test_a_server_without_a_flag_and_the_message_prints_it(
    kind: str,
    server_options: dict[str, Any],
    engine_options: dict[str, Any],
    expected: list[str],
    servers: FakeServers,
    model_folder: Path,
    tmp_path: Path,
) -> None:
    async def main() -> None:
        room = Room(kind, servers, model_folder, tmp_path)
        with room.take(**server_options) as server:
            words = await refused(room.engine(server.url, **engine_options).check)
            assert all(each in words for each in expected) and server.url in words, words
        with room.take() as server:
            await room.engine(server.url, **engine_options).check()

    run(main)


def test_flags_that_a_run_does_not_need_are_not_asked_for(room: Room) -> None:
    async def main() -> None:
        with room.take(lora_rank=0, logprobs_mode="raw_logprobs") as server:
            await room.engine(server.url).check()
        if room.kind == "vllm":
            with room.take(dev_mode=False) as server:
                await room.engine(server.url, lora_rank=RANK).check()

    run(main)


@pytest.mark.parametrize(("kind", "old", "needed"), [("vllm", "0.29.1", "0.32"), ("sglang", "0.5.9", "0.5.22")])
def test_a_version_that_is_too_old_and_which_one_is_needed(
    kind: str, old: str, needed: str, servers: FakeServers, model_folder: Path, tmp_path: Path
) -> None:
    async def main() -> None:
        room = Room(kind, servers, model_folder, tmp_path)
        with room.take(version=old) as server:
            words = await refused(room.engine(server.url).check)
            assert old in words and needed in words and "pip install" in words
        with room.take(version="0.33.0rc1" if kind == "vllm" else "0.6.0.post2") as server:
            await room.engine(server.url).check()

    run(main)


def test_an_adapter_of_a_larger_rank_than_the_servers_limit(room: Room) -> None:
    async def main() -> None:
        with room.take(lora_rank=8) as server:
            words = await refused(room.engine(server.url, lora_rank=16).check)
            assert "--max-lora-rank 16" in words and "rank 8" in words, words
            await room.engine(server.url, lora_rank=8).check()

    run(main)


def test_a_rank_that_is_seen_only_when_the_adapter_comes(
    servers: FakeServers, model_folder: Path, tmp_path: Path
) -> None:
    """vLLM does not say its limit without its development endpoints."""

    async def main() -> None:
        room = Room("vllm", servers, model_folder, tmp_path)
        with room.take(lora_rank=2, dev_mode=False) as server:
            async with room.engine(server.url, lora_rank=RANK) as engine:
                trainer = room.trainer("adapter")
                words = await sync_fails(WeightSyncManager([engine]), trainer, room, server.url)
                assert "max_lora_rank 2" in words, words

    run(main)


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and all that Python would print with it."""
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


@pytest.mark.parametrize("key", ["", SECRET])
def test_an_api_key_that_is_missing_or_refused_and_never_printed(room: Room, key: str) -> None:
    async def main() -> None:
        with room.take(api_key="the right one") as server:
            engine = room.engine(server.url, api_key=key)
            with pytest.raises(ConfigError) as raised:
                await engine.check()
            words = str(raised.value)
            assert "API key" in words and "--inference.api-key-env" in words and server.url in words
            assert ("refuses" if key else "none is set") in words
            shown = [repr(each) for each in chain(raised.value)] + [repr(engine), repr(engine._client)]
            assert not any(secret in text for text in shown for secret in (SECRET, "the right one"))

    run(main)


def test_the_right_key_is_never_printed_either(room: Room, way: str) -> None:
    async def main() -> None:
        with room.take(api_key=SECRET) as server:
            async with room.engine(server.url, api_key=SECRET, **lora(way)) as engine:
                trainer, sync = room.trainer(way), WeightSyncManager([engine])
                await sync.sync(trainer)
                await check_served(engine, trainer)
                server.plant("old_version")
                trainer.nudge()
                with pytest.raises(InferenceError) as raised:
                    await sync.sync(trainer)
                server.plant("die_in_load")
                with pytest.raises(InferenceError) as last:
                    await sync.sync(trainer)
                shown = [repr(each) for error in (raised.value, last.value) for each in chain(error)]
                assert len(shown) >= 3 and SECRET not in "".join(shown)

    run(main)


# --- replies under way -----------------------------------------------------------------------------------------------


def test_replies_under_way_tell_which_weights_sampled_what(room: Room, way: str, tmp_path: Path) -> None:
    """All weights change beneath them; an adapter's replies end on their own."""

    async def main() -> None:
        with room.take(token_seconds=0.005) as server:
            async with room.engine(server.url, **lora(way)) as engine:
                trainer = room.trainer(way)
                trainer.nudge()
                first = WeightUpdate(1, way, path=str(trainer.write(tmp_path / "v1", way)))
                await engine.update_weights(first)
                old, replies = trainer.model, list[Generation]()
                trainer.nudge()

                async def ask() -> None:
                    replies.append(await engine.generate(GenerateRequest(PROMPT, 60, (), 1)))

                async with trio.open_nursery() as nursery:
                    nursery.start_soon(ask)
                    await until(lambda: server.statistics()["tokens"] > 8)
                    path = str(trainer.write(tmp_path / "v2", way))
                    await engine.update_weights(WeightUpdate(2, way, path=path))
                    await check_served(engine, trainer)
                (reply,) = replies
                change = reply.versions.count(1)
                assert reply.versions == [1] * change + [2] * (60 - change)
                assert change == 60 if way == "adapter" else 0 < change < 60
                for model, span in ((old, slice(0, change)), (trainer.model, slice(change, 60))):
                    ours = model.score(PROMPT + reply.tokens)[len(PROMPT) :][span]
                    assert ours == pytest.approx(reply.logprobs[span], abs=EXACT)

    run(main)


def test_aborted_replies_come_back_with_what_there_is(room: Room) -> None:
    async def main() -> None:
        with room.take(token_seconds=0.005) as server:
            async with room.engine(server.url) as engine:
                replies: dict[str, Generation] = {}

                async def ask(session: str) -> None:
                    replies[session] = await engine.generate(GenerateRequest(PROMPT, 60, (), 1, session=session))

                async with trio.open_nursery() as nursery:
                    # Names that begin alike: SGLang aborts all that begin as the one that it was given.
                    for session in ("1", "1-0", "12"):
                        nursery.start_soon(ask, session)
                    await until(lambda: server.statistics()["tokens"] > 12)
                    await engine.abort("1")
                    assert sorted(replies) == ["1"]
                assert {each: reply.finish for each, reply in replies.items()} == {
                    "1": "abort",
                    "1-0": "length",
                    "12": "length",
                }
                assert 0 < len(replies["1"].tokens) < 60
                for reply in replies.values():
                    apart_from(reply, room.trainer())

    run(main)


def test_an_abort_takes_nothing_of_another_run_at_the_same_server(room: Room) -> None:
    """Both count their sessions and requests alike, as two processes do."""

    async def main() -> None:
        with room.take(token_seconds=0.005) as server:
            async with room.engine(server.url) as one, room.engine(server.url) as other:
                replies: dict[str, Generation] = {}

                async def ask(name: str, engine: Server) -> None:
                    replies[name] = await engine.generate(GenerateRequest(PROMPT, 60, (), 1, session="0-0-0"))

                async with trio.open_nursery() as nursery:
                    nursery.start_soon(ask, "one", one)
                    nursery.start_soon(ask, "other", other)
                    await until(lambda: server.statistics()["tokens"] > 12)
                    await one.abort("0-0-0")
                assert {name: reply.finish for name, reply in replies.items()} == {"one": "abort", "other": "length"}

    run(main)


def test_a_run_that_leaves_takes_its_adapters_with_it(room: Room) -> None:
    async def main() -> None:
        with room.take() as server:
            async with room.engine(server.url, **lora("adapter")) as engine:
                trainer, sync = room.trainer("adapter"), WeightSyncManager([engine])
                for _ in range(3):
                    await sync.sync(trainer)
                    trainer.nudge()
                assert server.statistics()["adapters"]
            assert server.statistics()["adapters"] == []

    run(main)


def test_a_run_that_is_interrupted_while_a_server_loads_leaves_it_to_the_next_one(room: Room) -> None:
    async def main() -> None:
        with room.take(load_seconds=0.3) as server:
            trainer = room.trainer()
            async with room.engine(server.url) as engine:
                with trio.move_on_after(10) as scope:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(WeightSyncManager([engine]).sync, trainer)
                        await until(lambda: server.statistics()["paused"])
                        await until(lambda: server.statistics()["loads"])
                        scope.cancel()
                assert server.statistics()["paused"] == ""
            async with room.engine(server.url) as engine:  # it is refused nothing
                trainer.nudge()
                await WeightSyncManager([engine]).sync(trainer)
                await check_served(engine, trainer)

    run(main)


def test_an_adapter_that_was_evicted_without_a_word(servers: FakeServers, model_folder: Path, tmp_path: Path) -> None:
    """SGLang takes it up again from its folder, which sync keeps; where that is gone, the error says so."""

    async def main() -> None:
        room = Room("sglang", servers, model_folder, tmp_path / "weights")
        with room.take(loaded_loras=2) as server:
            async with room.engine(server.url, lora_rank=RANK) as engine:
                trainer, sync = room.trainer("adapter"), WeightSyncManager([engine])
                for _ in range(2):
                    trainer.nudge()
                    await sync.sync(trainer)

                def crowd() -> None:
                    for number in range(2):
                        folder = FakeTrainer(model_folder, lora_rank=2).write(tmp_path / f"other{number}", "adapter")
                        body = {"lora_name": f"other{number}", "lora_path": str(folder)}
                        assert server.ask("POST", "/load_lora_adapter", body)[0] == 200
                        server.ask("POST", "/unload_lora_adapter", {"lora_name": "unknown"})

                for gone in (False, True):
                    crowd()
                    assert server.statistics()["adapters"] == ["other0", "other1"]
                    if not gone:
                        await check_served(engine, trainer)
                        for number in range(2):
                            server.ask("POST", "/unload_lora_adapter", {"lora_name": f"other{number}"})
                        continue
                    shutil.rmtree(room.weights_folder)
                    with pytest.raises(InferenceError, match="implicitly load"):
                        await engine.generate(GenerateRequest(PROMPT, 4, (), 0))

    run(main)
