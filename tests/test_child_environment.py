"""Which environment variables child processes get."""

from __future__ import annotations

import contextvars
import json
import sys

import pytest
import trio
from rollouts_servers.process import ServerCommand, ServerProcess

from rollouts.cli import main
from rollouts.env.processes import call_isolated
from rollouts.errors import ConfigError

TOOL = """
import json, os
def variables() -> str:
    return json.dumps(dict(os.environ))
"""
SECRETS = {"OPENAI_API_KEY": "sk-1", "AWS_SECRET_ACCESS_KEY": "2", "HF_TOKEN": "hf_3", "DATABASE_PASSWORD": "4"}
USUAL = {"HTTPS_PROXY": "http://proxy:1", "LC_ALL": "C.UTF-8", "NCCL_DEBUG": "WARN", "HF_HOME": "/models"}


@pytest.fixture(autouse=True)
def variables(monkeypatch):
    for name, value in {**SECRETS, **USUAL, "MY_OWN": "5"}.items():
        monkeypatch.setenv(name, value)


def of_a_tool(tmp_path, monkeypatch) -> dict[str, str]:
    (tmp_path / "tool_of_this_test.py").write_text(TOOL)
    monkeypatch.syspath_prepend(str(tmp_path))
    from tool_of_this_test import variables

    async def run():
        return await call_isolated(variables, {}, label="variables", timeout_seconds=20)

    try:
        return json.loads(trio.run(run).text)
    finally:
        del sys.modules["tool_of_this_test"]


def of_a_server(tmp_path) -> dict[str, str]:
    """A server that writes its variables down, and ends."""
    words = f"import json, os; json.dump(dict(os.environ), open({str(tmp_path / 'seen')!r}, 'w'))"
    command = ServerCommand([sys.executable, "-c", words], {"GIVEN": "6"})
    with pytest.raises(ConfigError, match="ended"):
        trio.run(ServerProcess(lambda port: command, name="toy", folder=tmp_path).start, None)
    return json.loads((tmp_path / "seen").read_text())


def test_isolated_tools_inherit_no_secret(tmp_path, monkeypatch):
    seen = of_a_tool(tmp_path, monkeypatch)
    assert not set(seen.values()) & set(SECRETS.values()) and "MY_OWN" not in seen
    assert USUAL.items() <= seen.items() and seen["PATH"]


def test_servers_inherit_no_secret_but_what_downloads_models(tmp_path):
    seen = of_a_server(tmp_path)
    assert {name for name in SECRETS if name in seen} == {"HF_TOKEN"} and "MY_OWN" not in seen
    assert (USUAL | {"GIVEN": "6"}).items() <= seen.items()


def test_a_setting_passes_more_of_them_on(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "from rollouts import reward\n"
        "class Mine:\n"
        "    def tasks(self, split, rng):\n        return ['a']\n"
        "    @reward\n    def right(self) -> float:\n        return 1.0\n"
    )

    def make_inference(*_, **__):
        raise ConfigError(json.dumps(of_a_server(tmp_path)))

    monkeypatch.setattr("rollouts.runs.jobs.evaluate.make_inference", make_inference)
    flags = ["--env", "./mine.py:Mine", "--inference", "openai", "--inference.url", "http://h", "--model", "m"]
    argv = ["eval", *flags, "--pass-env", "MY_*, DATABASE_PASSWORD"]
    assert contextvars.copy_context().run(main, argv) == 2
    seen = json.loads(capsys.readouterr().err.removeprefix("error: "))
    assert (seen["MY_OWN"], seen["DATABASE_PASSWORD"]) == ("5", "4") and "OPENAI_API_KEY" not in seen
