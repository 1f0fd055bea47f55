"""A class of tools, which a run adds to any environment (`--tool`): several tools with a life of their own.

    class Notes:
        def __init__(self, folder: str = "notes"): ...      # --tool.notes.folder

        def setup(self, task): ...                          # optional: once per episode, before its first turn
        def tools(self, task): ...                          # optional: what `tools` of an environment may return
        def close(self): ...                                # optional: at the end of the episode

        @tool
        def search(self, query: str) -> str: ...

Its methods are those of an environment, with the same order of calls, threads and deadlines: an object for each
episode, and `shared` for each class and settings. Not here: functions that are one tool (`task_tools`), episodes
(`rollouts.agent`).
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from rollouts.author_code import authors_code
from rollouts.env.authoring import ToolMethod, tools_of
from rollouts.env.checks import check_methods, line_of
from rollouts.env.methods import names_input
from rollouts.env.schema import check_tool
from rollouts.env.shared import SharedValue, shared_value
from rollouts.errors import EnvironmentDefinitionError, RolloutsError, SignatureError, words_of

METHODS = ("setup", "tools", "shared", "close")
"""The methods of an environment that a class of tools may have."""


class Toolset(NamedTuple):
    """A class of tools with its settings. `name` is its alias in the run."""

    name: str
    component: Callable[..., Any]
    settings: Mapping[str, Any]

    def make(self) -> Any:
        """A new object. Its settings are copies, so objects do not share them."""
        return self.component(**copy.deepcopy(dict(self.settings)))

    def make_checked(self) -> Any:
        """Like `make`, but an exception of the constructor becomes an EnvironmentDefinitionError."""
        try:
            with authors_code():
                return self.make()
        except RolloutsError:
            raise
        except Exception as error:  # the author's code may raise anything
            raise EnvironmentDefinitionError(f"making the tools {self.name} raised {words_of(error)}") from error

    def shared(self) -> SharedValue:
        """The value of the class's `shared`, which all its objects in this process use."""
        return shared_value(self.component, self.settings, self.make)


AddedTool = ToolMethod | Toolset
"""What a run adds to the tools of its environments."""


def check_toolset(toolset: Toolset) -> None:
    """Raise SignatureError if the class has no tools, and EnvironmentDefinitionError for its first mistake."""
    component = toolset.component
    if not (hasattr(component, "tools") or tools_of(component)):
        name = component.__name__
        raise SignatureError(
            f"tool {toolset.name}: {name} is a class without tools: it has no method `tools(self, task)`, and none "
            f"that is marked with @tool\nto offer one tool, name a function, or an object with __call__ (such as "
            f"`{name.lower()} = {name}()`)"
        )
    made = toolset.make_checked()
    check_methods(made, METHODS)
    if names_input(made, "setup", "sandbox"):
        with line_of(made.setup):
            raise EnvironmentDefinitionError(
                f"{component.__name__}.setup names `sandbox`, which only environments have; remove it"
            )
    for tool in tools_of(made):
        check_tool(tool)


def is_toolset(component: Any) -> bool:
    """Whether a component of the kind `tools` is a class of tools, and not one tool."""
    return inspect.isclass(component)


def known_tools(added: Iterable[AddedTool]) -> list[ToolMethod]:
    """The added tools that are known before an episode: functions, and the marked methods of classes."""
    found: list[ToolMethod] = []
    for each in added:
        found += tools_of(each.make_checked()) if isinstance(each, Toolset) else [each]
    return found


def two_of_one_name(name: str, added: AddedTool, environment: str) -> str:
    """The message if an added tool has the name of another tool in an episode."""
    taken = f"{environment} or --tool has a tool named {name!r} already, and --tool {added.name} adds one of this name"
    if isinstance(added, Toolset):
        return f"{taken}; leave it out, or give it another name by a setting: rollouts plugins show {added.name}"
    return f"{taken} too; give the added one another name: --tool other_{name}=..."
