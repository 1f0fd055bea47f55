"""Read the type hints and the documentation of a component's parameters.

Each hint is resolved separately. If one cannot be resolved (a `Tensor` under TYPE_CHECKING), the others still can.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import re
import sys
import textwrap
import typing
from collections.abc import Mapping, Sequence
from types import MethodType
from typing import Any

_Scope = tuple[dict[str, Any], dict[str, Any]]

_SECTION = re.compile(r"^\s*(?:Args|Arguments|Parameters|Settings|Attributes):\s*$")
_ENTRY = re.compile(r"^\s*\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")


def resolve_hint(annotation: Any, scopes: Sequence[_Scope], fallback: Any) -> Any:
    """Resolve an annotation in the first scope that has all its names; if no scope has them all, return the
    fallback.
    """
    if isinstance(annotation, typing.ForwardRef):
        annotation = annotation.__forward_arg__
    if annotation is inspect.Parameter.empty:
        return fallback

    def holder() -> None: ...

    for module_names, class_names in scopes or [({}, {})]:
        holder.__annotations__ = {"hint": annotation}
        try:
            hint = typing.get_type_hints(holder, module_names, class_names, include_extras=True)["hint"]
        except Exception:  # a name is missing or the expression fails: try the next scope
            continue
        return hint.type if isinstance(hint, dataclasses.InitVar) else hint
    return fallback


def hint_scopes(component: Any, name: str) -> list[_Scope]:
    """The scopes where the hint of the parameter `name` may be written, the most likely one first."""
    if not inspect.isclass(component):
        return [(getattr(_plain_function(component), "__globals__", {}), {})]
    classes = [klass for klass in component.__mro__ if klass is not object]
    classes.sort(key=lambda klass: name not in _own_annotations(klass))  # classes that annotate `name` first
    written = _plain_function(component.__init__)
    scopes: list[_Scope] = []
    if not dataclasses.is_dataclass(component) and hasattr(written, "__globals__"):
        scopes.append((written.__globals__, {}))
    for klass in classes:
        module = sys.modules.get(klass.__module__)
        names = vars(module) if module is not None else {}
        # First without the names of the class: the default of a field could hide a type of the same name.
        scopes += [(names, {}), (names, dict(vars(klass)))]
    return scopes


def setting_docs(component: Any) -> dict[str, str]:
    """A line for each documented parameter, from an `Args:` section or the comment after a dataclass field."""
    docs: dict[str, str] = {}
    if not inspect.isclass(component):
        function = _plain_function(component)
        return argument_docs(inspect.getdoc(function))
    for klass in reversed(component.__mro__[:-1]):
        docs |= _field_comments(klass)
        docs |= argument_docs(klass.__dict__.get("__doc__"))
        docs |= argument_docs(getattr(klass.__dict__.get("__init__"), "__doc__", None))
    return docs


def argument_docs(docstring: str | None) -> dict[str, str]:
    """The entries of the `Args:` section of a docstring, each as one line.

    >>> argument_docs("Short answers.\\n\\nArgs:\\n    target: tokens that cost nothing,\\n        counted once.\\n")
    {'target': 'tokens that cost nothing, counted once.'}
    """
    if not docstring:
        return {}
    lines = inspect.cleandoc(docstring).splitlines()
    start = next((index for index, line in enumerate(lines) if _SECTION.match(line)), None)
    if start is None:
        return {}
    docs: dict[str, str] = {}
    current, indent = "", re.match(" *", lines[start])[0]  # type: ignore[index]  # it always matches
    inside = itertools.takewhile(lambda line: not line.strip() or line.startswith(f"{indent} "), lines[start + 1 :])
    for line in textwrap.dedent("\n".join(inside)).splitlines():
        entry = None if line.startswith(" ") else _ENTRY.match(line)
        if entry:
            current = entry[1]
            docs[current] = entry[2].strip()
        elif current:
            docs[current] = f"{docs[current]} {line.strip()}".strip()
    return docs


def _plain_function(component: Any) -> Any:
    """The function inside partials, bound methods, callable objects and `functools.wraps`."""
    while True:
        if isinstance(component, functools.partial):
            component = component.func
        elif isinstance(component, MethodType):
            component = component.__func__
        elif hasattr(component, "__wrapped__"):
            component = component.__wrapped__
        elif inspect.isroutine(component) or not callable(component):
            return component
        else:
            component = type(component).__call__


@functools.lru_cache(maxsize=256)  # reading the source of a class takes a millisecond
def _field_comments(klass: type) -> Mapping[str, str]:
    """The comments after the fields of a dataclass. Empty if its source cannot be read."""
    if not dataclasses.is_dataclass(klass):
        return {}
    try:
        source = textwrap.dedent(inspect.getsource(klass))
        body = ast.parse(source).body[0]
    except (OSError, TypeError, SyntaxError):
        return {}  # a class without source: typed into a prompt, or made by code
    lines = source.encode().split(b"\n")
    docs: dict[str, str] = {}
    for node in body.body if isinstance(body, ast.ClassDef) else ():
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            rest = lines[(node.end_lineno or 0) - 1][node.end_col_offset :].decode().strip()
            comment = rest.lstrip("#: ")
            if rest.startswith("#") and comment and not re.match(r"(?:type|noqa|pragma|fmt|pyright)\b", comment):
                docs[node.target.id] = comment
    return docs


def _own_annotations(klass: type) -> Mapping[str, Any]:
    if sys.version_info >= (3, 14):  # annotations are lazy there: a name under TYPE_CHECKING must not be evaluated
        import annotationlib

        return annotationlib.get_annotations(klass, format=annotationlib.Format.FORWARDREF)
    return inspect.get_annotations(klass)
