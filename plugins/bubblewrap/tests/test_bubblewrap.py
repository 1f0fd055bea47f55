"""Commands in bubblewrap: what they see, what they cannot reach, and that they end."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest
from rollouts_bubblewrap import BubblewrapSandboxes
from rollouts_check.api import Options, check
from rollouts_check.environments.agents import play_each, says
from rollouts_check.environments.subject import make_subject
from rollouts_check.packages import Found

import rollouts
from rollouts.cli import main
from rollouts.errors import ConfigError
from rollouts.sandboxes import SandboxLimits
from rollouts.sandboxes.subprocesses import SubprocessSandboxes


def why_not() -> str:
    try:
        BubblewrapSandboxes().check()
    except ConfigError as error:
        return str(error)
    return ""


real = pytest.mark.skipif(bool(why_not()), reason=why_not())


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def open_sandbox(home):
    opened = []

    def open_sandbox(limits=None, **settings):
        opened.append(BubblewrapSandboxes(limits=SandboxLimits(**(limits or {})), **settings).open())
        return opened[-1]

    yield open_sandbox
    for sandbox in opened:
        sandbox.close()
    assert list(home.glob("rollouts-sandbox-*")) == []


def test_a_program_that_is_missing_says_what_to_type():
    with pytest.raises(ConfigError, match=r"'no-bwrap' is not installed\ntype: apt-get install bubblewrap"):
        BubblewrapSandboxes(program="no-bwrap").check()
    with pytest.raises(ConfigError, match=r"cannot make a sandbox here"):
        BubblewrapSandboxes(program=shutil.which("false") or "false").check()
    with pytest.raises(ConfigError, match=r"--sandbox\.readable /no/folder: there is no such folder"):
        BubblewrapSandboxes(readable=["/no/folder"])


@real
def test_commands_and_files(open_sandbox):
    sandbox = open_sandbox()
    result = sandbox.exec("cat a/b; pwd; echo $HOME; exit 3", files={"a/b": "1\n"}, stdin="x")
    assert result[:3] == (3, "1\n/workspace\n/workspace\n", "")
    assert sandbox.exec([sys.executable, "-c", "print(6 * 7)"]).text == "42"  # the Python environment of the run
    sandbox.exec("echo 2 > made; ln -s /workspace/made link; echo kept > /tmp/t")
    assert sandbox.read("/workspace/link") == sandbox.read("made") == b"2\n"
    assert sandbox.exec("cat /tmp/t").stdout == "kept\n"
    assert sandbox.exec("cat", stdin="x" * 30_000).stdout == "x" * 30_000


@real
def test_nothing_outside_can_be_read_or_written(open_sandbox, home):
    (home / "secret").write_text("private")
    sandbox = open_sandbox()
    for path in (home / "secret", Path.home() / ".bashrc", "/etc/shadow", f"{sandbox.folder}/workspace"):
        assert sandbox.exec(["cat", str(path)]).exit_code == 1
    for path in (
        "/x",
        "/usr/x",
        "/etc/x",
        "/dev/x",
        "/proc/sys/kernel/hostname",
        "/proc/sysrq-trigger",
        str(home / "x"),
    ):
        assert sandbox.exec(f"echo changed > {path}").exit_code != 0
    assert [path.name for path in home.iterdir() if path.name[:9] != "rollouts-"] == ["secret"]
    sandbox.exec(f"ln -s {home}/secret link; ln -s /etc/hostname name")
    for path in ("link", "name", "../tmp/t"):
        with pytest.raises(ValueError, match="outside"):
            sandbox.read(path)
        with pytest.raises(ValueError, match="outside"):
            sandbox.write(path, "changed")
    assert (home / "secret").read_text() == "private"
    assert open_sandbox(readable=[str(home)]).exec(["cat", str(home / "secret")]).stdout == "private"


@real
def test_folders_at_paths_of_their_own_are_writable_and_last(open_sandbox):
    sandbox = open_sandbox(folders=["/app", "/logs"])
    assert sandbox.exec("mkdir /logs/a; echo 1 > /app/x; ln -s /etc /app/link").exit_code == 0
    assert sandbox.exec("cat /app/x; ls /logs; rm -rf /app; ln -s /etc /app; echo 2 > /app/x; cat /app/x").stdout == (
        "1\na\n2\n"
    )
    assert sandbox.exec("echo 1 > /other").exit_code != 0
    assert not Path("/app/x").exists()


@pytest.mark.parametrize("path", ["app", "/", "/usr/local", "/tmp/x", "/a/../etc", "/workspace"])
def test_folders_that_cannot_be_chosen(path):
    with pytest.raises(ConfigError, match=r"--sandbox\.folders .*: (expected an absolute path|commands see)"):
        BubblewrapSandboxes(folders=[path])


@real
def test_the_network_is_only_there_if_it_is_chosen(open_sandbox):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        ask = [sys.executable, "-c", f"import socket; socket.create_connection(('127.0.0.1', {port}), 5)"]
        assert "refused" in open_sandbox().exec(ask).stderr
        chosen = BubblewrapSandboxes(network=True)
        assert any("network" in words for words in chosen.not_stopped)
        assert open_sandbox(network=True).exec(ask).exit_code == 0


@real
def test_the_variables_of_other_processes_cannot_be_read(open_sandbox):
    with subprocess.Popen(["sleep", "60"], env={"MY_API_KEY": "private"}) as other:
        try:
            read = f"cat /proc/{other.pid}/environ; cat /proc/*/environ"
            assert "private" not in open_sandbox().exec(read).stdout
            plain = SubprocessSandboxes()
            with contextlib.closing(plain.open()) as sandbox:
                assert "MY_API_KEY=private" in sandbox.exec(read).stdout
            assert any("environment variables" in words for words in plain.not_stopped)
        finally:
            other.kill()


@real
def test_it_sees_only_its_own_processes_and_they_end_with_the_command(open_sandbox):
    sandbox = open_sandbox()
    listed = sandbox.exec("setsid sleep 300 & ls /proc | grep -c '^[0-9]'")
    assert listed.exit_code == 0 and int(listed.stdout) < 10
    late = sandbox.exec("setsid sh -c 'sleep 1.5; echo late > late' & sleep 300", seconds=0.5)
    assert late.timed_out
    assert sandbox.exec("sleep 2; ls").stdout == ""  # the process that would write `late` was killed
    assert sandbox.exec("kill -9 -1; kill -9 $PPID; echo alive").stdout == "alive\n"


@real
def test_limits(open_sandbox):
    sandbox = open_sandbox(limits={"memory_gib": 0.2, "processes": 30, "file_mib": 1, "output_kib": 1})
    bomb = "i=0; while [ $i -lt 300 ]; do setsid sleep 300 & i=$((i + 1)); done; wait"
    result = sandbox.exec(bomb, seconds=60)
    assert result.was_killed_for_processes or "fork" in result.stderr  # root has no limit of the kernel
    eats = [sys.executable, "-c", "import time; x = b'x' * (300 << 20); time.sleep(60)"]
    assert sandbox.exec(eats, seconds=50).was_killed_for_memory
    assert sandbox.exec("head -c 3000000 /dev/zero > big; stat -c %s big").stdout == f"{1 << 20}\n"
    assert sandbox.exec("yes | head -n 5000").is_cut


BOXED = """\
import sys

from rollouts import Task, reward


class Boxed:
    def tasks(self, split, rng):
        while True:
            yield Task(f"Say {rng.random()}.")

    def setup(self, task, sandbox):
        prefix = sandbox.exec([sys.executable, "-c", "import rollouts, sys; print(sys.prefix)"]).text
        self.is_boxed = sandbox.exec(["pwd"]).text == "/workspace" and prefix == sys.prefix

    @reward
    def boxed(self):
        return float(self.is_boxed)
"""


@real
@pytest.mark.slow
def test_a_sandbox_in_a_worker_with_a_virtual_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("ROLLOUTS_ENVS", str(tmp_path / "envs"))
    links, plugin = tmp_path / "links", Path(__file__).parents[1]
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(links)]
    subprocess.run([*build, str(plugin)], check=True)
    (made,) = links.glob("*.whl")
    with zipfile.ZipFile(links / "boxed-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("boxed.py", BOXED)
        wheel.writestr("boxed-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: boxed\nVersion: 1\n")
        wheel.writestr("boxed-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("boxed-1.dist-info/entry_points.txt", "[rollouts.environments]\nboxed = boxed:Boxed\n")
        wheel.writestr("boxed-1.dist-info/RECORD", "")
    assert main(["env", "install", wheel.filename, "--with", str(made), "--no-index"]) == 0
    settings = {"worker": {"kind": "venv"}, "sandbox": {"name": "bubblewrap"}}
    found = check(Found("boxed", "boxed"), Options(only=["rewards", "worker-lives"], settings=settings))
    assert [each.status for each in found.results] == ["passed", "passed"], found.results
    subject = make_subject(Found("boxed", "boxed"), settings, tmp_path)
    try:
        (played,) = play_each(subject, subject.tasks[:1], [says("")])
    finally:
        subject.close()
    assert played.reward == 1.0


PROGRAM = """
import json, os, socket, sys, urllib.request
task = json.load(sys.stdin)
body = {"model": "any", "messages": [{"role": "user", "content": task["prompt"]}]}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode())
request.add_header("authorization", "Bearer " + os.environ["OPENAI_API_KEY"])
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), 5)
except OSError:
    print("no network")
"""


@real
def test_the_program_of_an_agent_reaches_the_model_and_nothing_else(home, monkeypatch):
    monkeypatch.chdir(home)
    Path("agent.py").write_text(PROGRAM)
    Path("rows.jsonl").write_text('{"prompt": "1 + 1?", "answer": 2}')
    Path("judge.py").write_text("def score(trajectory):\n    return float(len(trajectory.last_text))\n")
    with socket.create_server(("127.0.0.1", 0)) as other:
        command = f"{os.path.realpath(sys.executable)} agent.py 127.0.0.1 {other.getsockname()[1]}"
        rollouts.run(
            mode="eval",
            env={"name": "agent", "command": command, "eval_data": "rows.jsonl", "data": "rows.jsonl"},
            reward="./judge.py:score",
            sandbox={"name": "bubblewrap", "readable": [str(home)]},
            max_tokens=20,
            out="run",
            quiet=True,
        )
    (line,) = map(json.loads, Path("run/trajectories/eval.jsonl").read_text().splitlines())
    assert line["info"]["program"]["stdout"] == f"{line['messages'][-1]['content']}\nno network\n"
    assert sum(map(sum, (each["loss_mask"] for each in line["segments"]))) > 0, "its tokens are recorded"
