"""`setup` starts a thread that nothing ends."""

from __future__ import annotations

import threading
import time

from sums import Sums


class Fault(Sums):
    def setup(self, task):
        super().setup(task)
        threading.Thread(target=time.sleep, args=(20,), name="ticker", daemon=True).start()
