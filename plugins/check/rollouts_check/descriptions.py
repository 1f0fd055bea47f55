"""Read the one-line description of a component from the source of its module, without importing it.

The description is the first sentence of the component's docstring. For a value, such as an `Algorithm`, it is the first
sentence of the string after its assignment. If the module imports the name from another module, that module is read.
A hook plugin gives the descriptions of its components itself. There is no description for packages without source
files, and for names from a module's `__getattr__`.
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import NamedTuple

from rollouts.plugins.index import ComponentRef

_HOPS_MAX = 5  # how many modules are searched for an imported name
_DEFINES = "__getattr__|globals|locals|vars|setattr|exec|modules"  # code with one of these may define any name


class Definition(NamedTuple):
    """The definition of a name: its file, its line (from 1), and its docstring (empty if there is none)."""

    file: Path
    line: int
    doc: str


def description(ref: ComponentRef) -> str:
    """The first sentence of what a hook plugin says about the component, or else of its docstring, in one line; empty
    if there is none.
    """
    place = None if ref.about else find_definition(ref)
    return first_sentence(place.doc if place else ref.about)


def known_faults(refs: Sequence[ComponentRef]) -> list[str]:
    """For each component, why its import will fail, as far as the source of its module shows it; "" if that shows
    nothing. No source is run, so an import may fail for other reasons.
    """
    _read_imports.cache_clear()  # what is installed may have changed
    return [_fault_of(*_module_and_name(ref)) if ref.distribution and ref.value else "" for ref in refs]


def _fault_of(module: str, attribute: str) -> str:
    parts, runs_code = module.split("."), False
    for name in (".".join(parts[: count + 1]) for count in range(len(parts))):
        if _spec_of(name) is None:
            return "" if runs_code else f"there is no module {name}"
        file = _source_of(name)
        text = _read(file) if file else ""
        fault, absent, changes = _read_imports(text, parts[0])
        if fault or (absent and not runs_code):
            return f"{file}, {fault or absent}"
        runs_code = runs_code or changes
    known = attribute.partition(".")[0]
    is_certain = text and known and not re.search(rf"\b({re.escape(known)}|{_DEFINES})\b|import \*", text)
    return f"{module} has no {known}" if is_certain else ""


@functools.lru_cache(maxsize=64)
def _parsed(text: str) -> tuple[list[ast.stmt], str]:
    """The statements of a module, and its mistake of syntax."""
    try:
        return ast.parse(text).body, ""
    except (SyntaxError, ValueError) as error:
        return [], f"line {getattr(error, 'lineno', None) or '?'}: {getattr(error, 'msg', error)}"


@functools.cache
def _read_imports(text: str, package: str) -> tuple[str, str, bool]:
    """A mistake of syntax of a module in the package, the first import of a missing module, and whether the module runs
    code that may change where modules are found. Imports after such code are not judged.
    """
    body, mistake = _parsed(text)
    if mistake:
        return mistake, "", True
    for node in body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module if node.module and not node.level else package]
        if not names and not _is_constant(node):
            return "", "", True
        for name in names:
            top = name.partition(".")[0]
            if top == package:
                return "", "", True
            if top not in sys.modules and _spec_of(top) is None:
                return "", f"line {node.lineno}: there is no module {name}", False
    return "", "", False


def _is_constant(node: ast.stmt) -> bool:
    """Whether a statement is a docstring, or gives names constants."""
    return isinstance(node, ast.Expr | ast.Assign) and all(
        isinstance(each, ast.Constant | ast.List | ast.Tuple | ast.Load) for each in ast.walk(node.value)
    )


def first_sentence(text: str) -> str:
    """The first sentence of a docstring's first paragraph, in one line, without its full stop.

    >>> first_sentence("The policy gradient (Williams et al. 1992). It has\\n    no clip.")
    'The policy gradient (Williams et al. 1992)'
    """
    paragraph = " ".join(text.strip().partition("\n\n")[0].split())
    for found in re.finditer(r"\. (?=[A-Z`*(])", paragraph):
        before = paragraph[: found.start()]
        if before.count("(") == before.count(")"):  # inside parentheses, the dot may end an abbreviation: (Dr. GRPO)
            return before
    return paragraph.removesuffix(".")


def find_definition(ref: ComponentRef) -> Definition | None:
    """Find the definition of a component; None if it cannot be found without an import."""
    module, name = _module_and_name(ref)
    file = Path(module) if module.endswith(".py") else _source_of(module) if module else None
    for _ in range(_HOPS_MAX):
        if file is None or not name.isidentifier() or name not in (text := _read(file)):
            return None
        body, _ = _parsed(text)
        for node, following in itertools.zip_longest(body, body[1:]):
            if name in _names_of(node):
                return Definition(file, node.lineno, _doc_of(node, following))
        module, name = _imported(body, name, module, is_package=file.name == "__init__.py")
        file = _source_of(module) if module else None
    return None


def _names_of(node: ast.stmt) -> list[str]:
    """The names that a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _doc_of(node: ast.stmt, following: ast.stmt | None) -> str:
    """The docstring of a definition; of a value, the string after it."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return ast.get_docstring(node) or ""
    text = (
        following.value.value if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant) else ""
    )
    return text if isinstance(text, str) else ""


def _module_and_name(ref: ComponentRef) -> tuple[str, str]:
    """The module, or the file, of a component, and the name of its attribute."""
    module, _, name = ref.value.partition("[")[0].rpartition(":")
    return module.strip(), name.strip()


def _source_of(module: str) -> Path | None:
    """The source file of a module."""
    spec = _spec_of(module)
    return Path(spec.origin) if spec and spec.origin and spec.origin.endswith(".py") else None


def _spec_of(module: str) -> ModuleSpec | None:
    """Where a module is; None if there is none. Its parent packages are not imported."""
    path: Sequence[str] | None = None
    spec = None
    whole = ""
    for part in module.split("."):
        whole = f"{whole}.{part}" if whole else part
        finders = (finder for finder in sys.meta_path if hasattr(finder, "find_spec"))
        try:
            spec = next((found for finder in finders if (found := finder.find_spec(whole, path))), None)
        except (ImportError, ValueError, OSError):  # a finder of another package may raise
            return None
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or ())
    return spec


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError):
        return ""


def _imported(body: Sequence[ast.stmt], name: str, module: str, *, is_package: bool) -> tuple[str, str]:
    """The module that a name is imported from, and its name there; both empty if the name is not imported."""
    parents = module.split(".")
    for node in (node for node in body if isinstance(node, ast.ImportFrom)):
        for alias in (alias for alias in node.names if (alias.asname or alias.name) == name):
            above = parents[: len(parents) - node.level + is_package] if node.level else []
            return ".".join([*above, *([node.module] if node.module else [])]), alias.name
    return "", ""
