"""rollouts: train language-model agents in environments that are plugins.

The packages, from the ground up. A module imports only from packages above it in this list:

    types errors lazy config data types, errors, lazy imports, settings
    plugins                  components by name, from the metadata of installed packages; hooks; signatures
    env  chat                writing environments; messages to token ids and back
    training.algorithms      losses, advantages, aggregation: pure functions on tensors
    inference                engines that sample
    training.backends        engines that train; futures, LoRA, checkpoints
    loggers                  loggers of metrics
    agent  training.rollout_gen  training.loops  evaluate    the loops, under trio
    runs  api  cli           build a run from its settings, and start it

`import rollouts` imports none of these packages. Each is imported when you first use it.
"""

from __future__ import annotations

import sys

if sys.platform == "win32":
    raise ImportError("rollouts runs on Linux and macOS; on Windows, install it in WSL (type: wsl --install)")

from typing import TYPE_CHECKING, Any

from rollouts.lazy import lazy_face, moved_modules
from rollouts.version import __version__ as __version__

if TYPE_CHECKING:
    from rollouts_notes.endpoint import Endpoint as Endpoint

    from rollouts.api import resume as resume
    from rollouts.api import run as run
    from rollouts.env.authoring import metric as metric
    from rollouts.env.authoring import reward as reward
    from rollouts.env.authoring import tool as tool
    from rollouts.env.task_tools import Tool as Tool
    from rollouts.plugins.hookspecs import hookimpl as hookimpl
    from rollouts.types import Message as Message
    from rollouts.types import Role as Role
    from rollouts.types import Sample as Sample
    from rollouts.types import Score as Score
    from rollouts.types import Segment as Segment
    from rollouts.types import Status as Status
    from rollouts.types import Task as Task
    from rollouts.types import ToolCall as ToolCall
    from rollouts.types import Trajectory as Trajectory
    from rollouts.types import Turn as Turn

    CalculatorEnvironment: type[Any]

_load, __dir__ = lazy_face(__name__)
moved_modules({f"{__name__}.inference.servers": "rollouts_servers"})


def __getattr__(name: str) -> Any:
    if name == "CalculatorEnvironment":  # not in __all__, because another package has it
        from rollouts.doors import open_module

        return open_module("rollouts_notes.endpoint").load_calculator()
    return _load(name)
