"""A taskset that needs a container."""

import verifiers.v1 as vf

__all__ = ["BoxesTaskset"]


class BoxesTask(vf.Task[vf.TaskData]):
    NEEDS_CONTAINER = True


class BoxesTaskset(vf.Taskset[BoxesTask, vf.TasksetConfig]):
    def load(self):
        return [BoxesTask(vf.TaskData(prompt="Open the box."), self.config.task)]
