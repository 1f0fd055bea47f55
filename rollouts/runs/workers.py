"""The workers of a run's environments: which environment has some, and the class that the run sees in its place. The
sandboxes of a run: made only if an environment asks for one, and tried out by a dry run.

Not here: workers (`rollouts.env.workers`), what starts them (`connectors`), the setting (`rollouts.config.workers`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollouts.config.files import Source
from rollouts.config.merging import Component, parse_component
from rollouts.config.names import HELD
from rollouts.config.resolving import Resolved
from rollouts.config.workers import INLINE, VENV, WorkerSettings, workers_of
from rollouts.disk import write_whole
from rollouts.env.methods import names_input
from rollouts.env.mixing import RewardTerm
from rollouts.errors import ConfigError
from rollouts.plugins.index import ComponentRef
from rollouts.plugins.manager import PluginManager
from rollouts.runs.components import Chosen
from rollouts.runs.environments import PlannedEnvironment
from rollouts.runs.folder import PARTS, MakeFolder, RunFolder
from rollouts.runs.session import Session

if TYPE_CHECKING:
    from rollouts.env.workers.pool import WorkerPool
    from rollouts.env.workers.protocol import SandboxSent
    from rollouts.env.workers.proxy import RemoteEnvironment
    from rollouts.sandboxes.base import Sandboxes

LOGS = "workers"
"""The folder, within that of a run, of what environments print in their workers."""


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
            from rollouts.env.workers.pool import WorkerPool
            from rollouts.env.workers.proxy import remote_class
            from rollouts.runs.connectors import connector_of, lock_of

            name = component.alias or parse_component("filter", component.name).alias
            pool = WorkerPool(name, connector_of(component, settings, self._manager, self._source), settings)
            if (opened := _pools.get()) is not None:
                opened.append(pool)
            pool.lock = lock_of(component, settings)
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
        from rollouts.env.workers.proxy import configured

        return configured(loaded.pool, component.name, component.settings, source, path)


def pools_of(environments: Iterable[PlannedEnvironment]) -> dict[str, WorkerPool]:
    """The workers of the environments that have some, by alias or name of the class."""
    found = {}
    for env in environments:
        if (remote := env.remote) is not None:
            found[env.alias or remote.__name__] = remote.pool
    return found


def open_folder(
    session: Session, environments: Iterable[PlannedEnvironment], make_folder: MakeFolder, parts: Sequence[str] = PARTS
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


def death_metrics(environments: Iterable[PlannedEnvironment], summary: dict[str, Any]) -> dict[str, float]:
    """How many workers have died since the last call, as a metric, if there are any. Adds them to the summary."""
    count = sum(pool.new_deaths() for pool in pools_of(environments).values())
    if not count:
        return {}
    summary["worker_deaths"] = summary.get("worker_deaths", 0) + count
    return {"perf/worker_deaths": float(count)}


def refuse_env_of_rewards(environments: Iterable[PlannedEnvironment], rewards: Iterable[RewardTerm]) -> None:
    """Raise ConfigError if a reward of another package names `env`, and an environment has workers."""
    for env in environments:
        for term in rewards:
            if env.remote is not None and term.function is not None and "env" in term.requests:
                raise ConfigError(
                    f"the reward {term.alias} names `env`, and the environment {env.name} runs in a worker, so its "
                    "object is in another process\nwrite the reward as a @reward method of the environment, or type: "
                    "--worker inline"
                )


# --- sandboxes --------------------------------------------------------------------------------------------------------


def asks_for_sandbox(env: PlannedEnvironment) -> bool:
    """Whether the environment's `setup` names `sandbox`."""
    if env.remote is not None:
        return bool(env.make_checked().has_sandbox)
    component = env.chosen.component
    return names_input(component if hasattr(component, "setup") else env.make_checked(), "setup", "sandbox")


def with_sandboxes(
    chosen: Chosen, environments: Sequence[PlannedEnvironment], concurrency: int
) -> tuple[PlannedEnvironment, ...]:
    """The environments, each with what opens its sandboxes if it asks for one. An environment with workers has them
    there. The sandboxes are checked. Raises UserError.
    """
    asking = {env.alias for env in environments if asks_for_sandbox(env)}
    here: Sandboxes | None = None
    found = []
    for env in environments:
        if env.alias in asking and env.remote is not None:
            from rollouts.env.workers.proxy import RemoteSandboxes

            env = env._replace(sandboxes=RemoteSandboxes(env.remote.pool, _as_sent(chosen, concurrency)))
        elif env.alias in asking:
            from rollouts.sandboxes.base import make_sandboxes

            here = here or make_sandboxes(chosen.name, chosen.component, chosen.settings, concurrency)
            env = env._replace(sandboxes=here)
        found.append(env)
    return tuple(found)


def _as_sent(chosen: Chosen, concurrency: int) -> SandboxSent:
    from rollouts.env.workers.library import settings_as_sent
    from rollouts.env.workers.protocol import SandboxSent

    if chosen.ref is not None and HELD.fullmatch(chosen.ref.value):
        raise ConfigError(
            f"sandbox: {chosen.ref.name} is an object of this program, and a worker imports it by its name\n"
            'write it at the top of a module, and name it: sandbox="my_sandboxes:NAME"; or give worker="inline"'
        )
    try:
        return SandboxSent(chosen.name, settings_as_sent(chosen.settings), concurrency)
    except TypeError as error:
        raise ConfigError(
            f"--sandbox {chosen.name}: a worker opens it, so its settings must be plain data: {error}"
        ) from error


def sandbox_lines(name: str, environments: Sequence[PlannedEnvironment]) -> Iterator[str]:
    """Open a sandbox of each kind that the environments have, run `true` in it, and say what it is and what it does not
    stop. Raises ConfigError.
    """
    from rollouts.env.workers.proxy import RemoteSandboxes
    from rollouts.sandboxes.base import try_sandbox

    for sandboxes in dict.fromkeys(env.sandboxes for env in environments if env.sandboxes is not None):
        if isinstance(sandboxes, RemoteSandboxes):
            sandboxes.try_one()
        else:
            try_sandbox(name, sandboxes)
        yield f"sandbox {name}: opened, and ran `true`; {sandboxes.words}"
        yield f"  it does not stop: {'; '.join(sandboxes.not_stopped) or 'nothing that is known'}"
