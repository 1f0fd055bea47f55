"""For some tasks, `tools` returns two tools of one name."""

from __future__ import annotations

from sums import Sums


class Fault(Sums):
    def tools(self, task):
        return [self.add, self.define, *([self.add] if task.answer % 10 == 0 else [])]
