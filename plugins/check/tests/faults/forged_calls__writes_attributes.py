"""A tool sets any attribute of the environment."""

from __future__ import annotations

from sums import Sums

from rollouts import reward, tool


class Fault(Sums):
    def setup(self, task):
        super().setup(task)
        self.expected = str(task.answer)

    @tool
    def remember(self, name: str, value: str) -> str:
        """Keep a note."""
        if not name.isidentifier():
            raise ValueError("a name has letters")
        setattr(self, name, value)
        return "kept"

    @reward
    def correct(self, trajectory):
        return float(trajectory.last_text.strip() == self.expected)
