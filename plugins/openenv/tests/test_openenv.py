"""Episodes on an imitation of OpenEnv's and ORS' servers; `test_real.py` plays the same on the real ones."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest
import trio
import trio_websocket
from rollouts_openenv import ORS, OpenEnv
from rollouts_openenv.service import as_text, split_name, text_of_blocks

from rollouts.cli import main
from rollouts.env.shared import shared_values
from rollouts.errors import ConfigError, EnvironmentDefinitionError
from rollouts.inference.chatting import ChatReply
from rollouts.runs.play import play_episode, play_plan
from rollouts.types import Message, Status, ToolCall

sys.path.insert(0, str(Path(__file__).parent))
import imitation

# httpcore and trio-websocket leave a stream or a socket to the garbage collection if a request is cut off.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(scope="module")
def served():
    with imitation.serving(ping_seconds=0.4) as found:
        yield found


@pytest.fixture
def url(served):
    return served[0]


def called(name: str, /, **arguments):
    return Message("assistant", "", [ToolCall(name, arguments, "c1")])


def guesses(*numbers):
    return [called("act", number=number) for number in numbers]


def play(env: dict, replies, *, place: int = 0, delay: float = 0.0, **run):
    """An episode of a held-out task with these replies."""
    given = iter(replies)

    def reply(_):
        time.sleep(delay)
        return ChatReply(next(given, Message("assistant", "Done.")), "stop")

    tree = {"env": {"name": "openenv", **env}, "eval_tasks": 3, "max_turns": 12, **run}
    with shared_values(), play_plan(tree) as plan:
        return play_episode(plan, plan.environments[0].held_out(3)[place], 0, reply)


def results(episode) -> list[str]:
    return [message.text for message in episode.trajectory.messages if message.role in ("tool", "user")]


def check_guessing(url: str) -> None:
    env = {"url": f"{url}/guessing", "rewards": "turn", "observe": ["text"], "reset": {"high": 49}}
    episode = play(env, guesses(200, "x", -3, 60))
    first, *seen = results(episode)
    assert re.fullmatch(r"Guessing environment\n\nGuess a number from 0 to 49; it ends with \d\.", first)
    assert seen[0] == "lower" and "must be integer" in seen[1] and seen[2].endswith("no negative number here")
    assert (episode.score.value, episode.score.turns) == (-1.0, [-0.25, 0.0, 0.0, -0.75])
    assert (episode.metrics["metric/steps"], episode.metrics["metric/invalid_actions"]) == (2.0, 1.0)
    assert episode.trajectory.status is Status.COMPLETED


def test_an_action_is_a_call_of_a_tool_and_rewards_are_summed(url):
    check_guessing(url)


def test_a_reply_can_be_the_action_and_without_a_verdict_there_is_none(url):
    episode = play({"url": f"{url}/echo", "actions": "text"}, [Message("assistant", "hi"), Message("assistant", "you")])
    assert results(episode)[1:] == ['{"text": "hi", "tries": 1}']
    assert episode.score.value is None and "gave no reward" in episode.score.why
    assert episode.trajectory.status is Status.COMPLETED and episode.metrics["metric/steps"] == 2.0


def test_tools_of_mcp_are_tools_and_tasks_are_the_servers(url):
    calls = [called("price", item="moon"), called("price", item="pear"), called("price", item="apple")]
    episode = play({"url": f"{url}/shop"}, calls, place=1)
    assert episode.task.id == "shop/test/1" and "Please buy test-1." in results(episode)[0]
    assert results(episode)[1:] == ["Error: ValueError: it is sold out", "4"]
    assert episode.score.value == 1.0
    spoken = play({"url": f"{url}/shop"}, [called("price", item="pear")])
    assert spoken.trajectory.status is Status.COMPLETED and spoken.score.value == 0.0, "a text ends the episode"


def test_a_server_may_have_both(url):
    episode = play({"url": f"{url}/mixed"}, [called("price", item="pear"), *guesses(200)])
    assert [schema["function"]["name"] for schema in episode.trajectory.tools] == ["act", "price"]
    assert results(episode)[1] == "4" and episode.metrics["metric/steps"] == 1.0


def test_too_many_refused_actions_end_the_episode(url):
    episode = play({"url": f"{url}/guessing", "max_errors": 1}, [Message("assistant", "seven"), *guesses(-3, 1)])
    assert results(episode)[1] == "Error: call the tool act"
    assert episode.metrics["metric/invalid_actions"] == 2.0 and episode.metrics["metric/steps"] == 0.0


# --- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_pings_are_answered_while_the_model_generates(url):
    episode = play({"url": f"{url}/guessing"}, guesses(200, 200, 200), delay=1.0)
    assert episode.score.value == -1.5


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (-1, "the connection was closed"),
        (-2, "answered nothing for 0.3 seconds"),
        (-4, "'junk', which is no message of OpenEnv"),
        (-5, "'a lot', which is no finite number"),
    ],
    ids=["death", "hang", "junk", "reward"],
)
def test_a_lost_server_fails_the_episode(url, number, words):
    episode = play({"url": f"{url}/guessing", "call_seconds": 0.3}, guesses(200, number))
    assert episode.trajectory.status is Status.ENVIRONMENT_ERROR and words in episode.trajectory.error
    assert episode.score.value is None and episode.may_retry


def test_a_call_that_the_run_cuts_off_leaves_the_reward_unknown(url):
    cut = play({"url": f"{url}/guessing"}, guesses(200, -2), max_turns=2, tool_seconds=0.3)
    assert cut.trajectory.status is Status.COMPLETED and cut.score.value is None and "cut off" in cut.score.why
    after = play({"url": f"{url}/guessing"}, guesses(-2, 1), tool_seconds=0.3)
    assert "an earlier request got no answer" in after.trajectory.error


@pytest.mark.parametrize("seconds", [0.6, pytest.param(60.0, marks=pytest.mark.slow)])
def test_a_server_without_a_free_session_is_tried_again(url, seconds):
    begun = trio.Event()

    async def occupied():
        async with trio_websocket.open_websocket_url(f"ws{url.removeprefix('http')}/alone/ws") as connection:
            await connection.send_message('{"type": "reset"}')
            await connection.get_message()
            begun.set()
            await trio.sleep(2.0 if seconds == 60.0 else 60.0)

    async def both():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(occupied)
            await begun.wait()
            env = {"url": f"{url}/alone", "wait_seconds": seconds}
            episode = await trio.to_thread.run_sync(play, env, guesses(200))
            nursery.cancel_scope.cancel()
        return episode

    episode = trio.run(both)
    if seconds == 60.0:
        assert episode.score.value == -0.25
    else:
        assert "had no free session for 0.6 seconds" in episode.trajectory.error
        assert "type: --concurrency N" in episode.trajectory.error


@pytest.mark.parametrize(
    ("path", "words"),
    [("/absent", "has no /schema, as every OpenEnv server has")],
)
def test_a_server_of_another_kind_is_refused(url, path, words, capsys):
    assert main(["run", "--env", "openenv", "--env.url", url + path, "--dry-run", "--steps", "1"]) == 2
    shown = capsys.readouterr().err
    assert words in shown and "Traceback" not in shown


def test_a_server_that_is_absent_is_refused(capsys):
    for name in ("openenv", "ors"):
        assert main(["run", "--env", name, "--env.url", "http://127.0.0.1:9", "--dry-run", "--steps", "1"]) == 2
        shown = capsys.readouterr().err
        assert "ConnectError" in shown and "start the server, or correct the address" in shown


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"url": "guessing", "actions": "text", "text_field": "number"}, "--env.text-field number: .* are: tone"),
        ({"url": "echo", "actions": "text", "text_field": "messages_"}, "--env.text-field messages_: .* are: message"),
        ({"url": "shop", "train_split": "train_"}, "--env.train-split train_: .* train, test\ndid you mean: train"),
    ],
)
def test_settings_that_do_not_fit_the_server_are_refused(url, settings, words):
    env = {"name": "openenv", **settings, "url": f"{url}/{settings['url']}"}
    with pytest.raises(ConfigError, match=words), shared_values(), play_plan({"env": env}) as plan:
        plan.environments[0].training_source()


@pytest.mark.parametrize("given", ["", "127.0.0.1:8000", "ws://h"])
def test_an_address_is_needed(given):
    for environment in (OpenEnv, ORS):
        with pytest.raises(ConfigError, match=r"--env\.url: .*\ntype: --env\.url http://127"):
            environment(url=given)


# --- the Open Reward Standard -----------------------------------------------------------------------------------------


def check_ors(url: str) -> None:
    calls = [called("look"), called("guess", number=-3), called("guess", number=1), called("guess", number=3)]
    episode = play({"name": "ors", "url": url, "rewards": "turn"}, calls)
    seen = results(episode)
    assert seen[0].endswith("\n\nGuess the number before 4.") and seen[1] == "a number"
    assert seen[2].endswith("there is no negative number here") and seen[3] == "wrong " + "x" * 9000
    assert (episode.score.value, episode.score.turns[2]) == (0.75, -0.25) or episode.score.turns[1:] == [0, -0.5, 1]
    assert episode.task.id.lower() == "guessing/test/0" and episode.trajectory.status is Status.COMPLETED


def test_ors(served):
    check_ors(f"{served[0]}/ors")
    assert not served[1], "every session was deleted"


def test_a_stream_that_breaks_off_is_continued(url):
    episode = play({"name": "ors", "url": f"{url}/ors"}, [called("guess", number=-6), called("guess", number=3)])
    assert results(episode)[1].startswith("wrong") and episode.score.value == 0.75


@pytest.mark.parametrize(("number", "words"), [(-2, "answered nothing for 0.3 seconds"), (-4, "no output of a tool")])
def test_a_lost_ors_server_fails_the_episode(url, number, words):
    env = {"name": "ors", "url": f"{url}/ors", "call_seconds": 0.3}
    episode = play(env, [called("guess", number=number)])
    assert episode.trajectory.status is Status.ENVIRONMENT_ERROR and words in episode.trajectory.error
    assert episode.score.value is None and episode.may_retry
    unjudged = play({"name": "ors", "url": f"{url}/ors"}, [called("look")])
    assert unjudged.score.value is None and unjudged.trajectory.status is Status.COMPLETED


def test_an_environment_that_the_ors_server_lacks_is_refused(url):
    with pytest.raises(ConfigError, match=r"--env\.environment gues: the server has guessing\ndid you mean"):
        ORS(url=f"{url}/ors", environment="gues").shared()


# --- texts, and the contract ------------------------------------------------------------------------------------------


def test_texts():
    assert as_text({"text": "a", "metadata": {}, "n": None}) == "a"
    assert as_text({"text": "a", "n": 0}) == '{"text": "a", "n": 0}' and as_text([1]) == "[1]" and as_text({}) == "{}"
    assert text_of_blocks([{"text": "a"}, {"type": "image"}, 3]).splitlines()[1:] == [
        "[image, which cannot be shown as text]",
        "[content, which cannot be shown as text]",
    ]
    assert split_name([{"name": "a", "type": "validation"}, {"name": "b", "type": "train"}], "", "train", "") == "b"


@pytest.mark.parametrize(
    ("name", "path", "only"),
    [
        ("openenv", "guessing", ["settings", "rewards", "restore"]),
        pytest.param("openenv", "guessing", [], marks=pytest.mark.nightly),
        pytest.param("ors", "ors", [], marks=pytest.mark.nightly),
    ],
)
def test_keeps_the_contract(url, name, path, only, capsys):
    flags = ["--env.url", f"{url}/{path}", "--env.unjudged", "0", "--skip", "wheel"]
    flags += [word for check in only for word in ("--only", check)]
    assert main(["check", name, *flags]) == 0, capsys.readouterr().out


def test_facts_that_are_no_facts_are_refused(url):
    with pytest.raises(EnvironmentDefinitionError, match="gave no JSON: 'hello'"):
        from rollouts.env.services import Service

        Service(url, "OpenEnv server", {}).get("/other")
