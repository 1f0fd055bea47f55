"""The core environment `agent`: a program of yours plays each task, with the trained model behind its client.

    rollouts run --env agent --env.command 'python my_agent.py' --data rows.jsonl --reward ./judge.py:score

The program is started once for each episode. It finds the address and the key of the model in the environment variables
that the clients of OpenAI and Anthropic read, and the task on its standard input, as JSON: {"prompt", "info", "id"}.
The answer of the task is not sent. The rows are those of `prompts`. The program runs in the sandbox of the run, with
the working directory of the run. In a sandbox with a network of its own, a relay leads to the model (`relay`).
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rollouts.env.prompts import Prompts
from rollouts.errors import ConfigError, EnvironmentDefinitionError
from rollouts.gateway import relay
from rollouts.sandboxes.base import LocalSandbox
from rollouts.types import Task, Trajectory

if TYPE_CHECKING:
    from rollouts.gateway.endpoint import Endpoint
    from rollouts.sandboxes.base import Result, Sandbox

RELAY = ".rollouts-relay.py"
VARIABLES = ".rollouts-variables"
"""The file in the sandbox with the variables of the program. The arguments of a process would be visible to others."""

SECONDS_MAX = 86_400.0
"""How long a program may run. The deadline of an episode is shorter, and comes from the run."""


@dataclass
class Agent(Prompts):
    """Tasks from the rows of a file, each played by a program that speaks the API of OpenAI or Anthropic."""

    _own_name = "agent"

    command: str = ""  # the program, as a shell command, such as 'python my_agent.py'

    def check_data(self) -> None:
        """Raise ConfigError if there is no such program, or no such file of rows."""
        _check_command(self.command)
        super().check_data()

    def setup(self, task: Task, sandbox: Sandbox) -> None:
        """Keep the sandbox of the episode. Raises EnvironmentDefinitionError for one without a way to the model."""
        if not isinstance(sandbox, LocalSandbox):
            raise EnvironmentDefinitionError(
                "the environment agent cannot use this sandbox: a program in it reaches neither the model, which has "
                "an address on this machine, nor its own files. A container is such a sandbox\n"
                "type: --sandbox bubblewrap, or --sandbox subprocess"
            )
        self._sandbox = sandbox

    async def rollout(self, task: Task, model: Any) -> Trajectory:
        """Run the program. Returns the conversation with its last reply. `info["program"]` has what it printed.

        Raises RuntimeError if it fails, or if it ends without a reply of the model.
        """
        import trio

        given = {"prompt": task.prompt, "info": task.info, "id": task.id}
        async with model.serve() as endpoint:
            if folder := self._sandbox.socket_folder:
                await endpoint.listen(folder)
            result = await trio.to_thread.run_sync(
                self._run, msgspec.json.encode(given), endpoint, abandon_on_cancel=True
            )
        program = {"stdout": result.stdout, "stderr": result.stderr, "exit_code": result.exit_code}
        for trajectory in model.trajectories:
            trajectory.info["program"] = program
        if result.exit_code != 0:
            raise RuntimeError(f"the program failed: {_last_words(result)}")
        if model.trajectory is None:
            raise RuntimeError(
                f"the program ended without a reply of the model: {_last_words(result)}. It must send its requests to "
                "OPENAI_BASE_URL or ANTHROPIC_BASE_URL"
            )
        last: Trajectory = model.trajectory
        return last

    def _run(self, task: bytes, endpoint: Endpoint) -> Result:
        variables = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in endpoint.variables.items())
        files = {VARIABLES: variables}
        command = f"cd {shlex.quote(os.getcwd())} && exec sh -c {shlex.quote(self.command)}"
        if self._sandbox.socket_folder:
            files[RELAY] = Path(relay.__file__).read_text(encoding="utf-8")
            python = [os.path.realpath(sys.executable), "-I", "-S", RELAY, relay.SOCKET, str(endpoint.port)]
            command = f"exec {shlex.join([*python, 'sh', '-c', command])}"
        return self._sandbox.exec(f". ./{VARIABLES}; {command}", files=files, stdin=task, seconds=SECONDS_MAX)


def _check_command(command: str) -> None:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"--env.command {command!r}: {error}; quote it as for a shell") from error
    if not words:
        raise ConfigError("the environment agent needs a program: type --env.command 'python my_agent.py'")
    if "=" in words[0]:  # the shell sets a variable first
        return
    found = subprocess.run(
        ["sh", "-c", 'command -v -- "$1"', "sh", words[0]], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    if found.returncode != 0:
        raise ConfigError(f"--env.command {command!r}: there is no program {words[0]!r}; type its path")


def _last_words(result: Result) -> str:
    lines = (result.stderr.strip() or result.stdout.strip()).splitlines()
    printed = f" after it wrote {lines[-1][:300]!r}" if lines else ""
    killed = "was killed for its memory" if result.was_killed_for_memory else f"ended with code {result.exit_code}"
    return f"it {killed}{printed}"
