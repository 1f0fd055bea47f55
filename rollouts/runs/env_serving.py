"""Serve an environment until a signal comes: finds it, asks a worker what it has, and says what is exposed."""

from __future__ import annotations

from collections.abc import Callable

import trio

from rollouts.config.flags import Tree, flag_name
from rollouts.config.workers import WorkerSettings
from rollouts.env.installing import find_installed
from rollouts.env.workers.library import read_sandbox, settings_as_sent
from rollouts.env.workers.pool import WorkerPool
from rollouts.env.workers.process import Options, ProcessConnector
from rollouts.env.workers.protocol import Description, SandboxSent
from rollouts.env.workers.websocket import Address, library, serve_environment
from rollouts.errors import ConfigError, UnknownComponentError, WorkerError
from rollouts.plugins.manager import PluginManager
from rollouts.runs.connectors import own_connector, venv_connector
from rollouts.sandboxes.base import make_sandboxes


def serve_until_signal(name: str, address: Address, options: Options, say: Callable[[str], None]) -> None:
    """Serve the environment of this name. `options` are those of its workers. `say` is called with one line that says
    what is exposed, and with later messages. Raises ConfigError, and PluginError if the environment cannot be loaded.
    """
    library()
    connector = _connector(name, options)
    pool = WorkerPool(name, connector, WorkerSettings())
    try:
        about: Description = pool.call("describe", {"name": name})
        if options.sandbox is not None:
            pool.call("show_sandbox", options.sandbox)
    except WorkerError as error:
        raise ConfigError(str(error)) from error
    finally:
        pool.close()
    sandbox = options.sandbox.name if options.sandbox is not None else "none"

    def ready(port: int) -> None:
        url = address.url(port)
        token, tls = ("yes" if each else "no" for each in (address.token, address.tls))
        settings = ", ".join(about.settings) or "none"
        exposed = f"settings that runs choose: {settings}; sandbox: {sandbox}; token: {token}; TLS: {tls}"
        say(f"serving {name} at {url} ({exposed})")
        token_flag = " --worker.token-file FILE" if address.token else ""
        say(f"type: rollouts run --env {name} --loss grpo --worker {url}{token_flag}")

    trio.run(serve_environment, address, connector, say, ready)


def served_sandbox(name: str, given: Tree) -> SandboxSent | None:
    """The sandbox of this name, with its settings in a tree of flags; None without a name. Raises UserError."""
    settings = given.get("sandbox", {})
    for table, first in ((key, next(iter(value))) for key, value in given.items()):
        if table != "sandbox":
            raise ConfigError(f"{flag_name((table, first))}: runs choose it; leave it out here")
        if not name:
            raise ConfigError(f"{flag_name((table, first))}: name the sandbox too: --sandbox NAME")
    if not name:
        return None
    component, converted = read_sandbox(name, settings)
    make_sandboxes(name, component, converted, 1)
    return SandboxSent(name, settings_as_sent(converted))


def _connector(name: str, options: Options) -> ProcessConnector:
    """How to start a worker of the environment: in this Python, else in the virtual environment that has it."""
    try:
        PluginManager().find("environments", name)
    except UnknownComponentError as error:
        try:
            return venv_connector(find_installed(name), options)
        except UnknownComponentError:
            raise error from None
    return own_connector(options)
