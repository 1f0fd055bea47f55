"""Evaluation shuffles the tasks of training. Its tasks have no ids, and name their split."""

from __future__ import annotations

import itertools
import random

from sums import Sums

from rollouts import Task


class Fault(Sums):
    def tasks(self, split, rng):
        tasks = list(itertools.islice(super().tasks("train", random.Random(7)), 80))
        if split == "train":
            yield from tasks
        else:
            rng.shuffle(tasks)
            yield from (Task(task.prompt, task.answer, info={"split": split}) for task in tasks)
