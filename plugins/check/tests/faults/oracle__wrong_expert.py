"""The expert's last message has words around the number."""

from __future__ import annotations

from sums import Sums

from rollouts import Message


class Fault(Sums):
    def demonstrations(self, split, rng):
        for messages in super().demonstrations(split, rng):
            yield [*messages[:-1], Message("assistant", f"It is {messages[-1].text}.")]
