"""Every game is played as upstream's own loop plays it: the same observations, rewards and end for the same moves."""

from __future__ import annotations

import inspect
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import forks
import pytest

pytest.importorskip("textarena", reason="textarena is not installed; to run these tests: make test-adapters")

import trio
from rollouts_textarena import SelfPlay, TextArena, catalog, environment_of, self_play_of
from rollouts_textarena.client import Host
from rollouts_textarena.hooks import rollouts_list_components
from rollouts_textarena.host import random_action

from rollouts import Message, Trajectory
from rollouts.errors import ConfigError, UnknownComponentError
from rollouts.plugins import PluginManager

WRITTEN_FOR = "0.7.4"
TURNS = 24
QUICK = (
    "2048-v0 Blackjack-v0-train ConnectFour-v0 GuessTheNumber-v0 Minesweeper-v0-raw Nim-v0 TicTacToe-v0-train".split()
)
GAMES = {game: count for game, count in catalog.players_by_game().items() if count <= 2}
SLOW = {"Sokoban-v0-medium", "Sudoku-v0-hard"}  # upstream takes up to a minute to make a puzzle

OWN_LOOP = """
import json, os, random, sys
import nltk, numpy
nltk.download = lambda *args, **kwargs: True
import textarena
from rollouts_textarena.host import random_action


def play(game, seed, players, seats, turns):
    random.seed(seed)
    numpy.random.seed(seed)
    env = textarena.make(game)
    env.reset(num_players=players, seed=seed)
    moves, opponent = random.Random(f"moves {seed}"), random.Random(f"opponent {seed}")
    done, played = False, []
    while not done and len([each for each in played if each[0] in seats]) < turns:
        player, observation = env.get_observation()
        if isinstance(observation, str):
            text = observation
        else:
            names = {**env.state.role_mapping, -1: "GAME"}
            text = "".join(f"\\n[{names.get(who, f'Player {who}')}] {what}" for who, what, _ in observation)
        action = random_action(text, moves if player in seats else opponent)
        played.append([player, text, action])
        done, _ = env.step(action=action)
    rewards, _ = env.close()
    return {"played": played, "rewards": rewards if done else None}


for line in sys.stdin:
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        try:
            answer = play(**json.loads(line))
        except Exception as exc:
            answer = {"error": f"{type(exc).__name__}: {exc}"}
        with open(writer, "w") as file:
            file.write(json.dumps(answer, default=str))
        os._exit(0)
    os.close(writer)
    with open(reader) as file:
        print(file.read(), flush=True)
    os.wait()
"""


@pytest.fixture(scope="module")
def upstreams():
    """Upstream's own loop in another process: a function of the game, the seed, the players and the model's seats."""
    command = [sys.executable, "-c", OWN_LOOP]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONHASHSEED": "0"}
    ) as process:

        def play(game: str, seed: int, seats: list[int]):
            request = {"game": game, "seed": seed, "players": GAMES[game], "seats": seats, "turns": TURNS}
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield play
        process.stdin.close()


@pytest.fixture(scope="module")
def host():
    found = Host()
    yield found
    found.close()


@pytest.fixture(scope="module")
def probed():
    """What the probe says of all games, from one process in place of one for each."""
    return catalog.probe(sorted(GAMES))


@pytest.fixture
def one_probe(monkeypatch, probed):
    catalog.refusal.cache_clear()
    monkeypatch.setattr(catalog, "probe", lambda games: {game: probed[game] for game in games})
    yield
    catalog.refusal.cache_clear()


def said(task, text: str) -> Trajectory:
    return Trajectory(task, [*task.messages, Message("assistant", text)])


def news(played, seats) -> list[tuple[int, str, str]]:
    """What each seat sees that it has not seen before, and its move."""
    seen: dict[int, str] = {}
    found = []
    for player, text, action in played:
        if player in seats:
            before, seen[player] = seen.get(player, ""), text
            new = text[len(before) :] if before and text.startswith(before) else text
            found.append((player, new.strip("\n"), action))
    return found


def task_of(game: str, seed: int, host, seats: list[int]):
    with host.opened(game, seed, GAMES[game], seats) as opened:
        return SimpleNamespace(
            prompt=opened.observation, info={"seed": seed, "seat": seats[0]}, messages=[Message("user", "")]
        )


def play_ours(env, task, host, moves: list[str]) -> list[str]:
    """What the model reads, from the first observation to the last."""
    env.setup(task, host)
    seen = [task.prompt]
    for move in moves:
        answer = env.reply(said(task, move))
        seen += [] if answer is None else [answer]
    return seen


def check_against_opponent(game: str, seed: int, seat: int, upstreams, host) -> None:
    expected = upstreams(game, seed, [seat])
    turns = news(expected["played"], [seat])
    if not turns:  # the opponent began and lost
        return
    env = environment_of(game)(unfinished=-7.0)
    seen = play_ours(env, task_of(game, seed, host, [seat]), host, [move for _, _, move in turns])
    assert seen[: len(turns)] == [text for _, text, _ in turns]
    assert env.finished() == float(expected["rewards"] is not None) == float(len(seen) == len(turns))
    assert env.outcome() == (-7.0 if expected["rewards"] is None else expected["rewards"][str(seat)])
    env.close()


def check_self_play(game: str, seed: int, upstreams, host) -> None:
    expected = upstreams(game, seed, [0, 1])
    turns = news(expected["played"], [0, 1])
    seen = []

    class Enough(Exception):
        """The scripted moves are used."""

    class Model:
        def role(self, name: str):
            async def say(text: str):
                if len(seen) == len(turns):
                    raise Enough
                seen.append((int(name[-1]), text, turns[len(seen)][2]))
                return SimpleNamespace(text=seen[-1][2])

            return SimpleNamespace(say=say)

    env = self_play_of(game)(unfinished=-7.0)
    task = task_of(game, seed, host, [0, 1])
    env.setup(task, host)
    try:
        trio.run(env.rollout, task, Model())
    except Enough:
        assert expected["rewards"] is None
    assert seen == turns
    for player in (0, 1):
        played = Trajectory(SimpleNamespace(messages=[]), [], role=f"player_{player}")
        assert env.outcome(played) == (-7.0 if expected["rewards"] is None else expected["rewards"][str(player)])
    env.close()


def check_equal_to_upstream(game: str, upstreams, host) -> None:
    for seed in (3,) if game in SLOW else (3, 4):
        for seat in range(GAMES[game]):
            check_against_opponent(game, seed, seat, upstreams, host)
        if GAMES[game] == 2:
            check_self_play(game, seed, upstreams, host)


def counted(game: str):
    """The game as a parameter. Ids that end with -train or -raw are the same games behind other wrappers."""
    kind = "textarena, other wrappers" if game.endswith(("-train", "-raw")) else "textarena"
    return pytest.param(game, marks=pytest.mark.equals_upstream(kind))


@pytest.mark.parametrize("game", [counted(each) for each in QUICK])
def test_equals_upstream(game, upstreams, host):
    check_equal_to_upstream(game, upstreams, host)


@pytest.mark.adapters
@pytest.mark.parametrize("game", [counted(each) for each in GAMES])
def test_each_game_equals_upstream_or_is_refused(game, upstreams, host, one_probe, not_counted):
    if catalog.refusal(game):
        not_counted()
        with pytest.raises(ConfigError, match="cannot be played: "):
            environment_of(game)()
    else:
        check_equal_to_upstream(game, upstreams, host)


@pytest.mark.adapters
def test_count_of_games(one_probe):
    """Ids that end with -train or -raw are the same games behind other observation wrappers."""
    every = catalog.players_by_game()
    refused = {game: reason for game in every if (reason := catalog.refusal(game))}
    served = [game for game in every if game not in refused]
    own = [game for game in served if not game.endswith(("-train", "-raw"))]
    kinds = Counter(f"{GAMES[game]} player" for game in own)
    reasons = Counter(reason.partition("\n")[0][:60] for game, reason in refused.items() if game in set(every))
    print(
        f"textarena: {len(own)} games ({dict(kinds)}) and {len(served)} ids of {len(every)}; refused: {dict(reasons)}"
    )
    assert len(own) >= 130 and len(served) >= 390


def test_upstream_has_the_names_that_this_package_uses():
    from importlib.metadata import version

    import textarena
    from textarena.envs.registration import EnvSpec

    now = f"textarena {version('textarena')} differs from {WRITTEN_FOR}, for which this package was written: "
    signatures = {
        textarena.make: ["env_id", "kwargs"],
        textarena.Env.reset: ["self", "num_players", "seed"],
        textarena.Env.step: ["self", "action"],
        textarena.Env.get_observation: ["self"],
        textarena.Env.close: ["self"],
        EnvSpec: ["id", "entry_point", "default_wrappers", "kwargs"],
    }
    for function, parameters in signatures.items():
        assert list(inspect.signature(function).parameters) == parameters, now + function.__qualname__
    for name in catalog.PLAYERS:
        assert issubclass(getattr(textarena, name), textarena.State), now + name
    assert all(isinstance(each.entry_point, str) for each in catalog.registry().values()), now + "entry points"
    assert textarena.core.GAME_ID == -1, now + "GAME_ID"
    assert len(GAMES) > 400, now + "the number of players is not in the source"


@pytest.mark.parametrize("folder", sorted(catalog.TEXT_REWARDS))
def test_games_with_a_text_as_reward_still_swap_the_arguments(folder):
    import textarena

    source = Path(textarena.__file__).with_name("envs").joinpath(folder, "env.py").read_text()
    assert re.search(r"set_invalid_move\(self\._\w*progress\(\), f?\"", source), "upstream is fixed: serve the game"


# --- names and settings -----------------------------------------------------------------------------------------------


def test_names_are_found_and_near_misses_are_shown():
    manager = PluginManager()
    assert issubclass(manager.load(manager.find("environments", "textarena/Nim-v0")), TextArena)
    assert issubclass(manager.load(manager.find("environments", "textarena_self/Nim-v0")), SelfPlay)
    with pytest.raises(UnknownComponentError, match="did you mean: textarena/TicTacToe-v0"):
        manager.find("environments", "textarena/TicTacTo-v0")
    with pytest.raises(UnknownComponentError):
        manager.find("environments", "textarena_self/2048-v0")
    listed = rollouts_list_components("environments")
    assert {"textarena/2048-v0", "textarena_self/Nim-v0"} <= set(listed) and rollouts_list_components("tools") is None
    assert "textarena_self/2048-v0" not in listed


@pytest.mark.parametrize(
    ("game", "reason"),
    [
        ("Snake-v0", "three or more players"),
        ("Countdown-v0", "a text as the reward"),
        ("TwentyQuestions-v0", "API of OpenRouter"),
        ("Hangman-v0", "type: python -m nltk.downloader words"),
        ("UsedCarNegotiation-v0", "upstream cannot make it: FileNotFoundError"),
        ("LightsOut-v0-train", "upstream cannot make it: ValueError"),
    ],
)
def test_a_game_that_cannot_be_played_is_refused_with_the_reason(game, reason, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))  # no data of NLTK
    catalog.refusal.cache_clear()
    with pytest.raises(ConfigError, match=f"textarena/{game} cannot be played: [^$]*{reason}"):
        environment_of(game)()
    catalog.refusal.cache_clear()


def test_a_seat_that_the_game_does_not_have_is_refused():
    with pytest.raises(ConfigError, match="expected 0, in a game for one player"):
        environment_of("2048-v0")(seat=1)
    with pytest.raises(ConfigError, match="expected 0 or 1"):
        environment_of("Nim-v0")(seat=2)


def test_tasks_depend_on_the_random_numbers_of_the_run_and_have_both_seats(host):
    def drawn(seed: int, **settings):
        tasks = environment_of("Nim-v0")(**settings).tasks("train", random.Random(seed), host)
        return [next(tasks) for _ in range(12)]

    assert drawn(1) == drawn(1) != drawn(2)
    assert {task.info["seat"] for task in drawn(1)} == {0, 1}
    assert {task.info["seat"] for task in drawn(1, seat=1)} == {1}
    assert len({task.id for task in drawn(1)}) == 12


# --- processes --------------------------------------------------------------------------------------------------------


def test_games_at_the_same_time_do_not_share_random_numbers(host):
    def final(game) -> tuple:
        return game.observation, game.rewards

    moves = ["[Hit]", "[Stand]"] * 10
    alone = []
    for seed in range(6):
        with host.opened("Blackjack-v0", seed, 1, [0]) as game:
            for move in moves:
                if not game.is_done:
                    game.act(move)
            alone.append(final(game))
    together = [host.open("Blackjack-v0", seed, 1, [0]) for seed in range(6)]
    for move in moves:
        for game in together:
            if not game.is_done:
                game.act(move)
    assert [final(game) for game in together] == alone and len({str(each) for each in alone}) > 1
    for game in together:
        game.close()


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_until(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc")
def test_a_game_that_is_closed_leaves_no_process():
    host = Host()
    game = host.open("Nim-v0", 1, 2, [0])
    pid = host._process.pid
    assert len(children_of(pid)) == 1
    game.close()
    wait_until(lambda: not children_of(pid))
    with pytest.raises(RuntimeError, match="the process of the game ended"):
        game.act("[1 1]")
    another = host.open("Nim-v0", 1, 2, [0])
    host.close()
    another.close()
    wait_until(lambda: not Path(f"/proc/{pid}").exists())


def test_no_game_outlives_a_run_that_is_killed(tmp_path):
    """Also a game in the middle of a long computation of upstream."""
    program = """
import threading, sys
from rollouts_textarena.client import Host
host = Host()
game = host.open("Nim-v0", 1, 2, [0])
threading.Thread(target=host.open, args=("Sokoban-v0-medium", 5, 1, [0]), daemon=True).start()
print(host._process.pid, flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as run:
        group = int(run.stdout.readline())
        os.kill(run.pid, signal.SIGKILL)
    wait_until(lambda: subprocess.run(["pgrep", "-g", str(group)], check=False, capture_output=True).returncode == 1)


def test_an_exception_of_a_game_is_named(host):
    with pytest.raises(RuntimeError, match="the game raised ValueError: Environment nope not found"):
        host.open("nope", 1, 1, [0])


def test_an_episode_refuses_a_game_that_is_not_the_task(host):
    task = task_of("GuessTheNumber-v0", 3, host, [0])
    task.prompt += "?"
    env = environment_of("GuessTheNumber-v0")()
    with pytest.raises(RuntimeError, match="begins differently each time"):
        env.setup(task, host)
    env.close()


def test_the_opponent_takes_a_move_that_the_board_shows():
    rng = random.Random(0)
    shown = "[GAME] Rules: [9 9].\n[Player 0] [4]\n[GAME] Available: '[0]', '[3]', '[5]'"
    assert {random_action(shown, rng) for _ in range(50)} == {"[0]", "[3]", "[5]"}
    assert {random_action("[GAME] Play '[2 1]'.", rng) for _ in range(50)} <= {
        f"[{a} {b}]" for a in range(4) for b in range(4)
    }
    assert random_action("no moves", rng) in {f"[{number}]" for number in range(4)}


# --- in a run ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "textarena/TicTacToe-v0",
        *(
            pytest.param(name, marks=pytest.mark.adapters)
            for name in ("textarena/2048-v0", "textarena/GuessTheNumber-v0", "textarena_self/ConnectFour-v0")
        ),
    ],
)
def test_keeps_the_contract(name):
    command = [sys.executable, "-m", "rollouts", "check", name, "--skip", "wheel", "--json"]
    done = forks.run(command, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
