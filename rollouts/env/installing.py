"""Environments in virtual environments of their own: `rollouts env install | list | remove`.

    ENVS/PACKAGE/install.json    what is installed, and the folder of its virtual environment; written last
    ENVS/PACKAGE/venv-1f0c/      the virtual environment, with `rollouts.lock`

`ENVS` is `$ROLLOUTS_ENVS`, else `~/.local/share/rollouts/envs`. A virtual environment cannot be moved, so it is built
where it stays. It has the package, what it requires, and the light base of rollouts, which has no torch. `uv` installs
it if it is on PATH, else pip. Wheels of the base, and of its dependencies here, are made for it. The installation is
complete when its record is written; one that fails or is killed leaves an earlier one as it was, and its folder, which
`install.json` does not name, is removed by the next command. Nothing of an installed package is imported here.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import importlib.util
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path
from typing import IO, NamedTuple

import msgspec
from packaging.requirements import InvalidRequirement, Requirement

from rollouts.config.names import names_file, names_module, normalize
from rollouts.disk import HIDDEN_NAME, remove_folder, write_whole
from rollouts.doors import HOMES
from rollouts.errors import PluginError, UnknownComponentError, in_lines, suggestion
from rollouts.plugins.index import find_component, is_installed, scan
from rollouts.supervisor import supervised

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


# --- installing -------------------------------------------------------------------------------------------------------


LAST_LINES = 12  # how many lines of an installer's output an error shows
CONTRACT_GROUP = "rollouts.contract"
QUESTIONS = """\
import json, platform
from sysconfig import get_path as path
from rollouts.plugins import PluginManager
listed = [ref.name for ref in PluginManager().list("environments", hooks=True) if not ref.value]
print(json.dumps([[path("purelib"), path("platlib")], platform.python_version(), listed]))
"""


class Index(NamedTuple):
    """Where packages come from. `lock` is a file of exact versions."""

    index_url: str = ""
    find_links: Sequence[str] = ()
    no_index: bool = False
    lock: Path | None = None

    def arguments(self, more_links: Sequence[Path]) -> list[str]:
        """The options of pip and uv."""
        links = [*map(str, more_links), *self.find_links]
        return [
            *(["--index-url", self.index_url] if self.index_url else []),
            *(word for link in links for word in ("--find-links", link)),
            *(["--no-index"] if self.no_index else []),
            *(["--constraint", str(self.lock)] if self.lock else []),
        ]


class Wanted(NamedTuple):
    """What to install: the normalized name of its package, and how an installer writes it. `folder`: it is a source
    folder.
    """

    name: str
    requirement: str
    folder: bool = False


def install(
    requested: str,
    index: Index,
    *,
    more: Sequence[str] = (),
    python: str = "",
    note: Callable[[str], None] = lambda line: None,
) -> Installed:
    """Install a package: a requirement, a wheel, or a folder; and `more` packages beside it. `python` is an
    interpreter, by default the running one.

    Raises PluginError, with the last lines of the installer.
    """
    wanted, others = read_wanted(requested), [read_wanted(each) for each in more]
    folder = envs_folder() / wanted.name
    with locked(folder):
        venv = folder / f"{VENV}{secrets.token_hex(4)}"
        try:
            note(f"making {venv}")
            _make_venv(venv, python or sys.executable)
            note(f"installing {', '.join([requested, *more])}")
            _install_packages(venv, [wanted, *others], index)
            record, lock = _read_venv(venv, wanted, requested)
            (venv / LOCK).write_text(lock)
            return write_record(folder, record)
        except BaseException:
            shutil.rmtree(venv, ignore_errors=True)
            raise


def read_wanted(requested: str) -> Wanted:
    """What a user means: a wheel, a folder that exists, else a requirement. Raises PluginError."""
    text, extras = re.fullmatch(r"(.*?)(\[[\w\s,.-]*\])?", requested.strip(), re.DOTALL).groups("")  # type: ignore[union-attr]
    path = Path(text).expanduser()
    if path.suffix == ".whl":
        if not path.is_file():
            raise PluginError(f"there is no wheel {text!r} (the full path: {path.resolve()})")
        return Wanted(normalize(path.name.partition("-")[0]), f"{path.resolve()}{extras}")
    if path.is_dir() and (os.sep in text or text in (".", "..", "~") or (path / "pyproject.toml").is_file()):
        return Wanted(_name_of_folder(path), f"{path.resolve()}{extras}", folder=True)
    if os.sep in text and "@" not in text:
        raise PluginError(f"there is no folder {text!r} (the full path: {path.resolve()})")
    try:
        name = normalize(Requirement(requested).name)
    except InvalidRequirement:
        raise PluginError(
            f"{requested!r} is not a requirement, a wheel or a folder\n"
            "type one of: PACKAGE, PACKAGE==1.2, 'PACKAGE @ https://...', ./PACKAGE-1.2-py3-none-any.whl, ./FOLDER"
        ) from None
    if (package := package_of(requested.strip())) and not is_installed(requested.strip()):
        raise PluginError(
            f"{requested} is the name of an environment; give the package that has it\n"
            f"type: rollouts env install {package}"
        )
    return Wanted(name, requested.strip())


def _name_of_folder(folder: Path) -> str:
    """The name of the package in a source folder. Raises PluginError."""
    try:
        project = tomllib.loads((folder / "pyproject.toml").read_text()).get("project", {})
    except FileNotFoundError:
        project = {}
    except (OSError, ValueError) as error:
        raise PluginError(f"{folder / 'pyproject.toml'} cannot be read: {error}") from error
    if not isinstance(name := project.get("name"), str):
        raise PluginError(
            f"the folder {folder} has no pyproject.toml with a [project] name\n"
            f"make a wheel of it (pip wheel --no-deps {folder}), and type: rollouts env install WHEEL"
        )
    return normalize(name)


def _make_venv(venv: Path, python: str) -> None:
    """Make an empty virtual environment. Raises PluginError."""
    found = shutil.which(os.path.expanduser(python))
    if uv := shutil.which("uv"):
        _installer([uv, "venv", "--quiet", "--python", found or python, str(venv)], "uv")
        return
    if found is None:
        raise PluginError(
            f"--python {python}: there is no such interpreter; give its path, such as /usr/bin/python3.12"
        )
    has_pip = importlib.util.find_spec("pip") is not None
    _installer([found, "-I", "-m", "venv", *(["--without-pip"] if has_pip else []), str(venv)], "python -m venv")


def _install_packages(venv: Path, wanted: Sequence[Wanted], index: Index) -> None:
    """Install rollouts and the packages. Raises PluginError."""
    with tempfile.TemporaryDirectory() as made:
        links, work = Path(made) / "links", Path(made) / "work"
        links.mkdir()
        work.mkdir()
        base, requirements = base_wheel(links), [each.requirement for each in wanted]
        if index.no_index:
            dependency_wheels(links)
            requirements = [_wheel_of_folder(each, work) if each.folder else each.requirement for each in wanted]
        given = [*index.arguments([links]), str(base), *requirements]
        python = str(python_of(venv))
        if uv := shutil.which("uv"):
            command, name = [uv, "pip", "install", "--python", python], "uv"
        else:
            has_pip = importlib.util.find_spec("pip") is not None
            pip = [sys.executable, "-I", "-m", "pip", "--python", python] if has_pip else [python, "-I", "-m", "pip"]
            # As with uv, a module is compiled when it is first imported: most never are.
            command, name = [*pip, "install", "--no-input", "--no-compile"], "pip"
        _installer([*command, *given], name, f"{wanted[0].name} cannot be installed")


def _wheel_of_folder(wanted: Wanted, work: Path) -> str:
    """Build a wheel by the build backend that is installed here: without an index, no other one is at hand."""
    folder = wanted.requirement.partition("[")[0]
    build = [sys.executable, "-I", "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    _installer([*build, "--wheel-dir", str(work), folder], "pip", f"{folder} cannot be built without an index")
    (wheel,) = work.glob(f"{wanted.name.replace('-', '_')}-*.whl")
    return str(wheel) + wanted.requirement[len(folder) :]


def _installer(command: list[str], name: str, failed: str = "the virtual environment cannot be made") -> None:
    """Run an installer. It ends when this process ends. Raises PluginError with its last lines."""
    # Packages that PYTHONPATH shows would count as installed.
    variables = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    lifeline, own_end = os.pipe()
    try:
        with subprocess.Popen(
            supervised(command, lifeline),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=variables,
            pass_fds=(lifeline,),
            start_new_session=True,
        ) as process:
            try:
                output, _ = process.communicate()
            except BaseException:
                process.terminate()
                raise
    finally:
        os.close(lifeline)
        os.close(own_end)
    if process.returncode:
        raise PluginError(in_lines(failed, *(f"  {line}" for line in _last_lines(output, name))))


def _last_lines(output: bytes, name: str) -> list[str]:
    """The last lines of an installer, without its remarks on itself."""
    remarks = ("WARNING: Location", "[notice]", "DEPRECATION:")
    lines = [line.rstrip() for line in output.decode(errors="replace").splitlines()]
    said = [f"{name}: {line.strip()}" for line in lines if line.strip() and not line.lstrip().startswith(remarks)]
    return said[-LAST_LINES:] or [f"{name} failed and wrote nothing"]


# --- what is installed, from its metadata -----------------------------------------------------------------------------


def _read_venv(venv: Path, wanted: Wanted, requested: str) -> tuple[Install, str]:
    """The record of a virtual environment, and its lock. Raises PluginError if the package has no environment."""
    path, python, listed = _asked(venv)
    packages = {normalize(each.metadata["Name"]): each for each in distributions(path=path)}
    own = packages[wanted.name]
    refs = [ref for ref in scan(path).components if normalize(ref.distribution) == wanted.name]
    environments = [ref.name for ref in refs if ref.kind == "environments"] + listed
    if not environments:
        others = ", ".join(sorted({ref.kind for ref in refs}))
        raise PluginError(
            in_lines(
                f"{own.metadata['Name']} {own.version} has no environment",
                f"it has components of these kinds: {others}" if others else "",
                'an environment is an entry point of the group "rollouts.environments", or a name that a hook lists',
                "if another package makes environments of it, add that one: --with PACKAGE",
            )
        )
    lock = [
        f"# rollouts env install {requested}",
        f"# Python {python}",
        *(_locked(packages[name], wanted) for name in sorted(packages)),
    ]
    contract = next((each.value for each in own.entry_points if each.group == CONTRACT_GROUP), "")
    record = Install(
        package=own.metadata["Name"],
        version=own.version,
        environments=environments,
        requested=requested,
        python=python,
        rollouts=packages[BASE].version,
        venv=venv.name,
        bytes=sum(file.lstat().st_size for file in venv.rglob("*")),
        contract=contract,
    )
    return record, "\n".join(lock) + "\n"


def _asked(venv: Path) -> tuple[list[str], str, list[str]]:
    """The folders of the packages in a virtual environment, the version of Python, and the environments that hook
    plugins list there, as `gym/CartPole-v1`. Raises PluginError.
    """
    done = subprocess.run([python_of(venv), "-I", "-c", QUESTIONS], capture_output=True, text=True, check=False)
    if done.returncode:
        raise PluginError(in_lines("the hook plugins that it has cannot list their environments", done.stderr[-1000:]))
    folders, version, listed = msgspec.json.decode(done.stdout.splitlines()[-1], type=tuple[list[str], str, list[str]])
    return list(dict.fromkeys(folders)), version, listed


def _locked(package: Distribution, wanted: Wanted) -> str:
    """The line of a package in the lock: its version, and its address if it came from no index."""
    name, origin = normalize(package.metadata["Name"]), ""
    if name == wanted.name and wanted.requirement.startswith(os.sep):
        origin = wanted.requirement
    elif name != BASE:
        with contextlib.suppress(msgspec.MsgspecError):
            origin = str(msgspec.json.decode(package.read_text("direct_url.json") or "{}").get("url", ""))
    return f"{package.metadata['Name']}=={package.version}" + (f"  # from {origin}" if origin else "")


# --- wheels -----------------------------------------------------------------------------------------------------------


BASE = "rollouts-rl"
METADATA = ("METADATA", "WHEEL", "entry_points.txt", "top_level.txt")  # what a wheel keeps of an installation


def base_wheel(folder: Path) -> Path:
    """Write the wheel of the rollouts that runs. Raises PluginError if rollouts is not installed."""
    try:
        base = distribution(BASE)
    except PackageNotFoundError:
        raise PluginError(
            "rollouts itself is not installed, so it cannot be copied into a virtual environment\n"
            "type, in its folder: pip install -e ."
        ) from None
    code = dict[str, Path]()
    for package, home in HOMES.items():
        code |= {file.relative_to(home).as_posix(): file for file in (home / package).rglob("*") if _is_code(file)}
    return _write_wheel(base, code, folder)


def dependency_wheels(folder: Path) -> None:
    """Write wheels of the packages that the base of rollouts depends on, if they are installed here."""
    waiting, seen = [BASE], set[str]()
    while waiting:
        name = normalize(waiting.pop())
        if name in seen:
            continue
        seen.add(name)
        try:
            found = distribution(name)
        except PackageNotFoundError:  # a requirement of another system, such as colorama; the resolver says what lacks
            continue
        waiting += [each.name for each in requirements_of(found.requires or ())]
        if name != BASE:
            _write_wheel(found, _recorded(found), folder)


def requirements_of(lines: Iterable[str]) -> Iterator[Requirement]:
    """What a package requires here, without its extras."""
    for line in lines:
        with contextlib.suppress(InvalidRequirement):  # pip refuses such a package, so it was put there in another way
            parsed = Requirement(line)
            if parsed.marker is None or parsed.marker.evaluate({"extra": ""}):
                yield parsed


def _recorded(package: Distribution) -> dict[str, Path]:
    """The files that its installation wrote, without metadata and scripts, which an installer writes."""
    files = {}
    for path in package.files or ():
        parts = path.parts
        if ".." not in parts and not path.is_absolute() and not parts[0].endswith(".dist-info"):
            if _is_code(file := Path(str(path.locate()))):
                files[path.as_posix()] = file
    return files


def _is_code(file: Path) -> bool:
    return file.is_file() and "__pycache__" not in file.parts and file.suffix != ".pyc"


def _write_wheel(package: Distribution, files: dict[str, Path], folder: Path) -> Path:
    name, version = normalize(package.metadata["Name"]).replace("-", "_"), package.version
    tags = re.findall(r"^Tag: *(\S+)-(\S+)-(\S+)", package.read_text("WHEEL") or "", re.MULTILINE)
    tag = "-".join(".".join(sorted(set(each))) for each in zip(*tags, strict=True)) or "py3-none-any"
    contents = {inside: file.read_bytes() for inside, file in sorted(files.items())}
    info = f"{name}-{version}.dist-info"
    for each in METADATA:
        if (text := package.read_text(each)) is not None:
            contents[f"{info}/{each}"] = text.encode()
    record = "".join(f"{inside},sha256={_digest(data)},{len(data)}\n" for inside, data in contents.items())
    contents[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    path = folder / f"{name}-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for inside, data in contents.items():
            wheel.writestr(inside, data)
    return path


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
