"""Evaluate arithmetic expressions safely: only numbers and operators, with bounded sizes."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable

__all__ = ["evaluate"]

EXPRESSION_CHARACTERS_MAX = 1_000
SYNTAX = "use numbers, + - * / // % ** and parentheses"
BITS_MAX = 4_096  # of every intermediate number; squaring such a number takes microseconds

BINARY: dict[type[ast.operator], Callable[..., int | float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


def evaluate(expression: str) -> str:
    """The value of an expression with + - * / // % ** and parentheses, as text.

    Raises ValueError for anything else: names, calls, and numbers that become too large.

    >>> evaluate("12 * (3 + 4)")
    '84'
    """
    if len(expression) > EXPRESSION_CHARACTERS_MAX:
        raise ValueError(
            f"the expression has {len(expression)} characters, but at most {EXPRESSION_CHARACTERS_MAX} are allowed"
        )
    stranger = re.search(
        r"[^0-9eE.+\-*/%()\s]", expression
    )  # before parsing: the parser would print warnings for some texts
    if stranger:
        raise ValueError(f"{stranger[0]!r} is not understood; {SYNTAX}")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        return str(_value(tree.body))
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(f"{expression!r} is not an arithmetic expression") from error
    except ZeroDivisionError as error:
        raise ValueError("division by zero") from error
    except OverflowError as error:
        raise ValueError("the result is too large") from error


def _value(node: ast.expr) -> int | float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        operand = _value(node.operand)
        return -operand if isinstance(node.op, ast.USub) else operand
    if isinstance(node, ast.BinOp) and type(node.op) in BINARY:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            _check_power(left, right)
        return _bounded(BINARY[type(node.op)](left, right))
    raise ValueError(f"{ast.unparse(node)!r} is not understood; {SYNTAX}")


def _check_power(base: int | float, exponent: int | float) -> None:
    """Raise ValueError for a power that is too large or not real, before it is computed."""
    if base < 0 and not float(exponent).is_integer():
        raise ValueError("a negative number has no real power of a fraction")
    if isinstance(base, int) and isinstance(exponent, int) and exponent > 0:
        if abs(base) > 1 and exponent * base.bit_length() > 2 * BITS_MAX:
            raise ValueError("the result is too large")


def _bounded(value: int | float) -> int | float:
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError("the result is too large")
    elif value.bit_length() > BITS_MAX:
        raise ValueError("the result is too large")
    return value
