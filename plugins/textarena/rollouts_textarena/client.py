"""The process that hosts the games of a run, and one game of it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

END_SECONDS = 5.0


class Host:
    """The process that plays the games. Threads may share it."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        self._lock = threading.Lock()
        threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # a process with threads cannot fork safely
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rollouts_textarena.host", str(theirs.fileno())],
                env={**os.environ, **threads, "PYTHONHASHSEED": "0"},  # sets of texts have one order
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )

    def open(self, game: str, seed: int, players: int, seats: list[int]) -> Game:
        """Begin a game, and wait for the first turn of a seat."""
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            socket.send_fds(self._control, [b"g"], [theirs.fileno()])
        return Game(ours, {"game": game, "seed": seed, "players": players, "seats": seats})

    @contextlib.contextmanager
    def opened(self, game: str, seed: int, players: int, seats: list[int]) -> Iterator[Game]:
        """A game that ends with the block."""
        found = self.open(game, seed, players, seats)
        try:
            yield found
        finally:
            found.close()

    def close(self) -> None:
        """End the process and all games."""
        self._control.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Game:
    """One game: whose turn it is and what that player sees, or the rewards.

    `observation` is what `player` has not seen yet. `rewards` is None until the game ends.
    """

    def __init__(self, connection: socket.socket, request: dict[str, Any]) -> None:
        self.player, self.observation = -1, ""
        self.rewards: dict[int, Any] | None = None
        self.info: dict[int, dict[str, Any]] = {}
        self._connection = connection
        self._file = connection.makefile("rb")
        try:
            self._exchange(request)
        except BaseException:
            self.close()
            raise

    @property
    def is_done(self) -> bool:
        return self.rewards is not None

    def act(self, action: str) -> None:
        """Move, and wait for the next turn of a seat or the end."""
        self._exchange({"action": action})

    def close(self) -> None:
        """End the game. A thread that waits for it raises."""
        with contextlib.suppress(OSError):  # it is closed
            self._connection.shutdown(socket.SHUT_RDWR)
        self._file.close()
        self._connection.close()

    def _exchange(self, request: dict[str, Any]) -> None:
        try:
            self._connection.sendall(json.dumps(request).encode() + b"\n")
            line = self._file.readline()
        except (OSError, ValueError) as exc:
            raise RuntimeError(f"the process of the game ended: {exc}") from exc
        if not line:
            raise RuntimeError("the process of the game ended")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"the game raised {answer['error']}")
        if "rewards" in answer:
            self.rewards = {int(player): value for player, value in (answer["rewards"] or {}).items()}
            self.info = {int(player): value for player, value in answer["info"].items()}
        else:
            self.player, self.observation = answer["player"], answer["observation"]
