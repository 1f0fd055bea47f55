"""Find components by kind and name in the metadata of installed packages.

A component is an entry point of the group `rollouts.<kind>`. A hook plugin is an entry point of the group `rollouts`.
`./my_env.py:Calculator` and `my_pkg.envs:Calculator` are components in a file and in a module, which need no entry
point. Finding and listing import no component:
`rollouts.plugins.loading` imports them. `rollouts.plugins.manager` also finds the components that hook plugins provide.

A package that you install in a running notebook is found. Metadata is read once, and again when a folder of sys.path
or the metadata of a distribution with components has changed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from rollouts.config.names import HELD, names_file, names_module, normalize
from rollouts.disk import read_regular
from rollouts.errors import AmbiguousComponentError, PluginError, UnknownComponentError, in_lines, named, suggestion

if TYPE_CHECKING:
    from importlib.metadata import Distribution

KIND_WORDS = {
    "environments": "environment",
    "rewards": "reward",
    "filters": "filter",
    "advantages": "advantage",
    "losses": "loss",
    "kl": "KL estimator",
    "references": "reference policy",
    "corrections": "off-policy correction",
    "aggregations": "aggregation",
    "mixers": "reward mixer",
    "shapings": "reward shaping",
    "selectors": "rollout selector",
    "pairings": "pair selector",
    "inference": "inference backend",
    "training": "training backend",
    "optimizers": "optimizer",
    "loggers": "logger",
    "datasets": "dataset",
    "curricula": "curriculum",
    "samplers": "sampler",
    "tools": "tool",
    "tool_parsers": "tool parser",
    "sandboxes": "sandbox",
    "workers": "worker",
    "commands": "command",
}
"""Every kind, with the name of one component of it."""

KINDS: tuple[str, ...] = tuple(KIND_WORDS)
"""The kinds of components. The entry-point group of a kind is `rollouts.<kind>`."""

HOOKS = "hooks"
"""The `kind` of a reference to a hook plugin (entry-point group `rollouts`). It is not in KINDS."""


class ComponentRef(msgspec.Struct, frozen=True):
    """Where to find a component. The component is not imported yet, and its import may fail.

    `value` is `module:attr`, or `file.py:attr` for a file. `distribution` and `version` are empty for a file, and for a
    module that was named itself. `value` is empty for a component that a hook plugin provides (`PluginManager.load`
    calls the plugin), and `<name>` for an object in memory. `about` is a hook plugin's description of its component.
    """

    kind: str
    name: str
    value: str
    distribution: str = ""
    version: str = ""
    about: str = ""

    @property
    def qualified(self) -> str:
        """The unambiguous name of the component: `dist/name`, or `path.py:attr` for a file."""
        return f"{self.distribution}/{self.name}" if self.distribution else self.value


PACK_MAX = 10  # an error lists the names of a pack, such as `gym/<id>`, if it has no more

ANY_KIND = "component"
"""In place of a kind, for a file whose kind is not known yet."""


class Scan(NamedTuple):
    """The components and hook plugins in the metadata, and a message for each distribution that cannot be read."""

    components: list[ComponentRef]
    hooks: list[ComponentRef]
    faults: list[str]


def installed_components(kind: str | None = None) -> list[ComponentRef]:
    """Every installed component of one kind, or of all kinds, sorted. Nothing is imported.

    Raises PluginError for an unknown kind.
    """
    if kind is not None:
        check_kind(kind)
    return [ref for ref in scan().components if kind is None or ref.kind == kind]


def find_component(kind: str, name: str) -> ComponentRef:
    """Find the component of this kind and name. Nothing is imported.

    `name` is a bare name, `dist/name` (with any spelling of the distribution that pip accepts), `path/file.py:attr`, or
    `module:attr`.
    Raises UnknownComponentError, also for a missing file, and AmbiguousComponentError.
    """
    check_kind(kind)
    if names_file(name):
        return find_in_file(name, kind)
    if names_module(name):
        own = [ref for ref in scan().components if ref.kind == kind and ref.value == name]
        return own[0] if own else ComponentRef(kind, name.partition(":")[2], name)
    if HELD.fullmatch(name):
        raise UnknownComponentError(
            f"the {KIND_WORDS[kind]} {name} was an object in the memory of a Python program; no command can find it\n"
            f"give it again from Python: rollouts.resume(RUN, ...={name[1:-1]}), or rollouts.run(FILE, ...)"
        )
    everything = scan().components
    owner, _, rest = name.partition("/")
    of_kind = [ref for ref in everything if ref.kind == kind]
    qualified = [ref for ref in of_kind if ref.name == rest and normalize(ref.distribution) == normalize(owner)]
    found = qualified or [ref for ref in of_kind if ref.name == name]
    if not found:
        raise unknown_component(kind, name, everything)
    if len(found) > 1:
        several = f"{len(found)} installed distributions have {a_kind(kind)} named {name!r}\ntype one of:"
        owners = (f"  {ref.qualified}    ({ref.distribution} {ref.version})" for ref in found)
        raise AmbiguousComponentError(in_lines(several, *owners))
    return found[0]


def a_kind(kind: str) -> str:
    """The name of one component of this kind, with its article.

    >>> a_kind("environments"), a_kind("losses")
    ('an environment', 'a loss')
    """
    word = KIND_WORDS.get(kind, kind.removesuffix("s"))
    return f"{'an' if word[0] in 'aeiou' else 'a'} {word}"


def check_kind(kind: str) -> None:
    """Raise PluginError for an unknown kind."""
    if kind not in KIND_WORDS:
        unknown, kinds = f"there is no kind of component called {kind!r}", f"kinds: {', '.join(KINDS)}"
        raise PluginError(in_lines(unknown, suggestion(kind, KINDS), kinds))


def is_installed(distribution: str) -> bool:
    """Whether a distribution of this name is installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        version(distribution)
    except (PackageNotFoundError, ValueError):
        return False
    return True


def unknown_component(
    kind: str, name: str, known: Sequence[ComponentRef], notes: Iterable[str] = ()
) -> UnknownComponentError:
    """The error for a name that no distribution offers.

    `known` holds the components of all kinds. The error lists those of `kind` and suggests similar names; if a
    component of another kind has the name, the error says so. `notes` are further lines, such as the failures of hook
    plugins.
    """
    of_kind = [ref for ref in known if ref.kind == kind]
    elsewhere = [f"{KIND_WORDS[ref.kind]} {ref.qualified}" for ref in known if ref.kind != kind and ref.name == name]
    is_whole = any(normalize(ref.distribution) == "rollouts-rl" for ref in known)
    has_packs = any("/" in ref.name for ref in of_kind)
    hints = in_lines(*_name_hints(kind, name, known))
    lines = (
        f"no {KIND_WORDS[kind]} is named {name!r}",
        hints,
        "the environment's own rewards are named `env`: --reward env:1" if kind == "rewards" else "",
        f"installed ({kind}): {', '.join(_grouped(_names(of_kind))) or 'none'}",
        f"other components with this name: {', '.join(elsewhere)}" if elsewhere else "",
        *notes,
        "" if is_whole else _NOT_INSTALLED,
        f"to see everything: rollouts plugins list{' --all' if has_packs else ''}",
        f"{_IN_CLONE}: pip install ./plugins/{name}" if kind == "loggers" and name in _LOGGERS_OF_CLONE else "",
        "" if hints else _install_hint(name),
    )
    return UnknownComponentError(in_lines(*lines))


def _name_hints(kind: str, name: str, known: Sequence[ComponentRef]) -> Iterator[str]:
    """What was meant by a name of which there is no component; empty lines if it is not known."""
    of_kind = [ref for ref in known if ref.kind == kind]
    owner, slash, rest = name.partition("/") if "/" in name else ("", "", name)
    theirs = [ref for ref in known if slash and normalize(ref.distribution) == normalize(owner)]
    own = [ref.name for ref in theirs if ref.kind == kind]
    if own or (slash and is_installed(owner) and not any(ref.name.startswith(f"{owner}/") for ref in of_kind)):
        others = own or [f"{KIND_WORDS[ref.kind]} {ref.name}" for ref in theirs]
        package = theirs[0].distribution if own else owner
        has = ", ".join(_grouped(others)) or "no components"
        yield f"{package} is installed but has no {KIND_WORDS[kind]} of that name (it has: {has})"
    yield _file_hint(name)
    yield _folder_hint(kind, rest)
    for ref in of_kind:
        if ref.value == name or normalize(ref.distribution) == normalize(name):
            yield f"{ref.value if ref.value == name else ref.distribution} provides: {ref.name}"
    if own:
        yield suggestion(rest, own, f"{owner}/{{}}".format)
    else:
        yield suggestion(name, [ref.qualified if slash and "/" not in ref.name else ref.name for ref in of_kind])


def _install_hint(name: str) -> str:
    """How to install the package that the user typed. No other name is guessed: an attacker may have published it."""
    owner, slash, _ = name.partition("/")
    package = normalize(owner)
    is_name = slash and re.fullmatch(r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?", package)
    is_file = Path(name).suffix in (".py", ".toml", ".json", ".jsonl")
    return "" if not is_name or is_file or is_installed(package) else f"{_NOT_THERE}: pip install {package}"


def _file_hint(name: str) -> str:
    """What to type if the name is a module in this folder: `my_env:Name`, `my_env.Name` or `my_env`."""
    module, _, attribute = name.partition(":" if ":" in name else ".")
    if module.isidentifier() and Path(f"{module}.py").is_file():
        return f"there is a file {module}.py here; type: ./{module}.py:{attribute or 'Name'}"
    return ""


def _folder_hint(kind: str, name: str) -> str:
    """What to type if a package in this folder, or in one below it, has a component of this kind and name, and is not
    installed.
    """
    import tomllib

    for file in (Path("pyproject.toml"), *sorted(Path().glob("*/pyproject.toml"))):
        try:
            points = tomllib.loads(read_regular(file).decode())["project"]["entry-points"]
            is_there = name in points[f"rollouts.{kind}"]
        except (OSError, ValueError, KeyError, TypeError):  # another project's file, or none that pip can read either
            continue
        if is_there:
            return f"{file} has it; to install that package, type: pip install -e {shlex.quote(str(file.parent))}"
    return ""


_NOT_INSTALLED = (
    "rollouts itself is not installed, so its own components are missing; in its folder, type: pip install -e ."
)
_LOGGERS_OF_CLONE = ("mlflow", "tensorboard", "trackio", "wandb")
_IN_CLONE = "a package in the repository of rollouts provides it; in a clone, type"
_NOT_THERE = "that package is not installed; check who publishes it, and type"


def sort_refs(refs: Iterable[ComponentRef]) -> list[ComponentRef]:
    """The references sorted by kind (in the order of KINDS), name and distribution."""
    order = {kind: index for index, kind in enumerate(KINDS)}
    return sorted(refs, key=lambda ref: (order.get(ref.kind, len(order)), ref.name, normalize(ref.distribution)))


_METADATA = ("entry_points.txt", "METADATA", "PKG-INFO")
_Stamp = tuple[int, int, int] | None


class _Reading(NamedTuple):
    """What a scan found. It is read again when the folders are others, or one of them or of the files has changed."""

    scan: Scan
    folders: dict[str, _Stamp]
    files: dict[str, _Stamp]


_last: _Reading | None = None
"""A run finds a dozen components, one after the other, in the same metadata."""


def scan(path: list[str] | None = None) -> Scan:
    """The entry points of all distributions in these folders, by default on sys.path."""
    global _last
    folders = _stamps(sys.path if path is None else path)
    files = _stamps(_last.files) if _last else {}
    if _last is None or folders != _last.folders or files != _last.files:
        read, seen = _read(path)
        _last = _Reading(read, folders, {**files, **_stamps(seen)})
    return _last.scan


def _read(path: list[str] | None) -> tuple[Scan, list[str]]:
    """Read the entry points. Also returns the metadata files of the distributions that have components."""
    from importlib.metadata import distributions

    found: dict[tuple[str, str, str], ComponentRef] = {}
    faults: list[str] = []
    files: list[str] = []
    for distribution in distributions() if path is None else distributions(path=path):
        folder, refs = getattr(distribution, "_path", "a distribution"), []
        try:
            refs = list(_read_refs(distribution))
        except Exception as exc:  # do not hide the other distributions; `doctor` reports this one
            faults.append(f"{folder}: its entry points cannot be read: {' '.join(named(exc).split())}")
            files.append(f"{folder}/entry_points.txt")
        files += [f"{folder}/{name}" for name in _METADATA if refs]
        for ref in refs:
            # An editable install can be listed twice. Python imports the first one on sys.path.
            found.setdefault((normalize(ref.distribution), ref.kind, ref.name), ref)
    refs = sort_refs(found.values())
    return Scan([ref for ref in refs if ref.kind != HOOKS], [ref for ref in refs if ref.kind == HOOKS], faults), files


def _stamps(files: Iterable[str]) -> dict[str, _Stamp]:
    """What changes when a file is written, or an entry of a folder. None for a file that does not exist."""
    stamps: dict[str, _Stamp] = dict.fromkeys(files)
    for file in stamps:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found = os.stat(file or ".")
            stamps[file] = (found.st_ino, found.st_mtime_ns, found.st_size)
    return stamps


def _read_refs(distribution: Distribution) -> Iterator[ComponentRef]:
    """The references in the metadata. Most distributions have none, so their metadata is not parsed."""
    if "rollouts" not in (distribution.read_text("entry_points.txt") or ""):
        return
    groups = {"rollouts": HOOKS} | {f"rollouts.{kind}": kind for kind in KINDS}
    points = [point for point in distribution.entry_points if point.group in groups]
    if not points:
        return
    metadata: Any = distribution.metadata
    name, version = metadata["Name"] or "(no name)", metadata["Version"] or "(no version)"
    for point in points:
        yield ComponentRef(groups[point.group], point.name, point.value, name, version)


def find_in_file(name: str, kind: str = ANY_KIND) -> ComponentRef:
    """The reference for `path/to/file.py:attr`. The file is not run.

    Raises UnknownComponentError if there is no such file, or if the name has another form.
    """
    word = KIND_WORDS.get(kind, kind)
    path_text, colon, attribute = name.rpartition(":")
    if not colon or not path_text.endswith(".py") or not all(part.isidentifier() for part in attribute.split(".")):
        file = next((text for text in (path_text, name) if text.endswith(".py")), "./file.py")
        defined = ", ".join(_defined_in(Path(file).expanduser()))
        is_file = ".py" in name or Path(name).expanduser().exists()
        looks = f"{name!r} looks like a file, but" if is_file else f"there is no file {name!r};"
        looks = f"{looks} {a_kind(kind)} in a file is written path.py:Name"
        again = f"type: {file}:Name, where Name is the name of the {word} in that file"
        raise UnknownComponentError(in_lines(looks, again, f"it defines: {defined}" if defined else ""))
    path = Path(path_text).expanduser()
    if not path.is_file():
        beside = sorted(file.name for file in path.parent.glob("*.py"))
        near = suggestion(path.name, beside, lambda file: f"{path.parent / file}:{attribute}")
        listing = near or (f"files there: {', '.join(beside)}" if beside else "")
        lacks = f"{word} {name!r}: there is no file {path_text!r} (the full path: {path.resolve()})"
        raise UnknownComponentError(in_lines(lacks, listing), missing=name)
    return ComponentRef(kind, attribute, f"{path.resolve()}:{attribute}")


def _defined_in(file: Path) -> list[str]:
    """The public classes and functions of a file, which is not run; none of a file that cannot be read."""
    import ast

    try:
        body = ast.parse(read_regular(file)).body
    except (OSError, SyntaxError, ValueError):
        return []
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [each.name for each in body if isinstance(each, kinds) and not each.name.startswith("_")]


def _names(refs: Sequence[ComponentRef]) -> list[str]:
    """The bare names, or `dist/name` where the bare name is ambiguous."""
    bare = [ref.name for ref in refs]
    return sorted(ref.name if bare.count(ref.name) == 1 else ref.qualified for ref in refs)


def _grouped(names: Sequence[str]) -> list[str]:
    """The names; those of a pack with many, such as `gym/CartPole-v1`, as one entry with their number.

    >>> _grouped(["calculator", *(f"gym/{number}" for number in range(20))])
    ['calculator', 'gym/... (20)']
    """
    packs = Counter(name.partition("/")[0] for name in names if "/" in name)
    large = {pack: f"{pack}/... ({count})" for pack, count in packs.items() if count > PACK_MAX}
    return list(dict.fromkeys(large.get(name.partition("/")[0], name) if "/" in name else name for name in names))
