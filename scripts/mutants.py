"""Measure how many faults the tests find: change the code in a small way, and see whether a test fails.

    python scripts/mutants.py --count 100 --seed 0 --jobs 2

A mutant is one change: of a comparison, an operator or a number, a negated condition, or a removed statement or
argument. The seed draws mutants evenly over the lines of the packages in `ROOMS`, each with the tests that should find
it. The script changes a copy of the tree. It prints the place of each mutant that no test finds. If the tests take
longer than `--seconds`, the mutant counts as found. Texts, assertions, type hints and error messages are not changed.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
TRAINING, INFERENCE = "tests/training", "tests/inference"
ROOMS = {
    "rollouts/training/loops": [f"{TRAINING}/loops"],
    "rollouts/training/batching.py": [f"{TRAINING}/test_batching.py", f"{TRAINING}/loops"],
    "rollouts/training/algorithms/aggregation.py": [f"{TRAINING}/algorithms/test_aggregation.py"],
    "rollouts/training/weights": [
        *(f"{TRAINING}/test_weight_{name}.py" for name in ("sync", "files", "groups", "engines")),
        f"{TRAINING}/test_adapters_saved.py",
        f"{TRAINING}/backends/test_checkpoint.py",
        f"{TRAINING}/backends/test_lora_and_checkpoint.py",
        "tests/runs/test_durability.py",
    ],
    "rollouts/inference/servers/server.py": [f"{INFERENCE}/test_{name}.py" for name in ("server", "pool", "faults")],
    "rollouts/inference/servers/server_pool.py": [f"{INFERENCE}/test_pool.py", f"{INFERENCE}/test_faults.py"],
}
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
}


class Mutant(NamedTuple):
    """One change: its file and line, its description, and the changed text of the file."""

    file: str
    line: int
    words: str
    source: str
    tests: tuple[str, ...]


def main() -> int:
    """Draw and run the mutants. Returns 0 if at least `--least` percent were found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=120.0, help="a mutant's tests may take so long")
    parser.add_argument("--least", type=float, default=0.85, help="the part that must be killed")
    given = parser.parse_args()
    chosen = draw(random.Random(given.seed), given.count)
    survivors = []
    with ThreadPoolExecutor(given.jobs) as pool:
        for mutant, is_killed in zip(
            chosen, pool.map(lambda each: _is_killed(each, given.seconds), chosen), strict=True
        ):
            print(f"{'killed  ' if is_killed else 'SURVIVED'} {mutant.file}:{mutant.line} {mutant.words}", flush=True)
            survivors += [] if is_killed else [mutant]
    killed = len(chosen) - len(survivors)
    print(f"{killed} of {len(chosen)} killed")
    return 0 if killed >= given.least * len(chosen) else 1


def draw(rng: random.Random, count: int) -> list[Mutant]:
    """`count` of all possible mutants, evenly distributed."""
    found = []
    for room, tests in ROOMS.items():
        place = ROOT / room
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            found += [(file, index, tests) for index in range(len(list(_changes(ast.parse(file.read_text())))))]
    return [_made(*each) for each in rng.sample(found, count)]


def _made(file: Path, index: int, tests: list[str]) -> Mutant:
    tree = ast.parse(file.read_text())
    line, words = list(_changes(tree, index))[index]
    return Mutant(str(file.relative_to(ROOT)), line, words, ast.unparse(tree), tuple(tests))


def _changes(tree: ast.Module, chosen: int = -1) -> Iterator[tuple[int, str]]:
    """Every possible change, as its line and description. The chosen one is applied."""
    left_out = {id(inner) for node in ast.walk(tree) if isinstance(node, SKIPPED) for inner in ast.walk(node)}
    left_out |= {id(inner) for node in ast.walk(tree) for hint in _hints(node) for inner in ast.walk(hint)}
    number = 0
    for node in ast.walk(tree):
        if id(node) in left_out:
            continue
        for words, change in _of_node(node):
            if number == chosen:
                before = ast.unparse(node)
                change()
                words = f"{words}: {before.splitlines()[0][:80]}"
            number += 1
            yield getattr(node, "lineno", 0), words


SKIPPED = (ast.Assert, ast.Raise, ast.JoinedStr, ast.Import, ast.ImportFrom)


def _hints(node: ast.AST) -> list[ast.AST]:
    found = [getattr(node, "annotation", None), getattr(node, "returns", None)]
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
        found.append(node)
    return [each for each in found if each is not None]


def _of_node(node: ast.AST) -> Iterator[tuple[str, object]]:
    """The possible changes of a node: a description, and the function that applies it."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        yield "comparison", lambda: node.ops.__setitem__(0, COMPARISONS[type(node.ops[0])]())
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS and not _is_text(node):
        yield "operator", lambda: setattr(node, "op", OPERATORS[type(node.op)]())
    elif isinstance(node, ast.BoolOp):
        other = ast.Or if isinstance(node.op, ast.And) else ast.And
        yield "and/or", lambda: setattr(node, "op", other())
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
        value = (not node.value) if isinstance(node.value, bool) else node.value + 1
        yield "constant", lambda: setattr(node, "value", value)
    elif isinstance(node, ast.If | ast.While | ast.IfExp):
        negated = ast.UnaryOp(ast.Not(), copy.deepcopy(node.test))
        yield "condition turned round", lambda: setattr(node, "test", negated)
    elif isinstance(node, ast.Call) and node.keywords:
        yield "argument left out", node.keywords.pop
    elif isinstance(node, ast.Return) and node.value is not None:
        yield "nothing returned", lambda: setattr(node, "value", ast.Constant(None))
    for field in ("body", "orelse", "finalbody"):
        statements = getattr(node, field, None)
        for place, each in enumerate(statements if isinstance(statements, list) else []):
            if isinstance(each, ast.AugAssign) or (
                isinstance(each, ast.Expr) and not isinstance(each.value, ast.Constant)
            ):
                yield f"left out: {ast.unparse(each)[:60]}", lambda s=statements, p=place: s.__setitem__(p, ast.Pass())


def _is_text(node: ast.BinOp) -> bool:
    return any(
        isinstance(side, ast.JoinedStr | ast.Constant) and not _is_number(side) for side in (node.left, node.right)
    )


def _is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def _is_killed(mutant: Mutant, seconds: float) -> bool:
    """Whether a test fails or takes too long. Runs in a copy of the tree, in its own process."""
    with tempfile.TemporaryDirectory() as place:
        tree = Path(place) / "tree"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", "__pycache__", ".*_cache", "runs.tar.xz"))
        (tree / mutant.file).write_text(mutant.source)
        words = [sys.executable, "-c", RUN, str(tree), *mutant.tests]
        environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "TMPDIR": place}
        child = os.posix_spawn(sys.executable, words, environment, setpgroup=0, file_actions=_SILENT)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status) != 0
            time.sleep(0.1)
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return True


RUN = """
import os, sys
import pytest
os.chdir(sys.argv[1])
flags = "-x -q -n 0 -p no:cacheprovider -m".split()
sys.exit(pytest.main([*sys.argv[2:], *flags, "not slow and not engines"]))
"""
_SILENT = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0), (os.POSIX_SPAWN_DUP2, 1, 2)]

if __name__ == "__main__":
    sys.exit(main())
