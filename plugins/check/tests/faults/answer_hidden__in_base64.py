"""The prompt has the answer in base64."""

from __future__ import annotations

import base64

from sums import Sums


class Fault(Sums):
    def question(self, first, second):
        return f"[{base64.b64encode(str(first + second).encode()).decode()}] What is {first} plus {second}?"
