"""Make what a component makes: call its factory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollouts.author_code import place_of
from rollouts.errors import BrokenPluginError, RolloutsError, words_of
from rollouts.plugins.signature import call_with


def make(word: str, name: str, component: Any, available: Mapping[str, Any], settings: Mapping[str, Any]) -> Any:
    """Call the factory of a component: a `word`, such as "sandbox", and its `name`. Raises BrokenPluginError, with the
    line, if an author's code raises an exception.
    """
    try:
        return call_with(component, available, settings)
    except RolloutsError:
        raise
    except Exception as error:
        if place_of(error) is None:  # a bug in rollouts
            raise
        raise BrokenPluginError(f"the {word} {name} cannot be made: {words_of(error)}") from error
