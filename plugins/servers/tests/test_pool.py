"""ServerPool: who is asked, where requests go whose server dies, and which weights are served.

The servers are fakes in this process, and time is made up: `trio.testing.MockClock`.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st
from rollouts_servers import server
from rollouts_servers.checks import ServerSetup
from rollouts_servers.dialect import Sampled, ServerInfo
from rollouts_servers.http import HTTPFailure
from rollouts_servers.server import HEALTH_REQUEST, Server
from rollouts_servers.server_pool import ServerPool

from rollouts.errors import ConfigError, InferenceError
from rollouts.inference.base import (
    Capabilities,
    GenerateRequest,
    Generation,
    Probe,
    WeightUpdate,
    members_of,
)

TURN_SECONDS = 1.0


class Machine:
    """A model server: it lives or not, and has the last weights of this incarnation (0: those it began with)."""

    def __init__(self, name: str, log: list[str] | None = None) -> None:
        self.name, self.log = name, [] if log is None else log
        self.is_up, self.hangs, self.refuses_weights = True, False, 0
        self.weights = 0
        self.died = trio.Event()
        self.generated: list[Any] = []
        self.working = 0
        self.faults: list[Exception] = []

    def kill(self) -> None:
        self.is_up = self.hangs = False
        self.died.set()

    def revive(self) -> None:
        self.kill()
        self.is_up, self.weights, self.died = True, 0, trio.Event()
        self.log.append(f"{self.name} up")

    async def ask(self, seconds: float) -> None:
        """Raises HTTPFailure where the server is not there, or dies meanwhile."""
        await trio.lowlevel.checkpoint()
        if self.is_up and self.hangs:
            await self.died.wait()
        if self.is_up:
            with trio.move_on_after(seconds):
                await self.died.wait()
            if self.is_up and not self.died.is_set():
                return
        raise HTTPFailure("refused", f"{self.name}: no connection", retryable=True)


class Speech:
    """The dialect of a Machine. What it samples is by the weights that the machine has, whatever is believed."""

    keeps_requests = scores_adapters_alone = False
    adapter_flags = weights_flags = logprobs_flags = "--flag"

    def __init__(self, machine: Machine, context_tokens_max: int = 100) -> None:
        self.machine, self.context_tokens_max = machine, context_tokens_max
        self.software = f"fake {machine.name}"
        self.aborted: dict[str, trio.Event] = {}

    async def handshake(self, client):
        await trio.lowlevel.checkpoint()
        if not self.machine.is_up:
            raise HTTPFailure("refused", "it is not there", retryable=True)
        await self.machine.ask(0.01)
        self.machine.log.append(f"{self.machine.name} is well")
        return ServerInfo(self.software, ("policy",), self.context_tokens_max)

    async def generate(self, client, request, work):
        if request is HEALTH_REQUEST:
            await self.machine.ask(0.01)
            return Sampled([0], [-1.0], "length")
        self.machine.working += 1
        version = int(work.salt.rpartition("-")[2])
        aborted = self.aborted[work.name] = trio.Event()
        try:
            if self.machine.faults:
                raise self.machine.faults.pop(0)
            async with trio.open_nursery() as nursery:

                async def stop() -> None:
                    await aborted.wait()
                    nursery.cancel_scope.cancel()

                nursery.start_soon(stop)
                await self.machine.ask(TURN_SECONDS)
                nursery.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            self.machine.working -= 1
        if aborted.is_set():
            return Sampled([request.seed], [-1.0], "abort")
        assert version == self.machine.weights, "an old version was served"
        self.machine.generated.append(request.seed)
        return Sampled([request.seed, 1], [-1.0, -1.0], "stop")

    async def abort(self, client, names):
        if self.machine.hangs:
            raise HTTPFailure("timeout", "no answer", retryable=True)
        for name in names:
            self.aborted[name].set()

    async def score(self, client, tokens, work):
        await self.machine.ask(0.01)
        return [0.0, *(-float(self.machine.weights + 1) for _ in tokens[1:])]

    async def load_full(self, client, update):
        with trio.move_on_after(30):
            await self.machine.ask(0.1)
            if self.machine.refuses_weights:
                self.machine.refuses_weights -= 1
                raise InferenceError("the file is damaged")
            self.machine.weights = update.version
            self.machine.log.append(f"{self.machine.name} loads {update.version}")
            return
        raise HTTPFailure("timeout", "no answer", retryable=True)


@pytest.fixture(autouse=True)
def no_files(monkeypatch):
    """That files are looked at, in a thread, is for `test_server`: here time is made up."""

    async def check(*_):
        await trio.lowlevel.checkpoint()

    monkeypatch.setattr(server, "check_update", check)


class Process:
    """Starts a Machine here."""

    def __init__(self, server: Machine, start_seconds: float = 20.0) -> None:
        self.server, self.start_seconds = server, start_seconds
        self.url, self.starts, self.fails = "", 0, 0
        server.is_up = False

    async def start(self, smoke):
        self.server.kill()
        await trio.sleep(self.start_seconds)
        self.starts += 1
        if self.fails:
            self.fails -= 1
            raise ConfigError("it ended before it was ready")
        self.server.revive()
        self.url = f"http://127.0.0.1:{self.starts}"
        await smoke(self.url)

    async def wait(self):
        await self.server.died.wait()
        return "SIGKILL"

    async def end(self):
        self.server.kill()
        self.url = ""

    def last_lines(self):
        return "  out of memory"


GIVE_UP_SECONDS = 100.0
SETUP = ServerSetup(
    vocabulary_size=64, weights_folder="w", tolerance=0.25, load_seconds=30, health_seconds=10, watch_seconds=5,
    back_seconds=0.5, restarts_max=3,
)  # fmt: skip


def pool_of(*machines: Machine, launched: tuple[Process, ...] = (), **settings):
    servers = [Server(Speech(each), f"http://{each.name}", SETUP) for each in machines]
    servers += [Server(Speech(each.server), "", SETUP, process=each, name=each.server.name) for each in launched]
    return ServerPool(servers, give_up_seconds=GIVE_UP_SECONDS, **settings)


def run(main, *arguments):
    with_clock = functools.partial(trio.run, clock=trio.testing.MockClock(autojump_threshold=0))
    return with_clock(main, *arguments)


def request(seed: int, session: str | None = None, order=()):
    return GenerateRequest([1, 2], 2, (), seed, session=session, order=tuple(order))


def update(version: int) -> WeightUpdate:
    return WeightUpdate(version, path=f"v{version}", probe=Probe([1, 2], [0.0, -float(version + 1)], 1e-4))


def where(*servers: Machine) -> list[int]:
    return [len(server.generated) for server in servers]


# --- who is asked -----------------------------------------------------------------------------------------------------


def test_it_is_what_it_should_be():
    a, b = Machine("a"), Machine("b")

    async def main():
        pool = ServerPool([Server(Speech(a, 100), "http://a", SETUP), Server(Speech(b, 60), "http://b", SETUP)])
        assert pool.capabilities == Capabilities(
            owns_weights=True, weights_as="folder", weights_folder="w", tolerance=0.25, load_seconds=30, aborts=True,
            checks=True, is_pool=True, has_states=True,
        )  # fmt: skip
        assert pool.vocabulary_size == 64
        await pool.check()
        assert members_of(pool) == ()
        async with pool:
            assert pool.context_tokens_max == 60
            assert [repr(member) for member in members_of(pool)] == ["fake a at http://a", "fake b at http://b"]
            assert not any(member.capabilities.is_pool for member in members_of(pool))
            assert members_of(pool)[0].capabilities.aborts
            assert (await pool.health()).ok and not (await pool.health()).detail
            b.kill()
            health = await pool.health()
            assert health.ok and "http://b" in health.detail and "http://a" not in health.detail, "those at fault"
        with pytest.raises(ConfigError, match="fake b at http://b cannot be used: it is not there"):
            await pool.check()

    run(main)


def test_the_least_loaded_is_asked_and_an_episode_stays():
    a, b = Machine("a"), Machine("b")

    async def main():
        async with pool_of(a, b) as pool, trio.open_nursery() as nursery:
            for seed in range(10):  # ten prompts, one rollout each, three turns
                session = pool.open_session((seed, 0))

                async def play(session=session, seed=seed):
                    for turn in range(3):
                        await pool.generate(request(10 * seed + turn, session, (seed, 0, turn)))
                    pool.close_session(session)

                nursery.start_soon(play)
        assert where(a, b) == [15, 15]
        assert {seed // 10 for seed in a.generated}.isdisjoint(seed // 10 for seed in b.generated)
        assert [each.sessions for each in pool.statistics().servers] == [0, 0]

    run(main)


def test_rollouts_of_one_prompt_share_a_server_unless_it_is_much_busier():
    a, b = Machine("a"), Machine("b")

    async def main(orders):
        a.generated.clear(), b.generated.clear()
        async with pool_of(a, b) as pool, trio.open_nursery() as nursery:
            sessions = [pool.open_session(order) for order in orders]
            clock = trio.lowlevel.current_clock()
            clock.autojump_threshold = math.inf  # no reply comes before all have asked
            for order, session in zip(orders, sessions, strict=True):
                nursery.start_soon(pool.generate, request(order[0], session, (*order, 0)))
                await trio.testing.wait_all_tasks_blocked()  # trio would begin tasks in any order
            clock.autojump_threshold = 0

    by_prompt = [(group, rollout) for group in range(8) for rollout in range(4)]
    for orders in (by_prompt, sorted(by_prompt, key=lambda order: order[1])):
        run(main, orders)
        assert where(a, b) == [16, 16] and not set(a.generated) & set(b.generated)
    run(main, [(0, rollout) for rollout in range(8)])  # one prompt alone must not leave a server idle
    assert sorted(where(a, b)) == [3, 5]


# --- servers die ------------------------------------------------------------------------------------------------------


def test_requests_of_a_dead_server_are_carried_elsewhere():
    a, b = Machine("a"), Machine("b")
    said = []

    async def main():
        async with pool_of(a, b, changed=said.append) as pool:
            answers = {}

            async def ask(seed):
                answers[seed] = await pool.generate(request(seed, pool.open_session((seed, 0)), (seed, 0, 0)))

            async with trio.open_nursery() as nursery:
                for seed in range(8):
                    nursery.start_soon(ask, seed)
                await trio.sleep(TURN_SECONDS / 2)
                assert a.working == b.working == 4
                a.kill()
            assert {seed: answer.tokens for seed, answer in answers.items()} == {n: [n, 1] for n in range(8)}
            assert where(a, b) == [0, 8] and pool.statistics().rerouted == 4
            assert [each.state for each in pool.statistics().servers] == ["down", "ready"]
            assert members_of(pool) == (pool.servers[1],)
            a.revive()
            await trio.sleep(5)
            assert len(members_of(pool)) == 2
            await ask(9)
            assert where(a, b) == [1, 8]

    run(main)
    heads = [line.partition(": ")[0] for line in said]
    assert sorted(heads[:2]) == ["fake a at http://a serves", "fake b at http://b serves"]
    assert heads[2:] == ["fake a at http://a is down", "fake a at http://a serves again"]


def test_one_that_hangs_is_found_out():
    """No connection breaks, and there are no other requests: the watch sees it."""
    a, b = Machine("a"), Machine("b")

    async def main():
        async with pool_of(a, b) as pool:
            a.hangs = True
            start = trio.current_time()
            answers = []

            async def ask(seed):
                answers.append(await pool.generate(request(seed)))

            async with trio.open_nursery() as nursery:
                for seed in range(4):
                    nursery.start_soon(ask, seed)
            assert len(answers) == 4 and where(a, b) == [0, 4]
            assert trio.current_time() - start < SETUP.watch_seconds + SETUP.health_seconds + 2 * TURN_SECONDS
            assert "did not generate in 10 seconds" in pool.statistics().servers[0].reason

    run(main)


def test_a_failure_of_one_that_lives_is_asked_again_and_what_it_refuses_is_not():
    a, b = Machine("a"), Machine("b")

    async def main():
        async with pool_of(a, b) as pool:
            a.faults = [HTTPFailure("server", "status 500", retryable=True, status=500)]
            assert (await pool.generate(request(1))).tokens == [1, 1]
            assert where(a, b) == [0, 1]  # another one, although it lives
            a.faults = [HTTPFailure("client", "status 400: too long", retryable=False, status=400)]
            with pytest.raises(HTTPFailure, match="too long"):
                await pool.generate(request(2))
            a.faults = [InferenceError("token id 99 is outside the vocabulary", is_transient=False)]
            with pytest.raises(InferenceError, match="outside"):
                await pool.generate(request(3))
            a.faults = [HTTPFailure("busy", f"status 429 {n}", retryable=True, status=429) for n in range(9)]
            b.faults = list(a.faults)
            with pytest.raises(HTTPFailure, match="429"):
                await pool.generate(request(4))
            assert all(each.state == "ready" and not each.deaths for each in pool.statistics().servers)
            assert len(await pool.score([1, 2, 3])) == 3

    run(main)


def test_a_request_that_kills_servers_is_given_up():
    processes = tuple(Process(Machine(name), 1.0) for name in "ab")

    async def main():
        async with pool_of(launched=processes) as pool:

            async def killer():
                while True:
                    await trio.sleep(0.1)
                    for each in processes:
                        if each.server.working:
                            each.server.kill()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(killer)
                with pytest.raises(InferenceError, match="5 servers died during one request"):
                    await pool.generate(request(1))
                nursery.cancel_scope.cancel()
            assert pool.statistics().failed == 1

    run(main)


def test_no_server_left_names_every_server():
    a, b = Machine("a"), Machine("b")

    async def main():
        async with pool_of(a, b) as pool:
            start = trio.current_time()
            a.kill(), b.kill()
            with pytest.raises(InferenceError) as caught:
                await pool.generate(request(1))
            assert GIVE_UP_SECONDS <= trio.current_time() - start <= GIVE_UP_SECONDS + 5
            words = str(caught.value)
            assert "no server was available for 100 seconds" in words
            assert (
                "fake a at http://a, down: fake a at http://a cannot be used" in words
                and "fake b at http://b, down" in words
            )
            with pytest.raises(InferenceError, match="no server was available"):  # the next one does not wait again
                await pool.update_weights(update(1))
            assert not (await pool.health()).ok

    run(main)


def test_a_request_waits_for_a_server_to_come_back():
    a = Machine("a")

    async def main():
        async with pool_of(a) as pool, trio.open_nursery() as nursery:
            a.kill()

            async def later():
                await trio.sleep(60)
                a.revive()

            nursery.start_soon(later)
            assert (await pool.generate(request(1))).tokens == [1, 1]

    run(main)


def test_one_that_was_started_here_is_started_again_and_lost_in_the_end():
    process = Process(Machine("a"))

    async def main():
        async with pool_of(launched=(process,)) as pool:
            assert process.starts == 1
            process.server.kill()
            await trio.sleep(0.1)  # without a request: the process is watched
            assert pool.statistics().servers[0].state == "down"
            assert (await pool.generate(request(1))).tokens == [1, 1]
            assert process.starts == 2
            found = pool.statistics().servers[0]
            assert (found.state, found.deaths, found.restarts) == ("ready", 1, 1)
            assert "its process ended (SIGKILL); its log ends with\n  out of memory" in found.reason
            process.fails = 99
            process.server.kill()
            with pytest.raises(InferenceError, match=r"no server is left:\n  .*lost: it ended before it was ready"):
                await pool.generate(request(2))
            assert process.starts == 2 + SETUP.restarts_max
        assert not process.server.is_up
        assert pool.statistics().servers[0].state == "lost", "also when the pool has ended"

    run(main)


def test_one_that_serves_to_the_end_is_down_then_and_not_lost():
    async def main():
        async with pool_of(launched=(process := Process(Machine("a")),)) as pool:
            assert pool.statistics().servers[0].state == "ready"
        assert pool.statistics().servers[0].state == "down" and not process.server.is_up

    run(main)


# --- weights ----------------------------------------------------------------------------------------------------------


def test_a_returning_server_has_the_weights_before_it_serves():
    log: list[str] = []
    a, b = Machine("a", log), Machine("b", log)

    async def main():
        async with pool_of(a, b) as pool:
            await pool.update_weights(update(1))
            assert pool.version == 1 and (a.weights, b.weights) == (1, 1)
            a.kill()
            await pool.generate(request(1)), await pool.generate(request(2))
            await pool.update_weights(update(2))  # the dead one is left out
            assert (a.weights, b.weights) == (1, 2)
            log.clear()
            a.revive()
            await trio.sleep(4)
            assert log[:3] == ["a up", "a is well", "a loads 2"]
            for seed in range(4):
                assert (await pool.generate(request(seed))).versions == [2, 2]
            assert len(a.generated) > 0

    run(main)


def test_a_server_that_was_restarted_unseen_is_given_its_weights_again():
    a = Machine("a")

    async def main():
        async with pool_of(a) as pool:
            await pool.update_weights(update(3))
            a.revive()  # somebody else's doing, between two requests
            await trio.sleep(SETUP.watch_seconds + 1)
            assert a.weights == 3 and pool.statistics().servers[0].deaths == 1
            assert "does not serve the weights of version 3" in pool.statistics().servers[0].reason
            assert (await pool.generate(request(1))).versions == [3, 3]

    run(main)


def test_an_adapter_that_is_gone_is_loaded_again():
    a = Machine("a")

    async def main():
        async with pool_of(a) as pool:
            await pool.update_weights(update(3))
            a.revive()
            a.faults = [HTTPFailure("client", "status 404: no such model", retryable=False, status=404)]
            assert (await pool.generate(request(1))).versions == [3, 3]
            a.faults = [HTTPFailure("client", "status 404: no such model", retryable=False, status=404)]
            with pytest.raises(HTTPFailure, match="404"):  # with the right weights it is an answer
                await pool.generate(request(1))

    run(main)


def test_weights_that_are_not_taken():
    a, b, process = Machine("a"), Machine("b"), Process(Machine("c"))

    async def main():
        async with pool_of(a, b, launched=(process,)) as pool:
            process.server.refuses_weights = 1  # started again, it takes them
            await pool.update_weights(update(1))
            assert process.starts == 2 and process.server.weights == 1 and len(members_of(pool)) == 3
            process.server.refuses_weights = 9
            with pytest.raises(InferenceError, match="version 2: the file is damaged; it was restarted, and failed"):
                await pool.update_weights(update(2))
            process.server.refuses_weights = 0
            await trio.sleep(60)
            assert process.server.weights == 2
            a.refuses_weights = 1  # it is somebody else's, and lives: that is for a person to see
            with pytest.raises(InferenceError, match=r"fake a at http://a did not load version 3: the file is damaged"):
                await pool.update_weights(update(3))

    run(main)


@pytest.mark.parametrize("kind", ["there", "launched"])
def test_a_server_that_dies_while_it_loads(kind):
    a, b = Machine("a"), Machine("b")
    process = Process(b)
    if kind == "there":
        b.is_up = True

    async def main():
        pool = pool_of(a, b) if kind == "there" else pool_of(a, launched=(process,))
        async with pool, trio.open_nursery() as nursery:

            async def kill():
                await trio.sleep(0.05)
                b.kill()

            nursery.start_soon(kill)
            await pool.update_weights(update(1))
            assert a.weights == 1
            if kind == "there":
                assert len(members_of(pool)) == 1
                b.revive()
                await trio.sleep(10)
            assert b.weights == 1 and len(members_of(pool)) == 2

    run(main)


# --- abort, cancellation, the end -------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["working", "hanging", "none serves"])
def test_abort_gives_back_what_there_is(how):
    a = Machine("a")

    async def main():
        async with pool_of(a) as pool, trio.open_nursery() as nursery:
            session = pool.open_session((0, 0))
            await pool.abort(session)  # harmless
            found, over = [], trio.Event()

            async def ask():
                found.append(await pool.generate(request(7, session, (0, 0, 0))))
                over.set()

            a.hangs = how == "hanging"
            if how == "none serves":
                a.kill()
            nursery.start_soon(ask)
            await trio.sleep(0.5)
            await pool.abort(session)
            with trio.fail_after(SETUP.health_seconds + 10):
                await over.wait()
            assert found[0].finish == "abort"
            assert found[0].tokens == ([7] if how == "working" else [])
            a.revive()
            pool.close_session(session)
            nursery.cancel_scope.cancel()

    run(main)


def test_a_reply_that_a_server_gives_up_by_itself_is_asked_again():
    a, b = Machine("a"), Machine("b")

    async def main():
        async with pool_of(a, b) as pool:
            pool.open_session((0, 0))
            dialect = pool.servers[0].dialect
            generate = dialect.generate

            async def gives_up(client, request, *arguments, **settings):
                if request is HEALTH_REQUEST:
                    return await generate(client, request, *arguments, **settings)
                return Sampled([5], [-1.0], "abort")

            dialect.generate = gives_up
            assert (await pool.generate(request(1))).finish == "stop"

    run(main)


def test_leaving_ends_everything_and_raises_what_was_raised():
    process = Process(Machine("a"))

    async def main():
        with pytest.raises(ValueError, match="mine"):
            async with pool_of(launched=(process,)):
                raise ValueError("mine")
        assert not process.server.is_up
        with trio.CancelScope() as scope:
            async with pool_of(launched=(process,)) as pool:
                scope.cancel()
                await pool.generate(request(1))
        assert scope.cancelled_caught and not process.server.is_up
        assert process.server.working == 0

    run(main)


def test_one_that_cannot_be_started_ends_the_others():
    good, bad = Process(Machine("good"), 5.0), Process(Machine("bad"), 1.0)
    bad.fails = 1

    async def main():
        prepared = []

        async def prepare():
            await trio.lowlevel.checkpoint()
            prepared.append(good.starts)

        with pytest.raises(ConfigError, match="ended before it was ready"):
            async with pool_of(launched=(good, bad), prepare=prepare):
                raise AssertionError("entered")
        assert prepared == [0] and not good.server.is_up

    run(main)


# --- whatever happens -------------------------------------------------------------------------------------------------

EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            ["kill 0", "kill 1", "kill 2", "hang 0", "hang 2", "revive 0", "revive 1", "fault 1", "update"]
        ),
        st.floats(0.01, 3.0),
    ),
    max_size=14,
)


@given(EVENTS, st.integers(1, 24))
def test_every_request_is_answered_once_by_weights_that_are_current(events, episodes):
    """Two servers that are there, and one that is started here; every one may die at any time, in any order."""
    servers = [Machine(name) for name in "abc"]
    process = Process(servers[2], 3.0)
    served: dict[tuple[int, int], list[Generation]] = {}
    synced = [0]

    async def episode(pool: ServerPool, number: int) -> None:
        session = pool.open_session((number // 4, number % 4))
        for turn in range(4):
            before = synced[0]
            reply = await pool.generate(request(10 * number + turn, session, (number // 4, number % 4, turn)))
            served.setdefault((number, turn), []).append(reply)
            assert min(reply.versions) >= before, "sampled with weights older than the last sync"
            await trio.sleep(0.1)
        pool.close_session(session)

    async def weather(pool: ServerPool) -> None:
        for event, seconds in events:
            await trio.sleep(seconds)
            word, _, number = event.partition(" ")
            if word == "kill":
                servers[int(number)].kill()
            elif word == "hang":
                servers[int(number)].hangs = True
            elif word == "revive":
                servers[int(number)].kill()
                await trio.sleep(2 * SETUP.watch_seconds)  # a model takes its time to load
                servers[int(number)].revive()
            elif word == "fault":
                servers[int(number)].faults.append(HTTPFailure("reset", "it broke", retryable=True))
            else:
                await pool.update_weights(update(synced[0] + 1))
                synced[0] += 1
                assert {member.dialect.machine.weights for member in members_of(pool)} <= {synced[0]}  # type: ignore[attr-defined]

    async def main() -> None:
        async with pool_of(*servers[:2], launched=(process,)) as pool:
            with trio.fail_after(3000):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(weather, pool)
                    for number in range(episodes):
                        nursery.start_soon(episode, pool, number)
            found = pool.statistics()
            assert [(each.sessions, each.in_flight) for each in found.servers] == [(0, 0)] * 3
        assert [server.working for server in servers] == [0, 0, 0] and not servers[2].is_up

    run(main)
    assert sorted(served) == [(number, turn) for number in range(episodes) for turn in range(4)]
    for (number, turn), replies in served.items():
        (reply,) = replies
        assert reply.tokens == [10 * number + turn, 1] and reply.finish == "stop"
