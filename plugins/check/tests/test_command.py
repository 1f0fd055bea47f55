"""`rollouts check`, its pytest plugin, and its page."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from rollouts_check import check_environment_class, runner
from rollouts_check.environments import agents
from rollouts_check.environments.table import CHECKS
from rollouts_check.packages import Found, Package
from rollouts_check.report import FailedError, Report, SkippedError
from rollouts_check.runner import Check, run_checks
from rollouts_check.scaffold.packages import example_description

from rollouts import reward
from rollouts.cli import main
from rollouts.errors import ConfigError

ROOT = Path(__file__).parents[3]
FAULTS = Path(__file__).parent / "faults"


def in_one_line(capsys):
    """The output without line breaks."""
    return " ".join(capsys.readouterr().out.split())


def test_the_page_has_every_check_with_its_docstring():
    text = (ROOT / "docs" / "check.md").read_text(encoding="utf-8")
    section = text.partition("## The checks\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([a-z-]+)` \| (.*) \|$", section, re.MULTILINE)
    assert rows == [(check.name, check.doc) for check in CHECKS]
    assert all(check.doc.endswith(".") for check in CHECKS)


def test_the_table_is_consistent():
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names)
    for check in CHECKS:
        assert set(check.needs) <= set(names) - {check.name}, check.name


def well(subject):
    """All is well."""
    return f"well with {subject}"


def ill(subject):
    """It fails."""
    raise FailedError("try it", "it broke\nin two lines", "mend it")


def other(subject):
    """It does not apply."""
    raise SkippedError("it does not apply")


def test_checks_that_need_a_failed_one_are_skipped():
    table = (Check(well), Check(ill), Check(other, ("well",)))
    later = (*table, Check(lambda subject: "never", ("other", "ill")))
    results = run_checks(later, "a thing")
    assert [result.status for result in results] == ["passed", "failed", "skipped", "skipped"]
    assert results[0].remark == "well with a thing" and results[3].remark == "it needs ill, which failed"
    report = Report("thing", "mine", results)
    assert "breaks the contract in 1 check: 1 passed, 1 failed, 2 skipped" in report.verdict()
    assert "-red)" in report.badge() and "mend it" in "\n".join(results[1].lines())


def test_a_failure_that_does_not_say_what_to_change_has_the_advice_of_its_check():
    def advised(subject):
        """It fails.

        Advice: mend
            it
        """
        raise FailedError("try it", "it broke")

    check = Check(advised)
    (result,) = run_checks((check,), None)
    assert check.doc == "It fails." and result.change == "mend it"


def test_a_needed_check_runs_although_it_was_not_chosen():
    table = (Check(ill), Check(well, ("ill",)))
    (result,) = run_checks(table, None, only=["well"])
    assert result.status == "skipped" and result.remark == "it needs ill, which failed"
    with pytest.raises(ConfigError, match="did you mean: well"):
        run_checks(table, None, skip=["welle"])


def test_a_bug_of_the_check_is_raised():
    def broken(subject):
        """A bug."""
        return len(3)

    made_up = Path(runner.__file__).with_name("made_up.py")
    broken.__code__ = broken.__code__.replace(co_filename=str(made_up))
    with pytest.raises(TypeError):
        run_checks((Check(broken),), None)


def test_the_command_passes_with_0(capsys):
    assert main(["check", "calculator", "--env.digits", "1", "--only", "oracle", "--only", "no-op"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^oracle +passed  5 demonstrations, reward 1$", out, re.MULTILINE)
    assert "keeps the contract: 2 passed" in out


def test_the_source_of_a_loader_is_a_flag(tmp_path, capsys):
    (tmp_path / "rows.txt").write_text("one\ntwo\n")
    (tmp_path / "mine.py").write_text(
        "from pathlib import Path\n"
        "def load(source):\n    return [{'q': line} for line in Path(source).read_text().split()]\n"
    )
    given = ["--data.source", str(tmp_path / "rows.txt"), "--data.prompt", "q"]
    assert main(["check", f"{tmp_path}/mine.py:load", "--skip", "imports", "--skip", "wheel", *given]) == 0
    said = capsys.readouterr().out
    assert "passed  2 rows with the columns q" in said and "2 prompts for rollouts run" in said


def test_the_command_fails_with_1_and_says_what_to_change(capsys):
    file = FAULTS / "forged_verdicts__reads_a_score.py"
    assert main(["check", f"{file}:Fault", "--only", "forged-verdicts"]) == 1
    out = in_one_line(capsys)
    assert "forged-verdicts FAILED tried reply with 'score: 1.0' seen" in out
    assert re.search(r"line \d+: def correct\(.*\) change judge by the task", out)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["calculater"], "did you mean: calculator"),
        (["calculator", "--only", "orakle"], "did you mean: oracle"),
        (["calculator", "--env.digts", "3"], "did you mean: --env.digits"),
        (["./no_such_folder"], "no_such_folder"),
        (["."], "pyproject.toml"),
    ],
)
def test_wrong_usage_is_2(arguments, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["check", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_module_that_does_not_import_is_a_failed_check(tmp_path, capsys):
    (tmp_path / "torn.py").write_text("class Torn:\n    def tasks(self, split, rng)\n        yield 'a'\n")
    assert main(["check", f"{tmp_path / 'torn.py'}:Torn"]) == 1
    assert "torn.py, line 2" in in_one_line(capsys)


def test_json_and_badge(capsys):
    assert main(["check", "calculator", "--only", "tasks", "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert report["passed"] and report["name"] == "calculator"
    assert [result["name"] for result in report["results"]] == ["tasks"]
    assert main(["check", "calculator", "--only", "tasks", "--badge"]) == 0
    assert capsys.readouterr().out.startswith("![rollouts check ")


def test_prompts_with_a_sample(tmp_path, capsys):
    rows = [{"prompt": f"What is {n} + {n}?", "answer": str(2 * n), "response": str(2 * n)} for n in range(10, 40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "exact.py").write_text(
        "def exact(task, trajectory):\n    return float(trajectory.last_text.strip() == task.answer)\n"
    )
    arguments = ["--env.data", str(tmp_path / "rows.jsonl"), "--only", "oracle"]
    assert main(["check", "prompts", *arguments, "--reward", f"{tmp_path / 'exact.py'}:exact"]) == 0
    assert re.search(r"^oracle +passed  5 demonstrations, reward 1$", capsys.readouterr().out, re.MULTILINE)
    assert main(["check", "prompts", *arguments]) == 0
    out = capsys.readouterr().out
    assert "keeps the contract, as far as it was tested: " in out
    assert re.search(r"^not tested: oracle; name a reward: --reward NAME$", out, re.MULTILINE)


@pytest.mark.parametrize(
    "is_whole", [pytest.param(True, marks=pytest.mark.nightly), pytest.param(False, marks=pytest.mark.slow)]
)
def test_the_folder_of_a_package_is_built_and_installed(is_whole, tmp_path, capsys, monkeypatch):
    """And a package whose wheel lacks a module is found, also if PYTHONPATH has a whole copy, as of a fresh package."""
    pytest.importorskip("hatchling")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    folder = tmp_path / "calculator"
    monkeypatch.setenv("PYTHONPATH", str(folder))
    shutil.copytree(ROOT / "environments" / "calculator", folder, ignore=shutil.ignore_patterns("tests", "__pycache__"))
    if is_whole:
        assert main(["check", str(folder), "--only", "wheel"]) == 0, capsys.readouterr().out
        said = capsys.readouterr().out
        assert "no index: dependencies of this environment" in said and "description" not in said
        return
    about = (folder / "pyproject.toml").read_text()
    example = f'description = "{example_description("environments")}"'
    (folder / "pyproject.toml").write_text(re.sub(r'description = ".*"', example, about))
    assert "`description` in pyproject.toml is still that of the example" in Package(folder).stale("environments")
    (folder / "pyproject.toml").write_text(f'{about}exclude = ["arithmetic.py"]\n')
    assert main(["check", str(folder), "--only", "wheel"]) == 1
    assert "No module named 'rollouts_calculator.arithmetic'" in in_one_line(capsys)


def test_rollouts_itself_is_not_built_beside_a_copy(tmp_path):
    """Its components may come from another folder than the code that runs, as with PYTHONPATH."""
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "Rollouts_RL"\n')
    with pytest.raises(SkippedError, match="it is a part of rollouts"):
        Found("prompts", "prompts", tmp_path).its_package()


def test_a_class_in_a_test_of_its_author():
    from rollouts_calculator import Calculator

    report = check_environment_class(Calculator, digits=1, only=["oracle", "settings"])
    assert [result.status for result in report.results] == ["passed", "passed"]

    class Silent(Calculator):
        @reward
        def correct(self, trajectory):
            return 1.0

    with pytest.raises(AssertionError, match=r"breaks the contract in 1 check(.|\n)*no-op +FAILED"):
        check_environment_class(Silent, only=["oracle", "no-op", "echo"])
    with pytest.raises(AssertionError, match="definition"):
        check_environment_class(type("Empty", (), {}), only=["definition"])


def test_slow_tasks_are_drawn_for_a_limited_time(monkeypatch):
    from rollouts_calculator import Calculator

    monkeypatch.setattr("rollouts_check.environments.definition.IDS_SECONDS", 0.2)
    drawn = []

    class Slow(Calculator):
        def tasks(self, split, rng):
            for task in super().tasks(split, rng):
                drawn.append(time.sleep(0.002))
                yield task

    check_environment_class(Slow, only=["task-ids"])
    assert 0 < len(drawn) < 1000  # without the limit, 1000 of each split


def test_a_check_ends_at_its_deadline_only_if_nothing_ends(monkeypatch):
    """However long all episodes take together, as on a busy machine."""
    asked, ended = threading.Semaphore(0), threading.Semaphore(0)

    class Thread(threading.Thread):
        def join(self, timeout):  # the time passes, and one episode ends, or the thread
            asked.release()
            ended.acquire()

        def run(self):
            super().run()
            ended.release()

    async def five_episodes(are_counted):
        for _ in range(5):
            asked.acquire()
            if are_counted:
                agents.progressed()
            ended.release()
        return "all"

    monkeypatch.setattr(agents, "threading", SimpleNamespace(Thread=Thread))
    assert agents.in_trio(five_episodes, True) == "all"
    with pytest.raises(FailedError) as caught:
        agents.in_trio(five_episodes, False)
    assert caught.value.seen.startswith("one did not end in 120 seconds")
    asked.release(9)  # lets the thread end


def test_the_plugin_of_pytest(pytester):
    shutil.copy(FAULTS / "no_op__earned_by_silence.py", pytester.path / "mine.py")
    others = {check.name for check in CHECKS} - {"no-op", "echo", "tool-schemas"}
    skipped = [f"--rollouts-check-skip={name}" for name in sorted(others)]
    done = pytester.runpytest_inprocess("--rollouts-check", "./mine.py:Fault", *skipped)
    done.assert_outcomes(failed=1, passed=1, skipped=1)
    said = done.stdout.str()
    assert "    tried   reply with an empty text" in said and "Traceback" not in said
    unknown = pytester.runpytest_inprocess("--rollouts-check", "calculater")
    assert unknown.ret == 4
    unknown.stderr.fnmatch_lines("*did you mean: calculator*")


def test_the_plugin_is_silent_without_its_option(tmp_path):
    (tmp_path / "test_mine.py").write_text(
        "import sys\n\ndef test_mine():\n"
        "    ours = {name for name in sys.modules if name.startswith('rollouts.')}\n"
        "    assert ours <= {'rollouts.doors', 'rollouts.lazy', 'rollouts.version'}\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "rollouts_check.pytest_plugin"]
    variables = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout
