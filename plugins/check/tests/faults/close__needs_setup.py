"""`close` uses what only `setup` makes."""

from __future__ import annotations

import shutil

from sums import Sums


class Fault(Sums):
    def close(self):
        shutil.rmtree(str(self.folder / "."), ignore_errors=True)
