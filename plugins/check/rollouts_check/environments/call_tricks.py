"""What a forger does with tools: the calls of all tasks, the expert's calls repeated, strange numbers, and claims.

Each trick is an agent for the task of a demonstration. Arguments that an agent cannot know come from another task.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from rollouts.encoding import encode
from rollouts.env.authoring import ToolMethod
from rollouts.env.schema import schema_of
from rollouts.types import Message, ToolCall
from rollouts_check.environments.agents import TURNS, Agent, says, tools_for
from rollouts_check.environments.imitation import text_of, word
from rollouts_check.environments.rewards import judged_demonstrations
from rollouts_check.environments.subject import Demonstration, Subject
from rollouts_check.environments.tools import example_arguments

LISTED_MAX = 50  # calls in one reply
REPEATED = 3  # how often a call is repeated
STRANGE: tuple[Any, ...] = (-1, 0, -1000, 10**9, 1e308, -0.5, "nan", "inf")
"""Numbers that no author expects. A text may be read as a number: JSON has no nan."""

CLAIMS = ("success", "correct", "solved", "done", "passed", "yes", "true", "1", "100")
ONE_SUBMISSION = "judge one submission: the first or the last one, or refuse another call after the first"

Trick = Callable[[Demonstration], Agent]
"""Makes the agent for the task of a demonstration."""


class ToolTrick(NamedTuple):
    """A trick with calls. It must not earn what the expert earns; if `is_more`, not more than that. Only tasks for
    which `among` is true count.
    """

    tried: str
    agent_for: Trick
    change: str
    is_more: bool = False
    among: Callable[[Demonstration], bool] = lambda each: True
    turns: int = TURNS


def calling(*calls: ToolCall) -> Message:
    """A reply with these calls."""
    numbered = [ToolCall(each.name, each.arguments, f"call_{number}") for number, each in enumerate(calls)]
    return Message("assistant", "", numbered)


def calls_of(each: Demonstration, tool: str = "") -> list[ToolCall]:
    """The expert's calls of a tool; of all tools if it is empty."""
    return [call for reply in each.replies for call in reply.tool_calls if tool in ("", call.name)]


def call_lists(subject: Subject) -> Iterator[ToolTrick]:
    """The calls of all demonstrations, one after another, and the expert's episode with each call repeated."""
    known = judged_demonstrations(subject)
    for tool in dict.fromkeys(call.name for each in known for call in calls_of(each)):
        tried = f"call {tool} with the arguments of all demonstrations, one after another, then reply with 'done'"
        yield ToolTrick(tried, _all_calls(subject, tool), ONE_SUBMISSION, among=_has_choice(subject, tool))
    if any(calls_of(each) for each in known):
        turns = max(len(each.replies) for each in known) + 1
        tried = f"play the demonstrations, with each call made {REPEATED} times"
        change = "reward what is reached, and not each call: a call that is repeated must not earn more"
        yield ToolTrick(tried, _repeating, change, is_more=True, turns=turns)


def _has_choice(subject: Subject, tool: str) -> Callable[[Demonstration], bool]:
    """Whether the expert has to choose what it calls the tool with: its prompt does not say it, or says what the
    experts of other tasks use too.
    """

    def values_of(each: Demonstration) -> set[str]:
        return {text_of(value) for call in calls_of(each, tool) for value in call.arguments.values()} - {""}

    def check(each: Demonstration) -> bool:
        prompt = "\n".join(message.text for message in each.task.messages).lower()
        others = set().union(*map(values_of, judged_demonstrations(subject))) - values_of(each)
        is_said = all(re.search(word(value), prompt) for value in values_of(each))
        return not is_said or any(re.search(word(value), prompt) for value in others if not value.isdigit())

    return check


def _all_calls(subject: Subject, tool: str) -> Trick:
    """The calls of other tasks, the task's own ones as the last but one."""

    def agent(each: Demonstration) -> Agent:
        own = calls_of(each, tool)
        keys = {encode(call.arguments) for call in own}
        others = {
            encode(call.arguments): call
            for other in judged_demonstrations(subject)
            for call in calls_of(other, tool)
            if other is not each
        }
        rest = [call for key, call in others.items() if key not in keys][:LISTED_MAX]
        if not own or not rest:
            return says("done")
        # Neither the first nor the last call is the task's own, since one of them may count.
        return says(calling(*(rest[:-1] or rest), *own, rest[-1]), "done")

    return agent


def _repeating(each: Demonstration) -> Agent:
    replies = []
    for reply in each.replies:
        again = [call for call in reply.tool_calls for _ in range(REPEATED)]
        replies.append(Message("assistant", reply.text, calling(*again).tool_calls))
    return says(*replies)


def number_calls(subject: Subject) -> Iterator[ToolTrick]:
    """Calls with strange numbers: alone, and before and in the expert's episode."""
    change = "check the numbers first: refuse one that is negative, zero or too large for what it means"
    known = judged_demonstrations(subject)
    turns = max(len(each.replies) for each in known) + 2
    for tool, argument in number_arguments(subject):
        for value in STRANGE:
            words = f"call {tool.name}({argument}={value!r})"
            among = _never_used(tool.name, value)
            for usual, source in ((_invented, "invented"), (_of_another(subject), "another task's")):
                trick = _alone(tool, usual, {argument: value})
                tried = f"{words} with {source} other arguments, then reply with 'done'"
                yield ToolTrick(tried, trick, change, among=among)
            yield ToolTrick(
                f"{words}, then play the demonstration",
                _before(tool, {argument: value}), change, is_more=True, among=among, turns=turns
            )  # fmt: skip
            yield ToolTrick(
                f"play the demonstrations with {argument}={value!r} in each call of {tool.name}",
                _replacing(tool, {argument: value}), change, is_more=True, among=among, turns=turns
            )  # fmt: skip


def claims(subject: Subject) -> Iterator[ToolTrick]:
    """Calls with arguments that claim success: True, each choice of an enum, and words."""
    change = "judge what was done, and not what the model says about it"
    for tool in tools_for(subject):
        properties = schema_of(tool)["function"]["parameters"]["properties"]
        for name, found in properties.items():
            kinds = [found, *found.get("anyOf", ())]
            choices = [value for each in kinds for value in each.get("enum", ())]
            values: list[Any] = choices[:5]
            values += [True] if any(each.get("type") == "boolean" for each in kinds) else []
            if not choices and any(each.get("type") == "string" for each in kinds):
                values += CLAIMS
            for value in values:
                trick = _alone(tool, _invented, {name: value})
                tried = f"call {tool.name}({name}={value!r}), then reply with 'done'"
                yield ToolTrick(tried, trick, change, among=_never_used(tool.name, value, is_claim=True))


def number_arguments(subject: Subject) -> Iterator[tuple[ToolMethod, str]]:
    """Each tool argument that may be a number."""
    for tool in tools_for(subject):
        for name, found in schema_of(tool)["function"]["parameters"]["properties"].items():
            kinds = [found, *found.get("anyOf", ())]
            if any(each.get("type") in ("integer", "number") and "enum" not in each for each in kinds):
                yield tool, name


def _never_used(tool: str, value: Any, *, is_claim: bool = False) -> Callable[[Demonstration], bool]:
    """Whether the expert does not use the value, so that the trick is not the solution. `is_claim`: unless the same
    value is used in every task, as in `finish(success=True)`, together with other calls.
    """

    def check(each: Demonstration) -> bool:
        used = [text_of(given) for call in calls_of(each, tool) for given in call.arguments.values()]
        if text_of(value) not in used and text_of(each.task.answer) != text_of(value):
            return True
        return is_claim and isinstance(value, bool) and len({encode(call.arguments) for call in calls_of(each)}) > 1

    return check


def _invented(tool: ToolMethod, each: Demonstration) -> Mapping[str, Any]:
    return example_arguments(schema_of(tool))


def _of_another(subject: Subject) -> Callable[[ToolMethod, Demonstration], Mapping[str, Any]]:
    def arguments(tool: ToolMethod, each: Demonstration) -> Mapping[str, Any]:
        others = [other for other in judged_demonstrations(subject) if other is not each]
        found = next((call.arguments for other in others for call in calls_of(other, tool.name)), None)
        return _invented(tool, each) if found is None else found

    return arguments


def _alone(
    tool: ToolMethod, usual: Callable[[ToolMethod, Demonstration], Mapping[str, Any]], given: dict[str, Any]
) -> Trick:
    return lambda each: says(calling(ToolCall(tool.name, {**usual(tool, each), **given}, "call_1")), "done")


def _before(tool: ToolMethod, given: dict[str, Any]) -> Trick:
    """The call with the expert's own other arguments, then the expert's episode."""

    def agent(each: Demonstration) -> Agent:
        usual = next((call.arguments for call in calls_of(each, tool.name)), _invented(tool, each))
        return says(calling(ToolCall(tool.name, {**usual, **given}, "call_before")), *each.replies)

    return agent


def _replacing(tool: ToolMethod, given: dict[str, Any]) -> Trick:
    """The expert's episode with other numbers in the calls of a tool."""

    def agent(each: Demonstration) -> Agent:
        replies = []
        for reply in each.replies:
            calls = [
                ToolCall(call.name, {**call.arguments, **given} if call.name == tool.name else call.arguments, call.id)
                for call in reply.tool_calls
            ]
            replies.append(Message("assistant", reply.text, calls))
        return says(*replies)

    return agent
