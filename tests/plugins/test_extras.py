"""What a component needs and what is not installed: the command that installs it, before anything else happens."""

from __future__ import annotations

import pytest

from rollouts.errors import BrokenPluginError
from rollouts.plugins.index import ComponentRef, find_component
from rollouts.plugins.loading import install_hint, load_component

SOURCE = "class Env:\n    def tasks(self, split, rng):\n        return ['x']\n"
REQUIRES = ['absent-solver>=2; extra == "solver"', 'pytest; extra == "solver"', 'absent-too; extra == "plots"']
UNKNOWN = "install the package that has the module absent; its name may differ"
NEVER = """absent-there; python_version < "3" and extra == 'solver'"""


def refused(make_distribution, value, source=SOURCE, requires=REQUIRES):
    make_distribution("acme-envs", {"rollouts.environments": {"acme": value}}, {"acme_env": source}, requires=requires)
    with pytest.raises(BrokenPluginError) as caught:
        load_component(find_component("environments", "acme"))
    return str(caught.value)


def test_an_entry_point_says_which_extra_it_needs(make_distribution):
    message = refused(make_distribution, "acme_env:Env [solver]", source="raise SystemError('imported')\n")
    assert "its environment 'acme' needs absent-solver, which is not installed" in message
    assert message.endswith("type: pip install 'acme-envs[solver]'")
    assert "imported" not in message, "nothing is imported in vain"


def test_several_extras(make_distribution):
    message = refused(make_distribution, "acme_env:Env [solver, plots]")
    assert "needs absent-solver and absent-too, which are not installed" in message
    assert message.endswith("pip install 'acme-envs[solver,plots]'")


@pytest.mark.parametrize("requires", [['pytest; extra == "solver"'], [NEVER], []])
def test_what_is_there_loads(make_distribution, requires):
    points = {"rollouts.environments": {"acme": "acme_env:Env [solver]"}}
    make_distribution("acme-envs", points, {"acme_env": SOURCE}, requires=requires)
    assert load_component(find_component("environments", "acme")).__name__ == "Env"


@pytest.mark.parametrize(
    ("value", "source", "hint"),
    [
        ("acme_env:Env", "import absent_solver\n", "an extra provides it: pip install 'acme-envs[solver]'"),
        (
            "acme_env:Env",
            "import absent_other\n",
            "install the package that has the module absent_other; its name may differ",
        ),
        ("acme_env:Env [plain]", "import absent_other\n", "an extra may provide it: pip install 'acme-envs[plain]'"),
    ],
)
def test_a_module_that_is_missing(make_distribution, value, source, hint):
    message = refused(make_distribution, value, source)
    assert message.endswith(hint) and "ModuleNotFoundError" in message


def test_a_hint_is_for_missing_modules_only(make_distribution):
    make_distribution("acme-envs", {"rollouts.environments": {"acme": "acme_env:Env"}}, {"acme_env": SOURCE})
    ref = find_component("environments", "acme")
    assert install_hint(ValueError("x"), ref) == ""
    other_versions = "if it needs other versions of packages, type: rollouts env install acme-envs, then --worker venv"
    assert install_hint(ImportError("x"), ref) == other_versions == install_hint(ModuleNotFoundError("x"), ref)
    assert install_hint(ImportError("x"), ComponentRef("rewards", "acme", ref.value, ref.distribution)) == ""
    assert install_hint(ModuleNotFoundError("x", name="absent.part"), ref) == UNKNOWN


def test_a_module_of_rollouts_and_torch_are_packages_that_are_known(make_distribution):
    make_distribution("acme-envs", {"rollouts.environments": {"acme": "acme_env:Env"}}, {"acme_env": SOURCE})
    file = ComponentRef("environments", "Env", "/x/env.py:Env")
    for ref in (find_component("environments", "acme"), file):
        missing = ModuleNotFoundError("x", name="rollouts_calculator.parts")
        assert install_hint(missing, ref) == "perhaps: pip install rollouts-calculator"
    whole, cpu = install_hint(ModuleNotFoundError("x", name="torch.nn"), file).splitlines()
    assert "pip install 'rollouts-rl[train]'" in whole and "pip install torch --index-url" in cpu
