"""The programs that run in another process: one draws tasks, the other one imports an environment and watches it.

A program reads a request as JSON from its argument, and writes its answer as JSON into a file. What the author's code
prints does not matter.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

SOCKETS = frozenset({"socket.bind", "socket.connect", "socket.getaddrinfo", "socket.sendto"})


def main(text: str) -> None:
    """Serve one request. An error ends the process with a message on stderr."""
    from rollouts.errors import RolloutsError

    request: dict[str, Any] = json.loads(text)
    try:
        answer = _import_watched(request) if "forbidden" in request else _draw(request)
    except RolloutsError as error:
        sys.exit(str(error))
    Path(request["answer"]).write_text(json.dumps(answer))


def _draw(request: dict[str, Any]) -> dict[str, Any]:
    """The encoded training tasks, and the file of the class."""
    from rollouts.check.environments.subject import make_subject
    from rollouts.check.packages import Found
    from rollouts.encoding import encode

    found = Found(request["name"], request["name"])
    with tempfile.TemporaryDirectory() as scratch:
        subject = make_subject(found, request["settings"], Path(scratch), seed=request["seed"])
        tasks = [encode(task).decode() for task in subject.draw(request["count"])]
    module = sys.modules.get(getattr(subject.component, "__module__", ""))
    return {"tasks": tasks, "file": getattr(module, "__file__", "") or ""}


def _import_watched(request: dict[str, Any]) -> dict[str, Any]:
    """The seconds of the import, its forbidden modules and sockets, each with the author's line, and the file of the
    component's module.
    """
    from rollouts.check.finding import find_ref, load
    from rollouts.plugins.manager import PluginManager

    manager = PluginManager()
    ref = find_ref(manager, request["kind"], request["name"])
    for module in request["first"]:
        importlib.import_module(module)
    watch = _Watch(frozenset(request["forbidden"]))
    sys.meta_path.insert(0, watch)
    sys.addaudithook(lambda event, _: watch.use_socket(event))
    begun = time.perf_counter()
    component = load(manager, ref)
    seconds = time.perf_counter() - begun
    own = ref.value.partition(":")[0] or getattr(component, "__module__", "")
    file = getattr(sys.modules.get(own.strip()), "__file__", "") or ""
    return {"seconds": seconds, "modules": watch.modules, "sockets": watch.sockets, "file": file}


class _Watch:
    """A finder that finds nothing, and records the first import of each forbidden module."""

    def __init__(self, forbidden: frozenset[str]) -> None:
        self._forbidden = forbidden
        self.modules: dict[str, str] = {}
        self.sockets: dict[str, str] = {}

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        if name in self._forbidden:
            self.modules.setdefault(name, _authors_line())
        return None

    def use_socket(self, event: str) -> None:
        if event in SOCKETS:
            self.sockets.setdefault(event, _authors_line())


def _authors_line() -> str:
    """The innermost line outside of rollouts, the standard library and the installed packages."""
    from rollouts.author_code import CORE, INSTALLED, STANDARD_LIBRARY, Place, is_file

    for frame in reversed(traceback.extract_stack()):
        inside = (CORE, STANDARD_LIBRARY)
        is_installed = any(part in frame.filename for part in INSTALLED)
        if is_file(frame.filename) and not frame.filename.startswith(inside) and not is_installed:
            return str(Place(frame.filename, frame.lineno or 0, frame.line or ""))
    return ""
