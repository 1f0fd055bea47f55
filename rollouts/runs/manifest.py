"""Versions, hardware and files of a run, to explain differences between runs: manifest.json, and in code/ a copy of
each file with a component, and of the source of each object that Python code gave. Not copied: modules that such a file
imports, and settings files, because they may have secrets.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.metadata
import inspect
import os
import platform
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rollouts.author_code import CORE, unwrapped
from rollouts.config.files import NOWHERE, Source
from rollouts.config.names import HELD, names_module
from rollouts.config.objects import label_of
from rollouts.config.secrets import command_without_secrets
from rollouts.errors import OutputError, UnknownComponentError
from rollouts.models import revisions
from rollouts.plugins.index import ComponentRef
from rollouts.runs.folder import CONFIG, PHASES, RunFolder, read_json
from rollouts.version import __version__

MANIFEST = "manifest.json"
CODE = "code"
REVISIONS = "revisions"
CODE_BYTES_MAX = 1_000_000  # a larger file is not copied; the manifest has its hash

LIBRARIES = ("torch", "transformers", "peft", "safetensors", "tokenizers", "trio", "msgspec", "pluggy", "numpy")


class CodeFile(NamedTuple):
    """A file with components, with its content when the run was composed. `is_copied`: the run keeps a copy.

    The file of an object in memory holds the source of this object alone; that of prompts from Python, their rows.
    """

    path: Path
    data: bytes
    is_copied: bool

    @property
    def sha256(self) -> str:
        """The hash of the content, in hexadecimal."""
        return hashlib.sha256(self.data).hexdigest()

    @property
    def copy(self) -> str | None:
        """The path of the copy in the run's folder; None if there is none."""
        return f"{CODE}/{self.path.stem}_{self.sha256[:8]}{self.path.suffix}" if self.is_copied else None


def code_files(components: Iterable[ComponentRef], source: Source = NOWHERE) -> list[CodeFile]:
    """The files that these components came from, each once; and the objects in memory. `source` is that of the run's
    settings.

    A file is copied unless it is too large, or is the settings file too; nor is one that the run whose config.toml is
    the settings file did not copy. Raises OutputError if a file cannot be read any more.
    """
    values = dict.fromkeys(ref.value for ref in components if ref.value and not ref.distribution)
    paths = dict.fromkeys(file for value in values if (file := _file_of(value)))
    left_out = {os.path.realpath(source.path)}
    if Path(source.path).name == CONFIG:  # a run's, or that of both phases; a folder may have been moved since
        run = Path(source.path).parent
        before = [read_json(each) for each in (run / MANIFEST, *run.glob(f"*/{MANIFEST}"))]
        left_out |= {Path(file["path"]).name for each in before for file in each.get("files", []) if not file["copy"]}
    try:
        found = [(Path(path), Path(path).read_bytes()) for path in paths]
    except OSError as error:
        raise OutputError(f"{error.filename} cannot be read: {error.strerror or error}") from error
    files = [
        CodeFile(path, data, len(data) <= CODE_BYTES_MAX and not {path.name, os.path.realpath(path)} & left_out)
        for path, data in found
    ]
    objects = source.objects
    held = {value[1:-1]: objects.components[value] for value in values if value in objects.components}
    held |= {f"on_step_{label_of(each)}": each for each in objects.on_step}
    texts = {label: text for label, each in held.items() if (text := source_of(each)) is not None}
    files += [CodeFile(Path(f"{label}.py"), text.encode(), True) for label, text in texts.items()]
    return [*files, *(CodeFile(Path("prompts.jsonl"), rows, True) for rows in objects.rows.values())]


def _file_of(value: str) -> str:
    """The file of a component without a distribution; empty for one in memory, and for one of rollouts itself."""
    if not names_module(value):
        return "" if HELD.fullmatch(value) else value.rpartition(":")[0]
    file = str(getattr(sys.modules.get(value.partition(":")[0]), "__file__", None) or "")
    return "" if file.startswith(CORE) else file


def source_of(value: Any) -> str | None:
    """The source of an object; None if it cannot be read. For a lambda, only the lambda itself: its line may hold
    other arguments of a call, and secrets among them.
    """
    inner = unwrapped(value)
    if not hasattr(inner, "__qualname__"):
        inner = type(inner)
    try:
        text = textwrap.dedent(inspect.getsource(inner))
        if getattr(inner, "__name__", "") != "<lambda>":
            return text
        (found,) = [each for each in ast.walk(ast.parse(text)) if isinstance(each, ast.Lambda)]
    except (OSError, TypeError, SyntaxError, ValueError):  # typed at a prompt, compiled, or several lambdas in a line
        return None
    return ast.get_source_segment(text, found)


def keep_code(folder: RunFolder, files: Iterable[CodeFile]) -> None:
    """Copy the files into the run's folder. An existing copy stays."""
    for file in files:
        if file.copy is not None and not (folder.path / file.copy).exists():
            folder.write_bytes(file.copy, file.data)


def is_older(run: Path) -> bool:
    """Whether an earlier version of rollouts began the run in this folder. It held out all of `--eval-tasks`, even if a
    short list of tasks ignores the split. Its manifest has no `files`.
    """
    manifest = read_json(run / MANIFEST)
    return bool(manifest) and "files" not in manifest


def changed_code(run: Path, files: Iterable[CodeFile], shown: Path | None = None) -> list[str]:
    """A note for each file that has changed since the run in this folder last began or was resumed. `shown` is the
    folder's path for messages; None: as the user would type it.
    """
    is_below = shown is None and run.is_relative_to(Path.cwd())
    place = run.relative_to(Path.cwd()) if is_below else shown or run
    manifest = read_json(run / MANIFEST)
    before = [file for each in (manifest, *manifest.get("resumed", [])) for file in each.get("files", [])]
    # If the folder was moved, files are found by their names.
    known = {Path(file["path"]).name: file for file in before} | {file["path"]: file for file in before}
    pairs = [(file, known.get(str(file.path)) or known.get(file.path.name)) for file in files]
    return [
        f"{file.path.name} has changed since the run in {place} used it; it is used as it is now"
        + (f" (the copy from then: {place / old['copy']})" if old["copy"] else "")
        for file, old in pairs
        if old is not None and old["sha256"] != file.sha256
    ]


@contextlib.contextmanager
def naming_copies(run: str | Path | None) -> Iterator[None]:
    """If a file of a component is not found, add to the error's message the copies that the run in this folder has."""
    try:
        yield
    except UnknownComponentError as error:
        if run is None or isinstance(error.__cause__, UnknownComponentError):
            raise
        folder, (file, _, attribute) = Path(os.path.relpath(run)), error.missing.rpartition(":")
        copies = sorted((folder / CODE).glob("*.py"))
        if not copies:
            raise
        lines = [str(error), f"the run's copies of its files: {', '.join(map(str, copies))}"]
        lines += [
            f"type the copy in place of {error.missing}: {folder / each['copy']}:{attribute}"
            for each in read_json(folder / MANIFEST).get("files", [])
            if file and each["copy"] and Path(each["path"]).name == Path(file).name
        ]
        raise UnknownComponentError("\n".join(lines)) from error


def known_revisions(folder: Path | None, source: Source) -> dict[str, str]:
    """The commits of the hub that the run in this folder uses, with both of its phases; without a folder, those of the
    run whose config.toml is the settings file. For other names, those that the environment gives.
    """
    run = folder or (Path(source.path).parent if Path(source.path).name == CONFIG else None)
    found = revisions.given()
    for each in (run, *(run / phase for phase in PHASES)) if run is not None else ():
        known = read_json(each / MANIFEST).get(REVISIONS)
        found |= known if isinstance(known, dict) else {}
    return found


def make_manifest(
    seed: int, components: Sequence[ComponentRef], files: Sequence[CodeFile] = (), folder: RunFolder | None = None
) -> dict[str, Any]:
    """The versions of all distributions with components, the files of components, the seed, the hardware, the command
    that was typed, the directory where it was typed, the run's folder, and the commits of what was loaded from a hub so
    far.
    """
    return {
        "rollouts": __version__,
        "seed": seed,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": command_without_secrets(sys.argv),
        "directory": str(folder.home if folder else Path.cwd()),
        "folder": os.path.realpath(folder.path) if folder else None,
        "python": platform.python_version(),
        "components": [
            {"kind": ref.kind, "name": ref.name, "distribution": ref.distribution, "version": ref.version}
            for ref in components
        ],
        "files": [{"path": str(file.path), "sha256": file.sha256, "copy": file.copy} for file in files],
        "distributions": {name: version for name in LIBRARIES if (version := _version(name))},
        "hardware": _hardware(),
        REVISIONS: revisions.used(),
    }


def resumed_manifest(
    before: dict[str, Any], now: Mapping[str, Any], step: int, checkpoint: str | None
) -> dict[str, Any]:
    """The run's manifest with an entry for a resume: the time, the step, the checkpoint (None: the run starts again),
    the command and the versions `now`.
    """
    again = {"when": now["started"], "step": step, "checkpoint": checkpoint} | {
        name: now[name]
        for name in ("command", "rollouts", "python", "components", "files", "distributions", "hardware")
    }
    return {**with_revisions(before or dict(now)), "resumed": [*before.get("resumed", []), again]}


def with_revisions(before: dict[str, Any]) -> dict[str, Any]:
    """The run's manifest with the commits of what was loaded from a hub since it was written."""
    return before | {REVISIONS: before.get(REVISIONS, {}) | revisions.used()}


def update_manifest(folder: RunFolder, change: Callable[[dict[str, Any]], dict[str, Any]]) -> list[str]:
    """Apply `change` to the run's manifest and write it. If the manifest cannot be read, it stays unchanged, and the
    returned note says so.
    """
    found = read_json(folder.path / MANIFEST)
    if not found and os.path.lexists(folder.path / MANIFEST):
        return [
            f"warning: {folder.shown / MANIFEST} cannot be read. It is left as it is, and does not say which "
            "checkpoint is the last one; mend the file, or move it away"
        ]
    folder.write_json(MANIFEST, change(found))
    return []


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _hardware() -> dict[str, Any]:
    """Describe the hardware. Does not import torch, which an evaluation with a server does not need."""
    here = {"system": platform.platform(), "machine": platform.machine(), "cpus": os.cpu_count()}
    torch = sys.modules.get("torch")
    if torch is None:
        return here
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return here | {"torch_threads": torch.get_num_threads(), "gpus": gpus}
