"""What an environment author writes with: `@tool`, `@reward`, `@metric`.

Rooms: `authoring` (the marks and how they are collected), `schema` (a tool's JSON schema, and its arguments),
`calls` (run a plain, trio or asyncio function under a deadline), `mixing` (rewards into one score), `checks` (an
environment's mistakes, before any model loads), `prompts` (the core environment that needs no code).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollouts.env.authoring import metric, reward, tool

__all__ = ["metric", "reward", "tool"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("rollouts.env.authoring"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
