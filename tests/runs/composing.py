"""Plans of the calculator for the tests of composing, and what refuses one."""

from __future__ import annotations

import pytest

from rollouts.config.resolving import resolve
from rollouts.runs.plan import make_plan

__all__ = ["plan", "refused"]


def plan(**settings):
    """The plan of the calculator with these settings."""
    return make_plan(resolve({"env": "calculator"} | settings))


def refused(error, *words, **settings):
    """Its message, with all of these words in it."""
    with pytest.raises(error) as caught:
        plan(**settings)
    message = str(caught.value)
    for word in words:
        assert word in message, message
    return message
