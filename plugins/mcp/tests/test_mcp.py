"""Tools of real MCP servers, over stdio and over HTTP on loopback, in episodes of an environment."""

from __future__ import annotations

import contextlib
import inspect
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import outcome
import pytest
import trio
from rollouts_mcp import MCP
from rollouts_mcp.results import text_of
from rollouts_mcp.sessions import Host

from rollouts import Task
from rollouts.cli import main
from rollouts.env.background import background
from rollouts.env.json_schemas import plain_names, plain_schema
from rollouts.env.schema import read_arguments
from rollouts.env.shared import shared_values
from rollouts.env.task_tools import Tool
from rollouts.env.tools import run_tool
from rollouts.errors import ConfigError, EnvironmentDefinitionError, ServiceLostError
from rollouts.inference.chatting import ChatReply
from rollouts.runs.play import play_episode, play_plan
from rollouts.types import Message, Status, ToolCall

SERVER = str(Path(__file__).with_name("mcp_server.py"))
STDIO = [sys.executable, SERVER]
WRITTEN_FOR = "2.3"
NAMES = ["add", "remember", "files_read_all", "travel", "fail", "big", "picture", "wait", "die"]


# The client of mcp does not close all of its memory streams if it loses a connection over HTTP.
lost_streams = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@contextlib.contextmanager
def http_server(kind: str = "http", python: str = sys.executable):
    """The URL of a server on a free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([python, SERVER, kind, str(port)], stderr=subprocess.DEVNULL)
    try:
        begun = time.monotonic()
        while not _answers(port):
            assert process.poll() is None and time.monotonic() - begun < 60, "the server does not start"
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/{'mcp' if kind == 'http' else 'sse'}"
    finally:
        process.kill()
        process.wait()


def _answers(port: int) -> bool:
    with socket.socket() as trial:
        return trial.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def url():
    with http_server() as found:
        yield found


def outcomes(kit: MCP, *calls: tuple[str, dict], seconds: float = 30.0):
    """The names of the tools, and the outcomes of calls in one episode. An error takes an outcome's place."""

    async def play(host):
        found = []
        await kit.setup(Task("x"), host)
        tools = {tool.name: tool.method for tool in kit.tools(Task("x"))}
        for name, arguments in calls:
            try:
                found.append(await run_tool(tools, ToolCall(name, arguments, "c1"), seconds_max=seconds))
            except ServiceLostError as error:
                found.append(error)
        await kit.close()
        return list(tools), found

    async def hosted():
        async with background() as loop:
            played = await outcome.acapture(play, Host(loop))
        return played.unwrap()

    return trio.run(hosted)


def check_server(kit: MCP) -> None:
    """Each kind of result. The server ends at the last call but one."""
    names, found = outcomes(
        kit,
        ("add", {"a": "3"}),
        ("files_read_all", {}),
        ("travel", {"place": {"name": "Rome", "parent": {"name": "Italy"}}, "by": "car"}),
        ("fail", {}),
        ("big", {"count": 500_000}),
        ("picture", {}),
        ("add", {"a": 1, "c": 2}),
        ("remember", {"text": "a"}),
        ("remember", {"text": "b"}),
        ("die", {}),
        ("add", {"a": 1}),
    )
    assert names == NAMES
    texts = [getattr(each, "text", None) for each in found]
    assert texts[:3] == ["5", "read", "Rome car"]
    assert found[3].failure == "exception" and texts[3].startswith("Error: ValueError: Error executing tool fail")
    assert len(texts[4]) < 17_000 and texts[4].endswith("[cut: the first 16000 of 500000 characters]")
    assert texts[5] == "[image: image/png, 6 bytes, which cannot be shown as text]"
    assert found[6].failure == "bad_arguments" and "no argument 'c'" in texts[6]
    assert texts[7:9] == ["a", "a,b"]
    assert all(isinstance(each, ServiceLostError) and "was lost" in str(each) for each in found[9:])


def test_over_stdio():
    check_server(MCP(server=STDIO))


@pytest.mark.nightly
@lost_streams
def test_over_http():
    with http_server() as found:
        check_server(MCP(server=found))


@pytest.mark.adapters
@lost_streams
@pytest.mark.parametrize("kind", ["stdio", "http", "sse"])
def test_servers_of_the_first_version(kind):
    """`ROLLOUTS_MCP_1` is the Python of a virtual environment with mcp 1.x, which `make test-adapters` makes."""
    python = os.environ.get("ROLLOUTS_MCP_1", "")
    if not python:
        pytest.skip("set ROLLOUTS_MCP_1 to the Python of a virtual environment with mcp<2")
    if kind == "stdio":
        return check_server(MCP(server=[python, SERVER]))
    with http_server(kind, python) as found:
        check_server(MCP(server=found, transport=kind))


# --- in episodes ------------------------------------------------------------------------------------------------------


def called(name: str, /, **arguments):
    return Message("assistant", "", [ToolCall(name, arguments, "c1")])


def play(kit: dict, *episodes: list[Message]):
    """Episodes of the calculator with these tools and replies, one after another."""
    found = []
    with shared_values(), play_plan({"env": "calculator", "tool": {"kit": {"name": "mcp", **kit}}}) as plan:
        for replies in episodes:
            given = iter([*replies, Message("assistant", "Done.")])
            task = plan.environments[0].held_out(1)[0]
            found.append(play_episode(plan, task, 0, lambda _, given=given: ChatReply(next(given), "stop")))
    return found


def results(episode) -> list[str]:
    return [message.text for message in episode.trajectory.messages if message.role == "tool"]


@pytest.mark.slow
def test_each_episode_has_a_session_of_its_own():
    remembers = [called("remember", text="a"), called("calculator", expression="1 + 1")]
    kit = {"server": STDIO, "only": ["remember"]}
    assert [results(each) for each in play(kit, remembers, remembers)] == [["a", "2"], ["a", "2"]]


@pytest.mark.slow
def test_a_shared_server_that_dies_fails_the_episode_and_is_opened_again():
    remembers = [called("remember", text="a")]
    *shared, died, after = play(
        {"server": STDIO, "share": True}, remembers, remembers, [called("die")], [called("add", a=1)]
    )
    assert [results(each) for each in shared] == [["a"], ["a,a"]]
    assert died.trajectory.status is Status.ENVIRONMENT_ERROR and "was lost" in died.trajectory.error
    assert died.score.value is None and died.may_retry
    assert results(after) == ["3"] and after.score.value == 0.0


def test_a_run_offers_them_and_keeps_no_secret(url, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    kit = ["--tool", "kit=mcp", "--tool.kit.server", url, "--tool.kit.prefix", "my.", "--tool.kit.only", '["add"]']
    secret = ["--tool.kit.headers.Authorization", "Bearer sk-123"]
    assert main(["run", "--env", "calculator", *kit, *secret, "--steps", "1", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "call: my_add(a=1)" in shown and "answer: '3'" in shown and "sk-123" not in shown
    two = ["--tool", "other=mcp", "--tool.other.server", url]
    assert main(["run", "--env", "calculator", *two, *kit[:4], "--steps", "1", "--dry-run"]) == 2
    assert "has a tool named 'add' already, and --tool" in capsys.readouterr().err


def test_the_class_keeps_the_contract(url, capsys):
    flags = ["--tool.mcp.server", url, "--tool.mcp.only", '["add", "travel", "picture"]']
    assert main(["check", "mcp", *flags, "--skip", "wheel"]) == 0, capsys.readouterr().out
    assert "tools: add, travel, picture" in capsys.readouterr().out


# --- hangs and deaths -------------------------------------------------------------------------------------------------


def test_a_call_that_hangs_is_cut_off_and_the_session_goes_on(url):
    _, (hung, after) = outcomes(MCP(server=url), ("wait", {"seconds": 20}), ("add", {"a": 1}), seconds=0.3)
    assert hung.failure == "timeout" and after.text == "3"


SILENT = "import time; print('hello', flush=True); time.sleep(60)"
BROKEN = "import sys; print('no license', file=sys.stderr); sys.exit(2)"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        pytest.param(
            *({"server": [sys.executable, "-c", SILENT], "open_seconds": 0.5}, "did not open a session in 0.5 seconds"),
            marks=pytest.mark.slow,
        ),
        ({"server": [sys.executable, "-c", BROKEN]}, "it wrote: no license"),
        ({"server": "http://127.0.0.1:9/mcp"}, "ConnectError"),
    ],
    ids=["silent", "broken", "absent"],
)
def test_a_server_that_does_not_open_fails_the_episode(settings, words):
    with pytest.raises(ServiceLostError, match="was lost: .*" + words):
        outcomes(MCP(**settings))


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "needs a server: a command or a URL"),
        ({"server": "no-such-command-here x"}, "no command 'no-such-command-here'"),
        ({"server": "python 'x"}, "No closing quotation"),
        ({"server": [sys.executable], "headers": {"a": "b"}}, "a command, which takes no setting `headers`"),
        ({"server": "https://h/mcp", "cwd": "/"}, "a URL, which takes no setting `cwd`"),
    ],
)
def test_wrong_settings_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        MCP(**settings)


def test_a_tool_that_the_server_lacks_is_refused(url):
    with pytest.raises(EnvironmentDefinitionError, match=r"not 'ad'\ndid you mean: add\?"):
        outcomes(MCP(server=url, only=["ad"]))


# --- schemas and results ----------------------------------------------------------------------------------------------


def test_names_that_chat_formats_take():
    assert plain_names(["a b", "a.b", "a_b"]) == {"a b": "a_b", "a.b": "a_b_2", "a_b": "a_b_3"}
    long = plain_names(["x" * 80, "x" * 81])
    assert [len(name) for name in long.values()] == [64, 64] and len(set(long.values())) == 2
    assert plain_names([""]) == {"": "_"}


ODD = {
    "nothing": ({}, {}, {}),
    "no types": ({"properties": {"a": {}}}, {"a": [1]}, {"a": [1]}),
    "a list of types": ({"properties": {"a": {"type": ["integer", "null"]}}}, {"a": "3"}, {"a": 3}),
    "a reference": (
        {"$defs": {"N": {"type": "integer"}}, "properties": {"a": {"$ref": "#/$defs/N"}}},
        {"a": "3"},
        {"a": 3},
    ),
    "a lost reference": ({"properties": {"a": {"$ref": "#/$defs/Gone"}}}, {"a": 1}, {"a": 1}),
    "a foreign reference": ({"properties": {"a": {"$ref": "https://h/x"}}}, {"a": 1}, {"a": 1}),
    "itself": ({"properties": {"a": {"$ref": "#"}}}, {"a": {}}, {"a": {}}),
    "a root of options": ({"anyOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}, {"b": 1}, {"b": 1}),
    "required without properties": ({"required": ["a"]}, {}, {}),
    "other arguments": ({"additionalProperties": True}, {"a": 1}, {"a": 1}),
    "an argument named $ref": ({"properties": {"$ref": {"type": "string"}}}, {"$ref": "x"}, {"$ref": "x"}),
    "a Boolean schema": ({"properties": {"a": True}}, {"a": 1}, {"a": 1}),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_schemas_are_tools(name):
    schema, given, read = ODD[name]
    tool = Tool("t", lambda **arguments: "", "", plain_schema({"type": "object", **schema}))
    assert read_arguments(tool.method, given) == read


def test_each_kind_of_content_is_text():
    from mcp import types

    blocks = [
        types.TextContent(text="one"),
        types.AudioContent(data="AAAA", mime_type="audio/wav"),
        types.ResourceLink(name="report", uri="file:///r.txt"),
        types.EmbeddedResource(resource=types.TextResourceContents(uri="file:///a.txt", text="two")),
        types.EmbeddedResource(resource=types.BlobResourceContents(uri="file:///b", blob="AAAA")),
    ]
    assert text_of(types.CallToolResult(content=blocks)).splitlines() == [
        "one",
        "[audio: audio/wav, 3 bytes, which cannot be shown as text]",
        "[resource file:///r.txt: report]",
        "[resource file:///a.txt]",
        "two",
        "[resource file:///b: data, 3 bytes, which cannot be shown as text]",
    ]
    assert text_of(types.CallToolResult(content=[], structured_content={"a": 1})) == '{"a": 1}'
    assert text_of(types.CallToolResult(content=[])) == ""


def test_upstream_has_the_names_that_this_package_uses():
    from importlib.metadata import version

    import mcp
    from mcp import types
    from mcp.client.sse import sse_client
    from mcp.client.stdio import stdio_client
    from mcp.client.streamable_http import streamable_http_client

    now = f"mcp {version('mcp')} differs from {WRITTEN_FOR}, for which this package was written: "
    expected = {
        mcp.Client: {"server", "cache"},
        mcp.Client.list_tools: {"cursor"},
        mcp.Client.call_tool: {"name", "arguments"},
        mcp.StdioServerParameters: {"command", "args", "env", "cwd"},
        stdio_client: {"server", "errlog"},
        sse_client: {"url", "headers"},
        streamable_http_client: {"url", "http_client", "max_sse_event_size"},
    }
    for function, parameters in expected.items():
        assert parameters <= set(inspect.signature(function).parameters), now + function.__qualname__
    assert {"name", "title", "description", "input_schema"} <= set(types.Tool.model_fields), now + "Tool"
    assert {"content", "structured_content", "is_error"} <= set(types.CallToolResult.model_fields), now + "results"
    assert {"tools", "next_cursor"} <= set(types.ListToolsResult.model_fields), now + "the list of tools"
    source = inspect.getsource(sys.modules[streamable_http_client.__module__])
    for words in ("Session terminated", "Server returned an error response"):
        assert words in source, now + f"the error {words!r} of a lost session"
    assert (types.CONNECTION_CLOSED, types.INTERNAL_ERROR, types.INVALID_REQUEST) == (-32000, -32603, -32600), now
