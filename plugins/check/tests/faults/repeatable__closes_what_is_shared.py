"""`close` closes what all episodes share."""

from __future__ import annotations

import io

from sums import Sums

from rollouts import tool


class Fault(Sums):
    def shared(self):
        return io.StringIO("to add")

    def setup(self, task, shared):
        super().setup(task)
        self.book = shared

    @tool
    def define(self, word: str) -> str:
        """The meaning of a word."""
        return self.book.getvalue()

    def close(self):
        super().close()
        if self.folder is not None:
            self.book.close()
