"""Evaluation has the tasks of training, with ids that name the split."""

from __future__ import annotations

import random

from sums import Sums

from rollouts import Task


class Fault(Sums):
    def tasks(self, split, rng):
        for number, task in zip(range(60), super().tasks(split, random.Random(7)), strict=False):
            yield Task(task.prompt, task.answer, id=f"{split}-{number}")
