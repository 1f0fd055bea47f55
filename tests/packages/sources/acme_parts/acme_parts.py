"""One component of each kind that joins a run beside its environment, model and loss."""

import re

import torch

from rollouts import ToolCall


def search(query: str, *, top_k: int = 3) -> str:
    """Search the notes."""
    return f"{top_k} notes about {query}"


def calls(text, *, word: str = "CALL"):
    """Calls such as CALL search(query=stars)."""
    pattern = word + r" (\w+)\((\w+)=(.*?)\)"
    return [ToolCall(name, {key: value}) for name, key, value in re.findall(pattern, text)], re.sub(pattern, "", text)


def write(made):
    return "".join(f"CALL {each.name}({key}={value})" for each in made for key, value in each.arguments.items())


calls.write = write


class Sign(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                    parameter.sub_(mean.lerp_(parameter.grad, 1 - group["beta"]).sign(), alpha=group["lr"])


def sign(params, lr, *, beta: float = 0.9):
    """Steps by the sign of the mean gradient."""
    return Sign(params, {"lr": lr, "beta": beta})
