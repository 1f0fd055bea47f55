"""Names come from metadata, each once; errors say what to type."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from rollouts.config.names import names_file, normalize
from rollouts.doors import HOMES
from rollouts.errors import AmbiguousComponentError, BrokenPluginError, PluginError, UnknownComponentError
from rollouts.plugins.index import KINDS, ComponentRef, find_component, installed_components, scan, unknown_component
from rollouts.plugins.loading import load_component

ROOT = Path(__file__).parents[2]


def test_lists_and_finds_without_importing(make_distribution):
    make_distribution(
        "Acme_Rewards",
        {"rollouts.rewards": {"brevity": "acme_rewards:brevity"}, "console_scripts": {"acme": "acme_rewards:main"}},
        {"acme_rewards": "def brevity(trajectory): return 1.0"},
        version="2.1",
    )
    ref = find_component("rewards", "brevity")
    assert ref == ComponentRef("rewards", "brevity", "acme_rewards:brevity", "Acme_Rewards", "2.1")
    assert ref in installed_components("rewards") and ref in installed_components()
    assert ref not in installed_components("losses")
    assert "acme_rewards" not in sys.modules
    assert load_component(ref)("anything") == 1.0
    assert "acme_rewards" in sys.modules


@pytest.mark.parametrize("spelling", ["acme-rewards", "Acme_Rewards", "ACME.rewards", "acme__rewards"])
def test_qualified_name_accepts_any_spelling_of_the_distribution(make_distribution, spelling):
    make_distribution("Acme_Rewards", {"rollouts.rewards": {"brevity": "acme_rewards:brevity"}})
    assert find_component("rewards", f"{spelling}/brevity").qualified == "Acme_Rewards/brevity"


def test_one_distribution_listed_twice_counts_once(make_distribution):
    groups = {"rollouts.rewards": {"brevity": "acme_rewards:brevity"}}
    make_distribution("acme-rewards", groups, version="1.0")
    make_distribution("acme_rewards", groups, version="1.1")
    found = [ref for ref in installed_components("rewards") if ref.name == "brevity"]
    assert len(found) == 1
    assert found[0].version == "1.1", "the first on sys.path is the one that would be imported"


def test_two_distributions_with_one_name(make_distribution):
    make_distribution("acme", {"rollouts.environments": {"calc9": "acme:Calc"}}, {"acme": "class Calc: ..."})
    make_distribution("other-env", {"rollouts.environments": {"calc9": "other:Calc"}}, {"other": "class Calc: ..."})
    with pytest.raises(AmbiguousComponentError) as caught:
        find_component("environments", "calc9")
    assert "acme/calc9" in str(caught.value) and "other-env/calc9" in str(caught.value)
    assert find_component("environments", "other-env/calc9").value == "other:Calc"
    assert load_component(find_component("environments", "acme/calc9")).__module__ == "acme"


def test_what_changes_while_a_program_runs_is_found(make_distribution):
    """Metadata is read once and kept, but not longer than it is true."""

    def found():
        return [(ref.name, ref.value, ref.version) for ref in installed_components("rewards") if "acme" in ref.value]

    assert found() == []
    folder = make_distribution("acme", {"rollouts.rewards": {"brevity": "acme:brevity"}})
    info = folder / "acme-1.0.dist-info"
    assert found() == found() == [("brevity", "acme:brevity", "1.0")]
    (info / "entry_points.txt").write_text("[rollouts.rewards]\nlength = acme:length\n")
    assert found() == [("length", "acme:length", "1.0")], "changed in place"
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0.1\n")
    assert found() == [("length", "acme:length", "1.0.1")]
    (info / "entry_points.txt").unlink()
    assert found() == []
    (info / "entry_points.txt").write_text("[rollouts.rewards]\nthis line has no equals sign\n")
    assert found() == [] and "acme" in "".join(scan().faults)
    assert "acme" in "".join(scan().faults), "a fault is not forgotten"
    (info / "entry_points.txt").write_text("[rollouts.rewards]\nbrevity = acme:brevity\n")
    assert found() == [("brevity", "acme:brevity", "1.0.1")]


def test_unknown_name_says_near_misses_what_is_there_and_what_to_type(make_distribution):
    make_distribution(
        "acme", {"rollouts.environments": {"calc9": "acme:Calc"}, "rollouts.rewards": {"short": "acme:s"}}
    )
    with pytest.raises(UnknownComponentError) as caught:
        find_component("environments", "calc8")
    message = str(caught.value)
    for part in ("'calc8'", "did you mean: calc9?", "installed (environments): ", "rollouts plugins list"):
        assert part in message
    assert "pip install" not in message.replace("pip install -e .", ""), "a misspelt name is nobody's package"
    with pytest.raises(UnknownComponentError, match="other components with this name: reward acme/short"):
        find_component("environments", "short")


def test_unknown_name_of_a_known_distribution(make_distribution):
    make_distribution("acme", {"rollouts.rewards": {"brevity": "acme:s", "length": "acme:l"}}, version="3.0")
    with pytest.raises(UnknownComponentError) as caught:
        find_component("rewards", "acme/brevty")
    assert "acme is installed but has no reward of that name (it has: brevity, length)" in str(caught.value)
    assert "did you mean: acme/brevity?" in str(caught.value)
    assert "check who publishes" not in str(caught.value), "the distribution is there"
    with pytest.raises(UnknownComponentError, match=r"did you mean: acme/brevity\?") as caught:
        find_component("rewards", "acne/brevity")
    assert "pip install acne" not in str(caught.value)
    with pytest.raises(UnknownComponentError, match=r"check who publishes it, and type: pip install zz-lost$"):
        find_component("rewards", "zz_lost/brief")
    with pytest.raises(UnknownComponentError) as caught:
        find_component("rewards", "zz9")
    assert "pip install" not in str(caught.value).replace("pip install -e .", ""), "no package's name was typed"


def test_the_name_of_a_part_suggests_what_has_it_as_a_word():
    with pytest.raises(UnknownComponentError) as caught:
        find_component("mixers", "sum")
    assert "did you mean: normalised_sum, weighted_sum?" in str(caught.value)
    assert "pip install" not in str(caught.value)


def test_a_package_in_this_folder_that_is_not_installed_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("kiosk", "other", "broken"):
        (tmp_path / folder).mkdir()
    (tmp_path / "broken" / "pyproject.toml").write_text("[project")
    (tmp_path / "other" / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    (tmp_path / "kiosk" / "pyproject.toml").write_text(
        '[project.entry-points."rollouts.environments"]\nkiosk = "k:K"\n'
    )
    for place, target in ((tmp_path, "kiosk"), (tmp_path / "kiosk", ".")):
        monkeypatch.chdir(place)
        with pytest.raises(UnknownComponentError) as caught:
            find_component("environments", "kiosk")
        assert f"to install that package, type: pip install -e {target}\n" in str(caught.value)
        assert "check who publishes" not in str(caught.value)
    with pytest.raises(UnknownComponentError) as caught:
        find_component("rewards", "kiosk")
    assert "pip install -e" not in str(caught.value)


def test_a_logger_of_the_repository_is_installed_from_a_clone():
    error = str(unknown_component("loggers", "wandb", []))
    assert "in a clone, type: pip install ./plugins/wandb" in error and "check who publishes" not in error
    assert "./plugins" not in str(unknown_component("rewards", "wandb", []))


def test_an_installed_distribution_is_not_guessed_at(make_distribution):
    make_distribution("rollouts-zz9", {"rollouts.environments": {"calc": "m:C"}})
    make_distribution("other-zz", {})
    for name, words in {
        "Rollouts_zz9/brief": "Rollouts_zz9 is installed but has no reward of that name (it has: environment calc)",
        "other-zz/brief": "other-zz is installed but has no reward of that name (it has: no components)",
        "zz9": "no reward is named 'zz9'",
    }.items():
        with pytest.raises(UnknownComponentError) as caught:
            find_component("rewards", name)
        assert words in str(caught.value) and "check who publishes" not in str(caught.value)


def test_an_error_in_a_clone_that_was_never_installed_says_so():
    core = ComponentRef("losses", "grpo", "rollouts.x:GRPO", "rollouts-rl", "1")
    assert "rollouts itself is not installed" in str(unknown_component("losses", "x", []))
    assert "not installed" not in str(unknown_component("losses", "x", [core]))


def test_guess_is_left_out_where_the_name_could_not_be_a_package():
    with pytest.raises(UnknownComponentError) as caught:
        find_component("rewards", "what is this?")
    assert "check who publishes" not in str(caught.value)


def test_unknown_kind():
    with pytest.raises(PluginError, match=r"did you mean: environments\?"):
        installed_components("environment")


BROKEN = {
    "raises": ("acme_broken:X", "1 / 0", "ZeroDivisionError: division by zero"),
    "exits": ("acme_broken:X", "raise SystemExit('bye')", "it called sys.exit('bye')"),
    "syntax": ("acme_broken:X", "def (", "SyntaxError"),
    "module": ("acme_broken:X", "import gymnasium_zz", "install the package that has the module gymnasium_zz"),
    "extra": ("acme_broken:X", "import torch_zz.nn", "pip install 'acme-broken[train]'"),
    "gone": ("acme_gone.deep:X", "", "the distribution lacks its own module"),
    "attribute": ("acme_broken:Brevty", "class Brevity: ...", "did you mean: Brevity?"),
    "no attribute": ("acme_broken", "", "must name an object in it"),
    "not a value": ("acme broken!", "", "module:attribute"),
    "multi-line": ("acme_broken:X", "raise ValueError('a\\nb')", "ValueError: a b"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_plugin_names_distribution_version_and_cause(make_distribution, case):
    value, source, expected = BROKEN[case]
    make_distribution(
        "acme-broken",
        {"rollouts.losses": {"acme_x": value}},
        {"acme_broken": source},
        version="0.3",
        requires=["numpy", 'torch_zz>=2 ; extra == "train"'],
    )
    ref = find_component("losses", "acme_x")
    with pytest.raises(BrokenPluginError) as caught:
        load_component(ref)
    assert str(caught.value).startswith("acme-broken 0.3: its loss 'acme_x'")
    assert expected in str(caught.value)
    assert caught.value.__cause__ is not None


def test_entry_points_that_cannot_be_read_hide_nobody(make_distribution):
    make_distribution("acme", {"rollouts.rewards": {"brevity": "acme:s"}})
    make_distribution("bad", {}, raw="[rollouts.rewards]\nthis line has no equals sign\n")
    assert find_component("rewards", "brevity").distribution == "acme"
    assert any("bad" in fault for fault in scan().faults)


def test_dotted_attribute_and_hooks_group(make_distribution):
    make_distribution(
        "acme",
        {"rollouts.rewards": {"inner": "acme_nested:Outer.inner"}, "rollouts": {"acme": "acme_nested"}},
        {"acme_nested": "class Outer:\n    inner = staticmethod(len)"},
    )
    assert load_component(find_component("rewards", "inner")) is len
    hook = next(ref for ref in scan().hooks if ref.distribution == "acme")
    assert load_component(hook).__name__ == "acme_nested"
    assert hook not in installed_components()


def test_sorted_by_kind_name_distribution(make_distribution):
    make_distribution("zeta", {"rollouts.losses": {"a_a": "m:a"}, "rollouts.rewards": {"z_z": "m:z", "a_a": "m:a"}})
    make_distribution("acme", {"rollouts.rewards": {"a_a": "m:a"}})
    mine = [ref.qualified for ref in installed_components() if ref.distribution in ("zeta", "acme")]
    assert mine == ["acme/a_a", "zeta/a_a", "zeta/z_z", "zeta/a_a"]


def test_normalize_and_file_names():
    assert normalize("A.b__C-d") == "a-b-c-d"
    assert all(map(names_file, ["./f.py:X", "f.py:X", "a/f.py", "../x", "/abs", "~/f.py:X"]))
    assert not any(map(names_file, ["calculator", "pkg/f", "happy:1", "gym/FrozenLake-v1"]))


def test_core_components_use_the_same_door():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = project["entry-points"]
    assert groups.pop("pytest11") == {"rollouts": "rollouts_check.pytest_plugin"}  # a plugin of pytest, no component
    for group, points in groups.items():
        assert group.removeprefix("rollouts.") in KINDS
        for name, value in points.items():
            module, colon, attribute = value.partition(" [")[0].partition(":")
            assert module.partition(".")[0] in HOMES and all(map(str.isidentifier, module.split("."))), (name, value)
            assert colon and attribute.isidentifier(), (name, value)


def test_face_and_index_are_light():
    code = (
        "import sys, rollouts.plugins; assert 'rollouts.plugins.index' not in sys.modules\n"
        "rollouts.plugins.installed_components()\n"
        "assert rollouts.plugins.read_signature and rollouts.plugins.PluginManager().list()is not None\n"
        "heavy = {'torch', 'trio', 'httpx', 'transformers', 'numpy', 'click', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)


def test_face_is_complete():
    import rollouts.plugins as face

    assert sorted(face.__all__, key=lambda name: (not name.isupper(), name)) == face.__all__
    assert {"ComponentRef", "call_with", "hookimpl", "load_component"} <= set(face.__all__) <= set(dir(face))
    assert all(getattr(face, name) is not None for name in face.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = face.nothing


def test_an_error_counts_the_names_of_a_pack_and_suggests_near_ones():
    refs = [ComponentRef("environments", f"gym/Level-v{number}", "", "rollouts-gym") for number in range(40)]
    message = str(
        unknown_component("environments", "gym/Leevl-v7", [ComponentRef("environments", "lone", "a:B"), *refs])
    )
    assert "installed (environments): gym/... (40), lone\n" in message
    assert "did you mean: gym/Level-v7" in message and "rollouts plugins list --all" in message
