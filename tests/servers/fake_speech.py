"""What the fakes of both servers say alike (`fake_engines.py`): routes, keys, names of models, planting faults."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

sys.path[:0] = [str(Path(__file__).parent)]
from fake_core import FAULTS, Core  # noqa: E402

VERSIONS = {"vllm": "0.32.0", "sglang": "0.5.23"}
NOT_IMITATED = ("stop", "stop_regex", "json_schema", "regex", "ebnf", "structured_outputs", "stream")


class RefusedError(Exception):
    """An answer that is not 200."""

    def __init__(self, status: int, body: Any) -> None:
        super().__init__(str(body))
        self.status, self.body = status, body


class Speech:
    """Routes of one kind: methods named by `routes`, each of a body and a query, giving what is encoded as JSON.

    A str is text, None an empty answer; RefusedError has another status.
    """

    routes: Mapping[str, str]
    open_prefixes: tuple[str, ...] = ()  # what needs no key, or
    admin_paths: frozenset[str] = frozenset()  # what needs the admin's, where there is one
    guarded_prefixes: tuple[str, ...] = ("/",)  # what needs one

    def __init__(self, core: Core) -> None:
        self.core = core
        self.options = core.options

    async def answer(self, method: str, target: str, body: bytes, key: str) -> tuple[int, Any]:
        """Status, and what is to be encoded."""
        url = urlsplit(target)
        path, query = url.path, dict(parse_qsl(url.query))
        self.core.counts[path] += 1
        if path == "/fake/statistics":
            return 200, self.core.statistics()
        if path == "/fake/faults":
            return self._plant(json.loads(body))
        is_guarded = path.startswith(self.guarded_prefixes) and not path.startswith(self.open_prefixes)
        wanted = self.options.admin_key if path in self.admin_paths else ""
        wanted = wanted or self.options.api_key
        if wanted and is_guarded and key != wanted:
            return 401, {"error": "Unauthorized"}
        name = self.routes.get(f"{method} {path}")
        if name is None:
            return 404, {"detail": "Not Found"}
        try:
            given = json.loads(body) if body else {}
            return 200, await getattr(self, name)(given, query)
        except RefusedError as refused:
            return refused.status, refused.body
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            return 400, {"error": {"message": f"{type(error).__name__}: {error}"}}

    def _plant(self, body: Mapping[str, Any]) -> tuple[int, Any]:
        unknown = sorted({each.partition("=")[0] for each in body["faults"]} - set(FAULTS))
        if unknown:
            return 400, f"unknown faults {unknown}; known are {', '.join(FAULTS)}"
        self.core.plant(body["faults"])
        self.core.wake()
        return 200, None

    def _cards(self) -> list[dict[str, Any]]:
        served, length = self.options.served_model, self.core.context
        own = {"id": served, "object": "model", "root": self.options.model, "parent": None, "max_model_len": length}
        return [own] + [
            {"id": each.name, "object": "model", "root": each.path, "parent": served, "max_model_len": None}
            for each in self.core.adapters.values()
        ]

    async def models(self, _: Any, __: Any) -> Any:
        return {"object": "list", "data": self._cards()}

    async def tokenize(self, body: dict[str, Any], _: Any) -> Any:
        ids = self.core.tokenize(body["prompt"])
        return {"count": len(ids), "max_model_len": self.core.context, "tokens": ids, "token_strs": None}

    async def health(self, _: Any, __: Any) -> None:
        return None

    def _die_soon(self) -> None:
        asyncio.get_running_loop().call_later(0.05, os._exit, 1)

    def _imitated(self, sampling: Mapping[str, Any]) -> None:
        strange = [name for name in NOT_IMITATED if sampling.get(name)]
        assert not strange, f"the fake does not imitate {', '.join(strange)}"
