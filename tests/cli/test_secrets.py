"""Secrets that are typed as settings of components are used, and written nowhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollouts.cli import main
from rollouts.config.resolving import resolve
from rollouts.config.settings import LEFT_OUT
from rollouts.errors import ConfigError

PARTS = """\
seen = []

class Tracker:
    def __init__(
        self,
        folder,
        settings,
        *,
        api_key: str = "",
        headers: dict | None = None,
        pad_token: str = "<pad>",
        prompt_key: str = "",
    ):
        seen.append((api_key, headers, pad_token))
        assert "hu" + "sh" not in str(settings)  # the run's copy of this file has no such word
    def log(self, metrics, step):
        pass
    def close(self):
        pass
"""
STRICT = """\
from dataclasses import dataclass

@dataclass(frozen=True)
class Judge:
    api_key: str = ""
    def __post_init__(self):
        if self.api_key:
            raise ValueError("too short")

def judge(trajectory, *, judge: Judge = Judge()) -> float:
    return 1.0
"""
SECRETS = ["--logger.own.api-key", "hush-1", "--logger.own.headers", '{ x = [{ password = "hush-2" }], n = 3 }']
SMALL = ["--env", "calculator", "--env.digits", "1", "--prompts-per-step", "2", "--samples-per-prompt", "2"]
SMALL += ["--eval-tasks", "0", "--max-tokens", "4", "--logger", "own=./secret_tracker.py:Tracker"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "secret_tracker.py").write_text(PARTS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


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
        assert "out/config.toml, line" in error and "logger.own.api_key: this secret was left out" in error
        assert "type: --logger.own.api-key VALUE" in error
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


def test_a_settings_file_is_not_copied_where_a_component_is_in_it(here, capsys):
    tables = f"""
env = {{"name": "calculator", "digits": 1}}
logger = {{"own": {{"name": "./both.py:Tracker", "api_key": "hush-1"}}}}
eval_tasks = 0
steps = 0
out = "out"
{PARTS.replace("seen", "_seen")}"""
    Path("both.py").write_text(tables)
    assert main(["run", "both.py"]) == 0, capsys.readouterr().err
    (file,) = json.loads(Path("out/manifest.json").read_text())["files"]
    assert file["path"].endswith("both.py") and file["copy"] is None
    assert main(["resume", "out", "--steps", "1", "--logger.own.api-key", "hush-2"]) == 0
    words = ["--eval-tasks", "1", "--max-tokens", "4", "--logger.own.api-key", "hush-2", "--out", "evaluated"]
    assert main(["eval", "out", *words]) == 0
    assert b"hush" not in everything_in("out") + everything_in("evaluated")


def test_a_run_with_a_secret_is_evaluated_without_it(here):
    assert main(["run", *SMALL, "--steps", "0", "--out", "out", *SECRETS]) == 0
    evaluated = ["--env", "calculator", "--env.digits", "1", "--eval-tasks", "2", "--max-tokens", "4"]
    assert main(["eval", "--model", "out", *evaluated, "--out", "evaluated"]) == 0
    assert b"hush" not in everything_in("evaluated")


def test_the_supervised_phase_has_the_secrets_of_the_run():
    logger = {"own": {"name": "./secret_tracker.py:Tracker", "api_key": "hush-1"}}
    left_out = {"own": {"name": "./secret_tracker.py:Tracker", "api_key": LEFT_OUT}}
    resolved = resolve({"mode": "sft+rl", "logger": logger, "sft": {"logger": left_out}})
    assert resolved.settings.sft["logger"] == logger
    with pytest.raises(ConfigError, match=r"type: --logger.own.api-key VALUE$"):
        resolve({"mode": "sft+rl", "logger": left_out, "sft": {"logger": left_out}})


@pytest.mark.nightly
def test_both_phases_with_secrets_are_resumed(here, capsys):
    secrets = [*SECRETS, "--sft.logger.own.api-key", "hush-3"]
    words = ["--mode", "sft+rl", "--steps", "0", "--sft.steps", "1", "--out", "two"]
    assert main(["run", *SMALL, *words, *secrets]) == 0
    assert b"hush" not in everything_in("two")
    capsys.readouterr()
    assert main(["resume", "two", "--steps", "1"]) == 2
    error = capsys.readouterr().err
    assert error.endswith("type: --logger.own.api-key VALUE --logger.own.headers.x VALUE\n")
    assert main(["resume", "two", "--steps", "1", *SECRETS]) == 0, "the supervised phase has the run's own"
    words = ["--mode", "sft+rl", "--steps", "2", "--sft.steps", "1", "--out", "two", "--resume", "auto"]
    assert main(["run", *SMALL, *words, *secrets]) == 0
    capsys.readouterr()
    assert main(["resume", "two", "--steps", "3", *secrets, "--sft.logger.own.pad-token", "<end>"]) == 2
    error = capsys.readouterr().err
    assert "its settings cannot change: sft.logger" in error and "hush" not in error
    assert b"hush" not in everything_in("two")


def test_a_secret_need_not_be_text(here, capsys):
    tables = ["--logger.own.headers", '{ password = 123456, inner = { secret = { value = "hush-9" } }, key = true }']
    words = ["run", *SMALL, "--steps", "0", *tables, "--logger.own.api-key", "hush-1", "--out", "out"]
    shown = []
    for command in ([*words, "--dry-run"], ["config", *words[1:]]):
        assert main(command) == 0
        shown.append(capsys.readouterr().out)
    assert main(words) == 0
    for text in (*shown, everything_in("out").decode(errors="replace")):
        assert "hush" not in text and "123456" not in text
        assert 'password = "(a secret, left out)"' in text and "key = true" in text
    Path("again.toml").write_text(shown[1])
    assert main(["run", "again.toml", "--out", "again"]) == 2
    flags = "--logger.own.api-key VALUE --logger.own.headers.password VALUE --logger.own.headers.inner.secret VALUE"
    assert f"type: {flags}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", ["--inference.body.password 123456", "--a.password.b 123456", "--sft.logger.own.password.b=123456"]
)
def test_the_command_that_is_written_down_holds_no_secret_that_is_no_text(words, monkeypatch):
    from rollouts.config.secrets import command_without_secrets

    assert "123456" not in str(command_without_secrets(words.split()))


def test_names_that_only_look_like_secrets(here):
    """Nor is the alias of a component the name of a setting."""
    own = ["--logger", "password=./secret_tracker.py:Tracker", "--logger.password.prompt-key", "question"]
    words = [*SMALL[:-2], *own, "--logger.password.pad-token", "<end>", "--sft.logger.password.pad-token", "<pad>"]
    assert main(["run", "--mode", "sft+rl", *words, "--steps", "0", "--sft.steps", "0", "--out", "out"]) == 0
    written = (here / "out/config.toml").read_text()
    assert written.count('prompt_key = "question"') == 2 and "a secret" not in written


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "[logger.own]\nname = './secret_tracker.py:Tracker'\napi_key = 123456",
            "line 3: logger.own.api_key: expected text",
        ),
        (
            "[logger.own]\nname = './secret_tracker.py:Tracker'\napi_key = ['123456']",
            "logger.own.api_key: expected text",
        ),
        ("[logger.own]\nname = './secret_tracker.py:Tracker'\nprompt_key = { password = '123456' }", "expected text"),
        ("[[logger]]\napi_key = '123456'", "an entry of the list needs a `name`"),
        ("[[inference]]\nname = 'openai'\napi_key = '123456'", "inference: expected the name of a component"),
        ("[logger.own]\napi_key = sk-123456", 'put text in quotes: api_key = "..."'),
        (
            "[[env]]\nname = 'a'\nweight = { api_key = '123456' }\n[[env]]\nname = 'b'",
            "env.a.weight: expected the weight of",
        ),
    ],
)
def test_an_error_about_settings_holds_no_secret(here, capsys, text, words):
    (here / "secret.toml").write_text(text)
    assert main(["run", "secret.toml", "--env", "calculator", "--dry-run"][: 2 if "[[env]]" in text else None]) == 2
    error = capsys.readouterr().err
    assert words in error and "123456" not in error


def test_a_dataclass_that_refuses_a_secret_does_not_show_it(here, capsys):
    (here / "strict.py").write_text(STRICT)
    argv = ["run", "--env", "calculator", "--reward", "./strict.py:judge", "--reward.judge.api-key", "123456"]
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert "does not take api_key" in error and "123456" not in error


def test_a_secret_in_an_older_checkpoint_is_not_shown(here, capsys, monkeypatch):
    """Those that were written before secrets were left out have them."""
    older = {"logger.own.api_key": "hush-1", "logger.own.headers.password.b": "hush-4", "lr": 0.5}
    with monkeypatch.context() as patch:
        patch.setattr("rollouts.runs.plan.Plan.flat", older)
        assert main(["run", *SMALL, "--steps", "0", "--out", "out"]) == 0
    capsys.readouterr()
    assert main(["resume", "out", "--steps", "1", "--logger.own.api-key", "hush-5"]) == 0
    shown = capsys.readouterr().out
    assert "lr: 0.5 -> " in shown and "hush" not in shown and "headers.password: " in shown
