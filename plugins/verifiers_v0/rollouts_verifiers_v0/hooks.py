"""Names `verifiers-v0/<package>`. The upstream package is imported when one of these names is asked for."""

from __future__ import annotations

from rollouts.plugins.families import Family, environment_families

rollouts_find_component, rollouts_list_components = environment_families(
    {
        "verifiers-v0": Family(
            "rollouts_verifiers_v0:environment_of", "rollouts_verifiers_v0.catalog:package_names", needs="verifiers"
        )
    }
)
