"""Names `textarena/<id>` and `textarena_self/<id>`. The upstream package is imported when one of these is asked for."""

from __future__ import annotations

from typing import Any

from rollouts import hookimpl

PREFIXES = ("textarena/", "textarena_self/")


@hookimpl
def rollouts_find_component(kind: str, name: str) -> Any:
    if kind != "environments" or not name.startswith(PREFIXES):
        return None
    from rollouts_textarena import environment_of

    prefix, _, game = name.partition("/")
    return environment_of(game, is_self_play=prefix == "textarena_self")


@hookimpl
def rollouts_list_components(kind: str) -> dict[str, str] | None:
    if kind != "environments":
        return None
    from rollouts_textarena.catalog import players_by_game

    players = players_by_game()
    against = {1: "for one player", 2: "against a scripted opponent"}
    alone = {
        f"textarena/{game}": f"{game} of TextArena, {against[count]}" for game, count in players.items() if count <= 2
    }
    both = [game for game, count in players.items() if count == 2]
    return alone | {f"textarena_self/{game}": f"{game} of TextArena, against itself" for game in both}
