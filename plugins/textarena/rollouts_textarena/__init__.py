"""The games of TextArena as environments: `--env textarena/TicTacToe-v0`, `--env textarena_self/TicTacToe-v0`.

A task is a seed. The model reads what upstream's own wrapper shows to its player, and its whole reply is the move.

    catalog     which games there are, and why one cannot be served
    host        the program that plays games, each in a process of its own
    client      the run's side of that program
    hooks       the names, for `rollouts`
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import trio

from rollouts import Role, Task, Trajectory, metric, reward
from rollouts.errors import ConfigError
from rollouts_textarena import catalog

if TYPE_CHECKING:
    from rollouts_textarena.client import Game, Host

__all__ = ["SelfPlay", "TextArena", "environment_of", "self_play_of"]

SEEDS = 2**32


class _Games:
    """What all games have in common: a host, a game for each episode, and how a game is scored."""

    game: ClassVar[str] = ""
    players: ClassVar[int] = 1
    _played: Game | None = None
    unfinished: float

    def __post_init__(self) -> None:
        reason = catalog.refusal(self.game)
        if reason:
            raise ConfigError(f"textarena/{self.game} cannot be played: {reason}")

    def shared(self) -> Iterator[Host]:
        """The process that plays the games of the run."""
        from rollouts_textarena.client import Host

        host = Host()
        yield host
        host.close()

    def close(self) -> None:
        if self._played is not None:
            self._played.close()

    def _open(self, task: Task, host: Host, seats: list[int]) -> None:
        self._played = host.open(self.game, task.info["seed"], self.players, seats)
        if self._played.observation != task.prompt:
            raise RuntimeError(f"textarena/{self.game} with seed {task.info['seed']} begins differently each time")

    def _outcome(self, player: int) -> float:
        """Upstream's reward of a player; `unfinished` if the game did not end."""
        if self._played is None or self._played.rewards is None:
            return self.unfinished
        return float(self._played.rewards[player])

    @metric
    def finished(self) -> float:
        """1 if the game ended."""
        return float(self._played is not None and self._played.is_done)


@dataclass
class TextArena(_Games):
    """A game of TextArena."""

    seat: int | None = None  # which player the model is, in a game for two; none: drawn for each task
    unfinished: float = 0.0  # the reward of a game that did not end

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seat is not None and not 0 <= self.seat < self.players:
            expected = "0 or 1" if self.players == 2 else "0, in a game for one player"
            raise ConfigError(f"--env.seat {self.seat}: expected {expected}")

    def tasks(self, split: str, rng: random.Random, shared: Host) -> Iterator[Task]:
        """Endless seeds, each with what the model's player sees first."""
        while True:
            seed, drawn = rng.randrange(SEEDS), rng.randrange(self.players)
            seat = drawn if self.seat is None else self.seat
            with shared.opened(self.game, seed, self.players, [seat]) as game:
                if not game.is_done:  # else the opponent began and lost with its first move
                    yield Task(game.observation, id=f"{seed}-{seat}", info={"seed": seed, "seat": seat})

    def setup(self, task: Task, shared: Host) -> None:
        self._seat = task.info["seat"]
        self._open(task, shared, [self._seat])

    def reply(self, trajectory: Trajectory) -> str | None:
        """Play the model's reply and the opponent's moves, and say what is new."""
        assert self._played is not None
        self._played.act(trajectory.last_text)
        return None if self._played.is_done else self._played.observation

    @reward
    def outcome(self) -> float:
        """Upstream's reward."""
        return self._outcome(self._seat)

    @metric
    def invalid_move(self) -> float:
        """1 if an invalid move of the model ended the game."""
        info = self._played.info if self._played is not None else {}
        return float(bool(info.get(self._seat, {}).get("invalid_move")))


@dataclass
class SelfPlay(_Games):
    """A game of TextArena for two, in which the model plays both sides."""

    roles: ClassVar[tuple[Role, ...]] = (Role("player_0"), Role("player_1"))
    unfinished: float = 0.0  # the reward of a game that did not end

    def tasks(self, split: str, rng: random.Random, shared: Host) -> Iterator[Task]:
        """Endless seeds."""
        while True:
            seed = rng.randrange(SEEDS)
            with shared.opened(self.game, seed, self.players, [0, 1]) as game:
                yield Task(game.observation, id=str(seed), info={"seed": seed})

    def setup(self, task: Task, shared: Host) -> None:
        self._open(task, shared, [0, 1])

    async def rollout(self, task: Task, model: Any) -> None:
        """Let the players speak in upstream's order."""
        game = self._played
        assert game is not None
        while not game.is_done:
            reply = await model.role(f"player_{game.player}").say(game.observation)
            await trio.to_thread.run_sync(game.act, reply.text, abandon_on_cancel=True)

    @reward
    def outcome(self, trajectory: Trajectory) -> float:
        """Upstream's reward of the role's player."""
        return self._outcome(int(trajectory.role.removeprefix("player_")))


def environment_of(game: str) -> type[_Games] | None:
    """The environment of a game; None if upstream has no game of this id."""
    players = catalog.players_by_game().get(game)
    return None if players is None else _named(game, players, TextArena, "", ".")


def self_play_of(game: str) -> type[_Games] | None:
    """The environment of a game in which the model plays both sides; None if upstream has none for two of this id."""
    players = catalog.players_by_game().get(game)
    return None if players is None or players < 2 else _named(game, players, SelfPlay, "Self", ", against itself.")


@functools.cache
def _named(game: str, players: int, base: type[_Games], suffix: str, ending: str) -> type[_Games]:
    attributes = {"game": game, "players": players, "__doc__": f"{game} of TextArena{ending}", "__module__": __name__}
    return type("".join(filter(str.isalnum, game)) + suffix, (base,), attributes)
