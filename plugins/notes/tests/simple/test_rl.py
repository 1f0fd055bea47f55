"""run_rl_training as the first notes call it: a loss of one's own, a generate_fn, servers that load checkpoints."""

from __future__ import annotations

import functools
import itertools
import json

import pytest
import torch
import trio
from rollouts_notes.loops import Progress

from rollouts.errors import ConfigError
from rollouts.training import (
    AsyncRolloutManager,
    DataBuffer,
    JSONLLogger,
    RLTrainingConfig,
    RolloutConfig,
    Sample,
    create_pytorch_backend,
    ppo_loss,
    run_rl_training,
)
from rollouts.training.algorithms.recipes import GRPO

TARGET = 3


class Agent:
    """Samples the next token after the prompt's token from the model itself."""

    def __init__(self, backend, **fields):
        self.backend, self.fields, self.random = backend, fields, torch.Generator().manual_seed(0)

    def run(self, prompts):
        samples = []
        for prompt in prompts:
            with torch.no_grad():
                scores = torch.log_softmax(self.backend.model(torch.tensor([[int(prompt)]]))[0, -1], -1)
            token = int(torch.multinomial(scores.exp(), 1, generator=self.random))
            known = {"rollout_log_probs": [0.0, float(scores[token])]} if "logprobs" in self.fields else {}
            correct = {"metadata": {"correct": token == TARGET}}
            samples.append(Sample(prompt, tokens=[int(prompt), token], loss_mask=[0.0, 1.0], **correct, **known))
        return samples


class Server:
    """Loads checkpoints."""

    def __init__(self):
        self.loaded = []

    async def update_weights_from_checkpoint(self, checkpoint_path):
        self.loaded.append(checkpoint_path.rpartition("/")[2])
        return {"success": True}


def manager_of(backend, *, reward_fn=None, **fields):
    config = RolloutConfig(4, 8, generate_fn=Agent(backend, **fields).run, reward_fn=reward_fn, concurrency=1)
    return AsyncRolloutManager(DataBuffer(["1", "2"]), config)


def train(backend, manager, config, **others):
    return trio.run(functools.partial(run_rl_training, backend, rollout_manager=manager, config=config, **others))


@pytest.mark.parametrize("fields", [{}, {"logprobs": True}], ids=["without logprobs", "with logprobs"])
@pytest.mark.parametrize("loss", ["grpo", "ppo"])
def test_it_learns_with_a_loss_of_ones_own(backend_of, loss, fields):
    """The model learns to answer 3. Without the sampler's logprobs, the ratio of ppo_loss is 1."""
    backend = backend_of(lr=5.0, **({"loss_fn": ppo_loss} if loss == "ppo" else {}))
    history = train(backend, manager_of(backend, **fields), RLTrainingConfig(12, baseline=0.1))
    assert history[0]["mean_reward"] < 0.3 and history[-1]["mean_reward"] > 0.8
    assert backend.version == backend.weight_version == 12
    assert {"loss", "grad_norm", "lr", "max_reward", "min_reward", "reward/mean", "sync/version"} <= history[0].keys()
    assert [metrics["step"] for metrics in history] == list(range(12))


def test_a_step_of_the_loop_is_the_step_by_hand(backend_of):
    """The loop's weights equal those of forward_backward and optim_step on prepare_grpo_batch."""
    from rollouts.training import compute_reward, prepare_grpo_batch

    looped, by_hand = backend_of(), backend_of()
    config = RLTrainingConfig(1, baseline=0.5)
    (metrics,) = train(looped, manager_of(looped), config)

    async def step():
        batch = await manager_of(by_hand).generate_batch()
        rewards = [compute_reward(sample) for sample in batch.samples]
        forward = await by_hand.forward_backward(prepare_grpo_batch(batch, rewards, config)).result()
        await by_hand.optim_step().result()
        return forward

    forward = trio.run(step)
    assert metrics["loss"] == pytest.approx(forward["loss"]) and metrics["loss"] != 0
    for ours, theirs in zip(looped.model.parameters(), by_hand.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_lines_checkpoints_and_servers(backend_of, tmp_path, capsys, monkeypatch):
    checked = "rollouts_notes.loops.sync_weights_to_engines"

    async def load(engines, path):
        return [await engine.update_weights_from_checkpoint(path) for engine in engines]

    monkeypatch.setattr(checked, load)  # the model is no transformers model, so no server could read its folder
    backend, servers = backend_of(), [Server(), Server()]
    manager = manager_of(backend)
    config = RLTrainingConfig(4, sync_every=2, log_every=3, checkpoint_every=2, learning_rate=0.25)
    logger = JSONLLogger(tmp_path / "logs")
    history = trio.run(run_rl_training, backend, manager.data_buffer, manager, servers, config, logger)
    logger.close()
    assert [server.loaded for server in servers] == [["step_000002", "step_000004"]] * 2
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_000002", "step_000004"]
    printed = capsys.readouterr().out.splitlines()
    assert printed[:3] == ["Starting RL training...", "  Steps: 4", "  Weight sync every: 2 steps"]
    first = history[0]
    numbers = f"reward={first['mean_reward']:.2f}, loss={first['loss']:.4f}, grad_norm={first['grad_norm']:.4f}"
    assert printed[3] == f"Step 0: {numbers}, lr=2.5000e-01"
    assert [line.partition(":")[0] for line in printed if line.startswith("Step")] == ["Step 0", "Step 3"]
    assert printed.count("  Synced weights to 2 engines") == 2
    assert f"  Saved checkpoint to {tmp_path / 'step_000004'}" in printed and printed[-1] == "RL training complete!"
    lines = [json.loads(line) for line in (tmp_path / "logs" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert lines[1]["mean_reward"] == history[1]["mean_reward"]


def test_a_real_model_reaches_a_checkpoint_server(tmp_path, monkeypatch):
    """With a model of transformers and a backend of create_pytorch_backend, whose `save` writes the folder."""
    monkeypatch.chdir(tmp_path)
    backend, server = create_pytorch_backend("tiny", 1e-3, 1, "grpo"), Server()
    try:
        sync = Progress(RLTrainingConfig(1, checkpoint_dir="kept"), backend, [server])
        assert trio.run(sync.sync, backend) == {"sync/version": 0.0}
    finally:
        backend.close()
    assert server.loaded == ["step_000000"] and (tmp_path / "kept/step_000000/model.safetensors").is_file()


def test_nothing_is_printed_unless_asked(backend_of, capsys, tmp_path):
    backend = backend_of()
    train(backend, manager_of(backend), RLTrainingConfig(1))
    assert capsys.readouterr().out == "" and not list(tmp_path.iterdir())


def rewards_seen(backend, manager, **others):
    (metrics,) = train(backend, manager, RLTrainingConfig(1), **others)
    return metrics["mean_reward"]


def test_which_reward_counts(backend_of):
    backend = backend_of()
    assert 0 <= rewards_seen(backend, manager_of(backend)) < 0.5  # `correct` of the metadata
    assert rewards_seen(backend, manager_of(backend, reward_fn=lambda sample: 0.75)) == 0.75
    assert rewards_seen(backend, manager_of(backend), reward_fn=lambda sample: 0.25) == 0.25

    async def later(sample):
        await trio.lowlevel.checkpoint()
        return float(sample.metadata["correct"]) + 2.0

    assert 2.0 <= rewards_seen(backend, manager_of(backend), reward_fn=later) < 2.5
    plain = RolloutConfig(
        2, generate_fn=lambda prompts: [Sample(p, tokens=[1], loss_mask=[1.0], reward=0.5) for p in prompts]
    )
    assert rewards_seen(backend, AsyncRolloutManager(DataBuffer(["1"]), plain)) == 0.5


def test_batch_size_is_the_rollouts_of_an_optimizer_step(backend_of):
    backend = backend_of()
    train(backend, manager_of(backend), RLTrainingConfig(2, batch_size=16))
    assert backend.weight_version == 4


def test_training_on_samples_without_a_manager(backend_of):
    backend, seen = backend_of(lr=1.0), itertools.count()
    samples = [
        Sample(str(at), tokens=[1, 3 + (at % 2)], loss_mask=[0, 1], reward=float(at % 2 == 0), group_index=at // 2)
        for at in range(8)
    ]

    async def step(report):
        next(seen)
        assert sorted(len(group.episodes) for group in report.groups) == [2, 2]
        return {}

    config = RLTrainingConfig(20, baseline=0.5, batch_size=4)
    history = train(backend, None, config, samples=samples, on_step=step)
    assert len(history) == next(seen) == 20 and {metrics["mean_reward"] for metrics in history} == {0.5}
    scores = backend.model(torch.tensor([[1]]))[0, -1].softmax(-1)
    assert scores[3] > 0.9 and scores[4] < 0.01


def test_the_backends_own_algorithm_is_the_default(monkeypatch):
    from rollouts_notes import loops

    backend = create_pytorch_backend("tiny", 1e-3, 1, "grpo")
    try:
        assert loops._algorithm_of(backend, RLTrainingConfig(1)) is backend.algorithms["main"] is GRPO
        mine = loops._algorithm_of(backend, RLTrainingConfig(1, baseline=0.5))
        assert mine.terms == GRPO.terms and mine.advantage([1.0, 0.0]).tolist() == [0.5, -0.5]
    finally:
        backend.close()


MIXED = [Server(), object()]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"config": None}, r"expected config=RLTrainingConfig\(num_steps=...\)"),
        ({"rollout_manager": None}, "needs a rollout_manager, or samples to train on; both are missing"),
        ({"data_buffer": DataBuffer(["9"])}, "data_buffer is not the manager's own buffer"),
        ({"samples": [Sample("1")]}, "the prompts come from data_buffer and from samples; give one of the two"),
        ({"rollout_manager": None, "samples": [Sample("1")]}, "sample 0 has no tokens: give a rollout_manager"),
        ({"inference_engines": MIXED}, "mixes servers that load checkpoints with other engines"),
    ],
)
def test_arguments_that_do_not_fit(backend_of, arguments, words):
    backend = backend_of()
    given = {"backend": backend, "rollout_manager": manager_of(backend), "config": RLTrainingConfig(1)} | arguments
    with pytest.raises(ConfigError, match=words):
        trio.run(functools.partial(run_rl_training, **given))
    assert backend.weight_version == 0


def test_groups_of_different_sizes_and_settings_out_of_range(backend_of):
    samples = [Sample("q", tokens=[1], loss_mask=[1], group_index=group) for group in (0, 0, 1)]
    with pytest.raises(ConfigError, match="have 1 to 2 samples"):
        trio.run(functools.partial(run_rl_training, backend_of(), samples=samples, config=RLTrainingConfig(1)))
    with pytest.raises(ConfigError, match="RLTrainingConfig: log_every is -1; expected 0 or more"):
        RLTrainingConfig(1, log_every=-1)
    backend = create_pytorch_backend("tiny", 1e-3, 1, "grpo")
    try:
        with pytest.raises(
            ConfigError, match=r"learning_rate is 0\.1, and the TorchBackend .* it was made with lr=0\.001"
        ):
            train(backend, None, RLTrainingConfig(1, learning_rate=0.1), samples=samples)
    finally:
        backend.close()
