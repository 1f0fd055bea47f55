"""`reply` adds its hint to the messages of the trajectory."""

from __future__ import annotations

from sums import Sums

from rollouts import Message


class Fault(Sums):
    def reply(self, trajectory):
        if trajectory.last_text.strip() == str(self.task.answer) or trajectory.turns > 2:
            return None
        trajectory.messages.append(Message("user", "Hint: use the tool."))
        return "No."
