"""Names `reasoning_gym/<data set>`. The upstream package is imported when one of these names is asked for."""

from __future__ import annotations

from rollouts.plugins.families import Family, environment_families

rollouts_find_component, rollouts_list_components = environment_families(
    {"reasoning_gym": Family("rollouts_reasoning_gym:environment_of", "rollouts_reasoning_gym.entries:abouts")}
)
