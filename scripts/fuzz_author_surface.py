"""Fuzz the code of authors: each method that the core calls may return anything and raise anything.

    python scripts/fuzz_author_surface.py --cases 10000 --seed 1

A case is one method of `SURFACE` and one thing that it does (`returned`, `raised`). The script runs two groups of
rollouts with a scripted engine, judges and filters them, writes them to files, computes a loss on them, and calls a
hook. A case passes if it ends as documented: a fault in an episode or a hook is recorded, a fault that makes the run
impossible is one RolloutsError with a printable message, and every written file can be read.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import math
import random
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import torch
import trio

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from agent_fakes import FakeChat, FakeEngine
from rollouts_notes.manager import AsyncRolloutManager
from rollouts_notes.rows import RolloutConfig

from rollouts.agent.episode import run_episode
from rollouts.agent.model import EpisodeLimits
from rollouts.env import metric, reward, tool
from rollouts.env.checks import reward_term
from rollouts.env.mixing import env_term
from rollouts.errors import ModelError, RolloutsError
from rollouts.inference.base import Capabilities
from rollouts.loggers.jsonl import JSONLLogger
from rollouts.plugins import hookimpl
from rollouts.plugins.manager import PluginManager
from rollouts.runs.components import Chosen
from rollouts.runs.environments import PlannedEnvironment, held_out_tasks, task_buffer
from rollouts.runs.folder import RunFolder, episode_records
from rollouts.training.algorithms.algorithm import as_algorithm
from rollouts.training.algorithms.calls import call_author, check_per_rollout
from rollouts.training.algorithms.objective import evaluate_objective
from rollouts.training.rollout_gen.groups import NamedFilter, group_scorer
from rollouts.training.rollout_gen.steps import rollout_metrics
from rollouts.types import Message, Score, Task, ToolCall, Trajectory

__all__ = ["SURFACE", "Case", "cases", "play"]

EPISODE = ("init", "setup", "tool", "trio_tool", "asyncio_tool", "reply", "rollout", "close", "metric")
"""Methods whose faults are recorded with their episode. They do not end a run whose other episodes succeed."""
SURFACE = (
    *EPISODE, "tasks", "task", "demonstrations", "reward", "reward_function", "group_reward", "filter",
    "advantage", "loss", "loss_metric", "hook", "list_hook",
)  # fmt: skip


class HostileError(Exception):
    """An error whose message cannot be read."""

    def __str__(self) -> str:
        raise SystemExit("no message")

    __repr__ = __str__


class Hostile:
    """An object whose methods all raise."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def _refuse(self, *_: Any) -> Any:
        raise self.error("hostile")

    __str__ = __repr__ = __bool__ = __iter__ = __len__ = __float__ = __int__ = __index__ = __getitem__ = _refuse


def around() -> dict[str, Any]:
    """A dict that contains itself."""
    inside: dict[str, Any] = {}
    inside["me"] = [inside]
    return inside


def deep(levels: int = 3000) -> list[Any]:
    """Lists inside lists."""
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


def recurse() -> Any:
    """An endless generator."""
    return recurse()


ERRORS: tuple[Callable[[], BaseException], ...] = (
    *(
        functools.partial(kind, "no \ud800 good")
        for kind in (
            ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError, OSError, MemoryError,
            StopIteration, StopAsyncIteration, AssertionError, ZeroDivisionError, RecursionError, TimeoutError,
            ImportError, EOFError, LookupError, ArithmeticError, BufferError, NotImplementedError, Warning,
            SyntaxError, trio.TooSlowError,
            KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError, BaseException,
        )
    ),
    HostileError,
    lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no"),
    lambda: ExceptionGroup("several", [ValueError("one"), HostileError()]),
    lambda: BaseExceptionGroup("several", [KeyboardInterrupt(), GeneratorExit()]),
    lambda: SystemExit(Hostile(KeyboardInterrupt)),
)  # fmt: skip

VALUES: tuple[Callable[[], Any], ...] = (
    lambda: None, lambda: True, lambda: 0, lambda: -1, lambda: 10**5000, lambda: 0.5, lambda: math.nan,
    lambda: math.inf, lambda: 1j, lambda: "", lambda: "text", lambda: "\ud800", lambda: "x" * 100_000, lambda: b"bytes",
    lambda: bytearray(3),
    list, lambda: [1, "a", None], tuple, lambda: (1.0, {}), dict, lambda: {"a": 1}, lambda: {(1, 2): {3}},
    set, frozenset,
    lambda: range(3), lambda: iter([1]), lambda: (n for n in (1, 2)), lambda: slice(1), lambda: ...,
    lambda: NotImplemented,
    object, lambda: int, lambda: len, lambda: math, lambda: memoryview(b"a"), around, deep,
    lambda: Hostile(ValueError), lambda: Hostile(KeyboardInterrupt), lambda: [Hostile(GeneratorExit)] * 2,
    lambda: {"a": Hostile(SystemExit)}, lambda: HostileError(), lambda: torch.zeros(2), lambda: torch.tensor(math.nan),
    lambda: [0.5, 0.5], lambda: [10**400, 1], lambda: Message("user", "\udfff"), lambda: Message("user", 5),
    lambda: Message("user", [{"type": "text", "text": "\ud800"}]), lambda: Message("user", tool_calls=7),
    lambda: [Message("assistant", tool_calls=[ToolCall("x", {"a": "\ud800"})])], lambda: Message("nobody", "x"),
    lambda: Task("\ud800", 10**5000, {"around": around()}), lambda: Task(5),
    lambda: Task("x", Hostile(ValueError), id=Hostile(KeyError)),
    lambda: Score(1.0, {"\ud800": 0.5}, "\ud800"), lambda: Score(1.0, 5, Hostile(ValueError)),
    lambda: Score(Hostile(GeneratorExit)), lambda: Score(None, {"a": math.nan}),
    lambda: Trajectory(Task("other"), []),
)  # fmt: skip


class Case(NamedTuple):
    """A method and its fault: it raises `ERRORS[index]`, returns `VALUES[index]`, or recurses (-1)."""

    where: str
    raises: bool
    index: int

    def act(self) -> Any:
        """Raise, return or recurse."""
        if self.index < 0:
            return recurse()
        if self.raises:
            raise ERRORS[self.index]()
        return VALUES[self.index]()


def cases(count: int, seed: int) -> Iterator[Case]:
    """The cases of a seed. A case does not depend on their number."""
    rng = random.Random(seed)
    for number in range(count):
        where = SURFACE[number % len(SURFACE)]
        raises = rng.random() < 0.5
        yield Case(where, raises, rng.randrange(-1, len(ERRORS if raises else VALUES)))


def play(case: Case, folder: Path) -> str:
    """Run a case. Returns "done" or the name of its error. Raises AssertionError, or any unexpected error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an author's coroutine that is never awaited, a generator that is closed
        try:
            _run(case, folder)
        except RolloutsError as error:
            str(error).encode()
            assert case.where not in EPISODE, f"{case} ended the run: {error}"
            assert case.where not in ("hook", "list_hook"), f"{case} ended the run: {error}"
            ended = type(error).__name__
        else:
            ended = "done"
    for path in folder.rglob("*.json*"):
        for line in path.read_text(encoding="utf-8").splitlines():
            msgspec.json.decode(line)
            json.loads(line)
    return ended


def _run(case: Case, folder: Path) -> None:
    env = PlannedEnvironment(Chosen("fuzzed", _environment(case), {}, None), 1.0, None, 1.0, 0, "", 60.0)
    env.make_checked()
    if case.where == "demonstrations":
        for _, _messages in zip(range(2), env.demonstrations(), strict=False):
            pass
    held_out = held_out_tasks([env], 1)
    buffer = task_buffer([env], held_out, 2)
    step = trio.run(_step, case, env, buffer)
    advantage = _at(case, "advantage", lambda rewards: [0.0] * len(rewards))
    for group in step.groups:
        judged = [reward for reward in group.rewards if reward is not None]
        if judged:
            function = _named(advantage, "rewards")
            returned = call_author("advantage", function, {"rewards": torch.tensor(judged)})
            check_per_rollout("advantage", function, returned, len(judged))
    metrics = rollout_metrics(step.groups) | _loss_metrics(case)
    _write(folder, step, metrics)
    manager = PluginManager()
    manager._hooks_loaded = True
    plugin = SimpleNamespace(
        rollouts_run_end=hookimpl(_named(_at(case, "hook", lambda *_: None), "summary")),
        rollouts_list_components=hookimpl(_named(_at(case, "list_hook", lambda *_: None), "kind")),
    )
    manager.register(plugin, distribution="fuzzed")
    for fault in manager.call_event("rollouts_run_end", summary={}):
        str(fault).encode()
    manager.list("rewards", hooks=True)


async def _step(case: Case, env: PlannedEnvironment, buffer: Any) -> Any:
    judge = _named(_at(case, "reward_function", lambda *_: 1.0), "trajectory")
    judge_all = _named(_at(case, "group_reward", lambda t: [1.0] * len(t)), "trajectories")
    terms = [env_term(), reward_term("own", judge), reward_term("group", judge_all)]
    limits = EpisodeLimits(max_turns=3, episode_seconds=60.0)
    engines: dict[Any, FakeEngine] = {}

    async def play_job(job: Any, session: str, inference: Any) -> Any:
        engine = FakeEngine("[work {}][trio_work {}][asyncio_work {}]", rest="done")
        engines[job.order] = engine
        return await run_episode(
            job.task, make_env=env.make, chat=_Chat(), inference=engine, limits=limits, rewards=terms,
            session=session, order=job.order, seed=0,
        )  # fmt: skip

    keep = _named(_at(case, "filter", lambda *_: True), "rewards")
    manager = AsyncRolloutManager(
        buffer,
        RolloutConfig(2, 2),
        play=play_job,
        inference=_Sessions(),
        filters=[NamedFilter("fuzzed", keep, {})],
        score_groups=group_scorer(terms, "drop", timeout_seconds=60.0),
    )
    async with manager:
        step = await manager.generate_batch()
        json.dumps(manager.state_dict())
    return step


class _Chat(FakeChat):
    def _message(self, message: Message) -> list[int]:
        if message.role not in ("system", "user", "assistant", "tool"):
            raise ModelError(f"the chat template has no role {message.role!r}")
        return super()._message(message)


class _Sessions:
    capabilities = Capabilities(in_process=True)
    context_tokens_max = vocabulary_size = version = 0

    def open_session(self, order: tuple[int, ...]) -> str:
        return str(order)

    def close_session(self, session: str) -> None:
        return None


def _write(folder: Path, step: Any, metrics: dict[str, float]) -> None:
    run = RunFolder(folder / "run")
    records = [
        record
        for group in step.groups for episode in group.episodes
        for record in episode_records(episode, dropped=group.dropped)
    ]  # fmt: skip
    run.write_trajectories("step_000000", records)
    run.write_json("summary.json", {"records": len(records)})
    run.close()
    logger = JSONLLogger(run.path, 0)
    logger.log(metrics, 0)
    logger.close()
    (run.path / "summary.json").unlink()  # indented: not a line each


def _loss_metrics(case: Case) -> dict[str, float]:
    reported = _at(case, "loss_metric", lambda *_: 1.0)
    function = _at(case, "loss", lambda logprobs: (logprobs * 1.0, {"own": reported()}))
    values = {"logprobs": torch.zeros(3, requires_grad=True)}
    metrics = evaluate_objective(as_algorithm(_named(function, "logprobs")), values, torch.ones(3)).metrics
    return {f"policy/{name}": float(metric.value) for name, metric in metrics.items()}


def _at(case: Case, where: str, usual: Callable[..., Any]) -> Callable[..., Any]:
    return (lambda *_: case.act()) if case.where == where else usual


def _named(function: Callable[..., Any], name: str) -> Any:
    """A function with one parameter of this name."""
    namespace: dict[str, Any] = {"function": function}
    exec(f"def fuzzed({name}): return function({name})", namespace)
    return namespace["fuzzed"]


def _environment(case: Case) -> type:
    made: Counter[str] = Counter()

    class Fuzzed:
        def __init__(self) -> None:
            made["objects"] += 1
            # The core makes the first six objects, to inspect the class and for the tasks of both splits. Of the
            # others, which play episodes, fault every second one.
            self.acts = made["objects"] > 6 and made["objects"] % 2 == 0
            if self.acts:
                self.at("init")

        def at(self, where: str, usual: Any = None) -> Any:
            is_case = case.where == where and (self.acts or where not in EPISODE)
            return case.act() if is_case else usual

        def tasks(self, split: str, rng: random.Random) -> Any:
            return self.at("tasks", self.some(split))

        def some(self, split: str) -> Iterator[Any]:
            for number in range(8):
                yield self.at("task", f"{split} {number}") if number % 2 else f"{split} {number}"

        def demonstrations(self, split: str, rng: random.Random) -> Any:
            return self.at("demonstrations", [[Message("user", "a"), Message("assistant", "b")]])

        def setup(self, task: Task) -> Any:
            self.said = False
            return self.at("setup")

        @tool
        def work(self) -> Any:
            return self.at("tool")

        @tool
        async def trio_work(self) -> Any:
            await trio.lowlevel.checkpoint()
            return self.at("trio_tool")

        @tool
        async def asyncio_work(self) -> Any:
            await asyncio.sleep(0)
            return self.at("asyncio_tool")

        def reply(self, trajectory: Trajectory) -> Any:
            self.said = not self.said
            return self.at("reply", "go on") if self.said else None

        @reward
        def right(self, trajectory: Trajectory) -> Any:
            return self.at("reward", 1.0)

        @metric
        def measured(self, trajectory: Trajectory) -> Any:
            return self.at("metric", 1.0)

        def close(self) -> Any:
            return self.at("close")

    class WithRollout(Fuzzed):
        async def rollout(self, task: Task, model: Any) -> Any:
            await model.chat(task.messages)
            return self.at("rollout")

    return WithRollout if case.where == "rollout" else Fuzzed


def main() -> int:
    """Run the cases. On the first wrong ending, print the case and exit with 1."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    ends: Counter[str] = Counter()
    for number, case in enumerate(cases(arguments.cases, arguments.seed)):
        with tempfile.TemporaryDirectory() as folder:
            try:
                ends[play(case, Path(folder))] += 1
            except BaseException:
                print(f"case {number} of seed {arguments.seed}: {case}", file=sys.stderr)
                raise
    print(f"{arguments.cases} cases: {dict(ends)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
