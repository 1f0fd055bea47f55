"""Workers on a Ray cluster: `--worker ray`.

driver.py   a process on the run's host: asks Ray for an actor, and passes messages on
actor.py    the actor on a node: starts the worker's process there

Each worker has a driver of its own. Ray is not imported in the process of the run, because Ray ends a driver that loses
its cluster, replaces signal handlers, and waits many minutes for an address where nothing answers.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType

import msgspec
import trio

from rollouts.child_environment import child_environment, passed_on
from rollouts.env.workers.channel import ChannelClosedError, Connection
from rollouts.env.workers.process import Options, ProcessConnector
from rollouts.errors import ConfigError, WorkerError
from rollouts_ray.driver import CONNECT_SECONDS, LOAD_SECONDS, Placed, Wanted

__all__ = ["RayWorkers"]

BOOT = "import sys; sys.path[:] = sys.argv[1:]; from rollouts_ray.driver import main; main()"
NOTHING: Mapping[str, float] = MappingProxyType({})


class RayWorkers:
    """Workers on a Ray cluster that runs already.

    Args:
        address: the cluster: `HOST:PORT`, `ray://HOST:PORT`, or `auto`: the variable RAY_ADDRESS, else the cluster of
            this host
        num_cpus: how many CPUs each worker reserves
        num_gpus: how many GPUs each worker reserves; it sees only these
        resources: what else each worker reserves, by the cluster's own names: `{ big_disk = 1 }`
        wait_seconds: how long a worker waits for a node that has all of this free
    """

    def __init__(
        self,
        environment: str,
        count: int,
        options: Options,
        *,
        address: str = "auto",
        num_cpus: float = 1.0,
        num_gpus: float = 0.0,
        resources: Mapping[str, float] = NOTHING,
        wait_seconds: float = 60.0,
    ) -> None:
        if importlib.util.find_spec("ray") is None:
            raise ConfigError(
                "--worker ray needs the package ray\ntype: pip install 'ray==VERSION', with the version of the cluster"
            )
        needs = {"CPU": num_cpus, "GPU": num_gpus, **resources}
        for name, amount in needs.items():
            if not amount >= 0:
                raise ConfigError(f"--worker ray: {name} must be 0 or more; got {amount}")
        self._wanted = Wanted(
            address=address,
            environment=environment,
            count=count,
            needs={name: amount for name, amount in needs.items() if amount},
            wait_seconds=wait_seconds,
            options=msgspec.structs.replace(options, only=environment),
            folder=os.getcwd(),
            variables=passed_on(),
        )
        command = [sys.executable, "-c", BOOT, *sys.path]
        self._drivers = ProcessConnector(child_environment(("RAY_*",)), options, command=command)
        self._has_started = False

    async def open(self, log: Callable[[bytes], None]) -> Connection:
        """Start a worker on the cluster. The first one is refused at once if the cluster has no room for all; later
        ones wait, because a node may come back. Raises WorkerError.
        """
        driver = await self._drivers.open(log)
        try:
            wanted = msgspec.structs.replace(self._wanted, is_first=not self._has_started)
            with trio.fail_after(2 * (CONNECT_SECONDS + self._wanted.wait_seconds) + LOAD_SECONDS):
                await driver.channel.send(msgspec.json.encode(wanted))
                placed = msgspec.json.decode(await driver.channel.receive(), type=Placed)
        except ChannelClosedError as error:
            raise WorkerError(f"the process that speaks to Ray ended ({await driver.end()})") from error
        except trio.TooSlowError as error:
            await driver.end()
            raise WorkerError(f"the Ray cluster ({self._wanted.address}) does not answer") from error
        except trio.Cancelled:
            await driver.end()
            raise
        if placed.problem:
            await driver.end()
            raise WorkerError(placed.problem)
        self._has_started = True
        return driver
