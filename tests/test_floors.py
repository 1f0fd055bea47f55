"""Imports point down: a room imports only from rooms below it (docs/design.md), and no module in a cycle.

A room is an entry of rollouts/. Every import of the package counts, those inside functions and for type checkers too.
Of other people's packages what counts is what a module imports when it is imported itself. Functions stay short, take
few parameters, and every room has a budget of code lines.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

from rollouts.doors import HOMES

PACKAGES = [home / package for package, home in HOMES.items()]

ROOMS = (
    # shapes, errors, files
    *"doors author_code lazy version errors encoding types bounds disk error_log child_environment supervisor".split(),
    *"terminal_text reducers".split(),
    # settings and components
    *"config plugins".split(),
    # what an episode and a step need
    *"chat models data loggers sandboxes inference gateway env".split(),
    # loops
    *"agent training evaluate".split(),
    # names become functions
    *"runs api cli __main__".split(),
    # on top of the core, which opens their doors and imports none of them
    *"rollouts_check rollouts_view rollouts_servers rollouts_fsdp rollouts_notes".split(),
    # doors: names that users import
    *"check primitives providers spending".split(),
)
"""From the ground up. A room imports only from itself and from those before it."""

FACES = ("config", "training", *(f"training.{name}" for name in ("backends", "datasets", "loops", "rollout_gen")))
MAY_POINT_UP = {(f"rollouts.{face}", "rollouts_notes") for face in FACES}
MAY_POINT_UP |= {(f"rollouts.{face}", "rollouts_fsdp") for face in ("training", "training.backends")}
"""Modules that import from a room above theirs all the same: lazy faces, which have names of these packages."""

TOP_LEVEL = {
    "rollouts.agent": "trio",
    "rollouts.chat": "jinja2",
    "rollouts.cli": "click",
    "rollouts.env.background": "trio",
    "rollouts.env.calls": "trio",
    "rollouts.env.installing": "packaging",
    "rollouts.env.processes": "trio",
    "rollouts.env.shared": "trio",
    "rollouts.env.threads": "outcome trio",
    "rollouts.env.workers": "outcome trio",
    "rollouts.gateway": "h11 trio",
    "rollouts.inference.embedded": "numpy torch transformers trio",
    "rollouts.inference.suspend": "trio",
    "rollouts.models.futures": "trio",
    "rollouts.models.lora": "torch",
    "rollouts.runs": "outcome rich trio",
    "rollouts.training.algorithms.logprobs": "torch",  # it defines a torch.autograd.Function
    "rollouts.training.backends": "numpy torch",
    "rollouts.training.rollout_gen": "trio",
    "rollouts.training.weights": "torch trio",
    "rollouts_check": "click outcome packaging pytest trio",
    "rollouts_fsdp": "torch",
    "rollouts_notes": "torch trio",
    "rollouts_servers": "h11 packaging trio",
    "rollouts_view": "click trio",
}
"""What a module imports at its top level beside the standard library, msgspec and pluggy. The longest prefix counts."""

HEAVY = {"torch", "transformers", "numpy", "peft", "datasets"}
LOADS_TORCH = {
    "rollouts.inference.embedded",
    "rollouts.models.lora",
    "rollouts.training.algorithms.logprobs",
    "rollouts.training.backends",
    "rollouts.training.weights.checkpoint",
    "rollouts_fsdp.backend",
    "rollouts_fsdp.heartbeats",
    "rollouts_fsdp.ranks",
    "rollouts_fsdp.rendezvous",
    "rollouts_notes.primitives",
    "rollouts_notes.pytorch_factory",
}
"""The rooms, or parts of them, that load torch when they are imported."""

FUNCTION_LINES_MAX, PARAMETERS_MAX = 70, 10

MAY_HAVE_MANY = {
    # settings of a component, or names of a vocabulary
    *("backend.create_fsdp_backend", "hf.create_hf_inference", "torch.create_torch_backend", "token_advantages.gae"),
    "types.__init__",  # the fields of a Sample
    "command._check",  # options of a command
    *("rollouts.create_batch_rollouts", "loops.run_rl_training"),  # as the first notes have them
    # too many
    *("estimates.estimate_memory", "manager.__init__"),
}
"""Functions that take more parameters, with the name of their module."""

CODE_LINES_MAX = {
    "rollouts_check": 6630,
    "rollouts_fsdp": 807,
    "rollouts_notes": 3210,
    "rollouts_servers": 3180,
    "rollouts_view": 2771,
    "agent": 1423,
    "chat": 2052,
    "cli": 1548,
    "config": 2499,
    "data": 711,
    "env": 5159,
    "gateway": 1158,
    "inference": 1341,
    "loggers": 307,
    "models": 950,
    "plugins": 1192,
    "runs": 8728,
    "sandboxes": 641,
    "training": 7812,
    "types": 281,
    "files": 1273,
}
"""Of each room, without blank lines, comments and docstrings. A larger budget needs a line in the CHANGELOG."""

LAYOUT = {getattr(tokenize, name) for name in "COMMENT NL NEWLINE INDENT DEDENT ENDMARKER".split()}
GROUND = {*HOMES, "msgspec", "pluggy", *sys.stdlib_module_names}


def room_of(module: str) -> str:
    """The room of a module: an entry of rollouts/, or a package beside it; "" for the lazy face of everything."""
    package, _, rest = module.partition(".")
    return rest.partition(".")[0] if package == "rollouts" else package


def prefix_of(module: str, prefixes: Iterable[str]) -> str:
    """The longest of these prefixes of a module's name; "" if there is none."""
    return max((each for each in prefixes if f"{module}.".startswith(f"{each}.")), key=len, default="")


def modules_under(*packages: Path) -> dict[str, Path]:
    found = {}
    for home, path in ((package.parent, path) for package in packages for path in sorted(package.rglob("*.py"))):
        parts = path.relative_to(home).with_suffix("").parts
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


def import_graph(*packages: Path, whole: bool = False) -> dict[str, set[str]]:
    """What every module imports at its top level; `whole`: what of the package it imports anywhere."""
    known = modules_under(*packages)
    graph = {}
    for module, path in known.items():
        tree = ast.parse(path.read_text())
        found = imported(ast.walk(tree) if whole else top_level(tree.body), module, known)
        graph[module] = {each for each in found if each.partition(".")[0] in HOMES} if whole else found
    return graph


def faults_in(graph: Mapping[str, set[str]]) -> list[str]:
    """Every import that points up, and every third-party import that a module may not have."""
    height = {room: place for place, room in enumerate((*ROOMS, ""))}  # the face of everything is the roof
    faults = []
    for module, imported in graph.items():
        room, allowed = room_of(module), TOP_LEVEL.get(prefix_of(module, TOP_LEVEL), "").split()
        for other in sorted(imported):
            root, above = other.partition(".")[0], room_of(other)
            if root in HOMES and height[above] > height[room] and (module, above) not in MAY_POINT_UP:
                faults.append(f"{module} imports {other}, whose room is above")
            if root not in GROUND and root not in allowed:
                faults.append(f"{module} imports {root} at its top level")
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


def too_long(*packages: Path) -> list[str]:
    """Functions that do not fit a screen, or take too many parameters."""
    found = []
    for path in modules_under(*packages).values():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                place = f"{path.name}:{node.lineno} {node.name}"
                lines = int(node.end_lineno or 0) - node.lineno + 1
                parameters = len([*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs])
                found += [f"{place}: {lines} lines"] if lines > FUNCTION_LINES_MAX else []
                found += (
                    [f"{place}: {parameters} parameters"]
                    if parameters > PARAMETERS_MAX and f"{path.stem}.{node.name}" not in MAY_HAVE_MANY
                    else []
                )
    return found


def code_lines(source: str) -> int:
    """Of a module, without blank lines, comments and docstrings."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                docstrings |= set(range(first.lineno, int(first.end_lineno or 0) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    return import_graph(*PACKAGES)


@pytest.fixture(scope="module")
def whole() -> dict[str, set[str]]:
    return import_graph(*PACKAGES, whole=True)


def test_every_room_has_its_place(graph):
    assert sorted({room_of(module) for module in graph} - {""}) == sorted(ROOMS)
    assert [prefix for prefix in LOADS_TORCH if prefix not in graph] == []


def test_no_permission_is_left_over(graph, whole):
    assert all(room in map(room_of, whole[module]) for module, room in MAY_POINT_UP)
    used: dict[str, set[str]] = {prefix: set() for prefix in TOP_LEVEL}
    for module, imported in graph.items():
        used.get(prefix_of(module, TOP_LEVEL), set()).update(other.partition(".")[0] for other in imported)
    assert {prefix: " ".join(sorted(found - GROUND)) for prefix, found in used.items()} == TOP_LEVEL


def test_imports_point_down(graph, whole):
    assert faults_in(graph) == []
    assert faults_in(whole) == []


def test_there_is_no_cycle(whole):
    assert cycles_in(whole) == []


@pytest.mark.slow
def test_every_room_keeps_to_its_budget():
    """What a change adds to a room, it takes out of that room, or the CHANGELOG says why the room is larger."""
    lines: Counter[str] = Counter()
    for module, path in modules_under(*PACKAGES).items():
        lines[room if (room := room_of(module)) in CODE_LINES_MAX else "files"] += code_lines(path.read_text())
    assert {room: number for room, number in lines.items() if number > CODE_LINES_MAX[room]} == {}


def test_functions_are_short():
    assert too_long(*PACKAGES) == []


def test_the_other_rooms_load_no_torch(graph):
    """Also not through what they import in turn."""
    light = [module for module in graph if not prefix_of(module, LOADS_TORCH)]
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
        "rollouts.env imports torch at its top level",
        "rollouts.env.schema imports trio at its top level",
        "rollouts.types imports click at its top level",
        "rollouts.types imports rollouts.agent, whose room is above",
    ]
    whole = import_graph(house, whole=True)
    assert faults_in(whole) == [
        "rollouts.errors imports rollouts.agent, whose room is above",
        "rollouts.types imports rollouts.agent, whose room is above",
    ]
    assert cycles_in(whole) == [["rollouts.agent", "rollouts.types", "rollouts.agent"]]
    names = ", ".join("abcdefghijk")
    (house / "chat.py").write_text(f"def f({names}):\n" + "    pass\n" * 70)
    assert too_long(house) == ["chat.py:1 f: 71 lines", "chat.py:1 f: 11 parameters"]
