"""The sandboxes of a run: made only if an environment asks for one, and tried out by a dry run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rollouts.author_code import authors_code
from rollouts.config.settings import Settings
from rollouts.env.inputs import names_input
from rollouts.errors import ConfigError, SignatureError, words_of
from rollouts.runs.components import Chosen, make_component
from rollouts.runs.environments import Environment
from rollouts.sandboxes.base import Sandbox, Sandboxes

TRY = ["true"]
TRY_SECONDS = 60.0


def asks_for_sandbox(env: Environment) -> bool:
    """Whether the environment's `setup` names `sandbox`."""
    component = env.chosen.component
    return names_input(component if hasattr(component, "setup") else env.make_checked(), "setup", "sandbox")


def make_sandboxes(chosen: Chosen, environments: Sequence[Environment], concurrency: int) -> Sandboxes | None:
    """The chosen sandboxes, checked; None if no environment asks for one. Raises UserError."""
    if not any(map(asks_for_sandbox, environments)):
        return None
    made = make_component("sandbox", chosen, {"concurrency": concurrency})
    if not isinstance(made, Sandboxes):
        lacks = [name for name in ("words", "not_stopped", "check", "open") if not hasattr(made, name)]
        raise SignatureError(f"the sandbox {chosen.name} made {type(made).__name__}, which has no {', '.join(lacks)}")
    made.check()
    return made


def unused_sandbox(chosen: Chosen, environments: Sequence[Environment]) -> tuple[str, ...]:
    """A note if a sandbox was chosen, and no environment asks for one."""
    if chosen.name == Settings.sandbox or any(env.sandboxes is not None for env in environments):
        return ()
    return (f"--sandbox {chosen.name} is not used: no environment asks for one with `def setup(self, task, sandbox)`",)


def sandbox_lines(name: str, sandboxes: Sandboxes | None) -> Iterator[str]:
    """Open a sandbox, run `true` in it, and say what it is and what it does not stop. Nothing without sandboxes. Raises
    ConfigError.
    """
    if sandboxes is None:
        return
    try:
        with authors_code():
            sandbox: Sandbox = sandboxes.open()
            try:
                result = sandbox.exec(TRY, seconds=TRY_SECONDS)
            finally:
                sandbox.close()
    except Exception as error:  # any package's sandbox may raise anything
        raise ConfigError(f"--sandbox {name}: {words_of(error)}") from error
    if result.exit_code:
        raise ConfigError(f"--sandbox {name}: the command `true` failed: {result.text}")
    yield f"sandbox {name}: opened, and ran `true`; {sandboxes.words}"
    yield f"  it does not stop: {'; '.join(sandboxes.not_stopped) or 'nothing that is known'}"
