"""Server over a dialect that is made up: what it sends when, and how the waits end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.numpy  # noqa: F401 - the first import takes longer than the clock of these tests waits
import trio
import trio.testing
from rollouts_servers.checks import ServerSetup
from rollouts_servers.dialect import RequestTarget, Sampled, ServerInfo
from rollouts_servers.http import HTTPFailure
from rollouts_servers.server import Server

from rollouts.errors import ConfigError, InferenceError
from rollouts.inference.base import GenerateRequest, Generation, VersionSpan, WeightUpdate

INFO = ServerInfo("Fake 1", ("policy",), 100, loads_adapters=True, lora_rank_max=8)


class Fake:
    """A dialect without a server: a request ends when the test says so, with the ids that it is given."""

    software, keeps_requests, scores_adapters_alone = "Fake", False, False
    adapter_flags, weights_flags, logprobs_flags = "--adapters {rank}", "--weights", "--logprobs"

    def __init__(self) -> None:
        self.info, self.ids = INFO, [5, 6]
        self.said: list[Any] = []
        self.running: dict[str, trio.Event] = {}
        self.fails = self.hangs = self.is_deaf = self.hears_late = False
        self.load = trio.Event()
        self.load.set()
        self.spans: tuple[tuple[str, int, int], ...] = ()
        self.works: list[RequestTarget] = []

    async def handshake(self, client: Any) -> ServerInfo:
        return self.info

    async def generate(self, client: Any, request: Any, work: RequestTarget) -> Sampled:
        self.works.append(work)
        done = self.running[work.name] = trio.Event()
        if not self.hangs:
            done.set()
        try:
            await trio.lowlevel.checkpoint()
            await done.wait()
        finally:
            self.running.pop(work.name)
        finish = "abort" if ("abort", work.name) in self.said else "stop"
        return Sampled(self.ids, [-1.0] * len(self.ids), finish, self.spans)

    async def score(self, client: Any, tokens: list[int], work: RequestTarget) -> list[float]:
        self.works.append(work)
        return [0.0] * len(tokens)

    async def abort(self, client: Any, names: Any) -> None:
        (name,) = names
        self.said.append(("abort", name))
        if self.is_deaf:
            raise HTTPFailure("refused", "it is gone", retryable=True)
        if self.hears_late and self.said.count(("abort", name)) < 3:
            return
        self.running[name].set()

    async def load_full(self, client: Any, update: WeightUpdate) -> None:
        self.said.append(("full", update.version, len(self.running)))
        await self.load.wait()
        if self.fails:
            raise InferenceError("the disk is full")

    async def load_adapter(self, client: Any, update: WeightUpdate, *, old: str) -> str:
        self.said.append(("adapter", update.version, old))
        await self.load.wait()
        return f"v{update.version}"

    async def unload_adapter(self, client: Any, name: str) -> None:
        await self.load.wait()
        self.said.append(("unload", name))
        if self.fails:
            raise InferenceError("it is gone")

    async def tokenize(self, client: Any, text: str) -> list[int] | None:
        return [ord(character) for character in text]

    def finish(self) -> None:
        """What runs ends, and so does what comes."""
        self.hangs = False
        for done in self.running.values():
            done.set()


class Silent(Fake):
    """It takes note of aborts, and does nothing."""

    async def abort(self, client: Any, names: Any) -> None:
        await trio.lowlevel.checkpoint()


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(written(tmp_path / "weights"))


def written(folder: Path, *, extra: bytes = b"", config: str = "config.json") -> Path:
    folder.mkdir()
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "__metadata__": {"a": "b"}})
    data = len(header).to_bytes(8, "little") + header.encode() + b"\0\0\0\0" + extra
    (folder / "model.safetensors").write_bytes(data)
    (folder / config).write_text("{}")
    return folder


def engine_of(dialect: Any, **settings: Any) -> Server:
    return Server(dialect, "http://127.0.0.1:9", ServerSetup(**{"vocabulary_size": 50, **settings}))


def ask(session: str | None = "a", tokens: int = 3) -> GenerateRequest:
    return GenerateRequest(list(range(tokens)), 10, (2,), 7, session=session)


def run(test: Callable[[], Any], *, reads_files: bool = False) -> None:
    """Under a clock that jumps ahead once all tasks wait; later where a thread may be reading files."""

    async def bounded() -> None:
        with trio.fail_after(60):
            await test()

    trio.run(bounded, clock=trio.testing.MockClock(autojump_threshold=0.3 if reads_files else 0.02))


async def settled() -> None:
    await trio.testing.wait_all_tasks_blocked(0.001)


async def closed(engine: Server) -> None:
    """Until an update has begun: it reads files in a thread first."""
    for _ in range(1000):
        if engine.state in ("paused", "loading"):
            break
        await trio.sleep(0.001)
    await settled()


class Asking:
    """Requests in the background, and what became of them."""

    def __init__(self, nursery: trio.Nursery, engine: Server) -> None:
        self.nursery, self.engine = nursery, engine
        self.found: dict[str, Any] = {}

    async def start(self, session: str) -> None:
        async def task() -> None:
            try:
                self.found[session] = await self.engine.generate(ask(session))
            except InferenceError as error:
                self.found[session] = error

        self.nursery.start_soon(task)
        await settled()


# --- coming -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("info", "settings", "words"),
    [
        (
            {"models": ("one", "two")},
            {"model": "mine"},
            "serves one, two, not 'mine'; give --inference.served-model one",
        ),
        (
            {"logprobs": "raw"},
            {"temperature": 0.7},
            "samples at 0.7: start it with --logprobs, or type --temperature 1",
        ),
        ({"loads_adapters": False}, {"lora_rank": 4}, "start it with --adapters 4, or type --lora-rank 0"),
        ({}, {"lora_rank": 16}, "up to rank 8, but this run's adapter has rank 16: start it with --adapters 16"),
        ({"loads_weights": False}, {}, "cannot load new weights: start it with --weights"),
        ({}, {"tokenizer": ("ab", [97, 99])}, r"another tokenizer than --model: 'ab' is \[97, 98\] there"),
    ],
)
def test_a_server_that_cannot_be_used_is_refused(info, settings, words):
    async def test() -> None:
        dialect = Fake()
        dialect.info = INFO._replace(**info)
        for entering in (False, True):
            engine = engine_of(dialect, **settings)
            with pytest.raises(ConfigError, match=words):
                await (engine.__aenter__() if entering else engine.check())

    run(test)


def test_a_server_that_can_be_used():
    async def test() -> None:
        dialect = Fake()
        dialect.info = INFO._replace(loads_weights=False, logprobs="raw")
        for settings in ({"lora_rank": 8}, {"takes_weights": False}, {"tokenizer": ("ab", [97, 98]), "lora_rank": 1}):
            async with engine_of(dialect, **settings, context_tokens_max=60) as engine:
                assert engine.context_tokens_max == 60
                assert engine.capabilities.aborts and engine.capabilities.checks
                assert engine.info is not None and engine.info.software == "Fake 1"

    run(test)


@pytest.mark.parametrize(("key", "words"), [("", "requires an API key, but none is set"), ("hush", "refuses the API")])
def test_an_api_key_is_asked_for_and_never_shown(key, words):
    class Guarded(Fake):
        async def handshake(self, client: Any) -> ServerInfo:
            raise HTTPFailure("client", f"status 401: {key} is wrong", retryable=False, status=401)

    async def test() -> None:
        with pytest.raises(ConfigError, match=words) as raised:
            await engine_of(Guarded(), api_key=key).check()
        assert "hush" not in str(raised.value) and "--inference.api-key-env" in str(raised.value)
        assert raised.value.__cause__ is None

    run(test)


# --- requests ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([1, 50], "token id 50 is outside the vocabulary of 50"),
        ([-1], "-1"),
        ([1] * 95, "95 tokens and a reply of up to"),
    ],
)
def test_what_a_server_must_not_be_asked_is_not_sent(tokens, words):
    async def test() -> None:
        async with engine_of(Fake()) as engine:
            with pytest.raises(InferenceError, match=words) as raised:
                await engine.generate(GenerateRequest(tokens, 10, (), 0))
            assert not raised.value.is_transient and not engine.dialect.works

    run(test)


def test_each_request_has_a_name_of_its_own_and_a_salt_of_run_and_version(folder):
    async def test() -> None:
        dialect, other = Fake(), Fake()
        async with engine_of(dialect, model="policy") as engine, engine_of(other) as beside:
            for _ in range(2):
                await engine.generate(ask())
            await engine.update_weights(WeightUpdate(4, path=folder))
            assert (await engine.generate(ask())).spans == [VersionSpan(4, 0, 2)]
            await beside.generate(ask())
            assert engine.open_session((1, 2)) != engine.open_session((1, 2))
        works = dialect.works + other.works
        assert len({work.name for work in works[:3]}) == 3 and works[0].model == "policy"
        assert len({work.salt for work in works}) == 3
        assert len({work.name for work in works}) == 4, "two processes count alike"

    run(test, reads_files=True)


@pytest.mark.parametrize("late", [False, True])
def test_an_abort_gives_back_what_there_is(late):
    async def test() -> None:
        dialect = Fake()
        dialect.hangs, dialect.hears_late = True, late
        async with engine_of(dialect) as engine, trio.open_nursery() as nursery:
            asking = Asking(nursery, engine)
            await asking.start("a")
            await engine.abort("a")
            assert asking.found["a"] == Generation([5, 6], [-1.0, -1.0], "abort", [VersionSpan(0, 0, 2)])
            await engine.abort("a")  # over
            await engine.abort("b")  # never there
            assert not engine._requests

    run(test)


@pytest.mark.parametrize("how", ["waits its turn", "weights are loaded"])
def test_an_abort_before_it_is_sent_sends_nothing(how, folder):
    async def test() -> None:
        dialect = Fake()
        async with engine_of(dialect, connections_max=1) as engine, trio.open_nursery() as nursery:
            asking = Asking(nursery, engine)
            if how == "waits its turn":
                dialect.hangs = True
                await asking.start("first")
            else:
                dialect.load = trio.Event()
                nursery.start_soon(engine.update_weights, WeightUpdate(1, path=folder))
                await closed(engine)
            await asking.start("a")
            sent = len(dialect.works)
            await engine.abort("a")
            assert asking.found["a"] == Generation([], [], "abort", []) and len(dialect.works) == sent
            dialect.load.set()
            dialect.finish()
        assert not engine._requests

    run(test, reads_files=True)


def test_a_server_that_hears_no_abort_is_left():
    async def test() -> None:
        for deaf in (True, False):
            dialect = Fake() if deaf else Silent()
            dialect.hangs, dialect.is_deaf = True, deaf
            async with engine_of(dialect) as engine, trio.open_nursery() as nursery:
                asking = Asking(nursery, engine)
                await asking.start("a")
                await engine.abort("a")
                assert asking.found["a"].finish == "abort" and not asking.found["a"].tokens and not dialect.running

    run(test)


def test_cancellation_leaves_nothing():
    async def test() -> None:
        dialect = Fake()
        dialect.hangs = True
        async with engine_of(dialect, connections_max=2) as engine:
            async with trio.open_nursery() as nursery:
                asking = Asking(nursery, engine)
                for session in "abc":
                    await asking.start(session)
                assert len(dialect.running) == 2
                nursery.cancel_scope.cancel()
            assert not engine._requests and not dialect.running and engine._limiter.borrowed_tokens == 0

    run(test)


# --- weights ----------------------------------------------------------------------------------------------------------


def test_requests_end_before_weights_are_loaded_and_new_ones_wait(folder):
    async def test() -> None:
        dialect = Fake()
        dialect.hangs = True
        async with engine_of(dialect) as engine, trio.open_nursery() as nursery:
            asking = Asking(nursery, engine)
            await asking.start("before")
            nursery.start_soon(engine.update_weights, WeightUpdate(3, path=folder))
            await closed(engine)
            await asking.start("after")
            assert not dialect.said and not asking.found and len(dialect.running) == 1
            dialect.finish()
            await settled()
            assert dialect.said == [("full", 3, 0)]
        assert asking.found["before"].versions == [0, 0] and asking.found["after"].versions == [3, 3]

    run(test, reads_files=True)


def test_requests_that_are_kept_say_which_weights_sampled_what(folder):
    async def test() -> None:
        dialect = Fake()
        dialect.keeps_requests, dialect.hangs, dialect.ids = True, True, [5] * 6
        async with engine_of(dialect) as engine, trio.open_nursery() as nursery:
            asking = Asking(nursery, engine)
            await asking.start("kept")
            for version in (3, 4):
                await engine.update_weights(WeightUpdate(version, path=folder))
            dialect.spans = (("default", 0, 2), ("3", 2, 3), ("4", 3, 6))
            dialect.finish()
            await settled()
            assert asking.found["kept"].versions == [0, 0, 3, 4, 4, 4]
            dialect.spans = (("4", 0, 6),)
            assert (await engine.generate(ask())).versions == [4] * 6

    run(test, reads_files=True)


def test_requests_keep_their_adapter_and_the_one_before_the_last_is_forgotten(folder):
    async def test() -> None:
        dialect = Fake()
        dialect.keeps_requests = True
        async with engine_of(dialect, lora_rank=4) as engine, trio.open_nursery() as nursery:
            asking = Asking(nursery, engine)
            update = [WeightUpdate(version, "adapter", folder) for version in range(5)]
            await engine.update_weights(update[1])
            dialect.hangs = True
            await asking.start("one")
            await engine.update_weights(update[2])  # beside the first
            await asking.start("two")
            nursery.start_soon(engine.update_weights, update[3])  # not before the first one's requests are over
            await closed(engine)
            assert dialect.said == [("adapter", 1, ""), ("adapter", 2, "")] and engine.version == 2
            dialect.running[dialect.works[0].name].set()
            await settled()
            assert dialect.said[2:] == [("adapter", 3, "v1")] and engine.version == 3
            del dialect.said[:]
            dialect.finish()
            await settled()
            assert [asking.found[name].versions for name in ("one", "two")] == [[1, 1], [2, 2]]
            assert [work.model for work in dialect.works] == ["v1", "v2"]
        assert dialect.said == [("unload", "v2"), ("unload", "v3")], "who leaves takes with it what it brought"

    run(test, reads_files=True)


def test_without_keeping_the_last_adapter_is_forgotten_at_once(folder):
    async def test() -> None:
        dialect = Fake()
        async with engine_of(dialect, lora_rank=4) as engine:
            for version in (1, 2):
                await engine.update_weights(WeightUpdate(version, "adapter", folder))
        assert dialect.said == [("adapter", 1, ""), ("adapter", 2, "v1"), ("unload", "v2")]

    run(test, reads_files=True)


@pytest.mark.parametrize("how", ["refuses", "hangs", "cancelled"])
def test_a_server_that_unloads_no_adapter_is_left_all_the_same(folder, how):
    async def test() -> None:
        dialect = Fake()
        with trio.CancelScope() as scope:
            async with engine_of(dialect, lora_rank=4) as engine:
                await engine.update_weights(WeightUpdate(1, "adapter", folder))
                dialect.fails = how == "refuses"
                dialect.load = trio.Event() if how == "hangs" else dialect.load
                if how == "cancelled":
                    scope.cancel()
                    await trio.sleep_forever()
        assert dialect.said[1:] == ([] if how == "hangs" else [("unload", "v1")])

    run(test, reads_files=True)


@pytest.mark.parametrize("alone", [False, True])
def test_scoring_with_an_adapter_is_done_alone_where_that_harms_others(folder, alone):
    """Also where those that wait have every turn."""

    class Scoring(Fake):
        async def score(self, *arguments: Any, **named: Any) -> list[float]:
            self.said.append(("score", len(self.running)))
            await trio.sleep(0.01)
            self.said.append(("scored", len(self.running)))
            return await Fake.score(self, *arguments, **named)

    async def test() -> None:
        dialect = Scoring()
        dialect.scores_adapters_alone = alone
        async with engine_of(dialect, lora_rank=4, connections_max=2) as engine:
            await engine.update_weights(WeightUpdate(1, "adapter", folder))
            assert engine.capabilities.scores_alone is alone
            dialect.hangs = True
            async with trio.open_nursery() as nursery:
                nursery.start_soon(engine.generate, GenerateRequest([1], 4, (), 0, session="before"))
                await trio.sleep(0.01)
                nursery.start_soon(engine.score, [1, 2])
                await trio.sleep(0.01)
                for name in ("a", "b", "c"):
                    nursery.start_soon(engine.generate, GenerateRequest([1], 4, (), 0, session=name))
                await trio.sleep(0.02)
                dialect.finish()
        counts = [count for what, count in (each[:2] for each in dialect.said) if what in ("score", "scored")]
        assert counts == [0, 0] if alone else counts[0] == 1

    run(test, reads_files=True)


def test_without_adapters_none_is_unloaded(folder):
    async def test() -> None:
        dialect = Fake()
        async with engine_of(dialect) as engine:
            await engine.update_weights(WeightUpdate(1, path=folder))
        assert dialect.said == [("full", 1, 0)]

    run(test, reads_files=True)


@pytest.mark.parametrize("kept", [False, True])
def test_after_a_failed_update_every_request_fails_at_once_until_one_succeeds(folder, kept):
    async def test() -> None:
        dialect = Fake()
        dialect.fails, dialect.keeps_requests, dialect.load = True, kept, trio.Event()
        async with engine_of(dialect) as engine, trio.open_nursery() as nursery:
            asking = Asking(nursery, engine)
            dialect.hangs = kept
            if kept:
                await asking.start("under way")
            failures = []

            async def update() -> None:
                try:
                    await engine.update_weights(WeightUpdate(3, path=folder))
                except InferenceError as error:
                    failures.append(str(error))

            nursery.start_soon(update)
            await closed(engine)
            await asking.start("waiting")
            dialect.load.set()
            await settled()
            assert len(failures) == 1 and "did not load version 3: the disk is full" in failures[0]
            for error in asking.found.values():
                assert isinstance(error, InferenceError) and not error.is_transient and "the disk is full" in str(error)
            assert len(asking.found) == 1 + kept and not dialect.running
            health = await engine.health()
            assert not health.ok and "the disk is full" in health.detail and engine.version == 0
            dialect.fails = dialect.hangs = False
            await engine.update_weights(WeightUpdate(3, path=folder))
            assert (await engine.generate(ask())).versions == [3, 3] and (await engine.health()).ok

    run(test, reads_files=True)


def test_scores_of_another_temperature_are_refused_before_anything_is_asked():
    async def test() -> None:
        async with engine_of(dialect := Fake()) as engine:
            with pytest.raises(InferenceError, match=r"temperature 1 only, got 0\.7") as caught:
                await engine.score([1, 2], 0.7)
            assert not caught.value.is_transient and not dialect.works

    run(test)


def test_an_update_that_is_cancelled_while_the_server_loads_leaves_it_closed(folder):
    async def test() -> None:
        dialect = Fake()
        dialect.load = trio.Event()
        async with engine_of(dialect) as engine:
            with trio.move_on_after(1):
                await engine.update_weights(WeightUpdate(3, path=folder))
            with pytest.raises(InferenceError, match=r"the update was cancelled while .* loaded version 3"):
                await engine.generate(ask())
            with pytest.raises(InferenceError, match=r"the update was cancelled while .* loaded version 3"):
                await engine.score([1, 2])

    run(test, reads_files=True)


def test_an_update_that_is_cancelled_before_changes_nothing(folder):
    async def test() -> None:
        dialect = Fake()
        dialect.hangs = True
        async with engine_of(dialect, request_seconds=5) as engine, trio.open_nursery() as nursery:
            asking = Asking(nursery, engine)
            await asking.start("a")
            with trio.move_on_after(1):
                await engine.update_weights(WeightUpdate(3, path=folder))
            with pytest.raises(InferenceError, match="has not finished its requests after 5 seconds"):
                await engine.update_weights(WeightUpdate(3, path=folder))
            dialect.finish()
            assert (await engine.generate(ask("b"))).versions == [0, 0] and not dialect.said

    run(test, reads_files=True)


def test_files_that_no_server_can_load_are_not_sent(tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    text = written(tmp_path / "text")
    (text / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0no json at all, no. ")
    short = written(tmp_path / "short")
    (short / "model.safetensors").write_bytes((short / "model.safetensors").read_bytes()[:-1])
    cut = written(tmp_path / "cut")
    (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:20])
    long, bare = written(tmp_path / "long", extra=b"\0"), written(tmp_path / "bare", config="readme.md")
    cases = {
        tmp_path / "nowhere": "no .safetensors file", empty: "no .safetensors file", text: "is not a safetensors file",
        short: "not fully covered", cut: "is truncated", long: "not fully covered",
        bare: "neither config.json nor adapter_config.json",
    }  # fmt: skip

    async def test() -> None:
        dialect = Fake()
        async with engine_of(dialect) as engine:
            for path, words in cases.items():
                with pytest.raises(InferenceError, match=words) as raised:
                    await engine.update_weights(WeightUpdate(3, path=str(path)))
                assert not raised.value.is_transient
            for update in (WeightUpdate(3), WeightUpdate(3, "adapter", str(long))):
                with pytest.raises(InferenceError, match="takes full weights in a folder"):
                    await engine.update_weights(update)
            assert not dialect.said and (await engine.generate(ask())).versions == [0, 0]

    run(test)
