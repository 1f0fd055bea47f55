"""The prompts have the time."""

from __future__ import annotations

from datetime import datetime

from sums import Sums


class Fault(Sums):
    def __post_init__(self):
        super().__post_init__()
        self.now = datetime.now()

    def question(self, first, second):
        return f"At {self.now}: what is {first} plus {second}?"
