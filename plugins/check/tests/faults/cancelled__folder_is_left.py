"""`close` removes nothing."""

from __future__ import annotations

from sums import Sums


class Fault(Sums):
    def close(self):
        return None
