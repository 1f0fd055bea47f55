"""Every component of the core, of the plugins and of the templates passes; the command, its page, and packages."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import forks
import pytest
from rollouts_check import check_component
from rollouts_check.api import Options, check, checks_for, find
from rollouts_check.components import common
from rollouts_check.components.table import FAMILIES, PACKAGED, SIGNED
from rollouts_check.packages import Found
from rollouts_check.runner import Check
from rollouts_check.scaffold.packages import KIND_NAMES, render_package, write_package

from rollouts.cli import main
from rollouts.errors import UserError
from rollouts.plugins.index import HOOKS, installed_components

ROOT = Path(__file__).parents[3]
OF_PACKAGE = ("imports", "wheel")
OURS = {"rollouts-rl", *(f"rollouts-{path.parent.name}" for path in ROOT.glob("plugins/*/pyproject.toml"))}
APART = {"mlflow", "trackio", "wandb", "fsdp", "judge", "mcp"}
"""Components that change the process, write to a place of the user, or need a server, which their own tests have."""

NIGHTLY = {
    "bubblewrap",
    "hf",
    "ray",
    "subprocess",
}  # real sandboxes, models and workers: test_faults_of_objects.py has one
SKIPPED = {"bubblewrap", "docker", "openai", "podman", "ray", "sglang", "vllm"}  # a machine may lack what they need

SHIPPED = [ref for kind in FAMILIES if kind != HOOKS for ref in installed_components(kind) if ref.distribution in OURS]


def report_of(ref, **settings):
    return check(Found(ref.name, ref.qualified, kind=ref.kind), Options(skip=OF_PACKAGE, settings=settings))


def marked(refs):
    """The ordinary run has one component of each kind."""
    first = {ref.kind: ref for ref in reversed(refs) if ref.name not in NIGHTLY}
    for ref in refs:
        marks = [] if ref is first.get(ref.kind) else [pytest.mark.nightly]
        yield pytest.param(ref, marks=marks, id=f"{ref.kind}-{ref.name}")


def source_of(loader, folder):
    """Rows that a loader of the core can read."""
    import datasets

    rows = datasets.Dataset.from_list([{"prompt": f"{n}?", "response": str(n)} for n in range(5)])
    datasets.disable_progress_bars()
    file = folder / f"rows.{loader}"
    if loader == "arrow":
        rows.save_to_disk(file)
    elif loader in ("json", "jsonl"):
        rows.to_json(file, lines=loader == "jsonl")
    elif loader == "csv":
        rows.to_csv(file)
    else:
        file = folder / "rows.parquet"
        rows.to_parquet(file)
    return str(folder if loader == "hub" else file)


@pytest.mark.parametrize("ref", list(marked([each for each in SHIPPED if each.name not in APART])))
def test_a_shipped_component_passes(ref, tmp_path):
    is_loader = ref.kind == "datasets"
    report = report_of(ref, **({"data": {"source": source_of(ref.name, tmp_path)}} if is_loader else {}))
    assert report.failed == []
    assert sum(result.status == "passed" for result in report.results) >= 3 or ref.name in SKIPPED


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "settings", "passed"),
    [
        ("trackio", [], 9),
        ("wandb", ["--logger.wandb.mode", "offline"], 9),
        ("mlflow", [], 9),
        ("fsdp", [], 9),
    ],
)
def test_a_shipped_component_passes_in_a_process_of_its_own(name, settings, passed, tmp_path):
    """At least `passed` of its checks run on this machine; no check fails."""
    variables = {"HOME": str(tmp_path), "TRACKIO_DIR": str(tmp_path / "trackio"), "WANDB_SILENT": "true"}
    variables |= {"MLFLOW_TRACKING_URI": f"file://{tmp_path}/mlflow", "MLFLOW_ALLOW_FILE_STORE": "true"}
    command = [sys.executable, "-m", "rollouts", "check", name, "--skip", "wheel", "--skip", "imports", "--json"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables}
    done = forks.run([*command, *settings], timeout=300, cwd=tmp_path, env=environment)
    assert done.stdout.startswith("["), done.stdout + done.stderr
    results = json.JSONDecoder().raw_decode(done.stdout)[0][0]["results"]  # trackio writes a line at the end
    assert done.returncode == 0, [result for result in results if result["status"] == "failed"] + [done.stderr]
    assert sum(result["status"] == "passed" for result in results) >= passed


def test_all_shipped_components_are_tested():
    names = {ref.name for ref in SHIPPED}
    assert len(SHIPPED) >= 70 and names >= APART


# --- templates --------------------------------------------------------------------------------------------------------


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """A function that makes the package of a template."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def make(kind, name):
        write_package(render_package(kind, name), tmp_path / name)
        return tmp_path / name

    return make


@pytest.mark.parametrize(
    "word",
    [
        pytest.param(word, marks=pytest.mark.nightly if word == "worker" else ())
        for word in KIND_NAMES
        if word not in ("training", "sandbox")
    ],
)
def test_what_new_makes_passes(word, packages):
    folder = packages(KIND_NAMES[word], f"checked_{word}")
    (found,) = find(str(folder), Options())
    assert (found.label, found.kind) == (f"checked_{word}", KIND_NAMES[word])
    is_env = word == "environment"
    report = check(found, Options(skip=(*OF_PACKAGE, "same-seed", "other-process") if is_env else OF_PACKAGE, tasks=2))
    assert report.failed == [] and len(report.results) >= 3


# --- the page and the command -----------------------------------------------------------------------------------------


def test_the_page_has_every_check_of_every_kind():
    page = (ROOT / "docs" / "check.md").read_text(encoding="utf-8").partition("## The checks of other kinds\n")[2]
    head, *sections = re.split(r"^### .*$", page, flags=re.MULTILINE)
    shared = (*PACKAGED, *SIGNED, Check(common.unchanged), Check(common.repeatable))
    assert re.findall(r"^\| `([a-z-]+)` \| (.*) \|$", head, re.MULTILINE) == [(each.name, each.doc) for each in shared]
    documented = {}
    for section in sections:
        kinds = re.findall(r"`(\w+)`", re.search(r"^Kinds: (.*)\.$", section, re.MULTILINE)[1])
        rows = re.findall(r"^\| `([a-z-]+)` \| (.*?) \| (.*) \|$", section, re.MULTILINE)
        for kind in kinds:
            documented[kind] = [(name, doc) for name, of, doc in rows if of == "all" or f"`{kind}`" in of]
    own = {each.function for each in shared}
    assert documented == {
        kind: [(each.name, each.doc) for each in family.checks if each.function not in own]
        for kind, family in FAMILIES.items()
    }


def test_every_table_is_consistent():
    for kind, family in FAMILIES.items():
        names = [each.name for each in family.checks]
        assert len(set(names)) == len(names), kind
        for each in family.checks:
            assert set(each.needs) <= set(names) - {each.name}, (kind, each.name)
            assert each.doc.endswith("."), each.name


def test_the_command_finds_the_kind(capsys):
    assert main(["check", "ema", "--only", "updates", "--reference.decay", "0.5"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(
        "reference policy ema\nupdates              passed  changes the reference at 4 of 5 versions\n"
    )
    assert main(["check", "group_mean", "--kind", "aggregation", "--only", "values", "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert (report["kind"], report["name"], report["passed"]) == ("aggregation", "group_mean", True)
    assert main(["check", "mistral", "--only", "quick", "--badge"]) == 0
    assert capsys.readouterr().out.startswith("![rollouts check ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["group_mean"], ["is the name of several components", "rollouts check group_mean --kind aggregations"]),
        (["group_meen"], ["no component of any kind is named", "did you mean: group_mean"]),
        (["grpo", "--only", "gradints"], ["did you mean: gradient"]),
        (["grpo", "--only", "oracle"], ["there is no check of this name"]),
        (["grpo", "--loss.clip-hihg", "0.3"], ["did you mean: --loss.clip-high"]),
        (["any_success", "--loss.clip-high", "0.3"], ["the check of a filter takes --filter.NAME.SETTING"]),
        (["any_success", "--filter.any_success.treshold", "1"], ["did you mean: --filter.any-success.threshold"]),
        (["grpo", "--los.clip-high", "0.3"], ["the check of a loss takes --loss.SETTING"]),
        (["grpo", "--kind", "lose"], ["did you mean: loss"]),
        (["./mine.py:both"], ["fits several kinds", "rollouts check ./mine.py:both --kind advantages"]),
        (["./mine.py:none"], ["mine.py", "has no component 'none'", "it defines: both"]),
        (["./package", "--kind", "loss"], ["there is no component of the kind losses; it has mine (advantages)"]),
        (["./empty"], ["names no component", "rollouts new KIND NAME"]),
    ],
)
def test_wrong_usage_is_2(arguments, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def both(rewards):\n    return rewards\n")
    for name, text in (
        ("package", '[project.entry-points."rollouts.advantages"]\nmine = "mine:both"\n'),
        ("empty", ""),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "pyproject.toml").write_text(f"[project]\nname = 'x'\n{text}")
    assert main(["check", *arguments]) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in words), said


def test_an_object_of_a_file(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(
        "def reduced(logprobs, advantages, *, scale: float = 1.0):\n    return (logprobs * advantages * scale).mean()\n"
    )
    assert main(["check", f"{tmp_path / 'mine.py'}:reduced", "--skip", "imports", "--loss.scale", "2"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "values FAILED tried call it on the tokens of four rollouts seen the loss reduced returned a scalar" in said
    assert "mine.py, line 1: def reduced(" in said and "repeatable skipped it needs values, which failed" in said
    (tmp_path / "torn.py").write_text("def torn(logprobs)\n    return logprobs\n")
    assert main(["check", f"{tmp_path / 'torn.py'}:torn", "--kind", "loss"]) == 1
    assert main(["check", f"{tmp_path / 'torn.py'}:torn"]) == 1
    assert "torn.py, line 1" in " ".join(capsys.readouterr().out.split())


def test_a_wrong_signature_is_a_failed_check(tmp_path):
    (tmp_path / "mine.py").write_text("def mine(logprobs, advantage):\n    return logprobs\n")
    (found,) = find(f"{tmp_path / 'mine.py'}:mine", Options(), "loss")
    report = check(found, Options(skip=OF_PACKAGE))
    assert [result.name for result in report.failed] == ["definition"]
    assert "did you mean: advantages" in report.failed[0].seen
    assert {result.status for result in report.results if result.name != "definition"} == {"skipped"}


def test_a_setting_that_toml_cannot_hold(tmp_path):
    (tmp_path / "mine.py").write_text("def mine(trajectory, *, table={1: 2}):\n    return 0.0\n")
    report = check(Found("mine", f"{tmp_path / 'mine.py'}:mine", kind="rewards"), Options(skip=OF_PACKAGE))
    assert [result.name for result in report.failed] == ["settings"]
    assert "mine.py, line 1" in report.failed[0].seen


def test_a_reward_may_need_the_tasks_of_an_environment(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def mine(task, trajectory):\n    return float(str(task.info['exact']) in trajectory.last_text)\n")
    skipped = check(Found("mine", f"{file}:mine", kind="rewards"), Options(skip=OF_PACKAGE))
    assert skipped.failed == []
    values = next(result for result in skipped.results if result.name == "values")
    assert "KeyError: 'exact'" in values.remark and "--env NAME" in values.enable
    env = tmp_path / "env.py"
    env.write_text(
        "from rollouts import Task\n\n\nclass Numbers:\n    def tasks(self, split, rng):\n        while True:\n"
        "            n = rng.randrange(100)\n            yield Task(f'Say {n}.', answer=n, info={'exact': n})\n"
    )
    options = Options(skip=OF_PACKAGE, settings={"env": f"{env}:Numbers"})
    report = check(Found("mine", f"{file}:mine", kind="rewards"), options)
    assert report.failed == [] and all(result.status == "passed" for result in report.results)
    assert report.results[2].remark == "1 for a plain reply, 0 for a wrong reply" or "0 for" in report.results[2].remark


@pytest.mark.nightly
def test_a_folder_with_several_kinds_shares_its_wheel(packages, tmp_path, capsys, monkeypatch):
    """The wheel is built once, and a component whose module it lacks is found."""
    pytest.importorskip("hatchling")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    folder = packages("rewards", "several")
    about = (folder / "pyproject.toml").read_text()
    points = (
        '[project.entry-points."rollouts.filters"]\nsome = "rollouts_several.filters:some"\n'
        '[project.entry-points."rollouts"]\nmine = "rollouts_several.hooks"\n'
    )
    (folder / "pyproject.toml").write_text(about + points)
    module = folder / "rollouts_several"
    (module / "filters.py").write_text("def some(rewards):\n    return True\n")
    (module / "hooks.py").write_text(
        "from rollouts import hookimpl\n\n\n@hookimpl\ndef rollouts_run_end(summary):\n    pass\n"
    )
    built = []
    real = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: built.append("wheel" in a[0]) or real(*a, **k))
    assert main(["check", str(folder), "--json"]) == 0, capsys.readouterr().out
    reports = json.loads(capsys.readouterr().out)
    assert {(each["kind"], each["name"]) for each in reports} == {
        ("reward", "several"),
        ("filter", "some"),
        ("hook plugin", "mine"),
    }
    wheels = [result for each in reports for result in each["results"] if result["name"] == "wheel"]
    assert [result["status"] for result in wheels] == ["passed"] * 3 and sum(built) <= 2  # its own, and the base
    (folder / "pyproject.toml").write_text(f'{about}{points}\n[tool.hatch.build]\nexclude = ["filters.py"]\n')
    shutil.rmtree(module / "__pycache__", ignore_errors=True)
    assert main(["check", str(folder), "--only", "wheel", "--kind", "filter"]) == 1
    assert "No module named 'rollouts_several.filters'" in " ".join(capsys.readouterr().out.split())


@pytest.mark.nightly
def test_an_import_of_torch_is_found_where_it_is_not_needed(tmp_path):
    (tmp_path / "mine.py").write_text("import torch\n\n\ndef mine(trajectory):\n    return 0.0\n")
    report = check(Found("mine", f"{tmp_path / 'mine.py'}:mine", kind="rewards"), Options(only=("imports",)))
    assert "it imports torch" in report.failed[0].seen and "mine.py, line 1" in report.failed[0].seen
    loss = check(Found("mine", f"{tmp_path / 'mine.py'}:mine", kind="shapings"), Options(only=("imports",)))
    assert loss.failed == []


def test_checks_in_a_test_of_an_author():
    def mine(rewards):
        return rewards.mean()

    with pytest.raises(AssertionError, match=r"the advantage mine breaks the contract(.|\n)*values +FAILED"):
        check_component(mine, "advantage")
    assert check_component("grpo", "loss", only=["values"], clip_high=0.3).has_passed
    assert check_component("calculator", "environment", only=["tasks"], digits=1).kind == "environment"
    with pytest.raises(UserError, match="no kind 'lossy'"):
        check_component(mine, "lossy")
    with pytest.raises(UserError, match="there is no check of this name"):
        check_component(mine, "advantage", only=["gradient"])


def test_a_check_of_one_kind_leaves_out_the_others():
    found = Found("a", "a", kind="filters")
    assert checks_for(found, Options(only=("gradient",))) == []
    assert [each.name for each in checks_for(found, Options(only=("order", "gradient")))] == ["order"]


@pytest.mark.nightly
def test_the_plugin_of_pytest_checks_every_kind(tmp_path):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", "-k", "order or values"]
    names = ["--rollouts-check", "any_success", "--rollouts-check-kind", "filter", "--rollouts-check-skip", "imports"]
    done = forks.run([*command, *names], cwd=tmp_path, timeout=120)
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.nightly
def test_an_environment_is_checked_without_torch(tmp_path):
    """And a filter; a loss is skipped with the reason, where torch is not installed."""
    code = (
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('torch', 'transformers'):\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "from rollouts.cli import main\n"
        "assert main(['check', 'calculator', '--only', 'tasks', '--only', 'oracle']) == 0\n"
        "assert main(['check', 'nonzero_std', '--skip', 'imports', '--skip', 'wheel']) == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
