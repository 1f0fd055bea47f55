"""Find the components that a name, a file or the folder of a package means. Only a file is imported, for its kind."""

from __future__ import annotations

import json
import pkgutil
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from rollouts.author_code import authors_code
from rollouts.config.names import names_file, normalize
from rollouts.config.settings import COMPONENT_KINDS
from rollouts.errors import BrokenPluginError, ConfigError, UnknownComponentError, UserError
from rollouts.plugins.index import ANY_KIND, HOOKS, KINDS, ComponentRef, find_in_file, scan
from rollouts.plugins.loading import import_cause, load_component
from rollouts.plugins.manager import PluginManager
from rollouts_check.any_kind import find_of_any_kind
from rollouts_check.packages import Found, Package

GROUPS = {f"rollouts.{kind}": kind for kind in KINDS} | {"rollouts": HOOKS}
"""The kind of each group of entry points."""

COMMAND = "rollouts check"


def find_components(given: str, kind: str | None, manager: PluginManager) -> list[Found]:
    """The components of a name, of a file (`./file.py:Name`) or of the folder of a package.

    `kind` is None for a component of any kind, and for all components of a folder. Raises UserError if there is none,
    or if several components have the name.
    """
    folder = Path(given).expanduser()
    is_package = (folder / "pyproject.toml").is_file()
    if folder.is_dir() and given.startswith((".", "/", "~")) and not is_package:
        hint = "type the folder of a package, the name of an installed component, or ./file.py:Name"
        raise ConfigError(f"{given}: there is no pyproject.toml in this folder\n{hint}")
    if is_package:
        found = list(_in_folder(given, folder.resolve()))
        chosen = [each for each in found if kind is None or each.kind == COMPONENT_KINDS.get(kind, kind)]
        if not chosen:
            has = ", ".join(f"{each.label} ({each.kind})" for each in found)
            raise ConfigError(f"{given}: there is no component of the kind {kind}; it has {has}")
        return chosen
    ref = find_ref(manager, kind, given)
    return [Found(given, given, _source_of(ref.distribution), kind=ref.kind)]


def find_ref(manager: PluginManager, kind: str | None, name: str) -> ComponentRef:
    """The only component of this kind and name, also a hook plugin; of any kind if `kind` is None.

    A file that cannot be imported gives a reference without a kind. Raises UserError.
    """
    if kind == ANY_KIND:
        return find_in_file(name)
    hooks = [ref for ref in scan().hooks if name in (ref.name, ref.value) or _is_qualified(ref, name)]
    if kind == HOOKS:
        return hooks[0] if hooks else _hook_module(name)
    try:
        found = find_of_any_kind(manager, kind, name, COMMAND)
    except UnknownComponentError:
        if kind is not None or not hooks:
            raise
        return hooks[0]
    except BrokenPluginError:
        if kind is not None or not names_file(name):
            raise
        return find_in_file(name)
    if hooks and kind is None:
        typed = "\n".join(f"  {COMMAND} {name} --kind {each}" for each in (found.kind, HOOKS))
        raise UserError(f"{name} is the name of several components\ntype one of:\n{typed}")
    return found


def load(manager: PluginManager, ref: ComponentRef) -> Any:
    """Import the component or hook plugin. Raises BrokenPluginError, UnknownComponentError."""
    if ref.kind != HOOKS:
        return manager.load(ref)
    if ref.distribution:
        return load_component(ref)
    try:
        with authors_code():
            return pkgutil.resolve_name(ref.value)
    except Exception as error:  # a module may raise anything
        raise BrokenPluginError(f"the hook plugin {ref.value} does not import\n{import_cause(error, ref)}") from error


def _hook_module(name: str) -> ComponentRef:
    """The reference for a module that no installed package names as its hooks. Raises UnknownComponentError."""
    module = name.partition(":")[0]
    try:
        is_there = all(map(str.isidentifier, module.split("."))) and find_spec(module) is not None
    except (ImportError, ValueError):
        is_there = False
    if is_there:
        return ComponentRef(HOOKS, name, name)
    known = ", ".join(sorted(ref.name for ref in scan().hooks))
    raise UnknownComponentError(f"no hook plugin is named {name!r}\ninstalled hook plugins: {known or 'none'}")


def _is_qualified(ref: ComponentRef, name: str) -> bool:
    owner, slash, rest = name.rpartition("/")
    return bool(slash) and rest == ref.name and normalize(owner) == normalize(ref.distribution)


def _in_folder(given: str, folder: Path) -> Iterator[Found]:
    package = Package(folder)
    try:
        points = package.entry_points()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{given}/pyproject.toml cannot be read: {error}") from error
    path = tuple(str(each) for each in (folder, folder / "src") if each.is_dir())
    own = {kind: points[group] for group, kind in GROUPS.items() if points.get(group)}
    if not own:
        raise ConfigError(
            f"{given}/pyproject.toml names no component\nwrite, for example:\n"
            '[project.entry-points."rollouts.environments"]\nmy_env = "my_package:MyEnv"\n'
            "or begin with a package that works: rollouts new KIND NAME"
        )
    for kind, names in own.items():
        for name, value in names.items():
            yield Found(name, value.partition("[")[0].replace(" ", ""), folder, path, kind, package)


def _source_of(distribution: str) -> Path | None:
    """The folder from which a distribution was installed in editable mode; None if there is none."""
    try:
        about = json.loads(Distribution.from_name(distribution).read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        return None
    folder = Path(unquote(urlparse(about.get("url", "")).path))
    is_here = about.get("dir_info", {}).get("editable") and (folder / "pyproject.toml").is_file()
    return folder if is_here else None
