"""Render the files of a new package that publishes one component, and write them into a folder.

Not here: the command (`rollouts_check.command`).
"""

from __future__ import annotations

import ast
import datetime
import json
import keyword
import re
from pathlib import Path
from string import Template
from typing import NamedTuple

from rollouts.config.settings import COMPONENT_KINDS
from rollouts.errors import OutputError, UserError, in_lines, suggestion
from rollouts.plugins.index import HOOKS, KIND_WORDS, installed_components, is_installed

TEMPLATES = Path(__file__).parent / "templates"

KIND_NAMES = {
    {"env": "environment", "data": "dataset"}.get(key, key): kind
    for key, kind in COMPONENT_KINDS.items()
    if key != "eval_inference"
} | {
    "curriculum": "curricula",
    "worker": "workers",
    "command": "commands",
    "hooks": HOOKS,
}
"""The word of each kind that a package can publish, and the kind. Most words are those of the flags."""

_RUN = "rollouts run --env calculator"
_TRY = {
    "environments": "rollouts run --env {name} --mode sft+rl --sft.steps 20 --steps 40",
    "rewards": f"{_RUN} --reward env:1 --reward {{name}}:0.1",
    "references": f"{_RUN} --kl rk3_loss --reference {{name}}",
    "mixers": f"{_RUN} --reward env:1 --reward constant --mix {{name}}",
    "selectors": f"{_RUN} --loss rft --select {{name}}",
    "pairings": f"{_RUN} --loss dpo --pairs {{name}}",
    "inference": "rollouts eval --env calculator --inference {name} --model any",
    "tool_parsers": "rollouts plugins show {name}",
    "sandboxes": "rollouts plugins show {name}",
    "workers": f"{_RUN} --worker {{name}}",
    "loggers": f"{_RUN} --logger jsonl --logger {{name}}",
    "datasets": "rollouts sft --data {name} --steps 20",
    "curricula": f"{_RUN.replace('calculator', 'easy=calculator')} --env hard=calculator --env.hard.weight {{name}}",
    "commands": "rollouts {name} runs/first",
    HOOKS: _RUN,
}
"""The command that uses a component of each kind. For the other kinds, it is `--flag NAME`."""

NAME_CHARACTERS_MAX = 40
_EXAMPLE = "a_name_that_no_template_has"
_SHARED = {
    "pyproject.toml": "pyproject.toml.txt",
    "README.md": "README.md.txt",
    "NEXT.md": "NEXT.md.txt",
    "LICENSE": "LICENSE.txt",
    ".gitignore": "gitignore.txt",
    ".github/workflows/test.yml": "test.yml.txt",
}


class NewPackage(NamedTuple):
    """A rendered package: its files by path, below the folder `name`, and the command that uses its component."""

    kind: str
    name: str
    files: dict[str, str]
    command: str

    @property
    def distribution(self) -> str:
        """The name to install."""
        return _distribution(self.name)


def kind_of(word: str) -> str:
    """The kind that a word names: `environment`, `env`, `reward`, `rewards`, `mixer`, ... Raises UserError."""
    given = word.lower().replace("-", "_")
    kinds = {kind: kind for kind in KIND_NAMES.values()} | COMPONENT_KINDS | {"hook": HOOKS}
    singular = {word.replace(" ", "_"): kind for kind, word in KIND_WORDS.items() if kind in kinds}
    if kind := (kinds | singular | KIND_NAMES).get(given):
        return kind
    known = ", ".join(KIND_NAMES)
    raise UserError(in_lines(f"there is no kind {word!r}", suggestion(given, singular | KIND_NAMES), f"kinds: {known}"))


def render_package(kind: str, name: str, author: str = "") -> NewPackage:
    """The files of a package with a component of this kind and name.

    `author` is the holder of the license; empty: the authors of the package. Raises UserError for a name that cannot be
    used.
    """
    _check_name(name)
    module, test = (_text(kind, file) for file in ("module.py.txt", "test.py.txt"))
    _check_use(name, (module, test))
    is_torch = re.search(r"^(import|from) torch\b", module + test, re.MULTILINE) is not None
    package, distribution, class_name = f"rollouts_{name}", _distribution(name), _class_name(name)
    author = author or f"the authors of {distribution}"
    flag = next((key for key, each in COMPONENT_KINDS.items() if each == kind), "").replace("_", "-")
    command = _TRY.get(kind, f"{_RUN} --{flag} {{name}}").format(name=name)
    values = {
        "name": name,
        "Name": class_name,
        "package": package,
        "distribution": distribution,
        "target": package if kind == HOOKS else f"{package}:{class_name if '$Name' in module else name}",
        "group": "rollouts" if kind == HOOKS else f"rollouts.{kind}",
        "requirement": "rollouts-rl[train]" if is_torch else "rollouts-rl",
        "author": author,
        "author_toml": json.dumps(author, ensure_ascii=False),
        "year": str(datetime.date.today().year),
        "run": command,
        "description": example_description(kind),
        "about": f"{example_description(kind)}.",
    }
    values["next"] = _fill(_text(kind, "next.md.txt"), values).rstrip()
    files = {path: _fill(_text("shared", file), values) for path, file in _SHARED.items()}
    files[f"{package}/__init__.py"] = _fill(module, values)
    files[f"tests/test_{name}.py"] = _fill(test, values)
    return NewPackage(kind, name, files, command)


def example_description(kind: str) -> str:
    """What the example of this kind is, in one line: the description of every new package of the kind."""
    first = _text(kind, "module.py.txt").partition("\n")[0]
    return first.strip('"').rstrip(".")


def write_package(package: NewPackage, folder: Path) -> None:
    """Write the files into a folder that does not exist. Raises OutputError."""
    if folder.exists() or folder.is_symlink():
        raise OutputError(f"{folder} exists already, and nothing is overwritten\ntype another name, or --dest FOLDER")
    try:
        for path, text in package.files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{folder} cannot be written: {error.strerror or error}") from error


def namesakes(kind: str, name: str) -> list[str]:
    """Notes about installed packages with these names."""
    own = _distribution(name)
    if is_installed(own):
        return [f"{own} is installed already; `pip install` of this folder replaces it"]
    others = [ref for ref in installed_components(kind) if ref.name == name] if kind != HOOKS else []
    typed = f"type {own}/{name} instead of {name}"
    return [f"{ref.qualified} is installed and has the same name; with both, {typed}" for ref in others]


def _check_name(name: str) -> None:
    """Raise UserError for a name that is no lowercase identifier, or that belongs to the core."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name) or len(name) > NAME_CHARACTERS_MAX:
        words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.removeprefix("rollouts-").removeprefix("rollouts_"))
        better = re.sub(r"[^a-z0-9]+", "_", words.lower()).strip("_")[:NAME_CHARACTERS_MAX].rstrip("_")
        better = f"my_{better}" if better[:1].isdigit() or keyword.iskeyword(better) else better
        raise UserError(
            f"{name!r} cannot be the name of a module\n"
            f"expected: a lowercase letter, then letters, digits and _; at most {NAME_CHARACTERS_MAX} characters\n"
            f"type: {better or 'my_name'}"
        )
    if name.startswith("rollouts_") or name in ("rl", "test") or name.startswith("test_") or name.endswith("_"):
        better = name.removeprefix("rollouts_").removeprefix("test_").strip("_")
        hint = f"my_{better}" if better in ("rl", "test", "") else better
        raise UserError(
            f"{name!r} cannot be used: the package would be {_distribution(name)}, with the module rollouts_{name}\n"
            f"type: {hint}"
        )


def _check_use(name: str, templates: tuple[str, ...]) -> None:
    """Raise UserError if the code of the package uses this name for something else."""
    values = {"name": _EXAMPLE, "Name": _class_name(_EXAMPLE), "package": "rollouts", "distribution": "", "kind": ""}
    nodes = [node for text in templates for node in ast.walk(ast.parse(_fill(text, values)))]
    used = {getattr(node, field, None) for node in nodes for field in ("id", "arg", "attr")}
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    used |= {alias.asname or alias.name for node in imports for alias in node.names}
    for taken in (name, _class_name(name)):
        if taken in used:
            raise UserError(f"the code of the package uses the name {taken} already\ntype: my_{name}")


def _text(folder: str, file: str) -> str:
    return (TEMPLATES / folder / file).read_text(encoding="utf-8")


def _fill(text: str, values: dict[str, str]) -> str:
    return Template(text).substitute(values)


def _class_name(name: str) -> str:
    return "".join(word[:1].upper() + word[1:] for word in name.split("_"))


def _distribution(name: str) -> str:
    return f"rollouts-{name.replace('_', '-')}"
