"""Tic-tac-toe between two roles, X and O. One model plays both, or plays against a scripted opponent.

A role sees the board as text, and answers with the number of an empty cell. A win is worth 1, a draw 0.5, a loss 0. A
reply that names no empty cell loses the game at once. Each role has its own reward and its own group, so X is compared
with X.

    rollouts run --env tictactoe                              # the model plays against itself
    rollouts run --env tictactoe --env.opponent random        # X is the model, O makes random moves
    rollouts eval --env tictactoe --env.opponent perfect --model RUN
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rollouts import Role
from rollouts.env import metric, reward
from rollouts.errors import ConfigError
from rollouts.types import Message, Task, Trajectory

__all__ = ["TicTacToe", "after", "best_moves", "board_text", "cell_of", "empty_cells", "outcome", "winner"]

EMPTY = "." * 9
LINES = ("012", "345", "678", "036", "147", "258", "048", "246")
OPPONENTS = ("self", "random", "perfect")


@dataclass
class TicTacToe:
    """Tic-tac-toe with itself or with a scripted opponent."""

    opponent: str = "self"  # who plays O: self (the same model), random or perfect
    opening: int = 0  # so many random moves are made before the game begins: 0, 2 or 4

    reward_range = (0.0, 1.0)

    def __post_init__(self) -> None:
        if self.opponent not in OPPONENTS:
            raise ConfigError(f"--env.opponent {self.opponent!r}: expected one of {', '.join(OPPONENTS)}")
        if self.opening not in (0, 2, 4):
            raise ConfigError(f"--env.opening {self.opening}: expected 0, 2 or 4")

    @property
    def roles(self) -> tuple[Role, ...]:
        """X, and also O if the model plays against itself."""
        return tuple(Role(side, system=f"You are {side}.") for side in ("XO" if self.opponent == "self" else "X"))

    def tasks(self, split: str, rng: random.Random) -> Iterator[Task]:
        """Endless games. A task has the board after the opening, and a seed for the opponent."""
        while True:
            seed = rng.getrandbits(48)
            yield Task("Win at tic-tac-toe.", info={"board": self._opened(rng), "seed": seed}, id=f"game {seed}")

    def demonstrations(self, split: str, rng: random.Random) -> Iterator[list[Message]]:
        """Endless games of an expert against random moves. The expert has each role in turn."""
        while True:
            for role in self.roles:
                board, talk = self._opened(rng), [Message("system", role.system)]
                while outcome(board) is None:
                    side = to_move(board)
                    cell = rng.choice(best_moves(board) if side == role.name else empty_cells(board))
                    if side == role.name:
                        talk += [Message("user", board_text(board)), Message("assistant", str(cell + 1))]
                    board = after(board, cell)
                yield talk

    def setup(self, task: Task) -> None:
        self.winner: str | None = None  # "X", "O", "draw", or None while the game is open
        self.lost_by_rule = ""

    async def rollout(self, task: Task, model: Any) -> None:
        """X and O move in turn until the game is over."""
        board, rng = task.info["board"], random.Random(task.info["seed"])
        players = {role.name: model.role(role.name) for role in self.roles}
        while outcome(board) is None:
            side = to_move(board)
            if side in players:
                said = await players[side].say(board_text(board))
                cell = cell_of(said.text, board)
            else:
                cell = rng.choice(empty_cells(board) if self.opponent == "random" else best_moves(board))
            if cell is None:
                self.winner, self.lost_by_rule = "O" if side == "X" else "X", side
                return
            board = after(board, cell)
        self.winner = outcome(board)

    @reward
    def result(self, trajectory: Trajectory) -> float:
        """Called for each role: 1 if it won, 0.5 for a draw, 0 if it lost or the game did not end."""
        return {trajectory.role: 1.0, "draw": 0.5}.get(self.winner or "", 0.0)

    @metric
    def broke_a_rule(self, trajectory: Trajectory) -> float:
        """1 if this role lost because its reply named no empty cell."""
        return float(self.lost_by_rule == trajectory.role)

    def _opened(self, rng: random.Random) -> str:
        """A board after the opening, without three in a line."""
        while True:
            board = EMPTY
            for _ in range(self.opening):
                board = after(board, rng.choice(empty_cells(board)))
            if outcome(board) is None:
                return board


def to_move(board: str) -> str:
    """X if both have made equally many moves, else O."""
    return "X" if board.count("X") == board.count("O") else "O"


def empty_cells(board: str) -> list[int]:
    """The indices, from 0 to 8, of the empty cells."""
    return [index for index, mark in enumerate(board) if mark == "."]


def after(board: str, cell: int) -> str:
    """The board after the next move."""
    return board[:cell] + to_move(board) + board[cell + 1 :]


def winner(board: str) -> str | None:
    """X or O if it has three in a line, else None."""
    marks = ({board[int(index)] for index in line} for line in LINES)
    return next((mark for found in marks if len(found) == 1 for mark in found if mark != "."), None)


def outcome(board: str) -> str | None:
    """X, O, draw, or None while the game is open."""
    return winner(board) or (None if "." in board else "draw")


def board_text(board: str) -> str:
    """The board as three lines. An empty cell shows its number.

    >>> print(board_text("X...O...."))
    X 2 3
    4 O 6
    7 8 9
    """
    cells = [str(index + 1) if mark == "." else mark for index, mark in enumerate(board)]
    return "\n".join(" ".join(cells[row : row + 3]) for row in (0, 3, 6))


def cell_of(text: str, board: str) -> int | None:
    """The index of the empty cell that a reply names; None if it names none, a taken one or several.

    >>> cell_of("I take 5.", EMPTY), cell_of("1 or 2", EMPTY), cell_of("1", "X........")
    (4, None, None)
    """
    numbers = set(re.findall(r"\d+", text))
    cell = int(numbers.pop()) - 1 if len(numbers) == 1 else -1
    return cell if cell in empty_cells(board) else None


@functools.cache
def value(board: str) -> int:
    """The value of a board for the side that moves, if both play perfectly: 1 win, 0 draw, -1 loss."""
    end = outcome(board)
    if end is not None:
        return 0 if end == "draw" else -1  # the side that moved last has won
    return max(-value(after(board, cell)) for cell in empty_cells(board))


def best_moves(board: str) -> list[int]:
    """All perfect moves of the side that moves."""
    values = {cell: -value(after(board, cell)) for cell in empty_cells(board)}
    return [cell for cell, each in values.items() if each == max(values.values())]
