"""Environments behind servers: `--env openenv --env.url http://127.0.0.1:8000`, and `--env ors --env.url ...`.

openenv     the environment that plays on an OpenEnv server
sessions    a session with an OpenEnv server, over a WebSocket
ors         the environment that plays on a server of the Open Reward Standard
calls       requests to such a server, and streams of events
playing     what both have in common: the loop of an episode, rewards, metrics
service     splits and tasks of a server, and texts of what it answers
"""

from __future__ import annotations

from rollouts_openenv.openenv import OpenEnv
from rollouts_openenv.ors import ORS

__all__ = ["ORS", "OpenEnv"]
