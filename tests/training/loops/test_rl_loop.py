"""train_rl with fakes: the order of calls, syncs, logs, and the content of batches."""

from __future__ import annotations

import math

import pytest
import trio
from backend_fakes import BackendFields
from rollouts_notes.manager import AsyncRolloutManager
from rollouts_notes.rows import RolloutConfig

from rollouts.errors import InferenceError, RunError, TrainingError
from rollouts.inference.base import Capabilities
from rollouts.models.futures import ImmediateTrainFuture
from rollouts.training.algorithms.algorithm import KL, Stage
from rollouts.training.algorithms.kl import rk3_loss
from rollouts.training.algorithms.recipes import GRPO
from rollouts.training.batches import ForwardOutput, StepResult
from rollouts.training.datasets.buffer import DataBuffer
from rollouts.training.loops.rl import BEGINNING, Callbacks, LoopState, train_rl
from rollouts.training.loops.rl_batch import RLSettings, prepare_rl_batch
from rollouts.training.rollout_gen.groups import Group, NamedFilter
from rollouts.training.weights.sync import WeightSyncManager, sync_weights
from rollouts.types import Episode, Message, Score, Segment, Status, Task, Trajectory

TASK = Task("question")


class Backend(BackendFields):
    """Keeps the batches; every optimizer step succeeds unless D is 0."""

    def __init__(self, log):
        self.log, self.version, self.batches = log, 0, []

    def forward_backward(self, batch):
        self.log.append("forward_backward")
        self.batches.append(batch)
        return Resolved(self.log, "waited", {"policy/loss": 0.5, "policy/clip_low": math.nan})

    def optim_step(self):
        self.log.append("optim_step")
        skipped = self.batches[-1].denominator == 0
        self.version += not skipped
        return ImmediateTrainFuture(StepResult({"optim/skipped": float(skipped)}, self.version))


class Resolved(ImmediateTrainFuture):
    """Notes when it is awaited."""

    def __init__(self, log, word, value):
        super().__init__(value)
        self._note = lambda: log.append(word)

    def __await__(self):
        self._note()
        return super().__await__()


class Engine:
    capabilities = Capabilities()
    context_tokens_max = vocabulary_size = version = 0

    def __init__(self, log):
        self.log, self.versions = log, []

    def open_session(self, order):
        return str(order)

    def close_session(self, session):
        pass

    async def update_weights(self, update):
        self.log.append("sync")
        self.versions.append(update.version)


class Logger:
    def __init__(self, log, lines=None):
        self.log_, self.lines = log, [] if lines is None else lines

    def log(self, metrics, step):
        self.log_.append("log")
        self.lines.append((step, metrics))

    def close(self):
        pass


def episode(order, value, *, status=Status.COMPLETED, sampled=2):
    segment = Segment([1, 2] + [3] * sampled, [0.0, 0.0] + [1.0] * sampled, [0, 0] + [-1.0] * sampled,
                      [-1, -1] + [0] * sampled)  # fmt: skip
    trajectory = Trajectory(TASK, [*TASK.messages, Message("assistant", "x")], [segment], status)
    return Episode(order, TASK, [trajectory], Score(value), {})


def train(
    steps=3,
    *,
    reward=lambda order: float(order[1]),
    filters=(),
    engines=1,
    loop=None,
    backend=None,
    logged=None,
    **config,
):
    log = []
    backend, logger = (backend or Backend)(log), Logger(log, logged)
    fakes = [Engine(log) for _ in range(engines)]
    seen = []

    async def play(job, session, inference):
        log.append("play")
        return episode(job.order, reward(job.order))

    buffer = DataBuffer(["a", "b", "c"])
    manager = AsyncRolloutManager(
        buffer, RolloutConfig(2, 2), play=play, inference=fakes[0] if fakes else Engine(log), filters=filters
    )

    async def main():
        given = {"stages": [Stage(0, "main", GRPO)], "start": BEGINNING, **(loop or {})}
        return await train_rl(
            backend,
            manager,
            RLSettings(steps, **config),
            stages=given.pop("stages"),
            syncing=WeightSyncManager(fakes),
            metrics_logger=logger,
            start=given.pop("start"),
            callbacks=Callbacks(lambda samples, step: seen.append((step, len(samples))), **given),
        )

    return trio.run(main), log, backend, fakes, logger, seen


def test_the_order_of_a_step():
    """Both calls are submitted before either is awaited; the engine gets the weights after the step."""
    _, log, *_ = train(1)
    assert log == [*["play"] * 4, "forward_backward", "optim_step", "waited", "sync", "log"]


def test_metrics_are_returned_and_logged():
    history, _, _, _, logger, seen = train(3)
    assert [(step, metrics) for step, metrics in enumerate(history)] == logger.lines
    assert seen == [(0, 4), (1, 4), (2, 4)]
    assert [line["sync/version"] for line in history] == [1.0, 2.0, 3.0]
    assert [line["data/epoch"] for line in history] == [0.0, 1.0, 1.0]
    for metrics in history:
        assert metrics["reward/mean"] == 0.5
        assert 0 < metrics["time/wait"] < metrics["time/step"] and metrics["perf/train_tok_s"] > 16
        assert {"time/generate", "time/step", "perf/gen_tok_s", "perf/train_tok_s", "policy/loss"} <= metrics.keys()
        assert "policy/clip_low" not in metrics, "a NaN says nothing, and is no JSON"


class Several(Backend):
    """Each optimizer step of a batch reports other numbers; those named in `skipped` are skipped."""

    skipped: tuple[int, ...] = ()

    def forward_backward(self, batch):
        super().forward_backward(batch)
        number = len(self.batches)
        report = {"policy/loss": float(number), "policy/ratio_max": 10.0 - number, "mismatch/kl": 0.5 * number}
        return ImmediateTrainFuture(report | ({"policy/rare": 7.0} if number == 2 else {}))

    def optim_step(self):
        skipped = len(self.batches) in self.skipped
        self.version += not skipped
        return ImmediateTrainFuture(StepResult({"optim/skipped": float(skipped)}, self.version))


@pytest.mark.parametrize(
    ("skipped", "expected"),
    [
        ((), {"loss": 1.5, "max": 9.0, "kl": 0.5, "rare": 7.0, "skipped": 0.0}),
        ((1,), {"loss": 2.0, "max": 8.0, "kl": 1.0, "rare": 7.0, "skipped": 0.5}),
        ((2,), {"loss": 1.0, "max": 9.0, "kl": 0.5, "rare": None, "skipped": 0.5}),
        ((1, 2), {"loss": 1.5, "max": 9.0, "kl": 0.5, "rare": 7.0, "skipped": 1.0}),
    ],
)
def test_the_reports_of_several_optimizer_steps_become_one(skipped, expected):
    """Means, the largest of a maximum, and the first mismatch, over those that were not skipped unless all were."""
    backend = type("Some", (Several,), {"skipped": skipped})
    (line,), *_ = train(1, backend=backend, minibatches=2)
    names = ("policy/loss", "policy/ratio_max", "mismatch/kl", "policy/rare", "optim/skipped")
    assert dict(zip(expected, map(line.get, names), strict=True)) == pytest.approx(expected)


@pytest.mark.parametrize(("every", "versions"), [(1, [1, 2, 3, 4, 5]), (2, [2, 4]), (9, [])])
def test_sync_every(every, versions):
    _, _, _, engines, _, _ = train(5, sync_every=every, engines=2)
    assert [engine.versions for engine in engines] == [versions, versions]


def test_a_step_without_live_tokens_is_submitted_and_skipped():
    """D = 0, because every group was dropped: the loop goes on."""
    history, _log, backend, *_ = train(2, filters=[NamedFilter("none", lambda rewards: "dull", {})])
    assert [batch.rows for batch in backend.batches] == [[], []]
    assert [batch.denominator for batch in backend.batches] == [0.0, 0.0]
    assert [line["optim/skipped"] for line in history] == [1.0, 1.0]
    assert [line["group/drop/dull"] for line in history] == [2.0, 2.0]
    assert [line["sync/version"] for line in history] == [0.0, 0.0]


def test_a_group_that_nobody_judged_is_dropped_and_a_step_of_them_ends_the_run():
    history, *_ = train(1, reward=lambda order: None if order[0] == 0 else float(order[1]))
    assert history[0]["group/drop/no_reward"] == 1.0
    with pytest.raises(RunError, match="not one of the 4 rollouts of step 1 could be judged:\n  4 x completed"):
        train(1, reward=lambda order: None)


def test_on_step_sees_the_step_and_adds_to_its_metrics():
    reports = []

    async def on_step(report):
        reports.append(report)
        return {"eval/reward_mean": 0.25}

    history, _log, *_ = train(2, loop={"on_step": on_step})
    assert [report.step for report in reports] == [0, 1]
    assert [len(report.advantages) for report in reports] == [4, 4]
    assert [line["eval/reward_mean"] for line in history] == [0.25, 0.25]


def test_what_is_saved_is_logged_before():
    reports = []

    async def on_step(report):
        return {"extra": float(report.step)}

    async def on_logged(report):
        reports.append((report.state.step, report.metrics["extra"], report.metrics["sync/version"]))

    train(3, loop={"on_logged": on_logged, "on_step": on_step})
    assert reports == [(1, 0.0, 1.0), (2, 1.0, 2.0), (3, 2.0, 3.0)]

    async def stop(report):
        raise RunError(f"{len(logged)} lines")

    logged = []
    with pytest.raises(RunError, match="1 lines"):
        train(3, loop={"on_logged": stop}, logged=logged)


def test_no_steps():
    assert train(0)[0] == []


def test_the_loop_goes_on_where_it_stood():
    history, _, backend, _, logger, seen = train(5, loop={"start": LoopState(3)})
    assert len(history) == 2 and [step for step, _ in logger.lines] == [3, 4] and [step for step, _ in seen] == [3, 4]
    assert [batch.step for batch in backend.batches] == [3, 4]
    assert train(3, loop={"start": LoopState(3)})[0] == []


def test_steered_coefficients_go_on_where_they_stood():
    """By stage; stages that share a KL term share its coefficient."""
    shared = KL(rk3_loss, 0.5, target=0.1)
    stages = [Stage(0, "main", GRPO._replace(kl=shared)), Stage(2, "from_step_2", GRPO._replace(kl=shared)),
              Stage(9, "from_step_9", GRPO._replace(kl=KL(rk3_loss, 0.25, target=0.2)))]  # fmt: skip
    states = []

    class Steered(Backend):
        def forward_backward(self, batch):
            super().forward_backward(batch)
            return ImmediateTrainFuture({"policy/kl_ref": 1.0})

        def forward(self, batch, needs, *, only_live=False):
            streams = [[0.0] * len(row.tokens) for row in batch.rows]
            return ImmediateTrainFuture(ForwardOutput(**dict.fromkeys(needs, streams)))

    async def on_step(report):
        states.append(report.state)
        return {}

    def steer(**loop):
        return train(4, backend=Steered, loop={"stages": stages, "on_step": on_step, **loop})

    whole = [metrics["policy/kl_coef"] for metrics in steer()[0]]
    assert whole == sorted(whole) and len(set(whole)) == 4
    kept = states[1]
    assert kept.step == 2 and kept.kl_coefficients == dict.fromkeys(("main", "from_step_2"), whole[2])
    assert [metrics["policy/kl_coef"] for metrics in steer(start=kept)[0]] == whole[2:]


def test_an_engine_that_refuses_the_weights_ends_the_run():
    class Stubborn(Engine):
        async def update_weights(self, update):
            raise InferenceError("serves version 0")

    async def main():
        await sync_weights(Backend([]), [Stubborn([])])

    with pytest.raises(InferenceError, match="version 0"):
        trio.run(main)


@pytest.mark.parametrize(
    "wrong", [{"num_steps": -1}, {"num_steps": 1, "sync_every": 0}, {"num_steps": 1, "temperature": 0}]
)
def test_config_is_checked(wrong):
    with pytest.raises(AssertionError, match="must be"):
        RLSettings(**wrong)
    assert RLSettings(1) == RLSettings(1, 1, 1.0, None, 1, 0)


def groups_of(*rewards, **changed):
    return [
        Group(g, TASK, tuple(episode((g, r), value, **changed) for r, value in enumerate(values)))
        for g, values in enumerate(rewards)
    ]


def test_prepare_batch():
    config = RLSettings(1, temperature=0.7)
    samples, advantages, batch, _ = prepare_rl_batch(groups_of([1.0, 0.0], [0.5, 0.5]), GRPO, config, 4)
    assert [sample.rollout_index for sample in samples] == [0, 1, 2, 3]
    assert advantages[0] == pytest.approx(0.7071, abs=1e-3) and advantages[1] == -advantages[0]
    assert advantages[2:] == [0.0, 0.0]
    assert (batch.step, batch.temperature, batch.denominator, batch.rewards) == (4, 0.7, 8.0, [1.0, 0.0, 0.5, 0.5])
    assert next(row.advantages for row in batch.rows) == [0.0, 0.0, advantages[0], advantages[0]]


def test_prepare_batch_leaves_out_what_was_not_judged_but_keeps_the_truncated_in_the_baseline():
    (group,) = groups_of([1.0, 0.0, None])
    truncated = episode((0, 1), 0.0, status=Status.TRUNCATED)
    group = group._replace(episodes=(group.episodes[0], truncated, group.episodes[2]))
    _, advantages, batch, _ = prepare_rl_batch([group], GRPO, RLSettings(1), 0)
    assert advantages[0] > 0 > advantages[1] and advantages[2] == 0.0
    assert [sum(row.loss_mask) for row in batch.rows] == [2.0, 0.0, 0.0]
    assert batch.denominator == 2.0


def test_prepare_batch_names_an_advantage_that_is_wrong():
    def short(rewards):
        return rewards[:1]

    with pytest.raises(TrainingError, match="the advantage short"):
        prepare_rl_batch(groups_of([1.0, 0.0]), GRPO._replace(advantage=short), RLSettings(1), 0)


def test_the_bound_on_replies_reaches_dr_grpo():
    config = RLSettings(1, response_tokens_max=10)
    _, _, batch, _ = prepare_rl_batch(groups_of([1.0, 0.0]), GRPO._replace(aggregation="dr_grpo"), config, 0)
    assert batch.rows[0].weights[2:] == [0.1, 0.1]
    assert batch.denominator == 2.0
