"""Read settings files (.toml, .json, .py), and find the line of a setting for an error message.

The line of a setting is searched in the text of the file, and only for an error.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.machinery
import json
import os
import re
import shlex
import sys
import types
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rollouts.config.flags import Flag, Tree, flag_name
from rollouts.config.importing import beside, import_returns, module_name
from rollouts.config.objects import NO_OBJECTS, Objects, take_objects
from rollouts.config.paths import Move, file_base
from rollouts.config.settings import is_secret
from rollouts.doors import open_module
from rollouts.errors import ConfigError, in_lines, said_of, suggestion, where_not_utf8, words_of

Keys = tuple[str, ...]

SUFFIXES = (".toml", ".json", ".py")
DEPTH_MAX = 50  # the depth of nested tables; settings of the core need fewer than ten
INTEGER_BITS = 1_000  # larger numbers cannot be compared with a float, or printed
_WRITE_ONE = "to write a settings file: rollouts config --env NAME > run.toml"
_SECTIONS = {"model", "deployment", "output"}  # the tables of a `rollouts.config.Config`, and of nothing else
_HUGE = re.compile(r"\d{4301}")  # Python refuses longer numbers


@dataclass(frozen=True)
class Source:
    """A settings file, for error messages, and the Python objects that the settings name. All sources are equal, so
    that comparisons of settings ignore the file.
    """

    path: str = field(default="", compare=False)
    text: str = field(default="", compare=False, repr=False)
    objects: Objects = field(default=NO_OBJECTS, compare=False, repr=False)

    def with_objects(self, objects: Objects) -> Source:
        """The same source with these objects in place of its own."""
        return replace(self, objects=objects)

    def line_of(self, path: Sequence[str]) -> int | None:
        """The first line of the setting at this path, or of the nearest table around it; None if the file has
        neither.
        """
        lines = _first_lines(self.text, Path(self.path).suffix)
        wanted = _underscored(path)
        return next((lines[wanted[:n]] for n in range(len(wanted), 0, -1) if wanted[:n] in lines), None)


NOWHERE = Source()
"""The source of settings that do not come from a file."""


def where(path: Sequence[str], value: Any, source: Source) -> str:
    """Describe where a setting was given: its flag; or file, line and key. The caller adds `: message`."""
    for inside, _, given in walk({"": value}):
        if isinstance(given, Flag):
            return flag_name((*path, *(key.partition("[")[0] for key in inside[1:])))
    key, line = ".".join(path), source.line_of(path) if source.path else None
    return f"{source.path}{f', line {line}' if line else ''}: {key}" if source.path else key


def refused(path: Sequence[str], value: Any, source: Source, *lines: str) -> ConfigError:
    """The error for a setting: where it was given, and the lines that are not empty."""
    return ConfigError(f"{where(path, value, source)}: {in_lines(*lines)}")


def unknown_key(
    path: Sequence[str], value: Any, source: Source, problem: str, known: Iterable[str], listing: str
) -> ConfigError:
    """The error for an unknown key. It suggests similar known keys, as flags if the key was a flag. `listing` is a line
    that lists the known keys.
    """
    place, flag = where(path, value, source), flag_name(path)

    def spelled(name: str) -> str:
        return flag_name((*path[:-1], name)) + place.removeprefix(flag) if place.startswith("--") else name

    return refused(path, value, source, problem, suggestion(path[-1], known, spelled), listing)


def load_file(path: str | Path, home: Path | None = None) -> tuple[Tree, Source]:
    """Read a settings file. Returns its tree of settings, and its Source for later errors. The paths in the tree begin
    at `home` (None: the working directory), see `rollouts.config.paths`.

    A `.py` file assigns a dict to `config`, or assigns the settings to names; names that begin with an underscore are
    not settings. A function or class in it gets a name: see `rollouts.config.objects`. The file may also hold a
    `rollouts.training.Config`. Raises ConfigError with file and line.
    """
    there = os.path.abspath(home or Path.cwd())  # the file's own code may change the working directory
    tree, source = _read(Path(path))
    base = file_base(source.path, there)
    if not os.path.samefile(base, there):
        tree = Move(base, there).tree(tree)
    return _with_names(tree, source)


def load_as_written(path: str | Path) -> tuple[Tree, Source]:
    """The same, with the paths as they are in the file."""
    return _with_names(*_read(Path(path)))


def _with_names(tree: Tree, source: Source) -> tuple[Tree, Source]:
    """The settings of a `.py` file with names in place of its objects."""
    if not source.path.endswith(".py"):
        return tree, source
    with said_of(source.path):
        tree, objects = take_objects(tree)
    return tree, source.with_objects(objects)


def _read(path: Path) -> tuple[Tree, Source]:
    """The settings in a file, with its objects and its paths as they are."""
    reader = {".toml": _read_toml, ".json": _read_json, ".py": _read_py}.get(path.suffix)
    if reader is None or not path.is_file():
        raise _no_such_file(path)
    try:  # editors on Windows may write a byte order mark
        source = Source(str(path), path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ConfigError(where_not_utf8(str(path), path.read_bytes().splitlines(keepends=True))) from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        tree = reader(source)
    except (RecursionError, MemoryError) as error:
        raise ConfigError(f"{path}: its values are nested too deep; expected {DEPTH_MAX} levels at most") from error
    except ValueError as error:  # a number with too many digits
        huge = _HUGE.search(source.text)
        line = source.text.count("\n", 0, huge.start()) + 1 if huge else "?"
        raise ConfigError(f"{path}, line {line}: expected a whole number of 300 digits at most: {error}") from error
    if isinstance(tree, Mapping) and _SECTIONS <= tree.keys():
        tree = open_module("rollouts_notes.sections").read_config(tree, str(path))
    if hasattr(tree, "to_settings"):
        tree = tree.to_settings()
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise ConfigError(f"{path}: expected a table of settings, got {type(tree).__name__}")
    check_tree(tree, source)
    return tree, source


def check_tree(tree: Tree, source: Source = NOWHERE) -> None:
    """Raise ConfigError if `tree` holds values that are nested too deep or contain themselves, whole numbers with more
    than INTEGER_BITS bits, or text with lone surrogates.
    """
    for path, depth, given in walk(tree):
        value = given.value if isinstance(given, Flag) else given
        problem = _problem_of(value) if depth <= DEPTH_MAX else f"nested more than {DEPTH_MAX} levels deep"
        if problem:
            shown = (*path[:3], "...") if depth > DEPTH_MAX else path
            raise ConfigError(f"{where(shown, given if isinstance(given, Flag) else None, source)}: {problem}")


def walk(tree: Tree) -> Iterator[tuple[Keys, int, Any]]:
    """The path, depth and value of every value in a tree, in order. The path of a list element ends in `name[0]`.
    Values below DEPTH_MAX are left out.
    """
    waiting: list[tuple[Keys, int, Any]] = [((), 0, tree)]
    while waiting:
        path, depth, given = waiting.pop()
        yield path, depth, given
        value = given.value if isinstance(given, Flag) else given
        inside: list[tuple[Keys, Any]] = []
        if isinstance(value, Mapping):
            inside = [((*path, str(key)), inner) for key, inner in value.items()]
        elif isinstance(value, list | tuple):
            inside = [((*path[:-1], f"{path[-1]}[{place}]"), inner) for place, inner in enumerate(value)]
        if depth <= DEPTH_MAX:
            waiting += [(at, depth + 1, inner) for at, inner in reversed(inside)]


def _problem_of(value: Any) -> str:
    if isinstance(value, int) and value.bit_length() > INTEGER_BITS:
        return f"expected a whole number of 300 digits at most; got one of {value.bit_length()} bits"
    texts = [value] if isinstance(value, str) else value if isinstance(value, dict) else ()
    for text in (text for text in texts if isinstance(text, str) and re.search("[\ud800-\udfff]", text)):
        is_bytes = re.search("[\udc80-\udcff]", text)  # what Python makes of bytes
        file = "whose bytes are not text in UTF-8; if they come from a file, type: iconv -f WINDOWS-1252 -t UTF-8 FILE"
        why = file if is_bytes else "which holds a lone surrogate and is not valid Unicode"
        return f"expected text; got {text[:80]!r}, {why}"
    return ""


def _no_such_file(path: Path) -> ConfigError:
    if path.is_dir():
        what = f"{path} is a folder; a settings file ends in {', '.join(SUFFIXES)}"
        return ConfigError(in_lines(what, *_of_folder(path)))
    if path.exists():
        return ConfigError(f"{path}: a settings file ends in {', '.join(SUFFIXES)}\n{_WRITE_ONE}")
    suffixes = SUFFIXES if path.suffix in SUFFIXES else (".toml", ".json")  # else a .py file is an environment's
    beside = (each.name for each in path.parent.glob("*") if each.name.endswith(suffixes))
    near = suggestion(path.name, beside, lambda name: str(path.parent / name))
    name, is_setting, value = str(path).partition("=")
    if is_setting:
        near = in_lines(near, f"a setting is a flag: --{name.replace('_', '-')} {value}")
    elif not near and path.suffix not in SUFFIXES:
        near = _environment_hint(str(path))
    return ConfigError(f"{path}: there is no such settings file\n{near or _WRITE_ONE}")


def _environment_hint(given: str) -> str:
    """What to type if an environment was meant: its name, if it is installed or a path; else similar names."""
    from importlib.metadata import entry_points

    names = sorted(entry_points(group="rollouts.environments").names)
    if "/" in given:
        return f"to choose an environment, type `--env {given}`; to choose a model, `--model {given}`"
    if given in names or ".py:" in given:
        return f"to choose an environment, type `--env {'' if given in names else './'}{given}`"
    if Path(f"{given}.py").is_file():
        return f"to choose an environment of the file {given}.py, type `--env ./{given}.py:NAME`"
    none = (
        f"no environment named {given} is installed; to see which are, type: rollouts plugins list --kind environments"
    )
    return suggestion(given, names, "--env {}".format) or f"{none}\n{_WRITE_ONE}"


def _of_folder(path: Path) -> Iterator[str]:
    """Advice if the given settings file is the folder of a run, a checkpoint or a model, or a folder with runs."""
    quoted = shlex.quote(str(path))
    is_run = (path / "config.toml").is_file()
    if is_run:
        yield f"to continue the run in it: rollouts resume {quoted}"
        yield f"to repeat that run: rollouts run {quoted}/config.toml"
    if is_run or any((path / name).is_file() for name in ("config.json", "adapter_config.json")):
        yield f"to begin a new run with its model: --model {quoted}"
        yield f"to evaluate its model: rollouts eval {'' if is_run else '--env NAME --model '}{quoted}"
    elif runs := runs_inside(path):
        yield f"did you mean: {', '.join(runs[:3])}?"


def runs_inside(path: Path) -> list[str]:
    """The folders of runs directly in this folder, such as those of `--seeds`, in the order of their names."""
    return sorted(str(config.parent) for config in path.glob("*/config.toml"))


def _read_toml(source: Source) -> Tree:
    import tomllib

    try:
        return tomllib.loads(source.text)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"\(at (?:line (\d+), column (\d+)|end of document)\)", str(error))
        text = re.sub(r"\s*\(at [^)]*\)$", "", str(error))
        line = found[1] if found and found[1] else str(source.text.count("\n") + 1)
        raise ConfigError(f"{source.path}, line {line}: not TOML: {text}{_quote_hint(source.text, line)}") from error


def _quote_hint(text: str, line: str) -> str:
    """A hint for the most common mistakes: text without quotes, YAML, Python's True, a Windows path."""
    given = [*text.split("\n"), ""][int(line) - 1]
    if table := re.fullmatch(r"\s*\[([\w-]+)\]\s*(?:#.*)?", given):
        above = re.search(rf'^{table[1]}\s*=\s*("[^"\n]*")', text, re.MULTILINE)
        write = "remove `{}`, and write the name in the table:\n[{}]\nname = {}"
        return "\n" + write.format(above[0], table[1], above[1]) if above else ""
    if re.search(r'=\s*"[^"]*\\', given):
        return "\na backslash needs single quotes: model = 'C:\\models\\mine'"
    found = re.fullmatch(r"\s*(?P<key>[\w.-]+)(?P<sign>:\s+|\s*=\s*)(?P<value>\S.*?)\s*", given)
    if found is None:
        return ""
    key, value = found["key"], "..." if is_secret(found["key"].rpartition(".")[2]) else found["value"]
    if found["sign"].startswith(":"):
        return f"\nTOML has an equals sign: {key} = {value}"
    if value in ("True", "False"):
        return f"\nTOML writes it in lower case: {key} = {value.lower()}"
    is_bare = re.fullmatch(r"[A-Za-z./][^\"'#]*", found["value"])
    return f'\nput text in quotes: {key} = "{value}"' if is_bare else ""


def _read_json(source: Source) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> Tree:
        for key in (key for key, count in Counter(key for key, _ in pairs).items() if count > 1):
            raise ConfigError(f"{source.path}: the key {key!r} is in one table twice")
        return dict(pairs)

    try:
        return json.loads(source.text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        if not source.text.strip():
            raise ConfigError(f"{source.path} is empty\n{_WRITE_ONE}") from error
        hint = "JSON has no comments, and no comma before a closing bracket; a .toml file may have both"
        raise ConfigError(f"{source.path}, line {error.lineno}: not JSON: {error.msg}\n{hint}") from error


def _read_py(source: Source) -> Any:
    name = module_name(Path(source.path).resolve(), source.text.encode())
    running = types.ModuleType(name)
    namespace = vars(running)
    namespace["__file__"] = os.path.abspath(source.path)  # a path that is made of it is not moved
    running.__spec__ = importlib.machinery.ModuleSpec(name, None, origin=source.path)
    try:
        module = ast.parse(source.text, source.path)
        sys.modules[name] = running  # here its functions and classes are found again
        beside(Path(source.path))
        with import_returns():
            exec(compile(module, source.path, "exec"), namespace)
    except BaseException as error:  # the file's code may raise anything, also SystemExit
        sys.modules.pop(name, None)
        if isinstance(error, KeyboardInterrupt | MemoryError):  # the parser's, for a file that is nested too deep
            raise
        if isinstance(error, SyntaxError):
            raise ConfigError(f"{source.path}, line {error.lineno}: not Python: {error.msg}") from error
        raise ConfigError(f"{source.path}: the settings file raised {words_of(error)}") from error
    if "config" in namespace:
        return namespace["config"]
    names = [name for name, _ in _assignments(module.body) if not name.startswith("_")]
    defined = [each.name for each in module.body if isinstance(each, ast.ClassDef)]
    if defined and not names:
        file = f"{'' if '/' in source.path else './'}{source.path}:{defined[-1]}"
        raise ConfigError(f"{source.path}: it holds no settings\nto run an environment from this file: --env {file}")
    return {name: namespace[name] for name in names if name in namespace}


def _assignments(body: Iterable[ast.stmt]) -> Iterator[tuple[str, ast.expr]]:
    """The names that the statements assign, with their expressions, in order."""
    for statement in body:
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        value = getattr(statement, "value", None)
        if isinstance(statement, ast.Assign | ast.AnnAssign) and value is not None:
            yield from ((target.id, value) for target in targets if isinstance(target, ast.Name))


def _underscored(path: Iterable[str]) -> Keys:
    """The path with dashes replaced by underscores, to compare aliases."""
    return tuple(key.replace("-", "_") for key in path)


@functools.lru_cache(maxsize=4)  # an evaluation asks for the place of each setting of its run
def _first_lines(text: str, suffix: str) -> dict[Keys, int]:
    """The first line of every path in a valid file. In a .py file, computed values have no line.

    The path of an array element ends in `name[0]`. A table with an alias in an array also has the path of that alias.
    """
    lines: dict[Keys, int] = {}
    for found, line in _toml_places(text) if suffix == ".toml" else _python_places(text, is_json=suffix == ".json"):
        lines.setdefault(_underscored(found), line)
    return lines


def _python_places(text: str, *, is_json: bool) -> Iterator[tuple[Keys, int]]:
    values: dict[str, ast.expr] = {}
    with warnings.catch_warnings(action="ignore"), contextlib.suppress(SyntaxError, RecursionError, MemoryError):
        # JSON is parsed as Python, which does not allow all escapes and limits the depth.
        values = dict(_assignments(ast.parse(f"config = ({text})" if is_json else text).body))
    whole = values.get("config")
    for path, value in [((), whole)] if whole else [((name,), value) for name, value in values.items()]:
        yield from _literal_places(value, path, value.lineno)


def _toml_places(text: str) -> Iterator[tuple[Keys, int]]:
    """The line of each path in a TOML text. Parses longer and longer prefixes of the text: the first valid prefix that
    has a path ends with the statement of that path.
    """
    import tomllib

    lines = text.split("\n")  # like TOML: U+2028 does not end a line
    begin = 1
    for count in range(1, len(lines) + 1):
        with contextlib.suppress(tomllib.TOMLDecodeError):
            tree = tomllib.loads("\n".join(lines[:count]))
            yield from ((path, begin) for each in (tree, _by_alias(tree)) for path, _, _ in walk(each))
            begin = count + 1


def _by_alias(value: Any, depth: int = 3) -> Any:
    """The tree with arrays of tables, such as [[env]] and [[sft.env]], changed to tables by alias."""
    if isinstance(value, list) and all(isinstance(each, dict) for each in value):
        value = {str(each.get("alias") or re.split(r"[/:]", str(each.get("name")))[-1]): each for each in value}
    is_open = isinstance(value, dict) and depth > 0
    return {key: _by_alias(inner, depth - 1) for key, inner in value.items()} if is_open else value


def _literal_places(node: ast.expr, path: Keys, line: int) -> Iterator[tuple[Keys, int]]:
    """Every path in a Python dict literal, or a JSON object, with its line."""
    yield path, line
    if isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant):
                yield from _literal_places(value, (*path, str(key.value)), key.lineno)
    elif isinstance(node, ast.List | ast.Tuple) and path:
        for number, each in enumerate(node.elts):
            yield from _literal_places(each, (*path[:-1], f"{path[-1]}[{number}]"), each.lineno)
