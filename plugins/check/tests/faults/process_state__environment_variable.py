"""An episode keeps its task in an environment variable."""

from __future__ import annotations

import os

from sums import Sums


class Fault(Sums):
    def setup(self, task):
        super().setup(task)
        os.environ["SUMS_TASK"] = task.id

    def close(self):
        super().close()
        os.environ.pop("SUMS_TASK", None)
