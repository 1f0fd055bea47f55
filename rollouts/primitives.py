"""`rollouts_notes.primitives` by the name that users import: `from rollouts.primitives import load_model`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rollouts.doors import open_module
from rollouts.lazy import moved_modules

if TYPE_CHECKING:
    from rollouts_notes.primitives import *  # noqa: F403
else:
    moved_modules({__name__: "rollouts_notes.primitives"})
    sys.modules[__name__] = open_module("rollouts_notes.primitives")
