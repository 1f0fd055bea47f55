"""A person talks to a model that has the tools of an environment, message by message.

It uses the same parts as an episode (`episode`, `model`, `tools`), with two differences. The person's next message
replaces the environment's `reply`, and the limits of an episode apply to each message. A task may open the
conversation: the environment is set up for the task, the environment's `reply` answers the model until the episode is
over, and its rewards can judge. Not here: the terminal interface (`rollouts.cli.chat`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from rollouts.agent.episode import EpisodeRun, outcome_of
from rollouts.agent.judging import judge
from rollouts.env.mixing import RewardTerm
from rollouts.errors import ConfigError, InferenceError, RunError
from rollouts.types import Message, Score, Status, Trajectory


@dataclass(eq=False)
class ChatSession:
    """The messages so far, and the model that answers them.

    `show` is called at once with each new message of the model, a tool or the environment. Close the conversation with
    `aclose`, also after `open` failed. Call one method at a time. A cancelled method does not change the conversation.
    """

    run: EpisodeRun
    show: Callable[[Message], None]
    messages: list[Message] = field(default_factory=list)
    _trajectory: Trajectory | None = None

    def __post_init__(self) -> None:
        self._first = list(self.messages)

    async def open(self, *, for_task: bool) -> None:
        """Build the environment, and set it up if a task opens the conversation. Raises RunError if this fails, and
        ConfigError for a task if the environment has its own `rollout`.
        """
        try:
            await self.run.set_up(for_task=for_task)
        except Exception as error:
            raise RunError(outcome_of(error, self.run.stage)[1]) from error
        if for_task and hasattr(self.run.env, "rollout"):
            raise ConfigError(
                f"{type(self.run.env).__name__} runs its tasks in its own loop (`rollout`), so a task cannot "
                "open a conversation\nleave out --task to talk to the model with its tools, or type: rollouts eval"
            )

    async def begin_anew(self, *, for_task: bool) -> None:
        """Forget what was said, and build the environment anew. Raises like `open` and `aclose`."""
        await self._close_environment()
        self.messages, self._trajectory = list(self._first), None
        self.run.seed += 1
        await self.open(for_task=for_task)

    async def play_task(self) -> str:
        """Let the model answer the task, as in an episode. Returns and raises like `say`."""
        return await self._exchange(self.run.task.messages, environment_replies=True)

    async def say(self, text: str) -> str:
        """Send the person's message, and let the model reply. Tool calls are run and answered until a reply has none.

        Returns "" if the reply is complete, else a note that says why it is cut off or missing. If there is no reply,
        the message does not become part of the conversation. Raises InferenceError if the engine fails, and
        EnvironmentDefinitionError if the environment's code is not valid.
        """
        return await self._exchange([*self.messages, Message("user", text)], environment_replies=False)

    async def judge(self, rewards: Sequence[RewardTerm]) -> Score:
        """The rewards of the conversation so far, without rewards of whole groups. Raises RewardError."""
        assert self._trajectory is not None, "nothing was said"
        status = Status.COMPLETED if self._trajectory.status is Status.PENDING else self._trajectory.status
        trajectory = msgspec.structs.replace(self._trajectory, status=status)
        score, _ = await judge(self.run.env, trajectory, rewards, self.run.limits.reward_seconds, "drop")
        return score

    async def aclose(self) -> None:
        """End the session with the engine, and close the environment. Raises RunError if its `close` fails."""
        self.run.engine.close_session(self.run.engine.session)
        await self._close_environment()

    async def _close_environment(self) -> None:
        why = await self.run.close()
        if why is not None:
            raise RunError(why)

    async def _exchange(self, asked: list[Message], *, environment_replies: bool) -> str:
        run, model = self.run, self.run.model
        assert model is not None, "open the conversation first"
        model.renew_limits()
        is_whole, note = False, ""
        messages: list[Message] | None = asked
        try:
            while messages is not None:
                run.stage = "waiting for the model"
                reply = await model.chat(messages)
                self.show(reply)
                known = len(messages) + 1
                messages = await run.respond(model, reply) if reply.tool_calls or environment_replies else None
                for message in (messages or [])[known:]:
                    self.show(message)
            is_whole = model.trajectory is not None and model.trajectory.status is Status.PENDING
            note = "" if is_whole or model.trajectory is None else model.trajectory.error or ""
            self._keep(model.trajectory)
        except Exception as error:  # from an author's code or an engine; outcome_of raises errors of the core again
            status, note, _ = outcome_of(error, run.stage)
            if status is Status.INFERENCE_ERROR:
                raise InferenceError(note) from error
            has_replied = model.trajectory is not None and len(model.trajectory.messages) > len(asked)
            if status is Status.COMPLETED and has_replied:  # no turns are left
                self._keep(model.trajectory)
            else:
                shorter = "; type a shorter one, or begin a new conversation" if status is Status.TRUNCATED else ""
                note += f"; your message is not part of the conversation{shorter}"
        finally:
            if not is_whole:  # an incomplete exchange cannot continue, so start a new model
                run.seed += 1
                run.model = run.new_model()
        return note

    def _keep(self, trajectory: Trajectory | None) -> None:
        assert trajectory is not None, "a model that spoke has a trajectory"
        self.messages, self._trajectory = list(trajectory.messages), trajectory
