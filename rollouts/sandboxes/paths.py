"""Reading and writing files of a workspace that is a folder of this machine. A command may have put anything there, so
a link that leads out of the workspace is refused, and so is everything that is not a regular file.
"""

from __future__ import annotations

import os
import stat

LINKS_MAX = 40
_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # NONBLOCK: opening a named pipe must not wait


def read_file(workspace: str, path: str, bytes_max: int, inside: str = "") -> bytes:
    """The content of a file. `inside` is the path of the workspace for commands ("": the same as outside).

    Raises OSError if there is no such file, and ValueError if it is outside of the workspace, not a regular file, or
    larger than `bytes_max`.
    """
    with open(_opened(workspace, path, inside, os.O_RDONLY), "rb") as file:
        data = file.read(bytes_max + 1)
    if len(data) > bytes_max:
        raise ValueError(f"{path} is larger than {bytes_max} bytes")
    return data


def write_file(workspace: str, path: str, data: bytes, inside: str = "") -> None:
    """Write a file, and make the folders above it. Raises OSError, and ValueError as `read_file` does."""
    with open(_opened(workspace, path, inside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
        file.write(data)


def _opened(workspace: str, path: str, inside: str, flags: int) -> int:
    parts = _resolved(workspace, path, inside or workspace)
    if not parts:
        raise IsADirectoryError(f"{path} is the workspace itself")
    try:
        if flags & os.O_CREAT:
            os.makedirs(os.path.join(workspace, *parts[:-1]), exist_ok=True)
        descriptor = os.open(os.path.join(workspace, *parts), flags | _FLAGS, 0o644)
    except OSError as error:  # the model may read it, so it names the path in the sandbox
        raise OSError(error.errno, error.strerror, path) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{path} is not a regular file")
    return descriptor


def _resolved(workspace: str, path: str, inside: str) -> list[str]:
    """The parts of the path below the workspace, with every link followed. Raises ValueError."""
    pending, done, links = _beneath(path, inside, path), list[str](), 0
    while pending:
        part = pending.pop(0)
        if part == "..":
            if not done:
                raise _outside(path)
            done.pop()
        elif os.path.islink(link := os.path.join(workspace, *done, part)):
            links += 1
            if links > LINKS_MAX:
                raise ValueError(f"{path} has too many links")
            target = os.readlink(link)
            done = [] if target.startswith("/") else done
            pending = [*_beneath(target, inside, path), *pending]
        else:
            done.append(part)
    return done


def _beneath(target: str, inside: str, path: str) -> list[str]:
    """The parts of a path, without the workspace at its beginning. Raises ValueError, which names `path`."""
    parts = [part for part in target.split("/") if part not in ("", ".")]
    if not target.startswith("/"):
        return parts
    root = [part for part in inside.split("/") if part]
    if parts[: len(root)] != root:
        raise _outside(path)
    return parts[len(root) :]


def _outside(path: str) -> ValueError:
    return ValueError(f"{path} is outside of the sandbox's workspace")
