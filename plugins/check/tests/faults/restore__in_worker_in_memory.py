"""What `state` saves is in the memory of the process."""

from __future__ import annotations

from sums import Sums

kept = {}


class Fault(Sums):
    def state(self):
        kept[id(self)] = self.calls
        return {"key": id(self)}

    def restore(self, state):
        self.calls = kept[state["key"]]
