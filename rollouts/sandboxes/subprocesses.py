"""Sandboxes that a process keeps (`keeping`), and the sandbox `subprocess`: a temporary folder, and limits of the
operating system. Subclass `KeptSandboxes` to put a program such as `bwrap` in front of every command.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rollouts.child_environment import child_environment
from rollouts.sandboxes.base import SandboxLimits

if TYPE_CHECKING:
    from rollouts.sandboxes.keeping import KeptSandbox


class KeptSandboxes:
    """Opens sandboxes that a keeper keeps. A subclass gives `words`, `not_stopped` and, if its commands do not run as
    plain processes, `enclosed`.

    Args:
        limits: the limits of each sandbox
    """

    words = ""
    not_stopped: Sequence[str] = ()
    inside = ""
    """The path of the workspace for commands; "": its path on this machine, which output shows as relative paths."""
    own_network = False
    """Whether commands cannot reach the network of this machine."""
    own_processes = 0
    """How many processes belong to the program in front of a command."""

    def __init__(self, *, limits: SandboxLimits = SandboxLimits()) -> None:
        limits.check()
        self.limits = limits
        self._starts = threading.BoundedSemaphore(int(limits.starts_max))

    def check(self) -> None:
        """Everything that is needed is part of Python."""

    def open(self) -> KeptSandbox:
        """A new sandbox, when fewer than `starts_max` others start. Raises SandboxError."""
        from rollouts.sandboxes.keeping import KeptSandbox

        with self._starts:
            return KeptSandbox(self)

    def enclosed(self, argv: list[str], folder: str) -> list[str]:
        """The command that runs `argv` in the sandbox. `folder` has the folders `workspace` and `tmp`."""
        return argv

    def variables(self, folder: str) -> dict[str, str]:
        """The environment variables of a command."""
        return {**child_environment(), "HOME": f"{folder}/workspace", "TMPDIR": f"{folder}/tmp"}


class SubprocessSandboxes(KeptSandboxes):
    """Commands as plain processes in a temporary folder, with limits. They can read and write all files of the user,
    read the environment variables of the run, and use the network: for code that may be wrong, not for code that may be
    hostile.

    Args:
        limits: the limits of each sandbox
    """

    words = "plain processes in a temporary folder, with limits of time, memory, processes, file size and output"
    not_stopped = (
        "reading and writing files outside of the workspace",
        "the network",
        "killing other processes of the user, also this run",
        "reading the environment variables of this run, with their secrets; --sandbox bubblewrap stops all of these",
    )
