"""A tool's result depends on the process."""

from __future__ import annotations

import os

from sums import Sums

from rollouts import tool


class Fault(Sums):
    @tool
    def define(self, word: str) -> str:
        """The meaning of a word."""
        return f"process {os.getpid()}"
