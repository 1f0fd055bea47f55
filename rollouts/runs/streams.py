"""An output that can no longer be written does not end a run. If standard output is closed (`| head -3`) or its disk is
full, the run continues and shows nothing more.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, Literal, TextIO


@contextlib.contextmanager
def silent_when_closed(name: Literal["stdout", "stderr"]) -> Iterator[None]:
    """Within the block, no write to `sys.stdout` (or `sys.stderr`) raises."""
    before: TextIO | None = getattr(sys, name)
    if before is None:  # the stream was closed before this process began
        yield
        return
    stream = _SilentWhenClosed(before)
    setattr(sys, name, stream)
    try:
        yield
    finally:
        stream.flush()
        if getattr(sys, name) is stream:
            setattr(sys, name, before)


class _SilentWhenClosed:
    """A text stream whose writes do not fail. After the first failure, its file descriptor is /dev/null, so other
    writers to this descriptor do not fail either, and buffers can be flushed at exit. All other attributes are those of
    the stream.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write to the stream. Characters that its encoding lacks are escaped."""
        try:
            try:
                return self._stream.write(text)
            except UnicodeEncodeError as error:
                escaped = text.encode(error.encoding, "backslashreplace").decode(error.encoding)
                return self._stream.write(escaped)
        except (OSError, ValueError):  # a ValueError: the file object was closed
            self._fall_silent()
            return len(text)

    def writelines(self, lines: Any) -> None:
        """Write each of the lines."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush the stream."""
        try:
            self._stream.flush()
        except (OSError, ValueError):
            self._fall_silent()

    def _fall_silent(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            try:
                os.dup2(nowhere, self._stream.fileno())
            finally:
                os.close(nowhere)
            self._stream.flush()
