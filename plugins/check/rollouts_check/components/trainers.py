"""Checks of training backends, with the toy model of the package and the invented rollouts of a dry run."""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from rollouts.author_code import message_of, shown
from rollouts.errors import UserError, counted
from rollouts.plugins.checks import run_check
from rollouts.plugins.signature import call_with
from rollouts.runs.rehearsal import invented_group
from rollouts.training.algorithms.advantages import group_norm
from rollouts.training.algorithms.algorithm import Algorithm, Term
from rollouts.training.algorithms.losses import reinforce
from rollouts.training.batches import RankServer, TrainBatch, TrainingBackend, step_metrics
from rollouts.training.loops.rl_batch import RLSettings, prepare_rl_batch
from rollouts.types import Score
from rollouts_check.components.common import snapshot
from rollouts_check.components.subject import Subject, at, trying
from rollouts_check.environments.agents import in_trio
from rollouts_check.environments.traces import Leftovers
from rollouts_check.report import FailedError, SkippedError

T = TypeVar("T")
MODEL = "tiny"
LR = 1e-2
NEAR = 1e-5
ALGORITHM = Algorithm(group_norm, "token_mean", (Term(reinforce),))


def protocol(subject: Subject) -> str:
    """The backend has every field and method of the Protocol."""

    async def look(backend: Any) -> list[str]:
        methods = [name for name, value in vars(TrainingBackend).items() if callable(value) and name[0] != "_"]
        names = [*TrainingBackend.__annotations__, "version", *methods]
        return [name for name in names if not hasattr(backend, name)]

    if missing := _with_backend(subject, look):
        seen = f"it has no {', no '.join(missing)}{at(subject.component)}"
        raise FailedError("make it for the toy model", seen, "add them: rollouts.training.batches.TrainingBackend")
    return ""


def forward(subject: Subject) -> str:
    """`forward` gives a finite logprob of 0 or less for each live token."""

    async def compute(backend: Any) -> Any:
        return await backend.forward(_batch(), ("logprobs",))

    output = _with_backend(subject, compute)
    found, batch = output.logprobs, _batch()
    if found is None or [len(row) for row in found] != [len(row.tokens) for row in batch.rows]:
        seen = f"the logprobs are {shown(found)}{at(subject.component)}"
        raise FailedError("compute the logprobs of four rows", seen, "return one value for each token of each row")
    live = [
        each
        for row, own in zip(batch.rows, found, strict=True)
        for each, on in zip(own, row.loss_mask, strict=True)
        if on
    ]
    if not all(math.isfinite(each) and each <= 0 for each in live):
        seen = f"the logprobs are {shown(live)}{at(subject.component)}"
        raise FailedError("compute the logprobs of four rows", seen, "return the logprobs of the row's own tokens")
    return counted(len(live), "token")


def step(subject: Subject) -> str:
    """An optimizer step changes the weights, counts the version, and makes rewarded tokens more likely."""

    async def train(backend: Any) -> tuple[int, int, float, float, dict[str, float]]:
        before = await _objective(backend)
        first, metrics = backend.version, {}
        for _ in range(5):
            await backend.forward_backward(_batch())
            metrics = step_metrics(await backend.optim_step())
        return first, backend.version, before, await _objective(backend), metrics

    first, last, before, after, metrics = _with_backend(subject, train)
    if (first, last) != (0, 5):
        seen = f"the version was {first}, and is {last} after 5 steps{at(subject.component)}"
        raise FailedError("train 5 steps", seen, "begin with version 0, and add 1 in each step")
    if not after > before:
        seen = f"the objective was {before:.4g}, and is {after:.4g} after 5 steps{at(subject.component)}"
        raise FailedError("train 5 steps on rewarded and unrewarded rollouts", seen, "correct the sign or the step")
    wrong = [name for name, value in metrics.items() if not isinstance(value, int | float)]
    if wrong:
        seen = f"{wrong[0]} is {shown(metrics[wrong[0]])}{at(subject.component)}"
        raise FailedError("read the metrics of a step", seen, "return numbers")
    return f"the objective rises from {before:.3g} to {after:.3g}"


def nothing_live(subject: Subject) -> str:
    """A step without a trained token is skipped: weights and version stay as they are."""

    async def train(backend: Any) -> tuple[int, bool]:
        before = snapshot((await backend.forward(_batch(), ("logprobs",))).logprobs)
        empty = _batch()
        for row in empty.rows:
            row.loss_mask = [0.0] * len(row.tokens)
            row.weights = [0.0] * len(row.tokens)
        empty.denominator = 0.0
        await backend.forward_backward(empty)
        await backend.optim_step()
        return backend.version, snapshot((await backend.forward(_batch(), ("logprobs",))).logprobs) == before

    version, is_same = _with_backend(subject, train)
    if version != 0 or not is_same:
        seen = f"the version is {version}, and the weights {'did not change' if is_same else 'changed'}"
        change = "skip the step if the denominator is 0"
        raise FailedError("train a step whose masks are all 0", f"{seen}{at(subject.component)}", change)
    return ""


def weights(subject: Subject) -> str:
    """Weights that are read and loaded again give the same logprobs."""

    async def swap(backend: Any) -> tuple[str, str]:
        kept = await backend.get_weights()
        before = snapshot((await backend.forward(_batch(), ("logprobs",))).logprobs)
        await backend.forward_backward(_batch())
        await backend.optim_step()
        await backend.load_weights(kept)
        return before, snapshot((await backend.forward(_batch(), ("logprobs",))).logprobs)

    before, after = _with_backend(subject, swap)
    if before != after:
        seen = f"the logprobs differ{at(subject.component)}"
        change = "return copies of the weights, and replace the model's by name"
        raise FailedError("get the weights, train a step, and load them", seen, change)
    return ""


def checkpoint(subject: Subject) -> str:
    """A saved checkpoint continues as the original: the same steps, version and state."""
    path = str(subject.scratch / "checkpoint")

    async def begin(backend: Any) -> tuple[str, int]:
        await _train(backend, 2)
        await backend.save(path, {"note": 1})
        await _train(backend, 2)
        return snapshot((await backend.forward(_batch(), ("logprobs",))).logprobs), backend.version

    async def go_on(backend: Any) -> tuple[str, int, Any]:
        state = await backend.load(path)
        await _train(backend, 2)
        return snapshot((await backend.forward(_batch(), ("logprobs",))).logprobs), backend.version, state

    first, version = _with_backend(subject, begin)
    again, other_version, state = _with_backend(subject, go_on)
    tried = "save after two steps, load into a new backend, and train two more steps"
    if first != again or version != other_version:
        seen = (
            f"the logprobs {'are equal' if first == again else 'differ'}; the versions are {version}, {other_version}"
        )
        change = "save weights, optimizer and counters"
        raise FailedError(tried, f"{seen}{at(subject.component)}", change)
    if dict(state) != {"note": 1}:
        seen = f"the run's own state is {shown(state)}{at(subject.component)}"
        raise FailedError(tried, seen, "return the `state` that `save` received")
    return ""


def closes(subject: Subject) -> str:
    """`close` ends its threads and processes."""
    before = Leftovers(subject.scratch / "none")

    async def work(backend: Any) -> None:
        await _train(backend, 1)

    _with_backend(subject, work)
    if left := before.found():
        seen = f"it left {'; '.join(left)}{at(subject.component)}"
        raise FailedError("train a step and close it", seen, "end threads and processes in `close`")
    return ""


# --- calls ------------------------------------------------------------------------------------------------------------


def _batch() -> TrainBatch:
    groups = [invented_group(number, 2, Score(1.0)) for number in range(2)]
    return prepare_rl_batch(groups, ALGORITHM, RLSettings(1), 0).batch


async def _train(backend: Any, count: int) -> None:
    for _ in range(count):
        await backend.forward_backward(_batch())
        await backend.optim_step()


async def _objective(backend: Any) -> float:
    """The sum of advantage * logprob over the tokens of the batch."""
    batch = _batch()
    found = (await backend.forward(batch, ("logprobs",))).logprobs
    pairs = ((row, own) for row, own in zip(batch.rows, found, strict=True))
    return float(sum(a * b for row, own in pairs for a, b in zip(row.advantages, own, strict=True)))


def _with_backend(subject: Subject, work: Callable[[Any], Awaitable[T]]) -> T:
    """The result of some work with a new backend, which is then closed. Skips the check if none can be made here."""

    async def run() -> T:
        async with _made(subject) as backend:
            return await work(backend)

    with trying("train the toy model"):
        return in_trio(run)


@contextlib.asynccontextmanager
async def _made(subject: Subject) -> AsyncIterator[Any]:
    inputs = {
        "model": MODEL,
        "seed": subject.seed,
        "steps": 10,
        "lr": LR,
        "lora_rank": 0,
        "lora_roles": (),
        "tokens_per_microbatch": 4096,
        "algorithms": {"main": ALGORITHM},
        "auxiliary_models": None,
        "companions": None,
        "make_optimizer": None,
        "config": "",
    }
    try:
        run_check(subject.component, inputs, subject.settings)
        backend = call_with(subject.component, inputs, subject.settings)
    except UserError as error:
        reason = " ".join(message_of(error).split())
        raise subject.skipped(f"it cannot be made with these settings: {reason}") from error
    if isinstance(backend, RankServer):
        raise SkippedError("this process is not its first rank")
    try:
        yield backend
    finally:
        backend.close()
