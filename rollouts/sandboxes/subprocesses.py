"""The sandbox `subprocess`: a temporary folder, and limits of the operating system."""

from __future__ import annotations

from rollouts.sandboxes.kept import KeptSandboxes


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
