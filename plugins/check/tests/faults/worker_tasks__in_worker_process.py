"""The tasks depend on the process."""

from __future__ import annotations

import os

from sums import Sums


class Fault(Sums):
    def question(self, first, second):
        return f"Process {os.getpid()}: what is {first} plus {second}?"
