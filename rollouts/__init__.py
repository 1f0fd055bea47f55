"""rollouts: train language-model agents in environments that are plugins; tokens in, tokens out.

The rooms, from the ground up (a module imports only from rooms above it in this list):

    types errors lazy config the shapes that travel, the error tree, lazy faces, the settings
    plugins                  names from installed metadata, hooks, components that receive what they name
    env  chat                authoring of environments; messages to token ids and back
    training.algorithms      losses, advantages, aggregation: pure functions on tensors
    inference                engines that sample; one file a backend
    training.backends        engines that train; futures, LoRA, checkpoints
    loggers                  where metrics go
    agent  training.rollout_gen  training.loops  evaluate    the loops, under trio
    runs  api  cli           names become functions, only here

Nothing heavy is imported until it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollouts.lazy import lazy_face
from rollouts.version import __version__ as __version__

if TYPE_CHECKING:
    from rollouts.api import resume as resume
    from rollouts.api import run as run
    from rollouts.env.authoring import metric as metric
    from rollouts.env.authoring import reward as reward
    from rollouts.env.authoring import tool as tool
    from rollouts.plugins.hookspecs import hookimpl as hookimpl
    from rollouts.types import Message as Message
    from rollouts.types import Sample as Sample
    from rollouts.types import Score as Score
    from rollouts.types import Segment as Segment
    from rollouts.types import Status as Status
    from rollouts.types import Task as Task
    from rollouts.types import ToolCall as ToolCall
    from rollouts.types import Trajectory as Trajectory

__getattr__, __dir__ = lazy_face(__name__)
