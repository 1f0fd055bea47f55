"""Rollouts that upstream recorded with its own agent, replayed on its real servers: the same results and rewards.

`ROLLOUTS_NEMO_GYM` is the Python of a virtual environment with nemo-gym; `make test-adapters` makes it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import time
from pathlib import Path

import pytest
from rollouts_nemo_gym import NemoGym
from rollouts_nemo_gym.responses import items_of
from rollouts_nemo_gym.rows import KEY, read_rows

from rollouts.env.shared import shared_values
from rollouts.inference.chatting import ChatReply
from rollouts.runs.play import play_episode, play_plan
from rollouts.types import Message, Status, ToolCall

pytestmark = [pytest.mark.adapters, pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")]
HERE, WRITTEN_FOR = Path(__file__).parent, "0.4.0"
SERVERS = [
    "example_multi_step",
    "example_session_state_mgmt",
    "example_single_tool_call",
    "example_tool_call_multireward",
    "mcqa",
    "xlam_fc",
]


@pytest.fixture(scope="module")
def python():
    found = os.environ.get("ROLLOUTS_NEMO_GYM", "")
    if not found:
        pytest.skip("set ROLLOUTS_NEMO_GYM to the Python of a virtual environment with nemo-gym")
    return found


@pytest.fixture(scope="module")
def wheel(python):
    """Where the servers are."""
    code = "import nemo_gym; print(nemo_gym.__file__)"
    place = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    return Path(place).parent.parent / "resources_servers"


CONTRACT = """
import json, sys
from importlib.metadata import version
from unittest.mock import MagicMock
import nemo_gym.base_resources_server as base
from nemo_gym.server_utils import ServerClient

names = ("BaseRunRequest", "BaseSeedSessionRequest", "BaseVerifyRequest", "BaseVerifyResponse")
fields = {name: sorted(getattr(base, name).model_fields) for name in names}

class Server(base.SimpleResourcesServer):
    async def verify(self, body):
        raise NotImplementedError

config = base.BaseResourcesServerConfig(host="127.0.0.1", port=1, entrypoint="app.py", name="a", domain="other")
app = Server(config=config, server_client=MagicMock(spec=ServerClient)).setup_webserver()
found = [(route.methods, route.path) for route in app.routes if hasattr(route, "methods")]
routes = [f"{method} {path}" for methods, path in found for method in methods]
print(json.dumps([version("nemo-gym"), fields, routes]))
"""


def test_upstream_has_the_requests_that_this_package_uses(python):
    run = subprocess.run([python, "-c", CONTRACT], capture_output=True, text=True, check=False)
    assert run.returncode == 0, f"the names of nemo-gym have changed: {run.stderr.strip().splitlines()[-1]}"
    version, fields, routes = json.loads(run.stdout.splitlines()[-1])
    now = f"nemo-gym {version} differs from {WRITTEN_FOR}, for which this package was written: "
    expected = {
        "BaseRunRequest": ["responses_create_params"],
        "BaseSeedSessionRequest": [],
        "BaseVerifyRequest": ["response", "responses_create_params"],
        "BaseVerifyResponse": ["response", "responses_create_params", "reward"],
    }
    for name, wanted in expected.items():
        assert fields[name] == wanted, f"{now}the fields of {name}"
    missing = sorted({"POST /seed_session", "POST /verify", "GET /openapi.json"} - set(routes))
    assert not missing, f"{now}there is no {', '.join(missing)}"


@contextlib.contextmanager
def serving(python: str, name: str):
    """The address of a real server on a free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([python, HERE / "gym_server.py", name, str(port)], stderr=subprocess.PIPE, text=True)
    try:
        for _ in range(1800):
            with socket.socket() as trial:
                if trial.connect_ex(("127.0.0.1", port)) == 0:
                    break
            if process.poll() is not None:
                pytest.skip(f"{name} does not start: {process.stderr.read().strip().splitlines()[-1]}")
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.communicate()


def said(output: list[dict]) -> list[Message]:
    """The replies of the model in a recorded response. A new one begins after results, and with a second text."""
    replies, begins = list[Message](), True
    for item in output:
        kind = item["type"]
        if kind == "function_call_output":
            begins = True
            continue
        if begins or (kind != "function_call" and (replies[-1].tool_calls or (kind == "message" and replies[-1].text))):
            replies.append(Message("assistant"))
        begins = False
        if kind == "message":
            replies[-1].content = "".join(part["text"] for part in item["content"])
        elif kind == "function_call":
            call = ToolCall(item["name"], json.loads(item["arguments"]), id=item["call_id"])
            replies[-1].tool_calls = [*replies[-1].tool_calls, call]
        else:
            replies[-1].reasoning = "".join(part["text"] for part in item["summary"]) or None
    return replies


def played(url: str, data: Path, number: int, replies: list[Message]):
    given = iter(replies)
    tree = {"env": {"name": "nemo_gym", "url": url, "data": str(data)}, "eval_tasks": 1, "max_turns": len(replies)}
    with shared_values(), play_plan(tree) as plan:
        rows = {"train": read_rows("--env.data", str(data))}
        task = NemoGym(url=url, data=str(data)).tasks("train", None, rows)[number]
        return play_episode(plan, task, 0, lambda _: ChatReply(next(given), "stop"))


def flat(output) -> list:
    """What the items of a response say. Upstream's spaces in JSON changed with its web framework."""
    found = []
    for item in output:
        if item["type"] == "function_call":
            found.append(("call", item["name"], json.loads(item["arguments"])))
        elif item["type"] == "function_call_output":
            found.append(("result", json.loads(item["output"])))
        elif item["type"] == "message":
            found.append(("message", "".join(part["text"] for part in item["content"])))
    return found


def texts(row: dict) -> list[str]:
    """What the messages of a prompt say. The rows and what was recorded have another order."""
    return [each["content"] for each in row[KEY]["input"]]


@pytest.mark.equals_upstream("nemo_gym")
@pytest.mark.parametrize("name", SERVERS)
def test_recorded_rollouts_earn_the_recorded_rewards(python, wheel, name):
    data = wheel / name / "data" / "example.jsonl"
    rows = [json.loads(line) for line in data.open()]
    recorded = [json.loads(line) for line in (wheel / name / "data" / "example_rollouts.jsonl").open()]
    with serving(python, name) as url:
        prompts = [texts(row) for row in rows]
        both = [each for each in recorded if texts(each) in prompts]
        assert both, "no row of the data was recorded"
        for each in both:
            number = prompts.index(texts(each))
            output = each["response"]["output"]
            episode = played(url, data, number, said(output))
            assert episode.trajectory.status is Status.COMPLETED, episode.trajectory.error
            ours = list(items_of(episode.trajectory.messages[len(episode.task.messages) :]))
            assert flat(ours) == flat(output)
            assert episode.score.value == pytest.approx(each["reward"]), episode.score.why
