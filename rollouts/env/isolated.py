"""Which functions can run in a process of their own, and how such a process finds them: by module, file and name.

No function is ever sent: the process imports the module, or the file, as this one did. Left out: the process
(`worker`), and who starts, asks and kills it (`processes`).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

from rollouts.errors import EnvironmentDefinitionError

__all__ = ["Reference", "check_isolated", "check_reference", "find_function", "reference_of"]

MAIN = "__rollouts_main__"  # what the script that is being run is called in another process
INSTEAD = 'without `self`, with what it needs as arguments:\n    @staticmethod\n    @tool(isolate="process")\n    '


class Reference(NamedTuple):
    """A function that another process finds. `file` is where its module stands, which may have no importable name."""

    module: str
    name: str
    file: str = ""


def check_isolated(function: Any) -> None:
    """Raise EnvironmentDefinitionError where it cannot run in a process of its own: it needs its object, or is async.

    All that can be seen while the class is being written; `check_reference` sees the rest.
    """
    plain = _plain(function)
    label = getattr(plain, "__qualname__", repr(plain))
    if isinstance(function, classmethod):
        raise EnvironmentDefinitionError(_no_object(label, "cls", plain))
    if inspect.iscoroutinefunction(plain) or inspect.isasyncgenfunction(plain):
        raise EnvironmentDefinitionError(
            f'the tool {label} is async, and isolate="process" is for plain functions; leave one of the two out '
            "(an async tool can be cancelled at its deadline where it is)"
        )
    if not inspect.isfunction(plain):
        raise EnvironmentDefinitionError(
            f'the tool {label} is {type(plain).__name__}, and isolate="process" is for functions written with `def`'
        )
    first = next(iter(inspect.signature(plain).parameters), None)
    if first in ("self", "cls"):
        raise EnvironmentDefinitionError(_no_object(label, first, plain))


def check_reference(function: Any) -> Callable[..., Any]:
    """The plain function. Raises EnvironmentDefinitionError where another process would not find it by its name."""
    plain: Callable[..., Any] = _plain(function)
    reference_of(plain)
    return plain


@functools.lru_cache(maxsize=1024)
def reference_of(function: Callable[..., Any]) -> Reference:
    """How another process finds the function. Raises EnvironmentDefinitionError where it could not."""
    label = function.__qualname__
    if "<locals>" in label or "<lambda>" in label:
        raise EnvironmentDefinitionError(
            f"the tool {label} is defined inside a function, where another process does not find it; write it at the "
            "top of its module, or in a class there"
        )
    module = sys.modules.get(function.__module__)
    if module is None or _attribute(module, label) is not function:
        raise EnvironmentDefinitionError(
            f"the tool {label}: {function.__module__}.{label} is not this function, so another process would run "
            "something else; give the function the name under which its module or class holds it"
        )
    file = getattr(module, "__file__", None) or ""
    if module.__name__ != "__main__":
        return Reference(module.__name__, label, file)
    if not file:
        raise EnvironmentDefinitionError(f'the tool {label} was typed at a prompt; isolate="process" needs a file')
    spec = getattr(module, "__spec__", None)  # `python -m package.module` has one
    return Reference(spec.name if spec is not None else MAIN, label, file)


def find_function(reference: Reference) -> Callable[..., Any]:
    """The function that was meant, in a process where it may not be imported yet. Raises whatever its module raises."""
    function: Callable[..., Any] | None = _attribute(_module_of(reference), reference.name)
    if function is None:
        raise AttributeError(f"{reference.module} has no {reference.name}")
    return function


def _module_of(reference: Reference) -> ModuleType:
    name, file = reference.module, reference.file
    if name in sys.modules:
        return sys.modules[name]
    if name != MAIN and not name.startswith("rollouts_file_") and _is_importable(name):
        return importlib.import_module(name)
    from rollouts.plugins.files import import_file  # here: authors' machines import the marks, and nothing heavy

    return import_file(name, file)


def _is_importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False


def _attribute(module: ModuleType, name: str) -> Any:
    """The plain function of that qualified name; None where there is none."""
    value: Any = module
    for part in name.split("."):
        try:
            value = inspect.getattr_static(value, part)
        except AttributeError:
            return None
    return _plain(value)


def _plain(function: Any) -> Any:
    while isinstance(function, staticmethod | classmethod):
        function = function.__func__
    return function


def _no_object(label: str, first: str, function: Callable[..., Any]) -> str:
    parameters = list(inspect.signature(function).parameters.values())[1:]
    line = f"def {function.__name__}({', '.join(map(str, parameters))})"
    return (
        f'the tool {label} names {first!r}, but isolate="process" runs it in another process, where its object is not; '
        f"write it {INSTEAD}{line}: ..."
    )
