"""`state` leaves out the count that the model sees."""

from __future__ import annotations

from sums import Sums

from rollouts import tool


class Fault(Sums):
    def state(self):
        return {}

    def restore(self, state):
        pass

    @tool
    def add(self, first: int, second: int) -> str:
        """Add two numbers."""
        self.calls += 1
        return f"{first + second} (call {self.calls})"

    def demonstrations(self, split, rng):
        for messages in super().demonstrations(split, rng):
            yield [*messages[:-2], *messages[1:]]
