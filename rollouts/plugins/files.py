"""A component that is not installed: `./my_env.py:Calculator`.

The file becomes a module with a name of its own, registered in `sys.modules` so that dataclasses, type hints and
pickling work. Its folder goes to the end of `sys.path`, so that the file may import its neighbours as a script can, and
shadows nothing that is installed.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from rollouts.author_code import authors_code
from rollouts.errors import BrokenPluginError, UnknownComponentError, near_misses
from rollouts.plugins.index import KIND_WORDS, ComponentRef, cause_of

__all__ = ["find_in_file", "import_file", "load_from_file"]


def find_in_file(kind: str, name: str) -> ComponentRef:
    """The reference of `path/to/file.py:attr`; the file must exist and is not run.

    Raises UnknownComponentError: not written that way, or no such file.
    """
    word = KIND_WORDS[kind]
    path_text, colon, attribute = name.rpartition(":")
    if not colon or not path_text.endswith(".py") or not all(part.isidentifier() for part in attribute.split(".")):
        file = next((text for text in (path_text, name) if text.endswith(".py")), "./file.py")
        raise UnknownComponentError(
            f"{name!r} looks like a file, but {word} files are written path.py:Name\n"
            f"type: {file}:Name, with the name that the {word} has in that file"
        )
    path = Path(path_text).expanduser()
    if not path.is_file():
        lines = [f"{word} {name!r}: there is no file {path_text!r} (looked for {path.resolve()})"]
        beside = [file.name for file in path.parent.glob("*.py")] if path.parent.is_dir() else []
        if near := near_misses(path.name, beside):
            lines.append(f"did you mean: {', '.join(f'{path.parent / file}:{attribute}' for file in near)}?")
        elif beside:
            lines.append(f"files there: {', '.join(sorted(beside))}")
        raise UnknownComponentError("\n".join(lines))
    return ComponentRef(kind, attribute, f"{path.resolve()}:{attribute}")


def load_from_file(ref: ComponentRef) -> Any:
    """Run the file (once for each content) and take the attribute.

    Raises UnknownComponentError where the file has no such attribute, BrokenPluginError where it does not run.
    """
    path_text, _, attribute = ref.value.rpartition(":")
    path = Path(path_text)
    try:
        with authors_code():
            module = _module_of(path)
    except Exception as exc:  # a file may raise anything
        line = _line_in(path, exc)
        where = f"{path}, line {line}" if line else str(path)
        raise BrokenPluginError(
            f"{where}: the file of {KIND_WORDS[ref.kind]} {attribute!r} does not import\n{cause_of(exc, ref)}"
        ) from exc
    value: Any = module
    for part in attribute.split("."):
        if not hasattr(value, part):
            raise _missing(ref, path, attribute, value, part)
        value = getattr(value, part)
    return value


def _missing(ref: ComponentRef, path: Path, attribute: str, owner: Any, part: str) -> UnknownComponentError:
    own = [
        name
        for name, value in vars(owner).items()
        if not name.startswith("_") and callable(value) and getattr(value, "__module__", None) == _module_name(path)
    ]
    near = near_misses(part, [name for name in vars(owner) if not name.startswith("_")])
    lines = [f"{path} has no {attribute!r}, which was given as {KIND_WORDS[ref.kind]}"]
    if near:
        lines.append(f"did you mean: {', '.join(near)}?")
    lines.append(f"it defines: {', '.join(own) or 'nothing public'}")
    return UnknownComponentError("\n".join(lines))


def _module_of(path: Path) -> ModuleType:
    name = _module_name(path)
    if name in sys.modules:
        return sys.modules[name]
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.append(folder)
    return import_file(name, str(path))


def import_file(name: str, file: str) -> ModuleType:
    """The module in this file, imported as `name`; nothing of it is left where that raises. Raises ImportError where
    no module can be in such a file, and whatever the module raises.
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


def _module_name(path: Path) -> str:
    """A name for this file with this content: two files of one name do not meet, an edited file is loaded again."""
    import hashlib

    stem = re.sub(r"\W", "_", path.stem)
    digest = hashlib.sha256(str(path).encode() + b"\0" + path.read_bytes()).hexdigest()[:12]
    return f"rollouts_file_{stem}_{digest}"


def _line_in(path: Path, exc: BaseException) -> int | None:
    """The last line of the file that the error passed through."""
    if isinstance(exc, SyntaxError) and exc.filename == str(path):
        return exc.lineno
    line, trace = None, exc.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = trace.tb_lineno
        trace = trace.tb_next
    return line
