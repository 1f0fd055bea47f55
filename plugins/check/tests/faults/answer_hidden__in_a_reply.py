"""The environment tells the answer after a wrong one, and pays for it then."""

from __future__ import annotations

from sums import Sums


class Fault(Sums):
    def reply(self, trajectory):
        said = trajectory.last_text.strip()
        return None if said == str(self.task.answer) or trajectory.turns > 2 else f"No, it is {self.task.answer}."
