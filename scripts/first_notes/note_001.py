"""Note 001: from SFT to RL."""

from __future__ import annotations

import math
import socket
import subprocess
import sys
from pathlib import Path

from first_notes import rows
from first_notes.rows import Table, awaited, new_backend, samples

ROWS = Table()
CONFIGS = Path(__file__).parents[2] / "configs"


@ROWS("rollouts/providers.py (SGLang provider, D1)")
def _() -> None:
    from rollouts_servers.sglang import create_sglang_inference

    from rollouts.providers import create_sglang_inference as provider

    assert provider is create_sglang_inference


@ROWS("from rollouts.training.datasets import DataBuffer", "load_sft_dataset")
def _() -> None:
    from rollouts.training.datasets import DataBuffer, load_sft_dataset

    found = load_sft_dataset(rows.conversations_file(), rows.tokenizer())
    assert len(found) == 2 and len(found[0].tokens) == len(found[0].loss_mask)
    assert [task.prompt for task in DataBuffer(["a"]).get_prompts(2)] == ["a", "a"]


@ROWS("datasets/sft.py sample preparation (D2)")
def _() -> None:
    from rollouts.training.datasets.sft import collate_batch, compute_loss_mask, tokenize_conversation
    from rollouts.training.types import Sample

    turns = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    tokens, spans = tokenize_conversation(turns, rows.tokenizer())
    batch = collate_batch([Sample(tokens=tokens, loss_mask=compute_loss_mask(tokens, spans))], 1, 0)
    assert batch["input_ids"].tolist() == [list(tokens)] and 0 < batch["loss_mask"].sum() < len(tokens)


@ROWS("from rollouts.training.rollout_gen import AsyncRolloutManager, generate_rollout_batches")
def _() -> None:
    import rollouts.training
    from rollouts.training.rollout_gen import AsyncRolloutManager, generate_rollout_batches

    assert AsyncRolloutManager is rollouts.training.AsyncRolloutManager
    assert generate_rollout_batches is rollouts.training.generate_rollout_batches


@ROWS("from rollouts.training.weight_sync import WeightSyncManager", "online RL weight sync")
def _() -> None:
    from rollouts.training.weight_sync import WeightSyncManager

    from rollouts.inference.embedded.hf import create_hf_inference
    from rollouts.training import create_pytorch_backend

    async def main() -> int:
        backend = create_pytorch_backend("tiny", lr=1e-3, num_steps=1)
        async with create_hf_inference("tiny", backend, 0) as engine:
            syncing = WeightSyncManager([engine])
            await syncing.sync(backend)
        backend.close()
        return syncing.version

    assert awaited(main) == 0


@ROWS("from rollouts.training.backends import PyTorchTrainingBackend")
def _() -> None:
    from rollouts.training.backends import PyTorchTrainingBackend

    assert isinstance(new_backend(), PyTorchTrainingBackend)


@ROWS("from rollouts.training.loops import run_sft_training / run_rl_training")
def _() -> None:
    import rollouts.training
    from rollouts.training.loops import run_rl_training, run_sft_training

    assert (run_sft_training, run_rl_training) == (
        rollouts.training.run_sft_training,
        rollouts.training.run_rl_training,
    )


@ROWS("from rollouts.training.types import RLTrainingConfig, Sample", "Sample.advantages field")
def _() -> None:
    from rollouts.training.types import RLTrainingConfig, Sample

    sample = Sample("What is 2+2?", "4", [1, 2], [0, 1], reward=1.0, rollout_log_probs=[0.0, -0.5], advantages=0.5)
    assert (sample.reward, sample.advantages) == (1.0, 0.5) and RLTrainingConfig(num_steps=1).num_steps == 1


@ROWS("RLSample")
def _() -> None:
    from rollouts.training.types import RLSample

    assert RLSample("?", reward=0.5).reward == 0.5


@ROWS("rl_losses.compute_grpo_loss(samples, config)")
def _() -> None:
    from rollouts.training.rl_losses import compute_grpo_loss

    from rollouts.training import RLTrainingConfig, Sample

    made = Sample("?", tokens=[1, 2, 3], loss_mask=[0, 1, 1], reward=1.0, rollout_log_probs=[0.0, -1.0, -2.0])
    loss = compute_grpo_loss([made], RLTrainingConfig(num_steps=1, baseline=0.5))
    assert math.isclose(float(loss), 0.75, rel_tol=1e-6)


def trained(with_manager: bool) -> list[dict[str, float]]:
    """run_rl_training as this note calls it, with and without a manager."""
    import dataclasses

    from rollouts.training import (
        AsyncRolloutManager,
        RLTrainingConfig,
        RolloutConfig,
        create_pytorch_backend,
        run_rl_training,
    )

    backend = create_pytorch_backend("tiny", lr=1e-3, num_steps=1, algorithm="grpo")
    config = RLTrainingConfig(num_steps=1, learning_rate=None)
    if with_manager:
        manager = AsyncRolloutManager(rollout_config=RolloutConfig(2, 2, generate_fn=rows.replies))
        given = {"rollout_manager": manager, "reward_fn": lambda sample: float(sample.metadata["correct"])}
    else:
        given = {}
    first, second = samples(1.0, 0.0)
    made = [
        dataclasses.replace(first, reward=1.0, group_index=0),
        dataclasses.replace(second, reward=0.0, group_index=0),
    ]
    history: list[dict[str, float]] = awaited(
        run_rl_training, backend=backend, samples=made, config=config, metrics_logger=None, **given
    )
    backend.close()
    return history


@ROWS("run_rl_training(backend=, samples=, config=, reward_fn=, rollout_manager=)", "reward_fn(sample)")
def _() -> None:
    (step,) = trained(with_manager=True)
    assert step["mean_reward"] == 0.5 and step["grad_norm"] > 0


@ROWS("offline RL on pre-generated rollouts")
def _() -> None:
    (step,) = trained(with_manager=False)
    assert step["mean_reward"] == 0.5 and step["grad_norm"] > 0


@ROWS("FSDPTrainingBackend / create_fsdp_backend()")
def _() -> None:
    import inspect

    from rollouts.training import FSDPTrainingBackend, create_fsdp_backend
    from rollouts.training.backends import FSDPTrainingBackend as same

    assert same is FSDPTrainingBackend and callable(FSDPTrainingBackend.forward_backward)
    assert list(inspect.signature(create_fsdp_backend).parameters)[:3] == ["model", "lr", "num_steps"]
    with rows.refused("processes"):
        create_fsdp_backend("tiny", lr=1e-3, num_steps=1, processes=-1)


@ROWS("torchrun --nproc_per_node=N")
def _() -> None:
    import os

    from rollouts.training.backends.rendezvous import place_of_this_process

    given = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        place = place_of_this_process()
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    assert place is not None and (place.rank, place.world_size) == (1, 2)


@ROWS("train.py orchestration", "mode sft / rl / sft+rl routing, source_checkpoint", "checkpointing")
def _() -> None:
    run = rows.both_phases()
    assert (run / "rl" / "checkpoints").is_dir() and (run / "sft" / "checkpoints").is_dir()
    begun = ("--model", str(run / "sft"), "--mode", "rl")
    assert str(run / "sft") in rows.command("run", "--env", "calculator", *begun, "--steps", "1", "--dry-run")
    rows.command("resume", str(run / "rl"), "--steps", "2")
    assert sum("reward/mean" in line for line in rows.metrics_of(run / "rl")) == 2


@ROWS("base_config.py")
def _() -> None:
    from rollouts.training import Config, DataConfig, DeploymentConfig, ModelConfig, TrainingConfig

    kinds = {type(value) for value in vars(Config()).values()}
    assert {ModelConfig, DataConfig, TrainingConfig, DeploymentConfig} <= kinds


ROWS.later("starting a training on another machine", "deploy.py remote deployment (bifrost)")


@ROWS("configs/01_debug_sft_rl.py")
def _() -> None:
    out = rows.new_folder() / "run"
    small = ("--steps", "1", "--sft.steps", "1", "--eval-tasks", "0")
    rows.command(str(CONFIGS / "01_debug_sft_rl.py"), *small, "--out", str(out))
    assert len(rows.metrics_of(out / "sft")) == len(rows.metrics_of(out / "rl")) == 1


@ROWS("from rollouts.training.filters import check_any_success")
def _() -> None:
    import dataclasses

    from rollouts.training.filters import check_any_success

    good = [dataclasses.replace(sample, reward=1.0) for sample in samples(1.0)]
    assert check_any_success(good) and not check_any_success(samples(0.0))


@ROWS(
    "AsyncRolloutManager(rollout_config=, over_sampling_factor=, filter_fn=)",
    "manager.generate_batches()",
    "RolloutConfig(endpoint=, environment=)",
    "from rollouts import Endpoint",
    "from rollouts import CalculatorEnvironment",
)
def _() -> None:
    from rollouts import CalculatorEnvironment, Endpoint
    from rollouts.training import AsyncRolloutManager, RolloutConfig
    from rollouts.training.filters import check_any_success

    config = RolloutConfig(
        endpoint=Endpoint(provider="hf", model="tiny", max_tokens=48),
        environment=CalculatorEnvironment(),
        batch_size=2,
        n_samples_per_prompt=2,
    )
    manager = AsyncRolloutManager(rollout_config=config, over_sampling_factor=1.5, filter_fn=check_any_success)
    batches = awaited(manager.generate_batches)
    assert batches and manager.config.over_sampling_factor == 1.5
    assert all(any(group.rewards) for batch in batches for group in batch.kept)


@ROWS("load_dataset(dataset_spec), data.rl_mixture")
def _() -> None:
    from rollouts.training import load_dataset

    files = [rows.write_rows({"prompt": text, "answer": 4}) for text in ("2 + 2?", "1 + 3?")]
    mixture = [sample for spec in files for sample in load_dataset(spec)]
    assert [sample.prompt for sample in mixture] == ["2 + 2?", "1 + 3?"] and mixture[0].metadata["answer"] == 4


@ROWS("RLTrainingConfig(num_steps,batch_size,learning_rate)")
def _() -> None:
    from rollouts.training import RLTrainingConfig, grpo_loss, run_rl_training

    config = RLTrainingConfig(num_steps=1, batch_size=2, learning_rate=0.125)
    backend = new_backend(grpo_loss)
    (step,) = awaited(run_rl_training, backend=backend, samples=samples(1.0, 0.0), config=config)
    assert step["lr"] == 0.125


@ROWS("run_rl() / train_rl.py standalone script")
def _() -> None:
    examples = Path(__file__).parents[2] / "examples"
    assert "run_rl_training" in (examples / "run_rl.py").read_text()


@ROWS("RL without SGLang running")
def _() -> None:
    from rollouts.config.files import load_file

    tree, _ = load_file(rows.both_phases() / "rl" / "config.toml")
    assert tree["inference"] == "hf" or tree["inference"]["name"] == "hf"


@ROWS("distributed workers / multi-node (M5–M6)")
def _() -> None:
    """Two nodes with a rank each, both on this machine: what torchrun starts on each of two machines."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    out = rows.new_folder() / "run"
    node = ("-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1")
    program = ("-m", "rollouts", "run", "--env", "calculator", "--steps", "1", "--eval-tasks", "0", *rows.SMALL)
    own = ("--training", "fsdp", "--training.device", "cpu", "--out", str(out))
    started = [
        subprocess.Popen(
            [sys.executable, *node, "--master-port", str(port), "--node-rank", str(rank), *program, *own],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=300)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], " ".join(each[-300:] for each in said)
    assert len(rows.metrics_of(out)) == 1


@ROWS("single-node multi-GPU")
def _() -> None:
    assert len(rows.metrics_of(rows.sharded_run())) >= 1


@ROWS("metrics logging")
def _() -> None:
    lines = rows.metrics_of(rows.both_phases() / "rl")
    assert any("reward/mean" in line and "policy/loss" in line for line in lines)


@ROWS("documentation and examples (phase 3)")
def _() -> None:
    root = Path(__file__).parents[2]
    assert len(list((root / "examples").glob("*.py"))) >= 14 and len(list((root / "docs").glob("*.md"))) >= 30
