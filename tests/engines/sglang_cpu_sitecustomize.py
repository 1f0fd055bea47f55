"""Lets SGLang's wheel for CUDA start on a machine without a GPU, where SGLANG_USE_CPU_ENGINE=1 asks for it.

Copied into a virtual environment as `sitecustomize.py` (`install_sglang.sh`). What it imports of CUDA gets stand-ins
that swallow everything, and torch's pinned memory, which only a GPU has, becomes ordinary memory.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

STAND_INS = {"torchvision", "sgl_kernel"}
PINNING = ("empty", "zeros", "ones", "full", "tensor", "arange", "empty_like", "zeros_like")


class Anything:
    """Has every attribute, is callable, a decorator and a base class; false, and empty."""

    def __init__(self, name: str) -> None:
        self.__dict__["_name"] = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        made = self.__dict__[name] = Anything(f"{self._name}.{name}")
        return made

    def __call__(self, *args: Any, **settings: Any) -> Any:
        if len(args) == 1 and not settings and callable(args[0]) and not isinstance(args[0], Anything):
            return args[0]  # as a decorator
        return Anything(f"{self._name}()")

    def __mro_entries__(self, bases: tuple[type, ...]) -> tuple[type, ...]:
        return (object,)

    def __getitem__(self, key: Any) -> Any:
        return Anything(f"{self._name}[]")

    def __or__(self, other: Any) -> Any:
        return self

    __ror__ = __or__

    def __bool__(self) -> bool:
        return False

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __hash__(self) -> int:
        return id(self)


class StandIn(types.ModuleType):
    """A module that has everything."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        made = Anything(f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the stand-ins; mends torch when sglang is first imported."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name == "sglang":
            without_pinning()
        if name.split(".")[0] in STAND_INS:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = StandIn(spec.name)
        module.__path__ = []
        module.__version__ = "0.0"
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to run."""


def without_pinning() -> None:
    """Memory that is asked for as pinned is ordinary memory."""
    import torch

    torch.Tensor.pin_memory = lambda self, *args, **settings: self
    for name in PINNING:
        setattr(torch, name, unpinned(getattr(torch, name)))


def unpinned(make: Any) -> Any:
    @functools.wraps(make)
    def made(*args: Any, **settings: Any) -> Any:
        settings.pop("pin_memory", None)
        return make(*args, **settings)

    return made


if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    sys.meta_path.insert(0, Finder())
