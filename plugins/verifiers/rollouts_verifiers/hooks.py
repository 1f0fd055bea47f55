"""Names `verifiers/<taskset>`. The upstream package is imported when one of these names is asked for."""

from __future__ import annotations

from rollouts.plugins.families import Family, environment_families

rollouts_find_component, rollouts_list_components = environment_families(
    {"verifiers": Family("rollouts_verifiers:environment_of", "rollouts_verifiers.catalog:taskset_names", "verifiers")}
)
