"""Run a command of rollouts in a process of its own, to its end: for the runs of several seeds or models."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from rollouts.supervisor import PR_SET_PDEATHSIG

MISTAKE = 2
INTERRUPTED = (128 + signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGHUP)
"""Exit codes of a command."""


def shown_flags(display: str) -> list[str]:
    """The flags that give a command this display."""
    return [] if display == "auto" else [f"--display={display}"]


def run_command(arguments: Sequence[str], variables: Mapping[str, str] = MappingProxyType({})) -> int:
    """Run `rollouts ARGUMENTS`, with more environment `variables`. Returns the exit code; 128 + n if signal n ended it.
    Ctrl-C ends it as usual.

    The child has its own process group, so that it gets Ctrl-C only from this process, once.
    """
    child = subprocess.Popen(
        [sys.executable, "-m", "rollouts", *arguments],
        stdin=subprocess.DEVNULL,
        env={**os.environ, **variables},
        process_group=0,
        preexec_fn=_end_with_parent,
    )
    interrupted = False
    while True:
        try:
            code = child.wait()
            break
        except KeyboardInterrupt:
            interrupted = True
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(signal.SIGINT)
    if interrupted:
        return 128 + signal.SIGINT
    return code if code >= 0 else 128 - code


def _end_with_parent() -> None:
    """In the child: end when the parent is killed, so that the same command can be typed again at once."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
