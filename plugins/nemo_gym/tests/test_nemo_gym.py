"""Episodes on an imitation of a resources server; `test_real_gym.py` plays on real ones."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

import pytest
from rollouts_nemo_gym import NemoGym
from rollouts_nemo_gym.rows import read_rows

from rollouts.cli import main
from rollouts.env.shared import shared_values
from rollouts.errors import ConfigError, EnvironmentDefinitionError
from rollouts.inference.chatting import ChatReply
from rollouts.runs.play import play_episode, play_plan
from rollouts.types import Message, Status, ToolCall

sys.path.insert(0, str(Path(__file__).parent))
import gym_imitation as imitation

# httpcore leaves a stream to the garbage collection if a request is cut off.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(scope="module")
def served():
    with imitation.serving() as found:
        yield found


@pytest.fixture
def url(served):
    return f"{served[0]}/counter"


def called(name: str, number: int = 0, /, **arguments):
    return Message("assistant", "", [ToolCall(name, arguments, f"c{number}")])


def play(url: str, folder: Path, replies, *rows: dict, **env):
    """An episode of the first row with these replies."""
    data = folder / "rows.jsonl"
    data.write_text(imitation.lines(*(rows or [imitation.row()]), imitation.row()))
    given = iter(replies)

    def reply(_):
        return ChatReply(next(given, Message("assistant", "Done.")), "stop")

    tree = {"env": {"name": "nemo_gym", "url": url, "data": str(data), **env}, "eval_tasks": 1, "max_turns": 9}
    with shared_values(), play_plan(tree) as plan:
        (first, *_) = NemoGym(url=url, data=str(data)).tasks(
            "train", None, {"train": read_rows("--env.data", str(data))}
        )
        return play_episode(plan, first, 0, reply)


def results(episode) -> list[str]:
    return [message.text for message in episode.trajectory.messages if message.role == "tool"]


def test_tools_are_requests_of_one_session_and_the_server_judges(served, url, tmp_path):
    calls = [called("increment_counter", 1, count=1), called("increment_counter", 2, count=2)]
    episode = play(url, tmp_path, [*calls, called("get_counter_value"), Message("assistant", "6", reasoning="1 + 2")])
    assert results(episode) == ['{"success":true}', '{"success":true}', '{"count":6}']
    assert [message.role for message in episode.trajectory.messages[:2]] == ["system", "user"]
    assert episode.score.value == 1.0 and episode.score.parts == {"verify": 1.0, "exact": 1.0, "steps": 2.0}
    body = served[1].verified[-1]
    kinds = [item["type"] for item in body["response"]["output"]]
    assert kinds == ["function_call", "function_call_output"] * 3 + ["reasoning", "message"]
    assert body["expected_count"] == 6 and body["response"]["status"] == "completed"
    ids = [item["call_id"] for item in body["response"]["output"] if "call_id" in item]
    assert ids[::2] == ids[1::2] and len(set(ids)) == 3
    assert play(url, tmp_path, []).score.value == 0.0, "the control: another session, which nothing was added to"


def test_calls_that_fail_are_read_by_the_model(url, tmp_path):
    unread = Message("assistant", "", [ToolCall("increment_counter", error="not valid JSON: {", id="x")])
    two = [ToolCall("increment_counter", {"count": 1}, "a"), ToolCall("increment_counter", {"count": 2}, "b")]
    episode = play(url, tmp_path, [called("increment_counter", count=-2), unread, Message("assistant", "Both", two)])
    assert results(episode)[0] == "Internal Server Error" and results(episode)[1].startswith("Error:")
    assert episode.score.value == 1.0 and episode.metrics["metric/failed_calls"] == 1.0


@pytest.mark.parametrize(
    ("answer", "value", "words"),
    [
        ({"reward": 0.5, "reward_components": {"a": 1}}, 0.5, ""),
        ({"reward": 1.0, "mask_sample": True, "failure_reason": "no judge"}, None, "could not judge: no judge"),
        ({"reward": None}, None, "gave the reward None, which is no number"),
        ({"score": 1}, None, "gave the reward None"),
        ("hello", None, "gave 'hello', which is no JSON object"),
    ],
    ids=["components", "masked", "none", "absent", "text"],
)
def test_without_a_verdict_there_is_no_reward(url, tmp_path, answer, value, words):
    episode = play(url, tmp_path, [], imitation.row(answer=answer))
    assert episode.score.value == value and words in (episode.score.why or "")
    assert episode.trajectory.status is Status.COMPLETED


def test_a_server_that_hangs_fails_the_episode(url, tmp_path):
    episode = play(url, tmp_path, [called("increment_counter", count=-1)], call_seconds=0.3)
    assert episode.trajectory.status is Status.ENVIRONMENT_ERROR and episode.may_retry
    assert "answered nothing to POST /increment_counter for 0.3 seconds" in episode.trajectory.error
    assert episode.score.value is None


def test_a_server_that_dies_fails_the_episode(tmp_path):
    with contextlib.ExitStack() as stack:
        own, _ = stack.enter_context(imitation.serving())

        def replies():
            stack.close()
            yield called("increment_counter", count=1)

        episode = play(f"{own}/counter", tmp_path, replies())
    assert episode.trajectory.status is Status.ENVIRONMENT_ERROR and "was lost" in episode.trajectory.error
    assert episode.score.value is None and episode.may_retry


@pytest.mark.adapters
def test_keeps_the_contract(url, tmp_path, capsys):
    """Without the checks that need strange numbers: the imitation hangs or fails at some of them on purpose."""
    data = tmp_path / "rows.jsonl"
    data.write_text(imitation.lines(imitation.row(), imitation.row(), imitation.row()))
    command = ["check", "nemo_gym", "--env.url", url, "--env.data", str(data), "--tasks", "2", "--skip", "wheel"]
    assert main([*command, "--skip", "tool-arguments,forged-numbers,interleaved,cancelled"]) == 0, (
        capsys.readouterr().out
    )


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/agent", "it has no POST /seed_session\ntype the address of the resources server"),
        ("/steps", "is played with /reset and /step"),
        ("/absent", "has no /openapi.json"),
    ],
)
def test_a_server_of_another_kind_is_refused(served, path, words, tmp_path, capsys):
    data = tmp_path / "rows.jsonl"
    data.write_text(imitation.lines(imitation.row(), imitation.row()))
    command = ["run", "--env", "nemo_gym", "--env.url", served[0] + path, "--env.data", str(data), "--steps", "1"]
    assert main([*command, "--dry-run"]) == 2
    shown = capsys.readouterr().err
    assert words in shown and "Traceback" not in shown


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (imitation.row(initial_count=None) | {"x": 1}, ""),
        ({"responses_create_params": imitation.row()["responses_create_params"]}, "body.initial_count: Field required"),
        (imitation.row(seeded={"mcp": {"url_path": "/mcp"}}, responses_create_params={"input": "hi"}), "those of MCP"),
    ],
    ids=["fine", "missing", "mcp"],
)
def test_a_row_that_does_not_fit_the_server_ends_the_run(url, tmp_path, row, words):
    if not words:
        assert play(url, tmp_path, [], {**row, "initial_count": 6}).score.value == 1.0
        return
    with pytest.raises(EnvironmentDefinitionError, match=words):
        play(url, tmp_path, [], row)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "the file has no row"),
        ("{", "line 1: this is no JSON"),
        ("{}", "expected an object with responses_create_params"),
        ('{"responses_create_params": {"input": "a", "tools": [{"type": "mcp"}]}}', "is no function"),
        (
            '{"responses_create_params": {"input": "a", "tools": [{"type": "function", "name": "verify"}]}}',
            "the model may not call verify",
        ),
        (
            '{"responses_create_params": {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}}',
            "the model reads text only",
        ),
    ],
    ids=["empty", "json", "object", "mcp", "verify", "image"],
)
def test_rows_that_are_refused(tmp_path, text, words):
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"--env.data .*{words}"):
        read_rows("--env.data", str(path))


def test_a_conversation_that_has_begun(tmp_path):
    begun = [
        {"role": "user", "content": [{"type": "input_text", "text": "add 1"}]},
        {"type": "reasoning", "id": "r", "summary": []},
        {"type": "function_call", "name": "increment_counter", "call_id": "a", "arguments": '{"count": 1}'},
        {"type": "function_call", "name": "increment_counter", "call_id": "b", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "1"},
        {"role": "assistant", "content": "Added."},
        {"role": "user", "content": "and 2"},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"responses_create_params": {"instructions": "Count.", "input": begun}}))
    (row,) = read_rows("--env.data", str(path))
    shape = [(m.role, m.text, len(m.tool_calls), m.name) for m in row.messages]
    assert shape == [
        ("system", "Count.", 0, None),
        ("user", "add 1", 0, None),
        ("assistant", "", 2, None),
        ("tool", "1", 0, "increment_counter"),
        ("assistant", "Added.", 0, None),
        ("user", "and 2", 0, None),
    ]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "no server is given"),
        ({"url": "http://h"}, "no file of rows"),
        ({"url": "http://h", "data": "x"}, "no such"),
    ],
    ids=["url", "data", "file"],
)
def test_an_address_and_a_file_are_needed(given, words):
    with pytest.raises(ConfigError, match=words):
        NemoGym(**given)
