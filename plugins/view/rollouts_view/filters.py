"""Expressions that choose rows of a table: `reward < 0.5 and "Error" in error`.

An expression has the syntax of Python, and only comparisons, arithmetic, `and`, `or`, `not`, `in`, `abs` and `lower`.
It is checked, with the type of each part, before anything is computed. So it can neither call nor read anything else.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from rollouts.errors import ConfigError, suggestion

LENGTH_MAX = 500
DEPTH_MAX = 30
Kind = Literal["number", "text", "truth"]
_COMPARE = {ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}
_COMPUTE = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
_A = {"number": "a number", "text": "text", "truth": "true or false", "none": "None", "list": "a list"}


class Column(NamedTuple):
    """A column: its kind, and one value for each row. A missing number is NaN, and missing text is empty."""

    kind: Kind
    values: Sequence[Any]


def choose(text: str, columns: Mapping[str, Column], count: int) -> Sequence[int]:
    """The rows, of the first `count`, for which the expression is true. An empty one keeps all.

    Every comparison with a missing number is false, except `!=` and `== None`. Raises ConfigError.

    >>> columns = {"reward": Column("number", [0.0, 1.0, float("nan")]), "task": Column("text", ["a", "b", "b"])}
    >>> choose("reward > 0.5", columns, 3), choose("'b' in task and reward == None", columns, 3)
    ([1], [2])
    """
    if not text.strip():
        return range(count)
    try:
        if len(text) > LENGTH_MAX:
            raise ConfigError(f"it has {len(text)} characters, and {LENGTH_MAX} are the most")
        parsed = ast.parse(text.strip(), mode="eval").body
        compiler = _Compiler({name: column.kind for name, column in columns.items()})
        kind, source = compiler.read(parsed)
        if kind != "truth":
            raise ConfigError(f"it is {_A[kind]}, and must be true or false, such as: reward > 0.5")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        why = error.msg if isinstance(error, SyntaxError) else str(error)
        raise ConfigError(f"{_short(text)} is no expression: {why}; type one such as: reward > 0.5") from error
    except ConfigError as error:
        raise ConfigError(f"{_short(text)}: {error}") from error
    return _rows(source, [columns[name].values for name in compiler.used], compiler.constants, count, text)


def _rows(source: str, used: Sequence[Sequence[Any]], constants: Sequence[Any], count: int, text: str) -> list[int]:
    """Run the checked expression over the rows."""
    names = "".join(f"v{index}, " for index in range(len(used)))
    code = f"lambda rows, values, k: [i for i, ({names}) in zip(rows, values) if {source}]"
    if not used:
        code = f"lambda rows, values, k: [i for i in rows if {source}]"
    chosen: Callable[..., list[int]] = eval(code, {"__builtins__": {}, "zip": zip, "abs": abs, "lower": str.lower})
    try:
        return chosen(range(count), zip(*used, strict=False), constants)
    except (ZeroDivisionError, OverflowError) as error:
        raise ConfigError(f"{_short(text)}: {error}; leave such rows out first: tokens > 0 and ...") from error


class _Compiler:
    """Checks an expression and writes it anew. `used` are the columns that it names, `constants` its values."""

    def __init__(self, kinds: Mapping[str, Kind]) -> None:
        self._kinds = kinds
        self.used: list[str] = []
        self.constants: list[Any] = []

    def read(self, node: ast.expr, depth: int = 0) -> tuple[str, str]:
        """The kind of a part, and its source."""
        if depth > DEPTH_MAX:
            raise ConfigError(f"it is nested deeper than {DEPTH_MAX}")
        depth += 1
        match node:
            case ast.Constant():
                return self._constant(node.value)
            case ast.Name() | ast.Attribute() | ast.Subscript():
                return self._column(node)
            case ast.BoolOp():
                parts = [self._of(each, "truth", depth) for each in node.values]
                return "truth", "(" + (" and " if isinstance(node.op, ast.And) else " or ").join(parts) + ")"
            case ast.UnaryOp(op=ast.Not()):
                return "truth", f"(not {self._of(node.operand, 'truth', depth)})"
            case ast.UnaryOp(op=ast.USub()):
                return "number", f"(-{self._of(node.operand, 'number', depth)})"
            case ast.BinOp() if type(node.op) in _COMPUTE:
                left, right = self._of(node.left, "number", depth), self._of(node.right, "number", depth)
                return "number", f"({left} {_COMPUTE[type(node.op)]} {right})"
            case ast.Compare():
                return "truth", self._comparisons(node, depth)
            case ast.Call(func=ast.Name(id="abs"), args=[value], keywords=[]):
                return "number", f"abs({self._of(value, 'number', depth)})"
            case ast.Call(func=ast.Name(id="lower"), args=[value], keywords=[]):
                return "text", f"lower({self._of(value, 'text', depth)})"
        known = "comparisons, arithmetic, and, or, not, in, abs, lower"
        raise ConfigError(f"`{_short(ast.unparse(node))}` cannot be used; use {known}")

    def _of(self, node: ast.expr, wanted: str, depth: int) -> str:
        kind, source = self.read(node, depth)
        if kind != wanted:
            raise ConfigError(f"`{_short(ast.unparse(node))}` is {_A[kind]}, and must be {_A[wanted]}")
        return source

    def _constant(self, value: Any) -> tuple[str, str]:
        kinds = {bool: "truth", int: "number", float: "number", str: "text", type(None): "none"}
        kind = kinds.get(type(value))
        if kind is None:
            raise ConfigError(f"`{_short(repr(value))}` is neither a number nor text")
        self.constants.append(float(value) if kind == "number" else value)
        return kind, f"k[{len(self.constants) - 1}]"

    def _column(self, node: ast.expr) -> tuple[str, str]:
        name = ast.unparse(node)
        match node:  # part["exact match"]
            case ast.Subscript(value=ast.Name(id=of), slice=ast.Constant(value=str(key))):
                name = f"{of}.{key}"
        if name not in self._kinds:
            hint = suggestion(name, self._kinds) or f"columns: {', '.join(self._kinds)}"
            raise ConfigError(f"there is no column {_short(name)}; {hint}")
        if name not in self.used:
            self.used.append(name)
        return self._kinds[name], f"v{self.used.index(name)}"

    def _comparisons(self, node: ast.Compare, depth: int) -> str:
        sides = [node.left, *node.comparators]
        found = [self._compare(*each, depth) for each in zip(sides, node.ops, sides[1:], strict=False)]
        return "(" + " and ".join(found) + ")"

    def _compare(self, left: ast.expr, operator: ast.cmpop, right: ast.expr, depth: int) -> str:
        if isinstance(operator, ast.In | ast.NotIn):
            return self._contains(left, isinstance(operator, ast.NotIn), right, depth)
        (of_left, first), (of_right, second) = self.read(left, depth), self.read(right, depth)
        if "none" in (of_left, of_right):
            kind, value = (of_left, first) if of_right == "none" else (of_right, second)
            missing = {"number": f"({value} != {value})", "text": f"({value} == '')"}.get(kind)
            if missing is None or not isinstance(operator, ast.Eq | ast.NotEq | ast.Is | ast.IsNot):
                raise ConfigError("None is compared with == or !=, and with a column of numbers or text")
            return missing if isinstance(operator, ast.Eq | ast.Is) else f"(not {missing})"
        if type(operator) not in _COMPARE:
            raise ConfigError("`is` is for None alone; write ==")
        if of_left != of_right:
            sides = ((left, of_left), (right, of_right))
            words = " and ".join(f"`{_short(ast.unparse(node))}` is {_A[kind]}" for node, kind in sides)
            raise ConfigError(f"{words}; they cannot be compared")
        return f"({first} {_COMPARE[type(operator)]} {second})"

    def _contains(self, left: ast.expr, is_not: bool, right: ast.expr, depth: int) -> str:
        word = "not in" if is_not else "in"
        if isinstance(right, ast.List | ast.Tuple | ast.Set):
            kind, value = self.read(left, depth)
            choices = ", ".join(self._of(each, kind, depth) for each in right.elts)
            return f"({value} {word} [{choices}])"
        return f"({self._of(left, 'text', depth)} {word} {self._of(right, 'text', depth)})"


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
