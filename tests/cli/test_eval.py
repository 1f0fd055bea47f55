"""`rollouts eval`: a model is played on held-out tasks, on the base install where a server computes."""

from __future__ import annotations

import http.server
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import pytest
from safetensors.torch import load_file, save_file

from rollouts.cli import main
from rollouts.config.resolving import merge_over_file, resolve
from rollouts.config.settings import EVAL, setting_infos

sys.path.insert(0, str(Path(__file__).parents[1] / "servers"))
from mock_engine import started

ROOT = Path(__file__).parents[2]
OPENAI = f"{ROOT / 'plugins' / 'servers' / 'rollouts_servers' / 'openai.py'}:create_openai_inference"

ENVIRONMENT = '''\
from dataclasses import dataclass
from rollouts import Task, metric, reward, tool

@dataclass
class Add:
    count: int = 5
    def tasks(self, split, rng):
        return [Task(f"{split} {i}: what is 12 + 34?", answer=46) for i in range(self.count)]
    @tool
    def add(self, a: int, b: int) -> str:
        """Add."""
        return str(a + b)
    @reward
    def correct(self, task, trajectory):
        return float(str(task.answer) in trajectory.last_text)
    @metric
    def characters(self, trajectory):
        return len(trajectory.last_text)
'''

# What a machine with the base install has: none of these can be imported.
BASE_INSTALL = """\
import sys
for name in ("torch", "transformers", "numpy", "peft", "datasets", "safetensors", "jinja2", "tokenizers"):
    sys.modules[name] = None
from rollouts.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    (tmp_path / "add.py").write_text(ENVIRONMENT)
    return tmp_path


def on_base_install(*argv: str) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    command = [sys.executable, "-c", BASE_INSTALL, "eval", "--env", "./add.py:Add", "--inference", OPENAI, *argv]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=60)


def summary_of(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


# --- flags and files --------------------------------------------------------------------------------------------------


def test_the_command_is_mode_eval(composed):
    assert main(["eval", "--env", "calculator", "--temperature", "0", "--dry-run"]) == 0
    ((resolved, dry_run),) = composed
    assert dry_run and resolved == resolve({"mode": "eval", "env": "calculator", "temperature": 0})
    assert (resolved.settings.temperature, resolved.settings.samples_per_prompt) == (0.0, 1)


def test_help_shows_what_matters_and_no_more(capsys):
    assert main(["eval", "--help"]) == 0
    out = capsys.readouterr().out
    for info in setting_infos():
        inner = {"template": "--template.ARGUMENT", "role": "--role.NAME.model"}.get(info.name)
        shown = f"{info.flag} " in out or (inner is not None and inner in out)
        assert shown == (info.name in EVAL and info.name != "mode"), info.name
    assert "runs/<time>-<env>-<model>-eval" in out and "0 is greedy" in out


def test_the_file_of_a_training_run_is_read_for_what_matters(here, composed):
    (here / "run.toml").write_text('steps = 3\nlr = 0.1\nseed = 4\nenv = "e"\nloss = "dapo"\n[advantage]\neps = 1\n')
    assert main(["eval", "run.toml", "--max-tokens", "9"]) == 0
    ((resolved, _),) = composed
    assert (resolved.settings.seed, resolved.settings.max_tokens, resolved.settings.lr) == (4, 9, None)
    assert resolved.settings.loss == "grpo"  # nothing of it is looked at


@pytest.mark.parametrize(
    "argv", [["--lr", "1"], ["--lora_rank=4"], ["--loss", "grpo"], ["--loss.clip-high", "1"], ["--training.dtype", "x"]]
)
def test_settings_of_training_are_refused(argv, composed, capsys):
    assert main(["eval", "--env", "calculator", *argv]) == 2
    error = capsys.readouterr().err
    assert argv[0].partition("=")[0].replace("_", "-") in error and "an evaluation trains nothing" in error
    assert composed == []


def test_other_mistakes_are_told_as_ever(composed, capsys):
    assert main(["eval", "--env", "calculator", "--temprature", "1"]) == 2
    assert "did you mean: --temperature" in capsys.readouterr().err
    assert main(["eval", "--env", "calculator", "--temperature", "-1"]) == 2
    assert "must be at least 0" in capsys.readouterr().err
    assert main(["run", "--env", "calculator", "--temperature", "0"]) == 2
    assert "must be more than 0" in capsys.readouterr().err
    assert main(["run", "--mode", "eval", "--env", "calculator", "--steps", "3"]) == 2
    assert "error: --steps: this is a setting of training, and an evaluation trains nothing" in capsys.readouterr().err


# --- against a server, on the base install ----------------------------------------------------------------------------


@pytest.mark.slow
def test_it_needs_no_torch(here):
    with started(delay_seconds=0.0) as server:
        url = f"{server.url}/v1"
        done = on_base_install("--inference.url", url, "--model", "m1", "--samples-per-prompt", "2", "--out", "out")
        assert done.returncode == 0, done.stderr
        asked = len(server.chats())
    assert asked == 1 + 5 * 2 * 4  # one first request, that sees whether all is well
    summary = summary_of(here / "out")
    numbers = {"status": "done", "model": "m1", "episodes": 10, "tasks": 5, "judged": 10, "reward_mean": 1.0}
    assert summary | numbers | {"pass@k": {"1": 1.0, "2": 1.0}, "reward_stderr": 0.0, "tool_calls": 30} == summary
    assert summary["parts"] == {"correct": 1.0} and summary["metrics"] == {"characters": 14.0}
    assert summary["tokens"] == {"prompt_tokens": 4000, "completion_tokens": 540} and summary["failed"] == {}
    rows = [json.loads(line) for line in (here / "out" / "trajectories" / "eval.jsonl").read_text().splitlines()]
    assert [(row["group"], row["rollout"]) for row in rows] == [(g, r) for g in range(5) for r in range(2)]
    assert all(row["segments"] == [] and row["reward"] == 1.0 for row in rows)
    assert json.loads((here / "out" / "metrics.jsonl").read_text())["eval/pass@2"] == 1.0
    assert "reward     │ 1.000 ± 0.000" in done.stdout and "10/10" in done.stdout
    assert not (here / "out" / "checkpoints").exists()
    # Its own file repeats it, and says nothing of training.
    config = (here / "out" / "config.toml").read_text()
    assert 'mode = "eval"' in config and "steps" not in config and "[loss]" not in config
    with started(delay_seconds=0.0) as server:
        assert main(["run", "out/config.toml", "--inference.url", f"{server.url}/v1", "--out", "again"]) == 0
    assert (here / "again" / "trajectories" / "eval.jsonl").read_text() == (
        here / "out" / "trajectories" / "eval.jsonl"
    ).read_text()


def test_a_dry_run_asks_nobody(here, capsys):
    with started(delay_seconds=0.0) as server:
        url = f"{server.url}/v1"
        assert evaluate("--inference.url", url, "--model", "m1", "--eval-tasks", "3", "--dry-run") == 0
        assert server.chats() == []
    out = capsys.readouterr().out
    assert "held-out tasks: 3, each played once" in out and "tools: add" in out
    assert [path.name for path in here.iterdir()] == ["add.py"]


def evaluate(*argv: str) -> int:
    return main(["eval", "--env", "./add.py:Add", "--inference", OPENAI, *argv])


def test_mistakes_are_told_before_anything_is_written(here, capsys):
    with started(delay_seconds=0.0, api_key="sk-right") as server:
        for flags, words in (
            (["--model", "m1"], "OPENAI_API_KEY is empty"),
            (["--inference.url", f"{server.url}/v1"], "--inference.served-model tiny"),
            (["--inference.url", server.url, "--model", "m1"], "--inference.api-key-env"),
            (["--inference.url", "http://127.0.0.1:9/v1", "--model", "m1"], "--inference.url"),
            (["--inference.url", f"{server.url}/v1", "--model", "m", "--eval-tasks", "0"], "--eval-tasks 0"),
            (["--inference.url", server.url, "--model", "m", "--template.x", "1"], "chat_template_kwargs"),
        ):
            assert evaluate(*flags) == 2
            error = capsys.readouterr().err
            assert error.startswith("error: ") and "Traceback" not in error and words in error, error
    assert [path.name for path in here.iterdir()] == ["add.py"]


def test_too_many_failures_end_it_and_keep_what_was_done(here, capsys):
    with started(delay_seconds=0.0, calls=0) as good:
        assert evaluate("--inference.url", f"{good.url}/v1", "--model", "m1", "--out", "good") == 0
    with started(delay_seconds=0.0, faults={"400": 0.5}, seed=5) as server:
        flags = ["--inference.url", f"{server.url}/v1", "--model", "m1", "--max-failures", "2", "--concurrency", "1"]
        assert evaluate(*flags, "--out", "out") == 1
    error = capsys.readouterr().err
    assert "--max-failures is 2" in error and "type: rollouts resume out" in error
    summary = summary_of(here / "out")
    assert summary["status"] == "failed" and 1 <= summary["episodes"] < 5
    assert (here / "out" / "trajectories" / "eval.jsonl").read_text().count("\n") == summary["episodes"]


class Scripted(http.server.BaseHTTPRequestHandler):
    """A chat-completions API that answers well, but for requests whose messages name one of `hostile`."""

    hostile: ClassVar[dict[str, bytes]] = {}
    status = 200
    good = b'{"choices": [{"message": {"content": "46"}, "finish_reason": "stop"}]}'
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        asked = self.rfile.read(int(self.headers["content-length"])).decode()
        body = next((body for name, body in self.hostile.items() if name in asked), self.good)
        self.send_response(200 if body is self.good else self.status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@contextmanager
def scripted(hostile, status=200):
    handler = type("Handler", (Scripted,), {"hostile": hostile, "status": status})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        finally:
            server.shutdown()
            thread.join()


def in_a_message(value: bytes, name: bytes = b"content") -> bytes:
    return b'{"choices": [{"message": {"%s": %s}}]}' % (name, value)


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


HOSTILE = {
    "invalid UTF-8": in_a_message(b'"\xff\xfe"'),
    "invalid UTF-8 in a key": in_a_message(b'[{"\xff": 1}]'),
    "nested too deep": in_a_message(b'[{"a": %s}]' % nested(100_000)),
    "calls nested too deep": in_a_message(nested(100_000), b"tool_calls"),
    "half of a surrogate pair": in_a_message(b'"\\ud800"'),
    "a number of 5,000 digits": in_a_message(b'[{"a": %s}]' % (b"9" * 5_000)),
    "an error nested too deep": b'{"error": %s}' % nested(100_000),
}


@pytest.mark.parametrize("status", [200, 400])
def test_one_reply_that_cannot_be_read_is_one_failed_request(here, capsys, status):
    hostile = {f"eval {place}:": body for place, body in enumerate(HOSTILE.values())}
    count = len(hostile) + 2
    flags = ["--env", "./add.py:Add", "--env.count", str(count), "--retries", "0", "--max-failures", "0.9"]
    with scripted(hostile, status) as url:
        own = ["--inference", "openai", "--inference.url", url, "--inference.attempts", "1", "--model", "m1"]
        assert main(["eval", *flags, *own, "--out", "out"]) == 0, capsys.readouterr().err
    summary = summary_of(here / "out")
    assert summary["status"] == "done" and summary["failed"] == {"inference_error": len(hostile)}
    assert summary["judged"] == 2 and summary["reward_mean"] == 1.0


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://127.0.0.1:9/é", "type /%C3%A9"),
        ("http://127.0.0.1:9/a b", "type /a%20b"),
        ("http://a..b:9", "not a valid name: label empty or too long"),
        (f"http://{'x' * 64}.org", "not a valid name: label"),
        ("http://a b:9/v1", "not a valid name: it has a space"),
        ("http://127.0.0.1:99999", "the server's URL cannot be read: Port out of range"),
    ],
)
def test_a_url_that_no_server_can_have_is_one_clear_error(here, capsys, url, words):
    flags = ["--env", "./add.py:Add", "--inference", "openai", "--model", "m1", "--out", "out"]
    assert main(["eval", *flags, "--inference.url", url]) == 2
    assert words in capsys.readouterr().err and not (here / "out").exists()


def test_nothing_judged_is_a_failure(here, capsys):
    with started(delay_seconds=0.0, calls=0) as server:
        (here / "add.py").write_text(ENVIRONMENT.replace("return float(str(task", "return None and float(str(task"))
        assert evaluate("--inference.url", f"{server.url}/v1", "--model", "m1", "--out", "out") == 1
    assert "not one of the 5 rollouts of the evaluation could be judged" in capsys.readouterr().err
    assert summary_of(here / "out")["reward_mean"] is None


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_done(here):
    with started(delay_seconds=0.25, calls=0) as server:
        environment = dict(os.environ, PYTHONPATH=str(ROOT))
        flags = ["--inference.url", f"{server.url}/v1", "--model", "m1", "--concurrency", "1", "--out", "out"]
        command = [sys.executable, "-c", BASE_INSTALL, "eval", "--env", "./add.py:Add", "--env.count", "200"]
        command += ["--inference", OPENAI, *flags]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        deadline = time.monotonic() + 30
        while server.statistics()["answered"] < 4 and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130 and "of 200 episodes are done, out keeps them" in err, err
    summary = summary_of(here / "out")
    assert summary["status"] == "interrupted" and 2 <= summary["episodes"] < 100 and summary["reward_mean"] == 1.0


def test_training_with_it_is_refused_before_a_model_loads(here, capsys):
    for command in (["run"], ["sft"], ["run", "--mode", "sft+rl"]):
        flags = ["--env", "./add.py:Add", "--inference", OPENAI, "--inference.url", "http://127.0.0.1:9/v1"]
        assert main([*command, *flags, "--model", "no/such/model/anywhere"]) == 2
        assert "type: --inference hf to train, or `rollouts eval`" in capsys.readouterr().err
    assert [path.name for path in here.iterdir()] == ["add.py"]


# --- with a model that is here ----------------------------------------------------------------------------------------

CALCULATOR = ["--env", "calculator", "--env.digits", "1", "--eval-tasks", "3", "--max-tokens", "16"]
SHORT = ["--steps", "1", "--prompts-per-step", "2", "--samples-per-prompt", "2", "--lora-rank", "2", "--lr", "0.01"]


@pytest.mark.slow
def test_a_run_s_last_evaluation_is_repeated_with_its_checkpoint(here):
    assert main(["run", *CALCULATOR, *SHORT, "--out", "trained"]) == 0
    after = summary_of(here / "trained")["evaluation"]["after"]
    assert main(["eval", "trained", "--out", "a"]) == 0
    first = summary_of(here / "a")
    assert first["reward_mean"] == after["reward_mean"] and first["parts"] == after["parts"]
    assert first["model"] == "trained/checkpoints/step_000001" and first["tokens"]["completion_tokens"] > 0
    assert main(["eval", *CALCULATOR, "--model", first["model"], "--temperature", "0", "--out", "b"]) == 0
    greedy = summary_of(here / "b")
    assert greedy["reward_mean"] == after["greedy_mean"]
    assert main(["resume", "a"]) == 0  # it is finished
    # It is the adapter that speaks: another one says something else.
    weights = here / first["model"] / "adapter_model.safetensors"
    moved = {name: tensor + 0.1 for name, tensor in load_file(weights).items()}
    save_file(moved, weights)
    trainer_s = shutil.ignore_patterns("trainer*", "state*", "manifest*")
    shutil.copytree(here / first["model"], here / "moved", ignore=trainer_s)
    assert main(["eval", *CALCULATOR, "--model", "moved", "--temperature", "0", "--out", "c"]) == 0
    assert (here / "c" / "trajectories" / "eval.jsonl").read_text() != (
        here / "b" / "trajectories" / "eval.jsonl"
    ).read_text()


def described(capsys, *argv: str) -> tuple[str, str]:
    """What a dry run says: the settings that hold tasks out, and its notes."""
    capsys.readouterr()
    assert main(["eval", *argv, "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    own = " ".join(line for line in sorted(lines) if line.startswith(("seed =", "eval_tasks =")))
    return own, "\n".join(line for line in lines if line.startswith("note:") and "newest checkpoint" not in line)


@pytest.mark.slow
def test_a_run_is_asked_what_it_held_out(here, capsys):
    """One-digit products: there are a hundred of them, so that draws of another seed do meet training tasks."""
    digits = ["--env", "calculator", "--env.digits", "1", "--max-tokens", "8"]
    small = ["--steps", "0", "--out", "r"]
    assert main(["run", *digits, "--seed", "5", "--eval-tasks", "20", *small]) == 0
    checkpoint = "r/checkpoints/step_000000"
    for model in ("r", checkpoint):
        assert described(capsys, *digits, "--model", model) == ("eval_tasks = 20 seed = 5", ""), model
    assert described(capsys, *digits, "--model", checkpoint, "--eval-tasks", "7") == ("eval_tasks = 7 seed = 5", "")
    lost = "which this evaluation does not, so it may have trained on these held-out tasks; to evaluate as the run did"
    own, note = described(capsys, *digits, "--model", "r", "--seed", "0")
    assert own == "eval_tasks = 20 seed = 0" and f"the run of this model used seed = 5, {lost}" in note
    own, note = described(capsys, *digits, "--model", "r", "--eval-tasks", "50")
    assert f"used eval_tasks = 20, {lost}" in note
    own, note = described(capsys, "--env", "calculator", "--model", "r")
    assert own == "eval_tasks = 20 seed = 5" and f"used env.digits = 1, max_tokens = 8, {lost}" in note
    note = described(capsys, "--env", "./add.py:Add", "--model", "r")[1]
    assert note == "note: there are 5 different held-out tasks, --eval-tasks asked for 20", "the run never saw them"
    for seed in ("5", "0"):  # a training run that begins with this model
        assert main(["run", *digits, "--model", "r", "--eval-tasks", "20", "--seed", seed, "--dry-run"]) == 0
        assert ("used seed = 5, which this run does not, so it may have" in capsys.readouterr().out) == (seed == "0")
    assert described(capsys, *digits, "--model", "tiny") == ("eval_tasks = 512 seed = 0", "")
    text = (here / "r" / "config.toml").read_text()
    (here / "r" / "config.toml").write_text(text.replace("eval_tasks = 20", "eval_tasks = 0"))
    own, note = described(capsys, *digits, "--model", "r")
    assert own == "eval_tasks = 512 seed = 5" and f"used eval_tasks = 0, {lost}" in note


def test_what_decided_the_runs_numbers_is_noted_where_it_is_not_used(here, capsys):
    (here / "r.py").write_text("def quick(trajectory):\n    return 1.0\n")
    run = ["--env", "calculator", "--env.digits", "1", "--reward", "env:1", "--reward", "r.py:quick:-0.1"]
    run += ["--system", "Be brief.", "--temperature", "0.5", "--samples-per-prompt", "2"]
    assert main(["run", *run, "--eval-tasks", "4", "--steps", "0", "--out", "runs/b"]) == 0
    unused = (
        'the run of this model used env.digits = 1, reward.quick.name = "r.py:quick", reward.quick.weight = -0.1, '
        'system = "Be brief.", which this evaluation does not, so it may have trained on these held-out tasks; to '
        "evaluate as the run did, type: rollouts eval runs/b"
    )
    assert f"note: {unused}\n" in described(capsys, "--env", "calculator", "--model", "runs/b")[1] + "\n"
    checkpoint = "runs/b/checkpoints/step_000000"
    note = described(capsys, "--env", "calculator", "--model", checkpoint)[1]
    assert unused in note
    assert described(capsys, "runs/b") == ("eval_tasks = 4 seed = 0", "")
    typed = ["--max-tokens", "8", "--system", "", "--env.digits", "2", "--reward", "env:1"]
    for file in ("runs/b", "runs/b/config.toml"):
        note = described(capsys, file, "--model", "runs/b", *typed)[1]
        assert "used env.digits = 1, which" in note and "type:" not in note, "the others were typed"
    one = ["--model", "runs/b", *run, "--system", ""]
    assert 'used system = "Be brief.", which this evaluation does not; to' in described(capsys, *one)[1]
    assert "the run of this model used" not in described(capsys, "--env", "./add.py:Add", "--model", "runs/b")[1]


@pytest.mark.parametrize("over, expected", [({}, (1, 1.0)), ({"samples_per_prompt": 3, "temperature": 0}, (3, 0.0))])
def test_an_evaluation_samples_as_the_evaluations_of_the_run(over, expected):
    trained = {"mode": "rl", "env": "e", "samples_per_prompt": 8, "temperature": 0.5}
    for file in (trained, {**trained, "mode": None, "steps": 3}):
        file = {key: value for key, value in file.items() if value is not None}
        found = resolve(merge_over_file(file, {"mode": "eval"}, over)).settings
        assert (found.samples_per_prompt, found.temperature) == expected
    for file in ({**trained, "mode": "eval"}, {"env": "e", "samples_per_prompt": 8, "temperature": 0.5}):
        found = resolve(merge_over_file(file, {"mode": "eval"})).settings
        assert (found.samples_per_prompt, found.temperature) == (8, 0.5), "of an evaluation: it is repeated"
    assert resolve(merge_over_file(trained, {})).settings.samples_per_prompt == 8


def test_a_mixture_is_asked_what_it_held_out(here, capsys):
    """The environments share the held-out tasks by their mean weights, over the steps of the run."""
    envs = ["--env", "a=calculator", "--env", "b=calculator", "--env.b.weight", "[[0, 0], [4, 1]]"]
    assert main(["run", *envs, "--eval-tasks", "20", "--steps", "0", "--max-tokens", "8", "--out", "r"]) == 0
    config = here / "r" / "config.toml"
    config.write_text(config.read_text().replace("steps = 0", "steps = 4"))
    capsys.readouterr()
    assert main(["run", str(config), "--out", "again", "--dry-run"]) == 0
    (counted,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("held-out tasks")]
    assert main(["eval", *envs, "--model", "r", "--dry-run"]) == 0
    assert f"{counted}, each played once" in capsys.readouterr().out


def test_a_folder_that_holds_no_model(here, capsys):
    (here / "empty").mkdir()
    assert main(["eval", *CALCULATOR, "--model", "empty"]) == 2
    assert "holds no run, no checkpoint, no model" in capsys.readouterr().err
    assert not (here / "runs").exists()
