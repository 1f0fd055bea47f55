"""The command in a terminal, which a test types into."""

from __future__ import annotations

import os
import pty
import select
import sys
import time

import forks


class Terminal:
    """The command in a terminal of its own, as a context manager that ends it. Every wait has a deadline."""

    def __init__(self, *argv: str) -> None:
        self._file, inside = pty.openpty()
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), inside)
        self._process = forks.popen([sys.executable, "-m", "rollouts", *argv], start_new_session=True, **streams)
        os.close(inside)
        self.pid, self._seen = self._process.pid, b""
        self._end = time.monotonic() + 120

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self._process.kill()
        self._process.wait()
        os.close(self._file)

    def _read(self, seconds: float) -> bytes | None:
        """What came within so many seconds: None: nothing; empty: the other end is closed."""
        assert time.monotonic() < self._end, self._seen
        if not select.select([self._file], [], [], seconds)[0]:
            return None
        try:
            return os.read(self._file, 4096)
        except OSError:  # the other end is closed
            return b""

    def until(self, words: str, *, typing: str = "") -> None:
        """Read until the words are there. What is `typing` is typed, and typed again while nothing comes: Python does
        not see a Ctrl-C that arrives just before it begins to wait for a key.
        """
        self.type(typing)
        while words.encode() not in self._seen:
            data = self._read(15.0)
            assert data != b"", self._seen
            if data is None:
                self.type(typing)
            self._seen += data or b""
        self._seen = self._seen.partition(words.encode())[2]

    def type(self, text: str) -> None:
        os.write(self._file, text.encode())

    def exit_code(self) -> int:
        while self._read(15.0) != b"":
            pass
        return self._process.wait(120)
