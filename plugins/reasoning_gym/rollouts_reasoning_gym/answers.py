"""The answer in a reply, and which answers upstream may evaluate.

Some scorers of upstream call `eval`, or sympy's parser, which calls `eval`, on the answer of the model. So for their
data sets an answer is parsed first. One that does more than arithmetic, or whose value would be huge, is no answer.
"""

from __future__ import annotations

import ast
from typing import Literal

Format = Literal["tags", "last_line"]

INSTRUCTIONS: dict[Format, str] = {
    "tags": "Write your final answer between <answer> and </answer>.",
    "last_line": "Write your final answer alone in the last line.",
}

LITERALS = {"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"}
"""Data sets that call `eval` on an answer, which may be a list."""

EXPRESSIONS = {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
"""Data sets that parse an answer with sympy."""

FUNCTIONS = set("Abs acos acot asin atan cos cosh cot csc exp ln log sec sin sinh sqrt tan tanh".split())
EXPRESSION_CHARACTERS_MAX = 2000
EXPONENT_MAX = 99

_LITERAL_NODES = (ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.Name, ast.Load, ast.UnaryOp, ast.unaryop)
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.UAdd, ast.USub)


def answer_in(text: str, form: Format) -> str | None:
    """The answer in a reply: between the last tags, or the last line that is not empty. None if there is none."""
    if form == "tags":
        from reasoning_gym.utils import extract_answer

        found: str | None = extract_answer(text)
        return found
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else None


def reply_with(answer: str, form: Format) -> str:
    """A reply from which `answer_in` takes this answer."""
    return f"<answer>{answer}</answer>" if form == "tags" else answer


def is_harmless(answer: str, data_set: str) -> bool:
    """Whether upstream may score this answer of the data set."""
    if data_set not in LITERALS | EXPRESSIONS:
        return True
    try:
        tree = ast.parse(answer.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return data_set in LITERALS  # `eval` raises too, and upstream compares the text
    if data_set in LITERALS:
        return all(isinstance(node, _LITERAL_NODES) for node in ast.walk(tree))
    return len(answer) <= EXPRESSION_CHARACTERS_MAX and _is_arithmetic(tree.body)


def _is_arithmetic(node: ast.expr, powers: int = 0) -> bool:
    """Whether an expression has only numbers, names, operators and known functions, and small exponents."""
    match node:
        case ast.Constant(value=value):
            return isinstance(value, int | float)
        case ast.Name(id=name):
            return not name.startswith("_")
        case ast.UnaryOp(op=op, operand=operand):
            return isinstance(op, _OPERATORS) and _is_arithmetic(operand, powers)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return powers < 2 and _is_exponent(right) and _is_arithmetic(left, powers + 1)
        case ast.BinOp(left=left, op=op, right=right):
            return isinstance(op, _OPERATORS) and _is_arithmetic(left, powers) and _is_arithmetic(right, powers)
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
            return name in FUNCTIONS and all(_is_arithmetic(each, powers) for each in arguments)
    return False


def _is_exponent(node: ast.expr) -> bool:
    """Whether an exponent is a name, a small number or a fraction of small numbers."""
    match node:
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return _is_exponent(operand)
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            return _is_exponent(left) and _is_exponent(right)
        case ast.Constant(value=value):
            return isinstance(value, int | float) and abs(value) <= EXPONENT_MAX
    return isinstance(node, ast.Name)
