"""The lines of a Dockerfile that can be followed in a sandbox without images: the image is replaced by its system.

Not here: building images, which the sandboxes of containers do.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rollouts.errors import ConfigError

WITHOUT_EFFECT = ("ARG", "CMD", "ENTRYPOINT", "EXPOSE", "HEALTHCHECK", "LABEL", "MAINTAINER", "STOPSIGNAL", "VOLUME")


class Step(NamedTuple):
    """A line: `WORKDIR` with a path, `ENV` with names and values, `RUN` with a command, or `COPY` with paths of the
    folder and where they go.
    """

    word: str
    values: tuple[str, ...]
    line: int


def read_dockerfile(path: Path) -> tuple[Step, ...]:
    """The steps after FROM; none without such a file. Raises ConfigError for a line that only an image can have."""
    if not path.is_file():
        return ()
    steps, images = list[Step](), 0
    for number, line in _lines(path.read_text(encoding="utf-8")):
        word, _, rest = line.partition(" ")
        word, rest = word.upper(), rest.strip()
        images += word == "FROM"
        is_known = word in ("FROM", "WORKDIR", "ENV", "RUN", "COPY") or (word, rest) == ("USER", "root")
        if images > 1 or not (is_known or word in WITHOUT_EFFECT) or (word != "RUN" and "$" in rest):
            raise _refused(path, number, line)
        if word in ("WORKDIR", "RUN"):
            steps.append(Step(word, (rest,), number))
        elif word in ("ENV", "COPY"):
            steps.append(Step(word, _values(word, rest, path, number), number))
    return tuple(steps)


def _values(word: str, rest: str, path: Path, number: int) -> tuple[str, ...]:
    values = shlex.split(rest)
    if word == "COPY":
        values = [each for each in values if not each.startswith("--chown=") and not each.startswith("--chmod=")]
        if len(values) < 2 or values[0][0] in "-[" or any(".." in each.split("/") for each in values):
            raise _refused(path, number, f"{word} {rest}")
        return tuple(values)
    if "=" not in values[0]:
        values = [f"{values[0]}={' '.join(values[1:])}"]
    return tuple(part for each in values for part in each.split("=", 1))


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """The instructions with the number of their first line; continued lines are joined."""
    begun, parts = 0, list[str]()
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        begun = begun if parts else number
        parts.append(line.removesuffix("\\").strip())
        if not line.endswith("\\"):
            yield begun, " ".join(parts)
            parts = []
    if parts:
        yield begun, " ".join(parts)


def _refused(path: Path, number: int, line: str) -> ConfigError:
    task = path.parent.parent.name
    return ConfigError(
        f"the task {task} needs its image: line {number} of its Dockerfile is `{line[:80]}`\n"
        "type: --env.system image --sandbox podman"
    )
