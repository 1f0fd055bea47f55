"""`rollout` takes the end of its time for a reply."""

from __future__ import annotations

from sums import Sums


class Fault(Sums):
    async def rollout(self, task, model):
        messages = task.messages
        try:
            reply = await model.chat(messages)
            while reply.tool_calls:
                messages = [*messages, reply, *await model.call_tools(reply)]
                reply = await model.chat(messages)
        finally:
            return model.trajectory  # noqa: B012
