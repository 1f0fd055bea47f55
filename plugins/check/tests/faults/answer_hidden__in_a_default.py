"""The answer is the default of a tool's argument, which `tools` makes for each task."""

from __future__ import annotations

from sums import Sums

from rollouts import Tool


class Fault(Sums):
    def tools(self, task):
        number = {"type": "integer", "description": "the total", "default": task.answer}
        parameters = {"properties": {"total": number}}
        return [self.add, self.define, Tool("check", lambda total=0: "checked", "Check a total.", parameters)]
