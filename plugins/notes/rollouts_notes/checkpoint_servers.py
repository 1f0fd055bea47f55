"""Servers that load checkpoints of your own loop, without the probe of `rollouts.training.weights.sync`.

    engines = [SGLangEngine(base_url="http://localhost:30000")]
    results = await sync_weights_to_engines(engines, "checkpoints/step_000010")

The whole folder is read first, because some servers die of an incomplete folder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import trio
from rollouts_servers.dialect import Dialect
from rollouts_servers.http import HTTPClient
from rollouts_servers.sglang import SGLang
from rollouts_servers.vllm import VLLM

from rollouts.errors import ConfigError
from rollouts.inference.base import WeightUpdate
from rollouts.training.weights import files, probe
from rollouts.training.weights.sending import raise_first


class InferenceEngine(Protocol):
    """A server that can load checkpoints."""

    async def update_weights_from_checkpoint(self, checkpoint_path: str) -> dict[str, Any]:
        """Serve the weights of a folder, in the format of transformers, from now on. Returns the server's answer.
        Raises InferenceError.
        """


class _Server:
    """A server at an address. The server reads the folder itself, so if it runs on another machine, it needs a shared
    disk.
    """

    dialect: Callable[[], Dialect]

    def __init__(self, base_url: str, *, api_key: str = "", timeout_seconds: float = 600.0) -> None:
        self.base_url = base_url
        self._api_key, self._timeout_seconds = api_key, timeout_seconds

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.base_url!r})"

    async def update_weights_from_checkpoint(self, checkpoint_path: str) -> dict[str, Any]:
        """Load a checkpoint while requests wait, and flush the prompt cache. Returns `success` and `message`. Raises
        InferenceError, ConfigError.
        """
        await trio.to_thread.run_sync(_check_model, checkpoint_path)
        update = WeightUpdate(0, path=str(Path(checkpoint_path).absolute()))  # noqa: ASYNC240 - no disk access
        dialect = self.dialect()
        async with HTTPClient(self.base_url, api_key=self._api_key, timeout_seconds=self._timeout_seconds) as client:
            await dialect.load_full(client, update)
        return {"success": True, "message": f"{dialect.software} at {client.url} loaded {checkpoint_path}"}


class SGLangEngine(_Server):
    """An SGLang server (POST /update_weights_from_disk)."""

    dialect = SGLang


class VLLMEngine(_Server):
    """A vLLM server in development mode (POST /collective_rpc, reload_weights)."""

    dialect = VLLM


async def sync_weights_to_engines(engines: Sequence[InferenceEngine], checkpoint_path: str) -> list[dict[str, Any]]:
    """Make all engines load the checkpoint at once. Returns their answers in order.

    Waits for all of them. Raises ConfigError if the folder is not a complete checkpoint, and InferenceError, which
    names the first engine that failed.
    """
    await trio.to_thread.run_sync(_check_model, checkpoint_path)
    found = await probe.gather(lambda engine: engine.update_weights_from_checkpoint(checkpoint_path), engines)
    raise_first(f"load {checkpoint_path}", [repr(engine) for engine in engines], found)
    return [each for each in found if not isinstance(each, Exception)]


def _check_model(path: str) -> None:
    files.read_manifest(path)
    if not (Path(path) / "config.json").is_file():
        raise ConfigError(f"{path} holds an adapter; give the folder of a whole model")
