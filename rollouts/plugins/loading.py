"""Import a component: the object of an entry point, or an attribute of a module or a file.

A file becomes a module with a unique name in `sys.modules`, so that dataclasses, type hints and pickling work. Its
folder is added at the end of `sys.path`: the file can import the files beside it, but these do not hide installed
packages. An error names the distribution, its version and the cause. If a module is missing, the error says what to
install. A package that was written for another version of the contract is refused.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from rollouts.author_code import authors_code
from rollouts.config.importing import beside, import_returns, module_name
from rollouts.config.names import names_module, normalize
from rollouts.doors import open_module
from rollouts.errors import (
    BrokenPluginError,
    MissingExtraError,
    RemoteError,
    UnknownComponentError,
    in_lines,
    suggestion,
    words_of,
)
from rollouts.plugins.index import HOOKS, KIND_WORDS, ComponentRef, is_installed
from rollouts.version import __version__

GROUP = "rollouts.contract"
VERSIONS = ("1",)
"""The versions of the contract whose components run here, the newest last."""

CORE = "rollouts-rl"
"""The distribution of the core, whose own components state nothing."""


def stated_version(distribution: str) -> str | None:
    """The version that an installed distribution states, as it is written; None if it states none."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import distribution as find

    try:
        found = find(distribution).entry_points
    except (PackageNotFoundError, ValueError):
        return None
    return next((point.value for point in found if point.group == GROUP and point.name == "version"), None)


def check_contract(ref: ComponentRef) -> None:
    """Raise BrokenPluginError if the distribution of a component states a version that does not run here.

    `1` and `v1` are the same version, because setuptools accepts only an identifier as the value of an entry point. A
    file is of version 1.
    """
    if not ref.distribution or normalize(ref.distribution) == CORE:
        return
    stated = stated_version(ref.distribution)
    if stated is None or stated.removeprefix("v") in VERSIONS:
        return
    word = "hook plugin" if ref.kind == HOOKS else KIND_WORDS[ref.kind]
    owner, newest = f"{ref.distribution} {ref.version}: its {word} {ref.name!r}", VERSIONS[-1]
    known = f"rollouts {__version__} runs version {newest}"
    states = f"{owner} is written for version {stated.removeprefix('v')} of the contract; {known}"
    again = "type: pip install --upgrade rollouts-rl, or install another release: pip install "
    again += f"'{ref.distribution}!={ref.version}'"
    if not re.fullmatch(r"v?[1-9][0-9]*", stated):
        states = f"{owner} states the contract version {stated!r}, and {known}"
        again = f'write in its pyproject.toml: [project.entry-points."{GROUP}"], and below it: version = "{newest}"'
    raise BrokenPluginError(f"{states}\n{again}")


INSTALL_TORCH = (
    f"type: pip install '{CORE}[train]'\n"
    "or, without gigabytes of CUDA libraries, first: pip install torch --index-url https://download.pytorch.org/whl/cpu"
)
"""How to install what the core needs to load a model. On Linux, pip's default build of torch includes CUDA."""

MODEL_PACKAGES = ("torch", "transformers")
"""The packages that load a model. `transformers` alone loads a tokenizer."""

_VALUE = re.compile(r"^\s*(?P<module>\w+(?:\.\w+)*)\s*(?::\s*(?P<attr>\w+(?:\.\w+)*)\s*)?(?:\[.*\]\s*)?$")

_importing = threading.RLock()  # again by the same thread: a file may load another one


def load_component(ref: ComponentRef) -> Any:
    """Import the component of a reference.

    An entry point may name extras of its distribution (`module:attr [extra]`). If a package of these extras is not
    installed, the error names it, and nothing is imported.

    Raises BrokenPluginError if the import fails, or if the distribution states a version of the contract that does not
    run here, MissingExtraError if an extra is not installed, and UnknownComponentError if a file has no
    such attribute.
    """
    check_contract(ref)
    if not ref.distribution:
        return _load_from_module(ref) if names_module(ref.value) else _load_from_file(ref)
    assert ref.value, f"a hook plugin provides {ref.qualified}: load it with PluginManager.load"
    owner = f"{ref.distribution} {ref.version}: its {KIND_WORDS.get(ref.kind, 'hook plugin')} {ref.name!r}"
    extras = _extras_of(ref)
    wanted = {normalize(extra) for extra in extras}
    absent = [
        package
        for package, extra, only_extra in _requirements_of_extras(ref.distribution if extras else "")
        if only_extra and normalize(extra) in wanted and not is_installed(package)
    ]
    if absent:
        hint = f"type: pip install '{ref.distribution}[{','.join(extras)}]'"
        raise MissingExtraError(in_lines(_not_installed(owner, absent), hint), package=absent[0], hint=hint)
    with _imports(f"{owner} ({ref.value})", ref):
        return _import(ref)


@contextlib.contextmanager
def _imports(what: str, ref: ComponentRef) -> Iterator[None]:
    """Import an author's module in the block. Raises BrokenPluginError, or MissingExtraError."""
    try:
        with authors_code(), import_returns():
            yield
    except Exception as exc:  # a module may raise anything
        message = f"{what} does not import\n{import_cause(exc, ref)}"
        if isinstance(exc, ModuleNotFoundError) and _extra_of_module(exc, ref):
            raise MissingExtraError(message, package=_top(exc), hint=install_hint(exc, ref)) from exc
        raise BrokenPluginError(message) from exc


def absent_packages(packages: Sequence[str] = MODEL_PACKAGES) -> list[str]:
    """Which of these packages are not installed. Imports none of them."""
    return [name for name in packages if importlib.util.find_spec(name) is None]


def require_packages(what: str, packages: Sequence[str] = MODEL_PACKAGES, *, otherwise: str = "") -> None:
    """Raise MissingExtraError if one of the packages that `what` needs is not installed. `otherwise` is a line with
    another way.
    """
    if absent := absent_packages(packages):
        words = in_lines(_not_installed(what, absent), INSTALL_TORCH, otherwise)
        raise MissingExtraError(words, package=absent[0], hint=INSTALL_TORCH)


def _not_installed(what: str, packages: Sequence[str]) -> str:
    return f"{what} needs {' and '.join(packages)}, which {'is' if len(packages) == 1 else 'are'} not installed"


def import_cause(exc: BaseException, ref: ComponentRef) -> str:
    """The type, the message and the author's line. For a missing module, a second line says what to install."""
    return in_lines(" ".join(words_of(exc).split()), install_hint(exc, ref))


def install_hint(exc: BaseException, ref: ComponentRef) -> str:
    """The command that installs a missing module. For another ImportError of an environment, how to give it packages
    of its own. Empty for any other error.

    If an extra of the distribution provides the module, the command installs that extra. The name of a package that is
    not from rollouts cannot be known from the module's name.
    """
    if isinstance(exc, RemoteError):
        return exc.hint
    if not isinstance(exc, ModuleNotFoundError) or not exc.name:
        if isinstance(exc, ImportError) and ref.kind == "environments" and ref.distribution:
            typed = f"rollouts env install {ref.distribution}, then --worker venv"
            return f"if it needs other versions of packages, type: {typed}"
        return ""
    missing = _top(exc)
    if ref.distribution and missing == ref.value.partition(":")[0].partition(".")[0].strip():
        return f"the distribution lacks its own module: pip install --force-reinstall {ref.distribution}"
    extra = _extra_of_module(exc, ref)
    if missing in ("torch", "transformers") and (extra == "train" or not ref.distribution):
        return INSTALL_TORCH
    if extra:
        return f"an extra provides it: pip install '{ref.distribution}[{extra}]'"
    if _extras_of(ref):
        return f"an extra may provide it: pip install '{ref.distribution}[{','.join(_extras_of(ref))}]'"
    if missing.startswith("rollouts_"):
        return f"perhaps: pip install {normalize(missing)}"
    return f"install the package that has the module {missing}; its name may differ"


def _top(exc: ModuleNotFoundError) -> str:
    """The first part of the name of the missing module."""
    return (exc.name or "").partition(".")[0]


def _extra_of_module(exc: ModuleNotFoundError, ref: ComponentRef) -> str:
    """The extra of the component's distribution that requires the package of the missing module; "" if none does."""
    missing = normalize(_top(exc))
    found = (extra for package, extra, _ in _requirements_of_extras(ref.distribution) if normalize(package) == missing)
    return next(found, "")


def import_file(name: str, file: str) -> ModuleType:
    """Import a file as the module `name`. If this raises, `sys.modules` does not keep the module.

    Raises ImportError if the file cannot be a module, and whatever the module raises.
    """
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"there is no module {name} at {file!r}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


# --- entry points ---------------------------------------------------------------------------------------------------


def _import(ref: ComponentRef) -> Any:
    parsed = _VALUE.match(ref.value)
    if parsed is None:
        raise ValueError(f"the entry point's value must be `module:attribute`, not {ref.value!r}")
    path = parsed["attr"]
    if path is None and ref.kind != HOOKS:
        raise ValueError(f"the entry point must name an object in its module: `{ref.value}:attribute`")
    module = open_module(parsed["module"])
    value, missing = _attribute(module, path) if path else (module, "")
    if missing:
        near = suggestion(missing, (known for known in dir(value) if not known.startswith("_")))
        raise AttributeError(f"{parsed['module']} has no attribute {path!r}{near and f' ({near})'}")
    return value


def _attribute(value: Any, path: str) -> tuple[Any, str]:
    """The object at a dotted path; or the last object that was found, and the name that it lacks. An AttributeError
    does not tell where it failed: the code of a lazy module may raise one too.
    """
    for name in path.split("."):
        if not hasattr(value, name):
            return value, name
        value = getattr(value, name)
    return value, ""


def _extras_of(ref: ComponentRef) -> list[str]:
    """The extras that an entry point names: `module:attr [extra, other]`."""
    found = re.search(r"\[(.*)\]\s*$", ref.value) if ref.distribution else None
    return [extra.strip() for extra in found[1].split(",") if extra.strip()] if found else []


def _requirements_of_extras(distribution: str) -> Iterator[tuple[str, str, bool]]:
    """The packages of all extras of a distribution, from `Requires-Dist`: package, extra, and whether the extra is the
    only condition (and not also, for example, a platform).
    """
    from importlib.metadata import PackageNotFoundError, requires

    try:
        lines = requires(distribution) if distribution else None
    except PackageNotFoundError:
        lines = None
    for line in lines or ():
        package = re.match(r"[A-Za-z0-9._-]+", line.strip())
        marker = line.partition(";")[2].strip()
        extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", marker)
        if package and extra:
            yield package[0], extra[1], extra[0] == marker


# --- files ----------------------------------------------------------------------------------------------------------


def _load_from_file(ref: ComponentRef) -> Any:
    """Import the file, once for each content, and return the attribute."""
    path_text, _, attribute = ref.value.rpartition(":")
    path = Path(path_text)
    with _imports(f"{path}: the file of {KIND_WORDS.get(ref.kind, ref.kind)} {attribute!r}", ref):
        # If several threads ask for a file at the same time, one imports it, and the others wait.
        name = module_name(path, path.read_bytes())
        with _importing:
            beside(path)
            module = sys.modules.get(name) or import_file(name, str(path))
    return _attribute_of(module, attribute, str(path), ref)


def _load_from_module(ref: ComponentRef) -> Any:
    """Import `module:attribute`. A module in the working directory is found too."""
    module, _, attribute = ref.value.partition(":")
    label = f"{KIND_WORDS.get(ref.kind, ref.kind)} {ref.value!r}"
    beside(Path.cwd() / "any")
    try:
        with _imports(f"{label}: {module}", ref):
            found = open_module(module)
    except BrokenPluginError as error:
        missing = getattr(error.__cause__, "name", "") if isinstance(error.__cause__, ModuleNotFoundError) else ""
        if not missing or not f"{module}.".startswith(f"{missing}."):
            raise
        where = (
            "a module is found if its package is installed, or in the folder where you type the command; for another "
            f"folder, type: PYTHONPATH=FOLDER, or ./{module.replace('.', '/')}.py:{attribute}"
        )
        words = in_lines(f"{label}: there is no module {missing!r}", _weight_hint(ref), where)
        raise UnknownComponentError(words) from error.__cause__
    return _attribute_of(found, attribute, module, ref)


def _attribute_of(module: ModuleType, attribute: str, place: str, ref: ComponentRef) -> Any:
    """An attribute of a module. Raises UnknownComponentError if the module lacks it."""
    value, missing = _attribute(module, attribute)
    if not missing:
        return value
    public = {name: each for name, each in getattr(value, "__dict__", {}).items() if not name.startswith("_")}
    own = [name for name, each in public.items() if getattr(each, "__module__", "") == module.__name__]
    lacks = f"{place} has no {KIND_WORDS.get(ref.kind, ref.kind)} {attribute!r}"
    defines = f"it defines: {', '.join(name for name in own if callable(public[name])) or 'nothing public'}"
    raise UnknownComponentError(in_lines(lacks, suggestion(missing, public), defines, _weight_hint(ref)))


def _weight_hint(ref: ComponentRef) -> str:
    """What to type if `name:word` is meant as a reward with a weight; empty for another kind, or for a file."""
    if ref.kind != "rewards" or not names_module(ref.value):
        return ""
    name, _, word = ref.value.partition(":")
    return f"if {word!r} is meant as a weight: {word!r} is not a number; type: --reward {name}:1.0"
