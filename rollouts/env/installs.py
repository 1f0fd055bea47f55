"""Environments that are installed in virtual environments of their own: find, list and remove them.

    ENVS/PACKAGE/install.json    what is installed, and the folder of its virtual environment; written last
    ENVS/PACKAGE/venv-1f0c/      the virtual environment, with `rollouts.lock`

`ENVS` is `$ROLLOUTS_ENVS`, else `~/.local/share/rollouts/envs`. A virtual environment cannot be moved, so it is built
where it stays. One that `install.json` does not name is left from an installation that failed, and is removed. Nothing
of an installed package is imported here. Not here: the installation itself (`installing`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

import msgspec

from rollouts.config.names import normalize
from rollouts.disk import HIDDEN_NAME, remove_folder, write_whole
from rollouts.errors import PluginError, UnknownComponentError, in_lines, suggestion

NAMES_MAX = 8  # a collection such as `gym/...` has a thousand
RECORD, LOCK, VENV = "install.json", "rollouts.lock", "venv-"


class Install(msgspec.Struct, frozen=True):
    """What is installed. `environments` are the names of the package's environments, `python` and `rollouts` are
    versions, `contract` is the version of the contract that the package states, or empty, and `venv` is the name of the
    folder.
    """

    package: str
    version: str
    environments: list[str]
    requested: str
    python: str
    rollouts: str
    venv: str
    bytes: int
    contract: str = ""


class Installed(NamedTuple):
    """An installation and its folder."""

    folder: Path
    install: Install

    @property
    def venv(self) -> Path:
        """The virtual environment."""
        return self.folder / self.install.venv

    @property
    def python(self) -> Path:
        """The interpreter of the virtual environment."""
        return python_of(self.venv)

    @property
    def lock(self) -> Path:
        """The file with the exact version of every package in the virtual environment."""
        return self.venv / LOCK


def envs_folder() -> Path:
    """The folder of all installations."""
    if own := os.environ.get("ROLLOUTS_ENVS"):
        return Path(own).expanduser().absolute()
    data = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(data).expanduser().absolute() / "rollouts" / "envs"


def python_of(venv: Path) -> Path:
    """The interpreter of a virtual environment."""
    return venv / "bin" / "python"


def shown_names(names: Sequence[str]) -> str:
    """Names of environments in one line; of many, the first ones and how many more there are."""
    more = len(names) - NAMES_MAX
    return ", ".join(names[:NAMES_MAX]) + (f", and {more} more" if more > 0 else "")


def all_installed() -> list[Installed]:
    """Every complete installation, by its package's name."""
    folders = sorted(envs_folder().glob("*")) if envs_folder().is_dir() else []
    read = [_read(folder) for folder in folders if not HIDDEN_NAME.fullmatch(folder.name)]
    return [each for each in read if each is not None]


def _read(folder: Path) -> Installed | None:
    """The installation in this folder; None if there is no complete one."""
    try:
        installed = Installed(folder, msgspec.json.decode((folder / RECORD).read_bytes(), type=Install))
    except (OSError, msgspec.MsgspecError):  # it failed, or another version of rollouts wrote it
        return None
    return installed if installed.python.exists() else None


def find_installed(name: str) -> Installed:
    """The installation with an environment of this name: `calculator`, or `package/calculator`.

    Raises UnknownComponentError if there is none, and PluginError if several packages have that name.
    """
    everything = all_installed()
    owner, _, bare = name.rpartition("/")
    found = [each for each in everything if name in each.install.environments]  # also of a hook: `gym/CartPole-v1`
    if not found:
        fits = [each for each in everything if bare in each.install.environments]
        found = [each for each in fits if normalize(each.install.package) == normalize(owner)]
    if len(found) > 1:
        names = [f"  {each.install.package}/{bare}" for each in found]
        several = f"{len(found)} installed packages have an environment named {bare!r}; type one of:"
        if owner:
            names = [f"  rollouts env remove {each.install.package}" for each in found]
            several = f"{len(found)} virtual environments have the environment {name!r}; remove all but one:"
        raise PluginError("\n".join([several, *names]))
    if found:
        return found[0]
    known = [each for installed in everything for each in installed.install.environments]
    raise UnknownComponentError(
        in_lines(
            f"no virtual environment has the environment {name!r}",
            suggestion(bare, known) or suggestion(name, known),
            f"installed in {envs_folder()}: {shown_names(sorted(known)) or 'none'}",
            f"type: rollouts env install {package_of(name) or 'PACKAGE'}",
            "" if package_of(name) else "PACKAGE is the package that provides it, its wheel, or its folder",
        )
    )


def package_of(name: str) -> str:
    """What to install for an environment that the running Python has: its source folder if it was installed with
    `pip install -e`, else its package. Empty if it has no such environment.
    """
    from importlib.metadata import distribution

    from rollouts.config.names import names_file, names_module
    from rollouts.plugins.index import find_component

    if names_file(name) or names_module(name):
        return ""
    try:
        ref = find_component("environments", name)
    except PluginError:
        return ""
    origin = msgspec.json.decode(distribution(ref.distribution).read_text("direct_url.json") or "{}")
    url = str(origin.get("url", ""))
    return url.removeprefix("file://") if url.startswith("file://") else ref.distribution


def remove_installed(name: str) -> Installed:
    """Remove the installation of this package, or the one with an environment of this name. Raises PluginError."""
    everything = all_installed()
    by_package = [each for each in everything if normalize(each.install.package) == normalize(name)]
    names = {word for each in everything for word in (each.install.package, *each.install.environments)}
    if not by_package and name.rpartition("/")[2] not in names:
        missing = f"{name!r} is not installed in {envs_folder()}"
        raise UnknownComponentError(in_lines(missing, suggestion(name, names), "type: rollouts env list"))
    (found,) = by_package or [find_installed(name)]
    with locked(found.folder):
        remove_folder(found.folder)
    return found


def write_record(folder: Path, install: Install) -> Installed:
    """Make the installation complete, and remove the virtual environment that it replaces."""
    write_whole(folder / RECORD, msgspec.json.format(msgspec.json.encode(install)))
    _sweep(folder)
    return Installed(folder, install)


def _sweep(folder: Path) -> None:
    """Remove what failed or killed commands left in a folder, which must be locked."""
    installed = _read(folder)
    for venv in folder.glob(f"{VENV}*"):
        if installed is None or venv != installed.venv:
            shutil.rmtree(venv, ignore_errors=True)
    for hidden in folder.parent.glob(f".{folder.name}.removed-*"):
        shutil.rmtree(hidden, ignore_errors=True)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the folder of an installation. It is made if it does not exist, and removed if it is empty in the end.

    Raises PluginError if another process has locked it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Beside the folder and never removed: with a new file of the same name, two processes could both hold a lock.
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        _take_lock(lock, folder.name)
        folder.mkdir(exist_ok=True)
        _sweep(folder)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # it is not empty, or was removed
                folder.rmdir()


def _take_lock(file: IO[str], name: str) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise PluginError(f"another command installs or removes {name}; type again when it is done") from None
