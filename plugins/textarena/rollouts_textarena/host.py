"""A program that plays games of TextArena, each in a process of its own.

    python -m rollouts_textarena.host FD            serve the games whose sockets come through this socket
    python -m rollouts_textarena.host --probe '{"ID": PLAYERS, ...}'
                                                    print why each game cannot begin, as JSON; null if it can

Upstream seeds and uses the global `random`, so two games cannot share a process. This process imports upstream once,
and forks for each game. The run sends one end of a socket pair for each game; the game ends when the other end closes.
When the run ends, also by `kill -9`, its socket closes, and this program ends all games.
"""

from __future__ import annotations

import json
import os
import queue
import random
import re
import signal
import socket
import sys
import threading
from typing import Any

LITERALS_MIN = 3
"""From so many moves in the last message on, the opponent takes one as it is."""

BEGIN_SECONDS = 5
"""How much CPU time a probe gives a game for its first observation. A clock would say more of a busy machine."""


def main() -> None:
    _prepare()
    if sys.argv[1] == "--probe":
        print(json.dumps({game: _probe(game, players) for game, players in json.loads(sys.argv[2]).items()}))
        return
    control = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nothing waits for the games
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            os.killpg(0, signal.SIGKILL)  # this program leads its process group
        if os.fork() == 0:
            control.close()
            _serve(socket.socket(fileno=descriptors[0]))
            os._exit(0)
        os.close(descriptors[0])


def _prepare() -> None:
    """Import upstream, without downloads, and with nothing on the standard output that is not ours."""
    import nltk
    import numpy  # noqa: F401  # before the forks

    nltk.download = lambda *args, **kwargs: True  # a game whose data is missing raises when it reads them
    import textarena  # noqa: F401


def _probe(game: str, players: int) -> dict[str, str] | None:
    """The exception that making the game and beginning it raises. A game that takes long to begin counts as good."""

    def late(*_: object) -> None:
        raise TimeoutError(f"more than {BEGIN_SECONDS} s of CPU time")

    import textarena

    signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, BEGIN_SECONDS)
    try:
        env = textarena.make(game)
        env.reset(num_players=players, seed=0)
        env.get_observation()
    except TimeoutError:
        return None
    except Exception as exc:
        return {"type": type(exc).__name__, "message": str(exc)}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return None


def _serve(connection: socket.socket) -> None:
    """Play one game: a line of JSON in, a line of JSON out."""
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, lines), daemon=True).start()
    try:
        play = Play(**json.loads(lines.get()))
        answer = play.advance()
        while True:
            connection.sendall(json.dumps(answer, default=str).encode() + b"\n")
            answer = play.act(json.loads(lines.get())["action"])
    except Exception as exc:
        words = f"{type(exc).__name__}: {exc}"
        connection.sendall(json.dumps({"error": words}).encode() + b"\n")
        lines.get()  # until the other end closes


def _read(connection: socket.socket, lines: queue.SimpleQueue[bytes]) -> None:
    """Read lines to the end, and then end the process, also in the middle of an upstream loop."""
    with connection.makefile("rb") as file:
        for line in file:
            lines.put(line)
    os._exit(0)


class Play:
    """One game. The model has the `seats`; a scripted opponent has the others."""

    def __init__(self, game: str, seed: int, players: int, seats: list[int]) -> None:
        import numpy
        import textarena

        random.seed(seed)  # some games draw before upstream seeds
        numpy.random.seed(seed)
        self._env = textarena.make(game)
        self._env.reset(num_players=players, seed=seed)
        self._seats = set(seats)
        self._opponent = random.Random(f"opponent {seed}")
        self._seen: dict[int, str] = {}
        self._is_done = False

    def advance(self) -> dict[str, Any]:
        """Let the opponent move until it is the model's turn, or the game ends."""
        while not self._is_done:
            player, observation = self._env.get_observation()
            text = observation if isinstance(observation, str) else self._as_text(observation)
            if player in self._seats:
                return {"player": player, "observation": self._news(player, text).strip("\n")}
            self._step(random_action(text, self._opponent))
        rewards, info = self._env.close()
        return {"rewards": rewards, "info": info}

    def act(self, action: str) -> dict[str, Any]:
        self._step(action)
        return self.advance()

    def _step(self, action: str) -> None:
        self._is_done, _ = self._env.step(action=action)

    def _news(self, player: int, text: str) -> str:
        """What the player has not seen yet. Upstream repeats the earlier observations."""
        seen, self._seen[player] = self._seen.get(player, ""), text
        return text[len(seen) :] if seen and text.startswith(seen) else text

    def _as_text(self, messages: list[tuple[int, str, Any]]) -> str:
        """The new messages of a game without observation wrapper, as upstream's wrapper writes them."""
        names = {-1: "GAME", **{key: name for key, name in self._env.state.role_mapping.items() if key != -1}}
        return "".join(f"\n[{names.get(sender, f'Player {sender}')}] {text}" for sender, text, _ in messages)


def random_action(observation: str, rng: random.Random) -> str:
    """One of the moves in brackets that the last message of an observation shows, else one like those of the rules."""
    last = observation.rpartition("[GAME]")[2]
    moves = _moves(last)
    if len(moves) >= LITERALS_MIN:
        return rng.choice(moves)
    moves = moves + _moves(observation) or ["[0]"]
    move = rng.choice(moves)
    return re.sub(r"\d+", lambda number: str(rng.randint(0, max(3, int(number[0])))), move)


def _moves(text: str) -> list[str]:
    found = re.findall(r"\[[^\[\]\n]{1,40}\]", text)
    return [move for move in found if not re.match(r"\[(GAME|PLAYER|Player)", move)]


if __name__ == "__main__":
    main()
