"""The constructor makes a folder, and `close` runs for objects of an episode only."""

from __future__ import annotations

import tempfile
from pathlib import Path

from sums import Sums


class Fault(Sums):
    def __post_init__(self):
        super().__post_init__()
        self.notes = Path(tempfile.mkdtemp(prefix="notes"))

    def close(self):
        super().close()
        if self.notes.is_dir():
            self.notes.rmdir()
