"""Environments that talk: two roles, a user that replies, and a program behind an address."""

import asyncio
import json
import urllib.request

import trio

from rollouts import Message, Role, Task, metric, reward, tool


class Market:
    """A seller and a buyer."""

    roles = (Role("seller", system="You sell a lamp."), Role("buyer", system="You buy a lamp."))

    def tasks(self, split, rng):
        return [Task(f"lamp {number}", info={"low": rng.randint(1, 9)}, id=f"{split}{number}") for number in range(8)]

    def setup(self, task):
        self.price = ""

    async def rollout(self, task, model):
        seller, buyer = model.role("seller"), model.role("buyer")
        assert set(model.roles) == {"seller", "buyer"} and seller.trajectory is None
        assert seller.messages == [Message("system", "You sell a lamp.")] and seller.turns_left >= 1
        offer = await seller.say(f"Ask at least {task.info['low']}.")
        left = buyer.tokens_left
        bid = await buyer.say([f"The seller says: {offer.text}", Message("user", "And you?")])
        assert buyer.tokens_left <= left and buyer.trajectory.role == "buyer"
        self.price = bid.text
        seller.trajectory.info["offer"] = {"text": offer.text, "turns": seller.trajectory.turns}

    @tool(role="seller")
    def stock(self) -> int:
        """How many lamps are left."""
        return 3

    @reward(role="seller")
    def offered(self, trajectory):
        return float(any(letter.isdigit() for letter in trajectory.last_text))

    @reward(role="buyer")
    def answered(self):
        return float(bool(self.price))

    @metric
    def tokens(self, trajectory):
        return trajectory.sampled_count


class Guest:
    """A guest orders, and asks once more."""

    async_library = "asyncio"

    def tasks(self, split, rng):
        yield from (
            {"prompt": f"{rng.randint(2, 9)} teas, please.", "answer": 3, "id": f"{split}{n}"} for n in range(8)
        )

    async def setup(self, task):
        await asyncio.sleep(0)
        self.has_asked = False

    async def reply(self, trajectory):
        await asyncio.sleep(0)
        if self.has_asked:
            return None
        self.has_asked = True
        return "How much is that?"

    @tool
    async def price(self, thing: str = "tea") -> str:
        """The price of a thing."""
        await asyncio.sleep(0)
        return "3"

    @reward
    async def correct(self, task, trajectory):
        return trajectory.last_text.strip() == str(task.answer)

    async def close(self):
        await asyncio.sleep(0)


class Program:
    """A program with a client of its own, which also asks as the own loop does."""

    def tasks(self, split, rng):
        return [Task(f"{number} + {number}?", answer=str(2 * number), id=f"{split}{number}") for number in range(8)]

    async def rollout(self, task, model):
        async with model.serve() as endpoint:
            assert endpoint.base_url == f"{endpoint.url}/v1" and endpoint.variables["OPENAI_API_KEY"] == endpoint.key
            chat = f"{endpoint.base_url}/chat/completions", {"messages": [{"role": "user", "content": task.prompt}]}
            said = await trio.to_thread.run_sync(ask, *chat, endpoint.key, abandon_on_cancel=True)
            first = said["choices"][0]["message"]["content"]
            message = (
                f"{endpoint.url}/v1/messages",
                {
                    "max_tokens": 40,
                    "messages": [
                        {"role": "user", "content": task.prompt},
                        {"role": "assistant", "content": first},
                        {"role": "user", "content": "Sure?"},
                    ],
                },
            )
            await trio.to_thread.run_sync(ask, *message, endpoint.key, abandon_on_cancel=True)
        last = model.trajectory
        last.info["first"] = first
        reply = await model.chat([*last.messages, Message("user", "Done?")], [])
        assert model.messages[-1] == reply and model.trajectories == [last]
        return last

    @reward
    def said(self, task, trajectory):
        return float(trajectory.info.get("first", "").strip() == task.answer)


def ask(url, body, key):
    """The answer to a request."""
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    request = urllib.request.Request(url, json.dumps({"model": "any", **body}).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)
