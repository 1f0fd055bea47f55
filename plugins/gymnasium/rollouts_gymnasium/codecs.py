"""The codec of an environment: what the model reads and writes. It is made from the spaces, or it is yours."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rollouts.config.names import names_file
from rollouts.errors import ConfigError
from rollouts.plugins import ComponentRef, load_component
from rollouts.plugins.index import ANY_KIND, find_in_file
from rollouts_gymnasium import spaces, views

if TYPE_CHECKING:
    from rollouts_gymnasium.environment import GymEnvironment
    from rollouts_gymnasium.registry import Facts

EXAMPLE = """class Codec:
    legal = "one of: red, green"                    # the legal actions in words

    def show(self, observation, info): return ...   # the observation as text; it may also name `env`
    def read(self, text): return ...                # the action; raise ValueError if there is none"""


class Codec(NamedTuple):
    """What the model reads and writes.

    `show(observation, info, env)` returns text. `read(given)` returns the action that a reply, or the argument of the
    tool, means; it raises ValueError. `write(action)` returns the reply that means an action, and `data(action)` the
    argument. `legal` describes the actions, and `hint` is the type of the argument.
    """

    show: Callable[[Any, Mapping[str, Any], Any], str]
    read: Callable[[Any], Any]
    write: Callable[[Any], str]
    data: Callable[[Any], Any]
    legal: str
    hint: Any


def load_codec(given: str | Sequence[str], facts: Facts, names: tuple[str, ...], environment: GymEnvironment) -> Codec:
    """The codec of the spaces; with `given`, what the user's object has in place of it. Raises ConfigError if a space
    has no codec.
    """
    own = _own(given, environment)
    action, observed = facts.action_space, facts.observation_space
    is_shown = own.get("show") or facts.is_minigrid or environment._view != "observation"
    for what, space, is_known in (("observation", observed, is_shown), ("action", action, own.get("read"))):
        if not is_known and (why := spaces.without_codec(space)):
            raise ConfigError(
                f"{environment.pack}/{environment.env_id}: the {what} space has no text codec: {why}\n"
                f"write one in a file and type --env.codec ./my_codec.py:Codec\n\n{EXAMPLE}\n\n"
                'two functions do as well: --env.codec \'["./my_codec.py:show", "./my_codec.py:read"]\''
                + ("\nor choose another view: --env.observe ansi, or info:KEY" if what == "observation" else "")
            )

    def show(observation: Any, info: Mapping[str, Any], env: Any) -> str:
        if facts.is_minigrid:
            return views.grid_as_text(observation)
        return spaces.show(observed, observation, environment.digits)

    if "read" in own:
        legal = str(own.get("legal") or "an action as text")
        write = own.get("write") or _cannot_write
        return Codec(own.get("show", show), own["read"], write, write, legal, str)
    return Codec(
        own.get("show", show),
        lambda given: spaces.read(action, given, names),
        lambda value: spaces.write(action, value, names),
        lambda value: spaces.write(action, value, names) if names else spaces.plain(action, value),
        spaces.legal(action, names),
        spaces.hint(action, names),
    )


def _cannot_write(action: Any) -> str:
    raise ConfigError("your codec has no `write(action)`, which returns the action as text; demonstrations need it")


def _own(given: str | Sequence[str], environment: GymEnvironment) -> dict[str, Any]:
    """What the user's codec has: functions `show`, `read` and `write`, and a text `legal`."""
    if not given:
        return {}
    if isinstance(given, str):
        made = _loaded(given)
        if inspect.isclass(made) and (hasattr(made, "show") or hasattr(made, "read")):
            made = made()
        own = {name: getattr(made, name) for name in ("show", "read", "write", "legal") if hasattr(made, name)}
    else:
        own = {name: _loaded(each) for name, each in zip(("show", "read"), given, strict=False) if each}
        if len(given) > 2:
            raise ConfigError(f"--env.codec {list(given)}: expected two functions, one that shows and one that reads")
    if not own.keys() & {"show", "read"}:
        raise ConfigError(f"--env.codec {given}: it has neither `show` nor `read`; write\n\n{EXAMPLE}")
    if "show" in own and "env" not in inspect.signature(own["show"]).parameters:
        plain = own["show"]
        own["show"] = lambda observation, info, env: plain(observation, info)
    return own


def _loaded(name: str) -> Any:
    """The object in a file or a module."""
    if names_file(name):
        return load_component(find_in_file(name))
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ConfigError(f"--env.codec {name}: expected ./my_codec.py:Codec, or module:Codec")
    return load_component(ComponentRef(ANY_KIND, attribute, f"{module}:{attribute}"))
