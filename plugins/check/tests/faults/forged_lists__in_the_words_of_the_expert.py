"""The reward looks for the answer in parentheses, anywhere in the reply."""

from __future__ import annotations

import re

from sums import Sums

from rollouts import Message, reward


class Fault(Sums):
    def demonstrations(self, split, rng):
        for messages in super().demonstrations(split, rng):
            yield [*messages[:-1], Message("assistant", f"The answer is ({messages[-1].text}).")]

    @reward
    def correct(self, task, trajectory):
        return float(str(task.answer) in re.findall(r"\((\d+)\)", trajectory.last_text))
