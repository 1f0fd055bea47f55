"""Tools: plain ones, or with a basket that belongs to the episode."""

import verifiers as vf
from datasets import Dataset

PRICES = {"apple": 3, "bread": 5, "cheese": 11}


def price(item: str) -> int:
    """The price of an item.

    Args:
        item: the name of the item
    """
    return PRICES[item]


async def total(prices: list[int]) -> str:
    """The sum of prices."""
    return str(sum(prices))


class ShopEnv(vf.StatefulToolEnv):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.add_tool(self.take, args_to_skip=["basket"])

    async def setup_state(self, state):
        state["basket"] = []
        return state

    def take(self, item: str, basket: list[str]) -> str:
        """Put an item into the basket."""
        basket.append(item)
        return f"{len(basket)} in the basket"

    def update_tool_args(self, tool_name, tool_args, messages, state, **kwargs):
        return {**tool_args, "basket": state["basket"]} if tool_name == "take" else tool_args


def right(completion, answer) -> float:
    return float(str(completion[-1]["content"]).strip() == answer)


def has_taken(state) -> float:
    return float(len(state.get("basket", [])))


def load_environment(stateful: bool = False, stops: bool = False) -> vf.Environment:
    pairs = [("apple", "bread"), ("bread", "cheese"), ("apple", "cheese")]
    rows = [{"question": f"What do {a} and {b} cost?", "answer": str(PRICES[a] + PRICES[b])} for a, b in pairs]
    kwargs = {"dataset": Dataset.from_list(rows), "max_turns": 6, "system_prompt": "You have tools."}
    kwargs["stop_errors"] = [KeyError] if stops else []
    if stateful:
        return ShopEnv(tools=[price], rubric=vf.Rubric([right, has_taken], weights=[1.0, 0.1]), **kwargs)
    return vf.ToolEnv(tools=[price, total], rubric=vf.Rubric([right]), **kwargs)
