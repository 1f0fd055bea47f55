"""Settings files (.toml, .json, .py): reading them, and saying on which line a setting stands.

Lines are looked up only when there is an error to report, so that reading keeps nothing but the text.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollouts.config.flags import Flag, Tree, flag_name
from rollouts.errors import ConfigError, near_misses

__all__ = ["NOWHERE", "Source", "check_tree", "load_file", "where"]

SUFFIXES = (".toml", ".json", ".py")
DEPTH_MAX = 50  # tables within tables; none of ours is deeper than ten
INTEGER_BITS = 1_000  # of a component's setting; a number of more cannot be compared with a float, or even printed
_HUGE = re.compile(r"\d{4301}")  # Python reads no longer ones


@dataclass(frozen=True)
class Source:
    """The file that settings came from, for messages. Any two are equal: where a setting stood is not what it says."""

    path: str = field(default="", compare=False)
    text: str = field(default="", compare=False, repr=False)

    def line_of(self, path: Sequence[str]) -> int | None:
        """The line on which the setting at this path, or the nearest table around it, begins; None if there is none."""
        finder = {".toml": _toml_line, ".json": _json_line, ".py": _py_line}.get(Path(self.path).suffix)
        if finder is None:
            return None
        lines = (finder(self.text, tuple(path[:length])) for length in range(len(path), 0, -1))
        return next((line for line in lines if line is not None), None)


NOWHERE = Source()
"""No file was given."""


def where(path: Sequence[str], value: Any, source: Source) -> str:
    """Where a setting was given: its flag, or the file and line and its key; ends such that `: message` can follow."""
    flag = _flag_inside(tuple(path), value)
    if flag is not None:
        return flag
    key = ".".join(path)
    if not source.path:
        return key
    line = source.line_of(path)
    return f"{source.path}, line {line}: {key}" if line else f"{source.path}: {key}"


def _flag_inside(path: tuple[str, ...], value: Any) -> str | None:
    """The name of the first flag in a value; None where it came from a file."""
    if isinstance(value, Flag):
        return flag_name(path)
    if isinstance(value, dict):
        found = (_flag_inside((*path, key), inner) for key, inner in value.items())
        return next((flag for flag in found if flag is not None), None)
    if isinstance(value, list | tuple):
        return flag_name(path) if any(isinstance(inner, Flag) for inner in value) else None
    return None


def load_file(path: str | Path) -> tuple[Tree, Source]:
    """Read a settings file; returns its tree, and its text with which later errors find their line.

    A `.py` file defines a dict `config`, or its settings as names of the module (those that begin with an underscore
    are its own). Raises ConfigError with file and line.
    """
    path = Path(path)
    reader = {".toml": _read_toml, ".json": _read_json, ".py": _read_py}.get(path.suffix)
    if reader is None or not path.is_file():
        raise _no_such_file(path)
    try:
        source = Source(str(path), path.read_text(encoding="utf-8-sig"))  # Windows' editors write a byte order mark
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not text in UTF-8 ({error.reason} at byte {error.start})") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        tree = reader(source)
    except (RecursionError, MemoryError) as error:
        raise ConfigError(f"{path}: its values are nested too deep; expected {DEPTH_MAX} levels at most") from error
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise ConfigError(f"{path}: expected a table of settings, got {type(tree).__name__}")
    check_tree(tree, source)
    return tree, source


def check_tree(tree: Tree, source: Source = NOWHERE) -> None:
    """Raise ConfigError where `tree` holds what no settings file can hold: values that are nested too deep or contain
    themselves, whole numbers of thousands of digits, text that is no Unicode.
    """
    waiting: list[tuple[tuple[str, ...], int, Any]] = [((), 0, tree)]
    while waiting:
        path, depth, given = waiting.pop()
        value = given.value if isinstance(given, Flag) else given
        problem = _problem_of(value) if depth <= DEPTH_MAX else f"nested more than {DEPTH_MAX} levels deep"
        if problem:
            shown = (*path[:3], "...") if depth > DEPTH_MAX else path
            raise ConfigError(f"{where(shown, given if isinstance(given, Flag) else None, source)}: {problem}")
        if isinstance(value, dict):
            waiting += [((*path, str(key)), depth + 1, inner) for key, inner in value.items()]
        elif isinstance(value, list | tuple):
            *tables, name = path
            waiting += [((*tables, f"{name}[{place}]"), depth + 1, inner) for place, inner in enumerate(value)]


def _problem_of(value: Any) -> str:
    if isinstance(value, int) and value.bit_length() > INTEGER_BITS:
        return f"expected a whole number of 300 digits at most; got one of {value.bit_length()} bits"
    texts = [value] if isinstance(value, str) else list(value) if isinstance(value, dict) else []
    for text in texts:
        if isinstance(text, str) and any("\ud800" <= character <= "\udfff" for character in text):
            return f"expected text; got {text[:80]!r}, which holds half of a surrogate pair and is no Unicode"
    return ""


def _no_such_file(path: Path) -> ConfigError:
    if path.is_file():
        return ConfigError(f"{path}: a settings file ends in {', '.join(SUFFIXES)}")
    if path.is_dir():
        return ConfigError(f"{path} is a folder; a settings file ends in {', '.join(SUFFIXES)}")
    message = f"{path}: there is no such settings file"
    folder = path.parent
    if folder.is_dir():
        known = [entry.name for entry in folder.iterdir() if entry.suffix in SUFFIXES]
        near = near_misses(path.name, known)
        if near:
            return ConfigError(message + "\ndid you mean: " + ", ".join(str(folder / name) for name in near) + "?")
    if path.suffix not in SUFFIXES:
        message += f"\nto choose an environment, type `--env {path}`"
    return ConfigError(message)


def _read_toml(source: Source) -> Tree:
    import tomllib

    try:
        return tomllib.loads(source.text)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"\(at (?:line (\d+), column (\d+)|end of document)\)", str(error))
        text = re.sub(r"\s*\(at [^)]*\)$", "", str(error))
        line = found[1] if found and found[1] else str(source.text.count("\n") + 1)
        raise ConfigError(f"{source.path}, line {line}: not TOML: {text}{_quote_hint(source.text, line)}") from error
    except ValueError as error:
        raise _huge_number(source, error) from error


def _quote_hint(text: str, line: str) -> str:
    """The commonest mistake: text without quotes."""
    lines = text.splitlines()
    given = lines[int(line) - 1] if int(line) <= len(lines) else ""
    match = re.fullmatch(r"\s*([\w.-]+)\s*=\s*([A-Za-z./][^\"'#]*?)\s*", given)
    return f'\ntext stands in quotes: {match[1]} = "{match[2]}"' if match else ""


def _read_json(source: Source) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> Tree:
        keys = [key for key, _ in pairs]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise ConfigError(f"{source.path}: the key {twice!r} stands twice in one table")
        return dict(pairs)

    try:
        return json.loads(source.text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{source.path}, line {error.lineno}: not JSON: {error.msg}") from error
    except ValueError as error:
        raise _huge_number(source, error) from error


def _huge_number(source: Source, error: ValueError) -> ConfigError:
    """What the error of a reader is that could read the file but for one of its numbers."""
    found = _HUGE.search(source.text)
    line = source.text.count("\n", 0, found.start()) + 1 if found else "?"
    return ConfigError(f"{source.path}, line {line}: expected a whole number of 300 digits at most: {error}")


def _read_py(source: Source) -> Any:
    try:
        module = ast.parse(source.text, source.path)
        namespace: dict[str, Any] = {"__name__": "rollouts_settings", "__file__": source.path}
        exec(compile(module, source.path, "exec"), namespace)
    except SyntaxError as error:
        raise ConfigError(f"{source.path}, line {error.lineno}: not Python: {error.msg}") from error
    except (KeyboardInterrupt, MemoryError):  # MemoryError: the parser's, of a file that is nested too deep
        raise
    except BaseException as error:  # whatever the user's file raises is the user's to mend, also SystemExit
        import traceback

        line = _line_in_file(error, source.path)
        words = traceback.format_exception_only(error)[-1].strip()  # also of an error whose `str` raises
        raise ConfigError(f"{source.path}, line {line}: {words}") from error
    if "config" in namespace:
        return namespace["config"]
    names = [name for name, _ in _assignments(module.body) if not name.startswith("_")]
    return {name: namespace[name] for name in names if name in namespace}


def _line_in_file(error: BaseException, path: str) -> int | str:
    import traceback

    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    return lines[-1] if lines and lines[-1] else "?"


def _assignments(body: Iterable[ast.stmt]) -> list[tuple[str, ast.expr | None]]:
    """The names that statements assign, with the expression, in order."""
    found: list[tuple[str, ast.expr | None]] = []
    for statement in body:
        if isinstance(statement, ast.Assign):
            found += [(t.id, statement.value) for t in statement.targets if isinstance(t, ast.Name)]
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            found.append((statement.target.id, statement.value))
    return found


def _same(key: str, wanted: str) -> bool:
    """Aliases are compared with dashes as underscores; what stands in an array is `name[0]`."""
    return wanted in (key, key.replace("-", "_")) or (_index(wanted) is not None and key == wanted.rpartition("[")[0])


def _has_alias(table: dict[str, Any], wanted: str) -> bool:
    """Whether this entry of a list has the alias: its own, or the last part of its name."""
    return _same(str(table.get("alias") or re.split(r"[/:]", str(table.get("name")))[-1]), wanted)


def _index(wanted: str) -> int | None:
    """The position in an array that a part of a path names: 0 for `schedule[0]`; None for a plain key."""
    found = re.fullmatch(r".*\[(\d+)\]", wanted, re.DOTALL)
    return int(found[1]) if found else None


def _toml_line(text: str, path: tuple[str, ...]) -> int | None:
    """The shortest parsable prefix that holds the path ends with its statement; that begins after the one before."""
    import tomllib

    lines = text.splitlines()
    begin = 1
    for count in range(1, len(lines) + 1):
        try:
            tree = tomllib.loads("\n".join(lines[:count]))
        except tomllib.TOMLDecodeError:
            continue
        if _holds(tree, path):
            return begin
        begin = count + 1
    return None


def _holds(tree: Any, path: tuple[str, ...]) -> bool:
    for wanted in path:
        if isinstance(tree, list):  # tables with aliases, such as [[env]]
            tree = next((each for each in tree if isinstance(each, dict) and _has_alias(each, wanted)), None)
            if tree is None:
                return False
            continue
        key = next((key for key in tree if _same(key, wanted)), None) if isinstance(tree, dict) else None
        if key is None:
            return False
        tree, index = tree[key], _index(wanted)
        if index is not None:
            if not isinstance(tree, list) or len(tree) <= index:
                return False
            tree = tree[index]
    return True


def _json_line(text: str, path: tuple[str, ...]) -> int | None:
    """Walk the objects down to the path; the text is known to be valid."""
    decoder = json.JSONDecoder()
    space = re.compile(r"[\s,:]*")

    def skip(position: int) -> int:
        match = space.match(text, position)
        assert match is not None
        return match.end()

    position = skip(0)
    for depth, wanted in enumerate(path):
        if text[position] != "{":
            return None
        position = skip(position + 1)
        while text[position] != "}":
            begin = position
            key, position = decoder.raw_decode(text, position)
            position = skip(position)
            if _same(key, wanted):
                break
            position = skip(decoder.raw_decode(text, position)[1])
        else:
            return None
        index = _index(wanted)
        if index is not None:
            if text[position] != "[":
                return None
            position = skip(position + 1)
            for _ in range(index):
                if text[position] == "]":
                    return None
                position = skip(decoder.raw_decode(text, position)[1])
            if text[position] == "]":
                return None
            begin = position
        if depth == len(path) - 1:
            return text.count("\n", 0, begin) + 1
    return None


def _py_line(text: str, path: tuple[str, ...]) -> int | None:
    """Follow dict displays; what is computed has no line."""
    top = _assignments(ast.parse(text).body)
    found = next((value for name, value in reversed(top) if name == "config"), None)
    if found is None:
        found = next((value for name, value in reversed(top) if _same(name, path[0])), None)
        found, path = _element(found, path[0]), path[1:]
    line = found.lineno if found is not None else None
    for wanted in path:
        if not isinstance(found, ast.Dict):
            return None
        keys = zip(found.keys, found.values, strict=True)
        match = next(((k, v) for k, v in keys if isinstance(k, ast.Constant) and _same(str(k.value), wanted)), None)
        if match is None:
            return None
        key, value = match
        found = _element(value, wanted)
        if found is None:
            return None
        line = key.lineno if found is value else found.lineno
    return line


def _element(found: ast.expr | None, wanted: str) -> ast.expr | None:
    """The element of a list display that `wanted` names, or the expression itself where it names none."""
    index = _index(wanted)
    if index is None:
        return found
    return found.elts[index] if isinstance(found, ast.List | ast.Tuple) and index < len(found.elts) else None
