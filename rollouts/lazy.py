"""Lazy packages (PEP 562): a name is imported from its module when you first use it.

    if TYPE_CHECKING:
        from rollouts.types import Sample as Sample
        from rollouts.types import Task as Task

    __getattr__, __dir__ = lazy_face(__name__)

Each name is written once, in the form that type checkers read as a re-export (PEP 484). `lazy_face` reads the source of
the package to find the names. A module that has moved keeps its name with `moved_modules`.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable, Mapping
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from rollouts.doors import open_module

IMPORT = re.compile(r"^    from (rollouts[\w.]*) import (?:\(\s*)?(\w+) as \2\b", re.MULTILINE)


class LazyValues(dict[str, Any]):
    """A dict of functions. Reading a key calls its function."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key)()


def lazy_face(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The functions `__getattr__` and `__dir__` for `package`. They provide the names that the package's source imports
    under TYPE_CHECKING. Also sets the package's `__all__` to these names: constants first, then classes, then
    functions.
    """
    face = sys.modules[package]
    loader: Any = face.__spec__.loader  # type: ignore[union-attr]
    # pytest's loader has no `get_source`.
    source = loader.get_source(package) if hasattr(loader, "get_source") else _source_of(str(face.__file__))
    home_of = {name: module for module, name in IMPORT.findall(source)}
    face.__dict__["__all__"] = sorted(home_of, key=lambda name: (not name.isupper(), name))

    def load(name: str) -> Any:
        if f"{package}.{name}" in MOVED:
            return importlib.import_module(f"{package}.{name}")
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        face.__dict__[name] = value = getattr(open_module(home_of[name]), name)
        return value

    def names() -> list[str]:
        return sorted({*vars(face), *home_of})

    return load, names


MOVED: dict[str, tuple[str, ...]] = {}
"""The earlier name of each module that has moved, and its new home; several homes if its names are now in several."""


def moved_modules(homes: Mapping[str, str]) -> None:
    """Let modules be imported by their earlier names: `homes` has the new home of each, or several with a space between
    them. The earlier name of a module is the same module, submodules included. With several homes, it is a module that
    has the names of all of them, each imported on first use.
    """
    MOVED.update({name: tuple(home.split()) for name, home in homes.items()})
    if FINDER not in sys.meta_path:
        sys.meta_path.insert(0, FINDER)


class _Finder(MetaPathFinder, Loader):
    """Imports modules by the earlier names of `MOVED`."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        homes = _homes_of(name)
        found = name in MOVED or (bool(homes) and importlib.util.find_spec(homes[0]) is not None)
        return ModuleSpec(name, self) if found else None

    def exec_module(self, module: ModuleType) -> None:
        homes = _homes_of(module.__name__)
        if len(homes) == 1:
            sys.modules[module.__name__] = open_module(homes[0])
            return

        def load(name: str) -> Any:
            for home in homes if not name.startswith("__") else ():
                if hasattr(found := open_module(home), name):
                    return getattr(found, name)
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

        module.__dict__["__getattr__"] = load


FINDER = _Finder()


def _homes_of(name: str) -> tuple[str, ...]:
    """The homes of a module that has moved, itself or with its package; () for any other module."""
    if name in MOVED:
        return MOVED[name]
    package, _, rest = name.rpartition(".")
    homes = _homes_of(package) if package else ()
    return (f"{homes[0]}.{rest}",) if len(homes) == 1 else ()


def _source_of(file: str) -> str:
    with open(file, encoding="utf-8") as opened:
        return opened.read()
