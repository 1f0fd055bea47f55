"""The module handles Ctrl-C itself."""

from __future__ import annotations

import signal

from sums import Sums

stopped = []
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, lambda *_: stopped.append(True))


class Fault(Sums):
    pass
