"""`rollouts_check` by the name that the tests of authors import: `from rollouts.check import check_component`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rollouts.doors import open_module
from rollouts.lazy import moved_modules

if TYPE_CHECKING:
    from rollouts_check import check_component as check_component
    from rollouts_check import check_environment_class as check_environment_class
else:
    moved_modules({__name__: "rollouts_check"})
    sys.modules[__name__] = open_module("rollouts_check")
