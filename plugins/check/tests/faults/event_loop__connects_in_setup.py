"""An async `setup` connects with a socket that waits."""

from __future__ import annotations

import contextlib
import socket

from sums import Sums


class Fault(Sums):
    async def setup(self, task):
        super().setup(task)
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", 1), timeout=0.2):
            pass
