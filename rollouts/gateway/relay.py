"""The way from a sandbox without a network to an address outside: this file is copied into the sandbox and run there.

    python relay.py SOCKET PORT COMMAND ARGUMENT...

It listens at 127.0.0.1:PORT, which is the sandbox's own, and forwards each connection to the Unix socket SOCKET, at
which a process outside listens. Meanwhile the command runs; its exit code is that of the relay. It imports nothing of
rollouts.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys

SOCKET = ".rollouts-model"  # the name of the socket in the sandbox's workspace
CHUNK = 1 << 16


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    """Copy until the source ends, and end the target's input."""
    with contextlib.suppress(OSError):  # one of the two has left
        while data := await source.read(CHUNK):
            target.write(data)
            await target.drain()
        target.write_eof()


async def _forward(path: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    # Cancelled when the program has ended.
    with contextlib.suppress(OSError, asyncio.CancelledError), contextlib.closing(writer):
        out_reader, out_writer = await asyncio.open_unix_connection(path)
        with contextlib.closing(out_writer):
            requests = asyncio.ensure_future(_copy(reader, out_writer))
            await _copy(out_reader, writer)
            requests.cancel()


async def relay(path: str, port: int, command: list[str]) -> int:
    """Forward connections while the command runs. Returns its exit code."""
    await asyncio.start_server(lambda *streams: _forward(path, *streams), "127.0.0.1", port)
    process = await asyncio.create_subprocess_exec(*command)
    code = await process.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(asyncio.run(relay(sys.argv[1], int(sys.argv[2]), sys.argv[3:])))
