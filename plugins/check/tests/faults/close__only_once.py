"""`close` fails if it is called again."""

from __future__ import annotations

import shutil

from sums import Sums


class Fault(Sums):
    def close(self):
        if self.folder is not None:
            shutil.rmtree(self.folder)
