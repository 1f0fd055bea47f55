"""Which tasksets are installed, how upstream's environment of one is made, and why one cannot be served.

A taskset is a module with one Taskset class in its `__all__`. Listing imports none of them.
"""

from __future__ import annotations

import functools
import json
import re
import threading
from collections.abc import Iterator, Mapping
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rollouts.errors import ConfigError, check_known, named

SHIPPED = "verifiers.v1.tasksets"
"""The package of the tasksets in upstream's wheel."""

CONTAINER = "its tasks need a container (NEEDS_CONTAINER)\nrollouts serves tasksets that run without one"

IN_CONTAINERS = {"harbor"}
"""Tasksets of upstream whose tasks name an image each, and whose class does not say so."""

OWN_HARNESS = "rollouts-verifiers-harness"
"""Upstream's chat loop in this process, which plays if no harness is chosen."""

NOTHING: Mapping[str, Any] = MappingProxyType({})

_checking = threading.Lock()


def module_of(taskset: str) -> str:
    """The module of a taskset, as upstream names it: `owner/my-set@1.0` is in `my_set`."""
    return taskset.rpartition("/")[2].partition("@")[0].replace("-", "_").lower()


def is_installed(taskset: str) -> bool:
    """Whether there is a module of this taskset's name."""
    module = module_of(taskset)
    return module.isidentifier() and (find_spec(f"{SHIPPED}.{module}") is not None or find_spec(module) is not None)


def taskset_names() -> list[str]:
    """The tasksets in upstream's wheel, and the installed packages that require verifiers and export one, sorted."""
    return sorted({*_shipped(), *_published()})


def _shipped() -> Iterator[str]:
    spec = find_spec(SHIPPED)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        yield from (each.parent.name.replace("_", "-") for each in Path(folder).glob("*/__init__.py"))


def _published() -> Iterator[str]:
    for each in distributions():
        name = str(each.metadata["Name"] or "").lower()
        requires = {re.split(r"[^\w.-]", text, maxsplit=1)[0].lower() for text in each.requires or []}
        source = _source_of(module_of(name)) if "verifiers" in requires else ""
        if "__all__" in source and re.search(r"Taskset\b", source):
            yield name


def check(taskset: str, config: Mapping[str, Any], harness: str = "", of_harness: Mapping[str, Any] = NOTHING) -> None:
    """Raise ConfigError if the taskset cannot be served with this config and harness. Each is tried once."""
    with _checking:
        _checked(taskset, json.dumps(config, sort_keys=True), harness, json.dumps(of_harness, sort_keys=True))


@functools.lru_cache(maxsize=64)
def _checked(taskset: str, config: str, harness: str, of_harness: str) -> None:
    make(taskset, json.loads(config), harness, json.loads(of_harness))


def make(taskset: str, config: Mapping[str, Any], harness: str = "", of_harness: Mapping[str, Any] = NOTHING) -> Any:
    """Upstream's environment of a taskset. `harness` plays it, with its own config; empty: our harness. Raises
    ConfigError.
    """
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils import loaders

    from rollouts_verifiers import programs

    name = f"verifiers/{taskset}"
    try:
        loaders.taskset_class(taskset)
        config_type, env_type = loaders.taskset_config_type(taskset), loaders.env_config_type(taskset)
    except Exception as error:
        raise ConfigError(f"{name} is no taskset that can be imported: {named(error)}") from error
    if loaders.task_type(taskset).NEEDS_CONTAINER or module_of(taskset) in IN_CONTAINERS:
        raise ConfigError(f"{name} cannot be served: {CONTAINER}")
    known = [field for field in config_type.model_fields if field != "id"]
    check_known(config, known, f"{name} has no field --env.config.", f"the fields of {name}")
    roles = list(agent_config_fields(env_type()))
    if len(roles) != 1:
        raise ConfigError(f"{name} cannot be served: it has several agents ({', '.join(roles)}), and a run trains one")
    program = {**of_harness, "id": harness or OWN_HARNESS}
    agent = {"harness": program, "runtime": {"type": "subprocess"}}
    given = {"taskset": {**config, "id": taskset}, roles[0]: agent, "interception": {"type": "server"}}
    if of_harness and not harness:
        raise ConfigError("--env.harness-config is for a harness: type --env.harness NAME too, such as bash")
    if harness:
        programs.check_harness(name, harness, of_harness)
    try:
        env = loaders.load_environment(loaders.resolve_env_config(given))
        toolsets = [*env.taskset.toolsets(env.taskset.config), *_toolsets_of_tasks(env)]
    except Exception as error:
        settings = f"{dict(config)}" + (f" or that of its harness {dict(of_harness)}" if of_harness else "")
        raise ConfigError(f"{name} refuses its config {settings}: {_reason(error)}") from error
    if harness:
        programs.check_tools(name, harness, toolsets)
    for each in toolsets:
        if not each.config.url:
            _refuse_runtime(name, each)
    return env


def _toolsets_of_tasks(env: Any) -> list[Any]:
    return list(type(env.taskset).task_type().toolsets(env.taskset.config.task))


def _refuse_runtime(name: str, toolset: Any) -> None:
    kind = toolset.config.runtime.type
    if kind != "subprocess":
        raise ConfigError(
            f"{name} cannot be served: its tools {toolset.server_name} run in {kind}, not on this machine"
        )


def _reason(error: Exception) -> str:
    """An error in one line; of pydantic's, the fields with what is wrong."""
    if not hasattr(error, "errors"):
        return named(error)
    wrong = [(".".join(map(str, each["loc"])), each["msg"]) for each in error.errors()]
    return "; ".join(f"{place.removeprefix('taskset.')}: {words}" for place, words in wrong)


def _source_of(module: str) -> str:
    """The source of a top-level module, which is not imported; empty if there is none."""
    try:
        spec = find_spec(module) if module.isidentifier() else None
        return Path(spec.origin).read_text(encoding="utf-8") if spec is not None and spec.origin else ""
    except (OSError, ValueError, UnicodeDecodeError):
        return ""
