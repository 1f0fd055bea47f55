"""The process in which tools with `isolate="process"` run. It reads one request per line and writes one answer per
line.

    {"load": [module, name, file]}
    {"call": [module, name, file], "label", "arguments", "characters_max"}

Each request has a `number`. Its answer has the same `number`, the `outcome` (a ToolOutcome), and the `fault` (of
`rollouts.error_log`) if the tool raised. If a tool forks, both processes return from it: only the original process
answers and reads the next request. A function is never sent: this process imports its module or file, as the other one
did.

Requests and answers are JSON: the arguments came from a model as JSON, and the result is text. The tool's standard
output goes to standard error, because standard output is the pipe. Its standard input is empty. Not here: the pool that
starts and calls this process (`processes`), and the supervisor that ends it and its children (`rollouts.supervisor`).
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import operator
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from rollouts.env.authoring import MAIN, ToolReference
from rollouts.env.results import ToolOutcome, result_text, shortened
from rollouts.env.schema import validate_arguments
from rollouts.error_log import fault_of
from rollouts.errors import named, words_of


def main() -> None:
    """Answer the requests on standard input until it is closed."""
    worker = os.getpid()
    streams = take_streams()
    with os.fdopen(streams[0], "rb") as requests, os.fdopen(streams[1], "wb") as answers:
        for line in requests:
            request = json.loads(line)
            answered = answer(request)
            if os.getpid() != worker:
                os._exit(0)
            answers.write(json.dumps({"number": request["number"], **answered}).encode() + b"\n")
            answers.flush()


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """The `outcome` of one request, and the `fault` if the tool raised. Does not raise the tool's exception."""
    try:
        return {"outcome": _outcome(request)}
    except BaseException as error:  # a tool may raise anything, also SystemExit
        said = words_of(error) if "load" in request else named(error)  # the model cannot use the line of a file
        text = shortened(f"Error: {said}", request.get("characters_max", 1000))
        fault = fault_of(error)
        return {"outcome": ToolOutcome(text, "exception", fault.words), "fault": fault}


def _outcome(request: dict[str, Any]) -> ToolOutcome:
    if "load" in request:
        find_function(ToolReference(*request["load"]))
        return ToolOutcome("")
    function = find_function(ToolReference(*request["call"]))
    arguments = validate_arguments(function, request["arguments"], request["label"])
    if isinstance(arguments, str):
        return ToolOutcome(shortened(f"Error: {arguments}", request["characters_max"]), "bad_arguments")
    return ToolOutcome(shortened(result_text(function(**arguments)), request["characters_max"]))


def find_function(reference: ToolReference) -> Callable[..., Any]:
    """The function of a reference. Its module is imported if necessary. Raises any error that the import raises."""
    function: Callable[..., Any] = operator.attrgetter(reference.name)(_module_of(reference))
    return function


def _module_of(reference: ToolReference) -> ModuleType:
    name, file = reference.module, reference.file
    if name in sys.modules:
        return sys.modules[name]
    if name != MAIN and not name.startswith("rollouts_file_") and _is_importable(name):
        return importlib.import_module(name)
    from rollouts.plugins.loading import import_file  # most functions need no more than their module

    return import_file(name, file)


def _is_importable(name: str) -> bool:
    with contextlib.suppress(ImportError):
        return importlib.util.find_spec(name) is not None
    return False


def take_streams() -> tuple[int, int]:
    """Take the standard input and output of this process for messages. From now on, its input is empty, and what it
    prints goes to standard error.
    """
    requests, answers = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # it is a file
    return requests, answers
