"""Which installed packages are environments of verifiers, how one is loaded, and why one cannot be served.

An environment package has a module of its own name with a function `load_environment`. Listing imports none of them.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import re
import signal
import threading
from collections.abc import Mapping
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rollouts.errors import ConfigError, check_known, named
from rollouts_verifiers_v0.verdicts import record_failures

SANDBOX = "it runs what the model writes in a sandbox of Prime Intellect's servers"
SERVERS = "it starts servers of the Model Context Protocol, which no episode of this adapter can share"
PROGRAM = "an agent program in a container plays it, not a chat loop"

REFUSED = {
    "SandboxMixin": SANDBOX,
    "SandboxEnv": SANDBOX,
    "PythonEnv": SANDBOX,
    "BrowserEnv": "it drives a browser of another service",
    "CliAgentEnv": PROGRAM,
    "ComposableEnv": PROGRAM,
    "HarborEnv": PROGRAM,
    "MCPEnv": SERVERS,
    "OpenEnvEnv": "it starts a server in a sandbox; type: pip install rollouts-openenv",
}
"""Classes of upstream, by name, whose environments cannot be served, and why."""

_loading = threading.Lock()


def module_of(package: str) -> str:
    """The module of an environment package, as upstream names it: `owner/my-env` is in `my_env`."""
    return package.replace("-", "_").rpartition("/")[2]


def is_installed(package: str) -> bool:
    """Whether there is a module of this package's name."""
    module = module_of(package)
    return module.isidentifier() and find_spec(module) is not None


def package_names() -> list[str]:
    """The installed packages that require verifiers and define `load_environment`, sorted. None is imported."""
    found = set()
    for each in distributions():
        name = str(each.metadata["Name"] or "").lower()
        requires = {re.split(r"[^\w.-]", text, maxsplit=1)[0].lower() for text in each.requires or []}
        if "verifiers" in requires and "def load_environment" in _source_of(module_of(name)):
            found.add(name)
    return sorted(found)


def load(package: str, args: Mapping[str, Any]) -> Any:
    """Upstream's environment, made once for each package and arguments. Raises ConfigError."""
    with _loading:
        return _loaded(package, json.dumps(args, sort_keys=True))


def forget() -> None:
    """Load environments anew from now on."""
    _loaded.cache_clear()


@functools.lru_cache(maxsize=32)
def _loaded(package: str, args: str) -> Any:
    _leave_signals_alone()
    importlib.import_module("datasets").disable_progress_bars()
    name, given = f"verifiers-v0/{package}", json.loads(args)
    try:
        function = getattr(importlib.import_module(module_of(package)), "load_environment", None)
    except Exception as error:
        raise ConfigError(f"{name} cannot be imported: {named(error)}") from error
    if function is None:
        raise ConfigError(
            f"{name}: the module {module_of(package)} has no load_environment\n"
            f"if it is a taskset of verifiers 0.4, type: --env verifiers/{package}, with the package rollouts-verifiers"
        )
    _check_args(name, function, given)
    try:
        env = function(**given)
    except Exception as error:
        raise ConfigError(f"{name}: load_environment({_written(given)}) raised {named(error)}") from error
    _refuse(name, env)
    env.env_id, env.env_args = env.env_id or package, env.env_args or given
    record_failures(env)
    return env


def _refuse(name: str, env: Any) -> None:
    """Raise ConfigError if the environment cannot be served."""
    from verifiers.legacy.envs.environment import Environment
    from verifiers.legacy.envs.multiturn_env import MultiTurnEnv

    if not isinstance(env, Environment):
        raise ConfigError(f"{name}: load_environment returned {type(env).__name__}, expected a verifiers Environment")
    for part in members(env):
        for base in type(part).__mro__:
            if base.__name__ in REFUSED and base.__module__.startswith("verifiers."):
                raise ConfigError(f"{name} is a {base.__name__}, which cannot be served: {REFUSED[base.__name__]}")
        if not hasattr(part, "envs") and not isinstance(part, MultiTurnEnv):
            raise ConfigError(f"{name} is a {type(part).__name__}, which cannot be served: it is no MultiTurnEnv")
        if part.message_type != "chat":
            raise ConfigError(f"{name} cannot be served: its message_type is {part.message_type!r}, expected 'chat'")
    rubric = env.rubric
    if rubric.has_group_rewards or any(part.rubric.has_group_rewards for part in members(env)):
        raise ConfigError(
            f"{name} cannot be served: its rubric has rewards that compare the rollouts of a group\n"
            "write them as a reward that names `tasks` or `trajectories`, and leave them out of the rubric: "
            "docs/rewards.md"
        )


def members(env: Any) -> list[Any]:
    """The environment, and those of a group."""
    return [env, *(part for each in getattr(env, "envs", ()) for part in members(each))]


def _check_args(name: str, function: Any, given: Mapping[str, Any]) -> None:
    """Raise ConfigError for arguments that `load_environment` does not have, and for required ones that lack."""
    parameters = inspect.signature(function).parameters.values()
    known = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
    if not takes_any:
        check_known(given, known, f"{name} has no argument --env.args.", f"the arguments of {name}")
    required = [each.name for each in parameters if each.name in known and each.default is each.empty]
    lacking = [key for key in required if key not in given]
    if lacking:
        raise ConfigError(f"{name} needs an argument; type --env.args.{lacking[0]} VALUE")


def _written(given: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in given.items())


def _source_of(module: str) -> str:
    """The source of a top-level module, which is not imported; empty if there is none."""
    try:
        spec = find_spec(module) if module.isidentifier() else None
        return Path(spec.origin).read_text(encoding="utf-8") if spec is not None and spec.origin else ""
    except (OSError, ValueError, UnicodeDecodeError):
        return ""


def _leave_signals_alone() -> None:
    """Let upstream's constructor install no signal handlers and no exit functions: the run has its own. `shared` of the
    environment tears down what upstream would at exit.
    """
    environment: Any = importlib.import_module("verifiers.legacy.envs.environment")

    def ignore(*_: object) -> None:
        """In place of `signal.signal` and `atexit.register`."""

    own = {"SIGINT": signal.SIGINT, "SIGTERM": signal.SIGTERM, "default_int_handler": signal.default_int_handler}
    environment.signal = SimpleNamespace(signal=ignore, **own)
    environment.atexit = SimpleNamespace(register=ignore)
