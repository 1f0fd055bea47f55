"""Components by kind and name, read from the metadata of what is installed.

A component is an entry point of the group `rollouts.<kind>`; a hook plugin is one of the group `rollouts`. Finding and
listing import nothing; `load_component` imports the one that was chosen. What is left out: components that only a pack
can name (`rollouts.plugins.manager`), and what a component receives (`rollouts.plugins.signature`).

There is no cache: reading the metadata of a hundred distributions takes a millisecond or two, and a package that was
installed a moment ago (in a notebook, say) is found.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from rollouts.author_code import authors_code, message_of
from rollouts.errors import (
    AmbiguousComponentError,
    BrokenPluginError,
    PluginError,
    UnknownComponentError,
    near_misses,
)

if TYPE_CHECKING:
    from importlib.metadata import Distribution

__all__ = [
    "HOOKS",
    "KINDS",
    "KIND_WORDS",
    "ComponentRef",
    "Scan",
    "cause_of",
    "check_kind",
    "find_component",
    "install_hint",
    "installed_components",
    "installed_hooks",
    "load_component",
    "names_file",
    "normalise",
    "one_line",
    "scan",
    "sort_refs",
    "unknown_component",
]

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
    "loggers": "logger",
    "datasets": "dataset",
    "curricula": "curriculum",
    "tools": "tool",
    "commands": "command",
}
"""Every kind, and the word for one of it."""

KINDS: tuple[str, ...] = tuple(KIND_WORDS)
"""The kinds of component; the entry-point group of each is `rollouts.<kind>`."""

HOOKS = "hooks"
"""The `kind` of a reference to a hook plugin (entry-point group `rollouts`). It is not one of KINDS."""

_VALUE = re.compile(r"^\s*(?P<module>\w+(?:\.\w+)*)\s*(?::\s*(?P<attr>\w+(?:\.\w+)*)\s*)?(?:\[.*\]\s*)?$")


class ComponentRef(msgspec.Struct, frozen=True):
    """Where a component is. It has not been imported, and may not import.

    `value` is `module:attr`, or `file.py:attr` for a file (then `distribution` and `version` are empty), or empty for a
    component that a pack's hook makes on demand (`PluginManager.load` asks the pack).
    """

    kind: str
    name: str
    value: str
    distribution: str = ""
    version: str = ""

    @property
    def qualified(self) -> str:
        """The name that always finds this component: `dist/name`, or the file's `path.py:attr`."""
        return f"{self.distribution}/{self.name}" if self.distribution else self.value


class Scan(NamedTuple):
    """What the metadata says: components and hook plugins, and the distributions whose entry points cannot be read."""

    components: list[ComponentRef]
    hooks: list[ComponentRef]
    faults: list[str]


def installed_components(kind: str | None = None) -> list[ComponentRef]:
    """Every installed component (of one kind), from metadata alone: sorted, each once.

    Raises PluginError for a kind that does not exist.
    """
    if kind is not None:
        check_kind(kind)
    return [ref for ref in scan().components if kind is None or ref.kind == kind]


def installed_hooks() -> list[ComponentRef]:
    """Every installed hook plugin (entry-point group `rollouts`), from metadata alone; `kind` is HOOKS."""
    return scan().hooks


def find_component(kind: str, name: str) -> ComponentRef:
    """The component of that kind and name; nothing is imported.

    `name` is a bare name, `dist/name` (any spelling of the distribution that pip would accept), or `path/file.py:attr`.
    Raises UnknownComponentError (a missing file too) and AmbiguousComponentError.
    """
    check_kind(kind)
    if names_file(name):
        from rollouts.plugins.files import find_in_file

        return find_in_file(kind, name)
    everything = scan().components
    found = _matches([ref for ref in everything if ref.kind == kind], name)
    if not found:
        raise unknown_component(kind, name, everything)
    if len(found) > 1:
        typed = "\n".join(f"  {ref.qualified}    ({ref.distribution} {ref.version})" for ref in found)
        raise AmbiguousComponentError(
            f"{len(found)} installed distributions have {_an(kind)} named {name!r}\ntype which one you mean:\n{typed}"
        )
    return found[0]


def load_component(ref: ComponentRef) -> Any:
    """Import what the reference names.

    Raises BrokenPluginError, which names the distribution, its version and the cause in one line; for a file also
    UnknownComponentError where the file has no such attribute. An entry point may name extras of its distribution
    (`module:attr [extra]`): where a package that they ask for is not installed, that is told before anything is
    imported.
    """
    if not ref.distribution:
        from rollouts.plugins.files import load_from_file

        return load_from_file(ref)
    assert ref.value, f"{ref.qualified} is made by a pack's hook: load it with PluginManager.load"
    absent = _absent_of_extras(ref)
    if absent:
        raise BrokenPluginError(
            f"{ref.distribution} {ref.version}: {_a_part(ref)} needs {' and '.join(absent)}, which "
            f"{'is' if len(absent) == 1 else 'are'} not installed\ntype: pip install "
            f"'{ref.distribution}[{','.join(_extras_of(ref))}]'"
        )
    try:
        with authors_code():
            return _import(ref)
    except Exception as exc:  # a module may raise anything
        raise BrokenPluginError(
            f"{ref.distribution} {ref.version}: {_a_part(ref)} ({ref.value}) does not import\n{cause_of(exc, ref)}"
        ) from exc


def _a_part(ref: ComponentRef) -> str:
    return f"its {'hook plugin' if ref.kind == HOOKS else KIND_WORDS[ref.kind]} {ref.name!r}"


def names_file(name: str) -> bool:
    """Whether a component's name is meant as a file: it says `.py`, or it starts like a path."""
    return bool(re.search(r"\.py(:|$)", name)) or name.startswith(("./", "../", "/", "~/", ".\\"))


def check_kind(kind: str) -> None:
    """Raise PluginError for a kind that does not exist."""
    if kind not in KIND_WORDS:
        raise PluginError(
            f"there is no kind of component called {kind!r}\n{_did_you_mean(kind, KINDS)}kinds: {', '.join(KINDS)}"
        )


def normalise(distribution: str) -> str:
    """A distribution's name as PEP 503 compares it.

    >>> normalise("Acme_Rewards")
    'acme-rewards'
    """
    return re.sub(r"[-_.]+", "-", distribution).lower()


def one_line(exc: BaseException) -> str:
    """An exception as `type: message`, in one line."""
    message = " ".join(message_of(exc).split())
    return f"{type(exc).__name__}: {message}" if message else type(exc).__name__


def cause_of(exc: BaseException, ref: ComponentRef) -> str:
    """`type: message` in one line; a second line says what to install where a module is missing."""
    hint = install_hint(exc, ref)
    return one_line(exc) + (f"\n{hint}" if hint else "")


def install_hint(exc: BaseException, ref: ComponentRef) -> str:
    """What to type where an error of this component is that a module is missing; empty for any other error."""
    return _install_hint(exc, ref) if isinstance(exc, ModuleNotFoundError) and exc.name else ""


def unknown_component(
    kind: str, name: str, known: Sequence[ComponentRef], notes: Iterable[str] = ()
) -> UnknownComponentError:
    """The error for a name that nobody offers.

    `known` are components of any kind; those of `kind` are listed and searched for near misses, the others tell
    somebody who took a loss for a filter. `notes` are further lines, such as packs that could not be asked.
    """
    of_kind = [ref for ref in known if ref.kind == kind]
    elsewhere = [f"{KIND_WORDS[ref.kind]} {ref.qualified}" for ref in known if ref.kind != kind and ref.name == name]
    lines = [f"no {KIND_WORDS[kind]} is named {name!r}"]
    owner, slash, rest = name.partition("/")
    theirs = [ref for ref in of_kind if slash and normalise(ref.distribution) == normalise(owner)]
    if theirs:
        near = [f"{owner}/{bare}" for bare in near_misses(rest, [ref.name for ref in theirs])]
        lines.append(_installed_without(kind, theirs[0].distribution, [ref.name for ref in theirs]))
    else:
        near = near_misses(name, [ref.qualified if slash else ref.name for ref in of_kind])
        if slash and _is_installed(owner):
            others = [ref for ref in known if normalise(ref.distribution) == normalise(owner)]
            lines.append(_installed_without(kind, owner, [f"{KIND_WORDS[ref.kind]} {ref.name}" for ref in others]))
    if near:
        lines.append(f"did you mean: {', '.join(near)}?")
    lines.append(f"installed ({kind}): {', '.join(_names(of_kind)) or 'none'}")
    if elsewhere:
        lines.append(f"of that name there is: {', '.join(elsewhere)}")
    lines += notes
    if not any(normalise(ref.distribution) == "rollouts-rl" for ref in known):
        lines.append(
            "rollouts itself is not installed, so its own components are missing: pip install -e . in its folder"
        )
    lines.append("to see everything: rollouts plugins list")
    package = normalise(owner if slash else f"rollouts-{name}")
    # A misspelt name is a name that anybody could publish under: nobody is told to install it.
    could_be = re.fullmatch(r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?", package) and not near
    if could_be and not theirs and not _is_installed(package):
        lines.append(
            "if a package brings it, this may be its name (a guess; see who publishes it before you type): "
            f"pip install {package}"
        )
    return UnknownComponentError("\n".join(lines))


def sort_refs(refs: Iterable[ComponentRef]) -> list[ComponentRef]:
    """By kind (in the order of KINDS), name, distribution."""
    order = {kind: index for index, kind in enumerate(KINDS)}
    return sorted(refs, key=lambda ref: (order.get(ref.kind, len(order)), ref.name, normalise(ref.distribution)))


def scan() -> Scan:
    """Read the entry points of every distribution on sys.path."""
    from importlib.metadata import distributions

    found: dict[tuple[str, str, str], ComponentRef] = {}
    faults: list[str] = []
    for distribution in distributions():
        try:
            for ref in _refs_of(distribution):
                # An editable install can be listed twice; the first on sys.path is the one that would be imported.
                found.setdefault((normalise(ref.distribution), ref.kind, ref.name), ref)
        except Exception as exc:  # one unreadable distribution must not hide the others; doctor reports it
            where = getattr(distribution, "_path", "a distribution")
            faults.append(f"{where}: its entry points cannot be read: {one_line(exc)}")
    refs = sort_refs(found.values())
    return Scan([ref for ref in refs if ref.kind != HOOKS], [ref for ref in refs if ref.kind == HOOKS], faults)


def _refs_of(distribution: Distribution) -> Iterator[ComponentRef]:
    """The references of one distribution. Most have none, and are not parsed."""
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


def _matches(refs: Sequence[ComponentRef], name: str) -> list[ComponentRef]:
    owner, slash, rest = name.partition("/")
    if slash:
        qualified = [ref for ref in refs if ref.name == rest and normalise(ref.distribution) == normalise(owner)]
        if qualified:
            return qualified
    return [ref for ref in refs if ref.name == name]


def _import(ref: ComponentRef) -> Any:
    import importlib

    parsed = _VALUE.match(ref.value)
    if parsed is None:
        raise ValueError(f"the entry point's value must be `module:attribute`, not {ref.value!r}")
    path = parsed["attr"]
    if path is None and ref.kind != HOOKS:
        raise ValueError(f"the entry point names a module; it must name an object in it, `{ref.value}:attribute`")
    value: Any = importlib.import_module(parsed["module"])
    for attribute in (path or "").split(".") if path else ():
        if not hasattr(value, attribute):
            public = [known for known in dir(value) if not known.startswith("_")]
            near = near_misses(attribute, public)
            raise AttributeError(
                f"{parsed['module']} has no attribute {path!r}"
                + (f" (did you mean {', '.join(near)}?)" if near else "")
            )
        value = getattr(value, attribute)
    return value


def _install_hint(exc: ModuleNotFoundError, ref: ComponentRef) -> str:
    """What to install for a missing module: an extra of the distribution that has it, else a guess from its name."""
    missing = (exc.name or "").partition(".")[0]
    if ref.distribution and missing == ref.value.partition(":")[0].partition(".")[0].strip():
        return f"the module is missing from the distribution itself: pip install --force-reinstall {ref.distribution}"
    extra = _extra_with(ref.distribution, missing) if ref.distribution else None
    if extra is not None:
        return f"it comes with an extra: pip install '{ref.distribution}[{extra}]'"
    if _extras_of(ref):
        return f"it may come with an extra: pip install '{ref.distribution}[{','.join(_extras_of(ref))}]'"
    return f"perhaps: pip install {missing}"


def _extra_with(distribution: str, package: str) -> str | None:
    """The extra of a distribution that requires the package, read from `Requires-Dist`."""
    from importlib.metadata import PackageNotFoundError, requires

    try:
        lines = requires(distribution) or []
    except PackageNotFoundError:
        return None
    for line in lines:
        required = re.match(r"[A-Za-z0-9._-]+", line.strip())
        extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", line)
        if required and extra and normalise(required[0]) == normalise(package):
            return extra[1]
    return None


def _extras_of(ref: ComponentRef) -> list[str]:
    """The extras that the entry point names: `module:attr [extra, other]`."""
    found = re.search(r"\[(.*)\]\s*$", ref.value) if ref.distribution else None
    return [extra.strip() for extra in found[1].split(",") if extra.strip()] if found else []


def _absent_of_extras(ref: ComponentRef) -> list[str]:
    """The distributions that the entry point's extras ask for and that are not installed. What depends on more than the
    extra (a platform, a version of Python) is left to the import.
    """
    from importlib.metadata import PackageNotFoundError, requires

    extras = {normalise(extra) for extra in _extras_of(ref)}
    if not extras:
        return []
    try:
        lines = requires(ref.distribution) or []
    except PackageNotFoundError:
        return []
    absent = []
    for line in lines:
        required = re.match(r"[A-Za-z0-9._-]+", line.strip())
        marker = re.fullmatch(r"\s*extra\s*==\s*['\"]([^'\"]+)['\"]\s*", line.partition(";")[2])
        if required and marker and normalise(marker[1]) in extras and not _is_installed(required[0]):
            absent.append(required[0])
    return absent


def _installed_without(kind: str, distribution: str, has: Sequence[str]) -> str:
    return (
        f"{distribution} is installed but has no {KIND_WORDS[kind]} of that name "
        f"(it has: {', '.join(has) or 'no components'})"
    )


def _is_installed(distribution: str) -> bool:
    from importlib.metadata import PackageNotFoundError, version

    try:
        version(distribution)
    except (PackageNotFoundError, ValueError):
        return False
    return True


def _names(refs: Sequence[ComponentRef]) -> list[str]:
    """Bare names, and `dist/name` where a bare one would be ambiguous."""
    bare = [ref.name for ref in refs]
    return sorted(ref.name if bare.count(ref.name) == 1 else ref.qualified for ref in refs)


def _did_you_mean(given: str, known: Iterable[str]) -> str:
    near = near_misses(given, known)
    return f"did you mean: {', '.join(near)}?\n" if near else ""


def _an(kind: str) -> str:
    word = KIND_WORDS[kind]
    return f"{'an' if word[0] in 'aeiou' else 'a'} {word}"
