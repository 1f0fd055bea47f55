"""Which functions can run in another process, and how that process finds them: by module, file and name.

A function is never sent. The other process imports the function's module or file, as this process did. Not here: the
process (`worker`), and the pool that starts, calls and kills it (`processes`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import operator
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

from rollouts.errors import EnvironmentDefinitionError

MAIN = "__rollouts_main__"  # the module name of the running script in another process
INSTEAD = 'without `self`, with what it needs as arguments:\n    @staticmethod\n    @tool(isolate="process")\n    '


class Reference(NamedTuple):
    """How another process finds a function. `file` is the file of its module, whose name may not be importable."""

    module: str
    name: str
    file: str = ""


def check_isolated(function: Any) -> None:
    """Raise EnvironmentDefinitionError if the function needs `self` or is async, because it cannot run in another
    process.

    This runs when the decorator is applied. `check_reference` checks the rest once the class exists.
    """
    plain = _plain(function)
    label = getattr(plain, "__qualname__", repr(plain))
    if inspect.iscoroutinefunction(plain) or inspect.isasyncgenfunction(plain):
        raise _refused(label, 'is async, and isolate="process" needs a plain `def`; remove one of the two')
    if not inspect.isfunction(plain):
        kind = type(plain).__name__
        raise _refused(label, f'is {kind}, and isolate="process" is for functions written with `def`')
    parameters = list(inspect.signature(plain).parameters.values())
    if parameters and (isinstance(function, classmethod) or parameters[0].name in ("self", "cls")):
        line = f"def {plain.__name__}({', '.join(map(str, parameters[1:]))})"
        name = parameters[0].name
        raise _refused(
            label,
            f"names {name!r}, but its process has no such object; write it {INSTEAD}{line}: ...",
        )


def check_reference(function: Any) -> Callable[..., Any]:
    """The plain function. Raises EnvironmentDefinitionError if another process would not find it by its name."""
    plain: Callable[..., Any] = _plain(function)
    reference_of(plain)
    return plain


@functools.lru_cache(maxsize=1024)
def reference_of(function: Callable[..., Any]) -> Reference:
    """How another process finds the function. Raises EnvironmentDefinitionError if it could not find the function."""
    label = function.__qualname__
    if "<locals>" in label or "<lambda>" in label:
        why = "is defined inside a function, where another process does not find it"
        raise _refused(label, f"{why}; write it at the top of its module, or in a class there")
    module = sys.modules.get(function.__module__)
    found = None
    with contextlib.suppress(AttributeError):
        found = operator.attrgetter(label)(module)
    if module is None or found is not function:
        why = f"is not what another process finds as {function.__module__}.{label}"
        raise _refused(label, f"{why}; give it the name under which its module or class holds it")
    file = getattr(module, "__file__", None) or ""
    if module.__name__ != "__main__":
        return Reference(module.__name__, label, file)
    if not file:
        raise _refused(label, 'was typed at a prompt; isolate="process" needs a file')
    spec = getattr(module, "__spec__", None)  # a module that runs as `python -m package.module` has a spec
    return Reference(spec.name if spec is not None else MAIN, label, file)


def find_function(reference: Reference) -> Callable[..., Any]:
    """The function of a reference. Its module is imported if necessary. Raises any error that the import raises."""
    function: Callable[..., Any] = operator.attrgetter(reference.name)(_module_of(reference))
    return function


def _module_of(reference: Reference) -> ModuleType:
    name, file = reference.module, reference.file
    if name in sys.modules:
        return sys.modules[name]
    if name != MAIN and not name.startswith("rollouts_file_") and _is_importable(name):
        return importlib.import_module(name)
    from rollouts.plugins.loading import import_file  # imported here, so that importing the marks stays fast

    return import_file(name, file)


def _is_importable(name: str) -> bool:
    with contextlib.suppress(ImportError):
        return importlib.util.find_spec(name) is not None
    return False


def _refused(label: str, why: str) -> EnvironmentDefinitionError:
    return EnvironmentDefinitionError(f"the tool {label} {why}")


def _plain(function: Any) -> Any:
    while isinstance(function, staticmethod | classmethod):
        function = function.__func__
    return function
