from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from rollouts_tictactoe import TicTacToe, after, best_moves, board_text, cell_of, empty_cells, outcome, winner

from rollouts.check import check_environment_class
from rollouts.errors import ConfigError
from rollouts.types import Task, Trajectory


class Players:
    """Plays each role with a function from the board's text to a reply."""

    def __init__(self, **replies: Any) -> None:
        self.replies = replies

    def role(self, name: str) -> Any:
        async def say(text: str) -> SimpleNamespace:
            return SimpleNamespace(text=self.replies[name](text))

        return SimpleNamespace(say=say)


def play(env: TicTacToe, board: str = "." * 9, seed: int = 0, **replies: Any) -> tuple[float, float]:
    task = Task("Win.", info={"board": board, "seed": seed})
    env.setup(task)
    trio.run(env.rollout, task, Players(**replies))
    x, o = (env.result(Trajectory(task, [], role=role)) for role in "XO")
    return x, o


def first_free(text: str) -> str:
    return next(each for each in text.split() if each.isdigit())


def best(text: str) -> str:
    board = "".join("." if each.isdigit() else each for each in text.split())
    return f"I take {best_moves(board)[0] + 1}."


@pytest.mark.parametrize(
    ("only", "settings"),
    [
        (["settings", "rewards"], {}),
        pytest.param([], {}, marks=pytest.mark.nightly),
        pytest.param([], {"opponent": "random", "opening": 2}, marks=pytest.mark.nightly),
    ],
    ids=["quick", "all", "against a random player"],
)
def test_the_contract(only: list[str], settings: dict[str, Any]) -> None:
    check_environment_class(TicTacToe, **settings, tasks=1, only=only, skip=["wheel", "imports"])


def test_results() -> None:
    assert play(TicTacToe(), X=first_free, O=first_free) == (1.0, 0.0)
    assert play(TicTacToe(), X=best, O=best) == (0.5, 0.5)
    assert play(TicTacToe(), X=lambda text: "1", O=lambda text: "1") == (1.0, 0.0)  # O takes a cell that is not empty
    assert play(TicTacToe(), X=lambda text: "a corner", O=best) == (0.0, 1.0)
    assert play(TicTacToe(opponent="perfect"), X=best) == (0.5, 0.5)


def test_a_perfect_side_never_loses() -> None:
    for seed in range(100):
        x, _ = play(TicTacToe(opponent="random"), seed=seed, X=best)
        assert x >= 0.5
        rng = random.Random(seed)
        x, _ = play(TicTacToe(opponent="perfect"), seed=seed, X=lambda text, rng=rng: rng.choice(text.split()))
        assert x <= 0.5


def test_one_seed_is_one_game_against_the_random_opponent() -> None:
    def boards(seed: int) -> list[str]:
        seen: list[str] = []

        def noted(text: str) -> str:
            seen.append(text)
            return first_free(text)

        play(TicTacToe(opponent="random"), seed=seed, X=noted)
        return seen

    assert boards(1) == boards(1)
    assert len({str(boards(seed)) for seed in range(20)}) > 5


def test_the_outcome_of_every_game() -> None:
    """Numbers of finished games that are known: 131,184 won by X, 77,904 by O, and 46,080 draws."""
    counts = dict.fromkeys(("X", "O", "draw"), 0)

    def walk(board: str) -> None:
        end = outcome(board)
        if end is not None:
            counts[end] += 1
            return
        for cell in empty_cells(board):
            walk(after(board, cell))

    walk("X........")  # all first moves of one kind: a corner
    corner = dict(counts)
    walk(".X.......")
    edge = {name: counts[name] - corner[name] for name in counts}
    walk("....X....")
    total = {name: 4 * corner[name] + 4 * edge[name] + counts[name] - corner[name] - edge[name] for name in counts}
    assert total == {"X": 131_184, "O": 77_904, "draw": 46_080}


@pytest.mark.parametrize(
    ("text", "cell"), [("5", 4), ("cell 9", 8), ("1", None), ("2 or 3", None), ("10", None), ("0", None), ("", None)]
)
def test_a_reply_names_one_empty_cell(text: str, cell: int | None) -> None:
    assert cell_of(text, "X........") == cell


def test_demonstrations_of_both_roles_are_legal_and_do_not_lose() -> None:
    for talk in itertools.islice(TicTacToe().demonstrations("train", random.Random(0)), 60):
        side = talk[0].text[-2]
        for asked, said in zip(talk[1::2], talk[2::2], strict=True):
            board = "".join("." if each.isdigit() else each for each in asked.text.split())
            assert board_text(board) == asked.text
            assert int(said.text) - 1 in best_moves(board)
        last = after(board, int(said.text) - 1)
        assert winner(last) in (side, None)


@pytest.mark.parametrize("settings", [{"opponent": "me"}, {"opening": 1}, {"opening": 6}])
def test_settings_that_make_no_sense(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"--env\."):
        TicTacToe(**settings)
