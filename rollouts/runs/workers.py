"""The workers of a run's environments: which environment has some, and the class that the run sees in its place.

Not here: workers (`rollouts.env.workers`), and the setting (`rollouts.config.workers`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from rollouts.child_environment import child_environment
from rollouts.config.files import Source
from rollouts.config.merging import Component, parse_component
from rollouts.config.names import HELD
from rollouts.config.resolving import Resolved
from rollouts.config.workers import INLINE, VENV, WorkerSettings, unknown_kind, workers_of
from rollouts.disk import write_whole
from rollouts.env.installs import Installed, find_installed
from rollouts.env.mixing import RewardTerm
from rollouts.env.workers.channel import Connector
from rollouts.env.workers.pool import WorkerPool
from rollouts.env.workers.process import Options, ProcessConnector
from rollouts.env.workers.proxy import RemoteEnvironment, configured, remote_class
from rollouts.env.workers.serving import read_token
from rollouts.env.workers.websocket import URLConnector
from rollouts.errors import ConfigError, SignatureError, UnknownComponentError
from rollouts.plugins.index import ComponentRef
from rollouts.plugins.manager import PluginManager
from rollouts.plugins.settings import converted
from rollouts.runs.components import Chosen, make_component, signed
from rollouts.runs.environments import Environment
from rollouts.runs.folder import PARTS, MakeFolder, RunFolder
from rollouts.runs.session import Session

LOGS = "workers"
"""The folder, within that of a run, of what environments print in their workers."""


TOKEN = "ROLLOUTS_WORKER_TOKEN"
"""The environment variable with the token for workers at an address."""

KIND = "workers"
"""The kind of the components that start workers."""

_pools: ContextVar[list[WorkerPool] | None] = ContextVar("rollouts-worker-pools", default=None)


@contextlib.contextmanager
def worker_pools() -> Iterator[None]:
    """A block that composes runs. Its workers have ended at its end, also if a run was refused."""
    opened: list[WorkerPool] = []
    token = _pools.set(opened)
    try:
        yield
    finally:
        _pools.reset(token)
        for pool in opened:
            pool.close()


def has_workers(resolved: Resolved) -> bool:
    """Whether an environment of a run has workers. Raises ConfigError for an alias that no environment has."""
    workers = Workers(resolved, PluginManager())
    return any(workers.has(each) for each in resolved.components["env"])


class Workers:
    """Which environments of a run have workers. Raises ConfigError for an alias that no environment has."""

    def __init__(self, resolved: Resolved, manager: PluginManager) -> None:
        names = [(each.alias, parse_component("filter", each.name).alias) for each in resolved.components["env"]]
        self._settings = workers_of(resolved.settings.worker, names)
        self._source, self._manager, self._rows = resolved.source, manager, resolved.source.objects.rows
        self._classes: dict[tuple[str, str], type[RemoteEnvironment]] = {}

    def has(self, component: Component) -> bool:
        """Whether this environment runs in workers."""
        return self._settings.get(component.alias, WorkerSettings()).kind != INLINE

    def is_elsewhere(self, component: Component) -> bool:
        """Whether this environment runs in workers that have packages of their own, so this Python may lack it."""
        settings = self._settings.get(component.alias, WorkerSettings())
        return settings.kind == VENV or settings.is_url or settings.is_component

    def load(self, component: Component, ref: ComponentRef | None) -> type[RemoteEnvironment]:
        """The class that behaves as the environment, loaded once. Raises PluginError, and ConfigError if no worker
        starts, or if another process cannot find the environment.
        """
        key, settings = (component.alias, component.name), self._settings[component.alias]
        if HELD.fullmatch(component.name if ref is None else ref.value):
            raise ConfigError(
                f"--worker {settings.kind}: {component.name.strip('<>')} is an object of this program, and a worker "
                "imports the environment by its name\nwrite it at the top of a module, and name it: --env my_envs:NAME;"
                " or type: --worker inline"
            )
        if key not in self._classes:
            name = component.alias or parse_component("filter", component.name).alias
            pool = WorkerPool(name, self._connector(component, settings), settings)
            if (opened := _pools.get()) is not None:
                opened.append(pool)
            if settings.kind == VENV:
                pool.lock = find_installed(component.name).lock
            self._classes[key] = remote_class(pool, component.name)
        return self._classes[key]

    def settings(self, component: Component, source: Source, path: Sequence[str]) -> dict[str, Any]:
        """All settings of an environment that `load` has loaded, checked. Raises ConfigError."""
        loaded = self._classes[component.alias, component.name]
        data = component.settings.get("data")
        if (data.get("name") if isinstance(data, Mapping) else data) in self._rows:
            raise ConfigError(
                f"--worker {loaded.pool.settings.kind}: the rows of `prompts` are in the memory of this program, and a "
                'worker reads files\nwrite them to a file, and give data="rows.jsonl" instead; or give worker="inline"'
            )
        return configured(loaded.pool, component.name, component.settings, source, path)

    def _connector(self, component: Component, settings: WorkerSettings) -> Connector:
        if settings.is_url:
            return URLConnector(settings.kind, token=_token(settings), certificate=settings.certificate)
        options = Options(settings.memory_gib, settings.cpu_seconds)
        if settings.is_component:
            return self._connector_of_package(component, settings, options)
        if settings.kind == VENV:
            return venv_connector(find_installed(component.name), options)
        return own_connector(options)

    def _connector_of_package(self, component: Component, settings: WorkerSettings, options: Options) -> Connector:
        """What starts workers of a package's kind."""
        kind = settings.kind
        try:
            ref = self._manager.find(KIND, kind)
        except UnknownComponentError as error:
            raise unknown_kind(kind, [each.name for each in self._manager.list(KIND)]) from error
        label = f"the worker {kind}"
        found, signature = signed(self._manager.load(ref), KIND, label)
        given = converted(signature, settings.own, label, self._source, ("worker",))
        available = {"environment": component.name, "count": settings.count, "options": options}
        made = make_component("worker", Chosen(kind, found, given, ref), available)
        if not isinstance(made, Connector):
            raise SignatureError(
                f"{label} made {type(made).__name__}, which has no `open`\nwrite `async def open(self, log)`, as "
                "rollouts.env.workers.channel.Connector describes it"
            )
        return made


def _token(settings: WorkerSettings) -> str:
    if settings.token_file:
        return read_token(Path(settings.token_file), "--worker.token-file")
    return os.environ.get(TOKEN, "")


def own_connector(options: Options) -> ProcessConnector:
    """Starts workers in the Python of this process."""
    return ProcessConnector(child_environment(), options)


def venv_connector(installed: Installed, options: Options) -> ProcessConnector:
    """Starts workers in a virtual environment."""
    environment, venv = child_environment(), installed.venv
    environment |= {
        "VIRTUAL_ENV": str(venv),
        "PATH": f"{installed.python.parent}{os.pathsep}{os.environ.get('PATH', '')}",
    }
    return ProcessConnector(environment, options, python=installed.python)


def pools_of(environments: Iterable[Environment]) -> dict[str, WorkerPool]:
    """The workers of the environments that have some, by alias or name of the class."""
    found = {}
    for env in environments:
        if (remote := env.remote) is not None:
            found[env.alias or remote.__name__] = remote.pool
    return found


def open_folder(
    session: Session, environments: Iterable[Environment], make_folder: MakeFolder, parts: Sequence[str] = PARTS
) -> RunFolder:
    """Open the session's folder. What environments print in workers is written there, and the workers end with the
    session.
    """
    folder = session.open(make_folder, parts)
    for name, pool in pools_of(environments).items():
        pool.log_to(Path(folder.path) / LOGS, name)
        if pool.lock is not None:
            lock = Path(folder.path) / LOGS / f"{name}.lock"
            lock.parent.mkdir(exist_ok=True)
            write_whole(lock, pool.lock.read_bytes())
        session.resources.callback(pool.close)
    return folder


def death_metrics(environments: Iterable[Environment], summary: dict[str, Any]) -> dict[str, float]:
    """How many workers have died since the last call, as a metric, if there are any. Adds them to the summary."""
    count = sum(pool.new_deaths() for pool in pools_of(environments).values())
    if not count:
        return {}
    summary["worker_deaths"] = summary.get("worker_deaths", 0) + count
    return {"perf/worker_deaths": float(count)}


def refuse_env_of_rewards(environments: Iterable[Environment], rewards: Iterable[RewardTerm]) -> None:
    """Raise ConfigError if a reward of another package names `env`, and an environment has workers."""
    for env in environments:
        for term in rewards:
            if env.remote is not None and term.function is not None and "env" in term.requests:
                raise ConfigError(
                    f"the reward {term.alias} names `env`, and the environment {env.name} runs in a worker, so its "
                    "object is in another process\nwrite the reward as a @reward method of the environment, or type: "
                    "--worker inline"
                )
