"""The driver of one worker: a process on the run's host that asks Ray for an actor, and passes messages on.

The first line of standard input says what is wanted (`Wanted`), and the first line of standard output whether it was
done (`Placed`). After that, all bytes go to the worker's process on the node and back. What it prints goes to standard
error. The driver ends with the exit code of the worker's process. When the driver ends in any way, Ray ends the actor.
Not here: the process on the node (`actor`).
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any, NoReturn
from urllib.parse import urlsplit

import msgspec

from rollouts.env.workers.process import Options, take_streams

CONNECT_SECONDS = 60.0  # how long Ray may take to connect
REACH_SECONDS = 5.0  # how long the host of an address may take to answer
PAUSE_SECONDS = 1.0  # between two tries
LOAD_SECONDS = 120.0  # how long a node may take to load the environment
CLEANUP_SECONDS = 10.0  # how long a worker may clean up what its environments share
CHUNK = 1 << 20
NO_CLUSTER = "Could not find any running Ray instance"  # in Ray's message
ROUNDING = 1e-6  # 0.3 / 0.1 is less than 3
OWN = ("memory", "object_store_memory", "node:")  # resources that Ray adds itself


class Wanted(msgspec.Struct):
    """The worker that a run wants. `count` is how many of them the run will have. `is_first`: fail at once if the
    cluster has no room for them.
    """

    address: str
    environment: str
    count: int
    needs: dict[str, float]
    wait_seconds: float
    options: Options
    folder: str
    variables: dict[str, str]
    is_first: bool = True


class Placed(msgspec.Struct):
    """Why there is no worker; empty if there is one."""

    problem: str = ""


class PlacingError(Exception):
    """No worker can be placed."""


def main() -> None:
    """Run until the run closes the channel, or the worker ends."""
    requests, answers = take_streams()
    log = os.dup(2)
    line = b""
    while not line.endswith(b"\n"):
        if not (chunk := os.read(requests, CHUNK)):
            os._exit(0)
        line += chunk
    try:
        actor, node = place(msgspec.json.decode(line, type=Wanted))
    except PlacingError as error:
        _write(answers, msgspec.json.encode(Placed(str(error))) + b"\n")
        os._exit(1)
    _write(answers, msgspec.json.encode(Placed()) + b"\n")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 2)  # Ray's messages about the cluster would hide the worker's last words
    os.dup2(nothing, 1)
    _Relay(actor, node, log).run(requests, answers)


class _Relay:
    """Passes bytes on between the run and the actor."""

    def __init__(self, actor: Any, node: str, log: int) -> None:
        self._actor, self._node, self._log = actor, node, log
        self._is_closing = threading.Event()

    def run(self, requests: int, answers: int) -> NoReturn:
        import ray
        from ray.exceptions import RayError

        printed = threading.Thread(target=self._pass_on, args=(2, self._log), daemon=True)
        printed.start()
        threading.Thread(target=self._answer, args=(answers, printed), daemon=True).start()
        try:
            while data := os.read(requests, CHUNK):
                ray.get(self._actor.write.remote(data))
            self._is_closing.set()
            ray.get(self._actor.end.remote(CLEANUP_SECONDS), timeout=2 * CLEANUP_SECONDS)
            printed.join(CLEANUP_SECONDS)
        except RayError as error:
            if not self._is_closing.is_set():
                self._lost(error)
        with contextlib.suppress(RayError):
            ray.kill(self._actor)
        os._exit(0)

    def _answer(self, answers: int, printed: threading.Thread) -> None:
        """Pass the worker's output on. When it ends by itself, end with its exit code."""
        import ray
        from ray.exceptions import RayError

        self._pass_on(1, answers)
        if self._is_closing.is_set():
            return
        printed.join(CLEANUP_SECONDS)
        try:
            code = ray.get(self._actor.end.remote(0.0))
        except RayError as error:
            self._lost(error)
        _write(self._log, f"it ran on the node {self._node} of the Ray cluster\n".encode())
        os._exit(code)

    def _pass_on(self, stream: int, target: int) -> None:
        import ray
        from ray.exceptions import RayError

        try:
            while data := ray.get(self._actor.read.remote(stream)):
                _write(target, data)
        except RayError as error:
            if not self._is_closing.is_set():
                self._lost(error)
        except BrokenPipeError:  # the run has closed the channel
            self._is_closing.set()

    def _lost(self, error: Exception) -> NoReturn:
        _write(self._log, f"the worker on the node {self._node} of the Ray cluster was lost: {words(error)}\n".encode())
        os._exit(1)


def place(wanted: Wanted) -> tuple[Any, str]:
    """An actor with a worker's process, and its node. Raises PlacingError."""
    address = connect(wanted.address, 0.0 if wanted.is_first else wanted.wait_seconds)
    import ray
    from ray.exceptions import GetTimeoutError, RayError

    from rollouts_ray.actor import WorkerActor

    if wanted.is_first and (problem := lack(nodes(), wanted.needs, wanted.count)):
        raise PlacingError(f"the Ray cluster at {address} {problem}")
    reserved = dict(wanted.needs)
    options = {"num_cpus": reserved.pop("CPU", 0), "num_gpus": reserved.pop("GPU", 0), "resources": reserved}
    actor = ray.remote(WorkerActor).options(scheduling_strategy="SPREAD", max_restarts=0, **options).remote()
    try:
        node = ray.get(actor.node.remote(), timeout=wanted.wait_seconds)
    except GetTimeoutError as error:
        problem = lack(nodes(), wanted.needs, 1) or f"had {_amounts(wanted.needs)} on no node free"
        raise PlacingError(
            f"the Ray cluster at {address} {problem}\nit was waited for {wanted.wait_seconds:g} s; "
            "--worker.wait-seconds is the limit"
        ) from error
    except RayError as error:
        raise PlacingError(
            f"the Ray cluster at {address} cannot start a worker: {words(error)}\ntype, on each node, in the Python of "
            "Ray: pip install rollouts-ray, and the package of the environment"
        ) from error
    started = actor.start.remote(wanted.environment, wanted.options, wanted.folder, wanted.variables)
    try:
        problem = ray.get(started, timeout=LOAD_SECONDS)
    except RayError as error:
        raise PlacingError(f"the node {node} of the Ray cluster failed: {words(error)}") from error
    if problem:
        raise PlacingError(
            f"the node {node} of the Ray cluster cannot load the environment {wanted.environment}: {problem}\n"
            "install its package on each node, in the Python of Ray; or choose nodes: --worker.resources '{ NAME = 1 }'"
        )
    return actor, node


def connect(given: str, seconds: float) -> str:
    """Connect to a cluster, which may take so long to answer. Returns its address. Raises PlacingError."""
    address = os.environ.get("RAY_ADDRESS", given) if given == "auto" else given
    if address != "auto":
        _reach(address, seconds)
    failed: list[str] = []
    done = threading.Event()

    def connect_ray() -> None:
        import ray

        try:
            ray.init(address=address, namespace="rollouts", log_to_driver=False, logging_level="error")
        except Exception as error:  # ray raises many kinds
            failed.append(words(error))
        done.set()

    threading.Thread(target=connect_ray, daemon=True).start()
    if not done.wait(CONNECT_SECONDS):
        failed.append(f"no answer in {CONNECT_SECONDS:g} s")
    if failed and address == "auto" and NO_CLUSTER in failed[0]:
        raise PlacingError(
            "no Ray cluster runs on this host\ntype: ray start --head, or give the address "
            "of a cluster: --worker.address HOST:PORT, or the variable RAY_ADDRESS"
        )
    if failed:
        raise PlacingError(f"the Ray cluster at {address} cannot be used: {failed[0]}")
    return address


def _reach(address: str, seconds: float) -> None:
    """Raise PlacingError if nothing answers at an address in this time. Ray itself would wait for many minutes."""
    try:
        parts = urlsplit(address if "://" in address else f"//{address}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port or parts.scheme not in ("", "ray"):
        raise PlacingError(f"--worker.address {address!r}: expected HOST:PORT, ray://HOST:PORT or auto")
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, port), REACH_SECONDS).close()
            return
        except OSError as error:
            if time.monotonic() + PAUSE_SECONDS > deadline:
                reason = error.strerror or error
                raise PlacingError(
                    f"no Ray cluster answers at {address} ({reason})\ntype, on that host: ray status"
                ) from error
        time.sleep(PAUSE_SECONDS)


def nodes() -> dict[str, dict[str, float]]:
    """What each living node has in total, by its name."""
    import ray

    living = [node for node in ray.nodes() if node["Alive"]]
    return {f"{node['NodeManagerAddress']} ({node['NodeID'][:6]})": node["Resources"] for node in living}


def lack(has: Mapping[str, Mapping[str, float]], needs: Mapping[str, float], count: int) -> str:
    """Why these nodes have no room for so many workers, whatever else they do; empty if they have.

    >>> lack({"a": {"CPU": 4.0}, "b": {"CPU": 1.0, "disk": 1.0}}, {"CPU": 2.0, "disk": 1.0}, 1)
    'has no node with CPU 2 and disk 1\\nits nodes: a (CPU 4), b (CPU 1, disk 1)'
    """
    room = sum(
        min((int(each.get(name, 0) / amount + ROUNDING) for name, amount in needs.items()), default=count)
        for each in has.values()
    )
    if room >= count:
        return ""
    shown = [f"{name} ({_amounts(_without_own(each), ', ') or 'nothing'})" for name, each in has.items()]
    listing = f"its nodes: {', '.join(shown)}"
    if room:
        return (
            f"has room for {room} workers with {_amounts(needs)} each, and worker.count is {count}\n{listing}\n"
            f"type: --worker.count {room}, or lower what each reserves: --worker.num-cpus 0.5"
        )
    missing = {name: most for name, most in needs.items() if all(each.get(name, 0) < most for each in has.values())}
    return f"has no node with {_amounts(missing or needs)}\n{listing}"


def _without_own(resources: Mapping[str, float]) -> dict[str, float]:
    return {name: amount for name, amount in resources.items() if not name.startswith(OWN)}


def _amounts(resources: Mapping[str, float], joint: str = " and ") -> str:
    return joint.join(f"{name} {amount:g}" for name, amount in sorted(resources.items()))


def words(error: Exception) -> str:
    """The last line of Ray's long messages that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _write(target: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(target, view) :]
