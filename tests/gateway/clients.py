"""Plain HTTP clients of the three APIs, for the tests of the gateway. Each sends the whole conversation."""

from __future__ import annotations

import json
from typing import Any

import httpx

from rollouts.gateway.endpoint import Endpoint

TOOL = {
    "type": "function",
    "function": {
        "name": "double",
        "description": "Double a number.",
        "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
    },
}


class Refused(Exception):
    """The status and the body of an error."""

    def __init__(self, response: httpx.Response) -> None:
        super().__init__(response.text)
        self.status, self.error = response.status_code, response.json()["error"]


class Chat:
    """OpenAI's Chat Completions."""

    path = "/v1/chat/completions"

    def __init__(self, endpoint: Endpoint, tools: list[Any] | None = None, stream: bool = False, **more: Any) -> None:
        self.endpoint, self.tools, self.stream, self.more = endpoint, tools or [], stream, more
        self.items: list[dict[str, Any]] = []

    async def post(self, body: dict[str, Any], **headers: str) -> httpx.Response:
        async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
            given = {"authorization": f"Bearer {self.endpoint.key}", **headers}
            response = await http.post(self.endpoint.url + self.path, json=body, headers=given)
        if response.status_code != 200:
            raise Refused(response)
        return response

    def body(self) -> dict[str, Any]:
        tools = {"tools": [self.tool(tool["function"]) for tool in self.tools]} if self.tools else {}
        return {"model": "any", **tools, **({"stream": True} if self.stream else {}), **self.more}

    def tool(self, function: dict[str, Any]) -> dict[str, Any]:
        return {"type": "function", "function": function}

    async def ask(self, text: str = "", **headers: str) -> tuple[str, list[tuple[str, str, dict[str, Any]]]]:
        """The text of the reply, and its calls as (id, name, arguments)."""
        if text:
            self.items.append({"role": "user", "content": text})
        response = await self.post({**self.body(), "messages": self.items}, **headers)
        message = _chat_stream(response.text) if self.stream else response.json()["choices"][0]["message"]
        self.items.append(message)
        calls = [each["function"] | {"id": each["id"]} for each in message.get("tool_calls", [])]
        return message["content"] or "", [(c["id"], c["name"], json.loads(c["arguments"])) for c in calls]

    def result(self, call: str, text: str) -> None:
        self.items.append({"role": "tool", "tool_call_id": call, "content": text})


class Responses(Chat):
    """OpenAI's Responses."""

    path = "/v1/responses"

    def tool(self, function: dict[str, Any]) -> dict[str, Any]:
        return {"type": "function", **function}

    async def ask(self, text: str = "", **headers: str) -> tuple[str, list[tuple[str, str, dict[str, Any]]]]:
        if text:
            self.items.append({"role": "user", "content": text})
        response = await self.post({**self.body(), "input": self.items}, **headers)
        output = _events(response.text)[-1]["response"]["output"] if self.stream else response.json()["output"]
        self.items += output
        texts = [each["content"][0]["text"] for each in output if each["type"] == "message"]
        calls = [each for each in output if each["type"] == "function_call"]
        return "".join(texts), [(each["call_id"], each["name"], json.loads(each["arguments"])) for each in calls]

    def result(self, call: str, text: str) -> None:
        self.items.append({"type": "function_call_output", "call_id": call, "output": text})


class Messages(Chat):
    """Anthropic's Messages."""

    path = "/v1/messages"

    def tool(self, function: dict[str, Any]) -> dict[str, Any]:
        return {
            "name": function["name"],
            "description": function["description"],
            "input_schema": function["parameters"],
        }

    async def ask(self, text: str = "", **headers: str) -> tuple[str, list[tuple[str, str, dict[str, Any]]]]:
        if text:
            self.items.append({"role": "user", "content": text})
        response = await self.post({"max_tokens": 10_000, **self.body(), "messages": self.items}, **headers)
        content = _message_stream(response.text) if self.stream else response.json()["content"]
        self.items.append({"role": "assistant", "content": content})
        texts = [block["text"] for block in content if block["type"] == "text"]
        calls = [block for block in content if block["type"] == "tool_use"]
        return "".join(texts), [(block["id"], block["name"], block["input"]) for block in calls]

    def result(self, call: str, text: str) -> None:
        block = {"type": "tool_result", "tool_use_id": call, "content": [{"type": "text", "text": text}]}
        if self.items[-1]["role"] == "user":
            self.items[-1]["content"].append(block)
        else:
            self.items.append({"role": "user", "content": [block]})


APIS = (Chat, Responses, Messages)


def _events(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def _chat_stream(text: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": None}
    for event in _events(text):
        delta = event["choices"][0]["delta"]
        if delta.get("content"):
            message["content"] = (message["content"] or "") + delta["content"]
        for call in delta.get("tool_calls", []):
            message.setdefault("tool_calls", []).append({key: call[key] for key in ("id", "type", "function")})
    return message


def _message_stream(text: str) -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = []
    for event in _events(text):
        if event["type"] == "content_block_start":
            content.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            if delta["type"] == "input_json_delta":
                content[event["index"]]["input"] = json.loads(delta["partial_json"])
            else:
                content[event["index"]]["text"] += delta["text"]
    return content
