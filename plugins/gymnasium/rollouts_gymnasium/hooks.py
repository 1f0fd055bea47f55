"""The names `gym/<id>` and `gem/<id>`. Importing this module imports neither gymnasium nor gem."""

from __future__ import annotations

from rollouts.plugins.families import Family, environment_families

_PACKAGE = "rollouts_gymnasium"

rollouts_find_component, rollouts_list_components = environment_families(
    {
        "gym": Family(f"{_PACKAGE}.environment:environment_class", f"{_PACKAGE}.registry:abouts", needs="gymnasium"),
        "gem": Family(f"{_PACKAGE}.gem:environment_class", f"{_PACKAGE}.gem:abouts"),
    }
)
