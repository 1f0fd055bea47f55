"""Checks of the package: what its import costs, and whether its wheel works in a virtual environment of its own."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollouts_check.environments.subject import Subject
from rollouts_check.environments.traces import draw_in, run_child
from rollouts_check.packages import Found
from rollouts_check.report import FailedError, SkippedError

FORBIDDEN = ("torch", "transformers", "tensorflow", "jax", "vllm", "sglang")
IMPORT_SECONDS = 3.0


def imports(subject: Subject) -> str:
    """The import is fast, loads no torch, opens no connection, starts nothing, and leaves signals and the working
    directory alone.
    """
    if not subject.is_importable:
        raise SkippedError("the class has no name that another process can import")
    change = "import it inside the function that needs it: an environment may run where it is not installed"
    return check_import(subject.found, subject.scratch, change)


def check_import(found: Found, scratch: Path, change: str, *, first: Sequence[str] = ()) -> str:
    """Import the component in a process of its own, and judge how long it takes, and what it imports and opens. The
    modules `first` are imported before, and allowed. `change` says what to do about a forbidden module.
    """
    request = {"kind": found.kind, "name": found.name, "first": first, "answer": str(scratch / "imported.json")}
    request["forbidden"] = [] if "torch" in first else FORBIDDEN
    seconds = IMPORT_SECONDS
    for _ in range(2):  # the first import may compile
        seen = import_in([sys.executable], request, sys.path)
        seconds = min(seconds, seen["seconds"])
        if seen["seconds"] < IMPORT_SECONDS:
            break
    tried = "import it in a process of its own"
    later = "do it where it is used, not when the module is imported"
    for what, did, words in (
        ("modules", "it imports {}", change),
        ("sockets", "it uses a socket ({})", "connect where it is used, not when the module is imported"),
        ("effects", "{}", later),
    ):
        for name, place in seen[what].items():
            raise FailedError(tried, did.format(name) + (f" ({place})" if place else ""), words)
    if seen["seconds"] >= IMPORT_SECONDS:
        words = f"let it take less than {IMPORT_SECONDS:g} s: load data and models where they are used"
        raise FailedError(tried, f"it took {seen['seconds']:.1f} seconds, twice", words)
    return f"{seconds:.2f} s"


def import_in(python: list[str], request: dict[str, Any], path: list[str] | None) -> dict[str, Any]:
    """What a Python saw of the import of a component: see `child`. `path` is its `sys.path`; None: its own."""
    run_child(python, request, {}, path)
    found: dict[str, Any] = json.loads(Path(request["answer"]).read_text())
    return found


def wheel(subject: Subject) -> str:
    """The package builds, installs into a new virtual environment, and gives tasks there."""
    package = subject.found.its_package()
    installed = package.installed()
    name = package.qualified(subject.label)
    installed.check_module(draw_in(subject, str(installed.python), name, 3)["file"])
    return f"{installed.remark}{package.stale('environments')}"
