"""When a run began, and the seconds since then. Standard library only, so that a run can take the time first."""

from __future__ import annotations

import time
from typing import NamedTuple


class Start(NamedTuple):
    """The moment when a run or a phase began, in seconds of the wall clock and of this process's CPU time."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> Start:
        """This moment."""
        return cls(time.perf_counter(), time.process_time())

    def seconds(self) -> dict[str, float]:
        """The seconds since then, under the keys of summary.json."""
        now = Start.now()
        return {"wall_seconds": now.wall - self.wall, "cpu_seconds": now.cpu - self.cpu}
