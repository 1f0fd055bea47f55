"""What starts the workers of an environment: the Python of this process or of a virtual environment, an address, or a
package's component.
"""

from __future__ import annotations

import os
from pathlib import Path

from rollouts.child_environment import child_environment
from rollouts.config.files import Source
from rollouts.config.merging import Component
from rollouts.config.workers import VENV, WorkerSettings, unknown_kind
from rollouts.env.installing import Installed, find_installed
from rollouts.env.workers.channel import Connector
from rollouts.env.workers.process import Options, ProcessConnector
from rollouts.env.workers.websocket import URLConnector, read_token
from rollouts.errors import SignatureError, UnknownComponentError
from rollouts.plugins.manager import PluginManager
from rollouts.plugins.signature import converted
from rollouts.runs.components import Chosen, make_component, signed

TOKEN = "ROLLOUTS_WORKER_TOKEN"
"""The environment variable with the token for workers at an address."""

KIND = "workers"
"""The kind of the components that start workers."""


def connector_of(component: Component, settings: WorkerSettings, manager: PluginManager, source: Source) -> Connector:
    """What starts the workers of an environment. Raises UserError."""
    if settings.is_url:
        return URLConnector(settings.kind, token=_token(settings), certificate=settings.certificate)
    options = Options(settings.memory_gib, settings.cpu_seconds)
    if settings.is_component:
        return _connector_of_package(component, settings, options, manager, source)
    if settings.kind == VENV:
        return venv_connector(find_installed(component.name), options)
    return own_connector(options)


def _connector_of_package(
    component: Component, settings: WorkerSettings, options: Options, manager: PluginManager, source: Source
) -> Connector:
    """What starts workers of a package's kind."""
    kind = settings.kind
    try:
        ref = manager.find(KIND, kind)
    except UnknownComponentError as error:
        raise unknown_kind(kind, [each.name for each in manager.list(KIND)]) from error
    label = f"the worker {kind}"
    found, signature = signed(manager.load(ref), KIND, label)
    given = converted(signature, settings.own, label, source, ("worker",))
    available = {"environment": component.name, "count": settings.count, "options": options}
    made = make_component("worker", Chosen(kind, found, given, ref), available)
    if not isinstance(made, Connector):
        raise SignatureError(
            f"{label} made {type(made).__name__}, which has no `open`\nwrite `async def open(self, log)`, as "
            "rollouts.env.workers.channel.Connector describes it"
        )
    return made


def lock_of(component: Component, settings: WorkerSettings) -> Path | None:
    """The file with the packages of an environment that has a virtual environment of its own."""
    return find_installed(component.name).lock if settings.kind == VENV else None


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
