"""A prompt has a role that not every chat template knows."""

from __future__ import annotations

from sums import Sums

from rollouts import Message, Task

STORY = Message("narrator", "A pupil asks:")


class Fault(Sums):
    def tasks(self, split, rng):
        for task in super().tasks(split, rng):
            yield Task([STORY, *task.messages], task.answer, id=task.id)

    def demonstrations(self, split, rng):
        for messages in super().demonstrations(split, rng):
            yield [STORY, *messages]
