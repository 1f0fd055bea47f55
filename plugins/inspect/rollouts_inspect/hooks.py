"""Names `inspect/<package>/<task>`. The upstream package is imported when one of these names is asked for."""

from __future__ import annotations

from rollouts.plugins.families import Family, environment_families

rollouts_find_component, rollouts_list_components = environment_families(
    {"inspect": Family("rollouts_inspect:environment_of", "rollouts_inspect.loading:names", needs="inspect_ai")}
)
