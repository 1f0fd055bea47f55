"""What the model said in an episode as an object of OpenAI's Responses, which a server of NeMo Gym judges."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from rollouts import Message, Status, Trajectory
from rollouts.types import ToolCall
from rollouts_nemo_gym.rows import KEY, Row

MODEL = "policy"


def response_of(row: Row, trajectory: Trajectory) -> dict[str, Any]:
    """The response: all that was said after the prompt, as one list of items."""
    given, is_cut = row.whole[KEY], trajectory.status is Status.TRUNCATED
    return {
        "id": "resp_0",
        "object": "response",
        "created_at": 0,
        "model": MODEL,
        "output": list(items_of(trajectory.messages[len(trajectory.task.messages) :], row.tools)),
        "parallel_tool_calls": given.get("parallel_tool_calls", True),
        "tool_choice": given.get("tool_choice", "auto"),
        "tools": row.tools,
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
    }


def items_of(messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> Iterator[dict[str, Any]]:
    """The items of messages. A call and its result have one id, which no other call has.

    >>> said = [Message("assistant", "Yes.")]
    >>> [(item["type"], item["content"][0]["text"]) for item in items_of(said)]
    [('message', 'Yes.')]
    """
    from rollouts.env.json_schemas import plain_names

    own = {plain: name for name, plain in plain_names([each["name"] for each in tools]).items()}
    waiting, turn = list[str](), 0
    for message in messages:
        if message.role == "tool":
            yield {"type": "function_call_output", "call_id": waiting.pop(0), "output": message.text}
        if message.role != "assistant":
            continue
        if message.reasoning:
            summary = [{"type": "summary_text", "text": message.reasoning}]
            yield {"type": "reasoning", "id": f"rs_{turn}", "summary": summary}
        if message.text or not message.tool_calls:
            yield {
                "type": "message",
                "id": f"msg_{turn}",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": message.text, "annotations": []}],
            }
        waiting = [f"call_{turn}_{number}" for number in range(len(message.tool_calls))]
        for identifier, call in zip(waiting, message.tool_calls, strict=True):
            yield {
                "type": "function_call",
                "id": f"fc_{identifier}",
                "call_id": identifier,
                "name": own.get(call.name, call.name),
                "arguments": _arguments(call),
                "status": "completed",
            }
        turn += 1


def _arguments(call: ToolCall) -> str:
    return json.dumps(call.arguments, ensure_ascii=False) if call.error is None else call.error
