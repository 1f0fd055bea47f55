"""Servers that are told to load a checkpoint that lies on disk, several at once.

    engines = [SGLangEngine(base_url="http://localhost:30000")]
    results = await sync_weights_to_engines(engines, "checkpoints/step_000010")

For a loop that is written by hand with a checkpoint of its own: the folder is read whole before a server is asked,
since some die of one that is not. Left out: whether the weights are then served (`weight_sync` proves that).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import trio

from rollouts.errors import ConfigError, InferenceError
from rollouts.inference.base import WeightUpdate
from rollouts.inference.dialect import Dialect
from rollouts.inference.http.client import HTTPClient
from rollouts.training.weight_files import read_manifest

__all__ = ["InferenceEngine", "SGLangEngine", "VLLMEngine", "sync_weights_to_engines"]

LOAD_SECONDS = 600.0


class InferenceEngine(Protocol):
    """A server that loads checkpoints."""

    async def update_weights_from_checkpoint(self, checkpoint_path: str) -> dict[str, Any]:
        """Serve the weights in a folder, as transformers writes them, from now on; gives the server's answer. Raises
        InferenceError.
        """
        ...


class SGLangEngine:
    """An SGLang server (POST /update_weights_from_disk). It reads the folder itself: on another machine it needs the
    same disk.
    """

    def __init__(self, base_url: str, *, api_key: str = "", timeout_seconds: float = LOAD_SECONDS) -> None:
        self.base_url = base_url
        self._api_key, self._timeout_seconds = api_key, timeout_seconds

    def __repr__(self) -> str:
        return f"SGLangEngine({self.base_url!r})"

    async def update_weights_from_checkpoint(self, checkpoint_path: str) -> dict[str, Any]:
        """Load it while requests wait, and forget cached prompts; gives `success` and `message`. Raises InferenceError,
        ConfigError.
        """
        from rollouts.inference.sglang import SGLang

        return await _load(SGLang(), self.base_url, self._api_key, checkpoint_path, self._timeout_seconds)


class VLLMEngine:
    """A vLLM server in development mode (POST /collective_rpc, reload_weights). It reads the folder itself."""

    def __init__(self, base_url: str, *, api_key: str = "", timeout_seconds: float = LOAD_SECONDS) -> None:
        self.base_url = base_url
        self._api_key, self._timeout_seconds = api_key, timeout_seconds

    def __repr__(self) -> str:
        return f"VLLMEngine({self.base_url!r})"

    async def update_weights_from_checkpoint(self, checkpoint_path: str) -> dict[str, Any]:
        """Load it while requests wait, and forget cached prompts, which vLLM would keep; gives `success` and `message`.
        Raises InferenceError, ConfigError.
        """
        from rollouts.inference.vllm import VLLM

        return await _load(VLLM(), self.base_url, self._api_key, checkpoint_path, self._timeout_seconds)


async def _load(dialect: Dialect, base_url: str, api_key: str, path: str, seconds: float) -> dict[str, Any]:
    await _check(path)
    update = WeightUpdate(0, path=str(Path(path).absolute()))  # noqa: ASYNC240 - it asks no disk
    async with HTTPClient(base_url, api_key=api_key) as client:
        await dialect.load_full(client, update, timeout_seconds=seconds)
    return {"success": True, "message": f"{dialect.software} at {client.url} loaded {path}"}


async def sync_weights_to_engines(engines: Sequence[InferenceEngine], checkpoint_path: str) -> list[dict[str, Any]]:
    """Every engine loads the checkpoint, all at once; gives their answers in order.

    All are let finish. Raises ConfigError for a folder that is no whole checkpoint, InferenceError naming the first
    engine that failed.
    """
    await _check(checkpoint_path)
    found: dict[int, dict[str, Any]] = {}
    failed: dict[int, InferenceError] = {}

    async def load(index: int, engine: InferenceEngine) -> None:
        try:
            found[index] = await engine.update_weights_from_checkpoint(checkpoint_path)
        except InferenceError as error:
            failed[index] = error

    async with trio.open_nursery() as nursery:
        for index, engine in enumerate(engines):
            nursery.start_soon(load, index, engine)
    if failed:
        index, error = min(failed.items(), key=lambda item: item[0])
        others = f" ({len(failed)} of {len(engines)} engines failed)" if len(engines) > 1 else ""
        raise InferenceError(
            f"{engines[index]!r} did not load {checkpoint_path}{others}: {error}",
            is_transient=error.is_transient,
        ) from error
    return [found[index] for index in range(len(engines))]


async def _check(path: str) -> None:
    await trio.to_thread.run_sync(_check_now, path)


def _check_now(path: str) -> Mapping[str, Any]:
    manifest = read_manifest(path)
    if not (Path(path) / "config.json").is_file():
        raise ConfigError(f"{path} holds an adapter; give the folder of a whole model")
    return {each.name: each for each in manifest}
