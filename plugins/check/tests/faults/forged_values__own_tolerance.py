"""The reply says how far off it may be."""

from __future__ import annotations

import json

from sums import Sums

from rollouts import Message, reward


class Fault(Sums):
    def demonstrations(self, split, rng):
        for messages in super().demonstrations(split, rng):
            reply = json.dumps({"total": int(messages[-1].text), "error": 0})
            yield [*messages[:-1], Message("assistant", reply)]

    @reward
    def correct(self, task, trajectory):
        try:
            said = json.loads(trajectory.last_text)
            return float(abs(said["total"] - task.answer) <= said["error"])
        except (ValueError, TypeError, KeyError):
            return 0.0
