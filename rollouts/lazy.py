"""Lazy packages (PEP 562): a name is imported from its module when you first use it.

    if TYPE_CHECKING:
        from rollouts.types import Sample as Sample
        from rollouts.types import Task as Task

    __getattr__, __dir__ = lazy_face(__name__)

Each name is written once, in the form that type checkers read as a re-export (PEP 484). `lazy_face` reads the source of
the package to find the names.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

IMPORT = re.compile(r"^    from (rollouts[\w.]*) import (?:\(\s*)?(\w+) as \2\b", re.MULTILINE)


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
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        face.__dict__[name] = value = getattr(importlib.import_module(home_of[name]), name)
        return value

    def names() -> list[str]:
        return sorted({*vars(face), *home_of})

    return load, names


def moved_modules(package: str, homes: Mapping[str, str]) -> None:
    """Let `package.name` be imported for each name of `homes`: a module with the names of its new home, which is
    imported on first use. Packages that were published before the move need it.
    """
    for name, home in homes.items():
        module = ModuleType(f"{package}.{name}", f"The names of {home}, at their earlier place.")
        module.__dict__["__getattr__"] = functools.partial(_at_home, home)
        sys.modules[module.__name__] = module
        setattr(sys.modules[package], name, module)


def _at_home(home: str, name: str) -> Any:
    return getattr(importlib.import_module(home), name)


def _source_of(file: str) -> str:
    with open(file, encoding="utf-8") as opened:
        return opened.read()
