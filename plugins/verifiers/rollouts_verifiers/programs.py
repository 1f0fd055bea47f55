"""Upstream's harnesses: programs that play a task, with the model of the episode behind an address.

The program sends its requests to upstream's server, which records them for the rewards, and passes each one on to the
address of the episode (`model.serve()`). So the tokens are those of the run, whatever API the program speaks.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from verifiers.v1.clients import EvalClientConfig
from verifiers.v1.clients.client import RelayReply
from verifiers.v1.clients.eval import EvalClient
from verifiers.v1.errors import ProviderError
from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE
from verifiers.v1.runtimes import SubprocessRuntime
from verifiers.v1.types import Response
from verifiers.v1.utils import loaders

from rollouts.errors import ConfigError, check_known, named
from rollouts.gateway.endpoint import Endpoint

OVER = '"episode_over"'
"""The code in the answer to a request after the last turn or token of an episode."""

NO_KEY = "ROLLOUTS_VERIFIERS_NO_KEY"
"""A variable that is not set. Upstream reads the key of an address from a variable; this key is one of an episode."""


class ProgramClient(EvalClient):  # type: ignore[misc]
    """Upstream's client of one rollout: it passes each request on to the address of the episode's model. `is_over` is
    called when a limit of the episode refuses a request.
    """

    def __init__(self, endpoint: Endpoint, is_over: Callable[[], None]) -> None:
        self.config = EvalClientConfig(
            base_url=endpoint.base_url, api_key_var=NO_KEY, headers={"x-api-key": endpoint.key}
        )
        super().__init__(self.config)
        self.api_key, self._is_over = endpoint.key, is_over

    async def get_response(self, *args: Any, **kwargs: Any) -> Response:
        """The reply to a request. Raises ProviderError."""
        with self._noticing():
            return await super().get_response(*args, **kwargs)

    async def relay(self, *args: Any, **kwargs: Any) -> RelayReply:
        """The reply to a request as a stream. Raises ProviderError."""
        with self._noticing():
            return await super().relay(*args, **kwargs)

    @contextlib.contextmanager
    def _noticing(self) -> Iterator[None]:
        try:
            yield
        except ProviderError as error:
            if error.status_code == 400 and OVER in str(error):
                self._is_over()
            raise


def check_harness(name: str, harness: str, config: Mapping[str, Any]) -> None:
    """Raise ConfigError if a harness cannot play the taskset `name` here, or has no field of this config."""
    label = f"--env.harness {harness}"
    try:
        found, config_type = loaders.harness_class(harness), loaders.harness_config_type(harness)
    except Exception as error:
        raise ConfigError(f"{label} is no harness that can be imported: {named(error)}") from error
    if found.NEEDS_CONTAINER:
        raise ConfigError(
            f"{label} cannot play {name}: it needs a container (NEEDS_CONTAINER), where it installs another program\n"
            "rollouts runs harnesses that need none, such as bash; a program that is installed here plays in the "
            "environment `agent`: --env agent --env.command COMMAND"
        )
    known = [field for field in config_type.model_fields if field != "id"]
    check_known(config, known, f"{label} has no field --env.harness-config.", f"the fields of {harness}")


def check_tools(name: str, harness: str, tools: Collection[Any]) -> None:
    """Raise ConfigError if the taskset has tool servers and the harness takes none."""
    if tools and not loaders.harness_class(harness).SUPPORTS_MCP:
        raise ConfigError(
            f"--env.harness {harness} cannot play {name}: the taskset has tools, and this harness takes none "
            "(SUPPORTS_MCP)"
        )


def prepare_chat_program() -> None:
    """Let upstream's own chat program, that of `bash` and `null`, run with this Python. Upstream would make an
    environment for it with `uv`, from the network. The packages that it needs are those that verifiers requires.
    """
    source = CHAT_PROGRAM_SOURCE.encode()
    path = Path(SubprocessRuntime.scripts_dir) / f"{hashlib.sha256(source).hexdigest()}.py"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, new = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(descriptor, "wb") as file:
            file.write(source)
        Path(new).replace(path)
    SubprocessRuntime._interpreters[str(path)] = sys.executable
