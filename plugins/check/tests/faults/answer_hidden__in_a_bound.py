"""The largest value of an argument is the answer."""

from __future__ import annotations

from sums import Sums

from rollouts import Tool


class Fault(Sums):
    def tools(self, task):
        parameters = {"properties": {"total": {"type": "integer", "minimum": 0, "maximum": task.answer}}}
        return [self.add, self.define, Tool("check", lambda total=0: "checked", "Check a total.", parameters)]
