"""`./my_env.py:Calculator` works without installing; each way it can fail has its own message."""

from __future__ import annotations

import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from types import SimpleNamespace

import pytest

from rollouts.errors import BrokenPluginError, UnknownComponentError
from rollouts.plugins.index import find_component
from rollouts.plugins.loading import load_component

SOURCE = """
from __future__ import annotations
from dataclasses import dataclass
import random

@dataclass
class Calculator:
    digits: int = 2

def brevity(trajectory): return 1.0
_private = 1
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A working folder with a file in it; sys.path and sys.modules are put back."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "my_env.py").write_text(SOURCE)
    (tmp_path / "sub" / "my_env.py").write_text(SOURCE.replace("= 2", "= 7"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_relative_bare_absolute_and_folder(here):
    relative = find_component("environments", "./my_env.py:Calculator")
    assert relative.name == "Calculator" and relative.distribution == relative.version == ""
    assert relative.qualified == relative.value == f"{here / 'my_env.py'}:Calculator"
    assert not [name for name in sys.modules if name.startswith("rollouts_file_my_env_")], "finding runs nothing"
    assert find_component("environments", "my_env.py:Calculator") == relative
    assert find_component("environments", f"{here}/my_env.py:Calculator") == relative
    assert find_component("environments", relative.qualified) == relative
    assert load_component(relative)().digits == 2
    assert load_component(find_component("environments", "sub/my_env.py:Calculator"))().digits == 7


def test_dataclasses_pickling_and_one_module_for_one_file():
    calculator = load_component(find_component("environments", "./my_env.py:Calculator"))
    assert [field.name for field in fields(calculator)] == ["digits"]
    assert pickle.loads(pickle.dumps(calculator(3))) == calculator(3)
    reward = load_component(find_component("rewards", "./my_env.py:brevity"))
    assert reward.__module__ == calculator.__module__
    assert load_component(find_component("environments", "./my_env.py:Calculator")) is calculator


def test_an_edited_file_is_loaded_again(here):
    ref = find_component("environments", "./my_env.py:Calculator")
    first = load_component(ref)
    (here / "my_env.py").write_text(SOURCE.replace("= 2", "= 5"))
    assert load_component(ref)().digits == 5 and first().digits == 2


def test_neighbors_can_be_imported_and_shadow_nothing(here):
    (here / "neighbor_zz.py").write_text("answer = 42")
    (here / "json.py").write_text("raise RuntimeError('shadowed')")
    (here / "uses.py").write_text("import json, neighbor_zz\ndef f(trajectory): return neighbor_zz.answer")
    assert load_component(find_component("rewards", "./uses.py:f"))(None) == 42
    assert sys.path[-1] == str(here)


def test_missing_file():
    with pytest.raises(UnknownComponentError) as caught:
        find_component("environments", "./my_emv.py:Calculator")
    assert "there is no file './my_emv.py'" in str(caught.value)
    assert "did you mean: my_env.py:Calculator?" in str(caught.value)
    with pytest.raises(UnknownComponentError, match=r"no file 'nowhere/x.py'"):
        find_component("environments", "nowhere/x.py:X")


@pytest.mark.parametrize(
    "name", ["./my_env.py", "./my_env.py:0.5", "./my_env:Calculator", "my_env.py:", "../calculator"]
)
def test_not_written_as_a_file_and_a_name(name):
    with pytest.raises(
        UnknownComponentError, match=r"an? environment in a file is written path.py:Name|written path.py"
    ):
        find_component("environments", name)


def test_missing_attribute():
    with pytest.raises(UnknownComponentError) as caught:
        load_component(find_component("environments", "./my_env.py:Calculater"))
    assert "did you mean: Calculator?" in str(caught.value)
    assert "it defines: Calculator, brevity" in str(caught.value)
    assert "_private" not in str(caught.value) and "random" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "name", "expected"),
    [
        ("def f(): ...\ndef __getattr__(name): return (5).missing", "g", "it defines: f"),
        ("def f(): ...\ndef __getattr__(name): raise AttributeError(name, name='x', obj=None)", "g", "it defines: f"),
        ("NUMBER = 5", "NUMBER.raal", "it defines: nothing public"),
    ],
)
def test_an_attribute_that_a_strange_object_lacks(here, source, name, expected):
    (here / "strange.py").write_text(source)
    with pytest.raises(UnknownComponentError, match=expected):
        load_component(find_component("rewards", f"./strange.py:{name}"))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            "x = 1\ny = 1 / 0\n",
            r"raises.py: the file of reward 'f' does not import\n.*: .* \(raises.py, line 2: y = 1 / 0\)",
        ),
        ("def f(:\n", r"raises.py: .* does not import\nSyntaxError: invalid syntax \(raises.py, line 1: def f\(:\)$"),
        (
            "\n\nimport zz_gone\n",
            r"No module named 'zz_gone' \(raises.py, line 3: import zz_gone\)\ninstall the package .* module zz_gone;",
        ),
        (
            "raise ExceptionGroup('both', [ValueError('a'), ExceptionGroup('', [KeyError('b'), ValueError('a')])])",
            r"2 errors: ValueError: a \(raises.py, line 1: .*; KeyError: 'b' \(raises.py, line 1: ",
        ),
        ("raise SystemExit(3)", r"sys.exit\(3\) \(raises.py, line 1: "),
    ],
)
def test_file_that_does_not_import(here, source, expected):
    (here / "raises.py").write_text(source)
    before = set(sys.modules)
    ref = find_component("rewards", "./raises.py:f")
    with pytest.raises(BrokenPluginError, match=expected):
        load_component(ref)
    assert not [name for name in set(sys.modules) - before if "raises" in name], "nothing half-loaded stays"


def test_threads_that_load_one_file_at_the_same_time_get_the_same_class(here):
    reached, may_go_on = threading.Event(), threading.Event()
    sys.modules["gate_of_this_test"] = SimpleNamespace(reached=reached, may_go_on=may_go_on)  # type: ignore[assignment]
    waits = "import gate_of_this_test as gate\ngate.reached.set()\ngate.may_go_on.wait()\n"
    (here / "slow.py").write_text(f"{waits}class Slow: ...\n")
    ref = find_component("environments", "./slow.py:Slow")
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(load_component, ref)
        reached.wait()
        try:
            second = threads.submit(load_component, ref)
            with pytest.raises(TimeoutError):
                second.result(0.2)
        finally:
            may_go_on.set()
        assert first.result() is second.result()
