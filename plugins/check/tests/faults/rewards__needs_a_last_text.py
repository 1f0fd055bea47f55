"""The reward reads the last message, which is a tool's if the episode was cut off."""

from __future__ import annotations

from sums import Sums

from rollouts import reward


class Fault(Sums):
    @reward
    def correct(self, task, trajectory):
        said = {message.role: message.text for message in trajectory.messages[-1:]}
        return float(said["assistant"].strip() == str(task.answer))
