"""Task folders as Harbor's own templates make them, for the tests."""

from __future__ import annotations

import textwrap
from pathlib import Path

HELLO = {
    "task.toml": """\
        schema_version = "1.4"

        [task]
        name = "rollouts/hello"
        authors = [{ name = "A Tester" }]

        [metadata]
        difficulty = "easy"

        [verifier]
        timeout_sec = 30.0
        env = { EXPECTED = "hello" }

        [agent]
        timeout_sec = 120.0

        [environment]
        build_timeout_sec = 600.0
        env = { COLOR = "${NO_SUCH_COLOR:-blue}" }
        """,
    "instruction.md": """\
        <!-- harbor-canary GUID 1234 -->

        Write the word that greets.txt asks for into /app/out.txt.
        """,
    "environment/Dockerfile": """\
        FROM localhost/rollouts-test-base

        # The data of the task.
        ENV GREETING=hello
        COPY greets.txt /app/data/
        RUN mkdir -p /app/made && \\
            echo $GREETING > /app/made/by-run
        WORKDIR /app
        CMD ["sleep", "infinity"]
        """,
    "environment/greets.txt": "hello\n",
    "tests/test.sh": """\
        #!/bin/sh
        # It runs from the working directory.
        if sh /tests/check.sh; then
          echo 1 > /logs/verifier/reward.txt
        else
          echo 0 > /logs/verifier/reward.txt
        fi
        """,
    "tests/check.sh": '[ "$(cat out.txt)" = "$EXPECTED" ] && [ "$(cat data/greets.txt made/by-run)" ]\n',
    "solution/solve.sh": """\
        #!/bin/sh
        echo solving
        cp /solution/answer /app/out.txt
        """,
    "solution/answer": "hello\n",
}
"""The files of a task, as `harbor init` lays them out."""


def make_task(folder: Path, **files: str | None) -> Path:
    """A task folder with other files, whose names have `__` for a slash and `_dot_` for a dot; None leaves one out."""
    named = {name.replace("__", "/").replace("_dot_", "."): text for name, text in files.items()}
    for name, text in {**HELLO, **named}.items():
        if text is None:
            continue
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return folder
