"""`CalculatorEnvironment`, from the package that provides the environment `calculator`."""

from __future__ import annotations

from typing import Any

from rollouts.errors import UnknownComponentError
from rollouts.plugins.index import find_component
from rollouts.plugins.loading import load_component


def load_calculator() -> type[Any]:
    """The class of the environment `calculator`. Raises UnknownComponentError if its package is not installed."""
    try:
        ref = find_component("environments", "calculator")
    except UnknownComponentError as error:
        raise UnknownComponentError(
            "CalculatorEnvironment is in a package of its own\ntype: pip install rollouts-calculator"
        ) from error
    found: type[Any] = load_component(ref)
    return found
