"""`rollouts plugins list | show | doctor`."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest

from rollouts.cli import main
from rollouts.plugins.index import Scan, scan
from rollouts.plugins.manager import Diagnosis


def test_list_shows_what_is_installed_and_imports_nothing(acme, capsys):
    assert main(["plugins", "list"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["kind", "name", "distribution", "version", "description"]
    assert ["environments", "acme_env", "Acme_Parts", "1.2", "An", "environment", "of", "Acme"] in lines
    assert "acme_parts" not in sys.modules


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("import os, a_module_that_is_missing.x\n", "line 1: there is no module a_module_that_is_missing.x"),
        ("from __future__ import annotations\nfrom no_such import broken\n", "line 2: there is no module no_such"),
        ("def broken(rewards)\n", "line 1: expected ':'"),
        ("def whole(rewards): ...\n", "acme_broken has no broken"),
        (None, "there is no module acme_broken"),
        ("try:\n    import no_such\nexcept ImportError:\n    pass\ndef broken(rewards):\n    'Fine'\n", ""),
        ("def __getattr__(name): ...\n", ""),
        ('"""Doc."""\n__all__ = ["broken"]\nimport no_such\n', "line 3: there is no module no_such"),
        ("import sys\nsys.path.insert(0, 'vendored')\nimport no_such\ndef broken(rewards):\n    'Fine'\n", ""),
        ("import acme_broken.paths\nimport no_such\ndef broken(rewards):\n    'Fine'\n", ""),
        ("import __main__\nfrom __main__ import thing\ndef broken(rewards):\n    'Fine'\n", ""),
        ("import sys\nsetattr(sys.modules[__name__], 'bro' + 'ken', len)\n", ""),
    ],
)
def test_list_shows_what_will_not_import_as_far_as_its_source_shows_it(acme, capsys, source, fault):
    (acme / "acme_broken.py").unlink() if source is None else (acme / "acme_broken.py").write_text(source)
    assert main(["plugins", "list", "--kind", "rewards"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    (line,) = (line for line in lines if line.split()[1] == "broken")
    assert line.endswith(fault) and (("broken: " in line) == bool(fault))
    assert last == "nothing was imported; to check all, type: rollouts plugins doctor"


def test_a_package_that_changes_where_its_modules_are_found_is_not_called_broken(acme, capsys):
    entry_points = acme / "acme_parts-1.2.dist-info" / "entry_points.txt"
    entry_points.write_text(entry_points.read_text().replace("acme_broken:broken", "acme_moved.inner:broken"))
    (acme / "acme_moved").mkdir()
    (acme / "acme_moved" / "inner.py").write_text("import no_such\ndef broken(rewards):\n    'Fine'\n")
    own = acme / "acme_moved" / "__init__.py"
    for source, fault in (
        ('"""Doc."""\n', "there is no module no_such"),
        ("import sys\nsys.path.append('vendored')\n", ""),
        ("from acme_moved import paths\n", ""),
    ):
        own.write_text(source)
        assert main(["plugins", "list", "--kind", "rewards"]) == 0
        (line,) = (each for each in capsys.readouterr().out.splitlines() if each.split()[1:2] == ["broken"])
        assert line.endswith(fault) and (("broken: " in line) == bool(fault))
    (acme / "acme_moved" / "inner.py").unlink()
    own.write_text("__path__.append('elsewhere')\n")
    assert main(["plugins", "list", "--kind", "rewards"]) == 0
    assert "there is no module" not in capsys.readouterr().out


DOES_NOT_RETURN = {
    "hangs": ("import time\ntime.sleep(10**6)\ndef broken(rewards): ...\n", "it was still being imported after 1 s;"),
    "spins": (
        "while True:\n    try:\n        1 / 0\n    except Exception:\n        pass\n",
        "it was still being imported after 2 s of CPU time;",
    ),
    "ends": ("import os\nos._exit(0)\n", "it called os._exit(0) ("),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", ["ends", "hangs", pytest.param("spins", marks=pytest.mark.nightly)])
def test_an_import_that_does_not_return_is_named(acme, capsys, monkeypatch, what):
    pytest.importorskip("torch")  # the run imports it, which may take longer than the limit
    monkeypatch.setenv("ROLLOUTS_IMPORT_SECONDS", "0.2" if what == "spins" else "1")
    source, fault = DOES_NOT_RETURN[what]
    (acme / "acme_broken.py").write_text(source)
    before = os._exit, signal.getsignal(signal.SIGALRM)
    run = [["run", "--env", "acme_env", "--reward", "broken", "--dry-run"]] if what == "ends" else []
    for command in (["plugins", "show", "broken"], *run):
        assert main(command) == 2
        error = capsys.readouterr().err
        assert "Acme_Parts 1.2: its reward 'broken' (acme_broken:broken) does not import\n" in error
        assert fault in error and f"{acme / 'acme_broken.py'}, line " in error
    assert (os._exit, signal.getsignal(signal.SIGALRM)) == before and signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_doctor_waits_once_for_a_distribution_and_checks_the_others(acme, capsys, monkeypatch):
    monkeypatch.setenv("ROLLOUTS_IMPORT_SECONDS", "0.3")
    points = "".join(f"slow{number} = acme_broken:slow{number}\n" for number in range(5))
    with (acme / "acme_parts-1.2.dist-info" / "entry_points.txt").open("a") as file:
        file.write(f"[rollouts.filters]\n{points}")
    (acme / "acme_broken.py").write_text(DOES_NOT_RETURN["hangs"][0])
    core = [ref for ref in scan().components if ref.distribution == "rollouts-rl"]
    mine = [ref for ref in scan().components if ref.distribution == "Acme_Parts"]
    monkeypatch.setattr("rollouts.plugins.index.scan", lambda: Scan([*mine, *core[:3]], [], []))
    begun = time.monotonic()
    assert main(["plugins", "doctor"]) == 1
    assert time.monotonic() - begun < 5
    assert capsys.readouterr().out.count("it was still being imported") == 1


def test_a_module_may_set_the_timer_itself(acme):
    source = "import signal\nsignal.signal(signal.SIGALRM, signal.SIG_IGN)\nsignal.alarm(600)\n"
    (acme / "acme_broken.py").write_text(f"{source}def broken(trajectory): ...\n")
    try:
        assert main(["plugins", "show", "broken"]) == 0
        assert signal.getsignal(signal.SIGALRM) is signal.SIG_IGN and signal.getitimer(signal.ITIMER_REAL)[0] > 500
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def test_an_import_with_progress_has_time(acme, capsys, monkeypatch):
    """It takes longer than the limit, and imports a module again and again."""
    monkeypatch.setenv("ROLLOUTS_IMPORT_SECONDS", "1")
    source = "import sys, time\nfor n in range(6):\n    time.sleep(0.2)\n    sys.modules[f'acme_{n}'] = sys\n"
    (acme / "acme_broken.py").write_text(f"{source}def broken(trajectory): ...\n")
    assert main(["plugins", "show", "broken"]) == 0
    for number in range(6):
        del sys.modules[f"acme_{number}"]


def test_an_import_that_computes_has_time(acme, monkeypatch):
    """It takes longer than the limit, and imports no module."""
    monkeypatch.setenv("ROLLOUTS_IMPORT_SECONDS", "0.2")
    source = "import time\nend = time.process_time() + 0.4\nwhile time.process_time() < end: ...\n"
    (acme / "acme_broken.py").write_text(f"{source}def broken(trajectory): ...\n")
    assert main(["plugins", "show", "broken"]) == 0


def test_every_component_of_the_core_has_a_description(capsys):
    from rollouts_check.descriptions import description

    from rollouts.plugins.index import installed_components

    own = [ref for ref in installed_components() if ref.distribution == "rollouts-rl"]
    assert len(own) > 50
    assert [ref.qualified for ref in own if not description(ref)] == []


def test_a_terminal_cuts_the_description_to_its_width(acme, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "70")
    assert main(["plugins", "list", "--kind", "kl"]) == 0
    whole = capsys.readouterr().out
    assert max(map(len, whole.splitlines())) > 80
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert main(["plugins", "list", "--kind", "kl"]) == 0
    *lines, _ = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) == 70
    assert lines[-1].endswith("…")


def test_list_of_one_kind(acme, capsys):
    assert main(["plugins", "list", "--kind", "environments", "--all"]) == 0
    out = capsys.readouterr().out
    assert "acme_env" in out
    assert "brevity" not in out
    assert main(["plugins", "list", "--kind", "enviroments"]) == 2
    assert "did you mean: environments?" in capsys.readouterr().err


def test_show_an_environment(acme, capsys):
    assert main(["plugins", "show", "acme_env"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("environment acme_env\n  distribution  Acme_Parts 1.2")
    assert "An environment of Acme." in out
    assert "  --env.digits     a whole number  default 2           How many digits." in out


def test_show_a_reward(acme, capsys):
    assert main(["plugins", "show", "Acme_Parts/brevity"]) == 0
    out = capsys.readouterr().out
    assert "receives\n  trajectory" in out
    assert "--reward.ALIAS.target-tokens  a whole number  default 200" in out
    assert "--reward.ALIAS.scale" in out
    assert "no default" in out


def test_show_a_kl_estimator_with_the_settings_of_every_one(capsys):
    assert main(["plugins", "show", "rk3_loss"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("KL estimator rk3_loss")
    for flag in ("--kl.coef", "--kl.threshold", "--kl.target", "--kl.horizon"):
        assert flag in out


def test_show_an_algorithm_with_its_coefficients(acme, capsys):
    assert main(["plugins", "show", "dapo"]) == 0
    out = capsys.readouterr().out
    assert "--loss.clip-high     a number          default 0.28" in out
    assert "--loss.entropy-coef  a number          default 0.0   the coefficient of the entropy term" in out
    assert main(["plugins", "show", "acme_loss"]) == 0
    assert "--loss.entropy-coef" in capsys.readouterr().out  # the usual term beside a bare loss


def test_show_the_formula_and_the_parts_of_an_algorithm(capsys):
    assert main(["plugins", "show", "dapo"]) == 0
    out = capsys.readouterr().out
    assert "DAPO (Yu et al. 2025): GRPO with a higher upper clip" in out  # the text behind its assignment
    assert "ppo_clip(clip_high=0.28); advantage group_norm; aggregation token_mean; shaping overlong" in out
    parts = {" ".join(line.split()[:2]): line for line in out.partition("parts\n")[2].splitlines() if line}
    assert "-min(rA, clip(r, 1-low, 1+high) A)" in parts["term ppo_clip"]
    assert "(R - mean) / (std + eps)" in parts["advantage group_norm"]
    assert "D = sum of the mask" in parts["aggregation token_mean"]
    assert "accuracy_std" in parts["filter accuracy_std"]
    assert "recipes.py, line " in out
    assert main(["plugins", "show", "dpo"]) == 0
    assert "advantage    group_norm" not in capsys.readouterr().out  # pairs leave it unused


def test_show_what_several_kinds_have(acme, capsys):
    assert main(["plugins", "show", "twice"]) == 2
    assert "rollouts plugins show twice --kind rewards" in capsys.readouterr().err
    assert main(["plugins", "show", "twice", "--kind", "env"]) == 0
    assert capsys.readouterr().out.startswith("environment twice")


PARTS = '''
from typing import Literal

from rollouts import metric, reward, tool


class Shop:
    def tasks(self, split, rng):
        yield "?"

    @tool
    def buy(self, item: Literal["tea", "cake"], count: int = 1) -> str:
        """Buy an item. Then pay."""

    @reward(weight=0.5)
    def cheap(self, trajectory):
        return 1.0

    @metric
    def bought(self, trajectory):
        """How many items."""


class Log:
    def log(self, metrics, step): ...


def short(trajectory, *, n: int = 3): ...
def several(rewards): ...
def search(query: str): ...


nothing = 3
'''


def test_the_kind_of_what_is_in_a_file_is_found(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text(PARTS)
    for name, kind in {"Shop": "environment", "Log": "logger", "short": "reward", "search": "tool"}.items():
        assert main(["plugins", "show", f"{file}:{name}"]) == 0
        assert capsys.readouterr().out.startswith(f"{kind} {name}\n")
    assert main(["plugins", "show", f"{file}:several"]) == 2
    error = capsys.readouterr().err
    assert f"fits several kinds of components\ntype one of:\n  rollouts plugins show {file}:several --kind adv" in error
    assert "--kind filters\n" in error and "--kind rewards" not in error
    assert main(["plugins", "show", f"{file}:several", "--kind", "filters"]) == 0
    assert capsys.readouterr().out.startswith("filter several\n")
    assert main(["plugins", "show", f"{file}:nothing"]) == 2
    assert "fits no kind of component\ntype: --kind KIND" in capsys.readouterr().err
    assert main(["plugins", "show", f"{file}:Nope"]) == 2
    error = capsys.readouterr().err
    assert f"{file} has no component 'Nope'\n" in error and "it defines: Shop, Log, short, several, search\n" in error
    assert "the kinds of components: environments, rewards" in error
    assert main(["plugins", "show", f"{tmp_path}/absent.py:Nope"]) == 2
    assert f"component '{tmp_path}/absent.py:Nope': there is no file" in capsys.readouterr().err


def test_show_what_an_environment_offers_and_how_to_name_a_setting(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(PARTS)
    assert main(["plugins", "show", "./mine.py:Shop"]) == 0
    assert capsys.readouterr().out.endswith(
        """
tools
  buy(item: cake|tea, [count: integer])  Buy an item

rewards
  cheap × 0.5

metrics
  bought  How many items

settings
  none
"""
    )
    assert main(["plugins", "show", "./mine.py:short"]) == 0
    assert capsys.readouterr().out.endswith(
        """
  ALIAS is its name, short: --reward ./mine.py:short --reward.short.n 3
  or a name that you choose: --reward mine=./mine.py:short --reward.mine.n 3
"""
    )


def test_show_what_does_not_exist_or_import(acme, capsys):
    assert main(["plugins", "show", "acme_nev"]) == 2
    assert "did you mean: acme_env" in capsys.readouterr().err
    assert main(["plugins", "show", "broken"]) == 2
    assert "Acme_Parts 1.2" in capsys.readouterr().err


def test_doctor_names_what_is_wrong(acme, capsys, monkeypatch):
    mine = [ref for ref in scan().components if ref.distribution == "Acme_Parts" or ref.name == "calculator"]
    monkeypatch.setattr("rollouts.plugins.index.scan", lambda: Scan(mine, [], []))
    assert main(["plugins", "doctor"]) == 1
    out = capsys.readouterr().out
    assert "a_module_that_is_missing" in out
    assert "distributions: " in out.splitlines()[-1]


def test_doctor_is_content_when_all_is_well(acme, capsys, monkeypatch):
    monkeypatch.setattr("rollouts.plugins.manager.PluginManager.doctor", lambda self: Diagnosis([], {}))
    assert main(["plugins", "doctor"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("all well")


def test_show_a_command_without_the_marks_of_its_help(capsys):
    assert main(["plugins", "show", "check"]) == 0
    out = capsys.readouterr().out
    assert "\b" not in out and "  Examples:\n" in out
