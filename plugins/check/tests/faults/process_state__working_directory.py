"""`setup` changes the working directory of the process."""

from __future__ import annotations

import os

from sums import Sums


class Fault(Sums):
    def setup(self, task):
        super().setup(task)
        os.chdir(self.folder)
