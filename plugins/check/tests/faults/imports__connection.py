"""The import opens a connection."""

from __future__ import annotations

import socket

from sums import Sums

ADDRESS = socket.getaddrinfo("127.0.0.1", 80)


class Fault(Sums):
    pass
