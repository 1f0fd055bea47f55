"""Checks of training backends, with the toy model of the package and the invented rollouts of a dry run."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from rollouts.author_code import shown
from rollouts.errors import counted
from rollouts.plugins.checks import run_check
from rollouts.plugins.signature import call_with
from rollouts.runs.rehearsal import invented_group
from rollouts.training.algorithms.advantages import group_norm
from rollouts.training.algorithms.algorithm import Algorithm, Term
from rollouts.training.algorithms.losses import reinforce
from rollouts.training.batches import RankServer, TrainBatch, TrainingBackend, step_metrics
from rollouts.training.loops.rl_batch import RLSettings, prepare_rl_batch
from rollouts.types import Score
from rollouts_check.components.common import Subject, snapshot
from rollouts_check.environments.agents import in_trio
from rollouts_check.environments.traces import Leftovers
from rollouts_check.report import SkippedError

T = TypeVar("T")
MODEL = "tiny"
LR = 1e-2
NEAR = 1e-5
ALGORITHM = Algorithm(group_norm, "token_mean", (Term(reinforce),))


def protocol(subject: Subject) -> None:
    """The backend has every field and method of the Protocol.

    Advice: add them: rollouts.training.batches.TrainingBackend
    """

    async def look(backend: Any) -> list[str]:
        methods = [name for name, value in vars(TrainingBackend).items() if callable(value) and name[0] != "_"]
        names = [*TrainingBackend.__annotations__, "version", *methods]
        return [name for name in names if not hasattr(backend, name)]

    missing = _with_backend(subject, look)
    subject.attempt("make it for the toy model").require(not missing, f"it has no {', no '.join(missing)}")


def forward(subject: Subject) -> str:
    """`forward` gives a finite logprob of 0 or less for each live token.

    Advice: return one value for each token of each row: the logprob of this token
    """

    async def compute(backend: Any) -> Any:
        return await backend.forward(_batch(), ("logprobs",))

    output = _with_backend(subject, compute)
    found, batch = output.logprobs, _batch()
    attempt = subject.attempt("compute the logprobs of four rows")
    is_whole = found is not None and [len(row) for row in found] == [len(row.tokens) for row in batch.rows]
    attempt.require(is_whole, f"the logprobs are {shown(found)}")
    pairs = [pair for row, own in zip(batch.rows, found, strict=True) for pair in zip(own, row.loss_mask, strict=True)]
    live = [value for value, weight in pairs if weight]
    attempt.require(all(math.isfinite(each) and each <= 0 for each in live), f"the logprobs are {shown(live)}")
    return counted(len(live), "token")


def step(subject: Subject) -> str:
    """An optimizer step changes the weights, counts the version, and makes rewarded tokens more likely.

    Advice: correct the sign or the step
    """

    async def train(backend: Any) -> tuple[int, int, float, float, dict[str, float]]:
        before, first = await _objective(backend), backend.version
        metrics = await _train(backend, 5)
        return first, backend.version, before, await _objective(backend), metrics

    first, last, before, after, metrics = _with_backend(subject, train)
    attempt = subject.attempt("train 5 steps on rewarded and unrewarded rollouts")
    change = "begin with version 0, and add 1 in each step"
    attempt.require((first, last) == (0, 5), f"the version was {first}, then {last}", change)
    attempt.require(after > before, f"the objective was {before:.4g}, then {after:.4g}")
    for name, value in metrics.items():
        attempt.require(isinstance(value, int | float), f"the metric {name} is {shown(value)}", "return numbers")
    return f"the objective rises from {before:.3g} to {after:.3g}"


def nothing_live(subject: Subject) -> None:
    """A step without a trained token is skipped: weights and version stay as they are.

    Advice: skip the step if the denominator is 0
    """

    async def train(backend: Any) -> tuple[int, bool]:
        before, empty = await _logprobs(backend), _batch()
        for row in empty.rows:
            row.loss_mask = row.weights = [0.0] * len(row.tokens)
        empty.denominator = 0.0
        await backend.forward_backward(empty)
        await backend.optim_step()
        return backend.version, await _logprobs(backend) == before

    version, is_same = _with_backend(subject, train)
    attempt = subject.attempt("train a step whose masks are all 0")
    attempt.require(version == 0, f"the version is {version}")
    attempt.require(is_same, "the weights changed")


def weights(subject: Subject) -> None:
    """Weights that are read and loaded again give the same logprobs.

    Advice: return copies of the weights, and replace the model's by name
    """

    async def swap(backend: Any) -> bool:
        kept, before = await backend.get_weights(), await _logprobs(backend)
        await _train(backend, 1)
        await backend.load_weights(kept)
        return await _logprobs(backend) == before

    attempt = subject.attempt("get the weights, train a step, and load them")
    attempt.require(_with_backend(subject, swap), "the logprobs differ")


def checkpoint(subject: Subject) -> None:
    """A saved checkpoint continues as the original: the same steps, version and state.

    Advice: save weights, optimizer and counters
    """
    path = str(subject.scratch / "checkpoint")

    async def begin(backend: Any) -> tuple[str, int]:
        await _train(backend, 2)
        await backend.save(path, {"note": 1})
        await _train(backend, 2)
        return await _logprobs(backend), backend.version

    async def go_on(backend: Any) -> tuple[str, int, Any]:
        state = await backend.load(path)
        await _train(backend, 2)
        return await _logprobs(backend), backend.version, state

    first, version = _with_backend(subject, begin)
    again, other_version, state = _with_backend(subject, go_on)
    attempt = subject.attempt("save after two steps, load into a new backend, and train two more steps")
    attempt.require(first == again, "the logprobs differ")
    attempt.require(version == other_version, f"the versions are {version}, {other_version}")
    change = "return the `state` that `save` received"
    attempt.require(dict(state) == {"note": 1}, f"the run's own state is {shown(state)}", change)


def closes(subject: Subject) -> None:
    """`close` ends its threads and processes."""
    before = Leftovers(subject.scratch / "none")

    async def work(backend: Any) -> None:
        await _train(backend, 1)

    _with_backend(subject, work)
    before.require_none(subject.attempt("train a step and close it", "end threads and processes in `close`"))


# --- calls ------------------------------------------------------------------------------------------------------------


def _batch() -> TrainBatch:
    groups = [invented_group(number, 2, Score(1.0)) for number in range(2)]
    return prepare_rl_batch(groups, ALGORITHM, RLSettings(1), 0).batch


async def _train(backend: Any, count: int) -> dict[str, float]:
    """Train some steps. Returns the metrics of the last one."""
    metrics: dict[str, float] = {}
    for _ in range(count):
        await backend.forward_backward(_batch())
        metrics = step_metrics(await backend.optim_step())
    return metrics


async def _logprobs(backend: Any) -> str:
    return snapshot((await backend.forward(_batch(), ("logprobs",))).logprobs)


async def _objective(backend: Any) -> float:
    """The sum of advantage * logprob over the tokens of the batch."""
    batch = _batch()
    found = (await backend.forward(batch, ("logprobs",))).logprobs
    pairs = ((row, own) for row, own in zip(batch.rows, found, strict=True))
    return float(sum(a * b for row, own in pairs for a, b in zip(row.advantages, own, strict=True)))


def _with_backend(subject: Subject, work: Callable[[Any], Awaitable[T]]) -> T:
    """The result of some work with a new backend, which is then closed. Skips the check if none can be made here."""
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

    async def run() -> T:
        with subject.making("train the toy model"):
            run_check(subject.component, inputs, subject.settings)
            backend: Any = call_with(subject.component, inputs, subject.settings)
        if isinstance(backend, RankServer):
            raise SkippedError("this process is not its first rank")
        try:
            return await work(backend)
        finally:
            backend.close()

    with subject.trying("train the toy model"):
        return in_trio(run)
