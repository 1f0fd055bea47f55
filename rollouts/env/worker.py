"""The process in which tools with `isolate="process"` run: reads a request a line, answers a line, until it is killed.

    {"load": [module, name, file]}
    {"call": [module, name, file], "label", "arguments", "characters_max"}

Each request has a `number`, and its answer has the same one beside the `outcome`, a ToolOutcome, and the `fault` (of
`rollouts.error_log`) where the tool raised. A tool that forks
leaves two processes that return from it: only the worker itself answers, and reads on.

JSON both ways: the arguments came from a model as JSON, and what goes back is text. The tool's own standard output goes
where errors go, since the pipe is ours; its standard input is empty. Left out: who starts it (`processes`), and who
ends it with all that its tools started (`rollouts.supervisor`).
"""

from __future__ import annotations

import json
import os
from typing import Any

from rollouts.env.isolated import Reference, find_function
from rollouts.env.results import ToolOutcome, result_text, shortened
from rollouts.env.schema import validate_arguments
from rollouts.error_log import fault_of
from rollouts.errors import named, words_of


def main() -> None:
    """Serve standard input until it ends."""
    worker = os.getpid()
    with os.fdopen(os.dup(0), "rb") as requests, os.fdopen(os.dup(1), "wb") as answers:
        _give_away_streams()
        for line in requests:
            request = json.loads(line)
            answered = answer(request)
            if os.getpid() != worker:
                os._exit(0)
            answers.write(json.dumps({"number": request["number"], **answered}).encode() + b"\n")
            answers.flush()


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """The `outcome` of one request, and the `fault` where a tool raised; nothing that a tool raises passes."""
    try:
        return {"outcome": _outcome(request)}
    except BaseException as error:  # a tool may raise anything, also SystemExit
        said = words_of(error) if "load" in request else named(error)  # the model has no use for our lines
        text = shortened(f"Error: {said}", request.get("characters_max", 1000))
        fault = fault_of(error)
        return {"outcome": ToolOutcome(text, "exception", fault.words), "fault": fault}


def _outcome(request: dict[str, Any]) -> ToolOutcome:
    if "load" in request:
        find_function(Reference(*request["load"]))
        return ToolOutcome("")
    function = find_function(Reference(*request["call"]))
    arguments = validate_arguments(function, request["arguments"], request["label"])
    if isinstance(arguments, str):
        return ToolOutcome(shortened(f"Error: {arguments}", request["characters_max"]), "bad_arguments")
    return ToolOutcome(shortened(result_text(function(**arguments)), request["characters_max"]))


def _give_away_streams() -> None:
    """A tool that prints, or reads, must not touch the pipes."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
