"""Note 000: the training infrastructure."""

from __future__ import annotations

import dataclasses
import json
import math

from first_notes import rows
from first_notes.rows import Table, awaited, buffer, new_backend, replies, samples

ROWS = Table()


# --- loops ---


@ROWS("run_sft_training (loops/sft_loop.py)")
def _() -> None:
    from rollouts.training.loops.sft_loop import run_sft_training
    from rollouts.training.metrics import JSONLLogger
    from rollouts.training.types import SFTTrainingConfig

    folder = rows.new_folder()
    logger, config = JSONLLogger(folder), SFTTrainingConfig(num_steps=3, batch_size=2)
    history = awaited(run_sft_training, new_backend(), samples(1.0, 0.0), config, logger)
    assert len(history) == len(rows.metrics_of(folder)) == 3 and history[2]["loss"] < history[0]["loss"]


@ROWS("SFT loop: periodic checkpointing and log_every")
def _() -> None:
    import contextlib
    import io

    from rollouts.training import SFTTrainingConfig, run_sft_training

    backend, out = new_backend(), io.StringIO()
    config = SFTTrainingConfig(num_steps=4, batch_size=2, log_every=2, checkpoint_every=2)
    with contextlib.redirect_stdout(out):
        awaited(run_sft_training, backend, samples(1.0, 0.0), config)
    lines = out.getvalue().splitlines()
    assert [line[:7] for line in lines if line.startswith("Step")] == ["Step 0:", "Step 2:"]
    saved = [line.rpartition(" ")[2] for line in lines if "Saved checkpoint" in line]
    assert saved and awaited(backend.load_checkpoint, saved[-1])


def small_rl(engines: list, **settings: object) -> tuple:
    """The loop of note 000, called by position; the backend, the history and the logged steps."""
    from rollouts.training import AsyncRolloutManager, RLTrainingConfig, RolloutConfig, grpo_loss, run_rl_training

    class Logger:
        lines: list

        def __init__(self) -> None:
            self.lines = []

        def log(self, metrics: dict, step: int) -> None:
            self.lines.append(step)

        def close(self) -> None:
            pass

    backend, logger, data = new_backend(grpo_loss), Logger(), buffer()
    manager = AsyncRolloutManager(data, RolloutConfig(2, 2, generate_fn=replies))
    config = RLTrainingConfig(num_steps=3, baseline=0.5, **settings)
    return backend, awaited(run_rl_training, backend, data, manager, engines, config, logger), logger.lines


@ROWS("run_rl_training (loops/rl_loop.py), signature as given")
def _() -> None:
    from rollouts.training.loops.rl_loop import run_rl_training

    assert callable(run_rl_training)
    backend, history, logged = small_rl([])
    assert [step["mean_reward"] for step in history] == [0.5] * 3 and logged == [0, 1, 2]
    assert backend.weight_version == 3 and all(math.isfinite(step["loss"]) for step in history)


@ROWS("generate → train → weight sync every N steps")
def _() -> None:
    from rollouts.training import SGLangEngine

    with rows.server() as (url, asked):
        small_rl([SGLangEngine(base_url=url)], sync_every=2)
    assert sum("update_weights_from_disk" in path for path in asked) == 1  # after steps 0 and 1


@ROWS("compute_reward(sample) (1.0 if metadata correct)")
def _() -> None:
    from rollouts.training import compute_reward

    assert [compute_reward(sample) for sample in samples(1.0, 0.0)] == [1.0, 0.0]


@ROWS("prepare_grpo_batch")
def _() -> None:
    from rollouts.training import RLTrainingConfig, convert_to_batch, prepare_grpo_batch

    batch = convert_to_batch(samples(1.0, 0.0), 0, 0)
    made = prepare_grpo_batch(batch, [1.0, 0.0], RLTrainingConfig(num_steps=1, baseline=0.25))
    assert made["advantages"].tolist() == [0.75, -0.25] and made["input_ids"].tolist() == [[5, 6, 7], [5, 6, 8]]


@ROWS("compute_advantages")
def _() -> None:
    from rollouts.training import compute_advantages

    assert compute_advantages([1.0, 0.0], 0.5) == [0.5, -0.5] and compute_advantages([2.0]) == [2.0]


# --- rollouts ---


@ROWS("generate_rollout_batches(data_buffer, config, **kw)")
def _() -> None:
    from rollouts.training import RolloutConfig, generate_rollout_batches

    seen = []

    def generate(prompts: list, *, temperature: float) -> list:
        seen.append(temperature)
        return replies(prompts)

    batches = generate_rollout_batches(buffer("a", "b"), RolloutConfig(2, generate_fn=generate), temperature=0.5)
    first, second = next(batches), next(batches)
    assert (first.metadata["epoch_id"], second.metadata["epoch_id"]) == (0, 1) and seen == [0.5, 0.5]


@ROWS("apply_sample_transforms")
def _() -> None:
    from rollouts.training import RolloutConfig, apply_sample_transforms, compute_reward

    config = RolloutConfig(2, reward_fn=compute_reward, filter_fn=lambda group: group[0].reward > 0)
    assert [sample.reward for sample in apply_sample_transforms(samples(1.0, 0.0), config)] == [1.0]


@ROWS("convert_to_batch", "RolloutBatch")
def _() -> None:
    from rollouts.training import RolloutBatch, convert_to_batch

    batch = convert_to_batch(samples(1.0, 0.0), epoch_id=1, step_id=2)
    made = RolloutBatch(batch.tokens, batch.loss_masks, batch.rewards, batch.response_lengths, metadata={"epoch_id": 1})
    assert made.tokens == [[5, 6, 7], [5, 6, 8]] and made.response_lengths == [2, 2]
    assert made.loss_masks == [[0.0, 1.0, 1.0]] * 2 and batch.metadata["step_id"] == 2


@ROWS("extract_sample_fields")
def _() -> None:
    from rollouts.training import extract_sample_fields

    tokens, masks, rewards = extract_sample_fields(samples(1.0))
    assert (tokens, masks, rewards) == ([[5, 6, 7]], [[0.0, 1.0, 1.0]], [0.0])


@ROWS("compute_response_lengths")
def _() -> None:
    from rollouts.training import compute_response_lengths

    assert compute_response_lengths([[0.0, 1.0, 1.0], [0.0]]) == [2, 0]


@ROWS("build_batch_metadata")
def _() -> None:
    from rollouts.training import build_batch_metadata

    found = build_batch_metadata(samples(1.0, 0.0), 1, 2)
    assert (found["epoch_id"], found["step_id"], found["correct"]) == (1, 2, [True, False])


@ROWS("AsyncRolloutManager(data_buffer, config)", "  generate_batch(reward_fn) -> RolloutBatch")
def _() -> None:
    from rollouts.training import AsyncRolloutManager, RolloutBatch, RolloutConfig

    manager = AsyncRolloutManager(buffer(), RolloutConfig(2, 2, generate_fn=replies))
    batch = awaited(manager.generate_batch, lambda sample: 0.25)
    assert isinstance(batch, RolloutBatch) and batch.rewards == [0.25] * 4


def over_sampled() -> tuple:
    """Three of two wanted groups begin; the first group never ends. The batch and the manager."""
    import trio

    from rollouts.training import AsyncRolloutManager, RolloutConfig

    calls = []

    async def generate(prompts: list) -> list:
        calls.append(prompts)
        if len(calls) == 1:
            await trio.sleep_forever()
        return replies(prompts)

    async def main() -> tuple:
        manager = AsyncRolloutManager(buffer(), RolloutConfig(2, 1, over_sampling_factor=1.5, generate_fn=generate))
        async with manager:
            batch = await manager.generate_batch()
            return batch, manager.statistics
        raise AssertionError

    return awaited(main)


@ROWS("  over-sampling: 'keeps best N'")
def _() -> None:
    batch, statistics = over_sampled()
    assert len(batch.tokens) == 2 and statistics.begun == 3  # the first two that are complete
    from rollouts.training import AsyncRolloutManager, RolloutConfig, compute_reward

    def generate(prompts: list) -> list:
        return samples(0.0, 1.0 if prompts[0] == "c" else 0.0, prompts=prompts)

    config = RolloutConfig(1, 2, 3.0, generate_fn=generate, reward_fn=compute_reward, keep="best")
    best = awaited(AsyncRolloutManager(buffer("a", "b", "c"), config).generate_batch)
    assert [group.task.prompt for group in best.kept] == ["c"] and len(best.groups) == 3  # the one with both outcomes


@ROWS("  partial_samples carry-over", "  graceful abort, partials kept")
def _() -> None:
    from rollouts import CalculatorEnvironment, Endpoint
    from rollouts.training import AsyncRolloutManager, RolloutConfig

    assert over_sampled()[1].carried == 1
    place = Endpoint(max_tokens=200, max_turns=8)
    config = RolloutConfig(1, 2, 4.0, endpoint=place, environment=CalculatorEnvironment())

    async def main() -> tuple[list, int]:
        async with AsyncRolloutManager(rollout_config=config) as manager:
            await manager.generate_batch()
            return manager.partial_samples, manager.statistics.carried

    partial, carried = awaited(main)
    assert carried == 3 and all(sum(sample.loss_mask) > 0 for sample in partial if sample.status.value == "pending")


@ROWS("  sync and async generate functions")
def _() -> None:
    from rollouts.training import AsyncRolloutManager, RolloutConfig

    async def generate(prompts: list) -> list:
        return replies(prompts)

    for function in (generate, replies):
        batch = awaited(AsyncRolloutManager(buffer(), RolloutConfig(2, generate_fn=function)).generate_batch)
        assert len(batch.tokens) == 2


@ROWS("  filtering")
def _() -> None:
    from rollouts.training import AsyncRolloutManager, RolloutConfig, check_any_success

    config = RolloutConfig(2, generate_fn=replies, filter_fn=check_any_success, reward_fn=lambda sample: 0.0)
    batch = awaited(AsyncRolloutManager(buffer(), config).generate_batch)
    assert len(batch.groups) == 2 and batch.kept == []


@ROWS("RolloutConfig (6 fields, frozen)")
def _() -> None:
    from rollouts.training import RolloutConfig

    names = [field.name for field in dataclasses.fields(RolloutConfig)]
    assert names[:6] == [
        "batch_size",
        "n_samples_per_prompt",
        "over_sampling_factor",
        "generate_fn",
        "reward_fn",
        "filter_fn",
    ]
    with rows.refused(kind=dataclasses.FrozenInstanceError):
        RolloutConfig(2).batch_size = 3


@ROWS("RolloutManager (deprecated, state_dict)")
def _() -> None:
    from rollouts.training.rollout_gen.rollout_manager import RolloutManager

    from rollouts.training import RolloutConfig

    with rows.warned("RolloutManager is deprecated"):
        manager = RolloutManager(buffer(), RolloutConfig(2, generate_fn=replies))
    next(manager)
    assert manager.state_dict()["step_id"] == 1


# --- data types ---


@ROWS("Sample (9 fields)", "Sample.rollout_log_probs optional")
def _() -> None:
    import rollouts
    from rollouts.training import Sample, types

    assert Sample is types.Sample and issubclass(Sample, rollouts.Sample)
    sample = Sample("?", "4", [1, 2], [0.0, 1.0], 1.0, 3, [0.0, -0.5], {"a": 1}, rollouts.Status.COMPLETED)
    assert (sample.group_index, sample.rollout_log_probs, sample.metadata) == (3, [0.0, -0.5], {"a": 1})
    assert Sample("?").rollout_log_probs is None
    _, history, _ = small_rl([])  # its samples have no logprobs, and half of them a negative advantage
    assert all(step["grad_norm"] > 0 for step in history)


@ROWS("Status")
def _() -> None:
    import rollouts
    from rollouts.training import Status, types

    assert Status is types.Status is rollouts.Status and {"PENDING", "COMPLETED", "TRUNCATED", "ABORTED"} <= set(
        Status.__members__
    )


@ROWS("SFTTrainingConfig(num_steps,batch_size,log_every,checkpoint_every)")
def _() -> None:
    from rollouts.training.types import SFTTrainingConfig

    config = SFTTrainingConfig(num_steps=4, batch_size=2, log_every=1, checkpoint_every=2)
    assert (config.log_every, config.checkpoint_every) == (1, 2)
    with rows.refused("batch_size"):
        SFTTrainingConfig(num_steps=4, batch_size=0)


@ROWS("RLTrainingConfig(num_steps,sync_every,baseline,log_every,checkpoint_every)")
def _() -> None:
    from rollouts.training.types import RLTrainingConfig

    config = RLTrainingConfig(num_steps=4, sync_every=2, baseline=0.5, log_every=1, checkpoint_every=2)
    assert (config.sync_every, config.baseline, config.log_every, config.checkpoint_every) == (2, 0.5, 1, 2)


# --- futures and backends ---


@ROWS("TrainFuture (trio-awaitable)")
def _() -> None:
    from rollouts.training.types import TrainFuture

    future: TrainFuture[int] = TrainFuture()
    future.set_result(3)

    async def both() -> tuple:
        return await future, await future.result()

    assert awaited(both) == (3, 3)


@ROWS("ImmediateTrainFuture")
def _() -> None:
    from rollouts.training.types import ImmediateTrainFuture

    assert ImmediateTrainFuture(5).done() and awaited(ImmediateTrainFuture(5).result) == 5


@ROWS("pipelining: submit, go on, await")
def _() -> None:
    import threading

    from rollouts.training import collate_batch

    backend, gate, batch = new_backend(), threading.Event(), collate_batch(samples(1.0), 1, 0)
    backend.thread.submit(gate.wait)
    futures = [backend.forward_backward(batch), backend.optim_step()]
    were_done = [future.done() for future in futures]
    gate.set()
    assert were_done == [False, False]
    assert futures[0].wait(60)["loss"] > 0 and futures[1].wait(60)["lr"] == 1e-3


@ROWS("TrainingBackend protocol (4 methods)")
def _() -> None:
    from rollouts.training.backends.protocol import TrainingBackend

    names = ("forward_backward", "optim_step", "get_weights", "load_weights")
    backend = new_backend()
    assert all(callable(getattr(TrainingBackend, name)) and callable(getattr(backend, name)) for name in names)
    small_rl([])  # such a backend is enough for the loop


@ROWS("PyTorchTrainingBackend", "  weight version tracking")
def _() -> None:
    from rollouts.training.backends.pytorch import PyTorchTrainingBackend

    from rollouts.training import collate_batch

    backend = new_backend()
    assert isinstance(backend, PyTorchTrainingBackend)
    before = backend.get_weights().wait(60)
    for step in range(2):
        backend.forward_backward(collate_batch(samples(1.0, 0.0), 2, step)).wait(60)
        backend.optim_step().wait(60)
    assert backend.weight_version == 2
    path = awaited(backend.save_checkpoint, 2, {"loss": 1.0})
    backend.load_weights(before).wait(60)
    assert awaited(backend.load_checkpoint, path) == {"loss": 1.0} and backend.weight_version == 2
    name = next(name for name, value in before.items() if value.dim() == 2)
    assert not before[name].equal(backend.get_weights().wait(60)[name])


@ROWS("  FSDP support detection")
def _() -> None:
    from torch.distributed.fsdp import fully_shard

    from rollouts.errors import ConfigError
    from rollouts.training import PyTorchTrainingBackend, create_adamw_optimizer, create_cross_entropy_loss

    with rows.one_rank():
        model = fully_shard(rows.new_model())
        with rows.refused("sharded", "create_fsdp_backend", kind=ConfigError):
            PyTorchTrainingBackend(model, create_adamw_optimizer(model, lr=1e-3), create_cross_entropy_loss(), "x")


@ROWS("FSDPTrainingBackend", "  mixed precision / activation checkpointing / clipping")
def _() -> None:
    import inspect

    from rollouts.training import FSDPTrainingBackend, TrainingBackend, create_fsdp_backend

    for name in ("forward_backward", "optim_step", "get_weights", "load_weights", "save", "load"):
        assert callable(getattr(FSDPTrainingBackend, name)) and callable(getattr(TrainingBackend, name))
    from rollouts.training.backends.fsdp import create_fsdp_backend as component

    settings = rows.settings_of(component)
    assert {"dtype", "gradient_checkpointing", "max_grad_norm"} <= settings, sorted(settings)
    parameters = inspect.signature(create_fsdp_backend).parameters.values()
    required = [p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    assert required == ["model", "lr", "num_steps"], required


@ROWS("  distributed checkpointing")
def _() -> None:
    (path,) = (rows.sharded_run() / "checkpoints").glob("step_*")
    assert json.loads((path / "manifest.json").read_text())["world_size"] == 2


@ROWS("create_pytorch_backend")
def _() -> None:
    from rollouts.training import SFTTrainingConfig, create_pytorch_backend, run_sft_training

    backend = create_pytorch_backend("tiny", lr=1e-3, num_steps=1)
    (metrics,) = awaited(run_sft_training, backend, samples(1.0), SFTTrainingConfig(1, 1))
    backend.close()
    assert metrics["loss"] > 0 and metrics["grad_norm"] > 0


@ROWS("create_warmup_cosine_scheduler", "create_adamw_optimizer", "load_hf_model")
def _() -> None:
    from rollouts.training import create_adamw_optimizer, create_warmup_cosine_scheduler, load_hf_model

    optimizer = create_adamw_optimizer(load_hf_model("tiny", device="cpu"), lr=1e-3)
    scheduler = create_warmup_cosine_scheduler(optimizer, warmup_steps=2, num_steps=4)
    rates = []
    for _ in range(4):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates[0] < rates[1] == 1e-3 and rates[3] < rates[2] <= 1e-3


@ROWS("create_cross_entropy_loss")
def _() -> None:
    import torch

    from rollouts.training import create_cross_entropy_loss

    loss = create_cross_entropy_loss()(torch.zeros(1, 3, 8), torch.tensor([[1, 2, 3]]), torch.tensor([[0, 0, 1]]))
    assert math.isclose(loss.item(), math.log(8), rel_tol=1e-6)


@ROWS("grpo_loss(logits,labels,loss_mask,advantages)", exception="Labels of the same position")
def _() -> None:
    import torch
    from rollouts.training.rl_losses import grpo_loss

    logits, labels, mask = torch.zeros(2, 3, 8), torch.tensor([[1, 2, 3]] * 2), torch.tensor([[0.0, 1, 1]] * 2)
    assert math.isclose(grpo_loss(logits, labels, mask, torch.tensor([2.0, 0.0])).item(), math.log(8), rel_tol=1e-6)


@ROWS("ppo_loss(...)")
def _() -> None:
    import torch
    from rollouts.training.rl_losses import ppo_loss

    logits, labels, mask = torch.zeros(1, 2, 8), torch.tensor([[1, 2]]), torch.tensor([[0.0, 1.0]])
    old = torch.tensor([[0.0, -math.log(8) - 1.0]])  # the ratio is e
    assert math.isclose(ppo_loss(logits, labels, mask, torch.tensor([1.0]), old).item(), -1.2, rel_tol=1e-5)
    wide = ppo_loss(logits, labels, mask, torch.tensor([1.0]), old, clip_range=0.9)
    assert math.isclose(wide.item(), -1.9, rel_tol=1e-5)


# --- weights and data ---


@ROWS("InferenceEngine protocol")
def _() -> None:
    from rollouts.training import InferenceEngine, SGLangEngine, VLLMEngine

    name = "update_weights_from_checkpoint"
    assert all(callable(getattr(kind, name)) for kind in (InferenceEngine, SGLangEngine, VLLMEngine))


@ROWS(
    "SGLangEngine → /update_weights_from_disk",
    "VLLMEngine → /collective_rpc reload_weights",
    "sync_weights_to_engines",
)
def _() -> None:
    from rollouts.models.loading import TINY_PATH
    from rollouts.training import SGLangEngine, VLLMEngine, sync_weights_to_engines

    with rows.server() as (url, asked):
        engines = [SGLangEngine(base_url=url), VLLMEngine(base_url=url)]
        answers = awaited(sync_weights_to_engines, engines, str(TINY_PATH))
    assert [answer["success"] for answer in answers] == [True, True]
    assert {"/update_weights_from_disk", "/collective_rpc"} <= set(asked)


@ROWS("DataBuffer: epochs, seeded shuffle, offset")
def _() -> None:
    from rollouts.training.datasets.data_buffer import DataBuffer

    first, again = (DataBuffer(list("abcdef"), seed=3) for _ in range(2))
    order = [task.prompt for task in first.get_prompts(7)]
    assert sorted(order[:6]) == list("abcdef") and order != list("abcdefa")
    assert (first.epoch_id, first.sample_offset) == (1, 1)
    assert [task.prompt for task in again.get_prompts(7)] == order
    again.load_state_dict(first.state_dict())
    assert again.get_prompts(1) == first.get_prompts(1)


CONVERSATION = [
    {"role": "user", "content": "What is 2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And 3+3?"},
    {"role": "assistant", "content": "6"},
]


@ROWS(
    "datasets/sft.py compute_loss_mask",
    "datasets/sft.py tokenize_conversation (spans)",
    "multi-turn loss masking",
)
def _() -> None:
    from rollouts.training.datasets.sft import compute_loss_mask, tokenize_conversation

    tokens, spans = tokenize_conversation(CONVERSATION, rows.tokenizer())
    mask = compute_loss_mask(tokens, spans)
    assert len(mask) == len(tokens) and len(spans) >= 2
    trained = rows.tokenizer().decode([token for token, live in zip(tokens, mask, strict=True) if live])
    masked = rows.tokenizer().decode([token for token, live in zip(tokens, mask, strict=True) if not live])
    assert "4" in trained and "6" in trained and "What is 2+2?" not in trained
    assert "What is 2+2?" in masked and "And 3+3?" in masked


@ROWS("SFT max_length truncation with validation")
def _() -> None:
    from rollouts.training.datasets.sft import tokenize_conversation

    whole, _ = tokenize_conversation(CONVERSATION, rows.tokenizer())
    cut, spans = tokenize_conversation(CONVERSATION, rows.tokenizer(), max_length=len(whole) - 3)
    assert list(cut) == list(whole)[: len(whole) - 3] and all(end <= len(cut) for _, end in spans)
    with rows.refused():
        tokenize_conversation(CONVERSATION, rows.tokenizer(), max_length=0)


@ROWS("datasets/dataset_loaders.py")
def _() -> None:
    from rollouts.training.datasets.dataset_loaders import load_dataset, load_sft_dataset

    found = load_sft_dataset(rows.conversations_file(), rows.tokenizer())
    assert len(found) == 2 and 0 < sum(found[0].loss_mask) < len(found[0].tokens)
    prompts = load_dataset(rows.write_rows({"prompt": "2 + 2?", "answer": 4}))
    assert [(sample.prompt, sample.metadata["answer"]) for sample in prompts] == [("2 + 2?", 4)]


@ROWS("RL dataset")
def _() -> None:
    out, path = rows.new_folder() / "run", rows.parquet_file({"prompt": "2 + 2?", "answer": "4"}, 40)
    path_of_reward = out.parent / "mine.py"
    path_of_reward.write_text("def short(trajectory) -> float:\n    return float(len(trajectory.last_text) < 9)\n")
    own = ("--env", "prompts", "--data", path, "--reward", f"{path_of_reward}:short")
    rows.command("run", *own, "--steps", "1", "--eval-tasks", "0", *rows.SMALL, "--out", str(out))
    assert len(rows.metrics_of(out)) == 1


# --- commands ---


@ROWS("train.py: modes sft, rl, sft+rl", "SFT → RL checkpoint flow", "loading an SFT checkpoint for RL (TODO 2)")
def _() -> None:
    run = rows.both_phases()
    (checkpoint,) = (run / "sft" / "checkpoints").glob("step_*")
    assert checkpoint.name == "step_000001" and list((run / "rl" / "checkpoints").glob("step_*"))
    assert str(checkpoint) in (run / "rl" / "config.toml").read_text()
    for mode in ("sft", "rl"):
        assert mode in rows.command("run", "--env", "calculator", "--mode", mode, "--steps", "1", "--dry-run")


@ROWS("one Config with sft.* and rl.*")
def _() -> None:
    from rollouts.training import Config

    config = Config(output={"mode": "sft+rl"}, sft={"num_steps": 2, "batch_size": 4}, rl={"num_steps": 3})
    assert (config.sft.num_steps, config.rl.num_steps) == (2, 3)
    settings = config.to_settings()
    assert (settings["steps"], settings["sft"]["steps"], settings["sft"]["prompts_per_step"]) == (3, 2, 4)


@ROWS("FSDP auto-detection, re-launch with torchrun", exception="Detected or explicit")
def _() -> None:
    assert (rows.sharded_run() / "summary.json").is_file()  # `--training fsdp` starts its own ranks


@ROWS("MetricsLogger", "JSONLLogger")
def _() -> None:
    from rollouts.training import metrics

    folder = rows.new_folder()
    logger: metrics.MetricsLogger = metrics.JSONLLogger(folder)
    logger.log({"loss": 0.5}, step=0)
    logger.close()
    assert rows.metrics_of(folder) == [{"step": 0, "loss": 0.5}]


# --- filters ---


def group(*rewards: float, text: str = "x", count: int = 2) -> list:
    return [
        dataclasses.replace(
            sample, reward=reward, response=text, loss_mask=[0.0] + [1.0] * count, tokens=[5] * (count + 1)
        )
        for sample, reward in zip(samples(*rewards), rewards, strict=True)
    ]


@ROWS("check_reward_nonzero_std")
def _() -> None:
    from rollouts.training.filters import check_reward_nonzero_std

    assert check_reward_nonzero_std(group(1.0, 0.0)) and not check_reward_nonzero_std(group(1.0, 1.0))


@ROWS("check_min_reward")
def _() -> None:
    from rollouts.training.filters import check_min_reward

    assert check_min_reward(group(1.0, 0.5)) and not check_min_reward(group(-1.0, -1.0))


@ROWS("check_response_diversity")
def _() -> None:
    from rollouts.training.filters import check_response_diversity

    different = [*group(1.0, text="a"), *group(1.0, text="b")]
    assert check_response_diversity(different) and not check_response_diversity(group(1.0, 1.0, 1.0))


@ROWS("check_reasonable_length")
def _() -> None:
    from rollouts.training.filters import check_reasonable_length

    assert check_reasonable_length(group(1.0)) and not check_reasonable_length(group(1.0), max_length=1)


@ROWS("check_quality_and_diversity")
def _() -> None:
    from rollouts.training.filters import check_quality_and_diversity

    different = [*group(1.0, text="a", count=20), *group(0.0, text="b", count=20)]
    assert check_quality_and_diversity(different) and not check_quality_and_diversity(group(1.0, 1.0))


# --- agents and engines ---


@ROWS("agent_integration.py")
def _() -> None:
    from rollouts.training.agent_integration import episode_samples

    from rollouts.types import Episode, Score, Segment, Status, Task, Trajectory

    segment = Segment([5, 6], [0.0, 1.0], [0.0, -0.5], [-1, 0])
    trajectory = Trajectory(Task("?"), [], [segment], Status.COMPLETED)
    (sample,) = episode_samples(Episode((0, 0), Task("?"), [trajectory], Score(1.0), {}), 0, 0)
    assert (sample.tokens, sample.loss_mask, sample.reward) == ([5, 6], [0.0, 1.0], 1.0)


@ROWS("environment rewards not hard-coded (TODO 3)")
def _() -> None:
    assert any("reward/mean" in line for line in rows.metrics_of(rows.both_phases() / "rl"))
    text = rows.command("run", "--env", "calculator", "--reward", "constant:0.5", "--steps", "1", "--dry-run")
    assert "constant" in text


@ROWS("reward models (TODO 4)", needs="rollouts-reward-model")
def _() -> None:
    from rollouts_reward_model import compute_reward_model_score, load_reward_model

    from rollouts.types import Message

    model = load_reward_model(rows.reward_model_folder())
    assert isinstance(compute_reward_model_score(model, [Message("user", "2 + 2?"), Message("assistant", "4")]), float)


ROWS.later("other tensor libraries: JAX and torchax", "jax_backend.py", "torchax_backend.py", "torch_func.py")


@ROWS("distributed_utils.py")
def _() -> None:
    from rollouts.training import distributed_utils

    assert distributed_utils.place_of_this_process() is None  # no launcher started this process


@ROWS("SGLang and vLLM servers")
def _() -> None:
    from rollouts_servers.sglang import create_sglang_inference
    from rollouts_servers.vllm import create_vllm_inference

    for create in (create_sglang_inference, create_vllm_inference):
        assert {"url", "gpus", "port"} & rows.settings_of(create)
    for kind in ("sglang", "vllm"):
        assert kind in rows.command("run", "--env", "calculator", "--inference", kind, "--steps", "1", "--dry-run")
