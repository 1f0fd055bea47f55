"""`rollouts check`: finds out whether a component keeps its contract.

report         the result of one check, and of all checks of a component
runner         runs a table of checks
packages       the component before it is imported, and the wheel of its package
finding        components by a name, a file or a folder
environments   the checks of environments
components     the checks of all other kinds
api            checks by a name or a path, and in the tests of an author
pytest_plugin  `pytest --rollouts-check NAME`
plugins_command, descriptions  `rollouts plugins`: what is installed, and what it does

A check is one small function with a docstring: what it finds out, and the advice for a component that fails it. Its
table says which checks it needs. Not here: whether a run can be composed (`rollouts.runs`), which ends at the first
mistake.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollouts.lazy import lazy_face

if TYPE_CHECKING:
    from rollouts_check.api import check_component as check_component
    from rollouts_check.api import check_environment_class as check_environment_class

__getattr__, __dir__ = lazy_face(__name__)
