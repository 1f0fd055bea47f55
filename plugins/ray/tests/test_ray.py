"""Workers on a real Ray cluster: the same numbers as inline; workers, actors and nodes that die; and one
clear error for each thing that can be wrong.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import rollouts_ray
from rollouts_ray.driver import lack

import rollouts
from rollouts.config.workers import WorkerSettings
from rollouts.env.workers.pool import WorkerLease, WorkerPool
from rollouts.env.workers.process import Options
from rollouts.errors import ConfigError, WorkerError

needs_ray = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed: pip install ray==2.60.0"),
    pytest.mark.slow,
]
SHORT: dict[str, Any] = {"prompts_per_step": 2, "samples_per_prompt": 2, "eval_tasks": 3, "steps": 2, "max_tokens": 64}
TIMED = ("time/", "perf/", "sync/seconds", "rollout/latency", "eval/latency", "eval/wall_", "eval/cpu_")
END_SECONDS = 60.0
ENV = '''\
"""An environment whose process, actor or node is killed in the middle of an episode, if a file says so."""

import os
import time

import psutil

from rollouts import Task, reward


class Fragile:
    """Asks for a number."""

    def tasks(self, split, rng):
        yield from (Task(f"Say {n}.", id=f"{split} {n}") for n in range(1000))

    def setup(self, task):
        print("playing")
        with open("pids", "a") as file:
            file.write(f"{os.getpid()}\\n")
        for how in ("process", "actor", "node"):
            try:
                os.rename(how, f"{how}-taken")
            except FileNotFoundError:
                continue
            if how == "process":
                os.kill(os.getpid(), 9)
            elif how == "actor":
                psutil.Process().parent().parent().kill()
            time.sleep(60)

    @reward
    def length(self, trajectory):
        return len(trajectory.last_text) / 100
'''


class RayCluster:
    """The process of a cluster."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        command = [sys.executable, str(Path(__file__).with_name("ray_cluster.py")), folder]
        self._log = open(Path(folder, "cluster.log"), "w")
        environment = os.environ | {"RAY_TMPDIR": folder}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, env=environment
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        assert self.address, Path(folder, "cluster.log").read_text()

    def do(self, command: str) -> None:
        """Remove or add the node `away`, and wait until it is done."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        started = psutil.Process(self.process.pid).children(recursive=True)
        self.process.stdin.close()
        try:
            self.process.wait(END_SECONDS)
        finally:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()
            self._log.close()
            for each in started:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
            psutil.wait_procs(started, END_SECONDS)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    folder = tempfile.mkdtemp(prefix="ray-")  # the path of a socket in it must be short
    Path(folder, "only_at_home.py").write_text(ENV)
    started = RayCluster(folder)
    yield started
    started.close()
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def two_nodes(cluster: RayCluster) -> RayCluster:
    """The cluster with another node, `away`."""
    cluster.do("add")
    return cluster


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    Path("fragile.py").write_text(ENV)


def logged(folder: str) -> list[dict[str, Any]]:
    lines = map(json.loads, Path(folder, "metrics.jsonl").read_text().splitlines())
    return [{key: value for key, value in line.items() if not key.startswith(TIMED)} for line in lines]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + END_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def worker_pids() -> set[int]:
    return set(map(int, Path("pids").read_text().split())) if Path("pids").exists() else set()


class TestCluster:
    pytestmark = needs_ray

    def test_the_numbers_are_those_of_a_run_without_worker(self, cluster):
        worker = {"kind": "ray", "address": cluster.address}
        rollouts.run(env="calculator", loss="grpo", out="inline", **{**SHORT, "steps": 1})
        rollouts.run(env="calculator", loss="grpo", out="ray", worker=worker, **{**SHORT, "steps": 1})
        assert logged("ray") == logged("inline") and len(logged("ray")) == 1

    @pytest.mark.nightly
    def test_a_process_an_actor_and_a_node_die_and_the_run_goes_on(self, two_nodes):
        ways = ["process", "actor", "node"]

        def order(report: Any) -> None:
            if ways:
                Path(ways.pop(0)).touch()

        def remove() -> None:
            wait_until(Path("node-taken").exists)
            two_nodes.do("remove")
            two_nodes.do("add")

        remover = threading.Thread(target=remove)
        remover.start()
        worker = {"kind": "ray", "address": two_nodes.address, "count": 2, "resources": {"away": 1.0}}
        given = {**SHORT, "steps": 6, "retries": 3, "eval_tasks": 0}
        rollouts.run(
            env="./fragile.py:Fragile", loss="grpo", filter="none", on_step=order, worker=worker, out="run", **given
        )
        remover.join()
        summary = json.loads(Path("run/summary.json").read_text())
        assert summary["steps"] == 6 and 3 <= summary["worker_deaths"] <= 4  # both workers were on the node
        assert all(Path(f"{how}-taken").exists() for how in ("process", "actor", "node"))
        found = [line["rollout/infra_fail_frac"] for line in logged("run") if "rollout/infra_fail_frac" in line]
        assert found == [0.0] * 6  # every episode of every prompt was played to its end
        assert all("playing" in Path(f"run/workers/Fragile-{number}.log").read_text() for number in (1, 2))
        assert len(worker_pids()) >= 5 and os.getpid() not in worker_pids()
        wait_until(lambda: not any(map(psutil.pid_exists, worker_pids())))

    @pytest.mark.nightly
    @pytest.mark.parametrize(
        ("how", "said"),
        [
            ("process", r"ended \(exit code 137.*\n.*playing\n  it ran on the node [0-9.]+ of the Ray cluster"),
            ("actor", r"the worker on the node [0-9.]+ of the Ray cluster was lost: "),
        ],
    )
    def test_the_error_of_a_dead_worker_names_the_node(self, how, said, cluster):
        made = rollouts_ray.RayWorkers("./fragile.py:Fragile", 1, Options(), address=cluster.address)
        pool, lease = WorkerPool("there", made, WorkerSettings(kind="ray")), WorkerLease(is_episode=True)
        pool.call("make", {"name": "./fragile.py:Fragile", "settings": {}}, lease=lease)
        Path(how).touch()
        with pytest.raises(WorkerError, match=said):
            pool.call("setup", {"prompt": "Say 1.", "messages": []}, lease=lease)
        pool.close()

    @pytest.mark.nightly
    def test_the_end_of_a_run_that_is_killed(self, cluster):
        flags = ["--worker", "ray", "--worker.address", cluster.address, "--steps", "1000", "--out", "run"]
        command = [sys.executable, "-m", "rollouts", "run", "--env", "./fragile.py:Fragile", "--loss", "grpo", *flags]
        run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            wait_until(lambda: bool(worker_pids()))
        finally:
            run.send_signal(signal.SIGKILL)
            run.wait()
        wait_until(lambda: not any(map(psutil.pid_exists, worker_pids())))

    @pytest.mark.nightly
    def test_a_resource_that_the_cluster_lacks(self, cluster):
        worker = {"kind": "ray", "address": cluster.address, "resources": {"big_disk": 1.0}}
        with pytest.raises(ConfigError, match=r"has no node with big_disk 1\nits nodes: .*\(CPU 2, home 2\)"):
            rollouts.run(env="calculator", worker=worker, **SHORT)

    @pytest.mark.nightly
    @pytest.mark.parametrize(
        ("settings", "said"),
        [
            ({"num_gpus": 1.0}, "has no node with GPU 1"),
            ({"resources": {"home": 1.0, "away": 1.0}}, "has no node with CPU 1 and away 1 and home 1"),
            ({"count": 9}, "has room for 4 workers with CPU 1 each, and worker.count is 9"),
        ],
    )
    def test_what_two_nodes_lack(self, settings, said, two_nodes):
        with pytest.raises(ConfigError, match=said):
            rollouts.run(env="calculator", worker={"kind": "ray", "address": two_nodes.address, **settings}, **SHORT)

    @pytest.mark.nightly
    def test_what_is_in_use(self, cluster):
        def pool(**own: Any) -> WorkerPool:
            made = rollouts_ray.RayWorkers("calculator", 1, Options(), address=cluster.address, **own)
            return WorkerPool("there", made, WorkerSettings(kind="ray"))

        first, second = pool(resources={"home": 2.0}), pool(resources={"home": 1.0}, wait_seconds=2.0)
        assert first.call("describe", {"name": "calculator"}).class_name == "Calculator"
        with pytest.raises(WorkerError, match=r"on no node free\n.*--worker.wait-seconds is the limit"):
            second.call("describe", {"name": "calculator"})
        first.close()
        third = pool(resources={"home": 1.0})
        assert third.call("describe", {"name": "calculator"}).class_name == "Calculator"
        second.close()
        third.close()

    @pytest.mark.nightly
    def test_an_environment_that_no_node_has(self, cluster):
        worker = {"kind": "ray", "address": cluster.address}
        with pytest.raises(ConfigError, match=r"the environment only_there:Fragile: .*there is no module"):
            rollouts.run(env="only_there:Fragile", loss="grpo", worker=worker, **SHORT)

    @pytest.mark.nightly
    def test_a_node_that_cannot_import_the_environment(self, two_nodes):
        own = {"address": two_nodes.address, "resources": {"home": 1.0}}
        pool = WorkerPool(
            "there", rollouts_ray.RayWorkers("only_at_home:Fragile", 1, Options(), **own), WorkerSettings(kind="ray")
        )
        assert pool.call("describe", {"name": "only_at_home:Fragile"}).class_name == "Fragile"
        pool.close()
        worker = {"kind": "ray", "address": two_nodes.address, "resources": {"away": 1.0}}
        with pytest.raises(ConfigError, match=r"the environment only_at_home:Fragile: .*there is no module"):
            rollouts.run(env="only_at_home:Fragile", loss="grpo", worker=worker, **SHORT)


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed: pip install ray==2.60.0")
@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("127.0.0.1:1", r"no Ray cluster answers at 127.0.0.1:1 \(Connection refused\)"),
        pytest.param("ray://127.0.0.1:1", r"no Ray cluster answers at ray://127.0.0.1:1", marks=pytest.mark.nightly),
        ("somewhere", "expected HOST:PORT, ray://HOST:PORT or auto"),
        pytest.param("http://127.0.0.1:1", "expected HOST:PORT, ray://HOST:PORT or auto", marks=pytest.mark.nightly),
    ],
)
def test_addresses_without_a_cluster(address, said):
    with pytest.raises(ConfigError, match=said):
        rollouts.run(env="calculator", worker={"kind": "ray", "address": address}, **SHORT)


def test_ray_is_missing(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the package ray\ntype: pip install 'ray=="):
        rollouts_ray.RayWorkers("calculator", 1, Options())


def test_a_negative_amount(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    with pytest.raises(ConfigError, match="big_disk must be 0 or more; got -1"):
        rollouts_ray.RayWorkers("calculator", 1, Options(), resources={"big_disk": -1.0})


@pytest.mark.parametrize("count", [1, 6, 7])
def test_room_is_counted_by_node(count):
    has = {"a": {"CPU": 0.3, "node:a": 1.0}, "b": {"CPU": 0.35}, "c": {"GPU": 4.0}}
    assert bool(lack(has, {"CPU": 0.1}, count)) == (count > 6)
    assert lack(has, {}, count) == ""
