"""Managers that play an environment against an endpoint."""

from __future__ import annotations

import functools
import math
import sys
from pathlib import Path

import pytest
import torch
import trio

from rollouts.errors import ConfigError, EnvironmentDefinitionError, UnknownComponentError
from rollouts.models.loading import TINY_PATH
from rollouts.training import (
    AsyncRolloutManager,
    DataBuffer,
    Endpoint,
    PyTorchTrainingBackend,
    RLTrainingConfig,
    RolloutConfig,
    Sample,
    create_pytorch_backend,
    grpo_loss,
    load_hf_model,
    run_rl_training,
)
from rollouts.types import Task

sys.path[:0] = [str(Path(__file__).parents[4] / "tests" / "servers")]
from fake_engines import started  # noqa: E402


class Echo:
    """One question; the reward is the length of the reply in words, at most 1."""

    def tasks(self, split, rng):
        while True:
            yield Task("Say something.", answer="x", id=f"{split}{rng.random()}")

    from rollouts import reward

    @reward
    def words(self, trajectory) -> float:
        return min(1.0, len(trajectory.last_text.split()) / 4)


def config(**fields):
    return RolloutConfig(2, 2, endpoint=Endpoint(max_tokens=8), environment=Echo(), **fields)


def test_it_plays_the_environment():
    manager = AsyncRolloutManager(rollout_config=config(), over_sampling_factor=1.5, filter_fn=lambda samples: True)
    assert manager.config.over_sampling_factor == 1.5 and manager.config.filter_fn is not None
    first, second = trio.run(manager.generate_batches, 2)
    for batch in (first, second):
        assert len(batch.samples) == 4 and all(len(sample.tokens) > 3 for sample in batch.samples)
        assert all(sample.metadata["answer"] == "x" for sample in batch.samples)
    assert manager.statistics.begun == 5


def test_it_trains_with_samples_as_prompts():
    """The engine samples with the trainer's weights. The reward function sees whether the environment was satisfied."""
    backend, seen = create_pytorch_backend("tiny", 1e-3, 2, "grpo"), []

    def judge(sample):
        seen.append(sample)
        return 1.0 if sample.metadata["correct"] else 0.25

    samples = [Sample("1 + 1 = ?", metadata={"answer": "2", "level": 1}), Sample("2 + 2 = ?")]
    call = functools.partial(
        run_rl_training,
        backend=backend,
        samples=samples,
        config=RLTrainingConfig(num_steps=2),
        reward_fn=judge,
        rollout_manager=AsyncRolloutManager(rollout_config=config()),
    )
    try:
        history = trio.run(call)
    finally:
        backend.close()
    assert backend.version == 2 and [metrics["sync/version"] for metrics in history] == [1.0, 2.0]
    assert all(math.isfinite(metrics["loss"]) for metrics in history)
    assert len(seen) == 8 and {sample.prompt for sample in seen} == {"1 + 1 = ?", "2 + 2 = ?"}
    assert {sample.metadata["answer"] for sample in seen} == {"2", None}


def test_a_server_plays_for_a_backend_with_a_loss_of_ones_own():
    """Every sync is checked: server and trainer compute the same numbers, and the policy moves."""
    model = load_hf_model("tiny", device="cpu")
    backend = PyTorchTrainingBackend(model, torch.optim.SGD(model.parameters(), lr=1e-2), grpo_loss)
    with started("sglang", TINY_PATH, numbers="transformers") as server:
        place = Endpoint(provider="sglang", api_base=server.url, max_tokens=8)
        manager = AsyncRolloutManager(None, RolloutConfig(2, 2, endpoint=place, environment=Echo()))
        call = functools.partial(
            run_rl_training,
            backend,
            rollout_manager=manager,
            config=RLTrainingConfig(2, baseline=-1.0),
            reward_fn=lambda sample: 1.0,
        )
        history = trio.run(call)
    backend.close()
    assert [metrics["sync/version"] for metrics in history] == [float(backend.version - 1), float(backend.version)]
    assert all(metrics["sync/probe"] < 1e-4 for metrics in history) and history[0]["max_reward"] == 1.0


@pytest.mark.parametrize("given", [{}, {"temperature": 0.5}])
def test_the_temperature_of_the_endpoint_is_trained(given):
    """The engine samples with the trainer's weights, so every ratio is 1."""
    backend = create_pytorch_backend("tiny", 1e-3, 1, "grpo")
    played = RolloutConfig(2, 2, endpoint=Endpoint(max_tokens=8, temperature=0.5), environment=Echo())
    manager = AsyncRolloutManager(rollout_config=played)
    try:
        (metrics,) = trio.run(
            lambda: run_rl_training(backend, rollout_manager=manager, config=RLTrainingConfig(1, **given))
        )
    finally:
        backend.close()
    assert metrics["policy/ratio_mean"] == pytest.approx(1, abs=1e-4)
    assert metrics["mismatch/abs_logp_mean"] == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize(
    ("of_endpoint", "of_config", "words"),
    [
        (0.5, 0.7, "the Endpoint samples at temperature 0.5 and RLTrainingConfig has 0.7; leave temperature out"),
        (0.0, None, "greedy replies cannot be trained"),
    ],
)
def test_temperatures_that_differ(of_endpoint, of_config, words):
    backend = create_pytorch_backend("tiny", 1e-3, 1, "grpo")
    played = RolloutConfig(2, 2, endpoint=Endpoint(temperature=of_endpoint), environment=Echo())
    manager = AsyncRolloutManager(rollout_config=played)
    try:
        with pytest.raises(ConfigError, match=words):
            trio.run(lambda: run_rl_training(backend, None, manager, config=RLTrainingConfig(1, temperature=of_config)))
    finally:
        backend.close()


class NoTasks:
    pass


def test_an_engine_is_closed_if_the_manager_cannot_be_entered(monkeypatch):
    events = []

    class Engine:
        async def __aenter__(self):
            events.append("entered")

        async def __aexit__(self, *error):
            events.append("closed")

    class Refuses:
        def __init__(self, *given):
            raise RuntimeError("no pool")

    manager = AsyncRolloutManager(rollout_config=config())
    manager.inference = Engine()
    monkeypatch.setattr("rollouts.training.rollout_gen.manager.EpisodePool", Refuses)
    with pytest.raises(RuntimeError, match="no pool"):
        trio.run(manager.__aenter__)
    assert events == ["entered", "closed"]
    assert manager.inference is None and not manager.is_open


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: AsyncRolloutManager(), ConfigError, "needs a configuration"),
        (lambda: AsyncRolloutManager(None, RolloutConfig(1)), ConfigError, "neither is given"),
        (
            lambda: AsyncRolloutManager(None, RolloutConfig(1, endpoint=Endpoint())),
            ConfigError,
            "endpoint and environment belong together",
        ),
        (
            lambda: AsyncRolloutManager(None, RolloutConfig(1, endpoint=Endpoint(), environment=NoTasks())),
            EnvironmentDefinitionError,
            "NoTasks has no method `tasks`",
        ),
        (
            lambda: trio.run(AsyncRolloutManager(None, RolloutConfig(1, generate_fn=len)).generate_batch),
            ConfigError,
            r"give data_buffer=DataBuffer\(prompts=",
        ),
        (lambda: Endpoint(provider="sglan").connect(), UnknownComponentError, "did you mean.*sglang"),
    ],
)
def test_what_does_not_fit(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_outside_its_block_it_plays_no_step_in_advance():
    """A manager that enters itself for one step is left after it, and groups of later steps would be played again."""
    calls = []

    async def generate(prompts):
        calls.append(prompts)
        return [Sample(prompt, tokens=[5, 6], loss_mask=[0.0, 1.0], reward=1.0) for prompt in prompts]

    manager = AsyncRolloutManager(
        DataBuffer(prompts=["a", "b", "c"]), RolloutConfig(2, 2, generate_fn=generate, staleness=1)
    )
    for _ in range(3):
        trio.run(manager.generate_batch)
    assert (manager.statistics.begun, manager.statistics.carried, len(calls)) == (6, 0, 6)
