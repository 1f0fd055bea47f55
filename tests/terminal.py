"""The command in a terminal, which a test types into; and a terminal for a stream of this process."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import sys
import termios
import threading
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
        patience = 3.0 if typing == "\x03" else 15.0
        while words.encode() not in self._seen:
            data = self._read(patience)
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


_MARK = "\x1b]a mark\x07"


class Screen:
    """A terminal for a stream of this process, as a context manager: what is written to it, and what it would show."""

    def __init__(self, columns: int = 100, rows: int = 40) -> None:
        self._file, inside = pty.openpty()
        self.resize(columns, rows)
        self.stream = os.fdopen(inside, "w", encoding="utf-8", buffering=1)
        self._written = bytearray()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.hang_up()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # the other end is closed
            while data := os.read(self._file, 65536):
                self._written += data

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._file, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def hang_up(self) -> None:
        """Close the stream, after which all of it was read."""
        with contextlib.suppress(OSError):
            self.stream.close()
        self._reader.join(10)
        with contextlib.suppress(OSError):
            os.close(self._file)

    @property
    def text(self) -> str:
        """Everything that was written so far."""
        return self._written.decode(errors="replace").replace(_MARK, "").replace("\r\n", "\n")

    def settle(self) -> None:
        """Wait until everything was read that was written before."""
        count = self._written.count(_MARK.encode())
        self.stream.write(_MARK)
        self.stream.flush()
        while self._written.count(_MARK.encode()) == count:
            time.sleep(0.001)

    def until(self, words: str, count: int = 1) -> str:
        """The text, once the words were written so often."""
        end = time.monotonic() + 30
        while self.text.count(words) < count:
            assert time.monotonic() < end, self.text
            time.sleep(0.01)
        return self.text

    def shown(self) -> list[str]:
        """The lines that are left when the commands are obeyed that move the cursor up and erase lines."""
        lines, at = [""], 0
        for part in re.split(r"(\x1b\[\??[\d;]*[A-Za-z]|\n|\r)", self.text):
            if part == "\n":
                at += 1
                lines += [""] * (at == len(lines))
            elif found := re.fullmatch(r"\x1b\[(\d*)A", part):
                at = max(at - int(found[1] or 1), 0)
            elif part == "\x1b[2K":
                lines[at] = ""
            elif part and part != "\r" and not part.startswith("\x1b["):
                lines[at] += part
        return [line for line in lines if line]
