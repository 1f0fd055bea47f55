"""Registers the environments of rollouts with gymnasium when it is imported, as packages for gymnasium do.

    gymnasium.make("rollouts_gymnasium.envs:rollouts/calculator-v0")      # imports this module

`rollouts/<name>-v0` is an installed environment, and `rollouts/any-v0` takes `environment="./my_env.py:MyEnv"`. The
installed ones are found by their metadata; none is imported.
"""

from __future__ import annotations

import re
from collections import Counter

import gymnasium

from rollouts.plugins import installed_components

ENTRY = "rollouts_gymnasium.bridge:RolloutsEnv"
ANY = "rollouts/any-v0"


def register() -> list[str]:
    """Register the installed environments that are not registered yet. Returns the ids of all of them."""
    refs = installed_components("environments")
    counts = Counter(ref.name for ref in refs)
    names = {ref.name: ref.name for ref in refs if counts[ref.name] == 1 and re.fullmatch(r"[\w.-]+", ref.name)}
    ids = {f"rollouts/{name}-v0": {"environment": name} for name in names} | {ANY: {}}
    for env_id, kwargs in ids.items():
        if env_id not in gymnasium.registry:
            # The passive checker copies observations to compare them; `check_env` is the full check.
            gymnasium.register(env_id, ENTRY, kwargs=kwargs, disable_env_checker=True)
    return list(ids)


register()
