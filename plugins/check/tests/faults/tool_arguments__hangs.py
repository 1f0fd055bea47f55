"""A tool waits for ever for some texts."""

from __future__ import annotations

import time

from sums import Sums

from rollouts import tool


class Fault(Sums):
    @tool(timeout_seconds=0.2)
    def define(self, word: str) -> str:
        """The meaning of a word."""
        while len(word) > 1000 and not self.folder.name == "":
            time.sleep(0.05)
        raise ValueError("only the word plus is known")
