"""Measure how many faults the tests find: change the code in a small way, and see whether a test fails.

    python scripts/mutants.py                        # every stored mutant: at least 97 percent must die
    python scripts/mutants.py --draw 20 --seed 1     # draw new ones, and store those that a test finds

A mutant is one change: of a comparison, an operator or a number, a negated condition, or a removed statement or
argument. Texts, assertions, type hints and error messages are not changed. `scripts/mutants.jsonl` stores mutants by
their code and not by their line, so that they survive when a function moves to another module. A mutant whose code no
longer exists is counted apart.

The tests of a mutant are the test files that import its module. The script changes a copy of the tree. A stored mutant
meets the test that found it first, and the others if that test is gone or passes.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
STORE = Path(__file__).with_suffix(".jsonl")
CODE = ("rollouts", *(f"plugins/{name}/rollouts_{name}" for name in ("check", "view", "fsdp", "notes", "servers")))
TESTS = ("tests", "plugins")
HEAVY = "torch transformers peft datasets trio httpx msgspec click rich numpy".split()
LEAST = 0.97

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
SKIPPED = (ast.Assert, ast.Raise, ast.JoinedStr, ast.Import, ast.ImportFrom)


class Mutant(NamedTuple):
    """One change of one statement, or of the head of a compound one."""

    module: str
    function: str  # "" at the top level of the module
    change: str
    before: str
    after: str
    found_by: str = ""  # a test, as pytest names it

    def __str__(self) -> str:
        return f"{self.module}.{self.function}: {self.change}: {self.before.splitlines()[0][:80]}"


class Unit(NamedTuple):
    """A simple statement, or the head of a compound one, and how to replace it in its tree."""

    function: str
    node: ast.AST
    replace: Callable[[ast.AST], None]


class Run(NamedTuple):
    """A process that runs the tests of a mutant in a copy of the tree."""

    mutant: Mutant
    tests: list[str]
    copy: Path
    file: str  # the changed one, in the copy
    end: float


def main() -> int:
    """Run the stored mutants, or draw new ones. Returns 0 if enough died."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", type=int, default=0, help="store so many new mutants that a test finds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=120.0, help="the tests of a mutant may take so long")
    options = parser.parse_args()
    for name in HEAVY:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder:
        copies = [_copy_tree(Path(folder) / str(number)) for number in range(options.jobs)]
        if options.draw:
            return draw(options, copies)
        return check([Mutant(**json.loads(line)) for line in STORE.read_text().splitlines()], options.seconds, copies)


def check(mutants: list[Mutant], seconds: float, copies: list[Path]) -> int:
    """Print the stored mutants that no test finds."""
    sources = {path: path.read_text() for path in _files(CODE)}
    present = [(each, where) for each in mutants if (where := locate(each, sources))]
    quick = [(each, *where, [each.found_by]) for each, where in present if _exists(each.found_by)]
    died = {mutant for mutant, found_by in run_all(quick, seconds, copies) if found_by}
    rest = [(each, *where, tests_of(where[0])) for each, where in present if each not in died]
    died |= {mutant for mutant, found_by in run_all(rest, seconds, copies) if found_by}
    for mutant, _ in present:
        if mutant not in died:
            print(f"SURVIVED {mutant}")
    print(f"{len(died)} of {len(present)} died; the code of {len(mutants) - len(present)} others is gone")
    return 0 if len(died) >= LEAST * len(present) else 1


def draw(options: argparse.Namespace, copies: list[Path]) -> int:
    """Draw mutants from every room, and store those that a test finds which passes without them."""
    rng = random.Random(options.seed)
    files = [path for path in _files(CODE) if tests_of(path)]
    rooms = sorted({_room(path) for path in files})
    stored = set(STORE.read_text().splitlines()) if STORE.exists() else set()
    number, good, bad = len(stored), set[str](), set[str]()
    while len(stored) < number + options.draw:
        chosen = []
        for _ in range(2 * len(copies)):
            room = rng.choice(rooms)  # half of them evenly over the rooms, half over the files
            path = rng.choice([each for each in files if _room(each) == room] if rng.random() < 0.5 else files)
            if mutants := list(mutants_of(path)):
                mutant, source = rng.choice(mutants)
                chosen.append((mutant, path, source, tests_of(path)))
        for mutant, found_by in run_all(chosen, options.seconds, copies):
            print(f"{found_by or 'SURVIVED'} {mutant}", flush=True)
            if found_by and found_by not in good | bad:
                clean = (mutant, path := ROOT / "README.md", path.read_text(), [found_by])
                (bad if next(run_all([clean], options.seconds, copies))[1] else good).add(found_by)
            if found_by in good:
                stored.add(json.dumps(mutant._replace(found_by=found_by)._asdict()))
                STORE.write_text("".join(f"{line}\n" for line in sorted(stored)))
    return 0


def mutants_of(path: Path) -> Iterator[tuple[Mutant, str]]:
    """Every mutant of a file, with the changed source."""
    tree = ast.parse(path.read_text())
    for unit in units(tree, ""):
        before = ast.unparse(unit.node)
        for index in range(len(list(_changes(unit.node)))):
            changed = copy.deepcopy(unit.node)
            change = list(_changes(changed, index))[index]
            after = "pass" if change == "left out" else ast.unparse(changed)
            unit.replace(ast.parse(after).body[0] if isinstance(unit.node, ast.stmt) else changed)
            yield Mutant(_module(path), unit.function, change, before, after), ast.unparse(tree)
            unit.replace(unit.node)


def locate(mutant: Mutant, sources: dict[Path, str]) -> tuple[Path, str] | None:
    """The file that has the code of a stored mutant, and its changed source. Its former module is tried first."""
    name = mutant.function.rpartition(".")[2]
    for path in sorted(sources, key=lambda path: _module(path) != mutant.module):
        if name not in sources[path]:
            continue
        tree = ast.parse(sources[path])
        for unit in units(tree, ""):
            is_same = unit.function.rpartition(".")[2] == name and ast.unparse(unit.node) == mutant.before
            if is_same and (name or _module(path) == mutant.module):
                statement = ast.parse(mutant.after).body[0]
                unit.replace(statement if isinstance(unit.node, ast.stmt) else statement.value)  # type: ignore[attr-defined]
                return path, ast.unparse(tree)
    return None


def units(node: ast.AST, function: str) -> Iterator[Unit]:
    """The simple statements of a tree, and the conditions and iterables of its compound ones."""
    for field in ("test", "iter", "subject"):
        head = getattr(node, field, None)
        if isinstance(node, ast.stmt) and head is not None and not isinstance(node, SKIPPED):
            yield Unit(function, head, lambda new, field=field: setattr(node, field, new))  # type: ignore[misc]
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        statements = getattr(node, field, None)
        for index, each in enumerate(statements if isinstance(statements, list) else []):
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield from units(each, f"{function}.{each.name}".lstrip("."))
            elif hasattr(each, "body"):
                if not (isinstance(each, ast.If) and "TYPE_CHECKING" in ast.dump(each.test)):
                    yield from units(each, function)
            elif not isinstance(each, SKIPPED):
                yield Unit(function, each, lambda new, to=statements, index=index: to.__setitem__(index, new))  # type: ignore[misc]


def _changes(unit: ast.AST, chosen: int = -1) -> Iterator[str]:
    """Every possible change of a statement or expression. The chosen one is applied."""
    skipped = {id(inner) for node in ast.walk(unit) if isinstance(node, SKIPPED) for inner in ast.walk(node)}
    skipped |= {
        id(inner) for node in ast.walk(unit) for inner in ast.walk(getattr(node, "annotation", None) or ast.Load())
    }
    number = 0
    for node in ast.walk(unit):
        for words, change in [] if id(node) in skipped else _of_node(node):
            if number == chosen:
                change()
            number += 1
            yield words
    is_statement = isinstance(unit, ast.AugAssign | ast.Expr)
    if is_statement and not isinstance(getattr(unit, "value", None), ast.Constant | ast.Yield | ast.YieldFrom):
        yield "left out"


def _of_node(node: ast.AST) -> Iterator[tuple[str, Callable[[], Any]]]:
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
    elif isinstance(node, ast.IfExp):
        yield "condition negated", lambda: setattr(node, "test", ast.UnaryOp(ast.Not(), node.test))
    elif isinstance(node, ast.Call) and node.keywords:
        yield "argument left out", node.keywords.pop
    elif isinstance(node, ast.Return) and node.value is not None:
        yield "nothing returned", lambda: setattr(node, "value", ast.Constant(None))


def _is_text(node: ast.BinOp) -> bool:
    sides = (node.left, node.right)
    return any(isinstance(side, ast.JoinedStr) or _is_constant_text(side) for side in sides)


def _is_constant_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and not isinstance(node.value, int | float)


def run_all(
    jobs: list[tuple[Mutant, Path, str, list[str]]], seconds: float, copies: list[Path]
) -> Iterator[tuple[Mutant, str]]:
    """Run the tests of mutants, one in each copy at a time. Yields a mutant and the test that found it, or ""."""
    waiting, free, running = list(jobs), list(copies), dict[int, Run]()
    while waiting or running:
        while waiting and free:
            mutant, path, source, tests = waiting.pop(0)
            run = Run(mutant, tests, free.pop(), str(path.relative_to(ROOT)), time.monotonic() + seconds)
            (run.copy / run.file).write_text(source)
            running[_start(run)] = run
        time.sleep(0.1)
        for process, run in list(running.items()):
            done, status = os.waitpid(process, os.WNOHANG)
            if not done and time.monotonic() < run.end:
                continue
            os.killpg(process, signal.SIGKILL) if not done else None
            _ = done or os.waitpid(process, 0)
            shutil.copyfile(ROOT / run.file, run.copy / run.file)
            free.append(run.copy)
            del running[process]
            yield run.mutant, _found_by(run, os.waitstatus_to_exitcode(status) if done else None)


def _start(run: Run) -> int:
    """Fork a process that runs the tests: it has the large packages already."""
    (result := run.copy / "found_by").unlink(missing_ok=True)
    if process := os.fork():
        return process
    code = 1
    try:
        code = _run_tests(run, result)
    finally:  # nothing of the parent's stack may run here: it would delete the copies
        os._exit(code)


def _run_tests(run: Run, result: Path) -> int:
    os.setpgid(0, 0)
    for descriptor in (1, 2):
        os.dup2(os.open(run.copy / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    os.chdir(run.copy)
    sys.path[:] = [re.sub(f"^{re.escape(str(ROOT))}(?=/|$)", str(run.copy), entry) for entry in sys.path]
    inside = [entry for entry in sys.path if entry.startswith(str(run.copy))]
    os.environ.update(PYTHONPATH=os.pathsep.join([str(run.copy), *inside]), OMP_NUM_THREADS="1", TMPDIR=str(run.copy))
    tempfile.tempdir = None
    flags = "-x -q -n 0 -p no:cacheprovider -W ignore::pytest.PytestAssertRewriteWarning".split()
    marks = "not engines and not adapters and not nightly"
    return int(pytest.main([*flags, "-m", marks, *run.tests], [_Recorder(result)]))


class _Recorder:
    def __init__(self, result: Path) -> None:
        self.result = result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.result.exists():
            self.result.write_text(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self.result.exists():
            self.result.write_text(report.nodeid)


def _found_by(run: Run, code: int | None) -> str:
    """The test that failed; the first file if the process ended early; "" if all passed, or took too long."""
    result = run.copy / "found_by"
    if code in (None, 0, 5):
        return ""
    return result.read_text() if result.exists() else run.tests[0]


def _copy_tree(to: Path) -> Path:
    ignored = shutil.ignore_patterns(".git", "__pycache__", ".*_cache", "runs.tar.xz", "node_modules")
    return Path(shutil.copytree(ROOT, to, ignore=ignored, symlinks=True))


def _files(folders: tuple[str, ...]) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py") if "templates" not in path.parts)


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[2:] if parts[0] == "plugins" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _room(path: Path) -> str:
    package, _, rest = _module(path).partition(".")
    return rest.partition(".")[0] if package == "rollouts" else package


_texts: dict[str, str] = {}


def tests_of(path: Path) -> list[str]:
    """The test files that import a module: first those with its name, then the short ones. If none does, its room's."""
    if not _texts:
        tests = [each for folder in TESTS for each in (ROOT / folder).rglob("test_*.py") if "faults" not in each.parts]
        _texts.update({str(each.relative_to(ROOT)): each.read_text() for each in tests})
    package, _, stem = (module := _module(path)).rpartition(".")
    imports = re.compile(rf"{re.escape(module)}\b|from {re.escape(package)} import [^\n]*\b{stem}\b")
    names = [name for name, text in _texts.items() if imports.search(text)]
    names = names or [name for name in _texts if f"/{_room(path)}/" in f"/{name}"]
    return sorted(names, key=lambda name: (stem not in name, len(_texts[name])))


def _exists(test: str) -> bool:
    file, _, rest = test.partition("::")
    name = rest.rpartition("::")[2].partition("[")[0]
    return (ROOT / file).exists() and (not name or f"def {name}(" in (ROOT / file).read_text())


if __name__ == "__main__":
    sys.exit(main())
