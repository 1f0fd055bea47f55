"""`rollouts new`: every package is built, installed and used for real, and says no word that the pages may not say."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import sys
import tomllib
from pathlib import Path

import forks
import pytest
from rollouts_check.scaffold.packages import KIND_NAMES, TEMPLATES, example_description, kind_of, render_package
from test_words import found_in

from rollouts.cli import main
from rollouts.errors import UserError
from rollouts.plugins.index import HOOKS, KINDS

ROOT = Path(__file__).parents[3]
NAMES = {word: f"made_{word}" for word in KIND_NAMES}
BUILD = """
import os, sys
from hatchling.build import build_wheel
for folder in sys.argv[2:]:
    os.chdir(folder)
    build_wheel(sys.argv[1])
"""


def python(*arguments, cwd, site=None, **more):
    environment = {**os.environ, "PYTHONPATH": str(site or ""), "COLUMNS": "200", "OMP_NUM_THREADS": "1", **more}
    done = forks.run([sys.executable, *arguments], cwd=cwd, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with one package of each kind, as the command makes them."""
    folder = tmp_path_factory.mktemp("made")
    for word, name in NAMES.items():
        assert main(["new", word, name, "--dest", str(folder), "--author", 'Ada "Countess" L\'Ovelace']) == 0
    return folder


@pytest.fixture(scope="module")
def site(made, tmp_path_factory):
    """The packages as pip would install them: their modules, and what pip reads of pyproject.toml."""
    target = tmp_path_factory.mktemp("site")
    for name in NAMES.values():
        project = tomllib.loads((made / name / "pyproject.toml").read_text())["project"]
        shutil.copytree(made / name / f"rollouts_{name}", target / f"rollouts_{name}")
        info = target / f"rollouts_{name}-{project['version']}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0.1.0\n")
        groups = project["entry-points"].items()
        lines = [line for group, points in groups for line in (f"[{group}]", *map(" = ".join, points.items()))]
        (info / "entry_points.txt").write_text("\n".join(lines))
    return target


@pytest.mark.nightly
def test_pip_installs_the_same(made, site, tmp_path):
    """The wheels that hatchling builds have the files and the entry points of `site`."""
    pytest.importorskip("hatchling")
    target, wheels, script = tmp_path / "site", tmp_path / "wheels", tmp_path / "build.py"
    script.write_text(BUILD)
    python(str(script), str(wheels), *(str(made / name) for name in NAMES.values()), cwd=made)
    files = [str(each) for each in sorted(wheels.glob("*.whl"))]
    assert len(files) == len(NAMES)
    python("-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", str(target), *files, cwd=made)
    for file in site.rglob("*"):
        same = target / file.relative_to(site)
        if file.suffix == ".py":
            assert same.read_text() == file.read_text()
        elif file.name == "entry_points.txt":
            assert sorted(filter(None, same.read_text().split("\n"))) == sorted(file.read_text().split("\n"))
        elif file.name == "METADATA":
            assert set(file.read_text().splitlines()[1:]) <= set(same.read_text().splitlines())


def test_every_kind_has_a_template():
    assert set(KIND_NAMES.values()) == {*KINDS, HOOKS}
    assert {path.name for path in TEMPLATES.iterdir()} == {*KIND_NAMES.values(), "shared"}
    for kind in KIND_NAMES.values():
        assert {path.name for path in (TEMPLATES / kind).iterdir()} == {"module.py.txt", "next.md.txt", "test.py.txt"}


def test_the_page_lists_every_kind():
    page = (ROOT / "docs" / "new.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", page.partition("## Every kind")[2], re.MULTILINE) == list(KIND_NAMES)
    package = render_package("environments", "shop")
    listed = re.search(r"rollouts-shop\n(.*?)\n\n", page, re.DOTALL)
    assert listed and listed[1].split() == list(package.files) and package.command in page


def test_every_package_is_found(site, tmp_path):
    listed = python("-m", "rollouts", "plugins", "list", cwd=tmp_path, site=site)
    rows = {tuple(line.split()[:4]) for line in listed.splitlines()}
    for word, name in NAMES.items():
        if kind_of(word) != HOOKS:
            assert (kind_of(word), name, f"rollouts-{name.replace('_', '-')}", "0.1.0") in rows


@pytest.mark.nightly
def test_every_package_passes_its_own_tests(made, site):
    tests = [str(made / name / "tests") for name in NAMES.values()]
    said = python("-m", "pytest", "-q", "-n", "0", "--import-mode=importlib", *tests, cwd=made, site=site)
    assert re.search(r"\d+ passed", said)


def test_the_code_is_clean(made):
    packages = [str(made / name) for name in NAMES.values()]
    python("-m", "ruff", "check", "--no-cache", *packages, cwd=made)
    modules = [str(made / name / f"rollouts_{name}") for name in NAMES.values()]
    python("-m", "ruff", "check", "--no-cache", "--config", str(ROOT / "pyproject.toml"), *modules, cwd=made)
    python("-m", "ruff", "format", "--check", "--no-cache", *packages, cwd=made)


@pytest.mark.nightly
def test_the_types_are_right(made):
    modules = [str(made / name / f"rollouts_{name}") for name in NAMES.values()]
    config = str(ROOT / "pyproject.toml")
    # With the settings, the paths and so the cache of `mypy` in the repository, which reads torch for half a minute.
    assert tomllib.loads(Path(config).read_text())["tool"]["mypy"]["strict"] is True
    cache = str(ROOT / ".mypy_cache")
    python("-m", "mypy", "--config-file", config, "--cache-dir", cache, *modules, cwd=made, MYPYPATH=str(ROOT))


def test_the_words_are_plain(made):
    for word, name in NAMES.items():
        for path in render_package(kind_of(word), name).files:
            text = (made / name / path).read_text()
            assert found_in(text) == [], path
            assert not re.search(r"\$\w", text), path


FILES_MAX, README_LINES_MAX = 8, 10


@pytest.mark.parametrize("kind", KIND_NAMES.values())
def test_the_readme_is_for_users_and_the_next_steps_are_for_the_author(kind):
    """README.md is short and has no instructions for the author. NEXT.md has all of them."""
    package = render_package(kind, "made")
    assert len(package.files) <= FILES_MAX
    readme, steps, about = (package.files[name] for name in ("README.md", "NEXT.md", "pyproject.toml"))
    assert len(readme.splitlines()) <= README_LINES_MAX
    assert "`pip install CLONE -e '.[test]'`" in steps and "CLONE" in package.files[".github/workflows/test.yml"]
    assert "pip install rollouts-made" in readme and package.command in readme
    assert [word for word in ("Make it yours", "Publish", "pytest", "twine") if word in readme] == []
    assert [word for word in ("## Make it yours", "## Publish", "pytest", "twine upload") if word not in steps] == []
    project = tomllib.loads(about)["project"]
    assert project["readme"] == "README.md" and project["description"] == example_description(kind)
    described = f"{example_description(kind)}."
    assert described in readme and package.files["rollouts_made/__init__.py"].startswith(f'"""{described}"""')
    assert "`description` in pyproject.toml" in readme and "`description` of `pyproject.toml`" in steps


def test_every_line_to_change_is_a_line_of_the_package():
    """The table of NEXT.md names code of the module, and the recipe for `tiny` is that of the page."""
    package = render_package("environments", "shop")
    steps, module = package.files["NEXT.md"], package.files["rollouts_shop/__init__.py"]
    rows = re.findall(r"^\| (.+?) \|", steps.partition("|---|")[2], re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(.+?)`", row)}
    assert {name for name in named if name not in module and name not in package.files} == {"description"}
    (recipe,) = re.findall(r"^ +(rollouts run .*--sft.steps 300.*)$", steps, re.MULTILINE)
    page = (ROOT / "docs" / "environments.md").read_text()
    assert recipe.partition("--mode")[2].partition(" --steps")[0] in page


def nightly(*row):
    return pytest.param(*row, marks=pytest.mark.nightly)


SMALL = "--steps 1 --prompts-per-step 2 --samples-per-prompt 4 --eval-tasks 4 --max-tokens 64 --out run".split()


@pytest.mark.slow
def test_one_run_with_a_component_of_nearly_every_kind(site, tmp_path):
    """All of them are used in two steps; the reference moves and the last reward counts."""
    words = (
        "tool reward loss advantage aggregation kl reference correction mix shaping filter sampler optimizer logger "
        "training"
    )
    chosen = [part for word in words.split() for part in (f"--{word}", NAMES[word])]
    settings = ["--env.items", "40", "--reference.steps", "1", f"--logger.{NAMES['logger']}.file", "table.csv"]
    run = [
        "run",
        "--env",
        NAMES["environment"],
        "--reward",
        "env:1",
        "--logger",
        "jsonl",
        *chosen,
        *settings,
        *SMALL,
        "--steps",
        "2",
    ]
    python("-m", "rollouts", *run, cwd=tmp_path, site=site)
    folder = tmp_path / "run"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 2
    assert {"correct", NAMES["reward"]} <= set(summary["evaluation"]["after"]["parts"])
    assert len((folder / "table.csv").read_text().splitlines()) == 2
    assert (folder / "best.txt").read_text().startswith("step ")  # the hooks need no flag
    config = (folder / "config.toml").read_text()
    assert all(NAMES[word] in config for word in ("environment", *words.split()))
    metric = python("-m", "rollouts", NAMES["command"], "run", cwd=tmp_path, site=site)
    assert re.fullmatch(r"step 1: reward/mean \S+\n", metric)


@pytest.mark.nightly
def test_demonstrations_then_reinforcement(site, tmp_path):
    chosen = ["--env", NAMES["environment"], "--mode", "sft+rl", "--sft.steps", "1"]
    python("-m", "rollouts", "run", *chosen, *SMALL, cwd=tmp_path, site=site)
    summary = json.loads((tmp_path / "run" / "rl" / "summary.json").read_text())
    assert summary["steps"] == 1 and "used_tool" in summary["evaluation"]["after"]["metrics"]


@pytest.mark.parametrize(
    "chosen",
    [
        nightly(f"--env {NAMES['environment']} --loss dpo --pairs {NAMES['pairs']}"),
        nightly(f"--env {NAMES['environment']} --loss rft --select {NAMES['select']}"),
        nightly(f"--env {NAMES['environment']} --tool-parser {NAMES['tool_parser']}"),
        f"--env easy={NAMES['environment']} --env hard={NAMES['environment']} "
        f"--env.hard.weight {NAMES['curriculum']} --env.hard.items 90",
    ],
)
def test_a_dry_run_of_the_other_kinds(chosen, site, tmp_path):
    said = python("-m", "rollouts", "run", *chosen.split(), "--dry-run", cwd=tmp_path, site=site)
    assert said.rstrip().splitlines()[-1].startswith("ok")


@pytest.mark.nightly
def test_an_evaluation_with_the_engine(site, tmp_path):
    chosen = ["--env", NAMES["environment"], "--inference", NAMES["inference"], "--model", "any"]
    python("-m", "rollouts", "eval", *chosen, "--eval-tasks", "4", "--out", "run", cwd=tmp_path, site=site)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["episodes"] == 4 and summary["parts"] == {"correct": 0.0}


@pytest.mark.nightly
def test_supervised_training_with_the_loader(made, site, tmp_path):
    (tmp_path / "cards.txt").write_text("2 + 2? = 4\n3 + 3? = 6\n")
    data = ["--data", f"{NAMES['dataset']}:cards.txt", "--data.separator", "="]
    small = "--steps 1 --prompts-per-step 2 --out run".split()
    said = python(
        "-m", "rollouts", "sft", *data, *small, cwd=tmp_path, site=site, ROLLOUTS_CACHE=str(tmp_path / "cache")
    )
    assert "2 conversations from prompt and response" in said
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 1


@pytest.mark.parametrize(
    ("word", "kind"),
    [
        *((word, "environments") for word in ("environment", "env", "Environment", "environments")),
        *((word, "datasets") for word in ("dataset", "data", "datasets")),
    ],
)
def test_a_kind_has_several_words(word, kind):
    assert kind_of(word) == kind


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["enviroments", "x"], ["no kind 'enviroments'", "did you mean: environment?"]),
        (["datasett", "x"], ["no kind 'datasett'", "did you mean: dataset?"]),
        (["env", "my-env"], ["'my-env' cannot be", "type: my_env"]),
        (["env", "MyEnv"], ["type: my_env"]),
        (["env", "rollouts-cafe"], ["type: cafe"]),
        (["env", "3d"], ["type: my_3d"]),
        (["env", "class"], ["type: my_class"]),
        (["env", ""], ["type: my_name"]),
        (["env", "rl"], ["rollouts-rl", "type: my_rl"]),
        (["env", "task"], ["uses the name task already", "type: my_task"]),
        (["env", "here"], ["here exists already", "--dest"]),
        (["env", "x", "--dest", "file"], ["cannot be written"]),
    ],
)
def test_mistakes_say_what_to_type(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "file").write_text("")
    assert main(["new", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and all(word in said for word in words), said
    assert {path.name for path in tmp_path.iterdir()} == {"here", "file"}


def test_a_suggested_name_is_accepted():
    """The words of every template, which the names may not repeat, lead to a name that works."""
    refused = []
    for kind, name in itertools.product(
        KIND_NAMES.values(), ["rl", "test", "trajectory", "rollouts_x", "reward", "import"]
    ):
        try:
            render_package(kind, name)
        except UserError as error:
            refused.append(name)
            render_package(kind, str(error).rpartition("type: ")[2])
    assert {"rl", "trajectory", "import"} <= set(refused)


def test_a_name_that_is_installed_gives_a_note(tmp_path, capsys):
    assert main(["new", "loss", "grpo", "--dest", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert "note: rollouts-rl/grpo is installed and has the same name" in said.err
    assert "type rollouts-grpo/grpo" in said.err
