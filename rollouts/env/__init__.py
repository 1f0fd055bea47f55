"""What an environment author writes with: `@tool`, `@reward`, `@metric`.

Rooms: `authoring` (the marks and how they are collected), `schema` (a tool's JSON schema, and its arguments),
`calls` (run a plain, trio or asyncio function under a deadline), `mixing` (rewards into one score), `checks` (an
environment's mistakes, before any model loads), `prompts` (the core environment that needs no code).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollouts.lazy import lazy_face

if TYPE_CHECKING:
    from rollouts.env.authoring import metric as metric
    from rollouts.env.authoring import reward as reward
    from rollouts.env.authoring import tool as tool

__getattr__, __dir__ = lazy_face(__name__)
