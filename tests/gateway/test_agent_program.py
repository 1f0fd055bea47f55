"""The environment `agent`: a program of the user plays the tasks."""

from __future__ import annotations

import json
import random
import shlex
import sys
from pathlib import Path

import psutil
import pytest

import rollouts
from rollouts.env.agent import Agent
from rollouts.errors import ConfigError

PROGRAM = """
import json, os, sys, urllib.request

task = json.load(sys.stdin)
assert sorted(task) == ["id", "info", "prompt"], task
assert "SECRET_API_KEY" not in os.environ
print("playing", task["prompt"])

def ask(text, *before, key=os.environ["OPENAI_API_KEY"], **more):
    body = {"model": "gpt-9", "messages": [*before, {"role": "user", "content": text}], **more}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode())
    request.add_header("authorization", "Bearer " + key)
    request.add_header("content-type", "application/json")
    with urllib.request.urlopen(request) as answer:
        if more:
            return answer.read(20)  # and it disconnects in the stream
        return json.load(answer)["choices"][0]["message"]["content"]

number = int(task["prompt"].split()[-1])
if number == 1:
    sys.exit("no luck with 1")
if number == 2:
    sys.exit(0)
if number == 5:
    for _ in range(1000):
        print("x" * 10_000)
if number == 6:
    import socket
    raw = socket.create_connection(("127.0.0.1", int(os.environ["OPENAI_BASE_URL"].split(":")[2].split("/")[0])))
    raw.sendall(bytes(range(256)) * 100)
    raw.close()
if number == 7:
    ask(task["prompt"], stream=True)
if number == 8:
    ask(task["prompt"], key="rollouts-of-another-episode")
first = ask(task["prompt"])
if number == 4:
    ask("a subagent")
    ask("go on", {"role": "user", "content": task["prompt"]}, {"role": "assistant", "content": first})
    sys.exit()
if number == 3:
    import subprocess, time
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open("pids.txt", "a").write(f"{os.getpid()} {child.pid} ")
    time.sleep(600)
ask("and now?")
"""


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SECRET_API_KEY", "x")
    Path("agent.py").write_text(PROGRAM)
    Path("judge.py").write_text("def score(trajectory):\n    return float(len(trajectory.last_text))\n")
    rows = [json.dumps({"prompt": f"Say {number}", "answer": number, "id": str(number)}) for number in range(1, 9)]
    Path("rows.jsonl").write_text("\n".join(rows))
    Path("empty.jsonl").write_text('{"prompt": "Say 9", "id": "9"}')


@pytest.mark.slow
def test_programs_play_and_fail_without_ending_the_run(files):
    command = f"{shlex.quote(sys.executable)} agent.py"
    settings = {
        "env": {"name": "agent", "command": command, "data": "rows.jsonl", "eval_data": "empty.jsonl"},
        "reward": "./judge.py:score",
        "loss": "grpo",
        "steps": 1,
        "prompts_per_step": 8,
        "samples_per_prompt": 2,
        "over_sampling": 1.0,
        "retries": 0,
        "max_tokens": 40,
        "episode_seconds": 8,
        "eval_tasks": 0,
        "filter": "none",
        "max_failures": 20,
        "out": "run",
    }
    rollouts.run(**settings)
    lines = [json.loads(line) for line in Path("run/trajectories/step_000000.jsonl").read_text().splitlines()]
    played = {line["task"]["id"]: line for line in lines}
    assert set(played) == {str(number) for number in range(1, 9)}
    assert "code 1 after it wrote 'no luck with 1'" in played["1"]["error"]
    assert "ended without a reply of the model" in played["2"]["error"]
    assert (played["3"]["status"], played["3"]["reward"]) == ("timeout", None)
    assert "code 1 after it wrote 'urllib.error.HTTPError: HTTP Error 401" in played["8"]["error"]
    done = [played[str(number)] for number in range(4, 8)]
    assert {line["status"] for line in done} <= {"completed", "truncated"}
    assert done[0]["info"]["program"] == {"stdout": "playing Say 4\n", "stderr": "", "exit_code": 0}
    agents = [line for line in lines if line["task"]["id"] == "4" and line["messages"][0]["content"] == "Say 4"]
    last = [line["messages"][3]["content"] for line in agents]
    assert len(last) == 2 and [line["reward"] for line in agents] == list(map(len, last)), "not the subagent's reply"
    flood = done[1]["info"]["program"]["stdout"]
    assert flood.startswith("playing Say 5\nxxx") and len(flood) < 1_000_000
    for pid in map(int, Path("pids.txt").read_text().split()):
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


TEN = """
import json, os, urllib.request
source = open("agent.py").read()
exec(source[source.index("def ask"):source.index("number = int")])
for number in range(10):
    if os.fork() == 0:
        open(f"reply_{number}.txt", "w").write(ask(f"process {number}"))
        os._exit(0)
codes = [os.wait()[1] for _ in range(10)]
assert codes == [0] * 10, codes
"""


def test_ten_processes_of_an_agent_ask_at_once(files):
    Path("ten.py").write_text(TEN)
    rollouts.run(
        env={
            "name": "agent",
            "command": f"{shlex.quote(sys.executable)} ten.py",
            "data": "rows.jsonl",
            "eval_data": "empty.jsonl",
        },
        reward="./judge.py:score",
        mode="eval",
        eval_tasks=1,
        samples_per_prompt=1,
        max_tokens=400,
        max_turns=10,
        out="run",
    )
    (file,) = Path("run").rglob("trajectories/*.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert {line["status"] for line in lines} == {"completed"}
    found = {line["messages"][0]["content"]: line["messages"][1]["content"] for line in lines}
    assert found == {f"process {number}": Path(f"reply_{number}.txt").read_text() for number in range(10)}
    assert all(sum(line["segments"][0]["loss_mask"]) > 0 for line in lines)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"data": "rows.jsonl"}, "type --env.command 'python my_agent.py'"),
        ({"command": "no-such-program --now", "data": "rows.jsonl"}, "there is no program 'no-such-program'"),
        ({"command": "python 'x", "data": "rows.jsonl"}, "No closing quotation"),
        ({"command": "cd . && python agent.py"}, "type --data rows.jsonl"),
    ],
)
def test_a_mistake_is_found_before_the_run(files, settings, words):
    with pytest.raises(ConfigError, match=words):
        Agent(**settings).tasks("train", random.Random(0))
