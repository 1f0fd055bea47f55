"""Invented tokens: a value for each input of a loss, a KL estimator, a correction, and an advantage of a batch.

A batch has two prompts with two rollouts each; one rollout has two segments. Some positions are masked. `Tokens.take`
gives some rows of a batch, in any order, as a microbatch has them. Legend as in `rollouts.plugins.vocabulary`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

WITH_GRADIENT = ("logprobs", "entropy", "values", "topk_logprobs", "logits")
"""The inputs that carry a gradient."""

WHOLE = ("rewards", "turn_rewards", "step")
"""The inputs that every microbatch of a batch has in whole."""

LENGTHS = ((0, 5), (1, 4), (1, 3), (2, 4), (3, 6))
"""The rollout and the length of each row."""

ALTERNATIVES, VOCABULARY_SIZE = 3, 7


class Tokens(NamedTuple):
    """The inputs by name, and the row of each token [T]."""

    inputs: dict[str, Any]
    rows: list[int]

    @property
    def live(self) -> Tensor:
        """The positions [T] that are trained: bool."""
        mask: Tensor = self.inputs["mask"] > 0
        return mask

    @property
    def streams(self) -> dict[str, Tensor]:
        """The inputs with one entry for each token."""
        return {name: value for name, value in self.inputs.items() if name not in WHOLE}

    def take(self, rows: Sequence[int]) -> Tokens:
        """The tokens of these rows, in this order."""
        places = [place for row in rows for place, each in enumerate(self.rows) if each == row]
        chosen = {name: stream.detach()[places] for name, stream in self.streams.items()}
        return Tokens({**self.inputs, **chosen}, [self.rows[place] for place in places])

    def changed(self, **values: Any) -> Tokens:
        """The tokens with other values."""
        return self._replace(inputs={**self.inputs, **values})

    def with_gradient(self) -> Tokens:
        """Copies of all inputs; those of `WITH_GRADIENT` require a gradient."""
        copies = {name: value.detach().clone() for name, value in self.streams.items()}
        for name in WITH_GRADIENT:
            copies[name].requires_grad_()
        return self.changed(**copies)

    def to(self, dtype: Any) -> Tokens:
        """The tokens with this floating dtype."""
        floats = {name: value.to(dtype) for name, value in self.streams.items() if value.is_floating_point()}
        return self.changed(**floats, rewards=self.inputs["rewards"].to(dtype))


def usual_tokens(random: Random, *, in_pairs: bool = False) -> Tokens:
    """Random values as in a run, float64. `in_pairs`: the advantages are those of pairs, 1 and -1."""
    import torch

    rows = [row for row, (_, length) in enumerate(LENGTHS) for _ in range(length)]
    rollouts = [LENGTHS[row][0] for row in rows]
    segments = [int(row == 2) for row in rows]
    turns = [int(row == 2 or (row == 0 and place > 2)) for place, row in enumerate(rows)]
    count = len(rows)
    weights = [0.0 if place == 0 or rows[place - 1] != row else 1.0 for place, row in enumerate(rows)]
    weights[2] = weights[count - 2] = 0.0  # text of a tool
    weights = [weight / 2 if rollout == 2 else weight for weight, rollout in zip(weights, rollouts, strict=True)]
    mask = torch.tensor(weights, dtype=torch.float64)

    def drawn(low: float, high: float, *shape: int) -> Tensor:
        size = len(torch.empty(shape or (count,)).flatten())
        numbers = [random.uniform(low, high) for _ in range(size)]
        return torch.tensor(numbers, dtype=torch.float64).reshape(shape or (count,))

    logprobs = drawn(-3.0, -0.2)
    of_rollouts = (1.0, -1.0, 1.0, -1.0) if in_pairs else (1.3, -0.7, 0.4, -1.6)
    advantages = torch.tensor([of_rollouts[rollout] for rollout in rollouts], dtype=torch.float64)
    topk = drawn(-2.5, -0.7, count, ALTERNATIVES)
    inputs = {
        "logprobs": logprobs,
        **{f"{name}_logprobs": logprobs + drawn(-0.3, 0.3) for name in ("old", "rollout", "ref", "teacher")},
        "advantages": advantages.where(mask > 0, 0.0),
        "returns": drawn(-1.0, 1.0),
        "old_values": drawn(-1.0, 1.0),
        "values": drawn(-1.0, 1.0),
        "entropy": drawn(0.1, 2.0),
        "topk_logprobs": topk,
        "teacher_topk_ids": torch.arange(ALTERNATIVES).repeat(count, 1),
        "teacher_topk_logprobs": topk + drawn(-0.3, 0.3, count, ALTERNATIVES),
        "logits": drawn(-2.0, 2.0, count, VOCABULARY_SIZE),
        "token_rewards": drawn(-0.2, 0.2),
        "mask": mask,
        "rollout_index": torch.tensor(rollouts),
        "group_index": torch.tensor(rollouts) // 2,
        "pair_index": torch.tensor(rollouts) // 2,
        "segments": torch.tensor(segments),
        "turn_index": torch.tensor(turns),
        # One more rollout has no token here, and was not judged.
        "rewards": torch.tensor([1.0, 0.0, 0.5, -1.0, float("nan")], dtype=torch.float64),
        "turn_rewards": [[0.75, 0.25], [0.5, -0.5], [0.5], [-1.0], []],
        "step": 3,
    }
    return Tokens(inputs, rows)


def extreme_tokens() -> Tokens:
    """Policies that are far apart, certain tokens, and advantages of 0: float32, as in a run. No position is masked."""
    import torch

    logprobs = (0.0, -1e-7, -1.0, -30.0, -100.0)
    cases = [(new, old, sign) for new in logprobs for old in logprobs for sign in (0.0, 1.0, -1.0, 5.0)]
    count = len(cases)
    rollouts = torch.arange(count) // 5
    new, old, signs = (torch.tensor(column) for column in zip(*cases, strict=True))
    large = torch.tensor([0.0, 1e3, -1e3, 1.0])[torch.arange(count) % 4]
    rewards = [1.0, -1e6, 0.0, 1e-8] * 5
    wide = new.unsqueeze(1).repeat(1, ALTERNATIVES)
    inputs = {
        "logprobs": new,
        **dict.fromkeys(("old_logprobs", "rollout_logprobs", "ref_logprobs", "teacher_logprobs"), old),
        "advantages": signs,
        "returns": large,
        "old_values": -large,
        "values": large.flip(0),
        "entropy": torch.tensor([0.0, 1e-8, 1.0, 12.0])[torch.arange(count) % 4],
        "topk_logprobs": wide,
        "teacher_topk_ids": torch.arange(ALTERNATIVES).repeat(count, 1),
        "teacher_topk_logprobs": old.unsqueeze(1).repeat(1, ALTERNATIVES),
        "logits": torch.linspace(-100.0, 100.0, count * VOCABULARY_SIZE).reshape(count, VOCABULARY_SIZE),
        "token_rewards": signs,
        "mask": torch.ones(count),
        "rollout_index": rollouts,
        "group_index": rollouts // 2,
        "pair_index": rollouts // 2,
        "segments": torch.zeros(count, dtype=torch.int64),
        "turn_index": torch.zeros(count, dtype=torch.int64),
        "rewards": torch.tensor([*rewards, float("nan")]),
        "turn_rewards": [*([reward] for reward in rewards), []],
        "step": 0,
    }
    return Tokens(inputs, (torch.arange(count) // 5).tolist())


def beside_mask(tokens: Tokens, random: Random) -> Tokens:
    """The tokens with other values at masked positions. Advantages stay 0 there."""
    import torch

    live, values = tokens.live, dict[str, Any]()
    for name, stream in tokens.streams.items():
        if not stream.is_floating_point() or name in ("mask", "advantages"):
            continue
        other = torch.full_like(stream, random.uniform(-9.0, -4.0))
        here = live.reshape(-1, *[1] * (stream.dim() - 1))
        values[name] = torch.where(here, stream, other)
    return tokens.changed(**values)


def units(tokens: Tokens, requests: Mapping[str, Any] | Sequence[str]) -> list[list[int]]:
    """The rows that stay together in a microbatch, for a function with these inputs: those of a group, a pair, or a
    rollout that it names, else each row alone.
    """
    name = next((name for name in ("group_index", "pair_index", "rollout_index") if name in requests), None)
    together: dict[int, list[int]] = {}
    for row in dict.fromkeys(tokens.rows):
        place = tokens.rows.index(row)
        together.setdefault(row if name is None else int(tokens.inputs[name][place]), []).append(row)
    return list(together.values())
