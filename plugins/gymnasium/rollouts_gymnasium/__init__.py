"""Environments of gymnasium, minigrid and GEM for rollouts, and environments of rollouts for gymnasium.

    rollouts run --env gym/FrozenLake-v1 --env.kwargs.is_slippery false

hooks         the names `gym/<id>` and `gem/<id>`; imports gymnasium only when one of them is looked up
registry      gymnasium's registered environments: making one, what it needs, why it cannot be made
environment   the environment of rollouts that plays one of them
codecs        what the model reads and writes: by the spaces, or by your own codec
spaces        values of gymnasium's spaces as text and as JSON, and back
views         observations as text: colors of `ansi`, the grid of minigrid
experts       policies that solve an environment, for demonstrations
gem           environments of GEM, through the same adapter
bridge        an environment of rollouts as a gymnasium.Env
envs          registers `rollouts/<name>-v0` with gymnasium when it is imported
"""

from __future__ import annotations

__all__: list[str] = []
