"""An agent with a client of its own: every request becomes recorded tokens, and each sampled token is trained once."""

from __future__ import annotations

import functools
from typing import Any

import httpx
import pytest
import trio
from agent_fakes import END, FakeChat, FakeEngine, Quiz, check_exact, play
from gateway.clients import APIS, TOOL, Chat, Messages, Refused, Responses
from hypothesis import given
from hypothesis import strategies as st

from rollouts.errors import InferenceError
from rollouts.inference.base import Generation, VersionSpan
from rollouts.types import Episode, Role, Status


class DecodingChat(FakeChat):
    """Decodes too, as a chat format does for stop texts and logprobs."""

    def decode(self, tokens: list[int]) -> str:
        return "".join("" if token == END else chr(token) for token in tokens)


def served(agent: Any, engine: FakeEngine | None = None, exact: bool = True, **changed: Any) -> tuple[Any, FakeEngine]:
    """An episode in which `agent(endpoint)` is the environment's loop."""
    engine = engine or FakeEngine()

    class Own(Quiz):
        async def rollout(self, task: Any, model: Any) -> Any:
            async with model.serve() as endpoint:
                return await agent(endpoint)

    changed.setdefault("max_tokens", 100_000)
    episode = play(Own, engine, DecodingChat(), **changed)
    if exact:
        check_exact(episode, engine)
    return episode, engine


def texts(episode: Episode) -> list[list[str]]:
    return [[message.text for message in trajectory.messages] for trajectory in episode.trajectories]


# --- the APIs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("api", APIS)
def test_a_conversation_with_tools_is_one_segment_in_each_api(api: type[Chat], stream: bool) -> None:
    async def agent(endpoint: Any) -> None:
        client = api(endpoint, [TOOL], stream)
        said, calls = await client.ask("double 21")
        assert said == "let me see" and [call[1:] for call in calls] == [
            ("double", {"n": 21}),
            ("double", {"n": 1}),
        ]
        for number, _, arguments in reversed(calls):  # results may come in any order
            client.result(number, str(2 * arguments["n"]))
        assert (await client.ask())[0] == "42"
        assert await client.ask("thanks") == ("bye", [])

    script = 'let me see[double {"n": 21}][double {"n": 1}]', "42", "bye"
    episode, _ = served(agent, FakeEngine(*script))
    (trajectory,) = episode.trajectories
    assert texts(episode) == [["double 21", "let me see", "42", "2", "42", "thanks", "bye"]]
    assert len(trajectory.segments) == 1 and episode.status is Status.COMPLETED
    assert trajectory.metrics["tool_calls"] == 2 and trajectory.turns == 3
    assert trajectory.tools == [TOOL]

    # The same conversation through `chat`: the same tokens, masks and logprobs.
    class Inline(Quiz):
        async def rollout(self, task: Any, model: Any) -> None:
            reply = await model.chat("double 21", [TOOL])
            for number, call in enumerate(reply.tool_calls):
                assert call.id == f"call_{number}"
            answers = model.answers(reply, ["42", "2"])
            await model.chat([*model.messages, *answers], [TOOL])
            await model.chat([*model.messages, {"role": "user", "content": "thanks"}], [TOOL])

    inline = play(Inline, FakeEngine(*script), DecodingChat(), max_tokens=100_000)
    assert inline.trajectories[0].segments == trajectory.segments


def test_a_response_can_be_continued_by_its_id() -> None:
    async def agent(endpoint: Any) -> None:
        client = Responses(endpoint)
        first = (await client.post({"input": "one", "instructions": "be brief"})).json()
        second = (await client.post({"input": "two", "previous_response_id": first["id"]})).json()
        assert second["previous_response_id"] == first["id"]
        with pytest.raises(Refused, match="no earlier response 'resp_x'"):
            await client.post({"input": "two", "previous_response_id": "resp_x"})

    episode, _ = served(agent, FakeEngine("a", "b"))
    # The instructions belong to one request, so the second conversation is another one.
    assert texts(episode) == [["be brief", "one", "a"], ["one", "a", "two", "b"]]


def test_what_a_client_changes_in_its_copy_of_a_reply_continues_the_conversation() -> None:
    async def agent(endpoint: Any) -> None:
        client = Chat(endpoint, [TOOL])
        await client.ask("hi")
        client.items[-1]["content"] = "hello"  # trimmed
        _, ((number, *_),) = await client.ask("again")
        called = client.items[-1]["tool_calls"][0]
        called["function"]["arguments"] = '{ "m":2,  "n" : 1 }'
        client.items[-1]["content"] = None
        client.result(number, "2")
        await client.ask()

    episode, _ = served(agent, FakeEngine("  hello \n", '[double {"n": 1, "m": 2}]', "end"))
    (trajectory,) = episode.trajectories
    assert len(trajectory.segments) == 1 and trajectory.messages[1].text == "  hello \n"


def test_a_call_that_cannot_be_read_is_text_for_the_client_and_answers_itself() -> None:
    async def agent(endpoint: Any) -> None:
        client = Chat(endpoint, [TOOL])
        said, calls = await client.ask("double 21")
        assert said == "hm" and [arguments for _, _, arguments in calls] == [{"n": 21}]
        client.result(calls[0][0], "42")
        await client.ask()

    episode, _ = served(agent, FakeEngine('hm[double {oops][double {"n": 21}]'))
    (trajectory,) = episode.trajectories
    assert [message.text for message in trajectory.messages if message.role == "tool"] == [
        "Error: the arguments are not JSON",
        "42",
    ]
    counted = {name: trajectory.metrics[name] for name in ("tool_calls", "tool_failures", "tool_failure/malformed")}
    assert counted == {"tool_calls": 2, "tool_failures": 1, "tool_failure/malformed": 1}


# --- segments by a hand-written account -----------------------------------------------------------------------------


def test_a_branch_begins_with_the_tokens_of_the_earlier_reply_and_does_not_train_them() -> None:
    async def agent(endpoint: Any) -> None:
        client = Chat(endpoint)
        await client.ask("plan")
        other = Chat(endpoint)
        other.items = list(client.items)
        await client.ask("first idea")
        await other.ask("second idea")
        await client.ask("go on")

    episode, engine = served(agent, FakeEngine("a", "b", "c", "d"))
    assert texts(episode) == [["plan", "a", "first idea", "b", "go on", "d"], ["plan", "a", "second idea", "c"]]
    main, branch = (trajectory.segments[0] for trajectory in episode.trajectories)
    shared = len(engine.turns[0][0].tokens) + len(engine.turns[0][1].tokens)
    assert branch.tokens[:shared] == main.tokens[:shared]
    assert sum(main.loss_mask[:shared]) == 2 and sum(branch.loss_mask[:shared]) == 0
    assert [trajectory.sampled_count for trajectory in episode.trajectories] == [6, 2]


def test_compaction_and_a_subagent_are_conversations_of_their_own() -> None:
    async def agent(endpoint: Any) -> None:
        client, helper = Chat(endpoint), Messages(endpoint)
        await client.ask("task")
        await helper.ask("look it up")
        await client.ask("it is 7")
        client.items = [{"role": "system", "content": "so far: task, 7"}]
        await client.ask("finish")
        await helper.ask("thanks")

    episode, _ = served(agent, FakeEngine("a", "b", "c", "d", "e"))
    assert texts(episode) == [
        ["task", "a", "it is 7", "c"],
        ["look it up", "b", "thanks", "e"],
        ["so far: task, 7", "finish", "d"],
    ]
    assert episode.trajectories[episode.judged] is episode.trajectories[-1]


def test_several_choices_are_branches_and_any_of_them_continues() -> None:
    async def agent(endpoint: Any) -> None:
        client = Chat(endpoint, n=3)
        answer = (await client.post({"messages": [{"role": "user", "content": "x"}], "n": 3})).json()
        assert [choice["message"]["content"] for choice in answer["choices"]] == ["a", "b", "c"]
        assert answer["usage"]["completion_tokens"] == 6
        client = Chat(endpoint)
        client.items = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "b"}]
        await client.ask("why b?")
        with pytest.raises(Refused, match="n is 50, but this episode has 4 turns left"):
            await client.post({"messages": [{"role": "user", "content": "x"}], "n": 50})

    episode, _ = served(agent, FakeEngine("a", "b", "c", "d"))
    assert texts(episode) == [["x", "a"], ["x", "b", "why b?", "d"], ["x", "c"]]


def test_requests_at_once_are_answered_one_after_another() -> None:
    async def agent(endpoint: Any) -> None:
        async with trio.open_nursery() as nursery:
            for number in range(10):
                nursery.start_soon(Chat(endpoint).ask, f"n{number}")

    episode, engine = served(agent, max_turns=20)
    assert len(episode.trajectories) == len(engine.turns) == 10
    assert sorted(first for first, _ in texts(episode)) == [f"n{number}" for number in range(10)]


@pytest.mark.slow
@given(data=st.data(), count=st.integers(1, 7), rewrites=st.sets(st.integers(0, 4)))
def test_any_tree_of_requests_is_what_a_plain_account_says(data: Any, count: int, rewrites: set[int]) -> None:
    # The account: a request continues any known reply, or begins anew. Only the first one that continues a reply
    # extends its conversation.
    replies: list[tuple[str, ...]] = [()]
    plan = []
    for number in range(count):
        before = data.draw(st.sampled_from(replies))
        replies.append((*before, f"q{number}", f"r{number}"))
        plan.append(before)

    async def agent(endpoint: Any) -> None:
        for number, before in enumerate(plan):
            client = Chat(endpoint)
            roles = ["user", "assistant"] * len(before)
            client.items = [{"role": role, "content": text} for role, text in zip(roles, before, strict=False)]
            await client.ask(f"q{number}")

    class Own(Quiz):
        async def rollout(self, task: Any, model: Any) -> None:
            async with model.serve() as endpoint:
                await agent(endpoint)

    engine = FakeEngine(*(f"r{number}" for number in range(count)))
    episode = play(Own, engine, DecodingChat(sorted(rewrites)), max_tokens=1000)
    check_exact(episode, engine)
    expected: list[tuple[str, ...]] = []
    for number, before in enumerate(plan):
        whole = (*before, f"q{number}", f"r{number}")
        if before and before in expected:
            expected[expected.index(before)] = whole
        else:
            expected.append(whole)
    assert [tuple(each) for each in texts(episode)] == expected


# --- retries, cuts and limits ---------------------------------------------------------------------------------------


def test_a_retry_gets_the_same_reply_and_is_trained_once() -> None:
    async def agent(endpoint: Any) -> None:
        client = Chat(endpoint)
        assert (await client.ask("x"))[0] == "a"
        client.items.pop()
        retry = {"x-stainless-retry-count": "1"}
        assert (await client.ask(**retry))[0] == "a"
        client.items.pop()
        assert (await client.ask())[0] == "b", "a client that asks twice wants two replies"

    episode, engine = served(agent, FakeEngine("a", "b"))
    assert len(engine.turns) == 2 and texts(episode) == [["x", "a"], ["x", "b"]]


def test_a_client_that_leaves_before_its_reply_leaves_no_trace() -> None:
    engine = FakeEngine("a")

    async def agent(endpoint: Any) -> None:
        engine.blocks = True
        async with trio.open_nursery() as nursery:
            nursery.start_soon(Chat(endpoint).ask, "x")
            await engine.blocked.wait()
            nursery.cancel_scope.cancel()
        engine.blocks = False
        await Chat(endpoint).ask("x")

    episode, engine = served(agent, engine)
    assert texts(episode) == [["x", "a"]]


def test_a_stop_text_ends_the_reply_and_its_tokens() -> None:
    async def agent(endpoint: Any) -> None:
        client = Messages(endpoint, stop_sequences=["Observation:", "never"])
        answer = await client.post({**client.body(), "max_tokens": 99, "messages": [{"role": "user", "content": "x"}]})
        assert answer.json()["content"] == [{"type": "text", "text": "Thought 1\n"}]
        assert (answer.json()["stop_reason"], answer.json()["stop_sequence"]) == ("stop_sequence", "Observation:")
        client.items = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "Thought 1"}]
        await client.ask("Observation: 3")

    episode, engine = served(agent, FakeEngine("Thought 1\nObservation: made up", "ok"), exact=False)
    (trajectory,) = episode.trajectories
    (segment,) = trajectory.segments
    first, second = (generation for _, generation in engine.turns)
    kept = len("Thought 1\nObservation:")
    start = len(engine.turns[0][0].tokens)
    assert segment.tokens[start : start + kept] == first.tokens[:kept]
    assert segment.loss_mask[start : start + kept + 1] == [1.0] * kept + [0.0], "what follows the stop text is dropped"
    assert segment.tokens == engine.turns[1][0].tokens + second.tokens
    assert trajectory.sampled_count == kept + len(second.tokens)


def test_a_reply_that_the_client_cuts_can_be_continued() -> None:
    async def agent(endpoint: Any) -> None:
        client = Chat(endpoint, max_tokens=3)
        assert (await client.ask("x"))[0] == "abc"
        client.more = {}
        await client.ask("go on")

    episode, _ = served(agent, FakeEngine("abcdef", "ok"))
    (trajectory,) = episode.trajectories
    assert trajectory.status is Status.COMPLETED and len(trajectory.segments) == 1


def test_logprobs_are_the_recorded_ones() -> None:
    async def agent(endpoint: Any) -> None:
        body = {"messages": [{"role": "user", "content": "x"}], "logprobs": True}
        content = (await Chat(endpoint).post(body)).json()["choices"][0]["logprobs"]["content"]
        seen.extend((each["token"], each["logprob"]) for each in content)

    seen: list[tuple[str, float]] = []
    _, engine = served(agent, FakeEngine("ab"))
    assert seen == list(zip(["a", "b", ""], engine.turns[0][1].logprobs, strict=True))


def test_a_program_that_gives_up_at_the_limit_of_turns_ends_the_episode_normally() -> None:
    async def agent(endpoint: Any) -> None:
        client = Chat(endpoint)
        await client.ask("x")
        try:
            await client.ask("y")
        except Refused as refused:
            assert (refused.status, refused.error["code"]) == (400, "episode_over")
            raise RuntimeError("my client failed") from refused

    episode, _ = served(agent, max_turns=1)
    assert (episode.status, episode.trajectories[0].error) == (Status.COMPLETED, "its only turn is used")
    assert episode.trajectories[0].metrics["turn_limit"] == 1 and texts(episode) == [["x", "done"]]


def test_too_long_a_conversation_is_refused_and_the_agent_may_compact_it() -> None:
    async def agent(endpoint: Any) -> None:
        client = Chat(endpoint)
        await client.ask("x")
        with pytest.raises(Refused, match="context holds 40") as refused:
            await client.ask("y" * 60)
        assert refused.value.error["code"] == "context_length_exceeded"
        client.items = []
        await client.ask("short")

    episode, _ = served(agent, FakeEngine(context=40))
    assert texts(episode) == [["x", "done"], ["short", "done"]]
    assert {trajectory.status for trajectory in episode.trajectories} == {Status.COMPLETED}


def test_a_reply_that_the_episode_cuts_is_truncated() -> None:
    async def agent(endpoint: Any) -> None:
        client = Chat(endpoint)
        assert (await client.ask("x"))[0] == "abc"
        with pytest.raises(Refused, match="cut off after 3 tokens"):
            await client.ask("go on")

    episode, _ = served(agent, FakeEngine("abcdef"), max_tokens=3)
    assert episode.status is Status.TRUNCATED


# --- faults ---------------------------------------------------------------------------------------------------------


def test_a_failure_of_the_engine_ends_the_agent() -> None:
    async def agent(endpoint: Any) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(Chat(endpoint).ask, "x")
            await trio.sleep_forever()

    episode, _ = served(agent, FakeEngine(InferenceError("the engine is gone")))
    assert episode.status is Status.INFERENCE_ERROR
    assert "the engine is gone" in (episode.trajectories[0].error or "")


def test_an_invalid_generation_ends_the_agent() -> None:
    bad = Generation([65], [], "stop", [VersionSpan(0, 0, 1)])
    episode, _ = served(lambda endpoint: Chat(endpoint).ask("x"), FakeEngine(bad), exact=False)
    assert episode.status is Status.INFERENCE_ERROR


def test_an_exception_of_the_agent_is_its_own() -> None:
    async def agent(endpoint: Any) -> None:
        await Chat(endpoint).ask("x")
        raise ZeroDivisionError("in my agent")

    episode, _ = served(agent)
    assert episode.status is Status.ENVIRONMENT_ERROR and "in my agent" in (episode.trajectories[0].error or "")


def test_a_deadline_ends_the_agent_and_the_address() -> None:
    found = []

    async def agent(endpoint: Any) -> None:
        found.append(endpoint)
        await Chat(endpoint).ask("x")
        await trio.sleep_forever()

    episode, _ = served(agent, episode_seconds=0.5)
    assert episode.status is Status.TIMEOUT and texts(episode) == [["x", "done"]]
    with pytest.raises(httpx.ConnectError):
        trio.run(functools.partial(Chat(found[0]).ask, "late"))


MISTAKES = [
    ({"messages": [{"role": "user", "content": "x"}], "temprature": 1}, "unknown field `temprature`"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "reads text only"),
    ({"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_object"}}, "response_format"),
    ({"messages": [{"role": "user", "content": "forbidden"}]}, "the chat template of this model refuses it"),
    ({"messages": [{"role": "tool", "tool_call_id": "c9", "content": "x"}]}, "the call 'c9' follows no reply"),
    ({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}, "cannot be continued"),
]


def test_mistakes_get_an_error_and_leave_no_trace() -> None:
    async def agent(endpoint: Any) -> None:
        client = Chat(endpoint, [TOOL])
        for body, words in MISTAKES:
            with pytest.raises(Refused, match=words) as refused:
                await client.post(body)
            assert refused.value.status == 400
        await client.ask("x")
        with pytest.raises(Refused, match="the call 'call_0' of double has no result"):
            await client.ask("and now?")

    episode, _ = served(agent, FakeEngine("[double {}]"))
    assert texts(episode) == [["x", ""]]


def test_a_key_of_another_episode_and_an_unknown_path_are_refused() -> None:
    async def agent(endpoint: Any) -> None:
        for api, kind in ((Chat, "invalid_request_error"), (Messages, "authentication_error")):
            with pytest.raises(Refused, match="belongs to no episode") as refused:
                await api(endpoint).ask("x", authorization="Bearer rollouts-of-another")
            assert (refused.value.status, refused.value.error["type"]) == (401, kind)
        client = Chat(endpoint)
        client.path = "/v1/embeddings"
        with pytest.raises(Refused, match=r"no /v1/embeddings here; there are /v1/chat/completions, /v1/responses"):
            await client.ask("x")

    episode, engine = served(agent)
    assert not engine.turns and episode.status is Status.COMPLETED


def test_a_sampling_setting_of_the_client_does_not_apply() -> None:
    async def agent(endpoint: Any) -> None:
        await Chat(endpoint, temperature=0, top_p=0.5, seed=3, tool_choice="required").ask("x")

    _, engine = served(agent, temperature=0.7)
    assert engine.turns[0][0].temperature == 0.7


def test_each_role_has_an_address() -> None:
    class Game(Quiz):
        roles = (Role("white"), Role("black"))

        async def rollout(self, task: Any, model: Any) -> None:
            async with model.role("white").serve() as white, model.role("black").serve() as black:
                await Chat(white).ask("your move")
                await Chat(black).ask("and yours")

    engine = FakeEngine("e4", "e5")
    episode = play(Game, engine, DecodingChat())
    check_exact(episode, engine)
    assert [(each.role, each.last_text) for each in episode.trajectories] == [("white", "e4"), ("black", "e5")]


def test_programs_of_two_roles_may_ask_at_once() -> None:
    class Game(Quiz):
        roles = (Role("white"), Role("black"))

        async def rollout(self, task: Any, model: Any) -> None:
            async with model.role("white").serve() as white, model.role("black").serve() as black:
                async with trio.open_nursery() as nursery:
                    for endpoint in (white, black, white, black):
                        nursery.start_soon(Chat(endpoint).ask, "your move")

    engine = FakeEngine("e4", "e5")
    episode = play(Game, engine, DecodingChat())
    check_exact(episode, engine)
    assert [each.role for each in episode.trajectories] == ["white"] * 2 + ["black"] * 2
