"""Names `textarena/<id>` and `textarena_self/<id>`. The upstream package is imported when one of these is asked for."""

from __future__ import annotations

from rollouts.plugins.families import Family, environment_families

rollouts_find_component, rollouts_list_components = environment_families(
    {
        "textarena": Family("rollouts_textarena:environment_of", "rollouts_textarena.catalog:abouts"),
        "textarena_self": Family("rollouts_textarena:self_play_of", "rollouts_textarena.catalog:abouts_of_self_play"),
    }
)
