"""The hooks that a plugin may implement (pluggy, project `rollouts`, entry-point group `rollouts`).

    [project.entry-points."rollouts"]
    reasoning_gym = "rollouts_reasoning_gym.hooks"          # a module, or `module:object`

    from rollouts import hookimpl

    @hookimpl
    def rollouts_list_components(kind):
        return ["reasoning_gym/countdown"] if kind == "environments" else None

An implementation is a plain function. Its parameters are those arguments of the hook that it needs. If it raises, the
run reports this and continues. Async functions and hook wrappers are refused.
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
"""The hooks that a run calls. Their return values are ignored."""


@hookspec(firstresult=True)
def rollouts_find_component(kind: str, name: str) -> Any:
    """Return the component, or a `rollouts.plugins.ComponentRef` to it, or None if you have no such component.

    `kind` is one of `rollouts.plugins.KINDS`. `name` is the name that the user typed (`reasoning_gym/countdown`). This
    hook is called only if no installed entry point has that name. Plugins are called in the order of their
    distributions' names, until one returns a component.
    """


@hookspec
def rollouts_list_components(kind: str) -> Iterable[str] | None:
    """Return the names that your `rollouts_find_component` finds, for `rollouts plugins list --all` and for errors. A
    mapping from names to descriptions adds one line to each.
    """


@hookspec
def rollouts_run_start(settings: Mapping[str, Any], folder: str) -> None:
    """Called when a run begins. `settings` are its resolved settings, `folder` is its folder."""


@hookspec
def rollouts_samples(samples: Sequence[Sample], step: int) -> None:
    """Called with the samples of a step, before training. Do not change them."""


@hookspec
def rollouts_step_end(metrics: Mapping[str, float], step: int) -> None:
    """Called at the end of a step. `metrics` are its metrics, as in metrics.jsonl."""


@hookspec
def rollouts_run_end(summary: Mapping[str, Any]) -> None:
    """Called when the run has ended. `summary` is the content of its `summary.json`."""
