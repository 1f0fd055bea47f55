"""Small agents, each written with a package that people use. Each multiplies with a tool and returns its last reply.

An agent gets the endpoint of an episode and a prompt, and knows nothing else of rollouts. The packages are imported
when their agent plays.
"""

from __future__ import annotations

import json
import os
from typing import Any

from rollouts.gateway.endpoint import Endpoint

TOOL = {
    "name": "multiply",
    "description": "Multiply two numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


def result(arguments: Any) -> str:
    """What the model reads after a call."""
    try:
        return str(multiply(**arguments))
    except TypeError as error:
        return f"Error: {error}"


# --- openai ---------------------------------------------------------------------------------------------------------


async def openai_chat(endpoint: Endpoint, prompt: str) -> str:
    """Chat Completions."""
    from openai import AsyncOpenAI

    messages: list[Any] = [{"role": "system", "content": "Use the tool."}, {"role": "user", "content": prompt}]
    tools: list[Any] = [{"type": "function", "function": TOOL}]
    async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.key) as client:
        while True:
            completion = await client.chat.completions.create(model="gpt-5", messages=messages, tools=tools)
            message = completion.choices[0].message
            messages.append(message)
            for call in message.tool_calls or ():
                text = result(json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
            if not message.tool_calls:
                return message.content or ""


async def openai_chat_stream(endpoint: Endpoint, prompt: str) -> str:
    """Chat Completions, each reply as a stream."""
    from openai import AsyncOpenAI

    messages: list[Any] = [{"role": "user", "content": prompt}]
    tools: list[Any] = [{"type": "function", "function": TOOL}]
    async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.key) as client:
        while True:
            options: Any = {"messages": messages, "tools": tools, "stream_options": {"include_usage": True}}
            async with client.chat.completions.stream(model="gpt-5", **options) as stream:
                completion = await stream.get_final_completion()
            assert completion.usage is not None and completion.usage.completion_tokens > 0
            message = completion.choices[0].message
            messages.append(message)
            for call in message.tool_calls or ():
                text = result(json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
            if not message.tool_calls:
                return message.content or ""


async def openai_responses(endpoint: Endpoint, prompt: str) -> str:
    """Responses, with the whole conversation in each request."""
    from openai import AsyncOpenAI

    items: list[Any] = [{"role": "user", "content": prompt}]
    tools: list[Any] = [{"type": "function", **TOOL}]
    async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.key) as client:
        while True:
            response = await client.responses.create(model="gpt-5", input=items, tools=tools)
            items += response.output
            calls = [item for item in response.output if item.type == "function_call"]
            for call in calls:
                text = result(json.loads(call.arguments))
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": text})
            if not calls:
                return response.output_text


async def openai_responses_stream(endpoint: Endpoint, prompt: str) -> str:
    """Responses, each as a stream that continues the last one by its id."""
    from openai import AsyncOpenAI

    items: list[Any] = [{"role": "user", "content": prompt}]
    tools: list[Any] = [{"type": "function", **TOOL}]
    last: Any = {}
    async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.key) as client:
        while True:
            async with client.responses.stream(model="gpt-5", input=items, tools=tools, **last) as stream:
                response = await stream.get_final_response()
            last = {"previous_response_id": response.id}
            calls = [item for item in response.output if item.type == "function_call"]
            items = []
            for call in calls:
                text = result(json.loads(call.arguments))
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": text})
            if not calls:
                return response.output_text


# --- anthropic ------------------------------------------------------------------------------------------------------


async def anthropic_messages(endpoint: Endpoint, prompt: str, stream: bool = False) -> str:
    """Messages."""
    from anthropic import AsyncAnthropic

    messages: list[Any] = [{"role": "user", "content": prompt}]
    tool = {"name": TOOL["name"], "description": TOOL["description"], "input_schema": TOOL["parameters"]}
    options: Any = {"model": "claude", "max_tokens": 1000, "system": "Use the tool.", "tools": [tool]}
    async with AsyncAnthropic(base_url=endpoint.url, api_key=endpoint.key) as client:
        while True:
            if stream:
                async with client.messages.stream(messages=messages, **options) as events:
                    message = await events.get_final_message()
            else:
                message = await client.messages.create(messages=messages, **options)
            messages.append({"role": "assistant", "content": message.content})
            calls = [block for block in message.content if block.type == "tool_use"]
            results = [{"type": "tool_result", "tool_use_id": call.id, "content": result(call.input)} for call in calls]
            if not calls:
                return "".join(block.text for block in message.content if block.type == "text")
            messages.append({"role": "user", "content": results})


async def anthropic_messages_stream(endpoint: Endpoint, prompt: str) -> str:
    """Messages, each as a stream."""
    return await anthropic_messages(endpoint, prompt, stream=True)


async def anthropic_tool_runner(endpoint: Endpoint, prompt: str) -> str:
    """The loop of the package itself."""
    from anthropic import AsyncAnthropic, beta_async_tool

    async def product(a: int, b: int) -> str:
        """Multiply two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        return str(multiply(a, b))

    async with AsyncAnthropic(base_url=endpoint.url, api_key=endpoint.key) as client:
        runner = client.beta.messages.tool_runner(
            model="claude",
            max_tokens=1000,
            messages=[{"role": "user", "content": prompt}],
            tools=[beta_async_tool(product, name="multiply")],
        )
        message = await runner.until_done()
    return "".join(block.text for block in message.content if block.type == "text")


# --- packages of agents ---------------------------------------------------------------------------------------------


async def openai_agents(endpoint: Endpoint, prompt: str, stream: bool = False, responses: bool = False) -> str:
    """The OpenAI Agents SDK."""
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    kind = agents.OpenAIResponsesModel if responses else agents.OpenAIChatCompletionsModel
    async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.key) as client:
        agent: Any = agents.Agent(
            name="multiplier",
            instructions="Use the tool.",
            model=kind(model="gpt-5", openai_client=client),
            tools=[agents.function_tool(multiply)],
        )
        if not stream:
            return str((await agents.Runner.run(agent, prompt)).final_output)
        streamed = agents.Runner.run_streamed(agent, prompt)
        async for _ in streamed.stream_events():
            pass
        return str(streamed.final_output)


async def openai_agents_stream(endpoint: Endpoint, prompt: str) -> str:
    """The OpenAI Agents SDK, with streams of the Responses API."""
    return await openai_agents(endpoint, prompt, stream=True, responses=True)


async def pydantic_ai(endpoint: Endpoint, prompt: str) -> str:
    """Pydantic AI."""
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=endpoint.base_url, api_key=endpoint.key)
    agent = Agent(OpenAIChatModel("gpt-5", provider=provider), instructions="Use the tool.", tools=[multiply])
    return str((await agent.run(prompt)).output)


async def pydantic_ai_output(endpoint: Endpoint, prompt: str) -> str:
    """Pydantic AI with a type of output, which it asks for with a tool."""
    from pydantic import BaseModel
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    class Product(BaseModel):
        answer: str

    provider = OpenAIProvider(base_url=endpoint.base_url, api_key=endpoint.key)
    agent = Agent(OpenAIChatModel("gpt-5", provider=provider), output_type=Product, tools=[multiply])
    return (await agent.run(prompt)).output.answer


async def langgraph(endpoint: Endpoint, prompt: str) -> str:
    """LangGraph, with the chat model of langchain-openai."""
    from langchain_openai import ChatOpenAI
    from langgraph.graph import MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition

    model: Any = ChatOpenAI(model="gpt-5", base_url=endpoint.base_url, api_key=endpoint.key)  # type: ignore[arg-type]
    bound = model.bind_tools([multiply])

    async def ask(state: MessagesState) -> Any:
        return {"messages": [await bound.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("ask", ask)
    graph.add_node("tools", ToolNode([multiply]))
    graph.set_entry_point("ask")
    graph.add_conditional_edges("ask", tools_condition)
    graph.add_edge("tools", "ask")
    state = await graph.compile().ainvoke({"messages": [{"role": "user", "content": prompt}]})
    return str(state["messages"][-1].content)


def smolagents(endpoint: Endpoint, prompt: str, code: bool = False) -> str:
    """smolagents with calls of tools. Its agents end with a call of their tool final_answer."""
    import smolagents
    from smolagents.monitoring import LogLevel

    model = smolagents.OpenAIModel("gpt-5", api_base=endpoint.base_url, api_key=endpoint.key)
    kind = smolagents.CodeAgent if code else smolagents.ToolCallingAgent
    agent = kind(tools=[smolagents.tool(multiply)], model=model, verbosity_level=LogLevel.OFF, max_steps=5)
    return str(agent.run(prompt))


def smolagents_code(endpoint: Endpoint, prompt: str) -> str:
    """smolagents with actions that are Python code."""
    return smolagents(endpoint, prompt, code=True)


def mini_swe_agent(endpoint: Endpoint, prompt: str) -> str:
    """mini-SWE-agent, which runs commands in a shell."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # no network
    os.environ["MSWEA_SILENT_STARTUP"] = "1"
    os.environ["MSWEA_COST_TRACKING"] = "ignore_errors"
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_model import LitellmModel

    options = {"api_base": endpoint.base_url, "api_key": endpoint.key}
    model = LitellmModel(model_name="openai/gpt-5", model_kwargs=options, cost_tracking="ignore_errors")
    agent = DefaultAgent(
        model, LocalEnvironment(), system_template="Work in a shell.", instance_template="{{task}}", step_limit=9
    )
    return str(agent.run(prompt)["submission"])


# --- what the model says --------------------------------------------------------------------------------------------


def call(name: str, **arguments: Any) -> str:
    """A call of a tool as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def calls_and_answer(number: int) -> tuple[list[str], str]:
    """Replies with calls of `multiply`, the last with the answer: one call, two calls at once, or two in turn."""
    first, second = call("multiply", a=number, b=37), call("multiply", a=2, b=number)
    answer = f"It is {number * 37}, surely."
    ways = [[f"Let me see.\n{first}"], [f"{first}\n{second}"], [first, second]]
    return [*ways[number % 3], answer], answer


def calls_and_final(number: int, final: str = "final_answer") -> tuple[list[str], str]:
    """The same for smolagents, with a call at the end."""
    replies, answer = calls_and_answer(number)
    return [*replies[:-1], call(final, answer=answer)], answer


def calls_and_result(number: int) -> tuple[list[str], str]:
    """The same for a type of output of Pydantic AI."""
    return calls_and_final(number, "final_result")


def code_and_final(number: int) -> tuple[list[str], str]:
    """The same as Python code."""
    first = f"Thought: I multiply.\n<code>\nproduct = multiply(a={number}, b=37)\nprint(product)\n</code>"
    return [first, f"Thought: I know.\n<code>\nfinal_answer({number * 37})\n</code>"], str(number * 37)


def commands(number: int) -> tuple[list[str], str]:
    """The same as shell commands."""
    end = f"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo {number * 37}"
    return [call("bash", command=f"echo $(({number} * 37))"), call("bash", command=end)], f"{number * 37}\n"
