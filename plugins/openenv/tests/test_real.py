"""Episodes on the real servers of `openenv` and `ors-sdk`, each in a virtual environment of its own.

`ROLLOUTS_OPENENV` and `ROLLOUTS_ORS` are the Python of these; `make test-adapters` makes both.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import trio
from rollouts_openenv.sessions import REFUSALS, Held

from rollouts.env.background import background

sys.path.insert(0, str(Path(__file__).parent))
import imitation
from test_openenv import called, check_guessing, check_ors, play, results

pytestmark = [pytest.mark.adapters, pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")]
HERE = Path(__file__).parent
WRITTEN_FOR = "0.10.0"


def python_of(variable: str) -> str:
    found = os.environ.get(variable, "")
    if not found:
        pytest.skip(f"set {variable} to the Python of a virtual environment with the server")
    return found


@contextlib.contextmanager
def serving(variable: str, script: str, *more: str):
    """The address of a real server on a free port."""
    python = python_of(variable)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([python, HERE / script, str(port), *more], stderr=subprocess.DEVNULL)
    try:
        for _ in range(3000):
            with socket.socket() as trial:
                if trial.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None, "the server does not start"
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def url():
    with serving("ROLLOUTS_OPENENV", "openenv_server.py", "0.5") as found:
        yield found


ACTIONS = [{"number": 50}, {"number": 20, "tone": "loud"}, {"number": 70}]
UPSTREAM = """
import asyncio, json, sys
from openenv.core.generic_client import GenericEnvClient

async def main(url, seed, actions):
    async with GenericEnvClient(base_url=url) as client:
        found = [await client.reset(seed=seed)]
        found += [await client.step(action) for action in actions]
    print(json.dumps([[each.observation, each.reward, each.done] for each in found]))

asyncio.run(main(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])))
"""


def ours(url: str, seed: int):
    """The same with our session."""

    async def steps():
        async with background() as loop:
            held = Held(url, {}, 1.0, 30.0)
            session, first = await held.open(loop, {"seed": seed})
            found = [first, *[await session.step(action) for action in ACTIONS]]
            await held.close()
        return [list(each) for each in found]

    return trio.run(steps)


def test_equals_upstreams_client_and_the_imitation(url):
    for seed in (3, 4):
        command = [python_of("ROLLOUTS_OPENENV"), "-c", UPSTREAM, f"{url}/guessing", str(seed), json.dumps(ACTIONS)]
        theirs = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
        assert ours(f"{url}/guessing", seed) == theirs
        with imitation.serving() as (imitated, _):
            assert ours(f"{imitated}/guessing", seed) == theirs


def test_an_action_is_a_call_of_a_tool_and_pings_are_answered(url):
    check_guessing(url)
    episode = play({"url": f"{url}/guessing"}, [called("act", number=200)] * 3, delay=1.5)
    assert episode.score.value == -1.5


def test_tools_of_mcp(url):
    calls = [called("price", item="pear"), called("buy", item="pear", count=0), called("buy", item="test-1")]
    episode = play({"url": f"{url}/shop"}, calls, place=1)
    assert results(episode)[1:] == ["4", "Error: ValueError: Error calling tool 'buy': buy at least one"]
    assert episode.score.value == 1.0 and episode.task.id == "shop/test/1"


CONTRACT = """
import json
from importlib.metadata import version
from openenv.core.env_server import mcp_types, types

models = (types.WSResetMessage, types.WSStepMessage, types.WSObservationResponse, types.WSErrorResponse,
          types.SchemaResponse, mcp_types.CallToolAction, mcp_types.CallToolObservation, mcp_types.WSMCPMessage)
fields = {model.__name__: sorted(model.model_fields) for model in models}
print(json.dumps([version("openenv"), fields, [code.value for code in types.WSErrorCode]]))
"""


def test_upstream_has_the_messages_that_this_package_uses():
    run = subprocess.run([python_of("ROLLOUTS_OPENENV"), "-c", CONTRACT], capture_output=True, check=True)
    version, fields, codes = json.loads(run.stdout)
    now = f"openenv {version} differs from {WRITTEN_FOR}, for which this package was written: "
    expected = {
        "WSResetMessage": ["data", "type"],
        "WSStepMessage": ["data", "type"],
        "WSObservationResponse": ["data", "type"],
        "WSErrorResponse": ["data", "type"],
        "SchemaResponse": ["action", "observation", "reset_observation", "state"],
        "CallToolAction": ["arguments", "metadata", "tool_name", "type"],
        "CallToolObservation": ["done", "error", "metadata", "result", "reward", "tool_name"],
        "WSMCPMessage": ["data", "type"],
    }
    assert fields == expected, now + "the fields of messages"
    assert {"CAPACITY_REACHED", *REFUSALS} <= set(codes), now + "the codes of errors"


ORS_WRITTEN_FOR = "0.1.0"
ORS_CONTRACT = """
import json, sys
from importlib.metadata import version
from ors import Server, types
sys.path.insert(0, sys.argv[1])
from ors_server import Guessing

names = ("TextBlock", "ImageBlock", "ToolOutput", "RunToolSuccess", "RunToolError", "ToolSpec", "ListToolsOutput",
         "ToolCall", "CreateSession", "NumTasks", "GetTask", "Split")
fields = {name: sorted(getattr(types, name).model_fields) for name in names}
found = [(route.methods, route.path) for route in Server([Guessing]).app.routes if hasattr(route, "methods")]
routes = [f"{method} {path}" for methods, path in found for method in methods]
print(json.dumps([version("ors-sdk"), fields, routes]))
"""


def test_ors_has_the_messages_and_requests_that_this_package_uses():
    command = [python_of("ROLLOUTS_ORS"), "-c", ORS_CONTRACT, HERE]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, f"the names of ors-sdk have changed: {run.stderr.strip().splitlines()[-1]}"
    version, fields, routes = json.loads(run.stdout)
    now = f"ors-sdk {version} differs from {ORS_WRITTEN_FOR}, for which this package was written: "
    expected = {
        "TextBlock": ["detail", "text", "type"],
        "ImageBlock": ["data", "detail", "mimeType", "type"],
        "ToolOutput": ["blocks", "finished", "metadata", "reward"],
        "RunToolSuccess": ["ok", "output"],
        "RunToolError": ["error", "ok"],
        "ToolSpec": ["description", "input_schema", "name"],
        "ListToolsOutput": ["tools"],
        "ToolCall": ["input", "name", "task_id"],
        "CreateSession": ["env_name", "index", "secrets", "split", "task_spec"],
        "NumTasks": ["split"],
        "GetTask": ["index", "split"],
        "Split": ["name", "type"],
    }
    for name, wanted in expected.items():
        assert fields[name] == wanted, f"{now}the fields of {name}"
    used = "GET /list_environments|GET /{env_name}/splits|POST /{env_name}/num_tasks|POST /{env_name}/task|POST /create"
    used += "|POST /create_session|GET /{env_name}/prompt|GET /{env_name}/tools|GET /{env_name}/task_tools"
    used += "|POST /{env_name}/call|POST /ping|POST /delete|POST /delete_session"
    missing = sorted(set(used.split("|")) - set(routes))
    assert not missing, f"{now}{', '.join(missing)}"


def test_ors():
    with serving("ROLLOUTS_ORS", "ors_server.py") as found:
        check_ors(found)
