"""Every environment in the documentation and in the examples passes: no check raises a false alarm."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from rollouts_check.api import Options, check
from rollouts_check.environments.subject import Found

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SLOW = ("imports", "wheel", "same-seed")  # they start processes


def is_definition(node: ast.stmt) -> bool:
    """Whether a statement only defines something: a page may also start a run."""
    if isinstance(node, ast.Assign | ast.AnnAssign):
        return "rollouts.run" not in ast.unparse(node)
    return isinstance(node, ast.Import | ast.ImportFrom | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)


def written() -> dict[str, tuple[str, str]]:
    """Each environment by its place: the code around it, and the name of its class."""
    found = {}
    sources = [(path.name, path.read_text()) for path in sorted((ROOT / "examples").glob("*.py"))]
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for block in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            if not text[: block.start()].rstrip().endswith("<!-- no-run -->"):
                line = text[: block.start()].count("\n") + 1
                sources.append((f"{page.stem}_{line}", block[1]))
    for place, whole in sources:
        code = "\n".join(map(ast.unparse, filter(is_definition, ast.parse(whole).body)))
        for body in re.split(r"^(?=class )", code, flags=re.MULTILINE)[1:]:
            name = re.match(r"class (\w+)", body)[1]
            if "    def tasks(" in body and f"class {name}(MCP)" not in body:  # that one needs a server
                found[f"{place}-{name}"] = (code, name)
    return found


WRITTEN = written()


def test_there_are_environments():
    assert len(WRITTEN) >= 12


# The check cancels episodes at every await, and a request of httpx that is cancelled leaves a generator behind.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <async_generator object ByteStream")
@pytest.mark.parametrize(
    "place",
    [
        pytest.param(place, marks=() if place.startswith("README") or ".py-" in place else pytest.mark.nightly)
        for place in WRITTEN
    ],
)
def test_a_documented_environment_passes(place, tmp_path):
    code, name = WRITTEN[place]
    file = tmp_path / "documented.py"
    file.write_text(code)
    given = f"{file}:{name}"
    report = check(Found(given, given), Options(skip=SLOW, tasks=2))
    assert report.failed == []
    assert sum(result.status == "passed" for result in report.results) >= 10
