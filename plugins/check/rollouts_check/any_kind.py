"""Find a component by its name alone: `rollouts plugins show NAME` and `rollouts check NAME` need no kind.

The object of a file has no kind either, so it is imported, and its kind is read from what it is.
"""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import click
import msgspec

from rollouts.config.names import names_file
from rollouts.config.settings import COMPONENT_KINDS
from rollouts.env.authoring import metrics_of, rewards_of, tools_of
from rollouts.errors import SignatureError, UnknownComponentError, UserError, near_misses
from rollouts.plugins.index import KIND_WORDS, KINDS, ComponentRef, find_in_file
from rollouts.plugins.manager import PluginManager
from rollouts.plugins.signature import check_signature
from rollouts.plugins.vocabulary import VOCABULARY
from rollouts.training.algorithms.algorithm import Algorithm

_METHODS = {
    "tasks": "environments",
    "log": "loggers",
    "generate": "inference",
    "forward_backward": "training",
    "not_stopped": "sandboxes",
    "open": "workers",
}
"""A method or attribute by which a class is recognized, and its kind."""


def find_of_any_kind(manager: PluginManager, kind: str | None, name: str, command: str) -> ComponentRef:
    """The only component of that name, of any kind if `kind` is None. `command` is what an error tells the user to
    type. Imports a file, and nothing else.

    Raises UnknownComponentError, UserError if several components have the name, and what the import of a file raises.
    """
    if kind is not None:
        return manager.find(COMPONENT_KINDS.get(kind, kind), name)  # `reward` means `rewards`
    if names_file(name):
        return _find_in_file(manager, name, command)
    found: list[ComponentRef] = []
    for each in KINDS:
        with contextlib.suppress(UnknownComponentError):
            found.append(manager.find(each, name))
    if len(found) > 1:
        typed = "\n".join(f"  {command} {name} --kind {ref.kind}" for ref in found)
        raise UserError(f"{name} is the name of several components\ntype one of:\n{typed}")
    if not found:
        known = [ref.name for ref in manager.list(hooks=True)]
        near = near_misses(name.rpartition("/")[2], known)
        hint = f"did you mean: {', '.join(near)}?\n" if near else ""
        raise UnknownComponentError(f"no component of any kind is named {name!r}\n{hint}type: rollouts plugins list")
    return found[0]


def _find_in_file(manager: PluginManager, name: str, command: str) -> ComponentRef:
    try:
        ref = find_in_file(name)
        component = manager.load(ref)
    except UnknownComponentError as error:
        error.args = (f"{error}\nthe kinds of components: {', '.join(KINDS)}",)
        raise
    if not (kinds := kinds_of(component)):
        again = f"type: --kind KIND ({', '.join(KINDS)}), and read why it is not one"
        raise UserError(f"{name} fits no kind of component\n{again}")
    if len(kinds) > 1:
        typed = "\n".join(f"  {command} {name} --kind {kind}" for kind in kinds)
        raise UserError(f"{name} fits several kinds of components\ntype one of:\n{typed}")
    return msgspec.structs.replace(ref, kind=kinds[0])


def kinds_of(component: Any) -> list[str]:
    """The kinds that an object of a file fits: by its type, by the methods of a class, else by the inputs it names."""
    if isinstance(component, click.Command | Algorithm):
        return ["losses" if isinstance(component, Algorithm) else "commands"]
    if inspect.isclass(component):
        if hasattr(component, "tools") and not hasattr(component, "tasks"):
            return ["tools"]
        if any(of(component) for of in (tools_of, rewards_of, metrics_of)):
            return ["environments"]
        found = [kind for method, kind in _METHODS.items() if hasattr(component, method)]
        return found[:1]
    fits = []
    for kind in VOCABULARY.keys() & KIND_WORDS.keys():
        with contextlib.suppress(SignatureError):
            if check_signature(component, kind, "").requests:
                fits.append(kind)
    return sorted(fits) or (["tools"] if inspect.isroutine(component) else [])
