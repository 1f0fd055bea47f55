"""Kinds of workers that come from packages: their settings, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import trio

import rollouts
from rollouts.config.files import load_as_written
from rollouts.config.flags import Flag
from rollouts.config.resolving import resolve
from rollouts.config.workers import WorkerSettings, read_workers, workers_of
from rollouts.env.workers import pool as pools
from rollouts.env.workers.pool import WorkerLease, WorkerPool
from rollouts.env.workers.process import Options, ProcessConnector, worker_command
from rollouts.errors import ConfigError, SignatureError, UserError, WorkerError
from rollouts.runs.plan import make_plan
from rollouts.runs.workers import worker_pools

SHORT = {"prompts_per_step": 2, "samples_per_prompt": 2, "eval_tasks": 3, "steps": 2, "max_tokens": 64}
TIMED = ("time/", "perf/", "sync/seconds", "rollout/latency", "eval/latency", "eval/wall_", "eval/cpu_")
KINDS = '''\
"""Kinds of workers that were made for a test."""

import json
import os

from rollouts.child_environment import child_environment
from rollouts.env.workers.process import Options, ProcessConnector, worker_command


class Noted:
    """Processes, and a file that says how they were wanted."""

    def __init__(self, count, environment, *, place: str = "here", sizes: dict[str, float] = {}):
        with open("noted.jsonl", "a") as file:
            file.write(json.dumps([environment, count, place, sizes]) + "\\n")
        self._processes = ProcessConnector(child_environment(), command=worker_command(Options()))

    async def open(self, log):
        return await self._processes.open(log)


def nothing():
    return 3


def curious(secrets):
    return 3


def raises():
    raise KeyError("nowhere")
'''


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("kinds.py").write_text(KINDS)


def logged(folder: str) -> list[dict[str, Any]]:
    lines = map(json.loads, Path(folder, "metrics.jsonl").read_text().splitlines())
    return [{key: value for key, value in line.items() if not key.startswith(TIMED)} for line in lines]


@pytest.mark.slow
def test_the_numbers_are_those_of_a_run_without_worker():
    given = {"env": "calculator", "mode": "eval", **SHORT}
    rollouts.run(out="inline", **given)
    worker = {"kind": "./kinds.py:Noted", "count": 2, "place": "there", "sizes": {"a": 1}}
    rollouts.run(out="apart", worker=worker, **given)
    assert logged("apart") == logged("inline")
    assert json.loads(Path("noted.jsonl").read_text()) == ["calculator", 2, "there", {"a": 1.0}]
    with worker_pools():
        make_plan(resolve(*load_as_written(Path("apart/config.toml"))))  # the run's own file repeats it
    first, again = Path("noted.jsonl").read_text().splitlines()
    assert first == again


def test_each_environment_has_its_own_settings():
    given = {
        "kind": "far",
        "count": 2,
        "place": "north",
        "sizes": {"a": 1.0},
        "easy": "inline",
        "hard": {"place": "south"},
        "other": {"kind": "near", "depth": 2},
    }
    table = read_workers(given)
    assert read_workers(table) == table
    found = workers_of(table, [(alias, "calculator") for alias in ("easy", "hard", "other", "rest")])
    sizes = {"sizes": {"a": 1.0}}
    assert found["easy"] == WorkerSettings("inline", 2)
    assert found["hard"] == WorkerSettings("far", 2, own={"place": "south"} | sizes)
    assert found["other"] == WorkerSettings("near", 2, own={"depth": 2})
    assert found["rest"] == WorkerSettings("far", 2, own={"place": "north"} | sizes)


def test_a_flag_with_a_table():
    table = read_workers({"kind": "far", "sizes": Flag("{ a = 1 }", {"a": 1}), "place": Flag("north", "north")})
    assert table == {"kind": "far", "sizes": {"a": 1}, "place": "north"}


@pytest.mark.parametrize(
    ("worker", "error", "said"),
    [
        ("procss", ConfigError, r"got 'procss'\ndid you mean: process\?"),
        ({"kind": "process", "cout": 2}, ConfigError, r"a worker has no setting 'cout'\ndid you mean: count\?"),
        ({"kind": "process", "easy": {"count": 2}}, ConfigError, "no environment has the alias 'easy'"),
        ({"kind": "./kinds.py:Noted", "plqce": "there"}, ConfigError, r"has no setting 'plqce'\ndid you mean: place\?"),
        ({"kind": "./kinds.py:Noted", "sizes": {"a": "big"}}, ConfigError, r"worker\.sizes: expected a table"),
        ("./kinds.py:nothing", SignatureError, r"made int, which has no `open`\nwrite `async def open\(self, log\)`"),
        ("./kinds.py:curious", SignatureError, "secrets"),
        ("./kinds.py:raises", UserError, r"the worker ./kinds.py:raises cannot be made: KeyError: 'nowhere'"),
    ],
)
def test_what_is_refused(worker, error, said):
    with pytest.raises(error, match=said):
        make_plan(resolve({"env": "calculator", "worker": worker}))


def test_an_object_of_this_program_is_refused():
    class Mine:
        def tasks(self, split, rng):
            return ["Say 1."]

    with pytest.raises(ConfigError, match=re.escape("type: --worker inline")):
        rollouts.run(env=Mine, worker="./kinds.py:Noted", **SHORT)


class Scarce:
    """Starts one worker, and refuses others until it is said to have more."""

    def __init__(self) -> None:
        self.room, self.refused = 1, 0
        self._processes = ProcessConnector({}, command=worker_command(Options()))

    async def open(self, log):
        if self.room == 0:
            self.refused += 1
            await trio.sleep(0.2)
            raise WorkerError("there is no room")
        self.room -= 1
        return await self._processes.open(log)


def test_a_worker_that_cannot_be_started_does_not_get_the_episodes_of_others(monkeypatch):
    scarce = Scarce()
    pool = WorkerPool("mine", scarce, WorkerSettings("scarce", count=2))
    make = {"name": "calculator", "settings": {}}
    pool.call("make", make, lease=WorkerLease(is_episode=True))
    results: list[str] = []

    async def one() -> None:
        try:
            await pool.call_async("make", make, lease=WorkerLease(is_episode=True))
            results.append("made")
        except WorkerError as error:
            results.append(str(error))

    async def several() -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(6):
                nursery.start_soon(one)

    trio.run(several)
    assert sorted(results) == ["made"] * 5 + ["there is no room"] and scarce.refused == 1
    trio.run(several)
    assert results[6:] == ["made"] * 6 and scarce.refused == 1
    monkeypatch.setattr(pools, "REST_SECONDS", 0.0)
    for slot in pool._slots:
        slot.rests_until = 0.0
    scarce.room = 1
    trio.run(several)
    assert results[12:] == ["made"] * 6 and scarce.room == 0  # it is tried again
    pool.close()
