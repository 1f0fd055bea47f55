"""The Python code of the first notes, as it was written: blocks/<note>.md, one heading for each block.

    block("003/run_sft", {"tokenizer = ...": "tokenizer = load_tokenizer('tiny')"})

returns the code with the stated change. `execute` runs it, and `interface` compares its signatures with those of
`rollouts`.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from types import FunctionType
from typing import Any

import trio

_MISSING = dataclasses.MISSING
BLOCKS = Path(__file__).parent / "blocks"


def names_of_blocks() -> list[str]:
    """`000/Sample`, `000/RolloutBatch`, ..."""
    return [
        f"{path.stem}/{title}"
        for path in sorted(BLOCKS.glob("*.md"))
        for title in re.findall(r"^## (\w+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]


def block(name: str, changes: Mapping[str, str] | None = None) -> str:
    """The code of a block. Each key of `changes` must be in it; the value replaces it."""
    note, _, title = name.partition("/")
    text = (BLOCKS / f"{note}.md").read_text(encoding="utf-8")
    found = re.search(rf"^## {title}\n\n```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert found, f"there is no block {name}"
    code = found[1]
    for old, new in (changes or {}).items():
        assert old in code, f"{name} does not hold {old!r}"
        code = code.replace(old, new)
    return code


def execute(code: str, **names: Any) -> dict[str, Any]:
    """Run the code with these names defined, and return all names. An `await` outside of a function runs in trio."""
    defined: dict[str, Any] = {"__name__": "note", **names}
    compiled = compile(code, "note", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    if not compiled.co_flags & inspect.CO_COROUTINE:
        exec(compiled, defined)
        return defined
    trio.run(FunctionType(compiled, defined))
    return defined


def complete(code: str) -> str:
    """Signatures without a body get one: `def f(x) -> int` and `def f(x) -> int:` become `def f(x) -> int: ...`."""
    return re.sub(r"(?m)^( *(?:(?:async )?def .*)?\).*?-> [^:\n]*?):?$", r"\1: ...", code)


def interface(code: str, ours: Mapping[str, Any]) -> list[str]:
    """Check every function and class of the code against the object of the same name. Returns the names.

    A function has the note's parameters, in this order, with these defaults, and awaits the same. A class has the
    note's fields as parameters and as attributes of an instance, and its methods. Ours may have more, with defaults.
    """
    checked = []
    for node in ast.parse(complete(code)).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            same_parameters(node, ours[node.name], node.name)
            checked.append(node.name)
        elif isinstance(node, ast.ClassDef):
            _same_class(node, ours[node.name])
            checked.append(node.name)
    return checked


def _same_class(node: ast.ClassDef, ours: Any) -> None:
    known = {each.name: each for each in dataclasses.fields(ours)} if dataclasses.is_dataclass(ours) else {}
    wanted = {str(ast.unparse(each.target)): each for each in node.body if isinstance(each, ast.AnnAssign)}
    positions = [list(known).index(name) for name in wanted if name in known]
    assert positions == sorted(positions), f"{node.name}: {list(wanted)} against {list(known)}"
    for name, each in wanted.items():
        assert name in known or hasattr(ours, name), f"{node.name} has no {name}"
        if name in known:
            field = known[name]
            has_default = field.default is not _MISSING or field.default_factory is not _MISSING
            _same_default(each.value, field.default if has_default else None, has_default, f"{node.name}.{name}")
    for method in node.body:
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
            same_parameters(method, getattr(ours, method.name), f"{node.name}.{method.name}")


def same_parameters(node: ast.FunctionDef | ast.AsyncFunctionDef, ours: Any, label: str) -> None:
    """Ours can be called by position and by name as the note's function."""
    parameters = inspect.signature(ours).parameters
    names = [each.arg for each in node.args.args]
    assert names == list(parameters)[: len(names)], f"{label}: {names} against {list(parameters)}"
    defaults = [None] * (len(names) - len(node.args.defaults)) + node.args.defaults
    for name, default in zip(names, defaults, strict=True):
        assert parameters[name].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD, f"{label}: {name}"
        found = parameters[name].default
        _same_default(default, found, found is not inspect.Parameter.empty, f"{label}({name})")
    for name, parameter in list(parameters.items())[len(names) :]:
        starred = parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        assert starred or parameter.default is not inspect.Parameter.empty, f"{label} needs {name}, too"
    if node.args.kwarg is not None:
        assert any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()), label
    if isinstance(node, ast.AsyncFunctionDef):
        returns = str(inspect.signature(ours).return_annotation)
        assert inspect.iscoroutinefunction(ours) or "Coroutine" in returns or "Awaitable" in returns, label


def _same_default(value: ast.expr | None, found: Any, has_default: bool, label: str) -> None:
    if value is None:
        return  # required in the note; ours may have a default
    assert has_default, f"{label} has no default"
    try:
        wanted = ast.literal_eval(value)
    except ValueError:  # field(default_factory=list), Status.PENDING
        return
    assert found == wanted, f"{label}: {found!r} against {wanted!r}"
