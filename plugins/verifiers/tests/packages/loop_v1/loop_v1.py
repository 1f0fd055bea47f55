"""A harness: a program that asks a sub-agent first, then answers, and asks itself again until it is sure."""

import sys
from typing import Literal

import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult

__all__ = ["LoopHarness"]

PROGRAM = """
import json, os, sys, urllib.request

base, key, api, system, prompt, tries = sys.argv[1:]

def ask(messages):
    chat = api == "chat"
    body = {"model": "any", "messages": messages, **({} if chat else {"max_tokens": 100})}
    kind = {"authorization": "Bearer " + key} if chat else {"x-api-key": key}
    url = base + ("/chat/completions" if chat else "/messages")
    request = urllib.request.Request(url, json.dumps(body).encode(), {**kind, "content-type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        found = json.load(answer)
    said = found["choices"][0]["message"]["content"] if chat else found["content"][0]["text"]
    open("said.txt", "a").write(said)
    return [*messages, {"role": "assistant", "content": said}]

first = [{"role": "user", "content": system + prompt}]
said = ask(first)
ask([{"role": "user", "content": "a subagent"}])
for _ in range(int(tries)):
    said = ask([*said, {"role": "user", "content": "Are you sure?"}])
"""


class LoopConfig(vf.HarnessConfig):
    tries: int = 1
    api: Literal["chat", "messages"] = "chat"


class LoopHarness(vf.Harness[LoopConfig]):
    APPENDS_SYSTEM_PROMPT = True
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data) -> ProgramResult:
        system, prompt = self.resolve_text_prompt(data)
        given = [endpoint, secret, self.config.api, system or "", prompt or "", str(self.config.tries)]
        return await runtime.run_program([sys.executable, "-c", PROGRAM, *given], self.config.resolved_env)

    @vf.metric
    async def said(self, runtime) -> float:
        return float(len(await runtime.read("said.txt")))
