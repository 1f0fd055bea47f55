"""Secrets that are typed as settings of components are used, and written nowhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollouts.cli import main

PARTS = """\
seen = []

class Tracker:
    def __init__(self, folder, settings, *, api_key: str = "", headers: dict | None = None, pad_token: str = "<pad>"):
        seen.append((api_key, headers, pad_token))
        assert "hush" not in str(settings)
    def log(self, metrics, step):
        pass
    def close(self):
        pass
"""
SECRETS = ["--logger.own.api-key", "hush-1", "--logger.own.headers", '{ x = [{ password = "hush-2" }], n = 3 }']
SMALL = ["--env", "calculator", "--env.digits", "1", "--prompts-per-step", "2", "--samples-per-prompt", "2"]
SMALL += ["--eval-tasks", "0", "--max-tokens", "16", "--logger", "own=./secret_tracker.py:Tracker"]


def everything_in(folder: str) -> bytes:
    return b"".join(path.read_bytes() for path in Path(folder).rglob("*") if path.is_file())


def test_a_secret_is_used_and_written_nowhere_and_asked_for_again(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret_tracker.py").write_text(PARTS)
    argv = ["run", *SMALL, "--steps", "1", "--out", "out", *SECRETS]
    monkeypatch.setattr("sys.argv", ["rollouts", *argv])
    assert main(argv) == 0
    assert (
        b"hush" not in everything_in("out") and b"(a secret, left out)" in (tmp_path / "out/config.toml").read_bytes()
    )
    command = json.loads((tmp_path / "out/manifest.json").read_text())["command"]
    assert command[command.index("--logger.own.api-key") + 1] == "(a secret, left out)" and "hush" not in str(command)
    capsys.readouterr()

    for again in (["resume", "out", "--steps", "2"], ["run", "out/config.toml", "--out", "again"]):
        assert main(again) == 2
        error = capsys.readouterr().err
        assert "out/config.toml, line" in error and "logger.own.api_key: a secret, which was left out" in error
        assert "type it anew: --logger.own.api-key VALUE" in error
        assert not (tmp_path / "again").exists()
    assert main(["resume", "out", "--steps", "2", *SECRETS]) == 0
    assert b"hush" not in everything_in("out")
    import sys

    (module,) = (each for name, each in sys.modules.items() if name.startswith("rollouts_file_secret_tracker"))
    assert module.seen == [("hush-1", {"x": [{"password": "hush-2"}], "n": 3}, "<pad>")] * 2


def test_a_whole_word_names_a_secret_and_the_core_has_none(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flags = ["--inference", "openai", "--model", "m", "--inference.url", "http://h", "--inference.api-key-env", "PATH"]
    argv = ["eval", "--env", "calculator", "--max-tokens", "17", *flags, "--inference.body.max_tokens", "18"]
    assert main([*argv, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "max_tokens = 17" in shown and "max_tokens = 18" in shown and 'api_key_env = "PATH"' in shown


@pytest.mark.parametrize("text", ["--inference.body.key=hush", "--a.b.hf-token hush", "--a.b '{ secret = \"hush\" }'"])
def test_the_command_that_is_written_down_holds_no_secret(text):
    import shlex

    from rollouts.config.secrets import command_without_secrets

    words = ["rollouts", "run", *shlex.split(text), "--steps", "3"]
    written = command_without_secrets(words)
    assert "hush" not in str(written) and len(written) == len(words) and written[-2:] == ["--steps", "3"]
