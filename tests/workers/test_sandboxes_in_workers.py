"""Sandboxes in workers: the numbers of inline, no reward of 0 for a lost one, and none left of a dead worker."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forks
import psutil
import pytest
import trio
from comparing import ENVS, SHORT, both, episodes_of, workers

import rollouts
from rollouts.config.resolving import resolve
from rollouts.env.workers.library import OpenSandboxes
from rollouts.env.workers.protocol import SandboxSent
from rollouts.errors import ConfigError, UnknownComponentError, WorkerError
from rollouts.runs.dry_run import dry_run
from rollouts.runs.plan import make_plan
from rollouts.runs.workers import worker_pools
from rollouts.sandboxes import SubprocessSandboxes
from rollouts.types import Task

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="supervisors spare each other on Linux only"),
]

NIGHTLY = pytest.mark.nightly
BOXED = f"{ENVS}:Boxed"


@pytest.fixture(autouse=True)
def boxes(tmp_path, monkeypatch):
    """The folder in which sandboxes are made, here and in workers."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "boxes"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with worker_pools():
        yield folder
    assert folders(folder) == [] and not workers()


def folders(boxes: Path) -> list[Path]:
    """The folders of the sandboxes."""
    return list(boxes.glob("rollouts-sandbox-*"))


def keepers() -> list[psutil.Process]:
    """The keepers of sandboxes, below this process."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended; perhaps another test left it so
            found += [child] if "keeper.py" in " ".join(child.cmdline()) else []
    return found


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    "given",
    [
        {"mode": "eval", "eval_tasks": 1},
        pytest.param({"worker": {"kind": "process", "count": 2}}, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_the_numbers_are_those_of_a_run_without_worker(given):
    _, apart = both(BOXED, **given)
    assert {episode["status"] for episode in episodes_of(apart)} == {"completed"}


@pytest.mark.slow
def test_a_lost_sandbox_is_no_reward_of_0():
    _, apart = both({"name": BOXED, "kind": "lost"}, mode="eval", eval_tasks=3, retries=0, max_failures=20)
    episodes = episodes_of(apart)
    assert len(episodes) == 6
    for episode in episodes:
        is_lost = int(episode["task"]["answer"]) % 2 == 1
        assert (episode["status"] == "environment_error") == is_lost
        assert (episode["reward"] is None) == is_lost
        assert not is_lost or "the sandbox was lost" in json.dumps(episode)
    assert {episode["status"] for episode in episodes} == {"environment_error", "completed"}


def test_a_dry_run_opens_one_in_the_worker():
    found = [dry_run(resolve({"env": BOXED, "worker": kind, "eval_tasks": 1})) for kind in ("inline", "process")]
    lines = [[line for line in text.splitlines() if "sandbox" in line or "stop" in line] for text in found]
    assert lines[0] == lines[1] and any("opened, and ran `true`" in line for line in lines[1])


def opened(env: Any, count: int) -> Any:
    """Open some episodes, and wait until all have a sandbox."""

    async def main() -> None:
        async def one(number: int) -> None:
            made = await env.make_env.call()
            lease = made.remote_lease(env.sandboxes)
            await lease.open.call(seconds=60.0)
            await made.setup.call(Task(f"Say {number}.", answer=number), seconds=60.0)
            held.append((made, lease))

        async with trio.open_nursery() as nursery:
            for number in range(count):
                nursery.start_soon(one, number)

    held: list[Any] = []
    trio.run(main)
    return held


@pytest.mark.parametrize(
    "how",
    [
        "killed",
        "episode",
        pytest.param("closed", marks=NIGHTLY),
        pytest.param("forgotten", marks=pytest.mark.slow),
    ],
)
def test_sandboxes_end_with_the_worker_or_the_episode(how, boxes):
    (env,) = make_plan(resolve({"env": BOXED, "worker": "process", "eval_tasks": 0})).environments
    before = keepers()  # those of other tests, if any
    held = opened(env, 2)
    kept = [each for each in keepers() if each not in before]
    assert len(folders(boxes)) == 2 and len(kept) >= 2
    if how == "killed":
        (worker,) = workers()
        worker.kill()
        with pytest.raises(WorkerError, match="SIGKILL"):
            trio.run(functools.partial(held[0][0].setup.call, Task("Say 1."), seconds=30.0))
    elif how == "closed":
        env.remote.pool.close()
    elif how == "episode":
        for made, lease in held:
            trio.run(made.close.call)
            trio.run(lease.close.call)
            assert lease.lost == ""
    held.clear()  # the objects are forgotten
    _, alive = psutil.wait_procs(kept, timeout=60)
    assert not alive
    until(lambda: not folders(boxes))
    assert env.remote.pool.deaths == (how == "killed")


RUN = f"""\
import rollouts
rollouts.run(env={BOXED!r}, worker="process", out="run", steps=1000, prompts_per_step=2, samples_per_prompt=2,
    eval_tasks=0, max_tokens=32, quiet=True)
"""


@pytest.mark.slow
def test_nothing_is_left_of_a_run_that_is_killed(boxes):
    process = forks.popen([sys.executable, "-c", RUN])
    try:
        while not Path("run/metrics.jsonl").exists() or not folders(boxes):
            assert process.poll() is None
            time.sleep(0.01)
        children = psutil.Process(process.pid).children(recursive=True)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        _, alive = psutil.wait_procs(children, timeout=60)
        assert not alive
    finally:
        process.kill()
        process.wait()


def test_a_server_opens_only_the_sandbox_that_it_allows(boxes):
    async def refused(allows: SandboxSent | None, asked: SandboxSent) -> str:
        with pytest.raises(ConfigError) as caught:
            await OpenSandboxes("mine", allows).show(asked)
        return str(caught.value)

    async def main() -> None:
        plain = SandboxSent("subprocess", {"memory_gib": 1.0}, 4)
        assert "rollouts env serve mine --sandbox subprocess" in await refused(None, plain)
        allows = SandboxSent("subprocess", {"memory_gib": 2.0})
        assert "type: --sandbox subprocess --sandbox.memory-gib 2.0" in await refused(allows, plain)
        assert "type: --sandbox other" in await refused(SandboxSent("other", {}), plain)
        shown = await OpenSandboxes("mine", SandboxSent("subprocess", {"memory_gib": 1.0})).show(plain)
        assert shown.words == SubprocessSandboxes.words
        with pytest.raises(UnknownComponentError, match="did you mean: subprocess"):
            await OpenSandboxes().show(SandboxSent("subproces", {}))

    trio.run(main)


def test_a_class_of_the_program_is_refused():
    class Mine(SubprocessSandboxes):
        """Mine."""

    with pytest.raises(ConfigError, match=r"sandbox: Mine is an object of this program.*\n.*my_sandboxes:NAME"):
        rollouts.run(env=BOXED, sandbox=Mine, worker="process", **SHORT)
