"""The right choice is always the first one."""

from __future__ import annotations

from sums import Sums

from rollouts import Tool


class Fault(Sums):
    def tools(self, task):
        choices = {"type": "string", "enum": [str(task.answer), str(task.answer + 10), str(task.answer + 1)]}
        parameters = {"properties": {"total": choices}, "required": ["total"]}
        return [self.add, self.define, Tool("choose", lambda total: "chosen", "Choose a total.", parameters)]
