"""`setup` uses an attribute that does not exist."""

from __future__ import annotations

from sums import Sums


class Fault(Sums):
    def setup(self, task):
        self.folder = self.root / "work"
