"""`rollouts_servers.spending` by the name that plugins import: `from rollouts.spending import SpendingStore`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rollouts.doors import open_module

if TYPE_CHECKING:
    from rollouts_servers.spending import *  # noqa: F403
else:
    sys.modules[__name__] = open_module("rollouts_servers.spending")
