"""The hooks that a plugin may implement (pluggy, project `rollouts`, entry-point group `rollouts`).

    [project.entry-points."rollouts"]
    reasoning_gym = "rollouts_reasoning_gym.hooks"          # a module, or `module:object`

    from rollouts import hookimpl

    @hookimpl
    def rollouts_list_components(kind):
        return ["reasoning_gym/countdown"] if kind == "environments" else None

An implementation is a plain function and takes those of the arguments that it wants, by name. It is called alone: one
that raises is named and stops nothing else. Async functions and hook wrappers are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from rollouts.types import Sample

hookspec = pluggy.HookspecMarker("rollouts")
hookimpl = pluggy.HookimplMarker("rollouts")

EVENTS = ("rollouts_run_start", "rollouts_samples", "rollouts_step_end", "rollouts_run_end")
"""The hooks that a run calls as it goes; what they return is not read."""


@hookspec(firstresult=True)
def rollouts_find_component(kind: str, name: str) -> Any:
    """The component itself, or a `rollouts.plugins.ComponentRef` to it, or None where it is not one of yours.

    `kind` is one of `rollouts.plugins.KINDS`, `name` what the user typed (`reasoning_gym/countdown`). Metadata is
    asked first, then the packs in the order of their distributions' names; the first answer counts.
    """


@hookspec
def rollouts_list_components(kind: str) -> Iterable[str] | None:
    """The names that `rollouts_find_component` would find of this kind: `rollouts plugins list --all`, and errors."""


@hookspec
def rollouts_run_start(settings: Mapping[str, Any], folder: str) -> None:
    """A run begins: its resolved settings, and the folder it writes to."""


@hookspec
def rollouts_samples(samples: Sequence[Sample], step: int) -> None:
    """The samples of a step, before they are trained on. Look, do not change."""


@hookspec
def rollouts_step_end(metrics: Mapping[str, float], step: int) -> None:
    """A step is done; its metrics under their published names."""


@hookspec
def rollouts_run_end(summary: Mapping[str, Any]) -> None:
    """The run is over; what `summary.json` holds."""
