"""A tool starts a process that nothing ends."""

from __future__ import annotations

import subprocess

from sums import Sums

from rollouts import tool

started = []


class Fault(Sums):
    @tool
    def define(self, word: str) -> str:
        """The meaning of a word."""
        if word == "self":
            started.append(subprocess.Popen(["sleep", "20"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        raise ValueError("only the word plus is known")
