"""The process in which tools with `isolate="process"` run: reads a request a line, answers a line, until it is killed.

    {"load": {module, name, file}}                        -> {"loaded": true} | {"raised": words}
    {"call": {module, name, file}, "label", "arguments",
     "characters_max"}                                    -> {"text"} | {"raised"} | {"refused"}: words for the model

JSON both ways: the arguments came from a model as JSON, and what goes back is text. The tool's own standard output goes
where errors go, since the pipe is ours; its standard input is empty. The process belongs to whoever started it: when
that one is gone, however it went, this one and what its tools started are killed. Left out: who starts it
(`processes`).
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import threading
from typing import Any

from rollouts.env.isolated import Reference, find_function
from rollouts.env.results import result_text, shortened
from rollouts.env.schema import validate_arguments
from rollouts.errors import named

__all__ = ["answer", "main"]


def main(lifeline: int) -> None:
    """Serve standard input until it ends. `lifeline` is a pipe that nobody writes to: it closes with its owner."""
    with os.fdopen(os.dup(0), "rb") as requests, os.fdopen(os.dup(1), "wb") as answers:
        _give_away_streams()
        _die_with_owner(lifeline)
        for line in requests:
            answers.write(json.dumps(answer(json.loads(line))).encode() + b"\n")
            answers.flush()


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """What came of one request; nothing that a tool raises passes."""
    try:
        if "load" in request:
            find_function(Reference(**request["load"]))
            return {"loaded": True}
        function = find_function(Reference(**request["call"]))
        arguments = validate_arguments(function, request["arguments"], request["label"])
        if isinstance(arguments, str):
            return {"refused": arguments}
        return {"text": shortened(result_text(function(**arguments)), request["characters_max"])}
    except BaseException as error:  # a tool may raise anything, also SystemExit
        return {"raised": shortened(named(error), request.get("characters_max", 1000))}


def _give_away_streams() -> None:
    """A tool that prints, or reads, must not touch the pipes."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)


def _die_with_owner(lifeline: int) -> None:
    """Kill this group of processes when the pipe closes: by the kernel where it can, since a tool may hold the GIL."""
    os.set_inheritable(lifeline, False)
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    threading.Thread(target=_wait_for_end, args=(lifeline,), name="rollouts-lifeline", daemon=True).start()


def _wait_for_end(lifeline: int) -> None:
    select.select([lifeline], [], [])
    os.killpg(0, signal.SIGKILL)
