"""Workers that die, hang, lie or take too much: only their own episodes fail, and the guilty one is named."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import trio
from comparing import ENVS
from comparing import workers as all_workers

import rollouts
from rollouts.config.resolving import resolve
from rollouts.config.workers import WorkerSettings
from rollouts.env.workers import pool as pools
from rollouts.env.workers.pool import WorkerPool
from rollouts.env.workers.process import ProcessConnector
from rollouts.env.workers.protocol import VERSION, Hello
from rollouts.errors import ConfigError, PluginError, RunError, WorkerError, WorkersLostError
from rollouts.runs.plan import make_plan
from rollouts.runs.workers import worker_pools
from rollouts.types import Task

SHORT: dict[str, Any] = {"prompts_per_step": 2, "samples_per_prompt": 2, "eval_tasks": 2, "max_tokens": 32}
EARLIER: set[int] = set()  # process numbers of idle workers that another file's tests left in this process


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    EARLIER.clear()
    EARLIER.update(each.pid for each in all_workers())
    with worker_pools():
        yield


def workers() -> list[psutil.Process]:
    """The worker processes that this test started."""
    return [each for each in all_workers() if each.pid not in EARLIER]


@contextlib.contextmanager
def environment(name: str, **worker: Any):
    """An environment of worker_envs.py in workers, as a run has it."""
    env = {"name": f"{ENVS}:{name.partition('-')[0]}"} | ({"kind": name.partition("-")[2]} if "-" in name else {})
    plan = make_plan(resolve({"env": env, "worker": {"kind": "process", **worker}, "eval_tasks": 0}))
    (env,) = plan.environments
    try:
        yield env
    finally:
        env.remote.pool.close()
        assert not workers()


def set_up(env: Any) -> str:
    """The words of the error of `setup` in a new episode."""

    async def main() -> None:
        made = await env.make_env.call()
        await made.setup.call(Task("Say 1."), seconds=30.0)

    with pytest.raises(WorkerError) as caught:
        trio.run(main)
    return str(caught.value)


def test_a_worker_that_exits_is_named_and_started_again():
    with environment("Hostile-exits") as env:
        assert "the worker Hostile ended (exit code 7)" in set_up(env)
        assert env.remote.pool.deaths == 1
        made = env.make()
        assert trio.run(made.close.call) is None


def test_a_worker_whose_loop_is_blocked_is_killed():
    with environment("Hostile-blocks", silent_seconds=1.0) as env:
        words = set_up(env)
        assert "the worker Hostile was silent for 1 seconds (worker.silent_seconds)" in words
        assert "something blocks its event loop" in words


def test_a_worker_whose_process_is_stopped_is_killed():
    with environment("Counting", silent_seconds=1.0) as env:
        made = env.make()
        (worker,) = workers()
        worker.send_signal(signal.SIGSTOP)
        with pytest.raises(WorkerError, match=r"was silent for 1 seconds .*: its process is stopped"):
            trio.run(made.setup.call, Task("Say 1."))


@pytest.mark.slow
def test_a_worker_that_uses_all_its_cpu_time_is_named_and_started_again():
    with environment("Hostile-spins", cpu_seconds=2.0) as env:
        assert "the worker Hostile ended (it used more than the 2 CPU seconds of worker.cpu_seconds" in set_up(env)
        assert env.remote.pool.deaths == 1
        assert trio.run(env.make().close.call) is None


@pytest.mark.slow
def test_a_worker_that_does_not_end_a_cancelled_call_is_killed(monkeypatch):
    monkeypatch.setattr(pools, "GRACE_SECONDS", 0.5)

    async def main() -> None:
        made = await env.make_env.call()
        with trio.move_on_after(0.5):
            await made.setup.call(Task("Say 1."))
        with pytest.raises(WorkerError, match="did not end a cancelled request"):
            await made.setup.call(Task("Say 1."))

    with environment("Hostile-blocks") as env:
        trio.run(main)


@pytest.mark.slow
def test_memory_has_a_limit():
    with environment("Hostile-memory", memory_gib=2.0) as env:

        async def main() -> str:
            made = await env.make_env.call()
            with pytest.raises(Exception, match="MemoryError") as caught:
                await made.setup.call(Task("Say 1."), seconds=60.0)
            await made.close.call()
            return type(caught.value).__name__

        assert trio.run(main) == "RemoteError"
        assert env.remote.pool.deaths == 0


def test_a_tool_that_forks_answers_once():
    with environment("Hostile") as env:

        async def main() -> list[Any]:
            made = await env.make_env.call()
            (fork,) = made.remote_tools()
            outcomes = [await fork.function.run(rollouts.types.ToolCall("fork"), 100, 30.0) for _ in range(3)]
            await made.close.call()
            return outcomes

        assert [outcome.text for outcome in trio.run(main)] == ["True"] * 3
        assert env.remote.pool.deaths == 0


def test_a_worker_has_one_shared_value_and_cleans_it_up():
    env = {"name": f"{ENVS}:Sharing", "log": "cleaned"}
    plan = make_plan(resolve({"env": env, "worker": "process", "eval_tasks": 2}))
    (remote,) = plan.environments
    task = plan.eval_tasks()[0]

    async def episode() -> Any:
        made = await remote.make_env.call()
        await made.setup.call(task)
        value = await made.state.call()
        await made.close.call()
        return value

    values = [trio.run(episode) for _ in range(3)]
    (worker,) = workers()
    assert values == [{"pid": worker.pid}] * 3 and task.answer == worker.pid
    assert not Path("cleaned").exists()
    remote.remote.pool.close()
    assert Path("cleaned").read_text() == f"{worker.pid}\n"


HELLO = msgspec.json.encode(Hello(VERSION)).decode()
CHANNELS = {
    "nonsense": ("print('hello, world')", "is no worker of rollouts: it said 'hello, world'"),
    "version": ('print(\'{"type":"hello","protocol":99,"rollouts":"9.1"}\')', "has rollouts 9.1, whose protocol"),
    "no hello": ('print(\'{"type":"pong","number":1}\')', "begins with 'Pong' instead of hello"),
    "exit": ("import sys; print('no space left', file=sys.stderr); sys.exit(3)", "exit code 3"),
    "later nonsense": (
        f"print('{HELLO}', flush=True); input(); print('{{'); input()",
        "sent something that is no message",
    ),
}


@pytest.mark.parametrize("what", CHANNELS)
def test_a_process_that_is_no_worker_is_named(what):
    program, words = CHANNELS[what]
    pool = WorkerPool("mine", ProcessConnector({}, command=[sys.executable, "-c", program]), WorkerSettings("process"))
    with pytest.raises(WorkerError) as caught:
        pool.call("describe", {"name": "calculator"})
    assert "the worker mine" in str(caught.value) and words in str(caught.value)
    if what == "exit":
        assert "its last words:\n  no space left" in str(caught.value)
        with pytest.raises(WorkersLostError, match=r"(?s)10 workers of mine died one after another.*--worker inline"):
            for _ in range(10):
                with contextlib.suppress(WorkerError):
                    pool.call("describe", {"name": "calculator"})
    pool.close()


def test_an_environment_that_ends_its_process_at_import_is_a_mistake_of_the_user():
    Path("bad.py").write_text(
        "import os, sys\nprint('the last words')\nsys.stdout.flush()\nos.kill(os.getpid(), 9)\nclass Bad: ...\n"
    )
    with pytest.raises(ConfigError) as caught:
        make_plan(resolve({"env": "./bad.py:Bad", "worker": "process"}))
    assert "the worker Bad ended (exit code 137 = 128 + 9, probably SIGKILL); its last words:\n  the last words" in str(
        caught.value
    )


@pytest.mark.slow
def test_an_environment_that_waits_at_import_is_named(monkeypatch):
    monkeypatch.setenv("ROLLOUTS_IMPORT_SECONDS", "3")
    Path("slow.py").write_text("import time\ntime.sleep(10**6)\n")
    with pytest.raises(PluginError, match=r"environment .*:Slow does not import\nit was still being imported"):
        make_plan(resolve({"env": "./slow.py:Slow", "worker": "process"}))


def test_episodes_wait_if_the_workers_have_too_many():
    with environment("Counting", count=2, episodes=2) as env:
        order: list[str] = []

        async def episode(number: int) -> None:
            made = await env.make_env.call()
            order.append("begin")
            await made.setup.call(Task("What is 1 + 1?", answer=2))
            held = len(order) - 2 * order.count("end")
            assert held <= 4, order
            order.append("end")
            await made.close.call()

        async def main() -> None:
            async with trio.open_nursery() as nursery:
                for number in range(12):
                    nursery.start_soon(episode, number)

        trio.run(main)
        assert order.count("end") == 12 and len(workers()) == 2


class Killer(threading.Thread):
    """Kills a worker at random moments, `count` times."""

    def __init__(self, count: int, seed: int = 0) -> None:
        super().__init__(daemon=True)
        self.count, self.killed, self.rng, self.over = count, 0, random.Random(seed), threading.Event()

    def run(self) -> None:
        first = Path("run/trajectories/step_000000.jsonl")  # before, the tasks may not have been asked for
        while not first.exists() and not self.over.wait(0.05):
            pass
        while self.killed < self.count and not self.over.wait(self.rng.uniform(0.2, 0.9)):
            for worker in self.rng.sample(found := workers(), min(1, len(found))):
                with contextlib.suppress(psutil.Error):
                    worker.send_signal(signal.SIGKILL)
                    self.killed += 1


def test_a_run_goes_on_while_workers_are_killed():
    killer = Killer(2)
    killer.start()
    worker = {"kind": "process", "count": 2}
    try:
        summary = rollouts.run(env="calculator", worker=worker, out="run", steps=4, retries=3, **SHORT)
    finally:
        killer.over.set()
        killer.join()
    assert summary["status"] == "done" and summary["steps"] == 4
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert sum(line.get("perf/worker_deaths", 0) for line in lines) <= killer.killed
    for step in range(4):
        file = Path(f"run/trajectories/step_{step:06d}.jsonl")
        episodes = [json.loads(line) for line in file.read_text().splitlines()]
        assert len(episodes) == 2 * 2, "every prompt is accounted for"
    assert not workers()


def test_a_run_whose_workers_always_die_ends_with_the_reason():
    env = {"name": f"{ENVS}:Hostile", "kind": "exits"}
    with pytest.raises(RunError) as caught:
        rollouts.run(env=env, worker="process", out="run", steps=2, retries=0, **SHORT)
    assert "Hostile ended (exit code 7)" in str(caught.value) or "died one after another" in str(caught.value)
    assert not workers()
