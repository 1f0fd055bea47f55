"""Imports point down: every module imports only from its own floor or floors below it (docs/design.md), in no cycle.

Every import of the package counts, those inside functions and for type checkers too. Of other people's packages what
counts is what a module imports when it is imported itself. Functions and modules stay short as well.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "rollouts"

FLOORS = {
    # 0: shapes, errors, settings, plugins; standard library, msgspec and pluggy
    "rollouts.author_code": 0,
    "rollouts.bounds": 0,
    "rollouts.encoding": 0,
    "rollouts.types": 0,
    "rollouts.errors": 0,
    "rollouts.error_log": 0,
    "rollouts.disk": 0,
    "rollouts.lazy": 0,
    "rollouts.version": 0,
    "rollouts.child_environment": 0,
    "rollouts.supervisor": 0,
    "rollouts.terminal_text": 0,
    "rollouts.spending": 0,
    "rollouts.revisions": 0,
    "rollouts.config": 0,
    "rollouts.plugins": 0,
    # 1: pure functions
    "rollouts.data": 1,
    "rollouts.reducers": 1,
    "rollouts.env": 1,
    "rollouts.env.agent": 2,  # it holds a sandbox
    "rollouts.env.workers": 2,
    "rollouts.chat": 1,
    "rollouts.scaffold": 1,
    "rollouts.training.batches": 1,
    "rollouts.training.samples": 1,
    "rollouts.training.datasets.dataset_loaders": 2,
    "rollouts.training.simple.sharded": 4,
    "rollouts.training.filters": 1,
    "rollouts.training.batching": 1,
    "rollouts.training.algorithms": 1,
    "rollouts.training.backends.futures": 1,  # a handle on work under way, standard library: the Protocols name it
    # 2: state that deserves a class
    "rollouts.inference": 2,
    "rollouts.training.weights": 2,
    "rollouts.training.hub": 2,
    "rollouts.training.models": 2,
    "rollouts.training.estimates": 2,  # it puts adapters into a model without memory, as the backends do
    "rollouts.training.backends": 2,
    "rollouts.training.datasets": 2,
    "rollouts.loggers": 2,
    "rollouts.sandboxes": 2,
    "rollouts.gateway": 2,
    # 3: loops
    "rollouts.agent": 3,
    "rollouts.training.rollout_gen": 3,
    "rollouts.training.loops": 3,
    "rollouts.training.simple": 3,
    "rollouts.evaluate": 3,
    # 4: the top, where names become functions
    "rollouts.training": 4,  # the lazy face of its rooms
    **{  # names under the module names of the first notes
        f"rollouts.training.{name}": 4
        for name in (
            "agent_integration async_rollout_manager data_buffer dataset_loaders distributed_utils metrics rl_losses "
            "rl_loop rollout_generation rollout_manager sample_prep sft sft_loop types weight_sync"
        ).split()
    },
    "rollouts.runs": 4,
    "rollouts.api": 4,
    "rollouts.check": 4,
    "rollouts.primitives": 4,
    "rollouts.view": 4,
    "rollouts.cli": 4,
    "rollouts.providers": 4,
    "rollouts.__main__": 4,
    "rollouts": 4,  # the lazy face of everything
}
"""Room -> floor. The longest prefix of a module's name decides."""

HEAVY = {"torch", "transformers", "numpy", "peft", "datasets"}
ASYNC = {"trio", "httpx"}
MAY_IMPORT_TORCH = {"rollouts.training.algorithms.logprobs"}  # it defines a torch.autograd.Function
MAY_IMPORT_TRIO = {
    "rollouts.env.background",
    "rollouts.env.calls",
    "rollouts.env.checks",
    "rollouts.env.processes",
    "rollouts.env.shared",
    "rollouts.env.threads",
    "rollouts.training.backends.futures",
}
MAY_POINT_UP: dict[tuple[str, str], str] = {}
"""Imports that point up all the same, five at most, and why."""

FUNCTION_LINES_MAX, MODULE_LINES_MAX = 70, 600

GROUND = {"rollouts", "msgspec", "pluggy", *sys.stdlib_module_names}


def floor_of(module: str) -> int:
    prefix = module
    while prefix not in FLOORS:
        prefix = prefix.rpartition(".")[0]
    return FLOORS[prefix]


def modules_under(package: Path) -> dict[str, Path]:
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run as soon as the module is imported, type-checking ones excluded."""
    for statement in body:
        if isinstance(statement, ast.If):
            if "TYPE_CHECKING" not in ast.dump(statement.test):
                yield from top_level(statement.body)
            yield from top_level(statement.orelse)
        elif isinstance(statement, ast.Try | ast.With | ast.ClassDef):
            yield from top_level(statement.body)
            for handler in getattr(statement, "handlers", []):
                yield from top_level(handler.body)
        else:
            yield statement


def imported(nodes: Iterable[ast.AST], module: str, known: Mapping[str, Path]) -> set[str]:
    """The modules that these statements import; `from package import module` names the module."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import on line {node.lineno}"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in known else str(node.module))
    return found


def import_graph(package: Path, *, whole: bool = False) -> dict[str, set[str]]:
    """What every module imports at its top level; `whole`: what of the package it imports anywhere."""
    known = modules_under(package)
    graph = {}
    for module, path in known.items():
        tree = ast.parse(path.read_text())
        found = imported(ast.walk(tree) if whole else top_level(tree.body), module, known)
        graph[module] = {each for each in found if each.partition(".")[0] == "rollouts"} if whole else found
    return graph


def faults_in(graph: Mapping[str, set[str]]) -> list[str]:
    """Every import that points up, and every third-party import that a floor may not have."""
    faults = []
    for module, imported in graph.items():
        floor = floor_of(module)
        for other in sorted(imported):
            root = other.partition(".")[0]
            if root == "rollouts" and floor_of(other) > floor and (module, other) not in MAY_POINT_UP:
                faults.append(f"{module} (floor {floor}) imports {other} (floor {floor_of(other)})")
            heavy = root in HEAVY and not (root == "torch" and module in MAY_IMPORT_TORCH)
            if floor <= 1 and (heavy or (root in ASYNC and module not in MAY_IMPORT_TRIO)):
                faults.append(f"{module} (floor {floor}) imports {root} at its top level")
            elif floor == 0 and root not in GROUND:
                faults.append(f"{module} (floor 0) imports {root}, which the ground floor does without")
    return faults


def cycles_in(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Cycles of modules that import one another at their top levels; each found once."""
    found: list[list[str]] = []
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> None:
        if module in path:
            found.append([*path[path.index(module) :], module])
            return
        if module in done or module not in graph:
            return
        for other in sorted(graph[module]):
            visit(other, [*path, module])
        done.add(module)

    for module in sorted(graph):
        visit(module, [])
    return found


def too_long(package: Path) -> list[str]:
    """Functions and modules that do not fit."""
    found = []
    for path in sorted(package.rglob("*.py")):
        source = path.read_text()
        lines = len(source.splitlines())
        found += [f"{path.name}: {lines} lines"] if lines > MODULE_LINES_MAX else []
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = int(node.end_lineno or 0) - node.lineno + 1
                found += [f"{path.name}:{node.lineno} {node.name}: {lines} lines"] if lines > FUNCTION_LINES_MAX else []
    return found


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    return import_graph(PACKAGE)


def test_every_room_has_a_floor(graph):
    """A new room must be given a floor: falling through to the floor of `rollouts` would let it import anything."""
    faces = {"rollouts", "rollouts.training"}
    fallen = [module for module in graph if module not in faces and _room(module) in faces]
    assert fallen == []


def _room(module: str) -> str:
    while module not in FLOORS:
        module = module.rpartition(".")[0]
    return module


def test_every_floor_has_a_room(graph):
    unknown = [room for room in FLOORS if room not in graph]
    assert unknown == []


@pytest.fixture(scope="module")
def whole() -> dict[str, set[str]]:
    return import_graph(PACKAGE, whole=True)


def test_imports_point_down(graph, whole):
    assert faults_in(graph) == []
    assert faults_in(whole) == []
    assert len(MAY_POINT_UP) <= 5 and all(other in whole[module] for module, other in MAY_POINT_UP)


def test_there_is_no_cycle(whole):
    assert cycles_in(whole) == []


def test_functions_and_modules_are_short():
    assert too_long(PACKAGE) == []


def test_the_lower_floors_load_no_torch(graph):
    """Also not through what they import in turn."""
    light = [module for module in graph if floor_of(module) <= 1 and module not in MAY_IMPORT_TORCH]
    code = f"import sys, {', '.join(light)}\nprint({HEAVY!r} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_the_walk_sees_what_it_should(tmp_path):
    """A made-up house in which everything is wrong that can be."""
    house = tmp_path / "rollouts"
    (house / "env").mkdir(parents=True)
    (house / "__init__.py").write_text("")
    (house / "types.py").write_text("import click\nfrom rollouts.agent import Episode\n")
    (house / "agent.py").write_text("import trio\nfrom rollouts import types\n")
    (house / "errors.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n    from rollouts import agent\n"
        "def late():\n    import torch\n    from rollouts import agent\n"
    )
    (house / "env" / "__init__.py").write_text("try:\n    import torch\nexcept ImportError:\n    torch = None\n")
    (house / "env" / "schema.py").write_text("import trio\n")
    (house / "env" / "calls.py").write_text("import trio\n")
    assert faults_in(import_graph(house)) == [
        "rollouts.env (floor 1) imports torch at its top level",
        "rollouts.env.schema (floor 1) imports trio at its top level",
        "rollouts.types (floor 0) imports click, which the ground floor does without",
        "rollouts.types (floor 0) imports rollouts.agent (floor 3)",
    ]
    whole = import_graph(house, whole=True)
    assert faults_in(whole) == [
        "rollouts.errors (floor 0) imports rollouts.agent (floor 3)",
        "rollouts.types (floor 0) imports rollouts.agent (floor 3)",
    ]
    assert cycles_in(whole) == [["rollouts.agent", "rollouts.types", "rollouts.agent"]]
    (house / "chat.py").write_text("def f():\n" + "    pass\n" * 70 + "\n" * 530)
    assert too_long(house) == ["chat.py: 601 lines", "chat.py:1 f: 71 lines"]


def test_the_engine_imports_nothing_of_the_plain_calls():
    """Only lazy faces, the modules with the names of the first notes, and the room itself do."""
    names = {"rollouts.training", "rollouts.training.types", "rollouts.training.metrics", "rollouts.training.loops"}
    names |= {
        f"rollouts.training.{name}" for name in ("rl_loop", "rl_losses", "sft_loop", "loops.rl_loop", "loops.sft_loop")
    }
    room = "rollouts.training.simple"
    for module, imported in import_graph(PACKAGE, whole=True).items():
        if module not in names and not module.startswith(room):
            assert not [each for each in imported if each.startswith(room)], module
