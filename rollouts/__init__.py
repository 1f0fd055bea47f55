"""rollouts: train language-model agents in environments that are plugins; tokens in, tokens out.

The rooms, from the ground up (a module imports only from rooms above it in this list):

    types errors lazy config the shapes that travel, the error tree, lazy faces, the settings
    plugins                  names from installed metadata, hooks, components that receive what they name
    env  chat                authoring of environments; messages to token ids and back
    training.algorithms      losses, advantages, aggregation: pure functions on tensors
    inference                engines that sample; one file a backend
    training.backends        engines that train; futures, LoRA, checkpoints
    loggers  run_folder      where a run is written down
    agent  training.rollout_gen  training.loops  evaluate    the loops, under trio
    compose  api  cli        names become functions, only here

Nothing heavy is imported until it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollouts.lazy import lazy_face

if TYPE_CHECKING:
    from rollouts.api import resume, run
    from rollouts.env.authoring import metric, reward, tool
    from rollouts.plugins.hookspecs import hookimpl
    from rollouts.types import Message, Sample, Score, Segment, Status, Task, ToolCall, Trajectory

__version__ = "0.1.0"

__all__ = [
    "Message",
    "Sample",
    "Score",
    "Segment",
    "Status",
    "Task",
    "ToolCall",
    "Trajectory",
    "hookimpl",
    "metric",
    "resume",
    "reward",
    "run",
    "tool",
]

_HOMES = {
    "Message": "types",
    "Sample": "types",
    "Score": "types",
    "Segment": "types",
    "Status": "types",
    "Task": "types",
    "ToolCall": "types",
    "Trajectory": "types",
    "hookimpl": "plugins.hookspecs",
    "metric": "env.authoring",
    "resume": "api",
    "reward": "env.authoring",
    "run": "api",
    "tool": "env.authoring",
}

__getattr__, __dir__ = lazy_face(__name__, _HOMES)
