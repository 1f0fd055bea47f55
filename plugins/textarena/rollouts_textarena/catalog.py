"""Which games upstream registers, how many players each has, and why one cannot be served.

A game's module may download data when it is imported, so this module reads the source of a game and does not import it.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from rollouts_textarena.host import BEGIN_SECONDS

PLAYERS = {"SinglePlayerState": 1, "TwoPlayerState": 2}
MANY = 3
"""In place of a number of players: three or more, or unknown."""

TEXT_REWARDS = {"Countdown", "Cryptarithm", "Slitherlink"}
"""Games that give a text as the reward of an invalid move: their calls of upstream swap two arguments."""

START_SECONDS = 120.0
"""How long a probe may take to import upstream."""


def registry() -> dict[str, Any]:
    """Upstream's specifications by id."""
    importlib.import_module("textarena")
    registration = importlib.import_module("textarena.envs.registration")
    found: dict[str, Any] = registration.ENV_REGISTRY
    return found


@functools.cache
def players_by_game() -> dict[str, int]:
    """The number of players of each registered game, by id; MANY for three or more."""
    return {game: _players_of(_source_of(specification)) for game, specification in sorted(registry().items())}


def abouts() -> dict[str, str]:
    """The games for one and two players, with what they are."""
    against = {1: "for one player", 2: "against a scripted opponent"}
    players = players_by_game()
    return {game: f"{game} of TextArena, {against[count]}" for game, count in players.items() if count in against}


def abouts_of_self_play() -> dict[str, str]:
    """The games that a model can play against itself, with what they are."""
    both = [game for game, count in players_by_game().items() if count == 2]
    return {game: f"{game} of TextArena, against itself" for game in both}


@functools.cache
def refusal(game: str) -> str:
    """Why a game cannot be served here; empty if it can."""
    if players_by_game()[game] > 2:
        return "it is for three or more players; only games for one and two are served"
    source = _source_of(registry()[game])
    if _folder_of(registry()[game]) in TEXT_REWARDS:
        return "upstream gives a text as the reward of an invalid move, so the game cannot be scored"
    if "OpenRouter" in source:
        return "a language model behind the API of OpenRouter takes part in it"
    if not hasattr(os, "fork"):
        return "each game has a process of its own, made with `fork`, which this system does not have"
    return _why_not_made(probe([game])[game])


def probe(games: list[str]) -> dict[str, dict[str, str] | None]:
    """The exception that beginning each game raises, in another process without downloads; None if it raises none."""
    request = json.dumps({game: players_by_game()[game] for game in games})
    command = [sys.executable, "-m", "rollouts_textarena.host", "--probe", request]
    seconds = START_SECONDS + len(games) * 2 * BEGIN_SECONDS
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    if done.returncode != 0:
        error = {"type": f"exit code {done.returncode}", "message": done.stderr.strip()[-200:]}
        return {game: error for game in games}
    found: dict[str, dict[str, str] | None] = json.loads(done.stdout.splitlines()[-1])
    return found


def _why_not_made(error: dict[str, str] | None) -> str:
    if error is None:
        return ""
    if error["type"] == "LookupError" and "NLTK" in error["message"]:
        return (
            "it needs words of NLTK, which upstream would download\n"
            "to download them, type: python -m nltk.downloader words averaged_perceptron_tagger_eng"
        )
    return f"upstream cannot make it: {error['type']}: {' '.join(error['message'].split())[:200]}"


def _folder_of(specification: Any) -> str:
    """The folder of a game in upstream's package."""
    module = str(specification.entry_point).partition(":")[0]
    return module.split(".")[-2]


def _source_of(specification: Any) -> str:
    """The source of a game's module; empty if upstream registers a module that it lacks."""
    module = str(specification.entry_point).partition(":")[0]
    package = Path(str(importlib.import_module("textarena").__file__)).parent
    file = package.joinpath(*module.split(".")[1:]).with_suffix(".py")
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def _players_of(source: str) -> int:
    made = {name for name in PLAYERS if re.search(rf"\b{name}\(", source)}
    return PLAYERS[made.pop()] if len(made) == 1 else MANY
