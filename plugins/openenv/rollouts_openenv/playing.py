"""What environments behind servers have in common: numbered tasks, the loop of an episode, its rewards and metrics.

The first message of an episode is known only when its session is open, so the loop is `rollout`. Not here: how a server
is spoken to (`sessions`, `calls`).
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from rollouts import Message, Score, Status, Task, Trajectory, metric, reward
from rollouts.env.services import Service
from rollouts.errors import EnvironmentDefinitionError, ServiceLostError
from rollouts_openenv.service import RefusedError, split_name

OBSERVATION_CHARACTERS = 16_000
OVER = "the episode is over"


class Playing:
    """An episode on a server. A subclass calls `_play` in its `rollout`, and `_note` for each step."""

    train_split: str
    eval_split: str
    rewards: str
    unjudged: float | None
    max_errors: int

    def __post_init__(self) -> None:
        self._turn = self._errors = 0
        self._is_over = self._is_unknown = False
        self._gains: list[tuple[int, float | None]] = []  # the turn and the reward of each step

    def _tasks_of(
        self, service: Service, name: str, splits: Sequence[Mapping[str, Any]], split: str, prompt: str
    ) -> list[Task]:
        """A task for each of the server's tasks in its split for `train` or `eval`. Raises ConfigError."""
        own = split_name(splits, getattr(self, f"{split}_split"), split, f"--env.{split}-split")
        count = (service.post(f"/{name}/num_tasks", {"split": own}) or {}).get("num_tasks")
        if not isinstance(count, int) or count < 1:
            raise EnvironmentDefinitionError(f"the server says that the split {own} of {name} has {count!r} tasks")
        return [Task(prompt, info={"split": own, "index": index}, id=f"{name}/{own}/{index}") for index in range(count)]

    # --- the loop -----------------------------------------------------------------------------------------------------

    async def _play(self, task: Task, model: Any, first: str) -> None:
        """Let the model act until the episode is over. `first` is what it reads after the prompt."""
        *before, last = task.messages
        prompt = "\n\n".join(filter(None, (last.text, first[:OBSERVATION_CHARACTERS])))
        conversation = [*before, Message("user", prompt)]
        while not self._is_over:
            reply = await model.chat(conversation)
            self._turn += 1
            if model.trajectory.status is Status.TRUNCATED:
                return
            if reply.tool_calls:
                answer = await model.call_tools(reply)
            elif (text := await self._answer(reply.text)) is not None:
                answer = [Message("user", text[:OBSERVATION_CHARACTERS])]
            else:
                return
            conversation = [*model.messages, *answer]

    async def _answer(self, text: str) -> str | None:
        """The answer to a reply without a call; None ends the episode."""
        return None

    async def _asked(self, ask: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        """What the session answers. Raises ValueError if the episode is over, or the server refuses the request."""
        if self._is_over:
            raise ValueError(OVER)
        self._is_unknown = True  # until the answer is here
        try:
            found = await ask(*args)
        except RefusedError as error:
            self._is_unknown = False
            raise self._refuse(str(error)) from error
        self._is_unknown = False
        return found

    def _note(self, gain: Any, *, done: bool) -> None:
        """Note the reward of a step, which may be None, and whether it was the last."""
        if gain is not None and (not isinstance(gain, bool | int | float) or not math.isfinite(gain)):
            raise ServiceLostError(f"the server gave the reward {gain!r}, which is no finite number")
        self._gains.append((self._turn - 1, None if gain is None else float(gain)))
        self._is_over = done

    def _refuse(self, why: str) -> ValueError:
        """Count an invalid action. Returns the error for the model; after too many, the episode is over."""
        self._errors += 1
        self._is_over = self._is_over or self._errors > self.max_errors
        return ValueError(why)

    # --- the verdict --------------------------------------------------------------------------------------------------

    @reward
    def upstream(self, trajectory: Trajectory) -> Score:
        """The sum of the server's rewards; none if it gave none."""
        known = [(turn, gain) for turn, gain in self._gains if gain is not None]
        if self._is_unknown:
            return Score(None, why="a step was cut off by the deadline of the tool, so its reward is not known")
        if not known:
            return Score(self.unjudged, why="the server gave no reward")
        total = math.fsum(gain for _, gain in known)
        if self.rewards != "turn":
            return Score(total)
        turns = [math.fsum(gain for each, gain in known if each == turn) for turn in range(trajectory.turns)]
        return Score(total, turns=turns)

    @metric
    def steps(self) -> float:
        """The steps that the server took."""
        return float(len(self._gains))

    @metric
    def invalid_actions(self) -> float:
        """The actions that the server refused."""
        return float(self._errors)
