"""Light commands stay light: no torch, trio, httpx, rich, and no plugin."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rollouts_check.plugins_command import plugins

from rollouts.cli import main
from rollouts.cli.app import COMMANDS

ROOT = Path(__file__).parents[2]
HEAVY = ["torch", "transformers", "numpy", "trio", "httpx", "rich"]

DRIVER = """\
import json, sys
argv = json.loads(sys.argv[1])
if argv is None:
    import rollouts
    code = 0
else:
    from rollouts.cli import main
    code = main(argv)
sys.stderr.write(json.dumps([code, sorted(sys.modules)]))
"""


def modules_after(argv, *path):
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), *map(str, path)]))
    command = [sys.executable, "-c", DRIVER, json.dumps(argv)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    code, modules = json.loads(done.stderr)
    assert code == 0
    return set(modules), done.stdout


@pytest.mark.parametrize(
    ("argv", "also_absent"),
    [
        (None, ["click", "msgspec", "importlib.metadata", "rollouts.config", "rollouts.plugins"]),
        (["--help"], ["msgspec", "importlib.metadata", "rollouts.config", "rollouts.plugins", "rollouts.cli.run"]),
        (["run", "--help"], ["msgspec", "importlib.metadata", "rollouts.plugins", "rollouts.config.resolving"]),
        (["plugins", "list", "--kind", "environments"], []),
        (["config"], []),
    ],
)
def test_what_a_light_command_does_not_import(argv, also_absent, acme):
    modules, out = modules_after(argv, acme)
    assert "rollouts" in modules
    absent = [*HEAVY, *also_absent, "acme_parts", "acme_broken"]
    assert [name for name in absent if name in modules] == []
    if argv is not None and "list" in argv:
        assert "acme_env" in out


def test_the_check_can_fail(acme):
    modules, _ = modules_after(["plugins", "show", "acme_env"], acme)
    assert "acme_parts" in modules


READS = """\
import contextlib, io, json, sys

reads = []
METADATA = ("entry_points.txt", "METADATA", "PKG-INFO")
sys.addaudithook(lambda event, at: event == "open" and str(at[0]).endswith(METADATA) and reads.append(at[0]))
from rollouts.cli import main

found = {}
for argv in json.loads(sys.argv[1]):
    reads.clear()
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = main(argv)
    found[" ".join(argv)] = [code, len(out.getvalue()), len(reads), "importlib.metadata" in sys.modules]
print(json.dumps(found))
"""


def test_help_reads_no_metadata_of_plugins(acme):
    commands = [[name] for name in COMMANDS] + [["plugins", name] for name in plugins.commands]
    helps = [["--help"], *([*command, "--help"] for command in commands)]
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), str(acme)]))
    command = [sys.executable, "-c", READS, json.dumps([*helps, ["plugins", "list", "--kind", "kl"]])]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    found = json.loads(done.stdout)
    code, _, reads, imported = found.pop("plugins list --kind kl")
    assert code == 0 and reads >= 2 and imported, "the count must see the metadata of this package"
    assert len(found) == len(helps)
    for name, (code, characters, reads, imported) in found.items():
        assert code == 0 and characters > 100, name
        assert (reads, imported) == (0, False), f"{name} read {reads} files of metadata"


def test_help_says_where_the_commands_of_plugins_are(capsys):
    assert main(["--help"]) == 0
    assert "rollouts plugins list --kind commands" in " ".join(capsys.readouterr().out.split())


def test_python_m_rollouts():
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    command = [sys.executable, "-m", "rollouts", "rum"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 2
    assert done.stderr.startswith("error: `rollouts` has no command 'rum'")
