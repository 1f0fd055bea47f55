"""The sandboxes of a run: made only if an environment asks for one, and tried out by a dry run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rollouts.config.names import HELD
from rollouts.env.methods import names_input
from rollouts.env.workers.describe import SandboxSent, settings_as_sent
from rollouts.env.workers.remote_sandboxes import RemoteSandboxes
from rollouts.errors import ConfigError
from rollouts.runs.components import Chosen
from rollouts.runs.environments import Environment
from rollouts.sandboxes.base import Sandboxes
from rollouts.sandboxes.opening import make_sandboxes, try_sandbox


def asks_for_sandbox(env: Environment) -> bool:
    """Whether the environment's `setup` names `sandbox`."""
    if env.remote is not None:
        return bool(env.make_checked().has_sandbox)
    component = env.chosen.component
    return names_input(component if hasattr(component, "setup") else env.make_checked(), "setup", "sandbox")


def with_sandboxes(chosen: Chosen, environments: Sequence[Environment], concurrency: int) -> tuple[Environment, ...]:
    """The environments, each with what opens its sandboxes if it asks for one. An environment with workers has them
    there. The sandboxes are checked. Raises UserError.
    """
    asking = {env.alias for env in environments if asks_for_sandbox(env)}
    here: Sandboxes | None = None
    found = []
    for env in environments:
        if env.alias in asking and env.remote is not None:
            env = env._replace(sandboxes=RemoteSandboxes(env.remote.pool, _as_sent(chosen, concurrency)))
        elif env.alias in asking:
            here = here or make_sandboxes(chosen.name, chosen.component, chosen.settings, concurrency)
            env = env._replace(sandboxes=here)
        found.append(env)
    return tuple(found)


def _as_sent(chosen: Chosen, concurrency: int) -> SandboxSent:
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


def sandbox_lines(name: str, environments: Sequence[Environment]) -> Iterator[str]:
    """Open a sandbox of each kind that the environments have, run `true` in it, and say what it is and what it does not
    stop. Raises ConfigError.
    """
    for sandboxes in dict.fromkeys(env.sandboxes for env in environments if env.sandboxes is not None):
        if isinstance(sandboxes, RemoteSandboxes):
            sandboxes.try_one()
        else:
            try_sandbox(name, sandboxes)
        yield f"sandbox {name}: opened, and ran `true`; {sandboxes.words}"
        yield f"  it does not stop: {'; '.join(sandboxes.not_stopped) or 'nothing that is known'}"
