"""`shared` starts a process that nothing ends."""

from __future__ import annotations

import subprocess

from sums import Sums

started = []


class Fault(Sums):
    def shared(self):
        started.append(subprocess.Popen(["sleep", "9"]))
        return len(started)

    def setup(self, task, shared):
        super().setup(task)
        self.server = shared
